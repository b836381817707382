"""Text for a terminal: columns, and bytes as a person reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def size(count: float) -> str:
    """Bytes in a unit that is easy to read."""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Lines of columns below a head; ``right``: which of them stand to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    align: list[Callable[[str, int], str]] = [str.rjust if i in right else str.ljust for i in range(len(head))]
    cells = [head, ["-" * width for width in widths], *rows]
    return ["  ".join(align[i](row[i], widths[i]) for i in range(len(head))).rstrip() for row in cells]
