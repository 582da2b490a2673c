"""How all pictures look: their colours in light and dark, fonts and sizes.

Series of lines and stages are Okabe and Ito's and Paul Tol's colours for colour-blind
people. What a rank does is told apart by lightness as well: forward is light, weight
gradients in between, backward dark; what is not a stage's work is hatched.
"""

from __future__ import annotations

import re
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
    if found := re.fullmatch(r"(tint|fill)(\d)", name):
        share = TINT if found[1] == "tint" else FILL
        return _mixed(COLOURS["sheet"], COLOURS[f"series{found[2]}"], share)
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


def width_of(words: str, size: float, *, bold: bool = False) -> float:
    """Return the width of a line of text, in the unit of its size."""
    thousandths = sum(WIDTHS.get(letter, USUAL) for letter in words)
    return thousandths / 1000 * size * (1.08 if bold else 1.0)


def _filled(rule: str, *, dark: bool) -> str:
    return re.sub(r"\$([a-z]+[0-9a-z-]*)", lambda m: colour(m[1])[dark], rule)


def _mixed(first: Colour, last: Colour, share: float) -> Colour:
    return Colour(*(_mix(a, b, share) for a, b in zip(first, last, strict=True)))


def _mix(first: str, last: str, share: float) -> str:
    pairs = ((int(first[i : i + 2], 16), int(last[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)
