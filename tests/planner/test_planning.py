"""`auto` takes what is best as predicted; an edited plan is compiled or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import MODEL, Gemsc, compile_here, line_of
from plan_support import assess, search
from torch import nn

import gemsc
from gemsc.compiler import trace
from gemsc.costs.hardware import LinkSpeed, read_hardware
from gemsc.errors import GemscError
from gemsc.options import AUTO, CompileOptions
from gemsc.plan import Plan
from gemsc.planner.edited import EditedPlan
from gemsc.planner.layout import stage_layout
from gemsc.schedules import SCHEDULES
from gemsc.search.auto import what_fits
from gemsc.search.candidates import Candidate, alternatives, reason
from gemsc.viz.listings import list_candidates


@pytest.fixture(scope="module")
def traced() -> gemsc.compiler.Traced:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)]
    return trace(
        nn.Sequential(*layers),
        (torch.randn(32, 64),),
        loss=nn.functional.mse_loss,
        example_target=torch.randn(32, 64),
        check=False,
    )


ALL = CompileOptions(
    ranks=4,
    data=AUTO,
    micro_batches=8,
    schedule="auto",
    placement="auto",
    balance="auto",
)


@pytest.mark.parametrize("name", ["recompute", "offload", "cuts", "whole"])
def test_names_are_taken_from_one_text_as_on_the_command_line(name: str) -> None:
    given: Any = {"shards": 2, name: "a.b,c"}
    assert getattr(CompileOptions(**given), name) == ("a.b", "c")


def test_every_alternative_uses_all_ranks_and_the_same_batch() -> None:
    choices = alternatives(ALL)
    assert {o.data for o in choices} == {1, 2, 4}
    for options in choices:
        assert options.ranks == 4
        assert options.micro_batches * options.data == 8
        assert "auto" not in (options.schedule, options.placement, options.balance)


@pytest.mark.slow
def test_sums_of_gradients_count_for_schedules_with_two_replicas(
    traced: gemsc.compiler.Traced, tmp_path: Path
) -> None:
    machine = read_hardware()

    def fastest(efficiency: float) -> Candidate:
        """Return the best of two, where sums are quick or slow and messages free."""
        link = LinkSpeed(latency=0.0, bandwidth=1e15)
        sums = replace(machine.network.allreduce, efficiency=efficiency)
        network = replace(machine.network, intra=link, inter=link, allreduce=sums)
        file = tmp_path / f"{efficiency}.toml"
        replace(machine, network=network).write(file)
        both = [
            assess(
                traced,
                CompileOptions(
                    ranks=2, micro_batches=4, schedule=name, hardware=str(file)
                ),
            )
            for name in ("1f1b", "bidirectional")
        ]
        return min(both, key=lambda candidate: candidate.seconds)

    assert fastest(1.0).options.schedule == "bidirectional"
    assert fastest(1e-8).options.schedule == "1f1b"


def test_micro_batches_of_all_copies_must_divide() -> None:
    choices = alternatives(CompileOptions(ranks=6, data=AUTO, micro_batches=4))
    assert {o.data for o in choices} == {1, 2}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_runs_the_micro_batches_that_are_asked_for(
    schedule: str,
) -> None:
    for count in (2, 4, 8):
        options = CompileOptions(schedule=schedule, micro_batches=count)
        assert sum(stage_layout(options).micro_batches) == count


def test_pairs_of_runs_are_not_other_micro_batches() -> None:
    options = CompileOptions(schedule="master", times=3)
    assert stage_layout(options).micro_batches == (3, 3)
    assert stage_layout(replace(options, micro_batches=6)).micro_batches == (3, 3)
    with pytest.raises(
        GemscError, match="--times 3 means 6 micro-batches, but --micro"
    ):
        stage_layout(replace(options, micro_batches=8))


@pytest.mark.slow
def test_the_first_candidate_is_the_fastest_that_fits(
    traced: gemsc.compiler.Traced,
) -> None:
    free = search(traced, ALL)
    speeds = [c.samples_per_second for c in free if not c.problem]
    assert speeds[0] >= 0.99 * max(speeds)
    cap = min(c.peak_bytes for c in free if not c.problem) + 1
    capped = search(traced, CompileOptions(**{**_fields(ALL), "device_memory": cap}))
    assert capped[0].peak_bytes <= cap
    fitting = [c.samples_per_second for c in capped if c.fits()]
    assert capped[0].samples_per_second >= 0.99 * max(fitting)
    assert len(fitting) < len(capped)
    assert "needs" in reason(capped)


@pytest.mark.slow
@pytest.mark.parametrize("data", [1, AUTO])
def test_what_is_left_out_is_slower_than_what_is_taken(
    traced: gemsc.compiler.Traced, data: int
) -> None:
    options = CompileOptions(
        **{**_fields(ALL), "shards": ("auto",), "balance": "compute"}
    )
    every = [assess(traced, choice) for choice in alternatives(options)]
    candidates = search(traced, options)
    best = max(way.samples_per_second for way in every if way.fits())
    assert candidates[0].samples_per_second >= 0.99 * best
    kept = {way.name for way in candidates}
    left_out = [way for way in every if not way.problem and way.name not in kept]
    assert left_out or data == 1
    assert all(way.samples_per_second < best for way in left_out)
    for way in every:
        if not way.problem:
            assert way.samples_per_second <= 1.001 * way.most_samples_per_second


@pytest.mark.slow
def test_where_nothing_fits_the_message_says_what_would(
    traced: gemsc.compiler.Traced,
) -> None:
    options = CompileOptions(ranks=2, schedule="auto", placement="auto")
    leanest = min(c.peak_bytes for c in search(traced, options))
    with pytest.raises(GemscError) as caught:
        search(
            traced,
            CompileOptions(**{**_fields(options), "device_memory": int(0.7 * leanest)}),
        )
    help_text = caught.value.help or ""
    assert "--ranks 4" in help_text or "--ranks 8" in help_text
    (ranks,) = [int(w) for w in help_text.split() if w in ("4", "8")]
    bigger = {**_fields(options), "ranks": ranks, "device_memory": int(0.7 * leanest)}
    assert search(traced, CompileOptions(**bigger))[0].fits()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += x.detach().abs().mean()
        return self.b(torch.tanh(self.a(x) / self.calls))


def test_where_nothing_can_be_built_the_advice_is_that_of_the_cause() -> None:
    x = torch.randn(2, 4)
    how = {"loss": nn.functional.mse_loss, "example_target": x, "check": False}
    counting = trace(Counting(), (x,), **how)
    why = "no schedule can be built: forward changes 'calls', and each of 2 replicas"
    with pytest.raises(GemscError, match=why) as caught:
        search(counting, CompileOptions(ranks=2, schedule="mast", balance="auto"))
    assert (caught.value.help or "").startswith("use a schedule with one replica")
    assert caught.value.at is not None


@pytest.mark.slow
def test_more_is_shared_out_where_nothing_else_fits() -> None:
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)]
    heavy = trace(
        nn.Sequential(*layers),
        (torch.randn(4, 256),),
        loss=nn.functional.mse_loss,
        example_target=torch.randn(4, 256),
        optimizer=torch.optim.Adam,
        check=False,
    )
    plain = CompileOptions(ranks=4, data=4, schedule="auto", micro_batches=1)
    shared = replace(plain, shard="optimizer")
    most, least = (assess(heavy, replace(o, schedule="basic")) for o in (plain, shared))
    assert least.peak_bytes < most.peak_bytes
    assert search(heavy, plain)[0].options.shard == "off"
    capped = replace(plain, device_memory=most.peak_bytes - 1)
    best = search(heavy, capped)[0]
    assert best.options.shard == "optimizer"
    assert best.fits()
    assert best.name.endswith(", sharded optimizer")
    assert "--shard optimizer" in best.options.command_line()
    looped = {"schedule": "interleaved", "placement": "looped", "chunks": 8}
    in_parts = assess(heavy, replace(plain, shard="weights", **looped))
    assert in_parts.peak_bytes < 0.6 * least.peak_bytes
    tight = replace(plain, device_memory=in_parts.peak_bytes)
    best = search(heavy, tight)[0]
    assert best.fits()
    assert best.name == "one rank x4, M=1, sharded weights"
    assert "--shard weights" in best.options.command_line()
    closed = replace(tight, schedule="1f1b", placement="looped", chunks=8)
    with pytest.raises(GemscError) as caught:
        gemsc.compiler.lower(heavy, closed)
    assert "add --shard weights (" in (caught.value.help or "")
    tight = replace(plain, device_memory=in_parts.peak_bytes - 1)
    with pytest.raises(GemscError, match=r"the lowest peak, of .*sharded weights"):
        search(heavy, tight)
    closed = replace(capped, schedule="1f1b")
    with pytest.raises(GemscError) as caught:
        gemsc.compiler.lower(heavy, closed)
    assert "add --shard optimizer (" in (caught.value.help or "")
    gemsc.compiler.lower(heavy, replace(closed, shard="optimizer"))


WIDE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))

def model():
    return nn.Sequential(*[Block() for _ in range(8)])

loss = nn.MSELoss()

def example_inputs():
    return (torch.randn(2048, 64),)

def example_target():
    return torch.randn(2048, 64)
"""


