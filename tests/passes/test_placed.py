"""Weights and buffers of branches, which one rank of a stage holds alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import placed_model
import pytest
import torch
import torch.nn.functional as F
from command_line import Gemsc, gemsc_here
from placed_model import SAMPLES, Forks
from plan_support import metered_peaks
from program_support import on_ranks, weights_in
from safetensors.torch import load_file, save_file
from threads import run_on_threads
from torch import Tensor, fx, nn

from gemsc.base.dtypes import default_dtype
from gemsc.base.parts import Part, by_path, holder_of, make_whole
from gemsc.codegen.package import write_directory
from gemsc.compiler import CompiledProgram, compile, prove_files
from gemsc.errors import InternalError
from gemsc.ir.holder import with_graph
from gemsc.ir.layers import layer_source
from gemsc.passes.shards.local import put_parts
from gemsc.planner.explain import task_of
from gemsc.user_model import load_user_model
from gemsc.verify.compare import compare, read_record
from gemsc.verify.one_process import reference_steps
from gemsc.verify.plain_run import PlainRun, RunSettings
from gemsc.verify.steps import initial_model
from gemsc.weights.read import pasted


@pytest.mark.parametrize("shape", [(), (0,), (3,), (4, 3), (4, 3, 2, 2)])
def test_all_of_a_tensor_and_nothing_of_it_are_parts(shape: tuple[int, ...]) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    alone, nothing = Part(shape), Part.nothing(shape)
    assert alone.local_shape == shape
    assert alone.of(whole).equal(whole)
    assert nothing.of(whole).numel() == 0
    assert nothing.of(whole).shape == nothing.local_shape
    assert (alone.share, nothing.share) == (1, 0)
    rows, ((start, stop),) = whole.reshape(shape or (1,)), alone.intervals
    assert rows[start:stop].equal(rows)
    target = whole + 1
    nothing.put(nothing.of(whole), target)
    assert target.equal(whole + 1)
    alone.put(alone.of(whole), target)
    assert target.equal(whole)
    assert make_whole([alone, nothing])
    assert make_whole([alone])
    assert not make_whole([nothing])
    assert str(alone) == f"Part({shape})"
    for part in (alone, nothing):
        assert eval(str(part)) == part
        assert Part.read(json.loads(json.dumps(asdict(part)))) == part


LAYERS = [
    nn.Linear(4, 3),
    nn.Conv2d(4, 6, 3, groups=2),
    nn.ConvTranspose1d(4, 6, 3, groups=2),
    nn.BatchNorm2d(4),  # with a buffer without dimensions
    nn.GroupNorm(2, 4),
    nn.LayerNorm((4, 3)),
    nn.Embedding(5, 3),
    nn.PReLU(3),
    nn.GRU(4, 3),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_a_rank_has_all_of_a_layer_or_nothing(layer: nn.Module) -> None:
    """The rank of the branch has a layer of the same text, the others no elements."""
    shapes = {name: tuple(t.shape) for name, t in layer.state_dict().items()}
    model = nn.ModuleDict({"a": nn.ModuleDict({"b": layer})})
    held = {}
    for kind in (Part, Part.nothing):
        held[kind] = with_graph(model, fx.Graph())
        parts = {f"a.b.{name}": kind(shape) for name, shape in shapes.items()}
        put_parts(held[kind], parts)
    there = held[Part].get_submodule("a.b")
    assert layer_source(there) == layer_source(layer)
    assert {n: tuple(t.shape) for n, t in there.state_dict().items()} == shapes
    elsewhere = held[Part.nothing].get_submodule("a.b")
    assert all(not t.numel() for t in elsewhere.state_dict().values())
    assert {n: tuple(t.shape) for n, t in layer.state_dict().items()} == shapes


def test_paths_stand_for_all_tensors_under_them() -> None:
    placed = {"one.a.w": 0, "one.b.0.w": 1, "one.b.0.b": 1, "two.w": 1, "two.b": 1}
    names = [*placed, "one.c.w", "one.b.1.w", "onea.w"]
    paths = by_path(placed, names)
    assert paths == {"one.a": 0, "one.b.0": 1, "two": 1}
    assert {name: holder_of(name, paths) for name in names} == {
        **dict.fromkeys(names),
        **placed,
    }


gemsc = pytest.fixture(gemsc_here)

# -- compiled --------------------------------------------------------------------------

ADAMW = placed_model.optimizer
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CLIP = 0.05  # every step is clipped

State = dict[str, Tensor]
Batches = list[tuple[Tensor, Tensor]]


def drawn(size: int, count: int = 3) -> Batches:
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return [(draw(size, 8), 3 * draw(size, 16)) for _ in range(count)]


def one_process(batches: Batches, optimizer: Any) -> tuple[list[float], State]:
    """Return the losses and the model after clipped steps."""
    model = Forks().double()
    update, losses = optimizer(model.named_parameters()), []
    for x, target in batches:
        count, total = len(x) // SAMPLES, 0.0
        for part, wanted in zip(x.split(SAMPLES), target.split(SAMPLES), strict=True):
            loss = F.mse_loss(model(part), wanted) / count
            loss.backward()
            total += loss.item()
        losses.append(total)
        trained = [p for p in model.parameters() if p.grad is not None]
        assert nn.utils.clip_grad_norm_(trained, CLIP) > CLIP
        update.step()
        update.zero_grad()
    return losses, model.state_dict()


@cache
def compiled(**options: Any) -> CompiledProgram:
    return compile(
        Forks(), placed_model.example_inputs(), loss=F.mse_loss,
        example_target=placed_model.example_target(), optimizer=ADAMW, check=False,
        **options,
    )  # fmt: skip


def trained(
    program: Path,
    ranks: int,
    batches: Batches,
    *,
    optimizer: Any = ADAMW,
    save: Path | None = None,
    resume: Path | None = None,
) -> tuple[list[float], State, list[State]]:
    """Return the losses, the whole model, and what each rank has of it, after steps."""

    def work(trainer: Any) -> tuple[list[float], State]:
        if resume is not None:
            trainer.resume(resume)
        losses = [trainer.step(*batch) for batch in batches]
        if save is not None:
            trainer.save(save)
        return losses, trainer.state_dict()

    results = on_ranks(
        program, ranks, work,
        optimizer=optimizer, clip_norm=CLIP, dtype=torch.float64,
    )  # fmt: skip
    states = [state for _, state in results]
    whole = pasted((state, {}) for state in states)
    for state in states:  # copies are the same everywhere, bit for bit
        for name, tensor in state.items():
            assert torch.equal(tensor, whole[name]), name
    return results[0][0], whole, states


def off(actual: State, expected: State) -> float:
    """Return the worst error, relative to the largest of each tensor."""
    assert actual.keys() == expected.keys()
    return max(
        float((tensor - actual[name]).abs().max() / tensor.abs().max().clamp(1e-3))
        for name, tensor in expected.items()
    )


CUT = {"cuts": ("two.d.0",), "balance": "explicit"}
TWO = {"ranks": 2, "branches": ("2",), "micro_batches": 2}
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "1 rank": ({"ranks": 1, "micro_batches": 2}, ADAMW),
    "batch": ({**TWO, "trunk": "batch"}, ADAMW),
    "3 ranks": (
        {"ranks": 3, "branches": ("3",), "trunk": "whole", "micro_batches": 2},
        ADAMW,
    ),
    "1f1b": ({**TWO, **CUT, "ranks": 4, "trunk": "whole"}, MOMENTUM),
    "data": ({**TWO, "ranks": 4, "data": 2, "shard": "optimizer"}, ADAMW),
    "mast": (
        {
            **TWO,
            **CUT,
            "ranks": 4,
            "schedule": "mast",
            "micro_batches": 2,
            "shard": "optimizer",
        },
        MOMENTUM,
    ),
}


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "1 rank"])
def test_clipped_steps_are_those_of_one_process(layout: str, tmp_path: Path) -> None:
    _, optimizer = LAYOUTS[layout]
    program = written(layout, tmp_path)
    batches = drawn(SAMPLES * program.plan.micro_batches * program.plan.data)
    ranks = program.plan.ranks
    losses, model, _ = trained(tmp_path, ranks, batches, optimizer=optimizer)
    wanted, expected = one_process(batches, optimizer)
    assert losses == pytest.approx(wanted, rel=1e-9)
    assert off(model, expected) < 1e-9


def written(layout: str, folder: Path) -> CompiledProgram:
    program = compiled(**LAYOUTS[layout][0])
    write_directory(program.compilation, folder)
    return program


def tensors_of(*paths: str) -> set[str]:
    """Return the names of all tensors of the model under some paths."""
    names = Forks().state_dict()
    return {n for n in names for path in paths if f"{n}.".startswith(f"{path}.")}


@pytest.mark.slow
def test_a_rank_has_its_own_branches_and_the_trunk(tmp_path: Path) -> None:
    """What a branch and the trunk use is on all ranks, by both names."""
    program = written("batch", tmp_path)
    *_, states = trained(tmp_path, 2, [])
    trunk = tensors_of("stem", "seldom", "both", "tail", "head", "never")
    trunk |= {"one.c.0.weight"}
    branches = tensors_of("one.a", "two.e"), tensors_of("one.b", "one.c", "two.d")
    for rank, (alone, state) in enumerate(zip(branches, states, strict=True)):
        assert state.keys() == alone | trunk
        file = program.rank_modules()[f"rank{rank}.py"]
        paths = {"one.a": 0, "one.b": 1, "one.c.1": 1, "two.d": 1, "two.e": 0}
        assert all(
            f'        "{path}": {held},\n' in file for path, held in paths.items()
        )
        assert "Part(" not in file
        assert '    reductions={"stage0": (0, 1)},\n' in file
        assert ("self.two.e =" in file) == (rank == 0)
        assert file.count('self.tail.weight = self.one.c["0"].weight  # tied') == 1


@pytest.mark.slow
def test_the_memory_of_the_fullest_rank_is_predicted_to_the_byte(
    tmp_path: Path,
) -> None:
    program = written("3 ranks", tmp_path)
    ((x, target),) = drawn(SAMPLES * 2, 1)
    batches = [((x.float(),), target.float())] * 2
    record = run_on_threads(tmp_path, 3, batches, dtype=torch.float32, optimizer=ADAMW)
    never = 12 * 4  # bytes, for which there is neither a gradient nor state
    assert max(record.peak_bytes) + 3 * never + 2 * 4 == metered_peaks(program.plan)[0]
    assert min(record.peak_bytes) < max(record.peak_bytes) / 2


@pytest.mark.slow
def test_verify_joins_what_ranks_hold_alone(tmp_path: Path) -> None:
    written("mast", tmp_path)
    batches = [((x,), target) for x, target in drawn(SAMPLES * 2, 2)]
    expected = reference_steps(Forks(), F.mse_loss, batches, 2, torch.float64, ADAMW)
    record = run_on_threads(tmp_path, 4, batches, optimizer=ADAMW)
    assert compare(record, expected).judge(torch.float64)[0] == "exact"
    assert not record.unequal
    for rank in range(4):  # one that says of its branch that all ranks have it
        path = tmp_path / f"held{rank}.json"
        held = json.loads(path.read_text())
        alone = [name for name in held["alone"] if not name.startswith("two.e.0")]
        path.write_text(json.dumps({**held, "alone": alone}))
    unequal = read_record(tmp_path, 4).unequal
    assert unequal == {"two.e.0.weight", "two.e.0.bias"}


@pytest.mark.slow
def test_all_ranks_evaluate_alike_where_one_draws_a_dropout() -> None:
    model = Forks()
    model.one["a"].append(nn.Dropout(0.1))
    words = {**LAYOUTS["1f1b"][0], "example_target": placed_model.example_target()}
    inputs = placed_model.example_inputs()
    program = compile(model, inputs, loss=F.mse_loss, check=False, **words)
    verbs = {"evaluate_apart(" in text for text in program.rank_modules().values()}
    assert len(verbs) == 1


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"stage0 parts": (0, 2)',
            '"stage0 parts": (0, 1, 2, 3)',
            "is on ranks (0, 2)",
        ),
        ('"stage0": (0, 1, 2, 3)', '"stage0": (0, 2)', "'stage0' is on ranks (0, 1,"),
        ('    worker.start_reduction("stage1 parts")\n', "", "'stage1 parts' 0 times"),
        ('"one.b": 1', '"one.b": 0', "holds branches as"),
        ('"one.b": 1,', "", "holds branches as"),
    ],
)
def test_wrong_sums_of_branches_are_found(old: str, new: str, message: str) -> None:
    program = compiled(**LAYOUTS["mast"][0])
    files, task = dict(program.rank_modules()), task_of(program.plan)
    prove_files(files, program.compilation, task)
    assert old in files["rank0.py"]
    files["rank0.py"] = files["rank0.py"].replace(old, new, 1)
    with pytest.raises(InternalError, match=re.escape(message)):
        prove_files(files, program.compilation, task)


@pytest.mark.slow
def test_a_checkpoint_is_whole_and_loads_at_another_split(tmp_path: Path) -> None:
    two, three = tmp_path / "two", tmp_path / "three"
    written("batch", two)
    written("3 ranks", three)
    batches, saved = drawn(SAMPLES * 2, 4), tmp_path / "saved"
    before, *_ = trained(two, 2, batches[:2], save=saved)
    losses, expected = one_process(batches, ADAMW)
    after, model, _ = trained(two, 2, batches[2:], resume=saved)
    assert before + after == pytest.approx(losses, rel=1e-9)
    assert off(model, expected) < 1e-9
    _, expected = one_process(batches[:2], ADAMW)
    stored = weights_in(saved)
    Forks().double().load_state_dict(stored)
    assert off(stored, expected) < 1e-9
    after, model, _ = trained(three, 3, batches[2:], resume=saved)
    losses, expected = one_process(batches, ADAMW)
    assert before + after == pytest.approx(losses, rel=1e-9)
    assert off(model, expected) < 1e-9
    written("1 rank", tmp_path / "one")
    for folder, ranks in (("three", 3), ("one", 1), ("two", 2)):
        (alone := tmp_path / f"alone{ranks}").mkdir()
        save_file(stored, alone / "model.safetensors")
        saved = tmp_path / f"saved{ranks}"
        trained(tmp_path / folder, ranks, [], resume=alone, save=saved)
        other = weights_in(saved)
        assert other.keys() == stored.keys()
        assert all(torch.equal(tensor, other[n]) for n, tensor in stored.items())
        stored = other


@pytest.mark.mpi
@pytest.mark.usefixtures("engine")
@pytest.mark.nightly
def test_a_killed_run_goes_on_as_one_process_does(
    gemsc: Gemsc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, program, saved = (
        placed_model.__file__,
        tmp_path / "program",
        tmp_path / "saved",
    )
    words = "--ranks", 2, "--branches", 2, "--micro-batches", 2
    done = gemsc("compile", file, *words, "-o", program)
    assert done.code == 0, done.err
    words = "--epochs", 2, "--clip-norm", CLIP, "--save", saved, "--dtype", "float64"
    monkeypatch.setenv("LAST", str(6 * SAMPLES))  # in the second epoch
    assert gemsc("run", program, *words).code != 0
    monkeypatch.delenv("LAST")
    done = gemsc("run", program, *words, "--resume", saved)
    assert done.code == 0, done.err
    user = load_user_model(file)
    settings = RunSettings(
        steps=4,
        dtype=torch.float64,
        micro_batch_size=SAMPLES,
        micro_batches=2,
        clip_norm=CLIP,
    )
    with default_dtype(torch.float64):
        plain = PlainRun(user, initial_model(user, program), settings)
        plain.train()
    assert off(load_file(saved / "model.safetensors"), plain.model.state_dict()) < 1e-9
