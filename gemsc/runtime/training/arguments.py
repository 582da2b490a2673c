"""The options of a compiled program: `gemsc run PROGRAM --epochs 4 --save folder`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, TypeVar

from gemsc.base.cores import BINDINGS
from gemsc.base.units import parse_seconds
from gemsc.errors import GemscError, UsageError
from gemsc.runtime.checkpoint.folder import LATEST

DEFAULT_TIMEOUT = 600.0  # seconds
# what a program has been compiled for
COMPILED = "ranks", "data", "schedule", "micro-batches", "tiles", "shards"
LAST = Path("\0")  # `--resume` without a folder: nobody can type this one


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ours."""

    @property
    def names(self) -> list[str]:
        """The options that help lists, without their dashes."""
        return [
            flag.removeprefix("--")
            for flag, action in self._option_string_actions.items()
            if flag.startswith("--")
            and action.help is not argparse.SUPPRESS
            and flag != "--help"
        ]

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong."""
        help = "`gemsc run PROGRAM --help` lists the options"
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0]
        name = unknown.partition("=")[0]
        if name.removeprefix("--") in COMPILED:
            help = f"{name} is an option of gemsc compile: compile the model again"
        elif close := get_close_matches(name, self._option_string_actions, n=1):
            help = f"did you mean {close[0]}? {help}"
        raise UsageError(message, help=help)


def parse_arguments(
    arguments: Sequence[str] | None,
    parents: Sequence[argparse.ArgumentParser] = (),
) -> argparse.Namespace:
    """Read the options of a program; `--help` also lists those of `parents`.

    Raises:
        GemscError: an option is unknown or wrong, or names a folder that cannot be, or
            a GPU where there is none.
    """
    parser = make_parser(parents)
    options = parser.parse_args(arguments)
    options.typed = [*(sys.argv[1:] if arguments is None else arguments)]
    if arguments is None:  # a parser in the user's file is not meant
        del sys.argv[1:]
    given = options.resume or [None]
    options.resume, options.goes_on = given[-1], given[-1] == LAST
    options.source = next((place for place in reversed(given) if place != LAST), None)
    if options.save is not None and (problem := _why_not_in(options.save)):
        from_there = f" and --resume {options.save}" if options.goes_on else ""
        raise GemscError(
            f"argument --save: {problem}",
            help=f"choose another folder with --save{from_there}",
        )
    marks_best = options.best is not None and options.patience is None
    if marks_best and options.checkpoint_every == "never":
        raise GemscError(
            "--best marks a checkpoint, and --checkpoint-every never saves none",
            help="leave out one of the two",
        )
    if options.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise GemscError(
            "--tensorboard: TensorBoard is not installed",
            help="pip install tensorboard",
        )
    if options.device == "cuda":
        from gemsc.runtime.process.device import require_gpu  # loads PyTorch: a second

        require_gpu()
    return options


def make_parser(parents: Sequence[argparse.ArgumentParser] = ()) -> Parser:
    """Return what reads the options of a program."""
    parser = Parser(
        prog="gemsc run PROGRAM",
        allow_abbrev=False,  # `--epoch` would be `--epochs` until there is another
        description="Train a program that gemsc compiled.",
        epilog="Epochs and steps count from the first start, also after --resume.",
        parents=parents,
    )
    parser.add_argument(
        "--epochs", type=_count, default=1, help="passes over the data (default: 1)"
    )
    parser.add_argument("--steps", type=_count, help="stop after this many steps")
    parser.add_argument(
        "--seed",
        type=_seed,
        help="seed for sample order, crops, dropout (default: 0, or the checkpoint's)",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FOLDER",
        help="run folder, for log, curves and checkpoints (default: PROGRAM/runs/1, "
        "2, ...)",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        action="append",
        nargs="?",
        const=LAST,
        metavar="FOLDER",
        help="resume from a checkpoint (default: the latest in the run's own folder; "
        "`--resume FOLDER --resume`: that, or where there is none yet, FOLDER)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the run in the --save folder"
    )
    parser.add_argument(
        "--tensorboard",
        action="store_true",
        help="also write the log for TensorBoard, into FOLDER/tensorboard",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=_cadence,
        default="epoch",
        metavar="WHEN",
        help="when to save: epoch, 10 (steps), 10min or never (default: epoch)",
    )
    parser.add_argument(
        "--checkpoint-async",
        action="store_true",
        help="keep training while a checkpoint is written",
    )
    parser.add_argument(
        "--keep", type=_count, default=3, help="recent checkpoints to keep (default: 3)"
    )
    parser.add_argument(
        "--best",
        type=_rule,
        metavar="NAME",
        help="keep the checkpoint with the best figure: loss, or dice:max of metrics()",
    )
    parser.add_argument(
        "--patience",
        type=_count,
        help="stop after this many evaluations without improvement",
    )
    parser.add_argument(
        "--ema",
        type=_share,
        metavar="DECAY",
        help="evaluate a moving average of the weights, for example 0.999",
    )
    parser.add_argument(
        "--workers", type=_number, default=0, help="data loader processes per rank"
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="where to compute (auto: on GPUs, if there are any)",
    )
    parser.add_argument(
        "--engine",
        choices=["mpi", "torch"],
        help="communication library: MPI (default) or torch.distributed; torchrun "
        "implies the latter",
    )
    parser.add_argument(
        "--bind",
        choices=BINDINGS,
        default="auto",
        help="bind each rank to a NUMA domain, to cores of its own, or as the launcher "
        "does (auto: numa, if CPUs compute and the ranks fill several domains evenly)",
    )
    parser.add_argument(
        "--per-device",
        type=_count,
        metavar="N",
        help="ranks that share each GPU, through MPS if available (default: as "
        "compiled)",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "float64"],
        default="float32",
        help="dtype of weights, samples and results (default: float32)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a constant of the model's file that the model itself does not use",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="same bits in every run, also on GPUs; stop at operations without support",
    )
    parser.add_argument(
        "--last-batch",
        choices=["drop", "train"],
        default="drop",
        help="drop samples that do not fill a batch (default), or train on them",
    )
    parser.add_argument(
        "--accumulate",
        type=_count,
        default=1,
        help="steps to average for one update (default: 1)",
    )
    parser.add_argument(
        "--clip-norm", type=_bound, help="upper bound for the norm of all gradients"
    )
    parser.add_argument(
        "--timeout",
        type=_limit,
        default=DEFAULT_TIMEOUT,
        metavar="TIME",
        help="stop with a report if no rank makes progress for this long: 60s, never "
        "(default: 10min)",
    )
    parser.add_argument(
        "--on-nonfinite",
        choices=["stop", "skip", "warn"],
        default="stop",
        help="after a loss or gradient that is NaN or infinite: stop (default), skip "
        "the update, or warn and continue",
    )
    parser.add_argument(
        "--detect-anomaly",
        action="store_true",
        help="name the line that first computes NaN or infinity; slow",
    )
    for name in ("--verify-into", "--record-into", "--time-into", "--record-run"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    return parser


def _why_not_in(folder: Path) -> str:
    """Return why no files can be made in a folder, which may be made itself; or ""."""
    if folder.exists() and not folder.is_dir():
        return f"{folder} is a file, not a folder"
    if (link := folder / LATEST).is_dir() and not link.is_symlink():
        return f"{link} is a folder, not a link: {folder} was copied without its links"
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    try:
        tempfile.TemporaryDirectory(dir=place).cleanup()
    except OSError as error:
        return f"nothing can be written in {place}: {error.strerror}"
    return ""


def _limit(text: str) -> float:
    """Return seconds, 0 for never."""
    try:
        return 0.0 if text == "never" else parse_seconds(text)
    except GemscError as error:
        help = "write for example 60s, 10min or never"
        raise argparse.ArgumentTypeError(f"{error.message}: {help}") from None


def _cadence(text: str) -> int | float | str:
    """Return steps as an integer, seconds as a float, "epoch" or "never"."""
    if text in ("epoch", "never"):
        return text
    if text.isdecimal():
        return _count(text)
    try:
        return parse_seconds(text)
    except GemscError:
        help = "write for example 100 (steps), 10min, epoch or never"
        raise argparse.ArgumentTypeError(
            f"'{text}' is not an interval: {help}"
        ) from None


def _rule(text: str) -> str:
    name, _, kind = text.partition(":")
    if not name or kind not in ("", "min", "max"):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME, NAME:min or NAME:max")
    return text


def _share(text: str) -> float:
    return _checked(text, float, lambda n: 0 <= n < 1, "a number from 0 up to 1")


def _bound(text: str) -> float:
    """Return a bound: a negative one would turn gradients around, NaN is none."""
    return _checked(text, float, lambda n: n > 0, "a number above 0")


def _seed(text: str) -> int:
    """Return what torch takes."""
    what = "a whole number from -2^63 up to 2^64"
    return _checked(text, int, lambda n: -(2**63) <= n < 2**64, what)


Number = TypeVar("Number", int, float)


def _checked(
    text: str,
    kind: Callable[[str], Number],
    is_right: Callable[[Number], bool],
    what: str,
) -> Number:
    with suppress(ValueError):
        if is_right(value := kind(text)):
            return value
    raise argparse.ArgumentTypeError(f"'{text}' is not {what}")


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0 on")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def to_resume(options: argparse.Namespace) -> list[str]:
    """Return the options of a run, with those that let it go on."""
    words = [word for word in options.typed if word != "--overwrite"]
    while "--resume" in words:
        at = words.index("--resume")
        has_folder = at + 1 < len(words) and not words[at + 1].startswith("-")
        del words[at : at + 1 + has_folder]
    if not any(word.split("=")[0] == "--save" for word in words):
        words += ["--save", str(options.save)]
    return [*words, "--resume"]
