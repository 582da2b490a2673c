"""The cases of single operators that the package onnx brings, on imported networks.

The cases feed everything as an input of the graph. A network has its weights, axes and
shapes inside, so a case is tried until it passes: as it is, with the inputs that are
not floating point as initializers with the case's numbers, and with all inputs but the
first so. Operators that make tensors of shapes, such as Range, have all of them known.
What passes once has passed; nothing may be wrong in any form. Half precision is
compared within two units in its last place, and what is drawn from a generator by its
shape and type.
"""

from __future__ import annotations

import functools
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from onnx.backend.test import loader
from onnx.backend.test.case.test_case import TestCase
from torch import Tensor, nn

from gemsc.errors import GemscError
from gemsc.importers.network import ImportedNetwork, ImportOptions, read
from gemsc.importers.onnx.operators import OPERATORS
from gemsc.importers.weight import Array
from gemsc.importers.write import model_source

__all__ = [
    "REFUSED",
    "Outcome",
    "cases",
    "group",
    "imported_module",
    "outcome",
    "reason",
    "tensor_of",
]

# Why a case may be refused: words of the errors
REFUSED = {
    "an operator that is not known": r"has operators that gemsc does not support: ",
    "a quantized file": r"is a quantized file",
    "types that PyTorch has not": r"has no numbers that PyTorch has|numbers of type",
    "unsigned arithmetic": r"which PyTorch only stores",
    "sequences": r"is not a tensor|Sequence '.*' (depends|takes|stacks)",
    "loops and conditions on data": r"(Loop|If) .* (runs a number|chooses|depends on)",
    "sizes that are open": r"has the shape .*\?",
    "known beforehand, but fed as data": r"needs a constant as input",
    "functions that cannot be inlined": r"its functions cannot be inlined|has no value|"
    "onnx cannot replace it by other operators",
    "a mask or indices as output": r"gives (its mask|the indices)",
    "outputs that training alone has": r"is not computed by any node",
    "caches of attention": r"keys of several lengths|looks at a window",
    "opset 1": r"has opset 1;",
    "recurrence that PyTorch has not": r"(GRU|LSTM|RNN) '.*PyTorch",
    "three axes where PyTorch has two": r"puts together 3 axes",
    "a padding that PyTorch has not": r"ConvTranspose .* less than",
    "no input": r"has no input",
}
# What an operator is, by its name; the others are arithmetic
GROUPS = {
    "convolutions, products, BatchNormalization": r"Conv(Transpose)?|Gemm|MatMul"
    r"|BatchNormalization",
    "LSTM, GRU, RNN": r"GRU|LSTM|RNN",
    "activations": r"Clip|Erf|Hardmax|HardSwish|Mish|Shrink|Swish|Tanh"
    r"|(Log)?Softmax|Soft(plus|sign)|(Hard)?Sigmoid|([CGS]?e|E)lu|.*Relu|PRelu",
    "pools": r".*Pool",
    "normalizations, Dropout": r".+Normalization|LRN|Dropout",
    "attention": r"Attention|RotaryEmbedding",
    "resizing": r"Resize|Upsample",
    "shapes, casts": r"BitCast|Cast(Like)?|Concat|DepthToSpace|Expand|EyeLike|Flatten"
    r"|Identity|Reshape|Slice|SpaceToDepth|Split|Tile|Transpose|Trilu|Where"
    r"|(Uns|S)queeze",
    "padding": r"Pad",
    "gathering, scattering": r"Compress|Gather.*|OneHot|ReverseSequence|Scatter.*",
    "reductions": r"Reduce.*|Arg(Max|Min)|TopK",
    "losses": r".*Loss",
    "grids, patches": r"AffineGrid|Col2Im|GridSample",
    "random numbers": r"Bernoulli|Random.*",
    "arithmetic, comparisons": "|".join(OPERATORS),
}
# whose results are drawn
DRAWN = re.compile(r"test_(bernoulli|training_dropout|.*multinomial)")
# what is known when the file is read, or refused
KNOWN = {"ConstantOfShape", "MelWeightMatrix", "Range"} | {
    f"{name}Window" for name in ("Blackman", "Hamming", "Hann")
}
UNIT = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Outcome:
    """What came of a case: passed, refused, wrong or raised; and the words of it."""

    kind: str
    words: str = ""


