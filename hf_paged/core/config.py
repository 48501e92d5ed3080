"""`PagedConfig`: every setting of the paged cache, validated when it is made."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import InitVar, dataclass, fields, replace
from difflib import get_close_matches
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from hf_paged.core.policy import Policy, policy_of

logger = logging.getLogger(__name__)

ENV_PREFIX = "HF_PAGED_"
_OTHER_VARIABLES = {"HF_PAGED_API_KEY"}  # the server's

# Backends add themselves, by their names, when they are imported (`attention/backends/registry.py`).
attention_backends: dict[str, Any] = {"auto": None}

_CHOICES: Mapping[str, Collection[str]] = {
    "preemption": ("auto", "recompute", "swap"),
    "on_weight_change": ("continue", "recompute", "error"),
    "kv_cache_dtype": ("auto", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"),
    "attention_backend": attention_backends,
}
# Settings that are gone, and what to do instead. A release later their names are as unknown as any other.
_GONE = {
    "record": "model.paged.snapshot() has what happened to requests and blocks lately, under 'events'",
    "packed_weights": "weights are multiplied where they lie, and no copy is made: leave it out",
    "weight_dtype": "quantize the model itself (with torchao, say) before patch()",
}
_POSITIVE = ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_waiting", "max_branches")

DEFAULT_SWAP_SPACE_GIB = 4.0
SWAP_FRACTION = 0.25  # of the CPU memory that is free at first use, and no more than that many GiB
MAX_GIB = 2**33  # addresses have 63 bits
MAX_BLOCK_SIZE = 2**24  # tokens: beyond all contexts


def default_memory_fraction(device_type: str, is_serving: bool) -> float:
    """What `memory_fraction=None` is; see `PagedConfig`."""
    if device_type != "cuda":
        return 0.25
    return 0.9 if is_serving else 0.5


@dataclass(frozen=True, slots=True)
class PagedConfig:
    """Settings of a patched model. Immutable; any bad value raises `ValueError` naming the field and the value.

    Where `patch()` is called with single settings or none, an environment variable `HF_PAGED_` + a field's name in
    capitals (for example `HF_PAGED_BLOCK_SIZE=32`) replaces that field's default; an argument wins over it.

    Attributes:
        block_size: Tokens in one KV block.
        num_blocks: Blocks in the pool. `None`: as many as fit into `memory_fraction` of the memory that is free at
            first use, and never more than `max_num_seqs` sequences of the model's full context could fill. In a model
            whose layers differ in what they keep (sliding windows), a block is of one group of layers: a sequence
            takes some for each.
        memory_fraction: Share that `num_blocks=None` may take of the memory (of the model's device) that is free at
            first use, less what steps need beside the pool. `None`: on a GPU 0.5, since the pool lives inside the
            caller's process, or 0.9 where it is there to serve (`hf-paged serve`, and where `generate_batch()` or
            `init_continuous_batching()` is the first use); 0.25 on CPU, where the pages are only touched when used.
        max_num_seqs: Sequences in one model step at most.
        max_num_batched_tokens: Tokens in one model step at most; longer prompts are prefilled in chunks.
        max_step_seconds: Seconds that a step should take: prompts are computed in chunks as small as that needs, by
            what tokens were measured to cost (nothing is limited before, nor to less than 64 tokens), so that no row
            waits long for the step behind. `None`: no limit, the same chunks in each run; `hf-paged serve` sets 1.
        max_prompt_delay: Seconds that prompts may be held back while other rows run, until they fill a step together:
            fewer steps are slowed down by prompts, whose first tokens come later.
        max_waiting: Requests that may wait in the queue; `None`: no limit. With a full queue `generate()` waits and
            `submit()` raises `QueueFullError`.
        max_branches: Samples or beams that one prompt may have; `None`: no limit. A call for more is a `ValueError`.
        policy: Who runs first: `"fcfs"` (in order of arrival), `"shortest-first"` (a request overtakes those that came
            at most so many places before it as it is shorter, prompt and `max_new_tokens`, in units of 256 tokens), or
            an object with the methods of `hf_paged.Policy`. Within a priority; tokens don't depend on it.
        enable_prefix_caching: Reuse the full KV blocks of equal token prefixes, within a call and between calls.
        preemption: What happens to the KV of a preempted sequence: `"recompute"` drops it and computes it again,
            `"swap"` moves it to CPU memory as long as that has room, `"auto"` takes for each what measured faster.
        on_weight_change: What becomes of requests and `generate()` calls when the model's weights, adapters or hooks
            change between two steps: `"continue"`, as stock does (keys and values that are there stay, and only new
            tokens are the changed model's; nothing of such a row is computed again, or found by another),
            `"recompute"` (the tokens stay, their keys and values are computed again before the next one), `"error"`
            (those that have begun raise `RuntimeError`). A change during a step is undefined, but for one by an
            optimizer within `exact_training`, or within `model.paged.exclusive()`.
        swap_space_gib: CPU memory for swapped blocks, in GiB, taken piece by piece as blocks are swapped; never more
            than the pool itself. `None`: a quarter of what is free at first use, 4 at most, or none under
            `preemption="recompute"`.
        adapter_space_gib: Memory, in GiB, for adapters of `model.paged.load_adapter()` that no request uses.
        kv_cache_dtype: Element type of the pool; `"auto"` is the model's own. The others take about half the memory of
            half precision, and tokens then differ from stock `generate()`. `"int8"` keeps integers up to 127, and for
            each token and head the float32 number that they are multiplied by; it takes head dims that are multiples
            of 4, not latents. `"fp8_e4m3"` (also `"fp8"`) and `"fp8_e5m2"` round each number to 3 or 2 bits behind
            the leading one.
        attention_backend: `"torch"` (plain torch, vectorised), `"triton"` (kernels for NVIDIA GPUs from compute
            capability 8.0 on, and ROCm), `"cpu"` (kernels in C, compiled within a second at first use, which needs a C
            compiler), another one that was registered, or `"auto"`: those the device can run, else torch.
        cuda_graphs: Record steps in CUDA graphs, decode steps at the first one and others when they first come, and
            replay them; `None`: where the model is on a CUDA device and its backend can be recorded (Triton's can), but
            not where its weights are split between processes; `True`: there, too, and raise elsewhere.
        compile_decode: Compile what lies between a decode step's attentions (`torch.compile`) before it is recorded in
            CUDA graphs, in place of the engine's own fused layers. It takes its time at the first such step, and torch
            2.12 or later.
        use_async_batching: Launch each step before the tokens of the one before are known on the host, which schedules
            and hands out tokens meanwhile; a row that ends has then run one step too many. `None`: on a CUDA device.
        warm_up: Call `model.paged.warm_up()` in `patch()`: kernels are compiled and CUDA graphs recorded there, and not
            while the first requests wait.
        strict: Raise `UnsupportedCallError` where a call would fall back to stock `generate()` with a warning.
        rank_timeout: Of a model over several processes (tensor parallel): seconds that a call on one of them waits for
            rank 0 to make the same.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_fraction: float | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_step_seconds: float | None = None
    max_prompt_delay: float = 0.0
    max_waiting: int | None = None
    max_branches: int | None = None
    policy: str | Policy = "fcfs"
    enable_prefix_caching: bool = True
    preemption: str = "auto"
    on_weight_change: str = "continue"
    swap_space_gib: float | None = None
    adapter_space_gib: float = 1.0
    kv_cache_dtype: str = "auto"
    attention_backend: str = "auto"
    cuda_graphs: bool | None = None
    compile_decode: bool = False
    use_async_batching: bool | None = None
    warm_up: bool = False
    strict: bool = False
    rank_timeout: float = 600.0
    record: InitVar[None] = None
    packed_weights: InitVar[None] = None
    weight_dtype: InitVar[None] = None

    def __post_init__(self, record: None, packed_weights: None, weight_dtype: None) -> None:
        _refuse_gone(record=record, packed_weights=packed_weights, weight_dtype=weight_dtype)
        for name in _POSITIVE:
            value = getattr(self, name)
            optional = name in ("num_blocks", "max_waiting", "max_branches")
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer{' or None' if optional else ''}, got {value!r}")
        if self.block_size > MAX_BLOCK_SIZE:
            raise ValueError(f"block_size must be at most {MAX_BLOCK_SIZE} tokens, got {self.block_size}")
        policy_of(self.policy)
        for name in ("enable_prefix_caching", "compile_decode", "warm_up", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("cuda_graphs", "use_async_batching"):
            if not (getattr(self, name) is None or isinstance(getattr(self, name), bool)):
                raise ValueError(f"{name} must be True, False or None, got {getattr(self, name)!r}")
        share = self.memory_fraction
        if share is not None and (not _is_number(share) or not 0 < share <= 1):
            raise ValueError(f"memory_fraction must be None, or above 0 and at most 1, got {share!r}")
        if not _is_number(self.rank_timeout) or not 0 < self.rank_timeout < math.inf:
            raise ValueError(f"rank_timeout must be a number of seconds above 0, got {self.rank_timeout!r}")
        limit = self.max_step_seconds
        if limit is not None and (not _is_number(limit) or not 0 < limit < math.inf):
            raise ValueError(f"max_step_seconds must be None or a number of seconds above 0, got {limit!r}")
        if not _is_number(self.max_prompt_delay) or not 0 <= self.max_prompt_delay < math.inf:
            raise ValueError(
                f"max_prompt_delay must be a number of seconds of at least 0, got {self.max_prompt_delay!r}"
            )
        space = self.swap_space_gib
        if space is not None and (not _is_number(space) or not 0 <= space < MAX_GIB):  # NaN is neither
            raise ValueError(f"swap_space_gib must be None or a size in GiB of at least 0, below 2**33, got {space!r}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
        if self.compile_decode and self.cuda_graphs is False:
            raise ValueError("compile_decode=True needs CUDA graphs, got cuda_graphs=False")
        if self.compile_decode and Version(version("torch")) < Version("2.12.dev0"):  # it can't trace our attention
            raise ValueError(f"compile_decode=True needs torch 2.12 or later, this is {version('torch')}; use False")
        space = self.adapter_space_gib
        if not _is_number(space) or not 0 <= space < MAX_GIB:
            raise ValueError(f"adapter_space_gib must be a size in GiB of at least 0, below 2**33, got {space!r}")
        if self.preemption == "swap" and self.swap_space_gib == 0:
            raise ValueError('preemption="swap" needs swap_space_gib above 0 (or None), got 0')

    @classmethod
    def from_settings(cls, config: PagedConfig | None = None, **settings: Any) -> PagedConfig:
        """The config of `patch(model, config=..., **settings)`.

        Args:
            config: A finished config; excludes `settings`.
            **settings: Field values; the fields not given come from the environment, then from the defaults.

        Raises:
            ValueError: Unknown field, bad value (given or from the environment), or both forms used at once.
        """
        if config is not None:
            if settings:
                given = ", ".join(sorted(settings))
                raise ValueError(f"pass either config=PagedConfig(...) or single settings, not both (got {given})")
            if not isinstance(config, cls):
                raise ValueError(f"config must be a PagedConfig, got {type(config).__name__}")
            return config
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(settings) - set(names) - set(_GONE))
        if unknown:
            raise ValueError(f"unknown setting {', '.join(unknown)}; PagedConfig has: {', '.join(names)}")
        return replace(cls(), **(_from_environment(os.environ) | settings))

    def differences(self, other: PagedConfig) -> tuple[str, str]:
        """The settings in which two configs differ, as they are in each: `"block_size=4, num_blocks=64"`."""
        names = [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]
        own, its = (", ".join(f"{name}={getattr(config, name)!r}" for name in names) for config in (self, other))
        return own, its


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refuse_gone(**settings: object) -> None:
    for name, value in settings.items():
        if value is not None:
            raise ValueError(f"{name}={value!r}: this setting is gone; {_GONE[name]}")


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Field values named by `HF_PAGED_*` variables; `ValueError` for one that does not parse."""
    settings: dict[str, Any] = {name: environ.get(ENV_PREFIX + name.upper()) for name in _GONE}
    known = {ENV_PREFIX + field.name.upper() for field in fields(PagedConfig)}
    for name in sorted({name for name in environ if name.startswith(ENV_PREFIX)} - known - _OTHER_VARIABLES):
        if close := get_close_matches(name.upper(), known, 1):
            logger.warning("hf_paged: no setting has the environment variable %s; did you mean %s?", name, close[0])
    for field in fields(PagedConfig):
        variable = ENV_PREFIX + field.name.upper()
        text = environ.get(variable)
        if text is None:
            continue
        annotation = str(field.type)
        try:
            if text.lower() == "none" and "None" in annotation:
                settings[field.name] = None
            elif "bool" in annotation:
                settings[field.name] = {"1": True, "true": True, "0": False, "false": False}[text.lower()]
            elif "int" in annotation:
                settings[field.name] = int(text)
            elif "float" in annotation:
                settings[field.name] = float(text)
            else:
                settings[field.name] = text
        except (KeyError, ValueError) as error:
            raise ValueError(f"environment variable {variable}={text!r} is not a valid {annotation}") from error
    return settings
