"""`SpeculativeRequest`: rows whose next tokens are guessed, so that a step that verifies them may yield several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor

from hf_paged.core.batch import Batch
from hf_paged.engine.draft_budget import RowBudget
from hf_paged.engine.sampled_request import Row, SampledRequest
from hf_paged.sampling.logprobs import TokenLogprobs
from hf_paged.sampling.lookup import LookupRules, PromptLookup
from hf_paged.sampling.random import DraftNoise
from hf_paged.sampling.sampler import Chosen, DraftBatch, Outcome


@dataclass(slots=True)
class _Guess:
    """What a row may go on with.

    Attributes:
        lookup: Where drafts come from; `None`: from a draft model.
        budget: How many there may be; `None`: as many as are found, as in transformers' loop.
        drafts: Of the row's sequence, behind its last token.
        chosen: What the model chose behind that token and each draft, as far as it is known; whether that meets a
            criterion, and how likely it was.
    """

    lookup: PromptLookup | None
    budget: RowBudget | None
    drafts: list[int] = field(default_factory=list)
    chosen: list[tuple[int, bool, TokenLogprobs | None]] = field(default_factory=list)


class SpeculativeRequest(SampledRequest):
    """Rows with drafts: uncomputed tokens like others, whose logits are all wanted.

    A token is chosen behind each of them as if they were right. Those up to the first that was not are the row's, and
    the one chosen in its place; what lies behind is cut. So tokens are what they would be without drafts. Where they
    are drawn, and it is one row, drafts and draws are those of transformers' loop.

    Attributes:
        num_drafts: Drafts that were verified.
        num_accepted: Those of them that were right.
    """

    def _new_noise(self, generator: torch.Generator, num_rows: int) -> DraftNoise:
        return DraftNoise(generator, num_rows)

    def _begin(self) -> None:
        call, lookups = self._call, []
        self.num_drafts = self.num_accepted = 0
        self._costs = self._worker.costs()
        self._slowest = 0  # tokens of the open row that has fewest
        self._waiting: list[tuple[int, int]] = []  # rows that a draft model is to guess on, and how far
        if call.lookup is not None:
            rules = None if call.generator is None else LookupRules(call.lookup, call.processors, call.device)
            lookups = [PromptLookup(call.lookup, ids, rules) for ids in call.input_ids.tolist()]
        source = call.lookup or call.draft_model
        assert source is not None
        self._guesses = [
            _Guess(lookups[index] if lookups else None, RowBudget(source.num_tokens) if source.adapts else None)
            for index in range(len(self.rows))
        ]
        for index, guess in enumerate(self._guesses):
            if guess.lookup is not None:
                self._add_drafts(index, guess.lookup.drafts()[: self._most(index)])
            else:
                self._add_drafts(index, [])

    # LogitsConsumer

    def take(self, batch: Batch, rows: list[int], places: list[int], logits: Tensor) -> list[DraftBatch]:  # type: ignore[override]
        self._slowest = self._oldest_index()
        starts = batch.logit_starts
        owners: list[int] = []
        indices: list[int] = []
        sources: list[int] = []
        for index, place in zip(rows, places, strict=True):
            row, count = self.rows[index], starts[place + 1] - starts[place]
            owners += [index] * count
            indices += range(row.num_chosen, row.num_chosen + count)
            sources += range(starts[place], starts[place + 1])
            row.num_chosen += count
            sequence = row.sequence
            if sequence is None:
                continue
            # Preempted from here on, it is computed again, but not for these logits.
            if sequence.num_uncomputed_tokens == 0:
                self._worker.loop.remove(sequence)
            elif sequence.wanted is not None:
                sequence.wanted = sequence.wanted[count:]
                sequence.logits_from = sequence.wanted[0]
        if not owners:
            return []
        if self._sampler.kind is not None:
            return [DraftBatch(self._sampler, owners, indices[0], sources, 0, indices)]
        found: list[DraftBatch] = []
        for own in sorted(set(indices)):
            mine = [index == own for index in indices]
            members, their_sources = list(compress(owners, mine)), list(compress(sources, mine))
            found.append(DraftBatch(self._sampler, members, own, their_sources, 0, [own] * len(members)))
        return found

    def add_placeholders(self, rows: list[int], place: int) -> None:
        """Nothing: which tokens a row goes on with is known when its step is over."""

    def take_tokens(self, rows: list[int], outcome: Outcome) -> None:
        is_open = [self.rows[row].finish_reason is None for row in rows]
        if not any(is_open):
            return
        if isinstance(outcome, Exception):
            raise outcome
        assert isinstance(outcome, Chosen)
        said: Sequence[TokenLogprobs | None] = outcome.logprobs or [None] * len(rows)
        chosen = zip(outcome.tokens, outcome.stops, said, strict=True)
        for index, own in compress(zip(rows, chosen, strict=True), is_open):
            guess = self._guesses[index]
            guess.chosen.append(own)
            if len(guess.chosen) > len(guess.drafts):
                self._verify(index)

    def _verify(self, index: int) -> None:
        """Gives a row the tokens that were chosen, up to the first that is not its draft, and new drafts."""
        row, guess, scheduler = self.rows[index], self._guesses[index], self._pool.scheduler
        sequence, reason, num_new = row.sequence, None, 0
        assert sequence is not None
        for token, stops, logprobs in guess.chosen:
            if logprobs is not None:
                row.logprobs.append(logprobs)
            reason = self._note_token(index, token, stops)
            num_new += 1
            if reason is not None or guess.drafts[num_new - 1 : num_new] != [token]:
                break
        num_right = num_new - 1
        self.num_drafts += len(guess.drafts)
        self.num_accepted += num_right
        if guess.budget is not None:
            guess.budget.note(len(guess.drafts), num_right, num_new)
        new = row.tokens[-num_new:]
        row.num_chosen = len(row.tokens)
        self._hand_out(index, row, new)
        guess.chosen.clear()
        if reason is not None:
            self._end(row, reason)
            return
        scheduler.settle_drafts(sequence, num_right)
        scheduler.add_placeholder(sequence, -1)  # it is known right away
        scheduler.resolve_token(sequence, new[-1])
        most = self._most(index)
        if guess.lookup is not None:
            guess.lookup.append(new)
            self._add_drafts(index, guess.lookup.drafts()[:most] if most else [])
        elif most:
            if not self._waiting:
                self._worker.defer(self._draft)
            self._waiting.append((index, most))
            return
        else:
            self._add_drafts(index, [])
        self._worker.add(self, [(index, sequence)])

    def _most(self, index: int) -> int:
        """How many drafts a row may have."""
        call, budget, row = self._call, self._guesses[index].budget, self.rows[index]
        source = call.lookup or call.draft_model
        assert source is not None
        most = source.num_tokens
        if budget is not None:
            if len(row.tokens) > self._slowest + most:
                return 0  # the call waits for others
            most = budget.most(self._costs, 0.0 if call.draft_model is None else call.draft_model.seconds)
        # A draft model is not asked about tokens that the row has no room for.
        return most if call.draft_model is None else int(min(most, max(0, self._limit - len(row.tokens) - 1)))

    def _draft(self) -> None:
        """Has the draft model guess on all rows that wait for it. The step lock is held."""
        model, lock = self._call.draft_model, self._pool.lock
        assert model is not None
        with lock:
            waiting = [(index, most) for index, most in self._waiting if self.rows[index].finish_reason is None]
            self._waiting = []
            known = [self._call.prompts[index] + self.rows[index].tokens for index, _ in waiting]
        if not waiting:
            return
        try:
            found = model.drafts(known, [most for _, most in waiting])
        except BaseException as error:  # Ctrl-C too, which is its caller's
            with lock:
                self.fail(error)
            return
        with lock:
            for (index, _), drafts in zip(waiting, found, strict=True):
                sequence = self.rows[index].sequence
                if sequence is not None:
                    self._add_drafts(index, drafts)
                    self._worker.add(self, [(index, sequence)])

    def _hand_out(self, index: int, row: Row, tokens: list[int]) -> None:
        if self._on_token is None:
            return
        said: Sequence[TokenLogprobs | None] = row.logprobs[-len(tokens) :] or [None] * len(tokens)
        for place, (token, logprobs) in enumerate(zip(tokens, said, strict=True), 1):
            self._on_token(index, token, logprobs, place == len(tokens))

    def _add_drafts(self, index: int, drafts: list[int]) -> None:
        """Puts what a row may go on with behind its sequence's tokens."""
        row, guess = self.rows[index], self._guesses[index]
        sequence = row.sequence
        assert sequence is not None
        if isinstance(self._noise, DraftNoise):
            self._noise.expect(index, len(row.tokens), 1 + len(drafts))
        # No further than the row and the model's context go; its last token is chosen, and not given to the model.
        room = min(self._limit - len(row.tokens) - 1, self._max_context - sequence.num_tokens)
        guess.drafts = drafts = drafts[: max(0, int(min(room, len(drafts))))]
        self._pool.scheduler.add_drafts(sequence, drafts)
        if drafts and self._table is not None:
            first = self._width + len(row.tokens)
            self._table.write(
                [self._table_rows[index]] * len(drafts),
                list(range(first, first + len(drafts))),
                torch.tensor(drafts, device=self._call.device),
            )
