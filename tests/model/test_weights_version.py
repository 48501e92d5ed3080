"""`WeightsVersion`: a key that moves whenever keys and values of the same tokens would come out different."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.library_code import as_library_code
from hf_paged.core.process import PROCESS
from hf_paged.model.weights_version import WeightsVersion


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()


@pytest.fixture
def net() -> nn.Sequential:
    return make_net()


class Watch:
    """A state and all the keys it ever had."""

    def __init__(self, model: nn.Module) -> None:
        self.state = WeightsVersion(model)
        self.keys: list[Hashable] = [self.state.key()]

    def assert_moved(self) -> None:
        key = self.state.key()
        assert key not in self.keys, "the key did not move, or came back"
        self.keys.append(key)
        self.assert_same()

    def assert_same(self) -> None:
        assert self.state.key() == self.keys[-1]


def backward(net: nn.Module) -> None:
    net(torch.randn(2, 4)).sum().backward()


def weights(net: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in net.state_dict().values()]


# No change


def test_everything_is_noted_from_the_start(net: nn.Sequential) -> None:
    # By the first of several callers, each of which would otherwise find a change while the others' rows run.
    state = WeightsVersion(net)
    noted = state.state
    assert state.is_plain and state.state == noted
    assert state.key()[:-1] == noted


def test_the_same_weights_have_the_same_key(net: nn.Sequential) -> None:
    watch = Watch(net)
    for use in (
        lambda: net(torch.ones(2, 4)),
        lambda: backward(net),
        lambda: net.zero_grad(),
        lambda: net.state_dict(),
        lambda: list(net.parameters()),
        lambda: net.requires_grad_(False),
        lambda: net.eval(),
        lambda: net.to("cpu", torch.float32),
        lambda: gc.collect(),
    ):
        use()
        watch.assert_same()


def test_keys_are_hashable_and_told_apart_by_repr(net: nn.Sequential) -> None:
    """The block manager hashes their repr."""
    watch = Watch(net)
    with torch.no_grad():
        net[0].weight.add_(1)
    watch.assert_moved()
    assert len({*watch.keys}) == len({repr(key) for key in watch.keys}) == 2


def test_another_models_weights_are_no_concern(net: nn.Sequential) -> None:
    watch, other = Watch(net), make_net()
    optimizer = torch.optim.AdamW(other.parameters(), fused=True)
    backward(other)
    optimizer.step()
    other.load_state_dict(net.state_dict())
    watch.assert_same()


# Optimizers

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, foreach=False),
    "Adam foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),  # the default of transformers' Trainer
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_step_moves_the_key(net: nn.Sequential, name: str) -> None:
    optimizer = OPTIMIZERS[name](net.parameters())
    watch = Watch(net)
    for _ in range(3):
        before = weights(net)
        backward(net)
        watch.assert_same()
        optimizer.step()
        assert not all(torch.equal(one, other) for one, other in zip(before, weights(net)))
        watch.assert_moved()


def test_an_optimizer_made_before_or_after_and_of_one_parameter_only(net: nn.Sequential) -> None:
    early = torch.optim.AdamW([net[2].bias], fused=True)
    watch = Watch(net)
    late = torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(1))]}, {"params": [net[0].bias]}], fused=True)
    critics = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for optimizer in (early, late):
        backward(net)
        optimizer.step()  # fused: no version moves
        critics.step()
        watch.assert_moved()


def test_each_of_two_states_notices(net: nn.Sequential) -> None:
    watches = Watch(net), Watch(net)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    backward(net)
    optimizer.step()
    for watch in watches:
        watch.assert_moved()


# Other writes


def test_load_state_dict_moves_the_key(net: nn.Sequential) -> None:
    watch = Watch(net)
    for _ in range(2):  # even with equal weights: they are not compared
        net.load_state_dict(make_net().state_dict())
        watch.assert_moved()
    net.load_state_dict(make_net().state_dict(), assign=True)
    watch.assert_moved()


def in_place(net: nn.Sequential) -> None:
    with torch.no_grad():
        net[0].weight[0, 0] += 1


WRITES: dict[str, Callable[[nn.Sequential], Any]] = {
    "in place": in_place,
    "init": lambda net: nn.init.normal_(net[2].weight),
    "a buffer": lambda net: net[1].running_mean.add_(1),
    "a forward in train mode, which writes a buffer": lambda net: net.train()(torch.randn(4, 4)),
    "new data": lambda net: setattr(net[0].weight, "data", torch.ones(4, 4)),
    "vector_to_parameters": lambda net: nn.utils.vector_to_parameters(torch.randn(48), net.parameters()),
    "another dtype": lambda net: net.double(),
    "one more layer": lambda net: net.append(nn.Linear(4, 4)),
    "one layer less": lambda net: net.pop(2),
    "one parameter less": lambda net: net[0].register_parameter("bias", None),
    "one more buffer": lambda net: net[0].register_buffer("scale", torch.ones(1)),
    "tied": lambda net: setattr(net[2], "weight", net[0].weight),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_moves_the_key(net: nn.Sequential, name: str) -> None:
    watch = Watch(net)
    WRITES[name](net)
    watch.assert_moved()


# Replaced parameters: CPython gives a new object the address of one that is gone


def replace_once(net: nn.Sequential, values: list[Tensor]) -> None:
    net[0].weight = nn.Parameter(values.pop())


def replace_twice(net: nn.Sequential, values: list[Tensor]) -> None:
    net[0].weight = nn.Parameter(values.pop())
    net[0].weight = nn.Parameter(values.pop())


def delete_and_replace(net: nn.Sequential, values: list[Tensor]) -> None:
    value = values.pop()
    del net[0].weight
    net[0].weight = nn.Parameter(value)


def replace_the_module(net: nn.Sequential, values: list[Tensor]) -> None:
    net[0] = None  # type: ignore[assignment]
    net[0] = nn.Linear(4, 4)


def assign_twice(net: nn.Sequential, values: list[Tensor]) -> None:
    for _ in range(2):
        net.load_state_dict(net.state_dict() | {"0.weight": values.pop()}, assign=True)


@pytest.mark.parametrize("replace", [replace_once, replace_twice, delete_and_replace, replace_the_module, assign_twice])
def test_a_replaced_parameter_moves_the_key(
    net: nn.Sequential, replace: Callable[[nn.Sequential, list[Tensor]], None]
) -> None:
    values = [torch.randn(4, 4) for _ in range(200)]
    watch = Watch(net)
    for _ in range(50):
        replace(net, values)
        watch.assert_moved()


def test_a_parameter_at_the_address_of_the_old_one_moves_the_key() -> None:
    """Object, version and storage: all as before."""
    net = nn.Linear(64, 64, bias=False)  # of a size for which the allocator gives back what was just freed
    watch = Watch(net)
    for _ in range(20):
        del net.weight
        net.weight = nn.Parameter(torch.randn(64, 64))
        watch.assert_moved()


def test_the_key_never_returns(net: nn.Sequential) -> None:
    """Not even when the old parameters do: their K/V may have been hashed under other weights meanwhile."""
    watch = Watch(net)
    old, new = net[0].weight, nn.Parameter(torch.ones(4, 4))
    for weight in (new, old, new, old):
        net[0].weight = weight
        watch.assert_moved()


def test_weights_are_not_kept_alive(net: nn.Sequential) -> None:
    watch = Watch(net)
    old = weakref.ref(net[0].weight)
    net[0].weight = nn.Parameter(torch.ones(4, 4))
    assert old() is None
    watch.assert_moved()


# Code and numbers


class Scaled(nn.Module):
    """A user's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.count: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def test_each_new_forward_of_an_instance_moves_the_key(net: nn.Sequential) -> None:
    """Closures are freed, and the next one lies where the last one was."""
    watch = Watch(net)
    for scale in range(50):
        net[0].forward = lambda x, scale=scale: scale * x
        watch.assert_moved()
    del net[0].forward
    watch.assert_moved()
    net[0].forward = functools.partial(torch.mul, torch.ones(1))
    watch.assert_moved()


