"""Saving changes nothing, in the background or not; misuse is an error on every rank; which checkpoints are kept."""

from __future__ import annotations

import gc
import re
import resource
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import trueshard
from checkpointing import LAYOUTS, SETUPS, adamw, draw, everything, go_on, named, seed, started
from messages import naming
from meter import gloo_lets_go
from models.handmade import Stack
from parity import Ranks, assert_same
from resting import all_but
from traffic import Traffic


def stack(seed: int = 0, **options: Any) -> tuple[Stack, torch.optim.AdamW]:
    """A sharded model and its optimizer."""
    torch.manual_seed(seed)
    model = Stack(**options)
    optimizer = adamw(model)
    trueshard.shard(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world_size: int, number: int = 0) -> None:
    go_on(SETUPS["fewer rows than ranks"], model, optimizer, rank, world_size, [number])


# Saving has no effect on training


def interrupted(rank: int, world_size: int, folder: str, name: str, how: str) -> Any:
    """Two steps: with saves before, after forward, after backward, and at the end; or without any."""
    setup = SETUPS[name]
    model, optimizer = started(setup, LAYOUTS[str(world_size)])
    seed(rank)

    def save(label: str) -> None:
        if how != "not":
            before = [list(each.state) for each in named(optimizer).values()]
            path = Path(folder, how, label)
            trueshard.save(path, model=model, optimizer=optimizer, wait=how == "waiting", label=label)
            assert [list(each.state) for each in named(optimizer).values()] == before

    for number in range(2):
        save(f"before {number}")
        loss = setup.loss(model, number, rank, world_size)
        save(f"after forward {number}")
        loss.backward()
        save(f"after backward {number}")
        for each in named(optimizer).values():
            each.step()
            each.zero_grad()
    save("before 2")
    report = everything(model, optimizer) | {"random": draw()}
    for number in range(2 if how != "not" else 0):
        kept = []
        for label in ("before", "after forward", "after backward"):  # the same state: no step lies between them
            trueshard.load(Path(folder, how, f"{label} {number}"), model=model, optimizer=optimizer)
            kept.append(everything(model, optimizer))
        assert_same(kept[1:], kept[:1] * 2)
    return report


@pytest.mark.parametrize(
    ("name", "count"),
    all_but([("dropout", 2)], [("dropout", 1), ("dropout", 2), ("never used", 2), ("Muon and SGD", 3)], unpack=True),
)
def test_saving_changes_nothing_in_the_training_that_follows(
    name: str, count: int, tmp_path: Path, alone: Ranks, ranks2: Ranks, ranks3: Ranks
) -> None:
    """From step 0 on, when optimizers have no state yet; between forward and backward; in random numbers neither."""
    ranks = {1: alone, 2: ranks2, 3: ranks3}[count]
    expected = ranks.run(interrupted, str(tmp_path), name, "not")
    for how in ("waiting", "behind"):
        for result, reference in zip(ranks.run(interrupted, str(tmp_path), name, how), expected, strict=True):
            assert_same(result, reference)


# In the background


