"""Everything about one GPU, in one command of at most a quarter of an hour.

python benchmarks/gpu.py [--only parity,speed/unet] [--device cuda|cpu] [--into FOLDER]
                         [--minutes 15] [--list]

A line for each check, `PASS name figure (limit)`, while they run; at the end FOLDER has
them as lines.json and as the Markdown table lines.md, with all other output in log.txt.
Each check is a process with a time limit of its own: one that hangs or crashes costs
its own line. Checks that measure no time run several at once, the others alone.

Without a GPU everything runs in tiny sizes on the CPU; the figures mean nothing then.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpu_checks import lines
from gpu_checks.lines import Line, Place

CPU_PATIENCE = 3  # times the limit that a GPU has
LEAST_SECONDS = 10.0  # to begin a check
LAST_WORDS = 100  # characters of what a check that fails says last


@dataclass(frozen=True)
class Check:
    """A check by name; `seconds` is its limit. What is timed runs `alone`."""

    name: str
    seconds: int
    run: Callable[[Place], Iterator[Line]]
    alone: bool = True


def checks() -> Iterator[Check]:
    """Yield all checks, in order; modules are imported by those who run them."""
    for case in (
        *("one stage", "one encoder", "1f1b", "zb-h1", "offload", "mast"),
        *("data", "tiles"),
    ):
        yield Check(f"parity/{case}", 100, partial(_parity, case), alone=False)
    for subject in ("resnet50", "unet", "encoder"):
        for mode in ("plain", "recompute", "offload"):
            run = partial(_memory, subject, mode)
            yield Check(f"memory/{subject} {mode}", 80, run, alone=False)
    for subject in ("resnet50", "unet", "encoder"):
        yield Check(f"speed/{subject}", 90, partial(_speed, subject))
    yield Check("precision", 60, _precision)
    yield Check("overlap", 90, _overlap)
    yield Check("transports", 60, _transports)
    yield Check("sums", 150, _sums)
    yield Check("devices", 150, _devices)
    for samples in (4, 32):
        yield Check(f"sharing/{samples}", 120, partial(_sharing, samples))


def _parity(case: str, place: Place) -> Iterator[Line]:
    from gpu_checks.parity import parity

    return parity(case, place)


def _memory(subject: str, mode: str, place: Place) -> Iterator[Line]:
    from gpu_checks.memory import memory

    return memory(subject, mode, place)


def _speed(subject: str, place: Place) -> Iterator[Line]:
    from gpu_checks.speed import speed

    return speed(subject, place)


def _precision(place: Place) -> Iterator[Line]:
    from gpu_checks.speed import precision

    return precision(place)


def _overlap(place: Place) -> Iterator[Line]:
    from gpu_checks.overlap import overlap

    return overlap(place)


def _transports(place: Place) -> Iterator[Line]:
    from gpu_checks.ranks import transports

    return transports(place)


def _sums(place: Place) -> Iterator[Line]:
    from gpu_checks.ranks import sums

    return sums(place)


def _devices(place: Place) -> Iterator[Line]:
    from gpu_checks.ranks import devices

    return devices(place)


def _sharing(samples: int, place: Place) -> Iterator[Line]:
    from gpu_checks.ranks import sharing

    return sharing(samples, place)


def wanted(names: str) -> list[Check]:
    """Return the checks whose name begins with one of some words."""
    given = [name.strip() for name in names.split(",") if name.strip()]
    known = [*checks()]
    for name in given:
        if not any(check.name.startswith(name) for check in known):
            raise SystemExit(f"no check '{name}': see --list")
    return [check for check in known if check.name.startswith(tuple(given) or "")]


class Report:
    """Runs checks in processes of their own and collects their lines."""

    def __init__(self, device: str, folder: Path, minutes: float) -> None:
        self.device = device
        self.folder = folder
        self.ends = time.monotonic() + 60 * minutes
        self.lines: list[Line] = []
        self._log = (folder / "log.txt").open("w", encoding="utf-8")

    def run(self, chosen: list[Check]) -> None:
        """Run all: those that need not be alone first, several at a time."""
        parallel = [check for check in chosen if not check.alone]
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 4)) as pool:
            for reported in pool.map(self._run, parallel):
                self._add(reported)
        for check in chosen:
            if check.alone:
                self._add(self._run(check))

    def _add(self, added: Iterable[Line]) -> None:
        for line in added:
            self.lines.append(line)
            print(lines.printed(line), flush=True)
        self.write()

    def write(self) -> None:
        """Write what has been found so far."""
        text = "".join(f"{lines.as_json(line)}\n" for line in self.lines)
        (self.folder / "lines.json").write_text(text)
        (self.folder / "lines.md").write_text(lines.table(self.lines))

    def _run(self, check: Check) -> list[Line]:
        """Return the lines of one check; the last one says how it failed, if so."""
        patience = CPU_PATIENCE if self.device == "cpu" else 1
        left = min(patience * check.seconds, self.ends - time.monotonic())
        if left < LEAST_SECONDS:
            return [lines.skipped(check.name, "no time left")]
        scratch = Path(tempfile.mkdtemp(prefix="gpu-"))
        try:
            code, said = self._process(check, scratch, left)
            path = scratch / "lines"
            texts = path.read_text().splitlines() if path.exists() else []
            reported = [lines.from_json(text) for text in texts]
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        self._log.write(f"== {check.name}\n{said}\n")
        self._log.flush()
        if code is None:
            limit = f"no end within {left:.0f} s"
            reported.append(lines.judged(check.name, False, limit, ""))
        elif code != 0:
            last = (said.strip().splitlines() or [""])[-1][:LAST_WORDS]
            reported.append(lines.judged(check.name, False, f"failed: {last}", ""))
        return reported

    def _process(
        self, check: Check, scratch: Path, seconds: float
    ) -> tuple[int | None, str]:
        """Return the exit code of a check, None after its time, and its words."""
        words = [sys.executable, __file__, "--device", self.device]
        words += ["--check", check.name, "--into", str(self.folder)]
        output = scratch / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*words, "--scratch", str(scratch)],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGKILL)  # mpirun ends with its parent
                process.wait()
        return code, output.read_text(errors="replace")


def run_check(name: str, device: str, scratch: Path, kept: Path) -> None:
    """Run one check in this process; write its lines as they come."""
    import torch

    place = Place(torch.device(device), device == "cpu", scratch, kept)
    if place.is_tiny:
        torch.set_num_threads(1)
    (check,) = (check for check in checks() if check.name == name)
    with (scratch / "lines").open("w", encoding="utf-8", buffering=1) as file:
        for line in check.run(place):
            prefix = name.split("/")[0]
            prefixed = Line(f"{prefix}: {line.name}", *_rest(line))
            file.write(f"{lines.as_json(prefixed)}\n")


def _rest(line: Line) -> tuple[str, str, str, dict[str, object]]:
    return line.verdict, line.figure, line.limit, line.numbers


def main() -> None:
    """Run what was asked for; the exit code is 1 if a line says FAIL."""
    parser = argparse.ArgumentParser(description="all checks of one GPU")
    parser.add_argument("--only", default="", help="beginnings of names")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--into", type=Path, default=Path("build/gpu"))
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--list", action="store_true", help="the names of all checks")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print(*(check.name for check in checks()), sep="\n")
        return
    if options.check is not None:
        run_check(options.check, options.device, options.scratch, options.into)
        return
    import torch

    chosen = wanted(options.only)
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise SystemExit("PyTorch finds no GPU here: --device cpu tries the script")
    device = "cuda" if has_gpu and options.device != "cpu" else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU, tiny sizes"
    print(f"{name}, torch {torch.__version__}, {len(chosen)} checks", flush=True)
    options.into.mkdir(parents=True, exist_ok=True)
    report = Report(device, options.into.absolute(), options.minutes)
    report.run(chosen)
    failed = sum(line.verdict == "FAIL" for line in report.lines)
    print(f"{failed} of {len(report.lines)} FAIL; lines in {options.into}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
