"""Judges whether an engine's tokens are stock `generate()`'s, up to certified near ties.

A batch of another shape rounds differently. Where two candidates are nearly tied, that may decide between them, and
everything behind it is another text. `compare_generations` tells such a divergence from a fault. The judge is stock:
one plain forward over each finished text (teacher forcing, no cache), the logits processors that `generate()` itself
prepares, and for sampling the very noise that the seed gives. It goes on behind a row's first divergence, along that
row's own text, so that no fault hides behind a near tie, and it tries itself on the expected tokens first::

    report = compare_generations(model, input_ids, expected, actual, attention_mask=mask, max_new_tokens=64)
    assert report, report
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.utils import ModelOutput

_MASKED = -1e4  # logits from here down are fill values of unused vocabulary entries
_MAX_LOGITS = 1 << 26  # logits held at a time: 256 MiB of float32
_MAX_TOKENS = 1 << 13  # tokens in one forward
_UNUSED = (
    "streamer",
    "past_key_values",
    "use_cache",
    "cache_implementation",
    "output_attentions",
    "output_hidden_states",
)
_PER_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")  # [..., rows, width]


@dataclass(frozen=True)
class Divergence:
    """A place where the actual tokens are not what stock chooses there.

    Attributes:
        row: Row of `expected` and `actual`.
        step: Index among the row's generated tokens.
        expected_token: At a row's first divergence the token of `expected`, at later ones stock's choice behind the
            row's own tokens; `None` if the row should have ended.
        actual_token: The token of `actual`; `None` if the row ended too early.
        gap: How far the token's score lies behind the best one, in logits (at a first divergence: or the expected
            token's, if further). Beam search: how far the row's score lies behind the expected row's; negative if it
            is better. Beam sampling: how far gaps were changed until stock drew the row. Infinite if no rounding leads
            here.
        threshold: Largest gap that is a near tie here.
    """

    row: int
    step: int
    expected_token: int | None
    actual_token: int | None
    gap: float
    threshold: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap <= self.threshold

    def __str__(self) -> str:
        return (
            f"row {self.row}, step {self.step}: expected {self.expected_token}, got {self.actual_token}, gap "
            f"{self.gap:.3g}, threshold {self.threshold:.3g}: {'' if self.is_near_tie else 'NOT '}a near tie"
        )


@dataclass(frozen=True)
class ComparisonReport:
    """Result of `compare_generations`: true if every divergence is a near tie, or there is none.

    Attributes:
        identical: All rows have the same tokens, padding behind their ends aside.
        divergences: By row and step; of beam search one a row.
        num_tokens_checked: Generated tokens of `actual`, without padding.
    """

    identical: bool
    divergences: tuple[Divergence, ...]
    num_tokens_checked: int

    def __bool__(self) -> bool:
        return all(divergence.is_near_tie for divergence in self.divergences)

    @property
    def summary(self) -> str:
        """The verdict in one line."""
        if self.identical:
            return f"identical: {self.num_tokens_checked} tokens"
        rows = len({divergence.row for divergence in self.divergences})
        faults = sum(not divergence.is_near_tie for divergence in self.divergences)
        verdict = f"NOT certified: {faults} of" if faults else "certified: no fault among"
        return f"{verdict} {len(self.divergences)} divergences ({rows} rows, {self.num_tokens_checked} tokens)"

    def __str__(self) -> str:
        faults_first = sorted(self.divergences, key=lambda divergence: divergence.is_near_tie)
        return "\n  ".join([self.summary, *map(str, faults_first[:20]), *(["..."] if faults_first[20:] else [])])


def near_tie_threshold(dtype: torch.dtype, logits: Tensor) -> Tensor:
    """Largest gap between two logits that rounding may reverse in a model that computes in `dtype`.

    float32: 1e-4. bf16 and fp16: 4 eps M, with eps = 2^-7 and 2^-10, and M the largest magnitude among the logits.
    Numbers of M's size lie up to eps M apart, so rounding the output alone moves a gap by as much, and the layers
    before it add theirs. Measured on CPU (cached decode against a plain forward; gaps of the eight best tokens to the
    best; in eps M): rms 0.2, worst 1.2 in a trained model of 6 layers; rms 0.6, worst 2.6 in random ones of 2 layers.
    Noise grows with the square root of the depth, fastest in random weights: rms 1 to 1.5 at 8 layers, 2 at 24. Such
    models need a wider threshold.

    qint8, layers that quantize their input as they run: 4 eps M with eps = 2^-4. They scale by the largest number in
    the batch, so a row's numbers depend on the rows beside it. Measured likewise, rms 0.3 to 0.9, worst 4.3.

    Args:
        dtype: What the model computes in.
        logits: `[..., vocabulary]`, as the model returned them.

    Returns:
        `[...]`, in logits.
    """
    eps = 2.0**-4 if dtype is torch.qint8 else torch.finfo(dtype).eps
    if eps <= torch.finfo(torch.float32).eps:
        return logits.new_full(logits.shape[:-1], 1e-4)
    return 4 * eps * logits.abs().masked_fill(~logits.isfinite() | (logits <= _MASKED), 0).amax(dim=-1)


def _computes_in(model: Any) -> torch.dtype:
    """The model's dtype, or qint8 where layers of `torch.ao.quantization.quantize_dynamic` are in it."""
    packed = (getattr(module, "_packed_params", None) for module in model.modules())
    return torch.qint8 if any(getattr(each, "dtype", None) is torch.qint8 for each in packed) else model.dtype


