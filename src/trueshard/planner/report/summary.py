"""A study as text for a terminal, as JSON for programs, and as the rows that pages show, too."""

from __future__ import annotations

import dataclasses
import functools
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

from trueshard.axes import OPTIONS
from trueshard.options import SHARDED
from trueshard.planner import ledger
from trueshard.planner.ledger import UnitUse
from trueshard.planner.report.compare import collapse, times
from trueshard.planner.workload import Alternative, Study
from trueshard.plans import SHORT_DTYPES, Forecast
from trueshard.text import size, table, tomllib

WIDTH = 100
MFU = "6N + 12·L·h·s a token: causal attention in full, no recomputation"
_NOTHING = UnitUse(0, 0, 0, 0)


def text(study: Study) -> str:
    """Return the study in lines of at most ``WIDTH`` characters: job, units, memory, communication, time, reasons."""
    forecast = study.forecast
    blocks = [
        [line for words in (headline(forecast), settings(study)) for line in textwrap.wrap(words, WIDTH)],
        listed("Taken for granted", study.assumptions),
        _units(study),
        _memory(forecast),
        _imbalances(study),
        _phases(study),
        _communication(forecast),
        _time(study),
        _bill(study),
        listed("Why", (*study.reasons, *_unit_reasons(study))),
        listed("If a process is lost", study.failures.sentences if study.failures else ()),
        _alternatives(study),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def as_json(study: Study) -> dict[str, Any]:
    """Return all of a study but its events, for ``json.dumps``.

    Every field of ``Forecast`` is a key. ``plan`` is the plan as ``Plan.from_json`` reads it. ``units`` has the plan's
    units with ``bytes_at_peak``, ``bytes_maximum``, ``bytes_received`` and ``flops`` of each. ``alternatives`` has
    ``words``, ``on_front`` (no other plan that fits is both faster and smaller) and the forecast's fields.
    """
    uses = ledger.by_unit(study.trace)
    this, *others = every_plan(study)
    return {
        **dataclasses.asdict(study.forecast),
        "on_front": this["on_front"],
        "units": [
            {**dataclasses.asdict(unit), **dataclasses.asdict(uses.get(unit.name, _NOTHING))}
            for unit in study.plan.units
        ],
        **({"bill": dataclasses.asdict(study.bill)} if study.bill else {}),
        **({"phases": [dataclasses.asdict(phase) for phase in study.phases]} if study.phases else {}),
        **({"imbalances": imbalance_rows(study)} if study.imbalances else {}),
        "plan": json.loads(study.plan.to_json()),
        **({"failures": dataclasses.asdict(study.failures)} if study.failures else {}),
        "reasons": list(study.reasons),
        "assumptions": list(study.assumptions),
        "alternatives": others,
    }


def every_plan(study: Study) -> list[dict[str, Any]]:
    """Return ``words``, ``on_front`` and the forecast's fields of this plan, then of all alternatives."""
    every = [Alternative("this plan", study.forecast), *study.alternatives]
    front = pareto([plan.forecast for plan in every])
    return [
        {"words": other.words, "on_front": number in front, **dataclasses.asdict(other.forecast)}
        for number, other in enumerate(every)
    ]


def pareto(forecasts: Sequence[Forecast]) -> list[int]:
    """Return the positions of the Pareto front by speed and memory among those that fit, smallest first.

    Of several with equal speed and memory the first one counts.
    """
    speeds = [forecast.tokens_per_second_per_rank for forecast in forecasts]
    fitting = [number for number, forecast in enumerate(forecasts) if forecast.fits]
    front: list[int] = []
    for number in sorted(fitting, key=lambda position: (forecasts[position].peak_reserved_bytes, -speeds[position])):
        if not front or speeds[number] > speeds[front[-1]]:
            front.append(number)
    return front


# Words


def headline(forecast: Forecast) -> str:
    """Return model and devices in one line."""
    nodes = f", {forecast.ranks_per_node} ranks a node" if forecast.ranks > forecast.ranks_per_node else ""
    return f"{forecast.model} on {forecast.ranks:,} × {forecast.hardware}{nodes}"


def settings(study: Study) -> str:
    """Return the plan's settings for all units and the size of a step, in one line."""
    plan, forecast = study.plan, study.forecast
    words = [f"sequence {forecast.sequence:,}"] if forecast.sequence > 1 else []
    words.append(f"microbatch {forecast.microbatch}")
    words += [f"accumulation {forecast.accumulation}"] if forecast.accumulation > 1 else []
    if forecast.accumulation > 1 and (sharded := sum(unit.accumulate_gradients == SHARDED for unit in plan.units)):
        some = "" if sharded == len(plan.units) else f" in {sharded} of {len(plan.units)} units"
        words.append(f"gradients of each microbatch reduced{some}")
    words.append(forecast.optimizer)
    if len(plan.ranks) > 1:
        words.append(f"{plan.ranks[0]} replicas of {plan.ranks[1]} shards")
    words += [f"{axis} {ranks}" for axis in OPTIONS if (ranks := getattr(plan, axis)) > 1]
    if forecast.pipeline > 1:
        chunks = f" of {forecast.virtual} chunks" if forecast.virtual > 1 else ""
        words.append(f"pipeline of {forecast.pipeline} stages{chunks}, {forecast.schedule}")
    if (mixed := plan.mixed_precision) is not None:
        compute = mixed.compute or "storage dtype"
        words.append(f"computes in {compute}, reduces in {mixed.reduce or compute}")
    words += ["compiled"] if plan.compile else []
    words += [f"offload to {plan.offload}"] if plan.offload != "none" else []
    return " · ".join(words)


def verdict(forecast: Forecast) -> str:
    """Return whether it fits, and by how much."""
    spare = forecast.budget_bytes - forecast.peak_reserved_bytes
    if not forecast.fits:
        return f"does not fit, {size(-spare)} too much" if spare < 0 else "fits, but what its host holds does not"
    error = worst_error(forecast)
    safe, part = forecast.peak_reserved_bytes / (1 - error), spare / forecast.budget_bytes
    if safe <= forecast.budget_bytes:
        return f"fits, {size(spare)} to spare"
    return f"fits, {part:.1%} to spare; errors of this kind reach {error:.0%}: count on {size(safe)}"


def worst_error(forecast: Forecast) -> float:
    """Return the part by which a published run of the same kind took more memory than its forecast, at most."""
    kind = "one axis" if {*forecast.received_by_axis} <= {"shard", "replicate"} else "several axes"
    return _errors()[kind]


@functools.cache
def _errors() -> dict[str, float]:
    return tomllib.loads(resources.files("trueshard.planner").joinpath("errors.toml").read_text(encoding="utf-8"))


def host_verdict(forecast: Forecast) -> str:
    """Return what offloading and snapshots take of a node's main memory, and whether it fits."""
    node = size(forecast.host_bytes * forecast.ranks_per_node)
    if forecast.host_budget_bytes is None:
        return f"{node} a node, whose memory is not known (--host-memory)"
    of_node = size(forecast.host_budget_bytes * forecast.ranks_per_node)
    return f"{node} of a node's {of_node} (--host-memory){': does not fit' if forecast.host_lack > 0 else ''}"


def duration(seconds: float) -> str:
    """Return seconds with at least three digits, in a unit that is easy to read."""
    value, unit = seconds * 1e6, "µs"
    for larger in ("ms", "s"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def operations(count: float) -> str:
    """Return floating-point operations with at least two digits, in a unit that is easy to read."""
    prefixes = ["", "K", "M", "G", "T"]
    while abs(count) >= 9999.5 and len(prefixes) > 1:
        count /= 1000
        prefixes.pop(0)
    return f"{count:,.0f} {prefixes[0]}FLOP"


def listed(title: str, sentences: Sequence[str]) -> list[str]:
    """Return lines with a title and a list of sentences, each once; none without sentences."""
    lines = [
        textwrap.fill(sentence, WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)
        for sentence in dict.fromkeys(sentences)
    ]
    return [title, *lines] if lines else []


def indented(rows: Sequence[tuple[str, ...]], right: Sequence[int]) -> list[str]:
    """Return an indented table without a head; a last cell that is too long goes on below itself."""
    room = WIDTH - 2 - sum(2 + max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1))
    wrapped = []
    for *first, last in rows:
        parts = textwrap.wrap(last, max(room, 20)) or [""]
        wrapped += [(*first, parts[0]), *(("",) * len(first) + (part,) for part in parts[1:])]
    return [f"  {line}" for line in table(("",) * len(rows[0]), wrapped, right)[2:]]


def _short(words: str, width: int) -> str:
    """Return at most ``width`` characters, cut in the middle."""
    if len(words) <= width:
        return words
    tail = (width - 1) // 2
    return f"{words[: width - 1 - tail]}…{words[-tail:]}"


def _share(words: str, seconds: float, step: float) -> str:
    return f"{words}, {seconds / (step or 1.0):.1%} of the step" if words else ""


# Units


def unit_rows(study: Study) -> list[dict[str, Any]]:
    """Return the plan's units, repeated equal ones as one.

    Parameters and bytes are those of one unit; ``at_peak`` and ``received``, in bytes, those of the row.
    """
    uses = ledger.by_unit(study.trace)
    words = {"True": "yes", "False": "no"}
    return [
        {
            "name": row.name or "(root)",
            "count": len(row.items),
            **{key: getattr(unit, key) for key in ("parameters", "trainable", "bytes", "dtype", "why")},
            "reshard": words.get(str(unit.reshard_after_forward), f"to {unit.reshard_after_forward} ranks"),
            "recompute": unit.activation_checkpointing,
            "at_peak": sum(uses.get(item.name, _NOTHING).bytes_at_peak for item in row.items),
            "received": sum(uses.get(item.name, _NOTHING).bytes_received for item in row.items),
        }
        for row in collapse(study.plan.units, lambda one: one.name, lambda one: replace(one, name="", modules=()))
        for unit in row.items[:1]
    ]


def _units(study: Study) -> list[str]:
    units = unit_rows(study)
    head = ("unit", "", "parameters", "size", "dtype", "reshard", "recompute", "at peak", "received")
    rows = [
        (
            unit["name"],
            times(unit["count"]),
            f"{unit['parameters']:,}",
            size(unit["bytes"]),
            _short_dtypes(unit["dtype"]),
            unit["reshard"],
            unit["recompute"] + (" (frozen)" if unit["parameters"] and not unit["trainable"] else ""),
            size(unit["at_peak"]),
            size(unit["received"]),
        )
        for unit in units
    ]
    rows += [
        (parameter.name, "", f"{parameter.parameters:,}", "", "", "replicated", "", "", "")
        for parameter in study.plan.replicated
    ]
    lines = _narrowed(head, rows)
    if any(unit["count"] > 1 for unit in units):
        lines.append("Parameters and size are those of one unit; memory at the peak and traffic those of the row.")
    return ["Units", *lines]


def _narrowed(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of the table of units; too wide, it has shorter names, then no sizes, then no dtypes."""
    for without in ((), ("size",), ("size", "dtype")):
        columns = [i for i, name in enumerate(head) if name not in without]
        widths = [max(len(row[i]) for row in (head, *rows)) for i in columns[1:]]
        room = WIDTH - sum(2 + width for width in widths)
        if room > 15:
            break
    shown = [(_short(row[0], min(room, 40)), *(row[i] for i in columns[1:])) for row in rows]
    numbers = ("", "parameters", "size", "at peak", "received")
    return table([head[i] for i in columns], shown, [at for at, i in enumerate(columns) if head[i] in numbers])


def _short_dtypes(dtype: str) -> str:
    """Return several dtypes, joined by ``+``, by their short names; one as it is."""
    names = {full: short for short, full in SHORT_DTYPES.items()}
    return "+".join(names.get(part, part) for part in dtype.split("+")) if "+" in dtype else dtype


def _unit_reasons(study: Study) -> Iterator[str]:
    for row in collapse(study.plan.units, lambda unit: unit.name, lambda unit: unit.why):
        if row.items[0].why not in ("", "root"):
            yield f"{row}: {row.items[0].why}."
    for parameter in study.plan.replicated:
        yield f"{parameter.name} is replicated: {parameter.why}."
    yield from study.plan.cuts


# Memory, communication, time


def figures(forecast: Forecast) -> list[tuple[str, float, str, str]]:
    """Return (label, value, value in words, note) of the figures that pages begin with."""
    computing, step = duration(forecast.compute_seconds), forecast.step_seconds
    waiting = forecast.exposed_communication_seconds / (step or 1.0)
    received, rate = forecast.bytes_received_per_step, forecast.tokens_per_second_per_rank
    return [
        ("Live peak", forecast.peak_live_bytes, size(forecast.peak_live_bytes), _where(forecast)),
        (
            "Reserved peak",
            forecast.peak_reserved_bytes,
            size(forecast.peak_reserved_bytes),
            f"of {size(forecast.budget_bytes)}",
        ),
        ("Step", step, duration(step), f"{computing} computing"),
        (f"{forecast.counted.capitalize()} a second", rate, f"{rate:,.0f}", "a rank"),
        ("MFU", forecast.mfu, f"{forecast.mfu:.1%}", MFU),
        ("Received", received, size(received), f"a rank and step; {waiting:.1%} of time waiting"),
    ]


def _where(forecast: Forecast) -> str:
    return f"in {forecast.peak_phase}" + (f" of {forecast.peak_unit}" if forecast.peak_unit else "")


def _memory(forecast: Forecast) -> list[str]:
    live = max(forecast.peak_live_bytes, 1)
    rows = [(kind, size(count), f"{count / live:.0%}", "") for kind, count in forecast.peak_by_kind.items()]
    what = _short(f"what tensors take at the peak, {_where(forecast)}", 62)
    rows += [
        ("live", size(forecast.peak_live_bytes), "", what),
        ("reserved", size(forecast.peak_reserved_bytes), "", "as torch.cuda.max_memory_reserved() would say"),
        ("budget", size(forecast.budget_bytes), "", verdict(forecast)),
        ("overhead", size(forecast.overhead_bytes), "", "context and communicators, outside of torch's allocator"),
    ]
    if forecast.host_bytes:
        rows.append(("on the host", size(forecast.host_bytes), "", host_verdict(forecast)))
    return ["Memory of a rank", *indented(rows, right=(1, 2))]


def imbalance_rows(study: Study) -> list[dict[str, Any]]:
    """Return ``imbalance`` and the forecast's fields at each imbalance of experts."""
    return [{"imbalance": at, **dataclasses.asdict(result)} for at, result in study.imbalances]


def _imbalances(study: Study) -> list[str]:
    head, rows = ("imbalance", "live", "reserved", "step", ""), []
    for at, result in study.imbalances:
        words = size(result.peak_live_bytes), size(result.peak_reserved_bytes), duration(result.step_seconds)
        rows.append((f"{at:g}", *words, verdict(result).partition(";")[0]))
    return ["By imbalance of experts, of the busiest rank", *table(head, rows, right=(0, 1, 2, 3))] if rows else []


def phase_rows(study: Study) -> list[dict[str, Any]]:
    """Return the phases of a step of reinforcement learning, or of a run, with words for a table.

    Shares are of the time of a run, in which a phase comes once in ``every`` steps.
    """
    every = [None if phase.seconds is None else phase.seconds / phase.every for phase in study.phases]
    total = 0.0 if None in every else sum(seconds or 0.0 for seconds in every)
    most = max((phase.live_bytes for phase in study.phases), default=0)
    return [
        {
            "name": phase.name,
            "live": size(phase.live_bytes) + (" (largest)" if phase.live_bytes == most else ""),
            "time": "unknown" if phase.seconds is None else duration(phase.seconds) if phase.seconds else "none",
            "share": f"{seconds / total:.0%}" if seconds is not None and total else "",
            "needs": " · ".join([*(f"{name} {size(count)}" for name, count in phase.needs.items()), *phase.notes]),
        }
        for phase, seconds in zip(study.phases, every, strict=True)
    ]


def _phases(study: Study) -> list[str]:
    if not study.phases:
        return []
    every = phase_rows(study)
    starts = indented([(*list(row.values())[:4], "") for row in every], right=(2, 3))
    lines = [
        textwrap.fill(row["needs"] or " ", WIDTH, initial_indent=f"{start.rstrip()}  ", subsequent_indent=" " * 8)
        for start, row in zip(starts, every, strict=True)
    ]
    return [phases_title(study), *lines]


def phases_title(study: Study) -> str:
    """Return a heading for the phases."""
    return "Phases of a run" if any(phase.name == "saving" for phase in study.phases) else "Phases of a step"


def _communication(forecast: Forecast) -> list[str]:
    rows = [(op.replace("_", "-"), size(count)) for op, count in forecast.received_by_collective.items()]
    rows.append(("together", size(forecast.bytes_received_per_step)))
    lines = ["Received by a rank in a step", *indented(rows, right=(1,))]
    received, exposed = forecast.received_by_axis, forecast.exposed_by_axis
    axes = dict.fromkeys([*received, *exposed])
    if set(axes) <= {"shard"}:
        return lines
    by_axis = [(axis, size(received.get(axis, 0)), duration(exposed.get(axis, 0.0)), "waited for") for axis in axes]
    return [*lines, "", "By axis of the mesh", *indented(by_axis, right=(1, 2))]


def _time(study: Study) -> list[str]:
    forecast = study.forecast
    again = forecast.flops_per_step - forecast.model_flops_per_step
    work = operations(forecast.model_flops_per_step)
    work += f", and {operations(again)} again by recomputing" if again else ""
    (computing, seconds, _), *others = time_parts(study)
    rows = [("step", duration(forecast.step_seconds), ""), (computing, duration(seconds), work)]
    rows += [(name, duration(seconds), words) for name, seconds, words in others]
    if bubble := forecast.bubble_seconds:
        words = _share("of the waiting, while the pipeline fills and drains", bubble, forecast.step_seconds)
        rows.append(("bubble", duration(bubble), words))
    rows += [
        (f"{forecast.counted}/s", f"{forecast.tokens_per_second_per_rank:,.0f}", "a rank"),
        ("MFU", f"{forecast.mfu:.1%}", MFU),
    ]
    return ["Time of a step", *indented(rows, right=(1,))]


def _bill(study: Study) -> list[str]:
    if study.bill is None:
        return []
    rows = [(name, words, "") for name, words in study.bill.figures().items() if words]
    return [f"A run of {study.bill.amount:,.0f} {study.forecast.counted}", *indented(rows, (1,))]


def time_parts(study: Study) -> list[tuple[str, float, str]]:
    """Return (name, seconds, words) of the parts of a step, which add up to it; the first is computing.

    Of an accumulation of which a few microbatches are simulated, host and other ranks are in proportion.
    """
    forecast, line = study.forecast, study.timeline
    step = forecast.step_seconds
    rest = max(step - forecast.compute_seconds - forecast.exposed_communication_seconds, 0.0)
    simulated = line.host_seconds + line.straggling_seconds
    host = rest * line.host_seconds / simulated if simulated else rest
    on_host = sum(span.end - span.start for span in line.spans if span.stream == "host")
    optimizer = host * min(1.0, on_host / line.host_seconds) if on_host else 0.0
    parts = [
        ("computing", forecast.compute_seconds, ""),
        ("waiting", forecast.exposed_communication_seconds, "for communication that nothing hides"),
        ("optimizer", optimizer, "the device waits for clipping and the optimizer on the CPU"),
        ("host", host - optimizer, "the device waits for work to be issued"),
        ("other ranks", rest - host, "the slowest of several nodes"),
    ]
    shown = [part for part in parts if part[1] > step / 10000 or part[0] in ("computing", "waiting")]
    return [(name, seconds, _share(words, seconds, step)) for name, seconds, words in shown]


def _alternatives(study: Study) -> list[str]:
    if not study.alternatives:
        return []
    rows = [
        (
            size(plan["peak_reserved_bytes"]),
            f"{plan['tokens_per_second_per_rank']:,.0f}",
            "yes" if plan["fits"] else "no",
            "*" if plan["on_front"] else "",
            _short(plan["words"], 66),
        )
        for plan in sorted(every_plan(study), key=lambda plan: plan["peak_reserved_bytes"])
    ]
    count = f"{len(study.alternatives):,} other plan{'s were' if len(study.alternatives) > 1 else ' was'} worked out"
    head = ("reserved", f"{study.forecast.counted}/s", "fits", "", "plan")
    return [
        f"{count}; * nothing that fits is both smaller and faster:",
        *(f"  {line}" for line in table(head, rows, right=(0, 1))),
    ]
