"""Programs over a finite field: right ones are proved, changed ones are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import Gemsc
from field_mutants import MUTANTS, PROGRAMS, Mutant
from parity_support import NETWORKS, lowered, options
from torch import Tensor

from gemsc.codegen.package import write_directory
from gemsc.options import CompileOptions
from gemsc.runtime.memory import recomputation
from gemsc.runtime.memory.offload import FileStore
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.local import LocalGroup
from gemsc.runtime.transport.transport import Request
from gemsc.runtime.worker.deferral import Deferred
from gemsc.runtime.worker.reduction import RunningStatistics
from gemsc.verify.compare import StepRecord
from gemsc.verify.field import check
from gemsc.verify.field.check import _is_chance, check_all_inputs
from gemsc.verify.field.compared import AllInputs, _compared, _Evaluated
from gemsc.verify.field.mode import OverField
from gemsc.verify.field.numbers import PRIMES, Field

TILES = options(ranks=2, tiles="2x1", micro_batches=2)
PROVED = (
    ("densecnn", PROGRAMS["norms"][1]),
    ("gpt dropout", PROGRAMS["offloaded weights"][1]),
    ("mlp", options(ranks=2, micro_batches=2)),
    ("tiled", TILES),
    ("words smoothed", options(ranks=2, shards=2)),
    ("joins", options(ranks=2, branches=2)),
)


def answer_for(name: str, options: CompileOptions, directory: Path) -> AllInputs:
    plan, case = lowered(name, options).plan, NETWORKS[name]
    batch = case.inputs(plan.data * plan.micro_batches)
    return check_all_inputs(directory, case.build(), case.loss, *batch, draws=1)


@pytest.mark.slow(1)
@pytest.mark.by_day(3)
@pytest.mark.parametrize(("name", "how"), PROVED, ids=[name for name, _ in PROVED])
def test_a_right_program_is_proved(
    name: str, how: CompileOptions, tmp_path: Path
) -> None:
    write_directory(lowered(name, how).compilation, tmp_path / "program")
    result = answer_for(name, how, tmp_path / "program")
    assert result.verdict == "proved", str(result)
    assert result.num_gradients


BY_DAY = (
    "a layer is skipped",
    "an extreme of the tile alone",
    "gradients of tiles are not summed",
    "a gradient is left out",
    "the inputs of another micro-batch",
    "no sum over replicas",
    "a halo off by one row at one tile",
    "another slice of a weight",
    "the words of the other shard",
    "another result in evaluation",
)


@pytest.mark.slow(1)
@pytest.mark.by_day(5)
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(
            mutant,
            id=mutant.name,
            marks=() if mutant.name in BY_DAY else pytest.mark.nightly,
        )
        for mutant in MUTANTS
    ],
)
def test_a_changed_program_is_refused(mutant: Mutant, tmp_path: Path) -> None:
    name, how = PROGRAMS[mutant.program]
    directory = tmp_path / "program"
    write_directory(lowered(name, how).compilation, directory)
    places = mutant.change(directory)
    assert places
    if mutant.error:
        with pytest.raises(Exception, match=mutant.error):
            answer_for(name, how, directory)
        return
    result = answer_for(name, how, directory)
    # a wrong program may divide by 0 wherever it is asked
    assert result.verdict in ("not equal", "not decided")
    if mutant.is_named:
        assert mutant.named_right(result.why, directory, places), str(result)


def test_most_of_many_changed_programs_are_named_right() -> None:
    named = [mutant for mutant in MUTANTS if mutant.is_named]
    assert (len(named), len(MUTANTS)) == (66, 80)


def _lose_a_call(patch: pytest.MonkeyPatch) -> None:
    compute = Deferred.compute

    def changed(self: Deferred) -> None:
        self._waiting[-1:] = []
        compute(self)

    patch.setattr(Deferred, "compute", changed)


def _sum_with(factor: float) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        start = LocalGroup.all_reduce

        def changed(self: LocalGroup, tensor: Tensor) -> Request:
            if self._transport.rank == self.ranks[0]:
                tensor.view(-1)[1:].mul_(factor)  # not how many ranks train
            return start(self, tensor)

        patch.setattr(LocalGroup, "all_reduce", changed)

    return change


def _without_statistics(rank: int) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        start = RunningStatistics.start

        def changed(
            self: RunningStatistics, transport: DeviceTransport, *how: Any
        ) -> tuple[Request, ...]:
            self.counts = transport.host.rank != rank
            return start(self, transport, *how)

        patch.setattr(RunningStatistics, "start", changed)

    return change


def _another_decay(patch: pytest.MonkeyPatch) -> None:
    start = RunningStatistics.start

    def changed(
        self: RunningStatistics, transport: DeviceTransport, group: Any, runs: float
    ) -> tuple[Request, ...]:
        return start(self, transport, group, runs + 1)

    patch.setattr(RunningStatistics, "start", changed)


def _one_update_more(patch: pytest.MonkeyPatch) -> None:
    finish = RunningStatistics.finish

    def changed(self: RunningStatistics) -> None:
        self._sum[-1] += 1  # of the last layer
        finish(self)

    patch.setattr(RunningStatistics, "finish", changed)


def _statistics_advance_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recomputation, "_copied_statistics", lambda layers: nullcontext([]))


def _restored_to(other: Callable[[int], int]) -> Callable[[Any], None]:
    """Bring back what was put away as another one of its size, by its number."""

    def change(patch: pytest.MonkeyPatch) -> None:
        put = FileStore.put
        kinds: dict[tuple[int, bool], list[Tensor]] = {}

        def changed(self: FileStore, data: Tensor) -> Any:
            is_index = data.nbytes % 8 > 0 or bool(data.view(torch.int64).max() < 2**20)
            same = kinds.setdefault((data.nbytes, is_index), [])
            same.append(data.clone())
            return put(self, same[other(len(same) - 1)])

        patch.setattr(FileStore, "put", changed)

    return change


def _recomputed_from_another(patch: pytest.MonkeyPatch) -> None:
    again = recomputation._Run.again
    first: dict[str, tuple[Tensor, ...]] = {}

    def changed(self: Any) -> None:
        self._inputs = first.setdefault(self._block.__name__, self._inputs)
        again(self)

    patch.setattr(recomputation._Run, "again", changed)


# of the runtime: what is changed, and programs that it makes wrong
CHANGES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]]] = {
    "a deferred gradient is lost": (_lose_a_call, ("split backward",)),
    "one rank is added twice": (
        _sum_with(2.0),
        ("mirror", "replicas", "tiles", "shards", "branches"),
    ),
    "one rank is not added": (
        _sum_with(0.0),
        ("mirror", "replicas", "tiles", "shards", "branches"),
    ),
    "statistics of the first replica are left out": (
        _without_statistics(0),
        ("norms", "mirrored norms"),
    ),
    "statistics of the last replica are left out": (
        _without_statistics(1),
        ("norms", "mirrored norms"),
    ),
    "statistics decay otherwise": (_another_decay, ("norms", "mirrored norms")),
    "statistics of one update more": (_one_update_more, ("norms", "mirrored norms")),
    "what comes back is the first of its size": (
        _restored_to(lambda number: 0),
        ("offload", "offloaded weights"),
    ),
    "what comes back is the one before": (
        _restored_to(lambda number: max(number - 1, 0)),
        ("offload", "offloaded weights"),
    ),
    "a block runs again on another micro-batch": (
        _recomputed_from_another,
        ("recompute",),
    ),
    "statistics advance as a block runs again": (
        _statistics_advance_twice,
        ("recompute",),
    ),
}


@pytest.mark.slow
@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("change", "program"),
    [
        pytest.param(change, program, id=f"{name}: {program}")
        for name, (change, programs) in CHANGES.items()
        for program in programs
    ],
)
def test_a_changed_runtime_is_refused(
    change: Callable[[pytest.MonkeyPatch], None],
    program: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, how = PROGRAMS[program]
    write_directory(lowered(name, how).compilation, tmp_path / "program")
    change(monkeypatch)
    assert answer_for(name, how, tmp_path / "program").verdict == "not equal"


WORDS = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(16, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, ids):
        x = self.words(ids).mean(1)
        return self.head({0})

model = Net

def example_inputs():
    return (torch.arange(16).view(2, 8),)

def example_target():
    return torch.tensor([0, 1])

loss = nn.CrossEntropyLoss()
"""


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("text", "says", "runs"),
    [
        # other words, of which none may be a 7 or a 3, then those of the file
        (
            "x / ((ids == 7).sum() * (ids == 3).sum())",
            "proved for forward, 3 gradients",
            2,
        ),
        ("x.half().to(x.dtype)", "not decided: .*model.py.*no rule for numbers in", 1),
    ],
)
def test_the_words_of_the_file_are_tried_where_others_divide_by_0(
    text: str,
    says: str,
    runs: int,
    command: Gemsc,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "model.py").write_text(WORDS.format(text))
    words = ["compile", "model.py", "--ranks", "1", "--micro-batches", "4", "-o", "x"]
    assert command(*words).code == 0
    tried: list[Any] = []

    def noted(*given: Any, **how: Any) -> AllInputs:
        tried.append(given)
        return check_all_inputs(*given, **how)

    monkeypatch.setattr(check, "check_all_inputs", noted)
    done = command("verify", "x", "--all-inputs")
    assert re.search(f"all inputs: {says}", done.out), done
    assert done.code == ("proved" not in says)
    assert len(tried) == runs


