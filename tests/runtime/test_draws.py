"""Two runs that draw random numbers in another order get the same ones."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from program_support import Net, X, batch_of, mse, on_ranks, written
from threads import run_on_threads
from torch import Tensor, nn

from gemsc.base import rng
from gemsc.base.elementwise import OptimizerFactory
from gemsc.base.rng import (
    fork_torch,
    preserve_rng,
    same_draws,
    seed_all,
    seeded,
    torch_state,
)
from gemsc.errors import GemscError
from gemsc.runtime.training.trainer import Trainer
from gemsc.verify.compare import compare
from gemsc.verify.one_process import reference_steps

IMAGE = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
DRAWS = {
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.5),
    "dropout2d": lambda x: F.dropout2d(torch.ones_like(x), 0.5),
    "alpha": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "rand": lambda x: torch.rand(3, 4, dtype=x.dtype),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "normal": lambda x: torch.normal(x, x.abs()),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "in place": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "uniform": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "gumbel": lambda x: F.gumbel_softmax(torch.zeros_like(x)),
    "permutation": lambda x: torch.randperm(7),
    "integers": lambda x: torch.empty(9, dtype=torch.int64).random_(0, 50),
    "multinomial": lambda x: torch.multinomial(x.double().abs().flatten(), 3),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_depend_on_what_is_asked_for_alone(name: str) -> None:
    draw = DRAWS[name]
    with same_draws():
        first = draw(IMAGE)
        torch.rand(3)
        again = draw(IMAGE)
        other_format = draw(IMAGE.contiguous(memory_format=torch.channels_last))
        wide = draw(IMAGE.double())
        crosswise = IMAGE.double().transpose(1, 3).contiguous().transpose(1, 3)
        other_strides = draw(crosswise)
    assert torch.equal(first, again)
    assert torch.equal(first, other_format)
    assert torch.equal(wide, other_strides)
    torch.testing.assert_close(first.double(), wide.double(), rtol=1e-5, atol=1e-6)
    assert first.double().std() > 0


def test_draws_of_as_many_elements_are_the_same_in_any_shape() -> None:
    heads = torch.ones(2, 3, 4, 5)
    with same_draws():
        first = F.dropout(heads, 0.5)
        again = F.dropout(heads.flatten(0, 1), 0.5)
    assert torch.equal(first.flatten(0, 1), again)
    assert 0 < int((first == 0).sum()) < first.numel()


def test_a_program_draws_what_the_model_draws(tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.drop(self.a(x))
        keep = h.new_empty(len(h), 1).bernoulli_(0.5)  # as a stochastic depth
        h = self.b(h) * keep + torch.randn_like(h)
        h = self.c(h)[torch.randperm(len(h))]
        return self.d(h * torch.rand(4, dtype=h.dtype))

    model = Net(forward, drop=nn.Dropout(0.5))
    written(tmp_path, model, ranks=3, micro_batches=2)
    batches = [batch_of(((X,), X), 2)] * 2
    record = run_on_threads(tmp_path, 3, batches, draws=same_draws)
    with same_draws():
        expected = reference_steps(model, mse, batches, 2, torch.float64)
    comparison = compare(record, expected)
    assert comparison.equal == comparison.total
    record = run_on_threads(tmp_path, 3, batches)
    assert compare(record, expected).worst > 1e-3  # which is why


def test_distributions_draw_in_a_program(tmp_path: Path) -> None:
    """`loc.new(shape)` of some takes a `torch.Size`; of a tuple it would be data."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = torch.distributions.Laplace(self.a(x), 1.0).rsample()
        rate = F.softplus(self.b(h))
        return self.c(h * torch.distributions.Exponential(rate).rsample())

    model, batches = Net(forward), [batch_of(((X,), X), 2)]
    written(tmp_path, model, ranks=2, micro_batches=2)
    record = run_on_threads(tmp_path, 2, batches, draws=same_draws)
    with same_draws():
        expected = reference_steps(model, mse, batches, 2, torch.float64)
    assert compare(record, expected).worst < 1e-9


