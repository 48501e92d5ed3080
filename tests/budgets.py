"""Holds the tree to `[tool.hf_paged.budgets]` of pyproject.toml: `make lint` runs it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = {".py", ".c", ".h", ".cpp"}


def count_lines(folder: str) -> int:
    """Lines of all source files that git knows below a folder, or, outside of a checkout, that lie there."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "--", folder]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    names = listed.stdout.splitlines() if not listed.returncode else (ROOT / folder).rglob("*")
    files = {ROOT / name for name in names if Path(name).suffix in SOURCES}
    return sum(len(file.read_bytes().splitlines()) for file in files if file.is_file())


def main() -> int:
    """Prints what is over its budget; the exit status says whether anything is."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    ignores = tools["ruff"]["lint"]["per-file-ignores"]
    exceptions = {name: rules for name, rules in ignores.items() if name.endswith(".py") and not name.startswith("!")}
    budgets = tools["hf_paged"]["budgets"]
    packages = {f"hf_paged/{path.name}" for path in (ROOT / "hf_paged").iterdir() if any(path.glob("*.py"))}
    faults = [f"{name} has no budget of lines" for name in sorted(packages - budgets.keys())]
    # An archive of the sources may come without a whole folder.
    gone = [name for name in exceptions if (ROOT / name.split("/")[0]).is_dir() and not (ROOT / name).is_file()]
    faults += [f"{name} has exceptions from ruff's rules, but doesn't exist" for name in gone]
    for name, budget in budgets.items():
        spent = sum(map(len, exceptions.values())) if name == "exceptions" else count_lines(name)
        if spent > budget:
            faults.append(f"{name}: {spent:,}, the budget is {budget:,}")
    print("\n".join(faults) if faults else "all within their budgets")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
