"""Map a model's own names of tensors to the keys of a catalogue, and back.

Transformers stores some architectures under other names than they have in memory, and has a table for each: what is
renamed, and which tensors are merged (the weights of experts, queries, keys and values) or split. The table is asked
for, not copied. A tensor merged from others becomes an entry of several pieces, in row order, so a rank still reads
what it holds and nothing else. What moves bytes inside rows (a transposition) is refused.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trueshard import _torch
from trueshard.checkpoint import state
from trueshard.checkpoint.catalogue import Catalogue
from trueshard.checkpoint.layout import adapted_keys
from trueshard.checkpoint.tensorfile import Piece, TensorEntry
from trueshard.model import names

_MOST_PIECES = 100_000


@dataclass
class Naming:
    """The names of one model's tensors in a catalogue."""

    prefix: str
    """Of the model's keys."""
    given: Callable[[str], str | None] | None = None
    """The user's mapping."""
    partial: bool = False
    """True if the files hold only a part of the model: an adapter."""
    table: dict[str, str] = field(default_factory=dict)
    """Name → key, where they differ."""
    is_computed: Callable[[str], bool] = lambda name: False
    """True for the name of a tensor that files leave out since the model computes it."""
    _name_of: dict[str, str] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """Return the key of the tensor that the model calls ``name``."""
        own = self.given(name) if self.given is not None else None
        key = self.prefix + (own or self.table.get(name, name))
        self._name_of[key] = name
        return key

    def may_lack(self, name: str) -> bool:
        """True if it is no error that the files have no ``name``."""
        return self.partial or self.is_computed(name)

    def owns(self, key: str) -> bool:
        """True if ``key`` belongs to this model."""
        return key.startswith(self.prefix)

    def name(self, key: str) -> str:
        """Return the model's name of ``key``."""
        return self._name_of.get(key, key.removeprefix(self.prefix))


def naming_of(catalogue: Catalogue, prefix: str, module: nn.Module, given: Any) -> Naming:
    """Return the naming of ``module``; the entries of a Hugging Face directory get the names that it has.

    ``given``: the user's ``names``.
    """
    function = given.get if isinstance(given, Mapping) else given
    if catalogue.manifest is not None:
        return Naming(f"{prefix}/", function)
    own = names.unwrap(module)
    if not catalogue.adapter:
        return Naming("", function, table=_hub_names(module, catalogue), is_computed=_ignored(own, "missing"))
    adapters = getattr(own, "peft_config", {})
    if len(adapters) != 1:
        raise ValueError(f"an adapter is loaded into a PEFT model with one adapter, not with {len(adapters)}")
    # PEFT stores changed embeddings of the base under the names that they have.
    keys = adapted_keys(module, "") or {}
    table = {name: each.key if each.stem == "adapter_model" else name for name, each in keys.items()}
    return Naming("", function, partial=True, table=table)


def _hub_names(module: nn.Module, catalogue: Catalogue) -> dict[str, str]:
    """Translate ``catalogue`` for a model of transformers; return name → key for the base of a PEFT model."""
    own: Any = names.unwrap(module)
    held, _ = state.model_tensors(module)
    tensors = {name: each.tensor for each in held.values() for name in each.names}
    keys = adapted_keys(module, "")
    if keys is not None:
        tensors = {keys[name].key: tensor for name, tensor in tensors.items() if keys[name].stem == "model"}
        own = own.get_base_model()
    if hasattr(own, "config") and isinstance(getattr(own, "base_model_prefix", None), str):  # of transformers
        found = {id(tensor) for name, tensor in tensors.items() if name in catalogue.entries}
        if any(id(tensor) not in found for tensor in tensors.values()):
            _translate(own, tensors, catalogue)
        ignored = _ignored(own, "unexpected")
        for key in [key for key in catalogue.entries if key not in tensors and ignored(key)]:
            del catalogue.entries[key]
    return {name: each.key for name, each in (keys or {}).items() if each.key in catalogue.entries}


def _ignored(module: Any, kind: str) -> Callable[[str], bool]:
    """Return whether transformers ignores a name that is ``kind``: "missing" or "unexpected"."""
    found = getattr(module, f"_keys_to_ignore_on_load_{kind}", None) or ()
    return lambda name: any(re.search(pattern, name) for pattern in found)


def _translate(module: Any, wanted: Mapping[str, torch.Tensor], catalogue: Catalogue) -> None:
    """Rename and merge the entries of ``catalogue``, in place, as transformers' table for ``module`` says.

    ``wanted``: the model's tensors, by name, without adapters.

    Raises:
        ValueError: the table says more than which bytes come after which.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # this version has no tables
        return
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    with _own_classes(module):
        table = list(get_model_conversion_mapping(module))
    renamings = [each for each in table if isinstance(each, WeightRenaming)]
    converters = [each for each in table if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, own = str(module.base_model_prefix), dict(wanted)
    found: dict[str, TensorEntry] = {}
    groups: dict[str, tuple[Any, dict[str, list[_Bytes]]]] = {}
    for key in sorted(catalogue.entries, key=dot_natural_key):
        entry = catalogue.entries[key]
        name, pattern = rename_source_key(key, renamings, converters, prefix, own)
        if name not in wanted and key in wanted:
            name, pattern = key, None
        if pattern is None or name not in wanted:
            found[name if name in wanted else key] = entry
        else:
            _, sources = groups.setdefault(name, (of_pattern[pattern], {}))
            stored = _Bytes(entry.dtype, entry.itemsize, tuple(entry.shape), tuple(entry.pieces))
            sources.setdefault(pattern, []).append(stored)
    for name, (converter, sources) in groups.items():
        try:
            made = _converted(converter, name, sources, wanted)
        except _NotBytes as error:
            raise ValueError(
                f"{catalogue.where}: {name!r} is stored in another form, and {error} is more than reading bytes; "
                "load it with from_pretrained() once, and save it with trueshard.save()"
            ) from None
        for target, each in made.items():
            found[target] = TensorEntry([target], list(each.shape), each.dtype, None, None, list(each.pieces))
    catalogue.entries.clear()
    catalogue.entries.update(found)


@contextlib.contextmanager
def _own_classes(module: nn.Module) -> Iterator[None]:
    """Give modules the classes they had before they were sharded: transformers' tables go by class names."""
    changed = [(each, type(each)) for each in module.modules() if _torch.own_class(each) is not type(each)]
    try:
        for each, _ in changed:
            each.__class__ = _torch.own_class(each)
        yield
    finally:
        for each, kind in changed:
            each.__class__ = kind


