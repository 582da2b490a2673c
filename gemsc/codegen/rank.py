"""One rank's module as text: its stages, actions and training step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import fx

from gemsc.codegen.constants import Constants
from gemsc.codegen.exchanges import gathers_of
from gemsc.codegen.expressions import UserObject, structure_text
from gemsc.codegen.order import last_backwards
from gemsc.codegen.rank_text import RankText, RunText
from gemsc.codegen.stage import write_stage
from gemsc.codegen.writer import Names, Writer
from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.flow import StageFlow, base_name
from gemsc.ir.mutation import memory, mutated_state
from gemsc.ir.program import Transfer
from gemsc.messages.exchange import Exchange
from gemsc.schedules.action import Action, Kind
from gemsc.schedules.loops import Loop, Step
from gemsc.schedules.paths import skipping

FROM_RUNTIME = (
    *("AxisWindows", "Exchange", "Grid", "GridMessage", "Input", "Message"),
    *("Part", "RankProgram", "Resize", "Run", "Tiles", "TileValue", "Value", "Worker"),
    *("named_output", "offloaded", "once", "recompute", "tile_boxes", "tiles"),
    "user_module",
)
TAKEN = (
    *(*FROM_RUNTIME, "user_object", "F", "Tensor", "gemsc", "nn", "operator", "torch"),
    *("NUM_MICRO_BATCHES", "NUM_REPLICAS", "PROGRAM", "train_step", "eval_step"),
)

MICRO_BATCH = ", m: int"
VERBS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT: "weights"}


def write_rank(text: RankText) -> str:
    """Return the module's text."""
    return _RankWriter(text).write()


