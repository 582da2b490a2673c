"""What the recorder refuses, or leaves as it was; losses; and its own check."""

from __future__ import annotations

import collections
import functools
import hashlib
import importlib
import math
import operator
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from record_support import Model, X, checked, mean, names, targets
from torch import nn
from torch.utils import _pytree as pytree

from gemsc.compiler import compile
from gemsc.errors import GemscError, InternalError
from gemsc.frontend import FRONTENDS, check, export, gradients, record
from gemsc.frontend.check import check_against_eager
from gemsc.ir import meta
from gemsc.ir.program import Program, Slot


def biased(self: Any, x: Any) -> Any:
    """Add what fc2 gives for a table; in evaluation, look it up once."""
    if self.training:
        return self.fc(x) + self.fc2.weight[self.table]
    if self.cache is None:
        bias = self.fc2.weight[self.table]
        bias[0] = self.fc2.bias
        self.cache = bias
    return self.fc(x) + self.cache[:3]


def test_a_value_of_parameters_that_evaluation_keeps_is_computed_at_each_call() -> None:
    model = Model(biased, cache=None, table=torch.tensor([0, 2, 1]))
    checked(model)
    program = record(model, (X,), training=False)
    assert "getitem" in names(program) or "bias" in names(program)
    assert model.cache is None


class Cached(Model):
    def train(self, mode: bool = True) -> Any:
        if mode:
            self.cache = None
        return super().train(mode)


def test_a_value_that_the_users_own_evaluation_has_kept_is_computed_anew() -> None:
    model = Cached(biased, cache=None, table=torch.tensor([0, 2, 1])).eval()
    with torch.no_grad():
        model(X)
    kept = model.cache
    program = record(model, (X,), training=False)
    weights = {n.target for n in program.graph.nodes if n.op == "get_attr"}
    assert {"fc2.weight", "fc2.bias"} <= weights
    assert model.cache is kept


class Biased(nn.Module):
    """Looks its biases up in each training step, and once for an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.biases = nn.Parameter(torch.randn(3))
        self.register_buffer("places", torch.tensor([0, 2, 1, 0]))

    @torch.no_grad()
    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode and hasattr(self, "looked_up"):
            del self.looked_up
        else:
            self.looked_up = self.biases[self.places]
        return self

    def forward(self, x: Any) -> Any:
        biases = self.biases[self.places] if self.training else self.looked_up
        return self.fc2(self.fc(x) + biases)


@pytest.mark.slow(1)
@pytest.mark.parametrize("mode", [True, False])
def test_what_eval_makes_of_parameters_is_made_in_each_evaluation(mode: bool) -> None:
    model = Biased().train(mode)
    evaluation = checked(model) and record(model, (X,), training=False)
    assert "biases" in {n.target for n in evaluation.graph.find_nodes(op="get_attr")}
    compile(Biased(), (X,), loss=mean, ranks=2)
    with pytest.raises(GemscError, match=r"eval\(\) makes self.looked_up, which"):
        export(model, (X,), training=False)


def test_a_value_of_parameters_that_training_keeps_is_refused() -> None:
    def forward(self: Any, x: Any) -> Any:
        if self.cache is None:
            self.cache = self.fc2.weight.sum(0)
        return self.fc(x) + self.cache

    with pytest.raises(GemscError, match="earlier call of forward made"):
        record(Model(forward, cache=None), (X,), loss=mean)


def with_a_buffer(forward: Any) -> Model:
    model = Model(forward, cache=None)
    model.register_buffer("slopes", torch.arange(4.0))
    return model


def test_a_value_of_a_buffer_that_nothing_changes_is_kept() -> None:
    def forward(self: Any, x: Any) -> Any:
        if self.cache is None:
            self.cache = -torch.arange(4) * self.slopes
        return self.fc(x) + self.cache

    program = checked(with_a_buffer(forward))
    assert "slopes" in {n.target for n in program.graph.nodes if n.op == "get_attr"}


class Slopes(nn.Module):
    """Makes a table in its first call, as a buffer of which the next take a part."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("slopes", torch.arange(4.0))
        self.register_buffer("table", None, persistent=False)

    def bias(self, size: int) -> Any:
        if self.table is not None:
            return self.table[..., -size:]
        self.register_buffer("table", -self.slopes * torch.arange(size), False)
        return self.table

    def forward(self, x: Any) -> Any:
        return self.fc2(self.fc(x) + self.bias(4)) + self.bias(4)


