"""Adapters of PEFT's as models, beside stock with the same adapter."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import hf_paged
from helpers.models import tiny_lm, tiny_tokenizer
from helpers.serving import Served, serving
from helpers.waiting import join
from hf_paged.server import create_app, run
from hf_paged.server.prompts import Prompts
from hf_paged.server.settings import ServerSettings
from hf_paged.tools import cli

peft = pytest.importorskip("peft")

NAMES = ("base", "one", "two")
PROMPTS = ["The door", "The king of", "A"]
NEW = 10


@cache
def tuned() -> Any:
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "lora_alpha": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_lm(), peft.LoraConfig(**settings), adapter_name="one")
        model.add_adapter("two", peft.LoraConfig(**settings))
    return model.eval()


@cache
def expected(name: str, prompt: str) -> str:
    """What stock says."""
    model = copy.deepcopy(tuned())
    if name == "base":
        model.base_model.disable_adapter_layers()
    else:
        model.set_adapter(name)
    ids = torch.tensor([tiny_tokenizer()(prompt)["input_ids"]])
    found = model.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    whole, head = (tiny_tokenizer().decode(row, skip_special_tokens=True) for row in (found[0], ids[0]))
    return whole[len(head) :]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    settings = ServerSettings(model_name="base", adapters=("one", "two"))
    with serving(settings, copy.deepcopy(tuned())) as running:
        yield running
        running.settle()


def test_each_is_a_model(served: Served) -> None:
    """Would break: another adapter's tokens or cached keys, an adapter left on for the model without."""
    assert [model.id for model in served.client.models.list()] == list(NAMES)
    for name in [*NAMES, *NAMES[::-1]]:
        for prompt in PROMPTS:
            reply = served.complete(prompt=prompt, model=name, max_tokens=NEW, temperature=0)
            assert reply["choices"][0]["text"] == expected(name, prompt) and reply["model"] == name
    assert len({expected(name, PROMPTS[0]) for name in NAMES}) == 3, "the adapters change nothing"
    assert served.complete(max_tokens=NEW, temperature=0)["choices"][0]["text"] == expected("base", "The door")
    chat: Any = {"messages": [{"role": "user", "content": "A"}], "max_tokens": 2}
    assert served.client.chat.completions.create(model="two", **chat).model == "two"
    answer = served.client.responses.create(model="one", input="A", max_output_tokens=2, store=False)
    assert answer.model == "one"
    assert served.post("/v1/completions", {"model": "three", "prompt": "A"}).status_code == 404
    assert 'generation_tokens_total{model_name="two"}' in served.http.get("/metrics").text


def test_modules_to_save() -> None:
    """Would break: what PEFT switches beside the layers that it adds to, taken for one of those."""
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(tiny_lm(), config, adapter_name="one").eval()
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["one"].weight.mul_(-1)
    with serving(ServerSettings(model_name="base", adapters=("one",)), model) as running:
        found = [running.complete(model=name, max_tokens=4, temperature=0) for name in ("one", "base", "one")]
    first, base, again = (reply["choices"][0]["text"] for reply in found)
    assert first == again != base == expected("base", "The door")[: len(base)]


def test_all_at_once(served: Served) -> None:
    """Requests of all adapters share steps. Would break: rows with another one's tokens; clients that leave."""
    before, wrong = served.engine.stats().num_steps, []

    def ask(number: int) -> None:
        name, prompt = NAMES[number % 3], PROMPTS[number % 2]
        given = {"prompt": prompt, "model": name, "max_tokens": NEW, "temperature": 0}
        if number % 5 == 4:
            with served.http.stream("POST", "/v1/completions", json=given | {"stream": True, "max_tokens": 400}):
                return
        text = served.complete(**given)["choices"][0]["text"]
        if text != expected(name, prompt):
            wrong.append((number, text))

    for name in NAMES:
        for prompt in PROMPTS:
            expected(name, prompt)
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    join(*threads, seconds=100)
    assert not wrong
    served.settle()
    assert served.engine.stats().num_steps - before < 24 * NEW, "requests share no steps"


