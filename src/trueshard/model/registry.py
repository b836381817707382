"""Find the sharded models of this process, and undo what was installed for them when the last one is gone.

``[Note: What knows of all models]`` torch calls some functions for the whole process: a hook before the step of every
optimizer, an operator of DTensor, ``zero_grad``. Such a function is given a tensor or an optimizer and must find the
model that it belongs to, if any. This file is the one place that lists models; all that a step keeps (what a pass does,
gradients that are not reduced, names, seeds) lives on the record of its model, so two models never see each other.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary


class ShardedModel(abc.ABC):
    """Record of one sharded model, as optimizers and patches of torch see it; its root module alone keeps it alive."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.seed = torch.initial_seed()
        """torch's seed when the model was sharded: optimizers that draw go on from it."""
        self.meshes: set[DeviceMesh] = set()
        """Meshes of its parameters. They tell whose a DTensor is: each result of an operator is on the mesh of what it
        was computed from, and has nothing else that would lead back to the model."""
        self.replaced: Any = WeakTensorKeyDictionary()
        """Parameter that the user made → its name. A sharded one took its place, so an optimizer must not hold it."""
        self.seen: Any = weakref.WeakKeyDictionary()
        """Optimizer → ``id`` of its parameters, by group, when it was found to hold none that cannot be stepped."""
        self.stepped_by: Any = weakref.WeakSet()
        """Optimizers that hold its parameters, of those that have stepped."""
        self.after_step: list[Callable[[torch.optim.Optimizer], None]] = []
        """Called after each step of such an optimizer."""
        self.before_reading: list[Callable[[], None]] = []
        """Called before the model is read as a whole: each raises what a backward found that the host has not read."""
        self.has_pending = False
        """True from a backward that did not reduce (``accumulate(last=False)``) until one does, or they are dropped."""
        self.ties: list[Any] = []
        """``Tie`` of each parameter of which other stages of a pipeline hold copies, in one order on all of them."""
        self.exact_names: dict[int, str] = {}
        """``id`` of a parameter whose gradients are exact sums → its name. Not weak references to parameters: those
        would keep torch from giving them memory by ``to_empty()``."""

    @abc.abstractmethod
    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that an optimizer holds, whether their units are gathered now or not."""

    @abc.abstractmethod
    def drop_unreduced(self, of: Collection[int] | None = None) -> None:
        """Drop gradients that are summed on this rank and not reduced; ``of``: those of parameters with these ids."""


_models: weakref.WeakValueDictionary[int, ShardedModel] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_installed: dict[Callable[[], Any], Callable[[], Any]] = {}
"""Function that installed a patch, or undoes it → function that undoes it."""


def models() -> list[Any]:
    """Return the records of the sharded models that are still held, in the order in which they were sharded."""
    return list(_models.values())


def add(model: ShardedModel, patches: Iterable[Callable[[], Callable[[], Any]]]) -> None:
    """List a model; call each of its ``patches``, which returns what undoes it, unless one before has called it."""
    for install in patches:
        if install not in _installed:
            _installed[install] = install()
    _models[next(_numbers)] = model
    weakref.finalize(model, undo_unused).atexit = False


def discard(root: nn.Module) -> None:
    """Forget a model whose ``shard()`` failed."""
    for number, model in list(_models.items()):
        if model.root is root:
            del _models[number]
    undo_unused()


def undo_unused() -> None:
    """Undo every patch if no sharded model is left."""
    if not models():  # not the table itself: called while one dies, which may be in it still
        with contextlib.ExitStack() as undone:  # the last one first, and all of them
            for undo in _installed.values():
                undone.callback(undo)
            _installed.clear()


def at_end(undo: Callable[[], Any]) -> None:
    """Call ``undo()`` when the last sharded model is gone."""
    _installed[undo] = undo


def is_ours(tensor: torch.Tensor) -> bool:
    """True for a DTensor on the mesh of a sharded model: a parameter, its gradient, or what was computed from them."""
    return isinstance(tensor, DTensor) and any(tensor.device_mesh in model.meshes for model in _models.values())


def owner_of(tensors: Collection[torch.Tensor]) -> Any:
    """Return the record of the model that has one of ``tensors`` as a parameter; None: they belong to none."""
    ids = set(map(id, tensors))
    return next((model for model in models() if any(id(held) in ids for held in model.parameters())), None)
