"""What a run has left of itself in its folder: its log, and how it was started."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemsc.errors import GemscError

__all__ = ["RunLog"]

Curve = list[tuple[int, float]]  # step and value


@dataclass
class RunLog:
    """The figures of a run by step, those of evaluations by name, and its options."""

    name: str
    loss: Curve = field(default_factory=list)
    figures: dict[str, Curve] = field(default_factory=dict)
    rates: Curve = field(default_factory=list)  # samples per second
    memory: list[Curve] = field(default_factory=list)  # bytes of each rank
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """The last step."""
        return max((curve[-1][0] for curve in self._curves if curve), default=0)

    @property
    def _curves(self) -> list[Curve]:
        return [self.loss, *self.figures.values()]

    @classmethod
    def read(cls, folder: Path) -> RunLog:
        """Read the log in a run's folder; a line that a kill has cut is left out.

        Raises:
            GemscError: there is none.
        """
        path = folder / "log.jsonl"
        try:
            text = path.read_text("utf-8", "replace")
        except OSError as error:
            raise GemscError(
                f"{path}: {(error.strerror or 'unreadable').lower()}",
                help="give the folder of a run, as --save names it: PROGRAM/runs/1",
            ) from None
        log = cls(folder.name, options=_options(folder / "run.json"))
        figures: dict[str, Curve] = defaultdict(list)
        for line in text.splitlines():
            try:
                record = json.loads(line)
                log._add(record, figures)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
        log.figures = dict(figures)
        return log

    def _add(self, record: dict[str, Any], figures: dict[str, Curve]) -> None:
        step = int(record["step"])
        if record["event"] == "step":
            if _is_number(record["loss"]):
                self.loss.append((step, record["loss"]))
            if _is_number(record.get("samples_per_second")):
                self.rates.append((step, record["samples_per_second"]))
        elif record["event"] == "evaluation":
            for name, value in record["figures"].items():
                if _is_number(value):
                    figures[str(name)].append((step, value))
        elif record["event"] == "ranks":
            self.memory += [[] for _ in record["ranks"][len(self.memory) :]]
            for curve, rank in zip(self.memory, record["ranks"], strict=False):
                if _is_number(held := rank["memory_bytes"]):
                    curve.append((step, held))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _options(path: Path) -> dict[str, Any]:
    """Return the options of the last start of a run, as far as they are known."""
    try:
        options = json.loads(path.read_text("utf-8"))["starts"][-1]["options"]
        return {str(name): value for name, value in options.items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return {}
