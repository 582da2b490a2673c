"""Which cores a rank has: of a machine that is described, and in runs on this one."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import GEMSC, MODEL, Outcome, compile_here, run_words

from gemsc.base.cores import Cores, Topology, bind, parse_cores, share_of
from gemsc.base.process import STORE_VARIABLE, TORCHRUN, usable_cores
from gemsc.errors import GemscError
from gemsc.launch.mpirun import find_mpirun, mpirun_command
from gemsc.runtime.process import binding
from gemsc.runtime.process.binding import share_cores
from gemsc.runtime.transport import waiting
from gemsc.runtime.transport.local import LocalTransport, run_local
from gemsc.runtime.transport.waiting import check_in_waits, check_no_more, wait, wait_of

OF_TORCH = (TORCHRUN, STORE_VARIABLE)


def of(text: str) -> Cores:
    return parse_cores(text)


def described(folder: Path, nodes: dict[int, str], siblings: list[str]) -> Topology:
    """Return what is read in a folder that is written as Linux has it."""
    for number, cores in nodes.items():
        node = folder / "node" / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(cores + "\n")
    (folder / "node" / "online").write_text("0-1\n")
    for threads in siblings:
        for core in of(threads):
            place = folder / "cpu" / f"cpu{core}" / "topology"
            place.mkdir(parents=True)
            (place / "thread_siblings_list").write_text(threads + "\n")
    return Topology.read(folder)


@pytest.fixture
def sockets(tmp_path: Path) -> Topology:
    """Two sockets of two cores with two threads each, and memory without a core."""
    nodes = {10: "2-3,6-7", 0: "0-1,4-5", 1: ""}
    return described(tmp_path, nodes, ["0,4", "1,5", "2,6", "3,7"])


def test_what_linux_tells_is_read(sockets: Topology, tmp_path: Path) -> None:
    assert sockets.domains == (of("0,1,4,5"), of("2,3,6,7"))
    assert sockets.siblings == (of("0,4"), of("1,5"), of("2,6"), of("3,7"))
    assert Topology.read(tmp_path / "none") == Topology()
    assert Topology().domains_in(of("0-2")) == [of("0-2")]


ALL = "0-7"


@pytest.mark.parametrize(
    ("how", "allowed", "expected"),
    [
        ("none", [ALL] * 2, [ALL] * 2),
        # a domain for each, or one that ranks share, next to each other
        ("auto", [ALL] * 2, ["0-1,4-5", "2-3,6-7"]),
        ("auto", [ALL] * 4, ["0-1,4-5"] * 2 + ["2-3,6-7"] * 2),
        ("auto", [ALL], [ALL]),
        # somebody would have less than a third of the machine
        ("auto", [ALL] * 3, [ALL] * 3),
        ("numa", [ALL] * 3, ["0-1,4-5", "0-1,4-5", "2-3,6-7"]),
        # what the launcher has done is left alone, unless it is asked for
        ("auto", ["0", "1"], ["0", "1"]),
        ("auto", ["0-1,4-5", "2-3,6-7"], ["0-1,4-5", "2-3,6-7"]),
        ("numa", ["0-3", "4-7"], ["0-1,4-5", "2-3,6-7"]),
        # only what this job may use
        ("auto", ["0-1,4"] * 2, ["0-1,4"] * 2),
        ("auto", ["0-3,6"] * 2, ["0-3,6"] * 2),
        ("auto", ["0-3"] * 2, ["0-1", "2-3"]),
        ("numa", ["0-3,6"] * 2, ["0-1", "2-3,6"]),
        # both threads of a core go together, as long as there are enough
        ("core", [ALL] * 2, ["0,4,1,5", "2,6,3,7"]),
        ("core", [ALL] * 3, ["0,4", "1,5", "2,6,3,7"]),
        ("core", [ALL] * 4, ["0,4", "1,5", "2,6", "3,7"]),
        ("core", [ALL] * 8, list("04152637")),
        ("core", ["0,1,4"] * 3, ["0", "4", "1"]),
        ("core", [ALL], [ALL]),
    ],
)
def test_ranks_are_bound(
    how: str, allowed: list[str], expected: list[str], sockets: Topology
) -> None:
    bound = bind([of(cores) for cores in allowed], sockets, how)
    assert bound == [of(cores) for cores in expected]


def test_fewer_ranks_than_domains_have_several_each() -> None:
    quarters = Topology(tuple(of(f"{n}-{n + 1}") for n in (0, 2, 4, 6)))
    assert bind([of(ALL)] * 2, quarters, "auto") == [of("0-3"), of("4-7")]
    assert bind([of(ALL)] * 3, quarters, "auto") == [of(ALL)] * 3
    assert bind([of(ALL)] * 3, quarters, "numa") == [of("0-1"), of("2-3"), of("4-7")]


def test_a_core_for_each_of_more_ranks_is_refused(sockets: Topology) -> None:
    with pytest.raises(GemscError, match=r"--bind core: 3 ranks.* 2 cores.*\n.*share"):
        bind([of("0-1")] * 3, sockets, "core")


@pytest.mark.parametrize(
    ("cores", "shares"),
    [
        (["0-7"] * 2, [4, 4]),
        (["0-7"] * 3, [2, 2, 2]),
        (["0-5"] * 3, [2, 2, 2]),
        (["0-3", "4-7"], [4, 4]),  # the launcher has bound them: 4, not 4 / 2
        (["0-3", "0-3", "4-7"], [2, 2, 4]),
        (["0-3", "2-3"], [3, 1]),
        (["0", "0", "1"], [0, 0, 1]),
    ],
)
def test_cores_are_shared_by_those_that_may_use_them(
    cores: list[str], shares: list[int]
) -> None:
    usable = [of(text) for text in cores]
    assert [share_of(rank, usable) for rank in range(len(usable))] == shares


# what a rank does with them


@pytest.mark.parametrize(
    ("ranks", "how", "helpers", "threads", "spins"),
    [
        # bound by their launcher: 4 threads each, not 2
        ([("a", "0-3"), ("a", "4-7")], "auto", 0, [4, 4], []),
        ([("a", "0-3"), ("a", "4-7")], "none", 0, [4, 4], []),
        ([("a", "0-7"), ("a", "0-7")], "auto", 0, [4, 4], []),
        # on two machines nobody shares anything
        ([("a", "0-3"), ("b", "0-3")], "auto", 0, [4, 4], []),
        ([("a", "0-3"), ("b", "0-1"), ("a", "0-3")], "auto", 0, [2, 2, 2], []),
        ([("a", "0"), ("a", "0"), ("a", "1")], "auto", 0, [1, 1, 1], []),
        ([("a", "0-1")], "auto", 0, [2], []),
        # a core of one's own, those that data loaders need, and less than one
        ([("a", "0-1")], "numa", 0, [2], [0]),
        ([("a", "0-3"), ("a", "0-3")], "numa", 1, [2, 2], [0, 1]),
        ([("a", "0-3"), ("a", "0-3")], "numa", 2, [2, 2], []),
        ([("a", "0-1"), ("a", "0-1"), ("a", "0-1")], "numa", 0, [1, 1, 1], []),
    ],
)
def test_ranks_share_the_cores_of_their_machine(
    ranks: list[tuple[str, str]],
    how: str,
    helpers: int,
    threads: list[int],
    spins: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local, noted = threading.local(), ({}, {})  # by rank

    def note(place: int, value: object) -> None:
        noted[place][local.rank] = value

    def run(transport: LocalTransport) -> None:
        local.rank = transport.rank
        share_cores(transport, how, num_helpers=helpers)

    monkeypatch.setattr(binding, "_machine", lambda: ranks[local.rank][0])
    monkeypatch.setattr(binding, "usable_cores", lambda: of(ranks[local.rank][1]))
    monkeypatch.setattr(binding, "Topology", SimpleNamespace(read=Topology))
    monkeypatch.setattr(binding, "spin", lambda: note(1, True))
    monkeypatch.setattr(torch, "set_num_threads", partial(note, 0))
    for name in ("OMP_NUM_THREADS", "GEMSC_NUM_THREADS", *OF_TORCH):
        monkeypatch.delenv(name, raising=False)
    run_local(len(ranks), run)
    assert [noted[0][rank] for rank in range(len(ranks))] == threads
    assert sorted(noted[1]) == spins


def test_what_the_system_forbids_is_told_unless_nobody_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halves = Topology(domains=(of("0"), of("1")))
    monkeypatch.setattr(binding, "Topology", SimpleNamespace(read=lambda: halves))
    monkeypatch.setattr(binding, "usable_cores", lambda: of("0-1"))
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: None)
    monkeypatch.setattr(binding, "spin", pytest.fail)
    run_local(2, partial(share_cores, how="auto"))
    with pytest.raises(GemscError, match=r"--bind core: .* use the cores [01]\n"):
        run_local(2, partial(share_cores, how="core"))


def test_threads_that_the_user_chose_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("GEMSC_NUM_THREADS", "2")  # what would have been
    monkeypatch.setattr(torch, "set_num_threads", pytest.fail)
    run_local(1, share_cores)


def test_who_spins_never_sleeps_and_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that takes long is noted, and checked, as any other."""
    monkeypatch.setattr(waiting, "_spins", True)
    monkeypatch.setattr(waiting, "_sleep", pytest.fail)
    monkeypatch.setattr(waiting, "CHECK_SECONDS", 0.001)
    noted: list[object] = []
    end = time.monotonic() + 0.02

    def done() -> bool:
        noted.append(wait_of(threading.get_ident()))
        return time.monotonic() > end

    checked: list[object] = []
    check_in_waits(checked.append)
    try:
        wait(SimpleNamespace(done=done))
    finally:
        check_no_more(checked.append)
    assert noted[-1] is not None
    assert checked


