"""`trueshard plan --for`: forecast another framework's configuration as it is, and say which of its keys to change.

The rules of `trueshard convert` are read both ways: forwards their keys become the options of `shard()`, backwards the
best plan that their keys can say becomes keys again. Where a framework makes other units than `shard()`, its units are
forecast.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueshard.axes import OPTIONS, ranks_along, sizes_of
from trueshard.convert.converting import drafted, is_listed
from trueshard.convert.engine import FALSE, TRUE, Draft, Rule, our_default, shown
from trueshard.convert.tables import Framework
from trueshard.errors import UserError
from trueshard.model.names import Index, named_modules
from trueshard.model.units import Grouping
from trueshard.options import NAMES, Offload
from trueshard.planner.choose_plan import FREE, Progress, on_best_axes, shared_simulations, solve, space_of
from trueshard.planner.inputs.architectures import architecture
from trueshard.planner.planning import Request
from trueshard.planner.report.summary import as_json, duration, headline, listed, verdict
from trueshard.planner.search.evaluator import Evaluator, Simulations, cost
from trueshard.planner.search.search import check_speed, named_faults, study_fastest, with_warnings
from trueshard.planner.search.space import RECOMPUTE, Candidate, Setting
from trueshard.planner.simulation.simulate import Simulator
from trueshard.planner.workload import Study
from trueshard.plans import Plan, Unit, UnitKind
from trueshard.text import size, table

FRAMEWORKS = ("torchtitan", "accelerate", "deepspeed")
CHOICES = ("reshard_after_forward", "activation_checkpointing", "mixed_precision", "compile", "offload", "units")
"""Options of `shard()` that `[shard]` has by the same names, besides the axes."""
RESHARD = ("never", "default", "always")
CHOSEN = ("reshard_after_forward", "activation_checkpointing", "unshard_in_backward")
"""Fields of a unit that no model says."""


@dataclass(frozen=True)
class Change:
    """A change for the best plan: a key of their file, or words for what is elsewhere."""

    key: str
    value: Any
    before: Any
    """Value in the file; None: it has none."""
    say: str = ""

    def __str__(self) -> str:
        if self.say:
            return self.say
        was = "not given" if self.before is None else f"was {shown(self.before)}"
        return f"{self.key} = {json.dumps(self.value)}  ({was})"


@dataclass(frozen=True)
class Advice:
    """Forecasts of a configuration as it is and of the best plan that its framework can be told."""

    title: str
    theirs: Study
    best: Study
    changes: tuple[Change, ...]
    differs: tuple[str, ...]
    """Differences of training there from what is forecast, one sentence each."""
    left_out: tuple[str, ...]
    """Keys that the forecast does not follow, and why; a sentence for those with the same reason."""

    def __str__(self) -> str:
        rows = [_row("as it is", self.theirs)]
        rows += [_row("best", self.best)] if self.changes else []
        head = ("", "reserved", "", f"{self.theirs.forecast.counted}/s", "MFU", "step")
        blocks = [
            [f"{headline(self.theirs.forecast)}, from {self.title}"],
            listed("Taken for granted", [*self.theirs.assumptions, *self.differs]),
            listed("Left out, or forecast in another way", self.left_out),
            table(head, rows, right=(1, 3, 4, 5)),
            listed("Axes", self.best.reasons),
            ["Change", *(f"  {change}" for change in self.changes)]
            if self.changes
            else ["There is nothing to change."],
        ]
        return "\n\n".join("\n".join(block) for block in blocks if block)

    def as_json(self) -> dict[str, Any]:
        """Return all of it for `json.dumps`: `theirs` and `best` as `trueshard plan --json` has a study."""
        changes = [dataclasses.asdict(change) for change in self.changes]
        return {
            "theirs": as_json(self.theirs),
            "best": as_json(self.best),
            "changes": changes,
            "differs": [*self.differs],
            "left_out": [*self.left_out],
        }


def advise(
    path: Path,
    source: str,
    model: str = "",
    *,
    ranks: int | None = None,
    progress: Progress = lambda line: None,
    workers: int | None = 0,
    **options: Any,
) -> Advice:
    """Return forecasts of a configuration and of the best plan, and the keys that differ.

    Args:
        path: their file.
        source: its framework, of `FRAMEWORKS`.
        model: as of `trueshard.plan`; "": what the file names.
        ranks: processes; None: as the file says, else 8.
        workers: as of `solve`.
        options: other fields of `Request`, in the place of what the file says.

    Raises:
        UserError: the file, a key or the model is not understood.
        ValueError: the planner cannot simulate it.
    """
    draft, kind, title = drafted(path, source, ranks)
    differs = []
    if draft.ranks is None:
        differs = ["The file names no number of ranks: 8 are taken (--ranks)."]
        draft, kind, title = drafted(path, source, 8)
    options = {name: value for name, value in options.items() if value is not None}
    search_axes = options.pop("axes", False)
    request = request_of(draft, model or model_of(draft, path), options)
    with shared_simulations(request, workers) as shared:
        shared.expect(lambda: _search_of(request, request, kind, draft, progress, shared)[0].start_probes())
        search = functools.partial(best_of, theirs=request, kind=kind, draft=draft, progress=progress, shared=shared)
        with named_faults(shared):
            theirs = forecast_of(request, kind, draft, progress, shared)
            best = on_best_axes(request, search, progress) if search_axes else search(request)
        theirs = with_warnings(shared, theirs)
    if theirs.forecast.fits and cost(theirs.forecast) <= cost(best.forecast):
        best = theirs
    changes = tuple(changes_of(kind, draft, theirs, best))
    of_forecast = ("shard.", "train.batch", "train.accumulate")
    for entry in draft.in_order():
        if entry.status == "near" and entry.becomes.startswith(of_forecast):
            differs.append(f"{entry.key} = {shown(entry.value)}: {entry.note}.")
    title = f"{path.name} of {title}"
    return Advice(title, theirs, best if changes else theirs, changes, tuple(differs), tuple(left_out(draft)))


def left_out(draft: Draft) -> Iterator[str]:
    """Yield keys with no equivalent, or that are done in a way of our own, with the reason; those of one together."""
    keys: dict[str, list[str]] = {}
    for entry in draft.in_order():
        verdict = draft.rules[entry.key].verdict
        in_own_way = entry.status == "always" and verdict is not None and verdict[1] == entry.note
        if (entry.status == "none" or in_own_way) and not is_listed(entry.key, "free"):
            keys.setdefault(entry.note, []).append(f"{entry.key} = {shown(entry.value)}")
    yield from (f"{', '.join(given)}: {note}." for note, given in keys.items())


# Forwards


def request_of(draft: Draft, model: str, options: Mapping[str, Any]) -> Request:
    """Return what the planner is asked for: their configuration, with nothing left free."""
    tree = draft.tree
    choices = {key: value for key in CHOICES if (value := tree.get(f"shard.{key}")) is not None}
    tensor: Any = tree.get("shard.tensor", 1)
    if "shard.tensor.ranks" in tree:
        tensor = {"ranks": tree["shard.tensor.ranks"], "sequence": tree.get("shard.tensor.sequence", False)}
    accumulation = tree.get("train.accumulate", 1)
    microbatch = max(1, tree.get("train.batch_size", 1) // ((draft.readers or 1) * accumulation))
    clip = tree.get("train.max_grad_norm", 1.0)
    theirs = {
        "model": model,
        "ranks": draft.ranks,
        "sequence": tree.get("train.sequence_length"),
        "microbatch": microbatch,
        "accumulation": accumulation,
        "replicate": tree.get("shard.replicate", 1),
        "storage_dtype": tree.get("model.dtype"),
        "optimizer": _optimizer(tree.get("optimizer.class")),
        "clip": clip if clip and math.isfinite(clip) else None,
        "tensor": tensor,
        "context": tree.get("shard.context", 1),
        "experts": tree.get("shard.experts", 1),
        "reshard_after_forward": "default",
        "activation_checkpointing": "none",
        "mixed_precision": None,
        "offload": "none",
        **choices,
    }
    return Request(**{**theirs, **options})


def _optimizer(path: str | None) -> str | None:
    """Return the planner's words for an import path."""
    if path is None:
        return None
    module, _, name = path.rpartition(".")
    return name.lower() if module == "torch.optim" else f"{module}:{name}"


