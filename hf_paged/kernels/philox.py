"""What torch draws on an NVIDIA GPU, by a generator's seed and offset: which thread draws which number, and how.

From ATen/native/cuda/DistributionTemplates.h (`calc_execution_policy`, `distribution_elementwise_grid_stride_kernel`)
and `transformation::exponential` in ATen/core/TransformationHelper.h, for float32. A draw of `n` numbers runs on
`T = num_threads(n)` threads. Thread `t` has the counter `(offset / 4, t)`, each round of which is four words of 32
bits: those of round `r` are for the elements `t + T * (4 * r + i)`, i from 0 to 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

BLOCK = 256  # threads of a block
WORDS = 4  # of a round
MOST_ROWS, MOST_TOKENS = 1023, 2**19  # of a draw: more than 2 GiB are drawn in parts


@dataclass(frozen=True, slots=True)
class DrawGrid:
    """How a device shares a draw out.

    Attributes:
        most_threads: That run at a time.
    """

    most_threads: int

    @classmethod
    def of_processors(cls, num_processors: int, threads_of_each: int) -> DrawGrid:
        """The grid of a device with so many streaming multiprocessors, each of which holds so many threads."""
        return cls(num_processors * (threads_of_each // BLOCK) * BLOCK)

    @classmethod
    @lru_cache
    def of(cls, device: torch.device) -> DrawGrid:
        """The grid of a GPU that is here."""
        properties = torch.cuda.get_device_properties(device)
        return cls.of_processors(properties.multi_processor_count, properties.max_threads_per_multi_processor)

    def num_threads(self, num_numbers: Any) -> Any:
        """The threads that draw so many numbers, at least one; of an array, too."""
        return np.minimum(-(-num_numbers // BLOCK) * BLOCK, self.most_threads)

    def num_rounds(self, num_numbers: Any) -> Any:
        """The rounds of each thread, each of which takes the generator's offset 4 further; of an array, too."""
        return (num_numbers - 1) // (self.num_threads(num_numbers) * WORDS) + 1


def words(seed: int, offset: int, num_numbers: int, num_threads: int) -> np.ndarray:
    """`[num_numbers]` uint32 that such a draw is made of: Philox4x32-10 as curand has it. The truth, not fast."""
    element = np.arange(num_numbers, dtype=np.uint64)
    group, thread = element // np.uint64(num_threads), element % np.uint64(num_threads)
    mask = np.uint64(2**32 - 1)
    first = np.uint64(offset // 4) + group // np.uint64(WORDS)
    counter = [first & mask, first >> np.uint64(32), thread & mask, thread >> np.uint64(32)]
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        low, high = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            (high >> np.uint64(32)) ^ counter[1] ^ np.uint64(key[0]),
            high & mask,
            (low >> np.uint64(32)) ^ counter[3] ^ np.uint64(key[1]),
            low & mask,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return np.choose((group % np.uint64(WORDS)).astype(np.intp), counter).astype(np.uint32)


def exponentials(drawn: np.ndarray) -> np.ndarray:
    """The exponentially distributed float32 of each word: never 0.

    As ATen's `__logf`: the logarithm to base 2, times ln(2), each in float32.
    """
    uniform = drawn.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    half = np.float32(2**-24)
    logarithm = np.log2(uniform.astype(np.float64)).astype(np.float32) * np.float32(np.log(2))
    return np.where(uniform >= 1 - half, half, -logarithm)
