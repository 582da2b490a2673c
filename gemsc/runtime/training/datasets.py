"""The datasets of a run: what a rank reads of the user's samples, in which batches."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from gemsc.base.examples import Examples
from gemsc.base.nests import map_tensors
from gemsc.datasets.samples import joins_samples, num_samples
from gemsc.datasets.stream import ENDLESS
from gemsc.errors import GemscError, warn
from gemsc.plan import Plan
from gemsc.plan_tables import PlannedShape
from gemsc.runtime.data.shapes import ShapeClasses, all_numbers
from gemsc.runtime.data.shared import SharedData
from gemsc.runtime.data.stream_batches import batches_of
from gemsc.runtime.data.tiled import TiledDataset, window_of
from gemsc.runtime.transport.transport import Transport
from gemsc.runtime.worker.worker import Worker
from gemsc.user_model import UserModel


def shape_classes(plan: Plan, user: UserModel, name: str) -> ShapeClasses | None:
    """Return how samples of `dataset` or `eval_dataset` are padded, if they are.

    They are where batches have several shapes, or the file says how to make one.
    """
    shapes, joins = plan.shapes, joins_samples(user.collate)
    if not shapes and (user.pad_value is not None or joins):
        inputs = user.make_shapes()
        examples = Examples(inputs, user.make_targets(inputs))
        shapes = [
            PlannedShape(
                name="of example_inputs()",
                variant="",
                micro_batch_size=plan.micro_batch_size,
                sizes=examples.sizes(0),
                step_seconds=plan.step_seconds,
                peak_bytes=plan.peak_bytes,
            )
        ]
    if not shapes:
        return None
    at = {key: user.line_of(key) for key in ("pad_value", "bucket", "collate")}
    if user.collate is not None and plan.shapes and not joins:
        raise GemscError(
            "collate takes no number of a shape",
            at=at["collate"],
            help="let it take (samples, number), or give it another name",
        )
    return ShapeClasses(
        shapes,
        0 if user.pad_value is None else user.pad_value,
        user.bucket,
        user.collate if joins else None,
        {**at, "dataset": user.line_of(name)},
    )


@dataclass
class Datasets:
    """Makes the batches of a run's datasets on one rank.

    With `compare_all`, the ranks compare what they read in every batch, not only in
    the first one. `notes` is what the user should know of them.
    """

    worker: Worker
    plan: Plan
    user: UserModel
    options: argparse.Namespace
    compare_all: bool
    notes: list[str] = field(default_factory=list, init=False)

    @property
    def transport(self) -> Transport:
        """Between the ranks, of what is in host memory."""
        return self.worker.transport.host

    @property
    def reads(self) -> bool:
        """Whether this rank takes anything of a batch in training."""
        return bool(self.worker.variants.inputs)

    def of(self, name: str, seed: int, *, shuffle: bool) -> SharedData | None:
        """Return the batches of `dataset` or `eval_dataset`; None where there is none.

        Every rank calls it.

        Raises:
            GemscError: it cannot be read so, or fills no batch.
        """
        if getattr(self.user, name) is None:
            return None
        items = self.user.make_dataset(name, seed=seed)
        num_samples(items, self.user.line_of(name))
        worker = self.worker
        window = None
        trains_rest = shuffle and self.options.last_batch == "train"
        if isinstance(items, TiledDataset):
            window = window_of(worker.variants.inputs, tuple(items.shape))
        whole_targets = "none"
        if not shuffle and worker.program.tile == 0:  # where outputs may be
            whole_targets = "last" if self.user.metrics is None else "all"
        sizes, place = self.plan.batch_sizes, worker.place
        part, num_parts = place.copy, place.num_copies
        shapes = shape_classes(self.plan, self.user, name)
        if not shuffle and self.user.eval_windows is not None:
            sizes, part, num_parts = [1], 0, 1  # whole cases, one at a time
            shapes = None
        samples = all_numbers(shapes, items, seed, self.transport)
        batches = batches_of(
            items,
            sizes,
            seed=seed,
            shuffle=shuffle,
            workers=self.options.workers,
            pinned=worker.device.type == "cuda",
            part=part,
            num_parts=num_parts,
            window=window,
            whole_targets=whole_targets,
            compare_all=self.compare_all,
            keeps_marks=shuffle and self.options.save is not None,
            least=self.plan.micro_batch_sizes if trains_rest else None,
            shapes=shapes,
            numbers=samples,
        )
        if trains_rest and batches.num_samples == ENDLESS:
            raise GemscError(
                "--last-batch train needs to know how many samples an epoch has",
                at=self.user.line_of(name),
                help="return gemsc.Stream(..., samples=...) from dataset(), or leave "
                "out the option",
            )
        at = self.user.line_of(name)
        examples: Any = ()
        if self.user.example_inputs and not isinstance(items, TiledDataset):
            made = self.user.make_shapes()  # their memory is not kept
            examples = map_tensors(made, lambda _, tensor: tensor.to("meta"))
        shared = SharedData(batches, self.transport, name, at, examples)
        if len(batches) == 0:
            raise self._too_few(name, batches.num_samples, shuffle, trains_rest)
        if shuffle and not shared.split(reads=self.reads):
            self.notes.append(
                f"note: {name}() is not split: each of the {batches.num_copies} "
                "replicas reads all of it, and drops what is not its own"
            )
        if shuffle:
            self._note_shapes(shared)
        return shared

    def _too_few(
        self, name: str, count: int, is_trained: bool, trains_rest: bool
    ) -> GemscError:
        """Return the error of a dataset that fills no batch."""
        what, least = "one step", self.plan.batch_sizes
        help = "compile with fewer --micro-batches, give more data, or use "
        help += "--last-batch train"
        if is_trained and (trains_rest or count < min(self.plan.micro_batch_sizes)):
            what, least = "one micro-batch", self.plan.micro_batch_sizes
            help = "give more data, or compile with smaller example_inputs()"
        elif not is_trained:
            what, least, help = "an evaluation", [1], f"give data, or no {name}()"
        wanted = " or ".join(map(str, least))
        return GemscError(
            f"{name}() has {count} samples, {what} takes {wanted}",
            at=self.user.line_of(name),
            help=help,
        )

    def _note_shapes(self, shared: SharedData) -> None:
        """Say which shapes have too few samples for a batch, and what targets get."""
        order, shapes = shared.batches.order, self.plan.shapes
        targets = [
            [size for place, size in shape.sizes.items() if place.startswith("target")]
            for shape in shapes
        ]
        is_padded = any(sizes != targets[0] for sizes in targets)
        if is_padded and self.user.pad_value is None and self.user.collate is None:
            self.notes.append(
                "note: a target that is smaller than its shape is filled up with "
                "zeros, which the loss counts; pad_value = (0, -100), for inputs and "
                "targets, fills it up with labels that a crossentropy leaves out"
            )
        for number, shape in enumerate(shapes):
            count = order.counts[number]
            if count and not order.batches[number] and self.transport.rank == 0:
                warn(
                    f"no batch has shape {shape.name}: {count} samples have it, a "
                    f"batch takes {order.sizes[number]}",
                    at=shared.at,
                    help="--last-batch train, fewer --micro-batches, or bucket() that "
                    "puts them into a larger shape",
                )
