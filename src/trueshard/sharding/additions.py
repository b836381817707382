"""Assignments of the user to modules of a sharded model (a new head, a parameter, adapters of PEFT).

torch's hooks on registration tell, at each assignment in every module of the process; what is assigned to a module that
is not of a sharded model is let through.

- New parameters are held whole from the moment they are assigned. Before the next pass ranks take rank 0's values, as
  in ``shard()``.
- A module that the model has already may move to another place (PEFT puts one into its adapter).
- A parameter that is sharded cannot be replaced, deleted or get a second place, since FSDP2 would go on with what it
  knows: the assignment raises, or the next pass. So do pickling, ``save_pretrained()`` and
  ``DistributedDataParallel`` and accelerate's own ``Accelerator``, which would take a shard for the whole.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.utils.parametrize import ParametrizationList

from trueshard import _torch
from trueshard._torch import ShardedModule
from trueshard.distributed import device_of
from trueshard.errors import TrueShardRuntimeError
from trueshard.model import agreement, names, registry
from trueshard.model.names import Held
from trueshard.plans import Replicated
from trueshard.sharding.hooks import Runtime, State, refuse_trainer
from trueshard.sharding.replicated import HoldsWhole


def follow_assignments(runtime: Runtime, numbers: Mapping[nn.Module, int]) -> None:
    """Take what is assigned to modules of a model from now on; ``numbers``: each module → its unit's in the plan."""
    runtime.homes.update(numbers)
    root: Any = runtime.root
    if (resize := getattr(root, "resize_token_embeddings", None)) is not None:
        root.__dict__["resize_token_embeddings"] = functools.partial(_resize, resize)
    for module, method in itertools.product(root.modules(), ("save_pretrained", "push_to_hub")):
        if hasattr(module, method):  # an inner model's too: it would write on one rank, and wait there
            module.__dict__[method] = functools.partial(refuse_to_write, f"{method}()")
    if runtime.axes.all.size() == torch.distributed.get_world_size():
        for module in root.modules():
            if callable(getattr(module, "generate", None)):  # transformers then lets all ranks go on to the last token
                module.__dict__["_is_fsdp_managed_module"] = True
    root.__dict__["_is_accelerate_prepared"] = _Unprepared()
    # Only pickle and ``copy.copy`` come here: ``copy.deepcopy`` looks for ``__deepcopy__`` first.
    root.__dict__["__reduce_ex__"] = functools.partial(refuse_to_write, "pickle, copy.copy(), or torch.save() of it,")
    registries = [
        (_torch.own_parameters(module), attribute, name)
        for name, _, _, places in _torch.sharded_places(root)
        for module, attribute in places
    ]

    def settle() -> None:
        _forget_removed(runtime)
        for registry_of_module, attribute, name in registries:
            if registry_of_module.get(attribute) is None:
                raise TrueShardRuntimeError(
                    f"{name!r} is sharded and was deleted or set to None, and FSDP2 would put it back: do so before "
                    "shard(), or assign a new module"
                )
        if runtime.added:
            _settle_added(runtime)

    runtime.before_pass.append(settle)


def watch_assignments() -> Callable[[], None]:
    """Look at every assignment of a module or parameter in this process; return what ends that."""
    modules = register_module_module_registration_hook(_module_assigned)
    parameters = register_module_parameter_registration_hook(_parameter_assigned)  # type: ignore[arg-type]
    return _torch.together(modules.remove, parameters.remove)


def refuse_to_write(what: str, *_: Any, **__: Any) -> Any:
    """Raise RuntimeError: ``what`` writes a sharded model as if its tensors were whole."""
    raise TrueShardRuntimeError(
        f"{what} would write this rank's shards of a sharded model: call trueshard.save(folder, model=model) on every "
        "rank, which writes a folder that from_pretrained() reads"
    )


def refuse_replicas(module: nn.Module) -> None:
    """Raise RuntimeError if ``module``, which ``DistributedDataParallel`` is given, holds a sharded one."""
    if any(_home(child) is not None for child in module.modules()):
        refuse_trainer("DistributedDataParallel")


class _Unprepared:
    """The mark that accelerate reads before it prepares a model: says which accelerator takes a sharded one."""

    def __bool__(self) -> bool:
        return refuse_trainer("accelerate's own Accelerator, which transformers' Trainer makes,")


def _home(module: nn.Module) -> tuple[Runtime, int] | None:
    """Return the model to which ``module`` belongs, and its unit's number; None: it belongs to none."""
    for runtime in registry.models():
        if (number := runtime.homes.get(module)) is not None:
            return runtime, number
    return None


