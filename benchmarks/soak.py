"""Kill jobs at random, resume them, and compare them with runs that nobody disturbed.

python benchmarks/soak.py [--minutes 3] [--seed 0] [--only data,tiles] [--steps 20000]

Each layout trains for some minutes and saves every two seconds. Again and again one of
its processes (a rank, mpirun, `gemsc run`) gets a signal, while the job starts, while
it saves or at any other moment, and the job goes on with `--resume`. The same steps are
then made at one go. All that the two last checkpoints hold must be equal bit for bit:
weights, optimizer, scheduler, generators, best figures; so must the figures of each
step in their logs. After each signal all processes, and all files in /dev/shm and in
the folder for temporary files, must be gone.

A run of `--steps` then shows whether memory and open files grow: the median of the one
and the least of the other in the second tenth of the steps, and in the ninth.

Only Linux shows all that. Exit code 1: something differed, was left, or grew.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from gemsc.launch.start import last_step
from gemsc.runtime.checkpoint.manifest import Manifest
from gemsc.runtime.process.status import STATUS_VARIABLE

GEMSC = Path(sys.executable).with_name("gemsc")
MODEL = """\
import torch
from torch import nn
from torch.utils.data import Dataset


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.three = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.five = nn.Sequential(nn.Conv2d(8, 8, 5, padding=2), nn.ReLU())
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x):
        return self.norm(torch.cat([self.three(x), self.five(x)], 1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.branches = Branches()
        self.drop = nn.Dropout(0.1)
        self.leave = nn.Conv2d(16, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.drop(self.branches(torch.relu(self.enter(x))))
        return self.head(torch.relu(self.leave(x)).mean((2, 3)))


class Pictures(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.randn(3, 8, 8) + index % 4 / 4, index % 4


model = Net
loss = nn.CrossEntropyLoss()


def example_inputs():
    return (torch.randn(2, 3, 8, 8),)


def example_target():
    return torch.arange(2)


def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-3)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99999)


def dataset():
    return Pictures(1000)


def eval_dataset():
    return Pictures(32)


def metrics(output, target):
    return {"accuracy": (output.argmax(1) == target).float().mean()}
"""
LAYOUTS = {  # how to compile, and to run
    "pipeline": ("--ranks 2", "--checkpoint-async"),
    "data": ("--ranks 2 --data 2 --shard-optimizer", "--workers 1"),
    "shards": ("--ranks 2 --shards 2", "--ema 0.99"),
    "branches": ("--ranks 2 --branches 2", ""),
    "tiles": ("--ranks 2 --tiles 2x1", "--clip-norm 1"),
}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
FIGURES = ("step", "epoch", "loss", "learning_rate", "gradient_norm", "eval_loss")
MPIRUN = ("mpirun", "prterun", "mpiexec.hydra")
PROXY = "hydra_pmi_proxy"  # MPICH has one between mpirun and the ranks
OF_PYTORCH = ("torchinductor_", "pymp-")  # DataLoader's workers leave these always
SAVING = ".step-*"  # a checkpoint's folder until it is whole
EPOCH = 250  # steps
EVERY = 2.0  # seconds from one checkpoint to the next
START = 120.0  # seconds in which a job makes its first checkpoint on a busy machine
END = 60.0  # and in which it ends: the step has 30 s after a SIGTERM
GONE = 10.0  # and until nothing is left of it
GROWTH = 4.0  # MiB between the second tenth of the steps and the ninth


class ProblemError(Exception):
    """What should not have happened."""


@dataclass
class Report:
    """What went wrong, and what was seen."""

    problems: list[str] = field(default_factory=list)
    endings: Counter[tuple[str, str, int]] = field(default_factory=Counter)

    def add(self, problem: str) -> None:
        """Print a problem, and keep it."""
        print(f"PROBLEM: {problem}", flush=True)
        self.problems.append(problem)


@dataclass(frozen=True)
class Place:
    """A folder with the program of one layout, and all that its runs write."""

    folder: Path
    options: tuple[str, ...]

    @classmethod
    def compiled(cls, folder: Path, name: str) -> Place:
        """Compile a layout."""
        compile, run = (words.split() for words in LAYOUTS[name])
        (folder / "temporary").mkdir(parents=True)
        (folder / "model.py").write_text(MODEL)
        words = "compile", "model.py", *compile, "--micro-batches", "2", "-o", "program"
        done = subprocess.run(
            [str(GEMSC), *words], cwd=folder, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise ProblemError(f"{name} does not compile: {done.stderr}")
        return cls(folder, tuple(run))

    def start(self, run: str, *words: object) -> Job:
        """Start a run that saves."""
        output = self.folder / "output"
        command = [GEMSC, "run", "program", "--save", run, *self.options, *words]
        with output.open("w") as stream:
            process = subprocess.Popen(
                [*map(str, command), "--checkpoint-every", f"{EVERY:.0f}s"],
                cwd=self.folder,
                env=os.environ | {"TMPDIR": str(self.folder / "temporary")},
                stdout=stream,
                stderr=stream,
            )
        return Job(process, output, self.folder / run)


@dataclass
class Job:
    """A job that runs, all that it prints, and its run's folder."""

    process: subprocess.Popen[bytes]
    output: Path
    run: Path

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for something that happens while the job runs.

        Raises:
            ProblemError: it has ended, or it takes longer.
        """
        for _ in until(seconds):
            if condition():
                return
            if self.process.poll() is not None:
                break
        raise ProblemError(
            f"it has ended, or saves nothing:\n{self.output.read_text()}"
        )

    def wait_for_step(self, step: int) -> None:
        """Wait for the checkpoint of a step, or a later one."""
        self.wait_for(lambda: last_step(self.run) >= step, START)

    def processes(self) -> dict[str, list[int]]:
        """Return its processes by what they are."""
        command = self.process.pid
        mpirun = [pid for pid in children(command) if name_of(pid) in MPIRUN]
        ranks = [rank for pid in mpirun for rank in children(pid)]
        if ranks and name_of(ranks[0]) == PROXY:
            ranks = [rank for pid in ranks for rank in children(pid)]
        everyone = [command, *descendants(command)]
        return {"rank": ranks, "mpirun": mpirun, "command": [command], "": everyone}

    def scratch(self) -> Path | None:
        """Return its folder in shared memory, once a rank runs."""
        for rank in self.processes()["rank"]:
            for variable in environment_of(rank):
                name, _, value = variable.partition("=")
                if name == STATUS_VARIABLE:
                    return Path(value).parent
        return None

    def end(self, victim: str, number: int) -> tuple[str, int]:
        """Send a signal, and return to whom, and the exit code once nothing is left.

        Before there are ranks, and mpirun, `gemsc run` gets it.

        Raises:
            ProblemError: something goes on, or a file is left.
        """
        everyone, scratch = self.processes(), self.scratch()
        victim = victim if everyone[victim] else "command"
        os.kill(random.choice(everyone[victim]), number)
        how = f"after {signal.Signals(number).name} to {victim}"
        try:
            code = self.process.wait(END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise ProblemError(
                f"{how} it goes on:\n{self.output.read_text()}"
            ) from None
        for _ in until(GONE):
            left = [f"process {pid}" for pid in everyone[""] if is_alive(pid)]
            left += [str(scratch)] if scratch is not None and scratch.exists() else []
            for pid in everyone[""]:
                left += map(str, Path("/dev/shm").glob(f"torch_{pid}_*"))
            if not left:
                return victim, 128 - code if code < 0 else code
        raise ProblemError(f"{how} there still is {', '.join(left)}")


def until(seconds: float) -> Iterator[None]:
    """Yield until some seconds are over, at least once."""
    deadline = time.monotonic() + seconds
    yield
    while time.monotonic() < deadline:
        time.sleep(0.01)
        yield


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    try:
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    started = children(pid)
    return [*started, *(below for child in started for below in descendants(child))]


def name_of(pid: int) -> str:
    """Return what a process is called."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def environment_of(pid: int) -> list[str]:
    """Return the NAME=VALUE that a process was started with."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return []
    return data.decode(errors="replace").split("\0")


def is_alive(pid: int) -> bool:
    """Whether a process still runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


# kills


def disturb(place: Place, minutes: float, draw: random.Random, report: Report) -> int:
    """Train for some minutes with a signal now and then; return the last step.

    Raises:
        ProblemError: the run cannot go on.
    """
    deadline = time.monotonic() + 60 * minutes
    resume: tuple[str, ...] = ()
    while time.monotonic() < deadline:
        job = place.start("disturbed", "--epochs", 10**6, *resume)
        resume = ("--resume",)
        moment = draw.choice(("start", "saving", "any", "any"))
        victim = draw.choice(("rank", "mpirun", "command"))
        number = draw.choice(SIGNALS)
        if moment == "start":
            time.sleep(draw.uniform(0, 5))
        else:
            job.wait_for_step(last_step(job.run) + 1)
            time.sleep(draw.uniform(0, 2 * EVERY))
        if moment == "saving":
            job.wait_for(lambda: any(job.run.glob(SAVING)), START)  # noqa: B023
            time.sleep(draw.uniform(0, 0.02))
        try:
            victim, code = job.end(victim, number)
        except ProblemError as problem:
            waited = job.run if moment == "start" else last_step(job.run)
            raise ProblemError(f"at moment '{moment}' ({waited}), {problem}") from None
        report.endings[victim, number.name, code] += 1
    step = last_step(place.folder / "disturbed") + EPOCH
    job = place.start("disturbed", "--steps", step, *resume)
    if job.process.wait() != 0:
        raise ProblemError(f"it does not go on:\n{job.output.read_text()}")
    return step


def differences(place: Place, step: int) -> list[str]:
    """Make the same steps at one go, and return what differs."""
    job = place.start("straight", "--steps", step)
    if job.process.wait() != 0:
        return [f"the run that nobody disturbed fails:\n{job.output.read_text()}"]
    runs = [place.folder / name for name in ("disturbed", "straight")]
    one, other = (Manifest.read(run / "latest") for run in runs)
    problems = [] if one == other else [f"the checkpoints of step {step} differ"]
    tables = [figures_in(run / "log.csv") for run in runs]
    wrong = [row for row, (a, b) in enumerate(zip(*tables, strict=False), 1) if a != b]
    if wrong:
        problems.append(f"the logs differ in {len(wrong)} rows, from row {wrong[0]}")
    if len(tables[0]) != len(tables[1]):
        problems.append(f"the logs have {len(tables[0])} and {len(tables[1])} rows")
    return problems


def figures_in(log: Path) -> list[tuple[str | None, ...]]:
    """Return of each step what does not depend on time."""
    with log.open(newline="") as file:
        return [tuple(row.get(key) for key in FIGURES) for row in csv.DictReader(file)]


def kill_and_compare(
    names: list[str], folder: Path, minutes: float, seed: int, report: Report
) -> None:
    """Print a row for each layout."""
    print(f"{'layout':10} signals   steps  equal", flush=True)
    for name in names:
        before = report.endings.total()
        step, wrong = 0, []
        try:
            place = Place.compiled(folder / name, name)
            step = disturb(place, minutes, random.Random(f"{seed} {name}"), report)
            wrong = differences(place, step)
            left = os.listdir(place.folder / "temporary")
            left = [name for name in left if not name.startswith(OF_PYTORCH)]
            wrong += [f"{len(left)} temporary files are left: {left[:5]}"] * bool(left)
        except ProblemError as problem:
            wrong = [str(problem)]
        for problem_text in wrong:
            report.add(f"{name}: {problem_text}")
        count = report.endings.total() - before
        equal = "NO" if wrong else "yes"
        print(f"{name:10} {count:7} {step:7}  {equal}", flush=True)


def print_endings(report: Report) -> None:
    """Print which signals ended the jobs with which exit codes."""
    print(f"\n{'signal to':20} exit codes (times)")
    for victim in ("rank", "mpirun", "command"):
        for number in SIGNALS:
            codes = {
                code: count
                for (who, what, code), count in sorted(report.endings.items())
                if (who, what) == (victim, number.name)
            }
            shown = ", ".join(f"{code} ({count})" for code, count in codes.items())
            print(f"{number.name + ' ' + victim:20} {shown or '-'}")


# memory


@dataclass(frozen=True)
class Sample:
    """What a process needs at a step."""

    step: int
    mib: float
    files: int


def watch(name: str, folder: Path, steps: int, report: Report) -> None:
    """Train for so many steps, and print a row for each process."""
    place = Place.compiled(folder / f"memory-{name}", name)
    job = place.start("run", "--steps", steps)
    seen: dict[str, list[Sample]] = {}
    while job.process.poll() is None:
        pids = job.processes()
        table = step_in(job.run / "log.csv")
        named = [(f"rank {i}", pid) for i, pid in enumerate(sorted(pids["rank"]))]
        named += [(what, pid) for what in ("mpirun", "command") for pid in pids[what]]
        for who, pid in named:
            if table and (sample := look_at(pid, table)) is not None:
                seen.setdefault(who, []).append(sample)
        time.sleep(0.2)
    if job.process.returncode != 0:
        report.add(f"{name}: the long run fails:\n{job.output.read_text()}")
        return
    for who, samples in seen.items():
        early = [s for s in samples if steps / 10 <= s.step <= steps / 5]
        late = [s for s in samples if steps * 0.8 <= s.step <= steps * 0.9]
        if not early or not late:
            report.add(f"{name}, {who}: too few looks in {steps} steps")
            continue
        mib = [median(s.mib for s in part) for part in (early, late)]
        files = [min(s.files for s in part) for part in (early, late)]
        print(
            f"{name:10} {who:8} {mib[0]:8.1f} {mib[1]:8.1f} {files[0]:6} {files[1]:6}",
            flush=True,
        )
        if mib[1] - mib[0] > GROWTH or files[1] > files[0]:
            report.add(f"{name}: {who} grows")


def step_in(table: Path) -> int:
    """Return the last step of a log, 0 if there is none yet."""
    try:
        with table.open("rb") as file:
            file.seek(max(0, table.stat().st_size - 400))
            lines = file.read().decode().splitlines()
        return int(lines[-1].split(",")[0])
    except (OSError, ValueError, IndexError):
        return 0


def look_at(pid: int, step: int) -> Sample | None:
    """Return what a process needs now; None if it has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = len(os.listdir(f"/proc/{pid}/fd"))
        resident = status.split("VmRSS:")[1].split()[0]
    except (OSError, IndexError):
        return None
    return Sample(step, int(resident) / 1024, files)


def main() -> int:
    """Print the tables; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=3, help="of kills, a layout")
    parser.add_argument("--seed", type=int, default=0, help="of the signals")
    parser.add_argument("--steps", type=int, default=20_000, help="0: no memory")
    parser.add_argument("--only", default=",".join(LAYOUTS), help="layouts")
    parser.add_argument("--quick", action="store_true", help="seconds, not minutes")
    options = parser.parse_args()
    if options.quick:
        options.minutes, options.steps, options.only = 0.3, 1000, "pipeline"
    random.seed(options.seed)
    # a shell lets what it starts with & ignore SIGINT, and so all that this starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
    report, names = Report(), options.only.split(",")
    with TemporaryDirectory() as folder:
        if options.minutes:
            kill_and_compare(names, Path(folder), options.minutes, options.seed, report)
            print_endings(report)
        if options.steps:
            print(f"\nof {options.steps} steps: MiB and open files, early and late")
            for name in names:
                watch(name, Path(folder), options.steps, report)
    print(f"\n{len(report.problems)} problems")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
