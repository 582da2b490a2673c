"""Metrics are of the whole evaluation, on whatever ranks it runs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from program_support import against_one_process, written
from torch import Tensor, nn
from torch.utils.data import default_collate
from training_support import run, user_of

from gemsc.base.boxes import Box
from gemsc.base.nests import OF_ALL, ONCE
from gemsc.errors import GemscError, SourceLocation
from gemsc.plan import Plan
from gemsc.runtime.data.metrics import Metrics, first_samples
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import LocalTransport
from gemsc.verify.plain_run import PlainRun, RunSettings

SIZE = 8


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super().__init__(
                nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 1, 3, padding=1)
            )


class Pictures:
    """Pictures that are read whole, with a mask, a smaller picture and a name.

    The smaller one has the size of a tile, and is no part of anything.
    """

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.pictures = torch.randn(count, 1, SIZE, SIZE, generator=generator)
        self.small = torch.randn(count, SIZE // 2, SIZE, generator=generator)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Any:
        return self.sample(index, ((0, SIZE), (0, SIZE)))

    def sample(self, index: int, box: Box) -> Any:
        rows, columns = (slice(*interval) for interval in box)
        part = self.pictures[index][:, rows, columns]
        more = {"small": self.small[index], "name": str(index)}
        return part, {"mask": part > 0.5, **more}


class Slides(Pictures):
    """The same, read in part."""

    shape = (SIZE, SIZE)

    def read(self, index: int, box: Box) -> Any:
        return self.sample(index, box)


def loss(output: Tensor, target: dict[str, Any]) -> Tensor:
    return ((output - target["mask"].to(output)) ** 2).mean()


class Spread:
    """Written as torchmetrics writes a metric."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen: list[Tensor] = []

    def update(self, output: Tensor, target: dict[str, Any]) -> None:
        self.seen.append(output - target["mask"].to(output))

    def compute(self) -> Tensor:
        return torch.cat(self.seen).std()


