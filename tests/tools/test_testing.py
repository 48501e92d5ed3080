"""The near-tie checker: what it certifies, what it catches, and that its scores are stock's own."""

import math
from dataclasses import replace

import pytest
import torch
import transformers as hf
from torch.nn import functional
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteriaList, StopStringCriteria

import hf_paged
from helpers.models import EOS, PAD, VOCAB, build, ragged_batch, random_ids, tiny_lm, tiny_tokenizer, watch_tokens
from hf_paged.testing import ComparisonReport, Divergence, compare_generations, near_tie_threshold, near_ties

BATCH = ragged_batch((7, 4, 2))
PROMPT = 7
STEPS = 12
FIRST = {name: value[:1] for name, value in BATCH.items()}
IDS, MASK = BATCH["input_ids"], BATCH["attention_mask"]
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 0}


@pytest.fixture
def model():
    return build("llama")


def generate(model, *, seed=0, batch=BATCH, **arguments):
    torch.manual_seed(seed)
    return model.generate(**batch, **({"max_new_tokens": STEPS} | arguments))


def compare(model, expected, actual, *, batch=BATCH, **arguments):
    arguments = {"max_new_tokens": STEPS} | arguments
    return compare_generations(
        model, batch["input_ids"], expected, actual, attention_mask=batch["attention_mask"], **arguments
    )


def twin(model, expected, row, step, *, distance=1e-5):
    """Gives an unused token the row of the language-model head that belongs to the token there, but for `distance`.

    Wherever that token wins, the other one is now a near tie. It has another embedding, so other text follows.
    """
    chosen = int(expected[row, PROMPT + step])
    other = next(token for token in range(3, VOCAB) if token not in expected)
    with torch.no_grad():
        model.lm_head.weight[other] = model.lm_head.weight[chosen] * (1 - distance)
    return other


def derail(model, expected, row, step, token, **arguments):
    """`expected`, but in one row another token at a step, and behind it what stock generates from there."""
    end = PROMPT + step
    prompt = torch.cat([expected[row : row + 1, :end], torch.tensor([[token]])], dim=1)
    mask = functional.pad(MASK[row : row + 1], (0, step + 1), value=1)
    actual = expected.clone()
    actual[row, end:] = PAD
    left = expected.shape[1] - end - 1
    if left > 0:
        prompt = model.generate(prompt, attention_mask=mask, max_new_tokens=left, **arguments)
    actual[row, : prompt.shape[1]] = prompt[0]
    return actual


def another_token(expected, row, step):
    """A token that nothing speaks for."""
    return (int(expected[row, PROMPT + step]) - 3 + 40) % (VOCAB - 3) + 3


def faults(report):
    return [(item.row, item.step) for item in report.divergences if not item.is_near_tie]


# ------------------------------------------------------------------------------------------------------- greedy search


def test_identical_rows_need_no_forward(model):
    expected = generate(model)
    forwards = watch_tokens(model)
    report = compare(model, expected, expected.clone())
    assert report and report.identical and report.divergences == () and not forwards
    assert report.num_tokens_checked == 3 * STEPS
    assert str(report) == report.summary == "identical: 36 tokens"


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_near_tie_is_certified_in_every_row_however_padded(model, row):
    other = twin(model, generate(model), row, 3)
    expected = generate(model)
    report = compare(model, expected, derail(model, expected, row, 3, other))
    assert report and not report.identical
    first = report.divergences[0]
    assert (first.row, first.step, first.expected_token, first.actual_token) == (
        row,
        3,
        expected[row, PROMPT + 3],
        other,
    )
    assert 0 < first.gap < first.threshold and first.threshold == pytest.approx(1e-4)
    assert "certified: no fault among" in str(report)


