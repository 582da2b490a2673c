"""Nodes that hold graphs or sequences: unrolled, with what is known beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx

from gemsc.errors import GemscError
from gemsc.importers.onnx.names import wish
from gemsc.importers.onnx.reader.file import DAMAGED
from gemsc.importers.onnx.static import Static, Value, computed
from gemsc.importers.sheet import Sheet, Symbol

Values = dict[str, Value]
MOST_ROUNDS = 64  # of a loop that is unrolled


class Control:
    """What these nodes need: to run a graph, and an operator.

    `sequences` are those that other nodes give, by name.
    """

    def __init__(
        self,
        sheet: Sheet,
        run: Callable[[onnx.GraphProto, Values], None],
        single: Callable[
            [onnx.NodeProto, Sequence[Value | None]], Sequence[Value | None]
        ],
        as_value: Callable[[onnx.NodeProto, Value], Symbol],
        used: set[str],
    ) -> None:
        """Begin without sequences; `used` are the names of values that are taken."""
        self.used = used
        self.sheet, self._run, self._single, self._value = sheet, run, single, as_value
        self.sequences: dict[str, list[Value]] = {}

    def node(self, proto: onnx.NodeProto, values: Values) -> Sequence[Value | None]:
        """Return what a node gives.

        Raises:
            GemscError: it depends on the data.
        """
        if not proto.output or len(proto.input) < LEAST.get(proto.op_type, 1):
            raise self.sheet.refuse("has too few operands or results", DAMAGED)
        function = getattr(self, CONTROL[proto.op_type])
        found: Sequence[Value | None] = function(proto, values)
        return found

    def _known(
        self, proto: onnx.NodeProto, index: int, values: Values
    ) -> Static | None:
        """Return an operand that has to be known; None where it is left out."""
        if index >= len(proto.input) or not proto.input[index]:
            return None
        value = self._given(proto.input[index], values)
        if not isinstance(value, Static):
            raise self.sheet.refuse(
                "depends on data where gemsc needs a constant",
                help="keep that part outside of the file, or export fixed sizes",
            )
        return value

    # ------------------------------------------------------------------- graphs

    def choose(self, proto: onnx.NodeProto, values: Values) -> Sequence[Value | None]:
        """If: the branch that is taken."""
        condition = self._known(proto, 0, values)
        is_true = condition is not None and bool(self._number(condition))
        branch = "then_branch" if is_true else "else_branch"
        inner = dict(values)
        return self._results(self._graph(proto, branch), inner)

    def loop(self, proto: onnx.NodeProto, values: Values) -> Sequence[Value | None]:
        """Loop: its rounds one after the other."""
        rounds, going = (self._known(proto, index, values) for index in (0, 1))
        count = MOST_ROUNDS + 1 if rounds is None else int(self._number(rounds))
        runs: Value = going or computed("going", np.asarray(True))
        graph = self._graph(proto, "body")
        carried = [self._given(name, values) for name in proto.input[2:]]
        if len(graph.input) != 2 + len(carried) or len(graph.output) <= len(carried):
            raise self.sheet.refuse("has a body with other values than it", DAMAGED)
        scanned: list[list[Value]] = []
        number = 0
        while number < count and self._is_true(runs):
            if number == MOST_ROUNDS:
                raise self._endless()
            given = [computed("round", np.asarray(number)), runs, *carried]
            inner = dict(values)
            names = [argument.name for argument in graph.input]
            inner.update(zip(names, given, strict=True))
            runs, *found = self._results(graph, inner)
            carried, row = found[: len(carried)], found[len(carried) :]
            scanned.append(row)
            number += 1
        return [*carried, *self._stacked(proto, scanned)]

    def _is_true(self, value: Value) -> bool:
        if not isinstance(value, Static):
            raise self._endless()
        return bool(self._number(value))

    def _endless(self) -> GemscError:
        return self.sheet.refuse(
            f"runs as often as the data say, or more than {MOST_ROUNDS} times",
            help="keep that part outside of the file, or export it unrolled",
        )

    def _stacked(
        self, proto: onnx.NodeProto, rows: Sequence[Sequence[Value]]
    ) -> Iterator[Value]:
        for column in zip(*rows, strict=True):
            known = [value.array for value in column if isinstance(value, Static)]
            if len(known) == len(column):
                if len({row.shape for row in known}) > 1:
                    raise self.sheet.refuse("gives rows of several sizes")
                yield computed("rows", np.stack(known))
                continue
            texts = [self._value(proto, value).text for value in column]
            yield self.sheet.line(
                wish(proto, "rows"), f"torch.stack([{', '.join(texts)}])"
            )

    # ---------------------------------------------------------------- sequences

    def split(self, proto: onnx.NodeProto, values: Values) -> Sequence[Value | None]:
        """SplitToSequence: as Split, with names for the parts."""
        said = {a.name: a.i for a in proto.attribute}
        value = self._given(proto.input[0], values)
        axis = said.get("axis", 0)
        if not -len(value.shape) <= axis < len(value.shape):
            raise self.sheet.refuse(f"names axis {axis} of {len(value.shape)}", DAMAGED)
        length = value.shape[axis]
        sizes = self._known(proto, 1, values)
        if sizes is None:
            parts = [1] * length
        elif sizes.shape:
            parts = [int(size) for size in sizes.array]
        else:
            part = max(int(self._number(sizes)), 1)
            parts = [min(part, length - start) for start in range(0, length, part)]
        if sizes is None and not said.get("keepdims", 1):
            raise self.sheet.refuse("takes an axis away", help="export it as Split")
        names = [f"{proto.output[0]}_{number}" for number in range(len(parts))]
        node = onnx.helper.make_node("Split", ["x", "split"], names, axis=axis)
        node.name = proto.name
        self.used.update(names)
        node.metadata_props.extend(proto.metadata_props)
        found = self._single(node, [value, computed("split", np.asarray(parts))])
        self.sequences[proto.output[0]] = [part for part in found if part is not None]
        return []

    def construct(
        self, proto: onnx.NodeProto, values: Values
    ) -> Sequence[Value | None]:
        """SequenceConstruct."""
        given = [self._given(name, values) for name in proto.input]
        self.sequences[proto.output[0]] = given
        return []

    def at(self, proto: onnx.NodeProto, values: Values) -> Sequence[Value | None]:
        """SequenceAt: one of the values."""
        place, found = self._known(proto, 1, values), self._sequence(proto)
        number = int(self._number(place)) if place is not None else len(found)
        if not -len(found) <= number < len(found):
            raise self.sheet.refuse(f"takes {number} of {len(found)}", DAMAGED)
        return [found[number]]

    def length(self, proto: onnx.NodeProto, values: Values) -> Sequence[Value | None]:
        """SequenceLength."""
        return [computed(proto.output[0], np.asarray(len(self._sequence(proto))))]

    def concat(self, proto: onnx.NodeProto, values: Values) -> Sequence[Value | None]:
        """ConcatFromSequence: as Concat."""
        said = {a.name: a.i for a in proto.attribute}
        if "axis" not in said:
            raise self.sheet.refuse("has no axis", DAMAGED)
        if said.get("new_axis", 0):
            raise self.sheet.refuse("stacks a sequence", help="export it as Concat")
        parts = self._sequence(proto)
        names = [f"x{number}" for number in range(len(parts))]
        node = onnx.helper.make_node("Concat", names, proto.output, axis=said["axis"])
        node.name = proto.name
        return self._single(node, parts)

    def _number(self, value: Static) -> float:
        if math.prod(value.shape) != 1:
            raise self.sheet.refuse(
                f"takes '{value.name}', which is no number", DAMAGED
            )
        number: float = value.array.item()
        return number

    def _given(self, name: str, values: Values) -> Value:
        if name not in values:
            raise self.sheet.refuse(f"takes '{name}', which is no tensor of a node")
        return values[name]

    def _graph(self, proto: onnx.NodeProto, name: str) -> onnx.GraphProto:
        found: list[onnx.GraphProto] = [
            a.g for a in proto.attribute if a.name == name and a.HasField("g")
        ]
        if not found:
            raise self.sheet.refuse(f"has no {name}", DAMAGED)
        return found[0]

    def _results(self, graph: onnx.GraphProto, values: Values) -> list[Value]:
        """Return what a graph gives; `values` has what it is given."""
        self._run(graph, values)
        return [self._given(output.name, values) for output in graph.output]

    def _sequence(self, proto: onnx.NodeProto) -> list[Value]:
        found = self.sequences.get(proto.input[0])
        if found is None:
            raise self.sheet.refuse("takes a sequence that depends on the data")
        return found


CONTROL = {
    "ConcatFromSequence": "concat",
    "If": "choose",
    "Loop": "loop",
    "SequenceAt": "at",
    "SequenceConstruct": "construct",
    "SequenceLength": "length",
    "SplitToSequence": "split",
}
LEAST = {"Loop": 2, "SequenceAt": 2}  # operands
