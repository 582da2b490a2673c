"""The reference of commands, operators and plan.toml, from the code that reads them.

A page asks for it by a comment: `<!-- reference: commands -->`, `plan`, `operators` or
`python`.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from typer.main import get_command

import gemsc
from gemsc.cli import make_app
from gemsc.ir.operators.calls import FUNCTIONS, LAYERS
from gemsc.ir.operators.table import HOW, OPERATORS
from gemsc.launch.start import run_parser
from gemsc.options import CompileOptions, flag
from gemsc.passes.shards.rules import OTHERS
from gemsc.plan import Plan
from gemsc.plan_tables import ENTRIES

MARK = re.compile(r"^<!-- reference: (\w+) -->$", re.MULTILINE)
Row = tuple[str, ...]
NUMBERS = {int: "N", float: "X", Path: "PATH"}


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Fill in what the page asks for."""
    return MARK.sub(lambda match: MAKERS[match[1]](), markdown)


def table(head: Row, rows: Sequence[Row]) -> str:
    """Return a table in Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(text: object) -> str:
    """Return text as code, which may be empty."""
    return f"`{text}`" if str(text) else ""


# commands


def commands() -> str:
    """Return a section for each command, in the order of `gemsc --help`."""
    app: Any = get_command(make_app())
    return "\n".join(command(name, cmd) for name, cmd in app.commands.items())


def command(name: str, cmd: Any) -> str:
    """Return what a command does, how it is called, and its options."""
    arguments = [p for p in cmd.params if p.param_type_name == "argument"]
    options = [p for p in cmd.params if p.param_type_name == "option"]
    options = [p for p in options if not p.hidden]
    words = [usage(p) for p in arguments]
    words += ["[OPTIONS]"] if options or name == "run" else []
    parts = [f"## gemsc {name}\n", f"{cmd.help}\n"]
    parts += [f"```text\ngemsc {' '.join((name, *words))}\n```\n"]
    head = ("option", "default", "")
    if arguments:
        known = [(code(p.name.upper()), said(p, name)) for p in arguments]
        parts.append(table(("argument", ""), known))
    if options:
        chosen = [(names(p), default(shown(p)), said(p, name)) for p in options]
        parts.append(table(head, chosen))
    for title, rows in parsed(run_parser()) if name == "run" else ():
        parts += [f"{title}:\n", table(head, rows)]
    return "\n".join(parts)


def usage(argument: Any) -> str:
    """Return `PROGRAM`, `[PROGRAM]` or `RUNS...`."""
    text = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return text if argument.required else f"[{text}]"


def names(option: Any) -> str:
    """Return an option's names and what follows them."""
    shown = ", ".join(code(name) for name in (*option.opts, *option.secondary_opts))
    if getattr(option, "is_flag", False):
        return shown
    if option.metavar:
        return f"{shown} {code(option.metavar.replace('<int>', 'N'))}"
    return f"{shown} {value(option.type_descriptor.annotation)}"


def value(kind: Any) -> str:
    """Return a word for what follows a flag."""
    inner = next(iter(get_args(kind)), kind)
    return code(NUMBERS.get(inner, "TEXT"))


def shown(option: Any) -> object:
    """Return the default of an option, or what help says in its place."""
    words = option.show_default
    return words if isinstance(words, str) else option.default


def default(setting: object) -> str:
    """Return a default, nothing where there is none."""
    if setting in (None, False, "") or setting == []:
        return ""
    return "on" if setting is True else code(setting)


def said(parameter: Any, command: str) -> str:
    """Return the help of an option.

    Raises:
        ValueError: it has none.
    """
    if not parameter.help:
        raise ValueError(f"gemsc {command}: {parameter.name} has no help")
    return escaped(parameter.help)


def escaped(text: str) -> str:
    """Return a help text as Markdown of one cell."""
    return re.sub(r"(?<![`\w-])(--[a-z][\w-]*)(?![^`]*`)", r"`\1`", text)


def parsed(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, Sequence[Row]]]:
    """Give the options of a parser, group by group."""
    for group in parser._action_groups:
        rows = [
            (_flag(action), default(action.default), escaped(action.help or ""))
            for action in group._group_actions
            if action.help != argparse.SUPPRESS
            and "--help" not in action.option_strings
        ]
        if rows:
            title = group.title or ""
            yield ("Training" if title == "options" else title.capitalize()), rows


