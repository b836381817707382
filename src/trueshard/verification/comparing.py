"""Compare two recordings of a training program: where does one leave the other first?

- A sample is found again by its bytes, on whichever rank and in whichever pass. What is a row for each sample is
  compared row by row; what is not, only where a pass has the very samples of one of the other run.
- In backward a row counts up to a factor of its own, that of the first gradient which the model gets: a mean over fewer
  samples has larger gradients. What that makes of a step's gradients is compared where they are summed.
- What tensors may be apart follows from a third recording, of the first run with other roundings (``disturbing``).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trueshard.errors import own_errors
from trueshard.verification import compare
from trueshard.verification.compare import FACTOR, FLOORS, Comparison, Tolerances
from trueshard.verification.modules import BACKWARD, FORWARD, Apart, Located, Passed, Place, locate
from trueshard.verification.recording import INDEX
from trueshard.verification.report import Verified, point_of

VALUES = ("gradients", "gradient norm", "clipped gradients", "parameters", "state")
POINTS = {"samples": ("samples",), "forward": FORWARD, "backward": BACKWARD, **{kind: (kind,) for kind in VALUES}}
UNMEASURED = 1000.0
"""Allowed differences over the least ones, after an optimizer's step, where no third run tells them."""

Allowed = Callable[[str, int, str], float]
Row = tuple[int, int, int]
"""Rank, pass, row in the pass."""


@dataclass(frozen=True)
class ComparedRuns(Verified):
    """The report of ``verify_runs``; ``print`` shows it."""

    @property
    def head(self) -> str:
        return "Two runs, {steps} steps\nfirst: {first}\nsecond: {second}".format(**self.setting)

    @property
    def verdict(self) -> str:
        return "The runs agree." if self.held else "The runs differ."


