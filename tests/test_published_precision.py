"""Products in 8 bits (which are cast, what casting moves, what is gathered in one byte) and asynchronous products."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import published_precision
from benchmarks.published_precision import RECIPES, dimensions, pipelined
from benchmarks.published_rows import ROWS, Matmul
from trueshard.planner import ledger
from trueshard.planner.hardware import hardware
from trueshard.planner.timeline import communication_seconds, operation_seconds, schedule
from trueshard.planner.trace import Allocation, Communication, Event, EventPlace, Free, Kernel, Trace
from trueshard.plans import Plan, Unit

BLOCK, HEAD = EventPlace("forward", "layers.0"), EventPlace("forward", "head")
M, K, N = 8192, 4096, 14336


def product(place: EventPlace = BLOCK, m: int = M, k: int = K, n: int = N, op: str = "aten.mm") -> Kernel:
    return Kernel(place, op, 2 * m * k * n, 2 * (m * k + k * n), 2 * m * n, "bfloat16")


def plan() -> Plan:
    def unit(name: str, kind: str) -> Unit:
        return Unit(name=name, modules=(name,), kind=kind, parameters=1, bytes=4, trainable=1, dtype="float32")  # type: ignore[arg-type]

    return Plan(units=(unit("layers.0", "block"), unit("head", "head")))


H100 = hardware("h100")
RATE = H100.memory_bandwidth * H100.compile.memory


def cast(events: list[Event], recipe: Matmul) -> Trace:
    """The step in a recipe, compiled, on an H100."""
    return published_precision.cast(Trace(events), plan(), RECIPES[recipe], H100, "compile")


def casts(kernel: Kernel) -> int:
    """Bytes that casts move: the seconds beyond those of the product itself."""
    assert kernel.seconds is not None
    return round((kernel.seconds - kernel.flops / (1978.9e12 * H100.compile.matmul * 0.85)) * RATE)


def kernels(trace: Trace) -> list[Kernel]:
    return [event for event in trace.events if isinstance(event, Kernel)]


@pytest.mark.parametrize(("m", "k", "n"), [(8192, 4096, 14336), (4096, 8192, 4096), (512, 100, 8)])
def test_a_products_dimensions_follow_from_what_it_computes_and_moves(m: int, k: int, n: int) -> None:
    assert dimensions(product(m=m, k=k, n=n)) == pytest.approx((max(m, n), k, min(m, n)))


def test_linear_layers_of_blocks_are_cast_and_nothing_else() -> None:
    adapter = product(n=16)
    attention = product(op="aten.bmm")
    events: list[Event] = [product(), product(HEAD), adapter, attention, product(EventPlace("optimizer", "layers.0"))]
    found = kernels(cast(events, "float8-rowwise"))
    assert [each.dtype for each in found] == ["float8", *["bfloat16"] * 4]
    assert casts(found[0]) == 4 * (M * K + K * N)
    assert found[0].read == M * K + K * N
    assert found[0].written == 2 * M * N
    assert found[1:] == events[1:]
    assert operation_seconds(found[0], H100, "compile") == found[0].seconds
    assert found[0].seconds < operation_seconds(product(), H100, "compile")


def test_copies_of_operands_live_as_long_as_the_product() -> None:
    gather = Communication(BLOCK, "all_gather", "all_gather", 8, 1, 7, 8, "bfloat16", "layers.0")
    events: list[Event] = [product(), gather, dataclasses.replace(product(), after=(1,)), product()]
    trace = cast(events, "float8-rowwise")
    assert ledger.peak(trace).bytes == M * K + K * N
    last = trace.events[-1]
    assert isinstance(last, Free)
    waits = next(event for event in kernels(trace) if event.after)
    assert trace.events[waits.after[0]] is not None
    assert isinstance(trace.events[waits.after[0]], Communication)


def test_a_piece_of_a_sequence_is_cast_once_before_the_tensor_axis_gathers_it_in_one_byte() -> None:
    whole = 2 * M * K
    gather = Communication(
        BLOCK, "all_gather", "compute", 8, 1, whole * 7 // 8, whole, "bfloat16", "layers.0", axis="tensor"
    )
    reading = dataclasses.replace(product(), after=(0,))
    weight = dataclasses.replace(product(m=K, k=M, n=512), after=(0,))  # gradient of a weight: adds over the tokens
    moved = {}
    words: tuple[Matmul, ...] = ("float8", "float8-rowwise")
    for word in words:
        found = cast([gather, reading, reading, weight], word)
        moved[word] = ledger.received(found)["all_gather"], *map(casts, kernels(found))
    assert moved["float8-rowwise"] == (whole * 7 // 8, *[4 * (M * K + K * N)] * 2, 4 * (M * K + M * 512))
    first = 3 * K * N + 3 * M * K // 8
    assert moved["float8"] == (whole * 7 // 16, first, 3 * K * N, 3 * M * 512 + 2 * M * K)


def test_with_float8_matrices_are_gathered_in_one_byte() -> None:
    def events() -> list[Event]:
        buffer = Allocation(BLOCK, 1, 2 * K * N + 8192, "all_gather", "communication", "layers.0")
        matrix = Allocation(BLOCK, 2, 2 * K * N, "compute", "gathered", "layers.0", "w", (K * N,), "bfloat16")
        norm = Allocation(BLOCK, 3, 8192, "compute", "gathered", "layers.0", "norm", (4096,), "bfloat16")
        head = Allocation(HEAD, 4, 2 * K * N, "compute", "gathered", "head", "w", (K * N,), "bfloat16")
        moved = Communication(
            BLOCK, "all_gather", "all_gather", 8, 1, 7 * K * N // 4, 2 * K * N, "bfloat16", "layers.0"
        )
        frees = [Free(BLOCK, each.storage, each.bytes) for each in (buffer, matrix, norm)]
        return [buffer, moved, matrix, norm, head, *frees]

    found = cast(events(), "float8")
    sizes = {event.storage: event.bytes for event in found.events if isinstance(event, Allocation)}
    assert (sizes[2], sizes[3], sizes[4]) == (K * N, 8192, 2 * K * N)
    assert sizes[1] == pytest.approx(K * N + 8192, rel=1e-3)
    assert ledger.received(found)["all_gather"] == pytest.approx(7 * K * N // 8, rel=1e-3)
    ledger.lifetimes(found)  # what is freed has the size that was taken
    assert cast(events(), "float8-rowwise").events == events()


def test_the_devices_of_published_rows_have_the_products() -> None:
    for row in ROWS:
        if row.matmul is not None:
            assert RECIPES[row.matmul].peak in published_precision.device_of(row).peak_flops


# Asynchronous products


def elementwise(op: str) -> Kernel:
    return Kernel(BLOCK, op, 0, 2 * M * K, 2 * M * K, "bfloat16")


def shared(op: str, axis: str = "tensor") -> Communication:
    whole = 2 * M * K
    return Communication(BLOCK, op, "compute", 8, 1, whole * 7 // 8, whole, "bfloat16", axis=axis)  # type: ignore[arg-type]


BACK = EventPlace("backward", "layers.0")
COLLECTIVE = communication_seconds(shared("all_gather"), H100, 8)
ADDED = 2 * M * K / RATE
"""Seconds in which pieces of a result are added."""


def seconds(**sizes: int) -> float:
    return operation_seconds(product(**sizes), H100, "compile")  # type: ignore[arg-type]


def reading(place: EventPlace = BLOCK, **sizes: int) -> Kernel:
    return dataclasses.replace(product(place, **sizes), after=(0,))


@pytest.mark.parametrize(
    ("events", "exposed"),
    [
        ([shared("all_gather"), reading(n=128), reading(n=64)], COLLECTIVE - (seconds(n=128) + seconds(n=64)) * 7 / 8),
        ([shared("all_gather"), reading(BACK, n=128), reading(BACK, n=128)], COLLECTIVE - seconds(n=128) * 7 / 8),
        ([shared("all_gather"), product()], COLLECTIVE),  # nothing here reads it
        ([product(n=128), shared("reduce_scatter")], COLLECTIVE - seconds(n=128) * 7 / 8 + ADDED),
        ([product(), elementwise("aten.clone"), shared("reduce_scatter")], COLLECTIVE / 8 + ADDED),  # the last piece
        ([product(), elementwise("aten.add"), shared("reduce_scatter")], COLLECTIVE),  # a sum of products
        ([product(), shared("reduce_scatter", "shard")], COLLECTIVE),
    ],
)
def test_asynchronous_products_hide_collectives_of_the_tensor_axis(events: list[Event], exposed: float) -> None:
    def waited(trace: Trace) -> float:
        return schedule(trace, H100, 8, "compile").exposed_seconds

    assert waited(pipelined(Trace(events), H100, "compile")) == pytest.approx(exposed)
    assert waited(Trace(events)) == pytest.approx(COLLECTIVE)
