"""torch.export as the second way to trace gives the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_support import against_one_process, on_ranks, written
from torch import nn

from gemsc.errors import GemscError
from gemsc.frontend import FRONTENDS, export
from gemsc.frontend.check import check_against_eager
from gemsc.ir import meta
from gemsc.passes.canonicalize import Canonicalize

torch.set_num_threads(1)
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(True))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4, 4)
        self.table = torch.arange(4.0)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: Any = None) -> Any:
        h = self.drop(self.body(x)) * self.table
        self.count.add_(1)
        with torch.no_grad():
            m = h.mean()
        with torch.autocast("cpu", torch.bfloat16):
            y = self.head(h)
        y = y.float() + m + 0.5
        y[:, 0] = 0
        return {"y": y, "h": (h,)}


def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output["y"], target)


def test_an_exported_graph_is_the_model() -> None:
    model = Net()
    program = export(model, {"x": X}, loss=loss, target=X)
    assert [item.name for item in program.inputs] == ["x", "target"]
    check_against_eager(program, model, {"x": X}, loss, X)
    check_against_eager(Canonicalize().apply(program), model, {"x": X}, loss, X)
    assert int(model.count) == 0


def test_nodes_have_the_users_lines_names_and_regions() -> None:
    program = export(Net(), (X,), training=False)
    nodes = {node.name: node for node in program.graph.nodes}
    names = {str(n.target) for n in program.graph.nodes if n.op == "get_attr"}
    assert {"body.0.weight", "head.bias", "count", "_constants.table"} <= names
    assert program.sources == (__file__,)
    assert meta.module_path(nodes["linear_1"]) == "head"
    assert meta.region(nodes["linear_1"]).autocast == ("cpu", torch.bfloat16)
    assert not meta.region(nodes["mean"]).grad


def test_tied_parameters_and_a_loss_that_is_a_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    target = torch.tensor([0, 1, 3])
    program = export(model, (X,), loss=criterion, target=target)
    assert program.aliases == {"2.weight": "0.weight"}
    check_against_eager(program, model, (X,), criterion, target)


class TwoPaths(nn.Module):
    """One module at two paths, called by each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.again = self.body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.body(x).tanh())


def test_a_module_at_two_paths_is_one() -> None:
    model = TwoPaths()
    program = export(model, (X,), loss=nn.MSELoss(), target=X)
    names = {str(n.target) for n in program.graph.nodes if n.op == "get_attr"}
    assert {name.partition(".")[0] for name in names} == {"body"}
    check_against_eager(program, model, (X,), nn.MSELoss(), X)


