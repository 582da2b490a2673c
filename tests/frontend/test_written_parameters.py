"""Parameters that forward writes to: exact, or refused with advice that works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_support import X, against_one_process, on_ranks, trunk, written
from threads import run_on_threads
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm

from gemsc import compile
from gemsc.errors import GemscError
from gemsc.user_model import load_user_model
from gemsc.verify.compare import TOLERANCE, compare
from gemsc.verify.one_process import reference_steps

EXACT = TOLERANCE[torch.float64]
NUM, WIDTH = 10, 4
WORDS = torch.randint(0, NUM, (2, 3), generator=torch.Generator().manual_seed(0))


def word_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


# ------------------------------------------------------------ rows that are scaled


def by_layer(self: Any, words: Tensor) -> Tensor:
    return self.table(words)


def by_function(self: Any, words: Tensor) -> Tensor:
    return F.embedding(words, self.weight, max_norm=0.8, norm_type=1.0)


def by_position(self: Any, words: Tensor) -> Tensor:
    return F.embedding(words, self.weight, None, 0.8)


def in_bags(self: Any, words: Tensor) -> Tensor:
    flat = self.bags(words.flatten(0, -1)[:, None])
    return flat.view(*words.shape, WIDTH)


def in_bags_by_function(self: Any, words: Tensor) -> Tensor:
    rows = words.flatten(0, -1)[:, None]
    bags = F.embedding_bag(rows, self.weight, None, 0.8, mode="sum")
    return bags.view(*words.shape, WIDTH)


def of_a_computed_weight(self: Any, words: Tensor) -> Tensor:
    weight = self.weight * 2
    return F.embedding(words, weight, max_norm=0.8) + weight.sum(0)


def by_hand(self: Any, words: Tensor) -> Tensor:
    """As the advice says."""
    weight, max_norm = self.weight, 0.8
    scaled = weight * (max_norm / weight.norm(dim=-1, keepdim=True)).clamp(max=1)
    return F.embedding(words, scaled)


WRITING = [by_layer, by_function, by_position, in_bags, in_bags_by_function]


class Words(nn.Module):
    def __init__(self, look_up: Callable[..., Tensor], *, tied: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            weight = torch.randn(NUM, WIDTH) * 2
        if look_up is by_layer:
            self.table = nn.Embedding(NUM, WIDTH, max_norm=0.8, _weight=weight)
        elif look_up is in_bags:
            self.bags = nn.EmbeddingBag(
                NUM, WIDTH, max_norm=0.8, mode="sum", _weight=weight
            )
        else:
            self.weight = nn.Parameter(weight)
        self.look_up = look_up
        self.trunk = trunk(4)
        self.head = nn.Linear(WIDTH, NUM, bias=False)
        if tied:
            self.head.weight = next(self.parameters())

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.trunk(self.look_up(self, words)))


def trained(directory: Path, model: nn.Module, ranks: int = 2, **options: Any) -> float:
    """Train on other words in each micro-batch; return the worst error."""
    options = {"micro_batches": 3} | options
    written(directory, model, (WORDS,), word_loss, WORDS, ranks=ranks, **options)
    copies = options.get("data", 1)
    count = options["micro_batches"] * copies
    generator = torch.Generator().manual_seed(1)
    words, target = torch.randint(0, NUM, (2, 2 * count, 3), generator=generator)
    batches = [((words,), target)] * 2
    record = run_on_threads(directory, ranks, batches, measure=False)
    expected = reference_steps(model, word_loss, batches, count, torch.float64)
    return compare(record, expected).worst


@pytest.mark.slow(3)
@pytest.mark.by_day(8)
@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": "zb-h1"}, {"recompute": ("all",)}, {"schedule": "gpipe"}],
    ids=str,
)
@pytest.mark.parametrize("look_up", [*WRITING, of_a_computed_weight, by_hand])
def test_rows_are_scaled_on_the_one_rank_that_has_them(
    look_up: Callable[..., Tensor], options: dict[str, Any], tmp_path: Path
) -> None:
    assert trained(tmp_path, Words(look_up), **options) < EXACT


@pytest.mark.slow(1)
@pytest.mark.parametrize("look_up", WRITING)
def test_replicas_would_scale_other_rows(
    look_up: Callable[..., Tensor], tmp_path: Path
) -> None:
    for options in ({"ranks": 4, "data": 2}, {"schedule": "mast", "micro_batches": 2}):
        with pytest.raises(
            GemscError, match=r"forward changes '.*weight', and each of 2"
        ) as caught:
            trained(tmp_path, Words(look_up), **options)
        error = caught.value
        assert error.at is not None
        assert Path(error.at.file).name == Path(__file__).name
        assert "look up in weight * (max_norm / weight.norm(dim=-1" in str(error.help)


@pytest.mark.parametrize(
    "options", [{"ranks": 4, "data": 2}, {"schedule": "mast", "micro_batches": 2}]
)
def test_the_advice_about_rows_works(options: dict[str, Any], tmp_path: Path) -> None:
    assert trained(tmp_path, Words(by_hand), **options) < EXACT


@pytest.mark.slow(1)
@pytest.mark.parametrize("look_up", [by_layer, by_function])
def test_a_tied_table_that_is_scaled_stays_on_one_rank(
    look_up: Callable[..., Tensor], tmp_path: Path
) -> None:
    assert trained(tmp_path, Words(look_up, tied=True), 1) < EXACT
    with pytest.raises(GemscError, match="2 stages need at least 2 blocks") as caught:
        trained(tmp_path, Words(look_up, tied=True))
    (note,) = caught.value.__notes__
    assert "all that uses it stays on one rank" in note
    assert Path(__file__).name in note


@pytest.mark.slow
def test_what_fills_up_a_batch_scales_no_rows(tmp_path: Path) -> None:
    model = Words(by_layer)
    before = model.table.weight.detach().clone()
    sgd = lambda params: torch.optim.SGD(params, lr=0.0)  # noqa: E731
    written(
        tmp_path, model, (WORDS,), word_loss, WORDS,
        optimizer=sgd, ranks=2, micro_batches=2,
    )  # fmt: skip
    words = torch.tensor([[1, 2, 3], [1, 2, 3], [4, 5, 6], [7, 8, 9]])

    def work(trainer: Any) -> Tensor | None:
        trainer.step(words, words, micro_batches=1)
        return trainer.state_dict().get("table.weight")

    first, second = on_ranks(tmp_path, 2, work, optimizer=sgd)
    after = first if first is not None else second
    assert torch.equal(after[[0, *range(4, NUM)]], before[[0, *range(4, NUM)]])
    assert not torch.equal(after[1:4], before[1:4])


# ------------------------------------------------------------------- other writers


def scaled_data(layer: Any, x: Tensor) -> None:
    layer.weight.data.mul_(0.9)


def scaled_detached(layer: Any, x: Tensor) -> None:
    layer.weight.detach()[1:].mul_(0.9)


def scaled(layer: Any, x: Tensor) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.9)


def by_the_input(layer: Any, x: Tensor) -> None:
    layer.weight.data.mul_(x.detach().abs().mean().clamp(0.5, 0.9))


def clamped(layer: Any, x: Tensor) -> None:
    layer.weight.data.clamp_(-0.2, 0.2)


def a_row(layer: Any, x: Tensor) -> None:
    layer.weight.data[0] = 0.1


def clamped_and_a_row(layer: Any, x: Tensor) -> None:
    layer.weight.data.clamp_(-0.2, 0.2)
    layer.weight.data[0] = 0.1


class Writing(nn.Linear):
    def __init__(self, write: Callable[[Any, Tensor], None]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x)
        return super().forward(x)


class Opaque(Writing):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e6:
            return x
        return super().forward(x)


def around(layer: nn.Module) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer.reset_parameters()  # type: ignore[operator]
        last = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(*trunk(2), layer, nn.Tanh(), *trunk(3), last)


@pytest.mark.slow(1)
@pytest.mark.parametrize("write", [scaled_data, scaled_detached, scaled, by_the_input])
@pytest.mark.parametrize("kind", [Writing, Opaque])
def test_a_write_that_others_would_see_is_refused(
    write: Callable[..., None], kind: type[Writing], tmp_path: Path
) -> None:
    model, one = around(kind(write)), {"ranks": 4, "data": 2, "micro_batches": 1}
    if kind is Writing and write is not by_the_input:  # a replica makes it for others
        assert against_one_process(tmp_path / "data", model, **one).worst < EXACT
    else:
        with pytest.raises(GemscError, match="each of 2 replicas of the model would"):
            against_one_process(tmp_path / "data", model, **one)
    with pytest.raises(GemscError, match="an earlier micro-batch still") as caught:
        against_one_process(tmp_path / "two", model)
    assert "--micro-batches 1" in str(caught.value.help)
    assert against_one_process(tmp_path / "one", model, micro_batches=1).worst < EXACT


def clamped_itself(layer: Any, x: Tensor) -> None:
    with torch.no_grad():
        layer.weight.clamp_(-0.2, 0.2)


def test_a_write_that_autograd_sees_has_another_advice(tmp_path: Path) -> None:
    """`clamped` follows it."""
    with pytest.raises(GemscError, match="an earlier micro-batch still") as caught:
        against_one_process(tmp_path, around(Writing(clamped_itself)))
    assert "write to its .data" in str(caught.value.help)


@pytest.mark.slow(1)
@pytest.mark.parametrize("write", [clamped, a_row])
def test_a_write_that_changes_nothing_more_is_exact(
    write: Callable[..., None], tmp_path: Path
) -> None:
    model = around(Writing(write))
    assert against_one_process(tmp_path / "one", model).worst < EXACT
    mast = {"schedule": "mast", "micro_batches": 2}
    assert against_one_process(tmp_path / "two", model, **mast).worst < EXACT


def test_two_such_writes_to_one_tensor_are_not_one(tmp_path: Path) -> None:
    model = around(Writing(clamped_and_a_row))
    mast: dict[str, Any] = {"schedule": "mast", "micro_batches": 2}
    with pytest.raises(GemscError, match="each of 2 replicas of the model would"):
        against_one_process(tmp_path, model, **mast)
    assert against_one_process(tmp_path, model, ranks=4, data=2).worst < EXACT


class Codebook(nn.Module):
    """As VQ-VAE-2 has it: a table that follows what is looked up in it."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(2)
        self.register_buffer("table", torch.randn(WIDTH, 6, generator=numbers))

    def forward(self, x: Tensor) -> Tensor:
        distances = self.table.pow(2).sum(0) - 2 * x @ self.table
        _, chosen = (-distances).max(1)
        codes = F.embedding(chosen, self.table.transpose(0, 1))
        rows = F.one_hot(chosen, 6).to(x.dtype)
        self.table.data.mul_(0.9).add_(x.T @ rows, alpha=0.1)
        return x + (codes - x).detach()


