"""Recurrent layers: the gates in PyTorch's order, both biases as parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from gemsc.importers.onnx.node import Node, Operator
from gemsc.importers.onnx.static import Static, torch_type
from gemsc.importers.sheet import Symbol
from gemsc.importers.weight import Array

# where PyTorch's gates are among those of the file: iofc and zrh
GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
LAYERS_OF: Any = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
ACTIVATIONS_OF = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"]}


def _recurrent(node: Node) -> Sequence[Symbol | None]:
    """LSTM, GRU and RNN: one layer of torch.nn in one direction or both."""
    _check(node)
    x = node.value(0)
    direction = node.attribute("direction", "forward")
    batch_first = bool(node.attribute("layout", 0))
    time = 1 if batch_first else 0
    if direction == "reverse":
        x = node.sheet.line("reversed", f"{x}.flip({time})")
    call = node.layer(_layer(node, x, batch_first), **_weights(node))
    state = _state(node, batch_first)
    wishes = ["y", "states"] if node.kind == "LSTM" else ["y", "h"]
    y, states = node.sheet.unpack(wishes, f"{call}({x}{state})")
    return list(_results(node, y, states, batch_first))


def _results(
    node: Node, y: Symbol, states: Symbol, batch_first: bool
) -> Sequence[Symbol | None]:
    """Return sequence and last states with the file's axes."""
    used = [*node.outputs, "", "", ""]
    found: list[Symbol | None] = [None, None, None]
    time = 1 if batch_first else 0
    if used[0]:
        text = y.text
        if node.attribute("direction", "forward") == "reverse":
            text = f"{text}.flip({time})"
        if node.attribute("direction", "forward") == "bidirectional":
            text = f"{text}.unflatten(-1, (2, -1))"
            text += "" if batch_first else ".transpose(1, 2)"
        else:
            text += ".unsqueeze(2)" if batch_first else ".unsqueeze(1)"
        found[0] = node.gives(text)
    lasts = [f"{states}[0]", f"{states}[1]"] if node.kind == "LSTM" else [states.text]
    for output, last in enumerate(lasts, 1):
        if used[output]:
            text = f"{last}.transpose(0, 1)" if batch_first else last
            found[output] = node.gives(text, output)
    return found


def _layer(node: Node, x: Symbol, batch_first: bool) -> nn.Module:
    weight = _known(node, 1)
    settings: dict[str, Any] = {}
    if node.kind == "RNN":
        settings["nonlinearity"] = node.attribute("activations", ["Tanh"])[0].lower()
    layer: nn.Module = LAYERS_OF[node.kind](
        x.shape[-1],
        _known(node, 2).shape[-1],
        bias=node.operand(3) is not None,
        batch_first=batch_first,
        bidirectional=weight.shape[0] == 2,
        dtype=torch_type(weight.dtype),
        **settings,
    )
    return layer


def _known(node: Node, index: int) -> Static:
    found = node.weight(index)
    if found is None:
        raise node.refuse(f"takes its weight, input {index}, from the data")
    return found


def _weights(node: Node) -> dict[str, Static]:
    """Return the layer's parameters by the names that PyTorch has."""
    gates = GATES[node.kind]
    found = {}
    directions = _known(node, 1).shape[0]
    biases = [("bias_ih_l0", 3, 0), ("bias_hh_l0", 3, 1)]
    names = [("weight_ih_l0", 1, 0), ("weight_hh_l0", 2, 0), *biases]
    for number in range(directions):
        for name, index, half in names:
            if node.operand(index) is None:
                continue
            whole = _known(node, index)
            size = _known(node, 2).shape[-1]
            shape = (len(gates) * size, *whole.shape[2:])
            key = f"{name}_reverse" if number else name
            move = _Gates(gates, number, half, size)
            found[key] = replace(whole, shape=shape, weight=whole.weight.then(move))
    return found


class _Gates:
    """The rows of one direction, gate by gate; `half` is which of the two biases."""

    def __init__(
        self, gates: tuple[int, ...], direction: int, half: int, size: int
    ) -> None:
        self.gates, self.direction, self.half, self.size = gates, direction, half, size

    def __call__(self, array: Array) -> Array:
        """Return the rows in PyTorch's order."""
        rows = array[self.direction]
        start = self.half * len(self.gates) * self.size
        starts = [start + gate * self.size for gate in self.gates]
        return np.concatenate([rows[s : s + self.size] for s in starts])


def _state(node: Node, batch_first: bool) -> str:
    """Return the initial states as the call's second argument; "" if all are zeros."""
    count = 2 if node.kind == "LSTM" else 1
    given = [node.operand(5 + number) for number in range(count)]
    if all(o is None or _is_zero(o) for o in given):
        return ""
    texts = []
    for number, operand in enumerate(given):
        if operand is None:  # one of the two states of an LSTM
            texts.append(f"torch.zeros_like({node.value(6 - number)})")
            continue
        text = node.value(5 + number).text
        texts.append(f"{text}.transpose(0, 1).contiguous()" if batch_first else text)
    return f", ({', '.join(texts)})" if count == 2 else f", {texts[0]}"


def _is_zero(operand: Symbol | Static) -> bool:
    return (
        isinstance(operand, Static)
        and not operand.trained
        and not bool(operand.array.any())
    )


def _check(node: Node) -> None:
    """Refuse what PyTorch's layers do not do."""
    usual = ACTIVATIONS_OF.get(node.kind, node.attribute("activations", ["Tanh"])[:1])
    directions = 2 if node.attribute("direction", "forward") == "bidirectional" else 1
    named = node.attribute("activations", usual * directions)
    if named != usual * directions or usual[0] not in ("Sigmoid", "Tanh", "Relu"):
        raise node.refuse(f"has the activations {', '.join(named)}; PyTorch has not")
    if node.attribute("clip") is not None:
        raise node.refuse("clips its cells, which PyTorch does not")
    if node.attribute("input_forget", 0):
        raise node.refuse("has one gate for input and forgetting; PyTorch has two")
    if node.kind == "GRU" and not node.attribute("linear_before_reset", 0):
        raise node.refuse(
            "resets before its product (linear_before_reset=0); PyTorch's GRU after it",
            help="train the model with linear_before_reset=1 (Keras: reset_after=True)",
        )
    peepholes = node.operand(7)
    if node.kind == "LSTM" and peepholes is not None and not _is_zero(peepholes):
        raise node.refuse("has peepholes, which PyTorch has not")
    lengths = node.operand(4)
    if lengths is None:
        return
    steps = node.value(0).shape[1 if node.attribute("layout", 0) else 0]
    if isinstance(lengths, Symbol) or bool((lengths.array != steps).any()):
        raise node.refuse(
            "takes sequences of several lengths",
            help="export the model without sequence lengths",
        )


RECURRENT: Mapping[str, Operator] = dict.fromkeys(["GRU", "LSTM", "RNN"], _recurrent)
