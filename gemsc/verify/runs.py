"""Compare a whole run of N ranks with a plain PyTorch loop over the same data."""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemsc.base.boxes import Box
from gemsc.base.dtypes import as_real, default_dtype
from gemsc.base.nests import saved_named
from gemsc.base.plain_forward import plain_forward
from gemsc.base.visible import forgetting
from gemsc.errors import GemscError, say_note
from gemsc.launch.start import start
from gemsc.plan import Plan
from gemsc.runtime.process.device import exact_arithmetic, require_gpu
from gemsc.runtime.process.progress import ProgressBar
from gemsc.runtime.training.arguments import parse_arguments
from gemsc.runtime.training.datasets import shape_classes
from gemsc.runtime.training.verification import NEAR_ZERO, Figures, RunRecord
from gemsc.user_model import UserModel
from gemsc.verify.compare import (
    ALLOWED,
    NEGLIGIBLE,
    TOLERANCE,
    StepRecord,
    compare,
    most_allowed,
    nearer,
)
from gemsc.verify.plain_run import PlainRun, RunSettings, Samples
from gemsc.verify.precision import FULL, LowPrecision, Precision, WatchPrecision
from gemsc.verify.steps import (
    NUDGES,
    initial_model,
    nudged,
    threads_of_a_rank,
    user_model_of,
)
from gemsc.weights.read import read_tensors

CPU = torch.device("cpu")
# what the plain loop knows of, besides the number of steps
OPTIONS = ("--seed", "--workers", "--accumulate", "--clip-norm", "--last-batch")


@dataclass(frozen=True)
class RunComparison:
    """The worst relative errors of a run, each with where it is.

    `equal` counts the tensors of the saved model that are bit for bit equal, of
    `total`. `rounding` is how far the plain loop is from itself in float64, where
    that was measured. `errors` has each tensor of the saved model; `settled` are the
    parameters that were compared without the noise of their gradients: see `Noise`.
    `inside` is what the model itself computes in, where that is less.
    """

    loss: float
    evaluation: tuple[float, str]
    model: tuple[float, str]
    equal: int
    total: int
    num_evaluations: int
    rounding: float = 0.0
    errors: Mapping[str, float] = field(default_factory=dict)
    settled: frozenset[str] = frozenset()
    inside: LowPrecision | None = None

    @property
    def worst(self) -> float:
        """The worst of all."""
        return max(self.loss, self.evaluation[0], self.model[0])

    def judge(self, dtype: torch.dtype) -> str:
        """Return "exact", "wrong", or "undecided" where rounding hides it.

        In float64, what rounding does not explain is wrong, however much it moves.
        """
        allowed = max(TOLERANCE[dtype], ALLOWED[dtype] * self.rounding)
        limit = most_allowed(dtype, self.inside)
        if self.worst <= min(allowed, limit):
            return "exact"
        hides = self.worst <= allowed if dtype is torch.float64 else allowed > limit
        return "undecided" if hides else "wrong"

    def is_about(self, noise: Noise, dtype: torch.dtype) -> bool:
        """Whether nothing but noisy parameters, buffers and evaluations is off."""
        others = [e for name, e in self.errors.items() if name in noise.others]
        worst = max((self.errors[name] for name in noise.names), default=0.0)
        return max([self.loss, *others]) <= TOLERANCE[dtype] < worst

    def settled_by(self, again: RunComparison, noise: Noise) -> RunComparison:
        """Return what this says of all but noise, and another one, without, of it.

        That says it of noisy parameters, of buffers and of evaluations.
        """
        errors = {
            name: max(error, self.errors[name]) if name in noise.others else error
            for name, error in again.errors.items()
        }
        return replace(
            again,
            loss=max(self.loss, again.loss),
            model=_worst(errors),
            errors=errors,
            settled=frozenset(n for n in noise.names if errors[n] < self.errors[n]),
        )


