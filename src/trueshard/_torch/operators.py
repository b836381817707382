"""Operators that DTensor gets wrong, put right for the whole process. Its table of handlers has no public place."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from trueshard._torch.capabilities import IS_2_11
from trueshard._torch.tensors import local

_aten = torch.ops.aten
_RANDOM = "normal_ uniform_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_ random_"
_RANDOM += " randn_like rand_like randint_like"


def _handlers() -> dict[Any, Any]:
    return DTensor._op_dispatcher._custom_op_handlers


def find_every_inf() -> None:
    """Let a gradient scaler see the infs of every gradient in a list, on whichever ranks they are.

    torch's DTensor handler of the scaler's operator reduces what each rank found as the *first* gradient of the list is
    placed. With a replicated gradient at the head it reduces nothing, with two meshes over one of them, and ranks part:
    some skip the step. Handlers of DTensor's operators have no public place. For a list that is placed all alike this
    one computes the same.
    """
    _handlers()[_aten._amp_foreach_non_finite_check_and_unscale_.default] = _unscale


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
    for each in (_aten._foreach_lerp_.Scalar, _aten._foreach_sub.List, _aten._foreach_addcdiv_.Scalar):
        _handlers().setdefault(each, _apart)


def _apart(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """Run a list operator on the DTensors of its lists, and on the plain tensors, each by themselves."""
    first = args[0]
    kinds = [isinstance(tensor, DTensor) for tensor in first]
    found: dict[int, torch.Tensor] = {}
    for kind in set(kinds):
        places = [i for i, each in enumerate(kinds) if each is kind]
        some = [[arg[i] for i in places] if isinstance(arg, (list, tuple)) else arg for arg in args]
        found.update(zip(places, _without_handler(operator, some, kwargs) or (), strict=False))
    return [found[i] for i in range(len(first))] if found else None


def _without_handler(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator as DTensor does without its handler here."""
    handler = _handlers().pop(operator)
    try:
        return operator(*args, **kwargs)
    finally:
        _handlers()[operator] = handler


