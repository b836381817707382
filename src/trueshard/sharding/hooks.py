"""Hooks around a sharded model's forward and backward, beside FSDP2's own.

What a model is doing is the list ``Runtime.states``, outermost first; empty: idle.

- ``PASS``: a forward, another method that computes, or a submodule called from outside. Passes nest. Each gathers what
  it needs and registers for backward, since FSDP2 itself knows only ``forward``.
- ``SHARED``: a method such as ``generate``, whose passes share what they gather; it is freed at the method's end.
- ``READ``: a unit is being gathered because somebody reads its parameter outside its forward.
- ``BACKWARD``: gradients are being computed. Ends in a callback of autograd, or at the next pass after an exception.
- ``DOUBLE``: from a backward with ``create_graph=True`` until a shard is written to, as the optimizer's step does. The
  graph of that backward holds gathered parameters, so their memory is not freed, whatever runs in between.

``[Note: Order of hooks]`` Ours begin before FSDP2's and end after them. ``begin`` is the first pre-hook of the root: it
must free outdated units before FSDP2 decides what to gather. ``end`` is a forward hook behind FSDP2's, which has
registered its own hooks on the output by then; so in backward FSDP2's are called first for a tensor, and ours for the
pass. ``leave`` is called always, since an exception skips all other forward hooks.

``[Note: After an exception]`` Nothing tells that a forward or backward was cut short: autograd drops its callbacks, and
FSDP2 keeps a state of the middle. So each outermost pass looks first, resets FSDP2, and drops half-summed gradients.

At the end of a backward, gradients of replicated parameters are averaged, and those of copies on other stages of a
pipeline are added up. The schedule of a pipeline runs a backward for each microbatch without reducing, and reduces
after the last one, outside of backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import weakref
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard._torch import ShardedModule
from trueshard.distributed import Axes
from trueshard.errors import TrueShardRuntimeError, warn_user
from trueshard.model import names
from trueshard.model.names import Held
from trueshard.model.registry import ShardedModel
from trueshard.model.snapshot import Trace
from trueshard.optim.rebind import shard_like
from trueshard.plans import MixedPrecision, Plan
from trueshard.sharding.accumulation import Accumulation
from trueshard.sharding.exact import ExactSums
from trueshard.sharding.gathered_units import GatheredUnits
from trueshard.sharding.gradients import HookedParameters, Usage, call_after_gradient
from trueshard.sharding.meeting import meet_to_gather
from trueshard.sharding.replicated import WholeParameter, average_gradients

KEY = "_trueshard"
"""Attribute of a root module that holds its ``Runtime``, and so keeps it alive."""


class State(enum.Enum):
    """State of a sharded model; the file's docstring is the glossary."""

    PASS = enum.auto()
    SHARED = enum.auto()
    READ = enum.auto()
    BACKWARD = enum.auto()
    DOUBLE = enum.auto()


