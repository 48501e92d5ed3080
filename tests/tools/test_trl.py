"""TRL's trainers, unmodified, on a patched model: rollouts by `generate()`, and through transformers' batch API."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_paged
from helpers.models import TINY_LM
from helpers.pairs import logged_messages
from helpers.trainers import Sampled, rollouts, trainer_of
from hf_paged.integrations import trl as integration

peft = pytest.importorskip("peft", reason="of the extra dev")
add_fused_lm_head = pytest.importorskip("trl.trainer.utils", reason="of the extra dev").add_fused_lm_head

BATCHES = {"use_transformers_continuous_batching": True}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("GRPO", {}), ("GRPO", BATCHES), ("RLOO", BATCHES), ("OnlineDPO", {"gradient_checkpointing": False})],
)
def test_rollouts(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Would break: rollouts that are not of the weights of their step, one row a step, by transformers' loop."""
    expected, _ = rollouts(kind, False, tmp_path)
    found, model = rollouts(kind, True, tmp_path, **settings)
    assert found == expected and found[0] != found[1]
    stats, num_rows = model.paged.stats(), sum(len(each) for each in found)
    assert stats.num_generated_tokens == num_rows * 10 and stats.num_steps < stats.num_generated_tokens / 2
    assert stats.num_free_blocks == stats.num_blocks and not stats.detours
    model.paged.check_invariants()


EXACT: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "generate": ("GRPO", False, {"temperature": 0.7}),
    "batches, LoRA": ("GRPO", True, BATCHES),
    "two iterations": ("GRPO", False, {"num_iterations": 2, "max_steps": 4}),
    "older samples": ("GRPO", False, {"steps_per_generation": 4, "gradient_accumulation_steps": 2}),
    "RLOO": ("RLOO", False, BATCHES),
}


@pytest.mark.parametrize("case", EXACT)
def test_exact_training(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: log-probabilities in the trainer that are not those of sampling before the first update."""
    kind, has_lora, settings = EXACT[case]
    model: Any = AutoModelForCausalLM.from_pretrained(TINY_LM)
    if has_lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    hf_paged.patch(model, num_blocks=256)
    engine = model.paged
    asked = {"learning_rate": 1e-3, "gradient_checkpointing": False} | settings
    trainer = trainer_of(kind, model, [], tmp_path, **asked)
    counts = Sampled(monkeypatch).compare(trainer, engine)
    inner = engine.model
    before = vars(inner)["forward"]
    with hf_paged.exact_training(model):
        assert vars(inner)["forward"] is not before
        trainer.train()
    assert vars(inner)["forward"] is before
    assert counts["equal"] == counts["all"] >= 80 and counts["trained on"] >= 40
    assert not engine.stats().detours
    engine.check_invariants()


def test_a_reference_model(tmp_path: Path) -> None:
    """Would break: a distance to the reference, before any update, that is rounding alone."""
    model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(TINY_LM), num_blocks=256)
    trainer = trainer_of("GRPO", model, [], tmp_path, beta=0.1, gradient_checkpointing=False)
    with pytest.raises(ValueError, match="has none"), integration.plain_forward(trainer.ref_model.model):
        pass
    wrapped = AutoModelForCausalLM.from_pretrained(TINY_LM)
    wrapped.forward = partial(wrapped.forward)
    add_fused_lm_head(wrapped)
    with pytest.raises(ValueError, match="has another"), integration.plain_forward(wrapped):
        pass
    with integration.plain_forward(trainer.ref_model):
        hf_paged.patch(trainer.ref_model, num_blocks=1)
    own, said = trainer._get_per_token_logps_and_entropies, {}

    def noted(model: Any, ids: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        found = own(model, ids, mask, *args, **kwargs)
        for row, real, values in zip(ids, mask, found[0].detach(), strict=True):
            said.setdefault((*row[real != 0].tolist(),), {}).setdefault(model is trainer.ref_model, values)
        return found

    trainer._get_per_token_logps_and_entropies = noted
    trainer.args.max_steps = 1  # behind an update they are others
    with hf_paged.exact_training(model), hf_paged.exact_training(trainer.ref_model):
        trainer.train()
    assert len(said) >= 2 and all(torch.equal(each[True], each[False]) for each in said.values())


def test_online_dpo(tmp_path: Path) -> None:
    """Its own loss, of logits: as near to stock's as exact training is."""
    losses, texts = [], []
    for is_exact in (False, True):
        model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(TINY_LM), num_blocks=256)
        settings = {"learning_rate": 1e-3, "gradient_checkpointing": False, "logging_steps": 1, "max_steps": 3}
        texts.append([])
        trainer = trainer_of("OnlineDPO", model, texts[-1], tmp_path, **settings)
        with hf_paged.exact_training(model) if is_exact else nullcontext():
            trainer.train()
        losses.append([each["loss"] for each in trainer.state.log_history[:3]])
        assert not model.paged.stats().detours
    assert texts[0] == texts[1]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4) and len(set(losses[0])) == 3, losses


def test_a_float32_head_on_a_bfloat16_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a head that TRL has cast, multiplied in another order of sums while sampling or while training."""
    config = AutoModelForCausalLM.from_pretrained(TINY_LM).config
    config.tie_word_embeddings = False  # else TRL hooks the embedding
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf_paged.patch(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), num_blocks=256)
    trainer = trainer_of("GRPO", model, [], tmp_path, gradient_checkpointing=False, cast_lm_head_to_fp32=True)
    counts = Sampled(monkeypatch).compare(trainer, model.paged)
    before, weight = model.lm_head.forward, model.lm_head.weight.detach().clone()
    assert not hf_paged.is_supported(model)
    with hf_paged.exact_training(model):
        trainer.train()
    assert counts["equal"] == counts["all"] >= 80 and model.lm_head.forward is before
    assert model.lm_head.weight.dtype is torch.float32 and not torch.equal(model.lm_head.weight, weight)
    states = torch.randn(3, 5, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    expected = torch.autograd.grad(before(states).square().sum(), [states, model.lm_head.weight])
    found = torch.autograd.grad(
        integration._wide_head(model.lm_head, states).square().sum(), [states, model.lm_head.weight]
    )
    for own, its in zip(found, expected, strict=True):
        torch.testing.assert_close(own, its, rtol=1e-2 if its.dtype is torch.bfloat16 else 1e-5, atol=1e-5)


def test_other_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a private function of another TRL, taken for the one that is known."""
    model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(TINY_LM), num_blocks=256)
    trainer = trainer_of("GRPO", model, [], tmp_path, gradient_checkpointing=True)
    with hf_paged.exact_training(model), pytest.raises(ValueError, match="it is one already"):
        trainer.train()
    model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(TINY_LM), num_blocks=256)
    with logged_messages() as messages, hf_paged.exact_training(model):
        trainer_of("GRPO", model, [], tmp_path, gradient_checkpointing=False)
    assert "make the trainer first" in str(messages)
    monkeypatch.setattr(integration, "version", lambda _: "9.9.0")
    with pytest.raises(ValueError, match=r"TRL 9\.9\.0 is on it"), integration.plain_forward(model):
        pass
    with pytest.raises(ValueError, match=r"TRL 9\.9\.0 is on it"), hf_paged.exact_training(model):
        pass