@pytest.mark.slow
def test_what_would_fit_has_been_tried(command: Gemsc, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(WIDE)
    words = ("compile", "model.py", "--ranks", 1, "--no-check", "--device-memory")
    refused = command(*words, "40MiB", "-o", "out")
    assert refused.code == 1
    assert "for one micro-batch, but the limit is" in refused.err
    (advice,) = re.findall(r"add (--recompute auto) \((\S+) rank", refused.err)
    assert command(*words, "40MiB", *advice[0].split(), "-o", "out").code == 0
    (ranks,) = re.findall(r"use (--ranks \d) \(", refused.err)
    fits = command(
        "compile", "model.py", "--no-check", *ranks.split(), *words[-1:], "40MiB"
    )
    assert fits.code == 0, fits.err
    (size,) = re.findall(r"make example_inputs\(\) (\d+) samples", refused.err)
    (tmp_path / "model.py").write_text(WIDE.replace("2048", size))
    assert command(*words, "40MiB", "-o", "out").code == 0


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ({"recompute"}, "add --recompute auto ("),
        ({"offload"}, "add --offload auto ("),
        ({"recompute", "offload"}, "add --recompute auto --offload auto ("),
        ({"shard"}, "add --shard optimizer ("),
        ({"whatever"}, ""),
    ],
)
def test_the_least_that_fits_is_named(needs: set[str], said: str) -> None:
    def peak(options: CompileOptions) -> Candidate:
        fits = all(getattr(options, name, "off") not in ((), "off") for name in needs)
        return Candidate(options, seconds=1.0, peak_bytes=10 if fits else 1000)

    options = CompileOptions(ranks=1, device_memory=100)
    advice = what_fits(peak(options), peak)
    assert advice.startswith(said)
    assert bool(advice) == bool(said)


