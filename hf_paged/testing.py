"""Judges whether an engine's tokens are stock `generate()`'s, up to certified near ties.

A batch of another shape rounds differently. Where two candidates are nearly tied, that may decide between them, and
everything behind it is another text. `compare_generations` tells such a divergence from a fault:

- The judge is stock: one plain forward over each finished text (teacher forcing, no cache), the logits processors that
  `generate()` itself prepares for the call, and for sampling the very noise that the seed gives.
- A token passes if its score is within a threshold of the best at its step: had each of two computations been wrong by
  half of that, either token could have won.
- Judging goes on behind a row's first divergence, along that row's own text, so that no fault hides behind a near tie.
- The expected tokens are judged first. If stock's own choices don't pass, the judge was told of another call.

    report = compare_generations(model, input_ids, expected, actual, attention_mask=mask, max_new_tokens=64)
    assert report, report
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode
from transformers.utils import ModelOutput

_MASKED = -1e4  # logits from here down are fill values of unused vocabulary entries
_MAX_LOGITS = 1 << 26  # logits held at a time: 256 MiB of float32
_MAX_TOKENS = 1 << 13  # tokens in one forward
_MAX_LINES = 20
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
        gap: Greedy and sampling: how far the token's score lies behind the best (at a first divergence: or the
            expected token's, if that lies further behind), in logits. A sampling call's score is log(p / noise) times
            the temperature, which makes it a logit again. Beam search: how far the row's score lies behind the
            expected row's; negative if it is better. Infinite if no rounding leads here.
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
        lines = [f"  {divergence}" for divergence in sorted(self.divergences, key=lambda item: item.is_near_tie)]
        more = [f"  and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
        return "\n".join([self.summary, *lines[:_MAX_LINES], *more])


def near_tie_threshold(dtype: torch.dtype, logits: Tensor) -> Tensor:
    """Largest gap between two logits that rounding may reverse in a model that computes in `dtype`.

    float32: 1e-4. bf16 and fp16: 4 eps M, with eps = 2^-7 and 2^-10, and M the largest magnitude among the logits.
    Numbers of M's size lie up to eps M apart, so rounding the output alone moves a gap by as much, and the layers
    before it add theirs. Measured on CPU (cached decode against a plain forward; gaps of the eight best tokens to the
    best), in eps M: rms 0.2, worst 1.1 in a trained model of 6 layers; worst 2.6 in random ones of 2 layers; rms 1.0,
    worst 3.9 in one of 8. Noise grows with the square root of the depth: random weights of 24 layers exceed it.

    Args:
        dtype: The model's.
        logits: `[..., vocabulary]`, as the model returned them.

    Returns:
        `[...]`, in logits.
    """
    eps = torch.finfo(dtype).eps
    if eps <= torch.finfo(torch.float32).eps:
        return logits.new_full(logits.shape[:-1], 1e-4)
    return 4 * eps * logits.abs().masked_fill(~logits.isfinite() | (logits <= _MASKED), 0).amax(dim=-1)


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

    Greedy: the token's processed score must be within the threshold of the best. Sampling: its score after the noise
    must, for `torch.multinomial` chooses argmax p / q with q one `[rows, vocabulary]` draw of Exp(1) a step. A token
    that top-k, top-p and the like cut off (or cut off for whoever beat it) is judged with the logits around that cut
    shifted by the threshold, too. Beam search: the row's score, sum of log p / length ** length_penalty, must be at
    least the expected row's less the threshold, and the hypotheses of a prompt must differ. That is an approximation: a
    beam lost at a near tie early on may cost more than the threshold in the end.

    In a mixture of experts a near tie of the *router* makes the logits jump, which no threshold on them covers.

    Args:
        model: The model, patched or not: it runs without a cache, which is stock in both.
        input_ids: `[batch, width]`, the prompts, left-padded.
        expected: What stock returned, prompts included: `[batch * num_return_sequences, width + steps]`, or the whole
            output object.
        actual: What the engine returned; may be wider or narrower than `expected`.
        attention_mask: As given to `generate()`.
        generation_config: As given to `generate()`.
        seed: Sampling: the seed of torch's generator right before each call.
        threshold: Replaces `near_tie_threshold(model.dtype, logits)`: in logits; of beam search in nats a token.
        **generate_kwargs: The other arguments of `generate()`. Processors and criteria of your own are copied, as two
            texts go through them; criteria get no scores.

    Raises:
        ValueError: Shapes or prompts don't fit, the mode can't be judged, or `expected` itself does not pass: it is
            not what stock makes of these arguments.
    """
    if threshold is not None and not threshold >= 0:
        raise ValueError(f"threshold must not be negative, got {threshold}")
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
        raise ValueError(f"input_ids must be a tensor [batch, width], got {getattr(input_ids, 'shape', input_ids)}")
    if attention_mask is not None:
        generate_kwargs["attention_mask"] = attention_mask
    stock, found = (
        _read(name, output, _prepare(model, input_ids, generation_config, generate_kwargs))
        for name, output in (("expected", expected), ("actual", actual))
    )
    call = stock.call
    mode = call.config.get_generation_mode(generate_kwargs.get("assistant_model"))
    if mode is GenerationMode.SAMPLE and seed is None:
        raise ValueError("sampling is judged by replaying its noise: give the seed of both calls")
    if mode.value not in ("greedy_search", "sample", "beam_search", "assisted_generation") or (
        mode is GenerationMode.ASSISTED_GENERATION and call.config.do_sample
    ):
        raise ValueError(f"do_sample={call.config.do_sample} in mode {mode.value!r} can't be judged")

    width = max(stock.tokens.shape[1], found.tokens.shape[1])
    one, other = (functional.pad(side.tokens, (0, width - side.tokens.shape[1]), value=-1) for side in (stock, found))
    rows = (one != other).any(dim=1).nonzero()[:, 0].tolist()
    starts = {row: int((one[row] != other[row]).long().argmax()) for row in rows}
    divergences: list[Divergence] = []
    if starts:
        with _eval_mode(call.model):
            if call.is_beam_search:
                divergences = _judge_beams(stock, found, starts, threshold)
            else:
                divergences = _judge_tokens(stock, found, starts, seed, threshold)
    return ComparisonReport(not starts, tuple(divergences), int((found.tokens >= 0).sum()))


