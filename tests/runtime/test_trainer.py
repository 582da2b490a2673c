"""Trainers on threads: whole programs against one process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from program_support import (
    Net,
    X,
    against_one_process,
    batch_of,
    mse,
    on_ranks,
    trunk,
    weights_in,
    written,
)
from torch import Tensor, nn

from gemsc.compiler import compile
from gemsc.errors import GemscError
from gemsc.frontend.eager import check_optimizer
from gemsc.runtime.training.run_checks import StepsOfScheduler
from gemsc.runtime.training.trainer import Trainer
from gemsc.verify.compare import TOLERANCE, Comparison

EXACT = TOLERANCE[torch.float64]


def simple(self: Any, x: Tensor) -> Tensor:
    return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def is_exact(comparison: Comparison) -> bool:
    return comparison.worst <= EXACT


# Outputs


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Result:
    logits: Tensor
    hidden: list[Tensor]
    note: str = "plain"


def early(self: Any, x: Tensor, give: Callable[..., Any]) -> Any:
    h = self.a(x)
    double = h * 2
    return give(self.c(torch.tanh(self.b(torch.tanh(self.trunk(h))))), double, h)


def loss_of(output: Any, target: Tensor) -> Tensor:
    if isinstance(output, Result):
        return mse(output.logits, target)
    return mse(output["y"] if isinstance(output, dict) else output[0], target)


STRUCTURES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "tuple": lambda y, double, h: (y, double),
    "named tuple": lambda y, double, h: Pair(y, h),
    "dict": lambda y, double, h: {"y": y, "early": {"h": h, "n": 3}, "none": None},
    "dataclass": lambda y, double, h: Result(y, [h, double]),
}


@pytest.mark.slow(1)
@pytest.mark.parametrize("kind", STRUCTURES)
def test_outputs_of_any_structure_and_stage_come_to_the_rank_of_the_loss(
    kind: str, tmp_path: Path
) -> None:
    model = Net(lambda self, x: early(self, x, STRUCTURES[kind]), trunk=trunk())
    written(tmp_path, model, loss=loss_of, ranks=3, micro_batches=2)
    x, target = batch_of((X, X), 2)
    evaluated = on_ranks(tmp_path, 3, lambda t: t.evaluate(x, target))
    assert [e.output is None for e in evaluated] == [True, True, False]
    with torch.no_grad():
        parts = [model(part) for part in x.split(len(X))]
    wanted = [torch.cat(tensors) for tensors in zip(*map(leaves, parts), strict=True)]
    have = leaves(evaluated[2].output)
    assert len(have) == len(wanted)
    for a, b in zip(have, wanted, strict=True):
        torch.testing.assert_close(a, b)
    losses = [
        float(loss_of(part, t)) for part, t in zip(parts, target.split(2), strict=True)
    ]
    assert {e.loss for e in evaluated} == {evaluated[0].loss}
    assert evaluated[0].loss == pytest.approx(sum(losses) / 2)


def test_a_named_tuple_has_names_for_metrics_and_after_it_is_sent(
    tmp_path: Path,
) -> None:
    model = Net(lambda self, x: {"pair": Pair(y := self.a(x), x), "top": y.topk(1)})
    written(tmp_path, model, loss=lambda o, t: mse(o["pair"].left, t), ranks=1)
    (scored,) = on_ranks(tmp_path, 1, lambda t: t.evaluate(*[batch_of(X, 4)] * 2))
    for pair in (scored.output.pair, pickle.loads(pickle.dumps(scored.output)).pair):
        left, right = pair
        assert pair.left is left
        assert torch.equal(pair.right, right)
    assert torch.equal(
        scored.output.top.indices, scored.output.pair.left.argmax(1)[:, None]
    )


def leaves(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Result):
        output = {"logits": output.logits, "hidden": output.hidden}
    parts = output.values() if isinstance(output, dict) else output
    if isinstance(output, tuple | list | dict):
        return [leaf for part in parts for leaf in leaves(part) if part is not None]
    return []


def test_an_input_that_is_returned_as_it_is_comes_back(tmp_path: Path) -> None:
    model = Net(lambda self, x: (simple(self, x), x))
    written(tmp_path, model, loss=loss_of, micro_batches=2)
    x, target = batch_of((X, X), 2)
    output = on_ranks(tmp_path, 2, lambda t: t.evaluate(x, target))[1].output
    assert torch.equal(output[1], x)


def test_no_gradient_flows_to_samples(tmp_path: Path) -> None:
    x, target = (torch.randn(2, 4, requires_grad=True) for _ in range(2))
    model = Net(lambda self, x: self.b(torch.tanh(self.a(x * x))) * x.sin())
    options: dict[str, Any] = {"example_target": target, "micro_batches": 2}
    compile(model, (x,), loss=mse, ranks=2, **options).write(tmp_path)
    batch, wanted = (torch.cat([t, t]).sin() for t in (x, target))
    losses = on_ranks(tmp_path, 2, lambda t: t.step(batch, wanted))
    assert losses == pytest.approx([mse(model(batch), wanted).item()] * 2)


def test_a_parameter_that_is_returned_comes_as_a_copy(tmp_path: Path) -> None:
    model = Net(lambda self, x: (simple(self, x), self.a.weight))
    written(tmp_path, model, loss=loss_of, micro_batches=1)
    x, target = batch_of((X, X), 1)
    output = on_ranks(tmp_path, 2, lambda t: t.evaluate(x, target))[1].output
    assert torch.equal(output[1], model.a.weight)


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    ("ranks", "part"),
    [(1, lambda seen: seen), (2, lambda seen: seen), (1, lambda seen: seen[:, :2])],
)
def test_a_buffer_that_changes_is_returned_as_it_was_in_each_micro_batch(
    ranks: int, part: Any, tmp_path: Path
) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        self.seen.add_(x.detach())
        seen = part(self.seen)
        return self.d(torch.tanh(self.c(torch.tanh(self.b(self.a(x)))))), seen

    def first(output: Any, target: Tensor) -> Tensor:
        return mse(output[0], target)

    model = Net(forward)
    model.register_buffer("seen", torch.zeros(2, 4))
    program = compile(model, (X,), loss=first, example_target=X, ranks=ranks)
    program.write(tmp_path)
    batch, _ = batch_of((X, X), program.plan.micro_batches)
    outputs = on_ranks(tmp_path, ranks, lambda t: t.evaluate(batch, batch).output)
    expected = [model.eval()(x)[1].clone() for x in batch.split(2)]
    torch.testing.assert_close(outputs[-1][1], torch.cat(expected))
    with pytest.raises(GemscError, match="the model returns 'seen' itself"):
        compile(
            model, (X,), loss=first, example_target=X, ranks=1, frontend="export"
        ).write(tmp_path)


def test_torch_export_gives_no_copy_of_a_parameter(tmp_path: Path) -> None:
    model = Net(lambda self, x: (simple(self, x), self.a.weight))
    with pytest.raises(GemscError, match=r"the model returns 'a\.weight' itself"):
        written(tmp_path, model, loss=loss_of, micro_batches=1, frontend="export")


def test_a_program_without_a_loss_evaluates_and_does_not_train(tmp_path: Path) -> None:
    model = Net(simple)
    written(tmp_path, model, loss=None, target=None, micro_batches=2)
    x = batch_of(X, 2)
    evaluated = on_ranks(tmp_path, 2, lambda t: t.evaluate(x))
    with torch.no_grad():
        torch.testing.assert_close(evaluated[1].output, model(x))
    assert [e.loss for e in evaluated] == [None, None]
    with pytest.raises(
        GemscError, match="cannot train: it was compiled without a loss"
    ):
        on_ranks(tmp_path, 2, lambda t: t.step(x))


# Inputs


class Fed(nn.Module):
    """Takes keywords, masks and integers; late stages use inputs."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words = nn.Embedding(9, 4)
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.trunk = trunk()

    def forward(self, tokens: Tensor, *, mask: Tensor, extra: dict[str, Any]) -> Tensor:
        h = self.trunk(self.a(self.words(tokens))) * mask[:, None]
        h = self.b(torch.tanh(h + extra["raw"])) + extra["more"][0]
        return self.c(h).masked_fill(~mask[:, None], 0.0)