def behind(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = stack(width=256)
    step(model, optimizer, rank, world_size)
    ballast = torch.full((4 << 20,), 0.0)
    kept, first = everything(model, optimizer), Path(folder, "first")
    saving = trueshard.save(first, model=model, optimizer=optimizer, wait=False, ballast=ballast, step=1)
    assert saving is not None
    ballast.fill_(1.0)
    for number in range(1, 4):
        step(model, optimizer, rank, world_size, number)
    later = everything(model, optimizer)
    second = trueshard.save(Path(folder, "second"), model=model, optimizer=optimizer, wait=False)
    assert saving.done
    assert first.is_dir()
    assert second is not None
    second.wait()
    assert second.done
    for name, state in (("first", kept), ("second", later)):
        result = trueshard.load(Path(folder, name), model=model, optimizer=optimizer)
        assert_same(everything(model, optimizer), state)
        if name == "first":
            assert_same(dict(result), {"ballast": torch.zeros(4 << 20), "step": 1})


@pytest.mark.parametrize("count", all_but([2], [1, 2]))
def test_what_is_saved_in_the_background_is_as_it_was_at_the_call(
    count: int, tmp_path: Path, alone: Ranks, ranks2: Ranks
) -> None:
    """Training goes on at once, and writes to the same tensors; a second save waits for the first."""
    (alone if count == 1 else ranks2).run(behind, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def hashed_meanwhile(rank: int, world_size: int, folder: str) -> list[str]:
    """Ranks begin to hash at different moments of a save in the background."""
    model, optimizer = stack()
    step(model, optimizer, rank, world_size)
    totals = [trueshard.state_hash(model, optimizer).total]
    for number in range(3):
        ballast = torch.full((1 << 20,), float(number))
        saving: Any = trueshard.save(Path(folder, str(number)), model=model, wait=False, ballast=ballast)
        time.sleep(0.004 * rank)
        for _ in range(10):
            totals.append(trueshard.state_hash(model, optimizer).total)
            trueshard.check_replicas(model, optimizer)
        saving.wait()
    return totals


def test_states_are_hashed_and_compared_while_a_save_goes_on(tmp_path: Path, ranks3: Ranks) -> None:
    """The exchanges of both do not mix, in whichever order each rank's threads come to them."""
    assert len({total for totals in ranks3.run(hashed_meanwhile, str(tmp_path)) for total in totals}) == 1


def too_large(rank: int, world_size: int, folder: str, where: int, then: str) -> list[str]:
    """Rank ``where`` may not write files as large as the checkpoint's; the background finds out."""
    model = nn.Linear(1024, 1024)
    trueshard.shard(model)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == where:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, unlimited[1]))
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: trueshard.save(Path(folder, "next"), model=model),
        "load": lambda: trueshard.load(Path(folder, "before"), model=model),
    }
    try:
        saving: Any = trueshard.save(Path(folder, "failed"), model=model, wait=False)
        with pytest.raises((OSError, RuntimeError), match=r"model\.safetensors|File too large") as caught:
            calls.get(then, saving.wait)()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    trueshard.save(Path(folder, "next"), model=model)  # its error was told, and is over
    return [type(caught.value).__name__, str(caught.value)]


@pytest.mark.parametrize(("where", "then"), [(0, "save"), (1, "load"), (1, "wait"), (1, "save")])
def test_an_error_in_the_background_is_raised_at_the_next_call(
    where: int, then: str, tmp_path: Path, ranks2: Ranks
) -> None:
    raised = ranks2.run(too_large, str(tmp_path), where, then)
    assert raised[where][0] == "OSError"
    assert "model.safetensors" in raised[where][1]
    assert raised[1 - where][0] == "RuntimeError"
    assert f"rank {where} failed" in raised[1 - where][1]
    assert [path.name for path in tmp_path.iterdir()] == ["next"], "what was written of the failed save is still there"


