"""A model larger than memory: accelerate keeps the last layers on disk, and `patch` takes the model as it is.

    python examples/offload.py

Layers on disk are read in each step, so a step that more requests share is worth the more. On a machine with GPUs, add
`0: "20GiB"` (and so on) to `max_memory`: the layers then fill the GPUs first, CPU memory next, and the disk last.
"""

import tempfile
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

TINY_MODEL = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"
PROMPTS = ["It was late in the evening when", "The door opened, and", "Nobody had seen the letter before"]


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL, padding_side="left")
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    options = {**inputs, "max_new_tokens": 16, "do_sample": False}
    whole = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    expected = whole.generate(**options)

    with tempfile.TemporaryDirectory() as folder:
        memory = {"cpu": whole.get_memory_footprint() // 2}
        model = AutoModelForCausalLM.from_pretrained(
            TINY_MODEL, device_map="auto", max_memory=memory, offload_folder=folder
        )
        places = Counter(str(place) for place in model.hf_device_map.values())
        print("parts of the model:", ", ".join(f"{count} on {place}" for place, count in sorted(places.items())))

        model = hf_paged.patch(model, num_blocks=64)

        output = model.generate(**options)
        print(*tokenizer.batch_decode(output, skip_special_tokens=True), sep="\n---\n")
        print(f"\n{len(PROMPTS)} prompts in {model.paged.stats().num_steps} steps")
        print(f"same tokens as in memory: {torch.equal(output, expected)}")


if __name__ == "__main__":
    main()