FEED = {
    "tokens": torch.tensor([3, 8]),
    "mask": torch.tensor([True, False]),
    "extra": {"raw": X, "more": [torch.ones(2, 1)], "scale": 2.0},
}


@pytest.mark.slow
def test_keywords_nests_masks_and_integers_are_inputs_of_any_stage(
    tmp_path: Path,
) -> None:
    assert is_exact(against_one_process(tmp_path, Fed(), FEED, ranks=4))


@pytest.mark.slow
def test_a_raw_input_may_cross_every_stage(tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.cat([simple(self, x), x], 1)[:, 1:5] * x

    assert is_exact(against_one_process(tmp_path, Net(forward), ranks=3))


@pytest.mark.slow
def test_a_target_may_be_a_nest(tmp_path: Path) -> None:
    def loss(output: Tensor, target: dict[str, Any]) -> Tensor:
        return mse(output, target["values"]) + F.cross_entropy(output, target["c"][0])

    target = {"values": X, "c": [torch.tensor([1, 3])]}
    compared = against_one_process(tmp_path, Net(simple), loss=loss, target=target)
    assert is_exact(compared)


@pytest.mark.slow
def test_an_input_that_is_not_batched_is_whole_in_every_micro_batch(
    tmp_path: Path,
) -> None:
    def forward(self: Any, x: Tensor, places: Tensor) -> Tensor:
        return simple(self, x + places.sum(0)) * places.mean()

    places = torch.rand(5, 4)
    compared = against_one_process(tmp_path, Net(forward), (X, places), micro_batches=3)
    assert is_exact(compared)


@pytest.mark.slow(1)
@pytest.mark.parametrize("size", [1, 4, 7, 12])
def test_a_batch_of_another_size_is_refused_by_name(size: int, tmp_path: Path) -> None:
    written(tmp_path, Net(simple), micro_batches=3)
    x = torch.zeros(size, 4)
    with pytest.raises(
        GemscError, match=r"has shape .*, but this program expects \[6, 4\]"
    ) as caught:
        on_ranks(tmp_path, 2, lambda t: t.step(x, x))
    assert ("drop_last=True" in str(caught.value.help)) == (size < 6)


def test_a_batch_of_one_micro_batch_is_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path, Net(simple), micro_batches=3)
    with pytest.raises(GemscError, match="has shape"):
        on_ranks(tmp_path, 2, lambda t: t.step(X, X))


