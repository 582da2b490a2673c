"""Archives of Keras: where the variables are, the way back, and what is refused."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras_support import h5py, imported, keras

from gemsc.errors import GemscError
from gemsc.importers.keras.archive import Archive
from gemsc.importers.network import ImportOptions, read

L = keras.layers


def many() -> list[Any]:
    """Return models whose weights have names of every kind."""
    image = L.Input((8, 8, 3))
    inner = keras.Sequential([L.Conv2D(3, 1, name="b"), L.Conv2D(3, 1, name="a")])
    deep = keras.Model(image, keras.Sequential([inner, L.PReLU()])(L.Dense(3)(image)))
    x = L.Conv2D(3, 1, name="conv2d_1")(deep(L.ReLU()(deep(image))))
    x = keras.ops.add(L.Add()([x, L.Conv2D(3, 1, name="conv2d")(x)]), 1.0)
    x = L.BatchNormalization()(L.LayerNormalization()(L.Conv2DTranspose(3, 1)(x)))
    branched = keras.Model(image, x)
    rows = [L.Input((6, 4)), L.LSTM(3, return_sequences=True), L.Dropout(0.5)]
    rows += [L.Bidirectional(L.GRU(2, return_sequences=True)), L.SimpleRNN(3)]
    words = L.Input((5, 4))
    query = L.MultiHeadAttention(2, 3)(words, words)
    steps = L.TimeDistributed(keras.Sequential([L.Dense(3), L.Dense(2)]))(query)
    return [deep, branched, keras.Sequential(rows), keras.Model(words, steps)]


@pytest.mark.parametrize("number", range(4))
def test_each_variable_of_an_archive_has_its_place(tmp_path, number):
    """Layers are counted by class; names of layers only look like those places."""
    model = many()[number]
    for index, variable in enumerate(model.variables):
        if "float" in variable.dtype:
            variable.assign(np.full(variable.shape, 0.01 * index, "float32"))
    network, net = imported(model, tmp_path)
    used = {name for w in network.model.weights.values() for name in w.sources}
    table = network.tensors.table
    assert used == {n for n, tensor in table.items() if tensor.dtype.kind == "f"}
    maxima = sorted({round(float(t.max()), 6) for t in net.state_dict().values()} - {0})
    wanted = {0.01 * i for i, v in enumerate(model.variables) if "float" in v.dtype}
    assert maxima == sorted({round(value, 6) for value in wanted} - {0})


def trained(folder: Path) -> Path:
    keras.utils.clear_session()  # so that the layer is called dense
    model = keras.Sequential([L.Input((4,)), L.Dense(3), L.BatchNormalization()])
    model.compile("adam", "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 3)), epochs=1, verbose=0)
    model.save(folder / "model.keras")
    return folder / "model.keras"


def test_a_copy_has_what_was_changed_and_all_else(tmp_path):
    path = trained(tmp_path)
    archive = Archive(path)
    kernel = archive.read("layers/dense/vars/0")
    new = {"layers/dense/vars/0": kernel + 1}
    archive.write_copy(tmp_path / "copy.keras", new.get)
    copy = Archive(tmp_path / "copy.keras")
    assert copy.table == archive.table
    assert copy.config == archive.config
    for name in archive.table:
        wanted = new.get(name, archive.read(name))
        assert copy.read(name).tobytes() == wanted.tobytes(), name
    assert any(name.startswith("optimizer/") for name in archive.table)
    with zipfile.ZipFile(path) as one, zipfile.ZipFile(tmp_path / "copy.keras") as two:
        assert one.namelist() == two.namelist()
        for name in ("config.json", "metadata.json"):
            assert one.read(name) == two.read(name)
    model = keras.models.load_model(tmp_path / "copy.keras")
    assert np.array_equal(np.array(model.layers[0].get_weights()[0]), kernel + 1)


def changed(path: Path, members: dict[str, bytes | None]) -> Path:
    """Write an archive once more, with other members."""
    target = path.with_name("changed.keras")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = members.get(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
    return target


def with_weights(path: Path, change: Callable[[Any], None]) -> Path:
    """Write an archive once more, with a change of its HDF5 file."""
    weights = path.with_name("weights.h5")
    with zipfile.ZipFile(path) as archive:
        weights.write_bytes(archive.read("model.weights.h5"))
    with h5py.File(weights, "r+") as file:
        change(file)
    return changed(path, {"model.weights.h5": weights.read_bytes()})


def refused(path: Path) -> str:
    with pytest.raises(GemscError) as error:
        read(path, ImportOptions())
    return str(error.value)


def replaced(file: Any, item: Any) -> None:
    del file["layers/dense/vars/0"]
    file["layers/dense/vars/0"] = item


def huge(file: Any) -> None:
    del file["layers/dense/vars/0"]
    file.create_dataset(
        "layers/dense/vars/0", (1 << 20, 1 << 20), "f4", chunks=(1024, 1024)
    )


def outside(file: Any) -> None:
    del file["layers/dense/vars/0"]
    file.create_dataset(
        "layers/dense/vars/0", (4, 3), "f4", external=[("/etc/passwd", 0, 48)]
    )


def circle(file: Any) -> None:
    file["layers/dense/again"] = file["layers"]


def other_shape(file: Any) -> None:
    replaced(file, np.zeros((3, 4), "float32"))


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: replaced(f, h5py.SoftLink("/etc")), "is a link"),
        (lambda f: replaced(f, h5py.ExternalLink("/tmp/x.h5", "/")), "is a link"),
        (outside, "lies in another file"),
        (huge, "declares"),
        (circle, "is there twice"),
        (other_shape, "Dense 'dense' needs a weight of 3x4, and the file's is 4x3"),
        (lambda f: f.pop("layers/dense/vars/1"), "needs variable 1 in the file"),
    ],
)
def test_weights_that_are_damaged_or_lead_out_are_refused(tmp_path, change, words):
    assert words in refused(with_weights(trained(tmp_path), change))


def test_other_files_are_refused_with_advice(tmp_path):
    path = trained(tmp_path)
    old = changed(path, {"metadata.json": b'{"keras_version": "2.15.0"}'})
    assert "is of Keras 2.15.0" in refused(old)
    assert "has no config.json" in refused(changed(path, {"config.json": None}))
    assert "config.json is damaged" in refused(changed(path, {"config.json": b"{"}))
    deep = b'{"a":' * 100_000
    assert "config.json is damaged" in refused(changed(path, {"config.json": deep}))
    weights = changed(path, {"model.weights.h5": b"no HDF5"})
    assert "is damaged" in refused(weights)
    shutil.copyfile(__file__, tmp_path / "text.keras")
    assert "is not a Keras 3 archive" in refused(tmp_path / "text.keras")


def test_code_in_a_config_is_not_run(tmp_path):
    """A Lambda is marshalled code; a class is imported by its module's name."""
    path = trained(tmp_path)
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))
    layer = config["config"]["layers"][1]
    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")
    code = {"class_name": "__lambda__", "config": {"code": "4wEAAAAA"}}
    for change in (
        {"class_name": "Lambda", "config": {"name": "dense", "function": code}},
        {"class_name": "Trap", "module": "trap", "registered_name": "my>Trap"},
        {"class_name": "system", "module": "os", "registered_name": None},
    ):
        config["config"]["layers"][1] = {**layer, **change}
        text = json.dumps(config).encode()
        assert "'dense'" in refused(changed(path, {"config.json": text}))
    assert not (tmp_path / "sprung").exists()
