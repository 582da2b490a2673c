"""A kind of file of the tests' own, .npz, and what reads it: no Keras, no ONNX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gemsc.base.files import replaced
from gemsc.importers.network import READERS, ImportedNetwork, ImportOptions
from gemsc.importers.sheet import Sheet
from gemsc.importers.weight import Array, FileTensor, Weight, same
from gemsc.user_model import UserModel

__all__ = ["NpzTensors", "filled", "read_npz", "take_npz", "write_npz"]


class NpzTensors:
    """The arrays of an .npz; `beside` are files that belong to it."""

    def __init__(self, path: Path, beside: tuple[str, ...] = ()) -> None:
        self.path, self.files = path, beside
        with np.load(path) as arrays:
            self.table: Mapping[str, FileTensor] = {
                name: FileTensor(array.shape, array.dtype)
                for name, array in arrays.items()
            }

    def read(self, name: str) -> Array:
        with np.load(self.path) as arrays:
            return arrays[name]

    def write_copy(self, path: Any, changed: Callable[[str], Array | None]) -> None:
        arrays = {}
        for name, facts in self.table.items():
            new = changed(name)
            if new is not None:
                assert (new.shape, new.dtype) == (facts.shape, facts.dtype)
            arrays[name] = self.read(name) if new is None else new
        with replaced(Path(path)) as beside, beside.open("wb") as file:
            np.savez(file, **arrays)


def write_npz(path: Path, seed: int = 0) -> dict[str, Array]:
    """Write the weights of the network of `read_npz`; return them."""
    rng = np.random.default_rng(seed)

    def numbers(*shape: int) -> Array:
        return rng.standard_normal(shape, dtype=np.float32)

    arrays = {
        "stem/kernel": numbers(3, 3, 2, 4),
        "stem/bias": numbers(4),
        "norm/gamma": numbers(4),
        "norm/mean": numbers(4),
        "norm/variance": np.abs(numbers(4)),
        "head/all": numbers(4, 4),  # three columns of the kernel, then the bias
        "scale": numbers(1),
        "optimizer/step": np.array(7),
    }
    with path.open("wb") as file:
        np.savez(file, **arrays)
    return arrays


def read_npz(path: Path, options: ImportOptions) -> ImportedNetwork:
    """Read a small network for images, channels last in the file."""
    beside = tuple(p.name for p in path.parent.glob(f"{path.stem}.npy"))
    tensors = NpzTensors(path, beside)
    sheet = Sheet("Small", f"{path.name}, a network of the tests.", path.name)
    shape = options.shapes.get("image", (options.batch, 2, 6, 6))
    x = sheet.input("image", shape, torch.float32)
    kernel = Weight(("stem/kernel",), lambda array: array.transpose(3, 2, 0, 1))
    with sheet.place("Conv 'stem'"):
        stem = sheet.layer(
            "stem",
            nn.Conv2d(2, 4, 3, padding=1),
            {"weight": kernel, "bias": same("stem/bias")},
        )
        y = sheet.line("stem", f"{stem}({x})")
    with sheet.place("Norm 'norm'"):
        weights = {
            "weight": same("norm/gamma"),
            "bias": Weight((), lambda: np.zeros(4, np.float32)),
            "running_mean": same("norm/mean"),
            "running_var": same("norm/variance"),
        }
        norm = sheet.layer("norm", nn.BatchNorm2d(4), weights, frozen=("bias",))
        y = sheet.line("norm", f"{norm}({y})")
    with sheet.place("Scale 'scale'"):
        scale = sheet.tensor("scale", (1,), same("scale"))
        y = sheet.line("scaled", f"{y}.relu().mean((2, 3)) * {scale}")
    with sheet.place("Dense 'head'"):
        parts = {
            "weight": Weight(("head/all",), lambda array: array[:, :3].T),
            "bias": Weight(("head/all",), lambda array: array[:3, 3]),
        }
        head = sheet.layer("head", nn.Linear(4, 3), parts)
        y = sheet.line("head", f"{head}({y})")
    sheet.returns(str(y))
    return ImportedNetwork([sheet], tensors, notes=["it is small"])


@pytest.fixture
def take_npz(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let .npz be a kind of file that gemsc imports."""
    monkeypatch.setitem(READERS, ".npz", (__name__, "read_npz", "numpy"))


def filled(user: UserModel) -> nn.Module:
    """Return the model of a file, with the weights that the file names."""
    model = user.make_unfilled()
    user.fill(model)
    return model
