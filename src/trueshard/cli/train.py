"""Options of ``trueshard train``, ``demo``, ``plot`` and ``convert``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from trueshard.cli.plan import Overrides
from trueshard.errors import UserError

Nproc = Annotated[
    int | None, typer.Option("--nproc", help="Processes to start on this machine.", metavar="N", show_default=False)
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Read the data, print the configuration and the plan, and write nothing.")
]
Hardware = Annotated[
    str | None, typer.Option(help="With --dry-run: a device of the planner's catalogue.", metavar="NAME")
]
Profiled = Annotated[bool, typer.Option("--profile", help="Record a few steps as a trace of each rank.")]
Override = Annotated[
    bool, typer.Option("--override", help="Resume although settings differ that decide what the steps mean.")
]


def train(
    config: Annotated[Path, typer.Argument(help="The configuration, a TOML file.", metavar="CONFIG.toml")],
    nproc: Nproc = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    hardware: Hardware = None,
    profile: Profiled = False,
    override: Override = False,
) -> None:
    """Train a language model; started again, go on from its last checkpoint.

    Starts one process a CUDA device, or one on the CPU, unless --nproc says otherwise. Under torchrun or srun it joins
    the processes that those have started.
    """
    from trueshard.train.parse import load_config

    if dry_run:
        from trueshard.train.running.forecast import dry_run as forecast

        print(forecast(load_config(config, overrides or []), nproc, hardware=hardware))
        return
    if hardware is not None:
        raise UserError(f"--hardware {hardware}: goes with --dry-run; add it, or leave --hardware out")
    _run(["train", str(config)], config, overrides or [], nproc, 1, profile=profile, override=override)


def demo(nproc: Nproc = None, overrides: Overrides = None) -> None:
    """Train a small model from scratch on Python's own source code, with two CPU processes, in a few minutes."""
    from trueshard import train as package

    config = Path(package.__file__).parent / "demo.toml"
    _run(["demo"], config, overrides or [], nproc, 2)


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or their metrics.jsonl.", metavar="RUN…")],
    out: Annotated[
        Path | None, typer.Option(help="A .png or .html file; left out: both, with the run.", metavar="FILE")
    ] = None,
) -> None:
    """Draw the curves of one or more runs, as PNG and as a page."""
    from trueshard.train.showing.plot import plot as draw

    for path in draw(runs, out):
        print(path)


def convert(
    file: Annotated[Path | None, typer.Argument(help="A configuration of another framework.", metavar="[FILE]")] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", help="accelerate, torchtitan, composer, hf or environment.", metavar="NAME"),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Processes of the run.", metavar="N", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="The TOML file to write.", metavar="FILE")] = None,
) -> None:
    """Turn another framework's configuration into one for `trueshard train`, and say what became of each key.

    Exit code 3 if a key was dropped without which the run computes something else; the configuration is written still.
    """
    from trueshard.convert.converting import convert as converted_from

    converted = converted_from(file, source, environment=os.environ, ranks=ranks, out=out)
    if out is None:
        print(converted.toml)
        print(converted.report(), file=sys.stderr)
    else:
        converted.write(out)
        print(converted.report())
    if converted.dropped:
        raise typer.Exit(3)


def _run(command: list[str], path: Path, overrides: list[str], nproc: int | None, on_cpu: int, **flags: bool) -> None:
    """Launch a training run or, where a launcher has started this process, join it as a worker."""
    from trueshard.train.parse import load_config
    from trueshard.train.running.launcher import start

    set_here = [*(f"--set={each}" for each in overrides), *(f"--{name}" for name, given in flags.items() if given)]
    config = load_config(path, overrides)
    raise typer.Exit(start(config, [*command, *set_here], nproc=nproc, cpu_processes=on_cpu, **flags))
