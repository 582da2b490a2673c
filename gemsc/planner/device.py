"""What one device can do: the numbers that turn operations and bytes into seconds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CPU_CORE", "LINK", "Device", "Link"]


@dataclass(frozen=True, slots=True)
class Device:
    """A roofline: operations per second, bytes per second, seconds per operator."""

    name: str
    flops_per_second: float
    bytes_per_second: float
    operator_seconds: float

    def seconds(self, flops: float, moved_bytes: float) -> float:
        """Return the time of one operator (roofline model, Williams et al. 2009)."""
        return self.operator_seconds + max(
            flops / self.flops_per_second, moved_bytes / self.bytes_per_second
        )


CPU_CORE = Device("one CPU core", 6e10, 8e9, 6e-6)


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between two ranks: latency and bandwidth."""

    name: str
    latency_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: float) -> float:
        """Return the time of one message (latency-bandwidth model)."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


LINK = Link("shared memory", 3e-5, 4e9)
