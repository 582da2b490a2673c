"""What `gemsc profile` does: measure this machine, write a hardware file."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from gemsc.base.plain_forward import with_threads
from gemsc.calibrate.kernels import QUICK, Effort, calibrate, rounded
from gemsc.calibrate.network import measured_network
from gemsc.costs.hardware import Hardware, read_hardware
from gemsc.costs.profile import Progress, clock_of
from gemsc.errors import GemscError
from gemsc.launch.launch import launch
from gemsc.runtime.memory.offload import store_for
from gemsc.runtime.transport.streams import streams_for

HOST_BYTES = 2**26  # more than caches hold


def check_output(path: Path) -> None:
    """Refuse a name that no hardware file can have, before anything is measured.

    Raises:
        GemscError: it does not end in .toml, or its folder cannot be.
    """
    if path.suffix != ".toml":
        raise GemscError(
            f"cannot write {path}", help="give -o a name that ends in .toml"
        )
    if path.is_dir() or (path.parent.exists() and not path.parent.is_dir()):
        raise GemscError(f"cannot write {path}", help="give -o the name of a file")


def calibrate_machine(
    output: Path,
    hardware: str,
    threads: int,
    *,
    kind: str = "cpu",
    quick: bool = False,
    progress: Progress = lambda name, share: None,
) -> Hardware:
    """Measure a device; the network stays that of `hardware`, or of `output`.

    `kind` is "cpu" or "cuda", `threads` the number of a CPU's.
    """
    base = base_of(output, hardware)
    with with_threads(threads):
        effort = QUICK if quick else Effort()
        device = calibrate(effort, device=kind, progress=progress)
        progress("host", 0.99)
        device = replace(
            device,
            host_bandwidth=_host_bandwidth(kind),
            sharing=base.device.sharing,
        )
    measured = Hardware(
        name=device.name,
        source=f"gemsc profile --calibrate, {date.today()}, torch {torch.__version__}",
        notes=[
            f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
            f"{threads} for each rank",
            "the network is not measured: `gemsc profile --network` does that",
        ],
        device=device,
        network=base.network,
    )
    measured.write(output)
    return measured


def _host_bandwidth(kind: str) -> float:
    """Return the bytes per second, one way, to where offloaded activations wait."""
    store = store_for(streams_for(torch.device(kind)))
    data = torch.zeros(HOST_BYTES, dtype=torch.uint8, device=kind)
    clock = clock_of(kind)
    times = []
    for _ in range(5):
        started = clock()
        kept = store.put(data)
        kept.fetch().take()
        times.append(clock() - started)
        kept.free()
    return rounded(2 * HOST_BYTES / min(times))


def measure_on_ranks(ranks: int) -> dict[str, Any]:
    """Start ranks on this machine and return what they measure.

    Raises:
        GemscError: mpirun is missing, or a rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="gemsc-network-") as name:
        path = Path(name) / "network.json"
        words = [sys.executable, "-m", "gemsc.calibrate.network", str(path)]
        code = launch(ranks, words)
        if code != 0:
            raise GemscError(
                f"the ranks ended with exit code {code}", help="see the report above"
            )
        report: dict[str, Any] = json.loads(path.read_text())
    return report


def write_network(report: dict[str, Any], output: Path, hardware: str) -> Hardware:
    """Put measured links into `output`; the rest is that of `hardware` or `output`."""
    base = base_of(output, hardware)
    nodes = "one node" if report["nodes"] == 1 else f"{report['nodes']} nodes"
    note = (
        f"network: gemsc profile --network, {date.today()}, {report['ranks']} ranks on "
        f"{nodes}"
    )
    notes = [text for text in base.notes if "network" not in text]
    network = measured_network(report, base.network)
    written = replace(base, network=network, notes=[*notes, note])
    written.write(output)
    return written


def write_sharing(
    base: Hardware, name: str, rates: dict[int, float], output: Path
) -> None:
    """Put samples a second of processes that share a device into a hardware file."""
    rounded_rates = {str(count): rounded(rate) for count, rate in rates.items()}
    sharing = {**base.device.sharing, name: rounded_rates}
    note = f"sharing of {name}: gemsc profile --per-device, {date.today()}"
    notes = [text for text in base.notes if f"sharing of {name}:" not in text]
    device = replace(base.device, sharing=sharing)
    replace(base, device=device, notes=[*notes, note]).write(output)


def base_of(output: Path, hardware: str) -> Hardware:
    """Return what the figures that are not measured come from."""
    if not hardware and output.is_file():
        return read_hardware(str(output))
    return read_hardware(hardware)
