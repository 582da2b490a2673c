"""Checkpoints of torch.distributed: FSDP's users come, and go."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import Gemsc, gemsc_here
from program_support import Net, X, batch_of, mse, on_ranks, written
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from gemsc.errors import GemscError
from gemsc.runtime.training.trainer import Trainer
from gemsc.weights import distributed
from gemsc.weights.distributed import DistributedCheckpoint, Lazy, write_distributed
from gemsc.weights.load import load_weights
from gemsc.weights.write import Entry

gemsc = pytest.fixture(gemsc_here)
BATCHES = [batch_of((X, X), 2), *([batch_of((X * 2, X), 2)] * 2)]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def forward(self: Any, x: Tensor) -> Tensor:
    return self.d(torch.tanh(self.c(self.norm(self.b(torch.tanh(self.a(x)))))))


def net() -> Net:
    return Net(forward, norm=nn.BatchNorm1d(4))


def grouped(named: Any) -> torch.optim.Optimizer:
    """Return an optimizer of two groups, with their own learning rates."""
    named = dict(named)
    biases = {name: p for name, p in named.items() if name.endswith("bias")}
    weights = [p for name, p in named.items() if name not in biases]
    groups = [{"params": weights, "lr": 0.03}, {"params": [*biases.values()]}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.01)


def trained(program: Path, ranks: int, batches: Any, **how: Any) -> dict[str, Tensor]:
    """Resume if that is asked, train, save, and return the model."""

    def work(trainer: Trainer) -> dict[str, Tensor]:
        if "resume" in how:
            trainer.resume(how["resume"])
        for batch in batches:
            trainer.step(*batch)
        if "save" in how:
            trainer.save(how["save"])
        return {name: tensor.clone() for name, tensor in trainer.state_dict().items()}

    parts = on_ranks(program, ranks, work, optimizer=grouped, dtype=torch.float64)
    return {name: tensor for part in parts for name, tensor in part.items()}


def in_torch(model: nn.Module, optimizer: Any, batches: Any) -> dict[str, Tensor]:
    """Train in one process, with micro-batches of two samples."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        for x, target in zip(inputs.split(2), targets.split(2), strict=True):
            (mse(model(x.double()), target.double()) / 2).backward()
        optimizer.step()
    return model.state_dict()


def off(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[k].double() - other[k]).abs().max()) for k in other)


LAYOUTS: dict[str, dict[str, Any]] = {
    "stages": {"ranks": 2},
    "a mirrored pair with rows": {
        **{"ranks": 2, "schedule": "mast", "shard": "optimizer"},
    },
}


def compiled(folder: Path, **layout: Any) -> Path:
    layout = {"ranks": 1, **layout}
    written(folder, net(), micro_batches=2, optimizer=grouped, **layout)
    return folder


