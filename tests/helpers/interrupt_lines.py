"""Ctrl-C at every line: SIGINT once at each line of the package that a public call runs on the calling thread.

    python tests/helpers/interrupt_lines.py                              # every line of every call
    python tests/helpers/interrupt_lines.py --sample 100 --seed 7        # some of them, of each call alike
    python tests/helpers/interrupt_lines.py --call release --at engine/worker.py:218
    python tests/helpers/interrupt_lines.py --storm 60    # seconds of SIGINTs at any moment, several a call

A tracer on the main thread raises the signal before the line's first execution: real delivery, to whatever handler is
installed at that moment, though Python would look for signals a few bytecodes earlier or later; storms come at any of
them. After each signal the engine is asked for everything again, on this thread and on another one, under a watchdog:
the same tokens, nothing held, the handler back in its place. Many places share a process; one that left something
broken ends it, and the next process goes on with the rest.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))  # this package, whatever else is installed

import torch

import hf_paged
from helpers.models import build, random_ids

PACKAGE = str(Path(hf_paged.__file__).parent) + os.sep
WATCHDOG_SECONDS = 10.0
SETTLE_SECONDS = 3.0
NUM_RECORDINGS = 3  # of each call: which lines it runs depends on what other threads are at
NUM_TRIES = 4  # to come by a line again that was recorded

Place = tuple[str, int]  # a file of the package, relative to it, and a line


class Bench:
    """A patched model whose tokens are known, and one more user whom no Ctrl-C may disturb."""

    def __init__(self) -> None:
        self.prompt, self.other_prompt = random_ids(1, 9, seed=1), random_ids(1, 7, seed=2)
        self.model: Any = build("llama", layers=2)
        self.model.generation_config.eos_token_id = None
        self.modes: list[dict[str, Any]] = [{}, {"num_beams": 2}]
        self.expected = [self.generate(**mode) for mode in self.modes]
        self.other_expected = self.model.generate(self.other_prompt, max_new_tokens=8)[0, 7:].tolist()
        self.patch()

    def patch(self) -> None:
        hf_paged.patch(self.model, block_size=4, num_blocks=64)

    @property
    def engine(self) -> hf_paged.Engine:
        return self.model.paged

    def generate(self, **mode: Any) -> list[int]:
        return self.model.generate(self.prompt, max_new_tokens=3, **mode)[0].tolist()

    def submit(self) -> hf_paged.Request:
        return self.engine.submit(self.prompt, max_new_tokens=3)

    def expect(self, found: list[int], mode: int = 0) -> None:
        assert found == self.expected[mode], f"other tokens: {found}, not {self.expected[mode]}"

    def check(self) -> None:
        """Whether everything works as if nothing had happened, here and on another thread."""
        assert signal.getsignal(signal.SIGINT) is on_sigint, "SIGINT's handler was not put back"
        self.engine.resume()
        errors: list[BaseException] = []

        def elsewhere() -> None:
            try:
                self.expect(self.generate())
                self.expect(self.prompt[0].tolist() + self.submit().result().token_ids)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=elsewhere, daemon=True)
        thread.start()
        for number, mode in enumerate(self.modes):
            self.expect(self.generate(**mode), number)
        self.expect(self.prompt[0].tolist() + self.submit().result().token_ids)
        thread.join()
        if errors:
            raise errors[0]
        self.engine.check_invariants()
        deadline = time.monotonic() + SETTLE_SECONDS
        while held := self.held():
            assert time.monotonic() < deadline, f"held: {held}"
            gc.collect()  # frames of the interrupted call; a request whose handle's finalizer was interrupted must end
            time.sleep(0.005)
        self.engine.release()

    def held(self) -> str:
        stats = self.engine.stats()
        num_blocks = stats.num_blocks - stats.num_free_blocks
        return f"{num_blocks} blocks, {stats.num_waiting} requests" if num_blocks or stats.num_waiting else ""


def on_sigint(_: int, frame: FrameType | None) -> None:
    """Python's own handler, but for what a storm sends to this file's own lines."""
    code = None if frame is None else frame.f_code
    if code is None or code.co_filename != __file__ or code is Tracer.__call__.__code__:
        raise KeyboardInterrupt


# The public calls. Each yields what is to be interrupted, and then puts right what a user would have to.


@contextmanager
def _generate(bench: Bench, mode: int = 0) -> Iterator[Callable[[], Any]]:
    yield lambda: bench.expect(bench.generate(**bench.modes[mode]), mode)


@contextmanager
def _generate_hidden_states(bench: Bench) -> Iterator[Callable[[], Any]]:
    # The model's own padded forward over gathered keys.
    yield lambda: bench.model.generate(
        bench.prompt, max_new_tokens=3, output_hidden_states=True, return_dict_in_generate=True
    )


@contextmanager
def _submit(bench: Bench) -> Iterator[Callable[[], Any]]:
    yield lambda: bench.expect(bench.prompt[0].tolist() + bench.submit().result().token_ids)


@contextmanager
def _cancel(bench: Bench) -> Iterator[Callable[[], Any]]:
    requests = [
        bench.engine.submit(bench.other_prompt, max_new_tokens=100),
        bench.engine.submit(bench.other_prompt, max_new_tokens=100, num_beams=2),
    ]

    def call() -> None:
        for request in requests:
            request.cancel()

    yield call
    call()
    assert all(request.result().finish_reason in ("cancelled", "length") for request in requests)


@contextmanager
def _pause(bench: Bench) -> Iterator[Callable[[], Any]]:
    def call() -> None:
        bench.engine.pause()
        assert bench.engine.is_paused
        bench.engine.resume()

    yield call
    bench.engine.resume()


@contextmanager
def _step(bench: Bench) -> Iterator[Callable[[], Any]]:
    bench.engine.pause()
    request = bench.submit()
    yield bench.engine.step
    assert bench.engine.is_paused
    bench.engine.resume()
    bench.expect(bench.prompt[0].tolist() + request.result().token_ids)


@contextmanager
def _release(bench: Bench) -> Iterator[Callable[[], Any]]:
    cache = hf_paged.PagedCache(bench.model)
    with torch.no_grad():
        logits = bench.model(bench.prompt, past_key_values=cache).logits
    yield bench.engine.release
    cache.crop(-1)
    with torch.no_grad():
        again = bench.model(bench.prompt[:, -1:], past_key_values=cache).logits
    assert torch.allclose(again[:, -1], logits[:, -1], atol=1e-4), "the kept cache has other keys"


@contextmanager
def _stats(bench: Bench) -> Iterator[Callable[[], Any]]:
    yield bench.engine.stats


@contextmanager
def _unpatch(bench: Bench) -> Iterator[Callable[[], Any]]:
    yield lambda: hf_paged.unpatch(bench.model)
    hf_paged.unpatch(bench.model)
    bench.expect(bench.generate())
    bench.patch()


Call = Callable[[Bench], AbstractContextManager[Callable[[], Any]]]
CALLS: dict[str, Call] = {
    "generate": _generate,
    "generate (beams)": partial(_generate, mode=1),
    "generate (alone)": _generate,  # then the calling thread runs the steps
    "generate (beams, alone)": partial(_generate, mode=1),
    "generate (hidden states)": _generate_hidden_states,
    "submit": _submit,
    "cancel": _cancel,
    "pause": _pause,
    "step": _step,
    "release": _release,
    "stats": _stats,
    "unpatch": _unpatch,
}


@contextmanager
def beside_another(bench: Bench, name: str) -> Iterator[Callable[[], Any]]:
    """The call while another request runs, which gets the same tokens (unless `unpatch` ends it)."""
    call = CALLS[name]
    if "alone" in name:
        with call(bench) as run:
            yield run
        return
    request = bench.engine.submit(bench.other_prompt, max_new_tokens=8)
    with call(bench) as run:
        yield run
    try:
        output = request.result()
    except RuntimeError as error:
        if name == "unpatch" and "unpatched" in str(error):
            return
        raise
    if not (name == "unpatch" and output.finish_reason == "cancelled"):
        found, expected = output.token_ids, bench.other_expected
        assert found == expected, f"the neighbour has other tokens: {found}, not {expected}"


# Lines


class Tracer:
    """Notes the package's lines that this thread runs, and sends SIGINT at the first execution of one of them."""

    def __init__(self, target: Place | None = None) -> None:
        self.places: dict[Place, None] = {}
        self.is_hit = False
        self._target = target

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE):
            return None
        if event == "line":
            place = (file[len(PACKAGE) :], frame.f_lineno)
            self.places[place] = None
            if place == self._target and not self.is_hit:
                self.is_hit = True
                signal.raise_signal(signal.SIGINT)
        return self

    def run(self, call: Callable[[], Any]) -> bool:
        """Calls; returns whether a `KeyboardInterrupt` came out."""
        # A collection at some other line each time would run finalizers there.
        gc.disable()
        try:
            sys.settrace(self)
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
            gc.enable()
        return False