def test_the_threshold_decides(model):
    other = twin(model, generate(model), 1, 3, distance=1e-3)
    expected = generate(model)
    actual = derail(model, expected, 1, 3, other)
    report = compare(model, expected, actual)
    assert not report and faults(report) == [(1, 3)]
    gap = report.divergences[0].gap
    with torch.no_grad():
        ids = expected[1:2, 3 : PROMPT + 3]  # without its padding
        logits = model(ids).logits[0, -1]
    assert gap == pytest.approx(float(logits.max() - logits[other]), abs=1e-5)
    assert compare(model, expected, actual, threshold=gap + 1e-5)
    assert not compare(model, expected, actual, threshold=gap - 1e-5)


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("step", [0, 5, STEPS - 1])
def test_a_wrong_token_is_caught(model, row, step):
    expected = generate(model)
    report = compare(model, expected, derail(model, expected, row, step, another_token(expected, row, step)))
    assert not report and faults(report) == [(row, step)]
    assert "NOT a near tie" in str(report) and "NOT certified: 1 of 1 divergences" in report.summary


def test_a_wrong_token_behind_a_near_tie_is_caught(model):
    other = twin(model, generate(model), 1, 3)
    expected = generate(model)
    tie = derail(model, expected, 1, 3, other)
    assert compare(model, expected, tie)
    wrong = derail(model, tie, 1, 8, another_token(tie, 1, 8))
    report = compare(model, expected, wrong)
    assert not report and faults(report) == [(1, 8)]
    assert report.divergences[0].step == 3 and report.divergences[0].is_near_tie
    assert report.divergences[-1].expected_token == tie[1, PROMPT + 8]


def test_rows_are_judged_each_by_itself(model):
    other = twin(model, generate(model), 2, 4)
    expected = generate(model)
    actual = derail(model, expected, 2, 4, other)
    actual[0] = derail(model, expected, 0, 6, another_token(expected, 0, 6))[0]
    report = compare(model, expected, actual)
    assert faults(report) == [(0, 6)]
    assert next((item.row, item.step) for item in report.divergences) == (0, 6)
    assert (2, 4) in [(item.row, item.step) for item in report.divergences]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=["bf16", "fp16"]
)
def test_real_divergences_of_half_precision_are_certified(dtype):
    """Row by row and batched, the same prompts sooner or later give other texts; not so in float32."""
    model = build("llama", dtype=dtype)
    gaps = []
    for seed in range(60):
        batch = ragged_batch((9, 5, 2), seed=seed)
        width = batch["input_ids"].shape[1]
        expected = generate(model, batch=batch, min_new_tokens=24, max_new_tokens=24)
        actual = expected.clone()
        for row, length in enumerate((9, 5, 2)):
            alone = {name: value[row : row + 1, width - length :] for name, value in batch.items()}
            actual[row, width - length :] = generate(model, batch=alone, min_new_tokens=24, max_new_tokens=24)[0]
        report = compare(model, expected, actual, batch=batch, min_new_tokens=24, max_new_tokens=24)
        assert report, report
        gaps += [item.gap for item in report.divergences]
        if gaps:
            break
    assert gaps, "no seed diverges: the test shows nothing"


# ---------------------------------------------------------------------------------------------------- ends and padding


@pytest.mark.filterwarnings("ignore:torch.*deprecated")
@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}, SAMPLING], ids=["greedy", "beams", "sampling"])
@pytest.mark.parametrize("name", ["tiny_lm", "llama", "qwen3"])
def test_dynamically_quantized_models_are_judged(name, arguments):
    """Their layers scale by the largest number in the whole batch: stock itself chooses otherwise beside other rows."""
    stock = tiny_lm() if name == "tiny_lm" else build(name)
    model = torch.ao.quantization.quantize_dynamic(stock, {torch.nn.Linear})
    expected = generate(model, **arguments)
    seed = {"seed": 0} if "do_sample" in arguments else {}
    with hf_paged.patched(model, block_size=4, num_blocks=256):
        actual = generate(model, **arguments)
        report = compare(model, expected, actual, **arguments, **seed)
    assert report, report
    if arguments:
        return
    assert not report.identical, "the test is too easy"
    for row in range(3):
        wrong = expected.clone()
        wrong[row, PROMPT + 2] = another_token(expected, row, 2)
        assert row in dict(faults(compare(model, expected, wrong)))
    with pytest.raises(ValueError, match="not what stock generates"):
        compare(model, wrong, actual)


