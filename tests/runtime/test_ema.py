"""Averages of the weights: those of torch, evaluated, saved, and gone on with."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from program_support import Net, X, batch_of, mse, on_ranks, written
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training_support import pairs, program, run, simple, user_of

import gemsc
from gemsc.errors import GemscError
from gemsc.runtime.checkpoint.files import export_model
from gemsc.runtime.training.trainer import Trainer
from gemsc.weights.read import own_part


def averages(trainer: Trainer) -> dict[str, Tensor]:
    (ema,) = (hook for hook in trainer.callbacks if isinstance(hook, gemsc.Ema))
    return {name: tensor.clone() for name, tensor in ema.average.items()}


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"ranks": 4, "data": 2, "shard": "optimizer"}, {"shards": (2,)}],
    ids=["stages", "shard-optimizer", "shards"],
)
def test_they_are_those_of_torch(options: dict[str, Any], tmp_path: Path) -> None:
    program(tmp_path, **options)
    count = 2 * options.get("data", 1)
    x, target = batch_of((X, X), count)
    model = Net(simple)
    expected = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        parts = [*zip(x.split(len(X)), target.split(len(X)), strict=True)]
        torch.stack([mse(model(a), b) for a, b in parts]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.update_parameters(model)
    whole = expected.module.state_dict()

    def work(trainer: Trainer) -> None:
        trainer.add_callbacks([gemsc.Ema(0.9)])
        for _ in range(4 * 2):  # two alike for each update
            trainer.step(x, target)
        means, parts = averages(trainer), trainer.program.parts
        assert means.keys() == trainer.stages.parameters.keys()
        for name, tensor in means.items():
            wanted = own_part(whole[name], parts.get(name), name)
            torch.testing.assert_close(tensor, wanted)

    on_ranks(tmp_path, options.get("ranks", 2), work, accumulate=2)


def turned(self: Any, x: Tensor) -> Tensor:
    turns = torch.fft.ifft(torch.fft.fft(self.a(x)) * self.turns).real
    return self.b(torch.tanh(turns))


def test_complex_weights_are_averaged_too(tmp_path: Path) -> None:
    turns = torch.randn(X.shape[1], dtype=torch.complex64)
    written(tmp_path, Net(turned, turns=nn.Parameter(turns)), micro_batches=2)
    x, target = batch_of((X, X), 2)

    def work(trainer: Trainer) -> list[Tensor]:
        trainer.add_callbacks([gemsc.Ema(0.9)])
        weights = []
        for _ in range(2):
            trainer.step(x, target)
            weights += [p.detach().clone() for p in trainer.stages.parameters.values()]
            weights = [weight for weight in weights if weight.is_complex()]
        return [*weights, averages(trainer)["turns"]] if weights else []

    (tensors,) = filter(None, on_ranks(tmp_path, 2, work))
    first, second, average = tensors
    assert not torch.equal(first, second)
    torch.testing.assert_close(average, 0.9 * first + 0.1 * second)


@pytest.mark.slow
def test_a_run_evaluates_and_resumes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses: list[float] = []
    user = user_of(
        eval_dataset=pairs,
        on_epoch=lambda trainer, epoch, figures: losses.append(figures["loss"]),
    )
    program(tmp_path)
    save, resume = tmp_path / "a", tmp_path / "b"
    words = "--ema", "0.5", "--accumulate", "2", "--epochs"
    whole = run(tmp_path, user, *words, "4", "--save", save, result=averages)
    run(tmp_path, user, *words, "2", "--save", resume)
    assert "resume with --ema" not in capsys.readouterr().out
    without = ("--steps", "7", "--accumulate", "2", "--resume", str(resume))
    run(tmp_path, user, *without, "--save", tmp_path / "d")
    assert "resume with --ema" in capsys.readouterr().out
    del losses[12:]
    again = (*words, "4", "--save", str(resume), "--resume", str(resume))
    parts = run(tmp_path, user, *again, result=averages)
    assert "resume with --ema" not in capsys.readouterr().out
    for one, other in zip(whole, parts, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert losses[:8] == losses[8:]
    model = Net(simple)
    export_model(save, tmp_path / "averages", averages=True)
    model.load_state_dict(load_file(tmp_path / "averages"))
    state = {name: t for part in whole for name, t in part.items()}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])
    with torch.no_grad():
        data = pairs().tensors
        assert losses[7] == pytest.approx(float(mse(model(data[0]), data[1])))
    plain = run(tmp_path, user, "--epochs", "4", "--accumulate", "2")
    exported = load_file(save / "model.safetensors")
    assert torch.equal(plain[0]["a.weight"], exported["a.weight"])
    run(tmp_path, user, "--save", tmp_path / "c")
    with pytest.raises(GemscError, match="has no averages"):
        export_model(tmp_path / "c", tmp_path / "none", averages=True)
    assert not torch.equal(plain[0]["a.weight"], state["a.weight"])


def test_after_an_evaluation_parts_of_weights_are_trained_on(tmp_path: Path) -> None:
    """What was gathered of the averages is not the weights, in a checkpoint neither."""
    all_losses: list[list[float]] = []
    saved: dict[bool, list[dict[str, Tensor]]] = {False: [], True: []}
    for number, shard in enumerate(("off", "weights")):
        losses: list[float] = []
        user = user_of(
            dataset=lambda: pairs(16),
            eval_dataset=pairs,
            optimizer=partial(torch.optim.SGD, lr=0.5),
            on_step=lambda trainer, report, kept=losses: kept.append(report.loss),
            on_epoch=lambda trainer, epoch, figures, kept=losses: kept.append(
                figures["loss"]
            ),
        )
        folder = program(tmp_path / str(number), ranks=4, data=2, shard=shard)
        words = "--ema", "0.5", "--epochs", "3", "--save", tmp_path / shard
        run(folder, user, *words, ranks=4)
        all_losses.append(sorted(losses))
        for are_means, states in saved.items():
            export_model(tmp_path / shard, tmp_path / "state", averages=are_means)
            states.append(load_file(tmp_path / "state"))
    assert all_losses[1] == pytest.approx(all_losses[0], rel=1e-5)
    assert len(all_losses[0]) == 4 * 3 * 3  # two steps an epoch, and an evaluation
    for whole, parts in saved.values():
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)
    assert not torch.equal(saved[False][1]["a.weight"], saved[True][1]["a.weight"])
