"""Compare a traced graph with the user's model, and find where the two part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gemsc.base.dtypes import Autocast, autocasting, nudge
from gemsc.base.nests import (
    as_loss,
    call_loss,
    call_model,
    normalize_inputs,
    tensor_leaves,
)
from gemsc.base.plain_forward import plain_forward
from gemsc.base.rng import SEEDED, preserve_rng
from gemsc.errors import GemscError, InternalError, SourceLocation
from gemsc.frontend.attention import attention_of
from gemsc.frontend.eager import deep_copy, detached, failures, in_mode, set_training
from gemsc.frontend.gradients import (
    Gradients,
    difference_of,
    gradient_distance,
    gradients_differ,
)
from gemsc.frontend.halves import loss_of_halves, of_two_samples
from gemsc.frontend.user_code import user_line
from gemsc.frontend.values import loss_fails_on, returned, unchanged
from gemsc.ir.holder import LOSS, attribute, hold
from gemsc.ir.interpret import run_node, run_nodes
from gemsc.ir.meta import location, region
from gemsc.ir.mutation import changed_by_layer, mutated_inputs
from gemsc.ir.opaque import opaques
from gemsc.ir.program import Program
from gemsc.ir.staged import random_nodes

_SEED = 7_193_402_156  # none of a user's, who may seed in forward with 0
_OWN_SEED = f"leave out torch.manual_seed and fork_rng: {SEEDED}"
# A gradient that is zero but for rounding (a bias before a BatchNorm) has no scale of
# its own: it is also measured by this part of the largest gradient.
_NOISE = 0.1
_ROUNDINGS = 16  # of gradients added in another order, under autocast
# A gradient may be off by twice what a last bit of the weights changes, up to a limit.
_NUDGES, _TWICE, _LIMIT = 3, 2.0, 1e-4
_Copies = tuple[nn.Module, Any, nn.Module]  # of model, loss and graph


@dataclass
class _Results:
    """Everything that one step gives, under names for people."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    locations: dict[str, SourceLocation | None] = field(default_factory=dict)
    frontend: str = "record"
    owners: dict[str, nn.Module] = field(default_factory=dict)
    gradients: Gradients = field(default_factory=Gradients)
    halves: str = ""
    first: set[str] = field(default_factory=set)

    def watch(self, prefix: str, owner: nn.Module) -> None:
        """Take the gradients of a module from now on, and the buffers it has."""
        self.owners[prefix] = owner
        self.first |= {name for name, _ in owner.named_buffers(prefix)}
        for name, parameter in owner.named_parameters(prefix):
            self.gradients.watch(name, parameter)

    @property
    def parameters(self) -> list[str]:
        """The names of all parameters."""
        pairs = self.owners.items()
        return [name for prefix, o in pairs for name, _ in o.named_parameters(prefix)]

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers as they are now, without what forward has made (a table)."""
        listed = (o.named_buffers(prefix) for prefix, o in self.owners.items())
        return {name: b for pairs in listed for name, b in pairs if name in self.first}


def check_against_eager(
    program: Program,
    model: nn.Module,
    inputs: Any,
    loss: Any = None,
    target: Any = None,
    *,
    training: bool = True,
) -> str:
    """Run one step of the graph and one of the model, on copies, and compare.

    Return how the loss of a batch is another one than that of its samples, or "".

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

    def copies() -> _Copies:
        return _copies(program, model, loss, shared, training)

    def fresh() -> nn.Module:
        (copied,) = deep_copy((model,), _memo(shared))
        set_training(copied, None, training)
        return copied  # type: ignore[no-any-return]

    eager_model, eager_loss, graph_module = copies()
    with preserve_rng(), torch.enable_grad(), plain_forward():
        code, autocast = check_against_eager.__code__, program.autocast
        with failures(f"the model fails {in_mode(training)}", code):
            fed = detached(inputs), detached(target)
            expected = _run_eager(eager_model, fed[0], eager_loss, fed[1], autocast)
        with failures("the traced graph fails", code):
            values = {"input": detached(inputs), "target": detached(target)}
            actual = _run_graph(program, graph_module, values)
    for name, parameter in shared.items():
        if parameter._version != versions[name]:
            raise InternalError(f"the model changes '{name}', which its graph does not")
    with preserve_rng(), torch.no_grad(), plain_forward():
        asked = None if expected.halves else loss
        two = of_two_samples(fresh, inputs, asked, target)
    pairs = (region(node).autocast for node in program.graph.nodes)
    least = _ROUNDINGS * max((torch.finfo(p[1]).eps for p in pairs if p), default=0.0)
    try:
        _compare(actual, expected, least)
        return two or expected.halves
    except GemscError as error:
        problem = error
    with preserve_rng(), torch.enable_grad(), plain_forward():
        node = _first_difference(program, copies(), inputs, target)
        if node is not None:
            raise GemscError(
                f"{problem.message}; the first value that differs is that of "
                f"'{node.name}'",
                at=location(node) or problem.at,
                help=_OWN_SEED if random_nodes(program, [node]) else problem.help,
            )
        nudged = []  # perhaps a backward that adds in another order
        for seed in range(_NUDGES):
            copied = _copies(program, model, loss, {}, training)
            gradients = _nudged_gradients(program, copied, inputs, target, seed)
            nudged.append(gradients)
    _compare(actual, expected, least, nudged)
    return two or expected.halves