def test_a_forward_is_not_kept_alive(net: nn.Sequential) -> None:
    watch = Watch(net)
    net[0].forward = lambda x: x
    alive = weakref.ref(net[0].forward)
    watch.assert_moved()
    del net[0].forward
    assert alive() is None


NUMBERS: dict[str, Callable[[nn.Sequential], Any]] = {
    "a float": lambda net: setattr(net[3], "scale", 3.0),
    "of torch's": lambda net: setattr(net[1], "eps", 1e-3),
    "None to a number": lambda net: setattr(net[3], "count", 3),
    "one more": lambda net: setattr(net[3], "bias", 0.5),
    "one less": lambda net: delattr(net[3], "count"),
    "one less, one more": lambda net: (delattr(net[3], "count"), setattr(net[3], "bias", 0.5)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_moves_the_key(net: nn.Sequential, name: str) -> None:
    net.append(Scaled())
    watch = Watch(net)
    NUMBERS[name](net)
    watch.assert_moved()


@pytest.mark.parametrize("has_joined", [False, True])
def test_what_was_made_of_the_code_is_forgotten(has_joined: bool, net: nn.Sequential) -> None:
    """With it and its numbers, and with kinds of weights; not where weights only have other elements or (unless layers
    rely on these) places.
    """
    dropped: list[int] = []

    class Made:
        def forget(self) -> None:
            dropped.append(1)

    Made.has_joined = has_joined  # type: ignore[attr-defined]
    net.append(Scaled())
    state = WeightsVersion(net, Made())  # type: ignore[arg-type]
    state.key()
    dropped.clear()

    def move() -> None:
        net[0].weight.data = net[0].weight.data.clone()

    def change_dtype() -> None:
        net[0].weight.data = net[0].weight.data.double()

    def replace() -> None:
        net[0].weight = nn.Parameter(net[0].weight.detach().float())

    changes: list[tuple[Callable[[], Any], int, bool]] = [
        (lambda: net[0].weight.data.mul_(2.0), 0, False),
        (move, 1, has_joined),
        (lambda: setattr(net[3], "scale", 5.0), 1, True),
        (lambda: setattr(net[3], "forward", lambda x: x), 1, True),
        (change_dtype, 1, True),
        (replace, 1, True),
        (state.forget, 1, True),
    ]
    for change, num_moves, is_forgotten in changes:
        before, moves = state.key(), state.num_moves
        change()
        is_other = state.key() != before or change == state.forget
        assert (is_other, state.num_moves, bool(dropped)) == (True, moves + num_moves, is_forgotten)
        dropped.clear()


# Hooks and autocast: not the weights, but the keys and values all the same


def shift(module: nn.Module, args: Any, output: Any = None) -> Any:
    return output


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_forward_hooks_have_keys_of_their_own(net: nn.Sequential, register: str) -> None:
    watch = Watch(net)
    first = getattr(net[2], register)(shift)
    watch.assert_moved()
    second = getattr(net, register)(shift)
    watch.assert_moved()
    # Without them everything is as before, and what is cached is valid; the next one is another.
    second.remove()
    assert watch.state.key() == watch.keys[1]
    first.remove()
    assert watch.state.key() == watch.keys[0]
    getattr(net[2], register)(shift)
    watch.assert_moved()


def test_hooks_of_transformers_only_look(net: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(net)
    monkeypatch.setattr(shift, "__module__", "transformers.utils.output_capturing")
    net[0].register_forward_hook(shift)
    net[0].register_forward_hook(functools.partial(shift))
    watch.assert_same()


def test_backward_hooks_do_not_matter(net: nn.Sequential) -> None:
    watch = Watch(net)
    net.register_full_backward_hook(lambda module, inputs, outputs: None)
    watch.assert_same()


def test_autocast_has_keys_of_its_own(net: nn.Sequential) -> None:
    watch = Watch(net)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            key = watch.state.key()
            assert key not in watch.keys
            watch.keys.insert(0, key)
        with torch.autocast("cpu", dtype, enabled=False):
            watch.assert_same()
    with torch.autocast("cpu", torch.bfloat16):
        assert watch.state.key() == watch.keys[1]
    watch.assert_same()


def test_a_model_without_weights() -> None:
    net = nn.Identity()
    watch = Watch(net)
    watch.assert_same()


# Life


def test_the_model_is_held_weakly() -> None:
    net = make_net()
    state, alive = WeightsVersion(net), weakref.ref(net)
    state.key()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    del net
    gc.collect()
    assert alive() is None
    optimizer.step()
    with pytest.raises(RuntimeError, match="no longer exists"):
        state.key()


def test_a_state_leaves_nothing_behind() -> None:
    """All states of the process share one hook on its optimizers, which doesn't keep them."""
    from torch.optim import optimizer as module

    net = make_net()
    first = WeightsVersion(net)
    num_hooks = len(module._global_optimizer_post_hooks)
    second = WeightsVersion(net)
    assert len(module._global_optimizer_post_hooks) == num_hooks
    assert {first, second} <= set(PROCESS.living(WeightsVersion))
    alive = weakref.ref(second)
    del second
    gc.collect()
    assert alive() is None and first in PROCESS.living(WeightsVersion)


def test_meta_and_inference_tensors_are_no_obstacle() -> None:
    with torch.device("meta"):
        net = make_net()
    Watch(net).assert_same()
    with torch.inference_mode():
        net = make_net()
    watch = Watch(net)
    watch.assert_same()
    net[0].weight = nn.Parameter(torch.ones(4, 4))
    watch.assert_moved()


# Adapters


class Adapters:
    """A small model with two LoRA adapters."""

    def __init__(self) -> None:
        self.peft = pytest.importorskip("peft")
        config = self.peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False)
        self.base = make_net()
        self.model = self.peft.get_peft_model(self.base, config, adapter_name="one")
        self.model.add_adapter("two", config)
        self.model.set_adapter("one")

    def output(self) -> Tensor:
        with torch.no_grad():
            return self.model(torch.ones(1, 4))


@pytest.fixture
def adapters() -> Adapters:
    return Adapters()


@pytest.mark.parametrize("watched", ["base", "model"])
def test_adapters_have_keys_of_their_own(adapters: Adapters, watched: str) -> None:
    state = WeightsVersion(getattr(adapters, watched))
    seen: dict[Hashable, Tensor] = {}

    def look() -> Hashable:
        key, output = state.key(), adapters.output()
        assert torch.allclose(seen.setdefault(key, output), output, atol=1e-5), "one key, two outputs"
        return key

    key_one = look()
    adapters.model.set_adapter("two")
    key_two = look()
    with adapters.model.disable_adapter():
        key_off = look()
    adapters.model.base_model.set_adapter(["one", "two"])
    key_both = look()
    assert len({key_one, key_two, key_off, key_both}) == 4
    # The weights stood still: going back finds what is cached.
    adapters.model.set_adapter("one")
    assert look() == key_one
    adapters.model.set_adapter("two")
    assert look() == key_two


def test_merging_and_scaling_move_the_key(adapters: Adapters) -> None:
    helpers = pytest.importorskip("peft.helpers")
    state = WeightsVersion(adapters.base)
    plain = state.key()
    adapters.model.merge_adapter()
    assert state.key() != plain
    adapters.model.unmerge_adapter()
    unscaled, before = state.key(), adapters.output()
    with helpers.rescale_adapter_scale(adapters.model, 0.5):
        assert not torch.allclose(adapters.output(), before)
        assert state.key() != unscaled
    assert state.key() == unscaled


def test_adding_and_deleting_an_adapter_moves_the_key(adapters: Adapters) -> None:
    watch = Watch(adapters.base)
    adapters.model.add_adapter("three", adapters.peft.LoraConfig(target_modules=["2"], r=2))
    watch.assert_moved()
    adapters.model.delete_adapter("three")
    watch.assert_moved()


@pytest.mark.parametrize(
    ("module", "is_plain"),
    [("optimum.quanto.nn.qlinear", True), ("optimum.other", False), ("torchao", True), ("torchaudio", False)],
)
def test_layers_of_packages(net: nn.Sequential, module: str, is_plain: bool) -> None:
    """Would break: a quantised layer that keeps a model's steps apart, or a stranger's that does not."""
    forward = as_library_code(lambda self, states: states, module)
    net.append(type("Quantised", (nn.Module,), {"__module__": module, "forward": forward})())
    state = WeightsVersion(net)
    state.key()
    assert state.is_plain is is_plain
    assert bool(state.foreign()) is not is_plain
