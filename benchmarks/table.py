"""A benchmark's result: one table, shown on a terminal, written as Markdown, kept as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

_THREAD = re.compile(r"([\w-]+/[\w.-]+)#(\d+)")
Tell = Callable[[str], None]
"""Shows a line of progress."""


@dataclass(frozen=True)
class Over:
    """A cell of the summary: TrueShard's figure over a peer's. Below one, TrueShard takes less."""

    figure: str
    """The row."""
    peer: str
    """The column."""
    cell: str
    """The ratio with its spread; or why there is none."""


@dataclass(frozen=True)
class Table:
    """Rows of strings to read, and the numbers behind them."""

    name: str
    """The benchmark's name on the command line."""
    title: str
    note: str
    """What was run and what the columns mean, in sentences."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """One cell a column; the first column is a label, the others are figures."""
    numbers: Sequence[Mapping[str, Any]]
    """For each row, every measured value, unrounded: plain JSON values."""
    over: Sequence[Over] = ()
    """What it adds to the summary."""
    words: bool = False
    """Cells are words, not figures: they are set flush left."""

    def show(self, console: Console) -> None:
        """Print the table, then the note."""
        table = RichTable(title=self.title, title_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i and not self.words else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        console.print(self.note, style="dim", end="\n\n")

    def markdown(self) -> str:
        """A section: heading, command, note, table."""
        rule = "|---" + ("|---" if self.words else "|---:") * (len(self.columns) - 1) + "|"
        head = ["| " + " | ".join(self.columns) + " |", rule]
        body = ["| " + " | ".join(_linked(cell) for cell in row) + " |" for row in self.rows]
        return "\n".join(
            [f"## {self.title}", "", f"```bash\npython -m benchmarks {self.name}\n```", "", self.note, "", *head, *body]
        )

    def data(self) -> dict[str, Any]:
        """The table as plain JSON values."""
        return asdict(self)


def _linked(cell: str) -> str:
    """A cell that is a thread, ``owner/repository#number``, as a link to it."""
    thread = _THREAD.fullmatch(cell)
    return f"[{cell}](https://github.com/{thread[1]}/issues/{thread[2]})" if thread else cell
