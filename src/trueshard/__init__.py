"""TrueShard: fully-sharded training on PyTorch that changes where tensors live, and nothing else.

Names are loaded when they are first used, so that ``import trueshard`` costs little beside ``import torch``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueshard.api import shard
    from trueshard.checkpoint import (
        Checked,
        Checkpoints,
        Compared,
        DamagedCheckpoint,
        Found,
        Inspected,
        Saving,
        check,
        export,
        inspect,
        latest,
        load,
        save,
    )
    from trueshard.engine import accumulate, set_reshard_after_forward
    from trueshard.forecast import Forecast
    from trueshard.optim.clip import clip_grad_norm_
    from trueshard.optim.norms import MeasuredNorms, Norms, measure_norms
    from trueshard.planner.choice.remedies import NothingFits
    from trueshard.planner.planning import plan
    from trueshard.plans import MixedPrecision, Plan, Unit
    from trueshard.tokens import TokenMean, count_targets, token_mean
    from trueshard.train.events import Callback
    from trueshard.train.trainer import NonFiniteLoss, Trainer
    from trueshard.verification.report import Verified
    from trueshard.verification.verify import verify

__version__ = "0.1.0"

_WHERE = {
    "Callback": "train.events",
    "Checked": "checkpoint",
    "Checkpoints": "checkpoint",
    "Compared": "checkpoint",
    "DamagedCheckpoint": "checkpoint",
    "Forecast": "forecast",
    "Found": "checkpoint",
    "Inspected": "checkpoint",
    "MeasuredNorms": "optim.norms",
    "MixedPrecision": "plans",
    "NonFiniteLoss": "train.trainer",
    "Norms": "optim.norms",
    "NothingFits": "planner.choice.remedies",
    "Plan": "plans",
    "Saving": "checkpoint",
    "TokenMean": "tokens",
    "Trainer": "train.trainer",
    "Unit": "plans",
    "Verified": "verification.report",
    "accumulate": "engine",
    "check": "checkpoint",
    "clip_grad_norm_": "optim.clip",
    "count_targets": "tokens",
    "export": "checkpoint",
    "inspect": "checkpoint",
    "latest": "checkpoint",
    "load": "checkpoint",
    "measure_norms": "optim.norms",
    "plan": "planner.planning",
    "save": "checkpoint",
    "set_reshard_after_forward": "engine",
    "shard": "api",
    "token_mean": "tokens",
    "verify": "verification.verify",
}

__all__ = [
    "Callback",
    "Checked",
    "Checkpoints",
    "Compared",
    "DamagedCheckpoint",
    "Forecast",
    "Found",
    "Inspected",
    "MeasuredNorms",
    "MixedPrecision",
    "NonFiniteLoss",
    "Norms",
    "NothingFits",
    "Plan",
    "Saving",
    "TokenMean",
    "Trainer",
    "Unit",
    "Verified",
    "accumulate",
    "check",
    "clip_grad_norm_",
    "count_targets",
    "export",
    "inspect",
    "latest",
    "load",
    "measure_norms",
    "plan",
    "save",
    "set_reshard_after_forward",
    "shard",
    "token_mean",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'trueshard' has no attribute {name!r}")
    value = getattr(import_module(f"trueshard.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
