"""Does hf_paged work with my model? Ask, try, compare, undo.

python examples/your_own_model.py                       # a tiny Qwen2 with random weights, made here
python examples/your_own_model.py Qwen/Qwen3-0.6B       # a name or a folder
"""

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import hf_paged

PROMPTS = ["It was late in the evening when", "The capital of France is", "One"]


def load(name: str | None) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model in float32, where hf_paged and stock agree to the token, and a ragged batch for it."""
    if name is not None:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        return model, dict(tokenizer(PROMPTS, return_tensors="pt", padding=True))

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    attention_mask = torch.ones(3, 12, dtype=torch.long)
    attention_mask[1, :5] = attention_mask[2, :11] = 0  # prompts of 12, 7 and 1 tokens
    input_ids = torch.randint(1, 256, (3, 12)) * attention_mask
    return Qwen2ForCausalLM(config).eval(), {"input_ids": input_ids, "attention_mask": attention_mask}


def main() -> None:
    model, inputs = load(sys.argv[1] if len(sys.argv) > 1 else None)

    report = hf_paged.is_supported(model)
    print(f"{type(model).__name__} is {'supported' if report else 'not supported'}")
    for remark in (*report.reasons, *report.notes):
        print(f"  {remark}")
    if not report:
        sys.exit(1)

    stock = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    hf_paged.patch(model)
    paged = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    peak = model.paged.stats().peak_blocks_in_use
    hf_paged.unpatch(model)

    print(f"same tokens as stock generate(): {torch.equal(stock, paged)}")
    print(f"KV blocks at the peak: {peak}")
    print(f"unpatched: {not hasattr(model, 'paged')}")


if __name__ == "__main__":
    main()
