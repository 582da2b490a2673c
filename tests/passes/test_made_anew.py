"""What depends on shapes and numbers only is made where it is used, not sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plan_support import metered_peaks
from program_support import (
    Net,
    X,
    against_one_process,
    batch_of,
    mse,
    on_ranks,
    run_passes,
    written,
)
from threads import run_on_threads
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gemsc.base.grid_shape import GridShape
from gemsc.base.phase import Phase
from gemsc.compiler import CompiledProgram, compile, trace
from gemsc.costs.hardware import LinkSpeed
from gemsc.ir import meta
from gemsc.ir.program import Program
from gemsc.passes.balance_stages import BalanceStages
from gemsc.passes.constants.make_again import MakeAgain
from gemsc.runtime.memory.once import once

TABLE = torch.randn(4)


def compiled(forward: Callable[..., Any], **attributes: Any) -> CompiledProgram:
    """Return a program of four stages, a linear layer each."""
    net = Net(forward, **attributes)
    options: dict[str, Any] = {"ranks": 4, "micro_batches": 4}
    return compile(net, (X,), loss=mse, example_target=X, check=False, **options)


def sent(program: Program) -> list[str]:
    """Return what is sent beside what the layers compute."""
    values = [v for t in program.transfers or () for v in t.values]
    return [v.name for v in values if not v.name.startswith("h")]


def chain(self: Any, h: Tensor, factor: Tensor) -> Tensor:
    """Use a factor behind each of the layers."""
    h1 = torch.tanh(self.a(h)) * factor
    h2 = torch.tanh(self.b(h1)) * factor
    h3 = torch.tanh(self.c(h2)) * factor
    return self.d(h3) * factor


def positions(self: Any, x: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(2.0), self.frequencies)
    return chain(self, x, angles.cos() + angles.sin())


class Positions(Net):
    """A factor of each place, of a buffer that stays, as in rotary embeddings."""

    def __init__(self, forward: Any = positions) -> None:
        super().__init__(forward)
        self.register_buffer("frequencies", TABLE.clone(), persistent=False)


@pytest.mark.slow
def test_a_table_of_a_buffer_is_made_on_each_stage_once() -> None:
    program = compile(
        Positions(), (X,), loss=mse, example_target=X, ranks=4, micro_batches=4
    )
    assert sent(program.compilation.program) == []
    assert sent(program.compilation.evaluation) == []
    for text in program.compilation.files.values():
        assert "= once(self.constants, self.frequencies)" in text
    (made,) = program.plan.made
    assert (made["stages"], made["when"]) == ([1, 2, 3], "once")
    assert [made["num_bytes"]] == [X.numel() * 4]


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "choices",
    [
        {"ranks": 4, "schedule": "1f1b"},
        {"ranks": 4, "schedule": "1f1b", "recompute": ("all",)},
        {"ranks": 4, "schedule": "1f1b", "offload": ("b", "c")},
        {"ranks": 2, "schedule": "mast", "micro_batches": 2},
        {"ranks": 2, "schedule": "interleaved", "micro_batches": 4},
        {"ranks": 4, "schedule": "zb-h1", "micro_batches": 4},
        {"ranks": 4, "data": 2, "micro_batches": 2},
    ],
    ids=str,
)
def test_a_step_is_that_of_one_process(choices: dict[str, Any], tmp_path: Path) -> None:
    result = against_one_process(tmp_path, Positions(), **choices)
    assert result.worst < 1e-12


def steps(self: Any, x: Tensor) -> Tensor:
    for layer, factor in zip(
        (self.a, self.b, self.c, self.d), self.frequencies, strict=True
    ):
        x = torch.tanh(layer(x)) * factor
    return x


@pytest.mark.slow(1)
def test_a_block_is_given_the_items_of_a_table_not_the_tuple(tmp_path: Path) -> None:
    result = against_one_process(
        tmp_path, Positions(steps), ranks=2, recompute=("all",)
    )
    assert result.worst < 1e-12


def kept(self: Any, x: Tensor) -> Tensor:
    drawn = F.dropout(torch.ones(2, 4), 0.5)
    return chain(self, x, drawn)


def noise(self: Any, x: Tensor) -> Tensor:
    return chain(self, x, torch.rand(2, 4).round())


def learned(self: Any, x: Tensor) -> Tensor:
    return chain(self, x, self.table.exp())


def frozen(self: Any, x: Tensor) -> Tensor:
    return chain(self, x, self.frozen.exp())


def changing(self: Any, x: Tensor) -> Tensor:
    factor = self.count.exp()
    self.count += 1
    return chain(self, x, factor)


def changing_in_evaluation(self: Any, x: Tensor) -> Tensor:
    if not self.training:
        self.count += 1
    return chain(self, x, self.count.exp())


def statistics(self: Any, x: Tensor) -> Tensor:
    factor = self.norm.running_mean.exp()
    return chain(self, self.norm(x), factor)


def assigned(self: Any, x: Tensor) -> Tensor:
    mask = torch.ones(2, 4)
    mask[:, 1:] = 0.0
    return chain(self, x, mask)


def of_the_input(self: Any, x: Tensor) -> Tensor:
    return chain(self, x, (x > 0).float())


STATE = {
    "table": nn.Parameter(TABLE.clone()),
    "frozen": nn.Parameter(TABLE.clone(), requires_grad=False),
    "norm": nn.BatchNorm1d(4),
}


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "forward",
    [
        *(kept, noise, learned, frozen, changing, changing_in_evaluation),
        *(statistics, assigned, of_the_input),
    ],
)
def test_what_is_drawn_learned_or_changed_is_made_in_one_place(forward: Any) -> None:
    net = Net(forward, **STATE)
    net.register_buffer("count", torch.zeros(4))
    options: dict[str, Any] = {"ranks": 4, "micro_batches": 1, "check": False}
    program = compile(net, (X,), loss=mse, example_target=X, **options)
    assert program.plan.made == []
    assert len(sent(program.compilation.program)) == 3
    assert not any("once(" in text for text in program.compilation.files.values())


@pytest.mark.slow
def test_gradients_of_a_learned_table_are_summed_from_all_stages(
    tmp_path: Path,
) -> None:
    net = Net(learned, table=nn.Parameter(TABLE.clone()))
    assert against_one_process(tmp_path, net, ranks=4).worst < 1e-12


@pytest.mark.slow(1)
@pytest.mark.parametrize("recompute", [(), ("all",)])
def test_memory_is_predicted_to_the_byte(
    recompute: tuple[str, ...], tmp_path: Path
) -> None:
    """A table that each backward needs is there once, not once a micro-batch."""
    program = written(
        tmp_path, Positions(), ranks=4, micro_batches=4, recompute=recompute
    )
    batch = batch_of(((X,), X), 4)
    record = run_on_threads(tmp_path, 4, [batch] * 2, dtype=torch.float32)
    assert record.peak_bytes == metered_peaks(program.plan)


def test_what_is_made_again_has_memory_of_its_own_on_each_stage() -> None:
    """A rank of two stages keeps a table for each of them."""

    def plain(self: Any, x: Tensor) -> Tensor:
        return chain(self, x, torch.ones(2, 4).cumsum(0))

    traced = trace(Net(plain), (X,), loss=mse, example_target=X, check=False)
    cut = run_passes(traced.program, [BalanceStages(num_stages=4)])
    costly = LinkSpeed(latency=1.0, bandwidth=1.0)
    program = run_passes(cut, [MakeAgain(costly, changing=frozenset({"none"}))])
    saved = [
        {key for node in stage.nodes for key, _ in meta.facts(node).storages if key < 0}
        for stage in program.require_stages()
    ]
    assert not saved[0]
    assert all(saved[1:])
    assert saved[1].isdisjoint(saved[2])


@pytest.mark.slow
def test_ranks_of_a_grid_make_it_where_that_is_cheaper_than_the_message() -> None:
    traced = trace(Positions(), (X,), loss=mse, example_target=X, check=False)
    cut = run_passes(traced.program, [BalanceStages(num_stages=2)])
    grids = GridShape(), GridShape(shards=2)

    def made(latency: float) -> bool:
        link = LinkSpeed(latency=latency, bandwidth=1e9)
        return run_passes(cut, [MakeAgain(link, grids=grids)]) is not cut

    assert made(1.0)
    assert not made(1e-9)


def test_a_mask_does_not_tie_the_layers_that_use_it() -> None:
    def two(self: Any, x: Tensor) -> Tensor:
        factor = torch.ones(2, 4).cumsum(0)
        return self.b(torch.tanh(self.a(x)) * factor) * factor

    net = Net(two)
    del net.c, net.d
    program = trace(net, (X,), loss=mse, example_target=X, check=False).program
    assert not program.skips
    assert [block.name for block in program.blocks or ()] == ["a", "b"]


class Modal(Positions):
    """In evaluation another graph, which uses the table too."""

    def __init__(self) -> None:
        def forward(self: Any, x: Tensor) -> Tensor:
            result = positions(self, x)
            return result if self.training else torch.relu(result) + 1

        super().__init__(forward)


@pytest.mark.slow
def test_another_graph_in_evaluation_makes_it_too(tmp_path: Path) -> None:
    net = Modal()
    program = written(tmp_path, net, ranks=4, micro_batches=1)
    assert program.compilation.whole.twins is None
    assert sent(program.compilation.evaluation) == []
    output = on_ranks(tmp_path, 4, lambda t: t.evaluate(X, X))[3].output
    torch.testing.assert_close(output, net.eval()(X))


class Stage(nn.Module):
    """A stage as it is written, which counts how often its table is made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(2))
        self.calls = 0

    def constants(self) -> Tensor:
        self.calls += 1
        table: Any = self.table
        return (table + 1).to(self.layer.weight.dtype)

    def forward(self) -> Tensor:
        table: Any = self.table
        return once(self.constants, table)


