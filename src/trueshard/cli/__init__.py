"""The command line: parse, call, print. What a command does lives in the module it calls.

A wrong input is one line on stderr and exit code 2, whether the option parser finds it or a command; so is a package
that is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trueshard.errors import UserError, extra_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments` (default: those of the process); returns the exit code."""
    try:
        from trueshard.cli.commands import run

        return run(list(sys.argv[1:] if arguments is None else arguments) or ["--help"])
    except UserError as error:
        return _wrong(str(error))
    except ModuleNotFoundError as error:
        if (line := extra_line(error)) is None:
            raise
        return _wrong(f"{line} (`trueshard doctor` shows what is missing)")


def _wrong(line: str) -> int:
    print(f"trueshard: {line}", file=sys.stderr)
    return 2
