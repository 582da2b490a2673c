"""Shards of a model that evaluates otherwise than it trains: both are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_support import on_ranks, written
from torch import Tensor, nn

import gemsc.lowering.evaluation
from gemsc.compiler import CompiledProgram, compile
from gemsc.errors import GemscError, InternalError

WIDTH, INNER, STATE = 8, 12, 2


class Mamba(nn.Module):
    """A selective state space: one formula in training, layers one by one later.

    As published, training takes the scan's weights into one fused function.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.conv = nn.Conv1d(INNER, INNER, 3, groups=INNER, padding=2)
        self.select = nn.Linear(INNER, 1 + 2 * STATE, bias=False)
        self.delta = nn.Linear(1, INNER)
        self.decay = nn.Parameter(torch.rand(INNER, STATE))
        self.leave = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            inner, gate = self.enter(x).transpose(1, 2).chunk(2, dim=1)
            inner = F.silu(self.conv(inner)[..., : x.shape[1]])
            inner, gate = inner.transpose(1, 2), gate.transpose(1, 2)
        else:
            entered = self.enter(x)
            inner, gate = entered.split([INNER, INNER], dim=-1)
            padded = F.pad(inner, (0, 0, 2, 0)).unfold(1, 3, 1)
            weight = self.conv.weight.reshape(-1).view(INNER, 3)
            inner = F.silu((padded * weight).sum(-1) + self.conv.bias)
        step, enter, leave = self.select(inner).split([1, STATE, STATE], dim=-1)
        step = F.softplus(self.delta(step))
        state = torch.zeros(len(x), INNER, STATE, dtype=x.dtype)
        outputs = []
        for i in range(x.shape[1]):
            kept = torch.exp(-step[:, i, :, None] * self.decay)
            given = step[:, i] * inner[:, i]
            state = kept * state + given[..., None] * enter[:, i, None]
            outputs.append((state * leave[:, i, None]).sum(-1))
        return x + self.leave(torch.stack(outputs, dim=1) * F.silu(gate))


class Evaluated(nn.Module):
    """Two pairs of layers; `how` says what evaluation does to the first one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.wider, self.back = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        if not self.training:
            hidden = self.evaluated(hidden)
        x = x + self.down(hidden)
        return x + self.back(torch.relu(self.wider(x)))

    def evaluated(self, hidden: Tensor) -> Tensor:
        if self.how == "unequal parts":
            return torch.cat(hidden.split([5, 11], dim=-1), dim=-1)
        if self.how == "sums along":
            return hidden.cumsum(-1)
        if self.how == "other factors":
            return hidden.unflatten(-1, (4, 4)).transpose(-1, -2).flatten(-2)
        if self.how == "met":
            return hidden + F.linear(self.up.weight, self.wider.weight).mean(1)
        assert self.how == "twice"
        pairs = hidden.unsqueeze(-1) * hidden.unsqueeze(-2)
        return pairs.sum(-1)


def compiled(model: nn.Module, whole: tuple[str, ...] = ()) -> CompiledProgram:
    """Compile a model on two shards: its check trains and evaluates a batch."""
    inputs = (torch.randn(2, 5, WIDTH),)
    program = compile(
        model,
        inputs,
        loss=lambda output: output.square().mean(),
        ranks=2,
        shards=("2",),
        micro_batches=1,
        whole=whole,
    )
    assert not program.plan.unchecked
    return program


def layers_cut(program: CompiledProgram) -> set[str]:
    return {name.rpartition(".")[0] for name in program.compilation.parts(0)}


@pytest.mark.slow
def test_a_mamba_keeps_whole_what_evaluation_cannot_cut() -> None:
    program = compiled(nn.Sequential(Mamba(), nn.Linear(WIDTH, 32), nn.Linear(32, 8)))
    assert {"1", "2"} <= layers_cut(program)


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "how", ["unequal parts", "sums along", "other factors", "twice"]
)
def test_what_evaluation_needs_whole_is_whole_and_the_rest_is_cut(how: str) -> None:
    program = compiled(Evaluated(how))
    assert layers_cut(program) == {"wider", "back"}
    (stage,) = program.plan.stages
    reasons = {name: group.reason for group in stage.whole for name in group.names}
    assert reasons["up.weight"] == "evaluation uses it as a whole"


def test_of_two_cuts_that_meet_in_evaluation_one_is_left() -> None:
    assert layers_cut(compiled(Evaluated("met"))) in (
        {"up", "down"},
        {"wider", "back"},
    )


class Gated(nn.Module):
    """Experts whose gates look at all of them in training, at one each later."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(4, INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x)
        gates = gates.softmax(-1) if self.training else gates.sigmoid()
        hidden = torch.relu(torch.einsum("bnd,edh->benh", x, self.up))
        outputs = torch.einsum("benh,ehd->bend", hidden, self.down)
        return x + torch.einsum("bne,bend->bnd", gates, outputs)


@pytest.mark.slow
def test_experts_whose_router_only_evaluation_could_cut_are_whole() -> None:
    program = compiled(nn.Sequential(Gated(), nn.Linear(WIDTH, 32), nn.Linear(32, 8)))
    assert layers_cut(program) == {"1", "2"}


def test_a_model_of_which_evaluation_can_cut_nothing_says_why() -> None:
    with pytest.raises(GemscError, match="evaluation uses it as a whole"):
        compiled(Evaluated("sums along"), whole=("wider", "back"))


class Corrected(Evaluated):
    """Two pairs of layers, and one more in evaluation."""

    def __init__(self) -> None:
        super().__init__("twice")
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        x = x + self.back(torch.relu(self.wider(x)))
        return x if self.training else self.last(x)


@pytest.mark.slow(2)
@pytest.mark.parametrize("trunk", ["whole", "batch"])
@pytest.mark.parametrize("kind", [nn.MSELoss, nn.L1Loss])
def test_the_loss_of_evaluation_is_a_mean(
    kind: type[nn.Module], trunk: str, tmp_path: Path
) -> None:
    """Also where in training each rank adds up those of its samples."""
    x, target = torch.randn(4, 5, WIDTH), torch.randn(4, 5, WIDTH)
    model, loss = Corrected(), kind()
    options = {"ranks": 2, "shards": ("2",), "trunk": trunk, "micro_batches": 1}
    written(tmp_path, model, (x,), loss, target, **options)
    expected = loss(model.eval()(x), target).item()
    means = on_ranks(tmp_path, 2, lambda trainer: trainer.evaluate((x,), target).mean)
    assert [mean.value for mean in means if mean is not None] == [
        pytest.approx(expected, rel=1e-5)
    ] * 2


def test_a_loss_of_evaluation_that_is_a_sum_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gemsc.lowering.evaluation, "_separate_layers", lambda *_: None)
    x, target = torch.randn(4, 5, WIDTH), torch.randn(4, 5, WIDTH)
    options: dict[str, Any] = {"ranks": 2, "shards": ("2",), "trunk": "batch"}
    with pytest.raises(InternalError, match="wrong program: evaluation's loss is off"):
        compile(Corrected(), (x,), loss=nn.MSELoss(), example_target=target, **options)
