"""Real jobs that hang, and jobs that are asked to stop: what they say, and when.

Everyday there are two; `pytest --nightly -s` prints the table of all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import GEMSC, MODEL, compile_here
from test_failures import children

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("engine")]

START = 90.0  # seconds that ranks may take to start on a busy machine

# `trip` sleeps on one rank at a call of its number
TRIP = """

import atexit
import os
import signal
import sys
import time

OWN = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK"))
KIND, RANK, CALL = os.environ.get("TRIP", "none:9:0").split(":")
calls = 0


def trip(kind):
    global calls
    if (kind, OWN) != (KIND, RANK):
        return
    calls += 1
    if calls == int(CALL):
        if os.environ.get("TRIP_SIGNAL"):
            os.kill(os.getpid(), int(os.environ["TRIP_SIGNAL"]))
            return
        time.sleep(600)


def at_end():
    if os.environ.get("TRIP_SIGNAL") and OWN is not None:
        print("at the end:", repr(signal.getsignal(signal.SIGTERM)))


atexit.register(at_end)


class Trip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        trip("forward")
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        trip("backward")
        return 2 * gradient


class Tripping(Data):
    def __getitem__(self, index):
        trip("data")
        time.sleep(float(os.environ.get("TRIP_SECONDS", "0")))
        return super().__getitem__(index)


def dataset():
    return Tripping(80)


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        trip("optimizer")
        return super().step(closure)


def optimizer(params):
    return Optimizer(params, lr=0.01)


def on_step(trainer, report):
    trip("hook")
"""

LOOP = """\
import sys
from pathlib import Path

import torch

import gemsc
from model import trip

kind, *words = sys.argv[1:]
trainer = gemsc.load("program", timeout=words[0])
host = trainer.worker.transport.host
send = host.send


class Never:
    def done(self):
        return True


def lossy_send(tensor, dest, tag):
    return Never() if trainer.step_number == 3 else send(tensor, dest, tag)


if kind == "lost" and host.rank == 0:
    host.send = lossy_send
while not trainer.is_leaving:
    trip("loop")
    trainer.step(torch.ones(8, 8), torch.zeros(8, dtype=torch.long))
trainer.save(Path(words[1]))
sys.exit(75)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program of two ranks, and a loop of its own."""
    folder = tmp_path_factory.mktemp("hanging")
    text = MODEL.replace("        x = self.drop(x)\n", "")
    text = text.replace("torch.relu(self.first(x))", "Trip.apply(self.first(x))")
    text = text.replace("torch.relu(self.second(x))", "Trip.apply(self.second(x))")
    (folder / "model.py").write_text(text + TRIP)
    (folder / "loop.py").write_text(LOOP)
    words = ("--cuts", "second", "--micro-batches", 4, "-o", folder / "program")
    compile_here(folder / "model.py", *words)
    return folder


@dataclass
class Job:
    """A job, and the text of its two streams so far."""

    process: subprocess.Popen[str]
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + START
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            assert self.process.poll() is None, self.text
            time.sleep(0.02)

    @property
    def ranks(self) -> list[int]:
        """The processes of the ranks, in order."""
        pairs, names = [], (b"PMIX_RANK=", b"RANK=")
        for pid in children(self.process.pid):
            data = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ranks = [v.partition(b"=")[2] for v in data if v.startswith(names)]
            pairs += [(int(rank), pid) for rank in ranks]
        return [pid for _, pid in sorted(pairs)]


@pytest.fixture
def job(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start a command in that folder; what is left of it at the end is killed."""
    jobs: list[Job] = []

    def begin(*words: object, **environment: str) -> Job:
        output = tmp_path / "output"
        with output.open("w") as stream:
            process = subprocess.Popen(
                [str(word) for word in words],
                cwd=folder,
                env=os.environ | environment,
                stdout=stream,
                stderr=stream,
                text=True,
            )
        jobs.append(Job(process, output))
        return jobs[-1]

    yield begin
    for started in jobs:
        pids = children(started.process.pid)
        started.process.kill()
        started.process.wait()
        for pid in pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)


def own_loop(kind: str, *words: object) -> list[object]:
    script = (
        "import sys; from gemsc.launch.launch import launch; "
        "sys.exit(launch(2, sys.argv[1:]))"
    )
    return [sys.executable, "-c", script, sys.executable, "loop.py", kind, *words]


def check_hang(job: Job, first: str) -> None:
    """The job ends with one report that begins so, and says where each rank is."""
    assert job.process.wait(START) == 1
    report = job.text[job.text.index("error: ") :]
    assert report.count("error: ") == 1, report
    assert f" s: {first}" in report.splitlines()[0], report
    assert report.count("note: rank ") == 2
    assert "Traceback" not in report


def test_a_job_hangs_and_says_whose_turn_it_is(
    job: Callable[..., Job], folder: Path
) -> None:
    words = (GEMSC, "run", "program", "--timeout", "2s")
    hung = job(*words, TRIP="data:0:38", TRIP_SECONDS="0.02")  # a step takes 0.2 s
    check_hang(hung, "rank 1 waits for rank 0, which has been in reading the dataset")
    assert "note: rank 0: reading the dataset, step 2; model.py:" in hung.text
    assert "in trip: time.sleep(600)" in hung.text
    assert "note: rank 1: receive of " in hung.text
    assert "in forward_stage1: " in hung.text
    assert (
        "warning: no rank has made progress for 1 s: rank 1 waits for rank 0"
        in hung.text
    )


