"""What forward changes without data, where several replicas see the micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from program_support import (
    X,
    against_one_process,
    assert_formatted,
    compared,
    on_ranks,
    trunk,
    weights_in,
    written,
)
from torch import Tensor, nn

from gemsc import compile
from gemsc.codegen import rank_text
from gemsc.compiler import Traced, lower, trace
from gemsc.errors import GemscError, InternalError
from gemsc.ir.changes import unjoined_changes
from gemsc.options import CompileOptions
from gemsc.runtime.training.trainer import Trainer
from gemsc.verify.compare import TOLERANCE

EXACT = TOLERANCE[torch.float64]
WIDTH = 4
MAST: dict[str, Any] = {"schedule": "mast", "micro_batches": 4}
DATA: dict[str, Any] = {"ranks": 4, "data": 2}
REPLICAS = [DATA, MAST, MAST | DATA]


class Growing(nn.Linear):
    """Its output depends on what `change(layer, x)` has made of its buffers."""

    size: Tensor
    age: Tensor

    def __init__(self, change: Callable[[Any, Tensor], None]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.change = change
        self.register_buffer("size", torch.full((WIDTH,), 0.5))
        self.register_buffer("age", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        return super().forward(x) * self.size.clone() + self.age.clone()


def around(change: Callable[[Any, Tensor], None]) -> nn.Module:
    return nn.Sequential(*trunk(2), Growing(change), nn.Tanh(), *trunk(3))


@functools.cache
def traced(change: Callable[[Any, Tensor], None]) -> tuple[nn.Module, Traced]:
    model = around(change)
    return model, trace(model, (X,), loss=nn.MSELoss(), example_target=X)


def counted(layer: Growing, x: Tensor) -> None:
    layer.age += 1


def counted_in_training(layer: Growing, x: Tensor) -> None:
    if layer.training:
        layer.age += 1


def counted_in_evaluation(layer: Growing, x: Tensor) -> None:
    layer.age += 1 if layer.training else 2


@torch.no_grad()
def follows_the_weight(layer: Growing, x: Tensor) -> None:
    norm = layer.weight.norm(dim=1)
    norm.mul_(layer.age + 1)  # a change of what only the change itself needs
    layer.size.mul_(0.9).add_(norm, alpha=0.1)
    layer.age.add_(1)
    layer.size[1:].clamp_(max=0.8)


class Late(Growing):
    """Its output depends on what its last call has made of its buffers."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.Linear.forward(self, x) * self.size.sum()
        self.change(self, x)
        return x


def set_to_a_number(layer: Growing, x: Tensor) -> None:
    layer.size.fill_(0.75)


def set_by_a_copy(layer: Growing, x: Tensor) -> None:
    layer.size.copy_(torch.full((WIDTH,), 0.75))


@pytest.mark.slow(2)
@pytest.mark.parametrize("options", REPLICAS[:2], ids=str)
@pytest.mark.parametrize("change", [set_to_a_number, set_by_a_copy])
def test_a_replica_sees_what_the_first_micro_batch_of_all_has_left(
    change: Callable[..., None], options: dict[str, Any], tmp_path: Path
) -> None:
    model = nn.Sequential(*trunk(2), Late(change), nn.Tanh(), *trunk(3))
    assert against_one_process(tmp_path, model, **options).worst < EXACT


def set_to_a_constant(layer: Growing, x: Tensor) -> None:
    layer.size.copy_(torch.full((WIDTH,), 0.75))
    layer.age = torch.tensor(3)


def test_a_buffer_that_is_set_to_a_constant_is_no_news() -> None:
    program = compile(around(set_to_a_constant), (X,), ranks=2, data=2)
    assert not [note for note in program.plan.notes if "forward changes" in note]


@pytest.mark.slow(1)
@pytest.mark.parametrize("options", REPLICAS, ids=str)
@pytest.mark.parametrize("change", [counted, follows_the_weight])
def test_replicas_change_what_the_others_do(
    change: Callable[..., None], options: dict[str, Any], tmp_path: Path
) -> None:
    """Buffers are compared, too."""
    assert against_one_process(tmp_path, around(change), **options).worst < EXACT


