"""Blocks that run again in the backward: the same numbers, less memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import MODEL, Gemsc, gemsc_here
from parity_support import lowered, traced, trained
from plan_support import metered_peaks
from program_support import Net, against_one_process, on_ranks, written
from safetensors.torch import load_file
from threads import run_on_threads
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gemsc.base import rng
from gemsc.base.rng import same_draws
from gemsc.codegen.package import write_directory
from gemsc.compiler import lower, trace
from gemsc.errors import GemscError
from gemsc.options import CompileOptions
from gemsc.planner.edited import EditedPlan
from gemsc.runtime import recompute
from gemsc.verify.compare import compare

gemsc = pytest.fixture(gemsc_here)
CHOICES = (
    CompileOptions(ranks=2, micro_batches=4),
    CompileOptions(ranks=2, schedule="master", times=2),
    CompileOptions(ranks=4, data=2, micro_batches=2),
    CompileOptions(ranks=3, schedule="gpipe", micro_batches=3),
    CompileOptions(ranks=2, placement="folded", micro_batches=3),
)
MODULES = {"unet": "enter,down,up", "resnet18": "layer1,layer3", "encoder": "layers"}


# by day each choice for one model, and all of them for the one that is fastest
ROWS = [
    pytest.param(
        name,
        choice,
        id=f"{name} {choice.command_line()}",
        marks=() if name == "encoder" or at % 2 == number else pytest.mark.nightly,
    )
    for number, name in enumerate(MODULES)
    for at, choice in enumerate(CHOICES)
]


@pytest.mark.slow(1)
@pytest.mark.by_day(2)
@pytest.mark.parametrize(("name", "options"), ROWS)
def test_it_changes_no_bit_and_frees_what_was_predicted(
    name: str, options: CompileOptions, tmp_path: Path
) -> None:
    whole = options.schedule == "gpipe"  # modules of many blocks
    names = tuple(MODULES[name].split(",")) if whole else ("all",)
    choice = replace(options, recompute=names)
    float32 = torch.float32
    expected, kept = trained(name, options, tmp_path / "kept", float32)
    record, program = trained(name, choice, tmp_path / "again", float32)
    diff = compare(record, expected)
    assert diff.equal == diff.total  # gradients, parameters and running statistics
    assert record.losses == expected.losses
    plan = program.plan
    assert record.activation_bytes == plan.activation_bytes * plan.data
    assert record.peak_bytes == metered_peaks(plan) * plan.data
    assert sum(plan.activation_bytes) < sum(kept.plan.activation_bytes)
    assert plan.step_seconds > kept.plan.step_seconds


class Dropped(nn.Module):
    """Convolutions, norms and dropout; the first layers draw, the rest does not."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout2d(0.3))
        self.b = nn.Sequential(nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8, affine=True))
        self.c = nn.Sequential(nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4, momentum=0.3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.relu(self.a(x)), 0.2, self.training)
        return self.c(torch.relu(self.b(x))).mean((2, 3))


def picture_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


@pytest.mark.slow
def test_dropout_draws_the_same_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, target = Dropped(), torch.randn(2, 3, 12, 12), torch.randn(2, 4)
    batch = torch.randn(6, 3, 12, 12), torch.randn(6, 4)
    records = []
    for names in ((), ("all",), ("a",)):
        directory = tmp_path / "-".join(["program", *names])
        written(
            directory, model, (x,), picture_loss, target,
            ranks=1, micro_batches=3, recompute=names,
        )  # fmt: skip
        records.append(run_on_threads(directory, 1, [batch] * 2))
        assert ("recompute(" in (directory / "rank0.py").read_text()) == bool(names)
    for record in records[1:]:
        diff = compare(record, records[0])
        assert diff.equal == diff.total
    assert records[1].activation_bytes[0] < records[0].activation_bytes[0]


