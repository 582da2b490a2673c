"""A PyTorch model becomes an ONNX file that onnxruntime computes alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from norm_models import NORM_MODELS
from torch import Tensor, nn

from gemsc.errors import GemscError
from gemsc.importers.network import distance
from gemsc.importers.onnx.from_torch import export_onnx

onnx: Any = pytest.importorskip("onnx")
runtime: Any = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def run(path: Path, **inputs: Tensor) -> dict[str, Tensor]:
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    outputs = session.run(names, {name: np.asarray(x) for name, x in inputs.items()})
    return dict(zip(names, map(torch.from_numpy, outputs), strict=True))


@pytest.mark.slow
def test_a_trained_model_is_the_same_in_onnxruntime(tmp_path: Path) -> None:
    model = NORM_MODELS["normed"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(X).square().mean().backward()
        optimizer.step()
    path = tmp_path / "new" / "model.onnx"
    (note,) = export_onnx(model, X, path)
    assert note.startswith("onnxruntime computes the same within")
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    other = torch.randn(7, 3, 8, 8)  # of another batch
    wanted = model.eval()(other)
    outputs = run(path, x=other)
    assert torch.allclose(outputs["output"], wanted, rtol=1e-5, atol=1e-5)
    graph = onnx.load(path).graph
    assert sum(node.op_type == "BatchNormalization" for node in graph.node) == 7
    held = {tensor.name for tensor in graph.initializer}
    assert held >= {name for name, _ in model.named_parameters()}
    assert "forward" not in vars(model)


@dataclass
class Found:
    scores: Tensor
    levels: list[Tensor]
    loss: Tensor | None = None


class Named(nn.Module):
    def forward(self, image: Tensor, *, scale: Tensor | None = None) -> Found:
        assert scale is not None
        return Found(image * scale, [image.relu(), image])


@pytest.mark.slow
def test_inputs_and_outputs_have_the_users_names(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    given = {"scale": torch.full((4, 1, 1, 1), 2.0), "image": X}
    export_onnx(Named(), given, path)
    outputs = run(path, **given)
    assert [*outputs] == ["scores", "levels_0", "levels_1"]
    assert torch.equal(outputs["scores"], X * 2)
    assert torch.equal(outputs["levels_1"], X)


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] != 4:
            raise ValueError
        return x + 1


def test_a_batch_that_forward_fixes_is_told(tmp_path: Path) -> None:
    notes = export_onnx(Fixed(), (X,), tmp_path / "model.onnx")
    assert notes[0] == "the file takes batches of 4 alone: forward fixes their size"
    assert torch.equal(run(tmp_path / "model.onnx", x=X)["output"], X + 1)


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ x.mT
        return torch.linalg.eigh(y)[0]


class OnData(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("model", "message", "line"),
    [
        (Unknown(), "No ONNX function found for aten._linalg_eigh", 2),
        (OnData(), "Could not guard on data-dependent expression", 1),
    ],
)
def test_what_onnx_has_not_is_refused_at_the_users_line(
    model: nn.Module, message: str, line: int, tmp_path: Path
) -> None:
    with pytest.raises(GemscError, match=message) as caught:
        export_onnx(model, X, tmp_path / "model.onnx")
    first: Any = type(model).forward
    assert caught.value.at is not None
    assert caught.value.at.line == first.__code__.co_firstlineno + line
    assert not [*tmp_path.iterdir()]


def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemsc.importers.onnx.from_torch.find_spec", lambda name: None)
    with pytest.raises(GemscError, match="package onnx, which is not") as caught:
        export_onnx(nn.Linear(2, 2), torch.ones(1, 2), tmp_path / "model.onnx")
    assert caught.value.help == "pip install 'gemsc[onnx]'"


def test_what_is_no_number_in_one_of_both_is_infinitely_far() -> None:
    nan, one = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0])
    assert distance(nan, nan) == 0
    assert distance(nan, one) == distance(one, nan) == torch.inf
    assert distance(one * 1.5, one) == 0.5
