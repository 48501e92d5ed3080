"""What is published: wheel and sdist hold what they are to hold, and no more."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RELATIVE = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")

pytest.importorskip("hatchling", reason="of the extra dev")

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    return folder


def test_the_wheel(built: Path) -> None:
    """Would break: a package without types, and a page on an index whose links and pictures lead nowhere."""
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        metadata = message_from_bytes(wheel.read(next(n for n in names if n.endswith("METADATA"))))
    assert {"hf_paged/py.typed", "hf_paged/assets/tiny_lm/model.safetensors", "hf_paged/kernels/cpu.c"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "examples", "docs"))]
    page = metadata.get_payload()
    assert page.startswith("# hf_paged") and "patch(model)" in page
    assert not RELATIVE.findall(page) and "![" not in page and "<!--" not in page


def test_the_sdist_has_what_its_readme_links_to(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    linked = {target.rstrip("/") for target in RELATIVE.findall((ROOT / "README.md").read_text())}
    assert len(linked) > 10
    assert not [target for target in linked if not any(n == target or n.startswith(f"{target}/") for n in names)]
    assert {"pyproject.toml", "readme_hook.py", "tests/conftest.py", "constraints.txt", "LICENSE"} <= names


def test_links_with_a_base_url() -> None:
    from readme_hook import absolute

    text = "See [a](docs/a.md#b), ![p](x.png)\n\n[w](https://w.org)\n<!-- note -->\n"
    base = "https://host/o/r"
    assert absolute(text, f"{base}/") == (
        f"See [a]({base}/blob/HEAD/docs/a.md#b), ![p]({base}/raw/HEAD/x.png)\n\n[w](https://w.org)\n"
    )
    assert absolute(text, "") == "See a, [w](https://w.org)\n"
