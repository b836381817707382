"""Why each choice was made, one sentence each, out of what the other plans cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trueshard.planner.choice.bench import Bench, cost
from trueshard.planner.choice.space import Point, batches, is_free, recompute_text, reshard_text
from trueshard.tables import size

Text = Callable[[Point], str]
"""One choice of a plan, in words; where the words are equal the choice is."""


def reasons(bench: Bench) -> tuple[str, ...]:
    """A sentence for each choice that was free: what is faster but lacks memory, and what comes next."""
    texts = list(_choices(bench))
    told = [_sentence(bench, text, [other for other in texts if other is not text]) for text in texts]
    return (*told, _offload(bench)) if len(bench.space.offloads) > 1 else tuple(told)


def _choices(bench: Bench) -> Iterator[Text]:
    space = bench.space
    if len(bench.replicas) > 1:
        yield lambda point: _mesh_text(bench, point)
    if len(batches(space)) > 1:
        yield _batch_text
    if is_free(space.words.get("reshard_after_forward")):
        yield lambda point: reshard_text(bench.groupings.plan(point), point.split)
    if is_free(space.words.get("activation_checkpointing")):
        yield lambda point: recompute_text(bench.groupings.plan(point))


def _mesh_text(bench: Bench, point: Point) -> str:
    replicate = point.setting.replicate
    shard = bench.space.ranks // replicate
    return f"one replica over {shard:,} ranks" if replicate == 1 else f"{replicate:,} replicas of {shard:,} ranks"


def _batch_text(point: Point) -> str:
    return f"microbatch {point.setting.microbatch} × accumulation {point.setting.accumulation}"


def _sentence(bench: Bench, text: Text, rest: list[Text]) -> str:
    best = bench.best
    assert best is not None
    rivals = [each for each in bench.forecasts if each.setting.offload == best.setting.offload]
    others = [each for each in rivals if text(each) != text(best)]
    alike = [each for each in others if all(other(each) == other(best) for other in rest)]
    told = f"{text(best)[0].upper()}{text(best)[1:]}"
    # Where no plan differs in this alone, some plan that differs in this is told of.
    named: Text = text if alike else lambda point: f"another plan ({text(point)})"
    found = [clause for tell in (_faster, _next, _smaller) if (clause := tell(bench, named, alike or others))]
    return f"{told}: {'; '.join(found[:2])}." if found else f"{told}: nothing else fits the words that were given."


def _offload(bench: Bench) -> str:
    assert bench.best is not None
    if bench.best.setting.offload == "none":
        return "Offload none: it fits without."
    without = [each for each in bench.forecasts if each.setting.offload == "none"]
    lacks = min(_excess(bench, each) for each in without)
    return f"Offload cpu: without it the most frugal plan lacks {size(lacks)}."


def _faster(bench: Bench, text: Text, others: list[Point]) -> str:
    """Of those that would be faster but do not fit, the one that lacks least."""
    assert bench.best is not None
    now = cost(bench.forecasts[bench.best])
    lacking = [each for each in others if not bench.forecasts[each].fits and cost(bench.forecasts[each]) < now]
    if not lacking:
        return ""
    nearest = min(lacking, key=lambda each: _excess(bench, each))
    gain = now / cost(bench.forecasts[nearest]) - 1
    return f"{text(nearest)} would be {gain:.1%} faster but lacks {size(_excess(bench, nearest))}"


def _next(bench: Bench, text: Text, others: list[Point]) -> str:
    """The fastest other that fits."""
    assert bench.best is not None
    fitting = [each for each in others if bench.forecasts[each].fits]
    if not fitting:
        return ""
    second = min(fitting, key=bench.order)
    mine, its = bench.forecasts[bench.best], bench.forecasts[second]
    loss = 1 - cost(mine) / cost(its)
    if loss >= 0.0005:
        return f"{text(second)} is {loss:.1%} slower"
    more = its.peak_reserved_bytes - mine.peak_reserved_bytes
    memory = f" and takes {size(abs(more))} {'more' if more > 0 else 'less'}" if more else ""
    return f"{text(second)} is {'as fast' if loss < 1e-9 else 'hardly slower'}{memory}"


def _smaller(bench: Bench, text: Text, others: list[Point]) -> str:
    """Where nothing else fits: what lacks least."""
    if not others or any(bench.forecasts[each].fits for each in others):
        return ""
    nearest = min(others, key=lambda each: _excess(bench, each))
    now = cost(bench.forecasts[bench.best]) if bench.best is not None else 0.0
    if cost(bench.forecasts[nearest]) < now:
        return ""
    return f"{text(nearest)} lacks {size(_excess(bench, nearest))}"


def _excess(bench: Bench, point: Point) -> int:
    forecast = bench.forecasts[point]
    return forecast.peak_reserved_bytes - forecast.budget_bytes
