"""The commands by name. Heavy modules are imported inside the command that needs them, so that `--help` is quick.

The options of `plan` and `verify` have the words and defaults of `shard()`'s own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import trueshard
from trueshard.cli import planning
from trueshard.cli.options import Json, Nproc, Optimizer, Overrides, PlanFile, Tokens, count, flag, takes_options, word
from trueshard.errors import UserError, refused
from trueshard.launching import STOPPED
from trueshard.machine import PROCESSES_PER_CORE, cpu_cores
from trueshard.options import ShardOptions

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""The option parser's error: click's class, or that of the copy of click inside newer releases of typer."""

TRACEBACK = "--traceback"

assert USAGE_ERROR.__name__ == "UsageError"


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
    dry_run: Annotated[
        bool, flag("--dry-run", "Read the data, print the configuration and the plan, and write nothing.")
    ] = False,
    hardware: Annotated[str | None, word("With --dry-run: a device of the planner's catalogue.", "NAME")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Record a few steps as a trace of each rank.")] = False,
    override: Annotated[
        bool, flag("--override", "Resume although settings differ that decide what the steps mean.")
    ] = False,
) -> None:
    """Train a language model; started again, go on from its last checkpoint.

    Starts one process a CUDA device, or one on the CPU, unless --nproc says otherwise. Under torchrun or srun it joins
    the processes that those have started.
    """
    from trueshard.train.parse import load_config

    if dry_run:
        from trueshard.train.run.forecast import dry_run as forecast

        print(forecast(load_config(config, overrides or []), nproc, hardware=hardware))
        return
    if hardware is not None:
        raise UserError(f"--hardware {hardware}: goes with --dry-run; add it, or leave --hardware out")
    _run(config, overrides or [], nproc, profile=profile, override=override)


def data(
    config: Annotated[Path, typer.Argument(help="The configuration, a TOML file.", metavar="CONFIG.toml")],
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(help="Samples to show, of the first step.", metavar="N", min=0)] = 3,
    html: Annotated[Path | None, typer.Option(help="Write all of it as a page.", metavar="FILE")] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Keep the data in the run's folder, where training finds them.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what a model will see of the data, token by token, and what is wrong with them; no model, no GPU.

    Prepares the data as training does, unless the run's folder has them.
    """
    from trueshard.train.parse import load_config
    from trueshard.train.run import survey_report

    survey = survey_report.survey_of(load_config(config, overrides or []), samples, keep=prepare)
    if html is not None:
        survey_report.write_page(survey, html)
    if as_json:
        print(json.dumps(survey, indent=1))
    else:
        survey_report.show(survey)


def demo(nproc: Nproc = None, overrides: Overrides = None) -> None:
    """Train a small model from scratch on Python's own source code, with two CPU processes, in a few minutes."""
    from trueshard import train as package

    _run(Path(package.__file__).parent / "demo.toml", overrides or [], nproc, cpu_processes=2)


def replay(
    run: Annotated[Path, typer.Argument(help="The folder of a run of reinforcement learning.", metavar="RUN")],
    step: Annotated[int, typer.Option(help="The step whose samples are made again.", metavar="N", min=1)],
    prompt: Annotated[
        int | None, typer.Option(help="Compare the answers to this prompt alone, and show them.", metavar="P", min=0)
    ] = None,
    nproc: Nproc = None,
) -> None:
    """Make the samples of a step again, and say "same", or which is the first that differs; exit code 1 if one does.

    Starts as many processes as the run had. Begins with the newest checkpoint before the step, and writes nothing.
    """
    from trueshard.train.run.launcher import start
    from trueshard.train.run.replay import Replayed, config_of, recorded
    from trueshard.train.run.world import launcher_of

    config, ranks = config_of(run)
    replayed = Replayed(step, prompt)
    recorded(config, replayed)
    command = ["replay", str(run), f"--step={step}", *([] if prompt is None else [f"--prompt={prompt}"])]
    if nproc is None and launcher_of(os.environ) is None:
        nproc = ranks
    raise typer.Exit(start(config, command, nproc=nproc, replayed=replayed))


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or their metrics.jsonl.", metavar="RUN…")],
    out: Annotated[Path | None, word("A .png or .html file; left out: both, with the run.", "FILE")] = None,
) -> None:
    """Draw the curves of one or more runs, as PNG and as a page; of a run with answers, a page of them too."""
    from trueshard.train.metrics.curves import plot as draw

    for path in draw(runs, out):
        print(path)


