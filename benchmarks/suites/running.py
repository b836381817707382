"""Run a suite with one system: its processes, started again after a test that hung or took a process with it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.suites.plugin import GIVES_UP, LIMIT
from benchmarks.suites.selection import Suite

ROOT = Path(__file__).resolve().parent.parent.parent
STARTS = 12
"""How often processes are started; what is left then counts as failed."""
Results = dict[str, dict[str, Any]]


def run(suite: Suite, system: str, sources: Path, folder: Path, chosen: list[str] | None = None) -> Results:
    """Return what came of each test, by name: ``outcome``, ``message``, ``seconds``, and a failure's ``trace``.

    Args:
        suite: which tests.
        system: one of ``SYSTEMS``.
        sources: folder with a folder of each library's sources.
        folder: for what the processes write; made anew.
        chosen: names of tests; all of the suite's when left out.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if chosen is not None:
        (folder / "chosen.txt").write_text("\n".join(chosen), encoding="utf-8")
    ranks = 1 if system == "one" else 2
    behind: list[str] = []
    for _ in range(STARTS):
        if _start(suite, system, ranks, sources, folder):
            break
        before, behind = behind, _begun(folder)
        if behind == before:  # it is not a test that ends them
            raise RuntimeError(f"{suite.library}: pytest ends before the first test; see {folder / '0.log'}")
        (folder / "behind.txt").write_text("\n".join(behind), encoding="utf-8")
    shutil.rmtree(folder / "shared", ignore_errors=True)
    return _joined(folder, ranks, chosen)


def _start(suite: Suite, system: str, ranks: int, sources: Path, folder: Path) -> bool:
    """Run what is left. False if a process ended before its last test."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [*suite.files, *(["-k", suite.skipped] if suite.skipped else [])]
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.suites.plugin", "-p", "no:cacheprovider"]
    command += ["-p", "no:randomly", "-p", "no:timeout", "-q", "--continue-on-collection-errors"]
    command += ["-o", "addopts=", "-W", "ignore", *words]
    processes = []
    for rank in range(ranks):
        environment = _environment(suite, system, rank, ranks, folder)
        environment |= {"SUITES_PORT": str(store.port), "MASTER_PORT": str(port)}
        with (folder / f"{rank}.log").open("a") as log:
            process = subprocess.Popen(
                command,
                cwd=sources / suite.library / suite.root,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        processes.append(process)
    _wait(processes)
    return all(any("finished" in line for line in _lines(folder, rank)) for rank in range(ranks))


def _environment(suite: Suite, system: str, rank: int, ranks: int, folder: Path) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "FSDP_"))}
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    home = folder.parent / "home"
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "SUITE": suite.library,
        "SYSTEM": system,
        "RESULTS": str(folder),
        "SHARED": str(folder / "shared"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    if (folder / "chosen.txt").exists():
        environment["CHOSEN"] = str(folder / "chosen.txt")
    if ranks > 1:
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "suites"}
    return environment


def _wait(processes: list[Any]) -> None:
    """Wait for all. A process that outlives another by as much as a test may take is killed."""
    since = 0.0
    while any(process.poll() is None for process in processes):
        if any(process.poll() is not None for process in processes):
            since = since or time.monotonic()
            if time.monotonic() - since > GIVES_UP.total_seconds() + 10:
                for process in processes:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.2)


def _lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    file = folder / f"{rank}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def _begun(folder: Path) -> list[str]:
    """Tests that any rank began, as far as the slowest came: the others may have been one ahead."""
    begun = [[line["begin"] for line in _lines(folder, rank) if "begin" in line] for rank in range(2)]
    names = [names for names in begun if names]
    return list(dict.fromkeys(min(names, key=lambda name: len(set(name))))) if names else []


def _joined(folder: Path, ranks: int, chosen: list[str] | None) -> Results:
    """A test's worst outcome over ranks."""
    worst = ("passed", "skipped", "failed")
    results: Results = {}
    ended: dict[str, set[int]] = {}
    for rank in range(ranks):
        for line in _lines(folder, rank):
            if "begin" in line:
                results.setdefault(line["begin"], {"outcome": "passed", "message": "", "seconds": 0.0})
                ended.setdefault(line["begin"], set())
            elif "outcome" in line:
                ended[line["test"]].add(rank)
                result = results[line["test"]]
                result["seconds"] = max(result["seconds"], line["seconds"])
                is_worse = worst.index(line["outcome"]) > worst.index(result["outcome"])
                # What a rank says that lost its peer is of no interest if the peer says why.
                lost = "Connection closed" in result["message"] or "Timed out" in result["message"]
                if is_worse or (line["outcome"] == result["outcome"] == "failed" and lost):
                    result |= {key: line[key] for key in ("outcome", "message", "trace") if key in line}
    for name, by in ended.items():
        if len(by) < ranks:
            results[name] |= {"outcome": "failed", "message": results[name]["message"] or f"ran {LIMIT:g} s or died"}
    for name in chosen or ():
        results.setdefault(name, {"outcome": "failed", "message": "not reached", "seconds": 0.0})
    return results
