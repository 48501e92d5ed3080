// A grid of blocks on a canvas: laid out for its width, painted cell by cell, walked through by mouse and arrow keys.
"use strict";

const GLOW_MS = 700;
const MOST_GLOWING = 600; // where everything changes, nothing needs pointing out

/** How many cells fit side by side, in fours: rows begin with round numbers. */
function columnsIn(width, pitch) {
  const columns = Math.max(1, Math.floor(width / pitch));
  return columns < 12 ? columns : columns - (columns % 4);
}

/** The largest cells with which `total` of them fit into a width and a height. */
function layOut(total, width, { maxHeight, maxPitch, hasNumbers }) {
  for (let pitch = maxPitch(); ; pitch -= 1) {
    const isNumbered = hasNumbers && pitch >= 9 && pitch < NUMBERED_CELL && width > 480;
    const margin = isNumbered ? 10 + 7 * String(Math.max(total - 1, 0)).length : 0;
    const columns = columnsIn(width - margin, pitch);
    const rows = Math.max(1, Math.ceil(total / columns));
    if (rows * pitch <= maxHeight() || pitch <= 6) return { pitch, columns, rows, margin, isNumbered };
  }
}

/**
 * Makes a grid. `cellOf(block)` says what a cell shows, `describe(block)` what is to be told of it (lines, the title
 * first), `pick(block)` is called when it is clicked, or Enter pressed on it.
 */
