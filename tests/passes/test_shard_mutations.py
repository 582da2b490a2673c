"""The well-known mistakes of sharded training, made on purpose: each one is found."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpt import Gpt, words
from parity_support import FLOAT64, lowered, options, worst_error
from shard_support import sharded
from tile_support import assert_same, eager, on_ranks
from torch import Tensor, nn

from gemsc.ir.program import Program
from gemsc.runtime.tiles import vocabulary
from gemsc.runtime.transport.local import LocalGroup

SHARDS = 2
Mistake = Callable[[Program], int]  # returns how often it was made


def compare(
    model: nn.Module, batch: Any, loss: Any, trunk: str, mistake: Mistake | None
) -> None:
    """Compare a step on shards, with a mistake in each rank's program."""
    inputs, target = batch
    whole, ranks = sharded(model, inputs, loss, target, SHARDS, trunk)
    for program in ranks if mistake is not None else ():
        assert mistake is not None
        assert mistake(program) > 0
    assert_same(
        on_ranks(whole, ranks, inputs, target), eager(model, inputs, loss, target)
    )


def bias_on_every_rank(program: Program) -> int:
    """Add a bias before the sum of the ranks' addends instead of after it."""
    made = 0
    for node in list(program.graph.nodes):
        if node.target is not operator.add or node.args[1].op != "get_attr":
            continue
        if getattr(node.args[0].target, "__name__", "") == "all_reduce":
            with program.graph.inserting_before(node):
                more = program.graph.call_function(operator.mul, (node.args[1], SHARDS))
            node.args = (node.args[0], more)
            made += 1
    return made


def own_statistics(program: Program) -> int:
    """Normalize each rank's samples by themselves, as data parallelism does."""

    def batch_norm(grid: Any, value: Tensor, layer: nn.Module) -> Tensor:
        return layer(value)

    return replaced(program, "batch_norm", batch_norm)


def replaced(program: Program, name: str, target: Callable[..., Any]) -> int:
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    calls = [n for n in nodes if n.target.__name__ == name]
    for node in calls:
        node.target = target
    return len(calls)


def mean_of_means(program: Program) -> int:
    """Divide each rank's loss by its own samples, and the sum by the ranks."""
    made = 0
    for node in program.graph.nodes:
        if node.target is F.mse_loss:
            node.kwargs = {}
            (total,) = node.users
            (mean,) = total.users
            mean.args = (total, SHARDS)
            made += 1
    return made


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def gpt() -> nn.Module:
    return Gpt(24, 4, 1, 12, 6)


def entropy(output: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(
        output.flatten(0, 1), target.flatten(), label_smoothing=smoothing
    )


def samples(count: int) -> tuple[tuple[Tensor], Tensor]:
    return (torch.randn(count, 5, 4),), torch.randn(count, 5, 4)


@pytest.mark.slow(1)
@pytest.mark.usefixtures("in_double")
@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize(
    ("make", "batch", "loss", "trunk", "mistake"),
    [
        (gpt, lambda: words(2, 6, 12), entropy, "whole", bias_on_every_rank),
        (mlp, lambda: samples(3), F.mse_loss, "batch", mean_of_means),
        (
            lambda: nn.Sequential(mlp(), nn.BatchNorm1d(5)),
            lambda: samples(4),
            F.mse_loss,
            "batch",
            own_statistics,
        ),
    ],
)
def test_a_mistake_in_the_program_is_found(
    make: Callable[[], nn.Module],
    batch: Callable[[], Any],
    loss: Any,
    trunk: str,
    mistake: Mistake,
) -> None:
    model, given = make(), batch()
    compare(model, given, loss, trunk, None)
    with pytest.raises(AssertionError):
        compare(model, given, loss, trunk, mistake)


@pytest.mark.slow
@pytest.mark.usefixtures("in_double")
@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_smoothing_over_own_words_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, loss = gpt(), words(2, 6, 12), partial(entropy, smoothing=0.1)
    compare(model, batch, loss, "whole", None)
    right, where = vocabulary._Loss, vocabulary._local_rows

    def own(words: Any, num_words: int, *args: Any) -> Any:
        return right(words, words[1] - words[0], *args)

    monkeypatch.setattr(vocabulary, "_Loss", own)
    monkeypatch.setattr(
        vocabulary, "_local_rows", lambda ids, words, _: where(ids, words, 12)
    )
    with pytest.raises(AssertionError, match="loss"):
        compare(model, batch, loss, "whole", None)


@pytest.mark.slow(1)
@pytest.mark.parametrize("divided", [None, 0, SHARDS])
def test_gradients_of_norms_that_are_not_summed_or_averaged_are_found(
    divided: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of gradients over ranks are as they are, left out, or means."""
    right = LocalGroup.all_reduce

    def wrong(self: LocalGroup, tensor: Tensor) -> Any:
        if self._key.startswith(("tiles of", "losses")):
            return right(self, tensor)
        summed = tensor.clone() if not divided else tensor
        request = right(self, summed)
        if divided:
            self._transport.wait(request)
            tensor /= divided
        return request

    choice = options(ranks=2, shards="2", trunk="whole", micro_batches=2)
    assert lowered("gpt", choice).compilation.parts(0)
    if divided is not None:
        monkeypatch.setattr(LocalGroup, "all_reduce", wrong)
    error = worst_error("gpt", choice, tmp_path / "p")
    assert error <= FLOAT64 if divided is None else error > 0.1
