"""The two runs that find the first module at which a sharded run leaves the reference, see ``modules``.

Both train up to the step before the one that is watched, and take its forward and backward under a ``Recorder``.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trueshard import _torch
from trueshard.errors import one_line
from trueshard.verification import compare
from trueshard.verification.compare import FACTOR, Comparison, Named, Tolerances
from trueshard.verification.modules import Apart, Located, Measure, Recorder, locate
from trueshard.verification.runs import shaken
from trueshard.verification.subjects import Case, Subject, TrainingSetup, subject_of
from trueshard.verification.training import Microbatches, Progress, accumulate, microbatches_of, parts_here, train

SOURCE = "modules"
"""Name of the reference's result, and of the folder of its tensors."""


def located_reference(case: Case, progress: Progress) -> tuple[Tolerances, str]:
    """Leave the watched step's tensors in ``case.tensors(SOURCE)``; return what they may be apart, and why."""
    subject, first = subject_of(case.on_other_ranks()), case.get("reference")
    build = subject.sharded if case.changes_arithmetic else subject.plain
    store, step = case.tensors(SOURCE), case.watched
    progress.stage = "building the model"
    setup = build()
    microbatches = _before(train(subject, setup, first.record, progress), subject, setup, step)
    wide, missing = None, " (float64: the model cannot be copied)"
    if not case.changes_arithmetic:
        try:
            wide = copy.deepcopy(setup.model)
        except Exception as error:
            missing = f" (float64: {one_line(error)})"
    watch(setup, lambda at, tensor: store.write(at.side, step, at.key, tensor), microbatches, step, case.seed)
    rounded, exact = Measure(store, step), Measure(store, step)
    if wide is not None:
        del setup.model
        try:
            widened = TrainingSetup(wide.double(), setup.optimizers, setup.loss)
            watch(widened, exact, _widened(microbatches), step, case.seed)
            missing = ""
        except (RuntimeError, TypeError, ValueError) as error:
            exact, missing = Measure(store, step), f" (float64: {one_line(error)})"
    again = build()
    microbatches = _before(shaken(subject, again, first.record, progress), subject, again, step)
    watch(again, rounded, microbatches, step, case.seed)
    noise = {key: max(size, exact.noise.get(key, 0.0)) for key, size in rounded.noise.items()}
    source = f": {FACTOR:g} times what float64 and rounding errors change of it{missing}"
    return Tolerances(noise, first.tolerances.floor, {}), source


def located(case: Case, progress: Progress) -> Located | None:
    """Return where the sharded run leaves the reference in the watched step. Collective."""
    subject, first, (tolerances, source) = subject_of(case), case.get("reference"), case.get("located_reference")
    progress.stage = "shard()"
    setup, step = subject.sharded(), case.watched
    microbatches = _before(train(subject, setup, first.record, progress), subject, setup, step)
    measure = Measure(case.tensors(SOURCE), step, None if case.is_exact else tolerances)
    watch(setup, measure, microbatches, step, case.seed)
    expected, allowed = case.tensors("reference"), Tolerances({}, 0.0, {}) if case.is_exact else first.tolerances
    known, gradients = expected.names("gradients", step), compare.values_of("gradients", setup.model)
    differing = distances(gradients, known, lambda name: expected.read("gradients", step, name), allowed, step)
    return located_on(measure, differing, step, source)


def distances(
    values: Named, known: Iterable[str], read: Callable[[str], torch.Tensor], allowed: Tolerances, step: int
) -> list[Comparison]:
    """Gather ``values`` and compare those that are ``known`` here with what ``read`` gives. Collective."""
    result = {name: Comparison("gradients", step, name, math.inf, math.inf, 0.0, factor=0.0) for name in known}
    for name, value in compare.gathered_tensors(values):
        if name in result:
            sizes, factor = compare.distance(value, read(name)), compare.factor(value, read(name))
            tolerance = allowed.of("gradients", step, name)
            result[name] = Comparison("gradients", step, name, *sizes, tolerance, factor=factor)
    return list(result.values())


def located_on(measure: Measure, gradients: Sequence[Comparison], step: int, source: str) -> Located | None:
    """Return where the ranks' ``measure`` and the ``gradients`` leave the reference first. Collective."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (Apart.of(measure.passed), measure.passed_over))
    return locate([apart for apart, _ in ranks], gradients, step, source, sum(count for _, count in ranks))


def _before(run: Iterator[tuple[str, int, Named]], subject: Subject, setup: TrainingSetup, step: int) -> Microbatches:
    """Take the steps before ``step``; return this rank's microbatches of that one."""
    for kind, at, _ in run:
        if at == step - 1 and kind == ("state" if at else "buffers"):  # the last that is yielded of a step
            break
    for optimizer in setup.optimizers:
        optimizer.zero_grad()
    return microbatches_of(subject, step, parts_here(subject, setup.model))


def watch(setup: TrainingSetup, sink: Any, microbatches: Microbatches, step: int, seed: int) -> float:
    """Run forward and backward, and show ``sink``, if there is one, what passes the modules; return the mean loss."""
    watching = contextlib.nullcontext() if sink is None else Recorder(setup.model, sink).watching()
    with watching as recorder:
        return accumulate(setup, microbatches, step, seed, recorder)


def _widened(microbatches: Microbatches) -> Microbatches:
    def wide(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return [(part, number, _torch.mapped(wide, batch)) for part, number, batch in microbatches]
