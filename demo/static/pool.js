// The pool: every block a cell, the CPU swap space below it, the requests that own them.
"use strict";

const SWAP_ROWS = 1;

/** What a value says of each block: `holders[block]` is a list of `[group, sequence, position]`. */
function readPool(value) {
  const groups = JSON.parse(value.groups).map((group) => ({ ...group, tag: tagOf(group.label) }));
  const pool = { ...value, groups, holders: [], swapHolders: [], byId: new Map(), numSwapped: 0 };
  for (const group of groups) {
    pool.byId.set(group.id, group);
    const holders = group.status === "swapped" ? pool.swapHolders : pool.holders;
    for (const [id, numTokens, numComputed, text] of group.sequences) {
      const tables = text.split("|").map(decodeBlocks); // one for each group of layers
      const sequence = { id, numTokens, numComputed, length: tables[0].length };
      for (const table of tables) {
        table.forEach((block, position) => block >= 0 && (holders[block] ||= []).push([group, sequence, position]));
      }
    }
  }
  // A fork's blocks are swapped once, however many share them.
  pool.numSwapped = pool.swapHolders.reduce((sum) => sum + 1, 0);
  pool.hashes = Uint8Array.from(atob(value.hashes), (character) => character.charCodeAt(0));
  return pool;
}

function refCount(pool, block) {
  const character = pool.refs[block];
  return character === "." || character === "," ? 0 : character === "+" ? 36 : parseInt(character, 36);
}

