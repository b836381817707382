"""What the user gives a sharded model later: a new head, a parameter, adapters of PEFT.

- New parameters are held whole by every rank from the moment they are assigned, and their gradients averaged, like
  those that FSDP2 cannot shard. Before the next pass ranks take rank 0's values, as in ``shard()``.
- A module that the model has already may move to another place (PEFT puts one into its adapter).
- A parameter that is sharded cannot be replaced, deleted or get a second place, since FSDP2 would go on with what it
  knows: the assignment raises, or the next pass. So do pickling, ``save_pretrained()`` and
  ``DistributedDataParallel``, which would take a shard for the whole.

torch's hooks on registration tell of each assignment, in every module of the process.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from trueshard import _torch
from trueshard._torch import ShardedModule
from trueshard.distributed import device_of
from trueshard.model import agreement, names
from trueshard.model.names import Held
from trueshard.optim.stepping import watch
from trueshard.plans import Replicated
from trueshard.runtime.replicated import HoldsWhole

if TYPE_CHECKING:
    from trueshard.runtime.passes import Runtime

    Home = tuple[weakref.ref[Runtime], weakref.ref[ShardedModule]]

_homes: weakref.WeakKeyDictionary[nn.Module, Home] = weakref.WeakKeyDictionary()
"""Module of a sharded model → its runtime, and the first module of its unit."""


def follow(runtime: Runtime, units: Iterable[tuple[nn.Module, ShardedModule]]) -> None:
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
    for whole in runtime.replicated.parameters:
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
    runtime.replicated.forget_removed()
    names.mix_in(module, HoldsWhole)
    for whole in runtime.replicated.parameters:
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


def settle(runtime: Runtime) -> None:
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
