"""Who writes what of a checkpoint: all that hold it, in equal shares, and once."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import start
from nightly import at_night
from program_support import batch_of, mse, on_ranks, weights_in, written
from safetensors.torch import load_file
from torch import Tensor, nn

from gemsc.errors import InternalError
from gemsc.runtime.checkpoint import write
from gemsc.runtime.checkpoint.folder import check_checkpoint
from gemsc.runtime.checkpoint.pieces import TensorPiece, make_up
from gemsc.runtime.checkpoint.sharing_out import Item, digest_of, own_rows_of
from gemsc.runtime.training.trainer import Trainer

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
WIDTH = 256  # a row has 1 KiB in float32


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_each_row_is_written_once_and_the_shares_are_even() -> None:
    """By ranks that hold some of the tensors each, whole or in parts."""
    draw = random.Random(0)
    for _ in range(50):
        count = draw.randrange(1, 7)
        pool = []
        for number in range(12):
            shape = tuple(draw.choice([0, 1, 3, 40]) for _ in range(draw.randrange(3)))
            whole, item = TensorPiece.whole(shape), draw.choice([2, 4, 8])
            row = item * whole.count // max(1, whole.sizes[0])
            pool.append(Item(f"{number}", whole, row))
        layouts = [draw.sample(pool, 8) for _ in range(3)]
        held = [draw.choice(layouts) for _ in range(count)]
        digests = [digest_of(items) for items in held]
        tables = dict(zip(digests, held, strict=True))
        pieces: dict[str, list[TensorPiece]] = defaultdict(list)
        bytes_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in range(count):
            rows = own_rows_of(rank, digests, tables)
            assert rows.keys() <= {item.key for item in held[rank]}
            for item in held[rank]:
                if item.key in rows:
                    pieces[item.key].append(item.piece.rows(*rows[item.key]))
            load: dict[tuple[int, ...], int] = defaultdict(int)
            for item in held[rank]:
                group = tuple(r for r in range(count) if item in held[r])
                first, last = rows.get(item.key, (0, 0))
                load[group] += (last - first) * item.row_bytes
            for group, size in load.items():
                bytes_of[group].append(size)
        for item in {item.key: item for items in held for item in items}.values():
            assert make_up(item.piece, pieces[item.key])
            assert pieces[item.key]  # of what is empty, too
        largest = max(item.row_bytes for item in pool)
        for sizes in bytes_of.values():
            assert max(sizes) - min(sizes) <= 2 * largest


class Wide(nn.Module):
    """Two layers of 256 x 256 and their norms, between small ones."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
            self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        norms = (nn.BatchNorm1d(WIDTH) for _ in layers)
        self.blocks = nn.ModuleList(map(nn.Sequential, layers, norms))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=0.01)


def program(folder: Path, **options: Any) -> Path:
    written(folder, Wide(), (X,), mse, X, micro_batches=2, optimizer=adam, **options)
    return folder


def trained(folder: Path, saved: Path, ranks: int, data: int = 1, **how: Any) -> Any:
    """Train two steps and save; return the model."""

    def work(trainer: Trainer) -> dict[str, Tensor]:
        for _ in range(2):
            trainer.step(*batch_of((X, X), 2 * data, len(X)))
        trainer.save(saved, **how)
        trainer.finish_saving()
        return {name: tensor.clone() for name, tensor in trainer.state_dict().items()}

    parts = on_ranks(folder, ranks, work, optimizer=adam)
    return {name: tensor for part in parts for name, tensor in part.items()}


LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"ranks": 4, "data": 4},
    "replicas of stages": {"ranks": 4, "data": 2},
    "a mirrored pair": {"ranks": 2, "schedule": "mast"},
    "replicas with rows of the optimizer": {
        **{"ranks": 2, "data": 2, "shard": "optimizer"},
    },
    "shards in replicas": {"ranks": 4, "data": 2, "shards": ("2",)},
}