def _fields(options: CompileOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in options.__slots__}


@pytest.mark.parametrize("name", ["compile", "plan", "simulate"])
def test_ranks_are_those_of_all_replicas_in_every_command(
    name: str, command: Gemsc, tmp_path: Path
) -> None:
    words = (name, "model.py", "--schedule", "1f1b", "--ranks")
    uneven = command(*words, 1, "--data", 2)
    assert uneven.code == 1
    assert "error: --ranks 1 is not a multiple of --data 2\n" in uneven.err
    assert "2 replicas of 1 each are --ranks 2\n" in uneven.err
    shared = command(*words, 6, "--data", 2, "--shards", 2)
    assert "--shards 2 does not divide the 3 ranks of a replica" in shared.err
    assert "use --ranks 4 or 8, " in shared.err
    few = command(*words, 2, "--data", 2, "--tiles", "2x1")
    assert "error: --tiles 2x1 needs 2 ranks, a replica has 1\n" in few.err
    assert "help: use --ranks 4 or more, or other tiles\n" in few.err
    many = command(*words, 10, "--data", 2)
    assert "use --ranks 6 --data 2" in many.err
    assert "--ranks" in command(name, "model.py", "--ranks", 0).err


STAYS = {"compile": ("-o", "out"), "plan": ("-o", "out/plan.toml")}


def test_ranks_are_all_processes_in_python_too() -> None:
    assert CompileOptions(data=3).ranks == 6  # two of each replica
    assert CompileOptions(ranks=6, data=3).copy_ranks == 2
    with pytest.raises(GemscError, match="--ranks 1 is not a multiple") as caught:
        CompileOptions(ranks=1, data=2)
    assert "2 replicas of 1 each are --ranks 2" in str(caught.value.help)


