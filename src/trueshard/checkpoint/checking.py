"""``check``: read every byte of a checkpoint, without the model."""

from __future__ import annotations

import os
from dataclasses import dataclass

from trueshard.checkpoint.catalogue import Catalogue, open_catalogue
from trueshard.checkpoint.format import MANIFEST, crc32, is_marked


class DamagedCheckpoint(ValueError):
    """A checkpoint does not hold what was saved; ``problems`` names tensors and files."""

    def __init__(self, where: str, problems: list[str]) -> None:
        self.problems = problems
        shown = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if problems[10:] else "")
        super().__init__(f"{where} is damaged: {shown}. Use an earlier checkpoint")


@dataclass(frozen=True)
class Checked:
    """The totals of an intact checkpoint."""

    where: str
    files: int
    tensors: int
    bytes: int
    unchecked: int
    """Tensors without a checksum: another program's."""

    def __str__(self) -> str:
        less = f", {self.unchecked} of them without a checksum to compare" if self.unchecked else ""
        return f"{self.where}: {self.files} files, {self.tensors} tensors{less}, {self.bytes:,} bytes: all well"


def check(path: str | os.PathLike[str]) -> Checked:
    """Read every byte of a checkpoint and compare it with what was saved.

    Args:
        path: a checkpoint; ``…/latest`` is the newest one beside it. Or a Hugging Face directory, whose structure is
            checked.

    Raises:
        DamagedCheckpoint: something is missing or differs; ``problems`` names tensors and files.
        FileNotFoundError: no checkpoint is there.
    """
    try:
        catalogue = open_catalogue(path)
    except (FileNotFoundError, ValueError) as error:
        if isinstance(error, ValueError) or "incomplete" in str(error):
            raise DamagedCheckpoint(str(path), [str(error)]) from error
        raise
    catalogue.refuse_dcp()
    manifest, directory = catalogue.manifest, catalogue.directory
    files = {file for entry in catalogue.entries.values() for file in entry.files}
    problems = []
    for name, record in (manifest.files if manifest is not None else {}).items():
        own = directory.read(name, 0, record.size if record.header is None else record.header)
        if crc32(own) != record.crc32:
            what = "the header of " if record.header is not None else ""
            problems.append(f"{what}{name} does not have the bytes that were saved")
    problems += _exchanged(catalogue) if not problems else []
    for key, entry in catalogue.entries.items():
        if not catalogue.is_intact(key):
            problems.append(f"tensor {key!r} in {', '.join(entry.files)} does not have the bytes that were saved")
    if manifest is not None:
        files |= {*manifest.files, MANIFEST}
    elif any(is_marked(directory.header(file)) for file in files):
        problems.append(f"{MANIFEST} is missing: the files are those of a checkpoint")
    if problems:
        raise DamagedCheckpoint(catalogue.where, problems)
    size = sum(directory.size(file) for file in files)
    unchecked = sum(entry.crc32 is None for entry in catalogue.entries.values())
    return Checked(catalogue.where, len(files), len(catalogue.entries), size, unchecked)


def _exchanged(catalogue: Catalogue) -> list[str]:
    """Return a problem for each tensor whose place belongs to another one by the file's own header."""
    name_at: dict[str, dict[tuple[int, int], str]] = {}
    usual = {key: {key, key.partition("/")[2], *entry.names} for key, entry in catalogue.entries.items()}
    known = {name for names in usual.values() for name in names}
    problems = []
    for key, entry in catalogue.entries.items():
        for piece in entry.pieces:
            if piece.file not in name_at:
                stored = catalogue.directory.tensors(piece.file)
                name_at[piece.file] = {(e.pieces[0].begin, e.pieces[0].end): name for name, e in stored.items()}
            name = name_at[piece.file].get((piece.begin, piece.end))
            if piece.begin == piece.end or name in usual[key]:
                continue
            if name is None or name in known:
                problems.append(f"tensor {key!r} is not where the manifest says: {piece.file} has {name!r} there")
    return problems