@pytest.mark.slow
def test_evaluation_recomputes_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, target = Dropped(), torch.randn(2, 3, 12, 12), torch.randn(2, 4)
    outputs = []
    for names in ((), ("all",)):
        directory = tmp_path / "-".join(["program", *names])
        written(
            directory, model, (x,), picture_loss, target,
            ranks=1, micro_batches=1, recompute=names,
        )  # fmt: skip
        (evaluated,) = on_ranks(directory, 1, lambda t: t.evaluate((x,), target))
        outputs.append(evaluated.output)
    assert torch.equal(outputs[0], model.eval()(x))
    assert torch.equal(outputs[1], outputs[0])


class Stage(nn.Module):
    """What a generated stage looks like to the runtime."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.norm = nn.BatchNorm1d(4)
        self.layer = nn.Linear(4, 4)

    def block(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        h = torch.tanh(self.norm(self.layer(x)))
        return h, h.square()


def test_several_outputs_and_statistics_that_advance_once() -> None:
    torch.manual_seed(0)
    plain, stage = Stage(), Stage()
    stage.load_state_dict(plain.state_dict())
    for number in range(3):
        x = torch.randn(5, 4, requires_grad=number > 0)  # the first needs no gradient
        other = x.detach().clone().requires_grad_(x.requires_grad)
        for result in (plain.block(x), recompute(stage.block, other)):
            (result[0].sum() + result[1].prod()).backward()
        if number:
            assert torch.equal(x.grad, other.grad)
    assert (plain.calls, stage.calls) == (3, 6)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(stage.state_dict()[name], tensor), name
    for mine, theirs in zip(stage.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


class Product(torch.autograd.Function):
    """Reads what it has saved twice: each time all of it is unpacked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x = ctx.saved_tensors[0]
        y = ctx.saved_tensors[1]
        return gradient * y, gradient * x


