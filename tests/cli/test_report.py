"""report.html: whole, alone, and without errors in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from nightly import at_night
from plan_support import made_up_plan
from program_support import Net, trunk, written

from gemsc.plan import Plan
from gemsc.viz.report import write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
VOID = {"meta", "link", "br"}


def browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


needs_browser = pytest.mark.skipif(
    browser() is None, reason="there is no Chromium (apt-get install chromium)"
)


class Reader(HTMLParser):
    """Collects what a page refers to; notes tags that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.targets: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.targets += [given[key] or "" for key in ("src", "href") if key in given]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def forward(self, x):
    h = self.a(x)
    return self.trunk(h) + h


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "program"
    written(folder, Net(forward, trunk=trunk()), ranks=3, micro_batches=5)
    write_report(Plan.read(folder / "plan.toml"), folder)
    return folder


def report(plan: Plan, folder: Path) -> str:
    return write_report(plan, folder).read_text(encoding="utf-8")


def look(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Open a page in a headless browser; what it logs is in stderr."""
    words = [
        str(browser()),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        f"--user-data-dir={path.parent / 'profile'}",
        *flags,
        path.as_uri(),
    ]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=120, check=True
    )


def console_lines(said: str) -> list[str]:
    return [line for line in said.splitlines() if "CONSOLE" in line]


# what is on it


def test_the_page_is_well_formed_and_needs_nothing_else(program: Path) -> None:
    text = (program / "report.html").read_text(encoding="utf-8")
    page = Reader(text)
    assert page.wrong == []
    assert page.open == []
    outside = [t for t in page.targets if not t.startswith(("#", "data:"))]
    assert outside == ["rank0.py", "rank1.py", "rank2.py"]
    assert "url(http" not in text
    assert "@import" not in text


def test_links_lead_to_the_ranks_and_inside_the_page(program: Path) -> None:
    text = (program / "report.html").read_text(encoding="utf-8")
    for target in Reader(text).targets:
        if target.startswith("#"):
            assert f'id="{target[1:]}"' in text
        elif not target.startswith("data:"):
            assert (program / target).is_file()


def test_a_grid_leads_to_the_file_of_its_first_rank(tmp_path: Path) -> None:
    plan = replace(made_up_plan(2), ranks=5, groups=[[0, 1, 2, 3], [4]])
    targets = Reader(report(plan, tmp_path)).targets
    assert [t for t in targets if t.endswith(".py")] == ["rank0.py", "rank4.py"]


def test_everything_is_on_it(program: Path) -> None:
    text = (program / "report.html").read_text(encoding="utf-8")
    for title in ("Why this split", "Stages", "One step", "Ranks", "Skips over blocks",
                  "Transfers"):  # fmt: skip
        assert f"<h2>{title}</h2>" in text
    assert "is slowest" in text
    assert 'class="timeline"' in text
    assert "sends" in text


def test_names_are_shown_as_they_are_and_inject_nothing(tmp_path: Path) -> None:
    text = report(made_up_plan(3), tmp_path)
    assert "Made&lt;Up&gt;" in text
    assert "&lt;model&gt; &amp; more" in text
    assert "<model>" not in text
    assert "<Up>" not in text
    assert Reader(text).wrong == []


def test_a_drawn_graph_is_put_in_and_a_stale_one_is_not(tmp_path: Path) -> None:
    svg = '<?xml version="1.0"?>\n<!DOCTYPE svg>\n<svg width="9pt"><g/></svg>'
    (tmp_path / "graph.svg").write_text(svg)
    text = report(made_up_plan(3), tmp_path)
    assert '<section id="graph">' in text
    assert '<svg width="9pt">' in text
    assert "<?xml" not in text
    path = write_report(made_up_plan(3), tmp_path, with_graph=False)
    assert '<section id="graph">' not in path.read_text()


@pytest.mark.nightly
def test_a_thousand_ranks_are_summed_up(tmp_path: Path) -> None:
    text = report(made_up_plan(1000, 16), tmp_path)
    assert len(text) < 3_000_000
    assert "of 1000 ranks" in text
    assert re.search(r"<td>median</td>", text)
    rows = text.count('<g class="row"')
    assert 2 <= rows <= 32
    for rank in (0, 999):
        assert f'data-rank="{rank}"' in text
    assert Reader(text).wrong == []


@pytest.mark.nightly
def test_many_micro_batches_are_not_drawn_one_by_one(tmp_path: Path) -> None:
    text = report(made_up_plan(4, 2000), tmp_path)
    assert len(text) < 500_000
    assert "Too many actions to draw each" in text
    assert 'class="box action' not in text
    assert text.count('<g class="row"') == 4


# in a browser


@pytest.mark.slow
@needs_browser
def test_the_browser_reports_errors(tmp_path: Path) -> None:
    """If this fails, the tests below would pass whatever a page does."""
    page = tmp_path / "bad.html"
    page.write_text("<script>nothing.here()</script>")
    assert console_lines(look(page, "--dump-dom").stderr)


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("num_ranks", [3, *at_night(1000)])
def test_the_page_opens_without_errors_and_its_script_runs(
    num_ranks: int, tmp_path: Path
) -> None:
    path = write_report(made_up_plan(num_ranks), tmp_path)
    seen = look(path, "--dump-dom")
    assert console_lines(seen.stderr) == []
    assert '<th scope="col" class="number">' in seen.stdout


@pytest.mark.slow
@needs_browser
def test_the_page_can_be_photographed(program: Path, tmp_path: Path) -> None:
    page = shutil.copy(program / "report.html", tmp_path)
    picture = tmp_path / "report.png"
    look(Path(page), f"--screenshot={picture}", "--window-size=1240,2400")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000
