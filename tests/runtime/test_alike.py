"""Batches of an own loop, copies of weights, and files that differ between ranks."""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import training_support
from program_support import Net, X, on_ranks, trunk, written
from torch import nn

from gemsc.errors import GemscError
from gemsc.launch.launch import launch
from gemsc.plan import Plan
from gemsc.runtime.data.tiled import Window, whole_window
from gemsc.runtime.training import train
from gemsc.runtime.training.alike import (
    SameBatches,
    SameCopies,
    check_same_files,
    own_files,
)
from gemsc.runtime.training.arguments import parse_arguments
from gemsc.runtime.training.step_report import StepReport
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.transport import Transport

PART = torch.cat([X, X + 1])  # two micro-batches
OTHER = PART.index_fill(1, torch.tensor([0]), 0.5)


def program_of(folder: Path, **options: Any) -> Path:
    options = {"ranks": 2, "micro_batches": 2, **options}
    written(folder / "program", trunk(), **options)
    return folder / "program"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program_of(tmp_path_factory.mktemp("same"))


def differing(place: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    other = OTHER if rank else PART
    return (PART, other) if place == "target" else (other, PART)


@pytest.mark.parametrize("what", ["step", "evaluation"])
@pytest.mark.parametrize("place", ["input[0]", "target"])
def test_a_batch_that_differs_is_refused(what: str, place: str, program: Path) -> None:
    begun: list[int] = []

    def work(trainer: Trainer) -> None:
        trainer.add_callbacks([SameBatches()])
        do: Any = trainer.step if what == "step" else trainer.evaluate
        for equal in (True, True, False, True):  # the third is not looked at
            rank = 0 if equal else trainer.transport.rank
            do(*differing(place, rank))
            begun.append(rank)
        trainer.evaluate(PART, PART) if what == "step" else trainer.step(PART, PART)
        for _ in range(3):
            do(PART, PART)
        do(*differing(place, trainer.transport.rank))
        begun.append(8)

    match = re.escape(f"ranks 0 and 1 got different batches: {place} of {what} 8")
    with pytest.raises(GemscError, match=match) as caught:
        on_ranks(program, 2, work)
    assert "generator=torch.Generator().manual_seed(0)" in str(caught.value.help)
    assert 8 not in begun
    assert len(begun) == 8


def test_what_a_rank_does_not_get_is_not_compared(program: Path) -> None:
    def work(trainer: Trainer) -> None:
        trainer.add_callbacks([SameBatches()])
        first = trainer.transport.rank == 0
        trainer.step(PART if first else None, None if first else PART)

    on_ranks(program, 2, work)


def test_windows_are_not_compared(program: Path) -> None:
    seen = list[int]()

    def work(trainer: Trainer) -> None:
        given = "step", {"input": differing("input", trainer.transport.rank)[0]}
        windows: list[Window | None] = [whole_window((4, 4)), None]
        callbacks = [SameBatches(), SameBatches()]
        for callback, window in zip(callbacks, windows, strict=True):
            callback.on_batch(trainer, *given, window)
            seen.append(trainer.transport.rank)

    with pytest.raises(
        GemscError, match="ranks 0 and 1 got different batches: input of step 1"
    ):
        on_ranks(program, 2, work)
    assert sorted(seen) == [0, 1]


def test_copies_may_get_their_parts_and_ranks_of_one_the_same(tmp_path: Path) -> None:
    program = program_of(tmp_path, ranks=4, data=2)
    whole = torch.cat([PART, OTHER])

    def train(*batches: torch.Tensor) -> None:
        def work(trainer: Trainer) -> None:
            trainer.add_callbacks([SameBatches()])
            batch = batches[trainer.transport.rank]
            trainer.step(batch, batch)

        on_ranks(program, 4, work)

    train(PART, PART, OTHER, OTHER)
    train(whole, whole, whole, whole)
    with pytest.raises(GemscError, match="ranks 2 and 3 got different batches"):
        train(PART, PART, OTHER, PART)
    with pytest.raises(GemscError, match="ranks 0 and 2 got different batches"):
        train(whole, whole, whole.flip(0), whole.flip(0))


LOOP = """\
import os
import gemsc
import torch

rank = os.environ["OMPI_COMM_WORLD_RANK"]
trainer = gemsc.load("program" + rank)  # a copy on each machine
torch.manual_seed(int(rank))  # as an own generator on each rank
batch = torch.randn(4, 4)
print([type(each).__name__ for each in trainer.callbacks], flush=True)
trainer.step(batch, batch)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("is_old", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_loop_with_other_batches_or_another_program_is_refused(
    is_old: bool, program: Path, tmp_path: Path
) -> None:
    for rank in (0, 1):
        shutil.copytree(program, tmp_path / f"program{rank}")
    if is_old:
        (tmp_path / "program1/rank1.py").write_text("")
    (tmp_path / "loop.py").write_text(LOOP)
    with (tmp_path / "said").open("w") as said:
        words = [sys.executable, "loop.py"]
        how: Any = {"cwd": tmp_path, "stdout": said, "stderr": said}
        assert launch(2, words, **how, timeout=120) == 1
    text = (tmp_path / "said").read_text()
    error = "10: error: ranks 0 and 1 got different batches: input[0] of step 1"
    if is_old:
        error = "6: error: ranks 0 and 1 have different versions of rank1.py"
    assert f"loop.py:{error}\n" in text
    note = "note: gemsc.load() got no optimizer=: it trains with SGD, learning rate"
    assert text.count(note) == (not is_old)
    names = ["StepsOfScheduler", "SameBatches", "SameCopies", "SameNumbers"]
    names += ["LabelsThatCount", "RoundedNumbers", "UnreadInputs", "DefaultOptimizer"]
    callbacks = f"{names}\n"
    assert text.count(callbacks) == 2 * (not is_old)


def test_an_evaluation_on_one_rank_alone_is_refused(program: Path) -> None:
    def work(trainer: Trainer) -> None:
        do: Any = trainer.step if trainer.transport.rank else trainer.evaluate
        do(PART, PART)

    with pytest.raises(GemscError, match="1 of 2 ranks train, while others evaluate"):
        on_ranks(program, 2, work)


@pytest.mark.parametrize("call", ["evaluate", "save", "freeze", "unfreeze", "resume"])
@pytest.mark.parametrize("alone", [0, 1])
def test_a_call_of_one_rank_alone_is_refused(
    call: str, alone: int, program: Path, tmp_path: Path
) -> None:
    """As in `if rank == 0: trainer.save(...)`, where the others take a step."""
    given: dict[str, Any] = {"evaluate": (PART, PART), "save": (tmp_path,)}
    given |= {"resume": (tmp_path / "before",), "freeze": ("a",), "unfreeze": ("a",)}

    def work(trainer: Trainer) -> None:
        trainer.save(tmp_path / "before")
        trainer.add_callbacks([SameBatches()])
        if trainer.transport.rank == alone:
            getattr(trainer, call)(*given[call])
        trainer.step(PART, PART)

    says = rf"trainer\.({call}|step)\(\), where rank . calls trainer\.({call}|step)\(\)"
    with pytest.raises(GemscError, match=says):
        on_ranks(program, 2, work)


@pytest.mark.parametrize(
    ("mode", "call", "says"),
    [
        (torch.no_grad, "step", "step() is called where gradients are off"),
        (torch.inference_mode, "step", "step() is called where gradients are off"),
        (partial(torch.autocast, "cpu"), "step", "step() is called within autocast"),
        (partial(torch.autocast, "cpu"), "evaluate", "evaluate() is called within"),
        (torch.no_grad, "evaluate", ""),
        (torch.inference_mode, "evaluate", ""),
    ],
)
def test_modes_of_a_loop_are_not_those_of_a_program(
    mode: Any, call: str, says: str, program: Path
) -> None:
    def work(trainer: Trainer) -> None:
        with mode():
            getattr(trainer, call)(PART, PART)

    expects = (
        pytest.raises(GemscError, match=re.escape(says)) if says else nullcontext()
    )
    with expects:
        on_ranks(program, 2, work)


# ---------------------------------------------------------------- copies of weights


class Tied(Net):
    """The first and the last layer, on two ranks, have one weight; with statistics."""

    def __init__(self) -> None:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return self.d(self.norm(self.b(self.a(x).tanh())).tanh())

        super().__init__(forward, norm=nn.BatchNorm1d(4))
        self.d.weight = self.a.weight
        self.register_buffer("phase", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("which", torch.tensor([True, False]))
        self.register_buffer("rounded", torch.ones((), dtype=torch.bfloat16))
        self.register_buffer("empty", torch.ones(0))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied") / "program"
    written(folder, Tied(), ranks=4, data=2, micro_batches=2, cuts=("d",))
    return folder


def saved(program: Path, folder: Path, change: Any) -> None:
    """Make a step on four ranks, then a change, then a checkpoint."""
    batch = torch.cat([PART, OTHER])

    def work(trainer: Trainer) -> None:
        trainer.add_callbacks([SameCopies()])
        trainer.step(batch, batch)
        with torch.no_grad():
            change(trainer)
        trainer.save(folder)

    on_ranks(program, 4, work)


def test_copies_that_are_equal_are_no_news(
    tied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tied, tmp_path / "saved", lambda trainer: None)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "rank", "others"),
    [
        *(("a.weight", rank, (0, 1) if rank == 1 else (0, rank)) for rank in (1, 2, 3)),
        ("a.weight", 0, (0, 1)),
        ("norm.running_var", 2, (0, 2)),
        ("d.bias", 3, (1, 3)),
    ],
)
def test_a_copy_that_is_another_one_is_told(
    name: str,
    rank: int,
    others: tuple[int, int],
    tied: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def change(trainer: Trainer) -> None:
        if trainer.transport.rank == rank:
            tensor = trainer.state_dict()[name].view(-1)
            tensor[0] = torch.nextafter(tensor[0], torch.tensor(9.0))

    saved(tied, tmp_path / "saved", change)
    first, second = others
    text = f"warning: ranks {first} and {second} have different copies of '{name}' "
    err = capsys.readouterr().err
    assert err.startswith(f"{text}after step 1: ")
    assert err.count("warning") == 1


@pytest.mark.parametrize("is_everywhere", [False, True])
@pytest.mark.parametrize(
    ("what", "options"), [("copies", {"data": 2, "cuts": ()}), ("learning rates", {})]
)
def test_a_hook_that_changes_a_rate_on_one_rank_is_found(
    what: str,
    options: dict[str, Any],
    is_everywhere: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def on_step(trainer: Trainer, report: StepReport) -> None:
        if is_everywhere or trainer.transport.rank == 0:
            assert trainer.optimizer is not None
            trainer.optimizer.param_groups[0]["lr"] /= 10

    path = training_support.program(tmp_path, ranks=2, **options)
    user = training_support.user_of(on_step=on_step)
    training_support.run(path, user, "--epochs", "3", "--save", str(tmp_path / "saved"))
    err = capsys.readouterr().err
    assert (f"warning: ranks 0 and 1 have different {what} " in err) != is_everywhere


def test_groups_that_began_with_other_rates_may_go_on_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def optimizer(named: Any) -> torch.optim.Optimizer:
        groups = [{"params": [p], "lr": 0.1 if "a." in n else 0.2} for n, p in named]
        return torch.optim.SGD(groups)

    def on_epoch(trainer: Trainer, epoch: int, figures: Any) -> None:
        assert trainer.optimizer is not None
        for group in trainer.optimizer.param_groups:
            group["lr"] /= 10

    path = training_support.program(tmp_path, ranks=2)
    user = training_support.user_of(on_epoch=on_epoch, optimizer=optimizer)
    training_support.run(path, user, "--epochs", "3", "--save", str(tmp_path / "saved"))
    assert "warning" not in capsys.readouterr().err


def test_statistics_of_tiles_of_their_own_are_not_compared(
    tied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(trainer: Trainer) -> None:
        trainer.plan.options["local_batchnorm"] = True
        state = trainer.state_dict()
        state.get("norm.running_var", torch.zeros(4)).add_(trainer.transport.rank)

    saved(tied, tmp_path / "saved", change)
    assert capsys.readouterr().err == ""


# --------------------------------------------------------------------------- files


@pytest.fixture
def copies(tmp_path: Path) -> list[Path]:
    """Four folders as on four machines: a file of the user's and its program."""
    program_of(tmp_path / "0", ranks=4, data=2)
    (tmp_path / "0/model.py").write_text("RATE = 0.1\n")
    for rank in (1, 2, 3):
        shutil.copytree(tmp_path / "0", tmp_path / f"{rank}")
    return [tmp_path / f"{rank}" for rank in range(4)]


def check_copies(copies: list[Path]) -> None:
    def work(transport: Transport) -> None:
        folder = copies[transport.rank]
        plan = Plan.read(folder / "program/plan.toml")
        plan = replace(plan, spec=f"{folder}/model.py")
        check_same_files(folder / "program", plan, transport)

    run_local(4, work)


def test_machines_may_have_equal_copies(copies: list[Path]) -> None:
    (copies[1] / "program/rank0.py").write_text("# which this rank does not run\n")
    check_copies(copies)


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    ("rank", "file"),
    [(1, "rank1.py"), (2, "rank0.py"), (3, "rank1.py"), (3, "model.py")],
)
def test_an_old_copy_of_a_file_is_refused(
    rank: int, file: str, copies: list[Path]
) -> None:
    folder = copies[rank] / "program" if "rank" in file else copies[rank]
    with (folder / file).open("a") as text:
        text.write("# older\n")
    match = f"ranks 0 and {rank} have different versions of {file}"
    with pytest.raises(GemscError, match=match):
        check_copies(copies)


