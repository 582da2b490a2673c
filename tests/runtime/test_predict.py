"""Whole slides through the ranks of a program: as the whole picture in one process."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from command_line import GEMSC, Gemsc
from numpy.typing import NDArray
from program_support import on_ranks, written
from safetensors.torch import load_file
from torch import Tensor, nn
from training_support import predict_job, predict_on, user_of

from gemsc.errors import GemscError
from gemsc.plan import Plan
from gemsc.runtime.training.predict import Job, Prediction, as_input, as_picture
from gemsc.slides import slide as slide_module
from gemsc.slides.slide import Slide
from gemsc.slides.windows import Picture
from gemsc.user_model import UserModel

EXAMPLE = Path(__file__).parents[2] / "examples" / "whole_slides"
SIZE, OVERLAP = 32, 8


class Net(nn.Module):
    """Looks six pixels far, and halves and doubles the picture on the way."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.grow = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.last = nn.Conv2d(8, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        low = torch.tanh(self.norm(self.down(x)))
        return self.last(torch.cat([x, self.grow(low)], dim=1))


def mse(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def program(folder: Path, outputs: int = 2, size: int = SIZE, **options: Any) -> Net:
    """Write a program for windows; return its model in float64."""
    torch.manual_seed(0)
    model = Net(outputs)
    inputs, target = torch.rand(2, 3, size, size), torch.rand(2, outputs, size, size)
    written(folder, model, (inputs,), mse, target, micro_batches=2, **options)
    return model.double().eval()


def job(folder: Path, **options: Any) -> Job:
    source = options.pop("source", folder / "slide.npy")
    given = {"overlap": OVERLAP} | options
    return predict_job(folder, source, folder / "mask.tiff", **given)


def predict(
    folder: Path,
    ranks: int,
    picture: NDArray[Any],
    user: UserModel | None = None,
    **options: Any,
) -> NDArray[Any]:
    """Return what a program on threads writes of a picture."""
    np.save(folder / "slide.npy", picture)
    asked = job(folder, **options)
    dtype = torch.float64 if asked.dtype == "float64" else None
    on_ranks(
        folder,
        ranks,
        lambda trainer: predict_on(Prediction, trainer, asked, user),
        dtype=dtype,
    )
    output: NDArray[Any] = tifffile.imread(folder / "mask.tiff")
    return output


def colours(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)


def whole(model: nn.Module, picture: NDArray[Any]) -> NDArray[Any]:
    """Return the scores of one forward of all pixels, channels last."""
    x = torch.from_numpy(picture.astype(np.float32) / 255).double().movedim(-1, 0)
    with torch.no_grad():
        return model(x[None])[0].movedim(0, -1).numpy()


@pytest.mark.slow(1)
@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"ranks": 2}),
        (4, {"ranks": 4, "tiles": ("2x2",)}),
        (4, {"ranks": 4, "data": 2}),
        (2, {"ranks": 2, "schedule": "mast"}),
    ],
    ids=["stages", "tiles", "copies", "mirrored"],
)
def test_windows_give_what_the_whole_slide_gives_at_once(
    ranks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    model = program(tmp_path, **options)
    picture = colours(150, 98)  # windows begin at 16, 32, ...; the last ones at 118, 66
    output = predict(tmp_path, ranks, picture)
    assert output.dtype == np.float64
    np.testing.assert_allclose(output, whole(model, picture), rtol=0, atol=1e-13)
    seamed = predict(tmp_path, ranks, picture, overlap=2)  # less than it looks
    assert abs(seamed - whole(model, picture)).max() > 1e-4


@pytest.mark.slow
def test_a_slide_smaller_than_a_window_is_mirrored(tmp_path: Path) -> None:
    model = program(tmp_path, ranks=4, tiles=("2x2",))
    picture = colours(20, 12)
    filled = np.pad(picture, [(0, 12), (0, 20), (0, 0)], "symmetric")
    expected = whole(model, filled)[:20, :12]
    output = predict(tmp_path, 4, picture)
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["u1", "u2", "i2"])
def test_pixels_are_shares_of_the_largest_number(kind: str) -> None:
    largest = np.iinfo(kind).max
    region = np.array([[[largest, 0, 1]], [[0, largest, 2]]], kind)  # 2 x 1 x 3
    first = as_input(region, Picture((2, 1), 3, True))
    assert first.tolist()[:2] == [[[1], [0]], [[0], [1]]]
    assert first[2, :, 0].tolist() == pytest.approx([1 / largest, 2 / largest])
    assert torch.equal(
        as_input(region, Picture((2, 1), 3, False)), first.movedim(0, -1)
    )
    floats = region.astype(np.float32)
    assert as_input(floats, Picture((2, 1), 3, False)).numpy().tolist() == (
        floats.tolist()
    )


