"""A run goes on with other ranks, schedules, tiles, shards and replicas, exactly."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_support import Net, X, batch_of, mse, on_ranks, weights_in, written
from safetensors.torch import save_file
from torch import Tensor, nn

from gemsc.errors import GemscError
from gemsc.runtime.training.trainer import Trainer
from gemsc.verify.one_process import reference_steps

PICTURE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
State = dict[str, Tensor]


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Block(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.down1, self.down2 = Block(3, 4), Block(4, 8)
            self.middle = Block(8, 8)
            self.up2, self.up1 = Block(16, 4), Block(8, 4)
            self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        low = self.middle(F.max_pool2d(two, 2))
        x = self.up2(torch.cat([two, F.interpolate(low, scale_factor=2)], 1))
        x = self.up1(torch.cat([one, F.interpolate(x, scale_factor=2)], 1))
        return self.head(x)


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=0.01)


def grouped(named: Any) -> torch.optim.Optimizer:
    """Return groups that are not the same on all ranks: some have no biases."""
    weights, biases = [], []
    for name, parameter in named:
        (weights if name.endswith("weight") else biases).append(parameter)
    groups = [{"params": biases, "lr": 0.05}, {"params": weights, "weight_decay": 0.1}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.01)


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    fading = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)
    return torch.optim.lr_scheduler.ChainedScheduler([fading, steps])


def go_on(
    program: Path,
    ranks: int,
    folder: Path,
    batches: list[Any],
    *,
    resume: bool,
    after: Callable[[Trainer], object] = lambda trainer: None,
    **options: Any,
) -> list[float]:
    """Train on some batches, and save; return the losses."""

    def work(trainer: Trainer) -> list[float]:
        if resume:
            trainer.resume(folder)
        after(trainer)
        place = trainer.worker.place
        losses = [
            trainer.step(*(t.chunk(place.num_copies)[place.copy] for t in batch))
            for batch in batches
        ]
        trainer.save(folder)
        return losses

    options = {"dtype": torch.float64, "optimizer": adam, **options}
    return on_ranks(program, ranks, work, **options)[0]


def off(actual: State, expected: State) -> float:
    assert actual.keys() == expected.keys()
    pairs = ((actual[name], tensor) for name, tensor in expected.items())
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


LAYOUTS: dict[str, dict[str, Any]] = {
    "4 ranks, 1f1b": {"ranks": 4, "schedule": "1f1b", "micro_batches": 4},
    "2 ranks, master": {
        **{"ranks": 2, "schedule": "master", "times": 2},
        "micro_batches": 4,
    },
    "8 ranks, tiles": {"ranks": 8, "tiles": ("2x2",), "micro_batches": 4},
    "2 replicas, gpipe": {
        **{"ranks": 8, "data": 2, "schedule": "gpipe"},
        **{"micro_batches": 2, "shard": "optimizer"},
    },
    "4 ranks, chimera": {
        **{"ranks": 4, "schedule": "chimera", "micro_batches": 4},
        "shard": "optimizer",
    },
    "2 ranks, rows": {"ranks": 2, "tiles": ("2x1",), "micro_batches": 4},
    "1 rank": {"ranks": 1, "micro_batches": 4},
}


@pytest.fixture(scope="module")
def programs(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, int]]:
    """Give a function that writes the U-Net in a layout, once."""

    @functools.cache
    def program(name: str) -> tuple[Path, int]:
        folder = tmp_path_factory.mktemp("layout") / "program"
        inputs, target = (PICTURE,), torch.zeros(2, 1, 16, 16)
        options = {"optimizer": adam, **LAYOUTS[name]}
        written(folder, UNet(), inputs, mse, target, **options)
        return folder, options["ranks"]

    return program


PATHS = [
    ("4 ranks, 1f1b", "2 ranks, master", "8 ranks, tiles"),
    pytest.param(
        ("2 ranks, rows", "2 replicas, gpipe", "4 ranks, chimera", "1 rank"),
        marks=pytest.mark.nightly,
    ),
    pytest.param((*LAYOUTS, *reversed(LAYOUTS)), marks=pytest.mark.nightly),
]


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_run_goes_on_in_another_layout_as_if_nothing_had_been(
    path: tuple[str, ...], programs: Callable[[str], tuple[Path, int]], tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.randn(8, 3, 16, 16, generator=generator, dtype=torch.float64),
            torch.randn(8, 1, 16, 16, generator=generator, dtype=torch.float64),
        )
        for _ in path
    ]
    losses = []
    for number, name in enumerate(path):
        program, ranks = programs(name)
        batch = batches[number : number + 1]
        losses += go_on(program, ranks, tmp_path, batch, resume=number > 0)
    model = UNet()
    expected = reference_steps(
        *(model, mse, [((x,), target) for x, target in batches]),
        *(4, torch.float64, adam),
    )
    assert losses == pytest.approx(expected.losses, rel=1e-9)
    assert off(weights_in(tmp_path), expected.state) < 1e-9


def simple(self: Any, x: Tensor) -> Tensor:
    return self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))


NETS: dict[str, dict[str, Any]] = {
    "four": {"ranks": 4},
    "two": {"ranks": 2},
    "rows": {"ranks": 2, "schedule": "chimera", "shard": "optimizer"},
    "copies": {"ranks": 4, "data": 2, "micro_batches": 2},
    "alone": {"ranks": 2, "data": 2, "micro_batches": 2},
    "shards": {"ranks": 2, "shards": (2,)},  # the same weights, of which parts are here
    "moved": {"ranks": 2, "cuts": ("d",)},  # as many ranks, which hold other weights
}


@pytest.mark.slow
def test_groups_schedulers_and_waiting_gradients_go_along(tmp_path: Path) -> None:
    """Of three steps that make one update together, the run stops after each."""
    torch.set_default_dtype(torch.float64)
    given = {"optimizer": grouped, "scheduler": decaying, "accumulate": 3}
    batches = [batch_of((X.double() + i, X.double()), 4) for i in range(4)]
    for name, options in NETS.items():
        model = Net(simple).double()
        inputs = {"inputs": (X.double(),), "target": X.double()}
        options = {"micro_batches": 4, **options, **inputs, "optimizer": grouped}
        written(tmp_path / name, model, **options)

    def run(folder: Path, names: tuple[str, ...]) -> list[float]:
        losses = []
        for number, batch in enumerate(batches):
            name = names[number % len(names)]
            place, ranks = tmp_path / name, NETS[name]["ranks"]
            losses += go_on(place, ranks, folder, [batch], resume=number > 0, **given)
        return losses

    straight = go_on(
        tmp_path / "two", 2, tmp_path / "straight", batches, resume=False, **given
    )
    expected = weights_in(tmp_path / "straight")
    ways = ("two", "rows", "four"), ("two", "copies"), ("two", "moved")
    for names in (*ways, ("alone", "shards")):
        folder = tmp_path / names[1]
        assert run(folder / "run", names) == pytest.approx(straight, rel=1e-9)
        assert off(weights_in(folder / "run"), expected) < 1e-9
    assert run(tmp_path / "stops", ("two",)) == straight  # bit for bit
    assert off(weights_in(tmp_path / "stops"), expected) == 0


@pytest.mark.slow(1)
@pytest.mark.parametrize("first", ["one", "two"])
def test_each_replica_goes_on_with_its_own_gradients_that_wait(
    first: str, tmp_path: Path
) -> None:
    """Those of a program without replicas go to the first one."""
    torch.set_default_dtype(torch.float64)
    for name, copies in ("one", 1), ("two", 2):
        examples = {"inputs": (X.double(),), "target": X.double()}
        options = {"ranks": 2, "data": copies, "micro_batches": 4 // copies}
        written(tmp_path / name, Net(simple).double(), **examples, **options)
    batches = [batch_of((X.double() + i, X.double()), 4) for i in range(2)]
    given = {"accumulate": 2, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    whole, run = tmp_path / "whole", tmp_path / "run"
    go_on(tmp_path / "two", 2, whole, batches, resume=False, **given)
    go_on(tmp_path / first, 2, run, batches[:1], resume=False, **given)
    go_on(tmp_path / "two", 2, run, batches[1:], resume=True, **given)
    assert off(weights_in(run), weights_in(whole)) < 1e-12


@pytest.mark.slow(2)
@pytest.mark.parametrize("shard", ["off", "gradients"])
@pytest.mark.parametrize("before", [1, 2])
def test_gradients_of_steps_that_are_undone_are_forgotten(
    before: int, shard: str, tmp_path: Path
) -> None:
    """A loop that goes back to a checkpoint is as if it had never gone farther."""
    options = {"ranks": 4, "data": 2, "shard": shard, "micro_batches": 1}
    written(tmp_path / "two", Net(simple), **options)
    batches = [batch_of((X + i, X), 2) for i in range(5)]
    straight, back = tmp_path / "straight", tmp_path / "back"

    def go_back(trainer: Trainer) -> None:
        place = trainer.worker.place
        for number, batch in enumerate(batches[: before + 1]):
            if number == before:
                trainer.save(tmp_path / "kept")
            trainer.step(*(t.chunk(place.num_copies)[place.copy] for t in batch))
        trainer.resume(tmp_path / "kept")

    given = {"accumulate": 2, "resume": False}
    go_on(tmp_path / "two", 4, straight, batches, **given)
    go_on(tmp_path / "two", 4, back, batches[before:], after=go_back, **given)
    assert off(weights_in(back), weights_in(straight)) == 0


def test_gradients_of_a_tied_weight_that_wait_are_those_of_all_its_ranks(
    tmp_path: Path,
) -> None:
    """The first of three ranks has what it had, the others have not."""
    torch.set_default_dtype(torch.float64)

    def tied(self: Any, x: Tensor) -> Tensor:
        return self.d(torch.tanh(simple(self, x)))

    for name, cuts in ("one", ("b", "c")), ("other", ("b", "d")):
        net = Net(tied).double()
        net.d.weight = net.a.weight
        examples = {"inputs": (X.double(),), "target": X.double()}
        options = {"ranks": 3, "micro_batches": 2, "cuts": cuts}
        written(tmp_path / name, net, **examples, **options)
    batches = [batch_of((X.double() + i, X.double()), 2) for i in range(2)]
    whole, run, two = tmp_path / "whole", tmp_path / "run", {"accumulate": 2}
    go_on(tmp_path / "one", 3, whole, batches, resume=False, **two)
    go_on(tmp_path / "one", 3, run, batches[:1], resume=False, **two)
    go_on(tmp_path / "other", 3, run, batches[1:], resume=True, **two)
    assert off(weights_in(run), weights_in(whole)) < 1e-9


@pytest.mark.parametrize("kind", ["weight", "buffer"])
def test_a_model_that_lacks_what_was_saved_is_another_one(
    kind: str, tmp_path: Path
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        scale = getattr(self, "scale", torch.ones(()))
        return self.b(torch.tanh(self.a(x))) * scale

    scale = torch.tensor(2.0)
    before = Net(
        forward, **({"scale": nn.Parameter(scale)} if kind == "weight" else {})
    )
    if kind == "buffer":
        before.register_buffer("scale", scale)
    for name, model in {"before": before, "after": Net(forward)}.items():
        written(tmp_path / name, model, ranks=2, micro_batches=2)
    batches = [batch_of((X, X), 2)]
    folder = tmp_path / "saved"
    go_on(tmp_path / "before", 2, folder, batches, resume=False)
    with pytest.raises(GemscError, match=r"has 'scale', which the model does not have"):
        go_on(tmp_path / "after", 2, folder, batches, resume=True)


def test_a_tied_weight_comes_from_a_file_under_any_of_its_names(
    tmp_path: Path,
) -> None:
    def tied(self: Any, x: Tensor) -> Tensor:
        return self.d(torch.tanh(simple(self, x)))

    net = Net(tied)
    net.d.weight = net.a.weight
    written(tmp_path / "program", net, ranks=3, micro_batches=2)
    both = {n: torch.rand_like(t) for n, t in net.state_dict().items()}
    both["d.weight"] = both["a.weight"].clone()
    file = tmp_path / "given.safetensors"

    def found(trainer: Trainer) -> dict[str, Tensor]:
        trainer.resume(file)
        return {n: t.clone() for n, t in trainer.stages.parameters.items()}

    for left_out in "a.weight", "d.weight", "":
        save_file({n: t for n, t in both.items() if n != left_out}, file)
        for stages in on_ranks(tmp_path / "program", 3, found):
            assert all(torch.equal(t, both[n]) for n, t in stages.items())
    save_file({**both, "d.weight": both["a.weight"] + 1}, file)
    with pytest.raises(GemscError, match=r"'a.weight' and 'd.weight' differ"):
        on_ranks(tmp_path / "program", 3, found)


def test_an_update_has_all_its_steps_wherever_a_run_begins_to_accumulate(
    tmp_path: Path,
) -> None:
    small, large = (tmp_path / str(count) for count in (2, 4))
    for place, count in (small, 2), (large, 4):
        written(place, Net(simple), micro_batches=count, ranks=2)
    batches = [batch_of((X + i, X), 2) for i in range(3)]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches[1:], strict=True))
    at_once, in_steps = tmp_path / "at once", tmp_path / "in steps"
    for run in at_once, in_steps:
        go_on(small, 2, run, batches[:1], resume=False)
    go_on(large, 2, at_once, [(inputs, targets)], resume=True)
    go_on(small, 2, in_steps, batches[1:], resume=True, accumulate=2)
    assert off(weights_in(in_steps), weights_in(at_once)) < 1e-9


def test_both_replicas_of_a_stage_on_one_rank_take_its_statistics(
    tmp_path: Path,
) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    written(tmp_path / "one", net, micro_batches=2, ranks=1, schedule="mast")
    batches = [batch_of((X + i, X), 2) for i in range(2)]
    straight, stops = tmp_path / "straight", tmp_path / "stops"
    go_on(tmp_path / "one", 1, straight, batches, resume=False)
    for number, batch in enumerate(batches):
        go_on(tmp_path / "one", 1, stops, [batch], resume=number > 0)
    assert off(weights_in(stops), weights_in(straight)) == 0


def test_a_scheduler_goes_on_where_a_group_has_no_parameters(tmp_path: Path) -> None:
    """Of each group it has a first rate; of rates that change, a Counter of steps."""

    def by_layer(named: Any) -> torch.optim.Optimizer:
        pairs = [*named]
        first = [pair for pair in pairs if pair[0].startswith("a.")]
        others = [pair for pair in pairs if not pair[0].startswith("a.")]
        groups = [{"params": first, "lr": 0.05}, {"params": others}]
        return torch.optim.SGD(groups, lr=0.01)

    def warm(optimizer: torch.optim.Optimizer) -> Any:
        of_groups = [lambda step: 0.9**step, lambda step: 1.0]
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, of_groups)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)
        return torch.optim.lr_scheduler.ChainedScheduler([rates, steps])

    given = {"optimizer": by_layer, "scheduler": warm, "dtype": None}
    batches = [batch_of((X + i, X), 4) for i in range(6)]
    for ranks in 2, 3:
        written(tmp_path / f"on {ranks}", Net(simple), micro_batches=4, ranks=ranks)
    for name, count in ("straight", 6), ("saved", 2):
        for first in range(0, 6, count):
            ranks = 3 if first == 2 else 2
            place, part = tmp_path / f"on {ranks}", batches[first : first + count]
            go_on(place, ranks, tmp_path / name, part, resume=first > 0, **given)
    actual, expected = (weights_in(tmp_path / name) for name in ("saved", "straight"))
    assert off(actual, expected) == 0


def test_what_an_optimizer_keeps_of_rows_and_columns_belongs_to_its_ranks(
    tmp_path: Path,
) -> None:
    def factored(named: Any) -> torch.optim.Optimizer:
        return torch.optim.Adafactor([p for _, p in named], lr=0.01)

    program = written(tmp_path / "two", Net(simple), micro_batches=2)
    assert program.plan.ranks == 2
    batch = batch_of((X, X), 2)
    given = {"optimizer": factored, "dtype": None}
    saved = tmp_path / "saved"
    go_on(tmp_path / "two", 2, saved, [batch], resume=False, **given)
    go_on(tmp_path / "two", 2, saved, [batch], resume=True, **given)
    written(tmp_path / "four", Net(simple), micro_batches=2, ranks=4)
    go_on(tmp_path / "four", 4, saved, [batch], resume=True, **given)  # whole weights

    def cut(trainer: Trainer) -> None:
        trainer.worker.updates.own_rows.rows["a.weight"] = (0, 2)

    with pytest.raises(GemscError, match=r"keeps 'row_var' of 'a\.weight' in a form"):
        on_ranks(
            *(tmp_path / "two", 2, lambda t: (cut(t), t.resume(saved))),
            optimizer=factored,
        )


class Lookahead(torch.optim.Optimizer):
    """As it is often written: it wraps an optimizer, and has tensors of its own."""

    def __init__(self, base: torch.optim.Optimizer, in_one: bool) -> None:
        self.base, self.in_one, self.param_groups = base, in_one, base.param_groups
        self.slow = [p.detach().clone() for p in base.param_groups[0]["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.base.step()
        with torch.no_grad():
            for p, q in zip(self.param_groups[0]["params"], self.slow, strict=True):
                p.copy_(q.lerp_(p, 0.5))

    def state_dict(self) -> dict[str, Any]:
        state = self.base.state_dict()
        return {**(state if self.in_one else {"base": state}), "slow": self.slow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        whole = state if self.in_one else state["base"]
        self.base.load_state_dict({k: whole[k] for k in ("state", "param_groups")})
        self.slow, self.param_groups = state["slow"], self.base.param_groups


@pytest.mark.slow(1)
@pytest.mark.parametrize("in_one", [True, False])
def test_what_an_optimizer_keeps_beside_its_parameters_comes_back(
    tmp_path: Path, in_one: bool
) -> None:
    def lookahead(named: Any) -> torch.optim.Optimizer:
        return Lookahead(torch.optim.Adam([p for _, p in named], lr=0.1), in_one)

    program, saved = written(tmp_path / "two", Net(simple), micro_batches=2), tmp_path
    batch, given = batch_of((X, X), 2), {"optimizer": lookahead}
    assert program.plan.ranks == 2

    def work(trainer: Trainer) -> list[Any]:
        for number in range(4):
            trainer.step(*batch)
            if number == 1:
                trainer.save(saved)
        return [*trainer.state_dict().values()]

    def again(trainer: Trainer) -> list[Any]:
        trainer.resume(saved)
        trainer.step(*batch)
        trainer.step(*batch)
        return [*trainer.state_dict().values()]

    wanted, actual = (on_ranks(tmp_path / "two", 2, w, **given) for w in (work, again))
    for one, other in zip(chain(*wanted), chain(*actual), strict=True):
        assert torch.equal(one, other)
    written(tmp_path / "four", Net(simple), micro_batches=2, ranks=4)
    with pytest.raises(GemscError, match=r"optimizer keeps '(base|slow)' in a form"):
        on_ranks(tmp_path / "four", 4, lambda t: t.resume(saved), **given)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_group_that_was_not_saved_has_the_rates_of_its_scheduler(
    ranks: int, tmp_path: Path
) -> None:
    for count in {2, ranks}:
        written(tmp_path / f"{count}", Net(simple), ranks=count, micro_batches=2)
    batches, folder = [batch_of((X, X), 2)] * 2, tmp_path / "saved"

    def of(first: str, named: Any) -> torch.optim.Optimizer:
        groups: dict[float, list[Any]] = {0.5: [], 0.25: []}
        for name, parameter in named:
            groups[0.25 if name < "b" else 0.5] += [parameter] if name > first else []
        pairs = groups.items()
        return torch.optim.SGD([{"params": p, "lr": lr} for lr, p in pairs if p], lr=1)

    def halved(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def rates(trainer: Trainer) -> set[float]:
        trainer.resume(folder)
        trainer.step(*batches[0])
        assert trainer.optimizer is not None
        return {group["lr"] for group in trainer.optimizer.param_groups}

    given: dict[str, Any] = {"optimizer": partial(of, "b"), "scheduler": halved}
    go_on(tmp_path / "2", 2, folder, batches, resume=False, **given)
    given["optimizer"] = partial(of, "a")
    first, *others = on_ranks(tmp_path / f"{ranks}", ranks, rates, **given)
    assert first | set[float]().union(*others) == {0.5**4, 0.25 / 2**3}


class OneClock(torch.optim.Optimizer):
    """All parameters have one tensor; the step of the first one advances it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        clock, self.params = torch.zeros(()), self.param_groups[0]["params"]
        for parameter in self.params:
            self.state[parameter]["clock"] = clock

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state[self.params[0]]["clock"] += 1
        for parameter in self.params:
            parameter -= parameter.grad / (1 + self.state[parameter]["clock"])


