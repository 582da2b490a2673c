"""Recurrent layers: LSTM, GRU and SimpleRNN, in one direction or both, and of cells.

Keras has one bias where PyTorch adds two: the second one is zero and not trained, or
both together would learn twice as fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from gemsc.importers.keras.config import Listed, with_numbers
from gemsc.importers.keras.layer import Laid, LayerCall, translates
from gemsc.importers.sheet import Symbol
from gemsc.importers.weight import Array, Weight, constant

WRITE_IT = "write the layer in PyTorch: --custom layers.py"


@dataclass(frozen=True)
class Cell:
    """A cell: its class in Keras, its settings, and where its variables are."""

    kind: str
    config: Mapping[str, Any]
    part: str

    @property
    def units(self) -> int:
        """The size of its state."""
        return int(self.config["units"])

    @property
    def has_bias(self) -> bool:
        """Whether it adds a bias."""
        return bool(self.config.get("use_bias", True))

    @property
    def dropout(self) -> float:
        """The share of its input that it drops."""
        return float(self.config.get("dropout") or 0.0)

    @property
    def settings(self) -> tuple[Any, ...]:
        """What two directions of one layer of PyTorch have in common."""
        return self.kind, self.units, self.has_bias, self.config.get("activation")


# --------------------------------------------------------------------- translators


@translates("GRU", "LSTM", "RNN", "SimpleRNN")
def _recurrent(call: LayerCall) -> Laid | Sequence[Laid]:
    config, name = call.config, call.layer.name
    _check_layer(call, config)
    if call.layer.kind == "RNN" and config["cell"]["class_name"] == "StackedRNNCells":
        return _stacked(call, config["cell"]["config"]["cells"])
    cell = _cell_of(call, call.layer.kind, config, "cell")
    x = _dropped(call, _turned(call, call.last(), config), cell, "dropout")
    layer = _layer(call, [cell], x.shape[-1], "cell" if cell.dropout else "")
    given = [f"{state}.unsqueeze(0)" for state in _states(call)]
    sequence, states = _called(call, cell, layer, x, given)
    output = _last_or_all(call, sequence)
    if not config.get("return_state"):
        return output
    return [output, *(call.gives(f"{s}[0]", wish=f"{name}_{w}") for w, s in states)]


def _stacked(call: LayerCall, held: Sequence[Mapping[str, Any]]) -> Laid:
    """Run several cells, one above the other."""
    if call.config.get("return_state") or _states(call):
        raise call.refuse(
            "gives or takes states of several cells",
            help="use a layer for each cell, such as LSTM(..., return_state=True)",
        )
    names = with_numbers(Listed.of(config).snake for config in held)
    named = zip(held, names, strict=True)
    cells = [_cell(call, config, f"cell/cells/{name}") for config, name in named]
    x = _turned(call, call.last(), call.config)
    for index, cell in enumerate(cells):
        x = _dropped(call, x, cell, f"dropout.{index}")
        layer = _layer(call, [cell], x.shape[-1], f"cells.{index}")
        x, _ = call.sheet.unpack([call.layer.name, "_"], f"{layer}({x})")
    return _last_or_all(call, x)


def _last_or_all(call: LayerCall, sequence: Symbol) -> Laid:
    if call.config.get("return_sequences"):
        return Laid(sequence)
    return call.gives(f"{sequence}[:, -1]")


def _cell_of(call: LayerCall, kind: str, config: Mapping[str, Any], part: str) -> Cell:
    """Return the cell of a layer of this class."""
    if kind == "RNN":
        return _cell(call, config["cell"], part)
    if kind not in ("LSTM", "GRU", "SimpleRNN"):
        raise call.refuse(f"holds a layer of class {kind}", help=WRITE_IT)
    return Cell(kind, config, part)


def _cell(call: LayerCall, cell: Mapping[str, Any], part: str) -> Cell:
    kind = str(cell.get("class_name"))
    if kind not in ("LSTMCell", "GRUCell", "SimpleRNNCell"):
        raise call.refuse(f"has a cell of class {kind}", help=WRITE_IT)
    return Cell(kind.removesuffix("Cell"), cell["config"], part)


@translates("Bidirectional")
def _bidirectional(call: LayerCall) -> Laid | Sequence[Laid]:
    ahead, back = call.config["layer"], call.config.get("backward_layer")
    cells = [
        _direction(call, ahead, "forward_layer"),
        _direction(call, back or ahead, "backward_layer"),
    ]
    one, other = cells
    if one.settings != other.settings:
        raise call.refuse("has two directions with different settings", help=WRITE_IT)
    config = ahead["config"]
    if config.get("go_backwards"):
        raise call.refuse("has a forward layer with go_backwards", help=WRITE_IT)
    if one.dropout or other.dropout:
        raise call.refuse(
            f"has dropout={one.config['dropout']}: each direction has its own mask",
            help="put a Dropout or SpatialDropout1D in front of it",
        )
    x = call.last()
    layer = _layer(call, cells, x.shape[-1], "")
    given = list(map(str, _states(call)))
    half = len(given) // 2
    pairs = zip(given[:half], given[half:], strict=True)
    stacked = [f"torch.stack([{a}, {b}])" for a, b in pairs]
    sequence, states = _called(call, one, layer, x, stacked)
    values = _merged(call, sequence, states[0][1], bool(config.get("return_sequences")))
    if not config.get("return_state"):
        return values if len(values) > 1 else values[0]
    name = call.layer.name
    for index, words in enumerate(("forward", "backward")):
        for w, s in states:
            values.append(call.gives(f"{s}[{index}]", wish=f"{name}_{words}_{w}"))
    return values


def _direction(call: LayerCall, layer: Mapping[str, Any], part: str) -> Cell:
    _check_layer(call, layer["config"])
    return _cell_of(call, str(layer.get("class_name")), layer["config"], f"{part}/cell")


MERGES = {"sum": "{} + {}", "mul": "{} * {}", "ave": "({} + {}) / 2"}


def _merged(
    call: LayerCall, sequence: Symbol, last: str, returns_sequences: bool
) -> list[Laid]:
    """Return both directions as one value, or as two."""
    mode = call.config.get("merge_mode", "concat")
    if mode == "concat" and returns_sequences:
        return [Laid(sequence)]
    if mode == "concat":
        return [call.gives(f"torch.cat([{last}[0], {last}[1]], 1)")]
    wishes = [f"{call.layer.name}_{word}" for word in ("forward", "backward")]
    if returns_sequences:
        both = call.sheet.unpack(wishes, f"{sequence}.chunk(2, -1)")
    else:
        both = tuple(call.sheet.line(w, f"{last}[{i}]") for i, w in enumerate(wishes))
    if mode is None:
        return [Laid(symbol) for symbol in both]
    return [call.gives(MERGES[mode].format(*both))]


# --------------------------------------------------------------------------- parts


def _layer(call: LayerCall, cells: Sequence[Cell], width: int, part: str) -> str:
    """Return the text of a layer of PyTorch with the weights of one or two cells."""
    cell = cells[0]
    weights: dict[str, Weight] = {}
    frozen: list[str] = []
    for one_cell, end in zip(cells, ("", "_reverse"), strict=False):
        _check_cell(call, one_cell)
        held = {f"{name}_l0{end}": w for name, w in _weights(call, one_cell)}
        weights |= held
        frozen += held if one_cell.config.get("trainable") is False else []
    maker: Any = getattr(nn, cell.kind.removeprefix("Simple"))  # nn.LSTM, nn.RNN
    settings: dict[str, Any] = {"bias": cell.has_bias, "bidirectional": len(cells) > 1}
    if cell.kind == "SimpleRNN":
        settings["nonlinearity"] = cell.config.get("activation", "tanh")
    make = partial(maker, width, cell.units, batch_first=True, **settings)
    return call.add(make, part, frozen, **weights)


def _weights(call: LayerCall, cell: Cell) -> Iterator[tuple[str, Weight]]:
    """Yield the weights: Keras' gates of GRU are z, r, n, where PyTorch has r, z, n."""

    def gates(array: Array) -> Array:
        if cell.kind != "GRU":
            return array
        z, r, n = np.split(array, 3, axis=-1)
        return np.concatenate([r, z, n], axis=-1)

    def moved(array: Array) -> Array:
        return gates(array).T

    yield "weight_ih", call.variable(0, cell.part).then(moved)
    yield "weight_hh", call.variable(1, cell.part).then(moved)
    if not cell.has_bias:
        return
    bias = call.variable(2, cell.part)
    if cell.kind == "GRU":
        yield "bias_ih", bias.then(lambda array: gates(array)[0])
        yield "bias_hh", bias.then(lambda array: gates(array)[1])
    else:
        yield "bias_ih", bias
        yield "bias_hh", constant(np.zeros(call.size(2, cell.part), np.float32))


