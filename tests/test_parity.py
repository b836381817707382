"""The parity helper itself: results, failures with every rank's traceback, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import forks
import parity
from parity import Pool, RankFailure, Ranks, assert_same


@pytest.fixture(scope="module")
def own() -> Any:
    """A pool of this file alone: these tests kill workers that others would have to wait for."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every failure here waits for ranks that will not answer any more."""
    monkeypatch.setattr(parity, "GRACE", 1.5)


def total(rank: int, world_size: int, start: float) -> dict[str, Any]:
    value = torch.tensor(start + rank)
    dist.all_reduce(value)
    return {"total": value, "world": (world_size, dist.get_world_size()), "pid": os.getpid()}


def rank_one_ends(rank: int, world_size: int, how: str) -> None:
    print(f"rank {rank} was here", flush=True)
    if rank == 1 and how == "raises":
        raise ValueError(f"no luck on rank {rank}")
    if rank == 1 and how == "leaves":
        os._exit(1)
    if rank == 1 and how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(600)
    dist.barrier()


def every_rank_raises(rank: int, world_size: int) -> None:
    raise KeyError(f"layers.{rank}.weight")


def soil(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(17)
    os.environ["SOILED"] = "1"
    os.chdir("/")
    warnings.warn("seen", stacklevel=1)


def clean(rank: int, world_size: int) -> tuple[Any, ...]:
    return torch.get_default_dtype(), torch.rand(3), os.environ.get("SOILED"), os.getcwd(), dist.is_initialized()


def sharded(rank: int, world_size: int, shape: tuple[int, ...]) -> torch.Tensor:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    whole = torch.arange(12.0).reshape(6, 2)
    return distribute_tensor(whole, mesh["shard"], [Shard(0)]) * 2


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_runs_on_every_rank_and_returns_plain_tensors(own: Pool, count: int) -> None:
    found = Ranks(count, own).run(total, 1.0)
    assert_same([one["total"] for one in found], [torch.tensor(count * (count + 1) / 2)] * count)
    assert [one["world"] for one in found] == [(count, count)] * count


def test_workers_are_kept_from_run_to_run(own: Pool) -> None:
    first, second = (Ranks(2, own).run(total, 0.0) for _ in range(2))
    assert [one["pid"] for one in first] == [one["pid"] for one in second]


def test_sharded_tensors_come_back_whole_and_meshes_of_different_sizes_do_not_meet(own: Pool) -> None:
    expected = torch.arange(12.0).reshape(6, 2) * 2
    for count, shape in [(2, (2,)), (4, (2, 2)), (3, (3,)), (4, (4,)), (2, (2,))]:
        assert_same(Ranks(count, own).run(sharded, shape), [expected] * count)


def test_each_run_starts_from_a_clean_state(own: Pool) -> None:
    ranks = Ranks(2, own)
    before = ranks.run(clean)
    ranks.run(soil)
    assert_same(ranks.run(clean), before)
    assert "seen" in (ranks.run(soil), ranks.output[1])[1]
    assert ranks.run(clean, group=False)[0][-1] is False


@pytest.mark.parametrize(
    ("how", "says", "limit"),
    [
        pytest.param("raises", "ValueError: no luck on rank 1", 6.0, marks=pytest.mark.rest),
        ("leaves", "rank 1 died with exit code 1", 6.0),
        ("is killed", "rank 1 died with signal SIGKILL", 6.0),
        pytest.param("hangs", "rank 1 did not end", 2.0, marks=pytest.mark.rest),
    ],
)
def test_a_failure_shows_every_rank_and_the_pool_goes_on(own: Pool, how: str, says: str, limit: float) -> None:
    """And what they printed."""
    ranks = Ranks(3, own)
    ranks.run(total, 0.0)
    with pytest.raises(RankFailure) as failure:
        ranks.run(rank_one_ends, how, timeout=limit)
    message = str(failure.value)
    assert says in message
    for rank in (0, 1, 2):
        part = message.split(f"---- rank {rank} ")[1].split("---- rank")[0]
        assert "rank_one_ends" in part or "died" in part, message
    assert "rank 2 printed\nrank 2 was here" in message
    ranks.run(total, 0.0)


def test_raises_wants_every_rank_to_raise(own: Pool) -> None:
    ranks = Ranks(2, own)
    assert ranks.raises(every_rank_raises, match=r"layers\.\d") == [
        f"KeyError: 'layers.{rank}.weight'" for rank in (0, 1)
    ]
    with pytest.raises(RankFailure, match="layers"):
        ranks.raises(every_rank_raises, match="something else")
    with pytest.raises(RankFailure, match="rank 1 returned"):
        ranks.raises(total, 0.0)


def test_a_function_that_workers_cannot_import_is_refused(own: Pool) -> None:
    with pytest.raises(TypeError, match="top of a module"):
        Ranks(2, own).run(lambda rank, world_size: None)


def test_no_worker_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import os, signal
        from parity import Ranks
        from test_parity import total
        print(*[one["pid"] for one in Ranks(2).run(total, 0.0)], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    folder = str(Path(__file__).parent)
    parent = forks.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": folder},
        timeout=120,
    )
    pids = [int(pid) for pid in parent.stdout.split()]
    assert len(pids) == 2, parent.stderr
    deadline = time.monotonic() + 10
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(running, pids))


def running(pid: int) -> bool:
    """Whether the process is alive; one that ended and that nobody waited for yet is not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def test_assert_same_names_the_key_and_the_difference() -> None:
    expected = {"model": {"weight": torch.ones(2, 2), "steps": 3}, "groups": [{"lr": 0.1}]}
    assert_same(
        {"model": {"weight": torch.ones(2, 2) + 1e-7, "steps": 3}, "groups": [{"lr": 0.1}]}, expected, atol=1e-6
    )
    changed = {"model": {"weight": torch.tensor([[1.0, 1.5], [1.0, 1.0]]), "steps": 4}, "groups": [{"lr": 0.2}]}
    with pytest.raises(AssertionError) as failure:
        assert_same(changed, expected, rtol=1e-6)
    message = str(failure.value)
    assert "model.weight: 1 of 4 elements differ, by up to 0.5" in message
    assert "model.steps: 4, expected 3" in message
    assert "groups[0].lr: 0.2, expected 0.1" in message
    with pytest.raises(AssertionError, match="keys missing"):
        assert_same({"a": 1}, {"a": 1, "b": 2})
    with pytest.raises(AssertionError, match="float64"):
        assert_same(torch.ones(2, dtype=torch.float64), torch.ones(2))