@dataclass(frozen=True)
class _Call:
    """What a `generate()` call hands its decoding loop; `input_ids` is `[loop_rows, width]`, beams side by side."""

    model: PreTrainedModel  # of a wrapped model the inner one
    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: dict[str, Any]

    @property
    def is_beam_search(self) -> bool:
        return self.config.num_beams > 1

    @property
    def returned_rows(self) -> Tensor:
        """`[loop_rows]`: the returned row that stands in each row of the loop (beams repeat them)."""
        rows = torch.arange(len(self.input_ids), device=self.input_ids.device)
        beams, returned = self.config.num_beams, self.config.num_return_sequences
        return rows // beams * returned + rows % beams % returned if self.is_beam_search else rows


@dataclass(frozen=True)
class _Side:
    """What one side generated in a call. `filled`: `[rows, steps]`, as given; `tokens`: the same, -1 for padding behind
    a row's end; `lengths`: `[rows]`, tokens up to the row's end; `is_ended`: `[rows]`, whether a criterion ended it.
    """

    call: _Call
    filled: Tensor
    tokens: Tensor
    lengths: Tensor
    is_ended: Tensor

    def token(self, row: int, step: int) -> int | None:
        """The token there, `None` behind the row's end."""
        token = int(self.tokens[row, step]) if step < self.tokens.shape[1] else -1
        return None if token < 0 else token


