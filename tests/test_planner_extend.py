"""A model whose blocks repeat is simulated with a few of them; event for event, the traces are the whole model's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from trueshard.options import Options
from trueshard.planner.inputs.factories import Factory
from trueshard.planner.simulation.repeats import FEWEST, find_runs, shorten
from trueshard.planner.simulation.simulate import Simulation, simulate
from trueshard.planner.trace import Allocation, Event, Free, Trace
from trueshard.planner.workload import Job, Workload
from trueshard.plans import Plan, Unit

SEQUENCE = 16
FEW = FEWEST + 1
"""Blocks of which enough are equal, though the last one is not freed after forward."""


def lora(layers: int) -> nn.Module:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
    }
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False, **sizes))
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def t5(layers: int) -> nn.Module:
    """Blocks of the decoder but the first are equal; its head is its embedding."""
    sizes = {"d_model": 32, "d_ff": 56, "d_kv": 8, "num_heads": 4, "vocab_size": 97}
    return T5ForConditionalGeneration(
        T5Config(
            num_layers=1,
            num_decoder_layers=layers + 1,
            use_cache=False,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            **sizes,
        )
    )


class Blocks(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Embedding(97, 32)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(32, 97)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.first(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.last(hidden).flatten(0, 1), labels.flatten())


class Block(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 32))


def equal(count: int) -> nn.Module:
    return Blocks([Block(48) for _ in range(count)])


def alternating(pairs: int) -> nn.Module:
    """Two kinds of blocks in turn, of which one knows its place in the list, and one odd one at the end."""
    blocks = [Block(80 if i % 2 else 48) for i in range(2 * pairs)]
    for i in range(1, 2 * pairs, 2):
        vars(blocks[i])["layer_idx"] = i
    return Blocks([*blocks, Block(64)])


class Pair(nn.Linear):
    """A block of two parameters."""


def half_gathered(count: int) -> nn.Module:
    """Of each block, a part is a unit if `Block` is, and the rest is the root's."""
    return Blocks([nn.Sequential(nn.Linear(32, 32), Block(48)) for _ in range(count)])


def half_frozen(count: int) -> nn.Module:
    """The first half is a run, and the second is another."""
    model = equal(count)
    for block in model.blocks[: count // 2]:
        block.requires_grad_(False)
    return model


def adamw(**more: Any) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    return lambda model: [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **more)]


