"""Functions that hold the model are refused: its copies would call the original."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_support import Net, X, mse
from torch import Tensor, nn

from gemsc.base.phase import Phase
from gemsc.compiler import compile
from gemsc.errors import GemscError, SourceLocation
from gemsc.frontend import FRONTENDS
from gemsc.frontend.closures import reject_model_in_hooks
from gemsc.frontend.phases import phase_model


def chain(self: Any, x: Tensor) -> Tensor:
    return self.d(self.c(self.act(self.b(self.a(x)))))


def with_a_mode() -> nn.Module:
    net = Net(chain)
    net.act = lambda x: F.dropout(x, 0.5, net.training)
    return net


def with_a_mode_in_a_partial() -> nn.Module:
    net = Net(chain)
    net.act = partial(lambda x, p: F.dropout(x, p, net.training), p=0.5)
    return net


def with_a_mode_in_what_is_compiled() -> nn.Module:
    net = Net(chain)
    net.act = torch.compile(lambda x: F.dropout(x, 0.5, net.training))
    return net


def with_a_layer_in_a_list() -> nn.Module:
    net = Net(lambda self, x: self.d(self.acts[0](self.a(x))))
    layer = net.b
    net.acts = [lambda x: layer(x)]
    return net


def with_a_buffer() -> nn.Module:
    net = Net(chain)
    net.register_buffer("scale", scale := torch.tensor(2.0))
    net.act = lambda x: x * scale
    return net


def with_a_hook() -> nn.Module:
    net = Net(chain, act=nn.Tanh())
    net.b.register_forward_hook(lambda module, args, out: out * net.c.bias)
    return net


def with_another_forward() -> nn.Module:
    net = Net(chain, act=nn.Tanh())
    before = net.b.forward
    net.b.forward = lambda x: before(x) * 2
    return net


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (with_a_mode, "self.act .* the variable 'net'"),
        (with_a_mode_in_a_partial, "self.act.func .* the variable 'net'"),
        (with_a_mode_in_what_is_compiled, "self.act .* the variable 'net'"),
        (with_a_layer_in_a_list, r"self.acts\[0\] .* the variable 'layer'"),
        (with_a_buffer, "self.act .* the variable 'scale'"),
        (with_a_hook, r"self.b._forward_hooks\[\d+\] .* the variable 'net'"),
        (with_another_forward, "self.b.forward .* the variable 'before'"),
    ],
)
def test_a_function_that_holds_the_model_is_refused(
    make: Callable[[], nn.Module], name: str, frontend: str
) -> None:
    with pytest.raises(GemscError, match=name) as caught:
        FRONTENDS[frontend](make(), (X,), loss=mse, target=X)
    assert caught.value.at is not None
    assert caught.value.at.file == __file__


model = Net(chain, act=nn.Tanh())


def decayed(output: Tensor, target: Tensor) -> Tensor:
    squares = (p.square().sum() for p in model.parameters())
    return F.mse_loss(output, target) + 0.1 * sum(squares)


def decayed_within(output: Tensor, target: Tensor) -> Tensor:
    def largest() -> Any:
        return max(p.square().sum() for p in model.parameters())

    return F.mse_loss(output, target) + 0.1 * largest()


class ByItsMode(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * (2 if model.training else 1)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (decayed, "the loss"),
        (decayed_within, "the loss"),
        (ByItsMode(), "self.forward"),
    ],
)
def test_a_loss_that_refers_to_the_model_is_refused(
    loss: Any, name: str, frontend: str
) -> None:
    with pytest.raises(GemscError, match=f"{name} .* the variable 'model'") as caught:
        FRONTENDS[frontend](model, (X,), loss=loss, target=X)
    assert caught.value.at is not None
    assert caught.value.at.file == __file__
    assert "weight_decay" in caught.value.help


models = {"net": Net(chain, act=nn.Tanh())}
models["net"].register_buffer("scale", torch.tensor(0.5))


def held_in_a_dict(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) + models["net"].a.weight.square().sum()


def detached_from_a_dict(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target * models["net"].a.weight.detach().sum())


@pytest.mark.parametrize("loss", [held_in_a_dict, detached_from_a_dict])
def test_a_loss_that_finds_a_weight_otherwise_is_refused_in_its_line(loss: Any) -> None:
    given = models["net"], (X,)
    with pytest.raises(GemscError, match=r"takes 'a.weight' of the model from") as told:
        FRONTENDS["record"](*given, loss=loss, target=X)
    assert (told.value.at.file, told.value.at.line) == (
        __file__,
        loss.__code__.co_firstlineno + 1,
    )
    assert "weight_decay" in told.value.help
    with pytest.raises(GemscError, match=r"'a.weight' .* share memory"):
        compile(*given, loss=loss, example_target=X, ranks=2, frontend="export")


def test_a_loss_may_find_a_buffer_that_stays() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * models["net"].scale

    for frontend in FRONTENDS:
        given = {"loss": loss, "example_target": X, "frontend": frontend}
        assert compile(models["net"], (X,), **given, ranks=2).plan.unchecked == ""


class Named(nn.Module):
    """Its attribute has the name of a global variable, which is another module."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


