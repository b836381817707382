"""What a running training shows: a progress bar on a terminal, plain lines elsewhere.

- One line a step at most; figures that are not known, or have no room, are left out.
- On a terminal everything else that is printed appears above the bar.
- Rates are those of the last few steps together: on the lines, of all since the line before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from trueshard.train.events import Callback
from trueshard.train.showing.report import figure

if TYPE_CHECKING:
    from trueshard.train.trainer import Trainer

GIB = 2**30
WAITING = 0.05
"""The part of a step that may go by in waiting for data before it is worth a word."""
WIDTHS = {"loss": 0, "tokens/s": 66, "MFU": 84, "memory": 100, "waiting": 116}
"""Columns of a terminal from which on the bar shows a figure."""


class Display(Callback):
    """Shows steps on rank 0; to be given after the callbacks that add to the record.

    Args:
        log_every: steps between lines where the output is not a terminal; the first and the last have one too. On a
            terminal, how many steps a rate is of.
    """

    def __init__(self, log_every: int = 10) -> None:
        self._log_every = log_every
        self._shown, self._first, self._steps = False, 1, 0
        self._since: list[dict[str, Any]] = []
        self._bar: Progress | None = None

    def on_start(self, trainer: Trainer) -> None:
        self._shown, self._first, self._steps = trainer.rank == 0, trainer.step + 1, trainer.steps
        console = Console(highlight=False)
        if self._shown and console.is_terminal and not console.is_dumb_terminal:
            self._bar = bar(console)
            self._task = self._bar.add_task("", total=trainer.steps, completed=trainer.step, record={})
            self._bar.start()

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        if not self._shown:
            return
        step, finite = record["step"], math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])
        self._since.append(record)
        if not finite and trainer.scaler is None:
            print(
                f"step {step}/{self._steps}  loss {record['loss']:.4f}, gradient norm {record['grad_norm']:.4f}: "
                f"not finite, skipped ({trainer.skipped} of at most {trainer.skip_nonfinite})",
                flush=True,
            )
        elif self._bar is None and (step % self._log_every == 0 or step in (self._first, self._steps)):
            print(f"step {step}/{self._steps}  {'  '.join(figures(together(self._since)).values())}", flush=True)
            self._since = []
        if self._bar is not None:
            self._since = self._since[-self._log_every :]
            self._bar.update(self._task, completed=step, record=together(self._since))

    def on_evaluation(self, trainer: Trainer, record: dict[str, float]) -> None:
        if self._shown:
            best = "  best so far" if record["loss"] <= trainer.best else ""
            perplexity = f"  perplexity {figure(record['perplexity'])}" if "perplexity" in record else ""
            print(f"evaluation at step {trainer.step}  loss {record['loss']:.4f}{perplexity}{best}", flush=True)

    def on_end(self, trainer: Trainer) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def together(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last of some steps, with the rates and the seconds of all of them."""
    seconds = max(sum(record["seconds"] for record in records), 1e-9)
    found = records[-1] | {"seconds": seconds, "data_wait": sum(record["data_wait"] for record in records)}
    for key in ("tokens_per_second", "mfu"):
        if key in found:
            found[key] = sum(record[key] * record["seconds"] for record in records) / seconds
    return found


def figures(record: dict[str, Any]) -> dict[str, str]:
    """What is said of a step, each under its key of `WIDTHS`: those that are known."""
    said = {"loss": f"loss {record['loss']:.4f}", "tokens/s": f"{record['tokens_per_second']:,.0f} tokens/s"}
    if "mfu" in record:
        said["MFU"] = f"MFU {record['mfu']:.1%}"
    used = record.get("memory_reserved", record.get("memory_allocated"))
    if used is not None:
        planned = f" of {record['memory_planned'] / GIB:.1f}" if "memory_planned" in record else ""
        said["memory"] = f"{used / GIB:.1f}{planned} GiB"
    waited = record["data_wait"] / record["seconds"]
    if waited >= WAITING:
        said["waiting"] = f"{min(waited, 1):.0%} data wait"
    return said


class Figures(ProgressColumn):
    """The figures of the last step that the terminal has room for."""

    def __init__(self, console: Console) -> None:
        super().__init__(Column(no_wrap=True))
        self._console = console

    def render(self, task: Task) -> Text:
        """They, or nothing before the first step."""
        record = task.fields["record"]
        if not record:
            return Text("first step …", style="dim")
        room = [words for key, words in figures(record).items() if self._console.width >= WIDTHS[key]]
        return Text("  ".join(room))


def bar(console: Console) -> Progress:
    """A progress bar with `record`, the last step's, as its field."""
    return Progress(
        TextColumn("step [bold]{task.completed}[/]/{task.total}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),
        Figures(console),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
        expand=True,
        speed_estimate_period=3600,  # steps may take minutes
    )
