// The header's gauges. value: see panels.gauges_value.

const bar = el("div", { class: "kv-bar", "aria-hidden": "true" });
const held = el("span", { class: "kv-bar-held" });
const cached = el("span", { class: "kv-bar-cached" });
bar.append(held, cached);
const poolText = el("span", { class: "kv-number" });
const pool = el("div", { class: "kv-gauge kv-gauge-pool" }, el("div", { class: "kv-gauge-name" }, "Pool"), bar, poolText);
const list = el("div", { class: "kv-gauge-list" });
VIEW.append(pool, list);

const drawGauges = keyed(
  list,
  (gauge) => gauge[0],
  (gauge) => {
    const number = el("span", { class: "kv-gauge-value kv-number" });
    const node = el("div", { class: "kv-gauge", title: gauge[2] }, el("div", { class: "kv-gauge-name" }, gauge[0]), number);
    return { node, update: (item) => setText(number, item[1]) };
  },
);

drawEach((value) => {
  if (value === null) return;
  held.style.width = `${(100 * value.held) / Math.max(1, value.num_blocks)}%`;
  cached.style.width = `${(100 * value.cached) / Math.max(1, value.num_blocks)}%`;
  setText(
    poolText,
    `${NUMBER.format(value.held)} of ${count(value.num_blocks, "block")} held, ${NUMBER.format(value.cached)} cached`,
  );
  drawGauges(value.gauges);
});
