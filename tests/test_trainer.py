"""The Trainer: a step is that of one process, and what is resumed goes on as if it had never stopped."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import trueshard
from gathering import whole
from messages import lacking
from parity import Ranks, assert_same
from resting import all_but
from trueshard.checkpoint.state import seed_all

ROWS, LENGTH, VOCABULARY = 12, 6, 31
"""of one step, over all ranks; 12 rows divide by 1, 2 and 3 ranks"""


class Model(nn.Module):
    """Uneven shards, dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 10)
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.head = nn.Linear(10, VOCABULARY)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + self.dropout(torch.tanh(block(hidden)))
        return self.head(hidden)


class Summed:
    """Cross entropy summed over the targets."""

    def count(self, batch: Any) -> int:
        return int(batch["targets"].ne(-100).sum())

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(
            model(batch["ids"]).flatten(0, 1), batch["targets"].flatten(), ignore_index=-100, reduction="sum"
        )


class Batches:
    """Microbatches of a rank: a pure function of how many were taken. Row i has i // 2 targets that count."""

    def __init__(self, rank: int, ranks: int, parts: int = 1, poisoned: tuple[int, ...] = ()) -> None:
        self.rank, self.ranks, self.parts, self.poisoned = rank, ranks, parts, poisoned
        self.taken = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            step, part = divmod(self.taken, self.parts)
            ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
            targets = ids[:, 1:].clone()
            for row in range(ROWS):
                targets[row, row // 2 :] = -100
            if step in self.poisoned:
                ids[:, 0] = -1
            own = [each.chunk(self.ranks)[self.rank].tensor_split(self.parts)[part] for each in (ids[:, :-1], targets)]
            self.taken += 1
            yield {"ids": own[0], "targets": own[1]}

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


class Poisonable(Model):
    """Its output is NaN where an id is below 0."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids.clamp(min=0)) * torch.where(ids < 0, math.nan, 1.0)[..., None]


class Recorder(trueshard.Callback):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_start(self, trainer: Any) -> None:
        self.events.append("start")

    def on_step(self, trainer: Any, record: dict[str, Any]) -> None:
        self.events.append(record)

    def on_evaluation(self, trainer: Any, record: dict[str, float]) -> None:
        self.events.append("evaluation")

    def on_checkpoint(self, trainer: Any, path: Path) -> None:
        self.events.append(path.name)

    def on_end(self, trainer: Any) -> None:
        self.events.append("end")


def build(rank: int, world_size: int, steps: int = 4, model: type[Model] = Model, **settings: Any) -> Any:
    dropout = settings.pop("dropout", 0.0)
    module = model(dropout)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    if world_size > 1:
        trueshard.shard(module, optimizer)
    torch.manual_seed(100 + rank)
    recorder = Recorder()
    settings.setdefault("loader", Batches(rank, world_size, settings.get("accumulate", 1)))
    schedule = settings.pop("schedule", None)
    trainer = trueshard.Trainer(
        module,
        optimizer,
        settings.pop("loader"),
        loss=settings.pop("loss", Summed()),
        steps=steps,
        callbacks=[*settings.pop("callbacks", []), recorder],
        scheduler=schedule and schedule(optimizer),
        **settings,
    )
    return trainer, recorder


def outcome(trainer: Any, recorder: Recorder) -> dict[str, Any]:
    records = [event for event in recorder.events if isinstance(event, dict)]
    return {
        "loss": [record["loss"] for record in records],
        "norm": [record["grad_norm"] for record in records],
        "parameters": whole(dict(trainer.model.named_parameters())),
    }


def trained(rank: int, world_size: int, **settings: Any) -> dict[str, Any]:
    trainer, recorder = build(rank, world_size, **settings)
    assert trainer.fit()
    return outcome(trainer, recorder)


def accumulated(rank: int, world_size: int, accumulate: int) -> dict[str, Any]:
    return trained(rank, world_size, accumulate=accumulate)


def six_steps(rank: int, world_size: int) -> dict[str, Any]:
    return trained(rank, world_size, steps=6)


def by_hand(rank: int, world_size: int) -> dict[str, Any]:
    """What one process computes without any of this."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    report: dict[str, Any] = {"loss": [], "norm": []}
    batches = iter(Batches(0, 1))
    for _ in range(4):
        batch = next(batches)
        loss = F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)
        loss.backward()
        report["norm"].append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        report["loss"].append(loss.item())
    return report | {"parameters": whole(dict(model.named_parameters()))}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_is_that_of_one_process(ranks2: Ranks, ranks3: Ranks, accumulate: int) -> None:
    expected = by_hand(0, 1)
    for ranks in (ranks2, ranks3):
        for found in ranks.run(accumulated, accumulate):
            assert_same(found, expected, rtol=1e-4, atol=1e-5)


