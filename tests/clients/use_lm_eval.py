"""lm-eval: choices, continuations and perplexities, over a paged model here and over the server: the same."""

import json
import math
import os
from pathlib import Path

from lm_eval import simple_evaluate

from hf_paged.tools import lm_eval_model  # noqa: F401, it registers the model

TEXTS = ["Once upon a time there was a king.", "The dog", "She opened the door.", "It was a dark night."]
CHOICES = [" and", " was happy", ".\n", " The end of the"]
rows = [{"text": text, "choices": CHOICES, "answer": index} for index, text in enumerate(TEXTS)]
file = Path("data.jsonl").absolute()
file.write_text("".join(json.dumps(row) + "\n" for row in rows))
common = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(file)}},
    "test_split": "test",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{text}}",
}
generated = {"output_type": "generate_until", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 20}}
chosen = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "metric_list": [{"metric": "word_perplexity"}]}
kinds = {"generated": generated, "chosen": chosen, "rolling": rolling}
tasks = [{"task": name} | common | kind for name, kind in kinds.items()]

folder = os.environ["MODEL_FOLDER"]
served = {"model": os.environ["MODEL"], "base_url": f"{os.environ['BASE_URL']}/completions", "tokenizer": folder}
models = {
    "hf_paged": {"pretrained": folder, "num_blocks": 512, "device": "cpu", "add_bos_token": True},
    "local-completions": served | {"num_concurrent": 4, "add_bos_token": True},
}
answers: dict[str, list[str]] = {}
numbers: dict[str, list[float]] = {}
for name, arguments in models.items():
    found = simple_evaluate(model=name, model_args=arguments, tasks=tasks, bootstrap_iters=0, log_samples=True)
    replies = {task: [each["filtered_resps"] for each in samples] for task, samples in found["samples"].items()}
    answers[name] = [text for (text,) in replies["generated"]]
    numbers[name] = [number for row in replies["chosen"] for number, _ in row] + [row[0] for row in replies["rolling"]]
assert answers["hf_paged"] == answers["local-completions"] and any(answers["hf_paged"])
assert len(numbers["hf_paged"]) == len(TEXTS) * (len(CHOICES) + 1)
for own, over_http in zip(*numbers.values(), strict=True):
    assert math.isclose(own, over_http, rel_tol=1e-4)
