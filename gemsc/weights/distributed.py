"""Read and write what torch.distributed.checkpoint saves, without a process group.

    folder/.metadata         which tensors there are, and where each chunk of them is
    folder/__0_0_0.distcp     chunks, as torch.save writes them

A state is found by the names that the parts of a training have in most scripts:

    layers.0.weight                                  by itself, or within "model"
    optimizer.state.layers.0.weight.exp_avg          within "optimizer" or "optim"

To load it takes a second: import it where there is such a folder.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gemsc.base.elementwise import NUMBERS
from gemsc.base.files import DISTRIBUTED
from gemsc.errors import GemscError
from gemsc.weights.tensor_file import StoredSlice
from gemsc.weights.write import Entry

OF_MODEL = ("model", "model_state_dict", "state_dict", "module")
OF_OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict")
STATE = "state."
FILE_BYTES = 2**26


@dataclass(frozen=True)
class Lazy:
    """A tensor that is read when it is written."""

    entry: Entry
    read: Callable[[], Tensor]


def write_distributed(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a nested state into a new folder; a file's `Lazy`s at a time are in memory.

    Raises:
        OSError: it cannot be written.
    """
    reads: dict[int, Callable[[], Tensor]] = {}

    def blank(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: blank(inner) for key, inner in value.items()}
        if not isinstance(value, Lazy):
            return value
        entry = value.entry
        empty = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        reads[id(empty)] = value.read
        return empty

    with _alone():
        writer, planner = _Writer(folder), _SavePlanner(reads)
        save(blank(state), storage_writer=writer, planner=planner, no_dist=True)


