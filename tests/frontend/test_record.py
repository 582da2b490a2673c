"""What the recorder makes of inputs, modules and forwards."""

from __future__ import annotations

import collections
import dataclasses
import operator
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import record_support
import torch
import torch.nn.functional as F
from command_line import line_of
from record_support import SCALE, Model, Named, X, checked, mean, names, targets
from torch import nn
from torch.utils.checkpoint import checkpoint

from gemsc.compiler import compile
from gemsc.errors import GemscError
from gemsc.frontend import record
from gemsc.frontend.check import check_against_eager
from gemsc.frontend.writer import name_constants
from gemsc.ir import meta
from gemsc.ir.program import DataclassValue, Slot

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
    assert program.sources == (__file__, record_support.__file__)


def test_operators_stay_operators_and_methods_methods() -> None:
    program = checked(Model(lambda self, x: (1 - self.fc(x)).mul(2) / 3 @ x.T))
    called = targets(program)
    assert called[:5] == ["fc", operator.sub, "mul", operator.truediv, getattr]
    assert called[5] is operator.matmul


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


def rates(self: Any, x: Any) -> Any:
    for rate in torch.linspace(0, 0.1, 3).tolist():
        x = x * (1 + rate)
    return self.fc(x)


def takes_one(self: Any, x: Any) -> Any:
    parts = torch.arange(1, 4).flip(0).unbind()
    return self.fc(x * float(parts[0])) if (parts[1] > 1).all() else x


@pytest.mark.parametrize("forward", [rates, takes_one])
def test_numbers_of_what_is_the_same_at_each_call(forward: Any) -> None:
    assert any(f.op == "call_method" for f in checked(Model(forward)).compute_nodes)


def of_data(x: Any) -> Any:
    table = torch.zeros(3)
    table[0] = x.sum()
    return table


def of_data_by_a_view(x: Any) -> Any:
    table = torch.zeros(3)
    view = table[:2]
    table.add_(x.mean())
    return view


def drawn(x: Any) -> Any:
    return torch.zeros(3).normal_()


def with_a_view(x: Any) -> Any:
    table = torch.zeros(3)
    view = table.view(-1)
    table.add_(1)  # the view knows nothing of it
    return view


@pytest.mark.parametrize("make", [of_data, of_data_by_a_view, drawn, with_a_view])
def test_numbers_that_may_be_others_at_each_call_are_refused(make: Any) -> None:
    model = Model(lambda self, x: self.fc(x * make(x).tolist()[0]))
    with pytest.raises(GemscError, match="needs the value of a tensor"):
        record(model, (X,), loss=mean)


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
    assert "clone" not in targets(program)  # backward does not need the old average
    order = [*program.graph.nodes]
    (change,) = (node for node in order if node.target == "copy_")
    assert order.index(change) < order.index(program.loss)  # of no later stage
    assert torch.equal(model.average, torch.zeros(4))


class Centered(nn.Module):
    """As the loss of DINO: its center follows the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4))

    def forward(self, output: Any, target: Any) -> Any:
        loss = ((output - self.center) * target).square().mean()
        self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        return loss


def test_a_loss_replaces_its_buffer() -> None:
    loss = Centered()
    model = Model(lambda self, x: self.fc(x))
    program = record(model, (X,), loss=loss, target=torch.rand_like(X))
    assert "copy_" in targets(program)
    check_against_eager(program, model, (X,), loss, torch.rand_like(X))
    assert torch.equal(loss.center, torch.zeros(4))
    (change,) = (node for node in program.graph.nodes if node.target == "copy_")
    place, code = meta.location(change), Centered.forward.__code__
    assert place is not None
    assert place.line == code.co_firstlineno + 2


@pytest.mark.parametrize("read", [lambda h: h, lambda h: h[None][0]])
def test_a_state_from_step_to_step(read: Callable[[Any], Any]) -> None:
    """Backward needs the old state of a recurrent network, which forward replaces."""

    def forward(self: Any, x: Any) -> Any:
        state = torch.tanh(self.fc(x) + self.fc2(read(self.state)))
        self.state = state.detach()
        return state

    model = Model(forward)
    model.register_buffer("state", torch.rand(X.shape))
    assert targets(checked(model)).count("clone") == 1


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
    assert F.scaled_dot_product_attention in targets(program)
    assert F.multi_head_attention_forward not in targets(program)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.RReLU(), nn.Dropout(0.5)])
def test_layers_that_stay_in_eval_mode_are_frozen(layer: nn.Module) -> None:
    model = Model(lambda self, x: self.layer(self.fc(x)), layer=layer)
    model.layer.eval()
    program = record(model, (X,), loss=mean)
    assert program.frozen == {"layer"}
    check_against_eager(program, model, (X,), mean)


def test_a_model_in_eval_mode_is_traced_in_training_mode() -> None:
    model = Model(lambda self, x: F.dropout(self.fc(x), training=self.training))
    model.eval()
    program = record(model, (X,), loss=mean)
    node = next(n for n in program.graph.nodes if n.target is F.dropout)
    assert node.kwargs.get("training", True) is True
    assert not model.training


def test_a_model_may_return_a_parameter_and_a_buffer() -> None:
    model = Model(lambda self, x: (self.fc(x), self.fc.bias, self.zero))
    model.register_buffer("zero", torch.zeros(()))

    def loss(outputs: Any) -> torch.Tensor:
        return mean(outputs[0] * outputs[1]) + outputs[2]

    checked(model, loss=loss)
    compile(model, (X,), loss=loss, ranks=1)


def test_layers_with_hooks_are_looked_into() -> None:
    model = Model(lambda self, x: self.fc2(self.fc(x)))
    model.fc.register_forward_hook(lambda module, args, output: output * 2)
    program = checked(model)
    assert F.linear in targets(program)


def test_layers_to_which_forward_gives_hooks_are_looked_into() -> None:
    def forward(self: Any, x: Any) -> Any:
        if not self.fc._forward_hooks:
            self.fc.register_forward_hook(lambda module, args, output: output * 2)
        return self.fc2(self.fc(x))

    assert F.linear in targets(checked(Model(forward)))


def test_layers_that_are_lent_weights_are_looked_into() -> None:
    def forward(self: Any, x: Any) -> Any:
        lent = {"weight": self.fc.weight * 2}
        return self.fc2(torch.func.functional_call(self.fc, lent, (x,)))

    assert F.linear in targets(checked(Model(forward)))


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


def test_a_warning_is_given_once() -> None:
    """Whatever else there is to record between two calls of what warns."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            warnings.warn("use another", stacklevel=1)
            x = F.linear(x, self.fc.weight)
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        said: list[str] = []
        warnings.showwarning = lambda message, *_, **__: said.append(str(message))
        record(Model(forward), (X,), training=True)
    assert said == ["use another"]


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


