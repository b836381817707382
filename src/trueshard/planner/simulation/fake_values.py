"""Track known values of fake tensors, and sizes of results that depend on values.

Fake tensors have no values, but programs read some: an optimizer its step counter, a sharded step whether all counters
are equal. Small tensors computed from constants (counters, flags) therefore have real copies here. Values that depend
on data are unknown; a usual one stands for them.

Results as large as the data decide (``nonzero``, indexing by a mask): known values decide where there are any. Else
tokens go to experts in equal shares and a mask selects everything; both give a warning, which a forecast shows.

Ranks that share experts tell each other how many tokens they send. Of every rank's tokens as many go to this rank's
experts as to another's, times ``KnownValues.imbalance``; the rest goes to the others in equal shares.
"""

from __future__ import annotations

import contextlib
import math
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.planner.simulation import operator_facts
from trueshard.planner.simulation.operator_facts import run_operator, short_name, tensors_of, written_arguments

LARGEST = 256 << 10
"""Bytes of the largest storage that has a real copy."""

_ATEN = torch.ops.aten

EQUAL_SHARES = "Which tokens go to which expert depends on data: all experts of a rank are taken to get equal shares."
EVERYTHING = "How many elements are selected depends on data: where that is unknown, all are taken to be."
READ = "Values that depend on data are read in forward{line}: true, 1 and 0.5 stand for what is unknown."
"""``line``: `` (file:line)``, see ``code_line``."""

_FACTORIES = {
    *("zeros", "ones", "full", "arange", "scalar_tensor", "eye", "linspace"),
    *("new_zeros", "new_ones", "new_full"),
}
_DRAWN = {"randint", "randperm"}
_OVERWRITING = {"zero_", "fill_", "copy_"}
_UNREAD = {"allreduce_", "broadcast_", "wait_tensor", "_amp_foreach_non_finite_check_and_unscale_"}
"""Operators that leave what they write as it was: ranks agree, and nothing is infinite."""

_RARELY_TRUE = {"ne", "isnan", "isinf", "isneginf", "isposinf"}
"""Comparisons that usually find nothing: values remembered are unchanged, and numbers are finite."""
_RARELY_TRUE_OF_EXTREMES = {
    *(("max", "ge"), ("max", "gt"), ("amax", "ge"), ("amax", "gt")),
    *(("min", "lt"), ("amin", "lt")),
}
"""A maximum compared with its upper bound, a minimum with its lower bound: checks of input."""
_TRUTH_PRESERVING = {"any", "all", "bitwise_or", "bitwise_and", "logical_or", "logical_and", "clone", "view"}
_TRUTH_PRESERVING |= {"_to_copy", "stack", "cat"}

_INDEX_RESULTS = {"topk": 1, "sort": 1, "argsort": 0, "argmax": 0, "argmin": 0}
"""Operators that make indices along a dimension → position of these among the results."""
_COPIES = {"_to_copy", "clone"}
_FOLLOWED = {*_INDEX_RESULTS, *_COPIES, "sum", "scatter", "scatter_", "eq", "ne", "gt", "index_select"}
_IDENTITIES = {("ne", 0), ("gt", 0), ("eq", 1)}
"""Comparisons that leave a mask as it is."""
_TARGETS = ("ne", -100)
"""The comparison that makes a mask of targets: with the value that torch's losses ignore."""


@dataclass(slots=True)
class _Facts:
    """Facts about a fake storage."""

    real: torch.Tensor | None = None
    """Values of the storage: 1-D, uint8, as long as it is."""
    rarely_true: bool = False
    """A flag that usually is false."""
    extreme: str = ""
    """The operator, of a maximum or minimum."""
    bound: int = 0
    """Exclusive upper bound of indices; 0: unknown."""
    share: float | None = None
    """Share of a mask's elements that are true."""
    is_certain: bool = False
    """The share is that of the batch, and no guess."""


class KnownValues(_torch.SimulationMode):
    """Real copies of small fake storages. As a dispatch mode it follows what runs before recording begins."""

    def __init__(self) -> None:
        super().__init__()
        self.guesses = 0
        """Times that a value, or a shape that depends on values, was not known; ``preflight`` watches it rise."""
        self._drawn: int | None = None
        """Random tensors drawn so far, inside ``drawing``; None outside, where they stay unknown."""
        self._facts: weakref.WeakKeyDictionary[Any, _Facts] = weakref.WeakKeyDictionary()
        """Facts by storage."""
        self.loops: Any = None
        """``LoopWatch`` of the model that runs, if loops over tokens are refused."""
        self.imbalance = 1.0
        """Tokens that arrive for this rank's experts, over their mean over ranks."""
        self.choices = 1
        """Experts of a token, where ranks share experts: they differ, so a rank with fewer cannot get all of it."""
        self.largest_imbalance = 1.0
        """Imbalance of the rank to whose experts all tokens go, as far as that is possible."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := _torch.device_asked(func, args)) is not None:
            return device
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if not _torch.makes_fake_tensors():
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.read(args[0])
        return self.run(func, args, kwargs, tensors_of((*args, *kwargs.values())))[0]

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, draw small tensors of random whole numbers, the same ones every time; else they stay unknown."""
        self._drawn = 0
        try:
            yield
        finally:
            self._drawn = None

    def _facts_of(self, tensor: torch.Tensor) -> _Facts:
        return self._facts.setdefault(tensor.untyped_storage(), _Facts())

    def run(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        """Run ``func`` on fake tensors, and on the real copies if all ``inputs``, its tensors, have some.

        Returns:
            Its fake result, and the tensors in that.
        """
        if self.loops is not None:
            self.loops.count(func)
        if _has_unknown_size(func, args):
            out, real = self._run_with_unknown_size(func, args, kwargs)
            outputs = tensors_of([out])
            if real is not None:
                with _torch.real_tensors():
                    self._remember(outputs, _torch.tensors_in(real))
            return out, outputs
        out = run_operator(func, args, kwargs)
        outputs = tensors_of([out])
        self._follow(func, args, kwargs, inputs, outputs)
        return out, outputs

    def read(self, tensor: torch.Tensor) -> bool | int | float:
        """Return ``tensor.item()`` where the value is known, else a usual one: 0.5, 1 or True.

        False for a flag that says that numbers differ or are not finite.
        """
        real = self._real_view(tensor) if _torch.is_fake(tensor) or tensor.is_meta else tensor
        if real is not None:
            with _torch.real_tensors():
                return real.item()
        self.guesses += 1
        is_check = tensor.dtype == torch.bool and self._facts_of(tensor).rarely_true
        frame = innermost_frame(with_own=True)
        is_own = frame.filename.startswith(_OWN)  # clipping, which does the same either way
        if not is_check and not is_own and is_of_library(frame):  # preflight tells of the user's own code
            warnings.warn(READ.format(line=code_line(frame)), stacklevel=2)
        if tensor.dtype == torch.bool:
            return not is_check
        return 0.5 if tensor.is_floating_point() else 1

    def _follow(
        self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        name = short_name(func)
        self._follow_truth(name, inputs, outputs)
        self._follow_sizes(name, args, outputs)
        if name == "searchsorted" and self._follow_ends(args[0], args[1], outputs[0]):
            return
        if name in _UNREAD or not self._concerns(name, inputs, outputs):
            return
        if name == "alltoall_base_" and not args[3] and not args[0].is_floating_point():
            self._follow_counts(args[0], args[1], operator_facts.group_of(args[2]))
            return
        written = written_arguments(func, args, kwargs)
        drawn = name in _DRAWN and self._drawn is not None
        if not drawn and (
            torch.Tag.nondeterministic_seeded in func.tags or not self._is_computable(func, name, inputs, written)
        ):
            for tensor in (*written, *outputs):
                facts = self._facts_of(tensor)
                facts.real, facts.rarely_true = None, False
            return
        for tensor in written:
            if self._real_view(tensor) is None:
                self._facts_of(tensor).real = _zeroed(tensor)
        with _torch.real_tensors():
            real_args, real_kwargs = _torch.map_only(
                torch.Tensor, lambda fake: fake if (real := self._real_view(fake)) is None else real, (args, kwargs)
            )
            if real_kwargs.get("device") is not None:
                real_kwargs = {**real_kwargs, "device": torch.device("cpu")}
            run = func
            if drawn and "generator" not in kwargs:
                run, real_kwargs = _torch.packet_of(func), {**real_kwargs, "generator": self._next_generator()}
            self._remember(outputs, _torch.leaves_of(run(*real_args, **real_kwargs)))

    def _next_generator(self) -> torch.Generator:
        """Return the generator of the next tensor that is drawn; that of the program goes on as if there were none."""
        assert self._drawn is not None
        self._drawn += 1
        return torch.Generator().manual_seed(self._drawn)

    def _follow_ends(self, row: torch.Tensor, values: torch.Tensor, ends: torch.Tensor) -> bool:
        """Make up where each of the known ``values`` ends in a sorted row that is not known: shares are equal."""
        if self._real_view(row) is not None or self._real_view(values) is None:
            return False
        self.guesses += 1
        with _torch.real_tensors():
            self._remember([ends], [_equal_shares(row.numel(), values.numel()).cumsum(0)])
        return True

    def _follow_counts(self, arriving: torch.Tensor, leaving: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Make up how many tokens arrive for each expert here from each rank, by how many leave for it."""
        real = self._real_view(leaving)
        self._facts_of(arriving).real = None
        if real is not None:
            warnings.warn(EQUAL_SHARES, stacklevel=2)
            ranks = group.size()
            with _torch.real_tensors():
                by_rank, mine = real.view(ranks, -1), torch.arange(ranks) == group.rank()
                here, total = by_rank.shape[1], int(real.sum())
                most = min(1.0, here / self.choices)
                self.largest_imbalance = max(self.largest_imbalance, ranks * most)
                if self.imbalance != 1:  # ``by_rank`` is the memory of ``leaving``
                    own = round(total * min(self.imbalance / ranks, most))
                    by_rank[mine] = _equal_shares(own, here)
                    by_rank[~mine] = _equal_shares(total - own, (ranks - 1) * here).view(-1, here)
                self._remember([arriving], [by_rank[mine].repeat(ranks, 1).view(arriving.shape)])

    def _remember(self, outputs: list[torch.Tensor], values: list[Any]) -> None:
        for fake, value in zip(outputs, values, strict=False):
            small = fake.untyped_storage().nbytes() <= LARGEST and _torch.is_fake(fake)
            if small and isinstance(value, torch.Tensor) and self._facts_of(fake).real is None:
                memory = _zeroed(fake)
                _view_as(fake, memory).copy_(value)
                self._facts_of(fake).real = memory

    def _follow_truth(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Track extremes, and flags that are usually false."""
        if name in ("max", "min", "amax", "amin"):
            self._facts_of(outputs[0]).extreme = name
        if len(outputs) != 1 or (outputs[0].dtype != torch.bool and name != "_to_copy"):
            return
        facts_of_inputs = [self._facts_of(tensor) for tensor in inputs]
        derived = name in _TRUTH_PRESERVING and any(facts.rarely_true for facts in facts_of_inputs)
        checked = bool(facts_of_inputs) and (facts_of_inputs[0].extreme, name) in _RARELY_TRUE_OF_EXTREMES
        if name in _RARELY_TRUE or derived or checked:
            self._facts_of(outputs[0]).rarely_true = True

    def _concerns(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
        if any(tensor.untyped_storage().nbytes() > LARGEST for tensor in outputs):
            return False
        if not inputs:
            return bool(outputs)
        is_known = (self._facts_of(tensor).real is not None or not _torch.is_fake(tensor) for tensor in inputs)
        return name in _OVERWRITING or any(is_known)

    def _is_computable(self, func: Any, name: str, inputs: list[torch.Tensor], written: list[torch.Tensor]) -> bool:
        if not inputs:  # numbers may stand where an operator takes tensors
            first = next(iter(_torch.schema_of(func).arguments), None)
            return name in _FACTORIES or (first is not None and str(first.type) == "Tensor")
        if any(tensor.untyped_storage().nbytes() > LARGEST for tensor in inputs):
            return False
        read = inputs
        if name in _OVERWRITING:
            is_part = any(t.numel() * t.itemsize != t.untyped_storage().nbytes() for t in written)
            if is_part and any(self._real_view(tensor) is None for tensor in written):
                return False
            read = [tensor for tensor in inputs if not any(tensor is other for other in written)]
        return all(not _torch.is_fake(tensor) or self._real_view(tensor) is not None for tensor in read)

    def _real_view(self, fake: torch.Tensor) -> torch.Tensor | None:
        """Return the real copy of a fake tensor, shaped and laid out like it; None if its values are unknown."""
        memory = self._facts_of(fake).real
        if memory is None or memory.numel() % fake.itemsize:  # the latter: a view of a part, in another dtype
            return None
        with _torch.real_tensors():
            return _view_as(fake, memory)

    # Sizes that depend on values: bounds of indices and shares of masks are followed for them.

    def _follow_sizes(self, name: str, args: Any, outputs: Sequence[torch.Tensor]) -> None:
        if name not in _FOLLOWED:
            return
        if name in _INDEX_RESULTS and len(outputs) > _INDEX_RESULTS[name]:
            self._facts_of(outputs[_INDEX_RESULTS[name]]).bound = _size(args[0], _dim(name, args))
        elif name == "sum":
            if self._facts_of(args[0]).share is not None:
                self._facts_of(outputs[0]).share = 1.0  # every expert has some tokens
        elif name in ("scatter", "scatter_") and outputs[0].dim():
            index, dim = args[2], args[1]
            bound = self._facts_of(index).bound or _size(outputs[0], dim)
            self._facts_of(outputs[0]).share = min(1.0, _size(index, dim) / max(1, bound))
        elif name == "index_select":
            self._facts_of(outputs[0]).bound = self._bound(args[0])
        elif name == "eq" and (bound := self._facts_of(args[0]).bound):
            self._facts_of(outputs[0]).share = 1 / bound  # fake tensors make one_hot this way, too
        elif name in _COPIES or (not isinstance(args[1], torch.Tensor) and (name, args[1]) in {*_IDENTITIES, _TARGETS}):
            source, made = self._facts_of(args[0]), self._facts_of(outputs[0])
            made.bound, made.share = source.bound, source.share
            made.is_certain = source.is_certain or (name not in _COPIES and (name, args[1]) == _TARGETS)

    def _bound(self, indices: torch.Tensor) -> int:
        """Return the exclusive upper bound of indices; 0 if it is unknown."""
        real = None if indices.is_floating_point() else self._real_view(indices)
        if real is None or not real.numel():
            return self._facts_of(indices).bound
        with _torch.real_tensors():
            return int(real.max()) + 1

    def _run_with_unknown_size(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Run ``func``, whose results' shapes depend on values; return its fake result and its values, or None."""
        real_of = {id(tensor): self._real_view(tensor) for tensor in _torch.tensors_in((args, kwargs))}
        if all(value is not None for value in real_of.values()):
            with _torch.real_tensors():
                real = func(*_torch.map_only(torch.Tensor, lambda fake: real_of[id(fake)], args), **kwargs)
            return _torch.map_only(torch.Tensor, _empty_like, real), real
        self.guesses += 1
        made = _RULES[func](self, *args, **kwargs)
        if func is _ATEN.nonzero.default and len(made) == args[0].numel() <= 4096:  # all are selected
            with _torch.real_tensors():
                return made, torch.ones(args[0].shape, dtype=torch.bool).nonzero()
        if func is _ATEN.bincount.default and not made.is_floating_point():
            return made, _equal_shares(args[0].numel(), len(made))
        return made, None

    def _count(self, mask: torch.Tensor) -> int:
        """Return how many elements of ``mask`` are true, and warn if that is a guess."""
        if (values := self._real_view(mask)) is not None:
            with _torch.real_tensors():
                return int(values.count_nonzero())
        share = self._facts_of(mask).share
        if share is None or not self._facts_of(mask).is_certain:
            warnings.warn(EVERYTHING if share is None else EQUAL_SHARES, stacklevel=2)
        return math.ceil(mask.numel() * (1.0 if share is None else share) - 1e-6)

    def nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        count = self._count(mask)
        return torch.empty_strided((count, mask.dim()), (1, max(1, count)), dtype=torch.int64)

    def index(self, source: torch.Tensor, indices: Sequence[Any]) -> torch.Tensor:
        converted: list[Any] = []
        for index in indices:
            converted += self.nonzero(index).unbind(1) if _is_mask(index) else [index]
        return _ATEN.index.Tensor(source, converted)

    def masked_select(self, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        times = math.prod(torch.broadcast_shapes(source.shape, mask.shape)) // max(1, mask.numel())
        return source.new_empty(self._count(mask) * times)

    def repeat_interleave(self, repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
        """Every element is repeated once, unless the caller says how many there will be."""
        if output_size is not None:
            return repeats.new_empty(output_size)
        warnings.warn(EVERYTHING, stacklevel=2)
        return repeats.new_empty(repeats.numel())

    def unique(self, source: torch.Tensor, *options: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        """All elements differ."""
        warnings.warn(EVERYTHING, stacklevel=2)
        count = source.numel()
        return source.new_empty(count), *(source.new_empty(n, dtype=torch.int64) for n in (source.shape, (count,)))

    def unique_along(self, source: torch.Tensor, dim: int, *options: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        """All slices along ``dim`` differ."""
        warnings.warn(EVERYTHING, stacklevel=2)
        count = source.shape[dim]
        return torch.empty_like(source), *(source.new_empty(count, dtype=torch.int64) for _ in range(2))

    def unique_neighbours(self, source: torch.Tensor, *options: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        """Neighbours differ; ``options``: return_inverse, return_counts, dim."""
        dim = named.get("dim", options[2] if len(options) > 2 else None)
        return self.unique(source) if dim is None else self.unique_along(source, dim)

    def is_equal(self, one: torch.Tensor, other: torch.Tensor, *options: Any, **named: Any) -> bool:
        return one.shape == other.shape

    def bincount(self, source: torch.Tensor, weights: Any = None, minlength: int = 0) -> torch.Tensor:
        bound = self._facts_of(source).bound or 1
        return source.new_empty(max(minlength, bound), dtype=torch.int64 if weights is None else weights.dtype)

    def ctc_loss(self, scores: torch.Tensor, targets: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Targets concatenated over samples are equally long for each. Source: ``ctc_loss_cpu`` of LossCTC.cpp."""
        times, samples = scores.shape[:2]
        longest = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // samples)
        return scores.new_empty(samples), scores.new_empty(samples, times, 2 * longest + 1)


_RULES: dict[Any, Callable[..., Any]] = {
    _ATEN.nonzero.default: KnownValues.nonzero,
    _ATEN.index.Tensor: KnownValues.index,
    _ATEN.masked_select.default: KnownValues.masked_select,
    _ATEN.repeat_interleave.Tensor: KnownValues.repeat_interleave,
    _ATEN._unique2.default: KnownValues.unique,
    _ATEN.unique_dim.default: KnownValues.unique_along,
    _ATEN.unique_consecutive.default: KnownValues.unique_neighbours,
    _ATEN.equal.default: KnownValues.is_equal,
    _ATEN.allclose.default: KnownValues.is_equal,
    _ATEN.bincount.default: KnownValues.bincount,
    _ATEN._ctc_loss.Tensor: KnownValues.ctc_loss,
}


def _has_unknown_size(func: Any, args: Any) -> bool:
    """True if the shapes of ``func``'s results depend on values."""
    if func is _ATEN.index.Tensor:
        return any(map(_is_mask, args[1]))
    if func is _ATEN.repeat_interleave.Tensor:
        return len(args) < 2
    return func in _RULES


def _equal_shares(count: int, parts: int) -> torch.Tensor:
    with _torch.real_tensors():
        return torch.tensor([count * (i + 1) // parts - count * i // parts for i in range(parts)])


def _zeroed(fake: torch.Tensor) -> torch.Tensor:
    with _torch.real_tensors():
        return torch.zeros(fake.untyped_storage().nbytes(), dtype=torch.uint8)


def _view_as(fake: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    return memory.view(fake.dtype).as_strided(fake.shape, fake.stride(), int(fake.storage_offset()))


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _dim(name: str, args: Any) -> int:
    """Dimension along which indices run: the operator's argument, the last by default."""
    position = 2 if name == "topk" else 1
    dim = args[position] if len(args) > position else -1
    return dim if isinstance(dim, int) and not isinstance(dim, bool) else -1


def _size(tensor: torch.Tensor, dim: int) -> int:
    return int(tensor.shape[dim]) if tensor.dim() else 1


def _empty_like(real: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)


# Where the code is that reads a value


_OWN = str(Path(__file__).parents[2])
_PASSED = (str(Path(torch.__file__).parent), _OWN, "<")


def is_passed(filename: str) -> bool:
    """True for a file of torch's or this library's, and for code that is in none."""
    return filename.startswith(_PASSED)


def innermost_frame(error: BaseException | None = None, *, with_own: bool = False) -> traceback.FrameSummary:
    """Return the innermost frame, now or of ``error``, that is neither torch's nor this library's; or an empty one.

    ``with_own``: it may be this library's, except of the simulation.
    """
    frames = traceback.extract_stack() if error is None else traceback.extract_tb(error.__traceback__)
    passed = (str(Path(torch.__file__).parent), str(Path(__file__).parent) if with_own else _OWN, "<")
    users = [frame for frame in frames if not frame.filename.startswith(passed)]
    return users[-1] if users else traceback.FrameSummary("", 0, "")


def code_line(frame: traceback.FrameSummary) -> str:
    """Return `` (file:line)`` of a frame; "" if it is empty."""
    return f" ({Path(frame.filename).name}:{frame.lineno})" if frame.filename else ""


def is_of_library(frame: traceback.FrameSummary) -> bool:
    """True if the code is installed, so that users cannot change it."""
    return "site-packages" in frame.filename
