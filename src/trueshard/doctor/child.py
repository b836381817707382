"""Questions that may crash or hang are asked in processes of their own, with a time limit.

A broken driver can hang a process that only counts GPUs, and a torch that does not fit its libraries can end it. What
asks them here goes on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import IO


def command(module: str, *arguments: str) -> list[str]:
    """The command line that calls `main(*arguments)` of a module, found where this process finds it."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; main(*sys.argv[1:])"
    return [sys.executable, "-c", code, *arguments]


def started(line: list[str], output: IO[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """A process whose output goes to a file, with some environment variables more than this one's."""
    return subprocess.Popen(
        line,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        text=True,
        env={**os.environ, **environment},
    )


def answer(line: list[str], limit: float) -> tuple[str, str]:
    """(What a process printed, why that is not its answer); one of the two is empty.

    Args:
        limit: seconds, after which it is ended.
    """
    try:
        done = subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"gave no answer in {limit:.0f} seconds"
    except OSError as error:
        return "", str(error.strerror)
    if done.returncode:
        return "", last_line(done.stderr) or f"ended with code {done.returncode}"
    return done.stdout, ""


def last_line(text: str) -> str:
    """The last line that says something, which of a traceback is the error itself."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