def held_now() -> dict[str, int]:
    """What this process holds: bytes of tensors, open files, process groups, threads."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and not isinstance(each, DTensor)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return {
        "bytes": sum(storages.values()),
        "files": psutil.Process().num_fds(),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "threads": threading.active_count(),
    }


def again_and_again(rank: int, world_size: int, folder: str, wait: bool) -> list[dict[str, int]]:
    model, optimizer = stack(width=64)
    step(model, optimizer, rank, world_size)
    with gloo_lets_go():
        first = trueshard.save(Path(folder, "first"), model=model, optimizer=optimizer, wait=wait)
        if first is not None:
            first.wait()
        result, kept = [held_now()], []
        for number in range(4):
            path = Path(folder, f"{number}")
            kept.append(trueshard.save(path, model=model, optimizer=optimizer, wait=wait))
            if (saving := kept[-1]) is not None:
                saving.wait()
            result.append(held_now())
            trueshard.load(path, model=model, optimizer=optimizer)
            result.append(held_now())
    return result


@pytest.mark.rest
@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "behind"])
def test_what_a_process_holds_is_the_same_after_every_save_and_load(wait: bool, tmp_path: Path, ranks2: Ranks) -> None:
    """Memory, files, process groups and threads, though the user keeps what each ``save`` returned."""
    for first, *later in ranks2.run(again_and_again, str(tmp_path), wait):
        assert [(each["bytes"], each["groups"]) for each in later] == [(first["bytes"], first["groups"])] * 8
        for kind in ("files", "threads"):  # of the test before, some may end only now
            assert max(each[kind] for each in later) <= first[kind], kind


def received(rank: int, world_size: int, folder: str, width: int) -> tuple[float, float, int, int]:
    """(bytes received to save, to load, training's collectives meanwhile, bytes of the model)."""
    model, optimizer = stack(width=width)
    step(model, optimizer, rank, world_size)
    path, training = Path(folder, f"{width}"), dist.group.WORLD
    assert training is not None
    before = training._get_sequence_number_for_group()
    with Traffic() as save:
        trueshard.save(path, model=model, optimizer=optimizer)
    with Traffic() as load:
        trueshard.load(path, model=model, optimizer=optimizer)
    after = training._get_sequence_number_for_group()
    return save.total, load.total, after - before, sum(p.nbytes for p in model.parameters())


def test_no_rank_receives_tensors_to_save_or_load_and_training_s_group_is_left_alone(
    tmp_path: Path, ranks3: Ranks
) -> None:
    """Names and checksums alone travel, so a model of a thousand times the bytes costs no more but for some digits."""
    small, large = (ranks3.run(received, str(tmp_path), width) for width in (8, 320))
    for (save, load, _, few), (larger_save, larger_load, collectives, many) in zip(small, large, strict=True):
        assert many > 1000 * few
        assert abs(larger_save - save) < 3000
        assert abs(larger_load - load) < 3000
        assert collectives == 0


# Misuse


def lonely(rank: int, world_size: int, folder: str, caller: int, call: str) -> None:
    """One rank saves or loads, in a group that waits three seconds; the other is alive until it has heard of it."""
    store, over = f"file://{folder}/store", Path(folder, "over")
    limit = timedelta(seconds=3)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=limit)
    model, optimizer = stack()
    if call == "load":
        trueshard.save(Path(folder, "whole"), model=model, optimizer=optimizer)
    if rank != caller:
        deadline = time.monotonic() + 30
        while not over.exists():
            assert time.monotonic() < deadline, "the call goes on"
            time.sleep(0.05)
        return
    try:
        words: dict[str, Any] = {"model": model, "optimizer": optimizer}
        path, function = Path(folder, "alone"), trueshard.save
        if call == "load":
            path, function = Path(folder, "whole"), trueshard.load
        elif call == "behind":
            words["wait"] = False
        with pytest.raises(RuntimeError, match=naming("collective", "all ranks")):
            function(path, **words)
    finally:
        over.touch()


@pytest.mark.rest
@pytest.mark.parametrize(("caller", "call"), [(0, "save"), (1, "behind"), (1, "load")])
def test_a_call_on_one_rank_alone_ends_in_an_error(caller: int, call: str, tmp_path: Path, ranks2: Ranks) -> None:
    ranks2.run(lonely, str(tmp_path), caller, call, group=False)
    assert not (tmp_path / "alone").exists()