def watch(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, also of runs that have not begun.", metavar="RUN…")],
    page: Annotated[bool, typer.Option("--page", help="Serve a page of them on 127.0.0.1, too.")] = False,
    port: Annotated[
        int | None, typer.Option(help="Of the page; left out: a free one.", metavar="N", min=1, max=65535)
    ] = None,
) -> None:
    """Show runs while they go on: loss, speed, memory, answers, incidents, the log; until Ctrl-C. Writes nothing."""
    from trueshard.train.metrics.watch import watch as show

    show(runs, port or 0 if page or port else None)


def convert(
    file: Annotated[Path | None, typer.Argument(help="A configuration of another framework.", metavar="[FILE]")] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="accelerate, torchtitan, deepspeed, composer, hf, easyr1, verl, trl or environment.",
            metavar="NAME",
        ),
    ] = None,
    ranks: Annotated[int | None, count("Processes of the run.")] = None,
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


def _run(
    path: Path,
    overrides: list[str],
    nproc: int | None,
    *,
    cpu_processes: int = 1,
    profile: bool = False,
    override: bool = False,
) -> None:
    """Launch a training run or, where a launcher has started this process, join it as a worker."""
    from trueshard.train.parse import load_config
    from trueshard.train.run.launcher import start

    flags = [f"--{name}" for name, is_set in (("profile", profile), ("override", override)) if is_set]
    command = ["train", str(path), *(f"--set={text}" for text in overrides), *flags]
    config = load_config(path, overrides)
    code = start(config, command, nproc=nproc, cpu_processes=cpu_processes, profile=profile, override=override)
    raise typer.Exit(code)


@takes_options()
def verify(
    *,
    subject: Annotated[
        str, typer.Argument(help="A configuration, FILE.py:FACTORY, a script or a recording.", metavar="SUBJECT")
    ],
    more: Annotated[list[str] | None, typer.Argument(help="Another recording, or arguments of the script.")] = None,
    nproc: Annotated[int, typer.Option("--nproc", help="Processes to hold against one.", metavar="N", min=1)] = 2,
    layers: Annotated[int | None, count("Keep so many blocks of each list of blocks.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.", metavar="N", min=2)] = 4,
    seed: Annotated[int, typer.Option(help="What everything random begins with.", metavar="N")] = 0,
    overrides: Overrides = None,
    optimizer: Optimizer = None,
    sequence: Tokens = None,
    plan_file: PlanFile = None,
    options: ShardOptions,
    replicate: Annotated[int, typer.Option(help="Copies of the model (HSDP).", metavar="N", min=1)] = 1,
    timeout: Annotated[float, typer.Option(help="For each run.", metavar="SECONDS", min=1)] = 600.0,
    record: Annotated[Path | None, typer.Option(help="Record the command behind --.", metavar="FOLDER")] = None,
    alone: Annotated[str, typer.Option(help="Arguments of the script on one process.", metavar="TEXT")] = "",
    shaken: Annotated[
        list[Path] | None, typer.Option(help="The first run at other roundings; may be repeated.", metavar="FOLDER")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page.", metavar="FILE")] = None,
    as_json: Json = False,
) -> None:
    """Train sharded and on one process, and say whether anything differs; exit code 1 if it does.

    A configuration has its own optimizer and sharding: change them by --set. Their options here are for a factory.
    """
    from trueshard.planner.planning import check_writable, read_plan
    from trueshard.verification import comparing, programs

    words, exact = more or [], bool(options["exact"])
    if record is not None:
        programs.record_command([subject, *words], record, steps)
        return
    if int(os.environ.get("RANK", "0")):  # under torchrun the first process does it, with processes of its own
        return
    if ".py" not in subject and not Path(subject).exists():
        raise UserError(f"there is no {subject!r}: give a configuration (TOML), file.py:factory, script or recording")
    with refused():
        if html is not None:
            check_writable(html)
        report: trueshard.Verified
        if Path(subject).is_dir():
            if not words:
                raise UserError(f"{subject}: give the recording to compare with, too")
            report = comparing.verify_runs(subject, words[0], shaken, exact=exact)
        elif subject.endswith(".py"):
            report = programs.verify_script(Path(subject), words, nproc, alone, steps, timeout, exact)
        else:
            report = trueshard.verify(
                subject,
                nproc=int(os.environ.get("WORLD_SIZE", nproc)),
                layers=layers,
                steps=steps,
                seed=seed,
                overrides=overrides or (),
                optimizer=optimizer,
                sequence=sequence,
                plan=None if plan_file is None else read_plan(plan_file),
                replicate=replicate,
                timeout=timeout,
                **options,
            )
        if html is not None:
            from trueshard.verification.report import write_page

            write_page(report, html)
    print(report.to_json() if as_json else report)
    if not report.held:
        raise typer.Exit(1)


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
    from trueshard.doctor import report

    if int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))):
        return  # under a launcher, one process speaks for the machine
    most = PROCESSES_PER_CORE * cpu_cores()
    if nproc is not None and not 1 <= nproc <= most:
        raise UserError(f"--nproc {nproc}: this machine can try 1 to {most} processes; choose one of these")
    result = report(nproc, timeout, aloud=not as_json)
    if as_json:
        print(json.dumps(result.as_json(), indent=2))
    if result.count("problem"):
        raise typer.Exit(1)


