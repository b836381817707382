"""The parity helper: runs a function on N real gloo processes, to hold its results against one process.

    def case(rank: int, world_size: int, lr: float) -> dict[str, torch.Tensor]: ...   # at the top of a test module

    def test_sharded_training_equals_one_process(ranks3, alone):
        (expected,) = alone.run(case, 0.1)
        for found in ranks3.run(case, 0.1):
            assert_same(found, expected, rtol=1e-5, atol=1e-6)

- Workers are forks of a process that has imported torch (see forks.py), shared by all sizes: `Ranks(2)` uses the first
  two of the pool's workers. Each run gets its own process group, so sizes and tests do not meet.
- A rank that raises, dies or hangs ends the run inside its time limit with every rank's traceback or present stack; the
  workers of that run are killed and made anew for the next one. Nothing outlives the parent.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import forks
from parity_worker import GROUP_LIMIT, Answer, RankCall

DEVICE = os.environ.get("TRUESHARD_TEST_DEVICE", "cpu")
"""`cuda`: each worker has the GPU of its rank, and groups have NCCL beside gloo"""
START_LIMIT = 120.0
"""seconds for a worker to import torch and answer"""
RESET_LIMIT = 20.0
"""seconds for a worker to clean up after the job before; a worker that needs more is replaced"""
GRACE = 3.0
"""seconds that the other ranks get to end, once one rank has failed"""

LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class RankFailure(RuntimeError):
    """A rank raised, died or hung. The message holds every rank's traceback or present stack, and what it printed."""


class Worker:
    """A process of its own session, its socket, and the files that it prints and dumps its stacks to."""

    def __init__(self, folder: Path, number: int) -> None:
        self.printed = folder / f"worker{number}.out"
        self.stacks = folder / f"worker{number}.stacks"
        ours, theirs = socket.socketpair()
        with theirs, self.printed.open("wb") as output:
            self.process = forks.Popen(
                [sys.executable, "-c", f"import parity_worker as w; w.serve({theirs.fileno()}, {str(self.stacks)!r})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(),
                start_new_session=True,  # Ctrl-C goes to the parent alone, and a kill reaches the worker's children too
            )
        self.connection: Connection = Connection(ours.detach())
        self.seen = 0

    def send(self, message: RankCall | None) -> None:
        with suppress(OSError):  # a dead worker is found by whoever waits for its answer
            self.connection.send_bytes(pickle.dumps(message))

    def output(self) -> str:
        """What the process printed since this was last asked."""
        with self.printed.open("rb") as file:
            file.seek(self.seen)
            text = file.read()
        self.seen += len(text)
        return text.decode(errors="replace")

    def dump(self) -> None:
        """Asks for every thread's stack; `stack` reads it."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)

    def stack(self, patience: float = 2.0) -> str:
        """The stacks dumped so far, once they have stopped growing."""
        deadline, before = time.monotonic() + patience, -1
        while time.monotonic() < deadline and not 0 < (size := self.stacks.stat().st_size) == before:
            before = size
            time.sleep(0.1)
        return self.stacks.read_text(errors="replace") or "no stack: the process does not answer signals\n"

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


class Pool:
    """The workers, made when first needed, and the store through which they meet."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="parity-"))
        self.workers: dict[int, Worker] = {}
        self.numbers = itertools.count()
        # Served here, on a port that the system chose: no race for a free port between choosing it and listening on it.
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        atexit.register(self.close)

    def ready(self, count: int) -> list[Worker]:
        """The first `count` workers, alive and clean."""
        for rank in range(count):
            if rank in self.workers:
                self.workers[rank].send(None)
        alive = collect([self.workers[rank] for rank in range(count) if rank in self.workers], RESET_LIMIT)
        for worker, answer in alive.items():
            if answer is None:
                self.drop([worker])
        missing = [rank for rank in range(count) if rank not in self.workers]
        self.workers.update({rank: Worker(self.folder, next(self.numbers)) for rank in missing})
        started = collect([self.workers[rank] for rank in missing], START_LIMIT)
        silent = [worker for worker, answer in started.items() if answer is None]
        if silent:
            printed = "".join(worker.output() for worker in silent)
            self.drop(list(started))
            raise RankFailure(f"{len(silent)} workers did not start within {START_LIMIT:.0f} s:\n{printed}")
        return [self.workers[rank] for rank in range(count)]

    def drop(self, workers: list[Worker]) -> None:
        self.workers = {rank: worker for rank, worker in self.workers.items() if worker not in workers}
        for worker in workers:
            worker.kill()

    def close(self) -> None:
        """Ends every worker, and the pool with them."""
        self.drop(list(self.workers.values()))
        shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.close)