# Training


def frozen_statistics() -> nn.Module:
    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            for layer in list(self)[1:3]:
                layer.eval()
            return self

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4)
        assert norm.running_mean is not None
        norm.running_mean.uniform_()
        model = Frozen(nn.Linear(4, 4), norm, nn.Dropout(0.5), trunk(), nn.Linear(4, 4))
    return model.train()


@pytest.mark.parametrize("frontend", ["record", "export"])
def test_weights_that_train_freezes_are_frozen(frontend: str, tmp_path: Path) -> None:
    class Freezing(nn.Sequential):
        def train(self, mode: bool = True) -> Freezing:
            self[0].requires_grad_(False)
            return super().train(mode)

    model = Freezing(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    assert is_exact(against_one_process(tmp_path, model, steps=2, frontend=frontend))
    assert not any(weight.requires_grad for weight in model[0].parameters())


@pytest.mark.parametrize("frontend", ["record", "export"])
def test_weights_that_eval_alone_freezes_are_trained(
    frontend: str, tmp_path: Path
) -> None:
    class ByMode(nn.Sequential):
        def train(self, mode: bool = True) -> ByMode:
            self[0].requires_grad_(mode)
            return super().train(mode)

    model = ByMode(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    assert is_exact(against_one_process(tmp_path, model, steps=2, frontend=frontend))
    assert all(weight.requires_grad for weight in model[0].parameters())


@pytest.mark.slow
def test_layers_that_the_model_keeps_in_eval_mode_stay_in_it(tmp_path: Path) -> None:
    """From the first step on, and after an evaluation."""
    model = frozen_statistics()
    assert is_exact(against_one_process(tmp_path / "a", model, steps=3))
    written(tmp_path / "b", model, micro_batches=1)

    def work(trainer: Trainer) -> dict[str, Any]:
        before = {n: t.clone() for n, t in trainer.stages.tensors().items()}
        trainer.step(X, X)
        trainer.evaluate(X, X)
        trainer.step(X, X)
        modes = {
            path: layer.training
            for stage in trainer.stages.values()
            for path, layer in stage.named_modules()
        }
        after = trainer.stages.tensors()
        return {"modes": modes, "before": before, "after": after}

    first, _ = on_ranks(tmp_path / "b", 2, work)
    assert (first["modes"]["1"], first["modes"]["2"]) == (False, False)
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(first["before"][name], first["after"][name])


@pytest.mark.slow
def test_a_module_may_be_called_frozen(tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(self.frozen(self.a(x)))

    model = Net(forward, frozen=nn.BatchNorm1d(4).eval())
    assert is_exact(against_one_process(tmp_path, model))
    scored = on_ranks(tmp_path, 2, lambda t: t.evaluate(batch_of(X, 3), batch_of(X, 3)))
    model.eval()
    assert scored[0].loss == pytest.approx(
        float(mse(model(batch_of(X, 3)), batch_of(X, 3)).detach())
    )


def test_parameters_that_do_not_train_stay_as_they_are(tmp_path: Path) -> None:
    model = Net(simple)
    model.a.requires_grad_(False)
    model.b.weight.requires_grad_(False)
    assert is_exact(against_one_process(tmp_path, model))


@pytest.mark.slow
def test_parameters_and_buffers_without_use_stay_in_checkpoints(tmp_path: Path) -> None:
    model = Net(simple, spare=nn.Parameter(torch.rand(3)), list=nn.ParameterList([X]))
    model.register_buffer("idle", torch.rand(2))
    assert is_exact(against_one_process(tmp_path / "a", model))
    written(tmp_path / "b", model)
    on_ranks(tmp_path / "b", 2, lambda t: t.save(tmp_path))
    model.load_state_dict(weights_in(tmp_path))


@pytest.mark.slow
def test_gradients_stop_where_a_consumer_detaches(tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        end = self.trunk(h)
        return self.b(end) * self.c(h.detach()) + self.d(end.detach())

    assert is_exact(against_one_process(tmp_path, Net(forward, trunk=trunk()), ranks=4))


@pytest.mark.slow
def test_a_stage_that_only_moves_values_hands_them_on(tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x).view(-1) + self.bias.view(-1)
        return self.b(torch.tanh(h).view(2, 4))

    model = Net(forward, bias=nn.Parameter(torch.rand(2, 4)))
    compared = against_one_process(tmp_path, model, micro_batches=16)
    assert is_exact(compared)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.05, weight_decay=0.1)


def momentum(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9, nesterov=True)


def grouped(named: Any) -> torch.optim.Optimizer:
    weights, biases = [], []
    for name, parameter in named:
        (biases if name.endswith("bias") else weights).append(parameter)
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.5}]
    return torch.optim.Adam([g for g in groups if g["params"]], lr=0.01)


def by_layer(named: Any) -> torch.optim.Optimizer:
    """Groups of pairs: each rank has parameters of some of them only."""
    pairs = [*named]
    groups = [{"params": [p for p in pairs if p[0][0] == layer]} for layer in "cab"]
    return torch.optim.Adam([{**g, "lr": 0.1 / (i + 1)} for i, g in enumerate(groups)])


def normed(self: Any, x: Tensor) -> Tensor:
    return self.c(torch.tanh(self.norm(self.b(torch.tanh(self.a(x))))))


@pytest.mark.slow(1)
@pytest.mark.parametrize("optimizer", [adamw, momentum, grouped, by_layer])
def test_any_optimizer_with_any_groups(optimizer: Any, tmp_path: Path) -> None:
    model = Net(normed, norm=nn.BatchNorm1d(4))
    compared = against_one_process(tmp_path, model, steps=4, optimizer=optimizer)
    assert is_exact(compared)


@pytest.mark.slow
def test_dropout_is_the_same_whenever_the_seed_is(tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(torch.tanh(F.dropout(self.a(x), 0.5, self.training)))

    written(tmp_path, Net(forward), micro_batches=3)
    x, target = batch_of((X, X), 3)

    def losses(seed: int) -> list[float]:
        work = lambda t: [t.step(x, target) for _ in range(3)]  # noqa: E731
        return on_ranks(tmp_path, 2, work, seed=seed)[0]

    first = losses(0)
    assert losses(0) == first
    assert losses(1) != first
    assert len(set(first)) == 3


# Checkpoints


def steps(
    directory: Path, batches: list[Any], resume: Path | None = None, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    def work(trainer: Trainer) -> tuple[list[float], dict[str, Tensor]]:
        if resume is not None and (resume / "latest").exists():
            trainer.resume(resume)
        losses = [trainer.step(x, target) for x, target in batches]
        if resume is not None:
            trainer.save(resume)
        return losses, trainer.state_dict()

    of_ranks = on_ranks(directory, 2, work, optimizer=momentum, **options)
    return of_ranks[0][0], {n: t for _, state in of_ranks for n, t in state.items()}


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    model = Net(normed, norm=nn.BatchNorm1d(4))
    written(tmp_path / "program", model, micro_batches=2)
    batches = [batch_of((X + i, X), 2) for i in range(4)]
    losses, state = steps(tmp_path / "program", batches)
    saved = tmp_path / "saved"
    first, _ = steps(tmp_path / "program", batches[:2], saved)
    second, resumed = steps(tmp_path / "program", batches[2:], saved)
    assert first + second == losses
    assert all(torch.equal(resumed[name], tensor) for name, tensor in state.items())


@pytest.mark.slow
def test_a_checkpoint_is_that_of_the_users_model(tmp_path: Path) -> None:
    model = Net(normed, norm=nn.BatchNorm1d(4))
    written(tmp_path / "program", model, micro_batches=2)
    _, state = steps(tmp_path / "program", [batch_of((X, X), 2)], tmp_path)
    model.load_state_dict(weights_in(tmp_path))
    assert int(model.norm.num_batches_tracked) == 2
    assert state.keys() == model.state_dict().keys()


@pytest.mark.slow
@pytest.mark.parametrize("is_module", [False, True])
def test_a_tied_model_takes_its_checkpoint(is_module: bool, tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.c(self.trunk(self.a(x)))

    model = Net(forward, trunk=trunk())
    if is_module:
        model.c = model.a
    else:
        model.c.weight = model.a.weight
    written(tmp_path / "program", model, micro_batches=2)
    steps(tmp_path / "program", [batch_of((X, X), 2)], tmp_path)
    saved = weights_in(tmp_path)
    model.load_state_dict(saved)
    assert torch.equal(saved["a.weight"], saved["c.weight"])


@pytest.mark.slow
def test_tensors_of_the_loss_are_not_in_the_models_checkpoint(tmp_path: Path) -> None:
    model = Net(simple)
    loss = nn.CrossEntropyLoss(weight=torch.rand(4))
    target = torch.tensor([1, 2])
    written(tmp_path / "program", model, loss=loss, target=target, micro_batches=1)
    on_ranks(tmp_path / "program", 2, lambda t: t.save(tmp_path))
    model.load_state_dict(weights_in(tmp_path))


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "a", Net(simple), micro_batches=1)
    written(tmp_path / "b", Net(simple, d=nn.Linear(3, 3)), micro_batches=1)
    on_ranks(tmp_path / "a", 2, lambda t: t.save(tmp_path))
    with pytest.raises(GemscError, match=r"'d\.weight' has shape"):
        on_ranks(tmp_path / "b", 2, lambda t: t.resume(tmp_path))


def test_weights_of_the_same_names_and_another_shape_are_refused(
    tmp_path: Path,
) -> None:
    written(tmp_path, Net(simple), micro_batches=1)
    path = tmp_path / "rank0.py"
    path.write_text(path.read_text().replace("nn.Linear(4, 4)", "nn.Linear(4, 5)"))
    with pytest.raises(GemscError, match=r"have shape .* the program needs"):
        on_ranks(tmp_path, 2, lambda t: t.device)


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("old", "new", "error", "says"),
    [
        ("PROGRAM = ", "OTHER = ", GemscError, r"rank0\.py has no PROGRAM"),
        ("PROGRAM = ", "PROGRAM 2 ", GemscError, r"rank0\.py:\d+: .*syntax error"),
        ("    reductions={},\n", "", TypeError, "missing .* 'reductions'"),
        ("    reductions=", "    sums=", TypeError, "unexpected .* 'sums'"),
    ],
)
def test_a_rank_file_that_leaves_out_a_part_of_its_program_is_refused(
    old: str, new: str, error: type[Exception], says: str, tmp_path: Path
) -> None:
    written(tmp_path, Net(simple), micro_batches=1)
    path = tmp_path / "rank0.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(error, match=says):
        on_ranks(tmp_path, 2, lambda t: t.device)


def test_an_optimizer_of_other_parameters_is_refused_before_it_trains(
    tmp_path: Path,
) -> None:
    written(tmp_path, Net(simple), micro_batches=1)
    other = Net(simple)
    with pytest.raises(GemscError, match="a parameter that is not one of the program"):
        on_ranks(
            tmp_path, 2, lambda t: t.device,
            optimizer=lambda pairs: torch.optim.SGD(other.parameters(), 0.1),
        )  # fmt: skip


def test_an_optimizer_that_wants_what_another_rank_has_fails_at_its_line(
    tmp_path: Path,
) -> None:
    def of_one(pairs: Any) -> Any:
        return torch.optim.SGD([dict(pairs)["a.weight"]], 0.1)

    written(tmp_path, Net(simple), micro_batches=1)
    with pytest.raises(GemscError, match=r"optimizer\(\) fails: KeyError") as caught:
        on_ranks(tmp_path, 2, lambda t: t.device, optimizer=of_one)
    assert "test_trainer.py" in str(caught.value.at)


# What a loop of one's own gives


MADE = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.slow(5)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"accumulate": 0}, "accumulate is 0"),
        ({"accumulate": 1.5}, r"accumulate is 1\.5"),
        ({"clip_norm": 0.0}, r"clip_norm is 0\.0"),
        ({"clip_norm": -1.0}, r"clip_norm is -1\.0"),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
        ({"on_nonfinite": "Skip"}, "did you mean skip"),
        ({"optimizer": MADE}, "lambda parameters: SGD"),
        (
            {"scheduler": torch.optim.lr_scheduler.StepLR(MADE, 1)},
            "lambda optimizer: StepLR",
        ),
        ({"optimizer": lambda pairs: None}, "optimizer.. returns None"),
        ({"optimizer": lambda pairs: [MADE]}, "returns list, which cannot step"),
    ],
)
def test_what_would_train_nothing_is_refused(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    written(tmp_path, Net(simple), ranks=2, micro_batches=2)
    with pytest.raises(GemscError, match=message):
        on_ranks(tmp_path, 2, lambda trainer: None, **given)


def test_an_optimizer_that_changes_weights_when_it_is_made_is_refused() -> None:
    """It is made several times, and again where a run resumes."""

    def halved(pairs: Any) -> torch.optim.Optimizer:
        parameters = [p for _, p in pairs]
        for parameter in parameters:
            parameter.data.mul_(0.5)
        return torch.optim.SGD(parameters, lr=0.1)

    with pytest.raises(GemscError, match=r"optimizer\(\) changes weight: ") as caught:
        check_optimizer(dict(nn.Linear(2, 3).named_parameters()), halved)
    assert "in model()" in str(caught.value.help)
    check_optimizer(dict(nn.Linear(2, 3).named_parameters()), torch.optim.SGD)


def test_a_rank_may_have_no_optimizer(tmp_path: Path) -> None:
    def of_last(pairs: Any) -> torch.optim.Optimizer | None:
        chosen = [p for name, p in pairs if name.startswith("c")]
        return torch.optim.SGD(chosen, lr=0.1) if chosen else None

    written(tmp_path, Net(simple), ranks=2, micro_batches=2)
    absent = on_ranks(
        tmp_path, 2, lambda trainer: trainer.optimizer is None, optimizer=of_last
    )
    assert absent == [True, False]


@pytest.mark.slow(2)
@pytest.mark.parametrize("count", [0, -1, 3, 1.5])
def test_so_many_micro_batches_are_not_in_a_batch(count: Any, tmp_path: Path) -> None:
    written(tmp_path, Net(simple), ranks=2, micro_batches=2)
    batch = batch_of((X, X), 2)
    with pytest.raises(GemscError, match=f"micro_batches is {count}, and a batch has"):
        on_ranks(tmp_path, 2, lambda t: t.step(*batch, micro_batches=count))


@pytest.mark.parametrize("is_stepped", [False, True])
def test_a_scheduler_that_others_step_too_is_told(
    is_stepped: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, Net(simple), ranks=2, micro_batches=2)

    def work(trainer: Trainer) -> None:
        trainer.add_callbacks([StepsOfScheduler()])  # each rank has its own
        for step in range(4):
            trainer.step(*batch_of((X, X), 2))
            if is_stepped:
                trainer.scheduler.step()
            if step == 1:
                trainer.save(tmp_path / "saved")
        trainer.resume(tmp_path / "saved")
        trainer.step(*batch_of((X, X), 2))

    on_ranks(
        tmp_path, 2, work,
        scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 2),
    )  # fmt: skip
    err = capsys.readouterr().err
    assert (
        err.count("StepLR was stepped after step 1, and trainer.step()") == is_stepped
    )
