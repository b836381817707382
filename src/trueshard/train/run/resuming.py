"""The run's `config.json`: its settings as they were resolved, what was overridden, and what memory made of them.

- Settings that decide what a step means may not change on resume, except with `--override`, which is recorded. Changes
  of the others (steps, learning rate, sharding, ranks, …) are printed.
- With `train.on_oom = "tighten"` the settings that memory required (`trueshard.train.run.out_of_memory`) are kept
  under `tightened`, for later starts with as many ranks.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import trueshard
from trueshard.checkpoint.catalogue import names_newest
from trueshard.errors import UserError, with_kind
from trueshard.files import replace_text
from trueshard.text import load_json
from trueshard.train.config import Config
from trueshard.train.data.formats import find_format
from trueshard.train.models.config import is_hub_name
from trueshard.train.parse import described

QUIET = (
    *("run.dir", "run.restarts", "run.spares", "run.timeout", "train.keep", "train.log_every", "data.prefetch"),
    *("train.memory_every", "train.memory_copies"),
)
"""Settings whose change is not reported."""
FATAL = (
    *("model.architecture", "model.fields", "model.config", "model.quantize", "model.dtype"),
    *("adapter.", "tokenizer.", "optimizer.class"),
)
"""Settings whose change makes every checkpoint unloadable, also with `--override`."""


FORM = {**dict.fromkeys(("config", "given", "identity", "architecture", "code", "tightened"), dict), "overridden": list}
"""Key of `config.json` → the kind of its value."""


@dataclass(frozen=True)
class SettingChange:
    """A setting that differs from the run's last start."""

    key: str
    was: Any
    now: Any

    def __str__(self) -> str:
        was, now = ("unset" if value is None else json.dumps(value) for value in (self.was, self.now))
        return f"{self.key} = {was}, now {now}"


