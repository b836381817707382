"""FSDP2's own records of its units: groups of parameters, gathered ones, the state of a pass.

FSDP2 shows a unit as an ``FSDPModule`` with a few setters. Whether a pass runs, which parameters are gathered and where
the shards lie in memory is found in its parameter groups alone.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.utils import _apply_to_tensors

from trueshard._torch.capabilities import IS_2_11, missing_for_speed
from trueshard._torch.modules import every_module, in_backward
from trueshard._torch.patches import Undo, replace
from trueshard._torch.simulating import is_fake, is_plain
from trueshard._torch.tensors import call_with_gradient, own_storage, tensors_in

if TYPE_CHECKING:

    class ShardedModule(FSDPModule, nn.Module):
        """A module on which ``fully_shard`` was called; torch's own type is no ``nn.Module``."""
else:
    ShardedModule = FSDPModule


TAKES_TRANSFORMS = hasattr(_fsdp_common, "_disable_functorch_if_active")
"""True if FSDP2 can gather parameters inside a transform of ``torch.func``: from 2.13 on."""


def _groups(module: ShardedModule) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # 2.12 on
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _groups_below(root: nn.Module) -> Iterator[tuple[ShardedModule, Any]]:
    """Yield (module, FSDP2's parameter group) for every unit at and below ``root``: of several modules, the first."""
    first = {group: module for module in reversed(fsdp_modules(root)) for group in _groups(module)}
    return ((module, group) for group, module in reversed(first.items()))


def _parameters_below(root: nn.Module) -> Iterator[Any]:
    return (parameter for _, group in _groups_below(root) for parameter in group.fsdp_params)


def own_class(module: nn.Module) -> type:
    """Return the user's class of a module, also after ``fully_shard``, which puts one of its own in front."""
    cls = type(module)
    return cls.__mro__[FSDPModule._orig_cls_mro_index] if isinstance(module, FSDPModule) else cls


def in_data_parallel() -> bool:
    """True inside a forward of ``DistributedDataParallel``, which nothing public tells."""
    return nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None


def fsdp_modules(root: nn.Module) -> list[ShardedModule]:
    """Return every module at and below ``root`` on which ``fully_shard`` was called."""
    return [module for module in every_module(root) if isinstance(module, ShardedModule)]


def forget(modules: Iterable[nn.Module]) -> None:
    """Remove FSDP's registration of ``modules``, so that a failed ``fully_shard`` can be tried again.

    The rest of what ``fully_shard`` does lies in the module's own ``__dict__`` and class; this one is a global table.
    """
    for module in modules:
        _composable_state._module_state_mapping.pop(module, None)


def initialise(root: ShardedModule) -> None:
    """Fix ``root`` as the root of its units, now and not at the first forward; nothing if it is fixed.

    Otherwise the first submodule called from outside ``forward`` would take the place of the root, and what FSDP2
    checks lazily (dtypes, ties) would fail in the first step instead of in ``shard()``.
    """
    state = root._get_fsdp_state()
    if state._is_root is not None:
        return
    fake = [parameter for parameter in _parameters_below(root) if is_fake(parameter._sharded_param_data)]
    for parameter in fake:  # FSDP2 tells by addresses that its shards are padded already, and fake ones have none
        parameter.reset_sharded_param = lambda: None
    try:
        state._lazy_init()
    finally:
        for parameter in fake:
            parameter.__dict__.pop("reset_sharded_param", None)  # one that is tied is there twice


@contextlib.contextmanager
def meshes_joined_once() -> Iterator[None]:
    """Inside, ``fully_shard`` joins its mesh with that of parameters that are cut already once, not for each of them.

    To make a mesh takes milliseconds, in proportion to its ranks: half of the time that such a parameter takes.
    """
    joined: dict[tuple[int, ...], tuple[list[DeviceMesh], DeviceMesh]] = {}
    original: Callable[[list[DeviceMesh]], DeviceMesh] = DeviceMesh._concatenate

    def join(meshes: list[DeviceMesh]) -> DeviceMesh:
        key = tuple(map(id, meshes))
        if key not in joined:
            joined[key] = meshes, original(meshes)  # held, so that no other mesh gets the same identity
        return joined[key][1]

    with mock.patch.object(DeviceMesh, "_concatenate", staticmethod(join)):
        yield


def refresh_dtypes(root: nn.Module) -> None:
    """Read again which parameters are trainable: FSDP2 does so once, and a thawed unit would reduce in no dtype.

    Gathered parameters that are of another dtype than their shards by now are made anew when they are gathered.
    """
    for _, group in _groups_below(root):
        for parameter in group.fsdp_params:
            gathered = getattr(parameter, "_unsharded_param", None)
            compute = parameter.mp_policy.param_dtype or parameter.sharded_param.dtype
            if gathered is not None and gathered.is_floating_point() and gathered.dtype != compute:
                del parameter._unsharded_param
                parameter.all_gather_outputs = []
        group._init_mp_dtypes()


def gathered_parameters(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    """Yield (name, sharded parameter, gathered parameter) of those of ``modules`` that were gathered once.

    The gathered parameter is a second object behind the same name; an optimizer made while it is registered holds it.
    """
    groups = (group for module in modules if isinstance(module, ShardedModule) for group in _groups(module))
    for parameter in (parameter for group in groups for parameter in group.fsdp_params):
        if hasattr(parameter, "_unsharded_param"):
            yield parameter._param_fqn or "?", parameter.sharded_param, parameter._unsharded_param


def sharded_places(
    root: nn.Module,
) -> Iterator[tuple[str, nn.Parameter, nn.Parameter | None, list[tuple[nn.Module, str]]]]:
    """Yield (name, sharded parameter, gathered parameter, places that FSDP2 writes them to); a tie has several."""
    for parameter in _parameters_below(root):
        gathered = getattr(parameter, "_unsharded_param", None)
        name = parameter._param_fqn or parameter._module_info.param_name
        yield name, parameter.sharded_param, gathered, _places(parameter)


def places_in_unit(unit: ShardedModule) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of each parameter of one unit, in the order in which they are gathered."""
    return [_places(parameter) for group in _groups(unit) for parameter in group.fsdp_params]


def _places(parameter: Any) -> list[tuple[nn.Module, str]]:
    info = parameter._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors inside lists, dicts and dataclasses as FSDP2 casts a unit's inputs and outputs."""
    return _apply_to_tensors(functools.partial(_fsdp_common._cast_fp_tensor, dtype), value)


def offloaded(root: nn.Module) -> set[int]:
    """Return the ``id`` of each sharded parameter that rests on the CPU between uses; the meta device hides it."""
    return {id(p.sharded_param) for p in _parameters_below(root) if p.offload_to_cpu}


def gathered_units(modules: Iterable[ShardedModule]) -> Callable[[], list[ShardedModule]]:
    """Return a function that lists which of ``modules`` have their gathered parameters registered; no public one does.

    It is called at every pass, so FSDP2's record of each module is looked up once.
    """
    records = [(module, group) for module in modules for group in _groups(module)]
    return lambda: [module for module, group in records if group.is_unsharded]


def call_before_backward(modules: Iterable[ShardedModule], function: Callable[[], None]) -> None:
    """Call ``function()`` where the backward of a unit begins, also of one whose forward is inside another's."""
    for group in (group for module in modules for group in _groups(module)):
        group.pre_backward = _watched(group.pre_backward, function, lambda: None)


def _watched(inner: Callable[..., Any], entered: Callable[[], Any], left: Callable[[], Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        entered()
        try:
            return inner(*args, **kwargs)
        finally:
            left()

    return call


def call_after_schedule(root: ShardedModule, function: Callable[[], None]) -> None:
    """Call ``function()`` after a schedule of ``torch.distributed.pipelining`` has reduced the gradients of its stage.

    The backward of each microbatch leaves them unreduced. At the end of a step the schedule itself calls what FSDP2
    otherwise leaves to autograd, outside any backward, so no hook of autograd or of a module tells.
    """
    state: Any = root._get_fsdp_state()
    inner = state._root_post_backward_final_callback

    @torch.compiler.disable
    def callback() -> None:
        inner()
        if not in_backward():
            function()

    state._root_post_backward_final_callback = callback


def try_stages_in(context: Callable[[list[nn.Module]], contextlib.AbstractContextManager[Any]]) -> Undo:
    """Let schedules try out stages, before their first step, inside ``context(modules)``.

    From torch 2.13 on a trial runs a forward and a backward, and then drops every gradient of an FSDP2 module: those of
    the trial, and those of a schedule for another length that has run in the same optimizer step.
    """
    from torch.distributed.pipelining import schedules

    base: Any = schedules._PipelineSchedule
    inner = getattr(base, "_initialize_pp_stages", None)
    if inner is None:
        return lambda: None

    @functools.wraps(inner)
    def initialize(self: Any, stages: Any, *args: Any, **kwargs: Any) -> Any:
        with context([stage.submod for stage in stages]):
            return inner(self, stages, *args, **kwargs)

    return replace(base, "_initialize_pp_stages", initialize)


def follow_views(root: nn.Module) -> None:
    """Let backward gather a unit whose output is a view that the model writes to in place.

    FSDP2 gathers in a hook on the output. torch drops the hooks of a view that is written to (``hidden += residual``),
    since it computes the view anew from its base; and warns (2.13 on) of every output that is a view. So backward also
    gathers where it reaches the base.
    """

    def following(state: Any) -> Callable[[Any], Any]:
        def register(output: Any) -> Any:
            tensors = [t for t in tensors_in(output) if t.requires_grad] if torch.is_grad_enabled() else []
            if all(tensor._base is None for tensor in tensors) or torch._C._are_functorch_transforms_active():
                return type(state)._register_pre_backward_hook(state, output)
            for tensor in tensors:
                call_with_gradient(tensor, state._pre_backward)
            return output

        return register

    for module in fsdp_modules(root):
        state: Any = module._get_fsdp_state()
        state._register_pre_backward_hook = following(state)


def keep_dynamo_out(modules: Iterable[ShardedModule]) -> None:
    """Keep dynamo out of what FSDP2 does in backward, as torch itself does from 2.12 on.

    Dynamo would compile it, once the user compiled the function that calls backward, and count the gathering of a
    parameter as a write to it, which autograd refuses.
    """
    if not IS_2_11:
        return
    for state, groups in ((module._get_fsdp_state(), _groups(module)) for module in modules):
        calls = [(state, "_pre_backward"), (state, "_root_post_backward_final_callback")]
        calls += [(group, name) for group in groups for name in ("pre_backward", "post_backward")]
        for owner, name in calls:
            setattr(owner, name, torch.compiler.disable(getattr(owner, name)))


def refuses_transforms() -> bool:
    """True inside a transform of ``torch.func`` (jvp, vmap, …), on a torch whose FSDP2 cannot gather there."""
    return not TAKES_TRANSFORMS and bool(torch._C._are_functorch_transforms_active())


def keep_gathered(root: nn.Module) -> Callable[[], None]:
    """Free no memory of gathered parameters until the function that this returns is called.

    They come and go in their modules as ever. The public setters of the reshard policies hold only for the forwards and
    backwards that begin later.
    """
    parameters = list(_parameters_below(root))
    for parameter in parameters:
        parameter.free_unsharded_param = lambda: None

    def end() -> None:
        for parameter in parameters:
            del parameter.free_unsharded_param
            info = parameter._module_info
            if info.module._parameters[info.param_name] is not getattr(parameter, "_unsharded_param", None):
                parameter.free_unsharded_param()

    return end


def in_pass(module: nn.Module) -> bool:
    """True if the unit is in a forward, or recomputes one in backward."""
    return isinstance(module, ShardedModule) and module._get_fsdp_state()._training_state in (
        TrainingState.FORWARD,
        TrainingState.PRE_BACKWARD,
    )


def interrupted(root: ShardedModule) -> bool:
    """True if an exception left a forward or backward of ``root``. Call it outside both."""
    context = root._get_fsdp_state()._state_ctx
    if context.iter_forward_root is not None or context.post_backward_final_callback_queued:
        return True
    return any(state._training_state != TrainingState.IDLE for state in context.all_states)


def reset_iteration(root: ShardedModule) -> None:
    """``FSDPModule.reset_iter_state`` (2.13 on), the same for the releases before it."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    state = root._get_fsdp_state()
    context, communication = state._state_ctx, state._comm_ctx
    communication.all_gather_state = None
    if hasattr(communication, "reduce_scatter_state"):
        communication.reduce_scatter_state = None
    communication.post_forward_order.clear()
    for other in context.all_states:
        other._training_state = TrainingState.IDLE
    for _, group in _groups_below(root):
        if group._all_gather_result is not None:
            group.wait_for_unshard()
        group._training_state = TrainingState.IDLE
        group._post_forward_indices.clear()
        group._post_reduce_event = group._all_reduce_state = None
        group._reshard_after_forward_event = group._partial_reduce_output = None
        group._to_sharded()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def join_shards(root: nn.Module, small: int) -> None:
    """Put shards of parameters behind one another in memory: a unit's in the order of its gradients, trainable first;
    those of at most ``small`` bytes by themselves, over all units.

    FSDP2 allocates each by itself; there is no public place to give it memory. Each keeps a version counter of its own,
    so that a write to one is not a write to all, and a storage of its own, so that it can be copied and pickled; so do
    gradients, which FSDP2 cuts from one tensor.
    """
    if any(name.startswith("FSDPParam.") for name in missing_for_speed()):
        return
    _separate_gradients(_parameters_below(root), own_storage)
    kinds: dict[Any, list[Any]] = {}
    for module, group in _groups_below(root):
        for parameter in group.fsdp_params:
            data = parameter._sharded_param_data
            if is_plain(data) and not data.is_meta and not parameter.offload_to_cpu:
                unit = None if data.nbytes <= small else module
                key = unit, data.dtype, data.device, not parameter.sharded_param.requires_grad
                kinds.setdefault(key, []).append(parameter)
    for parameters in (members for members in kinds.values() if len(members) > 1):
        sizes = [parameter._sharded_param_data.numel() for parameter in parameters]
        memory = torch.cat([parameter._sharded_param_data for parameter in parameters])
        for parameter, part in zip(parameters, memory.split(sizes), strict=True):
            data = parameter._sharded_param_data = own_storage(part.data)  # a counter of its own, also where it is fake
            local = parameter.sharded_param._local_tensor
            parameter.sharded_param._local_tensor = data.as_strided(local.shape, local.stride())


def align_gradients(root: nn.Module) -> None:
    """Give each gradient of a model that one rank holds whole memory of its own, where an owner's begins, too.

    FSDP2 cuts them from one tensor, and products of small matrices round by where a matrix begins (MKL).
    """
    # Offloaded ones have memory of their own, which a copy fills that is on its way still.
    _separate_gradients((p for p in _parameters_below(root) if not p.offload_to_cpu), torch.clone)


def _separate_gradients(parameters: Iterable[Any], separated: Callable[[torch.Tensor], torch.Tensor]) -> None:
    # Dynamo would compile it anew for each size, once the user compiled the function that calls backward.
    @torch.compiler.disable
    def separate(parameter: Any, grad: torch.Tensor) -> Any:
        return type(parameter).to_sharded_dtensor(parameter, separated(grad))

    for parameter in parameters:
        parameter.to_sharded_dtensor = functools.partial(separate, parameter)


def unit_in(frame: types.FrameType) -> str | None:
    """Return the name of the unit for which FSDP2 runs this frame; None if it is no frame of a unit."""
    group = frame.f_locals.get("self") if frame.f_code.co_filename.endswith("_fsdp_param_group.py") else None
    return getattr(group, "_module_fqn", None)


def watch_communication(module: ShardedModule, entered: Callable[[str], None], left: Callable[[], None]) -> None:
    """Call ``entered(what)`` and ``left()`` around what FSDP2 does for the parameters of one unit.

    ``what`` is ``"unshard"`` (gathering), ``"wait_for_unshard"`` (copying out), ``"post_forward"`` (freeing),
    ``"post_backward"`` (reducing). FSDP2 gathers the next unit while this one runs; no hook tells whose parameters a
    collective carries.
    """
    for group in _groups(module):
        for what in ("unshard", "wait_for_unshard", "post_forward", "post_backward"):
            setattr(group, what, _watched(getattr(group, what), functools.partial(entered, what), left))
