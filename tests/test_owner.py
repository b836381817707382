"""Contract line 9, whole-tensor optimizers: the rank that owns a parameter makes the update that one device would."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import trueshard
from cases import as_on_one_device
from messages import naming
from parity import Ranks, assert_same
from resting import all_but
from stepping import WHOLE, ByParameter, Mixed, Whole, build, loss_of, parameters, shard_over, train
from traffic import Traffic
from trueshard.optim import owners as owner
from trueshard.optim.owners import assign, update_cost


@contextlib.contextmanager
def batches_of(size: int) -> Iterator[None]:
    """Inside, an owner takes about `size` bytes in a batch."""
    before, owner.BATCH_BYTES = owner.BATCH_BYTES, size
    try:
        yield
    finally:
        owner.BATCH_BYTES = before


@pytest.mark.parametrize(
    ("count", "batch_bytes", "mesh"),
    all_but(
        [(2, 32 << 20, False)],
        [(2, 32 << 20, False), (3, 32 << 20, False), (3, 150, False), (4, 300, True)],
        unpack=True,
    ),
)
@as_on_one_device("count")
def test_owners_update_as_one_process_in_one_batch_or_several_and_on_two_mesh_dimensions(
    rank: int, world_size: int, batch_bytes: int, mesh: bool
) -> dict[str, Any]:
    """Each kind for five steps, `aside` without gradients in odd ones; the counters of every group."""
    found = {}
    for name, make in WHOLE.items():
        model = build()
        optimizers = make(model)
        if world_size > 1:
            two = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard")) if mesh else None
            trueshard.shard(model, *optimizers, mesh=two)
        with batches_of(batch_bytes):
            train(model, optimizers, rank, world_size, range(5))
        found[name] = parameters(model), [g.get("step") for each in optimizers for g in each.param_groups]
    return found


class Few(nn.Module):
    """Fewer parameters than ranks, each with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(6, 2, bias=False)

    def forward(self, x: torch.Tensor, aside: bool = True) -> torch.Tensor:
        return self.only(x)