@pytest.mark.slow(2)
@pytest.mark.parametrize("options", REPLICAS[:2], ids=str)
@pytest.mark.parametrize(
    "change", [counted, counted_in_training, counted_in_evaluation]
)
def test_evaluation_changes_what_one_process_does(
    change: Callable[..., None], options: dict[str, Any], tmp_path: Path
) -> None:
    """That is compared when the program is compiled; here, what is there after it."""
    path = tmp_path / "build"
    model, graph = traced(change)
    given = model, (X,), nn.MSELoss(), X
    program = compared(graph, *given, **{"micro_batches": 4} | options)
    assert program.plan.unchecked == ""
    program.write(path)
    ranks, size = program.plan.ranks, len(X) * 4 * options.get("data", 1)
    batch = torch.ones(size, WIDTH)

    def work(trainer: Any) -> list[int]:
        ages = []
        for step in (trainer.step, trainer.evaluate, trainer.step):
            step(batch, batch)
            ages += [int(s[n]) for s in own(trainer) for n in s if n.endswith(".age")]
        return ages

    def own(trainer: Any) -> list[dict[str, Tensor]]:
        return [dict(stage.named_buffers()) for stage in trainer.worker.stages.values()]

    count = size // len(X)
    more = {"counted": 1, "counted_in_training": 0, "counted_in_evaluation": 2}
    after = count + more[change.__name__] * count
    by_rank = [ages for ages in on_ranks(path, ranks, work) if ages]
    assert len(by_rank) == 2
    assert by_rank == [[count, after, after + count]] * 2


@pytest.mark.slow(1)
@pytest.mark.parametrize("options", REPLICAS, ids=str)
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
def test_what_fills_up_a_batch_changes_nothing(
    micro_batches: int, options: dict[str, Any], tmp_path: Path
) -> None:
    written(tmp_path, around(counted), **{"ranks": 2, "micro_batches": 4} | options)
    assert_formatted(tmp_path)
    data = options.get("data", 1)
    batch = torch.ones(len(X) * 4 * data, WIDTH)

    def work(trainer: Any) -> list[int]:
        count = min(micro_batches, 4 * data)
        trainer.step(batch, batch, micro_batches=count)
        stages = trainer.worker.stages.values()
        named = [pair for stage in stages for pair in stage.named_buffers()]
        return [int(t) - count for name, t in named if name.endswith(".age")]

    by_rank = on_ranks(tmp_path, options.get("ranks", 2), work)
    assert [extra for extra in by_rank if extra] == [[0]] * (
        2 * data if "schedule" in options else data
    )


def by_data(layer: Growing, x: Tensor) -> None:
    layer.size.mul_(0.9).add_(x.detach().mean(), alpha=0.1)


def by_chance(layer: Growing, x: Tensor) -> None:
    layer.size.mul_(0.9).add_(torch.rand(WIDTH), alpha=0.1)


@torch.no_grad()
def by_data_later(layer: Growing, x: Tensor) -> None:
    """What is added needs no data where it is made, but does where it is used."""
    more = layer.weight.norm(dim=1)
    more.mul_(x.mean())
    layer.size.add_(more, alpha=0.1)


@torch.no_grad()
def by_data_in_a_row(layer: Growing, x: Tensor) -> None:
    more = layer.weight.norm(dim=1).clone()
    more[0] = x.mean()
    layer.size.add_(more, alpha=0.1)


@torch.no_grad()
def by_data_in_another(layer: Growing, x: Tensor) -> None:
    layer.age.add_((x > 0).sum())
    layer.size.add_(layer.age, alpha=0.1)


def by_data_too(layer: Growing, x: Tensor) -> None:
    layer.size.add_(0.1)
    layer.size.detach()[1:].add_(x.detach().mean())


@torch.no_grad()
def a_parameter(layer: Growing, x: Tensor) -> None:
    """Mirrored replicas on one rank share it, and each would change it."""
    layer.bias.data.mul_(0.9)


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    "change",
    [
        *(by_data, by_chance, by_data_later, by_data_in_a_row, by_data_in_another),
        by_data_too,
    ],
)
def test_what_needs_data_is_refused(change: Callable[..., None]) -> None:
    for options in REPLICAS[:2]:
        with pytest.raises(GemscError, match="each of 2 replicas of the model") as told:
            lower(traced(change)[1], CompileOptions(**options))
        assert told.value.at is not None


@pytest.mark.slow(1)
@pytest.mark.parametrize("shard", ["off", "optimizer", "gradients"])
def test_a_replica_changes_weights_of_its_own(shard: str, tmp_path: Path) -> None:
    diff = against_one_process(tmp_path, around(a_parameter), **DATA, shard=shard)
    assert diff.worst < EXACT


