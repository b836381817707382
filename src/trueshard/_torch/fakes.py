"""Fake tensors: a shape, a dtype and a storage, and no memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from trueshard._torch.tensors import storage_identity


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


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` was made inside ``fake_tensors``."""
    return isinstance(tensor, FakeTensor)


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