class Worst:
    """Written as MONAI writes a metric; two figures."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.worst = torch.zeros(2)

    def __call__(self, output: Tensor, target: dict[str, Any]) -> None:
        assert target["small"].dtype == output.dtype  # whatever a program runs in
        largest = torch.stack([output.max(), target["small"].max()]).float()
        self.worst = torch.maximum(self.worst, largest)

    def aggregate(self) -> Tensor:
        return self.worst


def of_a_batch(output: Tensor, target: dict[str, Any]) -> dict[str, Any]:
    names = [int(name) for name in target["name"]]
    assert len(names) == len(output) == len(target["mask"])
    return {"spread": output.std(), "names": sum(names) + names[0] * len(names)}


METRICS = {"batch": of_a_batch, "all": Spread(), "worst": Worst()}
ONE = {"ranks": 1, "micro_batches": 4}
TILED = {"ranks": 2, "tiles": ("2x1",), "micro_batches": 4}
LAYOUTS = {
    "mirrored": {"ranks": 2, "schedule": "mast", "micro_batches": 4},
    "replicas": {"ranks": 2, "data": 2, "micro_batches": 2},
    "tiles": TILED,
    "tiles and a whole stage": {**TILED, "ranks": 3},
    "replicas of tiles": {**TILED, "ranks": 4, "data": 2, "micro_batches": 2},
}


def evaluated(
    folder: Path,
    kind: type[Pictures],
    metrics: Any,
    *words: str,
    scored_by: Any = loss,
    **options: Any,
) -> dict[str, float]:
    """Return the figures of 7 samples, in batches of 4, with the initial weights."""
    example = torch.zeros(1, 1, SIZE, SIZE)
    target = {"mask": example > 0}
    written(folder, Convolutions(), (example,), scored_by, target, **options)
    epochs: list[dict[str, float]] = []

    def on_epoch(trainer: Trainer, epoch: int, figures: dict[str, float]) -> None:
        epochs.append(figures)

    user = user_of(
        dataset=lambda: kind(4),
        eval_dataset=lambda: kind(7),
        loss=scored_by,
        metrics=metrics,
        on_epoch=on_epoch,
        optimizer=lambda pairs: torch.optim.SGD([p for _, p in pairs], lr=0.0),
    )
    ranks = options["ranks"]
    run(folder, user, "--epochs", "2", *words, ranks=ranks)
    assert len(epochs) == 2 * ranks
    assert all(figures == epochs[0] for figures in epochs)
    return epochs[0]


@torch.no_grad()
def whole(data: Pictures) -> tuple[Tensor, dict[str, Any]]:
    """Return the outputs and targets of all samples at once."""
    pictures, targets = default_collate([data[index] for index in range(len(data))])
    return Convolutions()(pictures), targets


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    figures = evaluated(tmp_path_factory.mktemp("one"), Pictures, METRICS, **ONE)
    output, target = whole(Pictures(7))
    spread, worst = Spread(), Worst()
    spread.update(output, target)
    worst(output, target)
    assert figures == pytest.approx(
        {
            "loss": float(loss(output, target)),
            "batch_spread": float(output[:4].std() * 4 + output[4:].std() * 3) / 7,
            "batch_names": (6 * 4 + (15 + 4 * 3) * 3) / 7,
            "all": float(spread.compute()),
            "worst_0": float(worst.worst[0]),
            "worst_1": float(worst.worst[1]),
        },
        rel=1e-5,
    )
    return figures


@pytest.mark.slow(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_metrics_of_one_process(
    layout: str, of_one_rank: dict[str, float], tmp_path: Path
) -> None:
    options = LAYOUTS[layout]
    data = Slides if "tiles" in options else Pictures
    words = "--best", "worst_0:max"
    figures = evaluated(tmp_path, data, METRICS, *words, **options)
    assert figures == pytest.approx(of_one_rank, rel=1e-5)


@pytest.mark.slow
def test_only_the_rank_that_scores_goes_on_reading_whole_targets(
    tmp_path: Path,
) -> None:
    boxes: list[Box] = []

    class Watched(Slides):
        def read(self, index: int, box: Box) -> Any:
            if len(self) == 7:
                boxes.append(box)
            return super().read(index, box)

    two_stages = {**TILED, "ranks": 4, "tiles": ("2x1", "2x1")}
    evaluated(tmp_path, Watched, METRICS, **two_stages)
    whole_box = (0, SIZE), (0, SIZE)
    assert boxes.count(whole_box) == 4 + 2 * 8  # the last sample twice


@pytest.mark.slow
def test_the_loss_on_tiles_is_of_all_samples_without_metrics(tmp_path: Path) -> None:
    expected = float(loss(*whole(Pictures(7))))
    figures = evaluated(tmp_path, Slides, None, **TILED)
    assert figures == {"loss": pytest.approx(expected, rel=1e-5)}


def test_a_figure_that_is_called_as_the_loss_is_refused(tmp_path: Path) -> None:
    def metrics(output: Tensor, target: Any) -> Any:
        figures = {"loss": output.std()}
        return figures

    with pytest.raises(GemscError, match="a figure named 'loss'"):
        evaluated(tmp_path, Pictures, metrics, **ONE)


def std(output: Tensor, target: Any) -> Any:
    return {"std": output.std()}


def std_later(output: Tensor, target: Any) -> Any:
    figures = {"std": output.std()}
    return figures


class StdOfAll(Spread):
    def compute(self) -> Any:
        return {"std": super().compute()}


def named_loss(output: Tensor, target: Any) -> Any:
    return {"loss": output.std()}


def one_of_two(output: Tensor, target: Any) -> Any:
    if output.std() > 1:
        return {"std": output.std()}
    return {"std": 0.0}


def test_figures_that_can_be_known_are_refused_before_the_first_batch() -> None:
    pair = {"a": std, "a_std": Tensor.std}
    for given in (named_loss, pair, dict(reversed(pair.items()))):
        with pytest.raises(GemscError, match="metrics returns "):
            Metrics(given)
    Metrics({"a": one_of_two, "b": std, "loss": named_loss})


@pytest.mark.parametrize("metric", [std_later, StdOfAll()])
def test_two_figures_of_one_name_are_refused(metric: Any) -> None:
    metrics = Metrics({"a_std": lambda output, target: 1.0, "a": metric})

    def evaluate() -> None:
        metrics.add(torch.randn(4), {"mask": torch.ones(4)}, 4)
        metrics.figures()

    with pytest.raises(GemscError, match="two figures named 'a_std'"):
        evaluate()


def test_metrics_may_change_what_they_are_given(tmp_path: Path) -> None:
    def metrics(output: Tensor, target: Any) -> dict[str, float]:
        return {"sum": float(output.mul_(0).sum())}

    expected = float(loss(*whole(Pictures(7))))
    figures = evaluated(tmp_path, Pictures, metrics, **ONE)
    assert figures == {"loss": pytest.approx(expected, rel=1e-5), "sum": 0.0}


def test_metrics_have_the_target_that_a_loss_changes(tmp_path: Path) -> None:
    def changing(output: Tensor, target: Any) -> Tensor:
        target["mask"][:, :, 0] = True
        return loss(output, target)

    def metrics(output: Tensor, target: Any) -> dict[str, Tensor]:
        return {"share": target["mask"].float().mean()}

    expected = float(whole(Pictures(7))[1]["mask"].float().mean())
    figures = evaluated(tmp_path, Pictures, metrics, scored_by=changing, **ONE)
    assert figures["share"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("found", "figures"),
    [
        ({"a": 1, "b": torch.tensor([2.5])}, {"a": 1.0, "b": 2.5}),
        ({"dice": torch.tensor([0.5, 0.25])}, {"dice_0": 0.5, "dice_1": 0.25}),
        ({"a": {"x": np.float32(2), "y": [3, 4]}}, {"a_x": 2, "a_y_0": 3, "a_y_1": 4}),
    ],
    ids=str,
)
def test_numbers_of_a_dict_get_names(found: Any, figures: dict[str, float]) -> None:
    metrics = Metrics(lambda output, target: found)
    metrics.add(None, None, 2)
    assert metrics.figures() == {name: (n, 2) for name, n in figures.items()}


def test_a_figure_of_some_batches_is_the_mean_over_these() -> None:
    metrics = Metrics(
        lambda output, is_all: {"all": output} | ({"one": output} if is_all else {})
    )
    metrics.add(1.0, False, 2)
    metrics.add(4.0, True, 3)
    assert metrics.figures() == {"all": (2.8, 5), "one": (4.0, 3)}


def test_texts_of_a_sample_stay_together() -> None:
    assert first_samples(["a", "b", "c", "d"], 1, 2) == ["a", "b"]
    assert first_samples(["a", "b", "c"], 1, 2) == ["a", "b", "c"]


def test_an_evaluation_begins_anew() -> None:
    metrics = Metrics({"sizes": lambda output, target: len(output), "all": Spread()})
    assert metrics.figures() == {}
    for sizes in ([1, 3], [2]):
        metrics.reset()
        for size in sizes:
            output = torch.arange(float(2 * size))[:, None]
            metrics.add(output, {"mask": output > 9}, size)
        (mean, count), (spread, whole) = metrics.figures().values()
        assert count == whole == sum(sizes)
    assert (mean, spread) == (4.0, float(torch.arange(4.0).std()))


def test_a_metric_that_stands_alone_has_the_name_of_its_class() -> None:
    class Spreads(Spread):
        def compute(self) -> Any:
            return {"spread": super().compute()}

    assert evaluate_one(Spread) == ["Spread"]
    assert evaluate_one(Worst()) == ["Worst_0", "Worst_1"]
    assert evaluate_one(Spreads) == ["spread"]
    assert evaluate_one({"a": Spread, "b": Worst()}) == ["a", "b_0", "b_1"]


def evaluate_one(given: Any) -> list[str]:
    metrics = Metrics(user_of(metrics=given).make_metrics())
    metrics.add(*whole(Pictures(2)), 2)
    return [*metrics.figures()]


@pytest.mark.slow
def test_metrics_that_fail_are_named_with_their_line(tmp_path: Path) -> None:
    def fails(output: Any, target: Any) -> Any:
        return {"right": output[10**9]}

    with pytest.raises(GemscError, match=r"metrics\(\) fails: IndexError: ") as caught:
        evaluated(tmp_path, Pictures, fails, **ONE)
    assert re.search(
        r'test_metrics.py:\d+: error.*\n +return {"right"', str(caught.value)
    )

    class Fails(Spread):
        def compute(self) -> Any:
            raise ArithmeticError

    at = SourceLocation("model.py", 7)
    metrics = Metrics({"a": lambda output, target: "text", "b": Fails()}, at)
    with pytest.raises(GemscError, match=r"metrics\(\) fails: ValueError: could not"):
        metrics.add(None, None, 2)
    metrics = Metrics(Fails(), at)
    metrics.add(*whole(Pictures(2)), 2)
    with pytest.raises(GemscError, match=r"fails: ArithmeticError\n") as caught:
        metrics.figures()
    assert caught.value.at is not None
    assert caught.value.at.text == "raise ArithmeticError"


def test_a_loss_that_fails_on_a_last_batch_is_named_with_its_line(
    tmp_path: Path,
) -> None:
    def fails(output: Any, target: Any) -> Any:
        return output.probabilities

    example = torch.zeros(1, 1, SIZE, SIZE)
    target = {"mask": example > 0}
    written(tmp_path, Convolutions(), (example,), loss, target, **ONE)
    data = {"dataset": lambda: Pictures(4), "eval_dataset": lambda: Pictures(7)}
    with pytest.raises(GemscError, match=r"loss\(\) fails: AttributeError: ") as caught:
        run(tmp_path, user_of(loss=fails, **data), ranks=ONE["ranks"])
    assert caught.value.at is not None
    assert caught.value.at.text == "return output.probabilities"


@pytest.mark.parametrize("given", [5, {"dice": "dice"}])
def test_what_is_no_metric_is_refused(given: Any) -> None:
    with pytest.raises(GemscError, match=r"metrics is of type (int|str)"):
        Metrics(user_of(metrics=given).make_metrics())
    with pytest.raises(
        GemscError, match=r"metrics\(\) returns an object of type float"
    ):
        Metrics(lambda output, target: 0.5).add(None, None, 2)


@dataclass
class Result:
    """What a model may return, as those of transformers do."""

    picture: Tensor
    size: Tensor | None = None
    loss: Tensor | None = None


class Returns(Convolutions):
    def forward(self, x: Tensor) -> Any:
        picture = super().forward(x)
        return Result(picture, loss=picture.square().mean())


class Rows(Convolutions):
    """Rows of all samples, one after the other, as logits of words often are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(0, 2)


