"""Import the user's file and find the model and what belongs to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import enable_grad, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gemsc.base.dtypes import check_modes
from gemsc.base.examples import (
    Examples,
    inputs_of_shapes,
    num_rows,
    samples,
    target_like,
)
from gemsc.base.fingerprint import RUNTIME_ONLY, noting_settings
from gemsc.base.nests import Inputs, tensor_leaves
from gemsc.base.phase import Phase, as_phases
from gemsc.base.rng import seeded
from gemsc.datasets.samples import (
    collated_target,
    joins_samples,
    leading_samples,
    no_shapes_known,
    num_samples,
    pair_error,
)
from gemsc.datasets.stream import Stream, as_dataset
from gemsc.errors import GemscError, SourceLocation
from gemsc.slides.windows import SlidingWindows
from gemsc.source import definition, import_source, missing_model, user_failure
from gemsc.weights.elsewhere import Elsewhere
from gemsc.weights.keras_model import as_module
from gemsc.weights.load import load_weights
from gemsc.weights.on_meta import give_buffers
from gemsc.weights.source import WeightFiles, matched

HOOKS = {  # called beside the steps of training, or in prediction
    "on_step": "on_step(trainer, report) on every rank",
    "on_epoch": "on_epoch(trainer, epoch, figures) on every rank",
    "init": "init(module) for each module with tensors of its own, to set these alone",
    "predict_input": "predict_input(region) with a height x width x channels array",
    "predict_output": "predict_output(output) with what the model returns for a sample",
}


@dataclass(frozen=True)
class UserModel:
    """What a user's file defines; None for what it does not.

    `model` and `example_inputs` are functions or objects, as the user wrote them.
    `constants` are those that have other values than in the file, `settings` the files
    of settings (YAML, JSON, ...) that it has read.
    """

    path: Path
    module: ModuleType
    name: str
    model: Any
    example_inputs: Any
    loss: Any = None
    optimizer: Any = None
    scheduler: Any = None
    phases: Any = None
    dataset: Any = None
    example_target: Any = None
    metrics: Any = None
    eval_dataset: Any = None
    eval_windows: Any = None
    on_step: Any = None
    on_epoch: Any = None
    predict_input: Any = None
    predict_output: Any = None
    constants: Mapping[str, str] = field(default_factory=dict)
    weights: Any = None
    init: Any = None
    pad_value: Any = None
    bucket: Any = None
    collate: Any = None
    settings: set[str] = field(default_factory=set)

    @property
    def spec(self) -> str:
        """What `load_user_model` takes to find the same again."""
        return str(self.path) if self.name == "model" else f"{self.path}:{self.name}"

    def make_unfilled(self, *, seed: int = 0) -> nn.Module:
        """Return the model, made with all generators seeded, without its `weights`.

        On the meta device its parameters have no data; its tables have.

        Raises:
            GemscError: the user's function fails or gives something else.
        """
        with self.lines():
            made = as_module(self._make(self.name, self.model, seed))
        if not isinstance(made, nn.Module):
            raise GemscError(
                f"{self.name} returns an object of type {type(made).__name__}",
                at=self.line_of(self.name),
                help=f"return a torch.nn.Module from {self.name}()",
            )
        give_buffers(made, partial(self._make, self.name, self.model))
        return made

    def weight_files(self) -> Path | None:
        """Return the file or folder that `weights` names, from the folder of the file.

        Raises:
            GemscError: it names none.
        """
        if self.weights is None:
            return None
        place = self._make("weights", self.weights, 0)
        if not isinstance(place, str | Path):
            raise GemscError(
                f"weights is of type {type(place).__name__}",
                at=self.line_of("weights"),
                help="give a path, relative to the folder of the model's file",
            )
        return self.path.parent / Path(place).expanduser()

    def fill(self, model: nn.Module) -> None:
        """Put a model on the memory of the files of `weights`.

        Raises:
            GemscError: they are damaged, or not those of the model.
        """
        with self._at_line_of("weights"):
            if (place := self.weight_files()) is not None:
                load_weights(model, place)

    def check_files(self, elsewhere: Elsewhere) -> None:
        """Make sure that the files of `weights` are those of the model.

        Raises:
            GemscError: they are damaged, or have other names or shapes.
        """
        with self._at_line_of("weights"):
            files = WeightFiles.open(Path(elsewhere.files))
            matched(files, [*elsewhere.tensors.values()])

    def initialized(self) -> tuple[nn.Module, Callable[[nn.Module], object]]:
        """Return the model without weights, and what gives a module its own.

        Raises:
            GemscError: the file has no init(module).
        """
        if not callable(self.init):
            raise GemscError(
                f"{self.path.name} has no init(module)",
                help="the program was compiled from a file that had it: compile again",
            )
        return self.make_unfilled(), partial(self.call, "init")

    def make_inputs(self, shape: int | None = None) -> Inputs:
        """Return the example inputs of one micro-batch.

        Of several shapes, they are those of the one with this number, or the largest.

        Raises:
            GemscError: they are no tuple or dict with tensors in it.
        """
        shapes = self.make_shapes()
        largest = Examples(shapes, [None] * len(shapes)).largest
        return shapes[largest if shape is None else shape]

    def make_shapes(self) -> list[Inputs]:
        """Return the example inputs of each shape that batches may have.

        Raises:
            GemscError: they are no tuple or dict with tensors in it.
        """
        made = self._make("example_inputs", self.example_inputs, 0)
        with self.lines():
            shapes = inputs_of_shapes(made)
            for inputs in shapes:
                for _, tensor in tensor_leaves(inputs):
                    if tensor.dim() and not tensor.shape[0]:
                        raise GemscError(
                            f"example_inputs has no samples: {list(tensor.shape)}",
                            help="return one micro-batch with at least one sample",
                        )
            return shapes

    def make_target(self, inputs: Inputs) -> Any:
        """Return a target for `inputs`: the user's, or one collated from the dataset.

        A dataset of the file itself counts more than an example that it only imports,
        with the model. None without a loss or phases.

        Raises:
            GemscError: there is a loss, but neither example_target nor dataset.
        """
        shapes = self.make_shapes()
        if len(shapes) == 1:
            return self.make_targets([inputs])[0]
        like = [samples(nest, "input") for nest in shapes]
        return self.make_targets(shapes)[like.index(samples(inputs, "input"))]

    def make_targets(self, shapes: Sequence[Inputs]) -> list[Any]:
        """Return a target for the inputs of each shape: see `make_target`."""
        if self.loss is None and self.phases is None:
            return [None] * len(shapes)
        if self.example_target is not None and not self._has_newer_data():
            made = self._make("example_target", self.example_target, 0)
            if len(shapes) == 1:
                return [made]
            with self._at_line_of("example_target"):
                return [*Examples.of([*shapes], made).targets]
        if self.dataset is None:
            raise GemscError(
                "there is a loss, but nothing provides a target for it",
                at=self.line_of("loss" if self.phases is None else "phases"),
                help="add dataset() of (input, target) pairs, or example_target()",
            )
        data = self.make_dataset()
        with seeded(0):
            return [self._collate(data, shapes, i) for i in range(len(shapes))]

    def _has_newer_data(self) -> bool:
        """Return whether the file has a dataset, and the example is another file's."""
        lines = map(self.line_of, ("dataset", "example_target"))
        has_data, other = (
            at is not None and not at.text.startswith(("from ", "import "))
            for at in lines
        )
        return self.dataset is not None and has_data and not other

    def make_loss(self) -> Any:
        """Return the loss as something to call with (output, target)."""
        loss = self.loss
        if isinstance(loss, type):
            loss = self._make("loss", loss, 0)
        if loss is not None and not callable(loss):
            raise GemscError(
                f"loss is of type {type(loss).__name__}",
                at=self.line_of("loss"),
                help="define loss(output, target), or use a loss of torch.nn",
            )
        with self._at_line_of("loss"):
            return as_module(loss)

    def make_phases(self) -> tuple[Phase, ...]:
        """Return the phases of a step, in their order; none if it is one update.

        Raises:
            GemscError: they are something else, or the file also says what one update
                has.
        """
        if self.phases is None:
            return ()
        with self._at_line_of("phases"):
            phases = as_phases(self._make("phases", self.phases, 0))
        for name in ("loss", "optimizer", "scheduler"):
            if getattr(self, name) is not None:
                raise GemscError(
                    f"{name} cannot be combined with phases",
                    at=self.line_of(name),
                    help="leave it out: each phase has its own; use metrics to judge "
                    "the outputs",
                )
        return phases

    def make_metrics(self) -> Any:
        """Return what the file calls `metrics`, made if it is a class."""
        is_class = isinstance(self.metrics, type)
        return self._make("metrics", self.metrics, 0) if is_class else self.metrics

    def make_windows(self) -> SlidingWindows | None:
        """Return how the file lets windows go over whole cases; None if it does not.

        Raises:
            GemscError: it says something else.
        """
        if self.eval_windows is None:
            return None
        windows = self._make("eval_windows", self.eval_windows, 0)
        with self._at_line_of("eval_windows"):
            return SlidingWindows.of(windows)

    def make_dataset(self, name: str = "dataset", *, seed: int = 0) -> Any:
        """Return the user's `dataset` or `eval_dataset`; None where there is none.

        An `IterableDataset` becomes a `Stream`. The random generators are seeded, so it
        is the same in every process.

        Raises:
            GemscError: the user's function fails.
        """
        return as_dataset(self._make(name, getattr(self, name), seed))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a hook of the user's file, if there is one; return what it returns.

        Raises:
            GemscError: it fails; with the user's line.
        """
        hook = getattr(self, name)
        if hook is None:
            return None
        try:
            return hook(*arguments)
        except Exception as error:
            at = self.line_of(name)
            if isinstance(error, GemscError):
                error.at = error.at or user_failure(name, error, self.path, at).at
                raise
            advice = f"gemsc calls {HOOKS[name]}"
            raise user_failure(
                f"{name}() fails", error, self.path, at, advice
            ) from error

    def line_of(self, name: str) -> SourceLocation | None:
        """Return where the file defines a name."""
        return definition(self.path, name)

    @contextmanager
    def _at_line_of(self, name: str) -> Iterator[None]:
        """Give errors without a place the line of a name."""
        try:
            yield
        except GemscError as error:
            error.at = error.at or self.line_of(name)
            raise

    @contextmanager
    def lines(self) -> Iterator[None]:
        """Give errors without a place the line of what they begin with."""
        try:
            yield
        except GemscError as error:
            for words, name in (
                ("the loss", "loss"),
                ("the model", self.name),
                ("example_inputs", "example_inputs"),
                ("phase", "phases"),
            ):
                if error.message.startswith(words):
                    error.at = error.at or self.line_of(name)
            raise

    def _collate(self, data: Any, shapes: Sequence[Inputs], number: int) -> Any:
        """Return a target for the inputs of a shape, of the first samples there are."""
        at, examples = self.line_of("dataset"), shapes[number]
        batch, like = num_rows(examples), {"input": examples}
        advice = "return samples of equal shapes, and 0 or another number for None"
        if len(shapes) > 1 or self.pad_value is not None:
            advice = "let example_target() return it; of several shapes, a list"
            like = {}  # samples have shapes of their own
        try:
            if not (count := num_samples(data, at)):
                raise GemscError("the dataset is empty", at=at, help="add samples")
            if len(shapes) > 1 and isinstance(data, Stream):
                raise no_shapes_known(data, at)
            items = leading_samples(data, batch, count)
            if wrong := pair_error(items[0], at):
                raise wrong
            if len(shapes) > 1:
                items = [(0, target_like(item, shapes, number)) for item in items]
            elif joins_samples(self.collate):
                return self.collate(items, 0)[1]
            return collated_target(items, like, at)
        except GemscError:
            raise
        except (Exception, SystemExit) as error:
            raise user_failure("dataset fails", error, self.path, at, advice) from error

    def _make(self, name: str, value: Any, seed: int) -> Any:
        """Call what is a function; an object is taken as it is."""
        is_factory = isinstance(value, type | partial) or inspect.isroutine(value)
        if not is_factory:
            return value
        try:
            files = set() if name in RUNTIME_ONLY else self.settings
            with seeded(seed), noting_settings(files):
                return value()
        except (Exception, SystemExit) as error:
            at = self.line_of(name)
            advice = f"{name}() must work when it is called alone, without arguments"
            raise user_failure(
                f"{name}() fails", error, self.path, at, advice
            ) from error


def load_user_model(
    spec: str, *, constants: Mapping[str, str] | None = None
) -> UserModel:
    """Import `path/model.py` or `pkg.module:name` and return what it defines.

    `path/model.py:name` works too; `name` is the model, `model` if left out. It is
    imported with seeded generators; `constants` replace values of names at its top.

    Raises:
        GemscError: with the line, for whatever is missing or fails.
    """
    settings: set[str] = set()
    with enable_grad(), seeded(0), noting_settings(settings):
        path, module, name = import_source(spec, constants or {})
        check_modes(path.name)
    defined = vars(module)
    if defined.get(name) is None:
        raise missing_model(path, module, name, nn.Module)
    if defined.get("example_inputs") is None:
        raise GemscError(
            f"no example_inputs in {path.name}",
            at=definition(path, name),
            help="add example_inputs(), which returns a tuple of the tensors "
            "that forward takes, for one micro-batch",
        )
    _check_unbound(path, defined)
    names = (item.name for item in fields(UserModel) if item.default is None)
    optional = {name: defined.get(name) for name in names}
    return UserModel(
        path,
        module,
        name,
        defined[name],
        defined["example_inputs"],
        constants=constants or {},
        settings=settings,
        **optional,
    )


def _check_unbound(path: Path, defined: Mapping[str, Any]) -> None:
    """Refuse an optimizer or a scheduler that has been made, for the whole model."""
    kinds = (
        ("optimizer", Optimizer, "parameters"),
        ("scheduler", LRScheduler, "optimizer"),
    )
    for name, kind, of in kinds:
        if isinstance(defined.get(name), kind):
            made = type(defined[name]).__name__
            raise GemscError(
                f"{name} is an object of type {made}: each rank makes its own",
                at=definition(path, name),
                help=f"def {name}({of}): return {made}({of}, ...)",
            )
