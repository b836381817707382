"""The curves of runs as a PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trueshard.files import replacing
from trueshard.train.metrics.panels import (
    EVALUATION_REWARD,
    LOSS,
    REWARD,
    Panel,
    Record,
    RunCurve,
    RunRecords,
    Values,
    curve,
    half_life,
    shown_panels,
    smoothed,
)
from trueshard.train.metrics.terminal import has_reward

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#2f5fd0", "#d9730d", "#128a63", "#c23b80", "#7a57d1", "#8a6d1a", "#0f8aa8", "#c0392b")
"""Colours of runs, in turn."""
FEW = 30
"""Maximum points that are drawn as dots and not smoothed."""


def picture(runs: Sequence[RunRecords]) -> bytes:
    """Return a PNG with each panel that a run has values for, and a colour for each run."""
    from matplotlib.figure import Figure

    panels = shown_panels(runs)
    rows: list[Any] = [["0", "0"], *([str(n), str(min(n + 1, len(panels) - 1))] for n in range(1, len(panels), 2))]
    figure = Figure(figsize=(12, 3.1 * len(rows) + 0.8), layout="constrained")
    places = figure.subplot_mosaic(rows, height_ratios=[1.4] + [1.0] * (len(rows) - 1))
    for number, panel in enumerate(panels):
        _draw(places[str(number)], panel, runs)
    if len(runs) > 1:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=min(len(runs), 4), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130, format="png")
    return buffer.getvalue()


def draw_result(records: Sequence[Record], entropy: float | None, folder: Path) -> Path:
    """Draw the loss of steps and evaluations, and the unigram entropy of the text in nats, into `loss.png`; where
    there is a reward, that into `reward.png`. Return the file.
    """
    from matplotlib.figure import Figure

    rewarded = has_reward(records)
    panel = REWARD if rewarded else LOSS
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, panel, [RunRecords(panel.key, list(records))])
    evaluated = curve(records, EVALUATION_REWARD if rewarded else Panel("evaluation_loss", "", ""))
    if evaluated is not None:
        axes.plot(evaluated.step, evaluated.mean, "o-", markersize=4, color=COLOURS[1], label="evaluation")
    if entropy is not None and not rewarded:
        axes.axhline(entropy, linestyle="--", color="gray", label=f"unigram entropy of the text, {entropy:.2f}")
        axes.set_ylim(top=max(axes.get_ylim()[1], 1.03 * entropy))
    axes.legend()
    with replacing(file := folder / f"{panel.key}.png") as scratch:
        figure.savefig(scratch, dpi=150, format="png")
    return file


def _draw(axes: Axes, panel: Panel, runs: Sequence[RunRecords]) -> None:
    shown: list[Values] = []
    for number, run in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        if (found := curve(run.records, panel)) is None:
            axes.plot([], [], color=colour, label=run.name)
        else:
            shown += _draw_run(axes, panel, run, found, colour, half_life(runs))
    _dress(axes, panel, np.concatenate(shown))


def _draw_run(axes: Axes, panel: Panel, run: RunRecords, found: RunCurve, colour: str, life: float) -> list[Values]:
    """Draw the curve of a run, with its band and its dashed line; return the values that must be seen."""
    scale, few = 2.0**-30 if panel.unit == "bytes" else 1.0, len(found.step) <= FEW
    band, dashed = (curve(run.records, Panel(key, "", "")) if key else None for key in (panel.band, panel.dashed))
    line = _line(found, panel, life) * scale
    shown = [line]
    if band is not None:
        half, middle = _line(band, panel, life) * scale, np.interp(band.step, found.step, line)
        axes.fill_between(band.step, middle - half, middle + half, color=colour, alpha=0.15, linewidth=0)
        shown += [middle - half, middle + half]
    if panel.noisy and not few:
        axes.plot(found.step, found.mean * scale, color=colour, linewidth=0.7, alpha=0.3)
        if band is None:
            low, high = found.low * scale, found.high * scale
            axes.fill_between(found.step, low, high, color=colour, alpha=0.12, linewidth=0)
        shown.append(np.nanpercentile(found.mean * scale, [1, 99]))
    marker = "o" if few else ""
    axes.plot(found.step, line, color=colour, linewidth=1.6, label=run.name, marker=marker, markersize=3.5)
    if dashed is not None:
        line = _line(dashed, panel, life) * scale
        axes.plot(dashed.step, line, color=colour, linewidth=1.2, linestyle="--")
        shown.append(line)
    return shown


def _line(found: RunCurve, panel: Panel, life: float) -> Values:
    """Return the values of a curve, smoothed if they are noisy and many."""
    return smoothed(found, life) if panel.noisy and len(found.step) > FEW else found.mean


def _dress(axes: Axes, panel: Panel, shown: Values) -> None:
    """Set title, limits and ticks; rare outliers of the faint lines are cut off."""
    from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

    words = [{"nats": "nats a token", "bytes": "GiB"}.get(panel.unit, ""), panel.note]
    said = ", ".join(filter(None, words))
    axes.set_title(panel.title + (f" ({said})" if said else ""), fontsize=10.5, loc="left")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(labelsize=9, which="both")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.log:
        positive = shown[shown > 0]
        axes.set_yscale("log")
        axes.set_ylim(positive.min() / 1.3, positive.max() * 1.3)
        return
    low, high = np.nanmin(shown), np.nanmax(shown)
    room = 0.06 * ((high - low) or abs(high) or 1.0)
    from_zero = panel.unit in ("bytes", "part", "rate", "count") or panel.key == "lr"
    axes.set_ylim(0 if from_zero and low >= 0 else low - room, high + (0.06 * high or room if from_zero else room))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    if panel.unit == "part":
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    elif panel.unit == "rate":
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
