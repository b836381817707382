"""Compiled blocks: the time to the first step, without anything compiled before and with what was; and the step's.

- Every block is compiled by itself: by hand ``module.compile()``, then ``fully_shard``; Accelerate's regional
  compilation; ``shard(compile=True)``.
- For the first steps every sample has fresh processes, and the cold one a cache of its own; the warm one finds what the
  cold one left. The slowest rank counts.
- For the step all ways live in the same processes and take turns, as in ``benchmarks.peers_step``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import peers_step
from benchmarks.first_step import Began, begin
from benchmarks.llama import Shape
from benchmarks.paired import Ratio, few
from benchmarks.peers import OURS
from benchmarks.peers.recipe import Recipe
from benchmarks.processes import on_ranks
from benchmarks.table import Over, Table, Tell

RANKS = 2
FIRST, STEADY = 3, 30
"""Samples of first steps, and of later ones."""
FIGURES = ("first step, cold", "first step, warm")
PEERS = ("by hand", "Accelerate", "Lightning Fabric")
SHAPE = Shape(layers=4, hidden=256, intermediate=768, heads=4, vocabulary=2048, tokens=64)


@dataclass(frozen=True)
class _Compared:
    figure: str
    peer: str
    ratios: list[float]
    failed: str = ""

    def cells(self) -> tuple[str, ...]:
        if self.failed:
            return (self.figure, self.peer, self.failed, "", "", "")
        return (self.figure, self.peer, *Ratio.of(torch.tensor(self.ratios)).cells(), str(len(self.ratios)))

    def over(self) -> Over:
        cell = "cannot" if self.failed else Ratio.of(torch.tensor(self.ratios)).short()
        return Over(f"compiled: {self.figure}", self.peer, cell)


def run(tell: Tell, quick: bool = False) -> Table:
    """First steps, then later ones."""
    compared: list[_Compared] = []
    ways = (OURS, PEERS[0]) if quick else (OURS, *PEERS)
    with tempfile.TemporaryDirectory() as name:
        recipe = Recipe(SHAPE, Path(name) / "model", compile=True)
        on_ranks(recipe.write, 1)
        first = _first(recipe, ways, Path(name), tell, quick)
        for figure, began in first.items():
            compared += [_compared(figure, peer, began) for peer in ways[1:]]
        if not quick:
            compared += _steady(recipe, Path(name))
    return Table(
        name="compiled",
        title="Compiled blocks, over each peer's",
        note=(
            f"A Llama of {SHAPE.layers} blocks over {RANKS} gloo processes, AdamW, clipping, every block compiled by "
            "itself: `shard(compile=True)`; by hand and in Fabric's function `block.compile()`, then `fully_shard`; "
            "Accelerate's regional compilation. To the end of the first step from a process that has its imports "
            f"behind it, in fresh processes: with an empty cache, and with what was compiled before ({FIRST} samples "
            f"of each). A later step: ways in turn in the same processes ({STEADY} rounds). Medians of the ratios, "
            "TrueShard over the peer, with their 95% interval by bootstrap and the 10th to the 90th percentile."
        ),
        columns=("figure", "over", "ratio", "95% interval", "spread", "samples"),
        rows=tuple(row.cells() for row in compared),
        numbers=[asdict(row) for row in compared],
        over=[row.over() for row in compared],
    )


def _first(
    recipe: Recipe, ways: tuple[str, ...], folder: Path, tell: Tell, quick: bool
) -> Mapping[str, dict[str, list[Began]]]:
    """figure → way → samples; ``quick``: all in one cache, since the first to come compiles what takes longest."""
    starts: dict[str, dict[str, list[Began]]] = {
        figure: {way: [] for way in ways} for figure in FIGURES[: 1 if quick else 2]
    }
    for i in range(few(FIRST, quick)):
        for way in ways[:: -1 if i % 2 else 1]:
            cache = folder / ("cache" if quick else f"cache-{way}-{i}".replace(" ", "-"))
            for figure in starts:
                began = max(on_ranks(begin_cached, RANKS, way, recipe, cache), key=lambda start: start.stepped)
                starts[figure][way].append(began)
                tell(f"{figure}, {way}: {began.failed or f'{began.stepped:.1f} s'}")
    return starts


def begin_cached(way: str, recipe: Recipe, cache: Path) -> Began:
    """``benchmarks.first_step.begin`` with this cache of compiled code; on one of any rank's own, as on many nodes."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    return begin(way, recipe)


def _compared(figure: str, peer: str, began: Mapping[str, list[Began]]) -> _Compared:
    failed = began[peer][0].failed
    pairs = zip(began[OURS], began[peer], strict=True)
    return _Compared(figure, peer, [] if failed else [a.stepped / b.stepped for a, b in pairs], failed)


def _steady(recipe: Recipe, folder: Path) -> list[_Compared]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "steady")
    measured = on_ranks(peers_step.measure, RANKS, recipe, STEADY)[0]
    compared = []
    for peer in PEERS:
        failed = measured.failed.get(peer, "")
        ratios: list[float] = []
        if not failed:
            ours, theirs = (torch.tensor(measured.seconds[way])[:, 0, 0] for way in (OURS, peer))
            ratios = (ours / theirs).tolist()
        compared.append(_Compared("later step", peer, ratios, failed))
    return compared
