"""`SampledRun`: a greedy or sampling call whose rows the engine drives, each as fast as it gets its logits."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_paged.core.batch import Batch
from hf_paged.core.sequence import GivenPrompt, Sequence, Source
from hf_paged.engine.call_context import call_context
from hf_paged.engine.draft_budget import FIXED_COST, RowBudget
from hf_paged.engine.draft_model import DraftModel
from hf_paged.engine.kv_pool import KVPool
from hf_paged.engine.run import NO_PROBABILITIES, Row, Run
from hf_paged.engine.worker import StepWorker
from hf_paged.model.adapter import Adapter
from hf_paged.model.weights_version import WeightsKey
from hf_paged.sampling.beams import BeamSettings
from hf_paged.sampling.grammar import Grammar
from hf_paged.sampling.logprobs import LogprobsWanted, TokenLogprobs
from hf_paged.sampling.lookup import LookupRules, LookupSettings, PromptLookup
from hf_paged.sampling.processors import RowEnds, needs_ids, processor_kinds
from hf_paged.sampling.random import NoiseAhead, SamplingNoise, StepNoise
from hf_paged.sampling.sampler import Chosen, Outcome, RowSampler, SamplingBatch
from hf_paged.sampling.token_table import TokenTable

KEPT_NOISE = 8  # tokens whose noise is kept where there are drafts, which are chosen behind again

# Row, token, what is said of it, and whether no other follows at the same moment.
TokenCallback = Callable[[int, int, TokenLogprobs | None, bool], None]


@dataclass(slots=True)
class CallRows:
    """A call's rows as transformers prepared them for its `_sample` loop, with what the host needs to know about them.

    Attributes:
        input_ids: `[rows, width]` on the CPU, left-padded; the rows of a prompt's `num_samples` samples follow each
            other.
        padding: Left padding of each row.
        places_by_column: Whether the padding counts in a token's place.
        num_samples: Rows of each prompt, samples or beams.
        processors: Row-wise ones of transformers.
        criteria: Row-wise ones of transformers.
        device: Where the caller had the prompts: there tokens are chosen, and there the result is to be.
        do_sample: Draw, or take the likeliest token.
        pad_token_id: What stands behind the end of a row that finished before others.
        generator: Where draws come from; owned by the run.
        noise: The same, if they are another call's.
        priority: Of its sequences.
        request_id: The request that it is.
        adapters: Of each prompt, what is added to the model for it; empty: nothing for any.
        given: Of each prompt, its tokens, if these are not all ids.
        sources: Of each prompt, what an encoder has read; empty: nothing for any.
        logprobs: What is to be said of each token.
        grammar: What each row is to follow.
        beams: How they are searched, if a prompt's rows are beams.
        lookup: How drafts of its rows are looked up, if that is where they come from.
        draft_model: The same, if they come from another model.
        prompts: The rows' tokens, without padding.
        kinds: Of `processors`, what the sampler has to know.
        ends: What ends a row.
    """

    input_ids: Tensor
    padding: list[int]
    num_samples: int
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    device: torch.device
    do_sample: bool
    pad_token_id: int
    generator: torch.Generator | None = None
    noise: NoiseAhead | None = None
    priority: int = 0
    request_id: str | None = None
    adapters: list[Adapter | None] = field(default_factory=list)
    given: list[GivenPrompt] | None = None
    sources: list[Source] = field(default_factory=list)
    places_by_column: bool = False
    logprobs: LogprobsWanted | None = None
    grammar: Grammar | None = None
    beams: BeamSettings | None = None
    lookup: LookupSettings | None = None
    draft_model: DraftModel | None = None
    prompts: list[list[int]] = field(init=False)
    kinds: list[Hashable] = field(init=False)
    ends: RowEnds = field(init=False)

    @property
    def has_drafts(self) -> bool:
        """Whether its rows' tokens are guessed before they are chosen."""
        return self.lookup is not None or self.draft_model is not None

    def __post_init__(self) -> None:
        self.prompts = [row[pad:] for row, pad in zip(self.input_ids.tolist(), self.padding, strict=True)]
        self.kinds = processor_kinds(self.processors)
        self.ends = RowEnds.of(self.criteria)


