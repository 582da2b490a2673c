"""The commands by name, each loaded when it is called; exit codes; project settings.

Options that are always the same stand in gemsc.toml, or in pyproject.toml:

    [compile]
    ranks = 4
    micro-batches = 8

    [run]
    epochs = 20
"""

from __future__ import annotations

import ast
import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.main import get_command

from gemsc.base.process import MALLOC_SETTING
from gemsc.base.toml_file import TomlFile
from gemsc.cli.terminal import say
from gemsc.errors import GemscError, InternalError, UsageError, one_of

FULL = (errno.ENOSPC, errno.EDQUOT)
INTERRUPTED = 130  # exit code, as after any SIGINT
# typer keeps click to itself: the base class of all errors in a command line
Unreadable = cast(type[Exception], typer.BadParameter.__base__)
# what follows the directory is the program's
PASSES_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}

COMMANDS = {
    "compile": "gemsc.cli.compile",
    "plan": "gemsc.cli.compile",
    "simulate": "gemsc.cli.simulate",
    "run": "gemsc.cli.run",
    "export": "gemsc.cli.export",
    "predict": "gemsc.cli.predict",
    "compare": "gemsc.cli.run",
    "verify": "gemsc.cli.verify",
    "show": "gemsc.cli.show",
    "graph": "gemsc.cli.show",
    "timeline": "gemsc.cli.show",
    "profile": "gemsc.cli.profile",
    "import": "gemsc.cli.import_",
    "doctor": "gemsc.cli.doctor",
}
COMPLETES = "_GEMSC_COMPLETE"  # set by the shell, as typer tells it to
TIMES = {"--calibrate", "--profile"}  # commands with these flags measure
SETTINGS = {"run": PASSES_ON, "verify": {"ignore_unknown_options": True}}


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"gemsc {version('gemsc')}")  # noqa: T201
        raise typer.Exit


def _options(
    shown: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version.",
            is_eager=True,
            callback=_show_version,
        ),
    ] = False,
) -> None:
    """Stand before the commands: with it there is a word for each, even for one."""


def make_app(names: Iterable[str] = COMMANDS, *, loaded: bool = True) -> typer.Typer:
    """Return the command line with these commands; no others are loaded.

    Those that are not `loaded` have names and summaries: enough to list them.
    """
    app = typer.Typer(
        help="Split a PyTorch model over MPI ranks and train it exactly.",
        add_completion=True,
        pretty_exceptions_enable=False,
        callback=_options,
    )
    for name in names:
        if loaded:
            command = getattr(import_module(COMMANDS[name]), f"{name}_command")
        else:
            command = _summary(name)
        app.command(name, context_settings=SETTINGS.get(name))(command)
    return app


def _summary(name: str) -> Callable[[], None]:
    """Return a command that does nothing, described as the real one is in its file."""

    def nothing() -> None: ...

    file = Path(__file__).with_name(COMMANDS[name].rpartition(".")[2] + ".py")
    for part in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(part, ast.FunctionDef) and part.name == f"{name}_command":
            nothing.__doc__ = ast.get_docstring(part)
    return nothing


def _app_for(words: list[str]) -> typer.Typer:
    """Return the command line with what these words need: torch takes seconds."""
    if COMPLETES in os.environ:  # the shell asks what the last word may become
        words = os.environ.get("COMP_WORDS", "").split()[1:]
        if len(words) < 2:
            return make_app(loaded=False)
    if words[0] in COMMANDS:
        return make_app(words[:1])
    return make_app(loaded=False)


def _options_of(app: typer.Typer, name: str) -> dict[str, Any]:
    """Return the options of a command by their flags, `--no-check` among them."""
    commands: Any = get_command(app)
    command = commands.commands.get(name)
    return {
        flag: parameter
        for parameter in (command.params if command else ())
        for flag in (*parameter.opts, *parameter.secondary_opts)
        if parameter.param_type_name == "option"
    }


def _defaults(app: typer.Typer, words: list[str]) -> dict[str, dict[str, Any]]:
    """Return what this folder's settings give `compile`, as its parameters."""
    if words[0] != "compile" or "--help" in words:
        return {}
    options = {
        flag.removeprefix("--"): parameter
        for flag, parameter in _options_of(app, "compile").items()
        if flag.startswith("--") and flag in parameter.opts
    }
    defaults: dict[str, Any] = {}
    for name, value in read_settings("compile", options).items():
        parameter = options[name]
        if isinstance(value, list) and not parameter.multiple:
            defaults[parameter.name] = value[-1]
        else:
            defaults[parameter.name] = value
    return {"compile": defaults}


