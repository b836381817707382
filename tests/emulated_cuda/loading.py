"""Load the emulated device beside torch. `site/sitecustomize.py` calls both functions, around the import of torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from typing import Any

from emulated_cuda import FOLDER

SIZES = ("total", "allocated", "peak", "reserved", "peak_reserved", "operations")


def load_libraries() -> ctypes.CDLL:
    """Load the device before torch, which asks once and early whether there is CUDA."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(os.path.join(spec.submodule_search_locations[0], "lib", name), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(os.path.join(os.environ[FOLDER], "libemulated_cuda.so"), mode=ctypes.RTLD_GLOBAL)
    for name in SIZES:
        getattr(library, f"emulated_{name}").restype = ctypes.c_size_t
    library.emulated_resize_storage.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.emulated_resize_storage.restype = ctypes.c_char_p
    library.emulated_spin.argtypes = [ctypes.c_int64]
    return library


def adopt(library: Any) -> None:
    """Give torch.cuda, NCCL and the attention kernels of CUDA to the torch that has just been imported."""
    from emulated_cuda import attention, cuda, nccl, profiling, reports

    cuda.adopt(library)
    attention.register()
    sys.path.insert(0, os.environ[FOLDER])
    nccl.adopt()
    sys.path.remove(os.environ[FOLDER])
    profiling.adopt()
    reports.receive_from(library)
