"""What Keras adds to the loss and does to weights beside the network: reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def regularizer_notes(configs: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Return a note for each regularizer and constraint of layers, by their names."""
    return [note for name, config in configs for note in _notes(name, config)]


def _notes(name: str, config: Mapping[str, Any]) -> Iterator[str]:
    for key, setting in config.items():
        if not setting:
            continue
        what, _, kind = key.rpartition("_")
        if kind == "regularizer" and what != "activity":
            yield f"'{name}': {_regularizer(what, setting)}"
        elif kind == "constraint":
            yield (
                f"'{name}': {_named(setting)} of its {what} is left out: set "
                "the weight back in on_step(trainer, report)"
            )
        elif key in ("layer", "backward_layer", "cell") and isinstance(
            setting, Mapping
        ):
            inner = setting.get("config")
            if isinstance(inner, Mapping):
                yield from _notes(name, inner)


def _regularizer(what: str, setting: Any) -> str:
    """Return what a regularizer would be in an optimizer."""
    said = f"{_named(setting)} of its {what} is no part of the loss"
    config = setting.get("config") if isinstance(setting, Mapping) else None
    config = config if isinstance(config, Mapping) else {}
    one, two = config.get("l1"), config.get("l2")
    if two and not one:
        return f"{said}: weight_decay={2 * float(two):.6g} is the same under SGD"
    if two:
        return f"{said}: weight_decay={2 * float(two):.6g} under SGD is its l2 alone"
    return said


def _named(setting: Any) -> str:
    if not isinstance(setting, Mapping):
        return str(setting)
    config = setting.get("config")
    settings = config if isinstance(config, Mapping) else {}
    inside = ", ".join(f"{k}={v}" for k, v in settings.items())
    return f"{setting.get('class_name')}({inside})"
