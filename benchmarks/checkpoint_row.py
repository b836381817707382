"""A row of ``benchmarks.checkpoint``: a figure of ours beside the same of something else."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.table import Over

GIB = 2**30
PEERS = ("torch DCP", "Accelerate", "transformers", "Lightning Fabric")


@dataclass(frozen=True)
class Row:
    """A figure of ours, and the same of something else, sample by sample."""

    figure: str
    ranks: int
    ours: Sequence[float]
    beside: str
    theirs: Sequence[float]
    at_most: float | None = None
    """The ratio that is aimed at."""

    def _ratios(self) -> tuple[str, str]:
        """The median of the ratios, and the least and the largest."""
        ratios = [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else ""
        return f"{statistics.median(ratios):.2f}", spread

    def over(self) -> Over:
        """As the summary shows it."""
        ratio, spread = self._ratios()
        figure = self.figure.removesuffix(", s").removesuffix(", GiB").replace(": s ", ": ")
        return Over(figure, self.beside, f"{ratio} ({spread})" if spread else ratio)

    def cells(self) -> tuple[str, ...]:
        """As the table shows it."""
        return (
            self.figure,
            str(self.ranks),
            f"{statistics.median(self.ours):.2f}",
            self.beside,
            f"{statistics.median(self.theirs):.2f}",
            *self._ratios(),
            "" if self.at_most is None else f"{self.at_most:.2f}",
        )


def slowest(runs: Sequence[Sequence[float]]) -> list[float]:
    """Of each sample, that of the rank that took longest; ``runs`` has one list a rank."""
    return [max(run) for run in zip(*runs, strict=True)]