class Ranks:
    """`count` processes that run one function together.

    `output` holds, for each rank, what it printed during the last run.
    """

    def __init__(self, count: int, pool: Pool | None = None) -> None:
        self.count = count
        self.pool = pool or Pool()
        self.output: list[str] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, group: bool = True) -> list[Any]:
        """Results of `function(rank, world_size, *args)` from every rank, tensors detached on the CPU, DTensors whole.

        `function` is a top-level function of an importable module. `timeout` is in seconds. With `group=False` no
        process group is made, as in a script that was started without a launcher.

        Raises RankFailure if any rank raises, dies, or takes longer than `timeout` once the ranks have met.
        """
        answers, reports = self._answers(function, args, timeout, group, patience=GRACE)
        if any(answer is None or answer.error for answer in answers):
            raise RankFailure(self._message(function, reports))
        return [pickle.loads(answer.value) for answer in answers if answer]

    def raises(
        self, function: Callable[..., Any], *args: Any, match: str = "", timeout: float = 60.0, group: bool = True
    ) -> list[str]:
        """`Type: message` of the exception that every rank raises, in which the pattern `match` is found.

        Raises RankFailure if any rank returns, dies, takes longer than `timeout`, or raises what does not match.
        """
        answers, reports = self._answers(function, args, timeout, group, patience=2 * GRACE)
        if not all(answer and answer.error and re.search(match, answer.error) for answer in answers):
            raise RankFailure(f"Every rank should raise {match!r}. " + self._message(function, reports))
        return [answer.error for answer in answers if answer]

    def _answers(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float, group: bool, patience: float
    ) -> tuple[list[Answer | None], list[str]]:
        """Each rank's answer (None: it died or hung), and a report of each. Workers of a broken run are killed."""
        call = _pickled(function, args)
        workers = self.pool.ready(self.count)
        name, port = f"job{next(self.pool.numbers)}", self.pool.store.port
        whole = False
        try:
            for rank, worker in enumerate(workers):
                worker.output()
                worker.send(RankCall(rank, self.count, port, name, timeout, group, call))
            met = collect(workers, GROUP_LIMIT, patience)
            if all(answer and not answer.error for answer in met.values()):
                met = collect(workers, timeout, patience)
            answers = list(met.values())
            reports = _reports(workers, answers, timeout)
            # Ranks that all raised are all back in their loop: the next job's reset is enough.
            whole = all(answer and not answer.error for answer in answers) or all(a and a.error for a in answers)
        finally:
            self.output = [worker.output() for worker in workers]
            if not whole:
                self.pool.drop(workers)
        return answers, reports

    def _message(self, function: Callable[..., Any], reports: list[str]) -> str:
        lines = [f"{function.__module__}.{function.__qualname__} on {self.count} ranks:"]
        for rank, (report, printed) in enumerate(zip(reports, self.output, strict=True)):
            lines.append(f"---- rank {rank} {report.rstrip()}")
            if printed.strip():
                lines += [f"---- rank {rank} printed", *printed.rstrip().splitlines()[-30:]]
        return "\n".join(lines)


def collect(workers: list[Worker], timeout: float, patience: float = math.inf) -> dict[Worker, Answer | None]:
    """Every worker's next answer, in order; None for one that died or did not answer in time.

    After the first failure the others get `patience` seconds: they may fail too, or wait for the failed rank for ever.
    """
    answers: dict[Worker, Answer | None] = dict.fromkeys(workers)
    waiting = {worker.connection: worker for worker in workers}
    deadline = time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        ready = [item for item in wait(list(waiting), min(left, 0.5)) if isinstance(item, Connection)]
        # The socket of a dead worker stays open while a child that it forked lives.
        dead = [item for item, worker in waiting.items() if item not in ready and worker.process.poll() is not None]
        for connection in ready + dead:
            worker, answer = waiting.pop(connection), None
            if connection in ready:
                with suppress(EOFError, OSError):
                    answer = answers[worker] = pickle.loads(connection.recv_bytes())
            if answer is None or answer.error:
                deadline = min(deadline, time.monotonic() + patience)
    return answers


