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

from gemsc.base.plain_forward import forgetting
from gemsc.compiler import compile
from gemsc.errors import GemscError
from gemsc.verify.one_process import reference_steps

SIZE = 4
TABLES: dict[int, Tensor] = {}
NESTED: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
TABLE: Tensor | None = None
ITEMS: list[Tensor] = []
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


def in_a_dict(_: nn.Module) -> Tensor:
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
    if not ITEMS:
        ITEMS.append(made(SIZE))
    return ITEMS[0]


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


def in_the_function(_: nn.Module) -> Tensor:
    if not hasattr(in_the_function, "table"):
        in_the_function.table = made(SIZE)  # type: ignore[attr-defined]
    table: Tensor = in_the_function.table  # type: ignore[attr-defined]
    return table


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


@pytest.mark.parametrize(
    "table",
    [
        in_a_dict,
        in_two_dicts,
        in_a_variable,
        in_the_class,
        lambda _: cached(SIZE),
        lambda _: bounded(SIZE)[0],
        lambda net: net.own,
        in_a_list,
        lambda net: CACHE.get(_dtype(net)),
        in_new_objects,
        in_the_function,
        _in_a_variable_around(),
        lambda net: in_a_variable(net).to(_dtype(net)) + made(SIZE).to(_dtype(net)),
        lambda net: net.own.to(_dtype(net)) * net.own.to(_dtype(net)),
    ],
)
def test_a_table_kept_outside_of_the_model_is_made_anew(table: Any) -> None:
    net = Net(table)
    compile(net, (X,), loss=mean, example_target=X, ranks=2)
    assert not sum(map(len, (TABLES, ITEMS, CACHES)))
    assert TABLE is CACHE.table is None
    assert Net.kept is None
    record = reference_steps(net, mean, [((X,), X)], 1, torch.float64)
    float32 = reference_steps(net, mean, [((X,), X)], 1, torch.float32)
    assert record.losses[0] != float32.losses[0]
    with forgetting(net):
        assert torch.equal(net(X), net.b(net.a(X) + table(net)))


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
    record = reference_steps(net, mean, [((X,), X)], 1, torch.float64)
    float32 = reference_steps(net, mean, [((X,), X)], 1, torch.float32)
    assert record.losses[0] != float32.losses[0]


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
