"""Import the user's file, with other values for constants: `--set WIDTH=32`.

    WIDTH = 64        is read as        WIDTH = 32

The assignment is replaced before the file runs, so that all that uses the name sees the
new value. Values are literals; nothing else is ever evaluated.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from importlib.machinery import SourceFileLoader
from pathlib import Path
from threading import Lock
from types import CodeType, ModuleType
from typing import Any

from gemsc.base.fingerprint import names_at_run_time
from gemsc.errors import GemscError, SourceLocation

# before the name of a user's file whose own is that of an imported module
RENAMED = "gemsc_user_"
KINDS = (int, float, str, bool, tuple)


def import_source(
    spec: str, constants: Mapping[str, str]
) -> tuple[Path, ModuleType, str]:
    """Import `path/model.py:name` or `pkg.module:name`: its path, module and `name`.

    `name` is "model" where it is left out; `constants` have other values than there.

    Raises:
        GemscError: with the line, if it is not there or fails.
    """
    place, separator, name = spec.rpartition(":")
    if not (separator and name.isidentifier()):
        place, name = spec, "model"
    is_file = place.endswith(".py") or "/" in place
    load = _import_file if is_file else _import_module
    folder = os.getcwd()
    path, module = load(place, constants)
    if os.getcwd() != folder:
        os.chdir(folder)
        raise GemscError(
            f"importing {path.name} changes the working directory, on which the output "
            "paths of gemsc depend",
            help="do not change it; name files relative to the folder of the model's "
            "file: Path(__file__).parent / 'data'",
        )
    return path, module, name


def _import_file(place: str, constants: Mapping[str, str]) -> tuple[Path, ModuleType]:
    path = Path(place)
    if not path.is_file():
        raise GemscError(
            f"there is no file {path}",
            help="give the path of a Python file, or package.module:name",
        )
    if path.suffix != ".py":
        raise GemscError(f"{path} is not a Python file", help="give a .py file")
    path = path.resolve()
    _check_syntax(path)
    if (path.parent / "__init__.py").is_file():
        _refuse_constants(path, constants)
        return path, _import_of_package(path)
    name = _module_name(path)
    previous = sys.modules.get(name)
    try:
        put_on_path(path)
        return path, run_file(name, path, constants)
    except BaseException as error:
        if previous is None:
            del sys.modules[name]
        else:
            sys.modules[name] = previous
        if isinstance(error, KeyboardInterrupt | GemscError):
            raise
        advice = f"`python {path.name}` shows the whole traceback"
        raise user_failure(
            f"importing {path.name} fails", error, path, advice=advice
        ) from error


def _refuse_constants(path: Path, constants: Mapping[str, str]) -> None:
    if constants:
        raise GemscError(
            f"--set cannot change constants of {path.name}, which is in a package",
            help="move the constants that runs change into a separate file",
        )


def _import_of_package(path: Path) -> ModuleType:
    """Import a file under its name in its package, for its relative imports."""
    root = put_on_path(path)
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    return _import_named(name, path)


def put_on_path(path: Path) -> Path:
    """Let imports find what is beside a file first, as if Python had started with it.

    Also those in its functions, later. Return the folder that its package is in.
    """
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    _search_first(root, path.parent)
    return root


def _search_first(*folders: Path) -> None:
    first = [*dict.fromkeys(map(str, folders))]
    if sys.path[: len(first)] != first:
        sys.path[:] = first + [folder for folder in sys.path if folder not in first]


def _module_name(path: Path) -> str:
    """Return the file's name, or another one where an imported module has it."""
    taken = sys.modules.get(path.stem)
    if taken is None or getattr(taken, "__file__", None) == str(path):
        return path.stem
    return RENAMED + path.stem


def _import_module(name: str, constants: Mapping[str, str]) -> tuple[Path, ModuleType]:
    _search_first(Path.cwd())  # as `python -m`
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise GemscError(
            f"there is no module {name}",
            help="give package.module:name, or the path of a file: path/model.py",
        )
    path = Path(spec.origin)
    if path.suffix == ".py":
        _check_syntax(path)
    _refuse_constants(path, constants)
    return path, _import_named(name, path)


