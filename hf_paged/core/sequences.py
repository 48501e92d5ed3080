"""`Sequences`: how sequences begin, fork, are cut and end, between two steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace

from hf_paged.core.block_manager import BlockManager
from hf_paged.core.policy import Policy
from hf_paged.core.preemption import Preemption
from hf_paged.core.queues import Queues
from hf_paged.core.sequence import Sequence, SequenceGroup, SequenceStatus


class Sequences:
    """All sequences and their groups: the operations on them outside of steps, and the queues that hold them.

    Args:
        prefers_swap: Whether a group that could be computed again is to be swapped, if there is CPU memory for it.
        policy: Order, admission, choice of blocks, victim; `FCFS` by default.

    Attributes:
        queues: The groups, by what they wait for.
        preemption: Who makes room, and how many have.
    """

    def __init__(
        self, manager: BlockManager, prefers_swap: Callable[[SequenceGroup], bool], policy: Policy | None
    ) -> None:
        self._manager = manager
        self._log = manager.log
        if policy is not None:
            manager.choose = policy.blocks
        self.queues = Queues(manager, policy)
        self.preemption = Preemption(manager, self.queues, prefers_swap)
        self._num_sequences = 0

    def new_group(
        self,
        priority: int = 0,
        batch_key: Hashable = None,
        owner: object = None,
        request_id: str | None = None,
        max_tokens: int = 0,
    ) -> SequenceGroup:
        """An empty group, the newest."""
        group = SequenceGroup(0, priority, batch_key=batch_key, owner=owner, request_id=request_id)
        group.max_tokens = max_tokens
        return self.queues.enter(group)

    def new_sequence(self, group: SequenceGroup | None = None) -> Sequence:
        """An empty sequence, in a group of its own if none is given."""
        group = group or self.new_group()
        self._num_sequences += 1
        self._manager.add(self._num_sequences)
        self._log.enter(self._num_sequences, group)
        sequence = Sequence(self._num_sequences, group)
        group.sequences.append(sequence)
        self.queues.live[group.arrival] = group
        return sequence

    def fork(self, parent: Sequence, group: SequenceGroup | None = None) -> Sequence:
        """A sequence equal to its parent that shares all its blocks.

        Args:
            parent: Any live sequence that isn't in a running step.
            group: Where the child belongs; `None`: to its parent's group. Another group must not be swapped apart.
        """
        group = group or parent.group
        self._num_sequences += 1
        self._log.enter(self._num_sequences, group)
        self._manager.fork(parent.seq_id, self._num_sequences)
        child = replace(parent, seq_id=self._num_sequences, group=group, token_ids=parent.token_ids.copy())
        group.sequences.append(child)
        if group is not parent.group:
            group.status, group.is_idle = parent.group.status, parent.group.is_idle
        self.queues.live[group.arrival] = group
        self.queues.file(group)
        return child

    def free(self, sequence: Sequence, reason: str | None = None) -> None:
        """Ends a sequence and releases its blocks. It must not be in a running step.

        Args:
            reason: Why it ends, for the log, should it be the last of its group.
        """
        self._manager.free(sequence.seq_id)
        self._log.leave(sequence.seq_id)
        group = sequence.group
        group.sequences.remove(sequence)
        if not group.sequences:
            self.queues.live.pop(group.arrival, None)
            self._log.add_for_group("finished", group, reason)
        self.queues.file(group)

    def crop(self, sequence: Sequence, num_tokens: int) -> None:
        """Cuts a sequence to its first `num_tokens` tokens.

        What lies behind the windows of so few tokens may be gone: then all of it is to be computed again.

        Raises:
            ValueError: That can't be; nothing has changed.
        """
        if not self.can_crop(sequence, num_tokens):
            raise ValueError(f"what sequence {sequence.seq_id} needs behind {num_tokens} tokens was given back")
        del sequence.token_ids[num_tokens:]
        sequence.num_tokens = num_tokens
        sequence.given_end = min(sequence.given_end, num_tokens)
        sequence.num_at_once = min(sequence.num_at_once, num_tokens)
        if sequence.spans:
            # What is left of a run has seen the rest of it.
            sequence.is_recomputable &= sequence.span_start(num_tokens) >= num_tokens
            sequence.spans = tuple(span for span in sequence.spans if span[1] <= num_tokens)
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, num_tokens)
        if num_tokens:
            if num_tokens <= self._manager.num_tokens(sequence.seq_id):
                if self._manager.can_crop(sequence.seq_id, num_tokens):
                    self._manager.crop(sequence.seq_id, num_tokens)
                else:
                    self.preemption.drop(sequence)
            self._manager.forget_hashes(sequence.seq_id, num_tokens)
        else:
            self._manager.restart(sequence.seq_id)
        self.queues.file(sequence.group)

    def can_crop(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether what the sequence needs behind its first `num_tokens` tokens is there, or can be computed again."""
        return (
            sequence.is_recomputable
            or num_tokens == 0
            or num_tokens >= self._manager.num_tokens(sequence.seq_id)
            or self._manager.can_crop(sequence.seq_id, num_tokens)
        )

    def slide(self, sequence: Sequence) -> None:
        """Gives back what lies behind the windows of all tokens that are not computed yet.

        Steps do so by themselves, but for a sequence that can't be computed again: should a forward of its caller's
        fail, it goes back to what it was before.
        """
        self._manager.slide(sequence.seq_id, sequence.num_computed_tokens)

    def add_placeholder(self, sequence: Sequence, placeholder: int) -> None:
        """`add_placeholders` of one."""
        self.add_placeholders([sequence], [placeholder])

    def resolve_token(self, sequence: Sequence, token_id: int) -> None:
        """`resolve_tokens` of one."""
        self.resolve_tokens([sequence], [token_id])

    def add_placeholders(self, sequences: Iterable[Sequence], placeholders: Iterable[int]) -> None:
        """Books tokens that are being chosen: they can be scheduled before the host knows which ones they are.

        Args:
            sequences: Each gets one.
            placeholders: Its place among the tokens that the last step chooses.
        """
        ready = self.queues.ready
        for sequence, placeholder in zip(sequences, placeholders, strict=True):
            sequence.logits_from = sequence.num_tokens
            sequence.num_tokens += 1
            sequence.placeholder = placeholder
            group = sequence.group
            if group.arrival not in ready or group.status is not SequenceStatus.RUNNING:
                self.queues.wake(group)

    def resolve_tokens(self, sequences: Iterable[Sequence], token_ids: Iterable[int]) -> None:
        """Replaces the first placeholder of each by its token, whose keys may be computed already."""
        block_size = self._manager.block_size
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            sequence.token_ids.append(token_id)
            num_known = len(sequence.token_ids)
            if num_known % block_size or num_known > sequence.num_computed_tokens:
                continue
            if sequence.is_recomputable:
                self._manager.prefix.commit(sequence.seq_id, sequence.token_ids, sequence.extra_key, num_known)
            elif self._manager.sliding:
                self.slide(sequence)

    def add_drafts(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Adds drafts after the known tokens, and asks for the logits of each and of the token before them.

        `settle_drafts` says what becomes of them, before others are added.
        """
        first = sequence.num_tokens - 1
        sequence.token_ids += token_ids
        sequence.num_tokens += len(token_ids)
        sequence.num_drafts = len(token_ids)
        sequence.logits_from = first
        sequence.wanted = list(range(first, sequence.num_tokens)) if token_ids else None
        self.queues.wake(sequence.group)

    def settle_drafts(self, sequence: Sequence, num_kept: int) -> None:
        """Makes the first so many drafts tokens, and cuts the others. The sequence must not be in a running step."""
        num_cut = sequence.num_drafts - num_kept
        sequence.num_drafts, sequence.wanted = 0, None
        if num_cut:
            self.crop(sequence, sequence.num_tokens - num_cut)
        if self._manager.sliding:
            self.slide(sequence)