@torch.no_grad()
def compare_generations(
    model: Any,
    input_ids: Tensor,
    expected: Tensor | ModelOutput,
    actual: Tensor | ModelOutput,
    *,
    attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    seed: int | None = None,
    threshold: float | None = None,
    **generate_kwargs: Any,
) -> ComparisonReport:
    """Compares what an engine generated with what stock `generate()` did, and judges every difference by stock logits.

    Greedy: the token's processed score must be within the threshold of the best: had each of two computations been
    wrong by half of that, either token could have won. Sampling: its score after the noise must, in logits:
    temperature * log(p / q), for `torch.multinomial` chooses argmax p / q with q one `[rows, vocabulary]` draw of
    Exp(1) a step; and a token may also pass with the logits shifted by the threshold, if that moves it or the one that
    beat it across the edge of top-k, top-p and the like. Beam search: the row's score, sum of log p / length **
    length_penalty, must be at least the expected row's less the threshold, and the hypotheses of a prompt must differ.
    A beam lost at a near tie early on may cost more in the end: then stock's loop must find the row in one of 36
    searches, its logits moved so that no gap changes by more than the threshold, towards what was found or at random.
    Beam sampling: stock's loop, drawing with the seed, must find it in these. In half precision, where many draws
    nearly tie, they seldom find the row, and it counts as a fault.

    No threshold on logits covers a mixture of experts whose *router* nearly tied. Rotary scalings that depend on the
    longest text of a batch (`dynamic`, `longrope`) can't be judged beyond their original length.

    Args:
        model: The model, patched or not: it runs without a cache, which is stock in both.
        input_ids: `[batch, width]`, the prompts, left-padded.
        expected: What stock returned, prompts included: `[batch * num_return_sequences, width + steps]`, or the whole
            output object.
        actual: What the engine returned; may be wider or narrower than `expected`.
        attention_mask: As given to `generate()`.
        generation_config: As given to `generate()`.
        seed: Sampling, of beams, too: the seed of torch's generator right before each call.
        threshold: Replaces that of `near_tie_threshold`: in logits; of beam search in nats a token.
        **generate_kwargs: The other arguments of `generate()`. Your own processors and criteria are copied, as two
            texts go through them; criteria get no scores.

    Raises:
        ValueError: Shapes or prompts don't fit, the mode can't be judged, or `expected` itself does not pass: it is
            not what stock makes of these arguments.
    """
    if threshold is not None and not threshold >= 0:
        raise ValueError(f"threshold must not be negative, got {threshold}")
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids must have shape [batch, width], got {list(input_ids.shape)}")
    kwargs = generate_kwargs | {"generation_config": generation_config, "attention_mask": attention_mask}
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        sides = (("expected", expected), ("actual", actual))
        stock, found = (_read(name, output, model, input_ids, threshold, kwargs) for name, output in sides)
        mode, sampled = stock.config.get_generation_mode(kwargs.get("assistant_model")).value, stock.config.do_sample
        if mode in ("sample", "beam_sample") and seed is None:
            raise ValueError("sampling is judged by replaying its noise: give the seed of both calls")
        judged = ("greedy_search", "sample", "beam_search", "beam_sample")
        if mode not in judged and (sampled or mode != "assisted_generation"):
            raise ValueError(f"mode {mode!r} with do_sample={sampled} can't be judged")
        steps = max(stock.tokens.shape[1], found.tokens.shape[1])
        padded = [functional.pad(side.tokens, (0, steps - side.tokens.shape[1]), value=-1) for side in (stock, found)]
        starts: dict[int, int] = {}
        for row, step in (padded[0] != padded[1]).nonzero().tolist():
            starts.setdefault(row, step)
        divergences: list[Divergence] = []
        if starts and mode == "beam_search":
            divergences = _judge_beams(stock, found, starts)
        elif starts and mode == "beam_sample":
            divergences = _judge_drawn_beams(stock, found, starts, seed)
        elif starts:
            divergences = _judge_tokens(stock, found, starts, seed)
    finally:
        for module in training:
            module.training = True
    return ComparisonReport(not starts, tuple(divergences), int((found.tokens >= 0).sum()))


