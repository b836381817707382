"""The page of a session: what each step gave, as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.session import Outcome, Session

Rows = Sequence[Sequence[Any]]


def page_of(session: Session) -> str:
    """Return the page of all outcomes so far, in the order in which they came."""
    machine = session.machine
    gpus = machine["gpus"]
    name = f"{len(gpus)} × {gpus[0][0]} ({gpus[0][1] / 2**30:.0f} GiB)" if gpus else "no GPU"
    is_emulated = machine.get("emulated", False)
    parts = [
        f"# On {'an emulated CUDA device' if is_emulated else 'a GPU'}",
        f"Written by `make gpu`: {name}, torch {machine['torch']} (CUDA {machine['cuda']}, NCCL {machine['nccl']}), "
        f"Python {machine['python']}, {machine['cores']} cores.",
    ]
    if is_emulated:
        parts.append(
            "The device is emulated on the CPU (docs/emulated-cuda.md), whatever its name says: what is counted holds; "
            "seconds, rates and bytes on this page mean nothing."
        )
    if session.small:
        parts.append("Tiny models, to see that every step runs: seconds and rates on this page mean nothing.")
    rows = [(o.name, f"{o.seconds:.0f}", _ended(o)) for o in session.outcomes.values()]
    parts += ["## Steps", table(("step", "seconds", "outcome"), rows)]
    for outcome in session.outcomes.values():
        if outcome.data and "left out" not in outcome.data:
            shown = SHOWN.get(outcome.name.split()[0], _plain)(outcome.data)
            parts += [f"## {outcome.name.capitalize()}", shown] if shown else []
    return "\n\n".join(parts) + "\n"


def _ended(outcome: Outcome) -> str:
    if outcome.failed:
        return outcome.failed.replace("|", "\\|")
    data = outcome.data
    if isinstance(data, Mapping) and "tests" in data:
        return f"{data['tests'] - data['skipped']} passed, {data['skipped']} skipped"
    return str(data["left out"]) if isinstance(data, Mapping) and "left out" in data else "done"


def table(head: Sequence[str], rows: Rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _plain(data: Any) -> str:
    """Return a table of names and values, of whatever there is."""
    if not isinstance(data, Mapping):
        return f"```\n{str(data).strip()}\n```"
    inner = list(data.values())
    if inner and all(isinstance(value, Mapping) for value in inner):
        columns = list(dict.fromkeys(key for value in inner for key in value))
        rows = [(name, *(_value(value.get(key, ""), key) for key in columns)) for name, value in data.items()]
        return table(("", *columns), rows)
    return table(("figure", "value"), [(key, _value(value, key)) for key, value in data.items()])


def _value(value: Any, key: str = "") -> str:
    if isinstance(value, float):
        return f"{value / 1e9:.3g} GB/s" if "bytes a second" in key else f"{value:.4g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_value, value))
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_value(inner, name)}" for name, inner in value.items())
    return str(value).replace("|", "\\|").replace("\n", " ")


def _environment(data: Mapping[str, str]) -> str:
    return "\n\n".join(f"```\n{text}\n```" for text in data.values() if text)


def _contract(data: Mapping[str, Any]) -> str:
    without = [f"Left out: {data['without']}."] if "without" in data else []
    return "\n".join([*(f"- {name}" for name in data["failed"]), *without])


def _speed(data: Mapping[str, Any]) -> str:
    rows = [
        (
            f"{row['way']}{', compiled' if row['compiled'] else ''}",
            row["failed"] or f"{row['tokens']:,.0f}",
            f"{row['mfu']:.1%}" if row["mfu"] else "",
            f"{row['seconds']:.4f}",
            f"{row['allocated'] / 2**30:.2f}",
            f"{row['reserved'] / 2**30:.2f}",
            f"{row['loss']:.4f}",
        )
        for row in data["rows"]
    ]
    return table(("way", "tokens/s", "MFU", "step, s", "allocated, GiB", "reserved, GiB", "loss"), rows)


def _cost(data: Mapping[str, Any]) -> str:
    keys = ("waits", "launches", "busy", "communication", "exposed")
    rows = [
        (label, way, *(_value(counts[key]) for key in keys))
        for label, ways in data.items()
        for way, counts in ways.items()
    ]
    return table(("step", "way", *keys[:2], *(f"{key}, s" for key in keys[2:])), rows)


def _rehearsal(data: Mapping[str, Any]) -> str:
    rows = []
    for job, figures in data.items():
        for key in ("allocated", "reserved", "seconds"):
            forecast, measured = figures[key]["forecast"], figures[key]["measured"]
            if measured:
                scale, unit = (1.0, "s") if key == "seconds" else (2**30, "GiB")
                error = f"{forecast / measured - 1:+.1%}"
                rows.append((job, key, f"{forecast / scale:.3f} {unit}", f"{measured / scale:.3f} {unit}", error))
    return table(("job", "figure", "forecast", "measured", "error"), rows) if rows else ""


SHOWN: Mapping[str, Callable[[Any], str]] = {
    "environment": _environment,
    "contract": _contract,
    "speed": _speed,
    "cost": _cost,
    "rehearsal": _rehearsal,
}
"""First word of a step's name → how its figures are shown, where names and values alone would not do."""
