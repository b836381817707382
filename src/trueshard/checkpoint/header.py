"""Reads the header of a safetensors file in a store."""

from __future__ import annotations

from trueshard.checkpoint import tensorfile
from trueshard.checkpoint.store import Store


def read_header(store: Store, file: str) -> dict[str, tensorfile.Slot]:
    """The tensors of a safetensors file."""
    return tensorfile.parse(header_of(store, file), store.size(file), f"{store.where}/{file}")


def header_of(store: Store, file: str) -> bytes:
    """The header of a safetensors file."""
    size, where = store.size(file), f"{store.where}/{file}"
    length = tensorfile.header_length(bytes(store.read(file, 0, min(8, size))), size, where)
    return bytes(store.read(file, 0, length))