@dataclass(frozen=True)
class Noise:
    """The parameters with gradients that were zero but for rounding, and the others.

    An optimizer that divides by the size of a gradient, as Adam does, makes of such
    noise a step of any size up to its learning rate. `near_zero` is how large it is.
    """

    names: frozenset[str]
    others: frozenset[str]
    near_zero: float

    @classmethod
    def of(cls, plain: PlainRun, dtype: torch.dtype) -> Noise:
        """Return that of a plain loop."""
        limit = TOLERANCE[dtype] * NEGLIGIBLE * plain.largest
        names = frozenset(n for n, size in plain.smallest.items() if size <= limit)
        known = {name for name, _ in plain.model.named_parameters()}
        return cls(names, frozenset(known - names), limit)


def _worst(errors: Mapping[str, float]) -> tuple[float, str]:
    return max(((e, name) for name, e in errors.items() if e), default=(0.0, ""))


def verify_run(
    directory: Path,
    *,
    dtype: torch.dtype,
    num_steps: int,
    arguments: Sequence[str] = (),
    device: torch.device = CPU,
) -> RunComparison:
    """Train with `gemsc run` and in a plain loop in this process; compare the two.

    `arguments` are those of `gemsc run`. Both make the same random draws and compute on
    the same kind of `device`: see `exact_arithmetic`.

    Raises:
        GemscError: the program cannot run, the two have seen different data, or a GPU
            is wanted where there is none.
    """
    if device.type == "cuda":
        require_gpu()
    with exact_arithmetic(device):
        return _verify(directory, dtype, num_steps, arguments, device)


def _verify(
    directory: Path,
    dtype: torch.dtype,
    num_steps: int,
    arguments: Sequence[str],
    device: torch.device,
) -> RunComparison:
    for word in arguments:
        if word.startswith("--") and word.split("=")[0] not in OPTIONS:
            raise GemscError(
                f"{word} cannot be verified",
                help=f"with --run, verify takes {', '.join(OPTIONS)}",
            )
    options = parse_arguments(arguments)
    plan = Plan.read(directory / "plan.toml")
    user = user_model_of(directory, plan)
    for hook in ("on_step", "on_epoch"):
        if getattr(user, hook) is not None:
            say_note(f"{hook}() is not called here, as a plain loop has no trainer")
    words = [*arguments, "--device", device.type]
    settings = RunSettings(
        steps=num_steps,
        dtype=dtype,
        micro_batch_size=plan.micro_batch_size,
        micro_batches=plan.micro_batches,
        replicas=plan.data,
        seed=options.seed or 0,
        accumulate=options.accumulate,
        clip_norm=options.clip_norm,
        precision=Precision.of(plan, dtype),
        memory_format=plan.memory_format,
        trains_rest=options.last_batch == "train",
        device=device,
        shapes=shape_classes(plan, user, "dataset"),
        sample_dims=plan.sample_dims,
    )

    def trained(
        settings: RunSettings,
    ) -> tuple[list[RunResult], PlainRun, RunRecord]:
        record, saved = _run(directory, settings, words)
        with threads_of_a_rank(plan):
            model = initial_model(user, directory)
            plain = _plain(user, model, settings, record)
        mine = RunResult.of_run(record, saved)
        return [mine, RunResult.of_plain(plain, record)], plain, record

    first, plain, record = trained(settings)
    outcome, noise = compare_runs(*first), Noise.of(plain, dtype)
    if outcome.is_about(noise, dtype):
        settings = replace(settings, near_zero=noise.near_zero)
        quiet, plain, record = trained(settings)
        models = nearer(*((a.model, b.model) for a, b in (first, quiet)))
        pairs = zip(quiet, models, strict=True)
        again = compare_runs(*(replace(run, model=model) for run, model in pairs))
        outcome = outcome.settled_by(again, noise)
    if outcome.judge(dtype) == "wrong":
        inside = _inside(user, directory, settings)
        bit = inside.last_bit if inside is not None else 0.0
        outcome = replace(outcome, inside=inside, rounding=bit)
    # each trains as it is asked for
    others = _other_runs(user, directory, settings, outcome.inside)
    while outcome.judge(dtype) == "wrong" and (other := next(others, None)) is not None:
        both = (RunResult.of_plain(run, record) for run in (plain, other))
        rounding = max(outcome.rounding, compare_runs(*both).worst)
        outcome = replace(outcome, rounding=rounding)
    return outcome


