"""The commands by name. Heavy modules are imported inside the command that needs them, so that `--help` is quick."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import trueshard
from trueshard.cli.plan import Json, Overrides, plan, verify
from trueshard.errors import UserError, refused
from trueshard.launching import STOPPED
from trueshard.machine import PROCESSES_PER_CORE, cpu_cores

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""The option parser's error: click's class, or that of the copy of click inside newer releases of typer."""

TRACEBACK = "--traceback"

assert USAGE_ERROR.__name__ == "UsageError"

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


@app.callback(invoke_without_command=True)
def _trueshard(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
    traceback: Annotated[bool, typer.Option(TRACEBACK, help="Show where a wrong input was found.")] = False,
) -> None:
    """Fully-sharded training on PyTorch FSDP2."""
    if version:
        print(f"trueshard {trueshard.__version__}")
        raise typer.Exit


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


def doctor(
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", help="Processes to try; left out: two, and all GPUs.", metavar="N", show_default=False),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that each trial may take.", metavar="SECONDS", min=1)] = 120,
    as_json: Json = False,
) -> None:
    """Examine this machine, and try whether training works on it; exit code 1 if something stops it.

    Looks at versions, devices and their links, the host, the environment and the extras, and lets real processes
    gather, reduce and take a sharded step. The output is fit to be pasted into a report.
    """
    from trueshard.doctor.examine import report

    if int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))):
        return  # under a launcher, one process speaks for the machine
    most = PROCESSES_PER_CORE * cpu_cores()
    if nproc is not None and not 1 <= nproc <= most:
        raise UserError(f"--nproc {nproc}: this machine can try 1 to {most} processes; choose one of these")
    found = report(nproc, timeout, aloud=not as_json)
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    if found.count("problem"):
        raise typer.Exit(1)


for command in (train, plan, verify, doctor, plot, convert, demo):
    app.command()(command)


Checkpoint = Annotated[str, typer.Argument(help="A checkpoint: a directory or a URL.", metavar="CKPT")]


@app.command()
def check(checkpoint: Checkpoint) -> None:
    """Read every byte of a checkpoint and compare it with what was saved; exit code 1 if it is damaged."""
    with refused():
        try:
            print(trueshard.check(checkpoint))
        except trueshard.DamagedCheckpoint as error:
            for problem in error.problems:
                print(problem, file=sys.stderr)
            raise typer.Exit(1) from None


@app.command()
def inspect(
    checkpoint: Checkpoint,
    other: Annotated[str | None, typer.Argument(help="Another, to say what differs.", metavar="[OTHER]")] = None,
    read: Annotated[
        bool, typer.Option("--bytes", help="Compare tensors by their bytes, not by saved checksums.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what is in a checkpoint or a Hugging Face directory, or what differs between two."""
    with refused():
        found = trueshard.inspect(checkpoint, other, read=read)
        print(found.to_json() if as_json else found)


@app.command()
def export(
    checkpoint: Checkpoint,
    out: Annotated[str, typer.Argument(help="What to make; it must not exist.", metavar="OUT")],
    to: Annotated[str, typer.Option("--to", help="hf, safetensors, adapter, merged or dcp.", metavar="FORM")] = "hf",
    dtype: Annotated[str | None, typer.Option("--dtype", help="Convert to it, such as bfloat16.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Which, of a checkpoint of several.")] = None,
    adapter: Annotated[str | None, typer.Option("--adapter", help="Which, of a model with several.")] = None,
) -> None:
    """Write a checkpoint in another form: a Hugging Face directory, one file, a PEFT adapter, DCP."""
    with refused():
        print(trueshard.export(checkpoint, out, to, dtype, model=model, adapter=adapter))


def run(arguments: Sequence[str]) -> int:
    """Run the command line on `arguments` and return the exit code; a wrong input raises `UserError`."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("trueshard", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except BrokenPipeError:  # whoever read it has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except USAGE_ERROR as error:
        message = getattr(error, "format_message", error.__str__)()
        raise UserError(f"{' '.join(message.split()).rstrip('.')}. See `trueshard --help`.") from None
    except (KeyboardInterrupt, typer.Abort):
        print("Stopped.", file=sys.stderr)
        return STOPPED
    return 0
