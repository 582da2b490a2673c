"""Programs of several shapes: their steps, weights, examples and plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from program_support import on_ranks, weights_in
from shape_support import (
    LENGTHS,
    SIZES,
    Words,
    compiled,
    counted,
    examples,
    planned,
    sgd,
    texts,
)
from torch import Tensor, nn
from training_support import user_of

from gemsc.base.examples import target_like
from gemsc.compiler import compile
from gemsc.errors import GemscError
from gemsc.plan import Plan
from gemsc.runtime.data.shapes import shape_of_batch
from gemsc.runtime.training.trainer import Trainer
from gemsc.verify import steps as verify_steps


@pytest.mark.slow
def test_a_step_knows_its_shape_by_the_batch(tmp_path: Path) -> None:
    plan = compiled(tmp_path, Words()).plan
    batches = [torch.cat([x, x]) for (x,) in examples()]

    def work(trainer: Trainer) -> None:
        for number in (2, 0, 1, 1, 2):
            trainer.step(batches[number], batches[number])
            assert trainer.program.num_micro_batches == 2
            assert trainer.worker.steps.done
        with pytest.raises(GemscError, match=r"has none of the shapes .*: 4, 6, 8"):
            trainer.step(torch.zeros(4, 7).long(), torch.zeros(4, 7).long())
        for number in (-1, 3):
            with pytest.raises(GemscError, match=f"there is no shape {number}"):
                trainer.step(batches[2], batches[2], shape=number)
        with pytest.raises(GemscError, match="does not determine its shape"):
            trainer.step(None, None)
        one = batches[0] if trainer.transport.rank == 0 else None
        other = batches[0] if trainer.transport.rank == 1 else None
        trainer.step(one, other, shape=0)

    on_ranks(tmp_path, 2, work)
    assert shape_of_batch(plan, {"input": (batches[1],), "target": None}) == 1
    both = {"input": (batches[1],), "target": batches[0]}
    with pytest.raises(GemscError, match="has none of the shapes"):
        shape_of_batch(plan, both)


def tensors(stage: nn.Module) -> list[tuple[str, Tensor]]:
    return [*stage.named_parameters(), *stage.named_buffers()]


@pytest.mark.slow
def test_the_weights_of_all_shapes_are_the_same_tensors(tmp_path: Path) -> None:
    compiled(tmp_path, Words())

    def work(trainer: Trainer) -> int:
        first = {n: t for stage in trainer.stages.values() for n, t in tensors(stage)}
        for name in trainer.plan.variants:
            trainer.worker.use(name)
            stages = trainer.worker.stages
            assert stages is not trainer.stages
            assert trainer.worker.updates._program is trainer.worker.program
            for stage in stages.values():
                assert all(tensor is first[key] for key, tensor in tensors(stage))
        return len(first)

    assert min(on_ranks(tmp_path, 2, work)) > 0


@pytest.mark.slow
def test_a_program_of_several_shapes_saves_one_model(tmp_path: Path) -> None:
    compiled(tmp_path, Words())
    batches = [torch.cat([x, x]) for (x,) in examples()]

    def work(trainer: Trainer) -> dict[str, Tensor]:
        for batch in batches:
            trainer.step(batch, batch)  # the last one is of the largest shape
        trainer.step(batches[0], batches[0])
        trainer.save(tmp_path / "saved")
        return trainer.state_dict()

    states = on_ranks(tmp_path, 2, work, optimizer=sgd)
    saved = weights_in(tmp_path / "saved")
    for state in states:
        for name, tensor in state.items():
            assert torch.equal(saved[name], tensor)
    assert saved["seen"] == 8


@pytest.mark.parametrize(
    ("inputs", "target", "message"),
    [
        (
            examples(),
            torch.zeros(3),
            "example_target has one shape, but example_inputs has 3",
        ),
        (
            examples(),
            [torch.zeros(3)],
            "example_target has one shape, but example_inputs has 3",
        ),
        (
            [*examples(), (torch.zeros(5, 8).long(),)],
            [torch.zeros(3)] * 4,
            "two shapes with equal samples: 8",
        ),
        (
            [*examples(), (torch.zeros(5, 9),)],
            [torch.zeros(3)] * 4,
            r"its \[0\]\[0\] is int64, its \[3\]\[0\] float32",
        ),
    ],
)
def test_examples_that_do_not_fit_are_refused(
    inputs: Any, target: Any, message: str
) -> None:
    with pytest.raises(GemscError, match=message):
        compile(Words(), inputs, loss=counted, example_target=target, ranks=2)


LINES = [(torch.zeros(2, n),) for n in (4, 8)]
PICTURES = [(torch.zeros(2, 3, *size),) for size in ((4, 8), (8, 8))]
NAMED = [{"words": torch.zeros(2, n), "kind": torch.zeros(2)} for n in (4, 8)]


@pytest.mark.parametrize(
    ("sample", "shapes", "wanted"),
    [
        ((torch.zeros(5), torch.zeros(5)), LINES, ([4], [8])),
        ((torch.zeros(5), torch.zeros(3, 5)), LINES, ([3, 4], [3, 8])),
        ((torch.zeros(5), torch.tensor(1)), LINES, ([], [])),
        ((torch.zeros(5), torch.zeros(10)), LINES, ([10], [10])),
        ((torch.zeros(3, 4, 6), torch.zeros(4, 6)), PICTURES, ([4, 8], [8, 8])),
        (
            (torch.zeros(3, 4, 6), torch.zeros(1, 4, 6)),
            PICTURES,
            ([1, 4, 8], [1, 8, 8]),
        ),
        ((torch.zeros(3, 4, 6), torch.zeros(3)), PICTURES, ([3], [3])),
        (({"words": torch.zeros(7), "kind": 1}, torch.zeros(7)), NAMED, ([4], [8])),
    ],
)
def test_a_target_has_the_sizes_that_its_inputs_have(
    sample: Any, shapes: Any, wanted: tuple[list[int], list[int]]
) -> None:
    targets = [target_like(sample, shapes, number) for number in range(2)]
    assert [list(target.shape) for target in targets] == [*wanted]


def test_targets_of_a_dataset_become_those_of_each_shape() -> None:
    data = texts(5)
    user = replace(user_of(dataset=lambda: data, loss=counted), example_inputs=examples)
    targets = user.make_targets(user.make_shapes())
    assert [list(target.shape) for target in targets] == [[3, 4], [2, 6], [1, 8]]
    first = data[0][1]
    assert targets[2][0, : len(first)].equal(first)
    assert user.make_inputs()[0].shape == (2, 6)
    assert user.make_target(user.make_inputs()).equal(targets[1])
    labels = user_of(dataset=lambda: [(x, 1) for x, _ in data], loss=counted)
    targets = replace(labels, example_inputs=examples).make_targets(user.make_shapes())
    assert [target.tolist() for target in targets] == [[1, 1, 1], [1, 1], [1]]


def test_two_inputs_of_a_model_are_not_two_shapes(tmp_path: Path) -> None:
    """As they were before there were shapes: a list of tensors is a tuple of them."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Any) -> Tensor:
            y = y[0] if isinstance(y, tuple) else y
            return self.b(self.a(x if isinstance(x, Tensor) else x[0])) + y.sum(1, True)

    x, y = torch.randn(2, 4), torch.randn(2, 4)
    for inputs in ([x, torch.randn(2, 5)], [(x,), (y,)]):
        program = compile(
            Pair(),
            inputs,
            loss=lambda o, t: (o - t).square().mean(),
            example_target=x,
            ranks=2,
        )
        assert not program.plan.shapes
        assert [*program.rank_modules()] == ["rank0.py", "rank1.py"]


