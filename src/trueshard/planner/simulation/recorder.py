"""Record what runs on fake tensors: every storage that is made and freed, every operation and collective.

Memory is exact because storages are followed, not operators: a weak reference to each tells when it is freed, and
``resized`` when FSDP2 resizes it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.model import names
from trueshard.planner.simulation import operator_facts
from trueshard.planner.simulation.fake_values import KnownValues
from trueshard.planner.simulation.operator_facts import nbytes, tensors_of, written_arguments
from trueshard.planner.trace import Allocation, Collective, Communication, Event, EventPlace, Free, Kernel, Kind, Stream
from trueshard.plans import Plan

_SILENT = ("prim", "profiler")
"""Namespaces whose operators neither run nor allocate anything."""


_INTO_ZEROS = {
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
}
"""Operators by which autograd puts gradients into zeros that it just made; in training it does so in their place.

Source: ``index_backward``, ``value_selecting_reduction_backward_symint`` of torch/csrc/autograd/FunctionsManual.cpp.
"""


class Recorder(_torch.SimulationMode):
    """A dispatch mode that records events.

    [Note: what a watched program does otherwise] Autograd and fused operators take other ways when a dispatch mode sees
    them, or when tensors are fake: they copy where they would write in place. Each such place is undone where it is
    seen, with the source that decides: ``_INTO_ZEROS``, ``_accumulates_in_place``, ``_mask_in_place``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = EventPlace("between", "")
        """Current phase, set by the caller, and unit, set by ``track_units``."""
        self.unit: str | None = None
        """Unit whose parameters FSDP2 gathers or reduces at present; None: that of ``place``. It gathers the next unit
        while one runs, so the two differ."""
        self.stream: Stream = "compute"
        """CUDA stream on which FSDP2 would run the current operator: a CPU has none, so hooks tell."""
        self.members: dict[str, list[str]] = {}
        """Names of the parameters that each unit gathers, in FSDP2's order: it copies them out of one buffer."""
        self.axes: dict[str, list[str]] = {}
        """Axes of the mesh by name of their process group: several if each of them has all ranks."""
        self.apart: set[str] = set()
        """Units of experts that ranks share."""
        self.values = KnownValues()
        """Values of small tensors, known in spite of fake tensors."""
        self.events: list[Event] = []
        self._allocations = 0
        self._alive: dict[int, Allocation] = {}
        """Current allocation by identity of its storage, as the tables below: tensors come and go, and FSDP2 frees a
        storage that lives on by resizing it to 0."""
        self._references: dict[int, Any] = {}
        """Weak references that tell when a storage is gone; an identity may be used again after that."""
        self._before_resize: dict[int, Allocation | None] = {}
        """Last allocation of a gathered parameter: when FSDP2 gathers it again, the new one gets its name and shape."""
        self._written_by: dict[int, int] = {}
        """Position of the communication that wrote the storage last."""
        self._copied: dict[int, int] = {}
        """Position of the communication of whose result it is a copy, for which a product waits, too."""

    # Memory

    def adopt(self, tensors: Iterable[tuple[str, torch.Tensor]], use: Kind, unit: str) -> None:
        """Register storages made before recording began, of a kind and a unit; ``tensors`` are (name, tensor)."""
        self.unit = unit
        for name, tensor in tensors:
            if self._track(tensor, name) is not None:
                self.mark([tensor], use)
        self.unit = None
        self.events.clear()

    def allocation_of(self, tensor: torch.Tensor) -> Allocation | None:
        """Return the allocation that the tensor's storage holds now; None if it has no memory."""
        return self._alive.get(_identity(tensor))

    def alive(self) -> list[Allocation]:
        """Return all current allocations, oldest first."""
        return sorted(self._alive.values(), key=lambda allocation: allocation.storage)

    def mark(self, tensors: Iterable[torch.Tensor], use: Kind, name: str = "") -> None:
        """Set kind and (if given) name of the tensors' current allocations; the last call for an allocation counts."""
        for tensor in tensors:
            if (allocation := self.allocation_of(tensor)) is not None:
                allocation.kind = use
                allocation.what = name or allocation.what

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        self._written_by.clear()
        self._copied.clear()
        return events

    def resized(self, storage: Any, before: int) -> None:
        """Record that a storage's memory was freed or allocated again; for ``_torch.watching_resizes``."""
        key = _torch.storage_number(storage)
        if key not in self._references or storage.nbytes() == before:
            return
        freed = self._alive.get(key)
        self._release(key)
        made = self._allocate(key, storage.nbytes(), "resize")
        if made is not None and (earlier := self._before_resize.get(key)) is not None:
            made.what, made.shape, made.dtype = earlier.what, earlier.shape, earlier.dtype
        if (concerned := made or freed) is not None:
            concerned.kind = "gathered"

    def track_storage(self, tensor: torch.Tensor, what: str) -> Allocation | None:
        """Record a plain tensor's storage as an allocation, and later its end; None if it is known or empty."""
        storage = tensor.untyped_storage()
        key = _torch.storage_number(storage)
        if key in self._references:
            return None
        self._references[key] = weakref.ref(storage, lambda _: self._gone(key))
        if (made := self._allocate(key, storage.nbytes(), what)) is not None:
            made.shape, made.dtype = tuple(map(int, tensor.shape)), _dtype_name(tensor)
        return made

    def new_allocation(self, size: int, what: str) -> Allocation:
        """Return an allocation of ``size`` bytes at the current place, with a number of its own."""
        self._allocations += 1
        return Allocation(self.place, self._allocations, size, self.stream, unit=self._current_unit(), what=what)

    def _current_unit(self) -> str:
        return self.place.unit if self.unit is None else self.unit

    def _track(self, tensor: torch.Tensor, what: str) -> Allocation | None:
        tensor = _torch.local(tensor)
        return self.track_storage(tensor, what) if _torch.is_fake(tensor) else None

    def _allocate(self, key: int, size: int, what: str) -> Allocation | None:
        if size == 0:
            return None
        made = self._alive[key] = self.new_allocation(size, what)
        self.events.append(made)
        return made

    def _gone(self, key: int) -> None:
        for table in (self._references, self._written_by, self._copied, self._before_resize):
            table.pop(key, None)
        self._release(key)

    def _release(self, key: int) -> None:
        if (freed := self._alive.pop(key, None)) is not None:
            self.events.append(Free(self.place, freed.storage, freed.bytes))

    # Operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := _torch.device_asked(func, args)) is not None:
            return device
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on local tensors are dispatched here afterwards
        kwargs = kwargs or {}
        if func.namespace in _SILENT:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.values.read(args[0])
        if _accumulates_in_place(func, args):
            func = torch.ops.aten.add_.Tensor
        elif func in _INTO_ZEROS and _torch.engine_calls(sys._getframe(1)):
            func = _INTO_ZEROS[func]
        inputs = tensors_of((*args, *kwargs.values()))
        self._set_unit_by_tensors(inputs)
        self.before_operator(func, args)
        out, results = self.values.run(func, args, kwargs, inputs)
        by_mode = _torch.called_by_mode(sys._getframe())
        if func is torch.ops.aten._safe_softmax.default and not by_mode:
            self._mask_in_place(args[0])
        if (size := operator_facts.storage_bytes(func, args)) is not None:
            results[0].untyped_storage().resize_(size)
        kernel: Kernel | None = None
        if func.namespace in operator_facts.COLLECTIVES:
            self._collective(func, args, results)
        elif not operator_facts.is_free(func):
            kernel = self._kernel(func, args, kwargs, inputs, results)
        self.allocate_results(func, args, kwargs, results, runs=kernel is not None, by_mode=by_mode)
        if kernel is not None:
            kernel.writes = self._storages((*results, *written_arguments(func, args, kwargs)))
        self._mark_fsdp(func, args, kwargs)
        return out

    def before_operator(self, func: Any, args: Any) -> None:
        """Do nothing; a hook for subclasses that model memory inside operators, as is ``allocate_results``."""

    def allocate_results(
        self, func: Any, args: Any, kwargs: Any, results: Sequence[torch.Tensor], *, runs: bool, by_mode: bool
    ) -> None:
        """Record the allocations of an operator's results, which share storages with arguments if it works in place.

        ``runs``: whether it launches a kernel; ``by_mode``: whether another dispatch mode called it.
        """
        for i in range(len(results)):
            self.allocate_result(func, args, results, i)

    def allocate_result(self, func: Any, args: Any, results: Sequence[torch.Tensor], index: int) -> None:
        """Record the allocation of one result; of a foreach operator, in the unit of the tensor it is made from."""
        unit = self.unit
        if len(results) > 1 and _torch.schema_of(func).name.startswith("aten::_foreach") and index < len(args[0]):
            source = self.allocation_of(args[0][index])
            self.unit = unit if source is None else source.unit
        self._track(results[index], operator_facts.packet_name(func))
        self.unit = unit

    def _set_unit_by_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Outside of forward and backward, set the place's unit to that of the tensors; "" if they are of several."""
        if self.place.phase in ("forward", "backward"):
            return
        held = [(tensor, self.allocation_of(tensor)) for tensor in tensors]
        # A lone scalar belongs to the operators around it.
        units = {made.unit for tensor, made in held if made is not None and (made.bytes > 8 or tensor.numel() > 1)}
        if units:
            named = units - {""}
            self.place = EventPlace(self.place.phase, named.pop() if len(named) == 1 else "")

    def _storages(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        held = [self.allocation_of(tensor) for tensor in tensors]
        return tuple(dict.fromkeys(allocation.storage for allocation in held if allocation is not None))

    def _communications_before(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        return tuple(sorted({self._written_by[key] for key in map(_identity, tensors) if key in self._written_by}))

    def _kernel(
        self, func: Any, args: Any, kwargs: Any, arguments: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> Kernel:
        inputs = list({id(argument): argument for argument in arguments}.values())
        read = nbytes(inputs)
        first = next((tensor for tensor in (*inputs, *results) if tensor.is_floating_point()), None)
        made = Kernel(
            self.place,
            operator_facts.packet_name(func),
            operator_facts.flops_of(func, args, kwargs, results),
            read,
            nbytes(results) if results else read // 2,
            "" if first is None else _dtype_name(first),
            self._communications_before(inputs),
            stream=self.stream,
            causal="attention" in _torch.schema_of(func).name and any(argument is True for argument in args),
            recomputed=_torch.in_backward() and torch.is_grad_enabled(),
            reads=self._storages(inputs),
        )
        if made.flops and (copies := [key for key in map(_identity, inputs) if key in self._copied]):
            made.after = tuple(sorted({*made.after, *(self._copied[key] for key in copies)}))
        elif made.op == "aten.clone" and made.after and results:
            self._copied[_identity(results[0])] = made.after[-1]
        self.events.append(made)
        return made

    def _mask_in_place(self, scores: torch.Tensor) -> None:
        """Undo the copy of attention scores that adding the mask makes only while operators are watched.

        Source: ``areAnyTensorSubclassLike`` in ``_scaled_dot_product_attention_math`` of transformers/attention.cpp.
        """
        made = self.allocation_of(scores)
        if made is None or made.what != "aten.add" or made not in self.events:
            return
        start = self.events.index(made)
        freed = next((e for e in self.events[start:] if isinstance(e, Free) and e.bytes == made.bytes), None)
        for before in reversed(self.events[:start]):
            if freed is not None and isinstance(before, Allocation) and before.storage == freed.storage:
                self.events[start:] = [
                    event for event in self.events[start:] if event is not made and event is not freed
                ]
                self._alive[_identity(scores)] = before
                return

    # Collectives and FSDP2

    def _collective(self, func: Any, args: Any, results: Sequence[torch.Tensor]) -> None:
        traffic = operator_facts.traffic(func, args)
        if traffic is None:
            return
        kind, group, full_bytes, received, sent = traffic
        tensors = tensors_of(args)
        ranks = torch.distributed.get_process_group_ranks(group)
        if kind == "all_reduce" and self.stream == "reduce_scatter":
            self.stream = "all_reduce"
        self.events.append(
            Communication(
                self.place,
                kind,
                self.stream,
                len(ranks),
                ranks[1] - ranks[0] if len(ranks) > 1 else 1,
                received,
                full_bytes,
                _dtype_name(tensors[0]) if tensors else "",
                self._current_unit(),
                self._communications_before(tensors),
                self._axis(group, kind),
                sent=sent,
            )
        )
        for tensor in (*tensors, *results):
            self._written_by[_identity(tensor)] = len(self.events) - 1
        self.mark(tensors, "communication")

    def _axis(self, group: Any, kind: Collective) -> str:
        """Return the axis over which a collective runs: of several with one group, the one that would call it here."""
        axes = self.axes.get(group.group_name, [])
        if self.stream != "compute" or not axes:  # FSDP2's, or over several axes
            return "replicate" if "replicate" in axes else "shard"
        travels = kind == "all_to_all" and self.place.unit in self.apart
        return "experts" if travels and "experts" in axes else axes[0]

    def _mark_fsdp(self, func: Any, args: Any, kwargs: Any) -> None:
        """Set kinds by FSDP2's own operators: its buffers, gathered parameters, unreduced gradients."""
        if func.namespace != "fsdp":
            return
        operator = operator_facts.short_name(func)
        if operator == "all_gather_copy_in":
            self.mark((*(tensor for tensor in args[0] if not self._is_parameter(tensor)), args[1]), "communication")
        elif operator == "split_with_sizes_copy":
            members = self.members.get(self._current_unit(), [])
            for i, tensor in enumerate(kwargs["out"]):
                self.mark([tensor], "gathered", members[i] if len(members) == len(kwargs["out"]) else "")
                self._before_resize[_identity(tensor)] = self.allocation_of(tensor)
        elif operator == "chunk_cat":
            self.mark(args[0], "gradients")
            self.mark([kwargs["out"]], "communication")
            self.stream = "reduce_scatter"

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        allocation = self.allocation_of(tensor)
        return allocation is not None and allocation.kind == "parameters"


def _accumulates_in_place(func: Any, args: Any) -> bool:
    """True if autograd adds a second gradient to the first here and would do so in the first one's memory in training.

    It never does while operators are watched, or on fake tensors; in training it does if nobody else holds the first.
    Source: ``can_accumulate_inplace`` of torch/csrc/autograd/input_buffer.cpp.
    """
    if func is not torch.ops.aten.add.Tensor or len(args) != 2 or not isinstance(args[1], torch.Tensor):
        return False
    return _torch.engine_calls(sys._getframe(2)) and _torch.is_held_once(args[0])


def _identity(tensor: torch.Tensor) -> int:
    return _torch.storage_identity(_torch.local(tensor))


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@contextlib.contextmanager
def track_units(recorder: Recorder, model: nn.Module, plan: Plan) -> Iterator[None]:
    """Keep ``recorder``'s place, unit and stream current while ``model`` runs, by hooks of its units and of FSDP2."""
    modules = dict(names.named_modules(names.unwrap(model)))
    unit_of = {modules[name]: unit.name for unit in plan.units for name in unit.modules}
    outer_units: list[str] = []
    before: list[tuple[str | None, Stream, EventPlace]] = []

    def enter(unit: str) -> None:
        recorder.place = EventPlace(recorder.place.phase, unit)

    def begin_forward(module: nn.Module, args: Any) -> None:
        if module in unit_of:
            outer_units.append(recorder.place.unit)
            enter(unit_of[module])
            if unit_of[module] in recorder.apart and len(args) > 1:  # (hidden states, experts of each token, weights)
                recorder.values.choices = args[1].shape[-1]

    def end_forward(module: nn.Module, args: Any, output: Any) -> None:
        if module not in unit_of or not outer_units:
            return
        name = unit_of[module]
        if torch.is_grad_enabled() and not _torch.in_backward():
            for tensor in _torch.tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _, name=name: enter(name))
        enter(outer_units.pop())

    def begin_communication(name: str, what: str) -> None:
        before.append((recorder.unit, recorder.stream, recorder.place))
        recorder.unit = name
        if what in ("post_forward", "post_backward"):
            enter(name)
        recorder.stream = "all_gather" if what == "unshard" else "compute"

    def end_communication() -> None:
        recorder.unit, recorder.stream, recorder.place = before.pop()

    for module, name in unit_of.items():
        if isinstance(module, _torch.ShardedModule):
            _torch.watch_communication(module, functools.partial(begin_communication, name), end_communication)
    with watching_forwards(begin_forward, end_forward, always_call=True):
        yield


@contextlib.contextmanager
def watching_forwards(begin: Callable[..., None], end: Callable[..., None], *, always_call: bool) -> Iterator[None]:
    """Call ``begin`` before and ``end`` after every module's forward; ``always_call``: ``end`` also after an error."""
    before = nn.modules.module.register_module_forward_pre_hook(begin)
    after = nn.modules.module.register_module_forward_hook(end, always_call=always_call)
    with before, after:
        yield
