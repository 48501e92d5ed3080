"""Mixers whose convolutions and scans run as our kernels in the engine's forwards.

Transformers computes several tokens at once by other formulas than single ones; the kernels know one for both. So where
a prompt was cut, and what of it was cached, leaves no trace in a result.

`find_scans`, on CPU: for rows of one length, over copies of their states. `find_packed_scans`, on a GPU: for all rows
of a step, whatever their lengths, over the states in the pool.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache, LinearAttentionLayer

from hf_paged.kernels.availability import layer_kernels
from hf_paged.kernels.cpu_scan import DELTA, SELECTIVE, SUM, convolve, scan
from hf_paged.kernels.layers import InputError, plainly
from hf_paged.kernels.paged_state import PagedState, StateRows
from hf_paged.kernels.transfers import to_device
from hf_paged.memory.spec import UNIT, StateSpec, StateTensor
from hf_paged.memory.state_cache import StateCache, StateLayout
from hf_paged.model.exact_operations import activated, softplus
from hf_paged.model.fused_layers import ACTIVATIONS, agrees, attempt
from hf_paged.model.module_overrides import KNOWN, ChangedForward, has_hooks, is_library_code

UNLIMITED = (0.0, float("inf"))  # what a step of Mamba 2 may be
PACKAGES = {"delta": "fla", "mamba": "mamba_ssm"}  # with kernels for prompts, by what is in the functions' names
logger = logging.getLogger(__name__)


@cache
def has_chunked_kernels(package: str) -> bool:
    """Whether this package is installed, whose kernels compute many tokens of a prompt at once."""
    return importlib.util.find_spec(package) is not None


def _convolution(
    states: Tensor,
    weight: Tensor,
    bias: Any = None,
    activation: str | None = None,
    state: PagedState | None = None,
    **_: Any,
) -> Tensor:
    if activation not in (None, "silu", "swish"):
        raise InputError("convolve", "SiLU or no activation", weight=weight)
    given = states.to(weight.dtype), weight, bias, activation is not None
    return (convolve(*given) if state is None else _kernels().convolve(*given, state)).to(states.dtype)


def _convolution_update(states: Tensor, state: Tensor | PagedState, *args: Any, **given: Any) -> Tensor:
    if isinstance(state, PagedState):
        return _convolution(states, *args, **given | {"state": state})
    whole = torch.cat([state, states], dim=-1)
    output = _convolution(whole, *args, **given)[..., state.shape[-1] :]
    state.copy_(whole[..., states.shape[-1] :])
    return output


def _delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **given: Any) -> Any:
    """Of a decay a head, or (Kimi Linear) one a key."""
    if not given["use_qk_l2norm_in_kernel"]:
        raise InputError("scan", "queries and keys to be normed", query=query, key=key)
    state = _state(given["initial_state"], len(query), value.shape[2], key.shape[-1], value.shape[-1])
    step = beta.float()[..., None]
    decay = g.float().exp().view(*beta.shape, -1)
    return _scan(DELTA, query, key, value, decay, step, state, is_normed=True), state


def _sum(x: Tensor, dt: Tensor, rate: Tensor, key: Tensor, query: Tensor, **given: Any) -> Any:
    """Of Mamba 2. Two families (Nemotron-H, Zamba 2) limit the steps of several tokens, not those of single ones."""
    state = _state(given["initial_states"], len(dt), *x.shape[2:], key.shape[-1])
    limits, skip = tuple(given.get("dt_limit", UNLIMITED)), given["D"].float()[:, None].expand(x.shape[2:])
    if isinstance(state, PagedState):
        step, limited = _steps(dt, given["dt_bias"])[..., None], None if limits == UNLIMITED else limits
        output = _kernels().scan(SUM, query, key, x, rate.float(), step, state.mT, skip=skip, limits=limited)
    else:
        step = _steps(dt, given["dt_bias"], limits)
        decay = (step * rate.float()).exp()[..., None]
        output = scan(SUM, query, key, x, decay, step[..., None], state.mT, skip=skip)
    return (output, state) if given["return_final_states"] else output


def _sum_update(
    state: Tensor | PagedState, x: Tensor, dt: Tensor, rate: Tensor, *others: Tensor, **given: Any
) -> Tensor:
    key, query, skip = others
    gate = None if given["z"] is None else _silu(given["z"])
    given |= {"D": skip[:, 0], "dt_bias": given["dt_bias"][:, 0], "initial_states": state, "return_final_states": False}
    output = _sum(x[:, None], dt[:, None, :, 0], rate[:, 0, 0], key[:, None], query[:, None], **given)[:, 0]
    return output if gate is None else output * gate


def _selective(x: Tensor, dt: Tensor, rate: Tensor, key: Tensor, query: Tensor, **given: Any) -> Any:
    """Of Mamba 1: its channels are values of one head."""
    x, dt, key, query, gate = (s.transpose(1, 2)[:, :, None] for s in (x, dt, key, query, given["z"]))
    state = _state(given.get("state"), len(x), x.shape[-1], key.shape[-1])
    step, skip, own = _steps(dt, given["delta_bias"]), given["D"].float()[None], state.mT.unsqueeze(1)
    output = _scan(SELECTIVE, query, key, x, rate.float()[None], step, own, skip=skip, gate=gate)
    output = output[:, :, 0].transpose(1, 2)
    return (output, state) if given["return_last_state"] else output


def _selective_update(
    state: Tensor | PagedState, x: Tensor, dt: Tensor, rate: Tensor, *others: Tensor, **given: Any
) -> Tensor:
    x, dt, key, query, gate = (s[..., None] for s in (x, dt, *others[:2], given["z"]))
    given |= {"state": state, "D": others[2], "z": gate, "delta_bias": given["dt_bias"], "return_last_state": False}
    return _selective(x, dt, rate, key, query, **given)[..., 0]


def _silu(states: Tensor) -> Tensor:
    return activated(states, *ACTIVATIONS[0]) if states.is_cpu else functional.silu(states)


def _scan(kind: int, *operands: Any, **given: Any) -> Tensor:
    """By the kernel for where the state is, the last operand."""
    run = _kernels().scan if isinstance(operands[-1], PagedState) else scan
    return run(kind, *operands, **given)


def _kernels() -> Any:
    """Those over states in a pool, which need Triton."""
    from hf_paged.kernels import triton_scan

    return triton_scan


def _state(given: Any, *shape: int) -> Any:
    """What a scan changes in place: that of a cache, which is then given it as the new one, or a new one."""
    return torch.zeros(shape, device="cpu") if given is None else given


def _steps(dt: Tensor, bias: Tensor | None, limits: tuple[float, ...] = UNLIMITED) -> Tensor:
    """`softplus(dt + bias)`, rounded where transformers rounds."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    steps = softplus(dt) if dt.is_cpu else functional.softplus(dt)
    return (steps if limits == UNLIMITED else steps.clamp(*limits)).float()


