"""A picture of any size, of which parts are read: TIFF, PNG, OpenSlide, OME-Zarr, ...

    slide = Slide("slide.tiff", level=1)
    slide.read((4096, 6144), (0, 2048))     # 2048 x 2048 x 3, uint8

A TIFF file may hold tiles or strips, compressed or not, and coarser levels as SubIFDs
or as pages of their own. Only the tiles or strips in which the part lies are decoded.
OpenSlide reads what scanners write: .svs, .ndpi, .mrxs, ...; zarr reads OME-Zarr.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemsc.errors import GemscError
from gemsc.slides import needed
from gemsc.slides.ome_zarr import OmeZarr, check_level, is_zarr

Picture = NDArray[Any]
OF_PILLOW = (".png", ".jpg", ".jpeg", ".bmp")
OF_OPENSLIDE = (".bif", ".mrxs", ".ndpi", ".scn", ".svs", ".svslide", ".vms", ".vmu")
CACHE_BYTES = 128 * 2**20  # of decoded tiles: windows overlap
MICROMETRES = {2: 25400.0, 3: 10000.0}  # of an inch, of a centimetre: TIFF's units
LARGEST_SEGMENT = 512 * 2**20  # bytes of a tile or strip, decoded


def tifffile_module() -> Any:
    """Return the module that reads and writes TIFF."""
    return needed("tifffile", "TIFF", "slides")


class Slide:
    """One level of a picture on disk; each process, or thread, opens its own.

    `shape` is (height, width, channels), `dtype` that of the file in the byte order of
    this machine, `levels` the heights and widths of all levels, `pixel` the height and
    width of a pixel of this level in micrometres, None where the file does not say it.
    """

    def __init__(self, path: str | Path, level: int = 0) -> None:
        """Open a level; 0 is the finest.

        Raises:
            GemscError: it is no such file, holds no picture, or has no such level.
        """
        self.path = Path(path)
        if not (self.path.is_file() or is_zarr(self.path)):
            raise GemscError(f"there is no file {self.path}", help="give a TIFF file")
        suffix = self.path.suffix.lower()
        opened: Any = _OpenSlide if suffix in OF_OPENSLIDE else _Tiff
        opened = _Array if suffix in (".npy", *OF_PILLOW) else opened
        opened = _Zarr if is_zarr(self.path) else opened
        self._source: _Array | _OpenSlide | _Tiff | _Zarr = opened(self.path, level)
        self.levels: tuple[tuple[int, int], ...] = self._source.levels
        self.shape: tuple[int, int, int] = self._source.shape
        self.dtype: np.dtype[Any] = self._source.dtype.newbyteorder("=")
        self.pixel: tuple[float, float] | None = None
        if (finest := self._source.pixel) is not None:
            sizes = zip(finest, self.levels[0], self.shape, strict=False)
            height, width = (size * n / m for size, n, m in sizes)
            self.pixel = (height, width)

    def read(self, rows: tuple[int, int], columns: tuple[int, int]) -> Picture:
        """Return a part, (height, width, channels), in memory of its own.

        Rows and columns are half-open intervals within the picture.

        Raises:
            GemscError: the part is not within the picture, or cannot be decoded.
        """
        for (start, stop), size in zip((rows, columns), self.shape[:2], strict=True):
            if not 0 <= start <= stop <= size:
                raise GemscError(
                    f"rows {rows} and columns {columns} are not within {self.path}, "
                    f"{self.shape[0]} x {self.shape[1]} pixels",
                    help="read a part inside it",
                )
        return self._source.read(rows, columns).astype(self.dtype, copy=False)


def _pixel_of(file: Any) -> tuple[float, float] | None:
    """Return the height and width of a TIFF file's pixels in micrometres."""
    page = file.pages[0]
    if file.is_ome:
        sizes = [
            re.search(rf'PhysicalSize{axis}="([^"]+)"', file.ome_metadata)
            for axis in "YX"
        ]
        if all(sizes) and not re.search('PhysicalSizeXUnit="(?!µm)', file.ome_metadata):
            height, width = (float(size[1]) for size in sizes if size)
            return height, width
    if aperio := re.search(r"\|\s*MPP = ([\d.]+)", page.description):
        return float(aperio[1]), float(aperio[1])
    unit = MICROMETRES.get(int(page.resolutionunit))
    if "XResolution" not in page.tags or "YResolution" not in page.tags:
        return None
    try:
        across, down = page.get_resolution()
        return (unit / down, unit / across) if unit else None
    except (ZeroDivisionError, ValueError):
        return None


