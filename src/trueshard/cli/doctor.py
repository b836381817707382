"""Options of ``trueshard doctor``."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from trueshard.cli.options import Json
from trueshard.errors import UserError
from trueshard.machine import cpu_cores

PROCESSES_A_CORE = 4
"""Most processes per core in a trial: each imports torch first."""


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
    from trueshard.doctor.examine import examine, show

    if int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))):
        return  # under a launcher, one process speaks for the machine
    most = PROCESSES_A_CORE * cpu_cores()
    if nproc is not None and not 1 <= nproc <= most:
        raise UserError(f"--nproc {nproc}: this machine can try 1 to {most} processes; choose one of these")
    if as_json:
        report = examine(nproc, timeout)
        print(json.dumps(report.as_json(), indent=2))
    else:
        report = show(nproc, timeout)
    if report.problems:
        raise typer.Exit(1)
