"""Trained tensors go back into a copy of the file that they came from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from gemsc.errors import GemscError
from gemsc.importers.folder import WEIGHTS_FILE, Origin
from gemsc.importers.network import ImportedNetwork, read
from gemsc.importers.weight import Array, to_numpy
from gemsc.weights.source import WeightFiles

SHOWN = 5  # names in a note
Shapes = Mapping[str, tuple[int, ...]]


def write_back(
    folder: Path, path: Path, shapes: Shapes, trained: Callable[[str], Tensor]
) -> list[str]:
    """Write the file that was imported into a folder once more, with other numbers.

    `shapes` are those of the tensors that there are, by the names of model.py, and
    `trained` reads one of them. Returns notes about what stays as it was.

    Raises:
        GemscError: the folder or the tensors are not those of the import.
    """
    origin = Origin.read(folder)
    original = origin.original(folder)
    network = read(original, origin.options(folder))
    _check_same(network, folder, origin)
    _check_shapes(network, shapes, original)
    network.tensors.write_copy(path, _filler(network, shapes, trained))
    return [*_notes(network, shapes)]


def _check_same(network: ImportedNetwork, folder: Path, origin: Origin) -> None:
    """Make sure that the file is read as it was when it was imported."""
    known = WeightFiles.open(folder / WEIGHTS_FILE).table
    now = network.model.root.state_dict()
    if {name: entry.shape for name, entry in known.items()} != {
        name: tuple(tensor.shape) for name, tensor in now.items()
    }:
        raise GemscError(
            f"this gemsc reads {origin.file} differently from gemsc {origin.gemsc}, "
            f"which wrote {folder}",
            help=f"export with gemsc {origin.gemsc}, or import the file again",
        )


def _check_shapes(network: ImportedNetwork, shapes: Shapes, original: Path) -> None:
    state = network.model.root.state_dict()
    if not any(name in shapes for name in network.model.weights):
        raise GemscError(
            f"no tensor of this model has a name from the network in {original.name}",
            help="export weights of the model.py that was imported",
        )
    for name in network.model.weights:
        before = tuple(state[name].shape)
        if name in shapes and shapes[name] != before:
            raise GemscError(
                f"'{name}' has the shape {list(shapes[name])}, but {list(before)} in "
                f"{original.name}",
                help="export it as .onnx from PyTorch, or as .safetensors",
            )


def _notes(network: ImportedNetwork, shapes: Shapes) -> Iterator[str]:
    """Yield what a user should know of tensors on one side alone."""
    weights = network.model.weights
    filled = {s for name in weights if name in shapes for s in weights[name].sources}
    kept = [n for n, w in weights.items() if n not in shapes and {*w.sources} - filled]
    if kept:
        yield f"not in the model, so as it was in the file: {_named(kept)}"
    known = network.model.root.state_dict()
    if more := [name for name in shapes if name not in known]:
        yield f"not in the file, so left out: {_named(more)}"


def _named(names: Iterable[str]) -> str:
    names = list(names)
    dots = f", ... ({len(names)} tensors)" * (len(names) > SHOWN)
    return ", ".join(names[:SHOWN]) + dots


def _filler(
    network: ImportedNetwork, shapes: Shapes, trained: Callable[[str], Tensor]
) -> Callable[[str], Array | None]:
    """Return what gives a tensor of the file with the model's numbers in it."""
    tensors, weights = network.tensors, network.model.weights
    table = {name: facts.shape for name, facts in tensors.table.items()}
    uses: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for name, weight in weights.items():
        if name in shapes:
            for index, source in enumerate(weight.sources):
                uses[source].append((name, index))

    def changed(source: str) -> Array | None:
        if source not in uses:
            return None
        new = np.array(tensors.read(source), order="C")
        numbers, filled = new.reshape(-1), np.zeros(new.size, bool)
        for name, index in uses[source]:
            places = weights[name].places(table)[index].reshape(-1)
            inside = places >= 0
            values = to_numpy(trained(name), new.dtype).reshape(-1)[places[inside]]
            again = filled[inside]
            if numbers[inside][again].tobytes() != values[again].tobytes():
                raise GemscError(
                    f"'{name}' and '{uses[source][0][0]}' are one tensor in the file, "
                    f"{source!r:.80}, and differ in the model",
                    help="keep them equal in model.py, or export as .safetensors",
                )
            numbers[inside] = values
            filled |= inside
        return new

    return changed
