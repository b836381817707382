"""Measure the device at hand, for a hardware file of its own: ``trueshard plan calibrate FILE``.

Rates are those of sustained work, since a device's clock falls under load, on random values, since zeros take less
power. What one device cannot show (links, network, the host's memory) is that of a device of the catalogue.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
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
    """Sizes of what is computed, and for how long."""

    tokens: int
    hidden: int
    intermediate: int
    heads: int
    copied: int
    """Bytes of each tensor that memory-bound work reads or writes."""
    small: int
    """Operations in a row of which the host's time is taken."""
    seconds: float
    """Time for which each rate is measured."""


LARGE = Sizes(8192, 4096, 14336, 32, copied=1 << 30, small=2000, seconds=4.0)
"""A block of Llama 3 8B, for a GPU."""
SMALL = Sizes(128, 256, 768, 4, copied=1 << 24, small=200, seconds=0.1)
"""A smaller block, for a CPU."""
UNITS = 12
"""Units of the model of which the host's time for a collective is taken."""
MODES = ("eager", "compile")
COMPILED = "compile.launch_seconds"


@dataclass(frozen=True)
class Calibration:
    """A device of the catalogue, and what was measured in the place of its figures."""

    base: Hardware
    measured: dict[str, float]
    """Figures by key of the hardware file, with a dot in a key of its tables: ``eager.matmul``."""
    device: str

    @property
    def hardware(self) -> Hardware:
        """The device as measured."""
        overrides: dict[str, Any] = {}
        for key, value in self.measured.items():
            table, _, inner = key.rpartition(".")
            (overrides.setdefault(table, {}) if table else overrides)[inner] = value
        return hardware(self.base.name, **overrides)

    def __str__(self) -> str:
        rows = []
        for key, value in self.measured.items():
            old: Any = self.base
            for part in key.split("."):
                old = old.get(part) if isinstance(old, Mapping) else getattr(old, part)
            rows.append((key, "-" if old is None else f"{old:.4g}", f"{value:.4g}"))
        lines = [self.device, *table(("", self.base.name, "measured"), rows, right=(1, 2))]
        if "eager.launch_seconds" in self.measured and COMPILED not in self.measured:
            lines.append(f"{COMPILED} is that of {self.base.name}: triton, which compiles for a GPU, is not installed")
        return "\n".join(lines)

    def toml(self) -> str:
        """Return the hardware file, which names the catalogue's device as its base."""
        source = (
            f"measured with torch {torch.__version__} by `trueshard plan calibrate`; what does not stand here is "
            f"that of {self.base.name} in the catalogue"
        )
        head = f'base = "{self.base.name}"\ntitle = "{self.device}"\nsource = "{source}"\n'
        return head + "".join(f"{key} = {value!r}\n" for key, value in self.measured.items())


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
    title = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    bench = _Bench(device, sizes or (LARGE if on_gpu else SMALL))
    measured = _own_memory(device) if on_gpu else {}
    tell("measuring matrix products, attention and memory")
    measured |= _rates(bench, base)
    if on_gpu:
        tell("measuring copies from the host")
        measured["host_bandwidth"] = bench.copies()
    tell("measuring launches")
    measured |= _launches(bench)
    tell("measuring what a unit's collectives take the host")
    without = Calibration(base, {key: _rounded(value) for key, value in measured.items()}, title)
    measured |= _of_modes("collective_seconds", _collective_seconds(bench, without.hardware))
    return dataclasses.replace(without, measured={key: _rounded(value) for key, value in measured.items()})


def _of_modes(key: str, value: float) -> dict[str, float]:
    """Return a figure that is the same, or was measured once, for eager and compiled units."""
    return {f"{mode}.{key}": value for mode in MODES}


def _rounded(value: float) -> float:
    """Return a figure with the four digits that a measurement is worth; bytes as a whole number."""
    return value if isinstance(value, int) else float(f"{value:.4g}")


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