def _inside(
    user: UserModel, directory: Path, settings: RunSettings
) -> LowPrecision | None:
    """Return what a step computes in inside, if that is less than its dtype."""
    watch = WatchPrecision(settings.dtype)
    if settings.precision.dtype is None:
        with suppress(NotImplementedError), watch:
            _plain(user, initial_model(user, directory), replace(settings, steps=1))
    return watch.lowest


def _other_runs(
    user: UserModel,
    directory: Path,
    settings: RunSettings,
    inside: LowPrecision | None,
) -> Iterator[PlainRun]:
    """Yield what the plain loop does where it rounds otherwise."""
    if settings.dtype is not torch.float64:
        wide = replace(settings, dtype=torch.float64, precision=FULL)
        with suppress(RuntimeError):  # of a model that does not run in float64
            yield _plain(user, initial_model(user, directory), wide)
    lower = settings.precision.dtype if inside is None else inside.dtype
    model = initial_model(user, directory)
    kind = settings.precision.casts_to(settings.dtype)
    for number in range(NUDGES):
        yield _plain(user, nudged(model, number, kind, lower), settings)


def _run(
    directory: Path, settings: RunSettings, arguments: Sequence[str]
) -> tuple[RunRecord, dict[str, Tensor]]:
    """Let `gemsc run` train and save; return its record and the saved model."""
    with tempfile.TemporaryDirectory(prefix="gemsc-verify-") as name:
        checkpoint = Path(name, "checkpoint")
        if settings.near_zero:
            Path(name, NEAR_ZERO).write_text(repr(settings.near_zero))
        words = {
            "--steps": settings.steps,
            "--dtype": str(settings.dtype).removeprefix("torch."),
            "--save": checkpoint,
            "--record-run": name,
        }
        given = [str(word) for pair in words.items() for word in pair]
        code = start(directory, [*arguments, *given])
        if code != 0:
            raise GemscError(
                f"the run ended with exit code {code} in {settings.dtype}",
                help="see the report above",
            )
        saved = read_tensors(checkpoint / "model.safetensors")
        return RunRecord.read(Path(name)), saved


def _plain(
    user: UserModel,
    model: nn.Module,
    settings: RunSettings,
    record: RunRecord | None = None,
) -> PlainRun:
    """Train in a plain loop; with a record, make sure that it has the same data."""
    with default_dtype(settings.precision.casts_to(settings.dtype)):
        title = f"plain loop in {str(settings.dtype).removeprefix('torch.')}"
        with plain_forward(), forgetting(model, user.loss, user.phases):
            plain = PlainRun(user, model, settings)
            with closing(ProgressBar(settings.steps, title)) as bar:
                plain.train(bar.step)
        if record is not None:
            check_data(plain, record)
    return plain


def check_data(plain: PlainRun, record: RunRecord) -> None:
    """Make sure that the ranks have read what the plain loop has read."""
    pairs = zip(plain.epochs, record.samples, strict=True)
    for step, (epoch, digests) in enumerate(pairs):
        _check_samples("dataset", plain.samples, epoch, digests, plain.user)
        if {index for index, _ in digests} != set(plain.rows[step]):
            raise GemscError(
                f"in step {step + 1}, the ranks and the plain loop read different "
                "samples",
                at=plain.user.line_of("dataset"),
                help="use a dataset whose length does not change",
            )
    for digests in record.eval_samples:
        _check_samples("eval_dataset", plain.eval_samples, 0, digests, plain.user)


