"""The memory of each rank: what it is made of, and how it is made to fit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS
from parity_support import traced
from plan_support import metered_peaks
from schedule_support import chain_of
from threads import run_on_threads
from torch import nn

import gemsc
from gemsc.base.cost import StateBytes
from gemsc.base.elementwise import check_elementwise, updated_whole
from gemsc.codegen.package import write_directory
from gemsc.compiler import lower
from gemsc.costs.hardware import read_hardware
from gemsc.costs.optimizer_memory import optimizer_bytes
from gemsc.errors import GemscError
from gemsc.options import CompileOptions
from gemsc.planner.explain import task_of, timeline_of
from gemsc.planner.fitting import Saving, cheapest
from gemsc.planner.memory import MemoryParts, memory_curve, stage_weights
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import LocalTransport, run_local
from gemsc.schedules import SCHEDULES, StageCost, held_bytes, run
from gemsc.schedules.action import Action, Timed
from gemsc.verify.compare import compare


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


# -------------------------------------------------------------- optimizer state


PARAMETERS = {
    "a": nn.Parameter(torch.zeros(3, 5)),
    "b": nn.Parameter(torch.zeros(7)),
    "fixed": nn.Parameter(torch.zeros(9), requires_grad=False),
}


@pytest.mark.parametrize(
    "optimizer",
    [
        adamw,
        momentum,
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adam(p, amsgrad=True, foreach=False),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
        lambda p: torch.optim.Adafactor(p),
    ],
)
def test_optimizer_state_is_that_of_a_real_step(optimizer) -> None:
    trained = {n: p for n, p in PARAMETERS.items() if p.requires_grad}
    copies = {n: nn.Parameter(p.detach().clone()) for n, p in trained.items()}
    real = optimizer(copies.items())
    for parameter in copies.values():
        parameter.grad = torch.ones_like(parameter)
    real.step()
    wanted = {
        name: sum(
            value.nbytes
            for value in real.state.get(parameter, {}).values()
            if isinstance(value, torch.Tensor)
        )
        for name, parameter in copies.items()
    }
    states = optimizer_bytes(PARAMETERS, optimizer)
    assert {name: state.of(1, 1) for name, state in states.items()} == wanted


def test_the_state_of_a_part_is_shorter_and_has_all_the_counters() -> None:
    state = optimizer_bytes(PARAMETERS, adamw)["a"]
    assert (state.of(15, 15), state.of(5, 15), state.of(0, 15)) == (124, 44, 0)


class Looking(torch.optim.Adam):
    """An optimizer that looks at numbers."""

    def step(self, closure=None):
        for group in self.param_groups:
            if any(bool(p.grad.abs().max() > 1e9) for p in group["params"]):
                raise RuntimeError
        return super().step(closure)


def test_an_optimizer_that_looks_at_numbers_is_measured_small() -> None:
    states = optimizer_bytes(PARAMETERS, lambda p: Looking(p, lr=0.1))
    assert states == {"a": StateBytes(2 * 60, 4), "b": StateBytes(2 * 28, 4)}


def test_no_optimizer_is_plain_sgd() -> None:
    assert optimizer_bytes(PARAMETERS, None) == {}
    assert updated_whole(PARAMETERS, None) == {}


class Lamb(torch.optim.Adam):
    """Steps of Adam, as long as the weights of a tensor are."""

    def step(self, closure=None):
        pairs = [(p, p.detach().clone()) for p in self.param_groups[0]["params"]]
        super().step(closure)
        with torch.no_grad():
            for parameter, before in pairs:
                step = parameter - before
                parameter.copy_(before + step * before.norm() / step.norm())


class Columns(torch.optim.SGD):
    """Divides the gradients of matrices by their largest in each row."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() == 2:
                parameter.grad /= parameter.grad.abs().amax(1, keepdim=True)
        return super().step(closure)


class Factored(Columns):
    """Leaves small matrices as they are, as timm's Adafactor does."""

    def step(self, closure=None):
        groups = self.param_groups
        self.param_groups = [
            {**g, "params": [p for p in g["params"] if min(p.shape) >= 16]}
            for g in groups
        ]
        super().step(closure)
        self.param_groups = groups