def ending_row(model):
    """A text whose row 1 ends early, and the arguments that make it."""
    arguments = {"eos_token_id": int(generate(model)[1, PROMPT + 4]), "pad_token_id": PAD}
    expected = generate(model, **arguments)
    return expected, int((expected[1, PROMPT:] == arguments["eos_token_id"]).nonzero()[0, 0]), arguments


def test_tokens_behind_the_end_are_caught(model):
    expected, end, arguments = ending_row(model)
    actual = expected.clone()
    actual[1, PROMPT + end + 2] = 50
    report = compare(model, expected, actual, **arguments)
    assert not report and report.divergences == (Divergence(1, end + 2, None, 50, math.inf, 0.0),)


def test_texts_that_are_cut_off_are_caught(model):
    other = twin(model, generate(model), 0, 3)
    expected = generate(model)
    report = compare(model, expected, expected[:, :-1])
    last = [(item.row, item.step, item.actual_token, item.gap) for item in report.divergences]
    assert not report and last == [(row, STEPS - 1, None, math.inf) for row in range(3)]
    # Behind a near tie, too.
    report = compare(model, expected[:1], derail(model, expected, 0, 3, other)[:1, :-2], batch=FIRST)
    assert faults(report) == [(0, STEPS - 2)] and report.divergences[0].is_near_tie


def test_a_row_of_any_length_may_end_at_a_near_tie(model):
    """The tie is between going on and ending."""
    expected = generate(model)
    chosen = int(expected[0, PROMPT + 5])
    with torch.no_grad():
        model.lm_head.weight[EOS] = model.lm_head.weight[chosen] * (1 - 1e-5)
    expected = generate(model)
    actual = expected.clone()
    step = (expected[0] == chosen).nonzero()[0, 0]
    actual[0, step] = EOS
    actual[0, step + 1 :] = PAD
    report = compare(model, expected, actual)
    assert report and report.divergences[0].actual_token == EOS and len(report.divergences) == 1


def test_without_an_end_token_all_rows_go_on_to_the_last_end():
    model = build("llama")
    model.generation_config.eos_token_id = None
    expected = generate(model)
    assert compare(model, expected, expected.clone()).num_tokens_checked == 3 * STEPS
    assert faults(compare(model, expected, derail(model, expected, 2, 5, another_token(expected, 2, 5)))) == [(2, 5)]


def test_stop_strings():
    model, tokenizer = tiny_lm(), tiny_tokenizer()
    batch = tokenizer(["Once upon a time"], return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    text = model.generate(ids, attention_mask=mask, max_new_tokens=24)[0]
    word = tokenizer.decode(text[ids.shape[1] + 6 : ids.shape[1] + 8])
    arguments = {"attention_mask": mask, "max_new_tokens": 24, "tokenizer": tokenizer, "stop_strings": [word]}
    expected = model.generate(ids, **arguments)
    assert expected.shape[1] < len(text)
    assert compare_generations(model, ids, expected, expected.clone(), **arguments).identical
    assert faults(compare_generations(model, ids, expected, text[None], **arguments))
    assert faults(compare_generations(model, ids, expected, expected[:, :-1], **arguments))
    del arguments["stop_strings"], arguments["tokenizer"]
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [word])])
    assert faults(compare_generations(model, ids, expected, text[None], stopping_criteria=criteria, **arguments))


# ---------------------------------------------------------------------------------------------------------- processors


def test_scores_are_processed_before_they_are_judged(model):
    plain = generate(model)
    arguments = {"repetition_penalty": 3.0, "no_repeat_ngram_size": 2}
    expected = generate(model, **arguments)
    row, column = (plain != expected).nonzero()[0].tolist()
    step = column - PROMPT
    # The raw logits' favourite, which the processors put back.
    actual = derail(model, expected, row, step, int(plain[row, column]), **arguments)
    report = compare(model, expected, actual, **arguments)
    assert (row, step) in faults(report)
    with pytest.raises(ValueError, match=r"expected is not what stock generates .* row \d, step \d+"):
        compare(model, expected, actual)


