"""Compile the emulated device for the torch at hand: `python -m emulated_cuda.build` prints the folder.

The folder's name has the version of torch and a hash of the sources, so that it is made anew when one of them changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from emulated_cuda import HERE

DEVICE = ("order", "memory", "pinned", "device", "tensors", "kernels", "copies", "python")
FLAGS = ("-O1", "-g0", "-std=c++20", "-fPIC", "-DAT_PER_OPERATOR_HEADERS", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO")


def compiler() -> str | None:
    """Return the C++ compiler; None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def folder() -> Path:
    """Return where the libraries for this torch and these sources are, or will be."""
    digest = hashlib.sha256(sys.version.encode())
    for file in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h"), Path(__file__)]):
        digest.update(file.read_bytes())
    name = f"{importlib.metadata.version('torch')}-{digest.hexdigest()[:12]}"
    return HERE.parents[1] / "build" / "emulated_cuda" / name


def build() -> Path:
    """Compile what is not there yet: twenty seconds on two cores. Processes that ask at once wait for the first.

    Raises RuntimeError if there is no compiler, or if it fails: with its messages.
    """
    made = folder()
    made.parent.mkdir(parents=True, exist_ok=True)
    with (made.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            for old in made.parent.glob(f"{importlib.metadata.version('torch')}-*"):
                shutil.rmtree(old)
            with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
                _compile(Path(scratch))
                shutil.copytree(scratch, made, ignore=shutil.ignore_patterns("*.o", "*.cpp"))
    return made


def _compile(out: Path) -> None:
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("the emulated CUDA device needs a C++ compiler: install g++, or set CXX")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    torch = spec.submodule_search_locations[0]
    include = [f"{torch}/include", f"{torch}/include/torch/csrc/api/include", sysconfig.get_path("include")]

    folders = [f"-I{folder}" for folder in include]

    def compiled(library: str, *names: str) -> str:
        # As one source: nearly all of the time goes to torch's headers, which each source would read again.
        source, result = out / f"{library}.cpp", out / f"{library}.o"
        source.write_text("".join(f'#include "{HERE / name}.cpp"\n' for name in names))
        _run(cxx, *FLAGS, *folders, "-c", str(source), "-o", str(result))
        return str(result)

    with ThreadPoolExecutor(2) as threads:
        nccl, device = threads.map(lambda names: compiled(*names), (("nccl", "nccl"), ("device", *DEVICE)))
    # Each finds the others beside it and in torch, which is loaded before.
    link = (cxx, "-shared", f"-L{torch}/lib", f"-L{out}", "-Wl,-rpath,$ORIGIN", f"-Wl,-rpath,{torch}/lib")
    _run(*link, device, "-ltorch_cpu", "-lc10", "-o", str(out / "libemulated_cuda.so"))
    libraries = ("-lemulated_cuda", "-ltorch_python", "-ltorch_cpu", "-lc10")
    _run(*link, nccl, *libraries, "-o", str(out / "emulated_nccl.so"))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    print(build())
