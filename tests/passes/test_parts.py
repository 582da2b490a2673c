"""Ranks that hold parts of the weights train, save and resume as one process does."""

from __future__ import annotations

import itertools
import math
import re
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parts_support import Gated, Words, Written
from plan_support import metered_peaks
from program_support import on_ranks, weights_in
from safetensors.torch import load_file, save_file
from threads import run_on_threads
from torch import Tensor, nn

from gemsc.base.parts import Part, make_whole
from gemsc.codegen.package import write_directory
from gemsc.compiler import CompiledProgram, compile, prove_files
from gemsc.costs.hardware import read_hardware
from gemsc.errors import GemscError, InternalError
from gemsc.planner.ending import gradient_sums, held_gradients, reduced_bytes
from gemsc.planner.explain import task_of
from gemsc.runtime.training.trainer import Trainer
from gemsc.verify.compare import compare
from gemsc.verify.one_process import reference_steps
from gemsc.weights.read import own_part, pasted, read_tensors

State = dict[str, Tensor]
SGD = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
# a bias before BatchNorm has a gradient of rounding only, which Adam would blow up
ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-4)
CLIP = 0.05  # every step is clipped


def batches(size: int, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return [(draw(size, 6), 3 * draw(size, 3)) for _ in range(count)]


def one_process(
    pairs: list[tuple[Tensor, Tensor]], optimizer: Any
) -> tuple[list[float], State]:
    """Return the losses and the model after clipped steps over micro-batches of 2."""
    model = Gated().double()
    update, losses = optimizer(model.named_parameters()), []
    for x, target in pairs:
        parts = [*zip(x.split(2), target.split(2), strict=True)]
        total = 0.0
        for part, wanted in parts:
            loss = F.mse_loss(model(part), wanted) / len(parts)
            loss.backward()
            total += loss.item()
        losses.append(total)
        assert nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        update.step()
        update.zero_grad()
    return losses, model.state_dict()


def trained(
    program: Path,
    ranks: int,
    pairs: list[tuple[Tensor, Tensor]],
    *,
    optimizer: Any = SGD,
    save: Path | None = None,
    resume: Path | None = None,
) -> tuple[list[float], State]:
    """Return the losses and the whole model after clipped steps on ranks."""

    def work(trainer: Trainer) -> tuple[list[float], State, dict[str, Part]]:
        if resume is not None:
            trainer.resume(resume)
        losses = [trainer.step(*batch) for batch in pairs]
        if save is not None:
            trainer.save(save)
        return losses, trainer.state_dict(), {**trainer.program.parts}

    results = on_ranks(
        program, ranks, work,
        optimizer=optimizer, clip_norm=CLIP, dtype=torch.float64,
    )  # fmt: skip
    whole = pasted((state, parts) for _, state, parts in results)
    for _, state, parts in results:  # copies are the same everywhere, bit for bit
        for name, tensor in state.items():
            part = parts[name].of(whole[name]) if name in parts else whole[name]
            assert torch.equal(tensor, part), name
    return results[0][0], whole


def off(actual: State, expected: State) -> float:
    """Return the worst error, relative to the largest of each tensor."""
    return max(
        float((tensor - actual[name]).abs().max() / tensor.abs().max().clamp(1e-3))
        for name, tensor in expected.items()
    )


LAYOUTS = {
    "2 shards": (Written(), ADAMW),
    "3 shards": (Written((2, 2, 1)), MOMENTUM),
    "mirrored": (Written(replicas=2), MOMENTUM),
    "data": (Written((2, 3), copies=2), SGD),
    "sgd": (Written((2, 1, 2), 2, 2, micro_batches=1), SGD),
    "momentum": (Written((2, 1, 2), 2, 2, micro_batches=1), MOMENTUM),
    "adamw": (Written((2, 1, 2), 2, 2, micro_batches=1), ADAMW),
}


@pytest.mark.slow(1)
@pytest.mark.by_day(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipped_steps_are_those_of_one_process(layout: str, tmp_path: Path) -> None:
    shared, optimizer = LAYOUTS[layout]
    shared.write(tmp_path)
    pairs = batches(shared.batch)
    losses, model = trained(tmp_path, shared.ranks, pairs, optimizer=optimizer)
    wanted, expected = one_process(pairs, optimizer)
    assert losses == pytest.approx(wanted, rel=1e-9)
    assert off(model, expected) < 1e-9


@pytest.mark.slow
def test_verify_joins_parts_and_compares_copies(tmp_path: Path) -> None:
    shared = Written((2, 3), replicas=2)
    shared.write(tmp_path)
    pairs = [((x,), target) for x, target in batches(shared.batch, 2)]
    expected = reference_steps(Gated(), F.mse_loss, pairs, 4, torch.float64)
    record = run_on_threads(tmp_path, shared.ranks, pairs)
    assert record.gradients["up.weight"].shape == (20, 6)
    assert compare(record, expected).judge(torch.float64)[0] == "exact"
    for rank in range(4):  # whole weights are added up no more: each has its own
        path = tmp_path / f"rank{rank}.py"
        path.write_text(path.read_text().replace("'stage0', ", ""))
    other = compare(run_on_threads(tmp_path, shared.ranks, pairs), expected)
    assert other.errors["copies of first.weight"] == other.worst == math.inf
    assert "copies of down.weight" not in other.errors
    assert other.judge(torch.float64)[0] == "wrong"


# -- compiled --------------------------------------------------------------------------


@cache
def compiled(tied: bool, **options: Any) -> CompiledProgram:
    return compile(
        Words(tied=tied), (WORDS[:4],), loss=F.cross_entropy, example_target=WORDS[:4],
        optimizer=ADAMW, check=False, **options,
    )  # fmt: skip


WORDS = torch.randint(0, 12, (16,), generator=torch.Generator().manual_seed(1))
NETWORK = read_hardware("").network
MAST = {"ranks": 4, "shards": ("2",), "schedule": "mast", "micro_batches": 2}


@pytest.mark.slow
def test_a_compiled_program_adds_up_parts_by_their_holders(tmp_path: Path) -> None:
    program = compiled(tied=True, **MAST)
    (first, *_, last) = program.rank_modules().values()
    for sums, file in (("(0, 2)", first), ("(1, 3)", last)):
        for key in ("stage0 parts", "stage1 parts", "words.weight"):
            assert f'"{key}": {sums}' in file
        assert '"stage0": (0, 1, 2, 3)' in file
    write_directory(program.compilation, tmp_path)
    pairs = [((w,), w) for w in WORDS.view(2, 8)]
    model = Words(tied=True)
    steps = pairs, 2, torch.float64, ADAMW
    expected = reference_steps(model, F.cross_entropy, *steps)
    record = run_on_threads(tmp_path, 4, pairs, optimizer=ADAMW)
    assert compare(record, expected).judge(torch.float64)[0] == "exact"


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"stage0 parts": (0, 2)', '"stage0 parts": (0, 1, 2, 3)', "is on ranks (0, 2"),
        ('"stage0": (0, 1, 2, 3)', '"stage0": (0, 2)', "'stage0' is on ranks (0, 1,"),
        (
            '"words.weight": (0, 2)',
            '"words.weight": (0, 1, 2, 3)',
            "is on ranks (0, 2)",
        ),
        ('    worker.start_reduction("stage1 parts")\n', "", "'stage1 parts' 0 times"),
        ("rows=(0, 5)", "rows=(5, 10)", "hold other parts of 'blocks.0.up.weight'"),
    ],
)
def test_wrong_sums_of_parts_are_found(old: str, new: str, message: str) -> None:
    program = compiled(tied=True, **MAST)
    files = dict(program.rank_modules())
    task = task_of(program.plan)
    prove_files(files, program.compilation, task)
    assert old in files["rank0.py"]
    files["rank0.py"] = files["rank0.py"].replace(old, new, 1)
    with pytest.raises(InternalError, match=re.escape(message)):
        prove_files(files, program.compilation, task)


