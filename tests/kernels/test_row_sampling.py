"""The kernel that chooses tokens, in Triton's interpreter, against transformers' processors and ATen's draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from helpers.kernel_cases import repaired_interpreter

pytest.importorskip("triton")  # an extra, and not on every platform
from hf_paged.kernels.availability import draw_grid
from hf_paged.kernels.philox import DrawGrid, exponentials, words
from hf_paged.kernels.row_sampling import draw_noise, sample_rows
from hf_paged.kernels.sampling_rows import plain_rows
from hf_paged.sampling.controls import GeneratedTokenPenalties, TokenBias

CPU = torch.device("cpu")
DEVICES = {"A100": (108, 2048), "H100": (132, 2048), "RTX 4090": (128, 1536)}


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> Iterator[None]:
    with repaired_interpreter():
        yield


# Noise


def atens_words(seed: int, offset: int, num_numbers: int, processors: int, threads_of_each: int) -> np.ndarray:
    """The loop of `distribution_elementwise_grid_stride_kernel`, all threads side by side; curand's ten rounds.

    Written from ATen's text, and not from ours: forward from threads to elements, in Python's integers.
    """
    blocks = min((num_numbers + 255) // 256, processors * (threads_of_each // 256))
    stride = blocks * 256
    found = np.zeros(num_numbers, np.uint32)
    rounded = ((num_numbers - 1) // (stride * 4) + 1) * stride * 4
    for turn, start in enumerate(range(0, rounded, stride * 4)):
        threads = np.arange(stride, dtype=np.uint64)
        position = offset // 4 + turn
        c = [np.full(stride, position % 2**32, np.uint64), np.full(stride, position // 2**32, np.uint64)]
        c += [threads % 2**32, threads // 2**32]
        k = [seed % 2**32, seed // 2**32]
        for own_round in range(10):
            if own_round:
                k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
            a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
            c = [
                (b >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]),
                b & np.uint64(2**32 - 1),
                (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
                a & np.uint64(2**32 - 1),
            ]
        for unrolled in range(4):
            first = start + stride * unrolled
            count = max(0, min(stride, num_numbers - first))
            found[first : first + count] = c[unrolled][:count]
    return found


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "seed", "round_"),
    [
        pytest.param(8, 128256, 2**64 - 3, 2**32 - 1, marks=pytest.mark.slow),  # 10^6, and the counter's low half ends
        (1, 1, 0, 0),
        (3, 257, 7, 12),
        (2, 50257, 2**40 + 1, 2**33 + 5),
    ],
)
def test_words_are_those_that_torch_draws(name: str, num_rows: int, vocab_size: int, seed: int, round_: int) -> None:
    """Would break: tokens that no seed brings back on a GPU."""
    grid, count = DrawGrid.of_processors(*DEVICES[name]), num_rows * vocab_size
    expected = atens_words(seed, 4 * round_, count, *DEVICES[name]).reshape(num_rows, vocab_size)
    assert np.array_equal(words(seed, 4 * round_, count, int(grid.num_threads(count))), expected.reshape(-1))
    rows = plain_rows(num_rows)
    rows["seed"], rows["round"], rows["threads"] = seed, round_, grid.num_threads(count)
    rows["first"] = np.arange(num_rows) * vocab_size
    assert np.array_equal(draw_noise(rows, vocab_size, CPU, words=True).numpy().view(np.uint32), expected)
    drawn, truth = draw_noise(rows, vocab_size, CPU).numpy(), exponentials(expected)
    assert np.abs(drawn.view(np.int32) - truth.view(np.int32)).max() <= 2  # ulp


def test_words_that_a_gpu_drew() -> None:
    """What `torch.manual_seed(0); torch.rand(5, device="cuda")` prints on any NVIDIA GPU."""
    assert np.round(words(0, 0, 5, 256) / 2**32, 4).tolist() == [0.3990, 0.5167, 0.0249, 0.9401, 0.9459]


@pytest.mark.gpu
def test_a_gpu_draws_them() -> None:
    """Bit for bit: its logarithm is the processor's own."""
    device = torch.device("cuda", 0)
    assert isinstance(draw_grid(device), DrawGrid)
    generator, count = torch.Generator(device).manual_seed(7), 50257
    expected = torch.empty(3, count, device=device).exponential_(generator=generator)
    rows = plain_rows(3)
    rows["seed"], rows["threads"], rows["first"] = 7, DrawGrid.of(device).num_threads(3 * count), np.arange(3) * count
    assert torch.equal(draw_noise(rows, count, device), expected)