def _check_samples(
    name: str,
    samples: Samples,
    epoch: int,
    digests: Mapping[tuple[int, Box | None], str],
    user: UserModel,
) -> None:
    for (index, box), digest in digests.items():
        if digest != samples.digest_of(epoch, index, box):
            raise GemscError(
                f"{name} returns different data to the ranks and the plain loop: "
                f"sample {index}, in epoch {epoch + 1}",
                at=user.line_of(name),
                help="let a sample depend only on its index and on the random "
                "generators of torch, numpy and Python",
            )


@dataclass(frozen=True)
class RunResult:
    """What is compared of a run."""

    losses: list[float]
    figures: list[dict[str, float]]
    model: dict[str, Tensor]

    @classmethod
    def of_run(cls, record: RunRecord, saved: dict[str, Tensor]) -> RunResult:
        """Return that of a run on ranks."""
        means = [{n: mean for n, (mean, _) in f.items()} for f in record.figures]
        return cls(record.losses, means, saved)

    @classmethod
    def of_plain(cls, plain: PlainRun, record: RunRecord) -> RunResult:
        """Return that of the plain loop, for what the ranks have noted."""
        pairs = zip(plain.evaluations, record.figures, strict=True)
        means = [_means(parts, figures) for parts, figures in pairs]
        saved = {n: t.detach() for n, t in saved_named(plain.model).items()}
        return cls(plain.losses, means, saved)


def _means(
    parts: Sequence[tuple[float, Mapping[str, float]]], wanted: Figures
) -> dict[str, float]:
    """Return the means over the samples that the run had to take for each figure.

    A figure for which it took others is no number.
    """
    number: dict[str, float] = defaultdict(float)
    number |= {name: count for name, (_, count) in wanted.items()}
    names = {name for _, figures in parts for name in figures}
    sums = {name: 0.0 for name in names}
    counts = {name: 0.0 for name in names}
    for count, figures in parts:
        for name, value in figures.items():
            sums[name] += value * count
            counts[name] += count
    return {
        name: sums[name] / count if _is_all(count, number[name]) else math.nan
        for name, count in counts.items()
        if count
    }


def _is_all(count: float, wanted: float) -> bool:
    """Whether so many samples are those wanted; terms of a loss may be fractions."""
    return abs(count - wanted) < 0.5 and math.isclose(count, wanted, rel_tol=1e-5)


def compare_runs(actual: RunResult, expected: RunResult) -> RunComparison:
    """Return the worst errors of losses, figures and the saved model."""
    mine, theirs = (
        StepRecord(result.losses, {}, {n: as_real(t) for n, t in result.model.items()})
        for result in (actual, expected)
    )
    steps = compare(mine, theirs)
    worst = (0.0, "")
    for number, pair in enumerate(zip(actual.figures, expected.figures, strict=True)):
        for name in {*pair[0], *pair[1]}:
            error = _relative(pair[0].get(name), pair[1].get(name))
            if error > worst[0]:
                worst = (error, f"{name} of evaluation {number + 1}")
    # without gradients, all that a model has is a buffer
    errors = {name: steps.errors[f"buffer {name}"] for name in expected.model}
    errors |= dict.fromkeys(set(actual.model) - set(expected.model), math.inf)
    return RunComparison(
        steps.loss,
        worst,
        _worst(errors),
        steps.equal,
        steps.total,
        len(actual.figures),
        errors=errors,
    )


def _relative(mine: Any, theirs: Any) -> float:
    if mine is None or theirs is None:
        return float("inf")
    difference = abs(mine - theirs)
    if mine == theirs or (mine != mine and theirs != theirs):
        return 0.0
    error = float(difference / max(abs(theirs), 1e-12))
    return error if error == error else float("inf")
