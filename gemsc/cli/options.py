"""A flag for each choice of a compilation, for all commands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import Field, fields
from typing import Annotated, Any, get_type_hints

import typer

from gemsc.base.units import parse_bytes
from gemsc.cli.imported import imported
from gemsc.errors import GemscError
from gemsc.frontend import FRONTENDS
from gemsc.options import (
    AUTO,
    BALANCES,
    MEMORY_FORMATS,
    PRECISIONS,
    TRUNKS,
    CompileOptions,
    flag,
    text_of,
    typed,
)
from gemsc.planner.layout import PLACEMENTS
from gemsc.schedules import SCHEDULES

__all__ = ["DEFAULTS", "Model", "ModelOrProgram", "takes_options", "typed_flags"]

DEFAULTS = CompileOptions()
FIELDS = {field.name: field for field in fields(CompileOptions)}
HINTS = get_type_hints(CompileOptions)
NAMES = {
    "schedule": ("auto", *SCHEDULES),
    "balance": BALANCES,
    "placement": ("natural", "auto", *PLACEMENTS),
    "frontend": tuple(FRONTENDS),
    "precision": PRECISIONS,
    "memory_format": MEMORY_FORMATS,
    "trunk": TRUNKS,
}

Model = Annotated[
    str,
    typer.Argument(
        help="path/model.py, pkg.module:name, model.keras or model.onnx",
        callback=imported,
    ),
]
ModelOrProgram = Annotated[
    str, typer.Argument(help="a model, or a program directory", callback=imported)
]
Command = Callable[..., None]


def takes_options(
    names: Iterable[str] | None = None, **defaults: Any
) -> Callable[[Command], Command]:
    """Give a command a flag for each of these options, in place of its `options`.

    All of them if no names are given; `defaults` are those of this command only. A
    command with `given` instead gets the values of those that were typed.
    """
    chosen = [FIELDS[name] for name in names or FIELDS]

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters
        only_typed = "given" in own

        @functools.wraps(command)
        def with_flags(**others: Any) -> None:
            values = {f.name: _read(f, others.pop(f.name)) for f in chosen}
            if only_typed:
                given = {k: value for k, value in values.items() if value is not None}
                command(given=given, **others)
            else:
                command(options=CompileOptions(**values), **others)

        shown: list[inspect.Parameter] = []
        for parameter in own.values():
            if parameter.name not in ("options", "given"):
                shown.append(parameter)
                continue
            for f in chosen:
                default = None if only_typed else defaults.get(f.name, f.default)
                shown.append(_parameter(f, default))
        with_flags.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {each.name: each.annotation for each in shown}
        return with_flags

    return decorate


def _parameter(field: Field[Any], default: Any) -> inspect.Parameter:
    """Return what typer makes the flag of."""
    kind = HINTS[field.name] if _reader(field) is None else str
    if default is None:
        kind |= None
    elif kind is str:
        default = text_of(default)
    words = (flag(field.name),) if field.default is False else ()
    names = ", ".join(NAMES.get(field.name, ()))
    about = ": ".join(filter(None, (field.metadata["help"], names)))
    option = typer.Option(*words, help=about)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=default,
        annotation=Annotated[kind, option],
    )


def _reader(field: Field[Any]) -> Callable[[str, str], Any] | None:
    """Return what reads a value that is more than typer's text or number."""
    if field.metadata["auto"]:
        return _count
    if field.metadata["unit"] == "bytes":
        return _bytes
    return {tuple[int, ...]: _numbers, tuple[str, ...]: _words}.get(HINTS[field.name])


def _read(field: Field[Any], value: Any) -> Any:
    reader = _reader(field)
    return value if reader is None or value is None else reader(value, flag(field.name))


def typed_flags(context: typer.Context) -> list[str]:
    """Return the flags that the user gave to the running command, as typed."""
    words = []
    for name in FIELDS:
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        words.append(typed(name, context.params[name]))
    return words


def _count(text: str, flag: str) -> int:
    if text == "auto":
        return AUTO
    count = int(text) if text.isdecimal() else 0
    if count < 1:
        raise GemscError(
            f"{flag} is {text}", help=f"give {flag} a value of 1 or more, or auto"
        )
    return count


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, _words(text, flag)))
    except ValueError:
        raise GemscError(
            f"{flag} {text} is not a list of numbers", help=f"write {flag} 3,4,4,5"
        ) from None


def _words(text: str, flag: str) -> tuple[str, ...]:
    """Read words between commas; `off` is none."""
    words = (word.strip() for word in text.split(","))
    return () if text == "off" else tuple(filter(None, words))


def _bytes(text: str, flag: str) -> int:
    return parse_bytes(text)
