"""What SVG pictures are made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from gemsc.viz.design import FONT, HATCHED, LARGE, NORMAL, SMALL, css, width_of

LINE = 20  # px, of a legend
SWATCH = 18
WIDER = 1.2  # DejaVu Sans is, than Helvetica
STYLE = f"""
.sheet {{ fill: $sheet }}
text {{ font: {NORMAL}px {FONT}; fill: $ink }}
text.title {{ font-size: {LARGE}px; font-weight: bold }}
text.name {{ font-weight: bold }}
text.note {{ font-size: {SMALL}px; fill: $soft }}
text.middle {{ text-anchor: middle }}
text.end {{ text-anchor: end }}
.grid {{ stroke: $line; stroke-width: 0.7 }}
.axis {{ stroke: $axis }}
"""


def drawing(
    kind: str, width: float, height: float, title: str, style: str, parts: Iterable[str]
) -> str:
    """Return a picture, as a file or as a part of a page.

    Of the page only what is in the picture, of class `kind`, follows its `style`: a
    rule in each line. Classes `fill-NAME`, `stroke-NAME` and `hatch-NAME` give parts
    the colours of the design.
    """
    drawn = "\n".join(parts)
    words = {
        word for found in re.findall(r'class="(.*?)"', drawn) for word in found.split()
    }
    hatched = [name for name in HATCHED if f"hatch-{name}" in words]
    words |= (
        {"fill-idle", *(f"stroke-{name}" for name in hatched)} if hatched else set()
    )
    rules = "\n".join([STYLE.strip(), *_rules(words), style.strip()])
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" role="img" '
            f'width="{n(width)}" height="{n(height)}" '
            f'viewBox="0 0 {n(width)} {n(height)}">',
            f"<title>{escape(title)}</title>",
            f"<style>{css(kind, rules)}</style>",
            *(["<defs>", *map(_pattern, hatched), "</defs>"] if hatched else []),
            '<rect class="sheet" width="100%" height="100%"/>',
            drawn,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, kind: str) -> str:
    """Return a line of text; the style of `kind` says what of it is at x."""
    return f'<text class="{kind}" x="{n(x)}" y="{n(y)}">{escape(words)}</text>'


def rect(
    kind: str, x: float, y: float, width: float, height: float, title: str = ""
) -> str:
    """Return a box, and what is said of it where the mouse points at it."""
    inside = f"><title>{escape(title)}</title></rect>" if title else "/>"
    return (
        f'<rect class="{kind}" x="{n(x)}" y="{n(y)}" width="{n(width)}" '
        f'height="{n(height)}"{inside}'
    )


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a straight line."""
    return f'<path class="{kind}" d="M{n(x1)},{n(y1)}L{n(x2)},{n(y2)}"/>'


def legend(
    entries: Sequence[tuple[str, str]], left: float, y: float, right: float
) -> tuple[list[str], float]:
    """Return what boxes of some classes mean, in as many lines as needed, and the end.

    A class with `stroke-` is shown as a line. There is room for a font that is wider,
    which takes the place of one that a viewer does not have.
    """
    parts, x = [], left
    for kind, words in entries:
        wide = SWATCH + 6 + WIDER * width_of(words, SMALL)
        if x > left and x + wide > right:
            x, y = left, y + LINE
        if "stroke-" in kind:
            parts.append(line(kind, x, y - 4, x + SWATCH, y - 4))
        else:
            parts.append(rect(kind, x, y - 10, SWATCH, 12))
        parts.append(text(x + SWATCH + 6, y, words, "note"))
        x += wide + 12
    return parts, y + LINE


def n(number: float) -> str:
    """Return a short coordinate."""
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _rules(words: Iterable[str]) -> Iterator[str]:
    """Yield the rules of classes that give colours."""
    for word in sorted(words):
        how, _, name = word.partition("-")
        if how in ("fill", "stroke") and name:
            yield f".{word} {{ {how}: ${name} }}"
        elif how == "hatch":
            yield f".{word} {{ fill: url(#{word}) }}"


def _pattern(name: str) -> str:
    lines, thick = HATCHED[name]
    return (
        f'<pattern id="hatch-{name}" width="6" height="6" '
        'patternUnits="userSpaceOnUse"><rect class="fill-idle" width="6" height="6"/>'
        f'<path class="stroke-{name}" d="{lines}" stroke-width="{thick:g}"/></pattern>'
    )
