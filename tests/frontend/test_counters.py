"""What counts the calls of forward is refused, wherever it counts.

No graph shows it: forward does the same in the first thousand calls.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from record_support import Model, X, checked, mean
from torch import nn

from gemsc.errors import GemscError
from gemsc.frontend import FRONTENDS, record

COUNTED = [0]


def _in_a_list(self: Any) -> int:
    self.counts[0] += 1
    return self.counts[0]


def _in_a_dict(self: Any) -> int:
    self.counts["calls"] += 1
    return self.counts["calls"]


def _in_its_class(self: Any) -> int:
    type(self).counter += 1
    return type(self).counter


def _in_an_array(self: Any) -> int:
    self.array[0] += 1
    return int(self.array[0])


def _in_the_file(self: Any) -> int:
    COUNTED[0] += 1
    return COUNTED[0]


def _in_an_object(self: Any) -> int:
    return self.pace.next()


def _drawn(self: Any) -> int:
    return int(self.generator.random() > 1)


def _in_what_it_makes(self: Any) -> int:
    self.made = getattr(self, "made", 0) + 1
    return self.made


def _in_a_tensor(self: Any) -> int:
    self.kept.add_(1)
    return 0


def _in_a_closure() -> Callable[[Any], int]:
    count = 0

    def counts(self: Any) -> int:
        nonlocal count
        count += 1
        return count

    return counts


def _ticks(self: Any) -> int:
    return self.tick()


def _in_an_attribute_of_a_function(self: Any) -> int:
    function: Any = _in_an_attribute_of_a_function
    function.calls = getattr(function, "calls", 0) + 1
    return int(function.calls)


def _counts(self: Any) -> int:
    return next(self.counts)


def _in_a_default() -> Callable[[Any], int]:
    def counts(self: Any, state: list[int] = [0]) -> int:  # noqa: B006
        state[0] += 1
        return state[0]

    return counts


def _in_a_named_default() -> Callable[[Any], int]:
    def counts(self: Any, *, state: list[int] = [0]) -> int:  # noqa: B006
        state[0] += 1
        return state[0]

    return counts


class Pace:
    def __init__(self) -> None:
        self.step = 0

    def next(self) -> int:
        self.step += 1
        return self.step


class Counter(Model):
    counter = 0


def _plain(self: Any) -> int:
    self.counter += 1
    return self.counter


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(
    ("count", "attributes", "name"),
    [
        (_plain, {"counter": 0}, r"self\.counter at each call: 0, 1, 2"),
        (_in_a_list, {"counts": [0]}, r"self\.counts\[0\] at each call: 0, 1, 2"),
        (_in_a_dict, {"counts": {"calls": 0}}, r"self\.counts\['calls'\]"),
        (_in_an_array, {"array": np.zeros(2)}, r"self\.array at each call"),
        (_in_an_object, {"pace": Pace()}, r"self\.pace\.step"),
        (_in_its_class, {}, r"self\.counter"),
        (_in_the_file, {}, r"COUNTED\[0\]"),
        (_in_a_closure(), {}, "count at each call"),
        (_in_a_default(), {}, r"a default of counts\[0\] at each call: "),
        (_in_a_named_default(), {}, r"a default of counts\[0\] at each call: "),
        (_in_an_attribute_of_a_function, {}, r"_in_an_attribute\S+\.calls at each"),
        (_counts, {"counts": itertools.count()}, r"self\.counts at each call\n"),
        (_ticks, {"tick": partial(_in_a_closure(), None)}, "count at each call"),
        (_in_what_it_makes, {}, r"self\.made at each call: None, 1, 2"),
        (_in_a_tensor, {"kept": torch.zeros(())}, r"self\.kept at each call\n"),
        (_drawn, {"generator": random.Random(0)}, r"self\.generator at each call"),
        (_drawn, {"generator": np.random.default_rng(0)}, r"self\.generator at"),
    ],
)
def test_a_counter_that_the_graph_does_not_show_is_refused(
    frontend: str, count: Any, attributes: dict[str, Any], name: str
) -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.fc(x) if count(self) < 1000 else x

    model = Counter(forward, **attributes)
    with pytest.raises(GemscError, match=f"forward changes {name}"):
        FRONTENDS[frontend](model, (X,), loss=mean)


class Warmed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = [0]

    def forward(self, output: Any) -> Any:
        self.steps[0] += 1
        return output.mean() * min(self.steps[0], 1)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_loss_that_counts_its_calls_is_refused(frontend: str) -> None:
    model = Model(lambda self, x: self.fc(x))
    with pytest.raises(GemscError, match=r"forward changes self\.steps\[0\]"):
        FRONTENDS[frontend](model, (X,), loss=Warmed())
    pace = Pace()
    with pytest.raises(GemscError, match=r"forward changes pace\.step"):
        FRONTENDS[frontend](model, (X,), loss=lambda y: y.mean() * min(pace.next(), 1))


def test_exporting_what_python_draws_is_refused() -> None:
    model = Model(lambda self, x: self.fc(x) if random.random() < 2 else x)
    with pytest.raises(GemscError, match="random numbers of Python"):
        FRONTENDS["export"](model, (X,), loss=mean)
    record(model, (X,), loss=mean)  # it decides nothing, which `record` can tell


class Smooth(nn.Module):
    """Divides by the mean of its losses, of which the last two count."""

    last: torch.Tensor | None = None

    def forward(self, output: Any) -> Any:
        loss = output.square().mean()
        mean = loss if self.last is None else (loss + self.last) / 2
        self.last = loss
        return loss / mean.detach()


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_tensor_kept_for_the_next_call_is_refused(frontend: str) -> None:
    def forward(self: Any, x: Any) -> Any:
        self.seen[0] = y = self.fc(x) + self.seen[0]
        return y

    model = Model(forward, seen=[torch.zeros(4)])
    name = r": self\.seen\[0\]\n" if frontend == "export" else ""
    with pytest.raises(GemscError, match=f"that an earlier call .*{name}"):
        FRONTENDS[frontend](model, (X,), loss=mean)
    model = Model(lambda self, x: self.fc(x))
    with pytest.raises(GemscError, match="that an earlier call"):
        FRONTENDS[frontend](model, (X,), loss=Smooth())


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_tensor_of_a_weight_kept_from_the_first_call_is_refused(
    frontend: str,
) -> None:
    def forward(self: Any, x: Any) -> Any:
        if self.norm is None:
            self.norm = self.fc.weight.detach().norm()
        return self.fc(x) / self.norm

    with pytest.raises(GemscError, match="that an earlier call"):
        FRONTENDS[frontend](Model(forward, norm=None), (X,), loss=mean)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_what_is_kept_and_never_read_is_fine_and_so_are_buffers(frontend: str) -> None:
    def forward(self: Any, x: Any) -> Any:
        self.count.add_(1)
        self.seen = self.fc(x)
        return F.dropout(self.seen, 0.5) + self.buffers_of["count"]

    model = Model(forward)
    model.register_buffer("count", torch.zeros(()))
    model.buffers_of = {"count": model.count}
    FRONTENDS[frontend](model, (X,), loss=mean)


def test_what_only_the_first_call_sets_is_no_counter() -> None:
    def forward(self: Any, x: Any) -> Any:
        if self.told["first"]:
            self.told["first"] = False
        self.sizes.setdefault(x.shape, len(self.sizes))
        return self.fc(x) * self.scales["x"]

    checked(Model(forward, told={"first": True}, sizes={}, scales={"x": 2}))


@pytest.mark.parametrize("none", [float("nan"), np.full(2, np.nan), [float("nan")]])
def test_a_nan_that_stays_is_no_counter(none: Any) -> None:
    """Nor one in the class of a config that the model keeps, as of yaml."""

    def forward(self: Any, x: Any) -> Any:
        return self.fc(x) if self.none is not None else x

    checked(Model(forward, none=none))


class Unready:
    """As pydantic's serializers, before it has made them: raises at any attribute."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("not made yet")


