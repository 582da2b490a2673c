"""Draw the pictures of the pages anew: python docs/pictures/make.py.

A page that shows `pictures/NAME-graph.svg` or `pictures/NAME-timeline.svg` also has
the command that draws it, `gemsc compile FILE ... -o build/NAME`. A `NAME-curve.svg` is
what `gemsc simulate FILE ... -o build/NAME-curve.svg` writes. `FILE` is a block of a
page that begins with `# FILE`, or an example. What is drawn by hand is in `drawn/`.
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

__all__ = ["commands", "draw", "write_files"]

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
    found = {}
    for text in pages():
        written = {path: line for line, path in COMMAND.findall(text)}
        for picture, name, kind in PICTURE.findall(text):
            path = f"build/{picture}" if kind == "curve" else f"build/{name}"
            if path not in written:
                raise ValueError(f"no command of its page writes {path} of {picture}")
            found[picture] = written[path]
    return found


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
        f"{path.name}-{each.name}" if path.is_dir() else each.name: each.read_text()
        for each in drawn
    }


def main() -> None:
    """Write all pictures that pages show; remove those that none does."""
    wanted = commands()
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name))
        for command in sorted(set(wanted.values())):
            for picture, text in draw(command, Path(name)).items():
                if picture in wanted:
                    (HERE / picture).write_text(text, encoding="utf-8")
    for path in HERE.glob("*.svg"):
        if path.name not in wanted:
            path.unlink()


if __name__ == "__main__":
    main()
