"""The text of model.py: plain PyTorch that a person would have written.

It is the same for the same file, and as `ruff format` leaves it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemsc.codegen.python_text import one_line, parsed
from gemsc.codegen.writer import Names, Writer, comment, in_docstring
from gemsc.errors import InternalError
from gemsc.importers.expression import names_in, write_statement
from gemsc.importers.network import ImportedNetwork
from gemsc.importers.sheet import Line, Sheet, Symbol, after_parent, sheet_of
from gemsc.ir.layers import empty_source, layer_source

IMPORTS = (
    "import math",
    "from pathlib import Path",
    "import gemsc.nn",
    "import torch",
    "import torch.nn.functional as F",
    "from safetensors.torch import load_file",
    "from torch import Tensor, nn",
)
INSTALLED = ("gemsc", "numpy", "safetensors", "torch")
LONGEST_NOTE = 60  # columns
LONGEST_TARGETS = 60
MOST_KINDS = 4  # in an annotation
LONGEST_PLACE = 48  # columns of self.a["b"]["c"] in __init__


def model_source(network: ImportedNetwork, file: str, digest: str) -> str:
    """Return the text: imports, classes, model() and example_inputs(), the rest.

    `file` and `digest` are the name and the SHA-256 of what was imported.
    """
    others = [ast.parse(text) for text in (*network.functions, *network.imports)]
    classes = Names([*_bound(map(ast.parse, IMPORTS)), "model", "example_inputs"])
    for name in _bound(others):
        classes.unique(name)
    names = {
        id(sheet.root): classes.unique(sheet.name[:48]) for sheet in network.sheets
    }
    body = Writer()
    for sheet in network.sheets:
        about = [f"SHA-256 {digest[:16]}...", *counts(sheet.root)]
        _class(body, sheet, names, about if sheet is network.model else [])
        body.line()
        body.line()
    _model(body, network, names[id(network.model.root)])
    body.line()
    body.line()
    with body.block("def example_inputs() -> tuple[Tensor, ...]:"):
        body.docstring("Return one micro-batch of inputs, of random numbers.")
        items = examples(network.model)
        body.bracketed("return (", items, ",)" if len(items) == 1 else ")")
    for text in network.functions:
        body.line()
        body.line()
        body.lines(text)
    text = body.text()
    head = Writer()
    head.docstring(_plain(f"{file}, imported by gemsc."))
    head.line()
    head.line("from __future__ import annotations")
    _imports(head, [*IMPORTS, *network.imports], names_in(ast.parse(text)))
    head.line()
    head.line()
    return head.text().rstrip("\n") + "\n\n\n" + text


def counts(root: nn.Module) -> list[str]:
    """Return lines that say how many parameters and buffers there are."""
    parameters = dict(root.named_parameters())
    frozen = [p for p in parameters.values() if not p.requires_grad]
    buffers = [b for name, b in root.named_buffers() if "batches_tracked" not in name]
    first = _counted(parameters.values(), "parameter")
    if frozen:
        first += f", {_numbers(frozen):,} of them not trained"
    return [first, *([_counted(buffers, "number") + " as buffers"] if buffers else [])]


def _counted(tensors: Iterable[Tensor], word: str) -> str:
    tensors = list(tensors)
    numbers, count = _numbers(tensors), len(tensors)
    plural, tensor = "s" * (numbers != 1), "tensor" + "s" * (count != 1)
    return f"{numbers:,} {word}{plural} in {count:,} {tensor}"


def _numbers(tensors: Iterable[Tensor]) -> int:
    return sum(prod(tensor.shape) for tensor in tensors)


def _plain(text: str) -> str:
    """Return text that neither ends a docstring nor is changed by a formatter."""
    return in_docstring(text).replace('"', "'").strip()


# --------------------------------------------------------------------- imports


def _imports(writer: Writer, lines: Iterable[str], used: set[str]) -> None:
    """Write the lines that are used: first what Python brings, each part sorted.

    Modules of the user's lie beside model.py, whether that is imported or run.
    """
    parts: list[list[tuple[bool, str, str]]] = [[], [], []]
    for line in dict.fromkeys(lines):
        (node,) = ast.parse(line).body
        if not _bound([ast.Module([node], [])]) & used:
            continue
        is_from = isinstance(node, ast.ImportFrom)
        module = line.split()[1]
        top = module.partition(".")[0]
        part = 0 if top in sys.stdlib_module_names else 1 if top in INSTALLED else 2
        parts[part].append((is_from, module, line))
    *others, of_user = parts
    for part_lines in filter(None, others):
        writer.line()
        for _, _, line in sorted(part_lines):
            writer.line(line)
    if of_user:
        writer.line()
        with writer.block("if __package__:"):
            for _, _, line in sorted(of_user):
                writer.line(f"from . {line}")
        with writer.block("else:"):
            for _, _, line in sorted(of_user):
                writer.line(line)


def _bound(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names of what is imported and of functions."""
    names: set[str] = set()
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {
                    (alias.asname or alias.name).partition(".")[0]
                    for alias in node.names
                }
            elif isinstance(node, ast.FunctionDef):
                names.add(node.name)
    return names


