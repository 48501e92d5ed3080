"""A conversation that keeps its KV cache from turn to turn.

    python examples/chat_with_cache.py

`hf_paged.PagedCache(model)` is a `transformers.Cache` over the model's block pool. Given to every `generate()` of a
conversation as `past_key_values`, it holds what was computed so far, and a turn computes only what is new. (The tiny
model continues stories and does not chat; the mechanics are the same.)
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

TINY_MODEL = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"
TURNS = (
    "It was late in the evening when the old man knocked at the door.",
    '\n\n"Who is there?" asked the girl.',
    "\n\nThe old man took off his hat, and",
)


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(TINY_MODEL))

    cache = hf_paged.PagedCache(model)
    conversation = torch.tensor([[tokenizer.bos_token_id]])
    saved = 0
    for number, turn in enumerate(TURNS, start=1):
        said = tokenizer(turn, return_tensors="pt", add_special_tokens=False).input_ids
        prompt = torch.cat([conversation, said], dim=1)
        kept = cache.get_seq_length()
        conversation = model.generate(prompt, past_key_values=cache, max_new_tokens=24, do_sample=False)
        saved += kept
        answer = tokenizer.decode(conversation[0, prompt.shape[1] :], skip_special_tokens=True)
        print(f"turn {number}: {prompt.shape[1]} tokens in, {kept} of them not recomputed")
        print(f"{turn.strip()}[{answer}]\n")

    once_more = model.generate(prompt, max_new_tokens=24, do_sample=False)  # the last turn without the kept cache
    print(f"same tokens without the cache: {torch.equal(conversation, once_more)}")
    print(f"tokens not recomputed: {saved}")


if __name__ == "__main__":
    main()
