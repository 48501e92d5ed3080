"""The modes of `generate()`: a table; a new one is a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    WatermarkingConfig,
)

import hf_paged
from helpers.models import EOS, PAD, VOCAB, build, ragged_batch, random_ids
from helpers.pairs import Make, Pair
from helpers.user_code import Countdown, NextToken, RowIndexed, StopAll, StopRows, criteria, processors

NEW = 12
EOS_OFTEN = list(range(2, 30))
"""As end-of-sequence ids these end the rows of a batch early, and at different steps."""
SOME_EOS = list(range(2, 14))
"""With these, early_stopping and length_penalty decide which beams win."""


def allowed_tokens(row: int, input_ids: Tensor) -> list[int]:
    """A grammar that differs by row and by last token."""
    return list(range(3 + (row + int(input_ids[-1])) % 5, VOCAB, 2 + row % 3))


def embeds(model: Any, keep_ids: bool = False) -> dict[str, Any]:
    """The ragged batch as `inputs_embeds`."""
    ids = ragged_batch()["input_ids"]
    return {"inputs_embeds": model.get_input_embeddings()(ids).detach()} | ({"input_ids": ids} if keep_ids else {})


def one_prompt() -> dict[str, Tensor]:
    """A batch of one, with repetitions in it for prompt lookup."""
    return {"input_ids": random_ids(1, 5).repeat(1, 3)}


def even_batch() -> dict[str, Tensor]:
    """Prompts of one length."""
    return {"input_ids": random_ids(3, 11)}


def masked(*hidden: tuple[int, int]) -> dict[str, Tensor]:
    """Three prompts with these `(row, column)` places hidden, anywhere."""
    batch = {"input_ids": random_ids(3, 9), "attention_mask": torch.ones(3, 9, dtype=torch.long)}
    for row, column in hidden:
        batch["attention_mask"][row, column] = 0
    return batch


def typed(ids: torch.dtype, mask: torch.dtype) -> dict[str, Tensor]:
    """The ragged batch in other types."""
    batch = ragged_batch()
    return {"input_ids": batch["input_ids"].to(ids), "attention_mask": batch["attention_mask"].to(mask)}


def only_mask() -> dict[str, Tensor]:
    """The mask of the ragged batch, for modes that bring their prompts themselves."""
    return {"attention_mask": ragged_batch()["attention_mask"]}


def padded_with_eos(with_mask: bool) -> dict[str, Any]:
    """The ragged batch, padded with the end-of-sequence id."""
    batch = ragged_batch()
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, EOS)
    return (batch if with_mask else {"input_ids": batch["input_ids"]}) | {"pad_token_id": EOS}


def positioned(shift: int, step: int = 1) -> dict[str, Tensor]:
    """The ragged batch with position ids of its own: shifted, or with gaps."""
    batch = ragged_batch()
    positions = (batch["attention_mask"].cumsum(dim=1) - 1).clamp_min(0) * step + shift
    return batch | {"position_ids": positions}


@dataclass(frozen=True)
class Mode:
    """A row of the table.

    Attributes:
        arguments: Of `generate()`.
        make: Arguments that each model needs its own of.
        batch: Makes the prompts.
        is_packed: Whether every forward of the model is a packed batch of real tokens, within the token budget.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    make: Make | None = None
    batch: Callable[[], dict[str, Any]] = ragged_batch
    is_packed: bool = True

    def run(self, pair: Pair) -> tuple[Any, Any]:
        """Runs the mode on both models."""
        length: dict[str, Any] = {} if "max_length" in self.arguments else {"max_new_tokens": NEW}
        return pair.generate(make=self.make, **(self.batch() | length | self.arguments))


