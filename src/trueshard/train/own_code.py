"""Code of the user's own, named "file.py:name" by a key of the configuration: found, imported once, and checked.

The path is relative to the current directory. A mistake is a ``Wrong``, half a sentence with the user's file and line;
``own`` puts the key before it. Nothing here imports torch, since processes of rewards do not.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from trueshard.errors import UserError, with_kind
from trueshard.text import nearest


class Wrong(Exception):
    """Mistake of a function, as half a sentence; ``at``: the input that it was made with, None for all."""

    def __init__(self, text: str, at: int | None = None) -> None:
        super().__init__(text)
        self.at = at


def own(key: str, words: str, *parameters: str, base: type | None = None, binds: bool = True, **named: Any) -> Any:
    """Return the function or class that ``key`` names by "file.py:name".

    Raises `UserError`, with file and line, if there is none, with ``base`` if it is no subclass of that, and unless
    ``binds`` is false if it cannot be called with ``parameters`` by position and ``named`` by name.
    """
    try:
        value, _ = find(words)
    except Wrong as error:
        raise UserError(f"{key}: {error}") from None
    if base is not None and not (isinstance(value, type) and issubclass(value, base)):
        raise UserError(f"{key}: {_place(value)} is no subclass of {base.__name__}; make it one")
    if binds:
        check_call(key, value, *parameters, **named)
    return value


def check_call(key: str, call: Any, *parameters: str, **named: Any) -> None:
    """Raise `UserError`, with file and line, if a function cannot be called with these parameters."""
    with contextlib.suppress(ValueError):  # compiled code without a signature
        signature = inspect.signature(call)
        try:
            signature.bind(*parameters, **named)
        except TypeError as error:
            called = ", ".join((*parameters, *(f"{name}=…" for name in named)))
            raise UserError(
                f"{key}: {_place(call)} is called with ({called}), and has {signature}: {error}; correct it"
            ) from None


def _place(value: Any) -> str:
    """Return file, line and name of a function or class: "loss.py:3: own_loss"."""
    name = getattr(value, "__qualname__", type(value).__name__)
    with contextlib.suppress(OSError, TypeError):  # an object that is called, or compiled code
        return f"{Path(inspect.getsourcefile(value) or '').name}:{inspect.getsourcelines(value)[1]}: {name}"
    return name


@contextlib.contextmanager
def blamed(key: str, words: str, doing: str = "") -> Iterator[None]:
    """Turn errors inside into a `UserError` that names key and function, and the line of the user's code."""
    try:
        with explained(Path(words.rpartition(":")[0]).expanduser().resolve().parent):
            yield
    except Wrong as error:
        raise UserError(f"{key}: {words}{doing}: {error}; correct it") from error


@contextlib.contextmanager
def explained(folder: Path | None) -> Iterator[None]:
    """Turn errors inside into a ``Wrong`` with the line of the user's code in ``folder``: "a.py:12: KeyError: 'a'"."""
    try:
        yield
    except (Wrong, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise Wrong(_explanation(error, folder)) from error


def find(words: str, built_in: Sequence[str] = ()) -> tuple[Callable[..., Any], Path]:
    """Return the function of "file.py:function" and its folder. Raises `Wrong`, which names ``built_in`` words too."""
    path, _, name = words.rpartition(":")
    if not path or not name:
        or_word = f", or a word: {', '.join(built_in)}" if built_in else ""
        raise Wrong(f'{words!r} names no function; write "file.py:function"{or_word}.{nearest(words, built_in)}')
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        near = nearest(file.name, [other.name for other in file.parent.glob("*.py")])
        raise Wrong(f"there is no file {path!r}; correct the path.{near}")
    try:
        module = _module(file)
    except BaseException as error:
        raise Wrong(f"{words} cannot be imported: {_explanation(error, file.parent)}; correct it") from error
    call = getattr(module, name, None)
    if not callable(call):
        named = ((key, value) for key, value in vars(module).items() if isinstance(value, (FunctionType, type)))
        functions = [key for key, value in named if value.__module__ == module.__name__ and key[0] != "_"]
        near = nearest(name, functions) or (f" It has {', '.join(functions)}." if functions else "")
        raise Wrong(f"{file.name} has no function {name!r}; name one that it has.{near}")
    return call, file.parent


def _module(file: Path) -> ModuleType:
    """Import a file once, with its folder on ``sys.path`` below the standard library and above installed packages.

    So one in a "math.py" hides nothing, and modules beside it are found before others.
    """
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(file):
            return module
    if str(file.parent) not in sys.path:
        installed = (i for i, path in enumerate(sys.path) if path.endswith(("site-packages", "dist-packages")))
        sys.path.insert(next(installed, len(sys.path)), str(file.parent))
    is_taken = file.stem in sys.modules or file.stem in sys.stdlib_module_names
    name = f"own_{len(sys.modules)}_{file.stem}" if is_taken else file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file.name} is no Python file")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _explanation(error: BaseException, folder: Path | None) -> str:
    """Return an error in one line, after the user's line that it came from: "rewards.py:12: KeyError: 'a'"."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if Path(frame.filename).parent == folder), None)
    return f"{Path(last.filename).name}:{last.lineno}: {with_kind(error)}" if last else with_kind(error)
