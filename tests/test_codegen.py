"""Rank files: what a person would have written, for whatever the user wrote."""

from __future__ import annotations

import ast
import importlib.util
import operator
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import networks
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS
from program_support import Net, X, against_one_process, blocks_of, mse, trunk, written
from ruff.__main__ import find_ruff_bin
from torch import Tensor, fx, nn

from gemsc.codegen.expressions import access, expression, is_attribute, literal, quoted
from gemsc.codegen.writer import Names, Writer, comment, split_arguments
from gemsc.compiler import Traced, compile, lower, trace
from gemsc.errors import GemscError
from gemsc.options import CompileOptions
from gemsc.verify.steps import TOLERANCE

EXACT = TOLERANCE[torch.float64]


def assert_formatted(folder: Path, files: dict[str, str] | None = None) -> None:
    """Let ruff look at the files of a program, or at the texts of some."""
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    paths = [str(path) for path in sorted(folder.glob("rank*.py"))]
    assert paths
    for words in (["format", "--diff"], ["check", "--select", "E,F,I"]):
        command = [find_ruff_bin(), *words, "--isolated", "--no-cache", *paths]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@cache
def traced(name: str) -> Traced:
    case = MODELS[name]
    return trace(
        case.build(),
        case.example_inputs,
        loss=case.loss,
        example_target=case.example_target,
        check=False,
    )


def files_of(name: str, **options: Any) -> dict[str, str]:
    return lower(traced(name), CompileOptions(**options)).rank_modules()


# Whole files


def test_the_files_of_a_unet(golden: Callable[[str, str], None]) -> None:
    program = compile(
        networks.FlatUNet(), (networks.PICTURE,), loss=mse,
        example_target=networks.PICTURE, ranks=3,
    )  # fmt: skip
    for name, text in program.rank_modules().items():
        golden(text, f"unet_{name}")


def test_the_files_of_a_unet_whose_blocks_keep_nothing(
    golden: Callable[[str, str], None],
) -> None:
    program = compile(
        networks.FlatUNet(), (networks.PICTURE,), loss=mse,
        example_target=networks.PICTURE, ranks=1,
        recompute=("down1", "up3"), offload=("down2", "up1"),
    )  # fmt: skip
    (text,) = program.rank_modules().values()
    golden(text, "keeps_nothing.py")


def test_the_files_of_a_picture_in_tiles(
    golden: Callable[[str, str], None], tmp_path: Path
) -> None:
    program = compile(
        networks.Tiled(), (networks.PICTURE,), loss=nn.CrossEntropyLoss(),
        example_target=torch.zeros(2, dtype=torch.long), ranks=4, tiles=("2x2",),
    )  # fmt: skip
    files = program.rank_modules()
    golden(files["rank0.py"], "tiled_rank0.py")
    assert_formatted(tmp_path, files)


@pytest.mark.parametrize("kind", ["recompute", "offload"])
@pytest.mark.parametrize("name", ["unet", "densecnn", "encoder", "resnet50"])
def test_files_with_segments_are_formatted(
    name: str, kind: str, tmp_path: Path
) -> None:
    choice: Any = {kind: ("all",)}
    files = files_of(name, ranks=2, micro_batches=4, **choice)
    assert any(f"{kind}(" in text or "offloaded()" in text for text in files.values())
    assert_formatted(tmp_path, files)


def test_the_files_of_an_encoder_with_tied_weights(
    golden: Callable[[str, str], None],
) -> None:
    program = compile(
        networks.TiedEncoder(), (networks.TOKENS,), loss=networks.cross_entropy,
        example_target=networks.TOKENS, ranks=2,
    )  # fmt: skip
    for name, text in program.rank_modules().items():
        golden(text, f"encoder_{name}")


LEFT_OUT = ("resnet110v2", "tiled")  # one takes long, the other has too few blocks