def _mapped(path: Path) -> Picture:
    try:
        picture: Picture = np.load(path, mmap_mode="r")
    except (ValueError, OSError, EOFError) as error:
        raise GemscError(
            f"{path} is not a NumPy array: {error}", help="write it with numpy.save"
        ) from None
    return picture


def _decoded(path: Path) -> Picture:
    image = needed("PIL.Image", path.suffix, "slides")
    try:
        with image.open(path) as file:
            has_colours = file.mode in ("P", "CMYK", "YCbCr")  # a palette, or others
            return np.asarray(file.convert("RGB") if has_colours else file)
    except (OSError, image.DecompressionBombError) as error:
        text = " ".join(str(error).split())
        raise GemscError(
            f"{path} cannot be read as a picture: {text}",
            help="write it again, a large one as TIFF",
        ) from None


class _Array:
    """A NumPy file, mapped into memory, or a picture that Pillow decodes as a whole."""

    pixel = None

    def __init__(self, path: Path, level: int) -> None:
        array = (_decoded if path.suffix.lower() in OF_PILLOW else _mapped)(path)
        if array.ndim not in (2, 3):
            raise GemscError(
                f"{path} has the shape {list(array.shape)}: not a picture",
                help="give height x width, or height x width x channels",
            )
        self._array = array if array.ndim == 3 else array[..., None]
        self.shape: Any = self._array.shape
        self.levels: Any = (self.shape[:2],)
        self.dtype = self._array.dtype
        check_level(path, level, self.levels)

    def read(self, rows: tuple[int, int], columns: tuple[int, int]) -> Picture:
        return np.array(self._array[slice(*rows), slice(*columns)])


class _Zarr:
    """A level of a plane in OME-Zarr."""

    def __init__(self, path: Path, level: int) -> None:
        self._image = image = OmeZarr(path, level)
        if len(image.space) == 3:
            raise GemscError(
                f"{path} has {image.levels[0][0]} planes: a volume, not a picture",
                help="write one plane of it as an image of its own",
            )
        self.shape: Any = image.shape
        self.levels: Any = image.levels
        self.dtype = image.dtype
        finest = OmeZarr(path).spacing * 1e3
        self.pixel: Any = tuple(finest.tolist()) if image.has_unit else None

    def read(self, rows: tuple[int, int], columns: tuple[int, int]) -> Picture:
        return self._image.read(slice(*rows), slice(*columns))


class _OpenSlide:
    """A level of what OpenSlide reads; where the scanner saw nothing, it is white."""

    def __init__(self, path: Path, level: int) -> None:
        openslide = needed("openslide", path.suffix, "slides")
        self._error = openslide.OpenSlideError
        try:
            self._file = openslide.OpenSlide(path)
        except self._error as error:
            raise GemscError(
                f"{path} is not a slide that OpenSlide can read: {error}",
                help="give the main file of its folder, or a TIFF file",
            ) from None
        self.levels: Any = tuple((h, w) for w, h in self._file.level_dimensions)
        check_level(path, level, self.levels)
        self.path, self._level = path, level
        self.shape: Any = (*self.levels[level], 3)
        self.dtype = np.dtype(np.uint8)
        notes = self._file.properties
        sizes = [float(notes.get(f"openslide.mpp-{axis}", 0)) for axis in "yx"]
        self.pixel: Any = tuple(sizes) if all(sizes) else None

    def read(self, rows: tuple[int, int], columns: tuple[int, int]) -> Picture:
        size = columns[1] - columns[0], rows[1] - rows[0]
        if not all(size):
            return np.zeros((size[1], size[0], 3), np.uint8)
        factor = self._file.level_downsamples[self._level]
        place = round(columns[0] * factor), round(rows[0] * factor)
        try:
            region = self._file.read_region(place, self._level, size)
        except self._error as error:
            raise GemscError(
                f"a part of {self.path} cannot be read: {error}", help="copy it again"
            ) from None
        seen = np.asarray(region)
        white = np.full_like(seen[..., :3], 255)
        return np.where(seen[..., 3:] > 0, seen[..., :3], white)


