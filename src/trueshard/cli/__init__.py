"""The command line: parse, call, print. What a command does lives in the module it calls.

A wrong input is one line on stderr and exit code 2, whether the option parser finds it or a command; so is a package
that is not installed. ``--traceback``, anywhere, shows where it was found. All else that is raised is a defect, and
shows its traceback always.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from trueshard.errors import UserError, extra_line, printed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments` (default: those of the process); returns the exit code."""
    if arguments is None and "PYTHONBREAKPOINT" not in os.environ:  # no library asks, here or in what is started
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        from trueshard.cli.commands import TRACEBACK, run

        return run([argument for argument in arguments if argument != TRACEBACK] or ["--help"])
    except UserError as error:
        if TRACEBACK in arguments:
            traceback.print_exception(error)
        return _wrong(printed(error))
    except ModuleNotFoundError as error:
        if (line := extra_line(error)) is None:
            raise
        return _wrong(f"{line} (`trueshard doctor` shows what is missing)")


def _wrong(line: str) -> int:
    print(f"trueshard: {line}", file=sys.stderr)
    return 2
