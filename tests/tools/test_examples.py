"""Every example runs offline, and says what it promises to show."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

EXAMPLES = Path(__file__).parents[2] / "examples"
NOT_A_DEMONSTRATION = {"train_tiny_lm.py"}  # makes the embedded model: most of an hour


@pytest.fixture
def run_example(capfd, monkeypatch):
    """Runs an example, and returns what it prints. In this process: most of them take less time than their imports."""

    def run(name, *args):
        path = str(EXAMPLES / name)
        monkeypatch.setattr(sys, "argv", [path, *args])
        capfd.readouterr()
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            assert not end.code, capfd.readouterr()
        return capfd.readouterr().out

    return run


def run_apart(name, *args):
    """The same in a process of its own."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def numbers(pattern, text):
    """The integers in the groups of every match."""
    return [tuple(map(int, groups)) for groups in re.findall(pattern, text)]


def test_quickstart():
    output = run_apart("quickstart.py")
    assert "same tokens as before: True" in output
    [(used, total)] = numbers(r"KV blocks at the peak: (\d+) of (\d+)", output)
    assert 0 < used < total


def test_paged_from_scratch(run_example):
    output = run_example("paged_from_scratch.py")
    assert "same tokens as stock generate(): True" in output
    [(copies, preemptions)] = numbers(r"blocks copied on write: (\d+), preemptions: (\d+)", output)
    assert copies > 0 and preemptions > 0


def test_block_tables(run_example):
    output = run_example("block_tables.py")
    assert "A arrives with 20 tokens, 0 of them found\n" in output and "table of A: [0, 1, 2, 3, 4]\n" in output
    assert "C writes token 10 into a copy\n" in output and "B writes token 10 in place\n" in output
    assert "D arrives with 17 tokens, 12 of them found\n" in output
    assert "E has to wait: the operation needs 5 free block(s), the pool has 2\n" in output
    assert "E arrives with 17 tokens" in output and "D and E end\n" in output


def test_small_pool(run_example):
    output = run_example("small_pool.py")
    assert output.count("same tokens as with room for all: True") == 3
    pattern = r"rows preempted: (\d+), of them swapped out: (\d+)\n.*once more: (\d+)\n"
    [roomy, recomputed, swapped] = numbers(pattern, output)
    assert roomy[:2] == (0, 0)
    assert recomputed[0] > 0 == recomputed[1]
    assert swapped[0] == swapped[1] > 0
    assert roomy[2] == swapped[2] < recomputed[2]


def test_offload(run_example):
    output = run_example("offload.py")
    assert "same tokens as in memory: True" in output
    [(in_memory, on_disk)] = numbers(r"parts of the model: (\d+) on cpu, (\d+) on disk", output)
    assert in_memory > 0 and on_disk > 0


def test_grpo(run_example):
    output = run_example("grpo.py", "--steps", "3")
    rows = re.findall(r"^ +\d+ +(\S+) +(\S+) +", output, re.MULTILINE)
    assert len(rows) == 3 and all(float(stock) > 0 == float(exact) for stock, exact in rows)


def test_priorities(run_example):
    output = run_example("priorities.py")
    [order] = re.findall(r"finished in this order: (.*)", output)
    assert order == "door, house, sea, captain (urgent), king, girl, night"


def test_prompt_lookup(run_example):
    output = run_example("prompt_lookup.py")
    assert "same tokens: True" in output
    [(tokens, steps), (same, fewer)] = numbers(r"(\d+) tokens in (\d+) model steps", output)
    assert tokens == same and fewer < steps
    [none, (drafts, right)] = numbers(r"drafts checked: (\d+), right: (\d+)", output)
    assert none == (0, 0) and tokens - steps < drafts and 0 < right < drafts


def test_tensor_parallel(run_example):
    output = run_example("tensor_parallel.py")
    for rank in (0, 1):
        assert f"rank {rank} of 2: same tokens as before: True" in output
    [(tokens, steps)] = numbers(r"an app on rank 0: (\d+) tokens in (\d+) steps", output)
    assert tokens == 24 + 3 * 16 and steps <= tokens


def test_chat_with_cache(run_example):
    output = run_example("chat_with_cache.py")
    assert "same tokens without the cache: True" in output
    turns = numbers(r"turn \d: (\d+) tokens in, (\d+) of them not recomputed", output)
    assert turns[0][1] == 0
    assert all(0 < kept < given for given, kept in turns[1:])
    # All but the last token of an answer is in the cache when the next turn begins.
    assert [kept for _, kept in turns[1:]] == [given + 24 - 1 for given, _ in turns[:-1]]
    assert f"tokens not recomputed: {sum(kept for _, kept in turns)}\n" in output


def test_samples_and_beams(run_example):
    output = run_example("samples_and_beams.py")
    blocks = numbers(r"blocks at the peak: (\d+); without sharing: (\d+)", output)
    assert len(blocks) == 2
    assert all(used < unshared for used, unshared in blocks)
    copies = re.findall(r"copies on write: (\d+)", output)
    assert len(copies) == 2
    assert all(int(count) > 0 for count in copies)
    assert len(re.findall(r"^   \.\.\.", output, flags=re.MULTILINE)) == 4 + 2


@pytest.mark.parametrize("args", [(), (str(EXAMPLES.parent / "hf_paged" / "assets" / "tiny_lm"),)])
def test_your_own_model(run_example, args):
    output = run_example("your_own_model.py", *args)
    assert "is supported" in output
    assert "same tokens as stock generate(): True" in output
    assert "unpatched: True" in output


def test_many_users(run_example):
    output = run_example("many_users.py")
    assert "same replies as stock: True" in output
    [(users, tokens, steps)] = numbers(r"(\d+) users, (\d+) tokens in (\d+) model steps", output)
    assert tokens == users * 48
    assert steps < 2 * 48, "the users did not share steps"


