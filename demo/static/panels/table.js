// A table that changes. value: {columns: [name, ...], rows: [[key, cell, ...], ...], numbers: [index of a column, ...]}.

const head = el("tr");
const body = el("tbody");
const table = el("table", { class: "kv-table" }, el("thead", {}, head), body);
const frame = el("div", { class: "kv-table-frame", tabindex: "0", role: "region", "aria-label": "Table" }, table);
VIEW.append(frame);
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
  setHidden(frame, value === null || !value.rows.length);
  if (value === null) return;
  if (JSON.stringify([value.columns, value.numbers]) !== columns) begin(value);
  drawRows(value.rows);
});
