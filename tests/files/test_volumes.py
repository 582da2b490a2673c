"""Whole volumes in windows, predicted and evaluated: as MONAI does in one process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from command_line import Gemsc
from numpy.typing import NDArray
from program_support import on_ranks, written
from torch import Tensor, nn
from training_support import pairs, predict_job, predict_on, run, user_of

from gemsc.errors import GemscError
from gemsc.plan import Plan
from gemsc.runtime.training.predict import VolumePrediction
from gemsc.runtime.training.trainer import Trainer
from gemsc.slides.volume import Volume, count_voxels
from gemsc.slides.windows import Case, Picture, SlidingWindows, image_axes
from gemsc.user_model import UserModel
from gemsc.verify.plain_run import PlainRun, RunSettings

nibabel: Any = pytest.importorskip("nibabel")
SIZE = (8, 6, 4)
AFFINE = np.array([[0, -2, 0, 10], [1.5, 0, 0, -20], [0, 0, -3, 5], [0, 0, 0, 1.0]])


class Net(nn.Sequential):
    """Sees all of its window: what windows give depends on how they are cut."""

    def __init__(self, outputs: int = 2) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super().__init__(
                nn.Conv3d(1, 3, 3, padding=1),
                nn.Tanh(),
                nn.InstanceNorm3d(3),
                nn.Conv3d(3, outputs, 3, padding=1),
            )


def mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target.to(output))


def program(folder: Path, outputs: int = 2, **options: Any) -> nn.Module:
    """Write a program for windows; return its model in float64."""
    model = Net(outputs)
    inputs, target = torch.rand(1, 1, *SIZE), torch.rand(1, outputs, *SIZE) > 0.5
    written(folder, model, (inputs,), mse, target, **options)
    return model.double().eval()


@torch.no_grad()
def blended(
    model: nn.Module, x: Tensor, overlap: float = 0.25, mode: str = "constant"
) -> Tensor:
    """Return what MONAI's `sliding_window_inference` returns, written down again."""
    sizes = [max(n, size) for n, size in zip(x.shape[2:], SIZE, strict=True)]
    lacking = [n - m for n, m in zip(sizes, x.shape[2:], strict=True)]
    pads = [n for lack in lacking[::-1] for n in (lack // 2, lack - lack // 2)]
    whole = F.pad(x, pads)
    weight = torch.ones(SIZE)
    for axis, size in enumerate(SIZE if mode == "gaussian" else ()):
        place = torch.arange(size) - (size - 1) / 2
        bell = torch.exp(-(place**2) / 2 / (size / 8) ** 2)
        weight = (weight.movedim(axis, -1) * bell).movedim(-1, axis)
    weight = weight.clamp(min=max(float(weight.min()), 1e-3)).double()
    sums, counts = 0, torch.zeros(sizes, dtype=torch.float64)
    starts = []
    for size, length in zip(SIZE, sizes, strict=True):
        step, at = int(size * (1 - overlap)), 0
        starts.append([0])
        while at + size < length:
            at += step
            starts[-1].append(min(at, length - size))
    for a in starts[0]:
        for b in starts[1]:
            for c in starts[2]:
                box = (
                    slice(a, a + SIZE[0]),
                    slice(b, b + SIZE[1]),
                    slice(c, c + SIZE[2]),
                )
                output = model(whole[:, :, *box]) * weight
                sums = sums + F.pad(
                    output,
                    [
                        *(c, sizes[2] - c - SIZE[2], b, sizes[1] - b - SIZE[1]),
                        *(a, sizes[0] - a - SIZE[0]),
                    ],
                )
                counts[box] += weight
    first = [lack // 2 for lack in lacking]
    kept = (slice(at, at + n) for at, n in zip(first, x.shape[2:], strict=True))
    return (sums / counts)[:, :, *kept]


MODES = [{"overlap": 0.5, "mode": "gaussian"}, {}]


@pytest.mark.parametrize("shape", [(19, 13, 9), (8, 6, 4), (5, 14, 3)], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_windows_are_cut_and_blended_as_by_monai(
    mode: dict[str, Any], shape: tuple[int, ...]
) -> None:
    model = Net().double().eval()
    x = torch.randn(1, 1, *shape, dtype=torch.float64)
    case = Case(shape, SIZE, SlidingWindows.of(mode), {"x": x, "age": torch.ones(1, 2)})
    for places, count in case.windows.batches(3):
        taken = case.take(places)
        assert taken["age"].shape == (3, 2)
        with torch.no_grad():
            case.add(places[:count], model(taken["x"]))
    expected = blended(model, x, **mode)
    torch.testing.assert_close(case.output(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_blended_is_what_monai_gives(mode: dict[str, Any]) -> None:
    inferers = pytest.importorskip("monai.inferers")
    model = Net().double().eval()
    x = torch.randn(1, 1, 19, 5, 9, dtype=torch.float64)
    with torch.no_grad():
        theirs = inferers.sliding_window_inference(x, SIZE, 2, model, **mode)
    torch.testing.assert_close(blended(model, x, **mode), theirs, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------- predict


def write_case(path: Path, *shape: int, channels: int = 1) -> NDArray[np.float32]:
    """Write a volume of integers that the file scales; return its numbers."""
    more = (channels,) if channels > 1 else ()
    data = np.random.default_rng(0).integers(-90, 90, (*shape, *more)).astype(np.int16)
    image = nibabel.Nifti1Image(data, AFFINE)
    image.header.set_slope_inter(0.5, 1)
    image.header.set_xyzt_units("mm")
    image.header["cal_max"] = 90
    image.header.set_intent("z score")
    image.set_sform(AFFINE, code=2)
    image.set_qform(AFFINE, code=1)
    nibabel.save(image, path)
    return nibabel.load(path).get_fdata().astype(np.float32)


def predict(
    folder: Path,
    ranks: int,
    user: UserModel | None = None,
    *,
    source: Path | None = None,
    **options: Any,
) -> Any:
    """Return the image that a program on threads writes, of case.nii.gz by default."""
    source = source or folder / "case.nii.gz"
    job = predict_job(folder, source, folder / "out.nii.gz", **options)
    on_ranks(
        folder,
        ranks,
        lambda trainer: predict_on(VolumePrediction, trainer, job, user),
        dtype=torch.float64,
    )
    return nibabel.load(folder / "out.nii.gz")


LAYOUTS: dict[str, dict[str, Any]] = {
    "stages": {"ranks": 2, "micro_batches": 2},
    "tiles": {"ranks": 2, "tiles": ("2x1x1",), "micro_batches": 2},
    "copies": {"ranks": 4, "data": 2, "micro_batches": 2},
    "mirrored": {"ranks": 2, "schedule": "mast", "micro_batches": 2},
}


@pytest.mark.slow(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_volume_is_predicted_as_by_plain_pytorch_in_windows(
    layout: str, tmp_path: Path
) -> None:
    model = program(tmp_path, **LAYOUTS[layout])
    voxels = write_case(tmp_path / "case.nii.gz", 19, 13, 9)
    user = user_of(eval_windows={"overlap": 0.5, "mode": "gaussian"})
    image = predict(tmp_path, LAYOUTS[layout]["ranks"], user)
    x = torch.from_numpy(voxels)[None, None].double()
    expected = blended(model, x, 0.5, "gaussian")[0].movedim(0, -1).numpy()
    np.testing.assert_allclose(image.get_fdata(), expected, rtol=0, atol=1e-11)
    assert np.array_equal(image.affine, nibabel.load(tmp_path / "case.nii.gz").affine)


def test_what_is_written_lies_where_the_volume_lies(tmp_path: Path) -> None:
    model = program(tmp_path, ranks=2, micro_batches=2)
    write_case(tmp_path / "case.nii.gz", 19, 13, 9)
    source = nibabel.load(tmp_path / "case.nii.gz")
    for orientation in (None, "RAS", "LIP"):  # the last turns three axes around
        mask = predict(tmp_path, 2, kind="mask", orientation=orientation)
        assert mask.get_data_dtype() == np.uint8
        assert np.array_equal(mask.affine, source.affine)
        codes = mask.header["sform_code"], mask.header["qform_code"]
        assert codes == (2, 1)
        assert mask.header["cal_max"] == mask.header["intent_code"] == 0
        assert mask.header.get_xyzt_units()[0] == "mm"
        turned = source
        if orientation is not None:
            axes = nibabel.orientations
            wanted = axes.axcodes2ornt(orientation)
            turn = axes.ornt_transform(nibabel.io_orientation(source.affine), wanted)
            turned, mask = source.as_reoriented(turn), mask.as_reoriented(turn)
        x = torch.from_numpy(turned.get_fdata().copy())[None, None]
        expected = blended(model, x)[0].argmax(0)
        assert 0 < expected.double().mean() < 1
        assert np.array_equal(mask.get_fdata(), expected.numpy())


def test_voxels_get_another_size_for_the_model_and_back(tmp_path: Path) -> None:
    path = tmp_path / "case.nii.gz"
    i, j, k = np.indices((9, 7, 5), np.float32)
    nibabel.save(nibabel.Nifti1Image(i + 10 * j + 100 * k, AFFINE), path)
    volume = Volume(path, spacing=(1, 1, 2.5))  # of 1.5 x 2 x 3
    assert volume.shape == (13, 13, 6)
    assert str(volume) == "9 x 7 x 5 voxels of 1.5 x 2 x 3, ALI, as 13 x 13 x 6"
    i, j, k = np.indices(volume.shape)
    exact = i / 1.5 + 10 * j / 2 + 100 * k * 2.5 / 3
    inside = volume.read()[..., 0]
    assert inside.dtype == np.float32
    assert np.allclose(inside[:, :, :5], exact[:, :, :5], atol=1e-4)
    assert np.allclose(inside[:, :, 5], exact[:, :, 0] + 400, atol=1e-4)  # the edge
    volume.write(tmp_path / "back.nii.gz", inside)
    back = nibabel.load(tmp_path / "back.nii.gz")
    assert np.array_equal(back.affine, AFFINE)
    first = nibabel.load(path).get_fdata()[:, :, :4]
    assert np.allclose(back.get_fdata()[:, :, :4], first, atol=1e-4)
    volume.write(tmp_path / "back.nii.gz", inside > 200)
    mask = np.asarray(nibabel.load(tmp_path / "back.nii.gz").dataobj)
    assert mask.dtype == np.uint8
    places = [np.rint(np.arange(n) * step) for n, step in ((9, 1.5), (7, 2), (5, 1.2))]
    expected = (inside > 200)[np.ix_(*(place.astype(int) for place in places))]
    assert np.array_equal(mask, expected)
    with pytest.raises(GemscError, match="3 cannot be resampled to 1 x 0 x 1"):
        Volume(path, spacing=(1, 0, 1))
    assert count_voxels(5, 3, 2.2) == 6  # of 6.5, the whole ones


def test_the_sizes_of_voxels_turn_with_their_axes(tmp_path: Path) -> None:
    write_case(tmp_path / "case.nii.gz", 9, 7, 5)
    turned = Volume(tmp_path / "case.nii.gz", "LIP")  # of 2, 3 and 1.5, as they are
    same = Volume(tmp_path / "case.nii.gz", "LIP", spacing=(2, 3, 1.5))
    assert same.shape == turned.shape == turned.read().shape[:3] == (7, 5, 9)
    assert np.array_equal(same.read(), turned.read())


@pytest.mark.parametrize("orientation", [None, "SLP"])
def test_voxels_are_resampled_as_by_monai(
    orientation: str | None, tmp_path: Path
) -> None:
    transforms: Any = pytest.importorskip("monai.transforms")
    path, spacing = tmp_path / "case.nii.gz", (1.3, 2.2, 1.7)
    write_case(path, 9, 7, 5)
    volume = Volume(path, orientation, spacing=spacing)
    steps = [transforms.LoadImage(), transforms.EnsureChannelFirst()]
    steps += [transforms.Orientation(orientation)] if orientation else []
    steps.append(transforms.Spacing(spacing))
    expected = transforms.Compose(steps)(path)
    assert np.allclose(volume.read()[..., 0], expected[0], atol=1e-4)


def test_a_model_gets_voxels_of_its_size_and_the_mask_lies_over_the_file(
    tmp_path: Path,
) -> None:
    model = program(tmp_path, ranks=2, micro_batches=2)
    path = tmp_path / "case.nii.gz"
    write_case(path, 19, 13, 9)
    turned: dict[str, Any] = {"orientation": "RAS", "spacing": (1.0, 2.5, 3.5)}
    volume = Volume(path, **turned)
    x = torch.from_numpy(volume.read()).movedim(-1, 0)[None].double()
    expected = blended(model, x)[0].argmax(0).byte().numpy()
    volume.write(tmp_path / "expected.nii.gz", expected)
    mask = predict(tmp_path, 2, kind="mask", **turned)
    again = nibabel.load(tmp_path / "expected.nii.gz")
    assert mask.shape == (19, 13, 9)
    assert 0 < mask.get_fdata().mean() < 1
    assert np.array_equal(mask.get_fdata(), again.get_fdata())


@pytest.mark.slow
def test_functions_of_the_file_take_and_give_the_whole_volume(tmp_path: Path) -> None:
    model = program(tmp_path, ranks=2, tiles=("2x1x1",))
    voxels = write_case(tmp_path / "case.nii.gz", 10, 13, 9, channels=2)

    def predict_input(region: NDArray[Any]) -> Tensor:
        x = torch.from_numpy(region[..., 1])[None]
        return (x - x.mean()) / x.std()  # of the whole volume

    def predict_output(output: Tensor) -> NDArray[Any]:
        return (output[0] > output[0].mean()).numpy()

    user = user_of(predict_input=predict_input, predict_output=predict_output)
    image = predict(tmp_path, 2, user, overlap=1)
    scores = blended_by_one(model, predict_input(voxels)[None].double())
    assert image.get_data_dtype() == np.uint8
    assert np.array_equal(image.get_fdata(), scores > scores.mean())
    small = user_of(predict_input=lambda region: predict_input(region)[:, 1:])
    with pytest.raises(GemscError, match=r"returns a volume of \(9, 13, 9\)"):
        predict(tmp_path, 2, small)
    labels = user_of(
        predict_input=predict_input, predict_output=lambda y: y.argmax(0) * 70_000
    )
    image = predict(tmp_path, 2, labels)
    assert image.get_data_dtype() == np.int32  # of 64 bits
    assert set(np.unique(image.dataobj)) == {0, 70_000}
    flat = user_of(
        predict_input=predict_input, predict_output=lambda output: np.zeros((10, 13))
    )
    with pytest.raises(
        GemscError, match=r"predict_output returns the shape \[10, 13\]"
    ):
        predict(tmp_path, 2, flat)


@torch.no_grad()
def blended_by_one(model: nn.Module, x: Tensor) -> NDArray[Any]:
    """Return the first channel, from windows that overlap by a voxel on each side."""
    how = SlidingWindows([0.25, 2 / 6, 0.5])
    case = Case(tuple(x.shape[2:]), SIZE, how, x)
    assert case.windows.steps == tuple(n - 2 for n in SIZE)
    for place in case.windows:
        case.add([place], model(case.take([place])))
    channel: NDArray[Any] = case.output()[0, 0].numpy()
    return channel


def test_what_is_no_volume_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.nii.gz"
    with pytest.raises(GemscError, match="there is no file"):
        Volume(path)
    path.write_bytes(b"no")
    with pytest.raises(GemscError, match="not a readable NIfTI file"):
        Volume(path)
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 4), np.uint8), np.eye(4)), path)
    with pytest.raises(GemscError, match=r"\[4, 4\] and the type uint8: not a volume"):
        Volume(path)
    write_case(path, 9, 9, 9)
    with pytest.raises(GemscError, match="unknown orientation 'RRS'"):
        Volume(path, "RRS")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(GemscError, match="cannot be read"):
        Volume(path).read()
    flat = nibabel.Nifti1Image(np.zeros((4, 4, 4), np.uint8), None)
    flat.header.set_sform(np.diag([1, 0, 1, 1]), code=1)
    nibabel.save(flat, path)
    with pytest.raises(GemscError, match="does not say how its axes lie in space"):
        Volume(path, "RAS")


def dcmread(path: Path) -> Any:
    return pytest.importorskip("pydicom").dcmread(path)


def write_slices(folder: Path, **changes: Any) -> NDArray[Any]:
    """Write slices that lie obliquely, in files of no order; return their numbers."""
    pydicom = pytest.importorskip("pydicom")
    folder.mkdir()
    (folder / "readme.txt").write_text("no slice")
    drawn = np.random.default_rng(0)
    pixels = drawn.integers(-500, 500, (5, 7, 9)).astype(np.int16)
    turn = np.linalg.qr(drawn.normal(size=(3, 3)))[0]
    for number, name in enumerate(drawn.permutation(5)):
        place = turn[0] * 3 - turn[1] * 8 + np.cross(*turn[:2]) * 2.5 * number
        meta = pydicom.dataset.FileMetaDataset()
        meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        meta.MediaStorageSOPClassUID = pydicom.uid.CTImageStorage
        meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
        file = pydicom.Dataset()
        file.file_meta = meta
        file.SOPClassUID = meta.MediaStorageSOPClassUID
        file.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
        file.SeriesInstanceUID = "1.2"
        file.InstanceNumber = int(name) + 1  # says nothing
        file.Rows, file.Columns, file.SamplesPerPixel = 7, 9, 1
        file.BitsAllocated = file.BitsStored = 16
        file.HighBit, file.PixelRepresentation = 15, 1
        file.PhotometricInterpretation = "MONOCHROME2"
        file.PixelSpacing = [1.5, 0.75]  # from row to row, from column to column
        file.ImageOrientationPatient = [*map(float, turn[:2].reshape(-1).round(9))]
        file.ImagePositionPatient = [*map(float, place.round(9))]
        file.RescaleSlope, file.RescaleIntercept = 2, -24
        for key, value in changes.items() if number == 1 else ():
            setattr(file, key, value)
        file.PixelData = pixels[number].tobytes()
        file.save_as(folder / f"{name}.dcm", enforce_file_format=True)
    return pixels * 2.0 - 24


def test_a_folder_of_dicom_is_a_volume_that_lies_where_its_slices_say(
    tmp_path: Path,
) -> None:
    numbers = write_slices(tmp_path / "case")
    volume = Volume(tmp_path / "case")
    assert (volume.shape, volume.channels) == ((9, 7, 5), 1)
    assert str(volume).startswith("9 x 7 x 5 voxels of 0.75 x 1.5 x 2.5 mm, ")
    voxels = volume.read()
    assert np.array_equal(voxels[..., 0], numbers.transpose(2, 1, 0))  # as in ITK
    volume.write(tmp_path / "x.nii.gz", voxels[..., 0])
    written = nibabel.load(tmp_path / "x.nii.gz")
    pydicom = pytest.importorskip("pydicom")
    count = 0
    for path in (tmp_path / "case").glob("*.dcm"):
        read = pydicom.dcmread(path)
        across, down = np.array(read.ImageOrientationPatient).reshape(2, 3)
        for row, column in ((0, 0), (6, 0), (2, 8)):
            place = np.array(read.ImagePositionPatient)
            place = place + across * column * 0.75 + down * row * 1.5
            place = np.linalg.inv(written.affine) @ [*-place[:2], place[2], 1]
            x, y, z = place[:3].round().astype(int)
            np.testing.assert_allclose(place[:3], (x, y, z), atol=1e-4)
            number = read.pixel_array[row, column] * 2.0 - 24
            assert written.get_fdata()[x, y, z] == number
            count += number in numbers
    assert count == 15


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SeriesInstanceUID": "1.3"}, "holds 2 series: 1.2, 1.3"),
        ({"PixelSpacing": [1.5, 0.8]}, "has slices of unlike PixelSpacing: "),
        ({"ImagePositionPatient": [0.0, 0.0, 0.0]}, r"has slices .* mm apart"),
    ],
    ids=["two series", "spacing", "a gap"],
)
def test_slices_that_are_no_regular_stack_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_slices(tmp_path / "case", **changes)
    with pytest.raises(GemscError, match=message):
        Volume(tmp_path / "case")


def test_a_stack_without_one_of_its_slices_is_refused(tmp_path: Path) -> None:
    write_slices(folder := tmp_path / "case")
    lies = {p: dcmread(p).ImagePositionPatient for p in folder.glob("*.dcm")}
    _, *inner, _ = sorted(lies, key=lambda path: [*lies[path]])
    inner[1].unlink()
    with pytest.raises(GemscError, match=r"has slices 2\.5 to 5 mm apart"):
        Volume(folder)


def test_a_single_slice_is_as_thick_as_it_says(tmp_path: Path) -> None:
    write_slices(folder := tmp_path / "case", SliceThickness=3.5)
    for path in folder.glob("*.dcm"):
        if "SliceThickness" not in dcmread(path):
            path.unlink()
    assert str(Volume(folder)).startswith("9 x 7 x 1 voxels of 0.75 x 1.5 x 3.5 mm, ")


def test_a_folder_without_slices_and_one_that_is_damaged_are_refused(
    tmp_path: Path,
) -> None:
    write_slices(tmp_path / "case")
    path = tmp_path / "case" / "0.dcm"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(GemscError, match=r"0.dcm cannot be decoded"):
        Volume(tmp_path / "case").read()
    (tmp_path / "empty").mkdir()
    with pytest.raises(GemscError, match="holds no grey DICOM slices"):
        Volume(tmp_path / "empty")


def test_without_nibabel_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(GemscError) as caught:
        Volume(tmp_path / "x.nii.gz")
    assert caught.value.help == "pip install 'gemsc[volumes]'"


def test_what_does_not_fit_is_said_before_ranks_start(
    tmp_path: Path, command: Gemsc, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "p", ranks=2, micro_batches=2)
    monkeypatch.chdir(tmp_path)
    write_case(tmp_path / "case.nii.gz", 9, 9, 9)
    write_case(tmp_path / "two.nii.gz", 9, 9, 9, channels=2)
    np.save("slide.npy", np.zeros((9, 9, 1), np.uint8))
    for words, message in (
        (["nowhere.nii"], "there is no file nowhere.nii"),
        (["slide.npy"], "expects volumes (windows of 8 x 6 x 4 voxels), but slide.npy"),
        (["slide.npy", "-o", "x.nii.gz"], "expects volumes (windows of 8 x 6 x 4 voxe"),
        (["two.nii.gz"], "two.nii.gz has 2 channels, but the model expects 1"),
        (["case.nii.gz", "-o", "x.tiff"], "x.tiff cannot hold the prediction of a"),
        (["case.nii.gz", "--overlap", "2"], "cannot overlap by 2 on each side"),
        (["case.nii.gz", "--orientation", "up"], "unknown orientation 'up'"),
        (["case.nii.gz", "--level", "1"], "case.nii.gz has no level 1"),
        (["case.nii.gz", "--spacing", "1", "0", "1"], "cannot be resampled to 1 x 0 x"),
    ):
        done = command("predict", "p", *words)
        assert done.code == 1
        assert message in done.err.replace("\n", " ")
        assert "help: " in done.err


# ------------------------------------------------------------------------ evaluate


class Cases:
    """Whole cases, each of a size of its own, with a mask."""

    shapes = ((19, 13, 9), (8, 6, 4), (5, 14, 3))

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(1, *self.shapes[index], generator=generator)
        return x, (x > 0.5).expand(2, -1, -1, -1)


class Pieces(Cases):
    """What is trained on: as large as a window."""

    shapes = (SIZE,) * 4


eval_dataset = Cases  # errors name these lines
eval_windows = {"overlap": 0.5, "mode": "gaussian"}


class Largest:
    """Written as torchmetrics writes a metric."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.found = torch.zeros(())

    def update(self, output: Tensor, target: Tensor) -> None:
        assert output.shape == target.shape
        self.found = torch.maximum(self.found, output.max().float())

    def compute(self) -> Tensor:
        return self.found


def spread(output: Tensor, target: Tensor) -> float:
    return float(output[target].std())


METRICS = {"spread": spread, "largest": Largest()}


def user_with(**names: Any) -> UserModel:
    """Return a file that trains nothing, and scores cases in windows."""
    given = {
        "dataset": Pieces,
        "eval_dataset": eval_dataset,
        "eval_windows": eval_windows,
        "loss": mse,
        "metrics": METRICS,
        "optimizer": lambda pairs: torch.optim.SGD([p for _, p in pairs], lr=0.0),
    }
    return user_of(**given | names)


@pytest.fixture(scope="module")
def expected() -> dict[str, float]:
    model = Net().double()
    outputs = [blended(model, x[None].double(), 0.5, "gaussian") for x, _ in cases()]
    targets = [target[None] for _, target in cases()]
    pairs = list(zip(outputs, targets, strict=True))
    return {
        "loss": sum(float(mse(*pair)) for pair in pairs) / 3,
        "spread": sum(spread(*pair) for pair in pairs) / 3,
        "largest": float(max(output.max() for output in outputs)),
    }


def cases() -> list[Any]:
    return [Cases()[index] for index in range(3)]


@pytest.mark.slow(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_cases_are_scored_on_every_layout_as_in_one_process(
    layout: str, expected: dict[str, float], tmp_path: Path
) -> None:
    program(tmp_path, **LAYOUTS[layout])
    epochs: list[dict[str, float]] = []

    def on_epoch(trainer: Trainer, epoch: int, figures: dict[str, float]) -> None:
        epochs.append(figures)

    user = user_with(on_epoch=on_epoch)
    words = "--epochs", "2", "--best", "largest:max"
    ranks = LAYOUTS[layout]["ranks"]
    run(tmp_path, user, *words, ranks=ranks, dtype=torch.float64)
    assert len(epochs) == 2 * ranks
    for figures in epochs:
        assert list(figures) == list(expected)
        assert figures == pytest.approx(expected, rel=1e-6)


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, output: Tensor, target: Tensor) -> Any:
        return mse(output, target) * self.factor


def test_a_loss_with_tensors_of_its_own_scores_whole_cases(
    expected: dict[str, float], tmp_path: Path
) -> None:
    program(tmp_path, ranks=2, micro_batches=2)
    losses: list[float] = []

    def on_epoch(trainer: Trainer, epoch: int, figures: dict[str, float]) -> None:
        losses.append(figures["loss"])

    user = user_with(loss=Doubled, on_epoch=on_epoch)
    run(tmp_path, user, "--epochs", "1", dtype=torch.float64)
    assert losses == pytest.approx([2 * expected["loss"]] * 2, rel=1e-6)


def test_the_plain_loop_of_verify_scores_whole_cases(
    expected: dict[str, float],
) -> None:
    user = replace(user_with(), example_inputs=(torch.rand(1, 1, *SIZE),))
    settings = RunSettings(
        steps=1, dtype=torch.float64, micro_batch_size=3, micro_batches=1
    )
    plain = PlainRun(user, Net(), settings)
    plain.train()
    (scores,) = plain.evaluations
    losses = [figures["loss"] for _, figures in scores if "loss" in figures]
    assert sum(losses) / 3 == pytest.approx(expected["loss"], rel=1e-6)
    others = {key: n for _, figures in scores[3:] for key, n in figures.items()}
    assert others | {"loss": expected["loss"]} == pytest.approx(expected, rel=1e-6)


class Parts(Pieces):
    shape = SIZE

    def read(self, index: int, box: Any) -> Any:
        return self[index]


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"eval_windows": 0.5}, "eval_windows is float"),
        ({"eval_windows": {"size": 4}}, r"eval_windows is \['size'\]"),
        ({"eval_windows": {"overlap": 1}}, "eval_windows overlap by 1"),
        ({"eval_windows": {"overlap": [0.5, 0]}}, "2 overlaps for windows of 3 axes"),
        ({"eval_windows": {"mode": "max"}}, "eval_windows has the mode 'max'"),
        ({"eval_dataset": Parts}, "needs whole cases, but eval_dataset is read in"),
        ({"eval_dataset": lambda: pairs(3)}, "no input with 1 channels and 3 axes"),
    ],
    ids=range(7),
)
def test_what_windows_cannot_score_is_refused(
    names: dict[str, Any], message: str, tmp_path: Path
) -> None:
    program(tmp_path, ranks=2, micro_batches=2)
    with pytest.raises(GemscError, match=message) as caught:
        run(tmp_path, user_with(**names), "--steps", "1")
    assert caught.value.help
    assert "test_volumes.py" in str(caught.value.at)


def test_windows_that_others_change_are_not_scored(tmp_path: Path) -> None:
    program(tmp_path, ranks=2, micro_batches=2)
    plan = Plan.read(tmp_path / "plan.toml")
    text = replace(plan, mixes_samples=True).to_toml(tmp_path)
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(GemscError, match="eval_windows: forward mixes samples"):
        run(tmp_path, user_with(), "--steps", "1")


@pytest.mark.parametrize("channels", [1, -1])
def test_what_looks_at_one_pixel_gives_what_it_gives_at_once(channels: int) -> None:
    """Pictures, and channels behind; several outputs."""
    x = torch.rand(1, 23, 17, 2).movedim(-1, channels)

    def model(x: Tensor) -> dict[str, Tensor]:
        outputs = {"score": x.tanh(), "half": x.half(), "flat": x.sum(channels)}
        return outputs | {"steps": torch.stack([x, -x])}  # samples count in dimension 1

    case = Case((23, 17), (8, 6), SlidingWindows(0.5, "gaussian"), x)
    places = list(case.windows)
    case.add(places[:3], model(case.take(places[:3])), [0, 0, 0, 1])
    for place in places[3:]:
        case.add([place], model(case.take([place])), [0, 0, 0, 1])
    outputs, expected = case.output(), model(x)
    assert outputs["half"].dtype == torch.float32
    for name, value in expected.items():
        torch.testing.assert_close(outputs[name], value.float(), rtol=1e-5, atol=1e-6)


def test_where_axes_may_be_channels_or_sizes_channels_come_first() -> None:
    assert Picture.of_shape((1, 4, 6, 4)) == Picture((6, 4), 4, True)
    assert Picture.of_shape((1, 200, 64, 64)) == Picture((64, 64), 200, True)
    assert Picture.of_shape((1, 64, 64, 3)) == Picture((64, 64), 3, False)
    assert Picture((6, 5), 4, False).shape_of(torch.zeros(1, 9, 7, 4)) == (9, 7)
    assert image_axes((1, 4, 4, 4), (4, 4)) == slice(-2, None)


def test_scores_of_something_else_cannot_be_blended() -> None:
    case = Case((9, 9, 9), SIZE, SlidingWindows(), torch.zeros(1, 1, 9, 9, 9))
    (place, *_) = case.windows
    for output, message in (
        (torch.zeros(1, 7), r"the model returns \[1, 7\] of torch.float32 for windows"),
        (torch.zeros(*SIZE), r"the model returns \[8, 6, 4\] of torch.float32 for"),
        (torch.zeros(1, 1, *SIZE, dtype=torch.int64), "of torch.int64 for windows of"),
        ({"x": None}, "the model returns NoneType for windows of 8 x 6 x 4"),
    ):
        with pytest.raises(GemscError, match=message):
            case.add([place], output)
