"""Messages, gradients and random numbers of one rank, as generated files call them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import combinations
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from worker_support import RUN, worker_of

from gemsc.errors import GemscError
from gemsc.messages.message import Input, Message, Value
from gemsc.runtime.transport.local import LocalTransport, run_local
from gemsc.runtime.worker.backward import is_absent
from gemsc.runtime.worker.program import Run
from gemsc.runtime.worker.worker import Worker

T = TypeVar("T")
H = Value("h", (2, 4), torch.float32, gradient=True)
MASK = Value("mask", (3,), torch.bool)
INDEX = Value("index", (), torch.int64)


def alone(work: Callable[[Worker], T], stage: nn.Module, **options: Any) -> T:
    """Return what `work(worker)` gives on one rank with one stage."""
    (result,) = run_local(1, lambda t: work(worker_of(t, stage, **options)))
    return result


# Messages


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 4), max_size=3).map(tuple),
            st.sampled_from(
                [torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16]
            ),
        ),
        min_size=1,
        max_size=5,
    )
)
@settings(deadline=None, max_examples=60)
def test_what_is_packed_is_unpacked(specs: list[tuple[tuple[int, ...], Any]]) -> None:
    tensors = [torch.randint(0, 2, shape).to(dtype) for shape, dtype in specs]
    values = tuple(Value(f"v{i}", *spec) for i, spec in enumerate(specs))
    message = Message(0, 0, 1, values)
    dtypes = tuple(dtype for _, dtype in specs)
    packed = message.pack(tuple(tensors))
    assert (tuple(packed.shape), packed.dtype) == message.buffer(dtypes)
    for actual, tensor in zip(message.unpack(packed, dtypes), tensors, strict=True):
        assert actual.dtype == tensor.dtype
        assert torch.equal(actual, tensor)


def test_packed_values_begin_on_cache_lines() -> None:
    message = Message(0, 0, 1, (MASK, H, INDEX))
    dtypes = (torch.bool, torch.float32, torch.int64)
    packed = message.pack(
        (torch.ones(3).bool(), torch.ones(2, 4), torch.ones(()).long())
    )
    starts = [t.storage_offset() * t.itemsize for t in message.unpack(packed, dtypes)]
    assert starts == [0, 64, 128]


def test_a_value_alone_travels_without_a_copy() -> None:
    tensor = torch.ones(2, 4)
    message = Message(0, 0, 1, (H,))
    assert message.pack((tensor,)) is tensor
    assert message.unpack(tensor, (torch.float32,))[0] is tensor


def test_the_values_of_a_transposed_tensor_arrive() -> None:
    message = Message(0, 0, 1, (H, MASK))
    tensor = torch.arange(8.0).view(4, 2).T
    packed = message.pack((tensor, torch.zeros(3).bool()))
    assert torch.equal(message.unpack(packed, (torch.float32, torch.bool))[0], tensor)


def test_only_gradients_that_are_needed_travel_back() -> None:
    message = Message(6, 0, 1, (MASK, H, INDEX))
    assert message.gradient == message.gradient
    assert (message.gradient.tag, message.gradient.values) == (7, (H,))
    assert (message.gradient.source, message.gradient.dest) == (1, 0)
    assert message.gradient.is_gradient


def test_packed_values_travel_between_ranks() -> None:
    message = Message(0, 0, 1, (H, MASK, INDEX))
    sent = torch.rand(2, 4).T.T, torch.tensor([True, False, True]), torch.tensor(7)

    def work(transport: LocalTransport) -> Any:
        worker = worker_of(transport, num_micro_batches=2, copy_ranks=2)
        worker.begin({}, training=True)
        received = []
        for m in range(2):
            if transport.rank == 0:
                worker.send(message, m, sent[0] + m, *sent[1:])
            else:
                received.append(worker.receive(message, m))
        worker.end()
        return received

    _, received = run_local(2, work)
    for m, (h, mask, index) in enumerate(received):
        assert torch.equal(h, sent[0] + m)
        assert torch.equal(mask, sent[1])
        assert int(index) == 7
        assert [t.requires_grad for t in (h, mask, index)] == [True, False, False]


@pytest.mark.parametrize("training", [True, False])
def test_a_message_of_a_rank_to_itself_is_handed_over(training: bool) -> None:
    message = Message(0, 0, 0, (H,))

    def work(worker: Worker) -> tuple[Tensor, Tensor]:
        worker.begin({}, training=training)
        made = torch.rand(2, 4, requires_grad=True) * 2
        worker.send(message, 0, made)
        return made, worker.receive(message, 0)

    made, received = alone(work, nn.Identity())
    assert received.data_ptr() == made.data_ptr()
    assert received.is_leaf
    assert received.requires_grad == training


# Gradients


class Views(nn.Module):
    """Autograd hands the gradient of the sum on to both sides as views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1) + self.bias.view(-1)


