"""The constants of a rank's module: what it sends, receives, reads and adds up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from torch import fx

from gemsc.base.boxes import Box
from gemsc.codegen.exchanges import exchanges_of, gathers_of, wish_of
from gemsc.codegen.expressions import as_tuple, literal, quoted
from gemsc.codegen.rank_text import RankText, Run
from gemsc.codegen.writer import Names, Writer, split_arguments
from gemsc.errors import InternalError
from gemsc.ir import meta
from gemsc.ir.flow import base_name
from gemsc.ir.opaque import opaques
from gemsc.ir.program import GraphInput, Program, Transfer
from gemsc.ir.tile_ops import Exchange
from gemsc.planner.tiles import ends

__all__ = ["Constants"]


class Constants:
    """Names and writes the constants.

    `names` has (replica, transfer) -> message, `exchanges` what tiles of a grid
    exchange.
    """

    def __init__(self, text: RankText, writer: Writer, taken: Names) -> None:
        self.text = text
        self.writer = writer
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

    def _name_messages(self, run: Run, taken: Names) -> None:
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
        """Write messages, inputs and sums of gradients."""
        line = self.writer.line
        replicas = self.text.num_replicas
        each = "  # of each replica" if replicas > 1 else ""
        line(f"NUM_MICRO_BATCHES = {self.text.num_micro_batches}{each}")
        line(f"NUM_REPLICAS = {replicas}")
        if deferred := self._deferred():
            line("# Micro-batches that leave weight gradients to `weights_...`.")
            self.writer.call("DEFERRED = {", deferred, "}")
        if opaques(self.text.program.module):
            line("DEPENDS_ON_DATA = True  # some gradients may be absent")
        self._write_tiles()
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
        self._write_inputs()
        if self.text.reductions:
            line(
                "# Gradients are added up over the ranks that hold the same parameters."
            )
            pairs = [
                f"{quoted(name)}: {as_tuple(ranks)}"
                for name, ranks in self.text.reductions.items()
            ]
            self.writer.call("REDUCTIONS = {", pairs, "}")
        else:
            line("REDUCTIONS: dict[str, tuple[int, ...]] = {}")
        line()
        line()

    def _deferred(self) -> list[str]:
        found = []
        for run in self.text.runs:
            if numbers := self.text.deferred(run):
                is_all = len(numbers) == self.text.num_micro_batches
                shown = "range(NUM_MICRO_BATCHES)" if is_all else as_tuple(numbers)
                found.append(f"{quoted(run.key)}: {shown}")
        return found

    def _write_tiles(self) -> None:
        if self.text.tile is not None:
            grid, ranks = self.text.grid
            form = f"grid={as_tuple(grid)}, ranks={as_tuple(ranks)}"
            self.writer.line(f"TILES = Tiles({form}, tile={self.text.tile})")

    def _write_message(self, run: Run, transfer: Transfer) -> None:
        sources = self.text.ranks(run.replica, transfer.source)
        dests = self.text.ranks(run.replica, transfer.dest)
        tag = self.text.tag(run.replica, transfer.index)
        name = self.names[run.replica, transfer.index]
        if len(sources) > 1 or len(dests) > 1:
            ranks = [f"sources={as_tuple(sources)}", f"dests={as_tuple(dests)}"]
            values = [self._tile_value(transfer, value) for value in transfer.values]
            kind = "GridMessage"
        else:
            ranks = [f"source={sources[0]}", f"dest={dests[0]}"]
            values = [self._value(value) for value in transfer.values]
            kind = "Message"
        packed = f"({', '.join(values)}{',' if len(values) == 1 else ''})"
        if len(f"values={packed},") > self.writer.room - 4 and kind == "Message":
            inside = "".join(f"    {value},\n" for value in values)
            packed = f"(\n{inside})"
        arguments = [f"tag={tag}", *ranks, f"values={packed}"]
        self.writer.call(f"{name} = {kind}(", arguments)

    def _value(self, value: fx.Node) -> str:
        spec = meta.spec(value)
        arguments = [
            quoted(self.text.names[value]),
            as_tuple(spec.shape),
            str(spec.dtype),
        ]
        if meta.needs_gradient(value):
            arguments.append("gradient=True")
        if meta.dtypes(value).value:
            arguments.append("keeps_dtype=True")
        return f"Value({', '.join(arguments)})"

    def _tile_value(self, transfer: Transfer, value: fx.Node) -> str:
        exchange = ends(self._program_of(transfer), transfer, value)
        arguments = [
            quoted(self.text.names[value]),
            as_tuple(exchange.shape),
            str(meta.spec(value).dtype),
            f"held={box_constants(exchange.held)}",
        ]
        if exchange.wanted != exchange.held:
            arguments.append(f"wanted={box_constants(exchange.wanted)}")
        if meta.needs_gradient(value):
            arguments.append("gradient=True")
        if meta.dtypes(value).value:
            arguments.append("keeps_dtype=True")
        arguments += _rest(exchange)
        return f"TileValue({', '.join(arguments)})"

    def _program_of(self, transfer: Transfer) -> Program:
        """Return the program, training or evaluation, in which a transfer is."""
        own = self.text.program
        return own if transfer in (own.transfers or ()) else self.text.evaluation

    def _write_exchanges(self) -> None:
        if self.exchanges:
            self.writer.line(
                "# What the tiles hold of a value, and what they want of it."
            )
        for exchange, name in self.exchanges.items():
            arguments = [
                f"index={exchange.index}",
                f"shape={as_tuple(exchange.shape)}",
                f"held={box_constants(exchange.held)}",
                f"wanted={box_constants(exchange.wanted)}",
                *_rest(exchange),
            ]
            self.writer.call(f"{name} = Exchange(", arguments)

    def _write_inputs(self) -> None:
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
                    if used.setdefault(node.name, text) != text:
                        raise InternalError(
                            f"{node.name} is split in two ways: {used[node.name]}, "
                            f"{text}"
                        )
        if not used:
            self.writer.line("INPUTS: dict[str, Input] = {}")
            return
        self.writer.line("# What this rank reads of each micro-batch.")
        with self.writer.block("INPUTS = {"):
            for name, text in used.items():
                if len(f"{quoted(name)}: {text},") <= self.writer.room:
                    self.writer.line(f"{quoted(name)}: {text},")
                else:
                    head, arguments, tail = split_arguments(text)
                    self.writer.call(f"{quoted(name)}: {head}", arguments, f"{tail},")
        self.writer.line("}")

    def _input(self, item: GraphInput, node: fx.Node) -> str:
        layout = meta.layout(node)
        whole = layout.shape if layout is not None else item.spec.shape
        path = as_tuple(item.path)
        arguments = [path, as_tuple(whole), str(item.spec.dtype)]
        if not self.text.is_batched(item):
            arguments.append("batched=False")
        if layout is not None and not layout.is_whole:
            assert self.text.tile is not None
            arguments.append(f"box={as_tuple(layout.boxes[self.text.tile])}")
        return f"Input({', '.join(arguments)})"


def box_constants(values: Sequence[Box]) -> str:
    """Return boxes as text, short where they are all the same, or rows of a grid."""
    axes = [tuple(dict.fromkeys(axis)) for axis in zip(*values, strict=True)]
    if len(values) > 1 and len(set(values)) == 1:
        return f"({as_tuple(values[0])},) * {len(values)}"
    if len(values) > 1 and tuple(product(*axes)) == tuple(values):
        shown = [str(axis[0]) if len(axis) == 1 else str([*axis]) for axis in axes]
        return f"tile_boxes({', '.join(shown)})"
    return as_tuple(values)


def _rest(exchange: Exchange) -> list[str]:
    """Return the arguments of an exchange that are seldom there."""
    rest = [f"fill={literal(exchange.fill)}"] if exchange.fill else []
    rest += [f"owned={box_constants(exchange.owned)}"] if exchange.owned else []
    return rest + (["wraps=True"] if exchange.wraps else [])
