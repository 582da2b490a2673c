"""Layers are written as a person writes them, and only where that is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gemsc.nn
from gemsc.compiler import compile
from gemsc.ir.layers import as_of_torch, layer_source

SOURCES = [
    "nn.Conv2d(3, 4, kernel_size=3, padding=1)",
    "nn.Conv2d(4, 4, kernel_size=(3, 1), stride=2, groups=2)",
    'nn.Conv2d(3, 4, kernel_size=3, padding="same", padding_mode="reflect")',
    "nn.Conv1d(3, 4, kernel_size=3, dilation=2)",
    "nn.Conv3d(3, 4, kernel_size=1, dtype=torch.float64)",
    "nn.ConvTranspose2d(3, 4, kernel_size=2, stride=2)",
    "nn.Linear(3, 4)",
    "nn.Linear(3, 4, bias=False, dtype=torch.bfloat16)",
    "nn.Bilinear(2, 3, out_features=4)",
    "nn.BatchNorm2d(4)",
    "nn.BatchNorm1d(4, affine=False, track_running_stats=False)",
    "nn.BatchNorm2d(4, eps=0.001, momentum=None)",
    "gemsc.nn.BatchNorm2d(4, eps=0.001, momentum=0.01)",
    "gemsc.nn.BatchNorm1d(4, momentum=None)",
    "gemsc.nn.FrozenBatchNorm(4, eps=0.001, dtype=torch.float64)",
    "nn.LayerNorm(8)",
    "nn.LayerNorm((8, 8), elementwise_affine=False)",
    "nn.GroupNorm(2, 8)",
    "nn.InstanceNorm2d(3, affine=True)",
    "nn.RMSNorm(4)",
    "nn.Embedding(10, 3, padding_idx=0)",
    "nn.LSTM(3, 4, num_layers=2, batch_first=True, dropout=0.1, bidirectional=True)",
    "nn.LSTM(3, 4, proj_size=2)",
    "nn.GRU(3, 4, bias=False)",
    'nn.RNN(3, 4, nonlinearity="relu")',
    "nn.LSTMCell(3, 4)",
    "nn.ReLU()",
    "nn.ReLU(inplace=True)",
    "nn.LeakyReLU(negative_slope=0.2, inplace=True)",
    'nn.GELU(approximate="tanh")',
    "nn.PReLU()",
    "nn.Softmax(dim=1)",
    "nn.Dropout(p=0.1)",
    "nn.MaxPool2d(2)",
    "nn.MaxPool2d(3, stride=2, padding=1)",
    "nn.AvgPool2d(2)",
    "nn.AdaptiveAvgPool2d((1, 1))",
    "nn.AdaptiveAvgPool2d((None, 3))",
    'nn.Upsample(scale_factor=2.0, mode="bilinear", align_corners=True)',
    "nn.Flatten()",
    "nn.Unflatten(1, (2, 2))",
    "nn.PixelShuffle(2)",
    "nn.ReflectionPad2d((1, 2, 3, 4))",
    'nn.ConstantPad2d(1, float("inf"))',
    "nn.Identity()",
    "nn.CrossEntropyLoss()",
    "nn.CrossEntropyLoss(weight=torch.empty(3), label_smoothing=0.1)",
    "nn.BCEWithLogitsLoss(pos_weight=torch.empty(()))",
    'nn.MSELoss(reduction="sum")',
    "nn.HuberLoss(delta=0.5)",
]


@pytest.mark.parametrize("source", SOURCES)
def test_a_layer_is_written_as_it_was_made(source: str) -> None:
    layer = eval(source, {"nn": nn, "torch": torch, "gemsc": gemsc, "float": float})
    assert layer_source(layer) == source
    assert layer_source(layer) == source  # looking changes nothing


def test_long_forms_become_short() -> None:
    layer = nn.Conv2d(3, 4, (3, 3), (1, 1), (1, 1), bias=True)
    assert layer_source(layer) == "nn.Conv2d(3, 4, kernel_size=3, padding=1)"
    assert layer_source(nn.MaxPool2d(2, 2)) == "nn.MaxPool2d(2)"


def test_eval_mode_and_further_attributes_do_not_matter() -> None:
    layer: Any = nn.Linear(2, 2).eval()
    layer._is_initialized = True
    layer.weight.requires_grad_(False)
    assert layer_source(layer) == "nn.Linear(2, 2)"


class Own(nn.Linear):
    pass


class Thin(nn.BatchNorm2d):
    """A layer whose class gives some settings, and changes nothing else."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3)


class Doubled(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Faster(nn.BatchNorm2d):
    momentum: Any = 0.5

    def train(self, mode: bool = True) -> Faster:
        return super().train(mode=False)


def test_a_class_that_changes_nothing_is_torchs_own() -> None:
    thin = Thin(3)
    plain = as_of_torch(thin)
    assert type(plain) is nn.BatchNorm2d
    assert layer_source(plain) == "nn.BatchNorm2d(3, eps=0.001)"
    assert plain.weight is thin.weight
    assert type(thin) is Thin
    unlike = [Doubled(3), Faster(3), nn.BatchNorm2d(3), nn.Sequential(nn.Linear(2, 2))]
    holding = Thin(3)
    holding.inner = nn.Linear(2, 2)
    for layer in [*unlike, holding]:
        assert as_of_torch(layer) is layer


def test_a_model_of_such_layers_has_running_statistics_of_all_micro_batches() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), Thin(3), nn.Conv2d(3, 2, 3))
    given = torch.randn(2, 1, 8, 8), torch.randn(2, 2, 4, 4)
    options: dict[str, Any] = {"ranks": 2, "micro_batches": 3}
    example: dict[str, Any] = {"example_target": given[1]}
    loss = nn.functional.mse_loss
    program = compile(model, given[:1], loss=loss, **example, **options)
    assert program.plan.unchecked == ""  # a step was compared
    files = program.rank_modules().values()
    assert any("nn.BatchNorm2d(3, eps=0.001)" in text for text in files)
    assert type(model[1]) is Thin


def with_hook() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *args: None)
    return layer


def with_own_forward() -> nn.Module:
    layer: Any = nn.Linear(2, 2)
    layer.forward = lambda x: x
    return layer


def with_further_parameter() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_parameter("extra", nn.Parameter(torch.ones(1)))
    return layer


def with_other_shape() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(torch.ones(3, 3))
    return layer


def with_mixed_dtypes() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.bias.data = layer.bias.data.double()
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        Own(2, 2),
        with_hook(),
        with_own_forward(),
        with_further_parameter(),
        with_other_shape(),
        with_mixed_dtypes(),
        nn.Sequential(),
        nn.Sequential(nn.Linear(2, 2)),
        nn.ModuleList(),
        nn.MultiheadAttention(4, 2),
        nn.TransformerEncoderLayer(4, 2),
        nn.LazyLinear(2),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        nn.TripletMarginWithDistanceLoss(distance_function=nn.PairwiseDistance()),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_what_cannot_be_written_exactly_is_not_written(layer: nn.Module) -> None:
    assert layer_source(layer) is None


def test_no_text_of_the_users_gets_into_the_expression() -> None:
    layer: Any = nn.Conv2d(3, 4, 3)
    layer.padding_mode = "zeros'); import os; ('"
    assert layer_source(layer) is None

    class Evil(float):
        def __repr__(self) -> str:
            return "__import__('os')"

    assert layer_source(nn.Dropout(Evil(0.25))) == "nn.Dropout(p=0.25)"
