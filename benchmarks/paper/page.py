"""What programs write into README.md: sections between two comments, from what is in the results' folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from common import markdown_table

FOLDER = Path(__file__).parents[1] / "results" / "paper"
README = Path(__file__).with_name("README.md")


def publish(name: str, text: str, out: Path) -> None:
    """Puts a section on the page, if the results' folder is the page's own."""
    if out.resolve() == FOLDER.resolve():
        put(name, text)


def put(name: str, text: str, path: Path = README) -> None:
    """Replaces the section of this name."""
    begin, end = f"<!-- {name}: written by a program -->", f"<!-- end of {name} -->"
    before = path.read_text()
    after, count = re.subn(
        f"({re.escape(begin)}\n).*?({re.escape(end)})", lambda m: f"{m[1]}\n{text}\n\n{m[2]}", before, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{path.name} has no section {name!r}")
    path.write_text(after)


def measured_section(report: dict[str, Any]) -> str:
    """What `measured.py` found: the verdict and a table of all points."""
    rows, found = report["results"], report["summary"]
    if not rows:
        return "Nothing has been measured yet: `python -m paper.measured`, on a quiet machine."
    verdict = (
        f"**Below 80 % of saturation {found['within']} of {found['points']} points are within {found['limit']:.0%}** "
        "in step times and throughput"
    )
    if found["points"]:
        worst = found["worst"]
        verdict += (
            f"; the worst are {worst['step_time_error']:.1%} and {worst['throughput_error']:.1%}, normalized latency's "
            f"{worst['latency_error']:.1%}"
        )
    about = report["about"]["machine"]
    parts = [f"{verdict}. Measured on {about['name']}, {about['cores']} cores, one thread."]
    if report["times_the_throughput"]:
        parts.append(_ratios(report["times_the_throughput"]))
    if report["bring_back"]:
        parts.append(_swapping(report["bring_back"], rows))
    table = markdown_table(
        (
            "point",
            "requests/s",
            "served/s",
            "ms a token",
            "TTFT p50, p99, ms",
            "inter-token p50, p99, ms",
            "machine",
            "simulated",
        ),
        [_cells(name, row) for name, row in rows.items()],
    )
    return "\n\n".join([*parts, table.strip()])


def _ratios(found: list[dict[str, Any]]) -> str:
    """How many times each other system's throughput ours is, beside the bars."""
    rows = [
        [
            row["what"],
            _number(row["bar"]),
            _number(row["on_an_a100"]),
            f"{row['measured']:.3g} ({min(row['rounds']):.3g} to {max(row['rounds']):.3g})",
            _number(row["simulated"]),
            ", ".join("" if share is None else f"{share:.0%}" for share in row["saved"].values()).strip(", "),
        ]
        for row in found
    ]
    heads = (
        "hf_paged's rate over that of",
        "bar",
        "13B on an A100, simulated",
        "**measured here**",
        "simulated for here",
        "blocks saved: measured, simulated",
    )
    return (
        "Here: throughput, with all requests there at once, the two in turn, three times; in brackets the least and "
        "the most. On the A100: the rates that both sustain at 0.5 s a token, samples and beams of Alpaca's "
        "lengths.\n\n" + markdown_table(heads, rows).strip()
    )


def _swapping(found: dict[str, dict[str, float]], rows: dict[str, dict[str, Any]]) -> str:
    """Figure 19: what it takes to bring a sequence back, and what is served by either way."""
    ways = ("swap", "recompute")
    cells: list[list[str]] = []
    for size, row in found.items():
        points = [rows.get(f"{way}-blocks_of_{size}") for way in ways]
        served = [
            f"{p['measured']['requests_per_second']:.3g} ({p['simulated']['requests_per_second']:.3g})" if p else ""
            for p in points
        ]
        counts = [str(p["measured"]["preempted"]) if p else "" for p in points]
        times = [f"{row[f'{way}_ms']:.3g}" for way in ways]
        cells.append([size, f"{row['bytes'] / 1024:.0f}", *times, *served, ", ".join(counts).strip(", ")])
    heads = (
        "block size",
        "KiB to bring 256 tokens back",
        "ms, swapped",
        "ms, computed again",
        "served/s (simulated), swapping",
        "computing again",
        "preempted sequences",
    )
    return f"Swapping against computing again, all requests there at once:\n\n{markdown_table(heads, cells).strip()}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _cells(name: str, row: dict[str, Any]) -> list[str]:
    found = row["measured"]
    errors = (
        f"steps {row['step_time_error']:+.0%}, throughput {row['throughput_error']:+.0%}, "
        f"latency {row['latency_error']:+.0%}"
        if "simulated" in row
        else ""
    )
    return [
        name,
        f"{row['rate']:.3g}" if row["share"] else "at once",
        f"{found['requests_per_second']:.3g}",
        f"{1e3 * found['normalized_latency']:.3g}",
        _pair(found["ttft"]),
        _pair(found["inter_token"]),
        f"{row['speed']:.2f}",
        errors,
    ]


def _pair(spread: dict[str, float] | None) -> str:
    return "" if spread is None else f"{1e3 * spread['p50']:.3g}, {1e3 * spread['p99']:.3g}"


def kernel_section(results: dict[str, Any]) -> str:
    """What `kernel.py` found: how many times contiguous keys' the time is."""
    sizes = list(next(iter(results.values()))["times_contiguous"])
    rows = [
        [name, f"{row['microseconds']['contiguous']:.0f}", f"{row['microseconds']['sdpa']:.0f}"]
        + [f"{row['times_contiguous'][size]:.2f}" for size in sizes]
        for name, row in results.items()
    ]
    return markdown_table(("", "contiguous, us", "SDPA, us", *(f"blocks of {size}" for size in sizes)), rows).strip()


def scale_section(results: dict[str, Any]) -> str:
    """What `scale.py` found."""
    tables = [
        markdown_table(
            (kind, *(f"{int(n):,}" for n in row)), [["us a step", *(f"{x['us_per_step']:,.0f}" for x in row.values())]]
        ).strip()
        for kind, row in results.items()
    ]
    return "\n\n".join(tables)