@functools.cache
def cases() -> dict[str, TestCase]:
    """Return the cases by name: of single operators, and small old files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they divide by zero when they are made
        loaded = loader.load_node_model_tests()
    for kind in ("pytorch-converted", "pytorch-operator", "simple"):
        loaded += [c for c in loader.load_model_tests(kind=kind) if c.model_dir]
    return {case.name: case for case in loaded}


def group(case: TestCase) -> str:
    """Return what kind of operator a case is about."""
    if case.model is None:
        return f"files: {case.kind}"
    plain = cases().get(re.sub(r"_expanded.*", "", case.name), case)
    kind = plain.model.graph.node[-1].op_type
    matching = (name for name, kinds in GROUPS.items() if re.fullmatch(kinds, kind))
    return next(matching, "others")


def reason(words: str) -> str | None:
    """Return why a case was refused; None for a reason that is not in the table."""
    return next((why for why, text in REFUSED.items() if re.search(text, words)), None)


def outcome(case: TestCase) -> Outcome:
    """Try a case in each of its forms."""
    refused = None
    kinds = {node.op_type for node in case.model.graph.node} if case.model else {""}
    for known in range(4 if kinds <= KNOWN else 3):
        tried = _tried(case, known)
        if tried.kind == "passed" or tried.kind in ("wrong", "raised"):
            return tried
        refused = refused or tried
    assert refused is not None
    return refused


def _tried(case: TestCase, known: int) -> Outcome:
    for model, inputs, wanted in _sets(case):
        try:
            form, given = _with_known(model, inputs, known)
            module = imported_module(form)
            with torch.no_grad():
                outputs = module(*map(tensor_of, given))
        except GemscError as error:
            return Outcome("refused", str(error))
        except Exception as error:  # that is what is looked for
            return Outcome("raised", f"{type(error).__name__}: {error}")
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        try:
            for one, other in zip(outputs[: len(wanted)], wanted, strict=True):
                _compare(case, one, _array(other))
        except AssertionError as error:
            return Outcome("wrong", str(error))
    return Outcome("passed")


def _compare(case: TestCase, ours: Tensor, wanted: Array) -> None:
    unit = UNIT.get(wanted.dtype.name, 0.0)
    assert ours.dtype == tensor_of(wanted).dtype, f"{ours.dtype}, not {wanted.dtype}"
    assert ours.shape == wanted.shape, f"{ours.shape}, not {wanted.shape}"
    if DRAWN.match(case.name):
        return
    one = ours.float().numpy() if ours.dtype is torch.bfloat16 else ours.numpy()
    other = wanted.astype(one.dtype) if wanted.dtype.name == "bfloat16" else wanted
    np.testing.assert_allclose(
        one, other, rtol=max(case.rtol, 2 * unit), atol=case.atol
    )


def _sets(case: TestCase) -> Iterator[tuple[onnx.ModelProto, list[Any], list[Any]]]:
    """Give the model, inputs and outputs of a case, as often as it has them."""
    if case.model is not None:
        for inputs, outputs in case.data_sets:
            yield case.model, list(inputs), list(outputs)
        return
    folder = Path(case.model_dir)
    model = onnx.load(folder / "model.onnx")
    for data in sorted(folder.glob("test_data_set_*")):
        yield model, _tensors(data, "input"), _tensors(data, "output")


def _tensors(folder: Path, kind: str) -> list[onnx.TensorProto]:
    files = sorted(folder.glob(f"{kind}_*.pb"), key=lambda p: int(p.stem.split("_")[1]))
    return [onnx.TensorProto.FromString(file.read_bytes()) for file in files]


def _array(value: Any) -> Array:
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value)


def _with_known(
    model: onnx.ModelProto, inputs: Sequence[Any], known: int
) -> tuple[onnx.ModelProto, list[Any]]:
    """Return the model with some inputs as initializers, and what is left of them."""
    form = onnx.ModelProto()
    form.CopyFrom(model)
    del form.graph.input[:]
    left = []
    # old files name their initializers as inputs, too: these come last
    pairs = zip(model.graph.input, inputs, strict=False)
    for index, (value, given) in enumerate(pairs):
        is_tensor = value.type.HasField("tensor_type") and given is not None
        array = _array(given) if is_tensor else None
        is_float = array is not None and (
            array.dtype.kind == "f" or array.dtype.name == "bfloat16"
        )
        held = known > 2 or (known == 2 and index > 0) or (known == 1 and not is_float)
        if array is not None and held and array.dtype.kind not in "OUS":
            form.graph.initializer.append(numpy_helper.from_array(array, value.name))
        else:
            form.graph.input.append(value)
            left.append(given)
    if not left and inputs:  # all is known, and a network takes something
        kind = onnx.TensorProto.FLOAT
        form.graph.input.append(helper.make_tensor_value_info("beside", kind, [2]))
        form.graph.output.append(helper.make_tensor_value_info("same", kind, [2]))
        form.graph.node.append(helper.make_node("Identity", ["beside"], ["same"]))
        left.append(np.zeros(2, np.float32))
    return form, left


def tensor_of(value: Any) -> Tensor:
    """Return an array as a tensor, bfloat16 included."""
    array = np.array(_array(value))
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def imported_module(model: onnx.ModelProto) -> nn.Module:
    """Return the network of the model.py that an import writes, in evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "case.onnx")
        path.write_bytes(model.SerializeToString())
        network = read(path, ImportOptions())
        space: dict[str, Any] = {"__name__": "case"}
        exec(compile(model_source(network, path.name, "0"), "model.py", "exec"), space)
        module: nn.Module = space[network.model.name]()
        module.load_state_dict(_weights(network, module), assign=True)
    return module.eval()


def _weights(network: ImportedNetwork, module: nn.Module) -> dict[str, Tensor]:
    state = {}
    for name, empty in module.state_dict().items():
        weight = network.model.weights.get(name)
        if weight is None:
            assert name.endswith("num_batches_tracked"), name
            state[name] = torch.zeros((), dtype=torch.int64)
            continue
        tensor = tensor_of(weight.made(network.tensors.read))
        assert tensor.shape == empty.shape, name
        state[name] = tensor.to(empty.dtype)
    return state
