"""`exact_training`: log-probabilities are those of sampling, bit by bit, and gradients stock's within rounding."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import hf_paged
from helpers.models import TINY_LM, build
from helpers.state_models import build_state_model
from helpers.waiting import PATIENCE
from hf_paged.model import exact_forward

peft = pytest.importorskip("peft", reason="of the extra dev")

LENGTHS = (5, 17, 40, 1, 23)
FAMILIES = ["tiny_lm", "qwen3_moe", "mistral", "gemma2", "gpt_oss"]  # experts, windows, softcaps, sinks
LORA = {"tiny_lm": ["q_proj", "v_proj", "down_proj", "lm_head"], "qwen3_moe": ["q_proj", "o_proj"]}


def made(family: str, dtype: torch.dtype = torch.float32, has_lora: bool = False) -> Any:
    """A patched model in training mode."""
    model: Any = AutoModelForCausalLM.from_pretrained(TINY_LM) if family == "tiny_lm" else build(family)
    model = model.to(dtype)
    if has_lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=LORA[family]))
        generator = torch.Generator().manual_seed(0)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(std=0.05, generator=generator)
    return hf_paged.patch(model, num_blocks=256).train()


def engine_of(model: Any) -> hf_paged.Engine:
    engine: hf_paged.Engine = model.paged
    return engine


def rollouts(
    model: Any, temperature: float = 1.0, num_tokens: int = 12, **settings: Any
) -> list[hf_paged.RequestOutput]:
    vocab = model.config.vocab_size
    draws = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, vocab, (n,), generator=draws).tolist() for n in LENGTHS]
    asked = {"do_sample": True, "top_k": 0, "temperature": temperature, "eos_token_id": None, "pad_token_id": 0}
    asked |= {"logprobs": 0, "logprobs_mode": "processed", "max_new_tokens": num_tokens} | settings
    requests = [engine_of(model).submit(prompt, seed=n, **asked) for n, prompt in enumerate(prompts)]
    return [request.result(PATIENCE) for request in requests]


def batch(outputs: list[hf_paged.RequestOutput], side: str = "left") -> dict[str, Tensor]:
    """Padded rows, with the sampled tokens as labels."""
    texts = [output.prompt_token_ids + output.token_ids for output in outputs]
    width = max(map(len, texts))
    ids, mask = torch.zeros(len(texts), width, dtype=torch.long), torch.zeros(len(texts), width, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (text, output) in enumerate(zip(texts, outputs, strict=True)):
        first = width - len(text) if side == "left" else 0
        ids[row, first : first + len(text)], mask[row, first : first + len(text)] = torch.tensor(text), 1
        labels[row, first + len(output.prompt_token_ids) : first + len(text)] = torch.tensor(output.token_ids)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def trained_on(model: Any, given: dict[str, Tensor], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The loss, and log-probabilities of labelled tokens, row by row."""
    output = model(**given)
    labels = given["labels"][:, 1:]
    found = hf_paged.token_log_probs(output.logits[:, :-1], labels.clamp(min=0), temperature=temperature)
    return output.loss, found[labels != -100]


def sampled(outputs: list[hf_paged.RequestOutput]) -> Tensor:
    return torch.tensor([each.logprob for output in outputs for each in (output.logprobs or [])[0]])


def gradients(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**given, use_cache=False).loss.backward()
    return {name: own.grad.clone() for name, own in model.named_parameters() if own.grad is not None}


CASES = [(family, dtype, False) for family in FAMILIES for dtype in (torch.float32, torch.bfloat16)]
CASES += [(family, dtype, True) for family in LORA for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("family", "dtype", "has_lora"), CASES)
def test_log_probabilities_are_those_of_sampling(family: str, dtype: torch.dtype, has_lora: bool) -> None:
    """Would break: attention, products, the head or the softmax in another order of sums than in sampling."""
    model = made(family, dtype, has_lora)
    for temperature, side in ((1.0, "left"), (0.7, "right")):
        outputs = rollouts(model, temperature)
        given = batch(outputs, side)
        with hf_paged.exact_training(model):
            loss, found = trained_on(model, given, temperature)
            with torch.no_grad():
                _, unlearnt = trained_on(model, given | {"use_cache": False}, temperature)
        assert torch.equal(found.detach(), sampled(outputs)) and torch.equal(unlearnt, found.detach())
        assert loss.requires_grad and found.requires_grad
    _, stock = trained_on(model, given, temperature)
    assert not torch.equal(stock.detach(), sampled(outputs))
    difference = (stock - found).abs()  # in bfloat16 a router may choose another expert
    assert difference.max() < 1e-4 if dtype is torch.float32 else difference.median() < 0.05


@pytest.mark.parametrize(("family", "has_lora"), [*((family, False) for family in FAMILIES), ("tiny_lm", True)])
def test_gradients_are_stocks(family: str, has_lora: bool) -> None:
    """Would break: a parameter without gradient, rows that see each other, a layer differentiated at another input."""
    model = made(family, has_lora=has_lora)
    given = batch(rollouts(model))
    expected = gradients(model, given)
    with hf_paged.exact_training(model):
        found = gradients(model, given)
    assert found.keys() == expected.keys() and len(found) > 3
    differences = {n: float((found[n] - expected[n]).norm() / expected[n].norm()) for n in expected}
    assert max(differences.values()) <= 1e-5, differences
    assert gradients(model, given).keys() == expected.keys()
    assert all(torch.equal(own, expected[n]) for n, own in gradients(model, given).items())  # outside, as before


