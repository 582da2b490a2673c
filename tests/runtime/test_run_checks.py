"""What batches have and a step does not take as one process would is told, once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_support import on_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from training_support import program, run, user_of

from gemsc import compile
from gemsc.errors import GemscError
from gemsc.runtime.training.run_checks import (
    LabelsThatCount,
    SameNumbers,
    UnreadInputs,
)

X, CLASSES = torch.randn(2, 6, 4), torch.arange(12).view(2, 6) % 3


class Words(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def functional(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-1)


def likelihood(output: Tensor, target: Tensor) -> Tensor:
    scores = output.log_softmax(-1).flatten(0, 1)
    return F.nll_loss(scores, target.flatten(), ignore_index=-1)


class Layer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, output: Tensor, target: Tensor) -> Any:
        loss = self.layer(output.log_softmax(-1).movedim(-1, 1), target[:, 1:])
        return loss if self.layer.reduction == "mean" else (loss.sum(), len(target))


class Shifted(Layer):
    def forward(self, output: Tensor, target: Tensor) -> Any:
        return super().forward(output[:, 1:], target)


class Likelihood(nn.Module):
    """Computes its loss itself, of labels among its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional(self.words(x), labels)


def compiled(
    model: nn.Module, inputs: Any, loss: Any, target: Any, **options: Any
) -> Any:
    how = {"example_target": target, "ranks": 2, "micro_batches": 3, **options}
    return compile(model, inputs, loss=loss, **how)


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    ("loss", "label"),
    [
        (functional, -1),
        (likelihood, -1),
        (Shifted(nn.CrossEntropyLoss()), -100),
        (Shifted(nn.NLLLoss(ignore_index=255)), 255),
        (Shifted(nn.CrossEntropyLoss(reduction="sum")), None),
    ],
)
@pytest.mark.parametrize("frontend", ["record", "export"])
def test_a_plan_says_which_labels_a_mean_leaves_out(
    loss: Any, label: Any, frontend: str
) -> None:
    ignored = compiled(Words(), (X,), loss, CLASSES, frontend=frontend).plan.ignored
    labels = [(entry["path"], entry["label"]) for entry in ignored]
    assert labels == ([(["target"], label)] if label is not None else [])
    places = [entry["at"] for entry in ignored if frontend == "record"]
    assert all(re.match(r"at \S*\w+\.py:\d+$", place) for place in places)


def test_it_says_nothing_where_compile_has_said_it() -> None:
    some = torch.where(torch.arange(12).view(2, 6) < 4, -1, CLASSES)
    assert compiled(Words(), (X,), functional, some).plan.ignored == []


def test_the_parts_of_labels_are_in_the_order_of_inputs() -> None:
    def loss(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        labels = torch.stack([*target.values()]).amax(0)
        return F.cross_entropy(output.flatten(0, 1), labels.flatten())

    names = [*"fadceb"]
    target = {name: CLASSES.clone() for name in names}
    ignored = compiled(Words(), (X,), loss, target).plan.ignored
    assert [entry["path"] for entry in ignored] == [["target", name] for name in names]


class Mixing(Words):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        return output + x.std()


def test_that_forward_mixes_samples_says_nothing_of_labels() -> None:
    plan = compiled(Mixing(), (X,), functional, CLASSES).plan
    assert plan.mixes_samples
    assert [entry["label"] for entry in plan.ignored] == [-1]


def labelled(*counts: int) -> TensorDataset:
    """Return samples that have so many labels each."""
    x = torch.randn(len(counts), 6, 4)
    places, most = torch.arange(6), torch.tensor(counts)[:, None]
    return TensorDataset(x, torch.where(places < most, 1, -1).expand(-1, 6))


@pytest.mark.parametrize(("few", "many"), [(4, 4), (1, 6)])
def test_a_run_says_where_micro_batches_have_unlike_many(
    few: int, many: int, tmp_path: Path, capfd: Any
) -> None:
    compiled(Words(), (X,), functional, CLASSES).write(tmp_path)
    user = user_of(dataset=lambda: labelled(*(few, many) * 12))
    run(tmp_path, user, "--epochs", 2)
    text = capfd.readouterr().err
    told = re.findall(r"of step \d have (\d+) to (\d+) labels that are not -1", text)
    assert len(told) == (few != many)
    assert all(int(least) < int(most) for least, most in told)


@pytest.mark.slow(2)
@pytest.mark.parametrize("told", [1, 2, 3])
def test_labels_may_be_inputs(told: int, tmp_path: Path, capfd: Any) -> None:
    """The 1st, 2nd and 4th batches are looked at."""
    program = compiled(Likelihood(), (X, CLASSES), lambda output: output, None)
    program.write(tmp_path)
    even, unlike = (
        labelled(*counts).tensors for counts in ([3] * 6, (6, 6, 1, 2, 3, 4))
    )

    def work(trainer: Any) -> None:
        trainer.add_callbacks([LabelsThatCount()])  # each rank counts
        for step in range(1, 5):
            trainer.step(unlike if step == told else even)

    on_ranks(tmp_path, 2, work)
    text = capfd.readouterr().err
    message = f"the micro-batches of step {told} have 3 to 12 labels"
    assert text.count(message) == text.count("warning: ") == (told < 3)


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    ("given", "dtype", "told"),
    [
        (torch.float64, None, 2),
        (torch.float64, torch.float64, 0),
        (torch.float16, None, 0),
        (torch.float32, torch.bfloat16, 0),  # as it was asked for
    ],
)
def test_numbers_that_are_rounded_are_told(
    given: torch.dtype, dtype: Any, told: int, tmp_path: Path, capfd: Any
) -> None:
    user = user_of(dataset=lambda: TensorDataset(*torch.ones(2, 12, 4, dtype=given)))
    run(program(tmp_path), user, "--epochs", 2, dtype=dtype)
    text = capfd.readouterr().err
    assert text.count(" in the data, and rounded to") == told
    assert text.count("warning: input[0] ") == (told > 0)


