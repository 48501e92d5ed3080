"""`Placement`: a model's dtype and device, which every step needs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from hf_paged.model.spread import is_offloaded, layer_devices, main_device

SERVED = ("cpu", "cuda")  # ROCm's GPUs are called cuda, too


def why_not_on(device: torch.device) -> str | None:
    """Why a model can't be served on a device; `None`: it can."""
    if device.type in SERVED:
        return None
    return (
        f"it is on {device}: the pool and its kernels are for CPUs and for GPUs under CUDA or ROCm, and nothing has "
        'been tried on others; move it, as by model.to("cpu"), or call its own generate()'
    )


class Placement:
    """Reads one parameter of a model, the one that `model.dtype` finds by a walk over the modules each time.

    Called, it returns dtype and device; `None` when the model has no such parameter or is gone. The device of a model
    that accelerate has spread is the one that inputs are wanted on. What else is asked for is as of the last such call.

    Attributes:
        is_offloaded: Whether some weights are there only while their module computes.
    """

    def __init__(self, model: nn.Module) -> None:
        """The model is held weakly. A parameter may be replaced later, its module may not."""
        self._model = weakref.ref(model)
        self._hook: Any = None  # accelerate's on the model, when the two were found out:
        self._main: torch.device | None = None
        self._layers: tuple[torch.device | None, ...] | None = None
        self.is_offloaded = False
        self._module: weakref.ref[nn.Module] | None = None
        self._name = ""
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    self._module, self._name = weakref.ref(module), name
                    return

    def __call__(self) -> tuple[torch.dtype, torch.device] | None:
        module = None if self._module is None else self._module()
        parameter = None if module is None else module._parameters.get(self._name)
        if parameter is None:
            return None
        model = self._model()
        hook = None if model is None else model.__dict__.get("_hf_hook")
        if hook is not self._hook:
            self._hook, self._layers = hook, None
            self._main, self.is_offloaded = None, False
            if hook is not None and model is not None:
                self._main, self.is_offloaded = main_device(model), is_offloaded(model)
        return parameter.dtype, self._main or parameter.device

    @property
    def is_spread(self) -> bool:
        """Whether accelerate moves inputs or weights in the model's forwards."""
        return self._main is not None

    def layers(self, num_layers: int) -> tuple[torch.device | None, ...] | None:
        """Where the attention of each layer runs; `None`: where the model is. The same object until that changes."""
        if self._main is None or (model := self._model()) is None:
            return None
        if self._layers is None:
            self._layers = layer_devices(model, num_layers)
        return None if set(self._layers) <= {self._main, None} else self._layers
