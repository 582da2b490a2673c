"""A user's file is loaded, or the message says what is missing and where."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemsc.errors import GemscError
from gemsc.runtime.training.program_directory import load_rank_module
from gemsc.source import split_constants
from gemsc.user_model import UserModel, load_user_model

HEAD = "import torch\nfrom torch import nn\n"
INPUTS = "def example_inputs():\n    return (torch.randn(3, 4),)\n"
MODEL = "def model():\n    return nn.Linear(4, 2)\n"


def load(folder: Path, text: str, name: str = "model.py") -> UserModel:
    path = folder / name
    path.write_text(text)
    return load_user_model(str(path))


def refusal(folder: Path, text: str, name: str = "model.py") -> GemscError:
    with pytest.raises(GemscError) as caught:
        load(folder, text, name)
    return caught.value


def test_functions_classes_and_objects_are_models(tmp_path: Path) -> None:
    for index, model in enumerate(
        [
            MODEL,
            "model = nn.Linear(4, 2)\n",
            "class Net(nn.Linear):\n    def __init__(self):\n"
            "        super().__init__(4, 2)\nmodel = Net\n",
        ]
    ):
        user = load(tmp_path, HEAD + INPUTS + model, f"file{index}.py")
        made = user.make_unfilled()
        assert isinstance(made, nn.Linear)
        assert user.make_inputs()[0].shape == (3, 4)
        assert user.loss is None
        assert user.make_target(user.make_inputs()) is None


def test_the_same_seed_gives_the_same_model_and_inputs(tmp_path: Path) -> None:
    torch.manual_seed(5)
    user = load(tmp_path, HEAD + INPUTS + MODEL)
    state = torch.get_rng_state(), random.getstate()
    first, second, other = (user.make_unfilled(seed=seed) for seed in (0, 0, 1))
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    assert isinstance(other, nn.Linear)
    assert torch.equal(first.weight, second.weight)
    assert not torch.equal(first.weight, other.weight)
    assert torch.equal(user.make_inputs()[0], user.make_inputs()[0])
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == random.getstate()


def test_a_file_that_has_changed_within_a_second_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would take the code that it has cached of the file before."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path, rank = tmp_path / "model.py", tmp_path / "rank0.py"
    for layer in (nn.ReLU, nn.GELU):
        name = f"nn.{layer.__name__}()"
        path.write_text(f"{HEAD}model = {name}\n{INPUTS}")
        rank.write_text(f"WHAT = '{name}'\n")
        for file in (path, rank):
            os.utime(file, (10**9, 10**9))
        assert type(load_user_model(str(path)).make_unfilled()) is layer
        assert name == load_rank_module(tmp_path, 0).WHAT


def test_annotations_are_what_they_are_in_python(tmp_path: Path) -> None:
    """A file without `from __future__ import annotations` has types there, no texts."""
    text = "from dataclasses import dataclass, fields\nWIDTH = 4\n"
    text += "@dataclass\nclass Config:\n    width: int = 3\n"
    text += HEAD + INPUTS + "width, = [f.type('3') for f in fields(Config)]\n"
    path = tmp_path / "typed.py"
    path.write_text(text + "model = nn.Linear(width, WIDTH)\n")
    for constants, width in (((), 4), (("WIDTH=5",), 5)):
        given = split_constants([*constants])
        model = load_user_model(str(path), constants=given).make_unfilled()
        assert (model.in_features, model.out_features) == (3, width)


def test_another_name_and_modules_beside_the_file(tmp_path: Path) -> None:
    """Those that a function imports, too, as where Python starts with the file."""
    (tmp_path / "beside_the_file.py").write_text("WIDTH = 4\n")
    (tmp_path / "datasets.py").write_text("own = [(1, 2)]\n")  # a known package's name
    text = "from beside_the_file import WIDTH\n" + HEAD + INPUTS
    text += "def dataset():\n    from datasets import own\n    return own\n"
    (tmp_path / "named.py").write_text(text + "class Net(nn.Identity):\n    pass\n")
    user = load_user_model(f"{tmp_path / 'named.py'}:Net")
    assert type(user.make_unfilled()).__name__ == "Net"
    assert user.make_dataset("dataset", seed=0) == [(1, 2)]
    del sys.modules["datasets"]


def test_a_module_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "user_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "net.py").write_text(HEAD + INPUTS + MODEL)
    monkeypatch.chdir(tmp_path)
    user = load_user_model("user_package.net:model")
    assert isinstance(user.make_unfilled(), nn.Linear)
    with pytest.raises(GemscError, match=r"no module user_package\.other"):
        load_user_model("user_package.other:model")


def test_targets_come_from_the_dataset_or_from_the_user(tmp_path: Path) -> None:
    loss = "def loss(output, target):\n    return (output - target).mean()\n"
    data = (
        "dataset = [(torch.zeros(4), torch.full((2,), float(i))) for i in range(2)]\n"
    )
    user = load(tmp_path, HEAD + INPUTS + MODEL + loss + data, "a.py")
    target = user.make_target(user.make_inputs())
    assert target[:, 0].tolist() == [0.0, 1.0, 0.0]
    assert callable(user.make_loss())

    example = "def example_target():\n    return torch.ones(3, 2)\n"
    user = load(tmp_path, HEAD + INPUTS + MODEL + loss + example, "b.py")
    assert torch.equal(user.make_target(user.make_inputs()), torch.ones(3, 2))

    user = load(tmp_path, HEAD + INPUTS + MODEL + loss, "c.py")
    with pytest.raises(GemscError, match="nothing provides a target for it") as caught:
        user.make_target(user.make_inputs())
    assert caught.value.at is not None
    assert caught.value.at.line == 7


def test_a_loss_may_be_a_class_or_an_object(tmp_path: Path) -> None:
    text = HEAD + INPUTS + MODEL
    user = load(tmp_path, text + "loss = nn.MSELoss\n", "a.py")
    assert isinstance(user.make_loss(), nn.MSELoss)
    user = load(tmp_path, text + "loss = nn.MSELoss()\n", "b.py")
    assert isinstance(user.make_loss(), nn.MSELoss)


def test_a_dataset_that_gives_no_pairs(tmp_path: Path) -> None:
    text = HEAD + INPUTS + MODEL + "loss = nn.MSELoss()\ndataset = [torch.ones(3)]\n"
    user = load(tmp_path, text)
    with pytest.raises(GemscError, match="pairs"):
        user.make_target(user.make_inputs())


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(GemscError, match="there is no file"):
        load_user_model(str(tmp_path / "none.py"))
    with pytest.raises(GemscError, match="there is no module nowhere"):
        load_user_model("nowhere:model")


def test_a_file_that_is_not_python(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("x = 1")
    with pytest.raises(GemscError, match="not a Python file"):
        load_user_model(str(tmp_path / "model.txt"))


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("x = 1\ndef broken(:\n", "syntax error", 2),
        ("x = 1\n\nx / 0\n", "importing failing.py fails: ZeroDivisionError", 3),
        ("import not_there_at_all\n", "ModuleNotFoundError", 1),
        ("raise SystemExit(3)\n", "SystemExit", 1),
    ],
)
def test_a_file_that_fails(tmp_path: Path, text: str, message: str, line: int) -> None:
    error = refusal(tmp_path, text, "failing.py")
    assert message in error.message
    assert error.at is not None
    assert error.at.line == line
    assert "failing" not in sys.modules


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\n\nrank = dist.get_rank()\n",
        "import os\n\nrank = int(os.environ['LOCAL_RANK'])\n",
    ],
)
def test_a_script_of_a_process_group(
    tmp_path: Path, text: str, monkeypatch: Any
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    error = refusal(tmp_path, text, "failing.py")
    assert error.at is not None
    assert error.at.line == 3
    assert error.help.startswith("gemsc starts no process group")


def test_a_file_that_goes_elsewhere(tmp_path: Path) -> None:
    """What `-o build` and `--save` name would be there."""
    folder = Path.cwd()
    text = "import os\n\nos.chdir(os.path.dirname(__file__))\n"
    error = refusal(tmp_path, text + HEAD + MODEL + INPUTS, "goes.py")
    assert "importing goes.py changes the working directory" in error.message
    assert Path.cwd() == folder


@pytest.mark.parametrize(
    ("mode", "message", "help"),
    [
        ("set_grad_enabled(False)", "turns gradients off", "with torch.no_grad():"),
        ("set_default_dtype(torch.half)", "makes float16 the dtype", "torch.float16)"),
    ],
)
def test_a_file_that_changes_what_all_tensors_are(
    mode: str, message: str, help: str, tmp_path: Path
) -> None:
    """A run would train nothing, or get messages of another size than compiled."""
    error = refusal(tmp_path, HEAD + MODEL + INPUTS + f"torch.{mode}\n")
    assert message in error.message
    assert help in str(error.help)
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


def test_no_model_in_the_file(tmp_path: Path) -> None:
    error = refusal(tmp_path, HEAD + INPUTS + "class Net(nn.Module):\n    pass\n")
    assert "no model in model.py; it has Net, example_inputs" in error.message
    assert error.help is not None
    assert "model = Net" in error.help
    assert "defines nothing" in refusal(tmp_path, "", "empty.py").message


def test_no_example_inputs(tmp_path: Path) -> None:
    error = refusal(tmp_path, HEAD + MODEL)
    assert "no example_inputs" in error.message
    assert error.at is not None
    assert error.at.line == 3


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("def example_inputs():\n    return ()\n", "holds no tensor"),
        ("def example_inputs():\n    return 3\n", "of type int"),
        ("def example_inputs():\n    return (1 / 0,)\n", "example_inputs() fails"),
    ],
)
def test_wrong_example_inputs(tmp_path: Path, inputs: str, message: str) -> None:
    user = load(tmp_path, HEAD + MODEL + inputs)
    with pytest.raises(GemscError) as caught:
        user.make_inputs()
    assert message in caught.value.message
    assert caught.value.at is not None
    assert caught.value.at.line == (6 if "/" in inputs else 5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("def model():\n    return 3\n", "object of type int"),
        ("def model():\n    raise ValueError('no')\n", "ValueError: no"),
        ("model = 3\n", "object of type int"),
    ],
)
def test_wrong_models(tmp_path: Path, model: str, message: str) -> None:
    user: Any = load(tmp_path, HEAD + INPUTS + model)
    with pytest.raises(GemscError) as caught:
        user.make_unfilled()
    assert message in caught.value.message
    assert caught.value.at is not None
    assert caught.value.at.line in (5, 6)


def test_a_dataset_counts_more_than_a_target_that_is_only_imported(
    tmp_path: Path,
) -> None:
    """The target of an imported model.py may have another shape than the data."""
    (tmp_path / "parts_of_it.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(3, 1)\n"
        "def example_inputs():\n    return (torch.zeros(2, 3),)\n"
        "def example_target():\n    return torch.zeros(2, 1)\n"
        "def loss(output, target):\n    return (output[:, 0] - target).abs().mean()\n"
    )
    data = "def dataset():\n    return [(torch.zeros(3), torch.tensor(1.0))] * 4\n"
    shapes = []
    for number, more in enumerate(("", data)):
        path = tmp_path / f"own_{number}.py"
        path.write_text("import torch\nfrom parts_of_it import *\n" + more)
        user = load_user_model(str(path))
        shapes.append(tuple(user.make_target(user.make_inputs()).shape))
    assert shapes == [(2, 1), (2,)]
    path.write_text(path.read_text() + "example_target = torch.zeros(2, 7)\n")
    user = load_user_model(str(path))
    assert user.make_target(user.make_inputs()).shape == (2, 7)  # own, if no function