def read_settings(folder: Path) -> dict[str, Any]:
    """Return `config.json` of the run's folder; empty if there is none. Raise `UserError` if it is damaged."""
    try:
        record = load_json((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _damaged(folder, error) from None
    if not isinstance(record, dict):
        raise _damaged(folder, "it is no JSON object")
    if wrong := next((name for name, kind in FORM.items() if not isinstance(record.get(name, kind()), kind)), None):
        raise _damaged(folder, f"{wrong} is a {type(record[wrong]).__name__}")
    return record


def write_settings(config: Config, architecture: Mapping[str, Any], step: int = 0) -> None:
    """Replace `config.json` with the settings of a run that resumes after ``step``. For one rank."""
    before = read_settings(config.run.folder)
    record: dict[str, Any] = {
        "config": config.model_dump(mode="json", by_alias=True),
        "given": config.model_dump(mode="json", by_alias=True, exclude_unset=True),
        "identity": config.identity(),
        "architecture": dict(architecture),
        "code": code_of(config),
    }
    overridden = list(before.get("overridden", []))
    if step and before:
        changes = _identity_changes(config, architecture, before)
        overridden += [{"after_step": step, **asdict(change)} for change in changes]
    kept = {"overridden": overridden, "tightened": before.get("tightened")}
    _write(config.run.folder, record | {key: value for key, value in kept.items() if value})


def code_of(config: Config) -> dict[str, str]:
    """Return "content of file.py" → its checksum, for each file whose code the configuration names."""
    words = re.findall(r'"([^"]+\.py):\w+"', json.dumps(config.model_dump(mode="json")))
    files = {words: Path(words).expanduser() for words in words}
    return {f"content of {words}": f"{zlib.crc32(file.read_bytes()):08x}" for words, file in files.items()}


def check_resumable(config: Config, architecture: Mapping[str, Any], override: bool = False) -> list[SettingChange]:
    """Return the allowed changes since the run's checkpoints, without those of `QUIET`; with `override`, all changes.

    Raises `UserError` of one line that lists those that are not allowed.
    """
    record = read_settings(config.run.folder)
    if "identity" not in record:
        return []
    try:
        refused = list(_identity_changes(config, architecture, record))
        changes = list(_differences("", record["config"], config.model_dump(mode="json", by_alias=True)))
        code = record.get("code", {})
        changes += _differences("", code, {file: code_of(config).get(file, text) for file, text in code.items()})
        passed_over = (*QUIET, *config.identity())
        allowed = [
            change for change in changes if not any(f"{change.key}.".startswith(f"{key}.") for key in passed_over)
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(config.run.folder, f"{type(error).__name__}: {error}") from None
    checkpoints = config.run.folder / "checkpoints"
    fatal = [change for change in refused if change.key.startswith(FATAL)]
    if fatal:
        also = ", also with --override" if override else ""
        raise UserError(
            f"{'; '.join(map(str, fatal if override else refused))}; no checkpoint in {checkpoints} fits "
            f"{fatal[0].key}{also}: set it back, or choose another run.dir"
        )
    if refused and not override:
        raise UserError(
            f"{'; '.join(map(str, refused))}; the checkpoints in {checkpoints} were made with what was: set it back, "
            "choose another run.dir, or go on all the same with --override"
        )
    return refused + allowed


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return `config` with other values for some dotted keys, validated again; `UserError` if they do not go together.

    What goes with one format of data only is refused here, where the format was left out.
    """
    tree = config.model_dump(by_alias=True, exclude_unset=True)
    for key, value in settings.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(described(error)) from None


def resolved(config: Config, ranks: int) -> Config:
    """Return `config` as a start with so many ranks has it: located and tightened. Resolving again changes nothing."""
    return located(tightened(config, ranks))


def located(config: Config) -> Config:
    """Return `config` with `model.path = "…/latest"`, or "…/best", resolved to the checkpoint that the run began with.

    Likewise the `model.revision` of a name on the hub: to the commit; and a `data.format` that was left out.
    """
    identity = read_settings(config.run.folder).get("identity", {})
    if "format" not in config.data.model_fields_set and config.rl is None:
        has_checkpoint = trueshard.latest(config.run.folder / "checkpoints") is not None
        kept = identity.get("data.format") if has_checkpoint else None  # the files may be gone by now
        config = with_settings(config, {"data.format": kept or find_format(config.data)})
    if config.model.path is None:
        return config
    path, before = Path(config.model.path), identity.get("model.path")
    if is_hub_name(config.model.path):
        is_same = before == config.model.path and config.model.revision is None
        commit = (identity.get("model.revision") if is_same else None) or config.model.place().name
        return with_settings(config, {"model.revision": commit})
    if not (is_best := path.name == "best" and path.expanduser().is_symlink()) and not names_newest(path.expanduser()):
        return config
    if isinstance(before, str) and Path(before).parent == path.parent:
        return with_settings(config, {"model.path": before})
    newest = path.expanduser().resolve() if is_best else trueshard.latest(path.expanduser().parent)
    return config if newest is None else with_settings(config, {"model.path": str(path.parent / newest.name)})


def tightened(config: Config, ranks: int) -> Config:
    """Return `config` with the settings that memory required in earlier starts with as many ranks."""
    record = read_settings(config.run.folder).get("tightened")
    if config.train.on_oom != "tighten" or not record or record.get("ranks") != ranks:
        return config
    try:
        return with_settings(config, record["words"])
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise _damaged(config.run.folder, f"tightened: {with_kind(error)}") from None


def keep_tightened(folder: Path, settings: Mapping[str, Any], ranks: int) -> None:
    """Add settings by dotted key to those that memory required with as many ranks. For one rank."""
    record = read_settings(folder)
    kept = record.get("tightened", {})
    earlier = kept["words"] if kept.get("ranks") == ranks else {}
    _write(folder, record | {"tightened": {"ranks": ranks, "words": {**earlier, **settings}}})


def _identity_changes(
    config: Config, architecture: Mapping[str, Any], record: Mapping[str, Any]
) -> Iterator[SettingChange]:
    """Yield changes of settings that decide what a step means; of tables, the fields that differ."""
    changes = list(_differences("", record["identity"], config.identity()))
    yield from changes
    if not any(change.key.startswith("model.") for change in changes):  # else the architecture differs because of it
        for key, now in architecture.items():
            if now != (was := record["architecture"].get(key)):
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
