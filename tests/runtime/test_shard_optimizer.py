"""Optimizer state in parts: ranks that hold a weight update some rows of it each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from command_line import MODEL, Gemsc, gemsc_here
from plan_support import metered_peaks
from program_support import Net, X, against_one_process, batch_of, on_ranks, written
from safetensors.torch import load_file
from threads import run_on_threads
from torch import Tensor, nn

from gemsc.costs.collectives import exchange, reduce_scatter
from gemsc.costs.hardware import LinkSpeed, Network
from gemsc.errors import GemscError
from gemsc.messages.rows import rows_of_holders
from gemsc.options import CompileOptions
from gemsc.plan import Plan
from gemsc.planner.edited import EditedPlan
from gemsc.runtime.training.program_directory import load_rank_module
from gemsc.runtime.training.trainer import Trainer
from gemsc.viz.terminal import show

gemsc = pytest.fixture(gemsc_here)

DOUBLE = torch.float64
STEPS = 4
Result = tuple[dict[str, Tensor], int, int]  # the model, elements updated, state bytes


class Lamb(torch.optim.Optimizer):
    """As far as the norm of each weight and of each gradient goes."""

    def __init__(self, named: Any) -> None:
        super().__init__(named, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(0.1 * p.grad * (p.norm() + 1) / (p.grad.norm() + 1))


class Gate(nn.Module):
    """What it trains depends on the data: one of two layers, one that is never."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.never = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum()
        if total > 1e9:
            return self.never(x)
        return self.up(x) if total > 0 else self.down(x)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.01)


def by_name(named: Any) -> torch.optim.Optimizer:
    """No decay for biases, as many write it; momentum."""
    pairs = list(named)
    biases = [(n, p) for n, p in pairs if p.dim() < 2]
    others = [(n, p) for n, p in pairs if p.dim() >= 2]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": biases}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def forward(self: Any, x: Tensor) -> Tensor:
    x = torch.tanh(self.a(x))
    x = self.norm(self.b(x)) * self.scale  # a number
    x = torch.tanh(self.wide(x))
    x = torch.tanh(self.one(x) + self.c(x[:, :4]))  # five rows, one row
    return F.linear(x, self.a.weight, self.a.bias)  # tied


def net(**more: nn.Module) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        layers = {"wide": nn.Linear(4, 5), "one": nn.Linear(5, 1)}
        model = Net(forward, norm=nn.BatchNorm1d(4), **layers, **more)
    model.scale = nn.Parameter(torch.tensor(1.5))
    model.c.bias.requires_grad = False
    del model.d
    return model


def gated(self: Any, x: Tensor) -> Tensor:
    return self.d(self.gate(torch.tanh(self.a(x))) + self.b(x))


