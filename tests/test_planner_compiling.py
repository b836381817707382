"""What compiled blocks keep and make, by hand-made traces, by torch's own partitioner, and by real steps."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from transformers import LlamaConfig, LlamaForCausalLM

import planning
from trueshard.options import Options
from trueshard.planner import ledger
from trueshard.planner.hardware import hardware
from trueshard.planner.simulation.compiling import compiled
from trueshard.planner.simulation.simulate import Simulation, simulate
from trueshard.planner.timeline import schedule
from trueshard.planner.trace import Allocation, Event, EventPlace, Free, Kernel, Trace
from trueshard.planner.workload import Job, Workload
from trueshard.plans import Plan, Unit

# Hand-made traces. Storages are numbers of one digit; what a kernel makes is allocated behind it.

SIZE = 100


def unit(checkpointing: str = "none") -> Plan:
    return Plan(units=(Unit("a", ("a",), "block", 0, 0, 0, "float32", activation_checkpointing=checkpointing),))  # type: ignore[arg-type]


def kernel(phase: str, op: str, reads: str, makes: str = "", size: int = SIZE, unit: str = "a") -> list[Event]:
    place = EventPlace(phase, unit)  # type: ignore[arg-type]
    flops = 1 if op in ("mm", "attention") else 0
    moved = SIZE * len(reads), size * len(makes)
    made: list[Event] = [
        Kernel(place, f"aten.{op}", flops, *moved, "float32", reads=(*map(int, reads),), writes=(*map(int, makes),))
    ]
    return [*made, *(Allocation(place, int(number), size, what=op) for number in makes)]


def end(phase: str, numbers: str, size: int = SIZE) -> list[Event]:
    return [Free(EventPlace(phase, "a"), int(number), size) for number in numbers]  # type: ignore[arg-type]


def trace(*parts: list[Event]) -> Trace:
    """Storage 0 is the input, there from the beginning and for ever."""
    made = Trace([*itertools.chain(*parts)], [Allocation(EventPlace("between", ""), 0, SIZE, kind="inputs")])
    ledger.lifetimes(made)
    return made


def lives(made: Trace) -> dict[int, tuple[int, int]]:
    """Storage → how many kernels ran before it was made, and before it ended."""
    ledger.lifetimes(made)
    found: dict[int, tuple[int, int]] = {}
    kernels = 0
    for event in made:
        kernels += isinstance(event, Kernel)
        if isinstance(event, Allocation):
            found[event.storage] = kernels, -1
        elif isinstance(event, Free):
            found[event.storage] = found[event.storage][0], kernels
    return found


def test_what_is_read_within_a_fused_kernel_alone_never_exists() -> None:
    made = trace(
        kernel("forward", "mm", "0", "1"),
        kernel("forward", "mul", "1", "2"),
        end("forward", "1"),
        kernel("forward", "exp", "2", "3"),
        end("forward", "2"),
        kernel("forward", "mm", "3", "4"),
        end("forward", "34"),
    )
    assert lives(compiled(made, unit())) == {1: (1, 2), 3: (3, 4), 4: (4, 4)}


def test_other_units_are_left_alone() -> None:
    made = trace(kernel("forward", "mul", "0", "1", unit="b"), kernel("forward", "exp", "1", "2", unit="b"))
    assert compiled(made, unit()).events == made.events


def test_a_result_is_computed_again_behind_another_operator_if_what_it_is_made_of_is_there() -> None:
    again = kernel("forward", "mul", "0", "1"), kernel("forward", "mm", "0", "2"), kernel("forward", "add", "12", "3")
    made = trace(*again, kernel("forward", "mm", "3", "4"), end("forward", "1234"))
    assert 1 not in lives(compiled(made, unit()))
    gone = kernel("forward", "mm", "0", "5"), kernel("forward", "mul", "5", "1"), end("forward", "5")
    made = trace(*gone, *again[1:], kernel("forward", "mm", "3", "4"), end("forward", "1234"))
    assert 1 in lives(compiled(made, unit()))


def backward_of_a_product(*forward: list[Event], reads: str, op: str = "mul") -> Trace:
    """Backward reads ``reads`` with one operator, whose result a product reads; then everything ends."""
    numbers = sorted({event.storage for event in itertools.chain(*forward) if isinstance(event, Allocation)})
    ended = {event.storage for event in itertools.chain(*forward) if isinstance(event, Free)}
    left = "".join(str(number) for number in numbers if number not in ended)
    back = kernel("backward", op, reads, "8"), kernel("backward", "mm", "8", "9")
    return trace(*forward, *back, end("backward", left + "89"))


def test_an_elementwise_result_is_recomputed_from_the_product_that_is_kept_for_it() -> None:
    forward = kernel("forward", "mm", "0", "1"), kernel("forward", "exp", "1", "2"), end("forward", "1")
    rest = kernel("forward", "mul", "2", "3"), kernel("forward", "mm", "3", "4"), end("forward", "34")
    made = compiled(backward_of_a_product(*forward, *rest, reads="2"), unit())
    ledger.mark_activations(made)
    found = lives(made)
    assert 2 not in found
    assert found[1] == (1, 5)
    product = next(each for each in made if isinstance(each, Allocation) and each.storage == 1)
    assert product.kind == "activations"


def test_a_result_that_exists_anyhow_is_not_recomputed_from_a_larger_or_farther_one() -> None:
    forward = kernel("forward", "mm", "0", "1"), kernel("forward", "exp", "1", "2"), end("forward", "1")
    made = backward_of_a_product(*forward, kernel("forward", "mm", "2", "3"), end("forward", "3"), reads="2")
    assert lives(compiled(made, unit())) == lives(made)


def test_what_a_product_of_backward_reads_is_kept() -> None:
    forward = kernel("forward", "mm", "0", "1"), kernel("forward", "exp", "1", "2"), end("forward", "1")
    made = backward_of_a_product(*forward, kernel("forward", "mm", "2", "3"), end("forward", "3"), reads="2", op="mm")
    assert lives(compiled(made, unit())) == lives(made)


def test_a_reduction_is_kept() -> None:
    reduced = kernel("forward", "mm", "0", "1"), kernel("forward", "mean", "1", "2", size=10)
    made = trace(
        *reduced,
        kernel("forward", "mul", "12", "3"),
        end("forward", "1"),
        kernel("forward", "mm", "3", "4"),
        end("forward", "34"),
        kernel("backward", "mul", "02", "5"),
        kernel("backward", "mm", "5", "6"),
        end("backward", "56"),
        end("backward", "2", 10),
    )
    assert lives(compiled(made, unit()))[2] == (2, 6)


def test_of_two_copies_the_smaller_is_kept() -> None:
    """A float32 copy of a product's result is what autograd saves; the result itself has half its bytes."""
    made = trace(
        kernel("forward", "mm", "0", "1"),
        kernel("forward", "_to_copy", "1", "2", size=2 * SIZE),
        kernel("forward", "exp", "2", "3"),
        end("forward", "1"),
        kernel("forward", "mm", "3", "4"),
        end("forward", "34"),
        kernel("backward", "mul", "02", "5"),
        kernel("backward", "mm", "5", "6"),
        end("backward", "2", 2 * SIZE),
        end("backward", "56"),
    )
    found = lives(compiled(made, unit()))
    assert found[1] == (1, 5)
    assert 2 not in found


