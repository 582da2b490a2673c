"""What a user may say about a file that is imported."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gemsc.errors import GemscError


@dataclass(frozen=True)
class ImportOptions:
    """The choices of `gemsc import`.

    `batch` is the micro-batch of the example inputs, where the file leaves it open;
    `shapes` are whole shapes of inputs by name. `custom` is a Python file with a
    function for each layer of Keras that gemsc does not know: it takes the layer's
    settings as a dict, and returns an nn.Module. With `channels_first` a Keras model
    takes and gives images as PyTorch does, (batch, channels, height, width).
    """

    batch: int = 2
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    custom: Path | None = None
    channels_first: bool = False

    def check_names(self, file: str, inputs: Collection[str]) -> None:
        """Make sure that the shapes are those of inputs.

        Raises:
            GemscError: the file has no input of such a name.
        """
        for name in self.shapes:
            if name not in inputs:
                raise GemscError(
                    f"{file} has no input {name!r}",
                    help=f"it has {', '.join(sorted(inputs))}",
                )

    def shape(self, name: str, sizes: Sequence[int | None]) -> tuple[int, ...] | None:
        """Return the shape that was given for an input, if one was.

        `sizes` are those of the file, None where it leaves them open.

        Raises:
            GemscError: the input has more or fewer axes.
        """
        given = self.shapes.get(name)
        if given is not None and len(given) != len(sizes):
            known = "x".join("?" if size is None else str(size) for size in sizes)
            raise GemscError(
                f"--shape {name}={'x'.join(map(str, given))} has {len(given)} sizes; "
                f"in the file the input is {known}",
                help=f"give a size for each of its {len(sizes)} axes, the batch "
                "included",
            )
        return given
