"""Options of a project that are typed once: gemsc.toml, or pyproject.toml.

[compile]
ranks = 4
micro-batches = 8

[run]
epochs = 20
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from gemsc.base.toml_file import TomlFile
from gemsc.cli.terminal import say
from gemsc.errors import one_of

COMMANDS = ("compile", "run")
FILES = {"gemsc.toml": (), "pyproject.toml": ("tool", "gemsc")}  # first come, and where


def read_settings(command: str, known: Collection[str]) -> dict[str, bool | list[str]]:
    """Return the options of a command that this folder gives, by name: `micro-batches`.

    A value is true or false, or words. Says which file they are from.

    Raises:
        GemscError: the file is no TOML, or has what the command does not; at its line.
    """
    for name, tables in FILES.items():
        if not Path(name).is_file():
            continue
        file = TomlFile.read(
            Path(name), what="settings file", advice="see `gemsc compile --help`"
        )
        entries: Any = file.entries
        for table in tables:
            entries = entries.get(table, {}) if isinstance(entries, dict) else {}
        if entries:
            return _of_command(file, tables, entries, command, known)
    return {}


def _of_command(
    file: TomlFile,
    tables: tuple[str, ...],
    entries: Any,
    command: str,
    known: Collection[str],
) -> dict[str, bool | list[str]]:
    heads = [f"[{'.'.join((*tables, name))}]" for name in COMMANDS]
    for name, table in entries.items():
        if name not in COMMANDS or not isinstance(table, dict):
            raise file.error(
                (*tables, name),
                f"'{name}' is no table of settings",
                help=f"write options below {' or '.join(heads)}",
            )
    found = {}
    for name, value in entries.get(command, {}).items():
        option = name.replace("_", "-")
        if option not in known:
            raise file.error(
                (*tables, command, name),
                f"gemsc {command} has no option '{name}'",
                help=one_of(option, known),
            )
        found[option] = value if isinstance(value, bool) else _words(value)
    if found:
        shown = (f"{option}={_shown(value)}" for option, value in found.items())
        say(f"settings from {file.path}: {', '.join(shown)}")
    return found


def _shown(value: bool | list[str]) -> str:
    return str(value).lower() if isinstance(value, bool) else " ".join(value)


def _words(value: Any) -> list[str]:
    """Return the words of a value: `WIDTH=128` of a table, "3,4" of a list."""
    if isinstance(value, dict):
        return [f"{name}={each}" for name, each in value.items()]
    return [",".join(map(str, value)) if isinstance(value, list) else str(value)]