def test_a_buffer_that_forward_makes_is_no_part_of_what_is_compared() -> None:
    checked(Slopes())
    compile(Slopes(), (X,), loss=mean, ranks=2)


def test_a_value_of_a_buffer_that_changes_is_refused() -> None:
    def forward(self: Any, x: Any) -> Any:
        if self.cache is None:
            self.cache = 2 * self.slopes
        self.slopes.add_(1)
        return self.fc(x) + self.cache

    with pytest.raises(GemscError, match="earlier call of forward made"):
        record(with_a_buffer(forward), (X,), loss=mean)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4),
        lambda: torch.empty(4).normal_(),
        lambda: torch.bernoulli(torch.ones(4) / 2),
        lambda: torch.nn.init.uniform_(torch.empty(4)),
    ],
)
def test_random_numbers_that_forward_keeps_are_refused(make: Any) -> None:
    def forward(self: Any, x: Any) -> Any:
        if self.cache is None:
            self.cache = make()
        return self.fc(x) + self.cache

    with pytest.raises(GemscError, match="earlier call of forward made"):
        record(Model(forward, cache=None), (X,), loss=mean)


@pytest.mark.parametrize("made", [lambda table: table, lambda table: table * 2])
def test_a_table_that_takes_in_the_first_batch_is_refused(made: Any) -> None:
    def forward(self: Any, x: Any) -> Any:
        if self.cache is None:
            table = torch.zeros(4)
            table[:2].copy_(x[0, :2])
            self.cache = made(table)
        return self.fc(x) + self.cache

    with pytest.raises(GemscError, match="earlier call of forward made"):
        record(Model(forward, cache=None), (X,), training=False)


def test_a_table_that_changes_at_each_call_is_refused() -> None:
    def forward(self: Any, x: Any) -> Any:
        self.scale = self.scale * 0.9
        return self.fc(x) * self.scale

    with pytest.raises(GemscError, match="behaves differently when it is called again"):
        record(Model(forward, scale=torch.ones(4)), (X,), loss=mean)


def test_a_mode_or_a_constant_that_differs_at_each_call_is_refused() -> None:
    def learns_once(self: Any, x: Any) -> Any:
        with torch.set_grad_enabled(not self.called):
            h = self.fc(x)
        self.called = True
        return self.fc2(h)

    def tells_the_time(self: Any, x: Any) -> Any:
        now = np.full(4, time.perf_counter_ns() % 1000, "float32")
        return self.fc2(self.fc(x)) * torch.from_numpy(now)

    for forward in (learns_once, tells_the_time):
        with pytest.raises(GemscError, match="behaves differently when it is called"):
            record(Model(forward, called=False), (X,), loss=mean)


class Cache:
    """What a model returns beside its result, for its own next call."""

    def __init__(self, key: torch.Tensor) -> None:
        self.key = key


def test_an_object_beside_the_outputs_is_left_out_with_a_note() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.fc(x)
        return {"logits": self.fc2(h), "past": [Cache(h)]}

    def loss(output: Any) -> torch.Tensor:
        return output["logits"].mean() + output["past"][0].key.mean()

    program = checked(Model(forward), loss=loss)
    assert program.structure == {"logits": Slot(0), "past": [None]}
    (note,) = program.notes
    assert "returns past, of type Cache" in note


class Couple:
    """A container that torch's pytree is told of."""

    def __init__(self, first: Any, second: Any) -> None:
        self.parts = [first, second]


def test_containers_that_pytree_knows_are_looked_into() -> None:
    pytree.register_pytree_node(
        Couple, lambda c: (c.parts, None), lambda parts, _: Couple(*parts)
    )
    try:
        model = Model(lambda self, x: Couple(collections.deque([self.fc(x), 3]), x * 2))
        program = checked(model, loss=lambda output: output.parts[0][0].mean())
    finally:
        pytree._deregister_pytree_node(Couple)
    assert program.structure == [[Slot(0), 3], Slot(1)]
    assert program.notes == ()


# Losses


def test_a_loss_that_is_a_module() -> None:
    weight = torch.tensor([1.0, 2.0, 1.0, 1.0])
    loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)
    target = torch.tensor([0, 1, 3])
    program = checked(Model(lambda self, x: self.fc(x)), loss=loss, target=target)
    assert program.loss is not None
    assert program.loss.target == "_loss"
    assert program.module.get_submodule("_loss") is loss