def read_numbers_of_the_whole(agree: Callable[[DTensor], Any]) -> None:
    """Let ``.item()``, ``float()``, ``bool()`` and f-strings of a DTensor give the number of the whole, on every rank.

    DTensor gives this rank's part of a sum or a norm, and the largest of all ranks' that is a number where one is NaN.
    ``agree`` is called before ranks exchange theirs, and raises where not all of them do.
    """

    def read(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (value,) = args
        if all(placement.is_replicate() for placement in value.placements) or value.device_mesh.size() == 1:
            return local(value).item()
        agree(value)
        with torch.no_grad():
            return math.nan if _is_nan_somewhere(value) else _gathered(value).item()

    def formatted(self: DTensor, specification: str) -> str:
        return format(self.detach().item() if self.dim() == 0 and not self.is_meta else str(self), specification)

    _handlers()[_aten._local_scalar_dense.default] = read
    DTensor.__format__ = formatted  # type: ignore[assignment, method-assign]


def assign_data_with(assign: Callable[[DTensor, torch.Tensor], None]) -> None:
    """Let ``p.data = w`` of a DTensor call ``assign(p, w)``. torch changes the outer tensor alone: shards stay."""
    inner: Any = torch.Tensor.data

    def assigned(self: DTensor, value: torch.Tensor) -> None:
        if local(self).is_meta:
            inner.__set__(self, value)
        else:
            assign(self, value)

    DTensor.data = property(inner.__get__, assigned)  # type: ignore[assignment]


def take_plain_tensors(agree: Callable[[DTensor], Any], whole: Callable[[DTensor], torch.Tensor]) -> None:
    """Let DTensors compute with plain tensors: a number with any, giving a plain one, others with one of their shape.

    DTensor refuses plain tensors, or breaks in backward. A penalty that is added to a loss and weights that are held
    against those of before are written so. ``numpy()`` gives the whole, and ``p[i] = x`` is written to the shards.
    ``agree`` is called before ranks exchange values for one of them; ``whole`` makes a number plain.
    """
    for name in ("add", "sub", "mul", "truediv"):
        for word in (f"__{name}__", f"__r{name}__"):
            setattr(DTensor, word, _with_plain(getattr(torch.Tensor, word), whole))
    for each in ("copy_", "add_", "sub_", "mul_", "lerp_"):
        packet = getattr(_aten, each)
        for overload in {"default", "Tensor", "Scalar"} & set(packet.overloads()):
            _handlers().setdefault(getattr(packet, overload), _in_place)

    def numpy(self: DTensor, *, force: bool = False) -> Any:
        agree(self)
        return self.full_tensor().numpy(force=force)

    def write(self: DTensor, index: Any, value: Any) -> None:
        if torch.is_grad_enabled() and self.requires_grad:
            raise RuntimeError("a sharded tensor that requires grad is written to in place: do it under no_grad()")
        with torch.no_grad():
            values = self.full_tensor()
            values[index] = value.full_tensor() if isinstance(value, DTensor) else value
            self.copy_(_cut(values, self))

    DTensor.numpy = numpy  # type: ignore[assignment, method-assign]
    DTensor.__setitem__ = write  # type: ignore[assignment, method-assign]


def _with_plain(
    inner: Callable[[Any, Any], Any], whole: Callable[[DTensor], torch.Tensor]
) -> Callable[[Any, Any], Any]:
    @functools.wraps(inner)
    def compute(self: DTensor, other: Any) -> Any:
        if isinstance(other, torch.Tensor) and not isinstance(other, DTensor):
            if self.dim() == 0:
                return inner(whole(self), other)
            if other.shape == self.shape and not other.requires_grad:
                return inner(self, _cut(other, self))
        return inner(self, other)

    return compute


def _in_place(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, other = args[:2]
    one_kind = isinstance(target, DTensor) is isinstance(other, DTensor) or not isinstance(other, torch.Tensor)
    if one_kind or other.dim() == 0 < target.dim():
        return _without_handler(operator, args, kwargs)
    if isinstance(target, DTensor):
        if other.shape == target.shape:
            other = _cut(other, target)
        return _without_handler(operator, (target, other, *args[2:]), kwargs)
    if torch.is_grad_enabled() and other.requires_grad:
        raise RuntimeError("a plain tensor gets a sharded one in place (loss += …): write loss = loss + … instead")
    return operator(target, _gathered(other), *args[2:], **kwargs)


def _is_nan_somewhere(value: DTensor) -> bool:
    """True if a rank's part of a maximum or minimum is NaN, which the collective of these drops."""
    reductions = {getattr(placement, "reduce_op", None) for placement in value.placements}
    if not value.is_floating_point() or reductions.isdisjoint({"max", "min"}):
        return False
    placements = [Partial("max") if placement.is_partial() else placement for placement in value.placements]
    flags = local(value).isnan().to(torch.uint8)
    return bool(DTensor.from_local(flags, value.device_mesh, placements, run_check=False).full_tensor())


def compare_tensors() -> None:
    """Let ``a != b`` take DTensors: torch 2.11 has a rule for every comparison but this one."""
    if IS_2_11:
        _handlers().setdefault(_aten.ne.Tensor, lambda _, args, kwargs: torch.eq(*args, **kwargs).logical_not())


def _gathered(value: Any) -> torch.Tensor:
    """Gather a DTensor inside a handler. torch 2.11 refuses that there for one that requires grad."""
    whole: torch.Tensor = value.detach().full_tensor()
    return whole


def draw_as_one_device() -> None:
    """Let random operators on DTensors draw what one device draws from the same seed: the whole, of which each rank
    keeps its part.

    On CPUs every rank draws the same for its part; on other devices DTensor's offsets are those of no single device.
    """
    for packet in (getattr(_aten, name) for name in _RANDOM.split()):
        overloads = (getattr(packet, name) for name in packet.overloads())
        _handlers().update((each, _draw) for each in overloads if not each._schema.arguments[-1].is_out)


def _draw(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given, *others = args
    can_cut = all(type(placement) in (Replicate, Shard) for placement in given.placements)
    if local(given).is_meta or not can_cut or any(isinstance(each, DTensor) for each in others):
        return _without_handler(operator, args, kwargs)
    whole = torch.empty(given.shape, dtype=given.dtype, device=local(given).device)
    part = _cut(operator(whole, *others, **kwargs), given)
    if not operator._schema.is_mutable:
        return part
    local(given).copy_(local(part))
    return given


def _cut(whole: torch.Tensor, like: DTensor) -> DTensor:
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
