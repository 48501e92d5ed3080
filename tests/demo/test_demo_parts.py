"""Parts of the demo that need no server: words, trees, maps, limits, streams, and the command line's errors."""

from __future__ import annotations

import asyncio
import copy
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
import torch
from typer.testing import CliRunner

import hf_paged
from demo import frames as frames_module
from demo import translation as demo_translation
from demo.__main__ import command
from demo.beams import BeamTree
from demo.chat import Reply, reply
from demo.compare import memory_maps
from demo.frames import Frames
from demo.generation import Sampling
from demo.hub import Hub
from demo.limits import Limits, RefusedError
from demo.loading import LoadError, load
from demo.pages.replay import OTHER, PLOTS, frames, last_point
from demo.pressure import BurstWatch
from demo.prompts import render
from demo.replays import OURS, Replay
from demo.run_record import Row, RunRecord, held_rows
from demo.sharing import group_sharing
from demo.streams import TextStream, in_thread
from demo.tiny_translator import END, EXAMPLE, Translator
from demo.told import raised, told
from demo.transcripts import Transcripts
from demo.translation import translate
from helpers.models import build
from hf_paged.tools.report import stock_kv_usage

EVIL = "<img src=x onerror=alert(1)> & <script>alert(2)</script> &lt;b&gt;"


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load()


# --------------------------------------------------------------------------------------------------------- translation


def test_a_source_is_there_once_for_all_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that is watched finds what stock does; its source's blocks are no beam's own, and stay."""
    monkeypatch.setattr("demo.translation.STEP_SECONDS", 0)

    async def run(count: int) -> list[Any]:
        return [reading async for reading in translate(Limits(), EXAMPLE.upper(), count)]

    readings = [reading for reading in asyncio.run(run(4)) if reading.source]
    assert len(readings) > 8
    for reading in readings:
        assert [piece.words for piece in reading.source] == [
            "the old man paints",
            "the red house by",
            "the sea today ·",
        ]
        assert {piece.readers for piece in reading.source} == {4}
        assert reading.source == readings[0].source
        own = {piece.block for beam in reading.beams for piece in beam}
        assert len(reading.beams) == 4 and own.isdisjoint(piece.block for piece in reading.source)
    translator = demo_translation._made
    assert translator is not None
    stock = copy.deepcopy(hf_paged.unpatch(translator.model))
    hf_paged.patch(translator.model, num_blocks=64, block_size=4)
    ids = torch.tensor([Translator.encode(EXAMPLE)])
    rows = stock.generate(ids, num_beams=4, num_return_sequences=4, do_sample=False, max_new_tokens=16).tolist()
    assert readings[-1].found == [Translator.decode([token for token in row if token > END]) for row in rows]
    assert all(not reading.found for reading in readings[:-1])


@pytest.mark.parametrize(("english", "count"), [("the old spaceship", 4), ("", 4), ("the " * 33, 4), (EXAMPLE, 1)])
def test_what_can_t_be_translated_is_refused(english: str, count: int) -> None:
    async def run() -> None:
        async for _ in translate(Limits(), english, count):
            pass

    with pytest.raises(RefusedError):
        asyncio.run(run())


# --------------------------------------------------------------------------------------------------------------- beams


@pytest.mark.parametrize("eos", [[], list(range(3, 60, 3))])
def test_the_tree_of_beams_is_the_engine_s_search(eos: list[int]) -> None:
    """Also where beams end in the midst of the search, which no later step shows."""
    prompt, settings = [7, 8, 9, 10, 11], {"num_beams": 4, "num_return_sequences": 4, "do_sample": False}
    settings |= {"max_new_tokens": 10, "eos_token_id": eos or None, "pad_token_id": 0}
    model = hf_paged.patch(build("llama"), num_blocks=64, block_size=4)
    engine = model.paged
    engine.pause()
    request, tree, newest = engine.submit(prompt, request_id="a", **settings), BeamTree("a"), 0
    while engine.step() is not None:
        snapshot = engine.snapshot(newest)
        newest = snapshot["events"][-1]["id"]
        tree.see(snapshot)
    engine.resume()
    output = request.result(30)
    stock = hf_paged.unpatch(model).generate(torch.tensor([prompt]), **settings)
    for tokens, row in zip(output.sequences, stock[:, 5:].tolist(), strict=True):
        assert tokens == row[: len(tokens)]

    known = set(tree.scores)
    tree.add(output.sequences)
    assert all(path[:-1] in known for path in set(tree.scores) - known if len(path) > 1), "a beam without its beginning"
    branches = tree.branches()
    assert sum(len(path) - shared for path, shared in branches) == len(tree.scores) > 20
    model = hf_paged.patch(model, num_blocks=64, block_size=4)
    tree.score(
        branches,
        [[t.logprob for t in model.paged.score([[*prompt, *path]], first=5 + n)[0]] for path, n in branches],
    )
    nodes = {node["rank"]: node for node in tree.nodes(str, output.sequences) if node["rank"]}
    assert sorted(nodes) == [1, 2, 3, 4]
    for rank, (tokens, score) in enumerate(zip(output.sequences, output.scores or [], strict=True), start=1):
        assert nodes[rank]["step"] == len(tokens)
        assert nodes[rank]["score"] / len(tokens) == pytest.approx(score, abs=1e-4)
    if eos:
        assert any(len(tokens) < 10 for tokens in output.sequences), "no beam ended early: the test tests nothing"


# --------------------------------------------------------------------------------------------------- the last steps


def test_frames_of_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would break: a frame without its events, one that a slower thread's older snapshot takes the place of, and
    memory without an end.
    """
    kept = Frames()

    def snapshot(step: int, *events: int) -> dict[str, Any]:
        return {"num_steps": step, "blocks": [step] * 8, "events": [{"id": event} for event in events]}

    kept.see(snapshot(0))
    kept.see(snapshot(1, 1, 2))
    kept.see(snapshot(1, 1, 2, 3))
    kept.see(snapshot(3, 2, 3, 4))
    kept.see(snapshot(2, 2, 3))
    assert kept.steps == [0, 1, 3] and kept.frame(2) is None
    assert kept.frame(1) == snapshot(1, 1, 2, 3) and kept.frame(3) == snapshot(3, 4)
    for step in range(4, 300):
        kept.see(snapshot(step, step + 1))
    assert kept.steps == list(range(100, 300))
    monkeypatch.setattr(frames_module, "MOST_BYTES", 1000)
    kept.see(snapshot(300, 301))
    assert 1 < len(kept.steps) < 50 and kept.steps[-1] == 300


