"""ONNX files of every kind, small: what is imported, cut and trained in tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from encoder import Encoder
from models import MODELS
from torch import Tensor, nn
from unet_histology.model import UNet

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

__all__ = ["EVALUATION", "KEEPS", "ONNX_FILES", "TRAINING", "OnnxFile"]

MODE = torch.onnx.TrainingMode
# How torch.onnx keeps BatchNormalization and the names of weights: both exporters
KEEPS: dict[str, Any] = {"dynamo": True, "optimize": False}
TRAINING: dict[str, Any] = {
    "dynamo": False,
    "training": MODE.TRAINING,
    "do_constant_folding": False,
    "opset_version": 17,
}
# with BatchNormalization in evaluation, for who only runs it
EVALUATION = TRAINING | {"training": MODE.PRESERVE}


@dataclass(frozen=True)
class OnnxFile:
    """A model of PyTorch, and how it is exported."""

    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    how: dict[str, Any] = field(default_factory=lambda: dict(TRAINING))

    def build(self) -> nn.Module:
        """Return the model, the same at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make()

    def write(self, path: Path) -> None:
        """Export it."""
        names = [f"input{number}" for number, _ in enumerate(self.inputs)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                self.build().train(self.how.get("training") is MODE.TRAINING),
                self.inputs,
                path,
                input_names=names,
                output_names=["result"],
                verbose=False,
                **self.how,
            )


class Recurrent(nn.Module):
    """An LSTM in both directions, and what it says at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.say = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        heard, _ = self.lstm(x)
        return self.say(heard[:, -1])


def residual() -> nn.Module:
    return networks.rows(
        networks.Residual(bottleneck=True),
        networks.Residual(down=True),
        networks.PreActivation(),
        networks.SqueezeExcite(),
    )


def inception() -> nn.Module:
    return nn.Sequential(
        networks.conv(), networks.Inception(), networks.Inception(), networks.conv()
    )


def encoder() -> nn.Module:
    return Encoder(width=16, num_layers=2, num_heads=2, length=16, dropout=0.0)


PICTURE = torch.rand(networks.PICTURE.shape, generator=torch.Generator().manual_seed(0))
ONNX_FILES = {
    "residual": OnnxFile(residual, (PICTURE,)),
    "unet": OnnxFile(
        lambda: UNet(base=4, levels=2), (torch.rand(2, 3, 32, 32),), KEEPS
    ),
    "inception": OnnxFile(inception, (PICTURE,)),
    "encoder": OnnxFile(encoder, MODELS["encoder"].example_inputs),
    "recurrent": OnnxFile(Recurrent, (torch.rand(2, 7, 3),)),
    "folded": OnnxFile(residual, (PICTURE,), {"dynamo": False}),
}
