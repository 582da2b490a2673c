"""`gemsc show --open`: a run that goes on, in a browser on this machine alone."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import GEMSC, MODEL, Gemsc
from program_support import Net, written
from test_compare import run_in
from test_report import browser, console_lines, needs_browser

from gemsc.plan import Plan
from gemsc.viz.curves import GrowingLog
from gemsc.viz.report import write_report
from gemsc.viz.server import Pages, Server

SECONDS = 100


def forward(self, x):
    return self.b(self.a(x))


@pytest.fixture(scope="module")
def written_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server") / "program"
    written(folder, Net(forward), ranks=2)
    write_report(Plan.read(folder / "plan.toml"), folder)
    return folder


@pytest.fixture
def program(written_program: Path, tmp_path: Path) -> Path:
    """Return the folder of a program, with a file that is nobody's business beside."""
    folder = Path(shutil.copytree(written_program, tmp_path / "program"))
    (folder / "rank0.py").write_text("# rank 0\n")
    (tmp_path / "secret.txt").write_text("secret")
    return folder


@pytest.fixture
def serve() -> Iterator[Callable[[Path], Server]]:
    servers: list[Server] = []

    def start(folder: Path) -> Server:
        servers.append(Server(Pages(folder)))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def fetch(address: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def raw(server: Server, method: str, path: str, *hosts: str) -> int:
    """Return the status for a path that is sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, SECONDS)
    connection.putrequest(method, path, skip_host=True)
    for host in hosts:
        connection.putheader("Host", host)
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    return status


def shown_steps(figures: str) -> list[int]:
    return [int(n) for n in re.findall(r"<span>step</span><strong>(\d+)<", figures)]


def grow(folder: Path, *steps: int, loss: float = 1.0) -> None:
    with (folder / "log.jsonl").open("a") as file:
        for step in steps:
            record = {"event": "step", "step": step, "loss": loss / step, "epoch": 1}
            file.write(json.dumps(record) + "\n")


def test_a_log_is_followed_as_it_grows_and_is_cut(tmp_path: Path) -> None:
    growing = GrowingLog(tmp_path)
    assert not growing.read()
    grow(tmp_path, 1, 2)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"event": "step", "st')
    assert growing.read()
    assert growing.log.steps == 2
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('ep": 3, "loss": 0.5}\n')
    assert growing.read()
    assert [step for step, _ in growing.log.loss] == [1, 2, 3]
    assert not growing.read()
    lines = (tmp_path / "log.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "log.jsonl").write_text(lines[0])  # in place, then longer than before
    grow(tmp_path, 2, 3, 4, 5, loss=7.0)
    assert growing.read()
    assert [round(loss * step, 6) for step, loss in growing.log.loss] == [1, 7, 7, 7, 7]
    (tmp_path / "new").write_text("".join(lines[:2]))
    (tmp_path / "new").replace(tmp_path / "log.jsonl")  # as --resume does
    assert growing.read()
    assert growing.log.steps == 2
    (tmp_path / "log.jsonl").unlink()
    assert growing.read()
    assert growing.log.steps == 0


@pytest.mark.slow
def test_the_page_shows_the_report_and_the_last_run(
    program: Path, serve: Callable[[Path], Server]
) -> None:
    server = serve(program)
    status, page = fetch(server.address)
    assert status == 200
    assert "no run yet: gemsc run" in page
    assert "Why this split" in page
    run_in(program / "runs" / "9", [])
    assert "run 9: waiting for the first step" in fetch(server.address + "run")[1]
    grow(program / "runs" / "9", 1, 2)
    figures = fetch(server.address + "run")[1]
    assert shown_steps(figures) == [2]
    assert 'class="curves"' in figures
    run_in(program / "runs" / "10", [3.0, 2.0, 1.0, 0.5])
    figures = fetch(server.address + "run")[1]
    assert shown_steps(figures) == [4]
    assert "held-out dice" in figures
    assert "samples per second" in figures
    with (program / "runs" / "10" / "log.jsonl").open("a") as file:
        file.write('\n{"event": "failure", "step": 4, "error": "<b> & more"}\n')
    assert "run 10 failed: &lt;b&gt; &amp; more" in fetch(server.address + "run")[1]
    assert fetch(server.address + "rank0.py") == (200, "# rank 0\n")
    assert fetch(server.address + "report.html")[0] == 200
    assert '"event": "failure"' in fetch(server.address + "run/log.jsonl")[1]


@pytest.mark.slow
def test_a_run_elsewhere_is_shown_with_its_program(
    program: Path, tmp_path: Path, serve: Callable[[Path], Server]
) -> None:
    run = run_in(tmp_path / "saved", [1.0])
    (run / "plan.toml").write_bytes((program / "plan.toml").read_bytes())
    (run / "run.json").write_text(json.dumps({"program": str(program)}))
    server = serve(run)
    assert shown_steps(fetch(server.address)[1]) == [1]
    assert fetch(server.address + "rank0.py") == (200, "# rank 0\n")
    (program / "plan.toml").write_text("compiled anew")
    server = serve(run)
    assert "Why this split" in fetch(server.address)[1]
    assert fetch(server.address + "rank0.py")[0] == 404


@pytest.mark.slow
def test_nothing_else_is_served(
    program: Path, tmp_path: Path, serve: Callable[[Path], Server]
) -> None:
    run_in(program / "runs" / "1", [1.0])
    (program / "rank7.py").symlink_to(tmp_path / "secret.txt")
    (program / "runs" / "1" / "log.csv").symlink_to(tmp_path / "secret.txt")
    server = serve(program)
    assert server.server_address[0] == "127.0.0.1"
    here = f"127.0.0.1:{server.server_port}"
    for path in (
        *("/../secret.txt", "/%2e%2e/secret.txt", "/..%2fsecret.txt", "//etc/passwd"),
        *("/run/../../../secret.txt", "/rank7.py", "/run/log.csv", "/run/", "/runs/"),
        *("/rank0.py/../plan.toml", "/rank0.py%00", "/etc/passwd", "secret.txt"),
    ):
        assert raw(server, "GET", path, here) == 404, path
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
        assert raw(server, method, "/", here) == 501


@pytest.mark.slow
def test_only_this_machine_is_answered(
    program: Path, serve: Callable[[Path], Server]
) -> None:
    server = serve(program)
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1"):
        assert raw(server, "GET", "/", host) == 200
    for hosts in (
        *((), ("evil.example",), ("localhost.evil.example",), ("127.0.0.1.nip.io:80",)),
        *(("localhost", "evil.example"), ("[::1]",), ("",), ("evil.example:80",)),
    ):
        assert raw(server, "GET", "/", *hosts) == 403, hosts
        assert raw(server, "GET", "/run", *hosts) == 403, hosts


def test_what_has_not_changed_is_not_sent_again(
    program: Path, serve: Callable[[Path], Server]
) -> None:
    server, run = serve(program), run_in(program / "runs" / "1", [1.0])
    with urllib.request.urlopen(server.address + "run", timeout=SECONDS) as answer:
        tag = answer.headers["ETag"]
    assert fetch(server.address + "run", **{"If-None-Match": tag}) == (304, "")
    (run / "log.jsonl").write_text("")
    grow(run, 1, 2)
    assert fetch(server.address + "run", **{"If-None-Match": tag})[0] == 200


def test_a_port_that_is_taken_is_refused(program: Path, command: Gemsc) -> None:
    with Server(Pages(program)) as server:
        port = server.server_port
        done = command("show", program, "--open", "--port", port)
    assert done.code == 1
    assert f"cannot serve on port {port}" in done.err
    assert "give another --port" in done.err
    assert command("show", program, "--port", 1).code == 1
    assert command("show", program.parent, "--open").code == 1


@pytest.mark.slow
@needs_browser
def test_the_browser_follows_the_run(
    program: Path, tmp_path: Path, serve: Callable[[Path], Server]
) -> None:
    """The page comes without a step: what it shows in the end, its script has found."""
    server, run = serve(program), run_in(program / "runs" / "1", [])
    first, more = server.pages.figures, iter(range(1, 100))

    def figures() -> str:
        text = first()
        grow(run, next(more))  # seen by who asks next
        return text

    server.pages.figures = figures  # type: ignore[method-assign]
    words = [str(browser()), "--headless=new", "--no-sandbox", "--disable-gpu",
             "--enable-logging=stderr", "--virtual-time-budget=6000", "--dump-dom",
             f"--user-data-dir={tmp_path / 'profile'}", server.address]  # fmt: skip
    seen = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    assert console_lines(seen.stderr) == []
    (step,) = shown_steps(seen.stdout)
    assert step >= 3
    path = re.search(r'<path class="curve train [^>]* d="M([^"]*)"', seen.stdout)
    assert path is not None
    assert path[1].count("L") == step - 1 or "h30" in path[1]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[[Path], str]]:
    """Return what starts the command; in the end, it is ended by Ctrl-C."""
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path) -> str:
        started.append(
            subprocess.Popen(
                [GEMSC, "show", folder, "--open"],
                env={**os.environ, "BROWSER": "true"},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert started[0].stdout is not None
        return started[0].stdout.readline().split()[0]

    yield start
    for process in started:
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_the_command_serves_until_ctrl_c(
    program: Path, watched: Callable[[Path], str]
) -> None:
    address = watched(program)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
    assert "no run yet" in fetch(address)[1]
    run = run_in(program / "runs" / "1", [])
    grow(run, 1, 2, 3)
    assert shown_steps(fetch(address + "run")[1]) == [3]


@pytest.mark.nightly
@pytest.mark.mpi
def test_a_real_run_is_watched(
    tmp_path: Path, command: Gemsc, watched: Callable[[Path], str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    folder = tmp_path / "program"
    made = command("compile", tmp_path / "model.py", "--ranks", 2, "-o", folder)
    assert made.code == 0, made.err
    address, seen = watched(folder), [0]
    for epochs, more in (("2", []), ("4", ["--resume"])):
        run = [GEMSC, "run", folder, "--epochs", epochs, *more]
        trainer = subprocess.Popen(run, stdout=subprocess.DEVNULL)
        while trainer.poll() is None:
            seen += shown_steps(fetch(address + "run")[1])
            time.sleep(0.02)
        assert trainer.returncode == 0
        figures = fetch(address + "run")[1]
        seen += shown_steps(figures)
        assert "run 1: complete" in figures
        (_, curve) = re.findall(r'<path class="curve train [^>]* d="M(.*?)"', figures)
        assert curve.count("L") + 1 == seen[-1]  # no step is there twice
    assert seen == sorted(seen)
    assert len(set(seen)) >= 4