class Recording:
    """A recorded run. Raises ValueError if the folder has none, or not all of it."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        ranks = [json.loads(file.read_text(encoding="utf-8")) for file in self._folder.glob(f"rank-*/{INDEX}")]
        if not ranks or len(ranks) != ranks[0]["ranks"]:
            of = f"{len(ranks)} of {ranks[0]['ranks']} ranks" if ranks else "no rank"
            raise ValueError(f"{folder}: {of} ended a recording there; make it anew, by `trueshard verify --record`")
        self.ranks: list[dict[str, Any]] = sorted(ranks, key=lambda rank: rank["rank"])
        self.steps = min(rank["steps"] for rank in ranks)
        self.contents: list[dict[tuple[str, int, str], str]] = [
            {(kind, step, name): content for kind, step, name, content in rank["entries"]} for rank in self.ranks
        ]
        # A later stage of a pipeline is given no samples: it has those of the first stage's rank of the same place.
        self.held = [{key[2] for key in contents if key[:2] == ("parameters", 0)} for contents in self.contents]
        beginning = [rank for rank in self.ranks if not rank["is later stage"]]
        self.is_pipeline, places = len(beginning) < len(ranks), Counter[frozenset[str]]()
        for rank, held in zip(self.ranks, map(frozenset, self.held), strict=True):
            rank["rows"] = beginning[places[held] % len(beginning)]["rows"] if rank["is later stage"] else rank["rows"]
            places[held] += rank["is later stage"]
            passes = rank["rows"].get("1", ())
            if self.is_pipeline and len(passes) > 1 and passes[0]["hashes"] == passes[1]["hashes"]:
                passes[0] = {**passes[0], "hashes": []}  # in which torch finds out the shapes between stages

    def __str__(self) -> str:
        one = self.ranks[0]
        return f"{self._folder}, ranks: {len(self.ranks)}, torch {one['torch']}, {one['commit']} {one['command']}"

    def read(self, content: str) -> torch.Tensor:
        tensor: torch.Tensor = torch.load(self._folder / "tensors" / f"{content}.pt")
        return tensor

    def names(self, kind: str, step: int) -> dict[str, None]:
        return dict.fromkeys(key[2] for contents in self.contents for key in contents if key[:2] == (kind, step))

    def of_ranks(self, key: tuple[str, int, str], ranks: Sequence[int] | None = None) -> list[str]:
        """Return the contents that ranks (all, if left out) hold under a key."""
        chosen = range(len(self.contents)) if ranks is None else ranks
        return [self.contents[rank][key] for rank in chosen if key in self.contents[rank]]

    def samples(self, step: int, which: int | None) -> dict[Row, str]:
        """Return the hash of each sample of a step: of all tensors, or of one of them."""
        return {
            (rank["rank"], number, row): "".join(hashes)
            for rank in self.ranks
            for number, one in enumerate(rank["rows"].get(str(step), ()))
            for row, hashes in enumerate(zip(*one["hashes"][which or 0 :][: None if which is None else 1], strict=True))
        }


def _match(first: Recording, second: Recording, step: int) -> dict[tuple[int, int], list[Row]] | str:
    """Return by rank and pass of the second run where its rows are in the first; or how samples differ, in words."""
    for one, two in ((None, None), *itertools.product(range(3), repeat=2)):
        rows, others, places = first.samples(step, one), second.samples(step, two), defaultdict[str, list[Row]](list)
        for place, value in rows.items():
            places[value].append(place)
        times = len(others) / max(len(rows), 1)  # ranks that share matrices have the same samples
        if (rows or one is None) and Counter(others.values()) == {key: len(at) * times for key, at in places.items()}:
            turns = {value: itertools.cycle(at) for value, at in places.items()}
            result = defaultdict[tuple[int, int], list[Row]](list)
            for place, value in others.items():
                result[place[:2]].append(next(turns[value]))
            return result
    rows, others = first.samples(step, None), second.samples(step, None)
    new, twice = len(set(others.values()) - set(rows.values())), len(others) - len(set(others.values()))
    return (
        f"{len(rows)} samples in the first run, {len(others)} in the second, {new} of them others, {twice} repeated; "
        "give both the same global batch (the one process: by --alone), seed and length of samples"
    )


def _expected(first: Recording, step: int, place: Place, rows: list[Row], actual: torch.Tensor) -> torch.Tensor | None:
    """Return what a tensor of the second run is in the first, or None if that cannot be told."""
    passes: dict[tuple[int, int], tuple[torch.Tensor, int, int]] = {}
    for rank, number in dict.fromkeys((rank, number) for rank, number, _ in rows):
        content = first.contents[rank].get((place.side, step, replace(place, microbatch=number).key))
        if content is None:
            return None
        one = first.ranks[rank]["rows"][str(step)][number]
        passes[rank, number] = first.read(content), one["count"], one["inner"]
    tensors = [tensor for tensor, *_ in passes.values()]
    for size in (1, *{inner for *_, inner in passes.values()}):  # rows of a sample: 1, or its tokens
        fits = all(tensor.ndim and tensor.size(0) == count * size for tensor, count, _ in passes.values())
        if fits and actual.ndim and actual.size(0) == len(rows) * size:
            return torch.cat([passes[rank, number][0][i * size : (i + 1) * size] for rank, number, i in rows])
    same = len(passes) == 1 and len({row for *_, row in rows}) == next(iter(passes.values()))[1]
    return tensors[0] if same else None


def _is_sorted(
    first: Recording, step: int, place: Place, rows: list[Row], actual: torch.Tensor, tolerance: float
) -> bool:
    """Return whether the first run has all rows of ``actual``, up to a factor, elsewhere: a router sorts them."""
    if actual.ndim < 2 or not actual.is_floating_point():
        return False
    passes = dict.fromkeys((rank, replace(place, microbatch=number).key) for rank, number, _ in rows)
    whole = torch.cat([first.read(first.contents[rank][place.side, step, key]) for rank, key in passes])
    one, two = (nn.functional.normalize(tensor.double().flatten(1)) for tensor in (actual, whole))
    return bool(torch.cdist(one, two).amin(1).square().mean().sqrt() <= tolerance)


def _joined(run: Recording, contents: Sequence[str], whole: torch.Tensor) -> torch.Tensor | None:
    """Return ranks' parts one after the other, in a dimension or as flat pieces, where that makes them ``whole``."""
    for chosen in (dict.fromkeys(contents), contents):  # replicas once, or parts that happen to be the same
        parts = [run.read(content) for content in chosen]
        if len(parts) == 1 and parts[0].shape == whole.shape:
            return parts[0]
        if {part.ndim for part in parts} == {1} and sum(part.numel() for part in parts) == whole.numel():
            return torch.cat(parts).view_as(whole)
        for dim in range(whole.ndim if {part.ndim for part in parts} == {whole.ndim} else 0):
            total = sum(part.size(dim) for part in parts)
            if [*parts[0].shape[:dim], total, *parts[0].shape[dim + 1 :]] == [*whole.shape]:
                return torch.cat(parts, dim)
    return None


