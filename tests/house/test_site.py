"""The site: built without a warning, whole, and read without a network."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from typer.main import get_command

import gemsc
from gemsc.cli import make_app
from gemsc.options import CompileOptions
from gemsc.plan import Plan
from gemsc.plan_tables import PlannedStage

ROOT = Path(__file__).parents[2]
ASSETS = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src")}
OWN = {"canonical", "prev", "next"}  # `rel` of links that load nothing


@dataclass
class Links(HTMLParser):
    """What a page refers to, and the names that others may refer to."""

    text: str
    links: list[str] = field(default_factory=list)
    assets: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        by_name = {name: value or "" for name, value in attrs}
        self.names |= {by_name[name] for name in ("id", "name") if name in by_name}
        if tag == "a" and "href" in by_name:
            self.links.append(by_name["href"])
        for name, value in by_name.items():
            if (tag, name) in ASSETS and by_name.get("rel") not in OWN:
                self.assets.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Links]:
    return {path: Links(path.read_text("utf-8")) for path in site.rglob("*.html")}


def test_the_reference_is_made_from_the_code():
    pytest.importorskip("mkdocs")
    pytest.importorskip("griffe")
    made = runpy.run_path(str(ROOT / "docs" / "hooks" / "reference.py"))["MAKERS"]
    assert "`ConvNd`" in made["operators"]()
    assert "`--ranks`" in made["commands"]()
    assert "[[stages]]" in made["plan"]()


@pytest.mark.slow
def test_every_page_is_in_the_menu_of_the_site(site, pages):
    home = {(site / link).resolve() for link in pages[site / "index.html"].links}
    sources = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    names = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in sources}
    assert not names - {path.relative_to(site) for path in home if path.is_file()}


@pytest.mark.slow
def test_links_lead_to_pages_and_to_places_on_them(site, pages):
    assert not list(broken(site, pages))


def broken(site: Path, pages: dict[Path, Links]) -> Iterator[str]:
    for page, parsed in pages.items():
        for link in [*parsed.links, *parsed.assets]:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto") or page.name == "404.html":
                continue
            target = (page.parent / unquote(parts.path)) if parts.path else page
            names = pages[target.resolve()].names if target.suffix == ".html" else ()
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and names and anchor not in names):
                yield f"{page.relative_to(site)}: {link}"


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site, pages):
    assert not [a for parsed in pages.values() for a in parsed.assets if "//" in a]
    styles = [path.read_text("utf-8") for path in site.rglob("*.css")]
    assert styles
    assert not [s for s in styles if re.search(r"url\(['\"]?(https?:)?//|@import", s)]


@pytest.mark.slow
def test_the_search_finds_what_pages_say(site):
    text = (site / "search" / "search_index.js").read_text("utf-8")
    docs = json.loads(text.removeprefix("var __index = "))["docs"]
    about = {doc["location"]: doc["text"] for doc in docs}
    assert "MPI rank" in about["index.html"]
    assert "data-parallel replicas" in about["reference/commands.html#gemsc-compile"]
    assert "deconvolution" in about["histology.html#the-models-file"]


@pytest.mark.slow
def test_the_reference_has_every_command_entry_and_name(site, pages):
    folder = site / "reference"
    text = (folder / "commands.html").read_text("utf-8")
    for name, command in get_command(make_app()).commands.items():
        assert f"gemsc-{name}" in pages[folder / "commands.html"].names
        options = [p for p in command.params if p.param_type_name == "option"]
        assert not [p for p in options if f"<code>{p.opts[0]}</code>" not in text]
    for kept in ("--checkpoint-every", "--hosts"):  # of the ranks, and of the launch
        assert f"<code>{kept}</code>" in text
    text = (folder / "plan.html").read_text("utf-8")
    for kind in (Plan, PlannedStage, CompileOptions):
        entries = [f"<code>{entry.name}</code>" for entry in fields(kind)]
        assert not [entry for entry in entries if entry not in text]
    names = pages[folder / "python.html"].names
    assert not {f"gemsc.{name}" for name in gemsc.__all__} - names
