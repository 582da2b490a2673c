"""A volume on disk, with its place: NIfTI, DICOM or OME-Zarr in, NIfTI out.

volume = Volume("case.nii.gz", orientation="RAS")
volume.read()                                   # x, y, z, channels: float32
volume.write("mask.nii.gz", mask)               # lies over case.nii.gz
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemsc.errors import GemscError
from gemsc.slides import needed
from gemsc.slides.ome_zarr import OmeZarr, check_level, is_zarr

SUFFIXES = (".nii", ".nii.gz")
RELATIVE = 0.05  # of the distance of two slices: by how much they may lie elsewhere
SAME = ("ImageOrientationPatient", "PixelSpacing", "Rows", "Columns")
NEEDED = ("ImagePositionPatient", "SamplesPerPixel", *SAME[:3])  # of a DICOM slice
OTHERS = {"bool": "uint8", "float16": "float32"}  # types that NIfTI does not have


def is_volume(path: Path) -> bool:
    """Whether it is a volume: NIfTI by its name, a folder of DICOM, deep OME-Zarr.

    Raises:
        GemscError: OME-Zarr cannot be read.
    """
    if is_zarr(path):
        return len(OmeZarr(path).space) == 3
    return path.name.endswith(SUFFIXES) or path.is_dir()


class _Voxels:
    """Voxels that are read when they are asked for."""

    dtype = np.dtype(np.float32)

    def __init__(self, read: Callable[[], Any], shape: tuple[int, ...]) -> None:
        self.read, self.shape, self.ndim = read, shape, len(shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self.read(), dtype or self.dtype)


def _of_dicom(folder: Path, nibabel: Any) -> Any:
    """Return a folder of slices as an image of nibabel."""
    files, shape, affine = _read_headers(folder)
    image = nibabel.Nifti1Image(_Voxels(partial(_read_voxels, files), shape), affine)
    image.header.set_xyzt_units("mm")
    image.set_sform(affine, code=1)  # of the scanner
    image.set_qform(affine, code=1)
    return image


def _of_zarr(folder: Path, nibabel: Any, level: int) -> Any:
    """Return an image in OME-Zarr as one of nibabel."""
    zarr = OmeZarr(folder, level)
    is_long = max(zarr.shape) >= 2**15  # more than a header of NIfTI-1 can say
    opened = nibabel.Nifti2Image if is_long else nibabel.Nifti1Image
    image = opened(_Voxels(zarr.read, zarr.shape), zarr.affine)
    image.header.set_xyzt_units("mm" if zarr.has_unit else "unknown")
    return image


class Volume:
    """A volume on disk. `shape` is that of its first three axes, and `channels`.

    With an `orientation`, such as "RAS", its axes are turned that way for the model,
    and what is written is turned back. With a `spacing`, the sizes of a voxel along
    these axes, mostly in mm, it is resampled for the model, and back.
    """

    def __init__(
        self,
        path: str | Path,
        orientation: str | None = None,
        level: int = 0,
        spacing: Sequence[float] | None = None,
    ) -> None:
        """Read what the file says of itself; of OME-Zarr, a level of its pyramid.

        Raises:
            GemscError: it is no file of numbers in space, or has no such level.
        """
        self.path = Path(path)
        self._nibabel = nibabel = needed("nibabel", "NIfTI", "volumes")
        if not self.path.exists():
            raise GemscError(f"there is no file {self.path}", help="give a NIfTI file")
        try:
            self._image = self._opened(level)
            shape = self._image.shape
            kind = self._image.get_data_dtype().kind
        except (nibabel.filebasedimages.ImageFileError, OSError, ValueError) as error:
            raise GemscError(
                f"{self.path} is not a readable NIfTI file: {error}",
                help="give a .nii or .nii.gz file, or a folder of DICOM slices",
            ) from None
        if len(shape) == 5 and shape[3] == 1:  # vectors: no time, and channels
            shape = (*shape[:3], shape[4])
        if len(shape) not in (3, 4) or kind not in "iuf":
            raise GemscError(
                f"{self.path} has the shape {list(self._image.shape)} and the type "
                f"{self._image.get_data_dtype()}: not a volume of numbers",
                help="give x, y, z, or x, y, z and channels",
            )
        self._stored = (*shape, 1)[:4]
        self._turn, self._back = self._turns(orientation)
        self.shape: tuple[int, ...] = shape[:3]
        if self._turn is not None:
            pairs = sorted(zip(self._turn[:, 0], shape, strict=False))
            self.shape = tuple(size for _, size in pairs)
        self.channels: int = self._stored[3]
        self._there: list[NDArray[Any]] = []  # places of what is read
        self._home: list[NDArray[Any]] = []  # places of what is written
        if spacing is not None:
            self._resample(spacing)

    def _opened(self, level: int) -> Any:
        if is_zarr(self.path):
            return _of_zarr(self.path, self._nibabel, level)
        is_folder, nibabel = self.path.is_dir(), self._nibabel
        image = _of_dicom(self.path, nibabel) if is_folder else nibabel.load(self.path)
        check_level(self.path, level, (image.shape,))
        return image

    def _turns(self, orientation: str | None) -> tuple[Any, Any]:
        """Return how axes are turned for the model, and back; None as they are."""
        if orientation is None:
            return None, None
        axes = self._nibabel.orientations
        try:
            wanted = axes.axcodes2ornt(orientation.upper())
        except ValueError:
            wanted = np.zeros((0, 2))
        if len(wanted) != 3 or {*wanted[:, 0]} != {0, 1, 2}:
            raise GemscError(
                f"unknown orientation {orientation!r}",
                help="give three letters, of L or R, P or A, I or S: RAS, LPS, ...",
            )
        stored = axes.io_orientation(self._image.affine)
        if np.isnan(stored).any():
            raise GemscError(
                f"{self.path} does not say how its axes lie in space",
                help="leave out --orientation if the model was trained on such files",
            )
        return axes.ornt_transform(stored, wanted), axes.ornt_transform(wanted, stored)

    def _resample(self, spacing: Sequence[float]) -> None:
        """Find the places of the voxels for the model, and of the file's in them."""
        sizes = self._nibabel.affines.voxel_sizes(self._image.affine)
        if self._turn is not None:
            sizes = sizes[np.argsort(self._turn[:, 0])]
        if len(spacing) != 3 or not all(0 < n < np.inf for n in (*spacing, *sizes)):
            raise GemscError(
                f"voxels of {' x '.join(f'{n:.4g}' for n in sizes)} cannot be "
                f"resampled to {' x '.join(f'{n:.4g}' for n in spacing)}",
                help="give three lengths above 0, as for MONAI's Spacingd",
            )
        old = [*zip(self.shape, sizes, spacing, strict=True)]
        self.shape = tuple(count_voxels(n, a, b) for n, a, b in old)
        new = zip(self.shape, sizes, spacing, strict=True)
        self._there = [steps_of(n, a, b) for n, a, b in new]
        self._home = [steps_of(n, b, a) for n, a, b in old]

    def __str__(self) -> str:
        """Return how its voxels lie: `60 x 48 x 20 voxels of 1 x 1 x 2.5 mm, RAS`."""
        header = self._image.header
        sizes = " x ".join(f"{size:.4g}" for size in header.get_zooms()[:3])
        unit = header.get_xyzt_units()[0].replace("unknown", "")
        codes = self._nibabel.aff2axcodes(self._image.affine)
        shape = " x ".join(map(str, self._stored[:3]))
        axes = "".join(code or "?" for code in codes)
        taken = f", as {' x '.join(map(str, self.shape))}" if self._there else ""
        return f"{shape} voxels of {sizes} {unit}".rstrip() + f", {axes}{taken}"

    def read(self) -> NDArray[np.float32]:
        """Return all of it, with channels: float32, as the file scales its numbers.

        It is turned and resampled as the model wants it.

        Raises:
            GemscError: the file is damaged.
        """
        try:
            data = np.asarray(self._image.dataobj, np.float32).reshape(self._stored)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise GemscError(
                f"{self.path} cannot be read: {error}", help="copy it again"
            ) from None
        if self._turn is not None:
            data = self._nibabel.apply_orientation(data, self._turn)
        return np.ascontiguousarray(at_places(data, self._there))

    def write(self, path: Path, data: NDArray[Any]) -> None:
        """Write numbers for each voxel, and channels, to lie where this volume lies.

        They are resampled and turned back.

        Raises:
            GemscError: NIfTI has no such numbers.
        """
        image = self._image
        data = at_places(data, self._home)
        if self._back is not None:
            data = self._nibabel.apply_orientation(data, self._back)
        data = data.astype(OTHERS.get(data.dtype.name, data.dtype))
        header = image.header.copy()
        header.set_intent("none")
        header.set_slope_inter(1, 0)
        header["cal_min"] = header["cal_max"] = 0  # of other numbers
        header["descrip"] = b"gemsc"
        header.extensions.clear()
        try:
            header.set_data_dtype(data.dtype)
        except self._nibabel.spatialimages.HeaderDataError as error:
            raise GemscError(
                f"NIfTI has no numbers of this type: {error}",
                help="return another dtype from predict_output: uint8, float32, ...",
            ) from None
        self._nibabel.save(type(image)(data, image.affine, header), path)


