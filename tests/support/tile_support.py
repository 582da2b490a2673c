"""Run a lowered program on threads, one per tile, and compare it with the model."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from program_support import run_passes
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from gemsc.base.boxes import everything
from gemsc.base.grid_shape import GridShape
from gemsc.base.parts import Part
from gemsc.frontend.record import record
from gemsc.ir import meta
from gemsc.ir.holder import attribute
from gemsc.ir.interpret import run_nodes
from gemsc.ir.program import Barrier, Block, Program, Stage
from gemsc.ir.shape_grid import ShapeGrid
from gemsc.passes.annotate import Annotate
from gemsc.passes.canonicalize import Canonicalize
from gemsc.passes.find_halos import FindHalos
from gemsc.passes.overlap_halos import OverlapHalos
from gemsc.passes.split_tiles import SplitTiles
from gemsc.runtime.memory.meter import saved_in_parts
from gemsc.runtime.tiles.grid import Grid
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.streams import Streams

TOLERANCE = 1e-9
SMALL = 1e-3  # inputs are drawn of size 1: a smaller output may be rounding alone


class Function(nn.Module):
    """A convolution, a function, and a factor: gradients differ from place to place."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.conv(x)).sin()


@dataclass
class Step:
    """All that one step gives: put together from the tiles, or by the model alone."""

    loss: Tensor
    outputs: list[Tensor]
    inputs: dict[str, Tensor]  # gradients
    parameters: dict[str, Tensor]  # gradients
    buffers: dict[str, Tensor]
    programs: list[Program] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)  # bytes kept for backward, by tile
    terms: dict[str, float] = field(default_factory=dict)  # of gradients' sums

    @property
    def is_finite(self) -> bool:
        """Whether there is something to compare with."""
        tensors = (self.loss, *self.inputs.values(), *self.parameters.values())
        return all(bool(value.isfinite().all()) for value in tensors)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return self.programs[0].barriers


def uneven_loss(output: Tensor) -> Tensor:
    """Return a loss to which every element counts in a way of its own."""
    weights = torch.arange(1.0, output.numel() + 1, dtype=output.dtype)
    return (output * weights.view(output.shape).cos()).sum() + output.square().mean()


def one_stage(program: Program) -> Program:
    """Return a traced program as a single stage."""
    nodes = program.compute_nodes
    block = Block(0, "all", nodes)
    return replace(program, blocks=(block,), stages=(Stage(0, (block,)),))


def eager(model: nn.Module, inputs: tuple[Any, ...], loss: Any, target: Any) -> Step:
    """Run one step of the model itself."""
    model = copy.deepcopy(model)
    leaves = [_leaf(tensor) for tensor in inputs]
    terms = _count_terms(model)
    output = model(*leaves)
    value = loss(output) if target is None else loss(output, target)
    value.backward()
    return Step(
        value.detach(),
        [t.detach() for t in pytree.tree_leaves(output) if isinstance(t, Tensor)],
        {str(i): t.grad for i, t in enumerate(leaves) if t.grad is not None},
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        dict(model.named_buffers()),
        terms=terms,
    )


def _count_terms(model: nn.Module) -> dict[str, float]:
    """Return what will hold the sum of |terms| of each layer's gradients, on average.

    Where the terms cancel, before a norm or a softmax for instance, all that is left is
    rounding, which grows with the terms and not with their sum. Those of a bias are the
    gradients of the layer's result, those of a weight have inputs as factors.
    """
    terms: dict[str, float] = defaultdict(float)
    largest: dict[nn.Module, float] = {}

    def forward(layer: nn.Module, inputs: Any, output: Any) -> None:
        largest[layer] = max(1.0, float(inputs[0].detach().abs().max()))

    def backward(layer: nn.Module, inputs: Any, outputs: Any) -> None:
        for name, parameter in layer.named_parameters(recurse=False):
            factor = 1.0 if name == "bias" else largest[layer]
            mean = float(outputs[0].abs().sum()) / len(parameter)
            terms[f"{names[layer]}.{name}"] += factor * mean

    names = {layer: name for name, layer in model.named_modules() if layer._parameters}
    for layer in names:
        layer.register_forward_hook(forward)
        layer.register_full_backward_hook(backward)
    return terms


