"""Who may import whom; a rank at run time loads nothing of the compiler."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from size import tree

import gemsc
import gemsc.runtime

ROOT = Path(__file__).parents[2]

# The rooms of the house, each a folder or a module at the top: the lowest floor first,
# with what it may import. A room imports only rooms that stand above it in this list.
RUNTIME = tuple(f"runtime.{room}" for room in ("transport", "process", "tiles"))
IR = ("errors", "base", "ir.operators", "ir")
COSTS = (*IR, "costs")
PLANNER = (
    *(*COSTS, "messages", "options", "plan", "plan_tables"),
    *("schedules", "planner"),
)
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "base": ("errors",),
    "weights": ("errors", "base"),
    "source": ("errors", "base"),
    "slides": ("errors", "base"),
    "datasets": ("errors", "base"),
    "nn": (),
    "options": ("errors", "base"),
    "plan_tables": ("errors", "base"),
    "plan": ("errors", "base", "plan_tables"),
    "user_model": (*("errors", "base", "weights", "source", "slides", "datasets"),),
    "messages": ("errors", "base"),
    "schedules": ("errors", "base", "messages"),
    "runtime.transport": ("errors", "base", "messages"),
    "runtime.process": ("errors", "base", "runtime.transport"),
    "runtime.tiles": ("errors", "base", "nn", "messages", "runtime.transport"),
    "runtime.memory": ("errors", "base", *RUNTIME),
    "runtime.data": (
        *("errors", "base", "slides", "datasets", "messages", "plan_tables", "plan"),
        *("runtime.transport", "runtime.process"),
    ),
    "runtime.worker": (
        *("errors", "base", "weights", "source", "messages", "plan"),
        *(*RUNTIME, "runtime.memory", "runtime.data"),
    ),
    "runtime.checkpoint": (
        *("errors", "base", "weights", "runtime.process", "runtime.worker"),
    ),
    "runtime.training": (
        *("errors", "base", "weights", "source", "slides", "messages", "plan"),
        *(*RUNTIME, "runtime.memory", "runtime.data", "runtime.worker"),
        *("plan_tables", "user_model", "datasets", "runtime.checkpoint"),
    ),
    # what generated files import: names out of the rooms above
    "runtime": (
        *("base", "messages", "runtime.tiles", "runtime.memory", "runtime.data"),
        *("runtime.worker", "runtime.training"),
    ),
    # an operation on tiles is one function for the graph and for a rank
    "ir.operators": ("nn",),
    "ir": ("errors", "base", "nn", "messages", "runtime.tiles", "ir.operators"),
    "costs": (*IR, "messages"),
    "frontend": (*COSTS, "runtime.tiles"),
    "planner": PLANNER,
    "compilation": ("errors", "base", "weights", "ir", "plan", "schedules"),
    "passes.spatial": (*COSTS, "nn", "messages", "runtime.tiles"),
    "passes.spatial.rules": (
        *(*COSTS, "nn", "messages", "runtime.tiles", "passes.spatial"),
    ),
    "passes.shards": (
        *(*COSTS, "nn", "messages", "runtime.tiles", "passes.spatial"),
        "passes.spatial.rules",
    ),
    "passes.branches": (
        *(*COSTS, "messages", "runtime.tiles", "passes.spatial"),
        *("passes.spatial.rules", "passes.shards"),
    ),
    "passes": (
        *(*PLANNER, "passes.spatial", "passes.spatial.rules", "passes.shards"),
        *("passes.branches", "runtime.tiles"),
    ),
    "passes.constants": (*COSTS, "passes"),
    "passes.checks": (*IR, "passes", "passes.spatial"),
    "search": PLANNER,
    # what is proved of a file is what a rank reads in it
    "codegen": (
        *(*PLANNER, "weights", "compilation"),
        *("runtime", "runtime.tiles", "runtime.worker"),
    ),
    "importers": (*IR, "nn", "weights", "codegen"),
    "importers.onnx.operators": ("errors", "nn", "importers"),
    "importers.onnx": (
        *("errors", "base", "nn", "frontend", "importers"),
        "importers.onnx.operators",
    ),
    "importers.keras": ("errors", "base", "nn", "codegen", "importers"),
    "viz": (*PLANNER, "search"),
    "lowering": (
        *PLANNER,
        "compilation",
        "frontend",
        "passes",
        "passes.constants",
        "passes.checks",
    ),
    "launch": (
        *("errors", "base", "options", "plan"),
        *("runtime.process", "runtime.checkpoint", "runtime.training"),
    ),
    "verify": (
        *("errors", "base", "weights", "slides", "plan", "user_model", "launch"),
        # one step runs before a program is given out
        *("ir", "compilation", "codegen"),
        *("runtime.transport", "runtime.process", "runtime.data", "runtime.training"),
        "datasets",
    ),
    "verify.field": (
        *("errors", "base", "weights", "plan", "verify", "runtime.tiles"),
        *("runtime.transport", "runtime.data", "runtime.training"),
    ),
    "compiler": (
        *(*PLANNER, "compilation", "frontend", "passes", "passes.branches"),
        *("search", "codegen", "viz", "lowering", "verify", "weights"),
    ),
    "calibrate": (*COSTS, *RUNTIME, "runtime.memory", "launch"),
    "simulate": (
        *(*PLANNER, "compilation", "frontend", "passes", "search", "compiler"),
        *("user_model", "viz", "weights"),
    ),
    # users' names
    "": (
        "errors",
        "base",
        "options",
        "compiler",
        "runtime.data",
        "runtime.training",
        "verify",
        "weights",
        "slides",
        "datasets",
    ),
}
# the command may look at everything
MAY_IMPORT["cli"] = tuple(MAY_IMPORT)
# To import mpi4py.MPI starts MPI: only a rank may do so. PyTorch takes a second to
# load: what starts ranks does so only to ask for a GPU. Its distributed checkpoints
# take another one.
IN_FUNCTIONS = {
    ("gemsc.runtime.transport.launcher", "mpi4py"),
    ("gemsc.runtime.training.arguments", "gemsc.runtime.process.device"),
    ("gemsc.launch.start", "gemsc.runtime.process.device"),
    ("gemsc.runtime.training.logs", "torch.utils.tensorboard"),
    ("gemsc.runtime.training.program_directory", "gemsc.weights.first"),
    ("gemsc.weights.source", "gemsc.weights.distributed"),
    ("gemsc.cli.export", "gemsc.weights.distributed"),
}

OF_A_RANK = {*MAY_IMPORT["runtime"], *MAY_IMPORT["runtime.training"]}
OF_A_RANK |= {"", "nn", "runtime"}
# each of them is where a process begins
MANY = {"main"}
LARGEST_ROOM, MOST_LOOSE_MODULES = 20, 8


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


def imports(
    node: ast.AST, *, in_function: bool = False, for_types: bool = False
) -> Iterator[tuple[str, bool, bool]]:
    """Yield what is imported, whether in a function, and whether for types alone."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, field, ()):
            for name in names_of(child):
                yield name, in_function, for_types
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports(
                child,
                in_function=in_function or is_function,
                for_types=for_types or is_for_types(child),
            )


