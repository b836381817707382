"""What memory has made of a configuration, where `train.on_oom = "tighten"`.

- The change is the planner's (`trueshard.train.running.fitting`). The global batch, and so what a step means, stays.
- It is kept in the run's `config.json` and holds for every later start with as many ranks, until `on_oom` says
  otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trueshard.train.config import Config
from trueshard.train.running import resuming

Words = Mapping[str, Any]
"""Settings by dotted key."""


def applied(config: Config, ranks: int) -> Config:
    """`config` with what memory has made of it in earlier starts of this run."""
    found = resuming.read_settings(config).get("tightened")
    if config.train.on_oom != "tighten" or not found or found["ranks"] != ranks:
        return config
    return changed(config, found["words"])


def changed(config: Config, words: Words) -> Config:
    """`config` with other values for some keys, checked again."""
    tree = config.model_dump(by_alias=True, exclude_unset=True)
    for key, value in words.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    return Config.model_validate(tree)


def keep(config: Config, words: Words, ranks: int) -> None:
    """Put a change into `config.json`, beside earlier ones."""
    kept = resuming.read_settings(config).get("tightened") or {}
    earlier = kept.get("words", {}) if kept.get("ranks") == ranks else {}
    resuming.remember(config, "tightened", {"ranks": ranks, "words": {**earlier, **words}})
