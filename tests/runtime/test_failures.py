"""When a rank fails, all ranks stop within ten seconds, and one report says why."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import GEMSC, MODEL, compile_here, is_alive
from nightly import at_night

from gemsc.launch import launch
from gemsc.runtime.checkpoint.folder import check_checkpoint, check_digests
from gemsc.runtime.training.run_folder import held

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("engine")]

STARTER = "gemsc.launch.torch_ranks"  # what mpirun is for torch.distributed
PROMISE = 10.0  # seconds from a failure until no process is left
START = 90.0  # seconds that ranks may take to start on a busy machine

# A layer that fails as TRIP says: kind:number, at the call of that number in a process.
# Each process, and the failure, leave a file in TRIP_FOLDER.
TRIP = """\
import os
import sys
import threading
import time
from pathlib import Path

WHAT, _, CALL = os.environ.get("TRIP", "").partition(":")
FOLDER = Path(os.environ.get("TRIP_FOLDER", "."))
calls = 0
if WHAT:
    (FOLDER / f"pid{os.getpid()}").touch()


def trip(where):
    global calls
    kind, _, way = WHAT.partition("-")
    calls += kind == where
    if kind != where or calls != int(CALL):
        return None
    (FOLDER / "beside").write_text(str(os.getpid()))
    (FOLDER / "beside").rename(FOLDER / "tripped")
    if way == "exit":
        sys.exit(3)
    if way == "leave":
        exit(0)
    if way == "raise":
        raise SystemExit(3)
    if way == "nan":
        return float("nan")
    if way == "thread":
        threading.Thread(target=fail).start()
    if way:
        time.sleep(600)
    fail()


def fail():
    raise ValueError("tripped")
"""

MODEL_THAT_TRIPS = (
    MODEL.replace("        x = self.drop(x)\n", "").replace(
        "x = torch.relu(self.second(x))", "x = Trip.apply(self.second(x))"
    )
    + """

from trip import trip


class Trip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (trip("forward") or 2) * x

    @staticmethod
    def backward(ctx, gradient):
        return (trip("backward") or 2) * gradient


class TrippingData(Data):
    def __getitem__(self, index):
        trip("data")
        return super().__getitem__(index)


def dataset():
    return TrippingData(80)
"""
)

LOOP = """\
import sys

import torch

import gemsc
from trip import trip

