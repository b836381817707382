"""`loader`, `gather`, `main_first`: the same samples at any number of ranks, metrics of one process, no rank left."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import IterableDataset

import trueshard
from cases import on_ranks
from messages import naming
from parity import Pool, Ranks

LENGTH = 20


class Noisy:
    """Samples [number, noise], with noise of all three generators."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [float(torch.rand(())), random.random(), np.random.random()]  # noqa: NPY002
        return torch.tensor([index, *noise], dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    """The same as a stream."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        assert torch.utils.data.get_worker_info() is None  # else it would split itself over workers
        return (Noisy()[index] for index in range(LENGTH))


class Placed(Stream):
    """A stream that keeps its place, and counts the samples that it has read."""

    place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        first, self.place = self.place, 0
        for index in range(first, LENGTH):
            self.place = index + 1
            yield Noisy()[index]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


DATASETS = {"sized": Noisy, "stream": Stream, "placed": Placed}


def steps(
    rank: int, world: int, kind: str, state: Any, passes: int, most: int = 1000, **options: Any
) -> tuple[list[torch.Tensor], Any]:
    """The samples of each step, in their order, without repeated ones, up to `most` steps; and the place after them."""
    options = {"batch_size": 6, "accumulate": 1} | options
    data = trueshard.loader(DATASETS[kind](), **options)
    if state is not None:
        data.load_state_dict(state)
    found: list[torch.Tensor] = []
    for _ in range(data.passes, passes):
        parts: list[torch.Tensor] = []
        for number, batch in enumerate(data, start=1):
            parts.append(trueshard.gather(batch, data))
            if number % options["accumulate"] == 0:
                found, parts = [*found, torch.cat(parts)], []
            if len(found) == most:
                return found, data.state_dict()
    return found, data.state_dict()


def numbers(found: list[torch.Tensor]) -> list[int]:
    return [int(number) for step in found for number in step[:, 0]]


def as_sets(found: list[torch.Tensor]) -> list[list[list[float]]]:
    """Accumulated batches are gathered one after the other, so that a step's order is another one."""
    return [sorted(step.tolist()) for step in found]


@pytest.mark.parametrize("kind", DATASETS)
def test_a_pass_has_every_sample_once_and_another_one_draws_anew(kind: str) -> None:
    shuffle = kind == "sized"
    found, place = steps(0, 1, kind, None, 2, shuffle=shuffle)
    assert [len(step) for step in found] == 2 * [6, 6, 6, 2]
    assert sorted(numbers(found[:4])) == sorted(numbers(found[4:])) == [*range(LENGTH)]
    assert (numbers(found[:4]) == [*range(LENGTH)]) is not shuffle
    assert not torch.equal(*(torch.cat(part)[:, 1:].sum(0) for part in (found[:4], found[4:])))
    assert place == {"passes": 2, "samples": 0}


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("most", [1, 3, 4, 6])
def test_a_run_goes_on_where_it_was(kind: str, most: int) -> None:
    whole, _ = steps(0, 1, kind, None, 2)
    first, place = steps(0, 1, kind, None, 2, most)
    rest, _ = steps(0, 1, kind, place, 2, batch_size=6 if most < 6 else 3)
    assert torch.equal(torch.cat([*first, *rest]), torch.cat(whole))


def test_the_last_step_is_filled_up_with_its_own_samples_or_left_out() -> None:
    data = trueshard.loader(range(8), 5)
    found = [(batch.tolist(), data.repeated) for batch in data]
    assert found == [([0, 1, 2, 3, 4], 0), ([5, 6, 7, 5, 6], 2)]
    assert len(data) == 2
    data = trueshard.loader(range(8), 5, drop_last=True)
    assert [batch.tolist() for batch in data] == [[0, 1, 2, 3, 4]]
    assert len(data) == 1


def test_a_pass_that_is_left_early_counts() -> None:
    data = trueshard.loader(Noisy(), 5, shuffle=True)
    first = next(iter(data))
    assert (data.passes, data.state_dict()["samples"]) == (0, 5)
    assert not torch.equal(next(iter(data)), first)
    assert data.passes == 1


def test_the_training_s_own_random_numbers_are_left_alone() -> None:
    def drawn() -> list[float]:
        return [float(torch.rand(())), random.random(), np.random.random()]  # noqa: NPY002

    for dataset in (Noisy(), Stream()):
        results = []
        for looks in (False, True):
            torch.manual_seed(1)
            random.seed(1)
            np.random.seed(1)  # noqa: NPY002
            made = iter(trueshard.loader(dataset, 5)) if looks else iter(range(9))
            results.append([drawn() for _ in itertools.islice(made, 3)])
        assert results[0] == results[1]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(trueshard.TrueShardError, match=naming("shuffle", "iterable")):
        trueshard.loader(Stream(), 4, shuffle=True)
    with pytest.raises(TypeError, match=naming("sampler", "seed")):
        trueshard.loader(Noisy(), 4, sampler=[1])
    with pytest.raises(ValueError, match=naming("batch_size", "1 ranks", "accumulate 3")):
        next(iter(trueshard.loader(Noisy(), 4, accumulate=3)))
    with pytest.raises(ValueError, match=naming("no sample", "drop_last")):
        list(trueshard.loader(Noisy(), 21, drop_last=True))


@pytest.mark.rest
@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_change_nothing_and_passes_after_a_resume_are_whole(kind: str, persistent: bool) -> None:
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent, "shuffle": kind == "sized"}
    whole, _ = steps(0, 1, kind, None, 3, shuffle=kind == "sized")
    assert torch.equal(torch.cat(steps(0, 1, kind, None, 3, **options)[0]), torch.cat(whole))
    first, place = steps(0, 1, kind, None, 3, 2, **options)
    rest, _ = steps(0, 1, kind, place, 3, **options)
    assert torch.equal(torch.cat([*first, *rest]), torch.cat(whole))