# ----------------------------------------------------------------------------------------------------- sharing and maps


def snapshot_of(*groups: dict[str, Any], block_size: int = 4) -> dict[str, Any]:
    return {"block_size": block_size, "groups": list(groups), "events": [], "waiting": []}


def holding(label: str, *sequences: tuple[int, int, list[int]], status: str = "running") -> dict[str, Any]:
    """A group whose sequences have so many tokens, so many of them computed, and this block table."""
    return {
        "id": 1,
        "request_id": label,
        "status": status,
        "sequences": [
            {"id": number, "num_tokens": tokens, "num_computed_tokens": computed, "block_tables": [table]}
            for number, (tokens, computed, table) in enumerate(sequences)
        ],
    }


def test_tables_of_several_groups_of_layers() -> None:
    """A block behind a window is held no more; what is shared in one group may be in another."""
    samples = holding("a", (10, 9, [1, 2, 3]), (10, 9, [1, 2, 4]))
    for number, sequence in enumerate(samples["sequences"]):
        sequence["block_tables"].append([-1, 5, 6 + number])
    sharing = group_sharing(samples)
    assert (sharing.held, sharing.tables, sharing.saved, sharing.sequences) == (7, 10, 3, 2)
    assert held_rows(snapshot_of(samples), {"a"}) == [Row("a · 1", 20, 14), Row("a · 2", 8, 2)]


