"""The constants of a rank's module: what it sends, receives, reads and adds up."""

from __future__ import annotations

from torch import fx

from gemsc.codegen.expressions import as_tuple, quoted
from gemsc.codegen.rank_text import RankText, Run
from gemsc.codegen.writer import Names, Writer
from gemsc.ir import meta
from gemsc.ir.program import Transfer

__all__ = ["Constants"]


class Constants:
    """Names and writes the constants; `names` has (replica, transfer) -> message."""

    def __init__(self, text: RankText, writer: Writer, taken: Names) -> None:
        self.text = text
        self.writer = writer
        self.names: dict[tuple[int, int], str] = {}
        for run in text.runs:
            self._name_messages(run, taken)

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

    def _write_message(self, run: Run, transfer: Transfer) -> None:
        placement = self.text.program.placement
        assert placement is not None
        ranks = placement.ranks[run.replica]
        (source,), (dest,) = ranks[transfer.source], ranks[transfer.dest]
        tag = self.text.tag(run.replica, transfer.index)
        values = [self._value(value) for value in transfer.values]
        packed = f"({', '.join(values)}{',' if len(values) == 1 else ''})"
        if len(f"values={packed},") > self.writer.room - 4:
            inside = "".join(f"    {value},\n" for value in values)
            packed = f"(\n{inside})"
        name = self.names[run.replica, transfer.index]
        arguments = [f"tag={tag}", f"source={source}", f"dest={dest}"]
        self.writer.call(f"{name} = Message(", [*arguments, f"values={packed}"])

    def _value(self, value: fx.Node) -> str:
        spec = meta.spec(value)
        arguments = [
            quoted(self.text.names[value]),
            as_tuple(spec.shape),
            str(spec.dtype),
        ]
        if meta.needs_gradient(value):
            arguments.append("gradient=True")
        return f"Value({', '.join(arguments)})"

    def _write_inputs(self) -> None:
        used: dict[str, str] = {}
        specs = {item.name: item for item in self.text.program.inputs}
        specs.update({item.name: item for item in self.text.evaluation.inputs})
        for run in self.text.runs:
            for node in (*run.stage.flow.inputs, *run.stage.evaluation.inputs):
                item = specs[node.name]
                path = as_tuple(item.path)
                shape = as_tuple(item.spec.shape)
                shared = "" if self.text.is_batched(item) else ", batched=False"
                used[item.name] = f"Input({path}, {shape}, {item.spec.dtype}{shared})"
        if not used:
            self.writer.line("INPUTS: dict[str, Input] = {}")
            return
        self.writer.line("# What this rank reads of each micro-batch.")
        with self.writer.block("INPUTS = {"):
            for name, text in used.items():
                self.writer.line(f"{quoted(name)}: {text},")
        self.writer.line("}")
