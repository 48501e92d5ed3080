// A source and the beams that read it. value: {source: [[block, words, readers], ...], beams: [the same of each, ...]}.

/** The blocks of one table, side by side. */
function blockRow(className) {
  const list = el("ol", { class: `kv-pieces ${className}` });
  const show = keyed(
    list,
    (piece) => piece[0],
    () => {
      const [number, words] = [el("i", { class: "kv-number" }), el("span", {})];
      const node = el("li", {}, number, words);
      const update = ([block, text, readers, owner]) => {
        setText(number, `block ${block}`);
        if (owner !== undefined) node.style.setProperty("--owner", ownerOf(owner).fill);
        setText(words, text);
        const isShared = readers > 1;
        node.classList.toggle("kv-shared", isShared);
        node.title = isShared ? `${readers} beams have this block` : "one beam has this block";
      };
      return { node, update };
    },
  );
  return { node: list, show };
}

const source = blockRow("kv-source");
const title = el("h3", {});
const beams = el("ol", { class: "kv-readers" });
VIEW.append(
  el("section", { class: "kv-read" }, title, source.node),
  el("section", {}, el("h3", {}, "Each beam: what it has written so far. Hatched: several beams have the block."), beams),
);
const showBeams = keyed(
  beams,
  (beam) => beam.number,
  (beam) => {
    const row = blockRow("");
    const node = el("li", {}, el("span", { class: "kv-reader" }, `beam ${beam.number + 1}`), row.node);
    return { node, update: ({ pieces }) => row.show(pieces) };
  },
);

drawEach((value) => {
  const pieces = value === null ? [] : value.source;
  setHidden(VIEW, !pieces.length);
  if (!pieces.length) return;
  setText(title, `The source: written once, read by ${count(pieces[0][2], "beam")} at every step.`);
  source.show(pieces);
  const owners = new Map(); // a block has the colour of the first beam that has it
  showBeams(
    value.beams.map((each, number) => ({
      number,
      pieces: each.map((piece) => {
        if (!owners.has(piece[0])) owners.set(piece[0], number);
        return [...piece, owners.get(piece[0])];
      }),
    })),
  );
});