def test_a_loss_with_own_parameters() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.inner = nn.MSELoss()

        def forward(self, output: Any, target: Any) -> torch.Tensor:
            return self.inner(output * self.scale, target)

    program = checked(Model(lambda self, x: self.fc(x)), loss=Weighted(), target=X)
    assert "_loss.inner" in targets(program)


def test_a_loss_that_uses_the_models_parameters_is_refused() -> None:
    model = Model(lambda self, x: self.fc(x))

    def loss(output: Any) -> torch.Tensor:
        return output.mean() + 0.1 * model.fc.weight.square().sum()

    with pytest.raises(GemscError, match="the loss refers to the model"):
        record(model, (X,), loss=loss)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output: output, "must be a scalar"),
        (lambda output: 3.0, "is of type float"),
        (lambda output: output.detach().mean(), "no parameter gets a gradient"),
        (lambda output: F.mse_loss(output, torch.ones(7, 7)), "the loss fails"),
        (lambda output: output.mul_(2).mean(), "changes what the model returns"),
        (lambda output: output.view(-1).mul_(2).mean(), "changes what the model"),
        (lambda output: operator.setitem(output, 0, 1) or output.mean(), "in place"),
    ],
)
def test_losses_that_cannot_be(loss: Any, message: str) -> None:
    with pytest.raises(GemscError, match=message):
        record(Model(lambda self, x: self.fc(x)), (X,), loss=loss)


def test_a_loss_may_change_a_copy_of_what_the_model_returns() -> None:
    def loss(output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[0] = 1
        return output.mul_(2).mean()

    checked(Model(lambda self, x: self.fc(x)), (X,), loss=loss)


# What is refused


def line_of(text: str) -> int:
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, 1) if text in line)


def branches(self: Any, x: Any) -> Any:
    if x.sum() > 0:  # a branch on data
        return self.fc(x)
    return x


def writes(self: Any, x: Any) -> Any:
    self.text = f"{x.mean():.3f}"  # a number for a log
    return self.fc(x)


def swallows(self: Any, x: Any) -> Any:
    try:
        scale = x.max().item()  # an error that is caught
    except Exception:
        scale = 1.0
    return self.fc(x) * scale


def picks(self: Any, x: Any) -> Any:
    return self.fc(x)[x > 0]  # a size from data


def maps(self: Any, x: Any) -> Any:
    products = torch.vmap(lambda row: self.fc.weight @ row)(x)  # over rows
    return products + self.fc(x)


def maps_inputs(self: Any, x: Any) -> Any:
    doubled = torch.vmap(lambda row: row * 2)(x)  # over inputs
    return self.fc(doubled)


def misfits(self: Any, x: Any) -> Any:
    return self.fc(torch.cat([x, x], 1))  # wrong shapes


def hooks(self: Any, x: Any) -> Any:
    h = self.fc(x)
    h.register_hook(lambda g: g * 2)  # a gradient hook
    return h


def draws(self: Any, x: Any) -> Any:
    h = self.fc(x)
    scale = random.random() + np.random.rand()
    return h * scale  # python random


def counts(self: Any, x: Any) -> Any:
    self.counter += 1
    return self.fc(x) * self.counter  # a counter


def remembers(self: Any, x: Any) -> Any:
    h = self.fc(x + self.state)  # a tensor kept from before
    self.state = h
    return h


@pytest.mark.parametrize(
    ("forward", "message", "text"),
    [
        (branches, "needs the value of a tensor", "# a branch on data"),
        (writes, "needs the value of a tensor", "# a number for a log"),
        (swallows, "needs the value of a tensor", "# an error that is caught"),
        (picks, "size of this tensor depends", "# a size from data"),
        (maps, r"torch\.vmap", "# over rows"),
        (maps_inputs, r"alone may also move", "# over inputs"),
        (misfits, "the model fails on example_inputs", "# wrong shapes"),
        (hooks, "register_hook", "# a gradient hook"),
        (draws, "not deterministic: it draws", "# python random"),
        (counts, "not deterministic: it behaves", "# a counter"),
        (remembers, "earlier call of forward", "# a tensor kept from before"),
    ],
)
def test_what_cannot_be_traced_is_refused_with_its_line(
    forward: Any, message: str, text: str
) -> None:
    model = Model(forward, counter=0, state=torch.zeros(4))
    with pytest.raises(GemscError, match=message) as caught:
        record(model, (X,), loss=mean)
    assert caught.value.at is not None
    assert caught.value.at.file == __file__
    assert caught.value.at.line == line_of(text)
    assert caught.value.help or forward is misfits