@dataclass(frozen=True)
class _Side:
    """One side's tokens, and the call as `generate()` prepared it for its decoding loop.

    The loop's rows are the returned ones, but for beam search, where each prompt has `num_beams` rows.
    """

    model: Any  # of a wrapped model the inner one
    threshold: float | None  # the caller's
    prompts: Tensor  # [loop_rows, width]
    source: Tensor  # [loop_rows], the returned row that stands in each row of the loop (beams repeat them)
    processors: LogitsProcessorList  # of this side alone
    criteria: StoppingCriteriaList
    config: GenerationConfig  # with everything resolved
    inputs: dict[str, Any]  # what else a forward over the prompts is given
    filled: Tensor  # [rows, steps], the generated tokens as given
    tokens: Tensor  # the same, but -1 for padding behind a row's end
    lengths: Tensor  # [rows], tokens up to the row's end
    is_ended: Tensor  # [rows], whether a stopping criterion ended the row

    def token(self, row: int, step: int) -> int | None:
        """The token there, `None` behind the row's end."""
        token = int(self.tokens[row, step]) if step < self.tokens.shape[1] else -1
        return None if token < 0 else token

    def limits(self, logits: Tensor) -> Tensor:
        """The threshold for each row of logits."""
        limits = near_tie_threshold(_computes_in(self.model), logits)
        return limits if self.threshold is None else limits.fill_(self.threshold)