def test_a_table_without_gradients_follows_each_micro_batch(tmp_path: Path) -> None:
    model = nn.Sequential(*trunk(2), Codebook(), *trunk(3))
    assert against_one_process(tmp_path, model, ranks=2).worst < EXACT


# ------------------------------------------------- vectors that a norm iterates upon

SPECTRAL = [torch.nn.utils.spectral_norm, spectral_norm]


class Spectral(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            first, middle, last = (kind(nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.layers = nn.Sequential(first, nn.Tanh(), middle, *trunk(2), last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "options",
    [{"ranks": 3}, {"schedule": "zb-h1"}, {"recompute": ("all",)}],
    ids=str,
)
@pytest.mark.parametrize("kind", SPECTRAL)
def test_a_power_iteration_is_done_once_in_each_micro_batch(
    kind: Callable[..., nn.Module], options: dict[str, Any], tmp_path: Path
) -> None:
    """Buffers are compared, too: a second iteration of one would show in them."""
    assert against_one_process(tmp_path, Spectral(kind), **options).worst < EXACT


@pytest.mark.slow(1)
@pytest.mark.parametrize("kind", SPECTRAL)
def test_a_power_iteration_passes_the_step_that_compile_runs(
    kind: Callable[..., nn.Module],
) -> None:
    inputs = (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)),)
    options = {"loss": nn.MSELoss(), "example_target": inputs[0], "ranks": 2}
    program = compile(Spectral(kind), inputs, micro_batches=2, **options)
    assert program.plan.unchecked == ""


# --------------------------------------------- weights that a hook of torch computes


def pruned(layer: nn.Module) -> nn.Module:
    prune.random_unstructured(layer, "bias", 0.5)
    return prune.l1_unstructured(layer, "weight", 0.5)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("kind", [torch.nn.utils.weight_norm, pruned])
def test_weights_that_a_hook_computes_are_computed_in_each_forward(
    kind: Callable[..., nn.Module], tmp_path: Path
) -> None:
    assert against_one_process(tmp_path, Spectral(kind), ranks=2).worst < EXACT


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_loss_of_a_file_can_have_weights_of_a_hook(tmp_path: Path) -> None:
    path = tmp_path / "critic.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "model = nn.Linear(4, 4)\n"
        "loss = nn.utils.weight_norm(nn.Linear(4, 1))\n"
        "example_inputs = (torch.ones(1, 4),)\n"
    )
    loss = load_user_model(str(path)).make_loss()
    assert torch.equal(copy.deepcopy(loss).weight, loss.weight)


