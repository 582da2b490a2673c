"""Batches of several shapes on the command line, by MPI: run, resume, verify, show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import start
from safetensors.torch import load_file

MODEL = """\
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

IGNORED = -100


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.mix = nn.Embedding(32, 16), nn.Linear(16, 48)
        self.drop, self.up = nn.Dropout(0.1), nn.Linear(16, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, words):
        x = self.words(words)
        parts = self.mix(x).unsqueeze(1).chunk(3, -1)
        x = x + scaled_dot_product_attention(*parts, is_causal=True).squeeze(1)
        return self.head(torch.relu(self.up(self.drop(x))))


class Lines:
    def __init__(self, size):
        self.sizes = torch.randint(3, 17, (size,)).tolist()

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        line = torch.randint(32, (self.sizes[index] + 1,))  # another one each time
        return line[:-1], line[1:]


model = Words
pad_value = (0, IGNORED)


def example_inputs():
    return [(torch.zeros(n, size).long(),) for n, size in ((4, 6), (2, 11), (2, 16))]


def loss(output, target):
    total = cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return total, (target != IGNORED).sum()


def optimizer(params):
    return torch.optim.Adam(params, lr=0.01)


def dataset():
    return Lines(40)


def eval_dataset():
    return Lines(9)


def metrics(output, target):
    is_word = target != IGNORED
    return {"right": (output.argmax(2) == target)[is_word].float().mean()}
"""
SHAPES = ["6", "11", "16"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    (folder / "model.py").write_text(MODEL)
    options = ("--ranks", 2, "--micro-batches", 2)
    done = start("compile", folder / "model.py", *options, "-o", folder / "x")
    assert done.code == 0, done.err
    assert "shapes 6, 11, 16" in done.out
    return folder / "x"


@pytest.mark.slow
@pytest.mark.mpi
def test_a_run_that_stops_within_an_epoch_goes_on_bit_for_bit(
    program: Path, tmp_path: Path
) -> None:
    whole = start("run", program, "--epochs", 2, "--save", tmp_path / "a")
    assert whole.code == 0, whole.err
    steps = logged(tmp_path / "a")
    assert {step["shape"] for step in steps} == {*SHAPES}
    assert all(f"shape {name}: " in whole.out for name in SHAPES)
    stop = len(steps) // 2 + 3
    for words in (("--steps", stop), ("--epochs", 2, "--resume")):
        done = start("run", program, *words, "--save", tmp_path / "b")
        assert done.code == 0, done.err
    for one, other in zip(steps, logged(tmp_path / "b"), strict=True):
        assert (one["loss"], one["shape"]) == (other["loss"], other["shape"])
    models = [load_file(tmp_path / name / "model.safetensors") for name in "ab"]
    for name, tensor in models[0].items():
        assert torch.equal(tensor, models[1][name])


def logged(folder: Path) -> list[dict[str, object]]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "step"]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "float64: worst"),
        (
            "--run 12 --last-batch train --accumulate 2 --clip-norm 0.1",
            "float64: 12 steps",
        ),
    ],
)
def test_ranks_do_what_one_process_does(program: Path, words: str, said: str) -> None:
    done = start("verify", program, *words.split())
    assert done.code == 0, done.out + done.err
    assert said in done.out
    assert "exact" in done.out


@pytest.mark.slow
def test_each_shape_is_proved_for_all_inputs(program: Path) -> None:
    done = start("verify", program, "--all-inputs")
    assert done.code == 0, done.out + done.err


@pytest.mark.slow
def test_the_shapes_are_listed(program: Path) -> None:
    done = start("show", program)
    rows = [line.split("│")[1:4] for line in done.out.splitlines() if "│" in line]
    listed = [[cell.strip() for cell in row[:2]] for row in rows]
    assert [row for row in listed if row[0] in SHAPES and row[1] in ("8", "4")] == [
        ["6", "8"],
        ["11", "4"],
        ["16", "4"],
    ]
    assert "a step of each" in (program / "report.html").read_text()


@pytest.mark.slow
def test_an_edited_plan_has_all_shapes_again(program: Path, tmp_path: Path) -> None:
    text = (program / "plan.toml").read_text().replace('"1f1b"', '"gpipe"')
    (program.parent / "edited.toml").write_text(text)
    words = (program.parent / "model.py", "--plan", program.parent / "edited.toml")
    done = start("compile", *words, "-o", tmp_path / "y")
    assert done.code == 0, done.err
    files = {path.name for path in (tmp_path / "y").glob("rank*.py")}
    assert files == {path.name for path in program.glob("rank*.py")}
    assert len(files) == 6


@pytest.mark.slow
def test_an_onnx_file_says_which_shape_it_takes(program: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    done = start("export", program, "--to", tmp_path / "net.onnx")
    assert done.code == 0, done.err
    said = "takes the shape 16 alone, which costs most, and not 6 or 11"
    assert said in done.out + done.err
