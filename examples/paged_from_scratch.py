"""Paged attention and continuous batching from scratch: torch, a model of transformers, and no code of hf_paged.

    python examples/paged_from_scratch.py                      # the embedded model
    python examples/paged_from_scratch.py Qwen/Qwen3-0.6B      # or another model whose attention is the plain one

A language model keeps the keys and values (KV) of all tokens so far, since each new token attends to them. The usual
cache is a rectangle, [batch, longest row]: short rows are padded, rows that end leave their place empty until the
longest one ends, and each sample has its own copy of the prompt. This file keeps them the way an operating system keeps
memory, in blocks of a few tokens that lie anywhere, and finds them through a table for each sequence. The rest follows:

    1. Blocks             who holds which block
    2. Block tables       sequences grow, share blocks, copy a block before they write to it, and leave
    3. Attention          reads keys and values through a block table
    4. A step             prompts and decodes of many sequences in one forward of the model
    5. The scheduler      lets sequences in between two steps, and preempts the newest when blocks run out
    6. The engine         steps, until every sequence has its tokens
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

# --- 1. Blocks --------------------------------------------------------------------------------------------------------
# The pool is a list of numbers: how many sequences hold each block. Nothing here knows what a block contains.


class BlockPool:
    """Blocks 0 to `num_blocks - 1`. A block that no sequence holds is free."""

    def __init__(self, num_blocks: int) -> None:
        self.ref_counts = [0] * num_blocks
        self.free_blocks = list(range(num_blocks))

    def allocate(self) -> int:
        block = self.free_blocks.pop()
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.free_blocks.append(block)


# --- 2. Block tables --------------------------------------------------------------------------------------------------
# A sequence is its tokens, and how many of them are computed, which means that their keys and values are in blocks. The
# difference is the work that the next step has to do: all tokens of a new prompt, one token of a sequence that decodes.


@dataclass(eq=False)
class Sequence:
    name: str
    token_ids: list[int]
    max_length: int
    num_branches: int = 1  # how many continuations of the prompt are wanted
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)  # entry i holds tokens i * block_size and following


class BlockTables:
    """Every change of a block table happens here, so that ref counts and tables always agree."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size

    def blocks_needed(self, sequence: Sequence) -> int:
        """Free blocks that the tokens to compute will take."""
        num_blocks = -(-len(sequence.token_ids) // self.block_size)  # rounded up
        return num_blocks - len(sequence.block_table) + self.must_copy(sequence)

    def must_copy(self, sequence: Sequence) -> bool:
        """Whether the next token goes into a last block that other sequences read, too."""
        has_room = sequence.num_computed % self.block_size > 0
        return has_room and self.pool.ref_counts[sequence.block_table[-1]] > 1

    def append(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Gives a sequence a slot for each token to compute. Returns the block copies to make first: (from, to)."""
        copies = []
        if self.must_copy(sequence):  # copy-on-write; the last of the holders finds a ref count of 1, and does not copy
            shared = sequence.block_table[-1]
            sequence.block_table[-1] = self.pool.allocate()
            self.pool.release(shared)
            copies.append((shared, sequence.block_table[-1]))
        for _ in range(self.blocks_needed(sequence)):
            sequence.block_table.append(self.pool.allocate())
        return copies

    def fork(self, parent: Sequence, name: str) -> Sequence:
        """A sequence with the same past. That costs a copy of a list of small numbers, and of no keys or values."""
        for block in parent.block_table:
            self.pool.share(block)
        return replace(parent, name=name, token_ids=list(parent.token_ids), block_table=list(parent.block_table))

    def release(self, sequence: Sequence) -> None:
        """Gives all blocks back. The tokens stay: the sequence can be computed again."""
        for block in sequence.block_table:
            self.pool.release(block)
        sequence.block_table = []
        sequence.num_computed = 0


# --- 3. Attention -----------------------------------------------------------------------------------------------------
# The only place where the model meets the blocks. Layers of transformers call the function that is registered under the
# name of their attention implementation, with rotary embeddings applied; what `model(...)` is given besides, as `step`,
# comes along. All tokens of a step lie side by side, so the batch dimension is 1 and nothing is padded.


@dataclass(frozen=True)
class Row:
    """The tokens that one sequence has in a step."""

    place: slice  # in the step
    positions: torch.Tensor  # [n], in the sequence
    block_table: torch.Tensor  # [blocks]


@dataclass(frozen=True)
class Step:
    kv: torch.Tensor  # [layers, 2, blocks, block_size, kv_heads, head_dim]: the whole pool
    slots: torch.Tensor  # [T]: where each token's key and value go; slot = block * block_size + offset
    rows: list[Row]


def paged_attention(
    module: Any,  # the layer's attention
    query: torch.Tensor,  # [1, heads, T, head_dim]
    key: torch.Tensor,  # [1, kv_heads, T, head_dim]
    value: torch.Tensor,  # [1, kv_heads, T, head_dim]
    _attention_mask: None,  # transformers makes no mask for an attention it does not know
    *,
    scaling: float,
    step: Step,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """One layer: write the new keys and values to their slots, then let each row attend to its own blocks."""
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))  # [T, heads, head_dim]
    keys, values = step.kv[module.layer_idx]  # [blocks, block_size, kv_heads, head_dim] each
    keys.view(-1, *key.shape[1:])[step.slots] = key
    values.view(-1, *value.shape[1:])[step.slots] = value

    output = torch.empty_like(query)
    for row in step.rows:
        row_keys, row_values = keys[row.block_table], values[row.block_table]  # gathered in the order of the tokens
        output[row.place] = attend(query[row.place], row_keys, row_values, row.positions, scaling)
    return output[None], None  # [1, T, heads, head_dim]


def attend(
    query: torch.Tensor,  # [n, heads, head_dim]
    keys: torch.Tensor,  # [blocks, block_size, kv_heads, head_dim]
    values: torch.Tensor,
    positions: torch.Tensor,  # [n]
    scaling: float,
) -> torch.Tensor:
    """Plain attention of one sequence: softmax(q k^T) v, where a token sees itself and what is before it."""
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)  # [K, kv_heads, head_dim]
    sharing = query.shape[1] // keys.shape[1]  # query heads that read the same keys (grouped-query attention)
    keys, values = keys.repeat_interleave(sharing, dim=1), values.repeat_interleave(sharing, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scaling
    unseen = torch.arange(len(keys), device=keys.device) > positions[:, None]  # [n, K], with the unused end of a block
    weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


AttentionInterface.register("paged_from_scratch", paged_attention)


# --- 4. A step --------------------------------------------------------------------------------------------------------
# One forward for all sequences that run. A prompt of 50 tokens beside three decodes is a step of 53 tokens: matrix
# products do not care whose tokens they multiply, and attention has just been told. The weights are read once for all.


@torch.inference_mode()
def run_step(model: PreTrainedModel, kv: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Computes all uncomputed tokens. Returns the logits behind the last token of each sequence, [S, vocabulary]."""
    block_size = kv.shape[3]
    tensor = partial(torch.tensor, device=kv.device)
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[Row] = []
    for sequence in sequences:
        start, table = len(token_ids), sequence.block_table
        new = range(sequence.num_computed, len(sequence.token_ids))
        token_ids += sequence.token_ids[new.start :]
        positions += new
        slots += [table[position // block_size] * block_size + position % block_size for position in new]
        rows.append(Row(slice(start, len(token_ids)), tensor(new), tensor(table)))
    logits: torch.Tensor = model(
        input_ids=tensor([token_ids]),  # [1, T]
        position_ids=tensor([positions]),  # [1, T]
        logits_to_keep=tensor([row.place.stop - 1 for row in rows]),  # of each row's last token
        use_cache=False,  # transformers' own
        step=Step(kv, tensor(slots), rows),
    ).logits[0]
    return logits


# --- 5. The scheduler -------------------------------------------------------------------------------------------------
# Sequences run in the order of their arrival. All that run get their next slots, the oldest first. When blocks run out,
# the newest makes room: its blocks are free, and it waits until its tokens, the generated ones included, fit again.
# Computed again they are the same keys and values. The oldest never makes room, so there is always progress.


class Scheduler:
    """Continuous batching: a sequence starts as soon as its tokens fit, and leaves in the step that ends it."""

    def __init__(self, tables: BlockTables) -> None:
        self.tables = tables
        self.running: list[Sequence] = []  # the oldest first
        self.waiting: deque[Sequence] = deque()  # all of them newer than those that run
        self.num_preemptions = 0

    def schedule(self) -> list[tuple[int, int]]:
        """Chooses what runs next, and makes room for it. Returns the block copies to make first."""
        copies: list[tuple[int, int]] = []
        num_ready = 0
        while num_ready < len(self.running):
            if self.fits(self.running[num_ready]):
                copies += self.tables.append(self.running[num_ready])
                num_ready += 1
            else:
                self.preempt_newest()  # perhaps the very one that found no room
        while self.waiting and self.fits(self.waiting[0]):
            self.running.append(self.waiting.popleft())
            self.tables.append(self.running[-1])
        return copies

    def fits(self, sequence: Sequence) -> bool:
        return self.tables.blocks_needed(sequence) <= len(self.tables.pool.free_blocks)

    def preempt_newest(self) -> None:
        newest = self.running.pop()
        self.tables.release(newest)
        self.waiting.appendleft(newest)
        self.num_preemptions += 1

    def finish(self, sequence: Sequence) -> None:
        self.tables.release(sequence)
        self.running.remove(sequence)


# --- 6. The engine ----------------------------------------------------------------------------------------------------
# Schedule, copy, run, choose, and again. The choice is greedy. A request for several branches takes the best first
# tokens, one a branch, and goes on greedily from each: branches share the prompt's blocks, and part where they write.


class Engine:
    """Generates for all sequences that were submitted, before or between steps."""

    def __init__(self, model: PreTrainedModel, num_blocks: int, block_size: int, eos_token_id: int | None) -> None:
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, num_blocks, block_size, config.num_key_value_heads, head_dim)
        model.set_attn_implementation("paged_from_scratch")
        self.model = model
        self.kv = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.tables = BlockTables(BlockPool(num_blocks), block_size)
        self.scheduler = Scheduler(self.tables)
        self.eos_token_id = eos_token_id
        self.results: dict[str, list[int]] = {}  # prompt and new tokens, by name
        self.num_copies = 0

    def submit(self, name: str, prompt: list[int], max_new_tokens: int, num_branches: int = 1) -> None:
        sequence = Sequence(name, list(prompt), len(prompt) + max_new_tokens, num_branches)
        num_slots = self.kv.shape[2] * self.kv.shape[3]
        if not prompt or sequence.max_length > num_slots:
            raise ValueError(f"{name} may have {sequence.max_length} tokens; the pool has {num_slots} slots")
        self.scheduler.waiting.append(sequence)

    def steps(self) -> Iterator[dict[str, int]]:
        """Runs until nothing is left. Yields, step by step, how many tokens each sequence had in it."""
        while self.scheduler.running or self.scheduler.waiting:
            for source, target in self.scheduler.schedule():
                self.kv[:, :, target] = self.kv[:, :, source]
                self.num_copies += 1
            batch = list(self.scheduler.running)
            logits = run_step(self.model, self.kv, batch)
            num_tokens = {sequence.name: len(sequence.token_ids) - sequence.num_computed for sequence in batch}
            for sequence, row in zip(batch, logits, strict=True):
                sequence.num_computed = len(sequence.token_ids)
                self.choose(sequence, row)
            yield num_tokens

    def choose(self, sequence: Sequence, logits: torch.Tensor) -> None:
        """Appends the best next token; of a prompt with branches, another one to each fork."""
        best, *others = logits.topk(sequence.num_branches).indices.tolist()
        sequence.num_branches = 1
        place = self.scheduler.running.index(sequence)
        forks = [self.tables.fork(sequence, f"{sequence.name}{number}") for number in range(2, 2 + len(others))]
        self.scheduler.running[place + 1 : place + 1] = forks  # as old as their parent, and before anything newer
        for branch, token_id in zip([sequence, *forks], [best, *others], strict=True):
            branch.token_ids.append(token_id)
            if token_id == self.eos_token_id or len(branch.token_ids) == branch.max_length:
                self.results[branch.name] = branch.token_ids
                self.scheduler.finish(branch)


# --- Try it -----------------------------------------------------------------------------------------------------------

PROMPTS = {
    "A": "It was late in the evening, and a man",
    "B": "The door opened, and",
    "C": "Nobody had seen the letter before the captain came back from the sea, and",
    "D": "To be honest with you, said the",
}
EMBEDDED = Path(__file__).parents[1] / "hf_paged" / "assets" / "tiny_lm"


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else EMBEDDED
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    prompts = {key: tokenizer(text).input_ids for key, text in PROMPTS.items()}

    engine = Engine(model, num_blocks=24, block_size=4, eos_token_id=tokenizer.eos_token_id)
    engine.submit("A", prompts["A"], max_new_tokens=20, num_branches=2)
    engine.submit("B", prompts["B"], max_new_tokens=12)
    print("tokens computed:   A  A2   B   C   D   blocks free")
    for number, num_tokens in enumerate(engine.steps(), start=1):
        cells = [f"{num_tokens.get(key, '-'):>4}" for key in ("A", "A2", "B", "C", "D")]
        print(f"step {number:2}        ", *cells, f"{len(engine.tables.pool.free_blocks):13}", sep="")
        if number == 4:  # others arrive while these run
            engine.submit("C", prompts["C"], max_new_tokens=12)
            engine.submit("D", prompts["D"], max_new_tokens=12)

    same = True
    model.set_attn_implementation("sdpa")
    for key, token_ids in sorted(engine.results.items()):
        prompt = prompts[key[0]]
        print(f"{key:2}", repr(tokenizer.decode(token_ids[len(prompt) :])))
        start = len(prompt) + key.startswith("A")  # a branch is what follows its first token
        expected = model.generate(torch.tensor([token_ids[:start]]), max_length=len(token_ids), do_sample=False)
        same = same and token_ids == expected[0].tolist()
    print(f"blocks copied on write: {engine.num_copies}, preemptions: {engine.scheduler.num_preemptions}")
    print(f"same tokens as stock generate(): {same}")


if __name__ == "__main__":
    main()
