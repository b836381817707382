"""Trains one optimizer of the catalogue, sharded or not, and says how the parameters of both differ.

The tiny model has parameters of 0 to 4 dimensions, none of which divides by 2 or 3 ranks; one of its branches takes no
part in every other step, so that its parameters have no gradient then. Every step clips.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gathering import whole
from optimizer_catalogue import Entry, entries
from parity import Pool, RankFailure, Ranks

SAMPLES = 24
"""rows of the global batch: divides by 1, 2 and 3 ranks, and are enough for gradients of full rank, for what is divided
by a singular value of a gradient would else be rounding"""
QUANTIZED_TOLERANCE = 1.1
"""Root mean square of the difference over all parameters, over that of one process from one in full precision. A shard
that does not hold whole blocks is kept in full precision, and so is as far from one process as quantization takes that,
but no further. The tenth is for what follows: other parameters, other gradients."""
BATCH = 12
"""optimizers in one job"""


class Mixed(nn.Module):
    """Parameters of 0, 1, 2, 3 and 4 dimensions, of 5 or 7 rows.

    Args:
        least: 1 leaves out the parameter of 0 dimensions.
        most: 2 leaves out those of 3 and 4.
    """

    def __init__(self, least: int = 0, most: int = 4) -> None:
        super().__init__()
        self.image = nn.Conv2d(2, 5, 3) if most > 2 else None
        self.line = nn.Conv1d(5, 7, 2) if most > 2 else nn.Linear(32, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.side = nn.Linear(7, 5, bias=False)
        self.back = nn.Linear(5, 7, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5)) if least == 0 else 1.5
        self.head = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor, aside: bool) -> torch.Tensor:
        if self.image is not None:
            x = torch.tanh(self.line(torch.tanh(self.image(x)).flatten(2))).mean(-1)
        else:
            x = torch.tanh(self.line(x.flatten(1)))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        if aside:
            x = x + self.back(torch.tanh(self.side(x)))
        return self.head(self.scale * x)


class Wide(nn.Module):
    """Matrices of thousands of elements, whose shards hold whole blocks of 256, of 128 alone, or of neither."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 128)
        self.even = nn.Linear(128, 192)
        self.uneven = nn.Linear(192, 100)
        self.side = nn.Linear(100, 100, bias=False)
        self.head = nn.Linear(100, 5)

    def forward(self, x: torch.Tensor, aside: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x.flatten(1)))
        x = torch.tanh(self.uneven(torch.tanh(self.even(x))))
        return self.head(x + self.side(x) if aside else x)


def build(entry: Entry) -> nn.Module:
    """The model for `entry`, the same on every rank."""
    torch.manual_seed(0)
    return Wide() if entry.special.wide else Mixed(*entry.special.dimensions)


