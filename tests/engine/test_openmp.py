"""OpenMP threads that wait for nothing end, and come back."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

import hf_paged
from helpers.models import TINY_LM, random_ids, tiny_lm

PROGRAM = """
import os, threading, time, torch
from hf_paged.engine.openmp import rest_threads

def count():
    return len(os.listdir("/proc/self/task"))

def ended():
    before, deadline = count(), time.monotonic() + 20
    rest_threads()
    while count() > before - 2 and time.monotonic() < deadline:  # one that has ended is listed for a moment
        time.sleep(0.01)
    return before - count()

torch.set_num_threads(3)
big = torch.ones(600, 600)
product = big @ big
num_ended = ended()
rested = count()
again = big @ big
print(num_ended, count() - rested, torch.equal(product, again), torch.get_num_threads())

# Another thread's helpers are its own.
worker_done, release = threading.Event(), threading.Event()

def work():
    big @ big
    worker_done.set()
    release.wait()
    work.product = big @ big

thread = threading.Thread(target=work)
thread.start()
worker_done.wait()
print(ended())
release.set()
thread.join()
print(torch.equal(work.product, product))
"""


def test_the_calling_threads_helpers_end_and_return() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "3", "MKL_THREADING_LAYER": "GNU"},
    )
    assert result.returncode == 0, result.stderr
    ended, returned, *rest = result.stdout.split()
    # Two helpers, all of which end; the other thread keeps its two while the caller's own two end once more.
    assert (ended, returned) == ("2", "2"), result.stdout
    assert rest == ["True", "3", "2", "True"], result.stdout


STEPS = """
import os, sys, threading
import torch
import hf_paged
from transformers import AutoModelForCausalLM

def most_threads(model, num_threads):
    torch.set_num_threads(num_threads)
    found, is_over = [], threading.Event()
    def watch():
        while not is_over.wait(0.0005):
            found.append(len(os.listdir("/proc/self/task")))
    watcher = threading.Thread(target=watch)
    watcher.start()
    results.append(model.generate(torch.arange(3, 303)[None], max_new_tokens=4, do_sample=False, eos_token_id=None))
    is_over.set()
    watcher.join()
    return max(found)

results = []
model = hf_paged.patch(AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval(), num_blocks=64)
_, one, five = (most_threads(model, number) for number in (1, 1, 5))
print(five - one, torch.equal(*results[1:]))
"""


def test_steps_use_as_many_threads_as_torch() -> None:
    """Would break: kernels that count the machine's processors, or `OMP_NUM_THREADS`, themselves."""
    command = [sys.executable, "-c", STEPS, str(TINY_LM)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "7"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    more, is_same = result.stdout.split()
    assert 3 <= int(more) <= 4, "helpers of a team of five, of whom loading may have left one"
    assert is_same == "True"


def test_two_models_at_once() -> None:
    """Each with steps on a thread of its own, and a team of OpenMP's threads for each."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        models = [hf_paged.patch(tiny_lm(), num_blocks=64) for _ in range(2)]
        prompts = [random_ids(1, 100, seed=seed) for seed in range(2)]

        def tokens(number: int) -> Tensor:
            return models[number].generate(prompts[number], max_new_tokens=8, eos_token_id=None)

        alone = [tokens(number) for number in range(2)]
        with ThreadPoolExecutor(2) as threads:
            for _ in range(2):
                assert all(map(torch.equal, threads.map(tokens, range(2)), alone))
    finally:
        torch.set_num_threads(before)
