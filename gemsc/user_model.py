"""Import the user's file and find the model and what belongs to it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from gemsc.base.nests import (
    Inputs,
    normalize_inputs,
    num_samples,
    pair_error,
    tensor_leaves,
)
from gemsc.base.rng import seeded
from gemsc.errors import GemscError, SourceLocation
from gemsc.slides.windows import SlidingWindows
from gemsc.source.constants import RENAMED, ConstantsLoader
from gemsc.weights.keras_model import as_module
from gemsc.weights.load import load_weights

HOOKS = {  # called beside the steps of training, or in prediction
    "on_step": "on_step(trainer, report) on every rank",
    "on_epoch": "on_epoch(trainer, epoch, figures) on every rank",
    "predict_input": "predict_input(region) with a height x width x channels array",
    "predict_output": "predict_output(output) with what the model returns for a sample",
}
_OPTIONAL = (
    "loss",
    "optimizer",
    "scheduler",
    "dataset",
    "example_target",
    "metrics",
    "eval_dataset",
    "eval_windows",
    "weights",
    *HOOKS,
)


@dataclass(frozen=True)
class UserModel:
    """What a user's file defines; None for what it does not.

    `model` and `example_inputs` are functions or objects, as the user wrote them.
    `constants` are those that have other values than in the file.
    """

    path: Path
    module: ModuleType
    name: str
    model: Any
    example_inputs: Any
    loss: Any = None
    optimizer: Any = None
    scheduler: Any = None
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

    @property
    def spec(self) -> str:
        """What `load_user_model` takes to find the same again."""
        return str(self.path) if self.name == "model" else f"{self.path}:{self.name}"

    def make_model(self, *, seed: int = 0) -> nn.Module:
        """Return the model, made with all random generators seeded.

        If the file names `weights`, it is on the memory of these files.

        Raises:
            GemscError: the user's function fails or gives something else, or the
                weights are not those of the model.
        """
        with self.lines():
            made = as_module(self._make(self.name, self.model, seed))
        if not isinstance(made, nn.Module):
            raise GemscError(
                f"{self.name} returns an object of type {type(made).__name__}",
                at=self.line_of(self.name),
                help=f"return a torch.nn.Module from {self.name}()",
            )
        if self.weights is not None:
            self._load_weights(made, seed)
        return made

    def _load_weights(self, model: nn.Module, seed: int) -> None:
        place = self._make("weights", self.weights, seed)
        try:
            if not isinstance(place, str | Path):
                raise GemscError(
                    f"weights is of type {type(place).__name__}",
                    help="name a file or a folder, from the folder of the model's file",
                )
            load_weights(model, self.path.parent / Path(place).expanduser())
        except GemscError as error:
            error.at = error.at or self.line_of("weights")
            raise

    def make_inputs(self, *, seed: int = 0) -> Inputs:
        """Return the example inputs of one micro-batch.

        Raises:
            GemscError: they are no tuple or dict with tensors in it.
        """
        made = self._make("example_inputs", self.example_inputs, seed)
        with self.lines():
            inputs = normalize_inputs(made)
            for _, tensor in tensor_leaves(inputs):
                if tensor.dim() and not tensor.shape[0]:
                    raise GemscError(
                        f"example_inputs has no samples: {list(tensor.shape)}",
                        help="give it one micro-batch, with at least one sample",
                    )
            return inputs

    def make_target(self, inputs: Inputs, *, seed: int = 0) -> Any:
        """Return a target for `inputs`: the user's, or one collated from the dataset.

        A dataset of the file itself counts more than an example that it only imports,
        with the model. None without a loss.

        Raises:
            GemscError: there is a loss, but neither example_target nor dataset.
        """
        if self.loss is None:
            return None
        if self.example_target is not None and not self._has_newer_data():
            return self._make("example_target", self.example_target, seed)
        if self.dataset is None:
            raise GemscError(
                "there is a loss, but nothing provides its target",
                at=self.line_of("loss"),
                help="add dataset() of (input, target) pairs, or example_target()",
            )
        data = self.make_dataset(seed=seed)
        sizes = (t.shape[0] for _, t in tensor_leaves(inputs) if t.dim() > 0)
        with seeded(seed):
            return self._collate(data, next(sizes, 1))

    def _has_newer_data(self) -> bool:
        """Return whether the file has a dataset, and the example is another file's."""
        own, other = (
            getattr(value, "__module__", None) == self.module.__name__
            for value in (self.dataset, self.example_target)
        )
        return self.dataset is not None and own and not other

    def make_loss(self) -> Any:
        """Return the loss as something to call with (output, target)."""
        loss = self.loss
        if isinstance(loss, type):
            loss = self._make("loss", loss, 0)
        if loss is not None and not callable(loss):
            raise GemscError(
                f"loss is of type {type(loss).__name__}",
                at=self.line_of("loss"),
                help="define loss(output, target), or a torch.nn loss",
            )
        return loss

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
        given = self._make("eval_windows", self.eval_windows, 0)
        try:
            return SlidingWindows.of(given)
        except GemscError as error:
            error.at = error.at or self.line_of("eval_windows")
            raise

    def make_dataset(self, name: str = "dataset", *, seed: int = 0) -> Any:
        """Return the user's `dataset` or `eval_dataset`; None where there is none.

        The random generators are seeded, so it is the same in every process.

        Raises:
            GemscError: the user's function fails.
        """
        return self._make(name, getattr(self, name), seed)

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
                error.at = error.at or _failure(name, error, self.path, at).at
                raise
            advice = f"gemsc calls {HOOKS[name]}"
            raise _failure(f"{name}() fails", error, self.path, at, advice) from error

    def line_of(self, name: str) -> SourceLocation | None:
        """Return where the file defines a name."""
        return _definition(self.path, name)

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
            ):
                if error.message.startswith(words):
                    error.at = error.at or self.line_of(name)
            raise

    def _collate(self, data: Any, batch: int) -> Any:
        at = self.line_of("dataset")
        advice = "dataset() needs len() and [index], and samples of equal shapes"
        try:
            if not (count := num_samples(data, at)):
                raise GemscError("the dataset is empty", at=at, help="give it samples")
            items = [_sample(data, index % count) for index in range(batch)]
            if wrong := pair_error(items[0], at):
                raise wrong
            collated = default_collate(items)
        except GemscError:
            raise
        except (Exception, SystemExit) as error:
            raise _failure("dataset fails", error, self.path, at, advice) from error
        return collated[1]

    def _make(self, name: str, value: Any, seed: int) -> Any:
        """Call what is a function; an object is taken as it is."""
        is_factory = isinstance(value, type | partial) or inspect.isroutine(value)
        if not is_factory:
            return value
        try:
            with seeded(seed):
                return value()
        except (Exception, SystemExit) as error:
            at = self.line_of(name)
            advice = f"{name}() must work when it is called alone, without arguments"
            raise _failure(f"{name}() fails", error, self.path, at, advice) from error


