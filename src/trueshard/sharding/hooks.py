"""Hooks around a sharded model's forward and backward, beside FSDP2's own.

What a model is doing is the list ``Runtime.states``, outermost first; empty: idle.

- ``PASS``: a forward, another method that computes, or a submodule called from outside. Passes nest. Each gathers what
  it needs and registers for backward, since FSDP2 itself knows only ``forward``.
- ``SHARED``: a method such as ``generate``, whose passes share what they gather; it is freed at the method's end.
- ``READ``: a unit is being gathered because somebody reads its parameter outside its forward.
- ``BACKWARD``: gradients are being computed. Ends in a callback of autograd, or at the next pass after an exception.
- ``DOUBLE``: from a backward with ``create_graph=True`` until a shard is written to, as the optimizer's step does. The
  graph of that backward holds gathered parameters, so their memory is not freed, whatever runs in between.

Before a pass, what an exception cut short is cleared, writes to gathered parameters go to their shards, units whose
shards were written to are freed (FSDP2 would keep the root gathered and compute with old values), and newly unfrozen
parameters are detected. After a pass without gradients every unit is freed. At the end of a backward, gradients of
replicated parameters are averaged, and those of copies on other stages of a pipeline are added up. The schedule of a
pipeline runs a backward for each microbatch without reducing, and reduces after the last one, outside of backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard._torch import ShardedModule
from trueshard.distributed import Axes
from trueshard.model import names
from trueshard.model.names import Held
from trueshard.model.snapshot import Trace
from trueshard.optim import stepping
from trueshard.optim.rebind import shard_like
from trueshard.optim.ties import Tie
from trueshard.plans import Plan
from trueshard.sharding.exact import ExactSums, set_apart
from trueshard.sharding.gradients import GradientHooks, Usage, call_after_gradient
from trueshard.sharding.replicated import (
    WholeParameter,
    average_gradients,
    forget_removed,
    refuse_removed,
    settle_added,
)

KEY = "_trueshard"


class State(enum.Enum):
    """What a sharded model is doing; the file's docstring is the glossary."""

    PASS = enum.auto()
    SHARED = enum.auto()
    READ = enum.auto()
    BACKWARD = enum.auto()
    DOUBLE = enum.auto()


