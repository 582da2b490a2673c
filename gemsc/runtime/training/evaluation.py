"""Evaluation on held-out data: the loss and the user's metrics, of all samples.

Each copy of the model evaluates its part of a batch. The parts are brought together on
one rank (`Holders`), which scores the batch as one process would.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gemsc.base.dtypes import cast
from gemsc.base.nests import OF_ALL, ONCE, Mean, as_loss, copied
from gemsc.errors import GemscError
from gemsc.runtime.checkpoint.holdings import Holdings
from gemsc.runtime.checkpoint.pieces import TensorPiece
from gemsc.runtime.data.batches import Batch
from gemsc.runtime.data.metrics import (
    Metrics,
    along_samples,
    as_hook,
    first_samples,
    in_micro_batches,
    is_texts,
    nan_of_all,
)
from gemsc.runtime.data.shared import SharedData
from gemsc.runtime.data.stream_batches import StreamBatches
from gemsc.runtime.data.tiled import Window
from gemsc.runtime.training.step_report import as_structure
from gemsc.runtime.training.trainer import Trainer
from gemsc.runtime.training.verification import Figures, RunRecord
from gemsc.runtime.transport.transport import LARGEST_TAG, Transport
from gemsc.runtime.worker.steps import BatchError
from gemsc.slides.windows import Case, Picture, SlidingWindows
from gemsc.user_model import UserModel
from gemsc.weights.load import LOSS, stage_tensors


@dataclass
class Evaluator:
    """Runs all samples of a dataset in evaluation mode."""

    trainer: Trainer
    user: UserModel
    data: SharedData
    record: RunRecord
    has_frozen: bool = field(default=False, init=False)  # what never changes, in loss
    _problem: GemscError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.user.make_metrics(), self.user.line_of("metrics"))
        self.loss = self.user.make_loss()
        self.holders = Holders(self.trainer.transport)
        self.windows = self.user.make_windows()
        if self.windows is not None:
            self._check_windows(self.windows)

    def _check_windows(self, windows: SlidingWindows) -> None:
        picture = picture_of_all(self.trainer)
        at = self.user.line_of("eval_windows")
        if picture is None:
            raise GemscError(
                "eval_windows needs a model of pictures or volumes",
                at=at,
                help="leave out eval_windows: eval_dataset then returns samples as "
                "dataset does",
            )
        if self.trainer.plan.shapes:
            raise GemscError(
                "eval_windows need one shape, but example_inputs has several",
                at=at,
                help="leave out eval_windows, or return one shape from example_inputs",
            )
        if self.trainer.plan.mixes_samples:
            raise GemscError(
                "eval_windows: forward mixes samples, so what it gives for a window "
                "depends on the others in its micro-batch",
                at=at,
                help="let example_inputs() have one sample, or leave out eval_windows",
            )
        if self.data.batches.window is not None:
            raise GemscError(
                "eval_windows needs whole cases, but eval_dataset is read in parts",
                at=at,
                help="return an eval_dataset with [index], or leave out eval_windows",
            )
        try:
            windows.steps(picture.size)
        except GemscError as error:
            error.at = at
            raise
        self.picture: Picture = picture

    def check_first(self) -> None:
        """Read the first batch, so that a wrong one shows before anything is trained.

        Whole cases and slides are too large for that, and streams may begin slowly.

        Raises:
            GemscError: it does not fit the program.
        """
        batches, worker = self.data.batches, self.trainer.worker
        is_read_in_parts = batches.window is not None or self.windows is not None
        if is_read_in_parts or isinstance(batches, StreamBatches):
            return
        plan, order = self.trainer.plan, batches.order
        for count, size in zip(order.counts, order.sizes, strict=True):
            of_loss = plan.loss_of_all and self.loss is not None
            if (plan.mixes_samples or of_loss) and count % size:
                by = "" if plan.mixes_samples else "loss"
                raise self._not_alone(count, size, by=by)
        for batch, _ in islice(self.data.epoch(0), 1):
            sources = dict(zip(("input", "target"), batch.data, strict=True))
            sources["input"] = as_structure(sources["input"])
            worker.use(plan.variant_of(batch.shape))
            with naming_samples(self.trainer, self.data, 0, 0):
                worker.steps.shape.bind(sources)
            worker.use("")

    def run(self) -> tuple[dict[str, float], GemscError | None]:
        """Return the figures of all samples, the same on every rank.

        If the user's metrics or loss fail, there may be too few; that error is given,
        and not raised: only one rank scores, and all save first what they have trained.
        """
        self._problem, mean_loss = None, Mean()
        self.metrics.reset()
        if isinstance(self.loss, nn.Module):
            bring_up_to_date(self.loss, self.trainer, frozen=not self.has_frozen)
            self.has_frozen = True
        if self.windows is None:
            self._score_batches(mean_loss)
        else:
            self._score_cases(mean_loss)
        status = self.trainer.worker.status
        status.enter("metrics")
        figures: dict[str, tuple[float, int]] = {}
        with self._later():
            figures = self.metrics.figures()
        transport, scorer = self.trainer.transport, self.holders.first
        terms = mean_loss.divisor
        losses: Figures = {"loss": (mean_loss.value, terms)} if terms else {}
        mine = losses | figures, self._problem
        scored, problem = transport.all_gather_object(mine)[scorer]
        status.idle()
        self.record.add_figures(scored)
        return {name: value for name, (value, _) in scored.items()}, problem

    @contextmanager
    def _later(self) -> Iterator[None]:
        """Keep the first error for later, when the ranks do not wait for each other."""
        try:
            yield
        except GemscError as error:
            self._problem = self._problem or error

    def _batches(self) -> Iterator[Batch]:
        """Yield all batches, until the first rank that reads has none."""
        requests = self.trainer.requests
        source = self.data.epoch(0, requests=requests)
        for batch, seen in self.trainer.worker.status.while_reading(source):
            self.record.add_evaluated(seen)
            yield batch
        requests.done("end")

    def _score_batches(self, mean_loss: Mean) -> None:
        batches, status = self.data.batches, self.trainer.worker.status
        evaluate = partial(self.trainer.evaluate, window=batches.window)
        for number, batch in enumerate(self._batches()):
            if not batch.is_full and isinstance(self.loss, nn.Module):
                bring_up_to_date(self.loss, self.trainer, frozen=False)
            naming = naming_samples(self.trainer, self.data, 0, number)
            with self.record.draws(), naming:
                result = evaluate(*batch.data, shape=batch.shape, samples=batch.count)
            self.holders.find(result.for_loss)
            if result.for_loss is None:  # it needs no whole targets from then on
                batches.whole_targets = "none"
            # The ranks compute the loss of full batches.
            is_full, count = batch.is_full, batch.count
            size = batches.order.sizes[batch.shape]
            if is_full and result.mean is not None:
                mean_loss.add(result.mean.loss, count)
            if not is_full and self.trainer.plan.mixes_samples:
                self._problem = self._problem or self._not_alone(count, size)
                continue
            if self.metrics.is_empty and (is_full or self.loss is None):
                continue
            status.enter("metrics")
            dims = self.trainer.plan.sample_dims
            scored = (result.for_loss, self._cast(batch.targets))
            if (scored := self.holders.join(scored, dims)) is None:
                continue
            output, target = first_samples(scored, count, size, dims)
            output = result.for_metrics(output)
            if not is_full and self.loss is not None:  # metrics may change outputs
                at = self.user.line_of("loss")
                with self._later(), as_hook("loss", at), result.autocast:
                    mean_loss.add(self._loss_of_rest(scored, batch), count)
            with self._later():
                self.metrics.add(output, target, count)
                if not is_full and self.metrics.takes_of_all(output, target, dims):
                    raise self._not_alone(count, size, by="metrics")

    def _not_alone(self, count: int, size: int, *, by: str = "") -> GemscError:
        why, line, more = "forward mixes samples, so nothing", "eval_dataset", ""
        if by:
            why, line = f"{by} uses what the model computes of a whole", by
            why += " micro-batch, so no copies of a sample"
            more = "let it compute that from the model's output for each sample, or "
        return GemscError(
            f"{why} can fill up the last batch of eval_dataset, {count % size} samples "
            f"of {size}",
            at=self.user.line_of(line),
            help=f"{more}give eval_dataset a multiple of {size} samples",
        )

    @torch.no_grad()
    def _loss_of_rest(self, scored: Any, batch: Batch) -> Tensor:
        """Return the mean loss of the micro-batches of a last batch that is not full.

        Raises:
            GemscError: the model has computed some of it, also from what fills it up.
        """
        assert self.loss is not None
        plan, shape, mean = self.trainer.plan, batch.shape, Mean()
        size, dims = self.data.batches.order.sizes[shape], plan.sample_dims
        most = plan.micro_batch_sizes[shape]
        for part, count in in_micro_batches(scored, batch.count, size, most, dims):
            output, target = part[0], copied(part[1])
            loss: Any = self.loss(nan_of_all(output, dims), target)
            is_loss: Any = not isinstance(loss, Tensor) or loss.dim() == 0
            if is_loss and OF_ALL in dims and as_loss(loss).isnan().any():
                is_loss = as_loss(self.loss(output, target)).isnan().any()
            if not is_loss:
                raise self._not_alone(batch.count, size, by="loss")
            mean.add(as_loss(loss), count)
        return mean.loss

    def _score_cases(self, mean_loss: Mean) -> None:
        """Score one whole case after the other: the loss, too, is of the whole."""
        assert self.windows is not None
        status = self.trainer.worker.status
        for batch in self._batches():
            input, target = batch.data
            if (shape := self.picture.shape_of(input)) is None:
                raise GemscError(
                    f"eval_dataset returns no input with {self.picture.channels} "
                    f"channels and {len(self.picture.size)} axes",
                    at=self.user.line_of("eval_dataset"),
                    help="return whole cases, with the axes of example_inputs()",
                )
            case = Case(shape, self.picture.size, self.windows, input)
            with self.record.draws():
                output = evaluate_case(self.trainer, case, self.holders)
            if output is None:
                continue
            status.enter("metrics")
            target = self._cast(target)
            if self.loss is not None:
                at = self.user.line_of("loss")
                with self._later(), as_hook("loss", at), torch.no_grad():
                    mean_loss.add(as_loss(self.loss(output, copied(target))))
            with self._later():
                self.metrics.add(output, target, 1)

    def _cast(self, target: Any) -> Any:
        """Return a target in the dtype that the program runs in, as in training."""
        return cast(target, self.trainer.worker.float_dtype)


@contextmanager
def naming_samples(
    trainer: Trainer, data: SharedData, epoch: int, number: int
) -> Iterator[None]:
    """Name the samples of a micro-batch that fails: one may have a wrong label.

    And the dataset of a batch that does not fit.
    """
    batches = data.batches
    try:
        yield
    except BatchError as error:
        error.at = error.at or data.at
        error.message = f"{data.name}: {error.message}"
        raise
    except GemscError:
        raise
    except Exception as error:
        if trainer.worker.status.what not in ("forward", "evaluation"):
            raise
        row = next(batches.rows(epoch, number))
        size = trainer.plan.micro_batch_sizes[row.shape]
        ids = row.indices[trainer.worker.number * size :][:size] or row.indices[-1:]
        error.add_note(f"note: this micro-batch has samples {', '.join(map(str, ids))}")
        raise


def bring_up_to_date(loss: nn.Module, trainer: Trainer, *, frozen: bool) -> None:
    """Give a loss its tensors as the ranks have them, also `frozen` ones; all call."""
    loss.eval()
    tensors = {
        name: tensor
        for name, tensor in stage_tensors(loss).items()
        if frozen or tensor.requires_grad or not isinstance(tensor, nn.Parameter)
    }
    if not tensors:
        return
    aliases = trainer.program.aliases  # a loss may hold the model
    names = {aliases.get(f"{LOSS}{name}", f"{LOSS}{name}"): name for name in tensors}
    held = {h.key.partition("/")[2]: h for h in Holdings(trainer.worker).tensors({})}
    mine = {names[first]: h for first, h in held.items() if first in names}
    gather, rank = trainer.transport.all_gather_object, trainer.transport.rank
    pieces = [*gather({name: h.piece for name, h in mine.items()})][:rank]
    sent = [
        (name, h.piece, h.tensor.cpu())
        for name, h in mine.items()
        if all(before.get(name) != h.piece for before in pieces)
    ]
    for name, piece, values in (entry for of_rank in gather(sent) for entry in of_rank):
        tensor = tensors[name]
        if tensor.dtype != values.dtype:
            tensor.data = tensor.data.to(values.dtype)
        whole = tensor.data if tensor.dim() else tensor.data.view(1)
        for place, part in TensorPiece.whole(piece.shape).overlap(piece):
            whole[place] = values.view(piece.sizes)[part]


def picture_of_all(trainer: Trainer) -> Picture | None:
    """Return the picture or volume that the model takes; every rank calls it."""
    inputs = trainer.program.inputs.values()
    shapes = [item.shape for item in inputs if item.path[0] == "input"]
    mine = next(filter(None, map(Picture.of_shape, shapes)), None)
    pictures = trainer.transport.all_gather_object(mine)
    return next((picture for picture in pictures if picture is not None), None)


def evaluate_case(
    trainer: Trainer, case: Case, holders: Holders, bar: Any = None
) -> Any:
    """Return the model's output of a whole case on the first holder, None elsewhere.

    Each copy of the model takes its part of every batch of windows. `bar` is told of
    each batch.
    """
    size, place = trainer.plan.batch_size, trainer.worker.place
    part = size // place.num_copies
    target = zero_target(trainer)
    for places, count in case.windows.batches(size):
        mine = places[place.copy * part :][:part]
        windows, shape = case.take(mine), trainer.plan.first_shape
        output = trainer.evaluate(windows, target, shape=shape).output
        holders.find(output)
        dims = trainer.plan.sample_dims
        if (whole := holders.join(output, dims)) is not None:
            case.add(places[:count], whole, dims)
        if bar is not None:
            bar.step(None, count)
    return case.output()


def zero_target(trainer: Trainer, part: Window | None = None) -> Any:
    """Return zeros for what the loss takes here: a program computes it, too.

    `part` is the window of a rank's tile, where it reads no more.
    """
    program = trainer.program
    target: Any = {}
    for item in program.inputs.values():
        if item.path[0] != "target":
            continue
        shape = part.shape_of(item.shape) if part is not None else item.shape
        if item.batched:
            shape = (program.copy_micro_batches * shape[0], *shape[1:])
        zeros = torch.zeros(shape, dtype=item.dtype)
        if len(item.path) == 1:
            return zeros
        nest = target
        for key in item.path[1:-1]:
            nest = nest.setdefault(key, {})
        nest[item.path[-1]] = zeros
    return target


@dataclass
class Holders:
    """The ranks that have outputs, one of each copy; the first one takes those of all.

    They are known after the first `join`.
    """

    transport: Transport
    ranks: list[int] = field(default_factory=list)

    def find(self, output: Any) -> None:
        """Learn once who has outputs; every rank calls it."""
        if not self.ranks:
            has_output = self.transport.all_gather_object(output is not None)
            self.ranks = [rank for rank, has in enumerate(has_output) if has]

    @property
    def first(self) -> int:
        """The rank that takes all."""
        return self.ranks[0]

    def join(self, value: Any, dims: Sequence[int] = ()) -> Any:
        """Return what all holders have of a batch on the first one, None elsewhere.

        The first tensors are outputs, where `dims` say in which dimension samples are.
        """
        transport = self.transport
        if transport.rank not in self.ranks:
            return None
        if transport.rank != self.first:
            _send(transport, value, self.first)
            return None
        parts = [value, *(_receive(transport, rank) for rank in self.ranks[1:])]
        return along_samples(_join, dims, *parts)


def _join(dim: int, *leaves: Any) -> Any:
    if isinstance(leaves[0], Tensor) and dim != ONCE:
        return torch.cat(leaves, max(dim, 0))
    if isinstance(leaves[0], np.ndarray):
        return np.concatenate(leaves)
    is_list = is_texts(leaves[0])
    return [text for texts in leaves for text in texts] if is_list else leaves[0]


def _send(transport: Transport, value: Any, dest: int) -> None:
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    for tensor in (torch.tensor([data.numel()]), data):
        transport.wait(transport.send(tensor, dest, LARGEST_TAG))


def _receive(transport: Transport, source: int) -> Any:
    size = torch.zeros(1, dtype=torch.int64)
    transport.wait(transport.receive(size, source, LARGEST_TAG))
    data = torch.empty(int(size), dtype=torch.uint8)
    transport.wait(transport.receive(data, source, LARGEST_TAG))
    return pickle.loads(data.numpy().data)  # of a rank of this job
