"""`PagedConfig`: validation, environment, precedence."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from hf_paged.core.config import ENV_PREFIX, PagedConfig

NAMES = [field.name for field in fields(PagedConfig)]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(ENV_PREFIX + name.upper(), raising=False)


def set_env(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(ENV_PREFIX + name.upper(), value)


# The contract


def test_fields_and_defaults() -> None:
    assert {field.name: field.default for field in fields(PagedConfig)} == {
        "block_size": 16,
        "num_blocks": None,
        "memory_fraction": 0.25,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "max_waiting": None,
        "enable_prefix_caching": True,
        "preemption": "auto",
        "swap_space_gib": None,
        "kv_cache_dtype": "auto",
        "attention_backend": "auto",
        "cuda_graphs": None,
        "compile_decode": False,
        "use_async_batching": None,
        "warm_up": False,
        "strict": False,
        "rank_timeout": 600.0,
    }


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
    ("block_size", 1),
    ("block_size", 2**24),
    ("num_blocks", 1),
    ("num_blocks", None),
    ("memory_fraction", 1),
    ("memory_fraction", 1.0),
    ("memory_fraction", 1e-6),
    ("max_num_seqs", 1),
    ("max_num_batched_tokens", 1),
    ("max_waiting", None),
    ("enable_prefix_caching", False),
    ("preemption", "auto"),
    ("preemption", "recompute"),
    ("swap_space_gib", None),
    ("kv_cache_dtype", "auto"),
    ("attention_backend", "auto"),
    ("attention_backend", "torch"),
    ("cuda_graphs", None),
    ("cuda_graphs", False),
    ("cuda_graphs", True),
    ("compile_decode", True),
    ("warm_up", True),
    ("use_async_batching", None),
    ("use_async_batching", False),
    ("use_async_batching", True),
    ("strict", True),
]

POSITIVE: list[Any] = [0, -1, 1.0, 1.5, "16", True, False, [1], float("nan"), float("inf")]
BOOLEAN: list[Any] = [None, 1, 0, "true", 1.0]
INVALID: list[tuple[str, Any]] = [
    *(("block_size", value) for value in (*POSITIVE, None, 2**24 + 1)),
    *(("num_blocks", value) for value in POSITIVE),
    *(("max_num_seqs", value) for value in (*POSITIVE, None)),
    *(("max_num_batched_tokens", value) for value in (*POSITIVE, None)),
    *(("max_waiting", value) for value in POSITIVE),
    *(("memory_fraction", value) for value in (0, 0.0, -0.1, 1.01, 25, float("nan"), float("inf"), "0.5", True, None)),
    *(("enable_prefix_caching", value) for value in BOOLEAN),
    *(("strict", value) for value in BOOLEAN),
    *(("rank_timeout", value) for value in (0, -1.0, float("inf"), float("nan"), True, "1")),
    *(("compile_decode", value) for value in BOOLEAN),
    *(("warm_up", value) for value in BOOLEAN),
    *(("use_async_batching", value) for value in (0, 1, 0.0, "auto", "true", [])),
    *(("preemption", value) for value in ("Auto", "", "drop", None, 1)),
    *(("swap_space_gib", value) for value in (-1, -0.5, "4", True, float("nan"), float("inf"), 1e300)),
    *(("kv_cache_dtype", value) for value in ("fp8", "bfloat16", None, 8)),
    *(("attention_backend", value) for value in ("sdpa", "TORCH", None)),
    *(("cuda_graphs", value) for value in (0, 1, 0.0, "auto", "true", [])),
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
        ("kv_cache_dtype", ("auto", "fp8_e4m3", "fp8_e5m2")),
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


def test_replace_validates_too() -> None:
    with pytest.raises(ValueError, match="block_size must be a positive integer, got 0"):
        replace(PagedConfig(), block_size=0)


def test_swapping_needs_space() -> None:
    with pytest.raises(ValueError, match='preemption="swap" needs swap_space_gib above 0'):
        PagedConfig(preemption="swap", swap_space_gib=0)


# Environment


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("block_size", "32", 32),
        ("num_blocks", "512", 512),
        ("num_blocks", "none", None),
        ("num_blocks", "None", None),
        ("memory_fraction", "0.5", 0.5),
        ("memory_fraction", "1", 1.0),
        ("max_num_seqs", "8", 8),
        ("max_num_batched_tokens", "100", 100),
        ("max_waiting", "none", None),
        ("enable_prefix_caching", "0", False),
        ("enable_prefix_caching", "1", True),
        ("enable_prefix_caching", "False", False),
        ("strict", "true", True),
        ("strict", "TRUE", True),
        ("preemption", "recompute", "recompute"),
        ("swap_space_gib", "none", None),
        ("kv_cache_dtype", "auto", "auto"),
        ("attention_backend", "torch", "torch"),
        ("cuda_graphs", "none", None),
        ("cuda_graphs", "0", False),
        ("cuda_graphs", "1", True),
        ("compile_decode", "1", True),
        ("warm_up", "true", True),
        ("use_async_batching", "none", None),
        ("use_async_batching", "0", False),
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
        ("memory_fraction", "2", "memory_fraction must be above 0 and at most 1, got 2.0"),
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


def test_the_environment_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PagedConfig.from_settings().block_size == 16
    set_env(monkeypatch, block_size="8")
    assert PagedConfig.from_settings().block_size == 8


def test_names_are_exact(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Would break: a setting by the wrong name, or silence about it."""
    for name in ("HF_PAGED_block_size", "HF_PAGED_BLOCKSIZE", "HF_PAGED_API_KEY", "BLOCK_SIZE"):
        monkeypatch.setenv(name, "8")
    assert PagedConfig.from_settings() == PagedConfig()
    assert len(caplog.messages) == 2 and all("did you mean HF_PAGED_BLOCK_SIZE?" in each for each in caplog.messages)


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
