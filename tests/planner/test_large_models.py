"""Models that are large for the memory there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import GEMSC
from peak_memory import write_shards

SUPPORT = Path(__file__).parents[1] / "support"
CGROUP = Path("/sys/fs/cgroup/memory")  # of version 1: a limit for one process
GIB = 2**30

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak is Linux's"
)


def growths(folder: Path, layers: int, width: int, *steps: str) -> dict[str, int]:
    """Return by how many bytes each step raises the peak of a process."""
    done = subprocess.run(
        [
            *(sys.executable, SUPPORT / "peak_memory.py"),
            *(folder, str(layers), str(width), *steps),
        ],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},
    )
    growth: dict[str, int] = json.loads(done.stdout)
    return growth


@pytest.mark.nightly
def test_compiling_takes_little_more_than_the_weights(tmp_path: Path) -> None:
    layers, width = 10, 1024
    layer = 4 * width * (width + 1)
    write_shards(tmp_path / "shards", layers, width)
    steps = "real, no check", "real", "meta, no check", "meta", "rank"
    growth = growths(tmp_path, layers, width, *steps)
    weights = layers * layer
    assert growth["real, no check"] < 1.3 * weights
    assert growth["meta, no check"] < 2 * weights
    # a first step runs: eight copies in float64, as step_size.too_much counts
    assert max(growth["real"], growth["meta"]) < 1.1 * 16 * weights
    assert growth["rank"] < weights / 2 + 3 * layer


@pytest.mark.nightly
def test_vgg_16_takes_twice_its_weights(tmp_path: Path) -> None:
    names = "VGG-16, no check", "VGG-16, no step", "VGG-16"
    growth = growths(tmp_path, 2, 8, *names)
    weights = 4 * 138_357_544
    print({name: size / weights for name, size in growth.items()})  # noqa: T201
    assert growth["VGG-16, no check"] <= 1.1 * weights
    assert growth["VGG-16, no step"] <= 2.0 * weights
    assert growth["VGG-16"] <= 1.1 * 16 * weights  # where half of the memory is more


MODEL = """
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, {tests!r})
from peak_memory import Net, peak


def model():
    with torch.device("meta"):
        return Net({layers}, {width})


weights = "shards"
loss = nn.MSELoss()


def example_inputs():
    return (torch.randn(1, {width}),)


def dataset():
    return [(torch.randn({width}), torch.randn({width})) for _ in range(4)]


def on_step(trainer, report):
    Path(f"peak{{trainer.transport.rank}}").write_text(str(peak()))
"""


@pytest.fixture
def limit() -> Iterator[Path]:
    """Return a group of processes that may have 1 GiB together, file cache included."""
    group = CGROUP / f"gemsc-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(GIB))
    except OSError as error:
        pytest.skip(f"no limit of memory can be set here: {error}")
    yield group
    group.rmdir()


@pytest.mark.nightly
def test_two_gibibytes_compile_and_train(tmp_path: Path, limit: Path) -> None:
    layers, width = 32, 4096
    write_shards(tmp_path / "shards", layers, width)
    text = MODEL.format(layers=layers, width=width, tests=str(SUPPORT))
    (tmp_path / "model.py").write_text(text)
    compile = f"{GEMSC} compile model.py --ranks 4 --micro-batches 4 -o out"
    for command in (
        f"echo $$ > {limit}/cgroup.procs; exec {compile}",
        f"{GEMSC} run out --epochs 1",
    ):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | {"TMPDIR": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr
    peaks = [int((tmp_path / f"peak{rank}").read_text()) for rank in range(4)]
    print(peaks)  # noqa: T201
    assert max(peaks) < 3 * GIB


UNFILLED = """
import torch
from torch import nn


def model():
    with torch.device({device!r}):
        return nn.Sequential(*(nn.Linear({width}, {width}) for _ in range({layers})))


loss = nn.MSELoss()


def example_inputs():
    return (torch.randn(2, {width}),)


def example_target():
    return torch.randn(2, {width})
"""


MEASURED = """
import re, sys
from pathlib import Path
from gemsc.cli.command import main
try:
    main()
finally:  # not what getrusage says, which may be that of the process before exec
    status = Path("/proc/self/status").read_text()
    print(re.search(r"VmHWM:\\s+(\\d+)", status)[1], file=sys.stderr)
"""


def planned(folder: Path, device: str, layers: int, width: int) -> tuple[object, int]:
    """Return what is compared for a model on a device, and the peak in bytes."""
    (folder / f"{device}.py").write_text(
        UNFILLED.format(device=device, layers=layers, width=width)
    )
    words = ["plan", f"{device}.py", "--ranks", "2", "--shards", "off", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *words],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["candidates"], 1024 * int(done.stderr.split()[-1])


@pytest.mark.slow
def test_a_plan_needs_no_weights(tmp_path: Path) -> None:
    """On the meta device it is the plan of the model with weights, in no memory."""
    layers, width = 8, 4096
    real, meta = (planned(tmp_path, where, layers, width) for where in ("cpu", "meta"))
    assert real[0] == meta[0]
    assert real[1] - meta[1] > 0.8 * 4 * layers * width**2


LLAMA = Path(__file__).parents[2] / "examples" / "llama.py"
SMALL = {
    **{"LAYERS": 2, "WIDTH": 64, "HEADS": 4, "HIDDEN": 128},
    **{"VOCABULARY": 64, "WORDS": 16},
}


def compiled_llama(folder: Path, *words: str) -> tuple[str, int]:
    """Return what compiling the Llama for eight ranks says, and its peak in bytes."""
    command = "compile", LLAMA, "--hardware", "a100", "--device-memory", "80GiB", *words
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *command, "-o", "out", "--ranks", "8"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr, 1024 * int(done.stderr.split()[-1])


@pytest.mark.slow
def test_a_small_llama_is_compared_with_its_model(tmp_path: Path) -> None:
    constants = [w for k, v in SMALL.items() for w in ("--set", f"{k}={v}")]
    said, _ = compiled_llama(tmp_path, "--micro-batches", "2", *constants)
    assert "was compared" not in said


@pytest.mark.nightly
@pytest.mark.parametrize("shards", [(), ("--shards", "8")], ids=["stages", "shards"])
def test_seven_billion_parameters_compile(
    shards: tuple[str, ...], tmp_path: Path
) -> None:
    said, peak = compiled_llama(tmp_path, "--micro-batches", "8", *shards)
    assert "the model has no weights here" in said
    assert peak < GIB
    assert sum(f.stat().st_size for f in tmp_path.rglob("*")) < 32 * 2**20


@pytest.mark.nightly
def test_a_rank_takes_its_part_and_a_tensor_more(tmp_path: Path) -> None:
    """Of files that its program only names; of a shard, its part of each tensor."""
    layers, width = 12, 1024
    write_shards(tmp_path / "shards", layers, width)
    text = MODEL.format(layers=layers, width=width, tests=str(SUPPORT))
    (tmp_path / "model.py").write_text(text)
    for number, split in enumerate(["1", "2"], 1):
        words = "--ranks", "2", "--shards", split, "--no-check", "-o"
        subprocess.run(
            [GEMSC, "compile", "model.py", *words, f"program-{number}"],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
        held = sum(p.stat().st_size for p in tmp_path.glob("program-*/weights/*"))
        assert held < 2**20
        grown = growths(tmp_path, layers, width, "rank")["rank"]
        layer = 4 * width * (width + 1)
        assert layers / 2 * layer <= grown + layer  # it is there
        assert grown < layers / 2 * layer + 3 * layer
