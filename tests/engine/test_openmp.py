"""OpenMP threads that wait for nothing end, and come back."""

import os
import subprocess
import sys

PROGRAM = """
import os, threading, torch
from hf_paged.engine.openmp import rest_threads

def count():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
big = torch.ones(600, 600)
product = big @ big
busy = count()
rest_threads()
rested = count()
again = big @ big
print(busy - rested, count() - rested, torch.equal(product, again), torch.get_num_threads())

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
before = count()
rest_threads()
print(before - count())
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
