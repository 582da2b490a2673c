"""A program runs in another floating-point type as the model itself does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opaque_support import made
from program_support import Net, X, against_one_process, batch_of, mse, written
from threads import run_on_threads
from torch import Tensor, nn

from gemsc.base.dtypes import as_real, cast
from gemsc.compiler import compile, trace
from gemsc.errors import GemscError
from gemsc.frontend import FRONTENDS
from gemsc.ir import meta
from gemsc.messages.grid_message import TileValue
from gemsc.runtime.training.train import load
from gemsc.runtime.transport.device_transport import DeviceTransport
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.streams import Streams
from gemsc.runtime.transport.transport import Transport
from gemsc.runtime.worker.updates import clip_gradients
from gemsc.verify.compare import compare
from gemsc.verify.one_process import reference_steps
from gemsc.verify.precision import Precision

record = FRONTENDS["record"]


def dtype_of_a_tensor(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    mask = torch.ones(2, 4, dtype=h.dtype).tril()
    h = self.b(h.to(x.dtype) * mask) + torch.zeros(1, dtype=self.a.weight.dtype)
    h = self.c(h + torch.arange(4).to(h.dtype).sin())
    return self.d(h.masked_fill(h > 1, torch.finfo(h.dtype).eps))


def fixed_on_purpose(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    part = h.float().softmax(-1, dtype=torch.float32)
    h = self.b(part.to(h.dtype)) + part.to(torch.float32).sum()
    h = self.c(h + part.log().type_as(h))
    return self.d(h) + part


def within_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = self.c(self.b(self.a(x)))
    return self.d(h.to(self.d.weight.dtype))


def tensor_that_is_no_buffer(self: Any, x: Tensor) -> Tensor:
    h = self.b(self.a(x)) + self.table.exp()
    return self.d(self.c(h) * self.table.cos())


def complex_numbers(self: Any, x: Tensor) -> Tensor:
    h = torch.fft.fft(self.a(x)) * self.filter
    h = self.b(h.to(self.filter.dtype).abs())
    return self.d(self.c(h))


class Gate(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x * 2 if float(x.detach().sum()) > 0 else x * 3
        return h, h.float()


def opaque_module(self: Any, x: Tensor) -> Tensor:
    h, part = self.gate(self.a(x))
    h = self.c(self.b(h))
    return self.d(h) + part.exp()


CASES: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "dtype of a tensor": (dtype_of_a_tensor, {}),
    "fixed on purpose": (fixed_on_purpose, {}),
    "no buffer": (tensor_that_is_no_buffer, {"table": torch.linspace(0, 1, 4)}),
    "opaque": (opaque_module, {"gate": Gate()}),
}


def test_what_a_model_makes_anew_in_another_dtype_stays(tmp_path: Path) -> None:
    """As the distributions of kornia do, which are no buffers."""

    class Made(Net):
        def _apply(self, fn: Any, *given: Any, **options: Any) -> Any:
            super()._apply(fn, *given, **options)
            self.part = torch.tensor(0.1, dtype=fn(self.part).dtype)
            return self

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x) * self.part)))

    net = Made(forward)
    net.part = torch.tensor(0.1)
    diff = against_one_process(tmp_path, net)
    assert diff.equal == diff.total


@pytest.mark.slow(3)
@pytest.mark.parametrize("name", CASES)
def test_a_program_in_float64_is_the_model_in_float64(
    name: str, tmp_path: Path
) -> None:
    forward, attributes = CASES[name]
    diff = against_one_process(tmp_path, Net(forward, **attributes), ranks=2)
    assert diff.equal == diff.total


@pytest.mark.slow(1)
@pytest.mark.parametrize("data", [1, 2])
def test_complex_parameters_stay_complex(data: int, tmp_path: Path) -> None:
    values = torch.randn(4, dtype=torch.complex64)
    model = Net(complex_numbers, filter=nn.Parameter(values))
    diff = against_one_process(tmp_path, model, ranks=2 * data, data=data)
    assert diff.worst < 1e-12


def test_clipping_counts_both_parts_of_a_complex_gradient() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    parameter.grad = torch.tensor([3 + 4j])

    def clip(transport: Transport) -> None:
        link, group = (
            DeviceTransport(transport, Streams()),
            transport.group((0,), "norm"),
        )
        clip_gradients(1.0, [parameter], [parameter], link, group)

    run_local(1, clip)
    torch.testing.assert_close(parameter.grad.abs(), torch.ones(1))


@pytest.mark.parametrize(
    ("forward", "kind"),
    [
        (fixed_on_purpose, "keeps_dtype=True"),
        (within_autocast, "in_autocast=True"),  # which leaves float64 as it is
    ],
)
def test_messages_have_the_dtype_of_what_is_sent(
    forward: Callable[..., Tensor], kind: str, tmp_path: Path
) -> None:
    written(tmp_path, Net(forward), ranks=3, micro_batches=2)
    text = "".join(path.read_text() for path in tmp_path.glob("rank*.py"))
    assert kind in text
    batches = [batch_of(((X,), X), 2)] * 2
    for dtype in (torch.float32, torch.float64):
        actual = run_on_threads(tmp_path, 3, batches, dtype=dtype)
        args = (Net(forward), mse, batches, 2, dtype)
        diff = compare(actual, reference_steps(*args))
        assert diff.equal == diff.total


def test_a_layer_may_be_used_twice_within_an_autocast_of_the_models_own() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.a(x)
            for _ in range(3):
                x = torch.tanh(self.b(x) + self.b(2 * x))
            return self.c(x).float()

    trace(Net(forward), (X,), loss=mse, example_target=X)


@pytest.mark.parametrize("is_on", [True, False])
def test_an_autocast_without_its_cache_is_refused_where_it_does_anything(
    is_on: bool,
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on, cache_enabled=False):
            return self.c(self.b(self.b(self.a(x)))).float()

    refused = pytest.raises(GemscError, match="autocast has cache_enabled=False here")
    with refused if is_on else contextlib.nullcontext():
        trace(Net(forward), (X,), loss=mse, example_target=X)


def test_tiles_send_in_half_precision_within_a_forward_that_has_autocast() -> None:
    value = TileValue("x", (2, 4), torch.bfloat16, held=(), in_autocast=True)
    part = value.part((2, 2))
    assert part.dtype_in(None) is part.dtype_in(torch.float32) is torch.bfloat16
    assert part.dtype_in(torch.float64) is torch.float64


@pytest.mark.slow
def test_a_model_in_float64_runs_in_float32(tmp_path: Path) -> None:
    model = Net(dtype_of_a_tensor).double()
    written(tmp_path, model, (X.double(),), target=X.double(), ranks=2, micro_batches=2)
    batches = [batch_of(((X,), X), 2)]
    actual = run_on_threads(tmp_path, 2, batches, dtype=torch.float32)
    expected = reference_steps(model, mse, batches, 2, torch.float32)
    diff = compare(actual, expected)
    assert diff.equal == diff.total


def halved(self: Any, x: Tensor) -> Tensor:
    h = self.b(self.a(x.bfloat16())).to(x.dtype)
    return self.d(torch.tanh(self.c(h)))


def halved_by_weights(self: Any, x: Tensor) -> Tensor:
    h = self.b(self.a(x.to(self.a.weight.dtype))).to(self.c.weight.dtype)
    return self.d(torch.tanh(self.c(h)))


@pytest.mark.slow(1)
@pytest.mark.parametrize("forward", [halved, halved_by_weights])
def test_a_model_that_mixes_dtypes_is_compared_as_it_is(
    forward: Callable[..., Tensor], tmp_path: Path
) -> None:
    model = Net(forward)
    for name in "ab":  # behind the others: the model is in float32, but for these
        model.add_module(name, model._modules.pop(name).bfloat16())
    given = {"loss": mse, "example_target": X, "ranks": 2, "micro_batches": 2}
    program = compile(model, (X,), **given)
    assert program.plan.unchecked == ""
    assert bool(program.plan.only_dtype) == (forward is halved)
    program.write(tmp_path)
    batches = [batch_of(((X,), X), 2)]
    actual = run_on_threads(tmp_path, 2, batches, dtype=torch.float32)
    diff = compare(actual, reference_steps(model, mse, batches, 2, torch.float32))
    assert diff.equal == diff.total


def fixed_between(self: Any, x: Tensor) -> Tensor:
    h = self.b(torch.tanh(self.a(x)).to(self.b.weight.dtype))
    return self.d(torch.tanh(self.c(h.exp().float())))


def branch_on_dtype(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    if h.dtype == torch.float64:
        h = h * 2
    return self.d(self.c(self.b(torch.tanh(h.float().exp().double()))))


@pytest.mark.slow(1)
@pytest.mark.parametrize("forward", [fixed_between, branch_on_dtype])
def test_a_model_that_runs_in_one_dtype_keeps_what_it_has_in_another(
    forward: Callable[..., Tensor], tmp_path: Path
) -> None:
    is_wide = forward is branch_on_dtype
    dtype = torch.float64 if is_wide else torch.float32
    model, x = Net(forward).to(dtype), X.to(dtype)
    if not is_wide:
        model.b.double()
    given = {"loss": mse, "example_target": x, "ranks": 2, "micro_batches": 2}
    program = compile(model, (x,), cuts=("b",) if is_wide else (), **given)
    assert program.plan.unchecked == ""
    assert program.plan.only_dtype
    program.write(tmp_path)
    batches = cast([batch_of(((x,), x), 2)], dtype)
    actual = run_on_threads(tmp_path, 2, batches, dtype=dtype)
    step = model, mse, batches, 2, dtype
    expected = reference_steps(*step, precision=Precision.of(program.plan, dtype))
    diff = compare(actual, expected)
    assert diff.equal == diff.total


class Narrow(nn.Module):
    """In float64, but for a convolution whose bias has gradients of rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1).double()
        self.narrow = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 3, 3, padding=1).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu().to(self.narrow.weight.dtype)
        x = self.norm(self.narrow(x)).relu()
        return self.last(x.to(self.last.weight.dtype))


