"""Hardware: what a machine can do, as a TOML file that people read and edit."""

from __future__ import annotations

import functools
import os
from dataclasses import MISSING, asdict, dataclass, field, fields
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import tomli_w

from gemsc.errors import GemscError
from gemsc.toml_file import TomlFile

__all__ = [
    "DEFAULT_HARDWARE",
    "Allreduce",
    "Device",
    "Hardware",
    "Link",
    "Network",
    "read_hardware",
    "shipped_hardware",
]

DEFAULT_HARDWARE = "cpu-core"
ALGORITHMS = ("auto", "ring", "tree", "halving-doubling")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one rank computes on: one core, some cores, or one GPU.

    `peak_flops` holds operations per second by dtype ("float32"); "tf32", where it is
    given, is what convolutions in float32 reach (PyTorch's default on GPUs that have
    it). Overheads are seconds per operator, forward and backward, that no kernel
    takes: Python, dispatch, launch. `host_bandwidth` is bytes per second, one way,
    between the device and where offloaded activations wait: host memory, or the file
    that stands for it where the device is the host. `workspace_bytes` are what
    libraries take of each rank's memory for themselves. `gemsc.planner.times` says how
    the other entries become seconds:

    efficiency: by kind of operator, the share of the peak (of operations for those
        that multiply, of the bandwidth for the others) that a large one reaches.
    half_flops: operations of an operator that reaches half of that.
    half_channels: channels at which a convolution reaches half of that.
    fit: by kind of operator, seconds for each unit of its features, as calibrated;
        where a kind has an entry, it replaces the roofline.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: dict[str, float]
    forward_overhead: float = 0.0
    backward_overhead: float = 0.0
    host_bandwidth: float = 4e9
    workspace_bytes: int = 0
    half_flops: float = 0.0
    half_channels: float = 0.0
    efficiency: dict[str, float] = field(default_factory=dict)
    fit: dict[str, dict[str, float]] = field(default_factory=dict)

    def host_seconds(self, num_bytes: int) -> float:
        """Return the time of a copy between the device and the host, one way."""
        return num_bytes / self.host_bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
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
    intra: Link
    inter: Link
    nic_ranks: int = 1
    allreduce: Allreduce = field(default_factory=Allreduce)

    def link(self, source: int, dest: int) -> Link:
        """Return what connects two ranks, which fill nodes in order."""
        same = source // self.ranks_per_node == dest // self.ranks_per_node
        return self.intra if same else self.inter


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
        """Write a hardware file, so that nothing half-written stays."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(self.to_toml(), encoding="utf-8")
        beside.replace(path)

    @classmethod
    def read(cls, path: Path) -> Hardware:
        """Read a hardware file.

        Raises:
            GemscError: it is missing, no TOML, or an entry is missing, unknown or
                wrong; names file and line.
        """
        file = TomlFile.read(path, what="hardware file")
        hardware = _build(cls, file.entries, (), file)
        algorithm = hardware.network.allreduce.algorithm
        if algorithm not in ALGORITHMS:
            raise file.error(
                ("network", "allreduce", "algorithm"),
                f"unknown algorithm '{algorithm}'",
                help=f"choose one of {', '.join(ALGORITHMS)}",
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


# Reading: the dataclasses say what entries there are, and of what type.

POSITIVE = {"memory_bytes", "memory_bandwidth", "bandwidth", "reduce_bandwidth"} | {
    "ranks_per_node",
    "host_bandwidth",
    "nic_ranks",
    "peak_flops",
    "efficiency",
}


def _build(
    kind: type[T], entries: dict[str, Any], keys: tuple[str, ...], file: TomlFile
) -> T:
    """Return the dataclass for one table."""
    hints = get_type_hints(kind)
    for name in entries:
        if name not in hints:
            close = get_close_matches(name, hints, n=1)
            raise file.error(
                (*keys, name),
                f"unknown entry '{'.'.join((*keys, name))}'",
                help=f"did you mean {close[0]}?" if close else f"known: {_all(hints)}",
            )
    values = {}
    for item in fields(kind):  # type: ignore[arg-type]
        if item.name in entries:
            here = (*keys, item.name)
            values[item.name] = _read(hints[item.name], entries[item.name], here, file)
        elif item.default is MISSING and item.default_factory is MISSING:
            raise file.error(
                keys,
                f"there is no entry '{'.'.join((*keys, item.name))}'",
                help="add it; `gemsc profile --calibrate` writes a whole file",
            )
    return kind(**values)


def _read(hint: Any, value: Any, keys: tuple[str, ...], file: TomlFile) -> Any:
    """Return one entry as the type that its field has."""
    origin = get_origin(hint) or hint
    if origin is dict and isinstance(value, dict):
        inner = get_args(hint)[1]
        return {k: _read(inner, v, (*keys, k), file) for k, v in value.items()}
    if isinstance(hint, type) and hasattr(hint, "__dataclass_fields__"):
        if isinstance(value, dict):
            return _build(hint, value, keys, file)
    elif origin in (int, float) and type(value) in (int, float):
        return _number(origin, value, keys, file)
    elif origin in (str, list) and isinstance(value, origin):
        return value
    wanted = {dict: "table", int: "number", float: "number", str: "text", list: "list"}
    raise file.error(
        keys,
        f"{'.'.join(keys)} is {value!r}, which is no {wanted.get(origin, 'table')}",
        help="mend the entry",
    )


def _number(
    kind: type[int] | type[float], value: float, keys: tuple[str, ...], file: TomlFile
) -> float:
    positive = not POSITIVE.isdisjoint(keys)
    if not (0 < value < float("inf") if positive else 0 <= value < float("inf")):
        least = "more than 0" if positive else "0 or more"
        raise file.error(keys, f"{'.'.join(keys)} is {value}", help=f"give {least}")
    if kind is int and value != int(value):
        raise file.error(keys, f"{'.'.join(keys)} is {value}", help="give a whole one")
    return kind(value)


def _all(names: dict[str, Any]) -> str:
    return ", ".join(names)
