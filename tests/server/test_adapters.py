"""Adapters of PEFT's as models, beside stock with the same adapter."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from helpers.models import tiny_lm, tiny_tokenizer
from helpers.serving import Served, serving
from helpers.waiting import join
from hf_paged.server import create_app, run
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
    assert settings.adapters == ("x", "y") and list(model.peft_config) == ["x", "y"] and model.paged.config.num_blocks
    for bad in ("x", "x=", "=x", "x=/nowhere/at/all"):
        result = CliRunner().invoke(cli.app, ["serve", "--adapter", bad])
        assert result.exit_code == 2 and "Traceback" not in result.output, bad
