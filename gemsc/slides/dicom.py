"""A folder of DICOM slices as one volume, with its place in space.

Slices are ordered by where they lie, not by their names or numbers. What is not one
regular stack (two series, a slice that is missing) is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemsc.errors import GemscError
from gemsc.slides import needed

RELATIVE = 0.05  # of the distance of two slices: by how much they may lie elsewhere
NEEDED = (
    "ImagePositionPatient",
    "ImageOrientationPatient",
    "PixelSpacing",
    "Rows",
    "SamplesPerPixel",
)
SAME = ("ImageOrientationPatient", "PixelSpacing", "Rows", "Columns")


def read_headers(folder: Path) -> tuple[list[Path], tuple[int, ...], NDArray[Any]]:
    """Return the files in their order, the shape and the affine of the volume.

    The axes are those of ITK and MONAI: columns, rows, slices. The affine leads to
    millimetres to the right, to the front and upwards, as NIfTI has it.

    Raises:
        GemscError: the folder holds no regular stack of slices.
    """
    pydicom = needed("pydicom", "DICOM", "volumes")
    found: list[tuple[Path, Any]] = []
    for path in sorted(folder.iterdir()):
        try:
            header = pydicom.dcmread(path, stop_before_pixels=True)
        except (pydicom.errors.InvalidDicomError, OSError, EOFError):
            continue  # a DICOMDIR's neighbour, a readme
        if all(name in header for name in NEEDED) and header.SamplesPerPixel == 1:
            found.append((path, header))
    if not found:
        raise _refused(folder, "holds no grey DICOM slices that say where they lie")
    series = {str(header.get("SeriesInstanceUID")) for _, header in found}
    if len(series) > 1:
        raise _refused(
            folder, f"holds {len(series)} series: {', '.join(sorted(series))}"
        )
    first = found[0][1]
    for path, header in found:
        for name in SAME:
            mine, theirs = (np.asarray(each[name].value) for each in (header, first))
            if not np.allclose(mine, theirs, atol=1e-4):
                raise _refused(
                    folder,
                    f"has slices of unlike {name}: {path.name}, {found[0][0].name}",
                )
    across, down = np.asarray(first.ImageOrientationPatient, float).reshape(2, 3)
    normal = np.cross(across, down)
    where = np.array([header.ImagePositionPatient for _, header in found], float)
    order = np.argsort(where @ normal)
    where, count = where[order], len(found)
    thickness = float(first.get("SliceThickness") or 1)
    step = (where[-1] - where[0]) / (count - 1) if count > 1 else normal * thickness
    regular = where[0] + np.arange(count)[:, None] * step
    if np.abs(where - regular).max() > RELATIVE * np.linalg.norm(step):
        gaps = np.linalg.norm(np.diff(where, axis=0), axis=1)
        raise _refused(
            folder, f"has slices {gaps.min():.4g} to {gaps.max():.4g} mm apart"
        )
    height, width = map(float, first.PixelSpacing)
    affine = np.eye(4)
    affine[:3] = np.stack([across * width, down * height, step, where[0]], axis=1)
    affine[:2] *= -1  # DICOM counts to the left and to the back
    shape = int(first.Columns), int(first.Rows), count
    return [found[number][0] for number in order], shape, affine


def read_voxels(files: list[Path]) -> NDArray[np.float32]:
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


def _refused(folder: Path, why: str) -> GemscError:
    return GemscError(
        f"{folder} {why}",
        help="give a folder with the slices of one regular volume, one in each file",
    )
