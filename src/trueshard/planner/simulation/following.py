"""Keeps a recorder told where in the step the program is: which unit runs, and for whom FSDP2 communicates."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from trueshard import _torch, names
from trueshard.planner.events import Place, Stream
from trueshard.planner.simulation.recorder import Recorder
from trueshard.plans import Plan


@contextlib.contextmanager
def following(recorder: Recorder, model: nn.Module, plan: Plan) -> Iterator[None]:
    """Keep ``recorder.place`` at the unit that runs."""
    root = names.unwrap(model)
    modules = dict(names.named_modules(root))
    unit_of = {modules[name]: unit.name for unit in plan.units for name in unit.modules}
    follower = _Follower(recorder, unit_of)
    handles = [
        nn.modules.module.register_module_forward_pre_hook(follower.begins),
        nn.modules.module.register_module_forward_hook(follower.ends, always_call=True),
    ]
    for module, name in unit_of.items():
        if isinstance(module, _torch.ShardedModule):
            _torch.watch_communication(module, functools.partial(follower.communicates, name), follower.done)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Follower:
    """Knows which unit runs, from the hooks that modules and their outputs call."""

    def __init__(self, recorder: Recorder, unit_of: Mapping[nn.Module, str]) -> None:
        self.recorder = recorder
        self.unit_of = unit_of
        self._around: list[str] = []
        self._before: list[tuple[str | None, Stream, Place]] = []

    def begins(self, module: nn.Module, args: Any) -> None:
        if module in self.unit_of:
            self._around.append(self.recorder.place.unit)
            self._go(self.unit_of[module])

    def ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if module not in self.unit_of or not self._around:
            return
        name = self.unit_of[module]
        if torch.is_grad_enabled() and not _torch.in_backward():
            for tensor in _torch.tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _, name=name: self._go(name))
        self._go(self._around.pop())

    def communicates(self, name: str, what: str) -> None:
        self._before.append((self.recorder.unit, self.recorder.stream, self.recorder.place))
        self.recorder.unit = name
        if what in ("post_forward", "post_backward"):
            self._go(name)
        self.recorder.stream = "all_gather" if what == "unshard" else "compute"

    def done(self) -> None:
        self.recorder.unit, self.recorder.stream, self.recorder.place = self._before.pop()

    def _go(self, unit: str) -> None:
        self.recorder.place = Place(self.recorder.place.phase, unit)
