"""Damaged, foreign and hostile checkpoints: refused by name, and nothing is taken."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from program_support import Net, X, batch_of, on_ranks, weights_in, written
from safetensors.torch import save_file
from torch import Tensor, nn

from gemsc.errors import GemscError
from gemsc.runtime.checkpoint.manifest import _digest
from gemsc.runtime.training.trainer import Trainer

BATCH = batch_of((X, X), 2)
State = dict[str, Tensor]
BYTES = torch.ones(4, 4, dtype=torch.int8)


def forward(self: Any, x: Tensor) -> Tensor:
    return self.c(torch.tanh(self.norm(self.b(torch.tanh(self.a(x))))))


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=0.01)


def net(**other: Any) -> Net:
    return Net(forward, **{"norm": nn.BatchNorm1d(4), **other})


@pytest.fixture(scope="module", autouse=True)
def no_disk() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged") / "program"
    written(folder, net(), micro_batches=2)
    return folder


def save(program: Path, folder: Path, steps: Iterable[int], **options: Any) -> None:
    def work(trainer: Trainer) -> None:
        for _ in steps:
            trainer.step(*BATCH)
            trainer.save(folder)

    on_ranks(program, 2, work, **{"optimizer": adam, **options})


@pytest.fixture(scope="module")
def saved(program: Path) -> Path:
    """Two checkpoints: what is damaged is the later one."""
    save(program, program.parent / "saved", (1, 2))
    return program.parent / "saved"


def everything(trainer: Trainer) -> State:
    """Return what a rank has, by name."""
    state = {"steps": torch.tensor(trainer.worker.steps.done)}
    state["generator"] = torch.get_rng_state()
    assert trainer.worker.updates.optimizer is not None
    for index, slots in trainer.worker.updates.optimizer.state_dict()["state"].items():
        state |= {f"{key} {index}": tensor for key, tensor in slots.items()}
    return {name: t.clone() for name, t in (state | trainer.state_dict()).items()}


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


# -- damages ---------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edit(folder: Path, act: Callable[[Any], object], *, seals: bool = True) -> None:
    """Change the content of a manifest; give it the digest that it needs."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    act(manifest["content"])
    if seals:
        manifest["sha256"] = _digest(manifest["content"])
    path.write_text(json.dumps(manifest))


