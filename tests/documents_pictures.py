"""Writes docs/pictures/house.svg, the floors of the package, from the table that the tests hold: `make tables`.

It looks right on a light and on a dark page: an ``<img>`` follows the reader's colour scheme by a media query. The
other pictures are drawn by hand, in the same colours.
"""

from __future__ import annotations

from pathlib import Path

from architecture_floors import FLOORS

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "docs" / "pictures" / "house.svg"
PACKAGES = {path.name for path in (ROOT / "src" / "trueshard").iterdir() if path.is_dir()}
HEIGHT = 34
"""of a floor, in pixels"""
TITLE = "The floors of the package; a file imports from floors below it"
STYLE = (
    "text{font:14px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}.faint{font-size:12px}"
    ".code{font-family:ui-monospace,'DejaVu Sans Mono',monospace;font-size:13px}.arrow{fill:none;stroke-width:1.5}"
    ".here{fill:#dbe7fb;stroke:#4a6fb5}.plain{fill:#eef0f3;stroke:#8a919c}.code{fill:#20242b}"
    ".faint,.tip{fill:#5c6470}.arrow{stroke:#5c6470}"
    "@media (prefers-color-scheme:dark){.here{fill:#23395f;stroke:#86a9e8}.plain{fill:#2f343d;stroke:#8f97a3}"
    ".code{fill:#e4e7ec}.faint,.tip{fill:#a4acb8}.arrow{stroke:#a4acb8}}"
)


def house() -> str:
    """The floors from the top down, a box for each file or folder."""
    bottom = HEIGHT * len(FLOORS)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {bottom + 30}" width="860" height="{bottom + 30}" '
        f'role="img" aria-label="{TITLE}">',
        f"<title>{TITLE}</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>',
    ]
    for row, names in enumerate(FLOORS):
        width, y = 800 / len(names), 10 + row * HEIGHT
        for column, name in enumerate(names):
            x, kind = 50 + column * width, "here" if name in PACKAGES else "plain"
            box = f'x="{x + 2:g}" y="{y + 2}" width="{width - 4:g}" height="{HEIGHT - 4}" rx="3"'
            middle = f'x="{x + width / 2:g}" y="{y + HEIGHT / 2 + 5:g}" text-anchor="middle"'
            lines += [f'<rect class="{kind}" {box}/>', f'<text class="code" {middle}>{name}</text>']
    lines.append(f'<path class="arrow" d="M25 20L25 {bottom + 4}" marker-end="url(#head)"/>')
    lines.append(f'<text class="faint" x="50" y="{bottom + 26}">imports run downwards; blue: a folder</text>')
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    HOUSE.write_text(house(), encoding="utf-8")
