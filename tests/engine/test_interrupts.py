"""SIGINT at each line that the public calls run: no later call hangs, and none gives other tokens.

`helpers/interrupt_lines.py` says how; it runs in processes of its own, which a hang ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hf_paged.core.interrupts import deferred_interrupt

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


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_meanwhile_puts_the_handler_back() -> None:
    """Would break: a child that holds Ctrl-C back for good, for the thread that would let it go is not in it."""
    handler, codes = signal.getsignal(signal.SIGINT), list[int]()

    def fork() -> None:
        if (pid := os.fork()) == 0:
            os._exit(0 if signal.getsignal(signal.SIGINT) is handler else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    with deferred_interrupt():
        assert signal.getsignal(signal.SIGINT) is not handler
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert codes == [0] and signal.getsignal(signal.SIGINT) is handler


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
