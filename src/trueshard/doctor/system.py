"""Look at this machine: versions and extras, CPU and GPUs and their links, limits of the host, environment variables.

What TrueShard needs is read from the metadata that pip wrote when it installed TrueShard, so that what is said here is
what `pip install` would do.
"""

from __future__ import annotations

import math
import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import trueshard
from trueshard.machine import TESTED_TORCH, cpu_cores, cpu_quota, memory_bytes
from trueshard.text import size

Level = Literal["ok", "note", "warning", "problem"]
"""`ok`: good. `note`: good to know. `warning`: slower, or fails in some uses. `problem`: stops training."""


@dataclass(frozen=True)
class Finding:
    name: str
    says: str
    level: Level = "ok"
    remedy: str = ""
    """Remedy; empty where there is nothing to do."""


def judged(name: str, says: str, wrong: bool, remedy: str, level: Level = "warning") -> Finding:
    """Return a finding of `level` with a remedy if something is wrong, else one that is good."""
    return Finding(name, says, level, remedy) if wrong else Finding(name, says)


def answer(line: list[str], limit: float) -> tuple[str, str]:
    """Return (output of a process, why it has none), one of them empty; it is ended after `limit` seconds."""
    try:
        done = subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit, check=False
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


OURS = "trueshard"
DEVELOPMENT = ("bench", "docs", "test")
"""Extras that nobody needs for training."""


@dataclass(frozen=True)
class Need:
    name: str
    wants: str
    """Versions, such as ">=2.11"; empty for any."""
    found: str | None
    fits: bool

    def __str__(self) -> str:
        """Return "torch 2.13.0", "peft 0.9 (wants >=0.17)" or "peft (missing)"."""
        if self.found is None:
            return f"{self.name} (missing)"
        return f"{self.name} {self.found}" + ("" if self.fits else f" (wants {self.wants})")


def needs(extra: str = "") -> list[Need]:
    """Return what TrueShard itself asks for (`extra=""`), or what an extra and those that it names ask for beyond that.

    Raises `PackageNotFoundError` if TrueShard was not installed, but is found as a folder.
    """
    asked: dict[str, Need] = {}
    for requirement in map(Requirement, metadata.requires(OURS) or []):
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        if always is bool(extra) or not (marker is None or marker.evaluate({"extra": extra})):
            continue
        if canonicalize_name(requirement.name) == OURS:
            for other in requirement.extras:
                asked |= {need.name: need for need in needs(other)}
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            found = None
        fits = found is not None and requirement.specifier.contains(found, prereleases=True)
        asked[requirement.name] = Need(requirement.name, str(requirement.specifier), found, fits)
    return list(asked.values())


def versions(torch: dict[str, Any] | str) -> Iterator[Finding]:
    """Yield the system, Python, torch, TrueShard and its packages; `torch` as `processes` takes it."""
    yield Finding("system", platform.platform())
    yield _torch(torch)
    try:
        installed = metadata.metadata(OURS)
    except metadata.PackageNotFoundError:
        says = f"{trueshard.__version__} in {Path(trueshard.__file__).parent} is not installed"
        yield Finding(OURS, says, "warning", "pip install trueshard, or pip install -e . in its folder")
        return
    is_current = installed["Version"] == trueshard.__version__
    says = trueshard.__version__ + ("" if is_current else f", but installed as {installed['Version']}")
    yield judged(OURS, says, not is_current, "install it again: pip install -e . in its folder")
    python, wants = platform.python_version(), installed["Requires-Python"]
    fits = SpecifierSet(wants).contains(python, prereleases=True)
    says = python if fits else f"{python}, wants {wants}"
    yield judged("python", says, not fits, f"make an environment with Python {wants}", "problem")
    for need in needs():
        if need.name != "torch":
            says = str(need.found) if need.fits else f"{need.found or 'missing'}, wants {need.wants or 'any version'}"
            yield judged(need.name, says, not need.fits, f"pip install '{need.name}{need.wants}'", "problem")