@pytest.mark.slow
def test_the_memory_of_parts_is_predicted_to_the_byte(tmp_path: Path) -> None:
    program = compiled(tied=False, ranks=4, shards=("3", "1"), micro_batches=4)
    write_directory(program.compilation, tmp_path)
    pairs = [((WORDS,), WORDS)] * 2
    record = run_on_threads(tmp_path, 4, pairs, dtype=torch.float32, optimizer=ADAMW)
    first, second = metered_peaks(program.plan)
    *shards, alone = record.peak_bytes
    assert (max(shards), alone) == (first, second)
    assert min(shards) < first  # 10 features on 3 ranks
    assert sum(program.plan.memory[0].values()) == program.plan.peak_bytes[0]


@pytest.mark.slow
def test_only_those_who_hold_the_same_add_up_gradients() -> None:
    program = compiled(tied=False, **MAST)
    first, task = program.compilation.tiles[0].program, task_of(program.plan)
    parts = program.compilation.parts(0)
    named = dict(Words(tied=False).named_parameters())
    held = held_gradients(first, task)
    for names, grouped in zip(program.compilation.owned, held, strict=True):
        trained = [name for name in names if name in named]
        cut = sum(4 * prod(parts[n].local_shape) for n in trained if n in parts)
        whole = sum(named[n].nbytes for n in trained if n not in parts)
        assert grouped == [((0, 1, 2, 3), whole), ((0, 2), cut), ((1, 3), cut)]
    program = compiled(tied=False, ranks=4, shards=("3", "1"), micro_batches=4)
    first, task = program.compilation.tiles[0].program, task_of(program.plan)
    (shards, alone), sums = held_gradients(first, task), reduced_bytes(first, task, 1)
    assert [ranks for ranks, _ in (*shards, *alone)] == [
        (0, 1, 2),
        (0,),
        (1,),
        (2,),
        (3,),
    ]
    assert sums == [shards[0][1], 0]
    both = reduced_bytes(first, task, 2)
    assert both == [stage.gradient_bytes for stage in task.stages]
    for copies, parts_too in ((1, False), (2, True)):
        made, one = gradient_sums(NETWORK, [shards, alone], 4, copies)
        assert made.packed == sums[0] + parts_too * shards[1][1]
        assert made.updated == task.stages[0].gradient_bytes
        assert (one.packed > 0) == parts_too
        assert made.seconds > one.seconds >= 0