@pytest.mark.parametrize("name", [name for name in MODELS if name not in LEFT_OUT])
def test_the_text_does_not_grow_with_the_micro_batches(
    name: str, tmp_path: Path
) -> None:
    few = files_of(name, ranks=4, micro_batches=16)
    many = files_of(name, ranks=4, micro_batches=64)
    lines = [{f: t.count("\n") for f, t in files.items()} for files in (few, many)]
    assert lines[0] == lines[1]
    fewest = files_of(name, ranks=4, micro_batches=4)
    assert all(text.count("\n") <= lines[0][file] for file, text in fewest.items())
    assert_formatted(tmp_path, few)
    assert_formatted(tmp_path, fewest)


@pytest.mark.parametrize(
    "schedule", ["basic", "gpipe", "mast", "chimera", "interleaved", "zb-h1"]
)
@pytest.mark.parametrize("name", ["unet", "densecnn", "encoder"])
def test_files_of_every_schedule_are_formatted(
    name: str, schedule: str, tmp_path: Path
) -> None:
    files = files_of(name, ranks=2, micro_batches=4, schedule=schedule)
    assert_formatted(tmp_path, files)


def test_the_files_of_the_unet_example_have_less_than_200_lines() -> None:
    unet = sys.modules["unet_histology.model"]
    inputs = unet.example_inputs()
    target = torch.zeros(inputs[0].shape[0], 1, *inputs[0].shape[2:])
    options: Any = {"ranks": 4, "micro_batches": 8, "check": False}
    program = compile(
        unet.model(), inputs, loss=unet.loss, example_target=target, **options
    )
    for text in program.rank_modules().values():
        assert text.count("\n") < 200


@pytest.mark.parametrize("name", ["unet", "encoder"])
def test_the_same_model_gives_the_same_bytes(name: str) -> None:
    first = files_of(name, ranks=3)
    traced.cache_clear()
    assert files_of(name, ranks=3) == first


def test_the_users_line_stands_above_what_it_became() -> None:
    text = files_of("unet", ranks=2)["rank1.py"]
    assert "# model.py:" in text
    assert "return self.head(x)" in text
    lines = [line.strip() for line in text.splitlines() if "# model.py:" in line]
    assert all(a != b for a, b in pairwise(lines))


# Whatever the user writes: the files compute it, and ruff leaves them alone


class Cube(torch.autograd.Function):
    """Its gradient is not that of its forward: only its own backward gives it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 5 * x**2 * gradients[0]


class Value(torch.autograd.Function):
    """Has the name of something that every rank file imports."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def operators(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    y = -h + 2 * h - h / 3 + (h**2) ** 3 + h ** (2 + 1) - 2**h
    y = y + (h - (y - h)) - (h / (y * y + 1)) + h % 0.7 + (1 - h) / (2 - h)
    y = y @ h.T @ h + (-h) ** 2 - -(h**2) + (h * 2) ** -2
    both = (h > 0) & (y < 1) | ~(h >= y) ^ (h != 0)
    return self.b(y * both + (h == y) + ((h <= 0) < (y > 0)))


