"""Measuring: this machine, its network, and a model's blocks."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import MODEL, Gemsc, gemsc_here
from program_support import Net, mean
from sim_cuda import DEVICE, SimDevice
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gemsc.base.dtypes import format_of
from gemsc.calibrate.machine import check_output
from gemsc.calibrate.network import fit_link, measured_network
from gemsc.compiler import compile, trace
from gemsc.costs.hardware import LinkSpeed, read_hardware
from gemsc.costs.profile import BlockTimes, time_nodes
from gemsc.errors import GemscError
from gemsc.ir import meta

gemsc = pytest.fixture(gemsc_here)


class Branches(nn.Module):
    """Several values cross between blocks, some of them without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.2)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words).mean(1)
        mask = words[:, :1] > 3
        y = self.norm(self.a(x))
        low, high = self.drop(y).chunk(2, 1)
        return self.b(torch.cat([high, low], 1)).where(mask, x)


WORDS = torch.randint(10, (6, 5))


def test_profiling_leaves_the_model_and_the_random_numbers_as_they_are() -> None:
    model = Branches()
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trace(model, (WORDS,), loss=mean, profile=True, check=False)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [module.training for module in model.modules()] == modes


def test_towers_and_skips_are_of_the_graph_whose_blocks_were_timed() -> None:
    image, text = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
    table = torch.arange(64.0).reshape(8, 8)
    model = Net(
        lambda self, x, y: self.a(x) @ table.tril() + self.b(y) @ table.tril(),
        a=image,
        b=text,
    )
    rows = torch.randn(4, 8), torch.randn(4, 8)
    program = trace(model, rows, loss=mean, profile=True, check=False).program
    towers = [node for tower in program.towers or () for node in tower]
    skips = [node for s in program.skips or () for node in (s.value, s.last_use)]
    assert len(towers) > 3
    assert {node.graph for node in (*towers, *skips)} == {program.graph}


class Counts(nn.Module):
    """Makes numbers where its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.arange(4, device=x.device)
        return self.first(x) * numbers


def test_blocks_are_timed_on_the_device_that_is_asked_for() -> None:
    model, x = nn.Sequential(Counts(), nn.Linear(4, 2)), torch.randn(3, 4)
    program = trace(model, (x,), loss=mean, check=False).program
    devices: list[object] = []

    def note(module: nn.Module, given: tuple[Tensor, ...], _: Tensor) -> None:
        devices.append(given[0].device)

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        with SimDevice(0):
            times = time_nodes(program, program.blocks or (), (x,), device=DEVICE)
    finally:
        handle.remove()
    assert set(devices) == {DEVICE}
    assert all(block.forward > 0 for block in times)
    assert all(p.device.type == "cpu" for p in model.parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_profiling_on_a_gpu_that_is_not_there_is_refused(
    gemsc: Gemsc, tmp_path: Path
) -> None:
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    words = ("compile", model, "-o", tmp_path / "x", "--device", "cuda")
    done = gemsc(*words, "--profile")
    assert done.code == 1
    assert "PyTorch does not find a GPU" in done.err
    done = gemsc(*words)
    assert "--device cuda has no effect without --profile" in done.err


@pytest.mark.slow
def test_measured_seconds_take_the_place_of_predicted_ones() -> None:
    feed = {"loss": mean, "check": False}
    told: list[tuple[str, float]] = []
    program = trace(
        Branches(),
        (WORDS,),
        profile=True,
        progress=lambda name, share: told.append((name, share)),
        **feed,
    ).program
    predicted = trace(Branches(), (WORDS,), **feed).program
    assert [name for name, _ in told] == [b.name for b in program.blocks or ()]
    for block, same in zip(program.blocks or (), predicted.blocks or (), strict=True):
        assert block.name == same.name
        assert block.total("saved_bytes") == same.total("saved_bytes")
        assert block.total("forward_seconds") > 0
        assert block.total("forward_seconds") != same.total("forward_seconds")
        assert set(block.nodes) <= set(program.graph.nodes)
    assert all(
        skip.value in program.graph.nodes and skip.last_use in program.graph.nodes
        for skip in program.skips or ()
    )
    total = sum(b.total("backward_seconds") for b in program.blocks or ())
    assert total > 0


@pytest.mark.slow
def test_more_work_takes_longer() -> None:
    def seconds(width: int) -> float:
        layers = [nn.Linear(width, width) for _ in range(3)]
        program = trace(
            nn.Sequential(*layers), (torch.randn(64, width),), loss=mean, check=False
        ).program
        times = time_nodes(program, program.blocks or (), (torch.randn(64, width),))
        return sum(block.forward + block.backward for block in times)

    assert seconds(16) < seconds(1024)


@pytest.mark.slow
def test_a_format_in_which_blocks_take_less_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    share = 0.0  # of the seconds, that the blocks take in the other format

    def measured(program: Any, blocks: Any, *given: Any, **how: Any) -> Any:
        asked.append(how.get("memory_format", "as-given"))
        last = asked[-1] == "channels_last"
        plain = BlockTimes(0.002, 0.004)
        other = BlockTimes(0.002 * share, 0.004 * share)
        return [other if last else plain for _ in blocks]

    def notes(model: nn.Module, *size: int, **how: Any) -> tuple[str, ...]:
        asked.clear()
        inputs = (torch.randn(2, *size),)
        traced = trace(model, inputs, loss=mean, profile=True, check=False, **how)
        return traced.program.notes

    def convs(kind: Any) -> nn.Module:
        return nn.Sequential(*[kind(3, 3, 3, padding=1) for _ in range(5)])

    monkeypatch.setattr("gemsc.passes.time_blocks.time_nodes", measured)
    share = 0.89
    (note,) = notes(convs(nn.Conv2d), 3, 8, 8)
    assert re.search("channels_last the blocks take .* where they take", note)
    assert len(notes(convs(nn.Conv3d), 3, 4, 4, 4)) == 1
    share = 0.91
    assert notes(convs(nn.Conv2d), 3, 8, 8) == ()
    assert asked == ["as-given", "channels_last"]
    share = 0.5
    given = {"memory_format": "channels_last"}
    assert notes(convs(nn.Conv2d), 3, 8, 8, **given) == ()
    assert notes(nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)]), 3) == ()
    assert asked == ["as-given"]


class Formats(TorchFunctionMode):
    """Those of what convolutions are given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.memory_format] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.conv2d, nn.functional.conv2d):
            self.found |= {format_of(tensor) for tensor in args[:2]}
        return func(*args, **(kwargs or {}))


