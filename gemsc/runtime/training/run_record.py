"""What a run computed and read, in full: for `gemsc verify --run`."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from gemsc.base.boxes import Box
from gemsc.base.rng import same_draws
from gemsc.runtime.data.shared import Digests

FILE = "run.json"
Figures = dict[str, tuple[float, int]]  # mean, and the samples that count in it


@dataclass
class RunRecord:
    """Losses of all steps, figures of all evaluations, and the samples of each batch.

    A run that is not verified keeps nothing.
    """

    is_kept: bool = True
    losses: list[float] = field(default_factory=list)
    samples: list[Digests] = field(default_factory=list)
    figures: list[Figures] = field(default_factory=list)
    eval_samples: list[Digests] = field(default_factory=list)

    def draws(self) -> AbstractContextManager[None]:
        """Let a run that is verified draw the numbers that the plain loop draws."""
        return same_draws() if self.is_kept else nullcontext()

    def add_step(self, loss: float, samples: Digests) -> None:
        """Note the loss of a step, and what all ranks read for it."""
        if self.is_kept:
            self.losses.append(loss)
            self.samples.append(samples)

    def add_evaluated(self, samples: Digests) -> None:
        """Note what all ranks read for a batch of an evaluation."""
        if self.is_kept:
            self.eval_samples.append(samples)

    def add_figures(self, figures: Figures) -> None:
        """Note what an evaluation has found."""
        if self.is_kept:
            self.figures.append(figures)

    def write(self, folder: Path) -> None:
        """Write the record into a folder."""
        parts = {
            "losses": self.losses,
            "samples": [[*digests.items()] for digests in self.samples],
            "figures": self.figures,
            "eval_samples": [[*digests.items()] for digests in self.eval_samples],
        }
        (folder / FILE).write_text(json.dumps(parts))

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Read what `write` wrote."""
        parts = json.loads((folder / FILE).read_text())
        for name in ("samples", "eval_samples"):
            parts[name] = [
                {(index, _box(box)): found for (index, box), found in digests}
                for digests in parts[name]
            ]
        return cls(**parts)


def _box(box: list[list[int]] | None) -> Box | None:
    return None if box is None else tuple((start, stop) for start, stop in box)
