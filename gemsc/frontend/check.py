"""Compare a traced graph with the user's model in eager mode."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from gemsc.base.nests import map_tensors, normalize_inputs, tensor_leaves
from gemsc.base.plain_forward import plain_forward
from gemsc.base.rng import preserve_rng
from gemsc.errors import GemscError, SourceLocation
from gemsc.frontend.eager import failures, set_training
from gemsc.frontend.fake_copy import LOSS
from gemsc.frontend.values import returned
from gemsc.ir.interpret import run_nodes
from gemsc.ir.meta import location
from gemsc.ir.program import Program

__all__ = ["check_against_eager"]

_SEED = 0
_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}
_GRADIENT = "the gradient of "
# A gradient that is zero but for rounding (a bias before a BatchNorm) has no scale of
# its own: it is also measured by this part of the largest gradient.
_NOISE = 0.1
_HALF_TOLERANCE = 1e-3


@dataclass
class _Results:
    """Everything that one step gives, under names for people."""

    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)
    locations: dict[str, SourceLocation | None] = field(default_factory=dict)


def check_against_eager(
    program: Program,
    model: nn.Module,
    inputs: Any,
    loss: Any = None,
    target: Any = None,
    *,
    training: bool = True,
) -> None:
    """Run one step of the graph and one of the model, on copies, and compare.

    Outputs, loss, the gradient of each parameter and each buffer after the step must
    be equal, bit for bit or within the rounding of the dtype. Activation checkpoints
    are off in the model, as they are in the program.

    Raises:
        GemscError: names the first thing that differs.
    """
    inputs = normalize_inputs(inputs)
    try:
        eager_model, eager_loss = copy.deepcopy((model, loss))
        graph_module = copy.deepcopy(_holder(program.module))
    except Exception as error:
        raise GemscError(
            f"the model cannot be copied: {type(error).__name__}: {error}",
            help="compile with --no-check",
        ) from error
    set_training(eager_model, eager_loss, training)
    _copy_flags(eager_model, eager_loss, graph_module)
    with preserve_rng(), torch.enable_grad(), plain_forward():
        code = check_against_eager.__code__
        with failures("the model fails in eager mode", code):
            fed = _copied(inputs), _copied(target)
            expected = _run_eager(eager_model, fed[0], eager_loss, fed[1])
        with failures("the traced graph fails", code):
            values = {"input": _copied(inputs), "target": _copied(target)}
            actual = _run_graph(program, graph_module, values)
    _compare(actual, expected)


def _holder(module: nn.Module) -> nn.Module:
    """Return the layers, parameters and buffers of a graph module without its graph."""
    holder = nn.Module()
    holder._modules.update(module._modules)
    holder._parameters.update(module._parameters)
    holder._buffers.update(module._buffers)
    return holder


def _copy_flags(model: nn.Module, loss: Any, graph_module: nn.Module) -> None:
    flags = {path: m.training for path, m in model.named_modules()}
    if isinstance(loss, nn.Module):
        modules = loss.named_modules(prefix=LOSS)
        flags |= {path: m.training for path, m in modules}
    for path, module in graph_module.named_modules():
        module.training = flags.get(path, module.training)


def _copied(values: Any) -> Any:
    def copied(path: object, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return map_tensors(values, copied)


def _run_eager(model: nn.Module, inputs: Any, loss: Any, target: Any) -> _Results:
    torch.manual_seed(_SEED)
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    outputs = tuple(returned(output).tensors)
    value = None
    if loss is not None:
        value = loss(output) if target is None else loss(output, target)
    results = _Results()
    _finish(results, outputs, value)
    _add_state(results, model, "")
    if isinstance(loss, nn.Module):
        _add_state(results, loss, f"{LOSS}.")
    return results


def _run_graph(program: Program, module: nn.Module, fed: Any) -> _Results:
    torch.manual_seed(_SEED)
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    tensors = dict(tensor_leaves(fed))
    values: dict[fx.Node, Any] = {
        placeholders[given.name]: tensors[given.path] for given in program.inputs
    }
    run_nodes(program.graph.nodes, values, module)
    results = _Results()
    for index, node in enumerate(program.outputs):
        results.locations[f"output {index}"] = location(node)
    if program.loss is not None:
        results.locations["the loss"] = location(program.loss)
    loss = None if program.loss is None else values[program.loss]
    _finish(results, tuple(values[node] for node in program.outputs), loss)
    _add_state(results, module, "")
    return results


def _finish(
    results: _Results, outputs: tuple[torch.Tensor, ...], loss: torch.Tensor | None
) -> None:
    """Keep the outputs and the loss, then run backward."""
    for index, output in enumerate(outputs):
        results.tensors[f"output {index}"] = output.detach().clone()
    if loss is not None:
        results.tensors["the loss"] = loss.detach().clone()
    else:
        floats = [o for o in outputs if o.requires_grad and not o.is_complex()]
        loss = sum((o.sum() for o in floats), start=torch.zeros(()))
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]


def _add_state(results: _Results, module: nn.Module, prefix: str) -> None:
    for name, parameter in module.named_parameters():
        results.tensors[f"{_GRADIENT}{prefix}{name}"] = parameter.grad
    for name, buffer in module.named_buffers():
        results.tensors[f"buffer {prefix}{name}"] = buffer


def _compare(actual: _Results, expected: _Results) -> None:
    gradients = (
        float(tensor.abs().max())
        for name, tensor in expected.tensors.items()
        if name.startswith(_GRADIENT) and tensor is not None and tensor.numel()
    )
    noise = _NOISE * max(gradients, default=0.0)
    for name, want in expected.tensors.items():
        floor = noise if name.startswith(_GRADIENT) else 0.0
        problem = _difference(actual.tensors.get(name), want, floor)
        if problem:
            raise GemscError(
                f"the traced graph does not reproduce the model: {name} {problem}",
                at=actual.locations.get(name),
                help="try --frontend export",
            )


def _difference(
    have: torch.Tensor | None, want: torch.Tensor | None, floor: float
) -> str | None:
    if have is None or want is None:
        return None if have is want else f"is {_word(have)} instead of {_word(want)}"
    if have.shape != want.shape or have.dtype != want.dtype:
        return (
            f"is {have.dtype} {list(have.shape)} instead of "
            f"{want.dtype} {list(want.shape)}"
        )
    if have.layout is not torch.strided:
        have, want = have.to_dense(), want.to_dense()
    if torch.equal(have, want):
        return None
    if not (want.is_floating_point() or want.is_complex()):
        return "differs"
    return _relative_difference(have, want, floor)


def _relative_difference(
    have: torch.Tensor, want: torch.Tensor, floor: float
) -> str | None:
    tolerance = _TOLERANCES.get(want.dtype, _HALF_TOLERANCE)
    if torch.allclose(have, want, rtol=0.0, atol=0.0, equal_nan=True):
        return None
    finite = torch.isfinite(want)
    if not torch.equal(finite, torch.isfinite(have)) or not finite.any():
        return "is finite in one and not in the other"
    scale = float(want[finite].abs().max())
    largest = float((have[finite] - want[finite]).abs().max())
    if largest <= tolerance * max(scale, floor):
        return None
    relative = largest / scale if scale else math.inf
    return f"differs by {relative:.1e} of its largest element"


def _word(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else "there"