named = Named()


def test_an_attribute_is_not_the_global_variable_of_its_name() -> None:
    FRONTENDS["record"](named, (X,), loss=mse, target=X)
    globals()["model"], before = named, model
    try:
        FRONTENDS["record"](named, (X,), loss=mse, target=X)
    finally:
        globals()["model"] = before


class Bound(nn.Module):
    """What the refusal advises: a method as a hook, and a `partial`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.a.register_forward_hook(self.dropped)
        self.act = partial(Bound.doubled, self)

    def dropped(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return F.dropout(out, 0.5, self.training)

    def doubled(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


@pytest.mark.parametrize("training", [True, False])
def test_methods_and_partial_functions_follow_the_copy(training: bool) -> None:
    program = FRONTENDS["record"](Bound(), (X,), training=training)
    targets = {str(node.target) for node in program.graph.nodes}
    assert any("mul" in target for target in targets) == training
    (drop,) = (n for n in program.graph.nodes if "dropout" in str(n.target))
    is_off = any(v is False for v in (*drop.args, *drop.kwargs.values()))
    assert is_off == (not training)


BACKBONE = nn.Linear(4, 4)


class Given(nn.Module):
    """Its constructor takes a module that is a global variable of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.last = BACKBONE, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.backbone(x).relu())


class Counts(nn.Module):
    """Makes a function of itself in each copy, as a metric of torchmetrics does."""

    left_out: tuple[str, ...] = ("update",)

    def __init__(self) -> None:
        super().__init__()
        self.wrap()

    def wrap(self) -> None:
        self.update = lambda: self.training

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).items()
        return {key: value for key, value in state if key not in self.left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.left_out:
            self.wrap()


class Keeps(Counts):
    left_out = ()


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_constructor_may_refer_to_a_part_of_the_model(frontend: str) -> None:
    FRONTENDS[frontend](Given(), (X,), loss=mse, target=X)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_function_that_each_copy_makes_anew_follows_it(frontend: str) -> None:
    net = Net(chain, act=nn.Tanh(), metric=Counts())
    FRONTENDS[frontend](net, (X,), loss=mse, target=X)
    net.metric = Keeps()
    with pytest.raises(GemscError, match=r"self.metric.update .* variable 'self'"):
        FRONTENDS[frontend](net, (X,), loss=mse, target=X)


TOP = Net(chain)
TOP.b.requires_grad_(False)
TOP.classes = 3


def weights(trainer: Any, epoch: int, figures: Any) -> None:
    print({name: p.norm() for name, p in TOP.named_parameters()})  # noqa: T201


def clamp(*_: Any) -> None:
    TOP.a.weight.data.clamp_(0, 1)


def clamping(params: Any) -> Any:
    made = torch.optim.SGD(params)
    made.register_step_post_hook(lambda *_: TOP.a.weight.data.clamp_(0, 1))
    return made


def clamping_by_name(params: Any) -> Any:
    made = torch.optim.SGD(params)
    made.register_step_post_hook(clamp)
    return made


class Held:
    def __init__(self) -> None:
        self.net = TOP

    def step(self, trainer: Any, report: Any) -> None:
        self.net.a.weight.data.clamp_(0, 1)


def line_of(name: str) -> SourceLocation:
    return SourceLocation(name, 1)


@pytest.mark.parametrize(
    ("name", "hook", "text"),
    [
        ("metrics", lambda output, target: {"a": TOP.a.bias.norm()}, '("metrics"'),
        ("metrics", {"a": Held()}, ""),
        ("on_epoch", weights, "print"),
        ("on_step", Held().step, ""),
        ("optimizer", clamping, "made.register_step_post_hook(lambda"),
        ("optimizer", clamping_by_name, "TOP.a.weight.data.clamp_"),
        ("scheduler", lambda made: lambda step: TOP.a.bias.norm(), '("scheduler'),
    ],
)
def test_a_hook_that_refers_to_the_model_is_refused(
    name: str, hook: Any, text: str
) -> None:
    """There the model has the weights that it began with."""
    hooks = {"loss": mse, name: hook}
    with pytest.raises(GemscError, match=f"{name} refers to the model") as caught:
        reject_model_in_hooks(hooks, TOP, line_of)
    assert caught.value.at is not None
    assert caught.value.at.text.startswith(text)
    assert caught.value.help
    reject_model_in_hooks(hooks, Net(chain), line_of)


def test_a_hook_may_refer_to_what_does_not_change_or_is_loaded() -> None:
    def metrics(output: Tensor, target: Tensor) -> dict[str, Any]:
        frozen = TOP.b(output).mean() + TOP.b.weight.norm()
        return {"a": frozen / TOP.classes / TOP.a.weight.shape[0]}

    def optimizer(params: Any) -> Any:
        wide = {name for name, p in TOP.named_parameters() if p.dim() > 1}
        return torch.optim.SGD([p for name, p in params if name in wide])

    def on_epoch(trainer: Any, epoch: int, figures: Any) -> None:
        TOP.load_state_dict(trainer.state_dict(), strict=False)
        print(TOP(X))  # noqa: T201

    hooks = {"metrics": metrics, "optimizer": optimizer, "on_epoch": on_epoch}
    reject_model_in_hooks(hooks, TOP, line_of)


class WithLoss(Net):
    def __init__(self) -> None:
        super().__init__(chain, act=nn.Tanh(), mean=nn.MSELoss())

    def plain(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.mean(output, target)
        return loss

    def with_weights(self, output: Tensor, target: Tensor) -> Tensor:
        return self.plain(output, target) + self.penalty()

    def penalty(self) -> Tensor:
        return self.b.weight.norm()


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_loss_that_is_a_method_of_the_model_uses_no_weights(frontend: str) -> None:
    """The last batch of an evaluation would be scored with the first ones."""
    net = WithLoss()
    FRONTENDS[frontend](net, (X,), loss=net.plain, target=X)
    with pytest.raises(GemscError, match=r"which uses 'self.b'") as caught:
        FRONTENDS[frontend](net, (X,), loss=net.with_weights, target=X)
    assert caught.value.at is not None
    assert caught.value.at.text == "return self.b.weight.norm()"


def test_the_loss_of_a_phase_uses_the_model_that_it_gets() -> None:
    def given(model: Any, x: Tensor, target: Tensor) -> Tensor:
        return mse(model(x), target)

    def at_the_top(model: Any, x: Tensor, target: Tensor) -> Tensor:
        return mse(model(x), target) + TOP.a.weight.norm()

    phase_model(TOP, Phase("p", loss=given, train="a"))
    with pytest.raises(GemscError, match="by the variable 'TOP'") as caught:
        phase_model(TOP, Phase("p", loss=at_the_top, train="a"))
    assert "the model that the loss gets" in str(caught.value.help)
