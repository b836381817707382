"""Parts of a simulation: operators under a dispatch mode, fake tensors, simulated groups, parts that are replaced."""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from trueshard._torch.tensors import storage_identity


def schema_of(func: Any) -> Any:
    """Return the schema of an operator that a dispatch mode sees: its name and its arguments."""
    return func._schema


def packet_of(func: Any) -> Any:
    """Return the operator without its overload, as ``torch.ops.aten.add`` is."""
    return func._overloadpacket


def called_by_mode(frame: Any) -> bool:
    """True if the operator that ``frame`` (a dispatch mode's) sees was called by another mode's method."""
    caller, between = frame.f_back, ("torch/_ops.py", "torch/_compile.py", "torch/_dynamo/eval_frame.py")
    while caller is not None and caller.f_code.co_filename.endswith(between):
        caller = caller.f_back
    return caller is not None and caller.f_code.co_name == "__torch_dispatch__"


def engine_calls(frame: Any) -> bool:
    """True if the autograd engine itself called the function of ``frame`` (a dispatch mode's caller)."""
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    while frame is not None and frame.f_code.co_filename.endswith(("torch/_compile.py", "torch/_dynamo/eval_frame.py")):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


HELD = 4, 2
"""Uses of a tensor and of its storage that the call of a dispatch mode itself makes up for."""


def is_held_once(tensor: torch.Tensor) -> bool:
    """True if only the arguments of the operator that a dispatch mode sees hold ``tensor`` and its storage."""
    dense = tensor.is_contiguous() or torch._prims_common.is_non_overlapping_and_dense_or_false(tensor)
    uses = int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
    return dense and int(cast(Any, tensor)._use_count()) <= HELD[0] and uses <= HELD[1]


def device_asked(func: Any, args: Any) -> Any:
    """Return a fake tensor's device if ``func`` asks for that, as the engine of autograd does all the time; else None.

    Half of all that dispatch modes see is this question, which torch would hand from mode to mode.
    """
    return args[0].fake_device if func is _DEVICE and type(args[0]) is FakeTensor else None


_DEVICE = torch.ops.prim.device.default


def makes_fake_tensors() -> bool:
    """True inside ``fake_tensors`` (and not inside ``real_tensors`` in it)."""
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


#: Inside, make real tensors in the middle of ``fake_tensors``.
real_tensors: Callable[[], AbstractContextManager[Any]] = unset_fake_temporarily

#: Inside, no dispatch mode sees what runs.
unwatched: Callable[[], AbstractContextManager[Any]] = _disable_current_modes


def is_fake(tensor: torch.Tensor) -> bool:
    """True if ``tensor`` was made inside ``fake_tensors``."""
    return isinstance(tensor, FakeTensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """True if ``tensor`` is a plain tensor, or a fake one, which stands for a plain one."""
    return type(tensor) is torch.Tensor or type(tensor) is FakeTensor


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the address of each tensor's memory; fake tensors get addresses far apart from storage to storage."""
    tensors = list(tensors)
    if not tensors or type(tensors[0]) is not FakeTensor:  # asked of hundreds in every step: never a mixture
        return list(map(torch.Tensor.data_ptr, tensors))
    order: dict[int, int] = {}
    starts = [order.setdefault(storage_identity(tensor), len(order) + 1) << 48 for tensor in tensors]
    return [
        start + int(tensor.storage_offset()) * tensor.itemsize for start, tensor in zip(starts, tensors, strict=True)
    ]


@contextlib.contextmanager
def simulated_world(rank: int, ranks: int) -> Iterator[None]:
    """Inside, this process simulates ``rank`` of ``ranks``: collectives do nothing. At the end its own groups are back.

    torch's ``fake`` backend is registered by a module for its tests; and there can be one default group at a time, so
    the one that the user made is set aside, with the counter by which ranks agree on names of groups.
    """
    import torch.testing._internal.distributed.fake_pg as fake

    c10d = torch.distributed.distributed_c10d
    state = c10d._world
    tables: list[dict[Any, Any]] = [state.pg_map, state.pg_names, state.pg_group_ranks, state.pg_backend_config]
    tables += [state.pg_to_tag, state.tags_to_pg]
    default, count, method = state.default_pg, state.group_count, c10d._default_pg_init_method
    names_of_own = dict(state.pg_names)
    for name in names_of_own.values():
        c10d._unregister_process_group(name)
    # The same names in every simulated world: DTensor remembers meshes, and finds their groups by name.
    state.default_pg, state.group_count = None, 0
    try:
        with contextlib.ExitStack() as aside:
            for table in tables:
                aside.enter_context(mock.patch.dict(table, clear=True))
            aside.enter_context(mock.patch.object(sys, "excepthook", sys.excepthook))
            try:
                torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=ranks)
                yield
            finally:
                for group in list(state.pg_names):
                    c10d._unregister_process_group(group.group_name)
    finally:
        for group, name in names_of_own.items():
            c10d._register_process_group(name, group)
        state.default_pg, state.group_count, c10d._default_pg_init_method = default, count, method


