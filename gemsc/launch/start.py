"""Start a program's ranks, on this machine or several: what `gemsc run` does.

Where a rank has died they start again, from the last checkpoint, on the hosts that
still answer:

    restart 1 of 3 from step 120: rank 2 was ended by signal 9 (Killed)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gemsc.base.cores import check_binding
from gemsc.base.process import num_cores
from gemsc.errors import GemscError
from gemsc.launch.hosts import (
    Host,
    check_hosts,
    is_here,
    parse_hosts,
    read_hostfile,
    share_out,
    that_answer,
)
from gemsc.launch.launch import Ending, bar_settings, chosen_engine, launch
from gemsc.launch.torch_ranks import check_one_machine
from gemsc.options import CompileOptions
from gemsc.plan import FUSED, WITHOUT_KERNELS, Plan, rank_file
from gemsc.runtime.checkpoint.folder import check_checkpoint, last_step, way_on
from gemsc.runtime.process.failure import computed_lines
from gemsc.runtime.process.sharing import check_sharing
from gemsc.runtime.process.stop import STOPPED
from gemsc.runtime.training.arguments import Parser, make_parser, parse_arguments
from gemsc.runtime.training.program_directory import (
    check_program,
    check_weights,
    tell_of_settings,
)
from gemsc.runtime.training.run_folder import ABOUT, LOCK, choose_folder


def start(
    directory: Path,
    arguments: Sequence[str],
    *,
    ended: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Run the program's ranks, again if a rank dies, and return the exit code.

    `ended` is called with the run's folder, if there is one, once all ranks are gone.

    Raises:
        GemscError: the program cannot run; nothing has been started.
    """
    plan = check_program(directory, Plan.read(directory / "plan.toml").ranks)
    tell_of_settings(directory, plan)
    if plan.unchecked:
        sys.stderr.write(f"note: {not_compared(plan, directory)}\n")
    options, for_ranks = read_launch(arguments)
    engine = chosen_engine(options.engine)
    hosts = _places(options.hosts, plan.ranks, directory, engine)
    if not hosts:  # else each host counts its own
        _check_machine(plan, options)
    is_named = options.save is not None
    if options.resume is not None and not options.goes_on:
        check_checkpoint(options.resume)
    folder = choose_folder(directory, options)
    if options.resume is not None:
        check_checkpoint(options.resume)
    check_weights(directory, plan, options.resume)
    if folder is None:  # it does not train
        return _Job(directory, plan, (*for_ranks,), hosts, engine).run().code
    if not is_named:
        for_ranks += ["--save", str(folder)]
        _say_at_first(plan, folder)
    job = _Job(directory, plan, (*for_ranks,), hosts, engine)
    old = _start_of(folder) if options.overwrite else None
    step = last_step(options.resume or folder) if old is None else 0
    code = _run(job, options, folder, step, old)
    if folder.is_dir():
        ended(folder)
        if not is_named:  # a run that failed before its start leaves nothing
            with contextlib.suppress(OSError):
                if os.listdir(folder) == [LOCK]:
                    (folder / LOCK).unlink()
                folder.rmdir()
    return code


def _say_at_first(plan: Plan, folder: Path) -> None:
    """Say what a program's optimizer could do faster, in its first run."""
    wanted = (note for note in plan.notes if FUSED in note and folder.name == "1")
    sys.stderr.writelines(f"note: {note}\n" for note in wanted)


def not_compared(plan: Plan, directory: Path) -> str:
    """Return that nobody has seen the program compute what its model does, and why."""
    if plan.unchecked == WITHOUT_KERNELS:
        return (
            f"the step of {directory} that was compared with the model ran without "
            f"torch.compile: gemsc verify {directory} runs its kernels, too"
        )
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
    engine: str

    def run(self) -> Ending:
        """Start the ranks and wait for their end."""
        endings: list[Ending] = []
        launch(
            self.plan.ranks,
            [sys.executable, str(self.directory), *self.arguments],
            env=bar_settings(),
            computes=self._computes,
            hosts=self.hosts,
            engine=self.engine,
            at_end=endings.append,
        )
        return endings[0]

    def _computes(self, rank: int) -> list[str]:
        file = self.directory / rank_file(rank % self.plan.copy_ranks)
        return computed_lines(file)


def _start_of(folder: Path) -> str:
    """Return what is another text once another start of a run has been noted."""
    try:
        stat = (folder / ABOUT).stat()
    except OSError:
        return "none"
    return f"{stat.st_ino} {stat.st_mtime_ns}"


def _run(
    first: _Job, options: argparse.Namespace, folder: Path, step: int, old: str | None
) -> int:
    """Run a job that begins at a step, and what goes on from it, as often as asked.

    An `old` run in its folder, by its `_start_of`, is not what it goes on from.
    """
    job, restart = first, 0
    while True:
        ending = job.run()
        if restart == options.restarts or not calls_for_restart(ending, step):
            is_told = ending.code in (0, 1, STOPPED)  # by a rank
            if not is_told and (way := way_on(folder)):
                _say(f"note: {way}")
            return ending.code
        has_begun = old is None or _start_of(folder) != old
        restart, step = restart + 1, last_step(folder) if has_begun else 0
        try:
            job = _again(first, options.hosts, ["--resume"] if has_begun else [])
        except GemscError as error:
            _say(str(error))
            return ending.code
        count = f"restart {restart} of {options.restarts}"
        _say(f"{count} from step {step}: {ending.reason}")


