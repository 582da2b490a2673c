"""Mailbox: a rank's messages, to other ranks and from one of its stages to another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gemsc.errors import GemscError
from gemsc.messages.grid_message import GridMessage
from gemsc.messages.message import Message, Value
from gemsc.messages.turns import Turns
from gemsc.runtime.transport.device_transport import DeviceTransport, Operation
from gemsc.runtime.transport.waiting import Request


@dataclass(slots=True)
class _Letterbox:
    """Where one message comes in, micro-batch after micro-batch."""

    shape: tuple[int, ...]  # of the buffer that holds all values
    dtype: torch.dtype
    dtypes: tuple[torch.dtype, ...]  # of the values
    source: int
    is_expected: bool = False
    taken: int = 0  # in this step
    incoming: Operation | None = None  # once its turn has come


class Mailbox:
    """Sends never block; each receive is posted when the one before it was taken.

    They are so in the order that `begin` gives: receives from one source, and on a
    transport without tags whatever the rank does together with others.

    Messages name the ranks of one copy of the model, whose first one is `first_rank`.
    Floating-point values travel as `float_dtype`, if it is given. `apart` says for
    which micro-batches each value of a message gets memory of its own, so that one can
    go before the others. If it `casts`, values may come in other dtypes than they
    travel in: the rules of autocast differ by device.
    """

    def __init__(
        self,
        transport: DeviceTransport,
        first_rank: int,
        float_dtype: torch.dtype | None,
        *,
        apart: Callable[[int], bool],
        casts: bool = False,
    ) -> None:
        self._transport = transport
        self._first_rank = first_rank
        self._rank = transport.host.rank - first_rank
        self._dtype = float_dtype
        self._apart = apart
        self._casts = casts
        self._num_expected = 0
        self._training = True
        self._local: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._letterboxes: dict[Message, _Letterbox] = {}
        self._sends: list[Request] = []
        self._turns = Turns(self._lane)
        self._order: tuple[Hashable, ...] = ()
        # of this rank, by the id of the order that was given
        self._orders: dict[int, tuple[Sequence[Hashable], tuple[Hashable, ...]]] = {}
        self._acting: Hashable | None = None  # an action of all tiles, until it is over

    def begin(
        self, num_expected: int, order: Sequence[Hashable] = (), *, training: bool
    ) -> None:
        """Expect so many micro-batches of each message in this step, in an order.

        Steps of one kind give the same one. Besides messages it has what `when` and
        `act` get.
        """
        self._num_expected = num_expected
        self._training = training
        if id(order) not in self._orders:  # what is kept has its id for good
            self._orders[id(order)] = order, tuple(self._expanded(order))
        self._order = self._orders[id(order)][1]
        self._turns.begin(self._order)

    def when(self, entry: Hashable, start: Callable[[], None]) -> None:
        """Begin a sum of gradients, or what else is in the order, when its turn comes.

        Without tags it has come when all that is before it in the order has begun.
        """
        self._end_action()
        self._turns.offer(entry, start)

    def act(self, entry: Hashable) -> None:
        """Begin an action of all tiles: it is over when the mailbox is used again."""
        self._end_action()
        self._turns.expect(entry)
        self._acting = entry

    def end_order(self) -> None:
        """Make sure that all has begun which is in the order."""
        self._end_action()
        self._turns.end()

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        self.end_order()
        self._transport.wait(*self._sends)
        self._sends.clear()

    def release_arrived(self) -> None:
        """Give the library a turn; drop the tensors whose sends are done."""
        if self._sends:
            self._sends = [request for request in self._sends if not request.done()]

    def buffers(self) -> Iterator[Tensor]:
        """Yield the memory of the receives that wait for their message."""
        for box in self._letterboxes.values():
            if box.incoming is not None:
                yield box.incoming.buffer

    def send(self, message: Message | GridMessage, m: int, *tensors: Tensor) -> None:
        """Start to send a message's values.

        Raises:
            GemscError: a value has another shape than at compile time.
        """
        if message.is_local:
            follows = self._training and not message.is_gradient
            self._local[message.tag, m] = tuple(
                tensor.detach().requires_grad_(gradient and follows)
                for tensor, gradient in zip(tensors, message.gradients, strict=True)
            )
            return
        self._end_action()
        self.release_arrived()
        if isinstance(message, GridMessage):
            whole = [value.part(value.shape) for value in message.given]
            tensors = self._cast(tensors, whole)
            for part in message.parts:
                if part.source == self._rank:
                    self._start(part.message, message.cut(part, tensors))
        else:
            for tensor, value in zip(tensors, message.values, strict=True):
                value.check(tensor)
            self._start(message, self._cast(tensors, message.values))

    def receive(self, message: Message | GridMessage, m: int) -> tuple[Tensor, ...]:
        """Return a message's values, with `requires_grad` as the stage needs it."""
        if message.is_local:
            return self._local.pop((message.tag, m))
        self._end_action()
        if isinstance(message, GridMessage):
            tensors = self._take_parts(message, m)
        else:
            tensors = self._take(message, m)
        if self._training and not message.is_gradient:
            for tensor, gradient in zip(tensors, message.gradients, strict=True):
                tensor.requires_grad_(gradient)
        return tuple(tensors)

    def _cast(
        self, tensors: tuple[Tensor, ...], values: Sequence[Value]
    ) -> tuple[Tensor, ...]:
        if not self._casts:
            return tensors
        pairs = zip(tensors, values, strict=True)
        return tuple(tensor.to(v.dtype_in(self._dtype)) for tensor, v in pairs)

    def _start(self, message: Message, tensors: tuple[Tensor, ...]) -> None:
        """Send the values of a message in their turn, packed if they are several."""
        dest = message.dest + self._first_rank

        def start() -> None:
            packed = message.pack(tensors)
            self._sends.append(self._transport.send(packed, dest, message.tag))

        self._turns.offer(message, start)

    def _take(self, message: Message, m: int) -> list[Tensor]:
        """Wait for a message and post the receive of the next one."""
        box = self._expect(message)
        if box.incoming is None:
            self._turns.expect(message)
        assert box.incoming is not None
        buffer, box.incoming, box.is_expected = box.incoming.take(), None, False
        box.taken = (box.taken + 1) % self._num_expected
        if box.taken:
            self._expect(message)
        values = message.unpack(buffer, box.dtypes)
        if len(values) > 1 and self._apart(m):
            return [value.clone() for value in values]
        return values

    def _expect(self, message: Message) -> _Letterbox:
        """Post the receive of a message's next micro-batch in its turn, if not done."""
        box = self._letterboxes.get(message)
        if box is None:
            dtypes = tuple(value.dtype_in(self._dtype) for value in message.values)
            source = message.source + self._first_rank
            box = _Letterbox(*message.buffer(dtypes), dtypes, source)
            self._letterboxes[message] = box
        if not box.is_expected:
            box.is_expected = True
            self._turns.offer(message, partial(self._post, box, message.tag))
        return box

    def _post(self, box: _Letterbox, tag: int) -> None:
        box.incoming = self._transport.receive(box.shape, box.dtype, box.source, tag)

    def _end_action(self) -> None:
        """Let what comes after an action of all tiles have its turn."""
        if self._acting is not None:
            entry, self._acting = self._acting, None
            self._turns.offer(entry, lambda: None)  # it has begun

    def _lane(self, entry: Hashable) -> Hashable | None:
        """Return in which order an entry begins: see `Turns`."""
        if not self._order:  # compiled before there were orders
            if self._transport.has_lanes:
                raise GemscError(
                    "the program does not say in which order its messages are sent, "
                    "and this engine has no tags",
                    help="compile it again",
                )
            return None
        if self._transport.has_lanes:
            return "all"
        if isinstance(entry, Message) and entry.dest == self._rank:
            return entry.source
        return None

    def _expanded(self, order: Iterable[Hashable]) -> Iterator[Hashable]:
        """Yield the entries of an order, of messages between grids this rank's own."""
        for entry in order:
            if isinstance(entry, GridMessage):
                for part in entry.parts:
                    if self._rank in (part.source, part.dest):
                        yield part.message
            else:
                yield entry

    def _take_parts(self, message: GridMessage, m: int) -> list[Tensor]:
        """Wait for what each rank of another grid sends, and put it together."""
        parts = [part for part in message.parts if part.dest == self._rank]
        for part in parts:
            self._expect(part.message)
        received = [(part, self._take(part.message, m)) for part in parts]
        whole = (value.part(value.shape) for value in message.given)
        dtypes = [value.dtype_in(self._dtype) for value in whole]
        return message.join(
            self._rank, received, dtypes, self._transport.streams.device
        )
