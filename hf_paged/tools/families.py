"""Which families of the installed transformers can be patched: each tried on a tiny model of its config."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import transformers
from rich import box
from rich.table import Table
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from hf_paged.api.support import SupportReport, is_architecture_supported


@dataclass(frozen=True)
class Family:
    """A family of models and what was found out about it.

    Attributes:
        name: Its `model_type`.
        report: Of a model with its default config.
    """

    name: str
    report: SupportReport

    @property
    def reason(self) -> str:
        """Why it is refused; empty if it isn't."""
        return "; ".join(" ".join(reason.split()) for reason in self.report.reasons)


def family_names() -> dict[str, str]:
    """The class that generates text of each family that has one: with an encoder if there is one, else text first."""
    with_encoder = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    return _first_of(*with_encoder, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def _other_names() -> dict[str, str]:
    """A class of each other family; empty where transformers names none."""
    return _first_of(MODEL_MAPPING_NAMES, dict.fromkeys(CONFIG_MAPPING_NAMES, ""))


def _first_of(*mappings: Mapping[str, str | Sequence[str]]) -> dict[str, str]:
    names: dict[str, str] = {}
    for mapping in mappings:
        for name, class_name in mapping.items():
            names.setdefault(name, class_name if isinstance(class_name, str) else class_name[0])
    return names


def families(names: list[str] | None = None) -> Iterator[Family]:
    """Tries them one after another. Never raises for what is wrong with one.

    Args:
        names: Which, whatever they do; `None`: all that generate.

    Raises:
        ValueError: There is no family of one of these names.
    """
    generating = family_names()
    known = _other_names() | generating
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        raise ValueError(f"transformers {transformers.__version__} knows no family {', '.join(unknown)}")
    for name in sorted(generating) if names is None else names:
        with _silence():
            report = _report(name, known[name])
        yield Family(name, report)


def _report(name: str, class_name: str) -> SupportReport:
    if not class_name:
        return SupportReport(False, ("transformers names no class of models for it",))
    try:
        base, config = getattr(transformers, class_name), AutoConfig.for_model(name)
        if base.config_class is config.sub_configs.get("text_config"):  # as `AutoModelForCausalLM` takes it
            config = config.get_text_config()
    except Exception as error:
        return SupportReport(False, (f"a default config raised {type(error).__name__}: {error!s:.200}",))
    return is_architecture_supported(base, config)


@contextmanager
def _silence() -> Iterator[None]:
    """Default configs have a lot to say."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def families_table(found: list[Family], as_markdown: bool = False) -> Table:
    """A line a family: how it is taken and what a token costs in bfloat16, and why it is refused or padded."""
    table = Table(box=box.MARKDOWN if as_markdown else box.SIMPLE, show_edge=as_markdown)
    table.add_column("family", no_wrap=True)
    table.add_column("taken", no_wrap=True)
    table.add_column("exact", no_wrap=True)
    table.add_column("bytes a token", justify="right", no_wrap=True)
    table.add_column("refused, or not packed, because", overflow="fold")
    for family in found:
        size = f"{family.report.bytes_per_token(torch.bfloat16):,}" if family.report.layout not in ("", "stock") else ""
        reason = family.reason or " ".join(family.report.why_padded.split())
        exact = "yes" if family.report.exact else ""
        table.add_row(family.name, family.report.layout, exact, size, reason.replace("|", "/"))
    return table
