"""What a `model.path` of "…/latest" stands for: the same checkpoint in every start of a run."""

from __future__ import annotations

from pathlib import Path

import trueshard
from trueshard.train.config import Config
from trueshard.train.running import resuming, tighten


def located(config: Config) -> Config:
    """`config` with the checkpoint that the run began with or, where it has not begun, the newest one."""
    given = Path(config.model.path or "")
    if given.name != "latest" or given.expanduser().exists():
        return config
    begun = resuming.read_settings(config).get("identity", {}).get("model.path")
    if begun is not None and Path(begun).parent == given.parent:
        return tighten.changed(config, {"model.path": begun})
    newest = trueshard.latest(given.expanduser().parent)
    return config if newest is None else tighten.changed(config, {"model.path": str(given.parent / newest.name)})
