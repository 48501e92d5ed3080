"""`WeightsVersion`: everything in the model that keys and values depend on, as a key for the prefix cache."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from hf_paged.core.errors import UnsupportedCallError, UnsupportedModelError
from hf_paged.core.process import PROCESS, Lasting
from hf_paged.model.adapters import Adapters
from hf_paged.model.hooks import HookWatch, all_modules, hook_name, is_for_rows
from hf_paged.model.latents import Latents
from hf_paged.model.layers import Layers
from hf_paged.model.module_overrides import CALL, KNOWN, LIBRARY, is_library_code, is_of_library
from hf_paged.model.placement import Placement
from hf_paged.model.samples import samples
from hf_paged.model.sharding import is_share, ranks_of, why_not_whole
from hf_paged.model.spread import is_wrapped, offloading, stored

# A state of the model: an epoch, adapters, hooks, autocast.
WeightsKey = tuple[Hashable, ...]
# Attributes of these types are part of what a module computes.
_NUMBERS = (bool, int, float, type(None))
_OF_TORCH = frozenset(vars(nn.Module()))


class WeightsVersion(Lasting):
    """Notices that a model's weights, code, numbers, adapters or hooks changed since it was last asked.

    In-place writes (`load_state_dict`, most optimizers) move a tensor's version counter; fused optimizers don't, so
    steps of any optimizer that holds one of the model's parameters are noted as well; replaced parameters and
    `.data = ...` show in identity and address. Code: modules of another class, or with another forward, of their own
    or their class's.
    Numbers: attributes of modules, such as a scale, an epsilon, a switch.

    Writes into `.data` (averages of weights, optimizers by hand) leave no trace but the elements: of each matrix on CPU
    some are compared, at least one of each row and of each column.

    Not seen, so that `engine.reset_prefix_cache()` has to be called: other writes into `.data`, tensors that are
    neither parameter nor buffer, strings, lists and other objects, what a closure or a hook keeps.

    Attributes:
        hooks: The model's forward hooks.
        num_moves: How often something changed by which recorded steps are another program: weights that lie elsewhere
            in memory or are of another shape, code, numbers, adapters.
        state: The last key, but for autocast: what is the same on all threads.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Layers | None = None,
        latents: Latents | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """Watches `model`.

        Args:
            model: Held weakly.
            layers: Hold its code, and numbers that it computes with; forgotten when these change, or kinds of weights,
                or where these are, if it has put some side by side.
            latents: Hold parts of its weights, or what its layers make of these, dropped when either changes.
            adapters: Know which modules are theirs, where each row may have its own: these are no part of the state.
        """
        self._model = weakref.ref(model)
        self._is_whole = ranks_of(model) is None
        self._layers = layers
        self._latents = latents
        self._adapters = adapters
        self.state: WeightsKey = ()
        self._tensors: list[weakref.ref[Tensor]] = []
        self._versions: list[tuple[Hashable, ...]] = []
        self._samples: list[Tensor] = []
        self._glimpse: tuple[list[int], list[int]] = ([], [])
        self._kinds: list[type] = []
        self._class_forwards: dict[type[nn.Module], Any] = {}
        self._sizes: list[int] = []
        self._forwards: list[weakref.ref[Any] | None] = []
        self._getters: list[tuple[int, Callable[[dict[str, Any]], Any]]] = []  # of the numbers of a module
        self._numbers: list[Any] = []
        self._tuners: list[weakref.ref[nn.Module]] = []
        self._fetched: dict[int, list[Any]] = {}  # hooks that offload, by the place of their module
        self._placement = Placement(model)
        self._is_known = self._is_library = False
        self._epoch = 0
        self.hooks = HookWatch()
        self.num_moves = 0
        self._program: Hashable = None
        self._was_stepped = False
        _watch_optimizers()
        PROCESS.watch(self)
        self.key()  # here, where one thread asks: two that both find nothing noted yet would both call it a change

    def key(self) -> WeightsKey:
        """The current state: an epoch that never returns to an earlier value, adapters, hooks, autocast.

        Raises:
            UnsupportedModelError: The weights have been shared out between processes since `patch`.
        """
        model = self._model()
        if model is None:
            raise RuntimeError("the patched model no longer exists")
        modules = self._modules(model)
        self.hooks.look(model, modules)
        attributes = [module.__dict__ for module in modules]
        is_same_code = self._has_same_code(modules, attributes)
        tuners = [tuner for seen in self._tuners if (tuner := seen()) is not None]
        _take_out(tuners)
        tensors = self._held(modules, attributes)
        versions = self._versions_of(tensors)
        is_same_program = self._has_same_numbers(modules, attributes, is_same_code) and is_same_code
        is_moved = [version[1:] for version in versions] != [version[1:] for version in self._versions]
        # Identity, not id(): a new parameter may lie where an old one was.
        are_same = [id(seen()) for seen in self._tensors] == list(map(id, tensors))
        are_same_kinds = are_same and [own[2:] for own in versions] == [own[2:] for own in self._versions]
        is_same_weights = not self._was_stepped and are_same and versions == self._versions
        if not is_same_weights or not is_same_code:
            self._check_whole(model)
        seen = samples({id(t): t for t in tensors if t.ndim == 2}.values())
        is_same_weights = is_same_weights and all(map(torch.equal, seen, self._samples))
        if not is_same_weights:
            self._tensors, self._versions = [weakref.ref(t) for t in tensors], versions
            self._samples = [sample.clone() for sample in seen]
            self._was_stepped = False
        if not is_same_weights or not is_same_program:
            self._epoch += 1
        adapters = program = self._active(tuners)
        if self._adapters is None or not self._adapters.records_rows:  # recorded steps run PEFT's own code
            program = _adapters(tuners)
        if is_moved or not is_same_program or program != self._program:
            self.num_moves += 1
        self._program = program
        if self._layers is not None and (
            not (are_same_kinds and is_same_program) or (is_moved and self._layers.has_joined)
        ):
            self._layers.forget()
        device = placed[1].type if (placed := self._placement()) is not None else "cpu"
        is_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        autocast = torch.get_autocast_dtype(device) if is_autocast else None
        state = (self._epoch, adapters, self.hooks.numbers)
        if self._latents is not None and state != self.state:
            if self._latents.has_copies:  # recorded steps read them
                self.num_moves += 1
            self._latents.forget()
        self.state, self._glimpse = state, self._glance(tensors)
        return (*state, autocast)

    def _modules(self, model: nn.Module) -> list[nn.Module]:
        """Those that the state is of."""
        return all_modules(model) if self._adapters is None else self._adapters.look(model)

    def _modules_now(self, model: nn.Module) -> list[nn.Module]:
        """The same on any thread, between two calls of `key`."""
        return all_modules(model) if self._adapters is None else self._adapters.modules(model)

    def _active(self, tuners: list[Any]) -> Hashable:
        """Of PEFT's layers what is the same for all rows."""
        if self._adapters is not None and self._adapters.is_by_row:
            return tuple(tuple(tuner.merged_adapters) for tuner in tuners)
        return _adapters(tuners)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Within it, weights are put elsewhere in memory as they are: what was computed with them stays right.

        Recorded steps don't. `key` must not be asked for meanwhile.
        """
        held = [(place, own) for place, seen in enumerate(self._tensors) if (own := seen()) is not None]
        before = [own.data_ptr() for own in self._shares([own for _, own in held])]
        yield
        after = [own.data_ptr() for own in self._shares([own for _, own in held])]
        for (place, _), old, new in zip(held, before, after, strict=True):
            # Else another move is still to be noted.
            if (noted := self._versions[place])[1] == old:
                self._versions[place] = (noted[0], new, *noted[2:])
            if self._glimpse[1][place] == old:
                self._glimpse[1][place] = new
        if before != after:
            self.num_moves += 1

    def _check_whole(self, model: nn.Module) -> None:
        reason = why_not_whole(model)
        if reason is None and self._is_whole and ranks_of(model) is not None:
            reason = "its weights have been split between processes since it was patched"
        if reason is not None:
            raise UnsupportedModelError(type(model).__name__, (reason,))

    def _versions_of(self, tensors: list[Tensor]) -> list[tuple[Hashable, ...]]:
        return [
            (0 if t.is_inference() else t._version, t.data_ptr(), t.shape, t.stride(), t.dtype)
            for t in self._shares(tensors)
        ]

    def _shares(self, tensors: list[Tensor]) -> list[Tensor]:
        """The part of a split tensor that lies here: the object for the whole has no version and no address."""
        return tensors if self._is_whole else [getattr(t, "_local_tensor", t) for t in tensors]

    def may_have_changed(self) -> bool:
        """Whether `key` is to be asked for between two steps: a look at what is changed while requests run.

        That is tensors, adapters and hooks, in a tenth of the time of `key`, which also notices the rest.
        """
        tensors = [tensor for seen in self._tensors if (tensor := seen()) is not None]
        return (
            self._was_stepped
            or self.hooks.is_outdated
            or self._glance(tensors) != self._glimpse
            or (bool(self._tuners) and self._active([tuner() for tuner in self._tuners]) != self.state[1])
        )

    def _glance(self, tensors: list[Tensor]) -> tuple[list[int], list[int]]:
        """How often each was written to, and where it is."""
        own = self._shares(tensors)
        try:
            versions = [t._version for t in own]
        except RuntimeError:  # some don't count it
            versions = [0 if t.is_inference() else t._version for t in own]
        return versions, [t.data_ptr() for t in own]

    def _has_same_code(self, modules: list[nn.Module], attributes: list[dict[str, Any]]) -> bool:
        """Whether modules are of the classes they were of, with the same forwards; notes what they are."""
        kinds = [type(module) for module in modules]
        forwards = [own.get("forward") for own in attributes]
        is_same = (
            kinds == self._kinds
            and [kind.forward for kind in self._class_forwards] == list(self._class_forwards.values())
            and [seen and (seen() or seen) for seen in self._forwards] == forwards
        )
        if not is_same:
            self._kinds = kinds
            self._class_forwards = {kind: kind.forward for kind in kinds}
            # Weak: a closure usually leads to the model. By reference: a new one may lie where an old one was.
            self._forwards = [None if forward is None else _reference(forward) for forward in forwards]
            # Within accelerate's hooks, which move and fetch, it is the class's forward that computes; in steps, within
            # whatever a user has put on the model itself.
            model = modules[0]
            # Where rows have adapters of their own, PEFT's layers are not called, but in recorded steps.
            is_cpu = (placed := self._placement()) is not None and placed[1].type == "cpu"
            called = [m for m in modules if not is_cpu or self._adapters is None or not self._adapters.replaces(m)]
            self._is_known, self._is_library = (
                all(
                    is_library_code(m, packages)
                    or ((m is model or is_wrapped(m) or is_share(m)) and is_of_library(type(m), packages))
                    for m in called
                )
                for packages in (KNOWN, LIBRARY)
            )
            self._fetched = {index: hooks for index, module in enumerate(modules) if (hooks := offloading(module))}
            self._tuners = [weakref.ref(module) for module in modules if is_tuner(module)]
            self._sizes = []
        return is_same

    def _held(self, modules: list[nn.Module], attributes: list[dict[str, Any]]) -> list[Tensor]:
        """The model's tensors; of weights that are fetched for each forward, what they are fetched from."""
        if not self._fetched:
            return _tensors(attributes)
        away = {
            id(part)
            for index, hooks in self._fetched.items()
            for part in (modules[index].modules() if hooks[0].place_submodules else [modules[index]])
        }
        here = [own for module, own in zip(modules, attributes, strict=True) if id(module) not in away]
        fetched = [x for index, hooks in self._fetched.items() for hook in hooks for x in stored(hook, modules[index])]
        return _tensors(here) + fetched

    def _has_same_numbers(self, modules: list[nn.Module], attributes: list[dict[str, Any]], is_same_code: bool) -> bool:
        """Whether the modules' numbers are what they were; notes what they are."""
        # A step that runs meanwhile may be calling modules another way.
        sizes = [len(own) - (CALL in own) for own in attributes]
        numbers: list[Any] | None = None
        if is_same_code and sizes == self._sizes:
            with suppress(KeyError):  # one attribute less, another more
                numbers = [getter(attributes[index]) for index, getter in self._getters]
        if numbers is None:
            self._sizes = sizes
            self._getters = [
                (index, operator.itemgetter(*names))
                for index in range(len(modules))
                # Of PEFT's, what matters is a part of the key by itself.
                if not type(modules[index]).__module__.startswith("peft.") and (names := _number_names(modules[index]))
            ]
            numbers = [getter(attributes[index]) for index, getter in self._getters]
        is_same = numbers == self._numbers
        self._numbers = numbers
        return is_same

    @property
    def is_plain(self) -> bool:
        """Whether nothing but code of `KNOWN` packages runs in the model's forward.

        Modules are looked at when the state is asked for; hooks also when one was registered anywhere.
        """
        return self._is_known and not self._current_hooks().numbers

    @property
    def keeps_nothing(self) -> bool:
        """Whether, besides, none of its modules may keep tensors that it computes."""
        return self.is_plain and self._is_library

    def foreign(self) -> str:
        """Names of the modules' classes and of hooks that are not torch's and transformers' own; maybe none."""
        if self.is_plain or (model := self._model()) is None:
            return ""
        modules = all_modules(model)
        others = [m for m in modules if not (m is model or is_library_code(m) or is_wrapped(m) or is_share(m))]
        kinds = {type(module) for module in others}
        hooks = {
            name
            for m in modules
            for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
            if not (name := hook_name(hook)).startswith("transformers.")
        }
        names = sorted(hooks | {f"{kind.__module__}.{kind.__name__}" for kind in kinds})
        return ", ".join(names[:4]) + (", ..." if names[4:] else "")

    @property
    def needs_rows(self) -> bool:
        """Whether a hook on an inner module may address rows or columns; see `hooks.HookWatch`."""
        return self._current_hooks().needs_rows

    def look_at_hooks(self) -> None:
        """Finds all hooks, also those of modules that are new in the model."""
        model = self._model()
        if model is not None:
            self.hooks.look(model, self._modules_now(model))

    def _current_hooks(self) -> HookWatch:
        if self.hooks.is_outdated:
            self.look_at_hooks()
        return self.hooks

    def check_rows(self) -> None:
        """Refuses what PEFT's hooks for the rows of one call would be shown to.

        Raises:
            UnsupportedCallError: There are some, of another thread's call, or left by one that raised.
        """
        model = self._model()
        if model is None or not self._current_hooks().has_rows_of_others:
            return
        names = [n for n, m in model.named_modules() if any(map(is_for_rows, list(m._forward_pre_hooks.values())))]
        raise UnsupportedCallError(
            f"{len(names)} modules ({', '.join(names[:3])}{', ...' if names[3:] else ''}) have hooks that PEFT puts "
            "there for the rows of one call with adapter_names: of a call on another thread, or left by a call that "
            "raised. Give hf_paged.patch() the PeftModel, not the model inside, for calls with adapter_names that run "
            "beside others and leave nothing; those that were left are removed by "
            "`for module in model.modules(): module._forward_pre_hooks.clear()`, with all other pre-hooks"
        )

    def forget(self) -> None:
        """Drops what was made from the model's weights, code and numbers; the next forwards make it anew."""
        self.num_moves += 1
        for made in (self._layers, self._latents):
            if made is not None:
                made.forget()

    def note_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called after every step of every optimizer in the process."""
        if (model := self._model()) is not None:
            stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            own = {id(each) for module in self._modules_now(model) for each in module._parameters.values()}
            self._was_stepped |= any(id(parameter) in own for parameter in stepped)
            if self._adapters is not None:
                self._adapters.note_step(stepped)


@lru_cache
def _watch_optimizers() -> None:
    """One hook for the process, never removed: torch iterates over its hooks while a finalizer might remove one."""
    register_optimizer_step_post_hook(_note_optimizer_step)  # type: ignore[no-untyped-call]


def _note_optimizer_step(optimizer: Optimizer, *_: Any) -> None:
    for state in PROCESS.living(WeightsVersion):
        state.note_optimizer_step(optimizer)


def _tensors(attributes: list[dict[str, Any]]) -> list[Tensor]:
    """Parameters and buffers of modules with these attributes; shared ones as often as they are shared."""
    lasting = [own for own in attributes if "rope_type" not in own or not is_batch_dependent(own["rope_type"])]
    tables = [own[name] for own in lasting for name in ("_parameters", "_buffers")]
    return [tensor for table in tables for tensor in table.values() if tensor is not None]


def _reference(forward: Any) -> Any:
    try:
        return weakref.ref(forward)
    except TypeError:  # of a type without weak references
        return lambda: forward


def is_batch_dependent(rope_type: Any) -> bool:
    """Whether a rotary embedding of this type, or of these by layer type, depends on the longest row of the batch.

    Beyond a length it writes its frequencies anew in every forward: they are no state that lasts.
    """
    kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any(kind in ("dynamic", "longrope") for kind in kinds)


def _number_names(module: nn.Module) -> list[str]:
    """Names of attributes that it may compute with: not torch's own, nor private ones of transformers."""
    if is_batch_dependent(getattr(module, "rope_type", None)):
        return []
    is_of_transformers = type(module).__module__.startswith("transformers.")
    return [
        name
        for name, value in list(vars(module).items())
        if isinstance(value, _NUMBERS) and name not in _OF_TORCH and not (is_of_transformers and name.startswith("_"))
    ]


def _take_out(modules: list[Any]) -> None:
    """Takes adapters that are merged and disabled out of the weights.

    Their layers do so themselves when they are next called: within a forward, whose weights would then be others.
    """
    for module in modules:
        if module.disable_adapters and module.merged_adapters:
            module.unmerge()


def is_tuner(module: nn.Module) -> bool:
    """Whether it is a layer of PEFT's."""
    return hasattr(module, "active_adapters") and hasattr(module, "merged_adapters")


def _adapters(tuners: list[Any]) -> Hashable:
    """Which adapters of PEFT's tuner layers are active, merged or disabled, and their scaling."""
    return tuple(
        (
            tuple(module.active_adapters),
            tuple(module.merged_adapters),
            bool(module.disable_adapters),
            repr(getattr(module, "scaling", None)),
        )
        for module in tuners
    )