@pytest.mark.slow(1)
@pytest.mark.parametrize("name", ["compile", "plan"])
def test_a_plan_counts_the_ranks_of_all_replicas(
    name: str, command: Gemsc, tmp_path: Path
) -> None:
    words = (name, "model.py", "--ranks", 4, "--data", 2)
    done = command(*words, *STAYS[name])
    assert done.code == 0, done.err
    assert "4 ranks in 2 replicas, " in done.out
    plan = Plan.read(tmp_path / "out/plan.toml")
    assert (plan.ranks, plan.data, plan.copy_ranks) == (4, 2, 2)
    assert plan.options["ranks"] == 4
    assert " --ranks 4 --data 2" in plan.command
    assert EditedPlan.read(tmp_path / "out/plan.toml").options().ranks == 4
    if name == "compile":
        assert "4 replicas of 2 ranks" in command("simulate", "out", "--data", 4).out
        again = command(*plan.command.split()[1:], "-o", "again")
        assert again.code == 0, again.err
        twin = Plan.read(tmp_path / "again/plan.toml")
        assert (twin.ranks, twin.data, twin.order) == (4, 2, plan.order)


@pytest.mark.slow
def test_two_ranks_are_the_default_of_each_replica(
    command: Gemsc, tmp_path: Path
) -> None:
    assert command("compile", "model.py", "--data", 3, "-o", "out").code == 0
    assert Plan.read(tmp_path / "out/plan.toml").ranks == 6


@pytest.mark.slow
def test_plan_prints_candidates_and_writes_no_program(
    command: Gemsc, tmp_path: Path
) -> None:
    outcome = command("plan", "model.py", "--ranks", "2", "-o", "p/plan.toml")
    assert outcome.code == 0, outcome.err
    assert "chosen: " in outcome.out
    assert "why: " in outcome.out
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["plan.toml"]
    outcome = command("compile", "model.py", "--plan", "p/plan.toml", "-o", "out")
    assert outcome.code == 0, outcome.err
    planned, built = (Plan.read(tmp_path / d / "plan.toml") for d in ("p", "out"))
    assert built.order == planned.order
    assert built.stages == planned.stages
    assert built.options["check"]  # the graph is still compared with the model


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan, as it stands in a folder beside model.py."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "model.py").write_text(MODEL)
    compile_here(folder / "model.py", "--blocks", "1,2", "-o", folder / "first")
    return (folder / "first" / "plan.toml").read_text()


def _compiled(command: Gemsc, tmp_path: Path, *options: str) -> Path:
    outcome = command("compile", "model.py", *options, "-o", "first")
    assert outcome.code == 0, outcome.err
    return tmp_path / "first" / "plan.toml"


@pytest.mark.slow
def test_an_unchanged_plan_gives_the_same_program(
    command: Gemsc, tmp_path: Path
) -> None:
    options = ("--schedule", "master", "--times", "2", "--data", "2")
    path = _compiled(command, tmp_path, *options)
    outcome = command("compile", "model.py", "--plan", str(path), "-o", "second")
    assert outcome.code == 0, outcome.err
    first, second = Plan.read(path), Plan.read(tmp_path / "second" / "plan.toml")
    assert (first.order, first.stages) == (second.order, second.stages)
    for name in ("rank0.py", "rank1.py"):
        texts = [(tmp_path / d / name).read_text() for d in ("first", "second")]
        bodies = [text.split('"""', 2)[2] for text in texts]
        assert bodies[0] == bodies[1]


@pytest.mark.slow
def test_a_moved_cut_and_a_new_placement_are_compiled(
    command: Gemsc, tmp_path: Path
) -> None:
    path = _compiled(command, tmp_path, "--blocks", "1,2")
    text = path.read_text()
    moved = text.replace('    "first",\n', '    "first",\n    "second",\n', 1)
    head, mark, tail = moved.partition("index = 1\n")
    tail = tail.replace('    "second",\n', "", 1)
    swapped = (head + mark + tail).replace("ranks = [\n    0,\n]", "ranks = [9]", 1)
    swapped = swapped.replace("ranks = [\n    1,\n]", "ranks = [\n    0,\n]", 1)
    path.write_text(swapped.replace("ranks = [9]", "ranks = [\n    1,\n]"))
    outcome = command("compile", "model.py", "--plan", str(path), "-o", "second")
    assert outcome.code == 0, outcome.err
    plan = Plan.read(tmp_path / "second" / "plan.toml")
    assert [stage.blocks for stage in plan.stages] == [["first", "second"], ["third"]]
    assert [stage.ranks for stage in plan.stages] == [[1], [0]]
    assert plan.placement == "explicit"
    assert "placement linear has no effect: it is explicit" in outcome.err


