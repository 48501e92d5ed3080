"""A beam search of an encoder-decoder, step by step: the source that all beams read, and what each beam writes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

import hf_paged

from .beams import BeamTree
from .hub import find_group
from .limits import Limits, RefusedError
from .streams import in_thread
from .tiny_translator import END, ENGLISH, PAD, Translator, train

BLOCK_SIZE = 4  # of a pool of its own: a sentence takes several blocks
NUM_BLOCKS = 64
NEW_TOKENS = 16
MAX_WORDS = 32
STEP_SECONDS = 0.4
TRAINING = "A tiny T5 is being trained to translate: this takes some seconds, once."
_made: Translator | None = None
_making = threading.Lock()
_turn = threading.Lock()  # one search at a time: each has the engine to itself, paused


class Piece(NamedTuple):
    """A block, and the words in it.

    Attributes:
        block: Its number.
        words: What it holds, as far as it is computed.
        readers: Beams whose tables have it.
    """

    block: int
    words: str
    readers: int


@dataclass(frozen=True)
class Reading:
    """A search at one moment.

    Attributes:
        note: What it is, and what sharing saves, in a sentence.
        source: The blocks of the source.
        beams: Of each beam, the blocks of its own tokens.
        found: The sentences, best first, at the end.
    """

    note: str
    source: list[Piece] = field(default_factory=list)
    beams: list[list[Piece]] = field(default_factory=list)
    found: list[str] = field(default_factory=list)


async def translate(limits: Limits, english: str, count: int) -> AsyncIterator[Reading]:
    """A search with `count` beams, one step after the other.

    Raises:
        RefusedError: There is a word that the model has never seen, or it is beyond a limit.
    """
    limits.check_sequences(count)
    if count < 2:
        raise RefusedError("A beam search needs at least 2 beams.")
    words = english.lower().split()
    unknown = [word for word in words if word not in ENGLISH]
    if unknown:
        raise RefusedError(f"The tiny model has never seen {unknown[0]!r:.40}. It knows: {', '.join(ENGLISH)}.")
    if not 0 < len(words) <= MAX_WORDS:
        raise RefusedError(f"A sentence has 1 to {MAX_WORDS} words.")
    if _made is None:
        yield Reading(TRAINING)
    translator = await asyncio.to_thread(_get)
    await in_thread(_turn.acquire, lambda _: _turn.release())
    try:
        search = _Search(translator, translator.encode(" ".join(words)), count)
        try:
            reading = Reading("")
            while (seen := await asyncio.to_thread(search.step)) is not None:
                reading = seen
                yield reading
                await asyncio.sleep(STEP_SECONDS)
        finally:
            await asyncio.to_thread(search.end)
    finally:
        _turn.release()
    yield Reading(reading.note, reading.source, reading.beams, search.found())


def _get() -> Translator:
    """The trained model, patched."""
    global _made
    with _making:
        if _made is None:
            translator = train()
            hf_paged.patch(translator.model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
            _made = translator
        return _made


class _Search:
    """A `generate()` call on a thread, whose steps are asked for one by one."""

    def __init__(self, translator: Translator, source: list[int], count: int) -> None:
        self._translator = translator
        self._source = source
        self._engine = translator.model.paged
        self._since = 0
        self._tree = BeamTree(None)
        self._result: Any = None
        call = {"num_beams": count, "num_return_sequences": count, "do_sample": False, "max_new_tokens": NEW_TOKENS}
        self._engine.pause()
        self._thread = threading.Thread(target=self._run, args=(torch.tensor([source]), call), daemon=True)
        self._thread.start()

    def _run(self, ids: torch.Tensor, call: dict[str, Any]) -> None:
        try:
            self._result = self._translator.model.generate(input_ids=ids, **call)
        except Exception as error:
            self._result = error

    def step(self) -> Reading | None:
        """After the next step; `None`: the search is over."""
        while self._thread.is_alive():
            self._engine.step()
            snapshot = self._engine.snapshot(self._since)
            self._since = snapshot["events"][-1]["id"] if snapshot["events"] else self._since
            self._tree.see(snapshot)
            group = find_group(snapshot, None)
            if group is not None and any(sequence["block_table"] for sequence in group["sequences"]):
                return self._reading(group["sequences"])
            self._thread.join(0.01)  # it has not begun, or is about to return
        return None

    def end(self) -> None:
        """What is left runs at once."""
        with suppress(RuntimeError):
            self._engine.resume()
        self._thread.join()

    def found(self) -> list[str]:
        """The sentences. Raises what the call has raised."""
        if isinstance(self._result, Exception):
            raise self._result
        return [self._translator.decode([token for token in row if token > END]) for row in self._result.tolist()]

    def _reading(self, sequences: list[dict[str, Any]]) -> Reading:
        blocks = sequences[0]["source_blocks"]
        readers = sum(sequence["source_blocks"] == blocks for sequence in sequences)
        source = [
            Piece(block, self._words(self._source, index, len(self._source)), readers)
            for index, block in enumerate(blocks)
        ]
        tables = [sequence["block_table"] for sequence in sequences]
        beams = []
        for sequence in sequences:
            tokens = [PAD, *self._tree.alive.get(sequence["id"], ())]
            beams.append(
                [
                    Piece(
                        block,
                        self._words(tokens, index, sequence["num_computed_tokens"]),
                        sum(block in table for table in tables),
                    )
                    for index, block in enumerate(sequence["block_table"])
                ]
            )
        own = len({block for table in tables for block in table})
        note = (
            f"{len(blocks)} blocks hold the source, written once and read by {readers} beams: with a copy each they "
            f"would be {len(blocks) * readers}. The beams' own tokens take {own} blocks; without sharing, "
            f"{sum(map(len, tables))}."
        )
        return Reading(note, source, beams)

    def _words(self, tokens: list[int], index: int, computed: int) -> str:
        return self._translator.decode(tokens[index * BLOCK_SIZE : min((index + 1) * BLOCK_SIZE, computed)])
