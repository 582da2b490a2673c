"""What a model or a loss can see: its attributes, variables, classes and packages.

And forgetting the tensors that forward keeps there.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import _lru_cache_wrapper, partial
from itertools import chain, islice
from numbers import Number
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gemsc.base.nests import stored_attributes, stored_items, tensor_leaves
from gemsc.errors import is_users

WITH_A_STATE = (random.Random, np.random.Generator, np.random.RandomState)
MOST_ITEMS = 1000  # of a list or a dict that is looked into: a longer one holds data
_SINGLE = (str, bytes, torch.Tensor, ModuleType, *WITH_A_STATE, Number)
_NO_NUMBERS = frozenset({"training", "_modules", "_parameters", "_buffers"})
_OF_ALL_MODULES = frozenset(vars(nn.Module()))  # its hooks, most of them empty
_NO_TABLES = (nn.Module, type, FunctionType, ModuleType)
_KEEPERS = (dict, list, _lru_cache_wrapper)
_DICTS = (dict, defaultdict, OrderedDict)  # others may import what they are asked for


def all_in(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a module or a loss can see, with what it is called, nearest first."""
    is_module = isinstance(owner, nn.Module)
    modules = owner.named_modules() if is_module else [("", owner)]
    way = deque((f"self.{path}".rstrip("."), module) for path, module in modules)
    seen: set[int] = set()
    while way:
        name, value = way.popleft()
        yield name, value
        if id(value) in seen or isinstance(value, _SINGLE):
            continue
        seen.add(id(value))
        way.extend(pair for pair in _items(name, value) if id(pair[1]) not in seen)
        if isinstance(value, _lru_cache_wrapper):
            kept = tensor_leaves(gc.get_referents(value))
            way.extend((f"{name}()", tensor) for _, tensor in kept)


@contextmanager
def forgetting(*owners: Any) -> Iterator[Callable[[], None]]:
    """Forget the tensors that forward keeps outside of the model, for its next calls.

    What it gives forgets them at once, between two calls. Forward may keep them in a
    dict, a list, an object, a class, a function or a variable of its file, or of its
    package, or by `lru_cache`: what is a fake, or in one dtype, is of no use to calls
    on numbers, or in another.
    """
    values = (value for owner in owners for _, value in all_in(owner))
    visible = {
        id(value): value for value in chain(values, _in_packages(owners))
    }.values()
    before = [(p, dict(_held(p))) for value in visible for p in _places(value)]
    caches = [v for v in visible if isinstance(v, _lru_cache_wrapper)]

    def forget() -> None:
        _forget_cached(caches)
        for place, known in before:
            _forget(place, known)

    _forget_cached(caches)  # what another run has left: all find the same
    try:
        yield forget
    finally:
        forget()


def _in_packages(owners: Sequence[Any]) -> Iterator[Any]:
    """Yield what the files of the packages that a model's layers are from hold."""
    networks = [owner for owner in owners if isinstance(owner, nn.Module)]
    kinds = {type(module) for network in networks for module in network.modules()}
    classes = chain(*(kind.__mro__ for kind in kinds))
    names = {cls.__module__.partition(".")[0] for cls in classes}
    names -= {"torch", "builtins"}
    inside = tuple(f"{name}." for name in names)
    for name in [n for n in [*sys.modules] if n in names or n.startswith(inside)]:
        if type(file := sys.modules.get(name)) is ModuleType:
            values = [*vars(file).values()]
            types = [value for value in values if isinstance(value, type)]
            types = [cls for cls in types if cls.__module__ == name]
            yield from (vars(file), *types)
            for value in chain(values, *(vars(cls).values() for cls in types)):
                if isinstance(value, _KEEPERS):
                    yield value


def _forget_cached(caches: Iterable[Any]) -> None:
    """Empty each `lru_cache` that holds tensors; one of networks is left as it is."""
    for cache in caches:
        if cache.cache_info().currsize and _has_tensors(gc.get_referents(cache)):
            cache.cache_clear()


