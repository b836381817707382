"""The memory that operators take for themselves while they run on a CPU, which no fake tensor shows.

Each rule was found by comparing the simulated sequence of allocations with the allocator's own events, and names the
place in ATen (aten/src/ATen/native) that explains it. On an accelerator none of this applies: numbers travel as
arguments of kernels, kernels read mixed dtypes without casting first, and attention works in registers.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from cpu_scripts import COUNTING, Result, Rule, Script, every, within
from trueshard import _torch
from trueshard.planner.simulation.operator_facts import short_name
from trueshard.planner.simulation.recorder import Recorder
from trueshard.planner.trace import Allocation, Free


class CpuRecorder(Recorder):
    """A recorder that also records what operators allocate for themselves on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._saves_number = False
        self._saved: list[tuple[Any, list[Allocation]]] = []
        """Results of products with a Python number since the last operator, and the memory of the number."""

    def __enter__(self) -> Any:
        """Record the generator's states too, which activation checkpointing keeps: real tensors in host memory."""
        self._get_rng_state = torch.get_rng_state

        def get_rng_state() -> torch.Tensor:
            state = self._get_rng_state()
            self.track_storage(state, "get_rng_state")
            return state

        torch.get_rng_state = get_rng_state
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        torch.get_rng_state = self._get_rng_state
        return super().__exit__(*error)

    def before_operator(self, func: Any, args: Any) -> None:
        self._follow_saved_numbers()
        self._saves_number = saves_number(func, args)

    def allocate_results(
        self, func: Any, args: Any, kwargs: Any, results: Sequence[torch.Tensor], *, runs: bool, by_mode: bool
    ) -> None:
        if not runs:
            super().allocate_results(func, args, kwargs, results, runs=runs, by_mode=by_mode)
            return
        script = with_number(workspace(func, args, kwargs, results), func, args, again=by_mode, kept=self._saves_number)
        taken: list[Allocation] = []
        for step in script:
            if isinstance(step, Result):
                self.allocate_result(func, args, results, step.index)
            elif step > 0:
                taken.append(self.new_allocation(step, str(_torch.packet_of(func))))
                self.events.append(taken[-1])
            else:
                block = next(each for each in reversed(taken) if each.bytes == -step)
                taken.remove(block)
                self.events.append(Free(self.place, block.storage, block.bytes))
        if taken:
            self._saved.append((weakref.ref(results[0]), taken))

    def _follow_saved_numbers(self) -> None:
        """Free the numbers that autograd has saved since the last call when their nodes have run."""
        for reference, blocks in self._saved:
            result = reference()
            if result is None or result.grad_fn is None:
                self._free(blocks)
            else:
                token = _Token()
                result.grad_fn.metadata[token] = None
                weakref.finalize(token, self._free, blocks)  # a graph that is dropped without a backward
                result.grad_fn.register_hook(lambda *_, blocks=blocks: self._free(blocks))
        self._saved.clear()

    def _free(self, blocks: list[Allocation]) -> None:
        while blocks:
            block = blocks.pop()
            self.events.append(Free(self.place, block.storage, block.bytes))


class _Token:
    """Lives as long as what holds it."""


SMALL = (torch.bfloat16, torch.float16)
"""Floats that are added up in float32."""


def size_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """Bytes of a tensor's elements, in its dtype or another."""
    return int(tensor.numel()) * (dtype or tensor.dtype).itemsize


def accumulated(tensor: torch.Tensor) -> int:
    """Bytes of a number in which small floats are added up."""
    return max(4, tensor.itemsize)


def summed_apart(tensor: torch.Tensor, dims: Sequence[int], made: torch.Tensor) -> Script:
    """Return what a sum of small floats allocates besides its result if its dimensions are not adjacent.

    Source: ``should_use_acc_buffer`` of ReduceOps.cpp.
    """
    reduced = {dim % tensor.dim() for dim in dims if tensor.shape[dim] > 1}
    apart = sum(dim - 1 not in reduced for dim in reduced)
    if tensor.dtype not in SMALL or apart < 2:
        return []
    cast = size_of(tensor, torch.float32)
    return within([size_of(made, torch.float32)], [cast, -cast])


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
    """Return what ``func`` allocates on the CPU until it returns: every result once, and what it frees again."""
    name = short_name(func)
    if name.startswith("_foreach_"):
        return _one_by_one(name.removeprefix("_foreach_"), args, kwargs, results)
    return _script(name, args, kwargs, results)


