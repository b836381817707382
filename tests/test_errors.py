"""The errors of TrueShard have one base, and are of Python's kinds still; those of the user's code stay as they are."""

from __future__ import annotations

import ast
import copy
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trueshard
from cases import on_ranks
from trueshard import TrueShardError, errors, shard

SOURCE = Path(trueshard.__file__).parent


def test_every_public_exception_has_the_base() -> None:
    public = [getattr(trueshard, name) for name in trueshard.__all__]
    kinds = [value for value in public if isinstance(value, type) and issubclass(value, BaseException)]
    assert len(kinds) > 4
    assert [kind for kind in kinds if not issubclass(kind, TrueShardError)] == []


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def adam(of: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(of.parameters(), **settings)


def sharded() -> nn.Module:
    made = model()
    shard(made)
    return made


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(3)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3).to_sparse())


REFUSED: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
    "an option that is none": (TypeError, lambda: shard(model(), unit="auto")),  # type: ignore[call-arg]
    "a model that is none": (TypeError, lambda: shard([model()])),  # type: ignore[arg-type]
    "an optimizer that is none": (TypeError, lambda: shard(model(), "adam")),  # type: ignore[arg-type]
    "an optimizer of another model": (ValueError, lambda: shard(model(), adam(model()))),
    "a plan and options": (ValueError, lambda: shard(model(), plan=trueshard.Plan(), compile=True)),
    "a plan that is none": (TypeError, lambda: shard(model(), plan="fast")),  # type: ignore[arg-type]
    "a mesh that is none": (TypeError, lambda: shard(model(), mesh=2)),  # type: ignore[arg-type]
    "units that are not there": (ValueError, lambda: shard(model(), units="Block")),
    "a word of reshard": (ValueError, lambda: shard(model(), reshard_after_forward="sometimes")),  # type: ignore[arg-type]
    "a word of recomputation": (ValueError, lambda: shard(model(), activation_checkpointing="some")),  # type: ignore[arg-type]
    "a word of precision": (ValueError, lambda: shard(model(), mixed_precision="fp4")),  # type: ignore[arg-type]
    "a word of offload": (ValueError, lambda: shard(model(), offload="disk")),  # type: ignore[arg-type]
    "a word of sums": (ValueError, lambda: shard(model(), accumulate_gradients="none")),  # type: ignore[arg-type]
    "ranks that are not there": (ValueError, lambda: shard(model(), tensor=3)),
    "a lazy parameter": (ValueError, lambda: shard(Lazy())),
    "a sparse parameter": (Exception, lambda: shard(Sparse())),
    "a sharded model": (ValueError, lambda: shard(sharded())),
    "an exponent": (ValueError, lambda: shard(model(), exact={"*": 999})),
    "a path that is there": (FileExistsError, lambda: trueshard.save("there", model=model())),
    "a path that is not there": (FileNotFoundError, lambda: trueshard.load("nowhere", model=model())),
    "a checkpoint of another model": (ValueError, lambda: trueshard.load("there", model=nn.Linear(2, 2))),
    "a form of export": (ValueError, lambda: trueshard.export("there", "out", to="onnx")),  # type: ignore[arg-type]
    "a model that is not sharded": (ValueError, lambda: trueshard.weights(model())),
}


@on_ranks(1)
def test_refusals(rank: int, ranks: int, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    trueshard.save("there", model=model())
    for what, (kind, call) in REFUSED.items():
        with pytest.raises(kind) as caught:
            call()
        error = caught.value
        assert isinstance(error, TrueShardError), f"{what}: {error!r}"
        assert traceback.extract_tb(error.__traceback__)[-1].filename.startswith(str(SOURCE)), what
        assert pickle.loads(pickle.dumps(error)).args == error.args, what


@on_ranks(2)
def test_a_step_that_is_refused(rank: int, ranks: int) -> None:
    made = model()
    optimizer = adam(made)
    shard(made, optimizer)
    with trueshard.accumulate(made, last=False):
        made(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="last=True") as caught:
        optimizer.step()
    assert isinstance(caught.value, TrueShardError)
    with pytest.raises(TrueShardError, match="not sharded"), trueshard.accumulate(model(), last=True):
        pass


@on_ranks(2)
def test_passes_that_are_refused(rank: int, ranks: int) -> None:
    """In a forward, a backward and between them, where no function of TrueShard's stands around."""
    made = sharded()
    values = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match="create_graph") as caught:
        made(values).sum().backward(create_graph=True)
    assert isinstance(caught.value, TrueShardError)
    with trueshard.gathered(sharded()) as whole:
        pass
    with pytest.raises(RuntimeError, match="closed") as caught:
        whole(values)
    assert isinstance(caught.value, TrueShardError)
    other = sharded()
    with pytest.raises(RuntimeError, match="not used in the graph") as caught:
        torch.autograd.grad(other[0](values).sum(), list(other.parameters()))
    assert isinstance(caught.value, TrueShardError)
    with pytest.raises(RuntimeError, match="copied alone") as caught:
        copy.deepcopy(sharded()[0])
    assert isinstance(caught.value, TrueShardError)


