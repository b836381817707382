"""Read tensors from files by key and byte range, whoever wrote them: a checkpoint, a Hugging Face model, an adapter.

A local file is mapped into memory: pages that are not used are not read, and the ranks of a machine share the rest. A
URL of fsspec (``s3://``, ``memory://``, …) is read by ranges.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard.checkpoint import process_group
from trueshard.checkpoint.format import (
    BLOCK,
    MANIFEST,
    Manifest,
    Piece,
    TensorEntry,
    check_name,
    crc32,
    dtype_of,
    header_length,
    join,
    parse_header,
    parse_json,
)
from trueshard.model.regions import has_one_run

_STEMS = ("model", "diffusion_pytorch_model", "adapter_model")


class Directory:
    """Files of an fsspec file system, read by ranges."""

    def __init__(self, url: str) -> None:
        self._fs, self._root = file_system(url)
        self.where = url.rstrip("/")

    def exists(self, name: str) -> bool:
        return bool(self._fs.exists(self._url(name)))

    def _url(self, name: str) -> str:
        check_name(name, self.where)
        return f"{self._root}/{name}"

    def size(self, name: str) -> int:
        """Return the bytes of a file, or raise ``FileNotFoundError``."""
        try:
            return int(self._fs.size(self._url(name)))
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.where} has no file {name!r}; it is incomplete") from None

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        end = self.size(name) if end is None else end
        data = memoryview(self._fs.cat_file(self._url(name), start=begin, end=end) if end > begin else b"")
        if len(data) != end - begin:
            raise ValueError(f"{self.where}/{name} is cut short: bytes {begin} to {end} are not all there")
        return data

    def mapped(self, name: str, access: int) -> mmap.mmap | None:
        """Return a map of a file; None if it cannot be mapped."""
        return None

    def release(self, name: str, begin: int, end: int) -> None:
        """Drop these bytes from this process's memory."""

    def header(self, file: str) -> bytes:
        size = self.size(file)
        length = header_length(bytes(self.read(file, 0, min(8, size))), size, f"{self.where}/{file}")
        return bytes(self.read(file, 0, length))

    def tensors(self, file: str) -> dict[str, TensorEntry]:
        return parse_header(self.header(file), self.size(file), file, f"{self.where}/{file}")


class LocalDirectory(Directory):
    """A directory of the file system; ``confined``: refuse files that a symbolic link leads out of it."""

    def __init__(self, directory: Path, confined: bool = True) -> None:
        self.directory, self.where = directory, str(directory)
        self._confined = confined
        self._paths: dict[str, Path] = {}
        self._maps: dict[tuple[str, int], mmap.mmap] = {}

    def exists(self, name: str) -> bool:
        return self._path(name).is_file()

    def _path(self, name: str) -> Path:
        """Return the path of a file; checked once, since a file is read in many ranges."""
        if name not in self._paths:
            check_name(name, self.where)
            path = self.directory / name
            if self._confined and not path.resolve().is_relative_to(self.directory.resolve()):
                raise ValueError(f"{path} is a link out of the checkpoint; it was not opened")
            self._paths[name] = path
        return self._paths[name]

    def size(self, name: str) -> int:
        try:
            return self._path(name).stat().st_size
        except OSError:  # missing, below a file, a name too long
            raise FileNotFoundError(f"{self.where} has no file {name!r}; it is incomplete") from None

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        size = self.size(name)
        end = size if end is None else end
        if end > size:
            raise ValueError(f"{self.where}/{name} is cut short: {size} bytes, where {end} are needed")
        return memoryview(self.mapped(name, mmap.ACCESS_READ) if end > begin else b"")[begin:end]

    def mapped(self, name: str, access: int) -> mmap.mmap:
        if (name, access) not in self._maps:
            with open(self._path(name), "rb") as file:
                self._maps[name, access] = mmap.mmap(file.fileno(), 0, access=access)
        return self._maps[name, access]

    def release(self, name: str, begin: int, end: int) -> None:
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and end > first:
            self.mapped(name, mmap.ACCESS_READ).madvise(mmap.MADV_DONTNEED, first, end - first)


