"""What was written is run before it is called right."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Gemsc
from torch import Tensor, nn

import gemsc.compiler
from gemsc.base.nests import Mean
from gemsc.base.plain_forward import with_threads
from gemsc.codegen.package import rank_modules
from gemsc.compilation import Compilation
from gemsc.compiler import CompiledProgram, Traced, compile, lower, trace
from gemsc.errors import GemscError, InternalError
from gemsc.launch.start import not_compared
from gemsc.lowering import tracing
from gemsc.options import CompileOptions
from gemsc.plan import WITHOUT_KERNELS, Plan
from gemsc.runtime.transport.local import LocalGroup
from gemsc.runtime.transport.transport import Request
from gemsc.runtime.worker.deferral import Deferred
from gemsc.verify import first_step, step_size
from gemsc.verify.compare import Comparison, compare, read_record
from gemsc.weights.write import write_tensors


class Picture(nn.Module):
    """Has all that a mutant can get wrong."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.a = nn.Conv2d(3, 4, 3, padding=1)
            self.norm = nn.BatchNorm2d(4)
            self.pos = nn.Parameter(torch.randn(1, 4, 8, 6))
            self.b = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x)).relu()
        if not self.training:
            x = x * 0.5
        x = x + self.pos.tanh()
        return self.b(x)


def squares(output: Tensor) -> Tensor:
    return output.square().mean()


X = torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(1))
TILES = {"ranks": 2, "tiles": "2x1"}
STAGES = {"ranks": 2}
OTHER_SIZES = "an all-reduce of different tensors"


