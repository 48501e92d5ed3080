"""How likely the tokens of a text are: forwards over it, a slice of rows at a time."""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.attention.cache import PagedCache
from hf_paged.sampling.logprobs import Logprobs, TokenLogprobs

SLICE = 256  # rows of logits at a time: of a long text all of them would take gigabytes


@torch.no_grad()
def token_logprobs(model: Any, prompt: list[int], tokens: list[int], num_top: int) -> list[TokenLogprobs]:
    """Of each token behind a prompt, how likely it was, by the model's own logits. Steps are shared as in any call.

    Args:
        model: A patched model.
        prompt: One token at least; what the prefix cache has of it is not computed again.
        tokens: What follows it.
        num_top: Likeliest tokens beside each.
    """
    if not tokens:
        return []
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([[*prompt, *tokens]], dtype=torch.int64, device=device)
    cache = PagedCache(model)
    found: list[TokenLogprobs] = []
    last = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    logits = model(ids[:, : len(prompt)], past_key_values=cache, use_cache=True, **last).logits[0, -1:]
    for start in range(len(prompt), ids.shape[1], SLICE):
        own = ids[:, start : start + SLICE]
        following = model(own, past_key_values=cache, use_cache=True).logits[0]
        found += Logprobs(torch.cat([logits, following[:-1]]).float(), own[0], num_top).read()
        logits = following[-1:]
    cache.reset()
    return found
