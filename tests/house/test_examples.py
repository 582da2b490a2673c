"""Every example is an ordinary PyTorch model: one process trains it without gemsc."""

from __future__ import annotations

import importlib
import math
from types import ModuleType

import pytest
import torch
from models import MODELS, Case
from nightly import at_night
from torch import Tensor
from torch.utils.data import default_collate
from unet_histology import model as unet

from gemsc.base.nests import Mean, as_loss

EXAMPLES = (
    "mlp",
    "resnet18",
    "resnet50",
    "resnet110",
    "densenet",
    "encoder",
    "inception",
    "vit",
    "unet_histology.model",
    "cosmology.model",
    "amoebanet.model",
)


@pytest.fixture(params=[*EXAMPLES, *at_night("retina.model")])
def example(request: pytest.FixtureRequest) -> ModuleType:
    torch.manual_seed(0)
    return importlib.import_module(request.param)


def as_tuple(inputs: Tensor | list[Tensor]) -> tuple[Tensor, ...]:
    return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)


def facts(tensors: tuple[Tensor, ...]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


@pytest.mark.slow(4)
def test_an_example_trains_on_its_dataset(example: ModuleType) -> None:
    inputs, target = example.example_inputs(), example.example_target()
    dataset = example.dataset()
    items, targets = default_collate([dataset[i] for i in range(len(target))])
    assert facts(as_tuple(items)) == facts(inputs)
    assert facts((targets,)) == facts((target,))

    model = example.model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = example.optimizer(model.named_parameters())
    output = model(*as_tuple(items))
    mean = Mean()
    mean.add(as_loss(example.loss(output, targets))).backward()
    optimizer.step()

    assert math.isfinite(mean.value)
    for value in example.metrics(output, targets).values():
        assert 0 <= value <= 1
    for old, (name, new) in zip(before, model.named_parameters(), strict=True):
        assert not torch.equal(old, new), f"{name} did not learn"


def test_equal_random_numbers_give_equal_data(example: ModuleType) -> None:
    dataset = example.dataset()
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        items, targets = default_collate([dataset[len(dataset) - 1]])
        draws.append([*as_tuple(items), targets])
    assert all(map(torch.equal, *draws))


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS.keys())
def test_a_batch_loss_is_the_mean_of_its_micro_batch_losses(case: Case) -> None:
    model = case.build().double().eval()
    inputs, target = case.inputs(4, torch.float64)
    output = model(*inputs)
    chunks = zip(output.chunk(4), target.chunk(4), strict=True)
    parts, whole = Mean(), Mean()
    for chunk in chunks:
        parts.add(as_loss(case.loss(*chunk)))
    whole.add(as_loss(case.loss(output, target)))
    assert parts.value == pytest.approx(whole.value)


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS.keys())
def test_a_case_is_the_same_at_every_call(case: Case) -> None:
    first, second = case.build().state_dict(), case.build().state_dict()
    assert all(map(torch.equal, first.values(), second.values()))
    (inputs, target), (again, target_again) = case.inputs(3), case.inputs(3)
    assert all(map(torch.equal, inputs, again))
    assert torch.equal(target, target_again)
    assert len(target) == 3 * case.micro_batch_size


def test_the_encoder_ties_its_projection_to_its_embedding() -> None:
    model = MODELS["encoder"].build()
    assert model.head.weight is model.embedding.weight


def test_no_training_crop_of_the_unet_touches_the_held_out_quadrant() -> None:
    torch.manual_seed(0)
    seen = torch.zeros(512, 512, dtype=torch.bool)
    for _ in range(2000):
        top, left = unet.corner()
        assert min(top, left) >= 0
        assert max(top, left) <= 512 - unet.CROP
        seen[top : top + unet.CROP, left : left + unet.CROP] = True
    assert not seen[unet.QUADRANT :, unet.QUADRANT :].any()
    assert seen.float().mean() > 0.7  # nearly all of the other three quadrants


def test_the_unet_is_evaluated_on_exactly_the_held_out_quadrant() -> None:
    tiles, stains = default_collate(list(unet.eval_dataset()))
    held_out = slice(unet.QUADRANT, None)
    for parts, whole in zip((tiles, stains), unet.picture(), strict=True):
        rows = [torch.cat([*pair], dim=2) for pair in parts.split(2)]
        assert torch.equal(torch.cat(rows, dim=1), whole[:, held_out, held_out])
