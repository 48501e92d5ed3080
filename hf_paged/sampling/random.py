"""Random draws of one call, private to it, whatever runs on other threads."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_paged.kernels.cpu_noise import exponential
from hf_paged.kernels.philox import MOST_ROWS, DrawGrid
from hf_paged.kernels.transfers import to_device

# Drawing functions of torch that take a generator, and those that take none and what does the same with one.
_WITH_GENERATOR: set[Any] = {
    torch.multinomial,
    torch.bernoulli,
    torch.normal,
    torch.rand,
    torch.randn,
    torch.randint,
    torch.randperm,
    *(
        getattr(Tensor, name)
        for name in (
            *("multinomial", "bernoulli", "bernoulli_", "cauchy_", "exponential_"),
            *("geometric_", "log_normal_", "normal_", "random_", "uniform_"),
        )
    ),
}
_LIKE: dict[Any, Callable[..., Tensor]] = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}


GeneratorStates = dict[torch.device, Tensor]


def default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index: int | None = device.index
        return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
    return torch.default_generator


def own_states(devices: Iterable[torch.device], seed: int | None = None) -> GeneratorStates:
    """Where the draws of a request begin that is on its way: at a seed, or where the global generators stand, which are
    then reseeded from themselves: the next request must not draw the same numbers.

    Not drawn from them: a number on a GPU would have to be waited for.
    """
    states = {}
    for device in devices:
        if seed is not None:
            states[device] = torch.Generator(device).manual_seed(seed).get_state()
            continue
        generator = default_generator(device)
        states[device] = generator.get_state()
        state = hashlib.blake2b(bytes(states[device].numpy()), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(state, "little") >> 2)
    return states


class Draws(threading.local):
    """The generators that draws of the current thread come from: torch's global ones, or those of the call it is in.

    Attributes:
        generators: The generators of the innermost call, by device.
    """

    def __init__(self) -> None:
        self.generators: dict[torch.device, torch.Generator] | None = None

    def generator(self, device: torch.device) -> torch.Generator:
        """The generator that a draw on this thread and device advances."""
        if self.generators is not None and device in self.generators:
            return self.generators[device]
        return default_generator(device)

    def states(self, devices: Iterable[torch.device]) -> GeneratorStates:
        """The states of the generators that this thread draws from, on these devices."""
        return {device: self.generator(device).get_state() for device in devices}

    def write(self, states: GeneratorStates) -> None:
        """Puts this thread's generators where a call's private draws ended.

        Between two calls that overlap, the last one to end decides what the global generator's state is.
        """
        for device, state in states.items():
            self.generator(device).set_state(state)

    @contextmanager
    def private(self, states: GeneratorStates, writes_back: bool = True) -> Iterator[None]:
        """Within it, this thread draws from generators of its own that begin at `states`.

        Args:
            states: Where the generators begin, by device.
            writes_back: Whether this thread's generators go on at the end where those that were drawn from ended.
        """
        outer = self.generators
        own = {device: torch.Generator(device) for device in states}
        for device, state in states.items():
            own[device].set_state(state)
        self.generators = own
        try:
            with _PrivateDraws(self):
                yield
        finally:
            self.generators = outer
            ends = {device: generator.get_state() for device, generator in own.items()} if writes_back else {}
            self.write({device: end for device, end in ends.items() if not torch.equal(end, states[device])})


# One for the process, as torch's generators are: an assistant model's draws are part of the call that it assists.
DRAWS = Draws()


class _PrivateDraws(TorchFunctionMode):
    """Gives every draw that names no generator the thread's own. A mode is in force on the thread that enters it."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LIKE and args:
            like = args[0]
            kwargs = {"dtype": like.dtype, "device": like.device} | kwargs
            kwargs.pop("memory_format", None)
            func, args = _LIKE[func], (like.shape,)
        if func in _WITH_GENERATOR and kwargs.get("generator") is None:
            like = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("input")
            device = like.device if isinstance(like, Tensor) else torch.device(kwargs.get("device") or "cpu")
            generators = self._draws.generators or {}
            if device in generators:
                kwargs = kwargs | {"generator": generators[device]}
        return func(*args, **kwargs)


KEPT_ON_CPU = 4  # tokens whose noise is kept there: a draw costs more than the memory, which elsewhere is reserved


def where(generator: torch.Generator) -> tuple[int, int]:
    """Seed and offset of a GPU's generator."""
    return generator.initial_seed(), generator.get_offset()


def move(generator: torch.Generator, offset: int) -> None:
    """Moves a GPU's generator."""
    generator.set_offset(offset)


