"""The gemsc command, in this process or as users start it, and a file to give it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from gemsc import cli

__all__ = [
    "DEEP",
    "GEMSC",
    "MODEL",
    "Gemsc",
    "Outcome",
    "compile_here",
    "files",
    "gemsc_here",
    "is_alive",
    "line_of",
    "start",
]

GEMSC = Path(sys.executable).with_name("gemsc")
SECONDS = 120  # no command of a test takes as long

DEEP = """\
import os
import torch
from torch import nn

def model():
    layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(16)]
    return nn.Sequential(*layers, nn.Linear(256, 8))

def example_inputs():
    return (torch.randn(SAMPLES, 256),)

def example_target():
    return torch.zeros(SAMPLES, dtype=torch.long)

SAMPLES = int(os.environ.get("SAMPLES", "16"))

loss = nn.CrossEntropyLoss()
"""

MODEL = """\
import torch
from torch import nn
from torch.utils.data import Dataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.1)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = self.drop(x)
        x = torch.relu(self.second(x))
        return self.third(x)


class Data(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.randn(8), torch.tensor(index % 4)


def model():
    return Net()


def example_inputs():
    return (torch.randn(2, 8),)


def loss(output, target):
    return nn.functional.cross_entropy(output, target)


def optimizer(params):
    return torch.optim.Adam(params, lr=0.01)


def dataset():
    return Data(24)


def eval_dataset():
    return Data(16)


def metrics(output, target):
    return {"accuracy": (output.argmax(1) == target).float().mean()}
"""


@dataclass(frozen=True)
class Outcome:
    """What a command said, and its exit code."""

    code: int | str
    out: str
    err: str


Gemsc = Callable[..., Outcome]


def gemsc_here(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Gemsc:
    """Return a function that runs the command in this process, in no time."""

    def run(*words: object) -> Outcome:
        capfd.readouterr()
        code = _code_of(monkeypatch, words)
        said = capfd.readouterr()
        return Outcome(code, said.out, said.err)

    return run


def compile_here(*words: object) -> None:
    """Compile a program that the tests of a file share, in this process."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert _code_of(monkeypatch, ("compile", *words)) == 0


def _code_of(monkeypatch: pytest.MonkeyPatch, words: Sequence[object]) -> int | str:
    monkeypatch.setattr(sys, "argv", ["gemsc", *map(str, words)])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer sets its own
    monkeypatch.setenv("GLIBC_TUNABLES", "")  # else what is timed begins anew
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code or 0


def start(*words: object, **environment: str) -> Outcome:
    """Run the command as users do."""
    return run_words(GEMSC, *words, **environment)


def run_words(*words: object, **environment: str) -> Outcome:
    done = subprocess.run(
        [str(word) for word in words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def is_alive(pid: int) -> bool:
    """Whether a process still runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def line_of(part: str, text: str) -> int:
    """Return the number of the first line that a part of the text begins in."""
    return text[: text.index(part)].count("\n") + 1
