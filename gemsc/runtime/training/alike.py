"""What ranks need to have alike: files, a user's own batches, copies of weights."""

from __future__ import annotations

import sys
import sysconfig
from collections import Counter
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor

from gemsc.base.dtypes import bits_of
from gemsc.base.elementwise import values_of_group
from gemsc.base.nests import Path, named_place, tensor_leaves
from gemsc.errors import GemscError, warn
from gemsc.plan import Plan, rank_file
from gemsc.runtime.checkpoint.holdings import Holdings
from gemsc.runtime.checkpoint.sharing_out import tables_of
from gemsc.runtime.data.batches import digest
from gemsc.runtime.data.shared import first_difference
from gemsc.runtime.data.tiled import Window
from gemsc.runtime.process.stop import told_by_all
from gemsc.runtime.training.callbacks import Callback
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.transport import Transport


def check_same_files(directory: FilePath, plan: Plan, transport: Transport) -> None:
    """Make sure that all ranks run the same program and the same files of the user's.

    Machines without a folder that they share may have old copies of them. The first
    rank reads the programs of all, each other one its own. The user's are the model's
    file, or the script, and what is imported by now from its folder.

    Raises:
        GemscError: two ranks have different ones; on all ranks.
    """
    own_ranks = [transport.rank % plan.copy_ranks]
    ranks = range(plan.copy_ranks) if transport.rank == 0 else own_ranks
    names = [rank_file(rank, name) for rank in ranks for name in ("", *plan.variants)]
    main = getattr(sys.modules["__main__"], "__file__", None)  # of one's own loop
    script = plan.spec.partition(":")[0] or main
    files = {name: directory / name for name in names}
    if script:
        files |= own_files(FilePath(script).absolute())
    mine = {n: digest(f.read_bytes()) for n, f in files.items() if f.is_file()}
    if (other := first_difference(transport.all_gather_object(mine))) is not None:
        raise GemscError(
            f"{other[1]} have different versions of {other[0]}",
            help="copy it and the program's folder to all machines again, or start "
            "from a folder that they share; what is a machine's own, such as a path, "
            "can be in its environment",
        )


def own_files(script: FilePath) -> dict[str, FilePath]:
    """Return a script and the modules in its folder, but for what was installed."""
    folder, python = script.parent, sysconfig.get_path("stdlib")
    known = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
    src = [FilePath(path) for path in known if path and "-packages" not in path]
    inside = [f for f in src if f.is_relative_to(folder) and python not in f.as_posix()]
    return {path.relative_to(folder).as_posix(): path for path in (script, *inside)}


_RATE = "rate"


class SameBatches(Callback):
    """Compares what the ranks are given for a step, or for an evaluation.

    Where each rank shuffles in its own way, the inputs that the first one reads are not
    those of the targets that the last one reads. The 1st, 2nd, 4th, 8th, ... batches
    are compared, tensors of which a rank has only a window are not.
    """

    def __init__(self) -> None:
        self._counts = Counter[str]()

    def on_batch(
        self, trainer: Trainer, what: str, sources: Mapping[str, Any], window: Any
    ) -> None:
        """Compare a batch of all ranks.

        Raises:
            GemscError: two of them differ; on all ranks.
        """
        self._counts[what] += 1
        number = self._counts[what]
        if number & (number - 1):
            return
        call = "trainer.step()" if what == "step" else "trainer.evaluate()"
        mine = _digests(trainer, sources, window)
        everyone = told_by_all(trainer.transport, call, mine)
        if (other := first_difference(everyone)) is None:
            return
        (place, _), ranks = other
        raise GemscError(
            f"{ranks} got different batches: {named_place(place)} of {what} {number}",
            help="every rank needs the same batches: shuffle and draw with fixed "
            "seeds, DataLoader(..., shuffle=True, generator="
            "torch.Generator().manual_seed(0)), and sort files and sets",
        )


def _digests(
    trainer: Trainer, sources: Mapping[str, Any], window: Window | None
) -> dict[tuple[Path, int | None], str]:
    """Return the digest of each tensor, by its place; with the copy if it is a part."""
    if window is not None:
        return {}
    plan = trainer.plan
    parts = {plan.micro_batches * size for size in plan.micro_batch_sizes}
    copy = trainer.transport.rank // plan.copy_ranks

    def is_part(tensor: Tensor) -> bool:
        return plan.data > 1 and tensor.dim() > 0 and len(tensor) in parts

    leaves = tensor_leaves(dict(sources))
    return {(path, copy if is_part(t) else None): digest(t) for path, t in leaves}


class SameCopies(Callback):
    """Compares, at each checkpoint, weights and buffers that several ranks have.

    They are equal bit by bit, unless a hook changes them, or an optimizer, on some
    ranks only, or machines round differently. A checkpoint has rows of several ranks.
    So it is with the learning rates of groups that were alike when training began.
    """

    def __init__(self) -> None:
        self._begun: dict[str, str] = {}

    def on_start(self, trainer: Trainer) -> None:
        """Remember the groups of this rank's optimizers."""
        groups = _groups(trainer).items()
        self._begun = {key: f"{_RATE}/{key} {values}" for key, values in groups}

    def on_save(self, trainer: Trainer, folder: FilePath) -> None:
        """Warn if two ranks have another value of the same."""
        is_alike = not trainer.plan.options.get("local_batchnorm")  # its statistics
        held = Holdings(trainer.worker).tensors({}) if is_alike else ()
        mine = {(h.key, h.piece.intervals): _sum_of_bits(h.tensor) for h in held}
        for group, values in _groups(trainer).items():
            if group in self._begun:
                mine[self._begun[group], ()] = str(values.get("lr"))
        texts = trainer.transport.all_gather_object(digest(repr([*mine.items()])))
        tables = tables_of(trainer.transport, mine, texts)
        other = first_difference(tables[text] for text in texts)
        if other is not None and trainer.transport.rank == 0:
            (key, _), ranks = other
            kind, _, name = key.partition("/")
            what, why = f"copies of '{name}'", ": the weights depend on who saves them"
            if kind == _RATE:
                what, why = "learning rates", ", of groups that began alike"
            warn(
                f"{ranks} have different {what} after step {trainer.step_number}{why}",
                help="let hooks change weights and optimizers on all ranks alike, and "
                "weights with --shard in optimizer.register_step_post_hook(); on "
                "machines of different kinds, copies differ as these round differently",
            )


def _groups(trainer: Trainer) -> dict[str, dict[str, object]]:
    """Return what this rank's optimizers say of the groups of which it has some."""
    return {
        f"{phase} {number}": values_of_group(group)
        for phase, updates in trainer.worker.variants.updates.items()
        for number, group in enumerate(getattr(updates.optimizer, "param_groups", ()))
        if group["params"]
    }


def _sum_of_bits(tensor: Tensor) -> str:
    """Return the sum of a tensor's bytes, eight of them at a time as an integer."""
    raw = bits_of(tensor)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = len(raw) // 8 * 8
    return str((raw[:whole].view(torch.int64).sum() + raw[whole:].sum()).item())
