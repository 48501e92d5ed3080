// What all views share: building the DOM, owners' colours, the theme, the selection, a tooltip.
//
// Each view is the body of one function that Gradio calls with `element` (its root), `props` and `watch`; views.py puts
// this file in front of it. Whatever comes from a user or a model enters the document as a text node, never as markup.
"use strict";

// ---------------------------------------------------------------------------------------------------------------- DOM

/** An element; attributes that are functions become listeners, strings among the children become text. */
function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Sets a text only when it differs, so that nothing is laid out anew for the same words. */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setHidden(node, isHidden) {
  if (node.hidden !== isHidden) node.hidden = isHidden;
}

const VIEW = element.querySelector(".kv-view");

/** Calls `draw` with the value there is, and with each one that comes. */
function drawEach(draw) {
  const update = () => {
    const value = props.value;
    draw(value && typeof value === "object" ? value : null);
  };
  watch("value", update);
  update();
}

// A listener outside of the view's own elements ends when Gradio has thrown them away.
function listen(target, type, handler) {
  const once = (event) => {
    if (VIEW.isConnected) handler(event);
    else target.removeEventListener(type, once);
  };
  target.addEventListener(type, once);
}

// ---------------------------------------------------------------------------------------------------------------- text

const NUMBER = new Intl.NumberFormat("en");

function count(number, noun) {
  return `${NUMBER.format(number)} ${noun}${number === 1 ? "" : "s"}`;
}

function formatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

function formatPercent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

/** "17+3 5" → [17, 18, 19, 20, 5]: each run is its first block and how many follow it. */
function decodeBlocks(text) {
  const blocks = [];
  if (!text) return blocks;
  for (const run of text.split(" ")) {
    const [first, more] = run.split("+");
    for (let block = Number(first), last = block + Number(more || 0); block <= last; block += 1) blocks.push(block);
  }
  return blocks;
}

// -------------------------------------------------------------------------------------------------------------- owners

// Okabe and Ito's colours: told apart by colour-blind people, on white and on black. Seven colours and six marks have no
// common divisor, so that neighbours differ in both and 42 requests in a row in at least one of them.
const COLORS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"];
const INKS = ["#ffffff", "#1a1a1a", "#ffffff", "#1a1a1a", "#1a1a1a", "#ffffff", "#1a1a1a"];
// In a box of 10 × 10
const MARKS = [
  "M5 3.2a1.8 1.8 0 1 0 .01 0z",
  "M1.5 4.2h7v1.6h-7z",
  "M4.2 1.5h1.6v7h-1.6z",
  "M1 1h4.6l-4.6 4.6z",
  "M5 2l3 3l-3 3l-3 -3z",
  "M2.2 2.2h2v2h-2zM5.8 5.8h2v2h-2z",
];

function ownerOf(group) {
  const color = group % COLORS.length;
  return { fill: COLORS[color], ink: INKS[color], mark: group % MARKS.length };
}

/** The small square that stands for a request wherever it is named. */
function swatch(group) {
  const { fill: color, ink, mark } = ownerOf(group);
  return svg(
    "svg",
    { class: "kv-swatch", viewBox: "0 0 10 10", "aria-hidden": "true" },
    svg("rect", { width: 10, height: 10, rx: 2, fill: color }),
    svg("path", { d: MARKS[mark], fill: ink }),
  );
}