class _Writer(FileSystemWriter):
    """Writes several files: it keeps what it has read until a file is closed."""

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(_files(plan.items)):
            prefix = f"{plan.storage_data.prefix}{number}_"
            place = replace(plan.storage_data, prefix=prefix)
            part = replace(plan, items=items, storage_data=place)
            results += super().write_data(part, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _files(items: Iterable[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield what goes into each file: some tensors, or one that is larger."""
    group: list[WriteItem] = []
    size = 0
    for item in items:
        if (about := item.tensor_data) is not None:
            item_size = about.properties.dtype.itemsize * about.size.numel()
            if group and size + item_size > FILE_BYTES:
                yield group
                group, size = [], 0
            size += item_size
        group.append(item)
    yield group


class _SavePlanner(DefaultSavePlanner):
    """Reads tensors when it is their turn."""

    def __init__(self, reads: Mapping[int, Callable[[], Tensor]]) -> None:
        super().__init__()
        self._reads = reads

    def lookup_object(self, index: Any) -> Any:
        value = super().lookup_object(index)
        read = self._reads.get(id(value))
        return value if read is None else read()


@dataclass
class DistributedCheckpoint:
    """A folder that FSDP, torchtitan or any torch.distributed.checkpoint.save wrote.

    It reads a whole tensor at a time, and keeps the last one.
    """

    path: Path
    _last: tuple[str, Tensor | None] = field(default=("", None), repr=False)

    @cached_property
    def table(self) -> dict[str, Entry]:
        """The tensors of the model."""
        table = {name: self._entry(key) for name, key in self._model.items()}
        if not table:
            raise GemscError(
                f"{self.path} holds no weights",
                help="save model.state_dict(), or a dict that contains it as 'model'",
            )
        return table

    @cached_property
    def states(self) -> dict[tuple[str, str], str]:
        """The key of each state of the optimizer, by its name and the parameter's.

        Raises:
            GemscError: it is under another name than the model's.
        """
        keys = {}
        for key, path in self._paths():
            at = next((i for i, part in enumerate(path) if part in OF_OPTIMIZER), None)
            tail = "" if at is None else ".".join(path[at + 1 :])
            if not tail.startswith(STATE):
                continue
            name, _, state = tail.removeprefix(STATE).rpartition(".")
            if name not in self.table:
                raise GemscError(
                    f"{self.path} has '{key}', a state of the optimizer, and no weight "
                    f"'{name}'",
                    help="save the result of torch's get_optimizer_state_dict(), or "
                    f"use only the weights: gemsc import PROGRAM {self.path}",
                )
            keys[state, name] = key
        return keys

    def is_like_its_parameter(self, state: str, name: str) -> bool:
        """Whether a state has an element for each of its parameter."""
        kind = self._metadata.state_dict_metadata[self.states[state, name]]
        shape = self.table[name].shape
        is_alike = isinstance(kind, TensorStorageMetadata) and (*kind.size,) == shape
        return is_alike and not (state in NUMBERS and shape == ())

    def read(self, name: str) -> Tensor:
        """Return a tensor of the model."""
        return self._tensor(self._model[name])

    def get_slice(self, key: str) -> StoredSlice:
        """Return a tensor to be read, as a safetensors file does.

        It is `optimizer/exp_avg/NAME`, or a name of the model.
        """
        kind, _, tail = key.partition("/")
        state, _, name = tail.partition("/")
        is_state = kind == "optimizer" and (state, name) in self.states
        stored = self.states[state, name] if is_state else self._model[key]
        return StoredSlice(self._entry(stored), lambda: self._tensor(stored))

    def values(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return what is stored under some keys: tensors, numbers, lists and the like.

        Raises:
            GemscError: it is more than that, or damaged.
        """
        wanted: dict[str, Any] = {}
        for key in keys:
            kind = self._metadata.state_dict_metadata[key]
            wanted[key] = None
            if isinstance(kind, TensorStorageMetadata):
                wanted[key] = torch.empty(kind.size, dtype=kind.properties.dtype)
        planner = _LoadPlanner()
        with self._damage_told(), _alone():
            load(wanted, storage_reader=self._reader, planner=planner, no_dist=True)
        return wanted | planner.objects

    @cached_property
    def _model(self) -> dict[str, str]:
        """The key of each tensor of the model."""
        alone, inside = {}, {}
        kinds = self._metadata.state_dict_metadata
        for key, path in self._paths():
            if not isinstance(kinds[key], TensorStorageMetadata):
                continue
            if len(path) == 1:
                alone[key] = key
            at = next((i for i, part in enumerate(path) if part in OF_MODEL), None)
            if at is not None and not {*path[:at]} & {*OF_OPTIMIZER}:
                inside[".".join(path[at + 1 :])] = key
        inside.pop("", None)
        return inside or alone

    def _paths(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the keys, and the names of what each one is in."""
        paths = self._metadata.planner_data or {}
        for key in self._metadata.state_dict_metadata:
            yield key, tuple(map(str, paths.get(key, (key,))))

    def _entry(self, key: str) -> Entry:
        kind = self._metadata.state_dict_metadata[key]
        assert isinstance(kind, TensorStorageMetadata)
        return Entry(kind.properties.dtype, tuple(kind.size))

    def _tensor(self, key: str) -> Tensor:
        name, tensor = self._last
        if name != key or tensor is None:
            self._last = "", None
            tensor = self.values([key])[key]
            assert isinstance(tensor, Tensor)
            self._last = key, tensor
        return tensor

    @property
    def _metadata(self) -> Metadata:
        return self._reader.content

    @cached_property
    def _reader(self) -> _Reader:
        with self._damage_told():
            reader = _Reader(self.path)
            assert isinstance(reader.content, Metadata)
        return reader

    @contextmanager
    def _damage_told(self) -> Iterator[None]:
        try:
            yield
        except GemscError:
            raise
        except Exception as error:  # what a damaged file lets unpickling do
            said = str(error).split("\n")[0][:200] or type(error).__name__
            raise GemscError(
                f"{self.path} is damaged: {said}",
                help="save it again with torch.distributed.checkpoint",
            ) from None


class _Reader(FileSystemReader):
    """Reads the metadata once, and makes nothing of it but what belongs there."""

    @cached_property
    def content(self) -> Metadata:
        with (Path(self.path) / DISTRIBUTED).open("rb") as file:
            content = _Unpickler(file).load()
        content.storage_meta = content.storage_meta or metadata.StorageMeta()
        return content  # type: ignore[no-any-return]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.content


class _Unpickler(pickle.Unpickler):
    """Makes what describes tensors; a pickle could call any function."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype
        )
        is_known = is_dtype or (module, name) in {
            *(("torch.distributed.checkpoint.metadata", kind) for kind in OF_METADATA),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
            ("collections", "OrderedDict"),
        }
        if not is_known:
            raise GemscError(
                f"the {DISTRIBUTED} of a checkpoint names {module}.{name}, which no "
                "checkpoint needs",
                help="if you trust it, load it with torch and save only its tensors",
            )
        return super().find_class(module, name)


OF_METADATA = (*metadata.__all__, "_MEM_FORMAT_ENCODING")


class _LoadPlanner(DefaultLoadPlanner):
    """Keeps what is not a tensor beside, and lets it run nothing."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.objects: dict[str, Any] = {}

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.objects[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


@contextmanager
def _alone() -> Iterator[None]:
    """Say nothing of a process group that is not there; raise what went wrong here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:  # of all ranks, and no Exception
            reason, _ = next(iter(error.failures.values()))
            raise reason from None