DIFFERENT: dict[str, Callable[[SimpleNamespace], object]] = {
    "save: path": lambda c: c.save(f"new{c.rank}", **c.both),
    "save: no model": lambda c: c.save(**(c.first(**c.both) or {"more": 1})),
    "save: no optimizer": lambda c: c.save(model=c.model, **c.first(optimizer=c.optimizer)),
    "save: no optimizer, which has no state": lambda c: c.save(model=c.model, **c.first(optimizer=c.new[0])),
    "save: another optimizer": lambda c: c.save(model=c.model, optimizer=c.new[c.rank]),
    "save: entries": lambda c: c.save(**c.both, **{f"entry{c.rank}": 1}),
    "save: an entry's shape": lambda c: c.save(**c.both, entry=torch.zeros(2 + c.rank)),
    "save: an entry's dtype": lambda c: c.save(**c.both, entry=torch.zeros(2).to([None, torch.half][c.rank])),
    "save: what cannot be saved": lambda c: c.save(**c.both, entry=object() if c.rank else 1),
    "save: model": lambda c: c.save(model=Stack(depth=1 + c.rank)),
    "load: path": lambda c: c.load(["whole", "other"][c.rank], **c.both),
    "load: no optimizer": lambda c: c.load(model=c.model, **c.first(optimizer=c.optimizer)),
    "load: no model": lambda c: c.load(**c.first(model=c.model)),
    "load: model": lambda c: c.load(model=Stack(depth=1 + c.rank)),
    "load: verify": lambda c: c.load(**c.both, verify=not c.rank),
    "load: strict": lambda c: c.load(**c.both, strict=not c.rank),
    "load: entries": lambda c: c.load(**c.first(schedule=c.schedule)),
}
"""Calls whose arguments depend on the rank; ``first``: words that only rank 0 says."""
SOME = tuple(DIFFERENT)[::4]


def differing(rank: int, world_size: int, folder: str, names: tuple[str, ...]) -> dict[str, str]:
    """The error that this rank got from each call; model and optimizer are as they were."""
    model, optimizer = stack()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for path in ("other", "whole"):
        step(model, optimizer, rank, world_size)
        trueshard.save(Path(folder, path), model=model, optimizer=optimizer, schedule=schedule)
    step(model, optimizer, rank, world_size)
    kept = everything(model, optimizer)
    caller = SimpleNamespace(
        rank=rank,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        both={"model": model, "optimizer": optimizer},
        new=[torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())],
        first=lambda **words: {} if rank else words,
        save=lambda name="new", **words: trueshard.save(Path(folder, name), **words),
        load=lambda name="whole", **words: trueshard.load(Path(folder, name), **words),
    )
    errors = dict.fromkeys(names, "nothing")
    for name in names:
        try:
            DIFFERENT[name](caller)
        except Exception as caught:
            errors[name] = f"{type(caught).__name__}: {caught}"
        dist.barrier()
        assert_same({name: everything(model, optimizer)}, {name: kept})
    return errors


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SOME, id="some"),
        pytest.param(tuple(name for name in DIFFERENT if name not in SOME), id="others", marks=pytest.mark.rest),
    ],
)
def test_different_arguments_on_different_ranks_are_an_error_on_every_rank(
    names: tuple[str, ...], tmp_path: Path, ranks2: Ranks
) -> None:
    for errors in ranks2.run(differing, str(tmp_path), names):
        for name, error in errors.items():
            assert re.search("different|cannot|neither|does not fit", error), (name, error)
            # They find out what they differ in, and do not wait for their group.
            assert "timed out" not in error.lower(), (name, error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "whole"]


def refused(rank: int, world_size: int, folder: str) -> None:
    """What cannot be saved, on every rank, in words."""
    model, optimizer = stack()
    path = Path(folder, "there")
    trueshard.save(path, model=model)
    with pytest.raises(FileExistsError if rank == 0 else RuntimeError, match=naming("there", "already")):
        trueshard.save(path, model=model)
    with pytest.raises(ValueError, match="in none"):
        trueshard.save(Path(folder, "no"), optimizer=optimizer)
    with pytest.raises(TypeError, match=naming("more/deep/list/1", "object")):
        trueshard.save(Path(folder, "no"), deep={"list": [1, object()]})
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=naming("weight", "meta")):
        trueshard.save(Path(folder, "no"), model=empty)
    with pytest.raises(FileNotFoundError, match="nothing"):
        trueshard.load(Path(folder, "nothing"), model=model)
    with pytest.raises(ValueError, match="'tepm'"):
        trueshard.load(path, model=model, tepm=optimizer)


