"""Judges whether a model's rows are exact: the same bits whatever shares their steps.

`check_exact` generates for prompts alone, then beside others, in chunks, from the prefix cache, and so on, and compares
the log-probabilities of the tokens, and of the likeliest beside them, bit by bit::

    report = check_exact(model, prompts)
    assert report, report
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from hf_paged.api.patching import is_patched, patched
from hf_paged.api.support import unwrap
from hf_paged.engine.request import RequestOutput
from hf_paged.sampling.logprobs import TokenLogprobs

_TOP = 5  # of the likeliest tokens
_COUNTS = {
    "num_steps": "steps",
    "num_preemptions": "preemptions",
    "num_swapped_out": "swapped out",
    "prefix_cache_hit_tokens": "tokens found",
    "num_draft_tokens": "drafts",
    "num_accepted_tokens": "of them right",
}
_Text = list[tuple[int, dict[int, float]]]  # tokens, and log-probabilities in their places; at the end a beam's score


@dataclass(frozen=True)
class ExactnessCase:
    """What one case found.

    Attributes:
        num_compared: Texts that were compared; 0: it was left out.
        num_equal: Those of them that are the same, bit by bit.
        difference: The largest between log-probabilities of a token, up to where a text became another one.
        exercised: What the steps really did, or why there were none.
    """

    name: str
    num_compared: int
    num_equal: int
    difference: float
    exercised: str

    def __str__(self) -> str:
        equal = f"{self.num_equal}/{self.num_compared}" if self.num_compared else "left out"
        return f"{self.name:30}{equal:>10}{self.difference:>12.3g}  {self.exercised}"


@dataclass(frozen=True)
class ExactnessReport:
    """Result of `check_exact`: true if nothing differed. Printed, it is a table."""

    cases: tuple[ExactnessCase, ...]

    def __bool__(self) -> bool:
        return all(case.num_equal == case.num_compared for case in self.cases)

    def __str__(self) -> str:
        return "\n".join([f"{'case':30}{'equal':>10}{'difference':>12}  exercised", *map(str, self.cases)])


@dataclass(frozen=True)
class _Case:
    """A way to run the prompts.

    Attributes:
        others: Which of the others run in the same steps, from and to; `None`: each prompt runs alone.
        settings: Of `patch`.
        request: Of these requests and of those alone, and
        own: of these.
        order: -1: the last comes first.
        is_scored: The texts of the requests alone are scored.
    """

    name: str
    others: tuple[int, int] | None = (0, 0)
    settings: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    order: int = 1
    rounds: int = 1
    num_threads: int | None = None
    is_scored: bool = False


_SEVEN, _ALIKE = (0, 7), (22, 31)  # which begin as the longest prompt does
_CACHING = {"enable_prefix_caching": True}
_CASES = (
    _Case("alone again", None),
    *(_Case(f"beside {n} more", (0, n)) for n in (1, 7, 31)),
    _Case("in another order", _SEVEN, order=-1),
    *(_Case(f"in chunks of {n}", settings={"max_num_batched_tokens": n}) for n in (1, 7, 33)),
    *(_Case(f"preemption: {how}", _ALIKE, {"preemption": how}, order=-1) for how in ("recompute", "swap")),
    _Case("from the prefix cache", None, _CACHING, rounds=2),
    _Case("beside nine of the same prefix", _ALIKE, _CACHING, rounds=2),
    _Case("drafts of prompt lookup", own={"prompt_lookup_num_tokens": 6}),
    _Case("samples", _SEVEN, request={"do_sample": True, "num_return_sequences": 3, "seed": 0}),
    _Case("beams", _SEVEN, request={"num_beams": 4, "num_return_sequences": 4}),
    _Case("scored", is_scored=True),
    *(_Case(f"threads: {n}", _SEVEN, num_threads=n) for n in (1, 2)),
)


def check_exact(
    model: Any,
    prompts: Sequence[Sequence[int] | Tensor],
    *,
    max_new_tokens: int = 16,
    progress: bool = True,
    **settings: Any,
) -> ExactnessReport:
    """Generates for prompts alone, and again in many ways, and compares log-probabilities bit by bit.

    Patches the model for each way, and leaves it unpatched. `is_supported(model).why_not_exact` says what will differ.

    Args:
        model: One that `patch` takes, unpatched.
        prompts: Token ids; the longer, the more can differ. What runs beside them is mixed from them.
        progress: Show a tqdm bar over the cases.
        **settings: Of `patch`, where the cases are not about them.

    Raises:
        ValueError: The model is patched, or runs stock `generate()`; no prompts; what `patch` and `submit` refuse.
    """
    if is_patched(unwrap(model)):
        raise ValueError("the model is patched, and check_exact patches it anew for each case: unpatch it first")
    given = [list(map(int, prompt)) for prompt in prompts]
    if not given or not all(given):
        raise ValueError(f"expected prompts of one token or more, got {prompts!r:.80}")
    check = _Check(model, given, max_new_tokens, settings)
    return ExactnessReport(tuple(map(check.run, tqdm(_CASES, disable=not progress, unit="case", desc="check_exact"))))


class _Check:
    """Runs cases over the same prompts, and compares what comes out with what these alone have."""

    def __init__(self, model: Any, prompts: list[list[int]], max_new_tokens: int, settings: dict[str, Any]) -> None:
        self._model, self._prompts, self._settings = model, prompts, {"enable_prefix_caching": False} | settings
        self._request = {"max_new_tokens": max_new_tokens, "do_sample": False, "num_beams": 1, "eos_token_id": None}
        draws, longest = random.Random(0), max(prompts, key=len)
        tokens = [token for prompt in prompts for token in prompt]
        others = [draws.choices(tokens, k=draws.choice((3, 9, 17, 40, 60))) for _ in range(31)]
        alike = [longest[: len(longest) * 9 // 10] + draws.choices(tokens, k=1 + n % 3) for n in range(9)]
        self._others, self._alone = others[:22] + alike, dict[str, list[RequestOutput]]()
        self._inner: Any = unwrap(model)
        with patched(model, **self._settings):
            engine: Any = self._inner.paged
            blocks = [engine.core.pool.blocks_for(len(longest) + n) for n in (0, max_new_tokens)]
        # Two rows that are as long can begin in such a pool, and can't both end there.
        self._traits, self._tight = engine.traits, {"num_blocks": max(2 * blocks[0] + 1, blocks[1])}
        if self._traits.runs_stock:
            raise ValueError(f"it runs stock generate(), so that there is nothing to check: {self._traits.why_padded}")

    def run(self, case: _Case) -> ExactnessCase:
        if case.own and (not self._traits.runs_packed or getattr(self._inner, "_is_stateful", False)):
            return ExactnessCase(case.name, 0, 0, 0.0, "it takes no drafts")
        if "preemption" in case.settings and not self._traits.is_batched:
            return ExactnessCase(case.name, 0, 0, 0.0, "its calls run one at a time")
        settings = self._settings | case.settings | (self._tight if "preemption" in case.settings else {})
        alone, found, num_threads = [[prompt] for prompt in self._prompts], list[_Text](), torch.get_num_threads()
        if (key := repr(case.request)) not in self._alone:
            with patched(self._model, **self._settings):
                self._alone[key] = self._outputs(alone, case.request)
        try:
            torch.set_num_threads(case.num_threads or num_threads)
            with patched(self._model, **settings):
                for _ in range(case.rounds):
                    if case.is_scored:
                        found += map(self._scored, self._alone[key])
                        continue
                    others = self._others[slice(*case.others or (0, 0))]
                    batches = alone if case.others is None else [(self._prompts + others)[:: case.order]]
                    outputs = self._outputs(batches, case.request | case.own)[:: case.order]
                    found += _texts(outputs[: len(self._prompts)])
                stats = self._inner.paged.stats()
        finally:
            torch.set_num_threads(num_threads)
        pairs = list(zip(found, _texts(self._alone[key]) * case.rounds, strict=True))
        shown = {"num_preemptions"} if "preemption" in case.settings else set[str]()
        counts = [f"{n} {what}" for name, what in _COUNTS.items() if (n := getattr(stats, name)) or name in shown]
        num_equal, difference = sum(own == its for own, its in pairs), max(_difference(*pair) for pair in pairs)
        return ExactnessCase(case.name, len(pairs), num_equal, difference, ", ".join(counts))

    def _outputs(self, batches: list[list[list[int]]], request: dict[str, Any]) -> list[RequestOutput]:
        """Of prompts, of which those of a batch begin in the same step."""
        outputs, engine = list[RequestOutput](), self._inner.paged
        for batch in batches:
            engine.pause()
            handles = [engine.submit(prompt, logprobs=_TOP, **self._request | request) for prompt in batch]
            engine.resume()
            outputs += [handle.result() for handle in handles]
        return outputs

    def _scored(self, output: RequestOutput) -> _Text:
        prompt, engine = output.prompt_token_ids, self._inner.paged
        return _text(engine.score([prompt + output.token_ids], first=len(prompt), top=_TOP)[0])


def _texts(outputs: list[RequestOutput]) -> list[_Text]:
    return [
        _text(tokens, 0.0 if output.scores is None else output.scores[index])
        for output in outputs
        for index, tokens in enumerate(output.logprobs or ())
    ]


def _text(tokens: list[TokenLogprobs], score: float = 0.0) -> _Text:
    return [*((each.token_id, {each.token_id: each.logprob, **dict(each.top)}) for each in tokens), (-1, {-1: score})]


def _difference(own: _Text, its: _Text) -> float:
    largest = 0.0
    for (token, found), (expected_token, expected) in zip(own, its):
        largest = max([largest, *(abs(found[other] - expected[other]) for other in found.keys() & expected.keys())])
        if token != expected_token:
            break
    return largest
