"""Names of modules and parameters, whatever wraps them.

- A parameter has the name that the user's own modules give it. ``torch.compile(module)`` and ``checkpoint_wrapper``
  stand between a module and its parent and put their own attribute into every name below; that attribute is no name.
- Wrappers stay where the user put them. ``hide_wrappers`` makes them transparent, so that ``named_parameters()``,
  ``state_dict()`` and ``load_state_dict()`` of every module above (and of the wrapper itself) speak the user's names.
- Never by editing strings: names come from walking the module tree.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from trueshard import _torch
from trueshard.text import nearest as nearest

Value = TypeVar("Value")


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module behind ``torch.compile``'s and activation checkpointing's wrappers."""
    while (attribute := _torch.wrapper_attribute(module)) is not None:
        module = getattr(module, attribute)
    return module


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) in the order of ``nn.Module.named_modules``, each module once, without wrappers."""
    return _each_once(_walk(unwrap(root), ""))


def _each_once(places: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    seen: set[nn.Module] = set()
    for name, module in places:
        if module not in seen:
            seen.add(module)
            yield name, module


def _walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for every place in the tree: a shared module once for each of its names."""
    waiting = [(name, module)]
    while waiting:
        name, module = waiting.pop()
        yield name, module
        prefix = f"{name}." if name else ""
        children = _torch.own_modules(module).items()
        waiting += [(prefix + name, unwrap(child)) for name, child in reversed(children) if child is not None]


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes without parameters, buffers and modules."""
    return {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}


def named_tensors(root: nn.Module, kind: str) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield (name, module, attribute, tensor) of ``"parameters"`` or ``"buffers"``: a tie for each of its names."""
    return _tensors_at(_walk(unwrap(root), ""), kind)


def _tensors_at(
    places: Iterable[tuple[str, nn.Module]], kind: str
) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    tables: dict[str, Any] = {"parameters": _torch.own_parameters, "buffers": _torch.own_buffers}
    for prefix, module in places:
        for attribute, tensor in tables[kind](module).items():
            if tensor is not None:
                yield (f"{prefix}.{attribute}" if prefix else attribute), module, attribute, tensor


def nearest_above(name: str, table: Mapping[str, Value]) -> Value:
    """Return the value in ``table`` of a module or of the nearest one around it; the root, ``""``, is in the table."""
    while name not in table:
        name = name.rpartition(".")[0]
    return table[name]


def matching(glob: str, known: Iterable[str]) -> list[str]:
    """Return the names that a glob matches: ``*`` and ``?`` match dots as well, so ``layers.*`` is all inside, too."""
    matches = re.compile(fnmatch.translate(glob)).match
    return [name for name in known if matches(name)]


@dataclass
class Held:
    """A parameter or buffer object, and every place that holds it; several are a tie."""

    tensor: torch.Tensor
    names: list[str]
    places: list[tuple[nn.Module, str]]
    """(module, attribute)."""

    @property
    def name(self) -> str:
        return self.names[0]


def held_tensors(root: nn.Module, kind: str) -> list[Held]:
    """Return each parameter or buffer object once, in the model's order; ``kind`` as in ``named_tensors``."""
    return _held_at(_walk(unwrap(root), ""), kind)


def _held_at(places: Iterable[tuple[str, nn.Module]], kind: str) -> list[Held]:
    result: dict[int, Held] = {}
    for name, module, attribute, tensor in _tensors_at(places, kind):
        held = result.get(id(tensor)) or result.setdefault(id(tensor), Held(tensor, [], []))
        held.names.append(name)
        held.places.append((module, attribute))
    return list(result.values())


@dataclass(frozen=True)
class Index:
    """Modules and tensors of a model by name, looked up once: valid while nobody changes them."""

    model: nn.Module
    """The model as the user gave it, wrapped or not."""

    @functools.cached_property
    def root(self) -> nn.Module:
        """The user's own module."""
        return unwrap(self.model)

    @functools.cached_property
    def places(self) -> list[tuple[str, nn.Module]]:
        """(name, module) for every place in the tree: a shared module once for each of its names."""
        return list(_walk(self.root, ""))

    @functools.cached_property
    def modules(self) -> dict[str, nn.Module]:
        """Name → module, as ``named_modules``."""
        return dict(_each_once(self.places))

    @functools.cached_property
    def depths(self) -> dict[str, int]:
        """Name of a module → modules above it, on the longest way from the root: several hold a shared one."""
        lengths: dict[nn.Module, int] = {}
        for name, module in self.places:
            lengths[module] = max(lengths.get(module, 0), name.count(".") + bool(name))
        return {name: lengths[module] for name, module in self.modules.items()}

    @functools.cached_property
    def parameters(self) -> list[Held]:
        """Every parameter once, with its places."""
        return _held_at(self.places, "parameters")

    @functools.cached_property
    def buffers(self) -> list[Held]:
        """Every buffer once, with its places."""
        return _held_at(self.places, "buffers")

    @functools.cached_property
    def all_names(self) -> list[str]:
        """Names of all modules and parameters, every name of a tie among them."""
        return [*self.modules, *(name for held in self.parameters for name in held.names)]


def mix_in(module: nn.Module, mixin: type) -> None:
    """Put ``mixin`` before the class of one module, in place."""
    if not isinstance(module, mixin):
        cls: Any = type(module)
        object.__setattr__(module, "__class__", _mixed(cls, mixin))


def take_out(module: nn.Module) -> None:
    """Undo the last ``mix_in`` of one module."""
    object.__setattr__(module, "__class__", type(module).__bases__[1])


@functools.cache
def _mixed(cls: type, mixin: type) -> type:
    # To whoever asks, such as pickle and a checkpoint's manifest, it is the user's class.
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


class _Transparent(nn.Module):
    """Mixin for a wrapper's class: the wrapper's own attribute vanishes from names, all else stays."""

    def _wrapped(self) -> tuple[str, nn.Module]:
        attribute = _torch.wrapper_attribute(self)
        assert attribute is not None
        return attribute, _torch.own_modules(self)[attribute]  # type: ignore[return-value]

    def named_modules(self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        return self._wrapped()[1].named_modules(memo, prefix, remove_duplicate)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped()[1].named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped()[1].state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped()[1].load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Called by a module above: it will look for this wrapper's child under the child's attribute.
        attribute, _ = self._wrapped()
        if not _torch.renames_when_loading(self):
            for key in [key for key in state_dict if key.startswith(prefix)]:
                state_dict[f"{prefix}{attribute}.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


def hide_wrappers(root: nn.Module) -> None:
    """Make every naming wrapper at and below ``root`` transparent, in place."""
    for module in _torch.every_module(root):
        if _torch.wrapper_attribute(module) is not None:
            mix_in(module, _Transparent)