@pytest.mark.parametrize("name", NAMES)
def test_an_owner_who_switches_is_noticed(name: str) -> None:
    """Would break: an adapter remembered as switched on, which is no longer."""
    model = copy.deepcopy(tuned())
    switches: dict[str, Callable[[], Any]] = {
        "another": lambda: model.set_adapter("two" if name == "one" else "one"),
        "none": model.base_model.disable_adapter_layers,
        "all": model.base_model.enable_adapter_layers,
    }
    with serving(ServerSettings(model_name="base", adapters=("one", "two")), model) as served:
        for how, switch in switches.items():
            for _ in range(2):  # the second time nothing is to be switched
                reply = served.complete(prompt="A", model=name, max_tokens=NEW, temperature=0)
                assert reply["choices"][0]["text"] == expected(name, "A"), how
            switch()
        reply = served.complete(prompt="A", model=name, max_tokens=NEW, temperature=0)
        assert reply["choices"][0]["text"] == expected(name, "A")
        served.settle()


@pytest.mark.parametrize("names", [("one", "one"), ("base",), ("three",), "one", ("",)])
def test_refused(names: Any) -> None:
    with pytest.raises(ValueError, match="adapter"):
        create_app(copy.deepcopy(tuned()), tiny_tokenizer(), model_name="base", adapters=names)


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: an adapter loaded under another name, a bad path as a traceback."""
    tuned().save_pretrained(tmp_path)
    found: list[Any] = []
    monkeypatch.setattr(run, "run_server", lambda model, tokenizer, settings, *others: found.append((model, settings)))
    given = ["serve", "--adapter", f"x={tmp_path / 'one'}", "--adapter", f"y={tmp_path / 'two'}", "--num-blocks", "9"]
    assert CliRunner().invoke(cli.app, given).exit_code == 0
    ((model, settings),) = found
    assert settings.adapters == ("x", "y") and model.paged.config.num_blocks
    ids = tiny_tokenizer()("A")["input_ids"]
    options = {"max_new_tokens": NEW, "do_sample": False}
    outputs = model.paged.generate([ids] * 2, adapters=settings.adapters, **options)
    texts = [tiny_tokenizer().decode(output.token_ids, skip_special_tokens=True) for output in outputs]
    assert [text.strip() for text in texts] == [expected(name, "A").strip() for name in ("one", "two")]
    peft.get_peft_model(tiny_lm(), peft.IA3Config(target_modules=["k_proj"])).save_pretrained(tmp_path / "ia3")
    for bad in (["x"], ["x="], ["=x"], ["x=/nowhere/at/all"], [f"x={tmp_path / 'ia3'}"]):
        result = CliRunner().invoke(cli.app, ["serve", "--adapter", *bad])
        assert result.exit_code == 2 and "Traceback" not in result.output, bad
    result = CliRunner().invoke(cli.app, ["serve", "--adapter-dir", str(tmp_path)], env={"HF_PAGED_API_KEY": None})
    assert result.exit_code == 2 and "needs api_keys" in " ".join(result.output.split())


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of adapters, beside one that is outside, which links lead to."""
    tuned().save_pretrained(tmp_path / "in")
    outside = shutil.copytree(tmp_path / "in" / "one", tmp_path / "outside")
    (tmp_path / "in" / "link").symlink_to(outside)
    shutil.copytree(outside, tmp_path / "in" / "linked file")
    weights = tmp_path / "in" / "linked file" / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(outside / weights.name)
    circle = tmp_path / "in" / "circle"
    circle.symlink_to(circle)
    (tmp_path / "in" / "empty").mkdir()
    return tmp_path / "in"


def test_loaded_while_it_runs(folder: Path) -> None:
    """Would break: a list of models made at start; tokens of what had the name before; a load that waits for steps."""
    settings = ServerSettings(model_name="base", adapter_dir=folder, api_keys=("secret",))
    with serving(settings) as served:

        def load(name: str, path: str) -> int:
            return served.post(LOAD, {"lora_name": name, "lora_path": path}).status_code

        def text(name: str, prompt: str = "A") -> str:
            fields = {"prompt": prompt, "model": name, "max_tokens": NEW, "temperature": 0}
            return served.complete(**fields)["choices"][0]["text"]

        with served.http.stream(
            "POST", "/v1/completions", json={"prompt": "A", "max_tokens": 300, "ignore_eos": True, "stream": True}
        ):
            assert load("x", "one") == 200 and load("y", str(folder / "two")) == 200
            assert [text("x"), text("y"), text("base")] == [expected(name, "A") for name in ("one", "two", "base")]
        assert [model.id for model in served.client.models.list()] == ["base", "x", "y"]
        assert load("x", "two") == load("base", "two") == 400
        assert served.post(UNLOAD, {"lora_name": "x"}).status_code == 200
        assert served.post("/v1/completions", {"prompt": "A", "model": "x"}).status_code == 404
        reply = served.post(UNLOAD, {"lora_name": "x"})
        assert reply.status_code == 404 and reply.json()["error"]["param"] == "lora_name"
        assert load("x", "two") == 200 and text("x") == expected("two", "A")
        served.settle()


