"""Rectangles, lines and words as an SVG file that looks right on a light and on a dark page.

- An ``<img>`` follows the reader's colour scheme by a media query; the pages do the same (``mkdocs.yml``).
- The background is the page's. Colours are named by what they stand for, and each pairs with readable words.
"""

from __future__ import annotations

from html import escape

#: What a colour stands for → (fill, line), light and dark.
COLOURS = {
    "here": (("#dbe7fb", "#4a6fb5"), ("#23395f", "#86a9e8")),
    "other": (("#fbe6d4", "#b5703a"), ("#573519", "#e3a777")),
    "third": (("#dcf0df", "#4d8a58"), ("#1f4428", "#86c493")),
    "fourth": (("#ecdff6", "#8259a8"), ("#402a56", "#bd97e0")),
    "plain": (("#eef0f3", "#8a919c"), ("#2f343d", "#8f97a3")),
    "strong": (("#4a6fb5", "#4a6fb5"), ("#86a9e8", "#86a9e8")),
}
WORDS = ("#20242b", "#e4e7ec")
FAINT = ("#5c6470", "#a4acb8")


class Drawing:
    """A picture of `width` × `height` pixels; `title` is what a screen reader says."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str = "plain", words: str = "") -> None:
        """A rectangle with words in its middle, a line of them each."""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>')
        lines = words.split("\n") if words else []
        for i, line in enumerate(lines):
            self.words(x + width / 2, y + height / 2 + 5 + 18 * (i - (len(lines) - 1) / 2), line, "middle")

    def words(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "words") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(f'<path class="arrow" d="M{x:g} {y:g}L{to_x:g} {to_y:g}" marker-end="url(#head)"/>')

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(f'<path class="arrow" d="M{x:g} {y:g}L{to_x:g} {to_y:g}"/>')

    def svg(self) -> str:
        light, dark = self._style(0), self._style(1)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img" aria-label="{escape(self.title)}">',
                f"<title>{escape(self.title)}</title>",
                "<style>text{font:14px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}"
                ".faint{font-size:12px}.code{font-family:ui-monospace,'DejaVu Sans Mono',monospace;font-size:13px}"
                f".arrow{{fill:none;stroke-width:1.5}}{light}@media (prefers-color-scheme:dark){{{dark}}}</style>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                'orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>',
                *self.parts,
                "</svg>\n",
            ]
        )

    @staticmethod
    def _style(scheme: int) -> str:
        rules = [f".{name}{{fill:{pair[scheme][0]};stroke:{pair[scheme][1]}}}" for name, pair in COLOURS.items()]
        rules += [f".words,.code{{fill:{WORDS[scheme]}}}", f".faint,.tip{{fill:{FAINT[scheme]}}}"]
        return "".join([*rules, f".arrow{{stroke:{FAINT[scheme]}}}"])
