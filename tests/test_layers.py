"""Who may import whom; a rank at run time loads nothing of the compiler."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gemsc

ROOT = Path(__file__).parents[1]

# cli -> compiler -> {codegen passes frontend viz} -> planner -> {schedules ir} ->
# errors, and runtime apart. A part imports what stands in its row, and nothing else.
ERRORS = {"errors"}
HELPERS = {
    *ERRORS,
    "boxes",
    "cores",
    "digest",
    "draws",
    "dropout",
    "dtypes",
    "fingerprint",
    "lazy",
    "nests",
    "options",
    "plan",
    "recomputed",
    "rng",
    "toml_file",
    "units",
    "weighted",
}
IR = {*HELPERS, "ir"}
PLANNER = {*IR, "schedules", "planner"}
MAY_IMPORT = {
    "errors": set(),
    "": {"lazy"},
    **dict.fromkeys(HELPERS - ERRORS, ERRORS),
    "draws": {*ERRORS, "dtypes", "rng"},
    "unfilled": set(),
    "plan": {*ERRORS, "toml_file", "units"},
    "user_model": {*ERRORS, "nests", "rng"},
    "schedules": ERRORS,
    "ir": HELPERS,
    "planner": PLANNER,
    "compilation": PLANNER,
    **dict.fromkeys(("frontend", "passes", "viz"), PLANNER),
    "codegen": {*PLANNER, "compilation"},
    "runtime": {*HELPERS - {"options"}, "user_model"},
    "verify": {*HELPERS, "user_model", "runtime"},
    # a run is compared with what knows nothing of the runtime
    "plain_run": {*HELPERS, "user_model"},
    "verify_run": {*HELPERS, "user_model", "runtime", "verify", "plain_run"},
    "profiling": {*PLANNER, "runtime"},
    "staging": {*PLANNER, "compilation", "passes"},
    "search": {*PLANNER, "compilation", "passes", "staging"},
    "compiler": {
        *PLANNER,
        "compilation",
        "frontend",
        "passes",
        "staging",
        "search",
        "codegen",
        "viz",
        "user_model",
    },
}
MAY_IMPORT["simulate"] = {*MAY_IMPORT["compiler"], "compiler", "unfilled"}
# the command may look at everything
MAY_IMPORT["cli"] = {*MAY_IMPORT}
# Single modules that may do more, each for a reason.
EXCEPTIONS = {
    # weights are written by the code that reads them
    ("gemsc.codegen.package", "gemsc.runtime.weights"),
    # what is proved of a file is what a rank reads in it
    ("gemsc.codegen.read", "gemsc.runtime"),
    ("gemsc.codegen.read", "gemsc.runtime.exchange"),
    ("gemsc.codegen.read", "gemsc.runtime.tile_messages"),
    ("gemsc.codegen.read", "gemsc.runtime.worker"),
    # what a graph says of tiles is what a rank does with them
    ("gemsc.ir.tile_ops", "gemsc.runtime.grid"),
    # what is predicted of messages is counted on the messages that will be sent
    ("gemsc.planner.traffic", "gemsc.runtime.grid_message"),
    ("gemsc.planner.traffic", "gemsc.runtime.message"),
}
# To import mpi4py.MPI starts MPI: only a rank may do so. PyTorch takes a second to
# load: what starts ranks does so only to ask for a GPU.
IN_FUNCTIONS = {
    ("gemsc.runtime.mpi", "mpi4py"),
    ("gemsc.runtime.arguments", "gemsc.runtime.device"),
}

OF_A_RANK = MAY_IMPORT["runtime"] | {"", "runtime"}


def names_of(node: ast.AST) -> tuple[str, ...]:
    match node:
        case ast.Import(names=names):
            return tuple(alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names):
            inner = [f"{module}.{alias.name}" for alias in names]
            return tuple(dict.fromkeys(n if n in modules() else module for n in inner))
    return ()


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(node: ast.AST, *, deep: bool) -> Iterator[str]:
    """Yield what is imported, not counting what only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if is_for_types(child):
            continue
        yield from names_of(child)
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if deep or not is_function:
            yield from imports(child, deep=deep)


@functools.cache
def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in sorted((ROOT / "gemsc").rglob("*.py"))
    }


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def own_imports(module: str) -> set[str]:
    found = imports(tree(module), deep=False)
    return {name for name in found if name.split(".")[0] == "gemsc"}


def part(module: str) -> str:
    """Return the first word after `gemsc.`: a package, or a module on its own."""
    return [*module.split("."), ""][1]


def test_each_part_imports_only_what_lies_below_it():
    wrong = [
        f"{module} imports {name}"
        for module in modules()
        for name in own_imports(module)
        if part(name)  # `import gemsc` loads nothing
        and part(name) != part(module)
        and part(name) not in MAY_IMPORT[part(module)]
        and (module, name) not in EXCEPTIONS
    ]
    assert not wrong, "\n".join(wrong)


def test_every_exception_is_needed():
    assert {(m, n) for m, n in EXCEPTIONS if n in own_imports(m)} == EXCEPTIONS


def test_no_two_modules_import_each_other():
    graph = {module: own_imports(module) for module in modules()}
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_imports_stand_at_the_top_of_a_file():
    wrong = [
        f"{module} imports {name} in a function"
        for module in modules()
        for name in imports(tree(module), deep=True)
        if name not in set(imports(tree(module), deep=False))
        and (module, name) not in IN_FUNCTIONS
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_is_relative():
    wrong = [
        module
        for module in modules()
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not wrong


@pytest.mark.parametrize(
    "module", ["gemsc", "gemsc.runtime", "gemsc.runtime.train", "gemsc.runtime.load"]
)
def test_a_rank_loads_nothing_of_the_compiler(module):
    program = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    own = [name for name in loaded if name.split(".")[0] == "gemsc"]
    assert module in own
    assert not [name for name in own if part(name) not in OF_A_RANK]


def test_what_starts_ranks_loads_no_torch():
    program = "import sys, gemsc.cli.run; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("package", [gemsc, gemsc.runtime])
def test_every_public_name_is_there(package):
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018
