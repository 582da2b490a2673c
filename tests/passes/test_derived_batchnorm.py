"""Classes that derive from BatchNorm and normalize by themselves, as timm's do."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest
import torch
from program_support import compared, mean
from torch import Tensor, nn
from torch.nn import functional as F

import gemsc
from gemsc.compiler import Traced, lower, trace
from gemsc.errors import GemscError
from gemsc.options import CompileOptions

X = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Act(nn.BatchNorm2d):
    """Counts, normalizes and activates; `changes` say what it does otherwise."""

    def __init__(self, channels: int, **changes: Any) -> None:
        affine = changes.pop("affine", True)
        super().__init__(channels, affine=affine)
        self.changes = changes
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        count, changes = self.num_batches_tracked, self.changes
        assert count is not None
        if self.training:
            count.add_(changes.get("step", 1))
        momentum = changes.get("momentum", self.momentum)
        norm = partial(F.batch_norm, momentum=momentum, eps=self.eps)
        means = self.running_mean, self.running_var
        x = norm(x, *means, self.weight, self.bias, self.training)
        if changes.get("again"):
            x = norm(x, *means, self.weight, self.bias, self.training)
        return self.act(x) + (count if changes.get("reads") else 0)


class Uncounted(Act):
    def forward(self, x: Tensor) -> Tensor:
        norm = partial(F.batch_norm, momentum=0.1, eps=self.eps)
        means = self.running_mean, self.running_var
        return self.act(norm(x, *means, self.weight, self.bias, self.training))


class Fixed(nn.BatchNorm2d):
    """Has an average of all that it has seen, which is nothing, and uses it."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        means = self.running_mean, self.running_var
        return F.batch_norm(x, *means, self.weight, self.bias)


def network(norm: Any = Act, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, 8, 8):
        convolution = nn.Conv2d(channels, 8, 3, padding=1)
        layers += [convolution, norm(8, **changes)]
    return nn.Sequential(*layers, nn.Conv2d(8, 1, 1))


def compiled(model: nn.Module, **options: Any) -> gemsc.CompiledProgram:
    """Return what a step of its files, as `compile` runs it, has found exact."""
    program = gemsc.compile(model, (X,), loss=mean, **options)
    assert program.plan.unchecked == ""
    return program


@functools.cache
def traced(norm: Any = Act, frontend: str = "record", **changes: Any) -> Traced:
    """Return the network, traced and compared with itself for all layouts."""
    return trace(network(norm, **changes), (X,), loss=mean, frontend=frontend)


def check(norm: Any = Act, frontend: str = "record", **options: Any) -> None:
    """Check that a step of the network is exact where it is split so."""
    graphs, model = traced(norm, frontend), network(norm)
    program = compared(graphs, model, (X,), mean, frontend=frontend, **options)
    assert program.plan.unchecked == ""


LAYOUTS: dict[str, dict[str, Any]] = {
    "in flight": {"ranks": 2, "micro_batches": 4},
    "copies": {"ranks": 2, "data": 2, "micro_batches": 2},
    "copies of stages": {"ranks": 4, "data": 2, "micro_batches": 3},
    "mirrored": {"ranks": 2, "schedule": "mast", "micro_batches": 4},
    "tiles": {"ranks": 3, "tiles": ("2x1",), "micro_batches": 3},
    "copies of tiles": {"ranks": 4, "data": 2, "tiles": ("2x1",), "micro_batches": 2},
    "shards": {"ranks": 2, "shards": ("2",), "micro_batches": 2},
    "copies of shards": {"ranks": 4, "data": 2, "shards": ("2",), "micro_batches": 2},
}


@pytest.mark.slow(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_compute_what_one_process_does(layout: str) -> None:
    check(**LAYOUTS[layout])


def test_on_tiles_statistics_advance_once_where_a_block_runs_again() -> None:
    """The grid writes them there: no layer is called."""
    again = {"tiles": ("2x1",), "micro_batches": 2, "recompute": "all"}
    compiled(network(nn.BatchNorm2d), ranks=2, **again)


def test_of_fixed_or_absent_weights(tmp_path: Any) -> None:
    model = network()
    model[1].weight.requires_grad_(requires_grad=False)
    program = compiled(model, ranks=2, data=2, micro_batches=2)
    program.write(tmp_path)
    text = (tmp_path / "rank0.py").read_text()
    assert 'self["1"] = nn.BatchNorm2d(8)\n' in text
    assert 'self["1"].weight.requires_grad_(False)\n' in text
    compiled(network(affine=False), ranks=2, data=2, micro_batches=2)


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    "changes",
    [{"step": 2}, {"momentum": 0.2}, {"again": True}, {"reads": True}],
    ids=str,
)
def test_what_is_done_otherwise_is_exact_alone_and_refused_with_replicas(
    changes: dict[str, Any],
) -> None:
    graphs, model = traced(**changes), network(**changes)
    program = compared(graphs, model, (X,), mean, ranks=2, micro_batches=4)
    assert program.plan.unchecked == ""
    with pytest.raises(GemscError, match="of 2 replicas"):
        lower(graphs, CompileOptions(ranks=2, data=2, micro_batches=2))


def test_statistics_that_are_fixed_stay() -> None:
    compiled(network(Fixed), ranks=2, data=2, micro_batches=2)


@pytest.mark.parametrize(
    "norm", [Uncounted, partial(nn.InstanceNorm2d, track_running_stats=True)]
)
def test_without_a_count_replicas_do_not_join(norm: Any) -> None:
    with pytest.raises(GemscError, match=r"'1.running_mean', and each of 2 replicas"):
        compiled(network(norm), ranks=2, data=2, micro_batches=2)


@pytest.mark.slow(1)
@pytest.mark.parametrize("layout", ["in flight", "copies", "mirrored"])
def test_an_exported_layer_is_such_a_class(layout: str) -> None:
    check(nn.BatchNorm2d, "export", **LAYOUTS[layout])


def test_what_data_writes_into_a_buffer_is_refused_with_replicas() -> None:
    """A constant that is written again and again stays the same; a value does not."""

    class Written(nn.Module):
        def __init__(self, reads: bool) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 1, 1)
            self.register_buffer("seen", torch.ones(2))
            self.reads = reads

        def forward(self, x: Tensor) -> Tensor:
            self.seen[0] = x.mean() if self.reads else 2.0
            return self.last(self.first(x))

    compiled(Written(reads=False), ranks=2, data=2)
    with pytest.raises(GemscError, match="changes 'seen', and each of 2 replicas"):
        compiled(Written(reads=True), ranks=2, data=2)