def test_a_tensor_that_an_optimizer_keeps_for_all_parameters_stays_one(
    tmp_path: Path,
) -> None:
    for ranks in (1, 2, 3):
        written(tmp_path / f"{ranks}", Net(simple), ranks=ranks, micro_batches=2)
    batches, folder = [batch_of((X, X), 2)] * 2, tmp_path / "saved"
    given: dict[str, Any] = {"optimizer": lambda named: OneClock([p for _, p in named])}
    losses: list[float] = []
    for ranks in (2, 2, 1, 3):
        where = tmp_path / f"{ranks}", ranks, folder, batches
        losses += go_on(*where, resume=bool(losses), **given)
    one = tmp_path / "1", 1, tmp_path / "other", batches * 4
    assert losses == pytest.approx(go_on(*one, resume=False, **given), abs=1e-12)


class ClockOfGroup(torch.optim.Optimizer):
    """The weights of a group have one tensor, and its biases one that goes faster."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {})
        for group in self.param_groups:
            clocks = [torch.zeros(()), torch.zeros(())]
            for parameter in group["params"]:
                self.state[parameter]["clock"] = clocks[parameter.ndim - 1]
                self.state[parameter]["apart"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first = {p.ndim: self.state[p]["clock"] for p in group["params"]}
            for ndim, clock in first.items():
                clock += 3 - ndim
            for parameter in group["params"]:
                state = self.state[parameter]
                state["apart"] += 1
                parameter -= parameter.grad / (1 + state["clock"] + state["apart"])


def test_a_tensor_that_an_optimizer_keeps_for_a_group_is_not_that_of_all(
    tmp_path: Path,
) -> None:
    for ranks in (1, 2):
        written(tmp_path / f"{ranks}", Net(simple), ranks=ranks, micro_batches=2)
    batches, folder = [batch_of((X, X), 2)] * 2, tmp_path / "saved"

    def by_kind(named: Any) -> Any:
        kinds: tuple[list[Any], list[Any]] = ([], [])
        for name, parameter in named:
            kinds[name.startswith("1.")].append(parameter)
        return ClockOfGroup([{"params": kind} for kind in kinds])

    losses: list[float] = []
    for ranks in (2, 2, 1, 2):
        where = tmp_path / f"{ranks}", ranks, folder, batches
        losses += go_on(*where, resume=bool(losses), optimizer=by_kind)
    one = tmp_path / "1", 1, tmp_path / "other", batches * 4
    plain = go_on(*one, resume=False, optimizer=by_kind)
    assert losses == pytest.approx(plain, abs=1e-12)


class Counting(torch.optim.SGD):
    """It keeps one number for all parameters."""

    taken = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.taken += 1
        self.param_groups[0]["lr"] = 0.1 * self.taken
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.taken = state["taken"]


def test_a_count_that_all_ranks_keep_goes_on_in_any_split(tmp_path: Path) -> None:
    def counting(named: Any) -> torch.optim.Optimizer:
        return Counting([p for _, p in named], lr=0.1)

    batches = [batch_of((X + i, X), 2) for i in range(3)]
    for ranks in 1, 2, 4:
        written(tmp_path / str(ranks), Net(simple), micro_batches=2, ranks=ranks)
    whole, given = tmp_path / "whole", {"optimizer": counting}
    go_on(tmp_path / "2", 2, whole, batches, resume=False, **given)
    for before, after in (2, 4), (1, 2), (4, 1):
        run = tmp_path / f"from {before}"
        go_on(tmp_path / str(before), before, run, batches[:2], resume=False, **given)
        go_on(tmp_path / str(after), after, run, batches[2:], resume=True, **given)
        assert off(weights_in(run), weights_in(whole)) < 1e-6
