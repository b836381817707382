"""How an optimizer may step when its parameters are cut by rows: on the shards, by owners, or not at all.

Known classes (torch's own) are looked up; any other is probed with the user's own settings (``probe.py``). The answer
is for each parameter group, since one class may treat groups differently (Muon's matrices, and the rest by Adam).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trueshard.optim import probe, trial
from trueshard.optim.rebind import by_shape


@dataclass(frozen=True)
class Verdict:
    """How one parameter group steps."""

    whole: bool
    """An element's update depends on others of its parameter, beyond its row: it is made by the owner."""
    elementwise: bool = False
    """It depends on the element alone, so that parameters can be stepped as one flat tensor."""
    decoupled: bool = False
    """The new parameter is ``parameter · (1 - lr · weight_decay)`` plus what a parameter of zeros would become."""
    rows: frozenset[tuple[Any, ...]] | None = None
    """State that has a row for each row of its parameter, by its keys; None: what has the parameter's shape."""
    alike: frozenset[tuple[Any, ...]] = frozenset()
    """State that is the same on every rank, by its keys."""
    draws: bool = False
    """It draws random numbers, on which its update does not depend."""

    def is_rows(self, path: tuple[Any, ...], tensor: torch.Tensor, leaf: torch.Tensor) -> bool:
        """Whether the state ``tensor`` of ``leaf`` has a row for each of its rows."""
        if self.rows is not None and (path in self.rows or path in self.alike):
            return path in self.rows and tensor.ndim > 0
        return by_shape(path, tensor, leaf)


_ON_SHARDS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_BY_OWNER = {"Muon": True, "Adafactor": False}
"""Class → whether it is decoupled."""
_REFUSED = {
    "LBFGS": "its step is one function of all parameters together (line search, curvature pairs over a flat vector)",
    "SparseAdam": "it takes sparse gradients alone, and those of sharded parameters are dense",
}
_REFUSED_BY_NAME = {
    "PCGrad": "it projects the gradients of several losses, of all parameters together",
    "DeMo": "it communicates by itself",
    "DistributedMuon": "it communicates by itself",
}
"""What others call them, wherever they are defined: what they do beside a step of one process cannot be tried."""
_QUANTIZED = "torchao.optim."
"""Their state is quantized by blocks of a tensor: on shards, exact up to the rounding of a block."""


def classify(optimizer: torch.optim.Optimizer) -> list[Verdict]:
    """A verdict for each of the optimizer's groups. The same on every rank; no communication.

    Raises:
        ValueError: it cannot step on sharded parameters as it would on one device; names the class and the reason.
    """
    cls = type(optimizer)
    groups = optimizer.param_groups
    if any(group.get("differentiable") for group in groups):
        raise refusal(
            optimizer,
            "differentiable=True records the update in autograd, which parameters refuse",
            "differentiable=False",
        )
    if getattr(torch.optim, cls.__name__, None) is cls:
        if cls.__name__ in _ON_SHARDS:
            return [Verdict(whole=False, elementwise=True) for _ in groups]
        if cls.__name__ == "Adafactor" and any(map(_takes_eps_of_first, groups)):
            raise refusal(
                optimizer,
                "eps=(None, …) in a group of several dtypes means that of the first",
                "a number as its first eps",
            )
        if cls.__name__ in _BY_OWNER:
            return [Verdict(whole=True, decoupled=_BY_OWNER[cls.__name__] and _is_float(group)) for group in groups]
        if cls.__name__ in _REFUSED:
            raise refusal(optimizer, _REFUSED[cls.__name__])
    if cls.__name__ in _REFUSED_BY_NAME:
        raise refusal(optimizer, _REFUSED_BY_NAME[cls.__name__])
    if cls.__module__.startswith(_QUANTIZED):
        if getattr(optimizer, "bf16_stochastic_round", False):
            raise refusal(
                optimizer, "it rounds at random, which every rank does differently", "bf16_stochastic_round=False"
            )
        return [Verdict(whole=False) for _ in groups]
    try:
        return [_verdict(group) for group in probe.groups(optimizer)]
    except trial.Refused as refused:
        raise refusal(optimizer, str(refused)) from refused.__cause__


def refusal(optimizer: torch.optim.Optimizer, reason: str, instead: str = "") -> ValueError:
    """The error for an optimizer that cannot be sharded."""
    remedy = f"use {instead}" if instead else "use an optimizer that updates each parameter by itself"
    return ValueError(f"{type(optimizer).__name__} cannot step on sharded parameters: {reason}; {remedy}")


def _takes_eps_of_first(group: dict[str, Any]) -> bool:
    return group["eps"][0] is None and len({parameter.dtype for parameter in group["params"]}) > 1


def _is_float(group: dict[str, Any]) -> bool:
    """Lower precision would round the difference before it is added."""
    return all(parameter.dtype in (torch.float32, torch.float64) for parameter in group["params"])


def _verdict(group: probe.Group) -> Verdict:
    return Verdict(group.whole, rows=frozenset(group.rows), alike=frozenset(group.alike), draws=group.draws)


def manner(verdicts: Sequence[Verdict]) -> str:
    """What the verdicts come to, for a reader."""
    kinds = {verdict.whole for verdict in verdicts}
    return "on shards and by owner" if len(kinds) > 1 else "by owner" if True in kinds else "on shards"
