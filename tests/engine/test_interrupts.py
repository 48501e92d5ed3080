"""SIGINT at each line that the public calls run: no later call hangs, and none gives other tokens.

`helpers/interrupt_lines.py` says how; it runs in processes of its own, which a hang ends.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "helpers/interrupt_lines.py"


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        pytest.param("--sample 100 --seed 0 --max-faults 3", 120, id="at_some_lines"),
        pytest.param("--max-faults 20", 1800, id="at_every_line", marks=[pytest.mark.slow, pytest.mark.timeout(1900)]),
        # What only a second Ctrl-C shows, or one between two bytecodes.
        pytest.param("--storm 90 --seed 0 --max-faults 3", 180, id="storms", marks=pytest.mark.slow),
    ],
)
def test_sigint(arguments: str, seconds: float) -> None:
    """Would break: a count that stays up, or a lock that stays held, behind which all later calls wait."""
    command = [sys.executable, str(SCRIPT), *arguments.split()]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds)
    print(result.stdout)
    assert result.returncode == 0, result.stdout
