"""The folder of an import: whole or not there, and nothing of the user's is lost."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Gemsc, files, gemsc_here
from import_support import filled, read_npz, take_npz, write_npz
from safetensors.torch import load_file

from gemsc.errors import GemscError
from gemsc.importers import folder as folders
from gemsc.importers.folder import Origin, import_file
from gemsc.importers.network import READERS, ImportedNetwork, ImportOptions
from gemsc.user_model import load_user_model

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("take_npz")
assert take_npz

gemsc = pytest.fixture(gemsc_here)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.npz"
    write_npz(path)
    return path


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_folder_holds_the_model_its_weights_and_the_file(small: Path) -> None:
    net = small.with_name("net")
    import_file(small, net, ImportOptions())
    assert names_in(net) == {
        "model.py",
        "weights.safetensors",
        "import.toml",
        "original",
    }
    assert names_in(small.parent) == {"net", "small.npz"}  # nothing is left beside
    assert (net / "original" / "small.npz").read_bytes() == small.read_bytes()
    user = load_user_model(str(net / "model.py"))
    model, (image,) = filled(user), user.make_inputs()
    assert image.shape == (2, 2, 6, 6)
    assert model(image).shape == (2, 3)
    arrays = dict(np.load(small))
    kernel = torch.from_numpy(arrays["stem/kernel"]).permute(3, 2, 0, 1)
    assert torch.equal(model.stem.weight, kernel)
    assert torch.equal(model.head.bias, torch.from_numpy(arrays["head/all"][:3, 3]))
    assert not model.norm.bias.requires_grad
    assert load_file(net / "weights.safetensors").keys() == model.state_dict().keys()


def test_import_toml_says_what_was_imported_and_how(small: Path) -> None:
    net = small.with_name("net")
    options = ImportOptions(3, {"image": (5, 2, 8, 7)}, channels_first=True)
    import_file(small, net, options)
    origin = Origin.read(net)
    assert origin.options(net) == options
    assert origin.is_of(small)
    assert origin.original(net) == net / "original" / "small.npz"
    assert origin.edited(net) is None
    assert origin.notes == ["it is small"]
    write_npz(small, seed=1)
    assert not origin.is_of(small)
    write_npz(net / "original" / "small.npz", seed=1)
    with pytest.raises(GemscError, match="does not hold the small"):
        origin.original(net)


def test_a_text_is_the_same_each_time(small: Path) -> None:
    one, two = small.with_name("one"), small.with_name("two")
    for net in (one, two):
        import_file(small, net, ImportOptions())
    assert files(one) == files(two)


def test_files_that_belong_to_it_are_copied_too(small: Path) -> None:
    small.with_name("small.npy").write_bytes(b"more numbers")
    net = small.with_name("net")
    import_file(small, net, ImportOptions())
    assert (net / "original" / "small.npy").read_bytes() == b"more numbers"
    assert Origin.read(net).files.keys() == {"small.npz", "small.npy"}
    small.with_name("small.npy").write_bytes(b"other numbers")
    assert not Origin.read(net).is_of(small)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../b", ""])
def test_files_elsewhere_are_refused(
    small: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reader(path: Path, options: ImportOptions) -> ImportedNetwork:
        network = read_npz(path, options)
        network.tensors.files = (name,)  # type: ignore[misc]
        return network

    small.parent.with_name("outside").write_text("of somebody else")
    monkeypatch.setattr(folders, "read", reader)
    with pytest.raises(GemscError, match="outside its folder"):
        import_file(small, small.with_name("net"), ImportOptions())
    assert names_in(small.parent) == {"small.npz"}


def test_a_folder_of_something_else_is_not_touched(small: Path) -> None:
    net = small.with_name("net")
    net.mkdir()
    import_file(small, net, ImportOptions())  # an empty folder is nobody's
    for name in ("import.toml", "model.py"):
        (net / name).unlink()
    before = files(net)
    for overwrite in (False, True):
        with pytest.raises(GemscError, match="something other"):
            import_file(small, net, ImportOptions(), overwrite=overwrite)
    with pytest.raises(GemscError, match="something other"):
        import_file(small, small, ImportOptions())
    assert files(net) == before


def test_what_a_user_changed_is_kept_unless_told_otherwise(small: Path) -> None:
    net = small.with_name("net")
    import_file(small, net, ImportOptions())
    text = (net / "model.py").read_text()
    (net / "model.py").write_text(text + "\n\nmore = 1\n")
    (net / "train.py").write_text("from model import model\n")
    (net / "build").mkdir()
    (net / "build" / "plan.toml").write_text("mine")
    with pytest.raises(GemscError, match=r"model\.py was changed") as caught:
        import_file(small, net, ImportOptions())
    assert "--overwrite" in str(caught.value.help)
    assert (net / "model.py").read_text() != text
    import_file(small, net, ImportOptions(batch=4), overwrite=True)
    assert Origin.read(net).batch == 4
    assert (net / "model.py").read_text() == text.replace("rand(2, ", "rand(4, ")
    assert (net / "train.py").read_text() == "from model import model\n"
    assert (net / "build" / "plan.toml").read_text() == "mine"
    import_file(small, net, ImportOptions())  # it is not edited any more
    assert names_in(small.parent) == {"net", "small.npz"}


def test_an_import_that_fails_leaves_what_was_there(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = small.with_name("net")
    import_file(small, net, ImportOptions())
    before = files(net)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folders, "write_stream", fail)
    for place in (net, small.with_name("new")):
        with pytest.raises(KeyboardInterrupt):
            import_file(small, place, ImportOptions(batch=7))
    assert files(net) == before
    assert names_in(small.parent) == {"net", "small.npz"}


def test_the_layers_of_a_user_come_along(small: Path, tmp_path: Path) -> None:
    custom, net = tmp_path / "layers.py", tmp_path / "net"
    custom.write_text("def scale(settings):\n    return None\n")
    import_file(small, net, ImportOptions(custom=custom))
    assert (net / "layers.py").read_text() == custom.read_text()
    assert Origin.read(net).options(net).custom == net / "layers.py"
    (net / "layers.py").write_text("changed")
    with pytest.raises(GemscError, match=r"layers\.py was changed"):
        import_file(small, net, ImportOptions())
    for name in ("model.py", "my-layers.py", "layers.txt"):
        (tmp_path / name).write_text("")
        with pytest.raises(GemscError, match="cannot import"):
            import_file(small, tmp_path / "new", ImportOptions(custom=tmp_path / name))
    with pytest.raises(GemscError, match="no such file"):
        import_file(small, tmp_path / "new", ImportOptions(custom=tmp_path / "no.py"))
    (tmp_path / "torch.py").write_text("")  # model.py would import the other one
    with pytest.raises(GemscError, match="there is another module torch"):
        import_file(
            small, tmp_path / "new", ImportOptions(custom=tmp_path / "torch.py")
        )


# ------------------------------------------------------------------- commands


def test_the_command_says_what_was_imported(small: Path, gemsc: Gemsc) -> None:
    done = gemsc("import", small, "--shape", "image=3x2x8x8")
    assert (done.code, done.err) == (0, "")
    for line in (
        "100 parameters in 7 tensors, 4 of them not trained",
        "8 numbers in 2 tensors as buffers",
        "not trained: norm.bias",
        "input image: 3x2x8x8",
        "output: 3x3",
        "note: it is small",
    ):
        assert line in done.out.splitlines()
    model = small.parent / "small_npz" / "model.py"
    assert done.out.endswith(f"wrote {model}; next: gemsc compile {model}\n")
    assert model.is_file()


@pytest.mark.parametrize("text", ["image", "image=", "image=2x0", "=2x3", "x=2x-3"])
def test_a_shape_that_is_none_is_refused(small: Path, gemsc: Gemsc, text: str) -> None:
    done = gemsc("import", small, "--shape", text)
    assert done.code == 1
    assert f"error: --shape {text} is not the shape of an input" in done.err


@pytest.mark.slow
def test_every_command_takes_the_file_in_the_place_of_a_model(
    small: Path, gemsc: Gemsc
) -> None:
    done = gemsc("plan", small, "--ranks", 2)
    assert done.code == 0
    net = small.parent / "small_npz"
    assert done.err.startswith(f"imported {small} into {net}: 1 note")
    model = net / "model.py"
    model.write_text(model.read_text().replace(".relu()", ".tanh()"))
    build = small.with_name("build")
    done = gemsc("compile", small, "--ranks", 2, "-o", build)
    assert done.code == 0
    assert done.err.startswith(f"{small} is in {net} already")
    texts = [path.read_text() for path in build.glob("rank*.py")]
    assert any(".tanh()" in text for text in texts)  # what the user has changed
    done = gemsc("graph", small, "-o", small.with_name("graph.svg"))
    assert done.code == 0
    write_npz(small, seed=1)
    done = gemsc("plan", small)
    assert done.code == 1
    assert f"{model} was changed after it was imported" in done.err


def test_a_changed_file_is_imported_again_with_the_same_choices(
    small: Path, gemsc: Gemsc
) -> None:
    done = gemsc("import", small, "--batch", 5)
    assert done.code == 0
    assert "--batch" not in done.out
    write_npz(small, seed=1)
    assert gemsc("plan", small).code == 0
    net = small.parent / "small_npz"
    assert Origin.read(net).is_of(small)
    (image,) = load_user_model(str(net / "model.py")).make_inputs()
    assert len(image) == 5


def test_a_batch_that_no_input_takes_is_told(small: Path, gemsc: Gemsc) -> None:
    done = gemsc("import", small, "--shape", "image=3x2x6x6", "--batch", 5)
    assert done.code == 0
    assert "note: --batch 5 has no effect: the file, or --shape, has" in done.out


def test_model_py_needs_nothing_of_what_imported_it(small: Path) -> None:
    net = small.with_name("net")
    import_file(small, net, ImportOptions())
    tree = ast.parse((net / "model.py").read_text())
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    assert names == {"__future__", "pathlib", "torch", "safetensors.torch"}


def test_what_cannot_be_read_is_told_in_one_line(tmp_path: Path, gemsc: Gemsc) -> None:
    done = gemsc("import", tmp_path / "none.npz")
    assert done.code == 1
    assert "there is no file" in done.err
    done = gemsc("import", tmp_path / "none.h5")
    assert done.code == 1
    assert "gemsc reads .keras files" in done.err
    assert set(READERS) >= {".keras", ".onnx"}


def test_files_of_tensorflow_and_older_keras_are_told_how_to_be_saved_anew(
    command: Gemsc, tmp_path: Path
) -> None:
    (tmp_path / "net.h5").touch()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "saved_model.pb").touch()
    for name in ("net.h5", "saved"):
        for what in ("import", "compile"):
            done = command(what, name)
            assert done.code == 1
            assert f'load_model("{name}").save("model.' in done.err
    done = command("import", "net.weights.h5")
    assert 'model.load_weights("net.weights.h5")' in done.err


def test_one_argument_too_many_is_told(small: Path, gemsc: Gemsc) -> None:
    done = gemsc("import", small, "net")
    assert done.code == 1
    assert f"gemsc import {small} -o net" in done.err
