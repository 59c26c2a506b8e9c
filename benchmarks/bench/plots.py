"""Draws what a file of results says, as SVG and PNG: images a second against the limit, and first epochs beside last ones.

Programs that don't do the others' work, by operators of their own or not all of it, are hatched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from programs import FIRST, LIMIT, PROGRAMS
from records import Results
from summary import Line, lines
from tables import PLACES

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "shardify"  # the same results give the same file
from matplotlib import pyplot as plt  # noqa: E402

OURS, OTHERS, LIGHT = "#1b6ca8", "#9aa5b1", "#d5dbe1"
HATCH = "//"


def draw(results: Results, stem: Path) -> list[Path]:
    """Draw a figure for each place and job; return the files."""
    made = []
    for place, job in dict.fromkeys((run.place, run.job) for run in results.runs):
        found = [line for line in lines(results.runs, place, job) if line.rate is not None]
        shown = [line for line in found if line.program != LIMIT]
        if not shown:
            continue
        limit = next((line.rate for line in found if line.program == LIMIT), None)
        figure = _epochs(shown) if place in FIRST else _rates(shown, limit)
        figure.axes[0].set_title(f'{PLACES[place]}, job "{job}"', loc="left", fontsize=10)
        figure.tight_layout()
        for suffix in ("svg", "png"):
            file = stem.with_name(f"{stem.name}-{place}-{job}.{suffix}")
            figure.savefig(file, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
            made.append(file)
        plt.close(figure)
    return made


def _rates(shown: Sequence[Line], limit: float | None) -> Any:
    figure, axes = plt.subplots(figsize=(7, 0.7 + 0.3 * len(shown)))
    order = list(reversed(shown))
    bars = axes.barh([line.program for line in order], [line.rate or 0 for line in order], **_look(order))
    axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
    if limit is not None:
        axes.axvline(limit, color="black", linewidth=1, linestyle=":")
        axes.set_ylim(-0.6, len(order) + 0.2)
        axes.text(limit, len(order) - 0.45, f"limit {limit:.0f} ", fontsize=8, ha="right", va="bottom")
    return _finished(figure, axes, f"images/s{_hatched(shown)}")


def _epochs(shown: Sequence[Line]) -> Any:
    figure, axes = plt.subplots(figsize=(7, 0.7 + 0.4 * len(shown)))
    order = sorted(shown, key=lambda line: line.first or 0, reverse=True)
    places = range(len(order))
    bars = axes.barh([n + 0.2 for n in places], [line.first or 0 for line in order], 0.4, **_look(order))
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    seconds = [(n, line.second) for n, line in zip(places, order, strict=True) if line.second]
    if seconds:
        axes.barh([n - 0.2 for n, _ in seconds], [value for _, value in seconds], 0.4, color=LIGHT, label="last epoch")
        axes.legend(frameon=False, fontsize=8)
    axes.set_yticks(list(places), [line.program for line in order])
    return _finished(figure, axes, f"seconds of the first epoch{_hatched(shown)}")


def _look(order: Sequence[Line]) -> dict[str, Any]:
    colors = [OURS if line.program.startswith("ours") else OTHERS for line in order]
    return {"color": colors, "edgecolor": "white", "hatch": [HATCH if _other_work(line) else "" for line in order]}


def _other_work(line: Line) -> bool:
    return line.program in PROGRAMS and PROGRAMS[line.program].work != "same"


def _hatched(shown: Sequence[Line]) -> str:
    return "; hatched: operators of its own" if any(map(_other_work, shown)) else ""


def _finished(figure: Any, axes: Any, label: str) -> Any:
    axes.set_xlabel(label, fontsize=9)
    axes.tick_params(labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure
