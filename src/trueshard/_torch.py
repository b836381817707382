"""The only place that touches PyTorch's private names.

Each function says why nothing public serves. ``tests/test_torch_private.py`` calls every one of them, so a release of
torch that moves one of these names fails there, by name, and not in a user's run. Supported: torch 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import _composable_state
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:

    class ShardedModule(FSDPModule, nn.Module):
        """A module on which ``fully_shard`` was called; torch's own type does not say that it is a module."""
else:
    ShardedModule = FSDPModule

#: What sees every operator that runs inside it, and every leaf of nested containers; neither has a public name.
DispatchMode = TorchDispatchMode
leaves_of = _pytree.tree_leaves
map_only = _pytree.tree_map_only

#: What torch itself keeps in a parameter's ``__dict__``: ``nn.Parameter``'s mark, and ``fully_shard``'s (2.13 on).
PARAMETER_ATTRIBUTES = frozenset({"_is_param", "_fsdp_orig_uid"})


def wrapper_attribute(module: nn.Module) -> str | None:
    """The attribute under which a naming wrapper holds the user's module, or None for any other module.

    ``torch.compile(module)`` and activation checkpointing's ``checkpoint_wrapper`` put an attribute of their own into
    every name below them; no public function tells which.
    """
    # Asked through sys.modules: a module cannot be an OptimizedModule unless dynamo is imported, which costs a second.
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is not None and isinstance(module, eval_frame.OptimizedModule):
        return "_orig_mod"
    if isinstance(module, CheckpointWrapper):
        return "_checkpoint_wrapped_module"
    return None


def renames_when_loading(wrapper: nn.Module) -> bool:
    """Whether a naming wrapper itself puts its attribute into the keys of a state dict that is loaded."""
    return isinstance(wrapper, CheckpointWrapper)


def is_compiled_in_place(module: nn.Module) -> bool:
    """True after ``module.compile()``, which no public attribute shows."""
    return module._compiled_call_impl is not None


def _groups(module: ShardedModule) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # 2.12 on
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def own_class(module: nn.Module) -> type:
    """The user's class of a module, before and after ``fully_shard``, which puts one of its own in front."""
    cls = type(module)
    return cls.__mro__[FSDPModule._orig_cls_mro_index] if isinstance(module, FSDPModule) else cls


def fsdp_modules(root: nn.Module) -> list[ShardedModule]:
    """Every module below ``root`` (itself included) on which ``fully_shard`` was called."""
    return [module for module in root.modules() if isinstance(module, ShardedModule)]


def forget(modules: Iterable[nn.Module]) -> None:
    """Remove FSDP's registration of ``modules``, so that a failed ``fully_shard`` can be tried again.

    The rest of what ``fully_shard`` does lies in the module's own ``__dict__`` and class; this one is a global table.
    """
    for module in modules:
        _composable_state._module_state_mapping.pop(module, None)


def initialise(root: ShardedModule) -> None:
    """Fix ``root`` as the root of its units, now and not at the first forward.

    Otherwise the first submodule called from outside ``forward`` would take the place of the root, and what FSDP2
    checks lazily (dtypes, ties) would fail in the first step instead of in ``shard()``.
    """
    fake = [
        parameter
        for module in fsdp_modules(root)
        for group in _groups(module)
        for parameter in group.fsdp_params
        if type(parameter._sharded_param_data) is FakeTensor
    ]
    for parameter in fake:  # FSDP2 tells by addresses that its shards are padded already, and fake ones have none
        parameter.reset_sharded_param = lambda: None
    try:
        root._get_fsdp_state()._lazy_init()
    finally:
        for parameter in fake:
            parameter.__dict__.pop("reset_sharded_param", None)  # one that is tied is there twice


def is_initialised(root: ShardedModule) -> bool:
    """Whether ``initialise`` was called, or a first forward did the same."""
    return root._get_fsdp_state()._is_root is not None


def refresh_dtypes(root: nn.Module) -> None:
    """Read again which parameters are trainable: FSDP2 does so once, and a thawed unit would reduce in no dtype."""
    for module in fsdp_modules(root):
        for group in _groups(module):
            group._init_mp_dtypes()


def gathered_parameters(root: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    """(name, sharded parameter, gathered parameter) for each parameter that has been gathered once.

    The gathered parameter is a second object behind the same name; an optimizer made while it is registered holds it.
    """
    for module in fsdp_modules(root) if recurse else [cast(ShardedModule, root)]:
        for group in _groups(module):
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    yield parameter._param_fqn or "?", parameter.sharded_param, parameter._unsharded_param


def offloaded(root: nn.Module) -> set[int]:
    """The ``id`` of each sharded parameter that rests on the CPU between uses, which one on the meta device hides."""
    groups = [group for module in fsdp_modules(root) for group in _groups(module)]
    return {id(each.sharded_param) for group in groups for each in group.fsdp_params if each.offload_to_cpu}


def forget_gathered(module: ShardedModule) -> None:
    """Let a unit make its gathered parameters anew if they are of another dtype than its shards by now."""
    for group in _groups(module):
        for parameter in group.fsdp_params:
            gathered = getattr(parameter, "_unsharded_param", None)
            compute = parameter.mp_policy.param_dtype or parameter.sharded_param.dtype
            if gathered is not None and gathered.is_floating_point() and gathered.dtype != compute:
                del parameter._unsharded_param
                parameter.all_gather_outputs = []


def gathered_units(modules: Iterable[ShardedModule]) -> Callable[[], list[ShardedModule]]:
    """A function that tells which of ``modules`` have their gathered parameters registered; no public method does.

    A function, since it is asked at every pass: what leads from a module to FSDP2's record is looked up once.
    """
    records = [(module, group) for module in modules for group in _groups(module)]
    return lambda: [module for module, group in records if group.is_unsharded]


def in_pass(module: nn.Module) -> bool:
    """Whether the unit is in a forward, or recomputes one in backward, right now."""
    return isinstance(module, ShardedModule) and module._get_fsdp_state()._training_state in (
        TrainingState.FORWARD,
        TrainingState.PRE_BACKWARD,
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested containers; ``torch.utils._pytree`` is what knows the registered ones."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def interrupted(root: ShardedModule) -> bool:
    """Whether a forward or backward of ``root`` was left by an exception. Call it outside forward and backward."""
    context = root._get_fsdp_state()._state_ctx
    if context.iter_forward_root is not None or context.post_backward_final_callback_queued:
        return True
    return any(state._training_state != TrainingState.IDLE for state in context.all_states)


def reset_iteration(root: ShardedModule) -> None:
    """``FSDPModule.reset_iter_state`` (2.13 on), the same for the releases before it, and gathered gradients dropped.

    A backward that was cut short leaves gradients on gathered parameters, which the next one would add to its own.
    """
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_iteration_before_2_13(root)
    for module in fsdp_modules(root):
        for group in _groups(module):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def _reset_iteration_before_2_13(root: ShardedModule) -> None:
    state = root._get_fsdp_state()
    context, communication = state._state_ctx, state._comm_ctx
    communication.all_gather_state = None
    if hasattr(communication, "reduce_scatter_state"):
        communication.reduce_scatter_state = None
    communication.post_forward_order.clear()
    for each in context.all_states:
        each._training_state = TrainingState.IDLE
    for module in fsdp_modules(root):
        for group in _groups(module):
            if group._all_gather_result is not None:
                group.wait_for_unshard()
            group._training_state = TrainingState.IDLE
            group._post_forward_indices.clear()
            group._post_reduce_event = None
            group._all_reduce_state = None
            group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._to_sharded()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def set_reshard_after_forward(module: ShardedModule, policy: bool | int, meshes: dict[Any, DeviceMesh]) -> None:
    """``FSDPModule.set_reshard_after_forward``, for one unit, that also takes a node size.

    The public setter refuses integers, and ``fully_shard(reshard_after_forward=int)`` makes new process groups for
    each unit. ``meshes`` is the caller's table of the smaller meshes, so that a size makes its groups once.
    """
    if isinstance(policy, bool):
        module.set_reshard_after_forward(policy, recurse=False)
        return
    module._get_fsdp_state()._auto_reshard_after_forward = False
    for group in _groups(module):
        mesh = group.mesh_info.mesh
        if (mesh, policy) not in meshes:
            with real_tensors():
                ranks = mesh.mesh.view(-1, policy)
                meshes[mesh, policy] = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("replicate", "shard"))
        info = HSDPMeshInfo(meshes[mesh, policy], shard_mesh_dim=1, replicate_mesh_dim=0)
        group.post_forward_mesh_info = info
        for parameter in group.fsdp_params:
            parameter.post_forward_mesh_info = info
            whole = torch.empty(parameter._orig_size, device="meta")
            parameter._init_sharded_post_forward_param_metadata(whole)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard without ``to_local()``'s autograd node and view: versions and storages are the shard's own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def shards_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """``local`` of each."""
    return [each._local_tensor if isinstance(each, DTensor) else each for each in parameters]


def dtensor_over(local: torch.Tensor, like: DTensor, shape: torch.Size, stride: tuple[int, ...]) -> DTensor:
    """``DTensor.from_local`` for a shard that may lie anywhere in its storage.

    Made from such a shard, the wrapper takes over its offset, and can then be neither copied nor pickled.
    """
    first = local.as_strided(local.shape, local.stride(), 0) if local.storage_offset() else local
    made = DTensor.from_local(first, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)
    if first is not local:
        made._local_tensor = local
    return made


def make_hookable(optimizer: torch.optim.Optimizer) -> None:
    """What ``Optimizer.__init__`` does for step hooks; wrappers of optimizers often do without it."""
    for kind in ("step_pre", "step_post", "state_dict_pre", "state_dict_post"):
        optimizer.__dict__.setdefault(f"_optimizer_{kind}_hooks", OrderedDict())
    if not getattr(type(optimizer).step, "hooked", False):
        optimizer._patch_step_function()


def shards_placed_alike(tensors: Sequence[Any]) -> list[torch.Tensor] | None:
    """The local shards of DTensors that are all on one mesh, with one placement, dtype and device; else None."""
    if set(map(type, tensors)) != {DTensor}:
        return None
    specs = [tensor._spec for tensor in tensors]
    shards = [tensor._local_tensor for tensor in tensors]
    mesh, placements = specs[0].mesh, specs[0].placements
    alike = (
        all(spec.mesh is mesh and spec.placements == placements for spec in specs)
        and len(set(map(operator.attrgetter("dtype"), shards))) == 1
        and len(set(map(torch.Tensor.get_device, shards))) == 1
    )
    return shards if alike else None


def specs_of(tensors: Iterable[Any]) -> list[Any]:
    """DTensor's own records of shape, mesh and placement; None for a plain tensor."""
    return [tensor._spec if type(tensor) is DTensor else None for tensor in tensors]


def is_placed_as(one: DTensor, two: DTensor) -> bool:
    """Whether both are cut alike. FSDP2 gives a gradient the very record of its parameter, so asking is cheap."""
    return one._spec is two._spec or one.placements == two.placements


def join_shards(root: nn.Module, small: int) -> None:
    """Put shards of parameters behind one another in memory: a unit's in the order of its gradients, trainable first;
    those of at most ``small`` bytes by themselves, over all units.

    FSDP2 allocates each by itself; there is no public place to give it memory. Each keeps a version counter of its own,
    so that a write to one is not a write to all.
    """
    kinds: dict[Any, list[Any]] = {}
    for module in fsdp_modules(root):
        for group in _groups(module):
            for parameter in group.fsdp_params:
                data = parameter._sharded_param_data
                if is_plain(data) and not data.is_meta and not parameter.offload_to_cpu:
                    unit = None if data.nbytes <= small else module
                    key = unit, data.dtype, data.device, not parameter.sharded_param.requires_grad
                    kinds.setdefault(key, []).append(parameter)
    for parameters in kinds.values():
        if len(parameters) < 2:
            continue
        sizes = [parameter._sharded_param_data.numel() for parameter in parameters]
        memory = torch.cat([parameter._sharded_param_data for parameter in parameters])
        for parameter, part in zip(parameters, memory.split(sizes), strict=True):
            rows = parameter.sharded_param._local_tensor.size(0) if part.numel() else 0
            data = parameter._sharded_param_data = part.data
            padded = data.view(parameter.padded_sharded_param_size)
            parameter.sharded_param._local_tensor = padded.narrow(0, 0, rows)


def world() -> Any:
    """The default process group."""
    return torch.distributed.distributed_c10d._get_default_group()


def timeout_of(group: Any) -> Any:
    """The time limit that the user gave a process group, for groups beside it; None if that cannot be told."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            return group._get_backend(torch.device(device)).options._timeout
    return None


def storage_identity(tensor: torch.Tensor) -> int:
    """A number that two tensors share exactly if they share memory; addresses do not tell (meta tensors' are all 0)."""
    return int(tensor.untyped_storage()._cdata)


def version(tensor: torch.Tensor) -> int:
    """A number that grows when ``tensor`` is written to in place, through it or through its local shard.

    torch documents the counter under its private name only. DTensor's dispatch counts on the wrapper alone.
    """
    return int(tensor._version) + (int(tensor._local_tensor._version) if isinstance(tensor, DTensor) else 0)


def find_every_inf() -> None:
    """Let a gradient scaler see the infs of every gradient in a list, on whichever ranks they are.

    torch's DTensor handler of the scaler's operator reduces what each rank found as the *first* gradient of the list is
    placed. With a replicated gradient at the head it reduces nothing, with two meshes over one of them, and ranks part:
    some skip the step. Handlers of DTensor's operators have no public place. For a list that is placed all alike this
    one computes the same.
    """
    operator = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[operator] = _unscale


def _unscale(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    grads, found_inf, *rest = args
    operator([local(grad) for grad in grads], found_inf, *rest, **kwargs)
    placed = {(g.device_mesh, g.placements): None for g in grads if isinstance(g, DTensor)}
    over = {(m, d): m.size(d) for m, placements in placed for d, p in enumerate(placements) if not p.is_replicate()}
    # From few ranks to many: what is found among the few reaches all. Equally many: as in the list, on every rank.
    for mesh, dim in sorted(over, key=lambda each: over[each]):
        torch.distributed.all_reduce(found_inf, torch.distributed.ReduceOp.MAX, mesh.get_group(dim))


def average_mixed_lists() -> None:
    """Let torch's averaging functions (EMA, SWA) take lists in which plain tensors stand beside DTensors.

    ``AveragedModel(use_buffers=True)`` puts parameters and buffers into one list, which DTensor refuses. Its public
    switch for that, ``implicit_replication``, would have to be on around the user's own call. A list that is not mixed
    goes its usual way.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    aten = torch.ops.aten
    for each in (aten._foreach_lerp_.Scalar, aten._foreach_sub.List, aten._foreach_addcdiv_.Scalar):
        handlers.setdefault(each, _apart)


def _apart(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """Run a list operator on the DTensors of its lists, and on the plain tensors, each by themselves."""
    first = args[0]
    kinds = [isinstance(tensor, DTensor) for tensor in first]
    found: dict[int, torch.Tensor] = {}
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    del handlers[operator]  # or calling it would come here again
    try:
        for kind in set(kinds):
            places = [i for i, each in enumerate(kinds) if each is kind]
            some = [[arg[i] for i in places] if isinstance(arg, (list, tuple)) else arg for arg in args]
            found.update(zip(places, operator(*some, **kwargs) or (), strict=False))
    finally:
        handlers[operator] = _apart
    return [found[i] for i in range(len(first))] if found else None


def has_accumulation_hooks(tensor: torch.Tensor) -> bool:
    """Whether ``register_post_accumulate_grad_hook`` was called on ``tensor`` (and its handle not removed)."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def call_first(tensor: torch.Tensor, handle: RemovableHandle) -> None:
    """Put one hook of ``register_post_accumulate_grad_hook`` before the others, where FSDP2 calls them in turn."""
    hooks: Any = tensor._post_accumulate_grad_hooks
    hooks.move_to_end(handle.id, last=False)


def at_end_of_backward(function: Any) -> None:
    """Call ``function()`` once when the running backward has finished. FSDP2 itself has only this way."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def in_backward() -> bool:
    """Whether this thread runs a backward now (activation recomputation included)."""
    return torch._C._current_graph_task_id() != -1


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is of no subclass that means something: fake tensors stand for plain ones."""
    return type(tensor) is torch.Tensor or type(tensor) is FakeTensor


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Where each tensor's memory begins. Fake tensors have none: theirs are far apart from storage to storage."""
    tensors = list(tensors)
    if not tensors or type(tensors[0]) is not FakeTensor:  # asked of hundreds in every step: never a mixture
        return list(map(torch.Tensor.data_ptr, tensors))
    order: dict[int, int] = {}
    starts = [order.setdefault(storage_identity(each), len(order) + 1) << 48 for each in tensors]
    return [start + int(each.storage_offset()) * each.itemsize for start, each in zip(starts, tensors, strict=True)]


def begins_where(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether the memory of both begins at one address."""
    if type(two) is FakeTensor:
        return storage_identity(one) == storage_identity(two) and one.storage_offset() == two.storage_offset()
    return one.data_ptr() == two.data_ptr()


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside, every tensor that is made has a shape, a dtype, a device and a storage of its size, and no memory.

    ``FakeTensorMode`` is what ``torch.compile`` traces with; it has no public name.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def makes_fake_tensors() -> bool:
    """Whether this runs inside ``fake_tensors`` (and not inside ``real_tensors`` in it)."""
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Inside ``fake_tensors``, makes real ones for a while."""
    with unset_fake_temporarily():
        yield


@contextlib.contextmanager
def simulated_world(rank: int, ranks: int) -> Iterator[None]:
    """One process stands for rank ``rank`` of ``ranks``: collectives do nothing. The process's own groups come back.

    torch's ``fake`` backend is registered by a module for its tests; and there can be one default group at a time, so
    the one that the user made is set aside, with the counter by which ranks agree on names of groups.
    """
    import torch.testing._internal.distributed.fake_pg as fake

    c10d = torch.distributed.distributed_c10d
    state = c10d._world
    tables: list[dict[Any, Any]] = [state.pg_map, state.pg_names, state.pg_group_ranks, state.pg_backend_config]
    tables += [state.pg_to_tag, state.tags_to_pg]
    aside = [dict(table) for table in tables]
    own, count, method = state.default_pg, state.group_count, c10d._default_pg_init_method
    names_of_own = dict(state.pg_names)
    for name in names_of_own.values():
        c10d._unregister_process_group(name)
    for table in tables:
        table.clear()
    # The same names in every simulated world: DTensor remembers meshes, and finds their groups by name.
    state.default_pg, state.group_count = None, 0
    hook = sys.excepthook
    try:
        torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=ranks)
        yield
    finally:
        sys.excepthook = hook
        for group in list(state.pg_names):
            c10d._unregister_process_group(group.group_name)
        for table, before in zip(tables, aside, strict=True):
            table.clear()
            table.update(before)
        for group, name in names_of_own.items():
            c10d._register_process_group(name, group)
        state.default_pg, state.group_count, c10d._default_pg_init_method = own, count, method


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` was made inside ``fake_tensors``."""
    return isinstance(tensor, FakeTensor)


@contextlib.contextmanager
def watching_resizes(resized: Callable[[Any, int], None]) -> Iterator[None]:
    """Inside, ``resized(storage, bytes before)`` is called after each ``UntypedStorage.resize_``.

    FSDP2 frees and takes the memory of gathered parameters this way, which no operator shows.
    """
    original = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        before = storage.nbytes()
        result = original(storage, size)
        resized(storage, before)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


def group_named(name: Any) -> torch.distributed.ProcessGroup:
    """The process group that a functional collective names."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)


def watch_communication(module: ShardedModule, entered: Callable[[str], None], left: Callable[[], None]) -> None:
    """Call ``entered(what)`` and ``left()`` around what FSDP2 does for the parameters of one unit.

    ``what`` is ``"unshard"`` (gathering), ``"wait_for_unshard"`` (copying out), ``"post_forward"`` (freeing),
    ``"post_backward"`` (reducing). FSDP2 gathers the next unit while this one runs; no hook tells whose parameters a
    collective carries.
    """
    for group in _groups(module):
        for what in ("unshard", "wait_for_unshard", "post_forward", "post_backward"):
            setattr(group, what, _between(getattr(group, what), functools.partial(entered, what), left))


def _between(function: Any, entered: Callable[[], None], left: Callable[[], None]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        entered()
        try:
            return function(*args, **kwargs)
        finally:
            left()

    return call


def running_node() -> str:
    """Name of the autograd node whose backward runs in this thread, for example ``"MulBackward0"``; else ``""``."""
    node = torch._C._current_autograd_node()
    return "" if node is None else str(node.name())


def called_by_mode(frame: Any) -> bool:
    """Whether the operator that ``frame`` (that of a dispatch mode) sees was called by another mode's method."""
    caller, between = frame.f_back, ("torch/_ops.py", "torch/_compile.py", "torch/_dynamo/eval_frame.py")
    while caller is not None and caller.f_code.co_filename.endswith(between):
        caller = caller.f_back
    return caller is not None and caller.f_code.co_name == "__torch_dispatch__"


def engine_calls(frame: Any) -> bool:
    """Whether the autograd engine itself called what ``frame`` (that of a dispatch mode's caller) runs."""
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    while frame is not None and frame.f_code.co_filename.endswith(("torch/_compile.py", "torch/_dynamo/eval_frame.py")):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


HELD = 4, 2
"""Uses of a tensor and of its storage that the call of a dispatch mode itself makes up for."""


def is_held_once(tensor: torch.Tensor) -> bool:
    """Whether nobody holds ``tensor`` or its storage but the arguments of the operator that a dispatch mode sees."""
    dense = tensor.is_contiguous() or torch._prims_common.is_non_overlapping_and_dense_or_false(tensor)
    uses = int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
    return dense and int(cast(Any, tensor)._use_count()) <= HELD[0] and uses <= HELD[1]


class _Chunks(Sequence[torch.Tensor]):
    """``torch.chunk``, of which each is made when it is asked for; empty ones behind the last."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self.tensor, self.chunks, self.dim = tensor, count, dim
        self.rows = -(-tensor.size(dim) // count)

    def __len__(self) -> int:
        return self.chunks

    def __getitem__(self, number: Any) -> Any:
        start = self.rows * number
        left = self.tensor.size(self.dim) - start
        if left <= 0:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(self.rows, left))


@contextlib.contextmanager
def one_chunk() -> Iterator[None]:
    """Inside, FSDP2 cuts a parameter into the one chunk that it keeps, and not into one for each of 4,096 ranks first.

    On fake tensors, where a chunk costs as much as any operation, that would be most of what ``fully_shard`` takes.
    """
    original = _fsdp_param._chunk_with_empty
    _fsdp_param._chunk_with_empty = _Chunks  # type: ignore[assignment]
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = original


@contextlib.contextmanager
def unseen_propagation() -> Iterator[None]:
    """Inside, what DTensor makes to find out shapes, at the first operator of a kind, is seen by no dispatch mode.

    It makes fake tensors for that. In training they take no memory; where all tensors are fake they look like any
    other, and only until DTensor remembers the answer.
    """
    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(*args, **kwargs)

    ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = original  # type: ignore[method-assign]
