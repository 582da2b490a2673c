"""A model whose forward a test gives, recorded and compared with eager."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gemsc.frontend import record
from gemsc.frontend.check import check_against_eager
from gemsc.ir.program import Program

SCALE = torch.tensor([1.0, 2.0, 3.0, 4.0])


class Model(nn.Module):
    """A few layers and whatever forward a test gives."""

    def __init__(self, forward: Any, **attributes: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.steps = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps(self, *args, **kwargs)


class Named(Model):
    def forward(self, x: torch.Tensor, mask: Any = None, index: Any = None) -> Any:
        return self.steps(self, x, mask, index)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def mean(output: Any) -> torch.Tensor:
    return output.mean()


def square(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def checked(
    model: nn.Module, inputs: Any = (X,), loss: Any = mean, target: Any = None
) -> Program:
    torch.manual_seed(0)
    program = record(model, inputs, loss=loss, target=target)
    program.graph.lint()
    check_against_eager(program, model, inputs, loss, target)
    evaluation = record(model, inputs, training=False)
    check_against_eager(evaluation, model, inputs, training=False)
    return program


def targets(program: Program) -> list[Any]:
    return [node.target for node in program.compute_nodes]


def names(program: Program) -> list[str]:
    return [node.name for node in program.compute_nodes]
