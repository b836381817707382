"""A training configuration as the subject: model, optimizer, loss, data and ``[shard]`` as ``train`` has them.

The plain model gets the values that the sharded one is filled with: random ones are made block by block, by its name.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch

from trueshard.errors import UserError
from trueshard.model.names import unwrap
from trueshard.train.config import Config, ShardSection
from trueshard.train.data.loader import Loader
from trueshard.train.losses import CausalLoss, Loss, PreferenceLoss
from trueshard.train.models.build import build, fill, with_values
from trueshard.train.optimizer import build_optimizer
from trueshard.train.running.checks import check
from trueshard.train.running.session import choose_loss
from trueshard.train.running.session import shard as shard_by
from trueshard.verification.compare import whole
from trueshard.verification.subjects import Case, ShardRefused, TrainingSetup, loss_scaler, shorten


class ConfigSubject:
    """The training that a configuration describes; raises UserError where its settings or data are wrong."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._config: Config = case.source
        ready = check(self._config, case.parts, make=not (self._config.run.folder / "data").exists())
        self._settings, self._data = ready.architecture, ready.data
        if case.layers is not None:
            shorten(self._settings, case.layers)
        self.name = str(getattr(self._settings, "model_type", "model"))
        limit = self._config.train.max_grad_norm
        self.max_norm = math.inf if limit is None else limit
        self.notes: list[str] = []
        self._loaders: dict[int, tuple[Loader, int]] = {}

    def plain(self) -> TrainingSetup:
        config, settings = self._config, self._settings
        filled = build(config, settings)
        shard_by(ShardSection(), filled)
        fill(config, filled)
        model = with_values(config, settings)
        with torch.no_grad():
            for kind in ("named_parameters", "named_buffers"):
                values = dict(getattr(unwrap(filled), kind)())
                for name, tensor in getattr(unwrap(model), kind)():
                    tensor.copy_(whole(values[name]))
        del filled
        if torch.cuda.is_available():
            model.cuda()
        optimizer = build_optimizer(config.optimizer, model.named_parameters())
        loss: Loss = CausalLoss(config.train.whole_logits)
        if config.data.format == "preference":
            reference = copy.deepcopy(model).requires_grad_(False) if config.adapter is None else None
            preference = config.preference
            loss = PreferenceLoss(reference, preference.beta, preference.label_smoothing, config.train.whole_logits)
        return TrainingSetup(model.train(), [optimizer], loss, loss_scaler(self._case))

    def sharded(self) -> TrainingSetup:
        config, settings = self._config, self._settings
        model = build(config, settings)
        optimizer = build_optimizer(config.optimizer, model.named_parameters())
        try:
            plan = shard_by(ShardSection(**vars(self._case.choices), replicate=self._case.replicate), model, optimizer)
        except UserError as error:
            raise ShardRefused(str(error)) from error
        fill(config, model)
        loss = choose_loss(config, settings, model)
        return TrainingSetup(model.train(), [optimizer], loss, loss_scaler(self._case), plan)

    def microbatches(self, step: int, part: int) -> list[Any]:
        train = self._config.train
        made = Loader(
            self._data.train,
            self._data.collate,
            batch_size=train.batch_size,
            accumulate=train.accumulate,
            seed=train.seed,
            rank=part,
            ranks=self._case.parts,
            prefetch=0,
        )
        loader, following = self._loaders.get(part, (made, 1))
        if following != step:
            loader.load_state_dict({"samples": (step - 1) * train.batch_size})
        self._loaders[part] = loader, step + 1
        return [next(loader) for _ in range(train.accumulate)]