def integers(self: Any, x: Tensor) -> Tensor:
    n = (self.a(x) * 10).detach().long()
    m = (n << 1) + (n >> 2) - (n // 3) * 2 + (n | 1) + (n & 6) ^ n
    return self.b(self.c(x) * (m % 5) + ~n)


def slices(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    y = h[:, 1:] + h[:, :-1] + h[:, -3:] + h[..., 1:4] + h[:, 0, None]
    y = y + h[1][:3] + h[0, 1:] + h[::2, ::3][:, :1] + h[[1, 0]][:, (0, 1, 2)]
    y = y + h[None][0, :, [0, 2, 1]] + h[torch.tensor([1, 1])][:, 1:] + h[:, -1:]
    return self.b(torch.cat([y, h[:, slice(1)]], 1)[..., :])


def numbers(self: Any, x: Tensor) -> Tensor:
    h = self.a(x).masked_fill(x > 1, float("-inf")).clamp(min=-1e-05, max=float("inf"))
    h = torch.nan_to_num(h, nan=1e22, posinf=3.0) + 0.1 - 1e-300
    return self.b(h.masked_fill(h != h, float("nan")).nan_to_num() * True)


def dtypes(self: Any, x: Tensor) -> Tensor:
    h = self.a(x).to(torch.complex128).real.type_as(x)
    ones = torch.ones(2, 4, dtype=torch.int8, device=x.device) + torch.zeros_like(h)
    steps = torch.arange(4, device=x.device).bool()
    h = (
        h.reshape(1, 2, 2, 2)
        .contiguous(memory_format=torch.channels_last)
        .reshape(2, 4)
    )
    return self.b(h * ones + steps)


def nests(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    y = torch.einsum("bi,bj->bij", h, h).sum((1,)) + torch.einsum("ij , ij->ij", h, h)
    y = y + torch.cat([h[:1], torch.stack([h[0], h[1]]), h], 0)[1:3]
    left, (right, rest) = h[:, :2], h[:, 2:].split([1, 1], dim=1)
    y = y + F.pad(left, (0, 2)) + F.pad(torch.cat([right, rest], 1), [2, 0], value=0.5)
    return self.b(y.permute([1, 0]).permute(1, 0).view(*y.shape))


def assignments(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h[:, 0] = 0
    h[0, 1:3] += 2.5
    h[h > 1] = 1.0
    h *= 2
    y = torch.zeros(2, 4, dtype=torch.float64)
    y[:, 1] = h[:, 0]
    h.clamp_(max=3).add_(y)
    return self.b(h.relu_())


def functions(self: Any, x: Tensor) -> Tensor:
    h = Cube.apply(self.a(x))
    h = torch.where(condition=h > 0, input=h, other=-h * 0.5)
    h = F.linear(input=h, weight=self.c.weight, bias=self.c.bias)
    h = F.layer_norm(h, (4,), weight=self.gain) + torch.special.expit(h)
    h = h + torch.linalg.vector_norm(h, dim=1, keepdim=True)
    h = h + torch.fft.rfft(h).abs().sum() + F.gelu(h, approximate="tanh")
    return self.b(torch.addmm(h, h, self.d.weight, beta=0.5, alpha=2) + h.mT.mT)


def clash(self: Any, x: Tensor) -> Tensor:
    return self.c(torch.relu(self.b(Value.apply(torch.relu(self.a(x))))))


# These lines are to stay long:
# fmt: off
def chained(self: Any, x: Tensor) -> Tensor:
    y = self.a(x).sigmoid().mul(2).sub(1).tanh().abs().add(1).log().neg().exp().clamp(min=0.1).sqrt().square()  # noqa: E501
    return self.b(y.add(self.c(self.d(y).relu()).softmax(-1), alpha=0.5).flatten(1).unflatten(1, (2, 2)).flatten(1))  # noqa: E501


def long_calls(self: Any, x: Tensor) -> Tensor:
    first_of_the_long_names = self.a(x)
    second_of_the_long_names = first_of_the_long_names + 1
    third_of_the_long_names = second_of_the_long_names * 2
    y = torch.cat([first_of_the_long_names, second_of_the_long_names, third_of_the_long_names, first_of_the_long_names], dim=1)  # noqa: E501
    y = torch.stack([first_of_the_long_names, second_of_the_long_names, third_of_the_long_names, y[:, :4], y[:, 4:8], y[:, 8:12]]).sum(0)  # noqa: E501
    y = first_of_the_long_names * second_of_the_long_names + third_of_the_long_names * second_of_the_long_names  # noqa: E501
    y[:, 1:3] = first_of_the_long_names[:, 1:3] + second_of_the_long_names[:, 1:3]
    return self.b(F.scaled_dot_product_attention(first_of_the_long_names[None], second_of_the_long_names[None], y[None], attn_mask=None, is_causal=False)[0])  # noqa: E501
# fmt: on


def names(self: Any, x: Tensor) -> Tensor:
    torch = self.a(x)
    nn = self.b(torch.tanh()) + torch
    F = self.trunk(nn) + torch  # noqa: N806
    worker = F + nn
    Tensor = worker.relu()  # noqa: N806
    sum = Tensor + torch
    m = self.c(sum + nn)
    device, input = m * 2, m * 3
    Q = self.d(device + worker + input)  # noqa: N806
    user = Q + sum
    größe = user.sin() + torch
    STAGES = self.trunk(größe)  # noqa: N806
    Worker = STAGES + Q  # noqa: N806
    forward_stage0 = train_step = Worker + größe
    return self.a(forward_stage0 + train_step * 2)


def no_grad(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    with torch.no_grad():
        scale = h.abs().max()
        shift = self.b(h).mean()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        h = h / (scale + 1)
    return self.c(torch.tanh(h)) + shift.detach()


FORWARDS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        operators, integers, slices, numbers, dtypes, nests, assignments, functions,
        chained, long_calls, names, no_grad,
    )
}  # fmt: skip
CLASH = "clash"


@pytest.mark.parametrize("name", [*FORWARDS, CLASH])
def test_the_files_compute_what_the_user_wrote(name: str, tmp_path: Path) -> None:
    forward = FORWARDS.get(name, clash)
    model = Net(forward, trunk=trunk(), gain=nn.Parameter(torch.rand(4)))
    found = against_one_process(tmp_path / "program", model)
    assert found.worst <= EXACT
    assert_formatted(tmp_path / "program")


ODD = [
    "0",
    "a b",
    "1x1",
    "a-b",
    "größe",
    "_",
    "__hidden",
    "self",
    "torch",
    "F",
    "items",
    *("class", "lambda", 'a"b', "a\nb", "a\\"),
]


@pytest.mark.parametrize("name", ODD)
def test_modules_may_have_any_name(name: str, tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng(devices=[]):
                self.add_module(name, nn.Linear(4, 4))
                self.inner = nn.Module()
                self.inner.add_module(name, nn.BatchNorm1d(4))
                self.last = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            first, second = self._modules[name], self.inner._modules[name]
            assert first is not None
            assert second is not None
            return self.last(torch.relu(second(torch.relu(first(x)))))

    found = against_one_process(tmp_path / "program", Model())
    assert found.worst <= EXACT
    if name != "F":  # its docstring names F: the import of F is not used
        assert_formatted(tmp_path / "program")


def test_a_layer_with_the_name_of_what_a_stage_says_of_itself_is_refused(
    tmp_path: Path,
) -> None:
    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grid = nn.Conv2d(1, 1, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.grid(x)

    inputs = (torch.rand(1, 1, 8, 8),)
    written(tmp_path, Grid(), inputs, target=inputs[0], ranks=1)
    assert "self.grid(x)" in (tmp_path / "rank0.py").read_text()
    with pytest.raises(GemscError, match="rename grid"):
        written(tmp_path, Grid(), inputs, target=inputs[0], ranks=2, tiles="2x1")
    model = nn.Sequential(OrderedDict(keeps_dtype=nn.Conv2d(1, 1, 3, padding=1)))
    with pytest.raises(GemscError, match="rename keeps_dtype"):
        written(tmp_path, model, inputs, target=inputs[0], ranks=1)


@pytest.mark.parametrize("name", ODD)
def test_parameters_may_have_any_name(name: str, tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            for owner in (self, self.inner):
                owner.register_parameter(name, nn.Parameter(torch.rand(4, 4)))

        def forward(self, x: Tensor) -> Tensor:
            first, second = self._parameters[name], self.inner._parameters[name]
            assert first is not None
            assert second is not None
            return torch.relu(x @ first) @ second

    if not is_attribute(name):
        with pytest.raises(GemscError, match="gemsc cannot write module"):
            written(tmp_path / "program", Model())
        return
    assert against_one_process(tmp_path / "program", Model()).worst <= EXACT


class Keywords(nn.Module):
    """Names that are Python's own, held as users hold them; one works in place."""

    def __init__(self) -> None:
        super().__init__()
        made = {
            "in": nn.Linear(4, 4),
            "not": nn.ReLU(inplace=True),
            "'": nn.Linear(4, 4),
        }
        self.ways = nn.ModuleDict(made)
        self.add_module("del", nn.ModuleDict({"in": nn.ModuleDict({"is": nn.Tanh()})}))

    def forward(self, x: Tensor) -> Tensor:
        x = self.ways["'"](self.ways["not"](self.ways["in"](x)))
        return self.get_submodule("del.in.is")(x)


class Weights(nn.Module):
    """Parameters in lists and dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.ParameterList(nn.Parameter(torch.rand(4, 4)) for _ in range(3))
        self.named = nn.ParameterDict({"a b": torch.rand(4, 4), "c": torch.rand(4)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.row:
            x = torch.tanh(x @ weight)
        return x @ self.named["a b"] + self.named["c"]


class Chain(nn.Sequential):
    """Numbers and names side by side, at the root."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.rand(1))
        self.head = nn.Linear(4, 4)
        self.register_buffer("offset", torch.rand(4), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self)[:3]:
            x = layer(x)
        return self.head(x * self.scale + self.offset) + self.count


class Root(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__([nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4))])

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x))


@pytest.mark.parametrize("make", [Keywords, Weights, Chain, Root])
def test_tensors_and_layers_may_be_held_in_any_way(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    found = against_one_process(tmp_path / "program", make())
    assert found.worst <= EXACT
    assert_formatted(tmp_path / "program")


def test_names_that_no_container_can_hold_are_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("0", nn.Linear(4, 4))
            self.keys = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.keys(self._modules["0"](x))  # type: ignore[misc]

    with pytest.raises(
        GemscError, match="module 'model', which holds 0, keys"
    ) as error:
        compile(Model(), (X,), loss=mse, example_target=X, ranks=1, check=False)
    assert error.value.help == "rename keys"


@pytest.mark.parametrize("name", ["graph", "code", "_loss", "_constants"])
def test_names_of_our_own_are_refused_by_name(name: str) -> None:
    model = Net(lambda self, x: self.a(x))
    model._modules[name] = nn.Linear(4, 4)
    with pytest.raises(GemscError, match=f"the reserved name {name}"):
        blocks_of(model, X)


@pytest.mark.parametrize(
    "name", ['M"""', "M\nimport os", "M\\", "class", "größe", "M" * 200, 'a"b', "%s{0}"]
)
def test_the_models_class_may_have_any_name(name: str, tmp_path: Path) -> None:
    cls = type(name, (Net,), {})
    model: nn.Module = cls(lambda self, x: self.b(torch.relu(self.a(x))))
    written(tmp_path / "program", model)
    for file in (tmp_path / "program").glob("rank*.py"):
        tree = ast.parse(file.read_text())
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import)]
        assert [alias.name for n in imports for alias in n.names] == ["torch"]


LINES = [
    '    h = self.a(x)  # """ \'\'\' " \\',
    "    h = self.b(h)  # größe 计算残差连接的输出并且加上偏置项然后返回结果",
    "    h = self.c(h)  \t# tab\tand \x0c form feed \u2028 separator \x1b[31m",
    "    h = self.d(h)  # fmt: off  # noqa  # type: ignore  # -*- coding: utf-7 -*-",
    f"    h = self.a(h)  # {'long ' * 40}",
    "    h = h + 1; exec('')  # {braces} %s",
]


def user_module(folder: Path, body: str) -> ModuleType:
    path = folder / "users.py"
    path.write_text(body, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("users", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lines_of_the_users_are_comments_whatever_they_hold(tmp_path: Path) -> None:
    body = "\n".join(["def forward(self, x):", "    h = x", *LINES, "    return h", ""])
    module = user_module(tmp_path, body)
    found = against_one_process(tmp_path / "program", Net(module.forward))
    assert found.worst <= EXACT
    texts = [p.read_text() for p in sorted((tmp_path / "program").glob("rank*.py"))]
    assert_formatted(tmp_path / "program")
    assert all(f"# users.py:{line}" in "".join(texts) for line in range(3, 9))


# Expressions


def graph_node(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    args = fx.node.map_aggregate(args, lambda a: x if a is X else a)
    return graph.call_function(target, args, kwargs)


def text_of(target: Any, *args: Any, **kwargs: Any) -> str:
    node = graph_node(target, *args, **kwargs)
    return expression(node, lambda n: (n.name, 9), None, lambda item: item.qualname)[0]


INFIX = (
    operator.add, operator.sub, operator.mul, operator.and_, operator.or_, operator.xor,
    operator.lt, operator.ge, operator.eq, operator.ne, operator.pow, operator.floordiv,
    operator.mod, operator.lshift,
)  # fmt: skip
Tree = tuple[Any, ...]
leaves = st.one_of(st.integers(-3, 4), st.just("x"))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(INFIX), inner, inner),
        st.tuples(st.sampled_from([operator.neg, operator.invert]), inner),
    ),
    max_leaves=7,
)


@given(trees.filter(lambda tree: isinstance(tree, tuple)), st.integers(-3, 3))
@settings(deadline=None, max_examples=300)
def test_nested_operators_mean_what_the_graph_means(tree: Any, x: int) -> None:
    graph = fx.Graph()
    place = graph.placeholder("x")
    nested: dict[fx.Node, tuple[str, int]] = {place: ("x", 9)}

    def compute(tree: Any) -> Any:
        if not isinstance(tree, tuple):
            return x if tree == "x" else tree
        values = [compute(part) for part in tree[1:]]
        small = all(abs(value) < 50 for value in values)
        if not small or (tree[0] is operator.lshift and values[1] < 0):
            raise ValueError
        return tree[0](*values)

    def write(tree: Any) -> Any:
        if not isinstance(tree, tuple):
            return place if tree == "x" else tree
        node = graph.call_function(tree[0], tuple(map(write, tree[1:])))
        nested[node] = expression(node, nested.__getitem__, None, lambda item: "")
        return node

    try:
        expected = compute(tree)
    except (ValueError, ZeroDivisionError, TypeError):
        return
    text = nested[write(tree)][0]
    assert eval(text, {"x": x}) == expected, text


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (0, "x[0]"),
        (-1, "x[-1]"),
        (slice(None), "x[:]"),
        (slice(1, None), "x[1:]"),
        (slice(None, -1), "x[:-1]"),
        (slice(None, None, 2), "x[::2]"),
        (slice(0, 8, 2), "x[0:8:2]"),
        ((slice(None), None, Ellipsis), "x[:, None, ...]"),
        ((0,), "x[0,]"),
        ((), "x[()]"),
        ([0, 2], "x[[0, 2]]"),
        ((0, (1, 2)), "x[0, (1, 2)]"),
        ((True, slice(None)), "x[True, :]"),
    ],
)
def test_subscripts(index: Any, text: str) -> None:
    assert text_of(operator.getitem, X, index) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-05, "1e-05"),
        (float("inf"), 'float("inf")'),
        (float("-inf"), 'float("-inf")'),
        (float("nan"), 'float("nan")'),
        (1 + 2j, "complex(1.0, 2.0)"),
        (torch.float16, "torch.float16"),
        (torch.channels_last, "torch.channels_last"),
        (torch.strided, "torch.strided"),
        (torch.device("cpu"), "device"),
        (range(1, 7, 2), "range(1, 7, 2)"),
        (None, "None"),
        (True, "True"),
        (Ellipsis, "..."),
        (-7, "-7"),
    ],
)
def test_constants_have_exact_texts(value: Any, text: str) -> None:
    assert literal(value) == text


