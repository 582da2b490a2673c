"""After canonicalize no value is overwritten, and the graph is still the model."""

from __future__ import annotations

import copy
import itertools
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from gemsc.frontend import record
from gemsc.frontend.check import check_against_eager
from gemsc.ir import meta
from gemsc.ir.mutation import mutated_inputs, mutated_state
from gemsc.ir.program import Program
from gemsc.passes.canonicalize import Canonicalize

torch.set_num_threads(1)
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 4)
        self.act = nn.Sequential(nn.ReLU(inplace=True))
        self.elu = nn.ELU(inplace=True)
        self.bn = nn.BatchNorm1d(4)
        self.same = nn.Identity()
        self.drop = nn.Dropout(0.3)
        self.register_buffer("state", torch.zeros(4))
        self.steps = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.steps(self, x)


def mean(output: Any) -> torch.Tensor:
    return (output * torch.arange(1.0, 1.0 + output.shape[-1])).mean()


def canonical(forward: Any, *, check: bool = True) -> Program:
    torch.manual_seed(0)
    model = Model(forward)
    program = record(model, (X,), loss=mean)
    before = str(program.graph)
    result = Canonicalize().apply(program)
    assert str(program.graph) == before
    assert model.act[0].inplace
    if check:
        check_against_eager(program, model, (X,), mean)
        check_against_eager(result, model, (X,), mean)
    again = Canonicalize().apply(result)
    if check:
        check_against_eager(again, model, (X,), mean)
    nothing_is_overwritten_in_flight(result)
    return result


def nothing_is_overwritten_in_flight(program: Program) -> None:
    """Whatever changes in place was made in the same glued run."""
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    for node in program.compute_nodes:
        for source in mutated_inputs(node, program.module):
            if source.op != "get_attr":
                assert meta.glue(source) is not None
                assert meta.glue(source) == meta.glue(node)
            assert source.op != "placeholder"
    groups: dict[int, list[int]] = {}
    for node in program.compute_nodes:
        group = meta.glue(node)
        if group is not None:
            groups.setdefault(group, []).append(order[node])
    spans = sorted((min(g), max(g)) for g in groups.values())
    assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))


def targets(program: Program) -> list[Any]:
    return [node.target for node in program.compute_nodes]


def glue_of(program: Program, target: Any) -> set[int | None]:
    nodes = [node for node in program.compute_nodes if node.target == target]
    assert nodes
    return {meta.glue(node) for node in nodes}


def changing(program: Program) -> list[fx.Node]:
    nodes = program.compute_nodes
    return [node for node in nodes if mutated_inputs(node, program.module)]


# Calls that have a twin


def test_methods_operators_functions_and_layers_lose_their_change() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.act(self.fc(x))
        h = h * 1
        h += x
        h.mul_(2).clamp_(max=3)
        h = F.leaky_relu(h, 0.1, inplace=True)
        return torch.relu_(h - 1)

    program = canonical(forward)
    assert changing(program) == []
    called = targets(program)
    assert {operator.add, "mul", "clamp", F.leaky_relu, torch.relu} <= set(called)
    assert all(meta.glue(node) is None for node in program.graph.nodes)
    assert program.module.get_submodule("act.0").inplace is False


def test_a_backward_that_would_round_otherwise_stays_in_place_on_a_clone() -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.elu(self.fc2(F.elu(self.fc(x), inplace=True)))

    program = canonical(forward)
    both = ["fc", "clone", F.elu, "fc2", "clone", "elu"]
    assert targets(program)[: len(both)] == both
    assert program.module.get_submodule("elu").inplace is True


def test_dropout_in_place_draws_the_same_numbers() -> None:
    def forward(self: Any, x: Any) -> Any:
        return F.dropout(self.drop(self.fc(x)), 0.5, True, True)

    assert changing(canonical(forward)) == []


def test_changes_of_shape_in_place() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.fc(x).unsqueeze_(1)
        h.squeeze_(1).t_()
        return h.t() * 2

    assert changing(canonical(forward)) == []


def test_an_input_that_is_changed_stays() -> None:
    def forward(self: Any, x: Any) -> Any:
        x += 1
        x[:, 0] = 3
        return self.fc(x)

    program = canonical(forward)
    assert [n.op for n in program.graph.nodes][:1] == ["placeholder"]
    assert "clone" in targets(program)


def test_a_dtype_that_only_works_in_place_stays_on_a_clone() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.fc(x)
        h += torch.ones(4, dtype=torch.float64)  # float32 stays float32
        return h * 2

    program = canonical(forward)
    assert targets(program)[1:] != []
    assert [node.target for node in changing(program)] == [operator.iadd]


