"""The exception for wrong inputs, its one-line text, what made an error, and the extra that installs a package."""

from __future__ import annotations

import contextlib
import dis
import errno
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_HERE = str(Path(__file__).parent)
LONGEST_LINE = 2000
"""Characters of an error on a terminal; the end, where the remedy is, is kept."""


class TrueShardError(Exception):
    """Base of the errors that TrueShard raises, by which a program around it tells them from its user's own.

    Each is also of the kind that the function names: a wrong argument is a ``ValueError`` or ``TypeError`` still.
    """


class UserError(TrueShardError):
    """Raised for a wrong input; its text is one line that names the key, path or option, and the remedy.

    The command line prints that line on stderr and exits with code 2. Everything else that is raised is
    a failure of the program and keeps its traceback.
    """


def one_line(error: BaseException, most: int | None = None) -> str:
    """Return an error's text in one line of at most ``most`` characters; its class if it has no text.

    Without characters that steer a terminal: the text may quote a file or a server.
    """
    return "".join(filter(str.isprintable, " ".join(str(error).split())))[:most] or type(error).__name__


def printed(error: BaseException) -> str:
    """Return an error's text for a terminal: what a file brought into it is neither endless nor a control character."""
    line = str(error)
    line = line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 400]} … {line[-400:]}"
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in line)


def cut_line(error: BaseException) -> str:
    """Return an error's line, cut to 200 characters."""
    return one_line(error, 200)


def with_kind(error: BaseException, most: int = 200) -> str:
    """Return an error's class and its line, cut to ``most`` characters: many libraries say a name only."""
    return f"{type(error).__name__}: {one_line(error, most)}"


_EXTRA_OF = {
    **dict.fromkeys(("typer", "rich", "packaging"), "cli"),
    **dict.fromkeys(("cloudpickle", "networkx", "pydantic", "pydantic_core", "tomli"), "plan"),
    **dict.fromkeys(("wandb", "trackio", "mlflow"), "trackers"),
    "peft": "peft",
    "accelerate": "accelerate",
}
"""Package → the extra of TrueShard that installs it; every other one comes with ``train``."""


def extra_line(error: ModuleNotFoundError) -> str | None:
    """Return which extra installs a missing package, in one line; None if the module is TrueShard's own."""
    package = (error.name or "trueshard").partition(".")[0]
    extra = _EXTRA_OF.get(package, "train")
    return None if package == "trueshard" else f"{package} is not installed; pip install 'trueshard[{extra}]'"


@contextlib.contextmanager
def with_extra() -> Iterator[None]:
    """Say which extra installs a package that is missing inside; the error is a ModuleNotFoundError still."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (line := extra_line(error)) is None or str(error) == line:
            raise
        raise ModuleNotFoundError(line, name=error.name, path=error.path) from error


def warn_user(message: str) -> None:
    """Warn at the line of the user's code by which this came about: that below all frames of TrueShard and torch."""
    between = (_HERE, contextlib.__file__, *getattr(sys.modules.get("torch"), "__path__", ()))
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(between):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


class RankFailed(TrueShardError, RuntimeError):
    """Raised where another rank failed, and this one has nothing to add."""


def raised_in(error: BaseException) -> tuple[str, bool]:
    """Return the file in which an error was raised, and whether a ``raise`` made it; else it is compiled code's."""
    trace = error.__traceback__
    if trace is None:
        return "", False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    here = (instruction.opname for instruction in dis.get_instructions(code) if instruction.offset == trace.tb_lasti)
    return code.co_filename, next(here, "") == "RAISE_VARARGS"


def is_defect(error: BaseException) -> bool:
    """True unless a ``raise`` of TrueShard made the error, or the system for a file that the user named."""
    file, by_raise = raised_in(error)
    named = isinstance(error, OSError) and error.filename is not None
    return getattr(error, "is_defect", False) or not (named or (by_raise and file.startswith(_HERE)))


class TrueShardRuntimeError(TrueShardError, RuntimeError):
    """Raised inside the user's own forward, backward or step, where no ``own_errors`` stands around."""


class TrueShardTypeError(TrueShardError, TypeError):
    """Raised where ``TrueShardRuntimeError`` is, for a wrong argument."""


class TrueShardValueError(TrueShardError, ValueError):
    """Raised where ``TrueShardRuntimeError`` is, for a wrong argument."""


def _own(kind: type[Exception]) -> Callable[..., TrueShardError]:
    names = {"__module__": __name__, "__qualname__": f"TrueShard{kind.__name__}"}
    made = type(kind.__name__, (TrueShardError, kind), names)
    globals()[made.__qualname__] = made  # where pickle looks for it
    return made


_OWN: dict[type[Exception], Callable[..., TrueShardError]] = {
    RuntimeError: TrueShardRuntimeError,
    TypeError: TrueShardTypeError,
    ValueError: TrueShardValueError,
    **{kind: _own(kind) for kind in (OSError, FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError)},
}
"""Kind that is raised inside of TrueShard → the same as a ``TrueShardError``."""
for _kind, _class in _OWN.items():
    _class.__name__ = _kind.__name__  # what messages between ranks call it


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Raise what a ``raise`` of TrueShard made inside as a ``TrueShardError`` of the same kind. Also a decorator.

    Stands around public functions, so that inside of them errors are Python's own.
    """
    try:
        yield
    except tuple(_OWN) as error:
        file, by_raise = raised_in(error)
        if type(error) not in _OWN or not (by_raise and file.startswith(_HERE)):
            raise
        own = _OWN[type(error)](*error.args)
        own.__dict__.update(vars(error))
        raise own.with_traceback(error.__traceback__) from error.__cause__


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Turn ValueError, OSError and ImportError inside into a ``UserError`` of one line, unless they are a defect."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        if is_defect(error):
            raise
        raise UserError(one_line(error)) from error


Kinds = type[Exception] | tuple[type[Exception], ...]


@contextlib.contextmanager
def explained(
    problem: str, remedy: str, kinds: Kinds = Exception, detail: Callable[[BaseException], str] = with_kind
) -> Iterator[None]:
    """Turn errors of ``kinds`` inside into a ``UserError`` "problem (detail); remedy"; one that is there stays.

    The default is all kinds: many libraries raise whatever they trip over.
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{problem} ({detail(error)}); {remedy}") from error


@contextlib.contextmanager
def written_to(folder: Path) -> Iterator[None]:
    """Turn the errors of a full disk inside into a ``UserError`` of one line."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left on device" in str(error):
            raise UserError(
                f"run.dir: no space is left for {folder} ({cut_line(error)}); free some, or choose another"
            ) from error
        raise


class ReplicasDiffer(TrueShardError, RuntimeError):
    """Ranks that hold the same part of a tensor hold different bits."""

    def __init__(self, message: str, key: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.key = key
        """The first tensor that differs, as in ``StateHash``."""
        self.ranks = tuple(ranks)
        """Ranks that differ from most; all that hold the part, if there is no majority."""
