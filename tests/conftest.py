"""What all tests share: markers that skip with a reason, and golden texts."""

from __future__ import annotations

import ast
import difflib
import faulthandler
import functools
import gc
import importlib.util
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded, and for ranks
os.environ["COLUMNS"] = "160"  # of the terminal, whatever it is
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # ranks start in three quarters of it

import hypothesis
import program_support
import pytest
import torch
from command_line import MODEL, Gemsc, gemsc_here
from nightly import at_night

from gemsc.base.rng import same_draws, seed_all
from gemsc.errors import GemscError
from gemsc.ir.interpret import run_nodes
from gemsc.launch.mpirun import find_mpirun


def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that threads call one after the other."""
    lock = threading.RLock()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return function(*args, **kwargs)

    return call


def end_if_it_hangs() -> None:
    """Let a forked process say where it hangs, and end, when its test takes too long.

    As long as it lives, xdist waits: it has the pipe of the process that it is a copy
    of, which `faulthandler_timeout` has ended then.
    """
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(590)


os.register_at_fork(after_in_child=end_if_it_hangs)
torch.set_num_threads(1)
# ranks are threads in tests, and Python 3.11 counts the depth of all that is parsed at
# once together: "AST constructor recursion depth mismatch", as numpy reads a header
ast.parse = one_at_a_time(ast.parse)
# on a busy machine an example takes any time
hypothesis.settings.register_profile(
    "any", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any")
gc.disable()  # until all is loaded

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the texts that golden tests see; look at `git diff` afterwards",
    )
    parser.addoption(
        "--nightly",
        action="store_true",
        help="run what takes long as well: benchmarks, 300 random networks on tiles, "
        "every schedule on the simulated CUDA device",
    )
    parser.addoption(
        "--slow",
        action="store_true",
        help="run all but what runs with --nightly only: 25 minutes on two cores",
    )
    parser.addoption(
        "--part",
        default="1/1",
        metavar="K/N",
        help="run the K-th of N parts, which are everything, each test in one of them",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what runs at night or in another part; files that start ranks lead.

    Their tests are the longest: one at the end would leave the other cores idle.
    """
    chosen = [*items]
    if not config.getoption("--nightly"):
        chosen = [item for item in items if not item.get_closest_marker("nightly")]
        limits = ["by_day"] if config.getoption("--slow") else ["by_day", "slow"]
        later = cases_for_later(chosen, limits)
        if config.getoption("--update-golden"):  # of all, not of some cases
            later -= {i for i in later if "golden" in getattr(i, "fixturenames", ())}
        chosen = [item for item in chosen if item not in later]
    stays = part_of(chosen, config.getoption("--part"))
    config.hook.pytest_deselected(items=[i for i in items if i not in stays])
    items[:] = [item for item in items if item in stays]
    starts_ranks = {item.path for item in items if item.get_closest_marker("mpi")}
    items.sort(key=lambda item: item.path not in starts_ranks)


