"""`trueshard doctor`: look at this machine, print each finding as it is made, and conclude whether training works.

What TrueShard needs is read from the metadata that pip wrote when it installed TrueShard, so that what is said here is
what `pip install` would do.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import resource
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from rich.console import Console
from rich.text import Text

import trueshard
from trueshard.doctor import processes
from trueshard.doctor.processes import Finding, Level, answer, judged, last_line
from trueshard.launching import python_command
from trueshard.machine import TESTED_TORCH, cpu_cores, cpu_quota, memory_bytes
from trueshard.text import size

STYLES = {"ok": "green", "note": "blue", "warning": "yellow", "problem": "bold red"}
DEVELOPMENT = ("bench", "docs", "test")  # extras that nobody needs for training
SMI_LIMIT = 30  # seconds that nvidia-smi may take; with a broken driver it hangs
LINKS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge",
    "NODE": "PCIe within a NUMA node",
    "SYS": "PCIe across CPU sockets",
}
"""Names of nvidia-smi for links other than NVLink, from the fastest to the slowest."""
SHARED = Path("/dev/shm")
SHARED_ENOUGH = 2**30
"""Bytes of shared memory below which NCCL's buffers and data loaders with processes run out; Docker gives 64 MiB."""
FILES_ENOUGH = 1024
"""Open files that a process may need: connections to other ranks, shards of data, parts of a checkpoint."""
TEMPORARY_ENOUGH = 2**30
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


@dataclass(frozen=True)
class Report:
    """All findings, by section in the order in which they were made."""

    sections: dict[str, list[Finding]]

    def count(self, level: Level) -> int:
        return sum(finding.level == level for findings in self.sections.values() for finding in findings)

    def as_json(self) -> dict[str, Any]:
        """Return plain data: `problems`, `warnings`, and the findings of each section."""
        return {"problems": self.count("problem"), "warnings": self.count("warning"), **asdict(self)}

    def conclusion(self) -> tuple[Level, str]:
        """Return (level, sentence): whether training works here."""
        problems, warnings = self.count("problem"), self.count("warning")
        if problems:
            return "problem", f"Training does not work here: {problems} problem{'s' if problems > 1 else ''}."
        if warnings:
            return "warning", f"Training works; {warnings} warning{'s' if warnings > 1 else ''}."
        return "ok", "Training works."


def report(nproc: int | None, limit: float, aloud: bool) -> Report:
    """Look at everything; `aloud`, print each finding as one unbroken line, under the title of its section.

    `nproc` and `limit` (seconds of a trial) as in `processes`.
    """
    output, failed = answer(python_command(f"from {processes.__name__} import print_torch; print_torch()"), limit)
    torch: dict[str, Any] | str = failed or json.loads(last_line(output))
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": lambda: versions(torch),
        "devices": lambda: devices(torch),
        "host": host,
        "environment": lambda: environment(os.environ),
        "extras": by_extra,
        "processes": lambda: processes.processes(torch, nproc, limit),
    }
    console, result = Console(highlight=False, soft_wrap=True, quiet=not aloud), Report({})
    for title, check in checks.items():
        section = result.sections.setdefault(title, [])
        for finding in _findings(title, check):
            if not section:
                console.print(Text(f"\n{title}" if len(result.sections) > 1 else title, style="bold"))
            section.append(finding)
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            mark = Text(f"  {finding.level:<8} ", style=STYLES[finding.level])
            console.print(mark + Text(f"{finding.name:<24} {finding.says}{remedy}", style=""))
    level, sentence = result.conclusion()
    console.print(Text(f"\n{sentence}", style=STYLES[level]))
    return result


