"""One step of the ranks' files and of the model over a finite field, compared."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gemsc.base.dtypes import default_dtype
from gemsc.base.files import ELSEWHERE
from gemsc.base.nests import all_named
from gemsc.base.rng import preserve_rng, same_draws
from gemsc.base.visible import forgetting
from gemsc.errors import GemscError
from gemsc.plan import Plan, rank_file
from gemsc.runtime.data.batches import repeated
from gemsc.runtime.tiles.norms import nothing_rounds
from gemsc.runtime.tiles.windows import taps
from gemsc.runtime.training.program_directory import check_program
from gemsc.runtime.training.step_report import Evaluation
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.training.verification import recorded
from gemsc.runtime.transport.transport import Transport
from gemsc.verify.compare import StepRecord, read_record
from gemsc.verify.field.compared import AllInputs, _compared, _Evaluated
from gemsc.verify.field.degree import Degrees
from gemsc.verify.field.locate import (
    Recording,
    first_wrong_gradient,
    first_wrong_value,
    undecided_line,
)
from gemsc.verify.field.mode import Exps, OverField
from gemsc.verify.field.numbers import PRIMES, Field, NotDecidedError
from gemsc.verify.first_step import different, on_threads
from gemsc.verify.one_process import (
    evaluated,
    held_out,
    named_outputs,
    reference_steps,
)
from gemsc.verify.precision import FULL
from gemsc.verify.steps import initial_model, user_model_of
from gemsc.weights.first import FirstWeights
from gemsc.weights.write import write_tensors

Watched = Callable[[Path, int], AbstractContextManager[None]]
DTYPE = torch.float64
_DRAWS, _MOST_DRAWS = 3, 9  # more than three where these leave it to chance
_RARE, _TOO_LIKELY = 1e-6, 1e-3
_AGAIN = 3  # keys that may divide by 0
_FEW = 0.1  # divisions by 0: one of three draws has none
_BY_ZERO = "every draw divides by 0"


def check_all_inputs(
    directory: Path,
    model: nn.Module,
    loss: Callable[..., Any],
    inputs: Any,
    target: Any,
    *,
    draws: int | None = None,
) -> AllInputs:
    """Compare a program with the model it was compiled from, for all inputs.

    That is in so many draws, or in as many as leave little to chance.

    `inputs` and `target` are a whole batch: their floating-point numbers, and those of
    parameters and buffers, are drawn anew.
    """
    start = time.perf_counter()
    subject = _Subject(directory, model, loss, inputs, target)
    answer = AllInputs("not decided")
    bound = 1.0
    for number in range(draws or _MOST_DRAWS):
        if draws is None and number >= _DRAWS and bound < _RARE:
            break
        for again in range(_AGAIN):
            p = PRIMES[number % len(PRIMES)]
            drawn = Field(p, 1000 * number + again)
            answer, is_whole = _once(subject, drawn)
            if is_whole:
                break
        else:
            return AllInputs("not decided", _BY_ZERO)
        if answer.verdict != "proved":
            return _located(answer, subject)
        bound *= min(answer.degree / p, 1.0)
    if draws is None and bound > _TOO_LIKELY:
        words = (
            f"equal in {_MOST_DRAWS} draws, which programs of degree {answer.degree}"
        )
        by_chance = f"that differ may be with a probability of {bound:.0e}"
        return AllInputs("not decided", f"{words} {by_chance}")
    return replace(answer, bound=bound, seconds=time.perf_counter() - start)


@dataclass(frozen=True)
class _Subject:
    """A program, the model it was compiled from, and a batch for both."""

    directory: Path
    model: nn.Module
    loss: Callable[..., Any]
    inputs: Any
    target: Any


def _located(answer: AllInputs, subject: _Subject) -> AllInputs:
    """Return what was found wrong with the place of the first wrong value."""
    if answer.verdict != "not equal":
        return answer
    one, two = Recording(), Recording()
    for key, recording in enumerate((one, two), 500):
        drawn = Field(PRIMES[0], key)
        if _once(subject, drawn, recording)[0].verdict == "not decided":
            return answer
    place = first_wrong_value(one, two, loss_too="the loss" in answer.wrong)
    if not place:
        prefix, missing = "the gradient of ", " is missing"
        names = [
            name.removeprefix(prefix).removesuffix(missing)
            for name in answer.wrong
            if name.startswith(prefix)
        ]
        last = first_wrong_gradient(subject.directory, names)
        place = f"the forward is right; first in the backward: {last}" if last else ""
    return replace(answer, why=f"{answer.why}; {place}") if place else answer


def check_program_for_all_inputs(directory: Path) -> AllInputs:
    """Compare a program that was compiled from a file; see `check_all_inputs`.

    Where batches have several shapes, that is done for each.

    Raises:
        GemscError: it was not compiled from a file, or has no loss.
    """
    plan = Plan.read(directory / "plan.toml")
    check_program(directory, plan.ranks)
    user = user_model_of(directory, plan)
    if plan.phases:
        raise GemscError(
            "--all-inputs compares one update, but a step has several phases",
            help="use gemsc verify without --all-inputs, or with --run",
        )
    shapes = user.make_shapes()
    model, loss = initial_model(user, directory), user.make_loss()
    answers: list[AllInputs] = []
    for pair in zip(shapes, user.make_targets(shapes), strict=True):
        answer = _of_batch(directory, model, loss, repeated(pair, plan), plan)
        if answer.verdict != "proved":
            return answer
        answers.append(answer)
    return replace(
        max(answers, key=lambda answer: answer.degree),
        bound=min(sum(answer.bound for answer in answers), 1.0),
        chooses=any(answer.chooses for answer in answers),
        seconds=sum(answer.seconds for answer in answers),
    )


def _of_batch(
    directory: Path, model: nn.Module, loss: Any, batch: Any, plan: Plan
) -> AllInputs:
    # integers, which are not drawn, other ones in each micro-batch
    others = [different((part, None), plan)[0] for part in batch]
    if not _same_integers(others, batch):
        with suppress(_ModelFailedError):  # where they mean something to each other
            answer = check_all_inputs(directory, model, loss, *others)
            if answer.why != _BY_ZERO:  # perhaps by a count of them
                return answer
    return check_all_inputs(directory, model, loss, *batch)


def _same_integers(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(
        not isinstance(a, Tensor) or a.is_floating_point() or torch.equal(a, b)
        for a, b in pairs
    )


class _ModelFailedError(GemscError):
    """The model itself does not run on a batch."""


@contextmanager
def _of_model() -> Iterator[None]:
    try:
        yield
    except (NotDecidedError, GemscError):
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        message = f"the model does not run over a finite field: {text}"
        raise _ModelFailedError(message) from error


def _once(
    subject: _Subject, drawn: Field, recording: Recording | None = None
) -> tuple[AllInputs, bool]:
    """Return what one draw finds, and whether no division by 0 hides anything."""
    with TemporaryDirectory(prefix="gemsc-field-") as name:
        folder = Path(name) / "program"
        shutil.copytree(subject.directory, folder)
        plan = Plan.read(folder / "plan.toml")
        whole = _drawn_model(subject.model, drawn)
        first = FirstWeights(subject.directory / plan.weights)
        _draw_weights(first, folder / plan.weights, len(plan.stages), whole)
        batch = (
            _drawn_batch(subject.inputs, drawn, "input"),
            _drawn_batch(subject.target, drawn, "target"),
        )
        count = plan.data * plan.micro_batches
        see: Callable[[Any], None] | None = None
        watch: Watched = lambda file, rank: nullcontext()  # noqa: E731
        if recording is not None:
            see, watch = recording.see, partial(recording.rank, subject.directory)
            see([*whole.parameters(), *whole.buffers(), batch])
        try:
            with preserve_rng(), default_dtype(DTYPE), _tables_apart():
                with (
                    _over(drawn, see) as mode,
                    _of_model(),
                    forgetting(whole, subject.loss),
                ):
                    with Degrees() as degrees:
                        expected = reference_steps(
                            whole, subject.loss, [batch], count, DTYPE, _Still
                        )
                    held = _evaluated(whole, expected.state, subject.loss, batch, plan)
                actual, evaluated, modes = _ranks(folder, plan, batch, drawn, watch)
        except NotDecidedError as error:
            return AllInputs(
                "not decided", undecided_line(error, folder, subject.directory)
            ), True
        pairs = (actual, expected), (evaluated, held)
        verdict = _compared(*pairs, drawn)
        # a value goes through the functions of one micro-batch
        degree = degrees.total // count + degrees.highest
        verdict = replace(verdict, degree=degree, chooses=degrees.chooses)
        is_whole = all(_is_chance(one, verdict.verdict) for one in (mode, *modes))
        return verdict, is_whole


def _is_chance(mode: OverField, verdict: str) -> bool:
    """Whether divisions by 0 are none, or as few of very many as chance makes them."""
    expected = mode.divisions / mode.field.p
    if verdict != "proved" or expected < _FEW:
        return not mode.zeros
    return mode.zeros <= 5 + 2 * expected


def _evaluated(
    model: nn.Module,
    state: Mapping[str, Tensor],
    loss: Callable[..., Any],
    batch: tuple[Any, Any],
    plan: Plan,
) -> _Evaluated:
    """Return what the model gives in evaluation after the step."""
    (outputs,) = evaluated(model, state, [batch[0]], plan, DTYPE, FULL)
    mean = held_out(loss, outputs, batch, plan, DTYPE, FULL)
    return _Evaluated(mean.value, mean.divisor, named_outputs(outputs, plan))


@contextmanager
def _tables_apart() -> Iterator[None]:
    """Keep weights of resizing, which are cached, apart from those of floats."""
    taps.cache_clear()
    try:
        yield
    finally:
        taps.cache_clear()


@contextmanager
def _over(
    drawn: Field,
    see: Callable[[Any], None] | None = None,
    exps: Exps | None = None,
) -> Iterator[OverField]:
    mode = OverField(drawn, see, exps)
    with nothing_rounds(), mode, same_draws():
        yield mode


class _Still(torch.optim.SGD):
    """An optimizer that changes nothing."""

    def __init__(self, pairs: Any) -> None:
        super().__init__(pairs, lr=0.0)

    def step(self, closure: Any = None) -> Any:
        """Leave all as it is."""


def _ranks(
    folder: Path,
    plan: Plan,
    batch: tuple[Any, Any],
    drawn: Field,
    watch: Watched,
) -> tuple[StepRecord, _Evaluated, tuple[OverField, ...]]:
    """Return what a step and an evaluation give, and what ranks computed in."""
    cpu = torch.device("cpu")
    exps = Exps()  # messages are copies, too

    def step(transport: Transport) -> tuple[Evaluation, OverField]:
        # it tries its optimizer, in floats
        trainer = Trainer(
            folder,
            transport,
            dtype=DTYPE,
            device=cpu,
            on_nonfinite="warn",
            optimizer=_Still,
        )
        file = folder / rank_file(transport.rank % plan.copy_ranks)
        with _over(drawn, exps=exps) as mode, watch(file, transport.rank):
            recorded(trainer, folder, [batch], measure=False)
            evaluation = trainer.evaluate(*batch)
        return evaluation, mode

    evaluations, modes = zip(*on_threads(plan.ranks, step, DTYPE), strict=True)
    # those of data-parallel copies, in order
    outputs = [one.output for one in evaluations if one.output is not None]
    of_all = _Evaluated(evaluations[0].loss, outputs=named_outputs(outputs, plan))
    return read_record(folder, plan.ranks), of_all, modes


def _drawn_model(model: nn.Module, drawn: Field) -> nn.Module:
    model = copy.deepcopy(model)
    named = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        for name, tensor in named:
            if tensor.is_floating_point() and bool(tensor.isfinite().all()):
                tensor.data = drawn.random(name, tensor.shape).to(tensor.dtype)
    return model


def _draw_weights(
    first: FirstWeights, folder: Path, num_stages: int, model: nn.Module
) -> None:
    """Put the model's numbers into a program's files of weights, all of them."""
    known = {name: tensor.detach() for name, tensor in all_named(model)}
    of_stages = [
        {
            name: known[name] if name in known else first.read(stage, name)
            for name in first.table(stage)
        }
        for stage in range(num_stages)
    ]
    (folder / ELSEWHERE).unlink(missing_ok=True)
    for stage, tensors in enumerate(of_stages):
        path = folder / f"stage{stage}.safetensors"
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        path.unlink()
        write_tensors(path, copies)


def _drawn_batch(value: Any, drawn: Field, name: str) -> Any:
    count = iter(range(10**6))

    def draw(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        if not bool(leaf.isfinite().all()):
            return leaf.to(DTYPE)
        return drawn.random(f"{name} {next(count)}", leaf.shape)

    return pytree.tree_map(draw, value)
