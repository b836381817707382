"""Give torch.cuda of a CPU build its functions, over the emulated device."""

from __future__ import annotations

import os
from collections import defaultdict, namedtuple
from typing import Any

import torch

Properties = namedtuple(
    "Properties",
    "name total_memory multi_processor_count major minor warp_size max_threads_per_multi_processor "
    "regs_per_multiprocessor shared_memory_per_block L2_cache_size gcnArchName is_integrated uuid",
)
PROPERTIES = Properties("NVIDIA H100 80GB HBM3", 0, 132, 9, 0, 32, 2048, 65536, 49152, 50 << 20, "", 0, "")
cuda: Any = torch.cuda


def adopt(library: Any) -> None:
    """Replace what a CPU build leaves out or refuses."""
    _adopt_private(library)
    _adopt_devices(library)
    _adopt_streams(library)
    _adopt_memory(library)
    _adopt_generators(library)
    _adopt_storages(library)


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return cuda.current_device() if index is None else index


def _adopt_private(library: Any) -> None:
    for name, value in {
        # Functions of Python: those of ctypes have no hash, which torch.compile asks for.
        "getDeviceCount": lambda: library.emulated_device_count(),
        "getDevice": lambda: library.emulated_device(),
        "setDevice": lambda index: library.emulated_set_device(index),
        "exchangeDevice": lambda index: library.emulated_exchange_device(index),
        "maybeExchangeDevice": lambda index: library.emulated_exchange_device(index),
        "synchronize": lambda: library.emulated_synchronize(),
        "init": lambda: None,
        "isInBadFork": lambda: False,
        "getCompiledVersion": lambda: 13000,
        "getArchFlags": lambda: "sm_90",
        "ipc_collect": lambda: None,
        "emptyCache": lambda: None,
        "getCurrentRawStream": lambda index: 0,
        "getCurrentStream": lambda index: (0, index, 1),
        "clearCublasWorkspaces": lambda: None,
        "hostMemoryStats": dict,
    }.items():
        setattr(torch._C, f"_cuda_{name}", value)


