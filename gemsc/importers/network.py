"""What a reader is asked for and makes of a file, and which one reads which file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from gemsc.errors import GemscError, InternalError
from gemsc.importers.sheet import Sheet
from gemsc.importers.weight import Array, FileTensors, to_torch

# the function of each kind of file, and what pip installs for it
READERS = {
    ".keras": ("gemsc.importers.keras.read", "read_keras", "gemsc[keras]"),
    ".onnx": ("gemsc.importers.onnx.read", "read_onnx", "gemsc[onnx]"),
}
# what settings, sizes and names that no sound file has can lead to
UNEXPECTED = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError),
    *(RecursionError, RuntimeError, TypeError, ValueError),
)
REPORT = "please report this file; --no-check writes the network anyway"
WITHIN = 1e-3  # of the largest output; in float32 they differ by 1e-6
Reference = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]


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

    def shape(
        self, sheet: Sheet, name: str, sizes: Sequence[int | None]
    ) -> tuple[int, ...]:
        """Return the shape of an input; `sizes` has None where the file leaves it open.

        Raises:
            GemscError: a size is left open, or as many as were given does it not have.
        """
        given = self.shapes.get(name)
        if given is not None and len(given) != len(sizes):
            raise GemscError(
                f"--shape {name}={'x'.join(map(str, given))} has {len(given)} sizes; "
                f"in the file the input is {_by(sizes)}",
                help=f"give a size for each of its {len(sizes)} axes, the batch "
                "included",
            )
        filled = list(sizes if given is None else given)
        if filled[:1] == [None]:
            filled[0] = self.batch
        if None in filled:
            raise sheet.refuse(
                f"has the shape {_by(filled)}: the file leaves sizes open",
                help=f"give --shape {name}={_by(filled, '224')}, for example",
            )
        return tuple(size for size in filled if size is not None)


def _by(sizes: Sequence[int | None], unknown: str = "?") -> str:
    return "x".join(unknown if size is None else str(size) for size in sizes)


@dataclass
class ImportedNetwork:
    """All that model.py says.

    `sheets` are its classes, those that others use first; the last one is the model.
    `functions` is the text of what follows them, such as `loss` and `optimizer`, and
    `imports` are lines that it needs. `notes` are for the user's eyes. `reference` is
    another implementation of evaluation, to compare with once; it takes and gives
    arrays in the order of the inputs and outputs.
    """

    sheets: list[Sheet]
    tensors: FileTensors
    functions: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reference: Reference | None = None

    @property
    def model(self) -> Sheet:
        """The class of the whole network."""
        return self.sheets[-1]

    def tensor(self, name: str, empty: Tensor) -> Tensor:
        """Return what the file has for a tensor of the model that is empty yet."""
        weight = self.model.weights.get(name)
        if weight is None and name.endswith("num_batches_tracked"):
            return torch.zeros((), dtype=torch.int64, device="cpu")
        if weight is None:
            raise InternalError(f"'{name}' has no weight")
        tensor = to_torch(weight.made(self.tensors.read)).to(empty.dtype)
        if tensor.shape != empty.shape:
            raise InternalError(f"'{name}' is {tensor.shape}, not {empty.shape}")
        return tensor

    def compared(self) -> str:
        """Run it once beside another implementation of the file, where there is one.

        Returns a note on how far it is from what the file gives.

        Raises:
            GemscError: so far that it is another network.
        """
        if self.reference is None:
            return ""
        inputs = [_example(value.tensor) for value in self.model.inputs]
        try:
            wanted = self.reference([value.numpy() for value in inputs])
        except GemscError:
            raise
        except Exception as why:  # of the other implementation: no error of the file
            reason = str(why).split("\n")[0][:200]
            return f"not compared with the file's own definition: {reason}"
        try:
            outputs = self._run(state := self._state(), inputs)
        except (RuntimeError, IndexError, ValueError, TypeError) as why:
            reason = str(why).split("\n")[0][:200]
            raise GemscError(
                f"{self.model.file} cannot be run as it was read: {reason}",
                help=REPORT,
            ) from why
        far = farthest(outputs, wanted)
        if not far <= WITHIN:
            raise GemscError(
                f"{self.model.file} gives different numbers than the network that was "
                f"read from it: they differ by {far:.1e} of the largest",
                help=REPORT,
            )
        said = f"compared with the file's own definition: within {far:.0e}"
        if not self._of_more(state, inputs, outputs) <= WITHIN:
            size = len(inputs[0])
            said += f". Of {2 * size} samples it gives other results than of {size} "
            said += f"and {size}: keep to {size}, unless it is to mix samples"
        return said

    def _state(self) -> dict[str, Tensor]:
        empty = self.model.root.state_dict()
        return {name: self.tensor(name, value) for name, value in empty.items()}

    def _run(self, state: dict[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad(), torch.device("cpu"):
            root, given = self.model.root, tuple(inputs)
            outputs = functional_call(root, state, given, tie_weights=False)
        return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]

    def _of_more(
        self,
        state: dict[str, Tensor],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> float:
        """Return how far two batches at once are from one after the other.

        A file may have a fixed shape, of which several axes could be the batch. 0 where
        this cannot be asked, and for an output that does not grow with the batch.
        """
        others = [value.flip(value.dim() - 1) for value in inputs if value.dim()]
        try:
            both = [torch.cat(pair) for pair in zip(inputs, others, strict=True)]
            three = outputs, self._run(state, others), self._run(state, both)
            triples = zip(*three, strict=True)
            grown = [trio for trio in triples if trio[2].shape != trio[0].shape]
            apart = [torch.cat((one, other)) for one, other, _ in grown]
        except (RuntimeError, IndexError, ValueError, TypeError):
            return 0.0
        return farthest([joint for *_, joint in grown], apart)


def farthest(values: Sequence[Tensor], wanted: Sequence[Array | Tensor]) -> float:
    """Return how far the farthest of some values is from another."""
    pairs = zip(values, wanted, strict=True)
    return max((distance(one, other) for one, other in pairs), default=0.0)


def _example(like: Tensor) -> Tensor:
    if like.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        numbers = torch.rand(like.shape, generator=generator, device="cpu")
        return numbers.to(like.dtype)
    return torch.zeros(like.shape, dtype=like.dtype, device="cpu")


def distance(values: Tensor, wanted: Array | Tensor) -> float:
    """Return how far values are from others, in parts of the largest; NaN is NaN."""
    ours, theirs = values.double().numpy(), np.asarray(wanted, np.float64)
    if ours.shape != theirs.shape:
        return float("inf")
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    if same.all():
        return 0.0
    scale = max(float(np.abs(theirs[np.isfinite(theirs)]).max(initial=0)), 1e-30)
    far = np.where(same, 0.0, np.abs(ours - theirs)) / scale
    return float("inf") if np.isnan(far).any() else float(far.max())


def read(path: Path, options: ImportOptions) -> ImportedNetwork:
    """Read a Keras archive or an ONNX file.

    Raises:
        GemscError: it is damaged, or has what PyTorch or gemsc has not; it names the
            layer or node.
    """
    if path.suffix not in READERS:
        raise GemscError(
            f"gemsc cannot import {path}",
            help=f"give a file that ends in {' or '.join(READERS)}",
        )
    if not path.is_file():
        raise GemscError(f"there is no file {path}", help="give the file's path")
    module, function, extra = READERS[path.suffix]
    try:
        reader: Any = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gemsc"):
            raise
        raise GemscError(
            f"{path} needs the package {error.name}, which is not installed",
            help=f"pip install '{extra}'",
        ) from None
    try:
        with torch.device("meta"):  # layers are made without memory
            network: ImportedNetwork = reader(path, options)
    except UNEXPECTED as error:
        reason = str(error).split("\n")[0]
        raise GemscError(
            f"{path} cannot be imported: {type(error).__name__}: {reason:.200}",
            help="the file is damaged, or has what gemsc does not expect: please "
            "report it if other programs load it",
        ) from error
    return network
