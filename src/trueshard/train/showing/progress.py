"""What a running step shows: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class StepDisplay:
    """Shows steps `first` … `total`. Does nothing where `shown` is false: all ranks but one."""

    def __init__(self, first: int, total: int, log_every: int, shown: bool) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar = _bar(self._console) if shown and self._console.is_terminal else None
        self._first, self._total, self._log_every, self._shown = first, total, log_every, shown

    def __enter__(self) -> StepDisplay:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(
                "train", total=self._total, completed=self._first - 1, loss=float("nan"), rate=0.0
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, record: dict[str, Any]) -> None:
        """Show the step that `record`, its line of `metrics.jsonl`, tells of."""
        step, loss, rate = record["step"], record["loss"], record["tokens_per_second"]
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=loss, rate=rate)
        elif self._shown and (step % self._log_every == 0 or step in (self._first, self._total)):
            print(f"step {step}/{self._total}  loss {loss:.4f}  {rate:,.0f} tokens/s", flush=True)

    def say(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        if self._shown:
            self._console.print(text, markup=False)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )
