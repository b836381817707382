"""Writes down what runs on fake tensors: every storage that is made and freed, every operation and collective."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.planner.events import Allocation, Communication, Event, Free, Kernel, Place, Stream
from trueshard.planner.simulation import collectives, workspaces
from trueshard.planner.simulation.operations import Operation, flops_of, operation, result_bytes, tensors_of
from trueshard.planner.simulation.scripts import Result, Script
from trueshard.planner.simulation.values import Values


class Recorder(_torch.DispatchMode):
    """Inside, on fake tensors, writes events. What it writes of memory is exact: storages are followed, not operators.

    Attributes:
        place: where in the step the program is; whoever knows sets it.
    """

    def __init__(self, on_cpu: bool = True) -> None:
        super().__init__()
        self.on_cpu = on_cpu
        """Whether to count what operators take for themselves on a CPU."""
        self.place = Place("between", "")
        self.unit: str | None = None
        """Whose parameters are being gathered or reduced, while that is so."""
        self.stream: Stream = "compute"
        """On which stream FSDP2 would run what runs now."""
        self.events: list[Event] = []
        self.values = Values()
        self._living: dict[int, Allocation] = {}
        """By identity of the storage: what it holds now."""
        self._references: dict[int, Any] = {}
        self.members: dict[str, list[str]] = {}
        """The parameters that each unit gathers, in FSDP2's order."""
        self._described: dict[int, Allocation | None] = {}
        """By identity of a storage that is given back and taken again: what it was."""
        self._numbers = 0
        self._results: dict[int, int] = {}
        """By identity of the storage: position of the communication that wrote it last."""
        self._marks: dict[int, str] = {}
        """By number of the allocation: what is known of its use, see ``mark``."""
        self._kept_numbers: list[tuple[Any, list[Allocation]]] = []
        """Results of products with a number since the last operation, and the memory of the number."""
        self._outside: set[int] = set()
        """Storages in host memory, which take nothing on the device."""

    # Memory

    def adopt(self, tensors: Iterable[tuple[str, torch.Tensor]], use: str, unit: str) -> None:
        """Storages that were made before recording began: their names, what they are for, and whose they are."""
        self.unit = unit
        for name, tensor in tensors:
            if self._see(tensor, name, quietly=True) is not None:
                self.mark([tensor], use)
        self.unit = None

    def _owner(self) -> str:
        return self.place.unit if self.unit is None else self.unit

    def _follow_owner(self, tensors: Sequence[torch.Tensor]) -> None:
        """Outside of forward and backward, an operation belongs to the unit whose tensors it works on."""
        if self.place.phase in ("forward", "backward"):
            return
        units = {each.unit for tensor in tensors if (each := self.allocation_of(tensor)) is not None and each.bytes > 8}
        if units:  # a scalar by itself belongs to what is around it
            owners = units - {""}  # where small shards of all units lie together
            self.place = Place(self.place.phase, owners.pop() if len(owners) == 1 else "")

    def allocation_of(self, tensor: torch.Tensor) -> Allocation | None:
        """What the tensor's storage holds now; None if it has no memory."""
        return self._living.get(_torch.storage_identity(_torch.local(tensor)))

    def living(self) -> list[Allocation]:
        """All that is allocated now, in the order in which it was made."""
        return sorted(self._living.values(), key=lambda each: each.storage)

    def mark(self, tensors: Iterable[torch.Tensor], use: str, name: str = "") -> None:
        """Say what the storages of ``tensors`` are for, and what they are called; a later word replaces an earlier."""
        for tensor in tensors:
            if (found := self.allocation_of(tensor)) is not None:
                self._marks[found.storage] = use
                found.what = name or found.what

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        found = self.allocation_of(tensor)
        return found is not None and self._marks.get(found.storage) == "parameters"

    def take(self) -> tuple[list[Event], dict[int, str]]:
        """What was written since the last time, and the marks."""
        events, self.events = self.events, []
        self._results.clear()
        return events, self._marks

    def _see(self, tensor: torch.Tensor, what: str, quietly: bool = False) -> Allocation | None:
        tensor = _torch.local(tensor)
        return self._see_storage(tensor, what, quietly) if _torch.is_fake(tensor) else None

    def _see_storage(self, tensor: torch.Tensor, what: str, quietly: bool = False) -> Allocation | None:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key in self._references:
            return None
        self._references[key] = weakref.ref(storage, lambda _: self._gone(key))
        return self._allocate(key, storage.nbytes(), what, tensor, quietly)

    def see_random_state(self, state: torch.Tensor) -> None:
        """The state of a generator: a real tensor, in host memory."""
        if self.on_cpu:
            self._see_storage(state, "get_rng_state")

    def _allocate(
        self, key: int, size: int, what: str, tensor: torch.Tensor | None, quietly: bool = False
    ) -> Allocation | None:
        if size == 0:
            return None
        self._numbers += 1
        shape = tuple(map(int, tensor.shape)) if tensor is not None else ()
        dtype = str(tensor.dtype).removeprefix("torch.") if tensor is not None else ""
        made = Allocation(self.place, self._numbers, size, self.stream, "temporary", self._owner(), what, shape, dtype)
        self._living[key] = made
        if not quietly:
            self.events.append(made)
        return made

    def _gone(self, key: int) -> None:
        self._references.pop(key, None)
        self._results.pop(key, None)
        self._described.pop(key, None)
        self.values.forget(key)
        self._release(key)

    def _release(self, key: int) -> None:
        if (held := self._living.pop(key, None)) is not None:
            self.events.append(Free(self.place, held.storage, held.bytes))

    def resized(self, storage: Any, before: int) -> None:
        """A storage's memory was given back or taken; for ``_torch.watching_resizes``."""
        key = int(storage._cdata)
        if key not in self._references or storage.nbytes() == before:
            return
        held = self._living.get(key)
        self._release(key)
        made = self._allocate(key, storage.nbytes(), "resize", None)
        if made is not None and (known := self._described.get(key)) is not None:
            made.what, made.shape, made.dtype = known.what, known.shape, known.dtype
        if made is not None:
            self._marks[made.storage] = "gathered"
        elif held is not None:
            self._marks[held.storage] = "gathered"

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # what it does to its local tensors comes here in its turn
        kwargs = kwargs or {}
        if func.namespace in _SILENT:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.values.read(args[0])
        if _adds_in_place(func, args):
            func = torch.ops.aten.add_.Tensor
        inputs = tensors_of((*args, *kwargs.values()))
        self._follow_owner(inputs)
        self._follow_numbers()
        keeps = self.on_cpu and workspaces.saves_number(func, args)
        out, results = self.values.run(func, args, kwargs, inputs)
        kind = operation(func)
        handed_on = _torch.called_by_mode(sys._getframe())
        if func is torch.ops.aten._safe_softmax.default and not handed_on:
            self._mask_in_place(args[0])
        if (size := result_bytes(func, args)) is not None:
            results[0].untyped_storage().resize_(size)
        script: Script = [Result(i) for i in range(len(results))]
        kernel: Kernel | None = None
        if func.namespace in collectives.NAMESPACES:
            self._collective(func, args, results)
        elif not kind.is_free:
            kernel = self._kernel(func, kind, args, kwargs, inputs, results)
            if self.on_cpu:
                script = workspaces.workspace(func, args, kwargs, results)
                script = workspaces.with_number(script, func, args, again=handed_on, kept=keeps)
        each_its_own = len(results) > 1 and func._schema.name.startswith("aten::_foreach")
        self._take(script, func, results, args[0] if each_its_own else ())
        if kernel is not None:
            kernel.writes = self._storages((*results, *_changed(func, args, kwargs)))
        self._mark_fsdp(func, args, kwargs, out)
        return out

    def _storages(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        """Numbers of what the tensors' storages hold, each once, in order."""
        held = [self.allocation_of(each) for each in tensors]
        return tuple(dict.fromkeys(each.storage for each in held if each is not None))

    def _kernel(
        self,
        func: Any,
        kind: Operation,
        args: Any,
        kwargs: Any,
        given: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> Kernel:
        inputs = {id(each): each for each in given}
        read = sum(collectives.nbytes(each) for each in inputs.values())
        written = sum(collectives.nbytes(each) for each in results) if results else read // 2
        after = {self._results[key] for each in inputs.values() if (key := _identity(each)) in self._results}
        first = next((each for each in (*inputs.values(), *results) if each.is_floating_point()), None)
        made = Kernel(
            self.place,
            str(func._overloadpacket),
            flops_of(func, args, kwargs, results),
            read,
            written,
            "" if first is None else str(first.dtype).removeprefix("torch."),
            tuple(sorted(after)),
            tuple(tuple(map(int, each.shape)) for each in inputs.values()),
            stream=self.stream,
            causal=kind.is_attention and any(each is True for each in args),
            recomputed=_torch.in_backward() and torch.is_grad_enabled(),
            reads=self._storages(inputs.values()),
        )
        self.events.append(made)
        return made

    def _take(self, script: Script, func: Any, results: Sequence[torch.Tensor], sources: Sequence[Any]) -> None:
        """Memory of an operation's results, and what it takes for itself and gives back before it returns.

        Args:
            script: in which order.
            func: the operation.
            results: what it made.
            sources: the tensors to whose units the results belong, one for each; none: all belong to one.
        """
        what = str(func._overloadpacket)
        taken: list[Allocation] = []
        for step in script:
            if isinstance(step, Result):
                if step.index < len(sources) and (source := self.allocation_of(sources[step.index])) is not None:
                    self.unit = source.unit
                self._see(results[step.index], what)
                self.unit = None if sources else self.unit
            elif step > 0:
                self._numbers += 1
                taken.append(Allocation(self.place, self._numbers, step, self.stream, unit=self._owner(), what=what))
                self.events.append(taken[-1])
            else:
                block = next(each for each in reversed(taken) if each.bytes == -step)
                taken.remove(block)
                self.events.append(Free(self.place, block.storage, block.bytes))
        if taken:
            self._kept_numbers.append((weakref.ref(results[0]), taken))

    def _mask_in_place(self, scores: torch.Tensor) -> None:
        """Attention adds its mask to the scores in their own memory; where operators are watched, in new memory.

        Source: ``areAnyTensorSubclassLike`` in ``_scaled_dot_product_attention_math`` of transformers/attention.cpp.
        """
        made = self.allocation_of(scores)
        start = next((i for i in range(len(self.events) - 1, -1, -1) if self.events[i] is made), None)
        if made is None or start is None or made.what != "aten.add":
            return
        gone = next((e for e in self.events[start:] if isinstance(e, Free) and e.bytes == made.bytes), None)
        before = next((e for e in reversed(self.events[:start]) if gone and _is_taking(e, gone.storage)), None)
        if before is not None:
            self.events[start:] = [each for each in self.events[start:] if each is not made and each is not gone]
            self._living[_identity(scores)] = before

    def _follow_numbers(self) -> None:
        """Numbers that autograd has saved since this was last asked are given back when their nodes have run."""
        for reference, blocks in self._kept_numbers:
            result = reference()
            if result is None or result.grad_fn is None:
                self._give_back(blocks)
            else:
                token = _Token()
                result.grad_fn.metadata[token] = None
                weakref.finalize(token, self._give_back, blocks)  # a graph that is dropped without a backward
                result.grad_fn.register_hook(lambda *_, blocks=blocks: self._give_back(blocks))
        self._kept_numbers.clear()

    def _give_back(self, blocks: list[Allocation]) -> None:
        while blocks:
            block = blocks.pop()
            self.events.append(Free(self.place, block.storage, block.bytes))

    def _collective(self, func: Any, args: Any, results: Sequence[torch.Tensor]) -> None:
        told = collectives.described(func, args)
        if told is None:
            return
        kind, group, whole, received = told
        tensors = tensors_of(args)
        ranks = torch.distributed.get_process_group_ranks(group)
        after = {self._results[key] for each in tensors if (key := _identity(each)) in self._results}
        self.events.append(
            Communication(
                self.place,
                kind,
                "all_reduce" if kind == "all_reduce" and self.stream == "reduce_scatter" else self.stream,
                len(ranks),
                ranks[1] - ranks[0] if len(ranks) > 1 else 1,
                received,
                whole,
                str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
                self._owner(),
                tuple(sorted(after)),
            )
        )
        for tensor in (*tensors, *results):
            self._results[_identity(tensor)] = len(self.events) - 1
        self.mark(tensors, "communication")
        if kind == "all_reduce" and self.stream == "reduce_scatter":
            self.stream = "all_reduce"

    def _mark_fsdp(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func.namespace != "fsdp":
            return
        name = func._schema.name.partition("::")[2]
        if name == "all_gather_copy_in":
            cast = [each for each in args[0] if not self._is_parameter(each)]
            self.mark((*cast, args[1]), "communication")
        elif name == "split_with_sizes_copy":
            members = self.members.get(self._owner(), [])
            for i, tensor in enumerate(kwargs["out"]):
                name = members[i] if len(members) == len(kwargs["out"]) else ""
                self.mark([tensor], "gathered", name)
                self._described[_identity(tensor)] = self.allocation_of(tensor)
        elif name == "chunk_cat":
            self.mark(args[0], "gradients")
            self.mark([kwargs["out"]], "communication")
            self.stream = "reduce_scatter"


_SILENT = ("prim", "profiler")


class _Token:
    """Lives as long as what holds it."""


def _changed(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments that it writes to."""
    return tensors_of(args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(func))


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write)


def _is_taking(event: Event, storage: int) -> TypeGuard[Allocation]:
    return isinstance(event, Allocation) and event.storage == storage


def _adds_in_place(func: Any, args: Any) -> bool:
    """Whether autograd adds a second gradient to the first here, and in training would do so in the first one's memory.

    It never does while operators are watched, or on fake tensors; in training it does where nobody else holds the
    first. Source: ``can_accumulate_inplace`` of torch/csrc/autograd/input_buffer.cpp.
    """
    if func is not torch.ops.aten.add.Tensor or len(args) != 2 or not isinstance(args[1], torch.Tensor):
        return False
    return _torch.engine_calls(sys._getframe(2)) and _torch.is_held_once(args[0])


def _identity(tensor: torch.Tensor) -> int:
    return _torch.storage_identity(_torch.local(tensor))
