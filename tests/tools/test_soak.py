"""The soak and the benchmark of threads in miniature: that their numbers mean what they say."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_paged
from helpers.models import tiny_lm, tiny_tokenizer
from hf_paged.engine.row_store import RowStore

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # they import each other
soak, threads = map(importlib.import_module, ("soak", "threads"))


class TestSoak:
    @pytest.fixture
    def lengths(self) -> list[tuple[int, int]]:
        pairs: list[tuple[int, int]] = soak.read_lengths("azure", 0)
        return pairs

    @pytest.mark.parametrize("mode", ["swap", pytest.param("recompute", marks=pytest.mark.slow)])
    def test_nothing_is_lost_or_leaked(self, mode: str, lengths: list[tuple[int, int]]) -> None:
        report = soak.soak(250, lengths, preemption=mode, check_every=125, verify_every=2, seed=3)
        assert report["violations"] == []
        counts = report["outcomes"]
        assert sum(sum(own.values()) for own in counts.values()) == 250
        assert set(counts) >= {"greedy", "sampling", "samples", "beams", "generate", "cancel", "drop", "conversation"}
        failed = set(counts["failing_forward"])  # one may have failed for want of room before
        assert "failed: HookError" in failed
        assert failed <= {"failed: HookError", "failed: OutOfBlocksError", "failed: OutOfMemoryError"}
        stats = report["stats"]
        assert stats["num_preemptions"] > 0 and stats["num_cow_copies"] > 0 and stats["prefix_cache_hit_tokens"] > 0
        assert (stats["num_swapped_out"] > 0) == (mode == "swap")
        assert report["num_verified"] > 40 and report["num_tokens_verified"] > 300

    def test_wrong_tokens_are_a_violation(
        self, lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def other_weights(run: Any) -> dict[str, torch.Tensor]:
            return {name: value + 0.1 for name, value in run.model.state_dict().items()}

        monkeypatch.setattr(soak.Soak, "_weights", other_weights)
        monkeypatch.setattr(soak, "MIX", {"greedy": 1})  # wrong beams are searched for again and again
        report = soak.soak(12, lengths, verify_every=1, num_clients=4)
        assert any("NOT certified" in violation for violation in report["violations"])

    def test_leaked_blocks_are_a_violation(
        self, lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(RowStore, "abandon_sequences", lambda store, sequences: None)
        monkeypatch.setattr(soak, "SETTLE_SECONDS", 0.5)
        monkeypatch.setattr(soak, "MIX", {"forwards": 1})
        report = soak.soak(6, lengths, verify_every=1, num_clients=2, num_blocks=256)
        assert any("sequences that are not held" in violation for violation in report["violations"])
        assert any("blocks leaked" in violation for violation in report["violations"])

    def test_the_same_seed_draws_the_same_requests(self, lengths: list[tuple[int, int]]) -> None:
        one, other = (list(soak.Workload(lengths, 50, 7, 5)) for _ in range(2))
        assert one == other
        assert max(len(spec.prompt) for spec in one) <= soak.MAX_PROMPT
        assert sum(spec.verify for spec in one) == 10


class TestThreads:
    @pytest.fixture
    def models(self) -> Iterator[dict[str, Any]]:
        stock, paged = tiny_lm(), hf_paged.patch(tiny_lm(), num_blocks=64)
        yield {way: paged if way == "hf_paged" else stock for way in threads.WAYS}
        hf_paged.unpatch(paged)

    @pytest.mark.parametrize("mode", threads.MODES)
    def test_tokens_are_stocks_and_steps_are_shared(self, mode: str, models: dict[str, Any]) -> None:
        row = threads.measure(models, tiny_tokenizer(), mode, num_threads=3, new_tokens=5, reps=1)
        assert all(row[way]["tokens_identical"] for way in threads.WAYS)
        # 5 steps if all begin together, 15 if nothing were shared.
        assert 5 <= row["hf_paged"]["model_steps"] <= 15
        for way in threads.WAYS:
            figures = row[way]
            assert figures["tokens_per_second"] == pytest.approx(15 / figures["seconds"], rel=0.02)
            if mode == "beam":
                assert figures["first_token_seconds"] is None
            else:
                assert 0 < figures["first_token_seconds"] <= figures["seconds"]
