"""Adapters read without PEFT's modules, beside `PeftModel.from_pretrained`, and files that are refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.models import build, random_ids
from hf_paged.kernels.low_rank import LowRank
from hf_paged.model.adapter_files import CONFIG, WEIGHTS, AdapterWeights, dense_weight, dora_scale, read_adapter

peft = pytest.importorskip("peft")

IDS = random_ids(2, 9)
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GPT2 = ["c_attn", "c_proj", "c_fc"]


def base(name: str, is_tied: bool = False) -> Any:
    torch.manual_seed(0)
    model = build(name)
    if is_tied:
        model.config.tie_word_embeddings = True
        model = type(model)(model.config)
        model.get_input_embeddings().weight.data.mul_(20)
    return model.eval()


def tuned(model: nn.Module, dtype: torch.dtype | None = None, **settings: Any) -> Any:
    """The model with a random adapter."""
    torch.manual_seed(1)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "init_lora_weights": False} | settings)
    made = peft.get_peft_model(copy.deepcopy(model), config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_embedding" in name:  # PEFT's start is so large that nothing else would show
                parameter.mul_(0.2)
            elif "lora_" in name or "modules_to_save" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter)).add_(0.1 * torch.randn_like(parameter))
    return made if dtype is None else made.to(dtype)


def saved(folder: Path, model: nn.Module, **settings: Any) -> Path:
    tuned(model, **settings).save_pretrained(folder)
    return folder


def applied(model: nn.Module, weights: AdapterWeights) -> nn.Module:
    """The model with an adapter, by plain hooks."""
    model = copy.deepcopy(model)

    def adapt(low: LowRank, is_embedding: bool) -> Callable[..., Tensor]:
        def hook(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if is_embedding:
                added = F.embedding(args[0], low.a.t()) @ low.b.t() * getattr(module, "embed_scale", 1)
            else:
                added = args[0] @ low.a.t() @ low.b.t()
            added = low.scale * (added if low.bias is None else added + low.bias)
            own = 0 if getattr(module, "bias", None) is None else module.bias
            return output + added if low.output_scale is None else low.output_scale * (output - own + added) + own

        return hook

    for name, low in weights.linears.items():
        model.get_submodule(name).register_forward_hook(adapt(low, False))
    for name, low in weights.embeddings.items():
        model.get_submodule(name).register_forward_hook(adapt(low, True))
    for name, state in weights.saved.items():
        for part, tensor in state.items():
            layer, _, last = part.rpartition(".")
            model.get_submodule(f"{name}.{layer}".rstrip("."))._parameters[last] = nn.Parameter(tensor)
    return model


@torch.no_grad()
def assert_as_peft(model: nn.Module, folder: Path) -> AdapterWeights:
    modules, before = list(model.named_modules()), model(IDS).logits
    weights = read_adapter(folder, model)
    assert list(model.named_modules()) == modules
    expected = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()(IDS).logits
    result = applied(model, weights)(IDS).logits
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=2e-5)
    assert (expected - before).abs().max() > 0.05, "the adapter does nothing"
    return weights


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": LLAMA}),
    "rslora": ("llama", {"target_modules": LLAMA, "use_rslora": True}),
    "patterns": (
        "llama",
        {
            "target_modules": LLAMA,
            "rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 7, r"^model\.layers\.0\.self_attn\.v_proj": 2},
            "alpha_pattern": {"v_proj": 11, "mlp.up_proj": 5, "proj": 1},
        },
    ),
    "rslora with patterns": ("gpt2", {"target_modules": GPT2, "use_rslora": True, "rank_pattern": {"attn.c_proj": 9}}),
    "some layers": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "bias of its own": ("qwen2", {"target_modules": LLAMA, "lora_bias": True}),
    "bias of its own, Conv1D": ("gpt2", {"target_modules": GPT2, "lora_bias": True}),
    "DoRA": ("llama", {"target_modules": LLAMA, "use_dora": True}),
    "DoRA, biases": ("qwen2", {"target_modules": LLAMA, "use_dora": True, "use_rslora": True}),
    "DoRA, Conv1D": ("gpt2", {"target_modules": GPT2, "use_dora": True}),
    "Conv1D": ("gpt2", {"target_modules": GPT2}),
    "embedding and head": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "scaled embedding": ("gemma3", {"target_modules": ["embed_tokens", "q_proj"]}),
    "scaled embedding, DoRA": ("gemma3", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "embedding, DoRA": ("gpt2", {"target_modules": ["wte", "c_attn"], "use_dora": True}),
    "whole modules": ("llama", {"target_modules": LLAMA, "modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    "whole modules of several tensors": ("gpt2", {"target_modules": ["c_attn"], "modules_to_save": ["mlp", "ln_1"]}),
    "equal biases": ("gpt2", {"target_modules": GPT2, "bias": "all"}),
    "equal biases of its layers": ("gpt2", {"target_modules": GPT2, "bias": "lora_only"}),
    "a few experts' neighbours": ("mixtral", {"target_modules": ["q_proj", "o_proj"]}),
    "latents": ("deepseek_v3", {"target_modules": ["q_a_proj", "q_b_proj", "o_proj"]}),
    "orthogonal": ("llama", {"target_modules": LLAMA, "init_lora_weights": "orthogonal"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_peft_does(kind: str, tmp_path: Path) -> None:
    name, settings = KINDS[kind]
    model = base(name)
    weights = assert_as_peft(model, saved(tmp_path, model, **settings))
    has_embeddings = any("embed" in x or x == "wte" for x in settings["target_modules"])
    assert bool(weights.embeddings) == has_embeddings
    assert bool(weights.saved) == ("modules_to_save" in settings)
    assert weights.magnitudes.keys() == ({*weights.linears, *weights.embeddings} if "use_dora" in settings else set())


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ],
    ids=str,
)
def test_tied_weights_are_adapted_one_by_one(settings: dict[str, Any], tmp_path: Path) -> None:
    model = base("llama", is_tied=True)
    assert_as_peft(model, saved(tmp_path, model, **settings))


@settings(max_examples=12)
@given(
    name=st.sampled_from(["llama", "qwen2"]),
    targets=st.sets(st.sampled_from([*LLAMA, "lm_head"]), min_size=1),
    rank=st.integers(1, 9),
    alpha=st.integers(4, 20),
    flags=st.fixed_dictionaries({"use_rslora": st.booleans(), "use_dora": st.booleans()}),
    patterns=st.dictionaries(st.sampled_from([*LLAMA, "layers.0.*proj", "self_attn.q_proj"]), st.integers(1, 12)),
    is_alpha=st.booleans(),
)
def test_any_settings(
    tmp_path_factory: Any,
    name: str,
    targets: set[str],
    rank: int,
    alpha: int,
    flags: Any,
    patterns: Any,
    is_alpha: bool,
) -> None:
    model = base(name)
    flags["alpha_pattern" if is_alpha else "rank_pattern"] = dict(
        sorted(patterns.items())
    )  # as they are saved: the first counts
    folder = tmp_path_factory.mktemp("adapter")
    saved(folder, model, target_modules=targets, r=rank, lora_alpha=alpha, **flags)
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()(IDS).logits
        torch.testing.assert_close(
            applied(model, read_adapter(folder, model))(IDS).logits, expected, rtol=1e-4, atol=5e-5
        )


def test_a_model_that_carries_adapters_already(tmp_path: Path) -> None:
    model = base("llama")
    folder = saved(tmp_path, model, target_modules=["q_proj", "up_proj", "embed_tokens"], modules_to_save=["lm_head"])
    carrying = tuned(model, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"], use_dora=True)
    carrying.add_adapter("other", peft.LoraConfig(target_modules=["up_proj"]))
    inner = carrying.get_base_model()
    plain, found = read_adapter(folder, model), read_adapter(folder, inner)
    for ours, theirs in (
        (plain.linears, found.linears),
        (plain.embeddings, found.embeddings),
        (plain.saved, found.saved),
    ):
        places = [model.get_submodule(name) for name in ours], [inner.get_submodule(name) for name in theirs]
        assert [type(module) for module in places[0]] == [type(module) for module in places[1]]
        assert all(map(torch.equal, (m.weight for m in places[0]), (m.weight for m in places[1])))
    assert [name.removesuffix(".base_layer") for name in found.linears] == list(plain.linears)
    assert all(name.endswith(".base_layer") for name in (*found.linears, *found.embeddings))
    assert list(found.saved) == ["lm_head.original_module"]
    assert all(torch.equal(a.a, b.a) for a, b in zip(plain.linears.values(), found.linears.values(), strict=True))


def test_dora_follows_the_base(tmp_path: Path) -> None:
    model = base("gpt2")
    folder = saved(tmp_path, model, target_modules=["c_attn", "wte"], use_dora=True)
    weights = read_adapter(folder, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3).add_(0.01)
    anew = read_adapter(folder, model)
    for name, low in {**weights.linears, **weights.embeddings}.items():
        scale = dora_scale(dense_weight(model.get_submodule(name)), low.a, low.b, low.scale, weights.magnitudes[name])
        assert torch.equal(scale, {**anew.linears, **anew.embeddings}[name].output_scale)
        assert not torch.allclose(scale, low.output_scale)


@pytest.mark.parametrize(
    ("stored", "read"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)],
)
def test_dtypes_and_memory(stored: torch.dtype, read: torch.dtype, tmp_path: Path) -> None:
    model = base("llama")
    saved(tmp_path, model, target_modules=LLAMA, dtype=stored, modules_to_save=["lm_head"])
    kept = {key: tensor.clone() for key, tensor in load_file(tmp_path / WEIGHTS).items()}
    weights = read_adapter(tmp_path, model)
    tensors = [x for low in weights.linears.values() for x in (low.a, low.b)]
    assert {x.dtype for x in tensors} == {read}
    assert all(x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes for x in tensors)
    assert weights.num_bytes == sum(x.nbytes for x in tensors) + model.lm_head.weight.nbytes
    assert weights.saved["lm_head"]["weight"].dtype is torch.float32  # as PEFT's copy of the module is
    data = (tmp_path / WEIGHTS).read_bytes()
    with (tmp_path / WEIGHTS).open("r+b") as file:
        file.seek(len(data) // 2)
        file.write(b"\0" * (len(data) // 2))
    for name, low in weights.linears.items():
        assert torch.equal(low.b, kept[f"base_model.model.{name}.lora_B.weight"].to(read))


# Files that are refused

Q = "base_model.model.model.layers.0.self_attn.q_proj"


BAD: dict[
    str, tuple[Callable[[Any, Any], Any], str]
] = {  # what is changed of settings and tensors; what the error names
    "lora_A alone": (lambda c, t: t.pop(f"{Q}.lora_B.weight"), r"q_proj: .* missing or too much is .*lora_B\.weight"),
    "lora_B alone": (lambda c, t: t.pop(f"{Q}.lora_A.weight"), r"q_proj: .* missing or too much is .*lora_A\.weight"),
    "no such module": (
        lambda c, t: t.update({"model.layers.7.q_proj.lora_A.weight": torch.ones(4, 64)}),
        r"layers\.7\.q_proj\.lora_A\.weight: the model has no module model\.layers\.7\.q_proj",
    ),
    "another width": (
        lambda c, t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 65)}),
        r"q_proj\.lora_A\.weight: its shape is \[4, 65\].*\[4, 64\]",
    ),
    "another rank": (lambda c, t: c.update(r=5), r"lora_A\.weight: its shape is \[4, 64\].*\[5, 64\]"),
    "a bias too much": (lambda c, t: t.update({f"{Q}.lora_B.bias": torch.ones(64)}), r"too much is .*lora_B\.bias"),
    "no biases": (lambda c, t: c.update(lora_bias=True), r"missing .*lora_B\.bias"),
    "no magnitudes": (lambda c, t: c.update(use_dora=True), r"missing .*lora_magnitude_vector"),
    "integers": (lambda c, t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 64).int()}), r"lora_A\.weight: its dtype"),
    "float8": (
        lambda c, t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 64).to(torch.float8_e4m3fn)}),
        r"lora_A\.weight: its dtype",
    ),
    "NaN": (lambda c, t: t[f"{Q}.lora_A.weight"][2, 3:].fill_(torch.nan), r"lora_A\.weight: .* not finite"),
    "infinite": (lambda c, t: t[f"{Q}.lora_B.weight"][2, 3:].fill_(-torch.inf), r"lora_B\.weight: .* not finite"),
    "an unknown part": (lambda c, t: t.update({f"{Q}.lora_C.weight": torch.ones(4)}), r"q_proj\.lora_C\.weight"),
    "a base weight": (
        lambda c, t: t.update({"base_model.model.model.norm.weight": torch.full((64,), 3.0)}),
        r"model\.norm\.weight: it would replace the model's own",
    ),
    "more tokens": (
        lambda c, t: t.update({"base_model.model.lm_head.weight": torch.ones(99, 64)}),
        r"lm_head\.weight: its shape is \[99, 64\]",
    ),
    "not a tensor of the module": (
        lambda c, t: t.update({"base_model.model.model.norm.extra": torch.ones(64)}),
        r"norm\.extra: LlamaRMSNorm has no tensor",
    ),
    "a part of a whole module": (
        lambda c, t: (
            c.update(modules_to_save=["mlp"]),
            t.update({"model.layers.0.mlp.up_proj.weight": torch.ones(96, 64)}),
        ),
        r"mlp\.down_proj\.weight: it is in only one",
    ),
    "on a norm": (
        lambda c, t: t.update(
            {"model.norm.lora_A.weight": torch.ones(4, 64), "model.norm.lora_B.weight": torch.ones(64, 4)}
        ),
        r"norm\.lora_A\.weight: LlamaRMSNorm is no linear layer",
    ),
    "nothing": (lambda c, t: t.clear(), "no weights of an adapter"),
    "rank 0": (lambda c, t: c.update(r=0), "ZeroDivisionError|division"),
    "a word for alpha": (lambda c, t: c.update(lora_alpha="much"), "str"),
    "a broken pattern": (lambda c, t: c.update(rank_pattern={"q_proj(": 3}), "unterminated"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: Any) -> tuple[Any, Path]:
    model = base("llama")
    return model, saved(tmp_path_factory.mktemp("good"), model, target_modules=["q_proj"])


@pytest.mark.parametrize("fault", BAD)
def test_bad_files_are_refused(fault: str, good: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = good
    change, words = BAD[fault]
    config, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    read_adapter(folder, model)
    change(config, tensors)
    (tmp_path / CONFIG).write_text(json.dumps(config))
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=words) as caught:
        read_adapter(tmp_path, model)
    assert str(caught.value).startswith(f"{tmp_path / WEIGHTS}: ")


def test_missing_and_broken_files(good: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = good
    with pytest.raises(ValueError, match=rf"nowhere/{CONFIG}: there is no such file"):
        read_adapter(tmp_path / "nowhere", model)
    (tmp_path / CONFIG).write_text((folder / CONFIG).read_text())
    torch.save({}, tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match=rf"{WEIGHTS}: .* safetensors only"):
        read_adapter(tmp_path, model)
    data = (folder / WEIGHTS).read_bytes()
    for broken in (b"", b"nonsense, no header", data[:-1], data + b"\0"):
        (tmp_path / WEIGHTS).write_bytes(broken)
        with pytest.raises(ValueError, match=WEIGHTS):
            read_adapter(tmp_path, model)
    (tmp_path / WEIGHTS).write_bytes(data)
    for broken in (b"{", b"[]", b"{}", b'{"peft_type": "NEW"}', b"\xff"):
        (tmp_path / CONFIG).write_bytes(broken)
        with pytest.raises(ValueError, match=CONFIG):
            read_adapter(tmp_path, model)


FOREIGN: dict[str, tuple[Callable[[], Any], str]] = {
    "IA3": (lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "'IA3'"),
    "OFT": (lambda: peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4), "'OFT'"),
    "prompt tuning": (lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "'PROMPT_TUNING'"),
    "AdaLoRA": (lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9), "'ADALORA'"),
    "LoHa": (lambda: peft.LoHaConfig(target_modules=["q_proj"]), "'LOHA'"),
    "aLoRA": (
        lambda: peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[3], task_type="CAUSAL_LM"),
        "alora_invocation_tokens",
    ),
    "tokens": (
        lambda: peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[5]),
        "trainable_token_indices",
    ),
    "parameters": (
        lambda: peft.LoraConfig(target_modules=[], target_parameters=["q_proj.weight"]),
        "target_parameters",
    ),
    "replication": (
        lambda: peft.LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 1), (0, 2)]),
        "layer_replication",
    ),
    "PiSSA": (
        lambda: peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"),
        "init_lora_weights.*'pissa'",
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_kinds_that_peft_itself_runs_are_refused(kind: str, tmp_path: Path) -> None:
    config, words = FOREIGN[kind]
    model = base("llama")
    peft.get_peft_model(copy.deepcopy(model), config()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words) as caught:
        read_adapter(tmp_path, model)
    assert str(caught.value).startswith(f"{tmp_path / CONFIG}: ")


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases_are_refused(bias: str, tmp_path: Path) -> None:
    model = base("gpt2")
    trained = tuned(model, target_modules=GPT2, bias=bias)
    with torch.no_grad():
        trained.get_submodule("base_model.model.transformer.h.1.attn.c_attn.base_layer").bias.add_(0.1)
    trained.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"h\.1\.attn\.c_attn\.base_layer\.bias: it would replace the model's own"):
        read_adapter(tmp_path, model)
