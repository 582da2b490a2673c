"""The text of model.py: valid, formatted, and nothing of the file but names in it."""

from __future__ import annotations

import ast
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gemsc.codegen.python_text import literal_text, one_line, parsed
from gemsc.codegen.writer import Writer
from gemsc.importers.expression import write_statement
from gemsc.importers.network import ImportedNetwork
from gemsc.importers.sheet import Sheet
from gemsc.importers.weight import constant
from gemsc.importers.write import examples, model_source

torch.set_num_threads(1)
RULES = "E,F,W,I,UP"
EVIL = (
    '"""; import os; os.system("x")',
    "'''\n\\",
    'ends in "',
    "ends in \\",
    "日本語の名前" * 20,
    "a\u2028b\x00c\x1b[0m",
    "{x!r} %s",
    "# noqa",
    "",
)
NAMES = (
    *EVIL,
    *("class", "lambda", "self", "torch", "l", "O", "None", "print", "match"),
    *("__init__", "__secret", "forward", "training", "weight", "1x", "a.b", "a.b.c"),
    *("keys", "type", "x", "x", "x_2", "_of", "T", "Tensor", "Path", "F.pad"),
    "block/conv" * 30,
    "deep." * 12 + "layer",
)


def checked(text: str, folder: Path, rules: str = RULES) -> str:
    """Make sure that the tools leave a file alone."""
    (folder / "model.py").write_text(text, encoding="utf-8")
    ruff = shutil.which("ruff") or str(Path(sys.executable).with_name("ruff"))
    for words in (["check", "--select", rules, "--ignore-noqa"], ["format", "--diff"]):
        done = subprocess.run(
            [ruff, *words, "--isolated", "--no-cache", "model.py"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return text


def module_of(text: str) -> ModuleType:
    module = ModuleType("model")
    exec(compile(text, "model.py", "exec"), vars(module))
    return module


def numbers(*shape: int) -> Any:
    return constant(np.ones(shape, np.float32))


def linear(sheet: Sheet, path: str, value: object) -> str:
    layer = sheet.layer(
        path, nn.Linear(3, 3), {"weight": numbers(3, 3), "bias": numbers(3)}
    )
    return f"{layer}({value})"


class NoTensors:
    files = ()

    @property
    def table(self) -> Any:
        return {}

    def read(self, name: str) -> Any:
        raise AssertionError

    def write_copy(self, path: Any, changed: Any) -> None:
        raise AssertionError


def network(*sheets: Sheet, **more: Any) -> ImportedNetwork:
    return ImportedNetwork([*sheets], NoTensors(), **more)


def odd_network() -> ImportedNetwork:
    """Return one whose layers, values, inputs and classes have all of the names."""
    inner = Sheet('"""Evil', EVIL[0], "x")
    h = inner.input("class", (2, 3), torch.float32)
    inner.returns(str(inner.line("self", f"torch.relu({h})")))
    other = Sheet("Tensor", EVIL[2], "x")
    h = other.input("forward", (2, 3), torch.float32)
    with other.place(EVIL[0]):
        other.line("unused", f"F.pad({h}, (1, 1))")
        a, b = other.unpack(["l" * 90, "_"], f"{h}.split([1, 2], 1)")
    other.returns(f"({a}, {h})")
    sheet = Sheet("model", EVIL[3], "x")
    inputs = [sheet.input(name, (2, 3), torch.float32) for name in NAMES]
    values = []
    for name, value in zip(NAMES, inputs, strict=True):
        with sheet.place(f"Dense '{name}'"):
            y = sheet.line(name, linear(sheet, name, value))
            path = f"{name}.inner"
            y = sheet.line(name, f"{sheet.network(path, inner)}({y})")
            trained = sheet.tensor(name, (3,), numbers(3))
            kept = sheet.tensor(name, (1,), numbers(1), trained=False)
            values.append(sheet.line(name, f"({y} + {trained}) * {kept} ** 2"))
    split = sheet.network("split", other)
    a, b = sheet.unpack(["a" * 47, "b" * 47], f"{split}({values[0]})")
    long = sheet.line("sum", " + ".join(map(str, values)))
    both = sheet.line("cat", f"torch.cat([{', '.join(map(str, values))}], dim=1)")
    keys = {name: value for name, value in zip(NAMES, values, strict=True)}
    pairs = ", ".join(f"{literal_text(k[:20])}: {v}" for k, v in keys.items())
    sheet.returns(f"{{'a b': ({a}, {b}), 'c': [{long}, {both}], **{{{pairs}}}}}")
    return network(inner, other, sheet)


def test_odd_names_make_a_file_that_tools_leave_alone(tmp_path: Path) -> None:
    odd = odd_network()
    text = checked(model_source(odd, EVIL[0], "0" * 64), tmp_path)
    assert text == model_source(odd, EVIL[0], "0" * 64)
    tree = ast.parse(text)
    called = {
        n.func.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    classes = [n.name for n in tree.body if isinstance(n, ast.ClassDef)]
    called = {name for name in called if not re.fullmatch(r"part_\d+", name)}
    assert called <= {"super", "load_file", "Path", *classes}
    assert len(classes) == 3
    assert "unused" not in text
    module = module_of(text)
    model = getattr(module, classes[-1])()
    assert model.state_dict().keys() == odd.model.root.state_dict().keys()
    assert model.state_dict().keys() >= odd.model.weights.keys()
    state = {k: torch.rand(v.shape) for k, v in model.state_dict().items()}
    model.load_state_dict(state)
    odd.model.root.to_empty(device="cpu").load_state_dict(state)
    inputs = [torch.rand(2, 3) for _ in NAMES]
    ours, theirs = model(*inputs), odd.model.root(*inputs)
    assert ours.keys() == theirs.keys()
    for key in ours:
        for x, y in zip(ours[key], theirs[key], strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("seed", range(3))
def test_expressions_are_as_ruff_formats_them(seed: int, tmp_path: Path) -> None:
    rng, writer = random.Random(seed), Writer()
    count = 0

    def fresh() -> str:
        nonlocal count
        count += 1
        return f"part_{count}"

    for text in ("import torch", "import torch.nn.functional as F", "", ""):
        writer.line(text)
    with writer.block("def forward(self, x, y, stem, other):"):
        for index in range(150):
            text = expression(rng, 3)
            node = parsed(text)
            assert ast.dump(parsed(one_line(node))) == ast.dump(node)
            note = rng.choice(["", "", "Conv 'a'", f"Conv2D '{'conv2_block' * 4}'"])
            write_statement(writer, f"value_{index} = ", node, fresh, note)
        writer.line(f"return {', '.join(f'value_{index}' for index in range(3))}")
    checked(writer.text(), tmp_path, "E")


def expression(rng: random.Random, depth: int) -> str:
    """Return an expression as a reader could write it, and odder ones."""

    def inner() -> str:
        return expression(rng, depth - 1)

    def several(most: int) -> str:
        return ", ".join(inner() for _ in range(rng.randrange(1, most)))

    kind = rng.randrange(15) if depth else 0
    name = rng.choice(["x", "y", "stem", "a" * rng.randrange(1, 40)])
    layer = "self" + "".join(
        rng.choice([".conv", '["0"]', "." + "q" * rng.randrange(1, 25)])
        for _ in range(rng.randrange(1, 4))
    )
    layer = layer.replace('self["', 'self.layers["')
    bounds = ["1:", "::2", "a+1:", "-1:", "x.a:3", "None", "...", "1:-1:2", "a:b+1:c"]
    constants = ["1", "0.5", "-1", "1e-05", "None", "'it'", "'say \"x\"'", "'a\\\\b'"]
    return {
        0: name if rng.random() < 0.7 else rng.choice(constants),
        1: f"{layer}({several(4)})" if kind == 1 else "",
        2: f"{layer}({name})",
        3: f"F.pad({several(3)}, mode='reflect')" if kind == 3 else "",
        4: f"({inner()}).permute(0, 2, 3, 1)" if kind == 4 else "",
        5: f"({inner()}){rng.choice('+-*/@%')}({inner()})" if kind == 5 else "",
        6: f"({name})**({rng.choice(['2', '-1', '0.5', name, layer])})",
        7: f"-({inner()})" if kind == 7 else "",
        8: f"({inner()})[:, {rng.choice(bounds)}]" if kind == 8 else "",
        9: f"({several(9)},)" if kind == 9 else "",
        10: f"[{several(9)}]" if kind == 10 else "",
        11: f"(({inner()})<({inner()}))" if kind == 11 else "",
        12: f"(({inner()}) if ({inner()}) else ({inner()}))" if kind == 12 else "",
        13: f"torch.cat([{several(9)}], dim=1)" if kind == 13 else "",
        14: f"torch.cat(({name}, {name}), dim=1)[:, 0]",
    }[kind]


@pytest.mark.parametrize(
    "value",
    [*EVIL, None, True, 1, -2.5, 1e-7, [1, [2.0, "x"]], {"a": (1,), "b": {}}, "😀"],
)
def test_a_literal_is_the_value_again(value: Any) -> None:
    text = literal_text(value)
    assert "\n" not in text
    assert ast.literal_eval(text) == value


def test_a_literal_of_an_object_is_refused() -> None:
    with pytest.raises(TypeError, match="no literal"):
        literal_text({"a": [torch.float32]})
    assert literal_text(float("inf")) == 'float("inf")'


def test_the_annotation_says_what_forward_returns(tmp_path: Path) -> None:
    for result, kind in {
        "{x}": "Tensor",
        "({x},)": "tuple[Tensor]",
        "({x}, {x})": "tuple[Tensor, ...]",
        "[{x}, {x}]": "list[Tensor]",
        "{{'a': {x}, 'b': [{x}]}}": "dict[str, Tensor | list[Tensor]]",
        "({x}, [{x}])": "tuple[Tensor, list[Tensor]]",
    }.items():
        sheet = Sheet("Net", "a network", "x")
        x = sheet.input("x", (2, 3), torch.float32)
        sheet.returns(result.format(x=x))
        text = checked(model_source(network(sheet), "x.onnx", "0" * 64), tmp_path)
        assert f"def forward(self, x: Tensor) -> {kind}:" in text


def test_notes_are_written_where_the_line_does_not_say_it() -> None:
    sheet = Sheet("Net", "a network", "x")
    x = sheet.input("x", (2, 3), torch.float32)
    with sheet.place("Dense 'stem'"):
        y = sheet.line("stem", linear(sheet, "stem", x))
    with sheet.place("Activation 'act/1'"):
        y = sheet.line("y", f"{y} * 2")
        y = sheet.line("y", f"torch.relu({y})")
    sheet.returns(str(y))
    text = model_source(network(sheet), "x.onnx", "0" * 64)
    assert "        stem = self.stem(x)\n" in text
    assert "        y = stem * 2  # Activation 'act/1'\n" in text
    assert "        y_2 = torch.relu(y)\n" in text  # the same place


def test_examples_of_indices_are_rows_of_their_table() -> None:
    inner = Sheet("Inner", "a part", "x")
    ids = inner.input("ids", (2, 5), torch.int64)
    table = nn.Embedding(70, 4)
    y = inner.line("y", f"{inner.layer('e', table)}({ids}[:, 1:] + 1)")
    inner.returns(str(y))
    sheet = Sheet("Net", "a network", "x")
    shape = (2, 5)
    a = sheet.input("a", shape, torch.int64)
    b = sheet.input("b", shape, torch.int32)
    mask = sheet.input("mask", shape, torch.int64)
    image = sheet.input("image", shape, torch.float16)
    scalar = sheet.input("scalar", (), torch.float32)
    rows = sheet.input("rows", (3,), torch.int64)
    as_numbers = sheet.input("numbers", shape, torch.float32)
    weights = sheet.tensor("table", (9, 4), numbers(9, 4))
    y = sheet.line("y", f"{sheet.network('inner', inner)}({a})")
    c = sheet.line("c", f"{b}.reshape(-1).to(torch.int64)")
    z = sheet.line("z", f"F.embedding({c}, {weights}).sum() * {mask}.sum()")
    t = sheet.line("t", f"{weights}[{rows}].sum() + {image}.sum() + {scalar}")
    d = sheet.line("d", f"{as_numbers}.to(torch.int64)")
    u = sheet.line("u", f"{sheet.layer('f', nn.Embedding(8, 4))}({d})")
    sheet.returns(f"({y}, {z}, {t}, {u})")
    assert examples(sheet) == [
        "torch.randint(70, (2, 5))",
        "torch.randint(9, (2, 5), dtype=torch.int32)",
        "torch.ones(2, 5, dtype=torch.int64)",
        "torch.rand(2, 5, dtype=torch.float16)",
        "torch.rand(())",
        "torch.randint(9, (3,))",
        "torch.randint(8, (2, 5), dtype=torch.float32)",
    ]
    for text in examples(sheet):
        assert isinstance(eval(text), torch.Tensor)


def test_layers_of_the_user_are_written_as_calls(tmp_path: Path) -> None:
    sheet = Sheet("Net", "a network", "x")
    x = sheet.input("x", (2, 3), torch.float32)
    settings = {"rate": 0.5, "name": 'a "b"', "sizes": [1, 2], "more": {"x": None}}
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    weights = {"0.weight": numbers(3, 3), "0.bias": numbers(3)}
    text = f"layers.my_scale({literal_text(settings)})"
    place = sheet.layer("own", module, weights, frozen=("0.bias",), text=text)
    sheet.returns(str(sheet.line("y", f"{place}({x})")))
    (tmp_path / "layers.py").write_text(
        "from torch import nn\n\n\ndef my_scale(settings):\n"
        "    assert settings['name'] == 'a \"b\"'\n"
        "    return nn.Sequential(nn.Linear(3, 3), nn.ReLU())\n"
    )
    net = network(sheet, imports=["import layers", "from collections import Counter"])
    text = checked(model_source(net, "x.keras", "0" * 64), tmp_path)
    assert "\n\nif __package__:\n    from . import layers\nelse:\n" in text
    assert "Counter" not in text  # which nothing uses
    assert 'self.own.get_parameter("0.bias").requires_grad_(False)' in text
    assert "meta" not in text  # what a user's layer computes has to be there


def test_tensors_that_are_one_in_the_file_are_one_here(tmp_path: Path) -> None:
    inner = Sheet("Inner", "a part", "x")
    x = inner.input("x", (2, 3), torch.float32)
    y = inner.line("y", linear(inner, "a", x))
    y = inner.line("y", linear(inner, "b.c", y))
    inner.tie('self.b["c"].weight', "self.a.weight")
    inner.returns(str(y))
    sheet = Sheet("Net", "a network", "x")
    x = sheet.input("x", (2, 3), torch.float32)
    sheet.returns(str(sheet.line("y", f"{sheet.network('deep.inner', inner)}({x})")))
    net = network(inner, sheet)
    module = module_of(checked(model_source(net, "x", "0" * 64), tmp_path))
    vars(module)["__file__"] = str(tmp_path / "model.py")
    state = sheet.root.state_dict().items()
    weights = {name: torch.rand(tensor.shape) for name, tensor in state}
    save_file(weights, tmp_path / "weights.safetensors")
    part = module.model().deep["inner"]
    assert part.b["c"].weight is part.a.weight
    assert len([*part.parameters()]) == 3
