"""The one exception that stands for 'what was asked for cannot be done'."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path


class UserError(Exception):
    """A wrong input: its text is one line that names the key, path or option, and the remedy.

    The command line prints that line on stderr and exits with code 2. Everything else that is raised is
    a failure of the program and keeps its traceback.
    """


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """What a function says of a wrong input, as the one line that it is."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError) as error:
        raise UserError(" ".join(str(error).split())) from error


@contextlib.contextmanager
def written_to(folder: Path) -> Iterator[None]:
    """A full disk as the one line that it is."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left on device" in str(error):
            detail = " ".join(str(error).split())[:200]
            raise UserError(
                f"run.dir: no space is left for {folder} ({detail}); free some, or choose another"
            ) from error
        raise