def test_blocks_are_measured_in_a_format() -> None:
    model, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    program = trace(model, (x,), loss=mean, check=False).program
    for name, expected in (
        ("as-given", torch.contiguous_format),
        ("channels_last", torch.channels_last),
    ):
        with Formats() as formats:
            given = program, program.blocks or (), (x,)
            time_nodes(*given, rounds=1, memory_format=name)
        assert formats.found == {expected}
    assert {format_of(t) for t in (x, model.weight)} == {torch.contiguous_format}


def test_without_a_loss_there_is_no_backward() -> None:
    program = trace(Net(lambda self, x: self.a(x)), (torch.randn(2, 4),)).program
    times = time_nodes(program, program.blocks or (), (torch.randn(2, 4),), rounds=1)
    assert all(block.forward > 0 and block.backward == 0 for block in times)
    assert not any(meta.needs_gradient(node) for node in program.compute_nodes)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "calibrated: cpu-core"),
        ({"hardware": "v100"}, "data sheet: v100"),
        ({"profile": True}, "measured"),
    ],
)
def test_the_plan_says_where_seconds_come_from(
    options: dict[str, object], text: str
) -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    x = torch.randn(4, 8)
    program = compile(model, (x,), loss=mean, ranks=2, check=False, **options)
    assert program.plan.times == text
    assert f'times = "{text}"' in program.plan.to_toml()


@pytest.mark.slow
def test_a_faster_machine_has_a_shorter_step() -> None:
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)])
    feed = {"loss": mean, "ranks": 2, "check": False}
    x = torch.randn(512, 2048)
    slow, fast = (
        compile(model, (x,), hardware=name, **feed).plan for name in ("", "h100")
    )
    assert fast.step_seconds < 0.1 * slow.step_seconds
    assert fast.transfers[0].edge.seconds < slow.transfers[0].edge.seconds


# the network


