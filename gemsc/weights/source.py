"""The weights that a user has, and which of them belongs where in a model.

They are a file, or a folder as Hugging Face ships it:

model.safetensors                       one file
model.safetensors.index.json            which of the shards has which tensor
model-00001-of-00002.safetensors, ...

or as torch.distributed.checkpoint does: a folder of .metadata and .distcp files
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from gemsc.base.dtypes import dtype_name
from gemsc.base.files import DISTRIBUTED
from gemsc.base.units import show_some
from gemsc.errors import GemscError
from gemsc.weights.tensor_file import TensorFile
from gemsc.weights.write import Entry

if TYPE_CHECKING:
    from gemsc.weights.distributed import DistributedCheckpoint

MODEL = "model.safetensors"
INDEX = "*.safetensors.index.json"
OF_TORCH = (".pt", ".pth", ".bin")
INSIDE = ("state_dict", "model_state_dict", "model", "module")  # as training loops save
KINDS = (
    "give a .safetensors file, a folder of them (with its .index.json, if it has one), "
    "a .pt file of a state_dict, or a folder of torch.distributed.checkpoint"
)


@dataclass(frozen=True)
class WeightFiles:
    """What is in a file or a folder; a tensor is read when it is asked for.

    `mapped` gives one on the memory of its file: pages are read when it is used. To
    write to it changes a page of its own, not the file. Of a checkpoint of
    torch.distributed it is read, into memory of its own.
    """

    path: Path
    table: Mapping[str, Entry]
    mapped: Callable[[str], Tensor] = field(repr=False)

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
            return WeightFiles(path, table, tensors.__getitem__)
        return _of_files(path, [_opened(path)])


def open_distributed(folder: Path) -> DistributedCheckpoint:
    """Open a folder that torch.distributed.checkpoint has written."""
    from gemsc.weights.distributed import DistributedCheckpoint  # loads for a second

    return DistributedCheckpoint(folder)


def _of_folder(folder: Path) -> WeightFiles:
    if (folder / DISTRIBUTED).is_file():
        checkpoint = open_distributed(folder)
        return WeightFiles(folder, checkpoint.table, checkpoint.read)
    if (folder / "manifest.json").is_file():
        raise GemscError(
            f"{folder} is a checkpoint of a program",
            help=f"import what `gemsc export {folder} -o {MODEL}` writes",
        )
    indices = sorted(folder.glob(INDEX))
    if len(indices) > 1:
        names = " and ".join(path.name for path in indices[:2])
        raise GemscError(f"{folder} has {names}", help="keep only one of them there")
    if indices:
        return _of_index(indices[0])
    if (folder / MODEL).is_file():
        return _of_files(folder, [_opened(folder / MODEL)])
    shards = sorted(folder.glob("*.safetensors"))
    others = sorted(path for path in folder.iterdir() if path.suffix in OF_TORCH)
    if shards:
        return _of_files(folder, map(_opened, shards))
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
                f"{index}: '{name}' is in {str(place)!r}, which is not a .safetensors "
                "file in this folder",
                help="put all files of the weights into one folder",
            )
    shards = [index.parent / place for place in dict.fromkeys(places.values())]
    for shard in shards:
        if not shard.is_file():
            raise GemscError(
                f"{shard} is missing, but {index.name} names it",
                help="download it again, or copy all files of the weights",
            )
    files = [*map(_opened, shards)]
    weights = _of_files(index.parent, files)
    held = {name: file.path.name for file in files for name in file.table}
    for name, place in places.items():
        if held.get(name) != str(place):
            raise _damaged(index, f"{place} has no '{name}'")
    return weights


def _of_files(path: Path, files: Iterable[TensorFile]) -> WeightFiles:
    held: dict[str, TensorFile] = {}
    for file in files:
        for name in file.table:
            if name in held:
                first, second = held[name].path.name, file.path.name
                raise GemscError(
                    f"'{name}' is in {first} and in {second} of {path}",
                    help="give the file that you mean",
                )
            held[name] = file
    table = {name: file.table[name] for name, file in held.items()}
    return WeightFiles(path, table, lambda name: held[name].mapped(name))


def _opened(path: Path) -> TensorFile:
    try:
        return TensorFile.open(path)
    except KeyError as error:
        raise GemscError(
            f"{path} has tensors of type {error.args[0]}, which gemsc does not read",
            help="convert them to a type of the model",
        ) from None
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from None


def _of_torch(path: Path) -> dict[str, Tensor]:
    """Map what `torch.save` wrote; nothing that is pickled in it is run."""
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, EOFError, RuntimeError, ValueError) as error:
        raise _damaged(path, str(error).split("\n")[0]) from None
    except pickle.UnpicklingError:
        raise GemscError(
            f"{path} contains more than tensors",
            help="save only model.state_dict(), preferably as .safetensors",
        ) from None
    while isinstance(state, dict):
        inner = next((state[key] for key in INSIDE if key in state), None)
        if not isinstance(inner, dict):
            break
        state = inner
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise GemscError(f"{path} is not a state_dict", help=KINDS)
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise GemscError(
            f"{path} is not a state_dict of tensors alone: it has {show_some(others)}",
            help="save {n: t for n, t in model.state_dict().items() if "
            "isinstance(t, torch.Tensor)}, and let the model's file set what is no "
            "tensor (get_extra_state())",
        )
    return {name: tensor.detach() for name, tensor in state.items()}


def _damaged(path: Path, why: str) -> GemscError:
    return GemscError(f"{path} is damaged: {why}", help="download it or save it again")


SHOWN = 3  # names in a message
LINE = 400  # names above which none is looked for that is alike


@dataclass(frozen=True)
class Wanted:
    """A tensor of a model, by all its names: a tied one has several.

    One that is not `required` is taken where the files have it.
    """

    names: tuple[str, ...]
    entry: Entry
    required: bool = True


def matched(files: WeightFiles, wanted: Sequence[Wanted]) -> dict[str, str]:
    """Return under which name the files have each tensor that is wanted.

    The keys are first names. Tied tensors may be there under several.

    Raises:
        GemscError: a name is missing, or there are others; a shape is another, or a
            dtype of another kind; tensors that are one in the model differ.
    """
    stored = {}
    for want in wanted:
        names = [name for name in want.names if name in files.table]
        if names:
            stored[want.names[0]] = names[0]
        for other in names[1:]:
            _check_tied(files, names[0], other)
    known = {name for want in wanted for name in want.names}
    missing = [e.names[0] for e in wanted if e.required and e.names[0] not in stored]
    extra = [name for name in files.table if name not in known]
    if missing or extra:
        raise _other_names(files, known, missing, extra)
    for want in wanted:
        if want.names[0] in stored:
            _check(files, stored[want.names[0]], want.entry)
    return stored


def conversions(files: WeightFiles, wanted: Iterable[Wanted]) -> list[str]:
    """Return what is said of dtypes: `12 tensors: bfloat16 in FILES, float32 here`."""
    counts: dict[tuple[str, str], int] = {}
    for want in wanted:
        for name in want.names[:1]:
            if name in files.table and files.table[name].dtype != want.entry.dtype:
                pair = dtype_name(files.table[name].dtype), dtype_name(want.entry.dtype)
                counts[pair] = counts.get(pair, 0) + 1
    return [
        f"{count} tensor{'s' * (count > 1)} of {files.path} converted from {a} to {b}"
        for (a, b), count in counts.items()
    ]


def _check(files: WeightFiles, name: str, entry: Entry) -> None:
    have = files.table[name]
    if have.shape != entry.shape:
        raise GemscError(
            f"{files.path}: '{name}' has shape {list(have.shape)}, but the model needs "
            f"{list(entry.shape)}",
            help="use weights of this model, build it with these sizes, or compile a "
            "model() that loads what fits",
        )
    kinds = [(e.dtype.is_floating_point, e.dtype.is_complex) for e in (have, entry)]
    if kinds[0] != kinds[1]:
        raise GemscError(
            f"{files.path}: '{name}' is {dtype_name(have.dtype)}, but the model needs "
            f"{dtype_name(entry.dtype)}",
            help="use weights of this model; convert quantized ones first",
        )


def _check_tied(files: WeightFiles, name: str, other: str) -> None:
    same = files.table[name] == files.table[other]
    if not same or not torch.equal(files.mapped(name), files.mapped(other)):
        raise GemscError(
            f"{files.path}: '{name}' and '{other}' differ, but are one in the model",
            help="use weights of this model, or leave one of the two out of the file",
        )


def _other_names(
    files: WeightFiles, known: Iterable[str], missing: list[str], extra: list[str]
) -> GemscError:
    problems = []
    if missing:
        problems.append(f"has no {_list(missing)}")
    if extra:
        problems.append(f"has {_list(extra)}, which the model does not have")
    help = "use weights of this model, or let model() load what fits of them itself"
    if prefix := _prefix(missing, files.table):
        help = f"its names begin with '{prefix}': save the module inside, or rename"
    elif prefix := _prefix(extra, dict.fromkeys(known)):
        help = f"its names lack '{prefix}': save the model around it, or rename"
    elif missing and len(extra) <= LINE:
        if close := get_close_matches(missing[0], extra, n=1):
            help = f"is '{close[0]}' meant? Rename it there, or in the model"
    elif extra:
        help = "save the model's state_dict() without it"
    return GemscError(f"{files.path} {' and '.join(problems)}", help=help)


def _prefix(names: Sequence[str], others: Mapping[str, object]) -> str:
    """Return what stands before each of some names in others: `module.`."""
    if not names:
        return ""
    ends = [other for other in others if other.endswith(f".{names[0]}")]
    for prefix in (end.removesuffix(names[0]) for end in ends):
        if all(prefix + name in others for name in names):
            return prefix
    return ""


def _list(names: Sequence[str]) -> str:
    return show_some([f"'{name}'" for name in names], SHOWN)
