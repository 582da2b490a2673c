"""Trained weights go back into the file that a model came from."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import import_support
import ml_dtypes
import numpy as np
import pytest
import torch
from command_line import Gemsc, files, gemsc_here
from fuzz_support import onnx_file
from hypothesis import given, settings
from hypothesis import strategies as st
from import_support import take_npz, write_npz
from program_support import on_ranks, weights_in
from safetensors.torch import load_file
from torch import Tensor

from gemsc import Ema
from gemsc.cli.export import load_trained, program_of, trained_model
from gemsc.errors import GemscError
from gemsc.importers.back import write_back
from gemsc.importers.folder import import_file
from gemsc.importers.network import ImportOptions
from gemsc.importers.weight import Weight, same, to_numpy, to_torch
from gemsc.runtime.training.trainer import Trainer
from gemsc.user_model import UserModel, load_user_model
from gemsc.weights.load import load_weights

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("take_npz")
assert take_npz

gemsc = pytest.fixture(gemsc_here)
TRAIN = """\
import torch.nn.functional as F
from model import example_inputs, model


def loss(output, target):
    return F.mse_loss(output, target)


def example_target():
    return model()(*example_inputs()).detach() + 1
"""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def train(program: Path, run: Path, *callbacks: Any) -> dict[str, Tensor]:
    """Train two steps on threads, and return what is saved then."""

    def work(trainer: Trainer) -> None:
        trainer.add_callbacks([make() for make in callbacks])
        generator = torch.Generator().manual_seed(3)
        for _ in range(2):
            x = torch.rand(4, 2, 6, 6, generator=generator)
            trainer.step(x, torch.ones(4, 3))
        trainer.save(run)

    on_ranks(program, 2, work, optimizer=sgd)
    return weights_in(run)


@pytest.fixture
def program(tmp_path: Path, gemsc: Gemsc, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a program of a network that was imported from small.npz."""
    monkeypatch.delitem(sys.modules, "model", raising=False)  # of another folder
    small = tmp_path / "small.npz"
    write_npz(small)
    net, build = tmp_path / "net", tmp_path / "build"
    assert gemsc("import", small, "-o", net).code == 0
    (net / "train.py").write_text(TRAIN)
    words = ("--ranks", 2, "--micro-batches", 2)
    assert gemsc("compile", net / "train.py", *words, "-o", build).code == 0
    small.unlink()  # the folder has a copy
    return build


def arrays_in(path: Path) -> dict[str, np.ndarray]:
    return dict(np.load(path))


@pytest.mark.slow
def test_trained_weights_are_in_the_places_of_the_file(
    program: Path, gemsc: Gemsc, tmp_path: Path
) -> None:
    run = program / "runs" / "1"
    weights = train(program, run)
    before = arrays_in(tmp_path / "net" / "original" / "small.npz")
    for number, place in enumerate((program, run, run / "latest", run / "step-000002")):
        out = tmp_path / f"out{number}.npz"
        done = gemsc("export", place, "--to", out)
        assert (done.code, done.err) == (0, "")
        assert f"wrote {out}: the model of step 2 of {program}" in done.out
        after = arrays_in(out)
        assert after.keys() == before.keys()
        kernel = weights["stem.weight"].permute(2, 3, 1, 0).numpy()
        assert np.array_equal(after["stem/kernel"], kernel)
        assert np.array_equal(after["norm/mean"], weights["norm.running_mean"])
        head = after["head/all"]
        assert np.array_equal(head[:, :3].T, weights["head.weight"])
        assert np.array_equal(head[:3, 3], weights["head.bias"])
        assert head[3, 3] == before["head/all"][3, 3]  # which nothing uses
        assert after["optimizer/step"] == 7
        for name in ("stem/kernel", "head/all", "scale", "norm/variance"):
            assert not np.array_equal(after[name], before[name])