def _passed(
    first: Recording, second: Recording, step: int, places: Any, allowed: Allowed, differs: bool = False
) -> Iterator[Passed]:
    """Yield, by rank of the second run, the tensors that pass its modules, in their order; ``places``: of the rows.

    Ranks that share matrices have the same samples, and may have parts of a sum. Only where gradients or parameters of
    the step ``differs``, their other parts are joined: not all are in the order of ranks. Dtypes of what inner modules
    return are always compared, that of what the model returns only there.
    """
    for rank, contents in enumerate(second.contents):
        lacking = first.names("parameters", 0).keys() - second.held[rank] if second.is_pipeline else set()
        passed: Passed = []
        factors: dict[int, torch.Tensor] = {}
        for (kind, at, key), content in contents.items():
            if at != step or kind not in (*FORWARD, *BACKWARD):
                continue
            part, number, module, call, index = json.loads(key)
            place = Place(part, number, module, call, kind, index)
            rows, actual = places.get((rank, number)), second.read(content)
            expected = _expected(first, step, place, rows, actual) if rows else None
            prefix = f"{module}." if module else ""
            if expected is None or any(name.startswith(prefix) for name in lacking):  # a stage has a part of the module
                continue
            same = [other for other in range(len(second.ranks)) if places.get((other, number)) == rows]
            alike = second.of_ranks((kind, at, key), same)
            if differs and expected.shape != actual.shape:
                joined = _joined(second, alike, expected)
                actual = actual if joined is None else joined
            is_row = actual.ndim and not actual.size(0) % len(rows)
            if expected.shape != actual.shape or (place.side in BACKWARD and not is_row):
                continue
            if place.side in BACKWARD:
                one, two = (tensor.double().reshape(len(rows), -1) for tensor in (actual, expected))
                own = ((one * two).sum(1) / two.square().sum(1)).nan_to_num(1.0)
                expected = (two * factors.setdefault(number, own)[:, None]).view_as(expected)
            name = f"{module or 'the model'}, {kind} {index}, call {call}"
            sizes, tolerance = compare.distance(actual, expected), allowed(kind, step, name)
            if sizes[1] > tolerance and len(alike) > 1:
                parts = [second.read(part) for part in alike]
                if all(part.shape == expected.shape for part in parts):
                    total = torch.stack(parts).sum(0)  # or a mean: of the losses of ranks that share sequences
                    both = [compare.distance(total / number, expected) for number in (1, len(parts))]
                    sizes = min(sizes, *both, key=lambda one: one[1])
            if module and 0 < tolerance < sizes[1] and _is_sorted(first, step, place, rows, actual, tolerance):
                continue
            there, here = (str(tensor.dtype).removeprefix("torch.") for tensor in (expected, actual))
            is_other = here != there and kind == "output" and bool(differs or module)
            words = f"is {here}, and {there} there" if is_other else ""
            passed.append((place, Comparison(kind, step, name, *sizes, tolerance, words)))
        yield passed