def _torch(torch: dict[str, Any] | str) -> Finding:
    """Hold the version of torch against those that TrueShard is tested on."""
    oldest, newest = TESTED_TORCH
    if isinstance(torch, str):
        remedy = "run python -c 'import torch' to see why, and install the build for your driver"
        return Finding("torch", f"cannot be imported: {torch}", "problem", remedy)
    build = next((f"{kind} {torch[kind]}" for kind in ("cuda", "hip") if torch[kind]), "CPU build")
    says = f"{torch['version']}, {build}"
    release = Version(torch["version"]).release[:2]
    if release < Version(oldest).release:
        return Finding("torch", f"{says}, older than {oldest}", "problem", f"pip install 'torch>={oldest}'")
    if release > Version(newest).release:
        return Finding("torch", f"{says}, newer than what TrueShard is tested on ({oldest} to {newest})", "warning")
    return Finding("torch", says)


def by_extra() -> Iterator[Finding]:
    for extra in metadata.metadata(OURS).get_all("Provides-Extra") or []:
        found = needs(extra)
        install = f"pip install '{OURS}[{extra}]'"
        absent = [need.name for need in found if need.found is None]
        wrong = [need for need in found if need.found is not None and not need.fits]
        if wrong:
            yield Finding(extra, ", ".join(map(str, wrong)), "warning", install)
        elif absent:
            use = "for development; " if extra in DEVELOPMENT else ""
            yield Finding(extra, f"missing: {', '.join(absent)}", "note", f"{use}{install}")
        elif found:
            yield Finding(extra, ", ".join(map(str, found)))


LIMIT = 30
"""Seconds that nvidia-smi may take; with a broken driver it hangs."""
LINKS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge",
    "NODE": "PCIe within a NUMA node",
    "SYS": "PCIe across CPU sockets",
}
"""Names of nvidia-smi for links other than NVLink, from the fastest to the slowest."""


def devices(torch: dict[str, Any] | str) -> Iterator[Finding]:
    """Yield cores, memory, GPUs and their links; `torch` as `processes` takes it."""
    cores, quota = cpu_cores(), cpu_quota() or math.inf
    says = f"{cores} {'core' if cores == 1 else 'cores'}" + (f", time of {quota:g} of them" if quota < cores else "")
    remedy = f"start at most {max(1, int(min(quota, cores)))} processes on it"
    yield judged("cpu", says, quota < cores, remedy, "note")
    yield Finding("memory", size(memory_bytes()))
    driver = _driver() if shutil.which("nvidia-smi") else None
    yield from [driver] if driver else []
    if isinstance(torch, str):
        return
    for number, gpu in enumerate(torch["gpus"]):
        slow = "" if gpu["bf16"] else ", computes bfloat16 slowly (use float16)"
        yield Finding(f"gpu {number}", f"{gpu['name']}, {size(gpu['memory'])}{slow}")
    yield from (Finding("torch says", " ".join(line.split()), "warning") for line in torch["said"])
    if not torch["gpus"]:
        yield _without_gpu(torch, driver)
    elif len(torch["gpus"]) > 1 and driver is not None:
        said, failed = answer(["nvidia-smi", "topo", "-m"], LIMIT)
        if found := {} if failed else links(said):
            says = ", ".join(f"{count} by {kind}" for kind, count in found.items())
            yield Finding("links", f"of {sum(found.values())} pairs of GPUs, {says}")
        else:
            yield Finding("links", f"nvidia-smi topo -m: {failed or 'no pair of GPUs'}", "note")


def _driver() -> Finding:
    said, failed = answer(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], LIMIT)
    remedy = "run nvidia-smi by hand; the driver may have to be reloaded"
    return judged("nvidia driver", failed or ", ".join(sorted(set(said.split()))), bool(failed), remedy)


def _without_gpu(torch: dict[str, Any], driver: Finding | None) -> Finding:
    if driver is not None and driver.level == "ok" and torch["cuda"] is None:
        return Finding("gpu", "there is one, but this torch is built without CUDA", "warning", "install a CUDA build")
    if torch["cuda"] or torch["hip"]:
        remedy = "compare the driver with torch's CUDA version, and look at CUDA_VISIBLE_DEVICES"
        return Finding("gpu", "this torch is built for GPUs and sees none", "warning", remedy)
    if torch["accelerator"]:
        return Finding("accelerator", f"{torch['accelerator']}; not examined further", "note")
    return Finding("gpu", "none; training runs on the CPU", "note")


