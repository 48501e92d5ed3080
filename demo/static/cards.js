// Texts side by side. value: {cards: [[title, text, note], ...]}.

const list = el("div", { class: "kv-cards" });
VIEW.append(list);
const drawCards = keyed(
  list,
  (card) => card[0],
  () => {
    const [title, text, note] = ["kv-card-title", "kv-card-text", "kv-card-note kv-number"].map((name) =>
      el("div", { class: name }),
    );
    return {
      node: el("article", { class: "kv-card" }, title, text, note),
      update: (card) => [title, text, note].forEach((node, index) => setText(node, card[index])),
    };
  },
);

drawEach((value) => drawCards(value === null ? [] : value.cards));
