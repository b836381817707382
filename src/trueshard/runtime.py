"""What happens around a sharded model's forward and backward, beside FSDP2's own hooks.

- A *pass* is one use of the model: its forward, or another method, or a submodule called from outside. All of them
  gather what they need and register for backward, since FSDP2 itself knows only ``forward``.
- Before a pass: leftovers of one that an exception cut short are cleared, and a thawed parameter is taken notice of.
- After a pass without gradients every unit is freed, and before a pass every unit whose shards were written to. FSDP2
  would keep the root gathered until the next backward, and compute with old values after a step or a swap of weights.
- In backward: gradients of replicated parameters are averaged, and a double backward finds its parameters gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trueshard import _torch, names
from trueshard._torch import ShardedModule
from trueshard.gradients import GradientHooks
from trueshard.optim.rebind import shard_like
from trueshard.plans import Plan
from trueshard.replicated import ReplicatedGradients
from trueshard.second_backward import SecondBackward
from trueshard.snapshot import Trace
from trueshard.usage import Usage

KEY = "_trueshard"


_Unit = tuple[ShardedModule, list[nn.Parameter]]
"""A unit's first module and its sharded parameters."""


class Runtime:
    """The sharded model's own record; one for each ``shard()``, kept on the root module."""

    def __init__(self, root: ShardedModule, plan: Plan, mesh: DeviceMesh, replicated: ReplicatedGradients) -> None:
        self.root = root
        self.plan = plan
        self.mesh = mesh
        self.meshes: dict[Any, DeviceMesh] = {}
        self.replicated = replicated
        self.usage = Usage(mesh)
        self.units: list[_Unit] = []
        """In the plan's order."""
        self.gathered: Callable[[], list[ShardedModule]] = list
        """Tells which units are gathered now."""
        self._parameters_of: dict[ShardedModule, list[nn.Parameter]] = {}
        self.hooked: list[ShardedModule] = []
        """Units with a parameter on which the user set a gradient hook: they reduce in every backward."""
        self.accumulating = False
        """Gradients add up on each rank without being reduced."""
        self.trace: Trace | None = None
        self.depth = 0
        """How many passes are on, one inside another."""
        self.gathering = False
        self._gathered_at_end: list[ShardedModule] = []
        """Units that the last pass with gradients left gathered for its backward."""
        self.kept = 0
        """How many methods are running whose passes share what they gather."""
        self._versions: dict[ShardedModule, int] = {}
        self._gathered_versions: dict[torch.Tensor, int] = {}
        self._buffers_made = False
        self._hooks: dict[int, tuple[torch.Tensor, GradientHooks]] = {}
        self._gathered_before: set[ShardedModule] = set()
        self._trainable: list[bool] = []
        self._running = False
        self._second = SecondBackward(root, self.free)

    def install(self) -> None:
        """Put the hooks on the root. Called after every ``fully_shard``."""
        root: Any = self.root
        root.__dict__[KEY] = self
        self.gathered = _torch.gathered_units(module for module, _ in self.units)
        self._parameters_of = dict(self.units)
        self._trainable = self._trainability()
        self._adopt_hooks()
        root.register_load_state_dict_pre_hook(self._shard_loaded)
        root.__dict__["set_requires_gradient_sync"] = self._set_gradient_sync
        begin, end = torch.compiler.disable(self.begin), torch.compiler.disable(self.end)
        root.register_forward_pre_hook(lambda *_: begin(), prepend=True)
        root.register_forward_hook(lambda _module, _args, output: end(output))
        root.register_forward_hook(lambda *_: self.leave(), always_call=True)

    def _version(self, module: ShardedModule) -> int:
        return sum(map(_torch.version, self._parameters_of[module]))

    def _set_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """torch's setter; but a gradient hook means the global gradient, so hooked parameters reduce every time."""
        type(self.root).set_requires_gradient_sync(self.root, requires_gradient_sync, recurse=recurse)
        self.accumulating = not requires_gradient_sync
        for module in self.hooked:
            type(module).set_requires_gradient_sync(module, True, recurse=False)

    def _shard_loaded(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """A state dict of whole tensors, the same on every rank, loads like one of shards."""
        for name, _holder, _attribute, parameter in names.named_tensors(module, "parameters"):
            value = state_dict.get(prefix + name)
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
                continue
            if value.shape == parameter.shape:  # torch itself reports the others
                state_dict[prefix + name] = shard_like(value, parameter)

    # Around a pass

    def begin(self) -> None:
        """A pass begins; ``leave`` must follow."""
        if self.depth == 0 and not _torch.in_backward():
            if not _torch.is_initialised(self.root):  # was on the meta device
                _torch.initialise(self.root)
            if _torch.interrupted(self.root):
                _torch.reset_iteration(self.root)
                self.replicated.forget()
                self.usage.forget()
                self._put_back()
            self._second.free()
            gathered = self.gathered()
            self._take_over_writes(gathered)
            self._free_changed(gathered)
            if torch.is_inference_mode_enabled() and not self._buffers_made:
                self._make_buffers()
            if (now := self._trainability()) != self._trainable:
                self._trainable = now
                self._thaw()
            self._adopt_hooks()
            # What an earlier pass left gathered waits for its backward: a pass without gradients leaves it so.
            self._gathered_before = set(self.gathered()) if gathered else set()
        self.depth += 1

    def leave(self) -> None:
        """A pass is over, well or not."""
        self.depth = max(0, self.depth - 1)
        if self.depth == 0 and not self.kept and not torch.is_grad_enabled() and not _torch.in_backward():
            self.free_but(self._gathered_before)

    def end(self, output: Any) -> None:
        """A pass has its ``output``."""
        if torch.is_grad_enabled():
            for tensor in _torch.tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._in_backward)
        gathered = self.gathered()
        for module in gathered:
            self._versions[module] = self._version(module)
        if torch.is_grad_enabled():
            self._gathered_at_end = gathered
            for module in gathered:
                for _, _, parameter in _torch.gathered_parameters(module, recurse=False):
                    self._gathered_versions[parameter] = parameter._version

    def _take_over_writes(self, modules: list[ShardedModule]) -> None:
        """What was written to gathered parameters since the last pass is written to the shards; so is a thaw."""
        for module in modules:
            for _, sharded, gathered in _torch.gathered_parameters(module, recurse=False):
                if gathered.requires_grad != sharded.requires_grad:
                    sharded.requires_grad_(gathered.requires_grad)
                if self._gathered_versions.get(gathered, gathered._version) != gathered._version:
                    assert isinstance(sharded, DTensor)
                    with torch.no_grad():
                        _torch.local(sharded).copy_(_torch.local(shard_like(gathered, sharded)))

    def _make_buffers(self) -> None:
        """FSDP2 makes its buffers at the first gathering; made in inference mode they could never be trained with."""
        self._buffers_made = True
        gathered = self.gathered()
        with torch.inference_mode(False):
            for module, _ in self.units:
                if module not in gathered:
                    module.unshard()
                    module.reshard()

    def _free_changed(self, modules: list[ShardedModule]) -> None:
        """A pass that no backward followed left units gathered; free those whose shards were written to since."""
        for module in modules:
            if self._versions.get(module) != self._version(module):
                module.reshard()

    def free(self) -> None:
        """Free every gathered parameter."""
        self.free_but(())

    def free_but(self, kept: Collection[ShardedModule]) -> None:
        """Free the gathered parameters of all units but ``kept``."""
        for module, _ in self.units:
            if module not in kept:
                module.reshard()

    def _trainability(self) -> list[Any]:
        return [(p.requires_grad, p.dtype) for _, parameters in self.units for p in parameters]

    def _thaw(self) -> None:
        """``requires_grad`` or a dtype changed since the last pass: FSDP2 reads both only once."""
        self.free()
        for unit, (module, parameters) in zip(self.plan.units, self.units, strict=True):
            dtypes = {parameter.dtype for parameter in parameters if parameter.requires_grad}
            if len(dtypes) > 1:
                shown = " and ".join(sorted(str(dtype) for dtype in dtypes))
                raise RuntimeError(
                    f"unit {unit.name or '(root)'!r} now has trainable parameters of {shown}, which FSDP2 cannot "
                    "reduce together: set requires_grad before shard(), so that they become units of their own"
                )
            _torch.forget_gathered(module)
        _torch.refresh_dtypes(self.root)

    # In backward

    def _in_backward(self, grad: torch.Tensor) -> None:
        """The gradient of an output of the model is there: a backward begins, or goes on."""
        if torch.is_grad_enabled():
            self._second.keep()
        if not self._running:
            for module in self._gathered_at_end:
                module.unshard()  # again, if state_dict() or the backward of another pass freed it
        self.in_backward()

    def in_backward(self) -> None:
        """Once a backward: hooks are made ready, and what must be done at its end is asked for."""
        if not self._running:
            self._running = True
            for parameter, hooks in self._hooks.values():
                hooks.set_aside(parameter)
            self.usage.begin()
            _torch.at_end_of_backward(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._put_back()
        self.replicated.reduce(only_hooked=self.accumulating)
        if not self.accumulating:
            self.usage.end()

    def _put_back(self) -> None:
        self._running = False
        for parameter, hooks in self._hooks.values():
            hooks.put_back(parameter)

    # Hooks and readers

    def call_hooks(self, parameter: torch.Tensor, hooks: GradientHooks, unit: ShardedModule) -> None:
        """From now on, call ``hooks`` when the gradient of the sharded ``parameter`` of ``unit`` is reduced."""
        self._hooks[id(parameter)] = parameter, hooks
        trainable = parameter.requires_grad
        # torch takes such hooks on trainable tensors only; a frozen one may be thawed later.
        handle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(hooks)
        parameter.requires_grad_(trainable)
        _torch.call_first(parameter, handle)
        if unit not in self.hooked:
            self.hooked.append(unit)

    def _adopt_hooks(self) -> None:
        """Hooks that were set on shards after ``shard()``: autograd never calls those, for FSDP2 writes gradients."""
        for unit, parameters in self.units:
            for parameter in parameters:
                if parameter._backward_hooks and id(parameter) not in self._hooks:
                    hooks = GradientHooks(parameter, gathers=True)
                    hooks.after = None  # FSDP2 calls those itself
                    self.call_hooks(parameter, hooks, unit)

    def gather_for_reader(self, module: ShardedModule) -> None:
        """Someone reads a unit's parameter outside its forward: gather it now, and from now on keep it to the end.

        The unit's own hooks know nothing of this use, so they would neither free it after nor gather it for backward.
        """
        self.gathering = True
        try:
            module.unshard()
        finally:
            self.gathering = False
        _torch.set_reshard_after_forward(module, False, self.meshes)


def runtime_of(model: nn.Module) -> Runtime | None:
    """The record that ``shard()`` left on ``model``, or None."""
    found = model.__dict__.get(KEY)
    return found if isinstance(found, Runtime) else None
