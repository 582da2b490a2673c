"""How all pictures look, and what SVG pictures are made of.

Series of lines and stages are Okabe and Ito's and Paul Tol's colours for colour-blind
people. What a rank does is told apart by lightness as well: forward is light, weight
gradients in between, backward dark; what is not a stage's work is hatched.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

# Helvetica, Arial and Liberation Sans are equally wide: `width_of` and `dot` know it
FONT = 'Helvetica, Arial, "Liberation Sans", sans-serif'
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
SMALL, NORMAL, LARGE = 11, 12, 16  # px, of text in pictures


class Colour(NamedTuple):
    """A colour on a light and on a dark page."""

    light: str
    dark: str


COLOURS = {
    "page": Colour("#f5f7f9", "#11151a"),
    "sheet": Colour("#ffffff", "#171c22"),
    "ink": Colour("#16202b", "#e6ebf0"),
    "soft": Colour("#56616d", "#a3afbb"),
    "line": Colour("#d9dfe5", "#36404a"),
    "axis": Colour("#7d8894", "#8b97a3"),
    "link": Colour("#0a64a0", "#7cc0f2"),
    "warn": Colour("#b3261e", "#ff9d94"),
    # words on what a rank does
    "on-light": Colour("#10202f", "#10202f"),
    "on-dark": Colour("#ffffff", "#ffffff"),
    # what a rank does: for replica 0 blue, for its mirror orange
    "forward0": Colour("#acd1f1", "#b5d6f2"),
    "forward0-last": Colour("#97c6ec", "#a0ccef"),
    "weight0": Colour("#63b2bf", "#63b2bf"),
    "weight0-last": Colour("#55a6b3", "#55a6b3"),
    "backward0": Colour("#2f6ea8", "#3474ae"),
    "backward0-last": Colour("#1d4f80", "#28609a"),
    "forward1": Colour("#f8d0a0", "#f8d0a0"),
    "forward1-last": Colour("#f1bd80", "#f1bd80"),
    "weight1": Colour("#cf9140", "#cf9140"),
    "weight1-last": Colour("#c08230", "#c08230"),
    "backward1": Colour("#9a5212", "#a25716"),
    "backward1-last": Colour("#74390a", "#86450d"),
    "send": Colour("#16202b", "#ffffff"),
    "idle": Colour("#e9edf1", "#262e37"),
    # lines on the colour of idle, for what is hatched
    "wait": Colour("#8d98a4", "#75818d"),
    "reduction": Colour("#7a4fb0", "#b79ce8"),
    "update": Colour("#00724f", "#3fc79a"),
    "imbalance": Colour("#d55e00", "#e69f00"),
    "messages": Colour("#16202b", "#ffffff"),
    # memory
    "saved": Colour("#6fb08a", "#6fb08a"),
    "resident": Colour("#c5ced7", "#4c5864"),
    "skip": Colour("#b3261e", "#ff9d94"),
    # lines, stages, ranks of branches
    "series0": Colour("#0072b2", "#56b4e9"),
    "series1": Colour("#d55e00", "#e69f00"),
    "series2": Colour("#009e73", "#009e73"),
    "series3": Colour("#882255", "#ffd6e0"),
    "series4": Colour("#332288", "#aa4499"),
    "series5": Colour("#5b2a00", "#d55e00"),
}
NUM_SERIES = 6
DASHES = ("none", "7 3", "2 2", "9 3 2 3", "4 2", "12 4")  # of lines of a series
TINT, FILL = 0.13, 0.36  # how much of a series' colour is in the ground of a box
HATCHED = {  # lines in a square of 6 px on the colour of idle, and how thick they are
    "wait": ("M-1,1l2,-2M0,6l6,-6M5,7l2,-2", 1.0),
    "reduction": ("M1.5,0v6", 3.0),
    "update": ("M0,1.5h6", 3.0),
}
TERMINAL = {  # the same on a terminal, by replica
    "F": ("black on bright_cyan", "black on bright_yellow"),
    "B": ("white on blue", "white on dark_orange3"),
    "W": ("black on green", "black on green"),
}
# how wide letters are, in thousandths of the size; the others are of the usual width
LETTERS = {
    191: "'",
    222: "ijl",
    260: "|",
    278: " !,./:;I[\\]ft",
    333: "()-`r",
    334: "{}",
    355: '"',
    389: "*",
    469: "^",
    500: "Jcksvxyz",
    584: "+<=>~",
    611: "FTZ",
    667: "&ABEKPSVXY",
    722: "CDHNRUw",
    778: "GOQ",
    833: "Mm",
    889: "%",
    944: "W",
    1015: "@",
}
WIDTHS = {letter: width for width, letters in LETTERS.items() for letter in letters}
USUAL = 556
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


def series(index: int) -> str:
    """Return the class of a line, a stage or a rank of branches."""
    return f"series{index % NUM_SERIES}"


def colour(name: str) -> Colour:
    """Return a colour by its name.

    Besides those of `COLOURS`: `tint2` and `fill2`, the grounds of a stage and of a box
    in it, and `forward0-50`, half way from the first to the last shade.
    """
    if name in COLOURS:
        return COLOURS[name]
    if match := re.fullmatch(r"(tint|fill)(\d)", name):
        share = TINT if match[1] == "tint" else FILL
        return _mixed(COLOURS["sheet"], COLOURS[f"series{match[2]}"], share)
    kind, _, percent = name.rpartition("-")
    return _mixed(COLOURS[kind], COLOURS[f"{kind}-last"], int(percent) / 100)


def shade(kind: str, replica: int, share: float) -> str:
    """Return the name of the colour of an action; `share` is 0 to 1, first to last."""
    return f"{kind}{replica % 2}-{round(100 * share)}"


def css(kind: str, rules: str) -> str:
    """Return the style of a picture: a rule in each line, with colours as `$ink`.

    Only what is in an svg of class `kind` follows it. On a dark page colours are those
    for it; in print, and where a viewer knows no dark pages, they are the light ones.
    """
    lines = [f"svg.{kind} {line}" for line in rules.strip().splitlines()]
    return "\n".join(
        [
            *(_filled(line, dark=False) for line in lines),
            "@media screen and (prefers-color-scheme: dark) {",
            *(_filled(line, dark=True) for line in lines if "$" in line),
            "}",
        ]
    )


def variables(*, dark: bool) -> str:
    """Return all colours as CSS variables, for a page."""
    return " ".join(f"--{name}: {both[dark]};" for name, both in COLOURS.items())


def width_of(words: str, size: float) -> float:
    """Return the width of a line of text, in the unit of its size."""
    thousandths = sum(WIDTHS.get(letter, USUAL) for letter in words)
    return thousandths / 1000 * size


def _filled(rule: str, *, dark: bool) -> str:
    return re.sub(r"\$([a-z]+[0-9a-z-]*)", lambda m: colour(m[1])[dark], rule)


def _mixed(first: Colour, last: Colour, share: float) -> Colour:
    return Colour(*(_mix(a, b, share) for a, b in zip(first, last, strict=True)))


def _mix(first: str, last: str, share: float) -> str:
    pairs = ((int(first[i : i + 2], 16), int(last[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


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
        word for names in re.findall(r'class="(.*?)"', drawn) for word in names.split()
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
    place = f'x="{n(x)}" y="{n(y)}" width="{n(width)}" height="{n(height)}"'
    return element("rect", f'class="{kind}" {place}', title)


def path(kind: str, outline: str, title: str = "", more: str = "") -> str:
    """Return lines and areas, with `more` attributes, and what is said of them."""
    return element("path", f'class="{kind}" d="{outline}"{more}', title)


def element(tag: str, attributes: str, title: str = "") -> str:
    """Return what has a class, a place, ... and what is said of it."""
    inside = f"><title>{escape(title)}</title></{tag}>" if title else "/>"
    return f"<{tag} {attributes}{inside}"


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a straight line."""
    return path(kind, f"M{n(x1)},{n(y1)}L{n(x2)},{n(y2)}")


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


def sample(total: int, most: int, always: Iterable[int] = ()) -> list[int]:
    """Return at most `most` of the numbers below `total`, evenly spread.

    The first, the last and those of `always` are among them, in order.
    """
    if total <= most:
        return list(range(total))
    chosen = {0, total - 1, *always}
    room = max(2, most - len(chosen))
    for index in range(room):
        if len(chosen) < most:
            chosen.add(round(index * (total - 1) / (room - 1)))
    return sorted(chosen)


def round_step(least: float) -> float:
    """Return the smallest of ... 1, 2, 5, 10, 20, ... that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    steps = (factor * power for factor in (1, 2, 5))
    return float(next((step for step in steps if step >= least), 10 * power))


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