# --------------------------------------------------------------------- classes


def _class(
    writer: Writer, sheet: Sheet, names: Mapping[int, str], about: Iterable[str]
) -> None:
    with writer.block(f"class {names[id(sheet.root)]}(nn.Module):"):
        _docstring(writer, _plain(sheet.doc) or "It has no description.", about)
        writer.line()
        with writer.block("def __init__(self) -> None:"):
            writer.line("super().__init__()")
            _Held(writer, sheet, names).write(sheet.root, "self")
            for text, other in sheet.ties:
                writer.line(f"{text} = {other}")
        writer.line()
        _forward(writer, sheet)


def _docstring(writer: Writer, text: str, about: Iterable[str]) -> None:
    lines = [comment(line, writer.room)[2:] for line in about]
    if not lines:
        writer.docstring(comment(text, writer.room - 4)[2:])
        return
    writer.line('"""' + comment(text, writer.room - 1)[2:])
    writer.line()
    for line in lines:
        writer.line(line)
    writer.line('"""')


class _Held:
    """Writes what a class holds: its layers, and tensors of its own."""

    def __init__(self, writer: Writer, sheet: Sheet, names: Mapping[int, str]) -> None:
        self.writer, self.sheet, self.names = writer, sheet, names
        self.locals = Names(["self", "nn", "torch", "gemsc"])

    def write(self, module: nn.Module, place: str) -> None:
        """Write what a module holds, which stands in a place."""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                source = f"nn.Parameter({empty_source(parameter)})"
                self.assign(f"{place}.{name}", source)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                self.assign(f"{place}.{name}", f"nn.Buffer({empty_source(buffer)})")
        for name, child in module._modules.items():
            if child is None:
                continue
            there = place + after_parent(name, module)
            if isinstance(child, nn.ModuleDict):
                self.folder(child, there)
            else:
                self.layer(child, there)

    def folder(self, module: nn.Module, place: str) -> None:
        """Write a ModuleDict and what is in it."""
        self.writer.line(f"{place} = nn.ModuleDict()")
        if len(place) > LONGEST_PLACE:
            name = self.locals.unique("part")
            self.writer.line(f"{name} = {place}")
            place = name
        self.write(module, place)

    def layer(self, module: nn.Module, place: str) -> None:
        """Write a layer, or an object of another class."""
        if id(module) in self.names:
            self.assign(place, f"{self.names[id(module)]}()")
            return
        source = self.sheet.texts.get(module) or layer_source(module)
        if source is None:
            raise InternalError(f"{type(module).__name__} has no text")
        self.assign(place, source)
        frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
        if len(frozen) == sum(1 for _ in module.parameters()):
            frozen = frozen and [""]
        for name in frozen:
            dot = "." * bool(name)
            if "." in name:
                name = f'get_parameter("{name}")'
            self.writer.line(f"{place}{dot}{name}.requires_grad_(False)")

    def assign(self, place: str, source: str) -> None:
        """Write that something stands in a place."""
        fresh = partial(self.locals.unique, "part")
        write_statement(self.writer, f"{place} = ", parsed(source), fresh)


# --------------------------------------------------------------------- forward


def _forward(writer: Writer, sheet: Sheet) -> None:
    arguments = ["self", *(f"{value}: Tensor" for value in sheet.inputs)]
    kind = _annotation(sheet.empty(sheet.result))
    writer.bracketed("def forward(", arguments, f") -> {kind}:")
    lines = sheet.used_lines()
    known = {"self", *(value.text for value in sheet.inputs)}
    for line, tree in lines:
        known |= {*line.names, *names_in(tree)}
    fresh = partial(Names([*known]).unique, "part")
    with writer.indented():
        before = ""
        for line, tree in lines:
            note = _note(line) if line.note != before else ""
            before = line.note
            targets = ", ".join(line.names)
            if len(line.names) > 1 and len(targets) > LONGEST_TARGETS:
                parts = fresh()
                write_statement(writer, f"{parts} = ", tree, fresh, note)
                for index, name in enumerate(line.names):
                    if name != "_":
                        writer.line(f"{name} = {parts}[{index}]")
            else:
                write_statement(writer, f"{targets} = ", tree, fresh, note)
        write_statement(writer, "return ", parsed(sheet.result), fresh)


def _note(line: Line) -> str:
    """Return what a line comes from, unless its text has that name."""
    words = set(re.findall(r"\w+", f"{line.text} {' '.join(line.names)}"))
    end = f"/{line.note.partition(' ')[0]}"  # torch.onnx writes /encoder/conv1/Conv
    paths = (name.removesuffix(end) for name in re.findall(r"'([^']*)'", line.note))
    named = [re.sub(r"\W", "_", path.rpartition("/")[2]) for path in paths]
    if not line.note or (named and words.issuperset(named)):
        return ""
    return comment(line.note, LONGEST_NOTE)[2:]


