"""One rank of the parity helper: a long-lived process that runs test functions sent to it.

- Jobs come over a socket pair, pickled by reference, so a worker imports a test module once and keeps it.
- Each job gets a fresh gloo process group and a clean global state (seeds, default dtype, environment, caches): what
  one test left behind cannot reach the next.
- A thread does nothing but read that socket: when the parent goes away, even by kill -9, the worker leaves at once.
- SIGUSR1 makes `faulthandler` write every thread's stack to a file, also while the main thread waits in a collective.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import queue
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import forks
import on_device
from forks_child import clear_caches
from gathering import dumps, whole
from trueshard.planner import process

GROUP_LIMIT = 60.0
"""seconds within which the ranks of a job must have met, however busy the machine: the job's own limit starts then"""


@dataclass(frozen=True)
class RankCall:
    """One rank's part of a call. `call` holds the pickled function and its arguments."""

    rank: int
    world_size: int
    port: int
    """of the TCP store that the parent serves on the loopback interface"""
    name: str
    """prefix of this job's keys in the store, never used twice"""
    timeout: float
    """seconds that the parent waits once the ranks have met; collectives end earlier, with a Python traceback"""
    group: bool
    """whether the default process group is initialised before the call"""
    call: bytes


@dataclass(frozen=True)
class Answer:
    """What became of a job on one rank: a pickled value, or an exception as text."""

    value: bytes = b""
    error: str = ""
    """last line of the traceback, as in `ValueError: lr must be positive`; empty if the function returned"""
    trace: str = ""


def reset(environment: dict[str, str], folder: str) -> None:
    """Leaves no trace of the job before: process groups, meshes, seeds, defaults, environment, caches."""
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if "torch.distributed.tensor" in sys.modules:
        clear_mesh_caches()
    warnings.simplefilter("default")  # forgets which warnings were shown, so that each job shows them again
    # A model lives on in what the graph of an exception's frames held: found in a second round. Frozen, it never goes.
    for _ in range(5):
        if not gc.collect():
            break
    gc.freeze()  # what is alive now is modules and their tables: the next collection need not walk them again


def clear_mesh_caches() -> None:
    """Drop the meshes that DTensor's caches hold: each keeps its process groups alive, and gloo's threads with them.

    A mesh also knows its groups by names that the next process group uses again.
    """
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute._planner_cache.clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor"):
            clear_caches(module)


def execute(job: RankCall, begun: Callable[[], None]) -> Answer:
    """Calls `begun` when the process group is there, before the function."""
    try:
        function, args = pickle.loads(job.call)
        if job.group:
            server = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=timedelta(seconds=GROUP_LIMIT))
            store = dist.PrefixStore(job.name, server)
            on_gpu = os.environ.get("TRUESHARD_TEST_DEVICE") == "cuda"
            if on_gpu:
                torch.cuda.set_device(job.rank)
                on_device.begin()
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=store,
                rank=job.rank,
                world_size=job.world_size,
                timeout=timedelta(seconds=GROUP_LIMIT),
            )
            distributed_c10d._set_pg_timeout(timedelta(seconds=0.9 * job.timeout))
            # gloo returns on a rank that is connected, while others connect still: those would fail if it died at once.
            store.set(f"connected{job.rank}", "")
            store.wait([f"connected{rank}" for rank in range(job.world_size)])
        begun()
        return Answer(value=dumps(whole(function(job.rank, job.world_size, *args))))
    except BaseException as error:  # SystemExit and CheckpointException too: the parent decides what they mean
        trace = "".join(traceback.format_exception(error))
        return Answer(error="".join(traceback.format_exception_only(error)).strip(), trace=trace)


def serve(descriptor: int, stack_file: str) -> None:
    """Runs jobs until the parent closes its end of the socket `descriptor`."""
    connection: Connection = Connection(descriptor)
    os.set_inheritable(descriptor, False)
    stacks = Path(stack_file).open("w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    torch.set_num_threads(1)
    on_device.adopt()
    forks.adopt(process)  # a process with a process group cannot be forked itself
    environment, folder = dict(os.environ), os.getcwd()
    reset(environment, folder)
    messages: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_listen, args=(connection, messages.put), daemon=True).start()
    connection.send_bytes(pickle.dumps(Answer()))
    while True:
        job = pickle.loads(messages.get())
        if job is None:
            reset(environment, folder)
            answer = Answer()
        else:
            # A second guard, in C: ends a worker whose endless call holds the interpreter lock, its parent gone.
            faulthandler.dump_traceback_later(job.timeout + GROUP_LIMIT + 60, exit=True, file=stacks)
            answer = execute(job, lambda: connection.send_bytes(pickle.dumps(Answer())))
            faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(pickle.dumps(answer))


def _listen(connection: Connection, put: Callable[[bytes], None]) -> None:
    while True:
        try:
            put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
