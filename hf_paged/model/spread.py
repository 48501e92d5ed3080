"""A model that accelerate has spread over devices, CPU memory and disk: where layers run, which weights load late.

accelerate puts a forward of its own on the instance of each module that it has to do with: a hook that moves inputs to
where the module runs, and (offloading) fetches the module's weights before and drops them behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

_LIBRARY = "accelerate."
_HOOK, _FORWARD, _OLD_FORWARD = "_hf_hook", "forward", "_old_forward"


def hooks_of(module: nn.Module) -> list[Any]:
    """The hooks of accelerate on a module, in their order."""
    hook: Any = module.__dict__.get(_HOOK)
    return [] if hook is None else list(getattr(hook, "hooks", (hook,)))


def is_hooked(module: nn.Module) -> bool:
    """Whether the forward on a module's instance is accelerate's, and its hooks are no user's."""
    function = getattr(module.__dict__.get(_FORWARD), "func", None)
    return str(getattr(function, "__module__", "")).startswith(_LIBRARY) and all(
        type(hook).__module__.startswith(_LIBRARY) for hook in hooks_of(module)
    )


def is_its_own(module: nn.Module) -> bool:
    """Whether the forward on a module's instance is its class's: accelerate leaves it where it has taken hooks off."""
    forward = module.__dict__.get(_FORWARD)
    return isinstance(forward, MethodType) and (forward.__self__, forward.__func__) == (module, type(module).forward)


def is_wrapped(module: nn.Module) -> bool:
    """Whether the forward on a module's instance calls its class's, and does nothing else but move and fetch."""
    return is_hooked(module) or is_its_own(module)


def rebind(model: nn.Module, forward: Any) -> None:
    """Has what wraps the forward on a model's instance call this function of its class, after that has changed."""
    for name in (_OLD_FORWARD, _FORWARD):
        bound = model.__dict__.get(name)
        if isinstance(bound, MethodType) and bound.__self__ is model:
            model.__dict__[name] = MethodType(forward, model)


def offloading(module: nn.Module) -> list[Any]:
    """Hooks on a module that fetch its weights for each of its forwards."""
    return [hook for hook in hooks_of(module) if getattr(hook, "offload", False)]


def is_offloaded(model: nn.Module) -> bool:
    """Whether some of a model's weights are there only while their module computes."""
    return any(offloading(module) for module in model.modules())


def stored(hook: Any, module: nn.Module) -> Iterator[Tensor]:
    """What lies in CPU memory of the weights that a hook fetches for a module; of those on disk nothing."""
    source, prefix = hook.weights_map, ""
    if hasattr(source, "dataset"):
        source, prefix = source.dataset, source.prefix
    held = getattr(source, "state_dict", source)
    for name in [name for name, _ in module.named_parameters()] if hook.place_submodules else list(module._parameters):
        tensor = held.get(prefix + name)
        if tensor is not None:
            yield tensor


def main_device(model: nn.Module) -> torch.device | None:
    """Where a model's inputs are wanted, and what has no place of its own runs; `None`: accelerate says nothing."""
    return next((device for module in model.modules() if (device := runs_on(module)) is not None), None)


def layer_devices(model: nn.Module, num_layers: int) -> tuple[torch.device | None, ...]:
    """Where the attention of each layer runs; `None`: no module says that it is this layer's, or none of its hooks."""
    found: list[torch.device | None] = [None] * num_layers
    for module in model.modules():  # the attention of a layer comes behind the layer
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and 0 <= index < num_layers:
            found[index] = main_device(module) or found[index]
    return tuple(found)


def runs_on(module: nn.Module) -> torch.device | None:
    """Where accelerate has a module run; `None`: it says nothing."""
    devices = (getattr(hook, "execution_device", None) for hook in hooks_of(module))
    device = next((torch.device(device) for device in devices if device is not None), None)
    if device is None or device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())