def test_with_checkpointing_only_what_backward_does_not_read_is_dropped() -> None:
    forward = kernel("forward", "mm", "0", "1"), kernel("forward", "exp", "1", "2"), kernel("forward", "mm", "2", "3")
    made = backward_of_a_product(*forward, reads="2")
    found = lives(compiled(made, unit("selective")))
    assert found[2] == (2, 5)  # kept, as autograd does: the checkpoint chose it
    assert found[1] == (1, 2)
    assert found[3] == (3, 3)


# Real steps


SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 112, "vocab_size": 96, "use_cache": False}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
WORDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"mixed_precision": "bf16"},
    "selective": {"mixed_precision": "bf16", "activation_checkpointing": "selective"},
    "full": {"mixed_precision": "bf16", "activation_checkpointing": "full"},
}


@functools.cache
def simulated(words: str, compile: bool, layers: int = 2) -> Simulation:
    model, *feed = planning.hub("LlamaForCausalLM", "LlamaConfig", 64, **SIZES, num_hidden_layers=layers)
    workload = Workload("llama", model, planning.OPTIMIZERS["adamw foreach"], *feed)
    choices = Options(**{**WORDS[words], "compile": compile})
    return simulate(Job(workload, (2,), microbatch=2, choices=choices), whole=True)