class CheckpointFunction(torch.autograd.Function):
    """As in the code of diffusion models: `weights` are what `run` has of its own."""

    @staticmethod
    def forward(ctx: Any, run: Any, count: int, *tensors: Any) -> Any:
        ctx.run, ctx.given, ctx.weights = run, tensors[:count], tensors[count:]
        with torch.no_grad():
            return run(*ctx.given)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        given = [tensor.detach().requires_grad_() for tensor in ctx.given]
        with torch.enable_grad():
            result = ctx.run(*given)
        learn = [*given, *ctx.weights]
        return None, None, *torch.autograd.grad(result, learn, gradients)


class Copied(CheckpointFunction):
    """As in the code of language models, which is torch's of old."""

    @staticmethod
    def forward(ctx: Any, run: Any, keeps: bool, *tensors: Any) -> Any:
        return CheckpointFunction.forward(ctx, run, len(tensors), *tensors)


Copied.__name__ = "CheckpointFunction"


def test_a_checkpoint_of_the_users_own_is_looked_into() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = CheckpointFunction.apply(self.fc, 1, x, *self.fc.parameters())
        return Copied.apply(lambda y, z: y * z.sigmoid(), False, y, y + 1)

    program = checked(Model(forward))
    assert any(n.op == "call_module" and n.target == "fc" for n in program.graph.nodes)
    assert any(
        "2 more" not in note and "1 more have no" in note for note in program.notes
    )


def test_any_other_function_of_a_function_is_refused_with_advice() -> None:
    class Reversible(CheckpointFunction):
        pass

    model = Model(lambda self, x: Reversible.apply(self.fc, 1, x))
    with pytest.raises(GemscError, match="of type Linear cannot be") as caught:
        record(model, (X,), training=True)
    assert "see --recompute" in str(caught.value)


doubled = Doubled.apply  # before any forward runs, as many packages write it


@pytest.mark.skipif(
    not isinstance(vars(torch.autograd.Function)["apply"], classmethod),
    reason="this torch has its `apply` in C: such a call is refused",
)
def test_the_apply_of_a_custom_function_may_be_taken_from_its_class() -> None:
    program = checked(Model(lambda self, x: doubled(self.fc(x), 2.0)))
    assert sum(n.target == Doubled.apply for n in program.graph.nodes) == 1


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


@pytest.mark.parametrize("runs", [0, 3])
def test_scripted_functions_are_recorded(runs: int) -> None:
    """Also if they ran before, so that TorchScript has made them faster."""
    for _ in range(runs):
        scripted(torch.randn(4, 4, requires_grad=True)).sum().backward()
    checked(Model(lambda self, x: scripted(self.fc(x))))