function makeGrid({ name, cellOf, describe, pick, ...limits }) {
  const canvas = el("canvas", { "aria-hidden": "true" });
  const cell = el("div", { role: "gridcell", id: `kv-cell-${Math.random().toString(36).slice(2)}` });
  const row = el("div", { role: "row", class: "kv-unseen" }, cell);
  const spoken = el("div", { class: "kv-unseen", "aria-live": "polite" });
  const node = el(
    "div",
    { class: "kv-grid", role: "grid", tabindex: 0, "aria-label": name, "aria-activedescendant": cell.id },
    canvas,
    row,
  );
  const tip = tooltip(VIEW);
  const glowing = new Map();
  let total = 0;
  let width = 0;
  let shape = null;
  let context = null;
  let paint = null;
  let cursor = 0;
  let hovered = null;
  let isFrameDue = false;

  const isFocused = () => document.activeElement === node && node.matches(":focus-visible");

  function place(block) {
    return [shape.margin + (block % shape.columns) * shape.pitch, Math.floor(block / shape.columns) * shape.pitch];
  }

  function draw(block) {
    const shown = cellOf(block);
    const group = selected();
    const isOwn = group !== null && shown.owners.includes(group);
    const glow = glowing.has(block) ? 1 - (performance.now() - glowing.get(block)) / GLOW_MS : 0;
    paint(...place(block), shown, {
      block,
      isDim: group !== null && !isOwn,
      isPicked: isOwn || block === hovered,
      isFocused: block === cursor && isFocused(),
      glow: Math.max(0, glow),
    });
  }

  function drawNumbers() {
    const colors = theme();
    context.font = `10px ${colors.font}`;
    context.fillStyle = colors.quiet;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = shape.pitch >= 12 ? 1 : 4;
    for (let index = 0; index < shape.rows; index += every)
      context.fillText(index * shape.columns, shape.margin - 6, (index + 0.5) * shape.pitch);
  }

  /** Everything anew: another width, another number of blocks, another theme, another selection. */
  function drawAll() {
    if (!width || !total) return;
    shape = layOut(total, width, limits);
    context = sized(canvas, shape.margin + shape.columns * shape.pitch, shape.rows * shape.pitch);
    context.clearRect(0, 0, canvas.width, canvas.height);
    paint = cellPainter(context, shape.pitch, theme());
    if (shape.isNumbered) drawNumbers();
    for (let block = 0; block < total; block += 1) draw(block);
    fill(node, { "aria-rowcount": shape.rows, "aria-colcount": shape.columns }, []);
  }

  function animate() {
    isFrameDue = false;
    const now = performance.now();
    for (const [block, start] of glowing) {
      if (now - start >= GLOW_MS || block >= total) glowing.delete(block);
      if (block < total) draw(block);
    }
    // Some twenty frames a second are enough for a fading light, and leave a slow machine its time.
    if (glowing.size) setTimeout(schedule, 40);
  }

  function schedule() {
    if (isFrameDue || !VIEW.isConnected) return;
    isFrameDue = true;
    requestAnimationFrame(animate);
  }

  function tell(block, isSpoken) {
    const lines = describe(block);
    const [x, y] = place(block);
    const [at, host] = [canvas.getBoundingClientRect(), VIEW.getBoundingClientRect()];
    tip.show(at.left - host.left + x, at.top - host.top + y, lines);
    if (!isSpoken) return;
    const text = lines.join(". ");
    setText(cell, text);
    setText(spoken, text);
    const [rowIndex, columnIndex] = [Math.floor(block / shape.columns) + 1, (block % shape.columns) + 1];
    row.setAttribute("aria-rowindex", rowIndex);
    cell.setAttribute("aria-colindex", columnIndex);
  }

  function hover(block) {
    if (block === hovered) return;
    const before = hovered;
    hovered = block;
    if (before !== null && before < total) draw(before);
    if (block === null) return isFocused() ? tell(cursor, false) : tip.hide();
    draw(block);
    tell(block, false);
  }

  function blockAt(event) {
    const at = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - at.left - shape.margin) / shape.pitch);
    const block = Math.floor((event.clientY - at.top) / shape.pitch) * shape.columns + column;
    return column >= 0 && column < shape.columns && block >= 0 && block < total ? block : null;
  }

  function walk(event) {
    if (!shape) return;
    const { columns } = shape;
    const start = cursor - (cursor % columns);
    const target = {
      ArrowRight: cursor + 1,
      ArrowLeft: cursor - 1,
      ArrowDown: cursor + columns,
      ArrowUp: cursor - columns,
      Home: event.ctrlKey ? 0 : start,
      End: event.ctrlKey ? total - 1 : Math.min(start + columns, total) - 1,
      PageDown: Math.min(cursor + 5 * columns, total - 1),
      PageUp: Math.max(cursor - 5 * columns, 0),
    }[event.key];
    if (event.key === "Enter" || event.key === " ") pick(cursor);
    else if (target === undefined) return;
    else if (target >= 0 && target < total) {
      const before = cursor;
      cursor = target;
      draw(before);
      draw(cursor);
      tell(cursor, true);
    }
    event.preventDefault();
  }

  canvas.addEventListener("pointermove", (event) => shape && hover(blockAt(event)));
  canvas.addEventListener("pointerleave", () => hover(null));
  canvas.addEventListener("click", (event) => {
    const block = shape && blockAt(event);
    if (block === null) return;
    cursor = block;
    pick(block);
    hover(block);
  });
  // A finger leaves the canvas only by touching something else.
  listen(document, "pointerdown", (event) => hovered !== null && !canvas.contains(event.target) && hover(null));
  node.addEventListener("keydown", walk);
  node.addEventListener("focus", () => {
    if (!shape || !isFocused()) return;
    draw(cursor);
    tell(cursor, true);
  });
  node.addEventListener("blur", () => {
    if (shape) draw(cursor);
    tip.hide();
  });
  onWidth(node, (newWidth) => {
    width = newWidth;
    drawAll();
  });
  onTheme(drawAll);
  onSelect(drawAll);

  return {
    node: el("div", {}, node, spoken),
    /** As it was last laid out: asking the element would lay out the page. */
    width: () => width,
    /** The side of a cell, with the gap behind it. */
    pitch: () => shape?.pitch ?? limits.maxPitch(),
    drawAll,
    /** How many blocks there are. True when that was news, and all were drawn. */
    resize(newTotal) {
      if (newTotal === total) return false;
      total = newTotal;
      cursor = Math.min(cursor, Math.max(total - 1, 0));
      hovered = null;
      glowing.clear();
      drawAll();
      return true;
    },
    /** Draws the changed cells; those that have another owner light up. */
    update(changed, moved) {
      if (!shape) return;
      const now = performance.now();
      if (!isCalm() && moved.length <= MOST_GLOWING) for (const block of moved) glowing.set(block, now);
      for (const block of changed) draw(block);
      if (glowing.size) schedule();
      if (hovered !== null) tell(hovered, false);
      else if (isFocused()) tell(cursor, false);
    },
  };
}
