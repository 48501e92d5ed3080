#!/usr/bin/env python3
"""Train the tiny Llama-architecture language model that ships in ``hf_paged/assets/tiny_lm``.

The script needs nothing but a CPU, PyTorch, transformers, tokenizers and a few megabytes of plain text::

    python examples/train_tiny_lm.py                        # train, save, evaluate (about 45 minutes on one core)
    python examples/train_tiny_lm.py --text a.txt --text b.txt --out /tmp/lm
    python examples/train_tiny_lm.py --eval-only hf_paged/assets/tiny_lm

What it does:

* holds out the last 5 % of every text (``--holdout``) before anything else is computed from it: neither the
  tokenizer nor the model ever sees that piece, and no checkpoint is selected by it;
* trains a byte-level BPE tokenizer on the rest, saved so that ``AutoTokenizer`` loads it offline;
* trains ``LlamaForCausalLM`` with Muon (matrices) and AdamW (embedding, norms), a warmup-and-decay schedule, and the
  regularisation such a small corpus needs: residual dropout, BPE dropout, random window offsets, paragraphs with their
  line breaks removed, and an exponential moving average of the weights;
* stores the averaged weights as bf16 safetensors next to a config that says ``float32``, so that a plain
  ``from_pretrained`` computes in float32;
* reloads what it saved and reports held-out bits per byte, next to what ``xz -9e`` needs for the same bytes.

A document is ``<s> text``; ``</s>`` closes short excerpts of one or more whole paragraphs. With the default
``--excerpt-share`` the model rarely ends a continuation by itself; a larger share makes it do so more often.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import lzma
import math
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

log = logging.getLogger("train_tiny_lm")

REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT_OUT = REPOSITORY / "hf_paged" / "assets" / "tiny_lm"
DEFAULT_TEXTS = tuple(
    REPOSITORY.parent / "shared" / "traces" / name for name in ("gutenberg_prose.txt", "tinyshakespeare.txt")
)
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
SAMPLE_PROMPTS = (
    "The old lady looked at her for a moment without speaking, and then",
    "It was late in the evening when",
)


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """One text file, cut into a training piece and a contiguous held-out piece at its end."""

    name: str
    train: str
    heldout: str


def load_texts(paths: Sequence[Path], holdout: float) -> list[Text]:
    """Read the files and hold out the last ``holdout`` fraction of each, cut at a paragraph boundary."""
    absent = [str(path) for path in paths if not path.is_file()]
    if absent:
        sys.exit(f"train_tiny_lm: no such text file: {', '.join(absent)} (name your own with --text FILE)")
    texts = []
    for path in paths:
        data = path.read_text(encoding="utf-8")
        cut = data.find("\n\n", int(len(data) * (1.0 - holdout)))
        if cut < 0:
            sys.exit(f"train_tiny_lm: {path}: no blank line in its last {holdout:.0%} to cut it at")
        texts.append(Text(path.name, data[: cut + 2], data[cut + 2 :]))
    return texts


def is_wrapped_prose(text: str) -> bool:
    """Whether the lines of ``text`` look like prose wrapped at a fixed width (and not like verse or drama)."""
    return median(len(line) for line in text.splitlines() if line) > 60


def unwrap(paragraph: str) -> str:
    """Join the lines of one paragraph of wrapped prose."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", paragraph)


