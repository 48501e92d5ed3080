"""`Layers`: which of a model's modules the engine's forwards compute in ways of their own, and when."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_paged.kernels.availability import layer_kernels
from hf_paged.kernels.cpu_layers import CPULayers
from hf_paged.kernels.layers import LayerKernels
from hf_paged.model.decoder_layers import DecoderLayer, WeightsInUse, find_decoder_layer
from hf_paged.model.exact_operations import find_activation, find_exact
from hf_paged.model.experts import find_experts
from hf_paged.model.fused_layers import GatedMLP, NormAhead, find_gated_mlp, find_norm
from hf_paged.model.fused_rotary import find_rotary
from hf_paged.model.gpu_layers import GPULayer, find_gpu_layer, note_stacks
from hf_paged.model.joined_linears import ATTENTION, MLP, are_plain, join, part
from hf_paged.model.layer_stacks import LayerStacks
from hf_paged.model.linears import Runs, find_linear
from hf_paged.model.module_overrides import ChangedForward, ModuleOverride, Survey, not_overriding, overriding
from hf_paged.model.peft_layers import shared_modules
from hf_paged.model.placement import Placement

logger = logging.getLogger(__name__)

# Each says what is to stand in for a module, or `None`; the first that has an answer is taken.
Kind = Callable[[nn.Module, Survey], ModuleOverride | None]
KINDS: tuple[Kind, ...] = (
    find_linear,
    find_experts,
    find_norm,
    find_gated_mlp,
    find_rotary,
    find_decoder_layer,
    find_gpu_layer,
    find_activation,
    find_exact,
)
OF_ENCODERS = (find_linear, find_norm, find_gated_mlp, find_activation, find_exact)


class Layers:
    """The overrides of a model, found once for a state of its code and of the kinds of its weights.

    Weights are read where they are; on a GPU, those of layers with the same input are put side by side before. Only the
    thread inside `scope` sees any of it: training, scoring and other threads go through the modules as they are.

    Attributes:
        has_joined: Whether it may have put weights side by side.
        unjoined: On a GPU, how many of those sets of layers are multiplied one by one, by the reason, as of the last
            `scope` that found layers anew.
    """

    def __init__(
        self,
        model: nn.Module,
        moving: Callable[[], AbstractContextManager[None]] = nullcontext,
        kinds: tuple[Kind, ...] | None = None,
        encoder: nn.Module | None = None,
    ) -> None:
        """Does nothing before the first `scope`. The model is held weakly.

        Args:
            moving: Within it, weights are put elsewhere in memory, as they are.
            kinds: What may stand in for its modules; `None`: all `KINDS`.
            encoder: The part of it that is no part of a step.
        """
        self._model = weakref.ref(model)
        self._moving = moving
        self._kinds = kinds
        self.of_encoder = None if encoder is None else Layers(encoder, kinds=OF_ENCODERS)
        self.unjoined: Counter[str] = Counter()
        self.has_joined = False
        self._placement = Placement(model)
        self._made_for: tuple[object, ...] = ()
        self._survey: Survey | None = None

    @property
    def found(self) -> list[ModuleOverride]:
        """What stands in for modules in a `scope`; nothing before the first."""
        survey = self._survey
        return [] if survey is None else list(survey.found.values())

    @property
    def other_rotaries(self) -> list[str]:
        """The forwards whose rotary embeddings were tried, and are none that the kernels compute."""
        known = {} if self._survey is None else self._survey.known
        return [forward.__qualname__ for forward, changed in known.items() if changed is None]

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the model."""
        model = self._model()
        return [] if model is None else list(model.modules())

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Within it, forwards on this thread compute these modules our way, but for autocast and autograd."""
        model, placement = self._model(), self._placement()
        devices = {"cpu"} if placement is None else {"cpu", placement[1].type}
        if model is None or torch.is_grad_enabled() or any(map(torch.is_autocast_enabled, devices)):
            with not_overriding(self.found):
                yield
            return
        made_for = placement, self._placement.is_spread
        survey = self._survey  # which another thread may drop meanwhile
        if survey is None or self._made_for != made_for:
            encoder = None if self.of_encoder is None else self.of_encoder._model()
            survey = self._survey = _survey(model, *made_for, self._kinds, encoder)
            self._made_for = made_for
            self._join(model, survey)
        for shared in survey.known.values():
            if isinstance(shared, ChangedForward):
                shared.look_up()
        try:
            with overriding(survey.found.values()) as taken:
                _look_at_hooks(survey, taken)
                yield
        finally:
            survey.shared(Runs).end()
            survey.shared(NormAhead).leave(None, None)
            survey.shared(WeightsInUse).end()
            survey.shared(LayerStacks).end()

    def _join(self, model: nn.Module, survey: Survey) -> None:
        """Puts weights side by side of layers that get the same input, where one product can take their place."""
        self.unjoined.clear()
        if survey.kernels is None or isinstance(survey.kernels, CPULayers):
            return
        known = {id(layer.parts.attention.module) for layer in survey.of(GPULayer)}
        known |= {id(mlp.module) for mlp in survey.of(GatedMLP)}
        groups: list[list[nn.Module]] = []
        for module in model.modules():
            for names in (ATTENTION, MLP):
                layers = [own for name in names if isinstance(own := getattr(module, name, None), nn.Module)]
                if len(layers) == len(names) and (id(module) in known or not are_plain(layers)):
                    groups.append(layers)
                elif len(layers) == len(names):
                    self.unjoined["they belong to layers that are computed module by module"] += 1
        with self._moving():
            self.unjoined += join(model, groups)
        self.has_joined = True

    def part(self) -> None:
        """Gives weights memory of their own again that were put side by side. No step runs."""
        if self.has_joined and (model := self._model()) is not None:
            part(model)

    def forget(self) -> None:
        """Lets the next `scope` find the overrides anew. In one that is open, modules compute as they are."""
        survey, self._survey = self._survey, None
        for override in () if survey is None else survey.found.values():
            override.thread_id = None
        if self.of_encoder is not None:
            self.of_encoder.forget()


@torch.inference_mode(False)
@torch.no_grad()
def _survey(
    model: nn.Module,
    placement: tuple[torch.dtype, torch.device] | None,
    is_spread: bool,
    kinds: tuple[Kind, ...] | None = None,
    encoder: nn.Module | None = None,
) -> Survey:
    kernels: LayerKernels | str = "need one device"
    dtype, device = placement or (torch.float32, torch.device("cpu"))
    if placement is not None and not is_spread:
        kernels = layer_kernels(dtype, device)
    if isinstance(kernels, str):
        logger.info("hf_paged: norms, gates and rotary embeddings are not fused: the kernels %s", kernels)
    survey = Survey(dtype, device, None if isinstance(kernels, str) else kernels)
    for module in reversed(shared_modules(model, without=encoder)):
        if survey.last is None and isinstance(getattr(module, "layer_idx", None), int):
            survey.last = module
        override = next((one for find in kinds or KINDS if (one := find(module, survey)) is not None), None)
        if override is not None:
            survey.found[id(module)] = override
    note_stacks(model.modules(), survey.found)
    counts = Counter(type(override).__name__ for override in survey.found.values())
    logger.info("hf_paged: modules that the engine's forwards override: %s", dict(counts))
    return survey


def _look_at_hooks(survey: Survey, taken: list[ModuleOverride]) -> None:
    """Lets those decoder layers be computed whole none of whose modules has hooks, or is left out of `taken`."""
    layers = [override for override in taken if isinstance(override, DecoderLayer)]
    is_known = len(taken) == len(survey.found) and survey.hooks == RemovableHandle.next_id
    if not is_known or not all(layer.is_whole for layer in layers):
        survey.hooks = RemovableHandle.next_id
        for layer in layers:
            layer.is_whole = layer.parts.are_taken(layer.thread_id)