def _values(first: Recording, second: Recording, step: int, allowed: Allowed) -> Iterator[Comparison]:
    """Yield what is compared by the name of a parameter, with the factor between both."""
    for key, words in {} if step else {"trained": "is trained", "in the optimizer": "is in the optimizer"}.items():
        sets = [{name for rank in run.ranks for name in rank[key]} for run in (first, second)]
        for name in sorted(sets[0] ^ sets[1]) if all(sets) else ():
            run = "first" if name in sets[0] else "second"
            yield Comparison.fault("parameters", step, name, f"{words} in the {run} run only")
    norms = {bool(run.names("gradient norm", step)) for run in (first, second)}
    # Where one run clips by a function that was not seen, what the optimizer gets is compared alone.
    skipped = {(False,): VALUES[2:3], (True,): (), (False, True): VALUES[:2]}[tuple(sorted(norms))]
    for kind in VALUES:
        for name in () if kind in skipped else first.names(kind, step) | second.names(kind, step):
            olds, news = (run.of_ranks((kind, step, name)) for run in (first, second))
            if not olds or not news:
                words = f"is in the {'first' if olds else 'second'} run only"
                yield Comparison.fault(kind, step, name, words)
                continue
            starts = first.of_ranks((kind, 0, name)) if kind == "parameters" and step else []
            expected, words = first.read(olds[0]), ""
            actual = _joined(second, news, expected)
            if actual is None and len(set(olds)) == len(set(news)):
                expected, actual = _flat(first, olds), _flat(second, news)
            elif actual is None:
                actual, words = second.read(news[0]), "is not the same on all ranks" if len(set(news)) > 1 else ""
            start = _flat(first, starts) if starts else None
            start = None if start is None or start.shape != expected.shape else start
            sizes, tolerance = compare.distance(actual, expected, start), allowed(kind, step, name)
            if start is not None and actual.shape == expected.shape and 0 < tolerance < sizes[1]:
                unsure = _unsure(first, second, step, name, allowed)
                sizes = compare.distance(torch.where(unsure, expected, actual), expected, start)
            factor = compare.factor(actual, expected)
            yield Comparison(kind, step, name, *sizes, tolerance, words, factor)


def _unsure(first: Recording, second: Recording, step: int, name: str, allowed: Allowed) -> torch.Tensor:
    """Return the elements whose gradient was nothing but rounding: who divides by its size moves them anywhere."""
    result = torch.tensor(False)
    for at in range(1, step + 1):
        key = "clipped gradients", at, name
        both = [[run.read(content) for content in run.of_ranks(key)[:1]] for run in (first, second)]
        if all(both) and both[0][0].shape == both[1][0].shape:
            one, two = both[0][0].double(), both[1][0].double()
            # Measured of "gradients" in any case: who does not clip has no others, and clipping changes no ratio.
            least = allowed("gradients", at, name) * one.square().mean().sqrt()
            result = result | ((one != two) & (one.abs() <= least))
    return result


def _flat(run: Recording, contents: Sequence[str]) -> torch.Tensor:
    parts = [run.read(content) for content in dict.fromkeys(contents)]
    return parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts])


def _tolerances(first: Recording, shaken: Sequence[Recording]) -> Allowed:
    """Return what may be apart, by kind, step and name."""
    noise: dict[tuple[str, int, str], float] = {}
    for step, run in itertools.product(range(1, first.steps + 1), shaken):
        by_rank = _passed(first, run, step, _match(first, run, step), _no_bit)
        for one in [*(one for rank in by_rank for _, one in rank), *_values(first, run, step, _no_bit)]:
            key = one.kind, step, one.name
            noise[key] = max(noise.get(key, 0.0), 0.0 if one.words else one.relative)
    dtypes = {name for rank in first.ranks for name in rank["dtypes"]}
    tolerances = Tolerances(noise, max(FLOORS.get(getattr(torch, name), 0.0) for name in dtypes), {})

    def allowed(kind: str, step: int, name: str) -> float:
        rough = not shaken and step and (step > 1 or kind in ("parameters", "state"))
        return tolerances.of(kind, step, name) * (UNMEASURED if rough else 1.0)

    return allowed