def test_it_is_made_once_until_what_it_depends_on_changes() -> None:
    stage = Stage()
    first = stage()
    assert stage() is first
    stage.table.copy_(torch.full((2,), 5.0))  # type: ignore[operator]
    assert stage().tolist() == [6.0, 6.0]
    stage.double()
    assert stage().dtype == torch.float64
    stage.eval()
    assert stage() is stage()
    assert stage.calls == 4


def test_who_writes_to_it_spoils_no_later_call() -> None:
    stage = Stage()
    stage().zero_()
    assert stage().tolist() == [2.0, 2.0]


class _Doubles(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.add.Tensor else result


def test_where_operators_mean_something_else_it_is_made_with_these() -> None:
    """As in `gemsc verify --all-inputs`, which computes over a finite field."""
    stage = Stage()
    plain = stage()
    with _Doubles():
        assert stage().tolist() == [4.0, 4.0]
        assert stage().tolist() == [4.0, 4.0]
    assert stage() is plain


def test_two_stages_do_not_share_it() -> None:
    one, other = Stage(), Stage()
    other.table.zero_()  # type: ignore[operator]
    assert (one().tolist(), other().tolist()) == ([2.0, 2.0], [1.0, 1.0])


@pytest.mark.slow
def test_a_compiled_forward_makes_it_inside_of_its_graph() -> None:
    stage = Stage()
    forward: Any = torch.compile(stage.forward, fullgraph=True, backend="eager")
    assert forward().tolist() == [2.0, 2.0]
    stage.table.zero_()  # type: ignore[operator]
    assert forward().tolist() == [1.0, 1.0]


class Turned(nn.Module):
    """Adds a constant to a product."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.layer(x).mean(0, keepdim=True) + torch.eye(4))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.d = nn.Sequential(nn.Linear(4, 4), Turned(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.g(x)


def d_loss(model: Any, x: Tensor, target: Tensor) -> Tensor:
    return model.d(target).square().mean()


def g_loss(model: Any, x: Tensor, target: Tensor) -> Tensor:
    return mse(model.d(model.g(x)), target)


@pytest.mark.slow
def test_a_stage_that_makes_it_for_others_alone_leaves_it_out() -> None:
    phases = [
        Phase(name, loss=loss, train=name, optimizer=torch.optim.SGD)
        for name, loss in (("d", d_loss), ("g", g_loss))
    ]
    compile(Pair(), (X,), example_target=X, phases=phases, ranks=2, micro_batches=2)