def test_what_cannot_be_saved_or_loaded_is_said_in_words(tmp_path: Path, alone: Ranks, ranks2: Ranks) -> None:
    alone.run(refused, str(tmp_path / "one"))
    ranks2.run(refused, str(tmp_path / "two"))
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["there"]


# Random numbers, and the user's own entries


def entries(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = stack()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step(model, optimizer, rank, world_size)
    schedule.step()
    seed(rank)
    mine = {
        "schedule": schedule,
        "list": [1, "a", None, 2.5, float("nan"), {"deep": torch.arange(3, dtype=torch.int16)}],
        "pair": (torch.tensor(True), {7: "seven"}),
        "cut": {"weight": model.first.weight},
        "empty": {},
    }
    trueshard.save(Path(folder, "one"), model=model, optimizer=optimizer, **mine)
    drawn = draw()
    schedule.step()
    result = trueshard.load(Path(folder, "one"), schedule=schedule, rng=False)
    other = draw()
    assert not torch.equal(other["torch"], drawn["torch"])
    assert not {other["random"], other["numpy"]} & {drawn["random"], drawn["numpy"]}
    assert schedule.last_epoch == 1
    expected = {key: value for key, value in mine.items() if key != "schedule"}
    assert_same(dict(result), expected | {"cut": {"weight": model.first.weight.full_tensor()}})
    trueshard.load(Path(folder, "one"), model=model)
    assert_same(draw(), drawn)


def test_entries_come_back_as_they_were_and_random_numbers_unless_told_not_to(tmp_path: Path, ranks3: Ranks) -> None:
    ranks3.run(entries, str(tmp_path))


# Which are there, and which are kept


def kept(rank: int, world_size: int, folder: str, wait: bool) -> list[Any]:
    model, optimizer = stack()
    every = trueshard.Checkpoints(folder, keep_last=2, keep_every=4, keep_best=1, metric="loss")
    assert every.latest() is None
    assert every.best() is None
    assert trueshard.latest(folder) is None
    for number, loss in enumerate([5.0, 4.0, 1.0, 3.0, float("nan"), 2.0, 2.0, 9.0]):
        step(model, optimizer, rank, world_size)
        every.save(number, metrics={"loss": loss}, model=model, optimizer=optimizer, wait=wait)
    every.save(8, metrics={"loss": 7.0}, model=model, optimizer=optimizer)
    Path(folder, f".step-00000009.partial-0000000{rank}").mkdir()
    Path(folder, f"step-0000001{rank}").mkdir()  # somebody's empty directory
    latest, best = every.latest(), every.best()
    assert latest == trueshard.latest(folder) == Path(folder, "step-00000008")
    result = trueshard.load(latest, model=model, optimizer=optimizer)
    assert result["progress"]["step"] == 8
    assert best is not None
    return [every.steps(), best.name]


@pytest.mark.parametrize("wait", all_but([False], [True, False]))
def test_the_last_the_best_and_every_fourth_are_kept(wait: bool, tmp_path: Path, ranks2: Ranks) -> None:
    for result in ranks2.run(kept, str(tmp_path), wait):
        assert result == [[0, 2, 4, 7, 8], "step-00000002"]


def test_words_of_retention_are_checked(tmp_path: Path) -> None:
    for words, message in (
        ({"keep_last": 0}, "keep_last"),
        ({"keep_every": -1}, "keep_every"),
        ({"mode": "most"}, "mode"),
    ):
        with pytest.raises(ValueError, match=message):
            trueshard.Checkpoints(tmp_path, **words)
    with pytest.raises(ValueError, match=r"'loss'.*\['accuracy'\]"):
        trueshard.Checkpoints(tmp_path, keep_best=1).save(1, metrics={"accuracy": 1.0}, model=nn.Linear(1, 1))
    assert not list(tmp_path.iterdir())
