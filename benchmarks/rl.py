"""The time of a step of reinforcement learning, and what is learned, over TRL's ``GRPOTrainer``.

- Both train the same small model on the same task with the same settings, one thread a process, and generate with
  transformers. Every turn is a training of its own in fresh processes; the ways take turns, forwards and backwards.
- A turn's figure is the median of its steps, without the first ones; the slowest rank counts.
- What is learned is held against TRL's over several seeds: the two draw other random numbers, so curves are compared,
  not samples.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.paired import Ratio, few
from benchmarks.peers import OURS, reason
from benchmarks.peers.reinforcement import ANSWERS, LONGEST, MICROBATCHES, Run, ours, trl
from benchmarks.processes import on_ranks
from benchmarks.table import Over, Table, Tell

TURNS = 3
STEPS = 28
"""Of a turn."""
WARM_UP = 8
"""Of these, the first ones, which do not count."""
SEEDS = 2
LEARNING = 120
"""Steps of a curve."""
WINDOW = 20
"""Steps whose mean reward is compared, at the beginning and at the end of a curve."""
PIECES = ("step", "generation", "reward", "the rest")

Way = Callable[[int, int, Path], Run]
"""(steps, seed, folder) → what a rank measured."""
DDP, FSDP2 = "TRL, DDP", "TRL, FSDP2"
WAYS: dict[int, dict[str, Way]] = {
    1: {OURS: partial(ours, copy="gathered"), "TRL": partial(trl, sharded=False)},
    2: {
        OURS: partial(ours, copy="gathered"),
        DDP: partial(trl, sharded=False),
        FSDP2: partial(trl, sharded=True),
        "copy = kept": partial(ours, copy="kept"),
        "copy = sharded": partial(ours, copy="sharded"),
    },
}
"""By the number of processes."""
UNEVEN: dict[str, Way] = {
    OURS: partial(ours, copy="gathered", uneven=True),
    "TRL": partial(trl, sharded=False, uneven=True),
}
UNEVEN_STEPS, UNEVEN_WARM_UP = 5, 2


def run(tell: Tell, quick: bool = False) -> Table:
    """All ways; ``quick``: one turn of few steps, over two processes alone."""
    rows: list[tuple[str, ...]] = []
    numbers: list[dict[str, Any]] = []
    over: list[Over] = []
    for ranks, ways in WAYS.items():
        if quick and ranks == 1:
            continue
        by_way: dict[str, list[Any]] = {way: [] for way in ways}
        for turn in range(few(TURNS, quick)):
            for way in list(ways)[:: -1 if turn % 2 else 1]:
                by_way[way].append(_trained(ways[way], ranks, WARM_UP + 2 if quick else STEPS, turn))
            tell(f"{ranks}: " + ", ".join(f"{way} {_told(turns[-1])}" for way, turns in by_way.items()))
        for way in ways:
            if way != OURS:
                made, short = _rows(ranks, way, by_way[OURS], by_way[way])
                rows += made
                if way.startswith("TRL"):
                    over.append(Over(f"step of GRPO, {ranks} process{'es' if ranks > 1 else ''}", way, short))
        numbers += [{"ranks": ranks, "way": way, "turns": turns} for way, turns in by_way.items()]
    if not quick:
        made, short = _uneven(tell, quick)
        rows += made
        over.append(Over("step of GRPO, uneven answers", "TRL", short))
    curves = {
        way: [_curve(WAYS[2][way], LEARNING if not quick else 2, seed) for seed in range(few(SEEDS, quick))]
        for way in (OURS, DDP)
    }
    rows += _learned(curves)
    numbers.append({"curves": curves})
    return Table(
        name="rl",
        title="Reinforcement learning, over TRL",
        note=_note(),
        columns=("figure", "processes", "TrueShard", "over", "its figure", "ratio", "95% interval"),
        rows=tuple(rows),
        numbers=numbers,
        over=over,
    )


def _uneven(tell: Tell, quick: bool) -> tuple[list[tuple[str, ...]], str]:
    """Return rows of answers of uneven lengths, by one process each, and the ratio in short."""
    by_way: dict[str, list[Any]] = {way: [] for way in UNEVEN}
    for turn in range(few(TURNS, quick)):
        for way in list(UNEVEN)[:: -1 if turn % 2 else 1]:
            by_way[way].append(_trained(UNEVEN[way], 1, UNEVEN_STEPS, turn, UNEVEN_WARM_UP))
        tell("uneven: " + ", ".join(f"{way} {_told(turns[-1])}" for way, turns in by_way.items()))
    rows, short = _rows(1, "TRL", by_way[OURS], by_way["TRL"])
    return [(f"uneven answers: {first}", *others) for first, *others in rows], short


def measure(way: Way, steps: int, seed: int) -> Run:
    """One training on this rank, in a folder that all ranks share."""
    import torch.distributed as dist

    shared: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    return way(steps, seed, Path(shared[0]) / "run")


def _trained(way: Way, ranks: int, steps: int, seed: int, warm_up: int = WARM_UP) -> dict[str, float] | str:
    """Return the median seconds of ``PIECES``, of the slowest rank; or a peer's error."""
    try:
        measured = on_ranks(measure, ranks, way, steps, seed)
    except Exception as error:
        if way.func is ours:  # type: ignore[attr-defined]
            raise
        return reason(error)
    assert {rank.threads for rank in measured} == {1}
    if way.keywords.get("sharded"):  # type: ignore[attr-defined]
        assert all(rank.sharded for rank in measured)
    slowest = max(measured, key=lambda rank: sum(rank.steps[warm_up:]))
    parts = [slowest.steps, slowest.phases["generation"], slowest.phases["reward"]]
    times = torch.tensor([part[warm_up:] for part in parts], dtype=torch.float64)
    times = torch.cat([times, times[:1] - times[1:].sum(0, keepdim=True)])
    return dict(zip(PIECES, times.quantile(0.5, dim=1).tolist(), strict=True))