@pytest.mark.parametrize("is_seen", [False, True])
def test_the_last_product_of_a_layer_is_not_computed_again(monkeypatch: pytest.MonkeyPatch, is_seen: bool) -> None:
    """Would break: a product that nothing reads, computed; zeros in its place where a hook looks on."""
    model = made("tiny_lm")
    given = batch(rollouts(model))
    expected, shapes, seen = gradients(model, given), [], []
    apply = exact_forward.Product.apply
    # One number, expanded: of all its strides, none is more than 0.
    monkeypatch.setattr(
        exact_forward.Product, "apply", lambda value, *rest: (shapes.append(value[0].stride()), apply(value, *rest))[1]
    )
    with hf_paged.exact_training(model):
        model.zero_grad()
        loss = model(**given, use_cache=False).loss
        if is_seen:
            model.model.layers[1].mlp.register_forward_hook(lambda *found: seen.append(found[-1].abs().amin()))
        loss.backward()
    assert sum(not any(strides) for strides in shapes) == len(model.model.layers) - is_seen
    assert len(seen) == is_seen and all(each > 0 for each in seen)
    differences = [(own.grad - expected[n]).norm() / expected[n].norm() for n, own in model.named_parameters()]
    assert max(differences) <= 1e-5


def test_texts_one_after_another_in_a_row() -> None:
    """Would break: texts packed into one row, told apart by positions alone, that see each other."""
    model = made("tiny_lm")
    first, second = torch.arange(5, 25)[None], torch.arange(40, 52)[None]
    with hf_paged.exact_training(model):
        apart = [model(input_ids=each).logits for each in (first, second)]
        positions = torch.cat([torch.arange(20), torch.arange(12)])[None]
        found = model(input_ids=torch.cat([first, second], dim=1), position_ids=positions).logits
        last = model(input_ids=first, logits_to_keep=1).logits
        chosen = model(input_ids=first, logits_to_keep=torch.tensor([3, 7]), return_dict=False)[0]
    assert torch.equal(found, torch.cat(apart, dim=1))
    assert torch.equal(last, apart[0][:, -1:]) and torch.equal(chosen, apart[0][:, [3, 7]])


def test_training_follows_stock() -> None:
    """Would break: layers that go on with the weights of an earlier step; other gradients for the optimizer."""
    losses = []
    for is_exact in (False, True):
        model = made("tiny_lm")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        given = batch(rollouts(model))
        own = []
        for _ in range(8):
            optimizer.zero_grad()
            if is_exact:
                with hf_paged.exact_training(model):
                    loss = model(**given).loss
                    loss.backward()
                    optimizer.step()
            else:
                loss = model(**given).loss
                loss.backward()
                optimizer.step()
            own.append(loss.item())
        if is_exact:
            outputs = rollouts(model)
            with hf_paged.exact_training(model):
                assert torch.equal(trained_on(model, batch(outputs))[1].detach(), sampled(outputs))
        losses.append(own)
    assert losses[0][-1] < losses[0][0] - 0.5
    assert max(abs(own - its) for own, its in zip(*losses, strict=True)) < 1e-4


def test_an_optimizer_waits_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: weights that are written to while a step of the engine reads them."""
    model = made("tiny_lm")
    loop, runner = model.paged.core.worker.loop, model.paged.core.runner
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen: list[bool] = []
    inside, go_on = threading.Event(), threading.Event()
    own_run = runner.run

    def run(*args: Any, **kwargs: Any) -> Any:
        inside.set()
        assert go_on.wait(PATIENCE)
        return own_run(*args, **kwargs)

    with hf_paged.exact_training(model):
        model(input_ids=torch.arange(3, 9)[None]).logits.sum().backward()
        critics = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.0)  # whose step lets go of nothing
        optimizer.register_step_pre_hook(lambda *_: critics.step())
        optimizer.register_step_pre_hook(lambda *_: seen.append(loop.is_mine))
        monkeypatch.setattr(runner, "run", run)
        request = model.paged.submit([5, 6, 7], max_new_tokens=3, eos_token_id=None, pad_token_id=0)
        assert inside.wait(PATIENCE)
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join(0.2)
        assert not seen
        go_on.set()
        thread.join(PATIENCE)
        assert seen == [True] and not loop.is_mine
        assert len(request.result(PATIENCE).token_ids) == 3


def with_dropout(model: Any) -> None:
    model.config.attention_dropout = 0.1


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "dropout": (with_dropout, {}, "dropout"),
    "checkpointing": (lambda model: model.gradient_checkpointing_enable(), {}, "it is one already"),
    "a hook": (lambda model: model.model.norm.register_forward_hook(lambda *_: None), {}, "hooks or modules of others"),
    "hidden states": (None, {"output_hidden_states": True}, "output_hidden_states=True"),
    "a cache": (None, {"use_cache": True}, "use_cache=True"),
    "embeddings": (None, {"inputs_embeds": torch.zeros(1, 3, 8)}, "inputs_embeds"),
    "a mask that is no tensor": (None, {"attention_mask": [[1, 1, 1, 1]]}, "attention_mask as a tensor, got a list"),
    "positions that are no tensor": (None, {"position_ids": [[0, 1, 2, 3]]}, "position_ids as a tensor, got a list"),
    "no token": (None, {"attention_mask": torch.zeros(1, 4, dtype=torch.long)}, "the logits of no token"),
    "a mask of its own": (None, {"attention_mask": torch.ones(1, 1, 4, 4)}, "a mask of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """Would break: a forward that is silently stock's, or that drops what was asked for."""
    change, arguments, reason = REFUSED[case]
    model = made("tiny_lm")
    with hf_paged.exact_training(model):
        if change is not None:
            change(model)
        with pytest.raises(ValueError, match=reason):
            model(input_ids=torch.tensor([[5, 6, 7, 8]]), **arguments)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
            model(input_ids=torch.tensor([[5, 6, 7, 8]]))
    model.gradient_checkpointing_disable()
    assert model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits.requires_grad


