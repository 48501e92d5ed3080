// Block tables: each request's logical blocks and where they lie; the three queues.
"use strict";

const QUEUES = [
  ["running", "Running", "Their tokens are in the pool; each step computes some more."],
  ["waiting", "Waiting", "They hold no blocks: not started yet, or preempted to be computed again."],
  ["swapped", "Swapped", "Their blocks were moved to CPU memory to make room, and come back when there is some."],
];
const STATUS = { running: "▶ running", waiting: "… waiting", swapped: "⇩ swapped out", idle: "‖ idle" };

let value = null;
let shared = new Set();

function makeQueue([name, title, hint]) {
  const number = el("b", { class: "kv-number" }, "0");
  const list = el("div", { class: "kv-queue-list" });
  const show = keyed(
    list,
    (group) => group.id,
    (group) => {
      const { node, update } = ownerButton(group.id, group.label);
      return { node, update: ({ label, idle }) => update(label, idle ? "idle, held by a cache" : name) };
    },
  );
  const update = (groups) => {
    setText(number, NUMBER.format(groups.length));
    show(groups);
  };
  return { node: el("section", { class: "kv-queue", title: hint }, el("h2", {}, number, ` ${title}`), list), update };
}

// --------------------------------------------------------------------------------------------------------- one sequence

/** The chips of one table. They are only touched where the table has changed: most of it never does. */
function makeTable(group) {
  const title = el("div", { class: "kv-quiet kv-number" });
  const list = el("ol", { class: "kv-chips kv-number" });
  const chips = [];

  function chip(index) {
    const physical = document.createTextNode("");
    const node = el("li", {}, el("i", {}, index), physical);
    list.append(node);
    return { node, physical, look: "" };
  }

  function update({ id, numTokens, numComputed, table, status, hasSiblings }) {
    const size = value.block_size;
    setText(title, `${hasSiblings ? `sequence ${id}: ` : ""}${count(numTokens, "token")}, ${count(table.filter((block) => block >= 0).length, "block")}`);
    while (chips.length > table.length) chips.pop().node.remove();
    table.forEach((block, index) => {
      const entry = (chips[index] ||= chip(index));
      const isGone = block < 0;
      const share = isGone ? 0 : Math.max(0, Math.min(1, (numComputed - index * size) / size));
      const isShared = status !== "swapped" && shared.has(block);
      const look = `${block} ${share} ${isShared}`;
      if (look === entry.look) return;
      entry.look = look;
      entry.physical.data = isGone ? "–" : block;
      entry.node.className = isShared ? "kv-shared" : "";
      entry.node.style.setProperty("--share", `${100 * share}%`);
      entry.node.title = isGone
        ? `logical block ${index} lies behind the window, and was given back`
        : `logical block ${index} is ${status === "swapped" ? "CPU" : "physical"} block ${block}: ` +
        `${Math.round(share * size)} of ${size} tokens${isShared ? ", shared with other tables" : ""}`;
    });
  }

  list.style.setProperty("--owner", ownerOf(group).fill);
  return { node: el("div", { class: "kv-table" }, title, list), update };
}

// ---------------------------------------------------------------------------------------------------------- one request

function makeRequest(group) {
  const owner = ownerButton(group.id, group.label);
  const status = el("span", { class: "kv-status" });
  const facts = el("span", { class: "kv-quiet kv-number" });
  const tables = el("div", {});
  const node = el("article", { class: "kv-request" }, el("header", {}, owner.node, status, facts), tables);
  const showTables = keyed(tables, (sequence) => sequence.id, () => makeTable(group.id));

  function update(group) {
    const name = group.idle ? "idle" : group.status;
    owner.update(group.label, name);
    setText(status, STATUS[name] ?? name);
    const { sequences } = group;
    const first = sequences[0];
    const hit = Math.max(...sequences.map((sequence) => sequence.numCached));
    const parts = [`prompt of ${count(first.numPrompt, "token")}`];
    if (hit) parts.push(`${NUMBER.format(hit)} found in the prefix cache`);
    if (sequences.length > 1) parts.push(count(sequences.length, "sequence"));
    if (group.priority) parts.push(`priority ${group.priority}`);
    setText(facts, parts.join(", "));
    node.className = `kv-request kv-${group.status}${selected() === group.id ? " kv-picked" : ""}`;
    showTables(sequences.map((sequence) => ({ ...sequence, status: group.status, hasSiblings: sequences.length > 1 })));
  }
  return { node, update };
}

// ----------------------------------------------------------------------------------------------------------------- view

const queues = Object.fromEntries(QUEUES.map((queue) => [queue[0], makeQueue(queue)]));
const requests = el("div", { class: "kv-requests", tabindex: 0, role: "region", "aria-label": "Block tables" });
const empty = el("div", { class: "kv-empty" }, "No request holds blocks now.");
const hint = el("p", { class: "kv-quiet kv-hint" }, "Small: logical block. Large: the physical block where it lies. Hatched: shared.");
VIEW.append(el("div", { class: "kv-queues" }, ...QUEUES.map(([name]) => queues[name].node)), hint, empty, requests);
const showRequests = keyed(requests, (group) => group.id, makeRequest);

function draw() {
  const groups = JSON.parse(value.groups).map((group) => ({
    ...group,
    sequences: group.sequences.map(([id, numTokens, numComputed, numPrompt, numCached, text]) => ({
      id,
      numTokens,
      numComputed,
      numPrompt,
      numCached,
      table: decodeBlocks(text),
    })),
  }));
  const byId = new Map(groups.map((group) => [group.id, group]));
  for (const [name] of QUEUES) queues[name].update(value[name].map((id) => byId.get(id)).filter(Boolean));
  const holding = groups.filter((group) => group.sequences.some(({ table }) => table.length));
  setHidden(empty, holding.length > 0);
  setHidden(requests, !holding.length);
  showRequests(holding);
}

drawEach((newValue) => {
  const start = performance.now();
  value = newValue ?? { groups: "[]", waiting: [], running: [], swapped: [], shared: "", block_size: 1 };
  shared = new Set(decodeBlocks(value.shared));
  draw();
  VIEW.kvDrawMs = performance.now() - start;
});

onSelect(() => {
  draw();
  const row = requests.querySelector(".kv-picked");
  // Inside the list only: the page stays where it is.
  if (row) requests.scrollTop += row.getBoundingClientRect().top - requests.getBoundingClientRect().top - 8;
});