def record(bench: Bench, name: str) -> list[Place]:
    """The lines that a call runs."""
    places: dict[Place, None] = {}
    for _ in range(NUM_RECORDINGS):
        watch()
        tracer = Tracer()
        with beside_another(bench, name) as call:
            tracer.run(call)
        bench.check()
        places |= tracer.places
    return list(places)


def interrupt(bench: Bench, name: str, place: Place) -> str:
    """Sends SIGINT at one line of a call, and looks whether anything is left of it.

    Returns:
        "interrupted"; "missed": the call didn't come by; "dropped": Python drops what a finalizer raises. A signal
        that is lost otherwise is an `AssertionError`, as is all that is found broken.
    """
    dropped: list[Any] = []
    sys.unraisablehook = lambda unraisable: dropped.append(unraisable.exc_type)
    for _ in range(NUM_TRIES):
        watch()
        tracer = Tracer(place)
        with beside_another(bench, name) as call:
            is_interrupted = tracer.run(call)
        bench.check()
        if tracer.is_hit:
            is_dropped = KeyboardInterrupt in dropped
            assert is_interrupted or is_dropped, "the call went on as if nothing had happened"
            return "interrupted" if is_interrupted else "dropped"
    return "missed"


def storm(bench: Bench, name: str, generator: random.Random) -> None:
    """Calls again and again while SIGINTs come down, then looks whether anything is left of it."""
    delays = [generator.uniform(1e-4, 4e-3) for _ in range(generator.randrange(1, 12))]
    main, is_on, is_over = threading.get_ident(), False, False

    def send() -> None:
        nonlocal is_over
        while not is_on:
            time.sleep(1e-4)
        for delay in delays:
            time.sleep(delay)
            signal.pthread_kill(main, signal.SIGINT)
        is_over = True

    watch()
    with beside_another(bench, name) as call:
        threading.Thread(target=send, daemon=True).start()
        is_on = True
        while not is_over:  # what arrives at this function's own lines, `on_sigint` ignores
            try:  # noqa: SIM105 (`suppress` has lines of its own)
                call()
            except KeyboardInterrupt:
                pass
        time.sleep(0.002)  # the last one may be on its way
    bench.check()


