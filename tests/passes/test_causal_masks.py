"""Attention with the causal mask is told so instead, with any other it is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_support import Net, against_one_process, mse, run_passes
from torch import Tensor, nn

from gemsc.compiler import trace
from gemsc.frontend import FRONTENDS
from gemsc.ir.program import Program
from gemsc.passes.canonicalize import Canonicalize
from gemsc.passes.constants.causal_masks import CausalMasks

N = 6
TEXT = torch.randn(2, N, 4, generator=torch.Generator().manual_seed(0))
Mask = Callable[[Any, Tensor], Tensor]


def of(mask: Mask) -> Net:
    """Return a network of two layers of attention with one mask."""

    def attend(x: Tensor, seen: Tensor) -> Tensor:
        heads = x.unflatten(2, (2, 2)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            heads, heads, heads, seen, dropout_p=0.0, scale=0.3
        )
        return mixed.transpose(1, 2).flatten(2)

    def forward(self: Any, x: Tensor) -> Tensor:
        seen = mask(self, x)
        h = attend(self.a(x), seen)
        return self.c(attend(self.b(h), seen))

    net = Net(forward)
    net.register_buffer("lower", torch.ones(N, N, dtype=torch.bool).tril())
    net.learned = nn.Parameter(torch.zeros(N, N))
    return net


def program(net: nn.Module, inputs: Any = (TEXT,)) -> Program:
    return trace(net, inputs, loss=mse, example_target=TEXT, check=False).program


def calls(program: Program) -> list[dict[str, Any]]:
    """Return the keywords of all calls of attention."""
    attention = F.scaled_dot_product_attention
    return [n.kwargs for n in program.compute_nodes if n.target is attention]


def places(self: Any, x: Tensor) -> Tensor:
    """As in transformers, where each query has the number of its text."""
    place = torch.arange(N).expand(2, -1)
    text = (torch.diff(place, prepend=place[:, :1] - 1) != 1).cumsum(-1)
    rows, queries, keys = torch.arange(2)[:, None, None, None], *two_ways()
    seen = place[rows, keys] <= place[rows, queries]
    return seen & (text[rows, queries] == text[rows, keys])


def two_ways() -> tuple[Tensor, Tensor]:
    numbers = torch.arange(N)
    return numbers[None, None, :, None], numbers[None, None, None, :]


def added(self: Any, x: Tensor) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(N)


def least(self: Any, x: Tensor) -> Tensor:
    mask = torch.full((N, N), torch.finfo(torch.float32).min)
    return torch.triu(mask, 1)[None, None].expand(2, 1, N, N)


def of_booleans(self: Any, x: Tensor) -> Tensor:
    return ~torch.ones(N, N, dtype=torch.bool).triu(1)


@pytest.mark.slow(1)
@pytest.mark.parametrize("mask", [places, added, least, of_booleans])
def test_a_causal_mask_is_not_made(mask: Mask, tmp_path: Path) -> None:
    net = of(mask)
    made = program(net)
    kwargs = {"dropout_p": 0.0, "scale": 0.3, "is_causal": True}
    assert calls(made) == [kwargs, kwargs]
    names = [str(n.target) for n in made.compute_nodes]
    assert not any("arange" in n or "triu" in n or "full" in n for n in names)
    diff = against_one_process(tmp_path, net, (TEXT,), target=TEXT, ranks=2)
    assert diff.worst < 1e-9


def strict(self: Any, x: Tensor) -> Tensor:
    return torch.ones(N, N).tril(-1).bool() | (torch.arange(N) == 0)


def one_more(self: Any, x: Tensor) -> Tensor:
    return torch.ones(N, N, dtype=torch.bool).tril(1)


def banded(self: Any, x: Tensor) -> Tensor:
    rows = torch.arange(N)[:, None] - torch.arange(N)
    return (rows >= 0) & (rows < 4)


def of_one_sample(self: Any, x: Tensor) -> Tensor:
    lower = torch.ones(N, N, dtype=torch.bool).tril()
    return torch.stack([lower, torch.ones_like(lower)])[:, None]


def weighted(self: Any, x: Tensor) -> Tensor:
    return torch.ones(N, N).tril() - 1  # -1 is not masked


def biased(self: Any, x: Tensor) -> Tensor:
    masked = torch.full((N, N), -math.inf).triu(1)
    return masked + (torch.arange(N) == 2) * 0.5


def of_a_buffer(self: Any, x: Tensor) -> Tensor:
    lower: Tensor = self.lower  # others may be loaded
    return lower.clone()


def of_a_parameter(self: Any, x: Tensor) -> Tensor:
    return self.learned + torch.full((N, N), -math.inf).triu(1)


def of_the_input(self: Any, x: Tensor) -> Tensor:
    return torch.ones(N, N, dtype=torch.bool).tril() & (x[:, None, :1, :1] < 9)


def of_chance(self: Any, x: Tensor) -> Tensor:
    return (torch.rand(N, N) < 2).tril()


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    "mask",
    [
        *(strict, one_more, banded, of_one_sample, weighted, biased),
        *(of_a_buffer, of_a_parameter, of_the_input, of_chance),
    ],
)
def test_any_other_mask_stays(mask: Mask) -> None:
    for kwargs in calls(program(of(mask))):
        assert not kwargs.get("is_causal", False)


def test_a_mask_of_one_query_and_key_stands_for_all() -> None:
    """It is broadcast: each query may see each key."""
    assert calls(program(of(lambda self, x: torch.ones(1, 1, dtype=torch.bool)))) == [
        {"dropout_p": 0.0, "scale": 0.3},
        {"dropout_p": 0.0, "scale": 0.3},
    ]


def test_a_mask_that_is_large_in_the_making_is_not_computed_here() -> None:
    given: Any = {"loss": mse, "target": TEXT, "training": True}
    recorded = FRONTENDS["record"](of(of_booleans), (TEXT,), **given)
    plain = run_passes(recorded, [Canonicalize()])
    assert run_passes(plain, [CausalMasks(most_bytes=N * N - 1)]) is plain
    assert run_passes(plain, [CausalMasks(most_bytes=N * N)]) is not plain


def test_heads_that_share_a_key_do_so_without_their_mask() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        heads = self.a(x).unflatten(2, (2, 2)).transpose(1, 2)
        key, seen = heads[:, :1], of_booleans(self, x)
        mixed = F.scaled_dot_product_attention(heads, key, key, seen, enable_gqa=True)
        return self.b(mixed.transpose(1, 2).flatten(2))

    assert calls(program(Net(forward))) == [{"enable_gqa": True, "is_causal": True}]
