"""Small files of Keras and ONNX that are broken in many ways, and who reads them.

They are made without Keras. Each is read in a process of its own kind, with a limit of
its memory: what crashes, or takes all of it, is found as an exception is.
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from import_support import filled

from gemsc.errors import GemscError
from gemsc.importers.folder import import_file
from gemsc.importers.network import ImportOptions
from gemsc.user_model import load_user_model

__all__ = ["keras_file", "mutated", "onnx_file", "problems", "unzipped", "zipped"]

MEMORY = 3 << 30  # bytes beyond what the process has
SECONDS = 60  # of processor time for one file
LARGEST_RUN = 1 << 20  # numbers of example inputs that are computed with
FORBIDDEN = (
    *("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"),
    *("pickle.find_class", "socket.connect"),
)
NUMBERS = (0, -1, 1, 2, 7, 2**31 - 1, 2**31, -(2**63), 2**62, 10**6)
VALUES = (
    *NUMBERS,
    *(None, True, False, 0.5, 1e308, float("nan"), "", "x", "../../etc/passwd"),
    *(
        "Lambda",
        "float16",
        "same",
        "\0",
        '"""; import os',
        [],
        [[]],
        {},
        [None],
        [2**40],
    ),
    {"class_name": "Lambda", "config": {"function": "cGlja2xl"}},
)


def keras_file() -> bytes:
    """Return an archive of Embedding, Conv1D, BatchNormalization, LSTM and Dense."""
    import h5py  # only these tests need it

    def tensor(name: str) -> dict[str, Any]:
        history = {
            "shape": [None, 6],
            "dtype": "float32",
            "keras_history": [name, 0, 0],
        }
        return {"class_name": "__keras_tensor__", "config": history}

    layers: list[dict[str, Any]] = [
        {
            "class_name": "InputLayer",
            "name": "ids",
            "config": {"batch_shape": [None, 6], "dtype": "int32", "name": "ids"},
            "inbound_nodes": [],
        }
    ]

    def add(kind: str, name: str, **config: Any) -> None:
        before = layers[-1]["name"]
        node = {"args": [tensor(before)], "kwargs": {}}
        entry = {"class_name": kind, "name": name, "module": "keras.layers"}
        settings = {"name": name, "trainable": True, "dtype": "float32", **config}
        layers.append({**entry, "config": settings, "inbound_nodes": [node]})

    add("Embedding", "embedding", input_dim=9, output_dim=4, mask_zero=False)
    conv = {"filters": 4, "kernel_size": [3], "strides": [2], "padding": "same"}
    add(
        *("Conv1D", "conv1d"),
        **conv,
        data_format="channels_last",
        dilation_rate=[1],
        groups=1,
        activation="relu",
        use_bias=True,
    )
    add(
        *("BatchNormalization", "batch_normalization"),
        axis=-1,
        momentum=0.99,
        epsilon=0.001,
        center=True,
        scale=True,
    )
    add(
        *("LSTM", "lstm"),
        units=3,
        activation="tanh",
        recurrent_activation="sigmoid",
        use_bias=True,
        return_sequences=False,
        return_state=False,
        go_backwards=False,
        stateful=False,
        dropout=0.0,
        recurrent_dropout=0.0,
    )
    add("Dense", "dense", units=2, activation="softmax", use_bias=True)
    ends = {"input_layers": ["ids", 0, 0], "output_layers": ["dense", 0, 0]}
    config = {"name": "net", "trainable": True, "layers": layers, **ends}
    rng = np.random.default_rng(0)
    weights = io.BytesIO()
    with h5py.File(weights, "w") as file:
        for name, shapes in {
            "embedding": [(9, 4)],
            "conv1d": [(3, 4, 4), (4,)],
            "batch_normalization": [(4,)] * 4,
            "lstm/cell": [(4, 12), (3, 12), (12,)],
            "dense": [(3, 2), (2,)],
        }.items():
            for index, shape in enumerate(shapes):
                place = f"layers/{name}/vars/{index}"
                file[place] = rng.random(shape, dtype=np.float32)
    loss = {"loss": "sparse_categorical_crossentropy", "optimizer": {}}
    kind = {"class_name": "Functional", "module": "keras.src.models.functional"}
    model = {**kind, "config": config, "compile_config": loss}
    return zipped(
        {
            "metadata.json": json.dumps({"keras_version": "3.13.0"}).encode(),
            "config.json": json.dumps(model).encode(),
            "model.weights.h5": weights.getvalue(),
        }
    )


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