def check_too_late(text: str) -> None:
    """Signals change nothing once the ranks are at their end."""
    count = text.count("at the end: ")  # more, if a rank has loaded the file twice
    assert count == text.count("at the end: <Handlers.SIG_IGN") >= 2


@pytest.mark.slow
def test_a_signal_to_one_rank_saves_after_the_step_and_leaves_with_75(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    words = (GEMSC, "run", "program", "--save", tmp_path / "saved", "--steps", 20)
    given = {"TRIP": "hook:1:3", "TRIP_SIGNAL": str(int(signal.SIGUSR1))}
    asked = job(*words, **given)
    assert asked.process.wait(START) == 75
    text = asked.text
    check_too_late(text)
    says = f"stopped on request at step 4; checkpoint in {tmp_path / 'saved'}"
    assert says in text
    command = text[text.index("gemsc run ") :].split()
    assert "error" not in text
    assert (tmp_path / "saved" / "latest").resolve().name == "step-000004"
    assert {"--steps", "20", "--resume"} <= set(command)


# every way to hang, with the seconds until the report; the limit is 4 s

RUN = (GEMSC, "run", "program", "--timeout", "4s")
READS = "rank 0 waits for rank 1, which has been in reading the dataset"
TABLE = {
    "dataset": (RUN, "data:1:30", READS),
    "data worker": ((*RUN, "--workers", 1), "data:1:30", READS),
    "forward": (RUN, "forward:0:20", "rank 1 waits for rank 0, which has been in f"),
    "backward": (RUN, "backward:1:9", "rank 0 waits for rank 1, which has been in b"),
    "optimizer": (
        RUN,
        "optimizer:1:4",
        "rank 0 waits for rank 1, which has been in o",
    ),
    "hook": (RUN, "hook:0:4", "rank 1 waits for rank 0, which has been in "),
    "own loop": (
        own_loop("", "4s", "none"),
        "loop:1:4",
        "rank 0 waits for rank 1, which has been in between two steps",
    ),
    "lost message": (own_loop("lost", "4s", "none"), "none:9:0", "rank 0 waits for ra"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("how", TABLE)
def test_every_way_to_hang_is_told(how: str, job: Callable[..., Job]) -> None:
    words, trip, first = TABLE[how]
    hung = job(*words, TRIP=trip, TRIP_SECONDS="0.02")
    hung.wait_for("warning: ")
    begun = time.monotonic() - 2  # half of the limit
    check_hang(hung, first)
    print(f"{how:14} {time.monotonic() - begun:5.1f} s", hung.text)  # noqa: T201


@pytest.mark.nightly
@pytest.mark.parametrize("stopped", [(0,), (1,), (0, 1)])
def test_stopped_ranks_are_told_of(
    stopped: tuple[int, ...], job: Callable[..., Job]
) -> None:
    hung = job(*RUN, "--epochs", 99, TRIP_SECONDS="0.02")
    hung.wait_for("epoch 1/99 1/10")
    ranks = hung.ranks
    begun = time.monotonic()
    for rank in stopped:
        os.kill(ranks[rank], signal.SIGSTOP)
    first = "rank " if len(stopped) == 2 else f"rank {1 - stopped[0]} waits for rank "
    check_hang(hung, first)
    assert f"is stopped: kill -CONT {ranks[stopped[0]]} continues it" in hung.text
    print(f"stopped {stopped} {time.monotonic() - begun:5.1f} s", hung.text)  # noqa: T201


@pytest.mark.nightly
def test_a_slow_job_is_never_stopped(job: Callable[..., Job], tmp_path: Path) -> None:
    words = (GEMSC, "run", "program", "--timeout", "2s", "--epochs", 1)
    slow = job(*words, TRIP_SECONDS="0.4")  # 3.2 s a step
    assert slow.process.wait(START) == 0
    assert "error" not in slow.text


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("to", ["command", "mpirun", "rank"])
def test_signals_stop_a_job_that_goes_on_from_there(
    number: int, to: str, job: Callable[..., Job], tmp_path: Path
) -> None:
    words = (GEMSC, "run", "program", "--save", tmp_path / "saved", "--steps", 40)
    asked = job(*words, TRIP_SECONDS="0.02")
    asked.wait_for("epoch 1/4 1/10")
    command, ranks = asked.process.pid, asked.ranks
    (mpirun,) = (pid for pid in children(command) if ranks[0] in children(pid)[:2])
    os.kill({"command": command, "mpirun": mpirun, "rank": ranks[1]}[to], number)
    assert asked.process.wait(START) == 75, asked.text
    assert "stopped on request at step " in asked.text
    resumed = job(*words, "--resume", tmp_path / "saved")
    assert resumed.process.wait(START) == 0


@pytest.mark.nightly
def test_an_own_loop_asks_whether_to_leave(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    given = {"TRIP": "loop:1:9", "TRIP_SIGNAL": str(int(signal.SIGTERM))}
    asked = job(*own_loop("", "60s", saved), **given)
    assert asked.process.wait(START) == 75
    assert "error" not in asked.text
    # what a file that gemsc loads says comes before, and a rank may be ended then
    assert "at the end: <Handlers.SIG_IGN" in asked.text
    assert (saved / "latest").exists()