def a_weight_in_float64(self: Any, x: Tensor) -> Tensor:
    return self.d(self.c(self.b(self.a(x) * self.other).float()))


def a_complex_weight(self: Any, x: Tensor) -> Tensor:
    h = nn.functional.linear(self.a(x).to(torch.complex64), self.other)
    return self.d(self.c(self.b(h.abs().to(x.dtype))))


@pytest.mark.parametrize("wide", [False, True])
def test_some_weights_in_another_precision_stay_so(wide: bool, tmp_path: Path) -> None:
    forward, dtype = a_weight_in_float64, torch.float64
    model = Net(forward, other=nn.Parameter(torch.full((4,), 0.3, dtype=dtype)))
    model.b.double()
    x = X
    if wide:
        filtered = nn.Parameter(torch.full((4, 4), 0.3, dtype=torch.complex64))
        model, x = Net(a_complex_weight).double(), X.double()
        model.other = filtered
    program = written(tmp_path, model, (x,), target=x, ranks=2, micro_batches=1)
    own = getattr(torch, program.plan.dtype)
    record = run_on_threads(tmp_path, 2, [((x,), x)], dtype=own)
    loss = mse(model(x), x)
    loss.backward()
    assert record.losses == [loss.item()]
    for name, parameter in model.named_parameters():
        assert torch.equal(record.gradients[name], as_real(parameter.grad))


