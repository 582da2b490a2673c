"""The commands by name, and the exit code of each kind of error."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any, NoReturn, cast

import typer

from gemsc.cli.compile import compile_command, plan_command
from gemsc.cli.profile import profile_command
from gemsc.cli.run import run_command, verify_command
from gemsc.cli.show import graph_command, show_command, timeline_command
from gemsc.cli.simulate import simulate_command
from gemsc.cli.terminal import say
from gemsc.errors import GemscError, InternalError

__all__ = ["app", "main"]

INTERRUPTED = 130  # exit code, as after any SIGINT
# typer keeps click to itself: the base class of all errors in a command line
UsageError = cast(type[Exception], typer.BadParameter.__base__)
# what follows the directory is the program's
PASSES_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}

app = typer.Typer(
    help="Split a PyTorch model over MPI ranks and train it exactly.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("simulate")(simulate_command)
app.command("compile")(compile_command)
app.command("plan")(plan_command)
app.command("run", context_settings=PASSES_ON)(run_command)
app.command("verify")(verify_command)
app.command("show")(show_command)
app.command("graph")(graph_command)
app.command("timeline")(timeline_command)
app.command("profile")(profile_command)


def main() -> None:
    """Run the command: exit code 1 for the user's errors, 70 for ours."""
    # torch would print a traceback of its own for every shape that does not fit
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    except UsageError as error:
        _fail(_in_our_words(error))
    except GemscError as error:
        _fail(error)
    except OSError as error:
        if error.filename is None:
            raise
        path, why = error.filename, (error.strerror or type(error).__name__).lower()
        _fail(GemscError(f"{path}: {why}", help="give a path that can be used"))
    except InternalError as error:
        notes = "".join(f"\nnote: {note}" for note in getattr(error, "__notes__", ()))
        say(f"internal error: {error}{notes}")
        say("help: this is a fault of gemsc; please report it")
        sys.exit(70)
    except Exception:
        say(traceback.format_exc().rstrip())
        say("internal error: see above")
        say("help: this is a fault of gemsc; please report it")
        sys.exit(70)


def _fail(error: GemscError) -> NoReturn:
    say(str(error))
    sys.exit(1)


def _in_our_words(error: Any) -> GemscError:
    """Return typer's error about the command line as one of ours."""
    command = error.ctx.command_path if error.ctx else "gemsc"
    message = error.format_message().rstrip(".")
    return GemscError(message[:1].lower() + message[1:], help=f"see {command} --help")