def _told(turn: dict[str, float] | str) -> str:
    return turn if isinstance(turn, str) else f"{turn['step']:.3f} s"


def _rows(ranks: int, way: str, own: list[Any], other: list[Any]) -> tuple[list[tuple[str, ...]], str]:
    failed = [turn for turn in other if isinstance(turn, str)]
    if failed:
        return [("step, s", str(ranks), "", way, failed[0], "", "")], "cannot"
    rows, short = [], ""
    for piece in PIECES:
        mine, its = (torch.tensor([turn[piece] for turn in turns], dtype=torch.float64) for turns in (own, other))
        ratio = Ratio.of(mine / its)
        cells = (f"{mine.quantile(0.5).item():.3f}", way, f"{its.quantile(0.5).item():.3f}", *ratio.cells()[:2])
        rows.append((f"{piece}, s", str(ranks), *cells))
        short = short or ratio.short()
    return rows, short


def _curve(way: Way, steps: int, seed: int) -> list[float]:
    """Return the mean reward of each step, over all samples."""
    measured = on_ranks(measure, 2, way, steps, seed)
    return torch.tensor([rank.rewards for rank in measured], dtype=torch.float64).mean(0).tolist()


def _learned(curves: dict[str, list[list[float]]]) -> list[tuple[str, ...]]:
    """Return rows: the mean over seeds of the mean reward of the first and of the last steps, and its spread."""
    rows = []
    for which, part in (
        (f"the first {WINDOW} steps", slice(None, WINDOW)),
        (f"the last {WINDOW}", slice(-WINDOW, None)),
    ):
        means = {way: torch.tensor([curve[part] for curve in seeds]).mean(1) for way, seeds in curves.items()}
        cells = [f"{rewards.mean():.3f} ({rewards.min():.3f} to {rewards.max():.3f})" for rewards in means.values()]
        ratio = means[OURS].mean() / means[DDP].mean()
        rows.append((f"mean reward of {which}", "2", cells[0], DDP, cells[1], f"{ratio:.3f}", ""))
    return rows


def _note() -> str:
    return (
        "examples/models/sort (161,984 parameters) learns to sort five digits, by the reward of `examples/rewards.py`: "
        f"GRPO with {ANSWERS // 8} prompts × 8 answers of up to 8 tokens a step, one update, temperature 1, clip 0.2, "
        "no divergence from a reference, loss averaged over the tokens of the step, AdamW at 5e-4 without decay, "
        "gradients clipped to a norm of one, float32, groups of equal rewards kept, over gloo processes of one thread. "
        "Both generate with transformers, all answers of a rank together. TrueShard: what `trueshard train` runs, "
        "with a gathered copy; its reward function runs in a process of its own, TRL's in the trainer's. TRL: "
        "`GRPOTrainer` without gradient checkpointing, bf16, logging or saving; DDP does not look for unused "
        "parameters. On CPUs Accelerate quietly runs DDP where FSDP2 is asked for; in its row for FSDP2 it is told "
        "that it is on an accelerator, and units stay gathered after forward. transformers' continuous batching is "
        "left out: with it 40 steps on the CPU had not ended after nine minutes. copy = kept and sharded are "
        f"TrueShard's own other ways to generate. A ratio is of the seconds of TrueShard over the other's, in "
        f"{TURNS} turns of {STEPS} steps; the median of {STEPS - WARM_UP} counts; below one, TrueShard takes less, "
        "and steps a minute are its inverse. "
        "Uneven answers: a model of 1,776,576 parameters without training, which ends an answer at any token, after at "
        f"most {LONGEST}; {MICROBATCHES} microbatches a step; TrueShard with `rollout.continuous`. "
        f"Rewards are means of {SEEDS} trainings of {LEARNING} steps, with the least and the largest."
    )
