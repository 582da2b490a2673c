"""What SVG pictures are made of."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

__all__ = ["LINES", "drawing", "n", "rect", "text"]

# colours of ranks and stages, in all pictures
LINES = ("#2f6ea8", "#c26a12", "#3d8b37", "#a8326e", "#6a4fa3", "#a08a00", "#1d8a86")


def drawing(
    kind: str, width: int, height: float, title: str, style: str, parts: Iterable[str]
) -> str:
    """Return a picture, as a file or as a part of a page.

    Of the page only what is in the picture, of class `kind`, follows its `style`: a
    rule in each line.
    """
    rules = "\n".join(f"svg.{kind} {rule}" for rule in style.strip().splitlines())
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" role="img" '
            f'width="{width}" height="{n(height)}" '
            f'viewBox="0 0 {width} {n(height)}">',
            f"<title>{escape(title)}</title>",
            f"<style>{rules}</style>",
            '<rect class="sheet" width="100%" height="100%" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, kind: str) -> str:
    """Return a line of text; the style of `kind` says what of it is at x."""
    return f'<text class="{kind}" x="{n(x)}" y="{n(y)}">{escape(words)}</text>'


def rect(
    kind: str,
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str = "",
    title: str = "",
) -> str:
    """Return a box, and what is said of it where the mouse points at it."""
    colour = f' fill="{fill}"' if fill else ""
    inside = f"><title>{escape(title)}</title></rect>" if title else "/>"
    return (
        f'<rect class="{kind}" x="{n(x)}" y="{n(y)}" width="{n(width)}" '
        f'height="{n(height)}"{colour}{inside}'
    )


def n(number: float) -> str:
    """Return a short coordinate."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
