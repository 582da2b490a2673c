"""Sums of gradients that start inside a stage's last backward, bucket by bucket.

    backward    layer 9 | layer 8 | layer 7 | ... | layer 1 | layer 0 |
    sums                 `- bucket 2 ---|  `- bucket 1 ---|           `- bucket 0 ---|

A bucket leaves once nothing more comes to any of its gradients. How often each is added
to in that action, the step before tells: a stage does the same in every step. So the
sums of a first step leave after the backward, and so do those of steps in which only
some ranks have gradients.

All ranks let the same buckets leave in the same order, the last parameters first,
whether early or late: one that is complete waits for those before it. So no two ranks
wait for each other (Li and others, PyTorch Distributed, 2020).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from gemsc.errors import InternalError
from gemsc.runtime.worker.reduction import buckets

Parameters = Mapping[str, nn.Parameter]
Names = tuple[str, ...]


class Departures:
    """The buckets of one sum, which `leave` in a fixed order."""

    def __init__(
        self, parameters: Parameters, leave: Callable[[Parameters], None]
    ) -> None:
        """Take all parameters of the sum, and what starts that of some of them."""
        self._parameters = parameters
        self._leave = leave
        self._trained: Names | None = None  # in the step before, like the next two
        self._present: Names = ()
        self._usual: Counter[str] = Counter()
        self._noted: Counter[str] | None = None  # in this step's last action
        self._waiting: deque[Names] | None = None  # None until it is known what leaves
        self._gone: set[str] = set()

    def watch(self, told: Callable[[], None], stack: ExitStack) -> None:
        """Begin the stage's last action: note each gradient until the stack is closed.

        That one has come is told each time.
        """
        trained = tuple(n for n, p in self._parameters.items() if p.requires_grad)
        if trained == self._trained:
            self._waiting = self._buckets(self._present)
        self._trained = trained
        noted = self._noted = Counter[str]()

        def arrived(name: str, _: Tensor) -> None:
            noted[name] += 1
            if name in self._gone:
                text = f"the gradient of '{name}' changes after its sum has started"
                raise InternalError(text)
            told()

        for name in trained:
            parameter = self._parameters[name]
            register: Any = parameter.register_post_accumulate_grad_hook
            hook = register(partial(arrived, name))
            stack.callback(hook.remove)

    def advance(self) -> bool:
        """Let go what is complete; return whether all is gone."""
        while self._waiting and self._is_complete(self._waiting[0]):
            self._go(self._waiting.popleft())
        return self._waiting is not None and not self._waiting

    def finish(self) -> None:
        """Let the rest leave: all gradients are there."""
        present = tuple(
            name
            for name, parameter in self._parameters.items()
            if parameter.grad is not None or name in self._gone
        )
        if self._gone and present != self._present:
            changed = ", ".join(sorted({*present} ^ {*self._present}))
            raise InternalError(f"gradients come in some steps only: {changed}")
        waiting = self._waiting if self._gone else self._buckets(present)
        while waiting:
            self._go(waiting.popleft())
        if self._noted is not None:
            self._usual, self._present = self._noted, present
        self._noted = self._waiting = None
        self._gone.clear()

    def _is_complete(self, names: Names) -> bool:
        assert self._noted is not None
        return all(self._noted[name] >= self._usual[name] for name in names)

    def _go(self, names: Names) -> None:
        self._leave({name: self._parameters[name] for name in names})
        self._gone.update(names)

    def _buckets(self, names: Names) -> deque[Names]:
        packed = buckets([self._parameters[name] for name in names])
        return deque(tuple(names[n] for n in bucket) for bucket in reversed(packed))


@contextmanager
def leaving_early(
    sums: Sequence[Departures], turn: Callable[[], None]
) -> Iterator[None]:
    """Run a stage's last action: its sums start in it, one sum after the other.

    With each gradient the message library gets a `turn`, so that sums move on.
    """

    def told() -> None:
        for departure in sums:
            if not departure.advance():
                break
        turn()

    with ExitStack() as stack:
        for departure in sums:
            departure.watch(told, stack)
        yield
