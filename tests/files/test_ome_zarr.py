"""OME-Zarr, 0.4 and 0.5: volumes and slides, read in parts, and predicted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Gemsc
from numpy.typing import NDArray
from test_volumes import blended, predict, program
from torch import Tensor, nn

from gemsc.errors import GemscError
from gemsc.slides.slide import Slide
from gemsc.slides.volume import Volume, is_volume

zarr: Any = pytest.importorskip("zarr")
nibabel: Any = pytest.importorskip("nibabel")
DRAWN = np.random.default_rng(0)
SPACING = {"t": 1.0, "c": 1.0, "z": 2.0, "y": 0.5, "x": 250.0}
UNITS = {"t": "second", "z": "micrometer", "y": "micrometer", "x": "nanometer"}
NAMES = {2: "v2", 3: "default"}  # of the files of chunks
KINDS = {"t": "time", "c": "channel"}


def write_image(
    path: Path,
    data: NDArray[Any],
    axes: str,
    version: int = 3,
    *,
    units: dict[str, str] = UNITS,
    names: str = "",
    **changes: Any,
) -> None:
    """Write two levels, the second with every other row and column."""
    group = zarr.open_group(path, mode="w", zarr_format=version)
    datasets = []
    for level, factor in enumerate((1, 2)):
        part = data[tuple(slice(None, None, factor if n in "yx" else 1) for n in axes)]
        chunks = tuple(-(-size // 5) for size in part.shape)
        new = group.create_array(
            f"s{level}",
            shape=part.shape,
            chunks=chunks,
            dtype=part.dtype,
            chunk_key_encoding={"name": NAMES[version], "separator": "/"},
        )
        new[...] = part
        scale = [factor if n in "yx" else 1 for n in axes]
        to_space = [
            {"type": "scale", "scale": scale},
            {"type": "translation", "translation": [8.0] * len(axes)},
        ]
        datasets.append({"path": f"s{level}", "coordinateTransformations": to_space})
    named = [{"name": n, "type": KINDS.get(n, "space")} for n in names or axes]
    about = {
        "axes": [axis | {"unit": units.get(axis["name"])} for axis in named],
        "datasets": datasets,
        "coordinateTransformations": [
            {"type": "scale", "scale": [SPACING[n] for n in axes]}
        ],
    }
    notes: dict[str, Any] = {"multiscales": [about | changes]}
    group.attrs.update({"ome": notes} if version == 3 else notes)


def scores(model: nn.Module, data: NDArray[Any]) -> Tensor:
    """Return what plain PyTorch gives for a grey volume: channels, z, y, x."""
    return blended(model, torch.from_numpy(data)[None, None].double())[0]


def grey(*shape: int) -> NDArray[np.int16]:
    return DRAWN.integers(-90, 90, shape).astype(np.int16)


@pytest.mark.slow(2)
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("axes", ["zyx", "tczyx"])
def test_a_volume_has_the_order_and_the_spacing_of_the_file(
    axes: str, version: int, tmp_path: Path
) -> None:
    data = grey(*{"zyx": (6, 13, 9), "tczyx": (1, 2, 6, 13, 9)}[axes])
    write_image(path := tmp_path / "a.ome.zarr", data, axes, version)
    assert is_volume(path)
    volume = Volume(path)
    assert str(volume) == "6 x 13 x 9 voxels of 0.002 x 0.0005 x 0.00025 mm, SAR"
    channels_behind = np.moveaxis(data.reshape(-1, 6, 13, 9), 0, -1)
    assert np.array_equal(volume.read(), channels_behind)
    turned = Volume(path, "RAS")
    assert (turned.shape, turned.channels) == ((9, 13, 6), channels_behind.shape[-1])
    assert np.array_equal(turned.read(), channels_behind.transpose(2, 1, 0, 3))
    turned.write(tmp_path / "x.nii.gz", turned.read()[..., 0])
    written = nibabel.load(tmp_path / "x.nii.gz")
    assert np.array_equal(written.get_fdata(), channels_behind[..., 0])
    place = written.affine @ [3, 4, 5, 1]  # z, y, x to x, y, z in millimetres
    expected = [(8 + 5) * 250e-6, (8 + 4) * 0.5e-3, (8 + 3) * 2e-3, 1]
    np.testing.assert_allclose(place, expected, rtol=1e-6)
    assert written.header.get_xyzt_units()[0] == "mm"
    coarse = Volume(path, level=1)
    assert np.array_equal(coarse.read(), channels_behind[:, ::2, ::2])
    assert str(coarse).startswith("6 x 7 x 5 voxels of 0.002 x 0.001 x 0.0005 mm")


def test_a_volume_without_units_and_one_that_is_long(tmp_path: Path) -> None:
    data = DRAWN.random((2, 2, 2**15)) > 0.5
    write_image(path := tmp_path / "a.ome.zarr", data, "zyx", units={"z": "parsec"})
    volume = Volume(path)
    assert str(volume).startswith("2 x 2 x 32768 voxels of 2 x 0.5 x 250, ")
    volume.write(tmp_path / "x.nii.gz", volume.read()[..., 0])
    assert np.array_equal(nibabel.load(tmp_path / "x.nii.gz").get_fdata(), data)


@pytest.mark.slow
def test_a_volume_is_predicted_as_by_plain_pytorch_in_windows(
    tmp_path: Path, command: Gemsc, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = program(tmp_path / "p", ranks=2, tiles=("2x1x1",), micro_batches=2)
    monkeypatch.chdir(tmp_path)
    data = grey(19, 13, 9)
    write_image(tmp_path / "a.ome.zarr", data, "zyx", 2)
    image = predict(tmp_path / "p", 2, source=tmp_path / "a.ome.zarr")
    expected = scores(model, data).movedim(0, -1).numpy()
    np.testing.assert_allclose(image.get_fdata(), expected, rtol=0, atol=1e-11)
    assert image.affine[0].tolist() == pytest.approx([0, 0, 250e-6, 8 * 250e-6])
    write_image(tmp_path / "slide.zarr", data[:1], "zyx")
    for words, message in (
        (["slide.zarr"], "expects volumes (windows of 8 x 6 x 4 voxels), but slide"),
        (["a.ome.zarr", "--level", "2"], "a.ome.zarr has no level 2"),
        (["a.ome.zarr", "-o", "x.tiff"], "x.tiff cannot hold the prediction of a"),
    ):
        done = command("predict", "p", *words)
        assert done.code == 1
        assert message in done.err.replace("\n", " ")


@pytest.mark.nightly
@pytest.mark.mpi
def test_the_command_predicts_a_level_of_a_volume(
    tmp_path: Path, command: Gemsc, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = program(tmp_path / "p", ranks=2, micro_batches=2)
    monkeypatch.chdir(tmp_path)
    write_image(tmp_path / "a.ome.zarr", data := grey(9, 13, 8), "zyx")
    words = ["a.ome.zarr", "--level", "1", "--dtype", "float64"]
    done = command("predict", "p", *words)
    assert done.code == 0, done.err
    assert "9 x 7 x 4 voxels of 0.002 x 0.001 x 0.0005 mm, SAR: " in done.out
    mask = nibabel.load("mask.nii.gz").get_fdata()
    expected = scores(model, data[:, ::2, ::2].copy()).argmax(0)
    assert np.array_equal(mask, expected.numpy())


@pytest.mark.parametrize("version", [2, 3])
def test_of_a_slide_only_the_chunks_of_a_part_are_read(
    version: int, tmp_path: Path
) -> None:
    colours = DRAWN.integers(0, 256, (1, 3, 1, 13, 21), np.uint8)
    path = tmp_path / "slide.ome.zarr"
    write_image(path, colours, "tczyx", version)
    assert not is_volume(path)
    slide, picture = Slide(path), np.moveaxis(colours[0, :, 0], 0, -1)
    assert (slide.shape, slide.dtype) == ((13, 21, 3), np.uint8)
    assert slide.levels == ((13, 21), (7, 11))
    assert slide.pixel == pytest.approx((0.5, 0.25))
    coarse = Slide(path, level=1)
    assert coarse.pixel == pytest.approx((0.5 * 13 / 7, 0.25 * 21 / 11))
    assert np.array_equal(coarse.read((1, 6), (2, 11)), picture[2:12:2, 4::2])
    (chunk,) = (path / "s0").rglob("0/0/0/1/2")
    chunk.write_bytes(b"no")
    assert np.array_equal(slide.read((2, 13), (0, 10)), picture[2:, :10])
    assert slide.read((2, 2), (0, 10)).shape == (0, 10, 3)
    with pytest.raises(GemscError, match=r"s0 cannot be read"):
        slide.read((2, 13), (0, 11))


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    ("axes", "shape", "changes", "message"),
    [
        ("tzyx", (3, 4, 9, 9), {}, r"has the axes t \(3\), z \(4\), y \(9\), x \(9\)"),
        ("zyx", (4, 9, 9), {"names": "kyx"}, r"the axes k \(4\)"),
        ("zyx", (4, 9, 9), {"names": "yx"}, "cannot be read"),
        ("zyx", (4, 9, 9), {"datasets": [{"path": "9"}]}, r"KeyError\('9'\)"),
        (
            *("zyx", (4, 9, 9)),
            {"coordinateTransformations": [{"type": "scale", "scale": [1, 0, 1]}]},
            r"scale \[1.0, 0.0, 1.0\]",
        ),
    ],
    ids=["times", "names", "number of axes", "no array", "scale"],
)
def test_what_is_no_such_image_is_refused(
    axes: str, shape: Any, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_image(tmp_path / "a", grey(*shape), axes, **changes)
    with pytest.raises(GemscError, match=message):
        Volume(tmp_path / "a")


def test_what_is_no_image_at_all_is_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "a.zarr" / "0", grey(4, 9, 9), "zyx")
    zarr.open_group(tmp_path / "a.zarr", mode="a")
    with pytest.raises(GemscError, match="has no multiscales") as caught:
        is_volume(tmp_path / "a.zarr")
    assert str(tmp_path / "a.zarr" / "0") in str(caught.value.help)
    assert is_volume(tmp_path / "a.zarr" / "0")
    with pytest.raises(GemscError, match="is not readable OME-Zarr"):
        is_volume(tmp_path / "a.zarr" / "0" / "s0")
    (tmp_path / "b.zarr").mkdir()
    with pytest.raises(GemscError, match="is not readable OME-Zarr"):
        Slide(tmp_path / "b.zarr")
    with pytest.raises(GemscError, match="has 4 planes: a volume"):
        Slide(tmp_path / "a.zarr" / "0")


def test_without_zarr_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.ome.zarr").mkdir()
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(GemscError) as caught:
        is_volume(tmp_path / "a.ome.zarr")
    assert caught.value.help == "pip install 'gemsc[zarr]'"
