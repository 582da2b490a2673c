"""Example inputs of one micro-batch, or of one for each of several shapes.

example_inputs() -> (tokens of 8 x 512,)                           one shape
example_inputs() -> [(tokens of 32 x 128,), (tokens of 8 x 512,)]  two: 128 and 512
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gemsc.base.nests import (
    Inputs,
    Path,
    map_tensors,
    normalize_inputs,
    tensor_leaves,
)
from gemsc.errors import GemscError

_PARTS = 2, 4, 8, 16, 32  # of an input's size: of a target, where it is smaller


@dataclass(frozen=True)
class Examples:
    """A micro-batch of each shape that batches may have, in the user's order."""

    inputs: Sequence[Inputs]
    targets: Sequence[Any]

    @classmethod
    def of(cls, inputs: Any, target: Any = None) -> Examples:
        """Take what a user gives: of several shapes, lists of inputs and of targets.

        Raises:
            GemscError: a list of other length, or two shapes that do not differ.
        """
        shapes = inputs_of_shapes(inputs)
        if len(shapes) == 1:
            return cls(shapes, [target])
        targets = [None] * len(shapes) if target is None else target
        if not isinstance(targets, list) or len(targets) != len(shapes):
            raise GemscError(
                f"example_target has one shape, but example_inputs has {len(shapes)}",
                help="return a list of targets, one for each of example_inputs()",
            )
        examples = cls(shapes, targets)
        examples._check()
        return examples

    def _check(self) -> None:
        names = self.names
        for number, name in enumerate(names):
            if name in names[:number]:
                raise GemscError(
                    f"example_inputs has two shapes with equal samples: {name}",
                    help="give the samples of each shape another size",
                )

    @property
    def largest(self) -> int:
        """The number of the one with most numbers; of equal ones, in a sample."""

        def size(number: int) -> tuple[int, int]:
            leaves = [tensor for _, tensor in tensor_leaves(self.inputs[number])]
            whole = sum(tensor.numel() for tensor in leaves)
            return whole, whole // max(num_rows(self.inputs[number]), 1)

        return max(range(len(self.inputs)), key=size)

    @property
    def names(self) -> list[str]:
        """How each is called: by the sizes in which samples of the first input differ.

        Names may be part of a file's name.
        """
        sizes = [samples(inputs, "input") for inputs in self.inputs]
        for place in sizes[0]:
            rows = [tuple(shapes[place]) for shapes in sizes]
            differ = [len({*dims}) > 1 for dims in zip(*rows, strict=False)]
            if any(differ):
                pairs = [zip(row, differ, strict=False) for row in rows]
                return ["x".join(str(n) for n, d in pair if d) for pair in pairs]
        return ["" for _ in self.inputs]

    def few(
        self,
        rows: int,
        sizes: Mapping[int, int] | None = None,
        *,
        is_oblong: bool = False,
    ) -> Examples:
        """Return examples of so many samples at most.

        Where a sample is as long as one of `sizes`, it is that short: {512: 64}. A
        target of 128 x 128 is then one of 16 x 16. With `is_oblong`, the last size of
        each is twice as large as that.
        """
        inputs, targets = [], []
        for given, target in zip(self.inputs, self.targets, strict=True):
            how = num_rows(given), rows, sizes or {}
            inputs.append(map_tensors(given, partial(_cut, *how, is_oblong, ())))
            targets.append(map_tensors(target, partial(_cut, *how, is_oblong, _PARTS)))
        return Examples(inputs, targets)

    @property
    def given(self) -> tuple[Any, Any]:
        """Inputs and target as a user gives them: of several shapes, lists."""
        pair = self.inputs, self.targets
        return pair if len(self.inputs) > 1 else (pair[0][0], pair[1][0])

    @property
    def are_different(self) -> bool:
        """Whether samples of all shapes are."""
        return len({*self.names}) == len(self.inputs)

    def sizes(self, number: int) -> dict[str, list[int]]:
        """Return the shape of each tensor of a sample, by where it is."""
        rows = num_rows(self.inputs[number])
        shapes = samples(self.inputs[number], "input")
        return shapes | samples(self.targets[number], "target", rows)