def swap(folder: Path) -> None:
    first, second = (folder / f"rank{rank}.safetensors" for rank in (0, 1))
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def put(*path: str | int, to: Any) -> Callable[[Path], None]:
    """Return what sets a value in the content of a manifest, and seals it."""

    def act(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = to

    return lambda folder: edit(folder, act)


def drop(*path: str | int) -> Callable[[Path], None]:
    def act(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return lambda folder: edit(folder, act)


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def rename_file(name: str) -> Callable[[Path], None]:
    def act(content: Any) -> None:
        content["files"][name] = content["files"].pop("rank1.safetensors")

    return lambda folder: edit(folder, act)


def text(value: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "manifest.json").write_text(value) and None


def replaced(name: str, act: Callable[[Path], object]) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        (folder / name).unlink()
        act(folder / name)

    return work


R0, R1, M = "rank0.safetensors", "rank1.safetensors", "manifest.json"
W = "model/a.weight"  # on rank 0
GENERATOR = ("progress", "ranks", 0, "generators")
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a rank's file is missing": (lambda f: (f / R1).unlink(), f"{R1} is missing"),
    "all files are missing": (
        lambda f: [(f / name).unlink() for name in (R0, R1)],
        f"{R0} is missing",
    ),
    "a file is empty": (lambda f: os.truncate(f / R0, 0), f"{R0} is damaged: 0 bytes"),
    "a file is cut": (lambda f: os.truncate(f / R1, 20), f"{R1} is damaged: 20 bytes"),
    "the last byte is missing": (
        lambda f: os.truncate(f / R1, (f / R1).stat().st_size - 1),
        f"{R1} is damaged: .* bytes, not",
    ),
    "a byte too many": (
        lambda f: (f / R0).write_bytes((f / R0).read_bytes() + b"0"),
        f"{R0} is damaged: .* bytes, not",
    ),
    "one bit of a tensor": (lambda f: flip(f / R1, -9), f"{R1} is damaged: it is not"),
    "one bit of a table": (lambda f: flip(f / R0, 12), f"{R0} is damaged: it is not"),
    "one bit of its length": (lambda f: flip(f / R0, 1), f"{R0} is damaged: it is not"),
    "a folder for a file": (replaced(R1, Path.mkdir), f"{R1} is a folder, not a file"),
    "a dead link for a file": (
        replaced(R1, lambda p: p.symlink_to("nowhere")),
        f"{R1} is missing",
    ),
    "files are exchanged": (swap, r"is damaged"),
    "a file of an older step": (
        lambda f: shutil.copy(f.parent / "step-000001" / R0, f / R0),
        f"{R0} is damaged",
    ),
    "a pickle for a file": (
        replaced(R0, lambda p: torch.save({"a": 1}, p)),
        f"{R0} is damaged",
    ),
    "no manifest": (lambda f: (f / M).unlink(), f"{M} is missing"),
    "an empty manifest": (text(""), f"{M} is damaged"),
    "half a manifest": (lambda f: os.truncate(f / M, 999), f"{M} is damaged"),
    "a manifest of bytes": (
        lambda f: (f / M).write_bytes(b"\xff\xfe\x00"),
        f"{M} is damaged",
    ),
    "a manifest that is a list": (text("[]"), f"{M} is damaged"),
    "a manifest that is null": (text("null"), f"{M} is damaged"),
    "a manifest that is a number": (text("1e999"), f"{M} is damaged"),
    "a manifest of brackets": (text("[" * 10**5), f"{M} is damaged"),
    "a folder for a manifest": (replaced(M, Path.mkdir), f"{M} is a folder"),
    "no format": (text("{}"), f"{M} is damaged: it has no 'format'"),
    "an unknown format": (text('{"format": 9}'), "has format 9, this gemsc reads 3"),
    "an older format": (
        text('{"format": 2, "step": 2, "ranks": 2, "files": {}}'),
        "has format 2, this gemsc reads 3",
    ),
    "a huge format": (text('{"format": %s}' % ("9" * 3000)), "has format 9+, this"),
    "a number in a manifest": (
        lambda f: edit(f, lambda c: c.update(step=3), seals=False),
        f"{M} is damaged: it is not what was saved",
    ),
    "a negative step": (put("step", to=-1), "damaged: -1 is not a whole number"),
    "a huge step": (put("step", to=10**30), "damaged: 10+ is not a whole number"),
    "a step in words": (put("step", to="two"), "'two' is not a whole number"),
    "a step that is no number": (put("step", to=float("nan")), "nan is not a whole"),
    "a step that is true": (put("step", to=True), "True is not a whole number"),
    "more ranks": (put("ranks", to=10**9), "does not name a file of each rank"),
    "no ranks": (
        lambda f: edit(f, lambda c: c.update(ranks=0, files={}, tensors={})),
        "does not name a file of each rank",
    ),
    "a file above": (
        rename_file("../rank1.safetensors"),
        "is not a file of a checkpoint",
    ),
    "a file elsewhere": (rename_file("/etc/passwd"), "is not a file of a checkpoint"),
    "a name with a line": (rename_file("rank1.safetensors\n"), "is not a file of a"),
    "files in a list": (put("files", to=["rank0"]), f"{M} is damaged"),
    "a file without size": (drop("files", R0, "bytes"), "it has no 'bytes'"),
    "tensors in a list": (put("tensors", to=[]), f"{M} is damaged"),
    "a tensor is not told": (drop("tensors", W), "has no 'a.weight'"),
    "a tensor is in no file": (put("tensors", W, "pieces", to=[]), "not all of 'a.wei"),
    "a tensor is in a file of nobody": (
        put("tensors", W, "pieces", to=[["../x", None]]),
        "a tensor is in '../x'",
    ),
    "a tensor is twice there": (
        put("tensors", W, "pieces", to=[[R0, None]] * 2),
        "not all of 'a.weight'",
    ),
    "a tensor is in the other file": (
        put("tensors", W, "pieces", to=[[R1, None]]),
        f"{R1} is damaged",
    ),
    "half a tensor": (
        put("tensors", W, "pieces", to=[[R0, [[[0, 2]], [[0, 4]]]]]),
        "not all of 'a.weight'",
    ),
    "a piece that is too large": (
        put("tensors", W, "pieces", to=[[R0, [[[0, 9]], [[0, 4]]]]]),
        "a piece is larger than its tensor",
    ),
    "a piece without dimensions": (
        put("tensors", W, "pieces", to=[[R0, [[[0, 4]]]]]),
        f"{M} is damaged",
    ),
    "a piece that runs backwards": (
        put("tensors", W, "pieces", to=[[R0, [[[4, 0]], [[0, 4]]]]]),
        "intervals of a piece are not in order",
    ),
    "a negative size": (put("tensors", W, "shape", to=[-4, 4]), "-4 is not a whole"),
    "a size in words": (put("tensors", W, "shape", to="4x4"), "is not a list"),
    "an unknown dtype": (put("tensors", W, "dtype", to="object"), "is not what was"),
    "another dtype": (put("tensors", W, "dtype", to="int8"), "is not what was saved"),
    "no progress": (drop("progress"), "it has no 'progress'"),
    "progress in a list": (put("progress", to=[]), f"{M} is damaged"),
    "progress of one rank": (drop("progress", "ranks", 1), "does not know all ranks"),
    "updates of no steps": (put("progress", "accumulate", to=0), f"{M} is damaged"),
    "no generators": (drop(*GENERATOR), f"{M} is damaged"),
    "a generator of nothing": (put(*GENERATOR, "torch", to=None), f"{M} is damaged"),
    "a generator of texts": (put(*GENERATOR, "python", to=["a"] * 3), "is damaged"),
    "a generator elsewhere": (
        put(*GENERATOR, "torch", to={"$": "stored", "of": "../../x"}),
        f"{M} is damaged",
    ),
    **{
        f"a generator of NumPy's with {value!r} at {at}": (
            put(*GENERATOR, "numpy", at, to=value),
            f"{M} is damaged: ValueError",
        )
        for at, value in (
            *((2, 10**6), (2, 625), (2, -1), (2, 1.5), (3, 7), (4, "0"), (0, "PCG64")),
        )
    },
    "a generator of Python's with a text": (
        put(*GENERATOR, "python", 2, to="0"),
        f"{M} is damaged: ValueError",
    ),
    "an unknown kind": (
        put("progress", "extra", to={"$": "os.system", "of": "true"}),
        f"{M} is damaged: KeyError 'os.system'",
    ),
    "a deep nest": (put("progress", "extra", to=nested(900)), "is damaged"),
    "groups without names": (
        put("progress", "ranks", 0, "groups", to=[{}]),
        f"{M} is damaged",
    ),
    "states in a list": (put("progress", "ranks", 0, "values", to=[1]), "is damaged"),
    "aliases in a list": (put("aliases", to=[]), f"{M} is damaged"),
}

# -- what is no checkpoint of this program: the error, and the advice ------------------


def written_to(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def tensors_to(path: Path, **tensors: Tensor) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


def weights(**other: Tensor) -> State:
    return {**net().state_dict(), **other}


def pickled(path: Path) -> Path:
    torch.save({"a.weight": X}, path)
    return path


def linked(folder: Path, target: str) -> Path:
    folder.mkdir()
    (folder / "latest").symlink_to(target)
    return folder


def of_another(folder: Path, model: nn.Module | None = None, **options: Any) -> Path:
    """Save a checkpoint of another model, or of the program with other options."""
    program = folder.parents[1] / "program"
    if model is not None:
        written(program := folder / "program", model, micro_batches=2)
    save(program, folder, (1,), **options)
    return folder


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


FOREIGN: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "nothing": (lambda p: p / "none", "there is no .*none", "--save wrote"),
    "an empty folder": (
        lambda p: written_to(p / "empty" / ".keep", "").parent,
        "is not a checkpoint: it has no latest",
        "--save wrote",
    ),
    "a link to nothing": (
        lambda p: linked(p / "dead", "step-000009"),
        "step-000009/manifest.json is missing",
        "start again",
    ),
    "a link to itself": (
        lambda p: linked(p / "itself", "latest"),
        "there is no .*itself/latest",
        "that --save wrote",
    ),
    "what a link to itself leads to": (
        lambda p: linked(p / "nowhere", "latest") / "latest",
        "there is no .*nowhere/latest",
        "that --save wrote",
    ),
    "a link to a file": (
        lambda p: linked(written_to(p / "f" / "x", "").parent / "run", "../x"),
        "run/../x is not a checkpoint",
        "the folder of a run",
    ),
    "a pickle": (lambda p: pickled(p / "model.pt"), "is not a checkpoint", "save_file"),
    "a text": (
        lambda p: written_to(p / "notes.txt", "x"),
        "notes.txt is not a checkpoint",
        "a .safetensors file",
    ),
    "a wrong file of weights": (
        lambda p: written_to(p / "x.safetensors", "no weights"),
        "x.safetensors",
        "save it again",
    ),
    "an empty file of weights": (
        lambda p: written_to(p / "e.safetensors", ""),
        "e.safetensors",
        "save it again",
    ),
    "weights with a huge table": (
        lambda p: written_to(p / "h.safetensors", b"\xff" * 8 + b"{}"),
        "h.safetensors",
        "save it again",
    ),
    "weights of another model": (
        lambda p: tensors_to(p / "hf" / "model.safetensors", **{"bert.w": X}).parent,
        "hf.model.safetensors has no 'a.(weight|bias)'",
        "of this model",
    ),
    "weights of a larger model": (
        lambda p: tensors_to(p / "l.safetensors", **weights(**{"e.weight": X})),
        "has 'e.weight', which the model does not have",
        "without it",
    ),
    "weights in integers": (
        lambda p: tensors_to(p / "i.safetensors", **weights(**{"b.weight": BYTES})),
        "'b.weight' is int8, but the model needs float32",
        "convert quantized ones",
    ),
    "weights in several files": (
        lambda p: tensors_to(p / "several" / "a.safetensors", x=X).parent,
        "is not a checkpoint: it has no latest",
        "gemsc import PROGRAM",
    ),
    "an older gemsc": (
        lambda p: written_to(p / "old" / "optimizer-rank0.pt", "").parent,
        "saved by an older gemsc",
        "only the weights",
    ),
    "another model": (
        lambda p: of_another(p / "wide", net(a=nn.Linear(4, 4, bias=False))),
        "has no 'a.bias'",
        "a model() that loads what fits of another one",
    ),
    "other sizes": (
        lambda p: of_another(p / "sizes", net(d=nn.Linear(3, 3))),
        r"'d.weight' has shape \[3, 3\], but the program needs \[4, 4\]",
        "a model() that loads what fits of another one",
    ),
    "another optimizer": (
        lambda p: of_another(p / "sgd", optimizer=sgd),
        "has the optimizer SGD, but the program has Adam",
        "use SGD again, or `gemsc export`",
    ),
    "another seed": (
        lambda p: of_another(p / "seed", seed=4),
        "of a run with seed 4, but this run has 0",
        "leave out --seed",
    ),
}


@dataclass
class Refusal:
    """What became of an attempt: the error, and whether the trainer was unchanged."""

    error: BaseException | None
    is_untouched: bool


def attempt(trainer: Trainer, place: Path) -> Refusal:
    before, error = everything(trainer), None
    try:
        trainer.resume(place)
    except Exception as caught:
        error = caught
    return Refusal(error, same(before, everything(trainer)))


@pytest.fixture(scope="module")
def refusals(program: Path, saved: Path) -> dict[str, list[Refusal]]:
    """What both ranks say to each damaged checkpoint, one after the other."""
    root, places = program.parent, {}
    for number, (name, (act, _)) in enumerate(DAMAGES.items()):
        folder = root / "damages" / str(number)
        shutil.copytree(saved, folder, symlinks=True)
        act(folder / "step-000002")
        places[name] = folder
    (root / "foreign").mkdir()
    places |= {name: make(root / "foreign") for name, (make, *_) in FOREIGN.items()}
    hidden = [path for path in (root / "damages").rglob(".*")]
    assert not hidden

    def work(trainer: Trainer) -> dict[str, Refusal]:
        trainer.step(*BATCH)
        return {name: attempt(trainer, place) for name, place in places.items()}

    first, second = on_ranks(program, 2, work, optimizer=adam)
    assert not [path for path in (root / "damages").rglob(".*")]
    return {name: [first[name], second[name]] for name in places}


# States that are read well, and that the next step would fail on, or take otherwise

RANK = ("progress", "ranks", 0)
GROUP, STATE = (*RANK, "groups", 0, "values"), (*RANK, "values", "a.weight", "state")
STATES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no average": (drop("tensors", "optimizer/exp_avg/a.weight"), "KeyError 'exp_avg'"),
    "no step": (drop(*STATE, "step"), "KeyError 'step'"),
    "a step in words": (put(*STATE, "step", to="two"), "optimizer does not fit Adam"),
    "a step that is a list": (put(*STATE, "step", to=[2, 3]), "does not fit Adam"),
    "a rate in words": (put(*GROUP, "lr", to="fast"), "'fast' in place of 0.0"),
    "one beta": (put(*GROUP, "betas", to=[0.9]), r"\[0.9\] in place of"),
    "a switch in words": (put(*GROUP, "maximize", to="no"), "'no' in place of False"),
    "a switch that is on": (put(*GROUP, "amsgrad", to=True), "'max_exp_avg_sq'"),
    "a scheduler in words": (
        put(*RANK, "scheduler", "step_size", to="two"),
        "scheduler does not fit StepLR: ValueError 'two' in place of 1",
    ),
    "a scheduler without rates": (
        put(*RANK, "scheduler", "base_lrs", to=[]),
        r"\[\] in place of \[0.01\]",
    ),
    "a scheduler that cannot step": (put(*RANK, "scheduler", "step", to=1), "in place"),
    "a scheduler of nothing": (put(*RANK, "scheduler", to=[]), r"\[\] in place of"),
}