class Small(int):
    """A number whose repr is no number."""

    def __repr__(self) -> str:
        return "<Small>"


def test_numbers_of_other_types_are_plain_numbers() -> None:
    import numpy as np

    assert literal(np.float64(0.1)) == "0.1"
    assert literal(Small(3)) == "3"


@given(st.text(alphabet=st.characters(), max_size=20))
@settings(deadline=None)
def test_strings_hold_any_text_on_one_line(text: str) -> None:
    shown = quoted(text)
    assert ast.literal_eval(shown) == text
    assert len(shown.splitlines()) == 1
    assert shown.isascii()


def test_calls_of_every_kind() -> None:
    assert text_of(torch.cat, [X, X], dim=1) == "torch.cat([x, x], dim=1)"
    assert text_of(F.relu, X) == "F.relu(x)"
    assert text_of(F.pad, X, (1,)) == "F.pad(x, (1,))"
    assert text_of(torch.ops.aten.add.Tensor, X, 1) == "torch.ops.aten.add.Tensor(x, 1)"
    assert text_of(getattr, X, "T") == "x.T"
    assert text_of(operator.setitem, X, 0, 1.5) == "x[0] = 1.5"
    assert text_of(operator.setitem, X, (slice(2), 1), X) == "x[:2, 1] = x"
    assert text_of(Cube.apply, X) == "Cube.apply(x)"
    assert text_of(torch.special.expit, X) in (
        "torch.special.expit(x)",
        "torch.expit(x)",
    )
    assert text_of(operator.pow, X, 2) == "x**2"
    assert text_of(operator.pow, X, -0.5) == "x**-0.5"
    assert text_of(torch.einsum, "a,b", X) == 'torch.einsum("a,b", x)'
    assert text_of(torch.full, {"a": X}) == 'torch.full({"a": x})'


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(GemscError, match="gemsc cannot write a call of"):
        text_of(lambda x: x, X)


