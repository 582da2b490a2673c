"""What plan.toml, `gemsc show` and rank files tell of shards; an edited plan."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import Gemsc, line_of

from gemsc.plan import Plan, cut_name

MODEL = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


model = nn.Sequential(Block(), Block())
loss = nn.MSELoss()


def example_inputs():
    return (torch.randn(4, 8),)


def example_target():
    return torch.randn(4, 8)
"""
CUT = [
    "0.up.weight.0 of 12 features",
    "0.up.bias.0 of 12 features",
    "0.down.weight.1 of 12 features",
]


def compiled(command: Gemsc, *flags: str) -> Plan:
    shards = ("--ranks", "4", "--shards", "2", "--trunk", "whole", *flags)
    outcome = command("compile", "model.py", *shards, "-o", "first")
    assert outcome.code == 0, outcome.err
    return Plan.read(Path("first/plan.toml"))


def edited(command: Gemsc, old: str, new: str) -> tuple[str, Plan]:
    """Compile the plan with other text; return what that says, and the plan then."""
    path = Path("first/plan.toml")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    outcome = command("compile", "model.py", "--plan", str(path), "-o", "second")
    folder = "second" if outcome.code == 0 else "first"
    return outcome.err, Plan.read(Path(folder) / "plan.toml")


@pytest.mark.slow
def test_the_plan_says_what_is_cut_and_why_the_rest_is_whole(command: Gemsc) -> None:
    plan = compiled(command)
    for stage in plan.stages:
        names = [f"{stage.index}{text[1:]}" for text in CUT]
        assert stage.cut == names
        assert (stage.shards, stage.trunk, stage.units) == (2, "whole", "features")
        (whole,) = stage.whole
        kept = ("down.bias", "norm.bias", "norm.weight")
        assert sorted(whole.names) == [f"{stage.index}.{name}" for name in kept]
        assert whole.num_bytes == 3 * 8 * 4
        assert "norm" in whole.reason


@pytest.mark.slow
def test_the_plan_counts_what_the_ranks_of_a_stage_send(command: Gemsc) -> None:
    plan = compiled(command)
    for stage in plan.stages:
        assert stage.sums == 2 * stage.shards  # one forward, one backward
        assert stage.sum_bytes == stage.sums * 4 * 8 * 4
        assert stage.talking_seconds > 0
    sums = sum(stage.sums for stage in plan.stages)
    assert plan.traffic["sums"] == plan.micro_batches * sums


@pytest.mark.slow
def test_rank_files_say_what_their_layers_are_part_of(command: Gemsc) -> None:
    compiled(command)
    text = Path("first/rank3.py").read_text()
    assert text.startswith('"""Rank 3 of 4: shard 1 of 2, stage 1 of')
    assert "Here: features 6 to 12 of 12; what is between is whole." in text
    assert "nn.Linear(8, 6)  # features 6 to 12 of 12" in text
    assert "nn.Linear(6, 8)  # of features 6 to 12 of 12" in text
    assert "# all-reduce over the shards" in text


@pytest.mark.slow
def test_show_and_pictures_tell_of_shards(command: Gemsc) -> None:
    compiled(command)
    shown = command("show", "first").out
    assert "inside stages (one micro-batch, forward and backward)" in shown
    assert "whole on every rank of a stage" in shown
    assert "ranks 2-3" in shown
    dot = Path("first/graph.dot").read_text()
    assert "ranks 2, 3: 2 shards of features" in dot
    assert dot.count("2 shards: features") == dot.count("shape=box3d") == 3
    assert "ranks 2-3" in Path("first/timeline.svg").read_text()
    assert "features" in Path("first/report.html").read_text()


@pytest.mark.slow
def test_an_unchanged_plan_gives_the_same_shards(command: Gemsc) -> None:
    first = compiled(command)
    _, second = edited(command, "", "")
    assert first.stages == second.stages
    assert (second.options["trunk"], second.options["whole"]) == ("whole", [])


@pytest.mark.slow
def test_what_is_taken_out_of_the_plan_stays_whole(command: Gemsc) -> None:
    plan = compiled(command, "--ranks", "2")
    assert len(plan.stages[0].cut) == 6
    _, plan = edited(command, '    "0.up.bias.0 of 12 features",\n', "")
    assert plan.stages[0].cut == [f"1{text[1:]}" for text in CUT]
    assert plan.options["whole"] == ["0.up.bias"]
    text = Path("second/rank0.py").read_text()
    assert text.count("nn.Linear(8, 12)") == text.count("nn.Linear(8, 6)") == 1


