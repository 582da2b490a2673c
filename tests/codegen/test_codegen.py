"""Rank files: what a person would have written."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from models import MODELS
from parity_support import traced
from program_support import (
    Net,
    X,
    assert_formatted,
    batch_of,
    mse,
    written,
)
from threads import run_on_threads
from torch import Tensor, nn

from gemsc.compiler import compile, lower
from gemsc.options import CompileOptions
from gemsc.verify.compare import compare
from gemsc.verify.one_process import reference_steps


def files_of(name: str, **options: Any) -> dict[str, str]:
    return lower(traced(name), CompileOptions(**options)).rank_modules()


# Whole files


@pytest.mark.slow
def test_the_files_of_a_unet(golden: Callable[[str, str], None]) -> None:
    program = compile(
        networks.FlatUNet(), (networks.PICTURE,), loss=mse,
        example_target=networks.PICTURE, ranks=3,
    )  # fmt: skip
    for name, text in program.rank_modules().items():
        golden(text, f"unet_{name}")


def test_the_files_of_a_unet_whose_blocks_keep_nothing(
    golden: Callable[[str, str], None],
) -> None:
    program = compile(
        networks.FlatUNet(), (networks.PICTURE,), loss=mse,
        example_target=networks.PICTURE, ranks=1,
        recompute=("down1", "up3"), offload=("down2", "up1"),
    )  # fmt: skip
    (text,) = program.rank_modules().values()
    golden(text, "keeps_nothing.py")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.fc(x) * scale


def test_an_input_without_samples_is_there_once() -> None:
    """Else micro-batches and replicas would get some of its rows each."""
    inputs = torch.ones(6, 4), torch.ones(4)
    target = {"loss": mse, "example_target": inputs[0]}
    program = compile(Scaled(), inputs, ranks=1, check=False, **target)
    (text,) = program.rank_modules().values()
    assert "(4,), torch.float32, batched=False)" in text
    assert text.count("batched=False") == 1  # there is a target, too


class Tied(nn.Module):
    """Two layers have the weight of the first: one is called, the other is not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.b.weight = self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def test_what_is_never_called_has_its_name_all_the_same() -> None:
    x = torch.ones(4, 4)
    given = {"loss": mse, "example_target": x, "ranks": 1}
    (text,) = compile(Tied(), (x,), check=False, **given).rank_modules().values()
    assert 'aliases={"c.weight": "a.weight"}' in text.replace("'", '"')


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.drop = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.a(x)
        with torch.autocast("cpu", dtype=torch.float16):
            x = self.b(x * y)
        with torch.autocast("cpu", enabled=False):
            x = self.c(x.float())
        return y + sum(x * x for x in [self.drop(x)])


def test_lines_run_in_the_modes_of_the_user() -> None:
    x = torch.ones(4, 4)
    given = {"loss": mse, "example_target": x, "precision": "bfloat16", "ranks": 1}
    (text,) = compile(Modes(), (x,), check=False, **given).rank_modules().values()
    modes = [line.strip() for line in text.splitlines() if " with " in line]
    assert modes == [
        "with torch.no_grad():",
        'with torch.autocast("cpu", dtype=torch.float16):',
        "with torch.autocast(device.type, enabled=False):",
    ]
    assert " = self.drop(x)" in text  # and not self.drop(x) * self.drop(x)


@pytest.mark.slow
def test_messages_between_grids_are_as_ruff_formats_them(tmp_path: Path) -> None:
    program = compile(
        networks.FlatUNet(), (networks.PICTURE,), loss=mse,
        example_target=networks.PICTURE, ranks=4, tiles=("2x1",), check=False,
    )  # fmt: skip
    assert_formatted(tmp_path, program.rank_modules())


@pytest.mark.slow
def test_the_files_of_a_picture_in_tiles(
    golden: Callable[[str, str], None], tmp_path: Path
) -> None:
    program = compile(
        networks.Tiled(), (networks.PICTURE,), loss=nn.CrossEntropyLoss(),
        example_target=torch.zeros(2, dtype=torch.long), ranks=4, tiles=("2x2",),
    )  # fmt: skip
    files = program.rank_modules()
    golden(files["rank0.py"], "tiled_rank0.py")
    assert_formatted(tmp_path, files)