class Runtime:
    """The record of one ``shard()``, kept on the root module."""

    def __init__(self, root: ShardedModule, plan: Plan, axes: Axes) -> None:
        self.root, self.plan, self.axes = root, plan, axes
        self.mesh = mesh = axes.data
        """Ranks over which gradients are averaged."""
        self.replicated: list[WholeParameter] = []
        """Parameters that every rank holds whole, in the same order on every rank."""
        self.usage = Usage(mesh)
        self.exact = ExactSums(mesh, plan.exact) if plan.exact else None
        """Present if gradients are to be the same bits at any number of ranks."""
        self.meshes: dict[Any, DeviceMesh] = {}
        """Smaller meshes, for units that reshard to a number of ranks."""
        self.units: dict[ShardedModule, list[nn.Parameter]] = {}
        """A unit's first module → its sharded parameters, in the plan's order."""
        self.numbers: dict[nn.Module, int] = {}
        """A module of a unit → the unit's place in the plan."""
        self.gathered: Callable[[], list[ShardedModule]] = list
        """Return the units that are gathered now."""
        self.hooked: set[ShardedModule] = set()
        """Units with a parameter on which the user set a gradient hook: they reduce in every backward."""
        self.added: list[WholeParameter] = []
        """Parameters that the user added since the last pass."""
        self.places: list[tuple[dict[str, nn.Parameter | None], str, str]] = []
        """Of each sharded parameter: the registry that holds it, its attribute, and its name."""
        self.ties: list[Tie] = []
        """Parameters of which other stages of a pipeline hold copies, in the same order on all of them."""
        self.accumulating = False
        """True while gradients add up on each rank without being reduced: the user's setting, not a state."""
        self.changes: Trace | None = None  # that ``shard()`` made to modules; None until all are made
        self.states: list[State] = []
        self._gathered_before: set[ShardedModule] = set()
        """Units that were gathered when the outermost pass began."""
        self._gathered_at_end: list[ShardedModule] = []
        """Units that the last pass with gradients left gathered for its backward."""
        self._versions: dict[ShardedModule, int] = {}
        """Of a unit's shards when they were gathered."""
        self._gathered_versions: dict[torch.Tensor, int] = {}
        """Of gathered parameters at the end of a pass."""
        self._hooks: dict[int, tuple[torch.Tensor, GradientHooks]] = {}
        self._trainable: list[Any] = []
        self._inference_buffers = False
        """True once FSDP2's buffers were made outside inference mode."""
        self._double = contextlib.ExitStack()
        """Closing it ends a double backward, or gives it up; nothing happens if none is on."""
        self._version_of_double = 0
        """Sum of the versions of all shards when the last double backward began."""

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype that the plan casts parameters to for computing; None: as they are stored."""
        mixed = self.plan.mixed_precision
        return getattr(torch, mixed.compute) if mixed and mixed.compute else None

    def is_in(self, *states: State) -> bool:
        return any(state in self.states for state in states)

    def _leave_state(self, state: State) -> None:
        """Remove the innermost ``state``, if it is on."""
        for i in reversed(range(len(self.states))):
            if self.states[i] is state:
                del self.states[i]
                return

    def install(self) -> None:
        """Put the hooks on the root. Called after every ``fully_shard``."""
        root: Any = self.root
        root.__dict__[KEY] = self
        self.gathered = _torch.gathered_units(self.units)
        _torch.call_before_backward(self.units, self._begin_double_backward)
        _torch.call_after_schedule(self.root, self._end_schedule)
        _torch.follow_views(root)
        _torch.keep_dynamo_out(self.units)
        self._trainable = self._trainability()
        self._adopt_hooks()
        if self.exact is not None:
            self.exact.install((unit.name, module) for unit, module in zip(self.plan.units, self.units, strict=True))
            self.exact.name((name, tensor) for name, _, _, tensor in names.named_tensors(root, "parameters"))
        root.register_load_state_dict_pre_hook(self._shard_loaded)
        root.__dict__["set_requires_gradient_sync"] = self._set_gradient_sync
        begin, end = torch.compiler.disable(self.begin), torch.compiler.disable(self.end)
        root.register_forward_pre_hook(lambda *_: begin(), prepend=True)
        root.register_forward_hook(lambda _module, _args, output: end(output))
        root.register_forward_hook(lambda *_: self.leave(), always_call=True)

    def _version(self, module: ShardedModule) -> int:
        return sum(map(_torch.version, self.units[module]))

    def _set_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set as torch's setter does, but let units with a gradient hook, which means the global one, always reduce."""
        if self.exact is not None and self.hooked and not requires_gradient_sync:
            raise RuntimeError(
                "exact=True: parameters have gradient hooks, which are called with the reduced gradient of each "
                "microbatch, and those do not add up exactly; remove the hooks, or take one microbatch a rank"
            )
        type(self.root).set_requires_gradient_sync(self.root, requires_gradient_sync, recurse=recurse)
        self.accumulating = not requires_gradient_sync
        for module in self.hooked:
            type(module).set_requires_gradient_sync(module, True, recurse=False)

    def _shard_loaded(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Cut the whole tensors of a state dict, the same on every rank, into shards."""
        for name, _holder, _attribute, parameter in names.named_tensors(module, "parameters"):
            value = state_dict.get(prefix + name)
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
                continue
            if value.shape == parameter.shape:  # torch itself reports the others
                state_dict[prefix + name] = shard_like(value, parameter)

    # Around a pass

    def begin(self) -> None:
        """Begin a pass; ``leave`` must follow."""
        if not self.is_in(State.PASS) and not _torch.in_backward():
            self._begin_outermost()
        self.states.append(State.PASS)

    def _begin_outermost(self) -> None:
        if _torch.refuses_transforms():
            raise RuntimeError(
                f"torch {torch.__version__} cannot gather parameters inside a transform of torch.func (jvp, vmap, …): "
                "use torch.autograd.forward_ad, or torch 2.13 or newer"
            )
        _torch.initialise(self.root)  # nothing, but for a model that was on the meta device
        if _torch.interrupted(self.root):
            _torch.reset_iteration(self.root)
            self.drop_unreduced()
            self._end_state_of_backward()
            self._double.close()
        if self.is_in(State.DOUBLE) and self._version_of_double != sum(map(self._version, self.units)):
            self._double.close()
        forget_removed(self)
        refuse_removed(self)
        if self.added:
            settle_added(self)
        gathered = self.gathered()
        self._write_back(gathered)
        for module in gathered:
            if self._versions.get(module) != self._version(module):
                module.reshard()
        if torch.is_inference_mode_enabled() and not self._inference_buffers:
            self._make_buffers()
        if (now := self._trainability()) != self._trainable:
            self._trainable = now
            self._refresh_trainable()
        self._adopt_hooks()
        # What an earlier pass left gathered waits for its backward: a pass without gradients leaves it so.
        self._gathered_before = set(self.gathered()) if gathered else set()

    def leave(self) -> None:
        self._leave_state(State.PASS)
        if not self.is_in(State.PASS, State.SHARED) and not torch.is_grad_enabled() and not _torch.in_backward():
            self.free(self._gathered_before)

    def end(self, output: Any) -> None:
        """Register the ``output`` of a pass for backward, and remember the versions of what is gathered."""
        if torch.is_grad_enabled():
            for tensor in _torch.tensors_in(output):
                if tensor.requires_grad:
                    _torch.call_with_gradient(tensor, self._output_gradient)
        gathered = self.gathered()
        for module in gathered:
            self._versions[module] = self._version(module)
        if torch.is_grad_enabled():
            self._gathered_at_end = gathered
            for _, _, parameter in _torch.gathered_parameters(gathered):
                self._gathered_versions[parameter] = _torch.version(parameter)

    def share_passes_in(self, method: str) -> None:
        """Make passes inside ``method`` of the root (a ``generate``) keep what the plan keeps, to the method's end."""
        function = getattr(self.root, method)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before = set(self.gathered())
            self.states.append(State.SHARED)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave_state(State.SHARED)
                if not self.is_in(State.SHARED, State.PASS):
                    self.free(before)

        self.root.__dict__[method] = call

    def _write_back(self, modules: list[ShardedModule]) -> None:
        """Copy to the shards what was written to gathered parameters since the last pass, ``requires_grad`` too."""
        for _, sharded, gathered in _torch.gathered_parameters(modules):
            if gathered.requires_grad != sharded.requires_grad:
                sharded.requires_grad_(gathered.requires_grad)
            version = _torch.version(gathered)
            if self._gathered_versions.get(gathered, version) != version:
                assert isinstance(sharded, DTensor)
                with torch.no_grad():
                    _torch.local(sharded).copy_(_torch.local(shard_like(gathered, sharded)))

    def _make_buffers(self) -> None:
        """Gather each unit once: buffers that FSDP2 made in inference mode could never be trained with."""
        self._inference_buffers = True
        gathered = self.gathered()
        with torch.inference_mode(False):
            for module in self.units:
                if module not in gathered:
                    module.unshard()
                    module.reshard()

    def free(self, kept: Collection[ShardedModule] = ()) -> None:
        """Free the gathered parameters of all units but ``kept``."""
        for module in self.units:
            if module not in kept:
                module.reshard()

    def _trainability(self) -> list[Any]:
        return [(p.requires_grad, p.dtype) for parameters in self.units.values() for p in parameters]

    def _refresh_trainable(self) -> None:
        """Let FSDP2 read ``requires_grad`` and dtypes again, which it does only once."""
        self.free()
        for unit, parameters in zip(self.plan.units, self.units.values(), strict=True):
            dtypes = {parameter.dtype for parameter in parameters if parameter.requires_grad}
            if len(dtypes) > 1:
                shown = " and ".join(sorted(str(dtype) for dtype in dtypes))
                raise RuntimeError(
                    f"unit {unit.name or '(root)'!r} now has trainable parameters of {shown}, which FSDP2 cannot "
                    "reduce together: set requires_grad before shard(), so that they become units of their own"
                )
        _torch.refresh_dtypes(self.root)

    # In backward

    def _output_gradient(self, _: torch.Tensor | None) -> None:
        """Autograd has the gradient of a pass's output: a backward begins, or goes on."""
        self._begin_double_backward()
        if not self.is_in(State.BACKWARD):
            for module in self._gathered_at_end:
                module.unshard()  # again, if state_dict() or the backward of another pass freed it
        self.begin_backward()

    def begin_backward(self, *_: Any) -> None:
        """Once a backward: make hooks ready, and ask for a call at its end."""
        if not self.is_in(State.BACKWARD):
            self.states.append(State.BACKWARD)
            for parameter, hooks in self._hooks.values():
                hooks.set_aside(parameter)
            for tie in self.ties:
                tie.set_aside()
            self.usage.begin()
            if self.exact is not None:
                self._begin_exact(self.exact)
            _torch.at_end_of_backward(self._end_backward)

    def _begin_exact(self, exact: ExactSums) -> None:
        leaves = self.in_graph()
        parameters = [parameter for parameter, _ in leaves]
        if not exact.knows(parameters):  # units are gathered now, so modules do not show their shards
            exact.name((name, sharded) for name, sharded, _, _ in _torch.sharded_places(self.root))
        exact.refuse_earlier(parameters)
        is_sum = self.mesh.size() > 1 or self.accumulating or self.has_unreduced()
        exact.begin(leaves, is_sum=is_sum)

    def _end_backward(self) -> None:
        self._end_state_of_backward()
        if self.accumulating and self.exact is not None:
            set_apart(self.replicated)
        if self.accumulating:
            average_gradients(self.replicated, self.mesh, only_hooked=True)
            stepping.set_unreduced(self.root, self.drop_unreduced)
        else:
            self._gradients_reduced()
            if self.ties:  # whose gradients a schedule adds up, or zero_grad() drops
                stepping.set_unreduced(self.root, self.drop_unreduced)

    def _gradients_reduced(self) -> None:
        """Do after FSDP2 has reduced its gradients what it leaves out."""
        average_gradients(self.replicated, self.mesh, only_hooked=False, exact=self.exact)
        stepping.set_unreduced(self.root, None)
        self.usage.end()
        if self.exact is not None:
            self.exact.end()

    def _end_schedule(self) -> None:
        """A schedule has run all backwards of a step, and reduced; not so a backward by which it finds out shapes."""
        self._gradients_reduced()
        for tie in self.ties:
            tie.add_up()

    def drop_unreduced(self, of: Collection[int] | None = None) -> None:
        """Drop gradients that are summed on this rank and not reduced; ``of``: those of parameters with these ids."""
        _torch.drop_unreduced(self.root, of)
        for whole in self.replicated:
            if of is None or id(whole.parameter) in of:
                whole.leaf.grad = whole.summed = None
        for tie in self.ties:
            if of is None:
                tie.put_back()
            elif id(tie.parameter) in of:
                tie.forget()
        if of is None or not self.has_unreduced():
            self.usage.forget()
            if self.exact is not None:
                self.exact.forget()
            stepping.set_unreduced(self.root, None)

    def _end_state_of_backward(self) -> None:
        self._leave_state(State.BACKWARD)
        for parameter, hooks in self._hooks.values():
            hooks.put_back(parameter)

    def _begin_double_backward(self) -> None:
        """Keep parameters gathered from now on: a backward has ``create_graph=True``."""
        if not torch.is_grad_enabled() or self.is_in(State.DOUBLE):
            return
        self.states.insert(0, State.DOUBLE)
        self._double.callback(self._leave_state, State.DOUBLE)
        self._version_of_double = sum(map(self._version, self.units))
        self._double.callback(_torch.keep_gathered(self.root))
        for _, _, gathered in _torch.gathered_parameters(self.root.modules()):
            if gathered.requires_grad:
                self._double.callback(call_after_gradient(gathered, self._second_gradient).remove)

    def _second_gradient(self, _: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) leaves gradients that have a graph themselves, and ranks cannot average "
                "those: use torch.autograd.grad(outputs, inputs, create_graph=True), then backward() on what follows"
            )

    def in_graph(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return each parameter with the leaf that stands for it in the graph of a forward."""
        gathered = [(sharded, leaf) for _, sharded, leaf in _torch.gathered_parameters(self.root.modules())]
        return gathered + [(whole.parameter, whole.leaf) for whole in self.replicated]

    def has_unreduced(self) -> bool:
        return _torch.has_unreduced(self.root) or any(
            whole.leaf.grad is not None or whole.summed is not None for whole in self.replicated
        )

    # Hooks and readers

    def call_hooks(self, parameter: torch.Tensor, hooks: GradientHooks, unit: ShardedModule) -> None:
        """From now on, call ``hooks`` when the gradient of the sharded ``parameter`` of ``unit`` is reduced."""
        self._hooks[id(parameter)] = parameter, hooks
        trainable = parameter.requires_grad
        # torch takes such hooks on trainable tensors only; a frozen one may be unfrozen later.
        handle = call_after_gradient(parameter.requires_grad_(True), hooks.reduced)
        parameter.requires_grad_(trainable)
        _torch.call_first(parameter, handle)
        self.hooked.add(unit)

    def hold_whole(self, held: Held, unit: ShardedModule) -> WholeParameter:
        """From now on, hold a parameter of ``unit`` whole on every rank, and average its gradient."""
        whole = WholeParameter(held, self.mesh, self.compute_dtype, self.begin_backward)
        whole.computing = lambda: (
            torch.compiler.is_compiling() or self.is_in(State.PASS) or _torch.in_backward() or _torch.in_pass(unit)
        )
        self.replicated.append(whole)
        return whole

    def _adopt_hooks(self) -> None:
        """Take over hooks set on shards after ``shard()``: FSDP2 writes their gradients, so autograd calls none."""
        for unit, parameters in self.units.items():
            for parameter in parameters:
                if _torch.gradient_hooks(parameter)[0] and id(parameter) not in self._hooks:
                    hooks = GradientHooks(parameter, gathers=True)
                    hooks.after = None  # FSDP2 calls those itself
                    self.call_hooks(parameter, hooks, unit)

    def gather_for_reader(self, module: ShardedModule) -> None:
        """Gather a unit whose parameter is read outside its forward, and from now on keep it to the end of backward.

        The unit's own hooks know nothing of this use, so they would neither free it after nor gather it for backward.
        The plan shows the unit's new policy, and a warning says it.
        """
        number = self.numbers[module]
        units = list(self.plan.units)
        if (policy := units[number].reshard_after_forward) is not False:
            warnings.warn(
                f"a parameter of unit {units[number].name!r} is read outside its forward, so the unit stays gathered "
                f"from there to the end of backward, not reshard_after_forward={policy!r} as planned",
                stacklevel=3,
            )
            units[number] = dataclasses.replace(units[number], reshard_after_forward=False)
            self.plan = dataclasses.replace(self.plan, units=tuple(units))
        self.states.append(State.READ)
        try:
            module.unshard()
        finally:
            self._leave_state(State.READ)
        _torch.set_reshard_after_forward(module, False, self.meshes)


def runtime_of(model: nn.Module) -> Runtime | None:
    """Return the record that ``shard()`` left on ``model``, or None."""
    found = model.__dict__.get(KEY)
    return found if isinstance(found, Runtime) else None
