"""Versions, against those that the installed distribution asks for, and what is missing for which extra."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

import trueshard
from trueshard.doctor.finding import Finding
from trueshard.doctor.needs import OURS, Need, extras, needs

TORCH = "2.11", "2.13"
"""The oldest and the newest release of torch on which TrueShard is tested."""
DEVELOPMENT = ("bench", "docs", "test")
"""Extras that nobody needs for training."""


def versions(torch: dict[str, Any] | str) -> Iterator[Finding]:
    """Python, torch, TrueShard and what it stands on.

    Args:
        torch: what `torch_facts` found, or why it found nothing.
    """
    yield Finding("system", platform.platform())
    yield _torch(torch)
    try:
        installed = metadata.metadata(OURS)
    except metadata.PackageNotFoundError:
        says = f"{trueshard.__version__} in {Path(trueshard.__file__).parent} is not installed"
        yield Finding(OURS, says, "warning", "pip install trueshard, or pip install -e . in its folder")
        return
    yield _ours(installed["Version"])
    yield _python(installed["Requires-Python"])
    for need in needs():
        if need.name != "torch":
            remedy = "" if need.fits else f"pip install '{need.name}{need.wants}'"
            yield Finding(need.name, _version(need), "ok" if need.fits else "problem", remedy)


def by_extra() -> Iterator[Finding]:
    """For each extra, whether all of it is there."""
    for extra in extras():
        found = needs(extra)
        install = f"pip install '{OURS}[{extra}]'"
        absent = [need for need in found if need.found is None]
        wrong = [need for need in found if need.found is not None and not need.fits]
        if not found:
            continue
        if wrong:
            yield Finding(extra, ", ".join(map(str, wrong)), "warning", install)
        elif absent:
            use = "for development; " if extra in DEVELOPMENT else ""
            yield Finding(extra, f"missing: {', '.join(need.name for need in absent)}", "note", f"{use}{install}")
        else:
            yield Finding(extra, ", ".join(map(str, found)))


def _version(need: Need) -> str:
    if need.found is None:
        return f"missing, wants {need.wants or 'any version'}"
    return need.found if need.fits else f"{need.found}, wants {need.wants}"


def _ours(installed: str) -> Finding:
    if installed != trueshard.__version__:
        says = f"{trueshard.__version__}, but installed as {installed}"
        return Finding(OURS, says, "warning", "install it again: pip install -e . in its folder")
    return Finding(OURS, trueshard.__version__)


def _python(wants: str) -> Finding:
    version = platform.python_version()
    if SpecifierSet(wants).contains(version, prereleases=True):
        return Finding("python", version)
    return Finding("python", f"{version}, wants {wants}", "problem", f"make an environment with Python {wants}")


def _torch(torch: dict[str, Any] | str) -> Finding:
    """The version of torch beside those that TrueShard is tested on."""
    oldest, newest = TORCH
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
