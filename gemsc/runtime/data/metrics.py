"""What a user's `metrics` say of a whole evaluation, given one batch after the other.

    def metrics(output, target)          numbers of a batch: means, weighted by samples
    metrics = BinaryF1Score()            update(output, target), compute(), reset()
    metrics = DiceMetric()               (output, target), aggregate(), reset()
    metrics = {"dice": ..., "f1": ...}   several of these

The second is how torchmetrics writes a metric, the third how MONAI does. These keep
sums over all batches: their figures do not depend on how many samples a batch has.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gemsc.base.nests import OF_ALL, copied, with_attributes
from gemsc.base.rng import fork_torch
from gemsc.errors import GemscError, SourceLocation, user_place

_RESULTS = {"update": "compute", "__call__": "aggregate"}  # what adds, what sums up


class Metrics:
    """The figures of an evaluation, from its batches; none where nothing is `given`."""

    def __init__(self, given: Any = None, at: SourceLocation | None = None) -> None:
        """Take what the user's file calls `metrics`, in its line.

        Raises:
            GemscError: it is nothing of the above, or two figures have one name.
        """
        self._at = at
        several = given if isinstance(given, Mapping) else {"": given}
        self.is_empty = given is None or not several
        self._functions: dict[str, Any] = {}
        self._states: dict[str, tuple[Any, str]] = {}  # and what adds a batch
        known: list[str] = []
        for name, metric in () if self.is_empty else several.items():
            if isinstance(metric, type):
                with as_hook("metrics", at):
                    metric = metric()
            names = dict.fromkeys(figure_names(metric) or ())
            for figure in [f"{name}_{n}" if name else n for n in names] or [name]:
                if names or figure in known:
                    self._check_name(figure, known)
                known.append(figure)
            if (adds := _adds(metric)) is not None:
                self._states[name] = (metric, adds)
            elif callable(metric):
                self._functions[name] = metric
            else:
                raise GemscError(
                    f"metrics is of type {type(metric).__name__}",
                    at=at,
                    help="define metrics(output, target), or give an object with "
                    "update, compute and reset, as torchmetrics has, or with __call__, "
                    "aggregate and reset, as MONAI has",
                )
        self.reset()

    def reset(self) -> None:
        """Begin an evaluation."""
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)
        self._count = 0
        for metric, _ in self._states.values():
            metric.reset()

    @torch.no_grad()
    def add(self, output: Any, target: Any, count: int) -> None:
        """Take what the model returned for a batch of `count` samples.

        Raises:
            GemscError: the user's function fails; with its line.
        """
        self._count += count
        names: list[str] = []
        with as_hook("metrics", self._at):
            for name, function in self._functions.items():
                numbers = function(output, target)
                if not name and not isinstance(numbers, Mapping):
                    raise GemscError(
                        f"metrics() returns an object of type {type(numbers).__name__}",
                        at=self._at,
                        help='return a dict of numbers: {"accuracy": accuracy}',
                    )
                for key, value in _numbers(name, numbers):
                    self._check_name(key, names)
                    names.append(key)
                    self._sums[key] += value * count
                    self._counts[key] += count
            for metric, adds in self._states.values():
                getattr(metric, adds)(output, target)

    def figures(self) -> dict[str, tuple[float, int]]:
        """Return each figure, and of how many samples it is.

        Raises:
            GemscError: the user's metric fails; with its line.
        """
        counts = self._counts
        figures = {n: (total / counts[n], counts[n]) for n, total in self._sums.items()}
        with as_hook("metrics", self._at):
            for name, (metric, adds) in self._states.items():
                value = getattr(metric, _RESULTS[adds])() if self._count else {}
                if not name and not isinstance(value, Mapping):
                    name = type(metric).__name__
                for key, number in _numbers(name, value):
                    self._check_name(key, figures)
                    figures[key] = number, self._count
        return figures

    def takes_of_all(self, output: Any, target: Any, dims: Sequence[int]) -> bool:
        """Whether figures of a batch take what was computed of whole micro-batches.

        They do if they are others where that is, and the same where all is the same.
        """
        if self.is_empty or OF_ALL not in dims:
            return False
        said, other = [], nan_of_all(output, dims, integers=True)
        for given in (output, other, output):
            with fork_torch():
                try:
                    alone = copy.deepcopy(self)
                    alone.reset()
                    alone.add(with_attributes(copied(given)), copied(target), 1)
                    said.append(str(alone.figures()))
                except Exception as error:
                    said.append(str(error))
        return said[0] == said[2] != said[1]

    def _check_name(self, name: str, known: Collection[str]) -> None:
        if name == "loss" or name in known:
            how, one = f"two figures named '{name}'", "one of them"
            if name not in known:
                how, one = "a figure named 'loss', like the held-out loss", "it"
            raise GemscError(
                f"metrics returns {how}", at=self._at, help=f"rename {one}"
            )


@contextmanager
def as_hook(name: str, at: SourceLocation | None) -> Iterator[None]:
    """Tell of an error in the user's code as of one in any other hook."""
    try:
        yield
    except GemscError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise GemscError(
            f"{name}() fails: {type(error).__name__}{': ' * bool(text)}{text}",
            at=user_place(error.__traceback__) or at,
            help="it is called with the model's output for a whole batch, of whose "
            "objects it has the fields only, and the targets, both in host memory",
        ) from error


