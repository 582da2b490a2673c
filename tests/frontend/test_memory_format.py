"""channels_last: kept by weights, stages, messages and tiles, as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_support import assert_formatted, batch_of, on_ranks, written
from threads import run_on_threads
from torch import Tensor, nn

import gemsc
from gemsc.base.dtypes import (
    convert,
    converted,
    format_of,
    like_examples,
    lying_as,
    lying_of,
)
from gemsc.base.plain_forward import plain_forward
from gemsc.errors import GemscError
from gemsc.messages.message import Message, Value
from gemsc.options import CompileOptions
from gemsc.runtime.training.trainer import Trainer
from gemsc.verify.compare import compare
from gemsc.verify.one_process import reference_steps

LAST = torch.channels_last


class Picture(nn.Module):
    """A skip over a smaller image; a weight of 1x1 and one for each channel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.down = nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU())
        self.one = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.last = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        x = self.up(self.one(self.down(skip))) + skip
        return self.head(self.last(x).mean((2, 3)))


class Volume(nn.Module):
    """A volume, then images of it: weights of four and of five dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.volume = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4))
        self.image = nn.Conv2d(4, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.image(self.volume(x).relu().mean(2)).mean((2, 3)))


PICTURES = (torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)),)
VOLUMES = (torch.randn(2, 2, 8, 8, 8, generator=torch.Generator().manual_seed(0)),)
TARGET = torch.tensor([0, 1])
COUNT = 2  # micro-batches


def classes(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def adam(named: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=0.01)  # type: ignore[arg-type]


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Picture, {"schedule": "zb-h1"}),
        (Picture, {"tiles": "2x1", "ranks": 3}),
        (Volume, {"recompute": ("all",)}),
    ],
)
def test_ranks_compute_what_one_process_computes_in_the_format(
    model: type[nn.Module], options: dict[str, object], tmp_path: Path
) -> None:
    inputs = VOLUMES if model is Volume else PICTURES
    options = {"ranks": 2, "micro_batches": COUNT, **options}
    net = model()
    convert(net, "channels_last")
    given = model(), inputs, classes, TARGET
    written(tmp_path, *given, memory_format="channels_last", **options)
    batch = batch_of((converted(inputs, "channels_last"), TARGET), COUNT)
    exact = "tiles" not in options
    dtype = torch.float32 if exact else torch.float64
    ranks = int(str(options["ranks"]))
    record = run_on_threads(tmp_path, ranks, [batch] * 2, dtype=dtype)
    diff = compare(record, reference_steps(net, classes, [batch] * 2, COUNT, dtype))
    assert diff.worst < 1e-11
    assert not exact or diff.equal == diff.total > 0


@pytest.mark.slow
def test_a_model_that_has_the_format_keeps_it_in_text_and_on_ranks(
    tmp_path: Path,
) -> None:
    """Weights, their gradients, what the optimizer keeps of them, also once resumed."""
    model = Picture().to(memory_format=LAST)  # type: ignore[call-overload]
    inputs = (PICTURES[0].to(memory_format=LAST),)
    given = model, inputs, classes, TARGET
    written(tmp_path, *given, ranks=2, micro_batches=COUNT)
    text = "".join(path.read_text() for path in tmp_path.glob("rank*.py"))
    assert text.count("self.to(memory_format=torch.channels_last)") == 2
    assert text.count("    memory_format=torch.channels_last,") == 5  # 2 x 2 and x
    assert_formatted(tmp_path)
    batch = batch_of((PICTURES, TARGET), COUNT)

    def work(trainer: Trainer) -> list[tuple[Tensor, ...]]:
        trainer.step(*batch)
        trainer.save(tmp_path / "saved")
        trainer.resume(tmp_path / "saved")
        updates = trainer.worker.updates
        assert updates.optimizer is not None
        state = updates.optimizer.state
        return [
            (p.detach(), state[p]["exp_avg"])
            for p in updates.parameters.values()
            if p.dim() == 4
        ]

    pairs = [
        pair for rank in on_ranks(tmp_path, 2, work, optimizer=adam) for pair in rank
    ]
    assert len(pairs) == 5
    for pair in pairs:
        empty = torch.empty(pair[0].shape, memory_format=LAST)
        assert all(tensor.stride() == empty.stride() for tensor in pair)


def test_a_single_samples_instance_norm_has_right_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own are wrong there; those of two samples at once are right."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.InstanceNorm2d(8, affine=True),
        nn.SiLU(),
        nn.Conv2d(8, 4, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    torchs_own = getattr(torch.instance_norm, "__wrapped__", torch.instance_norm)
    as_in_a_new_process = partial(
        monkeypatch.setattr, torch, "instance_norm", torchs_own
    )
    batch = PICTURES, TARGET
    one = PICTURES[0][:1], TARGET[:1]
    given = {"memory_format": "channels_last", "ranks": 1, "micro_batches": 2}
    written(tmp_path, model, one[:1], classes, one[1], **given)
    as_in_a_new_process()
    record = run_on_threads(tmp_path, 1, [batch])
    as_in_a_new_process()
    plain = copy.deepcopy(model)
    convert(plain, "channels_last")
    alone = reference_steps(plain, classes, [batch], 2, torch.float64)
    as_in_a_new_process()
    classes(model.double()(PICTURES[0].double()), TARGET).backward()
    for name, parameter in model.named_parameters():
        for gradients in (record.gradients, alone.gradients):
            torch.testing.assert_close(gradients[name], parameter.grad)


def test_an_instance_norm_that_no_loss_needs_gets_no_gradient() -> None:
    """As of a branch whose result only other ranks use."""
    with plain_forward():
        x = torch.randn(1, 2, 3, requires_grad=True)
        split = Apart.apply(F.instance_norm(x), x)  # type: ignore[no-untyped-call]
        split.sum().backward()
    assert torch.equal(x.grad, torch.ones(1, 2, 3))


class Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]


def test_a_layer_in_another_format_keeps_that(tmp_path: Path) -> None:
    model = Picture()
    model.last.to(memory_format=LAST)  # type: ignore[call-overload]
    written(tmp_path, model, PICTURES, classes, TARGET, ranks=2)
    text = "".join(path.read_text() for path in tmp_path.glob("rank*.py"))
    assert text.count(".to(memory_format=") == 1
    assert "self.last.to(memory_format=torch.channels_last)" in text


@pytest.mark.parametrize("count", [1, 2])
def test_a_message_carries_memory_as_it_lies(count: int) -> None:
    shape = (2, 8, 4, 6)
    value = Value("x", shape, torch.float32, memory_format=LAST)
    message = Message(0, 0, 1, (value, Value("y", (3,), torch.float32))[:count])
    x = torch.randn(shape).to(memory_format=LAST)
    packed = message.pack((x, torch.ones(3))[:count])
    assert packed.is_contiguous()
    assert (packed.data_ptr() == x.data_ptr()) == (count == 1)  # no copy
    dtypes = (torch.float32,) * count
    assert message.buffer(dtypes) == (tuple(packed.shape), packed.dtype)
    received = message.unpack(packed.clone(), dtypes)[0]
    assert torch.equal(received, x)
    assert received.stride() == x.stride()
    plain = message.pack((x.contiguous(), torch.ones(3))[:count])  # is made so
    assert torch.equal(message.unpack(plain, dtypes)[0], x)


def test_data_gets_the_format_of_the_examples() -> None:
    examples = {"x": PICTURES[0].to(memory_format=LAST), "mask": torch.ones(2, 2)}
    batch = like_examples({"x": PICTURES[0], "mask": torch.ones(2, 2)}, examples)
    assert format_of(batch["x"]) is LAST
    assert format_of(batch["mask"]) is torch.contiguous_format


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(GemscError, match="memory format 'nhwc'"):
        CompileOptions(memory_format="nhwc")


TRANSPOSED = torch.arange(48).view(8, 6).t()


class Transposed(nn.Module):
    """What it takes crosswise it takes apart where it lies in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("crosswise", torch.arange(48.0).view(8, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        given = x.transpose(1, 2).view(2, 48).view(2, 8, 6).transpose(1, 2)
        x = self.first(given.contiguous()).transpose(1, 2).sin()
        y = self.second(x.transpose(1, 2).cos())
        again = torch.as_strided(x, (2, 6, 8), (48, 8, 1))
        rows = sum(tensor.t().view(48) for tensor in (self.crosswise, TRANSPOSED))
        flat = x.transpose(1, 2).view(2, 48) + rows * 0.01
        return y * flat.view(2, 6, 8) + again


def test_what_lies_crosswise_lies_so_on_ranks() -> None:
    """Messages, inputs, buffers, and tensors that are none: where a view needs it."""
    x = torch.randn(2, 8, 6).transpose(1, 2)
    loss, target = nn.functional.mse_loss, torch.randn(2, 6, 8)
    given: dict[str, Any] = {"loss": loss, "example_target": target}
    program = gemsc.compile(Transposed(), (x,), **given, ranks=2, cuts=("second",))
    assert not program.plan.unchecked


def strided(rows: Tensor) -> Tensor:
    return torch.as_strided(rows, (2, 4, 8, 8), (256, 64, 8, 1))


def paired(rows: Tensor) -> Tensor:
    channels = rows.permute(0, 3, 1, 2).unflatten(3, (4, 2))
    return torch.view_as_complex(channels).abs().repeat(1, 1, 1, 2)


def flat(rows: Tensor) -> Tensor:
    best = rows.sort(1)[0]
    return best.permute(0, 3, 1, 2).view(2, 256).view(2, 4, 8, 8)


class Pictures(nn.Module):
    """Rows of channels, made of channels, are taken where they lie in a row."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x).permute(0, 2, 3, 1).sin()))


@pytest.mark.slow(3)
@pytest.mark.parametrize("split", [{"tiles": "2x1"}, {"shards": "2"}], ids=str)
@pytest.mark.parametrize("function", [strided, paired, flat])
def test_what_a_grid_computes_whole_lies_as_it_did(
    function: Callable[[Tensor], Tensor], split: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"loss": lambda y, t: y.sin().mean()}
    given["example_target"] = torch.randn(2)
    x = (torch.randn(2, 4, 8, 8),)
    program = gemsc.compile(Pictures(function), x, **given, ranks=2, **split)
    assert not program.plan.unchecked


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (torch.ones(2, 3, 4).transpose(1, 2), (0, 2, 1)),
        (torch.ones(2, 3, 4, 5)[:, ::2].permute(2, 0, 3, 1), (1, 3, 0, 2)),
        (torch.ones(2, 1, 4).transpose(1, 2), torch.contiguous_format),
        (torch.ones(2, 3, 4)[:, ::2], torch.contiguous_format),
        (torch.ones(3, 1).expand(3, 4).t(), torch.contiguous_format),
        (torch.ones(2, 3, 4, 5).to(memory_format=LAST), LAST),
    ],
)
def test_a_tensor_lies_in_the_order_of_its_strides(tensor: Tensor, order: Any) -> None:
    assert lying_of(tensor) == order
    assert lying_of(lying_as(tensor.contiguous(), order)) == order
