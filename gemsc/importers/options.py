"""What a user may say about a file that is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ImportOptions"]


@dataclass(frozen=True)
class ImportOptions:
    """The choices of `gemsc import`.

    `batch` is the micro-batch of the example inputs, where the file leaves it open;
    `shapes` are whole shapes of inputs by name. `custom` is a Python file with a
    function for each layer or operator that gemsc does not know: it takes the layer's
    settings as a dict, and returns an nn.Module. With `channels_first` a Keras model
    takes and gives images as PyTorch does, (batch, channels, height, width).
    """

    batch: int = 2
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    custom: Path | None = None
    channels_first: bool = False