trainer = gemsc.load(sys.argv[1])
for step in range(100):
    if trainer.transport.rank == 1:
        trip("loop")
    trainer.step(torch.ones(8, 8), torch.zeros(8, dtype=torch.long))
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of two ranks; the second one computes `second` and `third`."""
    folder = tmp_path_factory.mktemp("failures")
    (folder / "model.py").write_text(MODEL_THAT_TRIPS)
    (folder / "trip.py").write_text(TRIP)
    (folder / "loop.py").write_text(LOOP)
    program = folder / "program"
    compile_here(folder / "model.py", "--cuts", "second", "-o", program)
    return program


@dataclass
class Job:
    """A running program and the folder where its processes leave their files."""

    process: subprocess.Popen[str]
    folder: Path

    @property
    def ranks(self) -> list[int]:
        return [int(path.name[3:]) for path in self.folder.glob("pid*")]

    def wait_for_trip(self) -> int:
        """Return the process that failed, or is about to do so for ever."""
        wait(lambda: (self.folder / "tripped").exists(), START)
        return int((self.folder / "tripped").read_text())

    def wait_for_end(self) -> str:
        """Return the report; all processes must go in the time promised."""
        everyone = [*self.ranks, *children(self.process.pid)]
        assert len(self.ranks) == 2
        _, report = self.process.communicate(timeout=PROMISE)
        wait(lambda: not any(map(is_alive, everyone)), PROMISE)
        assert self.process.returncode != 0
        return report


def wait(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "too late"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    pids = [int(word) for word in path.read_text().split()] if path.exists() else []
    return [*pids, *(pid for child in pids for pid in children(child))]


def is_mpirun(pid: int) -> bool:
    """Whether a process is mpirun, and not what it or `gemsc run` has started."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return Path(words[0]).name in ("mpirun", "prterun") or STARTER in words[1:3]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start a command that trips; what is left of it at the end is killed."""
    jobs: list[Job] = []

    def start_job(trip: str, *words: object) -> Job:
        process = subprocess.Popen(
            [str(word) for word in words],
            env=os.environ | {"TRIP": trip, "TRIP_FOLDER": str(tmp_path)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        jobs.append(Job(process, tmp_path))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.process.kill()
        job.process.communicate()
        for pid in filter(is_alive, job.ranks):
            os.kill(pid, signal.SIGKILL)


def line_of(text: str) -> int:
    lines = MODEL_THAT_TRIPS.splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def check_report(report: str, error: str = "ValueError: tripped") -> None:
    """One report, one traceback, and nothing of mpirun's."""
    assert report.count("error: rank") == 1, report
    assert report.count("Traceback") == 1, report
    assert report.rstrip().endswith(error), report
    assert "MPI_ABORT" not in report
    assert "-----" not in report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trip", "where"),
    [
        ("forward:6", "forward of stage 1, micro-batch 1, step 1"),
        pytest.param(
            "backward:3",
            "backward of stage 1, micro-batch 2, step 0",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_an_exception_in_a_stage_names_rank_stage_micro_batch_and_line(
    trip: str, where: str, program: Path, run: Callable[..., Job]
) -> None:
    job = run(trip, GEMSC, "run", program)
    job.wait_for_trip()
    report = job.wait_for_end()
    note = "\nnote: this micro-batch has samples 58, 37" * trip.startswith("forward")
    check_report(report, f"ValueError: tripped{note}")
    assert f"error: rank 1 failed in {where}\n" in report
    assert f"{program.parent / 'trip.py'}:" in report
    assert f"generated: {program / 'rank1.py'}:" in report
    if trip.startswith("forward"):
        number = line_of("Trip.apply")
        assert f"model.py:{number}: x = Trip.apply(self.second(x))\n" in report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trip", "error"),
    [
        pytest.param("forward-exit:2", "SystemExit: 3", marks=pytest.mark.nightly),
        ("forward-thread:2", "ValueError: tripped"),
    ],
)
def test_leaving_and_failing_threads_end_all_ranks(
    trip: str, error: str, program: Path, run: Callable[..., Job]
) -> None:
    job = run(trip, GEMSC, "run", program)
    job.wait_for_trip()
    report = job.wait_for_end()
    check_report(report, error)
    assert f"\n{program.parent / 'trip.py'}:" in report
    assert job.process.returncode == 1


@pytest.mark.parametrize("rank", [0, *at_night(1)])
def test_a_killed_rank_is_reported_with_what_it_did(
    rank: int, program: Path, run: Callable[..., Job]
) -> None:
    job = run("forward-sleep:6", GEMSC, "run", program)
    sleeper = job.wait_for_trip()
    (other,) = set(job.ranks) - {sleeper}
    time.sleep(0.5)  # rank 0 goes on until it waits for rank 1
    os.kill(sleeper if rank == 1 else other, signal.SIGKILL)
    report = job.wait_for_end()
    assert job.process.returncode == 128 + signal.SIGKILL
    assert report.count("error: ") == 1
    assert f"error: rank {rank} was ended by signal 9 (Killed) in " in report
    doing = "forward of stage 1" if rank == 1 else "receive of the gradient of "
    assert f" in {doing}" in report
    assert ", micro-batch " in report
    assert ", step 1\n" in report
    first = line_of("self.first(x)" if rank == 0 else "Trip.apply")
    assert f"this rank computes model.py:{first}" in report
    assert "Traceback" not in report


@pytest.mark.slow
def test_a_signal_to_gemsc_run_ends_all_ranks(
    program: Path, run: Callable[..., Job]
) -> None:
    job = run("forward-sleep:6", GEMSC, "run", program)
    job.wait_for_trip()
    job.process.send_signal(signal.SIGINT)
    report = job.wait_for_end()
    assert job.process.returncode == 128 + signal.SIGINT
    first, *notes = report.splitlines()
    assert first == "error: stopped by signal 2 (Interrupt)"
    assert notes[0].startswith("note: rank 0 was in ")
    assert notes[1] == "note: rank 1 was in forward of stage 1, micro-batch 1, step 1"


LEFT = "error: rank 1 has left its loop, and rank 0 waits for "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trip", "says"),
    [
        pytest.param(
            "loop:5",
            "error: rank 1 failed in between two steps, step 3\n",
            marks=pytest.mark.nightly,
        ),
        ("loop-exit:5", "error: rank 1 left with sys.exit(3)\n"),
        ("loop-leave:5", LEFT),
        pytest.param("loop-raise:5", LEFT, marks=pytest.mark.nightly),
    ],
)
def test_an_own_loop_that_fails_on_one_rank_ends_all(
    trip: str, says: str, program: Path, run: Callable[..., Job]
) -> None:
    loop = program.parent / "loop.py"
    script = (
        "import sys; from gemsc.launch.launch import launch; "
        "sys.exit(launch(2, sys.argv[1:]))"
    )
    job = run(trip, sys.executable, "-c", script, sys.executable, loop, program)
    job.wait_for_trip()
    report = job.wait_for_end()
    assert report.count("error: ") == 1, report
    code = 1
    if trip.startswith("loop-raise") and os.environ["GEMSC_ENGINE"] == "torch":
        # the rank is gone with its code; with MPI it waits for the others
        code, says = 3, "error: rank 1 ended with exit code 3 in between two steps"
    assert says in report
    assert job.process.returncode == code


@pytest.mark.slow
def test_ranks_that_all_fail_report_once(program: Path, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP.replace("100", "no_number"))
    (tmp_path / "trip.py").write_text(TRIP)
    with (tmp_path / "err").open("w") as err:
        words = [sys.executable, str(tmp_path / "loop.py"), str(program)]
        assert launch.launch(2, words, stderr=err, timeout=START) == 1
    report = (tmp_path / "err").read_text()
    assert report.count("error: rank") == 1
    assert f"{tmp_path / 'loop.py'}:9: for step in range(no_number):\n" in report


# Training that has failed, and kills while a checkpoint is written: ten steps of four
# micro-batches an epoch, then two batches of evaluation


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trip", "says", "saved"),
    [
        ("forward-nan:54", "error: the loss is nan at step 12, in micro-batch 1\n", 10),
        pytest.param(
            "backward-nan:40",
            "is not finite at step 10\n",
            None,
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_training_stops_once_it_has_failed_and_the_checkpoint_stays(
    trip: str,
    says: str,
    saved: int | None,
    program: Path,
    run: Callable[..., Job],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "saved"
    job = run(trip, GEMSC, "run", program, "--epochs", 3, "--save", folder)
    job.wait_for_trip()
    report = job.wait_for_end()
    assert job.process.returncode == 1
    assert report.count("error: ") == 1
    assert says in report
    assert "help: try a smaller learning rate, or --clip-norm 1" in report
    assert "Traceback" not in report
    assert (folder / "latest").exists() == (saved is not None)
    if saved is not None:
        assert f"{folder} holds the checkpoint of step {saved}" in report
        manifest = check_checkpoint(folder).manifest
        assert manifest is not None
        assert manifest.step == saved


@pytest.mark.slow
def test_a_folder_that_another_run_is_in_is_refused(
    program: Path, tmp_path: Path
) -> None:
    words = (GEMSC, "run", program, "--save", tmp_path, "--overwrite")
    with held(tmp_path):
        done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: another run is in {tmp_path}: process ")
    assert not list(tmp_path.glob("log*"))


def step_of(latest: Path) -> int:
    return int(latest.readlink().name.split("-")[1])


VICTIMS = ("rank", "mpirun", "command", "all")


def scratch_of(rank: int) -> Path:
    """Return the folder in shared memory of the job that a rank belongs to."""
    variables = Path(f"/proc/{rank}/environ").read_bytes().split(b"\0")
    named = dict(entry.decode().partition("=")[::2] for entry in variables)
    return Path(named["GEMSC_STATUS_FOLDER"]).parent


@pytest.mark.slow
@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(VICTIMS[:2], id="2"),
        *(
            pytest.param(VICTIMS * 2, id=f"8 ({part} of 8)", marks=pytest.mark.nightly)
            for part in range(1, 9)
        ),
    ],
)
def test_kills_at_random_moments_leave_whole_checkpoints_and_nothing_else(
    victims: tuple[str, ...],
    program: Path,
    run: Callable[..., Job],
    tmp_path: Path,
) -> None:
    """Of a rank, mpirun, the command, or all; half of them while it saves."""
    folder, steps, left = tmp_path / "saved", [0], tmp_path / "nowhere"
    latest = folder / "latest"  # is switched after the new folder is there
    words = [GEMSC, "run", program, "--epochs", 10**6, "--save", folder]
    for number, victim in enumerate(victims):
        for path in tmp_path.glob("pid*"):
            path.unlink()
        job = run("none:0", *words, *(["--resume", folder] if number else []))
        wait(lambda: latest.exists() and step_of(latest) > steps[-1], START)
        assert not left.exists()
        left = scratch_of(job.ranks[0])
        assert left.exists()
        if saves := number // 4 % 2 == 0:
            wait(lambda: any(folder.glob(".step-*")), START)
        time.sleep(random.random() / (20 if saves else 1))
        others = [job.process.pid, *children(job.process.pid)]
        killed = {
            "rank": [random.choice(job.ranks)],
            "mpirun": [pid for pid in others if is_mpirun(pid)],
            "command": others[:1],
            "all": others,
        }
        begun = time.monotonic()
        for pid in killed[victim]:
            os.kill(pid, signal.SIGKILL)
        job.wait_for_end()
        seconds = time.monotonic() - begun
        checkpoint = check_checkpoint(folder)
        manifest = checkpoint.manifest
        assert manifest is not None
        check_digests(checkpoint.place, manifest, 0, 1)
        assert manifest.step > steps[-1]
        steps.append(manifest.step)
        what = "saving" if saves else "computing"
        print(f"{victim:8} {what:10} gone in {seconds:.1f} s")  # noqa: T201
