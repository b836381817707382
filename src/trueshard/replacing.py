"""Files that are there whole or as they were: written beside their place, and renamed."""

from __future__ import annotations

import contextlib
from pathlib import Path


def replace_text(file: Path, text: str) -> None:
    """Put ``text``, as UTF-8, in the place of ``file``; if that fails, nothing is changed and nothing left beside."""
    scratch = file.with_name(f"{file.name}.new")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(file)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