def _import_named(name: str, path: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        advice = f"`python -m {name}` shows the whole traceback"
        raise user_failure(
            f"importing {name} fails", error, path, advice=advice
        ) from error


def _check_syntax(path: Path) -> None:
    try:
        ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise syntax_error(path, error) from error
    except ValueError as error:
        raise GemscError(
            f"{path} is not Python: {error}", help="give the path of a Python file"
        ) from error


def syntax_error(path: Path, error: SyntaxError) -> GemscError:
    """Return an error at the line of a file that Python cannot read."""
    return GemscError(
        f"syntax error: {error.msg}",
        at=SourceLocation(str(path), error.lineno or 1),
        help=f"make `python {path.name}` run",
    )


def definition(path: Path, name: str) -> SourceLocation | None:
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


# what others call what a file may define, where it is spelled otherwise
_ALSO = {
    "criterion": "loss",
    "loss_fn": "loss",
    "test_dataset": "eval_dataset",
    "train_dataset": "dataset",
    "validation": "eval_dataset",
}


def unused(path: Path) -> Iterator[tuple[str, SourceLocation]]:
    """Yield names that a file defines at its top and does not use itself, and where."""
    tree = ast.parse(path.read_bytes())
    loaded = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            at = SourceLocation(str(path), node.lineno)
            yield from ((name, at) for name in sorted(_defined(node) - loaded))


def meant_by(name: str, lacking: Collection[str]) -> str:
    """Return which of the names that a file lacks another one may mean, "" if none."""
    close = get_close_matches(name.lower(), lacking, n=1, cutoff=0.75)
    meant = _ALSO.get(name.lower(), close[0] if close else "")
    return meant if meant in lacking else ""


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


_OF_LAUNCHER = ("RANK",), ("LOCAL_RANK",), ("WORLD_SIZE",)  # in the environment


def user_failure(
    what: str,
    error: BaseException,
    path: Path,
    at: SourceLocation | None = None,
    advice: str | None = None,
) -> GemscError:
    """Return an error at the innermost line of the user's folder."""
    file = path
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        if file.parent == path.parent and frame.lineno is not None:
            at = SourceLocation(frame.filename, frame.lineno)
    if isinstance(error, GemscError):  # of what gemsc gives them to call
        at, advice = error.at or at, error.help or advice
        return GemscError(f"{what}: {error.message}", at=at, help=advice)
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError) and error.name:
        advice = f"install {error.name}, or start gemsc where it can be imported"
    if isinstance(error, SystemExit) and error.code == 2:  # of a parser of arguments
        advice = (
            "gemsc gives the file no arguments: let its parser have defaults, or use "
            "constants, `WIDTH = 64`, for `gemsc compile --set WIDTH=32`"
        )
    of_launcher = isinstance(error, KeyError) and error.args[:1] in _OF_LAUNCHER
    if of_launcher or "torch/distributed/" in file.as_posix():
        advice = (
            "gemsc starts no process group and has its own ranks: leave out "
            "torch.distributed, or put what trains under "
            '`if __name__ == "__main__":`'
        )
    kind = type(error).__name__
    return GemscError(f"{what}: {kind}{': ' * bool(text)}{text}", at=at, help=advice)


_one_tree = Lock()  # for ranks that are threads: Python 3.11 parses one at a time