def test_an_output_becomes_a_picture() -> None:
    one, size = torch.tensor([[[-1.0, 0.4, 0.6]]]), (1, 3)
    for scores in (one, one[0], one.movedim(0, -1)):
        assert as_picture(scores, size, "mask", 0.5).tolist() == [[0, 0, 1]]
        picture = as_picture(scores, size, "probabilities", 0.5)
        assert np.array_equal(picture, one[0].sigmoid())
    many = torch.eye(300)[:, None, [7, 299, 0]]
    for scores in (many, many.movedim(0, -1)):
        assert as_picture(scores, size, "mask", 0.5).tolist() == [[7, 299, 0]]
        picture = as_picture(scores, size, "probabilities", 0.5)
        assert np.array_equal(picture, many.softmax(0).movedim(0, -1))
    classes = torch.tensor([[4, 0, 2]])  # whole numbers, as after argmax
    for kept in (classes, classes[None], classes.byte()):
        picture = as_picture(kept, size, "mask", 0.0)
        assert picture.tolist() == [[4, 0, 2]]
        assert picture.dtype == (np.int32 if kept.dtype == torch.int64 else np.uint8)
    assert as_picture(classes, size, "mask", 2.5).tolist() == [[1, 0, 0]]
    with pytest.raises(GemscError, match="which have no probabilities"):
        as_picture(classes, size, "probabilities", 0.0)
    square = torch.rand(2, 2, 2)  # channels come first where both may be
    assert np.array_equal(
        as_picture(square, (2, 2), "scores", 0), square.movedim(0, -1)
    )


@pytest.mark.slow
def test_kinds_of_output(tmp_path: Path) -> None:
    picture = colours(40, 34)
    model = program(tmp_path / "two", ranks=2)
    scores = torch.from_numpy(whole(model, picture))
    mask = predict(tmp_path / "two", 2, picture, kind="mask")
    assert mask.dtype == np.uint8
    assert np.array_equal(mask, scores.argmax(-1))
    probabilities = predict(tmp_path / "two", 2, picture, kind="probabilities")
    np.testing.assert_allclose(probabilities, scores.softmax(-1), rtol=0, atol=1e-13)
    model = program(tmp_path / "one", outputs=1, ranks=2)
    scores = torch.from_numpy(whole(model, picture))[..., 0]
    mask = predict(tmp_path / "one", 2, picture, kind="mask", threshold=0.1)
    assert np.array_equal(mask, scores > 0.1)
    assert 0 < mask.mean() < 1
    probabilities = predict(tmp_path / "one", 2, picture, kind="probabilities")
    np.testing.assert_allclose(probabilities, scores.sigmoid(), rtol=0, atol=1e-13)


@pytest.mark.slow
def test_functions_of_the_models_file_say_what_goes_in_and_comes_out(
    tmp_path: Path,
) -> None:
    model = program(tmp_path, ranks=4, tiles=("2x2",))
    grey = colours(70, 50)[..., 0]

    def predict_input(region: NDArray[Any]) -> Tensor:
        return torch.from_numpy(region[..., 0] / 255.0).expand(3, -1, -1) - 0.5

    def predict_output(output: Tensor) -> NDArray[Any]:
        return (output[0] > output[1]).numpy()

    user = user_of(predict_input=predict_input, predict_output=predict_output)
    mask = predict(tmp_path, 4, grey, user)
    scores = whole(model, np.repeat(grey[..., None] - 127.5, 3, axis=2))
    assert mask.dtype == np.uint8
    assert np.array_equal(mask, scores[..., 0] > scores[..., 1])
    bare = user_of(predict_input=lambda region: predict_input(region)[:1])
    with pytest.raises(
        GemscError, match=r"returns \[1, \d+, \d+\] for \d+ x \d+ x 1 of"
    ):
        predict(tmp_path, 4, grey, bare)


