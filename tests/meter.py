"""What the CPU allocator takes and gives back in a step, by its own account: ``torch.profiler``'s allocation events.

It knows nothing of the planner, of storages, or of operators' results.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

_RUNLOOP = "pt_gloo_runloop"
"""The name of the threads in which torch runs gloo's collectives, and which hold their tensors meanwhile."""
_STEP = "measured step "


@dataclass(frozen=True)
class Change:
    """Memory taken (bytes > 0) or given back."""

    bytes: int
    inside: tuple[str, ...]
    """Names of the operators around it, outermost first."""


@dataclass
class Measured:
    """What the CPU allocator took and gave back, in order."""

    before: list[Change]
    """From the beginning to the first step."""
    steps: list[list[Change]]


def meter(steps: Iterable[Callable[[], object]]) -> Measured:
    """What the CPU allocator took and gave back before and in each step, but for gloo's own buffers.

    Between steps, whatever makes the next one runs too, unmeasured but watched: of blocks that were made before its
    watching began, the profiler does not tell the end.

    Read from kineto's tree of events, since it alone gives the address of each block and the operators around it: gloo
    copies what it sends and receives through buffers of its own (``c10d::`` operators, and its threads), which no
    accelerator's library has; such a block is left out from its making to its end, wherever that is.
    """
    gc.collect()
    gc.disable()
    count = 0
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for step in steps:
                with record_function(f"{_STEP}{count}"):
                    step()
                count += 1
    finally:
        gc.enable()
    found = Measured([], [[] for _ in range(count)])
    began, of_gloo = False, set()
    for _, size, address, inside in sorted(_allocations(profiler), key=lambda each: each[0]):
        outside = size < 0 and address in of_gloo
        of_gloo.discard(address)
        if size > 0 and any(name.startswith(("c10d::", "gloo:")) for name in inside):
            of_gloo.add(address)
        elif not outside and inside and inside[0].startswith(_STEP):
            began = True
            found.steps[int(inside[0].removeprefix(_STEP))].append(Change(size, inside[1:]))
        elif not outside and not began:
            found.before.append(Change(size, inside))
    return found


@contextlib.contextmanager
def gloo_lets_go() -> Iterator[None]:
    """Inside, whoever waits for a collective waits until gloo's thread holds its tensors no longer.

    It drops them some microseconds after it has reported the end. Where the program has dropped them by then, that
    thread frees them, and no profiler sees it: the profiler's state is that of the threads that run operators.
    """
    functional = torch.ops._c10d_functional  # DTensor's, which waits by an operator

    def waiting(original: Any) -> Any:
        def wait(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            asleep = 0
            while asleep < 2:  # twice: between two looks, one that waits for the interpreter's lock gets it
                asleep = 0 if _gloo_runs() else asleep + 1
            return result

        return wait

    with (
        mock.patch.object(dist.Work, "wait", waiting(dist.Work.wait)),
        mock.patch.object(functional, "wait_tensor", waiting(functional.wait_tensor)),
    ):
        yield


def _gloo_runs() -> bool:
    """Whether a thread runs that may still hold a collective's tensors: one that sleeps waits for peers or for work."""
    states = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            _, _, rest = Path(f"/proc/self/task/{task}/stat").read_text().partition(" (")
            name, _, after = rest.rpartition(") ")
            states += [after[0]] if name == _RUNLOOP else []
    assert states, f"torch names no thread {_RUNLOOP}"
    return any(state != "S" for state in states)


def peak_and_rest(changes: Sequence[int]) -> tuple[int, int]:
    """Highest rise of live bytes above what they were at the beginning, and what is left of it at the end."""
    live = highest = 0
    for change in changes:
        live += change
        highest = max(highest, live)
    return highest, live


def _allocations(profiler: Any) -> Iterator[tuple[int, int, int, tuple[str, ...]]]:
    """(nanoseconds, bytes, address, names of the operators around it) of each event of the allocator."""
    waiting: list[tuple[Any, tuple[str, ...]]] = [
        (node, ()) for node in profiler.profiler.kineto_results.experimental_event_tree()
    ]
    while waiting:
        node, inside = waiting.pop()
        if node.tag.name == "Allocation":
            yield node.start_time_ns, node.extra_fields.alloc_size, node.extra_fields.ptr, inside
        else:
            inside = (*inside, node.name)
        waiting += [(child, inside) for child in node.children]
