"""Hashes of a run's state, and the comparison of its replicas: callbacks of the Trainer."""

from __future__ import annotations

from typing import Any

from trueshard.checkpoint.hashing import ReplicasDiffer, check_replicas, state_hash
from trueshard.errors import UserError
from trueshard.train.trainer import Callback, Trainer


class StateHashes(Callback):
    """Adds ``state_hash`` to the record of every ``every``-th step, the same at any number of ranks."""

    def __init__(self, every: int) -> None:
        self._every = every

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        if trainer.step % self._every == 0:
            record["state_hash"] = state_hash(trainer.model, trainer.optimizer).total


class ReplicaWatch(Callback):
    """Compares replicas after every ``every``-th step, before it is saved; ends the run if one differs."""

    def __init__(self, every: int) -> None:
        self._every = every

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        if trainer.step % self._every:
            return
        try:
            check_replicas(trainer.model, trainer.optimizer)
        except ReplicasDiffer as error:
            raise UserError(
                f"step {trainer.step}: {error}: its memory or processor is faulty. The checkpoints of up to step "
                f"{trainer.step - self._every} were made when replicas were equal: take the machine out, delete later "
                "ones, and start again"
            ) from error