@pytest.mark.parametrize("name", DEVICES)
def test_how_far_a_draw_takes_the_generator(name: str) -> None:
    processors, threads_of_each = DEVICES[name]
    grid = DrawGrid.of_processors(processors, threads_of_each)
    for count in (1, 256, 257, 128256, 4 * grid.most_threads, 4 * grid.most_threads + 1, 10**8):
        blocks = min((count + 255) // 256, processors * (threads_of_each // 256))
        assert 4 * grid.num_rounds(count) == ((count - 1) // (256 * blocks * 4) + 1) * 4


def test_the_smallest_numbers() -> None:
    """curand's uniform numbers go up to 1, whose logarithm is 0: ATen takes half an epsilon instead."""
    drawn = exponentials(np.array([2**32 - 1, 2**32 - 129, 2**32 - 385, 0], np.uint32))
    assert drawn[0] == drawn[1] == np.float32(2**-24) and drawn[2] > drawn[1] and drawn[3] == np.float32(33 * np.log(2))


# Tokens


class StableTopP(hf.TopPLogitsWarper):
    """transformers' own; which of equal scores go first is the order of tokens, which `torch.sort` doesn't promise."""

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        sorted_scores, order = torch.sort(scores, descending=False, stable=True)
        removed = sorted_scores.softmax(dim=-1).cumsum(dim=-1) <= (1 - self.top_p)
        removed[..., -1:] = False
        return scores.masked_fill(removed.scatter(1, order, removed), self.filter_value)


@dataclass
class Rows:
    """Rows with random settings, and their tokens by transformers' processors and the noise above."""

    vocab_size: int
    style: str
    seed: int
    count: int = 8
    biases: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng, draw = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        count, vocab = self.count, self.vocab_size
        self.logits = torch.randn(count + 2, vocab, generator=draw) * 3
        if self.style == "ties":
            self.logits = self.logits.round()
        elif self.style == "bfloat16":
            self.logits = self.logits.bfloat16()
        elif self.style == "forbidden":
            self.logits = self.logits.masked_fill(self.logits < 0, -float("inf"))
        elif self.style == "not numbers":
            self.logits[0, vocab // 2], self.logits[1, 0], self.logits[2] = float("nan"), float("inf"), -float("inf")
        self.ids = torch.randint(0, vocab, (count, 16), generator=draw)
        self.ids[:, 1], self.ids[:, 7] = self.ids[:, 0], self.ids[:, 5]
        shape = count, -(-vocab // 32)
        self.masks = torch.randint(-(2**31), 2**31, shape, generator=draw).to(torch.int32)
        self.rows = plain_rows(count)
        self.bias_tokens: list[int] = []
        self.bias_values: list[float] = []
        self.expected = [self.one(row) for row in range(count)]

    def maybe(self, *values: Any, chance: float = 0.4) -> Any:
        return self.rng.choice(values) if self.rng.random() < chance else None

    def one(self, row: int) -> int:
        """Fills in a row's settings, and returns its token."""
        rng, own, vocab = self.rng, self.rows[row], self.vocab_size
        own["source"] = source = rng.randrange(len(self.logits))
        scores = self.logits[source].float()[None].clone()
        own["length"] = rng.randrange(5, 13)
        processors: list[Any] = []
        if self.maybe(True):
            own["mask"] = row
            tokens = torch.arange(vocab)
            is_allowed = (self.masks[row][tokens // 32] >> (tokens % 32)) & 1
            scores = scores.masked_fill(is_allowed == 0, -float("inf"))
        if penalty := self.maybe(0.5, 1.3, 4.0):
            own["penalty"], own["inverse"], own["table"] = penalty, np.float32(1) / np.float32(penalty), row
            processors.append(hf.RepetitionPenaltyLogitsProcessor(penalty))
        if both := self.maybe((1.5, 0.0), (0.0, 0.7), (-2.0, 1.0)):
            own["start"], own["table"] = rng.randrange(1, 6), row
            own["presence"], own["frequency"] = both
            processors.append(GeneratedTokenPenalties(*both, int(own["start"])))
        if self.maybe(True):
            bias = {token: rng.uniform(-5, 5) for token in rng.sample(range(vocab), 3)}
            own["bias"], own["biases"] = len(self.bias_tokens), len(bias)
            self.bias_tokens += bias
            self.bias_values += bias.values()
            processors.append(TokenBias(bias))
        if self.maybe(True, chance=0.15):  # the likeliest
            return self.token(row, scores, processors, None)
        if temperature := self.maybe(0.1, 0.7, 1.3, rng.uniform(0.05, 5)):
            own["scale"] = np.float32(1) / np.float32(temperature)
            processors.append(hf.TemperatureLogitsWarper(temperature))
        if top_k := self.maybe(1, 2, 3, 7, 50, 1000, chance=0.6):
            own["top_k"] = top_k
            processors.append(hf.TopKLogitsWarper(top_k))
        if (top_p := self.maybe(0.0, 0.1, 0.5, 0.9, 0.9999999, rng.random())) is not None:
            own["cut"] = 1 - top_p
            processors.append(StableTopP(top_p))
        if (min_p := self.maybe(0.0, 0.02, 0.3, 1.0, rng.random())) is not None:
            own["min_p"] = min_p
            processors.append(hf.MinPLogitsWarper(min_p))
        own["is_drawn"], own["seed"], own["round"] = True, rng.randrange(2**64), rng.randrange(2**40)
        threads = int(DrawGrid(512).num_threads(3 * vocab))
        own["first"], own["threads"] = rng.randrange(3) * vocab, threads
        drawn = exponentials(words(int(own["seed"]), 4 * int(own["round"]), 3 * vocab, threads))
        return self.token(row, scores, processors, torch.from_numpy(drawn[own["first"] :][:vocab]))

    def token(self, row: int, scores: Tensor, processors: list[Any], noise: Tensor | None) -> int:
        for processor in processors:
            scores = processor(self.ids[row : row + 1, : self.rows["length"][row]], scores)
        if noise is None:
            return int(scores[0].argmax())
        probs = scores[0].softmax(dim=-1)
        token = int((probs / noise).argmax())
        return token if probs[token] >= 0 else -1


CASES = [
    *((vocab, style, 16, 4) for vocab in (5, 40) for style in ("ties", "forbidden", "not numbers")),
    (40, "bfloat16", 64, 4096),
    (301, "ties", 512, 16),
    (301, "plain", 512, 4096),
    (1030, "bfloat16", 1024, 4),  # more ties than there is room for
]


@pytest.mark.parametrize(("vocab_size", "style", "tile", "room"), CASES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_tokens_are_those_of_transformers(vocab_size: int, style: str, tile: int, room: int, seed: int) -> None:
    """All rows in one launch, each with settings of its own; and nothing else is written."""
    case = Rows(vocab_size, style, seed + 100 * CASES.index((vocab_size, style, tile, room)))
    logits, ids, masks = case.logits.clone(), case.ids.clone(), case.masks.clone()
    biases = np.array(case.bias_tokens, np.int32), np.array(case.bias_values, np.float32)
    found = sample_rows(case.rows, logits, masks, ids, biases, tile=tile, room=room)
    assert found.tolist() == case.expected
    for row, token in enumerate(case.expected):
        if case.rows["table"][row] >= 0:
            case.ids[row, case.rows["length"][row]] = max(token, 0)
    assert torch.equal(ids, case.ids) and torch.equal(masks, case.masks)
    assert torch.equal(torch.nan_to_num(logits), torch.nan_to_num(case.logits))


def test_top_p_at_its_very_border() -> None:
    """Of what the sums of two orders may disagree on, no token is more than the border's."""
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(3)) * 3
    order = logits[0].argsort(stable=True)
    cumulative = logits[0].double().softmax(dim=-1)[order].cumsum(dim=-1)
    for shift in (-1e-5, 1e-5):
        rows = plain_rows(5)
        rows["is_drawn"], rows["cut"], rows["threads"], rows["seed"] = True, cumulative[40] + shift, 256, np.arange(5)
        rows["scale"] = 0.05  # nearly alike, so that the border's own token is drawn, too
        found = {order.tolist().index(token) for token in sample_rows(rows, logits * 20, tile=64).tolist()}
        assert min(found) >= 40 + (shift > 0), shift


def test_no_rows_share_their_list_or_their_changes() -> None:
    """Would break: a row of the workspace that is another's."""
    rows, logits = plain_rows(6), torch.zeros(1, 40).index_fill(1, torch.tensor([3]), 5.0)
    rows["biases"][[1, 3, 4]], rows["bias"][[1, 3, 4]] = 1, [0, 1, 2]
    biases = np.array([7, 8, 9], np.int32), np.array([9.0, 9.0, 9.0], np.float32)
    rows["top_k"], rows["is_drawn"], rows["threads"] = 1, True, 256
    assert sample_rows(rows, logits, biases=biases, tile=64, room=4).tolist() == [3, 7, 3, 8, 9, 3]
