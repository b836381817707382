"""Try whether processes on this machine reach each other and train together: real ones, with a time limit.

- A broken driver can hang a process that only counts GPUs, and a torch that does not fit its libraries can end it: what
  asks torch is a process of its own.
- gloo is tried with processes that see no GPU, NCCL with one for each GPU. Each rank writes a line of JSON when a task
  is done, so that it is known where one hangs, and compares each result with what it must be.
- Ranks meet in a file: what may fail here is the backend's own network, not a port that somebody else has.
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trueshard.errors import with_kind
from trueshard.launching import how, last_lines, python_command, run_ranks
from trueshard.machine import cpu_cores
from trueshard.text import size

Level = Literal["ok", "note", "warning", "problem"]
"""`ok`: good. `note`: good to know. `warning`: slower, or fails in some uses. `problem`: stops training."""
TASKS = ("start", "join", "all-gather", "reduce-scatter", "shard() and a step", "leave")
ELEMENTS = {"gloo": 2**20, "nccl": 2**24}  # elements of float32 that each rank gives to a collective
REPEATS = 5
TOLERANCE = 1e-4
"""Largest difference of a parameter after a sharded and an unsharded step: the order of sums, and no more."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    name: str
    says: str
    level: Level = "ok"
    remedy: str = ""  # empty where there is nothing to do


def judged(name: str, says: str, wrong: bool, remedy: str, level: Level = "warning") -> Finding:
    """Return a finding of `level` with a remedy if something is wrong, else one that is good."""
    return Finding(name, says, level, remedy) if wrong else Finding(name, says)


def answer(command: list[str], limit: float) -> tuple[str, str]:
    """Return (output of a process, why it has none), one of them empty; it is ended after `limit` seconds."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit
        )
    except subprocess.TimeoutExpired:
        return "", f"gave no answer in {limit:.0f} seconds"
    except OSError as error:
        return "", str(error.strerror)
    if done.returncode:
        return "", last_line(done.stderr) or f"ended with code {done.returncode}"
    return done.stdout, ""


def last_line(text: str) -> str:
    """Return the last line that is not blank, which of a traceback is the error itself."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def processes(torch: dict[str, Any] | str, nproc: int | None, limit: float) -> Iterator[Finding]:
    """Try gloo, and NCCL where there are GPUs, for at most `limit` seconds each.

    `torch` is as `print_torch` tells, or why torch cannot be imported. nproc=None: two processes, and one for each GPU.
    """
    yield from _names()
    if isinstance(torch, str):
        yield Finding("processes", "not tried, since torch cannot be imported", "note")
        return
    gpus = len(torch["gpus"])
    for backend, ranks in (("gloo", nproc or min(2, cpu_cores())), ("nccl", min(gpus, nproc or gpus))):
        if ranks and torch[backend]:
            yield from try_backend(backend, ranks, limit)
        elif ranks:
            yield Finding(backend, "not in this build of torch", "problem", f"install a build of torch with {backend}")


def _names() -> Iterator[Finding]:
    """Look up the names by which processes meet: `localhost` of a launcher's ranks, and the host's own, gloo's."""
    try:
        with socket.create_server(("localhost", 0)) as server:
            socket.create_connection(server.getsockname()[:2], timeout=5).close()
        yield Finding("localhost", "can be reached")
    except OSError as error:
        remedy = "add 127.0.0.1 localhost to /etc/hosts, and let processes connect to it"
        yield Finding("localhost", f"cannot be reached: {error.strerror or error}", "problem", remedy)
    try:
        address = socket.gethostbyname(socket.gethostname())
        says, is_local = f"means {address}", address.startswith("127.")
        says += ", which other machines cannot reach" if is_local else ""
    except OSError:
        says, is_local = "has no address; gloo takes the loopback interface", True
    yield judged("host name", says, is_local, "set GLOO_SOCKET_IFNAME before training over several machines", "note")


