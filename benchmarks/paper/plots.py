"""The figures' pictures; needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_paged import needs
from paper.figures import CEILING, OURS, SWEEPS
from paper.policies import FIRST_FIT, HF, LIMITED, SHORTEST, SYSTEMS

with needs("hf-paged[bench]"):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

COLORS = {system.name: system.color for system in (*SYSTEMS, FIRST_FIT, HF, LIMITED, SHORTEST)}
PARTS = {"stored": "tokens", "future": "reserved, to come", "internal": "never used", "external": "between runs"}
PART_COLORS = ("#0b6e4f", "#9ec9b5", "#e0913a", "#c9c9c9")
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@contextmanager
def page(path: Path, rows: int, columns: int, width: float, height: float, head: float = 0.0) -> Iterator[Any]:
    """Axes, `[rows][columns]`, of a picture that is saved small: a palette takes a third of the bytes.

    Args:
        path: Of the picture.
        rows: Of panels.
        columns: Of panels.
        width: In inches.
        height: In inches, without the
        head: That is left for a legend above.
    """
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(rows, columns, figsize=(width, height + head), squeeze=False)
        yield axes
        figure.tight_layout(rect=(0, 0, 1, height / (height + head)))
        figure.savefig(path, dpi=90)
        pyplot.close(figure)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(128)
    small.save(path, optimize=True)


def draw(name: str, results: dict[str, Any], path: Path) -> None:
    """The picture of a figure."""
    if name in DRAWN:
        DRAWN[name](results, path)
    else:
        draw_sweeps(name, results, path)
    if name == "figure_12":
        figure_13(results, path.with_name("figure_13.png"))


def draw_sweeps(name: str, results: dict[str, Any], path: Path) -> None:
    """Normalized latency against the rate, a panel a sweep."""
    panels = list(zip(SWEEPS[name], results.values()))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    with page(path, rows, columns, 4.2 * columns if len(panels) > 1 else 6, 3.1 * rows, 0.45) as axes:
        for index, (sweep, panel) in enumerate(panels):
            axis = axes[index // columns][index % columns]
            own = {curve.name: curve.color for curve in sweep.curves if curve.color}
            for curve, points in panel["curves"].items():
                axis.plot(
                    [point["rate"] for point in points],
                    [point["normalized_latency"] for point in points],
                    color=own.get(curve) or COLORS[curve],
                    marker="o",
                    markersize=2.5,
                    linewidth=1.8 if curve == OURS else 1.2,
                    label=curve,
                )
            axis.set_title(sweep.title)
            axis.set_ylim(0, CEILING)
            axis.set_xlim(0)
            axis.set_xlabel("requests a second")
            if index % columns == 0:
                axis.set_ylabel("normalized latency, s/token")
            if index == 0:
                handles = axis.get_legend_handles_labels()
        axes[0][0].figure.legend(
            *handles, loc="upper center", ncols=3 if len(handles[0]) > 4 and len(panels) == 1 else 6
        )


def bars(axis: Any, values: dict[str, float], number: str) -> None:
    """One bar a name, in the systems' colours, with its value."""
    names = list(values)
    drawn = axis.bar(names, list(values.values()), color=[COLORS.get(name, "#8c8c8c") for name in names], width=0.65)
    axis.bar_label(drawn, fmt=number, fontsize=8)
    axis.tick_params(axis="x", rotation=20)
    axis.grid(axis="x", visible=False)


def figure_13(results: dict[str, Any], path: Path) -> None:
    """Requests in a batch at the last point of each curve of figure 12, where requests wait."""
    with page(path, 1, 2, 8.4, 3.1) as axes:
        for axis, (title, panel) in zip(axes[0], results.items()):
            bars(axis, {name: points[-1]["batch"] for name, points in panel["curves"].items()}, "%.1f")
            axis.set_title(title)
        axes[0][0].set_ylabel("requests in the batch")


def more_tails(results: dict[str, Any], path: Path) -> None:
    """Mean, median and 99th percentile against the rate."""
    panel = next(iter(results.values()))
    titles = {"ttft": "To the first token", "inter_token": "From token to token", "normalized": "Normalized latency"}
    styles = {"p50": ":", "mean": "-", "p99": "--"}
    with page(path, 1, 3, 12.6, 3.3, 0.45) as axes:
        for axis, (key, title) in zip(axes[0], titles.items()):
            for curve, points in panel["curves"].items():
                for kind, style in styles.items():
                    shown = [(point["rate"], point[key][kind]) for point in points if point[key]]
                    label = curve if kind == "mean" else f"_{curve}"
                    axis.plot(*zip(*shown), style, color=COLORS[curve], linewidth=1.3, label=label) if shown else None
            axis.set_title(title)
            axis.set_yscale("log")
            axis.set_xlim(0)
            axis.set_xlabel("requests a second")
        axes[0][0].set_ylabel("seconds: p50 (dotted), mean, p99 (dashed)")
        axes[0][0].figure.legend(*axes[0][0].get_legend_handles_labels(), loc="upper center", ncols=6)


