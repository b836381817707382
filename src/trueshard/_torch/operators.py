"""Operators that DTensor gets wrong, put right for tensors of sharded models; each function returns what undoes it.

DTensor looks an operator up in a table of handlers, which has no public place. Each function here takes ``ours``, which
tells whether a DTensor belongs to a sharded model; what is not ours goes torch's own way.

``[Note: No subclass of DTensor]`` A subclass for parameters would need no patch, but it reaches no further than the
parameter itself: DTensor's dispatch makes plain DTensors of every result (``p.norm()``, ``p - q``) and FSDP2 of every
gradient, and those are what most of this is about. It also breaks ``copy.deepcopy`` and checks by ``type(x)``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from trueshard._torch.capabilities import IS_2_11
from trueshard._torch.modules import in_backward
from trueshard._torch.patches import Undo, replace, together
from trueshard._torch.tensors import dtensor_from, local

_aten = torch.ops.aten
_RANDOM = "normal_ uniform_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_ random_"
_RANDOM += " randn_like rand_like randint_like"

Ours = Callable[[Any], bool]


def _handlers() -> dict[Any, Any]:
    return DTensor._op_dispatcher._custom_op_handlers


def handle(
    operators: Iterable[Any], compute: Callable[..., Any], ours: Ours, *, missing: bool = True, mixed: bool = False
) -> Undo:
    """Let DTensor do ``operators`` by ``compute(operator, args, kwargs)`` where an argument, or a tensor in a list, is
    ours; ``missing``: only those without a handler so far; ``mixed``: only beside a plain tensor that is no number.
    """
    before = {operator: _handlers().get(operator) for operator in operators}
    made = {}
    for operator, handler in before.items():
        if handler is None or not missing:
            made[operator] = functools.partial(_handled, compute, handler, ours, mixed)
    _handlers().update(made)

    def undo() -> None:
        for operator, handler in made.items():
            if _handlers().get(operator) is handler:
                _handlers().pop(operator)
                if before[operator] is not None:
                    _handlers()[operator] = before[operator]

    return undo


def _handled(
    compute: Any, before: Any, ours: Ours, mixed: bool, operator: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    flat = [tensor for arg in args for tensor in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    if any(map(ours, flat)) and (not mixed or any(map(_is_plain, flat))):
        return compute(operator, args, kwargs)
    return without_handler(operator, args, kwargs) if before is None else before(operator, args, kwargs)


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.dim() > 0


def without_handler(operator: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator as DTensor does without its handler here.

    The handler is out of the table meanwhile, so a mixed list of another thread may meet torch's refusal. A lock would
    be worse: the operator may wait for other ranks, whose threads wait for the lock.
    """
    handler = _handlers().pop(operator, None)
    try:
        return operator(*args, **kwargs)
    finally:
        if handler is not None:
            _handlers()[operator] = handler


def find_every_inf(ours: Ours) -> Undo:
    """Let a gradient scaler see the infs of every gradient in a list, on whichever ranks they are.

    torch's DTensor handler of the scaler's operator reduces what each rank found as the *first* gradient of the list is
    placed. With a replicated gradient at the head it reduces nothing, with two meshes over one of them, and ranks part:
    some skip the step. For a list that is placed all alike this one computes the same.
    """
    return handle([_aten._amp_foreach_non_finite_check_and_unscale_.default], _unscale, ours, missing=False)