class Steps(nn.Module):
    """Returns the guesses of several steps, and a number of the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.last(torch.tanh(self.first(x)))
        return torch.stack([x / 2, x]), x.mean()


def test_samples_are_taken_where_the_model_has_them(tmp_path: Path) -> None:
    model, picture = Steps(), colours(70, 50)
    x, target = torch.rand(2, 3, 32, 32), torch.rand(2, 2, 32, 32)
    last = lambda output, target: mse(output[0][-1], target)  # noqa: E731
    written(tmp_path, model, (x,), last, target, micro_batches=2, ranks=2, data=2)
    user = user_of(predict_output=lambda output: output[0][-1].movedim(0, -1).numpy())
    output = predict(tmp_path, 2, picture, user)
    model.double()
    scale = torch.from_numpy(picture / 255.0).movedim(-1, 0)[None]
    wanted = model(scale)[0][-1, 0].movedim(0, -1).detach().numpy()
    np.testing.assert_allclose(output, wanted, rtol=0, atol=1e-6)


def test_a_mask_has_one_type_that_other_programs_read(tmp_path: Path) -> None:
    model, picture = program(tmp_path, ranks=2), colours(70, 50)
    user = user_of(predict_output=lambda output: output.argmax(0).numpy() * 70_000)
    mask = predict(tmp_path, 2, picture, user)
    assert mask.dtype == np.int32  # of 64 bits
    assert np.array_equal(mask, whole(model, picture).argmax(-1) * 70_000)
    sizes = itertools.count(1)
    user = user_of(predict_output=lambda output: np.full((32, 32), 9 ** next(sizes)))
    with pytest.raises(GemscError, match=r"returns \(32, 32\) of int64, but for the "):
        predict(tmp_path, 2, colours(150, 150), user)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.last = nn.Conv2d(4, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).mean((2, 3))


@pytest.mark.parametrize(
    ("model", "target", "channels", "output", "message"),
    [
        (
            Net(),
            (2, 2, 32, 32),
            4,
            None,
            "the picture has 4 channels, but the model expects 3",
        ),
        (Sum(), (2, 1), 3, None, r"the model returns \[1\] for a picture of 32 x 32"),
        (Net(), (2, 2, 32, 32), 3, lambda y: y[:, :9], r"predict_output returns .* 9,"),
    ],
    ids=["channels", "no picture", "a function"],
)
def test_what_does_not_fit_is_refused(
    model: nn.Module,
    target: tuple[int, ...],
    channels: int,
    output: Callable[..., Any] | None,
    message: str,
    tmp_path: Path,
) -> None:
    inputs = (torch.rand(2, 3, SIZE, SIZE),)
    written(tmp_path, model, inputs, mse, torch.rand(target), ranks=2, micro_batches=2)
    user = user_of(predict_output=output)
    picture = np.zeros((40, 40, channels), np.uint8)
    with pytest.raises(GemscError, match=message):
        predict(tmp_path, 2, picture, user)


def test_a_mask_has_the_resolution_of_the_level_that_is_predicted(
    tmp_path: Path,
) -> None:
    program(tmp_path, ranks=2)
    with tifffile.TiffWriter(path := tmp_path / "slide.tiff") as file:
        given: dict[str, Any] = {"photometric": "rgb", "metadata": None}
        per_cm = {"resolution": (40000, 20000), "resolutionunit": "CENTIMETER"}
        file.write(colours(160, 80), subifds=1, **given, **per_cm)
        file.write(colours(40, 20), subfiletype=1, **given)
    predict(tmp_path, 2, colours(1, 1), source=str(path), level=1)
    assert Slide(tmp_path / "mask.tiff").pixel == pytest.approx((2.0, 1.0))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_slide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slide_module, "CACHE_BYTES", 2**20)
    program(tmp_path, size=256, ranks=2)
    peaks = []
    for height in (512, 8192):  # as floats: 3 MB, 50 MB
        empty = (np.zeros((256, 256, 3), np.uint8) for _ in range(height // 256 * 2))
        path = tmp_path / f"{height}.tiff"
        tifffile.imwrite(
            path, empty, shape=(height, 512, 3), dtype=np.uint8, tile=(256, 256),
            photometric="rgb", compression="zlib",
        )  # fmt: skip
        asked = job(tmp_path, source=path, kind="mask", dtype="float32")
        tracemalloc.start()  # NumPy's arrays: all that is read, drawn and written
        on_ranks(tmp_path, 2, lambda t, j=asked: predict_on(Prediction, t, j))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert Slide(tmp_path / "mask.tiff").shape == (height, 512, 1)
    assert peaks[1] < 2 * peaks[0]
    assert peaks[1] < 25e6


@pytest.mark.slow
@pytest.mark.mpi
def test_the_example_learns_from_a_slide_and_predicts_it(
    tmp_path: Path, command: Gemsc, monkeypatch: pytest.MonkeyPatch
) -> None:
    slide, run = tmp_path / "slide.tiff", tmp_path / "run"
    words = [sys.executable, EXAMPLE / "make_slide.py", "--size", "1024", "-o", slide]
    subprocess.run(words, check=True)
    small = {"PIECE": 256, "BASE": 2, "PIECES": 6, "SLIDE": slide}
    sets = [word for pair in small.items() for word in ("--set", "{}={}".format(*pair))]
    words = ["compile", EXAMPLE / "model.py", *sets, "-o", tmp_path / "program"]
    assert command(*words, "--ranks", "2", "--micro-batches", "2").code == 0
    done = command("run", tmp_path / "program", "--save", run)
    assert "held-out after epoch 1" in done.out
    mask = tmp_path / "mask.tiff"
    words = ["predict", run, slide, "-o", mask, "--overlap", "56"]
    done = command(*words, "--dtype", "float64")
    assert done.code == 0, done.err
    assert "49 windows of 256 x 256 pixels, overlap 56" in done.out
    assert f"wrote {mask}: the model of step 3 of {run}" in done.out
    assert not [*tmp_path.glob(".mask*")]

    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    from whole_slides import model as example

    monkeypatch.setattr(example, "BASE", 2)
    net = example.model().double().eval()
    net.load_state_dict(load_file(run / "model.safetensors"))
    x = example.predict_input(tifffile.imread(slide))[None].double()
    with torch.no_grad():
        scores = net(x)[0, 0].numpy()
    assert np.array_equal(tifffile.imread(mask), scores > 0)


PHASED = """\
import json, pathlib
import gemsc
import torch
from torch import nn