def _nudged_gradients(
    program: Program, copies: _Copies, inputs: Any, target: Any, seed: int
) -> Gradients:
    """Return the model's gradients where its weights differ in their last bits."""
    model, loss, _ = copies
    nudge(model, seed)
    fed = detached(inputs), detached(target)
    return _run_eager(model, fed[0], loss, fed[1], program.autocast).gradients


def _copies(
    program: Program,
    model: nn.Module,
    loss: Any,
    shared: dict[str, nn.Parameter],
    training: bool,
) -> _Copies:
    """Return copies of the model, of its loss, and of what the graph calls."""
    eager_model, eager_loss = deep_copy((model, loss), _memo(shared))
    hold(holder := nn.Module(), program.module)
    (graph_module,) = deep_copy((holder,), _memo(shared))
    set_training(eager_model, eager_loss, training)
    _copy_flags(eager_model, eager_loss, graph_module)
    for path, module in graph_module.named_modules() if training else ():
        module.training = path not in program.frozen  # as forward may set it, and ranks
    return eager_model, eager_loss, graph_module


def _first_difference(
    program: Program, copies: _Copies, inputs: Any, target: Any
) -> fx.Node | None:
    """Return the first node that computes what no call at its line does in eager."""
    model, loss, module = copies
    lines = _ValuesByLine(_forward.__code__)
    with lines.noting():
        _forward(model, detached(inputs), loss, detached(target), program.autocast)
    torch.manual_seed(_SEED)
    values = _fed(program, {"input": detached(inputs), "target": detached(target)})
    node: fx.Node
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        values[node] = run_node(node, values, module)
        at = location(node)
        if node.op == "get_attr" or at is None or at not in lines.sums:
            continue
        for tensor in _tensors(pytree.tree_leaves(values[node])):
            mine = _sum(tensor)
            if not any(_alike(mine, theirs) for theirs in lines.sums[at]):
                return node
    return None


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


def _copy_flags(model: nn.Module, loss: Any, graph_module: nn.Module) -> None:
    flags = {path: m.training for path, m in model.named_modules()}
    if isinstance(loss, nn.Module):
        modules = loss.named_modules(prefix=LOSS)
        flags |= {path: m.training for path, m in modules}
    for path, module in graph_module.named_modules():
        module.training = flags.get(path, module.training)


def _run_eager(
    model: nn.Module, inputs: Any, loss: Any, target: Any, autocast: Autocast | None
) -> _Results:
    results = _Results()
    results.watch("", model)
    if isinstance(loss, nn.Module):
        results.watch(LOSS, loss)
    output, value = _forward(model, inputs, loss, target, autocast)
    _finish(results, tuple(returned(output).tensors), value)
    if loss is not None:
        size = next((len(x) for _, x in tensor_leaves(inputs) if x.shape), 1)
        with autocasting(autocast):
            results.halves = loss_of_halves(loss, output, target, size)
    return results