def test_an_edit_of_what_is_not_read_is_said(
    command: Gemsc, two_stages: str, tmp_path: Path
) -> None:
    text = two_stages.replace('dtype = "float32"', 'dtype = "float64"', 1)
    path = tmp_path / "plan.toml"
    path.write_text(text)
    outcome = command("compile", "model.py", "--plan", str(path), "-o", "second")
    at = f"plan.toml:{line_of('dtype = ', text)}"
    assert f"{at}: dtype float64 has no effect: it is float32" in outcome.err


@pytest.mark.by_day(8)
@pytest.mark.parametrize(
    ("edit", "marked", "says"),
    [
        (
            lambda t: t.replace('"second"', '"secnd"'),
            '"secnd"',
            "the model has no block 'secnd'",
        ),
        (
            lambda t: t.replace('    "second",\n', ""),
            '"third"',
            "'second' comes next",
        ),
        (
            lambda t: t.replace('    "third",\n', ""),
            'blocks = [\n    "second"',
            "block 'third' is in no stage",
        ),
        (
            lambda t: t.replace('schedule = "1f1b"', 'schedule = "1b1f"', 1),
            'schedule = "1b1f"',
            "unknown schedule '1b1f'",
        ),
        (
            lambda t: t.replace("ranks = [\n    1,\n]", "ranks = [\n    7,\n]"),
            "ranks = [\n    7",
            "stage 1 is on rank 7",
        ),
        (
            lambda t: t.replace("ranks = [\n    1,\n]", "ranks = [\n    0,\n]"),
            "ranks = 2",
            "rank 1 has no stage",
        ),
        (
            lambda t: t.replace("data = 1", "data = 3", 1),
            "data = 3",
            "2 ranks cannot be divided into 3 data-parallel replicas",
        ),
        (
            lambda t: t.replace("tiles = []\nlocal", "tiles = [2]\nlocal"),
            "tiles = [2]",
            "tiles is [2], which is not a list of texts",
        ),
        (
            lambda t: t.replace("profile = false", "profile = 0"),
            "profile = 0",
            "profile is 0, which is not a true or false",
        ),
        (
            lambda t: t.replace("micro_batches = 4", "micro_batches = 0"),
            "micro_batches = 0",
            "micro_batches is 0",
        ),
        (
            lambda t: t.replace("micro_batches = 4", "micro_batchs = 4"),
            "micro_batchs = 4",
            "unknown entry 'micro_batchs'",
        ),
        (
            lambda t: t.replace('precision = "float32"', 'precison = "bfloat16"'),
            'precison = "bfloat16"',
            "unknown entry 'options.precison'",
        ),
        (
            lambda t: t.replace("index = 1", "index = 7", 1),
            "index = 7",
            "stages[1].index is 7",
        ),
        (
            lambda t: t.replace("recompute = []", 'recompute = ["second"]', 1),
            'recompute = ["second"]',
            "stage 0 has no block 'second'",
        ),
        (
            lambda t: t.replace("fuse_halos = 0", "fuse_halos = -1"),
            "fuse_halos = -1",
            "--fuse-halos is -1",
        ),
        (
            lambda t: t.replace('placement = "linear"', 'placement = "sidewise"'),
            'placement = "sidewise"',
            "unknown placement 'sidewise'",
        ),
        (
            lambda t: t.replace('schedule = "1f1b"', 'schedule = "bidirectional"', 1),
            'schedule = "bidirectional"',
            "bidirectional takes both ways through the ranks, and the stages are not",
        ),
        (
            lambda t: t.replace('hardware = ""', 'hardware = "abacus"'),
            'hardware = "abacus"',
            "unknown hardware 'abacus'",
        ),
        (
            lambda t: t.replace("ranks = 2", "ranks = = 2", 1),
            "ranks = = 2",
            "plan plan.toml is not valid TOML",
        ),
    ],
)
def test_a_wrong_edit_is_refused_with_its_line(
    command: Gemsc,
    two_stages: str,
    tmp_path: Path,
    edit: Callable[[str], str],
    marked: str,
    says: str,
) -> None:
    path, text = tmp_path / "first" / "plan.toml", edit(two_stages)
    path.parent.mkdir()
    path.write_text(text)
    outcome = command("compile", "model.py", "--plan", str(path), "-o", "second")
    assert outcome.code == 1
    assert f"plan.toml:{line_of(marked, text)}: error:" in outcome.err
    assert says in outcome.err
    assert "help: " in outcome.err
    assert not (tmp_path / "second").exists()


