"""Modules whose forward calls torch.autograd.grad: whole on one rank, and exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from opaque_support import EXACT, Around, D, compiled, made, worst
from torch import Tensor, nn

from gemsc.compiler import compile
from gemsc.errors import GemscError
from gemsc.ir.opaque import opaques


class Descent(nn.Module):
    """Takes a step down an energy; its backward is one of second order."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, 1)
        self.rate = nn.Parameter(torch.tensor(0.3))

    def gradient(self, x: Tensor) -> Tensor:
        energy = self.down(torch.tanh(self.up(x))).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            step = self.gradient(y)
        return x - self.rate * step


class Sometimes(Descent):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x * self.rate


class Forgets(Descent):
    """Works in training only."""

    def forward(self, x: Tensor) -> Tensor:
        return x - self.rate * self.gradient(x)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Descent, {"schedule": "mast"}),
        (Descent, {"ranks": 4, "data": 2, "shard": "weights", "recompute": ("all",)}),
        pytest.param(Sometimes, {"ranks": 3}, marks=pytest.mark.slow),
        pytest.param(Descent, {"offload": ("all",)}, marks=pytest.mark.slow),
    ],
)
def test_gradients_within_forward_are_trained_exactly(
    kind: type[Descent], options: dict[str, Any], tmp_path: Path
) -> None:
    assert worst(tmp_path / "program", Around(made(kind)), **options) <= EXACT


class Layers(nn.Module):
    """Lists and a dictionary of layers and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(D)) for _ in range(2))
        self.last = nn.ModuleDict({"0": nn.Linear(D, D)})

    def forward(self, x: Tensor) -> Tensor:
        for layer, gain in zip(self.layers, self.gains, strict=True):
            x = torch.tanh(layer(x)) * gain
        y: Tensor = self.last["0"](x)
        return y


class Physics(Descent):
    """A network and its slope."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Layers()

    def gradient(self, x: Tensor) -> Tensor:
        return torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]


class Informed(nn.Module):
    """Calls the network also at points where no slope is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.physics, self.head = Physics(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.physics.net.gains[1] + self.physics.net.layers[0].weight.sum()
        y: Tensor = self.head(self.physics(x) + self.physics.net(x + 1) * scale)
        return y


def test_what_is_whole_has_parts_that_are_used_alone(tmp_path: Path) -> None:
    """On its own rank: its lists are lists there, where other stages have dicts."""
    assert worst(tmp_path / "program", made(Informed), ranks=1) <= EXACT


def test_it_runs_once_and_its_weight_gradients_do_not_wait() -> None:
    program = compiled(Around(made(Descent)), ranks=3, recompute=("all",))
    (known,) = opaques(program.compilation.program.module).values()
    assert known.differentiates
    assert "needs gradients" in known.why
    assert not any(
        "inner" in segment.name for segment in program.compilation.program.segments
    )
    with pytest.raises(GemscError, match=r"--recompute inner.* calls torch.autograd"):
        compiled(Around(made(Descent)), recompute=("inner",))
    with pytest.raises(GemscError, match=r"zb-h1 cannot be used with inner, whose for"):
        compiled(Around(made(Descent)), schedule="zb-h1")


def test_what_evaluation_could_not_run_is_refused() -> None:
    with pytest.raises(GemscError, match="forward needs gradients") as caught:
        compiled(Around(made(Forgets)))
    ((_, note),) = caught.value.notes_at
    assert "'inner' cannot stay whole" in note
    assert "`with torch.enable_grad():`" in note
    with pytest.raises(GemscError, match="forward needs gradients") as caught:
        compiled(made(Descent), ranks=1)  # a whole model is no submodule
    assert "submodule" in str(caught.value.help)


class Transformed(Descent):
    def gradient(self, x: Tensor) -> Tensor:
        def energy(row: Tensor) -> Tensor:
            return self.down(torch.tanh(self.up(row))).sum()

        return torch.func.vmap(torch.func.grad(energy))(x)


class Mapped(Descent):
    """Maps over samples; torch.vmap alone needs nothing that a rank has not."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row * self.down(self.up(row)).sum())(x)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "mast"},
        {"ranks": 4, "data": 2, "shard": "weights", "recompute": ("all",)},
        pytest.param({"offload": ("all",)}, marks=pytest.mark.slow),
        pytest.param({"schedule": "zb-h1"}, marks=pytest.mark.slow),
    ],
)
def test_what_maps_over_samples_stays_whole(
    options: dict[str, Any], tmp_path: Path
) -> None:
    assert worst(tmp_path / "program", Around(made(Mapped)), **options) <= EXACT


def test_transforms_of_functions_are_refused_with_another_way() -> None:
    with pytest.raises(
        GemscError, match=r"forward calls torch\.vmap or another"
    ) as caught:
        compiled(Around(made(Transformed)))
    assert "torch.autograd.grad in a submodule" in str(caught.value.help)


def test_a_loss_cannot_differentiate_what_the_model_has_computed() -> None:
    def loss(output: Any) -> Tensor:
        y, x = output
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return slope.square().mean()

    class Both(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            x = x.requires_grad_()
            return torch.tanh(super().forward(x)), x

    model = nn.Sequential(nn.Linear(D, D), Both(D, D))
    with pytest.raises(GemscError, match="the loss calls") as error:
        compile(model, (torch.randn(2, D),), loss=loss, ranks=2)
    assert "submodule of the model" in str(error.value)
    assert error.value.at is not None
    assert "(slope,) =" in error.value.at.text
