"""`explain`: why a model, or some of its calls, don't run the fastest way, and what would change that."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_paged.engine.core import EngineCore
from hf_paged.kernels import cpu_linear
from hf_paged.kernels.availability import draw_grid, layer_kernels
from hf_paged.model.gpu_layers import GPULayer

# What would change the way of a call, by how its reason begins; where nothing is named, the call needs it.
_INSTEAD = {
    "use_cache=False": "leave use_cache out",
    "cache_implementation": "leave cache_implementation out",
    "past_key_values is a PagedCache": "leave past_key_values out: the prefix cache finds the same blocks",
    "past_key_values": "give the call a PagedCache, or no cache",
    "output_attentions": "leave output_attentions out: paged attention makes no matrix of weights",
    "the model is in training mode": "call model.eval()",
    "return_dict_in_generate": "leave return_dict_in_generate out, or take logprobs= of model.paged.submit",
    "processors or criteria": "give the settings of transformers' own processors, or submit()'s logit_bias and grammar",
    "hooks on inner modules": "mark them by hf_paged.packed_hook, or remove them",
    "hooks on the model": "put them on inner modules, marked by hf_paged.packed_hook",
    "a streamer of several rows": "submit each prompt by itself, and iterate the requests",
    "a method of the model's class": "leave transformers' own method in its place",
    "its attention_mask": "pad prompts on the left",
    "synced_gpus": "leave synced_gpus out",
}


@dataclass(frozen=True, slots=True)
class Detour:
    """Something that doesn't go the fastest way.

    Attributes:
        what: What it is: "calls", "steps", "graphs", "overlap", "sampling", "layers" or "linear layers".
        why: The reason.
        instead: The setting or line that would change it; empty: nothing would.
        num_calls: Calls (of "graphs", steps) that went this way since `patch`; 0 for what holds for the model.
    """

    what: str
    why: str
    instead: str = ""
    num_calls: int = 0

    def __str__(self) -> str:
        unit = "step" if self.what == "graphs" else "call"
        counted = f" ({self.num_calls} {unit}{'s' * (self.num_calls > 1)})" if self.num_calls else ""
        return f"{self.what}: {self.why}{counted}" + (f"; instead: {self.instead}" if self.instead else "")


def explain(core: EngineCore) -> list[Detour]:
    """Returns the reasons of the model in its present state, then those of its calls. The pool's lock is held."""
    calls = [
        Detour("calls", reason, next((text for name, text in _INSTEAD.items() if name in reason), ""), count)
        for reason, count in core.detours.most_common()
    ]
    return [*_of_steps(core), *_of_layers(core), *calls]


def _of_steps(core: EngineCore) -> list[Detour]:
    config, traits, bound = core.config, core.traits, core.bound
    if traits.runs_stock:
        return [Detour("calls", f"all run stock generate(): {traits.why_padded}")]
    found = []
    if not traits.runs_packed:
        found.append(Detour("steps", f"rows are padded, and attention runs over gathered keys: {traits.why_padded}"))
    foreign = core.weights_version.foreign()
    off = "nothing is recorded, overlapped or run in inference mode"
    if foreign:
        found.append(Detour("steps", f"{off}: the model runs code of {foreign}", "remove or merge what is named"))
    if bound.placement[1].type != "cuda":
        return found
    if config.cuda_graphs is False:
        found.append(Detour("graphs", "cuda_graphs=False", "patch with cuda_graphs=None"))
    elif why := bound.why_unrecorded:
        instead = "patch with cuda_graphs=True" if "cuda_graphs=True" in why else ""
        found.append(Detour("graphs", f"CUDA graphs {why}", instead))
    left_out = core.runner.graphs.left_out
    found += [Detour("graphs", f"not replayed: {why}", num_calls=count) for why, count in left_out.most_common()]
    if config.use_async_batching is False:
        found.append(Detour("overlap", "use_async_batching=False", "patch with use_async_batching=None"))
    grid = draw_grid(bound.placement[1])
    if isinstance(grid, str):
        found.append(
            Detour("sampling", f"torch chooses the tokens of each kind of request by itself: the kernel {grid}")
        )
    return found


def _of_layers(core: EngineCore) -> list[Detour]:
    bound = core.bound
    if bound.layer_devices is not None or bound.is_offloaded:
        return [Detour("layers", "norms, gates and rotary embeddings are not fused: accelerate has spread the model")]
    kernels = layer_kernels(*bound.placement)
    found = []
    if isinstance(kernels, str):
        found.append(Detour("layers", f"norms, gates and rotary embeddings are not fused: the kernels {kernels}"))
    if torch.is_autocast_enabled(bound.placement[1].type):
        found.append(Detour("layers", "autocast computes them in other types", "call generate() outside of autocast"))
    found += [
        Detour("layers", f"{count} sets of q, k, v or gate, up projections are multiplied one by one: {reason}")
        for reason, count in core.layers.unjoined.items()
    ]
    found += [
        Detour("layers", f"rotary embeddings are not fused in {name}: they compute something else than the kernel")
        for name in core.layers.other_rotaries
    ]
    if num_unlike := sum(isinstance(one, GPULayer) and one.is_same is False for one in core.layers.found):
        order = "their own forward computes something else than its modules would in the usual order"
        found.append(Detour("layers", f"{num_unlike} decoder layers are computed module by module: {order}"))
    found += [
        Detour("layers", f"{name} computes rows of one length after the other: {why}")
        for name, why in bound.mixers_by_part.items()
    ]
    if bound.placement[1].type != "cpu":  # where torch's products are the fast way
        return found
    linears = [module for module in core.model.modules() if isinstance(module, nn.Linear | Conv1D)]
    why = cpu_linear.load(bound.placement[0])
    if isinstance(why, str) and linears:
        return [*found, Detour("linear layers", f"torch multiplies: our kernel {why}")]
    reasons = Counter(map(_why_left, linears))
    del reasons[""]
    return found + [Detour("linear layers", f"{count} of {len(linears)} {why}") for why, count in reasons.items()]


def _why_left(module: nn.Module) -> str:
    """Why a linear layer on CPU is computed by its own code; empty: it isn't."""
    if type(module) not in (nn.Linear, Conv1D):
        return f"are {type(module).__name__} of {type(module).__module__.partition('.')[0]}"
    if "forward" in vars(module):
        return "have a forward of their own (accelerate's hooks, or a user's)"
    weight = module.weight
    return "" if type(weight) is nn.Parameter else f"have a weight that is a {type(weight).__name__}"