app.command()(train)
for name, command in planning.COMMANDS.items():
    app.command(name)(command)
for command in (data, verify, doctor, plot, watch, replay, convert, demo):
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
    read: Annotated[bool, flag("--bytes", "Compare tensors by their bytes, not by saved checksums.")] = False,
    as_json: Json = False,
) -> None:
    """Say what is in a checkpoint or a Hugging Face directory, or what differs between two."""
    with refused():
        result = trueshard.inspect(checkpoint, other, read=read)
        print(result.to_json() if as_json else result)


@app.command()
def export(
    checkpoint: Checkpoint,
    out: Annotated[str, typer.Argument(help="What to make; it must not exist.", metavar="OUT")],
    to: Annotated[str, typer.Option("--to", help="hf, safetensors, adapter, merged or dcp.", metavar="FORM")] = "hf",
    dtype: Annotated[str | None, typer.Option("--dtype", help="Convert to it, such as bfloat16.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Which, of a checkpoint of several.")] = None,
    adapter: Annotated[str | None, typer.Option("--adapter", help="Which, of a model with several.")] = None,
    average: Annotated[bool, typer.Option("--average", help="The average of the weights ([average]).")] = False,
    push: Annotated[
        str | None, typer.Option("--push", help="Add a model card, and upload it to the hub.", metavar="OWNER/NAME")
    ] = None,
    send: Annotated[bool, typer.Option("--send/--no-send", help="Without, --push only makes OUT ready.")] = True,
    private: Annotated[bool, typer.Option("--private", help="Make the repository of --push private.")] = False,
) -> None:
    """Write a checkpoint in another form: a Hugging Face directory, one file, a PEFT adapter, DCP."""
    with refused():
        if push is not None:
            from trueshard.train.run.publishing import check_push, publish

            check_push(push, to)
        print(trueshard.export(checkpoint, out, to, dtype, model=model, adapter=adapter, average=average))  # type: ignore[arg-type]
        if push is not None:
            print(publish(Path(out), checkpoint, push, to, send=send, private=private))


def run(arguments: Sequence[str]) -> int:
    """Run the command line on `arguments` and return the exit code; a wrong input raises `UserError`."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("trueshard", planning.joined(list(arguments))) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except BrokenPipeError:  # whoever read it has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except USAGE_ERROR as error:
        message = getattr(error, "format_message", error.__str__)()
        words, used = " ".join(message.split()).rstrip("."), getattr(error, "ctx", None)
        stop, path = "" if words.endswith("?") else ".", "trueshard" if used is None else used.command_path
        raise UserError(f"{words}{stop} See `{path} --help`.") from None
    except (KeyboardInterrupt, typer.Abort):
        print("Stopped.", file=sys.stderr)
        return STOPPED
    return 0