def on_tiles(
    model: nn.Module,
    inputs: tuple[Any, ...],
    loss: Any,
    target: Any,
    grid: tuple[int, ...],
    *,
    facts: bool = False,
    fuse: int = 0,
    overlaps: bool = False,
    rings: bool = False,
) -> Step:
    """Run one step on the tiles of a grid, each a thread; put the parts together.

    With `facts` the tiles' programs are annotated: that takes longer. `fuse`
    is how many layers may share one wide halo; with `overlaps` every halo that can
    travels while the inner part of its layer is computed.
    """
    traced = record(model, inputs, loss=loss, target=target)
    program = one_stage(run_passes(traced, (Canonicalize(),)))
    program = run_passes(program, (FindHalos((GridShape(grid),), fuse),))
    count = prod(grid)
    more = (Annotate(),) if facts else ()
    passes = [
        (SplitTiles((GridShape(grid),), tile, rings=rings), *more)
        for tile in range(count)
    ]
    programs = [run_passes(program, of_tile) for of_tile in passes]
    if overlaps:
        programs = [OverlapHalos().apply(tiled) for tiled in programs]
    return on_ranks(program, programs, inputs, target)


def on_ranks(
    program: Program, programs: list[Program], inputs: tuple[Any, ...], target: Any
) -> Step:
    """Run the programs of the ranks of a grid on threads; put their parts together.

    They were lowered from `program`, whose parameters they start with.
    """
    count = len(programs)
    feed = {"input": inputs, "target": target}
    modules = [_own_module(tiled, program.module) for tiled in programs]

    def main(transport: Any) -> dict[str, Any]:
        tile = transport.rank
        link = DeviceTransport(transport, Streams())
        with _on_grid(programs[tile], Grid(link, tuple(range(count)), tile)):
            return _run(programs[tile], modules[tile], feed, count, tile)

    parts = run_local(count, main, timeout=120)
    result = Step(
        parts[0]["loss"],
        [_joined(programs, node, i, parts) for i, node in enumerate(program.outputs)],
        {},
        {},
        {},
        programs,
        [part["saved"] for part in parts],
    )
    for tiled, part in zip(programs, parts, strict=True):
        # what lies elsewhere in memory may be added up in another order
        assert torch.allclose(part["loss"], result.loss, rtol=1e-12, atol=0)
        for name, gradient in part["parameters"].items():
            gradient = _placed(tiled.parts.get(name), gradient)
            known = result.parameters.get(name)
            result.parameters[name] = gradient if known is None else known + gradient
        for name, buffer in part["buffers"].items():
            if name in tiled.parts:
                whole = result.buffers.setdefault(
                    name, buffer.new_empty(tiled.parts[name].shape)
                )
                tiled.parts[name].put(buffer, whole)
            else:
                known = result.buffers.setdefault(name, buffer)
                torch.testing.assert_close(buffer, known, rtol=1e-12, atol=1e-18)
        for name, (gradient, box, shape) in part["inputs"].items():
            whole = result.inputs.setdefault(name, gradient.new_zeros(shape))
            whole[tuple(slice(a, b) for a, b in box)] += gradient
    return result


def _placed(part: Part | None, gradient: Tensor) -> Tensor:
    """Return a gradient of the whole parameter, zero outside of the part."""
    if part is None:
        return gradient
    whole = gradient.new_zeros(part.shape)
    part.put(gradient, whole)
    return whole


def _own_module(program: Program, whole: nn.Module) -> nn.Module:
    """Return a rank's own module, its parts filled from the whole one."""
    module = copy.deepcopy(_plain(program.module))
    filled: dict[int, Tensor] = {}  # by the tensors in their places: ties stay ties
    for kind in ("_parameters", "_buffers"):
        for prefix, child in module.named_modules():
            for name, tensor in getattr(child, kind).items():
                path = f"{prefix}.{name}".lstrip(".")
                if (part := program.parts.get(path)) is not None:
                    piece = part.of(attribute(whole, path).detach())
                    is_parameter = isinstance(tensor, nn.Parameter)
                    filled[id(tensor)] = nn.Parameter(piece) if is_parameter else piece
        for child in module.modules():
            for name, tensor in getattr(child, kind).items():
                if id(tensor) in filled:
                    getattr(child, kind)[name] = filled[id(tensor)]
    return module


@contextmanager
def _on_grid(program: Program, grid: Grid) -> Iterator[None]:
    """Let a program's operations on tiles talk to the other tiles meanwhile."""
    before = [(n, n.args, meta.whole_gradients(n)) for n in program.graph.nodes]
    for node, args, whole in before:
        node.args = tuple(grid if isinstance(a, ShapeGrid) else a for a in args)
        meta.whole_gradients.set(node, whole and grid)
    yield
    for node, args, whole in before:
        node.args = args
        meta.whole_gradients.set(node, whole)


def _plain(module: nn.Module) -> nn.Module:
    holder = nn.Module()
    for name, child in module._modules.items():
        holder.add_module(name, child)
    for name, parameter in module._parameters.items():
        holder.register_parameter(name, parameter)
    for name, buffer in module._buffers.items():
        holder.register_buffer(name, buffer)
    holder.training = module.training
    return holder


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


