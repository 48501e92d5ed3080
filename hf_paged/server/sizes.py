"""The size that an answer may reach, computed before it is made."""

from __future__ import annotations

from collections.abc import Sequence

from hf_paged.server.errors import ApiError
from hf_paged.server.prompts import Prompt
from hf_paged.server.schemas import CompletionRequest, SamplingBody

# Bytes that each of these has in an answer, or holds until it is sent.
OF_CHOICE, OF_TOKEN, OF_LOGPROB = 4096, 8, 100
LARGE = ("n", "best_of", "echo", "logprobs", "top_logprobs", "prompt_logprobs")  # fields that multiply them


def most_tokens(body: SamplingBody, prompts: Sequence[Prompt], most_bytes: int) -> int:
    """Tokens that each text may have for the answer to stay within so many bytes.

    Raises:
        ApiError: They are fewer than the body asks for.
    """
    num_choices = body.num_samples * len(prompts)
    of_token = OF_TOKEN + OF_LOGPROB * _num_named(body.wanted_logprobs)
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    of_prompts = body.n * OF_LOGPROB * _num_named(body.prompt_logprobs) * num_prompt_tokens
    if isinstance(body, CompletionRequest) and body.echo:
        of_prompts += body.n * (body.num_characters + of_token * num_prompt_tokens)
    most = (most_bytes - of_prompts - num_choices * OF_CHOICE) // (num_choices * of_token)
    wanted = 1 if body.limit is None else body.limit
    if most >= wanted:
        return most
    size = of_prompts + num_choices * (OF_CHOICE + wanted * of_token)
    given = {name: getattr(body, name, None) for name in LARGE if name in body.model_fields_set}
    field = body.limit_field if most > 0 else next(iter(given), "prompt")
    would_do = f"at most {most} tokens" if most > 0 else "fewer prompts, choices or log-probabilities"
    raise ApiError(
        400,
        f"{field}: {num_choices} choices of {wanted} tokens{' with ' if given else ''}"
        f"{', '.join(f'{name}={value}' for name, value in given.items())} are an answer of about "
        f"{size / (1 << 20):.1f} MiB, and this server's limit is {most_bytes / (1 << 20):.1f} MiB: {would_do} would do",
        field,
        "answer_too_large",
    )


def _num_named(num_top: int | None) -> int:
    """Tokens that are named in the place of one."""
    return 0 if num_top is None else 1 + num_top
