"""Whatever the user writes: rank files compute it, and ruff leaves them alone."""

from __future__ import annotations

import ast
import importlib.util
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_support import (
    Net,
    X,
    against_one_process,
    assert_formatted,
    blocks_of,
    mse,
    trunk,
    written,
)
from torch import Tensor, nn

from gemsc.codegen.expressions import is_attribute
from gemsc.compiler import compile
from gemsc.errors import GemscError
from gemsc.verify.compare import TOLERANCE

EXACT = TOLERANCE[torch.float64]


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
    left, (right, last) = h[:, :2], h[:, 2:].split([1, 1], dim=1)
    y = y + F.pad(left, (0, 2)) + F.pad(torch.cat([right, last], 1), [2, 0], value=0.5)
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
    STAGE0 = self.d(device + worker + input)  # noqa: N806
    user = STAGE0 + sum
    größe = user.sin() + torch
    STAGE1 = self.trunk(größe)  # noqa: N806
    Worker = STAGE1 + STAGE0  # noqa: N806
    forward_stage0 = train_step = Worker + größe
    return self.a(forward_stage0 + train_step * 2)


def sparse(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    neighbours = (torch.ones(2, 2) - torch.eye(2)).to(h).to_sparse()
    h = neighbours @ self.c(h)
    return self.b((h * (h > 0)).to_sparse().to_dense())


def sparse_product(self: Any, x: Tensor) -> Tensor:
    return self.b(torch.sparse.mm(self.rows.to_sparse(), self.a(x)))


def identity_of_several(self: Any, x: Tensor) -> Tensor:
    first, second = self.same((self.a(x), self.b(x)))
    return first * second + self.same({"c": self.c(x)})["c"]


def no_grad(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    with torch.no_grad():
        scale = h.abs().max()
        shift = self.b(h).mean()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        h = h / (scale + 1)
    return self.c(torch.tanh(h)) + shift.detach()


FORWARDS: dict[str, Callable[..., Any]] = {
    forward.__name__: forward
    for forward in (
        operators, integers, slices, numbers, dtypes, nests, assignments, functions,
        chained, long_calls, names, no_grad,
    )
}  # fmt: skip
CLASH = "clash"


@pytest.mark.slow(1)
@pytest.mark.by_day(6)
@pytest.mark.parametrize("name", [*FORWARDS, CLASH])
def test_the_files_compute_what_the_user_wrote(name: str, tmp_path: Path) -> None:
    forward = FORWARDS.get(name, clash)
    model = Net(forward, trunk=trunk(), gain=nn.Parameter(torch.rand(4)))
    diff = against_one_process(tmp_path / "program", model)
    assert diff.worst <= EXACT
    assert_formatted(tmp_path / "program")


def test_values_may_be_sparse_within_a_stage(tmp_path: Path) -> None:
    assert against_one_process(tmp_path, Net(sparse)).worst <= EXACT


def test_a_sparse_buffer_is_refused_and_made_sparse_in_forward(tmp_path: Path) -> None:
    rows = nn.Module()
    rows.register_buffer("rows", torch.eye(2).to_sparse())
    with pytest.raises(GemscError, match="rows has a sparse parameter or buffer") as e:
        compile(Net(sparse_product, rows=rows), (X,), loss=mse, example_target=X)
    assert (
        e.value.help
        == "keep a dense one and make it sparse in forward, with to_sparse()"
    )
    model = Net(sparse_product)
    model.register_buffer("rows", torch.eye(2))
    assert against_one_process(tmp_path, model).worst <= EXACT


def test_an_identity_of_several_values_gives_all_of_them(tmp_path: Path) -> None:
    model = Net(identity_of_several, same=nn.Identity())
    assert against_one_process(tmp_path, model).worst <= EXACT


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


@pytest.mark.slow(2)
@pytest.mark.by_day(8)
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

    diff = against_one_process(tmp_path / "program", Model())
    assert diff.worst <= EXACT
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


@pytest.mark.slow(4)
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
    diff = against_one_process(tmp_path / "program", make())
    assert diff.worst <= EXACT
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


@pytest.mark.slow(2)
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
    diff = against_one_process(tmp_path / "program", Net(module.forward))
    assert diff.worst <= EXACT
    texts = [p.read_text() for p in sorted((tmp_path / "program").glob("rank*.py"))]
    assert_formatted(tmp_path / "program")
    assert all(f"# users.py:{line}" in "".join(texts) for line in range(3, 9))


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