def test_what_is_not_decided_names_the_files_that_the_user_has(tmp_path: Path) -> None:
    name, how = PROGRAMS["pipeline"]
    write_directory(lowered(name, how).compilation, tmp_path / "program")
    narrow = "head = self.head(hidden.half().to(hidden.dtype))"
    mutant = Mutant("", "pipeline", "head = self.head(hidden)", narrow)
    assert mutant.change(tmp_path / "program")
    place = rf"{tmp_path / 'program' / 'rank1.py'}:\d+, mlp.py:\d+: no rule for numbers"
    assert re.match(place, answer_for(name, how, tmp_path / "program").why)


def test_divisions_by_0_are_chance_where_there_are_many_of_others() -> None:
    mode = OverField(Field(PRIMES[0], 0))
    for mode.divisions, mode.zeros, verdict, is_chance in (
        (10, 0, "not equal", True),
        (10, 1, "proved", False),
        (10 * PRIMES[0], 12, "proved", True),
        (10 * PRIMES[0], 12, "not equal", False),
        (10 * PRIMES[0], 30, "proved", False),
    ):
        assert _is_chance(mode, verdict) is is_chance


def test_a_gradient_that_the_model_has_not_is_wrong() -> None:
    drawn, ones, none = Field(PRIMES[0], 0), torch.ones(2), torch.zeros(2)
    expected = StepRecord([1.0], {"a": ones}, {"a": ones}, terms=[1.0])
    same = _Evaluated(), _Evaluated()
    for more, verdict in ((ones, "not equal"), (none, "proved")):
        actual = StepRecord([1.0], {"a": ones, "b": more}, {"a": ones})
        assert _compared((actual, expected), same, drawn).verdict == verdict