# Assignments to parts


def test_an_assignment_works_on_a_glued_clone() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.fc(x)
        y = h.sum()
        h[:, 0] = 0
        h[:, 1] = x[:, 1]
        return self.fc2(h) + y

    program = canonical(forward)
    assert targets(program).count("clone") == 1
    assert glue_of(program, "fc") == glue_of(program, "fc2") == {None}
    assert glue_of(program, "clone") == glue_of(program, operator.setitem) == {0}


def test_new_tensors_are_filled_without_a_clone() -> None:
    def forward(self: Any, x: Any) -> Any:
        out = torch.zeros(3, 4)
        out[:, :2] = self.fc(x)[:, :2]
        return out + torch.empty(3, 4).fill_(2.0)

    program = canonical(forward)
    assert "clone" not in targets(program)
    assert len({meta.glue(node) for node in changing(program)}) == 2


def test_methods_without_a_twin_work_on_a_clone() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.fc(x)
        h = h.copy_(x) if h is x else h.zero_()
        return self.fc2(h + x)

    program = canonical(forward)
    assert targets(program)[:3] == ["fc", "clone", "zero_"]


# Views


def test_a_changed_view_is_seen_through_its_base() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.fc(x)
        h[:, :2].mul_(2)
        view = h[:, 2:]
        view += 1
        return self.fc2(h)

    program = canonical(forward)
    groups = [meta.glue(node) for node in program.compute_nodes]
    assert groups[0] == groups[4] == 0
    assert groups[5] is None


def test_a_changed_base_is_seen_through_its_view() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.fc(x)
        view = h.view(-1)
        h.add_(1)
        return view.sum() + h

    canonical(forward)


def test_a_view_of_an_input_is_changed() -> None:
    def forward(self: Any, x: Any) -> Any:
        view = x[:, 1:]
        x.mul_(3)
        return self.fc(x) + view.sum()

    program = canonical(forward)
    assert targets(program)[0] == "clone"


def test_views_that_nobody_uses_later_do_not_matter() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.fc(x)
        s = h.view(-1).sum()
        h += 1
        return h + s

    assert changing(canonical(forward)) == []


def test_parts_of_a_tuple_are_views() -> None:
    def forward(self: Any, x: Any) -> Any:
        with torch.no_grad():
            h = self.fc(x)
            a, b = h.chunk(2, 1)
            b.mul_(2)
        return self.fc2(torch.cat([a, b], 1) + h)

    canonical(forward)


def test_a_layer_in_place_on_a_view_stays_in_place() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.fc(x)
        self.act(h[:, :2])
        return self.act(self.fc2(h))

    program = canonical(forward)
    assert program.module.get_submodule("act.0").inplace is True


# Regions


def test_changes_under_no_grad_keep_the_gradient() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.fc(x)
        with torch.no_grad():
            h.mul_(2)
            self.act(h)
        g = self.fc2(h)
        with torch.no_grad():
            g[:, 0] = 1
        return g + h

    canonical(forward)


def test_detached_data_is_changed() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.fc(x)
        h.detach().add_(1)
        return h * 2

    canonical(forward)


# State


def test_buffers_are_changed_in_place_and_glued() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.fc(x - self.state)
        self.state.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return self.fc2(h + self.state)

    program = canonical(forward)
    assert [node.target for node in changing(program)] == ["mul_", "add_"]
    for target in (operator.sub, "mul_", "add_"):
        assert glue_of(program, target) == {0}
    assert glue_of(program, "fc2") == {None}


def test_a_buffer_is_changed_through_a_view_of_a_view() -> None:
    def forward(self: Any, x: Any) -> Any:
        self.state[1:].view(-1).add_(0.5)
        return self.fc(x + self.state)

    program = canonical(forward)
    (change,) = changing(program)
    assert mutated_state(change, program.module) == ("state",)


def test_a_layer_in_place_on_a_buffer_changes_the_buffer() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.fc(x)
        self.state.add_(h.detach().mean(0))
        self.act(self.state)
        return self.fc2(h + self.state)

    program = canonical(forward)
    assert [node.target for node in changing(program)] == ["add_", "act.0"]


def test_runs_that_meet_in_one_node_or_lie_in_another_are_one() -> None:
    def meeting(self: Any, x: Any) -> Any:
        self.state.add_(1)
        h = x + self.state  # reads the one memory, and is the start of the other
        view = h[:, 1:]
        h.mul_(2)
        return self.fc(h)[:, 1:] + view

    def inside(self: Any, x: Any) -> Any:
        self.state.add_(1)
        h = self.fc(x)
        first = h[:, 1:]
        h.mul_(2)
        k = self.fc2(x)
        second = k[:, 1:]
        k.mul_(3)
        return first + second + (h + k + self.state)[:, 1:]

    for forward in (meeting, inside):
        program = canonical(forward)
        assert glue_of(program, "mul_") == glue_of(program, "add_") == {0}


