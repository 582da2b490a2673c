"""The log of a run: what happened, line by line, and the figures of each step.

    log.jsonl   {"event": "step", "step": 12, "epoch": 2, "loss": 0.31, ...}
                {"event": "evaluation", "step": 12, "figures": {"loss": 0.29, ...}}
    log.csv     step,epoch,loss,samples_per_second,...,eval_loss,eval_dice

Where a step has several phases, "loss" is that of the last one, and "loss_d" that of d.

The first rank writes each line as soon as it is known; all else is made of these lines.
A run that goes on continues its log; what was logged after the checkpoint is dropped:
no step is there twice. A number that is not finite is null, and empty in the table.
Where no log can be written any more, as on a full disk, the run goes on without it.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from gemsc.base.files import in_json, replaced
from gemsc.base.phase import LOSS_OF
from gemsc.errors import warn
from gemsc.runtime.process.device import peak_bytes
from gemsc.runtime.training.callbacks import Callback
from gemsc.runtime.training.epochs import Epochs
from gemsc.runtime.training.run_folder import (
    LOG,
    TABLE,
    clear,
    describe_run,
    told_where,
)
from gemsc.runtime.training.step_report import StepReport
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.waiting import waited_seconds

EACH = 100  # steps between two looks at what each rank needs
COLUMNS = (
    *("step", "epoch", "loss", "samples_per_second", "seconds", "data_seconds"),
    *("learning_rate", "gradient_norm"),
)


class Log(Callback):
    """Writes the log of a run into its folder; all ranks have one."""

    def __init__(self, options: argparse.Namespace, epochs: Epochs) -> None:
        """Prepare to write into the folder of a run with these options."""
        self.folder: Path = options.save
        self._options, self._epochs = options, epochs
        self._board: Any = None
        self._lines: IO[str] | None = None
        self._of_steps: tuple[str, ...] = COLUMNS
        self._columns: tuple[str, ...] = COLUMNS  # of log.csv
        # of log.csv: what it says, and where it begins and ends
        self._last_row: tuple[dict[str, Any], int, int] = {}, 0, 0
        self._last = 0.0  # when the last step ended
        self._steps_seconds = self._waited = 0.0
        self._updates = 0  # before the step
        self._saved = 0  # what the checkpoint calls the step that it is of

    def on_start(self, trainer: Trainer) -> None:
        """Open the log, after the last step that counts."""
        step = trainer.step_number
        hosts = trainer.transport.all_gather_object(platform.node())
        if trainer.transport.rank == 0:
            phases = [f"{LOSS_OF}{phase.name}" for phase in trainer.phases]
            self._saved = trainer.worker.steps.saved
            with told_where(self.folder, self._options.resume):
                self._open(step, phases)
                describe_run(self.folder, trainer.directory, self._options, step, hosts)
            self._write("start", step, ranks=len(hosts))
        self._last, self._waited = time.perf_counter(), waited_seconds()
        self._updates = trainer.worker.variants.num_updates

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """Log the step; now and then, what each rank needs."""
        now = time.perf_counter()
        whole, self._last = now - self._last, now
        self._steps_seconds += report.seconds
        before, self._updates = self._updates, trainer.worker.variants.num_updates
        is_new = self._updates > before  # not where gradients are only added up
        if self._lines is not None:
            figures = {
                "epoch": trainer.epoch + 1,
                "loss": report.loss,
                "samples_per_second": round(report.samples / whole, 3),
                "seconds": round(report.seconds, 6),
                "data_seconds": round(max(0.0, whole - report.seconds), 6),
                "learning_rate": _learning_rate(trainer),
                "gradient_norm": trainer.gradient_norm if is_new else None,
                **{f"{LOSS_OF}{name}": x for name, x in report.losses.items()},
            }
            known = {
                name: value for name, value in figures.items() if value is not None
            }
            more = {} if report.problem is None else {"problem": str(report.problem)}
            if shapes := trainer.plan.shapes:
                more["shape"] = shapes[report.shape].name
            row = self._write("step", report.step, **known, **more)
            with self._going_on():
                self._add_row(row)
            self._show(report.step, known)
        if report.step % EACH == 0:
            self._log_ranks(trainer)

    def on_evaluation(self, trainer: Trainer, figures: Mapping[str, float]) -> None:
        """Log what was found on held-out data."""
        if self._lines is not None:
            named = {f"eval_{name}": value for name, value in figures.items()}
            self._write("evaluation", trainer.step_number, figures=dict(figures))
            with self._going_on():
                self._complete_row(trainer.step_number, named)
            self._show(trainer.step_number, named)

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

    def _open(self, step: int, phases: list[str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._options.overwrite:
            clear(self.folder)
        lines = self.folder / LOG
        self._of_steps = (*COLUMNS, *phases)
        columns, saved = dict.fromkeys(self._of_steps), self._saved or step
        with replaced(lines) as beside, beside.open("w", encoding="utf-8") as file:
            for line, record in _records(lines):
                is_owed = record["step"] == saved and self._epochs.owes_end
                if is_owed and record.get("event") == "evaluation":
                    continue  # it is made again
                if record["step"] <= saved:
                    if saved != step:  # count as if all batches had the size of now
                        record["step"] = -(-record["step"] * step // saved)
                        line = json.dumps(record)
                    file.write(f"{line}\n")
                    columns |= dict.fromkeys(_evaluation_columns(record))
        self._columns = (*columns,)
        self._lines = lines.open("a", encoding="utf-8", buffering=1)
        self._tabulate()
        if self._options.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # loads a lot

            place = str(self.folder / "tensorboard")
            self._board = SummaryWriter(place, purge_step=step + 1)

    def _write(self, event: str, step: int, **what: Any) -> dict[str, Any]:
        record = {"event": event, "step": step, "time": round(time.time(), 3), **what}
        finite: dict[str, Any] = in_json(record)
        if self._lines is not None:
            with self._going_on():
                self._lines.write(json.dumps(finite, allow_nan=False) + "\n")
        return finite

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Let a run go on without its log where that cannot be written."""
        try:
            yield
        except OSError as error:
            if self._lines is not None:
                why = f"no more is logged in {self.folder}: {error.strerror}"
                warn(f"{why}; the run continues")
            self._close()

    def _add_row(self, row: dict[str, Any]) -> None:
        """Add a row to log.csv, or make that anew where it is lost."""
        table = self.folder / TABLE
        if not table.is_file():
            self._tabulate()
            return
        with table.open("a", encoding="utf-8", newline="") as file:
            begin = file.tell()
            self._writer(file).writerow(row)
            self._last_row = row, begin, file.tell()

    def _complete_row(self, step: int, figures: Mapping[str, float]) -> None:
        """Add to the last row of log.csv what an evaluation after this step found.

        That takes as long after a million steps as after ten: the table is not read.
        """
        row, begin, end = self._last_row
        table, before = self.folder / TABLE, self._columns
        self._columns = (*dict.fromkeys((*before, *figures)),)
        is_last = row.get("step") == step and table.is_file()
        if is_last and table.stat().st_size == end and self._columns == before:
            os.truncate(table, begin)
            self._add_row({**row, **in_json(figures)})
        else:
            self._tabulate()

    def _tabulate(self) -> None:
        """Write log.csv anew: a row for each step, with what was found after it."""
        with (
            replaced(self.folder / TABLE) as beside,
            beside.open("w", encoding="utf-8", newline="") as file,
        ):
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows(self._rows())

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Yield what the log says of each step."""
        row: dict[str, Any] = {}
        for _, record in _records(self.folder / LOG):
            figures = _evaluation_columns(record)
            if record.get("event") == "step":
                figures = {name: record.get(name) for name in self._of_steps}
            if figures and row.get("step") not in (None, record["step"]):
                yield row
                row = {}
            if figures:
                row = {"step": record["step"], **row, **figures}
        if row:
            yield row

    def _writer(self, file: IO[str]) -> csv.DictWriter[str]:
        return csv.DictWriter(
            file, self._columns, extrasaction="ignore", lineterminator="\n"
        )

    def _show(self, step: int, figures: Mapping[str, Any]) -> None:
        """Give figures of a step to TensorBoard."""
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
                with suppress(OSError):  # of what is still to be written
                    file.close()
        self._lines = self._board = None


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the lines of a log, and what they say, less one that a kill has cut."""
    with suppress(FileNotFoundError), path.open("rb") as lines:
        for raw in lines:
            line = raw.decode("utf-8", "replace").rstrip("\n")
            try:
                record = json.loads(line)
                record["step"] = int(record["step"])
            except (ValueError, KeyError, TypeError):
                continue
            yield line, record


def _evaluation_columns(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of log.csv that an evaluation fills."""
    figures = record["figures"] if record.get("event") == "evaluation" else {}
    return {f"eval_{name}": value for name, value in figures.items()}


def _learning_rate(trainer: Trainer) -> float | None:
    """Return the rate of the first group of the last phase that this rank updates."""
    every = (updates.optimizer for updates in trainer.worker.variants.updates.values())
    last = [optimizer for optimizer in every if optimizer is not None][-1:]
    rate = last[0].param_groups[0].get("lr") if last else None
    return None if rate is None else float(rate)
