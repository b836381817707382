"""The run's `config.json`: its settings as they were resolved, what was overridden, and what memory made of them.

- Settings that decide what a step means may not change on resume, except with `--override`, which is recorded. Changes
  of the others (steps, learning rate, sharding, ranks, …) are printed.
- With `train.on_oom = "tighten"` the settings that memory required (`trueshard.train.run.out_of_memory`) are kept
  under `tightened`, for later starts with as many ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
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
    return record if isinstance(record, dict) else {}


def write_settings(config: Config, architecture: Mapping[str, Any], step: int = 0) -> None:
    """Replace `config.json` with the settings of a run that resumes after ``step``. For one rank."""
    known = read_settings(config.run.folder)
    record: dict[str, Any] = {
        "config": config.model_dump(mode="json", by_alias=True),
        "given": config.model_dump(mode="json", by_alias=True, exclude_unset=True),
        "identity": config.identity(),
        "architecture": dict(architecture),
    }
    overridden = list(known.get("overridden", []))
    if step and known:
        changes = _identity_changes(config, architecture, known)
        overridden += [{"after_step": step, **asdict(change)} for change in changes]
    more = {"overridden": overridden, "tightened": known.get("tightened")}
    _write(config.run.folder, record | {key: value for key, value in more.items() if value})


def check_resumable(config: Config, architecture: Mapping[str, Any], override: bool = False) -> list[SettingChange]:
    """Return the allowed changes since the run's checkpoints, without those of `QUIET`; with `override`, all changes.

    Raises `UserError` of one line that lists those that are not allowed.
    """
    known = read_settings(config.run.folder)
    if "identity" not in known:
        return []
    try:
        refused = list(_identity_changes(config, architecture, known))
        every = _differences("", known["config"], config.model_dump(mode="json", by_alias=True))
        passed_over = (*QUIET, *config.identity())
        free = [each for each in every if not any(f"{each.key}.".startswith(f"{key}.") for key in passed_over)]
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(config.run.folder, f"{type(error).__name__}: {error}") from None
    checkpoints = config.run.folder / "checkpoints"
    fatal = [change for change in refused if change.key.startswith(FATAL)]
    if fatal and override:
        raise UserError(
            f"{'; '.join(map(str, fatal))}; no checkpoint in {checkpoints} fits that, also with --override: set it "
            'back, or begin another run from one, with model.path = "…/checkpoints/latest"'
        )
    if refused and not override:
        raise UserError(
            f"{'; '.join(map(str, refused))}; the checkpoints in {checkpoints} were made with what was: set it back, "
            "choose another run.dir, or go on all the same with --override"
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
    kept = record.get("tightened", {"ranks": ranks, "words": {}})
    earlier = kept["words"] if kept["ranks"] == ranks else {}
    _write(folder, record | {"tightened": {"ranks": ranks, "words": {**earlier, **settings}}})


def _identity_changes(
    config: Config, architecture: Mapping[str, Any], known: Mapping[str, Any]
) -> Iterator[SettingChange]:
    """Yield changes of settings that decide what a step means; of tables, the fields that differ."""
    changes = list(_differences("", known["identity"], config.identity()))
    yield from changes
    if not any(change.key.startswith("model.") for change in changes):  # else the architecture differs because of it
        for key, now in architecture.items():
            if now != (was := known["architecture"].get(key)):
                yield SettingChange(f"model.config: {key}", was, now)


def _differences(key: str, was: Any, now: Any) -> Iterator[SettingChange]:
    if isinstance(was, dict) and isinstance(now, dict):
        for name in now | was:
            yield from _differences(f"{key}.{name}" if key else name, was.get(name), now.get(name))
    elif was != now:
        yield SettingChange(key, was, now)


def _write(folder: Path, record: Mapping[str, Any]) -> None:
    replace_text(folder / "config.json", json.dumps(record, indent=1))


def _damaged(folder: Path, why: object) -> UserError:
    return UserError(
        f"{folder / 'config.json'}: cannot be read ({why}); choose another run.dir, or delete that file if the "
        "configuration is still the one its checkpoints were made with"
    )


def _value(value: Any) -> str:
    return "unset" if value is None else json.dumps(value)