def _read(
    name: str, output: Any, model: Any, input_ids: Tensor, threshold: float | None, kwargs: dict[str, Any]
) -> _Side:
    """Has `generate()` prepare the call, checks what it returned against it, and finds where the rows end."""
    ids: Any = getattr(output, "sequences", output)
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise ValueError(f"{name} must be token ids [rows, length] or a generate() output, got {ids!r}")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError("encoder-decoder models are not supported")
    kwargs = {key: value for key, value in kwargs.items() if key not in _UNUSED}
    for key in ("logits_processor", "stopping_criteria"):
        kwargs[key] = copy.deepcopy(kwargs.get(key), {id(model): model})  # a model that one holds stays the model
    if (strings := kwargs.pop("stop_strings", None)) is not None:  # a loop of one's own is given no tokenizer
        criterion = StopStringCriteria(kwargs.get("tokenizer"), strings)
        kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs["stopping_criteria"] or ()), criterion])
    prepared: dict[str, Any] = {}

    def loop(model: Any, input_ids: Tensor, **given: Any) -> Tensor:
        prepared.update(given, model=model, prompts=input_ids)
        return input_ids

    model.generate(input_ids=input_ids, custom_generate=loop, **kwargs)
    names = ("model", "prompts", "generation_config", "logits_processor", "stopping_criteria")
    model, prompts, resolved, processors, criteria = (prepared.pop(key) for key in names)
    inputs = {key: value for key, value in prepared.items() if key not in _UNUSED}
    source = torch.arange(len(prompts), device=prompts.device)
    beams, returned, width = resolved.num_beams, resolved.num_return_sequences, prompts.shape[1]
    if beams > 1:
        source = source // beams * returned + source % beams % returned
    num_rows = int(source.max()) + 1
    if len(ids) != num_rows or ids.shape[1] < width:
        raise ValueError(f"{name} has shape {list(ids.shape)}; the call returns {num_rows} rows of {width} or more")
    ids = ids.to(prompts.device)
    for place, column in (ids[source, :width] != prompts).nonzero()[:1].tolist():
        raise ValueError(f"{name} does not start with its prompt: row {int(source[place])} differs in column {column}")

    filled = ids[:, width:]
    lengths = torch.full((num_rows,), filled.shape[1], device=ids.device)
    is_ended = torch.zeros_like(lengths, dtype=torch.bool)
    for step in range(filled.shape[1]):
        stops = criteria(ids[:, : width + step + 1], None) & ~is_ended
        lengths[stops] = step + 1
        is_ended |= stops
    if beams == 1 and not any(hasattr(criterion, "eos_token_id") for criterion in criteria):
        lengths[:] = lengths.max()  # without that criterion stock pads nothing: all rows go on to the last one's end
    # Behind its end a hypothesis is filled with eos if the padding token is 0.
    fills = [resolved._pad_token_tensor, resolved._eos_token_tensor if beams > 1 else None]
    is_padding = torch.arange(filled.shape[1], device=ids.device) >= lengths[:, None]
    is_padding &= sum((filled == fill.flatten()[0] for fill in fills if fill is not None), torch.zeros_like(is_padding))
    tokens = filled.masked_fill(is_padding, -1)
    return _Side(
        model, threshold, prompts, source, processors, criteria, resolved, inputs, filled, tokens, lengths, is_ended
    )


def _step_logits(side: _Side, rows: list[int]) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Teacher-forced logits of some returned rows, step by step, from plain forwards without a cache.

    Yields:
        The step; `[loop_rows, width + step]`, the tokens before it; `[loop_rows, vocabulary]`, raw logits in float32, 0
        in loop rows that stand for none of `rows` (processors want to see all of the loop); `[loop_rows]`, thresholds.
    """
    model, source = side.model, side.source
    ids = torch.cat([side.prompts, side.filled[source]], dim=1)
    prompt, steps = side.prompts.shape[1], side.filled.shape[1]
    wanted = torch.isin(source, torch.tensor(rows, device=source.device)).nonzero()[:, 0]
    kwargs = dict(side.inputs)
    for _ in range(steps):
        kwargs = model._update_model_kwargs_for_generation(ModelOutput(), kwargs)
    window = max(1, _MAX_LOGITS // (len(ids) * model.config.get_text_config(decoder=True).vocab_size))
    for begin in range(0, steps, window):
        end = min(begin + window, steps)
        width = prompt + end - 1  # the last token predicts nothing that is judged
        parts = []
        for part in wanted.split(max(1, _MAX_TOKENS // max(width, 1))):
            given = {
                name: value.expand(*value.shape[:-2], len(ids), -1)[..., part, :width]
                if name in _PER_TOKEN and value is not None
                else value
                for name, value in kwargs.items()
            }
            if "logits_to_keep" in given:
                given["logits_to_keep"] = end - begin
            inputs = model.prepare_inputs_for_generation(
                ids[part, :width], is_first_iteration=True, use_cache=False, **given
            )
            logits = model(**inputs, return_dict=True).logits[:, begin - end :]
            parts.append(logits.to(ids.device, torch.float32))
        logits = torch.cat(parts)
        for step in range(begin, end):
            raw = logits.new_zeros(len(ids), logits.shape[-1])
            raw[wanted] = logits[:, step - begin]
            yield step, ids[:, : prompt + step], raw, side.limits(raw)


def _gaps(scores: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """How far each row's token lies behind the best score, and which token that is: both `[rows]`."""
    best, choices = scores.max(dim=-1)
    return best - scores.gather(-1, tokens[:, None])[:, 0], choices


