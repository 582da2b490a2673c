"""The folder of a run: its log, its curves, its plan and its checkpoints.

    gemsc run build/unet                     build/unet/runs/1, then runs/2, ...
    gemsc run build/unet --resume            goes on in the one that was used last
    gemsc run build/unet --save trained      trained
    gemsc run build/unet --save trained --resume

It is chosen before anything is loaded, by `gemsc run` or else by the first rank.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from gemsc.base.files import write_text
from gemsc.errors import GemscError
from gemsc.runtime.checkpoint.folder import BEST, LATEST, MODEL
from gemsc.runtime.checkpoint.manifest import MANIFEST
from gemsc.runtime.training.arguments import parse_arguments

# among the options
NOT_TOLD = ("save", "resume", "overwrite", "typed", "goes_on", "source")
# options that decide what is trained
DECIDE = ("dtype", "set", "last_batch", "accumulate", "clip_norm", "ema")
RUNS = "runs"  # folder of a program
LOG, TABLE, ABOUT, CURVES = "log.jsonl", "log.csv", "run.json", "curves.svg"
BEGUN = '{"event": "step"'  # how a line of a step begins
LOCK = ".lock"  # the system drops what a process held that has ended
LOCK_SECONDS = 5.0  # for a run that was just killed to be gone


def choose_folder(program: Path, options: argparse.Namespace) -> Path | None:
    """Return the folder of a run; `options` name it, and what it resumes, from then on.

    Without `--save` it is made in the folder of the program. `--resume` without a
    folder becomes the run's own one, or where that holds no checkpoint yet, what an
    earlier `--resume` among the words names, or nothing. What does not train has no
    folder.

    Raises:
        GemscError: another run is in the folder, or none can be made.
    """
    goes_on: bool = options.goes_on
    others = options.verify_into, options.record_into, options.time_into
    if any(path is not None for path in others):
        return None
    if options.save is None:
        runs = program / RUNS
        last = max(_numbers(runs), default=0)
        options.save = runs / str(last) if goes_on and last else _new(runs, last)
    folder: Path = options.save
    if goes_on and _is_saved(folder):
        options.resume = folder
    elif goes_on:
        options.resume, options.goes_on = options.source, options.source is None
    if goes_on or _is_in(options.resume, folder):
        options.overwrite = False
    elif _is_begun(folder) and not options.overwrite:
        raise GemscError(
            f"{folder} already holds a run",
            help="resume it with --resume, name another folder with --save, or replace "
            "that run with --overwrite",
        )
    return folder


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a run's folder from all other runs, as far as its file system has locks.

    Raises:
        GemscError: another run has it, or nobody may write there.
    """
    with told_where(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    with file:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _is_locked(file):
            if time.monotonic() >= deadline:
                file.seek(0)
                raise _in_use(folder, file.read())
            time.sleep(0.1)
        file.truncate(0)
        print(os.getpid(), platform.node(), file=file, flush=True)
        yield


@contextmanager
def told_where(folder: Path, source: Path | None = None) -> Iterator[None]:
    """Say that a run, perhaps one that goes on from a `source`, has no folder.

    Raises:
        GemscError: something cannot be written.
    """
    try:
        yield
    except OSError as error:
        more = f" and --resume {source}" if source is not None else ""
        raise GemscError(
            f"{folder} cannot hold a run: {error.strerror}",
            help=f"free space there, or name another folder with --save{more}",
        ) from None


def _is_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here: no checkpoint mixes two runs all the same
        pass
    return True


def _in_use(folder: Path, holder: str) -> GemscError:
    number, _, host = holder.strip().partition(" ")
    return GemscError(
        f"another run is in {folder}: process {number} on {host}",
        help=f"wait until it ends, end it there with `kill {number}`, or name another "
        f"folder with --save; if {host} is gone and its file system keeps the lock, "
        f"remove {folder / LOCK}",
    )


def clear(folder: Path) -> None:
    """Remove what an earlier run has left, and nothing of anybody else."""
    for step in folder.glob("step-*"):
        if (step / MANIFEST).is_file() and not step.is_symlink():
            shutil.rmtree(step)
    for name in (LOG, TABLE, ABOUT, CURVES):
        (folder / name).unlink(missing_ok=True)
    for name in (LATEST, BEST, MODEL):
        if not (folder / name).is_dir() or (folder / name).is_symlink():
            (folder / name).unlink(missing_ok=True)


def describe_run(
    folder: Path, program: Path, options: argparse.Namespace, step: int, hosts: Any
) -> None:
    """Write `run.json` and the copy of the plan; each start of the run adds to it."""
    write_text(folder / "plan.toml", (program / "plan.toml").read_text("utf-8"))
    path = folder / ABOUT
    starts = _starts(path) if step else []
    usual = vars(parse_arguments([]))
    given = {name: value for name, value in vars(options).items() if name in usual}
    starts.append(
        {
            "time": datetime.now().astimezone().isoformat(timespec="seconds"),
            "step": step,
            "command": shlex.join(["gemsc", "run", str(program), *options.typed]),
            "options": {
                name: str(value) if isinstance(value, Path) else value
                for name, value in given.items()
                if value != usual[name] and name not in NOT_TOLD
            },
            "versions": _versions(),
            "hosts": hosts,
        }
    )
    about = {"program": str(program.resolve()), "starts": starts}
    write_text(path, json.dumps(about, indent=1) + "\n")


def _starts(path: Path) -> list[dict[str, Any]]:
    """Return the starts of a run by its `run.json`; none if that is of no use."""
    try:
        return list(json.loads(path.read_bytes())["starts"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def options_at(place: Path, step: int) -> dict[str, Any] | None:
    """Return the options with which a run came to a step; None if nobody knows them.

    `place` is its folder, or one of its checkpoints. Usual values are left out.
    """
    folder = place.resolve()
    starts = _starts(folder / ABOUT) or _starts(folder.parent / ABOUT)
    before = [start for start in starts if start.get("step", 0) < step]
    last = [*starts[:1], *before][-1:]
    return dict(last[0].get("options", {})) if last else None


def changed_options(options: argparse.Namespace, step: int) -> list[str]:
    """Return what a run that goes on trains otherwise: `--accumulate 2 (was 1)`."""
    then = options_at(options.resume, step)
    if then is None:
        return []
    usual, changes = vars(parse_arguments([])), []
    for name in DECIDE:
        pair = getattr(options, name), then.get(name, usual[name])
        if pair[0] != pair[1] and (name, pair[0]) != ("ema", None):  # which is told
            now, was = (" ".join(v) if isinstance(v, list) else v for v in pair)
            flag = name.replace("_", "-")
            changes.append(f"--{flag} {now or 'none'} (was {was or 'none'})")
    return changes


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("gemsc", "torch", "mpi4py"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    mpi: Any = sys.modules.get("mpi4py.MPI")  # it is loaded by ranks alone
    if mpi is not None:
        versions["mpi"] = mpi.Get_library_version().split("\n")[0].rstrip("\0 ")
    return versions


def _numbers(runs: Path) -> list[int]:
    names = [path.name for path in runs.iterdir()] if runs.is_dir() else []
    return [int(name) for name in names if name.isdecimal() and name.isascii()]


def _new(runs: Path, last: int) -> Path:
    """Make the folder that comes next; two runs that start at once get two."""
    for number in range(last + 1, last + 100):
        folder = runs / str(number)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise GemscError(
                f"no folder can be created for this run: {folder}: {error.strerror}",
                help="name one with --save",
            ) from None
        return folder
    raise GemscError(f"no folder can be created in {runs}", help="name one with --save")


def _is_begun(folder: Path) -> bool:
    """Whether a run has left a checkpoint in a folder, or steps in its log."""
    if _is_saved(folder):
        return True
    try:
        with (folder / LOG).open(encoding="utf-8", errors="replace") as lines:
            return any(line.startswith(BEGUN) for line in lines)
    except OSError:
        return False


def _is_saved(folder: Path) -> bool:
    names = (LATEST, MODEL)
    if any((folder / name).is_symlink() or (folder / name).exists() for name in names):
        return True
    return any(folder.glob(f"step-*/{MANIFEST}"))


def _is_in(source: Path | None, folder: Path) -> bool:
    """Whether what is resumed is in the folder itself."""
    where = None if source is None else Path(os.path.realpath(source))
    return where is not None and where.is_relative_to(os.path.realpath(folder))
