"""Stacked experts: a module that holds all experts of a layer, in parameters of (experts, …), as in transformers 5.

Such a module says how many experts it has and how they are laid out, and computes (hidden states, indices of each
token's experts, their weights) → the weighted sum: classes under transformers' ``use_experts_implementation``.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from trueshard import _torch
from trueshard.model.names import Index

KIND = "_experts_implementation"
"""Attribute of a configuration of transformers: how stacked experts are computed."""
_MARKS = ("num_experts", "has_gate", "is_transposed")
_LISTS = (nn.ModuleList, nn.ModuleDict)


def _is_stacked(module: Any) -> bool:
    parameters = [parameter for parameter in _torch.own_parameters(module).values() if parameter is not None]
    return (
        all(hasattr(module, mark) for mark in _MARKS)
        and any(parameter.ndim == 3 for parameter in parameters)
        and all(parameter.ndim and parameter.shape[0] == module.num_experts for parameter in parameters)
        and len(parameters) == len(list(module.parameters()))
    )


def by_grouped_products(root: nn.Module) -> dict[str, Any]:
    """Return the modules of stacked experts that transformers computes by "grouped_mm", by name.

    It counts the rows of each expert by ``histc``, which has no deterministic kernel on CUDA.
    """
    modules: dict[str, Any] = {name: module for name, module in root.named_modules() if _is_stacked(module)}
    kinds = {name: getattr(getattr(module, "config", None), KIND, None) for name, module in modules.items()}
    return {name: module for name, module in modules.items() if kinds[name] == "grouped_mm"}


def shared_out(index: Index, ranks: int) -> dict[str, str]:
    """Return the modules whose experts ``ranks`` share (name → words that say so), none for one rank.

    Raises:
        ValueError: the model has no stacked experts, or their number does not fit; says which, and the remedy.
    """
    if ranks == 1:
        return {}
    modules: dict[str, Any] = {name: module for name, module in index.modules.items() if name and _is_stacked(module)}
    lists = [name for name, module in index.modules.items() if name.endswith("experts") and isinstance(module, _LISTS)]
    if not modules:
        kind = type(index.root).__name__
        why = f"{kind} has no stacked experts (of transformers' use_experts_implementation: parameters of (experts, …))"
        if lists:
            why = f"{lists[0]!r} is a list of modules, which every rank gathers, and {kind} has no stacked experts"
        raise ValueError(f"experts={ranks}: {why}; leave out experts")
    for name, module in modules.items():
        if module.num_experts % ranks:
            raise ValueError(f"experts={ranks} does not divide the {module.num_experts} experts of {name!r}")
    rest = f" (those of {lists[0]!r}, a list, are gathered)" if lists else ""
    counts = {name: (module.num_experts // ranks, module.num_experts) for name, module in modules.items()}
    return {name: f"{here} of {total} experts a rank{rest}" for name, (here, total) in counts.items()}
