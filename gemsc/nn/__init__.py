"""Layers that PyTorch has not; the compiler knows them as it knows torch.nn's."""

from __future__ import annotations

from gemsc.nn.batchnorm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    FrozenBatchNorm,
)

__all__ = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "FrozenBatchNorm"]
