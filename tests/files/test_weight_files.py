"""Weights of users: files, shards, names; models on the meta device; gemsc import."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import Gemsc, files, gemsc_here
from program_support import on_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gemsc as api
from gemsc.cli import import_
from gemsc.errors import GemscError
from gemsc.plan import Plan
from gemsc.runtime.training.trainer import Trainer
from gemsc.weights.first import FirstWeights
from gemsc.weights.load import fill, model_state
from gemsc.weights.source import WeightFiles

MODEL = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.norm = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.norm(self.embed(x)))

    def model():
        with torch.device("meta"):
            return Net()

    weights = "folder"
    loss = nn.CrossEntropyLoss()

    def example_inputs():
        return (torch.arange(4),)

    def example_target():
        return torch.arange(4)
"""


class Net(nn.Module):
    """The net of MODEL."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.embed(x)))
        return out


def state(*, seed: int = 0, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return random weights of the net; its tied ones once, as files have them."""
    torch.manual_seed(seed)
    tensors = {name: tensor.clone() for name, tensor in Net().state_dict().items()}
    del tensors["head.weight"]
    floats = (name for name, tensor in tensors.items() if tensor.is_floating_point())
    return tensors | {name: tensors[name].to(dtype or torch.float32) for name in floats}


def write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write a folder as Hugging Face ships it."""
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    places = {
        name: f"model-0000{1 + i % 2}-of-00002.safetensors"
        for i, name in enumerate(names)
    }
    for shard in {*places.values()}:
        part = {name: tensors[name] for name in names if places[name] == shard}
        save_file(part, folder / shard)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the model's file and its weights, the current one."""
    (tmp_path / "model.py").write_text(textwrap.dedent(MODEL))
    write_shards(tmp_path / "folder", state())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def gemsc(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Gemsc:
    """Return the command, in this process."""
    return gemsc_here(monkeypatch, capfd)


def weights_of(program: Path) -> dict[str, Tensor]:
    """Return what the ranks of a program read when they start."""
    plan = Plan.read(program / "plan.toml")
    first = FirstWeights(program / plan.weights)
    stages = [stage.index for stage in plan.stages]
    return {n: first.read(i, n) for i in stages for n in first.table(i)}


def compiled(gemsc: Gemsc, *more: str) -> Path:
    outcome = gemsc("compile", "model.py", "--ranks", "2", "-o", "out", *more)
    assert outcome.code == 0, outcome.err
    return Path("out")


def equal(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return actual.keys() == wanted.keys() and all(
        tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name])
        for name, tensor in actual.items()
    )


# -------------------------------------------------- models on the meta device


@pytest.mark.slow
def test_a_meta_model_starts_from_its_shards(here: Path, gemsc: Gemsc) -> None:
    assert equal(weights_of(compiled(gemsc)), state())