def _no_bit(kind: str, step: int, name: str) -> float:
    return 0.0


def _first(values: list[Comparison], by_rank: list[Passed], step: int, source: str) -> Located | None:
    """Return where the second run leaves the first in a step."""
    if (located := locate([Apart.of(rank) for rank in by_rank], (), step, source)) is not None:
        return located
    summed = next((one.kind for one in values if "gradients" in one.kind), None)
    for kind in VALUES:
        wrong = [one for one in values if one.kind == kind and not one.held]
        if wrong and kind == summed and not any(one.words for one in wrong):
            return locate([], wrong, step, source)
        for one in sorted(wrong, key=lambda one: (not one.words, -one.excess))[:1]:
            times = f", {one.factor:.3g} times what it should be" if "gradient" in kind else ""
            words = one.words or f"is {one.relative:.2g} of the scale apart{times}, and all before it agrees"
            words += f" (allowed {one.tolerance:.1g}{source})" if one.tolerance else ""
            names = {"gradients": "gradient", "parameters": "optimizer", "state": "optimizer"}
            where = names.get(kind, kind) if step else "start"
            of = f"{one.name!r} " if one.name else ""
            return Located(one.name.rpartition(".")[0], where, step, None, of + words)
    return None


@own_errors()
def verify_runs(
    first: str | Path,
    second: str | Path,
    shaken: str | Path | Sequence[str | Path] | None = None,
    *,
    exact: bool = False,
) -> ComparedRuns:
    """Compare two recordings, and name the first module, gradient or parameter at which the second leaves the first.

    Args:
        first: folder of a recording: of the run that is right, if one is. See ``record``.
        second: folder of the other one, of any number of ranks.
        shaken: a recording of the first run with other roundings, or several of other seeds, of which the largest
            difference counts; None: fixed tolerances.
        exact: no bit may differ.

    Returns:
        The report. ``report.held`` says whether they agree, ``report.first`` is where they differ first, or None.

    Raises:
        ValueError: a folder has no whole recording, or they are of models that share no name.
    """
    one, two = Recording(first), Recording(second)
    if not one.names("parameters", 0).keys() & two.names("parameters", 0).keys():
        raise ValueError(f"{first} and {second} are of other models: no parameter has the same name in both")
    folders = [shaken] if isinstance(shaken, (str, Path)) else shaken or []
    allowed = _no_bit if exact else _tolerances(one, [Recording(folder) for folder in folders])
    source = f": {FACTOR:g} times what rounding errors change of it" if folders else ""
    compared: list[Comparison] = []
    located = None
    for step in range(min(one.steps, two.steps) + 1):
        places: Any = _match(one, two, step) if step else {}
        if isinstance(places, str):
            compared.append(Comparison.fault("samples", step, "", places))
            located, places = located or Located("", "samples", step, None, places), {}
        elif step:
            compared.append(Comparison("samples", step, "", 0.0, 0.0, 0.0))
        values = list(_values(one, two, step, allowed))
        differs = not all(value.held for value in values)
        by_rank = list(_passed(one, two, step, places, allowed, differs))
        if all(value.held for value in values if value.kind == "parameters"):
            # Gradients that ranks sum in the optimizer's step
            values = [value for value in values if not value.words or "gradients" not in value.kind]
        located = located or _first(values, by_rank, step, source)
        compared += values + [passed for rank in by_rank for _, passed in rank]
    by_point = {name: [one for one in compared if one.kind in kinds] for name, kinds in POINTS.items()}
    points = tuple(point_of(name, some, "") for name, some in by_point.items() if some)
    setting = {"first": str(one), "second": str(two), "steps": min(one.steps, two.steps)}
    rough = f"No third run (--shaken) tells rounding: after a step, values may be {UNMEASURED:,.0f} times as far apart."
    return ComparedRuns(points, setting, () if folders or exact else (rough,), first=located)