def _uuid(index: int) -> str:
    """Return the identifier of a device, which processes that see other devices count otherwise."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return f"GPU-{visible[index] if index < len(visible) and visible[index] else index}"


def _adopt_devices(library: Any) -> None:
    is_in_bad_fork = False

    def forked() -> None:
        nonlocal is_in_bad_fork
        is_in_bad_fork = any(library.emulated_reserved(index) for index in range(8))

    def lazy_init() -> None:
        if is_in_bad_fork:
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
                "'spawn' start method"
            )

    def set_device(device: Any) -> None:
        index = _index(device)
        if index >= cuda.device_count():
            raise RuntimeError("CUDA error: invalid device ordinal")
        library.emulated_set_device(index)

    os.register_at_fork(after_in_child=forked)
    torch.version.cuda = "13.0"
    cuda._initialized = True
    cuda._is_in_bad_fork = lambda: is_in_bad_fork
    cuda._lazy_init = lazy_init
    # Each name has a function of its own: torch.compile refuses one that it finds under two.
    cuda._exchange_device = lambda index: library.emulated_exchange_device(index)
    cuda._maybe_exchange_device = lambda index: library.emulated_exchange_device(index)
    cuda.device_count = lambda: library.emulated_device_count()
    cuda._device_count_nvml = lambda: library.emulated_device_count()
    cuda.is_available = lambda: cuda.device_count() > 0
    cuda.current_device = lambda: library.emulated_device()
    cuda.set_device = set_device
    cuda._sleep = lambda cycles: library.emulated_spin(cycles)  # a nanosecond each
    cuda.synchronize = lambda device=None: library.emulated_synchronize()
    cuda.get_device_properties = lambda device=None: PROPERTIES._replace(
        total_memory=library.emulated_total(), uuid=_uuid(_index(device))
    )
    cuda.get_device_name = lambda device=None: PROPERTIES.name
    cuda.get_device_capability = lambda device=None: (PROPERTIES.major, PROPERTIES.minor)
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.nccl.version = lambda: (2, 28, 3)


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **more: Any) -> Any:
        if not more:
            more["device"] = torch.device("cuda", _index(device))
        return super().__new__(cls, priority=priority, **more)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'Stream' object")


class StreamContext:
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> Any:
        if self.stream is not None:
            self.before = cuda.current_stream(self.stream.device)
            torch.accelerator.set_stream(self.stream)
        return self.stream

    def __exit__(self, *exception: Any) -> None:
        if self.stream is not None:
            torch.accelerator.set_stream(self.before)


def _event(
    enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
) -> Any:
    return torch.Event(device="cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def _adopt_streams(library: Any) -> None:
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = _event
    cuda.StreamContext = cuda.stream = StreamContext
    cuda.current_stream = lambda device=None: torch.accelerator.current_stream(torch.device("cuda", _index(device)))
    cuda.default_stream = lambda device=None: torch.Stream(stream_id=0, device_index=_index(device), device_type=1)
    cuda.set_stream = lambda stream: torch.accelerator.set_stream(stream)


def _adopt_memory(library: Any) -> None:
    def information(device: Any = None) -> tuple[int, int]:
        total = library.emulated_total()
        return total - library.emulated_reserved(_index(device)), total

    for name, function in {
        "memory_allocated": lambda device=None: library.emulated_allocated(_index(device)),
        "max_memory_allocated": lambda device=None: library.emulated_peak(_index(device)),
        "memory_reserved": lambda device=None: library.emulated_reserved(_index(device)),
        "max_memory_reserved": lambda device=None: library.emulated_peak_reserved(_index(device)),
        "mem_get_info": information,
        "memory_stats": lambda device=None: defaultdict(
            int, {"allocated_bytes.all.peak": library.emulated_peak(_index(device))}
        ),
        "reset_peak_memory_stats": lambda device=None: library.emulated_reset_peak(_index(device)),
        "empty_cache": lambda: library.emulated_empty_cache(),
    }.items():
        setattr(cuda, name, function)
        setattr(cuda.memory, name, function)
    cuda.ipc_collect = lambda: None


def _adopt_generators(library: Any) -> None:
    library.emulated_give_default_generators(1)
    cuda.default_generators = tuple(torch.Generator(device=f"cuda:{index}") for index in range(8))
    library.emulated_give_default_generators(0)

    def here(device: Any = None) -> torch.Generator:
        return cuda.default_generators[_index(device)]

    def seed_all(seed: int) -> None:
        for each in cuda.default_generators:
            each.manual_seed(int(seed))

    from torch.cuda import random

    for name, function in {
        "get_rng_state": lambda device="cuda": here(device).get_state(),
        "set_rng_state": lambda state, device="cuda": here(device).set_state(state),
        "get_rng_state_all": lambda: [here(index).get_state() for index in range(cuda.device_count())],
        "manual_seed": lambda seed: here().manual_seed(int(seed)),
        "manual_seed_all": seed_all,
        "initial_seed": lambda: here().initial_seed(),
    }.items():
        setattr(cuda, name, function)
        setattr(random, name, function)


def _adopt_storages(library: Any) -> None:
    storage: Any = torch.UntypedStorage
    resize, clone, make = storage.resize_, storage.clone, storage.__new__

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        refusal = library.emulated_resize_storage(self._cdata, size)
        if refusal is not None:
            raise torch.OutOfMemoryError(refusal.decode())
        return self

    def cloned(self: Any) -> Any:
        if self.device.type != "cuda":
            return clone(self)
        return torch.empty(self.nbytes(), dtype=torch.uint8, device=self.device).untyped_storage().copy_(self)

    def made(kind: Any, *arguments: Any, device: Any = None, **more: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make(kind, *arguments, **more, **({} if device is None else {"device": device}))
        data = torch.empty(*arguments, dtype=torch.uint8) if isinstance(arguments[0], int) else torch.tensor(*arguments)
        return data.to(torch.uint8).to(device).untyped_storage()

    storage.resize_, storage.clone, storage.__new__ = resize_, cloned, made
