"""CPU and GPUs, and the links between them, as torch and nvidia-smi tell."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from trueshard.doctor.child import answer
from trueshard.doctor.finding import Finding
from trueshard.machine import cpu_cores, cpu_quota, memory_bytes
from trueshard.tables import size

LIMIT = 30
"""Seconds that nvidia-smi may take; with a broken driver it hangs."""
LINKS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge",
    "NODE": "PCIe within a NUMA node",
    "SYS": "PCIe across CPU sockets",
}
"""What nvidia-smi calls a link that is no NVLink, from the fastest to the slowest."""


def devices(torch: dict[str, Any] | str) -> Iterator[Finding]:
    """Cores, memory, GPUs and their links.

    Args:
        torch: what `torch_facts` found, or why it found nothing.
    """
    yield _cpu()
    yield Finding("memory", size(memory_bytes()))
    gpus = [] if isinstance(torch, str) else torch["gpus"]
    for number, gpu in enumerate(gpus):
        slow = "" if gpu["bf16"] else ", computes bfloat16 slowly (use float16)"
        yield Finding(f"gpu {number}", f"{gpu['name']}, {size(gpu['memory'])}{slow}")
    driver = _driver() if shutil.which("nvidia-smi") else None
    if driver is not None:
        yield driver
    if not isinstance(torch, str):
        yield from (Finding("torch says", " ".join(line.split()), "warning") for line in torch["said"])
        if not gpus:
            yield _without_gpu(torch, driver)
        elif len(gpus) > 1 and driver is not None:
            yield _links()


def _cpu() -> Finding:
    cores, quota = cpu_cores(), cpu_quota()
    if quota is not None and quota < cores:
        remedy = f"start at most {max(1, int(quota))} processes on the CPU"
        return Finding("cpu", f"{cores} cores, time of {quota:g} of them", "note", remedy)
    return Finding("cpu", f"{cores} {'core' if cores == 1 else 'cores'}")


def _driver() -> Finding:
    said, failed = answer(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], LIMIT)
    if failed:
        return Finding("nvidia driver", failed, "warning", "run nvidia-smi by hand; the driver may have to be reloaded")
    return Finding("nvidia driver", ", ".join(sorted(set(said.split()))))


def _without_gpu(torch: dict[str, Any], driver: Finding | None) -> Finding:
    """Why torch sees no GPU, where there might be one."""
    if driver is not None and driver.level == "ok" and torch["cuda"] is None:
        return Finding("gpu", "there is one, but this torch is built without CUDA", "warning", "install a CUDA build")
    if torch["cuda"] or torch["hip"]:
        remedy = "compare the driver with torch's CUDA version, and look at CUDA_VISIBLE_DEVICES"
        return Finding("gpu", "this torch is built for GPUs and sees none", "warning", remedy)
    if torch["accelerator"]:
        return Finding("accelerator", f"{torch['accelerator']}; not examined further", "note")
    return Finding("gpu", "none; training runs on the CPU", "note")


def _links() -> Finding:
    said, failed = answer(["nvidia-smi", "topo", "-m"], LIMIT)
    if failed:
        return Finding("links", f"nvidia-smi topo -m: {failed}", "note")
    found = links(said)
    if not found:
        return Finding("links", "nvidia-smi topo -m shows no pair of GPUs", "note")
    says = ", ".join(f"{count} by {kind}" for kind, count in found.items())
    return Finding("links", f"of {sum(found.values())} pairs of GPUs, {says}")


def links(topology: str) -> dict[str, int]:
    """How many pairs of GPUs are joined by what, from the fastest, out of what `nvidia-smi topo -m` prints."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    rows = [line.split() for line in plain.splitlines()]
    matrix = [row[1:] for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    pairs = [matrix[a][b] for a, b in combinations(range(len(matrix)), 2) if b < len(matrix[a])]
    order = {word: place for place, word in enumerate(LINKS)}
    found: dict[str, int] = {}
    for word in sorted(pairs, key=lambda word: order.get(word, -1)):
        name = f"NVLink ({word})" if word.startswith("NV") else LINKS.get(word, word)
        found[name] = found.get(name, 0) + 1
    return found