def _states(call: LayerCall) -> list[Symbol]:
    """Return the states that the layer begins with, if it is given any."""
    given = call.keywords.get("initial_state")
    if given is None:
        return [laid.value for laid in call.inputs[1:]]
    many = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(state, Laid) for state in many):
        raise call.refuse("has an initial_state that is not a layer's output")
    return [laid.value for laid in many]


def _called(
    call: LayerCall, cell: Cell, layer: str, x: Symbol, given: Sequence[str]
) -> tuple[Symbol, list[tuple[str, str]]]:
    """Call it; return the sequence, and the states' words and texts."""
    words = ["h", "c"] if cell.kind == "LSTM" else ["h"]
    if given and len(given) % len(words):
        raise call.refuse(f"has an initial_state of {len(given)} tensors")
    start, name = "".join(f", {state}" for state in given), call.layer.name
    if len(given) > 1:
        start = f", ({', '.join(given)})"
    sequence, state = call.sheet.unpack(
        [f"{name}_steps", f"{name}_state"], f"{layer}({x}{start})"
    )
    if len(words) == 1:
        return sequence, [("h", str(state))]
    return sequence, [("h", f"{state}[0]"), ("c", f"{state}[1]")]


def _turned(call: LayerCall, x: Symbol, config: Mapping[str, Any]) -> Symbol:
    if len(x.shape) != 3:
        raise call.refuse(f"has an input of {len(x.shape)} axes, not 3")
    if not config.get("go_backwards"):
        return x
    return call.sheet.line(f"{x}_backwards", f"{x}.flip(1)")


