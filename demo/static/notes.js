// Notes, one below the other. value: {notes: [[key, headline, [detail, ...]], ...], empty: text}.

const empty = el("div", { class: "kv-empty" });
const list = el("ol", { class: "kv-notes" });
VIEW.append(empty, list);
const drawNotes = keyed(
  list,
  (note) => note[0],
  (note) => {
    const details = el("ul", {}, ...note[2].map((detail) => el("li", {}, detail)));
    return { node: el("li", {}, el("div", { class: "kv-note-head" }, note[1]), details), update: () => {} };
  },
);

drawEach((value) => {
  const notes = value === null ? [] : value.notes;
  setText(empty, value === null ? "" : value.empty);
  setHidden(empty, notes.length > 0 || !empty.textContent);
  setHidden(list, notes.length === 0);
  drawNotes(notes);
});