@pytest.mark.slow(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_all_that_share_a_tensor_write_and_any_layout_reads(
    name: str, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    folder = program(tmp_path / "program", **layout)
    ranks, data = layout["ranks"], layout.get("data", 1)
    state = trained(folder, tmp_path / "saved", ranks, data)
    checkpoint = check_checkpoint(tmp_path / "saved")
    assert checkpoint.manifest is not None
    sizes = [facts.bytes for facts in checkpoint.manifest.files.values()]
    assert max(sizes) - min(sizes) < 30_000  # of 2 MB: rows, and private states
    whole = sum(tensor.nbytes for tensor in weights_in(tmp_path / "saved").values())
    assert sum(sizes) < 3.1 * whole + 80_000 * ranks  # nothing twice
    assert sum(sizes) > 3 * whole - 20_000
    model = weights_in(tmp_path / "saved")
    if "shards" not in layout:  # else each rank has its part
        assert all(torch.equal(model[name], state[name]) for name in model)
    alone = program(tmp_path / "alone", ranks=1)

    def work(trainer: Trainer) -> Any:
        trainer.resume(tmp_path / "saved")
        trainer.save(tmp_path / "again")

    on_ranks(alone, 1, work, optimizer=adam)
    again = weights_in(tmp_path / "again")
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.items())


@pytest.mark.slow
def test_a_thread_copies_only_what_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    copied = write._Share.copied

    def counted(share: Any) -> Any:
        copy = copied(share)
        copies.append(sum(held.tensor.nbytes for held in copy.tensors.values()))
        assert all(
            held.tensor.untyped_storage().nbytes() <= held.tensor.nbytes
            for held in copy.tensors.values()
        )
        return copy

    monkeypatch.setattr(write._Share, "copied", counted)
    folder = program(tmp_path / "program", ranks=2, data=2)
    state = trained(folder, tmp_path / "saved", 2, 2, background=True)
    model = weights_in(tmp_path / "saved")
    assert all(torch.equal(model[name], state[name]) for name in model)
    whole = 3 * sum(tensor.nbytes for tensor in model.values())
    assert max(copies) < 0.52 * whole + 20_000


@pytest.mark.slow(1)
@pytest.mark.parametrize("wrong", ["nobody", "two", "a row less"])
def test_what_nobody_writes_or_two_is_no_checkpoint(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(rank: int, *args: Any) -> dict[str, tuple[int, int]]:
        rows = own_rows_of(rank, *args)
        for key, (first, last) in sorted(rows.items()):
            if wrong == "two":
                rows[key] = 0, last
            elif wrong == "nobody" and key.startswith("optimizer/"):
                del rows[key]
            elif wrong == "a row less" and last - first > 1 and rank == 1:
                return rows | {key: (first, last - 1)}
        return rows

    folder = program(tmp_path / "program", ranks=2, data=2)
    monkeypatch.setattr(write, "own_rows_of", mistaken)
    with pytest.raises(InternalError, match=r"the ranks did not write '.*' once"):
        trained(folder, tmp_path / "saved", 2, 2)
    assert not (tmp_path / "saved" / "latest").exists()


# ----------------------------------------------------------------- under mpirun

MODEL = """\
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset


def model():
    layers = nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(64, 2))


loss = nn.MSELoss()


def example_inputs():
    return (torch.randn(2, 8),)


def optimizer(params):
    return torch.optim.Adam(params, lr=0.01)


def dataset():
    return TensorDataset(torch.randn(64, 8), torch.randn(64, 2))


def on_step(trainer, report):
    dies = report.step == 5 and trainer.transport.rank == 1
    if dies and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    "layout", [*at_night("--ranks 2 --data 2"), "--ranks 2 --schedule mast"]
)
def test_a_killed_run_goes_on_from_what_all_have_written(
    layout: str, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("model.py").write_text(MODEL)
    words = *layout.split(), "--micro-batches", "2", "-o", "program"
    done = command("compile", "model.py", *words)
    assert done.code == 0, done.err
    models = []
    for name in ("killed", "whole"):
        words = "--steps", "8", "--save", name, "--checkpoint-every", "2"
        done = start("run", "program", *words, "--restarts", "1")
        assert done.code == 0, done.out + done.err
        assert ("restart 1 of 1 from step 4" in done.err) == (name == "killed")
        models.append(load_file(f"{name}/model.safetensors"))
        files = [f"{name}/latest/rank{rank}.safetensors" for rank in range(2)]
        sizes = [os.stat(file).st_size for file in files]
        assert max(sizes) < min(sizes) + 6_000 < 55_000  # 29 kB of tensors each
    one, other = models
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
