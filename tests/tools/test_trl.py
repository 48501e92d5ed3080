"""TRL's trainers, unmodified, on a patched model: rollouts by `generate()`, and through transformers' batch API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

import hf_paged
from helpers.models import TINY_LM, tiny_tokenizer

trl = pytest.importorskip("trl", reason="of the extra dev")
datasets = pytest.importorskip("datasets", reason="which trl brings")

PROMPTS = ["Once upon a time", "The old king", "Two friends went to the", "It was"]


class ChangeWeights(TrainerCallback):
    """Stands for a training step: samples that are all the same (top_k=1) have no gradient."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            for index, layer in enumerate(model.model.layers):
                layer.mlp.down_proj.weight.mul_(-0.5 if index % 2 else 1.5)


def rollouts(kind: str, is_paged: bool, uses_batch_api: bool, folder: Path) -> tuple[list[list[str]], Any]:
    """Completions of two training steps, and the model."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(TINY_LM)
    if is_paged:
        hf_paged.patch(model, num_blocks=256)
    seen: list[list[str]] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        seen.append(completions)
        return [float(i) for i in range(len(completions))]

    settings = getattr(trl, f"{kind}Config")(
        output_dir=str(folder),
        use_transformers_continuous_batching=uses_batch_api,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=10,
        max_steps=2,
        top_k=1,
        learning_rate=0.0,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=1,
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
        callbacks=[ChangeWeights()],
    )
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