def test_layers_that_own_a_changed_parameter_are_glued_to_the_change() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.fc2(x)
        with torch.no_grad():
            self.fc.weight.clamp_(-0.1, 0.1)
        return self.fc(h)

    program = canonical(forward)
    assert glue_of(program, "fc") == glue_of(program, "clamp_") == {0}
    assert glue_of(program, "fc2") == {None}


def test_running_statistics_of_a_function() -> None:
    def forward(self: Any, x: Any) -> Any:
        variance = self.bn.running_var
        return F.batch_norm(self.fc(x), self.state, variance, training=True)

    program = canonical(forward)
    assert [node.target for node in changing(program)] == [F.batch_norm]


# Nodes without effect


def test_dead_nodes_and_identities_go_and_effects_stay() -> None:
    def forward(self: Any, x: Any) -> Any:
        unused = self.fc2(x) * 2
        self.bn(x)
        self.drop(x)
        del unused
        return self.same(self.fc(self.same(x)))

    program = canonical(forward)
    assert targets(program)[:3] == ["bn", "drop", "fc"]
    assert "same" not in targets(program)
    assert "fc2" not in targets(program)


def test_what_reads_a_shape_is_given_the_sizes() -> None:
    def forward(self: Any, x: Any) -> Any:
        row = self.fc.bias.expand_as(self.fc2(x))
        flat = self.fc(x).flatten().reshape_as(x)
        return flat.view_as(other=x) + row + row.sum().view_as(x.sum())

    result = canonical(forward)
    called = [
        (n.target, *n.args[1:]) for n in result.graph.find_nodes(op="call_method")
    ]
    assert ("expand", 3, 4) in called
    assert ("reshape", 3, 4) in called
    assert ("view", 3, 4) in called
    assert ("view", ()) in called
    assert "fc2" not in str(result.graph)  # nothing but its shape was used


def test_what_out_names_loses_its_change() -> None:
    def forward(self: Any, x: Any) -> Any:
        out = torch.empty(3, 4)
        with torch.no_grad():
            torch.add(x, x, out=out)
            low, at = torch.zeros(4), torch.zeros(4, dtype=torch.long)
            lower = low + 1
            torch.min(x, 0, out=(low, at))
            y = torch.mul(x, 2, out=x * 3)
        return self.fc(out) + low * at + lower + y

    program = canonical(forward)
    assert not [n for n in program.graph.nodes if n.target is torch.mul and n.kwargs]


def test_a_view_of_what_out_names_sees_the_change() -> None:
    def forward(self: Any, x: Any) -> Any:
        with torch.no_grad():
            base = x * 1
            row = base[0]
            torch.add(x[1], 1, out=row)
        return self.fc(base)

    assert [node.target for node in changing(canonical(forward))] == [torch.add]


def test_a_buffer_that_out_names_is_changed_in_place_and_glued() -> None:
    def forward(self: Any, x: Any) -> Any:
        before = self.state * 1
        with torch.no_grad():
            torch.add(self.state, 1, out=self.state)
        return self.fc(x) * self.state + before

    program = canonical(forward)
    assert [node.target for node in changing(program)] == [torch.add]
    assert None not in glue_of(program, torch.add)


# Whole networks


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm(self.conv(x)))
        out = self.norm(self.conv(out))
        out += x
        return self.relu(out)


def test_a_residual_network_has_no_changes_left() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Residual(4), Residual(4), nn.Flatten())
    inputs = (torch.randn(2, 3, 4, 4),)
    program = record(model, inputs, loss=mean)
    result = Canonicalize().apply(program)
    check_against_eager(result, model, inputs, mean)
    assert changing(result) == []
    assert model[1].relu.inplace
    layer = result.module.get_submodule("1.relu")
    assert layer.inplace is False
    assert result.module.get_submodule("1.conv") is model[1].conv
    state = {name for name, _ in result.module.named_parameters()}
    assert state == {name for name, _ in model.named_parameters()}
    copy.deepcopy(result.module)


def test_and_and_or_of_values_change_nothing() -> None:
    """Python calls the functions of `&` and `|` `and_` and `or_`."""

    def forward(self: Any, x: Any) -> Any:
        small, large = x < 0.5, x > -0.5
        return self.fc(x * (small & large) + (small | large))

    program = canonical(forward)
    assert {operator.and_, operator.or_} <= {*targets(program)}
    assert "clone" not in targets(program)
    assert not changing(program)
