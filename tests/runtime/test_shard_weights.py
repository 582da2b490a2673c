"""Gradients and weights in parts (ZeRO, stages 2 and 3): the same is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import MODEL, Gemsc, gemsc_here
from program_support import Net, X, against_one_process, batch_of, on_ranks, written
from safetensors.torch import load_file
from test_shard_optimizer import Gate, adamw, by_name, gated, net
from torch import Tensor, nn

from gemsc.errors import GemscError, InternalError
from gemsc.planner.explain import task_of
from gemsc.result import prove_files
from gemsc.runtime.training.callbacks import Ema
from gemsc.runtime.training.trainer import Trainer

gemsc = pytest.fixture(gemsc_here)

DOUBLE = torch.float64
STEPS = 4
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
    batches = [
        tuple(t.to(DOUBLE) for t in batch_of((X + step, X), plan.batch_size // len(X)))
        for step in range(STEPS)
    ]

    def work(own: Trainer) -> dict[str, Tensor]:
        for given, wanted in batches:
            own.step(given, wanted)
        return own.state_dict()

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
        trained(tmp_path / each, net(), by_name, each, **PLANS[name])
        for each in ("off", shard)
    ]
    # micro-batches are added up in another order, unless there is one
    limit = 0.0 if PLANS[name].get("micro_batches") == 1 else 1e-12
    assert worst(*both) <= limit


@pytest.mark.slow(1)
@pytest.mark.parametrize("shard", LEVELS)
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
    more: dict[str, Any], shard: str, tmp_path: Path
) -> None:
    both = [
        trained(tmp_path / each, net(), by_name, each, more, **PLANS["interleaved"])
        for each in ("off", shard)
    ]
    assert worst(*both) < 1e-12


@pytest.mark.slow(1)
@pytest.mark.parametrize("shard", LEVELS)
def test_gradients_that_are_absent_stay_so(shard: str, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        gate = Gate()
    given: dict[str, Any] = {"ranks": 4, "data": 2}
    both = [
        trained(tmp_path / each, Net(gated, gate=gate), adamw, each, **given)
        for each in ("off", shard)
    ]
    assert worst(*both) < 1e-9
    start = Net(gated, gate=gate).state_dict()
    held = {name: t for state in both[1] for name, t in state.items()}
    assert torch.equal(held["gate.never.weight"], start["gate.never.weight"].to(DOUBLE))
    assert not torch.equal(held["gate.up.weight"], start["gate.up.weight"].to(DOUBLE))


@pytest.mark.slow(1)
@pytest.mark.parametrize("shard", LEVELS)
@pytest.mark.parametrize(
    "given",
    [
        {"ranks": 2, "tiles": "2x1"},
        {"ranks": 4, "tiles": "2x1", "data": 2, "micro_batches": 2},
        {"ranks": 4, "shards": "2", "data": 2},
    ],
    ids=["tiles", "tiles and data", "shards and data"],
)
def test_weights_of_tiles_and_shards(
    given: dict[str, Any], shard: str, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1))
    images = torch.randn(len(X), 1, 8, 6)
    found = against_one_process(
        tmp_path, model, (images,), target=images, shard=shard, optimizer=adamw, **given
    )
    assert found.worst < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("shard", LEVELS)
@pytest.mark.parametrize("after", [2, 3], ids=["between updates", "after an update"])
def test_a_checkpoint_goes_on_in_parts_and_without(
    shard: str, after: int, tmp_path: Path
) -> None:
    given = {"optimizer": by_name, **PLANS["data"]}
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
        found = on_ranks(tmp_path / go, 4, work, **more)
        assert worst(found, expected) < 1e-5, (come, go)


def by_sign(self: Any, x: Tensor) -> Tensor:
    return self.d(self.gate(x) + self.b(x))


@pytest.mark.slow(1)
@pytest.mark.parametrize("shard", LEVELS)
def test_a_checkpoint_knows_which_gradients_there_are(
    shard: str, tmp_path: Path
) -> None:
    """Of two steps that make one update, one trains `up` and the other `down`."""
    given: dict[str, Any] = {"ranks": 2, "data": 2, "micro_batches": 1}
    found = []
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
        found.append(on_ranks(folder, 2, at_once, **more))
        on_ranks(folder, 2, work, **more)
        found.append(on_ranks(folder, 2, work, **more))
    assert max(worst(found[0], other) for other in found[1:]) < 1e-9


@pytest.mark.slow
def test_averages_of_weights_are_of_rows(tmp_path: Path) -> None:
    given = {"optimizer": by_name, **PLANS["data"]}
    found = []
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

        found.append(on_ranks(tmp_path / level, 4, work, optimizer=by_name))
    for mine, theirs in zip(*found, strict=True):
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


def test_what_is_added_up_is_predicted(tmp_path: Path) -> None:
    def ending(shard: str, **options: Any) -> float:
        given = {"ranks": 2, "data": 2, "micro_batches": 1, **looped, **options}
        folder = tmp_path / f"{shard}{len(options)}"
        return written(folder, net(), shard=shard, **given).plan.ending_seconds

    looped = {"schedule": "interleaved", "placement": "looped", "chunks": 3}
    once = ending("optimizer")
    assert ending("gradients") == once
    assert ending("weights", device_memory=2**30) == once  # all stay whole
    gather = ending("weights") - once
    assert gather > 0  # of all but the last stage, before their backwards
    assert ending("gradients", micro_batches=2) > once + gather


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


@pytest.mark.slow
def test_mirrored_replicas_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GemscError, match="mirrored replicas do not") as error:
        written(tmp_path, net(), optimizer=adamw, shard="weights", schedule="mast",
                micro_batches=2)  # fmt: skip
    assert "--shard optimizer" in (error.value.help or "")
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
