"""From the model's own names of tensors to the keys of a catalogue, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from trueshard import names
from trueshard.checkpoint import hub, state
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
    unminded: Callable[[str], bool] = lambda name: False
    """Whether files leave out what is called so, since the model computes it."""
    _name_of: dict[str, str] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """Where to look for what the model calls ``name``."""
        own = self.given(name) if self.given is not None else None
        key = self.prefix + (own or self.table.get(name, name))
        self._name_of[key] = name
        return key

    def may_lack(self, name: str) -> bool:
        """Whether it is no fault if the files have no ``name``."""
        return self.partial or self.unminded(name)

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
    own = names.unwrap(module)
    return Naming("", function, table=_hub_names(module, catalogue), unminded=hub.patterns_of(own, "missing"))


def _adapter_names(module: nn.Module) -> dict[str, str]:
    """PEFT leaves the adapter's name out of the keys it writes."""
    from trueshard.checkpoint.layout import adapted_places

    adapters = getattr(names.unwrap(module), "peft_config", {})
    if len(adapters) != 1:
        raise ValueError(f"an adapter is loaded into a PEFT model with one adapter, not with {len(adapters)}")
    # What PEFT writes of the base, embeddings that were changed, it writes under the name that they have.
    places = adapted_places(module, "") or {}
    return {name: place.key if place.stem == "adapter_model" else name for name, place in places.items()}


def _hub_names(module: nn.Module, catalogue: Catalogue) -> dict[str, str]:
    """Names of a PEFT model's base, and of a model that has other names on disk than in memory."""
    from trueshard.checkpoint.layout import adapted_places

    own: Any = names.unwrap(module)
    held, _ = state.model_tensors(module)
    tensors = {name: each.tensor for each in held.values() for name in each.names}
    places = adapted_places(module, "")
    if places is not None:
        tensors = {places[name].key: tensor for name, tensor in tensors.items() if places[name].stem == "model"}
        own = own.get_base_model()
    if hub.is_hub_model(own):
        lacking = {id(tensor) for tensor in tensors.values()}
        lacking -= {id(tensor) for name, tensor in tensors.items() if name in catalogue.entries}
        if lacking:
            hub.translate(own, tensors, catalogue)
        unminded = hub.patterns_of(own, "unexpected")
        for key in [key for key in catalogue.entries if key not in tensors and unminded(key)]:
            del catalogue.entries[key]
    return {name: place.key for name, place in (places or {}).items() if place.key in catalogue.entries}
