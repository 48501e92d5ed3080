"""Whether a model's rows have the same bits whatever shares their steps: by rule, then tried on its shrunken copy.

A step is exact if whatever sees rows of several requests is a kernel of ours with one order of sums, or one of torch's
operations that compute each row by itself. These are listed here; each was measured on rows together and alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from hf_paged.api.given_call import OUTPUTS
from hf_paged.api.patched_class import attach, detach
from hf_paged.api.probe import Trial
from hf_paged.api.tiny_model import LENGTHS, LONGEST, error_text, logits
from hf_paged.attention.cache import PagedCache
from hf_paged.core.config import PagedConfig
from hf_paged.kernels import cpu, cpu_adapters, cpu_layers, cpu_linear
from hf_paged.model import peft_layers
from hf_paged.model.module_overrides import CALL, ModuleOverride, has_exact_forward, has_hooks, is_library_code
from hf_paged.model.placement import Placement
from hf_paged.model.sharding import ranks_of
from hf_paged.model.spread import is_wrapped
from hf_paged.model.traits import ModelTraits
from hf_paged.model.wrapper import inner_path

# What moves numbers, what computes each by itself, what sums (and the like) along a row, and copies of rows.
_NAMES = """
    alias as_strided cat clone constant_pad_nd copy detach diagonal embedding expand fill flip full_like gather index
    index_add index_copy index_fill index_select lift_fresh masked_fill masked_scatter new_empty new_full new_ones
    new_zeros ones_like empty_like permute repeat roll scatter select slice split split_with_sizes squeeze stack t
    to_copy transpose tril triu unbind unfold unsafe_view unsqueeze view where zero zeros_like
    abs add addcdiv addcmul atan ceil clamp clamp_max clamp_min cos div eq equal erf erfinv exp expm1 floor ge gt
    hardsigmoid hardswish isfinite isinf isnan le leaky_relu log log1p log2 log_sigmoid_forward lt maximum minimum mul
    ne neg reciprocal relu remainder round rsub sign sin sqrt sub tanh
    amax amin argmax argmin argsort cumsum log_softmax max min native_layer_norm softmax sort topk
