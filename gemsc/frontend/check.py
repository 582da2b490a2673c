"""Compare a traced graph with the user's model in eager mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from gemsc.base.dtypes import Autocast, autocasting
from gemsc.base.nests import map_tensors, normalize_inputs, tensor_leaves
from gemsc.base.plain_forward import plain_forward
from gemsc.base.rng import preserve_rng
from gemsc.errors import GemscError, InternalError, SourceLocation
from gemsc.frontend.difference import ValuesByLine, first_difference
from gemsc.frontend.eager import deep_copy, failures, in_mode, set_training
from gemsc.frontend.fake_copy import LOSS
from gemsc.frontend.gradients import Gradients, chunks_of
from gemsc.frontend.values import returned
from gemsc.ir.holder import attribute
from gemsc.ir.interpret import run_nodes
from gemsc.ir.meta import location
from gemsc.ir.mutation import changed_by_layer, mutated_inputs
from gemsc.ir.opaque import opaques
from gemsc.ir.program import Program

_SEED = 0
_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-7}
# A gradient that is zero but for rounding (a bias before a BatchNorm) has no scale of
# its own: it is also measured by this part of the largest gradient.
_NOISE = 0.1
_HALF_TOLERANCE = 1e-3  # a last bit of float16; above, one of bfloat16
_ROUNDINGS = 16  # of gradients added in another order, under autocast


@dataclass
class _Results:
    """Everything that one step gives, under names for people."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    locations: dict[str, SourceLocation | None] = field(default_factory=dict)
    owners: dict[str, nn.Module] = field(default_factory=dict)
    gradients: Gradients = field(default_factory=Gradients)

    def watch(self, prefix: str, owner: nn.Module) -> None:
        """Take the gradients of a module from now on."""
        self.owners[prefix] = owner
        for name, parameter in owner.named_parameters(prefix):
            self.gradients.watch(name, parameter)

    @property
    def parameters(self) -> list[str]:
        """The names of all parameters."""
        pairs = self.owners.items()
        return [name for prefix, o in pairs for name, _ in o.named_parameters(prefix)]

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers as they are now."""
        pairs = self.owners.items()
        return {name: b for prefix, o in pairs for name, b in o.named_buffers(prefix)}


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
    are off in the model, as they are in the program. The copies share the memory of
    parameters that nothing writes to, and gradients wait in a file: it takes the
    memory of one step's activations and of the largest gradient.

    Raises:
        GemscError: names the first thing that differs.
    """
    inputs = normalize_inputs(inputs)
    shared = _shared(program)
    versions = {name: parameter._version for name, parameter in shared.items()}

    def copies() -> tuple[nn.Module, Any, nn.Module]:
        return _copies(program, model, loss, shared, training)

    eager_model, eager_loss, graph_module = copies()
    with preserve_rng(), torch.enable_grad(), plain_forward():
        code = check_against_eager.__code__
        with failures(f"the model fails {in_mode(training)}", code):
            fed = _copied(inputs), _copied(target)
            autocast = program.autocast
            expected = _run_eager(eager_model, fed[0], eager_loss, fed[1], autocast)
        with failures("the traced graph fails", code):
            values = {"input": _copied(inputs), "target": _copied(target)}
            actual = _run_graph(program, graph_module, values)
    for name, parameter in shared.items():
        if parameter._version != versions[name]:
            raise InternalError(f"the model changes '{name}', which its graph does not")
    lower = program.autocast[1] if program.autocast is not None else None
    least = _ROUNDINGS * torch.finfo(lower).eps if lower else 0.0
    try:
        _compare(actual, expected, least)
    except GemscError as error:
        with preserve_rng(), torch.enable_grad(), plain_forward():
            node = _first_difference(program, copies(), inputs, target)
        if node is None:
            raise
        raise GemscError(
            f"{error.message}; the first value that differs is that of '{node.name}'",
            at=location(node) or error.at,
            help=error.help,
        ) from None


