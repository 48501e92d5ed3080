"""TRL's trainers on a small model: what they sample, and whether they compute what the engine said while sampling."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

import hf_paged
from helpers.models import TINY_LM, tiny_tokenizer
from hf_paged.engine.calls import Calls
from hf_paged.sampling.logprobs import LogprobsWanted

PROMPTS = ["Once upon a time", "The old king", "Two friends went to the", "It was"]


class ChangeWeights(TrainerCallback):
    """Stands for a training step: samples that are all the same (top_k=1) have no gradient."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            for index, layer in enumerate(model.model.layers):
                layer.mlp.down_proj.weight.mul_(-0.5 if index % 2 else 1.5)


def trainer_of(kind: str, model: Any, seen: list[list[str]], folder: Path, **settings: Any) -> Any:
    """A trainer whose reward collects completions."""
    import datasets
    import trl  # both of the extra `dev`

    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def reward(completions: list[str], **_: Any) -> list[float]:
        seen.append(completions)
        return [float(i) for i in range(len(completions))]

    common = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 1,
    }
    module: Any = trl
    if kind == "OnlineDPO":  # always two answers to each prompt
        module = importlib.import_module("trl.experimental.online_dpo")
        common |= {"max_new_tokens": 10}
    else:
        common |= {"num_generations": 2, "max_completion_length": 10}
    return getattr(module, f"{kind}Trainer")(
        model=model,
        reward_funcs=reward,
        args=getattr(module, f"{kind}Config")(**common | settings),
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS * 4}),
        processing_class=tokenizer,
    )


def rollouts(kind: str, is_paged: bool, folder: Path, **settings: Any) -> tuple[list[list[str]], Any]:
    """Completions of two training steps, and the model."""
    model = AutoModelForCausalLM.from_pretrained(TINY_LM)
    if is_paged:
        hf_paged.patch(model, num_blocks=256)
    seen: list[list[str]] = []
    trainer = trainer_of(kind, model, seen, folder, **{"top_k": 1, "learning_rate": 0.0} | settings)
    trainer.add_callback(ChangeWeights())
    trainer.train()
    return seen, model


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
