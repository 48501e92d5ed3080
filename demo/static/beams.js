// The beam tree, from left to right: every hypothesis that was explored, which died and which were returned.
"use strict";

const ROW = 42;
const BOX = 22;
const TOP = 24;
const GAP = 22;
const LONGEST = 14; // characters of a token
const BADGE_ROOM = 2; // columns kept free behind a returned beam

const ruler = document.createElement("canvas").getContext("2d");
const scroll = el("div", { class: "kv-tree", tabindex: 0, role: "group", "aria-label": "Beam tree. Arrow keys follow the beams." });
const empty = el("div", { class: "kv-empty" }, "Run a beam search: its tree grows here.");
const facts = el("div", { class: "kv-quiet kv-number" });
const told = el("div", { class: "kv-told", "aria-live": "polite" });
const key = el(
  "ul",
  { class: "kv-key" },
  ...[["kept", "returned"], ["alive", "still searched"], ["dead", "given up"]].map(([fate, word]) =>
    el("li", {}, el("span", { class: `kv-line-${fate}` }), word),
  ),
);
const body = el("div", { hidden: true }, el("div", { class: "kv-tree-head" }, facts, key), scroll, told);
VIEW.append(empty, body);

let ordered = [];
let cursor = null;
let shapes = new Map();

function shortened(token) {
  const text = visible(token);
  return text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text;
}

function formatScore(score) {
  return score === null ? "" : score.toFixed(2).replace("-", "−");
}

function tellScore(node, length) {
  if (node.score === null) return "How likely it is, is asked when the search is done.";
  const own = node.score - (node.parent?.score ?? 0);
  return `Sum of log-probabilities ${formatScore(node.score)} (${formatScore(node.score / length)} a token), this token ${formatScore(own)}.`;
}

/** What is told of a node: the text so far, its score, and what the last token added. */
function tell(node) {
  if (!node) return told.replaceChildren(el("span", { class: "kv-quiet" }, "Point at a token, or use the arrow keys: the whole text so far."));
  const path = pathTo(node);
  const fate = node.rank === null ? { kept: "part of a returned beam", alive: "still searched", dead: "given up" }[node.fate] : `returned, rank ${node.rank}`;
  told.replaceChildren(
    el("q", {}, path.map(({ token }) => token).join("")),
    el(
      "div",
      { class: "kv-quiet kv-number" },
      `Step ${node.step}, ${fate}. ${tellScore(node, path.length)}`,
    ),
  );
}

function point(node) {
  for (const shape of shapes.values()) shape.classList.remove("kv-on");
  for (const each of node ? pathTo(node) : []) shapes.get(each.id).classList.add("kv-on");
  tell(node);
}