def links(topology: str) -> dict[str, int]:
    """Count pairs of GPUs by their link, from the fastest, in the output of `nvidia-smi topo -m`."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    rows = [line.split() for line in plain.splitlines()]
    matrix = [row[1:] for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    pairs = [matrix[a][b] for a, b in combinations(range(len(matrix)), 2) if b < len(matrix[a])]
    pairs.sort(key=lambda word: list(LINKS).index(word) if word in LINKS else -1)
    return dict(Counter(f"NVLink ({word})" if word.startswith("NV") else LINKS.get(word, word) for word in pairs))


GIB = 2**30
SHARED = Path("/dev/shm")
SHARED_ENOUGH = GIB
"""Bytes of shared memory below which NCCL's buffers and data loaders with processes run out; Docker gives 64 MiB."""
FILES_ENOUGH = 1024
"""Open files that a process may need: connections to other ranks, shards of data, parts of a checkpoint."""
TEMPORARY_ENOUGH = GIB
"""Bytes of temporary space that torch.compile and pip get by with."""
SHOWN = re.compile(
    r"(CUDA|NCCL|GLOO|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|HF|SLURM_(NNODES|NTASKS|JOB_NUM_NODES))(_|$).*"
    r"|(OMP|MKL|OPENBLAS)_NUM_THREADS|RANK|WORLD_SIZE|LOCAL_RANK|MASTER_(ADDR|PORT)|TOKENIZERS_PARALLELISM"
    r"|WANDB_MODE|CC|CXX|TMPDIR|LD_PRELOAD|PYTHONPATH|PYTHONOPTIMIZE"
)
"""Environment variables that change how training runs."""
SECRET = re.compile(r"TOKEN$|KEY|SECRET|PASSWORD")
SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "NCCL_P2P_DISABLE": "GPUs do not use NVLink or peer-to-peer PCIe",
    "NCCL_SHM_DISABLE": "GPUs that are not peers talk over the network",
    "NCCL_IB_DISABLE": "machines talk over TCP although there may be InfiniBand",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation goes to the driver",
}
"""Switches for debugging, and what they cost if they are left on."""


def host() -> Iterator[Finding]:
    """Yield shared memory, open files, the compiler and temporary space."""
    if SHARED.is_dir():
        total = shutil.disk_usage(SHARED).total
        remedy = "start the container with --shm-size=16g or --ipc=host"
        yield judged(str(SHARED), size(total), total < SHARED_ENOUGH, remedy)
    unlimited = resource.RLIM_INFINITY
    soft, hard = (math.inf if each == unlimited else each for each in resource.getrlimit(resource.RLIMIT_NOFILE))
    says = "no limit" if soft == math.inf else f"{soft:,} a process"
    yield judged("open files", says, soft < FILES_ENOUGH, f"ulimit -n {min(hard, 65536)}")
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]  # of torch.compile's CPU kernels
    compiler = next(filter(None, map(shutil.which, names)), None)
    lacking = "neither g++ nor clang++" if len(names) > 1 else f"CXX={names[0]} is not there"
    says = compiler or f"{lacking}; compile = true fails on the CPU"
    yield judged("compiler", says, compiler is None, "install g++", "note")
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    remedy = "free some, or set TMPDIR to another folder"
    yield judged("temporary files", f"{size(free)} free in {folder}", free < TEMPORARY_ENOUGH, remedy)


def environment(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Yield variables that change how training runs; secrets without their value, the home folder as `~`."""
    home = variables.get("HOME", "")
    for name in sorted(filter(SHOWN.fullmatch, variables)):
        value = variables[name]
        if home not in ("", "/"):
            value = value.replace(home, "~")
        if SECRET.search(name):
            value = "(set)"
        if name in SLOW and value not in ("", "0"):
            yield Finding(name, f"{value}: {SLOW[name]}", "warning", f"unset {name}")
        else:
            yield Finding(name, value or "(empty)", "note")
    if "RANK" in variables and "MASTER_ADDR" not in variables:
        yield Finding("RANK", "is set without MASTER_ADDR", "problem", "unset RANK, or start with torchrun")
