"""`DecoderLayers`: decoder layers whose kernels run one after another without Python in between."""

from __future__ import annotations

import dis
import inspect
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged.attention.backends.registry import PagedStep
from hf_paged.attention.context import ForwardContext, WantedTokens, current_context, is_sentinel, with_step
from hf_paged.attention.params import AttentionParams
from hf_paged.attention.shared_layers import SharedLayersStep
from hf_paged.kernels.cpu_decoder import CPUDecoderLayer, DecoderSettings, NormSettings, Scratch
from hf_paged.kernels.cpu_layers import CPULayers
from hf_paged.kernels.layers import InputError
from hf_paged.model.fused_layers import FusedLayers, GatedMLP, Norm, activation_of
from hf_paged.model.fused_rotary import NAME, RotaryAttention
from hf_paged.model.linears import Linear, Linears
from hf_paged.model.module_overrides import (
    ModuleOverride,
    has_hooks,
    is_library_code,
    is_untouched,
    not_overriding,
    overriding,
)

logger = logging.getLogger(__name__)

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HEAD_NORMS = ("q_norm", "k_norm")
# What a forward of attention uses beside its own modules: of shapes, of the cache, and of the attention function.
ATTENTION_NAMES = {
    *("shape", "view", "transpose", "reshape", "contiguous", "head_dim", NAME),
    *("update", "layer_idx"),
    *("ALL_ATTENTION_FUNCTIONS", "get_interface", "eager_attention_forward", "config", "_attn_implementation"),
    *("training", "attention_dropout", "scaling", "sliding_window", "getattr"),
}


