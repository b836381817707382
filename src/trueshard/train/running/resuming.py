"""Whether a configuration goes on from the checkpoints of a run, and what the run's `config.json` remembers.

- `config.json` keeps the settings of the run as they were resolved. Those that decide what its steps mean may not
  change on resume; the others (steps, learning rate, sharding, ranks, …) may, and what changed is said.
- `--override` lets all of it change. Which settings, from what to what and after which step stays in `config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueshard.errors import UserError
from trueshard.replacing import replace_text
from trueshard.train.config import Config
from trueshard.train.recipe import checkpoints_of, folder_of

QUIET = ("run.dir", "run.restarts", "run.timeout", "train.keep", "train.log_every", "data.prefetch")
"""Settings whose change nobody needs to be told."""


@dataclass(frozen=True)
class Change:
    """A setting that is not what it was when the run was last started."""

    key: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} = {_value(self.was)}, now {_value(self.now)}"


def write_settings(config: Config, architecture: Mapping[str, Any], step: int = 0) -> None:
    """Record the settings of the run in `config.json`, replacing it at once. For one rank.

    Args:
        config: as it is used.
        architecture: the model's, as `plain_settings` gives it.
        step: after which the run goes on.
    """
    known = read_settings(config)
    record: dict[str, Any] = {
        "config": config.model_dump(mode="json", by_alias=True),
        "identity": _json(config.identity()),
        "architecture": dict(architecture),
    }
    overridden = list(known.get("overridden", []))
    if step and known:
        overridden += [
            {"after_step": step, "key": change.key, "was": change.was, "now": change.now}
            for change in _identity_changes(config, architecture, known)
        ]
    if overridden:
        record["overridden"] = overridden
    if "tightened" in known:
        record["tightened"] = known["tightened"]
    _write(config, record)


def remember(config: Config, key: str, value: Any) -> None:
    """Put one entry into `config.json`, which need not be there yet. For one rank."""
    _write(config, read_settings(config) | {key: value})


def read_settings(config: Config) -> dict[str, Any]:
    """What `config.json` holds; empty if there is none. Raises `UserError` if it is damaged."""
    file = folder_of(config) / "config.json"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _damaged(file, error) from None
    if not isinstance(record, dict):
        raise _damaged(file, "it is no table")
    return record


FATAL = (
    *("model.architecture", "model.fields", "model.config", "model.quantize", "model.dtype"),
    *("adapter.", "tokenizer.", "optimizer.class"),
)
"""With another of these no checkpoint loads."""


def check_resumable(config: Config, architecture: Mapping[str, Any], override: bool = False) -> list[Change]:
    """Hold `config` against the settings that the run's checkpoints were made with.

    Returns:
        What has changed and may, all that has with `override`; nothing of `QUIET`.

    Raises:
        UserError: without `override`, one line of all that contradicts the checkpoints.
    """
    known = read_settings(config)
    if "identity" not in known:
        return []
    try:
        refused = list(_identity_changes(config, architecture, known))
        free = list(_free_changes(config, known))
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder_of(config) / "config.json", f"{type(error).__name__}: {error}") from None
    fatal = [change for change in refused if change.key.startswith(FATAL)]
    if fatal and override:
        raise UserError(
            f"{_told(fatal)}; no checkpoint in {checkpoints_of(config).directory} fits that, also with --override: set "
            'it back, or begin another run from one, with model.path = "…/checkpoints/latest"'
        )
    if refused and not override:
        raise UserError(
            f"{_told(refused)}; the checkpoints in {checkpoints_of(config).directory} were made with what was: set it "
            "back, choose another run.dir, or go on all the same with --override"
        )
    return refused + free


def _identity_changes(config: Config, architecture: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Change]:
    """What differs of all that decides what the steps mean; of tables, the fields that differ."""
    was, now = known["identity"], _json(config.identity())
    named = False
    for key in [*now, *(key for key in was if key not in now)]:
        for change in _differences(key, was.get(key), now.get(key)):
            named = named or key.startswith("model.")
            yield change
    if not named:  # else they follow from it
        for key in architecture:
            if architecture[key] != known["architecture"].get(key):
                yield Change(f"model.config: {key}", known["architecture"].get(key), architecture[key])


def _free_changes(config: Config, known: Mapping[str, Any]) -> Iterator[Change]:
    identity = config.identity()
    was, now = known["config"], config.model_dump(mode="json", by_alias=True)
    for section in now:
        for change in _differences(section, was.get(section), now[section]):
            decides = any(change.key == key or change.key.startswith(f"{key}.") for key in identity)
            if not decides and change.key not in QUIET:
                yield change


def _differences(key: str, was: Any, now: Any) -> Iterator[Change]:
    if isinstance(was, dict) and isinstance(now, dict):
        for name in [*now, *(name for name in was if name not in now)]:
            yield from _differences(f"{key}.{name}", was.get(name), now.get(name))
    elif was != now:
        yield Change(key, was, now)


def _write(config: Config, record: Mapping[str, Any]) -> None:
    replace_text(folder_of(config) / "config.json", json.dumps(record, indent=1))


def _damaged(file: Path, why: object) -> UserError:
    return UserError(
        f"{file}: cannot be read ({why}); choose another run.dir, or delete that file if the configuration is still "
        "the one its checkpoints were made with"
    )


def _told(changes: Iterable[Change]) -> str:
    return "; ".join(f"{change.key}: is {_value(change.now)}, was {_value(change.was)}" for change in changes)


def _json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _value(value: Any) -> str:
    return "unset" if value is None else json.dumps(value)
