"""`SpeculativeRequest`: rows whose next tokens are guessed, so that a step that verifies them may yield several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor

from hf_paged.core.batch import Batch
from hf_paged.core.scheduler import Scheduler
from hf_paged.engine.draft_budget import RowBudget
from hf_paged.engine.sampled_request import Row, SampledRequest
from hf_paged.sampling.logprobs import TokenLogprobs
from hf_paged.sampling.lookup import LookupRules, PromptLookup
from hf_paged.sampling.random import NoiseAhead, SamplingNoise, StepNoise
from hf_paged.sampling.sampler import Chosen, DraftBatch, Outcome

KEPT_NOISE = 8  # tokens whose noise is kept, since drafts are chosen behind again


@dataclass(slots=True)
class _Guess:
    """What a row may go on with.

    Attributes:
        lookup: Where drafts come from; `None`: from a draft model.
        budget: How many there may be; `None`: as many as are found, as in transformers' loop.
        rest: Tokens to come for which there is nothing to be guessed.
        plain_until: So many tokens the row has when it is next to wait for what it goes on with; until then it goes on
            with the token that is chosen, like a row of a call without drafts.
        drafts: The drafts behind the last token of the row's sequence.
        chosen: What the model chose behind that token and each draft, as far as it is known; whether that meets a
            criterion, and how likely it was.
    """

    lookup: PromptLookup | None
    budget: RowBudget | None
    rest: int = 0
    plain_until: float = 0
    drafts: list[int] = field(default_factory=list)
    chosen: list[tuple[int, bool, TokenLogprobs | None]] = field(default_factory=list)


class SpeculativeRequest(SampledRequest):
    """Rows with drafts: uncomputed tokens like others, whose logits are all wanted.

    A token is chosen behind each of them as if they were right. Those up to the first that was not are the row's, and
    the one chosen in its place; what lies behind is cut. So tokens are what they would be without drafts, drawn ones
    too, for noise belongs to a row and a token; a draft model draws with the same, which makes its drafts right as
    often as its probabilities allow. Of a single row drafts and draws are those of transformers' loop.

    Attributes:
        num_drafts: Drafts that were verified.
        num_accepted: Those of them that were right.
    """

    def _new_noise(self, generator: torch.Generator, num_rows: int) -> SamplingNoise | StepNoise:
        return StepNoise(generator) if num_rows == 1 else SamplingNoise(generator, num_rows, KEPT_NOISE)

    def _begin(self) -> None:
        call, lookups = self._call, []
        self.num_drafts = self.num_accepted = 0
        self._costs = self._worker.costs()
        self._slowest = 0  # tokens of the open row that has fewest
        self._waiting: list[tuple[int, int]] = []  # rows that a draft model is to guess on, and how far
        self._overlaps = self._worker.overlaps
        if call.lookup is not None:
            is_stocks = isinstance(self._noise, StepNoise)  # draws depend on what is left out
            rules = LookupRules(call.lookup, call.processors, call.device) if is_stocks else None
            lookups = [PromptLookup(call.lookup, ids, rules) for ids in call.input_ids.tolist()]
        source = call.lookup or call.draft_model
        assert source is not None
        self._guesses = [
            _Guess(lookups[index] if lookups else None, RowBudget(source.num_tokens) if source.adapts else None)
            for index in range(len(self.rows))
        ]
        for index in range(len(self.rows)):
            self._add_drafts(index, self._look_up(index))

    # LogitsConsumer

    def take(self, batch: Batch, rows: list[int], places: list[int], logits: Tensor) -> list[DraftBatch]:  # type: ignore[override]
        self._slowest = self._oldest_index()
        self._overlaps = self._worker.overlaps
        starts = batch.logit_starts
        owners: list[int] = []
        indices: list[int] = []
        sources: list[int] = []
        for index, place in zip(rows, places, strict=True):
            row, count = self.rows[index], starts[place + 1] - starts[place]
            owners += [index] * count
            indices += range(row.num_chosen, row.num_chosen + count)
            sources += range(starts[place], starts[place + 1])
            if self._is_plain(index, row.num_chosen):
                continue
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
            return [DraftBatch(self._sampler, owners, indices[0], sources, self._slowest, indices)]
        found: list[DraftBatch] = []
        for own in sorted(set(indices)):
            mine = [index == own for index in indices]
            members, their_sources = list(compress(owners, mine)), list(compress(sources, mine))
            found.append(DraftBatch(self._sampler, members, own, their_sources, self._slowest, [own] * len(members)))
        return found

    def add_placeholders(self, rows: list[int], place: int) -> None:
        # Which tokens the others go on with is known when the step is over.
        for own, index in enumerate(rows, place):
            if self._is_plain(index, self.rows[index].num_chosen):
                super().add_placeholders([index], own)

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
            row, guess = self.rows[index], self._guesses[index]
            if self._is_plain(index, len(row.tokens)):
                token, stops, logprobs = own
                if logprobs is not None:
                    row.logprobs.append(logprobs)
                self._append(self._pool.scheduler, index, token, stops)
                continue
            guess.chosen.append(own)
            if len(guess.chosen) > len(guess.drafts):
                self._verify(index)

    def _is_plain(self, index: int, num_tokens: int) -> bool:
        """Whether a row with so many tokens goes on with the next, whichever that is."""
        return num_tokens < self._guesses[index].plain_until

    def _append(self, scheduler: Scheduler, index: int, token: int, stops: bool) -> None:
        super()._append(scheduler, index, token, stops)
        row, guess = self.rows[index], self._guesses[index]
        budget = guess.budget
        if budget is not None:
            budget.note(0, 0, 1)
            if budget.pause and len(row.tokens) < guess.plain_until and not isinstance(self._noise, StepNoise):
                return  # nothing is looked up before its end
        # If it isn't in the next step already.
        if row.sequence is not None and row.num_chosen == len(row.tokens):
            self._guess(index)

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
        self._worker.add(self, [(index, sequence)])
        self._guess(index)

    def _guess(self, index: int) -> None:
        most = 0 if self._call.draft_model is None else self._most(index)
        if most:
            if not self._waiting:
                self._worker.defer(self._draft)  # before the next step
            self._waiting.append((index, most))
        else:
            self._add_drafts(index, self._look_up(index))

    def _look_up(self, index: int) -> list[int]:
        guess = self._guesses[index]
        if guess.lookup is None:
            return []
        budget, tokens = guess.budget, self.rows[index].tokens
        guess.rest = 0 if budget is None else budget.pause
        if guess.rest:
            return []
        found = guess.lookup.drafts(tokens)
        if found:
            return found[: self._most(index)]
        if budget is not None and budget.is_due:
            budget.pause = 1
            budget.align(len(tokens))
            guess.rest = budget.pause
        return []

    def _most(self, index: int) -> int:
        """How many drafts a row may have; if none, also for how long."""
        call, guess, row = self._call, self._guesses[index], self.rows[index]
        source = call.lookup or call.draft_model
        assert source is not None
        most, guess.rest = source.num_tokens, 0
        if guess.budget is not None:
            guess.rest = max(0, len(row.tokens) - self._slowest - 1 - most)  # the call waits for others
            if guess.rest:
                return 0
            most = guess.budget.most(self._costs, 0.0 if call.draft_model is None else call.draft_model.seconds)
            if guess.budget.pause:
                guess.budget.align(len(row.tokens))
            guess.rest = guess.budget.pause
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
            num_tokens = [len(self.rows[index].tokens) for index, _ in waiting]
        longest = max((most for _, most in waiting), default=0)  # all go as far
        fitting = [place for place, ids in enumerate(known) if model.has_room(len(ids) + longest)]
        found: list[list[int]] = [[] for _ in waiting]
        if fitting:
            noise = None
            if isinstance(self._noise, SamplingNoise):
                indices = [waiting[place][0] for place in fitting]
                noise = NoiseAhead(self._noise, indices, [num_tokens[place] for place in fitting])
            try:
                made = model.drafts(
                    [known[place] for place in fitting], [waiting[place][1] for place in fitting], noise
                )
            except BaseException as error:  # Ctrl-C too, which is its caller's
                with lock:
                    self.fail(error)
                return
            for place, drafts in zip(fitting, made, strict=True):
                found[place] = drafts
        with lock:
            for (index, _), drafts in zip(waiting, found, strict=True):
                if self.rows[index].sequence is not None:
                    self._add_drafts(index, drafts)

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
        if isinstance(self._noise, StepNoise):
            self._noise.expect(len(row.tokens), 1 + len(drafts))
        if drafts:
            # No further than the row and the model's context go; its last token is chosen, and not given to the model.
            room = min(self._limit - len(row.tokens) - 1, self._max_context - sequence.num_tokens)
            drafts = drafts[: max(0, int(min(room, len(drafts))))]
        guess.drafts = drafts
        if not drafts:
            # Where steps overlap, the next one is launched before its token is known, unless that is to be waited for.
            guess.plain_until = len(row.tokens) + guess.rest if self._overlaps else float("inf")
            return
        guess.plain_until = 0
        self._pool.scheduler.add_drafts(sequence, drafts)
        if self._table is not None:
            first = self._width + len(row.tokens)
            self._table.write(
                [self._table_rows[index]] * len(drafts),
                list(range(first, first + len(drafts))),
                torch.tensor(drafts, device=self._call.device),
            )
