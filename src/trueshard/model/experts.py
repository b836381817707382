"""Stacked experts: a module that holds all experts of a layer, in parameters of (experts, …), as in transformers 5.

Such a module says how many experts it has and how they are laid out, and computes (hidden states, indices of each
token's experts, their weights) → the weighted sum: classes under transformers' ``use_experts_implementation``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from trueshard import _torch
from trueshard.model import names

_MARKS = ("num_experts", "has_gate", "is_transposed")


def stacked(root: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with stacked experts below ``root``, by name."""
    return {name: module for name, module in names.named_modules(root) if name and _is_stacked(module)}


def _is_stacked(module: Any) -> bool:
    parameters = [parameter for parameter in _torch.own_parameters(module).values() if parameter is not None]
    return (
        all(hasattr(module, mark) for mark in _MARKS)
        and any(parameter.ndim == 3 for parameter in parameters)
        and all(parameter.ndim and parameter.shape[0] == module.num_experts for parameter in parameters)
        and len(parameters) == len(list(module.parameters()))
    )


def shared_out(root: nn.Module, ranks: int) -> dict[str, str]:
    """Return the modules whose experts ``ranks`` share (name → words that say so), none for one rank.

    Raises:
        ValueError: the model has no stacked experts, or their number does not fit; says which, and the remedy.
    """
    if ranks == 1:
        return {}
    modules: dict[str, Any] = stacked(root)
    if not modules:
        raise ValueError(f"experts={ranks}: {_without_stacks(root)}; leave out experts")
    for name, module in modules.items():
        if module.num_experts % ranks:
            raise ValueError(f"experts={ranks} does not divide the {module.num_experts} experts of {name!r}")
    rest = next((f" (those of {name!r}, a list, are gathered)" for name in _lists(root)), "")
    counts = {name: (module.num_experts // ranks, module.num_experts) for name, module in modules.items()}
    return {name: f"{here} of {total} experts a rank{rest}" for name, (here, total) in counts.items()}


def _lists(root: nn.Module) -> Iterable[str]:
    """Yield the lists of modules that are called experts."""
    for name, module in names.named_modules(root):
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and name.rpartition(".")[2].endswith("experts"):
            yield name


def _without_stacks(root: nn.Module) -> str:
    if name := next(iter(_lists(root)), None):
        return (
            f"{name!r} is a list of modules, which every rank gathers, and {type(root).__name__} has no stacked experts"
        )
    return (
        f"{type(root).__name__} has no stacked experts, parameters of (experts, …) in a class under transformers' "
        "use_experts_implementation"
    )
