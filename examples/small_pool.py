"""A pool too small for all: the newest requests make room, by being computed again or by moving to CPU memory and back.

python examples/small_pool.py
"""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

TINY_MODEL = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"
WORDS = ["door", "house", "sea", "king", "girl", "night", "letter", "captain"]
NEW_TOKENS = 96


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    prompts = [tokenizer(f"It was late in the evening, and the {word}")["input_ids"] for word in WORDS]
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}

    ways: dict[str, dict[str, Any]] = {
        "room for all": {"num_blocks": 256},
        "24 blocks, computed again": {"num_blocks": 24, "preemption": "recompute"},
        "24 blocks, swapped": {"num_blocks": 24, "preemption": "swap", "swap_space_gib": 0.01},
    }
    expected = None
    for title, settings in ways.items():
        with hf_paged.patched(model, **settings):
            outputs = [output.token_ids for output in model.paged.generate(prompts, **options)]
            stats = model.paged.stats()
        expected = expected or outputs
        print(f"{title}: {stats.num_steps} steps, {stats.peak_blocks_in_use} blocks at the peak")
        print(f"   rows preempted: {stats.num_preemptions}, of them swapped out: {stats.num_swapped_out}")
        print(f"   tokens computed as a prompt, or once more: {stats.num_prefill_tokens}")
        print(f"   same tokens as with room for all: {outputs == expected}\n")


if __name__ == "__main__":
    main()
