"""Rows of a long benchmark on disk: a run that was cut short goes on where it was, as long as no code has changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LIBRARIES = ("torch", "transformers", "peft")


def code_digest() -> str:
    """Return a hash of all that rows are computed by: the package, the benchmarks, and versions of libraries."""
    made = hashlib.sha256(" ".join(map(version, _LIBRARIES)).encode())
    for folder in ("src", "benchmarks"):
        for file in sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".toml")):
            made.update(file.read_bytes())
    return made.hexdigest()


class KeptRows:
    """Rows by a key in words, in one file; those of other code (``digest``) are forgotten."""

    def __init__(self, file: Path, digest: str) -> None:
        self.file, self.digest = file, digest
        kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self.rows: dict[str, Any] = kept.get("rows", {}) if kept.get("digest") == digest else {}

    def row(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the row that is kept under a key, else the one that ``make`` returns, which is kept."""
        if key not in self.rows:
            self.rows[key] = json.loads(json.dumps(make()))
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps({"digest": self.digest, "rows": self.rows}), encoding="utf-8")
        result: dict[str, Any] = self.rows[key]
        return result
