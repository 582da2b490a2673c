"""Evaluation runs where training runs, in the same forward if it can."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_support import Net, X, batch_of, mse, on_ranks, trunk, written
from torch import Tensor, nn

from gemsc.compiler import CompiledProgram, compile, trace
from gemsc.errors import GemscError
from gemsc.frontend import record
from gemsc.ir.program import Program
from gemsc.passes.follow_stages import FollowStages, find_twins


def first(output: Any, target: Tensor) -> Tensor:
    return mse(output[0], target) if isinstance(output, tuple) else mse(output, target)


def compiled(model: nn.Module, ranks: int = 2, **options: Any) -> CompiledProgram:
    return compile(
        model, (X,), loss=first, example_target=X, ranks=ranks, check=False, **options
    )


def stage_of(program: Program) -> dict[str, int]:
    return {
        str(n.target): s.index for s in program.require_stages() for n in s.nodes
    }  # fmt: skip


def evaluates_as_the_model(
    directory: Path,
    model: nn.Module,
    ranks: int = 2,
    loss: Any = first,
    **options: Any,
) -> None:
    """Evaluate on ranks and in one process, with the same weights."""
    written(directory, model, loss=loss, ranks=ranks, micro_batches=2, **options)
    input, target = batch_of((X, X), 2)
    evaluated = on_ranks(directory, ranks, lambda t: t.evaluate(input, target))
    with torch.no_grad():
        training = model.training
        outputs = [model.eval()(part) for part in input.split(len(X))]
        model.train(training)
    (output,) = [e.output for e in evaluated if e.output is not None]
    output, outputs = (
        (output[0], [o[0] for o in outputs])
        if isinstance(output, tuple)
        else (output, outputs)
    )
    torch.testing.assert_close(output, torch.cat(outputs))
    losses = {e.loss for e in evaluated}
    assert len(losses) == 1
    assert losses.pop() == pytest.approx(float(mse(output, target)))


def dropout(self: Any, x: Tensor) -> Tensor:
    h = F.dropout(self.a(x), 0.5, self.training)
    return self.c(F.dropout(torch.relu(self.b(h)), 0.5, training=self.training))


@pytest.mark.slow
def test_graphs_that_differ_in_constants_share_a_forward(tmp_path: Path) -> None:
    program = compiled(Net(dropout))
    assert program.compilation.whole.twins is not None
    text = "\n".join(program.rank_modules().values())
    assert "forward_eval" not in text
    assert "F.dropout(h, 0.5, self.training)" in text or "self.training)" in text
    evaluates_as_the_model(tmp_path / "program", Net(dropout))


def choose(self: Any, x: Tensor) -> Tensor:
    h = self.a(x) * (2.0 if self.training else 3.0)
    return self.b(torch.relu(h))


@pytest.mark.slow
def test_numbers_that_differ_are_chosen_when_it_runs(tmp_path: Path) -> None:
    program = compiled(Net(choose))
    assert program.compilation.whole.twins is not None
    assert "(2.0 if self.training else 3.0)" in program.rank_modules()["rank0.py"]
    evaluates_as_the_model(tmp_path / "program", Net(choose))


def grows(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    wide = torch.relu(h.repeat(1, 2 if self.training else 3))
    return self.b(wide[:, :4] + wide[:, -4:])


def in_double(self: Any, x: Tensor) -> Tensor:
    h = self.a(x).to(torch.float64 if self.training else torch.float32)
    return self.b(h.relu().float())


def test_shapes_that_differ_have_a_forward_of_their_own(tmp_path: Path) -> None:
    traced = trace(Net(in_double), (X,), loss=first, example_target=X, check=False)
    assert traced.twins is None
    assert compiled(Net(grows)).compilation.whole.twins is None
    evaluates_as_the_model(tmp_path / "program", Net(grows))


ONE, OTHER = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([4.0, 3.0, 2.0, 1.0])


def has_another_constant(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x) * (ONE if self.training else OTHER))


def test_constants_of_one_name_are_told_apart(tmp_path: Path) -> None:
    evaluates_as_the_model(tmp_path / "program", Net(has_another_constant))


def turned(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.b(h) - h if self.training else h - self.b(h)


def half_in_training(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=self.training):
        return self.b(self.a(x))


def under_other_names(self: Any, x: Tensor) -> dict[str, Tensor]:
    h = self.a(x)
    names = ("one", "other") if self.training else ("other", "one")
    return dict(zip(names, (h, self.b(h)), strict=True))


def by_a_tensor(self: Any, x: Tensor) -> Tensor:
    h = self.b(self.a(x))
    return h.clamp(2.0 if self.training else h.mean())


def by_a_keyword(self: Any, x: Tensor) -> Tensor:
    h = self.b(self.a(x))
    one, other = h.mean(), h.amax()
    return (h + one + other).clamp(max=one if self.training else other)


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    "forward", [turned, half_in_training, under_other_names, by_a_tensor, by_a_keyword]
)
def test_what_differs_in_more_than_constants_is_no_twin(forward: Any) -> None:
    """Evaluation would compute what training does."""
    model = Net(forward)
    both = [record(model, (X,), training=trains) for trains in (True, False)]
    assert find_twins(*both) is None
    plain = [record(Net(choose), (X,), training=trains) for trains in (True, False)]
    assert find_twins(*plain) is not None


def deep(self: Any, x: Tensor) -> Any:
    h = self.a(x)
    end = self.trunk(h)
    return (end, self.d(h)) if self.training else end


def supervised() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        return Net(deep, trunk=trunk())


def deep_loss(output: Any, target: Tensor) -> Tensor:
    if isinstance(output, tuple):
        return mse(output[0], target) + mse(output[1], target)
    return mse(output, target)


@pytest.mark.slow
def test_deep_supervision_has_a_forward_of_its_own(tmp_path: Path) -> None:
    program = compile(supervised(), (X,), loss=deep_loss, example_target=X, ranks=3)
    assert program.compilation.whole.twins is None
    assert "def forward_eval" in program.rank_modules()["rank0.py"]
    training = stage_of(program.compilation.program)
    evaluation = stage_of(program.compilation.evaluation)
    assert evaluation.items() <= training.items()
    assert evaluation.keys() >= {"a", "trunk.0.0", "trunk.5.0"}
    evaluates_as_the_model(tmp_path / "program", supervised(), 3, deep_loss)


@pytest.mark.slow
def test_a_stage_with_nothing_to_do_in_evaluation_does_nothing(tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        h = self.b(torch.relu(self.a(x)))
        if self.training:
            return h, self.trunk(h)
        return h

    def last(output: Any, target: Tensor) -> Tensor:
        return mse(output[1] if isinstance(output, tuple) else output, target)

    model = Net(forward, trunk=trunk(4))
    program = compile(
        model, (X,), ranks=3, balance="explicit", blocks=(2, 3, 1), check=False,
        loss=last, example_target=X,
    )  # fmt: skip
    stages = program.compilation.evaluation.require_stages()
    assert [bool(stage.nodes) for stage in stages] == [True, False, False]
    for text in program.rank_modules().values():
        ast.parse(text)
    options = {"balance": "explicit", "blocks": (2, 3, 1)}
    evaluates_as_the_model(tmp_path / "program", model, 3, last, **options)


@pytest.mark.slow
def test_stochastic_branches_are_twins_or_apart_but_right(tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:  # stochastic depth
            keep = torch.rand(len(x), 1, device=x.device) < 0.8
            return self.b(h + self.c(h) * keep / 0.8)
        return self.b(h + self.c(h))

    program = compiled(Net(forward))
    assert program.compilation.whole.twins is None
    evaluates_as_the_model(tmp_path / "program", Net(forward))


@pytest.mark.slow
def test_tied_parameters_run_on_the_first_stage_that_has_them(tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        h = F.linear(x, self.tied)
        k = torch.relu(self.b(torch.relu(self.a(h))))
        end = F.linear(k, self.tied)
        return (end, k) if self.training else end * 1.0

    model = Net(forward, tied=nn.Parameter(torch.randn(4, 4)))
    program = compiled(model, ranks=3)
    assert program.compilation.whole.twins is None
    assert len(program.compilation.shared["tied"]) == 2
    first_use = program.compilation.evaluation.compute_nodes[0]
    assert first_use in program.compilation.evaluation.require_stages()[0].nodes
    evaluates_as_the_model(tmp_path / "program", model, ranks=3)


@pytest.mark.slow
def test_layers_that_only_evaluation_uses_run_where_their_inputs_are(
    tmp_path: Path,
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.b(torch.relu(self.a(x)))
        return h if self.training else self.d(h)

    program = compiled(Net(forward))
    assert stage_of(program.compilation.evaluation)["d"] == 1
    assert "d.weight" in program.compilation.owned[1]
    evaluates_as_the_model(tmp_path / "program", Net(forward))


def test_another_order_of_layers_in_evaluation_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.training:
            return self.b(torch.relu(self.a(x)))
        return self.a(torch.relu(self.b(x)))

    with pytest.raises(GemscError, match="in evaluation 'a' runs after") as caught:
        compiled(Net(forward))
    assert "while running pass `follow-stages`" in str(caught.value)
    assert caught.value.at is not None


@pytest.mark.slow
def test_tensors_without_use_stay_in_the_graph_for_evaluation() -> None:
    traced = trace(supervised(), (X,), loss=deep_loss, example_target=X, check=False)
    program = compile(supervised(), (X,), loss=deep_loss, example_target=X, check=False)
    owned = program.compilation.owned
    done = FollowStages(program.compilation.program, owned).apply(traced.evaluation)
    names = {n for n, _ in done.module.named_parameters()}
    assert names == {n for n, _ in supervised().named_parameters()}


def test_what_evaluation_writes_late_into_early_memory_is_read_late(
    tmp_path: Path,
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.training:
            return self.d(torch.relu(self.c(torch.relu(self.b(self.a(x))))))
        early = torch.zeros(2, 4)
        y = torch.relu(self.b(self.a(x)))
        early[:, :2] = y[:, 2:]
        late = early * 2  # takes no value that depends on a layer
        return self.d(torch.relu(self.c(y))) + late

    choices = {"balance": "explicit", "blocks": (1, 1, 1, 1)}
    evaluates_as_the_model(tmp_path / "program", Net(forward), 4, **choices)


def ages(self: Any, x: Tensor) -> Tensor:
    if self.is_always or not self.training:
        self.age += 0 if self.training else 1
    x = torch.tanh(self.a(x * (1 + self.age)))
    return self.c(torch.tanh(self.b(x) * (2 + self.age)))


def test_what_evaluation_alone_changes_is_on_one_stage(tmp_path: Path) -> None:
    def compiled(cuts: tuple[str, ...], *, is_always: bool) -> Any:
        model = Net(ages, age=nn.Buffer(torch.zeros(())), is_always=is_always)
        return written(tmp_path, model, ranks=2, micro_batches=2, cuts=cuts)

    with pytest.raises(GemscError, match="'age' in evaluation alone") as caught:
        compiled(("b",), is_always=False)
    assert "self.n += 0 if self.training else 1" in str(caught.value.help)
    compiled(("c",), is_always=True)  # as it says
