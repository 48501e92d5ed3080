"""`Placement`: a model's dtype and device, asked for in every step."""

from __future__ import annotations

import weakref

import torch
from torch import nn


class Placement:
    """Reads one parameter of a model, the one that `model.dtype` finds by a walk over the modules each time.

    Called, it returns dtype and device; `None` when the model has no such parameter or is gone.
    """

    def __init__(self, model: nn.Module) -> None:
        """The model is held weakly. A parameter may be replaced later, its module may not."""
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
        return None if parameter is None else (parameter.dtype, parameter.device)
