// How one block looks: the pool's cells, the swapped ones, and the legend.
"use strict";

const NUMBERED_CELL = 34; // from this width on, cells show their block's number

/**
 * A function `paint(x, y, cell, look)` for cells of one size.
 *
 * A cell is `{kind, owners, refs, share, tag}`: "free", "cached", "held" or "swapped"; the groups that hold it; its ref
 * count; how much of it has tokens (0 to 1); what to write into it. A look is `{block, isDim, isPicked, isFocused, glow}`.
 */
function cellPainter(context, pitch, colors) {
  const gap = pitch >= 12 ? 2 : 1;
  const size = pitch - gap;
  const radius = pitch >= 12 ? 3 : 0;
  const hasText = pitch >= 17;
  const hasNumber = pitch >= NUMBERED_CELL;
  const hatches = { "#ffffff": hatching(context, "rgb(255 255 255 / 0.6)"), "#1a1a1a": hatching(context, "rgb(0 0 0 / 0.5)") };
  const marks = MARKS.map((mark) => new Path2D(mark));
  const unit = size / 10;

  function box(x, y, width = size, height = size) {
    if (!radius) return context.fillRect(x, y, width, height);
    context.beginPath();
    context.roundRect(x, y, width, height, radius);
    context.fill();
  }

  function frame(x, y, color, width) {
    context.strokeStyle = color;
    context.lineWidth = width;
    context.beginPath();
    context.roundRect(x + width / 2, y + width / 2, size - width, size - width, radius);
    context.stroke();
  }

  function write(x, y, text, color, halo = null) {
    context.font = `600 ${Math.min(13, (text.length > 2 ? 0.43 : 0.54) * size)}px ${colors.font}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    if (halo) {
      context.strokeStyle = halo;
      context.lineWidth = 3;
      context.lineJoin = "round";
      context.strokeText(text, x + size / 2, y + size / 2 + 0.5);
    }
    context.fillStyle = color;
    context.fillText(text, x + size / 2, y + size / 2 + 0.5);
  }

  /** The block's number, in a corner of cells that have room for it. */
  function number(x, y, block, color) {
    context.font = `9px ${colors.font}`;
    context.textAlign = "left";
    context.textBaseline = "top";
    context.fillStyle = color;
    context.fillText(block, x + 3, y + 3);
  }

  function mark(x, y, owner, color) {
    context.translate(x, y);
    context.scale(unit, unit);
    context.fillStyle = color;
    context.fill(marks[owner.mark]);
    context.scale(1 / unit, 1 / unit);
    context.translate(-x, -y);
  }

  function held(x, y, cell, alpha) {
    const owners = cell.owners.slice(0, 3).map(ownerOf);
    const width = size / owners.length;
    const level = size * cell.share;
    owners.forEach((owner, index) => {
      context.fillStyle = owner.fill;
      if (cell.share < 1) {
        context.globalAlpha = 0.35 * alpha;
        box(x + index * width, y, width);
        context.globalAlpha = alpha;
      }
      if (level) box(x + index * width, y + size - level, width, level);
    });
    const ink = cell.share < 0.5 ? colors.text : owners[0].ink;
    if (cell.refs > 1) {
      context.fillStyle = hatches[owners[0].ink];
      box(x, y);
    }
    if (hasText && cell.refs > 1) write(x, y, `×${cell.refs}`, colors.text, colors.surface);
    else if (hasText) cell.share < 1 ? write(x, y, cell.tag, colors.text, colors.surface) : write(x, y, cell.tag, ink);
    else if (pitch >= 7) mark(x, y, owners[0], ink);
  }

  return (x, y, cell, look = {}) => {
    context.clearRect(x, y, pitch, pitch);
    const alpha = look.isDim ? 0.22 : 1;
    context.globalAlpha = alpha;
    if (cell.kind === "held") held(x, y, cell, alpha);
    else if (cell.kind === "swapped") {
      const owner = ownerOf(cell.owners[0]);
      context.globalAlpha = 0.2 * alpha;
      context.fillStyle = owner.fill;
      box(x, y);
      context.globalAlpha = alpha;
      frame(x, y, owner.fill, pitch >= 12 ? 2 : 1.5);
      if (hasText) write(x, y, cell.tag, colors.text);
      else mark(x, y, owner, colors.text);
    } else {
      context.fillStyle = colors.free;
      context.globalAlpha = cell.kind === "cached" ? alpha : 0.6 * alpha;
      box(x, y);
      context.globalAlpha = alpha;
      if (cell.kind === "cached") {
        context.fillStyle = colors.quiet;
        context.beginPath();
        context.arc(x + size / 2, y + size / 2, Math.max(1, size / 7), 0, 7);
        context.fill();
      }
    }
    if (hasNumber && look.block !== undefined) {
      const isFull = cell.kind === "held" && cell.share > 0.8 && cell.refs < 2;
      number(x, y, look.block, isFull ? ownerOf(cell.owners[0]).ink : colors.text);
    }
    if (look.glow) {
      context.globalAlpha = look.glow;
      frame(x, y, colors.text, Math.min(3, size / 4));
    }
    context.globalAlpha = 1;
    if (look.isPicked) frame(x, y, colors.text, 2);
    if (look.isFocused) {
      frame(x, y, colors.surface, 4);
      frame(x, y, colors.focus, 2.5);
    }
  };
}