@pytest.mark.slow
def test_a_stage_of_which_all_is_taken_out_is_refused(command: Gemsc) -> None:
    compiled(command)
    error, _ = edited(command, '    "0.up.bias.0 of 12 features",\n', "")
    assert "nothing in stage 0 can be cut" in error
    assert "--whole" in error
    assert "give this stage one rank: --shards 1,2 --ranks 3" in error


@pytest.mark.slow
def test_an_exported_model_has_no_layers_to_cut(command: Gemsc) -> None:
    flags = "compile", "model.py", "--ranks", "2", "--shards", "2"
    refused = command(*flags, "--frontend", "export")
    assert "no rule for linear.default" in refused.err
    assert "help: trace it with --frontend record" in refused.err
    assert command(*flags).code == 0


@pytest.mark.slow
def test_the_advice_counts_stages_that_share_ranks_once(command: Gemsc) -> None:
    flags = ("--ranks", "3", "--shards", "2,1", "--placement", "0,1,0")
    refused = command("compile", "model.py", *flags, "--whole", "0.up")
    assert "nothing in stage 0 can be cut" in refused.err
    advice = "give this stage one rank: --ranks 2 without --shards and --whole"
    assert advice in refused.err
    flags = ("--ranks", "2", "--placement", "0,1,0")
    assert command("compile", "model.py", *flags).code == 0


@pytest.mark.slow
def test_a_name_that_the_stage_lacks_is_refused(command: Gemsc) -> None:
    compiled(command)
    wrong = '"0.upper.weight.0 of 12 features"'
    error, _ = edited(command, '"0.up.weight.0 of 12 features"', wrong)
    where = line_of(wrong, Path("first/plan.toml").read_text())
    assert (
        f"plan.toml:{where}: error: stage 0 has no parameter '0.upper.weight'" in error
    )
    assert "0.up.weight" in error.partition("help: ")[2]


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "shards = 2\n",
            "shards = 4\n",
            "stage 0 has 4 shards, its ranks are 2 shards",
        ),
        ('trunk = "whole"\n', 'trunk = "tokens"\n', "unknown trunk 'tokens'"),
    ],
)
def test_a_wrong_edit_of_shards_is_refused(
    command: Gemsc, old: str, new: str, says: str
) -> None:
    compiled(command)
    error, _ = edited(command, old, new)
    assert says in error
    assert "plan.toml:" in error


@pytest.mark.slow
def test_an_edited_trunk_is_that_of_all_stages(command: Gemsc) -> None:
    first, last = compiled(command, "--trunk", "auto").stages
    assert first.trunk == last.trunk == "batch"
    path = Path("first/plan.toml")
    path.write_text(path.read_text().replace('trunk = "batch"', 'trunk = "whole"', 1))
    error, _ = edited(command, "", "")
    assert "stage 0 has trunk batch, not whole" in error
    _, plan = edited(command, 'trunk = "batch"', 'trunk = "whole"')
    assert [stage.trunk for stage in plan.stages] == ["whole", "whole"]


def test_the_name_in_an_entry() -> None:
    assert cut_name("a.qkv.weight.0 of 3 x 4 heads") == "a.qkv.weight"


def test_plan_compares_shards_with_stages_and_replicas(command: Gemsc) -> None:
    text = command("plan", "model.py", "--ranks", "2", "--most", "40").out
    for way in ("1f1b, M=4", "one rank x2, M=2"):
        assert f" {way} " in text
    assert "why: " in text
    assert "shards" not in text  # at their best they are slower than what was found
    split = command("plan", "model.py", "--ranks", "2", "--shards", "2", "--data", "1")
    assert " shards 2, one stage, M=4 " in split.out
    rates = [
        re.search(rf" {way} +│ +([0-9,]+) ", out)
        for way, out in (
            ("one rank x2, M=2", text),
            ("shards 2, one stage, M=4", split.out),
        )
    ]
    fastest, slower = (float(match[1].replace(",", "")) for match in rates)
    assert slower < fastest


