"""Say where each rank is when ranks wait for one another in vain: a thread of each rank looks now and then.

``[Note: Why a thread]`` A rank that waits in a collective runs no Python of ours, and the others, which never came,
know nothing of it: only a look from outside can tell. The thread reads the stack of the one that called ``shard()``, a
few times in half a minute, and writes where that is to the store that the ranks were started with. Once a rank has
waited in one collective for half a minute, one of those that wait logs a line that names the slowest; and once more
shortly before the process group's time limit, which ends the run. A rank that writes nothing for two looks does not
answer: its process is stopped, or its machine lost. A step itself does nothing for this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trueshard import _torch
from trueshard.text import logger, ranges

PATIENCE = 30.0
"""Seconds that a rank may wait before it is said; a third of the time limit, if that is less."""
LOOKS = 6
"""Looks in that time."""

_TORCH, _OWN = (f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parent.parent))
_COLLECTIVES = [f"{_TORCH}distributed{os.sep}{name}.py" for name in ("distributed_c10d", "_functional_collectives")]
_COMMANDS = f"{_OWN}cli{os.sep}"
_WAITS = {"meet"}
"""Functions of TrueShard that wait for the others without a collective."""
_CALLED = {"shard", "save", "load", "accumulate", "clip_grad_norm_", "step", "generate", "full_tensor", "gathered"}
"""Functions for users that have collectives and are neither forward nor backward."""
ON_DEVICE = "work that the device has not ended"
"""Said for a collective where the host has begun it and stands elsewhere."""
_KEY = "trueshard/waiting"
_watched: Any = None
"""The process group whose ranks are watched."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Place of a rank in the program."""

    calls: int
    """Number of collectives that the rank has begun: who has begun fewer is behind."""
    collective: str
    """Collective that the rank is in; empty: none."""
    unit: str | None
    phase: str
    """``"forward"``, ``"backward"``, or the function that the user called: ``"step()"``, ``"save()"``."""
    line: str
    """Line of the user's code; empty: none."""
    silent: str = ""
    """Process that does not answer, and was here when it last did; empty: it answers."""

    def __str__(self) -> str:
        of = "" if self.unit is None else f" of unit {self.unit or '(root)'!r}"
        words = [f"in {self.collective}{of}" if self.collective else "", self.phase, self.line]
        words[:0] = [f"does not answer ({self.silent} is stopped or lost), and was last"] if self.silent else []
        return ", ".join(filter(None, words))


def watch_ranks() -> None:
    """Say where ranks are if they wait in vain, from now on; nothing in one process. Called by each rank."""
    global _watched
    world = dist.group.WORLD
    if dist.get_world_size() == 1 or _watched is world:
        return
    try:
        store = _torch.store().clone()  # of its own: a wait in another thread would block it
    except (AttributeError, RuntimeError):  # an older torch, or a kind of store without: nothing is said then
        return
    _watched = world
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
    arguments = world, store, dist.get_rank(), dist.get_world_size(), threading.get_ident(), device
    threading.Thread(target=_watch, args=arguments, name="trueshard-waiting", daemon=True).start()


def time_limit(group: Any) -> timedelta:
    """Return how long ranks of a process group wait for one another; half an hour if torch does not say."""
    return _torch.timeout_of(group) or timedelta(minutes=30)


def flight_record() -> str:
    """Return words on the files that NCCL's flight recorder leaves when a time limit ends a run; "" if it leaves none.

    Names and defaults are those of torch's ``FlightRecorder.hpp`` and ``DebugInfoWriter``.
    """
    get = os.environ.get
    size = get("TORCH_FR_BUFFER_SIZE", get("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"))
    is_off = size == "0" or get("TORCH_NCCL_DUMP_ON_TIMEOUT", "1").lower() in ("0", "false", "no", "n")
    if is_off or "nccl" not in str(dist.get_backend_config()):
        return ""
    cache = Path(get("XDG_CACHE_HOME", Path.home() / ".cache"), "torch", "comm_lib_trace_rank_")
    prefix = get("TORCH_FR_DUMP_TEMP_FILE", get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(cache)))
    return f", and NCCL leaves the last collectives of each rank in {prefix}*: `torchfrtrace` compares them"


def _watch(group: Any, store: Any, rank: int, ranks: int, thread: int, device: int | None) -> None:
    """Look where ``thread`` of this rank is until the process group or the store is gone."""
    limit = time_limit(group).total_seconds()
    patience = min(PATIENCE, limit / 3)
    pause, here, since = patience / LOOKS, None, time.monotonic()
    due: list[float] = []
    asked: tuple[int, str, dict[int, Any]] | None = None
    process, look = f"process {os.getpid()} on {socket.gethostname()}", 0
    try:
        while dist.group.WORLD is group:
            place, look = _place_now(thread, device), look + 1
            waited = time.monotonic() - since
            store.set(f"{_KEY}/{rank}", json.dumps([look, process, *dataclasses.astuple(place)]))
            if place != here:
                here, since, due, asked = place, time.monotonic(), [limit - 5 * pause, patience], None
            elif asked is not None and look == asked[0] + 2:
                places = _places(asked[2], _reports(store, ranks))
                if asked[1] or not _are_all_busy(places):
                    logger.warning("ranks have waited for %.0f s: %s%s", waited, described(places), asked[1])
            elif place.collective and due and waited >= due[-1]:
                if not _answers(store, 2 * pause):
                    if rank == 1:  # of all, one says it; rank 0 has the store, where no launcher has it
                        words = "rank 0 or its launcher does not answer (stopped or lost)"
                        logger.warning("ranks have waited for %.0f s: %s; rank 1 %s", waited, words, here)
                    return
                end = (
                    f"; the time limit of {limit:.0f} s ends this run{flight_record()}" if due.pop() != patience else ""
                )
                if store.add(f"{_KEY}/said/{place.calls}/{place.collective}/{end}", 1) == 1:  # of all, one says it
                    asked = look, end, _reports(store, ranks)
            time.sleep(pause)
    except RuntimeError:  # the process with the store has ended
        return