@pytest.mark.parametrize("body", ["h[h > 0]", "h.view(5, -1)", "h / random.random()"])
def test_an_error_in_a_package_says_which_line_of_the_users_called_it(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site-packages").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    package = tmp_path / "site-packages/there.py"
    package.write_text(f"import random\ndef pick(h):\n    return {body}\n")
    monkeypatch.delitem(sys.modules, "there", raising=False)

    def forward(self: Any, x: Any) -> Any:
        there = importlib.import_module("there")
        return there.pick(self.fc(x))  # a call of a package

    with pytest.raises(GemscError) as caught:
        record(Model(forward), (X,), loss=mean)
    assert caught.value.at is not None
    assert (caught.value.at.file, caught.value.at.line) == (str(package), 3)
    line = line_of("# a call of a package")
    assert f"test_record_refused.py:{line}: note: called here: " in str(caught.value)


@pytest.mark.parametrize(
    "draw", [lambda: random.uniform(0, 1), lambda: random.random()]
)
def test_a_draw_that_decides_nothing_is_left_out(draw: Any) -> None:
    def drops(self: Any, x: Any) -> Any:
        h = self.fc(x)
        return h if draw() < self.layerdrop else self.fc2(h)

    before, function = random.getstate(), random.random
    program = record(Model(drops, layerdrop=0.0), (X,), loss=mean)
    assert names(program).count("fc2") == 1
    assert (random.getstate(), random.random) == (before, function)
    assert "random" not in vars(function.__self__)
    for layerdrop in (1e-12, 1 - 1e-12):
        with pytest.raises(GemscError, match="it draws from Python's or NumPy's"):
            record(Model(drops, layerdrop=layerdrop), (X,), loss=mean)


@pytest.mark.parametrize(
    "decides",
    [
        lambda: random.random() > random.random(),
        lambda: random.random() < random.random(),
        lambda: 0.4 < random.random() < 0.6,
        lambda: 0.2 < random.random() < 0.3,
        lambda: 1 - random.uniform(1, 3) / 2 > -0.1,
        lambda: random.random() == 0.25,
        lambda: 0.2 < 1 - random.random() < 0.3,
        lambda: int(random.random() * 10) == 5,
        lambda: round(random.random(), 1) == 0.5,
        lambda: max(random.random(), random.random(), 0.5) > 0.7,
        lambda: random.randrange(10**9) == 0,
        lambda: np.random.rand() < 0,
        lambda: random.expovariate(1) > 20,  # math.log makes a plain number of it
        lambda: random.expovariate(1) < random.expovariate(1) - 20,
        lambda: random.gauss(0, 1) < -99,
        lambda: random.normalvariate(0, 1) < -99,  # draws until it likes two numbers
    ],
)
def test_a_draw_that_may_decide_something_is_refused(decides: Any) -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.fc(x)
        return h * 2 if decides() else h

    with pytest.raises(GemscError, match="not deterministic") as caught:
        record(Model(forward), (X,), loss=mean)
    assert "apply_spec_augment=False" in str(caught.value.help)


@pytest.mark.parametrize(
    ("frozen", "what"), [(False, "freezes 'fc.bias'"), (True, "trains 'fc.bias'")]
)
def test_a_forward_that_freezes_weights_or_trains_frozen_ones_is_refused(
    frozen: bool, what: str
) -> None:
    def forward(self: Any, x: Any) -> Any:
        y = self.fc2(self.fc(x))
        self.fc.requires_grad_(frozen)  # set here
        return y

    model = Model(forward)
    record(model, (X,), training=False)
    model.fc.requires_grad_(not frozen)
    with pytest.raises(GemscError, match=what) as caught:
        record(model, (X,), loss=mean)
    assert caught.value.at
    assert "# set here" in str(caught.value)
    model.fc.requires_grad_(frozen)
    record(model, (X,), loss=mean)


@pytest.mark.parametrize(
    "draw", [random.random, lambda: 1 + 0.1 * random.random(), np.random.rand]
)
def test_a_draw_whose_value_is_taken_is_refused(draw: Any) -> None:
    """It would be the same number at each step."""
    model = Model(lambda self, x: self.fc(x) * draw())
    with pytest.raises(GemscError, match="not deterministic"):
        record(model, (X,), loss=mean)


def _with_a_generator(self: Any, x: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    return self.fc(x) + torch.randn(4, generator=generator)


def _with_a_seed(self: Any, x: Any, seed: int = 5) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        noise = torch.randn(4)
    return self.fc(x) + noise


@pytest.mark.parametrize(
    ("forward", "word"),
    [
        (_with_a_generator, "leave it out: gemsc"),
        (_with_a_seed, "leave out torch.manual_seed"),
        (functools.partial(_with_a_seed, seed=0), "leave out torch.manual_seed"),
    ],
)
def test_seeds_of_forward_s_own_are_to_be_left_out(forward: Any, word: str) -> None:
    with pytest.raises(GemscError) as caught:
        compile(Model(forward), (X,), loss=mean)
    assert word in str(caught.value.help)
    assert "seeds torch's generators" in str(caught.value.help)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [((), "holds no tensor"), (3, "of type int"), ({}, "holds no tensor")],
)
def test_inputs_that_are_none(inputs: Any, message: str) -> None:
    with pytest.raises(GemscError, match=message):
        record(Model(lambda self, x: x), inputs)


def test_outputs_that_cannot_be_carried_are_refused() -> None:
    with pytest.raises(GemscError, match="returns no tensor, but a set"):
        record(Model(lambda self, x: {self.fc(x)}), (X,))
    with pytest.raises(GemscError, match="returns no tensor"):
        record(Model(lambda self, x: 3), (X,))


def test_hooks_and_lazy_parameters_are_refused() -> None:
    model = Model(lambda self, x: self.fc(x))
    model.fc.register_full_backward_hook(lambda *args: None)
    with pytest.raises(GemscError, match="fc has a backward hook"):
        record(model, (X,))
    model = Model(lambda self, x: self.fc(x))
    model.fc.register_full_backward_pre_hook(lambda *args: None)
    with pytest.raises(GemscError, match="fc has a backward hook"):
        record(model, (X,))
    model = Model(lambda self, x: self.fc(x))
    model.fc.weight.register_hook(lambda gradient: gradient / 2)  # no copy has it
    with pytest.raises(GemscError, match=r"parameter fc\.weight has a gradient hook"):
        record(model, (X,))
    model = Model(lambda self, x: self.fc(x))
    model.fc.bias.register_post_accumulate_grad_hook(lambda bias: None)
    with pytest.raises(GemscError, match=r"parameter fc\.bias has a gradient hook"):
        record(model, (X,))
    lazy = nn.Sequential(nn.LazyLinear(3))
    for refuse in (record, functools.partial(compile, loss=mean)):
        with pytest.raises(GemscError, match=r"'0\.weight' has no shape"):
            refuse(lazy, (X,))


# Nothing of the user's changes


def fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    flags = [(name, module.training) for name, module in model.named_modules()]
    states = [flags, random.getstate(), np.random.get_state(legacy=True)[1].tobytes()]
    digest.update(torch.get_rng_state().numpy().tobytes() + repr(states).encode())
    return digest.hexdigest()


def test_recording_changes_neither_the_model_nor_random_numbers() -> None:
    def forward(self: Any, x: Any) -> Any:
        self.count.add_(1)
        return self.drop(self.bn(self.fc(x))) + torch.rand(4)

    model = Model(forward, bn=nn.BatchNorm1d(4), drop=nn.Dropout())
    model.register_buffer("count", torch.zeros(()))
    model.bn.eval()
    before = fingerprint(model)
    program = record(model, (X,), loss=mean)
    check_against_eager(program, model, (X,), mean)
    record(model, (X,), training=False)
    assert fingerprint(model) == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert nn.Module._call_impl.__module__ == "torch.nn.modules.module"
    assert torch.autograd.Function.apply.__module__ != "gemsc.frontend.tracer"
    assert "__init__" not in vars(torch.autograd.function.BackwardCFunction)


def test_the_program_holds_the_users_own_objects() -> None:
    model = Model(lambda self, x: self.fc(x))
    program = record(model, (X,))
    assert program.module.fc is model.fc
    assert program.module.fc.weight is model.fc.weight


# The check itself


def change_operator(program: Program) -> None:
    node = next(n for n in program.graph.nodes if n.target is operator.add)
    node.target = operator.sub


def forget_region(program: Program) -> None:
    for node in program.graph.nodes:
        node.meta["gemsc_region"] = meta.Region()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change_operator, "output 0 differs"),
        (forget_region, "the gradient of fc.weight"),
    ],
)
def test_the_check_catches_a_wrong_graph(damage: Any, message: str) -> None:
    def forward(self: Any, x: Any) -> Any:
        with torch.no_grad():
            h = self.fc(x)
        return self.fc2(x) + h

    model = Model(forward)
    program = record(model, (X,), loss=mean)
    damage(program)
    with pytest.raises(GemscError, match=message) as caught:
        check_against_eager(program, model, (X,), mean)
    assert "--frontend export" in str(caught.value)