def _reports(workers: list[Worker], answers: list[Answer | None], timeout: float) -> list[str]:
    """What became of each rank, in words: returned, raised with its traceback, died, or hung with its stacks."""
    for worker, answer in zip(workers, answers, strict=True):
        if answer is None:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(0.2)
            if worker.process.returncode is None:
                worker.dump()
    reports = []
    for worker, answer in zip(workers, answers, strict=True):
        code = worker.process.poll()
        if answer is not None:
            reports.append(f"raised\n{answer.trace}" if answer.error else "returned")
        elif code is None:
            reports.append(
                f"did not end (limit {timeout:g} s; less once a rank has failed); its stacks\n{worker.stack()}"
            )
        else:
            how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            reports.append(f"died with {how}\n{worker.stacks.read_text(errors='replace')}")
    return reports


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    if "<locals>" in function.__qualname__ or "<lambda>" in function.__qualname__:
        raise TypeError(
            f"{function.__qualname__} must be a function at the top of a module: workers import it from there"
        )
    return pickle.dumps((function, args))


def _environment() -> dict[str, str]:
    """The workers' environment: CPU, one thread, loopback, no hub, the parent's import path, no launcher."""
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    if DEVICE == "cpu":
        kept["CUDA_VISIBLE_DEVICES"] = ""
    return kept | {
        "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if entry),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def assert_same(found: Any, expected: Any, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Holds nested dicts, lists and tuples of tensors and plain values against each other.

    Tensors must agree in shape, dtype and, within `atol + rtol * |expected|`, in every element; numbers within the same
    bounds; all else must be equal. The AssertionError names each key that differs, and by how much.
    """
    differences = list(_differences("", found, expected, rtol, atol))
    if differences:
        more = f"\n… and {len(differences) - 10} more" if len(differences) > 10 else ""
        raise AssertionError("\n".join(differences[:10]) + more)


def _differences(key: str, found: Any, expected: Any, rtol: float, atol: float) -> Iterator[str]:
    where = key or "value"
    if isinstance(expected, torch.Tensor):
        if not isinstance(found, torch.Tensor):
            yield f"{where}: {type(found).__name__}, expected a tensor"
        elif (found.shape, found.dtype) != (expected.shape, expected.dtype):
            yield (f"{where}: {tuple(found.shape)} {found.dtype}, expected {tuple(expected.shape)} {expected.dtype}")
        elif not torch.allclose(found, expected, rtol=rtol, atol=atol, equal_nan=True):
            gap = (found.double() - expected.double()).abs()
            scale = expected.double().abs().max().item()
            far = int((~torch.isclose(found, expected, rtol=rtol, atol=atol, equal_nan=True)).sum())
            yield (
                f"{where}: {far} of {gap.numel()} elements differ, by up to {gap.max().item():.3g} "
                f"(largest expected {scale:.3g}, rtol {rtol:g}, atol {atol:g})"
            )
    elif isinstance(expected, Mapping) and isinstance(found, Mapping):
        if list(found) != list(expected):
            missing, extra = [k for k in expected if k not in found], [k for k in found if k not in expected]
            yield (
                f"{where}: keys missing {missing}, extra {extra}"
                if missing or extra
                else f"{where}: keys in another order"
            )
        for name in expected:
            if name in found:
                yield from _differences(f"{key}.{name}".lstrip("."), found[name], expected[name], rtol, atol)
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        if len(found) != len(expected):
            yield f"{where}: length {len(found)}, expected {len(expected)}"
        for index, (one, other) in enumerate(zip(found, expected, strict=False)):
            yield from _differences(f"{key}[{index}]", one, other, rtol, atol)
    elif isinstance(expected, float) and isinstance(found, int | float):
        if not abs(found - expected) <= atol + rtol * abs(expected) and not (found != found and expected != expected):
            yield f"{where}: {found!r}, expected {expected!r} (differs by {abs(found - expected):.3g})"
    elif found != expected:
        yield f"{where}: {found!r}, expected {expected!r}"