def test_weights_that_replicas_share_are_left_alone() -> None:
    given = {"loss": nn.MSELoss(), "example_target": X, **MAST}
    with pytest.raises(GemscError, match=r"changes '2\.bias', and each of 2") as told:
        compile(around(a_parameter), (X,), **given)
    assert told.value.help == "use a schedule with one replica; --data may be more"


class Whole(Growing):
    """Depends on data, so that it is not traced."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 1e6 else super().forward(x)


def clamped(layer: Growing, x: Tensor) -> None:
    layer.bias.data.clamp_(-0.2, 0.2)


def test_a_replica_that_evaluates_nothing_clamps_its_weights_too(
    tmp_path: Path,
) -> None:
    written(tmp_path, around(clamped), ranks=2, **MAST)
    batch = torch.ones(len(X) * 4, WIDTH)

    def work(trainer: Trainer) -> Tensor:
        trainer.step(batch, 100 * batch)
        trainer.evaluate(batch, batch)
        return trainer.state_dict()["2.bias"].clone()

    large = functools.partial(torch.optim.SGD, lr=1.0)
    one, two = on_ranks(tmp_path, 2, work, optimizer=large)
    assert torch.equal(one, two)
    assert one.abs().max() == torch.tensor(0.2)


def in_evaluation_only(layer: Growing, x: Tensor) -> None:
    if not layer.training:
        layer.bias.data.mul_(0.9)


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((Growing, change) for change in (a_parameter, clamped, in_evaluation_only)),
        *((Whole, change) for change in (a_parameter, in_evaluation_only)),
    ],
)
def test_weights_in_rows_may_not_change(
    kind: type[Growing], change: Callable[..., None]
) -> None:
    """Nor where no other replica is: the rows would be those before the change."""
    model = nn.Sequential(*trunk(2), kind(change), nn.Tanh(), *trunk(3))
    given: dict[str, Any] = {"loss": nn.MSELoss(), "example_target": X}
    given |= {"shard": "weights", "check": False}
    with pytest.raises(GemscError, match=r"'2\.bias', of which a rank keeps") as told:
        compile(model, (X,), **given, ranks=2, shards="2", micro_batches=1)
    assert told.value.help == "use --shard gradients in place of --shard weights"
    assert told.value.at is not None


def in_evaluation(layer: Growing, x: Tensor) -> None:
    if not layer.training:
        layer.size.add_(x.mean())


def test_what_evaluation_changes_by_data_is_refused() -> None:
    model = around(in_evaluation)
    options: dict[str, Any] = {"loss": nn.MSELoss(), "example_target": X}
    assert compile(model, (X,), **options, ranks=2).plan.unchecked == ""
    with pytest.raises(GemscError, match=r"changes '2\.size', and each of 2 replicas"):
        compile(model, (X,), **options, ranks=4, data=2)


@pytest.mark.slow
def test_what_evaluation_alone_changes_in_a_whole_module_is_refused() -> None:
    model = nn.Sequential(*trunk(2), Whole(in_evaluation_only), *trunk(3))
    options: dict[str, Any] = {"loss": nn.MSELoss(), "example_target": X}
    assert compile(model, (X,), **options, ranks=2).plan.unchecked == ""
    with pytest.raises(GemscError, match=r"changes '2\.bias', and each of 2 replicas"):
        compile(model, (X,), **options, ranks=4, data=2)


class Apart(nn.Module):
    """Its last layer changes a buffer by what the first one computes of a weight."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), nn.Sequential(*trunk(4))
        self.register_buffer("level", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        size = self.first.weight.detach().norm(dim=1)
        x = self.middle(self.first(x) * size)
        self.level.add_(size)
        return x + self.level.clone()


def test_a_change_by_what_another_rank_computes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GemscError, match="changes 'level', and each of 2 replicas"):
        against_one_process(tmp_path, Apart(), **REPLICAS[0])
    assert against_one_process(tmp_path, Apart()).worst < EXACT


@pytest.mark.slow(1)
def test_weights_in_parts_are_whole_for_the_changes(tmp_path: Path) -> None:
    options = {"schedule": "interleaved", "placement": "looped", "chunks": 2}
    model = nn.Sequential(*trunk(5), Growing(follows_the_weight))  # not used last
    diff = against_one_process(
        tmp_path, model, micro_batches=4, shard="weights", **DATA | options
    )
    assert diff.worst < EXACT


def in_half_precision(layer: Growing, x: Tensor) -> None:
    with torch.no_grad():
        layer.size.copy_(layer.weight @ layer.size)


