"""TRL's trainers, unmodified, on a patched model: rollouts by `generate()`, and through transformers' batch API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

import hf_paged
from helpers.models import TINY_LM, tiny_tokenizer
from helpers.pairs import logged_messages
from hf_paged.engine.calls import Calls
from hf_paged.integrations import trl as integration
from hf_paged.sampling.logprobs import LogprobsWanted

peft = pytest.importorskip("peft", reason="of the extra dev")
trl = pytest.importorskip("trl", reason="of the extra dev")
datasets = pytest.importorskip("datasets", reason="which trl brings")

PROMPTS = ["Once upon a time", "The old king", "Two friends went to the", "It was"]


class ChangeWeights(TrainerCallback):
    """Stands for a training step: samples that are all the same (top_k=1) have no gradient."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            for index, layer in enumerate(model.model.layers):
                layer.mlp.down_proj.weight.mul_(-0.5 if index % 2 else 1.5)


def trainer_of(kind: str, model: Any, seen: list[list[str]], folder: Path, **settings: Any) -> Any:
    """A trainer whose reward collects completions."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def reward(completions: list[str], **_: Any) -> list[float]:
        seen.append(completions)
        return [float(i) for i in range(len(completions))]

    common = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 10,
        "max_steps": 2,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 1,
    }
    return getattr(trl, f"{kind}Trainer")(
        model=model,
        reward_funcs=reward,
        args=getattr(trl, f"{kind}Config")(**common | settings),
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS * 4}),
        processing_class=tokenizer,
    )


def rollouts(kind: str, is_paged: bool, uses_batch_api: bool, folder: Path) -> tuple[list[list[str]], Any]:
    """Completions of two training steps, and the model."""
    model = AutoModelForCausalLM.from_pretrained(TINY_LM)
    if is_paged:
        hf_paged.patch(model, num_blocks=256)
    seen: list[list[str]] = []
    settings = {"top_k": 1, "learning_rate": 0.0, "use_transformers_continuous_batching": uses_batch_api}
    trainer = trainer_of(kind, model, seen, folder, **settings)
    trainer.add_callback(ChangeWeights())
    trainer.train()
    return seen, model


@pytest.mark.parametrize(("kind", "uses_batch_api"), [("GRPO", False), ("GRPO", True), ("RLOO", True)])
def test_rollouts(kind: str, uses_batch_api: bool, tmp_path: Path) -> None:
    """Would break: rollouts that are not of the weights of their step, one row a step, by transformers' loop."""
    expected, _ = rollouts(kind, False, False, tmp_path)
    found, model = rollouts(kind, True, uses_batch_api, tmp_path)
    assert found == expected and found[0] != found[1]
    stats = model.paged.stats()
    assert stats.num_generated_tokens == 2 * 4 * 10 and stats.num_steps < stats.num_generated_tokens / 2
    assert stats.num_free_blocks == stats.num_blocks and not stats.detours
    model.paged.check_invariants()


class Sampled:
    """What the engine says of tokens while it samples them, for any caller.

    Attributes:
        said: By a whole text, the version of the weights and the log-probabilities of what was generated.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: dict[tuple[int, ...], tuple[int, list[float]]] = {}
        own = Calls.start

        def start(calls: Any, call: Any, *args: Any, on_end: Any = None, **kwargs: Any) -> Any:
            call.logprobs = LogprobsWanted(0, is_processed=True)

            def end(run: Any) -> None:
                for prompt, row in zip(call.prompts, run.rows, strict=True):
                    values = [each.logprob for each in row.logprobs]
                    self.said[*prompt, *row.tokens] = calls._core.weight_version, values
                if on_end is not None:
                    on_end(run)

            return own(calls, call, *args, on_end=end, **kwargs)

        monkeypatch.setattr(Calls, "start", start)

    def compare(self, trainer: Any, engine: Any) -> dict[str, int]:
        """Counts tokens whose log-probability in the trainer is that of sampling, of those under the same weights."""
        own, counts = trainer._get_per_token_logps_and_entropies, {"equal": 0, "all": 0, "trained on": 0}

        def log_probabilities(model: Any, ids: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
            found = own(model, ids, mask, *args, **kwargs)
            if model is trainer.ref_model:
                return found
            for row, values in enumerate(found[0].detach()):
                version, expected = self.said[*ids[row][mask[row] != 0].tolist()]
                if version == engine.weight_version:
                    counts["all"] += len(expected)
                    counts["equal"] += int((values[: len(expected)] == torch.tensor(expected)).sum())
                    counts["trained on"] += len(expected) * found[0].requires_grad
            return found

        trainer._get_per_token_logps_and_entropies = log_probabilities
        return counts


EXACT: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "generate": ("GRPO", False, {"temperature": 0.7}),
    "batches, LoRA": ("GRPO", True, {"use_transformers_continuous_batching": True}),
    "two iterations": ("GRPO", False, {"num_iterations": 2, "max_steps": 4}),
    "older samples": ("GRPO", False, {"steps_per_generation": 4, "gradient_accumulation_steps": 2}),
    "RLOO": ("RLOO", False, {"use_transformers_continuous_batching": True}),
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
    with pytest.raises(ValueError, match=r"TRL 9\.9\.0 is on it"), hf_paged.exact_training(model):
        pass
