"""Decoder layers of the usual kind, whose kernels are called one after another: on CPU without Python in between."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from hf_paged.attention.backends.registry import PagedStep
from hf_paged.attention.context import MARK, ForwardContext, WantedTokens, current_context, with_step
from hf_paged.attention.params import AttentionParams
from hf_paged.kernels import cpu_adapters
from hf_paged.kernels.cpu_decoder import CPUDecoderLayer, DecoderSettings, Scratch
from hf_paged.kernels.cpu_layers import CPULayers
from hf_paged.kernels.cpu_stack import CPUDecoderStack
from hf_paged.kernels.layers import InputError
from hf_paged.model.adapted_layers import AdaptedLayer, added_to
from hf_paged.model.fused_layers import GatedMLP, Norm, is_as_tried
from hf_paged.model.fused_rotary import NAME, RotaryAttention
from hf_paged.model.joined_linears import are_plain
from hf_paged.model.layer_stacks import LayerStacks
from hf_paged.model.linears import Linear
from hf_paged.model.module_overrides import CALL, ModuleOverride, Survey, has_hooks, is_library_code, is_untouched
from hf_paged.model.peft_layers import is_tuner, without_adapters

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HEAD_NORMS = ("q_norm", "k_norm")
TRIED = 64  # tokens of a layer's trial, which is made in a step: its time and memory are not reckoned with
# What a forward of attention uses beside its own modules: of shapes, of the cache, and of the attention function.
ATTENTION_NAMES = {
    *("shape", "view", "transpose", "reshape", "contiguous", "head_dim", NAME),
    *("update", "layer_idx"),
    *("ALL_ATTENTION_FUNCTIONS", "get_interface", "eager_attention_forward", "config", "_attn_implementation"),
    *("training", "attention_dropout", "scaling", "sliding_window", "getattr"),
}


class Parts:
    """What stands in for the modules of a decoder layer.

    Attributes:
        attention: Of these, and
        mlp: these, and
        norms: before attention, and before the MLP; of queries' and of keys' heads, if there are any.
        linears: In the order of `LINEARS`; none on a GPU, where nothing stands in for such layers.
        outer: The modules that are called: the linear layers, or PEFT's around them (not on a GPU).
        tables: Where weights and biases are found: parameters by their names, and a name.
    """

    def __init__(
        self,
        attention: RotaryAttention,
        mlp: GatedMLP,
        norms: list[Norm],
        linears: list[Linear],
        outer: list[nn.Module],
    ) -> None:
        self.attention, self.mlp, self.norms, self.linears, self.outer = attention, mlp, norms, linears, outer
        tables = [linear._parameters for linear in ([own.module for own in linears] or outer)]
        self.tables = [(norm.module._parameters, "weight") for norm in norms]
        self.tables += [(table, name) for table in tables for name in ("weight", "bias") if table[name] is not None]

    def are_taken(self, thread_id: int | None) -> bool:
        """Whether all are computed our way now, on this thread, and none has hooks."""
        parts, mlp = (self.attention, self.mlp, *self.norms, *self.linears), self.mlp
        are_ours = all(part.thread_id == thread_id and not has_hooks(part.module) for part in parts)
        are_ours &= bool(self.linears) or are_plain(self.outer)
        return are_ours and is_as_tried(mlp.module, mlp.name, mlp.activation)


class WeightsInUse:
    """Where the weights of all decoder layers are, looked at once a forward; where a user's code runs, at each layer.

    It holds their memory until the next one, or the end of the scope: another thread may move them meanwhile.

    Attributes:
        may_add: Whether rows of this forward may have adapters.
        num_moves: How often weights had moved.
    """

    def __init__(self) -> None:
        self.may_add = False
        self.num_moves = 0
        self._layers: list[DecoderLayer] = []
        self._tables: list[tuple[dict[str, Tensor | None], str]] = []
        self._outer: list[dict[str, Any]] = []  # attributes of linear layers
        self._has_tuners = False
        self._forward: ForwardContext | None = None
        self._held: list[object] = []
        self._places: list[int] = []

    @property
    def is_plain(self) -> bool:
        """Whether nothing but known code runs in this forward."""
        return self._forward is not None and self._forward.is_plain

    def watch(self, layer: DecoderLayer) -> None:
        self._layers.append(layer)
        self._tables += layer.parts.tables
        self._outer += [vars(module) for module in layer.parts.outer]
        self._has_tuners |= any(map(is_tuner, layer.parts.outer))

    def look(self, forward: ForwardContext, layer: DecoderLayer) -> None:
        """Before a layer is computed: lets those know whose weights have moved."""
        if forward is self._forward:
            if not forward.is_plain and (now := tuple(self._find(layer.parts.tables))) != layer.places:
                layer.places, self._places = now, []  # the next forward looks at all of them as new
            return
        self._held = []
        places = self._find(self._tables)
        if places != self._places:
            first = 0
            for each in self._layers:
                each.places = tuple(places[first : (first := first + len(each.parts.tables))])
            self.num_moves += 1
            self._places = places
        self.may_add = self._has_tuners or AdaptedLayer in [type(own.get(CALL)) for own in self._outer]
        self._forward = forward

    def _find(self, tables: list[tuple[dict[str, Tensor | None], str]]) -> list[int]:
        """Holds the tensors of these names, and gives their addresses; 0: it is gone."""
        tensors = [table.get(name) for table, name in tables]
        self._held += [None if tensor is None else tensor.untyped_storage() for tensor in tensors]
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]

    def end(self) -> None:
        self._forward, self._held = None, []


def find_decoder_layer(module: Any, survey: Survey) -> DecoderLayer | None:
    """For a decoder layer of the usual kind on CPU: norm, attention, sum, norm, gated MLP, sum.

    All that it consists of is computed by our kernels already; here these are called from C. It is taken if its code
    uses nothing else, and its own forward in a step gives the same, bit for bit: queries, keys, values and result.
    """
    if not isinstance(survey.kernels, CPULayers) or (parts := parts_of(module, survey.found)) is None:
        return None
    return CPULayer(module, parts, survey)


def parts_of(layer: Any, overrides: dict[int, ModuleOverride]) -> Parts | None:
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
    norms = [one for one in own.values() if isinstance(one, Norm)]
    code = _code(type(attention.module).forward)
    modules = dict(attention.module.named_children())
    if code is None or _calculates(code) or not set(code.co_names) <= ATTENTION_NAMES | modules.keys():
        return None
    if len(norms) != 2 or modules.keys() not in (set(LINEARS[:4]), {*LINEARS[:4], *HEAD_NORMS}):
        return None
    used = modules | dict(mlp.module.named_children())
    found = {name: overrides.get(id(without_adapters(child))) for name, child in used.items()}
    linears = [one for name in LINEARS if isinstance(one := found.get(name), Linear)]
    head_norms = [one for name in HEAD_NORMS if isinstance(one := found.get(name), Norm)]
    if not set(LINEARS) <= used.keys() or len(head_norms) + 4 != len(modules):
        return None
    outer = [used[name] for name in LINEARS]
    if len(linears) != len(LINEARS) if isinstance(mlp.kernels, CPULayers) else not are_plain(outer):
        return None
    return Parts(attention, mlp, norms + head_norms, linears, outer)


def _code(forward: Any) -> CodeType | None:
    """What a forward does, if it is all here."""
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return None
    code = forward.__code__
    return None if any(isinstance(value, CodeType) for value in code.co_consts) else code


def _calculates(code: CodeType) -> bool:
    """Whether it adds, multiplies or compares anything, with numbers that are 1 in a trial, say."""
    return any(one.opname in ("BINARY_OP", "COMPARE_OP", "UNARY_NEGATIVE") for one in dis.get_instructions(code))


class DecoderLayer(ModuleOverride):
    """A decoder layer in steps, computed of its parts.

    Attributes:
        parts: What it consists of.
        is_whole: Whether these are all taken, as of the last look.
        is_same: Whether it computes what the layer does; `None`: not tried yet.
        params: What attention is called with, beside tensors.
        places: The addresses of its weights in this forward.
    """

    __slots__ = ("_tried", "is_same", "is_whole", "params", "parts", "places", "survey", "weights")

    def __init__(self, module: Any, parts: Parts, survey: Survey) -> None:
        super().__init__(module)
        self.parts, self.survey = parts, survey
        self.is_whole = False
        self.is_same: bool | None = None
        self.params: AttentionParams | None = None
        self.places: tuple[int, ...] = ()
        self._tried: tuple[int, ...] = ()  # the addresses that it was tried with
        self.weights = survey.shared(WeightsInUse)
        self.weights.watch(self)

    @property
    def is_taken(self) -> bool:
        """Whether its parts are, and its activation is the one that it was tried with."""
        mlp = self.parts.mlp
        return self.is_whole and getattr(mlp.module, mlp.name, None) is mlp.activation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mask: Any = kwargs.get("attention_mask")
        angles = kwargs.get("position_embeddings")
        if self.is_same is False or len(args) != 1 or not hasattr(mask, MARK) or not isinstance(angles, tuple):
            return self.module._call_impl(*args, **kwargs)
        context, states = current_context(mask), args[0]
        if not self.is_taken or self.survey.has_new_hooks or context.noting is not None:
            return self.module._call_impl(*args, **kwargs)
        self.weights.look(context, self)
        if not all(self.places):  # one is gone
            return self.module._call_impl(*args, **kwargs)
        try:
            if self.params is None or self.places != self._tried:
                return self._try(context.step, mask, angles, *args, **kwargs)
            return self.compute_layer(context, states, angles, self.params)
        except InputError:
            return self.module._call_impl(*args, **kwargs)

    def compute_layer(
        self,
        context: ForwardContext,
        states: Tensor,
        angles: tuple[Tensor, Tensor],
        params: AttentionParams,
    ) -> Tensor:
        """Its result."""
        raise NotImplementedError

    def compute_parts(self, states: Tensor, angles: tuple[Tensor, Tensor], attended: Tensor | None) -> Sequence[Tensor]:
        """Queries, keys and values, and the layer's result, to be compared with its own.

        Args:
            attended: What attention makes of the queries, `[tokens, heads, head_dim]`; `None`: it was not called.
        """
        raise NotImplementedError

    def agrees(self, one: Tensor, other: Tensor) -> bool:
        """Whether what was computed of its parts is what its own forward computes."""
        raise NotImplementedError

    def _try(self, step: PagedStep, mask: Tensor, angles: tuple[Tensor, Tensor], *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward, with a look at what it hands to attention: is it what the kernels give?"""
        noting = _NotingStep(step)
        with with_step(mask, noting):
            own = self.module._call_impl(*args, **kwargs)
        try:
            found = self.compute_parts(args[0], angles, noting.attended)
        except InputError:  # as of a layer of another kind
            found = ()
        truth = (*noting.stored, own)
        self.is_same = (
            len(found) == len(truth)
            and noting.num_calls == 2
            and all(isinstance(one, Tensor) and self.agrees(one, two) for one, two in zip(truth, found, strict=True))
        )
        self.params, self._tried = noting.params, self.places
        return own


