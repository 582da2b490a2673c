"""The log of a run: what happened, line by line, and the figures of each step.

    log.jsonl   {"event": "step", "step": 12, "epoch": 2, "loss": 0.31, ...}
                {"event": "evaluation", "step": 12, "loss": 0.29, "dice": 0.71, ...}
    log.csv     step,epoch,loss,samples_per_second,...,eval_loss,eval_dice

The first rank writes each line as soon as it is known. A run that goes on continues
its log; what was logged after the checkpoint is dropped: no step is there twice.
A number that is not finite is null in the one and empty in the other.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import platform
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from gemsc.base.files import write_text
from gemsc.runtime.training.callbacks import Callback
from gemsc.runtime.training.run_folder import LOG, TABLE, clear, describe_run
from gemsc.runtime.training.trainer import StepReport, Trainer
from gemsc.runtime.transport.waiting import waited_seconds

EACH = 100  # steps between two looks at what each rank needs
COLUMNS = (
    *("step", "epoch", "loss", "samples_per_second", "seconds", "data_seconds"),
    *("learning_rate", "gradient_norm"),
)
BYTES_OF_RSS = 1 if sys.platform == "darwin" else 1024


class Log(Callback):
    """Writes the log of a run into its folder; all ranks have one."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Prepare to write into the folder of a run with these options."""
        self.folder: Path = options.save
        self._options = options
        self._board: Any = None
        self._lines: IO[str] | None = None
        self._table: _Table | None = None
        self._last = 0.0  # when the last step ended
        self._steps_seconds = self._waited = 0.0

    def on_start(self, trainer: Trainer) -> None:
        """Open the log, after the last step that counts."""
        step = trainer.step_number
        hosts = trainer.transport.all_gather_object(platform.node())
        if trainer.transport.rank == 0:
            self._open(step)
            describe_run(self.folder, trainer.directory, self._options, step, hosts)
            self._write("start", step, ranks=len(hosts))
        self._last, self._waited = time.perf_counter(), waited_seconds()

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Log the step; now and then, what each rank needs."""
        now = time.perf_counter()
        whole, self._last = now - self._last, now
        self._steps_seconds += report.seconds
        if self._lines is not None:
            figures = {
                "epoch": trainer.epoch + 1,
                "loss": report.loss,
                "samples_per_second": round(report.samples / whole, 3),
                "seconds": round(report.seconds, 6),
                "data_seconds": round(max(0.0, whole - report.seconds), 6),
                "learning_rate": _learning_rate(trainer.optimizer),
                "gradient_norm": trainer.worker.updates.norm,
            }
            known = {
                name: value for name, value in figures.items() if value is not None
            }
            more = {} if report.problem is None else {"problem": str(report.problem)}
            self._write("step", report.step, **known, **more)
            self._note(report.step, known)
        if report.step % EACH == 0:
            self._log_ranks(trainer)

    def on_evaluation(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        """Log what was found on held-out data."""
        if self._lines is not None:
            self._write("evaluation", trainer.step_number, figures=dict(figures))
            named = {f"eval_{name}": value for name, value in figures.items()}
            self._note(trainer.step_number, named)

    def on_epoch(
        self, trainer: Trainer, epoch: int, figures: Mapping[str, float]
    ) -> None:
        """Log what each rank needs."""
        self._log_ranks(trainer)
        self._last = time.perf_counter()  # the evaluation is no part of a step

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        """Log that there is a checkpoint."""
        self._write("checkpoint", trainer.step_number, folder=str(folder))
        self._last = time.perf_counter()

    def on_end(self, trainer: Trainer) -> None:
        """Say that the run is complete."""
        self._write("end", trainer.step_number)
        self._close()

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        """Say why the run ends."""
        text = str(error) or type(error).__name__
        self._write("failure", trainer.step_number, error=text)
        self._close()

    # -------------------------------------------------------- helpers

    def _open(self, step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._options.overwrite:
            clear(self.folder)
        _keep_lines(self.folder / LOG, step)
        self._lines = (self.folder / LOG).open("a", encoding="utf-8", buffering=1)
        self._table = _Table(self.folder / TABLE, step)
        if self._options.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # loads a lot

            place = str(self.folder / "tensorboard")
            self._board = SummaryWriter(place, purge_step=step + 1)

    def _write(self, event: str, step: int, **what: Any) -> None:
        if self._lines is None:
            return
        record = {"event": event, "step": step, "time": round(time.time(), 3), **what}
        self._lines.write(json.dumps(_finite(record), allow_nan=False) + "\n")

    def _note(self, step: int, figures: Mapping[str, Any]) -> None:
        """Add figures of a step to the table."""
        assert self._table is not None
        self._table.add(step, figures)
        for name, value in figures.items():
            if self._board is not None and isinstance(value, float):
                self._board.add_scalar(name, value, step)

    def _log_ranks(self, trainer: Trainer) -> None:
        """Log how long each rank was busy since the last time, and its memory."""
        waited = waited_seconds()
        idle, self._waited = waited - self._waited, waited
        seconds, self._steps_seconds = self._steps_seconds, 0.0
        used = {
            "memory_bytes": peak_bytes(trainer.device),
            "seconds": round(seconds, 6),
            "busy_seconds": round(max(0.0, seconds - idle), 6),
        }
        everyone = trainer.transport.all_gather_object(used)
        self._write("ranks", trainer.step_number, ranks=everyone)

    def _close(self) -> None:
        for file in (self._lines, self._board):
            if file is not None:
                file.close()
        self._lines = self._board = None


class _Table:
    """log.csv: a row for each step; for a new column the file is written anew."""

    def __init__(self, path: Path, step: int) -> None:
        """Go on after a step."""
        self._path = path
        self._columns: list[str] = [*COLUMNS]
        self._last: dict[str, str] = {}  # row
        self._begin = 0  # of the last row, in bytes
        rows: list[dict[str, str]] = []
        if step and path.is_file():
            with path.open(newline="", encoding="utf-8", errors="replace") as file:
                reader = csv.DictReader(file, restval="")
                rows = [row for row in reader if _step_of(row.get("step")) <= step]
                found = [name for name in reader.fieldnames or () if name]
                self._columns += [name for name in found if name not in COLUMNS]
        self._rewrite(rows)

    def add(self, step: int, figures: Mapping[str, Any]) -> None:
        """Add figures to the row of a step, the last one or the next."""
        texts = {
            name: str(value)
            for name, value in figures.items()
            if not isinstance(value, float) or math.isfinite(value)
        }
        is_same = self._last.get("step") == str(step)
        row = self._last | texts if is_same else {"step": str(step), **texts}
        if new := [name for name in figures if name not in self._columns]:
            self._columns += new
            with self._path.open(newline="", encoding="utf-8") as file:
                self._rewrite(list(csv.DictReader(file)))
            is_same = is_same and bool(self._last)
        with self._path.open("r+b") as file:
            file.seek(self._begin if is_same else 0, 0 if is_same else 2)
            self._begin = file.tell()
            file.write(self._text([row]))
        self._last = row

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        head = self._text([dict(zip(self._columns, self._columns, strict=True)), *rows])
        self._last = rows[-1] if rows else {}
        self._begin = len(head) - len(self._text([self._last])) if rows else len(head)
        write_text(self._path, head.decode())

    def _text(self, rows: Iterable[Mapping[str, str]]) -> bytes:
        text = io.StringIO()
        writer = csv.DictWriter(
            text, self._columns, extrasaction="ignore", lineterminator="\n"
        )
        writer.writerows(rows)
        return text.getvalue().encode()


def _keep_lines(path: Path, step: int) -> None:
    """Keep what was logged up to a step, less a line that a kill has cut."""
    kept = []
    for line in (
        path.read_text("utf-8", "replace").splitlines() if path.exists() else ()
    ):
        try:
            if _step_of(json.loads(line)["step"]) <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    write_text(path, "".join(kept))


def _step_of(value: Any) -> float:
    """Return a step of a log; infinity if it is none."""
    try:
        return int(value)
    except (ValueError, TypeError):
        return math.inf


def _finite(value: Any) -> Any:
    """Return a value as JSON has it, with null for numbers that it does not have."""
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _learning_rate(optimizer: torch.optim.Optimizer | None) -> float | None:
    """Return the learning rate of the first group of parameters."""
    rate = optimizer.param_groups[0].get("lr") if optimizer is not None else None
    return None if rate is None else float(rate)


def peak_bytes(device: torch.device) -> int:
    """Return the most memory that this rank has used so far, on its device."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BYTES_OF_RSS