def kept(made: Trace) -> int:
    """Bytes of activations when backward begins."""
    first = next(i for i, event in enumerate(made) if event.place.phase == "backward")
    return int(ledger.curve(made).by_kind["activations"].at(np.array([first]))[0])


def saved_by_torch(dtype: torch.dtype) -> int:
    """Bytes that a compiled decoder layer really keeps for backward, without parameters and tables of positions."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=1)).to(dtype)
    layer = model.model.layers[0]

    def run(graph: Any, inputs: Any) -> Any:
        return graph

    backend = aot_autograd(
        fw_compiler=run,
        bw_compiler=run,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )
    hidden = torch.randn(2, 64, 64, dtype=dtype, requires_grad=True)
    positions = torch.arange(64)[None]
    tables = model.model.rotary_emb(hidden, positions)
    made = torch.compile(layer, backend=backend)(hidden, position_embeddings=tables, position_ids=positions)
    not_counted = {each.untyped_storage().data_ptr() for each in (*layer.parameters(), *tables)}
    found: dict[int, int] = {}
    row = [made.grad_fn]
    for node in row:
        for tensor in getattr(node, "saved_tensors", ()):
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        row += [each for each, _ in node.next_functions if each is not None]
    return sum(size for address, size in found.items() if address not in not_counted)


@pytest.mark.rest
def test_a_block_keeps_as_much_as_torchs_partitioner_lets_it() -> None:
    """A block more keeps so much more: its input is the output of the one before it."""
    by_layers = [kept(simulated("bfloat16", True, layers).steady) for layers in (1, 2)]
    eagerly = [kept(simulated("bfloat16", False, layers).steady) for layers in (1, 2)]
    assert by_layers[1] - by_layers[0] == saved_by_torch(torch.bfloat16)
    assert by_layers[1] - by_layers[0] < 0.8 * (eagerly[1] - eagerly[0])


@pytest.mark.rest
@pytest.mark.parametrize("words", ["bfloat16", "selective", "full"])
def test_compiled_blocks_need_no_more_memory_and_the_same_products(words: str) -> None:
    eager, fused = simulated(words, False), simulated(words, True)
    assert fused.plan.compile
    for one, other in ((eager.first, fused.first), (eager.steady, fused.steady)):
        ledger.lifetimes(other)
        assert ledger.peak(other).bytes <= ledger.peak(one).bytes
        assert ledger.flops(other) == ledger.flops(one)
        assert ledger.received(other) == ledger.received(one)
        assert [event.op for event in other if isinstance(event, Kernel)] == [
            event.op for event in one if isinstance(event, Kernel)
        ]
        assert sum(isinstance(event, Allocation) for event in other) < sum(
            isinstance(event, Allocation) for event in one
        )
        assert ledger.curve(other).total.bytes[-1] == ledger.curve(one).total.bytes[-1]


@pytest.mark.rest
def test_a_checkpointed_block_keeps_less_by_the_output_of_its_last_product() -> None:
    eager, fused = ([kept(simulated("selective", each, layers).steady) for layers in (1, 2)] for each in (False, True))
    assert (eager[1] - eager[0]) - (fused[1] - fused[0]) == 2 * 64 * 64 * 2


@pytest.mark.rest
def test_fused_kernels_take_less_time() -> None:
    eager, fused = simulated("bfloat16", False).steady, simulated("bfloat16", True).steady
    device = hardware("h100")
    one, other = schedule(eager, device, 8, "compile"), schedule(fused, device, 8, "compile")
    assert other.compute_seconds <= one.compute_seconds