def _copies(
    program: Program,
    model: nn.Module,
    loss: Any,
    shared: dict[str, nn.Parameter],
    training: bool,
) -> tuple[nn.Module, Any, nn.Module]:
    """Return copies of the model, of its loss, and of what the graph calls."""
    eager_model, eager_loss = deep_copy((model, loss), _memo(shared))
    (graph_module,) = deep_copy((_holder(program.module),), _memo(shared))
    set_training(eager_model, eager_loss, training)
    _copy_flags(eager_model, eager_loss, graph_module)
    return eager_model, eager_loss, graph_module


def _first_difference(
    program: Program,
    copies: tuple[nn.Module, Any, nn.Module],
    inputs: Any,
    target: Any,
) -> fx.Node | None:
    """Return the first node that computes what no call at its line does in eager."""
    model, loss, module = copies
    lines = ValuesByLine(_forward.__code__)
    with lines.noting():
        _forward(model, _copied(inputs), loss, _copied(target), program.autocast)
    torch.manual_seed(_SEED)
    values = _fed(program, {"input": _copied(inputs), "target": _copied(target)})
    return first_difference(program.graph.nodes, module, values, lines.found)


def _shared(program: Program) -> dict[str, nn.Parameter]:
    """Return the parameters that no forward writes to: their copies need no memory."""
    module = program.module
    written = {
        id(attribute(module, str(source.target)))
        for node in program.graph.nodes
        for source in map(_source, mutated_inputs(node, module))
        if source.op == "get_attr"
    }
    for node in program.graph.nodes:
        names = changed_by_layer(node, module)
        written |= {id(attribute(module, name)) for name in names}
    for opaque in opaques(module).values():
        written |= {id(parameter) for parameter in opaque.module.parameters()}
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if type(parameter) is nn.Parameter and id(parameter) not in written
    }


def _source(node: fx.Node) -> fx.Node:
    """Return the tensor that a value may be a view of."""
    while node.op.startswith("call_") and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _memo(shared: dict[str, nn.Parameter]) -> dict[int, Any]:
    """Return what `deepcopy` takes for these parameters: others on the same memory."""
    memo: dict[int, Any] = {}
    for parameter in shared.values():
        new = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        new.__dict__.update(parameter.__dict__)
        memo[id(parameter)] = new
    return memo


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


def _run_eager(
    model: nn.Module, inputs: Any, loss: Any, target: Any, autocast: Autocast | None
) -> _Results:
    results = _Results()
    results.watch("", model)
    if isinstance(loss, nn.Module):
        results.watch(LOSS, loss)
    output, value = _forward(model, inputs, loss, target, autocast)
    _finish(results, tuple(returned(output).tensors), value)
    return results


def _forward(
    model: nn.Module, inputs: Any, loss: Any, target: Any, autocast: Autocast | None
) -> tuple[Any, Any]:
    """Return what the model gives, and the loss."""
    torch.manual_seed(_SEED)
    with autocasting(autocast):
        output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        if loss is None:
            return output, None
        return output, loss(output) if target is None else loss(output, target)


def _run_graph(program: Program, module: nn.Module, fed: Any) -> _Results:
    results = _Results()
    results.watch("", module)
    torch.manual_seed(_SEED)
    values, kept = _fed(program, fed), {program.loss, *program.outputs}
    last_use = {n: node for node in program.graph.nodes for n in node.all_input_nodes}
    for node in program.graph.nodes:
        run_nodes([node], values, module)
        for source in node.all_input_nodes:
            if last_use[source] is node and source not in kept:
                values.pop(source, None)
    for index, node in enumerate(program.outputs):
        results.locations[f"output {index}"] = location(node)
    if program.loss is not None:
        results.locations["the loss"] = location(program.loss)
    loss = None if program.loss is None else values[program.loss]
    outputs = tuple(values[node] for node in program.outputs)
    values.clear()
    _finish(results, outputs, loss)
    return results