@pytest.mark.parametrize(
    ("change", "evaluated", "wrong"),
    [
        ({}, _Evaluated(outputs={"y": torch.ones(2)}), ""),
        ({"losses": [2.0]}, _Evaluated(outputs={"y": torch.ones(2)}), "the loss"),
        ({"state": {"n": torch.zeros(2)}}, None, "buffer n"),
        ({"state": {"n": torch.ones(1)}}, None, "buffer n"),
        ({"unequal": frozenset({"a"})}, None, "the copies of a"),
        ({}, _Evaluated(outputs={"y": torch.zeros(2)}), "evaluation: y"),
        ({}, _Evaluated(), "evaluation: y is missing"),
        ({}, _Evaluated(2.0, outputs={"y": torch.ones(2)}), "evaluation: the loss"),
    ],
)
def test_all_that_ranks_give_is_compared(
    change: dict[str, Any], evaluated: _Evaluated | None, wrong: str
) -> None:
    ones, held = torch.ones(2), _Evaluated(outputs={"y": torch.ones(2)})
    expected = StepRecord([1.0], {"a": ones}, {"a": ones, "n": ones}, terms=[1.0])
    steps = replace(expected, **change), expected
    answer = _compared(steps, (evaluated or held, held), Field(PRIMES[0], 0))
    assert answer.wrong == ((wrong,) if wrong else ())
    assert answer.verdict == ("not equal" if wrong else "proved")