def test_paths_that_are_no_attributes_are_subscripts() -> None:
    assert access("self", "a.0.conv") == 'self.a["0"].conv'
    assert access("self", "class.b") == 'self["class"].b'
    assert access("self", 'a"b') == "self['a\"b']"
    assert access("self", "__x.__y__") == 'self["__x"].__y__'


# The writer


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("f(a, b)", ("f(", ["a", "b"], ")")),
        ("x.f(1)(a, (b, c), d=[1, 2])", ("x.f(1)(", ["a", "(b, c)", "d=[1, 2]"], ")")),
        ('f("a, b)", c)', ("f(", ['"a, b)"', "c"], ")")),
        ('f(\'"(\', "\'\\"(")', ("f(", ["'\"('", '"\'\\"("'], ")")),
        ("[a, f(b)]", ("[", ["a", "f(b)"], "]")),
        ("f()", ("f(", [], ")")),
    ],
)
def test_arguments_are_split_outside_of_strings(source: str, parts: Any) -> None:
    assert split_arguments(source) == parts


def test_names_are_valid_and_unique() -> None:
    names = Names(["self"])
    wishes = [
        "x",
        "x",
        "class",
        "self",
        "1x",
        "a.b-c",
        "größe",
        "",
        "match",
        "sum",
        "_",
    ]
    found = [names.unique(wish) for wish in wishes]
    assert len(found) == len(set(found))
    for name in found:
        ast.parse(f"{name} = 0")
    assert found[:3] == ["x", "x_2", "class_2"]
    names.release("x")
    assert names.unique("x") == "x"