def test_weights_of_another_dtype_are_converted(here: Path, gemsc: Gemsc) -> None:
    write_shards(here / "folder", state(dtype=torch.bfloat16))
    rounded = state(dtype=torch.bfloat16)
    wanted = {
        n: t.to(w.dtype)
        for (n, t), w in zip(rounded.items(), state().values(), strict=True)
    }
    assert equal(weights_of(compiled(gemsc)), wanted)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_without_data_is_named(persistent: bool, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
        model.register_buffer("rope", torch.arange(2.0), persistent=persistent)
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(GemscError, match="'rope'") as caught:
        api.load_weights(model, tmp_path / "a.safetensors")
    assert ("init_empty_weights" in str(caught.value)) is not persistent


def test_a_buffer_with_data_keeps_it(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    model.register_buffer("rope", torch.arange(2.0), persistent=False)
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "a.safetensors")
    api.load_weights(model, tmp_path / "a.safetensors")
    assert model.rope.tolist() == [0, 1]
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_what_takes_the_place_of_a_parameter_is_one_like_it(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Net()
    weight: Any = model.embed.weight.requires_grad_(False)
    weight.decays = False
    save_file(state(), tmp_path / "a.safetensors")
    api.load_weights(model, tmp_path / "a.safetensors")
    now: Any = model.head.weight
    assert model.embed.weight is now
    assert not now.requires_grad
    assert now.decays is False
    assert model.norm[0].weight.requires_grad


def test_constants_and_the_loss_are_no_part_of_a_model() -> None:
    stage = nn.ModuleDict({n: nn.BatchNorm1d(2) for n in ("a", "_constants", "_loss")})
    assert {name.partition(".")[0] for name in model_state(stage)} == {"a"}


def test_a_stage_is_filled_with_tensors_of_its_shapes(tmp_path: Path) -> None:
    wrong = {"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}
    with pytest.raises(GemscError, match=r"'weight' have shape \[2, 3\]"):
        fill(nn.Linear(2, 3), wrong.__getitem__, torch.device("cpu"))


def test_the_files_of_a_model_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(nn.Linear(2, 2).state_dict(), path)
    before = path.read_bytes()
    model = nn.Linear(2, 2)
    api.load_weights(model, path)
    with torch.no_grad():
        model.weight.zero_()
    assert path.read_bytes() == before


# ---------------------------------------------------------------- gemsc import


@pytest.mark.slow(1)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["one", "shards", "folder of one", "torch", "nested"])
def test_a_program_starts_from_imported_weights(
    kind: str, device: str, here: Path, gemsc: Gemsc
) -> None:
    text = (here / "model.py").read_text().replace('"meta"', f'"{device}"')
    (here / "model.py").write_text(text)
    program, new = compiled(gemsc), state(seed=1)
    plan = (program / "plan.toml").read_text()
    source = here / "new"
    match kind:
        case "one":
            save_file(new, source := here / "new.safetensors")
        case "shards":
            write_shards(source, new)
        case "folder of one":
            source.mkdir()
            save_file(new, source / "model.safetensors")
        case "torch":
            torch.save(
                new | {"head.weight": new["embed.weight"]}, source := here / "new.pt"
            )
        case "nested":
            torch.save({"state_dict": new, "epoch": 3}, source := here / "new.pth")
    (program / "weights-2").mkdir()
    (program / "weights-2" / "stage9.safetensors").write_text("of a killed import")
    outcome = gemsc("import", "out", str(source))
    assert outcome.code == 0, outcome.err
    assert equal(weights_of(program), new)
    changed = plan.replace('weights = "weights"', 'weights = "weights-2"')
    assert (program / "plan.toml").read_text() == changed
    held = [path.stat().st_size for path in program.glob("weights*/stage*.safetensors")]
    assert all((size > 200) is (device == "cpu") for size in held), held


def test_that_imported_weights_are_not_kept_is_said(here: Path, gemsc: Gemsc) -> None:
    text = (here / "model.py").read_text().replace('"meta"', '"cpu"')
    (here / "model.py").write_text(text)
    words = "compile", "model.py", "--ranks", "1", "--no-check", "-o", "out"
    said = "note: out starts from the model's weights now: import others again"
    assert said not in gemsc(*words).out
    save_file(state(seed=1), here / "new.safetensors")
    assert gemsc("import", "out", "new.safetensors").code == 0
    assert said in gemsc(*words).out
    assert said not in gemsc(*words).out


@pytest.mark.slow
def test_an_import_that_fails_leaves_the_program(
    here: Path, gemsc: Gemsc, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiled(gemsc)
    before = files(program)

    def fail(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(import_, "write_text", fail)
    assert gemsc("import", "out", "folder").code == 1
    assert files(program) == before


@pytest.mark.slow
def test_an_import_says_what_it_converts(here: Path, gemsc: Gemsc) -> None:
    compiled(gemsc)
    write_shards(here / "half", state(dtype=torch.bfloat16))
    outcome = gemsc("import", "out", "half")
    assert "note: 7 tensors of half converted from bfloat16 to float32" in outcome.out
    again = gemsc("compile", "model.py", "--ranks", "2", "-o", "out")
    assert again.code == 0, again.err
    assert {path.name for path in Path("out").glob("weights*")} == {"weights"}


# ------------------------------------------------------------------ bad files


def renamed(old: str, new: str) -> dict[str, Tensor]:
    return {name.replace(old, new): tensor for name, tensor in state().items()}


@pytest.mark.parametrize(
    ("tensors", "says", "advice"),
    [
        (
            renamed("embed", "embbed"),
            "has no 'embed.weight'",
            "is 'embbed.weight' meant",
        ),
        (
            {f"module.{n}": t for n, t in state().items()},
            "and 5 more",
            "with 'module.'",
        ),
        ({"norm.0.bias": torch.ones(8)}, "has no 'embed.weight'", "model() load what"),
        (state() | {"other": torch.ones(1)}, "has 'other', which", "without it"),
        (state() | {"norm.0.bias": torch.ones(3)}, r"has shape \[3\]", "of this model"),
        (
            state() | {"norm.0.bias": torch.ones(8, dtype=torch.int8)},
            "'norm.0.bias' is int8, but the model needs float32",
            "quantized",
        ),
        (
            state() | {"norm.0.bias": torch.ones(8, dtype=torch.complex64)},
            "'norm.0.bias' is complex64, but the model needs float32",
            "of this model",
        ),
    ],
)
def test_weights_of_another_model_are_refused(
    tensors: dict[str, Tensor], says: str, advice: str, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(GemscError, match=says) as caught:
        api.load_weights(Net(), tmp_path / "a.safetensors")
    assert advice in str(caught.value)
    assert "compile again" not in str(caught.value)


def spoil(folder: Path, **changes: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({"weight_map": index["weight_map"] | changes}))


def truncate(folder: Path) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def copy_elsewhere(folder: Path) -> None:
    save_file(state(), folder.parent / "secret.safetensors")
    spoil(folder, **{"embed.weight": "../secret.safetensors"})


def two_of_torch(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    for name in "ab":
        torch.save(state(), folder / f"{name}.pt")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate, "00001-of-00002.safetensors is damaged"),
        (
            lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
            "is missing, but model",
        ),
        (
            lambda f: spoil(f, embed="model-00001-of-00002.safetensors"),
            "has no 'embed'",
        ),
        (copy_elsewhere, r"is in '\.\./secret.safetensors', which is no"),
        (
            lambda f: spoil(f, a=str(f / "model-00001-of-00002.safetensors")),
            "which is no",
        ),
        (lambda f: spoil(f, a="model.pt"), "which is not a .safetensors file in this"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "is damaged"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "is damaged"),
        (
            lambda f: (f / "b.safetensors.index.json").write_text("{}"),
            " and model.safe",
        ),
        (lambda f: [path.unlink() for path in f.iterdir()], "holds no weights"),
        (two_of_torch, "holds no weights"),  # it does not say which is meant
        (lambda f: (f / "model.safetensors.index.json").unlink(), ""),
    ],
)
def test_damaged_folders_are_named(damage: object, says: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    write_shards(folder, state())
    assert callable(damage)
    damage(folder)
    if not says:
        assert WeightFiles.open(folder).table.keys() == state().keys()
        return
    with pytest.raises(GemscError, match=says):
        WeightFiles.open(folder)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"not a file of torch", "is damaged"),
        (b"", "is damaged"),
        (nn.Linear(2, 2), "contains more than tensors"),
        ([torch.ones(1)], "is not a state_dict"),
        ({"a": 3}, "is not a state_dict"),
        (
            {"a": torch.ones(1), "a._extra_state": {"scale": 2}},
            "is not a state_dict of tensors alone: it has a._extra_state",
        ),
    ],
)
def test_other_files_of_torch_are_refused(
    content: object, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(GemscError, match=says):
        WeightFiles.open(path)


def test_a_checkpoint_of_a_program_is_exported_before(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    save_file({"model/x": torch.ones(1)}, tmp_path / "rank0.safetensors")
    with pytest.raises(GemscError, match="is a checkpoint of a program") as caught:
        WeightFiles.open(tmp_path)
    assert f"gemsc export {tmp_path} -o model.safetensors" in str(caught.value)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(GemscError, match=r"in a.safetensors and in b.safetensors"):
        WeightFiles.open(tmp_path)
    with pytest.raises(GemscError, match="there is no file or folder"):
        WeightFiles.open(tmp_path / "nothing")


@pytest.mark.slow(1)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_program_that_has_not_run_gives_a_state_dict(
    device: str, here: Path, gemsc: Gemsc
) -> None:
    """With each name of tied weights, and without what a state_dict leaves out."""
    text = (here / "model.py").read_text().replace('"meta"', f'"{device}"')
    gain = 'torch.ones(1, device="cpu")'
    line = f'self.register_buffer("gain", {gain}, persistent=False)'
    text = text.replace("        self.embed =", f"        {line}\n        self.embed =")
    text = text.replace("self.norm(self", "self.norm(self.gain * self")
    (here / "model.py").write_text(text)
    program = compiled(gemsc)
    done = gemsc("export", str(program), "-o", "first.safetensors")
    assert done.code == 0, done.err
    weights, net = load_file("first.safetensors"), Net()
    net.load_state_dict(weights)
    assert torch.equal(weights["head.weight"], weights["embed.weight"])
    if device == "meta":
        assert torch.equal(net.embed.weight, state()["embed.weight"])


TURNS = """
import torch
from torch import nn


class Turn(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.full((3,), 1 + 2j, dtype=torch.complex128))

    def forward(self, x):
        return (x * self.by).abs()


model, loss = lambda: nn.Sequential(Turn(), Turn()), nn.MSELoss()


def example_inputs():
    return (torch.randn(4, 3, dtype=torch.float64),)


def example_target():
    return torch.zeros(4, 3, dtype=torch.float64)
"""


def test_complex128_is_exported_as_pairs(here: Path, gemsc: Gemsc) -> None:
    (here / "turns.py").write_text(TURNS)
    assert gemsc("compile", "turns.py", "--ranks", "1", "-o", "turns").code == 0
    done = gemsc("export", "turns", "-o", "turns.safetensors")
    assert "pairs of float64 stand for '0.by', '1.by';" in done.out + done.err
    pairs = load_file("turns.safetensors")["1.by"]
    assert torch.view_as_complex(pairs).tolist() == [1 + 2j] * 3


LEARNS = """
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))
            self.also = self.scale
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("one", torch.ones(()), persistent=False)

        def forward(self, output, target):
            self.count += self.one
            scaled = output * self.scale + self.also
            return nn.functional.cross_entropy(scaled, target)

    loss = Loss
"""


def test_what_the_loss_has_learned_is_exported(here: Path, gemsc: Gemsc) -> None:
    text = (here / "model.py").read_text().replace("nn.CrossEntropyLoss()", "None")
    text = text.replace('"meta"', '"cpu"').replace('weights = "folder"', "")
    (here / "model.py").write_text(text + textwrap.dedent(LEARNS))
    program = compiled(gemsc, "--micro-batches", "1")
    run = here / program / "runs" / "1"

    def work(trainer: Trainer) -> dict[str, Tensor]:
        ema = api.Ema(0.5)
        trainer.add_callbacks([ema])
        for _ in range(2):
            trainer.step(torch.arange(4), torch.arange(4))
        trainer.save(run)
        tensors = {n: t.clone() for n, t in trainer.stages.parameters.items()}
        return {f"ema {n}": t.clone() for n, t in ema.average.items()} | tensors

    def adam(pairs: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(pairs, lr=0.1)

    words = "export", str(program), "-o", "x.safetensors", "--loss", "first.safetensors"
    done = gemsc(*words)  # before it has run
    assert done.code == 0, done.err
    assert load_file("first.safetensors").keys() == {"scale", "also", "count"}

    trained: dict[str, Tensor] = {}
    for of_rank in on_ranks(program, 2, work, optimizer=adam):
        trained |= of_rank
    for more, before in ((), ""), (("--ema",), "ema "):
        words = "export", str(run), "-o", "x.safetensors", *more
        done = gemsc(*words)
        assert done.code == 0, done.err
        says = "the loss has tensors of its own ('scale', 'count', 'one')"
        assert f"note: {says}, which are not in it: --loss FILE writes" in done.out
        Net().load_state_dict(load_file("x.safetensors"))
        done = gemsc(*words, "--loss", "loss.safetensors")
        assert done.code == 0, done.err
        assert "which are not in it" not in done.out
        state = load_file("loss.safetensors")
        assert state.keys() == {"scale", "also", "count"}
        assert torch.equal(state["scale"], trained[f"{before}_loss.scale"])
        assert torch.equal(state["also"], state["scale"])
        assert state["count"] == 2
    assert not torch.equal(trained["_loss.scale"], trained["ema _loss.scale"])
    assert gemsc("export", str(run), "-o", "x.dcp").code == 0
    names = dcp.FileSystemReader("x.dcp").read_metadata().state_dict_metadata
    assert "optimizer.state.embed.weight.exp_avg" in names
    assert not [name for name in names if "_loss" in name]


def test_a_loss_without_tensors_has_none_to_export(here: Path, gemsc: Gemsc) -> None:
    done = gemsc("export", str(compiled(gemsc)), "-o", "x.safetensors", "--loss", "y")
    assert done.code == 1
    assert "its loss has no tensors of its own\nhelp: leave out --loss" in done.err
    assert not Path("x.safetensors").exists()
