"""How a `generate()` call runs: as rows of the engine, by transformers' loop over a `PagedCache`, or by stock."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.utils import logging

from hf_paged.api.drafting import ASSISTED_ARGUMENTS, draft_model_of, lookup_settings
from hf_paged.api.engine_of import engine_of
from hf_paged.api.given_call import IGNORED_BY_FORWARD, forward_call, is_given
from hf_paged.api.own_forward import hands_on
from hf_paged.core.errors import UnsupportedCallError
from hf_paged.core.sequence import GivenPrompt, Source
from hf_paged.engine.call_context import call_context
from hf_paged.engine.engine import Engine
from hf_paged.engine.prepared_call import PreparedCall
from hf_paged.engine.sampled_run import CallRows
from hf_paged.kernels.transfers import to_host
from hf_paged.memory.streams import let_caller_first, on_steps_stream
from hf_paged.model.base_class import base_class
from hf_paged.model.cache_argument import CACHE_ARGUMENTS
from hf_paged.model.forward_call import ForwardCall
from hf_paged.model.packed_forward import PackedForward
from hf_paged.model.spread import is_wrapped
from hf_paged.model.traits import is_stochastic
from hf_paged.model.wrapper import token_positions
from hf_paged.sampling.beams import BeamSettings
from hf_paged.sampling.processors import RowEnds, are_row_wise, ends_together, pads_finished, take_any_rows

logger = logging.get_logger(__name__)

# Of models: what transformers' loops call between two forwards.
_LOOP_METHODS = (
    *("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill", "_sample"),
    *("_beam_search", "_get_top_k_continuations", "_get_running_beams_for_next_iteration"),
    *("_update_finished_beams", "_check_early_stop_heuristic", "_beam_search_has_unfinished_sequences"),
    *("_assisted_decoding", "_get_candidate_generator"),
)


def why_stock(model: Any, generation_config: GenerationConfig, cache: Any, verifies_drafts: bool) -> str | None:
    """Why a call must run stock `generate()` with its own cache, or `None`.

    `verifies_drafts`: it is the assisted decoding of one prompt.
    """
    engine = engine_of(model)
    traits = engine.traits
    if traits.runs_stock:
        return f"the pool is not for this {base_class(model).__name__} ({traits.why_padded})"
    if (generation_config.is_assistant or verifies_drafts) and traits.states:
        return "drafts of a model whose layers keep a state are taken back"
    if cache is not None:
        return f"past_key_values is a {type(cache).__name__}"
    if generation_config.use_cache is False:
        return "use_cache=False"
    if generation_config.cache_implementation not in (None, "dynamic"):
        return f"cache_implementation={generation_config.cache_implementation!r}"
    if generation_config.output_attentions and generation_config.return_dict_in_generate:
        return "output_attentions=True"
    if _peft_type(model) in ("PREFIX_TUNING", "CARTRIDGE"):
        return "its PEFT adapter brings learned keys and values in a cache of its own"
    if traits.cross and generation_config.output_hidden_states and generation_config.return_dict_in_generate:
        return "output_hidden_states=True of a model with an encoder"
    if traits.cross and engine.core.weights_version.needs_rows:
        return "hooks on inner modules of a model with an encoder that are not marked by hf_paged.packed_hook"
    if engine.ranks is not None and (reason := _why_stock_on_ranks(engine, generation_config)):
        return f"{reason} over several processes (tp_plan)"
    if model.training and is_stochastic(model):
        return "the model is in training mode with dropout, other noise or gradient checkpointing (call model.eval())"
    return None


def _why_stock_on_ranks(engine: Engine, generation_config: GenerationConfig) -> str | None:
    """Why a call needs a loop on every rank: it looks at whole batches, or runs the model beside its forwards."""
    if generation_config.output_hidden_states and generation_config.return_dict_in_generate:
        return "output_hidden_states=True"
    if generation_config.guidance_scale not in (None, 1):
        return f"guidance_scale={generation_config.guidance_scale}"
    if engine.core.weights_version.needs_rows:
        return "hooks on the model's inner modules that are not marked by hf_paged.packed_hook"
    return None


def why_not_stateful(engine: Engine, arguments: dict[str, Any]) -> str | None:
    """Why a model whose layers keep a state must be given a call's padding as it is, or `None`."""
    if engine.traits.cross:
        return _why_not_padded(engine, arguments.get("decoder_attention_mask"))
    mask = arguments.get("attention_mask")
    if not engine.traits.states or not isinstance(mask, Tensor):
        return None
    (mask,) = to_host([mask])
    if mask.ndim == 2 and bool((mask[:, 1:] >= mask[:, :-1]).all()) and bool(mask[:, -1].all()):
        return None
    return "its attention_mask is not that of prompts padded on the left, and layers of the model keep a state"


