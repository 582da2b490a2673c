"""One class of the model.py that an import writes, built line by line.

Each line is run when it is added, on tensors without memory: so a reader knows the
shape of every value, and a line that does not fit is an error that names the file's
own layer or node.

Example, of a reader that meets a convolution:
    with sheet.place("Conv2D 'stem'"):
        stem = sheet.layer("stem", nn.Conv2d(3, 8, 3), {"weight": same("stem/kernel")})
        y = sheet.line("stem", f"{stem}({x})")    # y.tensor.shape is known
gives in __init__ and in forward
    self.stem = nn.Conv2d(3, 8, kernel_size=3)
    stem = self.stem(x)  # Conv2D 'stem'
"""

from __future__ import annotations

import ast
import keyword
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gemsc.nn
from gemsc.codegen.python_text import parsed
from gemsc.codegen.writer import Names
from gemsc.errors import GemscError, InternalError
from gemsc.importers.expression import names_in
from gemsc.importers.weight import Weight

# what the text of a line may name besides values and self
SPACE = {"torch": torch, "nn": nn, "F": F, "math": math, "gemsc": gemsc}
UNREADABLE = ("l", "I", "O")  # as names: they look like digits
NO_FIT = "give sizes that fit with --shape; if there are none, the file is damaged"
UNFIT = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
LONGEST = 32  # letters of a name: of a longer one its end; a line has room for two