def test_a_near_tie_of_processed_scores_is_certified(model):
    arguments = {"repetition_penalty": 1.5}
    other = twin(model, generate(model, **arguments), 0, 2)
    expected = generate(model, **arguments)
    actual = derail(model, expected, 0, 2, other, **arguments)
    assert compare(model, expected, actual, **arguments)
    assert compare(
        model,
        expected,
        actual,
        generation_config=GenerationConfig(max_new_tokens=STEPS, **arguments),
        max_new_tokens=STEPS,
    )


def test_a_banned_token_is_no_near_tie_of_anything(model):
    expected = generate(model, min_new_tokens=STEPS)
    actual = derail(model, expected, 1, 3, EOS)
    report = compare(model, expected, actual, min_new_tokens=STEPS, threshold=100.0)
    first = next(item for item in report.divergences if not item.is_near_tie)
    assert (first.row, first.step, first.gap) == (1, 3, math.inf)


def test_processors_see_all_rows_of_the_call(model):
    """Row 1 may only use the upper half of the vocabulary, row 2 only the lower."""
    allowed = [range(VOCAB), range(48, VOCAB), range(3, 48)]
    arguments = {"prefix_allowed_tokens_fn": lambda row, _: list(allowed[row])}
    expected = generate(model, **arguments)
    for row in (1, 2):
        for banned in (True, False):
            wrong = next(token for token in allowed[3 - row if banned else row] if token not in expected[row])
            actual = expected.clone()
            actual[row, PROMPT + 4 :] = wrong
            report = compare(model, expected, actual, threshold=100.0, **arguments)
            assert {item.gap == math.inf for item in report.divergences} == {banned} and bool(report) != banned


class Alternating(LogitsProcessor):
    """Shifts the scores of odd or even tokens, taking turns: it remembers how often it was called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores[:, self.calls % 2 :: 2] += 50.0
        return scores


def test_processors_with_a_state_start_anew_for_each_side(model):
    expected = generate(model, logits_processor=[Alternating()])
    processor = Alternating()
    report = compare(
        model,
        expected,
        derail(model, expected, 0, STEPS - 1, another_token(expected, 0, STEPS - 1)),
        logits_processor=[processor],
    )
    assert faults(report) == [(0, STEPS - 1)] and processor.calls == 0


def test_guidance(model):
    """Its processor runs the model, with a cache of its own."""
    expected = generate(model, batch=FIRST, guidance_scale=1.5)
    actual = expected.clone()
    actual[0, -1] = another_token(expected, 0, STEPS - 1)
    report = compare(model, expected, actual, batch=FIRST, guidance_scale=1.5)
    assert faults(report) == [(0, STEPS - 1)]


# ------------------------------------------------------------------------------------------------------------ sampling


@pytest.mark.parametrize("returned", [1, 2])
def test_sampled_tokens_are_judged_with_their_noise(model, returned):
    """The gap is that of torch.multinomial, worked out here from stock's scores."""
    arguments = SAMPLING | {"num_return_sequences": returned}
    stock = generate(model, seed=5, return_dict_in_generate=True, output_scores=True, **arguments)
    expected, row, step = stock.sequences, 2 * returned - 1, 6
    torch.manual_seed(5)
    for scores in stock.scores[: step + 1]:
        chances = scores.softmax(dim=-1)
        noise = torch.empty_like(chances).exponential_()
    perturbed = (chances / noise).log()
    assert int(perturbed[row].argmax()) == expected[row, PROMPT + step]
    second = int(perturbed[row].topk(2).indices[1])
    actual = expected.clone()
    actual[row, PROMPT + step] = second
    report = compare(model, stock, actual, seed=5, **arguments)
    assert not report and faults(report)[0] == (row, step)
    gap = 0.7 * float(perturbed[row].max() - perturbed[row, second])
    first = report.divergences[0]
    assert first.gap == pytest.approx(gap, abs=1e-4) and first.actual_token == second
    report = compare(model, stock, actual, seed=5, threshold=gap + 1e-3, **arguments)
    assert report.divergences[0].is_near_tie


