"""The demo as a wheel brings it: `hf_paged.demo`, without the pictures of its README."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.ci


def test_the_demo_runs_from_a_wheel(tmp_path: Path) -> None:
    """Would break: an import that needs the checkout, or a file that the browser needs and the wheel lacks."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT)
    (wheel,) = tmp_path.glob("hf_paged-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "unpacked")
    sources = [*(ROOT / "demo").rglob("*.py"), *(ROOT / "demo/static").rglob("*.*s"), ROOT / "demo/replays/ramp.json"]
    assert len(sources) > 40 and names >= {f"hf_paged/{path.relative_to(ROOT)}" for path in sources}
    assert not any("screenshots" in name or name.startswith("demo/") for name in names)

    environment = os.environ | {"PYTHONPATH": str(tmp_path / "unpacked")}
    script = "import hf_paged.demo.app as app; print(app.__file__)"
    for arguments, said in ((["-c", script], str(tmp_path)), (["-m", "hf_paged", "demo", "--help"], "--num-blocks")):
        result = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert said in result.stdout, result.stderr