def clipped(parameters, bound=0.1):
    """An optimizer that scales all gradients of a group by the norm of all of them."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def clip(*_):
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], bound)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def loosely_clipped(parameters):
    """One whose bound small gradients do not come to."""
    return clipped(parameters, bound=50.0)


class MaxNorm(torch.optim.Adam):
    """Rows of weights stay below a norm, which small ones are far from."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() == 2:
                parameter.copy_(parameter.renorm(2, 0, 10.0))


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        (momentum, set()),
        (lambda p: torch.optim.SGD(p, lr=0.1, nesterov=True, momentum=0.9), set()),
        (lambda p: torch.optim.Adam(p, amsgrad=True, foreach=False), set()),
        (adamw, set()),
        (lambda p: torch.optim.Adagrad(p), set()),
        (lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True), set()),
        (lambda p: Looking(p, lr=0.1), set()),
        (lambda p: torch.optim.Adafactor(p), {"a", "b"}),
        (lambda p: Lamb(p, lr=0.1), {"a", "b"}),
        (lambda p: Columns(p, lr=0.1), {"a"}),
        (lambda p: torch.optim.Muon([p for n, p in p if n == "a"]), {"a"}),
        (lambda p: Factored(p, lr=0.1), {"a"}),
        (clipped, {"a", "b"}),
        (loosely_clipped, {"a", "b"}),
        (lambda p: MaxNorm(p, lr=0.1), {"a"}),
        (lambda p: by_size(p, 9), {"a"}),
        (lambda p: by_size(p, 4, fused=True), {"b"}),
        (lambda p: by_size(p, 1), set()),
    ],
)
def test_optimizers_that_look_across_a_tensor_are_found(optimizer, wanted) -> None:
    before = torch.get_rng_state()
    differences = updated_whole(PARAMETERS, optimizer)
    assert set(differences) == wanted
    assert all(1e-4 < difference < 10 for difference in differences.values())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_found_of_a_weight_holds_for_others_of_its_group() -> None:
    """The second is tried on few numbers only."""
    parameters = {**PARAMETERS, "c": nn.Parameter(torch.zeros(2, 2))}
    assert {*updated_whole(parameters, lambda p: Factored(p, lr=0.1))} == {"a", "c"}


def by_size(parameters, size, **options):
    """Let what is small decay, and nothing else."""
    all_of_them = [parameter for _, parameter in parameters]
    small, large = (
        [tensor for tensor in all_of_them if (tensor.numel() > size) is is_large]
        for is_large in (False, True)
    )
    groups = [{"params": small}, {"params": large, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, **options)


class Distance(torch.optim.SGD):
    """Steps faster once gradients have led the same way, as D-Adaptation does."""

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        group.setdefault("start", [p.clone() for p in group["params"]])
        gone = [a - b for a, b in zip(group["start"], group["params"], strict=True)]
        gone, slope = (
            torch.cat([tensor.flatten() for tensor in tensors])
            for tensors in (gone, [p.grad for p in group["params"]])
        )
        agreed = float(torch.cosine_similarity(gone, slope, 0))
        group["lr"] *= 1 + agreed if agreed > 0.7 else 1
        return super().step(closure)


def deeper_is_faster(parameters):
    groups = enumerate(parameter for _, parameter in parameters)
    return torch.optim.SGD([{"params": [p], "lr": 0.1 * 2**i} for i, p in groups])


def clipped_by_layer(parameters):
    """Return what clips by the norm of a weight and its bias together."""
    layers = itertools.groupby(parameters, key=lambda pair: pair[0].split(".")[0])
    return clipped([{"params": [*pairs]} for _, pairs in layers])


@pytest.mark.slow(5)
@pytest.mark.parametrize(
    ("optimizer", "options", "count"),
    [
        (clipped, {"ranks": 2}, 1),
        (clipped_by_layer, {"ranks": 2}, 0),
        (clipped_by_layer, {"ranks": 2, "data": 2, "shard": "optimizer"}, 1),
        (loosely_clipped, {"ranks": 2}, 1),
        (deeper_is_faster, {"ranks": 2}, 1),
        (lambda p: Distance([q for _, q in p], lr=1.0), {"ranks": 2}, 1),
        (clipped, {"ranks": 1}, 0),
        (clipped, {"ranks": 2, "data": 2}, 0),
        (clipped, {"ranks": 2, "data": 2, "shard": "optimizer"}, 1),
        (torch.optim.Adam, {"ranks": 2, "data": 2, "shard": "optimizer"}, 0),
        (clipped, {"ranks": 2, "schedule": "mast", "micro_batches": 2}, 0),
        (clipped, {"ranks": 2, "tiles": "2x1", "micro_batches": 2}, 0),
        (lambda p: torch.optim.Adafactor(p), {"ranks": 2}, 0),
        (
            lambda p: torch.optim.SGD([q for n, q in p if n == "2.bias"]),
            {"ranks": 2},
            0,
        ),
        (None, {"ranks": 2}, 0),
    ],
)
def test_an_optimizer_that_needs_parameters_of_other_ranks_is_told(
    optimizer, options, count
) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3))
    x = torch.zeros(2, 1, 8, 8)
    feed = {"loss": nn.MSELoss(), "example_target": torch.zeros(2, 1, 6, 6)}
    program = gemsc.compile(model, (x,), **feed, optimizer=optimizer, **options)
    told = [note for note in program.plan.notes if "several parameters at once" in note]
    assert len(told) == count
    assert all("--clip-norm" in note for note in told)


