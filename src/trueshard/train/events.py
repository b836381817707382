"""What a training run tells while it goes on: a handful of events."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueshard.train.trainer import Trainer


class Callback:
    """Override what is of interest. Every rank calls every event, in the order in which the callbacks were given.

    An event may change its ``record``: what it adds goes into the metrics of that step. ``trainer.stop(why)`` ends the
    run after the step. A collective must be called on all ranks; ``trainer.rank`` tells them apart.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step, after a resume."""

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """After each optimizer step; ``record``: step, loss (nats), grad_norm, lr, tokens, seconds and more."""

    def on_evaluation(self, trainer: Trainer, record: dict[str, float]) -> None:
        """After an evaluation; ``record``: loss (nats), perplexity, count."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """After a checkpoint was begun; it may still be written in the background."""

    def on_end(self, trainer: Trainer) -> None:
        """After the last step, or before the one that was not taken; also after an error in a step."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values and tensors that a resumed run needs; saved by class, and of a class in their order."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