@pytest.mark.rest
@pytest.mark.parametrize("kind", DATASETS)
def test_the_order_is_free_of_the_ranks_and_a_run_goes_on_at_another_number(kind: str, pool: Pool) -> None:
    whole, _ = steps(0, 1, kind, None, 2)
    place = None
    parts: list[torch.Tensor] = []
    for count, most in ((2, 3), (3, 2), (1, 1000)):
        answers = Ranks(count, pool).run(steps, kind, place, 2, most)
        assert all(torch.equal(torch.cat(found), torch.cat(answers[0][0])) for found, _ in answers)
        assert all(after == answers[0][1] for _, after in answers)
        parts, place = [*parts, *answers[0][0]], answers[0][1]
    assert torch.equal(torch.cat(parts), torch.cat(whole))


def split_steps(rank: int, world: int) -> tuple[list[Any], Any]:
    options: dict[str, Any] = {"batch_size": 12, "accumulate": 2, "shuffle": True, "num_workers": 2}
    found, place = steps(rank, world, "sized", None, 2, **options)
    return as_sets(found), place


@pytest.mark.rest
def test_a_step_may_be_split_and_workers_make_it(pool: Pool) -> None:
    expected = split_steps(0, 1)
    assert [len(step) for step in expected[0]] == 2 * [12, 8]
    assert Ranks(2, pool).run(split_steps) == 2 * [expected]
    assert Ranks(3, pool).run(split_steps) == 3 * [expected]


@on_ranks(2)
def test_ranks_that_share_a_matrix_read_the_same_and_count_once(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    data = trueshard.loader(range(8), 4, mesh=mesh)
    assert len(data) == 2
    assert [batch.tolist() for batch in data] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert trueshard.gather(torch.tensor([5, 6, 7, 8]), data).tolist() == [5, 6, 7, 8]
    model = nn.Linear(4, 4)
    trueshard.shard(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))["shard"])
    with pytest.raises(ValueError, match=naming("share", "model=")):
        next(iter(trueshard.loader(range(8), 4)))
    assert next(iter(trueshard.loader(range(8), 4, model=model))).tolist() == [0, 1, 2, 3]


