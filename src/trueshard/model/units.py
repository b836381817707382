"""Choose the modules that are units: whose parameters are gathered together.

- In order: the user's words; the model's hint (``_no_split_modules``, at any depth); else the structure.
- Structure is the shape of the tree, never attribute names: lists of composite modules are lists of blocks.
- A list inside a block (experts) belongs to its block, since a rank may skip an expert and the others would wait for
  it; the module that *holds* a very large list, which every rank runs, is gathered by itself.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from trueshard.model import names

#: A list inside a block is large from here on (elements): 1 GiB in float32.
LARGE_LIST = 2**28

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def choose_units(model: nn.Module, words: Any) -> dict[str, str]:
    """Return the chosen modules: name → why. The root is not among them; it always is a unit.

    ``words``: as ``units`` of ``shard()``; None, ``""``, ``[""]`` and blanks mean ``"auto"``. Raises ValueError for one
    that matches nothing, or a module that has no forward; TypeError for one of another type.
    """
    modules = dict(names.named_modules(model))
    if callable(words) and not isinstance(words, type):
        chosen = {name: "units callable" for name, module in names.named_modules(model) if name and words(name, module)}
    else:
        said = _spoken(words)
        chosen = {}
        if said == ["auto"] or not said:
            chosen = _from_hints(model) or _from_structure(model)
        elif "auto" in said:
            raise ValueError('units: "auto" stands alone; leave it out or give it by itself')
        else:
            for word in said:
                chosen.update(_matching(model, word))
    for name in chosen:
        if not has_forward(modules[name]):
            kind = type(modules[name]).__name__
            raise ValueError(
                f"units: {name!r} is a {kind} without a forward, so nothing says when to gather it; name "
                f"its children instead, for example the glob {f'{name}.*' if name else '*'!r}"
            )
    return {name: chosen[name] for name in modules if name in chosen}


def _spoken(words: Any) -> list[str | type]:
    if words is None:
        return []
    if isinstance(words, (str, type)):
        words = [words]
    if not isinstance(words, Iterable):
        raise TypeError(f"units must be words, classes or a callable, not {type(words).__name__}")
    said = [word.strip() if isinstance(word, str) else word for word in words]
    for word in said:
        if not isinstance(word, str) and not (isinstance(word, type) and issubclass(word, nn.Module)):
            raise TypeError(f"units: {word!r} is neither a name, a glob, nor a module class")
    return [word for word in said if word != ""]


def _matching(model: nn.Module, word: str | type) -> dict[str, str]:
    modules = [(name, module) for name, module in names.named_modules(model) if name]
    shown = word.__name__ if isinstance(word, type) else word
    if isinstance(word, type):
        found = {name: f"class {shown}" for name, module in modules if isinstance(module, word)}
    elif any(character in word for character in "*?["):
        found = {name: f"glob {word}" for name, _ in modules if fnmatch.fnmatchcase(name, word)}
    else:
        found = {name: f"class {word}" for name, module in modules if word in _class_names(module)}
        found = found or {name: "named" for name, _ in modules if name == word}
    if found:
        return found
    classes = sorted({type(module).__name__ for _, module in modules})
    near = names.nearest(shown, [*classes, *(name for name, _ in modules)])
    raise ValueError(f"units: nothing in the model is called {shown!r}.{near} Classes present: {', '.join(classes)}")


def _class_names(module: nn.Module) -> set[str]:
    return {cls.__name__ for cls in type(module).__mro__ if cls not in (nn.Module, object)}


def has_forward(module: nn.Module) -> bool:
    """True if the module can be called: a bare list or dict of modules has no forward."""
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def _from_hints(model: nn.Module) -> dict[str, str]:
    """Return modules of the classes under ``_no_split_modules`` anywhere in the model, as through PEFT's wrappers."""
    hints: set[str] = set()
    for _, module in names.named_modules(model):
        hint = getattr(module, "_no_split_modules", None)
        if isinstance(hint, (str, list, tuple, set, frozenset)):
            hints |= {each.strip() for each in ([hint] if isinstance(hint, str) else hint) if isinstance(each, str)}
    found: dict[str, str] = {}
    for name, module in names.named_modules(model):
        hit = hints & _class_names(module)
        if name and hit and _composite(module):
            found[name] = f"model hint {min(hit)}"
    # A hint inside a hint (an expert's class beside its block's) belongs to the outer one.
    return {name: why for name, why in found.items() if not any(name.startswith(f"{outer}.") for outer in found)}


def _composite(module: nn.Module) -> bool:
    """True for a module made of others, or of a class of the user's; not for a single layer of torch.nn."""
    return has_forward(module) and (
        next(module.children(), None) is not None or not type(module).__module__.startswith("torch.nn.")
    )


def _from_structure(model: nn.Module) -> dict[str, str]:
    root = names.unwrap(model)
    found = (
        _members_of_lists(root, "", _composite, "block of a list")
        or _repeated_siblings(root, "")
        or _members_of_lists(root, "", has_forward, "layer of a list")  # nothing composite repeats
    )
    modules = dict(names.named_modules(root))
    large: dict[str, str] = {}
    for name in found:
        for inner, holder in _holders_of_large_lists(modules[name], name):
            if inner != name and has_forward(holder):
                large[inner] = "holds a large list"
    return {**found, **large}


def _children(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    return [
        (f"{prefix}.{name}" if prefix else name, names.unwrap(child))
        for name, child in module.named_children()
        if next(child.parameters(), None) is not None
    ]


def _members_of_lists(module: nn.Module, prefix: str, fits: Callable[[nn.Module], bool], why: str) -> dict[str, str]:
    """Return the members that fit of the outermost lists that hold at least two of them."""
    children = _children(module, prefix)
    members = [name for name, child in children if fits(child)]
    if isinstance(module, _LISTS) and len(members) >= 2:
        return dict.fromkeys(members, why)
    found: dict[str, str] = {}
    for name, child in children:
        found.update(_members_of_lists(child, name, fits, why))
    return found


def _repeated_siblings(module: nn.Module, prefix: str) -> dict[str, str]:
    """Return siblings of one composite class outside any list (``self.block1``, ``self.block2``), innermost level."""
    children = _children(module, prefix)
    found: dict[str, str] = {}
    for name, child in children:
        found.update(_repeated_siblings(child, name))
    if found:
        return found
    of_class: dict[type, list[str]] = {}
    for name, child in children:
        if _composite(child):
            of_class.setdefault(type(child), []).append(name)
    return {name: "repeated sibling" for group in of_class.values() if len(group) >= 2 for name in group}


def _holders_of_large_lists(module: nn.Module, prefix: str) -> Iterable[tuple[str, nn.Module]]:
    for name, child in _children(module, prefix):
        if isinstance(child, _LISTS) and sum(p.numel() for p in child.parameters()) >= LARGE_LIST:
            yield prefix, module
        yield from _holders_of_large_lists(child, name)
