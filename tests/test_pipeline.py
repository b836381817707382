"""Stages of a pipeline, each sharded, train as one process does: losses, gradients, norms, a tied head, checkpoints."""

from __future__ import annotations

import copy
import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import GPT2LMHeadModel

import trueshard
from cases import on_ranks
from checkpointing import scribble
from gathering import gradients, whole
from messages import naming
from parity import Pool, Ranks, assert_same
from resting import all_but

EXAMPLE = Path(__file__).parents[1] / "examples" / "pipeline.py"
EMBEDDING = "transformer.wte.weight"
STEPS = 3
Report = dict[str, Any]


def example() -> Any:
    """``examples/pipeline.py`` as a module."""
    if "example_pipeline" not in sys.modules:
        spec = importlib.util.spec_from_file_location("example_pipeline", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["example_pipeline"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["example_pipeline"])
    return sys.modules["example_pipeline"]


def grid(stages: int, world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (stages, world_size // stages), mesh_dim_names=("stage", "shard"))


def unsharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(example().CONFIG).double()
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1]}]
    groups.append({"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0})
    return model, torch.optim.AdamW(groups, lr=1e-2)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Report:
    """Parameters, their optimizer state and the groups' settings by the model's names, whole."""
    values = {name: {"value": p, **optimizer.state[p]} for name, p in model.named_parameters()}
    settings = [{key: each for key, each in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"values": whole(values), "settings": settings}


def one_process(rank: int, world_size: int, path: str) -> Report:
    """The same steps on the whole model; a checkpoint of it."""
    model, optimizer = unsharded()
    report: Report = {}
    for step in range(STEPS):
        tokens, labels = example().batch(step)
        logits = model(tokens).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        report[f"step {step}"] = {"loss": loss.item(), "norm": norm.item()}
        report[f"gradients {step}"] = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    trueshard.save(path, model=model, optimizer=optimizer)
    model.save_pretrained(f"{path}-published")
    return report | state_of(model, optimizer)


def pipelined(rank: int, world_size: int, stages: int, schedule: str, path: str, other: str) -> Report:
    """This stage's part of the report, by names of the whole model; it saves, loads what it saved, and ``other``."""
    mesh = grid(stages, world_size)
    pipeline = example().Pipeline(mesh, schedule, torch.float64)
    model, optimizer = pipeline.model, pipeline.optimizer
    report: Report = {}
    gradients: list[Any] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    )
    for step in range(STEPS):
        mine = (each.chunk(mesh["shard"].size())[mesh["shard"].get_local_rank()] for each in example().batch(step))
        loss, norm = pipeline.step(*mine)
        report[f"step {step}"] = {"loss": loss, "norm": norm.item()}
        report[f"gradients {step}"] = {model.whole_name(n): g for n, g in gradients[-1].items()}
    final = state_of(model, optimizer)
    pipeline.save(path)
    for place, near in ((path, 0.0), (other, 1e-12)):
        scribble(model, optimizer)
        pipeline.load(place)
        assert_same(state_of(model, optimizer), final, atol=near)
    pipeline.save(f"{path}-of-one")
    scribble(model)
    trueshard.load(f"{other}-published", model=model, names=model.whole_name)
    assert_same(state_of(model, optimizer), final, atol=1e-12)
    final["values"] = {model.whole_name(name): each for name, each in final["values"].items()}
    return report | final


def loaded(rank: int, world_size: int, path: str) -> Report:
    """What one process finds in a checkpoint of stages: with ``load``, and as transformers reads it."""
    model, optimizer = unsharded()
    scribble(model, optimizer)
    trueshard.check(path)
    trueshard.load(path, model=model, optimizer=optimizer)
    read = GPT2LMHeadModel.from_pretrained(path, dtype=torch.float64)
    assert_same(dict(read.named_parameters()), dict(model.named_parameters()))
    return state_of(model, optimizer)


SCHEDULES = [(4, 2, "1f1b"), (3, 3, "1f1b"), (4, 2, "gpipe")]


@pytest.mark.parametrize(("count", "stages", "schedule"), all_but(SCHEDULES[:1], SCHEDULES, unpack=True))
def test_stages_train_as_one_process(
    count: int, stages: int, schedule: str, alone: Ranks, pool: Pool, tmp_path: Path
) -> None:
    paths = [str(tmp_path / name) for name in ("stages", "one")]
    (expected,) = alone.run(one_process, paths[1])
    every = Ranks(count, pool).run(pipelined, stages, schedule, *paths)
    joined: dict[str, Any] = {}
    for found in every:
        for key, value in found.items():
            if key.startswith("step"):
                assert value["norm"] == every[0][key]["norm"]
                assert value["norm"] == pytest.approx(expected[key]["norm"], rel=1e-12)
                assert value["loss"] is None or value["loss"] == pytest.approx(expected[key]["loss"], rel=1e-12)
            elif key == "settings":
                assert value == expected[key]
            else:
                # The tied head, under its own name: bit-equal to the embedding.
                if "lm_head.weight" in value:
                    assert_same(value["lm_head.weight"], every[0][key][EMBEDDING])
                joined.setdefault(key, {}).update({n: v for n, v in value.items() if n != "lm_head.weight"})
    assert every[-1]["step 0"]["loss"] is not None
    for key, values in joined.items():
        assert_same({name: values[name] for name in expected[key]}, expected[key], atol=1e-12)
        assert len(values) == len(expected[key])
    (found,) = alone.run(loaded, paths[0])
    assert_same(found["values"], {name: joined["values"][name] for name in found["values"]})
    assert found["settings"] == expected["settings"]
    # Equal values give equal files, whoever writes them.
    for file in ("model.safetensors", "optimizer.safetensors", "config.json"):
        assert (tmp_path / "stages-of-one" / file).read_bytes() == (tmp_path / "one" / file).read_bytes(), file


class Layer(nn.Module):
    """With a 0-dim parameter, which every rank of a stage holds whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.inner(x).tanh()


def layers() -> nn.Sequential:
    """Four layers, of which the first and the last have one weight."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4))).double()
    model[3].inner.weight = model[0].inner.weight
    return model


def staged(mesh: DeviceMesh, *, tie: bool = True, recompute: str = "none") -> nn.Sequential:
    """This rank's half of ``layers``, sharded; the copies of the tied weight begin differently."""
    number = mesh["stage"].get_local_rank()
    model = layers()
    half = nn.Sequential(*(model[2 * number + each] for each in range(2)))
    if number == 1:
        half[1].inner.weight = nn.Parameter(torch.ones(6, 6).double())
    plan = trueshard.Plan(pipeline=True, activation_checkpointing=recompute)
    plan = trueshard.shard(half, plan=plan, mesh=mesh["shard"])
    assert {unit.activation_checkpointing for unit in plan.units if unit.kind == "block"} == {recompute}
    if tie:
        trueshard.tie_over(mesh["stage"], {"0.inner.weight": half[number].inner.weight})
    return half


def whole_name(number: int) -> Any:
    """The names of ``layers`` in the half ``number``."""
    return lambda name: f"{int(name[0]) + 2 * number}{name[1:]}"


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target, reduction="sum")


def rows(step: int, count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, 6, generator=generator).double(), torch.randn(count, 6, generator=generator).double()


def accumulated(rank: int, world_size: int, recompute: str = "none", more: int = 0) -> Report:
    """Gradients after two steps of a schedule without a step of an optimizer, by names of the whole model.

    The second step has ``more`` rows, for which it needs a schedule of its own.
    """
    if world_size == 1:
        model = layers()
        for step in range(2):
            x, y = rows(step, 8 + step * more)
            (squared(model(x), y) / 2).backward()  # over the two shards, as ranks average
        return {name: p.grad for name, p in model.named_parameters()}
    mesh = grid(2, world_size)
    number, shard = mesh["stage"].get_local_rank(), mesh["shard"].get_local_rank()
    model = staged(mesh, recompute=recompute)
    for step in range(2):
        if step == 0 or more:
            stage = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh["stage"].get_group())
            schedule = Schedule1F1B(stage, 2, loss_fn=squared, scale_grads=False)
        x, y = (tensor.chunk(2)[shard] for tensor in rows(step, 8 + step * more))
        schedule.step(x) if number == 0 else schedule.step(target=y)
    return {whole_name(number)(name): p.grad.full_tensor() for name, p in model.named_parameters()}


