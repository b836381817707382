"""Whether processes on this machine reach each other and train together: real ones, with a time limit.

gloo is tried with processes that see no GPU, NCCL with one for each GPU. Whatever happens to them, they are ended when
the limit has passed, and what they did until then is told.
"""

from __future__ import annotations

import json
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trueshard.doctor import child, rank
from trueshard.doctor.finding import Finding
from trueshard.machine import cpu_cores
from trueshard.tables import size

Line = dict[str, Any]


def processes(torch: dict[str, Any] | str, nproc: int | None, limit: float) -> Iterator[Finding]:
    """Try gloo, and NCCL where there are GPUs.

    Args:
        torch: what `torch_facts` found, or why it found nothing.
        nproc: processes to start; None: two for gloo, one for each GPU for NCCL, which never has more.
        limit: seconds that the processes of a backend may take in all.
    """
    yield _localhost()
    yield _host_name()
    if isinstance(torch, str):
        yield Finding("processes", "not tried, since torch cannot be imported", "note")
        return
    if torch["gloo"]:
        yield from tried("gloo", nproc or min(2, cpu_cores()), limit)
    else:
        yield Finding("gloo", "not in this build of torch", "problem", "install a build of torch with gloo")
    gpus = len(torch["gpus"])
    if gpus and torch["nccl"]:
        yield from tried("nccl", min(gpus, nproc or gpus), limit)
    elif gpus:
        yield Finding("nccl", "not in this build of torch", "problem", "install a build of torch with NCCL")


def tried(backend: str, ranks: int, limit: float) -> Iterator[Finding]:
    """What `ranks` processes did with a backend; one finding a task, or the one that failed."""
    with tempfile.TemporaryDirectory(prefix="trueshard-doctor-") as name:
        folder = Path(name)
        codes, output = _run(folder, backend, ranks, limit)
        done = [_lines(folder / f"{each}.jsonl") for each in range(ranks)]
    yield Finding(backend, f"{ranks} {'process' if ranks == 1 else 'processes'}")
    for task in rank.TASKS:
        lines = [next((line for line in lines if line["task"] == task), None) for lines in done]
        missing = [each for each, line in enumerate(lines) if line is None]
        name = f"{backend} {task}"
        if missing:
            yield Finding(name, _why(done, codes, missing, output, limit), "problem", _remedy(backend, task))
            return
        finished = [line for line in lines if line is not None]
        if wrong := [f"rank {each}: {line['wrong']}" for each, line in enumerate(finished) if line["wrong"]]:
            yield Finding(name, "; ".join(wrong), "problem", "the network or a device corrupts data; try another")
            return
        if task != "leave":
            yield Finding(name, _figure(task, finished))


def _run(folder: Path, backend: str, ranks: int, limit: float) -> tuple[list[int | None], str]:
    """Start the ranks and wait for them: their exit codes (None: ended here), and the last line of their output."""
    environment = {"OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {})
    deadline = time.monotonic() + limit
    with (folder / "output").open("w", encoding="utf-8") as output:
        running = []
        try:
            for number in range(ranks):
                arguments = (str(folder), backend, str(number), str(ranks), str(limit / 2))
                running.append(child.started(child.command(rank.__name__, *arguments), output, environment))
            while time.monotonic() < deadline and any(each.poll() is None for each in running):
                time.sleep(0.05)
            codes = [each.poll() for each in running]
        finally:
            for each in running:
                each.kill()
                each.wait()
    return codes, child.last_line((folder / "output").read_text(encoding="utf-8", errors="replace"))


def _lines(file: Path) -> list[Line]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def _why(done: list[list[Line]], codes: list[int | None], missing: list[int], output: str, limit: float) -> str:
    """Why ranks did not do a task: what the first of them said, how it ended, or that it did not."""
    for each, lines in enumerate(done):
        if lines and lines[-1]["task"] == "error":
            return f"rank {each}: {lines[-1]['wrong']}"
    for each in missing:
        if codes[each] not in (None, 0):
            ended = f"rank {each} ended with code {codes[each]}"
            return f"{ended}: {output}" if output else ended
    names = ", ".join(map(str, missing))
    return f"{'ranks' if len(missing) > 1 else 'rank'} {names} not done within {limit:.0f} seconds"


def _remedy(backend: str, task: str) -> str:
    if task == "start":
        return "import trueshard by hand; if that is only slow, give more time with --timeout"
    if task not in ("join", "all-gather", "reduce-scatter"):
        return "look for the cause above; if there is none, this is a defect of TrueShard: report it with this output"
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    known = ", ".join(name for _, name in socket.if_nameindex())
    if backend == "gloo":
        return f"set {variable} to a network interface that works: {known} (lo is enough on one machine)"
    return f"run again with NCCL_DEBUG=WARN; then {variable} (of {known}), or NCCL_P2P_DISABLE=1 to find a broken link"


def _figure(task: str, lines: list[Line]) -> str:
    """How long the slowest rank took, and how fast that is; and that the result is right, where there is one."""
    if "each" not in lines[0]:
        taken = f"{max(line['seconds'] for line in lines):.1f} s"
        return taken if task in ("start", "join") else f"right, {taken}"
    seconds, received = max(line["each"] for line in lines), lines[0]["received"]
    rate = f", {received / seconds / 1e9:.1f} GB/s" if received else ""
    return f"right, {size(received)} received in {1e3 * seconds:.1f} ms{rate}"


def _localhost() -> Finding:
    """Whether `localhost`, where a launcher's ranks meet, can be listened on and reached."""
    try:
        with socket.create_server(("localhost", 0)) as server:
            socket.create_connection(server.getsockname()[:2], timeout=5).close()
    except OSError as error:
        remedy = "add 127.0.0.1 localhost to /etc/hosts, and let processes connect to it"
        return Finding("localhost", f"cannot be reached: {error.strerror or error}", "problem", remedy)
    return Finding("localhost", "can be reached")


def _host_name() -> Finding:
    """Which address gloo takes if it is told nothing: that of the host's own name."""
    name, more = socket.gethostname(), "set GLOO_SOCKET_IFNAME before training over several machines"
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return Finding("host name", "has no address; gloo takes the loopback interface", "note", more)
    if address.startswith("127."):
        return Finding("host name", f"means {address}, which other machines cannot reach", "note", more)
    return Finding("host name", f"means {address}")
