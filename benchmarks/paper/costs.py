"""What a step costs on a card that is not here: a roofline, so arithmetic and no measurement.

A step's products read all weights once and compute 2 FLOP a weight and token, whichever takes longer; attention reads
each row's keys and values, and computes for prompts; both one after another, as `roofline.py` has it. Of a card's sheet
a step is taken to reach 80 % of the bandwidth and half of the arithmetic. Swaps and copies come on top.

Sources: NVIDIA's data sheets of the A100 (40 GB PCIe: 1,555 GB/s, 312 TFLOP/s in fp16), the H100 SXM (3,350 GB/s,
989 TFLOP/s) and the A10G (24 GB: 600 GB/s, 70 TFLOP/s); the configs of facebook/opt-13b, huggyllama/llama-7b and -13b,
and meta-llama/Llama-3.1-8B; the PagedAttention paper, table 1: 12 GB of an A100-40GB are left for the keys and values
of a 13B model, 15.7K slots. Of an A10G, 6 GiB are taken to be left beside the 13.2 GB of LLaMA-7B.
"""

from __future__ import annotations

from dataclasses import dataclass

from roofline import Operation, roofline_ms

from hf_paged.core.batch import Batch
from hf_paged.core.sequence import SequenceGroup

BANDWIDTH_SHARE, FLOPS_SHARE = 0.8, 0.5


@dataclass(slots=True)
class Work:
    """What a step does.

    Attributes:
        decodes: Rows of one token.
        prompt: Tokens of the other rows.
        kv: Tokens whose keys and values are read, once for each row.
        pairs: Tokens that prompt tokens attend to, themselves included.
        swapped: Tokens in blocks that move to CPU memory or back.
        copied: Tokens in blocks that are copied.
    """

    decodes: int = 0
    prompt: int = 0
    kv: int = 0
    pairs: int = 0
    swapped: int = 0
    copied: int = 0

    @classmethod
    def of(cls, batch: Batch, block_size: int) -> Work:
        prompts = [(start, n) for start, n in zip(batch.starts, batch.query_lens) if n > 1]
        num_decodes = batch.num_seqs - len(prompts)
        return cls(
            decodes=num_decodes,
            prompt=batch.num_tokens - num_decodes,
            kv=sum(batch.starts) + batch.num_tokens,
            pairs=sum(n * start + n * (n + 1) // 2 for start, n in prompts),
            swapped=block_size * (len(batch.swap_outs) + len(batch.swap_ins)),
            copied=block_size * len(batch.block_copies),
        )


@dataclass(frozen=True)
class Card:
    """From its data sheet: bytes and FLOP a second, and bytes a second to CPU memory, one way."""

    name: str
    bandwidth: float
    flops: float
    link: float  # PCIe's 32 and 64 GB/s, of which copies reach about three quarters
    transfer: float = 10e-6  # seconds that one copy to CPU memory takes beside its bytes


@dataclass(frozen=True)
class Model:
    """What of a model's config a step's cost depends on; 2 bytes a weight."""

    name: str
    layers: int
    hidden: int
    kv_width: int  # of a layer's keys: kv heads x head dim
    intermediate: int
    products: int  # of hidden x intermediate: 2, or 3 with a gate
    vocab: int

    @property
    def weights(self) -> int:
        """Weights that a step's products read, the logits' among them."""
        layer = 2 * self.hidden * (self.hidden + self.kv_width) + self.products * self.hidden * self.intermediate
        return self.layers * layer + self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """Bytes a token."""
        return 2 * self.layers * self.kv_width * 2


A100 = Card("A100-40GB", 1.555e12, 312e12, 24e9)
H100 = Card("H100-80GB", 3.35e12, 989e12, 48e9)
A10G = Card("A10G-24GB", 0.6e12, 70e12, 24e9)
OPT_13B = Model("OPT-13B", 40, 5120, 5120, 20480, 2, 50272)
LLAMA_13B = Model("LLaMA-13B", 40, 5120, 5120, 13824, 3, 32000)
LLAMA_7B = Model("LLaMA-7B", 32, 4096, 4096, 11008, 3, 32000)
LLAMA_8B = Model("Llama-3.1-8B", 32, 4096, 1024, 14336, 3, 128256)


@dataclass(frozen=True)
class Roofline:
    """Seconds of a step.

    Attributes:
        step: Of host work and launches a step, and
        row: a row.
    """

    model: Model
    card: Card
    step: float = 1e-3
    row: float = 4e-6

    def seconds(self, work: Work) -> float:
        """How long it takes."""
        model = self.model
        tokens = work.decodes + work.prompt
        operations = (
            Operation("products", 2 * model.weights, 2 * model.weights * tokens, 1),
            Operation("attention", work.kv * model.kv_bytes, 4 * model.hidden * model.layers * work.pairs, 1),
        )
        ms = roofline_ms(operations, BANDWIDTH_SHARE * self.card.bandwidth, FLOPS_SHARE * self.card.flops)
        copied = 2 * work.copied * model.kv_bytes / (BANDWIDTH_SHARE * self.card.bandwidth)
        return self.step + self.row * work.decodes + ms / 1e3 + copied + self.swap(work.swapped)

    def swap(self, tokens: float, transfers: float = 0) -> float:
        """Seconds that so many tokens take to CPU memory, or back, in so many transfers."""
        return tokens * self.model.kv_bytes / self.card.link + transfers * self.card.transfer

    def recompute(self, tokens: int) -> float:
        """Seconds that a step of nothing but so many tokens of a prompt takes more than an empty one."""
        return self.seconds(Work(prompt=tokens, kv=tokens, pairs=tokens * (tokens + 1) // 2)) - self.step

    def prefers_swap(self, group: SequenceGroup) -> bool:
        """Whether out and in again is cheaper than computing again, in steps whose weights are read anyway."""
        tokens = sum(sequence.num_computed_tokens for sequence in group.sequences)
        flops = 2 * self.model.weights * tokens / (FLOPS_SHARE * self.card.flops)
        return 2 * self.swap(tokens) < flops


@dataclass(frozen=True)
class Setup:
    """A model on a card, with the slots that its pool has."""

    costs: Roofline
    num_slots: int
    context: int = 2048


PAPER = Setup(Roofline(OPT_13B, A100), 15_700)
LLAMA_PAPER = Setup(Roofline(LLAMA_13B, A100), 15_700)
SMALL = Setup(Roofline(LLAMA_7B, A10G), 12_288)  # 6 GiB
MODERN = Setup(Roofline(LLAMA_8B, H100), 393_216, 8192)  # 48 GiB
