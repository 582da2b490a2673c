"""What forward keeps outside of the model: in a dict, a class, a variable, a cache."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from gemsc.base.phase import Phase
from gemsc.base.visible import forgetting
from gemsc.compiler import compile
from gemsc.errors import GemscError
from gemsc.verify.one_process import reference_steps

SIZE = 4
TABLES: dict[int, Tensor] = {}
NESTED: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
TABLE: Tensor | None = None
LISTED: list[Tensor] = []
X = torch.randn(2, SIZE)


def made(size: int) -> Tensor:
    return torch.linspace(0, 1, size).sin()


@cache
def cached(size: int) -> Tensor:
    return made(size)


@lru_cache(maxsize=2)
def bounded(size: int) -> tuple[Tensor, int]:
    return made(size), size


@cache
def judge() -> nn.Linear:
    return nn.Linear(SIZE, SIZE)


def in_a_dict(_: object) -> Tensor:
    if SIZE not in TABLES:
        TABLES[SIZE] = made(SIZE)
    return TABLES[SIZE]


def in_two_dicts(_: nn.Module) -> Tensor:
    return NESTED["sin"].setdefault(SIZE, made(SIZE))


def in_a_variable(_: nn.Module) -> Tensor:
    global TABLE
    if TABLE is None:
        TABLE = made(SIZE)
    return TABLE


def in_a_list(_: nn.Module) -> Tensor:
    if not LISTED:
        LISTED.append(made(SIZE))
    return LISTED[0]


def in_the_function(_: nn.Module) -> Tensor:
    kept: Any = in_the_function
    if not hasattr(kept, "table"):
        kept.table = made(SIZE)
    table: Tensor = kept.table
    return table


class Tables:
    def __init__(self) -> None:
        self.sin: Tensor | None = None

    def of(self, size: int) -> Tensor:
        if self.sin is None:
            self.sin = made(size)
        return self.sin


OBJECT = Tables()


def in_an_object(_: nn.Module) -> Tensor:
    return OBJECT.of(SIZE)


@cache
def cached_object() -> Tables:
    return Tables()


def in_a_cached_object(_: nn.Module) -> Tensor:
    return cached_object().of(SIZE)


def _in_a_closure() -> Callable[[nn.Module], Tensor]:
    kept: Tensor | None = None

    def table(_: nn.Module) -> Tensor:
        nonlocal kept
        if kept is None:
            kept = made(SIZE)
        return kept

    return table


class Cache:
    """One whose table has the dtype that forward computes in."""

    def __init__(self) -> None:
        self.table: Tensor | None = None

    def get(self, dtype: torch.dtype) -> Tensor:
        if self.table is None or self.table.dtype != dtype:
            self.table = made(SIZE).to(dtype)
        return self.table


CACHE = Cache()
CACHES: dict[int, Cache] = {}


def in_new_objects(net: nn.Module) -> Tensor:
    return CACHES.setdefault(SIZE, Cache()).get(_dtype(net))


def _in_a_variable_around() -> Callable[[nn.Module], Tensor]:
    table: Tensor | None = None

    def get(net: nn.Module) -> Tensor:
        nonlocal table
        if table is None or table.dtype != _dtype(net):
            table = made(SIZE).to(_dtype(net))
        return table

    return get


def _dtype(net: nn.Module) -> torch.dtype:
    return next(net.parameters()).dtype


class Net(nn.Module):
    kept: Tensor | None = None
    tables: ClassVar[dict[int, Tensor]] = {}

    def __init__(self, table: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.table = table

    @cached_property
    def own(self) -> Tensor:
        return made(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x) + self.table(self).to(x))
        return y


def in_the_class(net: Any) -> Tensor:
    if type(net).kept is None:
        type(net).kept = made(SIZE)
    if SIZE not in net.tables:
        net.tables[SIZE] = made(SIZE)
    table: Tensor = type(net).kept + net.tables[SIZE]
    return table


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.slow(6)
@pytest.mark.parametrize(
    "table",
    [
        in_a_dict,
        in_two_dicts,
        in_a_variable,
        in_the_class,
        in_a_list,
        in_the_function,
        in_an_object,
        in_a_cached_object,
        _in_a_closure(),
        lambda net: CACHE.get(_dtype(net)),
        in_new_objects,
        _in_a_variable_around(),
        lambda net: in_a_variable(net).to(_dtype(net)) + made(SIZE).to(_dtype(net)),
        lambda net: net.own.to(_dtype(net)) * net.own.to(_dtype(net)),
        lambda _: cached(SIZE),
        lambda _: bounded(SIZE)[0],
        lambda net: net.own,
    ],
)
def test_a_table_kept_outside_of_the_model_is_made_anew(table: Any) -> None:
    net = Net(table)
    plan = compile(net, (X,), loss=mean, example_target=X, ranks=2).plan
    assert plan.only_dtype == ""  # made anew in that one, too
    assert not sum(map(len, (TABLES, LISTED, CACHES)))
    assert TABLE is CACHE.table is None
    assert Net.kept is None
    assert OBJECT.sin is None
    losses = {}
    for dtype in (torch.float64, torch.float32):
        with forgetting(net):
            (losses[dtype],) = reference_steps(net, mean, [((X,), X)], 1, dtype).losses
    assert losses[torch.float64] != losses[torch.float32]
    with forgetting(net):
        assert torch.equal(net(X), net.b(net.a(X) + table(net)))


class Scaled(torch.autograd.Function):
    """Multiplies by a table, which its backward takes from where forward keeps it."""

    tables: ClassVar[dict[torch.dtype, Tensor]] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if SIZE not in TABLES:
            TABLES[SIZE] = made(SIZE)
        if x.dtype not in Scaled.tables:
            Scaled.tables[x.dtype] = TABLES[SIZE].to(x.dtype)
        return x * Scaled.tables[x.dtype]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * Scaled.tables[gradient.dtype]


scaled_by: Any = Scaled.apply


@pytest.mark.slow(1)
@pytest.mark.parametrize("data", [1, 2])
def test_a_custom_function_keeps_a_table_for_its_backward(data: int) -> None:
    def scaled(net: Any) -> Tensor:
        table: Tensor = scaled_by(net.a.bias)
        return table

    net, x = Net(scaled), X.repeat(2, 1)
    for _ in range(3):  # one process runs beside the ranks, in another thread
        compile(net, (x,), loss=mean, example_target=x, ranks=2, data=data)
        assert not TABLES
        assert not Scaled.tables


def test_a_table_that_a_package_keeps_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "kept_tables"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "tables.py").write_text(
        "from functools import cache\nimport torch\nTABLES = {}\nTABLE = None\n"
        "@cache\n"
        "def cached(): return torch.linspace(0, 1, 4).sin()\n"
        "class Table:\n"
        "    kept = None\n"
        "def table():\n"
        "    global TABLE\n"
        "    if TABLE is None: TABLE = cached().cos()\n"
        "    if Table.kept is None: Table.kept = cached().cos()\n"
        "    return TABLES.setdefault(4, cached()) + TABLE + Table.kept\n"
    )
    (package / "layers.py").write_text(
        "from torch import nn\nfrom kept_tables.tables import table\n"
        "class Layer(nn.Linear):\n"
        "    def forward(self, x): return super().forward(x) + table().to(x)\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    layer = importlib.import_module("kept_tables.layers").Layer
    net = nn.Sequential(layer(SIZE, SIZE), layer(SIZE, SIZE))
    compile(net, (X,), loss=mean, example_target=X, ranks=2)
    assert not sys.modules["kept_tables.tables"].TABLES


def test_only_tensors_are_forgotten() -> None:
    seen: dict[str, Any] = {"calls": 0, "last": X}
    first = judge()

    def forward(x: Tensor) -> Tensor:
        seen["calls"] += 1
        seen["last"], seen["new"] = x + 1, [x]
        cached(SIZE)
        return x @ judge().weight + bounded(SIZE)[0]

    with forgetting(forward):
        forward(X)
    assert seen == {"calls": 1, "last": X}
    assert judge() is first
    assert cached.cache_info().currsize == bounded.cache_info().currsize == 0


class Kept(nn.Module):
    """Keeps, for all later calls, what its first call has made of something."""

    def __init__(self, made: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        if SIZE not in TABLES:
            TABLES[SIZE] = self.made(self, x)
        y: Tensor = self.b(self.a(x) + TABLES[SIZE])
        return y


@pytest.mark.parametrize(
    "first",
    [
        lambda net, x: x.mean(0),
        lambda net, x: net.a.bias.detach().clone(),
        lambda net, x: torch.randn(SIZE),
    ],
)
def test_what_the_first_call_made_of_data_weights_or_draws_is_no_table(
    first: Any,
) -> None:
    with pytest.raises(GemscError, match="an earlier call of forward made"):
        compile(Kept(first), (X,), loss=mean, example_target=X, ranks=2, check=False)
    assert not TABLES


class Whole(nn.Module):
    """Depends on data, so that it stays whole; it may keep what a call has made."""

    def __init__(self, made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.made(x)
        return x * 2 if x.sum() > 0 else x


def in_whole(made: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def table(x: Tensor) -> Tensor:
        if SIZE not in TABLES:
            TABLES[SIZE] = made(x)
        return TABLES[SIZE]

    return table


@cache
def noise() -> Tensor:
    return torch.randn(SIZE)


def test_runs_that_look_at_a_submodule_leave_no_tables() -> None:
    whole = Whole(lambda x: x)
    net = nn.Sequential(whole, Kept(lambda _, x: x.detach().mean(0)))
    with pytest.raises(GemscError, match="an earlier call of forward made"):
        compile(net, (X,), loss=mean, example_target=X, ranks=2, check=False)
    assert not TABLES


@pytest.mark.parametrize(
    "first",
    [
        in_whole(lambda x: x.detach().mean(0)),
        in_whole(lambda _: torch.randn(SIZE)),
        lambda _: noise(),
    ],
)
def test_a_submodule_that_stays_whole_keeps_no_data_or_draws(first: Any) -> None:
    net = nn.Sequential(nn.Linear(SIZE, SIZE), Whole(first), nn.Linear(SIZE, SIZE))
    with pytest.raises(GemscError, match="cannot stay whole: forward changes"):
        compile(net, (X,), loss=mean, example_target=X, ranks=2, check=False)


def test_a_table_of_a_submodule_that_stays_whole() -> None:
    first, last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
    net = nn.Sequential(first, Whole(in_a_dict), last)
    compile(net, (X,), loss=mean, example_target=X, ranks=2)
    assert not TABLES


@pytest.mark.slow
def test_a_table_of_the_loss_of_a_phase() -> None:
    def loss(model: Any, x: Tensor, target: Tensor) -> Tensor:
        return mean(model(x) * cached(SIZE) + in_a_dict(x), target)

    phases = (Phase("one", loss, "a"), Phase("two", loss, "b"))
    net = Net(lambda _: torch.ones(SIZE))
    compile(net, (X,), example_target=X, ranks=2, phases=phases)
    assert not TABLES
    assert not cached.cache_info().currsize
