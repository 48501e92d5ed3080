"""`transformers serve` over paged models: concurrent requests share a model's continuous batch.

`python -m hf_paged.tools.transformers_serve MODEL --port 8000`, with all arguments of `transformers serve`; settings of
the pool are `HF_PAGED_*` environment variables. The server is transformers' own. What differs is where it calls
`model.generate()`: on a thread a request, not on one thread for all, so that each has its own sampling parameters and
none waits for another. `--continuous-batching` changes nothing for a model that is paged.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from transformers.cli.serving import model_manager, utils
from transformers.utils import logging

from hf_paged.api.patching import is_patched, patch
from hf_paged.api.support import is_supported

logger = logging.get_logger(__name__)

_MAX_CALLERS = 256  # threads for one model


class CallerThreads(ThreadPoolExecutor):
    """In place of transformers' `InferenceThread`: calls run beside each other."""

    def async_submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Runs a call, for the event loop of this thread."""
        return asyncio.get_running_loop().run_in_executor(self, functools.partial(call, *args, **kwargs))


class PagedGenerateManager(utils.GenerateManager):
    """Generates with one model: by `model.generate()` on threads, if it is patched."""

    _thread: Any

    def generate_streaming(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        self._share(model)
        return super().generate_streaming(model, *args, **kwargs)

    async def generate_non_streaming(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        self._share(model)
        return await super().generate_non_streaming(model, *args, **kwargs)

    def _share(self, model: Any) -> None:
        if is_patched(model) and not isinstance(self._thread, CallerThreads):
            self._thread = CallerThreads(_MAX_CALLERS, "hf_paged_serve")


class PagedGenerationState(utils.GenerationState):
    """The server's state, with our manager."""

    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        """False for a patched model: its `generate()` batches, and takes every parameter of a request."""
        return not is_patched(model) and super().use_continuous_batching(model, modality)

    def get_manager(self, model_id: str, use_cb: bool = False) -> utils.BaseGenerateManager:
        if not use_cb and model_id not in self._generate_managers:
            self._generate_managers[model_id] = PagedGenerateManager()
        return super().get_manager(model_id, use_cb)


class PagedModelManager(model_manager.ModelManager):
    """Patches what it loads, if that is supported."""

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        model = super()._load_model(*args, **kwargs)
        report = is_supported(model)
        if not report:
            logger.warning(f"{type(model).__name__} is served without a paged cache: {'; '.join(report.reasons)}")
            return model
        return patch(model)


@contextmanager
def paged_serving() -> Iterator[None]:
    """Within it, a `transformers serve` that is started serves paged models."""
    replaced = {
        (model_manager, "ModelManager"): PagedModelManager,
        (utils, "GenerationState"): PagedGenerationState,
    }
    own = {place: getattr(*place) for place in replaced}
    for (module, name), other in replaced.items():
        setattr(module, name, other)
    try:
        yield
    finally:
        for (module, name), stock in own.items():
            setattr(module, name, stock)


def main() -> None:
    """`transformers serve` with this command's arguments."""
    import sys

    from transformers.cli.transformers import app

    with paged_serving():
        app(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    main()
