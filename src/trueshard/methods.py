"""Which methods of a unit, besides ``forward``, read its parameters.

FSDP2 gathers for ``forward`` alone. A method that calls the unit's layers or reads its parameters (a ``loss``, an
``encode``) must gather too; one that only arranges things (``reset_parameters``, ``set_config``) must not, for what it
writes belongs in the shards. The code of the method tells: it names an attribute that is a parameter or a module of the
unit, and calls nothing that writes in place.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator

from torch import nn

#: Classes of these packages keep to ``forward`` and submodule calls, which are gathered anyway.
_LIBRARIES = ("torch.", "transformers.", "peft.", "trueshard.")


def methods_that_compute(module: nn.Module) -> list[str]:
    """Names of methods of ``module`` (not ``forward``) that need its parameters gathered."""
    attributes = {name for name, child in module._modules.items() if child is not None} | set(module._parameters)
    functions = dict(_methods(type(module)))
    reads = {name for name, function in functions.items() if _names(function) & attributes}
    writes = {name for name, function in functions.items() if any(_writes(word) for word in _names(function))}
    while more := {name for name in functions if name not in reads and _names(functions[name]) & reads}:
        reads |= more
    return sorted(reads - writes)


def _methods(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    """The user's own methods of a module class, as Python functions."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if base is nn.Module:
            return
        if f"{base.__module__}.".startswith(_LIBRARIES):
            continue
        for name, value in vars(base).items():
            hidden = name.startswith("__") or name == "forward" or hasattr(nn.Module, name)
            if name not in seen and not hidden and inspect.isfunction(value) and not inspect.isgeneratorfunction(value):
                seen.add(name)
                yield name, value


def _names(function: types.FunctionType) -> set[str]:
    """Every attribute and global that the code of ``function`` names, nested functions included."""
    found: set[str] = set()
    stack = [inspect.unwrap(function).__code__]
    while stack:
        code = stack.pop()
        found.update(code.co_names)
        stack.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return found


def _writes(word: str) -> bool:
    return (word.endswith("_") and not word.endswith("__") and word != "_") or word in ("data", "setattr", "init")
