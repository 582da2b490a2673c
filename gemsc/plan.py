"""Plan <-> plan.toml: every decision of one compilation, as plain data."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import tomli_w

from gemsc.errors import GemscError

__all__ = ["Plan", "PlannedStage", "PlannedTransfer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One stage: what it holds, where it runs, what it is predicted to take.

    Bytes and seconds are for one micro-batch; `saved_bytes` are kept from its forward
    to the end of its backward.
    """

    index: int
    ranks: list[int]
    blocks: list[str]
    flops: int
    parameter_bytes: int
    saved_bytes: int
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTransfer:
    """Values that travel from one stage to another for each micro-batch."""

    index: int
    source: int
    dest: int
    values: list[str]
    num_bytes: int
    gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was decided and for what.

    `sources` maps each of the user's files to the fingerprints of its definitions;
    `graph` is the fingerprint of the traced graph. `order` holds, for each rank, its
    actions of one step as text (`2F0` is the forward of stage 2 on micro-batch 0).
    """

    gemsc: str
    torch: str
    command: str
    model: str
    spec: str
    graph: str
    ranks: int
    schedule: str
    placement: str
    micro_batches: int
    step_seconds: float
    bubble: float
    peak_bytes: list[int]
    stages: list[PlannedStage]
    transfers: list[PlannedTransfer]
    skips: list[dict[str, Any]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, dict[str, str]] = field(default_factory=dict)

    def to_toml(self) -> str:
        """Return the text of plan.toml."""
        head = (
            "# Every decision of this compilation. Units: bytes, seconds.\n"
            "# `gemsc show` prints it as tables.\n\n"
        )
        return head + tomli_w.dumps(_without_none(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read plan.toml.

        Raises:
            GemscError: the file is missing, no TOML, or lacks an entry.
        """
        help_text = "compile again to write it anew"
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise GemscError(
                f"{path.parent} is no program directory: it has no {path.name}",
                help="give the folder that `gemsc compile -o` wrote",
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise GemscError(f"{path} is damaged: {error}", help=help_text) from None
        known = {item.name for item in fields(cls)}
        try:
            stages = [PlannedStage(**stage) for stage in data.pop("stages")]
            transfers = [PlannedTransfer(**t) for t in data.pop("transfers")]
            values = {key: value for key, value in data.items() if key in known}
            return cls(stages=stages, transfers=transfers, **values)
        except (KeyError, TypeError) as error:
            raise GemscError(
                f"{path} is damaged: {str(error).removeprefix('PlannedStage.')}",
                help=help_text,
            ) from None


def _without_none(data: dict[str, Any]) -> dict[str, Any]:
    """Drop empty options, which TOML cannot express."""
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in data.items()
        if value is not None
    }