def watching_resizes(resized: Callable[[Any, int], None]) -> AbstractContextManager[Any]:
    """Inside, call ``resized(storage, bytes before)`` after each ``UntypedStorage.resize_``.

    FSDP2 frees and takes the memory of gathered parameters this way, which no operator shows.
    """
    original = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        before = storage.nbytes()
        result = original(storage, size)
        resized(storage, before)
        return result

    return mock.patch.object(torch.UntypedStorage, "resize_", resize)


class _Chunks:
    """``torch.chunk`` that makes each chunk when it is read; empty ones behind the last."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self.tensor, self.count, self.dim = tensor, count, dim
        self.rows = -(-tensor.size(dim) // count)

    def __getitem__(self, number: int) -> torch.Tensor:
        start = self.rows * number
        left = self.tensor.size(self.dim) - start
        if left <= 0:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(self.rows, left))

    def joined(self, dim: int) -> torch.Tensor:
        """Return a view of the memory with the shape that equal chunks have one behind the other along ``dim``."""
        shape = list(self.tensor.shape)
        shape[self.dim] //= self.count
        shape[dim] *= self.count
        strides = [*itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)][::-1]
        return self.tensor.as_strided(shape, strides)


class _WithoutChunks:
    """Stands for ``torch`` where FSDP2 rearranges what is cut along another dimension than the first, by chunks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def chunk(self, tensor: torch.Tensor, count: int, dim: int = 0) -> Any:
        return (_Chunks if tensor.is_contiguous() else torch.chunk)(tensor, count, dim)

    def cat(self, chunks: Any, dim: int = 0, **out: Any) -> torch.Tensor:
        return torch.cat([chunks.joined(dim)] if isinstance(chunks, _Chunks) else chunks, dim, **out)


@contextlib.contextmanager
def one_chunk() -> Iterator[None]:
    """Inside, FSDP2 makes the one chunk of a parameter that it keeps, and not one for each of 4,096 ranks.

    On fake tensors, where a chunk costs as much as any operation, that would be most of what ``fully_shard`` takes, and
    of a step with parameters that are cut along another dimension: one kernel that copies all of it stands for theirs.
    """
    with (
        mock.patch.object(_fsdp_param, "_chunk_with_empty", _Chunks),
        mock.patch.object(_fsdp_collectives, "torch", _WithoutChunks()),
    ):
        yield


def unseen_propagation() -> AbstractContextManager[Any]:
    """Inside, hide from dispatch modes the tensors that DTensor makes, at the first operator of a kind, to find shapes.

    It makes fake tensors for that. In training they take no memory; where all tensors are fake they look like any
    other, and only until DTensor remembers the answer.
    """
    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(*args, **kwargs)

    return mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate)
