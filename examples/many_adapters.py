"""An adapter a request: a hundred LoRA adapters over one model, in one batch.

python examples/many_adapters.py
"""

import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

with hf_paged.needs("peft"):
    from peft import LoraConfig, get_peft_model

TINY_MODEL = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"
STYLES = {
    "sailor": "The ship rolled on the dark sea, and the old sailor held the rope and looked to the stars. ",
    "cook": "The cook stirred the soup, cut the bread, and set the hot dish upon the long table. ",
}
NUM_RANDOM = 98
PROMPT = "The old man"


def train(model: torch.nn.Module, tokenizer: AutoTokenizer, text: str) -> None:
    """A dozen steps on one sentence: enough to hear whose adapter it is."""
    ids = torch.tensor([tokenizer(text * 3)["input_ids"]])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(12):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def save_adapters(folder: Path, tokenizer: AutoTokenizer) -> list[str]:
    """Two trained adapters and many random ones, as PEFT saves them."""
    torch.manual_seed(0)
    settings = {"r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    base = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    model = get_peft_model(base, LoraConfig(**settings), adapter_name=next(iter(STYLES)))
    for name, text in STYLES.items():
        if name not in model.peft_config:
            model.add_adapter(name, LoraConfig(**settings))
        model.set_adapter(name)
        train(model, tokenizer, text)
    model.save_pretrained(folder)
    names = [f"random {number}" for number in range(NUM_RANDOM)]
    for name in names:  # one at a time: for each new one, PEFT walks over all that the model has
        model.add_adapter(name, LoraConfig(**settings, init_lora_weights=False))
        model.save_pretrained(folder, selected_adapters=[name])
        model.delete_adapter(name)
    return [*STYLES, *names]


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    with tempfile.TemporaryDirectory() as folder:
        names = save_adapters(Path(folder), tokenizer)
        model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(TINY_MODEL), num_blocks=2048)
        for name in names:
            model.paged.load_adapter(name, Path(folder) / name)  # none of PEFT's modules is made

        prompt = tokenizer(PROMPT)["input_ids"]
        options = {"max_new_tokens": 14, "do_sample": False}
        for name in ("__base__", *STYLES):
            text = tokenizer.decode(model.paged.submit(prompt, adapter=name, **options).result().token_ids)
            print(f"{name:>8}: {PROMPT}{text!r}")

        before, start = model.paged.stats().num_steps, time.perf_counter()
        model.paged.generate([prompt] * len(names), adapters=names, **options)
        seconds, steps = time.perf_counter() - start, model.paged.stats().num_steps - before
        print(f"\n{len(names)} requests of {len(names)} adapters: {steps} steps, {seconds:.1f} s")


if __name__ == "__main__":
    main()