def test_changes_round_as_in_forward(tmp_path: Path) -> None:
    """Whoever makes them: the bits are the same on all ranks."""
    model, sizes = around(in_half_precision), []
    for number, options in enumerate(({"ranks": 2, "micro_batches": 4}, REPLICAS[2])):
        path = tmp_path / f"{number}"
        options = {"micro_batches": 2, "precision": "bfloat16"} | options
        written(path, model, **options)
        batch = torch.ones(len(X) * 4, WIDTH)

        def work(trainer: Any, batch: Tensor = batch) -> list[Tensor]:
            trainer.step(batch, batch, micro_batches=4)
            named = [s.named_buffers() for s in trainer.worker.stages.values()]
            return [t for pairs in named for name, t in pairs if name.endswith(".size")]

        sizes += [t for ts in on_ranks(path, options.get("ranks", 2), work) for t in ts]
    assert len(sizes) == 1 + 4
    assert all(torch.equal(size, sizes[0]) for size in sizes)


@pytest.mark.slow(1)
def test_a_run_that_goes_on_has_the_same_counts(tmp_path: Path) -> None:
    written(tmp_path, around(counted), ranks=4, data=2, micro_batches=2)
    batch = torch.ones(len(X) * 4, WIDTH)

    def first(trainer: Any) -> None:
        trainer.step(batch, batch)
        trainer.save(tmp_path / "saved")

    on_ranks(tmp_path, 4, first)
    assert int(weights_in(tmp_path / "saved")["2.age"]) == 4

    def then(trainer: Any) -> list[int]:
        trainer.resume(tmp_path / "saved")
        trainer.step(batch, batch)
        stages = trainer.worker.stages.values()
        return [int(s.get_buffer("2.age")) for s in stages if "2.age" in s.state_dict()]

    assert [ages for ages in on_ranks(tmp_path, 4, then) if ages] == [[8], [8]]


def test_a_change_that_a_rank_cannot_make_again_is_never_left_out() -> None:
    """No pass spreads one over ranks; one that did would leave it out with no word."""
    given: dict[str, Any] = {"loss": nn.MSELoss(), "example_target": X, "check": False}
    tile = compile(around(by_data), (X,), ranks=1, **given).compilation.tiles[0]
    changes = tuple(unjoined_changes(tile.program))
    assert {change.name for change in changes} == {"2.size"}
    with pytest.raises(InternalError, match=r"'2\.size' again"):
        rank_text._advances(changes, tile.program, tile.flow(0))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.left, self.right = around(counted), around(follows_the_weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.left(x) + self.right(x)


@pytest.mark.slow(1)
def test_a_rank_changes_what_its_branch_has(tmp_path: Path) -> None:
    options = DATA | {"branches": ("2",)}
    assert against_one_process(tmp_path, Towers(), **options).worst < EXACT
    texts = [(tmp_path / f"rank{rank}.py").read_text() for rank in range(2)]
    parts = [text.partition("def advance_state")[2] for text in texts]
    towers = [{n for n in ("left", "right") if f"self.{n}" in part} for part in parts]
    assert sorted(map(sorted, towers)) == [["left"], ["right"]]


class Hidden(nn.Module):
    """Its teacher is in a list: in no state_dict, and so in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.hidden = nn.Linear(WIDTH, WIDTH), [nn.Linear(WIDTH, WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.hidden[0].weight.lerp_(self.own.weight, 0.1)
        return self.own(x) + self.hidden[0](x).detach()


def test_what_no_checkpoint_holds_may_not_change(tmp_path: Path) -> None:
    model = nn.Sequential(*trunk(1), Hidden())
    with pytest.raises(GemscError, match="neither a parameter nor a buffer"):
        written(tmp_path, model, micro_batches=2)


class Compares(nn.Module):
    """A loss with a network in a list, whose statistics nothing reads in training."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        layers = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.hidden = [nn.Sequential(*layers).requires_grad_(False)]

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        net = self.hidden[0]
        loss = (net(output) - net(target)).square().mean()
        return loss + net[1].running_mean.sum() if self.reads else loss


@pytest.mark.parametrize("reads", [False, True])
def test_statistics_that_nothing_reads_may_be_hidden(
    reads: bool, tmp_path: Path
) -> None:
    def compiled() -> Any:
        return compile(trunk(2), (X,), loss=Compares(reads=reads), **options)

    options: dict[str, Any] = {"example_target": X, "ranks": 2, "micro_batches": 2}
    if not reads:
        assert compiled().plan.unchecked == ""
    else:
        with pytest.raises(GemscError, match="neither a parameter nor a buffer"):
            compiled()
