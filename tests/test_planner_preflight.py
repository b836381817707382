"""What would fail at the first forward is found before there is a GPU, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from messages import lacking
from resting import all_but
from trueshard.options import Options
from trueshard.planner.inputs.workloads import workload_of
from trueshard.planner.simulation.preflight import Problem, preflight
from trueshard.planner.workload import Job
from trueshard.plans import Plan


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.up(hidden).relu())


class Model(nn.Module):
    """Sound; each test breaks one thing."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.inlet(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def problems(model: Any, **given: Any) -> list[Problem]:
    shards = {key: given.pop(key) for key in ("plan", "microbatch") if key in given}
    ranks, choices = given.pop("ranks", (8,)), Options(**given.pop("words", {}))
    return preflight(Job(workload_of(model, **given), ranks, choices=choices, **shards))


def the_problem(model: Any, **given: Any) -> Problem:
    [problem] = problems(model, **given)
    assert "\n" not in str(problem)
    return problem


@pytest.mark.parametrize("ranks", all_but([(2, 4)], [(1,), (8,), (2, 4)]))
def test_a_sound_model_has_no_problem(ranks: tuple[int, ...]) -> None:
    assert problems(Model, ranks=ranks) == []
    assert problems(Model, words={"mixed_precision": "bf16", "activation_checkpointing": "full"}) == []
    assert problems(Model, plan=Plan(reshard_after_forward="never")) == []


@pytest.mark.rest
def test_a_sound_configuration_has_no_problem(tmp_path: Path) -> None:
    fields = {
        "model_type": "mixtral",
        "hidden_size": 64,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 128,
        "num_local_experts": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert problems(tmp_path, sequence=32, optimizer="adafactor", words={"mixed_precision": "bf16"}) == []


def test_a_shape_that_does_not_fit_is_told_by_its_module() -> None:
    def make() -> nn.Module:
        model = Model(12)
        model.blocks[10].down = nn.Linear(16, 9)
        return model

    problem = the_problem(make)
    assert (problem.where, problem.severity) == ("blocks.10", "error")
    assert lacking(problem.what, "forward", "(test_planner_preflight.py:") == []
    assert "broadcast" in problem.what


def test_a_head_that_is_too_small_is_told_by_its_module() -> None:
    class Headed(Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(7, 5)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.head(super().forward(hidden))

    assert the_problem(Headed).where == "head"


def test_mixed_dtypes_fail_before_the_gpu_does() -> None:
    class Buffered(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(8))
            self.head = nn.Linear(8, 8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(super().forward(hidden) * self.scale, self.head.weight, self.head.bias)

    assert problems(Buffered) == []
    problem = the_problem(Buffered, words={"mixed_precision": "bf16"})
    assert problem.where == "model"
    assert lacking(problem.what, "linear", "bfloat16", "float32", "(test_planner_preflight.py:") == []


def test_a_shape_that_depends_on_data_is_told() -> None:
    class Sparse(Model):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden[hidden.sum(-1).nonzero()[:, 0]])

    problem = the_problem(Sparse)
    assert (problem.where, problem.severity) == ("model", "warning")
    assert ".nonzero()" in problem.what
    assert "guess" in problem.what


READS: dict[str, Any] = {
    ".item()": lambda x: x * x.mean().item(),
    ".__contains__()": lambda x: x if 3.0 in x else -x,
    ".__bool__()": lambda x: x if x.mean() > 0 else -x,
    ".__float__()": lambda x: x * float(x.mean()),
}


@pytest.mark.parametrize("how", all_but([".item()"], READS))
def test_a_value_that_is_read_is_told_once_for_a_line(how: str) -> None:
    class Reading(Block):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return READS[how](super().forward(hidden))

    def make() -> nn.Module:
        model = Model()
        model.blocks = nn.ModuleList(Reading() for _ in range(9))
        return model

    problem = the_problem(make)
    assert (problem.where, problem.severity) == ("blocks.0", "warning")
    assert lacking(problem.what, how, "(test_planner_preflight.py:") == []


def test_a_guess_that_leads_to_a_failure_is_told() -> None:
    class Checking(Model):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            if hidden.mean() > 0:
                raise ValueError("too warm")
            return super().forward(hidden)

    failed, read = problems(Checking)
    assert lacking(failed.what, "forward", "guessed", "(test_planner_preflight.py:") == []
    assert "ValueError: too warm" in failed.what
    assert read.severity == "warning"


@pytest.mark.rest
def test_a_compiled_model_runs_as_written() -> None:
    assert problems(lambda: torch.compile(Model())) == []
    assert problems(Model, words={"compile": True}) == []


def test_an_attribute_that_stays_behind_is_told() -> None:
    class Held(Model):
        def __init__(self) -> None:
            super().__init__()
            self.inlet.table = torch.ones(4, 8)
            self.moved = torch.ones(8)
            self.number = torch.tensor(2.0)
            self.places = [torch.arange(8)]
            self.register_buffer("registered", torch.ones(8))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden = super().forward(hidden) + self.moved.to(hidden.device) + self.registered
            return (hidden * self.number)[:, self.places[0]] + (2 * self.inlet.table[:2]).sum(0)

    problem = the_problem(Held)
    assert (problem.where, problem.severity) == ("inlet.table", "error")
    assert problem.remedy == "register_buffer('table', …, persistent=False)"


def test_a_tensor_made_on_the_cpu_is_told() -> None:
    class Making(Block):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            fine = torch.arange(hidden.shape[-1], device=hidden.device) + torch.tensor(1.0)
            fine = fine + torch.zeros(8).to(hidden) + torch.ones_like(hidden)
            return super().forward(hidden + fine) + torch.arange(hidden.shape[-1]).float()

    def make() -> nn.Module:
        model = Model()
        model.blocks[1] = Making()
        return model

    problem = the_problem(make)
    assert (problem.where, problem.severity) == ("blocks.1", "error")
    assert lacking(problem.what, "torch.arange", "CPU") == []


def test_parameters_without_a_gradient_are_told() -> None:
    class Unused(Model):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(2, 2).requires_grad_(False)
            self.spare = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(12))

    problem = the_problem(Unused)
    assert problem.severity == "warning"
    assert lacking(problem.where, "spare.0.weight, spare.1.weight, spare.2.weight", 9) == []
    assert lacking(problem.what, "12 parameters", "no gradient") == []


def test_what_shard_refuses_is_told_and_the_rest_too() -> None:
    class Shared(Model):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 8, sparse=True)
            self.head = nn.Linear(7, 5)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.head(super().forward(hidden))

    refused, failed = problems(Shared)
    assert (refused.where, failed.where) == ("shard", "head")
    assert lacking(refused.what, "'embed'", "sparse") == []
    unknown = the_problem(Model, words={"units": "Blok"})
    assert unknown.where == "shard"
    assert "'Block'" in unknown.what