def unzipped(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def onnx_file() -> bytes:
    """Return a graph with a convolution, a BatchNormalization and a matrix."""
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    shapes = {"w": (4, 2, 3, 3), "b": (4,), "head.weight": (3, 36), "head.bias": (3,)}
    shapes |= {f"norm.{name}": (4,) for name in ("weight", "bias", "mean", "var")}
    tensors = [
        numpy_helper.from_array(rng.random(shape, np.float32), name)
        for name, shape in shapes.items()
    ]
    tensors.append(numpy_helper.from_array(np.array([0, -1]), "sizes"))
    norm = [f"norm.{name}" for name in ("weight", "bias", "mean", "var")]
    window = {"kernel_shape": [2, 2], "strides": [2, 2]}
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", *norm], ["n"], epsilon=1e-4),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], **window),
        helper.make_node("Reshape", ["p", "sizes"], ["f"]),
        helper.make_node("Gemm", ["f", "head.weight", "head.bias"], ["g"], transB=1),
        helper.make_node("Softmax", ["g"], ["y"], axis=-1),
    ]
    kind = TensorProto.FLOAT
    x = helper.make_tensor_value_info("x", kind, ["batch", 2, 6, 6])
    y = helper.make_tensor_value_info("y", kind, ["batch", 3])
    graph = helper.make_graph(nodes, "net", [x], [y], tensors)
    opset = [helper.make_opsetid("", 17)]
    data: bytes = helper.make_model(graph, opset_imports=opset).SerializeToString()
    return data


# -------------------------------------------------------------------- mutations


def mutated(kind: str, data: bytes, seed: int) -> bytes:
    """Return the file with a few bytes changed, cut off, or fields of other values.

    A negative seed leaves it as it is.
    """
    if seed < 0:
        return data
    rng = random.Random(seed)
    ways: list[Callable[[bytes, random.Random], bytes]] = [flipped, cut, spliced]
    ways += [keras_fields, keras_fields, keras_weights] * (kind == ".keras")
    ways += [onnx_fields] * 3 * (kind == ".onnx")
    return rng.choice(ways)(data, rng)


def flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 2, 8, 64])):
        changed[rng.randrange(len(data))] = rng.choice([0, 255, rng.randrange(256)])
    return bytes(changed)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def spliced(data: bytes, rng: random.Random) -> bytes:
    start, size = rng.randrange(len(data)), rng.choice([1, 3, 40, 400])
    return data[:start] + rng.randbytes(rng.choice([0, size])) + data[start + size :]


def keras_weights(data: bytes, rng: random.Random) -> bytes:
    files = unzipped(data)
    change = rng.choice([flipped, cut, spliced])
    files["model.weights.h5"] = change(files["model.weights.h5"], rng)
    return zipped(files)


def keras_fields(data: bytes, rng: random.Random) -> bytes:
    files = unzipped(data)
    config = json.loads(files["config.json"])
    for _ in range(rng.choice([1, 1, 2, 4])):
        places = list(_json_places(config))
        holder, key = rng.choice(places)
        if rng.random() < 0.2:
            del holder[key]
        elif rng.random() < 0.2:
            holder[key] = json.loads(json.dumps(rng.choice(places)[0]))
        else:
            holder[key] = rng.choice(VALUES)
    files["config.json"] = json.dumps(config).encode()
    if rng.random() < 0.1:
        files["../outside"] = b"written outside"
    return zipped(files)


