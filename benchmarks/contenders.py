"""Groups of processes that train the same model, one group at a time.

    controller ---- "2 steps" ----> group A: one connection for each rank
               <--- times, CPU ----          the others sleep in recv()
               ---- "2 steps" ----> group B ...

Start-up is outside of what is measured, and a disturbance of the machine hits all
groups alike. What each process of a group runs is in contender_process.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import contender_process
from cases import CASES
from jobs import Job

import gemsc
from gemsc.launch.hosts import Host
from gemsc.launch.launch import launch, mpirun_command

__all__ = [
    "ADDRESSES",
    "SPACE",
    "Contender",
    "Job",
    "Memory",
    "Round",
    "Turn",
    "busy_processes",
    "compile_job",
    "contenders",
    "quiet_rounds",
]

QUIET = 0.08  # of the machine, used by others during a turn
ANSWER_SECONDS = 240.0  # longest wait for a group
GROUP_SECONDS = 3600.0  # longest life of one
# set where two hosts train: this one's address and the other's; the other's namespace
ADDRESSES, SPACE = "BENCH_ADDRESSES", "BENCH_SPACE"


@dataclass(frozen=True)
class Turn:
    """What a group took for some steps; CPU seconds are summed over its ranks.

    `others` is the share of the machine's cores that went elsewhere meanwhile.
    """

    seconds: float
    cpu_seconds: float
    losses: list[float]
    others: float


@dataclass(frozen=True)
class Memory:
    """Peaks of the rank with the highest, during one step, in bytes."""

    resident: int
    tensors: int


class Contender:
    """A group, as the controller sees it."""

    def __init__(self, name: str, connections: list[Connection]) -> None:
        self.name = name
        self._connections = connections
        self._busy = self._began = 0.0

    def run(self, num_steps: int) -> Turn:
        """Let it make one step that does not count, then `num_steps`."""
        self.begin(num_steps)
        return self.finish()

    def begin(self, num_steps: int) -> None:
        """Start what `run` does; another group may run at the same time."""
        self._busy, self._began = _busy_seconds(), time.monotonic()
        self._order(("run", num_steps))

    def finish(self) -> Turn:
        """Wait for what `begin` started."""
        answers = self._answers()
        seconds = max(f["end"] for f in answers) - min(f["start"] for f in answers)
        losses = next(f["losses"] for f in answers if f["losses"])
        others = _busy_seconds() - self._busy - sum(f["all_cpu"] for f in answers)
        cores = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return Turn(seconds, sum(f["cpu"] for f in answers), losses, others / cores)

    def memory(self) -> Memory:
        """Let it make two steps and watch its memory."""
        self._order(("memory", 1))
        answers = self._answers()
        return Memory(
            max(f["resident"] for f in answers), max(f["tensors"] for f in answers)
        )

    def stop(self) -> None:
        """Let its processes end."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)

    def _order(self, order: tuple[str, int]) -> None:
        for connection in self._connections:
            connection.send(order)

    def _answers(self) -> list[dict[str, Any]]:
        answers = []
        for connection in self._connections:
            if not connection.poll(ANSWER_SECONDS):
                raise TimeoutError(f"{self.name} does not answer")
            answers.append(connection.recv())
        return answers


Round = dict[str, Turn]


def quiet_rounds(
    make: Callable[[], Round], count: int, patience: float
) -> tuple[list[Round], str]:
    """Return `count` rounds in which others left the machine alone, and a note.

    Rounds go on until there are as many, or for `patience` seconds; then the `count`
    least disturbed ones are taken.
    """
    end = time.monotonic() + patience
    rounds: list[Round] = []
    while len(rounds) < count or (
        sum(_disturbance(lap) <= QUIET for lap in rounds) < count
        and time.monotonic() < end
    ):
        rounds.append(make())
    kept = sorted(rounds, key=_disturbance)[:count]
    shares = [turn.others for lap in kept for turn in lap.values()]
    note = (
        f"{count} of {len(rounds)} rounds; others used "
        f"{statistics.mean(shares):.0%} of the machine, at most {max(shares):.0%}"
    )
    return kept, note