def trained(
    folder: Path,
    model: nn.Module,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    shard: bool,
    trainer: dict[str, Any],
    **options: Any,
) -> tuple[list[Result], Any]:
    """Return what each rank has after some steps, and the plan."""
    kept = "optimizer" if shard else "off"
    program = written(folder, model, optimizer=optimizer, shard=kept, **options)
    plan = program.plan
    batches = [
        tuple(t.to(DOUBLE) for t in batch_of((X + step, X), plan.batch_size // len(X)))
        for step in range(STEPS)
    ]

    def work(runner: Trainer) -> Result:
        for given, wanted in batches:
            runner.step(given, wanted)
        updates = runner.worker.updates
        elements = [p.numel() for p in updates.parameters.values() if p.requires_grad]
        states = [] if updates.optimizer is None else updates.optimizer.state.values()
        kept = sum(t.nbytes for s in states for t in s.values() if torch.is_tensor(t))
        return runner.state_dict(), sum(elements), kept

    options = {"optimizer": optimizer, "dtype": DOUBLE, **trainer}
    return on_ranks(folder, plan.ranks, work, **options), plan


PLANS: dict[str, dict[str, Any]] = {
    "data": {"ranks": 4, "data": 2},
    "data of three": {"ranks": 3, "data": 3},
    "mast": {"ranks": 2, "schedule": "mast", "micro_batches": 2},
    "mast on three": {"ranks": 3, "schedule": "mast", "micro_batches": 2},
    "master": {"ranks": 2, "schedule": "master", "times": 2},
    "chimera and data": {"ranks": 4, "schedule": "chimera", "data": 2},
    "deferred": {"ranks": 4, "schedule": "zb-h1", "data": 2, "micro_batches": 3},
}


def changes(one: list[Result], other: list[Result]) -> dict[str, float]:
    """Return by how much the two models of each rank differ, where they do."""
    return {
        name: float((tensor - mine[0][name]).abs().max())
        for mine, theirs in zip(one, other, strict=True)
        for name, tensor in theirs[0].items()
        if not torch.equal(tensor, mine[0][name])
    }


@pytest.mark.slow(1)
@pytest.mark.by_day(3)
@pytest.mark.parametrize("name", PLANS)
def test_every_bit_of_the_model_stays(name: str, tmp_path: Path) -> None:
    both = [
        trained(
            tmp_path / str(shard),
            net(),
            adamw if "mast" in name else by_name,
            shard=shard,
            trainer={},
            **PLANS[name],
        )[0]
        for shard in (False, True)
    ]
    assert not changes(*both)
    before, after = (sum(elements for _, elements, _ in ranks) for ranks in both)
    model = net()
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert after == total < before


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "more",
    [
        {"clip_norm": 0.05},
        {
            "accumulate": 2,
            "scheduler": lambda made: torch.optim.lr_scheduler.StepLR(made, 1, 0.3),
        },
    ],
    ids=["clip", "accumulate, scheduler"],
)
def test_it_works_with_all_that_belongs_to_an_update(
    more: dict[str, Any], tmp_path: Path
) -> None:
    both = [
        trained(
            tmp_path / str(shard),
            net(),
            adamw,
            shard=shard,
            trainer=more,
            **PLANS["chimera and data"],
        )[0]
        for shard in (False, True)
    ]
    # which rank counts which gradient changes the last bit of the norm: of a gradient
    # that is all rounding, before a BatchNorm, Adam makes 1e-11
    assert max(changes(*both).values(), default=0.0) < 1e-10
    assert "clip_norm" in more or not changes(*both)


@pytest.mark.slow(1)
@pytest.mark.parametrize("schedule", ["1f1b", "mast"])
def test_gradients_that_are_absent_stay_so(schedule: str, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        gate = Gate()
    both = [
        trained(
            tmp_path / str(shard),
            Net(gated, gate=gate),
            adamw,
            shard=shard,
            trainer={},
            ranks=4,
            data=2,
            schedule=schedule,
        )[0]
        for shard in (False, True)
    ]
    assert not changes(*both)
    start = Net(gated, gate=gate).state_dict()
    held = {name: t for state, *_ in both[1] for name, t in state.items()}
    assert torch.equal(held["gate.never.weight"], start["gate.never.weight"].to(DOUBLE))
    assert not torch.equal(held["gate.up.weight"], start["gate.up.weight"].to(DOUBLE))


def test_whole_weights_of_tiles_are_shared_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 1, 3, padding=1))
    images = torch.randn(len(X), 1, 8, 6)
    given: dict[str, Any] = {"ranks": 2, "tiles": "2x1", "optimizer": adamw}
    comparison = against_one_process(
        tmp_path, model, (images,), target=images, shard="optimizer", **given
    )
    assert comparison.worst < 1e-12


@pytest.mark.slow
def test_what_an_optimizer_updates_as_a_whole_is_left_to_one_rank(
    tmp_path: Path,
) -> None:
    both = [
        trained(
            tmp_path / str(shard),
            net(),
            Lamb,
            shard=shard,
            trainer={},
            **PLANS["master"],
        )[0]
        for shard in (False, True)
    ]
    assert not changes(*both)
    text = (tmp_path / "True" / "rank0.py").read_text()
    assert "updated_whole={" in text
    assert '"wide.weight"' in text[text.index("updated_whole") :]
    shares = [elements for _, elements, _ in both[1]]
    assert max(shares) < 2 * min(shares)


class Anew(torch.optim.Optimizer):
    """Gives parameters other tensors, as many a one of third parties does."""

    def __init__(self, named: Any) -> None:
        super().__init__(named, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - 0.1 * p.grad


@pytest.mark.slow(1)
@pytest.mark.parametrize("name", ["data", "chimera and data"])
def test_an_optimizer_may_give_parameters_other_tensors(
    name: str, tmp_path: Path
) -> None:
    both = [
        trained(
            tmp_path / str(shard), net(), Anew, shard=shard, trainer={}, **PLANS[name]
        )[0]
        for shard in (False, True)
    ]
    assert not changes(*both)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda row: row.requires_grad_(False),
            r"requires_grad of '(\w+)(?s:.*)trainer\.freeze\(\"\1",
        ),
        (
            lambda row: row.register_hook(torch.zeros_like),
            r"a hook on '(?s:.*)register_step_pre_hook",
        ),
    ],
)
def test_rows_that_are_frozen_or_have_hooks_are_refused(
    change: Callable[[Tensor], object], text: str, tmp_path: Path
) -> None:
    def work(trainer: Trainer) -> None:
        assert trainer.optimizer is not None
        change(trainer.optimizer.param_groups[0]["params"][0])
        trainer.step(*batch_of((X, X), 2 * trainer.plan.micro_batches))

    written(tmp_path, net(), optimizer=adamw, shard="optimizer", **PLANS["data"])
    with pytest.raises(GemscError, match=text):
        on_ranks(tmp_path, 4, work, optimizer=adamw)


