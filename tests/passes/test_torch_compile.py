"""--torch-compile: forwards of stages as one graph, equal up to rounding."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Gemsc
from nightly import at_night
from program_support import (
    Net,
    X,
    against_one_process,
    batch_of,
    mse,
    on_ranks,
    written,
)
from threads import run_on_threads
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from gemsc.base.rng import same_draws
from gemsc.errors import GemscError
from gemsc.runtime.training.program_directory import check_program
from gemsc.verify import steps

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
TABLE = [
    "--ranks 2",
    "--ranks 2 --precision bfloat16",
    "--ranks 2 --memory-format channels_last",
    "--ranks 2 --set DROP=0.5",
    "--ranks 4 --data 2",
]
COMBINED = "--ranks 2 --schedule mast --micro-batches 2 --shard-optimizer"
MODEL = """
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

DROP = 0.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(DROP)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def example_inputs() -> tuple[Tensor, ...]:
    return (torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)),)


def example_target() -> Tensor:
    return torch.ones(2, 2, 6, 6)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def dataset() -> TensorDataset:
    x = torch.randn(16, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, torch.ones(16, 2, 6, 6))


eval_dataset = dataset
"""


class Gate(nn.Module):
    """What torch.compile would have to break a graph for."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.detach().sum()) > 0 else x


def layers(self: Any, x: Tensor) -> Tensor:
    return self.d(torch.tanh(self.c(torch.tanh(self.b(self.a(x))))))


def with_dropout(self: Any, x: Tensor) -> Tensor:
    x = torch.dropout(torch.tanh(self.b(self.a(x))), 0.5, self.training)
    return self.d(torch.tanh(self.c(x)))


def gated(self: Any, x: Tensor) -> Tensor:
    return self.d(self.gate(self.a(x)))


@pytest.mark.slow(4)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tiles": "2x1", "ranks": 3}, "--tiles 2x1: tiles exchange halos"),
        ({"shards": "2"}, "--shards 2: shards add up"),
        ({"branches": "2"}, "--branches 2: ranks exchange branches"),
        ({"recompute": ("all",)}, "--recompute all"),
        ({"offload": ("auto",), "device_memory": 2**30}, "--offload auto"),
        ({"schedule": "zb-h1"}, "--schedule zb-h1: a compiled backward"),
        ({"schedule": "v-half"}, "--schedule v-half"),
    ],
)
def test_what_happens_inside_of_a_stage_is_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(GemscError, match=words):
        written(tmp_path, Net(layers), torch_compile=True, **options)


def test_a_module_that_depends_on_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GemscError, match="gate, which stays whole: forward needs the"):
        written(tmp_path, Net(gated, gate=Gate()), torch_compile=True)


@pytest.mark.slow
def test_auto_takes_what_can_be_compiled_and_a_backward_stays_in_one_part(
    tmp_path: Path,
) -> None:
    for number, is_compiled in enumerate((False, True)):
        words = {"torch_compile": is_compiled, "schedule": "auto", "shards": "auto"}
        folder = tmp_path / str(number)
        program = written(folder, Net(layers), data=1, micro_batches=8, **words)
        tried = {way.options.schedule: way.problem for way in program.candidates}
        assert ("compiled backward" in tried["zb-h1"]) == is_compiled
        text = (folder / "rank0.py").read_text()
        assert ("torch_compile=True" in text) == is_compiled
    for number, is_compiled in enumerate((False, True)):
        folder = tmp_path / f"plain{number}"
        written(folder, Net(layers), torch_compile=is_compiled)
        assert ("def weights_" in (folder / "rank1.py").read_text()) != is_compiled


@pytest.mark.parametrize("missing", ["compiler", "header"])
def test_what_is_missing_is_said_before_ranks_start(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, Net(layers), torch_compile=True)
    if missing == "compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
        words = "needs a C.. compiler, and there is no no-such-compiler"
    else:
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
        words = "needs Python's headers"
    with pytest.raises(GemscError, match=words) as caught:
        check_program(tmp_path, 2)
    assert "install" in str(caught.value.help)
    assert "without --torch-compile" in str(caught.value.help)