def test_what_looks_across_a_tensor_is_not_cut() -> None:
    differences = {"layers.0.up.weight": 0.03, "layers.1.up.weight": 0.5}
    check_elementwise(differences, ["layers.0.up.bias"])
    with pytest.raises(GemscError) as error:
        check_elementwise(differences, ["layers.0.up.bias", *differences])
    assert error.value.message == (
        "optimizer() looks across 'layers.0.up.weight' (its halves step differently, "
        "by 3e-02)"
    )
    assert error.value.help == (
        "use an elementwise optimizer, or leave out --shards"  # nothing else is cut
    )
    with pytest.raises(GemscError) as error:
        check_elementwise(differences, [*differences, "head.bias"], [])
    assert error.value.help == (
        "use an elementwise optimizer, or --whole layers.0.up,layers.1.up"
    )
    untried = updated_whole(PARAMETERS, lambda p: torch.optim.LBFGS([p for _, p in p]))
    with pytest.raises(GemscError, match="cannot be tried on parts of 'a'"):
        check_elementwise(untried, ["b", "a"][::-1])


# ------------------------------------------------------------------ the timeline


def test_what_a_rank_holds_over_time() -> None:
    cost = StageCost(
        1.0, 2.0, saved_bytes=10, resident_bytes=100, transient_bytes=5,
        first_transient_bytes=8, gradient_bytes=50,
    )  # fmt: skip
    task = chain_of([cost], [2])
    timeline = run(task, SCHEDULES["gpipe"].policy)
    rows = [
        (held.saved, held.transient, held.gradients)
        for held in held_bytes(task, 0, timeline.ranks[0])
    ]
    assert rows == [
        *((10, 0, 0), (20, 0, 0)),  # two forwards
        *((20, 5, 3), (10, 0, 50)),  # the first backward makes the gradients
        *((10, 5, 50), (0, 0, 50)),
    ]
    assert timeline.peak_bytes == (100 + 10 + 5 + 50,)
    assert timeline.peak_activation_bytes == (25,)


def timed(order: str) -> list[Timed]:
    return [Timed(Action.parse(action), 0.0, 0.0) for action in order.split()]