def test_sampled_rows_go_on_with_the_same_noise_behind_a_near_tie(model):
    expected = generate(model, seed=5, **SAMPLING)
    # Another computation of the same text, with the token at one step given.
    column = PROMPT + 3
    given = another_token(expected, 1, 3)

    class Force(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == column:
                scores[1] = scores[1].new_full(scores[1].shape, -math.inf)
                scores[1, given] = 0.0
            return scores

    actual = generate(model, seed=5, logits_processor=[Force()], **SAMPLING)
    assert actual[1, column] == given and (actual[[0, 2]] == expected[[0, 2]]).all()
    report = compare(model, expected, actual, seed=5, **SAMPLING)
    assert faults(report) == [(1, 3)] and len(report.divergences) == 1


def test_a_tie_for_the_last_place_of_top_k_is_certified(model):
    """Only one of two tied tokens comes through: the other has no score at all."""
    arguments = {"do_sample": True, "top_k": 1}
    other = twin(model, generate(model, **arguments), 0, 3)
    expected = generate(model, **arguments)
    report = compare(model, expected, derail(model, expected, 0, 3, other), seed=0, **arguments)
    assert report and report.divergences[0].actual_token == other
    wrong = derail(model, expected, 0, 3, another_token(expected, 0, 3))
    assert faults(compare(model, expected, wrong, seed=0, **arguments))[0] == (0, 3)


def test_a_winner_that_barely_came_through_top_k_may_be_missing(model):
    """Stock draws the second of two tokens, and the third is tied with it: an engine that lets the third through draws
    the first."""
    arguments = {"do_sample": True, "top_k": 2, "max_new_tokens": 1}
    for seed in range(50):
        expected = generate(model, seed=seed, **arguments)
        with torch.no_grad():
            best = model(IDS[:1]).logits[0, -1].topk(3).indices.tolist()
        if expected[0, -1] == best[1]:
            break
    with torch.no_grad():
        model.lm_head.weight[best[2]] = model.lm_head.weight[best[1]] * (1 - 1e-5)
    torch.manual_seed(seed)
    noise = torch.empty(3, VOCAB).exponential_()[0].log()
    logits = model(IDS[:1]).logits[0, -1]
    drawn = logits - noise
    expected = generate(model, seed=seed, **arguments)
    assert expected[0, -1] == best[1]
    without = max((best[0], best[2]), key=lambda token: drawn[token])
    actual = expected.clone()
    actual[0, -1] = without
    report = compare(model, expected, actual, seed=seed, **arguments)
    assert report and not report.identical
    actual[0, -1] = another_token(expected, 0, 0)
    assert not compare(model, expected, actual, seed=seed, **arguments)


@pytest.mark.parametrize(
    ("top_k", "top_p", "is_coarse"), [(12, 1.0, False), (12, 0.8, False), (50, 0.8, False), (6, 0.8, True)]
)
def test_what_rounding_does_at_the_edges_of_top_k_and_top_p(top_k, top_p, is_coarse):
    """20,000 draws from noisy logits, judged by the logits without noise; coarse logits have exact ties, as in bf16."""
    rows, width, limit = 20_000, 60, 0.1 if is_coarse else 0.05
    generator = torch.Generator().manual_seed(0)

    def rounded(logits):
        return (logits * 64).round() / 64 if is_coarse else logits

    def judged(logits, tokens):
        gaps, choices = near_ties._gaps((warpers(None, logits.clone()) - noise) * 0.8, tokens)
        return gaps > limit, choices

    raw = rounded(1.3 * torch.randn(rows, width, generator=generator))
    noise = torch.empty(rows, width).exponential_(generator=generator).log()
    error = limit * (torch.rand(rows, width, generator=generator) - 0.5)
    engine = rounded(raw + error * (0.3 if is_coarse else 1.0))
    warpers = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(0.8), hf.TopKLogitsWarper(top_k)])
    if top_p < 1:
        warpers.append(hf.TopPLogitsWarper(top_p))
    tokens = (warpers(None, engine.clone()) - noise).argmax(dim=-1)
    alarms, choices = judged(raw, tokens)
    falsely = alarms.clone()
    for logits in near_ties._shifted_cuts(raw, raw / 0.8 - noise, tokens, choices, torch.full((rows, 1), limit)):
        falsely &= judged(logits, tokens)[0]
    assert alarms.sum() > 50, "too few tokens at an edge: the test shows nothing"
    assert falsely.sum() <= (0.04 * alarms.sum() if is_coarse else 0)


