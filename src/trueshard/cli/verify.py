"""Options of ``trueshard verify``, and its output."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from trueshard.choices import Choices, reshard_word
from trueshard.cli import options
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
    overrides: options.Overrides = None,
    optimizer: options.Optimizer = None,
    sequence: options.Tokens = None,
    given: options.PlanFile = None,
    units: options.Units = None,
    reshard_after_forward: options.ReshardAfterForward = str(Choices.reshard_after_forward),
    mixed_precision: options.MixedPrecision = None,
    activation_checkpointing: options.ActivationCheckpointing = str(Choices.activation_checkpointing),
    compiled: options.Compile = Choices.compile,
    offload: options.Offload = Choices.offload,
    replicate: Annotated[int, typer.Option(help="Copies of the model (HSDP).", metavar="N", min=1)] = 1,
    timeout: Annotated[float, typer.Option(help="For each of the three runs.", metavar="SECONDS", min=1)] = 600.0,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page.", metavar="FILE")] = None,
    as_json: options.Json = False,
) -> None:
    """Train sharded and on one process, and say whether anything differs; exit code 1 if it does.

    A configuration has its own optimizer and [shard]: change them by --set. Their options here are for a factory.
    """
    import trueshard
    from trueshard.planner.planning import check_writable, read_plan

    if int(os.environ.get("RANK", "0")):  # under torchrun the first process does it, with processes of its own
        return
    if ".py" not in subject and not Path(subject).is_file():
        raise UserError(f"there is no {subject!r}: give a training configuration (TOML), or file.py:factory")
    with refused():
        if html is not None:
            check_writable(html)
        report = trueshard.verify(
            subject,
            nproc=int(os.environ.get("WORLD_SIZE", nproc)),
            layers=layers,
            steps=steps,
            seed=seed,
            overrides=overrides or (),
            optimizer=optimizer,
            sequence=sequence,
            plan=None if given is None else read_plan(given),
            units=units or Choices.units,
            reshard_after_forward=reshard_word(reshard_after_forward),
            mixed_precision=mixed_precision,
            activation_checkpointing=activation_checkpointing,
            compile=compiled,
            offload=offload,
            replicate=replicate,
            timeout=timeout,
        )
        if html is not None:
            from trueshard.verification.report import write_page

            write_page(report, html)
    print(report.to_json() if as_json else report)
    if not report.held:
        raise typer.Exit(1)
