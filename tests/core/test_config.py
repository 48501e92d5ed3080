"""`PagedConfig`: validation, environment, precedence."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from hf_paged.core import config as config_module
from hf_paged.core.config import ENV_PREFIX, PagedConfig
from hf_paged.core.policy import FCFS

NAMES = [field.name for field in fields(PagedConfig)]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(ENV_PREFIX + name.upper(), raising=False)
    monkeypatch.setattr(config_module, "version", lambda _: "2.13.0")


def set_env(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(ENV_PREFIX + name.upper(), value)


# The contract


def test_every_field_is_documented() -> None:
    assert PagedConfig.__doc__ is not None
    attributes = PagedConfig.__doc__.split("Attributes:")[1]
    assert [line.split(":")[0].strip() for line in attributes.splitlines() if line[8:9].strip()] == NAMES


def test_every_field_is_in_the_settings_page() -> None:
    """Would break: a new setting, or another default, that docs/settings.md does not know."""
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \| `?([^`|]+?)`? \|", page, re.MULTILINE))
    assert table == {field.name: repr(field.default).replace("'", '"') for field in fields(PagedConfig)}


# Validation

VALID: list[tuple[str, Any]] = [
    *(("block_size", value) for value in (1, 2**24)),
    *(("num_blocks", value) for value in (1, None)),
    *(("memory_fraction", value) for value in (1, 1.0, 1e-6, None)),
    ("max_num_seqs", 1),
    ("max_num_batched_tokens", 1),
    *(("max_prompt_delay", value) for value in (0, 0.5)),
    *(("max_step_seconds", value) for value in (0.25, 1, None)),
    *((name, None) for name in ("max_waiting", "max_branches")),
    *(("policy", value) for value in ("fcfs", "shortest-first", FCFS())),
    ("enable_prefix_caching", False),
    *(("preemption", value) for value in ("auto", "recompute")),
    *(("on_weight_change", value) for value in ("continue", "recompute", "error")),
    ("swap_space_gib", None),
    ("kv_cache_dtype", "auto"),
    *(("attention_backend", value) for value in ("auto", "torch")),
    *((name, value) for name in ("cuda_graphs", "use_async_batching") for value in (None, False, True)),
    *((name, True) for name in ("compile_decode", "warm_up", "strict")),
]

POSITIVE: list[Any] = [0, -1, 1.0, 1.5, "16", True, False, [1], float("nan"), float("inf")]
BOOLEAN: list[Any] = [None, 1, 0, "true", 1.0]
INVALID: list[tuple[str, Any]] = [
    *(("block_size", value) for value in (*POSITIVE, None, 2**24 + 1)),
    *(("num_blocks", value) for value in POSITIVE),
    *((name, value) for name in ("max_num_seqs", "max_num_batched_tokens") for value in (*POSITIVE, None)),
    *((name, value) for name in ("max_waiting", "max_branches") for value in POSITIVE),
    *(("policy", value) for value in ("sjf", None, FCFS, object())),
    *(("memory_fraction", value) for value in (0, 0.0, -0.1, 1.01, 25, float("nan"), float("inf"), "0.5", True)),
    *((name, v) for name in ("enable_prefix_caching", "strict", "compile_decode", "warm_up") for v in BOOLEAN),
    *(("max_step_seconds", value) for value in (0, -1.0, float("inf"), float("nan"), True, "1")),
    *(("max_prompt_delay", value) for value in (-0.1, float("inf"), float("nan"), True, "1", None)),
    *(("rank_timeout", value) for value in (0, -1.0, float("inf"), float("nan"), True, "1")),
    *((name, v) for name in ("use_async_batching", "cuda_graphs") for v in (0, 1, 0.0, "auto", "true", [])),
    *(("preemption", value) for value in ("Auto", "", "drop", None, 1)),
    *(("on_weight_change", value) for value in ("stop", "", None, True)),
    *(("swap_space_gib", value) for value in (-1, -0.5, "4", True, float("nan"), float("inf"), 1e300)),
    *(("adapter_space_gib", value) for value in (-1, None, "4", True, float("nan"), float("inf"), 1e300)),
    *(("kv_cache_dtype", value) for value in ("fp16", "bfloat16", None, 8)),
    *(("attention_backend", value) for value in ("sdpa", "TORCH", None)),
]


@pytest.mark.parametrize(("name", "value"), VALID)
def test_valid(name: str, value: Any) -> None:
    assert getattr(PagedConfig(**{name: value}), name) is value
    assert getattr(PagedConfig.from_settings(**{name: value}), name) is value


def test_every_field_is_validated() -> None:
    assert {name for name, _ in INVALID} == set(NAMES)


@pytest.mark.parametrize(("name", "value"), INVALID)
def test_invalid(name: str, value: Any) -> None:
    for make in (PagedConfig, PagedConfig.from_settings):
        with pytest.raises(ValueError) as caught:
            make(**{name: value})
        assert str(caught.value).startswith(name) and repr(value) in str(caught.value)


def test_messages_say_what_is_allowed() -> None:
    for name, choices in (
        ("preemption", ("auto", "recompute", "swap")),
        ("kv_cache_dtype", ("auto", "int8", "fp8", "fp8_e4m3", "fp8_e5m2")),
        ("attention_backend", ("auto", "triton", "torch")),
    ):
        with pytest.raises(ValueError) as caught:
            PagedConfig(**{name: "nonsense"})
        assert all(choice in str(caught.value) for choice in choices)
    with pytest.raises(ValueError, match="or None"):
        PagedConfig(num_blocks=0)
    with pytest.raises(ValueError) as caught:
        PagedConfig(block_size=0)
    assert "None" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("record", "file", "model.paged.snapshot()"),
        ("packed_weights", "replace", "weights are multiplied where they lie"),
        ("weight_dtype", "int8", "quantize the model"),
    ],
)
def test_a_setting_that_is_gone(name: str, value: str, instead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = re.escape(f"{name}={value!r}: this setting is gone; {instead}")
    for make in (PagedConfig, PagedConfig.from_settings):
        with pytest.raises(ValueError, match=message):
            make(**{name: value})
        assert make(**{name: None}) == PagedConfig()
    set_env(monkeypatch, **{name: value})
    with pytest.raises(ValueError, match=message):
        PagedConfig.from_settings()
    assert replace(PagedConfig(), block_size=4).block_size == 4


def test_swapping_needs_space() -> None:
    with pytest.raises(ValueError, match='preemption="swap" needs swap_space_gib above 0'):
        PagedConfig(preemption="swap", swap_space_gib=0)


# Environment


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("block_size", "32", 32),
        *(("num_blocks", text, value) for text, value in (("512", 512), ("none", None), ("None", None))),
        *(("memory_fraction", text, value) for text, value in (("0.5", 0.5), ("1", 1.0), ("none", None))),
        ("max_num_seqs", "8", 8),
        ("max_num_batched_tokens", "100", 100),
        *((name, "none", None) for name in ("max_waiting", "swap_space_gib", "cuda_graphs", "use_async_batching")),
        *((name, "0", False) for name in ("enable_prefix_caching", "cuda_graphs", "use_async_batching")),
        *((name, "1", True) for name in ("enable_prefix_caching", "cuda_graphs", "compile_decode")),
        ("enable_prefix_caching", "False", False),
        *((name, text, True) for name, text in (("strict", "true"), ("strict", "TRUE"), ("warm_up", "true"))),
        *(("preemption", "recompute", "recompute"), ("kv_cache_dtype", "auto", "auto")),
        ("attention_backend", "torch", "torch"),
    ],
)
def test_environment(monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: Any) -> None:
    set_env(monkeypatch, **{name: text})
    config = PagedConfig.from_settings()
    assert getattr(config, name) == value and type(getattr(config, name)) is type(value)
    assert replace(config, **{name: getattr(PagedConfig(), name)}) == PagedConfig()


def test_every_field_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        with monkeypatch.context() as context:
            set_env(context, **{name: "a bad value"})
            with pytest.raises(ValueError) as caught:
                PagedConfig.from_settings()
            assert "a bad value" in str(caught.value) and name in str(caught.value).lower()


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("block_size", "16.0", "HF_PAGED_BLOCK_SIZE='16.0'"),
        ("block_size", "none", "HF_PAGED_BLOCK_SIZE='none'"),
        ("block_size", "", "HF_PAGED_BLOCK_SIZE=''"),
        ("num_blocks", "many", "HF_PAGED_NUM_BLOCKS='many'"),
        ("memory_fraction", "a quarter", "HF_PAGED_MEMORY_FRACTION='a quarter'"),
        ("strict", "maybe", "HF_PAGED_STRICT='maybe'"),
        ("strict", "none", "HF_PAGED_STRICT='none'"),
        ("strict", "", "HF_PAGED_STRICT=''"),
        ("cuda_graphs", "auto", "HF_PAGED_CUDA_GRAPHS='auto'"),
        ("swap_space_gib", "4GB", "HF_PAGED_SWAP_SPACE_GIB='4GB'"),
        ("block_size", "0", "block_size must be a positive integer, got 0"),
        ("memory_fraction", "2", "memory_fraction must be None, or above 0 and at most 1, got 2.0"),
        ("memory_fraction", "nan", "memory_fraction"),
        ("preemption", "drop", "preemption must be one of auto, recompute, swap; got 'drop'"),
        ("max_waiting", "0", "max_waiting must be a positive integer or None, got 0"),
        ("swap_space_gib", "-1", "swap_space_gib must be None or a size in GiB of at least 0, below 2**33, got -1"),
    ],
)
def test_a_variable_with_a_bad_value(monkeypatch: pytest.MonkeyPatch, name: str, text: str, part: str) -> None:
    set_env(monkeypatch, **{name: text})
    with pytest.raises(ValueError) as caught:
        PagedConfig.from_settings()
    assert part in str(caught.value)


def test_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    set_env(monkeypatch, block_size="32", num_blocks="7")
    assert PagedConfig.from_settings(block_size=4) == PagedConfig(block_size=4, num_blocks=7)
    # An argument given in code wins, even one that equals the default.
    assert PagedConfig.from_settings(block_size=16, num_blocks=None) == PagedConfig()
    # A finished config is what it is.
    assert PagedConfig.from_settings(PagedConfig()) == PagedConfig()


def test_an_argument_wins_over_a_bad_value_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    set_env(monkeypatch, block_size="0")
    assert PagedConfig.from_settings(block_size=4).block_size == 4


def test_names_are_exact(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Would break: a setting by the wrong name, or silence about it."""
    for name in ("HF_PAGED_block_size", "HF_PAGED_BLOCKSIZE", "HF_PAGED_API_KEY", "BLOCK_SIZE"):
        monkeypatch.setenv(name, "8")
    assert PagedConfig.from_settings() == PagedConfig()
    assert len(caplog.messages) == 2 and all("did you mean HF_PAGED_BLOCK_SIZE?" in each for each in caplog.messages)