class TakesTwo(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.exp() - b


def test_two_inputs_stay_two_where_the_examples_are_one_tensor() -> None:
    program = export(TakesTwo(), (X, X), loss=nn.MSELoss(), target=X)
    inputs = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    users = {k: {str(u.target) for u in n.users} for k, n in inputs.items()}
    assert users["a"] == {"aten.exp.default"}
    assert users["b"] == {"aten.sub.Tensor"}


class TakesDtypes(nn.Module):
    """Zeros of a tensor's dtype, as the first state of nn.LSTM; and float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, state = self.first(x), torch.zeros(4, dtype=x.dtype)
        for _ in range(2):
            state = torch.tanh(self.cell(h + state))
        return self.last(state) + state.float().exp()


def test_dtypes_that_follow_the_model_follow_it(tmp_path: Path) -> None:
    how: Any = {"ranks": 2, "frontend": "export"}
    diff = against_one_process(tmp_path, TakesDtypes(), **how)
    assert diff.worst < 1e-12


class HasTimes(TakesDtypes):
    """Numbers that are neither a parameter nor a buffer stay in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.times = torch.linspace(0, 1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(h + self.times[1] / 7 * self.cell(h).tanh())


def test_numbers_that_stay_in_float32_stay(tmp_path: Path) -> None:
    how: Any = {"ranks": 2, "frontend": "export"}
    assert against_one_process(tmp_path, HasTimes(), **how).worst < 1e-12


class Asks(TakesDtypes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = super().forward(x)
        return h if x.dtype is torch.float64 else h + 1


def test_a_model_that_asks_for_its_dtype_runs_in_its_own_only() -> None:
    assert "differently in float64" in export(Asks(), (X,)).only_dtype
    assert not export(TakesDtypes(), (X,)).only_dtype


class Makes(TakesDtypes):
    number = 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.new_tensor([self.number]) + torch.tensor(3.0)


class MakesHalf(Makes):
    number = 0.5


def test_numbers_that_export_rounds_are_those_of_one_dtype(tmp_path: Path) -> None:
    assert "of numbers in torch.float32" in export(Makes(), (X,)).only_dtype
    assert not export(MakesHalf(), (X,)).only_dtype
    how: Any = {"ranks": 2, "frontend": "export"}
    assert against_one_process(tmp_path, MakesHalf(), **how).worst < 1e-12


@pytest.mark.slow
def test_evaluation_returns_what_an_exported_model_returns(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    criterion = nn.MSELoss()
    how: Any = {"ranks": 2, "micro_batches": 1, "frontend": "export"}
    written(tmp_path, model, (X,), criterion, X, **how)
    evaluated = on_ranks(tmp_path, 2, lambda trainer: trainer.evaluate((X,), X))
    with torch.no_grad():
        expected = model(X)
    torch.testing.assert_close(evaluated[-1].output, expected)
    assert evaluated[-1].loss == pytest.approx(float(criterion(expected, X)))


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_a_branch_on_data_is_refused() -> None:
    with pytest.raises(GemscError, match=r"torch\.export cannot trace") as caught:
        export(Branch(), (X,))
    assert caught.value.at is not None
    assert caught.value.at.file == __file__


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda weight: x @ weight)(self.weight).sum(0)


def test_a_transform_of_functions_is_refused() -> None:
    with pytest.raises(GemscError, match=r"torch\.vmap") as caught:
        export(Mapped(), (torch.zeros(3, 4),))
    assert caught.value.at is not None
    assert caught.value.at.file == __file__
    assert "torch.einsum" in caught.value.help
    assert "(not with --frontend export)" in caught.value.help


class LeftInEval(nn.Sequential):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self[0].eval()
        return x


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.Dropout()], ids=str)
def test_a_layer_that_the_next_call_finds_in_another_mode_is_refused(
    layer: nn.Module,
) -> None:
    for frontend in FRONTENDS.values():
        with pytest.raises(GemscError, match="forward calls '0' and then puts it in"):
            frontend(LeftInEval(layer), (X,))
    export(LeftInEval(nn.Linear(4, 4)), (X,))
    export(LeftInEval(nn.Dropout(0)), (X,))


class Twice(nn.Module):
    """Has a buffer under two names, of which it reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("one", torch.zeros(4))
        self.register_buffer("other", self.one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.one.add_(x.detach().mean(0))
        return self.fc(x) + self.other


def test_a_buffer_may_have_two_names() -> None:
    model = Twice()
    program = export(model, (X,), loss=F.mse_loss, target=X)
    check_against_eager(program, model, (X,), F.mse_loss, X)


class Picks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[y > 0] *= 2
        return y


def test_a_size_that_depends_on_data_is_refused() -> None:
    with pytest.raises(GemscError, match="size of this tensor depends") as caught:
        export(Picks(), (X,))
    assert caught.value.at is not None
    assert caught.value.at.file == __file__
    assert "--frontend record" in caught.value.help


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Rounds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Backward.apply(self.layer(x))


def test_a_backward_of_ones_own_is_lost_which_the_check_says() -> None:
    model = Rounds()
    program = export(model, (X,), loss=nn.MSELoss(), target=X)
    with pytest.raises(GemscError, match="gradient of layer") as caught:
        check_against_eager(program, model, (X,), nn.MSELoss(), X)
    assert "--frontend record" in caught.value.help


def test_both_frontends_are_registered() -> None:
    assert list(FRONTENDS) == ["record", "export"]