def _prepare(model: Any, input_ids: Tensor, config: GenerationConfig | None, kwargs: dict[str, Any]) -> _Call:
    """Has `generate()` prepare the call, and takes it in the decoding loop's place."""
    calls: list[_Call] = []

    def loop(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor:
        for name in ("past_key_values", "use_cache", "output_attentions", "output_hidden_states"):
            model_kwargs.pop(name, None)
        calls.append(_Call(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs))
        return input_ids

    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError("encoder-decoder models are not supported")
    kwargs = {name: value for name, value in kwargs.items() if name not in ("streamer", "past_key_values")}
    for name in ("logits_processor", "stopping_criteria"):
        if kwargs.get(name) is not None:  # a model that they hold stays the model
            kwargs[name] = copy.deepcopy(kwargs[name], {id(model): model})
    model.generate(input_ids=input_ids, generation_config=config, custom_generate=loop, **kwargs)
    return calls[0]


def _read(name: str, output: Tensor | ModelOutput, call: _Call) -> _Side:
    """Checks what a `generate()` returned against its call, and finds where its rows end."""
    ids: Any = getattr(output, "sequences", output)
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise ValueError(f"{name} must be token ids [rows, length] or a generate() output, got {ids!r}")
    source, prompt = call.returned_rows, call.input_ids.shape[1]
    num_rows = int(source[-1]) + 1
    if len(ids) != num_rows or ids.shape[1] < prompt:
        raise ValueError(f"{name} has shape {list(ids.shape)}; the call returns {num_rows} rows of {prompt} or more")
    ids = ids.to(call.input_ids.device)
    for place, column in (ids[source, :prompt] != call.input_ids).nonzero()[:1].tolist():
        raise ValueError(f"{name} does not start with its prompt: row {int(source[place])} differs in column {column}")
    filled = ids[:, prompt:]
    steps = filled.shape[1]
    lengths = torch.full((num_rows,), steps, device=ids.device)
    is_ended = torch.zeros_like(lengths, dtype=torch.bool)
    for step in range(steps):
        stops = call.criteria(ids[:, : prompt + step + 1], None) & ~is_ended  # type: ignore[arg-type]
        lengths[stops] = step + 1
        is_ended |= stops
    if not call.is_beam_search and not any(hasattr(criterion, "eos_token_id") for criterion in call.criteria):
        lengths[:] = lengths.max()  # without that criterion stock pads nothing: all rows go on to the last one's end
    config: Any = call.config
    paddings = [config._pad_token_tensor]
    if call.is_beam_search:
        paddings.append(config._eos_token_tensor)  # _beam_search takes it if the padding token is 0
    paddings = [token.flatten()[:1].to(ids.device) for token in paddings if token is not None]
    is_padding = torch.isin(filled, torch.cat(paddings)) if paddings else torch.zeros_like(filled, dtype=torch.bool)
    is_padding &= torch.arange(steps, device=ids.device) >= lengths[:, None]
    return _Side(call, filled, filled.masked_fill(is_padding, -1), lengths, is_ended)


def _step_logits(side: _Side, rows: list[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Teacher-forced logits of some returned rows, step by step, from plain forwards without a cache.

    Yields:
        The step; `[loop_rows, width + step]`, the tokens before it; `[loop_rows, vocabulary]`, raw logits in float32, 0
        in loop rows that stand for none of `rows` (processors want to see all rows of the loop).
    """
    call, model, source = side.call, side.call.model, side.call.returned_rows
    ids = torch.cat([call.input_ids, side.filled[source]], dim=1)
    prompt, steps = call.input_ids.shape[1], side.filled.shape[1]
    wanted = torch.isin(source, torch.tensor(rows, device=source.device)).nonzero()[:, 0]
    kwargs = dict(call.model_kwargs)
    for _ in range(steps):
        kwargs = model._update_model_kwargs_for_generation(ModelOutput(), kwargs)
    window = max(1, _MAX_LOGITS // (len(ids) * model.config.get_text_config(decoder=True).vocab_size))
    for begin in range(0, steps, window):
        end = min(begin + window, steps)
        width = prompt + end - 1  # the last token predicts nothing that is judged
        parts = []
        for part in wanted.split(max(1, _MAX_TOKENS // max(width, 1))):
            given = dict(kwargs)
            for name in _PER_TOKEN:
                if (value := given.get(name)) is not None:
                    value = value[..., :width]
                    given[name] = value[..., part, :] if value.shape[-2] == len(ids) else value
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
            yield step, ids[:, : prompt + step], raw


def _thresholds(call: _Call, logits: Tensor, threshold: float | None) -> Tensor:
    if threshold is not None:
        return logits.new_full(logits.shape[:-1], threshold)
    return near_tie_threshold(call.model.dtype, logits)


def _gaps(scores: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """How far each row's token lies behind the best score, and which token that is: both `[rows]`."""
    best, choices = scores.max(dim=-1)
    return best - scores.gather(-1, tokens[:, None])[:, 0], choices


def _token_gaps(
    side: _Side, rows: list[int], seed: int | None, threshold: float | None
) -> list[list[tuple[float, int, float]]]:
    """For each row and step the token's gap, stock's choice there, and the threshold."""
    call = side.call
    sampled = bool(call.config.do_sample)
    temperature = (call.config.temperature if sampled else None) or 1.0
    generator = torch.Generator(call.input_ids.device)
    if sampled and seed is not None:
        generator.manual_seed(seed)
    results: list[list[tuple[float, int, float]]] = [[] for _ in rows]
    for step, ids, raw in _step_logits(side, rows):
        tokens, limits = side.filled[:, step], _thresholds(call, raw, threshold)
        # One draw of all rows a step, the finished ones included. (log p is a score and a constant.)
        noise = torch.empty_like(raw).exponential_(generator=generator).log() if sampled else 0.0
        gaps, choices = _gaps((call.processors(ids, raw.clone()) - noise) * temperature, tokens)
        if sampled and bool((gaps > limits)[rows].any()):
            shift = limits[:, None]
            above_token, above_choice = (raw > raw.gather(-1, picked[:, None]) for picked in (tokens, choices))
            is_choice = functional.one_hot(choices, raw.shape[-1])
            for logits in (raw - shift * above_token, raw + shift * above_choice, raw - shift * is_choice):
                processors = copy.deepcopy(call.processors, {id(call.model): call.model})
                shifted, _ = _gaps((processors(ids, logits) - noise) * temperature, tokens)
                gaps = torch.where(gaps > limits, gaps.minimum(shifted), gaps)
        for result, *found in zip(results, *(values[rows].tolist() for values in (gaps, choices, limits))):
            result.append((found[0], found[1], found[2]))
    return results


def _judge_tokens(
    stock: _Side, found: _Side, starts: dict[int, int], seed: int | None, threshold: float | None
) -> list[Divergence]:
    """Greedy search and sampling: the tokens of the rows in `starts`, from its step on, each by itself."""
    divergences = []
    sides = [_token_gaps(side, list(starts), seed, threshold) for side in (stock, found)]
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
            token, expected = found.token(row, step), stock.token(row, step) if step == start else choice
            if step == start and expected is not None:
                gap = max(gap, of_stock[step][0])
            if token != expected:
                divergences.append(Divergence(row, step, expected, token, gap, limit))
        divergences += _wrong_end(row, stock, found)
    return divergences


def _beam_scores(side: _Side, rows: list[int], threshold: float | None) -> list[tuple[float, float]]:
    """Each row's score as `_beam_search` computes it, and the threshold on it: the steps' summed, scaled as the score."""
    places = torch.stack([(side.call.returned_rows == row).nonzero()[0, 0] for row in rows])
    lengths = side.lengths[rows]
    sums, limits = torch.zeros(2, len(rows), device=lengths.device)
    for step, ids, raw in _step_logits(side, rows):
        log_probs = side.call.processors(ids, raw.log_softmax(dim=-1))[places, side.filled[rows, step]]
        sums += log_probs.where(step < lengths, 0)
        limits += _thresholds(side.call, raw, threshold)[places].where(step < lengths, 0)
    scale = lengths.clamp(min=1) ** side.call.config.length_penalty
    return list(zip((sums / scale).tolist(), (limits / scale).tolist()))


def _judge_beams(stock: _Side, found: _Side, starts: dict[int, int], threshold: float | None) -> list[Divergence]:
    """Beam search: the score of each row in `starts` against the expected row's."""
    divergences = []
    sides = [_beam_scores(side, list(starts), threshold) for side in (stock, found)]
    for (row, step), (stock_score, stock_limit), (score, limit) in zip(starts.items(), *sides):
        if not math.isfinite(stock_score):
            raise ValueError(f"expected is not what stock generates from these arguments: row {row} has score -inf")
        earlier = range(row - row % found.call.config.num_return_sequences, row)
        is_repeated = any(torch.equal(found.tokens[row], found.tokens[other]) for other in earlier)
        gap = math.inf if is_repeated else stock_score - score
        divergence = Divergence(row, step, stock.token(row, step), found.token(row, step), gap, max(stock_limit, limit))
        divergences += _wrong_end(row, stock, found) or [divergence]
    return divergences


def _wrong_end(row: int, stock: _Side, found: _Side) -> list[Divergence]:
    """At most one divergence: a row that goes on behind its end, or stops before it where the expected row has one."""
    step = int(found.lengths[row])
    if (found.tokens[row, step:] >= 0).any():
        step += int((found.tokens[row, step:] >= 0).long().argmax())
        return [Divergence(row, step, None, found.token(row, step), math.inf, 0.0)]
    if stock.is_ended[row] and not found.is_ended[row]:
        return [Divergence(row, step, stock.token(row, step), None, math.inf, 0.0)]
    return []


@contextmanager
def _eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Within it the model is in eval mode; afterwards each of its modules is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
