"""The table of operators: complete, and true of what PyTorch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from gemsc.ir.mutation import mutated_inputs
from gemsc.ir.operators.calls import FUNCTIONS, LAYERS, call_of
from gemsc.ir.operators.table import HOW, OPERATORS, operator_of
from gemsc.passes.shards.analysis import cut_parts
from gemsc.passes.shards.equations import solve
from gemsc.passes.shards.factors import Dims, Factor, fresh, leaves
from gemsc.passes.shards.operations import OPERATIONS
from gemsc.passes.shards.rules import OTHERS
from gemsc.passes.spatial.rules.lower_call import RULES


def test_each_kind_has_a_row_and_what_stands_behind_it() -> None:
    kinds = {kind.partition(":")[0] for kind, _ in FUNCTIONS.values()}
    kinds |= {kind.partition(":")[0] for kind, _ in LAYERS.values()}
    assert kinds <= OPERATORS.keys()
    assert {kind for kind, row in OPERATORS.items() if row.how} == RULES.keys()
    assert {row.how for row in OPERATORS.values()} == {"", *HOW}
    assert OPERATIONS.keys() | OTHERS.keys() <= OPERATORS.keys()
    assert not [k for k in OTHERS if OPERATORS[k].equation is not None]


def node_of(function: Any, arguments: dict[str, Any]) -> fx.Node:
    """Return the node of a call; tensors among the arguments are inputs."""
    graph = fx.Graph()

    def given(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(name)
        node.meta["val"] = value
        return node

    named = {name: given(name, value) for name, value in arguments.items()}
    return graph.call_function(function, (), named)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


IMAGE = random(4, 8, 6, 6)
HEADS = random(2, 4, 6, 8), random(2, 4, 6, 8), random(2, 4, 6, 8)
EXACT: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (F.linear, {"input": random(4, 6), "weight": random(8, 6), "bias": None}),
    "conv": (
        F.conv2d,
        {"input": IMAGE, "weight": random(12, 4, 3, 3), "padding": 1, "groups": 2},
    ),
    "conv_transpose": (
        F.conv_transpose2d,
        {"input": IMAGE, "weight": random(8, 6, 3, 3), "groups": 2},
    ),
    "matmul": (torch.matmul, {"input": random(2, 4, 6), "other": random(2, 6, 8)}),
    "addmm": (
        torch.addmm,
        {"input": random(4, 8), "mat1": random(4, 6), "mat2": random(6, 8)},
    ),
    "group_norm": (
        F.group_norm,
        {"input": IMAGE, "num_groups": 4, "weight": random(8), "bias": random(8)},
    ),
    "layer_norm": (
        F.layer_norm,
        {"input": random(4, 6), "normalized_shape": (6,), "weight": random(6)},
    ),
    "batch_norm": (
        F.batch_norm,
        {
            "input": IMAGE,
            "running_mean": None,
            "running_var": None,
            "weight": random(8),
            "training": True,
        },
    ),
    "attention": (
        F.scaled_dot_product_attention,
        dict(zip(("query", "key", "value"), HEADS, strict=True)),
    ),
    "attention, of shared keys": (
        F.scaled_dot_product_attention,
        {
            "query": HEADS[0],
            "key": random(2, 2, 6, 8),
            "value": random(2, 2, 6, 8),
            "attn_mask": random(6, 6),
            "enable_gqa": True,
        },
    ),
    "channels": (F.prelu, {"input": IMAGE, "weight": random(8)}),
    "channels, of one slope": (F.prelu, {"input": IMAGE, "weight": random(1)}),
    "max_pool": (F.max_pool2d, {"input": IMAGE, "kernel_size": 2}),
    "embedding": (
        F.embedding,
        {"input": torch.randint(0, 6, (4, 2)), "weight": random(6, 8)},
    ),
}


def half_of(
    arguments: dict[str, Any],
    dims: dict[str, Dims],
    leaf: Factor,
    half: int,
    letter: str,
) -> dict[str, Any]:
    """Return the arguments with halves of what has a factor."""
    halved = dict(arguments)
    for name, of_operand in dims.items():
        if parts := cut_parts(of_operand, leaf, 2):
            halved[name] = parts[half].of(arguments[name])
    if letter == "k" and "mat1" in halved:  # what is added is added once
        halved["input"] = halved["input"] * half
    for setting in {"groups", "num_groups"} & halved.keys() if letter == "g" else ():
        halved[setting] //= 2
    return halved


@pytest.mark.parametrize("name", EXACT)
def test_what_an_equation_lets_be_cut_may_be_cut(name: str) -> None:
    """Halves of operands give halves of the result, or addends of a sum."""
    function, arguments = EXACT[name]
    kind = name.partition(",")[0]
    node = node_of(function, arguments)
    call = call_of(node, nn.Module())
    assert call.kind == kind
    equation = operator_of(call).equation_of(call)
    assert equation is not None
    whole = function(**arguments)
    dims = {
        name: [fresh(size) for size in arguments[name].shape]
        for name in equation.operands
        if isinstance(arguments.get(name), Tensor)
    }
    given = [dims.get(name) for name in equation.operands]
    roles = solve(equation.text, given, tuple(whole.shape), kind, equation.sizes)
    known = {leaf: letter for letter, d in roles.letters.items() for leaf in leaves(d)}
    cut = [leaf for leaf in known if not leaf.frozen and leaf.size % 2 == 0]
    assert cut
    for leaf in cut:
        is_sum = known[leaf] in roles.summed
        if is_sum and kind == "embedding":
            continue  # a rank looks up its own words: `tiles.embedding`
        halves = [
            function(**half_of(arguments, dims, leaf, half, known[leaf]))
            for half in range(2)
        ]
        if is_sum:
            torch.testing.assert_close(halves[0] + halves[1], whole)
            continue
        for result, part in zip(halves, cut_parts(roles.result, leaf, 2), strict=True):
            torch.testing.assert_close(result, part.of(whole))


WORDS = {"input": torch.randint(0, 6, (4, 2)), "weight": random(6, 8)}
ROWS = {"index": torch.tensor([1, 3]), "input": random(4, 6)}
NOT_CUT: dict[str, tuple[Any, dict[str, Any]]] = {
    "words by frequency": (F.embedding, {**WORDS, "scale_grad_by_freq": True}),
    "sparse words": (F.embedding, {**WORDS, "sparse": True}),
    "words that are normed": (F.embedding, {**WORDS, "max_norm": 1.0}),
    "rows of columns": (torch.index_add, {**ROWS, "dim": 1, "source": random(4, 2)}),
    "twice the rows": (
        torch.index_add,
        {**ROWS, "dim": 0, "source": random(2, 6), "alpha": 2},
    ),
    "no batch": (F.max_pool2d, {"input": random(8, 6, 6), "kernel_size": 2}),
    "statistics": (
        F.instance_norm,
        {"input": IMAGE, "running_mean": random(8), "running_var": random(8)},
    ),
    "a diagonal": (torch.einsum, {"equation": "ii,ij->ij"}),
}


@pytest.mark.parametrize("name", NOT_CUT)
def test_what_an_equation_cannot_say_is_not_cut(name: str) -> None:
    function, arguments = NOT_CUT[name]
    node = node_of(function, arguments)
    if function is torch.einsum:
        node.args, node.kwargs = (arguments["equation"],), {}
    call = call_of(node, nn.Module())
    equation = operator_of(call).equation_of(call)
    assert call.kind
    assert equation is None or equation.whole


STATISTICS = {"running_mean": random(8), "running_var": random(8).square()}
WRITERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "trains": (F.batch_norm, {"input": IMAGE, **STATISTICS, "training": True}),
    "does not": (F.batch_norm, {"input": IMAGE, **STATISTICS}),
    "own statistics": (F.instance_norm, {"input": IMAGE, **STATISTICS}),
    "given ones": (
        F.instance_norm,
        {"input": IMAGE, **STATISTICS, "use_input_stats": False},
    ),
    "norms": (
        F.embedding,
        {"input": torch.tensor([1, 2]), "weight": random(4, 8), "max_norm": 0.1},
    ),
    "no norms": (F.embedding, {"input": torch.tensor([1]), "weight": random(4, 8)}),
    "bag": (
        F.embedding_bag,
        {"input": torch.tensor([[1, 2]]), "weight": random(4, 8), "max_norm": 0.1},
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_a_row_says_is_written_is_written(name: str) -> None:
    function, arguments = WRITERS[name]
    args = {n: v.clone() if isinstance(v, Tensor) else v for n, v in arguments.items()}
    function(**args)
    tensors = {n: v for n, v in arguments.items() if isinstance(v, Tensor)}
    changed = {n for n, value in tensors.items() if not torch.equal(args[n], value)}
    node = node_of(function, arguments)
    assert {operand.name for operand in mutated_inputs(node, nn.Module())} == {
        node.kwargs[n].name for n in changed
    }
