"""Several processes on one device, simulated: `gemsc simulate --per-device 4`."""

from __future__ import annotations

from rich.console import Console

from gemsc.base.units import show_seconds
from gemsc.costs.sharing import SharedDevice
from gemsc.simulate.simulation import powers_of_two
from gemsc.viz.columns import column, fitted

ASSUMPTIONS = (
    "every process has a CPU core of its own; kernels of several processes overlap "
    "without loss, as MPS lets them",
    "a kernel of f operations takes as long as f + half_flops would on a full device",
    "a step takes the longer of launching its kernels and running them",
    "neither the update nor reading the data is counted; with sums by the host, each "
    "process copies its gradients there and the sum back, once a step, one after the "
    "other",
)


def show_sharing(
    found: SharedDevice, samples: int, most: int, console: Console
) -> None:
    """Print 1, 2, 4, ... up to `most` processes with a batch of so many samples."""
    counts = powers_of_two(most)
    columns = (
        column("processes", counts),
        column("step", map(found.seconds, counts), show_seconds),
        column("samples/s", (k * samples / found.seconds(k) for k in counts), _rate),
        column("device used", map(found.utilisation, counts), "{:.0%}".format),
        column("gain", map(found.gain, counts), "{:+.0%}".format),
        column(
            "with sums by the host",
            (found.gain(k, sums=True) for k in counts),
            "{:+.0%}".format,
        ),
        column(
            "one process, larger batch",
            map(found.gain_of_batch, counts),
            "{:+.0%}".format,
        ),
    )
    title = f"processes that share a device, a step of {samples} samples each"
    console.print(fitted(title, columns, console.width))
    for text in ASSUMPTIONS:
        console.print(f"- {text}", highlight=False)


def _rate(samples: float) -> str:
    return f"{samples:,.1f}"