class Corpus:
    """Makes one shuffled, augmented epoch of token rows after the other out of the training texts."""

    def __init__(self, texts: Sequence[Text], tokenizer: Tokenizer, args: argparse.Namespace) -> None:
        self.tokenizer = tokenizer
        self.bpe_dropout: float = args.bpe_dropout
        self.unwrap_share: float = args.unwrap_share
        self.excerpt_share: float = args.excerpt_share
        self.rng = random.Random(args.seed)
        # Paragraphs keep the blank lines in front of them, so that tokenizing piece by piece gives what tokenizing the
        # whole text would give.
        self.documents = [
            (re.findall(r"\n*(?:[^\n]+\n?)+", text.train), is_wrapped_prose(text.train)) for text in texts
        ]

    def _encode(self, pieces: list[str]) -> list[list[int]]:
        """Token ids of each piece, under BPE dropout."""
        self.tokenizer.model.dropout = self.bpe_dropout or None
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch(pieces, add_special_tokens=False)]
        self.tokenizer.model.dropout = None
        return ids

    def epoch(self, context: int) -> torch.Tensor:
        """All training text once, as shuffled rows of ``context`` tokens."""
        rows: list[list[int]] = []
        for paragraphs, wrapped in self.documents:
            running: list[str] = []
            excerpts: list[str] = []
            position = 0
            while position < len(paragraphs):
                chunk = paragraphs[position : position + self.rng.randint(20, 60)]
                position += len(chunk)
                if wrapped and self.rng.random() < self.unwrap_share:
                    chunk = [unwrap(paragraph) for paragraph in chunk]
                if self.rng.random() < self.excerpt_share:
                    while chunk:
                        count = 1 + int(self.rng.expovariate(1 / 2.5))
                        excerpts.append("".join(chunk[:count]).strip("\n"))
                        chunk = chunk[count:]
                else:
                    running.append("".join(chunk))
            stream = [token for piece in self._encode(running) for token in piece]
            offset = self.rng.randrange(context)
            stream = stream[-offset:] + stream[:-offset]
            rows += [[BOS_ID, *stream[at : at + context - 1]] for at in range(0, len(stream), context - 1)][:-1]
            self.rng.shuffle(excerpts)
            packed = [token for ids in self._encode(excerpts) for token in (BOS_ID, *ids, EOS_ID)]
            rows += [packed[at : at + context] for at in range(0, len(packed), context)][:-1]
        self.rng.shuffle(rows)
        return torch.tensor(rows)

    def batches(self, context: int, tokens_per_batch: int) -> Iterator[torch.Tensor]:
        """Batches without end."""
        size = max(1, tokens_per_batch // context)
        while True:
            rows = self.epoch(context)
            yield from (rows[at : at + size] for at in range(0, len(rows) - size + 1, size))


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer and model
# ---------------------------------------------------------------------------------------------------------------------


def train_tokenizer(texts: Sequence[Text], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over the training pieces of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],  # in the order of their ids
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.train for text in texts), trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A {BOS}:1 $B:1",
                special_tokens=[(BOS, BOS_ID)],
            ),
        ]
    )
    return tokenizer


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """A freshly initialised model."""
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.max_positions,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    # The matrices that write into the residual stream start at zero: every layer is the identity at first.
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def add_residual_dropout(model: LlamaForCausalLM, probability: float) -> Callable[[], None]:
    """Drop elements of what attention and MLP add to the residual stream; returns a function that undoes it."""

    def drop(module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (F.dropout(output[0], probability, module.training), *output[1:])
        return F.dropout(output, probability, module.training)

    modules = [model.model.embed_tokens]
    for layer in model.model.layers:
        modules += [layer.self_attn, layer.mlp]
    handles = [module.register_forward_hook(drop) for module in modules]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def make_optimizers(model: LlamaForCausalLM, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the (tied) embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    embedding = [model.model.embed_tokens.weight]
    norms = [p for p in model.parameters() if p.ndim == 1]
    return [
        torch.optim.Muon(
            matrices, lr=args.lr_matrix, weight_decay=args.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(
            [
                {"params": embedding, "lr": args.lr_embedding, "weight_decay": args.weight_decay},
                {"params": norms, "lr": args.lr_embedding, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.98),
            fused=True,
        ),
    ]


def schedule(step: int, steps: int, warmup: int) -> float:
    """Learning-rate factor: linear warmup, then a cosine down to 1 %."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * progress))


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------------------------------


def loss_per_token(model: Callable[..., Any], rows: torch.Tensor) -> torch.Tensor:
    """Cross entropy in nats of every token after the first of each row."""
    logits = model(input_ids=rows, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="none").view(
        rows.shape[0], -1
    )


@torch.inference_mode()
def heldout_bits(model: nn.Module, ids: Sequence[int], context: int, stride: int) -> float:
    """Bits that the model needs for the tokens ``ids``, each of them coded exactly once.

    Windows of ``context`` tokens (the first one of them ``<s>``) move on by ``stride``; in every window but the first
    one only the last ``stride`` tokens count, so that they have at least ``context - 1 - stride`` tokens before them.
    """
    model.eval()
    bits = 0.0
    done = 0
    while done < len(ids):
        end = min(len(ids), context - 1 if done == 0 else done + stride)
        row = torch.tensor([[BOS_ID, *ids[max(0, end - (context - 1)) : end]]])
        bits += loss_per_token(model, row)[0, -(end - done) :].double().sum().item() / math.log(2)
        done = end
    return bits


def xz_size(text: str) -> int:
    """Bytes that ``xz -9e`` makes of the text."""
    return len(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


@dataclass(frozen=True)
class Score:
    """Held-out figures of one text (or of all texts together), in bits per byte of text."""

    name: str
    heldout_bytes: int
    tokens: int
    model: float
    xz_alone: float
    xz_after_training_text: float


def evaluate(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text], context: int, stride: int
) -> list[Score]:
    """Score the model and xz on the held-out pieces: one entry per text, and one overall."""
    sums: list[tuple[str, int, int, float, float, float]] = []
    for text in tqdm(texts, desc="evaluate", unit="text", file=sys.stderr):
        ids = tokenizer(text.heldout, add_special_tokens=False, verbose=False)["input_ids"]
        bits = heldout_bits(model, ids, context, stride)
        alone = 8.0 * xz_size(text.heldout)
        after = 8.0 * (xz_size(text.train + text.heldout) - xz_size(text.train))
        sums.append((text.name, len(text.heldout.encode()), len(ids), bits, alone, after))
    sums.append(("overall", *(sum(column) for column in list(zip(*sums, strict=True))[1:])))
    return [Score(name, size, n, *(bits / size for bits in parts)) for name, size, n, *parts in sums]


def report(scores: Sequence[Score]) -> str:
    """The scores as a Markdown table."""
    lines = [
        "| held-out text | bytes | tokens | model | xz -9e, the piece alone | xz -9e, after the training text |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {s.name} | {s.heldout_bytes:,} | {s.tokens:,} | **{s.model:.3f}** | {s.xz_alone:.3f} |"
        f" {s.xz_after_training_text:.3f} |"
        for s in scores
    ]
    return "\n".join(lines)


def samples(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[tuple[str, str]]:
    """A sampled continuation of each of the sample prompts."""
    for number, prompt in enumerate(SAMPLE_PROMPTS):
        torch.manual_seed(seed + number)
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=160, do_sample=True, temperature=0.8, top_p=0.95)
        yield prompt, tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def evaluate_directory(directory: Path, texts: Sequence[Text], args: argparse.Namespace) -> None:
    """Load what lies in ``directory`` as a user would, and print its held-out figures and two continuations."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{directory.name}: {model.num_parameters():,} parameters, {size:,} bytes\n")
    print(f"Held-out bits per byte (windows of {args.context} tokens, stride {args.stride}, float32):\n")
    print(report(evaluate(model, tokenizer, texts, args.context, args.stride)))
    for prompt, continuation in samples(model, tokenizer, args.seed):
        print(f"\n> **{prompt}**{continuation}")


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def save(model: LlamaForCausalLM, weights: dict[str, torch.Tensor], tokenizer: Tokenizer, out: Path) -> None:
    """Write the weights (as bf16), the config (which says float32), and the tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    stored = LlamaForCausalLM(model.config)
    stored.load_state_dict(weights, strict=False)
    stored.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    stored.to(torch.bfloat16).save_pretrained(out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = "float32"
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    ).save_pretrained(out)


def train(texts: Sequence[Text], args: argparse.Namespace) -> None:
    """Train tokenizer and model on the texts and save them."""
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(texts, args.vocab_size)
    corpus = Corpus(texts, tokenizer, args)
    contexts = (args.first_context, args.context, args.long_context)
    last_part = int(args.steps * (1.0 - args.last_share))
    heldout = [tokenizer.encode(text.heldout, add_special_tokens=False).ids for text in texts]
    heldout_bytes = sum(len(text.heldout.encode()) for text in texts)
    model = build_model(args)
    log.info("%s parameters", f"{model.num_parameters():,}")
    averaged = {name: p.detach().clone() for name, p in model.named_parameters()}
    remove_dropout = add_residual_dropout(model, args.dropout)
    optimizers = make_optimizers(model, args)
    base_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    forward = torch.compile(model, dynamic=False) if args.compile else model
    autocast = torch.autocast("cpu", torch.bfloat16) if args.autocast else contextlib.nullcontext()
    batches = {context: corpus.batches(context, args.batch_tokens) for context in contexts}
    chooser = random.Random(args.seed)
    smoothed: float | None = None
    started = time.monotonic()
    progress = tqdm(range(args.steps), desc="train", unit="step", file=sys.stderr, mininterval=5.0)
    for step in progress:
        context = args.first_context if step < args.steps * args.first_share else args.context
        if step == last_part:
            corpus.bpe_dropout = 0.0
            batches = {context: corpus.batches(context, args.batch_tokens) for context in contexts}
        if step >= last_part and chooser.random() < 0.5:
            context = args.long_context
        rows = next(batches[context])
        model.train()
        with autocast:
            loss = loss_per_token(forward, rows).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = schedule(step, args.steps, args.warmup)
        for optimizer, rates in zip(optimizers, base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        decay = min(args.ema, (step + 1) / (step + 20))
        with torch.no_grad():
            for name, p in model.named_parameters():
                averaged[name].lerp_(p, 1.0 - decay)
        smoothed = loss.item() if smoothed is None else 0.98 * smoothed + 0.02 * loss.item()
        progress.set_postfix(loss=f"{smoothed:.3f}")
        if (step + 1) % args.eval_every == 0 and step + 1 < args.steps:
            seconds = time.monotonic() - started
            current = {name: p.detach().clone() for name, p in model.named_parameters()}
            model.load_state_dict(averaged, strict=False)
            bits = sum(heldout_bits(model, ids, args.context, args.context // 2) for ids in heldout)
            model.load_state_dict(current, strict=False)
            save(model, averaged, tokenizer, args.out)
            rate = (step + 1) * args.batch_tokens / seconds
            log.info(
                "step %d, %.0f s, %.0f tokens/s: loss %.3f, held-out %.4f bits per byte",
                step + 1,
                seconds,
                rate,
                smoothed,
                bits / heldout_bytes,
            )
    remove_dropout()
    seconds = time.monotonic() - started
    tokens = args.steps * args.batch_tokens
    log.info("%d steps, %d tokens, %.0f s, %.0f tokens/s", args.steps, tokens, seconds, tokens / seconds)
    save(model, averaged, tokenizer, args.out)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, action="append", metavar="FILE", help="text to train on (repeatable)")
    add("--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help="where the model is saved")
    add("--eval-only", type=Path, metavar="DIR", help="train nothing; evaluate the model in DIR")
    add("--holdout", type=float, default=0.05, help="fraction held out at the end of each text")
    add("--seed", type=int, default=1, help="seed of everything random")
    add("--threads", type=int, default=1, help="CPU threads")
    model = parser.add_argument_group("model")
    model.add_argument("--vocab-size", type=int, default=2048)
    model.add_argument("--hidden-size", type=int, default=192)
    model.add_argument("--intermediate-size", type=int, default=512)
    model.add_argument("--layers", type=int, default=6)
    model.add_argument("--heads", type=int, default=6, help="query heads")
    model.add_argument("--kv-heads", type=int, default=2, help="key/value heads")
    model.add_argument("--max-positions", type=int, default=2048)
    run = parser.add_argument_group("training")
    run.add_argument("--steps", type=int, default=5000)
    run.add_argument("--batch-tokens", type=int, default=2048, help="tokens per step")
    run.add_argument("--context", type=int, default=512, help="tokens per row, and per window of the evaluation")
    run.add_argument("--first-context", type=int, default=256, help="tokens per row at first")
    run.add_argument("--first-share", type=float, default=0.6, help="first part of training, which has rows that short")
    run.add_argument("--long-context", type=int, default=2048, help="tokens per row of the long batches")
    run.add_argument(
        "--last-share", type=float, default=0.15, help="last part: half the batches are long, no BPE dropout"
    )
    run.add_argument("--stride", type=int, default=128, help="stride of the windows of the evaluation")
    run.add_argument("--warmup", type=int, default=100, help="steps of linear warmup")
    run.add_argument("--lr-matrix", type=float, default=6e-3, help="Muon learning rate")
    run.add_argument("--lr-embedding", type=float, default=4e-3, help="AdamW learning rate")
    run.add_argument("--weight-decay", type=float, default=0.1)
    run.add_argument("--dropout", type=float, default=0.1, help="residual dropout")
    run.add_argument("--bpe-dropout", type=float, default=0.05, help="merges skipped while tokenizing training text")
    run.add_argument("--unwrap-share", type=float, default=0.25, help="prose whose line breaks are removed")
    run.add_argument("--excerpt-share", type=float, default=0.2, help="text shown as short, closed excerpts")
    run.add_argument("--ema", type=float, default=0.995, help="decay of the average of the weights")
    run.add_argument(
        "--eval-every", type=int, default=500, help="steps between looks at the held-out text (each saves the model)"
    )
    run.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=True, help="multiply in bf16")
    run.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False, help="use torch.compile")
    args = parser.parse_args(argv)
    args.text = args.text or list(DEFAULT_TEXTS)
    return args


def main() -> None:
    """Entry point."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    texts = load_texts(args.text, args.holdout)
    if args.eval_only is None:
        train(texts, args)
    evaluate_directory(args.eval_only or args.out, texts, args)


if __name__ == "__main__":
    main()