def compiled(model: nn.Module | None = None, **options: Any) -> CompiledProgram:
    options = {"micro_batches": 2, **options}
    return compile(model or Picture(), (X,), loss=squares, **options)


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let rank files say something else after the proof has read them."""

    def change(old: str, new: str, rank: int) -> None:
        def modules(compilation: Compilation) -> dict[str, str]:
            files = rank_modules(compilation)
            name = f"rank{rank}.py"
            assert old in files[name], files[name]
            return {**files, name: files[name].replace(old, new)}

        monkeypatch.setattr(gemsc.compiler, "rank_modules", modules)

    return change


@pytest.mark.slow(1)
@pytest.mark.parametrize("options", [TILES, STAGES, {**STAGES, "ranks": 4, "data": 2}])
def test_a_right_program_is_not_refused(options: dict[str, Any]) -> None:
    assert compiled(**options).plan.unchecked == ""


def test_a_step_is_compared_without_the_kernels_of_torch_compile(
    changed: Callable[..., None],
) -> None:
    options = {**STAGES, "torch_compile": True}
    assert compiled(**options).plan.unchecked == WITHOUT_KERNELS
    told = not_compared(compiled(**options).plan, Path("x"))
    assert told.startswith("the step of x that was compared with the model ran without")
    changed("x * 0.5", "x * 0.25", rank_with("x * 0.5", STAGES))
    with pytest.raises(InternalError, match="wrong program"):
        compiled(**options)


class Turned(Picture):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).movedim(0, -1)


def test_samples_that_do_not_come_first_are_joined_alike() -> None:
    options = {**STAGES, "ranks": 4, "data": 2, "micro_batches": 2}
    plan = compiled(Turned(), **options).plan
    assert plan.unchecked == ""
    assert plan.sample_dims == [3]


@dataclass
class Result:
    picture: Tensor
    name: str = "result"


class GivesResult(Picture):
    def forward(self, x: Tensor) -> Result:
        return Result(super().forward(x))


@pytest.mark.slow
def test_what_a_dataclass_holds_is_compared_too(changed: Callable[..., None]) -> None:
    def loss(result: Result) -> Tensor:
        return squares(result.picture)

    given = GivesResult(), (X,)
    options = {**STAGES, "micro_batches": 2}
    assert not compile(*given, loss=loss, **options).plan.unchecked
    changed("x * 0.5", "x * 0.25", rank_with("x * 0.5", STAGES))
    with pytest.raises(
        InternalError, match=r"wrong program: evaluation's output picture is off"
    ):
        compile(*given, loss=loss, **options)


def test_metrics_are_tried_on_a_batch_as_in_an_evaluation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = []

    def metrics(result: Any, target: Tensor) -> dict[str, Tensor]:
        seen.append((result.picture, target, torch.rand(1)))
        return {"near": (result.picture - target).abs().mean()}

    def wrong(result: Any, target: Tensor) -> dict[str, Any]:
        return {"area": result.area}

    def loss(result: Result, target: Tensor) -> Tensor:
        return squares(result.picture - target)

    given = {"loss": loss, "example_target": torch.zeros(2, 2, 8, 6)}
    options = {**STAGES, "ranks": 4, "data": 2, "micro_batches": 2}
    before = torch.get_rng_state()
    compile(GivesResult(), (X,), **given, **options, metrics=metrics)
    assert torch.equal(torch.get_rng_state(), before)
    assert "warning" not in capsys.readouterr().err
    picture, target, _ = seen[0]
    assert picture.shape == target.shape == (8, 2, 8, 6)
    assert picture.dtype == target.dtype == torch.float32
    compile(GivesResult(), (X,), **given, **STAGES, metrics=wrong)
    error = capsys.readouterr().err
    line = wrong.__code__.co_firstlineno + 1
    assert f"test_first_step.py:{line}: warning: tried on the examples, metr" in error
    assert "the output has no 'area', but picture, name: evaluations would" in error
    without = {"loss": lambda result: squares(result.picture)}
    compile(GivesResult(), (X,), **without, **STAGES, metrics=wrong)
    assert capsys.readouterr().err == ""


class WithLoss(Picture):
    """Returns its loss as well."""

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return {"picture": x, "loss": squares(x)}


def test_metrics_of_whole_micro_batches_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def loss(result: Any, target: Tensor) -> Tensor:
        return squares(result["picture"] - target)

    given = {"loss": loss, "example_target": torch.zeros(2, 2, 8, 6)}
    options = {**STAGES, "micro_batches": 2}
    for key, says in (
        ("loss", "eval_dataset must be a multiple of 4"),
        ("picture", ""),
    ):
        metrics = {"mean": lambda result, target, key=key: result[key].mean()}
        compile(WithLoss(), (X,), **given, **options, metrics=metrics)
        error = capsys.readouterr().err
        assert says in error if says else not error


class CountsInOutput(Picture):
    """Has a buffer that is called as what evaluation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("output", torch.zeros(2, 2, 8, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.training:
            self.output.add_(x.detach() * 3)
        return x


@pytest.mark.slow
def test_a_buffer_that_is_called_output_is_compared_too(
    changed: Callable[..., None],
) -> None:
    given = CountsInOutput(), (X,)
    options = {**STAGES, "micro_batches": 2}
    assert not compile(*given, loss=squares, **options).plan.unchecked
    changed("detach() * 3", "detach() * 4", 1)
    with pytest.raises(InternalError, match="wrong program: buffer output is off"):
        compile(*given, loss=squares, **options)


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("options", "old", "new", "wrong"),
    [
        (STAGES, ".relu()", ".abs()", "gradient|loss"),
        (STAGES, 'worker.input("x", m)', 'worker.input("x", 0)', "gradient|loss"),
        (STAGES, "self.pos.tanh()", "self.pos.detach().tanh()", "'pos'|of pos"),
        (STAGES, "x * 0.5", "x * 0.25", "output"),
        (TILES, "square().mean() * 0.5", "square().mean() * 0.25", "loss|gradient"),
        (TILES, "x = x + tanh", "x = x + x.relu()", "gradient|output|loss"),
        (TILES, "x * 0.5", "x * 0.25", "output"),
    ],
)
def test_a_wrong_program_is_refused(
    options: dict[str, Any],
    old: str,
    new: str,
    wrong: str,
    changed: Callable[..., None],
) -> None:
    changed(old, new, rank_with(old, options))
    with pytest.raises(
        InternalError, match=f"wrong program: .*({wrong})|{OTHER_SIZES}"
    ):
        compiled(**options)
    assert compiled(**options, check=False).plan.unchecked == "--no-check"


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.b(self.a(one - 2 * other).relu())


def test_inputs_whose_examples_are_equal_do_not_stand_for_each_other(
    changed: Callable[..., None],
) -> None:
    changed('worker.input("other", m)', 'worker.input("one", m)', 0)
    with pytest.raises(InternalError, match="wrong program"):
        compile(Pair(), (X, X.clone()), loss=squares, micro_batches=2, **STAGES)


@pytest.mark.slow
def test_what_replicas_add_up_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    start = LocalGroup.all_reduce

    def changed(self: LocalGroup, tensor: Tensor) -> Request:
        is_first = self._transport.rank not in self.ranks[1:]
        tensor.view(-1)[1:].mul_(is_first)  # not how many ranks train
        return start(self, tensor)

    monkeypatch.setattr(LocalGroup, "all_reduce", changed)
    with pytest.raises(InternalError, match=r"wrong program: (loss|gradient)"):
        compiled(ranks=2, data=2)


@functools.cache
def picture() -> Traced:
    return trace(Picture(), (X,), loss=squares, check=False)


def rank_with(text: str, options: dict[str, Any]) -> int:
    given = CompileOptions(micro_batches=2, **options)
    files = lower(picture(), given).rank_modules()
    return next(rank for rank in range(2) if text in files[f"rank{rank}.py"])


def test_a_program_that_does_not_run_is_refused(changed: Callable[..., None]) -> None:
    changed("def train_step", "raise KeyError('x')\n\n\ndef train_step", 1)
    with pytest.raises(InternalError, match="rank 1 fails with KeyError"):
        compiled(**STAGES)


def test_the_wrong_parameter_is_named_with_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Deferred, "compute", lambda self: self._waiting.clear())
    with pytest.raises(InternalError, match=r"test_first_step.py:\d+: wrong .*of b\."):
        compiled(**STAGES)