@pytest.mark.parametrize("wrong", [None, 0, 1])
def test_a_program_is_proved_if_it_is_so_for_all_shapes(
    wrong: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved = AllInputs("proved", degree=3, bound=1e-7)
    verdicts = [proved, replace(proved, degree=5, chooses=True)]
    if wrong is not None:
        verdicts[wrong] = AllInputs("not equal", "x")
    left, plan = iter(verdicts), SimpleNamespace(ranks=1, phases=(), data=1)
    plan.micro_batches = 1
    shapes = [(torch.ones(1, n),) for n in (1, 2)]
    user = SimpleNamespace(
        make_shapes=lambda: shapes,
        make_targets=lambda shapes: [None, None],
        make_loss=lambda: None,
    )
    monkeypatch.setattr(check.Plan, "read", lambda path: plan)
    monkeypatch.setattr(check, "check_program", lambda *given: None)
    monkeypatch.setattr(check, "user_model_of", lambda *given: user)
    monkeypatch.setattr(check, "initial_model", lambda *given: None)
    monkeypatch.setattr(check, "_of_batch", lambda *given: next(left))
    answer = check.check_program_for_all_inputs(Path())
    if wrong is not None:
        assert answer == verdicts[wrong]
    else:
        assert (answer.degree, answer.bound, answer.chooses) == (5, 2e-7, True)


@pytest.mark.parametrize("first", ["", "by zero", "fails"])
def test_whole_numbers_of_micro_batches_differ_where_the_model_takes_that(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Tensor] = []

    def checked(directory: Path, model: Any, loss: Any, *batch: Any) -> AllInputs:
        tried.append(batch[0][0])
        if len(tried) == 1 and first == "fails":
            raise check._ModelFailedError("x")
        by_zero = len(tried) == 1 and first == "by zero"
        return AllInputs("not decided", check._BY_ZERO) if by_zero else AllInputs("x")

    monkeypatch.setattr(check, "check_all_inputs", checked)
    words, plan = torch.arange(12).reshape(1, 12).repeat(2, 1), SimpleNamespace(data=1)
    plan.micro_batches = 2
    given: Any = Path(), None, None, ((words,), torch.ones(2)), plan
    assert check._of_batch(*given) == AllInputs("x")
    assert not torch.equal(*tried[0].chunk(2))
    assert [torch.equal(batch, words) for batch in tried[1:]] == [True] * bool(first)


@pytest.mark.parametrize(
    ("degree", "draws", "verdict"),
    [(20, 3, "proved"), (9000, 6, "proved"), (10**6, 9, "not decided")],
)
def test_there_are_draws_until_little_is_left_to_chance(
    degree: int, draws: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def once(*given: Any) -> tuple[AllInputs, bool]:
        drawn.append(given[-1])
        return AllInputs("proved", degree=degree), True

    monkeypatch.setattr(check, "_once", once)
    answer = check_all_inputs(Path(), torch.nn.Linear(1, 1), len, None, None)
    assert (len(drawn), answer.verdict) == (draws, verdict)
    assert len({(field.p, field.key) for field in drawn}) == draws
    assert answer.verdict != "proved" or answer.bound < 1e-6
