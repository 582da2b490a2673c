"""Nodes that no line computes: sizes, sequences, and graphs within them, unrolled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx

from gemsc.errors import GemscError
from gemsc.importers.onnx.operators.names import wish
from gemsc.importers.onnx.operators.node import (
    DAMAGED,
    Node,
    Number,
    Numbers,
    Result,
    operator,
)
from gemsc.importers.onnx.operators.parameters import Static, Value, computed, type_code
from gemsc.importers.sheet import Symbol

MOST_ROUNDS = 64  # of a loop that is unrolled
CONTROL: dict[str, Callable[[Node], Result]] = {}


@operator("Identity", table=CONTROL)
def _identity(_: Node, x: Value) -> list[Value]:
    return [x]


@operator("Shape", table=CONTROL)
def _shape(node: Node, x: Value) -> list[Value]:
    """The sizes of a value: those of the example."""
    sizes = np.asarray(x.shape, np.int64)
    return [_size_of(node, x, sizes[node.attr.start : node.attr.end])]


@operator("Size", table=CONTROL)
def _size(node: Node, x: Value) -> list[Value]:
    return [_size_of(node, x, np.prod(x.shape, dtype=np.int64))]


def _size_of(node: Node, x: Value, numbers: np.ndarray | np.int64) -> Static:
    is_sized = isinstance(x, Symbol) or x.sized
    return computed(node.proto.output[0], np.asarray(numbers), sized=is_sized)


@operator("CastLike", table=CONTROL)
def _cast_like(node: Node, x: Value, like: Value) -> Result:
    return _single(node, "Cast", [x], node.proto.output, to=type_code(like))


# ---------------------------------------------------------------------------- graphs


@operator("If", table=CONTROL)
def _choose(node: Node, condition: Number) -> list[Value]:
    return node.run(node.attr.then_branch if condition else node.attr.else_branch, [])


@operator("Loop", table=CONTROL)
def _loop(
    node: Node, rounds: Number | None, going: Value | None, *carried: Value
) -> list[Value]:
    body = node.attr.body
    values, rows, number = list(carried), [], 0
    runs = computed("going", np.asarray(True)) if going is None else going
    if len(body.input) != 2 + len(values) or len(body.output) <= len(values):
        raise node.refuse("has a body with other values than it", DAMAGED)
    while (rounds is None or number < rounds) and _is_true(node, runs):
        if number == MOST_ROUNDS:
            raise _endless(node)
        start = computed("round", np.asarray(number))
        runs, *results = node.run(body, [start, runs, *values])
        values, row = results[: len(values)], results[len(values) :]
        rows.append(row)
        number += 1
    return [*values, *_stacked(node, rows)]


def _is_true(node: Node, value: Value) -> bool:
    if not isinstance(value, Static) or value.array.size != 1:
        raise _endless(node)
    return bool(value.array.item())


def _endless(node: Node) -> GemscError:
    return node.refuse(
        f"runs a number of times that depends on data, or more than {MOST_ROUNDS} "
        "times",
        help="keep that part out of the file, or export it unrolled",
    )


def _stacked(node: Node, rows: Sequence[Sequence[Value]]) -> Iterator[Value]:
    """Give what each round has given, one above the other."""
    for column in zip(*rows, strict=True):
        known = [value.array for value in column if isinstance(value, Static)]
        if len(known) < len(column):
            texts = ", ".join(node.tensor(value).text for value in column)
            yield node.sheet.line(wish(node.proto, "rows"), f"torch.stack([{texts}])")
        elif len({row.shape for row in known}) > 1:
            raise node.refuse("gives rows of several sizes")
        else:
            yield computed("rows", np.stack(known))


# ------------------------------------------------------------------------- sequences


@operator("SplitToSequence", table=CONTROL)
def _split_to_sequence(node: Node, x: Value, split: Numbers | None) -> Result:
    """As Split, with names for the parts."""
    length, sizes = x.shape[node.axis(node.attr.axis, x.rank)], node.operand(1)
    is_squeezed = split is None and not node.attr.keepdims
    if split is None:
        split = [1] * length
    elif sizes is not None and not sizes.shape:  # of all parts but the last
        part = max(split[0], 1)
        split = [min(part, length - start) for start in range(0, length, part)]
    names = [f"{node.proto.output[0]}_{number}" for number in range(len(split))]
    sizes = computed("split", np.asarray(split))
    parts: list[Any]
    parts = [*_single(node, "Split", [x, sizes], names, axis=node.attr.axis)]
    if is_squeezed:
        axes = computed("axes", np.asarray([node.attr.axis]))
        rows = zip(parts, names, strict=True)
        parts = [_single(node, "Squeeze", [x, axes], [name])[0] for x, name in rows]
    return [parts]


@operator("SequenceConstruct", table=CONTROL)
def _construct(_: Node, *values: Value) -> Result:
    return [list(values)]


@operator("SequenceAt", table=CONTROL)
def _sequence_at(node: Node, sequence: list[Value], position: Number) -> list[Value]:
    if not -len(sequence) <= position < len(sequence):
        raise node.refuse(f"takes {position} of {len(sequence)}", DAMAGED)
    return [sequence[position]]


@operator("SequenceLength", table=CONTROL)
def _length(node: Node, sequence: list[Value]) -> list[Value]:
    return [computed(node.proto.output[0], np.asarray(len(sequence)))]


@operator("ConcatFromSequence", table=CONTROL)
def _concat_from_sequence(node: Node, sequence: list[Value]) -> Result:
    if node.attr.new_axis:
        raise node.refuse("stacks a sequence", help="export it as Concat")
    outputs = node.proto.output
    return _single(node, "Concat", sequence, outputs, axis=node.attr.axis)


def _single(
    node: Node,
    kind: str,
    operands: Sequence[Value],
    outputs: Sequence[str],
    **attributes: Any,
) -> Sequence[Value | None]:
    """Return what another operator gives in the place of this one."""
    names = [f"x{number}" for number in range(len(operands))]
    proto = onnx.helper.make_node(kind, names, outputs, **attributes)
    proto.name = node.proto.name
    proto.metadata_props.extend(node.proto.metadata_props)
    return node.single(proto, operands)