class ConstantsLoader(SourceFileLoader):
    """Loads a Python file with other values for some of its constants."""

    def __init__(self, name: str, path: Path, constants: Mapping[str, str]) -> None:
        """Take texts by name; without any, the file is loaded as it is."""
        super().__init__(name, str(path))
        self.constants = constants

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code, never a cached one: of other constants, or an older file.

        Python takes what it has cached of a file that is as long, and as old to the
        second.
        """
        source = Path(self.path).read_bytes()
        if not self.constants:
            return self.source_to_code(source, self.path)
        with _one_tree:
            return self._changed(source)

    def _changed(self, source: bytes) -> CodeType:
        tree = ast.parse(source, self.path)
        assigned = _assigned(tree)
        for name, text in self.constants.items():
            if name not in assigned:
                raise _unknown(Path(self.path), name, assigned)
            for statement in assigned[name]:
                statement.value = _new_value(Path(self.path), name, text, statement)
        return self.source_to_code(ast.fix_missing_locations(tree), self.path)


def split_constants(texts: list[str]) -> dict[str, str]:
    """Read `NAME=VALUE` each.

    Raises:
        GemscError: a text has another form.
    """
    constants = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.strip().isidentifier():
            raise GemscError(
                f"--set {text} is not NAME=VALUE",
                help="set a constant of the model's file: --set WIDTH=32",
            )
        constants[name.strip()] = value.strip()
    return constants


def check_run_constants(
    path: Path, constants: Mapping[str, str], compiled: Mapping[str, str]
) -> None:
    """Make sure that a run may change constants: the model does not use them.

    Those that were `compiled` with the same values do not change.

    Raises:
        GemscError: what was compiled may use one.
    """
    free = names_at_run_time(path)
    assigned = _assigned(ast.parse(path.read_bytes()))
    for name in constants:
        if name not in assigned:
            raise _unknown(path, name, assigned)
        if name not in free and compiled.get(name) != constants[name]:
            raise GemscError(
                f"{name} may be part of what was compiled: not only the data, the "
                "optimizer, the metrics and the hooks use it",
                at=SourceLocation(str(path), assigned[name][0].lineno),
                help=f"compile again with --set {name}={constants[name]}",
            )


def run_file(name: str, path: Path, constants: Mapping[str, str]) -> ModuleType:
    """Return a file as a module, which has its name as soon as it begins to run."""
    loader = ConstantsLoader(name, path, constants)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


def _assigned(tree: ast.Module) -> dict[str, list[Any]]:
    """Return the statements at the top that give a name a literal."""
    statements: dict[str, list[Any]] = {}
    for item in tree.body:
        match item:
            case ast.Assign(targets=[ast.Name(id=name)]):
                statements.setdefault(name, []).append(item)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                statements.setdefault(name, []).append(item)
    return {
        name: items
        for name, items in statements.items()
        if all(_literal(item.value) is not None for item in items)
    }


def _literal(value: ast.expr | str) -> Any:
    """Return the number, text, bool or tuple of them that is written; None if none."""
    try:
        literal = ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    parts = literal if isinstance(literal, tuple) else (literal,)
    return literal if all(isinstance(part, KINDS) for part in parts) else None


def _new_value(path: Path, name: str, text: str, statement: Any) -> ast.expr:
    """Return the value as it is written in the file, of the type of the old one."""
    old = _literal(statement.value)
    new = text if isinstance(old, str) else _literal(text)
    if isinstance(old, str) and isinstance(_literal(text), str):
        new = _literal(text)  # in quotes
    if isinstance(old, float) and type(new) is int:
        new = float(new)
    if type(new) is not type(old):
        raise GemscError(
            f"--set {name}={text}: {name} is {old!r}, of type {type(old).__name__}",
            at=SourceLocation(str(path), statement.lineno),
            help="give a value of that type",
        )
    made = ast.parse(repr(new), mode="eval").body
    return ast.copy_location(made, statement.value)


def _unknown(path: Path, name: str, assigned: Mapping[str, Any]) -> GemscError:
    close = get_close_matches(name, assigned, n=1)
    advice = "a constant is a number or a string that a line at the top assigns"
    if assigned:
        advice = f"it has {', '.join(assigned)}"
    at = None
    if close:
        advice = f"did you mean {close[0]}?"
        at = SourceLocation(str(path), assigned[close[0]][0].lineno)
    return GemscError(f"{path.name} has no constant {name}", at=at, help=advice)


def missing_model(path: Path, module: ModuleType, name: str, kind: type) -> GemscError:
    """Return the error for a file without a model, an object of a `kind`."""
    defined = {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
    }
    classes = [
        key
        for key, value in defined.items()
        if isinstance(value, type) and issubclass(value, kind)
    ]
    if len(classes) == 1:
        advice = f"add model = {classes[0]}, or compile {path.name}:{classes[0]}"
    else:
        advice = f"define {name}(), which returns a torch.nn.Module"
    there = f"it has {', '.join(sorted(defined))}" if defined else "it defines nothing"
    return GemscError(f"no {name} in {path.name}; {there}", help=advice)