def is_url(path: str | os.PathLike[str]) -> bool:
    """True if fsspec reads and writes ``path``."""
    return isinstance(path, str) and "://" in path


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of ``url``, and the path in it."""
    import fsspec

    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{url}: {error}") from error
    return fs, str(root).rstrip("/")


@dataclass
class Catalogue:
    """Tensors in files."""

    directory: Directory
    entries: dict[str, TensorEntry]  # by key
    manifest: Manifest | None = None  # None if not written by ``save``
    adapter: bool = False  # true for a PEFT adapter without its base
    dcp: bool = False  # true for a directory of torch.distributed.checkpoint

    @property
    def where(self) -> str:
        return self.directory.where

    def refuse_dcp(self) -> None:
        if self.dcp:
            raise ValueError(
                f"{self.where} is a directory of torch.distributed.checkpoint, whose metadata is a pickle; load it "
                "into its model with trueshard.load(…, allow_pickle=True), and save that"
            )

    def ranges(self, key: str, begin: int, end: int) -> Iterator[tuple[Piece, int]]:
        """Yield where in files bytes ``begin`` to ``end`` of a tensor are, and each one's first byte in the tensor."""
        at = 0
        for piece in self.entries[key].pieces:
            length = piece.end - piece.begin
            low, high = max(begin, at), min(end, at + length)
            if low < high:
                yield Piece(piece.file, piece.begin + low - at, piece.begin + high - at), low
            at += length

    def _blocks(self, key: str, begin: int, end: int) -> Iterator[tuple[memoryview, int]]:
        """Yield bytes ``begin`` to ``end`` of a tensor in blocks, each with its distance from ``begin``."""
        for piece, where in self.ranges(key, begin, end):
            for at in range(piece.begin, piece.end, BLOCK):
                stop = min(at + BLOCK, piece.end)
                yield self.directory.read(piece.file, at, stop), where - begin + at - piece.begin
                self.directory.release(piece.file, at, stop)

    def checksum(self, key: str, begin: int, end: int) -> int:
        return functools.reduce(lambda value, block: crc32(block[0], value), self._blocks(key, begin, end), 0)

    def is_intact(self, key: str) -> bool:
        """Compare a tensor's bytes with its checksum; True if they agree, or there is none."""
        entry = self.entries[key]
        return entry.crc32 is None or self.checksum(key, 0, entry.nbytes) == entry.crc32

    def damaged(self, key: str, remedy: str) -> ValueError:
        files = ", ".join(self.entries[key].files)
        return ValueError(f"{self.where}/{files} is damaged: {key!r} does not have the bytes that were saved; {remedy}")

    def read_into(self, key: str, begin: int, local: torch.Tensor) -> None:
        """Fill ``local`` with the elements from byte ``begin`` of a tensor on, converted to its dtype."""
        dtype = dtype_of(self.entries[key].dtype)
        plain = local.is_contiguous()
        flat = local.detach().view(-1) if plain else torch.empty(local.numel(), dtype=local.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the memory is read-only; it is only read
            for data, at in self._blocks(key, begin, begin + local.numel() * dtype.itemsize):
                elements = torch.frombuffer(data, dtype=dtype)
                flat[at // dtype.itemsize :][: elements.numel()].copy_(elements)
        if not plain:
            local.copy_(flat.view(local.shape))

    def fill(self, key: str, tensor: torch.Tensor) -> None:
        """Fill this rank's shard of ``tensor``."""
        begin, _ = process_group.bytes_here(tensor, self.entries[key].nbytes)
        self.read_into(key, begin, _torch.local(tensor).detach())

    def fill_together(self, key: str, tensor: torch.Tensor, failures: list[Exception]) -> None:
        """Fill this rank's shard of ``tensor``, of which one replica reads it, and sends it to the others. Collective.

        An error is added to ``failures`` and not raised, since the others wait for the tensors that follow.
        """
        if isinstance(tensor, DTensor) and not has_one_run(tensor):
            rows = process_group.like_rows(tensor)
            self.fill_together(key, rows, failures)
            process_group.from_rows(rows, tensor)
            return
        local, turn = _torch.local(tensor).detach(), crc32(memoryview(key.encode()))
        groups = process_group.groups_of_replicas(tensor) if local.numel() else []
        readers = [dist.get_global_rank(group, turn % group.size()) for group in groups]
        if all(reader == dist.get_rank() for reader in readers):
            try:
                self.fill(key, tensor)
            except Exception as error:
                failures.append(error)
        if groups:
            data = local.contiguous()
            for group, reader in zip(groups, readers, strict=True):
                dist.broadcast(data.view(-1).view(torch.uint8), reader, group)
            if data is not local:
                local.copy_(data)

    def full_tensor(self, key: str) -> torch.Tensor:
        """Read a tensor into new memory on the CPU."""
        tensor = self.entries[key].empty()
        self.read_into(key, 0, tensor)
        return tensor

    def value(self, saved: Any) -> Any:
        """Rebuild a value of the manifest, with the tensors it refers to."""
        return join(saved, self.full_tensor)


def open_catalogue(path: str | os.PathLike[str]) -> Catalogue:
    """Open a checkpoint, a Hugging Face, PEFT or DCP directory, or a .safetensors file."""
    path = resolve_latest(path)
    if not is_url(path) and Path(path).is_file():
        file = Path(path)
        parent = LocalDirectory(file.parent, confined=False)
        return Catalogue(parent, parent.tensors(file.name), adapter=file.name.startswith("adapter_model"))
    directory = _open_directory(path)
    if directory.exists(MANIFEST):
        manifest = Manifest.parse(bytes(directory.read(MANIFEST)), f"{directory.where}/{MANIFEST}")
        for name, record in manifest.files.items():
            if (size := directory.size(name)) != record.size:
                held = [key for key, entry in manifest.tensors.items() if name in entry.files]
                more = f" and {len(held) - 1} more tensors" if held[1:] else ""
                raise ValueError(
                    f"{directory.where}/{name} is cut short or damaged: {size} bytes, not {record.size}"
                    + (f"; it holds {held[0]!r}{more}" if held else "")
                )
        return Catalogue(directory, manifest.tensors, manifest)
    directory = _open_directory(path, confined=False)
    if any(map(directory.exists, (".metadata", "pytorch_model_fsdp_0/.metadata"))):  # the latter: Accelerate
        return Catalogue(directory, {}, dcp=True)
    if any(map(directory.exists, ("optimizer.safetensors", "extra.safetensors"))):
        raise ValueError(
            f"{path} is a checkpoint whose {MANIFEST} is missing, without which only weights can be read: copy it from "
            "where the checkpoint was written, or load model.safetensors itself"
        )
    for stem in _STEMS:
        single, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
        files = [single] if directory.exists(single) else []
        if directory.exists(index):
            table = parse_json(directory.read(index), f"{directory.where}/{index}").get("weight_map")
            if not isinstance(table, dict):
                raise ValueError(f"{directory.where}/{index} is damaged: it has no weight_map")
            files = list(dict.fromkeys(map(str, table.values())))
        if files:
            entries = {key: entry for name in files for key, entry in directory.tensors(name).items()}
            return Catalogue(directory, entries, adapter=stem == "adapter_model")
    if not is_url(path) and Path(path, "checkpoints").is_dir():
        raise FileNotFoundError(
            f"{path} is a run's folder; its newest checkpoint is {Path(path, 'checkpoints', 'latest')}"
        )
    raise FileNotFoundError(
        f"{path} is no checkpoint: it has no {MANIFEST}, no model.safetensors (or its index), no "
        "adapter_model.safetensors, and no .metadata of torch.distributed.checkpoint"
    )


def _open_directory(path: str | os.PathLike[str], confined: bool = True) -> Directory:
    if is_url(path):
        return Directory(str(path))
    if not Path(path).is_dir():
        raise FileNotFoundError(f"no checkpoint is at {path}")
    return LocalDirectory(Path(path), confined)


def names_newest(path: str | os.PathLike[str]) -> bool:
    """True for ``…/latest``, which is a link or is not there; one that is there by that name is itself meant."""
    return os.path.basename(os.fspath(path)) == "latest" and (os.path.islink(path) or not os.path.exists(path))


def resolve_latest(path: str | os.PathLike[str]) -> Any:
    """Return ``path``, or for ``…/latest`` the newest checkpoint in ``…``."""
    if not names_newest(path):
        return path
    if os.path.exists(path):
        return Path(os.path.dirname(os.fspath(path)), os.readlink(path))
    folder = os.path.dirname(os.fspath(path)) or "."
    newest = latest(folder)
    if newest is None:
        raise FileNotFoundError(f"{folder} holds no complete checkpoint")
    return newest


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in ``directory``, by the time it was written; None if there is none.

    An interrupted save does not count, since it never got its name, nor does a checkpoint with a damaged manifest.
    """
    complete = []
    for path in Path(directory).glob(f"[!.]*/{MANIFEST}"):
        with contextlib.suppress(OSError, ValueError):  # damaged, or another rank is deleting it
            if not path.parent.is_symlink():
                manifest = Manifest.parse(path.read_bytes(), str(path))
                complete.append((str(manifest.about.get("written", "")), path.stat().st_mtime_ns, path.parent))
    return max(complete)[2] if complete else None
