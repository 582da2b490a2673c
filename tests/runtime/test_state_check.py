"""States of torch's own optimizers and schedulers are of their kind after any steps."""

from __future__ import annotations

import copy
import json
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as lrs

from gemsc.base.rng import preserve_rng
from gemsc.errors import GemscError
from gemsc.runtime.checkpoint.holdings import HeldTensor
from gemsc.runtime.checkpoint.optimizer_state import SavedOptimizer, UpdatedParameter
from gemsc.runtime.checkpoint.pieces import TensorPiece
from gemsc.runtime.checkpoint.states import (
    DTYPES,
    check_alike,
    check_generators,
    check_step,
    decode,
    encode,
    generator_states,
    set_generators,
)

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "steps": lambda o: lrs.StepLR(o, 2),
    "milestones": lambda o: lrs.MultiStepLR(o, [2, 4]),
    "function": lambda o: lrs.LambdaLR(o, lambda n: 0.9**n),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 5),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2),
    "one cycle": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=9),
    "cycles": lambda o: lrs.CyclicLR(o, 0.001, 0.1),
    "polynomial": lambda o: lrs.PolynomialLR(o, 4),
    "in sequence": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)], [3]
    ),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.StepLR(o, 2)]),
}


def made(make: Callable[[Any], Any]) -> Any:
    layer, number = nn.Linear(3, 2), nn.Parameter(torch.tensor(1.0))
    for parameter in (*layer.parameters(), number):
        parameter.grad = torch.ones_like(parameter)
    second = {"params": [layer.bias, number], "lr": 0.02}
    return make([{"params": [layer.weight]}, second])


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_takes_its_own_state(name: str) -> None:
    optimizer = made(lambda p: optim.SGD(p, lr=0.01, momentum=0.9))
    scheduler = SCHEDULERS[name](optimizer)
    fresh = made(lambda p: optim.SGD(p, lr=0.01, momentum=0.9))
    now = SCHEDULERS[name](fresh)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    tensors: dict[str, Any] = {}
    text = encode(scheduler.state_dict(), lambda t: tensors.setdefault("t", t), "it")
    saved = decode(text, tensors.__getitem__)
    check_alike(now, now.state_dict(), saved, is_same=True)
    for group in optimizer.param_groups:
        theirs = {k: v for k, v in group.items() if k != "params"}
        check_alike(None, fresh.param_groups[0], theirs, is_same=True)


def test_a_deque_keeps_how_many_it_holds() -> None:
    losses = deque([0.3, 0.2], maxlen=2)
    again = decode(json.loads(json.dumps(encode(losses, str, "it"))), torch.tensor)
    again.append(0.1)
    assert again == deque([0.2, 0.1])


@pytest.mark.parametrize("dtype", ["uint32", "<f8", ">i2", "bool"])
def test_an_array_comes_back_as_one(dtype: str) -> None:
    made, tensors = np.eye(5).astype(dtype), list[torch.Tensor]()
    encoded = encode(made, lambda t: str(tensors.append(t)), "it")
    again = decode(encoded, lambda name: tensors[0])
    assert isinstance(again, np.ndarray)
    assert np.array_equal(again, made)
    with pytest.raises(GemscError, match="holds a tensor of <U1, which no"):
        encode(np.array(["a"]), str, "it")


@pytest.mark.parametrize(
    "kind",
    [
        *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
        *(optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.ASGD, optim.Rprop),
        optim.Adafactor,
    ],
)
def test_an_optimizer_that_has_made_steps_is_tried_and_stays_as_it_is(
    kind: Any,
) -> None:
    optimizer = made(kind)
    check_step(optimizer)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    check_step(optimizer)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, state in before["state"].items():
        assert all(
            value is after["state"][number][key]
            or torch.equal(value, after["state"][number][key])
            for key, value in state.items()
        )


@pytest.mark.parametrize("kind", [optim.NAdam, optim.ASGD, optim.Adam])
def test_what_is_kept_of_a_single_number_is_in_pieces_as_of_other_tensors(
    kind: Any,
) -> None:
    optimizer = made(kind)
    optimizer.step()
    held = {}
    for parameter, state in optimizer.state.items():
        piece = TensorPiece.whole(parameter.shape)
        slot = UpdatedParameter(0, 0, parameter, HeldTensor("p", parameter, piece))
        held[parameter.shape] = {k for k, v in state.items() if slot.holds(k, v)}
    assert held[torch.Size()] == held[torch.Size([2, 3])] != set()