def _again(job: _Job, hosts: Sequence[Host], more: Sequence[str]) -> _Job:
    """Return the job with more arguments, on the hosts that answer.

    Raises:
        GemscError: there are too few of them.
    """
    directory, plan = job.directory, job.plan
    if hosts:
        hosts = that_answer(hosts)
        slots = sum(host.slots for host in hosts)
        if slots == 0:
            raise GemscError("no host answers")
        if slots < plan.ranks:
            directory = compile_for(directory, plan, slots)
            plan = Plan.read(directory / "plan.toml")
    places = _places(hosts, plan.ranks, directory, job.engine)
    return replace(
        job,
        directory=directory,
        plan=plan,
        arguments=(*job.arguments, *more),
        hosts=places,
    )


def _places(
    hosts: Sequence[Host], ranks: int, directory: Path, engine: str
) -> tuple[Host, ...]:
    """Return how many ranks each host gets; none are named if all are on this one."""
    used = share_out(hosts, ranks) if hosts else ()
    if all(map(is_here, used)):
        return ()
    if engine == "torch":
        check_one_machine(used)
    check_hosts(used, directory)
    return used


def _check_machine(plan: Plan, options: argparse.Namespace) -> None:
    """Make sure that this machine has the cores and GPUs that are asked for."""
    check_binding(options.bind, plan.ranks, num_cores())
    if (per_device := options.per_device or plan.per_device) is not None:
        from gemsc.runtime.process.device import num_gpus  # loads PyTorch: a second

        check_sharing(per_device, plan.ranks, num_gpus(options.device))


def _say(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def read_launch(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return all options, with `hosts` read, and the arguments of the ranks.

    Raises:
        GemscError: an option is unknown or wrong, or a host.
    """
    parser = _launch_parser()
    launch, for_ranks = parser.parse_known_args(arguments)
    options = parse_arguments(for_ranks, parents=[parser])
    options.hosts, options.restarts = (), launch.restarts
    if launch.hosts is not None and launch.hostfile is not None:
        raise GemscError("--hosts and --hostfile are given", help="give only one")
    if launch.hosts is not None:
        options.hosts = parse_hosts(launch.hosts)
    elif launch.hostfile is not None:
        options.hosts = read_hostfile(launch.hostfile)
    if launch.restarts and options.checkpoint_every == "never":
        raise GemscError(
            "--restarts has no checkpoint to resume from with --checkpoint-every never",
            help="leave one of them out",
        )
    return options, for_ranks


def run_parser() -> Parser:
    """Return what reads all options of `gemsc run`: those of ranks, and its own."""
    return make_parser(parents=[_launch_parser()])


def _launch_parser() -> Parser:
    parser = Parser(add_help=False, allow_abbrev=False)
    group = parser.add_argument_group("starting the ranks")
    group.add_argument("--hosts", help="hosts and the number of ranks on each: a:2,b:2")
    group.add_argument(
        "--hostfile", type=Path, help="file with one line `a slots=2` per host"
    )
    group.add_argument(
        "--restarts",
        type=_number,
        default=0,
        help="restarts from the last checkpoint when a rank dies (default: 0)",
    )
    return parser


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0")
    return int(text)


# with the options typed here, and none of the project's
GEMSC = "from gemsc.cli import main; main(settings=False)"
OF_A_NUMBER_OF_RANKS = {"balance", "blocks", "cuts", "placement"}
OF_A_NUMBER_OF_RANKS |= {"tiles", "shards", "branches", "trunk", "whole", "attention"}


def calls_for_restart(ending: Ending, first_step: int) -> bool:
    """Whether ranks that ended so may do better the next time.

    Not those that were stopped on purpose, nor those that one of them ended before the
    first step was done: that is a mistake, and would be made again.
    """
    if ending.is_asked or ending.code in (0, STOPPED):
        return False
    return ending.code != 1 or ending.step is None or ending.step > first_step


def fewer_ranks(plan: Plan, slots: int) -> CompileOptions:
    """Return the options of a program with the same batch on at most `slots` ranks.

    There are fewer replicas with more micro-batches each; if not even one finds room,
    it has fewer stages.
    """
    given = plan.choices
    batches = plan.data * plan.micro_batches
    copies, ranks = slots // plan.copy_ranks, plan.copy_ranks
    while copies > 1 and batches % copies:
        copies -= 1
    if copies == 0:
        copies, ranks = 1, slots
        given = {n: v for n, v in given.items() if n not in OF_A_NUMBER_OF_RANKS}
    given.pop("per_device", None)
    new = {"ranks": ranks * copies, "data": copies, "micro_batches": batches // copies}
    return CompileOptions(**{**given, **new})


def compile_for(directory: Path, plan: Plan, slots: int) -> Path:
    """Compile a program again for at most `slots` ranks, and return its folder.

    Raises:
        GemscError: it cannot be; says why.
    """
    try:
        options = fewer_ranks(plan, slots)
    except GemscError as error:
        raise _impossible(plan, slots, str(error)) from error
    folder = directory / f"restart-{options.ranks}-ranks"
    words = [plan.spec, "-o", str(folder)]
    for flag in options.flags():
        words += flag.split(" ", 1)
    done = subprocess.run(
        [sys.executable, "-c", GEMSC, "compile", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise _impossible(plan, slots, done.stderr.strip())
    return folder


def _impossible(plan: Plan, slots: int, why: str) -> GemscError:
    return GemscError(
        f"{plan.model} has {plan.ranks} ranks, the hosts that answer have room for "
        f"{slots}, and it cannot be compiled for so few:\n{why}",
        help=f"compile it for {slots} ranks in another way, and resume with --resume",
    )
