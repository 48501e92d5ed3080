"""`Engine`: what a user of a patched model reaches as `model.paged`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_paged.attention.paged_attention import leave_all_scopes
from hf_paged.core.config import PagedConfig
from hf_paged.core.errors import UnsupportedCallError
from hf_paged.core.interrupts import deferred_interrupt
from hf_paged.core.metrics import EngineStats
from hf_paged.core.process import PROCESS, Lasting, watch_forks
from hf_paged.engine.call_context import within
from hf_paged.engine.caller_forwards import CallerForwards
from hf_paged.engine.calls import Calls
from hf_paged.engine.core import EngineCore
from hf_paged.engine.explain import Detour, explain
from hf_paged.engine.follower import Follower, only_on_first
from hf_paged.engine.leader import Leader
from hf_paged.engine.remote_rows import RemoteRows
from hf_paged.engine.request import Request, RequestOutput
from hf_paged.engine.request_threads import RequestThreads
from hf_paged.engine.room import Room
from hf_paged.engine.row_store import RowStore
from hf_paged.engine.snapshot import Snapshot
from hf_paged.engine.submission import Submissions, list_of_prompts
from hf_paged.engine.warm_up import WarmUp, warm_up
from hf_paged.model.adapter_files import read_adapter
from hf_paged.model.adapter_store import AdapterStore
from hf_paged.model.module_overrides import give_back_all
from hf_paged.model.peft_layers import without_adapters
from hf_paged.model.traits import ModelTraits
from hf_paged.parallel.channel import Channel
from hf_paged.sampling.controls import SamplingControls
from hf_paged.sampling.grammar import Grammar
from hf_paged.sampling.logprobs import LogprobsWanted, ScoresWanted, TokenLogprobs


class Engine(Lasting):
    """The paged side of one patched model: `model.paged`.

    One loop runs the steps, in which rows of all callers meet: those the engine samples itself (`submit`, most calls
    of `model.generate()`), and forwards that transformers' own loops make on their callers' threads. Processors,
    criteria and streamers of the caller's own never run in it.

    Attributes:
        config: The settings.
        traits: What `is_supported` found out about the model's architecture.
    """

    # The package's own; they may change in any release.
    core: EngineCore  # the state
    store: RowStore | RemoteRows  # what a `PagedCache` asks for
    forwards: CallerForwards  # that callers make
    calls: Calls  # how they begin
    room: Room  # where they wait for that
    exact_forwards: Any = None  # within `exact_training`, what runs the model's forwards without a cache

    def __init__(
        self,
        model: PreTrainedModel,
        config: PagedConfig,
        forward: Callable[..., Any],
        traits: ModelTraits,
        channel: Channel | None = None,
    ) -> None:
        """Binds to a model; see `EngineCore`. `channel`: to the other processes that hold parts of it."""
        self.config = config
        self.traits = traits
        self._forward = forward
        self._start(model)
        if channel is not None:
            self.core.join(channel)
            if not channel.is_first:
                self.store = RemoteRows(self.traits)
        PROCESS.watch(self)
        watch_forks()

    @property
    def ranks(self) -> Leader | Follower | None:
        """This rank's part in a model of several ranks; `None`: the model is whole."""
        return self.core.ranks

    def _ask_first(self, name: str) -> None:
        if isinstance(self.ranks, Follower):
            raise only_on_first(name)

    def _check_patched(self) -> None:
        """Raises `RuntimeError` where the model is another engine's by now, or none's."""
        if getattr(self.core.model, "paged", None) is not self:
            raise RuntimeError("the model of this engine was unpatched: patch it again, and use its new model.paged")
        PROCESS.check_running()

    @deferred_interrupt()
    def follow(self) -> None:
        """On every rank but 0: serves rank 0's steps until it ends (its program, or `unpatch`).

        For a program of several threads, or an app: rank 0 alone runs it. Without it all ranks make the same calls in
        the same order, each from one thread.

        Raises:
            RuntimeError: This is rank 0, or the model is not split between processes; or another thread of this rank
                makes calls.
            RankError: A rank is gone, or could not go on.
        """
        if not isinstance(self.ranks, Follower):
            what = "this is rank 0" if self.ranks is not None else "the model is not split between processes"
            raise RuntimeError(f"follow() serves the steps of rank 0 on the other ranks of a model (tp_plan); {what}")
        self.ranks.follow()

    def _start(self, model: PreTrainedModel) -> None:
        self.core = core = EngineCore(model, self.config, self._forward, self.traits)
        self._threads = RequestThreads(self.config.max_num_seqs)
        self.room = Room(core, self._threads)
        self.store = store = RowStore(core)
        self.forwards = CallerForwards(core, store)
        self.calls = Calls(core, store, self.room)
        self._submissions = Submissions(core, self.calls, self.room, self._threads)

    # Requests

    @deferred_interrupt()
    def submit(
        self,
        input_ids: SequenceOf[int] | Tensor | None = None,
        generation_config: Any = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | int | bytes | None = None,
        adapter: str | None = None,
        logprobs: int | None = None,
        logprobs_mode: str = "raw",
        return_support: bool = False,
        seed: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        grammar: Grammar | None = None,
        **generate_kwargs: Any,
    ) -> Request:
        """Queues one prompt and returns at once.

        Args:
            input_ids: Token ids: a list, or a 1-D tensor or array, or one of `[1, L]`. As in `generate()`, pad tokens
                among them are hidden unless an `attention_mask` is given. A model with an encoder takes the encoder's
                input here, or by its name (`input_features=`, `pixel_values=`), `[1, ...]`; `decoder_input_ids=` are
                the prompt. The encoder runs on this thread.
            generation_config: As in `model.generate()`.
            request_id: Any name not in use by an unfinished request; `None`: one is made.
            priority: The lower, the earlier; first come, first served within a priority.
            cache_salt: A string, integer or bytes: requests share cached prefixes only with requests of the same salt,
                in an assistant model's pool as well. `None`: none, or inside another request (a processor that
                submits) that one's.
            adapter: The name of an adapter, or `"__base__"` for none; `None`: those that the model is set to now
                (`set_adapter`, `disable_adapter`). Requests of any adapters share steps.
            logprobs: Say of each token how likely it was, and so many of the likeliest in its place (0: none of those).
            logprobs_mode: `"raw"`: log-softmax, in float32, of the model's logits; `"processed"`: of what sampling drew
                from, behind all processors (not of beams, assisted decoding and processors of your own).
            return_support: Say of each token which ones truncation (top-k, top-p, min-p) had left to choose from, in
                `RequestOutput.support`, and its log-probability; as `"processed"`, not of beams and the like.
            seed: Draw as `model.generate()` does after `torch.manual_seed(seed)`, and leave the global generator alone.
            presence_penalty: Taken off the logit of each token that was generated before.
            frequency_penalty: The same, as often as it was. Both before temperature and the like.
            logit_bias: Added to logits, by token id; as early.
            grammar: What the text is to follow, of a `GrammarCompiler`: tokens that it forbids are masked before all of
                these (not of beams, assisted decoding and processors of your own). The text ends with it.
            **generate_kwargs: Everything else that `model.generate()` takes (also `pixel_values` and other inputs of
                the prompt), but `streamer` (iterate the request instead), `inputs_embeds`, and per-step outputs.

        Sampling draws as `model.generate()` would from the state of torch's global generator at this moment; after a
        sampling request the global generator is reseeded from itself, so that the next one draws other numbers.

        Whisper's `generate()`, which decodes segment by segment, runs as a whole on a thread of the engine's: its
        tokens come at the end, and what it returned is `returned` of the result.

        Raises:
            ValueError: What `model.generate()` would raise for these arguments; a batch; a prompt that could never fit.
            RuntimeError: The model was unpatched, as in all that runs steps.
            QueueFullError: `max_waiting` requests are waiting.
        """
        self._check_patched()
        wanted = LogprobsWanted.of(logprobs, logprobs_mode, self.vocab_size, return_support)
        controls = SamplingControls.of(
            self.vocab_size, seed, presence_penalty, frequency_penalty, logit_bias, grammar, wanted
        )
        with self._with_adapter(adapter):
            return self._submissions.submit(
                input_ids, generation_config, request_id, priority, cache_salt, generate_kwargs, controls
            )

    @deferred_interrupt()
    def generate(
        self,
        prompts: Iterable[SequenceOf[int] | Tensor],
        generation_config: Any = None,
        *,
        progress_bar: bool = False,
        adapters: Iterable[str | None] | None = None,
        logprobs: int | None = None,
        logprobs_mode: str = "raw",
        **generate_kwargs: Any,
    ) -> list[RequestOutput]:
        """Generates for many prompts of any lengths, in one continuous batch.

        Args:
            prompts: As `input_ids` of `submit`, any number of them.
            generation_config: For all of them.
            progress_bar: Show a tqdm bar.
            adapters: Of each prompt, as `adapter` of `submit`.
            logprobs: As in `submit`.
            logprobs_mode: As in `submit`.
            **generate_kwargs: As in `submit`, for all of them.

        Returns:
            One result a prompt, in the order of the prompts.

        Raises:
            Exception: What the first failing request raised; the others are cancelled.
        """
        self._check_patched()
        self.core.worker.pause.warn()
        wanted = LogprobsWanted.of(logprobs, logprobs_mode, self.vocab_size)
        controls = SamplingControls(logprobs=wanted)
        listed = list_of_prompts(prompts)
        if adapters is not None and (isinstance(adapters, str) or not isinstance(adapters, Iterable)):
            raise ValueError(f"adapters must be a list of names, one for each prompt, got {adapters!r:.80}")
        names = [None] * len(listed) if adapters is None else list(adapters)
        if len(names) != len(listed):
            raise ValueError(f"got {len(names)} adapters for {len(listed)} prompts: give one for each, or None")
        self.check_adapters([name for name in dict.fromkeys(names) if name is not None])  # before any prompt runs
        contexts = [partial(self._with_adapter, name) for name in names]
        given = list(zip(listed, contexts, strict=True))
        return self._submissions.generate(given, generation_config, progress_bar, generate_kwargs, controls)

    @deferred_interrupt()
    def score(
        self, prompts: Iterable[SequenceOf[int] | Tensor], *, progress_bar: bool = False, **arguments: Any
    ) -> list[list[TokenLogprobs]]:
        """How likely the tokens of given texts are, in one continuous batch.

        Args:
            prompts: As `input_ids` of `submit`, any number of them.
            progress_bar: Show a tqdm bar.
            **arguments: `top`, `first`, `priority`, `cache_salt` and `adapter` of `submit_score`.

        Returns:
            Of each prompt the log-probabilities of its tokens from `first` on, in the order of the prompts.

        Raises:
            ValueError: As in `submit_score`.
        """
        self.core.worker.pause.warn()
        outputs = self._submissions.run_all(prompts, partial(self.submit_score, **arguments), progress_bar)
        return [output.prompt_logprobs or [] for output in outputs]

    @deferred_interrupt()
    def submit_score(
        self,
        input_ids: SequenceOf[int] | Tensor,
        *,
        request_id: str | None = None,
        top: int = 0,
        first: int = 1,
        priority: int = 0,
        cache_salt: str | int | bytes | None = None,
        adapter: str | None = None,
    ) -> Request:
        """Queues one text whose tokens' log-probabilities are asked for, and returns at once.

        They are log-softmax, in float32, of the model's logits, in the result's `prompt_logprobs`. A text that is
        scored first and continued then is computed once: `submit` finds it in the prefix cache.

        Args:
            input_ids: As in `submit`; so are those that are not named here.
            top: Name so many of the likeliest tokens in each one's place, too.
            first: Index of the first token that is asked about. What lies before the one in front of it may come from
                the prefix cache.

        Raises:
            ValueError: A number that can't be; no prompt of token ids, or one that could never fit.
            QueueFullError: `max_waiting` requests are waiting.
        """
        self._check_patched()
        wanted = ScoresWanted.of(top, first, self.vocab_size)
        with self._with_adapter(adapter):
            return self._submissions.score(input_ids, request_id, priority, cache_salt, wanted)

    @contextmanager
    def _with_adapter(self, name: str | None) -> Iterator[None]:
        """The context of a request that names an adapter. Raises as `check_adapters` does."""
        adapters = None
        if name is not None:
            self.check_adapters((name,))
            named = self.core.adapters_named((name,))
            adapters = None if named is None else (self.core, named)
        with within(adapters=adapters, runs_stock=None):
            yield

    def check_adapters(self, names: SequenceOf[str]) -> None:
        """Raises `ValueError` if a row can't have one of these adapters, whatever others of its step have."""
        adapters = self.core.adapters
        if names:
            with self.core.transaction():
                adapters.look(self.core.model)
                adapters.check(names)
            if not adapters.is_by_row:
                what = f"requests can't have adapters of their own ({', '.join(names)})"
                raise ValueError(f"{what}: {adapters.why_own_code}; use set_adapter")

    def load_adapter(self, name: str, path: str | PathLike[str]) -> None:
        """Makes a LoRA adapter known that PEFT has saved, for `adapter=`, without making PEFT's modules of it.

        Any number may be known: of those that no request uses, as many stay in memory as `adapter_space_gib` has room
        for. Requests go on meanwhile.

        Args:
            name: That of no other one.
            path: A folder with adapter_config.json and adapter_model.safetensors.

        Raises:
            ValueError: The name is taken; or what lies there is no adapter for this model, or one of a kind that only
                PEFT's own code runs. It names the file and the key.
        """
        self._check_patched()
        for own, kind in ((name, str), (path, str | PathLike)):
            if not isinstance(own, kind):
                raise ValueError(f"load_adapter() takes a name and a path, got {own!r:.80}")
        core = self.core
        if self.ranks is not None:
            raise ValueError("load_adapter() is not for a model that is split between processes (tp_plan)")
        if core.model.config.is_encoder_decoder:
            raise ValueError("load_adapter() is not for a model with an encoder: use PEFT's; rows share what is set")
        with core.transaction():
            adapters = core.adapters
            adapters.look(core.model)
            if adapters.store is None:
                budget = int(self.config.adapter_space_gib * 2**30)
                bound, runs = core.bound, core.runs  # which hold the model weakly
                read = partial(read_adapter, are_others_busy=lambda: bool(runs))
                adapters.store = AdapterStore(lambda folder: read(folder, bound.model, base=adapters.base), budget)
            if adapters.knows(name):
                raise ValueError(f"there is an adapter {name!r} already: take another name")
        adapters.store.add(name, Path(path))

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter that was loaded; requests that have it go on.

        Raises:
            ValueError: None of this name was loaded.
        """
        if (store := self.core.adapters.store) is None or name not in store:
            raise ValueError(f"no adapter {name!r} was loaded by load_adapter(); PEFT's own go by delete_adapter()")
        store.remove(name)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        embeddings: Any = self.core.model.get_input_embeddings()
        return int(without_adapters(embeddings).num_embeddings)  # type: ignore[arg-type]

    @property
    def is_handing_out(self) -> bool:
        """Whether a step's tokens are on their way to their requests; a listener of these may wait for `on_step`."""
        return self.core.executor.is_handing_out

    def on_step(self, listener: Callable[[], None]) -> Callable[[], None]:
        """`listener` is called by the loop behind each step, when its tokens are with their requests; it must only hand
        that on. Returns what ends that.
        """
        listeners = self.core.executor.step_listeners
        listeners.append(listener)
        return lambda: listeners.remove(listener) if listener in listeners else None

    # What there is

    def most_tokens(self, most: int, num_source_tokens: int = 0) -> int:
        """Tokens, up to `most`, that a prompt and its text may have for the pool to have room for them, behind a source
        of so many in an encoder-decoder. `most` while the pool's size is not known, before its first use.
        """
        return self.core.pool.most_tokens(most, num_source_tokens)

    @property
    def model(self) -> PreTrainedModel:
        """The patched model. Raises `RuntimeError` when it no longer exists."""
        return self.core.model

    @property
    def weight_version(self) -> int:
        """How often the model's weights, hooks, or adapters in use were found to have changed; looks at them."""
        with self.core.transaction():
            self.core.weights_key()
            self.core.adapters.active()
            self.core.weights_key()  # which an active adapter may just have been found to have changed
        return self.core.weight_version

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, the keys and values of `block_size` tokens in all layers."""
        return self.core.pool.bytes_per_block

    @property
    def num_running(self) -> int:
        """Sequences with keys and values in the pool, but for those of a `PagedCache` at rest."""
        return self.core.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks, not started yet or preempted."""
        return self.room.num_waiting

    @deferred_interrupt()
    def stats(self) -> EngineStats:
        """A snapshot of the gauges and counters. On rank 0 of several."""
        self._ask_first("stats")
        with self.core.transaction():
            return self.core.stats(self.num_waiting)

    @deferred_interrupt()
    def explain(self) -> list[Detour]:
        """The reasons why this model or its calls so far don't run the fastest way, each with a remedy."""
        self._check_patched()
        self._ask_first("explain")
        with self.core.transaction():
            return explain(self.core)

    @deferred_interrupt()
    def snapshot(self, since: int = 0) -> dict[str, Any]:
        """A picture of pool, block tables and queues, and what happened lately: plain lists and numbers (JSON-able).

        Args:
            since: Only events with an id above this one: a program that looks again gives the last id it has seen.

        Returns:
            The pool's `num_blocks` (0 before its first use), `block_size`, `bytes_per_block` (keys and values of the
            layers of a group, which is all layers where none has a window; 0 when the model is gone) and
            `num_swap_blocks`; `is_paused`, `num_steps`; `blocks`: ref count of each one, -1 for a free one that is
            cached; `hashes`: the first 8 hex digits of each one's content hash, or "".

            `groups`: of each live sequence group its `id`, `request_id` (`None`: a plain `model.generate()`, or a kept
            `PagedCache`), `status` ("waiting", "running", "swapped"), `is_idle`, `priority`, and its `sequences` with
            `id`, `num_tokens`, `num_computed_tokens`, `num_prompt_tokens`, `num_cached_tokens` (of the prompt's, those
            found in the prefix cache when it was last admitted; where steps overlap, one more may be computed than
            `num_tokens`, whose id is still on its way), `tail` (the last token ids, -1 of a token given as an embedding
            or at a position of its own) and
            `block_table` (indices of CPU blocks while swapped). A model some of whose layers see a window only has
            several tables a sequence, one for each group of layers: `block_tables`, the first of which is
            `block_table`; -1 in them is a block behind the window, which was given back. `waiting`, `running` and
            `swapped`: ids of groups.

            `events`, oldest first, of the last 2,048: each has an `id` (rising by one), `time` (of `time.time()`),
            `step` (number of the step it belongs to), `kind`, and where it applies `group`, `sequence`, `request_id`:

            - "step": `num_seqs`, `num_tokens`, of them `num_decode` (one new token of a sequence) and
              `num_prefill_tokens`, `seconds`, `chunks` (`[group, sequence, start, num_tokens]`; in the end forgotten
              before the event is), `is_stalled` (the first waiting group did not fit); and after it `num_waiting`
              (groups), `num_swapped` (sequences that wait to come back), `num_free_blocks`. It is the last event of its
              step, but for what callers' own code (a beam search) then does with the result; where steps overlap
              (`use_async_batching`), the next one has begun before it.
            - "admitted": `num_sequences`, `num_tokens` (of the longest). "finished": the group's last sequence has
              ended; `reason` as a request's `finish_reason`, or `None` if its caller knows.
            - "allocated": `blocks`. "shared": `blocks`, `parent` (the sequence they are shared with). "prefix_hit":
              `blocks`, `num_tokens`. "copied": `source`, `destination`, because the sequence wrote to a shared block.
              "freed": `blocks` that it doesn't hold any more. "evicted": `blocks` whose cached content was dropped.
            - "preempted": `how` ("swap" or "recompute"), `num_sequences`. "swapped_out", "swapped_in": `num_blocks`
              that were copied, `blocks` of all its sequences, a shared one as often as they hold it.
            - "undone": a step that raised was taken back (`num_sequences`); what it allocated is freed next.

            Ref counts are the sum of all events so far: plus one for each block in "allocated", "shared", "prefix_hit",
            "swapped_in" and a copy's `destination`; minus one in "freed", "swapped_out" and a copy's `source`.
        """
        self._ask_first("snapshot")
        if isinstance(since, bool) or not isinstance(since, int):
            raise ValueError(f"since must be an event's id (an integer), got {since!r:.80}")
        core = self.core
        with core.transaction():
            picture = Snapshot.take(core.pool, since, is_paused=self.is_paused, num_steps=core.executor.num_steps)
        return picture.as_dict()

    @deferred_interrupt()
    def check_invariants(self) -> None:
        """Asserts the pool's and the tables' invariants. Raises `AssertionError`."""
        with self.core.transaction():
            if self.core.pool.is_made:
                self.core.manager.check_invariants()

    # Memory and warming up

    def exclusive(self) -> AbstractContextManager[None]:
        """Within it only this thread runs steps, as to change weights or adapters between two of them.

        Raises:
            RuntimeError: This thread is inside a step (in a hook of an inner module).
        """
        return self.core.worker.loop.exclusive()

    @deferred_interrupt()
    def reset_prefix_cache(self) -> int:
        """Forgets contents kept for prefix hits, and what was made from the model; returns how many blocks that were.

        Needed after changes that leave no trace, such as weights written through `tensor.data`.
        """
        return 0 if isinstance(self.ranks, Follower) else self.core.reset_prefix_cache()

    @deferred_interrupt()
    def release(self) -> None:
        """Gives the pool's memory back until the next use. Live caches are computed again when they are next used.

        Raises:
            ValueError: A live `PagedCache` holds tokens that can't be computed again (of hidden states, odd masks).
        """
        if not isinstance(self.ranks, Follower):  # rank 0 says when
            self.core.release()

    @deferred_interrupt()
    def warm_up(self, touch: bool = False) -> WarmUp:
        """Compiles all kernels that serving launches and records the CUDA graphs, before the first request needs them.

        Takes the pool's memory. Requests that run wait meanwhile; pool, statistics, generators and prefix cache stay as
        they are, and calling it again does only what is missing. While a graph is recorded, `torch.cuda.synchronize()`
        on another thread raises, and on torch 2.11 so does a draw from the default generator: a program that does
        either beside its first requests is to call this before. What is only seen under autocast, or of adapters and
        weights that come later, is compiled when it comes.

        Args:
            touch: Write to all of a pool in CPU memory, which otherwise costs memory only as far as blocks were used:
                a machine that has too little then says so now.

        Returns:
            What was done, or why there are no graphs.

        Raises:
            RuntimeError: This thread is inside a step (in a hook of an inner module).
            UnsupportedModelError: The weights have been shared out between processes since `patch`.
            ValueError: `cuda_graphs=True`, and there can be none here.
        """
        self._check_patched()
        core = self.core
        if self.ranks is not None:
            raise UnsupportedCallError("warm_up() is not supported over several processes (tp_plan)")
        core.check_outside()
        with core.transaction():
            core.weights_key()  # weights and code as they are now: what is recorded of others is recorded again
        runs_packed = self.traits.runs_packed and self.forwards.is_batched()
        return warm_up(core.pool, core.bound, core.runner, core.worker.loop, runs_packed, touch)

    # Step by step

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds the steps."""
        return self.core.worker.pause.is_on

    @deferred_interrupt()
    def pause(self) -> None:
        """Stops the steps; returns when none is running. Calling it again changes nothing.

        Until `resume` no step runs but those asked for by `step`. Everything else goes on: requests can be submitted
        and queue, `cancel()` frees their blocks, `stats` and `snapshot` look. Calls wait for their tokens, also
        on the thread that called `pause` (which logs a warning then); Ctrl-C ends it as always.

        Inside a step (in a hook of an inner module) it returns at once, and holds from the next step on. The pause also
        ends with `unpatch`, in a forked child, and with the main thread, so that the interpreter can.
        """
        self._check_patched()
        self._ask_first("pause")
        self.core.worker.pause.begin()

    @deferred_interrupt()
    def resume(self) -> None:
        """Lets the steps run again. Without a pause, nothing happens."""
        self._ask_first("resume")
        self.core.worker.pause.end()

    @deferred_interrupt()
    def step(self) -> dict[str, Any] | None:
        """Runs one step while the engine is paused: one turn of its loop. From several threads: one after another.

        Callers whose own code runs between two forwards (a beam search) are waited for: some milliseconds as always,
        and up to a second if there is nothing else to run.

        Returns:
            Its "step" event, as in `snapshot`; `None` if there was nothing to run. A step that raises is none: it is
            taken back, the request to blame gets the error, and what the others' rows then run is the step.

        Raises:
            RuntimeError: The engine is not paused, or this thread is inside a step (in a hook of an inner module).
        """
        self._check_patched()
        self._ask_first("step")
        self.core.check_outside()
        return self.core.worker.pause.step(lambda: self._submissions.is_starting)

    # Ends

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The pool's."""
        return self.core.pool.lock

    @deferred_interrupt()
    def close(self) -> None:
        """Ends all runs and the worker's thread. A later call starts a new one."""
        self._submissions.cancel_all()
        if isinstance(self.ranks, Follower):
            self.ranks.part()
        self.core.close()
        if isinstance(self.ranks, Leader):
            self.ranks.part()

    def freeze(self) -> None:
        """At the interpreter's end: no step runs any more."""
        self.core.worker.freeze()

    def start_anew(self) -> None:
        """In a forked child: all that ran in the parent fails here, and its caches are lost."""
        error = RuntimeError("this process was forked while the request was running in the parent")
        self.core.worker.loop.orphan(error)
        self._submissions.orphan(error)
        model = self.core.bound.living_model
        if model is not None:
            leave_all_scopes(model)
            give_back_all(model)
            self._start(model)