def test_what_a_rank_holds_of_backwards_in_two_parts() -> None:
    cost = StageCost(
        1.0, 2.0, 1.0, saved_bytes=10, waiting_bytes=4, gradient_bytes=50,
        waiting_gradient_bytes=20, split_transient_bytes=3,
        first_split_transient_bytes=6, weight_working_bytes=7,
    )  # fmt: skip
    actions = timed("0F0 0F1 0B0 0B1 0W0 0W1")
    assert [
        (held.saved, held.transient, held.gradients, held.working)
        for held in held_bytes(chain_of([cost], [2]), 0, actions)
    ] == [
        *((10, 0, 0, 0), (20, 0, 0, 0)),
        *((20, 3, 3, 0), (14, 0, 30, 0)),  # 4 bytes of each wait
        *((14, 3, 30, 0), (8, 0, 30, 0)),
        *((8, 0, 50, 0), (4, 0, 50, 0)),  # the first ones are made
        *((4, 0, 50, 7), (0, 0, 50, 0)),  # others are added to them
    ]


@pytest.mark.parametrize(
    ("most", "gathered"),
    [
        (1, [109, 100, 109, 100, 100, 105, 109, 100, 105]),
        (2, [109, 209, 200, 200, 205, 200, 205]),  # one is on its way meanwhile
    ],
)
def test_what_a_rank_holds_of_weights_in_parts(most: int, gathered: list[int]) -> None:
    cost = StageCost(
        1.0, 2.0, saved_bytes=0, gathered_bytes=100, packed_bytes=9, scatter_bytes=5
    )
    task = chain_of([cost] * 2, [1], placement=[[0, 0]])
    task = replace(task, whole_stages=most)
    held = held_bytes(task, 0, timed("0F0 1F0 1B0 0B0"))
    assert [moment.total for moment in held] == gathered


@pytest.mark.slow
def test_the_parts_of_the_peak(tmp_path: Path) -> None:
    case = MODELS["resnet18"]
    graph = traced("resnet18")
    state = optimizer_bytes(dict(graph.program.module.named_parameters()), adamw)
    graph = replace(graph, program=replace(graph.program, optimizer_bytes=state))
    program = lower(graph, CompileOptions(ranks=2, micro_batches=4))
    write_directory(program.compilation, tmp_path / "program")
    batch = case.inputs(4, torch.float32)
    record = run_on_threads(
        tmp_path / "program", 2, [batch] * 2, dtype=torch.float32, optimizer=adamw
    )
    plan = program.plan
    assert record.peak_bytes == metered_peaks(plan)
    trained = sum(p.nbytes for p in case.build().parameters())
    assert sum(part["optimizer"] for part in plan.memory) > 2 * trained
    for part, peak in zip(plan.memory, plan.peak_bytes, strict=True):
        assert MemoryParts(**part).total == peak


def test_the_curve_begins_with_the_weights() -> None:
    program = lower(traced("unet"), CompileOptions(ranks=2))
    compilation = program.compilation
    task, timeline = task_of(program.plan), timeline_of(program.plan)
    curve = memory_curve(stage_weights(compilation.program), task, timeline, 0)
    assert curve[0][1].total == curve[0][1].parameters
    assert max(parts.total for _, parts in curve) == program.plan.peak_bytes[0]


# ------------------------------------------------------------------- to make fit


def test_the_cheapest_set() -> None:
    savings = [
        Saving((0,), "recompute", 100, 1.0),
        Saving((1,), "recompute", 60, 0.4),
        Saving((2,), "recompute", 60, 0.4),
        Saving((2,), "offload", 100, 0.9),
    ]
    assert cheapest(savings, 100) == (savings[1], savings[2])
    assert cheapest(savings, 101) == (savings[1], savings[2])
    assert cheapest(savings, 150) == (savings[1], savings[3])
    assert cheapest(savings, 260) == (savings[0], savings[1], savings[3])
    assert cheapest(savings, 261) is None
    assert cheapest(savings, 0) == ()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(1, 150),
)
def test_the_cheapest_set_is_the_best_of_all(pairs, needed) -> None:
    savings = [Saving((i,), "recompute", *pair) for i, pair in enumerate(pairs)]
    costs = [
        sum(saving.seconds for saving in some)
        for count in range(len(savings) + 1)
        for some in itertools.combinations(savings, count)
        if sum(saving.freed for saving in some) >= needed
    ]
    taken = cheapest(savings, needed)
    if not costs:
        assert taken is None
    else:
        assert sum(saving.seconds for saving in taken) == min(costs)
        assert sum(saving.freed for saving in taken) >= needed


