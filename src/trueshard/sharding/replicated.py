"""Parameters that every rank holds whole: those that FSDP2 cannot shard, and those that a sharded model is given later.

- To the user such a parameter is a DTensor like all others (placed ``Replicate``), so that optimizers, clipping and
  averaging see one kind of tensor. To the forward it is a plain leaf over the same memory, as a gathered one is:
  reading the attribute inside a pass, or a recomputation in backward, gives the leaf.
- Gradients of the leaves are averaged over ranks once a backward, in one collective.

What the user gives a sharded model later (a new head, a parameter, adapters of PEFT) is told by torch's hooks on
registration, at each assignment in every module of the process:

- New parameters are held whole from the moment they are assigned. Before the next pass ranks take rank 0's values, as
  in ``shard()``.
- A module that the model has already may move to another place (PEFT puts one into its adapter).
- A parameter that is sharded cannot be replaced, deleted or get a second place, since FSDP2 would go on with what it
  knows: the assignment raises, or the next pass. So do pickling, ``save_pretrained()`` and
  ``DistributedDataParallel``, which would take a shard for the whole.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from trueshard import _torch
from trueshard._torch import ShardedModule
from trueshard.distributed import all_reduce, device_of
from trueshard.model import agreement, names
from trueshard.model.intent import attributes_of
from trueshard.model.names import Held
from trueshard.optim.stepping import watch
from trueshard.plans import Replicated
from trueshard.sharding.exact import set_apart
from trueshard.sharding.gradients import GradientHooks, add_gradient, call_after_gradient

if TYPE_CHECKING:
    from trueshard.sharding.exact import ExactSums
    from trueshard.sharding.hooks import Runtime

    Home = tuple[weakref.ref[Runtime], weakref.ref[ShardedModule]]

_KEY = "_trueshard_whole"


class WholeParameter:
    """One replicated parameter, over the memory of the original; the forward sees it in the compute dtype.

    ``used``: a bound method, called when a backward reaches the parameter.
    """

    def __init__(self, original: Held, mesh: DeviceMesh, compute: torch.dtype | None, used: Callable[..., Any]) -> None:
        self.places, self.compute, self._used = original.places, compute, used
        self.original: torch.Tensor | None = None
        """What the user assigned, if that was after ``shard()``."""
        self.hooks = GradientHooks(original.tensor) if GradientHooks.on(original.tensor) else None
        self._attributes = attributes_of(original.tensor)
        self.computing: Callable[[], bool] = lambda: False
        held = self.parameter.detach()  # not the original itself: a copy may have been given memory since
        shown = DTensor.from_local(held, mesh, [Replicate()] * mesh.ndim, run_check=False)
        parameter = nn.Parameter(shown, requires_grad=original.tensor.requires_grad)
        for place in self.places:
            self._put(*place, parameter)
        self._memory: torch.Tensor | None = None
        self.summed: torch.Tensor | None = None
        """With exact sums: the gradients of earlier backwards that did not reduce, in float64."""
        self.refresh()

    @property
    def parameter(self) -> nn.Parameter:
        """The DTensor that the user sees."""
        module, attribute = self.places[0]
        parameter = _torch.own_parameters(module)[attribute]
        assert parameter is not None
        return parameter

    def put(self, module: nn.Module, attribute: str) -> None:
        """Give the parameter another place: a tie."""
        self._put(module, attribute, self.parameter)
        self.places.append((module, attribute))

    def _put(self, module: nn.Module, attribute: str, parameter: nn.Parameter) -> None:
        _torch.own_parameters(module)[attribute] = parameter
        module.__dict__.setdefault(_KEY, {})[attribute] = self

    def leave(self, module: nn.Module, attribute: str) -> None:
        """Forget a place that something else is assigned to."""
        if (module, attribute) in self.places:
            self.places.remove((module, attribute))
            del module.__dict__[_KEY][attribute]

    def refresh(self) -> None:
        """Follow changes of the parameter: ``requires_grad_()``, ``to_empty()``, an assigned state dict."""
        if (memory := _torch.local(self.parameter)) is not self._memory:
            self._memory = memory
            self.leaf = nn.Parameter(memory.detach(), requires_grad=False)
            self.leaf.__dict__.update(self._attributes)
        # torch takes gradient hooks on trainable tensors only.
        if (trainable := self.parameter.requires_grad) != self.leaf.requires_grad:
            self.leaf.requires_grad_(trainable)
            if trainable and not _torch.gradient_hooks(self.leaf)[1]:
                call_after_gradient(self.leaf, self._used)

    def gathered(self) -> torch.Tensor:
        """Return the plain leaf, in the compute dtype, for the forward."""
        self.refresh()
        cast = self.compute is not None and self.leaf.is_floating_point() and self.leaf.dtype != self.compute
        return self.leaf.to(self.compute) if cast else self.leaf

    def deliver(self, grad: torch.Tensor) -> None:
        """Add the averaged ``grad`` of this backward to the parameter's, through the user's hooks."""
        self.leaf.grad = self.summed = None
        parameter = self.parameter
        assert isinstance(parameter, DTensor)
        # Those from before sharding, then those set on the parameter since: autograd calls neither.
        every = [hooks for hooks in (self.hooks, GradientHooks(parameter)) if hooks is not None]
        for hooks in every:
            grad = hooks.transform(grad)
        add_gradient(parameter, DTensor.from_local(grad, parameter.device_mesh, parameter.placements, run_check=False))
        for hooks in every:
            hooks.accumulated(parameter)


class HoldsWhole(nn.Module):
    """Mixin for the class of a module that holds a replicated parameter."""

    def __getattr__(self, name: str) -> Any:
        whole = self.__dict__.get(_KEY, {}).get(name)
        if whole is not None and whole.computing():
            return whole.gathered()
        return super().__getattr__(name)


def release_whole(module: nn.Module) -> None:
    """Make the copy of a module that holds a replicated parameter an ordinary module again."""
    module.__dict__.pop(_KEY, None)
    if isinstance(module, HoldsWhole):
        names.take_out(module)


@torch.no_grad()
def average_gradients(
    parameters: Iterable[WholeParameter], mesh: DeviceMesh, *, only_hooked: bool, exact: ExactSums | None = None
) -> None:
    """Average at the end of a backward; ``only_hooked``: those with a hook, which means the global gradient; ``exact``:
    what rounded the gradients, so that they add up exactly in float64.

    Collective; ``parameters`` are in the same order on every rank.
    """
    members = []
    for whole in parameters:
        whole.refresh()
        hooked = whole.hooks is not None or GradientHooks.on(whole.parameter)
        if whole.parameter.requires_grad and (hooked or not only_hooked):
            members.append(whole)
    if not members:
        return
    # A flag per parameter says whether a rank has a gradient: one that no rank used keeps its gradient None.
    if exact is not None:
        set_apart(members)
    grads = [whole.leaf.grad if exact is None else whole.summed for whole in members]
    start = torch.float32 if exact is None else torch.float64
    # Wide enough for all; with one that is complex, all are sent as complex.
    dtype = functools.reduce(torch.promote_types, (whole.leaf.dtype for whole in members), start)
    device = device_of(mesh)
    used = torch.tensor([float(grad is not None) for grad in grads], dtype=dtype, device=device)
    parts = [
        (torch.zeros_like(whole.leaf) if grad is None else grad).reshape(-1).to(device, dtype)
        for whole, grad in zip(members, grads, strict=True)
    ]
    flat = all_reduce(torch.cat([used, *parts]), mesh)
    flags = flat[: len(members)].tolist()
    summed = flat[len(members) :]
    if exact is None:
        summed.div_(mesh.size())
    else:
        exact.scale(summed)
    pieces = summed.split([part.numel() for part in parts])
    for flag, piece, whole in zip(flags, pieces, members, strict=True):
        if flag:
            value = piece if whole.leaf.is_complex() else piece.real
            whole.deliver(value.reshape(whole.leaf.shape).to(whole.leaf, copy=True))


def forget_removed(runtime: Runtime) -> None:
    """Forget whole parameters that were deleted or set to None."""
    for whole in runtime.replicated:
        for module, attribute in list(whole.places):
            if _torch.own_parameters(module).get(attribute) is None:
                whole.leave(module, attribute)
    runtime.replicated = [whole for whole in runtime.replicated if whole.places]


# What is given later

_homes: weakref.WeakKeyDictionary[nn.Module, Home] = weakref.WeakKeyDictionary()
"""Module of a sharded model → its runtime, and the first module of its unit."""


def follow_assignments(runtime: Runtime, units: Iterable[tuple[nn.Module, ShardedModule]]) -> None:
    """From now on, take what is assigned to modules of a model; ``units``: each module, and the module of its unit."""
    for module, unit in units:
        _homes[module] = weakref.ref(runtime), weakref.ref(unit)
    root: Any = runtime.root
    if (resize := getattr(root, "resize_token_embeddings", None)) is not None:
        root.__dict__["resize_token_embeddings"] = functools.partial(_resize, resize)
    for method in ("save_pretrained", "push_to_hub"):
        if hasattr(root, method):
            root.__dict__[method] = functools.partial(_refuse_to_write, f"{method}()")
    root.__dict__["__reduce_ex__"] = functools.partial(_reduce, root)
    for name, _, _, places in _torch.sharded_places(root):
        runtime.places += [(_torch.own_parameters(module), attribute, name) for module, attribute in places]
    _listen()


def refuse_removed(runtime: Runtime) -> None:
    """Raise RuntimeError for a sharded parameter that was deleted or set to None, which FSDP2 would undo."""
    for registry, attribute, name in runtime.places:
        if registry.get(attribute) is None:
            raise RuntimeError(
                f"{name!r} is sharded and was deleted or set to None, and FSDP2 would put it back: do so before "
                "shard(), or assign a new module"
            )


def _reduce(root: nn.Module, protocol: Any) -> Any:
    """Let a sharded model be copied, and not pickled."""
    if sys._getframe(1).f_globals.get("__name__") == "copy":
        return type(root).__reduce_ex__(root, protocol)
    return _refuse_to_write("pickle, or torch.save() of the model itself,")


def _refuse_to_write(what: str, *_: Any, **__: Any) -> Any:
    raise RuntimeError(
        f"{what} would write this rank's shards of a sharded model: call trueshard.save(folder, model=model) on every "
        "rank, which writes a folder that from_pretrained() reads"
    )


def _refuse_replicas(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    if any(_home(each) is not None for each in module.modules()):
        raise RuntimeError(
            "the model is sharded, so DistributedDataParallel (in which Accelerate and transformers' Trainer wrap it) "
            "cannot hold it: train it with a loop of your own or trueshard.Trainer, or give them the unsharded model"
        )
    _replicate(self, module, *args, **kwargs)


_replicate = DistributedDataParallel.__init__


@functools.cache
def _listen() -> None:
    DistributedDataParallel.__init__ = functools.wraps(_replicate)(_refuse_replicas)  # type: ignore[method-assign]
    register_module_module_registration_hook(_module_assigned)
    register_module_parameter_registration_hook(_parameter_assigned)  # type: ignore[arg-type]


def _home(module: nn.Module) -> tuple[Runtime, ShardedModule] | None:
    found = _homes.get(module)
    runtime, unit = (None, None) if found is None else (found[0](), found[1]())
    return None if runtime is None or unit is None else (runtime, unit)


def _module_assigned(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    home = _home(parent)
    if home is None or child is None:
        return
    runtime, unit = home
    new = [module for module in child.modules() if _home(module) is None]
    if any(type(module).__module__.startswith("peft.") for module in new):
        raise RuntimeError(
            f"PEFT would size the adapter {name!r} by this rank's shard: call get_peft_model() before shard()"
        )
    held = [(m, a, p) for m in new for a, p in _torch.own_parameters(m).items() if p is not None]
    for module, attribute, parameter in held:
        _is_placed_by_fsdp(runtime, module, attribute, parameter)
    for module in new:
        _homes[module] = _homes[parent]
    for module, attribute, parameter in held:
        _hold(runtime, unit, module, attribute, parameter)


def _parameter_assigned(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    home = _home(module)
    if home is None or _is_placed_by_fsdp(home[0], module, name, parameter):
        return None
    runtime, unit = home
    for whole in runtime.replicated:
        if (module, name) in whole.places and whole.parameter is not parameter:
            whole.leave(module, name)
    return _hold(runtime, unit, module, name, parameter)


def _is_placed_by_fsdp(runtime: Runtime, module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """True if FSDP2 writes this parameter to this place itself; raise RuntimeError if it would not follow."""
    here = None
    for fqn, sharded, gathered, places in _torch.sharded_places(runtime.root):
        is_here = (module, name) in places
        if is_here:
            here = fqn
        if parameter is sharded or parameter is gathered:
            if is_here:
                return True
            raise RuntimeError(
                f"{fqn!r} is sharded and would get a second place, {name!r}, of which FSDP2 does not know: tie or "
                "parametrise parameters before shard()"
            )
    if here is not None and not isinstance(parameter, DTensor):  # a state dict that is assigned has DTensors
        raise RuntimeError(
            f"{here!r} is sharded, and FSDP2 would go on with the parameter that it knows: write the values into it "
            "(load_state_dict(), or copy_() of a DTensor), assign a new module, or assign it before shard()"
        )
    return here is not None


def _hold(
    runtime: Runtime, unit: ShardedModule, module: nn.Module, attribute: str, parameter: nn.Parameter
) -> nn.Parameter:
    """Hold a new parameter whole on every rank; return the one that takes its place."""
    forget_removed(runtime)
    names.mix_in(module, HoldsWhole)
    for whole in runtime.replicated:
        if parameter is whole.parameter or parameter is whole.original:
            whole.put(module, attribute)
            return whole.parameter
    original = parameter
    if isinstance(parameter, DTensor):  # a copy of a sharded module, as PEFT's modules_to_save makes
        parameter = nn.Parameter(parameter.full_tensor().detach(), requires_grad=parameter.requires_grad)
    if not parameter.is_meta:
        parameter.data = parameter.data.to(device_of(runtime.mesh))
    _torch.own_parameters(module)[attribute] = parameter
    whole = runtime.hold_whole(Held(parameter, [attribute], [(module, attribute)]), unit)
    whole.original = original
    watch(runtime.root, {attribute: original})
    if not runtime.added:
        runtime.root.__dict__["__deepcopy__"] = _refuse_copy
    runtime.added.append(whole)
    return whole.parameter


def settle_added(runtime: Runtime) -> None:
    """Before a pass: give parameters that were added since the last one rank 0's values, and show them in the plan.

    Collective.
    """
    added, runtime.added = [whole for whole in runtime.added if whole.places], []
    name_of = {id(t): name for name, _, _, t in reversed(list(names.named_tensors(runtime.root, "parameters")))}
    kept = [(name_of[id(whole.parameter)], whole) for whole in added if id(whole.parameter) in name_of]
    copies = [(name, _torch.local(whole.parameter).detach().clone()) for name, whole in kept]
    if differing := agreement.take_from_first_rank(copies, runtime.mesh):
        agreement.warn_of_differing("parameters that were added after shard()", differing, "them", stacklevel=3)
        with torch.no_grad():
            for (_, whole), (_, value) in zip(kept, copies, strict=True):
                _torch.local(whole.parameter).copy_(value)
    if runtime.exact is not None:
        runtime.exact.name((name, whole.parameter) for name, whole in kept)
    shown_ones = tuple(Replicated(name, whole.parameter.numel(), "added after shard()") for name, whole in kept)
    earlier = tuple(each for each in runtime.plan.replicated if each.name not in dict(kept))
    runtime.plan = dataclasses.replace(runtime.plan, replicated=(*earlier, *shown_ones))


def _refuse_copy(memo: dict[int, Any]) -> Any:
    raise RuntimeError(
        "this sharded model was given parameters after shard(), and such a model cannot be copied: copy it before, or "
        "add them before shard()"
    )


def _resize(resize: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **rest: Any) -> Any:
    """Refuse to resize sharded embeddings; a call that changes nothing passes."""
    model = resize.__self__
    rows = model.get_input_embeddings().weight.shape[0]
    wanted = rows if new_num_tokens is None else new_num_tokens
    if -(-wanted // (pad_to_multiple_of or 1)) * (pad_to_multiple_of or 1) != rows:
        raise RuntimeError(
            f"the embeddings are sharded and have {rows} rows, so they cannot become {wanted}: call "
            "resize_token_embeddings() before shard()"
        )
    return resize(new_num_tokens, pad_to_multiple_of, **rest)
