"""`--dry-run`: the configuration as it is understood, and what it is expected to take; nothing is written.

The text is TOML from its first line to its last, and as the configuration of a run it means the same: settings that
were left out stand there with their defaults, as comments where they would not go with others; so does the forecast.
"""

from __future__ import annotations

from typing import Any

import torch

from trueshard.errors import refused
from trueshard.planner.showing import report
from trueshard.planner.speed.hardware import hardware as named_hardware
from trueshard.train.config import Config
from trueshard.train.convert.sheet import toml_key, toml_value
from trueshard.train.running import planned, tighten
from trueshard.train.running.preflight import check_nproc, check_settings, default_nproc


def dry_run(config: Config, nproc: int | None = None, *, hardware: str | None = None) -> str:
    """The resolved configuration as TOML, and the planner's study of it as comments.

    Args:
        nproc: processes of the run; None: one a device of this machine.
        hardware: a device of the planner's catalogue, or a TOML file of that form, in the place of this machine's; then
            `nproc` may be any number.

    Raises:
        UserError: the settings do not go together.
    """
    ranks = default_nproc(1) if nproc is None else nproc
    if hardware is None:
        check_nproc(ranks)
        kind = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        device, node = planned.hardware_here(kind, ranks), ranks
    else:
        with refused():
            device = named_hardware(hardware)
        node = min(ranks, device.ranks_per_node)
    config = tighten.applied(config, ranks)
    settings = check_settings(config, ranks)
    try:
        told = report.text(planned.study(config, settings, ranks, device, node))
    except planned.Unplanned as error:
        told = f"No forecast of memory and speed: {error}"
    comments = "\n".join(f"# {line}".rstrip() for line in told.splitlines())
    return f"{toml(config)}\n{comments}"


def toml(config: Config) -> str:
    """A configuration with all its settings; of those that were not given, what may not be given is a comment."""
    given = config.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    lines: list[str] = []
    for name, section in config:
        if section is None:
            continue
        whole = section.model_dump(mode="json", by_alias=True, exclude_none=True)
        kept = given.get(name, {})
        lines += ["", f"[{name}]" if name in given or _goes({**given, name: whole}) else f"# [{name}]"]
        tables: list[str] = []
        for key, value in whole.items():
            trial = {**given, name: {**kept, key: value}}
            mark = "" if key in kept or (key not in SILENT and _goes(trial)) else "# "
            if _is_tables(value):
                tables += [line for row in value for line in _rows(f"{name}.{key}", row)]
            else:
                lines.append(f"{mark}{toml_key(key)} = {toml_value(value)}")
        lines += tables
    return "\n".join(lines).lstrip("\n") + "\n"


SILENT = ("include",)
"""Keys that mean more when they are given, even with the default."""


def _goes(trial: dict[str, Any]) -> bool:
    """Whether a configuration may say this too."""
    try:
        Config.model_validate(trial)
    except ValueError:
        return False
    return True


def _rows(name: str, row: dict[str, Any]) -> list[str]:
    return ["", f"[[{name}]]", *(f"{toml_key(key)} = {toml_value(value)}" for key, value in row.items())]


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)