def _disturbance(turns: Round) -> float:
    return max(turn.others for turn in turns.values())


def _busy_seconds() -> float:
    """Return the seconds that all cores have worked since the start, or 0."""
    try:
        line = Path("/proc/stat").read_text().split("\n", 1)[0]
    except OSError:  # not Linux: then nobody knows
        return 0.0
    user, nice, system, _idle, _waiting, *others = map(int, line.split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def compile_job(
    case_name: str,
    ranks: int,
    micro_batches: int,
    schedule: str,
    directory: Path,
    **choices: Any,
) -> Job:
    """Compile a program for a benchmark; `data` are replicas that share the batch."""
    case, replicas = CASES[case_name], choices.get("data", 1)
    inputs, target = case.data(case.batch // (micro_batches * replicas))
    gemsc.compile(
        case.build(),
        inputs,
        loss=case.loss,
        example_target=target,
        ranks=ranks,
        schedule=schedule,
        micro_batches=micro_batches,
        **choices,
    ).write(directory)
    return Job(
        case_name,
        ranks,
        micro_batches,
        schedule,
        str(directory),
        memory_format=choices.get("memory_format", "as-given"),
        torch_compile=choices.get("torch_compile", False),
    )


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Let so many other processes compute meanwhile, each in a session of its own."""
    program = f"import os, time; end = time.monotonic() + {GROUP_SECONDS}\n"
    program += f"while os.getppid() == {os.getpid()} and time.monotonic() < end: pass"
    command = [sys.executable, "-c", program]
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen(command, start_new_session=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


@contextlib.contextmanager
def contenders(jobs: dict[str, tuple[str, Job]]) -> Iterator[list[Contender]]:
    """Start groups: name -> (kind, job); they sleep until they are asked.

    All have the same environment: the job's threads and, except for `plain`, the
    settings for glibc's malloc that gemsc's launcher makes.
    """
    environment = {
        "GLIBC_TUNABLES": mpirun_command(1, [])[1]["GLIBC_TUNABLES"],
        "GLOO_SOCKET_IFNAME": "wire" if SPACE in os.environ else "lo",
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        started = []
        for index, (name, (kind, job)) in enumerate(jobs.items()):
            place = folder / str(index)
            place.mkdir()
            contender = _start(name, kind, job, place, environment, stack)
            stack.callback(contender.stop)
            started.append(contender)
        yield started


def _start(
    name: str,
    kind: str,
    job: Job,
    place: Path,
    environment: dict[str, str],
    stack: contextlib.ExitStack,
) -> Contender:
    num_ranks = 1 if kind in ("alone", "plain") else job.ranks
    environment = environment | {"OMP_NUM_THREADS": str(job.threads)}
    if kind == "plain":
        environment = environment | {"GLIBC_TUNABLES": ""}
    server = stack.enter_context(socket.socket(socket.AF_UNIX))
    server.bind(str(place / "socket"))
    server.listen(num_ranks)
    server.settimeout(ANSWER_SECONDS)
    program = contender_process.__file__
    command = [sys.executable, program, kind, str(place), json.dumps(asdict(job))]
    if kind == "gemsc":
        addresses = os.environ.get(ADDRESSES, "").split()
        hosts = [Host(address, 1) for address in addresses]
        words = {"env": environment, "timeout": GROUP_SECONDS, "hosts": hosts}
        thread = threading.Thread(
            target=launch, args=(num_ranks, command), kwargs=words, daemon=True
        )
        thread.start()
        stack.callback(thread.join, ANSWER_SECONDS)
    else:
        for rank in range(num_ranks):
            variables = os.environ | environment | {"RANK": str(rank)}
            other = ["ip", "netns", "exec", os.environ.get(SPACE, "")]
            where = other if rank and SPACE in os.environ else []
            process = subprocess.Popen([*where, *command], env=variables)
            stack.callback(_end, process)
    connections = []
    for _ in range(num_ranks):
        accepted, _address = server.accept()
        accepted.setblocking(True)
        connections.append(Connection(accepted.detach()))
    return Contender(name, connections)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
