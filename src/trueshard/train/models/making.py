"""A model from its configuration: without memory, or whole in host memory."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trueshard.errors import UserError, with_kind
from trueshard.train.config import AdapterSection, Config
from trueshard.train.models.adapters import add_adapter, is_saved_whole, needs_values
from trueshard.train.models.freezing import freeze
from trueshard.train.models.quantized import Kind as Kinds
from trueshard.train.models.quantized import quantise_layers
from trueshard.train.models.rows import seeded
from trueshard.train.models.settings import Kind


def empty(config: Config, settings: Any, checking: bool = False) -> nn.Module:
    """The model on the meta device, quantised, adapted and frozen as asked for, in ``model.dtype``.

    Args:
        config, settings: as for ``build``.
        checking: only the shapes matter.

    Raises:
        UserError: what cannot be done to this model.
    """
    dtype = getattr(torch, config.model.dtype)
    with torch.device("meta"):
        base = Kind.of(config).auto.from_config(settings, dtype=dtype)
        return _changed(config, base, checking)


def with_values(config: Config, settings: Any) -> nn.Module:
    """The same with its values, whole in host memory: what is random follows from ``train.seed``.

    Raises:
        UserError: its files cannot be read.
    """
    dtype, auto = getattr(torch, config.model.dtype), Kind.of(config).auto
    with seeded(config.train.seed, "", torch.device("cpu")):
        if config.model.path is None:
            return _changed(config, auto.from_config(settings, dtype=dtype))
        path = config.model.place()
        try:
            base = auto.from_pretrained(str(path), config=settings, dtype=dtype, local_files_only=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"model.path: the weights in {path} cannot be loaded ({with_kind(error)}); check the files"
            ) from error
        return _changed(config, base.train())


def _changed(config: Config, base: Any, checking: bool = False) -> nn.Module:
    model: nn.Module = base
    section, adapter = config.model, config.adapter
    if section.quantize != "none":
        _quantise(base, section.quantize, adapter, checking)
    if adapter is not None:
        model = add_adapter(base, adapter, "CAUSAL_LM" if config.data.format != "vision" else None, checking)
    freeze(model, section.freeze)
    return model


def _quantise(base: Any, kind: Kinds, adapter: AdapterSection | None, checking: bool) -> None:
    """Quantise the linear layers of ``base``, but for its head and what is trained whole."""
    if adapter is not None and needs_values(adapter):
        raise UserError(
            "model.quantize does not go with adapter.arguments that begin with or change the base's weights; set it to "
            '"none", or remove them'
        )
    head, before = base.get_output_embeddings(), base.num_parameters()
    kept = {name for name, module in base.named_modules() if module is head}
    found = quantise_layers(base, kind, lambda name: name not in kept and not is_saved_whole(name, adapter))
    if not found:
        raise UserError(f'model.quantize: {type(base).__name__} has no linear layer to quantise; set it to "none"')
    if checking and found < 0.5 * before and (not dist.is_initialized() or dist.get_rank() == 0):
        warnings.warn(
            f"model.quantize reaches {found / before:.0%} of the weights of {type(base).__name__}: the head, and what "
            "is in no linear layer (embeddings, experts that are held together), stays as it is",
            stacklevel=2,
        )