class _Tiff:
    """A level of a TIFF file, decoded tile by tile (a strip is a wide tile)."""

    def __init__(self, path: Path, level: int) -> None:
        tifffile = tifffile_module()
        self.path = path
        try:
            self._file = tifffile.TiffFile(path)
            levels = self._file.series[0].levels
        except (tifffile.TiffFileError, IndexError) as error:
            raise GemscError(
                f"{path} is not a readable TIFF file: {error}",
                help="give a TIFF file, or a .npy file",
            ) from None
        kinds = {series.axes for series in levels}
        if not kinds <= {"YX", "YXS"}:
            raise GemscError(
                f"{path} has the axes {', '.join(sorted(kinds))}: more than one "
                "picture, or its channels apart",
                help="write height x width x channels as one page: "
                "tifffile.imwrite(path, picture, photometric='rgb', tile=(512, 512))",
            )
        shapes = tuple(series.shape for series in levels)
        self.levels: Any = tuple(shape[:2] for shape in shapes)
        check_level(path, level, self.levels)
        self.pixel = _pixel_of(self._file)
        self._page = levels[level].keyframe
        self.shape: Any = (*shapes[level], 1)[:3]
        self.dtype = np.dtype(self._page.dtype)
        self._size = self._segment()
        self._decoded: OrderedDict[int, Picture] = OrderedDict()
        self._mapped: Picture | None = None
        if self._page.is_contiguous and self._page.is_memmappable:
            mapped = levels[level].asarray(out="memmap")
            self._mapped = mapped.reshape(self.shape)

    def _segment(self) -> tuple[int, int]:
        """Return the height and width of a tile or strip."""
        page, (height, width, channels) = self._page, self.shape
        size = (min(page.rowsperstrip or height, height), width)
        if page.is_tiled:
            size = (page.tilelength, page.tilewidth)
        elif size[0] * width * channels * self.dtype.itemsize > LARGEST_SEGMENT and (
            not page.is_memmappable
        ):
            raise GemscError(
                f"{self.path} is compressed in strips of {size[0]} x {width} pixels, "
                "which must be decoded as a whole",
                help="write it in tiles: tifffile.imwrite(..., tile=(512, 512))",
            )
        return size

    def read(self, rows: tuple[int, int], columns: tuple[int, int]) -> Picture:
        if self._mapped is not None:
            return np.array(self._mapped[slice(*rows), slice(*columns)])
        size = rows[1] - rows[0], columns[1] - columns[0]
        result = np.zeros((*size, self.shape[2]), self.dtype)
        for number, top, left in self._touched(rows, columns):
            segment = self._decode(number)
            bottom, right = top + segment.shape[0], left + segment.shape[1]
            first, last = max(top, rows[0]), min(bottom, rows[1])
            begin, end = max(left, columns[0]), min(right, columns[1])
            result[
                first - rows[0] : last - rows[0], begin - columns[0] : end - columns[0]
            ] = segment[first - top : last - top, begin - left : end - left]
        return result

    def _touched(
        self, rows: tuple[int, int], columns: tuple[int, int]
    ) -> Iterator[tuple[int, int, int]]:
        """Yield number, first row and first column of each segment with such pixels."""
        (height, width), across = self._size, -(-self.shape[1] // self._size[1])
        for row in range(rows[0] // height, -(-rows[1] // height)):
            for column in range(columns[0] // width, -(-columns[1] // width)):
                yield row * across + column, row * height, column * width

    def _decode(self, number: int) -> Picture:
        """Return a tile or strip, less what it has beyond the picture's edge."""
        tile = self._decoded.pop(number, None)
        if tile is None:
            page, file = self._page, self._file.filehandle
            start, count = page.dataoffsets[number], page.databytecounts[number]
            try:
                file.seek(start)
                data = file.read(count) if count else None
                options = {"jpegtables": page.jpegtables, "_fullsize": False}
                segment, _, shape = page.decode(data, number, **options)
            except Exception as error:
                raise self._refused(number, error) from error
            if segment is None:  # a tile that was left out
                segment = np.full(shape, page.nodata, self.dtype)
            tile = segment[0]
        self._decoded[number] = tile
        while len(self._decoded) > 1 and self._num_bytes() > CACHE_BYTES:
            self._decoded.popitem(last=False)
        return tile

    def _num_bytes(self) -> int:
        first = next(iter(self._decoded.values()))
        return first.nbytes * len(self._decoded)

    def _refused(self, number: int, error: Exception) -> GemscError:
        text = " ".join(str(error).split())
        if "imagecodecs" in text:
            how = self._page.compression.name
            return GemscError(
                f"{self.path} is compressed by {how}, which needs imagecodecs",
                help="pip install imagecodecs",
            )
        return GemscError(
            f"part {number} of {self.path} cannot be decoded: {text}",
            help="the file is damaged: copy or write it again",
        )