class DecoderLayers:
    """Decoder layers of the usual kind, in steps: norm, attention, sum, norm, gated MLP, sum.

    All that they consist of is computed by our kernels already (`FusedLayers`, `Linears`); here these are called
    from C. A layer is taken if its code uses nothing else, and its own forward in a step gives the same, bit for bit:
    queries, keys, values and result. Whatever changes in it or in one of its modules gives it back its own forward.

    Only the thread inside `scope` sees any of it.
    """

    def __init__(self, model: nn.Module, fused: FusedLayers, linears: Linears) -> None:
        """Does nothing before the first `scope`. The model is held weakly."""
        self._model = weakref.ref(model)
        self._fused = fused
        self._linears = linears
        self._made_of: tuple[list[ModuleOverride], list[Linear]] | None = None
        self._layers: list[_DecoderLayer] = []

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Within it, and within the scopes of the parts, steps on this thread compute these layers in C."""
        calls, linears = self._fused.calls, self._linears.layers
        if calls is None or linears is None or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            with not_overriding(self._layers):
                yield
            return
        made_of = self._made_of
        if made_of is None or made_of[0] is not calls or made_of[1] is not linears:
            self._made_of, self._layers = (calls, linears), []
            model = self._model()
            if model is not None:
                self._layers = _find(model, calls, linears)
        with overriding(self._layers):
            yield


def _find(model: nn.Module, calls: list[ModuleOverride], linears: list[Linear]) -> list[_DecoderLayer]:
    overrides = {id(call.module): call for call in (*calls, *linears)}
    scratch = Scratch()
    last: nn.Module | None = None  # attention of the layer that comes last
    found: list[_DecoderLayer] = []
    for module in model.modules():
        parts = _parts(module, overrides)
        if parts is not None:
            found.append(_DecoderLayer(module, parts, scratch))
        if isinstance(getattr(module, "layer_idx", None), int):
            last = module
    for layer in found:
        layer.is_last = layer.parts.attention.module is last
    logger.info("hf_paged: %d decoder layers may be computed in C", len(found))
    return found


class _Parts:
    """What stands in for the modules of a decoder layer, and where these are found.

    Attributes:
        norms: Before attention, and before the MLP; of queries' and of keys' heads, if there are any.
        linears: In the order of `LINEARS`.
        places: All with the dictionary that their module is in, and its name there.
    """

    def __init__(self, attention: RotaryAttention, mlp: GatedMLP) -> None:
        self.attention, self.mlp = attention, mlp
        self.norms: list[Norm] = []
        self.linears: list[Linear] = []
        self.places: list[tuple[dict[str, Any], str, ModuleOverride]] = []

    def are_taken(self, thread_id: int | None) -> bool:
        """Whether all are where they were, and are computed our way now, on this thread."""
        for modules, name, override in self.places:
            module = override.module
            if modules.get(name) is not module or override.thread_id != thread_id or has_hooks(override.module):
                return False
        mlp = self.mlp
        is_same = activation_of(mlp.module) is mlp.activation
        return is_same and not (isinstance(mlp.activation, nn.Module) and has_hooks(mlp.activation))

    def state(self) -> tuple[list[object], list[object]]:
        """Everything else that the layer's result depends on, in numbers, and what to hold while these are used.

        Raises:
            InputError: A linear layer is not one that our kernel takes any more.
        """
        attention = vars(self.attention.module)
        state: list[object] = [value for value in attention.values() if type(value) in (int, float, bool)]
        tensors: list[Tensor] = []
        for norm in self.norms:
            tensors.append(norm.module.weight)
            state.append(getattr(norm.module, norm.eps))
        for linear in self.linears:
            weight, bias = linear.weight, linear.bias
            tensors.append(weight)
            state += weight.dtype, weight.shape, bias is None
            if bias is not None:
                tensors.append(bias)
        state += [tensor.data_ptr() for tensor in tensors]
        return state, [tensor.untyped_storage() for tensor in tensors]


def _parts(layer: Any, overrides: dict[int, ModuleOverride]) -> _Parts | None:
    """Those of a layer whose forward uses nothing but its four modules, which are of the right kinds."""
    children = dict(layer.named_children())
    if len(children) != 4 or not is_untouched(layer) or not is_library_code(layer) or has_hooks(layer):
        return None
    code = _code(inspect.unwrap(type(layer).forward))  # within transformers' own gradient checkpointing
    own = {name: overrides.get(id(child)) for name, child in children.items()}
    attention = next((one for one in own.values() if isinstance(one, RotaryAttention)), None)
    mlp = next((one for one in own.values() if isinstance(one, GatedMLP)), None)
    if code is None or attention is None or mlp is None or not set(code.co_names) <= own.keys():
        return None
    parts = _Parts(attention, mlp)
    parts.norms = [one for one in own.values() if isinstance(one, Norm)]
    code = _code(type(attention.module).forward)
    modules = dict(attention.module.named_children())
    if code is None or _calculates(code) or not set(code.co_names) <= ATTENTION_NAMES | modules.keys():
        return None
    if len(parts.norms) != 2 or modules.keys() not in (set(LINEARS[:4]), {*LINEARS[:4], *HEAD_NORMS}):
        return None
    for parent in (layer, attention.module, mlp.module):
        for name, child in parent.named_children():
            override = overrides.get(id(child))
            if override is not None:
                parts.places.append((parent._modules, name, override))
    found = {name: override for _, name, override in parts.places}
    linears = [one for name in LINEARS if isinstance(one := found.get(name), Linear)]
    head_norms = [one for name in HEAD_NORMS if isinstance(one := found.get(name), Norm)]
    if len(linears) != len(LINEARS) or len(head_norms) + 4 != len(modules) or not isinstance(mlp.kernels, CPULayers):
        return None
    parts.linears, parts.norms = linears, parts.norms + head_norms
    return parts


def _code(forward: Any) -> CodeType | None:
    """What a forward does, if it is all here."""
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return None
    code = forward.__code__
    return None if any(isinstance(value, CodeType) for value in code.co_consts) else code


def _calculates(code: CodeType) -> bool:
    """Whether it adds, multiplies or compares anything, with numbers that are 1 in a trial, say."""
    return any(one.opname in ("BINARY_OP", "COMPARE_OP", "UNARY_NEGATIVE") for one in dis.get_instructions(code))


class _DecoderLayer(ModuleOverride):
    __slots__ = ("is_last", "is_same", "kernels", "params", "parts", "scratch", "state")

    def __init__(self, module: Any, parts: _Parts, scratch: Scratch) -> None:
        super().__init__(module)
        self.parts = parts
        self.scratch = scratch
        self.is_last = False
        self.is_same: bool | None = None  # not tried yet
        self.state: list[object] | None = None
        self.kernels: CPUDecoderLayer | None = None
        self.params: AttentionParams | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mask: Any = kwargs.get("attention_mask")
        angles = kwargs.get("position_embeddings")
        if self.is_same is not False and len(args) == 1 and is_sentinel(mask) and isinstance(angles, tuple):
            context = current_context(mask)
            if not isinstance(context.step, SharedLayersStep) and self.parts.are_taken(self.thread_id):
                try:
                    return self._compute(context, mask, angles, *args, **kwargs)
                except InputError:
                    pass
        return self.module._call_impl(*args, **kwargs)

    def _compute(
        self, context: ForwardContext, mask: Tensor, angles: tuple[Tensor, Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        (state, held), step, wanted = self.parts.state(), context.step, context.wanted
        if self.kernels is None or self.params is None or state != self.state:
            return self._try(step, mask, angles, state, *args, **kwargs)
        assert held  # by this name, until the kernels are through: another thread may be moving weights
        states = args[0]
        # By its number, and where it is: layers may have been put in another order.
        if wanted is not None and self.is_last and wanted.layer == self.params.layer:
            return self._compute_some(step, wanted, states, angles)
        query, key, value = self.kernels.before_attention(states, *angles)
        step.write(key, value, self.params.layer)
        attended = step.attend(query, self.params)
        return self.kernels.behind_attention(states, attended)

    def _compute_some(
        self, step: PagedStep, wanted: WantedTokens, states: Tensor, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Keys and values of all tokens, and the layer's result for those that are wanted; zeros for the others."""
        assert self.kernels is not None and self.params is not None
        step.write(*self.kernels.keys_and_values(states, *angles), self.params.layer)
        rows = wanted.rows
        own, cos, sin = (each.index_select(1, rows) for each in (states, *angles))
        attended = wanted.make_step().attend(self.kernels.queries(own, cos, sin), self.params)
        return torch.zeros_like(states).index_copy_(1, rows, self.kernels.behind_attention(own, attended))

    def _try(
        self,
        step: PagedStep,
        mask: Tensor,
        angles: tuple[Tensor, Tensor],
        state: list[object],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The layer's own forward, with a look at what it hands to attention: is it what the kernels give?"""
        noting = _NotingStep(step)
        with with_step(mask, noting):
            own = self.module._call_impl(*args, **kwargs)
        kernels: CPUDecoderLayer | None = None
        found: tuple[Tensor, ...] = ()  # as of a layer of another kind
        try:
            layers = self.parts.mlp.kernels
            assert isinstance(layers, CPULayers)
            kernels = CPUDecoderLayer(layers, self.parts.linears[0].kernel, _settings(self.parts), self.scratch)
            found = kernels.before_attention(args[0], *angles)
            if noting.attended is not None:
                found += (kernels.behind_attention(args[0], noting.attended),)
        except InputError:
            found = ()
        truth = (*noting.stored, own)
        self.is_same = (
            len(found) == len(truth)
            and noting.num_calls == 2
            and all(
                isinstance(one, Tensor) and one.shape == other.shape and torch.equal(one, other)
                for one, other in zip(truth, found, strict=True)
            )
        )
        self.kernels, self.params, self.state = kernels, noting.params, state
        return own


class _NotingStep:
    """A step that keeps what one layer makes of it.

    Attributes:
        stored: Queries, keys and values.
        params: What else attention was called with.
        attended: Its result.
        num_calls: Of writing and of attending.
    """

    def __init__(self, step: PagedStep) -> None:
        self._step = step
        self.stored: tuple[Tensor, ...] = ()
        self.params: AttentionParams | None = None
        self.attended: Tensor | None = None
        self.num_calls = 0

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        self.num_calls += 1
        self.stored = key, value
        self._step.write(key, value, layer)

    def attend(self, query: Tensor, params: AttentionParams) -> Tensor:
        self.num_calls += 1
        self.stored, self.params = (query, *self.stored), params
        self.attended = self._step.attend(query, params)
        return self.attended


def _settings(parts: _Parts) -> DecoderSettings:
    norms = [
        NormSettings(norm.module.weight, getattr(norm.module, norm.eps), norm.offset, norm.rounds_first)
        for norm in parts.norms
    ]
    query, key, value, projection, gate, up, down = ((linear.weight, linear.bias) for linear in parts.linears)
    rotary = parts.attention.changed.rotary
    return DecoderSettings(
        head_dim=parts.attention.module.head_dim,
        norms=(norms[0], norms[1]),
        head_norms=(norms[2], norms[3]) if len(norms) > 2 else None,
        query=query,
        key=key,
        value=value,
        projection=projection,
        gate=gate,
        up=up,
        down=down,
        activation=parts.mlp.coefficients,
        interleaved=rotary.interleaved,
        rounds=rotary.rounds,
    )