def test_stock_is_measured_on_its_own_cache(loaded: Any) -> None:
    """The middle map against a stock call of the same prompts that chooses its own tokens."""
    texts = ["The old man", "It was late in the evening when the", "She said"]
    batch = loaded.tokenizer(texts, return_tensors="pt", padding=True)
    output = loaded.twin.generate(**batch, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    rows = output.sequences[:, batch["input_ids"].shape[1] :].tolist()
    usage = stock_kv_usage(output.past_key_values, batch["attention_mask"], [12] * 3)
    prompts = [loaded.tokenizer(text).input_ids for text in texts]
    record = RunRecord(
        ["a", "b", "c"], prompts, 20, 4, 99, 3072, [[rows[0]], [rows[1][:5]], [rows[2]]], [Row("a", 4, 3)], 1
    )
    reserved, stock, paged = memory_maps(loaded, record)
    assert stock.reserved * 3072 == usage.allocated_bytes
    assert [row.used for row in stock.rows] == [len(prompts[0]) + 11, len(prompts[1]) + 5, len(prompts[2]) + 11]
    assert [row.reserved for row in reserved.rows] == [len(prompt) + 20 for prompt in prompts]
    assert [row.used for row in reserved.rows] == [len(prompts[0]) + 11, len(prompts[1]) + 4, len(prompts[2]) + 11]
    assert (paged.reserved, paged.waste) == (4, 0.25)


# --------------------------------------------------------------------------------------------------------------- texts


def test_characters_of_several_tokens_are_not_broken(loaded: Any) -> None:
    text = "naïve 😀 café — 日本語 ok"
    prompt, tokens = [1], loaded.tokenizer(text, add_special_tokens=False).input_ids
    stream = TextStream(loaded.tokenizer, prompt)
    pieces = [stream.push([token]) for token in tokens]
    assert "".join(pieces) + stream.push([], is_last=True) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_character_do_not_hold_up_the_rest(loaded: Any) -> None:
    broken = loaded.tokenizer("😀", add_special_tokens=False).input_ids[:1]
    after = loaded.tokenizer("the door", add_special_tokens=False).input_ids
    stream = TextStream(loaded.tokenizer)
    text = "".join(stream.push([token]) for token in broken * 6 + after) + stream.push([], is_last=True)
    assert text.endswith("the door") and "\ufffd" in text


def test_a_chat_template_is_used(loaded: Any) -> None:
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    )
    chatty = replace(loaded, tokenizer=tokenizer)
    assert chatty.has_chat_template and render(chatty, [{"role": "user", "content": "Hi"}]) == "[user]Hi[a]"
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RefusedError, match="roles must alternate"):
        render(chatty, [{"role": "user", "content": "Hi"}])


def test_a_chat_model_finds_what_it_said(loaded: Any) -> None:
    """Through the template, whose tokens stand between the turns."""
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = (
        "<s>{% for m in messages %}{{ m.role }}: {{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    hub = Hub(replace(loaded, tokenizer=tokenizer), {"num_blocks": 64, "block_size": 4, "preemption": "auto"}, Limits())

    async def last(messages: list[dict[str, str]]) -> Reply:
        return [
            each async for each in reply(hub, "me", messages, Sampling(max_new_tokens=24, temperature=1.2, seed=3))
        ][-1]

    try:
        messages = [{"role": "user", "content": "Who is there?"}]
        first = asyncio.run(last(messages))
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "It is I."}]
        second = asyncio.run(last(messages))
    finally:
        hub.close()
    assert first.finish_reason == "length" and "<s>" not in first.text
    assert second.cached_tokens == (first.prompt_tokens + first.new_tokens - 1) // 4 * 4


def test_a_known_beginning_keeps_its_tokens(loaded: Any) -> None:
    tokenizer, transcripts = loaded.tokenizer, Transcripts(most=2)
    spelled = [1, *(token for letter in "The door" for token in tokenizer(letter, add_special_tokens=False).input_ids)]
    plain = tokenizer("The door was open.").input_ids
    assert transcripts.encode(tokenizer, "The door was open.", True) == plain
    transcripts.remember("The door", spelled)
    transcripts.remember("The", spelled[:4])
    ids = transcripts.encode(tokenizer, "The door was open.", True)
    assert ids[: len(spelled)] == spelled and tokenizer.decode(ids) == tokenizer.decode(plain) and ids != plain
    transcripts.remember("x", [5])
    assert transcripts.encode(tokenizer, "The door was open.", True)[:4] == spelled[:4], "the oldest is kept"
    transcripts.remember("The", [9, 9])  # not what the text says
    assert transcripts.encode(tokenizer, "The door was open.", True) == plain


# ------------------------------------------------------------------------------------------------ nothing is markup