def test_rows_that_are_not_judged_pass_any_processor():
    """In half precision their threshold is 0, and what they are rounded to must be numbers all the same."""
    model = build("llama", dtype=torch.bfloat16)
    arguments = {"do_sample": True, "top_k": 5, "eta_cutoff": 1e-3, "max_new_tokens": 3}
    expected = generate(model, **arguments)
    actual = expected.clone()
    actual[1, PROMPT + 2] = another_token(expected, 1, 2)
    assert faults(compare(model, expected, actual, seed=0, **arguments)) == [(1, 2)]


# --------------------------------------------------------------------------------------------------------- beam search

BEAMS = {"num_beams": 4, "num_return_sequences": 2, "repetition_penalty": 1.2, "length_penalty": 0.7}


def test_hypotheses_are_judged_by_their_scores(model):
    """The gap is the difference of stock's own sequences_scores."""
    stock = generate(model, return_dict_in_generate=True, output_scores=True, **BEAMS)
    expected, scores = stock.sequences, stock.sequences_scores
    swapped = [1, 0, 2, 3, 5, 4]
    actual = expected[swapped]
    report = compare(model, expected, actual, **BEAMS)
    assert not report and {item.row for item in report.divergences} == {0, 1, 4, 5}
    for item in report.divergences:
        assert item.gap == pytest.approx(float(scores[item.row] - scores[swapped[item.row]]), abs=1e-5)
        assert item.is_near_tie == (item.gap <= item.threshold)
    worst = max(item.gap / item.threshold for item in report.divergences)
    assert compare(model, expected, actual, threshold=1e-4 * worst * 1.01, **BEAMS)
    assert not compare(model, expected, actual, threshold=1e-4 * worst * 0.99, **BEAMS)


@pytest.mark.parametrize("row", range(6))
def test_a_wrong_token_in_a_hypothesis_is_caught(model, row):
    expected = generate(model, **BEAMS)
    actual = expected.clone()
    actual[row, PROMPT + 2] = another_token(expected, row, 2)
    report = compare(model, expected, actual, **BEAMS)
    assert faults(report) == [(row, 2)]


def test_a_near_tie_of_hypotheses_is_certified(model):
    other = twin(model, generate(model, **BEAMS), 0, STEPS - 1)
    arguments = BEAMS | {"num_return_sequences": 1}
    expected = generate(model, **arguments)
    actual = expected.clone()
    last = int(expected[0, -1])
    with torch.no_grad():  # a tie at the last step, however the text changed
        model.lm_head.weight[other] = model.lm_head.weight[last] * (1 - 1e-6)
    expected = generate(model, **arguments)
    actual = expected.clone()
    actual[0, -1] = other if expected[0, -1] == last else last
    report = compare(model, expected, actual, **arguments)
    assert report and not report.identical


def test_hypotheses_that_end_early_are_scored_by_their_length(model):
    plain = generate(model, **BEAMS)
    arguments = BEAMS | {"eos_token_id": int(plain[0, PROMPT + 4]), "pad_token_id": PAD}
    stock = generate(model, return_dict_in_generate=True, output_scores=True, **arguments)
    expected = stock.sequences
    assert (expected[:, PROMPT:] == arguments["eos_token_id"]).any()
    swapped = [1, 0, 3, 2, 5, 4]
    report = compare(model, expected, expected[swapped], **arguments)
    for item in report.divergences:
        assert item.gap == pytest.approx(
            float(stock.sequences_scores[item.row] - stock.sequences_scores[swapped[item.row]]), abs=1e-5
        )


DRAWN_BEAMS = {"do_sample": True, "num_beams": 3, "num_return_sequences": 2, "typical_p": 0.8, "max_new_tokens": 6}