@dataclass(frozen=True, eq=False)
class Symbol:
    """What a line gives: the text that names it, and an empty tensor of its shape.

    `other` is what it would be with another batch; None if the text fixes the batch.
    """

    text: str
    tensor: Tensor
    other: Tensor | None = None

    def __str__(self) -> str:
        """Return the text: values are written into f-strings."""
        return self.text

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes, with the batch of the example inputs."""
        return tuple(self.tensor.shape)

    @property
    def rank(self) -> int:
        """How many axes it has."""
        return self.tensor.dim()

    @property
    def batch_axes(self) -> tuple[int, ...]:
        """The axes whose sizes change with the batch."""
        if self.other is None or self.other.dim() != self.tensor.dim():
            return ()
        pairs = zip(self.tensor.shape, self.other.shape, strict=True)
        return tuple(axis for axis, (one, two) in enumerate(pairs) if one != two)


@dataclass(frozen=True)
class Line:
    """`names = text  # note`."""

    names: tuple[str, ...]
    text: str
    note: str


class Sheet:
    """A class: its layers and parameters, and the lines of its forward.

    `root` is an object of that class, on the meta device. `texts` has what makes those
    of its layers that are not of torch.nn or gemsc.nn.
    """

    def __init__(self, name: str, doc: str, file: str) -> None:
        """Begin a class; `file` stands in front of what is refused.

        `name` is any text whose words its name has.
        """
        words = re.findall(r"[A-Za-z0-9]+", name)
        self.name = "".join(word[:1].upper() + word[1:] for word in words)
        if not self.name[:1].isalpha():
            self.name = f"Network{self.name}"
        self.doc, self.file = doc, file
        self.root = _Root(self)
        self.inputs: list[Symbol] = []
        self.lines: list[Line] = []
        self.result = ""
        self.weights: dict[str, Weight] = {}
        self.ties: list[tuple[str, str]] = []  # self.b.weight is self.a.weight
        self.texts: dict[nn.Module, str] = {}
        self._names = Names(["self", *SPACE, *UNREADABLE])
        self._space: dict[str, Any] = {**SPACE, "self": self.root}
        self._others: dict[str, Any] = {**SPACE, "self": self.root}  # another batch
        self.fixes_batch = ""  # the first place with a line for this batch alone
        self._place = ""

    # ----------------------------------------------------------- where it stands

    @contextmanager
    def place(self, words: str) -> Iterator[None]:
        """Say what of the file comes next: for notes beside lines, and for errors."""
        before, self._place = self._place, words
        try:
            yield
        finally:
            self._place = before

    def refuse(self, what: str, help: str | None = None) -> GemscError:
        """Return the error for what cannot be had, which names file and place."""
        return GemscError(f"{self.file}: {self._place} {what}", help=help)

    # ------------------------------------------------------------------- forward

    def input(self, wish: str, shape: Sequence[int], dtype: torch.dtype) -> Symbol:
        """Add an argument of forward; its first axis is taken for the batch."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        other = torch.cat([tensor, tensor[:1]]) if tensor.dim() else tensor
        value = self._named(self._unique(wish), tensor, other)
        self.inputs.append(value)
        return value

    def line(self, wish: str, text: str) -> Symbol:
        """Add `wish = text`; the name is another one where it is taken.

        Raises:
            GemscError: PyTorch refuses it for these shapes.
        """
        tensor = self.empty(text)
        if not isinstance(tensor, Tensor):
            raise InternalError(f"{text} gives no tensor")
        name = self._unique(wish)
        self.lines.append(Line((name,), text, self._place))
        return self._named(name, tensor, self._with_other_batch(text))

    def unpack(self, wishes: Sequence[str], text: str) -> tuple[Symbol, ...]:
        """Add `a, b = text`: a line that gives several tensors, of which _ has no use.

        Raises:
            GemscError: PyTorch refuses it for these shapes.
        """
        if len(wishes) == 1:
            return (self.line(wishes[0], f"{text}[0]"),)
        tensors = self.empty(text)
        names = [w if w == "_" else self._unique(w) for w in wishes]
        self.lines.append(Line(tuple(names), text, self._place))
        others = self._with_other_batch(text) or [None] * len(names)
        if len(others) != len(names):  # it is the batch that is cut
            self.fixes_batch = self.fixes_batch or self._place
            others = [None] * len(names)
        return tuple(map(self._named, names, tensors, others))

    def returns(self, text: str) -> None:
        """Say what forward returns: a value, or a tuple, list or dict of values."""
        self.empty(text)
        self.result = text

    def used_lines(self) -> list[tuple[Line, ast.expr]]:
        """Return the lines that what is returned depends on, and their trees."""
        used, wanted = [], names_in(parsed(self.result))
        for line in reversed(self.lines):
            if not wanted.isdisjoint(line.names):
                tree = parsed(line.text)
                used.append((line, tree))
                wanted |= names_in(tree)
        return used[::-1]

    def empty(self, text: str) -> Any:
        """Return what an expression gives, on tensors without memory; adds nothing.

        Raises:
            GemscError: PyTorch refuses it for these shapes.
        """
        try:
            return _evaluated(text, self._space)
        except UNFIT as why:
            reason = str(why).split("\n")[0]
            raise self.refuse(f"does not fit: {text}: {reason}", NO_FIT) from why

    def _with_other_batch(self, text: str) -> Any:
        """Return what an expression gives with another batch, None if it cannot."""
        try:
            return _evaluated(text, self._others)
        except UNFIT:
            self.fixes_batch = self.fixes_batch or self._place
        except NameError:
            pass  # it takes what there is not with another batch
        return None

    def _unique(self, wish: str) -> str:
        return self._names.unique(wish[-LONGEST:])

    def _named(self, name: str, tensor: Tensor, other: Tensor | None) -> Symbol:
        self._space[name] = tensor
        if other is not None:
            self._others[name] = other
        return Symbol(name, tensor, other)

    # -------------------------------------------------------- layers and weights

    def layer(
        self,
        path: str,
        module: nn.Module,
        weights: Mapping[str, Weight] | None = None,
        *,
        frozen: Collection[str] = (),
        text: str = "",
    ) -> str:
        """Add a layer under a path with dots; return the text that names it.

        Every parameter and persistent buffer of the layer has its weight, but for
        `num_batches_tracked`. Those that are `frozen` are not trained. The path is
        another one where it is taken: a layer that is used twice is added once.
        `text` is what makes it, where that cannot be told from it: `layers.scale({})`.
        """
        if text:
            self.texts[module] = text
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in frozen)
        path, place = self._put(path, module.to("meta").eval())
        for name, weight in (weights or {}).items():
            self.weights[f"{path}.{name}"] = weight
        return place

    def network(self, path: str, sheet: Sheet) -> str:
        """Add an object of another class under a path; return the text that names it.

        Its lines are those that the other sheet has by now.
        """
        path, text = self._put(path, sheet.root)
        for name, weight in sheet.weights.items():
            self.weights[f"{path}.{name}"] = weight
        return text

    def tensor(
        self,
        path: str,
        shape: Sequence[int],
        weight: Weight,
        *,
        dtype: torch.dtype = torch.float32,
        trained: bool = True,
    ) -> Symbol:
        """Add a tensor of its own: a parameter if it is trained, else a buffer."""
        empty = torch.empty(tuple(shape), dtype=dtype, device="meta")
        path, text = self._put(path, nn.Parameter(empty) if trained else empty)
        self.weights[path] = weight
        return Symbol(text, empty, empty)

    def tie(self, text: str, other: str) -> None:
        """Make a layer's parameter, `self.b.weight`, the same object as another one."""
        parameter = self.empty(other)
        path, _, name = text.rpartition(".")
        setattr(self.empty(path), name, parameter)
        self.ties.append((text, other))

    def _put(self, path: str, item: nn.Module | Tensor) -> tuple[str, str]:
        """Add it; return its path, and the text that names it in forward."""
        *folders, last = path.split(".")
        parent: nn.Module = self.root
        names, text = [], "self"
        for folder in folders:
            name = _free(parent, _clean(folder, parent), (nn.ModuleDict,))
            child = parent._modules.setdefault(name, nn.ModuleDict())
            assert child is not None
            text += after_parent(name, parent)
            names.append(name)
            parent = child
        if isinstance(item, nn.Module):
            last = _free(parent, _clean(last, parent))
            parent.add_module(last, item)
            return ".".join([*names, last]), text + after_parent(last, parent)
        last = _free(parent, _clean(last, self.root))
        if isinstance(item, nn.Parameter):
            parent.register_parameter(last, item)
        else:
            parent.register_buffer(last, item)
        return ".".join([*names, last]), f"{text}.{last}"