def model_of(draft: Draft, path: Path) -> str:
    """Return the model that a file names: a path, or TorchTitan's name and flavor as a known architecture."""
    for key in ("model.path", "model.config"):
        if key in draft.tree:
            return str(draft.tree[key])
    name, flavor = str(draft.get("model.name") or ""), str(draft.get("model.flavor") or "")
    family = name.lower().replace("_", "-")
    spelled = re.sub(r"(?<=llama)(?=\d)", "-", family)
    for words in (f"{spelled}-{flavor}", f"{family}-{flavor}", spelled):
        match = architecture(words)
        if match is not None and (words != spelled or not flavor or flavor.lower() == f"{match.parameters / 1e9:.0f}b"):
            return match.name
    what = f"{name} {flavor} is no known architecture" if name else "it names no model"
    raise UserError(
        f"{path}: {what}; give the model after it: a known architecture (llama-3-8b), a folder with a config.json, or "
        "file.py:factory"
    )


# The best plan


def best_of(
    request: Request,
    theirs: Request,
    kind: Framework,
    draft: Draft,
    progress: Progress,
    shared: Simulations | None = None,
    faster_than: float | None = None,
) -> Study:
    """Return the study of the fastest plan that fits, of those that say the same for all blocks and have keys there.

    ``shared``, ``faster_than``: as of `solve`. Raises ValueError for axes, beside those of the file (`theirs`), without
    a key there or that the batch rules out.
    """
    evaluator, sizes, of_rank = _search_of(request, theirs, kind, draft, progress, shared)
    reshards = [word for word in RESHARD if spoken(kind, draft, "shard.reshard_after_forward", word)]
    recomputes = [word for word in RECOMPUTE if spoken(kind, draft, "shard.activation_checkpointing", word)]
    offloads: tuple[Offload, ...] = ("none", "cpu") if spoken(kind, draft, "shard.offload", "cpu") else ("none",)
    if faster_than:
        check_speed(evaluator, faster_than)
    for offload in offloads:
        settings = [Setting(evaluator.space.replicate or 1, size, of_rank // size, offload) for size in sizes]
        choices = itertools.product(settings, reshards, recomputes)
        study_fastest(evaluator, [evaluator.uniform(*choice) for choice in choices])
        if evaluator.best is not None:
            return evaluator.studies[evaluator.best]
    assert evaluator.smallest is not None
    return evaluator.studies[evaluator.smallest]


def _search_of(
    request: Request,
    theirs: Request,
    kind: Framework,
    draft: Draft,
    progress: Progress,
    shared: Simulations | None,
) -> tuple[_TheirUnits, list[int], int]:
    """Return the search of `best_of`, the microbatches that have a key there, and a rank's samples of a step."""
    assert theirs.microbatch is not None
    assert theirs.accumulation is not None
    for axis in ("pipeline", *OPTIONS):
        ranks = ranks_along(request, axis)
        if ranks != ranks_along(theirs, axis) and not spoken(kind, draft, f"shard.{axis}", ranks):
            raise ValueError(f"{kind.title} has no key for {axis}")
    sharing, before = (math.prod(sizes_of(degrees).values()) for degrees in (request, theirs))
    of_rank, rest = divmod(theirs.microbatch * theirs.accumulation * sharing, before)
    if rest or of_rank % theirs.microbatch:
        raise ValueError(f"the batch of a step does not divide by {request.ranks // sharing} ranks")
    request = dataclasses.replace(request, microbatch=theirs.microbatch, accumulation=of_rank // theirs.microbatch)
    replicate = 1 if request.replicate == request.ranks else request.replicate  # full copies everywhere shard nothing
    free: dict[str, Any] = {"reshard_after_forward": "auto", "activation_checkpointing": "auto", "offload": "none"}
    space, _ = space_of(dataclasses.replace(request, replicate=replicate, **free), shared)
    sizes = [theirs.microbatch]
    if spoken(kind, draft, "microbatch", 1) and spoken(kind, draft, "train.accumulate", 1):
        sizes = [theirs.microbatch * 2, theirs.microbatch, theirs.microbatch // 2]
    sizes = [size for size in sizes if size and of_rank % size == 0]
    if len(sizes) > 1:  # costs are measured at the ends of what the batch allows
        readers = theirs.ranks // sharing
        space = dataclasses.replace(space, microbatch=None, accumulation=None, global_batch=of_rank * readers)
    evaluator = _TheirUnits(space, progress, simulations=shared)
    evaluator.change = functools.partial(in_their_units, kind=kind, draft=draft)
    return evaluator, sizes, of_rank


# Units, as they are there


class _TheirUnits(Evaluator):
    """Studies plans in the units that a framework makes."""

    change: Callable[[Plan, Any], Plan]

    def plan(self, candidate: Candidate) -> Plan:
        return self.change(super().plan(candidate), self.simulations.simulator.model)


def forecast_of(
    request: Request,
    kind: Framework,
    draft: Draft,
    progress: Progress = lambda line: None,
    shared: Simulations | None = None,
) -> Study:
    """Return the study of a configuration as it is; ``shared``: as of `solve`."""
    space, _ = space_of(request, shared)
    simulator = Simulator(space.workload) if shared is None else shared.simulator
    plan = simulator.resolve(space.choices, space.cluster(space.replicate or 1).mesh)
    if (theirs := in_their_units(plan, simulator.model, kind, draft)) is plan:
        return solve(request, progress, shared=shared)
    free = {name: getattr(FREE, name) for name in NAMES if name != "memory"}
    return solve(dataclasses.replace(request, **free, plan=theirs), progress, shared=shared)


def in_their_units(plan: Plan, model: Any, kind: Framework, draft: Draft) -> Plan:
    """Return a plan whose units are embedding, blocks, and final norm with head, where a framework makes these."""
    if not kind.tail or str(draft.given.get(kind.tail.get("with", ""), 2)) != "2":
        return plan
    first, last = (getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output"))
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    norms = [module for module in base.children() if "Norm" in type(module).__name__]
    is_tied = first is not None and last is not None and first.weight is last.weight
    blocks = [unit for unit in plan.units if unit.kind in ("block", "experts", "shared", "dtype")]
    own: list[tuple[UnitKind, list[Any], bool]] = [
        ("root", [model], False),
        ("embedding", [None if is_tied else first], any(unit.reshard_after_forward for unit in blocks)),
        ("head", [*norms[-1:], first if is_tied else None, last], plan.reshard_after_forward not in kind.tail["kept"]),
    ]
    name_of: dict[Any, str] = {module: name for name, module in named_modules(model)}
    for what, modules, freed in own:
        if names := tuple(name_of[module] for module in modules if module is not None):
            blocks.append(Unit(" + ".join(names), names, what, 0, 0, 0, "", reshard_after_forward=freed))
    sums = {"accumulate_gradients": kind.tail["sums"]}
    chosen = {unit.name: {field: getattr(unit, field) for field in CHOSEN} | sums for unit in blocks}
    plan = dataclasses.replace(plan, units=tuple(blocks), **sums)
    units = (dataclasses.replace(unit, **chosen[unit.name]) for unit in Grouping.of_plan(Index(model), plan).units())
    return dataclasses.replace(plan, units=tuple(units), resolved_for=plan.policies)


# Backwards


def changes_of(kind: Framework, draft: Draft, theirs: Study, best: Study) -> Iterator[Change]:
    """Yield a change for each choice that differs."""
    numbers = {"total": theirs.forecast.microbatch * theirs.forecast.accumulation * (draft.readers or 1)}
    numbers["shards"] = best.plan.ranks[-1] // best.plan.context
    before, after = _chosen(theirs), _chosen(best)
    request = request_of(draft, "", {})
    before |= {"microbatch": request.microbatch, "train.accumulate": request.accumulation}
    before["train.sequence_length"] = request.sequence or best.forecast.sequence
    is_sharded_now = before["shard.replicate"] == theirs.forecast.ranks > after["shard.replicate"]
    for ours, value in after.items():
        if before[ours] != value or (is_sharded_now and ours == "shard.reshard_after_forward"):
            for change in spoken(kind, draft, ours, value, **numbers) or []:
                if change.say or change.value != draft.get(change.key):
                    yield change


def _chosen(study: Study) -> dict[str, Any]:
    plan, forecast = study.plan, study.forecast
    return {
        **{f"shard.{axis}": ranks_along(plan, axis) for axis in OPTIONS},
        "shard.replicate": plan.ranks[0] if len(plan.ranks) == 2 else 1,
        "shard.reshard_after_forward": plan.reshard_after_forward,
        "shard.activation_checkpointing": plan.activation_checkpointing,
        "shard.offload": plan.offload,
        "microbatch": forecast.microbatch,
        "train.accumulate": forecast.accumulation,
        "train.sequence_length": forecast.sequence,
    }


def spoken(kind: Framework, draft: Draft, ours: str, value: Any, **numbers: int) -> list[Change] | None:
    """Return how their framework says a choice; None if it has no words for it. ``numbers``: that its words fill in."""
    for back in kind.back:
        if back["ours"] == ours and back.get("value") in (None, value):
            filled = {"{}": value} | {f"{{{name}}}": number for name, number in numbers.items()}
            said = [Change("", None, None, back["say"].format(value))] if "say" in back else []
            return [_change(draft, key, filled.get(word, word)) for key, word in back.get("keys", {}).items()] + said
    changes = []
    for rule in kind.rules:
        if rule.becomes == ours or any(ours in word.sets for word in rule.words.values()):
            key = _key(rule, draft)
            if rule.words:
                value_there = _word(rule, ours, value, draft.given.get(key, key))
            else:
                value_there = value if rule.sets else None
            if value_there is not None:
                changes.append(_change(draft, key, value_there))
    return [change for change in changes if change.before is not None] or changes[:1] or None


def _change(draft: Draft, key: str, value: Any) -> Change:
    return Change(key, value, draft.given.get(key))


def _key(rule: Rule, draft: Draft) -> str:
    """Return the key of a rule that the file has, else the one that counts in FSDP's newer version, else the first."""
    if given := [key for key in rule.keys if key in draft.given]:
        return given[-1]
    return rule.keys[-1] if rule.beside and str(draft.given.get(rule.beside[0], 1)) == "2" else rule.keys[0]


def _word(rule: Rule, ours: str, value: Any, present: Any) -> Any:
    """Return their word for a value of ours, spelled as the file has it; None if there is none.

    A word that sets nothing says our default; one that makes full copies says more than the value.
    """
    is_default = value == our_default(ours)
    names = [
        name
        for name, word in rule.words.items()
        if not (word.none or word.copies)
        and (word.sets.get(ours) == value or (is_default and not word.sets and not word.ask))
    ]
    switches = [name for name in names if name in TRUE + FALSE and not name.isdigit()]
    is_switch = str(present).lower() in ("true", "false") or "reshard" in str(present)
    if switches and (is_switch or len(switches) == len(names)):
        return switches[0] in TRUE
    as_present = [name for name in names if str(present).lower() == name.lower()]
    name = next(iter([*as_present, *(name for name in names if not name.isdigit()), *names]), "")
    return int(name) if name.isdigit() else name or None


def _row(name: str, study: Study) -> tuple[str, ...]:
    forecast = study.forecast
    return (
        name,
        size(forecast.peak_reserved_bytes),
        verdict(forecast),
        f"{forecast.tokens_per_second_per_rank:,.0f}",
        f"{forecast.mfu:.1%}",
        duration(forecast.step_seconds),
    )