class SamplingNoise:
    """The noise of a sampling call, by token and row, whenever a row gets there.

    `torch.multinomial(p, 1)` is `argmax(p / q)` with `q` exponentially distributed, one draw for the whole batch a step
    (ATen/native/Distributions.cpp). Rows may lag behind others: the generator's state at each token is kept until the
    last row has passed it, and the noise of few tokens. Where it is known how a GPU draws, the state is computed.

    Attributes:
        num_rows: Of the batch.
        grid: How the device draws: then the noise follows from
        seed: the generator's, and
        offset: where it stands at the first token. `None`: not known.
        vocab_size: How many numbers a row's draw is, once something was drawn; of a `grid`.
    """

    def __init__(
        self, generator: torch.Generator, num_rows: int, num_kept: int = 1, grid: DrawGrid | None = None
    ) -> None:
        """Draws from `generator`, which the call owns, for a batch of `num_rows`; keeps `num_kept` tokens' noise."""
        self._generator = generator
        self.num_rows = num_rows
        self.grid = grid if num_rows <= MOST_ROWS else None
        self.seed = self.offset = self.vocab_size = 0
        if self.grid is not None:
            self.seed, self.offset = where(generator)
        self._num_kept = num_kept if num_rows > 1 else 0
        self._states: dict[int, Tensor] = {}
        self._num_drawn = 0
        self._kept: dict[int, Tensor] = {}

    def rows(self, token_index: int, rows: list[int], like: Tensor, oldest_index: int) -> Tensor:
        """`[len(rows), vocab_size]`, the noise of these rows' next tokens.

        Args:
            like: `[..., vocab_size]`, of the dtype and on the device to be.
            oldest_index: No row will ask for an earlier one any more.
        """
        noise = self._noise(token_index, like)
        for passed in [kept for kept in self._states if kept < oldest_index]:
            del self._states[passed]
            self._kept.pop(passed, None)
        is_whole = rows == list(range(self.num_rows))
        return noise if is_whole else noise[to_device(rows, noise.device)]

    def at(self, token_indices: list[int], rows: list[int], like: Tensor, oldest_index: int = 0) -> Tensor:
        """`[len(rows), vocab_size]`, of tokens of these rows, each with its index among its row's."""
        indices = sorted(set(token_indices))
        if len(indices) == 1:
            return self.rows(indices[0], rows, like, oldest_index)
        noise = like.new_empty(len(rows), like.shape[-1])
        for index in indices:
            places = [place for place, own in enumerate(token_indices) if own == index]
            own_rows = [rows[place] for place in places]
            noise[to_device(places, noise.device)] = self.rows(index, own_rows, like, oldest_index)
        return noise

    def rewind(self, num_tokens: int) -> None:
        """Leaves the generator where it stands after so many tokens: one more may have been begun in vain."""
        if self.grid is not None:
            self._seek(self._generator, num_tokens)
        elif num_tokens < self._num_drawn:  # whose state is kept: a row was there when it drew
            self._generator.set_state(self._states[num_tokens])

    def _noise(self, token_index: int, probs: Tensor) -> Tensor:
        kept = self._kept.get(token_index)
        if kept is not None:
            return kept
        generator = self._generator
        if self.grid is not None:
            self.vocab_size = probs.shape[-1]
            self._seek(generator, token_index)
        elif token_index < self._num_drawn:
            generator = torch.Generator(generator.device)
            generator.set_state(self._states[token_index])
        else:
            self._states[token_index] = generator.get_state()
            self._num_drawn = token_index + 1
        noise = exponential(probs.new_empty(self.num_rows, probs.shape[-1]), generator)
        if self._num_kept:
            if len(self._kept) >= (max(self._num_kept, KEPT_ON_CPU) if noise.is_cpu else self._num_kept):
                del self._kept[next(iter(self._kept))]
            self._kept[token_index] = noise
        return noise

    def _seek(self, generator: torch.Generator, token_index: int) -> None:
        """Puts a generator where the draw of a token begins."""
        assert self.grid is not None
        if self.vocab_size:
            rounds = self.grid.num_rounds(self.num_rows * self.vocab_size)
            move(generator, self.offset + 4 * int(rounds) * token_index)


class NoiseAhead:
    """The noise of another call's rows, for a model that draws how these may go on: often alike, as it is the same."""

    def __init__(self, noise: SamplingNoise, rows: list[int], num_tokens: list[int]) -> None:
        """Takes these rows of the other call, each of which has so many tokens."""
        self._noise = noise
        self._rows = rows
        self._num_tokens = num_tokens

    def at(self, token_indices: list[int], rows: list[int], like: Tensor, oldest_index: int = 0) -> Tensor:
        indices = [self._num_tokens[row] + index for row, index in zip(rows, token_indices, strict=True)]
        return self._noise.at(indices, [self._rows[row] for row in rows], like)


class StepNoise:
    """The noise of a sampling call of one row with drafts: at once for all tokens that it chooses in a step.

    `[places, vocab_size]` numbers a step, as `torch.multinomial` draws for so many rows.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._span = (0, 0)
        self._drawn: Tensor | None = None

    def expect(self, first_index: int, count: int) -> None:
        """Says that the next `count` tokens, from `first_index` on, are chosen at once."""
        self._span = (first_index, count)
        self._drawn = None

    def at(self, token_indices: list[int], rows: list[int], like: Tensor, oldest_index: int = 0) -> Tensor:
        """`[len(token_indices), vocab_size]`, of tokens of the row, each with its index."""
        first, count = self._span
        if self._drawn is None:
            self._drawn = exponential(like.new_empty(count, like.shape[-1]), self._generator)
        return self._drawn[to_device([index - first for index in token_indices], like.device)]
