"""The pictures of the documentation are what the commands beside them draw."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
from nightly import at_night

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "pictures" / "make.py"
spec = importlib.util.spec_from_file_location("make_pictures", SCRIPT)
assert spec is not None
assert spec.loader is not None
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)

PICTURES = make.commands()
FIRST, *REST = sorted({*PICTURES.values()}, key=lambda words: (len(words), words))


def seen(name: str, text: str) -> object:
    """Return what must not differ: of a graph, which `dot` lays out, its words."""
    if not name.endswith("-graph.svg"):
        return text
    return sorted(re.findall(r"<text[^>]*>([^<]*)<", text))


def test_each_picture_is_there() -> None:
    assert {path.name for path in SCRIPT.parent.glob("*.svg")} == set(PICTURES)


def test_what_no_command_draws_is_current() -> None:
    path = SCRIPT.parent / "drawn" / "split.svg"
    assert path.read_text(encoding="utf-8") == make.split_picture()


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz")
@pytest.mark.parametrize("command", [FIRST, *at_night(*REST)])
def test_pictures_are_current(
    command: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    make.write_files(tmp_path)
    drawn = make.draw(command, tmp_path)
    for name in (name for name, by in PICTURES.items() if by == command):
        path = SCRIPT.parent / name
        if pytestconfig.getoption("--update-golden"):
            path.write_text(drawn[name], encoding="utf-8")
        kept = seen(name, path.read_text(encoding="utf-8"))
        assert seen(name, drawn[name]) == kept, "python docs/pictures/make.py"
