"""The weights that a user has: a file, or a folder as Hugging Face ships it.

model.safetensors                       one file
model.safetensors.index.json            which of the shards has which tensor
model-00001-of-00002.safetensors, ...
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gemsc.errors import GemscError
from gemsc.weights.write import DTYPES, Entry

MODEL = "model.safetensors"
INDEX = "*.safetensors.index.json"
OF_TORCH = (".pt", ".pth", ".bin")
INSIDE = ("state_dict", "model_state_dict", "model", "module")  # as training loops save
KINDS = (
    "give a .safetensors file, a folder of them (with its .index.json, if it has one), "
    "or a .pt file of a state_dict"
)


@dataclass(frozen=True)
class WeightFiles:
    """What is in a file or a folder; a tensor is read when it is asked for."""

    path: Path
    table: Mapping[str, Entry]
    _files: Mapping[str, Path] = field(default_factory=dict, repr=False)
    _tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @staticmethod
    def open(path: Path) -> WeightFiles:
        """Read the tables of all files that there are, and check that they are whole.

        Raises:
            GemscError: a file is missing, damaged, or not one of weights; an index
                names what is not there, or a file elsewhere.
        """
        if path.is_dir():
            return _of_folder(path)
        if not path.is_file():
            raise GemscError(f"there is no file or folder {path}", help=KINDS)
        if path.suffix in OF_TORCH:
            tensors = _of_torch(path)
            table = {name: Entry.of(tensor) for name, tensor in tensors.items()}
            return WeightFiles(path, table, _tensors=tensors)
        return _of_files(path, [path])

    def mapped(self, name: str) -> Tensor:
        """Return a tensor on the memory of its file: pages are read when it is used.

        To write to it changes a page of its own, not the file.
        """
        if name in self._tensors:
            return self._tensors[name]
        with safe_open(self._files[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def _of_folder(folder: Path) -> WeightFiles:
    indices = sorted(folder.glob(INDEX))
    if len(indices) > 1:
        names = " and ".join(path.name for path in indices[:2])
        raise GemscError(f"{folder} has {names}", help="leave one of them there")
    if indices:
        return _of_index(indices[0])
    if (folder / MODEL).is_file():
        return _of_files(folder, [folder / MODEL])
    shards = sorted(folder.glob("*.safetensors"))
    others = sorted(path for path in folder.iterdir() if path.suffix in OF_TORCH)
    if shards:
        return _of_files(folder, shards)
    if len(others) == 1:
        return WeightFiles.open(others[0])
    raise GemscError(f"{folder} holds no weights", help=KINDS)


def _of_index(index: Path) -> WeightFiles:
    try:
        entries = json.loads(index.read_bytes())["weight_map"]
        places = {str(name): Path(str(file)) for name, file in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(index, repr(error)) from None
    for name, place in places.items():
        if place.name != str(place) or place.suffix != ".safetensors":
            raise GemscError(
                f"{index}: '{name}' is in {str(place)!r}, which is no .safetensors "
                "file of this folder",
                help="put all files of the weights into one folder",
            )
    shards = [index.parent / place for place in dict.fromkeys(places.values())]
    for shard in shards:
        if not shard.is_file():
            raise GemscError(
                f"{shard} is missing: {index.name} names it",
                help="download it again, or copy all files of the weights",
            )
    found = _of_files(index.parent, shards)
    for name, place in places.items():
        if name not in found.table or found._files[name].name != str(place):
            raise _damaged(index, f"{place} has no '{name}'")
    return found


def _of_files(path: Path, files: Iterable[Path]) -> WeightFiles:
    table: dict[str, Entry] = {}
    places: dict[str, Path] = {}
    for file in files:
        for name, entry in _table(file).items():
            if name in places:
                raise GemscError(
                    f"'{name}' is in {places[name].name} and in {file.name} of {path}",
                    help="give the file that is meant",
                )
            table[name], places[name] = entry, file
    return WeightFiles(path, table, places)


def _table(path: Path) -> dict[str, Entry]:
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: Entry(DTYPES[stored.get_dtype()], tuple(stored.get_shape()))
                for name, stored in slices.items()
            }
    except KeyError as error:
        raise GemscError(
            f"{path} has tensors of type {error.args[0]}, which gemsc does not read",
            help="convert them to a type that the model has",
        ) from None
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from None


def _of_torch(path: Path) -> dict[str, Tensor]:
    """Map what `torch.save` wrote; nothing that is pickled in it is run."""
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, EOFError, RuntimeError, ValueError) as error:
        raise _damaged(path, str(error).split("\n")[0]) from None
    except pickle.UnpicklingError:
        raise GemscError(
            f"{path} holds more than tensors",
            help="save model.state_dict() alone, best as .safetensors",
        ) from None
    while isinstance(found, dict):
        inner = next((found[key] for key in INSIDE if key in found), None)
        if not isinstance(inner, dict):
            break
        found = inner
    if isinstance(found, dict) and all(
        isinstance(name, str) and isinstance(value, Tensor)
        for name, value in found.items()
    ):
        return {name: tensor.detach() for name, tensor in found.items()}
    raise GemscError(f"{path} is no state_dict", help=KINDS)


def _damaged(path: Path, why: str) -> GemscError:
    return GemscError(
        f"{path} is damaged: {why}", help="download it, or save it, once more"
    )