def test_evaluation_draws_by_what_is_computed(tmp_path: Path) -> None:
    """Not by what was drawn before; each batch after a step has numbers of its own."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.a(x if self.training else F.dropout(x, 0.5))

    written(tmp_path, Net(forward), ranks=1, micro_batches=2)
    batch = torch.cat([X, X]), torch.cat([X, X])

    def evaluated(count: int) -> list[Tensor]:
        def work(trainer: Trainer) -> list[Tensor]:
            for _ in range(count):
                trainer.evaluate(*batch)
            torch.rand(count)
            trainer.step(*batch)
            return [trainer.evaluate(*batch).output for _ in range(2)]

        (outputs,) = on_ranks(tmp_path, 1, work)
        return outputs

    (first, second), again = evaluated(0), evaluated(3)
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    assert not torch.equal(first, second)
    assert not torch.equal(*first.chunk(2))  # two micro-batches


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient + torch.randn_like(gradient)


def test_a_backward_that_draws_has_the_seed_of_what_is_computed(tmp_path: Path) -> None:
    """Ranks of a grid would draw what differs, and replicas the same, by their own."""
    written(
        tmp_path, Net(lambda self, x: self.b(Noisy.apply(self.a(x)))), ranks=1, data=1
    )
    batch = batch_of((X, X), 4)

    def trained(seed: int, before: int) -> Tensor:
        def work(trainer: Trainer) -> Tensor:
            with fork_torch():
                torch.manual_seed(before)
                trainer.step(*batch)
            return trainer.worker.stages.parameters["a.weight"].detach().clone()

        (weight,) = on_ranks(tmp_path, 1, work, seed=seed)
        return weight

    assert torch.equal(trained(0, before=1), trained(0, before=2))
    assert not torch.equal(trained(0, before=1), trained(1, before=1))


class NoisyTwice(Noisy):
    drawn: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        NoisyTwice.drawn.append(torch.randn_like(x))
        return x + NoisyTwice.drawn[-1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        NoisyTwice.drawn.append(torch.randn_like(gradient))
        return gradient + NoisyTwice.drawn[-1]


def test_forward_and_backward_draw_apart(tmp_path: Path) -> None:
    net = Net(lambda self, x: self.b(NoisyTwice.apply(self.a(x))))
    written(tmp_path, net, ranks=1, micro_batches=2)
    NoisyTwice.drawn.clear()
    on_ranks(tmp_path, 1, lambda trainer: trainer.step(*batch_of((X, X), 2)))
    assert len({tuple(noise.flatten().tolist()) for noise in NoisyTwice.drawn}) == 4


def test_what_a_draw_keeps_for_the_backward_is_there() -> None:
    x = torch.randn(64, requires_grad=True)
    with same_draws():
        result = torch.nn.functional.rrelu(x, training=True)
    result.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, result.detach() / x.detach())


def test_no_garbage_is_collected_while_torch_locks_its_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may wait for a thread that waits for the generator."""
    real, collects = torch.get_rng_state, []

    def state() -> Tensor:
        collects.append(gc.isenabled())
        return real()

    monkeypatch.setattr("torch.get_rng_state", state)
    with preserve_rng(), fork_torch():
        torch.manual_seed(1)
    assert torch.equal(torch_state(), real())
    assert collects == [False] * 3
    assert gc.isenabled()