@pytest.mark.parametrize("unread", [0, 1])
def test_inputs_that_nobody_reads_are_told(
    unread: int, tmp_path: Path, capfd: Any
) -> None:
    folder = program(tmp_path)
    x, target = torch.randn(2, 4, 4)

    def work(trainer: Any) -> None:
        trainer.add_callbacks([UnreadInputs()])
        for _ in range(2):
            trainer.step((x, x)[: 1 + unread], target)

    on_ranks(folder, 2, work)
    told = "warning: no rank reads input[1] of a batch: example_inputs() does not have"
    assert capfd.readouterr().err.count(told) == unread


@pytest.mark.slow(2)
@pytest.mark.parametrize(("accumulate", "left"), [(1, 0), (2, 1), (3, 0)])
def test_steps_that_are_in_no_update_are_told(
    accumulate: int, left: int, tmp_path: Path, capfd: Any
) -> None:
    run(program(tmp_path), user_of(), "--epochs", 1, "--accumulate", accumulate)
    told = "note: 1 step at the end made no update (--accumulate 2)"
    assert capfd.readouterr().out.count(told) == bool(left)


def shared(output: Tensor, target: Any) -> Tensor:
    first, second, share = target
    loss = F.mse_loss(output, first)
    total: Tensor = share * loss + (1 - share) * F.mse_loss(output, second)
    return total


@pytest.mark.parametrize(
    ("example", "given", "told"),
    [
        (0.3, 0.3, ""),
        (0.3, torch.full((4,), 0.3), ""),  # as a dataset's numbers are joined
        (0.3, 0.7, "target[2] is 0.7, but the program was compiled with 0.3"),
        (0.3, 0, "target[2] is 0, but the program was compiled with 0.3"),
        (0.3, True, "target[2] is True, but the program was compiled with 0.3"),
        (1.0, 1, ""),
        (0.3, torch.full((4,), 0.7), "target[2] is a tensor, but the program was"),
        (torch.tensor(0.3), torch.tensor(0.7), ""),
    ],
)
def test_numbers_that_are_no_tensors_are_constants(
    example: Any, given: Any, told: str, tmp_path: Path
) -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(4, 4)
    part = torch.zeros(2, 4)
    target = part, part, example
    made = compile(
        net, (part,), loss=shared, example_target=target, ranks=1, micro_batches=2
    )
    made.write(tmp_path)

    def work(trainer: Any) -> float:
        trainer.add_callbacks([SameNumbers()])
        return float(trainer.step(x, (x, x - 1, given)))

    if told:
        with pytest.raises(GemscError, match=re.escape(told)):
            on_ranks(tmp_path, 1, work)
        return
    share = given if torch.as_tensor(given).dim() == 0 else example
    expected = shared(net(x), (x, x - 1, share)).item()
    assert on_ranks(tmp_path, 1, work) == [pytest.approx(expected)]
