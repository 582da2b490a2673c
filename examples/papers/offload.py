"""What offloading all activations costs: the poster's networks on a V100 over PCIe 3.0.

    pip install torchvision
    python examples/papers/offload.py 32

Predicted seconds of a training step and its peak memory, without offloading and with
every block offloaded, for a batch of 32 pictures; and 20 epochs of 244 pictures, which
Hymenoptera has. The GPU is that of v100-lassen.toml, but its host is behind PCIe: 12
of the 15.8 GB/s of 16 lanes, which is assumed, as the batch is.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torchvision import models

import gemsc

LASSEN = Path(__file__).with_name("v100-lassen.toml").read_text()
PICTURES = 20 * 244
SIZES = {"vgg19": 224, "alexnet": 224, "resnet50": 224, "inception_v3": 299}


def loss(output, target):
    """Return the cross entropy of the first output: Inception has a second one."""
    return F.cross_entropy(output[0] if isinstance(output, tuple) else output, target)


def main(batch: int) -> None:
    """Print a line for each network."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(LASSEN.replace("host_bandwidth = 75e9", "host_bandwidth = 12e9"))
        file.flush()
        for name, size in SIZES.items():
            net = getattr(models, name)(weights=None, num_classes=2)
            count = sum(parameter.numel() for parameter in net.parameters())
            plans, blocks = [], ()
            for _ in range(2):
                program = gemsc.compile(
                    net,
                    (torch.zeros(batch, 3, size, size),),
                    loss=loss,
                    example_target=torch.zeros(batch, dtype=torch.long),
                    ranks=1,
                    micro_batches=1,
                    check=False,
                    hardware=file.name,
                    offload=blocks,
                )
                plans.append(program.plan)
                blocks = tuple(plans[0].stages[0].blocks)
            steps = [plan.step_seconds for plan in plans]
            peaks = [plan.peak_bytes[0] / 2**20 for plan in plans]
            epochs = [seconds * PICTURES / batch for seconds in steps]
            print(
                f"{name:<13}{count:>12,} parameters  {steps[1] / steps[0]:.2f}x, "
                f"{epochs[0]:.1f} s -> {epochs[1]:.1f} s, "
                f"{peaks[0]:.0f} MiB -> {peaks[1]:.0f} MiB"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]))