def main(*, settings: bool = True) -> None:
    """Run the command: exit code 1 for the user's errors, 2 in options, 70 for ours.

    Without `settings`, what the folder's gemsc.toml says has no effect.
    """
    _open_streams()
    # torch would print a traceback of its own for every shape that does not fit
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    words = sys.argv[2 if sys.argv[1:2] == ["--"] else 1 :] or ["--help"]
    if TIMES.intersection(words) and "GLIBC_TUNABLES" not in os.environ:
        # glibc reads it when a process starts, and what is timed without it is slower
        setting = os.environ | {"GLIBC_TUNABLES": MALLOC_SETTING}
        os.execve(sys.executable, [sys.executable, *sys.argv], setting)
    del sys.argv[1:]  # a parser in the user's file is not meant
    try:
        _check_words(words)
        app = _app_for(words)
        _check_values(app, words)
        defaults = _defaults(app, words) if settings else {}
        sys.exit(app(words, standalone_mode=False, default_map=defaults))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    except Unreadable as error:
        _fail(_in_our_words(error))
    except GemscError as error:
        _fail(error)
    except OSError as error:
        why, path = (error.strerror or type(error).__name__).lower(), error.filename
        why = why if path is None else f"{path}: {why}"
        if error.errno in FULL:
            _fail(GemscError(why, help="free space there, or name another folder"))
        if path is None:
            raise
        _fail(GemscError(why, help="give a path that can be used"))
    except InternalError as error:
        notes = "".join(f"\nnote: {note}" for note in getattr(error, "__notes__", ()))
        _fail_by_a_bug(f"{error}{notes}")
    except Exception:
        say(traceback.format_exc().rstrip())
        _fail_by_a_bug("see above")


def _open_streams() -> None:
    """Let what the caller has closed lead nowhere: a file would get its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(number, True)
            mode = "w" if number else "r"
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _check_words(words: Iterable[str]) -> None:
    """Refuse what cannot be printed, or written to plan.toml: it is not UTF-8.

    Raises:
        GemscError: names the first such argument.
    """
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise GemscError(
                f"the argument {word!a} is not UTF-8 text",
                help="rename the file, or type the name again",
            )


def _check_values(app: typer.Typer, words: list[str]) -> None:
    """Refuse an option in place of a value: `--offload --overwrite`.

    Raises:
        UsageError: names the option that has none.
    """
    options = _options_of(app, words[0])
    for word, value in pairwise(words):
        if word in options and not options[word].is_flag and value in options:
            raise UsageError(
                f"{word} has no value: {value} is an option",
                help=f"{word}: {options[word].help}",
            )


def _fail(error: GemscError) -> NoReturn:
    say(str(error))
    sys.exit(2 if isinstance(error, UsageError) else 1)


def _fail_by_a_bug(text: str) -> NoReturn:
    say(f"internal error: {text}\nhelp: this is a bug in gemsc; please report it")
    sys.exit(70)


def _in_our_words(error: Any) -> UsageError:
    """Return typer's error about the command line as one of ours."""
    command = error.ctx.command_path if error.ctx else "gemsc"
    message = error.format_message().rstrip(".")
    return UsageError(message[:1].lower() + message[1:], help=f"see {command} --help")


SET_BY_FILE = ("compile", "run")  # commands
SETTINGS_FILES = {
    "gemsc.toml": (),
    "pyproject.toml": ("tool", "gemsc"),
}  # first come, and where


def read_settings(command: str, known: Collection[str]) -> dict[str, bool | list[str]]:
    """Return the options of a command that this folder gives, by name: `micro-batches`.

    A value is true or false, or words. Says which file they are from.

    Raises:
        GemscError: the file is no TOML, or has what the command does not; at its line.
    """
    for name, tables in SETTINGS_FILES.items():
        if not Path(name).is_file():
            continue
        file = TomlFile.read(
            Path(name), what="settings file", advice="see `gemsc compile --help`"
        )
        entries: Any = file.entries
        for table in tables:
            entries = entries.get(table, {}) if isinstance(entries, dict) else {}
        if entries:
            return _settings_of(file, tables, entries, command, known)
    return {}


def _settings_of(
    file: TomlFile,
    tables: tuple[str, ...],
    entries: Any,
    command: str,
    known: Collection[str],
) -> dict[str, bool | list[str]]:
    heads = [f"[{'.'.join((*tables, name))}]" for name in SET_BY_FILE]
    for name, table in entries.items():
        if name not in SET_BY_FILE or not isinstance(table, dict):
            raise file.error(
                (*tables, name),
                f"'{name}' is not a table of settings",
                help=f"write options below {' or '.join(heads)}",
            )
    settings = {}
    for name, value in entries.get(command, {}).items():
        option = name.replace("_", "-")
        if option not in known:
            raise file.error(
                (*tables, command, name),
                f"gemsc {command} has no option '{name}'",
                help=one_of(option, known),
            )
        settings[option] = value if isinstance(value, bool) else _words(value)
    if settings:
        shown = (f"{option}={_shown(value)}" for option, value in settings.items())
        say(f"settings from {file.path}: {', '.join(shown)}")
    return settings


def _shown(value: bool | list[str]) -> str:
    return str(value).lower() if isinstance(value, bool) else " ".join(value)


def _words(value: Any) -> list[str]:
    """Return the words of a value: `WIDTH=128` of a table, "3,4" of a list."""
    if isinstance(value, dict):
        return [f"{name}={entry}" for name, entry in value.items()]
    return [",".join(map(str, value)) if isinstance(value, list) else str(value)]