# -- checkpoints -----------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_is_whole_and_loads_at_another_split(tmp_path: Path) -> None:
    three, mirrored = Written((2, 2, 1)), Written((1, 4), replicas=2, micro_batches=1)
    three.write(tmp_path / "three")
    mirrored.write(tmp_path / "mirrored")
    pairs = batches(three.batch, 4)
    saved, alone = tmp_path / "saved", tmp_path / "alone"
    train = partial(trained, tmp_path / "three", three.ranks, optimizer=ADAMW)
    before, _ = train(pairs[:2], save=saved)
    losses, expected = one_process(pairs, ADAMW)
    after, model = train(pairs[2:], resume=saved)
    assert before + after == pytest.approx(losses, rel=1e-9)
    assert off(model, expected) < 1e-9
    _, expected = one_process(pairs[:2], ADAMW)
    stored = weights_in(saved)
    Gated().double().load_state_dict(stored)
    assert off(stored, expected) < 1e-9
    alone.mkdir()
    save_file(stored, alone / "model.safetensors")
    _, other = trained(tmp_path / "mirrored", mirrored.ranks, [], resume=alone)
    assert other.keys() == stored.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in stored.items())


def test_a_checkpoint_goes_on_with_other_parts(tmp_path: Path) -> None:
    for units in ((3, 2), (2, 3)):
        Written(units).write(tmp_path / f"{units[0]}")
    pairs, saved = batches(4, 4), tmp_path / "saved"
    go = partial(trained, optimizer=ADAMW)
    before, _ = go(tmp_path / "3", 4, pairs[:2], save=saved)
    after, model = go(tmp_path / "2", 4, pairs[2:], resume=saved)
    losses, expected = one_process(pairs, ADAMW)
    assert before + after == pytest.approx(losses, rel=1e-9)
    assert off(model, expected) < 1e-9