@pytest.mark.rest
def test_positions_beyond_the_table_are_told() -> None:
    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok = nn.Embedding(50, 8)
            self.wpe = nn.Embedding(16, 8)
            self.block = Block()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            places = torch.arange(tokens.shape[1], device=tokens.device)
            return self.block(self.tok(tokens) + self.wpe(places)) @ self.tok.weight.T

    assert problems(Positioned) == []
    problem = the_problem(Positioned, sequence=17)
    assert problem.where == "wpe"
    assert lacking(problem.what, 16, 17) == []


def test_what_cannot_be_built_or_fed_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": -5}')
    assert the_problem(tmp_path).where == "model"
    frozen = problems(lambda: Model().requires_grad_(False))
    assert [each.where for each in frozen] == ["optimizer", "loss"]
    assert "train" in frozen[0].what


@pytest.mark.parametrize(
    ("loss", "where", "what"),
    [
        (lambda model, batch: model(batch), "loss", "(1, 8)"),
        (lambda model, batch: model(batch).sum().detach(), "loss", "no gradient"),
        (lambda model, batch: 3, "loss", " int"),
        (lambda model, batch: model(batch).nothing, "loss", "AttributeError"),
        (lambda model, batch: model(batch[:, :3]).sum(), "inlet", "forward"),
    ],
)
def test_a_loss_that_is_none_is_told(loss: Any, where: str, what: str) -> None:
    problem = the_problem(Model, loss=loss)
    assert problem.where == where
    assert what in problem.what


def test_a_batch_that_cannot_be_made_is_told() -> None:
    def batch(microbatch: int, sequence: int) -> torch.Tensor:
        raise KeyError("text")

    problem = the_problem(Model, batch=batch)
    assert problem.where == "batch"
    assert "KeyError: 'text'" in problem.what


def test_a_backward_that_fails_is_told() -> None:
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 0.5

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0][:, :3]

    problem = the_problem(Model, loss=lambda model, batch: Halved.apply(model(batch)).sum())
    assert problem.where == "step"
    assert "backward fails" in problem.what
