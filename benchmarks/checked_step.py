"""What it costs to run a step of a program before it is called right.

python benchmarks/checked_step.py [--repeats 3] [--only unet]

Seconds of `gemsc.compile` without the step ("before") and with it ("after"), in turns;
the least of some rounds counts: others who use the machine can only add to it. A step
that is left out says why.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from cases import Case, masked_pictures, pictures
from gpt import Gpt, cross_entropy, words
from resnet import Bottleneck, ResNet
from unet_histology import model as unet

import gemsc
from gemsc import compiler

UNET = Case(unet.model, masked_pictures, unet.loss, 2)
RESNET = Case(
    lambda: ResNet(Bottleneck, [3, 4, 6, 3]), pictures(224), F.cross_entropy, 2
)
GPT = Case(
    lambda: Gpt(768, 12, 12, 50257, 128),
    lambda batch: words(batch, 128, 50257),
    cross_entropy,
    1,
)
LARGE_UNET = Case(
    lambda: unet.UNet(64),
    lambda batch: masked_pictures(batch, 512),
    unet.loss,
    1,
)
LONG_GPT = Case(
    lambda: Gpt(768, 12, 12, 50257, 1024),
    lambda batch: words(batch, 1024, 50257),
    cross_entropy,
    1,
)
SUBJECTS: dict[str, tuple[Case, dict[str, Any]]] = {
    "unet": (UNET, {"ranks": 4}),
    "unet 2x2": (UNET, {"ranks": 4, "tiles": "2x2"}),
    "resnet50": (RESNET, {"ranks": 4}),
    "resnet50, 16": (replace(RESNET, batch=16), {"ranks": 4}),
    "gpt2 small": (GPT, {"ranks": 4}),
    "unet64, 512": (LARGE_UNET, {"ranks": 4}),
    "gpt2, 1024": (LONG_GPT, {"ranks": 4}),
}


def seconds(case: Case, options: dict[str, Any], *, runs: bool) -> tuple[float, str]:
    """Return how long a compilation takes, and why no step was run."""
    model, (inputs, target) = case.build(), case.data(case.batch)
    given = {"loss": case.loss, "example_target": target, "micro_batches": 4}
    real, left_out = compiler.first_step, {"unchecked": "not asked for"}
    step = real if runs else lambda *_, **how: left_out
    smaller = compiler.smaller if runs else lambda *_: ()
    started = time.perf_counter()
    with patch.multiple(compiler, first_step=step, smaller=smaller):
        program = gemsc.compile(model, inputs, **given, **options)
    return time.perf_counter() - started, program.plan.unchecked


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=SUBJECTS, default=None)
    given = parser.parse_args()
    print(f"{'model':12} {'before':>7} {'after':>7}  step")
    for name, (case, options) in SUBJECTS.items():
        if given.only not in (None, name):
            continue
        before, after = [], []
        for _ in range(given.repeats):
            before.append(seconds(case, options, runs=False)[0])
            spent, why = seconds(case, options, runs=True)
            after.append(spent)
        told = why or f"{min(after) - min(before):.1f} s"
        print(f"{name:12} {min(before):6.1f}s {min(after):6.1f}s  {told}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
