"""Compiles a grammar in a process of its own first: one that crashes the compiler ends that process, not the server.

Run as a script, this file is that process. It imports nothing of this package, so it starts at once and stays small.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

# The compiler recurses into a grammar's rules: what fits a quarter of a stack here fits the server's.
STACK_BYTES, TRIAL_STACK_BYTES = 16 << 20, 4 << 20
MEMORY_BYTES = 4 << 30


class GrammarTrial:
    """Tries grammars, on one thread. Its process starts with the first, and again after one that ended it."""

    def __init__(self, timeout: float) -> None:
        """Grammars may take `timeout` seconds each."""
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, setup: dict[str, Any], text: str) -> None:
        """Compiles a grammar and computes its first mask.

        Args:
            setup: Of `GrammarCompiler`, the same at each call.
            text: In llguidance's own format.

        Raises:
            ValueError: It can't be compiled, takes too long, or is too deep.
        """
        if self._process is None:
            # What a compiler that fails says quotes the grammar: nothing for the server's log.
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen([sys.executable, __file__], **pipes)
            if self._ask(self._process, setup) != "":
                self.close()
                raise ValueError(
                    "the process that tries grammars can't start: is llguidance installed, and is there memory for it?"
                )
        is_late = threading.Event()
        timer = threading.Timer(self._timeout, self._end, [self._process, is_late])
        timer.start()
        try:
            problem = self._ask(self._process, text)
        finally:
            timer.cancel()
        if problem is None:
            self.close()
            problem = (
                f"compiling it takes more than {self._timeout} s" if is_late.is_set() else "its rules are too deep"
            )
        if problem:
            raise ValueError(problem)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    @staticmethod
    def _end(process: subprocess.Popen[bytes], is_late: threading.Event) -> None:
        is_late.set()
        process.kill()

    @staticmethod
    def _ask(process: subprocess.Popen[bytes], question: Any) -> str | None:
        """The answer of the process; `None`: it has ended."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            return None
        return json.loads(answer) if answer else None


def _serve() -> None:
    """Answers the setup, then grammars, a line of JSON each: what is wrong with it, or nothing."""
    import llguidance

    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = json.loads(sys.stdin.readline())
    limits = llguidance.LLParserLimits(**setup.pop("limits"))
    tokenizer = llguidance.LLTokenizer(setup.pop("tokenizer"), **setup)
    problems = [""]

    def try_out(text: str) -> None:
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        problems.append(matcher.get_error().split("\n<state>")[0].strip() if matcher.is_error() else "")

    threading.stack_size(TRIAL_STACK_BYTES)
    print(json.dumps(problems.pop()), flush=True)
    for line in sys.stdin:
        thread = threading.Thread(target=try_out, args=[json.loads(line)])
        thread.start()
        thread.join()
        print(json.dumps(problems.pop() if problems else "its compiler fails on it"), flush=True)


if __name__ == "__main__":
    _serve()
