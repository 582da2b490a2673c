"""How likely programs that differ give the same numbers: the degree of terms."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from gemsc.base.draws import QuietMode
from gemsc.verify.field import rules
from gemsc.verify.field.dispatch import NotesOnMemory, holds_numbers, name_and_place

__all__ = ["Degrees"]

_ADDS = frozenset(
    [
        *("add", "sub", "subtract", "rsub", "neg", "sum", "mean", "cumsum", "where"),
        *("masked_fill", "copy", "fill", "_to_copy", "scatter", "constant_pad_nd"),
        *("lift_fresh", "native_dropout", "detach", "set", "_unsafe_view"),
        *("avg_pool2d", "avg_pool2d_backward", "avg_pool3d", "avg_pool3d_backward"),
        *("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward"),
        *("nll_loss2d_backward", "native_dropout_backward"),
        *rules.MOVES,
        *rules.PLAIN,
        *rules.SUMS,
        *rules.RESIZES,
        *(f"{name}_backward" for name in rules.RESIZES),
    ]
)
# constants in the shape of a value
_CONSTANTS = frozenset(
    [
        *("full_like", "new_full", "zeros_like", "ones_like", "new_zeros", "new_ones"),
        *("zero", "bernoulli", *rules.UNWRITTEN),
        *(name.removesuffix("_") for name in rules.DRAWS),
    ]
)
_MULTIPLIES = frozenset(
    [
        *("mul", "multiply", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv"),
        *("linear", "convolution", "convolution_backward", "addcmul", "lerp"),
    ]
)
_ORDERS = frozenset([*rules.ORDERED, "eq", "ne"])
_FUNCTIONS = frozenset([*rules.FUNCTIONS, "exp", "log", "reciprocal"])
_NORMS = ("native_batch_norm", "native_group_norm", "native_layer_norm")
_NORMS_BACKWARD = tuple(f"{name}_backward" for name in _NORMS)
_SOFTMAX = 3  # exp of a number may be a quotient itself, that of a logarithm
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class Degrees(QuietMode):  # type: ignore[no-untyped-call]
    """Bounds the degree of what is computed, in what is drawn.

    Drawn are weights, inputs and the values of functions, of which 1 / x is one here.
    Two programs that differ give the same numbers only if their difference vanishes at
    the arguments of some function or in the end: `total` has the degrees of all such
    arguments, `highest` is that of any value. What a maximum or a comparison leaves out
    vanishes, too: `chooses` is whether there is one of numbers that were drawn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.highest = 1
        self.chooses = False
        self._known = NotesOnMemory[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute, and note the degrees of arguments and results."""
        name, _ = name_and_place(func)
        given = [t for t in pytree.tree_leaves((args, kwargs)) if holds_numbers(t)]
        degrees = [self.of(t) for t in given]
        result = func(*args, **(kwargs or {}))
        if degrees:
            if name in _CONSTANTS:
                degree = 0
            elif func.is_view or name in _ADDS:
                degree = max(degrees)
            else:
                degree = self._degree(name, args, degrees)
            written = func._schema.is_mutable
            for t in filter(holds_numbers, pytree.tree_leaves(result)):
                self._enter(t, max(degree, self.of(t)) if written else degree)
        return result

    def of(self, t: Tensor) -> int:
        """Return the degree of a tensor; what nobody has computed was drawn."""
        degree = self._known.of(t)
        return 1 if degree is None else degree

    def _enter(self, t: Tensor, degree: int) -> None:
        self.highest = max(self.highest, degree)
        self._known.enter(t, degree)

    def _degree(self, name: str, args: Any, degrees: list[int]) -> int:  # noqa: C901
        """Return the degree of a result; count those of functions' arguments."""
        top, two = max(degrees), sum(sorted(degrees)[-2:])
        if name in _MULTIPLIES:
            return two
        if name in ("square", "mse_loss"):
            return 2 * top
        if name == "mse_loss_backward":
            return top + degrees[0]
        if name == "linalg_vector_norm":
            self.total += 2 * top
            return 1
        if name == "pow" and isinstance(args[1], int | float) and args[1] in range(9):
            return int(args[1]) * top
        if name in _ORDERS:
            self.total += top
            self.chooses |= top > 0
            return top
        if name == "rsqrt":  # of the root, too
            self.total += top + 1
            return 1
        if name in _FUNCTIONS:
            self.total += top
            return 1
        if name in ("div", "divide", "true_divide"):
            by = self.of(args[1]) if holds_numbers(args[1]) else 0
            self.total += by
            return degrees[0] + bool(by)
        if name in rules.BACKWARDS:
            self.total += max(degrees[1:])
            return degrees[0] + 1
        if name in ("_softmax", "_safe_softmax", "_log_softmax", "logsumexp"):
            self.total += top + 2
            return max(top, 2) if "log" in name else _SOFTMAX
        if name in ("_softmax_backward_data", "_log_softmax_backward_data"):
            return degrees[0] + 2 * _SOFTMAX
        if name in _NORMS:
            self.total += 2 * degrees[0] + 1  # the variance, and its root
            return degrees[0] + 2
        if name in _NORMS_BACKWARD:
            return degrees[0] + 2 * (degrees[1] + 1) + 2
        if name == _ATTENTION:
            query, key, value = degrees[:3]
            self.total += query + key + 1
            return value + _SOFTMAX
        if name == f"{_ATTENTION}_backward":
            gradient, query, key, value = degrees[:4]
            self.total += query + key + 1
            return gradient + value + max(query, key) + 2 * _SOFTMAX
        # what torch composes of a few others: as if all were squared in a function
        self.total += 2 * sum(degrees)
        return 2 * sum(degrees)
