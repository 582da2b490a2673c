"""How much faster several processes are that share a device, from its utilisation.

A process alone is bound by its host, which launches one kernel after the other, or by
its kernels. Small kernels do not fill a device; those of several processes may run at
once. A step of n operators, launched in `launch` seconds together, with kernels that
take `kernels` seconds one after the other, of which they fill the device for `full`:

    one process               max(launch, kernels)
    k processes               max(launch, kernels, k full)       for k times the samples
    one with k times a batch  max(launch, kernels + (k - 1) full)   for the same samples

It is assumed that every process has a core of its own, that kernels of several
processes overlap without loss, and that filling grows with the samples. What
processes do to sum their gradients is left out of this, and told apart.

What was measured of the same program (`gemsc profile --per-device`) goes before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDevice:
    """The seconds of one step of one process; `full` are at most `kernels`.

    sum_seconds: its gradients out to host memory, and their sum back in, over the link
        that all processes of the device share.
    name: of the program and its step, in hardware files.
    rates: measured samples a second of some numbers of processes, 1 among them; or none
        was measured.
    """

    launch: float
    kernels: float
    full: float
    sum_seconds: float = 0.0
    name: str = ""
    rates: Mapping[int, float] = field(default_factory=dict)

    def seconds(self, processes: int, *, sums: bool = False) -> float:
        """Return a step of each of some processes, with the sum of gradients or not."""
        computing = max(self.launch, self.kernels, processes * self.full)
        is_summed = sums and processes > 1
        return computing + (processes * self.sum_seconds if is_summed else 0.0)

    def gain(self, processes: int, *, sums: bool = False) -> float:
        """Return how many more samples a second they train than one does: 0.6."""
        return processes * self.seconds(1) / self.seconds(processes, sums=sums) - 1

    def gain_of_batch(self, times: int) -> float:
        """Return the same of one process whose batch is so many times as large."""
        longer = max(self.launch, self.kernels + (times - 1) * self.full)
        return times * self.seconds(1) / longer - 1

    @property
    def measured(self) -> dict[int, float]:
        """The same by numbers of processes, as measured, sums included."""
        return {n: rate / self.rates[1] - 1 for n, rate in self.rates.items()}

    def known_gains(self, counts: Iterable[int]) -> dict[int, float]:
        """Return the gains to choose from: all that were measured.

        Where nothing was, they are those that are predicted of `counts`, with sums.
        """
        return self.measured or {n: self.gain(n, sums=True) for n in counts}

    def utilisation(self, processes: int = 1) -> float:
        """Return the share of the device that some processes use."""
        return processes * self.full / self.seconds(processes)
