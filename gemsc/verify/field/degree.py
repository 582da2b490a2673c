"""How likely programs that differ give the same numbers: the degree of terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from gemsc.base.rng import QuietMode
from gemsc.verify.field.arithmetic import BACKWARDS, FUNCTIONS, ORDERED, SUMS
from gemsc.verify.field.mode import (
    DRAWS,
    MOVES,
    PLAIN,
    UNWRITTEN,
    NotesOnMemory,
    holds_numbers,
    name_and_place,
    names,
)
from gemsc.verify.field.rules import RESIZES

_ADDS = (
    names(
        "add sub subtract rsub neg sum mean cumsum where masked_fill copy fill scatter "
        "_to_copy constant_pad_nd lift_fresh native_dropout detach set _unsafe_view "
        "avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward "
        "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward "
        "native_dropout_backward"
    )
    | MOVES
    | PLAIN
    | SUMS
    | {*RESIZES, *(f"{name}_backward" for name in RESIZES)}
)
# constants in the shape of a value
_CONSTANTS = (
    names("full_like new_full zeros_like ones_like new_zeros new_ones zero bernoulli")
    | UNWRITTEN
    | {name.removesuffix("_") for name in DRAWS}
)
_MULTIPLIES = names(
    "mul multiply mm bmm mv dot addmm baddbmm addmv linear convolution "
    "convolution_backward addcmul lerp"
)
_ORDERS = ORDERED | {"eq", "ne"}
_FUNCTIONS = FUNCTIONS | {"exp", "log", "reciprocal"}
_NORMS = names("native_batch_norm native_group_norm native_layer_norm")
_SOFTMAX = 3  # exp of a number may be a quotient itself, that of a logarithm
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"

# of the degrees of an operator's arguments: that of its result, and that of what it
# gives to functions
_Rule = Callable[[list[int]], tuple[int, int]]


_ROWS: tuple[tuple[Iterable[str], _Rule], ...] = (
    (_MULTIPLIES, lambda d: (sum(sorted(d)[-2:]), 0)),
    (("square", "mse_loss"), lambda d: (2 * max(d), 0)),
    (("mse_loss_backward",), lambda d: (max(d) + d[0], 0)),
    (("linalg_vector_norm",), lambda d: (1, 2 * max(d))),
    (_FUNCTIONS, lambda d: (1, max(d))),
    (("rsqrt",), lambda d: (1, max(d) + 1)),  # of the root, too
    (_ORDERS, lambda d: (max(d), max(d))),
    (BACKWARDS, lambda d: (d[0] + 1, max(d[1:]))),
    (("_softmax", "_safe_softmax"), lambda d: (_SOFTMAX, max(d) + 2)),
    (("_log_softmax", "logsumexp"), lambda d: (max(*d, 2), max(d) + 2)),
    (
        ("_softmax_backward_data", "_log_softmax_backward_data"),
        lambda d: (d[0] + 2 * _SOFTMAX, 0),
    ),
    (_NORMS, lambda d: (d[0] + 2, 2 * d[0] + 1)),  # the variance, and its root
    (
        [f"{name}_backward" for name in _NORMS],
        lambda d: (d[0] + 2 * (d[1] + 1) + 2, 0),
    ),
    # query, key, value; before them, backward, the gradient; then what came out
    ((_ATTENTION,), lambda d: (d[2] + _SOFTMAX, d[0] + d[1] + 1)),
    (
        (f"{_ATTENTION}_backward",),
        lambda d: (d[0] + max(d[3:]) + max(d[1:3]) + 2 * _SOFTMAX, d[1] + d[2] + 1),
    ),
)
_RULES = {name: rule for named, rule in _ROWS for name in named}


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
                of_result = max(degree, self.of(t)) if written else degree
                self.highest = max(self.highest, of_result)
                self._known.enter(t, of_result)
        return result

    def of(self, t: Tensor) -> int:
        """Return the degree of a tensor; what nobody has computed was drawn."""
        degree = self._known.of(t)
        return 1 if degree is None else degree

    def _degree(self, name: str, args: Any, degrees: list[int]) -> int:
        """Return the degree of a result; count those of functions' arguments."""
        if name == "pow" and isinstance(args[1], int | float) and args[1] in range(9):
            return int(args[1]) * max(degrees)
        if name in ("div", "divide", "true_divide"):
            by = self.of(args[1]) if holds_numbers(args[1]) else 0
            self.total += by
            return degrees[0] + bool(by)
        # what torch composes of a few others: as if all were squared in a function
        twice = 2 * sum(degrees)
        degree, of_arguments = (
            _RULES[name](degrees) if name in _RULES else (twice, twice)
        )
        self.total += of_arguments
        self.chooses |= name in _ORDERS and max(degrees) > 0
        return degree
