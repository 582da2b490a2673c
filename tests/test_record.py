"""The recorder gives the user's model, or says which line it cannot take."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import operator
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from gemsc.errors import GemscError
from gemsc.frontend import record
from gemsc.frontend.check import check_against_eager
from gemsc.ir import meta
from gemsc.ir.program import DataclassValue, Program, Slot

torch.set_num_threads(1)
SCALE = torch.tensor([1.0, 2.0, 3.0, 4.0])


class Model(nn.Module):
    """A few layers and whatever forward a test gives."""

    def __init__(self, forward: Any, **attributes: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.steps = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps(self, *args, **kwargs)


class Named(Model):
    def forward(self, x: torch.Tensor, mask: Any = None, index: Any = None) -> Any:
        return self.steps(self, x, mask, index)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def mean(output: Any) -> torch.Tensor:
    return output.mean()


def square(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def checked(
    model: nn.Module, inputs: Any = (X,), loss: Any = mean, target: Any = None
) -> Program:
    torch.manual_seed(0)
    program = record(model, inputs, loss=loss, target=target)
    program.graph.lint()
    check_against_eager(program, model, inputs, loss, target)
    evaluation = record(model, inputs, training=False)
    check_against_eager(evaluation, model, inputs, training=False)
    return program


def targets(program: Program) -> list[Any]:
    return [node.target for node in program.compute_nodes]


def names(program: Program) -> list[str]:
    return [node.name for node in program.compute_nodes]


# Inputs and outputs


def test_nodes_are_named_after_the_users_variables() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.relu(self.fc(x))
        a, b = h.chunk(2, 1)[0], h + 1
        left, right = torch.split(h, 2, dim=1)
        b += 1
        return h * torch.cat([left, right], 1) * a.sum() * b

    program = checked(Model(forward))
    assert names(program)[:2] == ["fc", "h"]
    assert {"left", "right", "b"} <= set(names(program))


def test_every_node_knows_its_line() -> None:
    program = checked(Model(lambda self, x: self.fc(x) + 1))
    assert all(meta.location(n) for n in program.compute_nodes if n != program.loss)
    assert program.sources == (__file__,)


def test_operators_stay_operators_and_methods_methods() -> None:
    program = checked(Model(lambda self, x: (1 - self.fc(x)).mul(2) / 3 @ x.T))
    found = targets(program)
    assert found[:5] == ["fc", operator.sub, "mul", operator.truediv, getattr]
    assert found[5] is operator.matmul


def test_functions_have_only_the_arguments_that_the_user_wrote() -> None:
    program = checked(Model(lambda self, x: F.softmax(F.relu(self.fc(x)), dim=-1)))
    relu = next(n for n in program.graph.nodes if n.target is F.relu)
    softmax = next(n for n in program.graph.nodes if n.target is F.softmax)
    assert relu.kwargs == {}
    assert softmax.kwargs == {"dim": -1}


def test_keyword_mask_and_integer_inputs() -> None:
    def forward(self: Any, x: Any, mask: Any, index: Any) -> Any:
        return self.fc(x).masked_fill(mask, 0.0)[index]

    inputs = {"index": torch.tensor([2, 0]), "x": X, "mask": X > 0}
    program = checked(Named(forward), inputs)
    assert [item.path for item in program.inputs] == [
        ("input", "index"),
        ("input", "x"),
        ("input", "mask"),
    ]
    assert program.inputs[2].spec.dtype is torch.bool


def test_nested_inputs_with_constants() -> None:
    def forward(self: Any, batch: Any) -> Any:
        return self.fc(batch["x"]) * batch["pair"][1] + batch["k"]

    inputs = ({"x": X, "pair": [X, X + 1], "k": 3.0},)
    program = checked(Model(forward), inputs)
    assert len(program.inputs) == 3
    assert program.inputs[2].path == ("input", 0, "pair", 1)


def test_unused_inputs_stay_and_late_inputs_work() -> None:
    def forward(self: Any, x: Any, mask: Any, index: Any) -> Any:
        return self.fc2(self.fc(x)) + index

    program = checked(Named(forward), (X, X, X))
    assert [item.name for item in program.inputs] == ["x", "mask", "index"]


def test_nested_targets() -> None:
    def loss(output: Any, target: Any) -> torch.Tensor:
        return F.mse_loss(output, target["boxes"][0]) + target["w"].mean()

    target = {"boxes": [X, X], "w": X}
    program = checked(Model(lambda self, x: self.fc(x)), loss=loss, target=target)
    assert [item.name for item in program.inputs] == [
        "args_0",
        "target_boxes_0",
        "target_boxes_1",
        "target_w",
    ]


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    note: str = "n"


Pair = collections.namedtuple("Pair", "first second")


def test_outputs_of_every_kind() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.fc(x)
        pair = Pair(h, None)
        return {"a": [h, x], "o": Output(h * 2, (h, x)), "p": pair, "n": 3}

    def loss(output: Any) -> torch.Tensor:
        return output["o"].logits.sum() + output["p"].first.mean()

    program = checked(Model(forward), loss=loss)
    expected = DataclassValue(
        Output, (("logits", Slot(2)), ("hidden", (Slot(3), Slot(4))), ("note", "n"))
    )
    assert program.structure["a"] == [Slot(0), Slot(1)]
    assert program.structure["o"] == expected
    assert program.structure["p"] == Pair(Slot(5), None)
    assert program.structure["n"] == 3


# Modules and parameters


def test_tied_parameters_are_one_parameter() -> None:
    model = Model(lambda self, x: self.fc2(self.fc(x)) @ self.fc.weight)
    model.fc2.weight = model.fc.weight
    program = checked(model)
    assert program.aliases == {"fc2.weight": "fc.weight"}
    assert program.module.fc2.weight is model.fc.weight


def test_a_module_called_twice_is_one_module() -> None:
    program = checked(Model(lambda self, x: self.fc(self.fc(x))))
    assert targets(program)[:2] == ["fc", "fc"]


def test_a_module_under_two_names_is_one_module() -> None:
    model = Model(lambda self, x: self.again(self.fc(x)))
    model.again = model.fc
    program = checked(model)
    assert targets(program)[:2] == ["fc", "fc"]
    assert program.aliases["again.weight"] == "fc.weight"


def test_parameters_that_forward_never_uses_stay_in_the_program() -> None:
    model = Model(lambda self, x: self.fc(x))
    program = checked(model)
    assert program.module.get_submodule("fc2") is model.fc2


def test_plain_and_global_tensors_become_constants() -> None:
    local = torch.full((4,), 2.0)

    def forward(self: Any, x: Any) -> Any:
        here = torch.from_numpy(np.ones(4, dtype=np.float32))
        return self.fc(x) * SCALE + self.table + local + here + torch.tensor(2.0)

    model = Model(forward, table=torch.arange(4.0))
    program = checked(model)
    constants = dict(program.module.get_submodule("_constants").named_buffers())
    assert torch.equal(constants["table"], torch.arange(4.0))
    assert len(constants) == 4


def test_numpy_indices_and_numbers() -> None:
    index = np.array([0, 2])
    checked(Model(lambda self, x: self.fc(x)[:, index] * np.float64(0.5)))


def test_running_statistics_advance() -> None:
    model = Model(lambda self, x: self.fc2(self.bn(self.fc(x))), bn=nn.BatchNorm1d(4))
    checked(model)
    assert int(model.bn.num_batches_tracked) == 0


def test_a_buffer_changed_or_replaced_in_forward() -> None:
    def forward(self: Any, x: Any) -> Any:
        self.count.add_(1)
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return self.fc(x - self.average)

    model = Model(forward)
    model.register_buffer("count", torch.zeros((), dtype=torch.long))
    model.register_buffer("average", torch.zeros(4))
    program = checked(model)
    assert "copy_" in targets(program)
    assert torch.equal(model.average, torch.zeros(4))


def test_lstm_attention_and_transformer() -> None:
    def forward(self: Any, x: Any) -> Any:
        x = x[:, None]
        x, (_, c) = self.lstm(x)
        x, _ = self.attention(x, x, x)
        return self.encoder(x).sum(1) + c[0]

    model = Model(
        forward,
        lstm=nn.LSTM(4, 4, batch_first=True),
        attention=nn.MultiheadAttention(4, 2, batch_first=True),
        encoder=nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    )
    program = checked(model)
    assert "lstm" in targets(program)
    assert "encoder.linear1" in targets(program)
    assert F.multi_head_attention_forward in targets(program)


def test_layers_that_stay_in_eval_mode_are_frozen() -> None:
    model = Model(lambda self, x: self.bn(self.fc(x)), bn=nn.BatchNorm1d(4))
    model.bn.eval()
    program = record(model, (X,), loss=mean)
    assert program.frozen == {"bn"}
    check_against_eager(program, model, (X,), mean)


def test_a_model_in_eval_mode_is_traced_in_training_mode() -> None:
    model = Model(lambda self, x: F.dropout(self.fc(x), training=self.training))
    model.eval()
    program = record(model, (X,), loss=mean)
    node = next(n for n in program.graph.nodes if n.target is F.dropout)
    assert node.kwargs.get("training", True) is True
    assert not model.training


def test_layers_with_hooks_are_looked_into() -> None:
    model = Model(lambda self, x: self.fc2(self.fc(x)))
    model.fc.register_forward_hook(lambda module, args, output: output * 2)
    program = checked(model)
    assert F.linear in targets(program)


def test_weight_norm_is_looked_into() -> None:
    model = Model(lambda self, x: self.fc2(self.fc(x)))
    nn.utils.parametrizations.weight_norm(model.fc)
    checked(model)


# What forwards do


def test_integer_arithmetic_on_sizes_and_einops_like_code() -> None:
    def forward(self: Any, x: Any) -> Any:
        rows, columns = x.shape
        h = self.fc(x).reshape(rows, 2, columns // 2).permute(0, 2, 1)
        h = torch.einsum("bij,bkj->bik", h, h).flatten(1)
        return h.unflatten(1, (2, -1)).expand(-1, 2, -1).contiguous().view(rows, -1)

    checked(Model(forward))


def test_isinstance_branches_see_tensors() -> None:
    def forward(self: Any, x: Any) -> Any:
        skip = self.fc(x)
        assert isinstance(skip, torch.Tensor)
        values = [skip, x] if isinstance(skip, torch.Tensor) else [x]
        return torch.cat(values, 1)

    program = checked(Model(forward))
    assert torch.cat in targets(program)


def test_no_grad_and_autocast_regions() -> None:
    def forward(self: Any, x: Any) -> Any:
        with torch.no_grad():
            base = self.fc(x)
        with torch.autocast("cpu", torch.bfloat16):
            h = self.fc2(x) @ x.T
        return base.sum() * h.float()

    program = checked(Model(forward))
    regions = {node.name: meta.region(node) for node in program.graph.nodes}
    assert not regions["base"].grad
    assert regions["h"].autocast == ("cpu", torch.bfloat16)
    assert regions["fc2"].autocast == ("cpu", torch.bfloat16)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.relu() * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 7, None  # wrong on purpose: it must be the user's


def test_a_custom_autograd_function_keeps_its_backward() -> None:
    program = checked(Model(lambda self, x: Doubled.apply(self.fc(x), 2.0)))
    node = next(n for n in program.graph.nodes if n.target == Doubled.apply)
    assert node.args[1] == 2.0
    assert node.name == "doubled"


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def test_scripted_functions_are_recorded() -> None:
    checked(Model(lambda self, x: scripted(self.fc(x))))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_looked_into(reentrant: bool) -> None:
    def forward(self: Any, x: Any) -> Any:
        return checkpoint(self.fc, self.fc2(x), use_reentrant=reentrant)

    program = checked(Model(forward))
    assert "fc" in targets(program)
    (note,) = program.notes
    assert f"test_record.py:{line_of('use_reentrant=reentrant)')}" in note


@pytest.mark.parametrize("reentrant", [True, False])
def test_statistics_in_a_checkpoint_are_updated_once(reentrant: bool) -> None:
    def forward(self: Any, x: Any) -> Any:
        h = checkpoint(self.norm, self.fc(x), use_reentrant=reentrant)
        return checkpoint(self.norm, h, use_reentrant=reentrant)

    program = checked(Model(forward, norm=nn.BatchNorm1d(4)))
    assert targets(program).count("norm") == 2
    (note,) = program.notes
    assert "this activation checkpoint and 1 more" in note


def test_dropout_and_random_functions_draw_the_same_numbers() -> None:
    def forward(self: Any, x: Any) -> Any:
        x = self.drop(self.fc(x)) + torch.rand(4)
        return x * torch.empty(4).bernoulli_(0.5)

    checked(Model(forward, drop=nn.Dropout(0.3)))


def test_changes_in_place_of_every_kind() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.fc(x)
        h = h + self.relu(h)
        h.unsqueeze_(0)
        view = h[0, :, :2]
        view.mul_(2)
        h[..., 3] = 0
        h -= 1
        return F.relu(h * 2, inplace=True)

    checked(Model(forward))


def test_a_table_made_in_the_first_call_is_accepted() -> None:
    def forward(self: Any, x: Any) -> Any:
        if self.cache is None:
            self.cache = torch.arange(4.0) * 2
            self.cache[1] = torch.ones(())
        return self.fc(x) + self.cache.expand(3, -1).cos()

    model = Model(forward, cache=None)
    checked(model)
    assert model.cache is None


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


def test_a_value_of_parameters_that_training_keeps_is_refused() -> None:
    def forward(self: Any, x: Any) -> Any:
        if self.cache is None:
            self.cache = self.fc2.weight.sum(0)
        return self.fc(x) + self.cache

    with pytest.raises(GemscError, match="earlier call of forward made"):
        record(Model(forward, cache=None), (X,), loss=mean)


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


def test_a_table_that_takes_in_the_first_batch_is_refused() -> None:
    def forward(self: Any, x: Any) -> Any:
        if self.cache is None:
            self.cache = torch.zeros(4)
            self.cache[:2].copy_(x[0, :2])
        return self.fc(x) + self.cache

    with pytest.raises(GemscError, match="earlier call of forward made"):
        record(Model(forward, cache=None), (X,), training=False)


def test_a_table_that_changes_at_each_call_is_refused() -> None:
    def forward(self: Any, x: Any) -> Any:
        self.scale = self.scale * 0.9
        return self.fc(x) * self.scale

    with pytest.raises(GemscError, match="behaves differently when it is called again"):
        record(Model(forward, scale=torch.ones(4)), (X,), loss=mean)


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


def test_a_loss_that_uses_the_models_parameters() -> None:
    model = Model(lambda self, x: self.fc(x))

    def loss(output: Any) -> torch.Tensor:
        return output.mean() + 0.1 * model.fc.weight.square().sum()

    program = record(model, (X,), loss=loss)
    weights = [n for n in program.graph.nodes if n.target == "fc.weight"]
    assert len(weights) == 1


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output: output, "must be a scalar"),
        (lambda output: 3.0, "is of type float"),
        (lambda output: output.detach().mean(), "no parameter gets a gradient"),
        (lambda output: F.mse_loss(output, torch.ones(7, 7)), "the loss fails"),
    ],
)
def test_losses_that_cannot_be(loss: Any, message: str) -> None:
    with pytest.raises(GemscError, match=message):
        record(Model(lambda self, x: self.fc(x)), (X,), loss=loss)


# What is refused


def line_of(text: str) -> int:
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, 1) if text in line)


def branches(self: Any, x: Any) -> Any:
    if x.sum() > 0:  # a branch on data
        return self.fc(x)
    return x


def swallows(self: Any, x: Any) -> Any:
    try:
        scale = x.max().item()  # an error that is caught
    except Exception:
        scale = 1.0
    return self.fc(x) * scale


def picks(self: Any, x: Any) -> Any:
    return self.fc(x)[x > 0]  # a size from data


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
        (swallows, "needs the value of a tensor", "# an error that is caught"),
        (picks, "size of this tensor depends", "# a size from data"),
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


def test_a_counter_that_the_graph_does_not_show_is_refused() -> None:
    def forward(self: Any, x: Any) -> Any:
        self.counter += 1
        return self.fc(x) if self.counter < 1000 else x

    with pytest.raises(
        GemscError, match=r"changes self\.counter at each call: 0, 1, 2"
    ):
        record(Model(forward, counter=0), (X,), loss=mean)


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
    with pytest.raises(GemscError, match="has no shape yet"):
        record(nn.Sequential(nn.LazyLinear(3)), (X,))


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
    assert nn.Module.__call__.__module__ == "torch.nn.modules.module"
    assert torch.autograd.Function.apply.__module__ != "gemsc.frontend.tracer"


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


def test_partial_functions_can_be_losses() -> None:
    loss = functools.partial(F.mse_loss, reduction="sum")
    checked(Model(lambda self, x: self.fc(x)), loss=loss, target=X)
