"""Environments of packages that one test file needs: a virtual environment that adds them to what .venv has.

    python tests/added_environment.py ray        # makes build/ray; so does `make ray`

A variable, such as TRUESHARD_RAY, names another folder. Without an environment its tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RAY = "ray==2.60.0"
PACKAGES: dict[str, list[tuple[str, ...]]] = {
    "ray": [(RAY.replace("ray", "ray[train]", 1),)],
    # Without what its tests here never import; the releases of the rest are those that it asks for.
    "verl": [
        ("--no-deps", "verl==0.9.1", "codetiming==1.4.0"),
        (RAY, "tensordict==0.10.0", "transformers==5.10.4", "omegaconf==2.3.0", "hydra-core==1.3.2"),
        ("pybind11==3.1.0", "pylatexenc==2.10", "dill"),
    ],
}
"""Name of an environment → what each call of pip installs."""


def folder(name: str) -> Path:
    return Path(os.environ.get(f"TRUESHARD_{name.upper()}") or ROOT / "build" / name).absolute()


def python_of(name: str) -> str:
    """Return the interpreter of an environment; skip the test if there is none."""
    place = folder(name)
    if not (place / "complete").exists():
        pytest.skip(f"no environment with {name}: `make {name}` makes {place}")
    return str(place / "bin" / "python")


def make(name: str) -> None:
    place = folder(name)
    if (place / "complete").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for words in PACKAGES[name]:
        pip = [place / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", *words]
        subprocess.run(pip, check=True)
    (place / "complete").touch()


if __name__ == "__main__":
    make(sys.argv[1])