def test_a_link_is_found_from_its_messages() -> None:
    times = [(size, 2e-5 + size / 3e9) for size in (1024, 2**16, 2**20, 2**24)]
    link = fit_link(times)
    assert link.latency == pytest.approx(2e-5, rel=1e-6)
    assert link.bandwidth == pytest.approx(3e9, rel=1e-6)


def test_what_was_not_measured_stays_as_it_was() -> None:
    before = read_hardware("v100").network
    link = LinkSpeed(latency=1e-5, bandwidth=1e9)
    times = [(size, link.seconds(size)) for size in (1024, 2**20, 2**24)]
    sums = [(size, 3 * link.seconds(size)) for size in (1024, 2**24)]
    measured = {
        "ranks": 2,
        "ranks_per_node": 2,
        "nodes": 1,
        "intra": times,
        "inter": [],
        "sums": sums,
        "reduce_bandwidth": 5e9,
    }
    network = measured_network(measured, before)
    assert network.inter == before.inter
    assert network.ranks_per_node == before.ranks_per_node
    assert network.intra.bandwidth == pytest.approx(1e9, rel=1e-6)
    assert 0.2 < network.allreduce.efficiency < 0.5


# the command


@pytest.mark.slow
def test_a_quick_calibration_writes_a_file_that_compiles(
    tmp_path: Path, gemsc: Gemsc
) -> None:
    path = tmp_path / "mine.toml"
    done = gemsc("profile", "--calibrate", "--quick", "-o", path)
    assert done.code == 0, done.err
    device = read_hardware(str(path)).device
    assert {"convolution-2d", "matmul-nt", "attention", "norm-batch"} <= set(device.fit)
    assert device.peak_flops["float32"] > 1e8
    assert 1e7 < device.host_bandwidth < 1e12
    assert "host_bandwidth" in path.read_text()
    model, out = tmp_path / "net.py", tmp_path / "program"
    model.write_text(MODEL)
    done = gemsc("compile", model, "--hardware", path, "-o", out)
    assert done.code == 0, done.err
    assert f'times = "calibrated: {path}"' in (out / "plan.toml").read_text()


@pytest.mark.mpi
@pytest.mark.nightly
def test_the_network_is_measured_between_processes(
    tmp_path: Path, gemsc: Gemsc
) -> None:
    path = tmp_path / "mine.toml"
    read_hardware("v100").write(path)
    done = gemsc("profile", "--network", "--ranks", "2", "-o", str(path))
    assert done.code == 0, done.err
    hardware = read_hardware(str(path))
    assert hardware.device == read_hardware("v100").device
    assert hardware.network.inter == read_hardware("v100").network.inter
    assert 1e-7 < hardware.network.intra.latency < 1e-2
    assert 1e7 < hardware.network.intra.bandwidth < 1e12
    assert any("2 ranks on one node" in note for note in hardware.notes)


@pytest.mark.parametrize("name", ["out.json", "", "taken.toml", "file/out.toml"])
def test_a_name_that_cannot_be_written_is_refused_first(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "taken.toml").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(GemscError, match="cannot write"):
        check_output(tmp_path / name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_none_is_measured(gemsc: Gemsc, tmp_path: Path) -> None:
    path = tmp_path / "gpu.toml"
    done = gemsc("profile", "--calibrate", "--device", "cuda", "-o", path)
    assert done.code == 1
    assert "--device cuda: PyTorch does not find a GPU" in done.err
    done = gemsc("profile", "--calibrate", "--device", "tpu", "-o", path)
    assert done.code == 1
    assert "unknown device 'tpu'" in done.err
    assert not path.exists()


@pytest.mark.gpu
def test_a_gpu_is_calibrated(gemsc: Gemsc, tmp_path: Path) -> None:
    path = tmp_path / "gpu.toml"
    done = gemsc("profile", "--calibrate", "--quick", "--device", "cuda", "-o", path)
    assert done.code == 0, done.err
    device = read_hardware(str(path)).device
    assert device.name == torch.cuda.get_device_name()
    assert {"convolution-2d", "matmul-nt"} <= set(device.fit)
    assert 1e9 < device.host_bandwidth < device.memory_bandwidth


def test_profile_needs_something_to_do(gemsc: Gemsc) -> None:
    done = gemsc("profile")
    assert done.code == 1
    assert "give --calibrate, --network or both" in done.err
