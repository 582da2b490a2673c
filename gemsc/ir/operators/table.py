"""OPERATORS: what each kind of operation means, whoever cuts it.

One row for each kind of `calls`. Its equation says which dimensions of its operands and
its result are the same, which are summed over, and which must stay whole: shards follow
from it (`passes.shards`); where it depends on a call's arguments, `FORMS` has a
function that makes it of them. The rest says what tiles, branches and writes must know.
Code that computes a part in a way of its own stands behind a row: under the same kind
in `passes.spatial.rules.RULES` and in `passes.shards.operations.OPERATIONS`.

Element by element, and views: what PyTorch itself tells to be such needs no row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from gemsc.ir.operators.calls import ALONG, Call
from gemsc.ir.operators.forms import FORMS, Equation, tensor_of

# how a tile computes its part of pictures
HOW = {
    "halo": "with the rows beyond its own that it reads",
    "sums": "with sums over all tiles",
    "mask": "with its part of one mask",
    "own": "of its own rows",
    "along": "of its own rows, if it works along others",
    "rows": "with rows of other tiles, where it moves them",
    "keys": "of its own queries, and all keys and values",
}


@dataclass(frozen=True, slots=True)
class Operator:
    """What is true of one kind of operation.

    `does` says what it is to a picture: a window moves over it, a resize changes its
    rows, a product or a reduction leaves none of its own. `how` it is computed on tiles
    is a key of `HOW`. Some cut a whole picture again (`cuts_again`), take the cut value
    as `any_operand`, treat all samples alike (`by_sample`), or compute more than their
    own part if that is asked of them (`wide`).

    `settings` are those of its function, in order, where a layer may become one.
    `words` is the letter of what is looked up by number, of which a rank has one run;
    `unit` what one unit of a parameter is called. `writes` gives the arguments that a
    call changes in place. Of parts of channels its rule for tiles gives an `addend`
    where it sums over them.
    """

    equation: Equation | None = None
    does: str = ""
    how: str = ""
    cuts_again: bool = False
    any_operand: bool = False
    by_sample: bool = False
    wide: bool = False
    settings: tuple[str, ...] = ()
    words: str = ""
    unit: str = ""
    writes: Callable[[Call], tuple[str, ...]] | None = None
    addend: bool = False

    @property
    def adds_up(self) -> bool:
        """Whether its result is a sum over elements, or their mean."""
        return self.does == "loss" or (self.does == "reduction" and self.addend)

    def equation_of(self, call: Call) -> Equation | None:
        """Return the equation of one call, None if there is none for it."""
        if self.equation is None or call.kind not in FORMS:
            return self.equation
        return FORMS[call.kind](call, self.equation)


def operator_of(call: Call) -> Operator:
    """Return the row of a call."""
    return OPERATORS.get(call.kind, NO_OPERATOR)


def operands_of(call: Call, equation: Equation) -> list[fx.Node | str | None]:
    """Return the operands of an equation: nodes, or paths of a layer's tensors.

    What is not given, or is no tensor, is None; `operand2` is the third of `einsum`.
    """
    operands: list[fx.Node | str | None] = []
    for name in equation.operands:
        value = call.arguments.get(name)
        if name.startswith("operand"):
            tensors: Any = call.node.args[1:]
            if isinstance(tensors[0], list | tuple):  # torch.einsum("ij,jk", [a, b])
                (tensors,) = tensors
            value = tensors[int(name.removeprefix("operand"))]
        if isinstance(value, fx.Node) and isinstance(tensor_of(value), Tensor):
            operands.append(value)
        elif isinstance(getattr(call.layer, name, None), Tensor):
            operands.append(f"{call.node.target}.{name}")
        else:
            operands.append(None)
    return operands


# ------------------------------------------------------------------------ writes


def _statistics(call: Call) -> tuple[str, ...]:
    """Return the running statistics that a normalization updates."""
    trains = call.arguments.get("training", call.arguments.get("use_input_stats"))
    by_default = call.kind == "instance_norm"
    updates = by_default if trains is None else trains
    return ("running_mean", "running_var") if updates else ()


def _normalized_weight(call: Call) -> tuple[str, ...]:
    """Rows of a table are divided by norms that are larger than `max_norm`."""
    return ("weight",) if call.get("max_norm") is not None else ()


# ------------------------------------------------------------------------ the table

_ONE = ("input",)
_NORM = ("input", "running_mean", "running_var", "weight", "bias")
_WINDOW = Operator(does="window", how="halo", by_sample=True)
_POOL = replace(_WINDOW, equation=Equation("n c *x! -> n c *y", _ONE))
_OWN_POOL = replace(_POOL, cuts_again=True, any_operand=True, wide=True)
_OF_POOL = ("kernel_size", "stride", "padding")
_PIXELS = Operator(does="resize", how="own", by_sample=True, wide=True)
_REDUCES = Operator(does="reduction", how="sums")
_CONVOLUTION = replace(
    _WINDOW,
    cuts_again=True,
    any_operand=True,
    wide=True,
    addend=True,
)

OPERATORS: dict[str, Operator] = {
    "conv": replace(
        _CONVOLUTION,
        equation=Equation("n (g c+) *x!, (g o) c *k!, (g o) -> n (g o) *y"),
        unit="channel",
        settings=("stride", "padding", "dilation", "groups"),
    ),
    "conv_transpose": replace(
        _CONVOLUTION,
        equation=Equation("n (g c+) *x!, (g c) o *k!, (g o) -> n (g o) *y"),
        settings=("stride", "padding", "output_padding", "groups", "dilation"),
    ),
    "max_pool": replace(
        _OWN_POOL, settings=(*_OF_POOL, "dilation", "ceil_mode", "return_indices")
    ),
    "max_unpool": replace(_WINDOW, any_operand=True),
    "avg_pool": replace(
        _OWN_POOL,
        settings=(*_OF_POOL, "ceil_mode", "count_include_pad", "divisor_override"),
    ),
    "lp_pool": replace(_WINDOW, wide=True),
    "adaptive_avg_pool": _POOL,
    "adaptive_max_pool": _POOL,
    "interpolate": replace(_POOL, does="resize", wide=True),
    "pixel_shuffle": replace(
        _PIXELS,
        equation=Equation("n (c r! s!) x! y! -> n c h w", _ONE),
    ),
    "pixel_unshuffle": _PIXELS,
    "pad": Operator(
        Equation("the dimensions that are padded differ", _ONE),
        how="halo",
        by_sample=True,
    ),
    "batch_norm": Operator(
        Equation("n! c *x!, c, c, c, c -> n c *x", _NORM),
        how="sums",
        wide=True,
        writes=_statistics,
    ),
    "group_norm": Operator(
        Equation("n (g c!) *x!, (g c), (g c) -> n (g c) *x"),
        how="sums",
        by_sample=True,
        wide=True,
    ),
    "instance_norm": Operator(
        Equation("n c *x!, c, c -> n c *x", ("input", "weight", "bias")),
        how="sums",
        wide=True,
        writes=_statistics,
    ),
    "layer_norm": Operator(Equation("*b h!, h!, h! -> *b h!"), how="sums"),
    "rms_norm": Operator(Equation("*b h!, h!, h! -> *b h!"), how="sums"),
    "dropout": Operator(Equation("*d -> *d", _ONE), how="mask", wide=True),
    "channel_dropout": Operator(
        Equation("n c *x -> n c *x", _ONE), how="mask", wide=True
    ),
    "channels": Operator(
        Equation("n c *x, c, c, c, c -> n c *x", _NORM),
        how="own",
        by_sample=True,
        wide=True,
    ),
    "linear": Operator(
        Equation("*b i+, o i, o -> *b o"),
        does="product",
        how="own",
        addend=True,
    ),
    "matmul": Operator(
        Equation("*b m k+, *b k n -> *b m n", ("input", "other")),
        does="product",
        how="own",
        any_operand=True,
        addend=True,
    ),
    "addmm": Operator(
        Equation("*b m k+, *b k n, *b m n -> *b m n", ("mat1", "mat2", "input")),
        does="product",
        how="own",
        any_operand=True,
    ),
    "einsum": Operator(
        Equation("as it is written"),
        does="product",
        how="own",
        any_operand=True,
        addend=True,
    ),
    "embedding": Operator(
        Equation("*b, v+ h -> *b h", ("input", "weight")),
        does="product",
        how="own",
        words="v",
        unit="word",
        writes=_normalized_weight,
    ),
    "embedding_bag": Operator(writes=_normalized_weight),
    "attention": Operator(
        Equation(
            "*b q d!, *b k! d, *b k e, *b q k -> *b q e",
            ("query", "key", "value", "attn_mask"),
        ),
        does="product",
        how="keys",
        any_operand=True,
        unit="head",
    ),
    "cat": Operator(how="own", any_operand=True, wide=True),
    "stack": Operator(how="own", any_operand=True),
    **dict.fromkeys(ALONG, Operator(how="along")),
    "index_add": Operator(
        Equation("n! *d, r+, r *d -> n *d", ("input", "index", "source")),
    ),
    "narrow": Operator(how="rows"),
    "repeat": Operator(how="rows"),
    "roll": Operator(how="rows"),
    "flip": Operator(how="rows"),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum"), Operator(how="sums")),
    **dict.fromkeys(("sum", "mean"), replace(_REDUCES, addend=True)),
    **dict.fromkeys(("amax", "amin", "var", "std"), _REDUCES),
    **dict.fromkeys(("max", "min"), replace(_REDUCES, any_operand=True)),
    "loss": Operator(does="loss", how="sums", any_operand=True),
    "cross_entropy": Operator(
        Equation("n c *x, n *x -> ", ("input", "target")),
        does="loss",
        how="sums",
        any_operand=True,
        words="c",
    ),
    **dict.fromkeys(("chunk", "split", "unbind"), Operator()),
}
NO_OPERATOR = Operator()