def _adds(metric: Any) -> str | None:
    """Return the method that takes a batch, if a metric keeps sums over batches."""
    for adds, result in _RESULTS.items():
        if all(callable(getattr(metric, n, None)) for n in (adds, result, "reset")):
            return adds
    return None


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a value: those of a dict by key, several by position."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _numbers(f"{name}_{key}" if name else str(key), part)
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from _numbers(f"{name}_{i}" if len(value) > 1 else name, part)
    else:
        yield name, float(value)


def figure_names(given: Any) -> list[str] | None:
    """Return how the names of all figures begin; None if only a call can tell.

    Known are the keys of what is given, or of the dicts that the text of a function or
    of a lambda returns.
    """
    if given is None or isinstance(given, Mapping):
        return [*map(str, given or ())]
    if not inspect.isfunction(given) or hasattr(given, "__wrapped__"):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(given)))
    except (OSError, SyntaxError):
        return None
    is_lambda = given.__name__ == "<lambda>"
    lambdas = [n.body for n in ast.walk(tree) if isinstance(n, ast.Lambda)]
    returned = [n.value for n in ast.walk(tree) if isinstance(n, ast.Return)]
    if is_lambda and len(lambdas) > 1:  # which of them?
        return None
    names: list[str] = []
    for value in lambdas if is_lambda else returned:
        keys = value.keys if isinstance(value, ast.Dict) else [None]
        texts = [key.value for key in keys if isinstance(key, ast.Constant)]
        if len(texts) < len(keys):
            return None
        names += map(str, texts)
    return names or None


def along_samples(change: Callable[..., Any], dims: Sequence[int], *values: Any) -> Any:
    """Return what `change(dim, *leaves)` makes of the leaves of nests that are alike.

    Samples count in dimension `dim`, ONCE or OF_ALL where there are none: the first
    tensors are those of `dims`, which the model returns (`Plan.sample_dims`); of all
    others it is 0.
    """
    numbers = iter(dims)

    def changed(*leaves: Any) -> Any:
        is_tensor = isinstance(leaves[0], Tensor)
        return change(next(numbers, 0) if is_tensor else 0, *leaves)

    return pytree.tree_map(changed, *values, is_leaf=is_texts)


def first_samples(
    value: Any, count: int, size: int, dims: Sequence[int] = (), *, start: int = 0
) -> Any:
    """Return the first `count` samples, from `start` on, of a batch of `size`.

    A sample may have several rows: `logits.flatten(0, 1)` has one for each word. What
    has no whole number of them for each sample stays whole.
    """

    def first(dim: int, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim():
            if dim < 0 or (rows := leaf.shape[dim]) % size:
                return leaf
            rows //= size
            return leaf.narrow(dim, rows * start, rows * count)
        if not is_texts(leaf) or len(leaf) % size:
            return leaf
        rows = len(leaf) // size
        return leaf[rows * start : rows * (start + count)]

    return along_samples(first, dims, value)


def in_micro_batches(
    value: Any, count: int, size: int, most: int, dims: Sequence[int] = ()
) -> Iterator[tuple[Any, int]]:
    """Yield the first `count` samples of a batch of `size`, `most` at a time."""
    for start in range(0, count, most):
        number = min(most, count - start)
        yield first_samples(value, number, size, dims, start=start), number


def nan_of_all(value: Any, dims: Sequence[int], *, integers: bool = False) -> Any:
    """Return outputs with NaN in what was computed from whole micro-batches.

    With `integers`, these are others, too.
    """

    def change(dim: int, leaf: Any) -> Any:
        if dim != OF_ALL:
            return leaf
        if leaf.is_floating_point():
            return torch.full_like(leaf, torch.nan)
        return (leaf == 0).to(leaf.dtype) if integers else leaf

    return along_samples(change, dims, value)


def sample_of(value: Any, number: int, size: int, dims: Sequence[int] = ()) -> Any:
    """Return what a batch of `size` samples holds for one of them.

    What has no row for each sample stays whole.
    """

    def one(dim: int, leaf: Any) -> Any:
        has_rows = isinstance(leaf, Tensor) and leaf.dim() and dim >= 0
        is_rows = has_rows and leaf.shape[dim] == size
        return leaf.select(dim, number) if is_rows else leaf

    return along_samples(one, dims, value)


def is_texts(value: Any) -> bool:
    """Return whether it is what torch collates texts to: a list of them."""
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
