"""Gradients and weights in parts (ZeRO, stages 2 and 3): the same is trained."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from command_line import MODEL, Gemsc, gemsc_here
from program_support import Net, X, against_one_process, batch_of, on_ranks, written
from safetensors.torch import load_file
from test_shard_optimizer import Gate, adamw, by_name, gated, net
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from peak_tensors import PeakTensors

from gemsc.compiler import CompiledProgram, prove_files
from gemsc.errors import GemscError, InternalError
from gemsc.planner.explain import task_of
from gemsc.runtime.checkpoint.holdings import Holdings
from gemsc.runtime.training.callbacks import Ema
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.transport import Transport
from gemsc.runtime.worker.program import Run

gemsc = pytest.fixture(gemsc_here)

DOUBLE = torch.float64
SHIFTS = (0, 3, -3, 3)  # a gate opens for some samples, for all, for none
LEVELS = ("gradients", "weights")


def trained(
    folder: Path,
    model: nn.Module,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    shard: str,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> list[dict[str, Tensor]]:
    """Return the model of each rank after some steps."""
    program = written(folder, model, optimizer=optimizer, shard=shard, **options)
    plan = program.plan
    size = plan.batch_size // len(X)
    given, wanted = (t.to(DOUBLE) for t in batch_of((X, X), size))
    batches = [(given + shift, wanted) for shift in SHIFTS]

    def work(runner: Trainer) -> dict[str, Tensor]:
        for given, wanted in batches:
            runner.step(given, wanted)
        return runner.state_dict()

    given = {"optimizer": optimizer, "dtype": DOUBLE, **(trainer or {})}
    return on_ranks(folder, plan.ranks, work, **given)


def worst(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> float:
    """Return by how much the models of the ranks differ."""
    pairs = zip(one, other, strict=True)
    return max(
        float((a[name] - tensor).abs().max())
        for a, b in pairs
        for name, tensor in b.items()
    )


PLANS: dict[str, dict[str, Any]] = {
    "data": {"ranks": 4, "data": 2},
    "data of three": {"ranks": 3, "data": 3, "micro_batches": 1},
    "stages of one rank": {
        "ranks": 2, "data": 2, "schedule": "interleaved", "placement": "looped",
        "chunks": 3, "micro_batches": 2,
    },
    "interleaved": {
        "ranks": 4, "data": 2, "schedule": "interleaved", "placement": "looped",
        "chunks": 2, "micro_batches": 2,
    },
    "deferred": {"ranks": 4, "schedule": "zb-h1", "data": 2, "micro_batches": 3},
    "mirrored": {"ranks": 4, "data": 2, "schedule": "chimera", "micro_batches": 4},
    "mast of three": {"ranks": 6, "data": 2, "schedule": "mast", "micro_batches": 2},
    "masters": {"ranks": 4, "data": 2, "schedule": "master", "times": 2},
    "recomputed": {"ranks": 4, "data": 2, "recompute": ("all",)},
    "offloaded": {"ranks": 4, "data": 2, "offload": ("all",)},
}  # fmt: skip


@pytest.mark.slow(1)
@pytest.mark.by_day(3)
@pytest.mark.parametrize("shard", LEVELS)
@pytest.mark.parametrize("name", PLANS)
def test_the_model_is_that_of_data_parallelism(
    name: str, shard: str, tmp_path: Path
) -> None:
    both = [
        trained(tmp_path / level, net(), by_name, level, **PLANS[name])
        for level in ("off", shard)
    ]
    # micro-batches are added up in another order, unless there is one
    limit = 0.0 if PLANS[name].get("micro_batches") == 1 else 1e-12
    assert worst(*both) <= limit


@pytest.mark.slow(1)
@pytest.mark.parametrize("shard", LEVELS)
@pytest.mark.parametrize("name", ["interleaved", "mirrored"])
@pytest.mark.parametrize(
    "more",
    [
        {"clip_norm": 0.05},
        {
            "accumulate": 2,
            "scheduler": lambda made: torch.optim.lr_scheduler.StepLR(made, 1, 0.3),
        },
    ],
    ids=["clip", "accumulate"],
)
def test_it_works_with_all_that_belongs_to_an_update(
    more: dict[str, Any], name: str, shard: str, tmp_path: Path
) -> None:
    both = [
        trained(tmp_path / level, net(), by_name, level, more, **PLANS[name])
        for level in ("off", shard)
    ]
    assert worst(*both) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("shard", LEVELS)
@pytest.mark.parametrize("schedule", ["1f1b", "mast"])
def test_gradients_that_are_absent_stay_so(
    schedule: str, shard: str, tmp_path: Path
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        gate = Gate()
    given: dict[str, Any] = {"ranks": 4, "data": 2, "schedule": schedule}
    given["micro_batches"] = 2
    both = [
        trained(tmp_path / level, Net(gated, gate=gate), adamw, level, **given)
        for level in ("off", shard)
    ]
    assert worst(*both) < 1e-9
    start = Net(gated, gate=gate).state_dict()
    held = {name: t for state in both[1] for name, t in state.items()}
    assert torch.equal(held["gate.never.weight"], start["gate.never.weight"].to(DOUBLE))
    for name in ("gate.up.weight", "gate.down.weight"):
        assert not torch.equal(held[name], start[name].to(DOUBLE))


@pytest.mark.slow(1)
@pytest.mark.parametrize("shard", LEVELS)
@pytest.mark.parametrize(
    "given",
    [
        {"ranks": 2, "tiles": "2x1"},
        {"ranks": 4, "tiles": "2x1", "data": 2, "micro_batches": 2},
        {"ranks": 4, "shards": "2", "data": 2},
        {"ranks": 4, "tiles": "2x1,2x1", "schedule": "mast", "micro_batches": 2},
        {"ranks": 8, "shards": "2", "data": 2, "schedule": "mast", "micro_batches": 2},
    ],
    ids=["tiles", "tiles and data", "shards and data", "mast of tiles", "and shards"],
)
def test_weights_of_tiles_and_shards(
    given: dict[str, Any], shard: str, tmp_path: Path
) -> None:
    sizes = pairwise((1, 4, 4, 4, 1))
    model = nn.Sequential(*(nn.Conv2d(*size, 3, padding=1) for size in sizes))
    images = torch.randn(len(X), 1, 8, 6)
    comparison = against_one_process(
        tmp_path, model, (images,), target=images, shard=shard, optimizer=adamw, **given
    )
    assert comparison.worst < 1e-12


@pytest.mark.parametrize("shard", LEVELS)
def test_a_rank_reads_its_rows_only(shard: str, tmp_path: Path) -> None:
    layers = [nn.Linear(512, 512, bias=False) for _ in range(8)]
    plan: dict[str, Any] = {"ranks": 2, "data": 2, "micro_batches": 1}
    x = torch.randn(2, 512)
    written(tmp_path, nn.Sequential(*layers), (x,), target=x, shard=shard, **plan)

    def peak(transport: Transport) -> int:
        with PeakTensors(held=()) as tensors:
            Trainer(tmp_path, transport, device=torch.device("cpu"))
        return tensors.peak

    one = 512 * 512 * 4
    for most in run_local(2, peak):
        if shard == "weights":  # half of each, and one without memory yet
            assert 4 * one <= most < 5.5 * one
        else:
            assert most >= 8 * one


class Adapted(nn.Module):
    """A frozen layer, and a small one that is trained beside it."""

    def __init__(self, size: int, *, fixed: bool, frozen: bool) -> None:
        super().__init__()
        self.base = nn.Linear(size, size)
        self.base.requires_grad_(requires_grad=not frozen)
        self.more = nn.Linear(size, size, bias=False)
        self.more.requires_grad_(not fixed)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.more(x))


class Tuned(nn.Module):
    """Layers of which most are frozen: all of the first, one of two others."""

    def __init__(self, size: int = 4, *, frozen: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            fixed = [frozen and index == 0 for index in range(6)]
            layers = (Adapted(size, fixed=flag, frozen=frozen) for flag in fixed)
            self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return F.linear(x, self.layers[0].base.weight)  # of the first stage, too


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "name", ["data of three", "stages of one rank", "interleaved", "three pairs"]
)
def test_frozen_weights_are_in_parts(name: str, tmp_path: Path) -> None:
    pairs = {"ranks": 6, "data": 3, "schedule": "mast", "micro_batches": 2}
    plan, both = {**PLANS, "three pairs": pairs}[name], []
    for shard in ("off", "weights"):
        program = written(tmp_path / shard, Tuned(), optimizer=adamw, shard=shard,
                          **plan)  # fmt: skip
        batch = batch_of((X, X), program.plan.batch_size // len(X))

        def work(runner: Trainer, batch: Any = batch) -> tuple[dict[str, Tensor], Any]:
            for _ in SHIFTS:
                runner.step(*batch)
            sizes = {n: p.untyped_storage().nbytes() for n, p in
                     runner.stages.parameters.items()}  # fmt: skip
            return runner.state_dict(), sizes

        both.append(on_ranks(tmp_path / shard, program.plan.ranks, work,
                             optimizer=adamw))  # fmt: skip
    states = [[state for state, _ in ranks] for ranks in both]
    assert worst(*states) < (1e-12 if plan.get("micro_batches") == 1 else 1e-6)
    held = {name: tensor for state in states[1] for name, tensor in state.items()}
    for path, tensor in Tuned().state_dict().items():
        assert torch.equal(held[path], tensor) == (
            "base" in path or path == "layers.0.more.weight"
        )
    is_shared = name in ("stages of one rank", "three pairs")  # by stages of a rank
    shared = {"layers.0.base.weight"} if is_shared else set()
    for _, sizes in both[1]:  # after an update there are rows only
        assert {path for path, size in sizes.items() if size} == shared


@pytest.mark.slow
@pytest.mark.parametrize("shard", LEVELS)
@pytest.mark.parametrize("after", [2, 3], ids=["between updates", "after an update"])
@pytest.mark.parametrize("plan", ["data", "mirrored"])
def test_a_checkpoint_goes_on_in_parts_and_without(
    plan: str, shard: str, after: int, tmp_path: Path
) -> None:
    given = {"optimizer": by_name, **PLANS[plan]}
    levels = {"off": "off", "optimizer": "optimizer", "here": shard}
    for name, level in levels.items():
        program = written(tmp_path / name, net(), shard=level, **given)
    batch = batch_of((X, X), program.plan.batch_size // len(X))

    def train(steps: int, come: str = "", go: str = "") -> Callable[[Trainer], Any]:
        def work(trainer: Trainer) -> dict[str, Tensor]:
            if come:
                trainer.resume(tmp_path / come)
            for _ in range(steps):
                trainer.step(*batch)
            if go:
                trainer.save(tmp_path / go)
            return {name: t.clone() for name, t in trainer.state_dict().items()}

        return work

    more = {"optimizer": by_name, "accumulate": 3 if after == 2 else 1}
    total = 6
    expected = on_ranks(tmp_path / "off", 4, train(total), **more)
    for name in levels:
        on_ranks(tmp_path / name, 4, train(after, go=f"{name} saved"), **more)
    for come, go in (("here", "here"), ("here", "off"), ("off", "here"),
                     ("optimizer", "here"), ("here", "optimizer")):  # fmt: skip
        work = train(total - after, come=f"{come} saved")
        states = on_ranks(tmp_path / go, 4, work, **more)
        assert worst(states, expected) < 1e-5, (come, go)


def test_who_keeps_rows_alone_takes_no_gradients_as_they_were(tmp_path: Path) -> None:
    """Of ranks that kept whole gradients each has terms of the rows of all."""
    layouts = set[str]()
    for level in ("off", "gradients"):
        written(tmp_path / level, net(), shard=level, ranks=2, data=2, micro_batches=1)
        work = lambda trainer: Holdings(trainer.worker).digest()  # noqa: E731
        layouts |= set(on_ranks(tmp_path / level, 2, work))
    assert len(layouts) == 3


def test_gradients_that_two_ranks_keep_go_on_bit_for_bit(tmp_path: Path) -> None:
    """Each takes its own terms again: one sum of both would be rounded otherwise."""
    written(tmp_path, net(), optimizer=by_name, shard="weights", **PLANS["mirrored"])
    batch = batch_of((X, X), 8)

    def work(trainer: Trainer) -> list[dict[str, Tensor]]:
        for _ in range(2):
            trainer.step(*batch)
        trainer.save(tmp_path / "saved")
        states = []
        for _ in range(2):
            trainer.step(*batch)
            states.append(trainer.state_dict())
            trainer.resume(tmp_path / "saved")
        return states

    for once, again in on_ranks(tmp_path, 4, work, optimizer=by_name, accumulate=3):
        assert all(torch.equal(once[name], again[name]) for name in once)


def test_a_resume_forgets_the_weights_that_were_gathered(tmp_path: Path) -> None:
    written(tmp_path, net(), optimizer=by_name, shard="weights", **PLANS["data"])
    batch = batch_of((X, X), 4)

    def work(trainer: Trainer) -> list[float]:
        trainer.step(*batch)
        trainer.save(tmp_path / "saved")
        losses = [trainer.evaluate(*batch).loss]
        trainer.step(*batch)
        losses.append(trainer.evaluate(*batch).loss)
        trainer.resume(tmp_path / "saved")
        return [*losses, trainer.evaluate(*batch).loss]

    for before, after, again in on_ranks(tmp_path, 4, work, optimizer=by_name):
        assert before == again
        assert before != after


def by_sign(self: Any, x: Tensor) -> Tensor:
    return self.d(self.gate(x) + self.b(x))


@pytest.mark.slow(1)
@pytest.mark.parametrize("shard", LEVELS)
def test_a_checkpoint_knows_which_gradients_there_are(
    shard: str, tmp_path: Path
) -> None:
    """Of two steps that make one update, one trains `up` and the other `down`."""
    given: dict[str, Any] = {"ranks": 2, "data": 2, "micro_batches": 1}
    runs = []
    for level in ("off", shard):
        folder = tmp_path / level
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = Net(by_sign, gate=Gate())
        written(folder, model, optimizer=adamw, shard=level, **given)
        xs = [(sign * X.abs()).repeat(2, 1).to(DOUBLE) for sign in (1, -1)]
        batches = [(x, X.repeat(2, 1).to(DOUBLE)) for x in xs]

        def work(trainer: Trainer, batches: Any = batches, level: str = level) -> Any:
            if (
                trainer.worker.steps.done == 0
                and not (tmp_path / f"{level} s").exists()
            ):
                trainer.step(*batches[0])
                trainer.save(tmp_path / f"{level} s")
                return {}
            trainer.resume(tmp_path / f"{level} s")
            trainer.step(*batches[1])
            return trainer.state_dict()

        def at_once(trainer: Trainer, batches: Any = batches) -> Any:
            for batch in batches:
                trainer.step(*batch)
            return trainer.state_dict()

        more = {"optimizer": adamw, "accumulate": 2, "dtype": DOUBLE}
        runs.append(on_ranks(folder, 2, at_once, **more))
        on_ranks(folder, 2, work, **more)
        runs.append(on_ranks(folder, 2, work, **more))
    assert max(worst(runs[0], other) for other in runs[1:]) < 1e-9


@pytest.mark.slow
def test_averages_of_weights_are_of_rows(tmp_path: Path) -> None:
    given = {"optimizer": by_name, **PLANS["data"]}
    runs = []
    for level in ("off", "weights"):
        program = written(tmp_path / level, net(), shard=level, **given)
        batch = batch_of((X, X), program.plan.batch_size // len(X))

        def work(trainer: Trainer, batch: Any = batch) -> Any:
            average = Ema(0.5)
            trainer.add_callbacks([average])
            losses: list[Any] = []
            average.on_load(trainer)
            average.on_start(trainer)
            for _ in range(3):
                average.on_step(trainer, trainer.step(*batch))
                average.on_evaluation_start(trainer)
                losses.append(trainer.evaluate(*batch).loss)
                average.on_evaluation(trainer, {})
            return losses

        runs.append(on_ranks(tmp_path / level, 4, work, optimizer=by_name))
    for mine, theirs in zip(*runs, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


def test_a_file_gathers_before_each_action(tmp_path: Path) -> None:
    written(tmp_path, net(), optimizer=by_name, shard="weights", **PLANS["interleaved"])
    text = (tmp_path / "rank0.py").read_text()
    assert "whole_stages=1," in text
    lines = text.splitlines()
    for number, line in enumerate(lines):
        for verb in ("run(", "backward(", "evaluate("):
            if f"worker.{verb}" in line:
                stage = line.partition(verb)[2].partition(",")[0]
                assert lines[number - 1].strip() == f"worker.gather_weights({stage})"


@pytest.mark.slow
def test_what_is_added_up_is_predicted(tmp_path: Path) -> None:
    def ending(shard: str, **options: Any) -> float:
        given = {"ranks": 2, "data": 2, "micro_batches": 1, **looped, **options}
        folder = tmp_path / f"{shard}{len(options)}"
        return written(folder, net(), shard=shard, **given).plan.ending_seconds

    looped = {"schedule": "interleaved", "placement": "looped", "chunks": 3}
    once = ending("optimizer")
    assert ending("gradients") == once
    assert 0 < ending("weights", device_memory=2**30) < once  # all stay whole
    gather = ending("weights") - once
    assert gather > 0  # of all but the last stage, before their backwards
    assert ending("gradients", micro_batches=2) > once + gather

    def gathers(**which: bool) -> float:
        seconds = []
        for shard in LEVELS:
            given = {"ranks": 2, "data": 2, "micro_batches": 1, **looped}
            folder = tmp_path / f"{shard} {which}"
            model, x = Tuned(32, **which), torch.randn(2, 32)
            done = written(folder, model, (x,), target=x, shard=shard, **given)
            seconds.append(done.plan.ending_seconds)
        return seconds[1] - seconds[0]

    assert gathers(frozen=True) > gathers(frozen=False) > 0  # nor are these updated


def test_the_proof_misses_a_gather(tmp_path: Path) -> None:
    given = {"optimizer": by_name, **PLANS["stages of one rank"]}
    program = written(tmp_path, net(), shard="weights", **given)
    task = task_of(program.plan)
    whole = program.rank_modules()
    prove_files(whole, program.compilation, task)
    lines = whole["rank0.py"].splitlines(keepends=True)
    gathers = [n for n, line in enumerate(lines) if "worker.gather_weights" in line]
    assert gathers
    for number in gathers:
        damaged = "".join([*lines[:number], *lines[number + 1 :]])
        files = {**whole, "rank0.py": damaged}
        with pytest.raises(InternalError, match="that it has not gathered"):
            prove_files(files, program.compilation, task)


def four_stages(folder: Path, **options: Any) -> CompiledProgram:
    """Write a program of layers with four stages on each of two ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)]
        x = torch.randn(2, 64)
    plan = {"ranks": 2, "data": 2, "micro_batches": 2, "chunks": 4}
    kind = {"schedule": "interleaved", "placement": "looped", "optimizer": adamw}
    return written(folder, nn.Sequential(*layers), (x,), target=x, **plan, **kind,
                   **options)  # fmt: skip


