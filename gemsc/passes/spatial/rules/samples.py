"""Samples and tokens: most operations treat all alike; each tile runs its own.

Example, five samples on two tiles, cut along the first dimension alone:

    %conv = call_module conv(%x)      # before, 5 x 3 x 64 x 64
    %conv = call_module conv(%x)      # on the first tile, 3 x 3 x 64 x 64
"""

from __future__ import annotations

from collections.abc import Sequence
from string import digits

from torch import fx, nn

from gemsc.ir import meta
from gemsc.ir.operators.calls import Call
from gemsc.ir.operators.equations import letters_of, parse
from gemsc.ir.operators.table import operands_of, operator_of
from gemsc.passes.spatial.cuts import are_samples, fits, or_whole
from gemsc.passes.spatial.emit import call_again, spread_beside
from gemsc.passes.spatial.lowering import Lowering
from gemsc.passes.spatial.values import Local, Refused


def by_sample(low: Lowering, call: Call) -> Local | None:
    """Run the call on the tile's samples; None if it does not treat samples alike."""
    if not operator_of(call).by_sample:
        return None
    source = call.input
    axes = low.axes(source)
    if not are_samples(axes) or not _has_samples(call, len(axes)):
        return None
    rank = meta.tensors(call.node)[0].dim()
    inputs = {source: low.get(source).node}
    if call.kind == "max_unpool":
        inputs[call["indices"]] = low.spread(call["indices"], axes)
    return call_again(low, call, (axes[0], *(None,) * (rank - 1)), inputs)


def _has_samples(call: Call, dims: int) -> bool:
    """Whether the first of `dims` dimensions has samples that a call treats alike."""
    if operator_of(call).does == "window":
        return dims == call.rank + 2
    if call.kind == "pad":
        return len(call["pad"]) // 2 < dims
    if call.kind == "channels":
        return dims > 3 or not isinstance(call.layer, nn.Softmax2d)
    if call.kind in ("pixel_shuffle", "pixel_unshuffle"):
        return dims > 3
    return True


# Products and embeddings: of values cut by samples or tokens


def by_equation(low: Lowering, call: Call) -> Local:
    """Compute a part of the result, or an addend of it, of parts that belong together.

    A letter of the equation is cut as the first operand that has it is; what must be
    whole, or is cut in another way, is gathered.

    Raises:
        Refused: nothing of the result is cut then.
    """
    equation = operator_of(call).equation_of(call)
    if equation is None or equation.whole:
        raise Refused(equation.whole if equation else "it is not looked into")
    parsed, node = parse(equation.text), call.node
    operands = [
        (source, letters_of(tokens, len(low.shape(source))))
        for tokens, source in zip(
            parsed.operands, operands_of(call, equation), strict=True
        )
        if isinstance(source, fx.Node)
    ]
    summed = parsed.summed if call.kind != "addmm" else frozenset()  # it adds a third
    axis_of = _cut_letters(low, operands, parsed.whole | (parsed.summed - summed))
    result = letters_of(parsed.result, len(low.shape(node)))
    axes = tuple(axis_of.get(letter) for letter in result)
    over = [axis for letter, axis in axis_of.items() if letter in summed]
    cut = or_whole(axes)
    if not (cut or over) or not fits(low.shape(node), axes, low.grid):
        raise Refused("its result is not cut")
    inputs: dict[fx.Node, fx.Node] = {}
    for source, letters in operands:
        wanted = spread_beside(low, source, tuple(map(axis_of.get, letters)))
        if inputs.setdefault(source, wanted) is not wanted:
            raise Refused("two of its operands are one value")
    local = call_again(low, call, cut, inputs, partial=bool(over))
    return low.all_reduce(node, local.node, cut, low.among(over)) if over else local


def _cut_letters(
    low: Lowering,
    operands: Sequence[tuple[fx.Node, tuple[str, ...]]],
    whole: frozenset[str],
) -> dict[str, int]:
    """Return the letters that are cut, each with the axis of the grid: no two by one.

    Raises:
        Refused: a product of letters is cut.
    """
    axis_of: dict[str, int] = {}
    for source, letters in operands:
        axes = low.axes(source) or (None,) * len(letters)
        for letter, axis in zip(letters, axes, strict=True):
            if axis is None or letter in whole or letter.rstrip(digits) in whole:
                continue
            if " " in letter:
                raise Refused("a dimension that is cut is a product")
            if axis not in axis_of.values():
                axis_of.setdefault(letter, axis)
    return axis_of
