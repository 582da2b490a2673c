"""Large pictures in parts: read from many kinds of files, and written row by row."""

from __future__ import annotations

import io
import itertools
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from gemsc.errors import GemscError
from gemsc.slides.mask import write_rows
from gemsc.slides.slide import Slide
from gemsc.slides.windows import Windows

DRAWN = np.random.default_rng(0)
COLOURS = DRAWN.integers(0, 256, (333, 517, 3), np.uint8)
GREY = DRAWN.integers(0, 2**16, (333, 517), np.uint16)
DEFLATE: dict[str, Any] = {"compression": "zlib"}
RGB: dict[str, Any] = {"photometric": "rgb"}


def write_pyramid(path: Path) -> None:
    with tifffile.TiffWriter(path) as file:
        file.write(COLOURS, subifds=1, tile=(64, 128), **DEFLATE, **RGB)
        file.write(COLOURS[::4, ::4], subfiletype=1, tile=(64, 128), **DEFLATE, **RGB)


WRITERS: dict[str, tuple[np.ndarray, Callable[[Path], object]]] = {
    "pyramid": (COLOURS, write_pyramid),
    "tiles": (GREY, lambda path: tifffile.imwrite(path, GREY, tile=(80, 64))),
    "strips": (
        COLOURS,
        lambda path: tifffile.imwrite(path, COLOURS, rowsperstrip=50, **DEFLATE, **RGB),
    ),
    "memory": (COLOURS, lambda path: tifffile.imwrite(path, COLOURS, **RGB)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_any_part_of_a_tiff_file_is_that_of_the_picture(
    name: str, tmp_path: Path
) -> None:
    whole, write = WRITERS[name]
    write(path := tmp_path / "x.tiff")
    slide = Slide(path)
    whole = whole.reshape(333, 517, -1)
    assert (slide.shape, slide.dtype) == (whole.shape, whole.dtype)
    for corners in ([0, 333, 0, 517], *DRAWN.integers(0, 334, (20, 4)).tolist()):
        rows, columns = sorted(corners[:2]), sorted(corners[2:])
        part = slide.read(tuple(rows), tuple(columns))
        assert np.array_equal(part, whole[slice(*rows), slice(*columns)])


def test_levels_and_arrays(tmp_path: Path) -> None:
    write_pyramid(tmp_path / "x.tiff")
    slide = Slide(tmp_path / "x.tiff", level=1)
    assert slide.levels == ((333, 517), (84, 130))
    assert np.array_equal(slide.read((3, 80), (0, 129)), COLOURS[12:320:4, 0:516:4])
    np.save(tmp_path / "x.npy", GREY)
    rows = Slide(tmp_path / "x.npy").read((7, 9), (0, 517))
    assert np.array_equal(rows[..., 0], GREY[7:9])


@pytest.mark.parametrize("suffix", [".tiff", ".png"])
def test_who_changes_what_was_read_changes_no_later_part(
    suffix: str, tmp_path: Path
) -> None:
    Image.fromarray(COLOURS).save(path := tmp_path / f"x{suffix}")
    slide = Slide(path)
    slide.read((0, 9), (0, 9))[:] = 0
    assert np.array_equal(slide.read((0, 9), (0, 9)), COLOURS[:9, :9])


@pytest.mark.parametrize("suffix", [".tiff", ".npy"])
def test_numbers_are_in_the_byte_order_of_this_machine(
    suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"x{suffix}"
    if suffix == ".npy":
        np.save(path, GREY.astype(">u2"))
    else:
        tifffile.imwrite(path, GREY, byteorder=">")
    slide = Slide(path)
    part = slide.read((7, 9), (0, 517))
    assert torch.from_numpy(part).dtype is torch.uint16
    assert slide.dtype.isnative
    assert np.array_equal(part[..., 0], GREY[7:9])


@pytest.mark.parametrize("suffix", [".png", ".BMP", ".jpg"])
def test_what_pillow_decodes(suffix: str, tmp_path: Path) -> None:
    picture = np.broadcast_to(np.uint8(90), (9, 7, 3)).copy()
    picture[:, 3:] = 200, 10, 60
    Image.fromarray(picture).save(path := tmp_path / f"x{suffix}", quality=95)
    slide = Slide(path)
    assert (slide.shape, slide.dtype, slide.levels) == ((9, 7, 3), np.uint8, ((9, 7),))
    pixels, exact = slide.read((2, 9), (1, 6)), suffix != ".jpg"
    assert np.allclose(pixels, picture[2:9, 1:6], atol=0 if exact else 90)
    with pytest.raises(GemscError, match="no level 1"):
        Slide(path, level=1)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(GemscError, match="cannot be read as a picture"):
        Slide(path)


def test_a_palette_is_taken_as_colours_and_deep_greys_stay(tmp_path: Path) -> None:
    picture = Image.fromarray(COLOURS[:8, :8]).quantize(4)
    picture.save(tmp_path / "x.png")
    pixels = Slide(tmp_path / "x.png").read((0, 8), (0, 8))
    assert np.array_equal(pixels, np.asarray(picture.convert("RGB")))
    grey = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    Image.fromarray(grey).save(tmp_path / "y.png")
    assert np.array_equal(Slide(tmp_path / "y.png").read((0, 8), (0, 8))[..., 0], grey)


@pytest.mark.parametrize(
    ("write", "level", "message", "advice"),
    [
        (lambda p: None, 0, "there is no file", "TIFF"),
        (
            lambda p: p.write_text("print()"),
            0,
            "not a readable TIFF file",
            "give a TIFF",
        ),
        (write_pyramid, 2, "no level 2", "0: 333 x 517, 1: 84 x 130"),
        (
            lambda p: tifffile.imwrite(p, GREY[:4, None, :9], photometric="minisblack"),
            *(0, "axes", "one page"),
        ),
    ],
)
def test_what_is_no_such_picture_is_refused(
    write: Callable[[Path], object],
    level: int,
    message: str,
    advice: str,
    tmp_path: Path,
) -> None:
    write(path := tmp_path / "x.tiff")
    with pytest.raises(GemscError, match=message) as caught:
        Slide(path, level)
    assert advice in str(caught.value.help)


def test_a_damaged_part_and_one_beyond_the_edge_are_refused(tmp_path: Path) -> None:
    write_pyramid(path := tmp_path / "x.tiff")
    slide = Slide(path)
    with pytest.raises(GemscError, match=r"not within .*, 333 x 517"):
        slide.read((0, 334), (0, 9))
    with tifffile.TiffFile(path) as file:
        start = file.pages[0].dataoffsets[0]
    with path.open("r+b") as raw:
        raw.seek(start)
        raw.write(bytes(99))
    with pytest.raises(GemscError, match=r"part 0 of .* cannot be decoded"):
        slide.read((0, 64), (0, 64))
    assert slide.read((64, 65), (128, 129)).shape == (1, 1, 3)


@pytest.mark.parametrize(
    ("module", "file"),
    [("tifffile", "x.tiff"), ("openslide", "x.svs"), ("PIL.Image", "x.png")],
)
def test_without_its_reader_the_extra_is_named(
    module: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / file).touch()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(GemscError) as caught:
        Slide(tmp_path / file)
    assert caught.value.help == "pip install 'gemsc[slides]'"


def test_windows_cover_each_pixel_once_and_see_around_it() -> None:
    for length, size in itertools.product(range(1, 50), range(1, 18)):
        for overlap in range((size + 1) // 2):
            check_rows(length, size, overlap)


def check_rows(length: int, size: int, overlap: int) -> None:
    rows, _ = Windows((length, 1), (size, 1), (size - 2 * overlap, 1)).axes
    covered = [i for row in rows for i in range(*row.kept)]
    assert covered == list(range(length))
    for row in rows:
        first, last = row.start, min(row.start + size, length)
        assert first >= 0
        assert row.start + size <= max(length, size)
        assert row.kept[0] - first >= overlap or first == 0
        assert last - row.kept[1] >= overlap or last == length


@pytest.mark.parametrize("shape", [(1100, 700), (90, 1300, 2), (512, 512)])
def test_bands_become_one_picture(shape: tuple[int, ...], tmp_path: Path) -> None:
    whole = DRAWN.random(shape, np.float32)
    bands = np.array_split(whole, 7)
    write_rows(tmp_path / "x.tiff", bands, shape, whole.dtype)
    assert np.array_equal(tifffile.imread(tmp_path / "x.tiff"), whole)
    with tifffile.TiffFile(tmp_path / "x.tiff") as file:
        assert file.pages[0].tile[:2] == (512, 512)


def described(text: str) -> dict[str, Any]:
    return {"metadata": None, "description": text}


OME = '<OME><Pixels PhysicalSizeX="0.25" PhysicalSizeY="0.5" {}/></OME>'
RESOLUTIONS: dict[str, tuple[dict[str, Any], tuple[float, float] | None]] = {
    "centimetres": (
        {"resolution": (4e4, 2e4), "resolutionunit": "CENTIMETER"},
        (0.5, 0.25),
    ),
    "inches": ({"resolution": (25400, 12700), "resolutionunit": "INCH"}, (2.0, 1.0)),
    "no unit": ({"resolution": (4e4, 2e4), "resolutionunit": "NONE"}, None),
    "nothing": ({}, None),
    "aperio": (
        described("Aperio Image|AppMag = 20|MPP = 0.499|Left = 3"),
        (0.499,) * 2,
    ),
    "ome": (described(OME.format('PhysicalSizeXUnit="µm"').encode()), (0.5, 0.25)),
    "ome in mm": (described(OME.format('PhysicalSizeXUnit="mm"').encode()), None),
}


@pytest.mark.parametrize("name", RESOLUTIONS)
def test_a_slide_knows_the_size_of_its_pixels(name: str, tmp_path: Path) -> None:
    options, expected = RESOLUTIONS[name]
    path = tmp_path / "x.tiff"
    with tifffile.TiffWriter(path) as file:
        file.write(COLOURS, subifds=1, **options, **RGB)
        file.write(COLOURS[::4, ::4], subfiletype=1, metadata=None, **RGB)
    pixel = Slide(path).pixel
    assert pixel == (None if expected is None else pytest.approx(expected))
    coarse = Slide(path, level=1).pixel
    if expected is not None:
        wanted = expected[0] * 333 / 84, expected[1] * 517 / 130
        assert coarse == pytest.approx(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), (3,)], ids=str)
def test_a_mask_is_a_pyramid_with_the_resolution_of_the_slide(
    more: tuple[int, ...], tmp_path: Path
) -> None:
    whole = DRAWN.integers(0, 9, (4501, 1030, *more), np.uint8)
    bands = np.array_split(whole, 101)  # of 44 or 45 rows: no multiples of 4
    path = tmp_path / "mask.tiff"
    write_rows(path, bands, whole.shape, whole.dtype, (0.5, 0.25))
    with tifffile.TiffFile(path) as file:
        (series,) = file.series
        assert len(series.levels) == len(file.pages) == 3
        for number, page in enumerate(series.levels):
            step = 4**number
            assert np.array_equal(page.asarray(), whole[::step, ::step])
            assert page.keyframe.is_tiled
            per_cm = page.keyframe.get_resolution("CENTIMETER")
            assert per_cm == pytest.approx((4e4 / step, 2e4 / step))
    assert [*tmp_path.iterdir()] == [path]
    assert Slide(path, level=2).levels == ((4501, 1030), (1126, 258), (282, 65))
    assert Slide(path).pixel == pytest.approx((0.5, 0.25))


def test_openslide_reads_a_mask(tmp_path: Path) -> None:
    openslide = pytest.importorskip("openslide")
    whole = DRAWN.integers(0, 9, (4501, 1030), np.uint8)
    write_rows(path := tmp_path / "x.tiff", [whole], whole.shape, np.uint8, (0.5, 0.25))
    with openslide.OpenSlide(path) as slide:
        assert slide.level_dimensions == ((1030, 4501), (258, 1126), (65, 282))
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.25)
        part = np.asarray(slide.read_region((0, 0), 1, (258, 1126)))
    assert np.array_equal(part[..., 0], whole[::4, ::4])


def test_a_scanners_slide_is_read_in_parts(tmp_path: Path) -> None:
    pytest.importorskip("openslide")
    path = tmp_path / "x.svs"
    text = "Aperio Image Library v1\r\n517x333 (256x256)|AppMag = 20|MPP = 0.5"
    given: dict[str, Any] = {"tile": (256, 256), "metadata": None, **DEFLATE, **RGB}
    with tifffile.TiffWriter(path) as file:
        file.write(COLOURS, description=text, **given)
        file.write(COLOURS[:64, :64], description=text, **RGB, metadata=None)
        file.write(COLOURS[::2, ::2], description=text, **given)
    slide = Slide(path)
    assert (slide.shape, slide.dtype) == (COLOURS.shape, np.uint8)
    assert slide.pixel == (0.5, 0.5)
    assert np.array_equal(slide.read((7, 300), (250, 517)), COLOURS[7:300, 250:517])
    assert slide.read((5, 5), (0, 9)).shape == (0, 9, 3)
    coarse = Slide(path, level=1)
    assert coarse.levels == ((333, 517), (167, 259))
    assert coarse.pixel == pytest.approx((0.5 * 333 / 167, 0.5 * 517 / 259))
    assert np.array_equal(coarse.read((0, 99), (0, 200)), COLOURS[:198:2, :400:2])
    seen = np.full((1, 2, 4), 90, np.uint8)
    seen[0, 0] = 0  # where the scanner saw nothing
    file = coarse._source._file  # type: ignore[union-attr]
    factor = file.level_downsamples[1]
    with mock.patch.object(file, "read_region", return_value=seen) as read:
        assert coarse.read((99, 100), (150, 152))[0, :, 0].tolist() == [255, 90]
    read.assert_called_once_with((round(150 * factor), round(99 * factor)), 1, (2, 1))
    assert factor % 1
    with pytest.raises(GemscError, match="no level 2"):
        Slide(path, level=2)
    path.write_bytes(b"no")
    with pytest.raises(GemscError, match="not a slide that OpenSlide can read"):
        Slide(path)


def write_ndpi(path: Path, picture: np.ndarray) -> None:
    """Write two levels as Hamamatsu does: one JPEG each, and links of 8 bytes."""
    image: Any = pytest.importorskip("PIL.Image")
    data, link = bytearray(b"II*\0" + bytes(8)), 4
    for step in (1, 4):
        part = picture[::step, ::step]
        image.fromarray(part).save(jpeg := io.BytesIO(), "JPEG", quality=100)
        strip, length = len(data), len(jpeg.getvalue())
        data += jpeg.getvalue() + struct.pack("<4I", 40_000, step, 20_000, step)
        height, width, channels = part.shape
        tags = {256: width, 257: height, 259: 7, 262: 6, 273: strip, 277: channels}
        tags |= {278: height, 279: length, 282: strip + length}  # pixels per ...
        tags |= {283: strip + length + 8, 296: 3}  # ... centimetre
        tags |= {65420: 1, 65421: 20 / step, 65424: 0}  # NDPI, lens, focus
        data[link : link + 8] = struct.pack("<Q", len(data))
        data += struct.pack("<H", len(tags))
        kinds = {282: (5, "I"), 283: (5, "I"), 65421: (11, "f"), 65424: (9, "i")}
        for tag, value in tags.items():
            kind, form = kinds.get(tag, (4, "I"))
            data += struct.pack(f"<HHI{form}", tag, kind, 1, value)
        link = len(data)
        data += bytes(8)
    path.write_bytes(data)


def test_a_slide_of_hamamatsu_is_read_in_parts(tmp_path: Path) -> None:
    pytest.importorskip("openslide")
    smooth = np.mgrid[:333, :517].transpose(1, 2, 0).repeat(2, axis=2)[..., :3] // 3
    write_ndpi(path := tmp_path / "x.ndpi", picture := smooth.astype(np.uint8))
    slide, coarse = Slide(path), Slide(path, level=1)
    assert (slide.shape, slide.pixel) == ((333, 517, 3), (0.5, 0.25))
    assert slide.levels[:2] == ((333, 517), (84, 130))  # then what OpenSlide adds
    assert coarse.pixel == pytest.approx((0.5 * 333 / 84, 0.25 * 517 / 130))
    for part, expected in (
        (slide.read((100, 300), (50, 500)), picture[100:300, 50:500]),
        (coarse.read((3, 84), (0, 129)), picture[12::4, :516:4]),
    ):
        np.testing.assert_allclose(part.astype(int), expected, atol=4)  # JPEG