def _unscale(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    grads, found_inf, *rest = args
    if found_inf.device.type == "cpu" and torch.accelerator.is_available():
        # Gradients that are offloaded: the scaler has sent it and the scale to the host without waiting for them.
        torch.accelerator.current_stream().synchronize()
    operator([local(grad) for grad in grads], found_inf, *rest, **kwargs)
    placed = {(g.device_mesh, g.placements): None for g in grads if isinstance(g, DTensor)}
    over = {(m, d): m.size(d) for m, placements in placed for d, p in enumerate(placements) if not p.is_replicate()}
    # From few ranks to many: what is found among the few reaches all. Equally many: as in the list, on every rank.
    for mesh, dim in sorted(over, key=lambda pair: over[pair]):
        torch.distributed.all_reduce(found_inf, torch.distributed.ReduceOp.MAX, mesh.get_group(dim))


def average_mixed_lists(ours: Ours) -> Undo:
    """Let torch's averaging functions (EMA, SWA) take lists in which plain tensors stand beside DTensors.

    ``AveragedModel(use_buffers=True)`` puts parameters and buffers into one list, which DTensor refuses. Its public
    switch for that, ``implicit_replication``, would have to be on around the user's own call. A copy that was made
    before ``shard()`` is whole: what it is averaged with is gathered.
    """
    operators = (_aten._foreach_lerp_.Scalar, _aten._foreach_sub.List, _aten._foreach_addcdiv_.Scalar)
    return handle(operators, _by_kind, ours)


def _by_kind(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """Run a list operator on the DTensors of its first list, and on the plain tensors, each by themselves."""
    first = args[0]
    args = tuple([list(map(_placed, arg, first)) if isinstance(arg, (list, tuple)) else arg for arg in args])
    kinds = [isinstance(tensor, DTensor) for tensor in first]
    results: dict[int, torch.Tensor] = {}
    for kind in set(kinds):
        places = [i for i, other in enumerate(kinds) if other is kind]
        some = [[arg[i] for i in places] if isinstance(arg, (list, tuple)) else arg for arg in args]
        results.update(zip(places, without_handler(operator, some, kwargs) or (), strict=False))
    return [results[i] for i in range(len(first))] if results else None


def _placed(value: Any, target: torch.Tensor) -> Any:
    """Return a tensor whole where ``target`` is a plain tensor, and cut like it where it is a DTensor of its shape."""
    if isinstance(value, DTensor):
        return value if isinstance(target, DTensor) else gathered(value)
    if isinstance(value, torch.Tensor) and isinstance(target, DTensor) and value.shape == target.shape:
        return cut_like(value, target)
    return value


def clip_over_meshes(ours: Ours) -> Undo:
    """Let ``clip_grad_norm_`` take gradients of several meshes, as experts beside other layers have them.

    torch stacks their norms and scales them as one list; DTensor has no operators over two meshes.
    """

    def stack(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = args[0]
        meshes = list(dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)))
        if len(meshes) == 1:
            return without_handler(operator, args, kwargs)
        full = [gathered(tensor) if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        stacked = operator(full, *args[1:], **kwargs)
        return dtensor_from(stacked, meshes[0], [Replicate()] * meshes[0].ndim)

    def scale(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors, factor = args
        operator(list(map(local, tensors)), gathered(factor) if isinstance(factor, DTensor) else factor)

    stacked = handle([_aten.stack.default], stack, ours, missing=False)
    return together(stacked, handle([_aten._foreach_mul_.Tensor], scale, ours, missing=False))


def read_numbers_of_the_whole(ours: Ours, agree: Callable[[DTensor], Any]) -> Undo:
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
            return math.nan if _is_nan_somewhere(value) else gathered(value).item()

    inner = DTensor.__format__

    def formatted(self: DTensor, specification: str) -> str:
        if not ours(self):
            return inner(self, specification)
        return format(self.detach().item() if self.dim() == 0 and not self.is_meta else str(self), specification)

    undo = handle([_aten._local_scalar_dense.default], read, ours, missing=False)
    return together(undo, replace(DTensor, "__format__", formatted))


def gather_after(ours: Ours, meet: Callable[[DTensor], Any]) -> Undo:
    """Call ``meet`` before ``full_tensor()`` of a DTensor gathers, which some ranks may call alone."""
    inner: Any = DTensor.full_tensor

    @functools.wraps(inner)
    def full_tensor(self: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if ours(self) and not torch.compiler.is_compiling() and not in_backward():
            meet(self)
        return inner(self, *args, **kwargs)

    return replace(DTensor, "full_tensor", full_tensor)


def assign_data_with(ours: Ours, assign: Callable[[DTensor, torch.Tensor], None]) -> Undo:
    """Let ``p.data = w`` of a DTensor call ``assign(p, w)``. torch changes the outer tensor alone: shards stay."""
    inner: Any = torch.Tensor.data

    def assigned(self: DTensor, value: torch.Tensor) -> None:
        if local(self).is_meta or not ours(self):
            inner.__set__(self, value)
        else:
            assign(self, value)

    return replace(DTensor, "data", property(inner.__get__, assigned))


def take_plain_tensors(ours: Ours, agree: Callable[[DTensor], Any], whole: Callable[[DTensor], torch.Tensor]) -> Undo:
    """Let DTensors compute with plain tensors: a number with any, giving a plain one, others with one of their shape.

    DTensor refuses plain tensors, or breaks in backward. A penalty that is added to a loss and weights that are held
    against those of before are written so. ``numpy()`` gives the whole, and ``p[i] = x`` is written to the shards.
    ``agree`` is called before ranks exchange values for one of them; ``whole`` makes a number plain.
    """
    words = [f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv") for side in ("", "r")]
    undos = [replace(DTensor, word, _with_plain(getattr(torch.Tensor, word), ours, whole)) for word in words]
    packets = [getattr(_aten, name) for name in ("copy_", "add_", "sub_", "mul_", "lerp_")]
    kinds = ("default", "Tensor", "Scalar")
    in_place = [getattr(packet, kind) for packet in packets for kind in kinds if kind in packet.overloads()]
    undos.append(handle(in_place, _in_place, ours))
    inner_numpy, inner_write = torch.Tensor.numpy, torch.Tensor.__setitem__

    def numpy(self: DTensor, *, force: bool = False) -> Any:
        if not ours(self):
            return inner_numpy(self, force=force)
        agree(self)
        return self.full_tensor().numpy(force=force)

    def write(self: DTensor, index: Any, value: Any) -> None:
        if not ours(self):
            inner_write(self, index, value)
            return
        if torch.is_grad_enabled() and self.requires_grad:
            raise RuntimeError("a sharded tensor that requires grad is written to in place: do it under no_grad()")
        with torch.no_grad():
            values = self.full_tensor()
            values[index] = value.full_tensor() if isinstance(value, DTensor) else value
            self.copy_(cut_like(values, self))

    return together(*undos, replace(DTensor, "numpy", numpy), replace(DTensor, "__setitem__", write))


def _with_plain(
    inner: Callable[[Any, Any], Any], ours: Ours, whole: Callable[[DTensor], torch.Tensor]
) -> Callable[[Any, Any], Any]:
    @functools.wraps(inner)
    def compute(self: DTensor, other: Any) -> Any:
        if isinstance(other, torch.Tensor) and not isinstance(other, DTensor) and ours(self):
            if self.dim() == 0:
                return inner(whole(self), other)
            if other.shape == self.shape and not other.requires_grad:
                return inner(self, cut_like(other, self))
        return inner(self, other)

    return compute


def _in_place(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, other = args[:2]
    one_kind = isinstance(target, DTensor) is isinstance(other, DTensor) or not isinstance(other, torch.Tensor)
    if one_kind or other.dim() == 0 < target.dim():
        return without_handler(operator, args, kwargs)
    if isinstance(target, DTensor):
        if other.shape == target.shape:
            other = cut_like(other, target)
        return without_handler(operator, (target, other, *args[2:]), kwargs)
    if torch.is_grad_enabled() and other.requires_grad:
        raise RuntimeError("a plain tensor gets a sharded one in place (loss += …): write loss = loss + … instead")
    return operator(target, gathered(other), *args[2:], **kwargs)


def refuse_storage(ours: Ours, refuse: Callable[[], Any]) -> Undo:
    """Let ``storage()`` of a DTensor call ``refuse()``, which raises: serializers ask it for an address to write from.

    torch says that a pointer is invalid. safetensors comes here when ``untyped_storage().data_ptr()`` has failed.
    """
    inner = torch.Tensor.storage

    def storage(self: DTensor) -> Any:
        return refuse() if ours(self) else inner(self)

    return replace(DTensor, "storage", storage)


def refuse_mixed(ours: Ours, explain: Callable[[DTensor], str]) -> Undo:
    """Let a layer that is given a plain tensor and a sharded weight raise RuntimeError with ``explain(weight)``.

    torch says that it "got mixed torch.Tensor and DTensor", not which parameter, and not why it is sharded now.
    """
    products = [_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.linear.default]
    layers = [_aten.embedding.default, _aten.convolution.default, _aten.native_layer_norm.default]

    def refuse(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise RuntimeError(explain(next(arg for arg in args if ours(arg))))

    operators = [*products, *layers, _aten.mul.Tensor, _aten.add.Tensor]
    return handle(operators, refuse, ours, missing=False, mixed=True)


def _is_nan_somewhere(value: DTensor) -> bool:
    """True if a rank's part of a maximum or minimum is NaN, which the collective of these drops."""
    reductions = {getattr(placement, "reduce_op", None) for placement in value.placements}
    if not value.is_floating_point() or reductions.isdisjoint({"max", "min"}):
        return False
    placements = [Partial("max") if placement.is_partial() else placement for placement in value.placements]
    flags = local(value).isnan().to(torch.uint8)
    return bool(dtensor_from(flags, value.device_mesh, placements).full_tensor())


def compare_tensors(ours: Ours) -> Undo:
    """Let ``a != b`` take DTensors: torch 2.11 has a rule for every comparison but this one."""
    operators = [_aten.ne.Tensor] if IS_2_11 else []
    return handle(operators, lambda _, args, kwargs: torch.eq(*args, **kwargs).logical_not(), ours)


def gathered(value: Any) -> torch.Tensor:
    """Gather a DTensor inside a handler. torch 2.11 refuses that there for one that requires grad."""
    full: torch.Tensor = value.detach().full_tensor()
    return full


def draw_as_one_device(ours: Ours) -> Undo:
    """Let random operators on DTensors draw what one device draws from the same seed: the whole, of which each rank
    keeps its part.

    On CPUs every rank draws the same for its part; on other devices DTensor's offsets are those of no single device.
    """
    packets = [getattr(_aten, name) for name in _RANDOM.split()]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    operators = [operator for operator in overloads if not operator._schema.arguments[-1].is_out]
    return handle(operators, _draw, ours, missing=False)


def _draw(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, *others = args
    can_cut = all(type(placement) in (Replicate, Shard) for placement in target.placements)
    if local(target).is_meta or not can_cut or any(isinstance(other, DTensor) for other in others):
        return without_handler(operator, args, kwargs)
    full = torch.empty(target.shape, dtype=target.dtype, device=local(target).device)
    part = cut_like(operator(full, *others, **kwargs), target)
    if not operator._schema.is_mutable:
        return part
    local(target).copy_(local(part))
    return target


def cut_like(full: torch.Tensor, like: DTensor) -> DTensor:
    """Return this rank's part of ``full``, which every rank has, placed like ``like`` and on the same device."""
    part = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)  # on the mesh's device
    if local(part).device == local(like).device or full.requires_grad:
        return part
    shard = local(part).to(local(like).device)
    return dtensor_from(shard, like.device_mesh, like.placements, part.shape, part.stride())