def test_an_old_copy_of_what_the_file_imports_is_refused(
    copies: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, folder in enumerate(copies):
        for name in ("parts/rates.py", "lib/site-packages/torch.py"):
            (folder / name).parent.mkdir(parents=True)
            (folder / name).write_text(f"RATE = {rank if 'lib' in name else 0.1}\n")
            module = SimpleNamespace(__file__=str(folder / name))
            monkeypatch.setitem(sys.modules, f"{name} of {rank}", module)
    check_copies(copies)
    (copies[2] / "parts/rates.py").write_text("RATE = 0.3\n")
    match = "ranks 0 and 2 have different versions of parts/rates.py"
    with pytest.raises(GemscError, match=match):
        check_copies(copies)


def test_an_old_copy_of_a_variant_is_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        x = [torch.randn(2, 3, 4), torch.randn(2, 5, 4)]
        given: Any = {"inputs": [(tensor,) for tensor in x], "target": x}
        folder = tmp_path / f"{rank}"
        written(folder, Net(lambda self, x: self.b(self.a(x))), ranks=2, **given)
    names = {path.name for path in (tmp_path / "1").glob("rank1*.py")}
    (variant,) = names - {"rank1.py"}
    with (tmp_path / "1" / variant).open("a") as text:
        text.write("# older\n")

    def work(transport: Transport) -> None:
        folder = tmp_path / f"{transport.rank}"
        check_same_files(folder, Plan.read(folder / "plan.toml"), transport)

    with pytest.raises(GemscError, match=f"different versions of {variant}"):
        run_local(2, work)


def test_the_script_of_an_own_loop_is_compared(
    program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class OtherLoop:
        rank = 0

        def all_gather_object(self, mine: Any) -> list[Any]:
            return [mine, {"loop.py": "of another digest"}]

    script = tmp_path / "loop.py"
    script.write_text("import gemsc\n")
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", str(script), raising=False)
    plan, other = Plan.read(program / "plan.toml"), cast(Transport, OtherLoop())
    with pytest.raises(GemscError, match=r"different versions of loop\.py"):
        check_same_files(program, plan, other)


def test_a_run_compares_them(
    program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check(*given: Any) -> None:
        raise GemscError("compared")

    (tmp_path / "model.py").write_text("")
    plan = replace(Plan.read(program / "plan.toml"), spec=f"{tmp_path}/model.py")
    monkeypatch.setattr(train, "check_same_files", check)
    monkeypatch.setattr(train.Plan, "read", lambda path: plan)
    with pytest.raises(GemscError, match="compared"):
        run_local(1, lambda link: train.train(program, link, parse_arguments([])))


def test_python_itself_is_not_compared() -> None:
    """A folder may have it beside one's files: ~/miniconda3, of another version."""
    folder = Path(sysconfig.get_path("stdlib")).parents[1]
    assert [*own_files(folder / "own.py")] == ["own.py"]
