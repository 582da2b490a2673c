"""A PyTorch model as an ONNX file: what torch.onnx makes of it, in evaluation.

Parameters keep their names and BatchNormalization stays a node of its own: optimizing,
torch.onnx would fold it into the convolution before it, under that one's name.
"""

from __future__ import annotations

import functools
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ShapesCollection

from gemsc.base.nests import Inputs, call_model, normalize_inputs, tensor_leaves
from gemsc.errors import GemscError, SourceLocation
from gemsc.frontend.user_code import is_user_file, printed_line
from gemsc.frontend.values import input_names
from gemsc.importers.network import distance

BATCH = "batch"  # the name of the size that the file leaves open
_NEEDED = ("onnx", "onnxscript")


def export_onnx(model: nn.Module, inputs: object, path: Path) -> list[str]:
    """Write a model with its weights as it is in evaluation; return notes to the user.

    `inputs` is one micro-batch; its size is left open where the model allows that.
    Weights of more than 2 GB are in a second file beside it, `path`.data.

    Raises:
        GemscError: a package is missing, or torch.onnx cannot write the model; with
            the user's line where that is known.
    """
    for package in _NEEDED:
        if find_spec(package) is None:
            raise GemscError(
                f"an ONNX file needs the package {package}, which is not installed",
                help="pip install 'gemsc[onnx]'",
            )
    given = normalize_inputs(inputs)
    with torch.no_grad():
        outputs = dict(_named(call_model(model.eval(), given)))
    leaves = (tensor for _, tensor in tensor_leaves(given))
    batch = next((tensor.shape[0] for tensor in leaves if tensor.dim()), None)
    reason = "forward fixes their size"
    try:
        program = _program(model, given, outputs, batch)
    except Exception as error:  # of torch's own tracing, of any kind
        try:
            program = _program(model, given, outputs, None)
        except Exception:
            raise _refused(error) from error
        reason = _reason(error)
    _save(program, path)
    is_open = any(not value.shape.is_static() for value in program.model.graph.inputs)
    note = f"the file takes batches of {batch} alone: {reason}"
    return [*[note] * (not is_open), *_compared(program, given, outputs)]


def _named(output: object) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with their keys and numbers as names."""
    for path, tensor in tensor_leaves(output):
        keyed = bool(path) and not isinstance(path[0], int)
        words = path if keyed else ("output", *path)
        yield re.sub(r"\W", "_", "_".join(map(str, words))), tensor


def _program(
    model: nn.Module, given: Inputs, outputs: Mapping[str, Tensor], batch: int | None
) -> Any:
    """Return what torch.onnx makes of it; `batch` is the size that is left open."""
    name_of = input_names(model, given)
    names = [name_of(("input", *path)) for path, _ in tensor_leaves(given)]
    positional = () if isinstance(given, dict) else given
    keywords = given if isinstance(given, dict) else None
    make: Any = ShapesCollection
    shapes, sizes = make(), {0: Dim(BATCH)}
    for _, tensor in tensor_leaves(given):
        if tensor.dim() and tensor.shape[0] == batch:
            shapes[tensor] = sizes
    # an input that is given back has another name as an output
    gives = [f"{name}_out" if name in names else name for name in outputs]
    with _quiet(), _giving_tensors(model):
        given_shapes = shapes.dynamic_shapes(model, positional, keywords)
        return torch.onnx.export(
            model,
            positional,
            kwargs=keywords,
            input_names=names,
            output_names=gives,
            dynamic_shapes=given_shapes if batch is not None else None,
            dynamo=True,
            optimize=False,
            verbose=False,
        )


@contextmanager
def _giving_tensors(model: nn.Module) -> Iterator[None]:
    """Let forward return its tensors alone, in a tuple, whatever they were in.

    It is the model itself that is exported: a module around it would be in all names.
    """
    attributes, forward = vars(model), model.forward
    before = attributes.get("forward")

    @functools.wraps(forward)
    def tensors(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        # of an input, a copy: else the output's name would be the input's
        taken = {id(tensor) for _, tensor in tensor_leaves((args, kwargs))}
        leaves = (tensor for _, tensor in tensor_leaves(forward(*args, **kwargs)))
        return tuple(t.clone() if id(t) in taken else t for t in leaves)

    attributes["forward"] = tensors
    try:
        yield
    finally:
        del attributes["forward"]
        if before is not None:
            attributes["forward"] = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch.onnx from talking: what matters is in its errors."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _refused(error: Exception) -> GemscError:
    places = (at for cause in _causes(error) for at in _places(cause))
    return GemscError(
        f"torch.onnx cannot write the model: {_reason(error)}",
        at=next(places, None),
        help="write that line with other operations, or export --to safetensors",
    )


def _causes(error: BaseException) -> list[BaseException]:
    """Return what an error comes from, the first cause first, and the error itself."""
    above = error.__cause__
    return [*(_causes(above) if above is not None else []), error]


def _reason(error: BaseException) -> str:
    """Return what the first cause says, without advice and addresses."""
    text = str(_causes(error)[0]).split("\n\n")[0]
    text = re.split(r"Failure message|For more information|\(Size-like", text)[0]
    text = re.sub(r"<OpOverload\(op='([\w.]+)'.*?\)>", r"\1", text)
    return " ".join(text.split()).rstrip(".")


def _places(error: BaseException) -> Iterator[SourceLocation]:
    """Yield lines of the user's that an error is about, the innermost first."""
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        node = frame.f_locals.get("node")
        if isinstance(node, fx.Node):
            at = printed_line(node.meta.get("stack_trace") or "")
            if at is not None:
                yield at
        code = frame.f_code
        if code.co_name == "forward" and is_user_file(code.co_filename):
            yield SourceLocation(code.co_filename, line)


def _save(program: Any, path: Path) -> None:
    """Write the file, or both of them, and put them in their place once complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        program.save(Path(folder) / path.name)
        files = sorted(Path(folder).iterdir(), key=lambda file: file.name == path.name)
        for file in files:  # the one that names the other comes last
            file.replace(path.parent / file.name)


def _compared(
    program: Any, given: Inputs, outputs: Mapping[str, Tensor]
) -> Iterator[str]:
    """Say by how much onnxruntime's outputs differ, if it is installed."""
    if find_spec("onnxruntime") is None:
        return
    try:
        with _quiet():
            leaves = [tensor for _, tensor in tensor_leaves(given)]
            computed = program(*leaves)
    except Exception as error:  # of a package that is only asked for its opinion
        yield f"onnxruntime cannot run it: {str(error).splitlines()[0]}"
        return
    pairs = zip(computed, outputs.values(), strict=True)
    worst = max(distance(mine, wanted.double()) for mine, wanted in pairs)
    yield f"onnxruntime computes the same within {worst:.0e} of the largest value"
