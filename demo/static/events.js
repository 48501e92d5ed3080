// The event log: what happened to the blocks, newest first.
"use strict";

// Icon and word of each kind; the sentence itself comes with the event.
const KINDS = {
  admitted: ["→", "admitted"],
  prefix_hit: ["↺", "prefix hit"],
  allocated: ["+", "allocated"],
  shared: ["=", "shared"],
  copied: ["⇉", "copied"],
  freed: ["−", "freed"],
  evicted: ["×", "evicted"],
  preempted: ["!", "preempted"],
  swapped_out: ["↓", "swapped out"],
  swapped_in: ["↑", "swapped in"],
  finished: ["✓", "finished"],
  step: ["•", "step"],
};
const NEW_POOL = "new pool"; // told between the events of one engine and the next
// Of steps there are many, and they say little: they have a smaller share of the list, and are hidden at first.
const MOST_ROWS = { step: 60, other: 300 };

const hidden = new Set(["step"]);
const rows = { step: [], other: [] }; // oldest first
let lastId = -1;
let lastTime = 0;
let held = null; // events that came while the list is held

const list = el("ol", { class: "kv-log", "aria-label": "Events, newest first", tabindex: 0 });
const empty = el("div", { class: "kv-empty" }, "Nothing has happened yet.");
const none = el("div", { class: "kv-empty", hidden: true }, "Every kind that has happened is switched off above.");

function makeRow([id, kind, group, step, time, text]) {
  const [icon, word] = Object.hasOwn(KINDS, kind) ? KINDS[kind] : ["·", kind];
  const clock = new Date(1000 * time).toLocaleTimeString("en-GB");
  return el(
    "li",
    { "data-kind": kind, "data-id": id, "data-group": group, hidden: hidden.has(kind) },
    el("span", { class: "kv-kind" }, el("b", { "aria-hidden": "true" }, icon), word),
    el("span", { class: "kv-sentence" }, group === null ? null : swatch(group), text),
    el("span", { class: "kv-when kv-number kv-quiet" }, `step ${NUMBER.format(step)}, ${clock}`),
  );
}

function dim(row) {
  const group = selected();
  row.classList.toggle("kv-dim", group !== null && row.dataset.group !== String(group));
}

function add(events) {
  if (!events.length) return;
  const [top, before] = [list.scrollTop, list.scrollHeight];
  const fragment = document.createDocumentFragment();
  for (const event of events) {
    const row = makeRow(event);
    dim(row);
    fragment.prepend(row);
    rows[event[1] === "step" ? "step" : "other"].push(row);
  }
  list.prepend(fragment);
  // A reader who has scrolled down keeps what they read before their eyes.
  if (top > 0) list.scrollTop = top + list.scrollHeight - before;
  for (const [kind, most] of Object.entries(MOST_ROWS)) while (rows[kind].length > most) rows[kind].shift().remove();
  sum();
}

/** What is there to see. */
function sum() {
  const all = [...rows.step, ...rows.other];
  const isAnyShown = all.some((row) => !row.hidden);
  setHidden(empty, all.length > 0);
  setHidden(none, !all.length || isAnyShown);
  setHidden(list, !isAnyShown);
  for (const [kind, button] of Object.entries(buttons)) button.setAttribute("aria-pressed", String(!hidden.has(kind)));
  setText(hold, held ? `Show ${NUMBER.format(held.length)} new` : "Hold");
  hold.setAttribute("aria-pressed", String(held !== null));
}

function toggle(kind) {
  if (!hidden.delete(kind)) hidden.add(kind);
  for (const row of [...rows.step, ...rows.other]) row.hidden = hidden.has(row.dataset.kind);
  sum();
}

const buttons = Object.fromEntries(
  Object.entries(KINDS).map(([kind, [icon, word]]) => [
    kind,
    el("button", { type: "button", class: "kv-filter", "data-kind": kind, click: () => toggle(kind) }, `${icon} ${word}`),
  ]),
);
const hold = el("button", {
  type: "button",
  class: "kv-filter kv-hold",
  title: "Stop the list to read it; what happens meanwhile is shown later.",
  click: () => {
    const waiting = held ?? [];
    held = held ? null : [];
    add(waiting);
    sum();
  },
});
const filters = el("div", { class: "kv-filters", role: "group", "aria-label": "Kinds of events shown" });
filters.append(...Object.values(buttons), hold);
VIEW.append(filters, empty, none, list);
sum();

drawEach((value) => {
  const events = value ? JSON.parse(value.events) : [];
  if (!events.length) return;
  const newest = events.at(-1);
  // Another pool counts from the start: what has an old number was not there then.
  const isAnew = newest[0] < lastId || events.some(([id, , , , time]) => id <= lastId && time > lastTime + 1);
  const fresh = isAnew ? events : events.filter(([id]) => id > lastId);
  if (!fresh.length) return;
  if (isAnew) fresh.unshift([0, NEW_POOL, null, 0, fresh[0][4], "The pool was made anew; its events are counted from the start."]);
  [lastId, lastTime] = [newest[0], newest[4]];
  if (held) {
    held = [...held, ...fresh].slice(-MOST_ROWS.other - MOST_ROWS.step);
    sum();
  } else add(fresh);
});

onSelect(() => [...rows.step, ...rows.other].forEach(dim));
