"""OPERATORS: what each kind of operation means, whoever cuts it.

One row for each kind of `calls`. Its equation says which dimensions of its operands and
its result are the same, which are summed over, and which must stay whole: shards follow
from it (`passes.shards`). The rest says what tiles, branches and writes must know. Code
that computes a part in a way of its own stands behind a row: under the same kind in
`passes.spatial.rules.RULES` and in `passes.shards.operations.OPERATIONS`.

Element by element, and views: what PyTorch itself tells to be such needs no row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from gemsc.ir.operators.calls import ALONG, Call
from gemsc.nn import FrozenBatchNorm

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


@dataclass(frozen=True)
class Equation:
    """An equation, and its operands' names among a call's arguments and parameters.

    `sizes` are those of the letters of products. What `whole` says why is not cut.
    """

    text: str
    operands: tuple[str, ...] = ("input", "weight", "bias")
    sizes: Mapping[str, int] = field(default_factory=dict)
    whole: str = ""


Form = Callable[[Call, Equation], Equation | None]  # of one call; None: it has none


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
    form: Form | None = None
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
        if self.equation is None or self.form is None:
            return self.equation
        return self.form(call, self.equation)


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
        if isinstance(value, fx.Node) and isinstance(_tensor(value), Tensor):
            operands.append(value)
        elif isinstance(getattr(call.layer, name, None), Tensor):
            operands.append(f"{call.node.target}.{name}")
        else:
            operands.append(None)
    return operands


# ------------------------------------------------------------- forms of equations


def _tensor(node: fx.Node) -> Tensor:
    """Return what stands for a node's value; the rest of `ir` is above this room."""
    found: Tensor = node.meta["val"]
    return found


def _rank_of(node: fx.Node) -> int:
    return _tensor(node).dim()


def _batched(call: Call, equation: Equation) -> Equation | None:
    """See that there are samples; a layer of no rank takes any."""
    alone = call.detail and _rank_of(call.input) != call.rank + 2
    return None if alone else equation


def _of_channels(call: Call, equation: Equation) -> Equation | None:
    """See that whole channels are dropped, and nothing is put in their place."""
    return _batched(call, equation) if call.detail else None


def _convolution(call: Call, equation: Equation) -> Equation | None:
    differs = call.get("padding_mode", "zeros") != "zeros"
    if _rank_of(call.input) != call.rank + 2:
        return None
    whole = "only zeros are padded in parts" if differs else ""
    return replace(equation, sizes={"g": int(call.get("groups", 1))}, whole=whole)


def _by_channels(call: Call, equation: Equation) -> Equation | None:
    """Return the equation of a frozen BatchNorm or of PReLU; others mix channels."""
    if isinstance(call.layer, FrozenBatchNorm):
        return equation
    weight = getattr(call.layer, "weight", call.arguments.get("weight"))
    if weight is None:
        return None
    slopes = weight if isinstance(weight, Tensor) else _tensor(weight)
    text = "n c *x, c -> n c *x" if slopes.numel() > 1 else "*d, s! -> *d"
    return Equation(text, ("input", "weight")) if slopes.dim() else None


def _padded(call: Call, equation: Equation) -> Equation | None:
    pad = call.get("pad", call.get("padding"))
    if not isinstance(pad, tuple | list):
        return None
    rank, count = _rank_of(call.input), len(pad) // 2
    kept = [f"k{place}" for place in range(rank - count)]
    source = [*kept, *(f"x{place}!" for place in range(count))]
    result = [*kept, *(f"y{place}" for place in range(count))]
    return replace(equation, text=f"{' '.join(source)} -> {' '.join(result)}")


def _instance_norm(call: Call, equation: Equation) -> Equation | None:
    tracks = call.get("track_running_stats", False) or call.get("running_mean")
    alone = _rank_of(call.input) == getattr(call.layer, "_get_no_batch_dim", int)()
    return None if tracks or alone else equation


def _group_norm(call: Call, equation: Equation) -> Equation:
    return replace(equation, sizes={"g": int(call["num_groups"])})


def _last_normalized(call: Call, equation: Equation) -> Equation:
    shape = call["normalized_shape"]
    count = 1 if isinstance(shape, int) else len(tuple(shape))
    last = " ".join(f"h{place}!" for place in range(count))
    return replace(equation, text=f"*b {last}, {last}, {last} -> *b {last}")


def _matmul(call: Call, equation: Equation) -> Equation:
    names = ("input", "mat2" if "mat2" in call.arguments else "other")
    left, right = (_rank_of(call[name]) for name in names)
    first = "*b m k+" if left > 1 else "k+"
    second = "*b k n" if right > 1 else "k"
    rest = ("m " if left > 1 else "") + ("n" if right > 1 else "")
    batch = "*b " if max(left, right) > 1 else ""
    return Equation(f"{first}, {second} -> {batch}{rest}", names)


