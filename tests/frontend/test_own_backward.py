"""A backward of the user's own, on tiles: it need not be linear in the gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opaque_support import worst
from program_support import Net as Layers
from program_support import X, against_one_process, mse, written
from tile_support import Step, assert_same, eager, on_tiles, uneven_loss
from torch import Tensor, nn

from gemsc.errors import GemscError
from gemsc.frontend.record import record
from gemsc.ir.mutation import mutated_inputs
from gemsc.verify.compare import TOLERANCE

pytestmark = pytest.mark.usefixtures("in_double")
EXACT = TOLERANCE[torch.float64]


class Clipped(torch.autograd.Function):
    """Lets no large gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].clamp(-0.02, 0.02), None


class Scaled(torch.autograd.Function):
    """Its gradient depends on all elements of the one that comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        scaled = gradients[0] / gradients[0].norm()
        return scaled * weight, (scaled * x).sum().reshape(weight.shape).clamp(-1, 1)


class Averaged(torch.autograd.Function):
    """Element by element, but for a number that is that of the elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / x.numel()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clamp(-0.02, 0.02)


class Net(nn.Module):
    """Convolutions, a global pool and a head; `place` says where the function is."""

    def __init__(self, function: Any, place: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.function, self.place = function, place

    def change(self, x: Tensor, place: str) -> Tensor:
        if place != self.place:
            return x
        if self.function is Clipped:
            return self.function.apply(x, 0.02)
        scale = (self.scale,) if self.function is Scaled else ()
        return self.function.apply(x, *scale)

    def forward(self, x: Tensor) -> Tensor:
        x = self.change(torch.tanh(self.first(x)), "before")
        x = torch.tanh(self.second(x))
        x = self.change(x.sum(3), "rows").sum(2)
        return self.head(self.change(x, "behind"))


class Hooked(nn.Module):
    """Depends on data, and changes the gradient in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) if x.sum() < 1e9 else x
        if y.requires_grad:
            y.register_hook(lambda g: g.clamp(-0.05, 0.05))
        return y.tanh()


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.hooked = Hooked()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        pooled = torch.tanh(self.first(x)).mean((2, 3))
        return self.head(self.hooked(pooled))


def check(model: nn.Module, grid: tuple[int, ...], **options: Any) -> Step:
    x = torch.randn(2, 2, 8, 10, generator=torch.Generator().manual_seed(1))
    step = on_tiles(model, (x,), uneven_loss, None, grid, **options)
    assert_same(step, eager(model, (x,), uneven_loss, None))
    return step


@pytest.mark.slow(2)
@pytest.mark.by_day(5)
@pytest.mark.parametrize("place", ["before", "rows", "behind"])
@pytest.mark.parametrize("function", [Clipped, Scaled, Averaged])
def test_a_function_gets_the_gradient_of_one_process(function: Any, place: str) -> None:
    for grid in ((2, 1), (2, 2)):
        step = check(Net(function, place), grid, fuse=2)
        cut_along_all_axes = place == "before" or (place == "rows" and grid == (2, 1))
        is_gathered = place != "behind" and not (
            function is Clipped and cut_along_all_axes
        )
        assert bool(step.barriers) == is_gathered


class Doubled(torch.autograd.Function):
    """It computes something, so that tiles could compute it beyond their own rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clamp(-0.02, 0.02) * 2


class DoubledBefore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Doubled.apply(torch.tanh(self.first(x))))


def test_only_the_tile_that_owns_a_row_has_its_gradient() -> None:
    assert not check(DoubledBefore(), (2, 1), fuse=2).barriers


@pytest.mark.slow(1)
@pytest.mark.parametrize(("grid", "ranks"), [("2x1", 2), ("2x2", 4)])
@pytest.mark.parametrize("model", [lambda: Net(Clipped, "behind"), Pooled])
def test_a_program_clips_the_true_gradient(
    model: Callable[[], nn.Module], grid: str, ranks: int, tmp_path: Path
) -> None:
    x, y = torch.randn(2, 2, 8, 8), torch.randn(2, 3)
    options = {"tiles": (grid,), "ranks": ranks, "micro_batches": 2}
    assert worst(tmp_path, model(), x, y, mse, **options) <= EXACT
    text = (tmp_path / "rank0.py").read_text()
    assert "tiles.with_whole_gradients(" in text


class InPlace(torch.autograd.Function):
    """Writes to its input, and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clamp(-0.02, 0.02) * 2


class WithProduct(torch.autograd.Function):
    """Returns what it has written to, and something else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x, x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return (gradients[0] + 3 * gradients[1]).clamp(-0.02, 0.02) * 2