@pytest.mark.slow(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_torch_goes_on_from_what_was_exported_and_we_from_what_torch_saves(
    name: str, tmp_path: Path, gemsc: Gemsc
) -> None:
    program = compiled(tmp_path / "program", **LAYOUTS[name])
    trained(program, 2, BATCHES[:2], save=tmp_path / "run")
    done = gemsc("export", tmp_path / "run", "-o", tmp_path / "out.dcp")
    assert done.code == 0, done.err
    assert "optimizer's state is in it" in done.err + done.out
    # as torchtitan and FSDP load it
    model = net().double()
    optimizer = grouped(model.named_parameters())
    state, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({**state, "optimizer": of_optimizer}, checkpoint_id=tmp_path / "out.dcp")
    set_state_dict(
        model, optimizer, model_state_dict=state, optim_state_dict=of_optimizer
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.03, 0.01]
    actual = in_torch(model, optimizer, BATCHES[2:])
    expected = trained(program, 2, BATCHES[2:], resume=tmp_path / "run")
    assert off(expected, actual) < 1e-9
    # and back, into another layout; with the state of the optimizer, or without
    model, of_optimizer = get_state_dict(model, optimizer)
    saved = {"app": {"model": model, "optim": of_optimizer}, "step": 3}
    dcp.save(saved, checkpoint_id=tmp_path / "back")
    other = compiled(tmp_path / "other", ranks=2)
    more = trained(other, 2, BATCHES[:1], resume=tmp_path / "back")
    again = net().double()
    optimizer = grouped(again.named_parameters())
    set_state_dict(
        again, optimizer, model_state_dict=model, optim_state_dict=of_optimizer
    )
    assert off(more, in_torch(again, optimizer, BATCHES[:1])) < 1e-9
    dcp.save({"model": model}, checkpoint_id=tmp_path / "alone")
    fresh = trained(other, 2, BATCHES[:1], resume=tmp_path / "alone")
    assert off(fresh, more) > 1e-6


@pytest.mark.slow
def test_flattened_states_of_torchtitan_are_found(tmp_path: Path) -> None:
    model = net().double()
    optimizer = grouped(model.named_parameters())
    in_torch(model, optimizer, BATCHES)
    state, of_optimizer = get_state_dict(
        model,
        optimizer,
        options=dcp.state_dict.StateDictOptions(flatten_optimizer_state_dict=True),
    )
    other = {"train_state": {"step": torch.tensor(3)}, "lr_scheduler": {"last": 3}}
    dcp.save(
        {**state, "optimizer": of_optimizer, **other},
        checkpoint_id=tmp_path / "step-100000",
    )
    program = compiled(tmp_path / "program", ranks=2)
    more = trained(program, 2, BATCHES[:1], resume=tmp_path / "step-100000")
    assert off(more, in_torch(model, optimizer, BATCHES[:1])) < 1e-9


def test_tensors_beside_a_model_are_none_of_it(tmp_path: Path) -> None:
    adam = {"exp_avg": torch.zeros(()), "step": torch.tensor(3.0)}
    optimizer = {"state": {"scale": adam}, "model": {"other": torch.ones(2)}}
    model = {"weight": torch.ones(2), "scale": torch.ones(())}
    state = {"model": model, "optimizer": optimizer, "tokens": torch.tensor(5)}
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    checkpoint = DistributedCheckpoint(tmp_path / "x")
    assert checkpoint.table.keys() == model.keys()
    assert checkpoint.is_like_its_parameter("exp_avg", "scale")
    assert not checkpoint.is_like_its_parameter("step", "scale")


@pytest.mark.slow
def test_a_model_takes_its_weights_from_there(tmp_path: Path, gemsc: Gemsc) -> None:
    with torch.no_grad():
        expected = {k: v + 1 for k, v in net().state_dict().items()}
    dcp.save({"state_dict": expected, "epoch": 3}, checkpoint_id=tmp_path / "saved")
    model = net()
    load_weights(model, tmp_path / "saved")
    assert off(model.state_dict(), expected) == 0
    program = compiled(tmp_path / "program", ranks=2)
    done = gemsc("import", program, tmp_path / "saved")
    assert done.code == 0, done.err
    assert off(trained(program, 2, []), expected) == 0


@pytest.mark.slow
def test_names_that_do_not_fit_are_told(tmp_path: Path) -> None:
    program = compiled(tmp_path / "program", ranks=2)
    state = net().state_dict()
    by_number = {"state": {0: {"exp_avg": torch.zeros(4, 4)}}}
    refused: dict[str, Any] = {
        r"a state of the optimizer, and no weight '0'": {
            **{"model": state, "optimizer": by_number},
        },
        r"has no 'd\.": {k: v for k, v in state.items() if not k.startswith("d.")},
        r"has shape \[3, 4\], but the program needs \[4, 4\]": {
            **{**state, "a.weight": torch.zeros(3, 4)},
        },
        r"the state of the optimizer does not fit AdamW: KeyError '": {
            **state,
            "optimizer": {"state": {"a.bias": {"momentum": torch.ones(4)}}},
        },
        r"holds no weights": {"epoch": 3},
    }
    for number, (message, saved) in enumerate(refused.items()):
        folder = tmp_path / str(number)
        dcp.save(saved, checkpoint_id=folder)
        with pytest.raises(GemscError, match=message):
            trained(program, 2, [], resume=folder)


class Attack:
    def __reduce__(self) -> Any:
        return os.mkdir, ("attacked",)


def test_nothing_that_is_read_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = net().state_dict()
    dcp.save(state, checkpoint_id="saved")
    whole = Path("saved/.metadata").read_bytes()
    Path("saved/.metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(GemscError, match=r"names posix.mkdir, which no checkpoint"):
        load_weights(net(), "saved")
    for part in (b"", whole[:100], whole[:-20]):
        Path("saved/.metadata").write_bytes(part)
        with pytest.raises(GemscError, match="saved is damaged"):
            load_weights(net(), "saved")
    Path("saved/.metadata").write_bytes(whole)
    file = max(Path("saved").glob("*.distcp"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(GemscError, match="saved is damaged"):
        load_weights(net(), "saved")
    step = {"model": state, "optim": {"state": {"a.bias": {"step": Attack()}}}}
    dcp.save(step, checkpoint_id="objects")
    with pytest.raises(
        GemscError, match="objects is damaged: Weights only load failed"
    ):
        trained(compiled(tmp_path / "program", ranks=2), 2, [], resume=Path("objects"))
    assert not Path("attacked").exists()


def test_the_tensors_of_one_file_are_in_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "FILE_BYTES", 2 * 64 * 64 * 4)
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def read(number: int) -> Tensor:
        nonlocal most
        tensor = torch.full((64, 64), float(number))
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    entry = Entry(torch.float32, (64, 64))
    state = {
        f"{n}": Lazy(entry, lambda n=n: read(n))  # type: ignore[misc]
        for n in range(20)
    }
    write_distributed(tmp_path / "saved", {"inside": state, "model": state})
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 20
    assert most <= 3  # the last one of a file, perhaps, until there is another
    checkpoint = DistributedCheckpoint(tmp_path / "saved")
    assert [*checkpoint.table] == [*state]
    assert all(bool(checkpoint.read(f"{n}").eq(n).all()) for n in range(20))


@pytest.mark.slow
def test_what_is_there_is_overwritten_only_if_it_is_such_a_folder(
    tmp_path: Path, gemsc: Gemsc
) -> None:
    program = compiled(tmp_path / "program", ranks=2)
    (tmp_path / "own.dcp").mkdir()
    (tmp_path / "own.dcp" / "notes").touch()
    done = gemsc("export", program, "-o", tmp_path / "own.dcp")
    assert done.code == 1
    assert "own.dcp exists and is not a checkpoint of torch.distributed" in done.err
    for _ in range(2):
        done = gemsc("export", program, "-o", tmp_path / "new.dcp")
        assert done.code == 0, done.err
    model = net().state_dict()
    dcp.load(model, checkpoint_id=tmp_path / "new.dcp")
    assert off(model, net().state_dict()) == 0
    assert {path.name for path in tmp_path.glob("*.dcp")} == {"own.dcp", "new.dcp"}
    (tmp_path / "file").touch()
    done = gemsc("export", program, "-o", tmp_path / "file" / "new.dcp")
    assert done.code == 1
    assert "cannot be written" in done.err
    assert not [*tmp_path.glob(".*")]


# ------------------------------------------------------------- FSDP's own processes

MODEL = """\
import torch
from torch import nn


def make():
    torch.manual_seed(0)
    layers = nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)
    return nn.Sequential(*layers).double()


loss = nn.MSELoss()
draw = torch.Generator().manual_seed(1)
BATCHES = [
    tuple(torch.randn(4, n, generator=draw, dtype=torch.float64) for n in (6, 1))
    for _ in range(3)
]


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)
"""

FSDP = """\
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from fsdp_model import BATCHES, adam, loss, make

dist.init_process_group("gloo")
mesh = torch.distributed.init_device_mesh("cpu", (2,))
model = make()
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = adam(model.parameters())


def train(batches):
    for x, target in batches:
        optimizer.zero_grad()
        loss(model(x), target).backward()
        optimizer.step()


if sys.argv[1] == "begin":
    train(BATCHES[:2])
    state, states = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": states}, checkpoint_id="fsdp")
else:
    state, states = get_state_dict(model, optimizer)
    dcp.load({**state, "optimizer": states}, checkpoint_id="exported.dcp")
    set_state_dict(
        model, optimizer, model_state_dict=state, optim_state_dict=states
    )
train(BATCHES[2:])
end = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
if dist.get_rank() == 0:
    torch.save(end, f"{sys.argv[1]}.pt")
dist.destroy_process_group()
"""


def fsdp(phase: str) -> dict[str, Tensor]:
    """Train the rest with FSDP on two processes; return the model's weights."""
    words = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    done = subprocess.run(
        [sys.executable, *words, "fsdp.py", phase],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    weights: dict[str, Tensor] = torch.load(f"{phase}.pt")
    return weights


@pytest.mark.slow
@pytest.mark.mpi
def test_fsdp_comes_and_goes(
    tmp_path: Path, gemsc: Gemsc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pieces are rows, uneven ones; ours are stages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("fsdp_model.py").write_text(MODEL)
    Path("fsdp.py").write_text(FSDP)
    import fsdp_model

    (x, target), options = fsdp_model.BATCHES[0], {"optimizer": fsdp_model.adam}
    written(
        Path("program"),
        fsdp_model.make(),
        (x[:2],),
        fsdp_model.loss,
        target[:2],
        **{"ranks": 2, "micro_batches": 2, **options},
    )

    def work(trainer: Trainer) -> dict[str, Tensor]:
        trainer.resume(Path("fsdp"))
        trainer.save(Path("run"))
        trainer.step(*fsdp_model.BATCHES[2])
        return {name: tensor.clone() for name, tensor in trainer.state_dict().items()}

    begun = fsdp("begin")
    parts = on_ranks(Path("program"), 2, work, dtype=torch.float64, **options)
    ours = {name: tensor for part in parts for name, tensor in part.items()}
    assert off(ours, begun) < 1e-12
    done = gemsc("export", "run", "--to", "exported.dcp")
    assert done.code == 0, done.err
    assert off(fsdp("end"), ours) < 1e-12
