"""Parameters are frozen and trained again while a run goes on, as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from program_support import WIDTH, Net, mse, on_ranks, written
from torch import Tensor, nn
from training_support import program, run, simple, user_of

from gemsc.errors import GemscError
from gemsc.runtime.training.trainer import Trainer
from gemsc.weights.read import own_part

SIZE, STEPS = 2, 7


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.b = nn.Conv2d(4, 4, 3, padding=1)
        self.c = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


def change(step: int, model: Any) -> None:
    """Freeze and train again before some steps."""
    match step:
        case 1:
            model.freeze("a")
        case 3:
            model.freeze("b.weight", "c")
        case 4:
            model.unfreeze("c")
        case 5:
            model.unfreeze("a", "b")


class Plain:
    """A model of one process with the methods of a trainer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def freeze(self, *paths: str, trains: bool = False) -> None:
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if any(f"{name}.".startswith(f"{path}.") for path in paths):
                parameter.requires_grad_(trains)

    def unfreeze(self, *paths: str) -> None:
        self.freeze(*paths, trains=True)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


def tied() -> Net:
    """Return a model whose `c` has the weight of `a`."""
    model = Net(simple)
    model.c.weight = model.a.weight
    return model


def twice() -> Net:
    """Return a model whose `c` is its `a`."""
    model = Net(simple)
    model.c = model.a
    return model


LAYERS = Net(simple), (SIZE, WIDTH)
WAYS: dict[str, tuple[nn.Module, tuple[int, ...], dict[str, Any]]] = {
    "deferred": (*LAYERS, {"schedule": "zb-h1"}),
    "mirrored": (*LAYERS, {"schedule": "bidirectional", "recompute": ("all",)}),
    "optimizer": (*LAYERS, {"ranks": 4, "data": 2, "shard": "optimizer"}),
    "shards": (*LAYERS, {"shards": (2,)}),
    "tied": (tied(), (SIZE, WIDTH), {}),
    "twice": (twice(), (SIZE, WIDTH), {}),
    "tiles": (Pictures(), (SIZE, 2, 8, 8), {"tiles": ("2x1",)}),
}


@pytest.mark.slow(1)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_as_in_one_process(way: str, tmp_path: Path, in_double: None) -> None:
    model, shape, options = WAYS[way]
    model = model.double()
    x = torch.randn(shape)
    output = model(x).detach()
    written(
        tmp_path,
        model,
        (x,),
        target=output,
        optimizer=adam,
        **{"ranks": 2, "micro_batches": 4, **options},
    )
    count = 4 * options.get("data", 1)
    shapes = [(count * SIZE, *sizes[1:]) for sizes in (shape, output.shape)]
    data = [[torch.randn(sizes) for sizes in shapes] for _ in range(STEPS)]

    def work(trainer: Trainer) -> dict[str, Tensor]:
        for step, (x, target) in enumerate(data):
            change(step, trainer)
            trainer.step(x, target)
        return {name: tensor.clone() for name, tensor in trainer.state_dict().items()}

    def compare(trainer: Trainer) -> None:
        state, parts = work(trainer), trainer.program.parts
        for name, tensor in state.items():
            wanted = own_part(whole[name], parts.get(name), name)
            torch.testing.assert_close(tensor, wanted, rtol=1e-9, atol=1e-9)

    optimizer = adam(model.parameters())
    for step, (x, target) in enumerate(data):
        change(step, Plain(model))
        for a, b in zip(x.split(SIZE), target.split(SIZE), strict=True):
            (mse(model(a), b) / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = model.state_dict()
    on_ranks(tmp_path, options.get("ranks", 2), compare, optimizer=adam)


def test_what_was_added_up_goes_wherever_it_is_kept(tmp_path: Path) -> None:
    def work(trainer: Trainer) -> dict[str, Tensor]:
        trainer.step(x, -x)
        trainer.freeze("a")
        trainer.step(x, x)
        return trainer.state_dict()

    x, model = torch.randn(8, WIDTH), Net(simple)
    for shard in "off", "gradients":
        options: dict[str, Any] = {"ranks": 2, "data": 2, "micro_batches": 1}
        written(tmp_path / shard, model, (x[:4],), target=x[:4], shard=shard, **options)
        for state in on_ranks(tmp_path / shard, 2, work, optimizer=adam, accumulate=2):
            assert torch.equal(state["a.weight"], model.a.weight), shard
            assert not torch.equal(state["b.weight"], model.b.weight), shard


@pytest.mark.parametrize("shard", ["off", "optimizer"])
def test_what_stages_share_without_gradients_does_not_decay(
    shard: str, tmp_path: Path
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x)) * self.scale.detach()
        return self.c(torch.tanh(self.b(x))) * self.scale.detach()

    model, x = Net(forward), torch.randn(4, WIDTH)
    model.scale = nn.Parameter(torch.ones(WIDTH))
    options: dict[str, Any] = {"ranks": 4, "data": 2} if shard != "off" else {}
    program = written(
        tmp_path, model, (x,), target=x, micro_batches=1, shard=shard, **options
    )
    batch = torch.randn(program.plan.batch_size, WIDTH)

    def work(trainer: Trainer) -> dict[str, Tensor]:
        trainer.step(batch, batch)
        return trainer.state_dict()

    states = on_ranks(tmp_path, program.plan.ranks, work, optimizer=adam)
    held = [state["scale"] for state in states if "scale" in state]
    assert len(held) == program.plan.ranks
    assert all(torch.equal(scale, model.scale) for scale in held)


@pytest.mark.slow
def test_a_checkpoint_knows_what_is_frozen(tmp_path: Path) -> None:
    def on_epoch(trainer: Trainer, epoch: int, figures: Any) -> None:
        if epoch == 0:
            trainer.freeze("a", "c")

    user = user_of(on_epoch=on_epoch)
    program(tmp_path)
    whole = run(tmp_path, user, "--epochs", "3")
    words = "--save", tmp_path / "saved"
    run(tmp_path, user, "--epochs", "1", *words)
    again = "--epochs", "3", "--resume", tmp_path / "saved", "--save", tmp_path / "new"
    for one, other in zip(whole, run(tmp_path, user, *again), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_cannot_be_frozen_or_trained(tmp_path: Path) -> None:
    model = Net(simple)
    model.a.requires_grad_(False)
    written(tmp_path, model, ranks=2, micro_batches=2)
    with pytest.raises(GemscError, match=r"no parameters under 'a\.weigth'") as caught:
        on_ranks(tmp_path, 2, lambda trainer: trainer.freeze("a.weigth"))
    assert caught.value.help == "did you mean 'a.weight'?"
    with pytest.raises(GemscError, match=r"'a\.bias' was frozen when the program was"):
        on_ranks(tmp_path, 2, lambda trainer: trainer.unfreeze("b", "a"))

    def trained(trainer: Trainer) -> set[str]:
        trainer.freeze("b")
        trainer.unfreeze("b")
        named = trainer.stages.parameters.items()
        return {name.partition(".")[0] for name, p in named if p.requires_grad}

    assert all("a" not in names for names in on_ranks(tmp_path, 2, trained))
