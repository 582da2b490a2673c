"""Attributes of modules that stay whole: written, or refused by name."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

import pytest
import torch
import torch.nn.functional as F
from opaque_support import (
    EXACT,
    Around,
    D,
    Dropping,
    Gate,
    Mixture,
    X,
    compiled,
    made,
    worst,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import register_pytree_node

from gemsc.errors import GemscError
from gemsc.frontend import record
from gemsc.ir.opaque import opaques


class Kind(enum.Enum):
    SOFT = "soft"
    HARD = "hard"


@dataclasses.dataclass
class Settings:
    kind: Kind
    powers: tuple[int, ...]


def halved(x: Tensor) -> Tensor:
    return x / 2


class Rich(nn.Module):
    """All that a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings(Kind.HARD, (1,))
        self.act, self.own, self.kind = F.relu, halved, nn.Linear
        self.table = {"a": [1.5, None], 2: {"x", "y"}, "quote": 'it\'s "so"\n'}
        self.rows = nn.ParameterList(torch.rand(D) for _ in range(2))
        self.named = nn.ModuleDict({"a b": nn.Linear(D, D), "class": nn.Tanh()})
        self.steps = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Dropout(0.0))
        self.frozen = nn.Linear(D, D).requires_grad_(False)
        self.fixed = nn.Parameter(torch.rand(D), requires_grad=False)
        self.missing: Tensor | None
        self.register_buffer("missing", None)
        self.register_buffer("lost", torch.rand(D), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.tied = nn.Linear(D, D)
        self.tied.weight = self.steps[0].weight
        self.named["more"] = nn.ParameterList([self.rows[1]])
        self.size = torch.Size([2, 3])

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0 or self.missing is not None:
            self.seen += 1
            return x * self.lost
        assert self.settings.kind is Kind.HARD
        assert self.size.numel() == 6
        assert self.table[2] == {"x", "y"}
        x = (
            self.named["class"](self.named["a b"](x)) * self.rows[0]
            + self.named["more"][0]
        )
        x = self.own(self.act(self.steps(x))) ** self.settings.powers[0]
        x = self.frozen(self.tied(x)) + self.fixed
        out: Tensor = x + self.attention(x[None], x[None], x[None])[0][0]
        return out


@pytest.mark.slow
def test_all_kinds_of_attributes_are_written(tmp_path: Path) -> None:
    model = Around(made(Rich))
    model.inner.steps[1].eval()
    assert worst(tmp_path / "program", model) <= EXACT
    text = "".join(file.read_text() for file in tmp_path.glob("program/rank*.py"))
    assert "self.inner = user_module(" in text
    assert "depends_on_data=True" in text


class Holds(Gate):
    def __init__(self, what: object) -> None:
        super().__init__()
        self.what = what


class Counting(Gate):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Hooked(Gate):
    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_hook(lambda module, args, result: result * 2)


class Growing(Gate):
    """Changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().sum(0)
        return super().forward(x)


def local_class() -> nn.Module:
    class Local(Gate):
        pass

    return Local()


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (lambda: Holds(torch.ones(65)), "'inner.what' is of type Tensor"),
        (lambda: Holds(partial(X.add, 1)), "'inner.what' is of type builtin_function"),
        (lambda: Holds([nn.Linear(2, 2)]), "'inner.what' is of type Linear"),
        (lambda: Holds(X.sum), "'inner.what' is of type builtin_function_or_method"),
        (Hooked, r"'inner.up' \(Linear\) has hooks"),
        (local_class, "needs local_class.<locals>.Local, which no rank can import"),
    ],
)
def test_what_has_no_text_is_refused_by_name(inner: Any, message: str) -> None:
    with pytest.raises(GemscError, match=message) as caught:
        compiled(Around(inner())).rank_modules()
    assert caught.value.at is not None
    assert caught.value.help
    (note,) = caught.value.__notes__
    assert note.startswith("'inner' stays whole, for ")
    assert note.endswith("differs from step to step")


def scaled(x: Tensor, by: float) -> Tensor:
    return x * by


class Handy(Gate):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = partial(scaled, by=0.5)
        self.shift = torch.tensor([[0.1, -torch.inf, 2.0]], dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.scaled(x) + self.shift[0, ::2].sum())


def test_partial_functions_and_small_tensors_have_a_text(tmp_path: Path) -> None:
    assert worst(tmp_path / "program", Around(made(Handy))) <= EXACT


class Signature(NamedTuple):
    kind: Any
    weights: OrderedDict[str, Any]


class Inspected(Gate):
    """What a layer of PyTorch Geometric holds."""

    def __init__(self) -> None:
        super().__init__()
        weights = OrderedDict(one=0.25, two=Tensor | None, three=type(None))
        self.signatures = {"message": Signature(Optional[Tensor], weights)}  # noqa: UP045

    def forward(self, x: Tensor) -> Tensor:
        kind, weights = self.signatures["message"]
        assert kind == weights["two"] == Tensor | None
        assert [*weights] == ["one", "two", "three"]
        assert weights["three"] is type(None)
        assert type(self.signatures["message"]) is Signature
        return super().forward(x) * weights["one"]


def test_named_tuples_of_types_have_a_text(tmp_path: Path) -> None:
    assert worst(tmp_path / "program", Around(made(Inspected))) <= EXACT


class Caching(Gate):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.detach().mean()
        return super().forward(x) + self.mean


def test_a_tensor_that_forward_changes_makes_a_module_unfit() -> None:
    with pytest.raises(GemscError, match=r"self\.mean at each call: return it"):
        record(Around(Caching()), (X,))


def test_a_nan_that_stays_does_not(tmp_path: Path) -> None:
    gate = made(Gate)
    gate.none, gate.nones = float("nan"), [torch.tensor(float("nan"))]
    assert worst(tmp_path / "program", Around(gate)) <= EXACT


class Named(OrderedDict[str, Tensor]):
    """What a library's models return: its fields are attributes as well."""

    def __getattr__(self, name: str) -> Tensor:
        if name not in self:
            raise AttributeError(name)
        return self[name]


register_pytree_node(
    Named,
    lambda named: (list(named.values()), list(named)),
    lambda values, names: Named(zip(names, values, strict=True)),
)


class Gives(Gate):
    def forward(self, x: Tensor) -> Any:
        return Named(first=super().forward(x), second=x)


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gives, self.last = Gives(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        given = self.gives(x)
        return self.last(given.first + given["second"])


@pytest.mark.slow
def test_a_module_may_return_a_class_that_can_be_taken_apart(tmp_path: Path) -> None:
    assert worst(tmp_path / "program", Around(made(Takes))) <= EXACT
    assert [*opaques(record(Around(Takes()), (X,)).module)] == ["inner.gives"]


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """What checks itself is made once only, by the module."""

    first: Tensor
    none: Tensor | None
    others: dict[str, list[Tensor]]

    def __post_init__(self) -> None:
        assert type(self.first) in (Tensor, nn.Parameter), "made of something else"

    @property
    def both(self) -> Tensor:
        return self.first * self.others["second"][0]


class Scoring(Gate):
    def forward(self, x: Tensor) -> Any:
        return Scores(super().forward(x), None, {"second": [x.cos(), x.sin()]})


class UsesScores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scoring, self.last = Scoring(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scoring(x)
        if scores.none is not None:
            return x
        out: Tensor = self.last(scores.both - scores.others["second"][1])
        return out + scores.first


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "options", [{}, {"recompute": ("all",)}, {"ranks": 4, "data": 2}]
)
def test_a_module_may_return_a_dataclass(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = Around(made(UsesScores))
    assert worst(tmp_path / "program", model, **options) <= EXACT
    text = "".join(file.read_text() for file in tmp_path.glob("program/rank*.py"))
    assert "first = scores.first" in text


@dataclasses.dataclass
class Derived:
    first: Tensor

    def __post_init__(self) -> None:
        self.half = self.first / 2  # no field: nobody would compute it anew


class Deriving(Gate):
    def forward(self, x: Tensor) -> Any:
        return Derived(super().forward(x))


class UsesDerived(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deriving = Deriving()

    def forward(self, x: Tensor) -> Tensor:
        half: Tensor = self.deriving(x).half
        return half


def test_a_dataclass_with_more_than_its_fields_stays_inside() -> None:
    assert [*opaques(record(Around(UsesDerived()), (X,)).module)] == ["inner"]
    says = "returns a value of type Derived, which holds 'half' beside its fields"
    with pytest.raises(GemscError) as caught:
        record(UsesDerived(), (X,))
    assert says in str(caught.value.notes_at)


@pytest.mark.slow
def test_a_module_that_changes_its_buffers_is_refused_where_copies_would() -> None:
    model = Around(Growing())
    assert compiled(model).plan.ranks == 2
    says = r"forward changes 'inner\.total', and each of 2 replicas"
    with pytest.raises(GemscError, match=says):
        compiled(model, data=2)
    with pytest.raises(GemscError, match="changes a tensor that it does not own"):
        compiled(model, recompute=("inner",))


def test_a_buffer_that_forward_changes_is_exact_on_one_rank(tmp_path: Path) -> None:
    assert worst(tmp_path / "program", Around(made(Growing))) <= EXACT


# ------------------------------------------- layers with other parameters


class Lends(nn.Module):
    """Calls a layer twice: once with parameters that get no gradient."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        lent = {name: p.detach() * 2 for name, p in layer.named_parameters()}
        out: Any = functional_call(layer, lent, (self.last(x),))
        trained = self.layer(x)
        if isinstance(trained, tuple):  # of a recurrent layer
            out, trained = out[0], trained[0]
        total: Tensor = trained + out
        return total


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Linear(D, D),
        lambda: nn.LayerNorm(D),
        lambda: nn.GRU(D, D),
        Gate,  # stays whole, with all that is around the call
    ],
)
def test_a_layer_may_be_called_with_other_parameters(
    layer: Any, tmp_path: Path
) -> None:
    model = Around(made(lambda: Lends(layer())))
    assert worst(tmp_path / "program", model) <= EXACT


def test_at_the_top_what_stays_whole_has_its_own_parameters() -> None:
    says = "'layer' stays whole on one rank, but is called here with parameters"
    with pytest.raises(GemscError, match=says) as caught:
        record(Lends(Gate()), (X,))
    assert caught.value.at is not None
    assert "functional_call" in str(caught.value)
    record(nn.Sequential(Lends(Gate())), (X,))  # as the help says


# ---------------------------------------------------- which module it is


def test_a_counter_makes_a_module_unfit() -> None:
    with pytest.raises(GemscError, match=r"changes self\.calls at each call\n"):
        record(Around(Counting()), (X,))


@pytest.mark.slow
def test_nothing_of_the_users_changes() -> None:
    def digest(model: nn.Module) -> str:
        hasher = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        for name, value in model.state_dict().items():
            hasher.update(name.encode() + value.numpy().tobytes())
        flags = [
            (name, m.training, sorted(vars(m))) for name, m in model.named_modules()
        ]
        grads = [parameter.grad for parameter in model.parameters()]
        hasher.update(repr([flags, grads]).encode())
        return hasher.hexdigest()

    for inner in (Rich, Growing, Dropping, Mixture):
        model = nn.Sequential(nn.Linear(D, D), made(inner))
        before = digest(model)
        for training in (True, False):
            record(model, (X,), training=training)
        assert digest(model) == before
