"""Optimizers by words, as a step on a GPU would run them."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trueshard.errors import one_line
from trueshard.model import names
from trueshard.model.names import Index
from trueshard.model.units import choose_units

Make = Callable[[nn.Module], Sequence[torch.optim.Optimizer]]

NAMED: dict[str, tuple[str, dict[str, Any]]] = {"sgd-momentum": ("SGD", {"momentum": 0.9})}
"""Short name besides those of torch.optim's classes → class, and its settings."""
WAYS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}
"""Ending of a name → which of torch's implementations."""


def optimizers_of(words: str | Callable[[nn.Module], Any]) -> Make:
    """Return a function that makes optimizers over the parameters of a model that require a gradient.

    Args:
        words: a short name of ``NAMED`` or a class of ``torch.optim``, perhaps with an ending of ``WAYS``
            (``"adamw-fused"``); or ``"package.module:Class"``; each perhaps with settings after a colon
            (``"adamw:betas=(0.9, 0.95),weight_decay=0.1"``). Without an ending it is foreach where the class has
            that, torch's default on a GPU. ``"muon"`` takes the matrices of blocks and AdamW the rest, as its authors
            say. Or a callable(model) → optimizer(s). ValueError if the words name nothing.
    """
    if not isinstance(words, str):
        return lambda model: checked(words, getattr(words, "__name__", "the optimizer function"), model)
    cls, settings = _parse(words)
    accepted = inspect.signature(cls).parameters
    if "lr" in accepted and accepted["lr"].default is inspect.Parameter.empty:
        settings.setdefault("lr", 1e-3)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        for key in settings:
            if key not in accepted:
                near = names.nearest(key, list(accepted)[1:])
                raise ValueError(f"optimizer {words!r}: {cls.__name__} takes no {key!r}.{near}")
    if "foreach" in accepted and not settings.get("fused"):
        settings.setdefault("foreach", True)

    def make(model: nn.Module) -> Sequence[torch.optim.Optimizer]:
        parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not parameters:
            raise ValueError("no parameter requires a gradient: there is nothing to train")
        try:
            if cls is torch.optim.Muon:
                return _muon(model, parameters, settings)
            return [cls([name for _, name in parameters], **settings)]
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"optimizer {words!r}: {cls.__name__} refuses: {one_line(error)}") from None

    return make


def checked(optimizers: Any, name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return one optimizer or several, or what a function of ``model`` makes, as a list; else raise ValueError."""
    if callable(optimizers) and not isinstance(optimizers, torch.optim.Optimizer):
        optimizers = optimizers(model)
    optimizers = optimizers.values() if isinstance(optimizers, Mapping) else optimizers
    several = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for optimizer in several:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"{name} gives a {type(optimizer).__name__}, not torch.optim.Optimizer object(s)")
    return several


def _parse(words: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    name, *rest = words.split(":", 2 if "." in words.partition(":")[0] else 1)
    if "." in name:
        if not rest:
            raise ValueError(f"optimizer {words!r}: write package.module:Class")
        cls = _imported(name, rest[0], words)
        return cls, _settings(rest[1] if len(rest) > 1 else "", words)
    cls, preset = _named(name, words)
    return cls, {**preset, **_settings(rest[0] if rest else "", words)}


def _named(name: str, words: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    name, way = name.strip().lower(), {}
    for ending, choice in WAYS.items():
        if name.endswith(f"-{ending}"):
            name, way = name.removesuffix(f"-{ending}"), choice
    classes = NAMED | {key.lower(): (key, {}) for key in _classes(torch.optim)}
    if name not in classes:
        near = names.nearest(name, sorted(classes))
        raise ValueError(f"no optimizer is called {words!r}.{near} Known: {', '.join(sorted(classes))}")
    key, preset = classes[name]
    return getattr(torch.optim, key), {**preset, **way}


def _imported(module: str, name: str, words: str) -> type[torch.optim.Optimizer]:
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"optimizer {words!r}: {module} cannot be imported ({error})") from None
    cls = getattr(imported, name, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        near = names.nearest(name, _classes(imported))
        raise ValueError(f"optimizer {words!r}: {module} has no optimizer {name!r}.{near}")
    return cls


def _classes(module: Any) -> list[str]:
    return [
        key
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    ]


def _settings(text: str, words: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise SyntaxError
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        raise ValueError(f"optimizer {words!r}: {text!r} is no list of settings; write key=value,key=value") from None


def _muon(
    model: nn.Module, parameters: list[tuple[str, nn.Parameter]], settings: dict[str, Any]
) -> list[torch.optim.Optimizer]:
    """Make Muon for the matrices inside blocks, AdamW for embeddings, heads, gains and biases, as its author does."""
    blocks = tuple(f"{name}." for name in choose_units(Index(model), "auto"))
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in parameters:
        is_matrix = parameter.ndim == 2 and name.startswith(blocks) and id(parameter) not in tables
        (matrices if is_matrix else others).append(parameter)
    made: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, **settings)] if matrices else []
    return [*made, torch.optim.AdamW(others, foreach=True)] if others else made
