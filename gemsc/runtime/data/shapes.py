"""Shape classes: each batch holds samples of one class, padded to its shape.

    class 128    sequences of up to 128 tokens
    class 512    those of 129 to 512 tokens

The class of a sample is the smallest that it fits, or what the model file's `bucket`
says. It stays the same in all epochs: all ranks know each batch's class beforehand.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import default_collate

from gemsc.base.dtypes import dtype_name
from gemsc.base.nests import named_place, named_tuple
from gemsc.datasets.samples import no_shapes_known, num_samples, pair_error
from gemsc.datasets.stream import Stream
from gemsc.errors import GemscError, SourceLocation, user_place
from gemsc.plan import Plan
from gemsc.plan_tables import PlannedShape
from gemsc.runtime.data.held_generators import (
    SeededReader,
    held_generators,
    seed_generators,
    unreadable,
)
from gemsc.runtime.data.metrics import along_samples, is_texts
from gemsc.runtime.data.tiled import TiledDataset
from gemsc.runtime.process.status import Status
from gemsc.runtime.transport.transport import Transport

Place = tuple[str | int, ...]  # ("input", 0), ("target", "boxes")


@dataclass(frozen=True)
class ShapeClasses:
    """The classes of a program, in the order of the model's file.

    `pad_value` is what tensors of a sample are filled up with: a number for all, or one
    for each in a nest like that of (input, target). `bucket(sample)` returns the number
    of a sample's class, `collate(samples, number)` makes a batch (input, target) of
    them; None for the usual ways.
    """

    classes: Sequence[PlannedShape]
    pad_value: Any = 0
    bucket: Callable[[Any], int] | None = None
    collate: Callable[[list[Any], int], Any] | None = None
    at: Mapping[str, SourceLocation | None] = field(default_factory=dict)

    @cached_property
    def held_generators(self) -> dict[str, Any]:
        """The generators that `collate` has of its own."""
        return held_generators(self.collate)

    def number_of(self, sample: Any) -> int:
        """Return the number of a sample's class.

        Raises:
            GemscError: it fits none, or `bucket` returns something else.
        """
        if self.bucket is not None:
            given, index = self.bucket(sample), -1
            with suppress(TypeError):  # NumPy's and torch's integers are as good
                index = -1 if isinstance(given, bool) else operator.index(given)
            if not 0 <= index < len(self.classes):
                raise GemscError(
                    f"bucket returns {given!r}, which is not the index of a shape",
                    at=self.at.get("bucket"),
                    help=f"return a number from 0 to {len(self.classes) - 1}, in the "
                    "order of example_inputs()",
                )
            return index
        sizes = _shapes(sample)
        fitting = [
            number
            for number, shape in enumerate(self.classes)
            if all(_fits(p, sizes[p], shape.shape_at(p)) for p in sizes)
        ]
        if not fitting:
            shapes = ", ".join(f"{named_place(p)} {list(s)}" for p, s in sizes.items())
            raise GemscError(
                f"it does not fit any shape: {shapes}; the shapes are "
                f"{', '.join(shape.name for shape in self.classes)}",
                at=self.at.get("dataset"),
                help="cut samples to the largest shape, or add a larger one to "
                "example_inputs()",
            )
        return min(fitting, key=lambda number: self.classes[number].num_elements)

    def padded(self, sample: Any, number: int) -> Any:
        """Return a sample with all its tensors padded at the end to a class's shape.

        Raises:
            GemscError: one is larger, or has another number of dimensions.
        """
        if self.collate is not None:
            return sample
        shape = self.classes[number]

        def pad(place: Place, array: Any) -> Any:
            wanted = shape.shape_at(place)
            if wanted is None:
                return array
            if tuple(array.shape) == wanted:  # beside others that become tensors
                return torch.as_tensor(array)
            if not _fits(place, tuple(array.shape), wanted):
                raise GemscError(
                    f"{named_place(place)} has shape {list(array.shape)}, but its "
                    f"shape class '{shape.name}' needs {list(wanted)}",
                    at=self.at.get("dataset"),
                    help="a sample may not grow from epoch to epoch: pad or cut it in "
                    "the dataset, or let bucket(sample) choose a larger class",
                )
            tensor = torch.as_tensor(array)
            pairs = zip(reversed(wanted), reversed(tensor.shape), strict=True)
            ends = [part for size, length in pairs for part in (0, size - length)]
            value, rounds = self._padding_at(place), tensor.is_floating_point()
            with suppress(RuntimeError, TypeError):
                padded = F.pad(tensor, ends, value=value)
                if rounds or padded.flatten()[-1].item() == value:
                    return padded
            raise GemscError(
                f"pad_value gives {value!r} for {named_place(place)}, which is "
                f"{dtype_name(tensor.dtype)}",
                at=self.at.get("pad_value"),
                help="give a number, or (of inputs, of targets), such as (0, -100)",
            )

        return map_sample(sample, pad)

    def _padding_at(self, place: Place) -> Any:
        """Return what a tensor is filled up with."""
        value, path = self.pad_value, (int(place[0] == "target"), *place[1:])
        for part in path:
            if isinstance(value, tuple | list) and isinstance(part, int):
                value = value[part] if part < len(value) else 0
            elif isinstance(value, Mapping):
                value = value.get(part, 0)
        return value


def shape_of_batch(
    plan: Plan, sources: Mapping[str, Any], given: int | None = None
) -> int:
    """Return the number of a batch's shape: the one that is given, or of its tensors.

    Raises:
        GemscError: they have none of the shapes, or do not tell.
    """
    if not plan.shapes:
        return 0
    if given is not None:
        if given not in range(len(plan.shapes)):
            raise GemscError(
                f"there is no shape {given}: this program has {len(plan.shapes)}",
                help="give its place in what example_inputs() returns, from 0 on",
            )
        return given
    sample = sources.get("input"), sources.get("target")
    by_place = {place: size for place, size in _shapes(sample).items() if size}
    known = {number: shape.sizes for number, shape in enumerate(plan.shapes)}
    there = {".".join(map(str, p)): size[1:] for p, size in by_place.items()}
    there = {p: size for p, size in there.items() if p in plan.shapes[0].sizes}
    fitting = [
        number
        for number, sizes in known.items()
        if all(tuple(sizes[place]) == size for place, size in there.items())
    ]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise GemscError(
            "this rank's part of the batch does not determine its shape",
            help="pass the batch on all ranks, or the index of its shape: "
            "trainer.step(..., shape=0)",
        )
    shapes = ", ".join(f"{named_place(p)} {list(size)}" for p, size in by_place.items())
    names = ", ".join(shape.name for shape in plan.shapes)
    raise GemscError(
        f"a batch of {shapes} has none of the shapes of this program: {names}",
        help="pad it to the smallest shape that fits, or compile again with this shape "
        "in example_inputs()",
    )


def join_samples(
    samples: list[Any],
    shapes: ShapeClasses | None,
    number: int,
    count: int | None = None,
) -> Any:
    """Return samples of one class as a batch of inputs and one of targets.

    The user's `collate`, which may sort or mix them, does not see what is behind the
    first `count`: the last row of what it gives fills up the batch.

    Raises:
        GemscError: the user's `collate` fails.
    """
    if shapes is None or shapes.collate is None:
        return default_collate(samples)
    # as the last sample was: every rank that reads these draws the same
    seed_generators(shapes.held_generators, torch.initial_seed())
    try:
        batch = shapes.collate(samples[:count], number)
    except Exception as error:
        raise GemscError(
            f"collate() fails: {type(error).__name__}: {error}",
            at=user_place(error.__traceback__) or shapes.at.get("collate"),
            help="gemsc calls collate(samples, number) with a list of (input, target) "
            "and the index of their shape, in the order of example_inputs()",
        ) from error
    if wrong := pair_error(batch, shapes.at.get("collate")):
        wrong.message = wrong.message.replace("the dataset does", "collate() does")
        raise wrong

    def fill(dim: int, leaf: Any) -> Any:
        is_array = isinstance(leaf, Tensor | np.ndarray) and leaf.ndim
        if not (is_array or is_texts(leaf)) or len(leaf) != count:
            return leaf
        order = [min(row, count - 1) for row in range(len(samples))]
        return leaf[order] if is_array else [leaf[i] for i in order]

    is_filled = count is not None and count < len(samples)
    return along_samples(fill, (), batch) if is_filled else batch


def numbers_of(
    classes: ShapeClasses, dataset: Any, seed: int, indices: Iterable[int]
) -> list[int]:
    """Return the class of each of these samples, as it is in epoch 0.

    A dataset may say it itself, without reading a sample: `dataset.bucket(index)`.

    Raises:
        GemscError: a sample has none, or the dataset gives no samples by their number.
    """
    reader = SeededReader(dataset, seed)
    bucket = getattr(dataset, "bucket", None)
    if isinstance(dataset, Stream | TiledDataset):
        raise no_shapes_known(dataset, classes.at.get("dataset"))
    if callable(bucket):
        classes = replace(classes, bucket=bucket)

    def number(index: int) -> int:
        Status.go_on()
        if callable(bucket):
            return classes.number_of(index)
        sample = reader.read(0, index, lambda: dataset[index])
        if wrong := pair_error(sample, classes.at.get("dataset")):
            raise wrong
        return classes.number_of(sample)

    numbers = []
    for index in indices:
        try:
            numbers.append(number(index))
        except GemscError as error:
            error.message = f"sample {index}: {error.message}"
            raise
        except Exception as error:
            raise unreadable(error, f"[{index}]", index) from error
    return numbers


def all_numbers(
    classes: ShapeClasses | None,
    dataset: Any,
    seed: int,
    transport: Transport | None = None,
) -> Tensor | None:
    """Return the class of each sample; None where all have the same one.

    With a `transport`, each rank looks at a part of the samples.
    """
    if classes is None or len(classes.classes) == 1:
        return None
    count, rank, size = num_samples(dataset, classes.at.get("dataset")), 0, 1
    if transport is not None:
        rank, size = transport.rank, transport.size
    mine = numbers_of(classes, dataset, seed, range(rank, count, size))
    parts = [mine] if transport is None else transport.all_gather_object(mine)
    numbers = torch.zeros(count, dtype=torch.int64)
    for rank, part in enumerate(parts):
        numbers[rank::size] = torch.tensor(part)
    return numbers


def map_sample(sample: Any, change: Callable[[Place, Any], Any]) -> Any:
    """Return (input, target) with `change(place, array)` in place of each array.

    A lone input is the first one of several.
    """
    input, target = sample
    alone = isinstance(input, Tensor | np.ndarray)
    place: Place = ("input", 0) if alone else ("input",)
    return _map(input, place, change), _map(target, ("target",), change)


def _map(value: Any, place: Place, change: Callable[[Place, Any], Any]) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return change(place, value)
    if isinstance(value, Mapping):
        return {key: _map(item, (*place, key), change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_map(item, (*place, i), change) for i, item in enumerate(value)]
        return items if isinstance(value, list) else named_tuple(value, items)
    return value


def _shapes(sample: Any) -> dict[Place, tuple[int, ...]]:
    """Return the shape of each array of a sample."""
    shapes = {}

    def note(place: Place, array: Any) -> Any:
        shapes[place] = tuple(array.shape)
        return array

    map_sample(sample, note)
    return shapes


def _fits(place: Place, shape: tuple[int, ...], wanted: tuple[int, ...] | None) -> bool:
    """Whether a tensor of a sample can be padded to what a class wants, if anything.

    A grey picture cannot, where others have colours: its channel would be their red.
    """
    if wanted is None:
        return True
    if place[0] == "input" and len(wanted) > 2 and shape[:1] == (1,) != wanted[:1]:
        return False
    pairs = zip(shape, wanted, strict=False)
    return len(shape) == len(wanted) and all(length <= size for length, size in pairs)
