"""``check``: every byte of a checkpoint, without the model."""

from __future__ import annotations

import os
from dataclasses import dataclass

from trueshard.checkpoint.catalogue import Catalogue, open_catalogue
from trueshard.checkpoint.checksum import crc32
from trueshard.checkpoint.header import header_of, read_header
from trueshard.checkpoint.manifest import MANIFEST
from trueshard.checkpoint.tensorfile import is_marked


class DamagedCheckpoint(ValueError):
    """A checkpoint does not hold what was saved."""

    def __init__(self, where: str, problems: list[str]) -> None:
        self.problems = problems
        shown = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if problems[10:] else "")
        super().__init__(f"{where} is damaged: {shown}. Use an earlier checkpoint")


@dataclass(frozen=True)
class Checked:
    """What was checked, and found well."""

    where: str
    files: int
    tensors: int
    bytes: int
    unchecked: int
    """Tensors without a checksum: of an older format, or of another program."""

    def __str__(self) -> str:
        less = f", {self.unchecked} of them without a checksum to compare" if self.unchecked else ""
        return f"{self.where}: {self.files} files, {self.tensors} tensors{less}, {self.bytes:,} bytes: all well"


def check(path: str | os.PathLike[str]) -> Checked:
    """Read every byte of a checkpoint and compare it with what was saved.

    Args:
        path: a checkpoint; ``…/latest`` is the newest one beside it. Or a Hugging Face directory, of which the
            structure is checked.

    Returns:
        What was checked.

    Raises:
        DamagedCheckpoint: something is missing or differs; ``problems`` names tensors and files.
        FileNotFoundError: no checkpoint is there.
    """
    from trueshard.checkpoint.reader import latest_in

    try:
        catalogue = open_catalogue(latest_in(path))
    except FileNotFoundError as error:
        if "incomplete" in str(error):
            raise DamagedCheckpoint(str(path), [str(error)]) from error
        raise
    except ValueError as error:
        raise DamagedCheckpoint(str(path), [str(error)]) from error
    if catalogue.dcp:
        raise ValueError(
            f"{path} is a directory of torch.distributed.checkpoint: its metadata is a pickle, and it has no checksums "
            "to compare; load() reads it with allow_pickle=True"
        )
    problems = _problems(catalogue) + _lost_manifest(catalogue)
    if problems:
        raise DamagedCheckpoint(catalogue.where, problems)
    manifest = catalogue.manifest
    files = {piece.file for entry in catalogue.entries.values() for piece in entry.pieces}
    files |= set(manifest.files) | {MANIFEST} if manifest is not None else set()
    size = sum(catalogue.store.size(file) for file in files)
    unchecked = sum(entry.crc32 is None for entry in catalogue.entries.values())
    return Checked(catalogue.where, len(files), len(catalogue.entries), size, unchecked)


def _exchanged(catalogue: Catalogue) -> list[str]:
    """Where the files' own headers have another tensor than the manifest says."""
    headers: dict[str, dict[tuple[int, int], str]] = {}
    usual = {key: {key, key.partition("/")[2], *entry.names} for key, entry in catalogue.entries.items()}
    owner_of = {name: key for key, names in usual.items() for name in names}
    problems = []
    for key, entry in catalogue.entries.items():
        for piece in entry.pieces:
            if piece.file not in headers:
                slots = read_header(catalogue.store, piece.file)
                headers[piece.file] = {(slot.begin, slot.end): name for name, slot in slots.items()}
            name = headers[piece.file].get((piece.begin, piece.end))
            if piece.begin == piece.end or name in usual[key]:
                continue
            if name is None or name in owner_of:
                problems.append(f"tensor {key!r} is not where the manifest says: {piece.file} has {name!r} there")
    return problems


def _lost_manifest(catalogue: Catalogue) -> list[str]:
    files = {piece.file for entry in catalogue.entries.values() for piece in entry.pieces}
    marked = catalogue.manifest is None and any(is_marked(header_of(catalogue.store, file)) for file in files)
    return [f"{MANIFEST} is missing: the files are those of a checkpoint"] if marked else []


def _problems(catalogue: Catalogue) -> list[str]:
    problems = []
    manifest, store = catalogue.manifest, catalogue.store
    for name, record in (manifest.files if manifest is not None else {}).items():
        begins = store.read(name, 0, record.size if record.header is None else record.header)
        if crc32(begins) != record.crc32:
            what = "the header of " if record.header is not None else ""
            problems.append(f"{what}{name} does not have the bytes that were saved")
    problems += _exchanged(catalogue) if not problems else []
    for key, entry in catalogue.entries.items():
        if entry.crc32 is not None and catalogue.checksum(key, 0, entry.nbytes) != entry.crc32:
            files = ", ".join(dict.fromkeys(piece.file for piece in entry.pieces))
            problems.append(f"tensor {key!r} in {files} does not have the bytes that were saved")
    return problems