def _flag(action: argparse.Action) -> str:
    words = ", ".join(code(name) for name in action.option_strings)
    if action.nargs == 0:
        return words
    given = action.metavar or action.dest.upper()
    if action.choices:
        given = ", ".join(map(str, action.choices))
    return f"{words} {code(f'[{given}]' if action.nargs == '?' else given)}"


# plan.toml


def plan() -> str:
    """Return the entries of each table of plan.toml."""
    return "\n".join(f"## {name}\n\n{text}" for name, text in tables(Plan))


def tables(kind: type, path: str = "") -> Iterator[tuple[str, str]]:
    """Give each table that a dataclass is written as, and its entries.

    Raises:
        KeyError: an entry has no docstring.
    """
    docs = docstrings(kind)
    hints = get_type_hints(kind)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    rows = [(code(key), words(hint), docs[key]) for key, hint in fields.items()]
    title = code(path) if path else "Before the tables"
    yield title, table(("entry", "type", ""), rows)
    for key, hint in fields.items():
        inner = next(iter(get_args(hint)), hint)
        name = ".".join(filter(None, (path.strip("[]"), key)))
        name = f"[{name}]" if get_origin(hint) is not list else f"[[{name}]]"
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            yield from tables(inner, name)
        elif not path and key in ENTRIES:
            inside = [(code(entry), text) for entry, text in ENTRIES[key].items()]
            yield code(name), table(("entry", ""), inside)
        elif not path and key == "options":
            yield code(name), table(("entry", "option", ""), [*options()])


def docstrings(kind: type) -> Mapping[str, str]:
    """Return the docstring below each field of a class, on one line."""
    path = Path(inspect.getfile(kind))
    module = griffe.visit(path.stem, filepath=path, code=path.read_text("utf-8"))
    return {
        key: " ".join(member.docstring.value.split())
        for key, member in module[kind.__name__].members.items()
        if member.docstring is not None
    }


def words(hint: Any) -> str:
    """Return what TOML calls a type."""
    known = {int: "integer", float: "number", str: "text", bool: "true or false"}
    if get_origin(hint) is list:
        return "list of " + re.sub(r"(?=$| of)", "s", words(get_args(hint)[0]), count=1)
    return known.get(hint, "table")


def options() -> Iterator[Row]:
    """Give the options of a compilation."""
    for field in dataclasses.fields(CompileOptions):
        text = escaped(field.metadata["help"])
        yield code(field.name), code(flag(field.name)), text


def python() -> str:
    """Return what mkdocstrings takes, for each public name: functions first."""
    names = sorted(gemsc.__all__, key=lambda name: (name[0].isupper(), name))
    return "\n\n".join(f"::: gemsc.{name}" for name in names)


# operators

WRITES = {
    **dict.fromkeys(("batch_norm", "instance_norm"), "running statistics"),
    **dict.fromkeys(("embedding", "embedding_bag"), "rows, with `max_norm`"),
}


def operators() -> str:
    """Return the table of operators: names, and how tiles and shards compute them."""
    named, rows = names_of_kinds(), dict[Row, list[str]]()
    for kind, row in OPERATORS.items():
        tiles = HOW[row.how] if row.how else "as a whole"
        if not row.how and kind in ("chunk", "split", "unbind"):
            tiles = "as the view that it is"
        shards = code(row.equation.text) if row.equation is not None else ""
        if not shards:
            shards = "by its arguments" if kind in OTHERS else "whole"
        writes = WRITES[kind] if row.writes else ""
        called = [code(name) for name in named.get(kind, (kind,))]
        rows.setdefault((tiles, shards, writes), []).extend(called)
    lines = [(", ".join(names), *cells) for cells, names in rows.items()]
    return table(("operation", "on tiles", "on shards", "writes"), lines)


def names_of_kinds() -> dict[str, tuple[str, ...]]:
    """Return the layers of each kind, or its functions where there are none."""
    layers: dict[str, dict[str, None]] = {}
    functions: dict[str, dict[str, None]] = {}
    for cls, (kind, _) in LAYERS.items():
        name = re.sub(r"[123]d$", "Nd", cls.__name__)
        layers.setdefault(kind.partition(":")[0], {})[name] = None
    for function, (kind, _) in FUNCTIONS.items():
        name = re.sub(r"[123]d(?=$|_)", "Nd", function.__name__)
        functions.setdefault(kind.partition(":")[0], {})[name] = None
    kinds = layers.keys() | functions.keys()
    return {k: tuple(layers.get(k) or functions[k]) for k in kinds}


MAKERS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "operators": operators,
    "plan": plan,
    "python": python,
}
