"""Draw the pictures of the pages anew: python docs/pictures/make.py.

A page that shows `pictures/NAME-graph.svg` or `pictures/NAME-timeline.svg` also has
the command that draws it, `gemsc compile FILE ... -o build/NAME`. A `NAME-curve.svg` is
what `gemsc simulate FILE ... -o build/NAME-curve.svg` writes. `FILE` is a block of a
page that begins with `# FILE`, or an example. What no command draws is in `drawn/`.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gemsc.cli import make_app

__all__ = ["commands", "draw", "split_picture", "write_files"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PICTURE = re.compile(
    r"""[("](?:docs/)?pictures/((\w[\w-]*)-(graph|timeline|curve)\.svg)[)"]"""
)
COMMAND = re.compile(
    r"^ *(gemsc (?:compile|simulate) .*-o (build/\S+).*)$", re.MULTILINE
)
FILE = re.compile(r"^```python\n(# (\w+\.py)\n.*?)^```", re.MULTILINE | re.DOTALL)


def pages() -> Iterator[str]:
    """Yield the text of the readme, and of every page beside this folder."""
    for page in [ROOT / "README.md", *sorted(HERE.parent.glob("*.md"))]:
        yield page.read_text(encoding="utf-8")


def commands() -> dict[str, str]:
    """Return the command that draws each picture.

    Raises:
        ValueError: a page shows a picture and has no command for it.
    """
    by_picture = {}
    for text in pages():
        written = {path: line for line, path in COMMAND.findall(text)}
        for picture, name, kind in PICTURE.findall(text):
            path = f"build/{picture}" if kind == "curve" else f"build/{name}"
            if path not in written:
                raise ValueError(f"no command of its page writes {path} of {picture}")
            by_picture[picture] = written[path]
    return by_picture


def write_files(folder: Path) -> None:
    """Write every file that a page shows as a whole, and the examples."""
    (folder / "examples").symlink_to(ROOT / "examples")
    for text in pages():
        for block, name in FILE.findall(text):
            (folder / name).write_text(block, encoding="utf-8")


def draw(command: str, folder: Path) -> dict[str, str]:
    """Run a command in a folder with the files; return its pictures by their names."""
    verb, *words = shlex.split(command, comments=True)[1:]
    with contextlib.chdir(folder), contextlib.redirect_stdout(sys.stderr):
        make_app()([verb, *words], standalone_mode=False)
    path = folder / words[words.index("-o") + 1]
    drawn = sorted(path.glob("*.svg")) if path.is_dir() else [path]
    return {
        f"{path.name}-{file.name}" if path.is_dir() else file.name: file.read_text()
        for file in drawn
    }


# how a stage is split: each value is rows of a picture by channels

HEIGHT, SIDE, TOP, GAP = 282, 120, 50, 36
STYLE = """\
text { font: 13px Helvetica, Arial, "Liberation Sans", sans-serif; fill: #16202b }
.small { font-size: 12px; fill: #4c5866 } .bold { font-weight: bold; font-size: 14px }
.edge { fill: none; stroke: #16202b; stroke-width: 1.5 }
.r0 { fill: #bcd9f2 } .r1 { fill: #f7dcc4 } .r2 { fill: #cdebdd } .r3 { fill: #e6d5e4 }
.halo { fill: none; stroke: #c0392b; stroke-width: 1.5; stroke-dasharray: 4 3 }
"""
Part = tuple[int, float, float, float, float]  # rank, left, top, width, height: shares
WHOLE = (0.0, 0.0, 1.0, 1.0)
# title; the parts of each value; below: what the ranks hold, and what travels
PANELS: tuple[tuple[str, tuple[tuple[Part, ...], ...], tuple[str, str]], ...] = (
    (
        "--tiles 2x1",
        (((0, 0, 0, 1, 0.5), (1, 0, 0.5, 1, 0.5)),),
        ("rows of the picture", "red: the halo"),
    ),
    (
        "--shards 2",
        (((0, 0, 0, 0.5, 1), (1, 0.5, 0, 0.5, 1)),),
        ("channels, heads, features", "nothing, until a sum"),
    ),
    (
        "a sum over shards",
        (((0, *WHOLE),), ((1, *WHOLE),)),
        ("an addend each", "one all-reduce"),
    ),
    (
        "--branches 2",
        (((0, 0, 0, 0.62, 1),), ((1, 0, 0, 0.38, 1),)),
        ("a branch each", "all, where they meet"),
    ),
    (
        "--tiles 2x1 --shards 2",
        (
            (
                (0, 0, 0, 0.5, 0.5),
                (1, 0.5, 0, 0.5, 0.5),
                (2, 0, 0.5, 0.5, 0.5),
                (3, 0.5, 0.5, 0.5, 0.5),
            ),
        ),
        ("both", "halos down, sums across"),
    ),
)


def split_picture() -> str:
    """Return the picture as SVG."""
    left, lines = GAP // 2, []
    for title, values, below in PANELS:
        joins = title == "--branches 2"
        width = SIDE if joins or len(values) == 1 else 2 * SIDE + 26
        lines.append(f'<text class="bold" x="{left}" y="30">{title}</text>')
        lines += _values(values, left, joins=joins)
        if title.startswith("--tiles"):
            lines.append(_rect("halo", left, TOP + SIDE // 2 - 9, SIDE, 18))
        for line, text in enumerate(below):
            y = TOP + SIDE + 28 + 20 * line
            lines.append(f'<text class="small" x="{left}" y="{y}">{text}</text>')
        left += max(width, 158) + GAP
    size = f'width="{left}" height="{HEIGHT}" viewBox="0 0 {left} {HEIGHT}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>',
        "<title>What a rank has: rows, channels, an addend, a branch</title>",
        f"<style>\n{STYLE}</style>",
        f'<rect width="{left}" height="{HEIGHT}" rx="6" fill="#ffffff"/>',
    )
    legend = "a square is one value: rows of pixels from top to bottom, channels from "
    legend += "left to right; a colour is a rank; below: what it has, and what travels"
    foot = f'<text class="small" x="{GAP // 2}" y="{HEIGHT - 14}">{legend}</text>'
    return "\n".join((*head, *lines, foot, "</svg>", ""))


def _values(
    values: tuple[tuple[Part, ...], ...], left: int, *, joins: bool
) -> Iterator[str]:
    for place, parts in enumerate(values):
        x0 = left + place * (SIDE + 26)
        if joins and place:  # side by side, as a join by `cat` has them
            x0 = left + round(SIDE * 0.62) + 26
        elif place:
            sign = f'x="{x0 - 18}" y="{TOP + SIDE // 2 + 5}"'
            yield f'<text class="bold" {sign}>+</text>'
        for rank, x, y, width, height in parts:
            box = x0 + x * SIDE, TOP + y * SIDE, width * SIDE, height * SIDE
            yield _rect(f"r{rank}", *box)
            yield _rect("edge", *box)
            middle = box[1] + box[3] * (0.5 if len(parts) == 1 else 0.3 + 0.4 * y)
            label = f'x="{box[0] + 8:.0f}" y="{middle + 5:.0f}"'
            yield f"<text {label}>{rank}</text>"


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    box = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<rect class="{kind}" {box}/>'


def main() -> None:
    """Write all pictures that pages show; remove those that none does."""
    wanted = commands()
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name))
        for command in sorted(set(wanted.values())):
            for picture, text in draw(command, Path(name)).items():
                if picture in wanted:
                    (HERE / picture).write_text(text, encoding="utf-8")
    (HERE / "drawn" / "split.svg").write_text(split_picture(), encoding="utf-8")
    for path in HERE.glob("*.svg"):
        if path.name not in wanted:
            path.unlink()


if __name__ == "__main__":
    main()