def _has_tensors(value: Any) -> bool:
    """Whether there are tensors in a nest, or in objects in it; networks are none.

    What holds many others, as a compiled program does, is no table: it ends early.
    """
    way, seen = deque([value]), set[int]()
    while way and len(seen) < MOST_ITEMS:
        value = way.popleft()
        if isinstance(value, Tensor):
            return True
        if id(value) in seen or isinstance(value, _NO_TABLES):
            continue
        seen.add(id(value))
        is_nest = isinstance(value, (list, tuple, dict))
        pairs = stored_items(value) if is_nest else stored_attributes(value).items()
        way.extend(item for _, item in islice(pairs, MOST_ITEMS))
    return False


def _places(value: Any) -> Iterator[Any]:
    """Yield the dicts, lists, classes and cells of functions that can get tensors."""
    if type(value) in (*_DICTS, list):
        yield from [value] if len(value) <= MOST_ITEMS else ()
    elif isinstance(value, type):
        yield value
    elif isinstance(value, FunctionType) and is_users_own(value):
        yield from (value.__globals__, vars(value), *(value.__closure__ or ()))
    elif not isinstance(value, _NO_TABLES):
        yield stored_attributes(value)


def _held(place: Any) -> Mapping[Any, Any]:
    if isinstance(place, CellType):
        return {"cell_contents": content(place)}
    if isinstance(place, list):
        return dict(enumerate(place))
    return vars(place) if isinstance(place, type) else place


def _forget(place: Any, known: Mapping[Any, Any]) -> None:
    """Put back what a place held where there are new tensors now."""
    now = [*_held(place).items()]
    new = [k for k, v in now if v is not known.get(k) and _has_tensors(v)]
    if new and isinstance(place, list):
        place[:] = known.values()
        return
    has_attributes = isinstance(place, (type, CellType))
    for key in new:
        if key not in known:
            delattr(place, key) if has_attributes else place.pop(key)
        elif has_attributes:
            setattr(place, key, known[key])
        else:
            place[key] = known[key]


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, or a function refers to, and what that is called."""
    if isinstance(value, FunctionType):
        code, known = value.__code__, value.__globals__
        if is_users_own(value):
            cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
            yield from ((key, content(cell)) for key, cell in cells)
            yield from ((key, known[key]) for key in code.co_names if key in known)
            defaults = (
                *(value.__defaults__ or ()),
                *(value.__kwdefaults__ or {}).values(),
            )
            yield from (
                (f"a default of {value.__name__}", default) for default in defaults
            )
            yield from ((f"{value.__name__}.{k}", v) for k, v in vars(value).items())
    elif isinstance(value, (partial, staticmethod, classmethod)):
        key = "func" if isinstance(value, partial) else "__func__"
        yield f"{name}.{key}", getattr(value, key)
    elif isinstance(value, (list, tuple, dict)):
        pairs = [*islice(stored_items(value), MOST_ITEMS + 1)]
        if len(pairs) <= MOST_ITEMS:
            yield from ((f"{name}[{key!r}]", item) for key, item in pairs)
    else:
        is_class = isinstance(value, type)
        if not is_class or is_users_own(value):
            for key, item in [*stored_attributes(value).items()]:
                if key not in _NO_NUMBERS and (key not in _OF_ALL_MODULES or item):
                    yield f"{name}.{key}", item
        if not is_class:
            yield from ((name, cls) for cls in type(value).__mro__)


def is_users_own(value: Any) -> bool:
    """Whether it is a function or a class of the user's."""
    file = None
    if isinstance(value, FunctionType):
        file = value.__code__.co_filename
    elif isinstance(value, type):
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
    return file is not None and is_users(Path(file))


def content(cell: CellType) -> Any:
    """Return what a function holds of a variable around it."""
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that has no value yet, or no more
        return None