@pytest.mark.slow(1)
@pytest.mark.by_day(2)
@pytest.mark.parametrize("kind", ["recompute", "offload"])
@pytest.mark.parametrize(
    ("name", "schedule"), [("unet", "1f1b"), ("resnet18", "gpipe")]
)
def test_auto_stays_under_the_cap(
    name: str, schedule: str, kind: str, tmp_path: Path
) -> None:
    options = CompileOptions(ranks=2, schedule=schedule, micro_batches=4)
    free = lower(traced(name), options)
    everything = lower(traced(name), replace(options, **{kind: ("all",)}))
    peaks = max(free.plan.peak_bytes), max(everything.plan.peak_bytes)
    assert peaks[1] < peaks[0]
    cap = (peaks[0] + peaks[1]) // 2
    fitted = replace(options, device_memory=cap, **{kind: ("auto",)})
    program = lower(traced(name), fitted)
    assert max(program.plan.peak_bytes) <= cap
    assert program.plan.step_seconds <= everything.plan.step_seconds
    write_directory(program.compilation, tmp_path / "program")
    batch = MODELS[name].inputs(4, torch.float32)
    record = run_on_threads(tmp_path / "program", 2, [batch] * 2, dtype=torch.float32)
    assert max(record.peak_bytes) <= cap
    assert record.peak_bytes == metered_peaks(program.plan)


@pytest.mark.slow
def test_neighbours_as_one_fit_where_all_blocks_alone_do_not(tmp_path: Path) -> None:
    options = CompileOptions(ranks=2, micro_batches=4)
    alone = lower(traced("unet"), replace(options, recompute=("all",)))
    cap = int(0.98 * max(alone.plan.peak_bytes))
    fitted = replace(options, device_memory=cap, recompute=("auto",))
    plan = lower(traced("unet"), fitted).plan
    assert max(plan.peak_bytes) <= cap
    assert any(".." in name for stage in plan.stages for name in stage.recompute)
    batch = MODELS["unet"].inputs(4, torch.float32)
    records = []
    for choice in (options, fitted):
        folder = tmp_path / str(len(records))
        write_directory(lower(traced("unet"), choice).compilation, folder)
        records.append(run_on_threads(folder, 2, [batch] * 2, dtype=torch.float32))
    assert records[1].peak_bytes == metered_peaks(plan)
    diff = compare(records[1], records[0])
    assert diff.equal == diff.total


def test_joined_savings_take_the_place_of_their_blocks() -> None:
    savings = [
        Saving((0,), "recompute", 50, 1.0),
        Saving((1,), "recompute", 50, 1.0),
        Saving((2,), "recompute", 50, 1.0),
        Saving((0, 1), "recompute", 130, 2.5),
    ]
    assert cheapest(savings, 100) == (savings[0], savings[1])
    assert cheapest(savings, 130) == (savings[3],)
    assert cheapest(savings, 180) == (savings[3], savings[2])
    assert cheapest(savings, 181) is None


@pytest.mark.slow(1)
@pytest.mark.parametrize("ratio", [0.5, 4.0])
def test_offloading_costs_what_the_machine_takes(ratio: float, tmp_path: Path) -> None:
    hardware = read_hardware()
    path = tmp_path / "other.toml"
    other = replace(
        hardware.device, host_bandwidth=hardware.device.host_bandwidth * ratio
    )
    replace(hardware, device=other).write(path)
    options = CompileOptions(ranks=1, offload=("layer1",))
    kept, moved, changed = (
        lower(traced("resnet18"), choice).plan.stages[0].cost
        for choice in (
            replace(options, offload=()),
            options,
            replace(options, hardware=str(path)),
        )
    )
    for name in ("forward", "backward"):
        copy, again = (getattr(s, name) - getattr(kept, name) for s in (moved, changed))
        assert copy > 0
        assert again == pytest.approx(copy / ratio)


