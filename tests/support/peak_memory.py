"""How far some steps raise the peak memory of a process, in bytes, as JSON.

    python peak_memory.py FOLDER LAYERS WIDTH real meta rank ...

Each step is measured in turn: a small compilation comes first, which loads all code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import gemsc
from gemsc.base.parts import Part
from gemsc.runtime.training.program_directory import load_program
from gemsc.runtime.worker.stages import Stages
from gemsc.verify import step_size
from gemsc.weights.first import FirstWeights

SMALL = 8


class Net(nn.Module):
    """Linear layers, all alike."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


VGG_16 = (64, 64, 0, 128, 128, 0, *(256, 256, 256, 0), *(512, 512, 512, 0) * 2)


class Vgg16(nn.Module):
    """VGG-16: 528 MiB of weights, 392 MiB of them in one layer."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for channels in VGG_16:
            if not channels:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(True)]
            before = channels
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            *(nn.Linear(512 * 7 * 7, 4096), nn.ReLU(True), nn.Dropout()),
            *(nn.Linear(4096, 4096), nn.ReLU(True), nn.Dropout()),
            nn.Linear(4096, 1000),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.features(x).flatten(1))
        return out


def write_shards(folder: Path, layers: int, width: int) -> None:
    """Write the weights of a net, one layer in memory."""
    places = {}
    folder.mkdir(parents=True)
    for layer in range(layers):
        file, name = f"model-{layer:05d}.safetensors", f"layers.{layer}"
        weight = torch.randn(width, width) / width**0.5
        tensors = {f"{name}.weight": weight, f"{name}.bias": torch.zeros(width)}
        save_file(tensors, folder / file)
        places |= dict.fromkeys(tensors, file)
    index = {"weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def on_meta(folder: Path, layers: int, width: int) -> nn.Module:
    """Return a net on the meta device, with the weights of its shards."""
    with torch.device("meta"):
        model = Net(layers, width)
    gemsc.load_weights(model, folder / "shards")
    return model


def compile(
    make: Callable[[], nn.Module], folder: Path, x: Tensor, check: bool
) -> None:
    """Compile and write a program of two ranks."""
    model = make()
    target = torch.zeros_like(model(x)) if x.dim() == 2 else torch.zeros(1).long()
    loss = nn.MSELoss() if x.dim() == 2 else nn.CrossEntropyLoss()
    gemsc.compile(
        model,
        (x,),
        loss=loss,
        example_target=target,
        ranks=2,
        micro_batches=2,
        check=check,
    ).write(folder / f"program-{len(list(folder.iterdir()))}")


def start_rank(folder: Path) -> None:
    """Build and fill the stage of rank 0, as a rank does when it starts."""
    program = sorted(folder.glob("program-*"))[-1]
    rank = load_program(program, 0)
    first = FirstWeights(program / "weights")
    for run, kind in rank.stages.items():
        read = partial(_read, first, rank.parts, run.stage)
        Stages().add(run, kind, read, torch.device("cpu"), None)


def compile_with_little_memory(
    model: Callable[[], nn.Module], folder: Path, x: Tensor
) -> None:
    """Compile with the check, but for the step, which takes more than there is."""
    with patch.object(step_size, "free_memory", lambda: 0):
        compile(model, folder, x, True)


def _read(
    first: FirstWeights, parts: Mapping[str, Part], stage: int, name: str
) -> Tensor:
    return first.read(stage, name, parts.get(name))


def growth(step: Callable[[], None]) -> int:
    """Return by how much a step raises the peak."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = peak()
    step()
    return peak() - before


def peak() -> int:
    """Return the largest resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line[:5] == "VmHWM") * 1024


def main(folder: Path, layers: int, width: int, steps: list[str]) -> None:
    """Print what each step takes."""
    x = torch.zeros(2, width)
    image = torch.zeros(1, 3, 224, 224)
    real, meta = partial(Net, layers, width), partial(on_meta, folder, layers, width)
    known: dict[str, Callable[[], None]] = {
        "real": partial(compile, real, folder, x, True),
        "real, no check": partial(compile, real, folder, x, False),
        "meta": partial(compile, meta, folder, x, True),
        "meta, no check": partial(compile, meta, folder, x, False),
        "VGG-16": partial(compile, Vgg16, folder, image, True),
        "VGG-16, no step": partial(compile_with_little_memory, Vgg16, folder, image),
        "VGG-16, no check": partial(compile, Vgg16, folder, image, False),
        "rank": partial(start_rank, folder),
    }
    if steps != ["rank"]:
        compile(partial(Net, 2, SMALL), folder, torch.zeros(2, SMALL), True)
        start_rank(folder)
    print(json.dumps({step: growth(known[step]) for step in steps}))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