class Runtime(ShardedModel):
    """The record of one ``shard()``, kept on the root module.

    What it is made of: ``plan`` and ``axes`` say how the model is sharded; ``units``, ``homes`` and ``replicated`` what
    FSDP2 made of it; ``memory`` follows what is gathered; ``hooks``, ``usage`` and ``exact`` take part in a backward.
    """

    root: ShardedModule

    def __init__(self, root: Any, plan: Plan, axes: Axes) -> None:
        super().__init__(root)
        self.plan, self.axes = plan, axes
        self.mesh = mesh = axes.data
        """Ranks over which gradients are averaged."""
        self.units: dict[ShardedModule, list[nn.Parameter]] = {}
        """A unit's first module → its sharded parameters, in the plan's order. Filled once every unit is sharded."""
        self.homes: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        """Each module of the model, those assigned later too → the place of its unit in the plan."""
        self.smaller_meshes: dict[Any, DeviceMesh] = {}
        """Meshes of units that reshard to a number of ranks: kept, so that a number makes its process groups once."""
        self.replicated: list[WholeParameter] = []
        """Parameters that every rank holds whole, in the same order on every rank."""
        self.added: list[WholeParameter] = []
        """Whole parameters that the user added since the last pass, on which ranks have not agreed yet."""
        self.before_pass: list[Callable[[], None]] = []
        """Called before each outermost pass, behind what resets FSDP2 and before what reads its parameters."""
        self.after_pass: list[Callable[[], None]] = []
        """Called after each outermost pass, also one that an exception ended."""
        self.memory = GatheredUnits({})
        """Follows what is gathered; made anew in ``install``, when ``units`` is filled."""
        self.hooks = HookedParameters()
        """Gradient hooks of the user."""
        self.usage = Usage(mesh)
        """Tracks the parameters that a backward reached on this rank."""
        self.sums = Accumulation(self.usage)
        """Adds up the gradients of microbatches."""
        self.exact = ExactSums(mesh, plan.exact, self.exact_names) if plan.exact else None
        """Present if gradients are to be the same bits at any number of ranks."""
        self.watch: Any = None
        """``Watch`` of what ranks hold in common, if there is more than one and ``plan.watch`` asks for it."""
        self.batch_trial: Any = None
        """``BatchTrial`` on the first of the ranks that share a batch, unless ``plan.trial`` is False."""
        self.changes: Trace | None = None
        """Changes of ``shard()`` to modules, which a copy undoes; None until all are made."""
        self.states: list[State] = []
        """See the file's glossary. A list, since passes nest and a backward may recompute a pass."""
        self._trainable: list[Any] = []
        """``requires_grad`` and dtype of each parameter, as FSDP2 has read them."""
        self._made_buffers = False
        """True once FSDP2's buffers were made outside inference mode."""
        self._double = contextlib.ExitStack()
        """Closing it ends a double backward, or gives it up; nothing happens if none is on."""
        self._version_of_double = 0
        """Version of all shards when the last double backward began."""

    @property
    def accumulating(self) -> bool:
        """True while backwards do not end a step's gradients."""
        return self.sums.is_on

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype that the plan casts parameters to for computing; None: as they are stored."""
        mixed = self.plan.mixed_precision
        return getattr(torch, mixed.compute) if mixed and mixed.compute else None

    def unit(self, number: int) -> ShardedModule:
        """Return the first module of a unit by its place in the plan."""
        return list(self.units)[number]

    def parameters(self) -> list[torch.Tensor]:
        sharded = [parameter for _, parameter, _, _ in _torch.sharded_places(self.root)]
        return [*sharded, *(whole.parameter for whole in self.replicated if whole.places)]

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
        self.memory = GatheredUnits(self.units)
        self.after_step.append(lambda _: self.memory.stepped())
        self.meshes |= {p.device_mesh for p in self.parameters() if isinstance(p, DTensor)}
        self.meshes |= set(self.smaller_meshes.values())  # between forward and backward, with an integer policy
        _torch.call_before_backward(self.units, self._begin_double_backward)
        _torch.call_after_schedule(self.root, self._end_schedule)
        _torch.follow_views(root)
        _torch.follow_accumulation(self.units, self.sums)
        _torch.keep_dynamo_out(self.units)
        self._trainable = self._trainability()
        self.hooks.adopt(self.units)
        for unit, module in zip(self.plan.units, self.units, strict=True):
            reduce = self._reduce_dtype(self.units[module])
            if self.mesh.size(-1) > 1 and reduce is not None:
                self.sums.add(module, self.units[module], unit.accumulate_gradients, reduce)
            if self.exact is not None or self.sums.widens(module):
                module.set_all_reduce_hook(functools.partial(self._reduced, module, unit.name))
        if self.exact is not None:
            self.exact.install(self.units)
            self.before_reading.append(self.exact.read)
            self.exact.name((name, tensor) for name, _, _, tensor in names.named_tensors(root, "parameters"))
        root.register_load_state_dict_pre_hook(_shard_loaded)
        root.__dict__["set_requires_gradient_sync"] = self._set_gradient_sync
        begin, end = torch.compiler.disable(self.begin), torch.compiler.disable(self.end)
        root.register_forward_pre_hook(  # [Note: Order of hooks]
            lambda _, args, kwargs: begin("forward", args, kwargs), prepend=True, with_kwargs=True
        )
        root.register_forward_hook(lambda _module, _args, output: end(output))
        root.register_forward_hook(lambda *_: self.leave(), always_call=True)

    def _reduce_dtype(self, parameters: list[nn.Parameter]) -> torch.dtype | None:
        """Return the dtype in which gradients of a unit with these parameters are reduced; None: none is trainable."""
        if self.exact is not None:
            return torch.float64
        mixed = self.plan.mixed_precision or MixedPrecision()
        word = mixed.reduce or mixed.compute
        stored = next((parameter.dtype for parameter in parameters if parameter.requires_grad), None)
        return stored if stored is None or word is None else getattr(torch, word)

    def _reduced(self, unit: ShardedModule, name: str, reduced: torch.Tensor) -> None:
        """Take the sum over ranks of a unit's gradients, flat, before FSDP2 rounds it to the stored dtype."""
        if reduced.device.type != "cpu":
            # FSDP2 allocated it on another stream, and drops it as soon as this one is told to round it: without this,
            # the next unit's reduction is given the memory while it is read here. FSDP2 thinks of that for HSDP alone.
            reduced.record_stream(torch.accelerator.current_stream(reduced.device))
        if not self.sums.take(unit, reduced) and self.exact is not None:
            self.exact.unit_reduced(name, reduced)

    def _set_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set as torch's setter does, but let units that add up shards, and those with a gradient hook, which means the
        global gradient, always reduce.
        """
        if self.exact is not None and self.hooks.units and not requires_gradient_sync:
            raise TrueShardRuntimeError(
                "exact=True: parameters have gradient hooks, which are called with the reduced gradient of each "
                "microbatch, and those do not add up exactly; remove the hooks, or take one microbatch a rank"
            )
        type(self.root).set_requires_gradient_sync(self.root, requires_gradient_sync, recurse=recurse)
        self.sums.set(not requires_gradient_sync, self.hooks.units)

    # Around a pass

    def begin(self, method: str = "", args: Any = (), kwargs: Any = None) -> None:
        """Begin a pass, by a method with these arguments; ``leave`` must follow."""
        if not self.is_in(State.PASS) and not _torch.in_backward():
            trial = self.batch_trial
            training = self.root.training
            if trial is not None and torch.is_grad_enabled() and method and (method, training) not in trial.asked:
                tried = trial.ask(method, args, kwargs or {}, training)
                self.plan = dataclasses.replace(self.plan, tried=(*self.plan.tried, tried))
            if method and not torch.is_grad_enabled() and not self.is_in(State.SHARED):
                self.meet(f"{method}() without gradients")
            self._begin_outermost()
        self.states.append(State.PASS)

    def meet(self, what: str) -> None:
        """Return when all ranks that share one copy of the model are about to do ``what``; see ``meeting``."""
        for function in self.before_reading:
            function()
        mesh = self.axes.all
        copies = 0 if "replicate" in self.axes.sizes else None
        meet_to_gather(what, mesh, [dim for dim in range(mesh.ndim) if dim != copies])

    def _begin_outermost(self) -> None:
        if _torch.in_data_parallel():
            refuse_trainer("DistributedDataParallel")
        if _torch.refuses_transforms():
            raise TrueShardRuntimeError(
                f"torch {torch.__version__} cannot gather parameters inside a transform of torch.func (jvp, vmap, …): "
                "use torch.autograd.forward_ad, or torch 2.13 or newer"
            )
        _torch.initialise(self.root)  # nothing, but for a model that was on the meta device
        if _torch.interrupted(self.root):  # [Note: After an exception]
            _torch.reset_iteration(self.root)
            self.drop_unreduced()
            self._end_state_of_backward()
            self._double.close()
        if self.is_in(State.DOUBLE) and self._version_of_double != self.memory.version():
            self._double.close()
        for function in self.before_pass:
            function()
        self.memory.follow_writes()
        if torch.is_inference_mode_enabled() and not self._made_buffers:
            self._made_buffers = True
            self.memory.make_buffers()
        # A pass without gradients reduces nothing: adapters may be off in one between a forward and its backward.
        if torch.is_grad_enabled() and (now := self._trainability()) != self._trainable:
            self._refresh_trainable()
            self._trainable = now
        self.hooks.adopt(self.units)
        self.memory.begin()

    def leave(self) -> None:
        """Leave a pass, also by an exception."""
        self._leave_state(State.PASS)
        for function in self.after_pass if not self.is_in(State.PASS) else ():
            function()
        if not self.is_in(State.PASS, State.SHARED) and not torch.is_grad_enabled() and not _torch.in_backward():
            self.memory.free_after_pass()

    def end(self, output: Any) -> None:
        """Register the ``output`` of a pass for backward, and remember the versions of what is gathered."""
        if torch.is_grad_enabled():
            for tensor in _torch.tensors_in(output):
                if tensor.requires_grad:
                    _torch.call_with_gradient(tensor, self._output_gradient)
        self.memory.end()

    def share_passes_in(self, method: str) -> None:
        """Make passes inside ``method`` of the root (a ``generate``) keep what the plan keeps, to the method's end."""
        function = getattr(self.root, method)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before = set(self.memory.now())
            if not self.states:
                self.meet(f"{method}()")
            self.states.append(State.SHARED)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave_state(State.SHARED)
                if not self.is_in(State.SHARED, State.PASS):
                    self.memory.free(before)

        self.root.__dict__[method] = call

    def _trainability(self) -> list[Any]:
        return [(p.requires_grad, p.dtype) for parameters in self.units.values() for p in parameters]

    def _refresh_trainable(self) -> None:
        """Let FSDP2 read ``requires_grad`` and dtypes again, which it does only once."""
        if self.sums.has_waiting():
            raise TrueShardRuntimeError(
                "requires_grad or a dtype has changed while sums of earlier microbatches wait, which hold all that was "
                "trained until then: change it between steps, drop them with zero_grad(), or use accumulate(…, "
                'gradients="whole")'
            )
        self.memory.free()
        for unit, parameters in zip(self.plan.units, self.units.values(), strict=True):
            dtypes = {parameter.dtype for parameter in parameters if parameter.requires_grad}
            if len(dtypes) > 1:
                shown = " and ".join(sorted(str(dtype) for dtype in dtypes))
                raise TrueShardRuntimeError(
                    f"unit {unit.name or '(root)'!r} now has trainable parameters of {shown}, which FSDP2 cannot "
                    "reduce together: set requires_grad before shard(), so that they become units of their own"
                )
        _torch.refresh_dtypes(self.root)

    # In backward

    def _output_gradient(self, _: torch.Tensor | None) -> None:
        """Begin a backward, or go on with it: autograd has the gradient of a pass's output."""
        self._begin_double_backward()
        if not self.is_in(State.BACKWARD):
            self.memory.follow_trainability()
            self.memory.gather_for_backward()
        self.begin_backward()

    def begin_backward(self, *_: Any) -> None:
        """Once a backward: make hooks ready, and ask for a call at its end."""
        if not self.is_in(State.BACKWARD):
            self.states.append(State.BACKWARD)
            self.hooks.begin()
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
        if not self.accumulating:
            self._gradients_reduced()
            self.has_pending = bool(self.ties)  # a schedule adds their gradients up, or zero_grad() drops them
            return
        for whole in self.replicated if self.exact is not None else ():
            whole.sum_apart()
        average_gradients(self.replicated, self.mesh, only_hooked=True)
        self.has_pending = True

    def _gradients_reduced(self) -> None:
        """Do after FSDP2 has reduced its gradients what it leaves out."""
        average_gradients(self.replicated, self.mesh, exactly=self.exact.scale if self.exact else None)
        self.has_pending = False
        self.usage.end()
        if self.exact is not None:
            self.exact.end()

    def _end_schedule(self) -> None:
        """A schedule has run all backwards of a step, and reduced; not so a backward by which it finds out shapes."""
        self._gradients_reduced()
        for tie in self.ties:
            tie.add_up()

    def drop_unreduced(self, of: Collection[int] | None = None) -> None:
        if of is not None and not any(id(parameter) in of for parameter in self.parameters()):
            return
        _torch.drop_unreduced(self.root, of)
        self.sums.drop(of)
        self.usage.forget(of)
        for whole in self.replicated:
            if of is None or id(whole.parameter) in of:
                whole.drop_unreduced()
        for tie in self.ties:
            if of is None:
                tie.put_back()
            elif id(tie.parameter) in of:
                tie.forget()
        if of is None or not (self.has_unreduced() or self.usage.has_sums(of)):
            self.usage.forget()
            if self.exact is not None:
                self.exact.forget()
            self.has_pending = False

    def _end_state_of_backward(self) -> None:
        self._leave_state(State.BACKWARD)
        self.hooks.end()

    def _begin_double_backward(self) -> None:
        """Keep parameters gathered from now on: a backward has ``create_graph=True``."""
        if not torch.is_grad_enabled() or self.is_in(State.DOUBLE):
            return
        self.states.insert(0, State.DOUBLE)
        self._double.callback(self._leave_state, State.DOUBLE)
        self._version_of_double = self.memory.version()
        self._double.callback(_torch.keep_gathered(self.root))
        for _, _, gathered in _torch.gathered_parameters(self.root.modules()):
            if gathered.requires_grad:
                self._double.callback(call_after_gradient(gathered, self._second_gradient).remove)

    def _second_gradient(self, _: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise TrueShardRuntimeError(
                "backward(create_graph=True) leaves gradients that have a graph themselves, and ranks cannot average "
                "those: use torch.autograd.grad(outputs, inputs, create_graph=True), then backward() on what follows"
            )

    def in_graph(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Return each parameter with the leaf that stands for it in the graph of a forward."""
        gathered = [(sharded, leaf) for _, sharded, leaf in _torch.gathered_parameters(self.root.modules())]
        return gathered + [(whole.parameter, whole.leaf) for whole in self.replicated]

    def has_unreduced(self) -> bool:
        return (
            _torch.has_unreduced(self.root)
            or self.sums.has_waiting()
            or any(whole.has_unreduced() for whole in self.replicated)
        )

    # Readers

    def hold_whole(self, held: Held, unit: ShardedModule) -> WholeParameter:
        """Hold a parameter of ``unit`` whole on every rank from now on, and average its gradient."""
        whole = WholeParameter(held, self.mesh, self.compute_dtype, self.begin_backward)
        whole.computing = lambda: (
            torch.compiler.is_compiling() or self.is_in(State.PASS) or _torch.in_backward() or _torch.in_pass(unit)
        )
        self.replicated.append(whole)
        self.meshes.add(self.mesh)
        return whole

    def gather_for_reader(self, module: ShardedModule) -> None:
        """Gather a unit whose parameter is read outside its forward, and from now on keep it to the end of backward.

        The unit's own hooks know nothing of this use: they would neither gather it for backward, nor free and reduce it
        after this use.
        The plan shows the unit's new policy, and a warning says it.
        """
        number = self.homes[module]
        units = list(self.plan.units)
        if (policy := units[number].reshard_after_forward) is not False:
            warn_user(
                f"a parameter of unit {units[number].name!r} is read outside its forward, so the unit stays gathered "
                f"from there to the end of backward, not reshard_after_forward={policy!r} as planned"
            )
            units[number] = dataclasses.replace(units[number], reshard_after_forward=False)
            self.plan = dataclasses.replace(self.plan, units=tuple(units))
        self.states.append(State.READ)
        try:
            module.unshard()
        finally:
            self._leave_state(State.READ)
        _torch.set_reshard_after_forward(module, False, self.smaller_meshes)
        _torch.reduce_at_end(module)


def refuse_trainer(what: str) -> NoReturn:
    """Raise RuntimeError: ``what`` was given a sharded model, and would train it as if it were whole."""
    raise TrueShardRuntimeError(
        f"the model is sharded, so {what} cannot hold it: give the unsharded model to "
        "trueshard.integrations.accelerate.Accelerator, or to a Trainer under "
        "trueshard.integrations.transformers.ShardedTrainer; or train it in a loop of your own, or by trueshard.Trainer"
    )


def _shard_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Cut the whole tensors of a state dict, the same on every rank, into shards."""
    for name, _holder, _attribute, parameter in names.named_tensors(module, "parameters"):
        value = state_dict.get(prefix + name)
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
            continue
        if value.shape == parameter.shape:  # torch itself reports the others
            state_dict[prefix + name] = shard_like(value, parameter)


def runtime_of(model: nn.Module) -> Runtime | None:
    """Return the record that ``shard()`` left on ``model``, or None."""
    runtime = model.__dict__.get(KEY)
    return runtime if isinstance(runtime, Runtime) else None
