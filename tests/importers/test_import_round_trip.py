"""From a file to ranks that train it, and back into the file; by the commands."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from command_line import Gemsc, gemsc_here, start
from import_support import filled
from imported_keras import unet
from imported_onnx import EVALUATION, ONNX_FILES
from keras_support import floatx, keras
from torch import Tensor, nn
from torch.utils.data import default_collate
from unet_histology.model import UNet

from gemsc.runtime.data.batches import Batches
from gemsc.user_model import UserModel, load_user_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "keras_unet"
STEPS = 10

gemsc = pytest.fixture(gemsc_here)

TRAIN = """\
import torch
from net.model import example_inputs, model

loss = torch.nn.BCEWithLogitsLoss()


def optimizer(params):
    return torch.optim.SGD(params, lr=0.05)


def dataset():
    x = torch.rand(40, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, (x.mean(1, True) > 0.5) * 1.0)


def eval_dataset():
    return torch.utils.data.Subset(dataset(), range(8))
"""


def said(*words: object, gemsc: Gemsc = start) -> str:
    """Return what a command says, which must work."""
    done = gemsc(*words)
    assert done.code == 0, done.out + done.err
    return done.out


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind that a run has logged."""
    lines = (run / "log.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def batches_of(user: UserModel, size: int) -> list[tuple[Tensor, Tensor]]:
    """Return the first batches of a run, in their order."""
    batches = Batches(user.make_dataset(), size, seed=0, shuffle=True).epoch(0)
    pairs = [batch.data for batch, _ in zip(batches, range(STEPS), strict=False)]
    return [(x.double(), target.double()) for x, target in pairs]


def trained_by_pytorch(user: UserModel, data: list[tuple[Tensor, Tensor]]) -> Any:
    """Return the model after a plain loop in one process, and its losses."""
    model, loss, losses = filled(user).double().train(), user.make_loss(), []
    optimizer = user.optimizer(model.named_parameters())
    for x, target in data:
        optimizer.zero_grad()
        value = loss(model(x), target)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return model.eval(), losses


def trained_by_keras(model: Any, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for x, target in data:
        model.reset_metrics()  # else it returns the mean of all losses so far
        losses.append(float(model.train_on_batch(x.numpy(), target.numpy())[0]))
    return losses


@pytest.mark.slow
@pytest.mark.mpi
def test_a_keras_network_is_trained_on_two_ranks_and_is_a_keras_network_again(
    tmp_path: Path, gemsc: Gemsc
) -> None:
    with floatx("float64"):  # in float32 rounding alone makes a difference of 1e-3
        go_there_and_back(tmp_path, gemsc)


def go_there_and_back(tmp_path: Path, gemsc: Gemsc) -> None:
    keras.utils.set_random_seed(0)
    unet(size=32, base=4, levels=2).save(tmp_path / "unet.keras")
    path = tmp_path / "train.py"
    shutil.copy(EXAMPLE / "train.py", path)
    run, build = tmp_path / "run", tmp_path / "build"
    words = tmp_path / "unet.keras", "-o", tmp_path / "unet", "--batch", 4
    said("import", *words, gemsc=gemsc)
    words = path, "--ranks", 2, "--micro-batches", 1, "-o", build
    said("compile", *words, gemsc=gemsc)
    said("run", build, "--steps", STEPS, "--save", run, "--dtype", "float64")

    user = load_user_model(str(path))
    data = batches_of(user, 4)
    losses = [event["loss"] for event in events(run, "step")]
    reference, expected = trained_by_pytorch(user, data)
    assert losses == pytest.approx(expected, rel=1e-7)
    by_keras = keras.saving.load_model(tmp_path / "unet.keras")
    assert losses == pytest.approx(trained_by_keras(by_keras, data), rel=1e-6)

    said("export", run, "--to", tmp_path / "trained.keras", gemsc=gemsc)
    exported = keras.saving.load_model(tmp_path / "trained.keras")
    held_out = list(user.make_dataset("eval_dataset"))
    x, target = (torch.stack(column).double() for column in zip(*held_out, strict=True))
    output = torch.tensor(exported.predict(x.numpy(), verbose=0))
    with torch.no_grad():
        torch.testing.assert_close(output, reference(x), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(
        output, by_keras.predict(x.numpy(), verbose=0), rtol=1e-5, atol=1e-6
    )
    (evaluated,) = events(run, "evaluation")
    assert evaluated["figures"]["loss"] == pytest.approx(
        float(user.make_loss()(output, target)), rel=1e-7
    )


def uneven_unet() -> nn.Module:
    """Return a U-Net of which torch.onnx cannot write two tensors as one."""
    model = UNet(base=4, levels=2)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor += 0.1 * torch.rand(tensor.shape)
    return model


@pytest.mark.mpi
@pytest.mark.nightly
def test_an_onnx_network_is_trained_on_three_ranks_and_runs_in_onnxruntime(
    tmp_path: Path,
) -> None:
    """What runs outside of gemsc says what the ranks say in their evaluation."""
    file = replace(ONNX_FILES["unet"], make=uneven_unet, how=EVALUATION)
    file.write(tmp_path / "net.onnx")
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    run, build, trained = (tmp_path / n for n in ("run", "build", "trained.onnx"))
    said("import", tmp_path / "net.onnx", "-o", tmp_path / "net")
    said("compile", path, "--ranks", 3, "--micro-batches", 2, "-o", build)
    said("run", build, "--steps", STEPS, "--save", run)
    said("export", run, "--to", trained)

    user = load_user_model(str(path))
    x, target = default_collate(list(user.make_dataset("eval_dataset")))
    session = onnxruntime.InferenceSession(trained)
    parts = [session.run(None, {"input0": two.numpy()})[0] for two in x.split(2)]
    (evaluated,) = events(run, "evaluation")
    loss = float(user.make_loss()(torch.from_numpy(np.concatenate(parts)), target))
    assert evaluated["figures"]["loss"] == pytest.approx(loss, rel=1e-5)
    before, after = (
        {tensor.name: tensor for tensor in onnx.load(path).graph.initializer}
        for path in (tmp_path / "net.onnx", trained)
    )
    assert [*before] == [*after]
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        name
        for name, tensor in file.build().state_dict().items()
        if tensor.is_floating_point()
    }
