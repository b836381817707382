"""CRC-32 (ISO 3309, as in zlib, gzip and PNG), of pieces that are put together afterwards.

Each rank takes the checksum of the bytes it has; ``combine`` makes of them that of the whole, so a tensor's checksum
does not depend on how many ranks wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable

from zlib_ng import zlib_ng

BLOCK = 8 << 20
"""bytes that are looked at in one go: the interpreter's lock is free meanwhile"""


def crc32(data: memoryview, value: int = 0) -> int:
    """The checksum of ``data``, going on from that of what comes before it."""
    for begin in range(0, len(data), BLOCK):
        value = zlib_ng.crc32(data[begin : begin + BLOCK], value)
    return value


def joined(parts: Iterable[tuple[int, int]]) -> int:
    """The checksum of pieces (checksum, bytes) behind one another."""
    value = 0
    for checksum, length in parts:
        value = zlib_ng.crc32_combine(value, checksum, length)
    return int(value)
