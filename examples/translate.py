"""An encoder-decoder: five beams read one source, which is stored once, and many callers share the steps.

The model is trained on the spot, in seconds, to translate sentences of 25 English words into German.

python examples/translate.py
"""

import copy
import random
import threading
import time
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import T5Config, T5ForConditionalGeneration

import hf_paged

ADJECTIVES = {"old": "alte", "young": "junge", "tired": "müde", "happy": "frohe"}
SUBJECTS = {"man": "der Mann", "woman": "die Frau", "child": "das Kind", "king": "der König", "cat": "die Katze"}
VERBS = {"sees": "sieht", "finds": "findet", "loves": "liebt", "seeks": "sucht", "paints": "malt"}
OBJECTS = {"house": "das Haus", "garden": "den Garten", "sea": "das Meer", "letter": "den Brief", "tree": "den Baum"}
TIMES = {"today": "heute", "often": "oft", "never": "nie", "again": "wieder"}
WORD_LISTS = (ADJECTIVES, SUBJECTS, VERBS, OBJECTS, TIMES)
ENGLISH = ["the", *(word for words in WORD_LISTS for word in words)]
GERMAN = sorted({part for words in WORD_LISTS for word in words.values() for part in word.split()})
PAD, END = 0, 1
VOCABULARY = ["", "", *ENGLISH, *GERMAN]
IDS = {word: number for number, word in enumerate(VOCABULARY) if word}
BLOCK_SIZE, BEAMS = 4, 5
OPTIONS = {"num_beams": BEAMS, "num_return_sequences": BEAMS, "do_sample": False, "max_new_tokens": 12}


def sentence(draw: random.Random) -> tuple[str, str]:
    """In English, and in German: with either of two orders of the words."""
    adjective, subject, verb, thing, when = (draw.choice(list(words)) for words in WORD_LISTS)
    article, noun = SUBJECTS[subject].split()
    who = f"{article} {ADJECTIVES[adjective]} {noun}"
    if draw.random() < 0.7:
        german = f"{TIMES[when]} {VERBS[verb]} {who} {OBJECTS[thing]}"
    else:
        german = f"{who} {VERBS[verb]} {OBJECTS[thing]} {TIMES[when]}"
    return f"the {adjective} {subject} {verb} the {thing} {when}", german


def encode(text: str) -> torch.Tensor:
    return torch.tensor([*(IDS[word] for word in text.split()), END])


def decode(ids: torch.Tensor) -> str:
    return " ".join(VOCABULARY[token] for token in ids.tolist() if token > END)


def make_model(steps: int = 150) -> T5ForConditionalGeneration:
    """A T5 of two layers, trained."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # it is too small for more
    shape = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    special = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD}
    model = T5ForConditionalGeneration(T5Config(vocab_size=len(VOCABULARY), **shape, **special)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps, pct_start=0.1)
    draw = random.Random(0)
    for _ in range(steps):
        pairs = [sentence(draw) for _ in range(48)]
        ids = torch.stack([encode(english) for english, _ in pairs])
        labels = torch.stack([encode(german) for _, german in pairs])
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def show_blocks(snapshot: dict[str, Any]) -> None:
    """What the beams of the first caller hold, and what all hold together."""
    for number, beam in enumerate(snapshot["groups"][0]["sequences"], start=1):
        print(f"   beam {number}: source in blocks {beam['source_blocks']}, its own tokens in {beam['block_table']}")
    sequences = [sequence for group in snapshot["groups"] for sequence in group["sequences"]]
    tables = [sequence["source_blocks"] for sequence in sequences]
    distinct = {block for table in tables for block in table}
    print(f"   {len(sequences)} sequences, source blocks: {len(distinct)}, without sharing: {sum(map(len, tables))}")


def main() -> None:
    started = time.perf_counter()
    stock = make_model()
    print(f"trained in {time.perf_counter() - started:.0f} s\n")
    model = hf_paged.patch(copy.deepcopy(stock), block_size=BLOCK_SIZE, num_blocks=512)

    english = "the old man paints the sea today"
    print(f"{english}: {len(encode(english))} source tokens in blocks of {BLOCK_SIZE}, {BEAMS} beams")
    for german in model.generate(input_ids=encode(english)[None], **OPTIONS):
        print(f"   {decode(german)}")

    # Many callers, each on a thread: 12 sentences, and each asked for twice.
    draw = random.Random(1)
    sentences = [sentence(draw)[0] for _ in range(12)] * 2
    answers: dict[int, torch.Tensor] = {}

    def translate(caller: int) -> None:
        answers[caller] = model.generate(input_ids=encode(sentences[caller])[None], **OPTIONS)

    engine, before = model.paged, model.paged.stats().num_steps
    engine.pause()  # only to look at it
    callers = [threading.Thread(target=translate, args=(caller,)) for caller in range(len(sentences))]
    for thread in callers:
        thread.start()
    while engine.stats().num_waiting < len(callers):
        time.sleep(0.01)
    for _ in range(6):
        engine.step()
    print(f"\n{len(callers)} callers of {len(set(sentences))} different sentences, after six steps")
    show_blocks(engine.snapshot())
    engine.resume()
    for thread in callers:
        thread.join()
    tokens = sum(int((answer > END).sum()) for answer in answers.values())
    print(f"{tokens} tokens of {len(callers)} callers in {engine.stats().num_steps - before} model steps")
    print(f"   {sentences[0]}: {decode(answers[0][0])}")
    print(f"   {sentences[1]}: {decode(answers[1][0])}")

    # A batch whose rows have sources of several lengths: only what the mask shows is stored.
    texts = ["the cat sees the tree", "the happy child loves the garden again"]
    ids = pad_sequence([encode(text) for text in texts], batch_first=True, padding_value=PAD)
    batch = {"input_ids": ids, "attention_mask": (ids != PAD).long(), **OPTIONS}
    same = torch.equal(stock.generate(**batch), model.generate(**batch))
    for caller, text in enumerate(sentences):
        same &= torch.equal(stock.generate(input_ids=encode(text)[None], **OPTIONS), answers[caller])
    print(f"\nsame tokens as stock generate(): {same}")


if __name__ == "__main__":
    main()
