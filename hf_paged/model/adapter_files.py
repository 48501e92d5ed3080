"""Adapters as PEFT saves them, read into tensors alone: none of PEFT's modules is made."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_paged.core.errors import needs
from hf_paged.kernels.low_rank import LowRank
from hf_paged.model.peft_layers import INNER, OF_LATENTS, PREPARES
from hf_paged.model.wrapper import in_steps

PIECE_SECONDS = 0.001  # of reading, while steps run beside it, which wait so long for Python's lock at most
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(
    r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
)
# Initialisations that leave the base weights alone. Others, such as PiSSA, take out of them what A and B start with.
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal", "mica")
_DTYPES = {torch.bfloat16: torch.bfloat16} | dict.fromkeys((torch.float16, torch.float32, torch.float64), torch.float32)
_FAULTS = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError)  # of files with anything in them
_OTHER_WAYS = ("megatron_config", "use_qalora", "use_bdlora", "arrow_config", "monteclora_config", "velora_config")
_FOREIGN = dict.fromkeys(_OTHER_WAYS, "its layers compute in another way") | {
    "alora_invocation_tokens": "it changes only the tokens behind an invocation",
    "target_parameters": "it adapts parameters, such as those of experts, and not modules",
    "trainable_token_indices": "it replaces rows of an embedding",
    "layer_replication": "it makes another model, with layers repeated",
    "kasa_config": "it truncates the base weights",
}


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """One adapter, on CPU, in memory of its own, by names of the model's modules: those within any layers of PEFT's.

    Attributes:
        linears: For `nn.Linear`, `Conv1D` and quantised layers; float32 or bfloat16, as the file has them.
        embeddings: `a` is `[rank, tokens]`. A scale within the embedding's own forward, as Gemma's, is not in `scale`.
        saved: Whole modules: the tensors that take the place of theirs, in their dtypes.
        magnitudes: Of DoRA, `[out]`, float32: what `output_scale` is computed from. By names of linears and embeddings.
        base: What version of the base that was computed from.
    """

    linears: dict[str, LowRank]
    embeddings: dict[str, LowRank]
    saved: dict[str, dict[str, Tensor]]
    magnitudes: dict[str, Tensor]
    base: Hashable = None

    @cached_property
    def num_bytes(self) -> int:
        """The memory of all its tensors."""
        layers = [*self.linears.values(), *self.embeddings.values()]
        tensors = [x for low in layers for x in (low.a, low.b, low.bias, low.output_scale) if x is not None]
        tensors += [x for table in (self.magnitudes, *self.saved.values()) for x in table.values()]
        return sum(tensor.nbytes for tensor in tensors)


def read_adapter(
    path: str | Path, model: nn.Module, are_others_busy: Callable[[], bool] | None = None, base: Hashable = None
) -> AdapterWeights:
    """Reads a folder that `PeftModel.save_pretrained` has written, for a model that may carry PEFT's layers already.

    Args:
        are_others_busy: Whether steps run beside it, which are let through again and again; `None`: none do.
        base: The version of the model's own weights, or an earlier one.

    Raises:
        ValueError: What lies there is no LoRA adapter for this model, or one of a kind that only PEFT's own code runs.
            It names the file, the key or setting, and the reason.
        ModuleNotFoundError: PEFT, which knows its settings, is not installed.
    """
    config = _read_config(Path(path) / CONFIG)
    file = Path(path) / WEIGHTS
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file; adapters are read from safetensors only")
    try:
        with safe_open(file, "pt") as tensors:
            weights = _Reader(tensors, config, model, are_others_busy or (lambda: False)).read()
            return replace(weights, base=base)
    except (SafetensorError, *_FAULTS, ArithmeticError, re.error) as error:
        raise ValueError(f"{file}: {error}") from error


def of_base(low: LowRank, magnitude: Tensor, module: nn.Module) -> LowRank:
    """DoRA's entry, with the `output_scale` that is right over the layer's weights as they are now."""
    return replace(low, output_scale=dora_scale(dense_weight(module), low.a, low.b, low.scale, magnitude))


def dora_scale(weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor) -> Tensor:
    """DoRA's factor of each output, `magnitude / |W + scale * B A|`, by rows; arXiv 2402.09353, section 4.3.

    Takes `weight` `[out, in]` of the base, as `dense_weight` has it, `a` `[rank, in]`, `b` `[out, rank]`, `magnitude`
    `[out]`. Returns `[out]`, float32.
    """
    merged = torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)
    return magnitude.float() / torch.linalg.norm(merged, dim=1)


def dense_weight(module: nn.Module) -> Tensor:
    """`[out, in]`, on CPU, of a linear layer or an embedding, whose inputs are tokens; a quantised one is unpacked."""
    from peft.utils.integrations import dequantize_module_weight

    weight: Tensor = dequantize_module_weight(module).detach().cpu()
    return weight.t() if isinstance(module, (Conv1D, nn.Embedding)) else weight


def _read_config(file: Path) -> Any:
    with needs("peft"):
        from peft import PeftConfig
    if not file.is_file():  # PEFT would ask the model hub for it
        raise ValueError(f"{file}: there is no such file; an adapter is a folder as PEFT's save_pretrained() leaves it")
    try:
        config = PeftConfig.from_pretrained(str(file.parent))
    except _FAULTS as error:
        raise ValueError(f"{file}: not the settings of an adapter: {type(error).__name__}: {error}") from error
    if config.peft_type != "LORA":
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise ValueError(f"{file}: peft_type is {kind!r}; only LORA is read, other kinds run by PEFT's own code")
    for name, reason in _FOREIGN.items():
        if getattr(config, name, None):
            raise ValueError(f"{file}: {name} is set: {reason}, which only PEFT's own code can run")
    if config.init_lora_weights not in _PLAIN_STARTS:
        raise ValueError(
            f"{file}: init_lora_weights is {config.init_lora_weights!r}, which changes the base weights; PEFT's "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...) makes a plain LoRA adapter of it"
        )
    return config


@dataclass
class _Reader:
    """Finds the place of each of a file's tensors in the model. Its errors begin with the key."""

    tensors: Any  # an open file: what is not looked at is not read
    config: Any
    model: Any  # of transformers
    are_others_busy: Callable[[], bool]

    def read(self) -> AdapterWeights:
        weights = AdapterWeights({}, {}, {}, {})
        layers: dict[str, dict[str, str]] = {}  # by their names in the adapter: the keys of their parts
        modules: dict[str, dict[str, str]] = {}
        for key in self.tensors.keys():  # noqa: SIM118
            plain = key.removeprefix("base_model.model.")
            if match := _KEY.fullmatch(plain):
                layers.setdefault(match[1], {})[match[2]] = key
            elif module := self._saved_module(plain):
                modules.setdefault(module, {})[plain[len(module) + 1 :]] = key
            else:
                self._check_same(key, *plain.rpartition(".")[::2])
        rested = time.perf_counter()
        for layer, parts in layers.items():
            self._read_layer(weights, layer, parts)
            if (seconds := time.perf_counter() - rested) > PIECE_SECONDS and self.are_others_busy():
                time.sleep(seconds)
                rested = time.perf_counter()
        for module, parts in modules.items():
            self._read_module(weights, module, parts)
        if not layers and not modules:
            raise ValueError("it has no weights of an adapter")
        return weights

    def _read_layer(self, weights: AdapterWeights, layer: str, keys: dict[str, str]) -> None:
        from peft.utils.other import get_pattern_key

        config, key = self.config, next(iter(keys.values()))
        name, module = self._find(layer, key)
        self._check_stepped(key, module)
        if OF_LATENTS in name.split("."):
            raise ValueError(f"{key}: {OF_LATENTS} makes keys and values of what is cached, for rows of any adapters")
        width, columns = _sizes(module, key)
        is_embedding = isinstance(module, nn.Embedding)
        names = ["lora_embedding_A", "lora_embedding_B"] if is_embedding else ["lora_A.weight", "lora_B.weight"]
        names += ["lora_B.bias"] * config.lora_bias + ["lora_magnitude_vector"] * config.use_dora
        if differing := sorted(keys.keys() ^ set(names)):
            kind = type(module).__name__
            raise ValueError(f"{layer}: by its settings, LoRA on {kind} is {names}; missing or too much is {differing}")
        rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern, layer), config.r)
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, layer), config.lora_alpha)
        scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        a, b = self._tensor(keys[names[0]], rank, width), self._tensor(keys[names[1]], columns, rank)
        if a.dtype is not b.dtype:
            a, b = a.float(), b.float()
        bias = self._tensor(keys["lora_B.bias"], columns).to(b.dtype) if config.lora_bias else None
        low = LowRank(a, b, scale, bias)
        if config.use_dora:
            weights.magnitudes[name] = magnitude = self._tensor(keys["lora_magnitude_vector"], columns).float()
            low = of_base(low, magnitude, module)
        (weights.embeddings if is_embedding else weights.linears)[name] = low

    def _read_module(self, weights: AdapterWeights, plain: str, keys: dict[str, str]) -> None:
        key = next(iter(keys.values()))
        name, module = self._find(plain, key)
        self._check_stepped(key, module)
        own = module.state_dict()
        if differing := sorted(own.keys() ^ keys.keys()):
            raise ValueError(f"{plain}.{differing[0]}: it is in only one of the model's {plain} and the file's")
        if within := [x for x in (*weights.linears, *weights.embeddings) if f"{x}.".startswith(f"{name}.")]:
            raise ValueError(f"{plain}: it is saved as a whole, and {within[0]} has low ranks as well")
        weights.saved[name] = {x: self._tensor(keys[x], *own[x].shape, dtype=own[x].dtype) for x in own}

    def _saved_module(self, plain: str) -> str | None:
        """The outermost module around a tensor that `modules_to_save` names; PEFT compares the ends of names."""
        ends = tuple(self.config.modules_to_save or ())
        if ends and self.config.ensure_weight_tying:  # then those of the same weight are saved, too
            ends += tuple(x.rpartition(".")[0] for pair in self.model.all_tied_weights_keys.items() for x in pair)
        parts = plain.split(".")
        modules = (".".join(parts[:count]) for count in range(1, len(parts)))
        return next((module for module in modules if module.endswith(ends)), None)

    def _check_same(self, key: str, layer: str, part: str) -> None:
        """Refuses other values of the base, as of trained biases or more tokens: PEFT writes them into the model."""
        _, module = self._find(layer, key)
        if (own := module._parameters.get(part, module._buffers.get(part))) is None:
            raise ValueError(f"{key}: {type(module).__name__} has no tensor of this name")
        if not torch.equal(self._tensor(key, *own.shape, dtype=own.dtype), own.detach().cpu()):
            raise ValueError(f"{key}: it would replace the model's own, which adapters share, and isn't equal to it")

    def _find(self, plain: str, key: str) -> tuple[str, nn.Module]:
        """The module that computes, within any of PEFT's that stand before it, and its name."""
        module, names = self.model, []
        for part in plain.split("."):
            if part not in module._modules and part in INNER:
                continue  # a tensor of the base, saved from within PEFT's layer
            if not isinstance(inner := module._modules.get(part), nn.Module):
                raise ValueError(f"{key}: the model has no module {plain}")
            module = inner
            names.append(part)
            while type(module).__module__.startswith("peft."):
                names.append(next(x for x in INNER if x in module._modules))
                module = module.get_submodule(names[-1])
        return ".".join(names), module

    def _check_stepped(self, key: str, module: nn.Module) -> None:
        if (stepped := self._stepped) is not None and (isinstance(module, nn.Embedding) or id(module) not in stepped):
            raise ValueError(f"{key}: {PREPARES}; use PEFT's own, with the same adapters for all rows")

    @cached_property
    def _stepped(self) -> set[int] | None:
        return in_steps(self.model)

    def _tensor(self, key: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor in memory of its own, contiguous and finite, of this dtype, or else in float32 or bfloat16."""
        mapped = self.tensors.get_tensor(key)
        if mapped.shape != shape:
            raise ValueError(f"{key}: its shape is {list(mapped.shape)}, for this model it has to be {list(shape)}")
        if dtype is None and mapped.dtype not in _DTYPES:
            raise ValueError(f"{key}: its dtype is {mapped.dtype}; it has to be a floating one of 16 bits or more")
        tensor = mapped.to(dtype or _DTYPES[mapped.dtype], copy=True)  # behind what is mapped, the file may change
        if tensor.numel() and not all(map(math.isfinite, torch.aminmax(tensor))):  # far faster than isfinite()
            raise ValueError(f"{key}: it has elements that are not finite")
        return tensor


def _sizes(module: Any, key: str) -> tuple[int, int]:
    """Inputs and outputs of a layer."""
    if isinstance(module, Conv1D):
        return tuple(module.weight.shape)
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if hasattr(module, "in_features") and hasattr(module, "out_features"):  # quantised ones, too
        return module.in_features, module.out_features
    raise ValueError(
        f"{key}: {type(module).__name__} is no linear layer and no embedding: only PEFT's own code adapts it"
    )
