"""Programs whose messages have no tags: they train where the proof says so."""

from __future__ import annotations

import ast
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from device_programs import assert_equal
from device_programs import compiled as for_device
from device_programs import train as train_on_device
from lane_transport import Lanes, run_in_lanes
from program_support import mse, on_ranks, written
from random_networks import random_case, seeds
from sim_cuda import DEVICE, DirectTransport, on_device
from torch import Tensor, nn

from gemsc.codegen.package import write_directory
from gemsc.codegen.read import read_ranks
from gemsc.compiler import CompiledProgram, prove_files
from gemsc.errors import GemscError, InternalError
from gemsc.messages.exchange import Exchange
from gemsc.planner.explain import task_of
from gemsc.runtime.tiles.grid import FIRST_TAG, Grid, tag_of
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.transport.local import LocalGroup, LocalTransport, run_local
from gemsc.runtime.transport.mailbox import Mailbox
from gemsc.runtime.transport.streams import CudaStreams
from gemsc.runtime.worker.finite import NotFiniteError
from gemsc.schedules.action import Action, Kind


def residuals() -> nn.Module:
    """Return layers with running statistics on all ranks."""
    return nn.Sequential(*(networks.Residual() for _ in range(4)))


Losses = list[float]
Turn = str  # an entry of an order, as the file has it
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "statistics": (residuals, tuple(networks.PICTURE.shape)),
    "branches": (networks.Inception, (2, networks.WIDTH, 8, 8)),
    "shards": (networks.FlatTransformer, tuple(networks.TEXT.shape)),
    "unet": (networks.FlatUNet, tuple(networks.PICTURE.shape)),
}
USES: dict[str, dict[str, Any]] = {
    "1f1b": {"ranks": 3},
    "gpipe": {"ranks": 3, "schedule": "gpipe"},
    "interleaved": {"ranks": 2, "schedule": "interleaved"},
    "zb-h1": {"ranks": 3, "schedule": "zb-h1"},
    "mast": {"ranks": 2, "schedule": "mast"},
    "statistics": {"ranks": 2, "schedule": "mast"},
    "chimera": {"ranks": 2, "schedule": "chimera"},
    "tiles": {"ranks": 4, "tiles": ("2x1",)},
    "tiles after tiles": {"ranks": 4, "tiles": ("2x1", "1x2")},
    "tiles recomputed": {"ranks": 4, "tiles": ("2x2",), "recompute": ("all",)},
    "mirrored tiles": {"ranks": 4, "tiles": ("2x1", "2x1"), "schedule": "mast"},
    "shards": {"ranks": 4, "shards": ("2", "2")},
    "branches": {"ranks": 2, "branches": ("2",)},
    "data": {"ranks": 4, "data": 2, "shard": "optimizer"},
}

# the others exchange only, or are alone
WITH_SUMS = {"tiles after tiles", "tiles recomputed", "mirrored tiles", "shards"}


def made(use: str, folder: Path) -> tuple[CompiledProgram, Tensor]:
    """Write a program; return it with a batch."""
    torch.manual_seed(0)
    kind, shape = MODELS.get(use, MODELS["unet"])
    model, x = kind(), torch.randn(shape)
    options = {"micro_batches": 4, **USES[use]}
    program = written(folder, model, (x,), mse, model(x).detach(), **options)
    count = program.plan.micro_batches * program.plan.data
    return program, torch.cat([x + m / 8 for m in range(count)])


def trained(
    program: CompiledProgram, folder: Path, x: Tensor, run: Any = run_in_lanes
) -> list[Losses]:
    """Return the losses of two steps and of an evaluation, on each rank."""

    def losses(transport: Any) -> Losses:
        trainer = Trainer(folder, transport, device=torch.device("cpu"))
        target = x.new_zeros(x.shape[0], *program_target(program))
        steps = [trainer.step(x, target) for _ in range(2)]
        return [*steps, float(trainer.evaluate(x, target).loss or 0.0)]

    of_ranks: list[Losses] = run(program.plan.ranks, losses)
    return of_ranks


def program_target(program: CompiledProgram) -> tuple[int, ...]:
    items = program.compilation.program.inputs
    (shape,) = (i.spec.shape for i in items if i.path == ("target",))
    return tuple(shape[1:])