def _findings(title: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:  # the rest is still told
        says = f"could not be examined: {type(error).__name__}: {error}"
        yield Finding(title, says, "problem", "report this line")


# Versions and extras


@dataclass(frozen=True)
class Need:
    name: str
    wants: str  # versions, such as ">=2.11"; empty for any
    installed: str | None
    fits: bool

    def __str__(self) -> str:
        """Return "torch 2.13.0", "peft 0.9 (wants >=0.17)" or "peft (missing)"."""
        wants = "" if self.fits or self.installed is None else f" (wants {self.wants})"
        return f"{self.name} {self.installed or '(missing)'}{wants}"


def needs(extra: str = "") -> list[Need]:
    """Return what TrueShard itself asks for (`extra=""`), or what an extra and those that it names ask for beyond that.

    Raises `PackageNotFoundError` if TrueShard was not installed, but is found as a folder.
    """
    result: dict[str, Need] = {}
    for requirement in map(Requirement, metadata.requires("trueshard") or []):
        name, marker = requirement.name, requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        if always is bool(extra) or not (marker is None or marker.evaluate({"extra": extra})):
            continue
        if canonicalize_name(name) == "trueshard":
            result |= {need.name: need for other in requirement.extras for need in needs(other)}
            continue
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed = None
        fits = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        result[name] = Need(name, str(requirement.specifier), installed, fits)
    return list(result.values())


def versions(torch: dict[str, Any] | str) -> Iterator[Finding]:
    """Yield the system, Python, torch, TrueShard and its packages; `torch` as `processes.processes` takes it."""
    yield Finding("system", platform.platform())
    yield _torch(torch)
    again = "pip install -e . in its folder"
    try:
        installed = metadata.metadata("trueshard")
    except metadata.PackageNotFoundError:
        says = f"{trueshard.__version__} in {Path(trueshard.__file__).parent} is not installed"
        yield Finding("trueshard", says, "warning", f"pip install trueshard, or {again}")
        return
    is_current = installed["Version"] == trueshard.__version__
    says = trueshard.__version__ + ("" if is_current else f", but installed as {installed['Version']}")
    yield judged("trueshard", says, not is_current, f"install it again: {again}")
    python, wants = platform.python_version(), installed["Requires-Python"]
    fits = SpecifierSet(wants).contains(python, prereleases=True)
    says = python if fits else f"{python}, wants {wants}"
    yield judged("python", says, not fits, f"make an environment with Python {wants}", "problem")
    for need in needs():
        if need.name != "torch":
            wants = "" if need.fits else f", wants {need.wants or 'any version'}"
            remedy = f"pip install '{need.name}{need.wants}'"
            yield judged(need.name, f"{need.installed or 'missing'}{wants}", not need.fits, remedy, "problem")


def _torch(torch: dict[str, Any] | str) -> Finding:
    """Compare the version of torch with those that TrueShard is tested on."""
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
    for extra in metadata.metadata("trueshard").get_all("Provides-Extra") or []:
        wanted, install = needs(extra), f"pip install 'trueshard[{extra}]'"
        absent = [need.name for need in wanted if need.installed is None]
        wrong = [str(need) for need in wanted if need.installed is not None and not need.fits]
        if absent and not wrong:
            use = "for development; " if extra in DEVELOPMENT else ""
            yield Finding(extra, f"missing: {', '.join(absent)}", "note", f"{use}{install}")
        elif wanted:
            yield judged(extra, ", ".join(wrong or map(str, wanted)), bool(wrong), install)


# Devices


def devices(torch: dict[str, Any] | str) -> Iterator[Finding]:
    """Yield cores, memory, GPUs and their links; `torch` as `processes.processes` takes it."""
    cores, quota = cpu_cores(), cpu_quota() or math.inf
    says = f"{cores} {'core' if cores == 1 else 'cores'}" + (f", time of {quota:g} of them" if quota < cores else "")
    remedy = f"start at most {max(1, int(min(quota, cores)))} processes on it"
    yield judged("cpu", says, quota < cores, remedy, "note")
    yield Finding("memory", size(memory_bytes()))
    has_driver = False
    if shutil.which("nvidia-smi"):
        output, failed = answer(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], SMI_LIMIT)
        has_driver = not failed
        remedy = "run nvidia-smi by hand; the driver may have to be reloaded"
        yield judged("nvidia driver", failed or ", ".join(sorted(set(output.split()))), bool(failed), remedy)
    if isinstance(torch, str):
        return
    for number, gpu in enumerate(torch["gpus"]):
        slow = "" if gpu["bf16"] else ", computes bfloat16 slowly (use float16)"
        yield Finding(f"gpu {number}", f"{gpu['name']}, {size(gpu['memory'])}{slow}")
    yield from (Finding("torch says", " ".join(line.split()), "warning") for line in torch["warnings"])
    if not torch["gpus"]:
        yield _without_gpu(torch, has_driver)
    elif len(torch["gpus"]) > 1 and shutil.which("nvidia-smi"):
        output, failed = answer(["nvidia-smi", "topo", "-m"], SMI_LIMIT)
        if counts := {} if failed else links(output):
            says = ", ".join(f"{count} by {kind}" for kind, count in counts.items())
            yield Finding("links", f"of {sum(counts.values())} pairs of GPUs, {says}")
        else:
            yield Finding("links", f"nvidia-smi topo -m: {failed or 'no pair of GPUs'}", "note")


def _without_gpu(torch: dict[str, Any], has_driver: bool) -> Finding:
    if has_driver and torch["cuda"] is None:
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


# Host and environment


def host() -> Iterator[Finding]:
    """Yield shared memory, open files, the compiler and temporary space."""
    if SHARED.is_dir():
        total = shutil.disk_usage(SHARED).total
        remedy = "start the container with --shm-size=16g or --ipc=host"
        yield judged(str(SHARED), size(total), total < SHARED_ENOUGH, remedy)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
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
        value = variables[name] if home in ("", "/") else variables[name].replace(home, "~")
        if SECRET.search(name):
            value = "(set)"
        if name in SLOW and value not in ("", "0"):
            yield Finding(name, f"{value}: {SLOW[name]}", "warning", f"unset {name}")
        else:
            yield Finding(name, value or "(empty)", "note")
    if "RANK" in variables and "MASTER_ADDR" not in variables:
        yield Finding("RANK", "is set without MASTER_ADDR", "problem", "unset RANK, or start with torchrun")
