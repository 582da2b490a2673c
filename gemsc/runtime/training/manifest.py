"""The folder that `--save` names: whole checkpoints, and a link to the latest.

    latest -> step-000120                           switched by one rename
    model.safetensors -> latest/model.safetensors   the same path for ever
    step-000120/manifest.json                       step, ranks, sizes, digests
    step-000120/model.safetensors, optimizer-rank0.pt, optimizer-rank1.pt, ...

A checkpoint is written beside, as `.step-000120`, and forced to the disk before the
link is switched: whenever a job is killed, `latest` is a whole checkpoint, or is not
there yet.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from gemsc.base.files import sync
from gemsc.errors import GemscError
from gemsc.weights.facts import FileFacts, facts_of

__all__ = [
    "LATEST",
    "MODEL",
    "WEIGHTS_ALONE",
    "Manifest",
    "check_checkpoint",
    "check_digests",
    "clear_space",
    "make_latest",
]

LATEST = "latest"
MODEL = "model.safetensors"
MANIFEST = "manifest.json"
FORMAT = 2
WEIGHTS_ALONE = (
    f"or copy {MODEL} into a folder of its own and give that, for the weights alone"
)


@dataclass(frozen=True)
class Manifest:
    """What belongs to a checkpoint: all of it is of one step."""

    step: int
    ranks: int
    files: Mapping[str, FileFacts]

    def write(self, folder: Path) -> None:
        """Write it into the folder of its files."""
        path = folder / MANIFEST
        content = {"format": FORMAT, **asdict(self)}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        sync(path)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read the manifest of a folder.

        Raises:
            GemscError: it is missing or damaged.
        """
        path = folder / MANIFEST
        try:
            found = json.loads(path.read_bytes())
            if (kind := found["format"]) != FORMAT:
                raise GemscError(
                    f"{folder} has format {kind}, this gemsc reads {FORMAT}",
                    help="resume with the gemsc that saved it",
                )
            files = {
                str(name): FileFacts(**facts) for name, facts in found["files"].items()
            }
            return Manifest(int(found["step"]), int(found["ranks"]), files)
        except FileNotFoundError:
            raise _damaged(f"{path} is missing") from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise _damaged(f"{path} is damaged: {error!r}") from None


def _damaged(message: str) -> GemscError:
    return GemscError(message, help=f"give another checkpoint, {WEIGHTS_ALONE}")


# ------------------------------------------------------------------- reading


def check_checkpoint(directory: Path, ranks: int) -> tuple[Path, Manifest | None]:
    """Return the folder that holds the files, and what is known of them.

    `directory` is what `--save` named, one of its `step-` folders, or a folder of
    weights alone: then nothing is known. Sizes are compared, digests are not.

    Raises:
        GemscError: it is none of these, or not a whole checkpoint of so many ranks.
    """
    folder = directory
    if (directory / LATEST).exists() or (directory / LATEST).is_symlink():
        folder = directory / LATEST
    elif not (directory / MANIFEST).exists():
        _check_weights_alone(directory)
        return directory, None
    manifest = Manifest.read(folder)
    if MODEL not in manifest.files or len(manifest.files) <= manifest.ranks:
        raise _damaged(f"{folder / MANIFEST} does not name {MODEL} and a file per rank")
    for name, facts in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise _damaged(f"{path} is missing")
        if (size := path.stat().st_size) != facts.bytes:
            raise _damaged(f"{path} is damaged: {size} bytes, not {facts.bytes}")
    if manifest.ranks != ranks:
        raise GemscError(
            f"{directory} was saved by {manifest.ranks} ranks, the program has {ranks}",
            help=f"compile for {manifest.ranks} ranks, {WEIGHTS_ALONE}",
        )
    return folder, manifest


def _check_weights_alone(directory: Path) -> None:
    if not (directory / MODEL).is_file():
        raise GemscError(
            f"{directory} is not a checkpoint: it has no {MODEL}",
            help="give the folder that --save wrote",
        )
    if any(directory.glob("optimizer-rank*.pt")):
        raise GemscError(
            f"{directory} was saved by an older gemsc: nothing says whether its files "
            "are of the same step",
            help=f"for the weights alone, copy {MODEL} into a folder of its own",
        )


def check_digests(folder: Path, manifest: Manifest, part: int, parts: int) -> None:
    """Read every file of one rank's part, and compare what is in it.

    Raises:
        GemscError: a file is not the one that was saved.
    """
    for name in sorted(manifest.files)[part::parts]:
        if facts_of(folder / name) != manifest.files[name]:
            raise _damaged(f"{folder / name} is damaged: it is not what was saved")


# ------------------------------------------------------------------- writing


def clear_space(directory: Path, step: int) -> Path:
    """Return an empty folder to write a checkpoint in; remove what kills have left."""
    _remove(directory.glob(".step-*"))
    beside = directory / f".step-{step:06d}"
    beside.mkdir(parents=True)
    return beside


def make_latest(directory: Path, beside: Path) -> None:
    """Give a checkpoint its name, switch the link to it, then remove the older ones."""
    sync(beside)
    new = directory / beside.name.removeprefix(".")
    if os.path.realpath(directory / LATEST) == os.path.realpath(new):
        new = new.with_name(f"{new.name}-again")  # of a run that started anew
    _remove([new])
    beside.rename(new)
    sync(directory)
    _link(directory / LATEST, new.name)
    sync(directory)
    target = f"{LATEST}/{MODEL}"
    if not os.path.islink(model := directory / MODEL) or os.readlink(model) != target:
        _link(model, target)
    _remove(path for path in directory.glob("step-*") if path != new)


def _link(path: Path, target: str) -> None:
    """Let a path lead to another, whatever it was before."""
    beside = path.with_name(f".{path.name}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target)
    beside.replace(path)


def _remove(folders: Iterable[Path]) -> None:
    """Remove checkpoints, and nothing of anybody else."""
    for folder in list(folders):
        if not folder.name.startswith("."):
            if not (folder / MANIFEST).is_file():
                continue
            folder = folder.rename(folder.with_name(f".{folder.name}-old"))
        shutil.rmtree(folder)