def _sample(data: Any, index: int) -> Any:
    """Return a sample, with all of the image where a dataset reads it in boxes."""
    if hasattr(data, "read") and hasattr(data, "shape"):
        return data.read(index, tuple((0, size) for size in data.shape))
    return data[index]


def load_user_model(
    spec: str, *, seed: int = 0, constants: Mapping[str, str] | None = None
) -> UserModel:
    """Import `path/model.py` or `pkg.module:name` and return what it defines.

    `path/model.py:name` works too; `name` is the model, `model` if left out. The
    file's folder is on the import path while the file is loaded, and the random
    generators are seeded, so that objects made at import are the same each time.
    `constants` replace values that the file gives to names at its top.

    Raises:
        GemscError: with the line, for whatever is missing or fails.
    """
    place, name = _split(spec)
    with seeded(seed):
        if place.endswith(".py") or "/" in place:
            path, module = _import_file(Path(place), constants or {})
        else:
            path, module = _import_module(place, constants or {})
    found = vars(module)
    if found.get(name) is None:
        raise _no_model(path, module, name)
    if found.get("example_inputs") is None:
        raise GemscError(
            f"no example_inputs in {path.name}",
            at=_definition(path, name),
            help="add example_inputs(), which returns a tuple of the tensors "
            "that forward takes, for one micro-batch",
        )
    optional = {key: found.get(key) for key in _OPTIONAL}
    return UserModel(
        path,
        module,
        name,
        found[name],
        found["example_inputs"],
        constants=constants or {},
        **optional,
    )


def _split(spec: str) -> tuple[str, str]:
    place, separator, name = spec.rpartition(":")
    if separator and name.isidentifier():
        return place, name
    return spec, "model"


