"""Memory that an operator takes for itself while it runs on a CPU, which no fake tensor shows.

Each rule was found by holding the simulated sequence of allocations against the allocator's own events, and names the
place in ATen (aten/src/ATen/native) that explains it. On an accelerator none of this applies: numbers travel as
arguments of kernels, kernels read mixed dtypes without casting first, and attention works in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trueshard import _torch
from trueshard.planner.simulation.kernels_on_cpu import KERNELS
from trueshard.planner.simulation.scripts import SMALL, Result, Rule, Script, every, size_of, summed_apart, within

_NUMBERS = (bool, int, float, complex)
_ARITHMETIC = {
    *("mul", "add", "sub", "div", "rsub", "remainder", "floor_divide", "true_divide", "fmod"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_or", "logical_xor"),
    *("maximum", "minimum", "atan2", "where", "addcmul", "addcdiv"),
}
_COMPARED = {"eq", "ne", "lt", "le", "gt", "ge"}
_TO_FLOAT = {
    *("sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh"),
    *("sigmoid", "erf", "asin", "acos", "atan", "sinh", "cosh"),
}
_REDUCTIONS = {"nansum", "prod", "cumsum", "cumprod", "linalg_vector_norm"}


def workspace(func: Any, args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """What ``func`` allocates on the CPU until it returns, its results among it.

    Args:
        func: the operator, as a dispatch mode sees it.
        args: its arguments.
        kwargs: the rest of them.
        results: the tensors that it returned; those that it was given count as well.

    Returns:
        Every result once, and what is taken in between; what is taken is given back.
    """
    name = func._schema.name.partition("::")[2]
    if name.startswith("_foreach_"):
        return _one_by_one(name.removeprefix("_foreach_"), args, kwargs, results)
    return _script(name, args, kwargs, results)


def saves_number(func: Any, args: Any) -> bool:
    """Whether autograd keeps the Python number among ``args``, as a tensor, until backward. Call it before ``func``.

    A product's gradient needs both factors. Source: ``mul`` and ``div`` of tools/autograd/derivatives.yaml.
    """
    return torch.is_grad_enabled() and _is_scaling(func, args) and bool(args[0].requires_grad)


def with_number(script: Script, func: Any, args: Any, *, again: bool, kept: bool) -> Script:
    """``script`` with what becomes of the tensor made of a Python number among ``args``.

    Args:
        script: that gives the number back at its end.
        func: the operator.
        args: its arguments.
        again: whether another dispatch mode handed the number on, which makes a second tensor of it.
        kept: whether autograd keeps the (first) one.
    """
    if func._overloadname != "Tensor" or len(args) < 2 or not isinstance(args[1], _NUMBERS):
        return script
    number = script[0]
    if _torch.running_node() in ("MulBackward0", "DivBackward0") and not torch.is_grad_enabled():
        return script[1:-1]  # the one that was kept
    if again:
        return [number, *script] if kept else [number, *script, -number]  # type: ignore[operator]
    return script[:-1] if kept else script


def _is_scaling(func: Any, args: Any) -> bool:
    return func._schema.name.removesuffix("_") in ("aten::mul", "aten::div") and (
        func._overloadname == "Tensor" and isinstance(args[1], _NUMBERS)
    )


def _script(name: str, args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    stem = name.removesuffix("_")
    rule = _RULES.get(stem)
    if rule is None and (stem in _ARITHMETIC or stem in _COMPARED or stem in _TO_FLOAT):
        return _elementwise(stem, args, stem != name, results)
    if rule is None and stem in _REDUCTIONS:
        rule = _cast_first
    return every(results) if rule is None else rule(args, kwargs, results)


def _one_by_one(name: str, args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """On a CPU, an operator on lists calls the single one in turn. Source: ForeachOpsKernels.cpp."""
    count = next((len(each) for each in args if isinstance(each, (list, tuple))), 0)
    script: Script = []
    for i in range(count):
        single = [each[i] if isinstance(each, (list, tuple)) and len(each) == count else each for each in args]
        made = results[i : i + 1]
        for step in _script(name, single, kwargs, made):
            script.append(Result(i) if isinstance(step, Result) else step)
    return script if len(results) <= count else every(results)


def _elementwise(stem: str, args: Any, in_place: bool, results: Sequence[torch.Tensor]) -> Script:
    """Operands of other dtypes are cast to the common one first; a Python number is a tensor without dimensions.

    Source: ``TensorIteratorBase::compute_types`` of ../TensorIterator.cpp, ``wrapped_scalar_tensor`` of ScalarOps.h.
    """
    operands = [each for each in args if isinstance(each, (torch.Tensor, *_NUMBERS))]
    operands = operands[1:] if stem == "where" else operands[: 3 if stem in ("addcmul", "addcdiv") else 2]
    tensors = [each for each in operands if isinstance(each, torch.Tensor)]
    if not tensors:
        return every(results)
    common = _common(operands)
    if stem in _TO_FLOAT | {"div", "true_divide", "addcdiv"} and not (common.is_floating_point or common.is_complex):
        common = torch.get_default_dtype() if stem != "div" or len(args) == 2 else common
    numbers = [_dtype_of(each).itemsize for each in operands if not isinstance(each, torch.Tensor)]
    casts = []
    if in_place and args[0].dtype != common and stem not in _COMPARED:
        casts.append(size_of(args[0], common))  # what is written, before it is cast back
    for each in operands:
        made = each.dtype if isinstance(each, torch.Tensor) else _dtype_of(each)
        if made != common:
            casts.append(size_of(each, common) if isinstance(each, torch.Tensor) else common.itemsize)
    casts = [size for size in casts if size]
    if stem in _COMPARED:
        return [*numbers, *casts, *every(results), *(-n for n in numbers), *(-size for size in reversed(casts))]
    return within([*numbers, *casts], every(results))


def _common(operands: Sequence[Any]) -> torch.dtype:
    """The dtype in which operands are combined; ``torch.result_type`` takes two."""
    found = operands[0].dtype if isinstance(operands[0], torch.Tensor) else torch.result_type(*operands[:2])
    for each in operands[1:]:
        of_two = torch.result_type(operands[0], each)
        found = torch.promote_types(found, of_two) if isinstance(each, torch.Tensor) and each.dim() else of_two
    return found


def _dtype_of(number: Any) -> torch.dtype:
    if isinstance(number, bool):
        return torch.bool
    if isinstance(number, int):
        return torch.int64
    return torch.float64 if isinstance(number, float) else torch.complex128


def _cast_first(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """A reduction into another dtype casts what it reads. Source: ``make_reduction`` of ReduceOpsUtils.h."""
    if not results or not isinstance(args[0], torch.Tensor) or args[0].dtype == results[0].dtype:
        return every(results)
    cast = size_of(args[0], results[0].dtype)
    return [*every(results), cast, -cast]


def _mean(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """A sum, divided by an integer. Source: ``mean_out`` of ReduceOps.cpp."""
    return [*every(results), *_averaged(args[0], results[0])]


def _averaged(tensor: torch.Tensor, made: torch.Tensor) -> Script:
    """What a mean takes beside its result; small floats are added up in float32."""
    if made.dtype not in SMALL:
        casts = [] if tensor.dtype == made.dtype else [size_of(tensor, made.dtype)]
        return [*within(casts, []), *within([8, made.itemsize], [])]
    cast = size_of(tensor, torch.float32)
    return within([size_of(made, torch.float32)], [cast, -cast, *within([8, 4], [])])


def _sum(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Small floats over dimensions that lie apart are added up in float32. Source: ``sum_out`` of ReduceOps.cpp."""
    tensor, dims = args[0], args[1] if len(args) > 1 else None
    if tensor.dtype != results[0].dtype or tensor.dtype not in SMALL or not dims:
        return _cast_first(args, kwargs, results)
    return [*every(results), *summed_apart(tensor, dims, results[0])]


