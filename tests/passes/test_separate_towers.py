"""Branches worth a stage of their own are found, stand apart and run side by side."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_support import FLOAT64, lowered, options, traced, worst_error
from program_support import Net, against_one_process, blocks_of
from torch import Tensor, nn
from tower_models import TOWER_MODELS, layer

from gemsc.ir import meta
from gemsc.ir.program import Program
from gemsc.options import CompileOptions

ROWS = torch.zeros(4, 8)


def towers_of(program: Program) -> list[tuple[str, str]]:
    """Return the first and the last node of each tower."""
    return [(t[0].name, t[-1].name) for t in program.towers or ()]


def towers(*names: str) -> dict[str, nn.Module]:
    """Return towers of three layers from 8 features to 8."""
    return {n: nn.Sequential(*(layer(8, 8) for _ in range(3))) for n in names}


def separated(forward: Any, *inputs: Tensor, **modules: nn.Module) -> Program:
    return blocks_of(Net(forward, **modules), *(inputs or (ROWS, ROWS)))


@pytest.mark.slow(1)
@pytest.mark.by_day(2)
@pytest.mark.parametrize("name", TOWER_MODELS)
def test_a_block_begins_with_each_tower_and_one_behind_it(name: str) -> None:
    program = traced(name).program
    assert len(program.towers or ()) == 2
    firsts = [block.nodes[0] for block in program.blocks or ()]
    nodes = program.compute_nodes
    for tower in program.towers or ():
        assert tower[0] in firsts
        assert nodes[nodes.index(tower[-1]) + 1] in firsts


@pytest.mark.slow(1)
@pytest.mark.parametrize("name", TOWER_MODELS)
def test_evaluation_stays_the_twin_of_training(name: str) -> None:
    assert traced(name).twins is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip", "siamese", "two encoders"])
def test_neither_tower_waits_for_the_other(name: str) -> None:
    program = lowered(name, options(ranks=3, micro_batches=1)).compilation.program
    sent = {(t.source, t.dest) for t in program.transfers or ()}
    assert sent == {(0, 2), (1, 2)}


PLANS = (
    options(ranks=3, micro_batches=1),
    options(ranks=3, micro_batches=2, schedule="gpipe"),
    options(ranks=2, micro_batches=3, placement="0,1,0"),
    options(ranks=8, micro_batches=3, data=2),
)


@pytest.mark.slow(1)
@pytest.mark.by_day(7)
@pytest.mark.parametrize("plan", PLANS, ids=CompileOptions.command_line)
@pytest.mark.parametrize("name", TOWER_MODELS)
def test_towers_on_ranks_compute_what_one_process_does(
    name: str, plan: CompileOptions, tmp_path: Path
) -> None:
    assert worst_error(name, plan, tmp_path / "program") <= FLOAT64


@pytest.mark.slow
def test_three_towers_are_three_whether_joined_at_once_or_one_by_one() -> None:
    def at_once(self: Any, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.two(x), self.three(x)], 1)

    def one_by_one(self: Any, x: Tensor) -> Tensor:
        return (self.one(x) + self.two(x)) * self.three(x)

    three = towers("one", "two", "three")
    wide = separated(at_once, ROWS, **three)
    assert [name for name, _ in towers_of(wide)] == ["one_0_0", "two_0_0", "three_0_0"]
    deep = separated(one_by_one, ROWS, **three)
    assert towers_of(deep) == [
        ("one_0_0", "add"),  # what the first two give, joined, is a tower again
        ("one_0_0", "one_2_2"),
        ("two_0_0", "two_2_2"),
        ("three_0_0", "three_2_2"),
    ]


@pytest.mark.slow
def test_parts_of_one_tensor_stay_before_the_towers() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        a, b = x.chunk(2)
        return self.one(a) * self.two(b)

    program = separated(forward, ROWS, **towers("one", "two"))
    assert [name for name, _ in towers_of(program)] == ["one_0_0", "two_0_0"]
    assert [n.name for n in (program.blocks or ())[0].nodes] == ["chunk", "a", "b"]


@pytest.mark.slow
def test_a_light_branch_and_a_single_layer_are_no_towers() -> None:
    def light(self: Any, x: Tensor) -> Tensor:
        return self.one(x) * x.tanh().relu().sigmoid()

    def single(self: Any, x: Tensor) -> Tensor:
        return self.one(x) * self.last(x)

    assert not separated(light, ROWS, **towers("one")).towers
    assert not separated(single, ROWS, **towers("one"), last=nn.Linear(8, 8)).towers


@pytest.mark.slow
def test_the_keys_that_a_decoder_computes_are_not_the_encoders() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        encoded, decoded = self.encoder(x), self.decoder(y)
        mixed = torch.softmax(self.key(encoded) * decoded, 1) * self.value(encoded)
        return self.last(mixed)

    more = {name: nn.Linear(8, 8) for name in ("key", "value", "last")}
    program = separated(forward, **towers("encoder", "decoder"), **more)
    assert towers_of(program) == [
        ("encoder_0_0", "encoder_2_2"),
        ("decoder_0_0", "decoder_2_2"),
    ]


def test_towers_that_share_running_statistics_are_one() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.norm(self.one(x)), self.norm(self.two(y))
        return a * b

    program = separated(forward, **towers("one", "two"), norm=nn.BatchNorm1d(8))
    assert not program.towers


def test_towers_that_share_a_computed_weight_are_one() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        weight = self.last.weight.exp()
        return self.one(x @ weight) * self.two(y @ weight)

    program = separated(forward, **towers("one", "two"), last=nn.Linear(8, 8))
    assert not program.towers


@pytest.mark.slow(1)
@pytest.mark.parametrize("in_turn", [True, False])
def test_random_numbers_are_drawn_in_the_order_of_the_model(in_turn: bool) -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        if in_turn:
            for left, right in zip(self.one, self.two, strict=True):
                x, y = self.drop(left(x)), self.drop(right(y))
            return x * y
        return self.drop(self.one(x)) * self.drop(self.two(y))

    program = separated(forward, **towers("one", "two"), drop=nn.Dropout())
    assert len(program.towers or ()) == (0 if in_turn else 2)
    draws = [n for n in program.compute_nodes if meta.facts(n).random]
    names = [n.all_input_nodes[0].name.split("_")[0] for n in draws]
    assert names == (["one", "two"] * 3 if in_turn else ["one", "two"])


class Tangle(nn.Module):
    """Layers that each take one or two random earlier values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        self.wires = []
        for i in range(12):
            some = range(max(0, i - 4), i + 1)
            self.wires.append(chance.choices(some, k=chance.choice((1, 1, 2))))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in self.wires)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for linear, (first, *more) in zip(self.layers, self.wires, strict=True):
            values.append(linear(sum((values[wire] for wire in more), values[first])))
        return torch.stack(values[-4:]).sum(0)