class _Bench:
    """Work on a device, and a clock that reads when the device has nothing left to do."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self.on_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32

    def settle(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def random(self, *shape: int, dtype: torch.dtype | None = None, grad: bool = False) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype, requires_grad=grad)

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

    def products(self) -> float:
        """Return operations a second in the products of a block's two wide layers, forward and backward."""
        sizes = self.sizes
        wide = self.random(sizes.intermediate, sizes.hidden, grad=True)
        back = self.random(sizes.hidden, sizes.intermediate, grad=True)
        rows = self.random(sizes.tokens, sizes.hidden, grad=True)
        slope = torch.randn_like(rows)

        def work() -> object:
            return torch.autograd.grad(
                functional.linear(functional.linear(rows, wide), back), [rows, wide, back], slope
            )

        seconds = self.sustained(work, sizes.seconds)
        return 3 * 2 * 2 * sizes.tokens * sizes.hidden * sizes.intermediate / seconds

    def attention(self) -> float:
        """Return operations a second that a causal mask leaves, forward and backward (2 and 5 products of scores)."""
        sizes = self.sizes
        width = sizes.hidden // sizes.heads
        shape = (1, sizes.heads, sizes.tokens, width)
        query, key, value = (self.random(*shape, grad=True) for _ in range(3))
        slope = self.random(*shape)

        def work() -> object:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            return torch.autograd.grad(mixed, [query, key, value], slope)

        seconds = self.sustained(work, sizes.seconds)
        return 7 * 2 * sizes.heads * sizes.tokens**2 * width / 2 / seconds

    def memory(self) -> float:
        """Return bytes a second of a sum of two tensors: two are read, one is written."""
        one, two = (self.random(self.sizes.copied // 4, dtype=torch.float32) for _ in range(2))
        result = torch.empty_like(one)
        return 3 * self.sizes.copied / self.sustained(lambda: torch.add(one, two, out=result), self.sizes.seconds)

    def copies(self) -> float:
        """Return bytes a second from pinned memory to the device."""
        host = torch.empty(self.sizes.copied, dtype=torch.uint8, pin_memory=True)
        here = torch.empty_like(host, device=self.device)
        seconds = self.sustained(lambda: here.copy_(host, non_blocking=True), self.sizes.seconds / 4)
        return self.sizes.copied / seconds


def _rates(bench: _Bench, base: Hardware) -> dict[str, float]:
    """Return shares of the peaks; a rate above the data sheet's takes its place there."""
    products, attention, memory = bench.products(), bench.attention(), bench.memory()
    name = str(bench.dtype).removeprefix("torch.")
    peak, bandwidth = max(base.peak(name), products, attention), max(base.memory_bandwidth, memory)
    measured = {f"peak_flops.{name}": peak} if peak > base.peak(name) else {}
    measured |= {"memory_bandwidth": bandwidth} if bandwidth > base.memory_bandwidth else {}
    for key, share in (("matmul", products / peak), ("attention", attention / peak), ("memory", memory / bandwidth)):
        measured |= _of_modes(key, share)
    return measured


# Fixed costs


def _launches(bench: _Bench) -> dict[str, float]:
    """Return the host's seconds for an operation, and the least that one occupies the device.

    On a CPU an operation occupies the host and the device alike; both together are ``kernel_seconds``.
    """
    small = bench.random(64, 64, dtype=torch.float32)
    chained = 16
    calls = bench.sizes.small // chained

    def chain(value: torch.Tensor) -> torch.Tensor:
        for _ in range(chained):
            value = small @ value  # nothing that a compiler would fuse
        return value

    def issued(work: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """Return the host's seconds, which does not wait for the device, for one operation: the median of several."""
        seconds = []
        for _ in range(9):
            bench.settle()
            began = time.perf_counter()
            for _ in range(calls // 4):
                work(small)
            seconds.append((time.perf_counter() - began) / (calls // 4 * chained))
        return statistics.median(seconds[2:])

    with torch.no_grad():
        eager = issued(chain)
        if not bench.on_gpu:
            return _of_modes("kernel_seconds", eager)
        launches = {"eager.launch_seconds": eager}
        if find_spec("triton") is not None:  # else nothing is compiled for a GPU
            launches[COMPILED] = issued(torch.compile(chain))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                chain(small)
        return launches | _of_modes("kernel_seconds", bench.sustained(graph.replay, 0.2) / (calls * chained))


def _collective_seconds(bench: _Bench, device: Hardware) -> float:
    """Return the host's additional seconds to gather or reduce a unit: what a step of tiny units takes beyond forecast.

    The step runs as rank 0 of eight, in a world whose collectives return at once.
    """
    job = Job(_tiny_units(), (8,), choices=Options(units="Linear", reshard_after_forward="always"))
    made = simulate(job)
    free = {mode: dataclasses.asdict(getattr(device, mode)) | {"collective_seconds": 0.0} for mode in MODES}
    forecast = seconds_alone(made, hardware(device.name, **free))
    count = sum(isinstance(event, Communication) for event in made.steady.events)
    seconds = []
    with world(job, bench.device.type) as mesh:
        step = ready(dataclasses.replace(job, plan=made.plan), mesh, bench.device)
        for _ in range(5 * STEPS):
            bench.settle()
            began = time.perf_counter()
            step()
            bench.settle()
            seconds.append(time.perf_counter() - began)
        del step
    gc.collect()
    return max(0.0, (statistics.median(seconds[STEPS:]) - forecast) / count)


def _tiny_units() -> Workload:
    return Workload(
        "tiny units",
        lambda: nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(UNITS))),
        lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)],
        lambda count, _: torch.randn(count, 64),
        lambda model, batch: model(batch).sum(),
        sequence=1,
    )