@pytest.mark.slow
def test_a_plan_keeps_its_shapes(tmp_path: Path) -> None:
    program = compiled(tmp_path, Words())
    plan = Plan.read(tmp_path / "plan.toml")
    assert plan.shapes == program.plan.shapes
    assert plan.micro_batch_sizes == [*SIZES]
    assert plan.batch_sizes == [6, 4, 2]
    assert sorted(plan.variants) == sorted(
        shape.name for shape in plan.shapes if shape.variant
    )
    assert plan.shapes[plan.first_shape or 0].variant == ""
    names = {f"rank{rank}{v}.py" for rank in (0, 1) for v in ("", "_4", "_6", "_8")}
    assert len({*program.rank_modules()} & names) == 6


@pytest.mark.parametrize("count", [0, 1, 40])
def test_verify_has_a_batch_of_each_shape(count: int) -> None:
    """From the dataset, where that has one, whatever its first batches are."""
    words = torch.arange(2)
    data = [(words, words)] * (count > 0) + texts(count)
    plan: Any = SimpleNamespace(
        shapes=[planned(n, size) for n, size in zip(LENGTHS, SIZES, strict=True)],
        batch_sizes=SIZES,
        memory_format="as-given",
        data=1,
        micro_batches=1,
    )
    user: Any = SimpleNamespace(
        dataset=data if data else None,
        make_dataset=lambda: data,
        make_shapes=examples,
        make_targets=lambda shapes: [x for (x,) in shapes],
        pad_value=None,
        bucket=None,
        collate=None,
        line_of=lambda name: None,
    )
    batches = verify_steps._batches(user, plan, 1)
    lengths = [x.shape[1] for (x,), _ in batches]
    assert sorted(lengths) == sorted(LENGTHS)
    given = [x for (x,) in examples()]
    made = [x for (x,), _ in batches if any(torch.equal(x, one) for one in given)]
    assert len(made) == {0: 3, 1: 3, 40: 0}[count]