def _dropped(call: LayerCall, x: Symbol, cell: Cell, part: str) -> Symbol:
    """Drop features: the same ones in all steps of a sequence, as Keras does."""
    if not cell.dropout:
        return x
    drop = call.add(lambda: nn.Dropout(cell.dropout), part)
    return call.sheet.line(f"{x}_dropped", f"{x} * {drop}(torch.ones_like({x}[:, :1]))")


def _check_layer(call: LayerCall, config: Mapping[str, Any]) -> None:
    if config.get("stateful"):
        raise call.refuse(
            "is stateful: it continues where the last batch ended",
            help="set stateful=False, or pass initial_state as an input of the model",
        )
    if call.keywords.get("mask") is not None:
        raise call.refuse("is given a mask: masks are not supported", help=WRITE_IT)


def _check_cell(call: LayerCall, cell: Cell) -> None:
    config = cell.config
    if config.get("recurrent_dropout"):
        raise call.refuse(
            f"has recurrent_dropout={config['recurrent_dropout']}",
            help="set recurrent_dropout=0, with dropout between layers instead",
        )
    if cell.kind == "GRU" and not config.get("reset_after", True):
        raise call.refuse(
            "has reset_after=False, which PyTorch's GRU has not", help=WRITE_IT
        )
    allowed = ("tanh", "relu") if cell.kind == "SimpleRNN" else ("tanh",)
    if config.get("activation", "tanh") not in allowed:
        raise call.refuse(
            f"has activation={config['activation']!r}, where PyTorch's layer has "
            f"{' or '.join(allowed)}",
            help=WRITE_IT,
        )
    if cell.kind == "SimpleRNN":
        return
    inner = config.get("recurrent_activation", "sigmoid")
    if inner != "sigmoid":
        raise call.refuse(
            f"has recurrent_activation={inner!r}, where PyTorch's layer has sigmoid",
            help=WRITE_IT,
        )
