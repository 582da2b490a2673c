"""After a rank has died: whether to start again, on which ranks and from where.

restart 1 of 3 from step 120: rank 2 was ended by signal 9 (Killed)
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from gemsc.errors import GemscError
from gemsc.launch.ending import Ending
from gemsc.options import CompileOptions
from gemsc.plan import Plan
from gemsc.runtime.checkpoint.folder import LATEST
from gemsc.runtime.process.stop import STOPPED

# with the options typed here, and none of the project's
GEMSC = "from gemsc.cli import main; main(settings=False)"
OF_A_NUMBER_OF_RANKS = {"balance", "blocks", "cuts", "placement"}
OF_A_NUMBER_OF_RANKS |= {"tiles", "shards", "branches", "trunk", "whole"}


def calls_for_restart(ending: Ending, first_step: int) -> bool:
    """Whether ranks that ended so may do better the next time.

    Not those that were stopped on purpose, nor those that one of them ended before the
    first step was done: that is a mistake, and would be made again.
    """
    if ending.is_asked or ending.code in (0, STOPPED):
        return False
    return ending.code != 1 or ending.step is None or ending.step > first_step


def last_step(folder: Path) -> int:
    """Return the step of the last checkpoint in a run's folder, 0 if there is none."""
    try:
        name = os.readlink(folder / LATEST)
    except OSError:
        return 0
    found = re.search(r"step-(\d+)", name)
    return int(found[1]) if found else 0


def fewer_ranks(plan: Plan, slots: int) -> CompileOptions:
    """Return the options of a program with the same batch on at most `slots` ranks.

    There are fewer replicas with more micro-batches each; if not even one finds room,
    it has fewer stages.
    """
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in plan.options.items()
    }
    batches = plan.data * plan.micro_batches
    copies, ranks = slots // plan.copy_ranks, plan.copy_ranks
    while copies > 1 and batches % copies:
        copies -= 1
    if copies == 0:
        copies, ranks = 1, slots
        given = {n: v for n, v in given.items() if n not in OF_A_NUMBER_OF_RANKS}
    given.pop("per_device", None)
    each = {"ranks": ranks * copies, "data": copies, "micro_batches": batches // copies}
    return CompileOptions(**{**given, **each})


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
        f"{plan.model} has {plan.ranks} ranks, the hosts that answer take {slots}, and "
        f"it cannot be compiled for so few:\n{why}",
        help=f"compile it for {slots} ranks in another way, and go on with --resume",
    )
