"""A flag for each choice of a compilation, for all commands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import Field
from functools import partial
from typing import Annotated, Any, get_type_hints

import typer

from gemsc.base.units import parse_bytes
from gemsc.cli.import_ import imported
from gemsc.errors import GemscError, UsageError, one_of
from gemsc.frontend import FRONTENDS
from gemsc.options import (
    AUTO,
    CHOICES,
    RANKS,
    CompileOptions,
    flag,
    text_of,
    typed,
)
from gemsc.planner.layout import PLACEMENTS
from gemsc.schedules import SCHEDULES

DEFAULTS = CompileOptions()
FIELDS = CompileOptions.__dataclass_fields__
HINTS = {**get_type_hints(CompileOptions), "shard_optimizer": bool}
KNOWN: dict[str, tuple[str, ...]] = {
    **CHOICES,
    "schedule": ("auto", *SCHEDULES),
    "frontend": tuple(FRONTENDS),
}
# What a plan is compared or simulated with; commands add their own.
OF_A_PLAN = (
    *("hardware", "schedule", "micro_batches", "placement", "balance", "precision"),
    *("tiles", "shards", "branches", "trunk", "whole", "attention"),
    *("shard", "shard_optimizer"),
)
# The groups in which help shows the flags; a command's own are under "Options".
PANELS = {
    "What to split": (
        *("ranks", "data", "tiles", "shards", "branches", "trunk", "whole"),
        *("per_device", "local_batchnorm", "fuse_halos", "overlap_halos"),
        *("attention",),
    ),
    "Stages and their schedule": (
        *("schedule", "micro_batches", "times", "chunks", "placement"),
        *("balance", "blocks", "cuts"),
    ),
    "Memory": ("device_memory", "recompute", "offload", "shard", "shard_optimizer"),
    "Kernels": ("precision", "memory_format", "torch_compile"),
    "Target machine": ("hardware", "profile", "device"),
    "Tracing": ("frontend", "check"),
}

Model = Annotated[
    str,
    typer.Argument(
        help="path/model.py, pkg.module:name, model.keras or model.onnx",
        callback=imported,
    ),
]
ModelOrProgram = Annotated[
    str,
    typer.Argument(
        help="model, as for compile, or program directory", callback=imported
    ),
]
Command = Callable[..., Any]


def takes_options(
    names: Iterable[str] | None = None, **defaults: Any
) -> Callable[[Command], Command]:
    """Give a command a flag for each of these options, in place of its `options`.

    All of them if no names are given; `defaults` are those of this command only. A
    command with `given` instead gets the values of those that were typed.
    """
    wanted = FIELDS.keys() if names is None else {*names}
    chosen = [field for name, field in FIELDS.items() if name in wanted]

    def decorate(command: Command) -> Command:
        parameters = inspect.signature(command, eval_str=True).parameters
        only_typed = "given" in parameters

        @functools.wraps(command)
        def with_flags(**others: Any) -> Any:
            values = {f.name: _read(f, others.pop(f.name)) for f in chosen}
            if only_typed:
                given = {k: value for k, value in values.items() if value is not None}
                return command(given=given, **others)
            return command(options=CompileOptions(**values), **others)

        shown: list[inspect.Parameter] = []
        for parameter in parameters.values():
            if parameter.name not in ("options", "given"):
                shown.append(parameter)
                continue
            for f in chosen:
                default = None if only_typed else defaults.get(f.name, f.default)
                shown.append(_parameter(f, default))
        with_flags.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {p.name: p.annotation for p in shown}
        return with_flags

    return decorate


def _parameter(field: Field[Any], default: Any) -> inspect.Parameter:
    """Return what typer makes the flag of."""
    kind: Any = bool if HINTS[field.name] is bool else str
    if default is None:
        kind |= None
    elif kind is str:
        default = text_of(default)
    words = (flag(field.name),) if field.default is False else ()
    about = field.metadata["help"]
    shown: bool | str = True
    if field.name == "ranks":
        shown = f"{RANKS} for each replica"
    if field.name == "placement":
        about += f": natural, auto, {', '.join(PLACEMENTS)}"
    (panel,) = (name for name, held in PANELS.items() if field.name in held)
    metavar = "|".join(KNOWN.get(field.name, ())) or None
    if _reader(field) in (_number, _count):
        metavar = "<int>|auto" if field.metadata["auto"] else "<int>"
    option = typer.Option(
        *words,
        help=about,
        rich_help_panel=panel,
        metavar=metavar,
        show_default=shown,
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=default,
        annotation=Annotated[kind, option],
    )


def _reader(field: Field[Any]) -> Callable[[str, str], Any] | None:
    """Return what reads a value; None for a text that is taken as it is."""
    if field.metadata["auto"]:
        return _count
    if field.metadata["unit"] == "bytes":
        return _bytes
    if choices := KNOWN.get(field.name):
        return partial(_choice, choices=choices)
    return READERS.get(HINTS[field.name])


def _read(field: Field[Any], value: Any) -> Any:
    reader = _reader(field)
    return value if reader is None or value is None else reader(value, flag(field.name))


def typed_flags(context: typer.Context) -> list[str]:
    """Return the flags that the user gave to the running command, as typed."""
    names = (name for name in FIELDS if is_typed(context, name))
    return [typed(name, context.params[name]) for name in names]


def is_typed(context: typer.Context, name: str) -> bool:
    """Whether a parameter of the running command stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _count(text: str, flag: str) -> int:
    if text == "auto":
        return AUTO
    count = _number(text, flag, "a whole number or auto")
    if count < 1:
        raise UsageError(
            f"{flag} is {text}", help=f"give {flag} a value of 1 or more, or auto"
        )
    return count


def _number(text: str, flag: str, what: str = "a whole number") -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"{flag} takes {what}, not '{text}'", help=f"write for example {flag} 2"
        ) from None


def _choice(text: str, flag: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise UsageError(f"{flag} does not take '{text}'", help=one_of(text, choices))
    return text


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, _words(text, flag)))
    except ValueError:
        raise UsageError(
            f"{flag} {text} is not a list of numbers", help=f"write {flag} 3,4,4,5"
        ) from None


def _words(text: str, flag: str) -> tuple[str, ...]:
    """Read words between commas; `off` is none."""
    words = (word.strip() for word in text.split(","))
    return () if text == "off" else tuple(filter(None, words))


def _bytes(text: str, flag: str) -> int:
    try:
        return parse_bytes(text)
    except GemscError as error:
        raise UsageError(f"{flag}: {error.message}", help=error.help) from None


READERS: dict[Any, Callable[[str, str], Any]] = {
    int: _number,
    int | None: _number,
    tuple[int, ...]: _numbers,
    tuple[str, ...]: _words,
}
