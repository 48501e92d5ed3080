"""`CallerForwards`: forwards that a caller's own code makes over a `PagedCache`."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from transformers.utils import ModelOutput, logging

from hf_paged.attention.cache import PagedCache
from hf_paged.core.errors import UnsupportedCallError
from hf_paged.core.interrupts import deferred_interrupt
from hf_paged.engine.call_context import call_context
from hf_paged.engine.core import EngineCore
from hf_paged.engine.forward_run import ForwardRun
from hf_paged.engine.remote_rows import unsupported_on_ranks
from hf_paged.engine.row_store import RowStore
from hf_paged.memory.streams import among_steps, hand_out, let_caller_first, let_steps_first, on_steps_stream
from hf_paged.model.cache_argument import CACHE_ARGUMENTS, StateOutput
from hf_paged.model.forward_call import ForwardCall, map_batch, spread_rows
from hf_paged.model.packed_forward import PackedForward, plain_padding, sees_padding
from hf_paged.model.padded_runner import CalledForward
from hf_paged.model.traits import is_stochastic

logger = logging.get_logger(__name__)


class CallerForwards:
    """Runs callers' forwards beside all other rows, packed where that is possible."""

    def __init__(self, core: EngineCore, store: RowStore) -> None:
        self._core = core
        self._store = store

    @deferred_interrupt()
    @torch.no_grad()
    def forward(self, cache: PagedCache, call: ForwardCall) -> ModelOutput:
        """Runs one forward of the patched model over a cache of its pool, beside whatever else runs.

        Returns:
            What the model's own forward would, in the caller's shape. The logits of finished (retired) rows are zeros.

        Raises:
            ValueError: The cache belongs to another model, the batch size changed, or the tokens could never fit.
            OutOfBlocksError: The pool is held by sequences that can't be preempted.
            UnsupportedCallError: See `check_hooks`.
        """
        loop = cache.loop
        if loop is not None:
            loop.check_cancelled()
        if cache.store is not self._store:
            raise ValueError("this PagedCache belongs to another model (or to this one before it was unpatched)")
        self.check_hooks()
        with self._core.transaction():
            _ = self._core.kv_cache  # follows the model to another device or dtype while preempted rows can return
        batch, length = call.tokens.shape[:2]
        if length == 0:
            raise ValueError("the input is empty: give at least one token")
        # Of a forward in the caller's shape, pictures can't be told apart by rows.
        is_by_row = call.inner is None or self._is_own()
        if cache.fan_out > 1 and not (is_by_row and call.repeats_rows(cache.fan_out)):
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
        live = [sequence for sequence in cache.sequences if sequence is not None]
        before = [(sequence, sequence.num_tokens) for sequence in live]
        for sequence in live:
            if not sequence.is_recomputable:  # kept so far, should a forward fail; from here on it goes back to now
                self._core.post(partial(self._core.scheduler.slide, sequence))
        takes_positions = self._core.bound.takes_positions
        padded = [cache.padding[row] for row in active]
        padding = plain_padding(call, padded, width, takes_positions) if self._is_own() else None
        is_kept = loop is None and not cache.owned_by_call
        try:
            with self._store.held(cache) if is_kept else nullcontext():
                if padding is None and self._core.traits.states:
                    raise UnsupportedCallError(
                        "a model whose layers keep a state takes prompts padded on the left, with 2-D masks and "
                        "position ids, in evaluation mode: other calls need a cache of transformers' own as "
                        "past_key_values"
                    )
                is_packed = padding is not None and self.is_batched() and not sees_padding(call, padding, width)
                if self._core.ranks is not None and not is_packed:
                    raise unsupported_on_ranks(
                        "a forward whose padding can be seen (hidden states, hooks on inner modules, masks with holes)"
                    )
                if is_packed and padding is not None:
                    output = self._forward_packed(cache, call, active, padding)
                else:
                    output = self._forward_called(cache, call, active, padding)
        except BaseException:
            with self._core.transaction():
                for sequence, num_tokens in before:
                    self._core.scheduler.crop(sequence, min(num_tokens, sequence.num_tokens))
                cache.rewind(width)
            raise
        output = spread_rows(output, active, len(cache.sequences)) if is_partial else output
        if fan_out > 1:
            output = map_batch(output, len(cache.sequences), lambda x: x.repeat_interleave(fan_out, dim=0))
        output[self._core.bound.cache_argument] = cache
        return output

    def is_batched(self) -> bool:
        """Whether forwards of the model in its present state can share steps with others."""
        return self._core.traits.is_batched and self._is_own() and not self._core.weights_version.needs_rows

    def _is_own(self) -> bool:
        """Whether what the model stores of a token follows from the row's tokens and positions, at least at first."""
        # A model that assists itself by early exit has fewer layers for the moment: what it stores is not for sharing.
        model = self._core.bound.model
        config = self._core.bound.text_config
        # Dropout in training mode is the model's own attention's business.
        traits = self._core.traits
        is_whole = bool(traits.cross) or config.num_hidden_layers == traits.num_layers
        is_own = is_whole and not (model.training and is_stochastic(model))
        return is_own and not traits.runs_stock

    def look_at_hooks(self) -> None:
        """At the beginning of a call: finds the hooks of modules that were put into the model since."""
        self._core.weights_version.look_at_hooks()

    def check_hooks(self) -> bool:
        """Whether hooks on inner modules have to be shown whole, padded batches. Warns where they cost the packed
        batch.

        Raises:
            UnsupportedCallError: The same under `strict=True`; see also `WeightsVersion.check_rows`.
        """
        self._core.weights_version.check_rows()
        if not self._core.weights_version.needs_rows:
            return False
        if self._core.traits.runs_packed:
            reason = "forward hooks on the model's inner modules may address rows or columns"
            if self._core.config.strict:
                raise UnsupportedCallError(
                    f"{reason}: calls can only run padded, and strict=True forbids it; hf_paged.packed_hook marks "
                    "hooks that treat all tokens alike"
                )
            logger.warning_once(
                f"hf_paged: {reason}: calls run padded, one after another, as long as they are there; "
                "hf_paged.packed_hook marks hooks that treat all tokens alike"
            )
        return True

    def _pack(self, cache: PagedCache, call: ForwardCall, active: list[int], padding: list[int]) -> PackedForward:
        sequences = [sequence for row in active if (sequence := cache.sequences[row]) is not None]
        cache.set_padding(padding, active)
        return PackedForward.make(call, sequences, padding, cache.get_seq_length(), self._core.bound)

    def _forward_called(
        self, cache: PagedCache, call: ForwardCall, active: list[int], padding: list[int] | None
    ) -> ModelOutput:
        """A step in the caller's shape, since its padding is seen; on its thread, where hooks of its own may look.

        Without `padding`, what it stores doesn't follow from its tokens: each of its columns is kept, as it comes out.
        """
        if self._core.traits.cross:
            raise UnsupportedCallError(
                "a model with an encoder gives logits over a PagedCache, and of tokens without padding: what else is "
                "asked for (hidden states, a loss, hooks on inner modules, masks) needs a cache of transformers' own "
                "as past_key_values"
            )
        if padding is None:
            own, positions = call.on_host(), call.position_ids if self._core.bound.takes_positions else None
            if positions is not None and positions.ndim == 2 and len(positions) not in (1, len(active)):
                raise ValueError(f"got position_ids of {len(positions)} rows for {len(active)} rows of tokens")
            ids = own.input_ids
            ids = torch.full(call.tokens.shape[:2], -1, device="cpu") if ids is None else ids
            packed = self._pack(
                cache, ForwardCall(ids, None, None, None, 0), active, [cache.padding[r] for r in active]
            )
        else:
            packed = self._pack(cache, call, active, padding)
        sequences, width = packed.sequences, packed.width + packed.length
        with self._store.residency.holding(sequences, has_forward=True), among_steps(self._core.pool.kv_device):
            with self._core.transaction():
                self._extend(cache, packed)
                limit = self._core.traits.regime_length
                hooks = self._core.weights_version.hooks
                # Frequencies are those of the moment from here on; only this call's steps know its rows' adapters.
                if padding is None or (limit is not None and packed.longest >= limit) or hooks.has_rows_of_mine:
                    for sequence in sequences:
                        sequence.is_recomputable = False
                rows = [row for row, sequence in enumerate(sequences) if sequence.num_uncomputed_tokens]
                batch = self._store.residency.schedule_together([sequences[row] for row in rows])
            called = CalledForward(call.arguments(), call.twin, rows, len(sequences), width, packed.length)
            output: ModelOutput = self._core.executor.launch(batch, called)
            self._core.worker.loop.settle()
        cache.advance(packed.length)
        hand_out([value for name, value in output.items() if name not in CACHE_ARGUMENTS])
        return output

    def _forward_packed(
        self, cache: PagedCache, call: ForwardCall, active: list[int], padding: list[int]
    ) -> ModelOutput:
        """Runs the call's real tokens in the next steps' packed batches."""
        packed = self._pack(cache, call, active, padding)
        run: ForwardRun | None = None
        try:
            with self._core.worker.leading():
                with self._core.transaction():
                    self._extend(cache, packed)
                    longest = max(sequence.num_tokens for sequence in packed.sequences)
                    self._core.pool.check_fits(longest, longest, 0)
                    wanted = packed.wanted_logits()
                    run = ForwardRun(self._core.pool, self._core.worker, packed.sequences, wanted, cache.loop)
                logits = run.logits()
        except BaseException:
            if run is not None:
                run.withdraw()
            let_steps_first(self._core.pool.kv_device)  # they may read what the caller gave
            raise
        cache.advance(packed.length)
        takes_past = self._core.bound.cache_argument == "past_key_values"
        return self._core.bound.output_type(logits=logits) if takes_past else StateOutput(logits=logits)

    def _extend(self, cache: PagedCache, packed: PackedForward) -> None:
        """Adds a call's tokens to its sequences. The pool's lock is held."""
        salt = () if (salt := call_context().cache_salt) is None else (salt,)
        device = self._core.pool.kv_device
        let_caller_first(device)
        with on_steps_stream(device):  # in their memory: they may read it when the caller is gone
            # Before each step the loop looks at the weights, which is enough inside of one generate() call.
            if cache.owned_by_call and packed.width > 0:
                self._core.check_unchanged(packed.sequences)
                packed.extend_sequences(None)
            else:
                key, rows = self._core.weights_key(), self._core.adapters_for(len(cache.sequences))
                live = [own for own, sequence in zip(rows, cache.sequences, strict=True) if sequence is not None]
                packed.extend_sequences(key, salt, live)
        batch_key = self._core.batch_key()
        for sequence in packed.sequences:
            sequence.group.batch_key = batch_key
