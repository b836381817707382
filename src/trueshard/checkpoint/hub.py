"""The names that a Hugging Face model has on disk, where they are not those that it has in memory.

- Transformers has a table for each architecture: what is renamed, and which tensors become one (the weights of experts,
  queries, keys and values) or several. It is asked for, not copied.
- A tensor that is put together from others is an entry of several pieces, in the order of its rows; so a rank still
  reads what it holds and nothing else. What moves bytes inside of rows (a transposition) cannot be said that way and is
  refused.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.checkpoint import tensorfile
from trueshard.checkpoint.catalogue import Catalogue
from trueshard.checkpoint.manifest import Entry, Piece

_MOST_PIECES = 100_000


def is_hub_model(module: Any) -> bool:
    """Whether ``module`` is a model of transformers."""
    return hasattr(module, "config") and isinstance(getattr(module, "base_model_prefix", None), str)


def patterns_of(module: Any, kind: str) -> Callable[[str], bool]:
    """Whether a name is one that transformers does not mind. ``kind``: "missing" or "unexpected"."""
    found = getattr(module, f"_keys_to_ignore_on_load_{kind}", None) or ()
    return lambda name: any(re.search(pattern, name) for pattern in found)


def translate(module: nn.Module, wanted: Mapping[str, torch.Tensor], catalogue: Catalogue) -> None:
    """Give the entries of ``catalogue`` the names that ``module`` has.

    Args:
        module: a model of transformers.
        wanted: its tensors, by name, as they are without adapters.
        catalogue: of a Hugging Face directory; changed in place.

    Raises:
        ValueError: a tensor is stored in a way that bytes alone cannot be put together from.
    """
    table = _conversions(module)
    if table is None:
        return
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [each for each in table if isinstance(each, WeightRenaming)]
    converters = [each for each in table if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, own = str(module.base_model_prefix), dict(wanted)
    found: dict[str, Entry] = {}
    groups: dict[str, tuple[Any, dict[str, list[_Stored]]]] = {}
    for key in sorted(catalogue.entries, key=dot_natural_key):
        entry = catalogue.entries[key]
        name, pattern = rename_source_key(key, renamings, converters, prefix, own)
        if name not in wanted and key in wanted:
            name, pattern = key, None
        if pattern is None or name not in wanted:
            found[name if name in wanted else key] = entry
        else:
            _, sources = groups.setdefault(name, (of_pattern[pattern], {}))
            sources.setdefault(pattern, []).append(_Stored(entry.dtype, tuple(entry.shape), tuple(entry.pieces)))
    for name, (converter, sources) in groups.items():
        try:
            made = _converted(converter, name, sources, wanted)
        except _NotBytes as error:
            raise ValueError(
                f"{catalogue.where}: {name!r} is stored in another form, and {error} is more than reading bytes; "
                "load it with from_pretrained() once, and save it with trueshard.save()"
            ) from None
        for target, stored in made.items():
            found[target] = Entry([target], list(stored.shape), stored.dtype, None, None, list(stored.pieces))
    catalogue.entries.clear()
    catalogue.entries.update(found)


def _conversions(module: Any) -> list[Any] | None:
    """Transformers' table for ``module``; None if this version has none."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return None
    with _own_classes(module):
        return list(get_model_conversion_mapping(module))


@contextlib.contextmanager
def _own_classes(module: nn.Module) -> Iterator[None]:
    """Modules with the classes they had before they were sharded: the table goes by their names."""
    changed = [(each, type(each)) for each in module.modules() if _torch.own_class(each) is not type(each)]
    try:
        for each, _ in changed:
            each.__class__ = _torch.own_class(each)
        yield
    finally:
        for each, kind in changed:
            each.__class__ = kind


class _NotBytes(Exception):
    """An operation that is not a matter of which bytes come after which."""


