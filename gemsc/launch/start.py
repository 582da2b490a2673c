"""Start a program's ranks, on this machine or several: what `gemsc run` does."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gemsc.launch.arguments import read_launch
from gemsc.launch.hosts import Host, check_hosts, is_here, share_out
from gemsc.launch.launch import launch
from gemsc.plan import Plan
from gemsc.runtime.checkpoint.folder import check_checkpoint
from gemsc.runtime.process.failure import computed_lines
from gemsc.runtime.process.progress import BAR_VARIABLE
from gemsc.runtime.training.program_directory import check_program
from gemsc.runtime.training.run_folder import choose_folder

__all__ = ["start"]


def start(
    directory: Path,
    arguments: Sequence[str],
    *,
    timeout: float | None = None,
    ended: Callable[[Path], None] = lambda folder: None,
) -> int:
    """Run the program under mpirun and return the exit code.

    `ended` is called with the run's folder, if there is one, once all ranks are gone.

    Raises:
        GemscError: the program cannot run; nothing has been started.
    """
    plan = check_program(directory, Plan.read(directory / "plan.toml").ranks)
    how, rest, options = read_launch(arguments)
    is_named = options.save is not None
    folder = choose_folder(directory, options)
    if options.resume is not None:
        check_checkpoint(options.resume)
    hosts = _places(how.hosts, plan.ranks, directory)
    environment = {}
    if sys.stdout.isatty():
        environment[BAR_VARIABLE] = "1"
        environment["COLUMNS"] = str(shutil.get_terminal_size().columns)

    def computes(rank: int) -> list[str]:
        return computed_lines(directory / f"rank{rank % plan.copy_ranks}.py")

    if folder is not None and not is_named:
        rest += ["--save", str(folder)]
    code = launch(
        plan.ranks,
        [sys.executable, str(directory), *rest],
        env=environment,
        timeout=timeout,
        computes=computes,
        hosts=hosts,
    )
    if folder is not None and folder.is_dir():
        ended(folder)
        if not is_named:  # a run that failed before its start leaves nothing
            with contextlib.suppress(OSError):
                folder.rmdir()
    return code


def _places(hosts: Sequence[Host], ranks: int, directory: Path) -> tuple[Host, ...]:
    """Return how many ranks each host gets; none are named if all are on this one."""
    used = share_out(hosts, ranks) if hosts else ()
    if all(map(is_here, used)):
        return ()
    check_hosts(used, directory)
    return used
