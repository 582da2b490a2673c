"""A block of a transformer whose tokens four ranks share: keys gathered, or in a ring.

python benchmarks/rings.py [--quick] [--tokens 16384] [--width 256] [--heads 4]
                           [--causal] [--dropout 0.1] [--how gather,ring]

A row gives the predicted peak of the fullest rank; what its tensors take at most in a
step of real processes; that of the whole process; and the seconds of a step, with one
thread for each rank, those of the CPU of all of them, and of the busiest one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peak_tensors import PeakTensors
from torch import Tensor, nn

import gemsc
from gemsc.launch.launch import launch
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.choose import start_transport

RANKS, FEATURES = 4, 8


class Block(nn.Module):
    """Attention whose heads stay whole, and an MLP whose features are cut."""

    def __init__(self, width: int, heads: int, causal: bool, p: float) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(FEATURES, width), nn.Linear(width, FEATURES)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.causal, self.p = heads, causal, p

    def forward(self, x: Tensor) -> Tensor:
        """Return as many tokens, each changed by those that it sees."""
        x = self.enter(x)
        heads = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        how = {"is_causal": self.causal, "dropout_p": self.p if self.training else 0.0}
        mixed = F.scaled_dot_product_attention(query, key, value, **how)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return self.leave(x + self.down(F.gelu(self.up(self.norm2(x)))))


def compiled(options: argparse.Namespace, how: str, folder: str) -> int:
    """Write the program; return the predicted peak."""
    torch.manual_seed(0)
    program = gemsc.compile(
        Block(options.width, options.heads, options.causal, options.dropout),
        (torch.randn(1, options.tokens, FEATURES),),
        loss=F.mse_loss,
        example_target=torch.randn(1, options.tokens, FEATURES),
        **{"ranks": RANKS, "shards": str(RANKS), "trunk": "sequence"},
        **{
            "whole": "qkv,out,enter,leave",
            "micro_batches": 1,
            "attention": how,
            "check": False,
        },
    )
    program.write(folder)
    return max(program.plan.peak_bytes)


def measured(folder: str) -> None:
    """Train as one rank does, and write what a step takes."""
    torch.set_num_threads(1)
    transport = start_transport()
    trainer = Trainer(Path(folder), transport)
    shape = json.loads((Path(folder) / "shape.json").read_text())
    torch.manual_seed(1)
    x, target = torch.randn(2, *shape)
    trainer.step((x,), target)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    begin, cpu = time.monotonic(), time.process_time()
    trainer.step((x,), target)
    seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
    status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    report: dict[str, Any] = {"seconds": seconds, "cpu": cpu}
    report["resident"] = int(status.split()[0]) * 1024
    report["tensors"] = _tensors(trainer, shape)
    (Path(folder) / f"report{transport.rank}.json").write_text(json.dumps(report))
    transport.close()


def _tensors(trainer: Trainer, shape: list[int]) -> int:
    x, target = torch.randn(2, *shape)
    worker = trainer.worker
    take = worker.input
    worker.input = lambda name, m: take(name, m).clone()  # type: ignore[method-assign]
    with PeakTensors(held=worker.stages.own_tensors()) as seen:
        trainer.step((x,), target)
    return seen.peak


def row(options: argparse.Namespace, how: str) -> str:
    """Compile, run, and return the figures."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        predicted = compiled(options, how, folder)
        shape = [1, options.tokens, FEATURES]
        (Path(folder) / "shape.json").write_text(json.dumps(shape))
        job = [sys.executable, __file__, "--rank", folder]
        if code := launch(RANKS, job, timeout=options.timeout):
            raise SystemExit(code)
        paths = Path(folder).glob("report*.json")
        reports = [json.loads(path.read_text()) for path in paths]
    most = {name: max(report[name] for report in reports) for name in reports[0]}
    error = 100 * (predicted / most["tensors"] - 1)
    sizes = [size / 2**20 for size in (predicted, most["tensors"], most["resident"])]
    numbers = f"{sizes[0]:>10.1f}{sizes[1]:>10.1f}{error:>+8.2f}%{sizes[2]:>10.0f}"
    cpu = sum(report["cpu"] for report in reports)
    return f"{how:<8}{numbers}{most['seconds']:>9.2f}{cpu:>9.2f}{most['cpu']:>9.2f}"


def main() -> None:
    """Measure both ways, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny: does it run?")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--how", default="gather,ring")
    parser.add_argument("--timeout", type=float, default=1200)
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measured(options.rank)
        return
    if options.quick:
        options.tokens, options.width = 256, 32
    sizes = f"{'MiB':<8}{'predicted':>10}{'tensors':>10}{'error':>9}{'process':>10}"
    print(f"{sizes}{'seconds':>9}{'CPU':>9}{'busiest':>9}")
    for how in options.how.split(","):
        print(row(options, how), flush=True)


if __name__ == "__main__":
    main()
