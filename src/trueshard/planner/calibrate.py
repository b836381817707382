"""Measure the device at hand, for a hardware file of its own: ``trueshard plan calibrate FILE``.

Rates are those of sustained work, since a device's clock falls under load, on random values, since zeros take less
power. What one device cannot show (links, network, the host's memory) is that of a device of the catalogue.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trueshard.options import Options
from trueshard.planner.hardware import Hardware, hardware, hardware_here
from trueshard.planner.simulation.rehearse import STEPS, ready, seconds_alone, world
from trueshard.planner.simulation.simulate import simulate
from trueshard.planner.trace import Communication
from trueshard.planner.workload import Job, Workload
from trueshard.text import table


@dataclass(frozen=True)
class Sizes:
    """What is computed."""

    tokens: int
    hidden: int
    intermediate: int
    heads: int
    copied: int
    """Bytes of each tensor that memory-bound work reads or writes."""
    small: int
    """Operations in a row of which the host's time is taken."""
    seconds: float
    """For which each rate is measured."""


LARGE = Sizes(8192, 4096, 14336, 32, copied=1 << 30, small=2000, seconds=4.0)
"""Of a GPU: a block of Llama 3 8B."""
SMALL = Sizes(128, 256, 768, 4, copied=1 << 24, small=200, seconds=0.1)
"""Of a CPU."""
UNITS = 12
"""Units of the model of which the host's time for a collective is taken."""


@dataclass(frozen=True)
class Calibration:
    """A device of the catalogue, and what was measured in the place of its figures."""

    base: Hardware
    found: dict[str, float]
    """By key of the hardware file; those of its tables with a dot: ``eager.matmul``."""
    device: str

    @property
    def hardware(self) -> Hardware:
        """The device as measured."""
        return hardware(self.base.name, **_nested(self.found))

    def __str__(self) -> str:
        rows = []
        for key, value in self.found.items():
            old: Any = self.base
            for part in key.split("."):
                old = old.get(part) if isinstance(old, Mapping) else getattr(old, part)
            rows.append((key, "-" if old is None else f"{old:.4g}", f"{value:.4g}"))
        return "\n".join([self.device, *table(("", self.base.name, "measured"), rows, right=(1, 2))])

    def toml(self) -> str:
        """Return the hardware file, which names the catalogue's device as its base."""
        source = (
            f"measured with torch {torch.__version__} by `trueshard plan calibrate`; what does not stand here is "
            f"that of {self.base.name} in the catalogue"
        )
        lines = [f'base = "{self.base.name}"', f'title = "{self.device}"', f'source = "{source}"']
        for key, value in _nested(self.found).items():
            inner = value.items() if isinstance(value, dict) else ()
            shown = f"{{ {', '.join(f'{name} = {each!r}' for name, each in inner)} }}" if inner else repr(value)
            lines.append(f"{key} = {shown}")
        return "\n".join(lines) + "\n"


