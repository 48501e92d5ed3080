"""TRL: a GRPO trainer whose rollouts go through transformers' batch API, on a patched model."""

import os

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import hf_paged

PROMPTS = ["Once upon a time", "The old king", "Two friends went to the", "It was"]
folder = os.environ["MODEL_FOLDER"]
model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(folder), num_blocks=256)
before = model.lm_head.weight.detach().clone()
seen: list[str] = []


def length(completions: list[str], **_: object) -> list[float]:
    seen.extend(completions)
    return [float(len(text)) for text in completions]


trainer = GRPOTrainer(
    model=model,
    reward_funcs=length,
    args=GRPOConfig(
        output_dir="trained",
        use_transformers_continuous_batching=True,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=10,
        max_steps=2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        seed=1,
    ),
    train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
    processing_class=AutoTokenizer.from_pretrained(folder),
)
trainer.train()
stats = model.paged.stats()
assert len(seen) == 2 * 4 and stats.num_generated_tokens > 4 and not stats.detours
assert stats.num_free_blocks == stats.num_blocks
assert not before.equal(model.lm_head.weight), "nothing was learnt"