@pytest.mark.slow(2)
@pytest.mark.parametrize(("ranks", "data"), [(1, 1), (4, 2), (2, 2)])
def test_an_edit_may_change_the_number_of_ranks(
    ranks: int, data: int, command: Gemsc, tmp_path: Path
) -> None:
    """What was predicted for another number of ranks is made again."""
    path = _compiled(command, tmp_path)
    text = path.read_text().replace("ranks = 2\ndata = 1", f"{ranks=}\n{data=}", 1)
    if ranks == data:  # one rank has all stages
        text = text.replace("ranks = [\n    1,\n]", "ranks = [\n    0,\n]")
    path.write_text(text)
    outcome = command("compile", "model.py", "--plan", str(path), "-o", "second")
    assert outcome.code == 0, outcome.err
    plan = Plan.read(tmp_path / "second" / "plan.toml")
    assert (plan.ranks, plan.data, len(plan.stages)) == (ranks, data, 2)
    assert len(plan.memory) == ranks // data


def test_options_beside_a_plan_are_refused(command: Gemsc, tmp_path: Path) -> None:
    path = _compiled(command, tmp_path)
    for typed in ("--ranks 3", "--ranks 2", "--no-check --data 1"):
        words = ("compile", "model.py", "--plan", str(path), *typed.split())
        outcome = command(*words)
        assert outcome.code == 1
        assert f"with --plan, which decides everything\nhelp: edit {path}" in (
            outcome.err
        )


def test_a_plan_that_is_not_there_is_refused(command: Gemsc) -> None:
    outcome = command("compile", "model.py", "--plan", "gone.toml", "-o", "second")
    assert outcome.code == 1
    assert "error: --plan gone.toml: there is no such file" in outcome.err


def test_a_tie_names_no_difference_of_memory() -> None:
    def candidate(schedule: str, peak: int) -> Candidate:
        options = CompileOptions(schedule=schedule)
        return Candidate(options, seconds=1.0, samples=4, peak_bytes=peak)

    tied = reason([candidate("1f1b", 1024), candidate("gpipe", 1024)])
    assert tied == "as fast as gpipe, M=4, with the same peak memory"
    leaner = reason([candidate("1f1b", 1024), candidate("gpipe", 2048)])
    assert leaner == "as fast as gpipe, M=4 with 1.0 KiB instead of 2.0 KiB"


def test_the_reason_is_where_most_time_is_saved() -> None:
    def candidate(schedule: str, seconds: float, **parts: float) -> Candidate:
        options = CompileOptions(schedule=schedule)
        return Candidate(options, seconds=seconds, samples=4, **parts)

    busy = candidate("1f1b", 1.0, bubble=0.1, talking=0.2)
    idle = candidate("gpipe", 1.5, bubble=0.4)
    assert sum(idle.spent.values()) == pytest.approx(1.5)
    said = "50% faster than gpipe, M=4: ranks are idle 10% of the time instead of 40%"
    assert reason([busy, idle]) == said
    chatty = candidate("gpipe", 2.0, bubble=0.05, talking=0.6)
    assert "inside stages take 20% of the time instead of 60%" in reason([busy, chatty])
    slow = candidate("gpipe", 2.0, bubble=0.05, talking=0.1, ending=0.2)
    assert "own work takes 175.00 s instead of 382.50 s for 1000" in reason(
        [busy, slow]
    )
    late = candidate("gpipe", 2.0, bubble=0.3, ending=1.2)
    assert "the update take 0% of the time instead of 60%" in reason([busy, late])
    _, columns = list_candidates([busy, late], 2)  # the table says what the reason says
    shown = next(column for column in columns if column.title == "idle")
    assert shown.cells == ("10%", "12%")


def test_what_ranks_of_a_stage_wait_for_each_other_is_a_share_of_the_step(
    traced: gemsc.compiler.Traced,
) -> None:
    alone = assess(traced, CompileOptions(ranks=2, micro_batches=1))
    shards = CompileOptions(ranks=2, micro_batches=1, shards=("2",))
    shared = assess(traced, shards)
    assert (alone.talking, shared.problem) == (0.0, "")
    assert 0 < shared.talking < 1
