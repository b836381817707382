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


def one_line(error: BaseException, most: int | None = None) -> str:
    """What an error says, in one line of at most so many characters; its class where it says nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def with_kind(error: BaseException) -> str:
    """An error's class and then its line, cut to 200 characters: many libraries say a name and leave the rest to it."""
    return f"{type(error).__name__}: {one_line(error, 200)}"


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """What a function says of a wrong input, as the one line that it is."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError) as error:
        raise UserError(one_line(error)) from error


@contextlib.contextmanager
def written_to(folder: Path) -> Iterator[None]:
    """A full disk as the one line that it is."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left on device" in str(error):
            detail = one_line(error, 200)
            raise UserError(
                f"run.dir: no space is left for {folder} ({detail}); free some, or choose another"
            ) from error
        raise
