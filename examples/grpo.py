"""Reinforcement learning (GRPO) on the embedded model, with stock's training forward and with an exact one.

Samples are rewarded for the letter e. Both runs sample in the engine; what differs is the log-probability that training
finds for the tokens that were sampled.

python examples/grpo.py [--steps 10] [--plot grpo.png]
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

TINY_MODEL = Path(hf_paged.__file__).parent / "assets" / "tiny_lm"
PROMPTS = ["Once upon a time", "The old king", "Two friends went to the", "It was a dark night"]
GROUP, NUM_TOKENS, TEMPERATURE, CLIP = 8, 24, 0.9, 0.2


def sample(model: torch.nn.Module, tokenizer: AutoTokenizer, step: int) -> list[hf_paged.RequestOutput]:
    """A group of samples of each prompt, with the log-probabilities that they were drawn with."""
    requests = [
        model.paged.submit(
            tokenizer(prompt)["input_ids"],
            num_return_sequences=GROUP,
            max_new_tokens=NUM_TOKENS,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
            logprobs=0,
            logprobs_mode="processed",
            seed=1000 * step + number,
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    return [request.result() for request in requests]


def rewards(tokenizer: AutoTokenizer, output: hf_paged.RequestOutput) -> torch.Tensor:
    texts = tokenizer.batch_decode(output.sequences)
    return torch.tensor([text.count("e") / max(1, len(text)) for text in texts])


def train_on(model: torch.nn.Module, optimizer: torch.optim.Optimizer, outputs: list, scores: list) -> float:
    """One update; returns the largest difference between log-probabilities in training and while sampling."""
    rows = [(out.prompt_token_ids, ids) for out in outputs for ids in out.sequences]
    width = max(len(prompt) for prompt, _ in rows) + NUM_TOKENS
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for row, (prompt, generated) in enumerate(rows):
        text = torch.tensor(prompt + generated)
        ids[row, width - len(text) :], mask[row, width - len(text) :] = text, 1
    sampled = torch.tensor([[token.logprob for token in said] for out in outputs for said in out.logprobs])
    advantages = torch.cat([(own - own.mean()) / (own.std() + 1e-4) for own in scores])[:, None]

    # Logits of the last prompt token and of all generated ones but the last; without a cache, with gradients.
    logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=NUM_TOKENS + 1, use_cache=False).logits
    found = hf_paged.token_log_probs(logits[:, :-1], ids[:, -NUM_TOKENS:], temperature=TEMPERATURE)
    ratio = (found - sampled).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float((found.detach() - sampled).abs().max())


def run(is_exact: bool, num_steps: int) -> tuple[list[float], list[float]]:
    """Differences and mean rewards, by step."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(TINY_MODEL), num_blocks=512).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    differences, means = [], []
    with hf_paged.exact_training(model) if is_exact else nullcontext():
        for step in range(num_steps):
            outputs = sample(model, tokenizer, step)
            scores = [rewards(tokenizer, output) for output in outputs]
            differences.append(train_on(model, optimizer, outputs, scores))
            means.append(float(torch.cat(scores).mean()))
    return differences, means


def plot(path: str, found: dict[str, tuple[list[float], list[float]]]) -> None:
    with hf_paged.needs("matplotlib"):
        from matplotlib import pyplot
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for name, (differences, means) in found.items():
        left.plot(differences, label=name)
        right.plot(means, label=name)
    left.set(title="largest difference of log-probabilities", xlabel="step")
    left.set_yscale("symlog", linthresh=1e-7)
    right.set(title="mean reward", xlabel="step")
    left.legend()
    figure.savefig(path)
    print(f"plotted: {path}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args()
    found = {name: run(name == "exact", args.steps) for name in ("stock", "exact")}
    print("        largest difference of a log-probability     mean reward")
    print("step      stock      exact                          stock  exact")
    for step in range(args.steps):
        (one, two), (first, second) = ([own[index][step] for own in found.values()] for index in (0, 1))
        print(f"{step:4}  {one:9.1e}  {two:9.1e}                        {first:7.3f}{second:7.3f}")
    if args.plot:
        plot(args.plot, found)


if __name__ == "__main__":
    main()
