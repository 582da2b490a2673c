"""Start a program's ranks, on this machine or several: what `gemsc run` does."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemsc.errors import GemscError
from gemsc.launch.arguments import Launch, read_launch
from gemsc.launch.ending import Ending
from gemsc.launch.hosts import Host, check_hosts, is_here, share_out, that_answer
from gemsc.launch.launch import launch
from gemsc.launch.restarts import calls_for_restart, compile_for, last_step
from gemsc.plan import Plan
from gemsc.runtime.checkpoint.folder import check_checkpoint
from gemsc.runtime.process.failure import computed_lines
from gemsc.runtime.process.progress import BAR_VARIABLE
from gemsc.runtime.process.sharing import check_sharing
from gemsc.runtime.training.program_directory import check_program
from gemsc.runtime.training.run_folder import LOCK, choose_folder


def start(
    directory: Path,
    arguments: Sequence[str],
    *,
    timeout: float | None = None,
    ended: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Run the program under mpirun, again if a rank dies, and return the exit code.

    `ended` is called with the run's folder, if there is one, once all ranks are gone.

    Raises:
        GemscError: the program cannot run; nothing has been started.
    """
    plan = check_program(directory, Plan.read(directory / "plan.toml").ranks)
    if plan.unchecked:
        sys.stderr.write(f"note: {not_compared(plan, directory)}\n")
    how, rest, options = read_launch(arguments)
    hosts = _places(how.hosts, plan.ranks, directory)
    per_device = options.per_device or plan.per_device
    if per_device is not None and not hosts:  # else each host counts its own
        _check_sharing(per_device, plan.ranks, options.device)
    is_named = options.save is not None
    if options.resume is not None and not options.goes_on:
        check_checkpoint(options.resume)
    folder = choose_folder(directory, options)
    if options.goes_on and options.resume is not None:
        check_checkpoint(options.resume)
    if folder is None:  # it does not train
        return _Job(directory, plan, (*rest,), hosts).run(timeout).code
    if not is_named:
        rest += ["--save", str(folder)]
    job = _Job(directory, plan, (*rest,), hosts)
    code = _run(job, how, folder, last_step(options.resume or folder), timeout)
    if folder.is_dir():
        ended(folder)
        if not is_named:  # a run that failed before its start leaves nothing
            with contextlib.suppress(OSError):
                if os.listdir(folder) == [LOCK]:
                    (folder / LOCK).unlink()
                folder.rmdir()
    return code


def not_compared(plan: Plan, directory: Path) -> str:
    """Return that nobody has seen the program compute what its model does, and why."""
    return (
        f"no step of {directory} was compared with the model ({plan.unchecked}): "
        f"gemsc verify {directory} does it"
    )


@dataclass(frozen=True)
class _Job:
    """A program, its arguments, and how many ranks each host gets."""

    directory: Path
    plan: Plan
    arguments: tuple[str, ...]
    hosts: tuple[Host, ...]

    def run(self, timeout: float | None) -> Ending:
        """Start the ranks and wait for their end."""
        environment = {}
        if sys.stdout.isatty():
            environment[BAR_VARIABLE] = "1"
            environment["COLUMNS"] = str(shutil.get_terminal_size().columns)
        endings: list[Ending] = []
        launch(
            self.plan.ranks,
            [sys.executable, str(self.directory), *self.arguments],
            env=environment,
            timeout=timeout,
            computes=self._computes,
            hosts=self.hosts,
            at_end=endings.append,
        )
        return endings[0]

    def _computes(self, rank: int) -> list[str]:
        file = f"rank{rank % self.plan.copy_ranks}.py"
        return computed_lines(self.directory / file)


def _run(
    first: _Job, how: Launch, folder: Path, step: int, timeout: float | None
) -> int:
    """Run a job that begins at a step, and what goes on from it, as often as asked."""
    job, restart = first, 0
    while True:
        ending = job.run(timeout)
        if restart == how.restarts or not calls_for_restart(ending, step):
            return ending.code
        restart, step = restart + 1, last_step(folder)
        try:
            job = _again(first, how.hosts)
        except GemscError as error:
            _say(str(error))
            return ending.code
        _say(f"restart {restart} of {how.restarts} from step {step}: {ending.reason}")


def _again(job: _Job, hosts: Sequence[Host]) -> _Job:
    """Return the job that goes on in the run's folder, on the hosts that answer.

    Raises:
        GemscError: there are too few of them.
    """
    directory, plan = job.directory, job.plan
    if hosts:
        hosts = that_answer(hosts)
        slots = sum(host.slots for host in hosts)
        if slots == 0:
            raise GemscError("no host answers any more")
        if slots < plan.ranks:
            directory = compile_for(directory, plan, slots)
            plan = Plan.read(directory / "plan.toml")
    places = _places(hosts, plan.ranks, directory)
    return _Job(directory, plan, (*job.arguments, "--resume"), places)


def _places(hosts: Sequence[Host], ranks: int, directory: Path) -> tuple[Host, ...]:
    """Return how many ranks each host gets; none are named if all are on this one."""
    used = share_out(hosts, ranks) if hosts else ()
    if all(map(is_here, used)):
        return ()
    check_hosts(used, directory)
    return used


def _check_sharing(per_device: int, ranks: int, kind: str) -> None:
    from gemsc.runtime.process.device import num_gpus  # loads PyTorch: a second

    check_sharing(per_device, ranks, num_gpus(kind))


def _say(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)  # noqa: T201
