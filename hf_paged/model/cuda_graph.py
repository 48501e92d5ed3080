"""`StepGraphs`: steps as CUDA graphs, one for each shape that steps are padded to, recorded once and replayed."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from hf_paged.attention.metadata import RecordedMetadata
from hf_paged.attention.pool_attention import PoolAttention
from hf_paged.kernels.transfers import to_device
from hf_paged.memory.kv_cache import KVCache
from hf_paged.model.graph_capture import CUDARecording, capture_stream, first_wait, raised_at
from hf_paged.model.step_inputs import SHORT_QUERY, FixedTables, HostStep, Shape, StepInputs
from hf_paged.model.step_memory import MOST_WANTED

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_Again = Callable[[Callable[[], Any]], Any]

# Of a replay's logits beside those of the same step run eagerly: the same kernels in the same order.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
_FAILED = -1  # what a rank says of a shape that it can't record; 1: it has, 0: it has no memory for it
CHECKED_STATES = 2  # rows with states that a recording is checked with: a copy of their states is kept meanwhile

# Ids, positions and (of each group of layers) metadata of a step at fixed addresses, the tokens whose logits are wanted
# (`None`: all), the pages of the rows' states and how many of their tokens came together, the tokens' adapters ->
# logits [wanted, vocab_size]
Forward = Callable[[Tensor, Tensor, Sequence[RecordedMetadata], Tensor | None, Tensor, Tensor, Tensor], Tensor]


class Recording(Protocol):
    """A function that was run once and can be run again over the same memory.

    Attributes:
        output: What it returned, and what every replay writes to.
        num_bytes: The device memory that it took.
    """

    output: Tensor
    num_bytes: int

    def replay(self) -> None:
        """Runs it again."""


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes of decode steps: with few padding rows where rows cost most."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, max_num_seqs + 1, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def token_sizes(max_tokens: int) -> list[int]:
    """Tokens of all other steps: powers of two, and those half way between them: a third is padding at most."""
    sizes = [size for n in range(4, max_tokens.bit_length()) for size in (2**n, 3 * 2 ** (n - 1))]
    return [size for size in sizes if size < max_tokens] + [max_tokens]


class StepGraphs:
    """Steps over one KV tensor, replayed.

    A step is padded to the next of the shapes. Decode steps are all recorded at the first of them; behind that others,
    of which there are more shapes and fewer steps, each at the first step that wants it. The recordings share their
    memory, and the lists that share out the work of attention are among their inputs: any lengths are right for them.

    Attributes:
        reason: Why there are none of decode steps, once that has turned out.
        why_no_others: The same of all other steps.
        agree: Where the model is shared out between ranks, gives the smallest of what they say of a shape: all replay
            it or none does, for their steps exchange tensors of its size. `None`: the model is whole.
    """

    def __init__(
        self,
        forward: Forward,
        kv_cache: KVCache,
        max_num_seqs: int,
        max_tokens: int,
        max_blocks: int,
        record: Callable[[Callable[[], Tensor]], Recording],
        why_no_others: str | None = None,
        memory: tuple[int, int] | None = None,
    ) -> None:
        """Takes no memory: it is taken when steps are recorded.

        Args:
            max_num_seqs: Sequences of a step at most.
            max_tokens: Tokens of a step at most; larger ones are run eagerly, but for decode steps.
            max_blocks: Blocks of a sequence.
            record: Makes a recording of a function.
            why_no_others: Why only decode steps can be recorded; `None`: all can.
            memory: See `StepMemory.for_graphs`; `None`: they may take what there is.
        """
        self._forward = forward
        self._kv_cache = weakref.ref(kv_cache)
        self._states = kv_cache.states
        self._decodes = [Shape(size, size, size) for size in capture_sizes(max_num_seqs)]
        self._token_sizes = token_sizes(max_tokens)
        self._record = record
        self.agree: Callable[[int], int] | None = None
        self._device = kv_cache.device
        self.max_blocks = max_blocks
        self._room, self._max_bytes = memory or (0, sys.maxsize)
        self._tables: FixedTables | None = None
        self._inputs: dict[Shape, StepInputs] = {}
        self._recordings: dict[Shape, Recording | None] = {}  # `None`: there was no memory for it
        self._logits: list[Tensor] = []  # of all shapes: each with its own would hold half a gigabyte
        self.reason: str | None = None
        self.why_no_others = why_no_others

    @property
    def shapes(self) -> list[Shape]:
        """What can be replayed; [] before anything is recorded."""
        return sorted(shape for shape, recording in self._recordings.items() if recording is not None)

    @property
    def sizes(self) -> list[int]:
        """Batch sizes of decode steps that can be replayed, the smallest first."""
        return [shape.rows for shape in self.shapes if shape.is_decode]

    @property
    def num_bytes(self) -> int:
        """Device memory of the recordings and the logits."""
        recordings = [recording.num_bytes for recording in self._recordings.values() if recording is not None]
        return sum(recordings) + sum(logits.nbytes for logits in self._logits)

    @property
    def max_rows(self) -> int:
        return self._decodes[-1].rows

    def is_of(self, kv_cache: KVCache) -> bool:
        return self._kv_cache() is kv_cache

    def run(self, step: HostStep) -> Tensor | str:
        """A step.

        Returns:
            `[K, vocab_size]` of the tokens that it wants, of its first one if it wants none: the next replay writes
            over it. Or why it can't be replayed, and is to be run eagerly.
        """
        shape = self._shape_of(step)
        if isinstance(shape, str):
            return shape
        if not (shape.is_decode or self._recordings):  # which would rather tell what keeps all steps from it
            return "no decode step was recorded yet"
        if shape not in self._recordings:
            self.record(step, shape)
        if self._recordings.get(shape) is None and shape.is_decode:  # the next larger one may do
            larger = [own for own in self._decodes if own > shape and self._recordings.get(own) is not None]
            shape = min(larger, default=shape)
        recording = self._recordings.get(shape)
        if recording is None:
            why = f"there was no memory for a graph of {shape.tokens} tokens"
            return (self.reason if shape.is_decode else self.why_no_others) or why
        self._inputs[shape].fill(step)
        recording.replay()
        num_wanted = max(1, len(step.wanted))
        if shape.is_decode and num_wanted < step.num_rows:  # those of all rows are there
            return recording.output[to_device(step.wanted if len(step.wanted) else [0], self._device)]
        return recording.output[:num_wanted]

    def _shape_of(self, step: HostStep) -> Shape | str:
        """The shape that a step is padded to, or why there is none."""
        if (reason := self.reason if step.is_decode else self.why_no_others) is not None:
            return reason
        if step.num_rows > self.max_rows:
            return "more rows than max_num_seqs"
        if step.metadata[0].host_tables.shape[1] > self.max_blocks:
            return "sequences longer than the model's context"
        if step.is_decode:
            if not step.is_begun and self.why_no_others is not None:
                return "layers that keep a state begin with one token"
            return next(shape for shape in self._decodes if shape.rows >= step.num_rows)
        tokens = next((size for size in self._token_sizes if size >= step.num_tokens), None)
        if tokens is None:
            return f"more than {self._token_sizes[-1]} tokens, prompts or drafts among them"
        rows = wanted = min(tokens, self.max_rows)
        if len(step.wanted) > wanted:
            if tokens > MOST_WANTED:
                return "the logits of more tokens are wanted than a graph keeps"
            wanted = tokens
        is_short = step.metadata[0].max_query_len <= SHORT_QUERY
        return Shape(rows, tokens, wanted, SHORT_QUERY if is_short else max(tokens, SHORT_QUERY + 1))

    @torch.no_grad()
    def record(self, step: HostStep, shape: Shape | None = None) -> None:
        """Records a shape, or all of decode steps, the largest first, whose memory the others use.

        One for which there is no memory is left out. If a step can't be recorded, or a replay is wrong, there are none
        of its kind at all, and `reason` (or `why_no_others`) says why. All of it is logged, once.

        Args:
            step: Of the pool: what a replay computes for its rows must be what the step itself does.
            shape: What to record; of a decode step, all.
        """
        is_decode = step.is_decode
        shapes = [shape] if shape is not None and not is_decode else self._decodes[::-1]
        try:
            for own in tqdm(shapes, desc="hf_paged: recording CUDA graphs", delay=1, leave=False, disable=None):
                self._recordings[own] = None
                num_logits = len(self._logits)
                self._recordings[own] = self._record_shape(
                    own, step.of_rows(np.arange(step.num_rows)[: own.rows]) if is_decode else step
                )
                if self._recordings[own] is None:
                    del self._logits[num_logits:]
                    self._inputs.pop(own, None)
        except Exception as error:  # a model that reads something back, makes tensors on the host, ...
            if self.agree is not None and not isinstance(error, _UnrecordableError):
                raise  # the other ranks are in the midst of what this one has left
            self._fail(is_decode, error)
        self._warn_of_memory(shapes, is_decode)

    def _fail(self, is_decode: bool, error: Exception) -> None:
        reason = _in_words(error)
        for shape in [own for own in self._recordings if own.is_decode == is_decode]:
            self._recordings[shape] = None
            self._inputs.pop(shape, None)
        if not self.shapes:
            self._logits.clear()
        if is_decode:
            self.reason = reason
        self.why_no_others = self.why_no_others or reason
        logger.warning(
            "hf_paged: %s steps run without CUDA graphs, since this model's can't be recorded (%s); "
            "cuda_graphs=False keeps this from being tried",
            "decode" if is_decode else "mixed",
            reason,
        )
        logger.info("hf_paged: what kept CUDA graphs from being recorded:", exc_info=error)

    def _warn_of_memory(self, shapes: list[Shape], is_decode: bool) -> None:
        """Says which of these shapes there was no memory for."""
        if (self.reason if is_decode else self.why_no_others) is not None:
            return
        if all(self._recordings[shape] is not None for shape in shapes):
            return
        sizes = self.sizes
        left = f"batches of more than {max(sizes)} rows" if sizes else "decode steps"
        if not is_decode:
            left = f"steps of {shapes[0].tokens} tokens"
        # Large steps of prompts, which are the first to find none, keep the device busy as they are.
        logger.log(
            logging.WARNING if is_decode else logging.INFO,
            "hf_paged: %s run without CUDA graphs, since there is no memory left that graphs may take; patch with "
            "a lower memory_fraction, num_blocks or max_num_seqs",
            left,
        )
        if is_decode and not sizes:
            self.reason = "out of memory"
            self.why_no_others = self.why_no_others or self.reason

    def _record_shape(self, shape: Shape, step: HostStep) -> Recording | None:
        """Records a shape; `None`: there is no memory for it.

        Raises:
            Exception: It can't be recorded, here or on another rank, or its replay is wrong.
        """
        if self._states is not None:
            step = step.of_rows(np.arange(step.num_rows)[-CHECKED_STATES:])  # prompts are behind the others
        is_shared = self.agree is not None
        with self._kept_states(step) as again, nullcontext() if is_shared else suppress(torch.OutOfMemoryError):
            logits, expected, place = self._prepare(shape, step, again)
            # What is agreed on runs on all ranks alike up to its end, or on none: captures don't wait for others.
            recording = self._together(lambda: self._capture(logits, place, again))
            if recording is not None:
                return self._together(lambda: _checked(recording, expected, again))
        return None

    def _together(self, attempt: Callable[[], _T]) -> _T | None:
        """What an attempt gives; `None`: it has run out of memory, here or on another rank.

        Raises:
            _UnrecordableError: It has failed, here or on another rank.
        """
        found: _T | None = None
        failure: Exception | None = None
        try:
            with suppress(torch.OutOfMemoryError):
                found = attempt()
        except Exception as error:
            failure = error
        try:
            outcome = _FAILED if failure is not None else int(found is not None)
            if self.agree is not None:
                outcome = self.agree(outcome)
            if failure is not None:
                raise _UnrecordableError(_in_words(failure)) from failure
            if outcome == _FAILED:
                raise _UnrecordableError("another rank can't record it")
            return found if outcome else None
        finally:
            del failure  # whose traceback holds this frame

    @contextmanager
    def _kept_states(self, step: HostStep) -> Iterator[_Again]:
        """What it gives calls a function with the states of a step's rows as they are; behind it they are so again."""
        states = self._states
        saved: tuple[Tensor, Tensor] | None = None

        def again(function: Callable[[], Any]) -> Any:
            nonlocal saved
            if states is not None and saved is None:
                assert step.pages is not None
                with torch.inference_mode(False):
                    pages = to_device(step.pages, self._device)
                    saved = pages, states.save(pages)
            elif states is not None and saved is not None:
                states.restore(*saved)
            return function()

        try:
            yield again
        finally:
            if states is not None and saved is not None:
                states.restore(*saved)

    def _prepare(self, shape: Shape, step: HostStep, again: _Again) -> tuple[Callable[[], Tensor], Tensor, str | None]:
        """Makes a shape's inputs, which hold a step.

        Returns:
            What computes logits from them, those of the step, and where the first of its kind waits for the device.
        """
        with torch.inference_mode(False):
            if self._tables is None:
                kv_cache = self._kv_cache()
                assert kv_cache is not None
                self._tables = FixedTables(self.max_rows, self.max_blocks, kv_cache)
            inputs = StepInputs(shape, self._tables, 0 if self._states is None else self._states.num_pages)
        inputs.fill(step)
        ids, positions, metadata = inputs.views(live=step.metadata[0])

        def logits() -> Tensor:
            wanted = None if shape.is_decode else inputs.wanted
            found = self._forward(ids, positions, metadata, wanted, inputs.pages, inputs.nums_at_once, inputs.adapters)
            if not self._logits or len(self._logits[-1]) < len(found):
                size = self.max_rows if len(found) <= self.max_rows else min(MOST_WANTED, self._token_sizes[-1])
                self._logits.append(found.new_empty(size, found.shape[1]))
            return self._logits[-1][: len(found)].copy_(found)

        again(logits)  # finds out what lists of work the layers ask for
        with torch.inference_mode(False):
            inputs = StepInputs(shape, self._tables, inputs.pages.shape[1], *metadata[0].kinds)
        inputs.fill(step)
        ids, positions, metadata = inputs.views()
        expected = again(logits).clone()  # also compiles what is not compiled yet, which can't be recorded
        place: str | None = None
        is_first = not any(own.is_decode == shape.is_decode for own in self.shapes)
        if is_first and self._device.type == "cuda":
            place = again(lambda: first_wait(logits))
        self._inputs[shape] = inputs
        return logits, expected[: step.num_rows if shape.is_decode else max(1, len(step.wanted))], place

    def _capture(self, logits: Callable[[], Tensor], place: str | None, again: _Again) -> Recording | None:
        """Records a shape; `None`: it takes more memory than it may."""

        def recorded() -> Tensor:
            if self._room and not self.shapes:  # one piece, which this and all other recordings are cut from
                with suppress(torch.OutOfMemoryError):
                    torch.empty(self._room, dtype=torch.uint8, device=self._device)
            return logits()

        if place is not None:
            raise _UnrecordableError(f"each step waits for the device, at {place}")
        recording: Recording = again(lambda: self._record(recorded))
        return recording if self.num_bytes + recording.num_bytes <= self._max_bytes else None


