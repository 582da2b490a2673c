"""The config of an archive as plain values: layers, calls, and what they take."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

MODELS = ("Functional", "Model", "Sequential")
# the class whose name in a config is not the one that its weights have
_NAMED = {"GroupQueryAttention": "GroupedQueryAttention"}


@dataclass(frozen=True)
class Listed:
    """A layer, model or operation in the list of a model."""

    kind: str
    name: str
    config: Mapping[str, Any]
    text: Mapping[str, Any]  # all of it: nested models need it
    is_own: bool  # a class of Keras, and not a user's

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> Listed:
        """Read what serialization has of a layer."""
        config = text.get("config") or {}
        package = str(text.get("module") or "").partition(".")[0]
        is_own = package in ("keras", "keras_core")
        kind = str(text["class_name"])
        if not is_own:
            kind = str(text.get("registered_name") or kind)
        kind = _NAMED.get(kind, kind)
        name = str(text.get("name") or config.get("name") or kind)
        return cls(kind, name, config, text, is_own)

    @property
    def is_model(self) -> bool:
        """Whether it has layers of its own."""
        return self.is_own and self.kind in MODELS

    @property
    def holds_layers(self) -> bool:
        """Whether what it holds says itself whether it is trained."""
        is_wrapper = self.kind in ("Bidirectional", "RNN", "TimeDistributed")
        return self.is_model or (self.is_own and is_wrapper)

    @property
    def is_operation(self) -> bool:
        """Whether it is a function of keras.ops, which has no place in the weights."""
        return ".ops." in f"{self.text.get('module') or ''}."

    @property
    def snake(self) -> str:
        """The name of its class as the weights have it: `conv2d_transpose`."""
        name = str(self.text["class_name"])
        return snake(re.sub(r"\W+", "", _NAMED.get(name, name)))


def snake(name: str) -> str:
    """Return the name of a class as Keras has it in files: `conv2d_transpose`."""
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def with_numbers(names: Iterable[str]) -> Iterator[str]:
    """Yield names as Keras counts them in files: dense, lstm, dense_1."""
    seen: Counter[str] = Counter()
    for name in names:
        yield f"{name}_{seen[name]}" if seen[name] else name
        seen[name] += 1


def class_and_config(setting: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the class of an object in a config, and its settings: {} of a name."""
    if not isinstance(setting, Mapping):
        return str(setting), {}
    config = setting.get("config")
    return str(setting.get("class_name")), config if isinstance(config, Mapping) else {}


def plain(value: Any, tensor: Callable[[str, int, int], Any]) -> Any:
    """Return the arguments of a call as values; `tensor` gives those of the graph.

    Raises:
        ValueError: there is something that only Keras could make.
    """
    if isinstance(value, list):
        return [plain(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    kind, config = value.get("class_name"), value.get("config")
    match kind, config:
        case None, _:
            return {name: plain(item, tensor) for name, item in value.items()}
        case "__keras_tensor__", {"keras_history": [str(name), int(node), int(index)]}:
            return tensor(name, node, index)
        case "__tensor__" | "__numpy__", {"value": numbers, "dtype": str(dtype)}:
            return np.array(numbers, dtype=_dtype(dtype))
        case "__slice__", {"start": start, "stop": stop, "step": step}:
            return slice(start, stop, step)
        case "__ellipsis__", _:
            return Ellipsis
        case "__tuple__", _:
            return tuple(plain(item, tensor) for item in value["items"])
    if isinstance(config, dict) and "name" in config and "Policy" in str(kind):
        return config["name"]
    raise ValueError(f"{kind!r:.60} among its arguments")


def _dtype(name: str) -> np.dtype[Any]:
    """Return a dtype of numbers; nothing else, which could hold objects."""
    if not re.fullmatch(r"(float|u?int)(8|16|32|64)|bool", name):
        raise ValueError(f"numbers of dtype {name!r:.60}")
    return np.dtype(name)


def references(value: Any) -> Iterator[tuple[str, int, int]]:
    """Yield the tensors that `input_layers` or `output_layers` name, in Keras' order.

    A dict is ordered by its keys.
    """
    match value:
        case [str(name), int(node), int(index)]:
            yield name, node, index
        case list():
            for item in value:
                yield from references(item)
        case dict():
            for _, item in sorted(value.items()):
                yield from references(item)
        case _:
            raise ValueError(f"{value!r:.60} where the output of a layer is named")


def found_in(value: Any, kind: type) -> list[Any]:
    """Return all values of a type in lists and dicts of arguments, in their order."""
    if isinstance(value, kind):
        return [value]
    if isinstance(value, list | tuple):
        return [match for item in value for match in found_in(item, kind)]
    if isinstance(value, dict):
        return [
            match for _, item in sorted(value.items()) for match in found_in(item, kind)
        ]
    return []