def _json_places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _json_places(value[key])


def onnx_fields(data: bytes, rng: random.Random) -> bytes:
    import onnx

    model = onnx.ModelProto.FromString(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        message, field = rng.choice(list(_fields(model)))
        try:
            _change(message, field, rng)
        except (ValueError, TypeError):
            continue  # the value is none of this field
    changed: bytes = model.SerializeToString()
    return changed


def _fields(message: Any) -> Iterator[tuple[Any, Any]]:
    for field, value in message.ListFields():
        yield message, field
        if field.type != field.TYPE_MESSAGE:
            continue
        for inner in value if _is_repeated(value) else [value]:
            yield from _fields(inner)


def _is_repeated(value: Any) -> bool:
    return hasattr(value, "append")


def _change(message: Any, field: Any, rng: random.Random) -> None:
    value = getattr(message, field.name)
    if _is_repeated(value):
        index = rng.randrange(len(value))
        if field.type == field.TYPE_MESSAGE or rng.random() < 0.3:
            if rng.random() < 0.5:
                del value[index]
            else:
                value.append(value[index])
        else:
            value[index] = _other(value[index], rng)
    elif field.type == field.TYPE_MESSAGE:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _other(value, rng))


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, int):
        return rng.choice(NUMBERS)
    if isinstance(value, float):
        return rng.choice([0.0, -1.0, 1e38, float("nan"), float("inf")])
    if isinstance(value, str):
        words = ["", "x", "w", "Loop", "If", "../../etc/passwd", "com.evil", "Reshape"]
        return rng.choice(words)
    return flipped(value, rng) if value else b"x"


# ----------------------------------------------------------------------- reading


def problems(kind: str, data: bytes, seeds: range, folder: Path) -> list[str]:
    """Return what went wrong with any of the files that these seeds make of one."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_read_all, args=(kind, data, seeds, folder, sender)
    )
    process.start()
    sender.close()
    wrong, last = [], "none"
    while True:
        try:
            last, problem = receiver.recv()
        except EOFError:
            break
        if problem:
            wrong.append(f"{kind} {last}: {problem}")
    process.join()
    if process.exitcode:
        wrong.append(f"{kind} after {last}: exit code {process.exitcode}")
    return wrong


def _read_all(
    kind: str, data: bytes, seeds: range, folder: Path, sender: Connection
) -> None:
    torch.set_num_threads(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.addaudithook(_Watch(folder))
    for seed in seeds:
        used = int(sum(os.times()[:2]))
        resource.setrlimit(
            resource.RLIMIT_CPU, (used + SECONDS, resource.RLIM_INFINITY)
        )
        path = folder / f"file{seed}{kind}"
        path.write_bytes(mutated(kind, data, seed))
        sender.send((seed, _problem(path)))
        path.unlink()


class _Watch:
    """Raises where something is run, or written outside of a folder."""

    def __init__(self, folder: Path) -> None:
        self.inside = str(folder)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in FORBIDDEN:
            raise AssertionError(f"{event} {arguments}")
        if event == "open" and isinstance(arguments[0], str):
            path, mode, _ = arguments
            writes = isinstance(mode, str) and set(mode) & set("wax+")
            if writes and not path.startswith((self.inside, "/tmp", "/dev/null")):
                raise AssertionError(f"{path} is written")


def _problem(path: Path) -> str:
    """Return what went wrong with a file; "" if it is refused, or works."""
    net = path.with_name(f"net{path.name}".replace(".", "_"))
    try:
        import_file(path, net, ImportOptions())
    except GemscError as error:
        return "" if error.message else "an error without a message"
    except BaseException:
        return traceback.format_exc()
    try:
        user = load_user_model(str(net / "model.py"))
        model, inputs = filled(user), user.make_inputs()
        if sum(tensor.numel() for tensor in inputs) <= LARGEST_RUN:
            with torch.no_grad():
                model(*inputs)
    except BaseException:
        return f"what it was imported to fails: {traceback.format_exc()}"
    return ""
