"""Checks of an engine's tokens: `compare_generations`."""

from hf_paged.testing.near_ties import ComparisonReport, Divergence, compare_generations, near_tie_threshold

__all__ = ["ComparisonReport", "Divergence", "compare_generations", "near_tie_threshold"]
