"""Rewrite a trace recorded on CPU tensors to one with ``offload="cpu"`` on a device: sharded parameters in host memory.

FSDP2 with ``CPUOffloadPolicy`` on a device with streams does what a simulation on CPU tensors does not show:

- Before a gather each shard is copied to the device, in its storage dtype; the copy is freed after its cast if there
  is one, otherwise with the gather's other inputs. Source: ``FSDPParam.all_gather_inputs``.
- A reduced gradient is copied to the host on the stream that reduced it, and its memory on the device is reused by that
  stream at once; only all-reduced gradients of replicas keep theirs until backward ends. Source:
  ``foreach_reduce`` and ``FSDPParamGroup.finalize_backward``.
- Clipping and the optimizer run on the host; their results and the optimizer's state lie in host memory.

Replicated parameters with their optimizer state, and buffers, are on the device. Two assumptions: a gradient goes to
the host with its padding, of which the first rank has none; and a list operator with tensors on both sides (replicated
ones are few and small) runs on the host as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from trueshard.planner import ledger
from trueshard.planner.trace import Allocation, Communication, Event, Free, HostCopy, Kernel, Stream, Trace

_REDUCING: tuple[Stream, ...] = ("reduce_scatter", "all_reduce")
_ON_HOST = ("clip", "optimizer")
"""Phases that compute on shards."""


def offloaded(trace: Trace, sharded: Collection[str]) -> Trace:
    """Return the device's trace of a step on CPU tensors, which has ``reads`` and ``writes``.

    Kernels that run on the host are on the stream ``host``. ``sharded``: names of the parameters that FSDP2 shards.
    """
    return _Offloading(trace, sharded).trace()


class _Offloading:
    def __init__(self, trace: Trace, sharded: Collection[str]) -> None:
        self.old = trace
        self.sharded = sharded
        self.host: dict[int, Allocation] = {}
        self.host_bytes = self.host_peak = 0
        """Bytes of ``host`` now, and at most so far."""
        self.events: list[Event] = []
        self.at: dict[int, int] = {}
        """New position of each old one."""
        self.sent: dict[int, int] = {}
        """Old position of a reduction → new one of the copy of its result to the host, for which clipping waits."""
        self.copies: list[Allocation] = []
        """Copies of shards on the device, until the gather has read them; the newest first."""
        self.kept: list[Allocation] = []
        """Gradients that were copied to the host but keep their memory on the device."""
        storages = [event.storage for event in (*trace.resident, *trace.events) if isinstance(event, Allocation)]
        self.numbers = max(storages, default=0)
        self.last_kernel: Kernel | None = None

    def trace(self) -> Trace:
        resident = [allocation for allocation in self.old.resident if not self._register_on_host(allocation)]
        gradients = _reduced_gradients(self.old)
        for i, event in enumerate(self.old.events):
            if event.place.phase != "backward":
                self._free(self.kept)
            self._release_cast(event)
            if isinstance(event, Allocation):
                if not self._register_on_host(event):
                    self.events.append(event)
            elif isinstance(event, Free):
                if self.host.pop(event.storage, None) is None:
                    self.events.append(event)
                else:
                    self.host_bytes -= event.bytes
            else:
                self._operate(i, event)
            if i in gradients:
                self._to_host(*gradients[i])
        return Trace(self.events, resident, self.host_peak)

    def _add_to_host(self, made: Allocation) -> None:
        self.host[made.storage] = made
        self.host_bytes += made.bytes
        self.host_peak = max(self.host_peak, self.host_bytes)

    def _register_on_host(self, made: Allocation) -> bool:
        """Return True and remember the storage if it lies in host memory."""
        if made.kind == "parameters":
            is_there = made.what in self.sharded
        elif made.kind == "optimizer":
            is_there = made.what.rpartition(".")[0] in self.sharded
        elif self.last_kernel is not None and made.storage in self.last_kernel.writes:
            is_there = self.last_kernel.stream == "host"
        else:
            is_there = made.place.phase in _ON_HOST
        if is_there:
            self._add_to_host(made)
        return is_there

    def _is_shard(self, storage: int) -> bool:
        return storage in self.host and self.host[storage].kind == "parameters"

    def _runs_on_host(self, kernel: Kernel) -> bool:
        if any(storage in self.host for storage in kernel.reads):
            return kernel.place.phase in _ON_HOST or all(storage in self.host for storage in kernel.reads)
        return kernel.place.phase in _ON_HOST and not kernel.reads

    def _operate(self, i: int, event: Kernel | Communication | HostCopy) -> None:
        if isinstance(event, Kernel):
            after = tuple(self.at[position] for position in event.after)
            if event.place.phase in ("forward", "backward") and any(map(self._is_shard, event.reads)):
                event = dataclasses.replace(event, after=(*after, *self._to_device(event)))
            elif self._runs_on_host(event):
                after = tuple(sorted({self.sent.get(position, self.at[position]) for position in event.after}))
                event = dataclasses.replace(event, after=after, stream="host")
            elif event.after:
                event = dataclasses.replace(event, after=after)
            self.last_kernel = event
        elif isinstance(event, Communication):
            event = dataclasses.replace(event, after=tuple(self.at[position] for position in event.after))
        self.at[i] = len(self.events)
        self.events.append(event)
        if isinstance(event, Communication) and event.op == "all_gather":
            self._free(self.copies)

    def _to_device(self, kernel: Kernel) -> list[int]:
        """Copy the shards that the kernel reads to the device; return the positions of the transfers."""
        positions = []
        for storage in kernel.reads:
            if not self._is_shard(storage):
                continue
            shard = self.host[storage]
            positions.append(len(self.events))
            self.events.append(HostCopy(kernel.place, "to_device", shard.bytes, shard.unit))
            self.numbers += 1
            copy = dataclasses.replace(
                shard, place=kernel.place, storage=self.numbers, stream=kernel.stream, kind="communication"
            )
            self.events.append(copy)
            self.copies.insert(0, copy)
        return positions

    def _release_cast(self, event: Event) -> None:
        """Free a shard's copy once its cast is allocated, unless the gather itself reads the copy."""
        if self.last_kernel is None or self.last_kernel.op == "fsdp.all_gather_copy_in":
            return
        if not isinstance(event, Allocation) or event.storage not in self.last_kernel.writes:
            self._free(self.copies)

    def _free(self, held: list[Allocation]) -> None:
        """Free what a list holds, in its order, and empty it."""
        for allocation in held:
            self.events.append(Free(self.events[-1].place, allocation.storage, allocation.bytes))
        held.clear()

    def _to_host(self, gradient: Allocation, reductions: list[int], stream: Stream, is_kept: bool) -> None:
        for position in reductions:
            self.sent[position] = len(self.events)
        place = self.events[-1].place
        self.events.append(HostCopy(place, "to_host", gradient.bytes, gradient.unit, stream))
        self.kept.append(gradient)
        if not is_kept:
            self._free(self.kept)
        self._add_to_host(gradient)