def _fed(program: Program, fed: Any) -> dict[fx.Node, Any]:
    """Return the values of the placeholders."""
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    tensors = dict(tensor_leaves(fed))
    return {placeholders[each.name]: tensors[each.path] for each in program.inputs}


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


def _compare(actual: _Results, expected: _Results, least: float) -> None:
    """Raise if a number is off by more than `least` and what its dtype rounds."""
    have, want = actual.gradients, expected.gradients

    @cache
    def noise() -> float:
        return _NOISE * max((want.largest(name) for name in want), default=0.0)

    for name, tensor in expected.tensors.items():
        _report(name, _difference(actual.tensors.get(name), tensor, least), actual)
    for name in expected.parameters:
        problem = _unlike(have, want, name, least, noise)
        _report(f"the gradient of {name}", problem, actual)
    buffers = actual.buffers
    for name, buffer in expected.buffers.items():
        _report(f"buffer {name}", _difference(buffers.get(name), buffer, least), actual)


def _report(name: str, problem: str | None, actual: _Results) -> None:
    if problem:
        raise GemscError(
            f"the traced graph does not reproduce the model: {name} {problem}",
            at=actual.locations.get(name),
            help="try --frontend export",
        )


def _difference(
    have: torch.Tensor | None, want: torch.Tensor, least: float
) -> str | None:
    if have is None:
        return "is missing instead of there"
    kinds = ((tensor.dtype, tuple(tensor.shape)) for tensor in (have, want))
    return _other_kind(*kinds) or _other_numbers(
        lambda: chunks_of(have), lambda: chunks_of(want), want.dtype, least
    )


def _unlike(
    have: Gradients,
    want: Gradients,
    name: str,
    least: float,
    floor: Callable[[], float],
) -> str | None:
    if name not in have or name not in want:
        words = [("missing", "there")[name in each] for each in (have, want)]
        return None if words[0] == words[1] else f"is {words[0]} instead of {words[1]}"
    return _other_kind(have.kind(name), want.kind(name)) or _other_numbers(
        lambda: have.chunks(name),
        lambda: want.chunks(name),
        want.kind(name)[0],
        least,
        floor,
    )


_Kind = tuple[torch.dtype, tuple[int, ...]]
_Chunks = Callable[[], Iterator[torch.Tensor]]


def _other_kind(have: _Kind, want: _Kind) -> str | None:
    if have == want:
        return None
    return f"is {have[0]} {list(have[1])} instead of {want[0]} {list(want[1])}"


def _other_numbers(
    have: _Chunks,
    want: _Chunks,
    dtype: torch.dtype,
    least: float,
    floor: Callable[[], float] = lambda: 0.0,
) -> str | None:
    """Compare the numbers, chunk by chunk; say by how much they differ."""
    if all(map(torch.equal, have(), want())):
        return None
    if not (dtype.is_floating_point or dtype.is_complex):
        return "differs"
    is_equal, are_finite, scale, largest = True, True, -math.inf, 0.0
    for mine, theirs in zip(have(), want(), strict=True):
        finite = theirs.isfinite()
        is_equal &= torch.allclose(mine, theirs, rtol=0.0, atol=0.0, equal_nan=True)
        are_finite &= torch.equal(finite, mine.isfinite())
        if finite.any():
            scale = max(scale, float(theirs[finite].abs().max()))
            largest = max(largest, float((mine - theirs)[finite].abs().max()))
    if is_equal:
        return None
    if not are_finite or scale < 0:
        return "is finite in one and not in the other"
    tolerance = max(least, _TOLERANCES.get(dtype, _HALF_TOLERANCE))
    if largest <= tolerance * max(scale, floor()):
        return None
    relative = largest / scale if scale else math.inf
    return f"differs by {relative:.1e} of its largest element"
