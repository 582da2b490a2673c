"""`--set NAME=VALUE`: constants of the model's file, seen by all that uses them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gemsc.errors import GemscError
from gemsc.source import check_run_constants, split_constants
from gemsc.user_model import UserModel, load_user_model

TEXT = """import torch
WIDTH: int = 4
DOUBLE = 2 * WIDTH
RATE = 0.1
KIND = "relu"
SIZES = (1, 2)
NOISE = RATE / 2
model = lambda: torch.nn.Linear(WIDTH, DOUBLE)
def example_inputs(): return torch.ones(1, WIDTH)
def optimizer(params): return torch.optim.SGD(params, lr=RATE)
def dataset(): return [NOISE]
"""


def load(folder: Path, *words: str) -> UserModel:
    path = folder / "own.py"
    path.write_text(TEXT)
    return load_user_model(str(path), constants=split_constants([*words]))


def test_everything_sees_the_new_values(tmp_path: Path) -> None:
    given = "WIDTH=8", "RATE=1", "KIND=tanh", "SIZES=(3,)"
    user = load(tmp_path, *given)
    module = user.module
    assert (module.WIDTH, module.DOUBLE, module.KIND) == (8, 16, "tanh")
    assert (module.RATE, module.NOISE, module.SIZES) == (1.0, 0.5, (3,))
    assert type(module.RATE) is float
    assert user.make_unfilled().weight.shape == (16, 8)
    assert user.constants == split_constants([*given])
    assert load(tmp_path).module.WIDTH == 4


@pytest.mark.parametrize(
    ("word", "message", "line"),
    [
        ("WIDHT=8", "own.py has no constant WIDHT", 2),
        ("DOUBLE=8", "own.py has no constant DOUBLE", None),
        ("WIDTH=wide", "WIDTH is 4, of type int", 2),
        ("WIDTH=True", "WIDTH is 4, of type int", 2),
        ("WIDTH=__import__('os').getpid()", "WIDTH is 4, of type int", 2),
        ("SIZES=3", r"SIZES is \(1, 2\), of type tuple", 6),
        ("8", "--set 8 is not NAME=VALUE", None),
    ],
)
def test_what_cannot_be_set(
    word: str, message: str, line: int | None, tmp_path: Path
) -> None:
    with pytest.raises(GemscError, match=message) as caught:
        load(tmp_path, word)
    assert (caught.value.at.line if caught.value.at else None) == line


def test_a_run_sets_what_the_model_does_not_use(tmp_path: Path) -> None:
    path = load(tmp_path).path
    check_run_constants(path, {"RATE": "1"}, {})
    check_run_constants(path, {"WIDTH": "8"}, {"WIDTH": "8"})
    with pytest.raises(GemscError, match="WIDTH may be part of what was compiled") as e:
        check_run_constants(path, {"WIDTH": "8"}, {"WIDTH": "7"})
    assert e.value.help == "compile again with --set WIDTH=8"


READERS = """import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from gemsc.source import ConstantsLoader, split_constants


class Garbage:  # while Python collects it, other threads run
    def __init__(self):
        self.cycle = self

    def __del__(self):
        sum(range(2000))


def read(_):
    for _ in range(20):
        Garbage()
        ConstantsLoader("own", path, constants).get_code("own")


path, constants = Path(sys.argv[1]), split_constants(sys.argv[2:])
with ThreadPoolExecutor(4) as pool:
    list(pool.map(read, range(4)))
"""


@pytest.mark.slow(1)
@pytest.mark.parametrize("constants", [[], ["WIDTH=8"]])
def test_threads_read_files_at_once(constants: list[str], tmp_path: Path) -> None:
    """As ranks that are threads do: Python 3.11 makes one tree of a file at a time."""
    path = tmp_path / "own.py"
    path.write_text(TEXT + "numbers = [" + "(1, 2, [3, 4], {5: 6}), " * 400 + "]\n")
    words = [sys.executable, "-c", READERS, path, *constants]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