def _run(
    program: Program, module: nn.Module, feed: dict[str, Any], count: int, tile: int
) -> dict[str, Any]:
    values: dict[fx.Node, Any] = {}
    given: dict[str, tuple[Tensor, Any, Any]] = {}
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    for item, node in zip(program.inputs, placeholders, strict=True):
        value: Any = feed
        for key in item.path:
            value = value[key]
        layout = meta.layout(node)
        box = everything(tuple(value.shape)) if layout is None else layout.boxes[tile]
        part = value[tuple(slice(a, b) for a, b in box)].clone()
        values[node] = _leaf(part) if item.path[0] == "input" else part
        if item.path[0] == "input":
            given[str(item.path[1])] = values[node], box, tuple(value.shape)
    for path in program.frozen:
        module.get_submodule(path).eval()
    kept: dict[int, Tensor] = {}

    class Keeper:
        def follow(self, tensors: Iterable[Tensor]) -> None:
            for tensor in tensors:
                kept.setdefault(tensor.untyped_storage()._cdata, tensor)

        def take(self) -> None:
            pass

    with saved_in_parts(Keeper()):
        run_nodes(program.graph.nodes, values, module)
    of_module = {
        t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())
    }
    saved = sum(
        t.untyped_storage().nbytes() for key, t in kept.items() if key not in of_module
    )
    kept.clear()
    loss = values[program.loss]
    loss.backward(torch.full_like(loss, 1 / count))
    return {
        "loss": loss.detach(),
        "saved": saved,
        "outputs": [values[node].detach() for node in program.outputs],
        "parameters": {
            n: p.grad for n, p in module.named_parameters() if p.grad is not None
        },
        "buffers": {
            name: buffer
            for name, buffer in module.named_buffers()
            if not name.startswith("_")  # those of a loss
        },
        "inputs": {
            name: (tensor.grad, box, shape)
            for name, (tensor, box, shape) in given.items()
            if tensor.grad is not None
        },
    }


def _joined(
    programs: list[Program], node: fx.Node, index: int, parts: list[dict[str, Any]]
) -> Tensor:
    """Put the tiles of an output together."""
    whole = torch.empty(meta.spec(node).shape, dtype=parts[0]["outputs"][index].dtype)
    for tile, (program, part) in enumerate(zip(programs, parts, strict=True)):
        layout = meta.layout(program.outputs[index])
        box = everything(tuple(whole.shape)) if layout is None else layout.boxes[tile]
        whole[tuple(slice(a, b) for a, b in box)] = part["outputs"][index]
    return whole


def assert_same(step: Step, expected: Step) -> None:
    """Compare everything.

    A gradient's error is measured by its largest element, that of a parameter also by
    the terms of which it is the sum; where inputs hardly count, by the parameters'.
    """
    _compare("loss", step.loss, expected.loss)
    for i, (have, want) in enumerate(zip(step.outputs, expected.outputs, strict=True)):
        _compare(f"output {i}", have, want, floor=SMALL)
    scale = max(_largest(expected.parameters), 1e-3 * abs(float(expected.loss)))
    for kind in ("inputs", "parameters", "buffers"):
        have, want = getattr(step, kind), getattr(expected, kind)
        assert have.keys() == want.keys(), kind
        for name in want:
            floor = SMALL if kind == "buffers" else 1e-6 * scale
            if kind == "parameters":
                floor = max(1e-3 * scale, expected.terms.get(name, 0.0))
            _compare(f"{kind} {name}", have[name], want[name], floor)


def is_decided(
    expected: Step, model: nn.Module, inputs: tuple[Any, ...], loss: Any, target: Any
) -> bool:
    """Whether a step is the same where each layer rounds otherwise.

    It is not where elements are equal by their making, and one of them is the largest,
    or where the root of their variance is 0.
    """
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)

    def rounded(_: nn.Module, __: Any, result: Any) -> Any:
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        return result * (1 + 1e-14 * torch.randn(result.shape, generator=generator))

    for layer in model.modules():
        if not [*layer.children()]:
            layer.register_forward_hook(rounded)
    try:
        assert_same(eager(model, inputs, loss, target), expected)
    except AssertionError:
        return False
    return True


def _largest(tensors: dict[str, Tensor]) -> float:
    return max((float(t.abs().max()) for t in tensors.values() if t.numel()), default=0)


def _compare(what: str, have: Tensor, want: Tensor, floor: float = 0.0) -> None:
    assert have.shape == want.shape, what
    if not want.numel():
        return
    if not want.is_floating_point():
        assert torch.equal(have, want), what
        return
    scale = max(float(want.abs().max()), floor)
    error = float((have - want).abs().max())
    assert error <= TOLERANCE * scale, f"{what}: error {error:.1e} of {scale:.1e}"