def _shifted_cuts(raw: Tensor, uncut: Tensor, tokens: Tensor, choices: Tensor, limits: Tensor) -> Iterator[Tensor]:
    """Logits that rounding could have made of `raw`, with which top-k, top-p and others may cut in favour of `tokens`.

    `raw` and `uncut` (scores after the noise, were nothing cut off) are `[loop_rows, vocabulary]`, `tokens` and the
    judge's `choices` `[loop_rows]`, the thresholds `limits` `[loop_rows, 1]`.
    """
    is_token, is_choice = (functional.one_hot(picked, raw.shape[-1]).bool() for picked in (tokens, choices))
    beats = uncut > uncut[is_token][:, None] + limits
    rank_above = (raw >= raw[is_token][:, None]) & ~is_token
    rank_above_choice = (raw >= raw[is_choice][:, None]) & ~is_choice
    # Where logits tie for the last place, top-k keeps all of them: also without ties, and with more of them.
    tiny, grid = limits * torch.linspace(0, 0.25, raw.shape[-1], device=raw.device), (limits / 4).clamp_min(1e-30)
    for base in (raw, raw - tiny, (raw / grid).round() * grid):
        yield base - limits * (rank_above | beats)  # lets the token through
        yield base - limits * beats  # cuts off who beats it
        yield base + limits * rank_above_choice  # closes the nucleus before the choice
    generator = torch.Generator(raw.device).manual_seed(0)
    for _ in range(32):  # typical-p ranks tokens by their distance to a mean over all of them
        yield raw + limits * (torch.rand(raw.shape, generator=generator, device=raw.device) - 0.5)


def _token_gaps(side: _Side, rows: list[int], seed: int | None) -> list[list[list[float]]]:
    """For each row and step: the token's gap, stock's choice there, the threshold."""
    sampled = bool(side.config.do_sample)
    temperature = (side.config.temperature if sampled else None) or 1.0
    generator = torch.Generator(side.prompts.device)
    if seed is not None:
        generator.manual_seed(seed)
    columns: list[Tensor] = []
    for step, ids, raw, limits in _step_logits(side, rows):
        tokens = side.filled[:, step]
        # One draw of all rows a step, the finished ones included. (log p is a score and a constant.)
        noise = torch.empty_like(raw).exponential_(generator=generator).log() if sampled else 0.0
        gaps, choices = _gaps((side.processors(ids, raw.clone()) - noise) * temperature, tokens)
        if sampled and bool((gaps > limits)[rows].any()):
            for logits in _shifted_cuts(raw, raw / temperature - noise, tokens, choices, limits[:, None]):
                processors = copy.deepcopy(side.processors, {id(side.model): side.model})
                shifted, _ = _gaps((processors(ids, logits) - noise) * temperature, tokens)
                gaps = torch.where((gaps > limits) & (shifted <= limits), shifted, gaps)
        columns.append(torch.stack([gaps, choices.float(), limits], dim=-1)[rows])
    return torch.stack(columns, dim=1).tolist() if columns else [[]] * len(rows)


