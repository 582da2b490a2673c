"""Jobs of two replicas on data of several packages, as a plain loop, and resumed."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command_line import gemsc_here
from nightly import at_night

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
                yield torch.randn(5 + number % 4) + shard, number % 4


pad_value = 0.5


def example_target():
    return torch.zeros(2).long()


def dataset():
    return Shards()
"""

HUGGING_FACE = """

import datasets


def pair(item):
    number = int(item["text"])
    return torch.randn(8) + number / 10, number % 4


def dataset():
    files = sorted(map(str, (Path(__file__).parent / "shards").glob("*.txt")))
    texts = datasets.load_dataset("text", data_files=files, streaming=True)["train"]
    return gemsc.Stream(texts.shuffle(seed=1, buffer_size=3), pair=pair)
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

MONAI = """

from monai.data import CacheDataset, PersistentDataset
from monai.data import Dataset as Plain
from monai.transforms import Compose, MapTransform, RandFlipd, RandGaussianNoised
from torch.utils.data import ConcatDataset


class Make(MapTransform):
    def __init__(self):
        super().__init__(["x"])

    def __call__(self, item):
        return {**item, "x": torch.full((1, 8), item["n"] / 10).cumsum(1)}


class Pairs(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        item = self.data[index]
        return torch.Tensor(item["x"])[0], item["n"] % 4


def dataset():
    random = RandFlipd(["x"], prob=0.5, spatial_axis=0), RandGaussianNoised(["x"], 1.0)
    changed = Compose([Make(), *random])
    items = [{"n": number} for number in range(15)]
    cache = Path(__file__).parent / "cache"
    kinds = [
        Plain(items, changed),
        CacheDataset(items, changed, progress=False),
        PersistentDataset(items, changed, cache),
    ]
    return ConcatDataset([Pairs(each) for each in kinds])
"""

# for each: the package, and what is said when such a run goes on
SOURCES = {
    "plain": (PLAIN, None, "it has no state_dict()"),
    "hugging face": (HUGGING_FACE, "datasets", "its state_dict() does not bring it"),
    "loader": (LOADER, "torchdata", ""),
    "tars": (TARS, "webdataset", "it has no state_dict()"),
    "monai": (MONAI, "monai", ""),
}


def make_shards(folder: Path) -> None:
    """Write four tar files of 11 samples, an array and its class, and four texts."""
    folder.mkdir()
    for shard in range(4):
        lines = (f"{number}\n" for number in range(11 * shard, 11 * shard + 11))
        (folder / f"{shard}.txt").write_text("".join(lines))
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(11 * shard, 11 * shard + 11):
                array = io.BytesIO()
                np.save(array, np.full(8, number / 10, dtype=np.float32))
                parts = {"npy": array.getvalue(), "cls": str(number % 4).encode()}
                for kind, data in parts.items():
                    info = tarfile.TarInfo(f"{number:04d}.{kind}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


Say = Callable[..., str]


@pytest.fixture
def say(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Say:
    """Return a function that runs the command, and returns what it has said."""
    gemsc = gemsc_here(monkeypatch, capfd)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", "home")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*words: object) -> str:
        outcome = gemsc(*words)
        assert outcome.code == 0, outcome
        return outcome.out + outcome.err

    return run


def compiled(kind: str, say: Say) -> str:
    """Write a program of two replicas; return what is said when its run goes on."""
    text, package, said = SOURCES[kind]
    if package is not None:
        pytest.importorskip(package)
    Path("net.py").write_text(NET + text)
    make_shards(Path("shards"))
    words = "--ranks", 2, "--data", 2, "--micro-batches", 2
    say("compile", "net.py", *words, "-o", "program")
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["plain", *at_night("hugging face", "loader", "tars", "monai")]
)
def test_a_run_equals_a_plain_loop(kind: str, say: Say) -> None:
    compiled(kind, say)
    text = say("verify", "program", "--dtype", "float64", "--run", 7)
    assert "float64: 7 steps, 2 evaluations, worst" in text


@pytest.mark.nightly
@pytest.mark.parametrize("kind", SOURCES)
def test_a_run_goes_on_bit_for_bit(kind: str, say: Say) -> None:
    said = compiled(kind, say)
    words = "run", "program", "--epochs", 2
    text = say(*words, "--checkpoint-every", 1, "--keep", 99, "--save", "whole")
    assert ("replicas reads all of it" in text) == (kind == "loader")
    steps = len([*Path("whole").glob("step-*")])
    assert steps == 10  # of 44 samples, or some more, and 8 in each
    text = say(*words, "--resume", "whole/step-000008", "--save", "rest")
    assert "warning" not in text
    assert said in text
    assert bool(said) == ("were read again, and dropped" in text)
    one, other = (Path(run, "model.safetensors") for run in ("whole", "rest"))
    assert one.read_bytes() == other.read_bytes()
