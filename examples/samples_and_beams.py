"""Several continuations of one prompt: they share its KV blocks, and copy a block only when they write into it.

python examples/samples_and_beams.py
"""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

TINY_MODEL = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"
PROMPT = (
    "It was late in the evening when the old man came to the door of the house, and the rain had not ceased to fall "
    "upon the roof since the morning. He stood for a moment without speaking, and then"
)
BLOCK_SIZE = 8
NEW_TOKENS = 24


def show(title: str, model: Any, tokenizer: Any, **kwargs: Any) -> None:
    """Generates several continuations and prints them and what they took."""
    inputs = tokenizer(PROMPT, return_tensors="pt")
    num_prompt_tokens = inputs["input_ids"].shape[1]
    with hf_paged.patched(model, block_size=BLOCK_SIZE):  # patched anew for each part, so that the counters start at 0
        torch.manual_seed(0)
        sequences = model.generate(**inputs, max_new_tokens=NEW_TOKENS, **kwargs)
        stats = model.paged.stats()

    print(f"== {title}")
    for sequence in sequences:
        print("   ...", tokenizer.decode(sequence[num_prompt_tokens:], skip_special_tokens=True).replace("\n", " "))
    rows = max(kwargs.get("num_beams", 1), kwargs.get("num_return_sequences", 1))
    unshared = rows * math.ceil((num_prompt_tokens + NEW_TOKENS) / BLOCK_SIZE)
    print(f"   blocks at the peak: {stats.peak_blocks_in_use}; without sharing: {unshared}")
    print(f"   copies on write: {stats.num_cow_copies}\n")


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    show("four samples", model, tokenizer, do_sample=True, top_p=0.9, num_return_sequences=4)
    show(
        "beam search: four beams, the best two", model, tokenizer, do_sample=False, num_beams=4, num_return_sequences=2
    )


if __name__ == "__main__":
    main()
