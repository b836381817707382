"""A report as one HTML file, in the frame and the style of the planner's page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trueshard.planner.showing.frame import SCRIPT, STYLE, framed
from trueshard.replacing import replace_text
from trueshard.verification.report import Verified, headline, verdict

HERE = "trueshard.verification"


def write_page(report: Verified, path: Path) -> None:
    """Write the page; a file that is there is replaced when the new one is complete.

    Raises:
        OSError: it cannot be written.
    """
    replace_text(path, page(report))


def page(report: Verified) -> str:
    """The page as text."""
    return framed(
        title=f"{report.setting['name']}: {verdict(report)}",
        text=str(report),
        data=_data(report),
        main=(HERE, "page.html"),
        styles=[STYLE, (HERE, "page.css")],
        scripts=[SCRIPT, (HERE, "page.js")],
    )


def _data(report: Verified) -> dict[str, Any]:
    name, _, settings = headline(report.setting).partition("\n")
    return report.as_dict() | {"headline": name, "settings": settings, "verdict": verdict(report)}