def test_what_an_older_torch_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "version", lambda _: "2.11.0+cu130")
    with pytest.raises(ValueError, match=r"needs torch 2.12 or later, this is 2.11.0\+cu130; use False"):
        PagedConfig(compile_decode=True)
    monkeypatch.setattr(config_module, "version", lambda _: "2.12.0a0")
    assert PagedConfig(compile_decode=True).compile_decode


# from_settings


def test_a_config_or_settings_but_not_both() -> None:
    config = PagedConfig(block_size=4)
    assert PagedConfig.from_settings(config) is config
    with pytest.raises(ValueError, match=r"not both \(got num_blocks, strict\)"):
        PagedConfig.from_settings(config, strict=True, num_blocks=3)


@pytest.mark.parametrize("config", [{"block_size": 4}, 16, "auto", PagedConfig])
def test_config_must_be_a_config(config: Any) -> None:
    with pytest.raises(ValueError, match=f"config must be a PagedConfig, got {type(config).__name__}"):
        PagedConfig.from_settings(config)


def test_unknown_settings() -> None:
    with pytest.raises(ValueError) as caught:
        PagedConfig.from_settings(blocksize=4, num_block=3, strict=True)
    message = str(caught.value)
    assert message.startswith("unknown setting blocksize, num_block;") and all(name in message for name in NAMES)