def count_voxels(count: int, old: float, new: float) -> int:
    """Return how many voxels of size `new` replace `count` of size `old`."""
    return int(np.round((count - 1) * old / new + 1))


def steps_of(count: int, old: float, new: float) -> NDArray[Any]:
    """Return where `count` voxels of size `new` lie, counted in those of size `old`."""
    return np.arange(count) * (new / old)


def at_places(data: NDArray[Any], places: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return numbers at these places of the first axes; the edge goes on outside.

    Along an axis of 4 voxels of 1.5 mm, those of 1 mm, as MONAI's `Spacing` makes them:
    the first one stays, the last one is within half of its size.

        o-----o-----o-----o
        o---o---o---o---o-      at 0, 1, 2, 3, 4 mm

    Integers and truth values are those of the nearest voxel, others are interpolated
    linearly.
    """
    is_label = data.dtype.kind in "iub"
    for axis, place in enumerate(places):
        last = data.shape[axis] - 1
        place = place.clip(0, last)
        if is_label:
            data = data.take(np.rint(place).astype(int), axis)
            continue
        low = np.floor(place).astype(int)
        shape = [-1 if n == axis else 1 for n in range(data.ndim)]
        share = (place - low).astype(data.dtype).reshape(shape)
        high = data.take(np.minimum(low + 1, last), axis)
        data = data.take(low, axis) * (1 - share) + high * share
    return data


# DICOM


def _read_headers(folder: Path) -> tuple[list[Path], tuple[int, ...], NDArray[Any]]:
    """Return the slices in their order, the shape and the affine of the volume.

    They are ordered by where they lie, not by their names or numbers. What is not one
    regular stack (two series, a slice that is missing) is refused.

    The axes are those of ITK and MONAI: columns, rows, slices. The affine leads to
    millimetres to the right, to the front and upwards, as NIfTI has it.

    Raises:
        GemscError: the folder holds no regular stack of slices.
    """
    pydicom = needed("pydicom", "DICOM", "volumes")
    slices: list[tuple[Path, Any]] = []
    for path in sorted(folder.iterdir()):
        try:
            header = pydicom.dcmread(path, stop_before_pixels=True)
        except (pydicom.errors.InvalidDicomError, OSError, EOFError):
            continue  # a DICOMDIR's neighbour, a readme
        if all(name in header for name in NEEDED) and header.SamplesPerPixel == 1:
            slices.append((path, header))
    if not slices:
        raise _no_stack(folder, "holds no grey DICOM slices that say where they lie")
    series = {str(header.get("SeriesInstanceUID")) for _, header in slices}
    if len(series) > 1:
        raise _no_stack(
            folder, f"holds {len(series)} series: {', '.join(sorted(series))}"
        )
    first = slices[0][1]
    for path, header in slices:
        for name in SAME:
            mine, theirs = (np.asarray(h[name].value) for h in (header, first))
            if not np.allclose(mine, theirs, atol=1e-4):
                raise _no_stack(
                    folder,
                    f"has slices of unlike {name}: {path.name}, {slices[0][0].name}",
                )
    across, down = np.asarray(first.ImageOrientationPatient, float).reshape(2, 3)
    normal = np.cross(across, down)
    where = np.array([header.ImagePositionPatient for _, header in slices], float)
    order = np.argsort(where @ normal)
    where, count = where[order], len(slices)
    thickness = float(first.get("SliceThickness") or 1)
    step = (where[-1] - where[0]) / (count - 1) if count > 1 else normal * thickness
    regular = where[0] + np.arange(count)[:, None] * step
    if np.abs(where - regular).max() > RELATIVE * np.linalg.norm(step):
        gaps = np.linalg.norm(np.diff(where, axis=0), axis=1)
        raise _no_stack(
            folder, f"has slices {gaps.min():.4g} to {gaps.max():.4g} mm apart"
        )
    height, width = map(float, first.PixelSpacing)
    affine = np.eye(4)
    affine[:3] = np.stack([across * width, down * height, step, where[0]], axis=1)
    affine[:2] *= -1  # DICOM counts to the left and to the back
    shape = int(first.Columns), int(first.Rows), count
    return [slices[number][0] for number in order], shape, affine


def _read_voxels(files: list[Path]) -> NDArray[np.float32]:
    """Return the numbers of the slices, scaled as each says: Hounsfield units of a CT.

    Raises:
        GemscError: a slice cannot be decoded.
    """
    pydicom = needed("pydicom", "DICOM", "volumes")
    slices = []
    for path in files:
        try:
            read = pydicom.dcmread(path)
            pixels = np.asarray(read.pixel_array, np.float32)
        except (AttributeError, RuntimeError, ValueError, NotImplementedError) as error:
            raise GemscError(
                f"{path} cannot be decoded: {error}",
                help="pip install pylibjpeg pylibjpeg-libjpeg pylibjpeg-openjpeg, or "
                "turn the folder into NIfTI with dcm2niix",
            ) from None
        slope, intercept = (
            float(read.get(f"Rescale{name}", usual))
            for name, usual in (("Slope", 1), ("Intercept", 0))
        )
        slices.append((pixels * np.float32(slope) + np.float32(intercept)).T)
    return np.stack(slices, axis=-1)


def _no_stack(folder: Path, why: str) -> GemscError:
    return GemscError(
        f"{folder} {why}",
        help="give a folder with the slices of one regular volume, one in each file",
    )
