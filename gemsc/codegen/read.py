"""Read rank files back: what each rank receives, sends, computes and all-reduces.

What is proved is then what is written, whatever wrote it. Constants are read by the
classes that a rank reads them with; of a stage's class the calls of its grid count, in
the order in which Python makes them, and the comments that name the user's lines.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from gemsc.base.boxes import Box
from gemsc.base.parts import parts_of
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
    tile_boxes,
    tiles,
)
from gemsc.runtime.tiles.messages import tag_of
from gemsc.schedules.action import Action, Kind
from gemsc.schedules.rank_step import (
    AllReduce,
    End,
    GridCall,
    MessageEnd,
    RankStep,
    StageRun,
    Step,
)

CLASSES = (
    *(Exchange, GridMessage, Input, Message, Part, RankProgram, Run, Tiles, TileValue),
    Value,
)
NAMES = {each.__name__: each for each in (*CLASSES, torch, tile_boxes, float, range)}
NOWHERE = Run(-1)  # a function that has run no stage yet
SIMPLE = ("NUM_MICRO_BATCHES", "NUM_REPLICAS")
KINDS = {
    "run": Kind.FORWARD,
    "evaluate": Kind.FORWARD,
    "evaluate_apart": Kind.FORWARD,
    "backward": Kind.BACKWARD,
    "weights": Kind.WEIGHT,
}
UNKNOWN = "does something that the proof does not know"
USERS_LINE = re.compile(r"\s*# ([^:]+:\d+)(?: in \S+)?(?:  .*)?$")


def read_ranks(files: Mapping[str, str]) -> tuple[list[RankStep], list[RankStep]]:
    """Return what each rank does in a step of training, and in one of evaluation.

    Raises:
        InternalError: a file says what no rank could do.
    """
    known: dict[str, object] = {}
    texts = [files[f"rank{rank}.py"] for rank in range(len(files))]
    read = [_File(rank, text, known) for rank, text in enumerate(texts)]
    return [f.step("train_step") for f in read], [f.step("eval_step") for f in read]


@dataclass
class _Function:
    """What a function of the file does with a micro-batch, whichever.

    `variables` are those that it has given values to, each with the user's line that
    computes it, "" where that is not known.
    """

    kind: Kind = Kind.FORWARD
    run: Run = NOWHERE
    receives: list[MessageEnd] = field(default_factory=list)
    sends: list[MessageEnd] = field(default_factory=list)
    calls: list[GridCall] = field(default_factory=list)
    lines: str = ""
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def work(self) -> StageRun:
        """Return it as plain data."""
        messages = tuple(self.receives), tuple(self.sends)
        return StageRun(*messages, tuple(self.calls), self.lines)


@dataclass(frozen=True)
class _Method:
    """A method of a stage: how much it takes, and of which user's lines it gives."""

    num_taken: int
    gives: tuple[str, ...]
    calls: tuple[GridCall, ...]
    lines: str


