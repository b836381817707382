"""Read and write directories of torch.distributed.checkpoint (DCP).

Torch's own reader reads the files, and each rank only what it holds. Its planner is left out: it wants the ranks to
communicate, and if one failed, the others would wait. Torch's own ``save`` writes, with one tensor in memory at a time.
"""

from __future__ import annotations

import io
import math
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from trueshard.checkpoint.catalogue import Catalogue
from trueshard.checkpoint.format import check_name, join, located

if TYPE_CHECKING:
    from trueshard.checkpoint.exporting import ExportSource

_ACCELERATE = ("pytorch_model_fsdp_*", "optimizer_*")  # folders of Accelerate's ``save_state``: each is a DCP directory


class DcpDirectory:
    """A directory with a ``.metadata``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reader = dcp.FileSystemReader(directory)
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
        # Key → its path in the nested dicts that were saved, or (key,) if not recorded.
        paths = self.metadata.planner_data or {}
        self.paths: dict[str, tuple[Any, ...]] = {key: tuple(paths.get(key, (key,))) for key in self.saved}
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
        """Unpickle values that are not tensors."""
        nothing, where = torch.Size((0,)), map(MetadataIndex, keys)
        wanted = [ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing) for index in where]
        receiver = _Receiver()
        self._read(wanted, receiver)
        return receiver.found

    def fill(self, key: str, offsets: tuple[int, ...], local: torch.Tensor) -> None:
        """Fill ``local``, whose first element is at ``offsets`` of the saved tensor, converted to its dtype."""
        self._read(self._items(key, offsets, tuple(local.shape)), _Receiver(local))

    def _items(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[ReadItem]:
        here = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        saved = self.saved[key]
        assert isinstance(saved, TensorStorageMetadata)
        items: list[ReadItem] = create_read_items_for_chunk_list(key, saved, [here])
        if sum(math.prod(item.lengths) for item in items) != math.prod(sizes):
            raise ValueError(f"{self.directory}/.metadata is damaged: the parts of {key!r} do not make it up")
        return items

    def _read(self, items: list[ReadItem], receiver: dcp.DefaultLoadPlanner) -> None:
        try:
            self._reader.read_data(LoadPlan(items), receiver).wait()
        except Exception as error:  # whatever pickle and zip raise on damaged bytes
            files = sorted({self.metadata.storage_data[item.storage_index].relative_path for item in items})
            names = [item.storage_index.fqn for item in items]
            raise ValueError(
                f"{self.directory}/{files[0]} does not read at {names[0]!r}"
                f"{f' or {len(names) - 1} more' if names[1:] else ''} ({type(error).__name__}: {error})"
            ) from error

    def verify(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Raise ``ValueError`` if a zip archive that holds this part of a tensor is damaged."""
        for item in self._items(key, offsets, sizes):
            info: Any = self.metadata.storage_data[item.storage_index]
            if getattr(info, "transform_descriptors", None):
                continue  # compressed or encrypted, which has checks of its own
            with open(self.directory / info.relative_path, "rb") as file:
                file.seek(info.offset)
                data = io.BytesIO(file.read(info.length))
            try:
                damaged = zipfile.ZipFile(data).testzip()
            except Exception as error:  # whatever zip raises on damaged bytes
                damaged = str(error)
            if damaged is not None:
                raise ValueError(
                    f"{self.directory}/{info.relative_path} is damaged: {key!r} does not have the bytes that were "
                    f"saved ({damaged}); load an earlier checkpoint"
                )


def dcp_directories(directory: Path) -> list[DcpDirectory]:
    """Open the directory itself, or the DCP directories that Accelerate makes in it."""
    if (directory / ".metadata").is_file():
        return [DcpDirectory(directory)]
    found = [path for pattern in _ACCELERATE for path in directory.glob(pattern) if (path / ".metadata").is_file()]
    in_order = sorted(found, key=lambda path: (path.name.rpartition("_")[0], len(path.name), path.name))
    return [DcpDirectory(path) for path in in_order]


class _Receiver(dcp.DefaultLoadPlanner):
    """Receives the parts of one tensor, ``local``, or values that are not tensors."""

    def __init__(self, local: torch.Tensor | None = None) -> None:
        super().__init__()
        self._local = local
        self.found: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=False)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        assert self._local is not None
        return self._local


