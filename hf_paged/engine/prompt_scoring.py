"""`PromptScoring`: how likely a request's prompt was, found out on a thread before the request begins."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_paged.engine.call_context import CallContext, within
from hf_paged.engine.core import EngineCore
from hf_paged.engine.decoding_loop import CallCancelledError, DecodingLoop
from hf_paged.engine.executor import autocasting
from hf_paged.engine.request import RequestState
from hf_paged.engine.scoring import LogitRows, token_logprobs
from hf_paged.sampling.logprobs import PromptLogprobsWanted


class PromptScoring:
    """Forwards over a prompt, whose steps others share; then the request, which finds it in the prefix cache."""

    def __init__(
        self,
        core: EngineCore,
        state: RequestState,
        wanted: PromptLogprobsWanted,
        loop: DecodingLoop,
        rows: LogitRows,
        context: CallContext,
        then: Callable[[], None],
        on_failure: Callable[[], None],
    ) -> None:
        """Serves one request, of the thread that it is made on. `then` begins the request, or ends it; `on_failure` is
        called where that does not come about.
        """
        self._core = core
        self._state = state
        self._wanted = wanted
        self._loop = loop
        self._rows = rows
        self._context = context
        self._autocast = core.batch_key()
        self._then = then
        self._on_failure = on_failure

    def run(self) -> None:
        state, wanted = self._state, self._wanted
        try:
            with (
                within(self._context),
                torch.no_grad(),
                autocasting(self._autocast),
            ):
                self._loop.check_cancelled()
                tokens = state.prompt_token_ids
                said = token_logprobs(self._core.model, tokens, wanted.first, wanted.num_top, self._rows)
                state.prompt_logprobs = [None] * (len(tokens) - len(said)) + said
                self._loop.check_cancelled()
                self._then()
        except CallCancelledError:
            state.finish([[]], ["cancelled"])
            self._on_failure()
        except BaseException as error:
            state.fail(error)
            self._on_failure()