@on_ranks(2)
def test_a_tie_that_no_schedule_added_up_is_not_stepped(rank: int, world_size: int) -> None:
    model = staged(grid(2, world_size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(rows(0)[0]).sum().backward()
    before = model[0].inner.weight.full_tensor().detach().clone()
    with pytest.raises(RuntimeError, match=naming("SGD", "'0.inner.weight'", "schedule", "zero_grad")):
        optimizer.step()
    assert torch.equal(model[0].inner.weight.full_tensor(), before)
    optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize(
    ("recompute", "more"),
    all_but([("none", 8)], [("none", 0), ("none", 8), ("full", 8), ("selective", 0)], unpack=True),
)
def test_gradients_add_up_over_steps_of_a_schedule(recompute: str, more: int, alone: Ranks, ranks4: Ranks) -> None:
    (expected,) = alone.run(accumulated, recompute, more)
    found = ranks4.run(accumulated, recompute, more)
    assert_same(found[2].pop("3.inner.weight"), found[0]["0.inner.weight"])
    assert_same(found[0] | found[2], expected, atol=1e-12)


ORDERS = (2.0, 1.0, 3.0, math.inf, -math.inf, 0.0, -1.0)


def norms(rank: int, world_size: int) -> Report:
    """Norms of gradients that are set by hand, one stage in bfloat16, one without any; scaled gradients of two."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6, dtype=d) for d in (torch.float64, torch.bfloat16, torch.float64)))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    model[2].zero_grad()
    clip: Any = nn.utils.clip_grad_norm_
    if world_size > 1:
        mesh = grid(world_size, world_size)
        mine = model[rank]
        trueshard.shard(mine, plan=trueshard.Plan(pipeline=True), mesh=mesh["shard"])

        def clip(parameters: Any, *args: Any, **options: Any) -> torch.Tensor:
            return trueshard.clip_grad_norm_(parameters, *args, **options, over=mesh["stage"])

        model = nn.Sequential(mine)
    report: Report = {f"order {order}": clip(model.parameters(), math.inf, order) for order in ORDERS}
    report["clipped"] = clip(model.parameters(), 0.5)
    report["gradients"] = whole([p.grad for p in model.parameters() if p.grad is not None])
    if world_size == 1:
        return report
    for parameter in model.parameters():
        if rank == 1:
            parameter.grad.fill_(math.nan)
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        clip(model.parameters(), 0.5, error_if_nonfinite=True)
    model.zero_grad()
    assert clip(model.parameters(), 1.0) == 0.0
    with pytest.raises(TypeError, match=naming("over", "int")):
        trueshard.clip_grad_norm_(model.parameters(), 1.0, over=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=naming("over", "2-D")):
        trueshard.clip_grad_norm_(model.parameters(), 1.0, over=mesh)
    return report


def test_the_norm_is_that_of_all_stages(alone: Ranks, ranks3: Ranks) -> None:
    (expected,) = alone.run(norms)
    found = ranks3.run(norms)
    gradients = [gradient for each in found for gradient in each.pop("gradients")]
    assert_same(gradients, expected.pop("gradients"), rtol=1e-2)
    for each in found:
        assert_same(each, expected, rtol=5e-3)  # of bfloat16, to which torch rounds the norm of each gradient


@on_ranks(2)
def test_what_cannot_be_tied_is_refused_on_every_rank(rank: int, world_size: int) -> None:
    mesh = grid(2, world_size)
    model, stages = staged(mesh, tie=False), mesh["stage"]
    weight, bias = model[rank].inner.weight, model[0].inner.bias
    calls: list[tuple[Any, str, Any]] = [
        ({f"weight {rank}": weight}, naming("stage 1", "weight 1", "None"), stages),
        ({"weight": weight if rank else None}, naming("'weight'", "1 of 2 stages"), stages),
        ({"weight": weight if rank else bias}, naming("'weight'", "shape", "stage 0", "stage 1"), stages),
        ({"weight": weight}, naming("stages", "2-D", 'mesh["stage"]'), mesh),
    ]
    for given, words, over in calls:
        with pytest.raises(ValueError, match=words):
            trueshard.tie_over(over, given)
    with pytest.raises(ValueError if rank else RuntimeError, match="no parameter of a sharded stage"):
        trueshard.tie_over(stages, {"weight": nn.Parameter(torch.ones(6, 6)) if rank else weight})
    trueshard.tie_over(stages, {"weight": weight})
    assert_same(weight.full_tensor(), layers()[0].inner.weight)
    with pytest.raises(ValueError, match=naming("'weight'", "already")):
        trueshard.tie_over(stages, {"weight": weight})


@on_ranks(2)
def test_checkpoints_that_do_not_fit_the_stages_are_refused(rank: int, world_size: int, tmp_path: Path) -> None:
    mesh = grid(2, world_size)
    model = staged(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank)
    given: Any = {"model": model, "names": whole_name(rank)}
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"model": staged(mesh, tie=False)}, naming("'0.scale'", "two stages", "names", "tie_over")),
        (given | {"optimizer": optimizer}, naming("settings of groups", "0.1", "1.1")),
        (given | {"average": {"weight": model[0].inner.bias}}, naming("more/average/weight", "one stage")),
        (given | {"names": lambda name: "all"}, naming("'all'", "two tensors")),
    ]
    for arguments, words in refusals:
        with pytest.raises(ValueError, match=words):
            trueshard.save(tmp_path / "refused", **arguments)
    trueshard.save(tmp_path / "saved", **given, progress={"step": 3})
    assert trueshard.load(tmp_path / "saved", **given)["progress"] == {"step": 3}
    bias = model[1].inner.bias.full_tensor()
    del model[1]
    with pytest.raises(ValueError, match=naming("3.inner.bias", "does not have")):
        trueshard.load(tmp_path / "saved", **given)
    found = trueshard.load(tmp_path / "saved", **given, strict=False)
    left_out = {f"{each}.{name}" for each in (1, 3) for name in ("scale", "inner.bias")} | {"1.inner.weight"}
    assert set(found.unexpected) == left_out, bias
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_names_rename_what_one_process_saves(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    names = {"0.weight": "first.weight", "0.bias": "first.bias"}
    trueshard.save(tmp_path / "renamed", model=model, optimizer=optimizer, names=names)
    assert {"model/first.weight", "model/1.weight"} <= {t.key for t in trueshard.inspect(tmp_path / "renamed").tensors}
    expected = copy.deepcopy(state_of(model, optimizer))
    scribble(model, optimizer)
    trueshard.load(tmp_path / "renamed", model=model, optimizer=optimizer, names=names)
    assert_same(state_of(model, optimizer), expected)