@on_ranks(3)
def test_ranks_of_which_some_have_values(rank: int, ranks: int) -> None:
    with torch.device("meta" if rank == 1 else "cpu"):
        made = model()
    with pytest.raises(ValueError, match=r"different models.*on the meta device.*0\.weight") as caught:
        shard(made)
    assert isinstance(caught.value, TrueShardError)
    assert made[0].weight.is_meta == (rank == 1)


@on_ranks(1)
def test_errors_of_the_users_code_stay_as_they_are(rank: int, ranks: int) -> None:
    def units(name: str, module: nn.Module) -> bool:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        shard(model(), units=units)
    assert type(caught.value) is ValueError


@on_ranks(2)
def test_warnings_point_at_the_users_line(rank: int, ranks: int) -> None:
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.warns(UserWarning, match="normalises") as seen:
        shard(made, units=["1"])
    with pytest.warns(UserWarning, match="used up") as used:
        trueshard.clip_grad_norm_((parameter for parameter in ()), 1.0)
    assert {warning.filename for warning in [*seen, *used]} == {__file__}


#: Not of a public function with this border: raised in a step or by a plan's own methods, or caught inside.
ELSEWHERE = {"AssertionError", "KeyError", "OverflowError", "Refused"}


def test_each_kind_that_is_raised_below_the_public_functions_can_have_the_base() -> None:
    public = {name for name in trueshard.__all__ if isinstance(getattr(trueshard, name), type)}
    kinds = {kind.__qualname__ for kind in [*errors._OWN, *errors._OWN.values()]}
    known = kinds | public | {"DeviceError", "RankFailed"} | ELSEWHERE
    rooms = ("api.py", "options.py", "plans.py", "distributed.py", "model", "sharding", "optim", "checkpoint")
    files = [file for room in rooms for file in ([SOURCE / room] if "." in room else (SOURCE / room).rglob("*.py"))]
    raised = {
        ast.unparse(node.exc.func)
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    }
    assert {name for name in raised if name[:1].isupper()} - known == set()


WORDS = """
import torch
import trueshard
from trueshard.rl import PolicyLoss

model = torch.nn.Linear(2, 2)
trueshard.shard(model, offload="cpu", reshard_after_forward={"*": "always"}, mixed_precision="bf16")
trueshard.shard(model, offload="disk")
trueshard.shard(model, reshard_after_forward="sometimes")
trueshard.shard(model, reshard_after_forward={"*": "sometimes"})
trueshard.shard(model, activation_checkpointing="some")
trueshard.shard(model, mixed_precision="fp4")
trueshard.shard(model, accumulate_gradients="half")
trueshard.shard(model, unit="auto")
trueshard.set_reshard_after_forward(model, "sometimes")
trueshard.accumulate(model, last=True, gradients="half")
trueshard.export("a", "b", to="onnx")
trueshard.weights(model, adapters="none")
trueshard.Checkpoints("a", mode="best")
PolicyLoss(average="tokens")
PolicyLoss(kl_estimator="k4")
PolicyLoss(correction="all")
"""


@pytest.mark.rest
def test_a_type_checker_refuses_wrong_words(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WORDS)
    command = [
        sys.executable,
        "-m",
        "mypy",
        str(program),
    ]  # with the project's settings: it finds what `make lint` kept
    done = subprocess.run(command, cwd=SOURCE.parents[1], capture_output=True)
    lines = {int(line.split(":")[1]) for line in done.stdout.decode().splitlines() if "program.py:" in line}
    first = 1 + WORDS.splitlines().index('trueshard.shard(model, offload="disk")')
    assert lines == set(range(first, 1 + len(WORDS.splitlines()))), done.stdout.decode()