def test_the_check_allows_a_last_bit_of_bfloat16() -> None:
    one, bit = torch.ones(4, dtype=torch.bfloat16), 2**-8
    assert gradients.difference_of(one * (1 + 2 * bit), one, 0.0) is None
    assert gradients.difference_of(one * (1 + 8 * bit), one, 0.0) is not None


class Choice(nn.Module):
    def forward(self, output: Any) -> Any:
        return output.mean() if output.sum() > 0 else output.square().mean()


def test_a_loss_function_that_needs_data_becomes_a_module() -> None:
    choice = Choice()
    model = Model(lambda self, x: self.fc(x))
    for loss in (choice, lambda output: choice(output)):
        program = record(model, (X,), loss=loss)
        check_against_eager(program, model, (X,), loss)


def deep(self: Any, x: Any) -> Any:
    h = self.fc(x) * 2
    h[:, :1] += x[:, :1]
    wrong = h.sigmoid() + 1
    h = self.fc2(wrong)
    return h.tanh()


@pytest.mark.parametrize("layers", ["before", "after"])
def test_the_check_names_the_first_value_that_differs(layers: str) -> None:
    model = Model(deep)
    if layers == "after":
        lstm = nn.LSTM(4, 4, batch_first=True)
        model = Model(lambda self, x: deep(self, x) + self.lstm(x)[0], lstm=lstm)
    program = record(model, (X,), loss=mean)
    node = next(n for n in program.graph.nodes if n.target == "sigmoid")
    node.target = "cosh"
    with pytest.raises(GemscError, match=r"differs by .*is that of 'sig") as caught:
        check_against_eager(program, model, (X,), mean)
    assert caught.value.at is not None
    assert "wrong = h.sigmoid() + 1" in caught.value.at.text