def _import_file(path: Path, constants: Mapping[str, str]) -> tuple[Path, ModuleType]:
    if not path.is_file():
        raise GemscError(
            f"there is no file {path}",
            help="give the path of a Python file, or package.module:name",
        )
    if path.suffix != ".py":
        raise GemscError(f"{path} is not a Python file", help="its name ends in .py")
    path = path.resolve()
    _check_syntax(path)
    if (path.parent / "__init__.py").is_file():
        _refuse_constants(path, constants)
        return path, _import_of_package(path)
    name = _module_name(path)
    loader = ConstantsLoader(name, path, constants)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or spec.loader is None:
        raise GemscError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(spec.name)
    sys.modules[spec.name] = module
    try:
        with _on_path(path.parent):
            spec.loader.exec_module(module)
    except BaseException as error:
        if previous is None:
            del sys.modules[spec.name]
        else:
            sys.modules[spec.name] = previous
        if isinstance(error, KeyboardInterrupt | GemscError):
            raise
        advice = f"`python {path.name}` shows the whole traceback"
        raise _failure(
            f"importing {path.name} fails", error, path, advice=advice
        ) from error
    return path, module


def _refuse_constants(path: Path, constants: Mapping[str, str]) -> None:
    if constants:
        raise GemscError(
            f"--set cannot change constants of {path.name}, which is in a package",
            help="move what runs change into a file of its own",
        )


def _import_of_package(path: Path) -> ModuleType:
    """Import a file under its name in its package, for its relative imports."""
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    with _on_path(path.parent), _on_path(root):
        return _import_named(name, path)


def _module_name(path: Path) -> str:
    """Return the file's name, or another one where an imported module has it."""
    taken = sys.modules.get(path.stem)
    if taken is None or getattr(taken, "__file__", None) == str(path):
        return path.stem
    return RENAMED + path.stem


def _import_module(name: str, constants: Mapping[str, str]) -> tuple[Path, ModuleType]:
    with _on_path(Path.cwd()):
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            found = None
        if found is None or found.origin is None:
            raise GemscError(
                f"there is no module {name}",
                help="give package.module:name, or the path of a file: path/model.py",
            )
        path = Path(found.origin)
        if path.suffix == ".py":
            _check_syntax(path)
        _refuse_constants(path, constants)
        return path, _import_named(name, path)


def _import_named(name: str, path: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        advice = f"`python -m {name}` shows the whole traceback"
        raise _failure(f"importing {name} fails", error, path, advice=advice) from error


def _check_syntax(path: Path) -> None:
    try:
        ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise GemscError(
            f"syntax error: {error.msg}",
            at=SourceLocation(str(path), error.lineno or 1),
            help=f"`python {path.name}` must run",
        ) from error
    except ValueError as error:
        raise GemscError(
            f"{path} is not Python: {error}", help="give the path of a Python file"
        ) from error


def _no_model(path: Path, module: ModuleType, name: str) -> GemscError:
    own = {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
    }
    classes = [
        key
        for key, value in own.items()
        if isinstance(value, type) and issubclass(value, nn.Module)
    ]
    if len(classes) == 1:
        advice = f"add model = {classes[0]}, or compile {path.name}:{classes[0]}"
    else:
        advice = f"define {name}(), which returns a torch.nn.Module"
    there = f"it has {', '.join(sorted(own))}" if own else "it defines nothing"
    return GemscError(f"no {name} in {path.name}; {there}", help=advice)


def _definition(path: Path, name: str) -> SourceLocation | None:
    """Return the last top-level line that defines or assigns a name."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    line = None
    for node in tree.body:
        if name in _defined(node):
            line = node.lineno
    return None if line is None else SourceLocation(str(path), line)


def _defined(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {part.id for part in targets if isinstance(part, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {alias.asname or alias.name for alias in names}
    return set()


def _failure(
    what: str,
    error: BaseException,
    path: Path,
    at: SourceLocation | None = None,
    advice: str | None = None,
) -> GemscError:
    """Return an error at the innermost line of the user's folder."""
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        if file.parent == path.parent and frame.lineno is not None:
            at = SourceLocation(frame.filename, frame.lineno)
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError) and error.name:
        advice = f"install {error.name}, or start gemsc where it can be imported"
    kind = type(error).__name__
    return GemscError(f"{what}: {kind}{': ' * bool(text)}{text}", at=at, help=advice)


@contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)
