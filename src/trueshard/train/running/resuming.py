"""Which checkpoints a run has, and whether a configuration goes on from them.

- `checkpoints/step-00000100` carries that name only once it is complete: `trueshard.Checkpoints` sees to it.
- `config.json` keeps the settings of the run as they were resolved. Those that decide what its steps mean may not
  change on resume; the others (steps, learning rate, sharding, ranks, …) may.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trueshard import Checkpoints
from trueshard.errors import UserError
from trueshard.train.config import Config


def folder(config: Config) -> Path:
    """The run's folder."""
    return Path(config.run.dir).expanduser()


def of(config: Config) -> Checkpoints:
    """The run's checkpoints, of which the newest `train.keep` stay."""
    return Checkpoints(folder(config) / "checkpoints", keep_last=config.train.keep)


def write_settings(config: Config, architecture: dict[str, Any]) -> None:
    """Record the settings of the run in `config.json`, replacing it at once."""
    record = {
        "config": config.model_dump(mode="json", by_alias=True),
        "identity": config.identity(),
        "architecture": architecture,
    }
    file = folder(config) / "config.json"
    scratch = file.with_suffix(".json.new")
    scratch.write_text(json.dumps(record, indent=1), encoding="utf-8")
    scratch.replace(file)


def check_resumable(config: Config, architecture: dict[str, Any]) -> None:
    """Raise `UserError` if a setting contradicts the checkpoints that the run already has."""
    try:
        record = json.loads((folder(config) / "config.json").read_text(encoding="utf-8"))
        identity, known = record["identity"], record["architecture"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder(config) / 'config.json'}: cannot be read ({error}); choose another run.dir, or delete that file "
            "if the configuration is still the one its checkpoints were made with"
        ) from None
    new = json.loads(json.dumps(config.identity()))
    for key in [key for key in new if new[key] != identity.get(key)]:
        if key == "model.fields":
            _refuse_fields(config, new[key], identity.get(key) or {})
        _refuse(config, key, new[key], identity.get(key))
    for key in [key for key in architecture if architecture[key] != known.get(key)]:
        _refuse(config, f"model.config: {key}", architecture[key], known.get(key))


def _refuse_fields(config: Config, new: dict[str, Any], old: dict[str, Any]) -> None:
    for key in [*new, *old]:
        if new.get(key) != old.get(key):
            _refuse(config, f"model.fields.{key}", new.get(key), old.get(key))


def _refuse(config: Config, key: str, new: Any, old: Any) -> None:
    raise UserError(
        f"{key}: is {json.dumps(new)}, but the checkpoints in {folder(config)} were made with {json.dumps(old)}; "
        "set it back, or choose another run.dir"
    )
