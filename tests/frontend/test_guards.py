"""Branches that only raise, or mend what is not finite, are asked for as it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from program_support import Net, X, against_one_process, mse, on_ranks, written
from torch import Tensor, nn
from torch.nn import functional as F

from gemsc.compiler import compile
from gemsc.errors import GemscError
from gemsc.frontend import record
from gemsc.runtime.tiles import must_be


def clamps(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    if not torch.isfinite(h).all():
        h = torch.nan_to_num(h)
    return self.d(self.b(h).tanh())


def clamps_in_training(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    if self.training and (torch.isinf(h).any() or torch.isnan(h).any()):
        most = torch.finfo(h.dtype).max - 1000
        h = torch.clamp(h, min=-most, max=most)
    return self.d(self.b(h).tanh())


def raises(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    if (h.abs() > 1e9).any():
        worst = h.max()
        raise ValueError(worst)
    return self.d(self.b(h).tanh())


def asserts(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    assert (h.abs() < 1e9).all()
    return self.d(self.b(h).tanh())


def validates(self: Any, x: Tensor) -> Tensor:
    spread = F.softplus(self.b(x))
    normal = torch.distributions.Normal(self.a(x), spread, validate_args=True)
    return self.d(normal.log_prob(x))


def is_small(h: Tensor) -> bool:
    return bool((h.abs() < 1e9).all())


def asks_a_function(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    if not is_small(h):
        raise ValueError
    return self.d(self.b(h).tanh())


GUARDS = [clamps, clamps_in_training, raises, asserts, validates, asks_a_function]


@pytest.mark.slow(4)
@pytest.mark.parametrize("forward", GUARDS)
def test_a_guard_is_part_of_the_program(
    forward: Callable[..., Tensor], tmp_path: Path
) -> None:
    assert against_one_process(tmp_path, Net(forward)).worst < 1e-9
    text = "".join(path.read_text() for path in tmp_path.glob("rank*.py"))
    assert "tiles.must_be(" in text


@pytest.mark.slow(3)
@pytest.mark.parametrize("forward", GUARDS)
def test_data_that_take_the_branch_stop_the_run_before_the_update(
    forward: Callable[..., Tensor], tmp_path: Path
) -> None:
    written(tmp_path, Net(forward), (X,), ranks=2, micro_batches=2)
    batch = torch.cat([X, X])
    batch[2, 0] = torch.nan if forward is not raises else 1e30

    def step(trainer: Any) -> None:
        before = {n: t.clone() for n, t in trainer.state_dict().items()}
        try:
            trainer.step(batch, batch)
        finally:
            after = trainer.state_dict()
            assert all(torch.equal(before[n], t) for n, t in after.items())

    with pytest.raises(GemscError, match=r"that was not compiled: test_guards.py:\d+"):
        on_ranks(tmp_path, 2, step)


@pytest.mark.slow
def test_a_guard_on_tiles_looks_at_all_of_them(tmp_path: Path) -> None:
    class Picture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            if torch.isinf(h).any():
                h = h.clamp(-1e4, 1e4)
            return self.b(h)

    x = torch.randn(1, 1, 8, 6)
    how = {"ranks": 2, "tiles": "2x1", "micro_batches": 1}
    compile(Picture(), (x,), loss=mse, example_target=x, **how)  # runs a step
    written(tmp_path, Picture(), (x,), mse, x, **how)
    broken = x.clone()
    broken[0, 0, 7, 0] = torch.inf  # only the lower tile has it
    with pytest.raises(GemscError, match="not compiled"):
        on_ranks(tmp_path, 2, lambda trainer: trainer.step(broken, x))


def doubles(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    if h.sum() > 0:
        h = h * 2
    return self.d(h)


def has_two_ways(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    if torch.isnan(h).any():
        h = self.b(x)
    else:
        h = self.c(h)
        h = h.relu()
    return self.d(h)


def returns_early(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    if torch.isnan(h).any():
        return h
    return self.d(h)


def chooses(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.d(h) if torch.isnan(h).any() else h


def leaves_in_between(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    if (h > 0).any():
        if x.shape[0] > 1:
            return h
        raise ValueError
    return self.d(h)


@pytest.mark.parametrize(
    "forward", [doubles, has_two_ways, returns_early, chooses, leaves_in_between]
)
def test_a_branch_that_computes_is_refused(forward: Callable[..., Tensor]) -> None:
    with pytest.raises(GemscError, match="needs the value of a tensor"):
        record(Net(forward), (X,))


class Strided(Net):
    """Keeps whole numbers in buffers, as audio codecs do."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__(forward)
        self.register_buffer("size", torch.tensor(3))
        self.register_buffer("stride", torch.tensor(2), persistent=False)
        self.register_buffer("scaled", torch.tensor([True]))
        self.register_buffer("table_size", torch.tensor([3, 2, 1]))


def reads_numbers(self: Any, x: Tensor) -> Tensor:
    h = self.a(x) * int(self.size) * self.stride.item()
    return self.d(self.b(h).tanh() * 2 if self.scaled else h)


