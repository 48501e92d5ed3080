"""`KeptGains`: what was measured by earlier processes on this machine, in a file beside the compiled kernels."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import statistics
import tempfile
from collections.abc import Hashable, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from hf_paged.kernels import c_compiler

logger = logging.getLogger(__name__)

NUM_MEASUREMENTS = 3  # by as many processes: the machine may have been busy in one


class KeptGains:
    """Gains of kinds of computations by another way, for this processor, this torch and these kernels.

    A file that can't be read is none. Processes may write at once: it is whole at any moment, and what one of them
    loses is measured again.
    """

    def __init__(self) -> None:
        """Reads nothing yet."""
        self._path: Path | None = None

    def get(self, kind: Hashable) -> float | None:
        """The median of what enough processes have measured; `None`: it is to be measured."""
        found = self._read().get(repr(kind), [])
        return statistics.median(found) if len(found) >= NUM_MEASUREMENTS else None

    def add(self, gains: Mapping[Hashable, float]) -> dict[Hashable, float]:
        """Keeps what this process measured.

        Returns:
            For each kind the median of all that is known.
        """
        kept = self._read()
        for kind, gain in gains.items():
            kept[repr(kind)] = [*kept.get(repr(kind), []), gain][-NUM_MEASUREMENTS:]
        try:
            self._write(kept)
        except OSError as error:
            logger.info("hf_paged: what was measured is not kept: %s", error)
        return {kind: statistics.median(kept[repr(kind)]) for kind in gains}

    def _read(self) -> dict[str, list[float]]:
        try:
            found = json.loads(self._file().read_bytes())
            return {
                kind: [float(gain) for gain in gains if 0 < gain < math.inf]
                for kind, gains in found.items()
                if isinstance(gains, list)
            }
        except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):  # not there, cut off
            return {}

    def _write(self, kept: dict[str, list[float]]) -> None:
        path = self._file()
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            try:
                json.dump(kept, file)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise

    def _file(self) -> Path:
        if self._path is None:
            sources = sorted(Path(c_compiler.__file__).parent.glob("*.[ch]"))
            made_for = (
                _processor(),
                torch.__version__,
                torch.backends.cpu.get_cpu_capability(),
                [source.read_text() for source in sources],
            )
            digest = hashlib.sha256(repr(made_for).encode()).hexdigest()[:32]
            self._path = c_compiler.cache_folder() / f"gains-{digest}.json"
        return self._path


def _processor() -> str:
    with suppress(OSError):  # Linux, whose platform.processor() is empty
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "CPU part")):
                return line
    return platform.processor() or platform.machine()