@pytest.mark.slow
def test_no_file_is_written_that_is_not_named(
    program: Path, gemsc: Gemsc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    done = gemsc("export", program)
    assert (done.code, files(tmp_path / "here")) == (2, {})
    (words,) = re.findall(r"help: for example gemsc (.*)\n", done.err)
    assert gemsc(*words.split()).code == 0
    assert [*files(tmp_path / "here")] == ["model.safetensors"]


@pytest.mark.slow
def test_without_training_each_bit_is_as_it_was(
    program: Path, gemsc: Gemsc, tmp_path: Path
) -> None:
    out = tmp_path / "out.npz"
    done = gemsc("export", program, "-o", out)
    assert done.code == 0
    assert f"the model that {program} starts from" in done.out
    assert "note:" not in done.out
    before = arrays_in(tmp_path / "net" / "original" / "small.npz")
    after = arrays_in(out)
    assert {n: a.tobytes() for n, a in after.items()} == {
        n: a.tobytes() for n, a in before.items()
    }
    gemsc("export", program, "--to", tmp_path / "x.safetensors")
    state = load_file(tmp_path / "net" / "weights.safetensors")
    plain = load_file(tmp_path / "x.safetensors")
    assert plain.keys() == state.keys()
    assert all(torch.equal(plain[name], state[name]) for name in plain)


@pytest.mark.slow
def test_a_run_elsewhere_knows_its_program(
    program: Path, gemsc: Gemsc, tmp_path: Path
) -> None:
    run, out = tmp_path / "run", tmp_path / "out.npz"
    train(program, run)
    done = gemsc("export", run, "--to", out)
    assert done.code == 1
    assert "the program of" in done.err
    (run / "run.json").write_text(json.dumps({"program": str(program)}))
    (run / "plan.toml").write_text((program / "plan.toml").read_text())
    assert gemsc("export", run, "--to", out).code == 0
    assert out.is_file()


@pytest.mark.slow
def test_a_program_that_was_moved_is_missed_at_its_place(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"program": str(tmp_path / "x")}))
    with pytest.raises(GemscError, match=r"the program of .* cannot be found") as error:
        program_of(tmp_path)
    help = f"move it back to {tmp_path / 'x'}, or compile it there again"
    assert error.value.help == help


OWN_STATE = """\
import torch
from torch import nn


class Scaled(nn.Linear):
    def get_extra_state(self):
        return {"scale": 2}

    def set_extra_state(self, state):
        pass

    def _save_to_state_dict(self, state, prefix, keep_vars):
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[prefix + "weight"] = state[prefix + "weight"].T

    def forward(self, x):  # stays whole
        return super().forward(x) * (2 if self.weight.sum().item() > -99 else 1)


def model():
    return nn.Sequential(nn.Linear(4, 4), Scaled(4, 4), nn.Linear(4, 2))


def example_inputs():
    return (torch.randn(2, 4),)


def example_target():
    return torch.randn(2, 2)


loss = nn.MSELoss()
"""


def test_what_state_dict_makes_of_weights_is_told_and_they_are_written_as_they_are(
    gemsc: Gemsc, tmp_path: Path
) -> None:
    place, build = tmp_path / "own_state.py", tmp_path / "build"
    place.write_text(OWN_STATE)
    said = gemsc("compile", place, "--ranks", "2", "--micro-batches", "2", "-o", build)
    assert said.code == 0, said.err
    told = "state_dict() of the model gives 1.weight and 1 more, by a hook, get_extra"
    assert told in " ".join(said.out.split())

    def work(trainer: Trainer) -> None:
        trainer.step(torch.ones(4, 4), torch.ones(4, 2))
        trainer.save(tmp_path / "run")
        trainer.resume(tmp_path / "run")

    on_ranks(build, 2, work, optimizer=sgd)
    trained = weights_in(tmp_path / "run")
    assert trained.keys() == {f"{n}.{w}" for n in range(3) for w in ("weight", "bias")}
    model = load_user_model(str(place)).make_unfilled()
    assert not load_weights(model, tmp_path / "run" / "model.safetensors")
    params = dict(model.named_parameters())
    assert all(torch.equal(params[name], trained[name]) for name in params)
    assert gemsc("import", build, tmp_path / "run" / "model.safetensors").code == 0
    first = tmp_path / "first.safetensors"
    assert gemsc("export", build, "-o", first).code == 0
    again = load_file(first)
    assert all(torch.equal(again[name], trained[name]) for name in trained)
    _, loaded = load_trained_of(build, tmp_path / "run")
    assert all(torch.equal(p, trained[n]) for n, p in loaded.named_parameters())