class Gated(nn.Module):
    """Not one of torch's own, so that torch.compile takes it another way."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.up(x).chunk(2, 1)
        return F.dropout(self.norm(a * b.sigmoid()), 0.5, self.training)


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile()
    return model


@pytest.mark.slow(3)
@pytest.mark.parametrize("compiled", [torch.compile, compiled_in_place])
@pytest.mark.parametrize("inside", [True, False])
def test_what_torch_compile_gives_is_recorded_as_it_is_written(
    inside: bool, compiled: Callable[[nn.Module], nn.Module]
) -> None:
    layers = [Gated(), nn.Linear(4, 4), Gated()]
    model: nn.Module = nn.Sequential(*map(compiled, layers) if inside else layers)
    given = model if inside else compiled(model)
    program = checked(given)
    assert program.name == "Sequential"
    assert "--torch-compile compiles each stage" in program.notes[0]
    assert program.module.state_dict().keys() == given.state_dict().keys()


def test_a_function_that_torch_compile_gives_is_recorded_as_it_is_written() -> None:
    gate = torch.compile(lambda a, b: a.tanh() * b.sigmoid())
    program = checked(Model(lambda self, x: gate(*self.fc(x).chunk(2, 1))))
    assert targets(program)[-3:-1] == ["sigmoid", operator.mul]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_looked_into(reentrant: bool) -> None:
    def forward(self: Any, x: Any) -> Any:
        return checkpoint(self.fc, self.fc2(x), use_reentrant=reentrant)

    program = checked(Model(forward))
    assert "fc" in targets(program)
    (note,) = program.notes
    line = line_of("use_reentrant=reentrant)", Path(__file__).read_text())
    assert f"test_record.py:{line}" in note
    assert "statistics" not in note  # there are none


@pytest.mark.parametrize("reentrant", [True, False])
def test_statistics_in_a_checkpoint_are_updated_once(reentrant: bool) -> None:
    def forward(self: Any, x: Any) -> Any:
        h = checkpoint(self.norm, self.fc(x), use_reentrant=reentrant)
        return checkpoint(self.norm, h, use_reentrant=reentrant)

    program = checked(Model(forward, norm=nn.BatchNorm1d(4)))
    assert targets(program).count("norm") == 2
    (note,) = program.notes
    assert "this activation checkpoint and 1 more" in note
    assert "running statistics in it are updated once" in note


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


def test_state_that_no_checkpoint_has_is_told() -> None:
    class Scaled(nn.Linear):
        def get_extra_state(self) -> dict[str, float]:
            return {"scale": 3.0}

    model = Model(lambda self, x: self.fc(x))
    assert not record(model, (X,)).notes
    model.fc = Scaled(4, 4)
    (note,) = record(model, (X,)).notes
    assert note.startswith("state_dict() of the model gives fc._extra_state, by a hook")


def test_a_state_dict_that_fails_or_copies_is_not_told() -> None:
    class Alone(Model):
        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return {n: p.detach().clone() for n, p in self.named_parameters()}

    class NotReady(Model):
        def get_extra_state(self) -> Any:
            raise RuntimeError("call fit() first")

    for kind in (Alone, NotReady):
        assert not record(kind(lambda self, x: self.fc(x)), (X,)).notes


@pytest.mark.parametrize("puts_back", [False, True])
def test_forward_may_put_a_layer_in_evaluation_mode(puts_back: bool) -> None:
    def forward(self: Any, x: Any) -> Any:
        self.norm.eval()
        h = self.norm(self.fc(x))
        self.norm.train(puts_back and self.training)
        return h

    program = checked(Model(forward, norm=nn.BatchNorm1d(4)))
    assert program.frozen == {"norm"}


def test_a_layer_whose_mode_changes_after_it_is_called_is_refused() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.drop(self.fc(x))
        self.drop.eval()
        return h

    with pytest.raises(GemscError, match="calls 'drop' and then puts it in another"):
        record(Model(forward, drop=nn.Dropout(0.5)), (X,))


def test_a_layer_in_both_modes_is_refused() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.drop(self.fc(x))
        self.drop.eval()
        h = h + self.drop(self.fc2(x))
        self.drop.train()
        return h

    with pytest.raises(GemscError, match="'drop' is called in training mode and in"):
        record(Model(forward, drop=nn.Dropout(0.5)), (X,))
    for layer in nn.Dropout(0.0), nn.BatchNorm1d(4, track_running_stats=False):
        assert not checked(Model(forward, drop=layer)).frozen


def test_a_layer_that_is_always_in_training_mode_is_refused_for_evaluation() -> None:
    def forward(self: Any, x: Any) -> Any:
        self.drop.train()
        return self.drop(self.fc(x))

    class Keeps(Model):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.drop.eval()
            return self

    def as_the_model_is(self: Any, x: Any) -> Any:
        self.drop.train(self.training)
        return self.drop(self.fc(x))

    norm = Keeps(as_the_model_is, drop=nn.BatchNorm1d(4))
    assert not checked(norm).frozen
    model = Model(forward, drop=nn.Dropout(0.5))
    record(model, (X,))
    with pytest.raises(GemscError, match="'drop' is called in training mode in eval"):
        record(model, (X,), training=False)


def test_evaluation_may_use_constants_in_another_order() -> None:
    def forward(self: Any, x: Any) -> Any:
        one, two = (SCALE, ones) if self.training else (ones, SCALE)
        return self.fc(x) * one + two

    ones, known = torch.ones(4), dict[str, torch.Tensor]()
    model = Model(forward)
    for training in (True, False):
        program = record(model, (X,), training=training)
        name_constants(program.module, known)
        program.graph.lint()
        check_against_eager(program, model, (X,), training=training)
