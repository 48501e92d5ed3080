"""The language model evaluation harness on a paged model: `--model hf_paged`.

`python -m hf_paged.tools.lm_eval_model --model hf_paged --model_args pretrained=NAME,num_blocks=4096 --tasks ...` is
`lm_eval` with this model; in a program, importing this module registers it. All arguments of the harness's own `hf`
model are taken, and all settings of the pool.
"""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_paged.api.patching import patch
from hf_paged.core.config import PagedConfig
from hf_paged.core.errors import needs
from hf_paged.engine.engine import Engine
from hf_paged.engine.request import Request

with needs("lm_eval[hf]"):
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.models.utils_hf import stop_sequences_criteria

_SETTINGS = {setting.name for setting in fields(PagedConfig)}


@dataclass(slots=True, eq=False)
class _Generation:
    """A text that is being generated.

    Attributes:
        index: Of its request.
        until: Strings that end it.
        criteria: The harness's own, of these.
        request: In the engine.
        num_seen: Tokens that the criteria were shown.
        end: Tokens up to where they ended it.
    """

    index: int
    until: list[str]
    criteria: Any
    request: Request | None = None
    num_seen: int = 0
    end: int | None = None
    tokens: list[int] = field(default_factory=list)

    def look(self) -> bool:
        """Shows the criteria what is new, token by token, as a decoding loop would; returns whether it is over.

        Not in the engine's loop: a step doesn't wait for it, and a token or two more are generated in vain.
        """
        assert self.request is not None
        is_done = self.request.is_done
        if is_done:
            self.tokens = self.request.result().token_ids
        else:
            self.tokens += [event.token_id for event in self.request.events_since(len(self.tokens))]
        while self.end is None and self.num_seen < len(self.tokens):
            self.num_seen += 1
            ids = torch.tensor([self.tokens[: self.num_seen]], device="cpu")
            if any(criterion(ids, None) for criterion in self.criteria):
                self.end = self.num_seen
                self.request.cancel()
        return is_done or self.end is not None


@register_model("hf_paged")
class PagedLM(HFLM):  # type: ignore[misc]
    """The harness's `hf` model, but that requests are the engine's: each as long as it is, as many at once as fit.

    `batch_size` is not looked at. Numbers are those of `hf` at `batch_size=1`, but for the order of sums in a forward.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `hf`; settings of the pool are `PagedConfig`'s.

        Raises:
            UnsupportedModelError: The model can't be paged.
            ValueError: An encoder-decoder model.
        """
        settings = {name: kwargs.pop(name) for name in _SETTINGS & kwargs.keys()}
        super().__init__(*args, **kwargs)
        if self.backend != "causal":
            raise ValueError(
                f"hf_paged takes decoder-only models, this one's backend is {self.backend!r}: use --model hf"
            )
        patch(self.model, **settings)
        self.batch_size_per_gpu = self.engine.config.max_num_seqs  # windows of a rolling likelihood at once

    @property
    def engine(self) -> Engine:
        engine: Engine = self.model.paged
        return engine

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation behind its context, and whether each token is the likeliest."""
        by_context: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, (_, context, _) in enumerate(requests):
            by_context[tuple(context)].append(index)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        groups = list(by_context.values())
        num_at_once = self.engine.config.max_num_seqs
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for start in range(0, len(groups), num_at_once):
                several = groups[start : start + num_at_once]
                # The first of each context leaves it in the prefix cache for the others.
                for indices in ([group[0] for group in several], [index for group in several for index in group[1:]]):
                    self._score(requests, indices, answers, bar)
        return answers

    def _score(
        self, requests: list[tuple[Any, list[int], list[int]]], indices: list[int], answers: list[Any], bar: Any
    ) -> None:
        handles = []
        with self._autocast():
            for index in indices:
                _, context, continuation = requests[index]
                tokens = (context + continuation)[-(self.max_length + 1) :]
                first = len(tokens) - len(continuation)
                handles.append(self.engine.submit_score(tokens, top=1, first=first))
        for index, handle in zip(indices, handles, strict=True):
            text = requests[index][0]
            likely = handle.result().prompt_logprobs
            assert likely is not None
            is_greedy = all(each.top[0][0] == each.token_id for each in likely)
            answers[index] = sum(each.logprob for each in likely), is_greedy
            if text is not None:  # of a rolling likelihood its parts are not cached
                self.cache_hook.add_partial("loglikelihood", text, answers[index])
            bar.update()

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text behind each context, up to what ends it."""
        results: list[str] = [""] * len(requests)
        news: queue.SimpleQueue[_Generation] = queue.SimpleQueue()
        running: set[_Generation] = set()
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            remaining = iter(enumerate(requests))
            try:
                while True:
                    while len(running) < 2 * self.engine.config.max_num_seqs and (item := next(remaining, None)):
                        context, settings = item[1].args
                        running.add(self._begin(item[0], context, settings, news.put))
                    if not running:
                        return results
                    generation = news.get()
                    if generation in running and generation.look():
                        running.discard(generation)
                        context, settings = requests[generation.index].args
                        results[generation.index] = text = self._text(generation)
                        self.cache_hook.add_partial("generate_until", (context, settings), text)
                        bar.update()
            finally:
                for generation in running:
                    if generation.request is not None:
                        generation.request.cancel()

    def _begin(
        self, index: int, context: str, settings: dict[str, Any], tell: Callable[[_Generation], None]
    ) -> _Generation:
        settings = normalize_gen_kwargs(settings, self.max_gen_toks)
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(settings.pop("until", None), eos=eos)
        num_new = settings.pop("max_gen_toks")
        if num_new >= self.max_length:
            raise ValueError(f"max_gen_toks={num_new} must be below the model's maximum length of {self.max_length}")
        ids, _ = self.tok_batch_encode(
            [context], left_truncate_len=self.max_length - num_new, truncation=self.truncation
        )
        settings.setdefault("max_length", ids.shape[1] + num_new)
        if not settings.get("do_sample"):
            settings["do_sample"] = False
            settings.pop("temperature", None)
        generation = _Generation(index, until, stop_sequences_criteria(self.tokenizer, until, 0, 1))
        with self._autocast():
            own = {"attention_mask": torch.ones_like(ids), "pad_token_id": self.tokenizer.pad_token_id}
            generation.request = request = self.engine.submit(ids, **own, **settings)
        request.listen(partial(tell, generation))
        return generation

    def _text(self, generation: _Generation) -> str:
        tokens = generation.tokens[: generation.end]
        think_end = self.think_end_token
        if isinstance(think_end, int) and think_end in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(think_end) :]
        text: str = self.tok_decode(tokens)
        if isinstance(think_end, int):
            text = text.lstrip()
        found: str = postprocess_generated_text(
            generation=text, stop=generation.until, think_end_token=think_end if isinstance(think_end, str) else None
        )
        return found

    def _autocast(self) -> torch.autocast:
        """The context in which `hf` generates."""
        return torch.autocast(
            device_type=self.device.type,
            dtype=self.mixed_precision_dtype,
            enabled=self.mixed_precision_dtype is not None,
        )


def main() -> None:
    """`lm_eval`, with the model registered."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
