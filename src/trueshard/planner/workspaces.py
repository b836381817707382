"""Memory that an operator takes for itself while it runs on a CPU, which no fake tensor shows.

Each rule was found by holding the simulated sequence of allocations against the allocator's own events, and names the
place in ATen (aten/src/ATen/native) that explains it. On an accelerator none of this applies: numbers travel as
arguments of kernels, kernels read mixed dtypes without casting first, and attention works in registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from trueshard import _torch


@dataclass(frozen=True, slots=True)
class Result:
    """Here an operator makes its result number ``index``."""

    index: int


Script: TypeAlias = list[int | Result]
"""What an operator does in turn: takes bytes (> 0), gives a block of that size back (< 0), makes a result."""
_Rule: TypeAlias = Callable[[Any, Any, Sequence[torch.Tensor]], Script]

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
_REDUCTIONS = {"sum", "nansum", "prod", "cumsum", "cumprod", "linalg_vector_norm"}


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
    saves = torch.is_grad_enabled() and not _torch.hooks_saved_tensors()
    return saves and _is_scaling(func, args) and args[0].requires_grad


def is_saved_number(func: Any, args: Any) -> bool:
    """Whether the Python number among ``args`` is one that autograd kept: there is no new tensor for it then."""
    scales = _torch.running_node() in ("MulBackward0", "DivBackward0")
    return scales and _is_scaling(func, args) and not torch.is_grad_enabled()


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
    return _made(results) if rule is None else rule(args, kwargs, results)


def _made(results: Sequence[torch.Tensor]) -> Script:
    return [Result(i) for i in range(len(results))]


def _within(taken: Iterable[int], inner: Script) -> Script:
    """Take, do what is inside, give back in turn."""
    taken = [size for size in taken if size]
    return [*taken, *inner, *(-size for size in reversed(taken))]


def _size(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    return int(tensor.numel()) * (dtype or tensor.dtype).itemsize


def _one_by_one(name: str, args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """On a CPU, an operator on lists calls the single one in turn. Source: ForeachOpsKernels.cpp."""
    count = next((len(each) for each in args if isinstance(each, (list, tuple))), 0)
    script: Script = []
    for i in range(count):
        single = [each[i] if isinstance(each, (list, tuple)) and len(each) == count else each for each in args]
        made = results[i : i + 1]
        for step in _script(name, single, kwargs, made):
            script.append(Result(i) if isinstance(step, Result) else step)
    return script if len(results) <= count else _made(results)


def _elementwise(stem: str, args: Any, in_place: bool, results: Sequence[torch.Tensor]) -> Script:
    """Operands of other dtypes are cast to the common one first; a Python number is a tensor without dimensions.

    Source: ``TensorIteratorBase::compute_types`` of ../TensorIterator.cpp, ``wrapped_scalar_tensor`` of ScalarOps.h.
    """
    operands = [each for each in args if isinstance(each, (torch.Tensor, *_NUMBERS))]
    if stem == "where":
        operands = operands[1:]
    elif stem not in ("addcmul", "addcdiv"):
        operands = operands[:2]
    tensors = [each for each in operands if isinstance(each, torch.Tensor)]
    if not tensors:
        return _made(results)
    common = _common(operands)
    if stem in _TO_FLOAT | {"div", "true_divide", "addcdiv"} and not (common.is_floating_point or common.is_complex):
        common = torch.get_default_dtype() if stem != "div" or len(args) == 2 else common
    numbers = [_dtype_of(each).itemsize for each in operands if not isinstance(each, torch.Tensor)]
    casts = []
    if in_place and args[0].dtype != common and stem not in _COMPARED:
        casts.append(_size(args[0], common))  # what is written, before it is cast back
    for each in operands:
        made = each.dtype if isinstance(each, torch.Tensor) else _dtype_of(each)
        if made != common:
            casts.append(_size(each, common) if isinstance(each, torch.Tensor) else common.itemsize)
    casts = [size for size in casts if size]
    if stem in _COMPARED:
        return [*numbers, *casts, *_made(results), *(-n for n in numbers), *(-size for size in reversed(casts))]
    return _within([*numbers, *casts], _made(results))


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
        return _made(results)
    cast = _size(args[0], results[0].dtype)
    return [*_made(results), cast, -cast]


def _mean(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """A sum, divided by an integer; of small floats, in float32. Source: ``mean_kernel_impl`` of ReduceOps.cpp."""
    made = results[0]
    if made.dtype not in (torch.bfloat16, torch.float16):
        return [*_cast_first(args, kwargs, results), *_within([8, made.itemsize], [])]
    total, cast = _size(made, torch.float32), _size(args[0], torch.float32)
    return [Result(0), *_within([total], [cast, -cast, *_within([8, 4], [])])]


def _power(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """A number to the power of a tensor becomes a tensor after the result is made. Source: ``pow_Scalar_out``."""
    if isinstance(args[0], torch.Tensor) or args[0] == 1:
        if isinstance(args[1], torch.Tensor):
            return _elementwise("maximum", args, False, results)
        return _made(results)
    made = _dtype_of(args[0])
    casts = [results[0].itemsize] if made != results[0].dtype else []
    return [*_made(results), *_within([made.itemsize, *casts], [])]


def _fill(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """A value in the memory that is filled is copied out of it first. Source: ``fill_`` of Fill.cpp."""
    value = args[1]
    if not isinstance(value, torch.Tensor) or _torch.storage_identity(value) != _torch.storage_identity(args[0]):
        return _made(results)
    return _within([_size(value)], _made(results))


def _blocks(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Queries and keys that flash attention on a CPU takes at once."""
    queries, keys = int(query.shape[-2]), int(key.shape[-2])
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def _attention(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Scores, their maxima and sums, and the result of one block of queries, for each thread.

    Source: ``cpu_flash_attention`` of cpu/FlashAttentionKernel.cpp.
    """
    query, key = args[0], args[1]
    (rows, columns), threads = _blocks(query, key), torch.get_num_threads()
    taken = [threads * (rows * columns + 2 * rows + rows * int(query.shape[-1])) * _accumulated(query)]
    if query.dtype in (torch.bfloat16, torch.float16):
        taken.append(threads * rows * columns * query.itemsize)
    return [*_made(results), *_within(taken, [])]


def _attention_backward(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Scores and their gradients of one block, for each thread; the sums of its rows.

    Source: ``cpu_flash_attention_backward`` of cpu/FlashAttentionKernel.cpp.
    """
    gradient, query, key = args[0], args[1], args[2]
    (rows, columns), threads = _blocks(query, key), torch.get_num_threads()
    taken = [] if gradient.transpose(1, 2).is_contiguous() else [_size(gradient)]
    taken.append(threads * 2 * rows * columns * _accumulated(query))
    if query.dtype in (torch.bfloat16, torch.float16):
        taken.append(threads * 2 * rows * columns * query.itemsize)
    return [*_made(results), *_within([*taken, rows * _accumulated(query)], [])]


def _accumulated(tensor: torch.Tensor) -> int:
    """Bytes of a number in which small floats are added up."""
    return max(4, tensor.itemsize)


def _layer_norm_backward(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Sums of each thread for weight and bias. Source: ``LayerNormBackwardKernelImplInternal``."""
    weight, wanted = args[5], args[7]
    if not any(wanted[1:]):
        return _made(results)
    dtype = args[1].dtype if weight is None else weight.dtype
    return [*_made(results), *_within([2 * torch.get_num_threads() * math.prod(args[2]) * dtype.itemsize], [])]


def _group_norm_backward(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Sums of each sample and channel. Source: ``GroupNormBackwardKernelImplInternal``."""
    size = int(args[1].shape[0]) * int(args[1].shape[1]) * _accumulated(args[1])
    return [*_made(results), *_within([size, size], [])]


def _safe_softmax(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Looks for rows that are masked altogether. Source: ``_safe_softmax`` of transformers/attention.cpp."""
    made = results[0]
    numbers = int(made.numel())
    return [*_made(results), *_within([numbers, numbers // made.shape[args[1]], made.itemsize], [])]


def _mse_loss(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Squares before they are reduced; a mean divides by an integer. Source: ``mse_loss_out`` of Loss.cpp."""
    reduction = args[2] if len(args) > 2 else kwargs.get("reduction", 1)
    if reduction == 0:
        return _elementwise("mul", args, False, results)
    inner = _within([8, results[0].itemsize], []) if reduction == 1 else []
    return [*_made(results), *_within([_size(args[0])], inner)]


def _embedding(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Indices that lie apart are gathered first. Source: ``embedding`` of Embedding.cpp."""
    indices = args[1]
    copied = indices.dim() > 1 and not indices.is_contiguous()
    return _within([_size(indices)] if copied else [], _made(results))


def _embedding_backward(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Gradients and indices that lie apart are gathered. Source: ``embedding_dense_backward_cpu`` of Embedding.cpp."""
    apart = [_size(each) for each in (args[1], args[0]) if not each.is_contiguous()]
    return [*_made(results), *_within(apart, [])]


def _cat(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """What is of another dtype is copied first. Source: ``cat_out_cpu`` of TensorShape.cpp."""
    script = _made(results)
    for each in args[0]:
        if each.dtype != results[0].dtype and each.numel():
            script += [_size(each), -_size(each)]
    return script


def _chunk_cat(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """What does not divide into chunks is padded first. Source: ``_chunk_cat`` of TensorShape.cpp."""
    tensors, dim, chunks = args[:3]
    out = kwargs.get("out", args[3] if len(args) > 3 else None)
    dtype = (results[0] if out is None else out).dtype
    padded, casts = [], []
    for each in tensors:
        rows = int(each.shape[dim])
        size = _size(each) // max(1, rows) * math.ceil(rows / chunks) * chunks
        if size and rows % chunks:
            padded.append(size)
        if size and each.dtype != dtype:
            casts += [size, -size]
    return [*padded, *(_made(results) if out is None else []), *casts, *(-size for size in padded)]


_RULES: dict[str, _Rule] = {
    "mean": _mean,
    "pow": _power,
    "fill": _fill,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm_backward": _group_norm_backward,
    "_safe_softmax": _safe_softmax,
    "mse_loss": _mse_loss,
    "smooth_l1_loss": _mse_loss,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "cat": _cat,
    "_chunk_cat": _chunk_cat,
    "chunk_cat": _chunk_cat,
}
