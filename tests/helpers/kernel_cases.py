"""What the tests of the kernels share: tensors, choices from a grid, and an interpreter of Triton fit for them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from hf_paged.attention.metadata import AttentionMetadata, pad_tables

# Instructions that run here, by names of `c_compiler`, and the compiler's default. (AVX-512 comes in order: who has the
# products of pairs has all of them.)
INSTRUCTIONS_HERE = [
    "DEFAULT",
    *(["AVX2"] if torch.cpu._is_avx2_supported() else []),
    *(["AVX512"] if torch.cpu._is_avx512_supported() else []),
    *(["AVX512_BF16"] if torch.cpu._is_avx512_bf16_supported() else []),
]

# Steps


def step_metadata(
    tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_size: int,
    null_block: int,
    device: torch.device,
) -> AttentionMetadata:
    """A step's, of block tables as lists."""
    sizes, queries, lens = (np.asarray(n, dtype=np.int64) for n in (list(map(len, tables)), query_lens, seq_lens))
    blocks = np.concatenate([np.asarray(table, dtype=np.int64) for table in tables])
    padded = pad_tables(blocks, sizes, null_block, np.int64)
    return AttentionMetadata(padded, queries, lens, block_size, null_block, device)


# Tensors


def random_tensor(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal, NaN included."""
    return bool(torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)))


def strided(how: str, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, seed: int) -> Tensor:
    """`[T, num_heads, head_dim]` as different callers bring it."""
    if how == "contiguous":
        return random_tensor(num_tokens, num_heads, head_dim, dtype=dtype, seed=seed)
    if how == "transposed":  # the model's [1, heads, T, head_dim]
        return random_tensor(1, num_heads, num_tokens, head_dim, dtype=dtype, seed=seed)[0].transpose(0, 1)
    if how == "part of qkv":
        return random_tensor(num_tokens, 3 * num_heads, head_dim, dtype=dtype, seed=seed)[:, num_heads : 2 * num_heads]
    if how == "every other":
        return random_tensor(2 * num_tokens, num_heads, 2 * head_dim, dtype=dtype, seed=seed)[::2, :, ::2]
    if how == "one head for all":
        return random_tensor(num_tokens, 1, head_dim, dtype=dtype, seed=seed).expand(-1, num_heads, -1)
    assert how == "dims swapped"
    return random_tensor(head_dim, num_heads, num_tokens, dtype=dtype, seed=seed).permute(2, 1, 0)


LAYOUTS = ("contiguous", "transposed", "part of qkv", "every other", "one head for all", "dims swapped")


# Choices from a grid


def pairwise(axes: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Few choices, so that every two values of two axes meet in one of them. Greedy, always the same."""
    names, rng = list(axes), random.Random(0)

    def pairs_of(choice: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(a, choice[a], b, choice[b]) for a, b in itertools.combinations(range(len(names)), 2)}

    sizes = [len(axes[name]) for name in names]
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i, j in itertools.product(range(sizes[a]), range(sizes[b]))
    }
    choices = []
    while missing:
        a, i, b, j = min(missing)
        candidates = []
        for _ in range(60):
            choice = [rng.randrange(size) for size in sizes]
            choice[a], choice[b] = i, j
            candidates.append(tuple(choice))
        best = max(candidates, key=lambda choice: len(pairs_of(choice) & missing))
        missing -= pairs_of(best)
        choices.append({name: axes[name][index] for name, index in zip(names, best)})
    for (a, values_a), (b, values_b) in itertools.combinations(axes.items(), 2):
        assert {(choice[a], choice[b]) for choice in choices} == set(itertools.product(values_a, values_b)), (a, b)
    return choices


def describe(choice: dict[str, Any]) -> str:
    """A test id."""
    return "-".join(str(value).removeprefix("torch.").replace(" ", "_") for value in choice.values())


# Triton's interpreter


@contextmanager
def repaired_interpreter() -> Iterator[None]:
    """Within it, Triton's interpreter rounds to bfloat16 and multiplies matrices as GPUs do, and takes less time.

    By itself it cuts the bits off, which triples the error of every bfloat16 result; on some processors the bits of a
    row of its products depend on where the row is; it patches `triton.language` anew at each call of a function inside
    a kernel, where the launch has done so already; it makes the type and the shape of each result anew, and a table of
    NumPy's types to look one up; and it looks for overflows of 32-bit integers, which small tensors don't have
    (`test_kernels_offsets.py` looks for those). Of instructions it knows none: the logarithm is done here.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    convert, patch, numpy_dtype = interpreter._convert_float, interpreter._patch_lang, interpreter._get_np_dtype
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}
    dtypes: dict[str, Any] = {}
    options = interpreter.interpreter_builder.options

    def convert_float(numbers: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if (given, wanted) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(numbers.copy()).to(torch.bfloat16)
            return rounded.view(torch.uint16).numpy()
        return convert(numbers, given, wanted, rounding)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        return interpreter.TensorHandle(np.einsum("mk,kn->mn", a.data, b.data) + d.data, d.dtype.scalar)

    def create_inline_asm(_: Any, text: str, constraints: str, values: Any, *others: Any) -> Any:
        assert text == "lg2.approx.f32 $0, $1;" and constraints == "=f,f", text
        result = interpreter.TensorHandle(np.log2(values[0].data), tl.float32)
        return SimpleNamespace(get_result=lambda _: result)

    def patch_once(function: Any) -> Any:
        modules = [module for module in function.__globals__.values() if module is tl or module is tl.core]
        if modules and not any(tl.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()  # nothing to restore
        return patch(function)

    def known_type(self: Any, element: Any, shape: Any) -> None:
        key = str(element), getattr(element, "address_space", None), *(getattr(size, "value", size) for size in shape)
        if key in types:
            vars(self).update(types[key])
            return
        make_type(self, element, shape)
        types[key] = dict(vars(self))

    def known_shape(self: Any, handle: Any, kind: Any) -> None:
        key = (*kind.shape,) if kind.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, kind)
            shapes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = shapes[key]

    def known_dtype(kind: Any) -> Any:
        name = str(kind.scalar)
        if name not in dtypes:
            dtypes[name] = numpy_dtype(kind)
        return dtypes[name]

    with (
        mock.patch.object(tl.block_type, "__init__", known_type),
        mock.patch.object(tl.tensor, "__init__", known_shape),
        mock.patch.object(interpreter, "_get_np_dtype", known_dtype),
        mock.patch.object(interpreter, "_convert_float", convert_float),
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot),
        mock.patch.object(interpreter.InterpreterBuilder, "create_inline_asm", create_inline_asm),
        mock.patch.object(interpreter, "_patch_lang", patch_once),
    ):
        object.__setattr__(options, "sanitize_overflow", False)  # of a frozen dataclass
        yield
        object.__setattr__(options, "sanitize_overflow", True)