def saves_number(func: Any, args: Any) -> bool:
    """True if autograd keeps the Python number among ``args``, as a tensor, until backward.

    A product's gradient needs both factors. Source: ``mul`` and ``div`` of tools/autograd/derivatives.yaml.
    """
    schema = _torch.schema_of(func)
    scales = schema.name.removesuffix("_") in ("aten::mul", "aten::div") and schema.overload_name == "Tensor"
    return scales and isinstance(args[1], _NUMBERS) and torch.is_grad_enabled() and bool(args[0].requires_grad)


def with_number(script: Script, func: Any, args: Any, *, again: bool, kept: bool) -> Script:
    """Return ``script`` with the tensor that a Python number among ``args`` becomes freed when it really is.

    Args:
        script: frees the number at its end.
        func: the operator.
        args: its arguments.
        again: whether another dispatch mode handed the number on, which makes a second tensor of it.
        kept: whether autograd keeps the (first) one.
    """
    if _torch.schema_of(func).overload_name != "Tensor" or len(args) < 2 or not isinstance(args[1], _NUMBERS):
        return script
    number = script[0]
    node = torch._C._current_autograd_node()
    if node is not None and node.name() in ("MulBackward0", "DivBackward0") and not torch.is_grad_enabled():
        return script[1:-1]  # the one that was kept
    if again:
        return [number, *script] if kept else [number, *script, -number]  # type: ignore[operator]
    return script[:-1] if kept else script


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
    """Return what a mean allocates besides its result; small floats are summed in float32."""
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
    taken = [threads * (rows * columns + 2 * rows + rows * int(query.shape[-1])) * accumulated(query)]
    if query.dtype in SMALL:
        taken.append(threads * rows * columns * query.itemsize)
    return [*every(results), *within(taken, [])]