def test_many_prompts(run_example):
    output = run_example("many_prompts.py", "--num-prompts", "300", "--new-tokens", "4")
    [(prompts, tokens, steps)] = numbers(r"(\d+) prompts, (\d+) new tokens in .* (\d+) model steps", output)
    assert prompts == 300
    assert 300 < tokens <= 1200
    assert steps < prompts, "the prompts did not share steps"
    [(used, total)] = numbers(r"KV blocks at the peak: (\d+) of (\d+)", output)
    assert 0 < used < total


def test_shared_system_prompt(run_example):
    output = run_example("shared_system_prompt.py")
    [(given, found)] = numbers(r"prompt tokens given: (\d+), not computed again: (\d+)", output)
    assert given / 2 < found < given
    [(used, unshared)] = numbers(r"KV blocks at the peak: (\d+), without sharing: (\d+)", output)
    assert used < unshared / 2


def test_many_adapters(run_example):
    output = run_example("many_adapters.py")
    assert "old sailor held" in output and "hot dish" in output
    [(requests, adapters, steps)] = numbers(r"(\d+) requests of (\d+) adapters: (\d+) steps", output)
    assert requests == adapters == 100 and steps < 2 * requests


def test_pictures(run_example):
    output = run_example("pictures.py")
    assert "same tokens as stock generate(): True" in output
    [(picture, users, found)] = numbers(r"a picture is (\d+) tokens; (\d+) more users found (\d+) tokens", output)
    assert found >= users * picture
    [(answers, steps)] = numbers(r"(\d+) answers in (\d+) model steps", output)
    assert steps < answers * 16, "the users did not share steps"


def test_translate(run_example):
    output = run_example("translate.py")
    assert "heute malt der alte Mann das Meer" in output
    [(callers, sentences)] = numbers(r"(\d+) callers of (\d+) different sentences", output)
    beams = re.findall(r"beam \d: source in blocks (\[.*\]), its own tokens in (\[.*\])", output)
    assert len(beams) == 5 and len({source for source, _ in beams}) == 1 and len({own for _, own in beams}) > 1
    [(rows, held, unshared)] = numbers(r"(\d+) sequences, source blocks: (\d+), without sharing: (\d+)", output)
    assert rows == 5 * callers and unshared == 2 * rows and held == 2 * sentences
    [(tokens, steps)] = numbers(r"(\d+) tokens of \d+ callers in (\d+) model steps", output)
    assert steps < tokens / callers, "the callers did not share steps"
    assert "same tokens as stock generate(): True" in output


def test_transcribe(run_example):
    output = run_example("transcribe.py")
    tunes = re.findall(r"played (.*), heard (.*)", output)
    assert len(tunes) == 4 and all(played == heard for played, heard in tunes)
    [(users, sources, positions)] = numbers(r"(\d+) users, (\d+) recordings, a source of (\d+) positions", output)
    [(rows, held, unshared)] = numbers(r"(\d+) sequences, source blocks: (\d+), without sharing: (\d+)", output)
    assert rows == 4 * users and held == sources * -(-positions // 16) and unshared == rows * -(-positions // 16)
    [(notes, steps)] = numbers(r"(\d+) notes in (\d+) model steps", output)
    assert steps < notes
    assert "same tokens as stock generate(): True" in output


def test_web_endpoint(run_example):
    output = run_example("web_endpoint.py", "--port", "0")
    [(replies, tokens, steps)] = numbers(r"(\d+) replies, (\d+) tokens in (\d+) model steps", output)
    assert (replies, tokens) == (8, 8 * 32)
    assert steps < tokens


def test_every_example_is_tested_and_listed():
    found = {path.name for path in EXAMPLES.glob("*.py")} - NOT_A_DEMONSTRATION
    tested = {f"{name.removeprefix('test_')}.py" for name in globals() if name.startswith("test_")}
    assert found == tested - {"every_example_is_tested_and_listed.py"}
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == found | NOT_A_DEMONSTRATION


@pytest.mark.slow
def test_ray_serve():
    """Would break: requests that begin alike go to replicas that have not seen their beginning."""
    pytest.importorskip("ray", reason="Ray is not installed (hf-paged[ray])")
    output = run_apart("ray_serve.py")
    assert "200 requests on 2 replicas" in output
    assert "same tokens as one engine: True" in output
    spread, one = map(float, re.findall(r"prefix hits of .*: ([\d.]+) %", output))
    assert one > 50 and abs(spread - one) < 5


@pytest.mark.slow
def test_ray_data(tmp_path):
    """Would break: a second run does again what the first has done, or leaves something out."""
    pytest.importorskip("ray", reason="Ray is not installed (hf-paged[ray])")
    answers = tmp_path / "answers"
    output = run_apart("ray_data.py", "--output", str(answers), "--limit", "20")
    assert "20 prompts, 0 of them answered before" in output
    before = {file: file.read_text() for file in answers.glob("*.json")}
    output = run_apart("ray_data.py", "--output", str(answers), "--limit", "36")
    assert "36 prompts, 20 of them answered before" in output and "36 prompts answered" in output
    assert all(file.read_text() == text for file, text in before.items())
    rows = [json.loads(line) for file in answers.glob("*.json") for line in file.read_text().splitlines()]
    assert sorted(row["id"] for row in rows) == list(range(36)) and all(row["answer"] for row in rows)


def test_openai_client(run_example):
    output = run_example("openai_client.py")
    [(tokens, steps)] = numbers(r"(\d+) tokens in (\d+) model steps", output)
    assert tokens == 4 * 32 and steps < tokens
    assert re.search(r"a person: \{'name': '(Ann|Bob)', 'age': \d+\}", output)
