"""`pytest --part K/N`: what `make nightly PART=K/N` runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest
from conftest import table_of

FILES = (
    "passes/test_forks.py",
    "planner/test_partition.py",
    "house/test_parts_of_the_night.py",
)


class Collected:
    """A plugin that keeps what pytest finds, and what of it a run would run."""

    def __init__(self) -> None:
        self.found: list[pytest.Item] = []
        self.runs: list[pytest.Item] = []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.found.append(item)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.runs = session.items


Collect = Callable[..., Collected]


@pytest.fixture
def collect(pytestconfig: pytest.Config) -> Collect:
    """Give pytest three files and some options."""
    files = [str(pytestconfig.rootpath / "tests" / name) for name in FILES]

    def run(*options: str) -> Collected:
        collected = Collected()
        alone = ("--collect-only", "-s", "-pno:faulthandler")
        status = pytest.main([*alone, *options, *files], [collected])
        assert status is pytest.ExitCode.OK
        return collected

    return run


@pytest.mark.slow(1)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_parts_are_everything_and_no_test_is_in_two(
    collect: Collect, count: int
) -> None:
    options = [f"--part={k}/{count}" for k in range(1, count + 1)]
    parts = [collect("--nightly", option) for option in options]
    names = [item.nodeid for part in parts for item in part.runs]
    assert len(names) > 20
    assert sorted(names) == sorted(item.nodeid for item in parts[0].found)


@pytest.mark.slow
def test_what_is_left_out_by_day_is_in_no_part(collect: Collect) -> None:
    whole, first, second = collect(), collect("--part=1/2"), collect("--part=2/2")
    assert len(whole.runs) < len(whole.found)
    parts = sorted(item.nodeid for item in first.runs + second.runs)
    assert parts == sorted(item.nodeid for item in whole.runs)


def test_what_is_slow_runs_when_asked_for(collect: Collect) -> None:
    by_day, slow, night = collect(), collect("--slow"), collect("--nightly")
    few, more, most = ({i.nodeid for i in c.runs} for c in (by_day, slow, night))
    assert few < more < most
    waits = {i.nodeid for i in slow.runs if i.get_closest_marker("slow")}
    assert more - few <= waits


def test_each_part_has_its_share_of_every_table(collect: Collect) -> None:
    one, other = (collect("--nightly", f"--part={k}/2") for k in (1, 2))
    counts = Counter(map(table_of, one.runs))
    counts.subtract(map(table_of, other.runs))
    assert {*counts.values()} == {-1, 0, 1}
    cases = [item.nodeid for item in one.found if "no_part" in item.nodeid]
    indices = {cases.index(i.nodeid) % 2 for i in one.runs if "no_part" in i.nodeid}
    assert indices == {0, 1}  # not every second case as they stand


def test_a_part_is_always_the_same(collect: Collect) -> None:
    first, second = (collect("--part=2/3").runs for _ in range(2))
    assert [item.nodeid for item in first] == [item.nodeid for item in second]


@pytest.mark.parametrize("part", ["0/4", "5/4", "1", "/", "-1/4", "1/4/2", "a/b"])
def test_what_is_no_part_is_refused(
    collect: Collect, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        collect(f"--part={part}")
    said = capsys.readouterr().err
    assert said.startswith(f"ERROR: --part {part}: the first of four parts is 1/4")


def test_the_jobs_of_the_night_are_all_parts(pytestconfig: pytest.Config) -> None:
    job = (pytestconfig.rootpath / ".github/workflows/nightly.yml").read_text()
    (listed,) = re.findall(r"part: \[(.*)\]", job)
    parts = listed.split(", ")
    assert parts == [f"{k + 1}/{len(parts)}" for k in range(len(parts))]
