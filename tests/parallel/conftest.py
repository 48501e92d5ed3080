"""Ranks of a tensor-parallel model, as processes that are started once for a file of tests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).parent / "rank_worker.py"
ROOT = Path(__file__).parents[2]
SECONDS = 300  # for a case, models that are loaded included


class Ranks:
    """Some processes that run the same cases."""

    def __init__(self, size: int, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = os.environ | {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONFAULTHANDLER": "1",
        }
        self._logs = [(directory / f"rank{rank}.log").open("w+") for rank in range(size)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER), str(directory)],
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            for rank, log in enumerate(self._logs)
        ]
        self._answers()

    def run(self, case: str, **arguments: Any) -> list[dict[str, Any]]:
        """What each rank answers; `{}` of one that has ended."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"case": case, **arguments}) + "\n")
            process.stdin.flush()
        found = self._answers()
        for rank, answer in enumerate(found):
            assert "error" not in answer, f"rank {rank}: {answer['error']}\n{self.log(rank)}"
        return found

    def _answers(self) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = [{} for _ in self.processes]

        def listen(rank: int) -> None:
            stdout = self.processes[rank].stdout
            assert stdout is not None
            for line in stdout:
                if line.startswith("RESULT "):
                    answers[rank] = json.loads(line[7:])
                    return

        threads = [threading.Thread(target=listen, args=(rank,), daemon=True) for rank in range(len(answers))]
        for thread in threads:
            thread.start()
        for rank, thread in enumerate(threads):
            thread.join(SECONDS)
            assert not thread.is_alive(), f"rank {rank} hangs:\n{self.log(rank)}"
        return answers

    def log(self, rank: int) -> str:
        """The end of what a rank has written."""
        self._logs[rank].flush()
        return Path(self._logs[rank].name).read_text()[-3000:]

    def close(self) -> list[int | None]:
        """Ends the processes; returns how each ended."""
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.close()
            except BrokenPipeError:
                continue
        codes: list[int | None] = []
        for process in self.processes:
            try:
                codes.append(process.wait(30))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(None)
        return codes


def _ranks(size: int, directory: Path) -> Any:
    ranks = Ranks(size, directory)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    yield from _ranks(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    yield from _ranks(4, tmp_path_factory.mktemp("four"))


@pytest.fixture
def dying_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    yield from _ranks(2, tmp_path_factory.mktemp("dying"))
