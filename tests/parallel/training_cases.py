"""Cases of ranks that train: each with all of the weights (DDP), or with a share of them (FSDP)."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoModelForCausalLM

import hf_paged
from helpers.models import TINY_LM
from helpers.trainers import Sampled, rollouts, trainer_of

PROMPTS = torch.tensor([[4, 9, 5, 6, 7], [3, 4, 5, 6, 8]])


def _generate(model: Any) -> Any:
    return model.generate(PROMPTS, attention_mask=torch.ones_like(PROMPTS), max_new_tokens=10).tolist()


class TrainingCases:
    """See `rank_worker.Worker`."""

    _directory: str

    def ddp(self) -> Any:
        """TRL's trainer, with an engine on each rank: what it samples, and whether training has the same values."""
        found, _ = rollouts("GRPO", True, Path(self._directory))
        stock, _ = rollouts("GRPO", False, Path(self._directory))
        model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(TINY_LM), num_blocks=256)
        trainer = trainer_of("GRPO", model, [], Path(self._directory), gradient_checkpointing=False, learning_rate=1e-3)
        with pytest.MonkeyPatch.context() as monkeypatch:
            counts = Sampled(monkeypatch).compare(trainer, model.paged)
            with hf_paged.exact_training(model):
                trainer.train()
        return {"found": found, "stock": stock, "counts": counts, "detours": list(model.paged.stats().detours)}

    def fsdp(self, version: int) -> Any:
        """A patched model that FSDP shares out, before and after an update, beside one that is whole."""
        found = []
        for kind in ("stock", "paged"):
            model: Any = AutoModelForCausalLM.from_pretrained(TINY_LM)
            whole, gathered = model, nullcontext()
            if kind == "paged":
                hf_paged.patch(model, num_blocks=64)
                layers = model.model.layers
                if version == 1:
                    sharding = {"auto_wrap_policy": ModuleWrapPolicy({type(layers[0])}), "use_orig_params": True}
                    whole = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **sharding)
                else:
                    for part in (*layers, model):
                        fully_shard(part)
            optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
            for _ in range(2):  # TRL's way: the weights of the layers are gathered by themselves
                whole(input_ids=PROMPTS, use_cache=False, labels=PROMPTS).loss.backward()
                if version == 1 and kind == "paged":
                    gathered = FullyShardedDataParallel.summon_full_params(whole, recurse=False)
                with gathered, torch.no_grad():
                    found.append(_generate(model))
                optimizer.step()
                optimizer.zero_grad()
        reason = ""
        try:
            with hf_paged.exact_training(model):
                pass
        except ValueError as error:
            reason = str(error)
        stats = model.paged.stats()
        return {"stock": found[:2], "found": found[2:], "detours": dict(stats.detours), "reason": reason}