class _UnrecordableError(Exception):
    """A step is not one that can be replayed."""


def _in_words(error: Exception) -> str:
    if isinstance(error, _UnrecordableError):
        return str(error)
    first_line, place = str(error).split("\n", 1)[0], raised_at(error)
    return f"{type(error).__name__}: {first_line}" + (f" ({place})" if place else "")


def _checked(recording: Recording, expected: Tensor, again: _Again) -> Recording:
    recording.output.fill_(float("nan"))  # or a replay that writes nothing would be right
    again(recording.replay)
    if not _is_close(recording.output[: len(expected)], expected):
        raise _UnrecordableError("a replay computes other logits than the step itself")
    return recording


def _is_close(result: Tensor, expected: Tensor) -> bool:
    """Row by row; of a row that is no numbers (weights that are none) nothing is asked."""
    truth = expected.float()
    size = truth.norm(dim=-1)
    error = (result.float() - truth).norm(dim=-1)
    return bool((~size.isfinite() | (error <= TOLERANCE.get(expected.dtype, 3e-2) * size + 1e-6)).all())


def recorder(attention: PoolAttention) -> Callable[[Callable[[], Tensor]], Recording] | str:
    """Finds what records steps over this pool, or says why nothing can."""
    kv_cache = attention.kv_cache
    device = kv_cache.device
    if device.type != "cuda":
        return f"need a CUDA device, the model is on {device}"
    if any(kv_cache.groups.chunks):
        return "need layers that see a sequence as it is, some of this model cut it into chunks"
    for backend in attention.backends:
        if not backend.can_record:
            return f"need a backend that can be recorded, this pool is served by {backend.name!r}"
    stream, made = capture_stream(device), weakref.WeakSet[CUDARecording]()

    def record(function: Callable[[], Tensor]) -> CUDARecording:
        recording = CUDARecording(function, stream, next(iter(made), None))
        made.add(recording)
        return recording

    return record
