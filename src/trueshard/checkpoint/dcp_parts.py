"""What lies on disk in a directory of torch.distributed.checkpoint (DCP), and how it is read.

Torch's own reader reads the files, and each rank only what it holds. Its planner is left out: it wants the ranks to
talk to one another, where one that fails would leave the others waiting. Torch writes no checksums of its own, but each
tensor is a zip archive, which has them.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from trueshard.checkpoint.catalogue import Catalogue
from trueshard.checkpoint.manifest import check_name

PARTS = ("pytorch_model_fsdp_*", "optimizer_*")
"""The folders of Accelerate's ``save_state``: each is a directory of its own."""


class Part:
    """One directory with a ``.metadata``.

    Raises:
        ValueError: it is damaged; the message names file and tensor.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reader = FileSystemReader(directory)
        try:
            self.metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self.metadata, True)
            self.saved = dict(self.metadata.state_dict_metadata)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ValueError(
                f"{directory}/.metadata is damaged ({type(error).__name__}: {error}); load an earlier checkpoint"
            ) from error
        paths = self.metadata.planner_data or {}
        self.paths: dict[str, tuple[Any, ...]] = {key: tuple(paths.get(key, (key,))) for key in self.saved}
        """The keys that led to each value in the nested dicts that were saved; one, where that is not known."""
        self._check_files()

    def _check_files(self) -> None:
        sizes: dict[str, int] = {}
        for index, info in self.metadata.storage_data.items():
            name = info.relative_path
            if name not in sizes:
                check_name(name, f"{self.directory}/.metadata")
                path = self.directory / name
                if not path.is_file():
                    raise FileNotFoundError(f"{self.directory} has no file {name!r}; it is incomplete")
                sizes[name] = path.stat().st_size
            if info.offset + info.length > sizes[name]:
                raise ValueError(f"{self.directory}/{name} is cut short: {index.fqn!r} ends after byte {sizes[name]}")
        for key, saved in self.saved.items():
            chunks = [c.offsets for c in saved.chunks] if isinstance(saved, TensorStorageMetadata) else [None]
            for offset in chunks:
                if MetadataIndex(key, offset) not in self.metadata.storage_data:
                    raise ValueError(f"{self.directory}/.metadata is damaged: it does not say where {key!r} is")

    def values(self, keys: Iterable[str]) -> dict[str, Any]:
        """Unpickle what is no tensor."""
        nothing = torch.Size((0,))
        wanted = [
            ReadItem(LoadItemType.BYTE_IO, MetadataIndex(key), nothing, MetadataIndex(key), nothing, nothing)
            for key in keys
        ]
        planner = _Values()
        self._read(wanted, planner)
        return planner.found

    def fill(self, key: str, offsets: tuple[int, ...], local: torch.Tensor) -> None:
        """Fill ``local``, whose first element is at ``offsets`` of the saved tensor; converts to its dtype."""
        self._read(self._items(key, offsets, tuple(local.shape)), _Into(local))

    def _items(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[ReadItem]:
        here = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        saved = self.saved[key]
        assert isinstance(saved, TensorStorageMetadata)
        items: list[ReadItem] = create_read_items_for_chunk_list(key, saved, [here])
        if sum(math.prod(item.lengths) for item in items) != math.prod(sizes):
            raise ValueError(f"{self.directory}/.metadata is damaged: the parts of {key!r} do not make it up")
        return items

    def _read(self, items: list[ReadItem], planner: DefaultLoadPlanner) -> None:
        try:
            self._reader.read_data(LoadPlan(items), planner).wait()
        except Exception as error:  # whatever pickle and zip raise on damaged bytes
            files = sorted({self._info(item).relative_path for item in items})
            names = [item.storage_index.fqn for item in items]
            raise ValueError(
                f"{self.directory}/{files[0]} does not read at {names[0]!r}"
                f"{f' or {len(names) - 1} more' if names[1:] else ''} ({type(error).__name__}: {error})"
            ) from error

    def _info(self, item: ReadItem) -> Any:
        return self.metadata.storage_data[item.storage_index]

    def verify(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Raise ``ValueError`` if the bytes of what ``fill`` reads are not those that torch wrote."""
        for item in self._items(key, offsets, sizes):
            info = self._info(item)
            if getattr(info, "transform_descriptors", None):
                continue  # compressed or encrypted: what undoes that has checks of its own
            with open(self.directory / info.relative_path, "rb") as file:
                file.seek(info.offset)
                data = io.BytesIO(file.read(info.length))
            try:
                damaged = zipfile.ZipFile(data).testzip()
            except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError) as error:
                damaged = str(error)
            if damaged is not None:
                raise ValueError(
                    f"{self.directory}/{info.relative_path} is damaged: {key!r} does not have the bytes that were "
                    f"saved ({damaged}); load an earlier checkpoint"
                )


class _Values(DefaultLoadPlanner):
    """Takes in what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=False)


class _Into(DefaultLoadPlanner):
    """Takes in the parts of one tensor."""

    def __init__(self, local: torch.Tensor) -> None:
        super().__init__()
        self._local = local

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        found = self._local
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            found = found.narrow(dim, start, length)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It is where it belongs."""


@dataclass
class DcpCatalogue(Catalogue):
    """The tensors of DCP directories, under the keys that a checkpoint of ours would have."""

    saved: dict[str, tuple[Part, str]] = field(default_factory=dict)
    """Key → where it is saved, and its key there."""

    def read_into(self, key: str, begin: int, local: torch.Tensor) -> None:
        """Fill ``local``, whose elements are those from byte ``begin`` on; converts to its dtype. No gradient mode."""
        if local.numel():
            part, name = self.saved[key]
            part.fill(name, self._offsets(key, begin), local.detach())

    def verify(self, key: str, start: int, rows: int) -> None:
        """Raise ``ValueError`` if the bytes of ``rows`` rows from row ``start`` on are not those that torch wrote."""
        part, name = self.saved[key]
        shape = self.entries[key].shape
        if math.prod(shape) and rows:
            part.verify(name, (start, *[0] * (len(shape) - 1)) if shape else (), (rows, *shape[1:]) if shape else ())

    def _offsets(self, key: str, begin: int) -> tuple[int, ...]:
        entry = self.entries[key]
        if not entry.shape:
            return ()
        width = entry.nbytes // entry.shape[0]
        return (begin // width, *[0] * (len(entry.shape) - 1))


def parts_in(directory: Path) -> list[Part]:
    """The directory itself, or the parts that Accelerate makes in it."""
    if (directory / ".metadata").is_file():
        return [Part(directory)]
    found = [path for pattern in PARTS for path in directory.glob(pattern) if (path / ".metadata").is_file()]
    return [Part(path) for path in sorted(found, key=lambda path: (path.name.rpartition("_")[0], _number(path)))]


def _number(path: Path) -> int:
    tail = path.name.rpartition("_")[2]
    return int(tail) if tail.isdigit() else 0