def test_a_step_that_cannot_be_tried_is_not_refused() -> None:
    check_step(optim.LBFGS(nn.Linear(2, 2).parameters()))
    check_step(object())


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if not d.is_complex])
def test_a_state_can_have_each_dtype_of_a_file(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, 0.0, 1.0]).to(dtype)
    again = decode(encode(tensor, str, "it"), lambda name: tensor)
    assert again.dtype is dtype
    assert again.tolist() == tensor.tolist()


@pytest.mark.parametrize(
    "value",
    [
        {"$": "tuple", "of": [1]},  # a user's own, which looks like one of ours
        {"lr": [float("inf"), -0.0, 0.1 + 0.2], 3: {None: (True, 2)}},
        torch.tensor([1 + 2j, complex(0, float("inf"))]),
        torch.tensor(0.1j, dtype=torch.complex128),
    ],
    ids=str,
)
def test_what_is_encoded_comes_back(value: Any) -> None:
    text = json.dumps(encode(value, lambda tensor: "t", "it"))
    again = decode(json.loads(text), {"t": value}.__getitem__)
    assert repr(again) == repr(value)


def test_all_generators_go_on_where_they_were() -> None:
    """Two numbers of a normal distribution are drawn at once: the second one waits."""

    def draws() -> tuple[float, ...]:
        normal = random.gauss(0, 1), np.random.randn()
        return float(torch.rand(())), random.random(), np.random.rand(), *normal

    cpu = torch.device("cpu")
    with preserve_rng():
        draws()
        states = generator_states(cpu)
        check_generators(states, cpu)
        wanted = draws()
        draws()
        set_generators(states, cpu)
        assert draws() == wanted


def test_a_tensor_of_another_shape_is_no_state() -> None:
    check_alike(None, torch.zeros(2), torch.ones(2), is_same=False)
    with pytest.raises(ValueError, match="in place of"):
        check_alike(None, torch.zeros(2), torch.ones(3), is_same=False)


def test_groups_take_the_values_of_those_that_had_their_parameters() -> None:
    """On other ranks, under other numbers; not those of whatever had the number."""

    def saved(rates: list[float], *groups: list[str]) -> dict[str, Any]:
        of = [{"names": names, "values": {}} for names in groups]
        return {"groups": of, "values": {}, "scheduler": {"last_lr": rates}}

    first = saved([1.0], ["a.weight"])
    other = saved([2.0, 3.0], ["b.bias"], ["b.weight"])
    optimizer = SavedOptimizer([first, other], {}, lambda value: value)

    def sources(*groups: list[str]) -> list[Any]:
        slots: Any = [
            SimpleNamespace(name=name, group=number)
            for number, names in enumerate(groups)
            for name in names
        ]
        return optimizer.groups(slots, len(groups), 0)

    moved = sources(["b.bias"], ["a.weight", "b.weight"], ["new", "b.weight"], [])
    assert moved == [(1, 0), (0, 0), None, None]
    assert sources(["a.weight"], []) == [(0, 0), (1, 1)]
    rates = [
        optimizer.scheduler({"last_lr": [0.0] * len(given)}, given, 0)["last_lr"]
        for given in ([(1, 1), (1, 0)], [(0, 0), (1, 1)], [(1, 1)], [(0, 0)], [None])
    ]
    assert rates == [[3.0, 2.0], [1.0, 3.0], [3.0], [1.0], [0.0]]  # a new one its own


def test_what_ranks_keep_beside_groups_goes_along_only_if_it_is_alike() -> None:
    ranks: list[dict[str, Any]] = [{"rest": {"steps": n}} for n in (1, 1, 2)]
    alike, unlike = (SavedOptimizer(r, {}, lambda x: x) for r in (ranks[:2], ranks))
    assert alike.others(0, is_same=False) == {"steps": 1}
    assert unlike.others(2, is_same=True) == {"steps": 2}
    with pytest.raises(GemscError, match="'steps' in a form that belongs to the ranks"):
        unlike.others(0, is_same=False)