function draw() {
  const style = getComputedStyle(VIEW);
  ruler.font = `12px ${style.getPropertyValue("--font-mono") || "monospace"}`;
  const numLanes = layLanes(ordered, BADGE_ROOM);
  const firstStep = ordered[0].step;
  const widths = [];
  for (const node of ordered) {
    const column = node.step - firstStep;
    widths[column] = Math.max(widths[column] ?? 30, ruler.measureText(shortened(node.token)).width + 14);
  }
  const root = 58;
  const lefts = [root + GAP];
  for (const width of widths) lefts.push(lefts.at(-1) + (width ?? 0) + GAP);
  const middle = (lane) => TOP + lane * ROW + BOX / 2;
  const leftOf = (node) => lefts[node.step - firstStep];
  const widthOf = (node) => ruler.measureText(shortened(node.token)).width + 14;

  const steps = widths.map((width, column) =>
    svg("text", { class: "kv-step", x: lefts[column] + 2, y: 12 }, firstStep + column),
  );
  shapes = new Map();
  // Given-up beams first: what was returned lies above them.
  const drawn = [...ordered].sort((a, b) => (a.fate === "dead" ? 0 : 1) - (b.fate === "dead" ? 0 : 1) || b.best - a.best || 0);
  for (const node of drawn) {
    const [x, y] = [leftOf(node), middle(node.lane)];
    const fromX = node.parent ? leftOf(node.parent) + widthOf(node.parent) : root;
    const fromY = node.parent ? middle(node.parent.lane) : middle(0);
    const bend = x - GAP / 2;
    const shape = svg(
      "g",
      { class: `kv-node kv-${node.fate}${node.best === 1 ? " kv-best" : ""}`, pointerenter: () => point(node), click: () => moveTo(node) },
      svg("path", { class: "kv-edge", d: `M${fromX} ${fromY}H${bend - GAP / 2}C${bend} ${fromY} ${bend} ${y} ${x} ${y}` }),
      svg("rect", { class: "kv-box", x, y: y - BOX / 2, width: widthOf(node), height: BOX, rx: 4 }),
      svg("text", { class: "kv-token", x: x + 7, y: y + 4 }, shortened(node.token)),
      svg("text", { class: "kv-score", x: x + 7, y: y + BOX / 2 + 11 }, formatScore(node.score)),
    );
    if (node.rank !== null) {
      const badge = `#${node.rank}  ${formatScore(node.score)}`;
      shape.append(
        svg("rect", { class: "kv-badge", x: x + widthOf(node) + 6, y: y - 10, width: 20 + 7 * badge.length, height: 20, rx: 10 }),
        svg("text", { class: "kv-rank", x: x + widthOf(node) + 16, y: y + 4 }, badge),
      );
    }
    shapes.set(node.id, shape);
  }
  const width = lefts.at(-1) + 120;
  const height = TOP + numLanes * ROW;
  const at = [scroll.scrollLeft, scroll.scrollTop];
  scroll.replaceChildren(
    svg(
      "svg",
      { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", pointerleave: () => point(cursor) },
      ...steps,
      ...[...shapes.values()],
      svg("rect", { class: "kv-prompt", x: 0, y: middle(0) - BOX / 2, width: root, height: BOX, rx: 4 }),
      svg("text", { class: "kv-token", x: 8, y: middle(0) + 4 }, "prompt"),
    ),
  );
  [scroll.scrollLeft, scroll.scrollTop] = at;
}

// -------------------------------------------------------------------------------------------------------------- keyboard

function moveTo(node) {
  cursor = node;
  point(node);
  const box = shapes.get(node.id).querySelector(".kv-box");
  const [x, y] = [Number(box.getAttribute("x")), Number(box.getAttribute("y"))];
  if (x < scroll.scrollLeft + 20 || x + 160 > scroll.scrollLeft + scroll.clientWidth) scroll.scrollLeft = x - scroll.clientWidth / 2;
  if (y < scroll.scrollTop || y + ROW > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = y - scroll.clientHeight / 2;
}

function neighbour(name) {
  if (!cursor) return [...ordered].sort(compareBeams)[0];
  if (name === "ArrowRight") return cursor.children[0];
  if (name === "ArrowLeft") return cursor.parent;
  const column = ordered.filter((node) => node.step === cursor.step).sort((a, b) => a.lane - b.lane);
  return column[column.indexOf(cursor) + (name === "ArrowDown" ? 1 : -1)];
}

scroll.addEventListener("keydown", (event) => {
  if (!["ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown"].includes(event.key) || !ordered.length) return;
  event.preventDefault();
  const node = neighbour(event.key);
  if (node) moveTo(node);
});

drawEach((value) => {
  const rows = value?.nodes ?? [];
  setHidden(empty, rows.length > 0);
  setHidden(body, !rows.length);
  ordered = readTree(rows);
  const before = cursor?.id;
  cursor = ordered.find(({ id }) => id === before) ?? null;
  if (!rows.length) return;
  draw();
  point(cursor);
  const kept = ordered.filter(({ rank }) => rank !== null).length;
  setText(facts, `${count(ordered.length, "token")} explored${kept ? `, ${count(kept, "beam")} returned` : ""}`);
});
