"""Ray Data sends a data set through several engines; a second run does only what the first has not done.

    pip install "hf-paged[ray]"
    python examples/ray_data.py --input prompts.jsonl --output answers --engines 2

Each line of the input has an "id" and a "prompt". Answers go to the output folder, block by block. A run that was
interrupted resumes: it leaves out prompts that have an answer.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

with hf_paged.needs("hf-paged[ray]"):
    import ray

ASSETS = Path(hf_paged.__file__).parent / "assets"


class Generate:
    """An engine, given a batch of prompts at a time: it runs them together, without padding, as its pool has room."""

    def __init__(self, name: str, new_tokens: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(name)
        self._model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(name), num_blocks=1024)
        self._new_tokens = new_tokens

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        prompts = [self._tokenizer(str(prompt))["input_ids"] for prompt in batch["prompt"]]
        outputs = self._model.paged.generate(prompts, max_new_tokens=self._new_tokens, do_sample=False, pad_token_id=0)
        answers = [self._tokenizer.decode(output.token_ids, skip_special_tokens=True) for output in outputs]
        return {"id": batch["id"], "prompt": batch["prompt"], "answer": answers}


def answered(folder: Path) -> set[int]:
    """Ids of what has an answer."""
    return {json.loads(line)["id"] for file in folder.glob("*.json") for line in file.read_text().splitlines()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ASSETS / "tiny_lm"))
    parser.add_argument("--input", type=Path, default=None, help="default: the prompts that come with the package")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--limit", type=int, default=None, help="rows of the input that are looked at")
    arguments = parser.parse_args()

    # A cluster's address comes from RAY_ADDRESS; without it Ray starts here.
    ray.init(include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    lines = (arguments.input or ASSETS / "prompts.jsonl").read_text().splitlines()[: arguments.limit]
    rows = [{"id": number} | json.loads(line) for number, line in enumerate(lines)]
    done = answered(arguments.output)
    todo = [{"id": row["id"], "prompt": row["prompt"]} for row in rows if row["id"] not in done]
    print(f"{len(rows)} prompts, {len(rows) - len(todo)} of them answered before")
    if todo:
        ray.data.from_items(todo, override_num_blocks=-(-len(todo) // arguments.batch_size)).map_batches(
            Generate,
            fn_constructor_args=(arguments.model, arguments.new_tokens),
            batch_size=arguments.batch_size,
            compute=ray.data.ActorPoolStrategy(size=arguments.engines),
        ).write_json(str(arguments.output), mode=ray.data.SaveMode.APPEND)
    print(f"{len(answered(arguments.output))} prompts answered in {arguments.output}")
    ray.shutdown()


if __name__ == "__main__":
    main()