def test_an_adapter_that_goes_while_a_request_is_prepared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: the base model's text as an answer of the adapter."""
    settings = ServerSettings(model_name="base", adapter_dir=folder, api_keys=("secret",))
    with serving(settings) as served:
        assert served.post(LOAD, {"lora_name": "x", "lora_path": "one"}).status_code == 200
        prompts, of_text = served.server.config.app.state.serving.prompts, Prompts.of_text

        def slowly(*arguments: Any) -> Any:
            assert served.post(UNLOAD, {"lora_name": "x"}).status_code == 200
            return of_text(prompts, *arguments)

        monkeypatch.setattr(prompts, "of_text", slowly)
        reply = served.post("/v1/completions", {"prompt": "A", "model": "x", "max_tokens": 2})
        assert reply.status_code == 400 and "non-existing adapter" in reply.json()["error"]["message"]
        served.settle()


def test_the_most_adapters(folder: Path) -> None:
    model = hf_paged.patch(tiny_lm(), num_blocks=64)
    app = create_app(model, tiny_tokenizer(), adapter_dir=folder, api_keys=["secret"], max_adapters=1)
    with TestClient(app, headers={"Authorization": "Bearer secret"}) as client:
        found = [client.post(LOAD, json={"lora_name": name, "lora_path": "one"}) for name in ("x", "y")]
        assert [reply.status_code for reply in found] == [200, 400] and "the most" in found[1].text


@pytest.mark.parametrize(
    ("path", "why"),
    [
        *(
            (path, "inside")
            for path in ("nowhere", "..", "../outside", "link", "linked file", "circle", "\x00", "/etc")
        ),
        ("one/adapter_config.json", "inside"),
        (".", "inside"),
        ("empty", "adapter_config.json"),
        ("broken", "lora_A"),
        ("odd", "safetensors"),
    ],
)
def test_what_is_not_loaded(path: str, why: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a server that reads what lies elsewhere, or says what does."""
    broken = shutil.copytree(folder / "one", folder / "broken") / "adapter_model.safetensors"
    save_file({key: x[:, :3].contiguous() for key, x in load_file(broken).items()}, broken)
    settings = shutil.copytree(folder / "one", folder / "odd") / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"rank_pattern": []}))
    listed: list[Path] = []
    with_names = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: (listed.append(self), with_names(self))[1])
    model = hf_paged.patch(tiny_lm(), num_blocks=64)
    app = create_app(model, tiny_tokenizer(), adapter_dir=folder, api_keys=["secret"])
    key = {"Authorization": "Bearer secret"}
    with TestClient(app, raise_server_exceptions=True) as client:
        error = client.post(LOAD, json={"lora_name": "x", "lora_path": path}, headers=key)
        assert error.status_code == 400 and error.json()["error"]["param"] == "lora_path"
        message = error.json()["error"]["message"]
        assert why in message and "outside/" not in message and str(folder) not in message
        assert all(each.is_relative_to(folder) for each in listed)
        assert client.post(LOAD, json={"lora_name": "x", "lora_path": "one"}).status_code == 401
        assert len(client.get("/v1/models", headers=key).json()["data"]) == 1
        for name in ("", " x", 3, None):
            reply = client.post(LOAD, json={"lora_name": name, "lora_path": "one"}, headers=key)
            assert reply.status_code == 400 and reply.json()["error"]["param"] == "lora_name"


def test_without_a_folder_there_is_no_such_path(tmp_path: Path) -> None:
    app = create_app(hf_paged.patch(tiny_lm(), num_blocks=64), tiny_tokenizer(), api_keys=["secret"])
    with TestClient(app) as client:
        key = {"Authorization": "Bearer secret"}
        assert client.post(LOAD, json={"lora_name": "x", "lora_path": "one"}, headers=key).status_code == 404
        assert LOAD not in app.openapi()["paths"] and "LoadAdapterRequest" not in app.openapi()["components"]["schemas"]
    for given in ({"adapter_dir": tmp_path}, {"adapter_dir": tmp_path / "none", "api_keys": ["secret"]}):
        with pytest.raises(ValueError, match="adapter_dir"):
            ServerSettings(**given)
