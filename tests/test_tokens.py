"""The token-weighted loss: unequal batches over ranks and microbatches give the gradient of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import trueshard
from cases import as_on_one_device
from gathering import gradients
from messages import lacking, naming
from models import CASES
from models.handmade import TiedLanguageModel
from parity import Pool, Ranks, assert_same
from resting import all_but

IGNORED = -100
ROWS, LENGTH, MICROBATCHES = 12, 6, 3
"""of one step, over all ranks; 12 rows divide by 1, 2, 3 and 4 ranks"""


class Scaled(TiedLanguageModel):
    """With a 0-dim parameter, whose gradient is averaged by another way than that of shards."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.8))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(input_ids)


def ragged(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [ROWS, LENGTH]: row i has i % LENGTH targets, so the first microbatch of rank 0 has few."""
    ids = torch.randint(0, 64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, 1 + row // 2 :] = IGNORED
    return ids, labels


def microbatches(seed: int, rank: int, world_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's rows, in as many parts as there are; the first row of all has no target, nor has row 1."""
    ids, labels = (each.chunk(world_size)[rank] for each in ragged(seed))
    parts = min(MICROBATCHES, len(ids))
    return list(zip(ids.tensor_split(parts), labels.tensor_split(parts), strict=True))


def summed(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(ids)[:, :-1].float().flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


def weighted(rank: int, world_size: int, sync: bool = False, shape: Any = None) -> dict[str, Any]:
    """Two steps with the helper. One process computes the sum over the number of all targets itself."""
    torch.manual_seed(0)
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if world_size > 1:
        mesh = shape and init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        trueshard.shard(model, optimizer, mesh=mesh)
    report: dict[str, Any] = {}
    for seed in range(2):
        if world_size == 1:
            ids, labels = ragged(seed)
            loss = summed(model, ids, labels) / labels[:, 1:].ne(IGNORED).sum()
            loss.backward()
            report[f"loss {seed}"] = loss.item()
        else:
            batches = microbatches(seed, rank, world_size)
            mean = trueshard.token_mean(model, sum(trueshard.count_targets(labels) for _, labels in batches))
            assert mean.total == int(ragged(seed)[1][:, 1:].ne(IGNORED).sum())
            total = torch.zeros(())
            for number, (ids, labels) in enumerate(batches, start=1):
                with trueshard.accumulate(model, last=sync or number == len(batches)):
                    loss = summed(model, ids, labels)
                    mean(loss).backward()
                total += loss.detach()
            report[f"loss {seed}"] = mean.value(total)
        report[f"grad {seed}"] = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return report


@pytest.mark.parametrize(
    ("count", "sync", "shape"),
    all_but(
        [(3, False, None), (2, True, None)],
        [(2, False, None), (3, False, None), (2, True, None), (3, True, None), (4, False, (2, 2))],
        unpack=True,
    ),
)
def test_unequal_batches_give_the_gradient_of_one_process(
    count: int, sync: bool, shape: Any, alone: Ranks, pool: Pool
) -> None:
    """Reduced once or each time; replicas count as ranks."""
    (expected,) = alone.run(weighted)
    for found in Ranks(count, pool).run(weighted, sync, shape):
        assert_same(found, expected, rtol=1e-4, atol=1e-6)


def test_a_microbatch_of_some_rank_has_no_target() -> None:
    for world_size in (2, 3, 4):
        counts = [int(trueshard.count_targets(labels)) for _, labels in microbatches(0, 0, world_size)]
        assert counts[0] == 0 < sum(counts)


def means_of_means(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """What is usually written: the mean of each microbatch, over the number of microbatches, over ranks."""
    torch.manual_seed(0)
    model = Scaled()
    trueshard.shard(model)
    batches = microbatches(0, rank, world_size)
    for number, (ids, labels) in enumerate(batches, start=1):
        with trueshard.accumulate(model, last=number == len(batches)):
            (summed(model, ids, labels) / max(1, int(trueshard.count_targets(labels))) / len(batches)).backward()
    return gradients(model)


def test_a_mean_of_means_is_another_gradient(alone: Ranks, ranks2: Ranks) -> None:
    (expected,) = alone.run(weighted)
    found = ranks2.run(means_of_means)[0]
    name = "embed.weight"
    assert (found[name] - expected["grad 0"][name]).norm() > 0.1 * expected["grad 0"][name].norm()


@as_on_one_device(2)
def test_the_divisor_is_for_models_that_divide_themselves(rank: int, world_size: int) -> dict[str, Any]:
    """transformers' models divide the sum themselves, by ``num_items_in_batch``."""
    model = CASES["llama"].build(0)
    ids, labels = ragged(0)
    if world_size == 1:
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED).backward()
    else:
        trueshard.shard(model)
        batches = microbatches(0, rank, world_size)
        mean = trueshard.token_mean(model, sum(trueshard.count_targets(labels) for _, labels in batches))
        for number, (ids, labels) in enumerate(batches, start=1):
            with trueshard.accumulate(model, last=number == len(batches)):
                model(input_ids=ids, labels=labels, num_items_in_batch=mean.divisor).loss.backward()
    return gradients(model)


def wrong(rank: int, world_size: int, counts: list[Any], sharded: bool = True) -> None:
    model = nn.Linear(4, 4)
    if sharded:
        trueshard.shard(model)
    trueshard.token_mean(model, counts[rank])


def test_errors_come_on_every_rank(ranks2: Ranks) -> None:
    ranks2.raises(wrong, [0, torch.tensor(0)], match="no rank")
    ranks2.raises(wrong, [3, 3], False, match=naming("Linear", "not sharded", "trueshard.shard"))
    for bad, words in ((-1, "tokens is -1"), (2.0, "not 2.0"), (True, "not True"), (torch.ones(2), "one number")):
        own, other = ranks2.raises(wrong, [bad, 3])
        assert words in own
        assert lacking(other, "tokens", "1 other rank") == []


def test_it_works_with_one_process_and_no_sharding() -> None:
    model = nn.Linear(4, 4)
    mean = trueshard.token_mean(model, torch.tensor(8))
    assert (mean.total, mean.ranks, mean.divisor) == (8, 1, 8.0)
    assert mean(torch.tensor(4.0)) == 0.5
    assert mean.value(4.0) == 0.5
    with pytest.raises(ValueError, match=naming("(2,)", 'reduction="sum"')):
        mean(torch.ones(2))
    with pytest.raises(TypeError, match=naming("torch.int64")):
        mean(torch.tensor(4))
    with pytest.raises(TypeError, match="not float"):
        mean(4.0)  # type: ignore[arg-type]


def test_targets_are_counted_as_the_loss_counts_them() -> None:
    labels = torch.tensor([[5, 6, -100], [-100, 7, 8]])
    assert trueshard.count_targets(labels) == 3
    assert trueshard.count_targets(labels, shifted=False) == 4
    assert trueshard.count_targets(labels, ignore_index=8) == 3
    assert trueshard.count_targets(labels[0]) == 1
    assert trueshard.count_targets(labels[:, :1]) == trueshard.count_targets(labels[:0]) == 0
    with pytest.raises(TypeError, match=naming("integers", "torch.float32")):
        trueshard.count_targets(labels.float())
    with pytest.raises(ValueError, match="0-dim"):
        trueshard.count_targets(labels[0, 0])