def _addmm(call: Call, equation: Equation) -> Equation:
    scaled = call.get("beta", 1) != 1 or call.get("alpha", 1) != 1
    names = ("mat1", "mat2", "input")
    if "batch1" in call.arguments:
        names = ("batch1", "batch2", "input")
    k = "k!" if scaled else "k+"
    text = f"*b m {k}, *b k n, *b m n -> *b m n"
    if _rank_of(call["input"]) == 1:
        text = f"m {k}, k n, n -> m n"
    return Equation(text, names)


def _attention(call: Call, equation: Equation) -> Equation:
    if not call.get("enable_gqa", False):
        return equation
    heads = int(_tensor(call["key"]).shape[-3])
    mask = call.arguments.get("attn_mask")
    lower = isinstance(mask, fx.Node) and _rank_of(mask) == 2
    heads_of = "" if lower else "*b (h r) "
    text = f"*b (h r) q d!, *b h k! d, *b h k e, {heads_of}q k -> *b (h r) q e"
    return replace(equation, text=text, sizes={"h": heads})


def _embedding(call: Call, equation: Equation) -> Equation:
    whole = call.get("max_norm") is not None or any(
        call.get(name, False) for name in ("sparse", "scale_grad_by_freq")
    )
    return replace(equation, whole="it looks at all words" if whole else "")


def _cross_entropy(call: Call, equation: Equation) -> Equation:
    target = _tensor(call["target"])
    if target.is_floating_point() or _rank_of(call.input) < 2:
        return replace(equation, text="*x!, *y! -> ")
    result = "n *x" if call.get("reduction", "mean") == "none" else ""
    return replace(equation, text=f"n c *x, n *x -> {result}")


def _einsum(call: Call, equation: Equation) -> Equation | None:
    text = call.node.args[0]
    if not isinstance(text, str) or "->" not in text:
        return None
    left, right = text.replace(" ", "").split("->")
    summed = set(left) - set(right) - set(",.")

    def spaced(side: str) -> str:
        words = re.findall(r"\.\.\.|\w", side)
        marked = [f"{w}+" if w in summed else w for w in words]
        return " ".join("*B" if word == "..." else word for word in marked)

    sides = left.split(",")
    diagonal = any(len(set(side)) < len(side.replace("...", ".")) for side in sides)
    return Equation(
        f"{', '.join(map(spaced, sides))} -> {spaced(right)}",
        tuple(f"operand{place}" for place in range(len(sides))),
        whole="it takes a diagonal" if diagonal else "",
    )


def _index_add(call: Call, equation: Equation) -> Equation | None:
    plain = call.get("alpha", 1) == 1 and call.get("dim") in (0, -_rank_of(call.input))
    return equation if plain else None


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
_POOL = replace(_WINDOW, equation=Equation("n c *x! -> n c *y", _ONE), form=_batched)
_OWN_POOL = replace(_POOL, cuts_again=True, any_operand=True, wide=True)
_OF_POOL = ("kernel_size", "stride", "padding")
_REDUCES = Operator(does="reduction", how="sums")
_CONVOLUTION = replace(
    _WINDOW,
    form=_convolution,
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
    "pixel_shuffle": Operator(does="resize", how="own", by_sample=True, wide=True),
    "pixel_unshuffle": Operator(does="resize", how="own", by_sample=True, wide=True),
    "pad": Operator(
        Equation("the dimensions that are padded differ", _ONE),
        _padded,
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
        _group_norm,
        how="sums",
        by_sample=True,
        wide=True,
    ),
    "instance_norm": Operator(
        Equation("n c *x!, c, c -> n c *x", ("input", "weight", "bias")),
        _instance_norm,
        how="sums",
        wide=True,
        writes=_statistics,
    ),
    "layer_norm": Operator(
        Equation("*b h!, h!, h! -> *b h!"), _last_normalized, how="sums"
    ),
    "rms_norm": Operator(
        Equation("*b h!, h!, h! -> *b h!"), _last_normalized, how="sums"
    ),
    "dropout": Operator(Equation("*d -> *d", _ONE), how="mask", wide=True),
    "channel_dropout": Operator(
        Equation("n c *x -> n c *x", _ONE), _of_channels, how="mask", wide=True
    ),
    "channels": Operator(
        Equation("n c *x, c, c, c, c -> n c *x", _NORM),
        _by_channels,
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
        _matmul,
        does="product",
        how="own",
        any_operand=True,
        addend=True,
    ),
    "addmm": Operator(
        Equation("*b m k+, *b k n, *b m n -> *b m n", ("mat1", "mat2", "input")),
        _addmm,
        does="product",
        how="own",
        any_operand=True,
    ),
    "einsum": Operator(
        Equation("as it is written"),
        _einsum,
        does="product",
        how="own",
        any_operand=True,
        addend=True,
    ),
    "embedding": Operator(
        Equation("*b, v+ h -> *b h", ("input", "weight")),
        _embedding,
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
        _attention,
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
        _index_add,
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
        _cross_entropy,
        does="loss",
        how="sums",
        any_operand=True,
        words="c",
    ),
    **dict.fromkeys(("chunk", "split", "unbind"), Operator()),
}
NO_OPERATOR = Operator()
