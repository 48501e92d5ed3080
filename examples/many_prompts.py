"""Thousands of prompts of any lengths, with a progress bar: as many at a time as the pool holds, no padding.

python examples/many_prompts.py --num-prompts 2000
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

ASSETS = Path(hf_paged.__file__).parent / "assets"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-prompts", type=int, default=2000)
    parser.add_argument("--new-tokens", type=int, default=16)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny_lm")
    model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(ASSETS / "tiny_lm"), num_blocks=2048)
    texts = [json.loads(line)["prompt"] for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]
    prompts = [tokenizer(texts[n % len(texts)])["input_ids"][: 1 + 7 * n % 60] for n in range(arguments.num_prompts)]

    torch.manual_seed(0)
    started = time.perf_counter()
    outputs = model.paged.generate(
        prompts, progress_bar=True, max_new_tokens=arguments.new_tokens, do_sample=True, top_p=0.9
    )
    seconds = time.perf_counter() - started

    for output in outputs[:3]:
        prompt = tokenizer.decode(output.prompt_token_ids, skip_special_tokens=True)
        print(f"{prompt!r} ->", repr(tokenizer.decode(output.token_ids)))
    stats = model.paged.stats()
    num_tokens = sum(len(output.token_ids) for output in outputs)
    print(f"\n{len(outputs)} prompts, {num_tokens} new tokens in {seconds:.1f} s, {stats.num_steps} model steps")
    print(f"KV blocks at the peak: {stats.peak_blocks_in_use} of {stats.num_blocks}")
    print(f"prompt tokens found in the prefix cache: {stats.prefix_cache_hit_tokens}")


if __name__ == "__main__":
    main()