# runs on this machine

TELLS = """

def tell():
    import json, os, torch
    from gemsc.runtime.transport import waiting

    tasks = os.listdir("/proc/self/task")
    cores = {tuple(sorted(os.sched_getaffinity(int(task)))) for task in tasks}
    told = {"cores": sorted(cores), "threads": torch.get_num_threads()}
    with open(f"{__file__}.json", "w") as file:
        json.dump({**told, "spins": waiting._spins}, file)


tell()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of two ranks that tell what cores all their threads have."""
    folder = tmp_path_factory.mktemp("cores")
    (folder / "model.py").write_text(MODEL)
    compile_here(folder / "model.py", "--ranks", 2, "-o", folder / "program")
    for path in (folder / "program").glob("rank*.py"):
        path.write_text(path.read_text() + TELLS)
    return folder / "program"


@pytest.fixture
def two() -> list[int]:
    cores = sorted(usable_cores())
    if len(cores) < 2:
        pytest.skip("one core for two ranks")
    return cores[:2]


def told(program: Path) -> list[dict[str, object]]:
    paths = [program / f"rank{rank}.py.json" for rank in range(2)]
    notes = [json.loads(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return notes


def run(program: Path, *words: object, cores: Sequence[int]) -> Outcome:
    """Run two steps on some cores of this machine; the user chose no threads."""
    listed = ",".join(map(str, cores))
    command = ("taskset", "-c", listed, *words)
    left_out = ("env", "-u", "OMP_NUM_THREADS", "-u", "GEMSC_ENGINE")
    more = ("--steps", 1, "--save", program.parent / "run", "--overwrite")
    return run_words(*left_out, *command, *more)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("words", "is_bound", "spins"),
    [
        ((), False, False),
        (("--bind", "core"), True, True),
        pytest.param(
            ("--bind", "core", "--engine", "torch"),
            True,
            False,
            marks=pytest.mark.nightly,
        ),
        pytest.param(("--bind", "numa"), False, True, marks=pytest.mark.nightly),
        pytest.param(
            ("--bind", "core", "--workers", 1), True, False, marks=pytest.mark.nightly
        ),
    ],
)
def test_a_run_binds_its_ranks(
    words: tuple[object, ...],
    is_bound: bool,
    spins: bool,
    program: Path,
    two: list[int],
) -> None:
    done = run(program, GEMSC, "run", program, *words, cores=two)
    assert done.code == 0, done.err
    if not is_bound and len(Topology.read().domains_in(frozenset(two))) > 1:
        pytest.skip("these cores are of two domains")
    for rank, note in enumerate(told(program)):
        assert note["cores"] == ([[two[rank]]] if is_bound else [two])
        assert note["threads"] == 1
        assert note["spins"] is spins


@pytest.mark.slow
@pytest.mark.mpi
def test_what_the_launcher_has_bound_stays(program: Path, two: list[int]) -> None:
    """Each rank of this mpirun has a core, the last one first."""
    last, first = two
    words = f"taskset -c $(({first} - ({first} - {last}) * $OMPI_COMM_WORLD_RANK))"
    script = program.parent / "bound.sh"
    script.write_text(f'exec {words} {sys.executable} "$@"\n')
    mpirun = find_mpirun()
    settings = mpirun_command(2, [])[1]
    allowed = {n: v for n, v in settings.items() if n.startswith(("OMPI_", "PRTE_"))}
    where = ("--bind-to", "none", "--oversubscribe", "sh", script)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in allowed.items():
            patch.setenv(name, value)
        done = run(program, mpirun, "-n", 2, *where, program, cores=two)
    assert done.code == 0, done.err
    assert [note["cores"] for note in told(program)] == [[[first]], [[last]]]


@pytest.mark.slow(1)
@pytest.mark.mpi
@pytest.mark.parametrize("engine", ["mpi", "torch"])
def test_too_few_cores_are_refused_before_anything_starts(
    engine: str, program: Path, two: list[int]
) -> None:
    words = (GEMSC, "run", program, "--bind", "core", "--engine", engine)
    done = run(program, *words, cores=two[:1])
    assert done.code == 1
    assert done.err == REFUSAL


@pytest.mark.mpi
@pytest.mark.nightly
def test_too_few_cores_are_refused_once_by_the_ranks(
    program: Path, two: list[int]
) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2)
    done = run(program, *torchrun, program, "--bind", "core", cores=two[:1])
    assert done.code == 1
    assert done.err.count(REFUSAL) == 1


REFUSAL = """\
error: --bind core: 2 ranks on this machine, but only 1 core
help: leave out --bind: the ranks then share the cores
"""