SCALE = 1.0
WIDTH = json.loads(pathlib.Path("width.json").read_text())

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.make = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 1, 1)
        )
        self.judge = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x):
        return self.make(x)

model = Pair

def example_inputs():
    return (torch.zeros(1, 3, 16, 16),)

def judged(model, x, target):
    return (model.judge(target) - model.judge(model(x).detach())).mean()

def made(model, x, target):
    return (model(x) - target).square().mean() + model.judge(model(x)).mean()

phases = [
    gemsc.Phase("judge", loss=judged, train="judge"),
    gemsc.Phase("make", loss=made, train="make"),
]

def dataset():
    return [(torch.rand(3, 16, 16) * SCALE, torch.rand(1, 16, 16))] * 4

def predict_input(region):
    return torch.from_numpy(region).movedim(-1, 0).float() / 255 * SCALE
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_a_run_in_phases_predicts_with_the_constants_that_it_was_trained_with(
    tmp_path: Path, command: Gemsc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(PHASED)
    (tmp_path / "width.json").write_text("4")
    np.save("slide.npy", colours(16, 16))
    np.save("other.npy", colours(40, 24)[::-1])
    words = ("--ranks", 1, "--micro-batches", 2, "-o", "program", "--set", "SCALE=2.0")
    assert command("compile", "model.py", *words).code == 0
    assert command("run", "program", "--set", "SCALE=3.0", "--save", "run").code == 0
    ways = ("--output-kind", "scores", "--dtype", "float64", "--overwrite")
    done = command("predict", "run", "slide.npy", "other.npy", *ways, "-o", "found")
    assert done.code == 0, done.err
    assert "warning" not in done.err
    assert "pixels from 0 to 1" not in done.err
    assert "wrote 2 files in found" in done.out
    weights = load_file("run/model.safetensors").items()
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 1, 1)).double()
    state = {n.removeprefix("make."): w for n, w in weights if n.startswith("make.")}
    net.load_state_dict(state)
    for name in ("slide", "other"):
        x = torch.from_numpy(np.load(f"{name}.npy")).movedim(-1, 0)[None].float()
        with torch.no_grad():
            wanted = net((x / 255 * 3.0).double())[0, 0].numpy()
        output = tifffile.imread(f"found/{name}.tiff")
        assert np.allclose(output, wanted, rtol=0, atol=1e-12)
    assert {*Path("found").iterdir()} == {*Path("found").glob("*.tiff")}

    (tmp_path / "width.json").write_text("8")
    told = command("predict", "run", "slide.npy", *ways, "--level", "3").err
    assert "width.json has changed since" in told
    Path("model.py").write_text(PHASED.replace("predict_input", "predict_output"))
    told = command("predict", "run", "slide.npy", *ways, "--overlap", "16").err
    assert (
        "gets pixels from 0 to 1; if dataset() gives others, define predict_in" in told
    )