"""
_ROWWISE = frozenset(_NAMES.split())
_NO_LIMIT = (0.0, float("inf"))
_MOST_SUMMED = 32767  # elements: of more torch's threads share one sum
_VECTORS = 32  # columns that torch sums side by side; those behind them in another order


def why_not_exact(model: PreTrainedModel, trial: Trial) -> tuple[str, ...]:
    """Reasons, a sentence each; none if it is exact. Never raises.

    Args:
        model: On the meta device: one that would be in float32 on CPU.
    """
    try:
        dtype, device = Placement(model)() or (model.dtype, model.device)
        loaded = dtype
        if device.type == "meta":
            dtype, device = torch.float32, torch.device("cpu")
        asked = [name for name in OUTPUTS if getattr(model.config, name, False)]
        reasons = [f"config.{name}=True asks its own code for more than logits in each forward" for name in asked]
        reasons += _of_steps(trial.traits, dtype, device)
        reasons = reasons or (_of_trial(*trial.tiny, dtype) if trial.tiny else [])
        return (*reasons, *_of_modules(model, loaded))
    except Exception as error:
        return (f"trying whether it is exact raised {error_text(error)}",)


def _of_steps(traits: ModelTraits, dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    """Reasons that hold for all steps of such a model here."""
    if not traits.runs_packed:
        yield f"its forwards don't run packed, so that torch multiplies rows of one width together: {traits.why_padded}"
    if traits.has_latents:
        yield "a prompt's keys are made of its latents, a generated token's attention reads the latents themselves"
    if any(traits.indexers):
        yield "which tokens a layer attends to is chosen by an indexer, whose scores torch multiplies"
    if device.type != "cpu":
        yield f"it is on {device}, where products need a fixed order of sums: those of cuBLAS depend on their shapes"
        return
    layers = [layer for layer in traits.layers if layer is not None and not layer.is_latent]
    if any(layer.key_dim != layer.value_dim for layer in layers):
        yield "its keys and values differ in width, which the attention kernel doesn't take"
    kernels = [cpu_linear.load(dtype), cpu_layers.load(dtype), *(cpu.load(dtype, layer.key_dim) for layer in layers)]
    missing = dict.fromkeys(kernel for kernel in kernels if isinstance(kernel, str))
    yield from (f"torch computes what a kernel of ours would, which {why}" for why in missing)
    if torch.is_autocast_enabled("cpu"):
        yield "autocast is enabled, under which torch computes the layers"


def _of_modules(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[str]:
    """Reasons that lie in this model, and not in its architecture."""
    everything, ranks = dict(model.named_modules()), ranks_of(model) or ()
    shared = {id(module) for module in peft_layers.shared_modules(model) if not peft_layers.is_tuner(module)}
    modules = {name: module for name, module in everything.items() if id(module) in shared}
    if ranks:
        why = ", and sums of more than two numbers depend on their order" if len(ranks) > 2 else ""
        yield f"it is split between {len(ranks)} processes, where torch multiplies by the shares of its weights{why}"
        return
    if inner_path(model) is not None:
        yield "torch computes its towers for pictures or sound: text is exact, and what follows from the same features"
    if any(tuple(getattr(module, "time_step_limit", _NO_LIMIT)) != _NO_LIMIT for module in modules.values()):
        yield "transformers limits the time steps of a prompt's tokens (time_step_min), but not of generated ones"

    def named(what: str, found: list[str]) -> Iterator[str]:
        if found:
            yield f"{what}, which torch or others compute: {', '.join(found[:3])}{', ...' if found[3:] else ''}"

    spread = [name or "the model" for name, module in modules.items() if "_hf_hook" in vars(module)]
    yield from named("accelerate has spread or offloads some modules", spread)
    others = {f"{type(m).__module__}.{type(m).__name__}" for m in modules.values() if not _is_plain(m)}
    yield from named("some modules are not of torch or transformers, or are compiled or wrapped", sorted(others))
    yield from named("hooks look at some modules", [name or "the model" for name, m in modules.items() if has_hooks(m)])
    own = {name: module for name, module in modules.items() if not has_exact_forward(module)}
    weights = {f"{name}.{kind}": each for name, m in own.items() for kind, each in m._parameters.items()}
    odd = [
        n for n, each in weights.items() if each is not None and (type(each) is not nn.Parameter or each.dtype != dtype)
    ]
    yield from named(f"some weights are quantized, or not in {dtype}", odd)
    tuners = {name: module for name, module in everything.items() if peft_layers.is_tuner(module)}
    yield from named(
        "adapters are no LoRA of our kernel's", [n for n, m in tuners.items() if not _is_added_in_c(m, dtype)]
    )


def _is_plain(module: nn.Module) -> bool:
    is_compiled = not isinstance(module.__dict__.get(CALL), ModuleOverride | None)
    is_quantized = type(module).__module__.startswith("torch.ao.")
    return not is_compiled and not is_quantized and (is_library_code(module) or is_wrapped(module))


def _is_added_in_c(layer: Any, dtype: torch.dtype) -> bool:
    if peft_layers.is_wrapper(layer) or peft_layers.why_own_code(layer) or isinstance(cpu_adapters.load(dtype), str):
        return False
    parts = [own.weight for table in (layer.lora_A, layer.lora_B) for own in table.values()]
    fits = all(each.dtype in cpu_adapters.DTYPES and min(each.shape) <= cpu_adapters.MAX_RANK for each in parts)
    return fits and not layer.lora_embedding_A


def _of_trial(model: PreTrainedModel, traits: ModelTraits, dtype: torch.dtype) -> list[str]:
    """Reasons found with a shrunken copy: operations that are not known, rows whose bits are others alone."""
    model = model.to(dtype)  # type: ignore[arg-type]
    attach(model, PagedConfig(num_blocks=4096, block_size=2, cuda_graphs=False), traits)
    operations, bound = _Operations(), model.paged.core.bound  # type: ignore[union-attr]
    try:
        bound._forward = partial(operations.watch, bound._forward)  # a mode around the call would not reach its steps
        together = logits(model, PagedCache(model), (0, 60, 90, 91, 92))
        reasons = set()
        for row, length in enumerate(LENGTHS):
            first = LONGEST - length
            for edges, at, what in (
                ((0, 60, 90, 91, 92), slice(None), "beside other rows"),
                ((first, first + 1, first + 8, 59, 92), slice(-1, None), "in other chunks"),
                ((first, 89, 90, 91, 92), slice(1, None), "in other chunks"),
            ):
                expected = together[row, at]
                if not torch.equal(logits(model, PagedCache(model), edges, row)[0, -len(expected) :], expected):
                    reasons.add(f"a row's logits are other bits {what}")
        unknown = (f"aten.{name}: not known to compute each row by itself" for name in sorted(operations.unknown))
        return [*sorted(reasons), *unknown]
    finally:
        detach(model)


class _Operations(TorchDispatchMode):
    """Within it, notes what torch computes of floating-point tensors on this thread, if it may not be exact."""

    def __init__(self) -> None:
        super().__init__()
        self.unknown: set[str] = set()

    def watch(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self:
            return forward(*args, **kwargs)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.is_floating_point()]
        if given:
            with self:
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            name = function.name().partition("::")[2].partition(".")[0].strip("_")
            if not _is_rowwise(name, args, kwargs):
                self.unknown.add(name)
        return function(*args, **kwargs)


def _is_rowwise(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation's result at one place depends on its own row only, to the last bit."""
    first = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
    if name in ("mm", "bmm"):
        return first.shape[-1] == 1  # products without a sum, as of a rotary embedding
    if name == "pow":
        return not isinstance(args[1], Tensor) and args[1] in (2, 3)
    if name == "rsqrt" or (name in ("add", "sub", "rsub") and (args[2:] or kwargs.get("alpha", 1) != 1)):
        return first.dtype is torch.float32
    if name in ("softmax", "log_softmax"):
        return args[1] in (-1, first.ndim - 1)
    if name in ("sum", "mean", "linalg_vector_norm", "std", "var", "var_mean"):
        return max(first.shape, default=0) <= _MOST_SUMMED and _has_own_order(first, name, args, kwargs)
    return name in _ROWWISE or (name == "index_put" and args[3:] in ((), (False,)))


def _has_own_order(states: Tensor, name: str, args: Any, kwargs: Any) -> bool:
    """Whether a sum's order doesn't depend on its place: of elements side by side, or rows that end vectors."""
    dims = kwargs.get("dim", next(iter(args[2 if name == "linalg_vector_norm" else 1 :]), None))
    dims = [dims] if isinstance(dims, int) else dims or range(states.ndim)
    is_along = states.ndim - 1 in (dim % states.ndim for dim in dims)
    return not states.ndim or (states.stride(-1) == 1 and (is_along or states.shape[-1] % _VECTORS == 0))