def calibrate_here(base: str | None, tell: Callable[[str], object] = lambda line: None) -> Calibration:
    """Measure this machine's device; ``base``: the device of the catalogue that it resembles, None: by its name."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return calibrate(device, hardware_here(device) if base is None else hardware(base), tell)


def calibrate(
    device: torch.device, base: Hardware, tell: Callable[[str], object] = lambda line: None, sizes: Sizes | None = None
) -> Calibration:
    """Measure a device; on a GPU it takes about a minute.

    Args:
        device: a CUDA device that does nothing else, or the CPU, of which all threads are used that torch has.
        base: gives the figures that one device does not show.
        tell: gets a line before each measurement.
        sizes: None: ``LARGE``, on a CPU ``SMALL``.
    """
    on_gpu = device.type == "cuda"
    sizes = sizes or (LARGE if on_gpu else SMALL)
    clock = _Clock(device)
    found: dict[str, float] = _own_memory(device) if on_gpu else {}
    tell("measuring matrix products, attention and memory")
    found |= _rates(clock, base, sizes)
    if on_gpu:
        tell("measuring copies from the host")
        found["host_bandwidth"] = _copies(clock, sizes)
    tell("measuring launches")
    found |= _launches(clock, sizes, on_gpu)
    tell("measuring what a unit's collectives take the host")
    so_far = Calibration(base, {key: _rounded(value) for key, value in found.items()}, _title(device))
    both = _collective_seconds(device, so_far.hardware)
    found |= {"eager.collective_seconds": both, "compile.collective_seconds": both}
    return dataclasses.replace(so_far, found={key: _rounded(value) for key, value in found.items()})


def _nested(found: dict[str, float]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    tables: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for key, value in found.items():
        table, dot, inner = key.partition(".")
        if dot:
            tables[table][inner] = value
        else:
            nested[key] = value
    return nested | tables


def _rounded(value: float) -> float:
    """Return a figure with the four digits that a measurement is worth; bytes as a whole number."""
    return value if isinstance(value, int) else float(f"{value:.4g}")


def _title(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


class _Clock:
    """Seconds between two moments at which the device has nothing left to do."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def sustained(self, work: Callable[[], object], seconds: float) -> float:
        """Return the seconds of one call, of as many in a row as fill ``seconds``, after some that do not count."""
        for _ in range(3):
            work()
        self.settle()
        began = time.perf_counter()
        work()
        self.settle()
        times = max(1, round(seconds / (time.perf_counter() - began)))
        began = time.perf_counter()
        for _ in range(times):
            work()
        self.settle()
        return (time.perf_counter() - began) / times


def _own_memory(device: torch.device) -> dict[str, float]:
    """Return total memory, and what context and the first matrix product take; the process must be fresh."""
    torch.ones(1, device=device)
    free, total = torch.cuda.mem_get_info(device)
    context = total - free - torch.cuda.memory_reserved(device)
    ones = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated(device)
    product = ones @ ones
    workspace = torch.cuda.memory_allocated(device) - before - product.numel() * product.element_size()
    return {"memory_bytes": total, "context_bytes": context, "workspace_bytes": max(0, workspace)}


# Rates


def _rates(clock: _Clock, base: Hardware, sizes: Sizes) -> dict[str, float]:
    """Return shares of the peaks; a rate above the data sheet's takes its place there."""
    dtype = torch.bfloat16 if clock.device.type == "cuda" else torch.float32
    products, attention, memory = _products(clock, dtype, sizes), _attention(clock, dtype, sizes), _memory(clock, sizes)
    name = str(dtype).removeprefix("torch.")
    peak, bandwidth = max(base.peak(name), products, attention), max(base.memory_bandwidth, memory)
    found = {f"peak_flops.{name}": peak} if peak > base.peak(name) else {}
    found |= {"memory_bandwidth": bandwidth} if bandwidth > base.memory_bandwidth else {}
    for mode in ("eager", "compile"):
        found |= {f"{mode}.matmul": products / peak, f"{mode}.attention": attention / peak}
        found[f"{mode}.memory"] = memory / bandwidth
    return found


def _products(clock: _Clock, dtype: torch.dtype, sizes: Sizes) -> float:
    """Return operations a second in the products of a block's two wide layers, forward and backward."""
    wide = nn.Linear(sizes.hidden, sizes.intermediate, bias=False, device=clock.device, dtype=dtype)
    back = nn.Linear(sizes.intermediate, sizes.hidden, bias=False, device=clock.device, dtype=dtype)
    rows = torch.randn(sizes.tokens, sizes.hidden, device=clock.device, dtype=dtype, requires_grad=True)
    slope = torch.randn_like(rows)
    operands = [rows, wide.weight, back.weight]
    seconds = clock.sustained(lambda: torch.autograd.grad(back(wide(rows)), operands, slope), sizes.seconds)
    return 3 * 2 * 2 * sizes.tokens * sizes.hidden * sizes.intermediate / seconds


def _attention(clock: _Clock, dtype: torch.dtype, sizes: Sizes) -> float:
    """Return operations a second that a causal mask leaves, forward and backward (2 and 5 products of scores)."""
    width = sizes.hidden // sizes.heads
    shape = (1, sizes.heads, sizes.tokens, width)
    parts = [torch.randn(shape, device=clock.device, dtype=dtype, requires_grad=True) for _ in range(3)]
    slope = torch.randn(shape, device=clock.device, dtype=dtype)

    def work() -> object:
        query, key, value = parts
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.autograd.grad(mixed, parts, slope)

    seconds = clock.sustained(work, sizes.seconds)
    return 7 * 2 * sizes.heads * sizes.tokens**2 * width / 2 / seconds


