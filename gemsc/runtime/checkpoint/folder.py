"""The folder of a run: whole checkpoints, and links to the latest and the best one.

    latest -> step-000120        switched by one rename
    best -> step-000080
    step-000120/manifest.json    what there is, with sizes and digests
    step-000120/rank0.safetensors, rank1.safetensors, ...
    step-000040-early/           saved before the evaluation; the next one replaces it

A checkpoint is written beside, as `.step-000120-3f9c0a51`, and forced to the disk
before it gets its name by one rename: whenever a job is killed, a folder that is called
`step-...` is whole. The first rank draws that name for all: two runs that save the same
step never write into one folder. What a kill left is removed at the next save.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gemsc.base.files import DISTRIBUTED, facts_of, sync
from gemsc.errors import GemscError
from gemsc.runtime.checkpoint.manifest import MANIFEST, Manifest, damaged
from gemsc.runtime.process.status import Status

LATEST, BEST = "latest", "best"
MODEL = "model.safetensors"
ENDINGS = "", "-again", "-once-more"  # a run that starts anew comes to the same step
EARLY = "-early"
STEP = re.compile(r"step-(\d{6,18})(-early)?(-again|-once-more)?")
HIDDEN = re.compile(rf"\.{STEP.pattern}(-[0-9a-f]{{8}})?(-old)?")


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint: its folder and its manifest, or weights alone and no manifest."""

    place: Path
    manifest: Manifest | None


@dataclass(frozen=True)
class Retention:
    """How long a checkpoint stays: until there are `newest` newer ones.

    Or until another is the `best`; if it is an `early` one, until the next one.
    """

    newest: int
    best: bool = False
    early: bool = False


# ------------------------------------------------------------------- reading


def check_checkpoint(directory: Path) -> ResumePoint:
    """Return what there is to resume from; sizes are compared, digests are not.

    `directory` is a run's folder, one of its `step-` folders, or of somebody else: a
    file in safetensors format, a folder that holds one as model.safetensors, or one of
    torch.distributed.checkpoint.

    Raises:
        GemscError: it is none of these, or not whole.
    """
    try:
        folder = _step_in(directory)
        if folder is None:
            return ResumePoint(_weights_in(directory), None)
    except OSError as error:
        raise GemscError(
            f"{directory} cannot be read: {error.strerror}",
            help="give the folder of a run, or one of its step- folders",
        ) from None
    with damage_named(folder, always=True):
        return ResumePoint(folder, _check_sizes(folder))


def check_digests(folder: Path, manifest: Manifest, part: int, parts: int) -> None:
    """Read every file of one rank's part, and compare what is in it.

    Raises:
        GemscError: a file is not the one that was saved.
    """
    for name in sorted(manifest.files)[part::parts]:
        path = folder / name
        Status.go_on()
        try:
            facts = facts_of(path)
        except OSError as error:
            raise damaged(path, f"cannot be read: {error.strerror}") from None
        if facts != manifest.files[name]:
            raise damaged(path, "is damaged: it is not what was saved")


def saved_seed(directory: Path | None) -> int:
    """Return the seed of the run that saved a checkpoint; 0 without one."""
    saved = (
        ResumePoint(Path(), None) if directory is None else check_checkpoint(directory)
    )
    seed = saved.manifest.progress.get("seed") if saved.manifest else 0
    return seed if isinstance(seed, int) else 0


@contextmanager
def damage_named(folder: Path, *, always: bool = False) -> Iterator[None]:
    """Name another checkpoint where this one is damaged, or `always`.

    Raises:
        GemscError: what was raised within, with that advice.
    """
    try:
        yield
    except GemscError as error:
        if always or "is damaged" in error.message:
            help = _other_than(folder)
            raise GemscError(error.message, help=help) from None
        raise


def _other_than(folder: Path) -> str:
    """Return which other checkpoint to go on from."""
    place = os.path.realpath(folder)  # of a link to itself, too
    for other in reversed(_steps_of(folder.parent)):
        if os.path.realpath(other) == place:
            continue
        try:
            check_digests(other, _check_sizes(other), 0, 1)
        except GemscError:
            continue
        return f"{other} is complete: resume with --resume {other}"
    return (
        f"no other checkpoint in {folder.parent} is complete: give another folder, or "
        "start again without --resume"
    )


def _step_in(directory: Path) -> Path | None:
    """Return the folder that holds the files of a checkpoint, if there is one."""
    if (link := directory / LATEST).is_symlink() or link.exists():
        return _followed(link)
    if (directory / DISTRIBUTED).is_file():  # torchtitan calls it step-100000
        return None
    name = os.path.basename(os.path.realpath(directory))
    if (directory / MANIFEST).exists() or STEP.fullmatch(name):
        return _followed(directory)
    steps = _steps_of(directory)
    return steps[-1] if steps else None


def _followed(link: Path) -> Path:
    """Return where a link leads now: a run that goes on there switches it."""
    return link.parent / os.readlink(link) if link.is_symlink() else link


def place_in(directory: Path) -> Path:
    """Return the checkpoint that a folder stands for now; itself if it has none."""
    try:
        return _step_in(directory) or directory
    except OSError:
        return directory