@on_ranks(1, 3)
def test_uneven_rows_numbers_and_lists_are_gathered(rank: int, world_size: int) -> None:
    found = trueshard.gather(
        {
            "rows": torch.full((rank, 2), float(rank)),
            "sum": torch.tensor(2.0 + rank, dtype=torch.bfloat16),
            "count": rank,
            "texts": [f"of {rank}"] * (rank + 1),
        }
    )
    rows = [rank for rank in range(world_size) for _ in range(rank)]
    assert torch.equal(found["rows"], torch.tensor(rows, dtype=torch.float32).repeat(2, 1).T)
    assert torch.equal(found["sum"], torch.arange(2, 2 + world_size, dtype=torch.bfloat16))
    assert found["count"].tolist() == [*range(world_size)]
    assert found["texts"] == [f"of {rank}" for rank in range(world_size) for _ in range(rank + 1)]
    assert trueshard.gather(torch.ones(2, requires_grad=True)).tolist() == [1.0] * 2 * world_size


@on_ranks(2)
def test_what_does_not_fit_is_an_error_on_every_rank(rank: int, world_size: int) -> None:
    data = trueshard.loader(range(8), 4)
    next(iter(data))
    with pytest.raises(ValueError, match=naming("values", "pad")):
        trueshard.gather(torch.ones(2, 1 + rank))
    with pytest.raises(ValueError, match=naming("loss", "2 samples")):
        trueshard.gather({"loss": torch.tensor(1.0)}, data)
    with pytest.raises(ValueError, match=naming("loss", "2 samples")):
        trueshard.gather({"loss": torch.ones(2 + rank)}, data)
    with pytest.raises(ValueError, match=naming("keys", "one")):
        trueshard.gather({"one": 1} if rank else {"other": 1})
    assert trueshard.gather({"b": 1, "a": 2} if rank else {"a": 2, "b": 1})["a"].tolist() == [2, 2]


def accuracy(rank: int, world: int) -> tuple[float, float]:
    """A metric over a set that ranks do not divide, and the number of its samples."""
    data = trueshard.loader(range(LENGTH + 3), 6)
    right = [trueshard.gather(batch % 3 == 0, data) for batch in data]
    return torch.cat(right).double().mean().item(), len(torch.cat(right))


def test_a_metric_is_that_of_one_process(pool: Pool) -> None:
    expected = (8 / 23, 23)
    assert accuracy(0, 1) == expected
    for count in (2, 3):
        assert Ranks(count, pool).run(accuracy) == count * [expected]


def prepared(rank: int, world: int, file: str) -> str:
    with trueshard.main_first():
        if not Path(file).exists():
            Path(file).write_text(f"made by {rank}")
    return Path(file).read_text()


def per_machine(rank: int, world: int, folder: str) -> list[str]:
    """Ranks 0 and 1 are on one machine, 2 on another."""
    os.environ |= {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2" if rank < 2 else "1"}
    file = Path(folder, f"machine{rank // 2}")
    with trueshard.main_first(per_machine=True):
        if not file.exists():
            file.write_text(str(rank))
    dist.barrier()
    return [file.read_text() for file in sorted(Path(folder).iterdir())]


def test_rank_0_prepares_and_the_others_find_it(ranks2: Ranks, alone: Ranks, tmp_path: Path) -> None:
    assert ranks2.run(prepared, str(tmp_path / "two")) == 2 * ["made by 0"]
    assert alone.run(prepared, str(tmp_path / "one")) == ["made by 0"]


@pytest.mark.rest
def test_the_first_rank_of_each_machine_prepares(ranks3: Ranks, tmp_path: Path) -> None:
    assert ranks3.run(per_machine, str(tmp_path)) == 3 * [["0", "2"]]


@on_ranks(2)
def test_an_error_of_rank_0_is_everybody_s(rank: int, world_size: int) -> None:
    begun = False
    expected: Any = RuntimeError if rank else FileNotFoundError
    with pytest.raises(expected, match="nowhere"), trueshard.main_first():  # noqa: PT012
        begun = True
        raise FileNotFoundError("nowhere")
    assert begun is (rank == 0)
    dist.barrier()  # nobody waits elsewhere


def lost(rank: int, world: int) -> None:
    dist.barrier()
    with trueshard.main_first():
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.rest
def test_a_lost_rank_0_leaves_nobody_waiting(fresh2: Ranks) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)SIGKILL.*rank 0 failed in main_first: it was lost"):
        fresh2.run(lost)
