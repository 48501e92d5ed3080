"""Beam search over many calls' prompts at once: candidates scored, selected and finished on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_paged.kernels.transfers import ToHost, to_device
from hf_paged.sampling.processors import process
from hf_paged.sampling.random import SamplingNoise
from hf_paged.sampling.token_table import TokenTable

NEVER = -1e9  # transformers' score of what must not be chosen; added, as there: such candidates keep their order


@dataclass(frozen=True, slots=True)
class BeamSettings:
    """How the beams of a call are searched; transformers' generation config says what each means.

    Attributes:
        num_candidates: Candidates of a prompt in each step: enough that `num_beams` of them don't end.
        prompt_length: Columns of the prompts, padding included.
        max_length: Columns of the result at most.
        fill: What stands behind the end of a hypothesis.
    """

    num_beams: int
    length_penalty: float
    early_stopping: bool | str
    eos: tuple[int, ...]
    num_candidates: int
    prompt_length: int
    max_length: int
    num_return_sequences: int
    fill: int

    def columns(self, num_new: int) -> list[float]:
        """The numbers by which a prompt that gets its `num_new`-th token is selected for, in one row.

        Returns:
            Divisors of the scores of hypotheses and of the best that running beams may still reach, whether all
            candidates end here, and whether finished beams are final.
        """
        longest = self.max_length - self.prompt_length
        reach = longest if self.early_stopping == "never" and self.length_penalty > 0.0 else num_new
        return [
            num_new**self.length_penalty,
            reach**self.length_penalty,
            float(num_new >= longest),
            float(self.early_stopping is True),
        ]


class BeamSearch:
    """The beams of one call: what the device knows of them.

    Attributes:
        noise: Where draws come from; `None`: the best candidates are taken.
        table: The tokens of all beams, where processors look at them.
        table_rows: `[prompts, num_beams]`, their rows of `table`.
        device: Where scores are processed, as in transformers' loop: the prompt's.
        kind: Prompts of one kind are selected together, whatever their calls; `None`: only those of this call.
        state: Of each prompt; see `_State`.
    """

    def __init__(
        self,
        settings: BeamSettings,
        num_prompts: int,
        processors: Sequence[Any],
        kinds: list[Hashable],
        noise: SamplingNoise | None,
        device: torch.device,
        table: TokenTable | None = None,
        table_rows: Sequence[int] = (),
    ) -> None:
        """Takes `kinds` from `processor_kinds(processors)`; `needs_ids(processors)` needs a `table`."""
        self.settings = settings
        self.processors = list(processors)
        self.noise = noise
        self.table = table
        self.device = device
        num_beams = settings.num_beams
        self.table_rows = np.array(table_rows, dtype=np.int64).reshape(-1, num_beams)
        alone = None in kinds
        self.kind: Hashable = None if alone else (num_beams, settings.num_candidates, noise is None, device, *kinds)
        self.state = _State.new(num_prompts, num_beams, device)


class _State(NamedTuple):
    """The state of a search between steps, prompt by prompt, as transformers' loop has it.

    Attributes:
        running: `[prompts, beams]`, sums of log probabilities.
        finished: `[prompts, beams]`, scores of the best hypotheses that have ended, best first.
        is_finished: `[prompts, beams]`, which of them there are.
        may_improve: `[prompts, 1]`, whether a running beam may still become better than one of these.
    """

    running: Tensor
    finished: Tensor
    is_finished: Tensor
    may_improve: Tensor

    @classmethod
    def new(cls, num_prompts: int, num_beams: int, device: torch.device) -> _State:
        # All beams are equal at first: candidates are taken from the first one.
        running = torch.full((num_prompts, num_beams), NEVER, device=device)
        running[:, 0] = 0
        finished = torch.full((num_prompts, num_beams), NEVER, device=device)
        is_finished = torch.zeros(num_prompts, num_beams, dtype=torch.bool, device=device)
        return cls(running, finished, is_finished, torch.ones(num_prompts, 1, dtype=torch.bool, device=device))


@dataclass(frozen=True, slots=True)
class BeamBatch:
    """Prompts of one call whose beams go on by a token.

    Attributes:
        num_new: Which new token it is, from 1.
        sources: Rows of the step's logits, for each prompt those of its beams.
        logits: Taken in place of the step's, of several steps: `[prompts * beams, vocab_size]`.
    """

    search: BeamSearch
    prompts: list[int]
    num_new: int
    sources: list[int] = field(default_factory=list)
    logits: Tensor | None = None


class Selection(NamedTuple):
    """The selection of a step, as lists with an entry a prompt.

    Attributes:
        parents: Of each candidate the beam that it continues, best candidate first.
        tokens: The token by which each candidate continues it.
        running: The candidates that become beams.
        finished: The best hypotheses now: one of the `num_beams` before, or `num_beams` + a candidate.
        is_full: Whether all its hypotheses have ended.
    """

    parents: list[list[int]]
    tokens: list[list[int]]
    running: list[list[int]]
    finished: list[list[int]]
    may_improve: list[bool]
    is_full: list[bool]
    all_end: list[bool]


class SelectedBeams:
    """Brings the selections of a step to the host."""

    def __init__(self, count: int) -> None:
        self._errors: list[Exception | None] = [None] * count
        self._groups: list[tuple[list[int], list[int], int, int, ToHost]] = []

    def add(self, numbers: list[int], counts: list[int], num_beams: int, table: Tensor) -> None:
        """Queues the transfer of what was selected for batches of one kind, of `counts` prompts each."""
        self._groups.append((numbers, counts, num_beams, table.shape[1], ToHost(table)))

    def fail(self, number: int, error: Exception) -> None:
        self._errors[number] = error

    def read(self) -> list[Selection | Exception]:
        """Returns each batch's selection, or its error. Waits until the step that computes them is over."""
        found: dict[int, Selection | Exception] = {
            number: error for number, error in enumerate(self._errors) if error is not None
        }
        for numbers, counts, num_beams, width, table in self._groups:
            # The one host read of a step with beams: which sequences are forked and freed is the host's.
            rows = table.wait().tolist()
            num_candidates = (width - 2 * num_beams - 4) // 2
            ends = [num_candidates, 2 * num_candidates, 2 * num_candidates + num_beams, width - 4]
            start = 0
            for number, count in zip(numbers, counts, strict=True):
                own = rows[start : start + count]
                start += count
                parts = [[row[a:b] for row in own] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
                flags = [[bool(row[column]) for row in own] for column in range(width - 4, width)]
                if not all(flags[3]):
                    # torch.multinomial's words, which transformers' loop would have raised
                    found[number] = RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
                else:
                    found[number] = Selection(*parts, *flags[:3])
        return [found[number] for number in range(len(self._errors))]


@torch.inference_mode()
def select_beams(batches: Sequence[BeamBatch], logits: Tensor) -> SelectedBeams:
    """Does one step of transformers' beam search for every prompt, writing to its state and its table. Waits for
    nothing.

    Args:
        logits: `[K, vocab_size]`.
    """
    selected = SelectedBeams(len(batches))
    kinds: dict[Hashable, list[int]] = defaultdict(list)
    for number, batch in enumerate(batches):
        kind = batch.search.kind
        kinds[id(batch.search) if kind is None else kind].append(number)

    def select(numbers: list[int]) -> None:
        members = [batches[number] for number in numbers]
        selected.add(numbers, [len(batch.prompts) for batch in members], *_select(members, logits))

    for numbers in kinds.values():
        try:
            select(numbers)
        except Exception as error:  # of one call's scores: which?
            for number in numbers:
                try:
                    if len(numbers) == 1:
                        raise error
                    select([number])
                except Exception as own_error:
                    selected.fail(number, own_error)
    return selected


def _select(batches: list[BeamBatch], logits: Tensor) -> tuple[int, Tensor]:
    """Number of beams, and `[prompts, 2 * candidates + 2 * beams + 4]`: the fields of `Selection`, and validity."""
    searches = [batch.search for batch in batches]
    first, num_beams, num_candidates = searches[0], searches[0].settings.num_beams, searches[0].settings.num_candidates
    counts = [len(batch.prompts) for batch in batches]
    state = _of(batches[0])
    if len(batches) > 1:
        state = _State(*(torch.cat(parts) for parts in zip(*map(_of, batches), strict=True)))
    scores = _processed(batches, logits)
    device, num_prompts = scores.device, len(state.running)
    vocab_size = scores.shape[-1]
    numbers = [own for batch in batches for own in [batch.search.settings.columns(batch.num_new)] * len(batch.prompts)]
    columns = to_device(np.array(numbers, dtype=np.float32), device)
    divisor, reach, is_last, is_early = columns[:, :1], columns[:, 1:2], columns[:, 2:3] > 0, columns[:, 3:4] > 0

    # 1) The best candidates of all beams of a prompt.
    scores = (scores.view(num_prompts, num_beams, vocab_size) + state.running[:, :, None]).flatten(1)
    is_valid = torch.ones(num_prompts, 1, dtype=torch.bool, device=device)
    if first.noise is None:
        best, index = torch.topk(scores, num_candidates)
    else:
        # torch.multinomial without replacement (ATen/native/Distributions.cpp).
        probs = scores.softmax(dim=-1)
        is_valid = (probs >= 0).all(dim=-1, keepdim=True) & (probs < torch.inf).all(dim=-1, keepdim=True)
        noise = [
            batch.search.noise.rows(batch.num_new - 1, batch.prompts, probs, batch.num_new - 1)
            for batch in batches
            if batch.search.noise is not None
        ]
        index = torch.topk(probs / (noise[0] if len(noise) == 1 else torch.cat(noise)), num_candidates)[1]
        best = scores.gather(1, index)
    parents, tokens = index // vocab_size, index % vocab_size

    # 2) Those that end, and the best others, which go on.
    ends = is_last.expand_as(tokens)
    if any(search.settings.eos for search in searches):
        ends = ends | (tokens[:, :, None] == _eos(batches, device)[:, None, :]).any(dim=-1)
    continued = best + ends.to(torch.float32) * NEVER
    chosen = torch.topk(continued, num_beams)[1]
    running = continued.gather(1, chosen)

    # 3) The best hypotheses: those before, and the ends among the best candidates.
    ended = ends.clone()
    ended[:, num_beams:] = False
    is_closed = state.is_finished.all(dim=-1, keepdim=True) & is_early
    hypotheses = _divided(best, divisor)
    hypotheses += is_closed.to(torch.float32) * NEVER
    hypotheses += (~state.may_improve).to(torch.float32) * NEVER
    hypotheses += (~ended) * NEVER
    merged = torch.cat([state.finished, hypotheses], dim=1)
    kept = torch.topk(merged, num_beams)[1]
    finished = merged.gather(1, kept)
    is_finished = torch.cat([state.is_finished, ended], dim=1).gather(1, kept)

    # 4) Whether a running beam may still become better than the worst of them.
    worst = torch.where(is_finished, finished.min(dim=1, keepdim=True)[0], NEVER)
    is_better = (_divided(running[:, :1], reach) > worst).any(dim=-1, keepdim=True)
    new = _State(running, finished, is_finished, state.may_improve & is_better)

    beams, beam_tokens = parents.gather(1, chosen), tokens.gather(1, chosen)
    for batch, own, own_beams, own_tokens in zip(
        batches, _split(new, counts), beams.split(counts), beam_tokens.split(counts), strict=True
    ):
        _write(batch, own, own_beams, own_tokens)
    flags = [new.may_improve, is_finished.all(dim=-1, keepdim=True), ends.all(dim=-1, keepdim=True), is_valid]
    return num_beams, torch.cat([parents, tokens, chosen, kept, *(flag.to(torch.int64) for flag in flags)], dim=1)


def _processed(batches: list[BeamBatch], logits: Tensor) -> Tensor:
    """`[prompts * beams, vocab_size]`, log probabilities of all beams behind the processors."""
    searches = [batch.search for batch in batches]
    first = searches[0]
    if all(batch.logits is None for batch in batches):
        sources = [source for batch in batches for source in batch.sources]
        if sources != list(range(logits.shape[0])):
            logits = logits[to_device(sources, logits.device)]
    else:
        logits = torch.cat(
            [
                logits[to_device(batch.sources, logits.device)] if batch.logits is None else batch.logits
                for batch in batches
            ]
        )
    scores = torch.log_softmax(logits.to(first.device, torch.float32), dim=-1)
    counts = [len(batch.prompts) * batch.search.settings.num_beams for batch in batches]

    def num_tokens() -> list[int]:
        tokens = [batch.search.settings.prompt_length + batch.num_new - 1 for batch in batches]
        return [number for number, count in zip(tokens, counts, strict=True) for _ in range(count)]

    def read(marks_ends: bool) -> Tensor:
        assert first.table is not None  # then all of them have their tokens in it
        rows = [row for batch in batches for row in _table_rows(batch)]
        return first.table.read(rows, num_tokens(), marks_ends)

    return process([search.processors for search in searches], counts, scores, read, num_tokens)


def _divided(scores: Tensor, divisors: Tensor) -> Tensor:
    """Divides as torch divides by a number: on a GPU it multiplies by the reciprocal."""
    return scores * (1 / divisors) if scores.device.type == "cuda" else scores / divisors


def _eos(batches: list[BeamBatch], device: torch.device) -> Tensor:
    """`[prompts, E]`, the tokens that end each prompt's hypotheses; -1 where it has fewer than others."""
    width = max(len(batch.search.settings.eos) for batch in batches)
    rows = [
        [*batch.search.settings.eos, *[-1] * (width - len(batch.search.settings.eos))]
        for batch in batches
        for _ in batch.prompts
    ]
    return to_device(np.array(rows, dtype=np.int64), device)


def _of(batch: BeamBatch) -> _State:
    state = batch.search.state
    if len(batch.prompts) == len(state.running):
        return state
    index = to_device(batch.prompts, state.running.device)
    return _State(*(part[index] for part in state))


def _split(state: _State, counts: list[int]) -> list[_State]:
    return [_State(*parts) for parts in zip(*(part.split(counts) for part in state), strict=True)]


def _write(batch: BeamBatch, state: _State, parents: Tensor, tokens: Tensor) -> None:
    """Keeps what a step found of a batch's prompts: `[prompts, beams]` parents and tokens of their new beams."""
    search = batch.search
    if len(batch.prompts) == len(search.state.running):
        search.state = state
    else:
        index = to_device(batch.prompts, search.device)
        for whole, part in zip(search.state, state, strict=True):
            whole[index] = part
    if search.table is not None:
        rows = to_device(search.table_rows[batch.prompts], search.device)
        length = search.settings.prompt_length + batch.num_new - 1
        search.table.reorder(rows, rows.gather(1, parents), length, tokens)


def _table_rows(batch: BeamBatch) -> list[int]:
    rows: list[int] = batch.search.table_rows[batch.prompts].flatten().tolist()
    return rows
