"""Find the line that makes a number that is not finite: `--detect-anomaly`.

    y = torch.log(x)         finite x, and y has -inf: this is where it begins
    y = torch.sqrt(x)        a finite gradient of y, and that of x has inf: or here

Forward: each operation that gives NaN or infinity where it has been given none is noted
with its line. Masks are infinite on purpose; so that counts only if a result of the
stage is not finite in the end. Backward: what autograd has recorded for an operation is
looked at when its gradients have been computed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from gemsc.base.dtypes import is_real
from gemsc.errors import GemscError
from gemsc.runtime.process.failure import generated_lines

Line = tuple[str, int]  # of a rank's file
HELP = (
    "look at what goes into this line: a division, a root, a logarithm, a large input"
)


class AnomalyDetection(TorchFunctionMode):
    """What a stage's forward runs within, one micro-batch at a time.

    `backward` says whether gradients are looked at: those that a loss scale multiplies
    may overflow.
    """

    def __init__(self, stage: nn.Module, *, backward: bool) -> None:
        super().__init__()
        module = sys.modules[type(stage).__module__]
        self._file = str(module.__file__)
        self._backward = backward
        self._known: set[Any] = set()
        self._line: Line = (self._file, 1)
        self._first: GemscError | None = None
        self._errors: list[GemscError] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        before = _Seen.of(inputs, pytree.tree_leaves((args, kwargs)))
        self._watch(inputs)  # what a function of autograd made, which nothing announces
        result = func(*args, **kwargs)
        if outputs := _tensors(result):
            self._line = self._here()
            after = _Seen.of(outputs)
            if self._first is None and after.begins(before):
                name = resolve_name(func) or getattr(func, "__name__", str(func))
                what = f"{name.removeprefix('torch.')} gives {after}"
                self._first = _error(what, self._line)
            self._watch(outputs)
        return result

    def check(self, results: Any) -> None:
        """Look at what a stage has computed.

        Raises:
            GemscError: it is not finite, and began in this stage; names the line.
        """
        outputs = _tensors(results)
        self._watch(outputs)
        if self._first is not None and not _Seen.of(outputs).is_finite:
            raise self._first

    def check_gradients(self) -> None:
        """Look at what was found in the stage's backward.

        Raises:
            GemscError: an operation made a gradient that is not finite; names its line.
        """
        if self._errors:
            raise self._errors[0]

    def _here(self) -> Line:
        """Return where the rank's file stands."""
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        return frame.f_code.co_filename, frame.f_lineno

    def _watch(self, tensors: list[Tensor]) -> None:
        """Look at the gradients of what autograd has recorded for a line."""
        nodes = [t.grad_fn for t in tensors if self._backward]
        while nodes:
            node = nodes.pop()
            if node is not None and node not in self._known:
                self._known.add(node)
                node.register_hook(partial(self._look, node.name(), self._line))
                nodes += [child for child, _ in node.next_functions]

    def _look(self, name: str, line: Line, gives: Any, takes: Any) -> None:
        """Compare the gradients that an operation has got with those that it gives."""
        if not self._errors:
            after = _Seen.of(_tensors(gives))
            if after.begins(_Seen.of(_tensors(takes))):
                what = f"{name} gives {after} in backward"
                self._errors.append(_error(what, line))


@dataclass(frozen=True)
class _Seen:
    """Whether some tensors have NaN, or infinity; numbers may be infinite, too."""

    nan: bool
    infinity: bool

    @classmethod
    def of(cls, tensors: list[Tensor], numbers: Sequence[Any] = ()) -> _Seen:
        values = [t.detach() for t in tensors]
        given = [n for n in numbers if isinstance(n, float)]
        nan = any(bool(t.isnan().any()) for t in values) or any(map(math.isnan, given))
        infinity = any(bool(t.isinf().any()) for t in values)
        return cls(nan, infinity or any(map(math.isinf, given)))

    @property
    def is_finite(self) -> bool:
        return not (self.nan or self.infinity)

    def begins(self, before: _Seen) -> bool:
        """Whether something is not finite here that was before."""
        return (not self.is_finite and before.is_finite) or self.nan > before.nan

    def __str__(self) -> str:
        return "NaN" if self.nan else "infinity"


def _tensors(nest: Any) -> list[Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if is_real(leaf.dtype)]


def _error(what: str, line: Line) -> GemscError:
    """Return what says where it began."""
    file, number = line
    notes = tuple((None, text) for text in generated_lines(Path(file), number))
    return GemscError(what, notes=notes, help=HELP)