def write_record(
    folder: Path, rank: int, state: dict[str, Tensor], **held: Any
) -> None:
    write_tensors(folder / f"gradients{rank}.safetensors", {"w": torch.ones(2)})
    write_tensors(folder / f"state{rank}.safetensors", state)
    held = {"parts": {}, "alone": [], "grid": [rank], **held}
    texts = {"losses": [0.5], "memory": [0, 0], "held": held}
    for name, said in texts.items():
        (folder / f"{name}{rank}.json").write_text(json.dumps(said))


def test_replicas_that_drift_apart_are_told(tmp_path: Path) -> None:
    for rank in range(3):
        weight = torch.ones(2, dtype=torch.float64) + (rank == 2) * 2**-52
        write_record(tmp_path, rank, {"w": weight, "count": torch.tensor(rank)})
    assert read_record(tmp_path, 3).unequal == {"w"}
    assert read_record(tmp_path, 2).unequal == set()


def test_what_all_ranks_of_a_grid_hold_has_the_same_bits(tmp_path: Path) -> None:
    first = {name: torch.zeros(2) for name in ("w", "sign", "dtype", "there", "alone")}
    other = {**first, "sign": -first["sign"], "dtype": first["dtype"].double()}
    del other["there"]
    for rank, state in enumerate((first, {**other, "alone": torch.ones(2)})):
        write_record(tmp_path, rank, state, grid=[0, 1], alone=["alone"] * rank)
    record = read_record(tmp_path, 2)
    assert record.unequal == {"sign", "dtype", "there"}
    diff = compare(record, replace(record, unequal=frozenset()))
    assert diff.judge(torch.float64)[0] == "wrong"
    assert {n for n, e in diff.errors.items() if e} == {
        f"copies of {name}" for name in record.unequal
    }


@pytest.mark.parametrize("numbers", [torch.arange(24.0) + 2, torch.arange(24)])
def test_each_micro_batch_of_a_check_is_another(numbers: Tensor) -> None:
    plan: Any = SimpleNamespace(data=1, micro_batches=2)
    given = numbers.reshape(2, 12).repeat(2, 1)  # as examples are repeated
    (batch,), _ = first_step.different(((given,), None), plan)
    assert not torch.equal(*batch.chunk(2))
    assert batch.is_floating_point() or {*batch.flatten().tolist()} <= {*range(24)}


