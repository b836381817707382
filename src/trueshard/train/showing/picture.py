"""The curves of runs as one PNG: a diagram a figure, a colour a run."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trueshard.train.showing.runs import PANELS, PLANNED, Panel, Run, Values, curve, half_life, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#2f5fd0", "#d9730d", "#128a63", "#c23b80", "#7a57d1", "#8a6d1a", "#0f8aa8", "#c0392b")
"""Of runs, in turn."""
FEW = 30
"""Points that are drawn as dots, too few to be smoothed."""


def picture(runs: Sequence[Run]) -> bytes:
    """A PNG with the panels that at least one of the runs has figures for."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel for panel in PANELS if any(curve(run.records, panel) for run in runs)]
    rows = 1 + len(panels) // 2
    figure = Figure(figsize=(12, 3.1 * rows + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(rows, 2, height_ratios=[1.4] + [1.0] * (rows - 1))
    draw(figure.add_subplot(grid[0, :]), panels[0], runs)
    for number, panel in enumerate(panels[1:]):
        alone = number == len(panels) - 2 and number % 2 == 0
        draw(figure.add_subplot(grid[1 + number // 2, slice(None) if alone else number % 2]), panel, runs)
    if len(runs) > 1:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=min(len(runs), 4), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130, format="png")
    return buffer.getvalue()


def draw(axes: Axes, panel: Panel, runs: Sequence[Run]) -> None:
    """One panel."""
    shown: list[Values] = []
    scale = 2.0**-30 if panel.unit == "bytes" else 1.0
    for number, run in enumerate(runs):
        found, colour = curve(run.records, panel), COLOURS[number % len(COLOURS)]
        if found is None:
            axes.plot([], [], color=colour, label=run.name)
            continue
        line, few = found.mean * scale, len(found.step) <= FEW
        if panel.noisy and not few:
            axes.plot(found.step, line, color=colour, linewidth=0.7, alpha=0.3)
            axes.fill_between(found.step, found.low * scale, found.high * scale, color=colour, alpha=0.12, linewidth=0)
            shown.append(np.nanpercentile(line, [1, 99]))
            line = smoothed(found, half_life(runs)) * scale
        axes.plot(
            found.step, line, color=colour, linewidth=1.6, label=run.name, marker="o" if few else "", markersize=3.5
        )
        shown.append(line)
        planned = curve(run.records, PLANNED) if panel.key == "memory" else None
        if planned is not None:
            axes.plot(planned.step, planned.mean * scale, color=colour, linewidth=1.2, linestyle="--")
            shown.append(planned.mean * scale)
    dress(axes, panel, np.concatenate(shown), any(curve(run.records, PLANNED) for run in runs))


def dress(axes: Axes, panel: Panel, shown: Values, planned: bool) -> None:
    """Title, limits and ticks; rare outliers of the faint lines are cut off."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    words = {"nats": " (nats a token)", "bytes": " (GiB" + (", dashed: planned)" if planned else ")")}
    axes.set_title(panel.title + words.get(panel.unit, ""), fontsize=10.5, loc="left")
    low, high = np.nanmin(shown), np.nanmax(shown)
    room = 0.06 * ((high - low) or abs(high) or 1.0)
    from_zero = panel.unit in ("bytes", "part", "rate") or panel.key == "lr"
    axes.set_ylim(0 if from_zero and low >= 0 else low - room, high + (0.06 * high or room if from_zero else room))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    if panel.unit == "part":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    elif panel.unit == "rate":
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
