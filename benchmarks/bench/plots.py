"""Draws what a file of results says, as SVG and PNG: images a second against the limit, and first epochs beside second ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from programs import LIMIT
from results import PLACES, Line, lines

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "shardify"  # the same results give the same file
from matplotlib import pyplot as plt  # noqa: E402

OURS, OTHERS, LIGHT = "#1b6ca8", "#9aa5b1", "#d5dbe1"


def draw(data: dict[str, Any], stem: Path) -> list[Path]:
    """Draw a figure for each place and job; return the files."""
    made = []
    for place, job in dict.fromkeys((run["place"], run["job"]) for run in data["runs"]):
        found = [line for line in lines(data, place, job) if line.rate is not None]
        shown = [line for line in found if line.program != LIMIT]
        if not shown:
            continue
        cold = place in ("drive", "disk")
        figure = _epochs(shown) if cold else _rates(shown, next((line.rate for line in found if line.program == LIMIT), None))
        figure.axes[0].set_title(f'{PLACES[place]}, job "{job}"', loc="left", fontsize=10)
        figure.tight_layout()
        for suffix in ("svg", "png"):
            file = stem.with_name(f"{stem.name}-{place}-{job}.{suffix}")
            figure.savefig(file, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
            made.append(file)
        plt.close(figure)
    return made


def _rates(shown: Sequence[Line], limit: float | None) -> Any:
    figure, axes = plt.subplots(figsize=(7, 0.6 + 0.3 * len(shown)))
    names = [line.program for line in reversed(shown)]
    bars = axes.barh(names, [line.rate or 0 for line in reversed(shown)], color=[_color(name) for name in names])
    axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
    if limit is not None:
        axes.axvline(limit, color="black", linewidth=1, linestyle=":")
        axes.set_ylim(-0.6, len(shown) + 0.2)
        axes.text(limit, len(shown) - 0.45, f"limit {limit:.0f} ", fontsize=8, ha="right", va="bottom")
    return _finished(figure, axes, "images/s")


def _epochs(shown: Sequence[Line]) -> Any:
    figure, axes = plt.subplots(figsize=(7, 0.6 + 0.4 * len(shown)))
    order = sorted(shown, key=lambda line: line.first or 0, reverse=True)
    places = range(len(order))
    bars = axes.barh(
        [n + 0.2 for n in places], [line.first or 0 for line in order], 0.4, color=[_color(line.program) for line in order]
    )
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    seconds = [(n, line.second) for n, line in zip(places, order, strict=True) if line.second]
    if seconds:
        axes.barh([n - 0.2 for n, _ in seconds], [value for _, value in seconds], 0.4, color=LIGHT, label="second epoch")
        axes.legend(frameon=False, fontsize=8)
    axes.set_yticks(list(places), [line.program for line in order])
    return _finished(figure, axes, "seconds of an epoch")


def _color(program: str) -> str:
    return OURS if program.startswith("ours") else OTHERS


def _finished(figure: Any, axes: Any, label: str) -> Any:
    axes.set_xlabel(label, fontsize=9)
    axes.tick_params(labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure
