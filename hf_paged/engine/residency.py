"""`Residency`: sequences that are all in the pool, beside each other, while their caller computes or reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from hf_paged.core.batch import Batch
from hf_paged.core.errors import OutOfBlocksError
from hf_paged.core.sequence import Sequence, SequenceGroup
from hf_paged.engine.core import EngineCore
from hf_paged.engine.forward_run import ForwardRun


class Residency:
    """Brings sequences into one engine's pool and keeps them there."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    @contextmanager
    def holding(self, sequences: list[Sequence], has_forward: bool = False) -> Iterator[None]:
        """Within it all these sequences are in the pool, and no step runs.

        Args:
            has_forward: The model is run within: while the engine is paused, that waits, or is a step.

        Raises:
            ValueError: The model's weights, adapters or hooks are not those that one of them was computed with.
            OutOfBlocksError: They don't fit beside each other.
            RuntimeError: This thread is inside a step, and not that of these sequences.
        """
        core = self._core
        groups = {sequence.group.arrival: sequence.group for sequence in sequences}

        def needs_step() -> bool:
            return has_forward or any(sequence.num_uncomputed_tokens for sequence in sequences)

        if core.bound.is_inside and all(group.num_pins for group in groups.values()):
            yield  # the forward that this thread is in has them there
            return
        with core.worker.pause.forwarding(needs_step, core.current_loop):
            pinned: list[SequenceGroup] = []
            try:  # around the pinning too, behind which Ctrl-C may come
                with core.transaction():
                    for group in groups.values():
                        group.num_pins += 1
                        pinned.append(group)
                self._bring_back(sequences)
                yield
            finally:
                with core.transaction():
                    for group in pinned:
                        group.num_pins -= 1

    def _bring_back(self, sequences: list[Sequence]) -> None:
        core = self._core
        with core.transaction():
            lost = [s for s in sequences if s.num_uncomputed_tokens > 0 or s.group.status == "swapped"]
            if not lost:
                return
            state = core.weights_key()
            for sequence in lost:
                if sequence.num_uncomputed_tokens:
                    sequence.check_state(state, sequence.adapter)
            swapped = {s.group.arrival: s.group for s in lost if s.group.status == "swapped"}
            for group in swapped.values():
                try:
                    core.pool.execute_moves(core.scheduler.preemption.swap_in_now(group))
                except OutOfBlocksError as error:
                    core.pool.execute([("swap_outs", error.swap_outs)])
                    raise core.pool.out_of_blocks(error) from None
            lost = [sequence for sequence in lost if sequence.num_uncomputed_tokens > 0]
            if not lost:
                return
            for sequence in lost:
                sequence.group.batch_key = core.batch_key()
        run: ForwardRun | None = None
        try:
            with core.transaction():
                run = ForwardRun(core.pool, core.worker, lost, np.empty((len(lost), 0), dtype=np.int64))
            run.logits()
        except BaseException:
            if run is not None:
                run.withdraw()
            raise

    def schedule_together(self, sequences: list[Sequence]) -> Batch:
        """One step of all uncomputed tokens of these sequences, all in the pool. The pool's lock is held.

        Raises:
            OutOfBlocksError: The pool can't hold them.
        """
        core, manager = self._core, self._core.manager
        core.pool.log.step = core.executor.num_steps + 1
        core.look_at_weights(is_before_step=True)
        try:
            return core.scheduler.schedule_together(sequences)
        except OutOfBlocksError as error:
            core.pool.execute([("swap_outs", error.swap_outs)])
            blocks = {block for sequence in sequences for block in manager.all_blocks(sequence.seq_id)}
            if len(blocks) + error.needed > manager.pool.num_blocks:  # also with the pool to itself
                error.needed += len(blocks)
            raise core.pool.out_of_blocks(error) from None
