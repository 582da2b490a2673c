"""Hardware: what a machine can do, as a TOML file that people read and edit."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path

import tomli_w

from gemsc.base.files import write_text
from gemsc.base.toml_file import Keys, TomlFile
from gemsc.errors import GemscError

DEFAULT_HARDWARE = "cpu-core"
Interface = tuple[str, int]  # which end: "in" or "out", and its number
POSITIVE = {
    *("memory_bytes", "memory_bandwidth", "bandwidth", "reduce_bandwidth"),
    *("ranks_per_node", "host_bandwidth", "nic_ranks", "peak_flops", "efficiency"),
}
ALGORITHMS = ("auto", "ring", "tree", "halving-doubling")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one rank computes on: one core, some cores, or one GPU.

    `peak_flops` holds operations per second by dtype ("float32"); "tf32", where it is
    given, is what convolutions in float32 reach (PyTorch's default on GPUs that have
    it). Overheads are seconds per operator, forward and backward, that no kernel
    takes: Python, dispatch, launch. Where the host only queues kernels
    (`asynchronous`), as on a GPU, it spends them while kernels run, and copies to the
    host run beside both. `host_bandwidth` is bytes per second, one way,
    between the device and where offloaded activations wait: host memory, or the file
    that stands for it where the device is the host. `workspace_bytes` are what
    libraries take of each rank's memory for themselves. `gemsc.costs.operators` says
    how the other entries become seconds:

    efficiency: by kind of operator, the share of the peak (of operations for those
        that multiply, of the bandwidth for the others) that a large one reaches.
    half_flops: operations of an operator that reaches half of that.
    half_channels: channels at which a convolution reaches half of that.
    fit: by kind of operator, seconds for each unit of its features, as calibrated;
        where a kind has an entry, it replaces the roofline.
    sharing: by program (`SharedDevice.name`), samples a second that were measured of
        1, 2, 4, ... processes on one device.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: dict[str, float]
    forward_overhead: float = 0.0
    backward_overhead: float = 0.0
    host_bandwidth: float = 4e9
    workspace_bytes: int = 0
    asynchronous: bool = False
    half_flops: float = 0.0
    half_channels: float = 0.0
    efficiency: dict[str, float] = field(default_factory=dict)
    fit: dict[str, dict[str, float]] = field(default_factory=dict)
    sharing: dict[str, dict[str, float]] = field(default_factory=dict)

    def peak(self, dtype: str) -> tuple[str, float]:
        """Return a dtype and the most operations per second that the device does in it.

        It is the one that is asked for; tf32 for float32 where a device has it, as
        convolutions take it; or one that the file knows.
        """
        peaks = self.peak_flops
        wanted = ("tf32", dtype) if dtype == "float32" else (dtype, "float32")
        chosen = next((name for name in wanted if name in peaks), None)
        chosen = chosen or max(peaks, key=lambda name: peaks[name])
        return chosen, peaks[chosen]

    def host_seconds(self, num_bytes: int) -> float:
        """Return the time of a copy between the device and the host, one way."""
        return num_bytes / self.host_bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """A connection between two ranks: seconds and bytes per second, one way."""

    latency: float
    bandwidth: float

    def seconds(self, num_bytes: float) -> float:
        """Return the time of one message (latency-bandwidth model)."""
        return self.latency + num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Allreduce:
    """How gradients are summed over ranks.

    `algorithm` is one of "ring", "tree", "halving-doubling" and "auto", the fastest of
    them. `reduce_bandwidth` is bytes per second of adding two buffers; `efficiency`
    the share of the links' bandwidth that the library reaches.
    """

    algorithm: str = "auto"
    reduce_bandwidth: float = 4e9
    efficiency: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What connects the ranks: those of a node by `intra`, others by `inter`.

    `nic_ranks` ranks of a node share the bandwidth of `inter` when all send at once.
    """

    ranks_per_node: int
    intra: LinkSpeed
    inter: LinkSpeed
    nic_ranks: int = 1
    allreduce: Allreduce = field(default_factory=Allreduce)

    def link(self, source: int, dest: int) -> LinkSpeed:
        """Return what connects two ranks, which fill nodes in order."""
        is_inside = self.node(source) == self.node(dest)
        return self.intra if is_inside else self.inter

    def node(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.ranks_per_node

    def interfaces(self, source: int, dest: int) -> tuple[Interface, ...]:
        """Return the ends of network interfaces that a message passes, if any."""
        if self.node(source) == self.node(dest):
            return ()
        return ("out", self.interface(source)), ("in", self.interface(dest))

    def interface(self, rank: int) -> int:
        """Return the number of the interface that a rank uses, over all nodes."""
        per_node = -(-self.ranks_per_node // self.nic_ranks)
        return self.node(rank) * per_node + (
            rank % self.ranks_per_node // self.nic_ranks
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A machine. `source` says where its figures come from, `notes` what is assumed."""

    name: str
    source: str
    device: Device
    network: Network
    notes: list[str] = field(default_factory=list)

    def to_toml(self) -> str:
        """Return the text of a hardware file."""
        head = (
            "# What one machine can do. Units: bytes, seconds, FLOP/s, bytes/s.\n"
            "# docs/planning.md says how the entries become predicted seconds.\n\n"
        )
        return head + tomli_w.dumps(asdict(self))

    def write(self, path: Path) -> None:
        """Write a hardware file."""
        write_text(path, self.to_toml())

    @classmethod
    def read(cls, path: Path) -> Hardware:
        """Read a hardware file.

        Raises:
            GemscError: it is missing, no TOML, or an entry is missing, unknown or
                wrong; names file and line.
        """
        advice = "let `gemsc profile --calibrate` write a whole file"
        file = TomlFile.read(path, what="hardware file", advice=advice)
        hardware = file.build(cls, _check)
        algorithm = hardware.network.allreduce.algorithm
        if algorithm not in ALGORITHMS:
            raise file.error(
                ("network", "allreduce", "algorithm"),
                f"unknown algorithm '{algorithm}'",
                help=f"choose one of {', '.join(ALGORITHMS)}",
            )
        for name, rates in hardware.device.sharing.items():
            if "1" not in rates:
                raise file.error(
                    ("device", "sharing", name),
                    f"device.sharing.{name} has no samples per second for 1 process",
                    help="let `gemsc profile --per-device` measure it, or remove it",
                )
        return hardware


def shipped_hardware() -> tuple[str, ...]:
    """Return the names of the files that come with gemsc."""
    folder = resources.files("gemsc") / "hardware"
    names = (Path(item.name) for item in folder.iterdir())
    return tuple(sorted(name.stem for name in names if name.suffix == ".toml"))


@functools.cache
def _shipped(name: str) -> Hardware:
    with resources.as_file(resources.files("gemsc") / "hardware") as folder:
        return Hardware.read(folder / f"{name}.toml")


def read_hardware(name: str = "") -> Hardware:
    """Return a shipped machine by name, or that of a file; the default for "".

    Raises:
        GemscError: there is no such machine, or its file is damaged.
    """
    name = name or DEFAULT_HARDWARE
    if name.endswith(".toml"):
        return Hardware.read(Path(name))
    if name not in shipped_hardware():
        raise GemscError(
            f"unknown hardware '{name}'",
            help=f"choose one of {', '.join(shipped_hardware())}, or give a .toml file "
            "(`gemsc profile --calibrate -o hardware.toml` writes one)",
        )
    return _shipped(name)


def _check(keys: Keys, number: float) -> str | None:
    """Say what a number has to be, if it is not."""
    if keys[:2] == ("device", "sharing"):
        is_right = str(keys[-1]).isdecimal() and int(keys[-1]) > 0 and number > 0
        return None if is_right else "give samples a second, for example 4 = 310.5"
    if not POSITIVE.isdisjoint(keys):
        return None if 0 < number < float("inf") else "give more than 0"
    return None if 0 <= number < float("inf") else "give 0 or more"