class Written(nn.Module):
    """Convolutions around a function that writes to its input, or to a view of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 2, 3, padding=1)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + 0.5  # as hooks of `check` are on layers
        if self.how == "all":
            x = InPlace.apply(x)
        elif self.how == "two":
            x, more = WithProduct.apply(x)
            x = x + more.tanh()
        elif self.how == "twice":
            x = InPlace.apply(InPlace.apply(x)).relu_()
        elif self.how == "then part":
            x = InPlace.apply(x)
            x[:, 0] = 0
        else:
            part = InPlace.apply(x[:, 1:])
            x = x + part.mean()
        return self.second(x)


@pytest.mark.parametrize("how", ["all", "two", "twice", "then part"])
def test_a_function_on_tiles_writes_to_its_input(how: str) -> None:
    check(Written(how), (2, 1))


def test_what_is_taken_out_of_its_result_writes_to_nothing() -> None:
    program = record(Written("two"), (torch.randn(2, 2, 4, 4),))
    nodes = program.graph.nodes
    written = {n.name: mutated_inputs(n, program.module) for n in nodes}
    assert [name for name, inputs in written.items() if inputs] == ["withproduct"]


def test_a_view_that_a_function_writes_to_is_refused_on_tiles_if_used_later() -> None:
    with pytest.raises(GemscError, match="'x_1', used later, has the same") as caught:
        check(Written("view"), (2, 1))
    assert caught.value.at is not None
    assert "test_own_backward.py" in str(caught.value.at)


def behind_a_message(self: Any, x: Tensor) -> Tensor:
    x = self.a(x)
    both = x * 2
    return self.c(self.b(InPlace.apply(x)).tanh() + both)


def part_of_a_message(self: Any, x: Tensor) -> Tensor:
    x = self.b(self.a(x))
    part = InPlace.apply(x[:, 2:])
    return self.c(x) + part.mean()


@pytest.mark.slow(2)
@pytest.mark.parametrize("forward", [behind_a_message, part_of_a_message])
@pytest.mark.parametrize("recompute", ["off", "all"])
def test_stages_and_what_is_recomputed_are_not_written_to(
    forward: Any, recompute: str, tmp_path: Path
) -> None:
    diff = against_one_process(tmp_path, Layers(forward), recompute=recompute)
    assert diff.worst < EXACT


class Counting(torch.autograd.Function):
    """Follows the data in a buffer, as a norm does."""

    @staticmethod
    def forward(x: Tensor, mean: Tensor) -> Tensor:
        mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * 2, None

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """It may be called by keyword: `forward` has no context."""


def counting_by_name(self: Any, x: Tensor) -> Tensor:
    return self.b(Counting.apply(self.a(x), mean=self.mean))


def counting(self: Any, x: Tensor) -> Tensor:
    return self.b(Counting.apply(self.a(x), self.mean))


@pytest.mark.parametrize("forward", [counting, counting_by_name])
def test_a_buffer_that_a_function_writes_to_is_refused_with_replicas(
    forward: Any, tmp_path: Path
) -> None:
    net = Layers(forward)
    net.register_buffer("mean", torch.zeros(4))
    with pytest.raises(GemscError, match="forward changes 'mean', and each of 2"):
        written(tmp_path, net, ranks=2, data=2)
    assert against_one_process(tmp_path, net, (X,)).worst < EXACT


class CountingBackward(torch.autograd.Function):
    """Follows the gradient in a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor) -> Tensor:
        ctx.mean = mean
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.mean.mul_(0.9).add_(gradients[0].mean(0))
        return gradients[0] * 2, None


def counting_backward(self: Any, x: Tensor) -> Tensor:
    return self.c(self.b(CountingBackward.apply(self.a(x), self.mean)))


def test_a_buffer_that_a_backward_writes_to_is_refused_with_replicas(
    tmp_path: Path,
) -> None:
    net = Layers(counting_backward)
    net.register_buffer("mean", torch.zeros(4))
    for options in ({"data": 2}, {"schedule": "mast", "micro_batches": 4}):
        with pytest.raises(GemscError, match="backward changes 'mean', and") as caught:
            written(tmp_path, net, ranks=2, **options)
        assert "test_own_backward.py" in str(caught.value.at)
    assert against_one_process(tmp_path, net, (X,)).worst < EXACT
    (note,) = written(tmp_path, net, ranks=2, micro_batches=2).plan.notes
    assert note.startswith("backward changes 'mean' once for each micro-batch")


class Following(torch.autograd.Function):
    """Follows the data in a buffer, and returns no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor) -> int:
        mean.mul_(0.9).add_(0.1 * x.mean(0))
        return 3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def without_result(self: Any, x: Tensor) -> Tensor:
    x = self.a(x)
    Following.apply(x, self.mean)
    return self.b(x)


def read_before_and_after(self: Any, x: Tensor) -> Tensor:
    before = self.mean.clone()
    x = Counting.apply(self.a(x), self.mean)
    return self.d(self.c(self.b(x) * before + self.mean))


def an_input_used_later(self: Any, x: Tensor) -> Tensor:
    x = self.b(self.a(x))
    Following.apply(x.detach(), x.detach()[0])
    return self.d(self.c(x))


@pytest.mark.slow(3)
@pytest.mark.parametrize("recompute", ["off", "all"])
@pytest.mark.parametrize(
    "forward", [without_result, read_before_and_after, an_input_used_later]
)
def test_what_a_function_writes_to_may_be_used_before_and_later(
    forward: Any, recompute: str, tmp_path: Path
) -> None:
    net = Layers(forward)
    net.register_buffer("mean", torch.zeros(4))
    errors = against_one_process(tmp_path, net, (X,), recompute=recompute)
    assert errors.worst < EXACT


def test_a_function_without_result_is_refused_with_replicas(tmp_path: Path) -> None:
    net = Layers(without_result)
    net.register_buffer("mean", torch.zeros(4))
    with pytest.raises(GemscError, match="forward changes 'mean', and each of 2"):
        written(tmp_path, net, ranks=2, data=2)