/** "chat-12" → "c12": what fits into a cell. */
function tagOf(label) {
  const number = label.match(/(\d+)\D*$/);
  const letter = label.match(/[^\s\d#]/u);
  return (letter ? letter[0] : "#") + (number ? number[1].slice(-2) : "");
}

// ----------------------------------------------------------------------------------------------------------- selection

// One request may be selected; all views of the page show it.
function select(group) {
  window.kvSelected = window.kvSelected === group ? null : group;
  window.dispatchEvent(new CustomEvent("kv-select"));
}

function selected() {
  return window.kvSelected ?? null;
}

function onSelect(draw) {
  listen(window, "kv-select", draw);
}

listen(window, "keydown", (event) => {
  if (event.key === "Escape" && selected() !== null) select(selected());
});

// --------------------------------------------------------------------------------------------------- theme, size, motion

/** The colours of the page as it is now, for canvases. */
function theme() {
  const style = getComputedStyle(VIEW);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    surface: read("--kv-surface"),
    text: read("--kv-text"),
    quiet: read("--kv-quiet"),
    line: read("--kv-line"),
    free: read("--kv-free"),
    focus: read("--kv-focus"),
    font: style.fontFamily,
  };
}

function onTheme(draw) {
  const observer = new MutationObserver(() => {
    if (VIEW.isConnected) draw();
    else observer.disconnect();
  });
  for (const node of [document.documentElement, document.body])
    observer.observe(node, { attributes: true, attributeFilter: ["class"] });
}

function onWidth(node, draw) {
  let width = -1;
  new ResizeObserver(() => {
    if (node.clientWidth === width || !node.clientWidth) return;
    width = node.clientWidth;
    draw(width);
  }).observe(node);
}

function isCalm() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}

/** A context in CSS pixels, sharp on every screen. */
function sized(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return context;
}

/** Diagonal lines, as a fill style. */
function hatching(context, color, gap = 5) {
  const scale = window.devicePixelRatio || 1;
  const tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(gap * scale);
  const lines = tile.getContext("2d");
  lines.scale(tile.width / gap, tile.height / gap);
  lines.strokeStyle = color;
  lines.lineWidth = 1.1;
  lines.beginPath();
  for (const shift of [-gap, 0, gap]) {
    lines.moveTo(shift - 1, gap + 1);
    lines.lineTo(shift + gap + 1, -1);
  }
  lines.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(gap / tile.width, gap / tile.height));
  return pattern;
}

// ------------------------------------------------------------------------------------------------------------- tooltip

/** A box of lines beside a point of `host`; the first line is its title. */
function tooltip(host) {
  const box = el("div", { class: "kv-tip", hidden: true, "aria-hidden": "true" });
  host.append(box);
  return {
    show(x, y, lines) {
      box.replaceChildren(...lines.map((line, index) => el(index ? "div" : "strong", {}, line)));
      box.hidden = false;
      const [width, height] = [box.offsetWidth, box.offsetHeight];
      const room = host.clientWidth - width;
      box.style.left = `${Math.max(0, Math.min(x + 14, room))}px`;
      // Below the point, or above it where the page ends.
      const isLow = host.getBoundingClientRect().top + y + 18 + height > window.innerHeight;
      box.style.top = `${isLow ? y - height - 12 : y + 18}px`;
    },
    hide() {
      box.hidden = true;
    },
  };
}

// --------------------------------------------------------------------------------------------------------- owner button

/** A button that names a request and selects it in all views. `update(label, detail)` keeps it up to date. */
function ownerButton(group, label) {
  const text = el("span", {}, label);
  const button = el(
    "button",
    { class: "kv-owner", type: "button", "aria-pressed": "false", "data-group": group, click: () => select(group) },
    swatch(group),
    text,
  );
  const update = (newLabel, detail = "") => {
    setText(text, newLabel);
    const title = `${newLabel}${detail && `: ${detail}`}. Click to show its blocks alone.`;
    if (button.title !== title) button.title = title;
    const pressed = String(selected() === group);
    if (button.getAttribute("aria-pressed") !== pressed) button.setAttribute("aria-pressed", pressed);
  };
  update(label);
  return { node: button, update };
}

/** Keeps `parent`'s children equal to `items`, in their order: `make(item)` once a key, then `update(item)` of what it made. */
function keyed(parent, key, make) {
  const known = new Map();
  return (items) => {
    const gone = new Set(known.keys());
    let place = parent.firstChild;
    for (const item of items) {
      const name = key(item);
      if (!known.has(name)) known.set(name, make(item));
      const { node, update } = known.get(name);
      update(item);
      if (node === place) place = place.nextSibling;
      else parent.insertBefore(node, place);
      gone.delete(name);
    }
    for (const name of gone) {
      known.get(name).node.remove();
      known.delete(name);
    }
  };
}
