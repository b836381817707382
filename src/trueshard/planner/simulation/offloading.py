"""A step on a device whose shards rest in host memory, from the same step where all memory is one.

What FSDP2 does with ``CPUOffloadPolicy`` on a device with streams, which a simulation on CPU tensors does not show:

- Before a gather each shard is copied to the device, in its storage dtype; where it is cast, the copy goes as soon as
  the cast is made, otherwise with the gather's other inputs. Source: ``FSDPParam.all_gather_inputs``.
- A reduced gradient is copied to the host on the stream that reduced it, and its memory on the device is free for what
  comes next on that stream; only what replicas have all-reduced stays until backward ends. Source:
  ``foreach_reduce`` and ``FSDPParamGroup.finalize_backward``.
- Clipping and the optimizer work on host memory; so do their results and the optimizer's state.

Replicated parameters, buffers, and the state of the former are on the device. Two things are taken for granted: a
gradient goes to the host with its padding, which the first rank has none of; and where one operator takes
tensors of both places in a list (the replicated ones are few and small), it runs on the host as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trueshard.planner.events import Allocation, Communication, Event, Free, Kernel, Stream, Trace, Transfer

_REDUCING: tuple[Stream, ...] = ("reduce_scatter", "all_reduce")
_ON_HOST = ("clip", "optimizer")
"""Phases that work on shards."""


def offloaded(trace: Trace, sharded: Collection[str]) -> Trace:
    """The step as it is on the device; kernels that run on the host are on the stream ``host``.

    Args:
        trace: of a step with ``offload="cpu"`` on CPU tensors; its kernels know what they read and write.
        sharded: names of the parameters that FSDP2 shards.
    """
    return _Offloading(trace, sharded).trace()


class _Offloading:
    """The trace that is being written."""

    def __init__(self, trace: Trace, sharded: Collection[str]) -> None:
        self.old = trace
        self.sharded = sharded
        self.host: dict[int, Allocation] = {}
        """Storages in host memory."""
        self.events: list[Event] = []
        self.at: dict[int, int] = {}
        """Position in the old trace → in the new one."""
        self.sent: dict[int, int] = {}
        """Position of a reduction in the old trace → of the copy of its result to the host in the new one."""
        self.copies: list[Allocation] = []
        """Shards on the device, until the gather has read them."""
        self.kept: list[Allocation] = []
        """Gradients that have been copied to the host but keep their memory on the device."""
        made = (each.storage for each in (*trace.resident, *trace.events) if isinstance(each, Allocation))
        self.numbers = max(made, default=0)
        self.maker: Kernel | None = None
        """The last kernel."""

    def trace(self) -> Trace:
        resident = [each for each in self.old.resident if not self._keep_on_host(each)]
        leaving = _gradients(self.old.events)
        for i, event in enumerate(self.old.events):
            if event.place.phase != "backward":
                self._end_backward()
            self._release_cast(event)
            if isinstance(event, Allocation):
                if not self._keep_on_host(event):
                    self.events.append(event)
            elif isinstance(event, Free):
                if self.host.pop(event.storage, None) is None:
                    self.events.append(event)
            else:
                self._operate(i, event)
            if i in leaving:
                self._to_host(leaving[i])
        return Trace(self.events, resident)

    # What is where

    def _keep_on_host(self, made: Allocation) -> bool:
        """Whether the storage lies in host memory; if so, remember it."""
        if self._belongs_to_host(made):
            self.host[made.storage] = made
            return True
        return False

    def _belongs_to_host(self, made: Allocation) -> bool:
        if made.kind == "parameters":
            return made.what in self.sharded
        if made.kind == "optimizer":
            return made.what.rpartition(".")[0] in self.sharded
        if self.maker is not None and made.storage in self.maker.writes:
            return self.maker.stream == "host"
        return made.place.phase in _ON_HOST

    def _is_shard(self, storage: int) -> bool:
        return storage in self.host and self.host[storage].kind == "parameters"

    def _runs_on_host(self, kernel: Kernel) -> bool:
        if any(each in self.host for each in kernel.reads):
            return kernel.place.phase in _ON_HOST or all(each in self.host for each in kernel.reads)
        return kernel.place.phase in _ON_HOST and not kernel.reads

    # What happens

    def _operate(self, i: int, event: Kernel | Communication | Transfer) -> None:
        if isinstance(event, Kernel):
            after = tuple(self.at[each] for each in event.after)
            if event.place.phase in ("forward", "backward") and any(map(self._is_shard, event.reads)):
                event = dataclasses.replace(event, after=(*after, *self._to_device(event)))
            elif self._runs_on_host(event):
                after = tuple(sorted({self.sent.get(each, self.at[each]) for each in event.after}))
                event = dataclasses.replace(event, after=after, stream="host")
            elif event.after:
                event = dataclasses.replace(event, after=after)
            self.maker = event
        elif isinstance(event, Communication) and event.after:
            event = dataclasses.replace(event, after=tuple(self.at[each] for each in event.after))
        self.at[i] = len(self.events)
        self.events.append(event)
        if isinstance(event, Communication) and event.op == "all_gather":
            self._release()

    def _to_device(self, kernel: Kernel) -> list[int]:
        """Copy the shards that the kernel reads; returns the positions of the transfers."""
        found = []
        for storage in kernel.reads:
            if not self._is_shard(storage):
                continue
            shard = self.host[storage]
            found.append(len(self.events))
            self.events.append(Transfer(kernel.place, "to_device", shard.bytes, shard.unit))
            self.numbers += 1
            copy = dataclasses.replace(
                shard, place=kernel.place, storage=self.numbers, stream=kernel.stream, kind="communication"
            )
            self.events.append(copy)
            self.copies.append(copy)
        return found

    def _release_cast(self, event: Event) -> None:
        """A shard that was cast goes when the cast has its memory; one that is in the gather's own input does not."""
        if self.maker is None or self.maker.op == "fsdp.all_gather_copy_in":
            return
        if not isinstance(event, Allocation) or event.storage not in self.maker.writes:
            self._release()

    def _release(self) -> None:
        for copy in reversed(self.copies):
            self.events.append(Free(self.events[-1].place, copy.storage, copy.bytes))
        self.copies.clear()

    def _to_host(self, leaving: _Leaving) -> None:
        for each in leaving.reductions:
            self.sent[each] = len(self.events)
        gradient = leaving.gradient
        place = self.events[-1].place
        self.events.append(Transfer(place, "to_host", gradient.bytes, gradient.unit, leaving.stream))
        self.kept.append(gradient)
        if not leaving.is_kept:
            self._end_backward()
        self.host[gradient.storage] = gradient

    def _end_backward(self) -> None:
        for gradient in self.kept:
            self.events.append(Free(self.events[-1].place, gradient.storage, gradient.bytes))
        self.kept.clear()


@dataclass(frozen=True)
class _Leaving:
    """A reduced gradient that outlives backward."""

    gradient: Allocation
    reductions: list[int]
    """Positions of the collectives that reduced it."""
    stream: Stream
    """On which it was worked on last."""
    is_kept: bool
    """Whether its memory was all-reduced: what was, FSDP2 keeps to the end of backward."""


def _gradients(events: Sequence[Event]) -> dict[int, _Leaving]:
    """By the position of the last that is done to each on its stream."""
    freed = {event.storage: event.place.phase for event in events if isinstance(event, Free)}
    found: dict[int, _Leaving] = {}
    for i, event in enumerate(events):
        if not isinstance(event, Allocation) or event.kind != "gradients" or event.stream not in _REDUCING:
            continue
        if freed.get(event.storage) in ("forward", "backward"):
            continue
        last, stream, reductions, is_kept = i, event.stream, [], False
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
        found[last] = _Leaving(event, reductions, stream, is_kept)
    return found
