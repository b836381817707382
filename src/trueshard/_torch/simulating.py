"""What torch does otherwise while one process stands for a rank of many: worlds, and parts that are replaced."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes


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