def test_the_check_catches_a_missing_buffer_update() -> None:
    def forward(self: Any, x: Any) -> Any:
        self.count.add_(1)
        return self.fc(x)

    model = Model(forward)
    model.register_buffer("count", torch.zeros(()))
    program = record(model, (X,), loss=mean)
    node = next(n for n in program.graph.nodes if n.target == "add_")
    program.graph.erase_node(node)
    with pytest.raises(GemscError, match="buffer count differs"):
        check_against_eager(program, model, (X,), mean)


def clamp(self: Any, x: Any) -> Any:
    with torch.no_grad():
        self.fc.weight[:2].clamp_(-0.1, 0.1)
    return self.fc(x)


def shrink(self: Any, x: Any) -> Any:
    self.fc.weight.data.mul_(0.5)
    return self.fc(x)


def look_up(self: Any, x: Any) -> Any:
    return self.fc(x) + self.table(torch.arange(3))


@pytest.mark.parametrize("forward", [clamp, shrink, look_up])
def test_the_check_leaves_weights_that_forward_changes(forward: Any) -> None:
    model = Model(forward, table=nn.Embedding(4, 4, max_norm=0.01))
    before = fingerprint(model)
    program = record(model, (X,), loss=mean)
    check_against_eager(program, model, (X,), mean)
    assert fingerprint(model) == before


def test_the_check_takes_weights_that_a_layer_changes_unseen_for_its_own() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Any) -> Any:
            if not torch.compiler.is_compiling() and type(x) is torch.Tensor:
                self.weight.detach().mul_(0.5)
            return super().forward(x)

    model = Model(lambda self, x: self.own(x), own=Scaled(4, 4))
    program = record(model, (X,), loss=mean)
    with pytest.raises(InternalError, match="changes 'own"):
        check_against_eager(program, model, (X,), mean)


