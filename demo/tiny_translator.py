"""A tiny T5 that is trained on the spot to translate sentences of some forty English words into German."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

PAD, END = 0, 1
PEOPLE = {"man": "der Mann", "woman": "die Frau", "child": "das Kind", "king": "der König", "cat": "die Katze"}
THINGS = {"house": "das Haus", "garden": "den Garten", "ship": "das Schiff", "letter": "den Brief", "tree": "den Baum"}
MOODS = {"old": "alte", "young": "junge", "tired": "müde", "happy": "frohe"}
LOOKS = {"red": "rote", "small": "kleine", "dark": "dunkle", "new": "neue"}
VERBS = {"sees": "sieht", "finds": "findet", "loves": "liebt", "seeks": "sucht", "paints": "malt"}
PLACES = {"by the sea": "am Meer", "in the wood": "im Wald", "at the door": "an der Tür"}
TIMES = {"today": "heute", "often": "oft", "never": "nie", "again": "wieder"}
ENGLISH = ["the", *(word for words in (MOODS, PEOPLE, VERBS, LOOKS, THINGS, TIMES) for word in words)]
ENGLISH += sorted({word for place in PLACES for word in place.split()} - {"the"})
GERMAN = sorted(
    {
        part
        for words in (PEOPLE, MOODS, VERBS, THINGS, PLACES, TIMES)
        for word in words.values()
        for part in word.split()
    }
    | {form for look in LOOKS.values() for form in (look, f"{look}n")}
)
WORDS = ["→", "·", *ENGLISH, *GERMAN]
EXAMPLE = "the old man paints the red house by the sea today"
STEPS, ROWS, RATE = 150, 32, 1e-2


@dataclass(frozen=True)
class Translator:
    """The trained model; its words are its tokens."""

    model: Any

    @staticmethod
    def encode(english: str) -> list[int]:
        """Token ids, with the one that ends a sentence.

        Raises:
            KeyError: A word is not among `ENGLISH`.
        """
        known = {word: number for number, word in enumerate(ENGLISH, start=2)}
        return [*(known[word] for word in english.split()), END]

    @staticmethod
    def decode(tokens: list[int]) -> str:
        """The words of some tokens: an arrow begins a sentence, and a dot ends it."""
        return " ".join(WORDS[token] for token in tokens)


def sentence(draw: random.Random) -> tuple[str, str]:
    """A sentence in English and in German: there, what comes first is a matter of taste."""
    lists = (PEOPLE, MOODS, VERBS, THINGS, LOOKS, PLACES, TIMES)
    who, mood, verb, what, look, where, when = (draw.choice(list(words)) for words in lists)
    article, noun = PEOPLE[who].split()
    subject = f"{article} {MOODS[mood]} {noun}"
    article, noun = THINGS[what].split()
    thing = f"{article} {LOOKS[look]}{'n' if article == 'den' else ''} {noun}"
    order = draw.random()
    if order < 0.5:
        german = f"{TIMES[when]} {VERBS[verb]} {subject} {thing} {PLACES[where]}"
    elif order < 0.8:
        german = f"{PLACES[where]} {VERBS[verb]} {subject} {TIMES[when]} {thing}"
    else:
        german = f"{subject} {VERBS[verb]} {TIMES[when]} {thing} {PLACES[where]}"
    return f"the {mood} {who} {verb} the {look} {what} {where} {when}", german


def train() -> Translator:
    """Takes some seconds, and leaves torch's generator as it was."""
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    special = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD}
    numbers = {word: number for number, word in enumerate(GERMAN, start=2 + len(ENGLISH))}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = T5ForConditionalGeneration(T5Config(vocab_size=len(WORDS), **shape, **special)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    draw = random.Random(0)
    for _ in range(STEPS):
        pairs = [sentence(draw) for _ in range(ROWS)]
        ids = torch.tensor([Translator.encode(english) for english, _ in pairs])
        targets = [torch.tensor([*(numbers[word] for word in german.split()), END]) for _, german in pairs]
        labels = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-100)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return Translator(model.eval())
