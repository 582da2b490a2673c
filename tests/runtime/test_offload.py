"""Saved activations that wait in host memory: the same numbers, less memory."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_support import trained
from plan_support import metered_peaks
from torch import Tensor, nn

from gemsc.options import CompileOptions
from gemsc.runtime import offloaded
from gemsc.runtime.memory.offload import FileStore, OffloadedRun
from gemsc.verify.compare import compare

CASES = (
    ("unet", "enter,down,up", CompileOptions(ranks=2, micro_batches=4)),
    ("unet", "enter.0,down.1,up.2.conv.0", CompileOptions(ranks=1, micro_batches=2)),
    ("resnet18", "layer2,layer3", CompileOptions(ranks=3, schedule="gpipe")),
    ("resnet18", "all", CompileOptions(ranks=2, schedule="master", times=2)),
    ("encoder", "layers", CompileOptions(ranks=4, data=2, micro_batches=2)),
    ("encoder", "all", CompileOptions(ranks=2, placement="folded", micro_batches=3)),
)


@pytest.mark.slow
@pytest.mark.by_day(2)
@pytest.mark.parametrize(("name", "blocks", "options"), CASES)
def test_it_changes_no_bit_and_frees_what_was_predicted(
    name: str, blocks: str, options: CompileOptions, tmp_path: Path
) -> None:
    choice = replace(options, offload=tuple(blocks.split(",")))
    expected, kept = trained(name, options, tmp_path / "kept", torch.float32)
    record, program = trained(name, choice, tmp_path / "moved", torch.float32)
    comparison = compare(record, expected)
    assert comparison.equal == comparison.total
    plan = program.plan
    assert record.activation_bytes == plan.activation_bytes * plan.data
    assert record.peak_bytes == metered_peaks(plan) * plan.data
    texts = [path.read_text() for path in (tmp_path / "moved").glob("rank*.py")]
    assert any("with offloaded():" in text for text in texts)
    assert sum(plan.activation_bytes) < sum(kept.plan.activation_bytes)


def test_recompute_and_offload_side_by_side(tmp_path: Path) -> None:
    options = CompileOptions(ranks=2, micro_batches=3)
    names = {"recompute": ("layer1", "layer4"), "offload": ("layer2", "layer3.0")}
    expected, _ = trained("resnet18", options, tmp_path / "kept", torch.float32)
    choice = replace(options, **names)
    record, program = trained("resnet18", choice, tmp_path / "both", torch.float32)
    comparison = compare(record, expected)
    assert comparison.equal == comparison.total
    assert record.activation_bytes == program.plan.activation_bytes


class CountingStore(FileStore):
    """Notes what is put."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def put(self, data: Tensor):
        self.sizes.append(data.nbytes)
        return super().put(data)


