"""`Engine`: owns the pool of a patched model and runs every forward that goes through a `PagedCache`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from hf_paged.block_manager import BlockManager
from hf_paged.cache import PagedCache
from hf_paged.config import PagedConfig
from hf_paged.errors import OutOfBlocksError
from hf_paged.flat_forward import FlatForward, flat_padding
from hf_paged.forward_call import ForwardCall, map_batch, spread_rows
from hf_paged.interrupts import deferred_interrupt
from hf_paged.kernels import reference
from hf_paged.kv_cache import KVCache
from hf_paged.kv_pool import KVPool
from hf_paged.metrics import EngineStats
from hf_paged.model_state import ModelState
from hf_paged.runner import ModelRunner, ModelTraits, is_stochastic
from hf_paged.scheduler import Scheduler
from hf_paged.sequence import Sequence
from hf_paged.step_loop import StepLoop


class Engine:
    """The paged side of one patched model: `model.paged`.

    All state is behind one lock. Forwards of several threads run one after another; processors, criteria and streamers
    never run under the lock.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: PagedConfig,
        forward: Callable[..., Any],
        traits: ModelTraits,
    ) -> None:
        """Binds to a model.

        Args:
            model: The model; held weakly.
            config: The settings.
            forward: The forward function of the model's class before patching, unbound.
            traits: What `is_supported` found out about its architecture.
        """
        self.config = config
        self.traits = traits
        self._runner = ModelRunner(model, forward, model._supports_logits_to_keep())
        self._pool = KVPool(config, traits, self._runner)
        self._lock = self._pool.lock
        self._model_state = ModelState(model)
        self._steps = StepLoop(self._pool, self._runner, self._model_state)
        self._abandoned: deque[Sequence] = deque()  # filled by finalizers, without the lock
        self._sequence_count = 0
        self._num_generated_tokens = 0

    # The pool

    @property
    def num_layers(self) -> int:
        """Layers that store keys and values."""
        return self.traits.num_layers

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: keys and values of `block_size` tokens in all layers."""
        return self._pool.bytes_per_block

    @property
    def manager(self) -> BlockManager:
        """The block tables, made at first use with the pool's size."""
        return self._pool.manager

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler over `manager`."""
        return self._pool.scheduler

    @property
    def kv_cache(self) -> KVCache:
        """The pool tensor, allocated at first use and again when the model has moved to another device or dtype."""
        return self._pool.kv_cache

    def check_fits(self, num_tokens: int, prompt_tokens: int, new_tokens: int) -> None:
        """Raises `ValueError` for a sequence that could never fit the empty pool; see `KVPool.check_fits`."""
        self._pool.check_fits(num_tokens, prompt_tokens, new_tokens)

    def reset_prefix_cache(self) -> int:
        """Forgets the contents kept for prefix hits; returns how many blocks that were. Sequences keep theirs.

        Needed after weights were written through `.data`, which leaves no trace; other changes are noticed.
        """
        with self.transaction():
            return self.manager.reset_prefix_cache() if self._pool.is_made else 0

    def release(self) -> None:
        """Gives the pool's memory back until the next use. Live caches are computed again when they are next used.

        Raises:
            ValueError: A live `PagedCache` holds tokens that can't be computed again (embeddings, opaque forwards).
        """
        with self.transaction():
            self._collect_abandoned()
            self._pool.release()

    def stats(self) -> EngineStats:
        """A snapshot of the gauges and counters."""
        with self.transaction():
            self._collect_abandoned()
            if not self._pool.is_made:
                num_blocks = self.config.num_blocks or 0
                return EngineStats(num_blocks=num_blocks, num_free_blocks=num_blocks)
            manager, pool = self.manager, self.manager.pool
            self._pool.record_peak()
            return EngineStats(
                num_blocks=pool.num_blocks,
                num_free_blocks=pool.num_free,
                num_running=self.scheduler.num_resident,
                num_preemptions=self.scheduler.num_preemptions,
                num_cow_copies=manager.num_cow_copies,
                prefix_cache_hit_tokens=manager.prefix_hit_tokens,
                prefix_cache_query_tokens=manager.prefix_query_tokens,
                peak_blocks_in_use=pool.peak_in_use,
                kv_tokens_stored=manager.num_stored_tokens,
                kv_slots_allocated=manager.num_allocated_slots,
                peak_kv_tokens_stored=self._pool.peak[1],
                peak_kv_slots_allocated=self._pool.peak[2],
                num_steps=self._steps.num_steps,
                num_prefill_tokens=self._steps.num_prefill_tokens,
                num_generated_tokens=self._num_generated_tokens,
            )

    def count_generated(self, num_tokens: int) -> None:
        """Books tokens that a `generate()` call handed out."""
        with self.transaction():
            self._num_generated_tokens += num_tokens

    def check_invariants(self) -> None:
        """Asserts the pool's and the tables' invariants. Raises `AssertionError`."""
        with self.transaction():
            self._collect_abandoned()
            if self._pool.is_made:
                self.manager.check_invariants()

    # What a PagedCache asks for (cache.SequenceStore)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """The pool's lock, with Ctrl-C held back to its end: nothing inside is left half done. Re-entrant."""
        with self._lock, deferred_interrupt():
            yield

    def new_sequence(self) -> Sequence:
        """An empty sequence with an empty block table."""
        with self.transaction():
            self._sequence_count += 1
            self.manager.add(self._sequence_count)
            return Sequence(self._sequence_count)

    def fork_sequence(self, sequence: Sequence) -> Sequence:
        """A sequence equal to this one that shares all its blocks."""
        with self.transaction():
            self._sequence_count += 1
            self.manager.fork(sequence.seq_id, self._sequence_count)
            child = Sequence(
                self._sequence_count,
                None if sequence.token_ids is None else sequence.token_ids.copy(),
                sequence.num_tokens,
                sequence.num_computed_tokens,
                sequence.position_offset,
                sequence.extra_key,
            )
            if child.num_computed_tokens:
                self.scheduler.remember(child)
            return child

    def free_sequences(self, sequences: Iterable[Sequence]) -> None:
        """Ends sequences and releases their blocks."""
        with self.transaction():
            for sequence in sequences:
                self.scheduler.forget(sequence)
                self.manager.free(sequence.seq_id)

    def abandon_sequences(self, sequences: Iterable[Sequence]) -> None:
        """Called by the garbage collector, on any thread at any moment: only enqueues, takes no lock."""
        self._abandoned.extend(sequences)

    def crop_sequence(self, sequence: Sequence, num_tokens: int) -> None:
        """Cuts a sequence to its first `num_tokens` tokens."""
        with self.transaction():
            if sequence.token_ids is not None:
                del sequence.token_ids[num_tokens:]
            sequence.num_tokens = num_tokens
            if sequence.num_computed_tokens > num_tokens:
                sequence.num_computed_tokens = num_tokens
                self.manager.crop(sequence.seq_id, num_tokens)
            if sequence.num_computed_tokens == 0:
                self.scheduler.forget(sequence)

    def grow_opaque(self, sequences: list[Sequence], num_tokens: int) -> None:
        """Gives each sequence slots for tokens whose ids nobody told us.

        Raises:
            OutOfBlocksError: The pool can't hold them.
        """
        with self.transaction():
            manager, scheduler = self.manager, self.scheduler
            self._steps.recompute(sequences)
            held = [len(manager.block_table(sequence.seq_id)) for sequence in sequences]
            requests = [(sequence.seq_id, num_tokens) for sequence in sequences]
            protected = {sequence.seq_id for sequence in sequences}
            copies: list[tuple[int, int]] | None = None
            while copies is None:
                try:
                    copies = manager.append(requests)
                except OutOfBlocksError as error:
                    if not scheduler.preempt_newest(protected):
                        raise self._pool.out_of_blocks(error) from None
            self.kv_cache.copy_blocks(copies)
            self.kv_cache.zero_blocks(
                [
                    block
                    for sequence, count in zip(sequences, held, strict=True)
                    for block in manager.block_table(sequence.seq_id)[count:]
                ]
            )
            for sequence in sequences:
                sequence.token_ids = None
                sequence.num_tokens += num_tokens
                sequence.num_computed_tokens += num_tokens
                scheduler.remember(sequence)
            self._pool.record_peak()

    def write_tokens(self, layer: int, sequences: list[Sequence], key: Tensor, value: Tensor, start: list[int]) -> None:
        """Stores `[B, num_kv_heads, q, head_dim]` keys and values of one layer, from token `start[i]` on."""
        with self.transaction():
            length = key.shape[2]
            slots = np.stack(
                [self._slots(s, np.arange(first, first + length)) for s, first in zip(sequences, start, strict=True)]
            )
            kv_cache = self.kv_cache.tensor
            reference.reshape_and_cache(
                key.detach().transpose(1, 2).flatten(0, 1),
                value.detach().transpose(1, 2).flatten(0, 1),
                kv_cache,
                layer,
                torch.from_numpy(slots.reshape(-1)).to(kv_cache.device),
            )

    def read_tokens(
        self, layer: int, sequences: list[Sequence | None], padding: list[int], width: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer as `[B, num_kv_heads, width, head_dim]`, zeros in the padding and for `None`."""
        with self.transaction():
            self._steps.recompute([sequence for sequence in sequences if sequence is not None])
            slots = np.full((len(sequences), width), self.kv_cache.null_block * self.config.block_size, dtype=np.int64)
            for row, (sequence, pad) in enumerate(zip(sequences, padding, strict=True)):
                if sequence is not None:
                    slots[row, pad:] = self._slots(sequence, np.arange(width - pad))
            kv_cache = self.kv_cache.tensor
            return reference.gather_slots(kv_cache, layer, torch.from_numpy(slots).to(kv_cache.device))

    def _slots(self, sequence: Sequence, token_index: np.ndarray) -> np.ndarray:
        table = np.asarray(self.manager.block_table(sequence.seq_id), dtype=np.int64)
        block_size = self.config.block_size
        return table[token_index // block_size] * block_size + token_index % block_size

    # Forwards

    @torch.no_grad()
    def forward(self, cache: PagedCache, call: ForwardCall) -> ModelOutput:
        """Runs one forward of the patched model over a cache of its pool.

        Args:
            cache: Grows by the call's columns.
            call: The arguments.

        Returns:
            What the model's own forward would, in the caller's shape. The logits of finished (retired) rows are zeros.

        Raises:
            ValueError: The cache belongs to another model, the batch size changed, or the tokens could never fit.
            OutOfBlocksError: The pool is held by sequences that can't be preempted.
        """
        with self.transaction():
            self._collect_abandoned()
            if cache.store is not self:
                raise ValueError("this PagedCache belongs to another model (or to this one before it was unpatched)")
            _ = self.kv_cache  # follows the model to another device or dtype now, while preempted rows still can return
            batch, length = call.tokens.shape[:2]
            if length == 0:
                raise ValueError("the input is empty: give at least one token")
            if cache.fan_out > 1 and not call.repeats_rows(cache.fan_out):
                cache.split_fan_out()
            fan_out = cache.fan_out
            if not cache.sequences:
                cache.open_rows(batch // fan_out)
            if cache.batch_size != batch:
                raise ValueError(f"got {batch} rows for a PagedCache of {cache.batch_size} rows")
            call = call.select(slice(None, None, fan_out)) if fan_out > 1 else call
            active = [row for row, sequence in enumerate(cache.sequences) if sequence is not None]
            is_partial = len(active) < len(cache.sequences)
            call = call.select(active) if is_partial else call
            width = cache.get_seq_length()
            before = [_Mark.of(sequence) for sequence in cache.sequences if sequence is not None]
            try:
                padding = flat_padding(cache, call, active) if self._runs_flat() else None
                if padding is None:
                    output = self._forward_gathered(cache, call, active if is_partial else None)
                else:
                    output = self._forward_flat(cache, call, active, padding)
            except BaseException:
                for mark in before:
                    mark.restore(self)
                if width == 0:
                    self.free_sequences(sequence for sequence in cache.sequences if sequence is not None)
                cache.rewind(width)
                raise
            output = spread_rows(output, active, len(cache.sequences)) if is_partial else output
            if fan_out > 1:
                output = map_batch(output, len(cache.sequences), lambda x: x.repeat_interleave(fan_out, dim=0))
            output["past_key_values"] = cache
            return output

    def _runs_flat(self) -> bool:
        # A model that assists itself by early exit has fewer layers for the moment: what it stores is not for sharing.
        model = self._runner.model
        config = model.config.get_text_config(decoder=True)
        # Dropout in training mode is the model's own attention's business.
        is_own = config.num_hidden_layers == self.traits.num_layers and not (model.training and is_stochastic(model))
        return self.traits.runs_flat and is_own

    def _forward_gathered(self, cache: PagedCache, call: ForwardCall, active: list[int] | None) -> ModelOutput:
        """The model's own padded forward; `cache.update` stores and gathers."""
        self._steps.recompute([sequence for sequence in cache.sequences if sequence is not None])
        others = {name: value for name, value in call.others.items() if name != "return_dict"}
        arguments = {
            "input_ids": call.input_ids,
            "inputs_embeds": call.inputs_embeds,
            "attention_mask": call.attention_mask,
            "position_ids": call.position_ids,
        }
        if isinstance(call.logits_to_keep, Tensor) or call.logits_to_keep:
            arguments["logits_to_keep"] = call.logits_to_keep
        cache.select_active(active)
        with self.scheduler.protecting(s.seq_id for s in cache.sequences if s is not None):
            output: ModelOutput = self._runner.run_unpatched(
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
                **{name: value for name, value in arguments.items() if value is not None},
                **others,
            )
        cache.select_active(None)
        self._steps.num_steps += 1
        self._steps.num_prefill_tokens += call.tokens.shape[0] * (call.tokens.shape[1] - 1)
        return output

    def _forward_flat(
        self, cache: PagedCache, call: ForwardCall, active: list[int], padding: list[int]
    ) -> CausalLMOutputWithPast:
        """The call's real tokens as one flat batch (or several, if the token budget or the pool is smaller)."""
        sequences = [sequence for row in active if (sequence := cache.sequences[row]) is not None]
        width = cache.get_seq_length()
        if width == 0:
            cache.set_padding(padding)
        flat = FlatForward.make(call, sequences, padding, width)
        self._steps.recompute(flat.becoming_opaque())
        # Inside one generate() call the weights stand still, so its decode steps don't ask again.
        flat.extend_sequences(None if cache.owned_by_call and width > 0 else self._model_state)
        longest = max(sequence.num_tokens for sequence in sequences)
        self.check_fits(longest, longest, 0)
        logits = self._steps.run(sequences, flat.lay_out_tokens, flat.wanted_logits())
        cache.advance(flat.length)
        return CausalLMOutputWithPast(logits=logits)

    def _collect_abandoned(self) -> None:
        while self._abandoned:
            self.free_sequences([self._abandoned.popleft()])


@dataclass(slots=True)
class _Mark:
    """A sequence's state before a forward, to go back to if the forward fails."""

    sequence: Sequence
    num_tokens: int
    position_offset: int | None

    @classmethod
    def of(cls, sequence: Sequence) -> _Mark:
        return cls(sequence, sequence.num_tokens, sequence.position_offset)

    def restore(self, engine: Engine) -> None:
        # Tokens that became unknown in the failed forward stay unknown: only hashing and recomputing are lost.
        engine.crop_sequence(self.sequence, min(self.num_tokens, self.sequence.num_tokens))
        self.sequence.position_offset = self.position_offset
