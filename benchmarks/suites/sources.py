"""Where the tests of a library come from: a folder that is given, or its repository at the tag that is installed."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import version
from pathlib import Path

from benchmarks.suites.selection import Suite

_VERSION = {
    "transformers": ("src/transformers/__init__.py", r'__version__ = "([^"]+)"'),
    "accelerate": ("src/accelerate/__init__.py", r'__version__ = "([^"]+)"'),
    "lightning": ("src/version.info", r"(\S+)"),
}
"""Library → the file of its sources that names their version, and where in it."""


def fetched(suite: Suite, folder: Path) -> str:
    """Return the version of a library's sources in ``folder``, which are cloned if they are not there.

    Raises:
        FileNotFoundError: they are not there, and cannot be cloned.
    """
    into = folder / suite.library
    if not into.exists():
        installed = version(suite.library)
        tag = installed if suite.library == "lightning" else f"v{installed}"
        address = f"https://github.com/{suite.repository}"
        command = ["git", "clone", "--quiet", "--depth", "1", "--branch", tag, address, str(into)]
        if subprocess.run(command, check=False).returncode:
            raise FileNotFoundError(
                f"{into} is not there, and {address} at {tag} cannot be cloned: put its sources there, or name the "
                "folder that holds them, PEERS_SOURCES=…"
            )
    file, pattern = _VERSION[suite.library]
    named = re.search(pattern, (into / file).read_text(encoding="utf-8")) if (into / file).exists() else None
    return named[1] if named else "unknown"
