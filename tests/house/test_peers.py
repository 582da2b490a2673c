"""What must hold of every split of a model over ranks.

`ELSEWHERE` lists the tests of other files that hold one of these promises.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MODELS
from networks import PICTURE, TOKENS, Dense, TiedEncoder, cross_entropy
from program_support import (
    Net,
    X,
    against_one_process,
    batch_of,
    mse,
    on_ranks,
    trunk,
    weights_in,
    written,
)
from safetensors.torch import load_file
from threads import run_on_threads
from torch import Tensor, nn

from gemsc.compiler import compile
from gemsc.plan import Plan
from gemsc.runtime import Run
from gemsc.runtime.training.trainer import Trainer
from gemsc.schedules import SCHEDULES
from gemsc.verify.compare import TOLERANCE, compare
from gemsc.verify.one_process import reference_steps

EXACT = TOLERANCE[torch.float64]
RUNNABLE = [n for n, s in SCHEDULES.items() if not s.policy.split_backward]
ELSEWHERE = {
    "any optimizer, any groups, with running statistics": (
        "test_trainer.py::test_any_optimizer_with_any_groups"
    ),
    "inputs, masks and integers may be used by any stage": (
        "test_trainer.py::test_keywords_nests_masks_and_integers_are_inputs_of_any_stage",
        "test_trainer.py::test_a_raw_input_may_cross_every_stage",
    ),
    "a data-dependent branch is refused with the user's line": (
        "test_record_refused.py::test_what_cannot_be_traced_is_refused_with_its_line"
    ),
    "a batch of another size is refused by name": (
        "test_trainer.py::test_a_batch_of_another_size_is_refused_by_name"
    ),
    "a cut never falls inside a residual block": (
        "test_group_blocks.py::test_a_cut_never_falls_inside_a_branched_block"
    ),
    "a skip is sent once, straight to its consumer": (
        "test_insert_comms.py::test_a_skip_is_sent_once_and_straight_to_its_consumer"
    ),
    "long skips are trained exactly over any number of stages": (
        "test_parity.py::test_ranks_compute_what_one_process_does"
    ),
    "evaluation is evaluation": (
        "test_follow_stages.py::test_graphs_that_differ_in_constants_share_a_forward",
        "test_follow_stages.py::test_deep_supervision_has_a_forward_of_its_own",
    ),
    "a stale program refuses to run": (
        "test_bad_program.py::test_an_edited_model_makes_its_program_stale"
    ),
}


@pytest.mark.parametrize("promise", ELSEWHERE)
def test_the_promise_has_its_test(promise: str) -> None:
    names = ELSEWHERE[promise]
    for name in [names] if isinstance(names, str) else names:
        file, _, test = name.partition("::")
        (path,) = Path(__file__).parents[1].rglob(file)
        text = path.read_text()
        assert re.search(rf"^def {test}\b", text, re.MULTILINE), name


def simple(self: Any, x: Tensor) -> Tensor:
    return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def normed(self: Any, x: Tensor) -> Tensor:
    return self.c(torch.tanh(self.norm(self.b(torch.tanh(self.a(x))))))


# Row 3


@pytest.mark.slow(1)
@pytest.mark.by_day(4)
@pytest.mark.parametrize("schedule", RUNNABLE)
def test_the_loss_is_the_mean_of_the_batch_however_it_is_cut(
    schedule: str, tmp_path: Path
) -> None:
    model = Net(simple)
    x, target = batch_of((X, X), 4)
    whole = float(mse(model(x), target).detach())
    for micro_batches in (2, 4):
        folder = tmp_path / str(micro_batches)
        part = x[: len(x) // micro_batches]
        options: Any = {"schedule": schedule, "chunks": 1}
        written(
            folder, model, (part,), target=part, micro_batches=micro_batches, **options
        )
        losses = on_ranks(folder, 2, lambda t: t.step(x, target))
        assert losses == [losses[0]] * 2
        assert losses[0] == pytest.approx(whole, rel=1e-6)


# Row 4


@pytest.mark.slow(1)
@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_every_checkpoint_has_the_running_statistics_of_one_process(
    schedule: str, tmp_path: Path
) -> None:
    model = Net(normed, norm=nn.BatchNorm1d(4), b2=nn.BatchNorm1d(4))
    written(tmp_path / "program", model, micro_batches=4, schedule=schedule)
    x, target = batch_of((X, X), 4)

    def work(trainer: Trainer) -> None:
        for step in range(2):
            trainer.step(x + step, target)
            folder = tmp_path / str(step)
            folder.mkdir(exist_ok=True)
            trainer.save(folder)

    on_ranks(tmp_path / "program", 2, work)
    batches = [((x + step,), target) for step in range(2)]
    for step in range(2):
        expected = reference_steps(model, mse, batches[: step + 1], 4, torch.float32)
        saved = weights_in(tmp_path / str(step))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            torch.testing.assert_close(
                saved[f"norm.{name}"], expected.state[f"norm.{name}"]
            )


# Row 5


@pytest.mark.slow
def test_training_learns(tmp_path: Path) -> None:
    torch.manual_seed(0)
    centres = torch.randn(10, 12) * 2
    labels = torch.arange(40) % 10
    x = centres[labels] + 0.1 * torch.randn(40, 12)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(),
                          nn.Linear(32, 10))  # fmt: skip
    inputs = (x[:10],)
    written(
        tmp_path, model, inputs, F.cross_entropy, labels[:10], ranks=3, micro_batches=4
    )

    def work(trainer: Trainer) -> list[float]:
        return [trainer.step(x, labels) for _ in range(20)]

    def factory(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=0.5)

    losses = on_ranks(tmp_path, 3, work, optimizer=factory)[0]
    assert losses[0] == pytest.approx(float(torch.tensor(10.0).log()), rel=0.3)
    assert losses[-1] < 0.2


# Rows 9 and 21


@pytest.mark.slow(1)
@pytest.mark.parametrize("name", ["resnet18", "unet"])
def test_compiling_leaves_the_model_and_the_random_numbers_as_they_are(
    name: str, tmp_path: Path
) -> None:
    case = MODELS[name]
    model = case.build()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    written(
        tmp_path, model, case.example_inputs, case.loss, case.example_target, ranks=3
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    files = (tmp_path / "weights").glob("*.safetensors")
    weights = {n: t for file in files for n, t in load_file(file).items()}
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key])
        assert torch.equal(weights[key], before[key])


# Rows 18 and 20


def skips(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    k = self.trunk[0](h)
    mid = self.trunk[1:5](k)
    end = self.both(mid, h)
    return self.d(self.trunk[5](torch.cat([end, k], 1)[:, 2:6])) * h


@pytest.mark.slow(1)
@pytest.mark.by_day(4)
@pytest.mark.parametrize("schedule", RUNNABLE)
def test_a_value_may_skip_stages_and_go_to_several_under_every_schedule(
    schedule: str, tmp_path: Path
) -> None:
    model = Net(skips, trunk=trunk(), both=nn.Bilinear(4, 4, 4))
    options: Any = {"schedule": schedule, "chunks": 1, "micro_batches": 4}
    if schedule == "interleaved":
        options |= {"chunks": 2, "ranks": 2}
    else:
        options["ranks"] = 4
    diff = against_one_process(tmp_path, model, **options)
    assert diff.worst <= EXACT
    plan = Plan.read(tmp_path / "plan.toml")
    values = [v for t in plan.transfers for v in t.values]
    assert any(t.edge.dest > t.edge.source + 1 for t in plan.transfers)
    assert len(values) > len(set(values))


# Row 19


@pytest.mark.slow(1)
@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_tied_parameters_stay_equal_and_the_checkpoint_holds_them_once(
    schedule: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = TiedEncoder()
    tokens = torch.randint(16, (8, 6))
    written(
        tmp_path / "program", model, (TOKENS,), cross_entropy, TOKENS,
        micro_batches=4, schedule=schedule,
    )  # fmt: skip

    def work(trainer: Trainer) -> Tensor:
        for _ in range(3):
            trainer.step(tokens, tokens)
        trainer.save(tmp_path)
        return trainer.state_dict()["embedding.weight"]

    first, second = on_ranks(tmp_path / "program", 2, work)
    assert torch.equal(first, second)
    assert not torch.equal(first, model.embedding.weight)
    model.load_state_dict(weights_in(tmp_path))
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, first)


def test_gradients_of_tied_parameters_are_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "dropout", lambda x, *args: x)
    model = TiedEncoder()
    written(tmp_path, model, (TOKENS,), cross_entropy, TOKENS, micro_batches=2)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(16, (4, 6), generator=generator)
    batches: Any = [((tokens,), tokens)]
    record = run_on_threads(tmp_path, 2, batches)
    expected = reference_steps(model, cross_entropy, batches, 2, torch.float64)
    assert compare(record, expected).worst <= EXACT


# Row 22


@pytest.mark.slow(4)
@pytest.mark.parametrize("schedule", RUNNABLE)
def test_what_the_plan_says_is_what_runs(schedule: str, tmp_path: Path) -> None:
    count = 4
    options: Any = {"schedule": schedule, "micro_batches": count, "chunks": 1}
    written(tmp_path, Net(simple), **options)
    x, target = batch_of((X, X), count)

    def work(trainer: Trainer) -> str:
        seen: list[str] = []
        worker: Any = trainer.worker

        def watch(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(run: Run, m: int, *args: Any) -> Any:
                mirrored = "'" if run.replica else ""
                seen.append(f"{run.stage}{mirrored}{kind}{m}")
                return function(run, m, *args)

            return call

        worker.run = watch("F", worker.run)
        worker.backward = watch("B", worker.backward)
        trainer.step(x, target)
        return " ".join(seen)

    plan = Plan.read(tmp_path / "plan.toml")
    ran = on_ranks(tmp_path, 2, work)
    planned = [
        " ".join(a for a in o.split() if "F" in a or "B" in a) for o in plan.order
    ]
    assert [plain(text) for text in ran] == [plain(text) for text in planned]
    assert all(len(text.split()) == 2 * count for text in ran)


def plain(text: str) -> list[tuple[str, ...]]:
    """Return (stage, kind, micro-batch) of each action, whatever marks a replica."""
    return [re.findall(r"\d+|[FB]", action)[-3:] for action in text.split()]  # type: ignore[misc]


# Row 24


@pytest.mark.slow(1)
@pytest.mark.by_day(12)
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", RUNNABLE)
def test_any_number_of_micro_batches_will_do(
    schedule: str, micro_batches: int, tmp_path: Path
) -> None:
    replicas = SCHEDULES[schedule].num_replicas
    model = Net(simple, trunk=trunk(3))
    options: Any = {"schedule": schedule, "chunks": 1}
    diff = against_one_process(
        tmp_path, model, ranks=3, micro_batches=replicas * micro_batches, **options
    )
    assert diff.worst <= EXACT


# Row 23


def test_evaluation_draws_nothing_and_moves_no_statistics(tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.c(self.drop(self.norm(self.b(torch.tanh(self.a(x))))))

    model = Net(forward, norm=nn.BatchNorm1d(4), drop=nn.Dropout(0.5))
    written(tmp_path, model, micro_batches=2)
    x, target = batch_of((X, X), 2)

    def work(trainer: Trainer) -> tuple[list[Any], bool]:
        trainer.step(x, target)
        before = {n: t.clone() for n, t in trainer.stages.tensors().items()}
        outputs = [trainer.evaluate(x, target).output for _ in range(2)]
        after = trainer.stages.tensors()
        return outputs, all(torch.equal(t, after[n]) for n, t in before.items())

    by_rank = on_ranks(tmp_path, 2, work)
    assert all(unchanged for _, unchanged in by_rank)
    first, second = by_rank[1][0]
    assert torch.equal(first, second)


@pytest.mark.nightly
def test_the_compiler_is_fast_and_linear_in_dense_skips() -> None:
    """Compile time grows with the layers, not with the pairs of layers."""

    def seconds(layers: int) -> float:
        start = time.process_time()
        compile(Dense(layers), (PICTURE,), loss=mse, check=False, ranks=4,
                example_target=torch.zeros(2, 8 + 2 * layers, 16, 16))  # fmt: skip
        return time.process_time() - start

    seconds(4)
    assert seconds(32) < 10
