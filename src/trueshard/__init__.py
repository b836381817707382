"""TrueShard: fully-sharded training on PyTorch that changes where tensors live, and nothing else.

Names are loaded when they are first used, so that ``import trueshard`` costs little beside ``import torch``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueshard import rl as rl
    from trueshard.api import shard as shard
    from trueshard.checkpoint.catalogue import latest as latest
    from trueshard.checkpoint.exporting import export as export
    from trueshard.checkpoint.hashing import ReplicasDiffer as ReplicasDiffer
    from trueshard.checkpoint.hashing import StateHash as StateHash
    from trueshard.checkpoint.hashing import check_replicas as check_replicas
    from trueshard.checkpoint.hashing import state_hash as state_hash
    from trueshard.checkpoint.inspecting import Checked as Checked
    from trueshard.checkpoint.inspecting import Compared as Compared
    from trueshard.checkpoint.inspecting import DamagedCheckpoint as DamagedCheckpoint
    from trueshard.checkpoint.inspecting import Inspected as Inspected
    from trueshard.checkpoint.inspecting import check as check
    from trueshard.checkpoint.inspecting import inspect as inspect
    from trueshard.checkpoint.loading import Found as Found
    from trueshard.checkpoint.loading import load as load
    from trueshard.checkpoint.saving import Checkpoints as Checkpoints
    from trueshard.checkpoint.saving import Saving as Saving
    from trueshard.checkpoint.saving import save as save
    from trueshard.checkpoint.snapshots import Snapshots as Snapshots
    from trueshard.checkpoint.weights import weights as weights
    from trueshard.errors import TrueShardError as TrueShardError
    from trueshard.optim.norms import MeasuredNorms as MeasuredNorms
    from trueshard.optim.norms import Norms as Norms
    from trueshard.optim.norms import clip_grad_norm_ as clip_grad_norm_
    from trueshard.optim.norms import measure_norms as measure_norms
    from trueshard.optim.seeded_random import sample_rng as sample_rng
    from trueshard.planner.planning import plan as plan
    from trueshard.planner.workload import NothingFits as NothingFits
    from trueshard.plans import Forecast as Forecast
    from trueshard.plans import MixedPrecision as MixedPrecision
    from trueshard.plans import Plan as Plan
    from trueshard.plans import Unit as Unit
    from trueshard.sharding.engine import accumulate as accumulate
    from trueshard.sharding.engine import set_reshard_after_forward as set_reshard_after_forward
    from trueshard.sharding.gathering import gathered as gathered
    from trueshard.sharding.splitting import split_sequence as split_sequence
    from trueshard.sharding.stages import tie_over as tie_over
    from trueshard.sharding.tokens import TokenMean as TokenMean
    from trueshard.sharding.tokens import count_targets as count_targets
    from trueshard.sharding.tokens import token_mean as token_mean
    from trueshard.train.averaging import Average as Average
    from trueshard.train.callbacks import Callback as Callback
    from trueshard.train.own_loop import gather as gather
    from trueshard.train.own_loop import loader as loader
    from trueshard.train.own_loop import main_first as main_first
    from trueshard.train.trainer import NonFiniteLoss as NonFiniteLoss
    from trueshard.train.trainer import Trainer as Trainer
    from trueshard.verification.report import Verified as Verified
    from trueshard.verification.verifying import verify as verify

__version__ = "0.1.0"

_MODULES = {
    "api": "shard",
    "checkpoint.catalogue": "latest",
    "checkpoint.exporting": "export",
    "checkpoint.hashing": "ReplicasDiffer StateHash check_replicas state_hash",
    "checkpoint.inspecting": "Checked Compared DamagedCheckpoint Inspected check inspect",
    "checkpoint.loading": "Found load",
    "checkpoint.saving": "Checkpoints Saving save",
    "checkpoint.snapshots": "Snapshots",
    "checkpoint.weights": "weights",
    "errors": "TrueShardError",
    "optim.norms": "MeasuredNorms Norms clip_grad_norm_ measure_norms",
    "optim.seeded_random": "sample_rng",
    "planner.planning": "plan",
    "planner.workload": "NothingFits",
    "plans": "Forecast MixedPrecision Plan Unit",
    "sharding.engine": "accumulate set_reshard_after_forward",
    "sharding.gathering": "gathered",
    "sharding.splitting": "split_sequence",
    "sharding.stages": "tie_over",
    "sharding.tokens": "TokenMean count_targets token_mean",
    "train.own_loop": "gather loader main_first",
    "train.averaging": "Average",
    "train.trainer": "Callback NonFiniteLoss Trainer",
    "verification.report": "Verified",
    "verification.verifying": "verify",
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted([*_WHERE, "rl"])


def __getattr__(name: str) -> Any:
    if name == "rl":
        return import_module("trueshard.rl")
    if name not in _WHERE:
        raise AttributeError(f"module 'trueshard' has no attribute {name!r}")
    from trueshard.errors import with_extra

    with with_extra():
        value = getattr(import_module(f"trueshard.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