def batch(step: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows, as (images of 2×4×4, targets of 5)."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, 2, 4, 4, generator=generator)
    y = 2.0 * torch.randn(SAMPLES, 5, generator=generator)
    return x.chunk(world_size)[rank], y.chunk(world_size)[rank]


def loss(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Squared distance, the mean over rows: large enough that every step clips."""
    return (found - target).square().sum(-1).mean()


def train(entry: Entry, model: nn.Module, optimizers: list[Any], rank: int, world_size: int) -> None:
    """As many steps as `entry` needs."""
    for step in range(entry.special.steps):
        x, y = batch(step, rank, world_size)
        entry.take(model, optimizers, lambda x=x, y=y, aside=step % 2 == 0: loss(model(x, aside), y))
    entry.finish(optimizers)


def trained(rank: int, world_size: int, entry: Entry, only: Sequence[str] = ()) -> dict[str, Any]:
    """Parameters before and after, and how they were stepped, or the words in which ``shard()`` refused.

    All parameters but ``only`` are frozen, if it names any.
    """
    import trueshard

    model = build(entry)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not only or name in only)
    optimizers = entry.make(model)
    before = whole(dict(model.named_parameters()))
    if world_size > 1:
        try:
            trueshard.shard(model, *optimizers, units="Linear")
        except ValueError as error:
            if not str(error).startswith(f"{entry.cls.__name__} "):
                raise
            return {"refused": str(error)}
    way = stepped(optimizers[0]) if world_size > 1 else ""
    train(entry, model, optimizers, rank, world_size)
    return {"before": before, "after": whole(dict(model.named_parameters())), "way": way}


def stepped(optimizer: torch.optim.Optimizer) -> str:
    """How its parameters are stepped, in the words of `classify`; all ranks hold and step one without dimensions."""
    from trueshard.optim.classify import Verdict, manner
    from trueshard.optim.stepping import roles_of

    roles = roles_of(optimizer)
    cut = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.ndim]
    return manner([Verdict(whole=roles[id(parameter)].is_mine is not None) for parameter in cut])


def trial(rank: int, world_size: int, library: str, names: list[str]) -> dict[str, Any]:
    """`trained` for each name. On one rank what raises is told as {"error": ...}; on several it ends the job."""
    found: dict[str, Any] = {}
    for name in names:
        entry = entries(library)[name]
        with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
            warnings.simplefilter("ignore")
            try:
                found[name] = trained(rank, world_size, entry)
            except Exception as error:
                if world_size > 1:
                    raise
                found[name] = {"error": told(error)}
            if world_size == 1 and entry.full_precision:
                found[name]["full precision"] = trained(rank, world_size, entry.full_precision)["after"]
    return found


def told(error: BaseException) -> str:
    """Its type and first line."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


class Sweep:
    """The trials of whole libraries, each run once, when first asked for."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.found: dict[tuple[int, str], dict[str, dict[str, Any]]] = {}

    def results(self, count: int, library: str, names: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
        """What `trial` gives on `count` ranks for all of `library`, or for `names`; {} for what fails alone."""
        done = self.found.setdefault((count, library), {})
        missing = [name for name in names or entries(library) if name not in done]
        if count > 1:
            one = self.results(1, library, names)
            done |= {name: {} for name in missing if "error" in one[name]}
            missing = [name for name in missing if name not in done]
        if missing:
            done |= run(Ranks(count, self.pool), library, missing)
        return done

    def compared(self, count: int, library: str, name: str, names: Sequence[str] = ()) -> Compared:
        """How `count` ranks did against one; all of `names` are run if `name` was not."""
        one, many = (self.results(c, library, names)[name] for c in (1, count))
        return compare(one, many, entries(library)[name].special.tolerance)


def run(ranks: Ranks, library: str, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`trial` on `ranks`, one result a name; a job that fails is done again one by one, to find what failed."""
    found: dict[str, dict[str, Any]] = {}
    for start in range(0, len(names), BATCH):
        some = list(names[start : start + BATCH])
        try:
            found |= ranks.run(trial, library, some, timeout=120.0)[0]
            continue
        except RankFailure:
            pass
        for name in some:
            try:
                found |= ranks.run(trial, library, [name], timeout=30.0)[0]
            except RankFailure as failure:
                found[name] = {"failed": str(failure)}
    return found


@dataclass(frozen=True)
class Compared:
    """How one optimizer did on several ranks, against one."""

    outcome: str
    """ "equal", "refused", "alone" (it does not run on one device), "different", or "failed" (it raised)"""
    words: str
    difference: float = 0.0
    """the largest, over parameters, of: largest difference over largest change; for quantized state `further`"""


def compare(one: dict[str, Any], many: dict[str, Any], tolerance: float) -> Compared:
    """`one` and `many` as `run` gives them, for one process and for several."""
    if "error" in one:
        return Compared("alone", one["error"])
    if "refused" in many:
        return Compared("refused", many["refused"])
    if "failed" in many:
        return Compared("failed", many["failed"])
    if "full precision" in one:
        ratio = further(one, many)
        words = f"differs by {ratio:.2g} of what quantization makes"
        return Compared("equal" if ratio <= QUANTIZED_TOLERANCE else "different", words, ratio)
    gaps = {name: gap(one, many, name) for name in one["after"]}
    worst = max(gaps, key=lambda name: (gaps[name] != gaps[name], gaps[name]))
    words = f"{worst!r} differs by {gaps[worst]:.2g} of its change"
    return Compared("equal" if gaps[worst] <= tolerance else "different", words, gaps[worst])


def gap(one: dict[str, Any], many: dict[str, Any], name: str) -> float:
    """Largest difference of a parameter over its largest change; NaN where a value is not finite."""
    expected, found = one["after"][name].double(), many["after"][name].double()
    if not (torch.isfinite(expected).all() and torch.isfinite(found).all()):
        return float("nan")
    difference = (found - expected).abs().max().item()
    change = (expected - one["before"][name].double()).abs().max().item()
    return difference / change if change else (float("inf") if difference else 0.0)


def further(one: dict[str, Any], many: dict[str, Any]) -> float:
    """Root mean square of the difference over all parameters, over that of one process from full precision."""

    def flat(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([value.double().flatten() for value in values.values()])

    quantization = (flat(one["after"]) - flat(one["full precision"])).square().mean().sqrt()
    difference = (flat(many["after"]) - flat(one["after"])).square().mean().sqrt()
    return (difference / quantization).item()


def moved(one: dict[str, Any]) -> dict[str, float]:
    """Each parameter's largest change over its largest element."""
    return {
        name: ((one["after"][name] - value).abs().max() / value.abs().max()).item()
        for name, value in one["before"].items()
    }