def test_a_model_that_has_run_can_have_weights_of_a_hook(tmp_path: Path) -> None:
    model = Spectral(torch.nn.utils.spectral_norm)
    model(torch.ones(1, WIDTH))
    assert against_one_process(tmp_path, model, ranks=2).worst < EXACT


@pytest.mark.slow(1)
@pytest.mark.parametrize("kind", SPECTRAL)
def test_evaluation_does_no_power_iteration(
    kind: Callable[..., nn.Module], tmp_path: Path
) -> None:
    written(tmp_path, Spectral(kind), ranks=2, micro_batches=2)

    def work(trainer: Any) -> list[bool]:
        before = {name: t.clone() for name, t in trainer.state_dict().items()}
        trainer.evaluate(X.repeat(2, 1), X.repeat(2, 1))
        evaluated = {name: t.clone() for name, t in trainer.state_dict().items()}
        trainer.step(X.repeat(2, 1), X.repeat(2, 1))
        vectors = [name for name in before if name.endswith(("_u", "_v"))]
        kept = [torch.equal(before[n], evaluated[n]) for n in vectors]
        return [
            *kept,
            *(not torch.equal(before[n], trainer.state_dict()[n]) for n in vectors),
        ]

    checks = [check for rank in on_ranks(tmp_path, 2, work) for check in rank]
    assert len(checks) == 12
    assert all(checks)