class _NotBytes(Exception):
    """An operation does more than put byte ranges in order."""


@dataclass(frozen=True)
class _Bytes:
    """A tensor as byte ranges of files, in row order."""

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def split(self, dim: int, sizes: Sequence[int]) -> list[_Bytes]:
        """Split into parts of ``sizes`` along ``dim``."""
        outer, inner = math.prod(self.shape[:dim]), math.prod(self.shape[dim + 1 :]) * self.itemsize
        width = self.shape[dim] * inner
        found = []
        start = 0
        for size in sizes:
            ranges = [(o * width + start * inner, o * width + (start + size) * inner) for o in range(outer)]
            shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
            found.append(_Bytes(self.dtype, self.itemsize, shape, _coalesced(self.select(ranges))))
            start += size
        return found

    def runs(self, outer: int) -> list[tuple[Piece, ...]]:
        """Return the pieces of each of ``outer`` equal parts."""
        width = math.prod(self.shape) * self.itemsize // max(outer, 1)
        if outer == 1:
            return [self.pieces]
        return [tuple(self.select([(o * width, (o + 1) * width)])) for o in range(outer)]

    def select(self, ranges: Sequence[tuple[int, int]]) -> Iterator[Piece]:
        """Yield the pieces of byte ranges of the tensor, which are in order."""
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


def _coalesced(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1].file == piece.file and found[-1].end == piece.begin:
            found[-1] = Piece(piece.file, found[-1].begin, piece.end)
        else:
            found.append(piece)
    return tuple(found)


def _concatenate(parts: Sequence[_Bytes], dim: int) -> _Bytes:
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    outer = math.prod(shape[:dim])
    if outer * len(parts) > _MOST_PIECES:
        raise _NotBytes(f"putting it together from {outer * len(parts)} pieces")
    runs = zip(*(part.runs(outer) for part in parts), strict=True)
    pieces = _coalesced(piece for run in runs for part in run for piece in part)
    return _Bytes(parts[0].dtype, parts[0].itemsize, tuple(shape), pieces)


def _stack(parts: Sequence[_Bytes]) -> _Bytes:
    """Stack along a new first dimension."""
    return _concatenate([_Bytes(p.dtype, p.itemsize, (1, *p.shape), p.pieces) for p in parts], 0)


def _converted(
    converter: Any, name: str, sources: dict[str, list[_Bytes]], wanted: Mapping[str, torch.Tensor]
) -> dict[str, _Bytes]:
    """Apply ``converter`` to ``sources`` (pattern → tensors); ``name`` is that of its first target."""
    patterns, targets = list(converter.source_patterns), list(converter.target_patterns)
    everything = [each for several in sources.values() for each in several]
    if len({(each.dtype, len(each.shape)) for each in everything}) > 1:
        raise _NotBytes("joining several dtypes")
    values: dict[str, list[_Bytes]] = sources
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
    values: dict[str, list[_Bytes]],
    patterns: list[str],
    targets: list[str],
    wanted: Mapping[str, torch.Tensor],
) -> dict[str, list[_Bytes]]:
    """Apply one operation of transformers' ``core_model_loading`` to byte ranges."""
    kind, dim = type(operation).__name__, getattr(operation, "dim", 0)
    one = next(iter(values.values()))[0]
    if kind == "MergeModulelist" and dim == 0:
        names = targets if len(values) == 1 else list(values)
        return {key: [_stack(parts)] for key, parts in zip(names, values.values(), strict=True)}
    if kind == "Concatenate" and len(targets) == 1:
        return {targets[0]: [_concatenate([each for key in patterns for each in values.get(key, [])], dim)]}
    sizes: list[int] | None = None
    if kind == "Chunk" and getattr(operation, "num_shards_attribute", None) is None and len(values) == 1:
        step = -(-one.shape[dim] // len(targets))
        sizes = [min(step, one.shape[dim] - i * step) for i in range(len(targets))]
    if kind == "Split" and len(values) == 1:
        sizes = [wanted[name.replace(targets[0], target)].shape[dim] for target in targets]
    if sizes is not None:
        return {target: [part] for target, part in zip(targets, one.split(dim, sizes), strict=True)}
    if kind == "Transpose" and getattr(operation, "check_dims", False) and one.shape == tuple(wanted[name].shape):
        return {targets[0]: [one]}
    raise _NotBytes(f"{kind} along dimension {dim}")
