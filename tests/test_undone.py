"""Contract line 11: if ``shard()`` fails, model and optimizers are as they were, on every rank; it can be repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import trueshard
from models.handmade import Methods, Scalar
from parity import Ranks

#: Every step of shard(), by the function whose call is made to fail: (module, attribute).
STAGES = [
    ("trueshard.names", "hide_wrappers"),
    ("trueshard.intent", "capture"),
    ("trueshard.engine", "refuse"),
    ("trueshard.engine", "resolve"),
    ("trueshard.agreement", "agree_on_structure"),
    ("trueshard.agreement", "take_from_first_rank"),
    ("trueshard.sharding", "_prepare_tensors"),
    ("trueshard.sharding", "_prepare_modules"),
    ("trueshard.sharding", "_shard_unit"),
    ("trueshard.carrying", "attributes_of"),
    ("trueshard.beside", "after_gathering"),
    ("trueshard._torch", "initialise"),
    ("trueshard.sharding", "allow_deepcopy"),
    ("trueshard.engine", "rebind"),
    ("trueshard.intent", "difference"),
    ("trueshard.engine", "_warn"),
]


class Planted(RuntimeError):
    """The failure under test."""


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Scalar()
    model.extra = Methods()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    model.last.weight = nn.Parameter(model.last.weight.detach().T.contiguous().T)
    model.last.weight.tag = "mine"
    model.last.weight.register_hook(lambda grad: grad * 2)
    model.scale.register_hook(lambda grad: grad * 3)
    model.register_forward_hook(lambda *_: None)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def photograph(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that must come back, by identity where identity is what counts."""
    seen: dict[str, Any] = {}
    stack = [("", model)]
    while stack:
        name, module = stack.pop()
        held = dict(vars(module))
        for key, value in held.items():
            held[key] = list(value.items()) if isinstance(value, dict) else value
        seen[name] = (type(module), held)
        stack += [(f"{name}.{key}", child) for key, child in module._modules.items()]
    for name, p in model.named_parameters():
        hooks = list((p._backward_hooks or {}).items())
        seen[f"tensor {name}"] = (id(p), p.data_ptr(), p.stride(), p.requires_grad, dict(vars(p)), id(p.grad), hooks)
    seen["values"] = {name: p.detach().clone().numpy().tobytes() for name, p in model.named_parameters()}
    seen["groups"] = [(id(g), [id(p) for p in g["params"]], list(g)) for g in optimizer.param_groups]
    seen["state"] = [
        (id(p), [(k, id(v), v.sum().item()) for k, v in entries.items()]) for p, entries in optimizer.state.items()
    ]
    return seen


def fail(rank: int, world_size: int, module: str, attribute: str, where: int, call: int) -> None:
    """``call``: at which call of the function it fails; ``where``: on which rank (-1: on all)."""
    import importlib

    model, optimizer = build()
    before = photograph(model, optimizer)
    owner = importlib.import_module(module)
    real = getattr(owner, attribute)
    calls = 0

    def planted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = real(*args, **kwargs)
        if calls == call and where in (-1, rank):
            raise Planted(attribute)
        return result

    setattr(owner, attribute, planted)
    try:
        with pytest.raises(RuntimeError, match=attribute) as caught:
            trueshard.shard(model, optimizer, activation_checkpointing={"blocks.1": "full"})
    finally:
        setattr(owner, attribute, real)
    assert isinstance(caught.value, Planted) == (where in (-1, rank))
    after = photograph(model, optimizer)
    assert list(after) == list(before)
    for key in before:
        assert after[key] == before[key], key
    optimizer.step()  # not taken for one that was left behind
    trueshard.shard(model, optimizer)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("module", "attribute"), STAGES, ids=[attribute for _, attribute in STAGES])
def test_a_failure_at_any_stage_leaves_no_trace(module: str, attribute: str, ranks2: Ranks) -> None:
    ranks2.run(fail, module, attribute, -1, 1)


@pytest.mark.parametrize("call", [2, 4])
def test_a_failure_in_the_midst_of_the_units_leaves_no_trace(call: int, ranks2: Ranks) -> None:
    ranks2.run(fail, "trueshard.sharding", "_shard_unit", -1, call)


@pytest.mark.parametrize("stage", ["capture", "refuse", "resolve", "_shard_unit", "initialise", "rebind"])
def test_a_failure_on_one_rank_undoes_all(stage: str, ranks3: Ranks) -> None:
    (module,) = [module for module, attribute in STAGES if attribute == stage]
    ranks3.run(fail, module, stage, 1, 1)