def resumed(rank: int, world_size: int, folder: str, kind: str, stop_at: int = 6) -> dict[str, Any]:
    """One run that is whole, one that stops, in its second pass, and is gone on from; with dropout."""

    def settings(name: str) -> dict[str, Any]:
        common: dict[str, Any] = {
            "dropout": 0.3,
            "steps": 7,
            "checkpoints": trueshard.Checkpoints(Path(folder) / name),
            "schedule": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7),
        }
        if kind == "own":
            return common
        ids = torch.randint(0, VOCABULARY, (10, LENGTH), generator=torch.Generator().manual_seed(5))
        own = torch.Generator().manual_seed(7) if "generator" in kind else None
        loader = DataLoader(TensorDataset(ids), batch_size=2, shuffle=True, generator=own)  # 5 batches a pass
        return common | {"loader": loader, "loss": mean_loss}

    uninterrupted = trained(rank, world_size, **settings("whole"))
    first, told = build(rank, world_size, **settings("stopped"))
    first.wants_stop = lambda: first.step == stop_at - 1 and rank == world_size - 1
    assert not first.fit()
    assert first.step == stop_at
    before = outcome(first, told)
    second, told = build(rank, world_size, **settings("stopped"))
    assert second.fit()
    after = outcome(second, told)
    joined = after | {key: before[key] + after[key] for key in ("loss", "norm")}
    return {"whole": uninterrupted, "joined": joined}


def stopped_between_evaluations(rank: int, world_size: int, folder: str) -> Any:
    batch = next(iter(Batches(0, 1)))
    kept = {"evaluation": [batch], "evaluate_every": 4, "steps": 8, "checkpoints": trueshard.Checkpoints(folder)}
    first, told = build(rank, world_size, **kept)
    first.wants_stop = lambda: first.step == 2
    first.fit()
    second, more = build(rank, world_size, **kept)
    second.fit()
    return [sum(event == "evaluation" for event in each.events) for each in (told, more)]


def test_a_stop_evaluates_nothing_that_the_run_would_not_have(ranks2: Ranks, tmp_path: Path) -> None:
    assert ranks2.run(stopped_between_evaluations, str(tmp_path)) == [[0, 2]] * 2


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    (ids,) = batch
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("kind", all_but(["own"], ["own", "a shuffling DataLoader", "one with its own generator"]))
def test_a_resumed_run_goes_on_bit_for_bit(ranks2: Ranks, tmp_path: Path, kind: str) -> None:
    for found in ranks2.run(resumed, str(tmp_path), kind, timeout=120):
        assert found["whole"]["loss"] == found["joined"]["loss"]
        assert found["whole"]["norm"] == found["joined"]["norm"]
        for name, value in found["whole"]["parameters"].items():
            assert torch.equal(value, found["joined"]["parameters"][name]), name


