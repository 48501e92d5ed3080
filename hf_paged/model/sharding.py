"""A model whose weights transformers has split between processes: which processes, and what each of them holds."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_paged.memory.spec import AttentionSpec

_OTHER_SIZES = ("pp_size", "fsdp_size", "dp_replicate_size", "cp_size")


def ranks_of(model: nn.Module) -> list[int] | None:
    """The processes, by their numbers in the job, that hold a share of each tensor; `None`: the model is whole."""
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is None or mesh.size() < 2 or "tp" not in (getattr(mesh, "mesh_dim_names", None) or ()):
        return None
    return list(dist.get_process_group_ranks(mesh.get_group("tp")))


def is_share(module: nn.Module) -> bool:
    """Whether the forward on a module's instance is transformers', which computes this process's share of its class's
    and exchanges it with the others.
    """
    names = getattr(module.__dict__.get("forward"), "__globals__", {})
    return str(names.get("__name__")).startswith("transformers.distributed.")


def from_first_rank(model: Any, tensor: Tensor) -> Tensor:
    """Overwrites a tensor with the first rank's, on the current stream, as the model's forwards exchange theirs.

    All ranks that hold a share of the model call it, at the same place among their forwards.
    """
    dist.broadcast(tensor, group=model._device_mesh.get_group("tp"), group_src=0)
    return tensor


def lowest_of_ranks(model: Any, device: torch.device, value: int) -> int:
    """The smallest of the numbers that the ranks give, which all call it at the same place among their forwards."""
    found = torch.tensor(value, device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN, group=model._device_mesh.get_group("tp"))
    return int(found)


def why_not_whole(model: nn.Module) -> str | None:
    """Why a process that holds, or computes, only a share of the model can't serve it; `None`: it can, or has all."""
    mesh = getattr(model, "_device_mesh", None)  # of transformers: tensor, expert, pipeline and data parallel
    if mesh is not None and mesh.size() > 1:
        return _why_not_shared(model, mesh)
    for part in chain(model.modules(), model.parameters(), model.buffers()):
        # FSDP's wrappers, and the DTensors of everything else. By name: a build of torch may lack the classes.
        is_shared = type(part).__module__.startswith(
            "torch.distributed.fsdp" if isinstance(part, nn.Module) else "torch.distributed."
        )
        if is_shared or hasattr(part, "ds_id"):  # DeepSpeed's ZeRO-3 marks its parameters
            return f"its weights are split between processes ({type(part).__name__})"
    return None


def _why_not_shared(model: Any, mesh: Any) -> str | None:
    config: Any = getattr(model.config, "distributed_config", None)
    size = getattr(model, "_tp_size", None) or 1
    if getattr(config, "pp_size", 1) > 1:
        return (
            f"it is spread over {config.pp_size} processes by layers (pp_size), where stock generate() itself goes "
            "wrong for padded rows: load it with tp_size"
        )
    others = [name for name in _OTHER_SIZES if (getattr(config, name, 1) or 1) > 1]
    if (getattr(config, "ep_size", 1) or 1) not in (1, size):  # equal: each of the same ranks has its experts
        others.append("ep_size")
    if others or size != mesh.size():
        how = ", ".join(others) or "tp_plan, DistributedConfig"
        return (
            f"it is spread over {mesh.size()} processes ({how}), of which only tensor parallelism (tp_size) is taken, "
            "and experts over the same ranks (ep_size equal to tp_size)"
        )
    try:
        heads = _kv_heads(model, size)
    except (ImportError, AttributeError) as error:
        return f"it is spread over {size} processes, and this release of transformers doesn't say how ({error})"
    if heads is None:
        return (
            f"its key/value heads can't be split evenly between {size} processes, and stock's forwards fail, too: "
            "load it on fewer"
        )
    return None


def _kv_heads(model: Any, size: int) -> int | list[int] | None:
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    config = model.config.get_text_config(decoder=True)
    total = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads: int | list[int] | None = get_kv_heads_per_rank(model.tp_plan, total, size)
    return heads


def local_layers(layers: tuple[AttentionSpec | None, ...], model: Any) -> tuple[AttentionSpec | None, ...]:
    """What this process caches of each layer, where the whole model caches `layers`."""
    size = model._tp_size
    is_sharded = _kv_heads(model, size) != _kv_heads(model, 1)
    if not is_sharded:
        return layers
    return tuple(None if layer is None else replace(layer, kv_heads=layer.kv_heads // size) for layer in layers)