SAMPLE = {"do_sample": True}
EACH_MODEL: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "top_k": 20},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
}
"""What every model runs, whatever its kind."""
_SCORED = EACH_MODEL["beams"] | {"return_dict_in_generate": True, "output_scores": True}
EACH_MODEL_SCORED = EACH_MODEL | {"beams": _SCORED}
"""The same, with beams in transformers' own loop, whose scores are compared."""
DETAILS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
BEAMS = {"num_beams": 3}
MODES: dict[str, Mode] = {
    "greedy": Mode(),
    "greedy_even": Mode(batch=even_batch),
    "greedy_one": Mode(batch=one_prompt),
    "one_token": Mode({"max_new_tokens": 1}),
    "equal_prompts": Mode(batch=lambda: {"input_ids": random_ids(1, 9).repeat(4, 1)}),
    "equal_prompts_samples": Mode(
        {"do_sample": True, "num_return_sequences": 2}, batch=lambda: {"input_ids": random_ids(1, 9).repeat(2, 1)}
    ),
    "mask_with_holes": Mode(batch=partial(masked, (0, 3), (2, 0), (2, 1), (2, 7)), is_packed=False),
    "row_without_tokens": Mode(batch=partial(masked, *((1, column) for column in range(9))), is_packed=False),
    "bool_mask": Mode(batch=partial(typed, torch.int64, torch.bool)),
    "float_mask": Mode(batch=partial(typed, torch.int64, torch.float32)),
    "int32_ids": Mode(batch=partial(typed, torch.int32, torch.int32)),
    "from_bos_alone": Mode(batch=dict),
    "very_ragged": Mode(batch=partial(ragged_batch, (29, 1, 2, 17, 1, 5))),
    "sample": Mode(SAMPLE | {"top_k": 0}),
    "temperature": Mode(SAMPLE | {"temperature": 0.7}),
    "top_k": Mode(SAMPLE | {"top_k": 7}),
    "top_p": Mode(SAMPLE | {"top_k": 0, "top_p": 0.8}),
    "min_p": Mode(SAMPLE | {"top_k": 0, "min_p": 0.05}),
    "typical_p": Mode(SAMPLE | {"top_k": 0, "typical_p": 0.7}),
    "epsilon_cutoff": Mode(SAMPLE | {"top_k": 0, "epsilon_cutoff": 0.01}),
    "eta_cutoff": Mode(SAMPLE | {"top_k": 0, "eta_cutoff": 0.01}),
    "top_h": Mode(SAMPLE | {"top_k": 0, "top_h": 0.6}),
    "sample_eos_often": Mode(SAMPLE | {"eos_token_id": EOS_OFTEN}),
    "samples": Mode(SAMPLE | {"num_return_sequences": 3}),
    "samples_of_one_token": Mode(SAMPLE | {"num_return_sequences": 3}, batch=lambda: {"input_ids": random_ids(2, 1)}),
    "beams_of_one_token": Mode({"num_beams": 3}, batch=lambda: {"input_ids": random_ids(2, 1)}),
    "samples_eos_often": Mode(SAMPLE | {"num_return_sequences": 3, "eos_token_id": EOS_OFTEN}),
    "beams": Mode(BEAMS),
    "beams_one": Mode(BEAMS, batch=one_prompt),
    "beams_eos_often": Mode(BEAMS | {"eos_token_id": EOS_OFTEN}),
    "beams_early": Mode(BEAMS | {"early_stopping": True, "eos_token_id": SOME_EOS}),
    "beams_never_early": Mode(BEAMS | {"early_stopping": "never", "eos_token_id": SOME_EOS}),
    "beams_long": Mode(BEAMS | {"length_penalty": 3.0, "eos_token_id": SOME_EOS}),
    "beams_short": Mode(BEAMS | {"length_penalty": -2.0, "eos_token_id": SOME_EOS}),
    "beams_returned": Mode(BEAMS | DETAILS | {"num_return_sequences": 2}),
    "beams_processors": Mode(BEAMS | {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "min_new_tokens": 4}),
    "beams_grammar": Mode(BEAMS | {"prefix_allowed_tokens_fn": allowed_tokens}),
    "beam_sample": Mode(BEAMS | SAMPLE | {"top_k": 9, "temperature": 1.5}),
    "beam_samples": Mode(BEAMS | SAMPLE | DETAILS | {"num_return_sequences": 3, "eos_token_id": SOME_EOS}),
    "beams_hidden_states": Mode(BEAMS | DETAILS | {"output_hidden_states": True}, is_packed=False),
    "eos_list": Mode({"eos_token_id": EOS_OFTEN}),
    "no_eos": Mode({"eos_token_id": None, "pad_token_id": None}, batch=even_batch),
    "max_length": Mode({"max_length": 19}),
    "min_length": Mode({"min_length": 18, "eos_token_id": EOS_OFTEN}),
    "min_new_tokens": Mode({"min_new_tokens": 5, "eos_token_id": EOS_OFTEN}),
    "repetition_penalty": Mode({"repetition_penalty": 1.8}),
    "encoder_repetition_penalty": Mode({"encoder_repetition_penalty": 1.8}),
    "no_repeat_ngram": Mode({"no_repeat_ngram_size": 1}),
    "bad_words": Mode({"bad_words_ids": [[i] for i in range(10, 50)] + [[60, 61], [70, 71, 72]]}),
    "forced_bos": Mode({"forced_bos_token_id": 13}, batch=lambda: {"input_ids": random_ids(3, 1)}),
    "forced_eos": Mode({"forced_eos_token_id": [14, 2]}),
    "suppress_tokens": Mode({"suppress_tokens": list(range(20, 70))}),
    "begin_suppress_tokens": Mode({"begin_suppress_tokens": list(range(3, 60))}),
    "sequence_bias": Mode({"sequence_bias": [[[5], 3.0], [[7, 9], 3.0], [[11], -9.0]]}),
    "decay_length": Mode({"exponential_decay_length_penalty": (3, 1.6)}),
    "renormalize": Mode(SAMPLE | DETAILS | {"renormalize_logits": True, "remove_invalid_values": True}),
    "watermark": Mode({"watermarking_config": WatermarkingConfig(bias=2.5)}),
    "user_processor": Mode({"eos_token_id": EOS_OFTEN}, processors(NextToken)),
    "stateful_processor": Mode({"eos_token_id": EOS_OFTEN}, processors(Countdown)),
    "row_indexed_processor": Mode({"eos_token_id": EOS_OFTEN}, processors(RowIndexed)),
    "user_processors_sampling": Mode(SAMPLE | {"num_return_sequences": 2}, processors(NextToken, RowIndexed)),
    "user_processor_beams": Mode(BEAMS, processors(NextToken, RowIndexed, Countdown)),
    "row_criterion": Mode({}, criteria(StopRows)),
    "row_criterion_beams": Mode(BEAMS, criteria(StopRows)),
    "stateful_criterion": Mode({"eos_token_id": EOS_OFTEN}, criteria(StopAll)),
    "no_time": Mode({"max_time": 0.0}),
    "much_time": Mode({"max_time": 1e6}),
    "grammar": Mode({"prefix_allowed_tokens_fn": allowed_tokens, "eos_token_id": EOS_OFTEN}),
    "grammar_samples": Mode(SAMPLE | {"num_return_sequences": 2, "prefix_allowed_tokens_fn": allowed_tokens}),
    # Its processor runs the model once more, without our cache.
    "guidance": Mode({"guidance_scale": 1.7}, is_packed=False),
    "negative_prompt": Mode({"guidance_scale": 1.7, "negative_prompt_ids": random_ids(3, 4, seed=5)}, is_packed=False),
    "negative_prompt_beams": Mode(
        BEAMS | {"guidance_scale": 1.7, "negative_prompt_ids": random_ids(3, 4, seed=5).repeat_interleave(3, 0)},
        batch=even_batch,
        is_packed=False,
    ),
    "details": Mode(DETAILS | {"eos_token_id": EOS_OFTEN}),
    "details_samples": Mode(SAMPLE | DETAILS | {"num_return_sequences": 2, "eos_token_id": EOS_OFTEN}),
    "hidden_states": Mode(DETAILS | {"output_hidden_states": True, "eos_token_id": EOS_OFTEN}, is_packed=False),
    # A chunk of nothing but padding in some rows.
    "prefill_chunks": Mode({"prefill_chunk_size": 4}, is_packed=False),
    "prefill_chunks_even": Mode({"prefill_chunk_size": 4}, batch=even_batch),
    "prefill_chunks_beams": Mode(BEAMS | {"prefill_chunk_size": 3}, batch=even_batch),
    "pad_is_eos": Mode(batch=partial(padded_with_eos, True)),
    "pad_is_eos_no_mask": Mode(batch=partial(padded_with_eos, False)),
    "pads_no_mask": Mode(batch=lambda: {"input_ids": ragged_batch()["input_ids"]}),
    "right_padded": Mode(batch=partial(ragged_batch, side="right"), is_packed=False),
    "embeds": Mode({}, embeds, batch=only_mask),
    "embeds_and_ids": Mode({}, partial(embeds, keep_ids=True), batch=only_mask),
    "embeds_beams": Mode(BEAMS, embeds, batch=only_mask),
    "embeds_samples": Mode(SAMPLE | {"num_return_sequences": 3}, embeds, batch=only_mask),
    "positions": Mode(batch=partial(positioned, 0)),
    "positions_shifted": Mode(batch=partial(positioned, 5)),
    "positions_with_gaps": Mode(batch=partial(positioned, 0, 3)),
    "config_object": Mode({"generation_config": GenerationConfig(max_new_tokens=9, do_sample=True, pad_token_id=PAD)}),
    "prompt_lookup": Mode({"prompt_lookup_num_tokens": 3}, batch=one_prompt),
    "prompt_lookup_sampling": Mode(SAMPLE | {"prompt_lookup_num_tokens": 4, "temperature": 0.4}, batch=one_prompt),
    "prompt_lookup_details": Mode(
        DETAILS | {"prompt_lookup_num_tokens": 3, "repetition_penalty": 0.7}, batch=one_prompt
    ),
}


def assistant(kind: str, patch_settings: dict[str, Any] | None) -> Any:
    """A fresh assistant (each keeps count of how well it does): one that is often right, or one that never is."""
    if kind == "other":
        model = build("llama", layers=1, seed=9)
    else:
        model = build("llama")
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
    return model if patch_settings is None else hf_paged.patch(model, **patch_settings)