def test_rows_are_not_in_a_group_that_goes_by_sizes(tmp_path: Path) -> None:
    """On the first rank one group is empty, and the parameters have names."""
    numel = net().a.weight.numel()

    def by_size(named: Any) -> torch.optim.Optimizer:
        pairs = [*named]
        groups = ([pair for pair in pairs if of(pair[1].numel())] for of in sizes)
        return torch.optim.AdamW([{"params": group} for group in groups], lr=0.01)

    sizes = (lambda n: n < numel), (lambda n: n >= numel)
    written(tmp_path, net(), optimizer=adamw, shard="optimizer", **PLANS["master"])
    text = r"a part of '[\w.]+' otherwise than the whole"
    with pytest.raises(GemscError, match=text):
        on_ranks(tmp_path, 2, lambda trainer: None, optimizer=by_size)


@pytest.mark.slow(1)
@pytest.mark.parametrize("name", ["master", "data of three", "chimera and data"])
def test_predicted_state_is_that_of_the_fullest_rank(name: str, tmp_path: Path) -> None:
    of_ranks, plan = trained(
        tmp_path, net(), adamw, shard=True, trainer={"dtype": None}, **PLANS[name]
    )
    kept = [num_bytes for *_, num_bytes in of_ranks]
    assert max(kept) == max(part["optimizer"] for part in plan.memory)


@pytest.mark.slow
def test_predicted_state_of_whole_weights_is_enough(tmp_path: Path) -> None:
    of_ranks, plan = trained(
        tmp_path, net(), lambda named: torch.optim.Adafactor(named), shard=True,
        trainer={"dtype": None}, **PLANS["data of three"],
    )  # fmt: skip
    kept = [num_bytes for *_, num_bytes in of_ranks]
    assert max(kept) <= plan.memory[0]["optimizer"] < sum(kept)


@pytest.mark.slow
def test_predicted_memory_is_measured(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(6)))
    x = torch.randn(2, 24)
    peaks = []
    for shard in ("off", "optimizer"):
        program = written(
            tmp_path, model, (x,), target=x, ranks=2, schedule="master", times=2,
            optimizer=adamw, shard=shard,
        )  # fmt: skip
        batch = batch_of(((x,), x), program.plan.micro_batches)
        record = run_on_threads(
            tmp_path, 2, [batch] * 2, dtype=torch.float32, optimizer=adamw
        )
        assert max(record.peak_bytes) == max(metered_peaks(program.plan))
        peaks.append(max(record.peak_bytes))
    trained_bytes = sum(p.nbytes for p in model.parameters())
    assert peaks[0] - peaks[1] == trained_bytes  # two states of half of the rows


@pytest.mark.slow
def test_verify_sees_whole_gradients(tmp_path: Path) -> None:
    comparison = against_one_process(
        tmp_path, net(), optimizer=adamw, micro_batches=4, schedule="chimera",
        shard="optimizer",
    )  # fmt: skip
    assert comparison.worst < 1e-10  # Adam enlarges what rounding leaves of b.bias


@pytest.mark.slow
def test_a_checkpoint_of_rows_goes_on_with_them_and_without(tmp_path: Path) -> None:
    given = {"optimizer": adamw, **PLANS["mast"]}
    for name, kept in (("with", "optimizer"), ("without", "off")):
        written(tmp_path / name, net(), shard=kept, **given)
    batch = batch_of((X, X), 2)

    def train(steps: int, *, resume: bool = False) -> Callable[[Trainer], Any]:
        def work(trainer: Trainer) -> dict[str, Tensor]:
            if resume:
                trainer.resume(tmp_path / "saved")
            for _ in range(steps):
                trainer.step(*batch)
            if not resume:
                trainer.save(tmp_path / "saved")
            return {name: t.clone() for name, t in trainer.state_dict().items()}

        return work

    folder = tmp_path / "with"
    expected = on_ranks(folder, 2, train(3), optimizer=adamw)
    on_ranks(folder, 2, train(2), optimizer=adamw)
    states = on_ranks(folder, 2, train(1, resume=True), optimizer=adamw)
    for mine, theirs in zip(states, expected, strict=True):
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    states = on_ranks(tmp_path / "without", 2, train(1, resume=True), optimizer=adamw)
    for mine, theirs in zip(states, expected, strict=True):
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=0)


# ---------------------------------------------------------------- at compile time


