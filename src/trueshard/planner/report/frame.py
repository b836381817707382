"""Pages that hold everything they need: their content security policy forbids every request.

A page is drawn by its own few hundred lines of script, since a charting library inlined is fifty times as large as all
that it shows. Where no script runs, it shows the same as text.
"""

from __future__ import annotations

import html
import json
from importlib import resources
from string import Template
from typing import Any

File = tuple[str, str]
"""A file beside the code: its package, and its name."""

SHOWING = "trueshard.planner.report"
STYLE: File = (SHOWING, "page.css")
SCRIPT: File = (SHOWING, "page.js")
"""What pages share: colours, tables and switches, and the small parts of drawing."""


def framed(title: str, text: str, data: Any, main: File, styles: list[File], scripts: list[File]) -> str:
    """A whole page.

    Args:
        title: of its window.
        text: what is shown without scripts.
        data: what the scripts draw, as plain data; finite numbers only.
        main: the file with what is between `<main>` and `</main>`.
        styles: CSS files.
        scripts: JavaScript files, in the order in which they run.
    """
    plain = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Template(_text((SHOWING, "frame.html"))).substitute(
        title=html.escape(title),
        text=html.escape(text),
        style="".join(map(_text, styles)),
        main=_text(main),
        script="\n".join(map(_text, scripts)),
        data=plain.replace("<", "\\u003c"),
    )


def _text(file: File) -> str:
    package, name = file
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
