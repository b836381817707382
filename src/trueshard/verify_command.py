"""``trueshard verify``: its options, and what it prints and writes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from trueshard.errors import UserError, refused


def verify(
    subject: Annotated[
        str, typer.Argument(help="A training configuration, or file.py:factory.", metavar="CONFIG.toml|FILE.py:FACTORY")
    ],
    nproc: Annotated[int, typer.Option("--nproc", help="Processes to hold against one.", metavar="N", min=1)] = 2,
    layers: Annotated[
        int | None, typer.Option(help="Keep so many blocks of each list of blocks.", metavar="N", min=1)
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.", metavar="N", min=2)] = 4,
    seed: Annotated[int, typer.Option(help="What everything random begins with.", metavar="N")] = 0,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a setting of a configuration; repeatable.", metavar="KEY=VALUE"),
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="For a factory: adamw, sgd, muon, or a class.", metavar="NAME")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(help="For a factory without a batch: tokens of a sample.", metavar="N", min=1)
    ] = None,
    given: Annotated[Path | None, typer.Option("--plan", help="For a factory: a plan, JSON.", metavar="FILE")] = None,
    units: Annotated[
        list[str] | None, typer.Option(help="For a factory: what is gathered together; repeatable.", metavar="GLOB")
    ] = None,
    reshard_after_forward: Annotated[
        str, typer.Option(help="default, always, never, last_layer, or a number of ranks.", metavar="WORD")
    ] = "default",
    mixed_precision: Annotated[str | None, typer.Option(help="bf16 or fp16.", metavar="DTYPE")] = None,
    activation_checkpointing: Annotated[str, typer.Option(help="none, selective or full.", metavar="WORD")] = "none",
    compiled: Annotated[bool, typer.Option("--compile", help="Every block is compiled.")] = False,
    offload: Annotated[str, typer.Option(help="none or cpu.", metavar="WORD")] = "none",
    replicate: Annotated[int, typer.Option(help="Copies of the model (HSDP).", metavar="N", min=1)] = 1,
    timeout: Annotated[float, typer.Option(help="For each of the three runs.", metavar="SECONDS", min=1)] = 600.0,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page.", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train sharded and on one process, and say whether anything differs; exit code 1 if it does."""
    import trueshard
    from trueshard.planner.planning import check_writable, read_plan

    if int(os.environ.get("RANK", "0")):  # under torchrun the first process does it, with processes of its own
        return
    with refused(), _stopped():
        if html is not None:
            check_writable(html)
        report = trueshard.verify(
            _found(subject),
            nproc=int(os.environ.get("WORLD_SIZE", nproc)),
            layers=layers,
            steps=steps,
            seed=seed,
            overrides=overrides or (),
            optimizer=optimizer,
            sequence=sequence,
            plan=None if given is None else read_plan(given),
            units=units or "auto",
            reshard_after_forward=int(reshard_after_forward)
            if reshard_after_forward.isdecimal()
            else reshard_after_forward,
            mixed_precision=mixed_precision,
            activation_checkpointing=activation_checkpointing,
            compile=compiled,
            offload=offload,
            replicate=replicate,
            timeout=timeout,
        )
        if html is not None:
            from trueshard.verification.page import write_page

            write_page(report, html)
    print(report.to_json() if as_json else report)
    if not report.held:
        raise typer.Exit(1)


def _found(subject: str) -> str:
    if ".py" not in subject and not Path(subject).is_file():
        raise UserError(f"there is no {subject!r}: give a training configuration (TOML), or file.py:factory")
    return subject


@contextlib.contextmanager
def _stopped() -> Iterator[None]:
    """Ctrl-C as one line."""
    try:
        yield
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        raise typer.Exit(128 + signal.SIGINT) from None