@pytest.mark.slow
def test_a_simulation_counts_the_ranks_of_a_stage(command: Gemsc) -> None:
    compiled(command)
    assert "on 8 ranks of" in command("simulate", "first", "--data", "2").out


def test_batch_norm_without_statistics_is_cut_by_channels(command: Gemsc) -> None:
    layers = "nn.Linear(8, 12), nn.BatchNorm1d(12, track_running_stats=False), "
    text = MODEL.replace("Block(), Block()", f"{layers}nn.Linear(12, 8)")
    Path("model.py").write_text(text)
    flags = ("--ranks", "2", "--shards", "2", "-o", "norms")
    done = command("compile", "model.py", *flags)
    assert done.code == 0, done.err
    text = Path("norms/rank0.py").read_text()
    assert "nn.BatchNorm1d(6, track_running_stats=False)" in text
    assert not Plan.read(Path("norms/plan.toml")).unchecked  # a step was compared


def test_a_layer_that_unflattens_has_the_sizes_of_a_part(command: Gemsc) -> None:
    layers = "nn.Linear(8, 12), nn.Unflatten(-1, (6, 2)), nn.GELU(), "
    layers += "nn.Flatten(-2), nn.Linear(12, 8)"
    Path("model.py").write_text(MODEL.replace("Block(), Block()", layers))
    flags = ("--ranks", "2", "--shards", "2", "-o", "flat")
    done = command("compile", "model.py", *flags)
    assert done.code == 0, done.err
    assert ".unflatten(1, (3, 2))" in Path("flat/rank0.py").read_text()
    assert not Plan.read(Path("flat/plan.toml")).unchecked  # a step was compared


def test_group_norm_without_weights_normalizes_a_ranks_groups(command: Gemsc) -> None:
    layers = "nn.Linear(8, 12), nn.GroupNorm(4, 12, affine=False), nn.Linear(12, 8)"
    Path("model.py").write_text(MODEL.replace("Block(), Block()", layers))
    flags = ("--ranks", "2", "--shards", "2", "-o", "groups")
    done = command("compile", "model.py", *flags)
    assert done.code == 0, done.err
    text = Path("groups/rank0.py").read_text()
    assert "F.group_norm(" in text
    assert "nn.Linear(8, 6)" in text
    assert not Plan.read(Path("groups/plan.toml")).unchecked  # a step was compared


def test_a_module_that_depends_on_data_is_named_with_what_helps(
    command: Gemsc,
) -> None:
    text = Path("model.py").read_text()
    text += """

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        found = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(x[:, 0] * (2 * i - 1) > 0)  # <-- here
            found = found.index_add(0, rows, expert(x[rows]))
        return found


def model():
    return nn.Sequential(Mixture())


def example_inputs():
    return (torch.randn(6, 8),)


def example_target():
    return torch.randn(6, 8)
"""
    Path("model.py").write_text(text)
    refused = command("compile", "model.py", "--ranks", "2", "--shards", "2")
    assert refused.code == 1
    line = 1 + text[: text.index("<-- here")].count("\n")
    assert f"note: '0' stays whole, for model.py:{line}: " in refused.err
    assert "--ranks 1 without --shards, or keep all sizes in '0' fixed" in refused.err


def test_a_weight_of_classes_may_be_a_tensor_of_the_file(command: Gemsc) -> None:
    text = MODEL.replace("Block(), Block()", "nn.Linear(8, 6), nn.Linear(6, 4)")
    text = text.replace(
        "loss = nn.MSELoss()",
        "WEIGHT = torch.linspace(0.5, 2, 4)\n\n\ndef loss(output, target):\n"
        "    weight = WEIGHT.to(output.dtype)\n"
        "    return nn.functional.cross_entropy(output, target, weight)",
    ).replace("return torch.randn(4, 8)", "return torch.tensor([0, 3, 1, 2])")
    Path("model.py").write_text(text)
    flags = ("--ranks", "2", "--shards", "2", "-o", "classes")
    done = command("compile", "model.py", *flags)
    assert done.code == 0, done.err
    assert "parallel_cross_entropy(" in Path("classes/rank0.py").read_text()
    assert not Plan.read(Path("classes/plan.toml")).unchecked  # a step was compared
