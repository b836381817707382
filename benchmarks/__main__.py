"""``python -m benchmarks [name …]``: run them, show the tables, and keep the figures."""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path

from rich.console import Console

from benchmarks import machine, page
from benchmarks.table import Table

NAMES = ("step", "optimizer", "muon", "shard_time", "traffic", "checkpoint", "planner", "planner_published")


def main() -> None:
    """Run the benchmarks that were named, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what TrueShard costs.")
    # Not choices=: with nargs="*" argparse would refuse that none is given.
    parser.add_argument("names", nargs="*", metavar="name", help=f"one of {', '.join(NAMES)}; all when left out")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks.json"), help="where the figures go")
    parser.add_argument("--markdown", type=Path, help="write the tables to this page, too; others on it stay")
    given = parser.parse_args()
    for name in given.names:
        if name not in NAMES:
            parser.error(f"no benchmark is called {name!r}; use {', '.join(NAMES)}")
    names = given.names or NAMES
    console = Console()
    where = machine.describe()
    console.print(where, style="dim", end="\n\n")
    others: dict[str, str] = {}
    if given.markdown is not None and not set(NAMES) <= set(names):
        try:
            others = page.kept(given.markdown, where)
        except ValueError as error:
            parser.error(str(error))
    tables = []
    for name in names:
        benchmark = import_module(f"benchmarks.{name}")
        with console.status(f"{name} …"):
            table: Table = benchmark.run(lambda words, name=name: console.print(f"{name}: {words}", style="dim"))
        table.show(console)
        tables.append(table)
        _write(given.json, json.dumps({"machine": where, "benchmarks": [each.data() for each in tables]}, indent=1))
    console.print(f"Figures: {given.json}")
    if given.markdown is not None:
        _write(given.markdown, page.page(where, NAMES, tables, others))
        console.print(f"Tables: {given.markdown}")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
