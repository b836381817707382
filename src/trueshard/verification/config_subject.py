"""A training configuration as the subject: model, optimizer, loss, data and ``[shard]`` as ``train`` has them.

The plain model gets the values that the sharded one is filled with: random ones are made block by block, by its name.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trueshard.errors import UserError
from trueshard.train.config import Config, ShardSection
from trueshard.train.losses import CausalLoss, Loss, PreferenceLoss
from trueshard.train.models.build import build, fill, with_values
from trueshard.train.models.parameters import copy_module
from trueshard.train.optimizer import build_optimizer
from trueshard.train.parse import load_config
from trueshard.train.run import session
from trueshard.train.run.checks import check, located
from trueshard.verification.subjects import Case, ShardRefused, TrainingSetup, loss_scaler, other_ranks, shorten


def small_configuration(
    path: Path, overrides: Sequence[str], folder: Path, nproc: int, said: Sequence[str]
) -> tuple[Config, list[str]]:
    """Return a configuration whose run lives in ``folder``, with small batches, and notes of the changes."""
    if said:
        raise ValueError(f"{path} says how it is trained and sharded: leave out {', '.join(said)}, or override a key")
    config = located(load_config(path, list(overrides)))
    if config.rl is not None:
        raise UserError(f"{path}: verify compares losses of given data, and [rl] makes its own; name one without [rl]")
    train, parts = config.train, max(other_ranks(config.shard.readers(nproc)))
    accumulate = min(train.accumulation(parts), 2)
    samples = min(2, max(1, train.batch_size // (parts * train.accumulation(parts))))
    update = {"batch_size": parts * accumulate * samples}
    update |= {"accumulate": accumulate} if train.microbatch is None else {"microbatch": samples}
    small = train.model_copy(update=update)
    changes = {"train": small, "run": config.run.model_copy(update={"dir": str(folder / "run")})}
    notes = [
        f"A step takes {parts * accumulate * samples} sequences (the configuration: {train.batch_size}), "
        "at the learning rate without its schedule."
    ]
    return config.model_copy(update=changes), notes


class ConfigSubject:
    """The training that a configuration describes; raises UserError where its settings or data are wrong."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._config: Config = case.source
        ready = check(self._config, case.parts, make=not (self._config.run.folder / "data").exists())
        self._settings, self._data = ready.architecture, ready.data
        if case.layers is not None:
            shorten(self._settings, case.layers)
        self.name = str(getattr(self._settings, "model_type", "model"))
        limit = self._config.train.max_grad_norm
        self.max_norm = math.inf if limit is None else limit
        self.notes: list[str] = []

    def plain(self) -> TrainingSetup:
        config, settings = self._config, self._settings
        filled = build(config, settings)
        session.shard(ShardSection(), filled)
        fill(config, filled)
        model = with_values(config, settings)
        copy_module(model, filled)
        del filled
        if torch.cuda.is_available():
            model.cuda()
        optimizer = build_optimizer(config.optimizer, model.named_parameters())
        loss: Loss = CausalLoss(config.train.whole_logits)
        if config.data.format == "preference":
            reference = copy.deepcopy(model).requires_grad_(False) if config.adapter is None else None
            preference = config.preference
            loss = PreferenceLoss(reference, preference.beta, preference.label_smoothing, config.train.whole_logits)
        return TrainingSetup(model.train(), [optimizer], loss, loss_scaler(self.case))

    def sharded(self) -> TrainingSetup:
        config, settings = self._config, self._settings
        model = build(config, settings)
        optimizer = build_optimizer(config.optimizer, model.named_parameters())
        section = ShardSection(**vars(self.case.choices), replicate=self.case.replicate)
        try:
            plan = session.shard(section, model, optimizer)
        except UserError as error:
            raise ShardRefused(str(error)) from error
        fill(config, model)
        loss = session.choose_loss(config, settings, model)
        return TrainingSetup(model.train(), [optimizer], loss, loss_scaler(self.case), plan)

    def microbatches(self, step: int, part: int) -> list[Any]:
        train = self._config.train
        loader = session.loader_of(self._config, self._data, rank=part, ranks=self.case.parts, prefetch=0)
        loader.load_state_dict({"samples": (step - 1) * train.batch_size})
        return [next(loader) for _ in range(train.accumulation(self.case.parts))]