def inputs_of_shapes(inputs: Any) -> list[Inputs]:
    """Return the inputs of each shape: several if it is a list of like inputs.

    Like are tuples, or dicts, of as many tensors of the same dtypes, not all of the
    same shapes.

    Raises:
        GemscError: they are like, but for their dtypes.
    """
    if isinstance(inputs, list) and len(inputs) > 1:
        kinds = tuple, Mapping
        if any(all(isinstance(nest, kind) for nest in inputs) for kind in kinds):
            rows = [dict(tensor_leaves(nest)) for nest in inputs]
            forms = [{p: (t.dtype, t.dim()) for p, t in row.items()} for row in rows]
            shapes = {tuple(tuple(t.shape) for t in row.values()) for row in rows}
            dims = [{p: dim for p, (_, dim) in form.items()} for form in forms]
            if rows[0] and len(shapes) > 1 and all(d == dims[0] for d in dims):
                _check_dtypes(rows)
                return [normalize_inputs(nest) for nest in inputs]
    return [normalize_inputs(inputs)]


def _check_dtypes(rows: Sequence[Mapping[Path, Tensor]]) -> None:
    """Raise a GemscError where a tensor of the first shape has another dtype later."""
    for number, row in enumerate(rows):
        for path, tensor in row.items():
            pair = rows[0][path].dtype, tensor.dtype
            if pair[0] != pair[1]:
                first, other = (str(dtype).removeprefix("torch.") for dtype in pair)
                place = "".join(f"[{part!r}]" for part in path)
                raise GemscError(
                    "example_inputs has shapes of several dtypes: its "
                    f"[0]{place} is {first}, its [{number}]{place} {other}",
                    help="give each shape tensors of the same dtypes; of a model that "
                    "takes several tuples or dicts, return a tuple, not a list",
                )


def num_rows(inputs: Any) -> int:
    """Return the samples of a micro-batch: the first size of its first tensor."""
    return next((t.shape[0] for _, t in tensor_leaves(inputs) if t.dim()), 1)


def samples(nest: Any, name: str, rows: int | None = None) -> dict[str, list[int]]:
    """Return the shape of each tensor of a sample, by its place: `input.mask`.

    Those that are not of samples, with other than so many `rows`, are left out.
    """
    rows = num_rows(nest) if rows is None else rows
    pairs: list[tuple[Any, Tensor]] = [*tensor_leaves(nest, (name,))]
    return {
        ".".join(map(str, path)): list(tensor.shape[1:])
        for path, tensor in pairs
        if tensor.dim() and tensor.shape[0] == rows
    }


def _cut(
    size: int,
    rows: int,
    sizes: Mapping[int, int],
    is_oblong: bool,
    parts: Sequence[int],
    path: Path,
    tensor: Tensor,
) -> Tensor:
    known = sizes
    for part in parts if known.keys().isdisjoint(tensor.shape[1:]) else ():
        smaller = {n // part: -(-m // part) for n, m in sizes.items() if n % part == 0}
        if sum(length in smaller for length in tensor.shape[1:]) > 1:
            known = smaller
            break
    lengths = [known.get(length, length) for length in tensor.shape]
    if is_oblong and tensor.dim() > 1 and lengths[-1] < tensor.shape[-1]:
        lengths[-1] *= 2
    if tensor.dim() and len(tensor) == size:
        lengths[0] = min(rows, size)
    return tensor[tuple(map(slice, lengths))]


def target_like(sample: Any, shapes: Sequence[Any], number: int) -> Any:
    """Return the target of a sample, as it is where its inputs have one of the shapes.

    Its last sizes that an input has, too, change with the input's. It is cut, or filled
    up with zeros.
    """
    input, target = sample
    inputs = {
        ".".join(map(str, path)): list(tensor.shape)
        for path, tensor in tensor_leaves(_as_tensors(input), ("input",))
    }
    if "input" in inputs:  # alone, it is the first of several
        inputs = {"input.0": inputs["input"]}
    classes = [samples(nest, "input") for nest in shapes]

    def change(path: Path, tensor: Tensor) -> Tensor:
        return _resized(tensor, _shape_like(tensor.shape, inputs, classes, number))

    return map_tensors(_as_tensors(target), change)


def _as_tensors(nest: Any) -> Any:
    return pytree.tree_map_only(np.ndarray, torch.from_numpy, nest)


def _shape_like(
    shape: Sequence[int],
    inputs: Mapping[str, list[int]],
    classes: Sequence[Mapping[str, list[int]]],
    number: int,
) -> list[int]:
    for place, sizes in inputs.items():
        rows = [shapes[place] for shapes in classes if place in shapes]
        count = min(len(shape), len(sizes))
        while count and list(shape[-count:]) != sizes[-count:]:
            count -= 1
        if count and len({tuple(row[-count:]) for row in rows}) > 1:
            return [*shape[: len(shape) - count], *rows[number][-count:]]
    return list(shape)


def _resized(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    resized = tensor.new_zeros(tuple(shape))
    inside = tuple(slice(min(a, b)) for a, b in zip(tensor.shape, shape, strict=True))
    resized[inside] = tensor[inside]
    return resized
