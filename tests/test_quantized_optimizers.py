"""Optimizers of torchao, whose state has 8 or 4 bits: it is quantized on every rank, and a rank holds its part of it.

That they compute what one process computes is in ``test_every_optimizer.py``, as for all others.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from optimizer_catalogue import entries
from optimizer_trial import QUANTIZED_TOLERANCE, build, further, train, trained
from parity import Pool, Ranks
from resting import all_but
from stepping import shard_over

LIBRARY = "torchao.optim"
QUANTIZED = ("Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8")
COMPILED = ("even.weight", "uneven.weight", "head.bias")
"""A shard of whole blocks, one that is not, and state that is not quantized."""


def held(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Of the state of `even.weight`: what it is shown as, what this rank holds of it, and in how many bytes."""

    entry = entries(LIBRARY)[name]
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        model = build(entry)
        (optimizer,) = entry.make(model)
        shard_over(world_size, model, optimizer, units="Linear")
        train(entry, model, [optimizer], rank, world_size)
    parameter = model.get_parameter("even.weight")
    found = {}
    for key in ("exp_avg", "exp_avg_sq"):
        value = optimizer.state[parameter][key]
        local = value.to_local() if isinstance(value, DTensor) else value
        inner, _ = local.__tensor_flatten__()
        found[key] = {
            "shape": tuple(value.shape),
            "kind": type(local).__name__,
            "bytes": sum(getattr(local, part).nbytes for part in inner if part != "qmap"),
        }
    return found


@pytest.mark.parametrize(
    ("name", "count"),
    all_but([(QUANTIZED[0], 2)], [*((name, 2) for name in QUANTIZED), (QUANTIZED[0], 3)], unpack=True),
)
def test_state_is_quantized_and_in_parts(name: str, count: int, alone: Ranks, pool: Pool) -> None:
    (whole,) = alone.run(held, name)
    parts = Ranks(count, pool).run(held, name)
    for key, one in whole.items():
        assert one["kind"].startswith("OptimState")
        assert [part[key]["kind"] for part in parts] == [one["kind"]] * count
        assert [part[key]["shape"] for part in parts] == [one["shape"]] * count
        assert [part[key]["bytes"] for part in parts] == [one["bytes"] // count] * count


def compiled(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """`trained`, and on one rank in full precision too, with the compiler that these classes call themselves.

    Of `COMPILED` alone: each shape is compiled for itself.
    """
    entry = entries(LIBRARY)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = trained(rank, world_size, entry, COMPILED)
        if world_size == 1 and entry.full_precision:
            found["full precision"] = trained(rank, world_size, entry.full_precision, COMPILED)["after"]
    return found


@pytest.mark.rest
@pytest.mark.compiles
@pytest.mark.timeout(900)
def test_the_compiled_step_equals_one_process(alone: Ranks, ranks2: Ranks) -> None:
    (one,) = alone.run(compiled, "AdamW8bit", timeout=400.0)
    for many in ranks2.run(compiled, "AdamW8bit", timeout=400.0):
        assert further(one, many) <= QUANTIZED_TOLERANCE