def cases_for_later(
    items: Iterable[pytest.Item], limits: Iterable[str]
) -> set[pytest.Item]:
    """Return what the markers `limits` leave out: one from each part of a table stays.

    Each marker has a number of cases, or none for a test or a case that is left out.
    Which case of a part stays is drawn, always the same one: at even distances it might
    always be the same value of a parameter.
    """
    tables: dict[str, list[pytest.Item]] = {}
    left_out: set[pytest.Item] = set()
    for item in items:
        if all(marker.args for marker in markers_of(item, limits)):
            tables.setdefault(table_of(item), []).append(item)
        else:
            left_out.add(item)
    for table in tables.values():
        markers = markers_of(table[0], limits)
        cases = min((sum(marker.args) for marker in markers), default=len(table))
        ends = [len(table) * part // cases for part in range(cases + 1)]
        draw = random.Random(0)
        kept = {draw.randrange(*part) for part in pairwise(ends) if len({*part}) == 2}
        left_out |= {item for index, item in enumerate(table) if index not in kept}
    return left_out


def markers_of(item: pytest.Item, names: Iterable[str]) -> list[pytest.Mark]:
    """Return the closest markers of these names."""
    return [*filter(None, map(item.get_closest_marker, names))]


def part_of(items: Iterable[pytest.Item], part: str) -> set[pytest.Item]:
    """Return the K-th of N parts, for "K/N": of each table and each file its share.

    The cases of a table are dealt out in an order that is drawn, always the same one:
    as they stand, every second one may be slow.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    number, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= count:
        raise pytest.UsageError(f"--part {part}: the first of four parts is 1/4")
    order = [*items]
    random.Random(0).shuffle(order)
    order.sort(key=table_of)
    return {*order[number - 1 :: count]}


def table_of(item: pytest.Item) -> str:
    """Return the name of a test without the parameters of its case."""
    return item.nodeid.partition("[")[0]


def pytest_collection_finish() -> None:
    gc.freeze()  # what is loaded stays, and is not searched for garbage
    gc.set_threshold(20_000, 10, 10)  # tests make large graphs of many small objects
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, missing in (("mpi", mpi_is_missing), ("gpu", gpu_is_missing)):
        if item.get_closest_marker(name) and (reason := missing()):
            pytest.skip(reason)


@pytest.fixture(params=["mpi", *at_night("torch")])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What ranks talk by: MPI, or what GEMSC_ENGINE says, and at night both engines."""
    given = os.environ.get("GEMSC_ENGINE", "mpi")
    name = given if request.param == "mpi" else str(request.param)
    monkeypatch.setenv("GEMSC_ENGINE", name)
    return name


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """Programs in float64 change torch's default; the next test begins with float32."""
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def same_draws_in_any_order() -> None:
    """Tests draw the same whatever ran before them; GEMSC_TEST_SEED gives others."""
    seed_all(int(os.environ.get("GEMSC_TEST_SEED", "0")))


@pytest.fixture(autouse=True)
def programs_are_kept(request: pytest.FixtureRequest) -> None:
    """Tests that patch something compile anew: see `program_support.written`."""
    patches = "monkeypatch" in request.fixturenames
    program_support.nothing_is_patched = not patches


@pytest.fixture(autouse=True)
def import_path() -> Iterator[None]:
    """The next test does not find what is beside this one's models."""
    before = [*sys.path]
    yield
    sys.path[:] = before


@pytest.fixture
def in_double(default_dtype: None) -> Iterator[None]:
    """Everything is exact: in float64, and drawn anew from seed 0."""
    torch.set_default_dtype(torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def drawn_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks that are threads (`tile_support`) draw what the model alone draws."""

    def run(*args: Any) -> None:
        with same_draws():
            run_nodes(*args)

    monkeypatch.setattr("tile_support.run_nodes", run)


@functools.cache
def mpi_is_missing() -> str:
    """Return why no mpirun test can run here, '' if all is there."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    try:
        find_mpirun()
    except GemscError as error:
        return str(error)
    return ""


@functools.cache
def gpu_is_missing() -> str:
    """Return why no test for CUDA can run here, '' if one can."""
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


@pytest.fixture
def command(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Gemsc:
    """The gemsc command, in a folder with a model.py: the test file's MODEL, if any."""
    (tmp_path / "model.py").write_text(getattr(request.module, "MODEL", MODEL))
    monkeypatch.chdir(tmp_path)
    return gemsc_here(monkeypatch, capfd)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with tests/golden/<test file>/<name>: `golden(text, "a.txt")`.

    `pytest --update-golden` writes the file instead.
    """
    folder = GOLDEN / request.path.stem.removeprefix("test_")
    update = bool(request.config.getoption("--update-golden"))

    def compare(text: str, name: str) -> None:
        path = folder / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        shown = path.relative_to(GOLDEN.parent.parent)
        advice = "if it is right, run pytest --update-golden and look at git diff"
        if not path.is_file():
            pytest.fail(f"there is no {shown}; {advice}", pytrace=False)
        wanted = path.read_text(encoding="utf-8")
        if text != wanted:
            lines = wanted.splitlines(), text.splitlines()
            diff = difflib.unified_diff(*lines, str(shown), "now", lineterm="")
            pytest.fail("\n".join([*diff, advice]), pytrace=False)

    return compare