# Processes


def watch() -> None:
    """From now on, this process ends with all threads' stacks on stderr if it isn't watched again soon."""
    faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True)


def in_child(work: Callable[[Bench, Callable[[Any], None]], None]) -> tuple[list[Any], str]:
    """Runs `work(bench, say)` in a fork of this process, which has done nothing but import.

    Returns:
        What it said (JSON-able values), and what went wrong: a traceback, or the stacks of a process that hung.
    """
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as wrong:
        if (pid := os.fork()) == 0:
            code = 1
            try:
                os.dup2(wrong.fileno(), 2)
                faulthandler.enable(wrong.fileno())
                signal.signal(signal.SIGINT, on_sigint)
                torch.set_num_threads(1)
                watch()
                work(Bench(), lambda value: _say(said, value))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        wrong.seek(0)
        said.seek(0)
        text = wrong.read().decode(errors="replace").strip() if status else ""
        return [json.loads(line) for line in said], text or ("" if status == 0 else f"ended with status {status}")


def _say(file: IO[bytes], value: Any) -> None:
    file.write(json.dumps(value).encode() + b"\n")
    file.flush()


def try_places(places: list[tuple[str, Place]], max_faults: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Sends a SIGINT at each place.

    Returns:
        How many ended how: (call, outcome) -> number. And a description of each fault.
    """
    outcomes: Counter[tuple[str, str]] = Counter()
    faults: list[str] = []

    def work(bench: Bench, say: Callable[[Any], None]) -> None:
        for name, place in rest:
            say(interrupt(bench, name, place))

    rest = list(places)
    while rest and len(faults) < max_faults:
        found, wrong = in_child(work)
        for (name, _), outcome in zip(rest, found):
            outcomes[name, outcome] += 1
        rest = rest[len(found) :]
        if wrong:
            name, (file, line) = rest.pop(0)
            outcomes[name, "broken"] += 1
            faults.append(f"{name}: SIGINT at {file}:{line}\n{wrong}")
            print(faults[-1] + "\n", flush=True)
    return outcomes, faults


def choose(places: dict[str, list[Place]], number: int | None, seed: int) -> list[tuple[str, Place]]:
    """So many places, of each call alike, or all of them."""
    generator, chosen = random.Random(seed), []
    queues = {name: generator.sample(own, len(own)) if number else list(own) for name, own in places.items()}
    while any(queues.values()) and (number is None or len(chosen) < number):
        for name, queue in queues.items():
            if queue and (number is None or len(chosen) < number):
                chosen.append((name, queue.pop(0)))
    return sorted(chosen, key=lambda item: list(places).index(item[0]))


def run_lines(names: list[str], at: str | None, sample: int | None, seed: int, max_faults: int) -> list[str]:
    """Records the calls' lines, and interrupts them there. Prints the counts; returns the faults."""
    started = time.monotonic()
    said, wrong = in_child(lambda bench, say: say({name: record(bench, name) for name in names}))
    assert said and not wrong, wrong
    places: dict[str, list[Place]] = {
        name: [(file, line) for file, line in own if at is None or f"{file}:{line}" == at]
        for name, own in said[0].items()
    }
    print(f"lines: {', '.join(f'{name} {len(own)}' for name, own in places.items())}", flush=True)
    chosen = choose(places, sample, seed)
    outcomes, faults = try_places(chosen, max_faults)
    for name in names:
        own = [f"{count} {outcome}" for (call, outcome), count in sorted(outcomes.items()) if call == name]
        print(f"{name}: {', '.join(own)}")
    num_tried, num_places = sum(outcomes.values()), sum(map(len, places.values()))
    seconds = time.monotonic() - started
    print(f"SIGINT at {num_tried} of {num_places} places, seed {seed}: {len(faults)} broken, {seconds:.0f} s")
    return faults


def run_storm(names: list[str], seconds: float, seed: int, max_faults: int) -> list[str]:
    """So many seconds of storms. Prints the counts; returns the faults."""
    deadline, num_storms, faults = time.monotonic() + seconds, 0, []

    def work(bench: Bench, say: Callable[[Any], None]) -> None:
        while time.monotonic() < deadline:
            say(name := generator.choice(names))
            storm(bench, name, generator)

    while time.monotonic() < deadline and len(faults) < max_faults:
        generator = random.Random(seed + num_storms)
        said, wrong = in_child(work)
        num_storms += len(said)
        if wrong:
            faults.append(f"{said[-1] if said else 'the start'}: in a storm\n{wrong}")
            print(faults[-1] + "\n", flush=True)
    print(f"{num_storms} storms, seed {seed}: {len(faults)} broken")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--call", choices=CALLS, action="append", help="only this call (may be given again)")
    parser.add_argument("--at", metavar="FILE:LINE", help="only at this line, as engine/worker.py:218")
    parser.add_argument("--sample", type=int, metavar="N", help="N lines, of all calls alike; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storm", type=float, metavar="SECONDS", help="SIGINTs at any moment, for so long")
    parser.add_argument("--max-faults", type=int, default=1000, metavar="N", help="stop after so many")
    given = parser.parse_args()
    names = given.call or list(CALLS)
    if given.storm:
        faults = run_storm(names, given.storm, given.seed, given.max_faults)
    else:
        faults = run_lines(names, given.at, given.sample, given.seed, given.max_faults)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