def by_kind(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [
        torch.optim.SGD(
            [{"params": matrices, "momentum": 0.9}, {"params": [p for p in model.parameters() if p.ndim < 2]}]
        )
    ]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found = model(input_ids=batch, labels=batch)
    return found if isinstance(found, torch.Tensor) else found.loss


def job(model: Callable[[], nn.Module], optimizers: Any = None, ranks: tuple[int, ...] = (2,), **more: Any) -> Job:
    words = more.pop("words", {})
    workload = Workload(
        "model",
        lambda: Factory("model", model, {}).build().model,
        optimizers or adamw(foreach=True),
        lambda microbatch, sequence: torch.randint(0, 97, (microbatch, sequence)),
        loss_of,
        SEQUENCE,
    )
    return Job(workload, ranks, microbatch=2, choices=Options(**words), **more)


def canonical(trace: Trace) -> list[tuple[Any, ...]]:
    """Events with storages numbered as they first appear, so that traces of two simulations can be compared."""
    numbers: dict[int, int] = {}

    def told(event: Event) -> tuple[Any, ...]:
        # Shapes of what all blocks share are not known where they were extended; nor which storages kernels use.
        left_out = {"place", "storage", "shape", "reads", "writes"}
        if event.place.phase == "clip" and not event.place.unit:
            left_out |= {"bytes", "read", "written"}  # rounded to rows, see below
        told = [getattr(event, field.name) for field in dataclasses.fields(event) if field.name not in left_out]
        if isinstance(event, (Allocation, Free)):
            told.append(numbers.setdefault(event.storage, len(numbers)))
        return (type(event).__name__, event.place.phase, event.place.unit, *told)

    held = sorted((each.unit, each.bytes, each.kind, each.what, each.storage) for each in trace.resident)
    for *_, storage in held:
        numbers.setdefault(storage, len(numbers))
    return [("held", *each[:4]) for each in held] + [told(event) for event in trace.events]


def partial_norms(trace: Trace) -> int:
    """Bytes that clipping takes and reads outside of units."""
    clip = [event for event in trace.events if event.place.phase == "clip" and not event.place.unit]
    return sum(event.bytes if isinstance(event, Allocation) else getattr(event, "read", 0) for event in clip)


def assert_equal(extended: Simulation, whole: Simulation) -> None:
    assert extended.plan == whole.plan
    for step in ("first", "steady"):
        one, two = canonical(getattr(extended, step)), canonical(getattr(whole, step))
        for at, (a, b) in enumerate(zip(one, two, strict=False)):
            assert a == b, f"{step}, event {at}"
        assert len(one) == len(two)
        on_host = [getattr(each, step).host_bytes for each in (extended, whole)]
        assert abs(on_host[0] - on_host[1]) <= 4 * len(whole.plan.units), "a scalar a block"
        rows = [partial_norms(getattr(each, step)) for each in (extended, whole)]
        assert abs(rows[0] - rows[1]) <= 4200 * len(whole.plan.units), "one row of 1024 elements a block"


CASES: dict[str, Job] = {
    "lora, always, recomputed, on a CPU": job(
        lambda: lora(FEWEST), words={"reshard_after_forward": "always", "activation_checkpointing": "full"}, on_cpu=True
    ),
    "t5, never, selective, bf16": job(
        lambda: t5(FEWEST),
        words={
            "reshard_after_forward": "never",
            "activation_checkpointing": "selective",
            "mixed_precision": "bf16",
        },
    ),
    "alternating, replicas, accumulation": job(lambda: alternating(FEWEST), ranks=(2, 2), accumulation=2),
    "two groups of SGD, first half frozen": job(lambda: half_frozen(2 * FEW), by_kind),
    **{
        f"compiled, {recompute}, bf16": job(
            lambda: equal(FEW),
            words={"units": "Block", "compile": True, "mixed_precision": "bf16", "activation_checkpointing": recompute},
        )
        for recompute in ("none", "selective")
    },
    "two parameters a block": job(
        lambda: Blocks([Pair(32, 32) for _ in range(FEW)]), words={"units": "Pair", "mixed_precision": "bf16"}
    ),
    "offload, bf16": job(lambda: equal(FEW), words={"offload": "cpu", "mixed_precision": "bf16"}),
    "offload, 3 ranks, uneven": job(lambda: equal(FEW), words={"offload": "cpu"}, ranks=(3,)),
}


@pytest.mark.rest
@pytest.mark.parametrize("name", CASES)
def test_an_extended_trace_is_the_whole_trace(name: str) -> None:
    extended, whole = simulate(CASES[name]), simulate(CASES[name], whole=True)
    assert extended.whole_because == ""
    assert extended.models == len(find_runs(CASES[name].workload.model(), whole.plan)) + 1 >= 2
    assert_equal(extended, whole)


class Apart(nn.Module):
    """Two matrices with a small one between them, which eight ranks cut along columns.

    Gradients of the two are laid beside each other for the step. A third, in a unit of its own, is so large that it
    steps alone, behind all that step together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one, self.small, self.two = (nn.Linear(32, rows, bias=False) for rows in (2**14, 3, 2**14))
        self.large = nn.Linear(32, 2**20, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.one(x) + self.two(x))[..., :32] + self.small(x).sum(-1, keepdim=True) + self.large(x)[..., :32]


@pytest.mark.rest
@pytest.mark.parametrize("foreach", [True, False])
def test_what_is_freed_behind_a_large_step_belongs_to_its_own_block(foreach: bool) -> None:
    words = {"units": ["Apart", "*.large"], "reshard_after_forward": "always"}
    apart = job(lambda: Blocks([Apart() for _ in range(FEWEST)]), adamw(foreach=foreach), (8,), words=words)
    extended = simulate(apart)
    assert extended.whole_because == ""
    assert_equal(extended, simulate(apart, whole=True))


class Growing(nn.Module):
    """Blocks that are equal but are given more and more to do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(97, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(FEW))
        self.last = nn.Linear(32, 97)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.first(input_ids)
        for i, block in enumerate(self.blocks):
            hidden = torch.cat([hidden, block(hidden[:, : i + 1])], dim=1)
        return nn.functional.cross_entropy(self.last(hidden[:, : labels.size(1)]).flatten(0, 1), labels.flatten())


@pytest.mark.rest
def test_blocks_that_behave_differently_are_all_run() -> None:
    found = simulate(job(Growing))
    assert "behave differently" in found.whole_because
    assert_equal(found, simulate(job(Growing), whole=True))


def plan_of(model: nn.Module) -> Plan:
    blocks = [name for name, _ in model.named_modules() if name and name.rpartition(".")[2].isdecimal()]
    return Plan(units=tuple(Unit(name, (name,), "block", 1, 4, 1, "float32") for name in blocks))


def test_runs_are_found_by_what_blocks_are() -> None:
    model = alternating(9)
    (run,) = find_runs(model, plan_of(model))
    assert (run.container, run.start, run.period, run.count) == ("blocks", 0, 2, 9)
    model.blocks[7][0].weight.requires_grad_(False)
    assert [(run.start, run.count) for run in find_runs(model, plan_of(model))] == []
    with torch.device("meta"):
        deep = lora(30)
    deep.base_model.model.model.layers[3].self_attn.scaling = 0.3
    (run,) = find_runs(deep, plan_of(deep))
    assert (run.container, run.start, run.count) == ("base_model.model.model.layers", 4, 26)


def test_what_is_left_of_a_shortened_list_keeps_its_names() -> None:
    model = alternating(9)
    plan = plan_of(model)
    left = shorten(model, plan, find_runs(model, plan), 2)
    assert {unit.name.split(".")[1] for unit in left.units} == {"0", "1", "2", "3", "18"}
    assert [name for name, _ in model.blocks.named_children()] == ["0", "1", "2", "3", "18"]
    assert model.blocks[4] is model.blocks[-1] is model.get_submodule("blocks.18")
    assert len(model.blocks[1:]) == len(model.blocks) - 1 == 4


def test_blocks_that_share_a_parameter_are_no_run() -> None:
    model = alternating(9)
    for block in model.blocks[:-1]:
        block[0].bias = model.blocks[0][0].bias if block[0].out_features == 48 else block[0].bias
    assert find_runs(model, plan_of(model)) == []


@pytest.mark.rest
def test_blocks_whose_parameters_the_root_gathers_are_no_run() -> None:
    assert find_runs(alternating(9), Plan(units=(Unit("", ("",), "root", 1, 4, 1, "float32"),))) == []
    parts = job(lambda: half_gathered(FEW), words={"units": "Block"})
    found = simulate(parts)
    assert [unit.name for unit in found.plan.units] == ["", *(f"blocks.{i}.1" for i in range(FEW))]
    assert find_runs(half_gathered(FEW), found.plan) == []
    assert_equal(found, simulate(parts, whole=True))
