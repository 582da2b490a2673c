"""A line of the report, and what a check is given."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["Line", "Place", "judged", "printed", "skipped", "table"]


@dataclass(frozen=True)
class Line:
    """What was found: `verdict` is PASS, FAIL or SKIP; `numbers` are for machines."""

    name: str
    verdict: str
    figure: str
    limit: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where a check runs, in which sizes, and what it may write.

    `scratch` is deleted afterwards, `kept` is not.
    """

    device: torch.device
    is_tiny: bool
    scratch: Path
    kept: Path

    @property
    def has_gpu(self) -> bool:
        """Whether it is a GPU, and not a CPU that stands for one."""
        return self.device.type == "cuda"

    @property
    def hardware(self) -> str:
        """The shipped hardware file of this GPU, if there is one."""
        if not self.has_gpu:
            return ""
        name = torch.cuda.get_device_name().lower()
        return next((n for n in ("h200", "h100", "a100", "v100") if n in name), "")

    def synchronize(self) -> None:
        """Return when the device has done all."""
        if self.has_gpu:
            torch.cuda.synchronize()


def judged(name: str, passed: bool, figure: str, limit: str, **numbers: Any) -> Line:
    """Return a line that has passed or failed."""
    return Line(name, "PASS" if passed else "FAIL", figure, limit, numbers)


def skipped(name: str, why: str) -> Line:
    """Return a line for what cannot be found out here."""
    return Line(name, "SKIP", why)


def printed(line: Line) -> str:
    """Return a line as people read it."""
    limit = f"  ({line.limit})" if line.limit else ""
    return f"{line.verdict}  {line.name:<32}  {line.figure}{limit}"


def table(lines: Iterable[Line]) -> str:
    """Return a Markdown table, for docs/benchmarks.md."""

    def rows() -> Iterator[str]:
        yield "| check | | figure | limit |"
        yield "|---|---|---|---|"
        for line in lines:
            cells = (line.name, line.verdict, line.figure, line.limit)
            yield "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"

    return "\n".join(rows()) + "\n"


def as_json(line: Line) -> str:
    """Return a line for a file, to be read by `from_json`."""
    return json.dumps(asdict(line))


def from_json(text: str) -> Line:
    """Return what `as_json` wrote."""
    return Line(**json.loads(text))