class Scale(nn.Module):
    """A loss with a tensor that a step may change."""

    def __init__(self, learns: bool) -> None:
        super().__init__()
        if learns:
            self.scale = nn.Parameter(torch.ones(()))
        else:
            self.register_buffer("seen", torch.zeros(()))


@pytest.mark.parametrize(
    ("loss", "values", "wanted"),
    [
        (squares, (0.5, 0.5), 0.5),
        (squares, (0.5, 0.6), None),  # it draws
        (squares, (np.inf, np.inf), None),
        (Scale(learns=True), (0.5, 0.5), None),
        (Scale(learns=False), (0.5, 0.5), None),
    ],
)
def test_a_loss_is_compared_in_evaluation_where_two_calls_agree(
    loss: Any,
    values: tuple[float, float],
    wanted: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan: Any = SimpleNamespace(only_dtype="", precision="float32")
    step = first_step._Step(plan, Picture(), loss, [], torch.float64)
    given = iter(values)

    def held_out(*given_: Any) -> Mean:
        mean = Mean()
        mean.add(torch.tensor(next(given), dtype=torch.float64))
        return mean

    monkeypatch.setattr(first_step, "held_out", held_out)
    mean = step._held_out([], (None, None))
    assert (mean and mean.value) == wanted


def test_a_model_without_weights_is_left_out() -> None:
    with torch.device("meta"):
        model = Picture()
    plan: Any = SimpleNamespace()
    assert step_size.too_much(plan, model) == "the model has no weights here"


@pytest.mark.slow
def test_nothing_of_the_process_changes() -> None:
    model = Picture()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    compiled(model, **TILES)
    draws = torch.rand(()), random.random(), np.random.rand()
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    assert draws == (torch.rand(()), random.random(), np.random.rand())
    assert torch.get_default_dtype() is torch.float32
    assert model.training


@pytest.mark.slow
def test_each_rank_has_one_thread_and_so_has_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = set()

    class Watched(Picture):
        def forward(self, x: Tensor) -> Tensor:
            seen.add(torch.get_num_threads())
            return super().forward(x)

    with with_threads(2):
        compiled(Watched(), **TILES)
        assert torch.get_num_threads() == 2
    assert seen == {1}
    monkeypatch.setattr(tracing, "SHARED_FLOPS", 0.0)  # of what is traced, in much work
    with with_threads(2):
        compiled(Watched(), check=True)
    assert seen == {1, 2}
    with with_threads(1), ThreadPoolExecutor(1) as pool:  # as the ranks' are started
        assert pool.submit(torch.get_num_threads).result() == 1


@pytest.mark.slow
def test_what_is_too_large_is_left_out_with_the_reason() -> None:
    plan = compiled(**STAGES).plan
    assert step_size.too_much(plan, Picture()) == ""
    with torch.device("meta"):
        assert "no weights" in step_size.too_much(plan, Picture())
    stages = [replace(stage, flops=10**13) for stage in plan.stages]
    assert " s" in step_size.too_much(replace(plan, stages=stages), Picture())
    huge = replace(plan, activation_bytes=[10**15])
    assert "GiB of memory" in step_size.too_much(huge, Picture())
    many = replace(plan, data=1000, ranks=2000)
    assert step_size.too_much(many, Picture()) == ""
    local = compiled(**TILES, local_batchnorm=True).plan
    assert "--local-batchnorm" in local.unchecked


def test_a_model_that_runs_in_float32_only_is_left_out_or_run_in_it() -> None:
    class Single(Picture):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.eye(6, dtype=torch.float32)[0]

    assert compiled(Single(), **STAGES).plan.unchecked == ""


@pytest.mark.slow
def test_what_is_computed_in_float32_inside_is_judged_by_float32(
    changed: Callable[..., None],
) -> None:
    class Norm(Picture):
        def forward(self, x: Tensor) -> Tensor:
            wide = super().forward(x).float()
            return (wide * wide.square().mean((2, 3), keepdim=True).rsqrt()).to(x.dtype)

    assert compiled(Norm(), **TILES).plan.unchecked == ""
    changed("square().mean() * 0.5", "square().mean() * 0.50001", 0)
    with pytest.raises(InternalError, match=r"wrong program: (loss|gradient)"):
        compiled(Norm(), **TILES)


@pytest.mark.parametrize("seed", range(2))
def test_sums_of_a_loss_in_float32_may_be_in_another_order(seed: int) -> None:
    """Of a target that is none of the weights, which other roundings change."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        target = target.float()
        return (output * target).sum() / (target * target).sum()

    torch.manual_seed(seed)
    layer, given = nn.Conv2d(1, 1, 3, padding=1), torch.randn(1, 1, 128, 128)
    options = {"ranks": 2, "tiles": "2x1", "micro_batches": 1}
    program = compile(
        layer, (given,), loss=loss, example_target=torch.rand(1, 1, 128, 128), **options
    )
    assert program.plan.unchecked == ""


def test_what_rounding_alone_changes_too_much_is_not_called_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Comparison, "judge", lambda self, dtype: ("undecided", "loss"))
    compare = first_step.compare
    monkeypatch.setattr(
        first_step, "compare", lambda *both: compare(*both).with_rounding({"loss": 0.5})
    )
    plan = compiled(**STAGES).plan
    assert plan.unchecked == "rounding alone changes loss by 5e-01"


@pytest.mark.slow
@pytest.mark.mpi
def test_run_says_so_until_verify_has_found_it_exact(
    command: Gemsc, tmp_path: Path
) -> None:
    words = ["compile", "model.py", "--ranks", "2", "-o", "build/x"]
    told = "no step of build/x was compared with the model (--no-check): gemsc verify"
    assert "no step" not in command(*words).err
    assert told in command(*words, "--no-check").err
    assert Plan.read(tmp_path / "build/x/plan.toml").unchecked == "--no-check"
    run = ["run", "build/x", "--hosts", "?"]  # which is refused before it starts
    assert told in command(*run).err
    assert command("verify", "build/x", "--dtype", "float64", "--steps", "1").code == 0
    assert "no step" not in command(*run).err


class Counting(nn.Module):
    """It counts what it is given, also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[1]
        return self.second(self.first(x).relu() + self.seen)


class Gated(Picture):
    """Asks for the mode of autograd, which is another one while it is traced."""

    def __init__(self, asks: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.asks(y) else y * 2


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "asks", [lambda y: torch.is_grad_enabled(), lambda y: y.requires_grad]
)
def test_a_forward_that_asks_for_the_mode_of_autograd(
    asks: Callable[[Tensor], bool],
) -> None:
    with pytest.raises(GemscError, match=r"in evaluation, .* with gradients enabled"):
        compiled(Gated(asks), **STAGES)


def test_what_evaluation_changes_is_there_for_the_next_shape() -> None:
    inputs = [(torch.randn(2, length, 4),) for length in (3, 5)]
    program = gemsc.compile(
        Counting(), inputs, loss=lambda y: y.square().mean(), ranks=1
    )
    assert program.plan.unchecked == ""


class Halved(nn.Module):
    """Takes float32 out of autocast, whatever its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.first(x).relu()
        last: Tensor = self.last(h.float())
        return last


def test_a_model_that_runs_in_bfloat16_alone_is_not_compared() -> None:
    class Narrow(Halved):
        def forward(self, x: Tensor) -> Tensor:
            last: Tensor = self.last(self.first(x).to(torch.bfloat16))
            return last

    example = torch.randn(2, 8).bfloat16()
    program = compile(Narrow().bfloat16(), (example,), loss=squares, ranks=2)
    assert "does not run in torch.float64" in program.plan.unchecked
    assert program.plan.only_dtype == ""


def test_a_model_that_fails_in_float64_is_compared_in_its_own_dtype() -> None:
    program = compile(Halved(), (torch.randn(2, 8),), loss=squares, ranks=2)
    assert program.plan.unchecked == ""
    assert "does not run in torch.float64: mat1 and mat2" in program.plan.only_dtype


def test_a_model_of_which_nothing_is_trained_is_compared() -> None:
    model = Picture().requires_grad_(False)
    assert compiled(model, **STAGES).plan.unchecked == ""


@pytest.mark.parametrize(("moved", "is_open"), [(0.05, True), (0.005, False)])
def test_float32_alone_decides_nothing_where_rounding_turns_a_relu(
    monkeypatch: pytest.MonkeyPatch, moved: float, is_open: bool
) -> None:
    """It then moves some gradient much, and by other roundings another one."""
    compare = first_step.compare

    def off(*records: Any, **how: Any) -> Comparison:
        diff = compare(*records, **how)
        is_nudged = "last_bit" in how
        first, last = (moved, 0.001) if is_nudged else (1e-6, 0.006)
        off_by = {"gradient of first.bias": first, "gradient of last.bias": last}
        return replace(diff, errors={**diff.errors, **off_by})

    class Wide(Halved):
        def forward(self, x: Tensor) -> Tensor:
            last: Tensor = self.last(self.first(x).relu().float())
            return last

    monkeypatch.setattr(first_step, "compare", off)
    if not is_open:
        with pytest.raises(InternalError, match=r"gradient of last\.bias is off"):
            compile(Wide(), (torch.randn(2, 8),), loss=squares, ranks=2)
        return
    plan = compile(Wide(), (torch.randn(2, 8),), loss=squares, ranks=2).plan
    assert plan.only_dtype
    assert plan.unchecked == "rounding alone changes gradient of first.bias by 5e-02"


class Sampling(Picture):
    """It draws in evaluation, too, as a variational autoencoder does."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return (y if self.training else y * 0.75) + torch.randn_like(y)


@pytest.mark.slow(1)
@pytest.mark.parametrize("options", [TILES, STAGES])
def test_a_model_that_draws_in_evaluation_is_compared_there(
    options: dict[str, Any], changed: Callable[..., None]
) -> None:
    assert compiled(Sampling(), **options).plan.unchecked == ""
    changed(" * 0.75", " * 0.75001", options["ranks"] - 1)
    with pytest.raises(InternalError, match="wrong program: evaluation's output"):
        compiled(Sampling(), **options)


def test_where_float64_takes_too_much_memory_its_own_dtype_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dtypes(dtype: torch.dtype, free: int) -> tuple[list[torch.dtype], str]:
        compared.clear()
        monkeypatch.setattr(step_size, "free_memory", lambda: free)
        plan = compile(model.to(dtype), (x.to(dtype),), **options).plan
        return compared, plan.unchecked

    def noting(compilation: Compilation, step: Any) -> str:
        compared.append(step.dtype)
        return compare(compilation, step)

    compared, compare = list[torch.dtype](), first_step._one_compared
    monkeypatch.setattr(first_step, "_one_compared", noting)
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.randn(4, 8)
    options: dict[str, Any] = {"loss": squares, "ranks": 2, "micro_batches": 2}
    plan = compile(model, (x,), **options, check=False).plan
    copies, weights = 3 + 5, 4 * (8 * 8 + 8)  # of the ranks, of the model
    kept = step_size.BESIDE * sum(plan.activation_bytes)
    need = 4 * copies * weights + kept  # in float32
    assert dtypes(torch.float32, 4 * need) == ([torch.float64], "")
    assert dtypes(torch.float32, 4 * need - 1) == ([torch.float32], "")
    assert dtypes(torch.float32, 2 * need) == ([torch.float32], "")
    much = "that would take about 0 GiB of memory"
    assert dtypes(torch.float32, 2 * 4 * copies * weights) == ([], much)
    assert dtypes(torch.bfloat16, 2 * need) == ([], much)


def test_operators_are_looked_up_before_a_thread_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model runs in one of its own, beside the ranks."""
    seen: list[str] = []

    def pool(count: int) -> ThreadPoolExecutor:
        seen.append("a thread")
        return ThreadPoolExecutor(count)

    monkeypatch.setattr(first_step, "look_up_operators", lambda: seen.append("found"))
    monkeypatch.setattr(first_step, "ThreadPoolExecutor", pool)
    compiled(**STAGES)
    assert seen == ["found", "a thread"]
