"""Before and after: one line more, the same text.

    python examples/quickstart.py

The example uses the tiny model that comes with the package; any decoder-only Hugging Face model can take its place.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

TINY_MODEL = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    inputs = tokenizer(["It was late in the evening when", "The door"], return_tensors="pt", padding=True)

    before = model.generate(**inputs, max_new_tokens=24, do_sample=False)

    model = hf_paged.patch(model)  # the one line

    after = model.generate(**inputs, max_new_tokens=24, do_sample=False)

    print("\n---\n".join(tokenizer.batch_decode(after, skip_special_tokens=True)))
    stats = model.paged.stats()
    print(f"\nsame tokens as before: {torch.equal(before, after)}")
    print(f"KV blocks at the peak: {stats.peak_blocks_in_use} of {stats.num_blocks}")


if __name__ == "__main__":
    main()
