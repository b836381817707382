"""Reinforcement learning in a loop of one's own; its names are loaded when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueshard.train.rl.policy import PolicyLoss as PolicyLoss
    from trueshard.train.rl.rollouts import Rollouts as Rollouts
    from trueshard.train.rl.samples import Sample as Sample

_WHERE = {"PolicyLoss": "policy", "Rollouts": "rollouts", "Sample": "samples"}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'trueshard.rl' has no attribute {name!r}")
    from trueshard.errors import with_extra

    with with_extra():
        return getattr(import_module(f"trueshard.train.rl.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
