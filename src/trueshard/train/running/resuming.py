"""The run's `config.json`: its settings as they were resolved, what was overridden, and what memory made of them.

- Settings that decide what a step means may not change on resume; the others (steps, learning rate, sharding, ranks, …)
  may, and what changed is said. `--override` lets all of them change, and each such change stays in `config.json`.
- With `train.on_oom = "tighten"` the settings that memory required (`trueshard.train.running.out_of_memory`) are kept
  under `tightened`. They hold for later starts with as many ranks; the global batch, and so what a step means, stays.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueshard.errors import UserError
from trueshard.files import replace_text
from trueshard.train.config import Config

QUIET = ("run.dir", "run.restarts", "run.timeout", "train.keep", "train.log_every", "data.prefetch")
"""Settings whose change is not reported."""
FATAL = (
    *("model.architecture", "model.fields", "model.config", "model.quantize", "model.dtype"),
    *("adapter.", "tokenizer.", "optimizer.class"),
)
"""Settings whose change makes every checkpoint unloadable, also with `--override`."""


@dataclass(frozen=True)
class SettingChange:
    """A setting that differs from the run's last start."""

    key: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} = {_value(self.was)}, now {_value(self.now)}"


def read_settings(folder: Path) -> dict[str, Any]:
    """Return `config.json` of the run's folder; empty if there is none. Raise `UserError` if it is damaged."""
    file = folder / "config.json"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _damaged(folder, error) from None
    if not isinstance(record, dict):
        raise _damaged(folder, "it is no table")
    return record


def write_settings(config: Config, architecture: Mapping[str, Any], step: int = 0) -> None:
    """Replace `config.json` with the settings of the run. For one rank.

    Args:
        config: as it is used.
        architecture: the model's, from `plain_settings`.
        step: last step of the checkpoint that the run resumes from, or 0.
    """
    known = read_settings(config.run.folder)
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
    _write(config.run.folder, record)


def check_resumable(config: Config, architecture: Mapping[str, Any], override: bool = False) -> list[SettingChange]:
    """Compare `config` with the settings that the run's checkpoints were made with.

    Returns:
        The changes that are allowed, without those of `QUIET`; with `override` all changes.

    Raises:
        UserError: a change is not allowed; one line that lists all of them.
    """
    known = read_settings(config.run.folder)
    if "identity" not in known:
        return []
    try:
        refused = list(_identity_changes(config, architecture, known))
        free = list(_free_changes(config, known))
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(config.run.folder, f"{type(error).__name__}: {error}") from None
    checkpoints = config.run.folder / "checkpoints"
    fatal = [change for change in refused if change.key.startswith(FATAL)]
    if fatal and override:
        raise UserError(
            f"{_listed(fatal)}; no checkpoint in {checkpoints} fits that, also with --override: set "
            'it back, or begin another run from one, with model.path = "…/checkpoints/latest"'
        )
    if refused and not override:
        raise UserError(
            f"{_listed(refused)}; the checkpoints in {checkpoints} were made with what was: set it "
            "back, choose another run.dir, or go on all the same with --override"
        )
    return refused + free


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return `config` with other values for some dotted keys, validated again."""
    tree = config.model_dump(by_alias=True, exclude_unset=True)
    for key, value in settings.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    return Config.model_validate(tree)


def tightened(config: Config, ranks: int) -> Config:
    """Return `config` with the settings that memory required in earlier starts with as many ranks."""
    found = read_settings(config.run.folder).get("tightened")
    if config.train.on_oom != "tighten" or not found or found["ranks"] != ranks:
        return config
    return with_settings(config, found["words"])


def keep_tightened(folder: Path, settings: Mapping[str, Any], ranks: int) -> None:
    """Add settings by dotted key to those that memory required with as many ranks. For one rank."""
    record = read_settings(folder)
    kept = record.get("tightened") or {}
    earlier = kept.get("words", {}) if kept.get("ranks") == ranks else {}
    _write(folder, record | {"tightened": {"ranks": ranks, "words": {**earlier, **settings}}})


def _identity_changes(
    config: Config, architecture: Mapping[str, Any], known: Mapping[str, Any]
) -> Iterator[SettingChange]:
    """Yield changes of settings that decide what a step means; of tables, the fields that differ."""
    was, now = known["identity"], _json(config.identity())
    is_model_named = False
    for key in _keys(now, was):
        for change in _differences(key, was.get(key), now.get(key)):
            is_model_named = is_model_named or key.startswith("model.")
            yield change
    if not is_model_named:  # else differences of the architecture follow from it
        for key in architecture:
            if architecture[key] != known["architecture"].get(key):
                yield SettingChange(f"model.config: {key}", known["architecture"].get(key), architecture[key])


def _free_changes(config: Config, known: Mapping[str, Any]) -> Iterator[SettingChange]:
    identity = config.identity()
    was, now = known["config"], config.model_dump(mode="json", by_alias=True)
    for section in now:
        for change in _differences(section, was.get(section), now[section]):
            decides = any(change.key == key or change.key.startswith(f"{key}.") for key in identity)
            if not decides and change.key not in QUIET:
                yield change


def _differences(key: str, was: Any, now: Any) -> Iterator[SettingChange]:
    if isinstance(was, dict) and isinstance(now, dict):
        for name in _keys(now, was):
            yield from _differences(f"{key}.{name}", was.get(name), now.get(name))
    elif was != now:
        yield SettingChange(key, was, now)


def _keys(now: Mapping[str, Any], was: Mapping[str, Any]) -> list[str]:
    return [*now, *(key for key in was if key not in now)]


def _write(folder: Path, record: Mapping[str, Any]) -> None:
    replace_text(folder / "config.json", json.dumps(record, indent=1))


def _damaged(folder: Path, why: object) -> UserError:
    return UserError(
        f"{folder / 'config.json'}: cannot be read ({why}); choose another run.dir, or delete that file if the "
        "configuration is still the one its checkpoints were made with"
    )


def _listed(changes: Iterable[SettingChange]) -> str:
    return "; ".join(f"{change.key}: is {_value(change.now)}, was {_value(change.was)}" for change in changes)


def _json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _value(value: Any) -> str:
    return "unset" if value is None else json.dumps(value)