@pytest.mark.slow
def test_where_it_has_no_effect_it_is_refused(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(GemscError, match="each weight is on one rank") as error:
        written(tmp_path, plain, shard="optimizer")
    assert (
        error.value.help
        == "use --data 2 or --schedule mast, or leave out --shard optimizer"
    )
    written(tmp_path, plain, shard="optimizer", data=2)
    with pytest.raises(GemscError, match="a program that cannot train"):
        written(tmp_path, plain, loss=None, shard="optimizer", data=2)


@pytest.mark.parametrize("level", ["off", "optimizer", "gradients", "weights"])
def test_older_plans_and_files_said_it_in_other_words(
    level: str, tmp_path: Path
) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = written(tmp_path, plain, shard=level, data=2).plan
    assert ("shard=" in (tmp_path / "rank0.py").read_text()) == (level != "off")
    words = "shard_optimizer=True,"
    if level in ("gradients", "weights"):
        words += " shard_gradients=True,"
    replaced(tmp_path / "rank0.py", f'shard="{level}",', words)
    older = f"shard_optimizer = {str(level != 'off').lower()}\n"
    if level != "optimizer":
        older += f'shard = "{level}"\n'
    replaced(tmp_path / "plan.toml", f'shard = "{level}"\n', older)
    read = Plan.read(tmp_path / "plan.toml")
    assert read == plan
    assert CompileOptions(**read.choices).shard == level
    assert EditedPlan.read(tmp_path / "plan.toml").options().shard == level
    assert load_rank_module(tmp_path, 0).PROGRAM.shard == level


def replaced(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def test_the_first_level_has_another_name() -> None:
    options = CompileOptions(data=2, shard_optimizer=True)
    assert options == CompileOptions(data=2, shard="optimizer")
    assert options.command_line() == "--ranks 4 --data 2 --shard optimizer"
    more = CompileOptions(data=2, shard_optimizer=True, shard="weights")
    assert more == replace(options, shard="weights")


@pytest.mark.slow
def test_show_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    plan = written(
        tmp_path, net(), optimizer=adamw, shard="optimizer", **PLANS["master"]
    ).plan
    show(plan, Console(width=200))
    assert "optimizer state in parts: ranks that hold" in capsys.readouterr().out


@pytest.mark.parametrize("holders", [1, 2, 3, 7])
def test_rows_are_shared_out(holders: int) -> None:
    shapes = {"number": (), "one": (1, 9), "five": (5,), "many": (64, 3), "none": (0,)}
    for whole in ((), ("five", "many", "one")):
        shares = rows_of_holders(shapes, holders, whole)
        assert shares.keys() == shapes.keys()
        for name, rows in shares.items():
            size = shapes[name][0] if shapes[name] else 1
            assert rows[0][0] == 0
            assert rows[-1][1] == size
            assert all(one[1] == other[0] for one, other in pairwise(rows))
            sizes = [stop - start for start, stop in rows]
            assert sizes[-1] == max(sizes) or name in whole
            assert max(sizes) - min(sizes) <= 1 or name in whole
            assert name not in whole or sorted(sizes)[-1] == size
    if holders == 3:  # each of them has one
        owners = {next(i for i, r in enumerate(shares[n]) if r[1]) for n in whole}
        assert len(owners) == 3


def test_an_exchange_takes_half_of_an_all_reduce() -> None:
    network = Network(
        ranks_per_node=1,
        intra=LinkSpeed(latency=1e-6, bandwidth=1e9),
        inter=LinkSpeed(latency=1e-6, bandwidth=1e9),
    )
    (cost,) = reduce_scatter(network, [range(4)], [8_000_000])
    rate = network.allreduce.efficiency * 1e9
    sent = 3 * (1e-6 + 2_000_000 / rate)
    assert cost.gather == pytest.approx(sent)
    adding = 3 * 2_000_000 / network.allreduce.reduce_bandwidth
    assert cost.seconds == pytest.approx(sent + adding)
    assert cost.updaters == 4
    for size in (2, 5, 17, 18, 100):
        rounds = exchange(size, adds=True)
        assert sum(step.repeats for step in rounds) == size - 1
        distances = {(step.pairs[0][1]) for step in rounds}
        assert distances <= set(range(1, size))
        assert len(distances) == len(rounds) <= 17


# ----------------------------------------------------------------- under mpirun


@pytest.mark.mpi
@pytest.mark.usefixtures("engine")
@pytest.mark.nightly
def test_the_saved_model_is_the_same_bit_for_bit(gemsc: Gemsc, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    for name, words in (("without", ()), ("with", ("--shard-optimizer",))):
        program = tmp_path / name
        given = ("--ranks", 2, "--schedule", "mast", *words)
        done = gemsc("compile", path, *given, "-o", program)
        assert done.code == 0, done.err
        done = gemsc("run", program, "--steps", 3, "--save", tmp_path / f"{name} saved")
        assert done.code == 0, done.out + done.err
    one, other = (
        load_file(tmp_path / f"{name} saved" / "model.safetensors")
        for name in ("without", "with")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
