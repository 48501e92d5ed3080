"""Paged KV cache for Hugging Face Transformers: `model = hf_paged.patch(model)`, then `model.generate()` as usual."""

from importlib import import_module
from typing import Any

from hf_paged import testing
from hf_paged.api.exact_training import exact_training
from hf_paged.api.patching import patch, patched, unpatch
from hf_paged.api.support import SupportReport, is_supported
from hf_paged.attention.cache import PagedCache
from hf_paged.core.config import PagedConfig
from hf_paged.core.errors import OutOfBlocksError, QueueFullError, UnsupportedCallError, UnsupportedModelError, needs
from hf_paged.core.metrics import EngineStats
from hf_paged.core.policy import FCFS, Policy, ShortestFirst
from hf_paged.engine.engine import Engine
from hf_paged.engine.explain import Detour
from hf_paged.engine.request import Request, RequestMetrics, RequestOutput, TokenEvent
from hf_paged.engine.warm_up import WarmUp
from hf_paged.model.hooks import packed_hook
from hf_paged.sampling.grammar import Grammar, GrammarCompiler
from hf_paged.sampling.logprobs import TokenLogprobs, token_log_probs

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "server":  # with its extra, which the package does without
        return import_module("hf_paged.server")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "FCFS",
    "Detour",
    "Engine",
    "EngineStats",
    "Grammar",
    "GrammarCompiler",
    "OutOfBlocksError",
    "PagedCache",
    "PagedConfig",
    "Policy",
    "QueueFullError",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "ShortestFirst",
    "SupportReport",
    "TokenEvent",
    "TokenLogprobs",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "WarmUp",
    "__version__",
    "exact_training",
    "is_supported",
    "needs",
    "packed_hook",
    "patch",
    "patched",
    "testing",
    "token_log_probs",
    "unpatch",
]
