"""Checks of an engine's tokens: against stock (`compare_generations`), and against themselves (`check_exact`)."""

from hf_paged.testing.exactness import ExactnessCase, ExactnessReport, check_exact
from hf_paged.testing.near_ties import ComparisonReport, Divergence, compare_generations, near_tie_threshold

__all__ = [
    "ComparisonReport",
    "Divergence",
    "ExactnessCase",
    "ExactnessReport",
    "check_exact",
    "compare_generations",
    "near_tie_threshold",
]
