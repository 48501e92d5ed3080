"""Paged KV cache for Hugging Face Transformers: `model = hf_paged.patch(model)`, then `model.generate()` as usual."""

from hf_paged import testing
from hf_paged.api.patching import patch, patched, unpatch
from hf_paged.api.support import SupportReport, is_supported
from hf_paged.attention.cache import PagedCache
from hf_paged.core.config import PagedConfig
from hf_paged.core.errors import OutOfBlocksError, QueueFullError, UnsupportedCallError, UnsupportedModelError
from hf_paged.core.metrics import EngineStats
from hf_paged.engine.engine import Engine
from hf_paged.engine.request import Request, RequestMetrics, RequestOutput, TokenEvent
from hf_paged.engine.warm_up import WarmUp
from hf_paged.model.hooks import packed_hook
from hf_paged.sampling.logprobs import TokenLogprobs

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "EngineStats",
    "OutOfBlocksError",
    "PagedCache",
    "PagedConfig",
    "QueueFullError",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "SupportReport",
    "TokenEvent",
    "TokenLogprobs",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "WarmUp",
    "__version__",
    "is_supported",
    "packed_hook",
    "patch",
    "patched",
    "testing",
    "unpatch",
]