def test_seeds_are_those_of_torch_and_cost_no_stack_as_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`torch.manual_seed` makes one for each kind of device that is not there."""
    with preserve_rng():
        wanted = torch.manual_seed(2**63).get_state()
        monkeypatch.setattr(rng, "_has_gpu", lambda: False)
        monkeypatch.setattr(traceback, "format_stack", None)  # whoever calls it fails
        seed_all(1)
        assert not torch.equal(torch.get_rng_state(), wanted)
        seed_all(2**63)
        assert torch.equal(torch.get_rng_state(), wanted)
        assert torch.initial_seed() == 2**63


@pytest.mark.parametrize("is_forked", [False, True])
def test_gpus_are_seeded_but_not_in_a_process_that_reads_data(
    is_forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(rng, "_has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: is_forked)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    with seeded(7):
        assert seeds == ([] if is_forked else [7])


class Langevin(torch.optim.SGD):
    """Adds noise in each step, and no gradients."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.detach().add_(torch.randn_like(parameter))


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"data": 2}, {"data": 2, "shard": "optimizer"}, {"schedule": "mast"}],
)
def test_an_optimizer_draws_apart_for_each_stage_and_alike_for_copies(
    options: dict[str, Any], tmp_path: Path
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    def noise(trainer: Trainer) -> dict[str, Tensor]:
        torch.rand(trainer.transport.rank)  # others may draw, too
        held = trainer.worker.stages.parameters
        before = {name: p.detach().clone() for name, p in held.items()}
        for _ in range(2):
            trainer.step(*batch)
        return {name: p.detach() - before[name] for name, p in held.items()}

    model, data = Net(forward), options.get("data", 1)
    count = 2 if "schedule" in options else data  # of copies
    batch = batch_of((X, X), 2 * data)
    ranks = 2 * data
    written(tmp_path, model, ranks=ranks, micro_batches=2, **options)
    given = {"optimizer": Langevin, "seed": 1}
    drawn = on_ranks(tmp_path, ranks, noise, **given)
    for copy in range(count):
        for name, value in {**drawn[0], **drawn[1]}.items():
            same = [part[name] for part in drawn if name in part]
            assert len(same) == count
            torch.testing.assert_close(same[copy], value)
    of_a, of_b = drawn[0]["a.weight"], drawn[1]["b.weight"]
    assert not torch.allclose(of_a, of_b)
    assert not torch.allclose(of_a[: len(of_a) // 2], of_a[len(of_a) // 2 :])
    (again, _, *_), other = (
        on_ranks(tmp_path, ranks, noise, **{**given, "seed": seed}) for seed in (1, 2)
    )
    torch.testing.assert_close(again["a.weight"], of_a)
    assert not torch.allclose(other[0]["a.weight"], of_a)


class Jointly(torch.optim.SGD):
    """Divides by the norm of all gradients, also of those that a rank has not."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in held]).norm() if held else 1.0
            for parameter in held:
                parameter.detach().sub_(parameter.grad / norm)


def in_layers(named: Iterable[tuple[str, nn.Parameter]]) -> Jointly:
    """Return what divides by the norm of the gradients of one layer."""
    layers = groupby(named, key=lambda pair: pair[0].split(".")[0])
    return Jointly([{"params": [*pairs]} for _, pairs in layers])


def in_two(named: Iterable[tuple[str, nn.Parameter]]) -> Jointly:
    """Return what divides by the norm of all gradients but those of one weight."""
    groups: list[list[Any]] = [[], []]
    for pair in named:
        groups[pair[0] == "a.weight"].append(pair)
    return Jointly([{"params": pairs} for pairs in groups])


@pytest.mark.slow(2)
@pytest.mark.parametrize("optimizer", [Langevin, Jointly, in_layers])
def test_copies_that_would_not_stay_alike_are_refused_with_what_helps(
    optimizer: OptimizerFactory, tmp_path: Path
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x)))) @ self.a.weight

    def trained(trainer: Trainer) -> Tensor:
        for _ in range(2):
            trainer.step(*batch_of((X, X), 4))
        return trainer.worker.stages.parameters["a.weight"].detach().clone()

    given: dict[str, Any] = {"micro_batches": 4, "optimizer": optimizer}
    with pytest.raises(GemscError, match=r"0 and 1 share 'a\.weight'") as caught:
        written(tmp_path, Net(forward), ranks=2, **given)
    assert "--shard-optimizer" in caught.value.help
    written(tmp_path, Net(forward), ranks=2, shard_optimizer=True, **given)
    first, second = on_ranks(tmp_path, 2, trained, optimizer=optimizer)
    assert torch.equal(first, second)
    written(tmp_path / "mast", Net(forward), ranks=2, schedule="mast", **given)
    given["optimizer"] = in_two
    program = written(tmp_path / "alike", Net(forward), ranks=2, **given)
    assert any("several parameters at once" in note for note in program.plan.notes)
    first, second = on_ranks(tmp_path / "alike", 2, trained, optimizer=in_two)
    assert torch.equal(first, second)