function hashOf(pool, block) {
  const bytes = pool.hashes.subarray(4 * block, 4 * block + 4);
  if (!bytes.some((byte) => byte)) return "";
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Tokens whose keys and values a holder has in its block. */
function tokensAt(pool, [, sequence, position]) {
  return Math.max(0, Math.min(pool.block_size, sequence.numComputed - position * pool.block_size));
}

const FREE = { kind: "free", owners: [], refs: 0, share: 0, tag: "" };
const CACHED = { ...FREE, kind: "cached" };

function poolCell(pool, block, kind = "held") {
  const holders = (kind === "held" ? pool.holders : pool.swapHolders)[block];
  if (!holders) return kind === "held" && pool.refs[block] === "," ? CACHED : FREE;
  const owners = [];
  let tokens = 0;
  for (const holder of holders) {
    if (!owners.includes(holder[0].id)) owners.push(holder[0].id);
    tokens = Math.max(tokens, tokensAt(pool, holder));
  }
  const [group, sequence] = holders[0];
  // Of several samples or beams, which one it is; they all have their request's colour.
  const tag = holders.length === 1 && group.sequences.length > 1 ? `#${sequence.id % 100}` : group.tag;
  const refs = kind === "held" ? Math.max(refCount(pool, block), holders.length) : holders.length;
  return { kind, owners, refs, share: tokens / pool.block_size, tag };
}

function holderLines(pool, holders) {
  const lines = holders.slice(0, 6).map((holder) => {
    const [group, sequence, position] = holder;
    const first = position * pool.block_size;
    const tokens = tokensAt(pool, holder);
    const span = tokens ? `tokens ${first} to ${first + tokens - 1}` : "no tokens yet";
    return `${group.label}, sequence ${sequence.id}: block ${position + 1} of ${sequence.length} (${span})`;
  });
  if (holders.length > 6) lines.push(`and ${holders.length - 6} more`);
  return lines;
}

function poolLines(pool, block) {
  const holders = pool.holders[block];
  const hash = hashOf(pool, block);
  if (!holders && !refCount(pool, block)) {
    return pool.refs[block] === ","
      ? [`Block ${block}: free, its content is cached`, `hash ${hash}`, "A prompt that begins alike takes it back."]
      : [`Block ${block}: free`];
  }
  const refs = refCount(pool, block);
  const tokens = Math.max(0, ...(holders || []).map((holder) => tokensAt(pool, holder)));
  return [
    `Block ${block}: ${tokens} of ${pool.block_size} tokens`,
    `ref count ${refs === 36 ? "36 or more" : refs}${hash ? `, hash ${hash}` : ", not hashed (not full yet)"}`,
    ...holderLines(pool, holders || []),
  ];
}

function swapLines(pool, block) {
  const holders = pool.swapHolders[block];
  if (!holders) return [`CPU block ${block}: free`];
  return [`CPU block ${block}: swapped out`, ...holderLines(pool, holders)];
}

// --------------------------------------------------------------------------------------------------------------- legend

/** One kind of cell, what it is called, and how many of it there are. */
function legendItem(label, title, cell) {
  const canvas = el("canvas", { "aria-hidden": "true" });
  const number = el("b", { class: "kv-number" }, "0");
  const draw = () => cellPainter(sized(canvas, 16, 16), 16, theme())(0, 0, cell);
  draw();
  onTheme(draw);
  return { node: el("li", { title }, canvas, number, ` ${label}`), set: (value) => setText(number, NUMBER.format(value)) };
}

const SAMPLE = { kind: "held", owners: [0], refs: 1, share: 1, tag: "" };
const legend = {
  held: legendItem("held once", "One block table holds the block. The colour is its request, the filled part its tokens.", SAMPLE),
  shared: legendItem("shared", "Several block tables hold the block (hatched; the number is its ref count).", { ...SAMPLE, refs: 2 }),
  cached: legendItem("cached", "Free: no request holds the block, but its content is kept for prompts that begin alike.", CACHED),
  free: legendItem("free", "No request holds the block.", FREE),
  swapped: legendItem("swapped", "In CPU memory, of a request that waits for room in the pool.", { ...SAMPLE, kind: "swapped" }),
};

// ----------------------------------------------------------------------------------------------------------------- view

let pool = null;
let cells = [];
let swapCells = [];
let swapSize = ""; // of its cells, and of the whole

const pickOwner = (holders) => {
  const groups = [...new Set((holders || []).map(([group]) => group.id))];
  const next = groups[groups.indexOf(selected()) + 1];
  if (next !== undefined) select(next);
  else if (selected() !== null) select(selected());
};

const grid = makeGrid({
  name: "Blocks of the KV pool. Arrow keys walk through them, Enter shows one request alone, Escape all.",
  maxHeight: () => Math.min(400, innerWidth > 900 ? Infinity : 0.3 * innerHeight), // beside the controls, or above
  maxPitch: () => 42,
  hasNumbers: true,
  cellOf: (block) => cells[block],
  describe: (block) => poolLines(pool, block),
  pick: (block) => pickOwner(pool.holders[block]),
});
const swapGrid = makeGrid({
  name: "Blocks of the CPU swap space",
  maxHeight: () => Infinity,
  maxPitch: () => grid.pitch(), // a block is as large here as there
  hasNumbers: true,
  cellOf: (block) => swapCells[block],
  describe: (block) => swapLines(pool, block),
  pick: (block) => pickOwner(pool.swapHolders[block]),
});

const facts = el("div", { class: "kv-quiet kv-number kv-facts" });
const paused = el("span", { class: "kv-paused", hidden: true }, "‖ paused");
const swapTitle = el("div", { class: "kv-quiet kv-number kv-swap-title" });
const swapBox = el("div", { class: "kv-swap" }, swapTitle, swapGrid.node);
const owners = el("div", { class: "kv-owners", role: "group", "aria-label": "Requests in the pool" });
const empty = el("div", { class: "kv-empty" }, "The pool is made with the first request.");

// The scrubber: the last steps, one after the other. At its end the pool is shown as it is.
const scrubber = el("input", { type: "range", min: 0, max: 0, value: 0, class: "kv-scrubber", "aria-label": "Step that is shown", input: () => scrub() });
const live = el("button", { type: "button", class: "kv-live", disabled: true, click: () => goLive() }, "live");
const when = el("span", { class: "kv-number" });
const happened = el("ul", { class: "kv-happened kv-quiet", hidden: true, tabindex: 0, "aria-label": "What happened in this step" });
const timeline = el("div", { class: "kv-timeline" }, el("div", { class: "kv-timeline-row" }, when, scrubber, live), happened);
const body = el(
  "div",
  { hidden: true },
  el("div", { class: "kv-pool-head" }, el("ul", { class: "kv-legend" }, ...Object.values(legend).map(({ node }) => node)), paused),
  facts,
  grid.node,
  timeline,
  swapBox,
  owners,
);
VIEW.append(empty, body);

const showOwners = keyed(
  owners,
  (group) => group.id,
  (group) => {
    const { node, update } = ownerButton(group.id, group.label);
    return { node, update: ({ label, status, sequences }) => update(label, `${status}, ${count(sequences.length, "sequence")}`) };
  },
);

function haveSameOwners(a, b) {
  return a.kind === b.kind && a.refs === b.refs && a.owners.length === b.owners.length && a.owners.every((group, index) => group === b.owners[index]);
}

/** Which cells have changed, and which of them have other owners now. */
function compare(before, after) {
  const moved = [];
  const changed = [];
  after.forEach((cell, block) => {
    const old = before[block];
    if (cell === old) return;
    const isSame = old && haveSameOwners(cell, old);
    if (!isSame) moved.push(block);
    if (!isSame || cell.share !== old.share || cell.tag !== old.tag) changed.push(block);
  });
  return { moved, changed };
}

function show(place, before, after) {
  const { moved, changed } = compare(before, after);
  if (!place.resize(after.length)) place.update(changed, moved);
}

function showSwap() {
  const total = pool.num_swap_blocks;
  setHidden(swapBox, !total);
  if (!total) return;
  setText(swapTitle, `CPU swap space: ${NUMBER.format(pool.numSwapped)} of ${count(total, "block")} in use`);
  // Usually nearly empty and as large as the pool: the first rows, and as many more as were ever used.
  const size = `${grid.pitch()} ${total}`;
  const leastShown = SWAP_ROWS * columnsIn(swapGrid.width(), grid.pitch());
  const mostUsed = size === swapSize ? swapCells.length : 0;
  const shown = Math.min(total, Math.max(mostUsed, leastShown, pool.swapHolders.length));
  const before = swapCells;
  swapCells = Array.from({ length: shown }, (_, block) => poolCell(pool, block, "swapped"));
  show(swapGrid, before, swapCells);
  if (size !== swapSize) swapGrid.drawAll();
  swapSize = size;
}

function showCounts() {
  const counts = { held: 0, shared: 0, cached: 0, free: 0, swapped: pool.numSwapped };
  for (let block = 0; block < pool.num_blocks; block += 1) {
    const refs = refCount(pool, block);
    counts[refs > 1 ? "shared" : refs ? "held" : pool.refs[block] === "," ? "cached" : "free"] += 1;
  }
  for (const [kind, item] of Object.entries(legend)) item.set(counts[kind]);
  const size = pool.bytes_per_block ? `, ${formatBytes(pool.bytes_per_block)} each` : "";
  const whole = pool.bytes_per_block ? `, ${formatBytes(pool.bytes_per_block * pool.num_blocks)} in all` : "";
  setText(facts, `${count(pool.num_blocks, "block")} of ${pool.block_size} tokens${size}${whole}. Step ${NUMBER.format(pool.num_steps)}.`);
}

function draw(value) {
  const start = performance.now();
  setHidden(empty, Boolean(value?.num_blocks));
  setHidden(body, !value?.num_blocks);
  if (!value?.num_blocks) return;
  pool = readPool(value);
  showCounts();
  setHidden(paused, !pool.is_paused);
  const before = cells;
  cells = Array.from({ length: pool.num_blocks }, (_, block) => poolCell(pool, block));
  show(grid, before, cells);
  showSwap();
  showOwners(pool.groups);
  if (selected() !== null && !pool.byId.has(selected())) select(selected());
  VIEW.kvDrawMs = performance.now() - start;
}

// -------------------------------------------------------------------------------------------------------- the last steps

let latest = null; // the pool as it is
let steps = []; // those that can be gone back to
let shown = null; // the step that is shown; null: the latest
let isAsking = false;

function showTime() {
  scrubber.max = Math.max(0, steps.length - 1);
  scrubber.value = shown === null ? scrubber.max : Math.max(0, steps.findIndex((step) => step >= shown));
  scrubber.disabled = steps.length < 2;
  const step = `step ${NUMBER.format(shown ?? latest?.num_steps ?? 0)}`;
  setText(when, shown === null ? step : `as of ${step}`);
  scrubber.setAttribute("aria-valuetext", shown === null ? `${step}, live` : step);
  live.disabled = shown === null;
  VIEW.classList.toggle("kv-is-past", shown !== null);
}

function goLive() {
  shown = null;
  setHidden(happened, true);
  showTime();
  draw(latest);
}

/** Asks for the step under the thumb; while an answer is on its way, only the newest wish is kept. */
async function scrub() {
  const index = Number(scrubber.value);
  if (index >= steps.length - 1) return goLive();
  shown = steps[index];
  showTime();
  if (isAsking) return;
  isAsking = true;
  let asked = null;
  while (shown !== null && shown !== asked) {
    asked = shown;
    const past = await server.past(asked);
    if (shown === null || !past) continue; // gone meanwhile, or too long ago
    draw(past);
    happened.replaceChildren(...(past.happened.length ? past.happened : ["No block changed hands."]).map((line) => el("li", {}, line)));
    setHidden(happened, false);
  }
  isAsking = false;
}

drawEach((value) => {
  latest = value;
  steps = decodeBlocks(value?.steps);
  showTime();
  if (shown === null) draw(value);
});

onSelect(() => pool && showOwners(pool.groups));
