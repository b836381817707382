"""Events of the training loop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueshard.train.trainer import Trainer


class Callback:
    """Base class: override the events of interest. Every rank calls every event, in the order of the callbacks.

    An event may add to its ``record``, which goes into the metrics of that step. ``trainer.stop(why)`` ends the run
    after the step. A collective must be called on all ranks; ``trainer.rank`` tells them apart.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Run before the first step, after a resume."""

    def on_batch(self, trainer: Trainer, microbatches: list[Any]) -> None:
        """Run before the first forward of each step; ``microbatches``: this rank's, as the loader gives them."""

    def on_step(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Run after each optimizer step; ``record``: step, loss (nats), grad_norm, lr, tokens, seconds and more."""

    def on_evaluation(self, trainer: Trainer, record: dict[str, float]) -> None:
        """Run after an evaluation; ``record``: loss (nats), perplexity, count."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Run after a checkpoint was begun; it may still be written in the background."""

    def on_end(self, trainer: Trainer) -> None:
        """Run after the last step, or before the one that was not taken; also after an error in a step."""

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values and tensors that a resumed run needs; saved by class, several of a class in order."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