def load_trained_of(program: Path, run: Path) -> tuple[UserModel, torch.nn.Module]:
    with trained_model(run, averages=False) as trained:
        return load_trained(program, trained)


def test_averages_are_exported_too(program: Path, gemsc: Gemsc, tmp_path: Path) -> None:
    run = program / "runs" / "1"
    train(program, run, partial(Ema, 0.5))
    out, averages = tmp_path / "out.npz", tmp_path / "averages.npz"
    assert gemsc("export", run, "--to", out).code == 0
    assert gemsc("export", run, "--to", averages, "--ema").code == 0
    plain, mean = arrays_in(out), arrays_in(averages)
    assert not np.array_equal(plain["stem/kernel"], mean["stem/kernel"])


@pytest.mark.slow
def test_what_was_changed_in_model_py(
    program: Path, gemsc: Gemsc, tmp_path: Path
) -> None:
    net, out = tmp_path / "net", tmp_path / "out.npz"
    before = arrays_in(net / "original" / "small.npz")
    state = load_file(net / "weights.safetensors")

    def export() -> list[str]:
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        return write_back(net, out, shapes, state.__getitem__)

    assert export() == []
    gone = [state.pop("head.bias"), state.pop("scale")]
    state["more.weight"] = torch.ones(3)
    notes = export()
    assert notes == [
        "not in the model, so as it was in the file: scale",
        "not in the file, so left out: more.weight",
    ]
    assert np.array_equal(arrays_in(out)["scale"], before["scale"])
    assert len(gone) == 2
    state["stem.weight"] = torch.ones(4, 2, 5, 5)
    with pytest.raises(GemscError, match=r"'stem.weight' has the shape \[4, 2, 5, 5\]"):
        export()
    state = {"other": torch.ones(3)}
    with pytest.raises(GemscError, match="no tensor of this model"):
        export()


@pytest.mark.parametrize("name", ["import.toml", "original/small.npz"])
def test_a_folder_that_lost_a_file_is_told(
    program: Path, gemsc: Gemsc, tmp_path: Path, name: str
) -> None:
    (tmp_path / "net" / name).unlink()
    out = tmp_path / "out.npz"
    done = gemsc("export", program, "--to", out)
    assert done.code == 1
    assert "small.npz" in done.err or "was not imported" in done.err
    assert "help:" in done.err
    assert not out.exists()


@pytest.mark.slow
def test_a_kind_that_cannot_be_written_is_told(
    program: Path, gemsc: Gemsc, tmp_path: Path
) -> None:
    done = gemsc("export", program, "--to", tmp_path / "out.keras")
    assert done.code == 1
    assert "was not imported from a file that ends in .keras" in done.err
    for words in ("x.pt",), ("x.safetensors", "--loss", "x.bin"):
        done = gemsc("export", program, "-o", *words)
        assert done.code == 2
        assert "would be no file of torch.save" in done.err
    done = gemsc("export", program, "--to", tmp_path / "none" / "\0.npz")
    assert done.code == 2
    before = files(tmp_path / "net")
    done = gemsc("export", program, "--to", "/dev/null/x.npz")
    assert done.code == 1
    assert "cannot be written" in done.err
    assert files(tmp_path / "net") == before


