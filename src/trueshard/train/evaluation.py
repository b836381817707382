"""Evaluation: measurements on sets of data that are not trained on, and which of them is the best.

- The loss of a set is the mean over all its terms, on all ranks. Ranks may have different numbers of microbatches, or
  none: one that has no more repeats its last one, or takes another rank's, which does not count.
- Metrics of the set ``maths`` are called ``maths_loss`` …; those of a set without a name ``loss`` ….
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from trueshard.distributed import host_group
from trueshard.train.reducing import over_ranks

Metrics = dict[str, float]
Measured = Iterable[Any] | Callable[[], Mapping[str, float]]
SMALL = ("loss", "perplexity")
"""Ends of the names of metrics that are to be small."""


def is_greater_better(metric: str, greater: bool | None = None) -> bool:
    """Return ``greater`` or, if that is None, True unless a metric is a loss, or a perplexity."""
    return not metric.endswith(SMALL) if greater is None else greater


class Evaluation:
    """Sets of data, each measured by the mean loss or by a function of its own.

    Args:
        sets: microbatches of this rank, or a function that returns metrics; or a mapping of several, by name. A
            function's metrics keep their names.
        best: metric by which evaluations are compared. None: the first set's loss, or what a function calls "reward".
        greater: True if a greater value of it is better; None: unless it is a loss or a perplexity.
    """

    def __init__(
        self, sets: Measured | Mapping[str, Measured], best: str | None = None, greater: bool | None = None
    ) -> None:
        self.sets: Mapping[str, Measured] = sets if isinstance(sets, Mapping) else {"": sets}
        if not self.sets:
            raise ValueError("evaluation is an empty mapping; leave it out, or give it a set")
        self.is_function = callable(sets)
        name, first = next(iter(self.sets.items()))
        self.best = best or ("reward" if callable(first) else named(name, "loss"))
        self.sign = -1.0 if is_greater_better(self.best, greater) else 1.0

    def measure(
        self,
        part: Callable[[Any], tuple[torch.Tensor, int]],  # microbatch → this rank's part of its summed loss, and terms
        unit: str,  # name of a term; "token" for a perplexity
        device: torch.device,
    ) -> Metrics:
        """Return the metrics of all sets. Collective; the same on every rank."""
        result: Metrics = {}
        for name, data in self.sets.items():
            if callable(data):
                result |= data()
                continue
            total, count = _sum(part, iter(data), device, f"the evaluation {name}".rstrip())
            metrics = {"loss": total / count, "count": count}
            if unit == "token":
                metrics["perplexity"] = math.exp(min(metrics["loss"], 700.0))
            result |= {named(name, key): value for key, value in metrics.items()}
        return result

    def score(self, record: Mapping[str, float]) -> float:
        """Return what is to be as small as can be: the value of ``best``, negated if a greater one is better."""
        if self.best not in record:
            raise ValueError(f"best is {self.best!r}, which no evaluation gives; use one of {', '.join(record)}")
        return self.sign * record[self.best]


def named(name: str, metric: str) -> str:
    """Return the name of a metric of a set."""
    return f"{name}_{metric}" if name else metric


def _sum(
    part: Callable[[Any], tuple[torch.Tensor, int]], batches: Iterator[Any], device: torch.device, where: str
) -> list[float]:
    """Return the sum of the loss of all ranks' microbatches, and the number of its terms."""
    loss, terms, batch = torch.zeros((), device=device, dtype=torch.float64), 0, None
    while True:
        fresh = next(batches, None)
        batch = batch if fresh is None else fresh
        more, empty = over_ranks([fresh is not None, batch is None], device)
        if not more:
            break
        if empty:  # every rank takes part in a forward of sharded parameters
            batch = _of_another(batch, device)
        of_batch, terms_of_batch = part(batch)
        if fresh is not None:
            loss, terms = loss + of_batch, terms + terms_of_batch
    total, count = over_ranks([loss, terms], device)
    if not count:
        raise ValueError(f"{where} has no target; give it data that has")
    return [total, count]


def _of_another(batch: Any, device: torch.device) -> Any:
    """Return ``batch``, or that of the first rank that has one. Collective."""
    rank, none = dist.get_rank(), float(dist.get_world_size())
    source = int(over_ranks([none if batch is None else rank], device, dist.ReduceOp.MIN)[0])
    shared = [batch if rank == source else None]
    world: Any = dist.group.WORLD
    dist.broadcast_object_list(shared, source, group=host_group(world))
    return shared[0] if batch is None else batch
