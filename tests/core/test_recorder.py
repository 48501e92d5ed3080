"""What a scheduler was told, written down and told again, leads to the same steps."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from test_scheduler_machine import WatchedScheduler, World, random_call, random_world
from typer.testing import CliRunner

from hf_paged.core.recorder import RecordingScheduler, new_file
from hf_paged.core.replay import replay
from hf_paged.tools.cli import app


class WatchedRecorder(WatchedScheduler, RecordingScheduler):
    """The state machine's scheduler, recording."""


def recorded(episode: int, num_calls: int = 250) -> tuple[World, list[str]]:
    file = io.StringIO()
    world = random_world(episode, lambda *args, **options: WatchedRecorder(*args, **options, file=file))
    for _ in range(num_calls):
        random_call(world, world.rng)
    world.drain()
    return world, file.getvalue().splitlines()


@pytest.mark.parametrize("episode", range(12))
def test_random_runs_are_replayed(episode: int) -> None:
    """Breaks if an input of the scheduler's is not written, or its steps follow from anything else."""
    world, lines = recorded(episode)
    num_steps, difference = replay(lines)
    assert difference is None
    assert num_steps >= world.num_steps > 20


def changed(line: dict[str, Any]) -> dict[str, Any] | None:
    """The line with another prompt, if one comes with it."""
    for kind, _, values in line.get("changes", ()):
        if kind == "sequence" and values.get("token_ids"):
            values["token_ids"][0] += 1
            return line
    return None


def test_the_first_difference_is_shown(tmp_path: Path) -> None:
    _, lines = recorded(1)
    place, line = next((i, found) for i, text in enumerate(lines) if (found := changed(json.loads(text))))
    lines[place] = json.dumps(line)
    num_steps, difference = replay(lines)
    assert difference is not None and difference.line > place and difference.call == "schedule"
    assert "token_ids differ" in difference.message
    file = tmp_path / "recording"
    file.write_text("\n".join(lines) + "\n")
    result = CliRunner().invoke(app, ["replay", str(file)])
    assert result.exit_code == 1 and f"line {difference.line}, schedule" in result.output.replace("\n", " ")
    assert str(num_steps) in result.output


@pytest.mark.parametrize("content", [b"", b"{}\n", b"[1]\n", b"text\n", b"\xff\xfe\x00"])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "else.json"
    file.write_bytes(content)
    result = CliRunner().invoke(app, ["replay", str(file)])
    said = result.output.replace("\n", "")
    assert result.exit_code == 2 and "else.json: this is no recording" in said and "HF_PAGED_RECORD" in said


def test_no_recording_is_overwritten(tmp_path: Path) -> None:
    with new_file(str(tmp_path / "r")) as one, new_file(str(tmp_path / "r")) as other:
        assert (Path(one.name).name, Path(other.name).name) == ("r", "r.1")