class _Off(torch.autograd.Function):
    """Another gradient in the eager run than in the graph, in one element of many."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        grad = grad.clone()
        grad[-1] *= _Off.factor
        return grad


def _other_gradient_in_graph(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Let the second run of the check, the graph's, have another gradient."""
    runs, original = iter((1.0, factor)), check._finish

    def run(*args: Any) -> Any:
        _Off.factor = next(runs, 1.0)
        return original(*args)

    monkeypatch.setattr(check, "_finish", run)


@pytest.mark.parametrize(
    ("size", "off", "says"),
    [
        (1e-3, 2e-5, ""),  # a last bit of the weights changes as much
        (1e-4, 1e-3, "differs by 1.0e-03"),  # as this, but that is too much
        (1.0, 2e-5, "differs by 2.0e-05"),
    ],
)
def test_a_gradient_may_be_off_by_what_rounding_changes(
    size: float, off: float, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Any, x: Any) -> Any:
        return (_Off.apply(self.gains) - x).square().sum()

    model = Model(forward)
    model.register_parameter("gains", nn.Parameter(torch.ones(100)))
    x = torch.full((100,), 1 - size)
    program = record(model, (x,), loss=mean)
    _other_gradient_in_graph(monkeypatch, 1 + off)
    refused = pytest.raises(GemscError, match=says) if says else nullcontext()
    with refused:
        check_against_eager(program, model, (x,), mean)


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (1.0, ""),
        (1.0 + 1e-7, ""),
        (1.01, "the gradient of gains differs by 1.0e-02 of"),
        (math.nan, "the gradient of gains is finite in one and not in the other"),
    ],
)
def test_the_check_compares_every_chunk(
    factor: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "CHUNK", 7)

    def forward(self: Any, x: Any) -> Any:
        return (_Off.apply(self.gains) * x).sum()

    model = Model(forward)
    model.register_parameter("gains", nn.Parameter(torch.ones(100)))
    x = torch.ones(100)
    program = record(model, (x,), loss=mean)
    _other_gradient_in_graph(monkeypatch, factor)
    if not message:
        check_against_eager(program, model, (x,), mean)
        return
    with pytest.raises(GemscError, match=message):
        check_against_eager(program, model, (x,), mean)


@pytest.mark.parametrize("place", [0, 10, 19])
def test_a_difference_in_any_chunk_is_one(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "CHUNK", 7)
    one = torch.ones(20)
    for number, text in ((1.5, "differs by 5.0e-01"), (math.nan, "is finite in one")):
        other = one.clone()
        other[place] = number
        assert (gradients.difference_of(other, one, 0.0) or "").startswith(text)
        assert gradients.difference_of(other, other.clone(), 0.0) is None


def test_a_custom_function_whose_call_is_not_seen_is_refused() -> None:
    # as where torch's own `apply` is written in C
    taken = vars(torch._C._FunctionBase)["apply"].__get__(None, _Off)

    def forward(self: Any, x: Any) -> Any:
        return taken(self.fc(x))

    with pytest.raises(GemscError, match=r"_Off\.apply was taken from") as caught:
        record(Model(forward), (X,), loss=mean)
    assert caught.value.at is not None
    assert caught.value.at.text == "return taken(self.fc(x))"
    checked(Model(lambda self, x: self.fc(taken(x))))  # there is no gradient to lose