def _answers(store: Any, seconds: float) -> bool:
    """Return whether the store answers. Each of its calls waits for ever if the process that has it is stopped."""
    call = threading.Thread(target=store.check, args=([_KEY],), daemon=True)
    call.start()
    call.join(seconds)
    return not call.is_alive()


def _reports(store: Any, ranks: int) -> dict[int, Any]:
    """Return what each rank has last written: number of its look, process, and place; None: nothing yet."""
    keys = [f"{_KEY}/{rank}" for rank in range(ranks)]
    return {rank: json.loads(store.get(key)) if store.check([key]) else None for rank, key in enumerate(keys)}


def _places(before: Mapping[int, Any], now: Mapping[int, Any]) -> dict[int, Place | None]:
    """Return the places of ``now``; who has not looked since ``before`` does not answer."""
    placed = {rank: report and Place(*report[2:]) for rank, report in now.items()}
    silent = [rank for rank, report in now.items() if report and before[rank] and report[0] == before[rank][0]]
    return placed | {rank: dataclasses.replace(placed[rank], silent=now[rank][1]) for rank in silent}


def _place_now(thread: int, device: int | None) -> Place:
    """Return where ``thread`` is. No frame outlives the call: what is a variable there would live as long."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # a cycle, since this frame has them as a variable
    frame = frames.pop(thread, None)
    return place_of(frame, _torch.collectives_begun(), frames.values(), is_busy=device_is_busy(device))


def device_is_busy(device: int | None) -> bool:
    """Return whether an accelerator has work left, on the stream on which training runs; False without one."""
    if device is None:
        return False
    # A thread's own current stream is the default one until it chooses another, and this thread chooses none.
    return not torch.accelerator.current_stream(device).query()


def _are_all_busy(places: Mapping[int, Place | None]) -> bool:
    """Return whether all ranks have come equally far, and their devices work: a long step, and no rank is missing."""
    first, *others = places.values()
    return first is not None and first.collective == ON_DEVICE and all(place == first for place in others)


def place_of(
    frame: types.FrameType | None, calls: int, others: Iterable[types.FrameType] = (), *, is_busy: bool = False
) -> Place:
    """Return where the thread with this innermost ``frame`` is; ``calls``: collectives that it has begun.

    ``others``: frames of other threads; on an accelerator backward has one of its own, in which units are gathered.
    ``is_busy``: the device has work left. A collective of NCCL returns at once, and a rank that waits for others stands
    where it needs a value from the device.
    """
    collective = phase = called = ""
    unit = None
    for outer, _ in traceback.walk_stack(frame) if frame else ():
        file, name = outer.f_code.co_filename, outer.f_code.co_name
        if file in _COLLECTIVES or name in _WAITS:
            collective = name
        elif unit is None:
            unit = _torch.unit_in(outer)
        if name in _CALLED and file.startswith((_TORCH, _OWN)):
            called = f"{name}()"
        elif not phase and name in ("_engine_run_backward", "_call_impl"):
            phase = "backward" if name == "_engine_run_backward" else "forward"
    if unit is None and phase == "backward":
        stacks = (outer for other in others for outer, _ in traceback.walk_stack(other))
        unit = next((inside for outer in stacks if (inside := _torch.unit_in(outer)) is not None), None)
    if is_busy and not collective:
        collective = ON_DEVICE
    return Place(calls, collective, unit, phase or called, user_line(frame))


def described(places: Mapping[int, Place | None]) -> str:
    """Return which ranks are where, the slowest first; None: the rank has not come to ``shard()``."""
    at: dict[Place | None, list[int]] = {}
    for rank, place in places.items():
        at.setdefault(place, []).append(rank)
    # Who does not answer is behind, then who has begun fewer collectives; of those with as many, who is in none.
    order = sorted(at, key=lambda p: (True, -1, False) if p is None else (not p.silent, p.calls, bool(p.collective)))
    words = [f"{_ranks(at[place])} {'has not called shard()' if place is None else place}" for place in order]
    words[0] += " (slowest)" if len(words) > 1 and not (order[0] and order[0].silent) else ""
    return "; ".join(words)


def user_line(frame: types.FrameType | None) -> str:
    """Return ``file:line`` of the innermost frame that is not torch's or TrueShard's; "" if there is none.

    What has called a command of TrueShard's is not the user's either.
    """
    for outer, line in traceback.walk_stack(frame) if frame else ():
        file = outer.f_code.co_filename
        if file.startswith(_COMMANDS):
            break
        if not file.startswith((_TORCH, _OWN)) and file != contextlib.__file__:  # which enters our own for the user
            return f"{os.path.basename(file)}:{line}"
    return ""


def _ranks(ranks: list[int]) -> str:
    """Return ``rank 3``, ``ranks 0-2, 5``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranges(ranks))}"