def spied(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what would be compiled as it is, and note the modes that it runs in."""

    def compile(forward: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        assert how == {"fullgraph": True, "dynamic": False}

        def run(*inputs: Any) -> Any:
            calls.append(_len_torch_dispatch_stack())
            return forward(*inputs)

        return run

    monkeypatch.setattr(torch, "compile", compile)


@pytest.mark.slow(1)
@pytest.mark.parametrize("draws", [False, True])
def test_every_forward_is_compiled_but_draws_that_are_compared(
    draws: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    spied(calls, monkeypatch)
    model = Net(with_dropout if draws else layers)
    written(tmp_path, model, torch_compile=True, micro_batches=3)
    x, target = batch_of(((torch.ones(2, 4),), torch.ones(2, 4)), 3)

    def work(trainer: Any) -> None:
        trainer.step(x, target)
        trainer.evaluate(x, target)

    on_ranks(tmp_path, 2, work)
    assert calls == [0] * 2 * 2 * 3  # ranks, training and evaluation, micro-batches
    calls.clear()
    run_on_threads(tmp_path, 2, [(x, target)], draws=same_draws)
    assert calls == [0] * (3 if draws else 6)  # one of two stages draws


@pytest.mark.slow
def test_a_forward_has_a_form_for_each_state_of_its_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen one after the other, it is compiled again more often than is usual."""
    compile = partial(torch.compile, backend="eager")  # graphs without kernels
    monkeypatch.setattr(torch, "compile", compile)
    written(tmp_path, Net(layers), torch_compile=True, ranks=1)
    x, target = torch.ones(8, 4), torch.ones(8, 4)

    def work(trainer: Any) -> int:
        parameters = list(trainer.worker.stages.parameters.values())
        for frozen in range(len(parameters)):
            for number, parameter in enumerate(parameters):
                parameter.requires_grad_(number >= frozen)
            trainer.step((x,), target)
            trainer.evaluate((x,), target)
        return len(parameters)

    assert on_ranks(tmp_path, 1, work) == [8]


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    ("lost", "is_exact"), [(1e-11, True), (1e-13, False), (1e-8, False)]
)
def test_kernels_may_lose_in_float32_what_they_lose_in_float64(
    lost: float, is_exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in last bits; 1e-8 in float64 is wrong, and allows nothing."""
    written(tmp_path, Net(layers), (X,), torch_compile=True, ranks=1)
    off = {torch.float64: lost, torch.float32: 5e-3}

    def ranks(subject: Any) -> Any:
        count = subject.plan.data * subject.plan.micro_batches
        given = subject.batches, count, subject.dtype
        record = steps.reference_steps(Net(layers), mse, *given)
        gradient = record.gradients["a.bias"]
        gradient += off[subject.dtype] * gradient.abs().max()
        return record

    monkeypatch.setattr(steps, "_ranks", ranks)
    given = {"loss": mse, "example_target": X, "dtype": torch.float32}
    with nullcontext() if is_exact else pytest.raises(GemscError, match=r"a\.bias is"):
        diff = steps.verify_compiled(tmp_path, Net(layers), (X,), **given)
        assert diff.errors["gradient of a.bias"] > 1e-3


def test_what_cannot_be_compiled_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*inputs: Any) -> None:
        raise torch._dynamo.exc.Unsupported("no such operator\nand more")

    monkeypatch.setattr(torch, "compile", lambda forward, **how: refuse)
    written(tmp_path, Net(layers), torch_compile=True, ranks=1)
    batch = (torch.ones(8, 4),), torch.ones(8, 4)
    words = "torch.compile cannot take stage 0: .?no such operator.?\nnote"
    with pytest.raises(GemscError, match=words):
        on_ranks(tmp_path, 1, lambda trainer: trainer.step(*batch))


@NEEDS_COMPILER
@pytest.mark.parametrize("words", at_night(*TABLE))
def test_ranks_compute_what_one_process_computes(
    words: str, command: Gemsc, tmp_path: Path
) -> None:
    """Under mpirun: two threads cannot compile at once."""
    program = tmp_path / "program"
    given = ["--micro-batches", "2", "--torch-compile", *words.split()]
    assert command("compile", "model.py", *given, "-o", program).code == 0
    for how in ([], ["--run", "3"]):
        outcome = command("verify", program, *how)
        assert outcome.code == 0, outcome.out + outcome.err


class Iterated(nn.Module):
    """A norm of few iterations: its gradient depends on the vectors before them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        spectral_norm(self.first, n_power_iterations=1)
        spectral_norm(self.last, n_power_iterations=1)
        for name, buffer in self.named_buffers():
            numbers = torch.Generator().manual_seed(len(name))
            buffer.copy_(torch.randn(buffer.shape, generator=numbers))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Read(nn.Module):
    """Computes with the statistics that its BatchNorm changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        ratio = x.detach().var(0) / (self.norm.running_var + 0.1)
        return self.norm(x) * ratio.sqrt() + x * self.norm.running_var.sqrt()


@NEEDS_COMPILER
@pytest.mark.slow(1)
@pytest.mark.parametrize("kind", [Iterated, Read])
def test_a_backward_computes_nothing_again_of_what_forward_changed(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    """Inductor does: it would be off by 1e-2 (pytorch/pytorch#197039)."""
    diff = against_one_process(tmp_path, kind(), ranks=1, torch_compile=True)
    assert diff.worst < 1e-10


@NEEDS_COMPILER
@pytest.mark.nightly
def test_mirrored_replicas_share_the_update(command: Gemsc, tmp_path: Path) -> None:
    """Two stages on each rank that are one class, in training."""
    program = tmp_path / "program"
    given = ["--torch-compile", *COMBINED.split()]
    assert command("compile", "model.py", *given, "-o", program).code == 0
    outcome = command("verify", program, "--dtype", "float64")
    assert outcome.code == 0, outcome.out + outcome.err


@NEEDS_COMPILER
@pytest.mark.nightly
def test_a_run_goes_on_bit_for_bit(command: Gemsc, tmp_path: Path) -> None:
    """With evaluations, and all that may be combined."""
    program = tmp_path / "program"
    given = ["--torch-compile", *COMBINED.split(), "--precision", "bfloat16"]
    given += ["--set", "DROP=0.5"]
    assert command("compile", "model.py", *given, "-o", program).code == 0
    saved = []
    for name, epochs in (("whole", ["2"]), ("parts", ["1", "2"])):
        folder = tmp_path / name
        for number, last in enumerate(epochs):
            words = ["--epochs", last, "--save", folder, *["--resume"] * number]
            outcome = command("run", program, *words)
            assert outcome.code == 0, outcome.out + outcome.err
            assert f"held-out after epoch {last}" in outcome.out + outcome.err
        saved.append((folder / "model.safetensors").read_bytes())
    assert saved[0] == saved[1]
