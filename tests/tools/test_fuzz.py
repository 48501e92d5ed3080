"""The fuzz program on a few seeds: that it compares what it says, repeats itself, and notices what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_paged
from helpers.benchmark_files import load

pytestmark = pytest.mark.ci

fuzz = load("fuzz")
ALONE, TOGETHER, FP8 = 3, 1, 2


def without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


@pytest.mark.parametrize(("seed", "kind"), [(ALONE, "alone"), (TOGETHER, "together"), (FP8, "fp8")])
def test_a_seed(seed: int, kind: str) -> None:
    records = fuzz.run_seed(seed)
    assert len(records) >= 6 and {record["kind"] for record in records} == {kind}
    assert {record["outcome"] for record in records} <= {"same", "near tie"}
    assert json.loads(json.dumps(records)) is not None
    assert without_times(fuzz.run_seed(seed)) == without_times(records)


def test_what_differs_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    patch = hf_paged.patch

    def patch_another(model: Any, **settings: Any) -> Any:
        with torch.no_grad():
            model.get_output_embeddings().weight.neg_()
        return patch(model, **settings)

    monkeypatch.setattr(hf_paged, "patch", patch_another)
    monkeypatch.setattr(sys, "argv", ["fuzz.py", "--start", str(ALONE), "--count", "1", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        fuzz.main()
    records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert end.value.code == 1 and any(record["outcome"] == "differs" for record in records)
    assert f"unexplained: --only {ALONE}" in capsys.readouterr().out


def test_what_is_held_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    patch = hf_paged.patch

    def patch_and_hold(model: Any, **settings: Any) -> Any:
        kept.append(hf_paged.PagedCache(patch(model, **settings)))
        with torch.no_grad():
            model(torch.tensor([[5, 6, 7]]), past_key_values=kept[-1])
        return model

    monkeypatch.setattr(hf_paged, "patch", patch_and_hold)
    assert {record["outcome"] for record in fuzz.run_seed(ALONE)} == {"leak"}