def _attention_backward(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Scores and their gradients of one block, for each thread; the sums of its rows.

    Source: ``cpu_flash_attention_backward`` of cpu/FlashAttentionKernel.cpp.
    """
    gradient, query, key = args[0], args[1], args[2]
    (rows, columns), threads = _blocks(query, key), torch.get_num_threads()
    taken = [] if gradient.transpose(1, 2).is_contiguous() else [size_of(gradient)]
    taken.append(threads * 2 * rows * columns * accumulated(query))
    if query.dtype in SMALL:
        taken.append(threads * 2 * rows * columns * query.itemsize)
    return [*every(results), *within([*taken, rows * accumulated(query)], [])]


def _layer_norm_backward(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Sums of each thread for weight and bias. Source: ``LayerNormBackwardKernelImplInternal``."""
    weight, wanted = args[5], args[7]
    if not any(wanted[1:]):
        return every(results)
    dtype = args[1].dtype if weight is None else weight.dtype
    return [*every(results), *within([2 * torch.get_num_threads() * math.prod(args[2]) * dtype.itemsize], [])]


def _turned(made: torch.Tensor, source: torch.Tensor) -> list[int]:
    """A large matrix is transposed block by block. Source: ``copy_same_type_transpose_`` of Copy.cpp."""
    valid = source.dim() == 2 and source.dtype == made.dtype and made.numel() >= 60 * 60 and made.shape == source.shape
    side = 120 if made.itemsize == 1 else 60
    if valid and source.stride() == (1, source.shape[0]) and made.is_contiguous():
        return [side * side * made.itemsize]
    return []


def _copy(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    return [*every(results), *within(_turned(args[0], args[1]), [])]


def _clone(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    return [*every(results), *within(_turned(results[0], args[0]), [])]


def _columns(images: torch.Tensor, weight: torch.Tensor, made: torch.Tensor) -> list[int]:
    """Bytes of the patches under a kernel, side by side. Source: ``compute_columns2d`` of ConvolutionMM2d.cpp."""
    window, places = math.prod(weight.shape[2:]), math.prod(made.shape[2:])
    if window == 1 and places == math.prod(images.shape[2:]):
        return []
    return [int(images.shape[0] * images.shape[1]) * window * places * images.itemsize]


def _is_plain_convolution(weight: torch.Tensor, dilation: Any, transposed: bool, groups: int) -> bool:
    return weight.dim() <= 4 and not transposed and groups == 1 and all(each == 1 for each in dilation)


def _convolution(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Source: ``slow_conv2d_forward_out_cpu`` of ConvolutionMM2d.cpp. oneDNN, where it is on, has ways of its own."""
    if not _is_plain_convolution(args[1], args[5], args[6], args[8]):
        return every(results)
    return within(_columns(args[0], args[1], results[0]), every(results))


def _convolution_backward(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Of the input, the bias, the weight in turn. Source: ``slow_conv2d_backward_cpu`` of ConvolutionMM2d.cpp."""
    gradient, images, weight, wanted = args[0], args[1], args[2], args[10]
    if not _is_plain_convolution(weight, args[6], args[7], args[9]):
        return every(results)
    whole = [] if gradient.is_contiguous() else [size_of(gradient)]
    script: Script = within(whole, [Result(0)]) if wanted[0] else []
    if wanted[2]:
        dims = [dim for dim in range(gradient.dim()) if dim != 1]
        script += [Result(len(results) - 1), *summed_apart(gradient, dims, results[-1])]
    if wanted[1]:
        columns = within([*whole, *_columns(images, weight, gradient)], [])
        script += [Result(int(wanted[0])), *columns]
    return script


def _group_norm_backward(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Sums of each sample and channel. Source: ``GroupNormBackwardKernelImplInternal``."""
    size = int(args[1].shape[0]) * int(args[1].shape[1]) * accumulated(args[1])
    return [*every(results), *within([size, size], [])]


def _safe_softmax(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Looks for rows that are masked altogether. Source: ``_safe_softmax`` of transformers/attention.cpp."""
    made = results[0]
    numbers = int(made.numel())
    return [*every(results), *within([numbers, numbers // made.shape[args[1]], made.itemsize], [])]


def _embedding(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Indices that lie apart are gathered first. Source: ``embedding`` of Embedding.cpp."""
    indices = args[1]
    copied = indices.dim() > 1 and not indices.is_contiguous()
    return within([size_of(indices)] if copied else [], every(results))


def _embedding_backward(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """Gradients and indices that lie apart are gathered. Source: ``embedding_dense_backward_cpu`` of Embedding.cpp."""
    apart = [size_of(each) for each in (args[1], args[0]) if not each.is_contiguous()]
    return [*every(results), *within(apart, [])]


def _cat(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """What is of another dtype is copied first. Source: ``cat_out_cpu`` of TensorShape.cpp."""
    script = every(results)
    for each in args[0]:
        if each.dtype != results[0].dtype and each.numel():
            script += [size_of(each), -size_of(each)]
    return script


def _chunk_cat(args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> Script:
    """What does not divide into chunks is padded first. Source: ``_chunk_cat`` of TensorShape.cpp."""
    tensors, dim, chunks = args[:3]
    out = kwargs.get("out", args[3] if len(args) > 3 else None)
    dtype = (results[0] if out is None else out).dtype
    padded, casts = [], []
    for each in tensors:
        rows = int(each.shape[dim])
        size = size_of(each) // max(1, rows) * math.ceil(rows / chunks) * chunks
        if size and rows % chunks:
            padded.append(size)
        if size and each.dtype != dtype:
            casts += [size, -size]
    return [*padded, *(every(results) if out is None else []), *casts, *(-size for size in padded)]


_KERNELS: dict[str, Rule] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm_backward": _group_norm_backward,
    "copy": _copy,
    "clone": _clone,
    "addmm": _clone,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_safe_softmax": _safe_softmax,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "cat": _cat,
    "_chunk_cat": _chunk_cat,
    "chunk_cat": _chunk_cat,
}
"""By the operator's name, without the underscore of what works in place."""

_RULES: dict[str, Rule] = (
    _KERNELS
    | COUNTING
    | {
        "mean": _mean,
        "sum": _sum,
        "pow": _power,
        "fill": _fill,
        "mse_loss": _mse_loss,
        "smooth_l1_loss": _mse_loss,
    }
)
