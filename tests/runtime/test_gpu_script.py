"""The script for a GPU runs on a CPU, and nothing that fails there costs more."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu
from gpu_checks.overlap import Trace, read_trace, share_under


@pytest.fixture
def report(tmp_path: Path) -> gpu.Report:
    return gpu.Report("cpu", tmp_path, minutes=5)


@pytest.mark.nightly
def test_a_check_runs_in_a_process_of_its_own(
    report: gpu.Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.run(gpu.wanted("memory/encoder offload"))
    (line,) = report.lines
    assert (line.name, line.verdict) == ("memory: encoder offload", "PASS")
    assert line.numbers["predicted"] > 2**17
    assert line.numbers["allocated"] > 0.98 * line.numbers["predicted"]
    assert capsys.readouterr().out.startswith("PASS  memory: encoder offload  ")
    assert json.loads((tmp_path / "lines.json").read_text())["name"] == line.name
    table = (tmp_path / "lines.md").read_text().splitlines()
    assert table[2] == f"| {line.name} | PASS | {line.figure} | {line.limit} |"


@pytest.mark.slow
def test_a_check_that_hangs_or_crashes_costs_a_line(
    report: gpu.Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(gpu, "CPU_PATIENCE", 1)
    run = gpu.wanted("devices")[0].run
    report.run([gpu.Check("devices", 1, run), gpu.Check("unknown", 60, run)])
    late, crashed = report.lines
    assert (late.verdict, late.figure) == ("FAIL", "no end within 1 s")
    assert crashed.verdict == "FAIL"
    assert "not enough values to unpack" in crashed.figure
    report.ends = 0.0
    report.run([gpu.Check("devices", 60, run)])
    assert (report.lines[-1].verdict, report.lines[-1].figure) == (
        "SKIP",
        "no time left",
    )


def test_names_are_the_beginnings_of_those_of_checks() -> None:
    assert [check.name for check in gpu.wanted("speed/u, devices")] == [
        "speed/unet",
        "devices",
    ]
    assert len(gpu.wanted("")) == len([*gpu.checks()])
    with pytest.raises(SystemExit, match="no check 'spead'"):
        gpu.wanted("spead")


def test_the_share_of_copies_that_lies_under_kernels(tmp_path: Path) -> None:
    kernels = [(0.0, 2.0), (1.0, 3.0), (6.0, 7.0)]
    assert share_under([(2.0, 4.0), (6.0, 8.0)], kernels) == 0.5
    assert share_under([(0.5, 2.5)], kernels) == 1.0
    assert share_under([(4.0, 5.0)], kernels) == 0.0
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 10, "dur": 4},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 12}
        | {"dur": 4},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 30}
        | {"dur": 9},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 99},
        {"name": "process_name", "ph": "M"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = read_trace(path)
    assert (trace.kernels, trace.outward) == ([(10, 14)], [(12, 16)])
    assert trace.inward == []
    assert trace.hidden == 0.5


def test_what_the_bus_allows() -> None:
    """Copies outward hide under the forward, those back under the backward."""
    fits = Trace([(0.0, 30.0)], [(0.0, 10.0)], [(9.0, 19.0)])
    assert fits.shortest == pytest.approx((1.0, 1.0))
    slow = Trace([(0.0, 30.0)], [(0.0, 40.0)], [(0.0, 40.0)])
    assert slow.shortest == pytest.approx((80 / 30, 30 / 80))
