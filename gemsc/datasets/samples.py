"""The samples of a dataset: how many there are, and whether they are pairs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from inspect import signature
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from gemsc.base.nests import Path, named_place, tensor_leaves
from gemsc.datasets.stream import ENDLESS, Stream
from gemsc.errors import GemscError, SourceLocation


def num_samples(dataset: Any, at: SourceLocation | None = None) -> int:
    """Return how many samples a dataset has; ENDLESS for a stream that does not say.

    Raises:
        GemscError: it does not say so, or gives no sample by its number.
    """
    kind = type(dataset)
    if isinstance(dataset, Stream):
        return dataset.samples or ENDLESS
    if dataset is None:
        raise GemscError(
            "the dataset is None", at=at, help="end its function with return dataset"
        )
    if not hasattr(kind, "__len__"):
        raise GemscError(
            f"the dataset, of type {kind.__name__}, does not say how many samples it "
            "has: there is no len()",
            at=at,
            help="give it __len__ and __getitem__; return a stream whose samples fit "
            "in memory as list(stream), and another one as gemsc.Stream(it), if "
            "iter(it) starts again from the beginning",
        )
    if not (hasattr(kind, "__getitem__") or hasattr(kind, "read")):  # a TiledDataset
        raise GemscError(
            f"the dataset, of type {kind.__name__}, does not return samples by index",
            at=at,
            help="return a Dataset with __getitem__, or an IterableDataset, not a "
            "DataLoader: gemsc makes the batches; docs/models.md has a dataset that "
            "samples by weights",
        )
    return len(dataset)


def joins_samples(collate: Any) -> bool:
    """Whether a `collate` is made for gemsc, and not for a loader of the user's own.

    It takes samples and the number of their shape. What it takes by itself as well is
    something else, such as the value that it pads with, unless it is called `number`.
    """
    try:
        takes = signature(collate)
        takes.bind([], 0)
    except (TypeError, ValueError):
        return False
    try:
        takes.bind([])
    except TypeError:
        return True
    return "number" in takes.parameters


def pair_error(sample: Any, at: SourceLocation | None = None) -> GemscError | None:
    """Return what is wrong with a sample that is no (input, target) pair."""
    if isinstance(sample, (tuple, list)) and len(sample) == 2:
        return None
    what, example = f"a sample is of type {type(sample).__name__}", "(input, target)"
    if isinstance(sample, Mapping):
        what += f", with the keys {', '.join(map(repr, sample))}"
        example = "({name of an argument of forward: tensor}, target)"
    elif isinstance(sample, (tuple, list)):
        what += f", of length {len(sample)}"
    return GemscError(
        f"the dataset does not return (input, target) pairs: {what}",
        at=at,
        help=f"return a pair from __getitem__: {example}; 0 if there is no target",
    )


def collated_target(
    samples: list[Any], examples: Mapping[str, Any], at: SourceLocation | None = None
) -> Any:
    """Return the target of a batch whose inputs are as `examples` has them.

    Raises:
        GemscError: an input is missing on either side, or has another shape.
    """
    inputs, target = default_collate(samples)
    given = _leaves(inputs)
    for path, tensor in tensor_leaves(examples):
        name = named_place(path)
        if path not in given:
            wrong = f"no {name}, but {', '.join(map(named_place, given))}"
        elif given[path].shape[1:] != tensor.shape[1:]:
            sizes, expected = (list(t.shape[1:]) for t in (given[path], tensor))
            wrong = f"{name} of shape {sizes}, example_inputs() of {expected}"
        else:
            continue
        raise GemscError(
            f"a sample of the dataset has {wrong}",
            at=at,
            help="return inputs with the structure and the shapes of example_inputs(), "
            "without its first dimension; the target is none of them",
        )
    if "input" in examples:
        check_inputs(inputs, examples["input"], at)
    return target


def check_inputs(inputs: Any, examples: Any, at: SourceLocation | None = None) -> None:
    """Make sure that a batch has no input that the program would not read.

    It reads the tensors of `examples`. A number there is one for all samples, and None
    stays None: samples may have that number, or any one, in its place.

    Raises:
        GemscError: it has one.
    """
    read = dict(tensor_leaves({"input": examples}))
    for path, tensor in _leaves(inputs).items():
        if path in read:
            continue
        why, known = "which example_inputs() does not have", examples
        with suppress(IndexError, KeyError, TypeError):
            for part in path[1:]:
                known = known[part]
            wanted = tensor[0] if known is None else known
            if tensor.dim() == 1 and bool((tensor == wanted).all()):
                continue
            why = f"which is {known!r} in example_inputs()"
        raise GemscError(
            f"a sample of the dataset has {named_place(path)}, {why}",
            at=at,
            help="a program reads the tensors of example_inputs() and nothing else: "
            "return a tensor there, too, or leave it out of the samples",
        )


def _leaves(inputs: Any) -> dict[Path, Tensor]:
    """Return the tensors of a batch by their place; a lone one is the first of all."""
    alone = isinstance(inputs, Tensor)
    return dict(tensor_leaves({"input": (inputs,) if alone else inputs}))


def no_shapes_known(dataset: Any, at: SourceLocation | None = None) -> GemscError:
    """Return what to say where batches have several shapes, and samples no numbers."""
    return GemscError(
        f"the shapes of the samples of a {type(dataset).__name__} cannot be known in "
        "advance, since it returns none as a whole by index",
        at=at,
        help="return a dataset with len() and [index], or only the largest shape from "
        "example_inputs(), with a pad_value for smaller samples",
    )


def leading_samples(data: Any, number: int, count: int) -> list[Any]:
    """Return so many samples of a dataset that has `count`, some again if need be."""
    if not isinstance(data, Stream):
        return [_sample(data, index % count) for index in range(number)]
    samples = list(islice(data, number))
    if len(samples) < number:
        raise GemscError(
            f"the stream has {len(samples)} samples, but a micro-batch needs {number}",
            help="add samples, or return fewer from example_inputs()",
        )
    return samples


def _sample(data: Any, index: int) -> Any:
    """Return a sample, with all of the image where a dataset reads it in boxes."""
    if hasattr(data, "read") and hasattr(data, "shape"):
        return data.read(index, tuple((0, size) for size in data.shape))
    return data[index]
