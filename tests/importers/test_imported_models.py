"""Imported networks are cut, tiled and shared like any other, and exact.

By day each is trained on threads, at night by the commands.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from import_support import filled
from imported_keras import KERAS_MODELS
from imported_onnx import ONNX_FILES
from keras_support import keras
from nightly import at_night
from program_support import batch_of
from threads import run_on_threads

from gemsc.codegen.package import write_directory
from gemsc.compiler import CompiledProgram, compile
from gemsc.importers.folder import import_file
from gemsc.importers.network import ImportOptions
from gemsc.plan import Plan
from gemsc.user_model import UserModel, load_user_model
from gemsc.verify.compare import TOLERANCE, compare
from gemsc.verify.one_process import reference_steps

FILES = [f"{name}.keras" for name in KERAS_MODELS]
FILES += [f"{name}.onnx" for name in ONNX_FILES]
# each of them has what the others have not; the layers of all have tests of their own
BY_DAY = ("transformer.keras", "recurrent.keras", "siamese.keras", "encoder.onnx")
MICRO_BATCHES = 3
FIRST = ImportOptions(channels_first=True)
CHANNELS = "channels first "  # such an import of a Keras model

# What a user writes beside an import; here for outputs of any structure.
TRAIN = """\
import torch
import torch.nn.functional as F
from {folder}.model import example_inputs, model
from torch.utils import _pytree as pytree


def example_target():
    output = model()(*example_inputs())
    return pytree.tree_map(lambda tensor: torch.rand(tensor.shape), output)


def loss(output, target):
    pairs = zip(pytree.tree_leaves(output), pytree.tree_leaves(target))
    return sum(F.mse_loss(*pair) for pair in pairs)
"""


def write_file(path: Path) -> None:
    """Write a file of the tables."""
    if path.suffix == ".onnx":
        ONNX_FILES[path.stem].write(path)
    else:
        keras.utils.set_random_seed(0)
        KERAS_MODELS[path.stem]().save(path)


@pytest.fixture(scope="session")
def train_py(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the user's file beside the import of a file of the tables."""
    place = tmp_path_factory.mktemp("imported")

    def make(name: str) -> Path:
        folder = place / name.replace(" ", "_").replace(".", "_")
        path = folder.with_name(f"train_{folder.name}.py")
        if not path.is_file():
            file = place / name.removeprefix(CHANNELS)
            write_file(file)
            options = FIRST if name.startswith(CHANNELS) else ImportOptions()
            import_file(file, folder, options)
            path.write_text(TRAIN.format(folder=folder.name))
        return path

    return make


def compiled(user: UserModel, **options: Any) -> CompiledProgram:
    inputs = user.make_inputs()
    return compile(
        filled(user),
        inputs,
        loss=user.make_loss(),
        example_target=user.make_target(inputs),
        source=user.path,
        micro_batches=MICRO_BATCHES,
        **options,
    )


def worst_error(path: Path, directory: Path, **options: Any) -> tuple[float, Plan]:
    """Train on threads and in one process; return the error in float64, the plan."""
    user = load_user_model(str(path))
    program = compiled(user, **options)
    write_directory(program.compilation, directory)
    inputs = user.make_inputs()
    batch = batch_of((inputs, user.make_target(inputs)), MICRO_BATCHES)
    plan = program.plan
    record = run_on_threads(directory, plan.ranks, [batch] * 2, dtype=torch.float64)
    expected = reference_steps(
        filled(user), user.make_loss(), [batch] * 2, MICRO_BATCHES, torch.float64
    )
    return compare(record, expected).worst, plan


EXACT = TOLERANCE[torch.float64]


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", [*BY_DAY, *at_night(*sorted({*FILES} - {*BY_DAY}))])
def test_three_ranks_train_what_one_process_does(
    name: str, train_py: Callable[[str], Path], tmp_path: Path
) -> None:
    error, plan = worst_error(train_py(name), tmp_path, ranks=3)
    assert error < EXACT
    assert len(plan.stages) == 3


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("name", "ranks", "tiles"),
    [
        (f"{CHANNELS}small_unet.keras", 3, "1x2"),
        ("mobile.keras", 3, "2x1"),
        pytest.param("small_unet.keras", 4, "2x2", marks=pytest.mark.nightly),
        pytest.param("unet.onnx", 4, "2x2", marks=pytest.mark.nightly),
    ],
)
def test_pictures_of_an_import_are_split(
    name: str, ranks: int, tiles: str, train_py: Callable[[str], Path], tmp_path: Path
) -> None:
    error, plan = worst_error(train_py(name), tmp_path, ranks=ranks, tiles=(tiles,))
    assert error < EXACT
    assert not plan.barriers


@pytest.mark.slow
@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("name", "units"),
    [("transformer.keras", {"heads", "features"}), ("encoder.onnx", {"features"})],
)
def test_heads_and_features_of_an_import_are_shared(
    name: str, units: set[str], train_py: Callable[[str], Path], tmp_path: Path
) -> None:
    error, plan = worst_error(train_py(name), tmp_path, ranks=2, shards=("2",))
    assert error < EXACT
    assert units <= set(plan.stages[0].units.split(", "))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("name", ["inception.keras", "inception.onnx"])
def test_branches_of_an_import_go_to_different_ranks(
    name: str, train_py: Callable[[str], Path], tmp_path: Path
) -> None:
    error, plan = worst_error(train_py(name), tmp_path, ranks=2, branches=("2",))
    assert error < EXACT
    forks = plan.stages[0].forks
    assert len(forks) == 2
    assert all(fork.placed and len(fork.branches) == 4 for fork in forks)