@pytest.mark.slow(1)
@pytest.mark.parametrize("tiles", ["1", "2x1"])
def test_a_model_in_float64_with_a_layer_in_float32_is_compared_as_it_is(
    tiles: str,
) -> None:
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)).double()
    given = {"loss": mse, "example_target": x, "ranks": 2, "micro_batches": 2}
    plan = compile(made(Narrow), (x,), tiles=(tiles,), **given).plan
    assert plan.unchecked == ""
    assert plan.only_dtype == "its weights are in float64 and in float32"


def test_a_model_in_half_precision_is_not_loaded_in_float32(tmp_path: Path) -> None:
    x = X.bfloat16()
    written(tmp_path, Net(dtype_of_a_tensor).bfloat16(), (x,), target=x, ranks=2)
    with pytest.raises(GemscError, match="compiled in bfloat16, which it keeps"):
        load(tmp_path, dtype=torch.float32)


def test_what_follows_a_cast_that_does_nothing_is_what_the_user_wrote() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        part = h.float()  # the same tensor
        return self.b(h) + part

    graph = record(Net(forward), (X,)).graph
    (layer,) = [node for node in graph.nodes if node.target == "b"]
    (part,) = [node for node in graph.nodes if node.target == "float"]
    assert layer.args == part.args
    assert meta.dtypes(part).value
    assert not meta.dtypes(layer).value


def test_a_model_that_cannot_run_in_another_dtype_says_why() -> None:
    def bits(self: Any, x: Tensor) -> Tensor:
        return self.a(x) * x.view(torch.int32).sum(1, keepdim=True)

    def branch(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        if x.dtype == torch.float32:
            h = h.exp()
        return h * 2

    for forward in (bits, branch):
        why = record(Net(forward), (X,)).only_dtype
        assert why.startswith("test_dtypes.py:")
        assert why.endswith("forward behaves differently in float64")

    def halts(self: Any, x: Tensor) -> Tensor:
        rows = self.a(x).float()[..., None]
        return nn.functional.conv1d(rows, self.b.weight[..., None], self.b.bias)

    why = record(Net(halts), (X,)).only_dtype
    assert ": the model fails on example_inputs: RuntimeError: " in why
    assert record(Net(dtype_of_a_tensor), (X,)).only_dtype == ""
