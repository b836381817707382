"""What a directory or file of tensors holds, whoever wrote it: a checkpoint of ours, a Hugging Face model, an adapter.

One way to read them all: by key, and by ranges of bytes, so that a rank reads what it holds and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from trueshard.checkpoint import format1
from trueshard.checkpoint.checksum import BLOCK, crc32
from trueshard.checkpoint.header import read_header
from trueshard.checkpoint.jsontext import table_of
from trueshard.checkpoint.manifest import MANIFEST, Entry, Manifest, Piece
from trueshard.checkpoint.store import LocalStore, Store, is_url, open_store
from trueshard.checkpoint.versions import manifest_of

_STEMS = ("model", "diffusion_pytorch_model", "adapter_model")


@dataclass
class Catalogue:
    """Tensors in files."""

    store: Store
    entries: dict[str, Entry]
    """By key."""
    manifest: Manifest | None = None
    """Of a checkpoint of ours."""
    adapter: bool = False
    """Whether it is a PEFT adapter without its base."""
    dcp: bool = False
    """Whether it is a directory of torch.distributed.checkpoint, which is read by torch."""

    @property
    def where(self) -> str:
        """For messages."""
        return self.store.where

    def ranges(self, key: str, begin: int, end: int) -> Iterator[tuple[Piece, int]]:
        """The places in files of bytes ``begin`` to ``end`` of a tensor, each with where in the tensor it begins."""
        at = 0
        for piece in self.entries[key].pieces:
            length = piece.end - piece.begin
            low, high = max(begin, at), min(end, at + length)
            if low < high:
                yield Piece(piece.file, piece.begin + low - at, piece.begin + high - at), low
            at += length

    def checksum(self, key: str, begin: int, end: int) -> int:
        """The checksum of bytes ``begin`` to ``end`` of a tensor."""
        value = 0
        for piece, _ in self.ranges(key, begin, end):
            for at in range(piece.begin, piece.end, BLOCK):
                stop = min(at + BLOCK, piece.end)
                value = crc32(self.store.read(piece.file, at, stop), value)
                self.store.release(piece.file, at, stop)
        return value

    def read_into(self, key: str, begin: int, local: torch.Tensor) -> None:
        """Fill ``local``, whose elements are those from byte ``begin`` on; converts to its dtype. No gradient mode."""
        entry = self.entries[key]
        dtype: torch.dtype = getattr(torch, entry.dtype)
        end = begin + local.numel() * dtype.itemsize
        flat = local.detach().view(-1) if local.is_contiguous() else None
        filled = torch.empty(local.numel(), dtype=local.dtype) if flat is None else flat
        for piece, where in self.ranges(key, begin, end):
            block = BLOCK - BLOCK % dtype.itemsize
            for at in range(piece.begin, piece.end, block):
                stop = min(at + block, piece.end)
                first = (where - begin + at - piece.begin) // dtype.itemsize
                data = _tensor(self.store.read(piece.file, at, stop), dtype)
                filled[first : first + data.numel()].copy_(data)
                self.store.release(piece.file, at, stop)
        if flat is None:
            local.copy_(filled.view(local.shape))

    def whole(self, key: str) -> torch.Tensor:
        """The tensor, in memory of its own, on the CPU."""
        entry = self.entries[key]
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        self.read_into(key, 0, tensor)
        return tensor


def _tensor(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the memory is read-only: it is only read
        aligned = torch.frombuffer(data, dtype=torch.uint8)
        try:
            return aligned.view(dtype)
        except RuntimeError:  # not at a multiple of the element's size
            return aligned.clone().view(dtype)


def open_catalogue(path: str | os.PathLike[str]) -> Catalogue:
    """What is at ``path``: a checkpoint, a Hugging Face or PEFT directory, a DCP directory, a .safetensors file.

    Raises:
        FileNotFoundError: nothing is there, or nothing that is known.
        ValueError: it is damaged; the message names file and tensor.
    """
    if not is_url(path) and Path(path).is_file():
        file = Path(path)
        beside = LocalStore(file.parent, confined=False)
        return Catalogue(beside, _entries(beside, [file.name]), adapter=file.name.startswith("adapter_model"))
    store = open_store(path)
    if store.exists(MANIFEST):
        where = f"{store.where}/{MANIFEST}"
        manifest = manifest_of(bytes(store.read(MANIFEST)), where)
        if manifest.format == 1:
            format1.locate(manifest, store)
        manifest.validate(where)
        for name, record in manifest.files.items():
            if (size := store.size(name)) != record.size:
                held = _first_in(manifest, name)
                raise ValueError(f"{store.where}/{name} is cut short or damaged: {size} bytes, not {record.size}{held}")
        return Catalogue(store, manifest.tensors, manifest)
    store = open_store(path, confined=False)
    if any(store.exists(f"{folder}.metadata") for folder in ("", "pytorch_model_fsdp_0/")):  # of Accelerate
        return Catalogue(store, {}, dcp=True)
    for stem in _STEMS:
        files = _files(store, stem)
        if files:
            return Catalogue(store, _entries(store, files), adapter=stem == "adapter_model")
    raise FileNotFoundError(
        f"{path} is no checkpoint: it has no {MANIFEST}, no model.safetensors (or its index), no "
        "adapter_model.safetensors, and no .metadata of torch.distributed.checkpoint"
    )


def _first_in(manifest: Manifest, file: str) -> str:
    held = [key for key, entry in manifest.tensors.items() if any(piece.file == file for piece in entry.pieces)]
    return f"; it holds {held[0]!r}" + (f" and {len(held) - 1} more tensors" if held[1:] else "") if held else ""


def _files(store: Store, stem: str) -> list[str]:
    index = f"{stem}.safetensors.index.json"
    if store.exists(index):
        table = table_of(store.read(index), f"{store.where}/{index}").get("weight_map")
        if not isinstance(table, dict):
            raise ValueError(f"{store.where}/{index} is damaged: it has no weight_map")
        return list(dict.fromkeys(str(file) for file in table.values()))
    return [f"{stem}.safetensors"] if store.exists(f"{stem}.safetensors") else []


def _entries(store: Store, files: list[str]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for file in files:
        for key, slot in read_header(store, file).items():
            piece = Piece(file, slot.begin, slot.end)
            entries[key] = Entry([key], list(slot.shape), slot.dtype, None, None, [piece])
    return entries
