"""`find_scans`: mixers whose convolutions and scans run as our kernels in the engine's forwards on CPU.

Transformers computes several tokens at once by other formulas than single ones; the kernels know one for both. So where
a prompt was cut, and what of it was cached, leaves no trace in a result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from hf_paged.kernels.cpu_scan import DELTA, SELECTIVE, SUM, convolve, scan
from hf_paged.kernels.layers import InputError, plainly
from hf_paged.model.exact_operations import activated, softplus
from hf_paged.model.fused_layers import ACTIVATIONS, agrees, attempt
from hf_paged.model.module_overrides import KNOWN, ChangedForward, has_hooks, is_library_code


def _convolution(states: Tensor, weight: Tensor, bias: Any = None, activation: str | None = None, **_: Any) -> Tensor:
    if activation not in (None, "silu", "swish"):
        raise InputError("convolve", "SiLU or no activation", weight=weight)
    return convolve(states.to(weight.dtype), weight, bias, activation is not None).to(states.dtype)


def _convolution_update(states: Tensor, state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    whole = torch.cat([state, states], dim=-1)
    output = _convolution(whole, *args, **kwargs)[..., state.shape[-1] :]
    state.copy_(whole[..., states.shape[-1] :])
    return output


def _delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **given: Any) -> Any:
    """Of a decay a head, or (Kimi Linear) one a key."""
    if not given["use_qk_l2norm_in_kernel"]:
        raise InputError("scan", "queries and keys to be normed", query=query, key=key)
    state = _state(given["initial_state"], len(query), value.shape[2], key.shape[-1], value.shape[-1])
    step = beta.float()[..., None]
    decay = g.float().exp().view(*beta.shape, -1)
    return scan(DELTA, query, key, value, decay, step, state, is_normed=True), state


def _sum(x: Tensor, dt: Tensor, rate: Tensor, key: Tensor, query: Tensor, **given: Any) -> Any:
    """Of Mamba 2. Two families (Nemotron-H, Zamba 2) limit the steps of several tokens, not those of single ones."""
    state = _state(given["initial_states"], len(dt), *x.shape[2:], key.shape[-1])
    step = _steps(dt, given["dt_bias"], given.get("dt_limit", (0.0, float("inf"))))
    decay, skip = (step * rate.float()).exp()[..., None], given["D"].float()[:, None].expand(state.shape[1:3])
    output = scan(SUM, query, key, x, decay, step[..., None], state.transpose(-1, -2), skip=skip)
    return (output, state) if given["return_final_states"] else output


def _sum_update(state: Tensor, x: Tensor, dt: Tensor, rate: Tensor, *others: Tensor, **given: Any) -> Tensor:
    key, query, skip = others
    gate = None if given["z"] is None else activated(given["z"], *ACTIVATIONS[0])
    given |= {"D": skip[:, 0], "dt_bias": given["dt_bias"][:, 0], "initial_states": state, "return_final_states": False}
    output = _sum(x[:, None], dt[:, None, :, 0], rate[:, 0, 0], key[:, None], query[:, None], **given)[:, 0]
    return output if gate is None else output * gate


def _selective(x: Tensor, dt: Tensor, rate: Tensor, key: Tensor, query: Tensor, **given: Any) -> Any:
    """Of Mamba 1: its channels are values of one head."""
    x, dt, key, query, gate = (s.transpose(1, 2)[:, :, None] for s in (x, dt, key, query, given["z"]))
    state = _state(given.get("state"), len(x), x.shape[-1], key.shape[-1])
    step, skip, own = _steps(dt, given["delta_bias"]), given["D"].float()[None], state.transpose(1, 2)[:, None]
    output = scan(SELECTIVE, query, key, x, rate.float()[None], step, own, skip=skip, gate=gate)
    output = output[:, :, 0].transpose(1, 2)
    return (output, state) if given["return_last_state"] else output


def _selective_update(state: Tensor, x: Tensor, dt: Tensor, rate: Tensor, *others: Tensor, **given: Any) -> Tensor:
    x, dt, key, query, gate = (s[..., None] for s in (x, dt, *others[:2], given["z"]))
    given |= {"state": state, "D": others[2], "z": gate, "delta_bias": given["dt_bias"], "return_last_state": False}
    return _selective(x, dt, rate, key, query, **given)[..., 0]


def _state(given: Tensor | None, *shape: int) -> Tensor:
    """What a scan changes in place: that of a cache, which is then given it as the new one, or a new one."""
    return torch.zeros(shape, device="cpu") if given is None else given


def _steps(dt: Tensor, bias: Tensor | None, limits: Sequence[float] = (0.0, float("inf"))) -> Tensor:
    """`softplus(dt + bias)`, rounded where transformers rounds."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return softplus(dt).clamp(*limits).float()


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


def find_scans(mixer: Any) -> ChangedForward | None:
    """The forward of its class with our functions in place of its file's, if that computes the same."""
    own: Any = inspect.unwrap(type(mixer).forward)  # what is around it calls accelerate's hooks, if there are any
    names = SCANS.keys() & own.__code__.co_names & own.__globals__.keys()
    scans = {name: _or_own(SCANS[name], own.__globals__[name]) for name in names}
    if not scans or not all(is_library_code(part, KNOWN) and not has_hooks(part) for part in mixer.modules()):
        return None
    changed = ChangedForward(own, scans)
    truth, found = attempt(_trial, mixer, own), attempt(_trial, mixer, changed.run)
    if truth is None or found is None:
        return None
    return changed if agrees(found, truth, 1e-4 if truth.dtype is torch.float32 else 0.05) else None


@torch.inference_mode(False)
@torch.no_grad()
def _trial(mixer: Any, forward: Callable[..., Any]) -> Tensor:
    """What a mixer makes of a few tokens together, then of one."""
    layers = [part for part in mixer.modules() if isinstance(part, nn.Linear)]
    width = getattr(mixer, "hidden_size", None) or (layers[0].in_features if layers else mixer.conv1d.in_channels)
    states = torch.randn(1, 6, width, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    states = states.to(next(mixer.parameters()).dtype)
    own = LinearAttentionLayer(number_of_states=getattr(mixer, "conv_idx", 0) + 1)  # Inkling's mixers number theirs
    cache = Cache(layers=[own] * (mixer.layer_idx + 1))
    return torch.cat([forward(mixer, states[:, :5], cache), forward(mixer, states[:, 5:], cache)], dim=1)