def _memory(clock: _Clock, sizes: Sizes) -> float:
    """Return bytes a second of a sum of two tensors: two are read, one is written."""
    one, two = (torch.randn(sizes.copied // 4, device=clock.device) for _ in range(2))
    result = torch.empty_like(one)
    return 3 * sizes.copied / clock.sustained(lambda: torch.add(one, two, out=result), sizes.seconds)


def _copies(clock: _Clock, sizes: Sizes) -> float:
    """Return bytes a second from pinned memory to the device."""
    host = torch.empty(sizes.copied, dtype=torch.uint8, pin_memory=True)
    here = torch.empty_like(host, device=clock.device)
    return sizes.copied / clock.sustained(lambda: here.copy_(host, non_blocking=True), sizes.seconds / 4)


# Fixed costs


def _launches(clock: _Clock, sizes: Sizes, on_gpu: bool) -> dict[str, float]:
    """Return the host's seconds for an operation, and the least that one occupies the device.

    On a CPU an operation occupies the host and the device alike; both together are ``kernel_seconds``.
    """
    small = torch.randn(64, 64, device=clock.device)

    def chain(value: torch.Tensor) -> torch.Tensor:
        for _ in range(16):
            value = small @ value  # nothing that a compiler would fuse
        return value

    def issued(work: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """Return the host's seconds, which does not wait for the device, for one operation: the median of several."""
        found = []
        for _ in range(9):
            clock.settle()
            began = time.perf_counter()
            for _ in range(sizes.small // 16 // 4):
                work(small)
            found.append((time.perf_counter() - began) / (sizes.small // 16 // 4 * 16))
        return statistics.median(found[2:])

    with torch.no_grad():
        eager = issued(chain)
        if not on_gpu:
            return {"eager.kernel_seconds": eager, "compile.kernel_seconds": eager}
        compiled = issued(torch.compile(chain))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(sizes.small // 16):
                chain(small)
        shortest = clock.sustained(graph.replay, 0.2) / (sizes.small // 16 * 16)
    launches = {"eager.launch_seconds": eager, "compile.launch_seconds": compiled}
    return launches | {"eager.kernel_seconds": shortest, "compile.kernel_seconds": shortest}


def _collective_seconds(device: torch.device, known: Hardware) -> float:
    """Return the host's additional seconds to gather or reduce a unit: what a step of tiny units takes beyond forecast.

    The step runs as rank 0 of eight, in a world whose collectives return at once.
    """
    job = Job(_tiny_units(), (8,), choices=Options(units="Linear", reshard_after_forward="always"))
    made = simulate(job)
    free = hardware(known.name, **_without_collectives(known))
    forecast = seconds_alone(made, free)
    count = sum(isinstance(event, Communication) for event in made.steady.events)
    clock, found = _Clock(device), []
    with world(job, device.type) as mesh:
        step = ready(dataclasses.replace(job, plan=made.plan), mesh, device)
        for _ in range(5 * STEPS):
            clock.settle()
            began = time.perf_counter()
            step()
            clock.settle()
            found.append(time.perf_counter() - began)
        del step
    gc.collect()
    return max(0.0, (statistics.median(found[STEPS:]) - forecast) / count)


def _without_collectives(known: Hardware) -> dict[str, Any]:
    told = {mode: dataclasses.asdict(getattr(known, mode)) for mode in ("eager", "compile")}
    return {mode: values | {"collective_seconds": 0.0} for mode, values in told.items()}


def _tiny_units() -> Workload:
    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(UNITS)))

    return Workload(
        "tiny units",
        model,
        lambda made: [torch.optim.SGD(made.parameters(), lr=0.1, foreach=True)],
        lambda count, _: torch.randn(count, 64),
        lambda made, batch: made(batch).sum(),
        sequence=1,
    )
