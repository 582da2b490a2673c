"""The flags that decide a compilation: each stands here once, for all commands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from gemsc.base.units import parse_bytes
from gemsc.errors import GemscError
from gemsc.frontend import FRONTENDS
from gemsc.options import AUTO, BALANCES, CompileOptions
from gemsc.planner.layout import PLACEMENTS
from gemsc.schedules import SCHEDULES

__all__ = ["DEFAULTS", "Model", "takes_options", "typed_flags"]

DEFAULTS = CompileOptions()

Model = Annotated[str, typer.Argument(help="path/model.py, or pkg.module:name")]
Command = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class _Flag:
    """A flag of the command line; `read` makes its value that of `CompileOptions`."""

    help: str
    default: Any
    kind: Any = str
    words: tuple[str, ...] = ()
    read: Callable[[Any], Any] = lambda value: value

    def parameter(self, name: str, default: Any) -> inspect.Parameter:
        """Return what typer makes the flag of."""
        option = typer.Option(*self.words, help=self.help)
        return inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=default,
            annotation=Annotated[self.kind, option],
        )


def takes_options(
    names: Iterable[str] | None = None, **defaults: Any
) -> Callable[[Command], Command]:
    """Give a command a flag for each of these options, in place of its `options`.

    All of them if no names are given; `defaults` are those of this command only.
    """
    chosen = {name: FLAGS[name] for name in names or FLAGS}

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_flags(**given: Any) -> None:
            read = {name: flag.read(given.pop(name)) for name, flag in chosen.items()}
            command(options=CompileOptions(**read), **given)

        shown: list[inspect.Parameter] = []
        for own in inspect.signature(command, eval_str=True).parameters.values():
            if own.name != "options":
                shown.append(own)
                continue
            for name, flag in chosen.items():
                shown.append(flag.parameter(name, defaults.get(name, flag.default)))
        with_flags.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {each.name: each.annotation for each in shown}
        return with_flags

    return decorate


def typed_flags(context: typer.Context) -> list[str]:
    """Return the flags that the user gave to the running command, as typed."""
    words = []
    for name in FLAGS:
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        flag, value = f"--{name.replace('_', '-')}", context.params[name]
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words.append(f"{flag} {value}")
    return words


def _count(text: str, flag: str) -> int:
    if text == "auto":
        return AUTO
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise GemscError(
            f"{flag} is {text}", help=f"give {flag} a value of 1 or more, or auto"
        )
    return count


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise GemscError(
            f"--blocks {text} is not a list of numbers", help="write --blocks 3,4,4,5"
        ) from None


def _names(text: str) -> tuple[str, ...]:
    """Read words between commas; `off` is none."""
    words = (word.strip() for word in text.split(","))
    return () if text == "off" else tuple(filter(None, words))


def _bytes(text: str | None) -> int | None:
    return parse_bytes(text) if text else None


FLAGS = {
    "ranks": _Flag(
        kind=int,
        help="processes that hold one replica of the model",
        default=DEFAULTS.ranks,
    ),
    "data": _Flag(
        help="data-parallel replicas, or auto",
        default=str(DEFAULTS.data),
        read=functools.partial(_count, flag="--data"),
    ),
    "schedule": _Flag(help=", ".join(("auto", *SCHEDULES)), default=DEFAULTS.schedule),
    "micro_batches": _Flag(
        help="micro-batches (of example_inputs()) in one step, or auto",
        default=str(DEFAULTS.micro_batches),
        read=functools.partial(_count, flag="--micro-batches"),
    ),
    "times": _Flag(
        kind=int | None,
        help="master: pairs of runs in one step",
        default=DEFAULTS.times,
    ),
    "chunks": _Flag(
        kind=int, help="looped placement: stages on each rank", default=DEFAULTS.chunks
    ),
    "balance": _Flag(help=", ".join(BALANCES), default=DEFAULTS.balance),
    "blocks": _Flag(
        help="explicit: blocks of each stage, 3,4,4,5", default="", read=_numbers
    ),
    "cuts": _Flag(
        help="explicit: modules at which the later stages begin",
        default="",
        read=_names,
    ),
    "placement": _Flag(
        help=", ".join(("natural", "auto", *PLACEMENTS)), default=DEFAULTS.placement
    ),
    "frontend": _Flag(help=", ".join(FRONTENDS), default=DEFAULTS.frontend),
    "device_memory": _Flag(
        kind=str | None,
        help="memory limit of each rank, for example 16GiB",
        default=None,
        read=_bytes,
    ),
    "hardware": _Flag(
        help="machine to plan for: a shipped one, or a .toml file",
        default=DEFAULTS.hardware,
    ),
    "profile": _Flag(
        kind=bool,
        help="time the model's blocks on this machine",
        default=DEFAULTS.profile,
    ),
    "recompute": _Flag(
        help="off, all, auto or blocks to recompute in the backward",
        default="off",
        read=_names,
    ),
    "offload": _Flag(
        help="off, auto or blocks whose activations wait on the host",
        default="off",
        read=_names,
    ),
    "check": _Flag(
        kind=bool,
        help="compare the traced graph with the model",
        default=DEFAULTS.check,
    ),
    "tiles": _Flag(
        help="split images over ranks: off, auto, 2x2, 4x1, 2x2x2, 2x2,2x1",
        default="",
        read=_names,
    ),
    "local_batchnorm": _Flag(
        kind=bool,
        words=("--local-batchnorm",),
        help="BatchNorm with each tile's own statistics: cheaper, not exact",
        default=DEFAULTS.local_batchnorm,
    ),
    "fuse_halos": _Flag(
        kind=int,
        help="most layers that share one wide halo; 0: none do",
        default=DEFAULTS.fuse_halos,
    ),
    "overlap_halos": _Flag(
        kind=bool,
        help="convolve a tile while its halo travels",
        default=DEFAULTS.overlap_halos,
    ),
}
