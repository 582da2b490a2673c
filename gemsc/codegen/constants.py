"""The constants of a rank's module: its runs, messages, exchanges, and PROGRAM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product

import torch
from torch import fx

from gemsc.base.boxes import Box
from gemsc.base.dtypes import lying_of
from gemsc.codegen.exchanges import exchanges_of, gathers_of, sums_of, wish_of
from gemsc.codegen.expressions import literal
from gemsc.codegen.order import turns_text
from gemsc.codegen.python_text import quoted
from gemsc.codegen.rank_text import RankText, RunText
from gemsc.codegen.stage import uses_layer
from gemsc.codegen.writer import Names, Writer
from gemsc.errors import InternalError
from gemsc.ir import meta
from gemsc.ir.flow import base_name
from gemsc.ir.opaque import opaques
from gemsc.ir.program import GraphInput, Program, Transfer
from gemsc.messages.exchange import Exchange
from gemsc.planner.traffic import ends
from gemsc.schedules.action import Action
from gemsc.schedules.loops import expand
from gemsc.schedules.rank_step import AllReduce, Event


class Constants:
    """Names and writes the constants.

    `runs` has the runs by their keys, `names` (replica, transfer) -> message,
    `exchanges` what tiles of a grid exchange.
    """

    def __init__(self, text: RankText, writer: Writer, taken: Names) -> None:
        self.text = text
        self.writer = writer
        self.runs = {run.key: taken.unique(run.key.upper()) for run in text.runs}
        self.names: dict[tuple[int, int], str] = {}
        self.exchanges: dict[Exchange, str] = {}
        for run in text.runs:
            self._name_messages(run, taken)
            for node, exchange in exchanges_of(run.stage):
                if exchange not in self.exchanges:
                    self.exchanges[exchange] = taken.unique(wish_of(node, exchange))
            if run.stage.flow.index == text.evaluation.home:
                gathers = gathers_of(text.evaluation, text.tile)
                for node, exchange in gathers.items():
                    wish = f"WHOLE_{base_name(node).upper()}"
                    self.exchanges[exchange] = taken.unique(wish)

    def _name_messages(self, run: RunText, taken: Names) -> None:
        for transfer in self.text.transfers(run):
            name = "_AND_".join(self.text.names[v].upper() for v in transfer.values[:2])
            if len(transfer.values) > 2:
                name += f"_AND_{len(transfer.values) - 2}_MORE"
            name += run.key.removeprefix(f"stage{run.stage.flow.index}").upper()
            if self._is_branched(transfer):
                name += f"_TO_{transfer.dest}"
            key = (run.replica, transfer.index)
            if key not in self.names:
                self.names[key] = taken.unique(name)

    def _is_branched(self, transfer: Transfer) -> bool:
        """Whether a value of the transfer also goes to another stage."""
        programs = (self.text.program, self.text.evaluation)
        others = {t.index: t for p in programs for t in p.transfers or ()}.values()
        return any(
            other.index != transfer.index and set(other.values) & set(transfer.values)
            for other in others
        )

    def write(self) -> None:
        """Write what the functions of the module name."""
        line = self.writer.line
        replicas = self.text.num_replicas
        comment = "  # of each replica" if replicas > 1 else ""
        line(f"NUM_MICRO_BATCHES = {self.text.num_micro_batches}{comment}")
        if replicas > 1:
            line(f"NUM_REPLICAS = {replicas}")
        for run in self.text.runs:
            replica = f", replica={run.replica}" if run.replica else ""
            index = run.stage.flow.index
            line(f"{self.runs[run.key]} = Run(stage={index}{replica})")
        if self.names or self.exchanges:
            line()
        if self.names:
            line("# What comes in and goes out, for each micro-batch.")
        written = set()
        for run in self.text.runs:
            for transfer in self.text.transfers(run):
                key = (run.replica, transfer.index)
                if key not in written:
                    written.add(key)
                    self._write_message(run, transfer)
        self._write_exchanges()
        line()
        line()

    def write_program(self) -> None:
        """Write what the runtime takes from the module."""
        text, line = self.text, self.writer.line
        trains = text.program.loss is not None
        with self.writer.block("PROGRAM = RankProgram("):
            line("num_micro_batches=NUM_MICRO_BATCHES,")
            line(f"num_replicas={'NUM_REPLICAS' if text.num_replicas > 1 else 1},")
            stages = {self.runs[run.key]: run.stage.class_name for run in text.runs}
            self._write_table("stages", stages)
            self._write_table(
                "inputs", self._inputs(), "What this rank reads of each micro-batch."
            )
            self._write_table(
                "reductions",
                {repr(name): ranks for name, ranks in text.reductions.items()},
                "Gradients are all-reduced by the ranks that hold the same parameters.",
            )
            if text.program.updated is not None and text.reductions:
                self._write_sharing()
            self._write_table(
                "parts",
                {repr(name): part for name, part in text.parts.items()},
                "What this rank has a part of: some of the units of one dimension.",
                seldom=True,
            )
            self._write_table(
                "placed",
                {repr(path): tile for path, tile in text.placed.items()},
                "The only rank of the grid that has the weights of a branch; we are "
                f"{text.tile}.",
                seldom=True,
            )
            self._write_table(
                "aliases",
                self._aliases(),
                "Further names of what it holds, of modules that are never called.",
                seldom=True,
            )
            if any(shards.fork_of for shards in text.program.shards.values()):
                line("branches=True,  # others may have gradients that are absent here")
            self._write_table(
                "deferred",
                self._deferred(),
                "Micro-batches that leave weight gradients to `weights_...`.",
                seldom=True,
            )
            if text.tile is not None:
                grid, ranks = text.grid
                words = f"grid={grid}, ranks={ranks}, tile={text.tile}"
                if sums := self._sums(len(ranks)):
                    words += f", sums={sums}"
                self.writer.argument(f"tiles=Tiles({words})")
            if opaques(text.program.module):
                line("depends_on_data=True,  # some gradients may be absent")
            if text.program.autocast is not None:
                line(f"precision={text.program.autocast[1]},  # of matrix products")
            if text.torch_compile:
                line("torch_compile=True,  # each forward, at its first call")
            for name, events in zip(("train", "eval"), text.order, strict=True):
                turns = [turn for event in events for turn in self._turns(event)]
                if turns:
                    self.writer.argument(f"{name}_order={turns_text(turns)}")
            line(f"train_step={'train_step' if trains else None},")
            line("eval_step=eval_step,")
        line(")")

    def _aliases(self) -> dict[str, str]:
        """Return the names for which no stage of the program has a place.

        A module that the model has twice is called by its first name.
        """
        program = self.text.program
        held = {name for run in self.text.runs for name in run.stage.owned}
        nodes = program.graph.nodes
        used = {meta.layer(node) for node in nodes if uses_layer(node)}
        return {
            repr(alias): repr(first)
            for alias, first in program.aliases.items()
            if first in held and not any(alias.startswith(f"{path}.") for path in used)
        }

    def _sums(self, num_tiles: int) -> tuple[tuple[int, ...], ...]:
        """Return the tiles of each sum of tiles in which the rank takes part."""
        everyone = tuple(range(num_tiles))
        sums = {among for run in self.text.runs for among in sums_of(run.stage)}
        if opaques(self.text.program.module):
            sums.add(())  # whether gradients are absent is for all tiles to say
        return tuple(sorted({among or everyone for among in sums}))

    def _turns(self, event: Event) -> list[str]:
        """Return how the file calls what begins with an event."""
        _, what = event
        if isinstance(what, AllReduce):
            stage = int(what.group.removeprefix("stage"))
            return [repr(key) for key in self.text.sums_of(stage)]
        assert isinstance(what, tuple)
        place, which = what
        if isinstance(which, Action):
            here = which.replica, which.stage
            runs = self.text.runs
            run = next(r for r in runs if (r.replica, r.stage.flow.index) == here)
            return [self.runs[run.key]]
        back = place[2] % 2
        return [self._by_tag[place[2] - back] + ".gradient" * back]

    @cached_property
    def _by_tag(self) -> dict[int, str]:
        """The names of messages by their tags."""
        return {self.text.tag(*key): name for key, name in self.names.items()}

    def _write_table(
        self,
        name: str,
        items: Mapping[str, object],
        about: str = "",
        *,
        seldom: bool = False,
    ) -> None:
        if items and about:
            self.writer.line(f"# {about}")
        if items or not seldom:
            pairs = ", ".join(f"{key}: {value}" for key, value in items.items())
            self.writer.argument(f"{name}={{{pairs}}}")

    def _write_sharing(self) -> None:
        """Write what the ranks that hold the same parameters keep rows of only."""
        program, line = self.text.program, self.writer.line
        line("# Each updates its rows of them and gets the others'.")
        kept = "  # gradients: between backwards" if program.adds_at_once else ""
        line(f"shard={quoted(program.shard)},{kept}")
        if program.whole_stages:
            line(f"whole_stages={program.whole_stages},  # at a time; else rows only")
        if turns := self._gathers():
            line("# Whose weights are gathered: the next while one computes.")
            self.writer.argument(f"gather_order={turns_text(turns)}")
        self._write_updated_whole()

    def _gathers(self) -> list[str]:
        """Return whose weights a step gathers ahead, action after action."""
        if self.text.program.whole_stages < 2:
            return []
        names = {
            (run.replica, run.stage.flow.index): self.runs[run.key]
            for run in self.text.runs
            if self.text.sums_of(run.stage.flow.index)
        }
        places = ((a.replica, a.stage) for a in expand(self.text.steps))
        return [names[place] for place in places if place in names]

    def _write_updated_whole(self) -> None:
        """Write what of this rank's parameters is not cut into rows."""
        held = {name for run in self.text.runs for name in run.stage.owned}
        names = sorted(self.text.program.updated_whole().keys() & held)
        if names:
            self.writer.line("# The optimizer does not update these by element.")
            self.writer.argument(f"updated_whole={{{', '.join(map(quoted, names))}}}")

    def _deferred(self) -> dict[str, object]:
        deferred: dict[str, object] = {}
        for run in self.text.runs:
            if numbers := self.text.deferred(run):
                is_all = len(numbers) == self.text.num_micro_batches
                shown = "range(NUM_MICRO_BATCHES)" if is_all else numbers
                deferred[self.runs[run.key]] = shown
        return deferred

    def _write_message(self, run: RunText, transfer: Transfer) -> None:
        sources = self.text.ranks(run.replica, transfer.source)
        dests = self.text.ranks(run.replica, transfer.dest)
        tag = self.text.tag(run.replica, transfer.index)
        name = self.names[run.replica, transfer.index]
        if len(sources) > 1 or len(dests) > 1:
            kind, places = "GridMessage", f"sources={sources}, dests={dests}"
            values = [self._tile_value(transfer, value) for value in transfer.values]
        else:
            kind, places = "Message", f"source={sources[0]}, dest={dests[0]}"
            values = [self._value(value) for value in transfer.values]
        packed = f"({', '.join(values)},)"
        self.writer.statement(f"{name} = {kind}(tag={tag}, {places}, values={packed})")

    def _value(self, value: fx.Node) -> str:
        spec = meta.spec(value)
        what = f"{self.text.names[value]!r}, {tuple(spec.shape)}, {spec.dtype}"
        return f"Value({', '.join([what, *self._kind(value)])})"

    def _tile_value(self, transfer: Transfer, value: fx.Node) -> str:
        exchange = ends(self._program_of(transfer), transfer, value)
        what = f"{self.text.names[value]!r}, {exchange.shape}, {meta.spec(value).dtype}"
        boxes = [f"held={box_constants(exchange.held)}"]
        if exchange.wanted != exchange.held:
            boxes.append(f"wanted={box_constants(exchange.wanted)}")
        arguments = [what, *boxes, *self._kind(value), *_extras(exchange)]
        return f"TileValue({', '.join(arguments)})"

    def _kind(self, value: fx.Node) -> list[str]:
        """Return the arguments that say what is special about a value of a message."""
        kind = ["gradient=True"] if meta.needs_gradient(value) else []
        dtype = meta.spec(value).dtype
        if meta.dtypes(value).value:
            kind.append("keeps_dtype=True")
        elif dtype.itemsize == 2 and dtype in self._of_autocast:
            kind.append("in_autocast=True")
        return kind + _format(value)

    @cached_property
    def _of_autocast(self) -> set[torch.dtype]:
        """The dtypes that torch.autocast alone makes: no weight and no input has it."""
        module, inputs = self.text.program.module, self.text.program.inputs
        regions = [meta.region(node).autocast for node in module.graph.nodes]
        held = {t.dtype for t in (*module.parameters(), *module.buffers())}
        held |= {item.spec.dtype for item in inputs}
        return {dtype for _, dtype in filter(None, regions)} - held

    def _program_of(self, transfer: Transfer) -> Program:
        """Return the program, training or evaluation, in which a transfer is."""
        train = self.text.program
        return train if transfer in (train.transfers or ()) else self.text.evaluation

    def _write_exchanges(self) -> None:
        if self.exchanges:
            self.writer.line(
                "# What the tiles hold of a value, and what they want of it."
            )
        for exchange, name in self.exchanges.items():
            arguments = [
                f"index={exchange.index}",
                f"shape={exchange.shape}",
                f"held={box_constants(exchange.held)}",
                f"wanted={box_constants(exchange.wanted)}",
                *_extras(exchange),
            ]
            self.writer.statement(f"{name} = Exchange({', '.join(arguments)})")

    def _inputs(self) -> dict[str, str]:
        used: dict[str, str] = {}
        for run in self.text.runs:
            sides = (
                (self.text.program, run.stage.flow),
                (self.text.evaluation, run.stage.evaluation),
            )
            for program, flow in sides:
                items = {item.name: item for item in program.inputs}
                for node in flow.inputs:
                    text = self._input(items[node.name], node)
                    if used.setdefault(repr(node.name), text) != text:
                        raise InternalError(f"{node.name} is split in two ways: {text}")
        return used

    def _input(self, item: GraphInput, node: fx.Node) -> str:
        layout = meta.layout(node)
        whole = layout.shape if layout is not None else item.spec.shape
        arguments = [f"{item.path}, {tuple(whole)}, {item.spec.dtype}"]
        if not self.text.is_batched(item):
            arguments.append("batched=False")
        if layout is not None and not layout.is_whole:
            assert self.text.tile is not None
            arguments.append(f"box={layout.boxes[self.text.tile]}")
        arguments += _format(node)
        return f"Input({', '.join(arguments)})"


def box_constants(values: Sequence[Box]) -> str:
    """Return boxes as text, short where they are all the same, or rows of a grid."""
    axes = [tuple(dict.fromkeys(axis)) for axis in zip(*values, strict=True)]
    if len(values) > 1 and len(set(values)) == 1:
        return f"({values[0]},) * {len(values)}"
    if len(values) > 1 and tuple(product(*axes)) == tuple(values):
        shown = [str(axis[0]) if len(axis) == 1 else str([*axis]) for axis in axes]
        return f"tile_boxes({', '.join(shown)})"
    return str(tuple(values))


def _format(value: fx.Node) -> list[str]:
    """Return the argument that says how a value lies in memory, if it is not plain."""
    form = meta.whole_format(value) or lying_of(meta.value(value))
    return [] if form is torch.contiguous_format else [f"memory_format={form}"]


def _extras(exchange: Exchange) -> list[str]:
    """Return the arguments of an exchange that are seldom there."""
    extras = [f"fill={literal(exchange.fill)}"] if exchange.fill else []
    extras += [f"owned={box_constants(exchange.owned)}"] if exchange.owned else []
    extras += ["wraps=True"] if exchange.wraps else []
    return extras + (["adds=True"] if exchange.adds else [])