class Noisy(Dataset[torch.Tensor]):
    """Row number, and a number by each generator that an augmentation may use."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> torch.Tensor:
        drawn = [float(torch.rand(())), np.random.rand(), random.random()]  # noqa: NPY002
        return torch.tensor([row, *drawn], dtype=torch.float64)


def augmented(rank: int, world_size: int, folder: str, options: dict[str, Any], stop_at: int) -> list[list[bool]]:
    """Whether the rows, and what each generator drew for them, are those of a run that was not stopped."""
    seen: list[torch.Tensor] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.append(batch.clone())
        return model(batch.float()).square().mean()

    def run(name: str, seed: int, until: int) -> torch.Tensor:
        seen.clear()
        seed_all(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trueshard.shard(model, optimizer)
        loader = DataLoader(Noisy(), batch_size=2, shuffle=True, **options)  # 4 batches a pass
        trainer = trueshard.Trainer(
            model, optimizer, loader, loss=loss, steps=10, checkpoints=trueshard.Checkpoints(Path(folder) / name)
        )
        trainer.wants_stop = lambda: trainer.step == until - 1
        trainer.fit()
        return torch.stack(seen)

    whole = run("whole", 0, 11)
    joined = torch.cat([run("stopped", 0, stop_at), run("stopped", 99, 11)])
    return (whole == joined).all(dim=(0, 1)).tolist()  # type: ignore[no-any-return]


@pytest.mark.rest
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_random_augmentations_go_on_where_they_were(alone: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    """But those of workers that outlive a pass, whose generators no checkpoint can have: the rows alone are right."""
    drawn = "persistent_workers" not in options
    assert alone.run(augmented, str(tmp_path), options, 6, timeout=120) == [[True, drawn, drawn, drawn]]


def in_part(rank: int, world_size: int, folder: str, steps: int, until: int) -> dict[str, Any]:
    trainer, recorder = build(rank, world_size, steps=steps, checkpoints=trueshard.Checkpoints(folder))
    trainer.wants_stop = lambda: trainer.step == until - 1
    trainer.fit()
    return outcome(trainer, recorder)


@pytest.mark.rest
def test_another_number_of_ranks_goes_on_with_the_same_samples(
    ranks2: Ranks, ranks3: Ranks, alone: Ranks, tmp_path: Path
) -> None:
    expected = alone.run(six_steps)[0]
    losses = []
    for ranks, until in ((ranks3, 2), (ranks2, 4), (alone, 6)):
        found = ranks.run(in_part, str(tmp_path), 6, until)[0]
        losses += found["loss"]
    assert_same(losses, expected["loss"], rtol=1e-4)
    assert_same(found["parameters"], expected["parameters"], rtol=1e-3, atol=1e-4)


def poisoned(rank: int, world_size: int, skip: int) -> Any:
    loader = Batches(rank, world_size, poisoned=(2,))
    trainer, recorder = build(rank, world_size, model=Poisonable, loader=loader, skip_nonfinite=skip)
    try:
        trainer.fit()
    except trueshard.NonFiniteLoss as error:
        finite = all(bool(each.isfinite().all()) for each in whole(list(trainer.model.parameters())))
        return str(error), finite, recorder.events[-1]
    return trainer.skipped, outcome(trainer, recorder)


def test_a_loss_that_is_no_number_ends_the_run_before_it_reaches_a_parameter(ranks2: Ranks) -> None:
    for message, finite, last in ranks2.run(poisoned, 0):
        assert lacking(message, "step 3", "loss", "nan") == []
        assert "microbatches 2 to 2" in message
        assert finite
        assert last == "end"


def poisoned_after_a_checkpoint(rank: int, world_size: int, folder: str) -> list[int]:
    kept = trueshard.Checkpoints(folder)
    loader = Batches(rank, world_size, poisoned=(2,))
    trainer, _ = build(rank, world_size, model=Poisonable, loader=loader, checkpoints=kept, checkpoint_every=1)
    with pytest.raises(trueshard.NonFiniteLoss):
        trainer.fit()
    return kept.steps()


def test_the_checkpoint_before_a_loss_that_is_no_number_is_whole(ranks2: Ranks, tmp_path: Path) -> None:
    assert ranks2.run(poisoned_after_a_checkpoint, str(tmp_path)) == [[1, 2], [1, 2]]


def on_a_full_disk(rank: int, world_size: int, folder: str) -> tuple[str, int]:
    """Files may have 100 bytes."""
    import resource

    kept = trueshard.Checkpoints(folder)
    trainer, _ = build(rank, world_size, steps=2000, checkpoints=kept, checkpoint_every=1000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        trainer.save()
        trainer.fit()
    except (OSError, RuntimeError) as error:
        return str(error), trainer.step
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "", trainer.step


def test_a_checkpoint_that_fails_in_the_background_ends_the_run_soon(ranks2: Ranks, tmp_path: Path) -> None:
    for message, step in ranks2.run(on_a_full_disk, str(tmp_path)):
        assert "too large" in message
        assert step < 1000
    assert not trueshard.Checkpoints(tmp_path).steps()


def test_a_loss_that_is_no_number_may_be_skipped(ranks2: Ranks) -> None:
    for skipped, found in ranks2.run(poisoned, 1):
        assert skipped == 1
        assert [math.isnan(loss) for loss in found["loss"]] == [False, False, True, False]
        assert all(bool(value.isfinite().all()) for value in found["parameters"].values())


def evaluated(rank: int, world_size: int, shares: tuple[int, ...]) -> dict[str, Any]:
    """`shares`: how many of the microbatches each rank has."""
    everything = next(iter(Batches(0, 1)))
    single = [{key: value[row : row + 1] for key, value in everything.items()} for row in range(ROWS)]
    own = single[sum(shares[:rank]) : sum(shares[: rank + 1])]
    trainer, recorder = build(rank, world_size, dropout=0.3, evaluation=own, evaluate_every=2)
    first = trainer.evaluate()
    noise = torch.get_rng_state()
    assert trainer.evaluate() == first
    assert torch.equal(noise, torch.get_rng_state())
    assert trainer.model.training
    trainer.fit()
    return {"first": first, "events": [e if isinstance(e, str) else "step" for e in recorder.events]}


def test_an_evaluation_counts_each_sample_once_and_changes_nothing(alone: Ranks, ranks3: Ranks) -> None:
    expected = alone.run(evaluated, (ROWS,))[0]["first"]
    assert expected["count"] == sum(row // 2 for row in range(ROWS))
    assert expected["perplexity"] == pytest.approx(math.exp(expected["loss"]))
    for shares in ((7, 1, 4), (0, 12, 0)):  # a rank without any takes part with another's
        for found in ranks3.run(evaluated, shares):
            assert found["first"] == pytest.approx(expected, rel=1e-6)
            assert found["events"][2:] == [
                *("start", "step", "evaluation", "step", "step", "evaluation", "step", "end"),
            ]


def without_improvement(rank: int, world_size: int, folder: str) -> Any:
    batch = next(iter(Batches(0, 1)))
    trainer, recorder = build(
        rank,
        world_size,
        steps=50,
        evaluation=[batch],
        evaluate_every=1,
        patience=2,
        checkpoints=trueshard.Checkpoints(folder),
    )
    trainer.optimizer.param_groups[0]["lr"] = 5.0  # so high that it cannot go well
    done = trainer.fit()
    again, _ = build(rank, world_size, steps=50, patience=2, checkpoints=trueshard.Checkpoints(folder))
    assert not again.fit()
    assert (again.step, again.stopped) == (trainer.step, trainer.stopped)
    return done, trainer.stopped, trainer.step, trainer.worse, [e for e in recorder.events if isinstance(e, str)]


def test_training_stops_when_evaluations_get_no_better(ranks2: Ranks, tmp_path: Path) -> None:
    for done, why, step, worse, events in ranks2.run(without_improvement, str(tmp_path)):
        assert not done
        assert lacking(why, "evaluation", 2) == []
        assert worse == 2
        assert f"step-{step:08d}" in events


class Loud(Summed):
    """So that gradients overflow float32 with the greatest scale."""

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return 100 * super().__call__(model, batch)


def scaled(rank: int, world_size: int) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    trainer, recorder = build(rank, world_size, steps=9, scaler=scaler, loss=Loud())
    trainer.fit()
    return outcome(trainer, recorder), scaler.get_scale(), trainer.skipped


def test_a_step_that_overflows_the_scaler_is_left_out_and_not_counted_as_a_bad_loss(ranks2: Ranks) -> None:
    for found, scale, skipped in ranks2.run(scaled):
        assert scale < 2.0**127
        assert skipped == 0
        assert all(math.isfinite(loss) for loss in found["loss"])
        assert [math.isfinite(norm) for norm in found["norm"]][-1]
        assert not math.isfinite(found["norm"][0])


class Counts(trueshard.Callback):
    def __init__(self, n: int = 0) -> None:
        self.n = n

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


def test_an_event_may_add_to_the_record_and_end_the_run() -> None:
    class Ends(trueshard.Callback):
        def on_step(self, trainer: Any, record: dict[str, Any]) -> None:
            record["twice"] = 2 * record["loss"]
            if trainer.step == 2:
                trainer.stop("enough")

        def state_dict(self) -> dict[str, Any]:
            return {"seen": 2}

    trainer, recorder = build(0, 1, callbacks=[Ends()])
    assert not trainer.fit()
    assert trainer.stopped == "enough"
    assert [e["twice"] / e["loss"] for e in recorder.events if isinstance(e, dict)] == [2.0, 2.0]
    assert trainer.state_dict()["callbacks"]["Ends"] == [{"seen": 2}]
    twice, _ = build(0, 1, callbacks=[Counts(), Counts(5)])
    twice.load_state_dict(twice.state_dict() | {"callbacks": {"Counts": [{"n": 7}, {"n": 8}]}})
    assert [each.n for each in twice.callbacks[:2]] == [7, 8]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="steps is 0"):
        build(0, 1, steps=0)
    trainer, _ = build(0, 1, loader=[])
    with pytest.raises(ValueError, match="no batch"):
        trainer.fit()
