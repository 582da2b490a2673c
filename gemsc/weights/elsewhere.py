"""What a program's own files lack of its weights, and where ranks find it.

Beside the stages' files stands `elsewhere.json`, if there is such a thing:

    {"files": "../../llama", "is_made": false,
     "stages": [["embedding.weight", "layers.0.norm.weight"], ["norm.weight"]],
     "tensors": {"norm.weight": {"names": ["norm.weight"], "dtype": "F32",
                                 "shape": [4096], "required": true}, ...}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from gemsc.base.files import ELSEWHERE, write_text
from gemsc.base.nests import all_named, reject_lazy, saved_named
from gemsc.errors import GemscError
from gemsc.weights.source import Wanted
from gemsc.weights.write import DTYPES, Entry, stored_name


@dataclass(frozen=True)
class Elsewhere:
    """The tensors of a model, and those among them that a program has not.

    tensors: all of the model, by their first names.
    absent: the first names of those that are not in the program's files.
    files: the file or folder in which ranks look for weights, "" if there is none.
    is_made: whether ranks make what is absent, with the model file's `init(module)`.
    stages: the names of what is absent of each stage, in a program.
    """

    tensors: Mapping[str, Wanted]
    absent: frozenset[str]
    files: str = ""
    is_made: bool = False
    stages: Sequence[Sequence[str]] = ()

    @staticmethod
    def of(model: nn.Module) -> Elsewhere:
        """Return what is on the meta device: no file of a program can have that.

        Raises:
            GemscError: something has no shape yet.
        """
        reject_lazy(model)
        tensors = {want.names[0]: want for want in wanted_of(model)}
        named = dict(all_named(model))
        return Elsewhere(tensors, frozenset(n for n in tensors if named[n].is_meta))

    @property
    def bytes(self) -> int:
        """How many bytes all tensors of the model take."""
        return sum(want.entry.bytes for want in self.tensors.values())

    def in_files(self, place: Path) -> Elsewhere:
        """Return that a file or folder has all that is in a state_dict."""
        required = frozenset(n for n, want in self.tensors.items() if want.required)
        return replace(self, absent=required, files=os.path.abspath(place))

    def now_in(self, place: Path) -> Elsewhere:
        """Return that ranks look there for what is absent, and read it."""
        return replace(self, files=os.path.abspath(place), is_made=False)

    def kept(self, names: Iterable[str]) -> list[str]:
        """Return those of some names that a program's own files have."""
        return [name for name in names if name not in self.absent]

    def write(
        self, folder: Path, owned: Sequence[Sequence[str]], program: Path
    ) -> None:
        """Write it beside the files of stages that own these tensors.

        `program` is the folder from which the user's files will be seen.
        """
        known = {
            name: {
                "names": want.names,
                "dtype": stored_name(name, want.entry.dtype),
                "shape": want.entry.shape,
                "required": want.required,
            }
            for name, want in self.tensors.items()
        }
        saved = {
            "files": self.files and os.path.relpath(self.files, program),
            "is_made": self.is_made,
            "stages": [[n for n in names if n in self.absent] for names in owned],
            "tensors": known,
        }
        write_text(folder / ELSEWHERE, json.dumps(saved, indent=1))

    @staticmethod
    def read(folder: Path) -> Elsewhere | None:
        """Read it, if it is there; `folder` is in that of the program.

        Raises:
            GemscError: it is damaged.
        """
        path = folder / ELSEWHERE
        try:
            saved = json.loads(path.read_bytes())
            tensors = {name: _wanted(entry) for name, entry in saved["tensors"].items()}
            stages = [[str(name) for name in names] for names in saved["stages"]]
            files, is_made = str(saved["files"]), bool(saved["is_made"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise GemscError(
                f"{path} is damaged: {error!r}", help="compile again to rewrite it"
            ) from None
        if files:
            files = os.path.normpath(folder.parent / files)
        absent = frozenset(name for names in stages for name in names)
        return Elsewhere(tensors, absent, files, is_made, stages)


def _wanted(saved: Mapping[str, object]) -> Wanted:
    names, shape = saved["names"], saved["shape"]
    assert isinstance(names, list)
    assert isinstance(shape, list)
    entry = Entry(DTYPES[str(saved["dtype"])], tuple(map(int, shape)))
    return Wanted(tuple(map(str, names)), entry, bool(saved["required"]))


def wanted_of(model: nn.Module) -> Iterator[Wanted]:
    """Yield what a model's state_dict has, and buffers that are not in it."""
    state = saved_named(model)
    names: dict[int, list[str]] = {}
    for name, tensor in all_named(model):
        names.setdefault(id(tensor), []).append(name)
    for name, tensor in dict(all_named(model)).items():
        if (aliases := names[id(tensor)])[0] == name:
            required = any(alias in state for alias in aliases)
            yield Wanted(tuple(aliases), Entry.of(tensor), required)
