"""``python -m benchmarks [name …]``: run them, show the tables, and keep the figures."""

from __future__ import annotations

import argparse
import json
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import machine, page
from benchmarks.table import Table

NAMES = (
    "goes_wrong",
    "silent",
    "silent_clean",
    "peers_step",
    "peers_limits",
    "first_step",
    "compiled",
    "checkpoint",
    "lost_process",
    "data",
    "sft_step",
    "rl",
    "planner_error",
    "step",
    "optimizer",
    "exact",
    "muon",
    "axes",
    "shard_time",
    "device_cost",
    "traffic",
    "planner",
    "planner_published",
)
"""In the order of the page."""


def main() -> None:
    """Run the benchmarks that were named, or all of them."""
    given = _parsed()
    names = ("cuda",) if given.device == "cuda" else given.names or NAMES
    console = Console()
    where = machine.describe()
    console.print(where, style="dim", end="\n\n")
    tables: list[Table] = []
    for name in names:
        benchmark = import_module(f"benchmarks.{name}")
        with console.status(f"{name} …"):
            tell = partial(_tell, console, name)
            table: Table = benchmark.run(tell, given.quick)
        table.show(console)
        tables.append(table)
        _write(given.json, json.dumps({"machine": where, "benchmarks": [table.data() for table in tables]}, indent=1))
    console.print(f"Figures: {given.json}")
    if given.in_place:
        text = given.markdown.read_text(encoding="utf-8")
        part = import_module(f"benchmarks.{names[0]}").in_place(tables[0])
        _write(given.markdown, page.replaced(text, names[0], part))
    elif given.markdown is not None:
        _write(given.markdown, page.page(where, NAMES, tables, given.others))
    if given.markdown is not None:
        console.print(f"Tables: {given.markdown}")


def _parsed() -> argparse.Namespace:
    """The command line, held against what there is, with what is to stay of an earlier page as ``others``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what TrueShard costs.")
    # Not choices=: with nargs="*" argparse would refuse that none is given.
    parser.add_argument("names", nargs="*", metavar="name", help=f"one of {', '.join(NAMES)}; all when left out")
    parser.add_argument("--quick", action="store_true", help="few samples and small models: to see that all of it runs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: tokens/s and memory on one GPU")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks.json"), help="where the figures go")
    parser.add_argument("--markdown", type=Path, help="write the tables to this page, too; others stay")
    given = parser.parse_args()
    for name in given.names:
        if name not in NAMES:
            parser.error(f"no benchmark is called {name!r}; use {', '.join(NAMES)}")
    if given.device == "cuda":
        if given.names or given.markdown is not None:
            parser.error("--device cuda is a benchmark of its own; leave names and --markdown out")
        if not torch.cuda.is_available():
            parser.error("--device cuda needs a CUDA GPU and a torch built for it; leave it out to measure on CPUs")
    if given.quick and given.markdown is not None:
        parser.error("--quick measures nothing that is worth a page; leave out --quick or --markdown")
    given.others = page.Kept()
    given.in_place = len(given.names) == 1 and page.has_marks(given.markdown, given.names[0])
    if given.in_place:
        return given
    if given.markdown is not None and not set(NAMES) <= set(given.names or NAMES):
        try:
            given.others = page.kept(given.markdown, machine.describe())
        except ValueError as error:
            parser.error(str(error))
    return given


def _tell(console: Console, name: str, words: str) -> None:
    console.print(f"{name}: {words}", style="dim")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