def by_steps(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.fixture(scope="module")
def wrong_states(program: Path) -> dict[str, Refusal]:
    root, options = program.parent / "states", {"scheduler": by_steps}
    save(program, root / "saved", (1, 2), **options)
    for name, (act, _) in STATES.items():
        shutil.copytree(root / "saved", root / name, symlinks=True)
        act(root / name / "step-000002")

    def work(trainer: Trainer) -> dict[str, Refusal]:
        trainer.step(*BATCH)
        refused = {name: attempt(trainer, root / name) for name in STATES}
        trainer.resume(root / "saved")
        trainer.step(*BATCH)
        return refused

    return on_ranks(program, 2, work, optimizer=adam, **options)[1]


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_the_next_step_would_fail_on_is_refused(
    name: str, wrong_states: dict[str, Refusal]
) -> None:
    error = wrong_states[name].error
    assert isinstance(error, GemscError), repr(error)
    assert re.search(STATES[name][1], error.message), error.message
    assert "as in the run that was saved" in str(error)
    assert wrong_states[name].is_untouched


def test_a_program_without_the_scheduler_of_the_checkpoint_is_refused(
    program: Path, tmp_path: Path
) -> None:
    save(program, tmp_path, (1,), scheduler=by_steps)

    def work(trainer: Trainer) -> Refusal:
        trainer.step(*BATCH)
        return attempt(trainer, tmp_path)

    for refusal in on_ranks(program, 2, work, optimizer=adam):
        assert str(refusal.error).startswith(
            "error: the checkpoint has the scheduler StepLR, but the program has none\n"
            "help: use StepLR again, "
        )
        assert refusal.is_untouched


@pytest.mark.by_day(30)
@pytest.mark.parametrize("name", [*DAMAGES, *FOREIGN])
def test_it_is_refused_by_name_and_nothing_is_taken(
    name: str, refusals: dict[str, list[Refusal]]
) -> None:
    for refusal in refusals[name]:
        error = refusal.error
        assert isinstance(error, GemscError), repr(error)
        assert refusal.is_untouched
        said = FOREIGN[name][1] if name in FOREIGN else DAMAGES[name][1]
        assert re.search(said, error.message), error.message
        assert error.help is not None
        assert "compile again" not in str(error)
        if name in FOREIGN:
            assert FOREIGN[name][2] in error.help
        elif not re.search("format|has no 'a.weight'", error.message):
            assert "step-000001 is complete: resume with" in error.help


def test_a_damaged_checkpoint_is_not_exported_and_the_older_one_is_whole(
    program: Path, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "saved", symlinks=True)
    flip(tmp_path / "saved" / "step-000002" / R1, -9)
    with pytest.raises(GemscError, match="is damaged") as error:
        weights_in(tmp_path / "saved")
    assert error.value.help is not None
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    older = Path(error.value.help.split(" is complete")[0])
    model = net()
    model.load_state_dict(weights_in(older))

    def work(trainer: Trainer) -> int:
        trainer.resume(older)
        return trainer.worker.steps.done

    assert on_ranks(program, 2, work, optimizer=adam) == [1, 1]
    drop("progress", "ranks", 1, "generators")(older)  # each rank has its own
    with pytest.raises(GemscError, match="is damaged: KeyError 'generators'"):
        on_ranks(program, 2, work, optimizer=adam)


# -- random changes --------------------------------------------------------------------

JUNK = (
    *(None, True, -1, 0, 7, 2**60, 10**40, 0.5, float("inf"), "", "x", "../x", "/"),
    *([], [[]], {}, {"$": "tuple"}, {"$": "stored", "of": "x"}, {"of": 1}, [[0, 1]]),
)


def changed(value: Any, draw: random.Random) -> Any:
    """Return JSON with one thing in it that is something else."""
    if draw.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return draw.choice(JUNK)
    if isinstance(value, list):
        at = draw.randrange(len(value))
        return [*value[:at], changed(value[at], draw), *value[at + 1 :]]
    key = draw.choice([*value])
    others = {name: member for name, member in value.items() if name != key}
    if draw.random() < 0.2:
        return others
    if draw.random() < 0.2:
        return {**others, draw.choice(["", "x", "../x", "model/x"]): value[key]}
    return {**value, key: changed(value[key], draw)}


@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.nightly)])
def test_a_manifest_with_anything_in_it_is_taken_or_refused(
    count: int, program: Path, saved: Path, tmp_path: Path
) -> None:
    whole = json.loads((saved / "latest" / M).read_text())
    draw, sealed = random.Random(count), []
    for _ in range(count):
        content = whole["content"]
        for _ in range(draw.choice([1, 1, 2, 5])):
            content = changed(content, draw)
        sealed.append({**whole, "content": content, "sha256": _digest(content)})
    folder = tmp_path / "step-000002"
    shutil.copytree(saved / "step-000002", folder)

    def work(trainer: Trainer) -> list[str]:
        wrong = []
        for number, manifest in enumerate(sealed):
            if trainer.transport.rank == 0:
                (folder / M).write_text(json.dumps(manifest))
            trainer.transport.barrier()
            refusal = attempt(trainer, folder)
            if refusal.error is not None and not isinstance(refusal.error, GemscError):
                wrong.append(f"{number}: {refusal.error!r}")
            elif refusal.error is not None and not refusal.is_untouched:
                wrong.append(f"{number}: {refusal.error} and changed")
            trainer.transport.barrier()
        return wrong

    assert on_ranks(program, 2, work, optimizer=adam) == [[], []]
