"""Hardware files: what is written is what is read, and mistakes name their line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemsc.costs.hardware import Hardware, LinkSpeed, read_hardware, shipped_hardware
from gemsc.errors import GemscError

TEXT = """\
name = "mine"
source = "a test"

[device]
name = "core"
memory_bytes = 1024
memory_bandwidth = 1e9

[device.peak_flops]
float32 = 1e10

[device.fit.matmul]
flops = 1e-10

[network]
ranks_per_node = 2

[network.intra]
latency = 1e-6
bandwidth = 1e9

[network.inter]
latency = 1e-5
bandwidth = 1e8
"""


def written(tmp_path: Path, text: str = TEXT) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", shipped_hardware())
def test_shipped_files_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    hardware = read_hardware(name)
    path = tmp_path / "folder" / "again.toml"
    hardware.write(path)
    assert read_hardware(str(path)) == hardware
    assert list(path.parent.iterdir()) == [path]


def test_the_default_is_a_calibrated_cpu() -> None:
    device = read_hardware().device
    assert device == read_hardware("cpu-core").device
    assert {"matmul-nt", "convolution-2d", "convolution-2d-input"} <= set(device.fit)


def test_gpus_come_from_data_sheets_and_say_so() -> None:
    for name in ("v100", "a100", "h100", "h200"):
        hardware = read_hardware(name)
        assert hardware.source.startswith("data sheet")
        assert not hardware.device.fit
        assert any("assumed" in note for note in hardware.notes)


def test_a_file_without_a_host_bandwidth_is_read(tmp_path: Path) -> None:
    device = Hardware.read(written(tmp_path)).device
    assert device.host_seconds(8 * 10**9) == pytest.approx(2.0)
    faster = TEXT.replace("memory_bytes", "host_bandwidth = 16e9\nmemory_bytes")
    device = Hardware.read(written(tmp_path, faster)).device
    assert device.host_seconds(8 * 10**9) == pytest.approx(0.5)


def test_ranks_of_one_node_talk_over_the_inner_link(tmp_path: Path) -> None:
    network = Hardware.read(written(tmp_path)).network
    assert network.link(0, 1) == LinkSpeed(latency=1e-6, bandwidth=1e9)
    assert network.link(1, 2) == network.link(3, 0) == network.inter
    assert network.inter.seconds(1e8) == pytest.approx(1 + 1e-5)


MISTAKES = {
    "no TOML": ("latency = 1e-6", "latency =", 19, "is not valid TOML"),
    "a word misspelt": (
        "memory_bytes",
        "memory_byte",
        6,
        "unknown entry 'device.memory_byte'",
    ),
    "an entry missing": ("bandwidth = 1e8\n", "", 22, "no entry 'network.inter.band"),
    "a table missing": (
        '[device.peak_flops]\nfloat32 = 1e10\n',
        "",
        4,
        "there is no entry 'device.peak_flops'",
    ),
    "text for a number": ("1e-5", '"fast"', 23, "is 'fast', which is not a number"),
    "a number for text": ('"core"', "7", 5, "device.name is 7, which is not a text"),
    "a number for a table": (
        "[device.peak_flops]\nfloat32 = 1e10",
        "peak_flops = 3",
        9,
        "is 3, which is not a table",
    ),
    "nothing at all": ("bandwidth = 1e8", "bandwidth = 0", 24, "is 0"),
    "less than nothing": ("latency = 1e-5", "latency = -1", 23, "is -1"),
    "infinity": ("flops = 1e-10", "flops = inf", 13, "is inf"),
    "half a rank": ("ranks_per_node = 2", "ranks_per_node = 1.5", 16, "is 1.5"),
    "truth for a number": ("1024", "true", 6, "which is not a number"),
    "an unknown algorithm": (
        "[network.intra]",
        '[network.allreduce]\nalgorithm = "magic"\n[network.intra]',
        19,
        "unknown algorithm 'magic'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_file_and_line(name: str, tmp_path: Path) -> None:
    old, new, line, message = MISTAKES[name]
    assert old in TEXT
    path = written(tmp_path, TEXT.replace(old, new, 1))
    with pytest.raises(GemscError) as caught:
        read_hardware(str(path))
    error = caught.value
    assert message in error.message
    assert error.at is not None
    assert error.at.file == str(path)
    assert error.at.line == line
    assert error.help


def test_a_name_that_is_no_machine_lists_those_that_are() -> None:
    with pytest.raises(GemscError) as caught:
        read_hardware("v1000")
    assert "unknown hardware 'v1000'" in caught.value.message
    assert "v100" in (caught.value.help or "")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    with pytest.raises(GemscError, match=r"hardware file .*none\.toml: no such file"):
        read_hardware(str(path))