class _Root(nn.Module):
    """An object of the class that a sheet describes."""

    def __init__(self, sheet: Sheet) -> None:
        super().__init__()
        self._of = sheet

    def forward(self, *arguments: Any) -> Any:
        """Run the lines."""
        sheet = self._of
        space = {**SPACE, "self": self}
        space |= dict(zip((v.text for v in sheet.inputs), arguments, strict=True))
        for line in sheet.lines:
            returned = eval(line.text, space)
            values = returned if line.names[1:] else [returned]
            space |= dict(zip(line.names, values, strict=True))
        return eval(sheet.result, space)


def _evaluated(text: str, space: dict[str, Any]) -> Any:
    with torch.no_grad(), torch.device("meta"):
        # safe: readers write the text; of the file it has but literals
        return eval(text, dict(space))


def sheet_of(module: object) -> Sheet | None:
    """Return the sheet of what `network` has added; None of anything else."""
    return module._of if isinstance(module, _Root) else None


def layer_class(name: str, axes: int) -> Any:
    """Return a class of torch.nn for so many axes: `Conv2d` of "Conv"."""
    return getattr(nn, f"{name}{axes}d")


def one_number(values: Sequence[Any]) -> Any:
    """Return 3 for (3, 3): as people write it."""
    return values[0] if len(set(values)) == 1 else tuple(values)


def flat_pads(pads: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return what is around each axis as F.pad has it: the last axis first."""
    return tuple(size for pair in reversed(pads) for size in pair)


def slices(crops: Sequence[tuple[int, int]]) -> str:
    """Return the text that takes something off both ends of each axis of an image."""
    texts = [f"{before or ''}:{-after if after else ''}" for before, after in crops]
    return f"[:, :, {', '.join(texts)}]"


def filled(sizes: Sequence[int], elements: int) -> list[int]:
    """Return sizes, one of which may be -1, for so many elements."""
    known = math.prod(size for size in sizes if size != -1)
    return [elements // max(known, 1) if size == -1 else size for size in sizes]


def after_parent(name: str, parent: nn.Module) -> str:
    """Return the text that names a child after its parent: `.conv` or `["0"]`."""
    return f'["{name}"]' if isinstance(parent, nn.ModuleDict) else f".{name}"


def _clean(name: str, parent: nn.Module) -> str:
    """Return a name of the file as an attribute, or as the key of a ModuleDict."""
    if isinstance(parent, nn.ModuleDict):
        return re.sub(r"[^\w-]", "_", name[-LONGEST:], flags=re.ASCII) or "_"
    name = re.sub(r"\W", "_", name[-LONGEST:], flags=re.ASCII)
    name = re.sub(r"^__+", "_", name)  # a class has names of its own for these
    if not name.strip("_"):
        return "value"
    if name[0].isdigit():
        name = f"_{name}"
    return f"{name}_" if keyword.iskeyword(name) else name


def _free(parent: nn.Module, name: str, shared: tuple[type, ...] = ()) -> str:
    """Return a name that is free, or that of a child of a type that is `shared`."""
    free, count = name, 2
    while hasattr(parent, free) and not isinstance(getattr(parent, free), shared):
        free, count = f"{name}_{count}", count + 1
    return free