class Settings:
    width, serializer = 2, Unready()


def test_attributes_that_raise_are_not_asked_for() -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.fc(x) * self.settings.width

    checked(Model(forward, settings=Settings()))


def _with_a_count(steps: int) -> Callable[[Any], int]:
    """Return a function that counts by `steps`, in a closure of one name."""
    count = 0

    def counts(self: Any) -> int:
        nonlocal count
        count += steps
        return count

    return counts


def test_a_closure_hides_none_of_the_same_name() -> None:
    first, second = _with_a_count(0), _with_a_count(1)

    def forward(self: Any, x: Any) -> Any:
        return self.fc(x) if first(self) + second(self) < 1000 else x

    with pytest.raises(GemscError, match="forward changes count' at each call: 0, 1"):
        record(Model(forward), (X,), loss=mean)


class Alike(nn.Module):
    """A loss with a number of the name that the model's counter has."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 3

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return output.mean() * self.n


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.n = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return self.layer(x)


def test_a_number_of_the_loss_hides_none_of_the_model() -> None:
    with pytest.raises(GemscError, match=r"forward changes self\.n at each call: 0, 1"):
        record(Counts(), torch.zeros(2, 4), loss=Alike())


def test_a_tensor_hides_no_number_of_its_name() -> None:
    counts, count = _with_a_count(1), torch.ones(())

    def forward(self: Any, x: Any) -> Any:
        return self.fc(x) * count if counts(self) < 1000 else x

    with pytest.raises(GemscError, match=r"forward changes count'? at each call: 0, 1"):
        record(Model(forward), (X,), loss=mean)


class Scaled(nn.Module):
    """A loss with a tensor of the name that the model's kept one has."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.ones(())

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return output.mean() * self.kept


def test_a_tensor_of_the_loss_hides_none_that_the_model_keeps() -> None:
    def forward(self: Any, x: Any) -> Any:
        y, last = self.fc(x), self.kept
        self.kept = y.detach()
        return y + last.mean()

    model = Model(forward, kept=torch.zeros(3, 4))
    with pytest.raises(GemscError, match=r"an earlier call made: self\.kept"):
        FRONTENDS["export"](model, (X,), loss=Scaled())


class Lazy(dict[str, object]):
    """As in transformers: makes an item when it is asked for, and some it cannot."""

    def items(self) -> Any:
        raise ValueError("a class of it cannot be imported")


@pytest.mark.parametrize("is_of_the_loss", [False, True])
def test_what_a_dict_makes_when_it_is_asked_is_not_asked_for(
    is_of_the_loss: bool,
) -> None:
    lazy = Lazy(count=1)

    def forward(self: Any, x: Any) -> Any:
        if not is_of_the_loss:
            lazy["count"] = lazy["count"] + 1  # type: ignore[operator]
        return self.fc(x)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.mean() * len(lazy)

    if is_of_the_loss:
        checked(Model(forward), loss=loss)
        return
    with pytest.raises(GemscError, match=r"forward changes lazy\['count'\] at each"):
        record(Model(forward), (X,), loss=loss)