@dataclass
class DcpCatalogue(Catalogue):
    """The tensors of DCP directories, under the keys that ``save`` would give them."""

    saved: dict[str, tuple[DcpDirectory, str]] = field(default_factory=dict)  # key → (directory, key in it)

    def read_into(self, key: str, begin: int, local: torch.Tensor) -> None:
        if local.numel():
            directory, name = self.saved[key]
            directory.fill(name, self._offsets(key, begin), local.detach())

    def checksum(self, key: str, begin: int, end: int) -> int:
        """Raise ``ValueError`` if these bytes of a tensor are damaged; there is no checksum to return but 0."""
        directory, name = self.saved[key]
        shape = tuple(self.entries[key].shape)
        rows = (end - begin) * shape[0] // self.entries[key].nbytes if shape else 0
        directory.verify(name, self._offsets(key, begin), (rows, *shape[1:]) if shape else ())
        return 0

    def _offsets(self, key: str, begin: int) -> tuple[int, ...]:
        entry = self.entries[key]
        if not entry.shape:
            return ()
        return (begin * entry.shape[0] // entry.nbytes, *[0] * (len(entry.shape) - 1))


def write_dcp(source: ExportSource, directory: Path, dtype: torch.dtype | None) -> None:
    """Write the model as ``model.<name>`` and optimizers as ``optimizer.state.<name>.<key>``, as torch names them."""
    catalogue = source.catalogue
    key_of: dict[str, str] = {}
    content: dict[str, Any] = {"model": {}}
    for key, entry in source.converted(dtype).items():
        for name in entry.names if catalogue.manifest is not None else [source.name(key)]:
            content["model"][name] = entry.empty("meta")
            key_of[f"model.{name}"] = key
    if catalogue.manifest is not None and not source.folder:
        for prefix, record in catalogue.manifest.optimizers.items():
            saved = _optimizer_content(catalogue, prefix.replace("/", "."), record, key_of)
            if "/" in prefix:
                content.setdefault("optimizer", {})[prefix.partition("/")[2]] = saved
            else:
                content["optimizer"] = saved
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no other process takes part
        try:
            # Nothing is copied ahead: a tensor's memory is given up when the next is asked for.
            writer = dcp.FileSystemWriter(directory, per_thread_copy_ahead=0)
            dcp.save(content, storage_writer=writer, planner=_FromFiles(source, key_of), no_dist=True)
        except CheckpointException as failed:  # a BaseException
            raise next(iter(failed.failures.values()))[0] from None


class _FromFiles(dcp.DefaultSavePlanner):
    """Reads a tensor when it is to be written, and frees it before the next, since torch's writer keeps them all."""

    def __init__(self, source: ExportSource, key_of: Mapping[str, str]) -> None:
        super().__init__()
        self._source, self._key_of = source, key_of
        self._before: torch.Tensor | None = None

    def resolve_data(self, write_item: Any) -> Any:
        key = self._key_of.get(write_item.index.fqn)
        if key is None:
            return super().resolve_data(write_item)
        if self._before is not None:
            self._before.untyped_storage().resize_(0)
        self._source.check(key)
        self._before = self._source.catalogue.whole(key).to(write_item.tensor_data.properties.dtype)
        return self._before


def _optimizer_content(catalogue: Catalogue, root: str, record: Any, key_of: dict[str, str]) -> dict[str, Any]:
    """Return an optimizer as ``get_optimizer_state_dict`` does, with meta tensors; add their keys to ``key_of``."""

    def on_meta(value: Any, *where: Any) -> Any:
        for path, key in located(value):
            key_of[".".join(map(str, (root, *where, *path)))] = key
        return join(value, lambda key: catalogue.entries[key].empty("meta"))

    states = record["state"].items()
    groups = [
        {"params": group["params"], **on_meta(group["settings"], "param_groups", g)}
        for g, group in enumerate(record["groups"])
    ]
    shown = {name: on_meta(value, "state", name) for name, value in states if not name.startswith("@")}
    return {"state": shown, "param_groups": groups}
