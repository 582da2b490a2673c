"""`gemsc profile PROGRAM --per-device 1,2,4`, and what `--per-device auto` makes of it.

By day no process is started: what they would measure is made up.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from command_line import MODEL, Gemsc, gemsc_here, start

from gemsc.calibrate import machine
from gemsc.cli import profile
from gemsc.costs.hardware import read_hardware
from gemsc.costs.sharing import SharedDevice
from gemsc.errors import GemscError
from gemsc.launch.measure import Load
from gemsc.options import AUTO, CompileOptions
from gemsc.plan import Plan
from gemsc.search.sharing import choose_sharing, sharing_note

gemsc = pytest.fixture(gemsc_here)


def chosen(rates: dict[int, float], fits: int = 8) -> int:
    """Return the number that is chosen where 8 are predicted to gain most."""
    shared = SharedDevice(launch=100.0, kernels=1.0, full=1.0, rates=rates)

    def stage(options: CompileOptions) -> None:
        if options.per_device > fits:
            raise GemscError("too large")

    asked = CompileOptions(data=24, per_device=AUTO)
    choice = choose_sharing(asked, shared, lambda o: ((), o), stage)  # type: ignore[arg-type]
    return choice[1].per_device


def test_auto_prefers_what_was_measured() -> None:
    assert chosen({}) == 8
    assert chosen({1: 100.0, 2: 150.0, 4: 140.0}) == 2
    assert chosen({1: 100.0, 3: 150.0, 6: 190.0}) == 6
    assert chosen({1: 100.0, 3: 150.0, 6: 190.0}, fits=4) == 3
    assert chosen({1: 100.0, 2: 104.0, 4: 90.0}) == 1  # not worth a daemon
    assert chosen({1: 100.0}) == 1  # nothing else was measured


def test_the_note_has_both_figures() -> None:
    shared = SharedDevice(launch=2.0, kernels=1.0, full=1.0, rates={1: 10.0, 2: 13.0})
    assert "device: measured +30%, predicted +100% samples" in sharing_note(shared, 2)
    assert "device: predicted +100% samples" in sharing_note(shared, 4)
    slower = replace(shared, rates={1: 10.0, 2: 9.97})
    assert "device: measured +0%, predicted" in sharing_note(slower, 2)


@pytest.fixture
def program(tmp_path: Path, gemsc: Gemsc) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    words = ("compile", tmp_path / "model.py", "-o", tmp_path / "p", "--ranks", 1)
    assert gemsc(*words, "--micro-batches", 2).code == 0
    return tmp_path / "p"


def load(rate: float) -> Load:
    return Load(samples_per_second=rate, cores=1.5, gpu_used=None, peak_bytes=2**20)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """Replicas, and how many of them share, of each program that seems to run."""
    seen: list[tuple[int, int | None]] = []

    def measure_load(directory: Path, steps: int) -> Load:
        plan = Plan.read(directory / "plan.toml")
        if plan.data == 8:
            raise GemscError("the ranks ended with exit code 9")
        seen.append((plan.data, plan.per_device))
        return load({1: 100.0, 2: 130.0, 4: 170.0}[plan.data])

    monkeypatch.setattr(profile, "measure_load", measure_load)
    return seen


@pytest.mark.slow
def test_what_is_measured_decides_the_next_compilation(
    program: Path, tmp_path: Path, gemsc: Gemsc, seen: list[tuple[int, int | None]]
) -> None:
    mine, model = tmp_path / "mine.toml", tmp_path / "model.py"
    words = ("profile", program, "--hardware", "a100", "-o", mine)
    done = gemsc(*words, "--per-device", "4,2,8")
    assert done.code == 0, done.err
    assert seen == [(1, None), (2, 2), (4, 4)]
    assert "note: not 8 processes: error: the ranks ended with exit code 9" in done.out
    row = next(line for line in done.out.splitlines() if "170.0" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[:3] == ["4", "170.0", "+70%"]
    assert cells[4:] == ["1.5", "1.0 MiB"]
    (rates,) = read_hardware(str(mine)).device.sharing.values()
    assert rates == {"1": 100.0, "2": 130.0, "4": 170.0}

    words = ("compile", model, "-o", tmp_path / "x", "--ranks", 8, "--hardware", mine)
    auto = ("--data", 8, "--per-device", "auto")
    done = gemsc(*words, *auto, "--micro-batches", 2)
    assert "Net: 8 ranks in 8 replicas" in done.out
    assert "note: 4 ranks share each device: measured +70%, predicted" in done.out
    text = mine.read_text().replace("2 = 130.0", "2 = 180.0")
    mine.write_text(text.replace("overhead = 8e-06", "overhead = 9e-06"))  # calibrated
    assert "9e-06" in mine.read_text()
    done = gemsc(*words, *auto, "--micro-batches", 2)
    assert "note: 2 ranks share each device: measured +80%" in done.out
    done = gemsc(*words, *auto, "--micro-batches", 3)  # that step was not measured
    assert "note: 8 ranks share each device: predicted" in done.out


@pytest.mark.slow
def test_a_second_program_joins_the_first(
    program: Path, tmp_path: Path, gemsc: Gemsc, seen: list[object]
) -> None:
    mine = tmp_path / "mine.toml"
    words = ("profile", program, "--per-device", "2", "-o", mine)
    assert gemsc(*words).code == 0
    assert gemsc(*words).code == 0  # once more
    assert len(read_hardware(str(mine)).device.sharing) == 1
    model = (tmp_path / "model.py").read_text().replace("16", "24")
    (tmp_path / "model.py").write_text(model)
    assert gemsc(*words).code == 0
    hardware = read_hardware(str(mine))
    assert len(hardware.device.sharing) == 2
    assert sum("sharing of Net" in note for note in hardware.notes) == 2


def test_calibration_keeps_what_was_measured_of_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.toml"
    machine.write_sharing(read_hardware(), "Net-1", {1: 10.0, 2: 15.0}, mine)
    fresh = read_hardware("a100").device
    monkeypatch.setattr(machine, "calibrate", lambda *given, **named: fresh)
    monkeypatch.setattr(machine, "_host_bandwidth", lambda kind: 1e9)
    machine.calibrate_machine(mine, "", 1)
    device = read_hardware(str(mine)).device
    assert device.name == fresh.name
    assert device.sharing == {"Net-1": {"1": 10.0, "2": 15.0}}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("2 = 10.0", "device.sharing.Net has no samples per second for 1 process"),
        ("1 = 0", "device.sharing.Net.1 is 0"),
        ("1 = 5.0\ntwo = 10.0", "device.sharing.Net.two is 10.0"),
        ("1 = 5.0\n0 = 10.0", "device.sharing.Net.0 is 10.0"),
    ],
)
def test_figures_that_cannot_be_are_refused(
    entries: str, message: str, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.toml"
    text = read_hardware().to_toml()
    mine.write_text(f"{text}\n[device.sharing.Net]\n{entries}\n")
    with pytest.raises(GemscError) as caught:
        read_hardware(str(mine))
    assert message in str(caught.value)
    assert "mine.toml:" in str(caught.value)


def test_what_cannot_be_measured_is_refused_first(
    program: Path, tmp_path: Path, gemsc: Gemsc, seen: list[object]
) -> None:
    def refusal(*words: object) -> str:
        done = gemsc("profile", "-o", tmp_path / "mine.toml", *words)
        assert done.code == 1
        return done.err

    assert "--per-device measures a program" in refusal("--per-device", "2")
    assert f"nothing to measure of {program}" in refusal(program)
    assert "0,2 is not a list of numbers" in refusal(program, "--per-device", "0,2")
    assert "auto is not a list" in refusal(program, "--per-device", "auto")
    nowhere = refusal(tmp_path / "none", "--per-device", "2")
    assert "is not a program directory" in nowhere
    model = MODEL.replace("def loss", "def no_loss")
    (tmp_path / "model.py").write_text(model)
    words = ("compile", tmp_path / "model.py", "-o", tmp_path / "q", "--ranks", 1)
    assert gemsc(*words).code == 0
    lossless = refusal(tmp_path / "q", "--per-device", "2")
    assert "cannot train: it was compiled without a loss" in lossless
    assert not seen
    assert not (tmp_path / "mine.toml").exists()


@pytest.mark.mpi
@pytest.mark.nightly
def test_processes_are_measured(program: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    done = start(
        *("profile", program, "--per-device", "2", "--steps", 2, "-o", mine),
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.code == 0, done.err
    (rates,) = read_hardware(str(mine)).device.sharing.values()
    assert rates.keys() == {"1", "2"}
    assert all(0 < rate < 1e6 for rate in rates.values())
    assert "cores used" in done.out