def test_what_cannot_be_predicted_is_said_before_ranks_start(
    tmp_path: Path, command: Gemsc, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "p", ranks=2)
    monkeypatch.chdir(tmp_path)
    np.save("slide.npy", colours(40, 40))
    np.save("grey.npy", colours(40, 40)[..., 0])
    np.save("p/slide.npy", colours(40, 40))
    tifffile.imwrite("same.tiff", colours(40, 40))
    (tmp_path / "there.tiff").touch()
    for words, message in (
        (["slide.npy", "-o", "there.tiff"], "there.tiff exists already"),
        (["slide.npy", "-o", "no/where.tiff"], "no/where.tiff cannot be written"),
        (["slide.npy", "-o", "mask.png"], "mask.png cannot hold the prediction of a"),
        (["there.tiff"], "there.tiff is not a readable TIFF file"),
        (["slide.npy", "--level", "3"], "slide.npy has no level 3"),
        (["slide.npy", "--overlap", "16"], "cannot overlap by 16 on each side"),
        (["slide.npy", "--output-kind", "x"], "--output-kind: unknown 'x'"),
        (["grey.npy"], "grey.npy has 1 channels, but the model expects 3"),
        (["slide.npy", "grey.npy"], "grey.npy has 1 channels, but the model expects"),
        (["slide.npy", "no.npy"], "there is no file no.npy"),
        (["slide.npy", "grey.npy", "-o", "m.tiff"], "m.tiff is one file, but there"),
        (["slide.npy", "grey.npy", "-o", "grey.npy"], "grey.npy is one file, but"),
        (["slide.npy", "p/slide.npy"], "would both be written to masks/slide.tiff"),
        (["slide.npy", "same.tiff", "-o", "no/where"], "there is no folder no"),
        (["same.tiff", "-o", ".", "--overwrite"], "same.tiff would replace the pict"),
    ):
        done = command("predict", "p", *words)
        assert done.code == 1
        assert message in done.err
        assert "help: " in done.err
    assert "forward mixes samples" not in done.err
    text = replace(Plan.read(Path("p/plan.toml")), mixes_samples=True).to_toml(
        Path("p")
    )
    Path("p/plan.toml").write_text(text)
    told = "warning: forward mixes samples: what it gives for a window depends on"
    assert told in command("predict", "p", "slide.npy", "--overlap", "16").err
    assert "there is no folder q" in command("predict", "q", "slide.npy").err
    assert "slide.npy is a file" in command("predict", "slide.npy", "p").err
    assert not Path("masks").exists()


@pytest.mark.nightly
@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_prediction_leaves_no_file(
    number: signal.Signals, tmp_path: Path
) -> None:
    program(tmp_path / "p", ranks=2)
    np.save(tmp_path / "slide.npy", colours(2000, 2000))
    process = subprocess.Popen(
        [GEMSC, "predict", "p", "slide.npy"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert b"predict 1/" in process.stdout.readline()
    (folder,) = tmp_path.glob(".mask.tiff.*")
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not folder.exists()
    assert not (tmp_path / "mask.tiff").exists()