def test_tensors_that_differ_and_are_one_in_the_file_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, net = tmp_path / "small.npz", tmp_path / "net"
    write_npz(small)
    import_file(small, net, ImportOptions())
    state = load_file(net / "weights.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    plain = import_support.read_npz

    def tied(path: Path, options: ImportOptions) -> Any:
        network = plain(path, options)
        network.model.weights["norm.running_mean"] = same("norm/gamma")
        return network

    monkeypatch.setattr(import_support, "read_npz", tied)
    with pytest.raises(GemscError, match="are one tensor in the file"):
        write_back(net, tmp_path / "out.npz", shapes, state.__getitem__)
    state["norm.running_mean"] = state["norm.weight"]
    assert write_back(net, tmp_path / "out.npz", shapes, state.__getitem__) == []


def test_numbers_beside_an_onnx_file_go_beside_its_copy(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    path, net = tmp_path / "x.onnx", tmp_path / "net"
    onnx.save(
        onnx.ModelProto.FromString(onnx_file()),
        path,
        save_as_external_data=True,
        location="x.data",
        size_threshold=0,
    )
    import_file(path, net, ImportOptions())
    before = files(tmp_path)
    assert before["net/original/x.data"] == before["x.data"]
    state = load_file(net / "weights.safetensors")
    state = {name: tensor + tensor for name, tensor in state.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert write_back(net, tmp_path / "y.onnx", shapes, state.__getitem__) == []
    after = files(tmp_path)
    assert after.keys() - before.keys() == {"y.onnx", "y.onnx.data"}
    assert {name: after[name] for name in before} == before
    old, new = (onnx.load(tmp_path / name).graph for name in ("x.onnx", "y.onnx"))
    for one, other in zip(old.initializer, new.initializer, strict=True):
        factor = 1 if one.name == "sizes" else 2
        array = onnx.numpy_helper.to_array(one) * factor
        assert np.array_equal(onnx.numpy_helper.to_array(other), array)


# --------------------------------------------------------- where elements are

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def moves(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], Weight]:
    """Return sources and a weight of permutations, slices, zeros and concatenations."""
    shapes = {f"s{i}": draw(SHAPES) for i in range(draw(st.integers(1, 3)))}
    steps = []
    for shape in shapes.values():
        order = draw(st.permutations(range(len(shape))))
        cut = slice(draw(st.integers(0, shape[order[0]] - 1)), None)
        step = draw(st.sampled_from([1, -1]))
        zeros = draw(st.integers(0, 2))
        steps.append((order, cut, step, zeros))

    def move(*arrays: Any) -> Any:
        parts = []
        for array, (order, cut, step, zeros) in zip(arrays, steps, strict=True):
            moved = array.transpose(order)[cut][::step].reshape(-1)
            parts += [moved, np.zeros(zeros, array.dtype)]
        return np.concatenate(parts)

    return shapes, Weight(tuple(shapes), move)


@pytest.mark.slow
@given(moves())
@settings(max_examples=100, deadline=None)
def test_places_say_where_each_element_of_a_source_is(
    case: tuple[dict[str, tuple[int, ...]], Weight],
) -> None:
    shapes, weight = case
    rng = np.random.default_rng(0)
    sources = {name: rng.random(shape) + 1 for name, shape in shapes.items()}
    made = weight.made(sources.__getitem__)
    seen = np.zeros(made.size, int)
    for name, places in zip(weight.sources, weight.places(shapes), strict=True):
        assert places.shape == shapes[name]
        inside = places >= 0
        assert np.array_equal(made[places[inside]], sources[name][inside])
        assert np.isin(sources[name][~inside], made).sum() == 0
        seen[places[inside]] += 1
    assert np.array_equal(seen, (made != 0).astype(int))
    again = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
    for name, places in zip(weight.sources, weight.places(shapes), strict=True):
        again[name][places >= 0] = made[places[places >= 0]]
    kept = {n: np.where(np.isnan(a), sources[n], a) for n, a in again.items()}
    assert all(np.array_equal(kept[name], sources[name]) for name in shapes)


def test_places_of_zeros_that_are_floats_and_of_constants() -> None:
    weight = Weight(("a",), lambda a: np.concatenate([np.zeros(2), a]))
    (places,) = weight.places({"a": (3,)})
    assert places.tolist() == [2, 3, 4]
    assert Weight((), lambda: np.ones(3)).places({}) == ()


@pytest.mark.parametrize(
    "dtype", ["<f4", ">f4", "<f8", "<f2", ">i8", "i4", "?", "u1", "bfloat16"]
)
def test_arrays_become_tensors_and_arrays_again(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = np.arange(-2, 4).reshape(2, 3).T.astype(kind)
    tensor = to_torch(array)
    assert tensor.shape == (3, 2)
    assert tensor.tolist() == array.tolist()
    back = to_numpy(tensor, array.dtype)
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()
    assert to_torch(np.array(1.5, kind)).shape == ()
