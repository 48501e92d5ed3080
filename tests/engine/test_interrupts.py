"""SIGINT at each line that the public calls run: no later call hangs, and none gives other tokens.

`helpers/interrupt_lines.py` says how; it runs in processes of its own, which a hang ends.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "helpers/interrupt_lines.py"
SEED = 0


def run(*arguments: object, seconds: float) -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout


def test_sigint_at_some_lines() -> None:
    """Would break: a count that stays up, or a lock that stays held, behind which all later calls wait."""
    run("--sample", 100, "--seed", SEED, "--max-faults", 3, seconds=120)


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_sigint_at_every_line() -> None:
    """Would break: the same, at the lines that the sample leaves out."""
    run("--max-faults", 20, seconds=1800)


@pytest.mark.slow
def test_storms_of_sigint() -> None:
    """Would break: what only a second Ctrl-C shows, or one between two bytecodes."""
    run("--storm", 90, "--seed", SEED, "--max-faults", 3, seconds=180)