@pytest.mark.slow
@pytest.mark.by_day(2)
@pytest.mark.parametrize("kind", ["recompute", "offload"])
@pytest.mark.parametrize("name", ["unet", "densecnn", "encoder", "resnet50"])
def test_files_with_segments_are_formatted(
    name: str, kind: str, tmp_path: Path
) -> None:
    choice: Any = {kind: ("all",)}
    files = files_of(name, ranks=2, micro_batches=4, **choice)
    assert any(f"{kind}(" in text or "offloaded()" in text for text in files.values())
    assert_formatted(tmp_path, files)


@pytest.mark.slow
def test_the_files_of_an_encoder_with_tied_weights(
    golden: Callable[[str, str], None],
) -> None:
    program = compile(
        networks.TiedEncoder(), (networks.TOKENS,), loss=networks.cross_entropy,
        example_target=networks.TOKENS, ranks=2,
    )  # fmt: skip
    for name, text in program.rank_modules().items():
        golden(text, f"encoder_{name}")


LEFT_OUT = ("resnet110v2", "tiled")  # one takes long, the other has too few blocks


@pytest.mark.slow(1)
@pytest.mark.by_day(2)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in LEFT_OUT])
def test_the_text_does_not_grow_with_the_micro_batches(
    name: str, tmp_path: Path
) -> None:
    few = files_of(name, ranks=4, micro_batches=16)
    many = files_of(name, ranks=4, micro_batches=64)
    lines = [{f: t.count("\n") for f, t in files.items()} for files in (few, many)]
    assert lines[0] == lines[1]
    fewest = files_of(name, ranks=4, micro_batches=4)
    assert all(text.count("\n") <= lines[0][file] for file, text in fewest.items())
    assert_formatted(tmp_path, few)
    assert_formatted(tmp_path, fewest)


@pytest.mark.slow(1)
@pytest.mark.by_day(6)
@pytest.mark.parametrize(
    "schedule", ["basic", "gpipe", "mast", "chimera", "interleaved", "zb-h1"]
)
@pytest.mark.parametrize("name", ["unet", "densecnn", "encoder"])
def test_files_of_every_schedule_are_formatted(
    name: str, schedule: str, tmp_path: Path
) -> None:
    files = files_of(name, ranks=2, micro_batches=4, schedule=schedule)
    assert_formatted(tmp_path, files)


@pytest.mark.slow
def test_the_files_of_the_unet_example_have_less_than_200_lines() -> None:
    unet = sys.modules["unet_histology.model"]
    inputs = unet.example_inputs()
    target = torch.zeros(inputs[0].shape[0], 1, *inputs[0].shape[2:])
    options: Any = {"ranks": 4, "micro_batches": 8, "check": False}
    program = compile(
        unet.model(), inputs, loss=unet.loss, example_target=target, **options
    )
    for text in program.rank_modules().values():
        assert text.count("\n") < 200


@pytest.mark.slow(1)
@pytest.mark.parametrize("name", ["unet", "encoder"])
def test_the_same_model_gives_the_same_bytes(name: str) -> None:
    first = files_of(name, ranks=3)
    traced.cache_clear()
    assert files_of(name, ranks=3) == first


@pytest.mark.slow
def test_the_users_line_stands_above_what_it_became() -> None:
    text = files_of("unet", ranks=2)["rank1.py"]
    assert "# model.py:" in text
    assert "return self.head(x)" in text
    lines = [line.strip() for line in text.splitlines() if "# model.py:" in line]
    assert all(a != b for a, b in pairwise(lines))


def test_micro_batches_may_come_in_any_order(tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.d(self.c(torch.tanh(self.b(self.a(x)))))

    model = Net(forward)
    written(tmp_path, model, ranks=2, micro_batches=3, schedule="gpipe")
    turns = {"0": "2", "1": "0", "2": "1"}
    for path in tmp_path.glob("rank*.py"):
        text = path.read_text()
        in_loops = text.replace("in range(NUM_MICRO_BATCHES)", "in (2, 0, 1)")
        pieces = re.split(r"(?<=ward_stage1\(worker, )(\d)", in_loops)
        path.write_text("".join(turns.get(piece, piece) for piece in pieces))
        assert path.read_text() != text
    batches = [batch_of(((X,), X), 3)] * 2
    record = run_on_threads(tmp_path, 2, batches)
    expected = reference_steps(model, mse, batches, 3, torch.float64)
    assert compare(record, expected).worst < 1e-12
