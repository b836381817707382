"""Parts of a model that are not trained, by glob over parameter names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trueshard.errors import UserError
from trueshard.train.globs import matching


def freeze(model: nn.Module, globs: Sequence[str]) -> None:
    """Freeze the parameters that any of ``globs`` matches, in place; below an adapter, by the base's names, too.

    Raises:
        UserError: a glob matches no parameter, or nothing is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in matching(globs, parameters, "model.freeze"):
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError("model.freeze: nothing is left to train; leave out one of its globs")