def _judge_tokens(stock: _Side, found: _Side, starts: dict[int, int], seed: int | None) -> list[Divergence]:
    """Greedy search and sampling: the tokens of the rows in `starts`, from its step on, each by itself."""
    divergences = []
    sides = [_token_gaps(side, list(starts), seed) for side in (stock, found)]
    for (row, start), of_stock, of_found in zip(starts.items(), *sides):
        for step, (gap, _, limit) in enumerate(of_stock[: int(stock.lengths[row])]):
            if not gap <= limit:
                raise ValueError(
                    f"expected is not what stock generates from these arguments: row {row}, step {step}, token "
                    f"{stock.token(row, step)} lies {gap:.3g} behind the best, threshold {limit:.3g} (were both calls "
                    "given these arguments and this seed? is the threshold too small for the model's rounding?)"
                )
        for step in range(start, int(found.lengths[row])):
            gap, choice, limit = of_found[step]
            token, expected = found.token(row, step), stock.token(row, step) if step == start else int(choice)
            if step == start and expected is not None:
                gap, limit = max(gap, of_stock[step][0]), max(limit, of_stock[step][2])
            if token != expected:
                divergences.append(Divergence(row, step, expected, token, gap, limit))
        divergences += _wrong_end(row, stock, found)
    return divergences


def _beam_scores(side: _Side, rows: list[int]) -> list[tuple[float, float]]:
    """Each row's score as `_beam_search` computes it; and the threshold: the steps' thresholds likewise."""
    places = torch.stack([(side.source == row).nonzero()[0, 0] for row in rows])
    lengths = side.lengths[rows]
    sums, allowed = torch.zeros(2, len(rows), device=lengths.device)
    for step, ids, raw, limits in _step_logits(side, rows):
        log_probs = side.processors(ids, raw.log_softmax(dim=-1))[places, side.filled[rows, step]]
        sums += log_probs.where(step < lengths, 0)
        allowed += limits[places].where(step < lengths, 0)
    scale = lengths.clamp(min=1) ** side.config.length_penalty
    return list(zip((sums / scale).tolist(), (allowed / scale).tolist()))


def _judge_beams(stock: _Side, found: _Side, starts: dict[int, int]) -> list[Divergence]:
    """Beam search: the score of each row in `starts` against the expected row's; or whether moved logits lead there."""
    divergences = []
    sides = [_beam_scores(side, list(starts)) for side in (stock, found)]
    for (row, step), (stock_score, stock_limit), (score, limit) in zip(starts.items(), *sides):
        if not math.isfinite(stock_score):
            raise ValueError(f"expected is not what stock generates from these arguments: row {row} has score -inf")
        earlier = range(row - row % found.config.num_return_sequences, row)
        is_repeated = any(torch.equal(found.tokens[row], found.tokens[other]) for other in earlier)
        gap = math.inf if is_repeated else stock_score - score
        tokens = stock.token(row, step), found.token(row, step)
        divergence = Divergence(row, step, *tokens, gap, max(stock_limit, limit))
        divergences += _wrong_end(row, stock, found) or [divergence]
    if any(not divergence.is_near_tie and math.isfinite(divergence.gap) for divergence in divergences):
        reached = _searched_again(stock, found, starts, None)[1]
        for place, divergence in enumerate(divergences):
            if math.isfinite(divergence.gap) and divergence.row in reached and not divergence.is_near_tie:
                share = reached[divergence.row]
                divergences[place] = replace(divergence, gap=share * divergence.threshold)
    return divergences


def _judge_drawn_beams(stock: _Side, found: _Side, starts: dict[int, int], seed: int | None) -> list[Divergence]:
    """Beam sampling: whether stock's own loop finds the rows in `starts` when its logits are moved."""
    divergences, reached = [], _searched_again(stock, found, starts, seed)
    limit = float(stock.limits(next(_step_logits(stock, list(starts)))[2]).max())
    for row, step in starts.items():
        if row not in reached[0]:
            raise ValueError(f"expected is not what stock generates from these arguments: row {row} is not drawn")
        gap = limit * max(reached[1].get(row, math.inf), reached[0][row])
        tokens = stock.token(row, step), found.token(row, step)
        divergences += _wrong_end(row, stock, found) or [Divergence(row, step, *tokens, gap, limit)]
    return divergences


