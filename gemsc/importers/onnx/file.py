"""The tensors of an ONNX file, read one at a time, and copies with new numbers in them.

A tensor is an initializer or the value of a Constant node, inside the file or, as in
every model of more than 2 GB, in another file beside it.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from gemsc.base.files import replaced
from gemsc.errors import GemscError
from gemsc.importers.onnx.operators.node import DAMAGED
from gemsc.importers.onnx.operators.parameters import number_type
from gemsc.importers.onnx.ties import part
from gemsc.importers.onnx.trained import all_graphs, trained_names
from gemsc.importers.weight import Array, FileTensor

ALIGNED = 4096  # bytes; from there programs may map a tensor into their memory


def load_model(path: Path) -> onnx.ModelProto:
    """Return the file without the tensors that are in files beside it.

    Raises:
        GemscError: it is no ONNX file.
    """
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as why:  # protobuf's, which have no types
        raise GemscError(
            f"{path} is not an ONNX file, or is truncated", help=DAMAGED
        ) from why
    if not model.graph.node:
        raise GemscError(f"{path} has no graph with nodes", help=DAMAGED)
    return model


class OnnxTensors:
    """The tensors of a file by their names; see `FileTensors`."""

    def __init__(self, path: Path, model: onnx.ModelProto) -> None:
        """Look at what there is; `model` is the file as `load_model` gives it.

        Its initializers are parted there as `part` says: `ties`.

        Raises:
            GemscError: a tensor is in no file beside it, or a file is too short.
        """
        self.path = path
        self._look_at(model.graph)
        for name, known in self.table.items():
            if _is_outside(self._tensors[name]):
                self._span(name, self._tensors[name], known.dtype)
        trained = trained_names(model.graph, self.table, self.read)
        self.ties = part(model.graph, trained.all | trained.statistics, self.read)
        self._look_at(model.graph)

    def _look_at(self, graph: onnx.GraphProto) -> None:
        self._tensors: dict[str, onnx.TensorProto] = {}
        for name, tensor in _tensors(graph):
            self._tensors.setdefault(name, tensor)
        self.table: Mapping[str, FileTensor] = {
            name: FileTensor(tuple(tensor.dims), kind)
            for name, tensor in self._tensors.items()
            if (kind := number_type(tensor.data_type)) is not None
        }

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files beside it that hold tensors."""
        names = {_location(t): None for t in self._tensors.values() if _is_outside(t)}
        return tuple(names)

    def read(self, name: str) -> Array:
        """Return a tensor.

        Raises:
            GemscError: the file is damaged.
        """
        return self.array(name, self._tensors[name])

    def array(self, name: str, tensor: onnx.TensorProto) -> Array:
        """Return the numbers of a tensor, which may be an attribute of a node.

        Raises:
            GemscError: it has other sizes than it says.
        """
        kind = number_type(tensor.data_type)
        if kind is None or any(size < 0 for size in tensor.dims):
            raise GemscError(
                f"{self.path}: tensor {name!r} has no numbers", help=DAMAGED
            )
        try:
            if _is_outside(tensor):
                return self._outside(name, tensor, kind)
            return np.asarray(numpy_helper.to_array(tensor))
        except (ValueError, TypeError, OSError, OverflowError) as why:
            raise self._damaged(name, why) from why

    def _damaged(self, name: str, why: object) -> GemscError:
        reason = str(why).split("\n")[0]
        return GemscError(
            f"{self.path}: tensor {name!r} cannot be read: {reason}", help=DAMAGED
        )

    def _outside(
        self, name: str, tensor: onnx.TensorProto, kind: np.dtype[Any]
    ) -> Array:
        path, start, length = self._span(name, tensor, kind)
        with path.open("rb") as file:
            file.seek(start)
            array = np.fromfile(file, kind.newbyteorder("<"), length // kind.itemsize)
        return array.astype(kind, copy=False).reshape(tuple(tensor.dims))

    def _span(
        self, name: str, tensor: onnx.TensorProto, kind: np.dtype[Any]
    ) -> tuple[Path, int, int]:
        """Return where the bytes are: file, start and length."""
        folder = self.path.parent.resolve()
        location = _location(tensor)
        path = (folder / location).resolve()
        if (
            not location
            or PurePosixPath(location).is_absolute()
            or folder not in path.parents
        ):
            raise self._damaged(name, f"it is outside of the file's folder: {location}")
        if not path.is_file():
            error = self._damaged(name, f"there is no file {location} beside it")
            error.help = f"copy {location} into {self.path.parent}, too"
            raise error
        said = _external(tensor)
        size = math.prod(tensor.dims) * kind.itemsize
        start, length = int(said.get("offset", 0)), int(said.get("length", size))
        if start < 0 or length != size or start + size > path.stat().st_size:
            raise self._damaged(name, f"{location} has not its {size} bytes")
        return path, start, length

    # --------------------------------------------------------------------- copies

    def write_copy(self, path: Path, changed: Callable[[str], Array | None]) -> None:
        """Write the file once more, with new numbers in some of its tensors.

        All else stays as it is, but for parameters that `ties` has parted. What lies
        in files beside it is copied to files beside the copy, copy.onnx.data.

        Raises:
            GemscError: the file is damaged.
        """
        model = load_model(self.path)
        tensors = OnnxTensors(self.path, model)._tensors
        beside = self._copy_files(path, tensors)
        for name in self.table:
            array = changed(name)
            if array is None:
                continue
            tensor = tensors[name]
            if _is_outside(tensor):
                kind = self.table[name].dtype
                with beside[_location(self._tensors[name])].open("r+b") as file:
                    file.seek(int(_external(tensor).get("offset", 0)))
                    np.ascontiguousarray(array, kind.newbyteorder("<")).tofile(file)
            else:
                _fill(tensor, array)
        with replaced(path) as temporary:
            temporary.write_bytes(model.SerializeToString())

    def _copy_files(
        self, path: Path, tensors: Mapping[str, onnx.TensorProto]
    ) -> dict[str, Path]:
        """Copy the files beside it, and name the copies in `tensors`.

        They are called as the copy is: no file of another model is written over. A
        tensor whose bytes are another one's, too, has its own at the end.
        """
        copies: dict[str, Path] = {}
        seen: set[tuple[Path, int]] = set()
        for name, tensor in tensors.items():
            if name not in self.table or not _is_outside(tensor):
                continue
            location, kind = _location(tensor), self.table[name].dtype
            source, start, size = self._span(name, tensor, kind)
            if location not in copies:
                number = f".{len(copies) + 1}" if copies else ""
                copies[location] = path.with_name(f"{path.name}{number}.data")
                with replaced(copies[location]) as beside:
                    shutil.copyfile(source, beside)
            said = _external(tensor) | {"location": copies[location].name}
            if size and (source, start) in seen:
                said["offset"] = str(_append(copies[location], start, size))
            seen.add((source, start))
            del tensor.external_data[:]
            for key, value in said.items():
                tensor.external_data.add(key=key, value=value)
        return copies


def _append(path: Path, start: int, size: int) -> int:
    """Copy some bytes of a file to its end; return where they are now."""
    with path.open("r+b") as file:
        file.seek(start)
        data = file.read(size)
        end = file.seek(0, 2)
        end = file.seek(end + -end % ALIGNED)
        file.write(data)
    return end


def _tensors(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Give the tensors of a graph and of those within it."""
    for inner in all_graphs(graph):
        for tensor in inner.initializer:
            yield tensor.name, tensor
        for node in inner.node:
            for attribute in node.attribute:
                if node.op_type == "Constant" and attribute.name == "value":
                    yield node.output[0], attribute.t


def _is_outside(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def _external(tensor: onnx.TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _location(tensor: onnx.TensorProto) -> str:
    return _external(tensor).get("location", "")


def _fill(tensor: onnx.TensorProto, array: Array) -> None:
    """Put numbers into a tensor, in that field of the format where it has them."""
    new = numpy_helper.from_array(np.asarray(array, order="C"), tensor.name)
    if new.data_type != tensor.data_type or list(new.dims) != list(tensor.dims):
        raise ValueError(f"'{tensor.name}' is not {array.dtype} {array.shape}")
    if tensor.HasField("raw_data"):
        tensor.raw_data = new.raw_data
        return
    names = onnx.TensorProto.DataType
    flat = array.reshape(-1)
    if tensor.data_type == names.Value("FLOAT"):
        tensor.float_data[:] = flat.tolist()
    elif tensor.data_type == names.Value("DOUBLE"):
        tensor.double_data[:] = flat.tolist()
    elif tensor.data_type in (names.Value("FLOAT16"), names.Value("BFLOAT16")):
        tensor.int32_data[:] = flat.view(np.uint16).tolist()
    else:
        tensor.CopyFrom(new)