@pytest.mark.slow(1)
@pytest.mark.parametrize("kind", SPECTRAL)
def test_replicas_iterate_as_often_as_one_process(
    kind: Callable[..., nn.Module], tmp_path: Path
) -> None:
    """Each runs a part of the micro-batches, and each of these is one iteration."""
    mast = {"schedule": "mast", "micro_batches": 2}
    for options in ({"ranks": 4, "data": 2}, mast, mast | {"ranks": 4, "data": 2}):
        assert against_one_process(tmp_path, Spectral(kind), **options).worst < EXACT


# ------------------------------------------------------- a place in a row of memory


class Queue(nn.Module):
    """Knows where it writes next, as MoCo does, in a buffer of one whole number."""

    def __init__(self, move: Callable[[Tensor], object], *shape: int) -> None:
        super().__init__()
        self.fc, self.fc2, self.move = nn.Linear(4, 4), nn.Linear(4, 4), move
        self.register_buffer("place", torch.zeros(shape, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc2(self.fc(x).relu())
        self.move(self.place)
        return x


@pytest.mark.slow(2)
@pytest.mark.parametrize("shape", [(), (1,), (2,)], ids=str)
@pytest.mark.parametrize(
    "move",
    [
        lambda place: place.add_(2).remainder_(3),
        lambda place: place.view(-1).add_(2).remainder_(3),
        lambda place: place.flatten()[:1].add_(2).neg_().remainder_(3),
        lambda place: place.unsqueeze(0).fill_(4).sub_(1),
    ],
    ids=["itself", "view", "part", "filled"],
)
def test_a_number_that_is_changed_twice(
    move: Callable[[Tensor], object], shape: tuple[int, ...], tmp_path: Path
) -> None:
    """The second change was lost; one step of two micro-batches need not show it."""
    assert against_one_process(tmp_path, Queue(move, *shape)).worst < EXACT