def _reduced_gradients(trace: Trace) -> dict[int, tuple[Allocation, list[int], Stream, bool]]:
    """Map the position of the last event that works on each gradient that outlives backward to the gradient.

    With it are the positions of the collectives that reduced it, the stream of that event, and whether it was
    all-reduced: FSDP2 keeps such memory until backward ends.
    """
    events = trace.events
    gradients: dict[int, tuple[Allocation, list[int], Stream, bool]] = {}
    for lifetime in ledger.lifetimes(trace):
        made, i = lifetime.allocation, lifetime.made
        if i < 0 or made.kind != "gradients" or made.stream not in _REDUCING:
            continue
        if lifetime.freed < len(events) and events[lifetime.freed].place.phase in ("forward", "backward"):
            continue
        last, stream, reductions, is_kept = i, made.stream, [], False
        for direction in (range(i, -1, -1), range(i, len(events))):
            for j in direction:
                other = events[j]
                if not isinstance(other, (Kernel, Communication)):
                    continue
                if other.stream not in _REDUCING:
                    break
                if j > last:
                    last, stream = j, other.stream
                if isinstance(other, Communication):
                    reductions.append(j)
                    is_kept |= other.op == "all_reduce" and j > i
        gradients[last] = made, reductions, stream, is_kept
    return gradients
