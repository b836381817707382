"""``shard(exact=True)``: ranks × accumulation, in any split and order, give the same losses, norms and states.

A microbatch is what one ``backward()`` computes. Units that run several times before it are refused with accumulation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import exactness
import trueshard
from exactness import CLIP, dealt, summed_loss
from messages import naming
from models.handmade import Stack
from parity import Pool, Ranks, assert_same

STEPS = 5
SHARDED = {"accumulate_gradients": "sharded"}


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "microbatches", "options"),
    [
        ("whole_ones", 6, {}),
        ("gpt2_with_dropout", 4, SHARDED),
        ("vit", 4, {}),
        ("llama", 8, {"mixed_precision": "bf16", "reshard_after_forward": "never"}),
        ("mixtral", 12, SHARDED),
        ("tied", 8, {"mixed_precision": "bf16", "activation_checkpointing": "full"}),
        ("uneven", 16, {}),
        ("uneven", 16, {**SHARDED, "mixed_precision": "bf16"}),
    ],
)
def test_accumulation_changes_no_bit(name: str, microbatches: int, options: dict[str, Any], pool: Pool) -> None:
    """All splits of a step's microbatches over two to four ranks, against one rank that computes all of them."""
    (expected,) = Ranks(1, pool).run(exactness.train, name, STEPS, options, None, microbatches)
    assert len({str(expected[f"state {step}"]) for step in range(STEPS)}) == STEPS
    assert expected["norm 0"] > CLIP
    for count, order in ((2, "strided"), (3, "reversed"), (4, "in turn")):
        if microbatches % count == 0:
            for found in Ranks(count, pool).run(exactness.train, name, STEPS, options, None, microbatches, order):
                assert_same(found, expected)


@pytest.mark.rest
@pytest.mark.parametrize("options", [{}, SHARDED])
def test_replicas_split_the_microbatches_too(options: dict[str, Any], alone: Ranks, ranks4: Ranks) -> None:
    (expected,) = alone.run(exactness.train, "gpt2_with_dropout", STEPS, {}, None, 8)
    for found in ranks4.run(exactness.train, "gpt2_with_dropout", STEPS, options, (2, 2), 8, "strided"):
        assert_same(found, expected)


class Again(Stack):
    """One block, called three times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.blocks[0](x)
        return self.last(x)


def called_again(rank: int, world_size: int, units: Any) -> dict[str, str]:
    """Digests of the gradients of two microbatches."""
    torch.manual_seed(0)
    model = Again(depth=1)
    trueshard.shard(model, exact=True, units=units)
    own = dealt(rank, world_size, 2)
    mean = trueshard.token_mean(model, 2 * len(own))
    for number in own:
        with trueshard.accumulate(model, last=number == own[-1]):
            mean(summed_loss(model, 0, number)).backward()
    return exactness.digest({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def test_units_that_run_again_are_exact_or_refused(alone: Ranks, ranks2: Ranks) -> None:
    (expected,) = alone.run(called_again, "first")
    for units in ("Block", "first"):
        for found in ranks2.run(called_again, units):
            assert_same(found, expected)
    alone.raises(called_again, "Block", match=naming("'blocks.0'"))
    ranks2.raises(exactness.train, "whole_ones", 1, {}, None, 4, "in turn", 2, match="backward")
