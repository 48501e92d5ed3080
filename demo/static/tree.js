// Where the beams lie: columns are steps, rows are lanes that one beam after another uses.
"use strict";

/** Links `[id, parent, token, score, step, rank]` and says of each node what becomes of it. */
function readTree(rows) {
  const nodes = new Map();
  for (const [id, parent, token, score, step, rank] of rows)
    nodes.set(id, { id, parent, token, score, step, rank, children: [], lane: 0, best: Infinity, depth: step });
  for (const node of nodes.values()) {
    node.parent = nodes.get(node.parent) ?? null;
    node.parent?.children.push(node);
  }
  const ordered = [...nodes.values()].sort((a, b) => a.step - b.step || a.id - b.id);
  // Children come after their parents, so one way up is enough.
  for (const node of [...ordered].reverse()) {
    node.best = Math.min(node.rank ?? Infinity, ...node.children.map((child) => child.best));
    node.depth = Math.max(node.step, ...node.children.map((child) => child.depth));
  }
  const lastStep = Math.max(0, ...ordered.map((node) => node.step));
  const isDecided = ordered.some((node) => node.rank !== null);
  for (const node of ordered) node.fate = node.best < Infinity ? "kept" : !isDecided && node.depth === lastStep ? "alive" : "dead";
  return ordered;
}

/** Better first: leads to a better returned beam, goes further, scores more. */
function compareBeams(a, b) {
  const byRank = a.best === b.best ? 0 : a.best - b.best;
  return byRank || b.depth - a.depth || (b.score ?? -Infinity) - (a.score ?? -Infinity) || a.id - b.id;
}

/**
 * Gives each node its lane. A beam is a chain: a node, its best child, that one's best child. It keeps its lane from the
 * first to the last of them, and then the lane is free for another. Returns how many lanes that took.
 */
function layLanes(ordered, roomAfterReturned) {
  const heads = ordered.filter((node) => !node.parent || node.parent.children.sort(compareBeams)[0] !== node);
  const roots = ordered.filter((node) => !node.parent).sort(compareBeams);
  heads.sort((a, b) => a.step - b.step || compareBeams(a, b));
  const lanes = []; // of each lane the steps from which to which it is taken
  for (const head of heads) {
    const chain = [head];
    while (chain.at(-1).children.length) chain.push(chain.at(-1).children[0]);
    const tail = chain.at(-1);
    const from = head.step - 1;
    const to = tail.step + (tail.rank === null ? 0 : roomAfterReturned);
    const wish = head.parent ? head.parent.lane : roots.indexOf(head);
    const isFree = (lane) => !(lanes[lane] ?? []).some(([first, last]) => first <= to && from < last);
    let lane = null;
    for (let distance = 0; lane === null; distance += 1)
      lane = [wish + distance, wish - distance].find((each) => each >= 0 && isFree(each)) ?? null;
    while (lanes.length <= lane) lanes.push([]);
    lanes[lane].push([from, to]);
    for (const node of chain) node.lane = lane;
  }
  return lanes.length;
}

/** Tokens as one can see them. */
function visible(token) {
  return token.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍") || "∅";
}

function pathTo(node) {
  const path = [];
  for (let each = node; each; each = each.parent) path.unshift(each);
  return path;
}
