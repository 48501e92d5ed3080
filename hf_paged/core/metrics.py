"""`EngineStats`: the engine's gauges and counters at one moment."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters only grow until `unpatch`; gauges are as of now.

    Attributes:
        num_blocks: Blocks in the pool; 0 before its first use if it is to be sized from memory.
        num_free_blocks: Blocks that are not held, those kept for prefix hits included.
        num_running: Sequences with keys and values in the pool, but for those of a `PagedCache` at rest.
        num_waiting: Requests with work that hold no blocks: not started, or preempted by recomputation.
        num_swapped: Sequences whose blocks are in CPU memory.
        num_preemptions: Sequences whose blocks were taken for others (counter).
        num_swapped_out: Those of them that were moved to CPU memory (counter).
        num_admission_stalls: Steps in which the first waiting request did not fit into the free blocks (counter).
        num_blocks_allocated: Blocks that sequences took, be it to grow, for a copy or to come back; not those that they
            found in the prefix cache or shared with a sibling (counter). Divided by the tokens generated meanwhile,
            `1 / block_size` is a lone greedy row; less means that rows share.
        num_cow_copies: Blocks copied because a holder of a shared block wrote to it (counter).
        prefix_cache_hit_tokens: Tokens whose keys and values were found in the pool (counter).
        prefix_cache_query_tokens: Tokens looked up (counter).
        peak_blocks_in_use: Most blocks held at once.
        kv_tokens_stored: Distinct tokens in physical slots of live sequences, a shared block counted once; where layers
            with and without a window have blocks of their own, a token counts in each.
        kv_slots_allocated: Slots of the blocks that live sequences hold.
        peak_kv_tokens_stored: `kv_tokens_stored` when `peak_blocks_in_use` was reached.
        peak_kv_slots_allocated: `kv_slots_allocated` at that moment.
        num_states: States of live sequences in the pool, of a model with recurrent layers; a shared one counted once.
        state_blocks: Blocks that they hold.
        num_steps: Model forwards run (counter).
        num_replayed_steps: Those of them that were replays of CUDA graphs (counter); see `explain()` for the others.
        num_prefill_tokens: Tokens computed beyond one a sequence and step, recomputation included (counter).
        num_generated_tokens: Tokens handed to callers by `generate()` (counter).
        num_draft_tokens: Drafts that were verified: of prompt lookup, in the engine (counter).
        num_accepted_tokens: Those of them that were right (counter).
        detours: Calls that did not run in the engine's own loop, by the reason (counters); see `explain()`.
    """

    num_blocks: int = 0
    num_free_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_preemptions: int = 0
    num_swapped_out: int = 0
    num_admission_stalls: int = 0
    num_blocks_allocated: int = 0
    num_cow_copies: int = 0
    prefix_cache_hit_tokens: int = 0
    prefix_cache_query_tokens: int = 0
    peak_blocks_in_use: int = 0
    kv_tokens_stored: int = 0
    kv_slots_allocated: int = 0
    peak_kv_tokens_stored: int = 0
    peak_kv_slots_allocated: int = 0
    num_states: int = 0
    state_blocks: int = 0
    num_steps: int = 0
    num_replayed_steps: int = 0
    num_prefill_tokens: int = 0
    num_generated_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    detours: Counter[str] = field(default_factory=Counter)