@pytest.mark.slow(1)
@pytest.mark.by_day(7)
@pytest.mark.parametrize("use", USES)
def test_programs_train_without_tags_as_with_them(use: str, tmp_path: Path) -> None:
    program, x = made(use, tmp_path)
    expected = trained(program, tmp_path, x, run_local)
    assert trained(program, tmp_path, x) == expected
    assert expected[0][1] != expected[0][0]


SCHEDULES = ("gpipe", "1f1b", "interleaved", "mast", "chimera", "zb-h1")


@pytest.mark.slow
@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("first", seeds(3, 120, 3))
def test_random_networks_train_without_tags(first: int, tmp_path: Path) -> None:
    trained_ones = 0
    for seed in range(first, first + 3):
        rng = random.Random(seed)
        model, (x,), _, target, grid = random_case(seed)
        tiles = ("x".join(map(str, grid)),) * (rng.random() < 0.6)
        count = rng.choice([2, 4])
        options: dict[str, Any] = {
            "ranks": rng.choice([2, 3]) + (math.prod(grid) - 1 if tiles else 0),
            "schedule": rng.choice(SCHEDULES),
            "micro_batches": count,
            "tiles": tiles,
            "recompute": ("all",) * (rng.random() < 0.3),
        }
        folder = tmp_path / str(seed)
        try:
            program = written(folder, model, (x,), mse, target, **options)
        except GemscError:  # fewer blocks than stages, a schedule that takes no tiles
            continue
        whole = torch.cat([x + m / 8 for m in range(count)])
        try:
            expected = trained(program, folder, whole, run_local)
        except NotFiniteError:  # what the network itself computes
            continue
        assert trained(program, folder, whole) == expected, (seed, options)
        trained_ones += 1
    assert trained_ones or first >= 6


# ------------------------------------------------------- orders that are wrong


def order_in(text: str) -> tuple[int, int, list[Turn]]:
    """Return between which lines a rank's file has its order, and the order."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.keyword) and node.arg == "train_order":
            turns: list[Turn] = []
            assert isinstance(node.value, ast.Tuple)
            for entry in node.value.elts:
                count, inside = 1, [entry]
                if isinstance(entry, ast.Tuple):
                    inside = entry.elts
                    if isinstance(getattr(inside[0], "value", None), int):
                        number, *inside = inside
                        count = ast.literal_eval(number)
                turns += [ast.unparse(turn) for turn in inside] * count
            assert node.end_lineno is not None
            return node.lineno - 1, node.end_lineno, turns
    raise AssertionError("no order")


def with_order(text: str, turns: list[Turn]) -> str:
    lines = text.split("\n")
    start, stop, _ = order_in(text)
    lines[start:stop] = [f"    train_order=({', '.join(turns)},),"]
    return "\n".join(lines)


def with_a_swap(files: dict[str, str], rng: random.Random) -> dict[str, str]:
    """Return files of which one has two different entries of its order exchanged."""
    while True:
        name = rng.choice(sorted(files))
        _, _, turns = order_in(files[name])
        a, b = (rng.randrange(len(turns)) for _ in range(2))
        if turns[a] != turns[b]:
            turns[a], turns[b] = turns[b], turns[a]
            return {**files, name: with_order(files[name], turns)}


STUCK = r"deadlock|it is the turn of|turns have not come| gets send of|does not fit"


@pytest.mark.slow(1)
@pytest.mark.parametrize("use", ["interleaved", "tiles", "mast"])
def test_wrong_orders_are_refused_and_do_not_train(use: str, tmp_path: Path) -> None:
    """And whatever the proof lets pass trains."""
    program, x = made(use, tmp_path)
    task, rng = task_of(program.plan), random.Random(0)
    expected = trained(program, tmp_path, x)
    refused = passed = 0
    while refused < 12:
        files = with_a_swap(program.rank_modules(), rng)
        changed = replace(program.compilation, files=files)
        write_directory(changed, tmp_path)
        try:
            prove_files(files, program.compilation, task)
        except InternalError:
            with pytest.raises(InternalError, match=STUCK):
                trained(program, tmp_path, x)
            refused += 1
        else:
            assert trained(program, tmp_path, x) == expected
            passed += 1
    assert passed or use != "tiles"


@pytest.mark.slow(1)
@pytest.mark.parametrize("use", ["1f1b", "tiles"])
def test_the_order_is_what_keeps_ranks_going(
    use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What begins as it comes, as it does with tags, is stuck without."""
    program, x = made(use, tmp_path)
    monkeypatch.setattr(Mailbox, "_lane", lambda self, entry: None)
    with pytest.raises(InternalError, match=r"deadlock| gets send of"):
        trained(program, tmp_path, x)