class CPULayer(DecoderLayer):
    """Computed in C."""

    __slots__ = ("_stacks", "kernels")

    def __init__(self, module: Any, parts: Parts, survey: Survey) -> None:
        super().__init__(module, parts, survey)
        self.kernels: CPUDecoderLayer | None = None
        self._stacks = survey.shared(LayerStacks)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if (ahead := self._stacks.ahead.pop(self, None)) is not None:
            if ahead.fits(args, kwargs):
                return ahead.result
            self._stacks.forget()
        return super().forward(*args, **kwargs)

    def compute_layer(
        self,
        context: ForwardContext,
        states: Tensor,
        angles: tuple[Tensor, Tensor],
        params: AttentionParams,
    ) -> Tensor:
        assert self.kernels is not None
        step, wanted = context.step, context.wanted
        # By its number, and where it is: layers may have been put in another order.
        is_last = self.parts.attention.module is self.survey.last
        if wanted is not None and is_last and wanted.layer == params.layer:
            return self._compute_some(step, wanted, states, angles)
        is_own = vars(self.module).get(CALL) is self  # else it is called with copies of what the layer before returned
        is_usual = self.weights.is_plain and is_own and not self.weights.may_add
        stacks = self._stacks if is_usual else None
        if stacks is not None and (result := stacks.take(self, context, states, angles)) is not None:
            return result
        added = added_to(self.parts.outer, states) if self.weights.may_add else None
        query, key, value = self.kernels.before_attention(states, *angles, added)
        step.write(key, value, params.layer)
        result = self.kernels.behind_attention(states, step.attend(query, params), added)
        if stacks is not None and wanted is None:
            stacks.note(self, step, states, angles, result)
        return result

    @staticmethod
    def stack(layers: Sequence[CPULayer]) -> CPUDecoderStack:
        """Raises `InputError` if they differ in shape."""
        parts, survey = layers[0].parts, layers[0].survey
        kernels = parts.mlp.kernels
        assert isinstance(kernels, CPULayers)
        settings = [_settings(one.parts) for one in layers]
        return CPUDecoderStack(kernels, parts.linears[0].kernel, settings, survey.shared(Scratch))

    def _compute_some(
        self, step: PagedStep, wanted: WantedTokens, states: Tensor, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Keys and values of all tokens, and the layer's result for those that are wanted; zeros for the others."""
        assert self.kernels is not None and self.params is not None
        added = added_to(self.parts.outer, states)
        _, key, value = self.kernels.keys_and_values(states, angles[0], angles[1], added)
        step.write(key, value, self.params.layer)
        rows = wanted.rows
        some = None if added is None else added.of(rows)
        own, cos, sin = [each.index_select(1, rows) for each in (states, *angles)]
        query, _, _ = self.kernels.queries(own, cos, sin, some)
        attended = wanted.make_step().attend(query, self.params)
        return torch.zeros_like(states).index_copy_(1, rows, self.kernels.behind_attention(own, attended, some))

    def compute_parts(self, states: Tensor, angles: tuple[Tensor, Tensor], attended: Tensor | None) -> list[Tensor]:
        layers = self.parts.mlp.kernels
        assert isinstance(layers, CPULayers)
        settings = _settings(self.parts)  # by this name it holds the weights where they are now
        adapters = cpu_adapters.load(layers.dtype)
        own_adapters = None if isinstance(adapters, str) else adapters
        linear, scratch = self.parts.linears[0].kernel, self.survey.shared(Scratch)
        self.kernels = kernels = CPUDecoderLayer(layers, linear, settings, scratch, own_adapters)
        added, some = added_to(self.parts.outer, states), _tried(states.shape[1])
        added = added if added is None or isinstance(some, slice) else added.of(some)
        states, cos, sin = (each[:, some] for each in (states, *angles))
        found = list(kernels.before_attention(states, cos, sin, added))
        return found if attended is None else [*found, kernels.behind_attention(states, attended[some], added)]

    def agrees(self, one: Tensor, other: Tensor) -> bool:
        if one.shape != other.shape:  # some tokens, of `[tokens, heads, head_dim]` or `[1, tokens, width]`
            one = one[_tried(len(one))] if len(one) > 1 else one[:, _tried(one.shape[1])]
        return torch.equal(one, other)


def _tried(num_tokens: int) -> slice | Tensor:
    """The tokens of a step that a layer is tried with: each is computed by itself, so not all of a long prompt's."""
    if num_tokens <= TRIED:
        return slice(None)
    tokens = torch.arange(TRIED, device="cpu")
    return torch.where(tokens < TRIED // 2, tokens, tokens + num_tokens - TRIED)


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


def _settings(parts: Parts) -> DecoderSettings:
    norms = [norm.settings for norm in parts.norms]
    query, key, value, projection, gate, up, down = ((linear.weight, linear.bias) for linear in parts.linears)
    rotary = parts.attention.changed.changes[NAME]
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