@given(st.text(max_size=200), st.integers(20, 88))
@settings(deadline=None)
def test_a_comment_is_one_line_of_the_width(text: str, room: int) -> None:
    line = comment(text, room)
    assert len(line) <= room
    assert line.splitlines() == [line]
    assert ast.dump(ast.parse(line)) == ast.dump(ast.parse(""))


def test_long_calls_break_as_a_formatter_breaks_them(tmp_path: Path) -> None:
    writer = Writer()
    values = [f"value_number_{i}" for i in range(4)]
    many = [*values, *values]
    writer.call("x = f(", values)
    writer.call("x = some_function_of_many(", many)
    writer.call("x = some_function_of_many(", [f"[{', '.join(many)}]", "1"])
    writer.call("x = f(", [f"g({', '.join(many)})", f"key=({', '.join(many)})"])
    writer.call(f"{', '.join(values[:3])} = some_function(", many, note="why")
    writer.call(f"{', '.join(values * 2)} = f(", values)
    writer.call(f"{', '.join(values)} = some_long_function_name(", ["a"])
    writer.call("x = {", [f'"{value}": 1' for value in many], "}")
    writer.call(
        "x = f(", values, note="a trailing comment that is too long for its line"
    )
    writer.items("for x in (", many, "):")
    with writer.indented():
        writer.line("pass")
    path = tmp_path / "text.py"
    path.write_text(writer.text())
    command = [find_ruff_bin(), "format", "--diff", "--isolated", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == ""


class Grid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(0, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.grid.to(x.dtype).cos()


def test_attributes_of_the_model_may_be_called_grid(tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.d(self.warp(self.c(self.b(self.a(x) * self.grid.cos()))))

    model = Net(forward, warp=Grid(), grid=nn.Parameter(torch.ones(4)))
    assert against_one_process(tmp_path, model).worst < EXACT
