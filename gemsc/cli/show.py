"""`gemsc show`, `gemsc graph`, `gemsc timeline`: look at a program."""

from __future__ import annotations

import os
import sys
import webbrowser
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from gemsc.base.files import write_text
from gemsc.base.process import num_cores
from gemsc.cli.compile import compiled
from gemsc.cli.options import DEFAULTS, ModelOrProgram, takes_options
from gemsc.cli.terminal import Answer, Directory, check_svg, console, gives_json, tell
from gemsc.errors import GemscError
from gemsc.launch.measure import measure
from gemsc.options import CompileOptions
from gemsc.plan import Plan
from gemsc.planner.explain import explain, seconds_here, speed
from gemsc.runtime.process.device import device_named
from gemsc.user_model import load_user_model
from gemsc.viz.graph import render
from gemsc.viz.panel import panels_of, trace_text
from gemsc.viz.report import write_report
from gemsc.viz.server import Pages, Server
from gemsc.viz.terminal import grid, of_this_machine, show_shares
from gemsc.viz.terminal import show as show_plan
from gemsc.viz.timeline import write_timeline


@gives_json
def show_command(
    directory: Directory,
    html: Annotated[
        bool, typer.Option("--html", help="rewrite report.html instead of printing")
    ] = False,
    in_browser: Annotated[
        bool,
        typer.Option("--open", help="open the report and its live run in a browser"),
    ] = False,
    port: Annotated[
        int | None, typer.Option(help="port for --open (default: any free port)", min=0)
    ] = None,
) -> Answer | None:
    """Explain the split; print stages, transfers, memory and the predicted step."""
    if in_browser:
        _open(directory, port or 0)
        return None
    if port is not None:
        raise GemscError("--port has no effect without --open", help="add --open")
    plan = Plan.read(directory / "plan.toml")
    if html:
        tell(f"wrote {write_report(plan, directory)}")
        return None
    show_plan(plan, console)
    here = seconds_here(plan)
    answer = {"why": explain(plan).line, "speed": asdict(speed(plan))}
    answer["plan"] = asdict(plan)
    return answer | {"seconds_here": here and here[0], "cores_here": num_cores()}, 0


@takes_options(("ranks",))
def graph_command(
    target: ModelOrProgram,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help=".svg file (default: graph.svg in the program)"
        ),
    ] = None,
    options: CompileOptions = DEFAULTS,
) -> None:
    """Draw the graph: stages as clusters of blocks, with transfers and skips."""
    if Path(target).is_dir():
        Plan.read(Path(target) / "plan.toml")
        path = output or Path(target) / "graph.svg"
        dot = _read_dot(Path(target) / "graph.dot")
    else:
        options = replace(options, check=False)
        program = compiled(load_user_model(target), options)
        path = output or Path("graph.svg")
        dot = program.graph()
    check_svg(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    note = render(dot, path)
    tell(f"note: {note}" if note else f"wrote {path}")


def timeline_command(
    directory: Directory,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help=".svg file (default: timeline.svg in the program)"
        ),
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="print the timeline as text instead")
    ] = False,
    measured: Annotated[
        bool,
        typer.Option("--measured", help="run some steps and draw a measured one below"),
    ] = False,
    steps: Annotated[int, typer.Option(help="training steps to measure", min=1)] = 9,
    device: Annotated[
        str,
        typer.Option(help="with --measured: device to run on: auto, cpu or cuda"),
    ] = "auto",
) -> None:
    """Draw the timeline of one step: predicted, and with --measured also measured."""
    if device != "auto":
        device_named(device)
        if not measured:
            raise GemscError(
                f"--device {device} has no effect without --measured",
                help="leave it out, or add --measured",
            )
    plan = Plan.read(directory / "plan.toml")
    if text:
        typer.echo(grid(plan))
        return
    path = output or directory / "timeline.svg"
    check_svg(path)
    marks = measure(directory, steps, device) if measured else ()
    write_timeline(plan, path, marks)
    for line in (f"wrote {path}", *(() if marks else of_this_machine(plan))):
        tell(line)
    if marks:
        predicted, measured_step = panels_of(plan, marks)
        trace = directory / "trace.json"
        write_text(trace, trace_text((predicted, measured_step)))
        tell(f"wrote {trace}: open it at ui.perfetto.dev")
        show_shares(predicted, measured_step, console)


def _open(folder: Path, port: int) -> None:
    """Serve the report and the curves of the run until Ctrl-C."""
    with Server(Pages(folder), port) as server:
        tell(f"{server.address} shows {folder}; Ctrl-C ends")
        graphical = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
        if sys.platform in ("darwin", "win32") or any(map(os.environ.get, graphical)):
            webbrowser.open(server.address)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def _read_dot(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise GemscError(f"there is no {path}", help="compile again") from None