def _steps_of(directory: Path) -> list[Path]:
    """Return the checkpoints in a folder, the one that was written last at the end."""
    steps = [
        path
        for path in directory.glob("step-*")
        if STEP.fullmatch(path.name) and (path / MANIFEST).is_file()
    ]
    return sorted(steps, key=lambda p: ((p / MANIFEST).stat().st_mtime_ns, p.name))


def _check_sizes(folder: Path) -> Manifest:
    manifest = Manifest.read(folder)
    for name, facts in manifest.files.items():
        path = folder / name
        if path.is_dir():
            raise damaged(path, "is a folder, not a file")
        if not path.is_file():
            raise damaged(path, "is missing")
        if (size := path.stat().st_size) != facts.bytes:
            raise damaged(path, f"is damaged: {size} bytes, not {facts.bytes}")
    return manifest


def _weights_in(directory: Path) -> Path:
    """Return the file of weights that is meant, or torch's folder."""
    if (directory / DISTRIBUTED).is_file():
        return directory
    if directory.is_file():
        if directory.suffix == ".safetensors":
            return directory
        raise GemscError(
            f"{directory} is not a checkpoint",
            help="give the folder of a run, or weights as a .safetensors file: "
            "safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')",
        )
    if not directory.exists():
        raise GemscError(
            f"there is no folder {directory}", help="give the folder that --save wrote"
        )
    if any(directory.glob("optimizer-rank*.pt")):
        raise GemscError(
            f"{directory} was saved by an older gemsc: nothing says whether its files "
            "are of the same step",
            help=f"to use only the weights: --resume {directory / MODEL}",
        )
    if not (directory / MODEL).is_file():
        help = "give the folder that --save wrote"
        if any(directory.glob("*.safetensors")):
            help = f"let the program start from them: gemsc import PROGRAM {directory}"
        raise GemscError(
            f"{directory} is not a checkpoint: it has no {LATEST}, no step- folder "
            f"and no {MODEL}",
            help=help,
        )
    return directory / MODEL


# ------------------------------------------------------------------- writing


def clear_space(directory: Path, step: int) -> Path:
    """Return an empty folder to write a checkpoint in; remove what kills have left."""
    for path in directory.glob(".step-*"):
        if HIDDEN.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            _delete(path)
    beside = directory / f".step-{step:06d}-{secrets.token_hex(4)}"
    beside.mkdir(parents=True)
    return beside


def go_back(directory: Path, source: Path) -> None:
    """Let the checkpoint of a run's folder that the run goes on from be its latest.

    The best one is forgotten if it came later.
    """
    checkpoint = Path(os.path.realpath(source))
    is_own = checkpoint.parent == Path(os.path.realpath(directory))
    if is_own and (step := STEP.fullmatch(checkpoint.name)):
        best = STEP.fullmatch(_target(directory / BEST))
        if best and int(best[1]) > int(step[1]):
            (directory / BEST).unlink()
        _link(directory / LATEST, checkpoint.name)


def discard(beside: Path) -> None:
    """Remove a checkpoint that could not be completed."""
    shutil.rmtree(beside, ignore_errors=True)


def last_step(directory: Path) -> int:
    """Return the step of the last checkpoint in a run's folder, 0 if there is none."""
    latest = STEP.fullmatch(_target(directory / LATEST))
    return int(latest[1]) if latest else 0


def way_on(directory: Path) -> str:
    """Return from where a run that failed can go on, "" if it has saved nothing."""
    if not (step := last_step(directory)):
        return ""
    return f"{directory} holds the checkpoint of step {step}: go on with --resume"


def publish(directory: Path, beside: Path, kept: Retention) -> None:
    """Give a checkpoint its name, switch the links, remove all but the newest."""
    sync(beside)
    linked = {_target(directory / link) for link in (LATEST, BEST)}
    name = beside.name.removeprefix(".").rpartition("-")[0] + EARLY * kept.early
    names = (name + ending for ending in ENDINGS)
    new = directory / next(name for name in names if name not in linked)
    _remove([new])
    beside.rename(new)
    sync(directory)
    if kept.best:  # before the latest one, whose run would not say again that it is
        _link(directory / BEST, new.name)
    _link(directory / LATEST, new.name)
    sync(directory)
    stay = {new.name, _target(directory / BEST)}
    others = [path for path in _steps_of(directory) if path.name not in stay]
    early = [path for path in others if EARLY in path.name]
    others = [path for path in others if path not in early]
    _remove([*early, *others[: max(0, len(others) - kept.newest + 1)]])


def _target(link: Path) -> str:
    """Return the name of the folder that a link leads to, "" if there is no link."""
    return os.path.basename(os.readlink(link)) if link.is_symlink() else ""


def _link(path: Path, target: str) -> None:
    """Let a path lead to another, whatever it was before."""
    beside = path.with_name(f".{path.name}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target)
    beside.replace(path)


def _remove(folders: Iterable[Path]) -> None:
    """Remove checkpoints, and nothing of anybody else."""
    for folder in folders:
        if (folder / MANIFEST).is_file() and not folder.is_symlink():
            _delete(folder)


def _delete(folder: Path) -> None:
    """Remove a folder, under another name: who still writes there has lost it."""
    if not folder.name.endswith("-old"):
        name = folder.name.removeprefix(".")
        folder = folder.rename(folder.with_name(f".{name}-old"))
    shutil.rmtree(folder)
