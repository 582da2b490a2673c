"""Functions that hold the model are refused: its copies would call the original."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.nn.functional as F
from program_support import Net, X, mse
from torch import Tensor, nn

from gemsc.errors import GemscError
from gemsc.frontend import FRONTENDS


def chain(self: Any, x: Tensor) -> Tensor:
    return self.d(self.c(self.act(self.b(self.a(x)))))


def with_a_mode() -> nn.Module:
    net = Net(chain)
    net.act = lambda x: F.dropout(x, 0.5, net.training)
    return net


def with_a_layer_in_a_list() -> nn.Module:
    net = Net(lambda self, x: self.d(self.acts[0](self.a(x))))
    layer = net.b
    net.acts = [lambda x: layer(x)]
    return net


def with_a_hook() -> nn.Module:
    net = Net(chain, act=nn.Tanh())
    net.b.register_forward_hook(lambda module, args, out: out * net.c.bias)
    return net


def with_another_forward() -> nn.Module:
    net = Net(chain, act=nn.Tanh())
    before = net.b.forward
    net.b.forward = lambda x: before(x) * 2
    return net


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (with_a_mode, "self.act is a function that holds 'net'"),
        (with_a_layer_in_a_list, r"self.acts\[0\] is a function that holds 'layer'"),
        (with_a_hook, r"self.b._forward_hooks\[\d+\] is a function that holds 'net'"),
        (with_another_forward, "self.b.forward is a function that holds 'before'"),
    ],
)
def test_a_function_that_holds_the_model_is_refused(
    make: Callable[[], nn.Module], name: str, frontend: str
) -> None:
    with pytest.raises(GemscError, match=name) as caught:
        FRONTENDS[frontend](make(), (X,), loss=mse, target=X)
    assert caught.value.at is not None
    assert caught.value.at.file == __file__


class Bound(nn.Module):
    """What the refusal advises: a method as a hook, and a `partial`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.a.register_forward_hook(self.dropped)
        self.act = partial(Bound.doubled, self)

    def dropped(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return F.dropout(out, 0.5, self.training)

    def doubled(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


@pytest.mark.parametrize("training", [True, False])
def test_methods_and_partial_functions_follow_the_copy(training: bool) -> None:
    program = FRONTENDS["record"](Bound(), (X,), training=training)
    targets = {str(node.target) for node in program.graph.nodes}
    assert any("mul" in target for target in targets) == training
    (drop,) = (n for n in program.graph.nodes if "dropout" in str(n.target))
    is_off = any(v is False for v in (*drop.args, *drop.kwargs.values()))
    assert is_off == (not training)