def new_sequences(
    call: CallRows, pool: KVPool, owner: object, weights_key: WeightsKey, batch_key: Hashable
) -> list[tuple[int, Sequence]]:
    """A sequence for each prompt of a call, in a group of its own, and the first of the prompt's rows.

    The pool's lock is held.
    """
    found: list[tuple[int, Sequence]] = []
    salt = () if (salt := call_context().cache_salt) is None else (salt,)
    places = range(0, len(call.input_ids), call.num_samples)
    sizes = [max(len(call.prompts[row]), (call.ends.max_length or 0) - call.padding[row]) for row in places]
    groups = [pool.scheduler.new_group(call.priority, batch_key, owner, call.request_id, size) for size in sizes]
    for row, group in zip(places, groups, strict=True):
        sequence = pool.scheduler.new_sequence(group)
        given = None if call.given is None else call.given[row // call.num_samples]
        sequence.token_ids = [*(call.prompts[row] if given is None else given.token_ids)]
        sequence.num_tokens = sequence.num_prompt_tokens = sequence.num_at_once = len(sequence.token_ids)
        sequence.position_offset = call.padding[row] if call.places_by_column else 0
        if given is not None:
            sequence.spans, sequence.position_offset = given.spans, given.position_offset
            sequence.given_end = sequence.num_tokens
        sequence.logits_from = sequence.num_tokens - 1
        sequence.adapter = call.adapters[row // call.num_samples] if call.adapters else None
        own: tuple[Hashable, ...] = () if sequence.adapter is None else (sequence.adapter.key,)
        if call.sources:
            sequence.source = call.sources[row // call.num_samples]
            own = sequence.source.digest, *own
        sequence.extra_key = (*weights_key, sequence.position_offset, *salt, *own)
        found.append((row, sequence))
    return found


class SampledRun(Run):
    """Rows that are scheduled, sampled and finished one by one.

    Whatever runs beside it, and whichever of its rows are ahead, the tokens are those of transformers' loop over the
    whole batch: processors and criteria are transformers' own and look at one row at a time, and noise belongs to a
    token and a row.

    A step gives a row one token, and one more for each of its drafts that is right. Drafts are uncomputed tokens like
    others, whose logits are all wanted. A token is chosen behind each of them as if they were right; those up to the
    first that was not are the row's, and the one chosen in its place; what lies behind is cut. So tokens are what they
    would be without drafts, drawn ones too; a draft model draws with the same noise, which makes its drafts right as
    often as its probabilities allow. Of a single row drafts and draws are those of transformers' loop.
    """

    def __init__(
        self,
        call: CallRows,
        pool: KVPool,
        worker: StepWorker,
        weights_key: WeightsKey,
        batch_key: Hashable,
        on_token: TokenCallback | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """Queues the prompts. The pool's lock is held.

        Args:
            call: What to generate.
            pool: Tables and scheduler.
            worker: Runs the steps.
            weights_key: State of the model's weights, part of the prefix-cache key.
            batch_key: Rows of another key never share a step with these.
            on_token: Called with every token of every row, with the pool's lock held: it must only hand it on.
            on_end: Called when the run is over, with the pool's lock held.
        """
        super().__init__(pool, worker, on_end)
        self._call = call
        self.on_token = on_token
        self._has_drafts, self.is_assisted = call.has_drafts, call.draft_model is not None
        num_rows, self._width = call.input_ids.shape
        # Of new tokens, which no row may have more of.
        self.eos = call.ends.eos
        self.limit = float("inf") if call.ends.max_length is None else call.ends.max_length - self._width
        self.rows = [Row() for _ in range(num_rows)]
        self._num_open = num_rows
        self.max_context = worker.executor.model.max_context
        # The largest logit is the same everywhere: bringing all of them to a prompt on the CPU would hold up the step.
        is_argmax = not call.do_sample and not call.processors and call.ends.others is None
        device = None if is_argmax and call.device != pool.kv_device else call.device
        grid = worker.executor.draw_grid if device in (None, pool.kv_device) else None
        self._noise: SamplingNoise | NoiseAhead | StepNoise | None = call.noise
        if call.generator is not None:
            is_stocks = call.has_drafts and num_rows == 1  # draws depend on the drafts
            num_kept = KEPT_NOISE if call.has_drafts else 1
            self._noise = (
                StepNoise(call.generator) if is_stocks else SamplingNoise(call.generator, num_rows, num_kept, grid)
            )
        self._matchers = None if call.grammar is None else call.grammar.matchers(num_rows)
        self.chooses_by_tokens = self._matchers is not None
        self._table: TokenTable | None = None
        self._table_rows: list[int] = []
        if call.ends.others is not None or needs_ids(call.processors):
            # Prompt, padding and generated tokens: what transformers would hand to processors and criteria.
            self._table = worker.executor.token_table(call.device)
            self._table_rows = self._table.add(call.input_ids)
        self.sampler = RowSampler(
            call.processors,
            self._noise,
            call.kinds,
            criteria=call.ends.others,
            table=self._table,
            table_rows=self._table_rows,
            width=self._width,
            device=device,
            logprobs=call.logprobs,
            matchers=self._matchers,
            has_kernel=grid is not None,
        )
        is_asked_more = call.has_drafts or call.grammar is not None or call.logprobs is not None or call.ends.others
        if num_rows == 1 and not is_asked_more and (self.sampler.is_plain or self.sampler.told is not None):
            self.lone = self.rows[0]
        prompts = new_sequences(call, pool, self, weights_key, batch_key)
        for row, sequence in prompts:
            self.rows[row].sequence = sequence
        self._oldest = 0  # tokens of the open row that has fewest
        self._num_in_step = num_rows  # rows of the last step, other calls' too
        if call.has_drafts:
            self._prepare_drafts()
        worker.add(self, prompts)

    def _prepare_drafts(self) -> None:
        call, source = self._call, self._source
        self._lookups: list[PromptLookup] = []
        if call.lookup is not None:
            is_stocks = isinstance(self._noise, StepNoise)  # draws depend on what is left out
            rules = LookupRules(call.lookup, call.processors, call.device) if is_stocks else None
            self._lookups = [PromptLookup(call.lookup, ids, rules) for ids in call.input_ids.tolist()]
        else:
            self._worker.executor.step_listeners.append(self._ask_draft_model)
        fixed_cost = FIXED_COST.get(self._pool.kv_device.type, FIXED_COST["cuda"])
        self._budgets = [RowBudget(source.num_tokens, fixed_cost) for _ in self.rows] if source.adapts else []
        self._asking: list[tuple[int, int]] = []  # rows that the draft model is to guess on, and how far
        for index in range(len(self.rows)):
            self._guess(index, asks=False)

    @property
    def _source(self) -> LookupSettings | DraftModel:
        source = self._call.lookup or self._call.draft_model
        assert source is not None
        return source

    def result(self) -> Tensor:
        """`[rows, width + steps]`, as transformers' loop returns it."""
        return self._filled(self._call.input_ids, self._call.pad_token_id, self._call.device)

    def cancel(self) -> None:
        for row in self.rows:
            self.end_row(row, "cancelled")

    def cancel_row(self, index: int) -> None:
        """Ends one row that has tokens as `"cancelled"`. The pool's lock is held, and no step runs."""
        self.end_row(self.rows[index], "cancelled")

    def fail(self, error: BaseException) -> None:
        if not self.is_done:
            self.error = error
            for row in self.rows:
                self.end_row(row, "error")

    # Of each step

    def take(self, batch: Batch, rows: list[int], places: list[int], logits: Tensor) -> list[SamplingBatch]:
        # The host may not know the newest tokens: the run may end with them.
        self._oldest = min([len(row.tokens) for row in self.rows if row.finish_reason is None], default=0)
        self._num_in_step = len(batch.seq_ids)
        starts = batch.logit_starts
        owners: list[int] = []
        indices: list[int] = []
        sources: list[int] = []
        for index, place in zip(rows, places, strict=True):
            row, first = self.rows[index], starts[place]
            if self._call.num_samples > 1 and not row.num_chosen:
                samples = self._split(index)
                owners += samples
                indices += [0] * len(samples)
                sources += [first] * len(samples)
                continue
            count = starts[place + 1] - first
            owners += [index] * count
            indices += range(row.num_chosen, row.num_chosen + count)
            sources += range(first, first + count)
            if row.num_chosen >= row.plain_until:
                self._hold(row, count)
        if not owners:
            return []
        if self.sampler.kind is not None or indices.count(indices[0]) == len(indices):
            return [SamplingBatch(self.sampler, owners, indices, sources, self._oldest)]
        found: list[SamplingBatch] = []
        for own in sorted(set(indices)):
            mine = [index == own for index in indices]
            members, their_sources = list(compress(owners, mine)), list(compress(sources, mine))
            found.append(SamplingBatch(self.sampler, members, [own] * len(members), their_sources, self._oldest))
        return found

    def _split(self, row: int) -> range:
        """Gives each sample of a prompt that is computed a sequence; returns the rows that its logits are for."""
        first = self.rows[row].sequence
        assert first is not None
        for sample in range(row + 1, row + self._call.num_samples):
            self.rows[sample].sequence = child = self._pool.scheduler.fork(first)
            self._worker.add(self, [(sample, child)])
        return range(row, row + self._call.num_samples)

    def _hold(self, row: Row, count: int) -> None:
        """Has a row wait until so many tokens are known."""
        row.num_chosen += count
        sequence = row.sequence
        if sequence is None:
            return
        # Preempted from here on, it is computed again, but not for these logits.
        if sequence.num_uncomputed_tokens == 0:
            self._worker.loop.remove(sequence)
        elif sequence.wanted is not None:
            sequence.wanted = sequence.wanted[count:]
            sequence.logits_from = sequence.wanted[0]

    def add_placeholders(self, rows: list[int], place: int) -> None:
        for own, index in enumerate(rows, place):
            row = self.rows[index]
            sequence = row.sequence
            # It waits for its token, or another row of the call has just failed.
            if row.num_chosen >= row.plain_until or sequence is None:
                continue
            row.num_chosen += 1
            # A position that the model may not have is not tried before it is known that the row gets there.
            if row.num_chosen >= self.limit or sequence.num_tokens >= self.max_context:
                sequence.is_wanted = False  # preempted now, it is not to be computed again
            else:
                self._pool.scheduler.add_placeholder(sequence, own)

    def take_tokens(self, rows: list[int], outcome: Outcome) -> None:
        # A row may have ended since: that step began before its last token was known.
        is_open = [self.rows[row].finish_reason is None for row in rows]
        if not any(is_open):
            return
        if isinstance(outcome, Exception):
            raise outcome
        assert isinstance(outcome, Chosen)
        said: SequenceOf[TokenLogprobs | None] = outcome.logprobs or [None] * len(rows)
        chosen = zip(outcome.tokens, outcome.stops, said, strict=True)
        for index, own in compress(zip(rows, chosen, strict=True), is_open):
            row = self.rows[index]
            row.chosen.append(own)
            if len(row.chosen) > len(row.drafts):
                self._go_on(index, row)

    def _go_on(self, index: int, row: Row) -> None:
        """Gives a row the tokens that were chosen, up to the first that is not its draft, and new drafts."""
        sequence, scheduler, reason, num_before = row.sequence, self._pool.scheduler, None, len(row.tokens)
        assert sequence is not None
        for token, stops, logprobs in row.chosen:
            if token < 0:
                raise RuntimeError(NO_PROBABILITIES)
            num_right = len(row.tokens) - num_before
            row.tokens.append(token)
            if logprobs is not None:
                row.logprobs.append(logprobs)
            is_complete = self._matchers is not None and self._matchers[index].accept(token)
            if token in self.eos:
                reason = "eos"
            elif stops or is_complete:
                reason = "stop"
            elif len(row.tokens) >= self.limit:
                reason = "length"
            if reason is not None or row.drafts[num_right : num_right + 1] != [token]:
                break
        row.chosen.clear()
        if self.on_token is not None:
            last = len(row.tokens) - 1
            for place in range(num_before, last + 1):
                said = row.logprobs[place] if row.logprobs else None
                self.on_token(index, row.tokens[place], said, place == last)
        if self._has_drafts:
            self._book(index, len(row.drafts), num_right)
        if reason is not None:
            self.end_row(row, reason)
            return
        if num_before >= row.plain_until:
            row.num_chosen = len(row.tokens)
            scheduler.settle_drafts(sequence, num_right)
            self._worker.add(self, [(index, sequence)])
        if len(sequence.token_ids) == sequence.num_tokens:
            sequence.is_wanted = True
            scheduler.add_placeholder(sequence, -1)  # it is known right away
        scheduler.resolve_token(sequence, token)
        if self._has_drafts and row.num_chosen == len(row.tokens):  # else it is in the next step already
            self._guess(index)

    def end_row(self, row: Row, reason: str) -> None:
        if row.finish_reason is not None:
            return
        row.finish_reason = reason
        if row.sequence is not None:
            self._worker.loop.remove(row.sequence)
            self._pool.scheduler.free(row.sequence, reason)
            row.sequence = None
        self._num_open -= 1
        if self._call.lookup is not None and self._num_open and reason not in ("error", "cancelled"):
            self._tell_siblings(row, self._call.lookup.max_ngram)
        if self._num_open == 0:
            self.on_token = None  # it knows this, too
            if self._table is not None:
                self._table.remove(self._table_rows)
            if isinstance(self._noise, SamplingNoise):
                self._noise.rewind(max(len(row.tokens) for row in self.rows))
            if self.is_assisted:
                self._worker.executor.step_listeners.remove(self._ask_draft_model)
            self._finish()

    # Drafts

    def _book(self, index: int, num_drafts: int, num_right: int) -> None:
        self.num_drafts += num_drafts
        self.num_accepted += num_right
        if self._budgets and num_drafts:
            self._budgets[index].note(num_drafts, num_right, len(self.rows[index].tokens), self._num_in_step)

    def _guess(self, index: int, asks: bool = True) -> None:
        """Looks for drafts of a row; where a draft model has them, it is asked before the next step (if `asks`)."""
        row = self.rows[index]
        most, num_tokens = self._source.num_tokens, len(row.tokens)
        if self._budgets:
            is_ahead = num_tokens - self._oldest > most + 1  # the call waits for others
            most = 0 if is_ahead else self._budgets[index].most(num_tokens, self._num_in_step)
        if self._lookups:
            found = self._lookups[index].drafts(row.tokens)[:most] if most else []
            if most and not found and self._budgets:
                self._budgets[index].note(0, 0, num_tokens, self._num_in_step)
            self._add_drafts(index, found)
        # It is not asked about tokens that the row has no room for.
        elif asks and (most := int(min(most, self.limit - num_tokens - 1))) > 0:
            self._asking.append((index, most))
        else:
            self._add_drafts(index, [])

    def _add_drafts(self, index: int, drafts: list[int]) -> None:
        """Adds a row's drafts to its sequence."""
        row, num_tokens = self.rows[index], len(self.rows[index].tokens)
        sequence = row.sequence
        assert sequence is not None
        if isinstance(self._noise, StepNoise):
            self._noise.expect(num_tokens, 1 + len(drafts))
        if drafts:
            # No further than the row and the model's context go; its last token is chosen, and not given to the model.
            room = min(self.limit - num_tokens - 1, self.max_context - sequence.num_tokens)
            drafts = drafts[: max(0, int(min(room, len(drafts))))]
        row.drafts = drafts
        if not drafts:
            # Where steps overlap, the next one is launched before its token is known, unless that is to be waited for.
            row.plain_until = self._budgets[index].resume_at if self._budgets else num_tokens
            if not self._worker.executor.overlaps:
                row.plain_until = float("inf")
            return
        row.plain_until = 0
        self._pool.scheduler.add_drafts(sequence, drafts)
        if self._table is not None:
            first = self._width + num_tokens
            self._table.write(
                [self._table_rows[index]] * len(drafts),
                list(range(first, first + len(drafts))),
                torch.tensor(drafts, device=self._call.device),
            )

    def _tell_siblings(self, ended: Row, most: int) -> None:
        """Open rows of the same prompt, the last of which will run alone, may go on as one that has ended."""
        prompts = self._call.prompts
        own = prompts[next(index for index, row in enumerate(self.rows) if row is ended)]
        for row, prompt, lookup in zip(self.rows, prompts, self._lookups, strict=True):
            if row.finish_reason is None and prompt == own and not isinstance(self._noise, StepNoise):
                lookup.learn(own[-most:] + ended.tokens)

    def _ask_draft_model(self) -> None:
        """Has the draft model guess on all rows that wait for it. The step lock is held."""
        model, lock = self._call.draft_model, self._pool.lock
        assert model is not None
        with lock:
            asking = [(index, most) for index, most in self._asking if self.rows[index].finish_reason is None]
            self._asking = []
            known = [self._call.prompts[index] + self.rows[index].tokens for index, _ in asking]
            num_tokens = [len(self.rows[index].tokens) for index, _ in asking]
        longest = max((most for _, most in asking), default=0)  # all go as far
        fitting = [place for place, ids in enumerate(known) if model.has_room(len(ids) + longest)]
        found: list[list[int]] = [[] for _ in asking]
        if fitting:
            noise = None
            if isinstance(self._noise, SamplingNoise):
                indices = [asking[place][0] for place in fitting]
                noise = NoiseAhead(self._noise, indices, [num_tokens[place] for place in fitting])
            try:
                made = model.drafts([known[place] for place in fitting], [asking[place][1] for place in fitting], noise)
            except BaseException as error:  # Ctrl-C too, which is its caller's
                with lock:
                    self.fail(error)
                return
            for place, drafts in zip(fitting, made, strict=True):
                found[place] = drafts
        with lock:
            for (index, _), drafts in zip(asking, found, strict=True):
                if self.rows[index].sequence is not None:
                    self._add_drafts(index, drafts)