@pytest.mark.rest
@pytest.mark.parametrize("count", [3, 4])
@as_on_one_device("count")
def test_more_ranks_than_parameters_and_rows(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for name in ("Muon", "Adafactor", "Whole"):
        torch.manual_seed(0)
        model = Few()
        optimizers = [ALL_WHOLE[name](list(model.parameters()))]
        shard_over(world_size, model, *optimizers)
        train(model, optimizers, rank, world_size)
        found[name] = parameters(model)
    return found


@pytest.mark.rest
@as_on_one_device(2)
@batches_of(150)
def test_a_closure_is_called_once_however_many_batches(rank: int, world_size: int) -> Any:
    found = {}
    for name, make in WHOLE.items():
        if name == "Mixed":
            continue
        model = build()
        optimizers = make(model)
        shard_over(world_size, model, *optimizers)
        calls = []
        for step in range(3):

            def closure(step: int = step, model: Any = model, calls: Any = calls) -> torch.Tensor:
                model.zero_grad()
                loss = loss_of(model, step, rank, world_size)
                loss.backward()
                calls.append(loss)
                return loss

            for each in optimizers:
                assert each.step(closure) is calls[-1]
        found[name] = len(calls), parameters(model)
    return found


class Count:
    """An object that an optimizer keeps."""

    value = 0


class Counts(ByParameter):
    """Whole-tensor, at a rate that falls with a count of steps, one for all, which it keeps where ``kind`` says."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params)
        self.kind, self.count, self.own = kind, 0, Count()
        self.param_groups[0]["own"] = self.own  # one object in two places

    def prepare(self) -> None:
        self.number = {
            "state": self.state.get("n", 0),
            "attribute": self.count,
            "object": self.own.value,
            "with gradients": self.param_groups[0].get("n", 0),
        }[self.kind]

    def update(self, p: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        now = self.number + 1
        self.state["n"] = self.count = self.own.value = group["n"] = now
        assert self.param_groups[0]["own"].value == now
        p.sub_(group["lr"] / now * p.grad / (p.grad.norm() + 0.1))


@pytest.mark.rest
@pytest.mark.parametrize(("count", "batch_bytes"), [(2, 32 << 20), (3, 150)])
@as_on_one_device("count")
def test_a_count_of_steps_grows_by_one_a_step_however_many_batches(rank: int, world_size: int, batch_bytes: int) -> Any:
    """In two dtypes, and in batches of which some have nothing for a rank."""
    found = {}
    for kind in ("state", "attribute", "object", "with gradients"):
        model = build()
        model.aside.double()
        optimizer = Counts(model.parameters(), kind)
        shard_over(world_size, model, optimizer, units="Linear")
        own = optimizer.own
        for step in range(3):
            for number, p in enumerate(model.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(9 * step + number)).to(p.dtype)
            with batches_of(batch_bytes):
                optimizer.step()
        assert optimizer.own is own
        found[kind] = parameters(model), (optimizer.state["n"], optimizer.count, own.value)
    return found


# Memory and state


def elements(value: Any) -> int:
    """In the tensors of a nested state; a DTensor counts with its local shard."""
    if isinstance(value, DTensor):
        return value.to_local().numel()
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, dict):
        return sum(map(elements, value.values()))
    return sum(map(elements, value)) if isinstance(value, list) else 0


ALL_WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Muon": lambda members: torch.optim.Muon(members),
    "Adafactor": lambda members: torch.optim.Adafactor(members),
    "Whole": lambda members: Whole(members),
    "Mixed": lambda members: Mixed([{"params": members, "whole": True}]),
}


def state_sizes(rank: int, world_size: int) -> dict[str, int]:
    found = {}
    for name, make in ALL_WHOLE.items():
        model = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(6)))
        optimizer = make(list(model.parameters()))
        shard_over(world_size, model, optimizer, units=["Linear"])
        for _ in range(2):
            model(torch.ones(2, 12)).sum().backward()
            optimizer.step()
        found[name] = sum(elements(entries) for entries in optimizer.state.values())
    return found


def test_state_lives_once_over_all_ranks(alone: Ranks, sizes: list[Ranks]) -> None:
    (expected,) = alone.run(state_sizes)
    for ranks in sizes:
        found = ranks.run(state_sizes)
        for name, total in expected.items():
            held = [each[name] for each in found]
            assert sum(held) == total, name
            assert max(held) == total / ranks.count, name


# Weights that others write


@pytest.mark.parametrize(
    ("how", "count"),
    all_but([("one rank", 2)], [("mul_", 2), ("one rank", 2), ("data", 2), ("swap", 3), ("load", 3)], unpack=True),
)
@as_on_one_device("count")
def test_weights_written_between_steps_reach_the_owner(rank: int, world_size: int, how: str) -> Any:
    """Weights change between steps behind the optimizer's back."""
    found = {}
    for name in ("Muon", "Adafactor", "Whole"):
        model = build()
        optimizers = WHOLE[name](model)
        shard_over(world_size, model, *optimizers)
        train(model, optimizers, rank, world_size, [0])
        average = {n: p.detach().clone() for n, p in model.named_parameters()}
        train(model, optimizers, rank, world_size, [2])
        with torch.no_grad():
            for n, p in model.named_parameters():
                if how == "mul_":
                    p.mul_(1.5)
                elif how == "data":
                    p.data.mul_(1.5)
                elif how == "swap":
                    now = p.clone()
                    p.copy_(average[n])
                    average[n] = now
                elif how == "one rank" and p.ndim:
                    if world_size == 1:
                        p[-(-p.shape[0] // 2) :].mul_(1.5)  # what the second of two ranks holds
                    elif rank == 1:
                        p.to_local().mul_(1.5)
        if how == "load":
            model.load_state_dict({n: 1.5 * p for n, p in parameters(model).items()})
        train(model, optimizers, rank, world_size, [4, 6])
        found[name] = parameters(model)
    return found


# Groups that change


@pytest.mark.rest
@as_on_one_device(3)
def test_groups_come_go_and_change_places(rank: int, world_size: int) -> Any:
    model = build()
    optimizer = Mixed([{"params": model.layers[0].parameters(), "whole": True}, {"params": model.first.parameters()}])
    shard_over(world_size, model, optimizer)
    train(model, optimizer, rank, world_size, [0])
    optimizer.add_param_group({"params": model.last.parameters(), "whole": True, "lr": 0.1})
    train(model, optimizer, rank, world_size, [2])
    del optimizer.param_groups[0]
    train(model, optimizer, rank, world_size, [4])
    optimizer.param_groups.reverse()
    train(model, optimizer, rank, world_size, [6])
    del optimizer.param_groups[1]
    optimizer.add_param_group({"params": model.layers[0].parameters()})  # what was whole before
    train(model, optimizer, rank, world_size, [8])
    return parameters(model)


class ByPlace(torch.optim.Optimizer):
    """Whole-tensor; reads a parameter's place in its group, its name there, and how many there are."""

    def __init__(self, named: Any, lr: float = 0.1) -> None:
        super().__init__(named, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            names = group.get("param_names", ["weight"] * len(group["params"]))
            for i, (name, p) in enumerate(zip(names, group["params"], strict=True)):
                if p.grad is not None:
                    rate = group["lr"] * 0.5**i / len(group["params"]) * (2.0 if name.endswith("weight") else 1.0)
                    p.sub_(rate * p.grad / (p.grad.norm() + 0.1))


class Careless(ByParameter):
    """Whole-tensor; makes state for every parameter, with a gradient or without."""

    def prepare(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["step"] = self.state[p].get("step", 0) + 1

    def update(self, p: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.sub_(2 * group["lr"] / state["step"] * p.grad / (p.grad.norm() + 0.1))


@batches_of(150)  # some ranks have nothing in some batches
def peculiar(rank: int, world_size: int, kind: str) -> Any:
    """What the class reads beside a parameter is as on one process, or `shard()` refuses it by name."""
    model = build()
    makes: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "by place": lambda: ByPlace(model.parameters()),
        "by name": lambda: ByPlace(model.named_parameters()),
        "careless": lambda: Careless(model.parameters()),
    }
    optimizer = makes[kind]()
    if world_size > 1:
        try:
            trueshard.shard(model, optimizer)
        except ValueError as error:
            if type(optimizer).__name__ not in str(error):
                raise
            return "refused"
    train(model, optimizer, rank, world_size, range(4))
    if world_size > 1:
        known = {id(p) for p in model.parameters()}
        assert all(id(key) in known for key in optimizer.state), "state of what is no parameter"
    optimizer.state_dict()
    return parameters(model)


@pytest.mark.parametrize("kind", all_but(["by place"], ["by place", "by name", "careless"]))
def test_what_a_class_reads_beside_a_parameter(kind: str, alone: Ranks, sizes: list[Ranks]) -> None:
    (expected,) = alone.run(peculiar, kind)
    for ranks in sizes:
        for found in ranks.run(peculiar, kind):
            if found != "refused":
                assert_same(found, expected, rtol=1e-4, atol=1e-6)


# Errors


def some_ranks_only(rank: int, world_size: int) -> None:
    model = build()
    optimizer = Whole(model.parameters())
    trueshard.shard(model, optimizer)
    loss_of(model, 0, rank, world_size).backward()
    if rank == 0:
        model.layers[0].up.weight.grad = None
    optimizer.step()


def test_gradients_on_some_ranks_alone_are_an_error_on_every_rank(ranks2: Ranks, ranks3: Ranks) -> None:
    for ranks in (ranks2, ranks3):
        ranks.raises(some_ranks_only, match=naming("RuntimeError", "gradients", "same parameters"))


class Fails(Whole):
    """Raises at its second step, before it touches anything."""

    fail_at = -1

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if self.param_groups[0].get("step") == self.fail_at:
            raise ArithmeticError("as told")
        return super().step(closure)


@as_on_one_device(2)
def test_after_an_exception_the_next_step_works(rank: int, world_size: int) -> Any:
    model = build()
    optimizer = Fails(model.parameters())
    shard_over(world_size, model, optimizer)
    train(model, optimizer, rank, world_size, [0])
    optimizer.fail_at = 1
    loss_of(model, 1, rank, world_size).backward()
    with pytest.raises(ArithmeticError):
        optimizer.step()
    optimizer.fail_at = -1
    if world_size > 1:
        assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
    optimizer.zero_grad()
    train(model, optimizer, rank, world_size, [2, 4])
    return parameters(model)


# What it costs


def traffic(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    """Bytes that this rank received in a step after the first, and how often ranks spoke."""
    model = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(2 * world_size)))
    optimizer: Any = torch.optim.Muon(model.parameters()) if kind == "Muon" else Whole(model.parameters())
    trueshard.shard(model, optimizer, units=["Linear"])
    for _ in range(2):
        model(torch.ones(2, 24)).sum().backward()
        with Traffic() as seen:
            optimizer.step()
        optimizer.zero_grad()
    size = sum(p.numel() for p in model.parameters())
    return {"bytes": seen.received["all_to_all"], "rest": seen.total - seen.received["all_to_all"], "size": size}


@pytest.mark.parametrize("kind", all_but(["Muon"], ["Muon", "Whole"]))
def test_received_bytes_are_the_limit_exactly(kind: str, ranks2: Ranks, ranks3: Ranks, ranks4: Ranks) -> None:
    for ranks in (ranks2, ranks3, ranks4):
        n = ranks.count
        for found in ranks.run(traffic, kind):
            assert found["bytes"] == 2 * (n - 1) / n**2 * found["size"] * 4
            assert found["rest"] <= 64


def llama(hidden: int, feed_forward: int, layers: int, key_value: int, vocabulary: int, tied: bool) -> list[Any]:
    """The shapes of a Llama's parameters."""
    block = [(hidden, hidden), (key_value, hidden), (key_value, hidden), (hidden, hidden)]
    block += [(feed_forward, hidden), (feed_forward, hidden), (hidden, feed_forward), (hidden,), (hidden,)]
    ends = [(vocabulary, hidden)] * (1 if tied else 2)
    return [ends[0], *block * layers, (hidden,), *ends[1:]]


LLAMAS = {
    "1B": llama(2048, 8192, 16, 512, 128256, tied=True),
    "8B": llama(4096, 14336, 32, 1024, 128256, tied=False),
}


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("name", ["1B", "8B"])
@pytest.mark.parametrize("ends", [False, True], ids=["blocks", "with embeddings"])
def test_owners_are_balanced(name: str, ranks: int, ends: bool) -> None:
    """Within a tenth of an equal share, or of what no assignment avoids: one parameter is more than a share by itself,
    or of the largest, one more than there are ranks, two must meet.
    """
    shapes = LLAMAS[name] if ends else [shape for shape in LLAMAS[name] if shape[0] != 128256]
    owners = assign(shapes, ranks)
    for weigh in (lambda shape: torch.Size(shape).numel(), update_cost):
        held = [sum(weigh(s) for s, o in zip(shapes, owners, strict=True) if o == rank) for rank in range(ranks)]
        largest = [0.0, *sorted(map(weigh, shapes))][-ranks - 1 :]
        share = max(sum(held) / ranks, largest[-1], largest[0] + largest[1])
        assert max(held) <= 1.1 * share
