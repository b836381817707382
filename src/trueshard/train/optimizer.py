"""The optimizer of a run: any class by import path, over groups of parameters.

- Norms and biases have no weight decay, unless `optimizer.no_decay` says otherwise.
- Every glob must match a trainable parameter: one that matches none is a slip.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trueshard.errors import UserError, one_line
from trueshard.train.config import OptimizerSection
from trueshard.train.globs import matching


def build_optimizer(section: OptimizerSection, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The optimizer over those of the named parameters that are trainable.

    Raises `UserError` if the class is not found, is not an optimizer, or refuses its arguments, if a glob matches no
    trainable parameter, or if nothing is trainable.
    """
    kind = imported_class(section.class_path, torch.optim.Optimizer, "optimizer.class")
    trainable = {name: parameter for name, parameter in named if parameter.requires_grad}
    if not trainable:
        raise UserError("[optimizer]: no parameter is trainable; freeze fewer with model.freeze, or add an [adapter]")
    arguments: dict[str, Any] = {"lr": section.lr, **section.arguments}
    if section.betas is not None:
        arguments["betas"] = tuple(section.betas)
    if section.weight_decay is not None:
        arguments["weight_decay"] = section.weight_decay
    try:
        return kind(_groups(section, trainable, _decays(kind, arguments)), **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        detail = one_line(error)
        raise UserError(f"[optimizer]: {section.class_path} refuses its arguments ({detail}); correct them") from None


def check_optimizer(section: OptimizerSection) -> None:
    """Raise `UserError` for what is wrong with the class and its arguments, whatever the model is."""
    plain = section.model_copy(update={"groups": [], "no_decay": None})
    build_optimizer(plain, [("weight", nn.Parameter(torch.zeros(2, 2)))])


def imported_class(path: str, base: type, key: str) -> Any:
    """The class at an import path, a subclass of `base`. Raises `UserError`, with `key`, if there is none."""
    module_name, _, name = path.rpartition(".")
    home = base.__module__ if base is not torch.optim.Optimizer else "torch.optim"
    try:
        module = importlib.import_module(module_name or home)
    except ImportError as error:
        raise UserError(f"{key}: {path!r} cannot be imported ({error}); install it, or correct the path") from None
    kind = getattr(module, name, None)
    if isinstance(kind, type) and issubclass(kind, base):
        return kind
    state = f"is no {home}.{base.__name__} class" if kind is not None else "does not exist"
    classes = [name for name, value in vars(module).items() if isinstance(value, type)]
    near = difflib.get_close_matches(name, classes, n=1)
    example = '"torch.optim.AdamW"' if base is torch.optim.Optimizer else '"torch.optim.lr_scheduler.OneCycleLR"'
    hint = f"nearest one: {module.__name__}.{near[0]}" if near else f"give an import path, such as {example}"
    raise UserError(f"{key}: {path!r} {state}; {hint}")


def _decays(kind: type, arguments: dict[str, Any]) -> bool:
    """Whether the class, so called, has weight decay at all."""
    default = inspect.signature(kind).parameters.get("weight_decay")
    value = arguments.get("weight_decay", None if default is None else default.default)
    return isinstance(value, (int, float)) and value > 0


def _groups(section: OptimizerSection, trainable: dict[str, nn.Parameter], decays: bool) -> list[dict[str, Any]]:
    """Parameter groups: those of the section in their order, then the rest, with and without weight decay."""
    left = dict(trainable)
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(section.groups, start=1):
        key = f"optimizer.groups, number {number}"
        taken = matching(group.parameters, trainable, key, "trainable parameter")
        found = {name: left.pop(name) for name in taken if name in left}
        if not found:
            raise UserError(f"{key}: an earlier group has all of its parameters; remove it, or put it first")
        settings = {name: getattr(group, name) for name in ("lr", "weight_decay") if getattr(group, name) is not None}
        groups.append({"params": list(found.values()), **settings, **group.arguments})
    if section.no_decay is None:
        bare = [name for name, parameter in left.items() if parameter.ndim < 2] if decays else []
    else:
        bare = [
            name
            for name in matching(section.no_decay, trainable, "optimizer.no_decay", "trainable parameter")
            if name in left
        ]
    rest = [left[name] for name in left if name not in set(bare)]
    if rest:
        groups.append({"params": rest})
    if bare:
        groups.append({"params": [left[name] for name in bare], "weight_decay": 0.0})
    return groups
