"""Build pages that hold everything they need: their content security policy forbids every request.

Where no script runs, a page shows the same as text. No charting library: inlined, it is fifty times as large.
"""

from __future__ import annotations

import html
import json
from importlib import resources
from string import Template
from typing import Any

_SHARED = "trueshard.planner.report"
"""Package of what all pages share: colours, tables, switches, and small parts of drawing."""


def framed(title: str, text: str, data: Any, package: str, *files: str, is_served: bool = False) -> str:
    """Return a page.

    Args:
        title: of its window.
        text: shown without scripts.
        data: drawn by the scripts: plain data, finite numbers only.
        package: the one that holds ``files``.
        files: the content of `<main>` as HTML, then CSS and JavaScript beyond the shared ones; scripts run in order.
        is_served: it may ask the server that it comes from, and nobody else.
    """
    plain = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    def local(ending: str) -> list[str]:
        return [_text(package, name) for name in files if name.endswith(ending)]

    return Template(_text(_SHARED, "frame.html")).substitute(
        title=html.escape(title),
        connect="; connect-src 'self'" if is_served else "",
        text=html.escape(text),
        style="".join([_text(_SHARED, "page.css"), *local(".css")]),
        main="".join(local(".html")),
        script="\n".join([_text(_SHARED, "page.js"), *local(".js")]),
        data=plain.replace("<", "\\u003c"),
    )


def _text(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