def try_backend(backend: str, ranks: int, limit: float) -> Iterator[Finding]:
    """Start `ranks` processes and yield a finding for each task of a backend, up to the first that fails."""
    with tempfile.TemporaryDirectory(prefix="trueshard-doctor-") as name:
        logs = Path(name) / "logs"
        command = python_command(
            f"from {__name__} import be_rank; be_rank(*sys.argv[1:])", name, backend, str(limit / 2)
        )
        environment = {"OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {})
        ended = run_ranks(command, ranks, environment=environment, logs=logs, limit=limit)
        ended.raise_for_signal()
        done = [_lines(Path(name) / f"{rank}.jsonl") for rank in range(ranks)]
        ends = {}
        for rank, code in ended.codes.items():
            message = last_line(last_lines(logs, rank))
            ends[rank] = f"rank {rank} {how(code)}" + (f": {message}" if message else "")
    yield Finding(backend, f"{ranks} {'process' if ranks == 1 else 'processes'}")
    for task in TASKS:
        if any(task not in lines for lines in done):
            task, why = _failure(task, done, ends, limit)
            yield Finding(f"{backend} {task}", why, "problem", _remedy(backend, task))
            return
        finished = [lines[task] for lines in done]
        if wrong := [f"rank {rank}: {line['wrong']}" for rank, line in enumerate(finished) if line["wrong"]]:
            remedy = "the network or a device corrupts data; try another"
            yield Finding(f"{backend} {task}", "; ".join(wrong), "problem", remedy)
            return
        if task != "leave":
            yield Finding(f"{backend} {task}", _figure(task, finished))


def _lines(file: Path) -> dict[str, Line]:
    """Return the line of each task that a rank has done, in their order; a half-written one is left out."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return {line["task"]: line for line in (json.loads(line) for line in text.splitlines() if line.endswith("}"))}


def _failure(task: str, done: list[dict[str, Line]], ends: Mapping[int, str], limit: float) -> tuple[str, str]:
    """Return what failed of a task that ranks did not do, and why: the first error, how one ended, or that none did."""
    for rank, lines in enumerate(done):
        if "error" in lines:  # it ended the others, which may not have come as far
            return TASKS[len(lines) - 1], f"rank {rank}: {lines['error']['wrong']}"
    missing = [rank for rank, lines in enumerate(done) if task not in lines]
    late = (
        f"{'ranks' if len(missing) > 1 else 'rank'} {', '.join(map(str, missing))} not done within {limit:.0f} seconds"
    )
    return task, next((ends[rank] for rank in missing if rank in ends), late)


def _remedy(backend: str, task: str) -> str:
    if task == "start":
        return "import trueshard by hand; if that is only slow, give more time with --timeout"
    if task not in ("join", "all-gather", "reduce-scatter"):
        return "look for the cause above; if there is none, this is a defect of TrueShard: report it with this output"
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    if backend == "gloo":
        return f"set {variable} to a network interface that works: {interfaces} (lo is enough on one machine)"
    names = f"{variable} (of {interfaces})"
    return f"run again with NCCL_DEBUG=WARN; then {names}, or NCCL_P2P_DISABLE=1 to find a broken link"


def _figure(task: str, lines: list[Line]) -> str:
    """Return the time of the slowest rank, its rate, and that the result is right, where there is one."""
    if "each" not in lines[0]:
        taken = f"{max(line['seconds'] for line in lines):.1f} s"
        return taken if task in ("start", "join") else f"right, {taken}"
    seconds, received = max(line["each"] for line in lines), lines[0]["received"]
    rate = f", {received / seconds / 1e9:.1f} GB/s" if received else ""
    return f"right, {size(received)} received in {1e3 * seconds:.1f} ms{rate}"


# In a process of its own


def print_torch() -> None:
    """Print as a line of JSON torch's versions, backends, devices (memory in bytes) and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch
        import torch.distributed as dist

        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        gpus = [{"name": gpu.name, "memory": gpu.total_memory, "bf16": gpu.major >= 8} for gpu in properties]
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        nccl = dist.is_available() and dist.is_nccl_available()
        facts = {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl and gpus else None,
            "accelerator": None if device is None else device.type,
            "gpus": gpus,
            "warnings": [str(one.message) for one in caught if issubclass(one.category, (UserWarning, RuntimeWarning))],
        }
        print(json.dumps(facts))


def be_rank(folder: str, backend: str, patience: str) -> None:
    """Do all tasks, and write a line for each to `folder/RANK.jsonl`; a collective may take `patience` seconds."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    began = time.perf_counter()

    def done(task: str, wrong: str = "", **more: Any) -> None:
        nonlocal began
        line = {"task": task, "seconds": time.perf_counter() - began, "wrong": wrong, **more}
        with (Path(folder) / f"{rank}.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
        began = time.perf_counter()

    try:
        _tasks(Path(folder), backend, rank, ranks, float(patience), done)
    except Exception as error:  # whatever it is, it belongs into the report
        done("error", with_kind(error, 400))
        sys.stdout.flush()
        os._exit(1)  # another rank may wait in a collective, which would keep this one from leaving


def _tasks(folder: Path, backend: str, rank: int, ranks: int, patience: float, done: Callable[..., None]) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils.benchmark import Timer

    import trueshard.api  # noqa: F401 (its time counts as that of the start)

    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    done("start")
    store = dist.FileStore(str(folder / "meeting"), ranks)
    limit = datetime.timedelta(seconds=patience)
    # As in training: what rests on the CPU goes by gloo beside NCCL.
    backends = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    dist.init_process_group(backends, store=store, rank=rank, world_size=ranks, timeout=limit)
    dist.all_reduce(torch.ones(1, device=device))
    done("join")
    counting = torch.arange(ELEMENTS[backend], dtype=torch.float32, device=device) % 1000  # (elements,)
    parts = [counting + other for other in range(ranks)]
    full, local = torch.zeros(ranks * len(counting), device=device), torch.zeros_like(counting)
    rows = torch.cat(parts) + rank  # (ranks * elements,)
    for task, collective, result, expected in (
        ("all-gather", lambda: dist.all_gather_into_tensor(full, parts[rank]), full, torch.cat(parts)),
        (
            "reduce-scatter",
            lambda: dist.reduce_scatter_tensor(local, rows),
            local,
            ranks * parts[rank] + sum(range(ranks)),
        ),
    ):
        seconds = Timer("collective()", globals={"collective": collective}).timeit(REPEATS).mean  # after a warm-up
        wrong = "" if torch.equal(result, expected) else "the result is wrong"
        done(task, wrong, received=(ranks - 1) * local.nbytes, each=seconds)
    done("shard() and a step", _step(rank, ranks, device))
    dist.destroy_process_group()
    done("leave")


def _step(rank: int, ranks: int, device: Any) -> str:
    """Compare a sharded step with one process's on the batch of all ranks; return what is wrong, empty if nothing."""
    import torch
    from torch import nn

    import trueshard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24)).to(device)
    plain, batch = copy.deepcopy(model), torch.randn(4 * ranks, 24, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trueshard.shard(model, optimizer, units=["0", "2"])
    samples = batch[4 * rank : 4 * (rank + 1)]
    model(samples).square().mean().backward()
    optimizer.step()
    plain(batch).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    sharded: list[Any] = list(model.parameters())
    pairs = zip(sharded, plain.parameters(), strict=True)
    difference = max((one.full_tensor() - two).abs().max().item() for one, two in pairs)
    return "" if difference <= TOLERANCE else f"parameters are off by {difference:.2g} after the step"