def _power(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """A number to the power of a tensor becomes a tensor after the result is made. Source: ``pow_Scalar_out``."""
    if isinstance(args[0], torch.Tensor) or args[0] == 1:
        if isinstance(args[1], torch.Tensor):
            return _elementwise("maximum", args, False, results)
        return every(results)
    made = _dtype_of(args[0])
    casts = [results[0].itemsize] if made != results[0].dtype else []
    return [*every(results), *within([made.itemsize, *casts], [])]


def _fill(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """A value in the memory that is filled is copied out of it first. Source: ``fill_`` of Fill.cpp."""
    value = args[1]
    if not isinstance(value, torch.Tensor) or _torch.storage_identity(value) != _torch.storage_identity(args[0]):
        return every(results)
    return within([size_of(value)], every(results))


def _mse_loss(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """What is reduced is made first, beside the result's own memory. Source: ``mse_loss_out`` of Loss.cpp."""
    reduction = args[2] if len(args) > 2 else kwargs.get("reduction", 1)
    if reduction == 0:
        return _elementwise("mul", args, False, results)
    common = torch.result_type(args[0], args[1])
    casts = [size_of(each, common) for each in args[:2] if each.dtype != common]
    inner: Script = []
    if reduction == 1:
        inner = _averaged(args[0], results[0]) if args[0].dtype == common else within([8, common.itemsize], [])
    return within([*casts, *casts], [*every(results), *within([size_of(args[0], common)], inner)])


_RULES: dict[str, Rule] = KERNELS | {
    "mean": _mean,
    "sum": _sum,
    "pow": _power,
    "fill": _fill,
    "mse_loss": _mse_loss,
    "smooth_l1_loss": _mse_loss,
}
