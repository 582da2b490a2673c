"""A file of Keras or ONNX in the place of a model: it is imported first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from gemsc.base.nests import tensor_leaves
from gemsc.cli.terminal import say
from gemsc.errors import GemscError
from gemsc.importers.folder import import_once
from gemsc.importers.network import READERS, ImportedNetwork
from gemsc.importers.origin import MODEL_FILE
from gemsc.importers.write import counts

SHOWN = 5  # names in a line


def imported(model: str) -> str:
    """Return what a command loads: the model.py of what model.keras is imported to."""
    path = Path(model)
    if path.suffix not in READERS:
        refuse_older(path)
        return model
    folder, network = import_once(path)
    if network is None:
        say(f"{path} is in {folder} already")
    else:
        count = len(network.notes)
        notes = f": {count} note{'s' * (count != 1)} in its import.toml" * bool(count)
        say(f"imported {path} into {folder}{notes}")
    return str(folder / MODEL_FILE)


def refuse_older(path: Path) -> None:
    """Refuse what TensorFlow or an older Keras has written.

    Raises:
        GemscError: it is such a file or folder; it says how to save it anew.
    """
    again = 'keras.models.load_model("{}").save("model.keras")'
    if path.name.endswith(".weights.h5"):
        what = "has weights without layers"
        advice = f'in Keras: model.load_weights("{path}"); model.save("model.keras")'
    elif path.suffix in (".h5", ".hdf5"):
        what = "is of TensorFlow or an older Keras"
        advice = f"save it once with Keras 3: {again.format(path)}"
    elif (path / "saved_model.pb").exists():
        what = "is a SavedModel, which Keras 3 does not load as a model"
        advice = (
            f'with the TensorFlow that wrote it: tf.keras.models.load_model("{path}")'
            f'.save("model.h5"); then with Keras 3: {again.format("model.h5")}'
        )
    else:
        return
    raise GemscError(f"{path} {what}; gemsc reads .keras files", help=advice)


def described(network: ImportedNetwork) -> Iterator[str]:
    """Yield lines that say what was imported: tensors, inputs, outputs, notes."""
    root, sheet = network.model.root, network.model
    yield from counts(root)
    if frozen := [n for n, p in root.named_parameters() if not p.requires_grad]:
        more = ", ..." * (len(frozen) > SHOWN)
        yield f"not trained: {', '.join(frozen[:SHOWN])}{more}"
    for value in sheet.inputs:
        yield f"input {value}: {_shape(value.tensor)}"
    for keys, tensor in tensor_leaves(sheet.empty(sheet.result)):
        yield f"{' '.join(map(str, ('output', *keys)))}: {_shape(tensor)}"
    for note in network.notes:
        yield f"note: {note}"


def _shape(tensor: Tensor) -> str:
    sizes = "x".join(map(str, tensor.shape)) or "a number"
    dtype = "" if tensor.dtype is torch.float32 else f" {tensor.dtype}"
    return sizes + dtype.replace("torch.", "")