def _why_not_padded(engine: Engine, mask: Any) -> str | None:
    """Why a decoder can't be given prompts with this mask, or `None`."""
    if not isinstance(mask, Tensor) or bool(mask.all()):
        return None
    (mask,) = to_host([mask])
    is_left = mask.ndim == 2 and bool((mask[:, 1:] >= mask[:, :-1]).all()) and bool(mask[:, -1].all())
    if is_left and engine.core.bound.takes_decoder_positions:
        return None
    return "its decoder_attention_mask hides tokens, which take places all the same in a decoder that is told no others"


def _peft_type(model: nn.Module) -> str | None:
    """Type of the PEFT wrapper whose `generate()` is running: it puts a method of its own on the model for the time."""
    wrapper = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    kind = getattr(getattr(wrapper, "active_peft_config", None), "peft_type", None)
    return None if kind is None else str(getattr(kind, "value", kind))


def fall_back(engine: Engine, reason: str) -> None:
    """Warns that a call runs stock `generate()`, or raises `UnsupportedCallError` under `strict=True`."""
    if engine.config.strict:
        raise UnsupportedCallError(f"{reason}: only stock generate() can run this call, and strict=True forbids it")
    engine.core.note_detour(f"stock generate(): {reason}")
    run_stock(engine)
    logger.warning_once(f"hf_paged: this call runs stock generate() without the paged cache: {reason}")


def run_stock(engine: Engine) -> None:
    """Lets stock's forwards of this engine's call have the adapters that its rows have."""
    context = call_context()
    if context.runs_stock is not None and context.adapters is not None and context.adapters[0] is engine.core:
        context.runs_stock()


def engine_rows(model: Any, call: PreparedCall) -> CallRows | None:
    """The call as rows for the engine to sample, or as beams for it to search; `None`: it may differ from stock's loop.

    It doesn't differ when all of the caller's code in it is transformers' own and row-wise, no per-step outputs are
    asked for, and nothing hooks or overrides the forward and its preparation.
    """
    engine, config = engine_of(model), call.generation_config
    lookup, draft_model, beams = None, None, None
    if call.is_assisted:
        lookup, draft_model = lookup_settings(model, call), draft_model_of(model, call)
        if lookup is None and draft_model is None:
            return None
    if not _is_plain_call(engine, model, call):
        return None
    if (config.num_beams or 1) > 1:
        beams = _beam_settings(call)
        if beams is None:
            return None
    known = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "streamer"}
    known |= {*CACHE_ARGUMENTS, *IGNORED_BY_FORWARD, *(ASSISTED_ARGUMENTS if call.is_assisted else ())}
    is_text = not any(is_given(call.others[name]) for name in call.others.keys() - known)
    wrapper = engine.core.bound.wrapper
    given, padding = None, None
    sources: list[Source] = []
    if engine.traits.cross:
        forward = None if call.is_assisted else _first_forward(model, call)
        if forward is not None and forward.sources is not None:
            sources, padding = forward.sources, _padding(call, has_axes=False)
    elif wrapper is not None and not (is_text and wrapper.is_causal):
        given = None if call.is_assisted else _given_prompts(model, call)
        padding = None if given is None else [0] * len(call.input_ids)
    elif is_text:
        padding = _padding(call, has_axes=wrapper is not None)
    if padding is None:
        return None
    generator, device = None, call.device
    if config.do_sample:
        generator = torch.Generator(device)
        generator.set_state(call.states[torch.device(generator.device)])
    pad = config._pad_token_tensor
    return CallRows(
        input_ids=call.input_ids if given is None else to_host([call.input_ids])[0],
        given=given,
        sources=sources,
        places_by_column=engine.traits.places_by_column,
        padding=padding,
        num_samples=_fan_out(config),
        processors=call.processors,
        criteria=call.criteria,
        device=device,
        do_sample=bool(config.do_sample),
        pad_token_id=0 if pad is None else int(pad),
        generator=generator,
        beams=beams,
        lookup=lookup,
        draft_model=draft_model,
    )


def why_loop(model: Any, call: PreparedCall) -> str:
    """Why `engine_rows` has none for a call."""
    engine, others = engine_of(model), (*call.processors, *call.criteria)
    foreign = sorted({type(each).__name__ for each in others if not are_row_wise([each])})
    reasons = (
        (not engine.traits.is_batched, "rows of the model depend on those beside them"),
        (not call.is_row_wise, f"processors or criteria that are not transformers' own ({', '.join(foreign)})"),
        (call.generation_config.return_dict_in_generate, "return_dict_in_generate=True"),
        (engine.forwards.check_hooks(), "hooks on inner modules"),
        (call.cache is not None and not call.cache.owned_by_call, "past_key_values is a PagedCache"),
        (call.others.get("streamer") is not None and len(call.input_ids) > 1, "a streamer of several rows"),
        (model._forward_hooks or model._forward_pre_hooks, "hooks on the model itself"),
        (not _is_plain(model), "a method of the model's class or object is not transformers'"),
    )
    return next((reason for holds, reason in reasons if holds), "its inputs, drafts or ends are for that loop alone")


