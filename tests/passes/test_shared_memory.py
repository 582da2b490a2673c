"""Two tensors of a model in one memory are refused, if that memory changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemsc
from gemsc.errors import GemscError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class Shifted(Net):
    """What it adds is a buffer, or a plain tensor, in the memory of another one."""

    table: Tensor
    counts: bool = False

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.sums.add_(x.detach().mean(0))
        return super().forward(x) + self.table


def compiled(model: nn.Module, **options: Any) -> Any:
    options = {"ranks": 2, **options}
    return gemsc.compile(model, (X,), loss=lambda y: y.square().mean(), **options)


def tied_by_data(model: Any) -> None:
    model.second.weight.data = model.first.weight.data


def tied_to_a_part(model: Any) -> None:
    whole = nn.Parameter(torch.randn(5, 4))
    model.first.register_parameter("whole", whole)
    model.second.weight = nn.Parameter(whole.data[1:])


def kept_as_a_buffer(model: Any) -> None:
    model.register_buffer("table", model.second.bias.detach())


def kept_as_it_is(model: Any) -> None:
    model.table = model.first.weight.data[0]


def row_of_a_statistic(model: Any) -> None:
    model.counts = True
    model.register_buffer("sums", torch.zeros(2, 4))
    model.register_buffer("table", model.sums[1])


def kept_of_a_norm(model: Any) -> None:
    model.second = nn.BatchNorm1d(4)
    model.register_buffer("table", model.second.running_mean[:])


@pytest.mark.parametrize(
    ("share", "kind", "names"),
    [
        (tied_by_data, Net, ("first.weight", "second.weight")),
        (tied_to_a_part, Net, ("first.whole", "second.weight")),
        (kept_as_a_buffer, Shifted, ("second.bias", "table")),
        (kept_as_it_is, Shifted, ("first.weight", "table")),
        (row_of_a_statistic, Shifted, ("sums", "table")),
        (kept_of_a_norm, Shifted, ("second.running_mean", "table")),
    ],
)
def test_two_tensors_in_a_memory_that_changes_are_refused(
    share: Callable[[Any], None], kind: type[Net], names: tuple[str, str]
) -> None:
    model = kind()
    share(model)
    with pytest.raises(GemscError, match="two tensors that share memory") as caught:
        compiled(model)
    assert all(name in caught.value.message for name in names)


def test_so_are_those_that_torch_export_finds() -> None:
    model = Shifted()
    kept_as_it_is(model)
    with pytest.raises(GemscError, match=r"'_constants.table' and 'first.weight' are"):
        compiled(model, frontend="export")


def rows_beside_each_other(model: Any) -> None:
    both = torch.randn(2, 4, 4)
    model.first.weight.data, model.second.weight.data = both
    model.register_buffer("table", torch.zeros(4))


def memory_that_stays(model: Any) -> None:
    model.register_buffer("tables", torch.randn(2, 4))
    model.register_buffer("table", model.tables[1])


@pytest.mark.parametrize("share", [rows_beside_each_other, memory_that_stays])
def test_others_are_not(share: Callable[[Any], None]) -> None:
    model = Shifted()
    share(model)
    assert compiled(model).plan.unchecked == ""


def test_a_buffer_under_two_names_is_one_in_another_dtype() -> None:
    model = Shifted()
    model.counts = True
    model.register_buffer("sums", torch.zeros(4))
    model.register_buffer("table", model.sums)
    # the model itself in float64, too, with which the ranks are compared
    assert compiled(model, ranks=1).plan.unchecked == ""