class _File:
    """One rank's file. Constants that a file before it has as well are `known`."""

    def __init__(self, rank: int, text: str, known: dict[str, object]) -> None:
        self.rank = rank
        self.text = text.split("\n")
        self.known = known
        body = ast.parse(text).body
        self.functions = {f.name: f for f in body if isinstance(f, ast.FunctionDef)}
        self.classes = {c.name: c for c in body if isinstance(c, ast.ClassDef)}
        self.constants: dict[str, Any] = {}
        for statement in body:
            self._read_constant(statement)
        if "PROGRAM" not in self.constants:
            raise InternalError(f"wrong program: rank {rank} has no PROGRAM")
        self.program: RankProgram = self.constants["PROGRAM"]
        self.tiles = self.program.tiles or Tiles((), (rank,), 0)
        self.users_lines = _users_lines(self.text)
        self.read: dict[str, _Function] = {}
        self.methods: dict[tuple[str, str], _Method] = {}

    def _read_constant(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if name == "PROGRAM":
                    own = {**self.classes, **self.functions}
                    self.constants[name] = self._value(value, own)
                elif name in SIMPLE or _called(value) in NAMES:
                    last = value.end_lineno
                    key = "\n".join(self.text[statement.lineno - 1 : last])
                    if key not in self.known:
                        self.known[key] = self._value(value)
                    self.constants[name] = self.known[key]

    def _value(self, node: ast.expr, others: Mapping[str, object] | None = None) -> Any:
        names = {"__builtins__": {}, **NAMES, **self.constants, **(others or {})}
        return eval(_compiled(node), names)

    def wrong(self, node: ast.AST, text: str) -> InternalError:
        """Return the error that names a line of the file, and its stage's lines."""
        place = node.lineno  # type: ignore[attr-defined]
        around = [f for f in self.functions.values() if f.lineno <= place]
        name = around[-1].name if around else ""
        line, stage = self.text[place - 1].strip(), ""
        inside = ast.walk(around[-1]) if around else ()
        named = (self.constants.get(_name(each)) for each in inside)
        run = next((each for each in named if isinstance(each, Run)), None)
        if run is not None:
            lines = self.method(run).lines
            stage = f": stage {run.stage} ({lines}), every micro-batch"
        return InternalError(
            f"wrong program: rank {self.rank} {text}: {line}, in {name}{stage}"
        )

    # ------------------------------------------------------------ steps

    def step(self, name: str) -> RankStep:
        """Return what a step does: nothing where the file has no such function."""
        self.read = {}
        found = self.functions.get(name)
        steps = tuple(self._steps(found)) if found is not None else ()
        runs = {
            (f.kind, f.run.replica, f.run.stage): f.work for f in self.read.values()
        }
        deferred = frozenset(
            Action(Kind.WEIGHT, run.stage, m, run.replica)
            for run, numbers in self.program.deferred.items()
            if (Kind.BACKWARD, run.replica, run.stage) in runs
            for m in numbers
        )
        parts, placed = self.program.parts, self.program.placed
        here = self.rank, runs, steps, self.tiles.ranks
        return RankStep(*here, deferred, parts, placed)

    def _steps(self, function: ast.FunctionDef) -> Iterator[Step]:
        for statement in function.body[1:]:
            match statement:
                case ast.For(target=ast.Name(id=name), iter=values, body=body):
                    numbers = list(self._value(values))
                    calls = [self._actions(each, name, numbers) for each in body]
                    for together in zip(*calls, strict=True):
                        yield from together
                case ast.Expr(value=ast.Call(func=ast.Name())):
                    yield from self._actions(statement, "m", [0])
                case ast.Expr(value=ast.Call(func=ast.Attribute(attr=verb)) as call):
                    yield from self._ending(verb, call)
                case _:
                    raise self.wrong(statement, UNKNOWN)

    def _actions(
        self, statement: ast.stmt, name: str, numbers: Sequence[int]
    ) -> list[Action]:
        """Return what a call does, for each value of the loop's variable."""
        match statement:
            case ast.Expr(
                value=ast.Call(func=ast.Name(id=function), args=[_, micro_batch])
            ) if function in self.functions:
                if function not in self.read:
                    self.read[function] = self._function(self.functions[function])
                read = self.read[function]
                code = _compiled(micro_batch)
                places = (eval(code, {name: number}) for number in numbers)
                run = read.run
                return [Action(read.kind, run.stage, m, run.replica) for m in places]
        raise self.wrong(statement, UNKNOWN)

    def _ending(self, verb: str, call: ast.Call) -> Iterator[Step]:
        sums = self.program.reductions
        stages = {run.stage_name for run in self.program.stages}
        stages |= {*map(parts_of, stages)}
        if verb == "start_reduction":
            group = ast.literal_eval(call.args[0])
            if group not in sums:
                raise self.wrong(call, f"has no '{group}' in its reductions")
            yield AllReduce(group, sums[group])
        elif verb == "finish_reductions":  # starts those of tied parameters
            for group in sorted(sums.keys() - stages):
                yield AllReduce(group, sums[group])
            yield End.REDUCED
        elif verb == "update":
            yield End.UPDATED
        else:
            raise self.wrong(call, UNKNOWN)

    # --------------------------------------------- what an action does

    def _function(self, function: ast.FunctionDef) -> _Function:
        read = _Function()
        for statement in function.body[1:]:
            match statement:
                case ast.Expr(value=ast.Call() as call):
                    self._read_call(read, call, [])
                case ast.Assign(
                    targets=[ast.Tuple() as names], value=ast.Call() as call
                ):
                    self._read_call(read, call, [_name(each) for each in names.elts])
                case ast.Assign(targets=[name], value=ast.Call() as call):
                    self._read_call(read, call, [_name(name)])
                case _:
                    raise self.wrong(statement, UNKNOWN)
        if read.run == NOWHERE:
            raise self.wrong(function, "runs no stage")
        return read

    def _read_call(self, read: _Function, call: ast.Call, targets: list[str]) -> None:
        """Read `targets = worker.verb(...)`."""
        verb = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        lines: Sequence[str] = [""] * len(targets)
        if verb in KINDS:
            given = self._computes(read, verb, call)
            lines = lines if given is None else given
        elif verb == "receive":
            message = self._message(call, len(targets))
            read.receives += self._ends(call, message, sends=False)
        elif verb == "send":
            known = self._uses(read, call.args[2:])
            message = self._message(call, len(known))
            read.sends += self._ends(call, message, sends=True, line=_joined(known))
        elif verb == "gather":
            self._uses(read, call.args[:1])
            read.calls.append(self._grid_call(call))
        elif verb not in ("input", "add_loss", "add_result"):
            raise self.wrong(call, UNKNOWN)
        if len(lines) != len(targets) and targets:
            raise self.wrong(call, f"takes {len(targets)} of {len(lines)} values")
        read.variables |= dict(zip(targets, lines, strict=False))

    def _uses(self, read: _Function, values: Sequence[ast.expr]) -> list[str]:
        """Return the user's line of each value; all of them must be there."""
        lines = []
        for value in values:
            names = [n.id for n in ast.walk(value) if isinstance(n, ast.Name)]
            names = [name for name in names if name != "worker"]
            for name in names:
                if name not in read.variables:
                    raise self.wrong(value, f"uses '{name}', which has no value yet")
            lines.append(_joined([read.variables[name] for name in names]))
        return lines

    def _computes(
        self, read: _Function, verb: str, call: ast.Call
    ) -> tuple[str, ...] | None:
        """Read what runs a stage; return the lines of what it gives, if known."""
        run, micro_batch = self._value(call.args[0]), call.args[1]
        used = self._uses(read, call.args[2:])
        apart = verb == "evaluate_apart"
        method = self.method(run, "forward_eval" if apart else "forward")
        if read.run == NOWHERE:
            read.run, read.kind, read.lines = run, KINDS[verb], method.lines
        else:
            raise self.wrong(call, "runs a stage twice in one action")
        self._is_current(call, micro_batch)
        if verb == "weights":
            return None
        if verb == "backward":
            wanted, given = len(method.gives), None
        else:
            wanted, given = method.num_taken, method.gives
            read.calls += method.calls
        if len(used) != wanted:
            raise self.wrong(call, f"passes {len(used)} of {wanted} values")
        return given

    def _is_current(self, call: ast.Call, micro_batch: ast.expr) -> None:
        if _name(micro_batch) != "m":
            raise self.wrong(call, "works on another micro-batch")

    # --------------------------------------------------------- messages

    def _message(self, call: ast.Call, count: int) -> Message | GridMessage:
        """Return the message of a call that sends or receives so many values."""
        self._is_current(call, call.args[1])
        message: Message | GridMessage = self._value(call.args[0])
        values = message.given if isinstance(message, GridMessage) else message.values
        if len(values) != count:
            raise self.wrong(call, f"has {count} of the message's {len(values)} values")
        return message

    def _ends(
        self,
        call: ast.Call,
        message: Message | GridMessage,
        *,
        sends: bool,
        line: str = "",
    ) -> Iterator[MessageEnd]:
        """Yield this rank's ends of a message."""
        if isinstance(message, GridMessage):
            if message.is_local:
                values = tuple(_show(value, ()) for value in message.given)
                yield MessageEnd(self.rank, message.tag, values, line)
                return
            ranks = (*message.sources, *message.dests)
            parts = [
                (part.message, tuple(piece.box for _, piece in part.pieces))
                for part in message.parts
            ]
        else:
            ranks = (message.source if sends else message.dest,)
            parts = [(message, ((),) * len(message.values))]
        if self.rank not in ranks:  # a tile of the grid may have nothing to send
            raise self.wrong(call, "has no part in the message")
        for part, boxes in parts:
            here, peer = part.source, part.dest
            if not sends:
                here, peer = peer, here
            if here == self.rank:
                values = tuple(map(_show, part.values, boxes))
                yield MessageEnd(peer, part.tag, values, line)

    # ------------------------------------------------------------ grids

    def method(self, run: Run, name: str = "forward") -> _Method:
        """Return what a method of a run's stage does; blocks that recompute with it."""
        stage: Any = self.program.stages[run]  # as it stands in the file
        if (stage.name, name) not in self.methods:
            self.methods[stage.name, name] = self._method(stage, name)
        return self.methods[stage.name, name]

    def _method(self, stage: ast.ClassDef, name: str) -> _Method:
        methods = {f.name: f for f in stage.body if isinstance(f, ast.FunctionDef)}
        lines: dict[str, str] = {}  # by variable
        calls: list[GridCall] = []
        gives: tuple[str, ...] = ()

        def visit(function: ast.FunctionDef) -> None:
            nonlocal gives
            for node in _in_order(function):
                match node:
                    case ast.Call(func=ast.Name(id="recompute"), args=[block, *_]):
                        assert isinstance(block, ast.Attribute)
                        visit(methods[block.attr])
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name(id="tiles")),
                        args=[ast.Attribute(attr="grid"), *_],
                    ):
                        calls.append(self._grid_call(node))
                    case ast.Assign(targets=[target]):
                        for each in ast.walk(target):
                            if isinstance(each, ast.Name):
                                lines[each.id] = self.users_lines[node.lineno]
                    case ast.Return(value=value) if function is methods[name]:
                        given = value.elts if isinstance(value, ast.Tuple) else [value]
                        gives = tuple(lines.get(_name(g), "") for g in given if g)

        visit(methods[name])
        span = self.users_lines[stage.lineno : stage.end_lineno]
        places = sorted(filter(None, span), key=_file_and_number)
        about = f"{places[0]} to {places[-1]}" if places else ""
        return _Method(len(methods[name].args.args) - 1, gives, tuple(calls), about)

    def _grid_call(self, call: ast.Call) -> GridCall:
        """Return what tiles do in `tiles.amax(self.grid, ...)`, or in a gather."""
        assert isinstance(call.func, ast.Attribute)
        named = {word.arg: word.value for word in call.keywords if word.arg}
        gathers = call.func.attr == "gather"
        function = getattr(tiles, "redistribute" if gathers else call.func.attr)
        args = [None, *call.args] if gathers else call.args
        bound = inspect.signature(function).bind(*args, **named).arguments
        own, ranks = self.tiles.tile, self.tiles.ranks
        line = self.users_lines[call.lineno]
        if "among" in bound:
            ranks = tuple(ranks[tile] for tile in ast.literal_eval(bound["among"]))
        if "exchange" not in bound:
            return GridCall(call.func.attr, ranks, line=line)
        exchange: Exchange = self._value(bound["exchange"])
        view, tag = exchange.seen_from(own), tag_of(exchange, back=False)

        def ends(
            pieces: Mapping[int, Sequence[Piece]],
        ) -> tuple[MessageEnd, ...]:
            return tuple(
                MessageEnd(ranks[tile], tag, tuple(_box(p.box) for p in each))
                for tile, each in pieces.items()
            )

        name = _name(bound["exchange"])
        line = f"{name}, {line}" if line else name
        sent, received = ends(view.sent), ends(view.received)
        present = exchange.present if own in exchange.present else (own,)
        together = tuple(ranks[tile] for tile in present)
        return GridCall(call.func.attr, together, sent, received, line)


def _compiled(node: ast.expr) -> CodeType:
    return compile(ast.Expression(node), "a rank's file", "eval")


def _called(value: ast.expr) -> str:
    """Return the name of the function that an expression calls, "" if it calls none."""
    return _name(value.func) if isinstance(value, ast.Call) else ""


def _name(node: ast.AST | None) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _joined(lines: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(line for line in lines if line))


def _file_and_number(line: str) -> tuple[str, int]:
    file, _, number = line.rpartition(":")
    return file, int(number)


def _show(value: Value | TileValue, box: Box) -> str:
    """Return name, dtype, shape of a value, and which box of it this is."""
    dtype = str(value.dtype).removeprefix("torch.")
    where = f" at {_box(box)}" if box else ""
    return f"{value.name} {dtype}{list(value.shape)}{where}"


def _box(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is inside a node, then the node: as Python runs it."""
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)
    yield node


def _users_lines(text: Sequence[str]) -> list[str]:
    """Return for each line of the file, counted from 1, the user's that it is of."""
    found, current = [""], ""
    for line in text:
        if line.lstrip().startswith(("def ", "class ")):
            current = ""
        if match := USERS_LINE.match(line):
            current = match[1]
        found.append(current)
    return found