@pytest.mark.slow
def test_towers_of_tangled_layers_are_whole_and_wait_for_nothing_inside() -> None:
    count = 0
    for seed in range(5):
        program = blocks_of(Tangle(seed), ROWS)
        nodes, all_towers = program.compute_nodes, program.towers or ()
        bounds = {block.nodes[0] for block in program.blocks or ()}
        for tower in all_towers:
            start = nodes.index(tower[0])
            assert nodes[start : start + len(tower)] == tower
            assert tower[0] in bounds
            others = [set(tower) & set(other) for other in all_towers]
            assert all(s in (set(), set(tower)) or s < set(tower) for s in others)
        count += len(all_towers)
    assert count > 6


@pytest.mark.slow(1)
@pytest.mark.parametrize("seed", [3, 4])
def test_tangled_layers_compute_what_one_process_does(
    seed: int, tmp_path: Path
) -> None:
    rows = torch.zeros(2, 8)
    diff = against_one_process(tmp_path, Tangle(seed), (rows,), target=rows, ranks=3)
    assert diff.worst <= FLOAT64


class Shifted(nn.Module):
    """An encoder, and a decoder that moves its words by one place in new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 8)
        for name, tower in towers("encoder", "decoder").items():
            self.add_module(name, tower)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        encoded = self.encoder(x)
        shifted = words.new_zeros(words.shape)
        shifted[..., 1:] = words[..., :-1].clone()
        shifted[..., 0] = 3
        return encoded * self.decoder(self.words(shifted).sum(1))


@pytest.mark.slow
def test_what_is_written_into_a_slice_is_written_before_it_is_read(
    tmp_path: Path,
) -> None:
    rows, words = torch.ones(2, 8), torch.arange(2 * 5).view(2, 5) % 8
    program = blocks_of(Shifted(), rows, words)
    assert towers_of(program) == [
        ("encoder_0_0", "encoder_2_2"),
        ("getitem", "decoder_2_2"),
    ]
    inputs = rows, words
    diff = against_one_process(tmp_path, Shifted(), inputs, target=rows, ranks=3)
    assert diff.worst <= FLOAT64


class Written(nn.Module):
    """Two towers in turn that write into parts and views of what they compute."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.left = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        chance = random.Random(self.seed)
        late = []
        for left, right in zip(self.left, self.right, strict=True):
            x, y = left(torch.relu(x)), right(torch.relu(y))
            early = [self.write(chance, part) for part in (x, y)]
            late += [part for part in early if chance.random() < 0.5]
            for part in chance.choices((x, y), k=2):
                self.write(chance, part)
        return torch.stack([x, y, *(2 * part.sum(1, True) * x for part in late)]).sum(0)

    def write(self, chance: random.Random, x: Tensor) -> Tensor:
        """Return a view of x, after a write to x, to a view or to new memory."""
        start, kind = chance.randrange(6), chance.randrange(5)
        part = x[:, start : start + 2]
        if kind == 0:
            x[:, start] = chance.random()
        elif kind == 1:
            part += 0.5
        elif kind == 2:
            x.view(-1)[start:].mul_(0.5)
        elif kind == 3:
            new = torch.zeros_like(x)
            new[:, 1:] = x[:, :-1]
            new[:, 0] = 3
            return new
        return part


@pytest.mark.slow(1)
@pytest.mark.by_day(4)
@pytest.mark.parametrize("seed", [*range(4), *range(5, 13)])  # 4 has a single block
def test_towers_that_write_in_place_compute_what_one_process_does(
    seed: int, tmp_path: Path
) -> None:
    rows = torch.zeros(2, 8)
    diff = against_one_process(
        tmp_path, Written(seed), (rows + 1, rows), target=rows, ranks=2
    )
    assert diff.worst <= FLOAT64