def test_a_storage_moves_once_and_parameters_stay() -> None:
    layer = nn.Linear(64, 64)
    x = torch.randn(8, 64, requires_grad=True)
    store = CountingStore()
    run = OffloadedRun(lambda: store, layer)

    def compute() -> Tensor:
        h = layer(x)
        return (h.view(64, 8) * h.view(64, 8)).sum() + (h[2:] * h[:-2]).sum()

    with run, offloaded():
        y = compute()
    assert sorted(store.sizes) == [8 * 64 * 4] * 2  # x and h; views of h are h
    expected = torch.autograd.grad(compute(), [x, *layer.parameters()])
    y.backward()
    gradients = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    for mine, theirs in zip(gradients, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_what_is_on_the_host_already_stays() -> None:
    """Beside a GPU: attention's kernels save the seed of their dropout there."""
    x = torch.randn(16, requires_grad=True)
    store = CountingStore()
    store.device = torch.device("cuda")
    with OffloadedRun(lambda: store, nn.Module()), offloaded():
        y = (x * x.detach()).sum()
    y.backward()
    assert store.sizes == []
    assert torch.equal(x.grad, x)


def test_what_is_written_in_between_is_another_value() -> None:
    x = torch.randn(16, requires_grad=True)
    store = CountingStore()
    run = OffloadedRun(lambda: store, nn.Module())
    with run, offloaded():
        h = x * 1.0
        first = h * h.detach()  # saves h
        h.mul_(2)
        second = h * h.detach()  # saves 2 h
    (first.sum() + second.sum()).backward()
    value = x.detach()
    assert torch.allclose(x.grad, value + 4 * value)


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
def test_parts_that_are_written_apart_are_other_values(kind: Any) -> None:
    """Gates are parts of one storage; each is written in place, and then saved."""
    cell = kind(8, 8).double()
    x = torch.randn(5, 4, 8, dtype=torch.float64, requires_grad=True)

    def compute() -> Tensor:
        h = x.new_zeros(4, 8)
        state = (h, h) if kind is nn.LSTMCell else h
        for part in x:
            state = cell(part, state)
        return (state[0] if kind is nn.LSTMCell else state).square().sum()

    store = CountingStore()
    with OffloadedRun(lambda: store, cell), offloaded():
        y = compute()
    leaves = [x, *cell.parameters()]
    expected = torch.autograd.grad(compute(), leaves)
    for mine, theirs in zip(torch.autograd.grad(y, leaves), expected, strict=True):
        assert torch.equal(mine, theirs)
    gates, gate = cell.bias_hh.numel() * 4 * 8, 4 * 8 * 8
    assert store.sizes.count(gates) == 5  # of each step once, its other gates alone
    assert {*store.sizes} == {x.nbytes, gates, gate}


def test_lazy_conjugates_and_negatives_come_back_as_they_were() -> None:
    x = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    weight = torch.randn(4, dtype=torch.complex64, requires_grad=True)

    def compute() -> Tensor:
        h = (x * 2).conj()  # its imaginary part is a lazy negative
        return (h * weight).sum().abs() + (h.imag * weight.abs()).sum()

    with OffloadedRun(FileStore, nn.Module()), offloaded():
        y = compute()
    expected = torch.autograd.grad(compute(), [x, weight])
    y.backward()
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])


def test_inputs_that_stay_do_not_move() -> None:
    x = torch.randn(16, requires_grad=True)
    store = CountingStore()
    with OffloadedRun(lambda: store, nn.Module(), (x,)), offloaded():
        x.square()
    assert store.sizes == []


def test_room_in_the_file_is_used_again() -> None:
    store = FileStore()
    kept = [store.put(torch.full((5000,), n, dtype=torch.uint8)) for n in range(3)]
    for number, stored in enumerate(kept):
        assert stored.fetch().take().unique().tolist() == [number]
    size = os.fstat(store._file.fileno()).st_size
    kept[1].free()
    again = store.put(torch.full((4999,), 7, dtype=torch.uint8))
    assert os.fstat(store._file.fileno()).st_size == size
    assert again.fetch().take().tolist() == [7] * 4999
    assert kept[2].fetch().take().unique().tolist() == [2]


@pytest.mark.slow
def test_room_is_free_once_the_backward_is_done() -> None:
    store = CountingStore()
    x = torch.randn(4096, requires_grad=True)
    for _ in range(3):
        run = OffloadedRun(lambda: store, nn.Module())
        with run, offloaded():
            loss = (x * 2).sin().exp().sum()
        loss.backward()
        del loss, run
        gc.collect()
    assert len(store.sizes) == 6
    assert os.fstat(store._file.fileno()).st_size == 2 * 4096 * 4


def test_the_file_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = FileStore()
    store.put(torch.zeros(10_000, dtype=torch.uint8))
    assert list(tmp_path.iterdir()) == []


def test_outside_of_a_worker_nothing_happens() -> None:
    x = torch.randn(4, requires_grad=True)
    with offloaded():
        y = x.square().sum()
    y.backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_a_failed_forward_leaves_nothing_behind() -> None:
    store = CountingStore()
    run = OffloadedRun(lambda: store, nn.Module())
    with pytest.raises(ZeroDivisionError), run, offloaded():
        raise ZeroDivisionError
    with offloaded():
        torch.randn(4, requires_grad=True).square()
    assert store.sizes == []