def _module_assigned(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    home = _home(parent)
    if home is None or child is None:
        return
    runtime, number = home
    if isinstance(child, ParametrizationList) and (runtime.is_in(State.PASS) or _torch.in_backward()):
        # For a call alone, as PEFT's target_parameters: what FSDP2 has gathered is put back before it is freed.
        return
    new = [module for module in child.modules() if _home(module) is None]
    if any(type(module).__module__.startswith("peft.") for module in new):
        raise TrueShardRuntimeError(
            f"PEFT would size the adapter {name!r} by this rank's shard: call get_peft_model() before shard()"
        )
    held = [(m, a, p) for m in new for a, p in _torch.own_parameters(m).items() if p is not None]
    for module, attribute, parameter in held:
        _is_placed_by_fsdp(runtime, module, attribute, parameter)
    for module in new:
        runtime.homes[module] = number
    for module, attribute, parameter in held:
        _hold(runtime, runtime.unit(number), module, attribute, parameter)


def _parameter_assigned(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    home = _home(module)
    if home is None or _is_placed_by_fsdp(home[0], module, name, parameter):
        return None
    runtime, number = home
    for whole in runtime.replicated:
        if (module, name) in whole.places and whole.parameter is not parameter:
            whole.leave(module, name)
    return _hold(runtime, runtime.unit(number), module, name, parameter)


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
            raise TrueShardRuntimeError(
                f"{fqn!r} is sharded and would get a second place, {name!r}, of which FSDP2 does not know: tie or "
                "parametrise parameters before shard()"
            )
    if here is not None and not isinstance(parameter, DTensor):  # a state dict that is assigned has DTensors
        raise TrueShardRuntimeError(
            f"{here!r} is sharded, and FSDP2 would go on with the parameter that it knows: write the values into it "
            "(load_state_dict(), or copy_() of a DTensor), assign a new module, or assign it before shard()"
        )
    return here is not None


def _hold(
    runtime: Runtime, unit: ShardedModule, module: nn.Module, attribute: str, parameter: nn.Parameter
) -> nn.Parameter:
    """Hold a new parameter whole on every rank; return the one that takes its place."""
    _forget_removed(runtime)
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
    runtime.replaced[original] = attribute
    if not runtime.added:
        runtime.root.__dict__["__deepcopy__"] = _refuse_copy
    runtime.added.append(whole)
    return whole.parameter


def _forget_removed(runtime: Runtime) -> None:
    """Forget whole parameters that were deleted or set to None."""
    for whole in runtime.replicated:
        for module, attribute in list(whole.places):
            if _torch.own_parameters(module).get(attribute) is None:
                whole.leave(module, attribute)
    runtime.replicated = [whole for whole in runtime.replicated if whole.places]


def _settle_added(runtime: Runtime) -> None:
    """Give parameters that were added since the last pass rank 0's values, and show them in the plan. Collective."""
    added, runtime.added = [whole for whole in runtime.added if whole.places], []
    name_of = {id(t): name for name, _, _, t in reversed(list(names.named_tensors(runtime.root, "parameters")))}
    kept = [(name_of[id(whole.parameter)], whole) for whole in added if id(whole.parameter) in name_of]
    copies = [(name, _torch.local(whole.parameter).detach().clone()) for name, whole in kept]
    if differing := agreement.take_from_first_rank(copies, runtime.mesh):
        agreement.warn_of_differing("parameters that were added after shard()", differing, "them")
        with torch.no_grad():
            for (_, whole), (_, value) in zip(kept, copies, strict=True):
                _torch.local(whole.parameter).copy_(value)
    if runtime.exact is not None:
        runtime.exact.name((name, whole.parameter) for name, whole in kept)
    shown_ones = tuple(Replicated(name, whole.parameter.numel(), "added after shard()") for name, whole in kept)
    earlier = tuple(whole for whole in runtime.plan.replicated if whole.name not in dict(kept))
    runtime.plan = dataclasses.replace(runtime.plan, replicated=(*earlier, *shown_ones))


def _refuse_copy(memo: dict[int, Any]) -> Any:
    raise TrueShardRuntimeError(
        "this sharded model was given parameters after shard(), and such a model cannot be copied: copy it before, or "
        "add them before shard()"
    )


def _resize(resize: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **rest: Any) -> Any:
    """Refuse to resize sharded embeddings; a call that changes nothing passes."""
    model = resize.__self__
    rows = model.get_input_embeddings().weight.shape[0]
    wanted = rows if new_num_tokens is None else new_num_tokens
    if -(-wanted // (pad_to_multiple_of or 1)) * (pad_to_multiple_of or 1) != rows:
        raise TrueShardRuntimeError(
            f"the embeddings are sharded and have {rows} rows, so they cannot become {wanted}: call "
            "resize_token_embeddings() before shard()"
        )
    return resize(new_num_tokens, pad_to_multiple_of, **rest)