def _forward(
    model: nn.Module, inputs: Any, loss: Any, target: Any, autocast: Autocast | None
) -> tuple[Any, Any]:
    """Return what the model gives, and the loss."""
    torch.manual_seed(_SEED)
    with autocasting(autocast):
        output = call_model(model, inputs)
        if loss is None:
            return output, None
        arguments = (output,) if target is None else (output, target)
        what, given = loss_fails_on(*arguments), returned(output).tensors
        with failures(what, _forward.__code__), unchanged(given, loss):
            return output, as_loss(call_loss(loss, output, target))


def _run_graph(program: Program, module: nn.Module, fed: Any) -> _Results:
    results = _Results()
    results.watch("", module)
    targets = (node.target for node in program.graph.nodes)
    if any(isinstance(target, torch._ops.OpOverload) for target in targets):
        results.frontend = "export"  # its nodes are ATen operators
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
    return {placeholders[given.name]: tensors[given.path] for given in program.inputs}


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
        loss.sum().backward()  # type: ignore[no-untyped-call]


def _compare(
    actual: _Results,
    expected: _Results,
    least: float,
    nudged: Sequence[Gradients] = (),
) -> None:
    """Raise if a number is off by more than `least` and what its dtype rounds.

    A gradient may be off by twice as much as those of `nudged` weights.
    """
    have, want = actual.gradients, expected.gradients

    @cache
    def noise() -> float:
        return _NOISE * max((want.largest(name) for name in want), default=0.0)

    for name, tensor in expected.tensors.items():
        _report(name, difference_of(actual.tensors.get(name), tensor, least), actual)
    for name in expected.parameters:
        moved = max(
            (gradient_distance(nudge, want, name) for nudge in nudged), default=0.0
        )
        allowed = max(least, min(_LIMIT, _TWICE * moved))
        problem = gradients_differ(have, want, name, allowed, noise)
        _report(f"the gradient of {name}", problem, actual)
    buffers = actual.buffers
    for name, buffer in expected.buffers.items():
        problem = difference_of(buffers.get(name), buffer, least)
        _report(f"buffer {name}", problem, actual)


def _report(name: str, problem: str | None, actual: _Results) -> None:
    if problem:
        advice = "try --frontend record, which keeps the backward of custom functions"
        if actual.frontend == "record":
            advice = "try --frontend export"
            if name.startswith("the gradient of"):
                advice += "; in a checkpoint of its own, the model must draw the same "
                advice += "numbers (dropout) twice, as torch.utils.checkpoint does"
        raise GemscError(
            f"the traced graph does not reproduce the model: {name} {problem}",
            at=actual.locations.get(name),
            help=advice,
        )


_ENOUGH = 1e-4  # of a sum's size: what is wrong is off by more, roundings by less


class _ValuesByLine(TorchFunctionMode):
    """Sums up what each of the user's lines computes with functions and modules.

    A value is known by its shape and the sum of its absolute elements, taken at once:
    it may be overwritten later. `boundary` is the code that calls the model.
    """

    def __init__(self, boundary: CodeType) -> None:
        super().__init__()
        self.boundary = boundary
        self.sums: dict[SourceLocation, list[_Sum]] = defaultdict(list)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (attention := attention_of(func, args, kwargs or {})) is not None:
            with self:  # as it is traced
                return attention()
        result = func(*args, **(kwargs or {}))
        self._note((result, args[:1]))  # what was written to is a result, too
        return result

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is computed until the end."""
        hook = register_module_forward_hook(lambda *call: self._note(call[2]))
        try:
            with self:
                yield
        finally:
            hook.remove()

    def _note(self, result: Any) -> None:
        line = user_line(self.boundary)
        if line is not None:
            leaves = _tensors(pytree.tree_leaves(result))
            with torch._C.DisableTorchFunction():
                self.sums[line.location] += map(_sum, leaves)


_Sum = tuple[tuple[int, ...], float]


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _sum(tensor: Tensor) -> _Sum:
    plain = tensor.detach()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return tuple(tensor.shape), float(plain.double().abs().sum())


def _alike(mine: _Sum, theirs: _Sum) -> bool:
    (shape, one), (other_shape, other) = mine, theirs
    return shape == other_shape and (
        one == other or abs(one - other) <= _ENOUGH * max(one, other)
    )
