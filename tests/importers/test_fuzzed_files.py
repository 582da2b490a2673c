"""Broken files of Keras and ONNX: refused in a sentence, or imported and working.

Nothing of them is run, and nothing is written but the folder.
"""

from __future__ import annotations

import importlib
import io
import json
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from fuzz_support import keras_file, onnx_file, problems, unzipped, zipped
from nightly import at_night

from gemsc.errors import GemscError
from gemsc.importers.folder import import_file
from gemsc.importers.network import ImportOptions

FILES = {".keras": ("h5py", keras_file), ".onnx": ("onnx", onnx_file)}
BY_DAY, BY_NIGHT = range(25), range(1000, 1150)


@pytest.mark.parametrize("seeds", [BY_DAY, *at_night(BY_NIGHT)], ids=len)
@pytest.mark.parametrize("kind", FILES)
def test_broken_files_are_refused_or_work(
    kind: str, seeds: range, tmp_path: Path
) -> None:
    needed, make = FILES[kind]
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    data = make()
    whole = tmp_path / f"whole{kind}"
    whole.write_bytes(data)
    import_file(whole, tmp_path / "whole", ImportOptions())
    assert not problems(kind, data, seeds, tmp_path)


# ---------------------------------------------------------- files that mean harm


def refused(path: Path) -> str:
    """Return why a file is refused; it leaves nothing."""
    before = sorted(path.parent.rglob("*"))
    with pytest.raises(GemscError) as caught:
        import_file(path, path.with_name("net"), ImportOptions())
    assert sorted(path.parent.rglob("*")) == before
    return str(caught.value)


def keras_with(path: Path, change: Callable[[dict[str, bytes]], object]) -> Path:
    pytest.importorskip("h5py")
    files = unzipped(keras_file())
    change(files)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(zipped(files))
    return path


def test_members_outside_of_an_archive_are_not_written(tmp_path: Path) -> None:
    path = keras_with(
        tmp_path / "in" / "x.keras",
        lambda files: files.update({"../../out": b"x", "/tmp/gemsc-out": b"x"}),
    )
    import_file(path, path.with_name("net"), ImportOptions())
    assert not (tmp_path / "out").exists()
    assert not (tmp_path.parent / "out").exists()
    assert not Path("/tmp/gemsc-out").exists()


def test_code_in_an_archive_is_not_run(tmp_path: Path) -> None:
    def lambda_in(files: dict[str, bytes]) -> None:
        config = json.loads(files["config.json"])
        layer = config["config"]["layers"][-1]
        code = {"class_name": "__lambda__", "config": {"code": "4wAAAAAAAAA="}}
        layer |= {"class_name": "Lambda", "config": {"name": "own", "function": code}}
        files["config.json"] = json.dumps(config).encode()

    assert "Lambda" in refused(keras_with(tmp_path / "x.keras", lambda_in))


@pytest.mark.parametrize("kind", ["link", "storage", "soft", "virtual"])
def test_weights_of_other_files_are_refused(kind: str, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    (tmp_path / "other").write_bytes(bytes(range(256)))
    place = "layers/dense/vars/1"

    def link(files: dict[str, bytes]) -> None:
        held = io.BytesIO(files["model.weights.h5"])
        with h5py.File(held, "r+") as file:
            del file[place]
            if kind == "link":
                file[place] = h5py.ExternalLink(tmp_path / "other", "/x")
            elif kind == "soft":
                file[place] = h5py.SoftLink("/layers/dense/vars/0")
            elif kind == "storage":
                stored = [(str(tmp_path / "other"), 0, 8)]
                file.create_dataset(place, (2,), "f4", external=stored)
            else:
                layout = h5py.VirtualLayout((2,), "f4")
                layout[:] = h5py.VirtualSource(str(tmp_path / "other"), "x", (2,))
                file.create_virtual_dataset(place, layout)
        files["model.weights.h5"] = held.getvalue()

    words = refused(keras_with(tmp_path / "in" / "x.keras", link))
    assert place in words


def test_an_archive_that_grows_beyond_belief_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("h5py")
    archives = importlib.import_module("gemsc.importers.keras.archive")
    monkeypatch.setattr(archives, "_FLOOR", 1 << 20)  # not 256 MiB
    monkeypatch.setattr(archives, "_MAX_EXPANSION", 100)
    path = tmp_path / "x.keras"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in unzipped(keras_file()).items():
            more = bytes(10 << 20) if name == "model.weights.h5" else b""
            archive.writestr(name, data + more)
    assert "stores" in refused(path)


@pytest.mark.parametrize(
    "place", ["/etc/hostname", "../secret", "a/../../secret", "no"]
)
def test_tensors_outside_of_the_folder_are_refused(place: str, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    (tmp_path / "secret").write_bytes(bytes(1000))
    path = tmp_path / "in" / "x.onnx"
    path.parent.mkdir()
    (path.parent / "a").mkdir()
    model = onnx.ModelProto.FromString(onnx_file())
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=place)
    path.write_bytes(model.SerializeToString())
    assert place in refused(path)


@pytest.mark.parametrize("kind", ["ConstantOfShape", "Range", "Expand", "Tile"])
def test_constants_larger_than_any_memory_are_refused(
    kind: str, tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    large = onnx.numpy_helper.from_array(np.array([2**38]), "large")
    one = onnx.numpy_helper.from_array(np.array([1.0], np.float32), "one")
    start = onnx.numpy_helper.from_array(np.array(0), "start")
    step = onnx.numpy_helper.from_array(np.array(1), "step")
    end = onnx.numpy_helper.from_array(np.array(2**38), "end")
    inputs = {
        "ConstantOfShape": ["large"],
        "Range": ["start", "end", "step"],
        "Expand": ["one", "large"],
        "Tile": ["one", "large"],
    }[kind]
    nodes = [
        helper.make_node(kind, inputs, ["many"]),
        helper.make_node("ReduceMax", ["many"], ["most"], keepdims=0),
        helper.make_node("Cast", ["most"], ["number"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Add", ["x", "number"], ["y"]),
    ]
    float32 = onnx.TensorProto.FLOAT
    x = helper.make_tensor_value_info("x", float32, [2, 3])
    y = helper.make_tensor_value_info("y", float32, [2, 3])
    tensors = [large, one, start, step, end]
    graph = helper.make_graph(nodes, "net", [x], [y], tensors)
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset).SerializeToString()
    assert not problems(".onnx", model, range(-1, 0), tmp_path)
    path = tmp_path / "x.onnx"
    path.write_bytes(model)
    assert refused(path)