@pytest.mark.parametrize("on_tiles", [False, True])
def test_what_is_saved_may_be_read_twice(on_tiles: bool) -> None:
    class Products(Stage):
        def block(self, x: Tensor) -> Tensor:
            self.calls += 1
            h = self.layer(x)
            return Product.apply(h.tanh(), h.sin())

    stage = Products()
    if on_tiles:
        stage.grid = None  # all that says that it is on tiles
    x = torch.randn(5, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(stage.block(x).sum(), x)
    (gradient,) = torch.autograd.grad(recompute(stage.block, x).sum(), x)
    assert torch.equal(gradient, expected)
    assert stage.calls == 3


def test_noise_that_is_written_after_it_is_saved_is_drawn_again() -> None:
    """autograd saves the noise of rrelu before the operator has drawn it."""

    class Noisy(Stage):
        draws_random_numbers = True

        def block(self, x: Tensor) -> Tensor:
            return F.rrelu(self.layer(x), 0.1, 0.9, training=True)

    stage, x = Noisy(), torch.randn(500, 4, requires_grad=True)
    gradients = []
    for run in (stage.block, lambda x: recompute(stage.block, x)):
        torch.manual_seed(0)
        gradients += torch.autograd.grad(run(x).sum(), x)
    assert torch.equal(gradients[1], gradients[0])


def test_forwards_in_flight_do_not_disturb_each_other() -> None:
    stage = Stage()
    inputs = [torch.randn(5, 4, requires_grad=True) for _ in range(3)]
    results = [recompute(stage.block, x)[0].square().sum() for x in inputs]
    expected = [
        torch.autograd.grad(stage.block(x)[0].square().sum(), x)[0] for x in inputs
    ]
    for x, result, gradient in zip(inputs, results, expected, strict=True):
        result.backward()
        assert torch.equal(x.grad, gradient)


def test_a_rank_that_recomputes_does_not_disturb_what_another_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks on threads share one generator: another one has seeded it and is to draw.

    main      forward                 block again ...
    other              seeds, waits                  draws
    """
    seeded, again = threading.Event(), threading.Event()

    class Dropping(Stage):
        draws_random_numbers = True

        def block(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 2:
                again.set()
            return F.dropout(self.norm(self.layer(x)), 0.5).square()

    def draw() -> Tensor:
        with same_draws():
            return F.dropout(torch.ones(40), 0.5)

    seed, expected = rng.seed_torch, draw()

    def seed_and_wait(number: int) -> None:
        seed(number)
        if threading.current_thread() is not threading.main_thread():
            seeded.set()
            assert again.wait(60)

    with same_draws(), ThreadPoolExecutor(1) as other:
        stage, x = Dropping(), torch.randn(5, 4, requires_grad=True)
        result = recompute(stage.block, x)
        monkeypatch.setattr(rng, "seed_torch", seed_and_wait)
        drawn = other.submit(draw)
        assert seeded.wait(60)
        result.sum().backward()
        assert torch.equal(drawn.result(), expected)
    assert x.grad is not None
    gradient, x.grad, stage.calls = x.grad, None, 3
    with same_draws():
        stage.block(x).sum().backward()
    assert torch.equal(x.grad, gradient)


def test_an_unknown_name_is_told_with_those_near(tmp_path: Path) -> None:
    with pytest.raises(GemscError, match="no block lies in a module 'layer9'") as error:
        lower(traced("resnet18"), CompileOptions(recompute=("layer9",)))
    assert "layer" in error.value.help


def test_a_block_is_named_once() -> None:
    names = ("layer1.0",)
    with pytest.raises(
        GemscError, match="named twice, by --recompute and by --offload"
    ):
        lower(traced("resnet18"), CompileOptions(recompute=names, offload=names))


def test_all_leaves_out_what_is_named_for_something_else() -> None:
    options = CompileOptions(ranks=1, recompute=("all",), offload=("layer2",))
    (stage,) = lower(traced("resnet18"), options).plan.stages
    assert stage.offload == ["layer2"]
    assert "layer1.0" in stage.recompute
    assert not [name for name in stage.recompute if name.startswith("layer2")]


def test_a_block_goes_by_its_own_name_before_that_of_its_module() -> None:
    options = CompileOptions(recompute=("layer1",), offload=("layer1.0",))
    program = lower(traced("resnet18"), options)
    first = program.plan.stages[0]
    assert first.recompute == ["layer1"]
    assert first.offload == ["layer1.0"]


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    "options",
    [
        CompileOptions(recompute=("all",)),
        CompileOptions(recompute=("layer1", "layer2.0"), offload=("fc",)),
        CompileOptions(recompute=("layer1.1..layer2.1", "layer3.0")),
    ],
    ids=CompileOptions.command_line,
)
def test_an_edited_plan_keeps_them(options: CompileOptions, tmp_path: Path) -> None:
    program = lowered("resnet18", options)
    write_directory(program.compilation, tmp_path / "one")
    edited = EditedPlan.read(tmp_path / "one" / "plan.toml")
    edited.check(traced("resnet18").program.blocks or ())
    again = lower(traced("resnet18"), edited.options())
    assert again.compilation.program.segments == program.compilation.program.segments


class Attending(nn.Module):
    """Its block is called as it is, and the one of a layer in it draws in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.softmax(x @ x.mT, 2) @ x
        return self.layer(x) * torch.empty(len(x), 1, 1).bernoulli_(0.5)


def test_all_takes_a_block_without_the_others_of_its_module(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Attending(), nn.Linear(4, 4))
    x, options = torch.randn(2, 8, 4), CompileOptions(ranks=1, recompute=("all",))
    graph = trace(model, (x,), loss=F.mse_loss, example_target=x)
    program = lower(graph, options)
    (stage,) = program.plan.stages
    assert stage.blocks == ["0", "1", "1.layer", "2"]
    assert stage.recompute == ["1..1", "2"]
    write_directory(program.compilation, tmp_path)
    edited = EditedPlan.read(tmp_path / "plan.toml")
    edited.check(graph.program.blocks or ())
    again = lower(graph, edited.options()).compilation.program
    assert again.segments == program.compilation.program.segments


def test_blocks_from_the_first_to_the_last_are_one() -> None:
    options = CompileOptions(ranks=1, recompute=("layer1.1..layer2.1",))
    program = lower(traced("resnet18"), options).compilation.program
    (segment,) = program.segments or ()
    names = [program.blocks[index].name for index in segment.blocks]
    assert names == ["layer1.1", "layer2.0", "layer2.1"]
    wrong = CompileOptions(ranks=1, recompute=("layer1.1..layer2.7",))
    with pytest.raises(GemscError, match=r"no block lies in a module 'layer2\.7'"):
        lower(traced("resnet18"), wrong)


@pytest.mark.parametrize("word", ["all", "auto"])
def test_words_and_names_do_not_mix(word: str) -> None:
    with pytest.raises(GemscError, match=f"mixes '{word}' with names"):
        CompileOptions(recompute=("layer1", word))


class Forked(nn.Module):
    """Branches that no module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 32), nn.Linear(64, 4)
        self.a = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.b = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.cat([self.a(x), self.b(x)], 1))


@pytest.mark.slow
def test_a_fork_of_which_a_part_is_recomputed_says_from_where_to_where(
    tmp_path: Path,
) -> None:
    given: dict[str, Any] = {"target": torch.zeros(4, 4), "branches": 2}
    given |= {"ranks": 2, "micro_batches": 1}
    x = torch.randn(4, 8)
    for recompute_of in ("all", "a"):
        with pytest.raises(GemscError, match="recompute all of it or nothing") as error:
            written(tmp_path, Forked(), (x,), recompute=recompute_of, **given)
        run = error.value.message.rpartition("--recompute ")[2]
        assert run == "a.0..head"
    program = written(tmp_path, Forked(), (x,), recompute=run, **given)
    assert program.plan.stages[0].forks[0].placed


def test_auto_needs_a_cap() -> None:
    options = CompileOptions(recompute=("auto",), hardware="h100")
    with pytest.raises(GemscError, match="auto needs to know how much") as caught:
        lower(traced("resnet18"), options)
    assert caught.value.help == "add --device-memory 80GiB"  # of that machine


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(self.first(x), self.mean, self.var, training=self.training)
        return self.second(torch.relu(x))


@pytest.mark.slow
def test_a_block_that_writes_cannot_run_twice(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    arguments = (tmp_path / "program", Counting(), (x,), F.mse_loss, x)
    with pytest.raises(GemscError, match="would change it twice"):
        written(*arguments, ranks=1, recompute=("first",))
    written(*arguments, ranks=1, recompute=("all",))
    text = (tmp_path / "program" / "rank0.py").read_text()
    assert "first_block" not in text


@pytest.mark.mpi(2)
@pytest.mark.usefixtures("engine")
@pytest.mark.nightly
def test_under_mpirun_with_dropout(tmp_path: Path, gemsc: Gemsc) -> None:
    text = MODEL.replace("Dropout(0.1)", "Dropout(0.5)")
    text = text.replace(
        "    return Net()", "    torch.manual_seed(0)\n    return Net()"
    )
    text = text.replace(
        "return torch.randn(8)", "return torch.arange(8.0) / (1 + index)"
    )
    (tmp_path / "model.py").write_text(text)
    weights = []
    for name in ("off", "all"):
        program, saved = tmp_path / name, tmp_path / f"{name}-saved"
        words = ("--recompute", name, "--ranks", 1, "-o", program)
        assert gemsc("compile", tmp_path / "model.py", *words).code == 0
        assert gemsc("run", program, "--steps", 3, "--save", saved).code == 0
        weights.append(load_file(saved / "model.safetensors"))
    assert "recompute" in (tmp_path / "all" / "rank0.py").read_text()
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


@pytest.mark.slow
def test_a_checkpoint_of_the_user_updates_statistics_once(tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = checkpoint(lambda x: self.norm(self.b(self.a(x))), x, use_reentrant=False)
        return self.d(self.c(x))

    net = Net(forward, norm=nn.BatchNorm1d(4))
    diff = against_one_process(tmp_path, net)
    assert diff.worst < 1e-9
    assert diff.worst_of("buffer")[0] == 0.0
    state = load_file(tmp_path / "state0.safetensors")
    assert int(state["norm.num_batches_tracked"]) == 3 * 2  # micro-batches, steps
