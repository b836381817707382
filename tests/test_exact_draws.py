"""Optimizers that draw, with ``exact=True``: the numbers follow from seed, step, parameter and element."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import trueshard
from exactness import dealt, llama, summed_loss, verified
from optimizer_catalogue import entries
from parity import Ranks
from stepping import take_step

MICROBATCHES, STEPS, MIDDLE = 6, 4, 2


class Langevin(torch.optim.Optimizer):
    """Gradient descent with noise, which counts its steps in its groups."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    noise = self.state[parameter]["noise"] = torch.randn_like(parameter)
                    parameter.add_(parameter.grad + noise, alpha=-group["lr"])


def rounding(parameters: Any) -> Any:
    """torchao's AdamW, which rounds parameters of 16 bits at random."""
    cls: Any = entries("torchao.optim")["_AdamW"].cls
    return cls(parameters, lr=0.01, bf16_stochastic_round=True)


MAKES = {"langevin": Langevin, "rounding": rounding}


def made(name: str, dtype: torch.dtype, late: bool, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = llama().to(dtype)
    torch.manual_seed(seed)
    optimizer = None if late else MAKES[name](model.parameters())
    trueshard.shard(model, *[each for each in (optimizer,) if each is not None], exact=True)
    return model, optimizer or MAKES[name](model.parameters())


def train(
    rank: int,
    world_size: int,
    name: str,
    dtype: torch.dtype,
    saved: str = "",
    start: int = 0,
    late: bool = False,
    seed: int = 7,
) -> dict[str, Any]:
    """Hashes of each step from ``start``; ``saved``: where a checkpoint of step MIDDLE is written, or begun from."""
    with torch.compiler.set_stance("force_eager"):
        model, optimizer = made(name, dtype, late, seed + 10 * rank)  # the first rank's counts
        if start:
            trueshard.load(saved, model=model, optimizer=optimizer)
        found: dict[str, Any] = {}
        own = dealt(rank, world_size, MICROBATCHES)
        for step in range(start, STEPS):
            if saved and step == MIDDLE and not start:
                trueshard.save(saved, model=model, optimizer=optimizer)
            mean = trueshard.token_mean(model, 2 * len(own))
            for number in own:
                with trueshard.accumulate(model, last=number == own[-1]):
                    mean(summed_loss(model, step, number)).backward()
            before = torch.get_rng_state()
            take_step(optimizer)
            found[f"drew outside {step}"] = not torch.equal(before, torch.get_rng_state())
            found[f"hashes {step}"] = dict(trueshard.state_hash(model, optimizer))
        if name == "langevin" and world_size == 1:
            drawn = [optimizer.state[layer.self_attn.q_proj.weight]["noise"] for layer in model.model.layers]
            assert not torch.equal(*drawn)
        found["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        return found


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("langevin", torch.float32), ("rounding", torch.bfloat16)],
)
def test_draws_follow_from_seed_step_parameter_and_element(
    name: str, dtype: torch.dtype, alone: Ranks, ranks2: Ranks, ranks3: Ranks, tmp_path: Path
) -> None:
    folder = str(tmp_path / "middle")
    (expected,) = alone.run(train, name, dtype)
    hashes = {key: value for key, value in expected.items() if key.startswith("hashes")}
    assert len({str(value) for value in hashes.values()}) == STEPS
    (other,) = alone.run(train, name, dtype, "", 0, False, 8)
    assert other["hashes 0"] != expected["hashes 0"]
    for found in [*ranks3.run(train, name, dtype, folder), *ranks2.run(train, name, dtype, "", 0, True)]:
        assert {key: found[key] for key in hashes} == hashes
        assert not any(value for key, value in found.items() if key.startswith("drew"))
    later = {key: value for key, value in hashes.items() if int(key.split()[1]) >= MIDDLE}
    for found in ranks2.run(train, name, dtype, folder, MIDDLE):  # the noise goes on where it was
        assert {key: value for key, value in found.items() if key.startswith("hashes")} == later
        assert found["groups"] == expected["groups"]


VERIFIED = """
from typing import Any
import torch
from torch import nn

{langevin}
def make():
    return nn.Sequential(nn.Linear(8, 15), nn.ReLU(), nn.Linear(15, 8))

def optimizers(model):
    return Langevin(model.parameters())
"""


@pytest.mark.rest
def test_verify_holds_an_optimizer_that_draws(tmp_path: Path) -> None:
    file = tmp_path / "noisy.py"
    file.write_text(VERIFIED.format(langevin=inspect.getsource(Langevin)))
    report = verified(file, True)
    assert {point["name"]: point["status"] for point in report["points"] if point["status"] != "held"} == {}
    assert any("draws random numbers" in note for note in report["notes"])