def of_result(
    folder: Path, loss: Any, metrics: Any = None, kind: type = Returns, data: int = 1
) -> dict[str, float]:
    """Return the figures of 5 samples, in batches of 4."""
    epochs: list[dict[str, float]] = []
    x = torch.zeros(1, 1, SIZE, SIZE)
    layout = {"ranks": data, "data": data, "micro_batches": 4 // data}
    written(folder, kind(), (x,), loss, {"mask": x > 0}, **layout)
    user = user_of(
        dataset=lambda: Pictures(4),
        eval_dataset=lambda: Pictures(5),
        loss=loss,
        metrics=metrics,
        on_epoch=lambda trainer, epoch, figures: epochs.append(figures),
        optimizer=lambda pairs: torch.optim.SGD([p for _, p in pairs], lr=0.0),
    )
    run(folder, user, ranks=data)
    return epochs[0]


def test_a_loss_and_metrics_take_fields_of_what_the_model_returns(
    tmp_path: Path,
) -> None:
    def metrics(output: Any, target: Any) -> dict[str, float]:
        assert output.picture is output["picture"] is output[0]
        assert output.size is None
        with pytest.raises(AttributeError, match="no 'logits', but picture, size, lo"):
            _ = output.logits
        assert len(output[:2]) == 2
        return {"mean": float(output.picture.mean())}

    def of_fields(output: Any, target: Any) -> Tensor:
        return loss(output.picture, target)

    figures = of_result(tmp_path, of_fields, metrics)
    output, target = whole(Pictures(5))
    assert figures["loss"] == pytest.approx(float(loss(output, target)), rel=1e-5)
    assert figures["mean"] == pytest.approx(float(output.mean()), rel=1e-5)


@pytest.mark.parametrize("data", [1, 2])
def test_a_loss_that_compares_samples_scores_the_last_batch_by_micro_batches(
    data: int, tmp_path: Path
) -> None:
    """As all others; its loss was that of 3 samples at once, and of no plain loop."""

    def spread(output: Tensor, target: Any) -> Tensor:
        return output.std(0).mean() if len(output) > 1 else output.mean()

    x, epochs = torch.zeros(2, 1, SIZE, SIZE), list[dict[str, float]]()
    layout = {"ranks": data, "data": data, "micro_batches": 2 // data}
    written(tmp_path, Convolutions(), (x,), spread, {"mask": x > 0}, **layout)
    user = user_of(
        dataset=lambda: Pictures(4),
        eval_dataset=lambda: Pictures(7),
        loss=spread,
        on_epoch=lambda trainer, epoch, figures: epochs.append(figures),
        optimizer=lambda pairs: torch.optim.SGD([p for _, p in pairs], lr=0.0),
    )
    run(tmp_path, user, ranks=data)
    output, target = whole(Pictures(7))
    losses = [float(spread(part, target)) * len(part) for part in output.split(2)]
    assert epochs[0]["loss"] == pytest.approx(sum(losses) / 7, rel=1e-5)


class Penalty(nn.Module):
    """A loss that holds the model, whose weights are in it."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net

    def forward(self, output: Tensor, target: Any) -> Tensor:
        weight: Any = self.net[0].weight
        return loss(output, target) + weight.square().sum()


def test_a_loss_that_holds_the_model_scores_with_what_is_trained(
    tmp_path: Path,
) -> None:
    net, x, epochs = Convolutions(), torch.zeros(2, 1, SIZE, SIZE), []
    held, data = Penalty(net), Pictures(3)
    written(tmp_path, net, (x,), held, {"mask": x > 0}, ranks=2, micro_batches=2)
    user = user_of(
        dataset=lambda: Pictures(4),
        eval_dataset=lambda: data,
        loss=held,
        on_epoch=lambda trainer, epoch, figures: epochs.append(figures),
        optimizer=lambda pairs: torch.optim.SGD([p for _, p in pairs], lr=0.1),
    )
    trained = Convolutions()
    for state in run(tmp_path, user):
        trained.load_state_dict(state, strict=False)
    pictures, targets = default_collate([data[index] for index in range(3)])
    expected = Penalty(trained)(trained(pictures), targets)
    assert epochs[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_weights_that_a_loss_holds_too_are_updated_once(tmp_path: Path) -> None:
    """In the process that ranks are compared with: they were updated twice there."""
    net, x = Convolutions(), torch.zeros(2, 1, SIZE, SIZE)
    given = net, (x,), Penalty(net), {"mask": x > 0}
    assert against_one_process(tmp_path, *given).worst < 1e-9


def test_a_sample_may_have_several_rows_of_an_output(tmp_path: Path) -> None:
    def of_rows(output: Any, target: Any) -> Tensor:
        return loss(output.unflatten(0, (-1, 1, SIZE)), target)

    metrics = lambda output, target: {"mean": output.mean()}  # noqa: E731
    figures = of_result(tmp_path, of_rows, metrics, Rows)
    output, target = whole(Pictures(5))
    expected = {"loss": float(loss(output, target)), "mean": float(output.mean())}
    assert figures == pytest.approx(expected, rel=1e-5)


class Behind(Convolutions):
    """Rows before samples, as recurrent layers have time."""

    def forward(self, x: Tensor) -> Any:
        picture = super().forward(x)
        columns = picture.mean((1, 2))
        return {"columns": columns, "picture": picture.movedim(0, 2)}


@pytest.mark.parametrize("data", [1, 2])
def test_samples_may_count_in_another_dimension(data: int, tmp_path: Path) -> None:
    def of_rows(output: Any, target: Any) -> Tensor:
        return loss(output["picture"].movedim(2, 0), target)

    def metrics(output: Any, target: Any) -> dict[str, Any]:
        order = output["picture"].movedim(2, 0).mean((1, 2)) - output["columns"]
        assert len(order) == len(target["mask"])
        return {"mean": output["picture"].mean(), "order": order.abs().max()}

    figures = of_result(tmp_path, of_rows, metrics, Behind, data)
    assert Plan.read(tmp_path / "plan.toml").sample_dims == [0, 2]
    output, target = whole(Pictures(5))
    expected = {"loss": loss(output, target), "mean": output.mean(), "order": 0.0}
    expected = {name: float(value) for name, value in expected.items()}
    assert figures == pytest.approx(expected, rel=1e-5, abs=1e-6)
    settings = RunSettings(
        steps=1,
        dtype=torch.float32,
        micro_batch_size=1,
        micro_batches=4,
        sample_dims=[0, 2],
    )
    user = user_of(
        dataset=lambda: Pictures(4),
        eval_dataset=lambda: Pictures(5),
        loss=of_rows,
        metrics=metrics,
        optimizer=lambda pairs: torch.optim.SGD([p for _, p in pairs], lr=0.0),
    )
    user = replace(user, example_inputs=(torch.zeros(1, 1, SIZE, SIZE),))
    plain = PlainRun(user, Behind(), settings)
    plain.train()
    (scores,) = plain.evaluations
    for name, value in expected.items():
        mean = sum(n * row[name] for n, row in scores if name in row) / 5
        assert mean == pytest.approx(value, rel=1e-5, abs=1e-6)


class Weighted(Convolutions):
    """Weights of the loss beside the picture, and what is computed of all pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.arange(3.0))
        self.rate = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        picture = super().forward(x)
        return picture, self.weights.exp(), self.rate, picture.mean((0, 1))


@pytest.mark.parametrize("data", [1, 2])
def test_weights_that_the_model_returns_come_once(data: int, tmp_path: Path) -> None:
    def weighted(output: Any, target: Any) -> Tensor:
        return loss(output[0], target) * output[2] + output[1].sum()

    def metrics(output: Any, target: Any) -> dict[str, Any]:
        assert output[2].shape == ()
        return {"sum": output[1].sum()}

    figures = of_result(tmp_path, weighted, metrics, Weighted, data)
    assert Plan.read(tmp_path / "plan.toml").sample_dims == [0, ONCE, ONCE, OF_ALL]
    total = float(torch.arange(3.0).exp().sum())
    output, target = whole(Pictures(5))
    expected = {"loss": float(loss(output, target)) + total, "sum": total}
    assert figures == pytest.approx(expected, rel=1e-5)
    with pytest.raises(GemscError, match="eval_dataset, 1 samples of 4"):
        of_result(tmp_path, lambda output, _: output[3].sum(), None, Weighted, data)


def test_a_held_out_loss_may_be_no_number_beside_what_is_of_all_samples(
    tmp_path: Path,
) -> None:
    def place(target: Any) -> Tensor:
        return (target["mask"] * torch.arange(SIZE)).sum()

    last = int(place(Pictures(5)[4][1]))

    def no_number(output: Any, target: Any) -> Tensor:
        distance = (place(target) - last).abs() - 0.5
        return loss(output[0], target) + 0 * distance.log()

    assert math.isnan(of_result(tmp_path, no_number, None, Weighted)["loss"])


def test_a_loss_that_the_model_computes_cannot_leave_samples_out(
    tmp_path: Path,
) -> None:
    with pytest.raises(GemscError, match="eval_dataset, 1 samples of 4") as caught:
        of_result(tmp_path, lambda output, target: output.loss)
    assert "a multiple of 4 samples" in str(caught.value.help)
    (note,) = Plan.read(tmp_path / "plan.toml").notes
    assert "of any eval_dataset must be a multiple of 4" in note


class OwnLoss(Convolutions):
    """As libraries return it: the loss, with or without what it is computed of."""

    alone = False

    def forward(self, x: Tensor) -> Any:
        picture = super().forward(x)
        output = {"loss": picture.square().mean((1, 2)).mean()}
        return output if self.alone else {**output, "picture": picture}


class OwnLossAlone(OwnLoss):
    alone = True


@pytest.mark.slow(1)
@pytest.mark.parametrize("model", [OwnLoss, OwnLossAlone])
def test_a_loss_of_whole_micro_batches_is_refused_before_the_first_step(
    model: type[OwnLoss], tmp_path: Path
) -> None:
    def own(output: Any, target: Any) -> Tensor:
        return output["loss"].mean() + 0 * target["mask"].sum()

    steps: list[Any] = []
    user = user_of(
        dataset=lambda: Pictures(8),
        eval_dataset=lambda: Pictures(5),
        loss=own,
        on_step=lambda trainer, report: steps.append(report),
    )
    x = torch.zeros(2, 1, SIZE, SIZE)
    layout = {"ranks": 2, "micro_batches": 2}
    written(tmp_path, model(), (x,), own, {"mask": x > 0}, **layout)
    with pytest.raises(GemscError, match="eval_dataset, 1 samples of 4") as caught:
        run(tmp_path, user, "--epochs", 1)
    assert caught.value.at is not None
    assert not steps
    (note,) = Plan.read(tmp_path / "plan.toml").notes
    assert "eval_dataset must be a multiple of 4" in note


class OwnCount(OwnLoss):
    """Its loss, and how many pixels are bright."""

    def forward(self, x: Tensor) -> Any:
        given = super().forward(x)
        return {**given, "bright": (given["picture"] > 0).sum()}


class MeanOfLosses(Spread):
    """As torchmetrics does, it leaves out what is no number."""

    def update(self, output: Any, target: Any) -> None:
        self.seen += [loss for loss in output.loss if loss.isfinite()]

    def compute(self) -> Tensor:
        return torch.stack(self.seen).mean()


def loss_of_model(output: Any, target: Any) -> Any:
    return {"own": output.loss.mean()}


def count_of_model(output: Any, target: Any) -> Any:
    return {"bright": output["bright"].sum() / len(target["mask"])}


def spread_of_samples(output: Any, target: Any) -> Any:
    return {"spread": output.picture.sub_(target["mask"].float()).std()}


@pytest.mark.slow(2)
@pytest.mark.parametrize("metrics", [loss_of_model, count_of_model, MeanOfLosses()])
def test_a_metric_of_whole_micro_batches_cannot_leave_samples_out(
    metrics: Any, tmp_path: Path
) -> None:
    def own(output: Any, target: Any) -> Tensor:
        return loss(output["picture"], target)

    def user(count: int, metrics: Any) -> Any:
        return user_of(
            dataset=lambda: Pictures(8),
            eval_dataset=lambda: Pictures(count),
            loss=own,
            metrics=metrics,
        )

    x = torch.zeros(2, 1, SIZE, SIZE)
    layout = {"ranks": 2, "micro_batches": 2}
    written(tmp_path, OwnCount(), (x,), own, {"mask": x > 0}, **layout)
    with pytest.raises(GemscError, match=r"metrics uses .* 1 samples of 4"):
        run(tmp_path, user(5, metrics), "--epochs", 1)
    assert run(tmp_path, user(4, metrics), "--epochs", 1)
    assert run(tmp_path, user(5, spread_of_samples), "--epochs", 1)


class Learning(nn.Module):
    """A loss with a weight for each column, one that is trained, one frozen, and what
    only evaluation adds: a constant, and the farthest that training has come."""

    start, changes = 1.5, False

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.fixed = nn.Parameter(torch.tensor(self.start), requires_grad=False)
        self.register_buffer("columns", torch.arange(1.0, SIZE + 1))
        self.register_buffer("lowest", torch.zeros(()), persistent=False)
        self.register_buffer("farthest", torch.zeros(()))

    def forward(self, output: Tensor, target: dict[str, Any]) -> Tensor:
        error = (output - target["mask"].to(output)) ** 2 * self.columns * self.fixed
        if self.training:
            if self.changes:
                far = (self.scale.detach() - 0.5).abs()
                self.farthest = torch.maximum(self.farthest, far)
            return self.scale * error.mean() - self.scale.log()
        return self.scale * error.mean() + self.lowest + self.farthest


@pytest.mark.slow(1)
@pytest.mark.parametrize("layout", [*LAYOUTS, "rows of weights"])
def test_a_loss_with_tensors_of_its_own_scores_all_samples(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not trained is as when it was compiled; the ranks send it once."""
    sent: list[str] = []
    gather = LocalTransport.all_gather_object

    def watched(transport: LocalTransport, mine: Any, *given: Any) -> Any:
        if isinstance(mine, list) and mine and isinstance(mine[0], tuple):
            sent.extend(
                f"{k} {part}" for k, part, *_ in mine if str(k).endswith("fixed")
            )
        return gather(transport, mine, *given)

    monkeypatch.setattr(LocalTransport, "all_gather_object", watched)
    rows = {"ranks": 2, "data": 2, "micro_batches": 2, "shard": "weights"}
    options = {**LAYOUTS, "rows of weights": rows}[layout]
    # replicas of a loss must not change it
    is_one = "data" not in options and layout != "mirrored"
    monkeypatch.setattr(Learning, "changes", is_one)
    names: dict[str, Any] = {
        "dataset": lambda: Pictures(8),
        "eval_dataset": lambda: Pictures(7),
        "loss": Learning,
        "optimizer": lambda pairs: torch.optim.SGD([p for _, p in pairs], lr=0.02),
    }
    example = torch.zeros(1, 1, SIZE, SIZE)
    mask = {"mask": example > 0}
    written(tmp_path, Convolutions(), (example,), Learning(), mask, **options)
    settings = RunSettings(
        steps=4, dtype=torch.float64, micro_batch_size=1, micro_batches=4
    )
    user = replace(user_of(**names), example_inputs=(example,))
    plain = PlainRun(user, Convolutions().double(), settings)
    plain.train()
    losses: list[float] = []

    def on_epoch(trainer: Trainer, epoch: int, figures: dict[str, float]) -> None:
        if trainer.transport.rank == 0:
            losses.append(figures["loss"])

    class Other(Learning):
        start = 0.0

    names |= {"loss": Other, "on_epoch": on_epoch}
    user, ranks = user_of(**names), options["ranks"]
    run(tmp_path, user, "--epochs", "2", ranks=ranks, dtype=torch.float64)
    sums = [sum(n * row["loss"] for n, row in rows) for rows in plain.evaluations]
    assert len({*sums}) == 2
    assert losses == pytest.approx([total / 7 for total in sums], rel=1e-9)
    assert len({*sent}) == len(sent) > 0