@pytest.mark.parametrize("name", ["output_router_logits", "output_hidden_states"])
def test_what_a_config_asks_for_is_refused(name: str) -> None:
    """Would break: a loss without that of the routers, which stock adds to it."""
    model, ids = made("qwen3_moe"), torch.tensor([[5, 6, 7, 8]])
    with hf_paged.exact_training(model):
        setattr(model.config, name, True)
        with pytest.raises(ValueError, match=f"{name}=True"):
            model(input_ids=ids, labels=ids)
        assert model(input_ids=ids, labels=ids, **{name: False}).loss.requires_grad
        with pytest.raises(RuntimeError, match="leave it before you unpatch"):
            hf_paged.unpatch(model)
    assert any(f"config.{name}=True" in why for why in hf_paged.is_supported(model).why_not_exact)
    assert not hf_paged.api.patching.is_patched(hf_paged.unpatch(model))


def test_models_refused() -> None:
    """Would break: a model whose layers have no exact kernel, or whose backward would mix rows, taken."""
    with pytest.raises(ValueError, match="patch"), hf_paged.exact_training(build("llama")):
        pass
    cases: list[tuple[Any, str]] = [
        (hf_paged.patch(build_state_model("lfm2"), num_blocks=64), "its layers keep a state"),
        (hf_paged.patch(build("llama"), num_blocks=16, kv_cache_dtype="fp8"), "kv_cache_dtype='fp8'"),
        (hf_paged.patch(build("llama").half(), num_blocks=16), "float16"),
        (made("tiny_lm"), "adapters are no LoRA of our kernel's.*embed_tokens"),
    ]
    peft.get_peft_model(cases[-1][0], peft.LoraConfig(r=2, target_modules=["embed_tokens"]))
    for model, reason in cases:
        with pytest.raises(hf_paged.UnsupportedModelError, match=reason), hf_paged.exact_training(model):
            pass
        assert model.paged.exact_forwards is None


@pytest.mark.parametrize("truncation", [{"top_k": 9}, {"top_p": 0.6}, {"min_p": 0.2}, {}], ids=repr)
def test_support(truncation: dict[str, Any]) -> None:
    """Would break: a support that is another one than tokens were drawn from; a ratio that is not 1 with it."""
    model = made("tiny_lm")
    outputs = rollouts(model, 0.7, **truncation, return_support=True)
    raw = [model.paged.score([o.prompt_token_ids + o.token_ids], first=len(o.prompt_token_ids))[0] for o in outputs]
    given, vocab = batch(outputs, "right"), model.config.vocab_size
    left = torch.ones(*given["input_ids"].shape, vocab, dtype=torch.bool)
    for row, output in enumerate(outputs):
        (support,) = output.support
        assert all((own is None) == (not truncation) for own in support)
        for place, (token, own) in enumerate(zip(output.token_ids, support, strict=True), len(output.prompt_token_ids)):
            if own is not None:
                assert token in own and (len(own) == 9 or "top_k" not in truncation)
                left[row, place] = False
                left[row, place, own] = True
    labels = given["labels"][:, 1:]
    with hf_paged.exact_training(model):
        logits = model(**given).logits[:, :-1]
        tokens = labels.clamp(min=0)
        found = hf_paged.token_log_probs(logits, tokens, temperature=0.7, support=left[:, 1:])[labels != -100]
        plain = hf_paged.token_log_probs(logits, tokens)[labels != -100]
    assert torch.equal(found.detach(), sampled(outputs))
    assert plain.tolist() == [each.logprob for own in raw for each in own]
    with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
        hf_paged.token_log_probs(logits, tokens, temperature=0)
    with pytest.raises(ValueError, match="return_support"):
        model.paged.submit([5, 6], num_beams=2, return_support=True, max_new_tokens=2)
