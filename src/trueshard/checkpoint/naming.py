"""From the model's own names of tensors to the keys of a catalogue, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from trueshard import names
from trueshard.checkpoint import state
from trueshard.checkpoint.catalogue import Catalogue


@dataclass
class Naming:
    """For one model."""

    prefix: str
    """Of the keys that are this model's."""
    given: Callable[[str], str | None] | None = None
    """The user's mapping."""
    partial: bool = False
    """Whether the files hold a part of the model by their nature: an adapter."""
    table: dict[str, str] = field(default_factory=dict)
    """Name → key, where they are known to differ."""
    _name_of: dict[str, str] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """Where to look for what the model calls ``name``."""
        own = self.given(name) if self.given is not None else None
        key = self.prefix + (own or self.table.get(name, name))
        self._name_of[key] = name
        return key

    def owns(self, key: str) -> bool:
        """Whether ``key`` is this model's."""
        return key.startswith(self.prefix)

    def name(self, key: str) -> str:
        """What the model calls it, or would."""
        return self._name_of.get(key, key.removeprefix(self.prefix))


def naming_of(catalogue: Catalogue, prefix: str, module: nn.Module, given: Any) -> Naming:
    """The naming of ``module`` in ``catalogue``.

    Args:
        catalogue: what is loaded from.
        prefix: "model", or "model/<key>".
        module: the model.
        given: what the user gave as ``names``.
    """
    function = given.get if isinstance(given, Mapping) else given
    if catalogue.manifest is not None:
        return Naming(f"{prefix}/", function)
    if catalogue.adapter:
        return Naming("", function, partial=True, table=_adapter_names(module))
    return Naming("", function, table=_base_names(module, catalogue))


def _adapter_names(module: nn.Module) -> dict[str, str]:
    """PEFT leaves the adapter's name out of the keys it writes."""
    from trueshard.checkpoint.layout import adapted_places

    adapters = getattr(names.unwrap(module), "peft_config", {})
    if len(adapters) != 1:
        raise ValueError(f"an adapter is loaded into a PEFT model with one adapter, not with {len(adapters)}")
    return {name: place.key for name, place in (adapted_places(module, "") or {}).items()}


def _base_names(module: nn.Module, catalogue: Catalogue) -> dict[str, str]:
    """Names of a PEFT model's base, and of a model whose files have or lack its base model's prefix."""
    from trueshard.checkpoint.layout import adapted_places

    own = names.unwrap(module)
    table = {name: place.key for name, place in (adapted_places(module, "") or {}).items() if place.stem == "model"}
    prefix = getattr(own, "base_model_prefix", "")
    if not table and prefix:
        held, _ = state.model_tensors(module)
        for name in (name for each in held.values() for name in each.names):
            if name in catalogue.entries:
                continue
            for other in (f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
                if other in catalogue.entries:
                    table[name] = other
    return table
