"""The methods of transformers' batch API on a patched model's class; they all use a `PagedBatchManager`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import ContinuousBatchingConfig, GenerationConfig, GenerationMixin
from transformers.generation.continuous_batching.requests import GenerationOutput

from hf_paged.api.batch_manager import PagedBatchManager
from hf_paged.api.batch_request import check_prompt, request_of, with_settings
from hf_paged.api.engine_of import ENGINE, engine_of

MANAGER = "_cached_continuous_batching_manager"  # of a model: transformers' own name


class PagedBatchMixin:
    """`generate_batch()` and `init_continuous_batching()`, under transformers' own signatures."""

    @functools.wraps(GenerationMixin.init_continuous_batching)
    def init_continuous_batching(
        self: Any,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> PagedBatchManager:
        return self._manager(self.__dict__.get(MANAGER), generation_config, continuous_batching_config)

    def _manager(
        self: Any,
        manager: Any,
        generation_config: GenerationConfig | None,
        continuous_batching_config: ContinuousBatchingConfig | None,
    ) -> PagedBatchManager:
        """The manager that was kept, as it is configured now, or a new one."""
        is_kept = isinstance(manager, PagedBatchManager)
        config = generation_config or (manager.generation_config if is_kept else self.generation_config)
        batching = continuous_batching_config or getattr(config, "continuous_batching_config", None)
        if not isinstance(batching, ContinuousBatchingConfig):
            batching = manager.continuous_batching_config if is_kept else ContinuousBatchingConfig()
        if not is_kept:
            return PagedBatchManager(self, config, batching)
        manager.configure(config, batching)
        return manager

    @contextmanager
    def continuous_batching_context_manager(
        self: Any,
        generation_config: GenerationConfig | None = None,
        block: bool = True,
        timeout: float | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        persistent_manager: bool = False,
        warmup: bool = True,
        workload_hints: Any = None,
    ) -> Iterator[PagedBatchManager]:
        """As transformers' own, but that requests don't run on behind an exception. `warmup` changes nothing: what is
        compiled is the engine's, see `Engine.warm_up`.
        """
        kept = self.__dict__.pop(MANAGER, None)  # until this ends: a call beside it has a manager of its own
        try:
            manager = self._manager(kept, generation_config, continuous_batching_config)
            manager.start()
            try:
                yield manager
            except BaseException:
                manager.destroy()
                raise
            manager.stop(block=block, timeout=timeout, keep_for_next_session=persistent_manager)
            if not persistent_manager:
                manager.destroy()
        finally:
            if kept is not None and ENGINE in self.__dict__:  # which `unpatch()` ends with all else
                self.__dict__.setdefault(MANAGER, kept)

    def generate_batch(
        self: Any,
        inputs: list[list[int]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **kwargs: Any,
    ) -> dict[str, GenerationOutput]:
        """As transformers' own, but that errors of a call are raised, and samples follow their first in every version.
        `**kwargs` are any other settings of a `GenerationConfig`, and `adapter_names`, PEFT's, one for each prompt;
        `warmup` changes nothing.

        Returns:
            Results by request id, in the order of the prompts; of several sequences the best first, the others as its
            children. One that failed has an `error`.

        Raises:
            ValueError: A setting that there isn't, or that can't be honoured; a prompt that is no list.
        """
        config = self.generation_config if generation_config is None else generation_config
        adapters = kwargs.pop("adapter_names", None)
        adapters = [None] * len(inputs) if adapters is None else adapters
        if len(adapters) != len(inputs):
            raise ValueError(f"got {len(adapters)} adapter_names for {len(inputs)} prompts: give one for each")
        engine_of(self).check_adapters([name for name in adapters if name is not None])  # before any prompt runs
        for prompt in inputs:
            check_prompt(prompt)
        config = with_settings(config, kwargs, "generate_batch()") if kwargs else config
        if not inputs:
            return {}
        results: dict[str, GenerationOutput] = {}
        total = len(inputs) * (config.num_return_sequences or 1)
        with (
            self.continuous_batching_context_manager(
                config,
                continuous_batching_config=continuous_batching_config,
                persistent_manager=persistent_manager,
                warmup=warmup,
            ) as manager,
            logging_redirect_tqdm(),
            tqdm(total=total, disable=not progress_bar, desc=f"Solving {total} requests", unit="request") as bar,
        ):
            order: dict[str, int] = {}  # of the prompts' ids
            num_each, ahead = total // len(inputs), 2 * engine_of(self).config.max_num_seqs
            while len(results) < total:
                for place in range(len(order), min(len(results) // num_each + ahead, len(inputs))):
                    given = {"record_timestamps": record_timestamps, "adapter": adapters[place]}
                    if (name := manager.add_request(inputs[place], **given)) is not None:
                        order[name] = len(order)
                if (output := manager.get_result()) is None:
                    break
                # A manager that was kept may have others'.
                if output.is_finished() and request_of(output.request_id) in order:
                    results[output.request_id] = output
                    bar.update()
        arrived = sorted(results, key=lambda name: order[request_of(name)])  # stable: a request's own stay in order
        return {name: results[name] for name in arrived}
