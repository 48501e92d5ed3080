// Memory maps: the same run under several ways to keep keys and values, drawn to one scale. Area is memory.
"use strict";

const TALLEST = 300;
const MOST_LINES = 48;
const USED = "#0072b2";
const WASTED = "#d55e00";

const panels = el("div", { class: "kv-maps" });
const scale = el("p", { class: "kv-quiet kv-number kv-scale" });
const empty = el("div", { class: "kv-empty" }, "Make the runs: their memory is drawn here, to one scale.");
const key = el(
  "ul",
  { class: "kv-key" },
  el("li", {}, el("span", { class: "kv-used" }), "tokens stored"),
  el("li", {}, el("span", { class: "kv-wasted" }), "reserved, nothing in it"),
);
const body = el("div", { hidden: true }, key, panels, scale);
VIEW.append(empty, body);

/**
 * Where each row lies: `[row, line, start]`. A line each; where that would be too many, behind each other in lines of `most`
 * tokens. Either way its area is its memory.
 */
function shelve(rows, most) {
  if (rows.length <= MOST_LINES) return rows.map((row, line) => [row, line, 0]);
  let line = 0;
  let start = 0;
  return rows.map((row) => {
    if (start && start + row[1] > most) {
      line += 1;
      start = 0;
    }
    const place = [row, line, start];
    start += row[1];
    return place;
  });
}

function describe([label, reserved, used], bytesPerToken) {
  const bytes = bytesPerToken ? `, ${formatBytes(reserved * bytesPerToken)}` : "";
  return [label, `${NUMBER.format(used)} of ${count(reserved, "token")} used${bytes}`, `${NUMBER.format(reserved - used)} wasted`];
}

function makePanel(map, most, lineHeight) {
  const places = shelve(map.rows, most);
  const canvas = el("canvas", { "aria-hidden": "true" });
  const spoken = el("div", { class: "kv-unseen", "aria-live": "polite" });
  const frame = el("div", { class: "kv-map", tabindex: 0, role: "group", "aria-label": `${map.name}: ${map.summary}. Arrow keys tell of each row.` }, canvas);
  const node = el(
    "section",
    { class: "kv-panel" },
    el("h2", {}, map.name),
    el("div", { class: "kv-waste" }, el("b", { class: "kv-number" }, formatPercent(map.waste)), " wasted"),
    frame,
    el("div", { class: "kv-number" }, map.summary),
    el("p", { class: "kv-quiet" }, map.note),
    spoken,
  );
  const tip = tooltip(VIEW);
  let unit = 1;
  let cursor = null;

  function draw() {
    if (!frame.clientWidth) return;
    const width = frame.clientWidth;
    unit = width / most;
    const lines = places.length ? places.at(-1)[1] + 1 : 1;
    const context = sized(canvas, width, lines * lineHeight);
    const colors = theme();
    context.clearRect(0, 0, width, lines * lineHeight);
    const hatch = hatching(context, WASTED, 4);
    for (const [index, [[label, reserved, used], line, start]] of places.entries()) {
      const [x, y, w] = [start * unit, line * lineHeight, reserved * unit];
      const [gapX, gapY] = [w > 4 ? 1 : 0, lineHeight > 5 ? 1 : 0];
      const [wide, high] = [w - gapX, lineHeight - gapY];
      context.fillStyle = hatch;
      context.fillRect(x, y, wide, high);
      context.fillStyle = USED;
      context.fillRect(x, y, Math.min(wide, used * unit), high);
      if (high >= 11 && used * unit > 9 * label.length) {
        context.fillStyle = "#ffffff";
        context.font = `10px ${colors.font}`;
        context.textBaseline = "middle";
        context.fillText(label, x + 5, y + high / 2 + 0.5);
      }
      if (index === cursor) {
        context.strokeStyle = colors.text;
        context.lineWidth = 2;
        context.strokeRect(x + 1, y + 1, Math.max(2, wide - 2), high - 2);
      }
    }
  }

  function show(index, isSpoken) {
    cursor = index;
    draw();
    if (index === null) return tip.hide();
    const [row, line, start] = places[index];
    const lines = describe(row, map.bytes_per_token);
    const [at, host] = [canvas.getBoundingClientRect(), VIEW.getBoundingClientRect()];
    tip.show(at.left - host.left + start * unit, at.top - host.top + (line + 0.5) * lineHeight, lines);
    if (isSpoken) setText(spoken, lines.join(". "));
  }

  canvas.addEventListener("pointermove", (event) => {
    const at = canvas.getBoundingClientRect();
    const token = (event.clientX - at.left) / unit;
    const onLine = Math.floor((event.clientY - at.top) / lineHeight);
    const index = places.findIndex(([row, line, start]) => line === onLine && start <= token && token < start + row[1]);
    const found = index < 0 ? null : index;
    if (found !== cursor) show(found);
  });
  canvas.addEventListener("pointerleave", () => show(null));
  frame.addEventListener("blur", () => show(null));
  frame.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!move || !places.length) return;
    event.preventDefault();
    show(Math.max(0, Math.min(places.length - 1, (cursor ?? -1) + move)), true);
  });
  onWidth(frame, draw);
  return { node, draw };
}

let shown = [];

drawEach((value) => {
  const maps = value?.maps ?? [];
  setHidden(empty, maps.length > 0);
  setHidden(body, !maps.length);
  for (const tip of VIEW.querySelectorAll(".kv-tip")) tip.remove();
  const most = Math.max(1, ...maps.flatMap((map) => map.rows.map(([, reserved]) => reserved)));
  const lines = Math.max(1, ...maps.map(({ rows }) => (rows.length ? shelve(rows, most).at(-1)[1] + 1 : 0)));
  const lineHeight = Math.max(4, Math.min(18, Math.floor(TALLEST / lines)));
  const named = maps.map((map) => {
    const [used, reserved] = [map.used, map.reserved].map((tokens) =>
      map.bytes_per_token ? formatBytes(tokens * map.bytes_per_token) : count(tokens, "token"),
    );
    return { ...map, summary: `${used} used of ${reserved} reserved` };
  });
  shown = named.map((map) => makePanel(map, most, lineHeight));
  panels.replaceChildren(...shown.map(({ node }) => node));
  setText(scale, `The width of a map is ${count(most, "token")} in all of them.`);
});

onTheme(() => shown.forEach(({ draw }) => draw()));