@dataclass(frozen=True)
class _Stored:
    """A tensor as pieces of files, row after row."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def cut(self, dim: int, sizes: Sequence[int]) -> list[_Stored]:
        """Parts of ``sizes`` along ``dim``."""
        outer, inner = self._around(dim)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        width = self.shape[dim] * inner
        found = []
        for start, size in zip(starts, sizes, strict=True):
            ranges = [(o * width + start * inner, o * width + (start + size) * inner) for o in range(outer)]
            shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
            found.append(_Stored(self.dtype, shape, _coalesced(self._select(ranges))))
        return found

    def _around(self, dim: int) -> tuple[int, int]:
        """How often a run along ``dim`` comes, and the bytes of one step of it."""
        inner = math.prod(self.shape[dim + 1 :]) * tensorfile.size_of(self.dtype)
        return math.prod(self.shape[:dim]), inner

    def _select(self, ranges: Sequence[tuple[int, int]]) -> Iterator[Piece]:
        """The pieces of byte ranges, which are in order."""
        if len(ranges) > _MOST_PIECES:
            raise _NotBytes(f"taking it apart into {len(ranges)} pieces")
        at, place = 0, 0
        for begin, end in ranges:
            while begin < end:
                piece = self.pieces[place]
                length = piece.end - piece.begin
                if at + length <= begin:
                    at, place = at + length, place + 1
                    continue
                stop = min(end, at + length)
                yield Piece(piece.file, piece.begin + begin - at, piece.begin + stop - at)
                begin = stop

    def rows(self, dim: int) -> list[tuple[Piece, ...]]:
        """The pieces of each run along ``dim``."""
        outer, inner = self._around(dim)
        width = self.shape[dim] * inner
        return (
            [tuple(self._select([(o * width, (o + 1) * width)])) for o in range(outer)] if outer > 1 else [self.pieces]
        )


def _coalesced(pieces: Iterator[Piece]) -> tuple[Piece, ...]:
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1].file == piece.file and found[-1].end == piece.begin:
            found[-1] = Piece(piece.file, found[-1].begin, piece.end)
        else:
            found.append(piece)
    return tuple(found)


def _stack(parts: Sequence[_Stored]) -> _Stored:
    """Along a new first dimension."""
    pieces = _coalesced(piece for part in parts for piece in part.pieces)
    return _Stored(parts[0].dtype, (len(parts), *parts[0].shape), pieces)


def _concatenate(parts: Sequence[_Stored], dim: int) -> _Stored:
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    if math.prod(shape[:dim]) * len(parts) > _MOST_PIECES:
        raise _NotBytes(f"putting it together from {math.prod(shape[:dim]) * len(parts)} pieces")
    runs = zip(*(part.rows(dim) for part in parts), strict=True)
    pieces = _coalesced(piece for run in runs for part in run for piece in part)
    return _Stored(parts[0].dtype, tuple(shape), pieces)


def _converted(
    converter: Any, name: str, sources: dict[str, list[_Stored]], wanted: Mapping[str, torch.Tensor]
) -> dict[str, _Stored]:
    """What ``converter`` makes of ``sources`` (pattern → tensors), by name; ``name`` is that of its first target."""
    patterns, targets = list(converter.source_patterns), list(converter.target_patterns)
    everything = [each for several in sources.values() for each in several]
    if len({(each.dtype, len(each.shape)) for each in everything}) > 1:
        raise _NotBytes("joining several dtypes")
    values: dict[str, list[_Stored]] = sources
    for operation in converter.operations:
        values = _operated(operation, name, values, patterns, targets, wanted)
    own = name.replace("*.", "0.")
    for key in values:
        if key in own:
            before, _, after = own.partition(key)
            return {before + each + after: several[0] for each, several in values.items()}
    return {key: several[0] for key, several in values.items()}


def _operated(
    operation: Any,
    name: str,
    values: dict[str, list[_Stored]],
    patterns: list[str],
    targets: list[str],
    wanted: Mapping[str, torch.Tensor],
) -> dict[str, list[_Stored]]:
    """One operation of transformers' ``core_model_loading``, on pieces instead of tensors."""
    kind, dim = type(operation).__name__, getattr(operation, "dim", 0)
    one = next(iter(values.values()))[0]
    if kind == "MergeModulelist" and dim == 0:
        names = targets if len(values) == 1 else list(values)
        return {key: [_stack(parts)] for key, parts in zip(names, values.values(), strict=True)}
    if kind == "Concatenate" and len(targets) == 1:
        parts = [each for pattern in patterns for each in values.get(pattern, [])]
        return {targets[0]: [_concatenate(parts, dim)]}
    if kind == "Chunk" and getattr(operation, "num_shards_attribute", None) is None and len(values) == 1:
        step = -(-one.shape[dim] // len(targets))
        sizes = [min(step, one.shape[dim] - i * step) for i in range(len(targets))]
        return {target: [part] for target, part in zip(targets, one.cut(dim, sizes), strict=True)}
    if kind == "Split" and len(values) == 1:
        sizes = [wanted[name.replace(targets[0], target)].shape[dim] for target in targets]
        return {target: [part] for target, part in zip(targets, one.cut(dim, sizes), strict=True)}
    if kind == "Transpose" and getattr(operation, "check_dims", False) and one.shape == tuple(wanted[name].shape):
        return {targets[0]: [one]}
    raise _NotBytes(f"{kind} along dimension {dim}")
