"""Products in 8 bits: which are cast, what casting moves, what is gathered in one byte; and who refuses it."""

from __future__ import annotations

import dataclasses

import pytest

from messages import naming
from trueshard.planner import ledger
from trueshard.planner.hardware import hardware
from trueshard.planner.low_precision import RECIPES, cast, dimensions, recipe_of
from trueshard.planner.timeline import operation_seconds
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


def kernels(trace: Trace) -> list[Kernel]:
    return [event for event in trace.events if isinstance(event, Kernel)]


@pytest.mark.parametrize(("m", "k", "n"), [(8192, 4096, 14336), (4096, 8192, 4096), (512, 100, 8)])
def test_a_products_dimensions_follow_from_what_it_computes_and_moves(m: int, k: int, n: int) -> None:
    assert dimensions(product(m=m, k=k, n=n)) == pytest.approx((max(m, n), k, min(m, n)))


def test_linear_layers_of_blocks_are_cast_and_nothing_else() -> None:
    adapter = product(n=16)
    attention = product(op="aten.bmm")
    events: list[Event] = [product(), product(HEAD), adapter, attention, product(EventPlace("optimizer", "layers.0"))]
    found = kernels(cast(Trace(events), plan(), RECIPES["float8-rowwise"]))
    assert [each.dtype for each in found] == ["float8", *["bfloat16"] * 4]
    assert found[0].cast == 4 * (M * K + K * N)
    assert found[0].read == M * K + K * N
    assert found[0].written == 2 * M * N
    assert found[1:] == events[1:]


def test_a_cast_product_takes_its_casts_and_the_rate_of_8_bits() -> None:
    device = hardware("h100")
    (found,) = kernels(cast(Trace([product()]), plan(), RECIPES["float8"]))
    rate = 1978.9e12 * device.compile.matmul * device.compile.low_precision
    casts = 3 * (M * K + K * N) / (device.memory_bandwidth * device.compile.memory)
    assert operation_seconds(found, device, "compile") == pytest.approx(2 * M * K * N / rate + casts)
    assert operation_seconds(found, device, "compile") < operation_seconds(product(), device, "compile")


def test_copies_of_operands_live_as_long_as_the_product() -> None:
    gather = Communication(BLOCK, "all_gather", "all_gather", 8, 1, 7, 8, "bfloat16", "layers.0")
    events: list[Event] = [product(), gather, dataclasses.replace(product(), after=(1,)), product()]
    trace = cast(Trace(events), plan(), RECIPES["mxfp8"])
    assert ledger.peak(trace).bytes == int((M * K + K * N) * (1 + 1 / 32))
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
    for word in ("float8", "float8-rowwise"):
        found = cast(Trace([gather, reading, reading, weight]), plan(), RECIPES[word])  # type: ignore[index]
        moved[word] = ledger.received(found)["all_gather"], *(each.cast for each in kernels(found))
    assert moved["float8-rowwise"] == (whole * 7 // 8, *[4 * (M * K + K * N)] * 2, 4 * (M * K + M * 512))
    first = 3 * K * N + 3 * M * K // 8
    assert moved["float8"] == (whole * 7 // 16, first, 3 * K * N, 3 * M * 512 + 2 * M * K)


def test_with_float8_matrices_are_gathered_in_one_byte() -> None:
    def trace() -> Trace:
        buffer = Allocation(BLOCK, 1, 2 * K * N + 8192, "all_gather", "communication", "layers.0")
        matrix = Allocation(BLOCK, 2, 2 * K * N, "compute", "gathered", "layers.0", "w", (K * N,), "bfloat16")
        norm = Allocation(BLOCK, 3, 8192, "compute", "gathered", "layers.0", "norm", (4096,), "bfloat16")
        head = Allocation(HEAD, 4, 2 * K * N, "compute", "gathered", "head", "w", (K * N,), "bfloat16")
        moved = Communication(
            BLOCK, "all_gather", "all_gather", 8, 1, 7 * K * N // 4, 2 * K * N, "bfloat16", "layers.0"
        )
        frees = [Free(BLOCK, each.storage, each.bytes) for each in (buffer, matrix, norm)]
        return Trace([buffer, moved, matrix, norm, head, *frees])

    found = cast(trace(), plan(), RECIPES["float8"])
    sizes = {event.storage: event.bytes for event in found.events if isinstance(event, Allocation)}
    assert (sizes[2], sizes[3], sizes[4]) == (K * N, 8192, 2 * K * N)
    assert sizes[1] == pytest.approx(K * N + 8192, rel=1e-3)
    assert ledger.received(found)["all_gather"] == pytest.approx(7 * K * N // 8, rel=1e-3)
    ledger.lifetimes(found)  # what is freed has the size that was taken
    same = cast(trace(), plan(), RECIPES["mxfp8"])
    assert same.events == trace().events


@pytest.mark.parametrize(
    ("word", "device", "message"),
    [
        ("fp8", "h100", naming("matmul='fp8'", "float8-rowwise")),
        ("float8", "a100", naming("matmul='float8'", "a100", "peak_flops")),
        ("mxfp8", "h100", naming("matmul='mxfp8'", "h100")),
    ],
)
def test_an_unknown_recipe_or_a_device_without_it_is_refused(word: str, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe_of(word, hardware(device))