Written = tuple[Path, CompiledProgram]


@pytest.fixture(scope="module")
def two_whole(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A program with room for the weights of two stages at a time, and its folder."""
    folder = tmp_path_factory.mktemp("two_whole")
    least, most = 350, 500  # KiB: in less there is no room for one, in more for all
    while most - least > 1:
        room, whole = (least + most) // 2, 0
        with suppress(GemscError):
            given = {"shard": "weights", "device_memory": room * 2**10}
            program = four_stages(folder, **given)
            if (whole := program.plan.whole_stages) == 2:
                return folder, program
        least, most = (room, most) if whole < 2 else (least, room)
    raise AssertionError("no memory has room for two stages")


@pytest.mark.slow
def test_the_next_weights_come_while_others_are_used(two_whole: Written) -> None:
    batch = torch.randn(8, 64), torch.randn(8, 64)

    def work(trainer: Trainer) -> list[tuple[int, set[int]]]:
        worker, notes = trainer.worker, list[tuple[int, set[int]]]()

        def note(run: Run) -> None:
            held = {
                stage.stage
                for stage, module in trainer.stages.items()
                if all(p.untyped_storage().nbytes() for p in module.parameters())
            }
            notes.append((run.stage, held))

        def noting(do: Any) -> Any:
            return lambda run, *given: (note(run), do(run, *given))[1]

        for name in ("run", "backward"):
            setattr(worker, name, noting(getattr(worker, name)))
        trainer.step(*batch)
        return notes

    for notes in on_ranks(two_whole[0], 2, work, optimizer=adamw):
        assert len(notes) == 16
        for (now, whole), (after, _) in pairwise(notes):
            assert whole >= {now, after}
            assert len(whole) <= 2


def test_the_order_of_gathers_is_proved(two_whole: Written) -> None:
    _, program = two_whole
    task, files = task_of(program.plan), program.rank_modules()
    prove_files(files, program.compilation, task)
    head, name, order = files["rank0.py"].partition("gather_order=(")
    assert name
    for old, new in (("STAGE0", "STAGE1"), ("STAGE3", "STAGE2")):
        damaged = {"rank0.py": head + name + order.replace(old, new, 1)}
        with pytest.raises(InternalError, match="another order than it says"):
            prove_files({**files, **damaged}, program.compilation, task)


def test_the_model_is_the_same_where_gathers_are_ahead(
    two_whole: Written, tmp_path: Path
) -> None:
    four_stages(tmp_path, shard="gradients")
    batches = [(torch.randn(8, 64), torch.randn(8, 64)) for _ in range(3)]

    def work(trainer: Trainer) -> list[Any]:
        losses: list[Any] = [trainer.step(*batch) for batch in batches]
        losses.append(trainer.evaluate(*batches[0]).loss)
        return [losses, trainer.state_dict()]

    one, other = (
        on_ranks(folder, 2, work, optimizer=adamw)
        for folder in (two_whole[0], tmp_path)
    )
    assert [losses for losses, _ in one] == [losses for losses, _ in other]
    assert worst([state for _, state in one], [state for _, state in other]) == 0


@pytest.mark.slow
def test_what_cannot_be_in_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GemscError, match="mirrored replicas do not") as error:
        written(tmp_path, net(), optimizer=adamw, shard="weights", schedule="mast",
                ranks=2, micro_batches=2)  # fmt: skip
    assert "--shard optimizer" in (error.value.help or "")
    assert "--data 3 with --ranks 6" in (error.value.help or "")
    with pytest.raises(GemscError, match="a compiled stage keeps its weights"):
        written(tmp_path, net(), optimizer=adamw, shard="weights", data=2,
                torch_compile=True)  # fmt: skip
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(GemscError, match="each weight is on one rank"):
        written(tmp_path, plain, optimizer=adamw, shard="gradients")


# ----------------------------------------------------------------- under mpirun


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.usefixtures("engine")
def test_the_saved_model_is_the_same_bit_for_bit(gemsc: Gemsc, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    for shard in ("off", *LEVELS):
        program = tmp_path / shard
        given = ("--ranks", 2, "--data", 2, "--micro-batches", 1, "--shard", shard)
        more = ("--placement", "looped", "--schedule", "interleaved")
        done = gemsc("compile", path, *given, *more, "-o", program)
        assert done.code == 0, done.err
        done = gemsc(
            "run", program, "--steps", 3, "--save", tmp_path / f"{shard} saved"
        )
        assert done.code == 0, done.out + done.err
    one, *others = (
        load_file(tmp_path / f"{shard} saved" / "model.safetensors")
        for shard in ("off", *LEVELS)
    )
    for other in others:
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
