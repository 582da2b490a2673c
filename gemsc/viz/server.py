"""`gemsc show --open`: the report of a program and a run that goes on, in a browser.

Pages are for this machine alone: the server listens on 127.0.0.1, and refuses requests
under any other name, by which pages from elsewhere could reach it (DNS rebinding).
Only files of a few fixed names are served.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gemsc.base.units import show_bytes
from gemsc.errors import GemscError
from gemsc.plan import Plan
from gemsc.viz.curves import GrowingLog, RunLog, curves
from gemsc.viz.report import RUN_MARKER, graph_of, report

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")
OF_PROGRAM = re.compile(
    r"/(report\.html|graph\.svg|timeline\.svg|plan\.toml|rank\d+\.py)"
)
OF_RUN = re.compile(r"/run/(log\.jsonl|log\.csv|curves\.svg|run\.json)")
KINDS = {".html": "text/html", ".svg": "image/svg+xml"}
RULES = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'"
)


class Pages:
    """What is shown of a program's folder, or of that of a run."""

    def __init__(self, folder: Path) -> None:
        """Find out which of the two it is.

        Raises:
            GemscError: there is no plan in it.
        """
        self.plan = Plan.read(folder / "plan.toml")
        is_run = (folder / "run.json").is_file()
        self.program = _program_of(folder) if is_run else folder
        self._run = folder if is_run else None
        self._lock = threading.Lock()
        self._growing: GrowingLog | None = None
        self._figures = ""

    def run_folder(self) -> Path | None:
        """Return the run that is shown: of a program the last one, if there is any."""
        if self._run is not None or self.program is None:
            return self._run
        runs = self.program / "runs"
        folders = [folder for folder in runs.glob("*") if folder.name.isdigit()]
        return max(folders, key=lambda folder: int(folder.name), default=None)

    def page(self) -> str:
        """Return the report with the run in it."""
        text = graph = ""
        if self.program is not None and (self.program / "report.html").is_file():
            text = (self.program / "report.html").read_text("utf-8")
            graph = graph_of(self.program)
        if RUN_MARKER not in text:  # another gemsc wrote it
            text = report(self.plan, graph=graph)
        live = Path(__file__).with_name("live.html").read_text("utf-8")
        live = live.replace("{{ figures | safe }}", self.figures())
        return text.replace(RUN_MARKER, live, 1)

    def figures(self) -> str:
        """Return how far the run is, and its curves, as a part of a page."""
        folder = self.run_folder()
        if folder is None:
            return _status(f"no run yet: gemsc run {self.program} starts one")
        with self._lock:
            if self._growing is None or self._growing.folder != folder:
                self._growing, self._figures = GrowingLog(folder), ""
            if self._growing.read() or not self._figures:
                self._figures = _figures(self._growing.log)
            return self._figures

    def file(self, path: str) -> Path | None:
        """Return the file that a path of the address names, if it is to be seen."""
        for form, folder in ((OF_PROGRAM, self.program), (OF_RUN, self.run_folder())):
            match = form.fullmatch(path)
            if match is None or folder is None:
                continue
            file = (folder / match[1]).resolve()
            if file.is_file() and file.is_relative_to(folder.resolve()):
                return file
        return None


class Server(ThreadingHTTPServer):
    """Serves pages on this machine, until it is closed."""

    daemon_threads = True

    def __init__(self, pages: Pages, port: int = 0) -> None:
        """Listen; port 0 is any that is free.

        Raises:
            GemscError: the port is taken, or may not be used.
        """
        self.pages = pages
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise GemscError(
                f"cannot serve on port {port}: {error}",
                help="give another --port, or leave it out to use a free one",
            ) from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report what went wrong, unless a browser has gone away."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{ADDRESS}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds that a connection may be idle

    def do_GET(self) -> None:
        """Answer with a page, the figures of the run, or a file."""
        path = self.path.partition("?")[0]
        names = self.headers.get_all("Host") or [""]
        if len(names) != 1 or names[0].partition(":")[0].lower() not in NAMES:
            self._answer(HTTPStatus.FORBIDDEN, b"only as localhost\n")
        elif path == "/":
            self._answer(HTTPStatus.OK, self.server.pages.page().encode(), ".html")
        elif path == "/run":
            self._answer(HTTPStatus.OK, self.server.pages.figures().encode(), ".html")
        elif (file := self.server.pages.file(path)) is not None:
            self._answer(HTTPStatus.OK, file.read_bytes(), file.suffix)
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"not found\n")

    def _answer(self, status: HTTPStatus, body: bytes, suffix: str = "") -> None:
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        if status is HTTPStatus.OK and self.headers.get("If-None-Match") == tag:
            status, body = HTTPStatus.NOT_MODIFIED, b""
        self.send_response(status)
        kind = KINDS.get(suffix, "text/plain")
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Content-Security-Policy", RULES)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of requests: there is one a second."""


def _program_of(run: Path) -> Path | None:
    """Return the program of a run, if it is still the one that was run."""
    try:
        about = json.loads((run / "run.json").read_text("utf-8"))
        program = Path(about["program"])
        same = (program / "plan.toml").read_bytes() == (run / "plan.toml").read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return program if same else None


def _status(words: str, kind: str = "") -> str:
    return f'<p class="status {kind}">{escape(words)}</p>'


def _figures(log: RunLog) -> str:
    """Return the state of a run, its newest figures and its curves."""
    event, step = log.last.get("event"), log.last_step.get("step")
    name = f"run {log.name}"
    if event == "failure":
        status = _status(f"{name} failed: {log.last.get('error', '')}", "failed")
    elif step is None:
        return _status(f"{name}: waiting for the first step")
    else:
        status = _status(f"{name}: {'complete' if event == 'end' else 'training'}")
    cards = [("step", f"{step}", f"epoch {log.last_step.get('epoch', '-')}")]
    if log.loss:
        least = min(value for _, value in log.loss)
        cards.append(("loss", f"{log.loss[-1][1]:.4g}", f"least {least:.4g}"))
    for name, curve in log.figures.items():
        cards.append(
            (f"held-out {name}", f"{curve[-1][1]:.4g}", f"step {curve[-1][0]}")
        )
    if log.rates:
        cards.append(("samples/s", f"{log.rates[-1][1]:,.1f}", "in the last step"))
    if any(log.memory):
        most = max(curve[-1][1] for curve in log.memory if curve)
        cards.append(("memory", show_bytes(int(most)), "highest of the ranks"))
    shown = "".join(
        f'<div class="card"><span>{escape(name)}</span><strong>{escape(figure)}'
        f"</strong><small>{escape(note)}</small></div>"
        for name, figure, note in cards
    )
    picture = f'<div class="picture">{curves([log])}</div>'
    return f'{status}<div class="cards">{shown}</div>{picture}'