# By what the files of transformers' models call them.
SCANS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "causal_conv1d_update": _convolution_update,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _sum,
    "mamba2_selective_state_update": _sum_update,
    "mamba_selective_scan": _selective,
    "mamba_selective_state_update": _selective_update,
}


def _or_own(ours: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """Ours in the place of a function, which is called for what the kernels don't take."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with plainly():
                return ours(*args, **kwargs)
        except InputError:
            return own(*args, **kwargs)

    return run


class PackedScans:
    """A class's forward over packed rows, of which our functions find the states in the pool.

    Attributes:
        package: Whose kernels transformers takes for many tokens of a prompt, if it is installed.
    """

    def __init__(self, own: FunctionType, names: set[str]) -> None:
        self.package = next((package for part, package in PACKAGES.items() if part in "".join(names)), None)
        self._layer: _PackedLayer | None = None  # of the running mixer; only one runs at a time

        def convolution(*args: Any, **kwargs: Any) -> Tensor:
            assert self._layer is not None
            return _convolution(*args, **kwargs | {"state": self._layer.convolved})

        def selective(*args: Any, **kwargs: Any) -> Any:
            assert self._layer is not None
            return _selective(*args, **kwargs | {"state": self._layer.recurrent_states[0]})

        ambient = {"causal_conv1d_fn": convolution, "mamba_selective_scan": selective}
        self._changed = ChangedForward(own, {name: ambient.get(name, SCANS[name]) for name in names})

    def look_up(self) -> None:
        self._changed.look_up()

    def run(self, mixer: Any, states: list[tuple[StateTensor, PagedState]], *args: Any, **kwargs: Any) -> Any:
        """What the mixer's forward returns.

        Args:
            states: Of its layer.
            args: As it was called with, a `Cache` among them replaced by that of these states.

        Raises:
            InputError: A kernel doesn't take what it is given.
        """
        self._layer = layer = _PackedLayer(states)
        cache = Cache(layers=[layer] * (mixer.layer_idx + 1))

        def own(value: Any) -> Any:
            return cache if isinstance(value, Cache) else value

        try:
            return self._changed.run(mixer, *map(own, args), **{name: own(value) for name, value in kwargs.items()})
        finally:
            self._layer = None


class _PackedLayer(LinearAttentionLayer):
    """What a mixer finds in its cache: the rows' states are changed by the functions that it hands them to.

    Attributes:
        convolved: That of the convolution whose inputs have come last.
    """

    def __init__(self, states: list[tuple[StateTensor, PagedState]]) -> None:
        super().__init__(number_of_states=1 + max(tensor.index for tensor, _ in states))
        self.convolved: PagedState | None = None
        for tensor, state in states:
            held: dict[int, Any] = self.conv_states if tensor.kind == "conv" else self.recurrent_states
            held[tensor.index] = state
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), True)

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, *_: Any, **__: Any) -> Tensor:
        self.convolved = self.conv_states[state_idx]
        return conv_states

    def update_recurrent_state(self, recurrent_states: Any, *_: Any, **__: Any) -> Any:
        return recurrent_states


def find_packed_scans(mixer: Any, spec: StateSpec, page_bytes: int) -> PackedScans | str | None:
    """The forward of its class with our functions for a GPU, if over packed rows they compute what it does by row.

    Returns:
        It, or why there is none; `None`: that can't be found out now.

    Args:
        spec: What its layer keeps.
        page_bytes: Of the pool that it will run over: kernels are compiled for that.
    """
    parameter = next(mixer.parameters())
    kernels = layer_kernels(parameter.dtype, parameter.device)
    if isinstance(kernels, str):
        return f"our kernels {kernels}"
    own, names = functions_of(mixer)
    if not names:
        return "our kernels know none of its functions"
    if not _may_try(mixer):
        return None
    packed = PackedScans(own, names)
    try:
        truth, found = _trial_by_row(mixer, own), _packed_trial(mixer, packed, spec, page_bytes)
    except torch.OutOfMemoryError:
        return None
    except Exception as error:  # whatever a mixer says that wants something else, or the compiler
        logger.info("hf_paged: what kept %s from running for all rows at once:", type(mixer).__name__, exc_info=error)
        return f"our kernels don't take what it hands them ({type(error).__name__})"
    is_same = agrees(found, truth, 1e-4 if truth.dtype is torch.float32 else 0.05)
    return packed if is_same else "its forward doesn't match our kernels"


def find_scans(mixer: Any) -> ChangedForward | None:
    """The forward of its class with our functions in place of its file's, if that computes the same."""
    own, names = functions_of(mixer)
    if not names or not _may_try(mixer):
        return None
    scans = {name: _or_own(SCANS[name], own.__globals__[name]) for name in names}
    changed = ChangedForward(own, scans)
    truth, found = attempt(_trial, mixer, own), attempt(_trial, mixer, changed.run)
    if truth is None or found is None:
        return None
    return changed if agrees(found, truth, 1e-4 if truth.dtype is torch.float32 else 0.05) else None


def functions_of(mixer: Any) -> tuple[Any, set[str]]:
    """The forward of its class, and the names of what there are kernels for that it calls."""
    own: Any = inspect.unwrap(type(mixer).forward)  # what is around it calls accelerate's hooks, if there are any
    return own, SCANS.keys() & own.__code__.co_names & own.__globals__.keys()


def _may_try(mixer: Any) -> bool:
    return all(is_library_code(part, KNOWN) and not has_hooks(part) for part in mixer.modules())


def _trial_states(mixer: Any, tokens: int) -> Tensor:
    layers = [part for part in mixer.modules() if isinstance(part, nn.Linear)]
    width = getattr(mixer, "hidden_size", None) or (layers[0].in_features if layers else mixer.conv1d.in_channels)
    states = torch.randn(1, tokens, width, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    parameter = next(mixer.parameters())
    return states.to(parameter.device, parameter.dtype)


def _trial_cache(mixer: Any) -> Cache:
    own = LinearAttentionLayer(number_of_states=getattr(mixer, "conv_idx", 0) + 1)  # Inkling's mixers number theirs
    return Cache(layers=[own] * (mixer.layer_idx + 1))


@torch.inference_mode(False)
@torch.no_grad()
def _trial(mixer: Any, forward: Callable[..., Any]) -> Tensor:
    """What a mixer makes of a few tokens together, then of one."""
    states, cache = _trial_states(mixer, 6), _trial_cache(mixer)
    return torch.cat([forward(mixer, states[:, :5], cache), forward(mixer, states[:, 5:], cache)], dim=1)


# New tokens of three rows in the steps of a trial.
_STEPS = np.array([[5, 2, 0], [1, 3, 1], [1, 0, 0]])


@torch.inference_mode(False)
@torch.no_grad()
def _trial_by_row(mixer: Any, forward: Callable[..., Any]) -> Tensor:
    """What a mixer makes of them row by row: of its first tokens together, then one by one."""
    states, parts = _trial_states(mixer, _STEPS.sum()), []
    for first, row in zip(np.cumsum([0, *_STEPS.sum(axis=0)]), _STEPS.T, strict=False):
        cache, at_once, total = _trial_cache(mixer), int(row[row > 0][0]), int(row.sum())
        for start, end in pairwise([0, *range(at_once, total + 1)]):
            parts.append(forward(mixer, states[:, first + start : first + end], cache))
    return torch.cat(parts, dim=1)


@torch.inference_mode(False)
@torch.no_grad()
def _packed_trial(mixer: Any, packed: PackedScans, spec: StateSpec, page_bytes: int) -> Tensor:
    """The same by step, all rows together."""
    states = _trial_states(mixer, _STEPS.sum())
    device, num_rows = states.device, _STEPS.shape[1]
    layout = StateLayout.of({0: spec}, page_bytes, states.dtype)
    pool = torch.zeros(layout.num_pages * num_rows, page_bytes // UNIT, dtype=torch.int64, device=device)
    pages = to_device(np.arange(len(pool)).reshape(num_rows, -1), device)
    output, firsts = torch.empty_like(states), np.cumsum([0, *_STEPS.sum(axis=0)])[:-1]
    at_once = np.array([row[row > 0][0] for row in _STEPS.T], dtype=np.int32)
    for number, new in enumerate(_STEPS):
        before = _STEPS[:number].sum(axis=0)
        places = np.concatenate([np.arange(n) + first for n, first in zip(new, firsts + before, strict=True)])
        lens, starts = ((before + new).astype(np.int32), np.cumsum([0, *new]).astype(np.int32))
        own_lens, own_starts, own_at_once = (to_device(each, device) for each in (lens, starts, at_once))
        rows = StateRows(pages, own_lens, own_starts, own_at_once, new.max() == 1, is_long=False, has_padding=False)
        index, own = to_device(places, device), StateCache(layout, pool).in_place(0, rows)
        output[:, index] = packed.run(mixer, own, states[:, index], _trial_cache(mixer))
    return output
