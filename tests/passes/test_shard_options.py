"""`--shards`, `--branches`, `--trunk`, `--whole`: what ranks share; what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import MODEL, gemsc_here
from program_support import against_one_process
from torch import nn
from torch.nn.utils import parametrize

import gemsc
from gemsc.base.grid_shape import ALONE, GridShape
from gemsc.errors import GemscError
from gemsc.options import AUTO, CompileOptions
from gemsc.planner.layout import check_whole, stage_layout
from gemsc.search.candidates import alternatives

TWO = GridShape(shards=2)


def groups(**choices: object) -> tuple[GridShape, ...]:
    return CompileOptions(**choices).groups  # type: ignore[arg-type]


def test_one_number_of_shards_is_that_of_every_stage_with_tiles_too() -> None:
    assert groups(ranks=4, shards=("2",)) == (TWO, TWO)
    assert groups(ranks=3, shards=("1",)) == (ALONE,) * 3
    tiled = GridShape((3, 1), 2)
    assert tiled.size == 6
    assert groups(ranks=10, tiles=("3x1",), shards=("2",)) == (tiled, TWO, TWO)
    assert groups(ranks=8, tiles=("1x1", "2x1"), shards=("2",)) == (
        TWO,
        GridShape((2, 1), 2),
        TWO,
    )


def test_a_list_has_the_shards_of_each_stage() -> None:
    listed = groups(ranks=7, shards=("2", "1", "4"))
    assert listed == (TWO, ALONE, GridShape(shards=4))
    mixed = groups(ranks=4, tiles=("2x1", "1"), shards=("1", "2"))
    assert mixed == (GridShape((2, 1)), TWO)
    both = groups(ranks=6, tiles=("2x1",), shards=("2", "2"))
    assert both == (GridShape((2, 1), 2), TWO)
    assert CompileOptions(ranks=3, shards="2,1").shards == ("2", "1")  # type: ignore[arg-type]
    assert CompileOptions(ranks=4, shards=2).shards == ("2",)  # type: ignore[arg-type]


def test_branches_are_given_as_shards_are_and_both_are_on_the_same_ranks() -> None:
    two = GridShape(branches=2)
    assert groups(ranks=4, branches="2") == (two, two)
    assert groups(ranks=3, branches="2,1") == (two, ALONE)
    assert groups(ranks=3, tiles="1x1,2x1", branches="1") == (
        ALONE,
        GridShape((2, 1)),
    )
    both = GridShape(shards=2, branches=2)
    assert groups(ranks=4, shards="2", branches="2") == (both, both)
    assert groups(ranks=4, shards="2", branches="1,2") == (TWO, both)
    assert groups(ranks=4, shards="1,2", branches=2) == (two, both)
    assert [
        str(grid) for grid in (*groups(ranks=4, tiles="2x1,1", branches="1,2"), both)
    ] == [
        "2x1 tiles",
        "branches on 2 ranks",
        "2 shards and branches on 2 ranks",
    ]


def test_the_schedule_takes_a_group_for_one_rank() -> None:
    looped = CompileOptions(ranks=4, shards=("2",), schedule="interleaved")
    assert stage_layout(looped).num_stages == 4
    assert stage_layout(looped).grids == (TWO,) * 4


def test_mirrored_stages_of_as_many_shards_change_places() -> None:
    chosen = stage_layout(
        CompileOptions(
            ranks=6, shards=("2", "1", "2", "1"), schedule="mast", micro_batches=2
        )
    )
    assert chosen.rows == ((0, 1, 2, 3), (2, 3, 0, 1))


@pytest.mark.parametrize(
    ("choices", "says", "advice"),
    [
        (
            {"ranks": 5, "shards": ("2",)},
            "--shards 2 does not divide --ranks 5",
            "use --ranks 4 or 6, or list the shards of each stage: --shards 2,2,1",
        ),
        (
            {"ranks": 3, "shards": ("4",)},
            "--shards 4 does not divide --ranks 3",
            "use --ranks 4, or list the shards of each stage: --shards 3",
        ),
        (
            {"ranks": 7, "tiles": ("2x1",), "shards": ("2",)},
            "--shards 2 does not divide the 3 ranks left by --tiles 2x1",
            "use --ranks 6 or 8, or list the shards of each stage: --shards 2,2,1",
        ),
        (
            {"ranks": 6, "shards": ("2", "1", "4")},
            "--shards 2,1,4 needs 7 ranks, --ranks is 6",
            "use --ranks 7, or other shards",
        ),
        (
            {"ranks": 4, "tiles": ("2x1",), "shards": ("2", "2")},
            "--tiles 2x1 --shards 2,2 needs 6 ranks, --ranks is 4",
            "use --ranks 6, or other tiles and shards",
        ),
        (
            {"ranks": 5, "shards": ("2",), "branches": ("2",)},
            "--shards 2 --branches 2 does not divide --ranks 5",
            "list the shards and branches of each stage: "
            "--shards 2,2,1 --branches 2,2,1",
        ),
        (
            {"ranks": 5, "branches": ("2", "2")},
            "--branches 2,2 needs 4 ranks, --ranks is 5",
            "use --ranks 4, or other branches",
        ),
        (
            {"ranks": 4, "tiles": ("2x1",), "branches": ("2", "2")},
            "--tiles 2x1 --branches 2,2 needs 6 ranks, --ranks is 4",
            "use --ranks 6, or other tiles and branches",
        ),
        (
            {"ranks": 4, "shards": ("2",), "branches": ("4",)},
            "--shards 2 and --branches 4: stage 0 would be on 2 ranks and on 4",
            "give both the same number",
        ),
        ({"branches": ("a",)}, "'a' is not a number of branches", "--branches 2,1,4"),
        ({"shards": ("0",)}, "'0' is not a number of shards", "--shards 2"),
        ({"shards": ("2x2",)}, "'2x2' is not a number of shards", "--shards 2,1,4"),
        (
            {"trunk": "batch"},
            "--trunk batch has no effect without --shards",
            "leave it out",
        ),
        ({"whole": ("head",)}, "--whole head has no effect without --shards", "2"),
        (
            {"shards": ("2",), "trunk": "tokens"},
            "unknown trunk 'tokens'",
            "choose one of auto, whole, batch, sequence",
        ),
    ],
)
def test_shards_that_cannot_be_are_refused(
    choices: dict[str, object], says: str, advice: str
) -> None:
    with pytest.raises(GemscError) as caught:
        groups(**choices)
    assert says in caught.value.message
    assert advice in (caught.value.help or "")


@pytest.mark.parametrize("shards", [("2", "2", "1"), ("1", "2", "2")])
def test_advice_where_shards_do_not_divide_the_ranks_works(
    shards: tuple[str, ...],
) -> None:
    assert len(groups(ranks=5, shards=shards)) == 3
    assert len(groups(ranks=6, tiles=("2x1",), shards=("2",))) == 2


@pytest.mark.slow(1)
@pytest.mark.parametrize("balance", ["compute", "memory"])
def test_a_stage_of_shards_takes_more_of_the_blocks(balance: str) -> None:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)]
    program = gemsc.compile(
        nn.Sequential(*layers),
        (torch.randn(2, 64),),
        loss=nn.functional.mse_loss,
        example_target=torch.randn(2, 64),
        options=CompileOptions(
            ranks=4, shards=("3", "1"), micro_batches=1, balance=balance
        ),
    )
    assert [len(stage.blocks) for stage in program.plan.stages] == [6, 2]
    assert [stage.ranks for stage in program.plan.stages] == [[0, 1, 2], [3]]


@pytest.mark.parametrize("name", ["shards", "branches"])
def test_weight_gradients_do_not_wait_where_ranks_share_a_stage(name: str) -> None:
    options = CompileOptions(ranks=4, schedule="zb-h1", **{name: ("2",)})  # type: ignore[arg-type]
    with pytest.raises(GemscError, match=f"zb-h1 cannot be used with --{name}"):
        stage_layout(options)


def test_modules_that_stay_whole_must_be_there() -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    check_whole(("encoder", "head.weight"), model)
    with pytest.raises(GemscError, match="no module 'encode'") as caught:
        check_whole(("head", "encode"), model)
    assert "encoder" in (caught.value.help or "")


def test_auto_tries_every_number_of_shards_that_divides_the_ranks() -> None:
    options = CompileOptions(ranks=6, shards=("auto",))
    tried = [way.shards for way in alternatives(options)]
    assert tried == [(), ("2",), ("3",), ("6",)]
    both = CompileOptions(ranks=2, shards=("auto",), tiles=("auto",), trunk="batch")
    ways = [(way.tiles, way.shards, way.trunk) for way in alternatives(both, (8,))]
    assert ways == [((), (), "auto"), ((), ("2",), "batch"), (("2",), (), "auto")]


def test_auto_tries_branches_and_with_shards_both_on_the_same_ranks() -> None:
    alone = CompileOptions(ranks=4, branches="auto", shards="2", trunk="whole")
    assert [o.branches for o in alternatives(alone, (), 4)] == [(), ("2",)]
    four = CompileOptions(ranks=4, branches="auto")
    assert [o.branches for o in alternatives(four, (), 4)] == [(), ("2",), ("4",)]
    assert [o.branches for o in alternatives(four, (), 3)] == [(), ("2",)]
    assert [o.branches for o in alternatives(four)] == [()]
    both = CompileOptions(ranks=2, branches="auto", shards="auto", tiles="auto")
    assert [(o.tiles, o.shards, o.branches) for o in alternatives(both, (8,), 2)] == [
        ((), (), ()),
        ((), ("2",), ()),
        ((), (), ("2",)),
        ((), ("2",), ("2",)),
        (("2",), (), ()),
    ]


def test_copies_that_shards_do_not_fit_are_left_out() -> None:
    options = CompileOptions(ranks=8, shards=("2", "2"), data=AUTO, micro_batches=8)
    assert [(o.data, o.ranks) for o in alternatives(options)] == [(2, 8)]
    with pytest.raises(GemscError, match=r"--shards 2,2 needs 4 ranks, --ranks is 6"):
        alternatives(CompileOptions(ranks=6, shards=("2", "2"), data=AUTO))


def test_the_command_line_reads_shards(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    command = gemsc_here(monkeypatch, capfd)
    refused = command("compile", "model.py", "--ranks", "3", "--shards", "2")
    assert "error: --shards 2 does not divide --ranks 3" in refused.err
    wrong = ("--shards", "2", "--whole", "thrid", "--ranks", "2")
    assert "no module 'thrid'" in command("compile", "model.py", *wrong).err


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        parametrize.register_parametrization(self.up, "weight", Doubled())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def test_a_layer_with_a_parametrization_is_cut(tmp_path: Path) -> None:
    diff = against_one_process(tmp_path, Parametrized(), ranks=2, shards="2")
    assert diff.worst < 1e-12