def test_drawn_beams_are_drawn_again_from_moved_logits(model):
    """The draws of a model whose head differs a little: found with moves of that size, and with no smaller ones."""
    other = build("llama")
    with torch.no_grad():
        other.lm_head.weight += 1e-4 * torch.randn(
            other.lm_head.weight.shape, generator=torch.Generator().manual_seed(1)
        )
    for seed in range(100):
        expected, actual = (generate(each, seed=seed, batch=FIRST, **DRAWN_BEAMS) for each in (model, other))
        if not torch.equal(expected, actual):
            break
    report = compare(model, expected, actual, seed=seed, threshold=5e-3, batch=FIRST, **DRAWN_BEAMS)
    assert report and not report.identical and all(item.gap > 1e-5 for item in report.divergences)
    with pytest.raises(ValueError, match="expected is not what stock generates"):
        compare(model, actual, expected, seed=seed, threshold=1e-6, batch=FIRST, **DRAWN_BEAMS)


def test_a_wrong_token_in_drawn_beams_is_caught(model):
    expected = generate(model, batch=FIRST, **DRAWN_BEAMS)
    actual = expected.clone()
    actual[1, PROMPT + 3] = another_token(expected, 1, 3)
    report = compare(model, expected, actual, seed=0, batch=FIRST, **DRAWN_BEAMS)
    assert faults(report) == [(1, 3)]


# ------------------------------------------------------------------------------------------------------------ the judge


def test_the_judge_leaves_model_and_generator_as_they_were():
    """And training mode, with dropout in it, does not reach the judge."""
    model = build("gpt2")
    expected = generate(model, seed=5, **SAMPLING)
    actual = expected.clone()
    actual[0, -1] = another_token(expected, 0, STEPS - 1)
    model.train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert faults(compare(model, expected, actual, seed=5, **SAMPLING)) == [(0, STEPS - 1)]
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


def test_a_patched_model_judges_as_the_stock_one(model):
    other = twin(model, generate(model), 1, 3)
    expected = generate(model)
    tie = derail(model, expected, 1, 3, other)
    wrong = derail(model, tie, 1, 8, another_token(tie, 1, 8))
    reports = [compare(model, expected, actual) for actual in (tie, wrong)]
    with hf_paged.patched(model, block_size=4, num_blocks=64):
        assert torch.equal(generate(model), expected)
        steps = model.paged.stats().num_steps
        assert [compare(model, expected, actual) for actual in (tie, wrong)] == reports
        assert model.paged.stats().num_steps == steps
        assert model.paged.stats().num_free_blocks == model.paged.stats().num_blocks


@pytest.mark.parametrize("arguments", [{}, SAMPLING, BEAMS], ids=["greedy", "sampling", "beams"])
def test_memory_is_bounded_without_other_results(model, monkeypatch, arguments):
    expected = generate(model, seed=5, **arguments)
    actual = expected.clone()
    actual[:, PROMPT + 2] = actual[:, PROMPT + 2] % 90 + 3
    whole = compare(model, expected, actual, seed=5, **arguments)
    monkeypatch.setattr(near_ties, "_MAX_LOGITS", 3 * 4 * VOCAB * 2)
    monkeypatch.setattr(near_ties, "_MAX_TOKENS", 20)
    forwards = watch_tokens(model)
    parts = compare(model, expected, actual, seed=5, **arguments)
    assert max(forwards) <= 20 and len(forwards) > 10
    assert len(whole.divergences) == len(parts.divergences)
    for one, other in zip(whole.divergences, parts.divergences):
        assert replace(one, gap=0.0) == replace(other, gap=0.0)
        assert one.gap == pytest.approx(other.gap, abs=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "gemma2", "bloom", "falcon_alibi", "mpt"])
def test_other_architectures(name):
    model = build(name)
    expected = generate(model)
    wrong = derail(model, expected, 1, 4, another_token(expected, 1, 4))
    assert faults(compare(model, expected, wrong)) == [(1, 4)]


def test_the_mask_may_be_left_to_generate(model):
    ids = random_ids(2, 5)
    expected = model.generate(ids, max_new_tokens=6)
    actual = expected.clone()
    actual[1, -1] = (actual[1, -1] + 40) % 90 + 3
    assert faults(compare_generations(model, ids, expected, actual, max_new_tokens=6)) == [(1, 5)]


