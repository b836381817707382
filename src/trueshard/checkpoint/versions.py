"""Reads a manifest of any format that there ever was."""

from __future__ import annotations

from trueshard.checkpoint import format1
from trueshard.checkpoint.jsontext import table_of
from trueshard.checkpoint.manifest import FORMAT, Manifest


def manifest_of(data: bytes, where: str) -> Manifest:
    """The manifest in ``data``, not validated.

    Raises:
        ValueError: damaged, or of a newer format; the message begins with ``where``.
    """
    table = table_of(data, where)
    try:
        version = table["format"]
        if type(version) is not int or version < 1:
            raise TypeError(f"format {version!r}")
        if version > FORMAT:
            raise ValueError(f"{where}: format {version} is newer than {FORMAT}; update trueshard")
        return format1.upgraded(table, where) if version == 1 else Manifest.of(table, data, where)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} is damaged ({error}); use an earlier checkpoint") from None
