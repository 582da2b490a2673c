"""Run rank files with a worker that records: what each receives, sends, does, adds up.

What is proved is then what Python does with a file, whatever wrote it. No stage runs,
and nothing of the user's is imported: of a stage's class the calls of its grid are read
from its text, in the order in which Python makes them, and the comments that name the
user's lines.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import zip_longest
from types import FrameType
from typing import Any

import torch

from gemsc.base.boxes import Box
from gemsc.codegen.recorder import Recorded, StageMethod, StepRecorder, arriving
from gemsc.errors import InternalError
from gemsc.messages.exchange import Piece
from gemsc.runtime import (
    Exchange,
    GridMessage,
    Input,
    Message,
    Part,
    RankProgram,
    Run,
    Tiles,
    TileValue,
    Value,
    named_output,
    tile_boxes,
    tiles,
)
from gemsc.runtime.tiles.grid import tag_of
from gemsc.runtime.worker.program import StepFunction
from gemsc.schedules.action import Action, Kind
from gemsc.schedules.rank_step import (
    GridCall,
    MessageEnd,
    RankStep,
    Turn,
)

PLAIN = (
    *(Input, Message, Part, RankProgram, Run, Tiles, Value),
    *(named_output, tile_boxes),
)
OF_MANY = (Exchange, GridMessage, TileValue)  # all tiles' files have the same
NOT_RUN = (ast.Import, ast.ImportFrom, ast.ClassDef)
Calls = list[GridCall]
USERS_LINE = re.compile(r"\s*# ([^:]+:\d+)(?: in \S+)?(?:  .*)?$")


def read_ranks(files: Mapping[str, str]) -> tuple[list[RankStep], list[RankStep]]:
    """Return what each rank does in a step of training, and in one of evaluation.

    Raises:
        InternalError: a file does what no rank could do.
    """
    names: dict[str, Any] = {entry.__name__: entry for entry in PLAIN}
    names |= {entry.__name__: cache(entry) for entry in OF_MANY}
    names |= {"torch": torch, "user_object": lambda *_: None}
    texts = (files[f"rank{rank}.py"] for rank in range(len(files)))
    read = [RankFile(rank, text, names) for rank, text in enumerate(texts)]
    training = [f.step(f.program.train_step, "train_turns") for f in read]
    return training, [f.step(f.program.eval_step, "eval_turns") for f in read]


class RankFile:
    """One rank's file; it imports nothing, but is given the `names` that it needs."""

    def __init__(self, rank: int, text: str, names: Mapping[str, Any]) -> None:
        self.rank = rank
        self.path = f"rank{rank}.py"
        self.text = text.split("\n")
        self.users_lines = _users_lines(self.text)
        self.methods: dict[tuple[Run, str], StageMethod] = {}
        self.ends, self.tensors = cache(self._ends), cache(arriving)

        self.names = {**names, "__file__": self.path}
        with self._telling():
            body = ast.parse(text).body
            runs = [node for node in body if not isinstance(node, NOT_RUN)]
            self.names |= {c.name: c for c in body if isinstance(c, ast.ClassDef)}
            # as in this file, annotations are not evaluated
            exec(compile(ast.Module(runs, []), self.path, "exec"), self.names)
        if "PROGRAM" not in self.names:
            raise InternalError(f"wrong program: rank {rank} has no PROGRAM")
        self.program: RankProgram = self.names["PROGRAM"]
        self.tiles = self.program.tiles or Tiles((), (rank,), 0)

    def step(self, function: StepFunction | None, order: str) -> RankStep:
        """Return what a step does: nothing where the file has no such function.

        `order` is where the program has the order of its communication.
        """
        recorder = StepRecorder(self)
        if function is not None:
            with self._telling():
                function(recorder)
                recorder.finish()
        runs, program = recorder.runs, self.program
        deferred = frozenset(
            Action(Kind.WEIGHT, run.stage, m, run.replica)
            for run, numbers in program.deferred.items()
            if (Kind.BACKWARD, run.replica, run.stage) in runs
            for m in numbers
        )
        done = self.rank, runs, tuple(recorder.steps), self.tiles.ranks
        with self._telling():
            turns = tuple(map(self._turn, getattr(program, order)))
        return RankStep(*done, deferred, program.parts, program.placed, turns)

    # ---------------------------------------------------------- errors

    def wrong(self, text: str, frame: FrameType | None = None) -> InternalError:
        """Return the error that names a line of the file, and its stage's lines.

        It is the line that runs now, or that which a frame is at; none if none does.
        """
        frame = frame or sys._getframe()
        while frame is not None and frame.f_code.co_filename != self.path:
            frame = frame.f_back
        text = f"wrong program: rank {self.rank} {text}"
        if frame is None:
            return InternalError(text)
        line, function = self.text[frame.f_lineno - 1].strip(), frame.f_code.co_name
        inside = frame.f_code.co_names if function in self.names else ()
        named = (self.names.get(name) for name in inside)
        run = next((value for value in named if isinstance(value, Run)), None)
        stage = ""
        if run is not None:
            lines = self.method(run).lines
            stage = f": stage {run.stage} ({lines}), every micro-batch"
        return InternalError(f"{text}: {line}, in {function}{stage}")

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Make of what Python refuses in the file an error that names the line."""
        try:
            yield
        except InternalError:
            raise
        except Exception as error:
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            inside = [f for f in frames if f.f_code.co_filename == self.path]
            text = f"fails with {type(error).__name__}: {error}"
            if isinstance(error, NameError) and (name := re.search("'.+'", str(error))):
                text = f"uses {name[0]}, which has no value yet"
            raise self.wrong(text, inside[-1] if inside else None) from error

    # -------------------------------------------------------- messages

    def _ends(
        self, message: Message | GridMessage, line: str, *, sends: bool
    ) -> tuple[MessageEnd, ...]:
        """Return this rank's ends of a message."""
        if isinstance(message, GridMessage):
            if message.is_local:
                values = tuple(_show(value, ()) for value in message.given)
                return (MessageEnd(self.rank, message.tag, values, line),)
            ranks = (*message.sources, *message.dests)
            parts = [
                (p.message, [piece.box for _, piece in p.pieces]) for p in message.parts
            ]
        else:
            ranks = (message.source if sends else message.dest,)
            parts = [(message, [()] * len(message.values))]
        if self.rank not in ranks:  # a tile of the grid may have nothing to send
            raise self.wrong("has no part in the message")
        ends = []
        for part, boxes in parts:
            here, peer = part.source, part.dest
            if not sends:
                here, peer = peer, here
            if here == self.rank:
                values = tuple(map(_show, part.values, boxes))
                ends.append(MessageEnd(peer, part.tag, values, line))
        return tuple(ends)

    def _turn(self, entry: object) -> Turn:
        """Return what an entry of the order of communication is."""
        match entry:
            case Run():
                return Turn(collective=(entry.replica, entry.stage))
            case str():
                return Turn(collective=entry)
            case GridMessage():
                sends = self.ends(entry, "", sends=True)
                return Turn(sends, self.ends(entry, "", sends=False))
            case Message() if entry.source == self.rank:
                return Turn(sends=self.ends(entry, "", sends=True))
            case Message():
                return Turn(receives=self.ends(entry, "", sends=False))
        raise self.wrong(f"has an order for {entry!r}")

    # ---------------------------------------------------------- stages

    def method(self, run: Run, name: str = "forward") -> StageMethod:
        """Return what a method of a run's stage does; blocks that recompute with it."""
        if (run, name) not in self.methods:
            stage: Any = self.program.stages[run]  # as it stands in the file
            self.methods[run, name] = self._method(stage, name)
        return self.methods[run, name]

    def _method(self, stage: ast.ClassDef, name: str) -> StageMethod:
        methods = {f.name: f for f in stage.body if isinstance(f, ast.FunctionDef)}
        lines: dict[str, str] = {}  # by variable
        gives: tuple[Recorded, ...] = ()

        def visit(function: ast.FunctionDef) -> tuple[Calls, Calls]:
            """Return the calls of forward, and those of backward."""
            nonlocal gives
            calls, back = Calls(), Calls()
            for node in _in_order(function):
                match node:
                    case ast.Call(func=ast.Name(id="recompute"), args=[block, *_]):
                        assert isinstance(block, ast.Attribute)
                        inside = visit(methods[block.attr])
                        calls += inside[0]
                        back = [*inside[0], *inside[1], *back]  # it runs again
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name(id="tiles"), attr=operation),
                        args=[ast.Attribute(attr="grid"), *_],
                    ):
                        there, home = self._operation(operation, node)
                        calls += there
                        back[:0] = home
                    case ast.Assign(targets=[target]):
                        for inner in ast.walk(target):
                            if isinstance(inner, ast.Name):
                                lines[inner.id] = self.users_lines[node.lineno]
                    case ast.Return(value=value) if function is methods[name]:
                        given = value.elts if isinstance(value, ast.Tuple) else [value]
                        names = [getattr(expr, "id", "") for expr in given if expr]
                        gives = tuple(Recorded(lines.get(name, "")) for name in names)
            return calls, back

        calls, back = map(tuple, visit(methods[name]))
        span = self.users_lines[stage.lineno : stage.end_lineno]
        places = sorted(filter(None, span), key=_file_and_number)
        about = f"{places[0]} to {places[-1]}" if places else ""
        return StageMethod(len(methods[name].args.args) - 1, gives, calls, back, about)

    def _operation(self, name: str, call: ast.Call) -> tuple[Calls, Calls]:
        """Return what tiles do in `tiles.amax(self.grid, ...)`, and in its backward."""
        named = {word.arg: word.value for word in call.keywords if word.arg}
        signature = inspect.signature(getattr(tiles, name))
        bound = signature.bind(*call.args, **named).arguments
        line = self.users_lines[call.lineno]
        if "exchange" in bound:
            exchange = self.names[bound["exchange"].id]
            if name == tiles.ring_attention.__name__:
                return self._rounds(name, exchange, line)
            there, home = (
                self.exchanges(name, exchange, line, back=back)
                for back in (False, True)
            )
            return [there], [home]
        among = ast.literal_eval(bound["among"]) if "among" in bound else ()
        among = among or tuple(range(len(self.tiles.ranks)))
        if among not in self.tiles.sums:
            raise InternalError(
                f"wrong program: rank {self.rank} adds up over tiles {among}, which "
                f"its `tiles` do not name: {line}"
            )
        ranks = tuple(self.tiles.ranks[tile] for tile in among)
        return ([GridCall(name, ranks, line=line)],) * 2

    def _rounds(self, name: str, whole: Exchange, line: str) -> tuple[Calls, Calls]:
        """Return what tiles do in a ring: its backward fetches each part again.

        The next part is there before the gradient of one goes home.
        """
        there, home = (
            [
                self.exchanges(name, exchange, line, back=back, of=whole)
                for exchange in whole.rounds
            ]
            for back in (False, True)
        )
        pairs = zip_longest(there, [None, *home])
        return there, [call for pair in pairs for call in pair if call is not None]

    def exchanges(
        self,
        method: str,
        exchange: Exchange,
        line: str,
        *,
        back: bool = False,
        of: Exchange | None = None,
    ) -> GridCall:
        """Return what tiles do in a call that exchanges parts of a value.

        `back` says that it is the backward, in which gradients go home; `of` that it is
        a round of another exchange.
        """
        this_tile, ranks = self.tiles.tile, self.tiles.ranks
        named = of or exchange
        view, tag = exchange.seen_from(this_tile), tag_of(exchange, back=back)

        def ends(pieces: Mapping[int, Sequence[Piece]]) -> tuple[MessageEnd, ...]:
            return tuple(
                MessageEnd(ranks[tile], tag, tuple(_box(p.box) for p in row))
                for tile, row in pieces.items()
            )

        present = exchange.present if this_tile in exchange.present else (this_tile,)
        constant = next(n for n, value in self.names.items() if value is named)
        line = f"{constant}, {line}" if line else constant
        members = tuple(ranks[tile] for tile in present)
        there, here = ends(view.sent), ends(view.received)
        there, here = (here, there) if back else (there, here)
        return GridCall(method, members, there, here, line)


def _file_and_number(line: str) -> tuple[str, int]:
    file, _, number = line.rpartition(":")
    return file, int(number)


def _show(value: Value | TileValue, box: Box) -> str:
    """Return name, dtype, shape of a value, which box of it this is, how it travels."""
    dtype = str(value.dtype).removeprefix("torch.")
    where = f" at {_box(box)}" if box else ""
    how = [name for name in ("keeps_dtype", "in_autocast") if getattr(value, name)]
    if value.memory_format is not torch.contiguous_format:
        how.append(str(value.memory_format).removeprefix("torch."))
    return " ".join([f"{value.name} {dtype}{list(value.shape)}{where}", *how])


def _box(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is inside a node, then the node: as Python runs it."""
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)
    yield node


def _users_lines(text: Sequence[str]) -> list[str]:
    """Return for each line of the file, counted from 1, the user's that it is of."""
    places, current = [""], ""
    for line in text:
        if line.lstrip().startswith(("def ", "class ")):
            current = ""
        if match := USERS_LINE.match(line):
            current = match[1]
        places.append(current)
    return places
