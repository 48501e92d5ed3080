"""One system prompt before every question: computed once and stored once, for all users.

python examples/shared_system_prompt.py
"""

import math
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

TINY_MODEL = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"
SYSTEM_PROMPT = (
    "The following is a conversation between a patient old schoolmaster and his pupils. He answers every question in "
    "one short sentence, never loses his temper, and likes to speak of the sea, of which he knows a great deal, having "
    "been a sailor in his youth. "
) * 4
QUESTIONS = [
    "Sir, how deep is the sea?",
    "Why is it salt?",
    "Were you ever afraid, sir?",
    "Where do the gulls sleep?",
    "What is beyond the horizon?",
    "May we go now?",
]


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(TINY_MODEL))
    prompts = [tokenizer(SYSTEM_PROMPT + question)["input_ids"] for question in QUESTIONS]

    outputs = model.paged.generate(prompts, max_new_tokens=16, do_sample=False)  # all at once

    for question, output in zip(QUESTIONS, outputs):
        print(f"{question} ->{tokenizer.decode(output.token_ids)!r}")
    stats = model.paged.stats()
    num_given = sum(len(prompt) for prompt in prompts)
    block_size = model.paged.config.block_size
    unshared = sum(math.ceil((len(prompt) + 16) / block_size) for prompt in prompts)
    print(f"\nprompt tokens given: {num_given}, not computed again: {stats.prefix_cache_hit_tokens}")
    print(f"KV blocks at the peak: {stats.peak_blocks_in_use}, without sharing: {unshared}")


if __name__ == "__main__":
    main()
