"""What a program starts from, with the user's file where that makes its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from gemsc.plan import Plan
from gemsc.user_model import load_user_model
from gemsc.weights.first import FirstWeights


def first_weights(directory: Path, plan: Plan) -> FirstWeights:
    """Return the first weights of a program; the user's file is loaded if need be."""

    def make() -> tuple[nn.Module, Callable[[nn.Module], object]]:
        return load_user_model(plan.spec, constants=plan.constants).initialized()

    dtype = torch.float64 if plan.dtype == "float64" else torch.float32
    return FirstWeights(directory / plan.weights, make, dtype)