def _is_plain_call(engine: Engine, model: Any, call: PreparedCall) -> bool:
    """Whether each row may run ahead of the others, and each step calls the model with the next tokens alone."""
    assert call.cache is not None
    return (
        engine.forwards.is_batched()
        and rows_may_leave(engine, call)
        and (pads_finished(call.criteria) or ends_together(call.criteria))
        and not call.cache.sequences
        and call.input_ids.shape[1] > 0
        # A streamer is given the tokens of all rows step by step.
        and (call.others.get("streamer") is None or len(call.input_ids) == 1)
        and _is_plain(model)
        and take_any_rows(call.processors)
    )


def _padding(call: PreparedCall, has_axes: bool) -> list[int] | None:
    """Left padding of each row, with the call's ids on the host from here on; `None`: it has padding elsewhere, or
    positions of its own. `has_axes`: positions may be of several axes.
    """
    mask: Tensor | None = call.of_prompt("attention_mask")
    positions: Tensor | None = call.of_prompt("position_ids")
    if positions is not None and has_axes:
        positions = token_positions(positions)
    if positions is not None and (positions.shape != call.input_ids.shape or positions.is_floating_point()):
        return None
    if mask is not None and mask.shape != call.input_ids.shape:
        return None
    found = [value for value in (call.input_ids, mask, positions) if value is not None]
    if call.input_ids.device.type == "cuda":
        found = list(to_host(found))
    ids, found = found[0], found[1:]
    rows, width = ids.shape
    padding = [0] * rows
    if mask is not None:
        is_hidden = found.pop(0) == 0
        padding = is_hidden.sum(dim=1).tolist()
        if is_hidden.long().cumprod(dim=1).sum(dim=1).tolist() != padding or max(padding) == width:
            return None
    if positions is not None:
        # On the host by name: the caller may have set another default device.
        expected = torch.arange(width, device="cpu") - torch.tensor(padding, device="cpu")[:, None]
        if not bool(((found.pop().cpu() == expected) | (expected < 0)).all()):
            return None
    call.input_ids = ids
    return padding


def _given_prompts(model: Any, call: PreparedCall) -> list[GivenPrompt] | None:
    """The prompts of a call to a multimodal model, if the engine can go on with its rows by itself."""
    forward, core = _first_forward(model, call), engine_of(model).core
    if forward is None:
        return None
    let_caller_first(core.pool.kv_device)
    with on_steps_stream(core.pool.kv_device):  # in their memory, as what a caller's forward is given
        return PackedForward.prompts(forward, core.bound)


def _first_forward(model: Any, call: PreparedCall) -> ForwardCall | None:
    """The first forward that transformers' loop would make, of a row for each prompt; `None`: it asks for more."""
    assert call.cache is not None
    inputs = model.prepare_inputs_for_generation(call.input_ids, is_first_iteration=True, **call.others)
    forward = forward_call(model, call.cache, dict(inputs))
    if forward.others or not forward.is_known:
        return None
    return forward.select(slice(None, None, _fan_out(call.generation_config)))


def _fan_out(generation_config: GenerationConfig) -> int:
    """Rows of each prompt."""
    num_beams: int = generation_config.num_beams or 1
    return num_beams if num_beams > 1 else generation_config.num_return_sequences or 1


def _beam_settings(call: PreparedCall) -> BeamSettings | None:
    """How the engine is to search the beams of a call; `None`: transformers' loop has to."""
    config, ends = call.generation_config, RowEnds.of(call.criteria)
    if (
        config.low_memory
        or call_context().wants_logprobs
        or ends.others is not None
        or ends.max_length != config.max_length
    ):
        return None
    eos = [] if config._eos_token_tensor is None else config._eos_token_tensor.reshape(-1).tolist()
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    return BeamSettings(
        num_beams=config.num_beams,
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
        eos=tuple(sorted(ends.eos)),
        num_candidates=max(2, 1 + len(eos)) * config.num_beams,
        prompt_length=call.input_ids.shape[1],
        max_length=config.max_length,
        num_return_sequences=config.num_return_sequences or 1,
        fill=(pad or eos[0]) if eos else -1,  # as transformers' precedence has it: a pad token of 0 counts as none
    )


def _is_plain(model: Any) -> bool:
    """Whether each step of transformers' loop would do nothing but call the model's forward with the next token."""
    own, kind = vars(model), base_class(model)
    for name in _LOOP_METHODS:
        method = getattr(kind, name, None)
        if name in own or (method is not None and not method.__module__.startswith("transformers.")):
            return False
    is_own = "forward" not in own or is_wrapped(model) or hands_on(model)
    return is_own and not model._forward_hooks and not model._forward_pre_hooks


def rows_may_leave(engine: Engine, call: PreparedCall) -> bool:
    """Whether finished rows can be left out of the remaining forwards without a difference that a caller could see.

    Not if the cache outlives the call, per-step outputs were asked for, or a caller's own code looks at the whole
    batch.
    """
    cache = call.cache
    return (
        cache is not None
        and cache.owned_by_call
        and not engine.forwards.check_hooks()
        and engine.traits.rows_independent
        and not call.generation_config.return_dict_in_generate
        and call.is_row_wise
    )