def test_errors_are_shown_as_text(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> None:
        raise RefusedError(EVIL)

    async def fail() -> None:
        raise KeyError(EVIL)

    with pytest.raises(gr.Error) as refusal:
        raised(refuse)()
    assert "<" not in refusal.value.message and not caplog.records
    with pytest.raises(gr.Error) as failure:
        asyncio.run(told(fail)())
    assert "<" not in failure.value.message and "KeyError" in failure.value.message
    assert "a handler failed" in caplog.text


# ------------------------------------------------------------------------------------------------------- time and tasks


def test_rows_of_a_burst_say_what_the_requests_do(loaded: Any) -> None:
    """Would break: a request that no snapshot showed, or whose last token none did."""
    hub = Hub(loaded, {"num_blocks": 64, "block_size": 16, "preemption": "auto"}, Limits())
    try:
        hub.pacer.pause()
        tickets = [
            hub.submit("burst", "me", [1, 5, 6], **Sampling(max_new_tokens=count).arguments(loaded))
            for count in (1, 2, 9, 9)
        ]
        watch = BurstWatch(tickets, loaded.tokenizer)

        def rows() -> list[tuple[str, int, bool]]:
            watch.see(hub.snapshot())
            return [(row.state, row.new_tokens, bool(row.reply)) for row in watch.rows]

        assert rows() == 4 * [("waiting", 0, False)]
        hub.step()
        assert rows() == [("done", 1, True), *3 * [("running", 1, False)]]
        hub.step()
        assert rows() == [("done", 1, True), ("done", 2, True), *2 * [("running", 2, False)]]
        tickets[3].request.cancel()
        hub.pacer.resume()
        for ticket in tickets:
            ticket.request.result(30)
        assert rows() == [("done", 1, True), ("done", 2, True), ("done", 9, True), ("cancelled", 2, True)]
    finally:
        hub.close()


def test_what_is_made_for_a_caller_who_is_gone_is_undone() -> None:
    may_go_on, undone = threading.Event(), []

    def make() -> str:
        may_go_on.wait(5)
        return "made"

    async def main() -> None:
        task = asyncio.create_task(in_thread(make, undone.append))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()
        while not undone:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 5))
    assert undone == ["made"]


# --------------------------------------------------------------------------------------------------------- command line


def run(*arguments: str) -> Any:
    return CliRunner().invoke(command, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"})


def failed(*arguments: str) -> str:
    """The message of a run that ends with exit code 2 and no traceback."""
    result = run(*arguments)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    assert "Traceback" not in result.output
    return result.output


def test_a_model_that_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    assert "there is no folder /nowhere" in failed("--model", "/nowhere")
    assert "holds no model" in failed("--model", str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "no-such-thing"}')
    assert "cannot load the model" in failed("--model", str(tmp_path))
    assert "--dtype must be one of" in failed("--dtype", "float8")
    assert "cannot use --device" in failed("--device", "nonsense")
    assert "preemption must be one of" in failed("--preemption", "never")
    with pytest.raises(LoadError, match="cannot load"):
        load("no-such-owner/no-such-model")


def test_a_model_that_cannot_be_paged_is_one_sentence(tmp_path: Path, loaded: Any) -> None:
    from transformers import RwkvConfig, RwkvForCausalLM

    RwkvForCausalLM(RwkvConfig(vocab_size=2048, hidden_size=32, num_hidden_layers=2)).save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    assert "hf_paged does not support RwkvForCausalLM" in failed("--model", str(tmp_path))


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port} is not free" in failed("--port", port)


def test_the_demo_uses_the_public_api_only() -> None:
    """The package itself, and what it shares on purpose; no other module of the engine's."""
    allowed = {"hf_paged", "hf_paged.server", "hf_paged.tools.report"}
    for file in Path(sys.modules["demo"].__file__ or "").parent.rglob("*.py"):
        for line in file.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words[:1] in (["from"], ["import"]) and words[1].startswith("hf_paged"):
                assert words[1] in allowed, f"{file.name}: {line}"


@pytest.mark.parametrize("other", Replay().others)
def test_a_replay_ends_when_the_other_is_saturated(other: str) -> None:
    """Over the same arrivals ours never is; what a frame shows is what was recorded up to there."""
    replay = Replay()
    point, full = last_point(replay, other), replay.saturated_from(other)
    assert full is not None and full < point < len(replay.times) and replay.saturated_from(OURS) is None
    assert "saturated" in replay.describe(other, point) and "saturated" not in replay.describe(other, full - 1)
    for frame, name in zip(frames(replay, other, point), PLOTS, strict=True):
        columns = frame.set_index("system")
        factor = 100 if name == "tokens" else 1
        for label, system in ((OURS, OURS), (OTHER, other)):
            expected = [factor * value for value in replay.series(system, name)[: point + 1]]
            assert columns.loc[label][PLOTS[name]].tolist() == expected
    assert replay.series(OURS, "done")[-1] > replay.series(other, "done")[-1]