def _annotation(value: object) -> str:
    """Return the type of what forward returns."""
    if isinstance(value, Tensor):
        return "Tensor"
    if isinstance(value, dict):
        return f"dict[str, {_either(value.values())}]"
    if isinstance(value, list):
        return f"list[{_either(value)}]"
    if isinstance(value, tuple):
        kinds = [_annotation(item) for item in value]
        if len(kinds) > 1 and (len({*kinds}) == 1 or len(kinds) > MOST_KINDS):
            return f"tuple[{_either(value)}, ...]"
        return f"tuple[{', '.join(kinds)}]"
    raise InternalError(f"a network returns {type(value).__name__}")


def _either(values: Iterable[object]) -> str:
    return " | ".join(dict.fromkeys(map(_annotation, values)))


# -------------------------------------------------------------- example_inputs()


def examples(sheet: Sheet) -> list[str]:
    """Return an expression for each input of a network, of random numbers.

    Where an input of integers picks rows of a table, no row is beyond the table's end.
    """
    known = _bounds(sheet)
    return [_example(value, known.get(value.text)) for value in sheet.inputs]


def _example(value: Symbol, bound: int | None) -> str:
    sizes, dtype = ", ".join(map(str, value.shape)) or "()", value.tensor.dtype
    usual = torch.float32 if bound is None else torch.int64
    kind = "" if dtype is usual else f", dtype={dtype}"
    if bound is not None:
        return f"torch.randint({bound}, {value.shape}{kind})"
    is_mask = not (dtype.is_floating_point or dtype.is_complex)  # or lengths
    return f"torch.{'ones' if is_mask else 'rand'}({sizes}{kind})"


def _bounds(sheet: Sheet) -> dict[str, int]:
    """Return below which number the indices have to be, by the names of the values."""
    bounds: dict[str, int] = {}
    for line, tree in reversed(sheet.used_lines()):
        limits = [bounds[name] for name in line.names if name in bounds]
        flows = [(tree, bound) for bound in limits]
        for part, bound in [*flows, *_indices(sheet, tree)]:
            for name in names_in(part):
                bounds[name] = min(bound, bounds.get(name, bound))
    return bounds


def _indices(sheet: Sheet, tree: ast.expr) -> Iterator[tuple[ast.expr, int]]:
    """Yield the parts of a line that pick rows of a table, and how many it has."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=function, args=arguments):
                rows = _rows(sheet, sheet.empty(one_line(function)), arguments)
                for part, bound in zip(arguments, rows, strict=False):
                    if bound is not None:
                        yield part, bound
            case ast.Subscript(value=value, slice=index) if names_in(index):
                table = sheet.empty(one_line(value))
                if isinstance(table, Tensor) and not isinstance(index, ast.Tuple):
                    yield index, table.shape[0]


def _rows(sheet: Sheet, called: Any, arguments: list[ast.expr]) -> list[int | None]:
    """Return below which number each argument of a call has to be, where it does."""
    if isinstance(called, nn.Embedding):
        return [called.num_embeddings]
    if called is F.embedding and len(arguments) > 1:
        return [sheet.empty(one_line(arguments[1])).shape[0]]
    if (inner := sheet_of(called)) is not None:
        bounds = _bounds(inner)
        return [bounds.get(value.text) for value in inner.inputs]
    return []


# --------------------------------------------------------------------- model()


def _model(writer: Writer, network: ImportedNetwork, name: str) -> None:
    file = 'Path(__file__).with_name("weights.safetensors")'
    with writer.block("def model() -> nn.Module:"):
        writer.docstring("Return the network with the weights of the file.")
        if any(sheet.texts for sheet in network.sheets):  # layers of the user's
            writer.line(f"network = {name}()")
            writer.line(f"network.load_state_dict(load_file({file}))")
        else:
            with writer.block('with torch.device("meta"):'):
                writer.line(f"network = {name}()")
            writer.line(f"weights = load_file({file})")
            writer.line("network.load_state_dict(weights, assign=True)")
            for line in _ties(network):
                writer.line(line)
        writer.line("return network")


def _ties(network: ImportedNetwork) -> Iterator[str]:
    """Yield what makes one tensor again of those that a state_dict has twice."""
    for path, module in network.model.root.named_modules():
        if (sheet := sheet_of(module)) is None or not sheet.ties:
            continue
        place = "network"
        parent: nn.Module = network.model.root
        for name in filter(None, path.split(".")):
            place += after_parent(name, parent)
            parent = parent.get_submodule(name)
        for text, other in sheet.ties:
            yield f"{place}{text.removeprefix('self')} = " + (
                f"{place}{other.removeprefix('self')}"
            )