@pytest.mark.parametrize("nest", [list, deque, lambda tensors: {"last": tensors[0]}])
def test_what_is_in_a_list_of_an_optimizer_goes_along_with_the_same_rows_only(
    nest: Callable[[list[Any]], Any],
) -> None:
    whole = TensorPiece.whole((2, 3))
    rows = whole.rows(0, 1)
    kept = {"history": nest([torch.ones(1, 3)]), "counts": [1, torch.tensor(2.0)]}
    saved = {"values": {"a": {"piece": rows.intervals, "state": kept}}}
    optimizer = SavedOptimizer([saved], {}, lambda value: value)
    assert optimizer.rest_of("a", rows) == kept
    with pytest.raises(GemscError, match="'history' of 'a' in a form that belongs to"):
        optimizer.rest_of("a", whole)
    del kept["history"]
    assert optimizer.rest_of("a", whole) == kept


def test_a_group_goes_on_as_that_of_its_first_parameter() -> None:
    names = (("a",), ("b",)), (("c",), ())
    ranks: list[dict[str, Any]] = [
        {
            "groups": [{"names": [*group]} for group in groups],
            "scheduler": {"steps": 3, "rates": [rank, rank + 10]},
        }
        for rank, groups in enumerate(names)
    ]
    saved = SavedOptimizer(ranks, {}, lambda value: value)

    def sources(*held: str) -> list[Any]:
        slots: Any = [SimpleNamespace(name=n, group=i) for i, n in enumerate(held)]
        return saved.groups(slots, 2, rank=0)

    assert sources("a", "b") == [(0, 0), (0, 1)]
    assert sources("b", "c") == [(0, 1), (1, 0)]
    assert sources("c") == [(1, 0), (0, 1)]  # the second one is empty here
    now = {"steps": 0, "rates": [5, 6]}
    state = saved.scheduler(now, sources("b", "c"), rank=0)
    assert state == {"steps": 3, "rates": [10, 1]}


class Rising:
    """A factor of a learning rate that counts its calls."""

    def __init__(self, factor: float) -> None:
        self.factor, self.calls = factor, 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return self.factor * self.calls


def in_sequence(optimizer: torch.optim.Optimizer) -> Any:
    kinds: list[Any] = [lrs.LinearLR(optimizer), lrs.StepLR(optimizer, 2)]
    kinds.append(lrs.ConstantLR(optimizer))
    return lrs.SequentialLR(optimizer, kinds, [2, 4])


def rising(optimizer: torch.optim.Optimizer) -> Any:
    factors: list[Any] = [Rising(1.0 + group["lr"]) for group in optimizer.param_groups]
    return lrs.LambdaLR(optimizer, factors)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
@pytest.mark.parametrize("make", [in_sequence, rising])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("before", "after"),
    [("ab", "a b"), ("a ab", "ba"), ("ab", "b"), ("ab a", "b"), ("ab bc", "bc")],
)
def test_a_scheduler_goes_on_where_ranks_have_other_groups(
    make: Any, steps: int, before: str, after: str
) -> None:
    """Milestones may be as many as groups; each group has its own function."""

    def begun(names: str, steps: int) -> Any:
        groups = [{"params": [torch.ones(1)], "lr": 0.1 * ord(n)} for n in names]
        scheduler = make(torch.optim.SGD(groups))
        for _ in range(steps):
            scheduler.step()
        return scheduler

    ranks: list[dict[str, Any]] = [
        {
            "groups": [{"names": [name]} for name in names],
            "scheduler": copy.deepcopy(begun(names, steps).state_dict()),
        }
        for names in before.split()
    ]
    saved = SavedOptimizer(ranks, {}, lambda value: value)
    for rank, names in enumerate(after.split()):
        slots: Any = [SimpleNamespace(name=n, group=i) for i, n in enumerate(names)]
        now, expected = begun(names, 0), begun(names, steps)
        sources = saved.groups(slots, len(names), rank)
        now.load_state_dict(saved.scheduler(now.state_dict(), sources, rank))
        for mine, theirs in zip(
            now.optimizer.param_groups, expected.optimizer.param_groups, strict=True
        ):
            mine["lr"] = theirs["lr"]  # which come with the optimizer
        for _ in range(4):
            now.step()
            expected.step()
            assert now.get_last_lr() == expected.get_last_lr()
