"""Text that repeats itself: drafts are looked up in what a row has so far, and one step checks several of every row.

    python examples/prompt_lookup.py

The argument is transformers' own. Stock `generate()` takes it for one prompt at a time, the engine for whole batches. A
row gets as many drafts as are likely to pay off: few where most of them were wrong.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

TINY_MODEL = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"
PROMPTS = ["the sea, " * 11 + "the sea,", "one two three " * 11 + "one two three", "I am, " * 17 + "I am,"]


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    outputs = []
    for title, options in {"without drafts": {}, "with drafts": {"prompt_lookup_num_tokens": 8}}.items():
        with hf_paged.patched(model, num_blocks=256):
            outputs.append(model.generate(**inputs, max_new_tokens=48, do_sample=False, **options))
            stats = model.paged.stats()
        print(f"{title}: {stats.num_generated_tokens} tokens in {stats.num_steps} model steps")
        print(f"   drafts checked: {stats.num_draft_tokens}, right: {stats.num_accepted_tokens}")
    print(*tokenizer.batch_decode(outputs[0][:, inputs["input_ids"].shape[1] :]), sep="\n---\n")
    print(f"\nsame tokens: {torch.equal(*outputs)}")


if __name__ == "__main__":
    main()
