"""What the kernel counts of this process: memory and its peak, what it read, what it has mapped. Linux only."""

from __future__ import annotations

from pathlib import Path


def resident() -> int:
    """Bytes in memory now: the process's own, and the pages of files that it has mapped and touched."""
    return _status("VmRSS")


def peak() -> int:
    """The largest that ``resident()`` has been, since the process began or ``forget_peak()``."""
    return _status("VmHWM")


def forget_peak() -> None:
    """From here on ``peak()`` counts anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def bytes_read() -> int:
    """Bytes that ``read`` and its kin returned to this process so far; through a map, unseen."""
    return _number("/proc/self/io", "rchar")


def mapped(folder: Path) -> list[tuple[int, int, int]]:
    """Where files below ``folder`` are mapped in this process: (begin, end, bytes that have been touched)."""
    ranges: list[tuple[int, int, int]] = []
    inside = False
    for line in _lines("/proc/self/smaps"):
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            # Rights, offset, device and inode come before the path, which may have blanks.
            path = rest.split(maxsplit=4)[4:]
            inside = bool(path) and path[0].startswith(f"{folder.resolve()}/")
            if inside:
                begin, end = (int(address, 16) for address in first.split("-"))
        elif inside and first == "Rss:":
            ranges.append((begin, end, int(rest.split()[0]) * 1024))
    return ranges


def _status(field: str) -> int:
    return _number("/proc/self/status", field) * 1024


def _number(file: str, field: str) -> int:
    return next(int(line.split()[1]) for line in _lines(file) if line.startswith(f"{field}:"))


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RuntimeError(f"{file} cannot be read ({error}); this benchmark needs Linux") from error
