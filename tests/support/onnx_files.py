"""ONNX files made in a test: nodes by hand, and models that torch.onnx exports."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gemsc.importers.folder import import_file
from gemsc.importers.network import ImportedNetwork, ImportOptions

onnx = pytest.importorskip("onnx")

__all__ = ["NEWER", "OLDER", "exported", "file_of", "imported", "network_of", "node"]

# both exporters of torch, so that BatchNormalization and all names are kept
NEWER: dict[str, Any] = {"dynamo": True, "optimize": False, "external_data": False}
OLDER: dict[str, Any] = {
    "dynamo": False,
    "training": torch.onnx.TrainingMode.PRESERVE,
    "do_constant_folding": False,
}
node = onnx.helper.make_node


def exported(
    model: nn.Module, inputs: Sequence[Tensor], path: Path, **how: Any
) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, tuple(inputs), path, verbose=False, **how)
    return path


def file_of(
    path: Path,
    nodes: Sequence[Any],
    inputs: dict[str, Sequence[int | str]],
    weights: dict[str, np.ndarray] | None = None,
    outputs: Sequence[str] = ("y",),
    opset: int = 20,
    kind: int = 1,  # onnx.TensorProto.FLOAT
) -> Path:
    helper = onnx.helper
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(n, kind, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, kind, None) for n in outputs],
        [onnx.numpy_helper.from_array(a, n) for n, a in (weights or {}).items()],
    )
    imports = [helper.make_opsetid("", opset)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), path)
    return path


def imported(
    path: Path, options: ImportOptions | None = None
) -> tuple[nn.Module, ImportedNetwork]:
    """Import a file; return what its model() gives, and the network."""
    folder = path.with_suffix("")
    network = import_file(path, folder, options or ImportOptions())
    return network_of(folder), network


def network_of(folder: Path) -> nn.Module:
    spec = importlib.util.spec_from_file_location("imported", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    network: nn.Module = module.model()
    return network
