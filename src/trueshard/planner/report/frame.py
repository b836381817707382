"""Build pages that hold everything they need: their content security policy forbids every request.

Where no script runs, a page shows the same as text. No charting library: inlined, it is fifty times as large.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any

File = tuple[str, str]
"""A file of a package: (package, name)."""

SHOWING = "trueshard.planner.report"
"""Package of what all pages share: colours, tables, switches, and small parts of drawing."""


def framed(title: str, text: str, data: Any, main: File, scripts: Sequence[File], styles: Sequence[File] = ()) -> str:
    """Return a page.

    Args:
        title: of its window.
        text: shown without scripts.
        data: drawn by the scripts: plain data, finite numbers only.
        main: file with the content of `<main>`.
        scripts: its JavaScript files besides the shared ones, in the order in which they run.
        styles: its CSS files besides the shared ones.
    """
    plain = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Template(_text((SHOWING, "frame.html"))).substitute(
        title=html.escape(title),
        text=html.escape(text),
        style="".join(map(_text, [(SHOWING, "page.css"), *styles])),
        main=_text(main),
        script="\n".join(map(_text, [(SHOWING, "page.js"), *scripts])),
        data=plain.replace("<", "\\u003c"),
    )


def _text(file: File) -> str:
    package, name = file
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
