"""Jobs of two replicas on streams of several packages: parts, resuming, verify."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from command_line import start

pytestmark = pytest.mark.mpi

NET = """\
import random
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import gemsc


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def model():
    return Net()


def example_inputs():
    return (torch.randn(2, 8),)


loss = nn.CrossEntropyLoss()


def optimizer(params):
    return torch.optim.Adam(params, lr=0.01)


class Held(IterableDataset):
    def __iter__(self):
        for number in range(13):
            yield torch.randn(8), number % 4


def eval_dataset():
    return Held()


def metrics(output, target):
    return {"accuracy": (output.argmax(1) == target).float().mean()}
"""

PLAIN = """

class Shards(IterableDataset):  # in two parts of at least 20 samples
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        part, count = (info.id, info.num_workers) if info else (0, 1)
        order = [*enumerate([10, 13, 10, 12])]
        random.Random(self.epoch).shuffle(order)
        for shard, size in order[part::count]:
            for number in range(size):
                yield torch.randn(8) + shard, number % 4


def dataset():
    return Shards()
"""

HUGGING_FACE = """

import datasets


def pair(item):
    return torch.randn(8) + item["number"] / 10, item["number"] % 4


def dataset():
    table = datasets.Dataset.from_dict({"number": list(range(44))})
    stream = table.to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=3)
    return gemsc.Stream(stream, pair=pair)
"""

LOADER = """

from torchdata.stateful_dataloader import StatefulDataLoader


class Numbers(Dataset):
    def __len__(self):
        return 45

    def __getitem__(self, index):
        return torch.full((8,), index / 10), index % 4


def dataset():
    return StatefulDataLoader(Numbers(), batch_size=5, num_workers=1, shuffle=True)
"""

TARS = """

import webdataset


def dataset():
    shards = sorted(map(str, (Path(__file__).parent / "shards").glob("*.tar")))
    stream = webdataset.WebDataset(shards, shardshuffle=4, detshuffle=True, seed=0)
    pairs = stream.compose(webdataset.detshuffle(5)).decode().to_tuple("npy", "cls")
    return pairs.map(lambda pair: (torch.from_numpy(pair[0]), pair[1]))
"""

# for each: the package, and what is said when such a run goes on
SOURCES = {
    "plain": (PLAIN, None, "it has no state_dict()"),
    "hugging face": (HUGGING_FACE, "datasets", "its state_dict() does not bring it"),
    "loader": (LOADER, "torchdata", ""),
    "tars": (TARS, "webdataset", "it has no state_dict()"),
}


def make_shards(folder: Path) -> None:
    """Write four tar files of 11 samples, an array and its class."""
    folder.mkdir()
    for shard in range(4):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(11 * shard, 11 * shard + 11):
                array = io.BytesIO()
                np.save(array, np.full(8, number / 10, dtype=np.float32))
                parts = {"npy": array.getvalue(), "cls": str(number % 4).encode()}
                for kind, data in parts.items():
                    info = tarfile.TarInfo(f"{number:04d}.{kind}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("kind", SOURCES)
def test_a_job_on_a_stream(kind: str, tmp_path: Path) -> None:
    text, package, said = SOURCES[kind]
    if package is not None:
        pytest.importorskip(package)
    path, program, whole = (tmp_path / name for name in ("net.py", "program", "whole"))
    path.write_text(NET + text)
    make_shards(tmp_path / "shards")
    home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    compiled = start(
        *("compile", path, "--ranks", 4, "--data", 2, "--micro-batches", 2),
        *("-o", program),
        **home,
    )
    assert compiled.code == 0, compiled
    words = "--epochs", 2, "--checkpoint-every", 1, "--keep", 99
    outcome = start("run", program, *words, "--save", whole, **home)
    assert outcome.code == 0, outcome
    assert ("replicas reads all of it" in outcome.out) == (kind == "loader")
    steps = len([*whole.glob("step-*")])
    assert steps == 10  # of 44 samples, or some more, and 8 in each
    checkpoint, rest = whole / "step-000008", tmp_path / "rest"
    words = "--epochs", 2, "--resume", checkpoint
    outcome = start("run", program, *words, "--save", rest, **home)
    assert outcome.code == 0, outcome
    assert "warning" not in outcome.out + outcome.err
    assert said in outcome.out
    assert bool(said) == ("were read again, and dropped" in outcome.out)
    one, other = (each / "model.safetensors" for each in (whole, rest))
    assert one.read_bytes() == other.read_bytes()
    words = "--dtype", "float64", "--run", 7
    outcome = start("verify", program, *words, **home)
    assert outcome.code == 0, outcome
    assert "float64: 7 steps, 2 evaluations, worst" in outcome.out