def test_a_cap_that_all_keeps_to_changes_nothing() -> None:
    options = CompileOptions(device_memory=10**9, recompute=("auto",))
    program = lower(traced("unet"), options)
    assert program.compilation.program.segments == ()


@pytest.mark.slow
def test_a_cap_that_nothing_keeps_to_is_refused() -> None:
    options = CompileOptions(device_memory=1000, recompute=("auto",))
    with pytest.raises(GemscError, match="the lowest peak found is") as error:
        lower(traced("unet"), options)
    assert "--ranks" in error.value.help


@pytest.mark.slow
def test_just_below_what_1f1b_needs(tmp_path: Path) -> None:
    need = max(lower(traced("unet"), CompileOptions(ranks=2)).plan.peak_bytes)
    options = CompileOptions(
        ranks=2, schedule="auto", recompute=("auto",), device_memory=need - 1
    )
    plan = lower(traced("unet"), options).plan
    recomputed = [name for stage in plan.stages for name in stage.recompute]
    assert recomputed or (plan.schedule, plan.placement) != ("1f1b", "linear")
    assert max(plan.peak_bytes) < need
    program = lower(traced("unet"), replace(options, schedule="1f1b"))
    assert max(program.plan.peak_bytes) < need
    write_directory(program.compilation, tmp_path / "program")
    batch = MODELS["unet"].inputs(4, torch.float32)
    record = run_on_threads(tmp_path / "program", 2, [batch] * 2, dtype=torch.float32)
    assert max(record.peak_bytes) < need


@pytest.mark.slow
def test_an_open_schedule_recomputes_where_nothing_else_fits() -> None:
    options = CompileOptions(ranks=2, micro_batches=1)
    lean = lower(traced("unet"), replace(options, recompute=("all",)))
    cap = max(lean.plan.peak_bytes) + 1000
    assert cap < max(lower(traced("unet"), options).plan.peak_bytes)
    open_ = {"schedule": "auto", "placement": "linear", "device_memory": cap}
    program = lower(traced("unet"), replace(options, **open_))
    assert any(stage.recompute for stage in program.plan.stages)
    assert max(program.plan.peak_bytes) <= cap
    assert "recompute" in program.candidates[0].name


def test_what_libraries_take_counts_on_every_rank(tmp_path: Path) -> None:
    text = (Path(gemsc.__file__).parent / "hardware" / "cpu-core.toml").read_text()
    path = tmp_path / "gpu.toml"
    size = 3 * 2**20
    path.write_text(text.replace("workspace_bytes = 0", f"workspace_bytes = {size}"))
    plain = lower(traced("mlp"), CompileOptions(ranks=2)).plan
    plan = lower(traced("mlp"), CompileOptions(ranks=2, hardware=str(path))).plan
    assert plan.peak_bytes == [peak + size for peak in plain.peak_bytes]
    assert [part["workspace"] for part in plan.memory] == [size, size]
    assert timeline_of(plan).peak_bytes == tuple(plan.peak_bytes)


@pytest.mark.gpu
def test_the_peak_on_a_gpu_is_near_the_predicted_one(tmp_path: Path) -> None:
    """What operators need for a moment comes on top there, and is not predicted.

    Nor is what cuBLAS keeps from its first product on, 32 MiB on a Hopper.
    """
    program = lower(traced("resnet18"), CompileOptions(ranks=1, micro_batches=2))
    write_directory(program.compilation, tmp_path)
    inputs, target = MODELS["resnet18"].inputs(program.plan.micro_batches)

    def main(transport: LocalTransport) -> int:
        trainer = Trainer(tmp_path, transport, device=torch.device("cuda"))
        before = torch.cuda.memory_allocated()
        torch.mm(*torch.ones(2, 64, 64, device="cuda"))
        kept = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            trainer.step(inputs, target)
        return torch.cuda.max_memory_allocated() - kept

    (measured,) = run_local(1, main)
    (predicted,) = program.plan.peak_bytes
    assert predicted <= measured <= 2 * predicted
