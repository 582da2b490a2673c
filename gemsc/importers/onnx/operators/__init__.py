"""The operators by name: a function for each."""

from __future__ import annotations

from collections.abc import Mapping

from gemsc.importers.onnx.node import Operator
from gemsc.importers.onnx.operators.activation import ACTIVATIONS
from gemsc.importers.onnx.operators.arithmetic import ARITHMETIC
from gemsc.importers.onnx.operators.attention import ATTENTION
from gemsc.importers.onnx.operators.indexing import INDEXING
from gemsc.importers.onnx.operators.loss import LOSSES
from gemsc.importers.onnx.operators.normalization import NORMALIZATIONS
from gemsc.importers.onnx.operators.pad import PADS
from gemsc.importers.onnx.operators.pool import POOLS
from gemsc.importers.onnx.operators.random import RANDOM
from gemsc.importers.onnx.operators.recurrent import RECURRENT
from gemsc.importers.onnx.operators.reduce import REDUCTIONS
from gemsc.importers.onnx.operators.resize import RESIZES
from gemsc.importers.onnx.operators.shape import SHAPES
from gemsc.importers.onnx.operators.vision import VISION
from gemsc.importers.onnx.operators.weighted import WEIGHTED

__all__ = ["OPERATORS"]

OPERATORS: Mapping[str, Operator] = {
    **ACTIVATIONS,
    **ARITHMETIC,
    **ATTENTION,
    **INDEXING,
    **LOSSES,
    **NORMALIZATIONS,
    **PADS,
    **POOLS,
    **RANDOM,
    **RECURRENT,
    **REDUCTIONS,
    **RESIZES,
    **SHAPES,
    **VISION,
    **WEIGHTED,
}