def storage(tensor: Tensor | None) -> int:
    assert tensor is not None
    return tensor.untyped_storage().data_ptr()


def test_a_gradient_on_its_way_is_no_parameters_gradient() -> None:
    """The parameter's grows in place while the message may still be read."""
    stage = Views()

    def work(worker: Worker) -> None:
        worker.begin({}, training=True)
        sent = []
        for m in range(3):
            worker.run(RUN, m, torch.zeros(2, 4, requires_grad=True))
            received = torch.full((8,), float(m + 1))
            (gradient,) = worker.backward(RUN, m, received)
            sent.append(gradient)
            assert storage(gradient) != storage(stage.bias.grad)
        assert [float(gradient[0, 0]) for gradient in sent] == [1, 2, 3]
        assert stage.bias.grad is not None
        assert float(stage.bias.grad[0, 0]) == 6

    alone(work, stage, num_micro_batches=3)


class Same(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, y.view(4, 2), x + y.detach()


def test_stages_that_hand_on_what_they_get() -> None:
    def work(worker: Worker) -> None:
        worker.begin({}, training=True)
        x, y = (torch.ones(2, 4, requires_grad=True) for _ in range(2))
        worker.run(RUN, 0, x, y)
        g = torch.rand(2, 4), torch.rand(4, 2), torch.rand(2, 4)
        grad_x, grad_y = worker.backward(RUN, 0, *g)
        assert torch.equal(grad_x, g[0] + g[2])
        assert torch.equal(grad_y, g[1].view(2, 4))

    alone(work, Same())


def test_an_input_that_the_stage_cuts_off_gets_zeros() -> None:
    class Cut(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.detach() * y

    def work(worker: Worker) -> None:
        worker.begin({}, training=True)
        x, y = (torch.full((2, 4), 3.0, requires_grad=True) for _ in range(2))
        worker.run(RUN, 0, x, y)
        gradients = worker.backward(RUN, 0, torch.ones(2, 4))
        assert torch.equal(gradients[0], torch.zeros(2, 4))
        assert torch.equal(gradients[1], torch.full((2, 4), 3.0))

    alone(work, Cut())


def test_a_gradient_of_negative_zeros_is_not_taken_for_none() -> None:
    """An optimizer moves a parameter whose gradient is zero, and not one without."""

    def work(worker: Worker) -> None:
        worker.begin({}, training=True)
        x, y = (torch.ones(2, 4, requires_grad=True) for _ in range(2))
        worker.run(RUN, 0, x, y)
        there, not_there = worker.backward(RUN, 0, torch.zeros(2, 4))
        assert (is_absent(there), is_absent(not_there)) == (False, True)

    class Negative(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return -x + y.detach()

    alone(work, Negative(), depends_on_data=True)


def test_a_stage_that_nothing_flows_back_into_gives_zeros() -> None:
    def work(worker: Worker) -> None:
        worker.begin({}, training=True)
        worker.run(RUN, 0, torch.ones(2, 4, requires_grad=True))
        (gradient,) = worker.backward(RUN, 0, None)
        assert torch.equal(gradient, torch.zeros(2, 4))

    alone(work, nn.Tanh())


@pytest.mark.slow
def test_nothing_of_a_micro_batch_is_kept_after_its_backward() -> None:
    import gc
    import weakref

    def work(worker: Worker) -> None:
        worker.begin({}, training=True)
        x = torch.ones(2, 4, requires_grad=True)
        seen = weakref.ref(x)
        result = worker.run(RUN, 0, x)
        worker.backward(RUN, 0, torch.ones_like(result))
        del x, result
        gc.collect()
        assert seen() is None

    alone(work, nn.Linear(4, 4))


def test_backward_runs_in_the_callers_thread_on_every_device() -> None:
    """Autograd has threads of its own for devices, unless it is told not to."""
    seen: list[bool] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y.register_hook(
                lambda _: seen.append(torch._C._is_multithreading_enabled())
            )
            return y

    def work(worker: Worker) -> None:
        worker.begin({}, training=True)
        worker.run(RUN, 0, torch.ones(2, 4, requires_grad=True))
        worker.backward(RUN, 0, torch.ones(2, 4))

    alone(work, Watched())
    assert seen == [False]


def test_each_micro_batch_weighs_the_same_in_the_mean() -> None:
    def work(worker: Worker) -> tuple[float, float]:
        worker.begin({}, training=True)
        for loss in (1.0, 2.0, 6.0):
            worker.steps.add_loss(torch.tensor(loss, requires_grad=True))
        return worker.steps.own_mean().total, float(worker.loss_gradient)

    total, weight = alone(work, nn.Identity(), num_micro_batches=3)
    assert total == 9
    assert weight == pytest.approx(1 / 3)


# Random numbers


class Dropping(nn.Dropout):
    draws_random_numbers = True


def drawn(
    run: Run = RUN,
    *,
    step: int = 0,
    m: int = 0,
    seed: int = 0,
    phase: str = "",
    **options: Any,
) -> Tensor:
    def work(transport: LocalTransport) -> Tensor:
        worker = worker_of(transport, Dropping(0.5), run=run, seed=seed, **options)
        worker.steps.done = step
        worker.variant = phase
        worker.begin({}, training=True)
        result: Tensor = worker.run(run, m, torch.ones(64))
        return result

    (result,) = run_local(1, work)
    return result


def test_dropout_depends_on_seed_step_phase_stage_and_micro_batch_only() -> None:
    first = drawn()
    torch.manual_seed(torch.seed() % 2**31)
    assert torch.equal(drawn(), first)
    others = [drawn(step=1), drawn(seed=1), drawn(Run(1)), drawn(phase="d")]
    others += [first, *(drawn(m=m) for m in (1, 2, 3))]
    assert not any(torch.equal(one, other) for one, other in combinations(others, 2))


def test_a_mirrored_stage_draws_what_it_would_draw_elsewhere() -> None:
    def work(replica: int, m: int) -> Tensor:
        return drawn(Run(0, replica), m=m, num_micro_batches=2, num_replicas=2)

    assert not torch.equal(work(0, 0), work(1, 0))
    assert torch.equal(work(0, 2), work(1, 0))


def test_the_users_random_numbers_stay_as_they_are() -> None:
    """Else ranks with and without dropout would choose different batches."""

    def work(worker: Worker) -> None:
        worker.begin({}, training=True)
        before = torch.get_rng_state()
        worker.run(RUN, 0, torch.ones(8))
        assert torch.equal(torch.get_rng_state(), before)

    alone(work, Dropping(0.5))


# Batches

INPUTS = {
    "x": Input(("input", 0), (2, 4), torch.float32),
    "mask": Input(("input", "mask"), (2,), torch.bool),
    "boxes": Input(("target", "boxes", 1), (2, 3), torch.float32),
}


def bound(
    names: list[str], sources: dict[str, Any], **options: Any
) -> dict[str, Tensor]:
    inputs = {name: INPUTS[name] for name in names}
    return alone(
        lambda worker: worker.steps.shape.bind(sources),
        nn.Identity(),
        inputs=inputs,
        num_micro_batches=3,
        **options,
    )


def test_each_rank_picks_what_it_reads() -> None:
    boxes = torch.rand(6, 3)
    tensors = bound(["boxes"], {"input": None, "target": {"boxes": [None, boxes]}})
    assert tensors["boxes"] is boxes


@pytest.mark.parametrize(
    ("name", "sources", "message"),
    [
        ("x", {"input": (torch.zeros(5, 4),)}, r"input\[0\] has shape \[5, 4\]"),
        ("x", {"input": (torch.zeros(6, 5),)}, r"expects \[6, 4\]: 3 micro-batches of"),
        ("x", {"input": (torch.zeros(12, 4),)}, r"input\[0\] has shape \[12, 4\]"),
        ("x", {"input": (torch.zeros(6, 4).long(),)}, "has dtype torch.int64"),
        ("x", {"input": ()}, r"the batch has no input\[0\]"),
        ("mask", {"input": {"musk": 1}}, r"the batch has no input\['mask'\]"),
        ("mask", {"input": {"mask": torch.zeros(6)}}, r"input\['mask'\] has dtype"),
        ("boxes", {"target": None}, r"the batch has no target\['boxes'\]\[1\]"),
        ("boxes", {"target": {"boxes": [1]}}, r"no target\['boxes'\]\[1\]"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_by_name(
    name: str, sources: dict[str, Any], message: str
) -> None:
    with pytest.raises(GemscError, match=message) as caught:
        bound([name], sources)
    assert caught.value.help


def test_a_batch_of_another_precision_is_converted() -> None:
    tensors = bound(["x"], {"input": (torch.zeros(6, 4, dtype=torch.float64),)})
    assert tensors["x"].dtype == torch.float32
    double = bound(["x"], {"input": (torch.zeros(6, 4),)}, float_dtype=torch.float64)
    assert double["x"].dtype == torch.float64


def test_numpy_arrays_and_lists_are_batches_too() -> None:
    tensors = bound(["mask"], {"input": {"mask": [True] * 6}})
    assert tensors["mask"].dtype == torch.bool


def test_micro_batches_are_parts_in_order() -> None:
    x = torch.arange(24.0).view(6, 4)

    def work(worker: Worker) -> list[Tensor]:
        worker.begin(worker.steps.shape.bind({"input": (x,)}), training=True)
        return [worker.input("x", m) for m in range(3)]

    options: Any = {"inputs": {"x": INPUTS["x"]}, "num_micro_batches": 3}
    assert torch.equal(torch.cat(alone(work, nn.Identity(), **options)), x)


def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()
    alone(lambda worker: worker.place.rank, nn.Identity())
    assert threading.active_count() <= before