def more_switches(results: dict[str, Any], path: Path) -> None:
    """One number against the rate, a panel for each thing that is switched."""
    colors = ("#0b6e4f", "#c44e52", "#4c78a8", "#e0913a")
    with page(path, 2, 2, 9.6, 6.6) as axes:
        for axis, (title, panel) in zip(axes.flat, results.items()):
            for (name, points), color in zip(panel["curves"].items(), colors):
                rates, values = ([point[key] for point in points] for key in ("rate", "value"))
                axis.plot(rates, values, color=color, marker="o", markersize=2.5, linewidth=1.3, label=name)
            axis.set_title(title)
            axis.set_yscale("log")
            axis.set_xlim(0)
            axis.set_ylabel(panel["unit"])
            axis.set_xlabel("requests a second")
            axis.legend()


def figure_2(results: dict[str, Any], path: Path) -> None:
    """Where the pool's memory goes."""
    with page(path, 1, 1, 6.4, 3.4) as axes:
        axis, bottom = axes[0][0], [0.0] * len(results)
        for (part, label), color in zip(PARTS.items(), PART_COLORS):
            values = [100 * row[part] for row in results.values()]
            drawn = axis.bar(list(results), values, bottom=bottom, color=color, label=label, width=0.65)
            axis.bar_label(
                drawn, [f"{v:.1f}" if v > 4 else "" for v in values], label_type="center", fontsize=8, color="#222222"
            )
            bottom = [b + v for b, v in zip(bottom, values)]
        axis.set_ylabel("% of the pool")
        axis.grid(axis="x", visible=False)
        axis.tick_params(axis="x", labelsize=8)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=4)


def figure_15(results: dict[str, Any], path: Path) -> None:
    """Blocks saved by sharing."""
    with page(path, 1, 2, 8.4, 2.9) as axes:
        for axis, kind in zip(axes[0], ("samples", "beams")):
            rows = {name: row for name, row in results.items() if name.endswith(kind)}
            for index, (name, row) in enumerate(rows.items()):
                color = ("#0b6e4f", "#e0913a")[index]
                places = [i + 0.36 * index for i in range(len(row))]
                label = {"sharegpt": "ShareGPT lengths", "alpaca": "Alpaca lengths"}[name.split(",")[0]]
                drawn = axis.bar(places, [100 * v for v in row.values()], width=0.34, color=color, label=label)
                axis.bar_label(drawn, fmt="%.1f", fontsize=8)
            axis.set_xticks([i + 0.18 for i in range(len(row))], list(row))
            axis.set_title(kind.capitalize())
            axis.set_xlabel("a request")
            axis.grid(axis="x", visible=False)
        axes[0][0].set_ylabel("% of blocks saved")
        axes[0][0].legend()


def lines(axis: Any, rows: dict[str, dict[str, float]], colors: tuple[str, ...]) -> None:
    """A line a name over block sizes."""
    for (name, row), color in zip(rows.items(), colors):
        axis.plot([int(size) for size in row], list(row.values()), color=color, marker="o", markersize=3, label=name)
    axis.set_xscale("log", base=2)
    sizes = [int(size) for size in next(iter(rows.values()))]
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.set_xlabel("block size, tokens")


def figure_18(results: dict[str, Any], path: Path) -> None:
    """Latency by block size."""
    labels = {"sharegpt": "ShareGPT lengths", "alpaca": "Alpaca lengths"}
    with page(path, 1, 2, 8.4, 2.9) as axes:
        for axis, (name, row), color in zip(axes[0], results.items(), ("#0b6e4f", "#e0913a")):
            lines(axis, {name: {size: point["normalized_latency"] for size, point in row.items()}}, (color,))
            axis.set_title(labels[name])
            axis.set_ylim(0)
        axes[0][0].set_ylabel("normalized latency, s/token")


def figure_19(results: dict[str, Any], path: Path) -> None:
    """Swapping against computing again."""
    colors = ("#c44e52", "#0b6e4f", "#4c78a8")
    with page(path, 1, 2, 8.4, 3.0) as axes:
        left, right = axes[0]
        lines(left, results["milliseconds"], colors)
        left.set_yscale("log")
        left.minorticks_off()
        left.set_yticks([20, 40, 100, 200, 400], ["20", "40", "100", "200", "400"])
        left.set_ylabel("ms to bring 256 tokens back")
        left.legend()
        lines(right, results["normalized_latency"], colors)
        right.set_ylabel("normalized latency, s/token")
        right.set_ylim(0)


DRAWN = {
    "figure_2": figure_2,
    "figure_15": figure_15,
    "figure_18": figure_18,
    "figure_19": figure_19,
    "more_switches": more_switches,
    "more_tails": more_tails,
}