def test_tensors_of_another_shape_are_refused(tmp_path: Path) -> None:
    Written().write(tmp_path)
    weights = Gated().state_dict()
    weights["down.weight"] = weights["down.weight"][:, :6].clone()  # a part, not all
    (tmp_path / "other").mkdir()
    save_file(
        {n: t.clone() for n, t in weights.items()},
        tmp_path / "other" / "model.safetensors",
    )
    message = r"'down.weight' has shape \[6, 6\], but the model needs \[6, 10\]"
    with pytest.raises(GemscError, match=message):
        trained(tmp_path, 4, [], resume=tmp_path / "other")
    path = tmp_path / "weights" / "stage0.safetensors"
    save_file({**load_file(path), "up.bias": torch.zeros(12)}, path)
    message = r"'up.bias' has shape \[12\], but the program needs \[20\]"
    with pytest.raises(GemscError, match=message):
        trained(tmp_path, 4, [])


def test_an_optimizer_that_looks_across_tensors_is_refused(tmp_path: Path) -> None:
    Written().write(tmp_path)
    message = r"optimizer\(\) looks across 'up.weight' \(its halves step differently"
    with pytest.raises(GemscError, match=message):
        trained(tmp_path, 4, [], optimizer=torch.optim.Adafactor)


# -- parts -----------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "outer", "units"), [(0, 1, 5), (1, 2, 3), (2, 3, 2)])
def test_parts_are_cut_read_and_pasted(
    dim: int, outer: int, units: int, tmp_path: Path
) -> None:
    shape = [3, 4, 2]
    shape[dim] = outer * units * 2
    whole = torch.randn(shape)
    save_file({"w": whole}, tmp_path / "file")
    ends = [0, 1, 1, units]  # one of them is empty
    cut = [
        Part(tuple(shape), dim, outer, units, rows) for rows in itertools.pairwise(ends)
    ]
    mapped = read_tensors(tmp_path / "file")["w"]
    held = [{"w": own_part(mapped, part, "w")} for part in cut]
    for part, tensors in zip(cut, held, strict=True):
        assert tensors["w"].shape == part.local_shape
        assert tensors["w"].is_contiguous()
        copy = part.of(whole)
        assert torch.equal(tensors["w"], copy)
        assert torch.equal(own_part(mapped, part, "w", (1, 2)), copy[1:2])
        shared = copy.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert not shared
        assert eval(str(part)) == part
    tables = [{"w": part} for part in cut]
    assert torch.equal(pasted(zip(held, tables, strict=True))["w"], whole)
    assert make_whole(cut)
    assert not make_whole(cut[1:])
    assert not make_whole([*cut, cut[0]])
    extra = {
        "b": torch.tensor([True] * 3),
        "n": torch.tensor(5),
        "e": torch.empty(0, 2),
    }
    extra["h"] = torch.randn(5).to(torch.bfloat16)
    for number, tensors in enumerate(held):
        save_file({**tensors, **(extra if number else {})}, tmp_path / f"{number}")
    read = (load_file(tmp_path / f"{number}") for number in range(len(held)))
    joined = pasted(zip(read, tables, strict=True))
    assert joined.keys() == {"w", *extra}
    for name, tensor in {"w": whole, **extra}.items():
        assert joined[name].dtype == tensor.dtype
        assert torch.equal(joined[name], tensor)
    with pytest.raises(InternalError, match="the parts of 'w' are not all of it"):
        pasted(zip(held[1:], tables[1:], strict=True))


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(32, 5)
        self.mixing = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64) / 4)
        self.second = nn.Linear(16, 16, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.fft.fft(self.first(x), dim=1)
        z = torch.fft.ifft(self.second(z @ self.mixing), dim=1)
        return self.last(torch.cat([z.real, z.imag * z.abs()], -1))


def test_complex_weights_are_cut_as_others_are() -> None:
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    given = Spectral(), (x,)
    program = compile(*given, loss=lambda y: y.square().mean(), ranks=2, shards="2")
    assert program.plan.unchecked == ""  # a step of the ranks was put together
    parts = program.rank_modules()["rank0.py"].partition("parts=")[2]
    assert '"mixing"' in parts


def test_to_cut_a_layer_makes_no_step_of_its_spectral_norm() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), layer, nn.Linear(8, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    given = {"loss": lambda y: y.square().mean(), "ranks": 2, "shards": "2"}
    program = compile(model, (torch.randn(2, 4),), **given)
    assert '"2.bias"' in program.rank_modules()["rank0.py"].partition("parts=")[2]
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
