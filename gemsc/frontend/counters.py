"""Refuse a forward that counts its calls, or draws numbers that no rank seeds.

`random.random() < self.layerdrop` is False for all draws where layerdrop is 0: it
decides nothing. Where the answer depends on the draw, an error says so.
"""

from __future__ import annotations

import itertools
import operator
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from itertools import chain, product
from numbers import Number
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from gemsc.base.visible import MOST_ITEMS, WITH_A_STATE, all_in
from gemsc.errors import GemscError

T = TypeVar("T")


def reject_counters(*states: Mapping[str, object]) -> None:
    """Refuse numbers that change at each call; `states` are before, after 1 and 2."""
    for name in states[-1]:
        values = [state.get(name) for state in states]  # None: made by a later call
        before, once, twice = values
        if differ(before, once) and differ(once, twice):
            is_number = isinstance(twice, Number)  # or a generator's state
            shown = f": {', '.join(map(str, values))}" if is_number else ""
            raise GemscError(
                f"forward changes {name} at each call{shown}",
                help="count in a buffer, and compute with it: "
                'self.register_buffer("count", torch.tensor(...)); draw with torch',
            )


def reject_made_by_eval(model: nn.Module, loss: Any) -> None:
    """Refuse what a model makes or changes in `eval()`: a constant for torch.export."""
    if model.training:
        return
    before = tensors_in(model, loss)
    named = chain(model.named_parameters(), model.named_buffers())
    state = [(name, tensor, tensor._version) for name, tensor in named]
    model.train()  # returns nothing in some packages
    model.eval()
    now = tensors_in(model, loss).items()
    names = [name for name, tensor in now if before.get(name) is not tensor]
    names += [name for name, tensor, version in state if tensor._version != version]
    if names:
        raise GemscError(
            f"eval() makes {', '.join(names)}, which torch.export takes for a constant",
            help="use --frontend record",
        )


def differ(one: object, other: object) -> bool:
    """Whether numbers are not the same; NaN is the same as NaN."""
    return one != other and repr(one) != repr(other)


def counters_of(model: nn.Module, loss: Any) -> dict[str, object]:
    """Return the numbers that a model and its loss can see, of one name both."""
    seen, others = _counted(model), _counted(loss).items()
    return seen | {f"{n} (of the loss)" if n in seen else n: v for n, v in others}


def _counted(owner: Any) -> dict[str, object]:
    """Return numbers, and how often tensors were changed in place.

    These are in tuples: they are not to be shown.
    """
    seen = [*all_in(owner)]
    tensors = _tensors(seen, owner).items()
    versions = ((name, (t._version,)) for name, t in tensors if not t.is_inference())
    return _by_name(chain(_by_name(_numbers(seen)).items(), versions))


def tensors_in(*owners: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that modules or losses can see beside their state."""
    return _tensors(chain.from_iterable(map(all_in, owners)), *owners)


def _tensors(seen: Iterable[tuple[str, Any]], *owners: Any) -> dict[str, torch.Tensor]:
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    state = (t for module in modules for t in (*module.parameters(), *module.buffers()))
    known = {id(tensor) for tensor in state}
    tensors = (pair for pair in seen if isinstance(pair[1], torch.Tensor))
    return _by_name(pair for pair in tensors if id(pair[1]) not in known)


def numbers_in(owner: Any, *kinds: type) -> dict[str, object]:
    """Return the numbers that a module or a loss can see, or what is of other `kinds`.

    They may be in lists, dicts, objects and the user's classes, in variables that
    functions of the user refer to, and in generators of random numbers.
    """
    return _by_name(_numbers(all_in(owner), *kinds))


def _numbers(
    seen: Iterable[tuple[str, Any]], *kinds: type
) -> Iterator[tuple[str, object]]:
    for name, value in seen:
        if isinstance(value, (Number, *kinds)):
            yield name, value
        elif isinstance(value, WITH_A_STATE):
            yield name, pickle.dumps(value)
        elif isinstance(value, itertools.count):
            yield name, repr(value)
        elif isinstance(value, np.ndarray) and value.size <= MOST_ITEMS:
            yield name, value.tolist()


def _by_name(pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return all the pairs; of one name are an object and its class, closures."""
    named: dict[str, T] = {}
    for name, value in pairs:
        while name in named:
            name += "'"
        named[name] = value
    return named


class AnyDraw(float):
    """One number of those that may be drawn, from `low` to `high`, both of them too.

    Sums and products with numbers (`random.uniform`) are such numbers again.
    """

    LOW, HIGH = 0.0, 1 - 2**-53  # of random.random

    low: float
    high: float

    @classmethod
    def of(cls, value: float, *ends: float) -> AnyDraw:
        """Return a number that may be anything between these ends."""
        made = cls(value)
        made.low, made.high = min(ends), max(ends)
        return made

    def _with(self, operation: Callable[[float, float], float], other: Any) -> Any:
        if isinstance(other, AnyDraw) or not isinstance(other, int | float):
            return NotImplemented
        ends = (operation(self.low, other), operation(self.high, other))
        return self.of(operation(float(self), other), *ends)

    __add__: Any = partialmethod(_with, operator.add)
    __sub__: Any = partialmethod(_with, operator.sub)
    __mul__: Any = partialmethod(_with, operator.mul)
    __truediv__: Any = partialmethod(_with, operator.truediv)
    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Any:
        return self * -1

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def _decides(self, *_: Any) -> Any:
        raise GemscError("a draw decides something")

    __int__ = __trunc__ = __floor__ = __ceil__ = __round__ = _decides
    __pow__ = __rpow__ = __mod__ = __rmod__ = __abs__ = __rtruediv__ = _decides
    __floordiv__ = __rfloordiv__ = __divmod__ = __rdivmod__ = _decides

    def _asks(self, question: Callable[[float, float], bool], other: float) -> bool:
        """Return the answer to a comparison, if it is one for all that may be drawn."""
        ends = product((self.low, self.high), _ends(other))
        answers = {question(*pair) for pair in ends}
        if len(answers) > 1:
            raise GemscError("a draw decides something")
        return answers.pop()

    __lt__: Any = partialmethod(_asks, operator.lt)
    __le__: Any = partialmethod(_asks, operator.le)
    __gt__: Any = partialmethod(_asks, operator.gt)
    __ge__: Any = partialmethod(_asks, operator.ge)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, int | float):
            return False
        low, high = _ends(other)
        if self.high >= low and self.low <= high:
            raise GemscError("a draw decides something")
        return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return self != 0.0

    def __hash__(self) -> int:
        return super().__hash__()


def _ends(number: float) -> tuple[float, float]:
    if isinstance(number, AnyDraw):
        return number.low, number.high
    return number, number


@contextmanager
def drawn(numbers: tuple[float, ...]) -> Iterator[None]:
    """Let `random.random` and what Python computes of it draw these, in turn."""
    # an end: a loop may draw until it likes what it gets
    turns = itertools.islice(itertools.cycle(numbers), 10_000)
    before: Any = random.random
    generator = before.__self__
    ends = AnyDraw.LOW, AnyDraw.HIGH
    random.random = generator.random = lambda: AnyDraw.of(next(turns), *ends)
    try:
        yield
    finally:
        random.random = before
        del generator.random


def other_generators() -> tuple[object, ...]:
    """Return what can be compared of the generators of Python and NumPy."""
    numpy_state = np.random.get_state(legacy=True)
    return random.getstate(), *(
        part.tobytes() if isinstance(part, np.ndarray) else part for part in numpy_state
    )