def pads(self: Any, x: Tensor) -> Tensor:
    steps = torch.ceil((x.shape[-1] - self.size) / self.stride + 1).to(torch.int64) - 1
    extra = steps * self.stride + self.size - x.shape[-1]
    h = F.pad(self.a(x), (1, 2 + extra))
    return self.d(self.b(h[..., 1 : h.shape[-1] - 2 - extra]).tanh())


def reads_several(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    for number in self.table_size.tolist():
        h = h * number
    return self.d(
        self.b(h) * self.table_size[self.table_size % 2].sum()
        + self.table_size[1].item()
    )


@pytest.mark.slow(1)
@pytest.mark.parametrize("forward", [reads_numbers, pads, reads_several])
def test_a_whole_number_in_a_buffer_is_known(
    forward: Callable[..., Tensor], tmp_path: Path
) -> None:
    assert against_one_process(tmp_path, Strided(forward)).worst < 1e-9


def test_a_size_is_written_as_a_number() -> None:
    calls = [
        n for n in record(Strided(pads), (X,)).module.graph.nodes if n.target is F.pad
    ]
    assert [type(size) for size in calls[0].args[1]] == [int, int]


@pytest.mark.slow(1)
@pytest.mark.parametrize("forward", [reads_numbers, pads, reads_several])
def test_other_weights_with_another_number_stop_the_run(
    forward: Callable[..., Tensor], tmp_path: Path
) -> None:
    written(tmp_path, Strided(forward), (X,), ranks=2, micro_batches=2)
    batch = torch.cat([X, X])

    def step(trainer: Any) -> None:
        for name, tensor in trainer.state_dict().items():
            if name.endswith("size"):
                tensor.fill_(6)
        trainer.step(batch, batch)

    with pytest.raises(GemscError, match=r"another value .*: test_guards.py:\d+"):
        on_ranks(tmp_path, 2, step)


def counts(self: Any, x: Tensor) -> Tensor:
    h = self.a(x) * int(self.size)
    self.size += 1
    return self.d(h)


def counts_first(self: Any, x: Tensor) -> Tensor:
    self.size.view(1)[0] = 4
    return self.d(self.a(x) * int(self.size))


def assigns(self: Any, x: Tensor) -> Tensor:
    h = self.a(x) * int(self.size)
    self.size = self.size + 1
    return self.d(h)


def hides(self: Any, x: Tensor) -> Tensor:
    return self.d(self.a(x) * F.one_hot(self.size).sum())


def counts_some(self: Any, x: Tensor) -> Tensor:
    self.table_size[1:][0] += 1
    return self.d(self.a(x) * int(self.table_size[1]))


def reads_a_part_that_has_changed(self: Any, x: Tensor) -> Tensor:
    part = self.table_size[1:]
    self.table_size[1] = 9
    return self.d(self.a(x) * int(part[0]))


def reads_a_view_of_what_is_computed(self: Any, x: Tensor) -> Tensor:
    number = torch.tensor([3])
    view = number.view(1)
    number.copy_(x.argmax().view(1))
    return self.d(self.a(x) * int(view))


def compares(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.d(h) if torch.equal(self.table_size, self.table_size * 1) else h


def compares_all(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.d(h) if torch.equal(self.table_size, self.table_size) else h


def counts_all_through_a_part(self: Any, x: Tensor) -> Tensor:
    h = self.a(x) * int(self.table_size[2])
    self.table_size[1:][:2].mul_(2)
    return self.d(h)


def picks(self: Any, x: Tensor) -> Tensor:
    known = self.table_size[self.table_size > 2]  # how many there are is not asked
    return self.d(self.a(x) * len(known))


def picks_by_a_buffer(self: Any, x: Tensor) -> Tensor:
    return self.d(self.a(x) * len(self.table_size.nonzero()[2:]))


@pytest.mark.parametrize(
    "forward",
    [
        *(counts, counts_first, assigns, hides),
        *(counts_some, counts_all_through_a_part, reads_a_part_that_has_changed),
        reads_a_view_of_what_is_computed,
        *(compares, compares_all, picks, picks_by_a_buffer),
    ],
)
def test_a_number_that_forward_changes_is_not_known(
    forward: Callable[..., Tensor],
) -> None:
    with pytest.raises(GemscError, match=r"of a tensor|on the data|deterministic"):
        record(Strided(forward), (X,))


def test_must_be() -> None:
    must_be(True, torch.tensor(5.0), "x")
    must_be(2, torch.tensor([2]), "x")
    with pytest.raises(GemscError, match=r"\(3, not 2\).*: x"):
        must_be(2, torch.tensor(3), "x")
    test = torch.tensor(True)
    assert must_be(True, test, "x") is not test
    for value, given in ((True, False), (False, True)):
        with pytest.raises(GemscError, match="not compiled: x"):
            must_be(value, torch.tensor(given), "x")
