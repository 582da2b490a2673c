"""The generators of random numbers that a dataset has of its own.

NumPy's, Python's and torch's are found wherever the dataset, or what it is made of,
holds them, nested as they may be:

    Pairs.transform.transforms[2].R     of a MONAI transform
    Noisy.__getitem__.rng               of the user's file, which a method draws from
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path, PurePath
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from gemsc.base.nests import stored_attributes, stored_items
from gemsc.base.rng import seed_all, seed_of
from gemsc.errors import GemscError, is_users, user_place

Sample = TypeVar("Sample")

MOST_OBJECTS = 100_000
MOST_ITEMS = 1000  # of a list: a longer one holds samples, not what draws

_KINDS = (np.random.RandomState, np.random.BitGenerator, random.Random, torch.Generator)
_OF_NUMPY = {"MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"}
_PLAIN = (
    *(str, bytes, bytearray, int, float, complex, type(None), PurePath, ModuleType),
    *(Tensor, np.ndarray, np.generic, TypeVar),
)
_SHARED = (  # seeded for each sample anyway
    random.random.__self__,  # type: ignore[attr-defined]
    np.random.rand.__self__,  # type: ignore[attr-defined]
    torch.default_generator,
)


class EpochLengthError(GemscError):
    """A dataset has more samples in an epoch than before, or fewer."""


class SeededReader:
    """Reads a dataset with all generators seeded for each sample, its own among them.

    They are looked for once an epoch, and after the first sample, which may make some.
    A dataset with a `set_epoch(epoch)` is told before the first sample of each epoch.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._epoch = -1
        self._held: dict[str, Any] = {}

    def read(self, epoch: int, index: int, sample: Callable[[], Sample]) -> Sample:
        """Return what `sample` gives, as that of an index in an epoch."""
        is_first = self._epoch < 0
        if epoch != self._epoch:
            count = _length(self._dataset)
            _set_epoch(self._dataset, epoch)
            if (now := _length(self._dataset)) != count:
                raise EpochLengthError(
                    f"set_epoch({epoch}) makes len() of the dataset {now}, not {count}",
                    help="let all epochs have the same number of samples: __getitem__ "
                    "can choose others in each epoch",
                )
            self._epoch, self._held = epoch, held_generators(self._dataset)
        self.seed(epoch, index)
        given = sample()
        if is_first and (held := held_generators(self._dataset)) != self._held:
            self._held = held
            self.seed(epoch, index)
            given = sample()
        return given

    def seed(self, epoch: int, index: int) -> None:
        """Seed all generators for a sample."""
        seed_all(seed_of(self._seed, epoch, index))
        seed_generators(self._held, self._seed, epoch, index)


def _set_epoch(dataset: Any, epoch: int) -> None:
    """Say which epoch begins, to a dataset or those it is of, where that is asked for.

    A stream does it itself, as often as it begins.
    """
    parts = [dataset.dataset] if isinstance(dataset, Subset) else []
    for part in dataset.datasets if isinstance(dataset, ConcatDataset) else parts:
        _set_epoch(part, epoch)
    if callable(set_epoch := getattr(dataset, "set_epoch", None)):
        set_epoch(epoch)


def _length(dataset: Any) -> int:
    return len(dataset) if hasattr(type(dataset), "__len__") else 0


def unreadable(error: Exception, call: str, index: int) -> GemscError:
    """Return what to say of a sample that cannot be read, by a call of the dataset."""
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, EpochLengthError):
        return error
    if isinstance(error, GemscError):  # of a Slide
        what = error.message
    return GemscError(
        f"sample {index} cannot be read: {what}",
        at=user_place(error.__traceback__),
        help=f"try dataset(){call} in Python, or leave the sample out",
    )


def seed_generators(held: dict[str, Any], *parts: int) -> None:
    """Seed each generator with a number of its own, made of its path and the parts."""
    for path, generator in held.items():
        seed = seed_of(*parts, path)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.BitGenerator):
            generator.state = type(generator)(seed).state
        else:  # no more bits than NumPy takes
            generator.seed(seed % 2**32)


def held_generators(owner: Any) -> dict[str, Any]:
    """Return each generator by the path to it, the shortest one."""
    parts = parts_held(type(owner).__name__, owner, _SHARED)
    return {p: v for p, v in parts if isinstance(v, _KINDS) and _can_be_seeded(v)}


def parts_held(
    name: str, owner: Any, without: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield all that an object holds, or a function uses, by the shortest path."""
    seen: dict[int, Any] = {id(part): part for part in without}
    queue = deque([(name, owner)])
    while queue and len(seen) < MOST_OBJECTS:
        path, value = queue.popleft()
        kind = type(value)
        if id(value) in seen:
            continue
        yield path, value
        if not issubclass(kind, _PLAIN):
            seen[id(value)] = value
            if not issubclass(kind, _KINDS):
                queue.extend((path + place, part) for place, part in _parts(value))


def _can_be_seeded(generator: Any) -> bool:
    """Whether it is not one of another package's, which may take no seed."""
    if isinstance(generator, np.random.RandomState):
        return bool(generator.get_state(legacy=False)["bit_generator"] == "MT19937")
    of_numpy = type(generator).__name__ in _OF_NUMPY
    return of_numpy or not isinstance(generator, np.random.BitGenerator)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds: items, attributes, what a function uses."""
    kind = type(value)
    if issubclass(kind, FunctionType):
        yield from _used(value)
        return
    if issubclass(kind, np.random.Generator):
        yield ".bit_generator", value.bit_generator
    elif issubclass(kind, dict):
        for number, (key, item) in enumerate(islice(stored_items(value), MOST_ITEMS)):
            yield f"[{key!r}]" if isinstance(key, str) else f"[{number}]", item
    elif issubclass(kind, list | tuple | deque):
        items = [*value] if issubclass(kind, deque) else value
        for number, item in islice(stored_items(items), MOST_ITEMS):
            yield f"[{number}]", item
    elif issubclass(kind, BuiltinMethodType):  # rng.random
        yield ".__self__", value.__self__
    yield from _attributes(value)
    for base in kind.__mro__:
        if base.__module__ != "builtins":
            yield f".{base.__name__}", base


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield those that are stored: nothing of the user's is called."""
    is_class = isinstance(value, type)
    for name, item in list(stored_attributes(value).items()):
        if name == "__annotations__":  # leads through typing, and holds nothing
            continue
        if not (is_class and isinstance(item, type | MemberDescriptorType)):
            yield f".{name}", item
    for base in () if is_class else type(value).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, MemberDescriptorType):  # __slots__, and of partial()
                try:
                    yield f".{name}", member.__get__(value)
                except AttributeError:  # not set
                    continue


def _used(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function holds and, if it is the user's, takes from its file."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # not set yet
            continue
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    yield ".__dict__", vars(function)
    if is_users(Path(code.co_filename)):
        for name in _names(code):
            yield f".{name}", function.__globals__.get(name)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function and those in it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