# ------------------------------------------------------------------------------------------------ thresholds and errors


def test_thresholds():
    logits = torch.tensor([[1.0, -20.0, 16.0], [0.5, 0.25, 0.0]])
    assert near_tie_threshold(torch.float32, logits).tolist() == pytest.approx([1e-4, 1e-4])
    assert near_tie_threshold(torch.float64, logits).tolist() == pytest.approx([1e-4, 1e-4])
    assert near_tie_threshold(torch.bfloat16, logits).tolist() == [4 * 20 / 128, 4 * 0.5 / 128]
    assert near_tie_threshold(torch.float16, logits).tolist() == [4 * 20 / 1024, 4 * 0.5 / 1024]
    assert near_tie_threshold(torch.qint8, logits).tolist() == [4 * 20 / 16, 4 * 0.5 / 16]
    filled = torch.tensor([1.0, -2.0, -math.inf, -1e9, torch.finfo(torch.bfloat16).min])
    assert near_tie_threshold(torch.bfloat16, filled).item() == 4 * 2 / 128


def test_reports():
    tie, fault = Divergence(0, 1, 5, 6, 1e-5, 1e-4), Divergence(1, 2, None, 6, math.inf, 0.0)
    assert tie.is_near_tie and not fault.is_near_tie
    assert bool(ComparisonReport(False, (tie,), 9)) and not ComparisonReport(False, (tie, fault), 9)
    lines = str(ComparisonReport(False, (tie, fault), 9)).splitlines()
    assert lines[0] == "NOT certified: 1 of 2 divergences (2 rows, 9 tokens)"
    assert lines[1].startswith("  row 1, step 2: expected None, got 6, gap inf") and "row 0" in lines[2]
    assert str(ComparisonReport(False, (tie,) * 30, 9)).splitlines()[20:] == ["  " + str(tie), "  ..."]
    assert not Divergence(0, 0, 1, 2, math.nan, 1.0).is_near_tie


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actual": lambda ids: ids[:2]}, r"actual has shape \[2, 19\]; the call returns 3 rows of 7 or more"),
        ({"expected": lambda ids: ids[0]}, r"expected must be token ids \[rows, length\]"),
        ({"actual": lambda ids: ids[:, PROMPT:][:, :5]}, r"actual has shape \[3, 5\]"),
        ({"actual": lambda ids: ids[:, PROMPT:]}, "actual does not start with its prompt: row 0 differs in column 0"),
        ({"actual": lambda ids: ids[[0, 2, 1]]}, "actual does not start with its prompt: row 1 differs in column 3"),
        ({"actual": lambda ids: ids.float()}, "actual must be token ids"),
        ({"actual": lambda ids: ids.tolist()}, "actual must be token ids"),
        ({"threshold": -1.0}, "threshold must not be negative, got -1.0"),
        ({"threshold": math.nan}, "threshold must not be negative, got nan"),
        ({"do_sample": True}, "give the seed"),
        ({"do_sample": True, "num_beams": 2}, "give the seed"),
        ({"do_sample": True, "prompt_lookup_num_tokens": 2, "seed": 0}, "'assisted_generation' with do_sample=True"),
        ({"num_return_sequences": 2, "num_beams": 2}, "the call returns 6 rows"),
    ],
)
def test_errors(model, changes, message):
    expected = generate(model)
    sides = {name: changes.get(name, lambda ids: ids)(expected) for name in ("expected", "actual")}
    others = {name: value for name, value in changes.items() if name not in sides}
    with pytest.raises(ValueError, match=message):
        compare_generations(model, IDS, **sides, attention_mask=MASK, **({"max_new_tokens": STEPS} | others))


def test_errors_of_prompts_and_models(model):
    with pytest.raises(ValueError, match=r"input_ids must have shape \[batch, width\], got \[7\]"):
        compare_generations(model, IDS[0], IDS, IDS)
    t5 = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCAB, d_model=8, num_layers=1, num_heads=1, d_ff=8))
    with pytest.raises(ValueError, match="encoder-decoder"):
        compare_generations(t5, IDS, IDS, IDS)
