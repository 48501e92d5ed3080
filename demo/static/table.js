// A table that changes. value: {columns: [name, ...], rows: [[key, cell, ...], ...], numbers: [index of a column, ...],
// empty: a command line}.

const head = el("tr");
const body = el("tbody");
const table = el("table", { class: "kv-table" }, el("thead", {}, head), body);
const frame = el("div", { class: "kv-table-frame", tabindex: "0", role: "region", "aria-label": "Table" }, table);
const command = el("code", { class: "kv-mono" });
const empty = el("div", { class: "kv-command", hidden: true }, el("span", { class: "kv-quiet" }, "No request yet. In a terminal:"), command);
VIEW.append(empty, frame);
let columns = "";
let numbers = new Set();
let drawRows = null;

function begin(value) {
  columns = JSON.stringify([value.columns, value.numbers]);
  numbers = new Set(value.numbers);
  head.replaceChildren(
    ...value.columns.map((name, index) => el("th", { scope: "col", class: numbers.has(index) ? "kv-right" : "" }, name)),
  );
  body.replaceChildren();
  drawRows = keyed(
    body,
    (row) => row[0],
    (row) => {
      const cells = row.slice(1).map((_, index) => el("td", { class: numbers.has(index) ? "kv-right kv-number" : "" }));
      return {
        node: el("tr", {}, ...cells),
        update: (newer) => cells.forEach((cell, index) => setText(cell, newer[index + 1])),
      };
    },
  );
}

drawEach((value) => {
  setHidden(frame, !value?.rows.length);
  setHidden(empty, !value?.empty || value.rows.length > 0);
  setText(command, value?.empty ?? "");
  if (value === null) return;
  if (JSON.stringify([value.columns, value.numbers]) !== columns) begin(value);
  drawRows(value.rows);
});
