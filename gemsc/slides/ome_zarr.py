"""An image in OME-Zarr, 0.4 or 0.5, a slide or a volume, of which parts are read.

Axes in space stay in the order of the file, which is z, y, x; channels come behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemsc.errors import GemscError
from gemsc.slides import needed

MARKS = ("zarr.json", ".zgroup", ".zarray")  # of any zarr, the first one of version 3
MILLIMETRES = {
    "angstrom": 1e-7,
    "nanometer": 1e-6,
    "micrometer": 1e-3,
    "millimeter": 1.0,
    "centimeter": 10.0,
    "meter": 1e3,
}


def is_zarr(path: Path) -> bool:
    """Whether it is a folder of zarr, by its name or by what it holds."""
    marks = (path / name for name in MARKS)
    return path.is_dir() and (path.suffix == ".zarr" or any(m.exists() for m in marks))


def check_level(path: Path, level: int, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Refuse a level that a pyramid of these sizes does not have.

    Raises:
        GemscError: there is none of this number.
    """
    if not 0 <= level < len(shapes):
        sizes = (" x ".join(map(str, shape)) for shape in shapes)
        text = ", ".join(f"{number}: {size}" for number, size in enumerate(sizes))
        raise GemscError(f"{path} has no level {level}", help=f"it has {text}")


class OmeZarr:
    """One level of an image; nothing but its metadata is held.

    `space` are the letters of its axes: "zyx", or "yx" of a single plane. `levels` are
    the sizes of all levels along them, `shape` that of this one with its channels.
    `spacing` is the size of a voxel, and `affine` leads from indices along them to x, y
    and z: in millimetres if the file says units (`has_unit`).
    """

    def __init__(self, path: Path, level: int = 0) -> None:
        """Open a level; 0 is the finest.

        Raises:
            GemscError: it is no such image, has times or other axes, or no such level;
                or zarr is not installed.
        """
        self.path = path
        group = _group(path)
        notes = dict(group.attrs)
        notes = notes.get("ome", notes)  # since 0.5
        if "multiscales" not in notes:
            raise GemscError(
                f"{path} has no multiscales: it is not an OME-Zarr image",
                help=f"give the folder of one image, such as {path / '0'}",
            )
        try:
            self._describe(group, notes["multiscales"][0], level)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise GemscError(
                f"the multiscales of {path} cannot be read: {error!r}",
                help="write them as OME-Zarr 0.4 or 0.5 says",
            ) from None

    def _describe(self, group: Any, about: dict[str, Any], level: int) -> None:
        axes, datasets = about["axes"], about["datasets"]
        self._names = names = [axis["name"] for axis in axes]
        arrays = [group[dataset["path"]] for dataset in datasets]
        sizes = [dict(zip(names, array.shape, strict=True)) for array in arrays]
        if not {"y", "x"} <= {*names} <= {*"tczyx"} or sizes[0].get("t", 1) != 1:
            text = ", ".join(f"{name} ({sizes[0][name]})" for name in names)
            raise GemscError(
                f"{self.path} has the axes {text}",
                help="give an image of z, y and x, or y and x, at one time t; c are "
                "channels",
            )
        is_deep = sizes[0].get("z", 1) > 1
        self.space = "".join(n for n in names if n in "zyx") if is_deep else "yx"
        self.levels = tuple(tuple(size[n] for n in self.space) for size in sizes)
        check_level(self.path, level, self.levels)
        self._array = arrays[level]
        self.shape = (*self.levels[level], sizes[level].get("c", 1))
        self.dtype = np.dtype(self._array.dtype)
        if self.dtype.kind not in "iufb":
            raise ValueError(f"values of the type {self.dtype}")
        where = [names.index(name) for name in self.space]
        units = [MILLIMETRES.get(axes[number].get("unit"), 0) for number in where]
        self.has_unit = all(units)
        scale, shift = _transformed(len(names), datasets[level], about)
        factor = units if self.has_unit else 1.0
        self.spacing = scale[where] * factor
        self.affine = np.eye(4)
        rows = ["xyz".index(name) for name in self.space]
        self.affine[:, : len(rows)] = np.eye(4)[:, rows] * self.spacing
        self.affine[rows, 3] = shift[where] * factor

    def read(self, *parts: slice) -> NDArray[Any]:
        """Return a part, or all of it; only the chunks in which it lies are decoded.

        Raises:
            GemscError: it cannot be decoded.
        """
        kept = dict(zip(self.space, parts or [slice(None)] * 3, strict=False))
        kept |= {"c": slice(None)} if "c" in self._names else {}
        try:
            array = np.asarray(self._array[tuple(kept.get(n, 0) for n in self._names)])
        except Exception as error:
            raise GemscError(
                f"{self.path / self._array.path} cannot be read: {error}",
                help="copy it again, unless one of its codecs is missing here",
            ) from error
        left = [name for name in self._names if name in kept]
        array = array.transpose([left.index(name) for name in kept])
        return array if "c" in kept else array[..., None]


def _transformed(
    num_axes: int, *steps: dict[str, Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return what all transformations make of indices: a scale, and then a shift."""
    scale, shift = np.ones(num_axes), np.zeros(num_axes)
    for step in steps:
        for transform in step.get("coordinateTransformations", ()):
            kind = transform["type"]
            if kind == "translation":
                shift = shift + np.array(transform[kind], float)
            elif kind != "identity":  # anything else has no "scale"
                factor = np.array(transform["scale"], float)
                scale, shift = scale * factor, shift * factor
    if not (np.isfinite(shift).all() and (scale > 0).all() and (scale < np.inf).all()):
        raise ValueError(f"scale {scale.tolist()}, translation {shift.tolist()}")
    return scale, shift


def _group(path: Path) -> Any:
    zarr = needed("zarr", "OME-Zarr", "zarr")
    try:
        return zarr.open_group(path, mode="r")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GemscError(
            f"{path} is not readable OME-Zarr: {error}",
            help="give the folder of an image, with .zgroup or zarr.json in it",
        ) from None