def _searched_again(
    stock: _Side, found: _Side, starts: dict[int, int], seed: int | None
) -> tuple[dict[int, float], dict[int, float]]:
    """By how much of the threshold gaps were changed until stock's loop found the rows of `stock`, and of `found`.

    Logits are moved towards the found rows and away from the expected ones, or at random.
    """
    reached: tuple[dict[int, float], dict[int, float]] = ({}, {})
    random = [1 / 16] * 8 + [1 / 4] * 8 + [1.0] * 16
    towards: list[tuple[float, int | None]] = [(1 / 16, None), (1 / 4, None), (1.0, None)]
    tries = [(0.0, None), *sorted([*towards, *zip(random, range(len(random)))], key=lambda pair: pair[0])]
    for share, noise in tries:
        if all(len(shares) == len(starts) for shares in reached):
            break
        tokens = _MovedLogits(stock, found, list(starts), share, noise).search(seed)
        for side, shares in zip((stock, found), reached):
            for row in starts.keys() - shares.keys():
                length = int(side.lengths[row])
                if torch.equal(tokens[row, :length], side.filled[row, :length]):
                    shares[row] = share
    return reached


class _MovedLogits:
    """Stands in for a model as the `self` of its beam search, with logits as rounding might have made them."""

    _prefill = GenerationMixin._prefill

    def __init__(self, stock: _Side, found: _Side, rows: list[int], share: float, noise: int | None) -> None:
        """Moves logits by half of `share` of the threshold at most: towards `rows`, or at random, `noise` a seed."""
        self._stock, self._found, self._rows = stock, found, rows
        self._share = share
        self._generator = None if noise is None else torch.Generator(stock.prompts.device).manual_seed(noise)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock.model, name)

    def __call__(self, input_ids: Tensor, **kwargs: Any) -> Any:
        parts, rows = [], torch.arange(len(input_ids), device=input_ids.device)
        for part in rows.split(max(1, _MAX_TOKENS // input_ids.shape[1])):
            given = {
                name: value[..., part, :] if name in _PER_TOKEN and value is not None and len(value) > 1 else value
                for name, value in kwargs.items()
            }
            output = self._stock.model(input_ids=input_ids[part], **given)
            parts.append(output.logits[:, -1:].to(self._stock.prompts.device, torch.float32))
        logits = torch.cat(parts)
        if self._generator is None:
            moves = self._towards(input_ids[:, self._stock.prompts.shape[1] :], torch.zeros_like(logits))
        else:
            moves = torch.rand(logits.shape, generator=self._generator, device=logits.device) - 0.5
        output.logits = logits + moves * self._share * self._stock.limits(logits)[..., None]
        return output

    def _towards(self, beams: Tensor, moves: Tensor) -> Tensor:
        """Favours the next token of what is found in each beam that is about to become it."""
        step, config = beams.shape[1], self._stock.config
        for sign, side in ((-0.5, self._stock), (0.5, self._found)):
            for row in self._rows:
                first = row // config.num_return_sequences * config.num_beams
                for beam in range(first, first + config.num_beams) if step < int(side.lengths[row]) else ():
                    if torch.equal(beams[beam], side.filled[row, :step]):
                        moves[beam, 0, side.filled[row, step]] = sign
        return moves

    def search(self, seed: int | None) -> Tensor:
        """The generated tokens, `[rows, steps]`."""
        stock = self._stock
        with torch.random.fork_rng():
            torch.manual_seed(0 if seed is None else seed)
            processors, criteria = copy.deepcopy((stock.processors, stock.criteria), {id(stock.model): stock.model})
            config = copy.copy(stock.config)
            config.return_dict_in_generate, config.prefill_chunk_size = False, None
            inputs = stock.inputs | {"use_cache": False}
            found = GenerationMixin._beam_search(self, stock.prompts, processors, criteria, config, **inputs)
        return found[:, stock.prompts.shape[1] :]


def _wrong_end(row: int, stock: _Side, found: _Side) -> list[Divergence]:
    """At most one divergence: a row that goes on behind its end, or stops before it where the expected row has one."""
    step = int(found.lengths[row])
    behind = (found.tokens[row, step:] >= 0).nonzero()[:1, 0].tolist()
    if not behind and (found.is_ended[row] or not stock.is_ended[row]):
        return []
    step += sum(behind)
    return [Divergence(row, step, None if behind else stock.token(row, step), found.token(row, step), math.inf, 0.0)]