class _RankWriter:
    def __init__(self, text: RankText) -> None:
        self.text = text
        self.writer = Writer()
        self.taken = Names(TAKEN)
        self.constants = Constants(text, self.writer, self.taken)
        self.messages = self.constants.names
        transfers = text.program.transfers or ()
        self.skips = skipping((t.source, t.dest) for t in transfers)
        self.user_objects: dict[UserObject, str] = {}

    def write(self) -> str:
        body = self._body()
        head = Writer()
        first, *more = self.text.docstring
        for line in (f'"""{first}', "", *more, '"""', ""):
            head.line(line)
        self._write_imports(head, body)
        return head.text() + "\n" + body

    def _body(self) -> str:
        self.constants.write()
        for run in self.text.runs:
            if run.replica == 0 or not self._holds_original(run):
                write_stage(self.writer, run.stage, self.named)
        for run in self.text.runs:
            if self.text.program.loss is not None:
                self._write_forward(run)
                self._write_backward(run)
                if self.text.deferred(run):
                    about = f"Add stage {run.stage.flow.index}'s weight gradients"
                    about += " of micro-batch m."
                    with self._function(f"weights_{run.key}", about, MICRO_BATCH):
                        self._write_call(run, "weights", ())
            if run.replica == 0:
                self._write_evaluate(run)
        if self.text.program.loss is not None:
            self._write_train_step()
        self._write_eval_step()
        self.constants.write_program()
        return self.writer.text()

    def _holds_original(self, run: RunText) -> bool:
        index = run.stage.flow.index
        return any(
            other.replica == 0 and other.stage.flow.index == index
            for other in self.text.runs
        )

    # ------------------------------------------------------------ head

    def _write_imports(self, head: Writer, body: str) -> None:
        used = _names(body)
        if "operator" in used:
            head.line("import operator")
            head.line()
        head.line("import torch")
        of_torch = ", ".join(name for name in ("Tensor", "nn") if name in used)
        head.line(f"from torch import {of_torch}")
        if "F" in used:
            head.line("from torch.nn import functional as F")
        head.line()
        if "gemsc.nn" in used:
            head.line("import gemsc.nn")
        names = [name for name in FROM_RUNTIME if name in used]
        names += ["user_object"] if self.user_objects else []
        line = f"from gemsc.runtime import {', '.join(names)}"
        if len(line) <= head.room:
            head.line(line)
        else:
            head.bracketed("from gemsc.runtime import (", names, ")")
        if self.user_objects:
            head.line()
        for item, name in self.user_objects.items():
            where = f"__file__, {item.module!r}, {item.qualname!r}"
            head.statement(f"{name} = user_object({where})")

    def named(self, item: UserObject | Exchange) -> str:
        """Return the name under which the file has a constant or a user's object."""
        if isinstance(item, Exchange):
            return self.constants.exchanges[item]
        if item not in self.user_objects:
            self.user_objects[item] = self.taken.unique(item.qualname)
        return self.user_objects[item]

    # --------------------------------------------------------- actions

    @contextmanager
    def _function(self, name: str, about: str, more: str = "") -> Iterator[None]:
        with self.writer.block(f"def {name}(worker: Worker{more}) -> None:"):
            self.writer.docstring(about)
            yield
        self.writer.line()
        self.writer.line()

    def _write_forward(self, run: RunText) -> None:
        flow = run.stage.flow
        about = f"Run stage {flow.index} on micro-batch m."
        with self._function(f"forward_{run.key}", about, MICRO_BATCH):
            local = self._write_takes(run, flow)
            self._write_run(run, flow, local, "run")
            self._write_sends(run, flow, local)
            loss = self.text.program.loss
            if loss in flow.gives:
                self.writer.line(f"worker.add_loss({local[loss]})")

    def _write_takes(self, run: RunText, flow: StageFlow) -> dict[fx.Node, str]:
        names = self._local_names()
        local: dict[fx.Node, str] = {}
        for transfer in flow.incoming:
            for value in transfer.values:
                local[value] = names.unique(self.text.names[value])
                local[flow.joined.get(value, value)] = local[value]
            targets = ", ".join(local[value] for value in transfer.values)
            message = self.messages[run.replica, transfer.index]
            self.writer.statement(
                f"{targets} = worker.receive({message}, m)",
                note=f"from {self._peer(run, transfer, transfer.source)}",
            )
        for node in flow.inputs:
            local[node] = names.unique(base_name(node))
            self.writer.statement(
                f"{local[node]} = worker.input({node.name!r}, {_part(run)})"
            )
        losses = (self.text.program.loss, self.text.evaluation.loss)
        for node in flow.gives:
            wish = "loss" if node in losses else base_name(node)
            local[node] = names.unique(self.text.names.get(node, wish))
        return local

    def _local_names(self, taken: Iterable[str] = ()) -> Names:
        """Return names for the variables of a function, apart from the module's."""
        constants = (*self.messages.values(), *self.constants.runs.values())
        return Names(["worker", "m", *constants, *taken])

    def _write_run(
        self, run: RunText, flow: StageFlow, local: dict[fx.Node, str], verb: str
    ) -> None:
        inputs = [local[node] for node in flow.takes]
        self._write_call(run, verb, inputs, ", ".join(local[n] for n in flow.gives))

    def _write_call(
        self, run: RunText, verb: str, tensors: Sequence[str], targets: str = ""
    ) -> None:
        """Write `targets = worker.verb(STAGE0, m, tensors)`."""
        inside = ", ".join([self.constants.runs[run.key], "m", *tensors])
        in_parts = self.text.program.whole_stages > 0
        if in_parts and self.text.sums_of(run.stage.flow.index):
            key = self.constants.runs[run.key]
            self.writer.line(f"worker.gather_weights({key})")
        head = f"{targets} = " if targets else ""
        self.writer.statement(f"{head}worker.{verb}({inside})")

    def _write_sends(
        self, run: RunText, flow: StageFlow, local: dict[fx.Node, str]
    ) -> None:
        for transfer in flow.outgoing:
            message = self.messages[run.replica, transfer.index]
            values = [local[value] for value in transfer.values]
            peer = self._peer(run, transfer, transfer.dest)
            self._write_send(message, values, peer)

    def _write_send(self, message: str, values: Sequence[str], peer: str) -> None:
        inside = ", ".join([message, "m", *values])
        self.writer.statement(f"worker.send({inside})", f"to {peer}")

    def _peer(self, run: RunText, transfer: Transfer, stage: int) -> str:
        where = self._where(run, stage)
        if (transfer.source, transfer.dest) not in self.skips:
            return where
        jumped = transfer.dest - transfer.source - 1
        return f"{where}, a skip over {jumped} stage{'s' if jumped > 1 else ''}"

    def _where(self, run: RunText, stage: int) -> str:
        """Return which ranks a rank talks to if it talks to a stage."""
        ranks = self.text.ranks(run.replica, stage)
        if self.text.rank in ranks:
            return f"stage {stage} here"
        if len(ranks) == 1:
            return f"rank {ranks[0]}"
        placement, here = self.text.placement, run.stage.flow.index
        if placement.grid(stage) == placement.grid(here) and self.text.tile is not None:
            return f"rank {ranks[self.text.tile]}, the same {run.stage.noun}"
        return f"ranks {ranks[0]} to {ranks[-1]}"

    def _write_backward(self, run: RunText) -> None:
        flow = run.stage.flow
        about = f"Run stage {flow.index} backward on micro-batch m."
        with self._function(f"backward_{run.key}", about, MICRO_BATCH):
            names = self._local_names()
            gradients = self._write_gradient_receives(run, flow, names)
            given = [
                "worker.loss_gradient"
                if node is self.text.program.loss
                else " + ".join(gradients.get(node, [])) or "None"
                for node in flow.gives
            ]
            sent: dict[fx.Node, str] = {}
            sources = {node: value for value, node in flow.joined.items()}
            for node in flow.takes:
                value = sources.get(node, node)
                if meta.needs_gradient(value) and node not in flow.inputs:
                    sent[value] = names.unique(f"grad_{self.text.names[value]}")
            targets = ", ".join(sent.values())
            if len(sent) == 1:
                targets = f"({targets},)"
            self._write_call(run, "backward", given, targets)
            for transfer in flow.incoming:
                values = [sent[v] for v in transfer.values if v in sent]
                if values:
                    message = f"{self.messages[run.replica, transfer.index]}.gradient"
                    peer = self._peer(run, transfer, transfer.source)
                    self._write_send(message, values, peer)

    def _write_gradient_receives(
        self, run: RunText, flow: StageFlow, names: Names
    ) -> dict[fx.Node, list[str]]:
        """Receive what later stages send back; the last stage's gradient comes first.

        That is the order in which one process adds the gradients of a value that is
        used more than once.
        """
        gradients: dict[fx.Node, list[str]] = {}
        for transfer in sorted(flow.outgoing, key=lambda t: (-t.dest, t.index)):
            values = [v for v in transfer.values if meta.needs_gradient(v)]
            if not values:
                continue
            targets = []
            for value in values:
                targets.append(names.unique(f"grad_{self.text.names[value]}"))
                gradients.setdefault(value, []).append(targets[-1])
            message = f"{self.messages[run.replica, transfer.index]}.gradient"
            note = f"from {self._peer(run, transfer, transfer.dest)}"
            names_taken = ", ".join(targets)
            self.writer.statement(f"{names_taken} = worker.receive({message}, m)", note)
        return gradients

    def _write_evaluate(self, run: RunText) -> None:
        flow = run.stage.evaluation
        program = self.text.evaluation
        about = f"Run stage {flow.index} on micro-batch m, without gradients."
        with self._function(f"evaluate_{run.key}", about, MICRO_BATCH):
            local = self._write_takes(run, flow)
            verb = "evaluate_apart" if run.stage.apart else "evaluate"
            self._write_run(run, flow, local, verb)
            if flow.index == program.home:  # what tiles gather is a part of the action
                self._write_results(run, local)
            self._write_sends(run, flow, local)

    def _write_results(self, run: RunText, local: dict[fx.Node, str]) -> None:
        program = self.text.evaluation
        attributes = program.graph.find_nodes(op="get_attr")
        nodes, module = program.graph.nodes, program.module
        changed = {name for n in nodes for name in mutated_state(n, module)}
        for node in program.outputs:  # inputs that the model returns as they are
            for held in (n for n in attributes if memory(n) & memory(node)):
                if held is not node and held.target not in changed:
                    continue
                raise GemscError(
                    f"the model returns '{held.target}' itself, not a value",
                    at=meta.location(node),
                    help="return a copy: x.clone()",
                )
            if node not in local:
                local[node] = f"worker.input({node.name!r}, m)"
        names = self._local_names(local.values())
        for node, exchange in gathers_of(program, self.text.tile).items():
            name = names.unique(f"whole_{base_name(node)}")
            constant = self.constants.exchanges[exchange]
            self.writer.statement(
                f"{name} = worker.gather({local[node]}, {constant})",
                note=f"from {len(exchange.held)} {run.stage.noun}s",
            )
            local[node] = name
        outputs = [local[node] for node in program.outputs]
        structure = structure_text(program.structure, outputs)
        loss = local[program.loss] if program.loss is not None else "None"
        self.writer.statement(f"worker.add_result(m, {loss}, {structure})")

    # ------------------------------------------------------------ steps

    def _write_train_step(self) -> None:
        with self._function("train_step", "Run this rank's part of one training step."):
            last = last_backwards(self.text.steps)
            for index, step in enumerate(self.text.steps):
                self._write_step(step)
                for stage in last.get(index, []):  # they begin in it: see `Departures`
                    for key in self.text.sums_of(stage):
                        self.writer.statement(f"worker.start_reduction({key!r})")
            if self.text.reductions or self.text.num_replicas > 1:
                self.writer.line("worker.finish_reductions()")
            self.writer.line("worker.update()")

    def _write_step(self, step: Step) -> None:
        if isinstance(step, Action):
            self.writer.line(f"{self._call(step)}(worker, {step.micro_batch})")
            return
        assert isinstance(step, Loop)
        with self.writer.block(_loop_head(step, self.text.num_micro_batches)):
            for action, offset in step.body:
                later = f" {'+' if offset > 0 else '-'} {abs(offset)}" if offset else ""
                self.writer.line(f"{self._call(action)}(worker, m{later})")

    def _call(self, action: Action) -> str:
        for run in self.text.runs:
            here = (run.replica, run.stage.flow.index)
            if here == (action.replica, action.stage):
                return f"{VERBS[action.kind]}_{run.key}"
        raise AssertionError(f"{action} is not on rank {self.text.rank}")

    def _write_eval_step(self) -> None:
        about = "Run this rank's part of one evaluation step."
        with self._function("eval_step", about):
            count = "NUM_MICRO_BATCHES"
            if self.text.num_replicas > 1:
                count += " * NUM_REPLICAS"
            with self.writer.block(f"for m in range({count}):"):
                for run in self.text.runs:
                    if run.replica == 0:
                        self.writer.line(f"evaluate_{run.key}(worker, m)")


def _part(run: RunText) -> str:
    """Return which part of the batch a run takes as its micro-batch m."""
    return "m + NUM_MICRO_BATCHES" if run.replica else "m"


def _loop_head(loop: Loop, count: int) -> str:
    def show(bound: int) -> str:
        below = count - bound
        if bound == count:
            return "NUM_MICRO_BATCHES"
        if bound > count // 2 and below > 0:
            return f"NUM_MICRO_BATCHES - {below}"
        return str(bound)

    start, stop = show(loop.first), show(loop.last_exclusive)
    bounds = stop if loop.first == 0 else f"{start}, {stop}"
    if loop.step != 1:
        bounds = f"{start}, {stop}, {loop.step}"
    return f"for m in range({bounds}):"


def _names(body: str) -> set[str]:
    """Return the names in code outside comments, both with what follows a dot and not.

    Of `y = gemsc.nn.Norm(x)  # text` these are `y`, `gemsc`, `gemsc.nn` and `x`.
    """
    code = "\n".join(
        line.split("  #")[0] for line in body.splitlines() if line.strip()[:2] != "# "
    )
    pairs = re.findall(r"(?<![\w.])((\w+)(?:\.\w+)?)", code)
    return {name for pair in pairs for name in pair}