class _Shifted(torch.autograd.Function):
    """Overwrites what it is given, and does not say so."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        x -= 1
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


@pytest.mark.parametrize(
    "input_of",
    [lambda h: h, lambda h: h[:, :2], lambda h: h.view(-1)],
    ids=["value", "part", "view"],
)
def test_a_custom_function_may_overwrite_what_others_use(
    input_of: Callable[[Any], Any],
) -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.fc(x)
        y = _Shifted.apply(input_of(h))
        return h.sum() + y.sum()

    checked(Model(forward))
    checked(Model(lambda self, x: _Shifted.apply(self.fc(x))))
    checked(Model(lambda self, x: _Shifted.apply((h := self.fc(x)).clone()) + h))


@pytest.mark.parametrize("frontend", FRONTENDS.values(), ids=FRONTENDS)
def test_a_forward_that_ends_python_is_an_error_of_the_model(frontend: Any) -> None:
    def ends(self: Any, x: Any) -> Any:
        return self.fc(x) if self.training else sys.exit()  # with code 0, too

    model = Model(ends)
    with pytest.raises(GemscError, match="SystemExit") as caught:
        frontend(model, (X,), training=False)
    assert caught.value.at is not None
    assert "sys.exit()" in caught.value.at.text
    with pytest.raises(GemscError, match="SystemExit: 3"):
        frontend(model, (X,), loss=lambda output: sys.exit(3))


def test_partial_functions_can_be_losses() -> None:
    loss = functools.partial(F.mse_loss, reduction="sum")
    checked(Model(lambda self, x: self.fc(x)), loss=loss, target=X)


def through_fc2(self: Any, x: Any) -> Any:
    return self.fc2(torch.relu(self.fc(x)))


def tabled(model: Model) -> None:
    model.fc2.table = model.fc.weight * 2


def locked(model: Model) -> None:
    model.fc2.locks = [threading.Lock()]


@pytest.mark.parametrize(
    ("change", "says", "helps"),
    [
        (tabled, "'fc2.table' is a tensor that was computed", ".detach()"),
        (locked, r"'fc2.locks' is a list: TypeError", "keep locks"),
    ],
)
def test_what_cannot_be_copied_is_named(
    change: Callable[[Model], None], says: str, helps: str
) -> None:
    model = Model(through_fc2)
    change(model)
    with pytest.raises(GemscError, match=f"the model cannot be copied: {says}") as info:
        checked(model)
    assert helps in str(info.value.help)


class Merging(nn.Linear):
    """As a LoRA that `eval()` adds to the weight, and `train()` takes away."""

    def __init__(self, merge: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__(4, 4)
        self.more, self.merge = nn.Parameter(torch.ones(4, 4)), merge

    def train(self, mode: bool = True) -> Merging:
        if mode != self.training:
            with torch.no_grad():
                self.merge(self.weight, -self.more if mode else self.more)
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (x @ self.more.T if self.training else 0)


@pytest.mark.parametrize(
    "merge",
    [
        lambda weight, more: weight.add_(more),
        lambda weight, more: weight.copy_(weight + more),
        lambda weight, more: weight[:2].add_(more[:2]),
        lambda weight, more: weight.data.mul_(2),
    ],
    ids=["add_", "copy_", "rows", "data"],
)
def test_weights_that_eval_changes_are_refused(merge: Callable[..., Any]) -> None:
    """Each evaluation would change them again, and nothing takes it back."""
    record(Merging(merge), (X,))
    with pytest.raises(GemscError, match=r"eval\(\) changes weight, which") as caught:
        record(Merging(merge), (X,), training=False)
    assert "keep a new tensor" in str(caught.value)


def test_what_eval_assigns_to_data_has_advice_of_its_own() -> None:
    """There is no forward to change where a library does so."""
    model = Merging(lambda weight, more: setattr(weight, "data", weight.data + more))
    with pytest.raises(GemscError, match=r"eval\(\) assigns to \.data") as caught:
        record(model, (X,), training=False)
    assert "merge_weights=False" in str(caught.value)


def test_torch_export_refuses_them_too() -> None:
    model = Merging(lambda weight, more: weight.add_(more))
    with pytest.raises(GemscError, match=r"eval\(\) makes weight, which torch.export"):
        export(model.eval(), (X,), training=False)


@pytest.mark.parametrize("trace", [record, export])
def test_a_train_that_returns_nothing_is_no_error(trace: Callable[..., Any]) -> None:
    class Frozen(nn.Linear):
        def train(self, mode: bool = True) -> None:  # type: ignore[override]
            super().train(mode)

    for training in (True, False):
        trace(nn.Sequential(Frozen(4, 4)), (X,), training=training)
        trace(Frozen(4, 4), (X,), training=training)


def test_a_distribution_that_looks_at_its_arguments_need_not() -> None:
    def draws(self: Any, x: Any, looks: bool) -> Any:
        normal = torch.distributions.MultivariateNormal
        spread = torch.eye(4) * self.fc(x).abs().mean()
        return normal(self.fc(x), spread, validate_args=looks).rsample()

    with pytest.raises(GemscError, match="needs the value") as caught:
        record(Model(functools.partial(draws, looks=True)), (X,), loss=mean)
    assert "validate_args=False" in str(caught.value.help)
    record(Model(functools.partial(draws, looks=False)), (X,), loss=mean)


def test_inference_mode_around_compile_is_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(3, 2)
    with torch.inference_mode(), pytest.raises(GemscError, match="inference_mode"):
        compile(net, (x,), loss=mean, example_target=x, ranks=2)