@pytest.mark.slow(1)
@pytest.mark.parametrize("use", ["interleaved", "tiles"])
def test_with_tags_receives_keep_the_order_of_their_source(
    use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, x = made(use, tmp_path)
    posted: dict[tuple[int, int], list[int]] = defaultdict(list)
    receive = LocalTransport.receive

    def noted_receive(
        self: LocalTransport, tensor: Tensor, source: int, tag: int
    ) -> Any:
        if tag < FIRST_TAG:
            posted[source, self.rank].append(tag)
        return receive(self, tensor, source, tag)

    monkeypatch.setattr(LocalTransport, "receive", noted_receive)
    trained(program, tmp_path, x, run_local)
    wanted: dict[tuple[int, int], list[int]] = defaultdict(list)
    training, evaluation = read_ranks(program.rank_modules())
    for rank in (*training, *training, *evaluation):
        for end in (end for turn in rank.order for end in turn.receives):
            wanted[end.peer, rank.rank].append(end.tag)
    assert posted == wanted
    assert all(len(set(tags)) > 1 for tags in posted.values()) or use == "tiles"


@pytest.mark.slow(1)
@pytest.mark.by_day(5)
@pytest.mark.parametrize("use", USES)
def test_connections_are_made_at_the_start_in_one_order(
    use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step makes none, and each group of tiles that is made is used."""
    program, x = made(use, tmp_path)
    made_by: dict[int, list[str]] = defaultdict(list)
    used: dict[int, set[str]] = defaultdict(set)
    group, begin = LocalTransport.group, LocalGroup._start

    def noted_group(self: LocalTransport, ranks: Any, key: str = "") -> Any:
        name = f"{key} {sorted(ranks)}"
        if name not in made_by[self.rank]:
            made_by[self.rank].append(name)
        return group(self, ranks, key)

    def noted_start(self: LocalGroup, *args: Any) -> Any:
        used[self._transport.rank].add(f"{self._key} {[*self.ranks]}")
        return begin(self, *args)

    monkeypatch.setattr(LocalTransport, "group", noted_group)
    monkeypatch.setattr(LocalGroup, "_start", noted_start)

    def run(transport: LocalTransport) -> list[str]:
        trainer = Trainer(tmp_path, transport, device=torch.device("cpu"))
        begun = [*made_by[transport.rank]]
        target = x.new_zeros(x.shape[0], *program_target(program))
        trainer.step(x, target)
        trainer.evaluate(x, target)
        return begun

    by_rank = run_local(program.plan.ranks, run)
    of_tiles = [[n for n in names if n.startswith("tiles of")] for names in by_rank]
    for rank, names in enumerate(by_rank):
        assert made_by[rank] == names
        assert used[rank] >= {*of_tiles[rank]}
    for one, other in itertools.combinations(by_rank, 2):
        both = {*one} & {*other}
        assert [n for n in one if n in both] == [n for n in other if n in both]
    assert any(of_tiles) == (use in WITH_SUMS)


@pytest.mark.slow
def test_a_sum_of_tiles_that_is_not_named_is_found(tmp_path: Path) -> None:
    files = made("shards", tmp_path)[0].rank_modules()
    names = [name for name, text in files.items() if ", sums=((0, 1),)" in text]
    name = names[-1]
    files[name] = files[name].replace(", sums=((0, 1),)", "")
    says = f"{name[:-3].replace('k', 'k ')} adds up over tiles .* do not name: \\w+.py"
    with pytest.raises(InternalError, match=says):
        read_ranks(files)


def test_a_program_without_an_order_needs_tags(tmp_path: Path) -> None:
    program, x = made("1f1b", tmp_path)
    files = program.rank_modules()
    for name, text in files.items():
        lines = text.split("\n")
        start, stop, _ = order_in(text)
        del lines[start:stop]
        files[name] = "\n".join(lines)
    write_directory(replace(program.compilation, files=files), tmp_path)
    assert len(trained(program, tmp_path, x, run_local)) == 3
    with pytest.raises(GemscError, match="in which order") as caught:
        trained(program, tmp_path, x)
    assert caught.value.help == "compile it again"


# ------------------------------------------------------------------ the way back


@contextmanager
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[str]]]:
    """Note what each tile, a thread, does with others: exchanges by tags, and sums."""
    notes: dict[int, list[str]] = defaultdict(list)
    post, all_reduce = Grid.post, Grid.all_reduce

    def posted(self: Grid, exchange: Exchange, *args: Any, back: bool) -> Any:
        if any(args[:2]):  # something goes or comes
            tag = tag_of(exchange, back=back)
            notes[self.transport.host.rank].append(str(tag))
        return post(self, exchange, *args, back=back)

    def added(self: Grid, tensor: Tensor) -> Tensor:
        notes[self.transport.host.rank].append("sum")
        return all_reduce(self, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(Grid, "post", posted)
        patch.setattr(Grid, "all_reduce", added)
        yield notes


def said(files: dict[str, str], rank: int) -> list[str]:
    """Return what a rank's file says of the same, for a step; all that may be.

    What has no message may be a sum.
    """
    step, stated = read_ranks(files)[0][rank], []
    for action in step.actions:
        for call in step.run(action).calls:
            tags = {str(end.tag) for end in (*call.sends, *call.receives)}
            stated += tags or ["sum"]
    return stated


def is_within(some: list[str], all_of_it: list[str]) -> bool:
    """Whether these are there in that order; a sum may be several."""
    remaining = iter(all_of_it)
    return all(key in remaining for key in some)


@pytest.mark.slow
@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("first", seeds(6, 120, 6))
def test_tiles_go_back_in_the_order_that_is_proved(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_back = 0
    for seed in range(first, first + 6):
        model, (x,), _, target, grid = random_case(seed)
        folder, again = tmp_path / str(seed), ("all",) * (seed % 2)
        options = {"tiles": ("x".join(map(str, grid)),), "recompute": again}
        ranks = math.prod(grid)
        options |= {"overlap_halos": bool(seed % 3), "micro_batches": 1}
        try:
            program = written(folder, model, (x,), mse, target, ranks=ranks, **options)
        except GemscError:  # a layer of a class that is in a function
            continue
        with noted(monkeypatch) as notes:
            on_ranks(folder, ranks, partial(Trainer.step, input=x, target=target))
        for rank, done in notes.items():
            wanted = said(program.rank_modules(), rank)
            once = [key for key, _ in groupby(done)]
            assert is_within(once, [key for key, _ in groupby(wanted)]), (seed, rank)
            num_back += sum(tag != "sum" and int(tag) % 2 for tag in done)
    assert num_back


@pytest.mark.slow
def test_the_way_back_of_tiles_is_recorded(tmp_path: Path) -> None:
    program, _ = made("tiles", tmp_path)
    step = read_ranks(program.rank_modules())[0][0]
    forward = step.run(Action(Kind.FORWARD, 0, 0)).calls
    backward = step.run(Action(Kind.BACKWARD, 0, 0)).calls
    assert len(forward) == len(backward) > 1
    for there, home in zip(forward, reversed(backward), strict=True):
        assert [end.peer for end in there.sends] == [e.peer for e in home.receives]
        assert [end.tag + 1 for end in there.sends] == [e.tag for e in home.receives]


# ------------------------------------------------------------- on a device


@pytest.mark.slow
@pytest.mark.parametrize("use", ["plain", "data 2", "tiles 2x1"])
def test_a_simulated_device_trains_without_tags(use: str, tmp_path: Path) -> None:
    program = for_device(tmp_path, "1f1b", use)

    def rank(inner: Lanes) -> Any:
        with on_device(7 + 1000 * inner.rank) as device:
            transport = DirectTransport(inner, device)  # type: ignore[arg-type]
            streams = CudaStreams(DEVICE, device)
            return train_on_device(tmp_path, transport, streams=streams)

    assert_equal(run_in_lanes(program.ranks, rank), program.on_cpu)
