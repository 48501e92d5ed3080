"""Where the drafts of an assisted call come from, if the engine is to verify them: prompt lookup, or a draft model."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.utils import logging

from hf_paged.api.engine_of import engine_of
from hf_paged.core.errors import UnsupportedCallError
from hf_paged.engine.call_context import call_context, within
from hf_paged.engine.draft_model import DraftModel
from hf_paged.engine.engine import Engine
from hf_paged.engine.prepared_call import PreparedCall
from hf_paged.engine.sampled_run import CallRows
from hf_paged.sampling.lookup import LookupSettings
from hf_paged.sampling.processors import RowEnds, processor_kinds
from hf_paged.sampling.random import NoiseAhead

logger = logging.get_logger(__name__)

# Of `_assisted_decoding` alone; prompt lookup has no use for them.
ASSISTED_ARGUMENTS = ("inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer")


def lookup_settings(model: Any, call: PreparedCall) -> LookupSettings | None:
    """How the engine is to look up drafts; `None`: they come from elsewhere, or transformers' loop has to.

    Raises:
        ValueError: A number of tokens below 1.
    """
    config, ends = call.generation_config, RowEnds.of(call.criteria)
    if (
        config.prompt_lookup_num_tokens is None
        or config.assistant_early_exit is not None
        or getattr(config, "assistant_ensemble_weight", None) is not None
        or ends.max_length != config.max_length
        # transformers looks at other criteria behind the tokens of a step only.
        or (ends.others is not None and len(call.input_ids) == 1)
        or engine_of(model).traits.states  # which don't go back
    ):
        return None
    eos = config._eos_token_tensor
    return LookupSettings(
        num_tokens=config.prompt_lookup_num_tokens,
        max_ngram=config.max_matching_ngram_size or 2,
        max_length=config.max_length,
        vocab_size=model.config.get_text_config().vocab_size,
        eos=() if eos is None else tuple(eos.reshape(-1).tolist()),
        # Of a single row draws, and what a streamer is given at once, follow from how many drafts there are.
        adapts=(len(call.input_ids) > 1 or not config.do_sample) and call.others.get("streamer") is None,
    )


def draft_model_of(model: Any, call: PreparedCall) -> DraftModel | None:
    """The patched model that drafts for several prompts; `None`: there is one prompt, or no such model.

    Raises:
        UnsupportedCallError: That model is assisted itself: two loops could wait for each other's steps.
    """
    config, assistant = call.generation_config, call.others.get("assistant_model")
    if assistant is None or not isinstance(getattr(assistant, "paged", None), Engine):
        return None
    own = engine_of(model)
    engine: Engine = assistant.paged
    if (
        engine is own
        or len(call.input_ids) == 1
        or config.prompt_lookup_num_tokens is not None
        or config.assistant_early_exit is not None
        or getattr(config, "assistant_ensemble_weight", None) is not None
        or getattr(config, "speculation_type", None) is not None
        or getattr(config, "use_mtp", None)
        or RowEnds.of(call.criteria).max_length != config.max_length
        or call.others.get("assistant_tokenizer") is not None
        or model.config.get_text_config().vocab_size != assistant.config.get_text_config().vocab_size
        or not engine.forwards.is_batched()
        or engine.core.bound.wrapper is not None
        or own.traits.states
        or engine.ranks is not None
        or own.ranks is not None
    ):
        return None

    def check() -> None:
        if any(run.is_assisted for run in list(engine.core.runs)):
            raise UnsupportedCallError(
                "the assistant model is itself assisted by another model at the moment: wait for that call to end, or "
                "leave assistant_model out"
            )

    def has_room(num_tokens: int) -> bool:
        pool = engine.core.pool
        needed = pool.manager.most_blocks(num_tokens, pool.config.max_num_batched_tokens)
        return num_tokens <= engine.core.bound.max_context and needed <= pool.manager.pool.num_blocks

    check()
    calls, salt, device = engine.calls, call_context().cache_salt, call.device

    def generate(
        ids: Tensor,
        padding: list[int],
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        noise: NoiseAhead | None,
    ) -> list[list[int]]:
        rows = CallRows(ids, padding, 1, processors, criteria, device, noise is not None, pad_token_id=0, noise=noise)
        with within(cache_salt=salt):
            return [row.tokens for row in calls.run(rows).rows]

    kinds = zip(call.processors, processor_kinds(call.processors), strict=True)
    return DraftModel(
        generate,
        has_room,
        check,
        LogitsProcessorList(processor for processor, kind in kinds if kind is not None),
        pad_token_id=0 if config._pad_token_tensor is None else int(config._pad_token_tensor),
        num_tokens=assistant.generation_config.num_assistant_tokens or 20,
        adapts=True,
    )


def can_do_without_drafts(call: PreparedCall) -> bool:
    """Makes a call of several prompts one without drafts, if it can be: its tokens are the same. Says that it does.

    Raises:
        ValueError: The drafts are those of a model that is not patched.
    """
    config, assistant = call.generation_config, call.others.get("assistant_model")
    if assistant is not None and not isinstance(getattr(assistant, "paged", None), Engine):
        raise ValueError(
            f"assisted generate is only supported for batch_size = 1 (got {len(call.input_ids)}), or with a patched "
            "model for the drafts: assistant_model=hf_paged.patch(assistant)"
        )
    if call.cache is None or (config.prompt_lookup_num_tokens is None and assistant is None):
        return False
    name = "assistant_model" if config.prompt_lookup_num_tokens is None else "prompt_lookup_num_tokens"
    logger.warning_once(
        f"hf_paged: this call runs without {name}: for several prompts it needs a model whose layers keep no state, "
        "and a call without per-step outputs, your own processors and criteria, hooks on inner modules, or penalties "
        "over padded prompts"
    )
    call.loop = "_sample"
    for name in ASSISTED_ARGUMENTS:
        call.others.pop(name, None)
    return True