@functools.cache
def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in sorted((ROOT / "gemsc").rglob("*.py"))
    }


@functools.cache
def imports_of(module: str) -> tuple[tuple[str, bool, bool], ...]:
    return tuple(imports(tree(modules()[module])))


def own_imports(module: str) -> set[str]:
    """Return what a module imports of ours, for types and in functions, too."""
    return {name for name, *_ in imports_of(module)} & modules().keys()


def room(module: str) -> str:
    """Return the folder of a module, or a module at the top, without `gemsc.`."""
    words = module.split(".")[1:]
    if modules()[module].name != "__init__.py" and len(words) > 1:
        words.pop()
    return ".".join(words)


def arrows() -> Iterator[tuple[str, str]]:
    """Yield which module imports which of another room, for types too."""
    for module in modules():
        for name in own_imports(module):
            if name != "gemsc" and room(name) != room(module):
                yield module, name


def test_each_room_imports_only_its_own_list():
    wrong = [
        f"{a} imports {b}" for a, b in arrows() if room(b) not in MAY_IMPORT[room(a)]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_arrow_runs_up():
    floors = list(MAY_IMPORT)
    for upper, lowers in MAY_IMPORT.items():
        if upper != "cli":
            for lower in lowers:
                at = floors.index(lower) - floors.index(upper)
                assert at < 0 or lower == upper, f"{upper} may not import {lower}"


def test_rooms_are_small():
    loose = [m for m in modules() if m.count(".") == 1 and room(m) == m[6:]]
    loose = [m for m in loose if modules()[m].name != "__init__.py"]
    assert len(loose) <= MOST_LOOSE_MODULES, loose
    sizes = Counter(path.parent for path in modules().values())
    large = {str(path): size for path, size in sizes.items() if size > LARGEST_ROOM}
    assert not large


OF_OPERATIONS = (
    *("passes.shards", "passes.spatial", "passes.spatial.rules"),
    *("runtime.tiles", "ir"),
)


def test_a_name_is_one_thing():
    """But for an operation: what it does, its rule and its function share a name."""
    places = defaultdict(set)
    for module in modules():
        of_tiles = room(module) in OF_OPERATIONS
        for node in tree(modules()[module]).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                is_operation = of_tiles and isinstance(node, ast.FunctionDef)
                places[node.name].add("tiles" if is_operation else module)
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not [name for name in twice if name[0] != "_" and name not in MANY]


@pytest.mark.slow
def test_no_two_modules_import_each_other():
    graph = {module: own_imports(module) for module in modules()}
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_imports_stand_at_the_top_of_a_file():
    wrong = []
    for module in modules():
        imported = imports_of(module)
        above = {name for name, in_function, for_types in imported if not in_function}
        wrong += [
            f"{module} imports {name} in a function"
            for name, in_function, _ in imported
            if name not in above and (module, name) not in IN_FUNCTIONS
        ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_no_import_is_relative():
    wrong = [
        module
        for module in modules()
        for node in ast.walk(tree(modules()[module]))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not wrong, "\n".join(wrong)


def test_a_rank_loads_nothing_of_the_compiler():
    modules = (
        "gemsc",
        "gemsc.runtime",
        "gemsc.runtime.training.train",
        "gemsc.runtime.training.train",
    )
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    ours = [name for name in loaded if name.split(".")[0] == "gemsc"]
    assert {*modules} <= {*ours}
    assert not [name for name in ours if room(name) not in OF_A_RANK]


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
