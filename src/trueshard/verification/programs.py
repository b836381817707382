"""Record a program in a folder: a script on N processes of this machine, or any command and what it starts."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trueshard.errors import UserError
from trueshard.launching import last_lines, python_command, run_ranks
from trueshard.verification.comparing import ComparedRuns, verify_runs
from trueshard.verification.recording import FOLDER, INDEX, SHAKEN, STEPS, STOPS

SEEDS = "1", "2", "3"
"""Seeds of runs with other roundings. One behind the first is recorded if runs differ by more than those before allow:
where few terms are added, a draw may happen to leave a tensor nearly as it was."""

_RUN = """
import os, runpy
from trueshard.verification.recording import begin
begin()
del sys.argv[0]
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def record_command(command: Sequence[str], folder: Path, steps: int) -> None:
    """Record what a command trains, in whichever Python processes it starts. Raises UserError if it fails."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already; record in another folder")
    path = os.pathsep.join([str(Path(__file__).with_name("site")), os.environ.get("PYTHONPATH", "")])
    try:
        code = subprocess.call(command, env={**os.environ, **_variables(folder, steps), "PYTHONPATH": path})
    except OSError as error:
        raise UserError(f"{shlex.join(command)}: {error.strerror}; give a command that can be run") from None
    _check(shlex.join(command), folder, f"it ended with exit code {code}" if code else "")


def verify_script(
    script: Path, arguments: Sequence[str], nproc: int, alone: str, steps: int, timeout: float, exact: bool = False
) -> ComparedRuns:
    """Run a script on ``nproc`` processes and, with the arguments ``alone``, on one; compare both. Raises UserError."""

    def recorded(folder: Path, ranks: int, seed: str = "") -> Path:
        command = [str(script), *arguments, *(shlex.split(alone) if ranks == 1 else ())]
        variables = _variables(folder, steps) | {STOPS: "1", SHAKEN: seed}
        _record_script(command, folder, ranks, variables, timeout)
        return folder

    with tempfile.TemporaryDirectory(prefix="trueshard-verify-") as name:
        one, many = recorded(Path(name, "one"), 1), recorded(Path(name, "many"), nproc)
        return verified(one, many, lambda seed: recorded(Path(name, f"shaken-{seed}"), 1, seed), exact=exact)


def verified(one: Path, many: Path, shaken: Callable[[str], Path], exact: bool = False) -> ComparedRuns:
    """Compare two recordings; ``shaken`` records the first run with the roundings of a seed, and returns its folder."""
    if exact:
        return verify_runs(one, many, exact=True)
    folders: list[Path] = []
    for seed in SEEDS:
        folders.append(shaken(seed))
        report = verify_runs(one, many, folders)
        if report.held:
            break
    return report


def _record_script(command: list[str], folder: Path, ranks: int, variables: Mapping[str, str], limit: float) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    logs = folder.with_name(f"{folder.name}-logs")
    environment = {**variables, **place, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    ended = run_ranks(python_command(_RUN, *command), ranks, environment=environment, logs=logs, limit=limit)
    ended.raise_for_signal()
    words = f"it has not ended within {limit:.0f} s" if ended.is_late else ""
    whole = len(list(folder.glob(f"rank-*/{INDEX}"))) == ranks  # what ranks do after that is cut off
    for rank, code in [] if whole else list(ended.codes.items())[:1]:
        said = last_lines(logs, rank).strip().splitlines()[-1:]
        words = f"rank {rank} of {ranks} ended with exit code {code}: {''.join(said)}"
    _check(shlex.join(command), folder, words)


def _variables(folder: Path, steps: int) -> dict[str, str]:
    return {FOLDER: str(folder.absolute()), STEPS: str(steps)}


def _check(command: str, folder: Path, failure: str) -> None:
    if failure:
        raise UserError(f"{command}: {failure}")
    if not any(folder.glob(f"rank-*/{INDEX}")):
        remedy = "name them in it by trueshard.verification.record(model, optimizer)"
        raise UserError(f"{command}: no optimizer step of a model was seen; {remedy}")
