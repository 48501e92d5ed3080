"""Paged KV cache for Hugging Face Transformers: `model = hf_paged.patch(model)`, then `model.generate()` as usual."""

from hf_paged import testing
from hf_paged.cache import PagedCache
from hf_paged.config import PagedConfig
from hf_paged.engine import Engine
from hf_paged.errors import OutOfBlocksError, QueueFullError, UnsupportedCallError, UnsupportedModelError
from hf_paged.hooks import packed_hook
from hf_paged.metrics import EngineStats
from hf_paged.patching import patch, patched, unpatch
from hf_paged.request import Request, RequestMetrics, RequestOutput
from hf_paged.support import SupportReport, is_supported
from hf_paged.warm_up import WarmUp

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
