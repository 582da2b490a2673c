"""Compile networks that others wrote for 3 ranks, and compare a step with one process.

python benchmarks/models.py [--only monai,timm/levit] [--no-tiles] [--limit 600]
                            [--shards 2] [--trunk whole]

Packages that are not installed are named and left out. Weights are random, inputs
small. Each network is compiled in a process of its own, for 3 ranks and 2
micro-batches; one training step on threads, in float64 and in float32, is compared with
one process over the same micro-batches: loss, gradients, parameters and buffers. Then
the same for images split into 2 x 2 tiles, in float64, and with `--shards` for one
stage whose heads, channels and words are split. Both draw the same numbers.

A row gives the nodes of the graph, the seconds to compile it, the worst relative error
in both dtypes ("same bits" if there is none; "as 1" if each tensor is as close as
rounding in one process lets it be, "?" if rounding there is too large to decide; "1
fails" if one process cannot run in float64), the error on tiles and on shards, and how
often a value split into tiles had to be gathered.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from hugging_face import HUGGING_FACE
from third_party import VISION, Network
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import gemsc
from gemsc.base.rng import same_draws
from gemsc.codegen.package import write_directory
from gemsc.compiler import CompiledProgram
from gemsc.errors import GemscError
from gemsc.runtime.training.verification import record_steps
from gemsc.runtime.transport.local import run_local
from gemsc.runtime.transport.transport import Transport
from gemsc.verify.compare import TOLERANCE, compare, read_record
from gemsc.verify.one_process import reference_steps

RANKS = 3
MICRO_BATCHES = 2
SAMPLES = 2  # of one micro-batch
WIDTHS = (34, 7, 7, 11, 11, 11, 11, 8)
KINDS = ("float64", "float32", "tiles", "shards")


@dataclass
class Row:
    """What was found out about one network; cells of what was not done are empty."""

    nodes: str = ""
    seconds: str = ""
    errors: dict[str, str] = field(default_factory=dict)
    gathers: str = ""
    problems: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """What is tried besides a pipeline; 0 shards: none."""

    tiles: bool
    shards: int
    trunk: str

    def splits(self, network: Network) -> Iterator[tuple[str, int, dict[str, str]]]:
        """Yield what it is called, the ranks and the options of each compilation."""
        if self.tiles and network.tiles:
            yield "tiles", RANKS + 1, {"tiles": network.tiles}
        if self.shards:
            options = {"shards": str(self.shards), "trunk": self.trunk}
            yield "shards", self.shards, options


@dataclass(frozen=True)
class Subject:
    """A network with a batch, and the loss: the mean distance from random targets."""

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    batch: tuple[Any, Any]

    @property
    def example(self) -> tuple[Any, Any]:
        """The inputs and targets of one micro-batch."""
        samples: tuple[Any, Any] = pytree.tree_map(_first_samples, self.batch)
        return samples


def _first_samples(leaf: Any) -> Any:
    cut = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == _BATCH
    return leaf[:SAMPLES] if cut else leaf


_BATCH = SAMPLES * MICRO_BATCHES


def subject(network: Network) -> Subject:
    """Build a network; run a copy of it once for the shapes of its outputs."""
    torch.manual_seed(0)
    model = network.make().train()
    inputs = network.inputs(_BATCH)
    run = copy.deepcopy(model)
    with torch.no_grad():
        output = run(**inputs) if isinstance(inputs, dict) else run(*inputs)
    shapes = [tensor.shape for tensor in _floats(network.part(output))]
    wanted = [torch.randn(s) if s[:1] == (_BATCH,) else torch.zeros(()) for s in shapes]

    def loss(output: Any, target: Any) -> Tensor:
        outputs = _floats(network.part(output))  # fewer in evaluation, sometimes
        pairs = zip(outputs, target, strict=False)
        return sum(((have - want).square().mean() for have, want in pairs), _ZERO)

    return Subject(model, loss, (inputs, tuple(wanted)))


_ZERO: Any = 0


def _floats(output: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(output)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def compiled(given: Subject, **options: Any) -> CompiledProgram:
    """Compile for the first micro-batch."""
    inputs, target = given.example
    return gemsc.compile(
        given.model,
        inputs,
        loss=given.loss,
        example_target=target,
        micro_batches=MICRO_BATCHES,
        **options,
    )


def error_of(
    program: CompiledProgram, given: Subject, ranks: int, dtype: torch.dtype
) -> str:
    """Return how far a step of the ranks is from that of one process."""
    try:
        expected = _one_process(given, dtype)
    except RuntimeError:  # a cast to float32 before float64 parameters, for instance
        return "1 fails"
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        write_directory(program.compilation, folder)
        torch.set_default_dtype(dtype)

        def train(transport: Transport) -> None:
            with same_draws():
                record_steps(
                    folder, transport, folder, [given.batch], dtype, measure=False
                )

        run_local(ranks, train, timeout=3600)
        actual = read_record(folder, ranks)
    comparison = compare(actual, expected)
    if comparison.worst <= TOLERANCE[dtype]:
        same = comparison.equal == comparison.total
        return "same bits" if same else f"{comparison.worst:.0e}"
    if dtype is torch.float32:
        exact = _one_process(given, torch.float64)
        comparison = replace(comparison, rounding=compare(expected, exact).errors)
    kind, name = comparison.judge(dtype)
    if kind == "wrong":
        return f"NO {comparison.errors[name]:.0e} {name}"
    return f"{comparison.worst:.0e} {'as 1' if kind == 'exact' else '?'}"


def _one_process(given: Subject, dtype: torch.dtype) -> Any:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with same_draws():
            return reference_steps(
                given.model, given.loss, [given.batch], MICRO_BATCHES, dtype
            )
    finally:
        torch.set_default_dtype(default)


def examine(network: Network, wanted: Wanted, pipe: Connection) -> None:
    """Find out all about a network; the row so far is sent after each step."""
    row = Row()

    def attempt(what: str, work: Callable[[], object]) -> None:
        row.problems[what] = "no end before the limit"
        pipe.send(row)
        try:
            work()
            del row.problems[what]
        except Exception as error:
            row.problems[what] = _problem(error)
        finally:
            torch.set_default_dtype(torch.float32)
        pipe.send(row)

    def pipeline() -> None:
        given = subject(network)
        started = time.perf_counter()
        program = compiled(given, ranks=RANKS)
        row.seconds = f"{time.perf_counter() - started:.1f}"
        row.nodes = str(len(program.compilation.program.compute_nodes))
        for name in ("float64", "float32"):
            attempt(name, partial(step, name, program, given, program.plan.ranks))

    def step(what: str, program: CompiledProgram, given: Subject, ranks: int) -> None:
        dtype = torch.float32 if what == "float32" else torch.float64
        row.errors[what] = error_of(program, given, ranks, dtype)

    def split(what: str, ranks: int, **options: str) -> None:
        given = subject(network)
        program = compiled(given, ranks=ranks, **options)
        if what == "tiles":
            row.gathers = str(len(program.plan.barriers))
        step(what, program, given, ranks)

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    attempt("compile", pipeline)
    for what, ranks, options in wanted.splits(network):
        if "compile" not in row.problems:
            attempt(what, partial(split, what, ranks, **options))
    pipe.close()


def _problem(error: BaseException) -> str:
    where = ""
    if isinstance(error, GemscError) and error.at is not None:
        where = f"{Path(error.at.file).name}:{error.at.line}: "
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {where}{text}"


def in_a_process(network: Network, wanted: Wanted, limit: float) -> Row:
    """Examine a network in a fork of this process, for `limit` seconds at most."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=examine, args=(network, wanted, theirs))
    process.start()
    theirs.close()
    deadline = time.monotonic() + limit
    row = Row(problems={"start": "it ended without a word"})
    try:
        while ours.poll(max(0.0, deadline - time.monotonic())):
            row = ours.recv()
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()
    return row


def chosen_networks(only: str) -> Iterator[tuple[str, Network]]:
    """Yield what `--only` names: a package, or package/name, or its start."""
    words = [word for word in only.split(",") if word]
    for package, networks in (VISION | HUGGING_FACE).items():
        if words and not any(word.split("/")[0] == package for word in words):
            continue
        try:
            built = networks()
        except ImportError as error:
            print(f"{package} is left out: {error}", flush=True)
            continue
        for name, network in built.items():
            full = f"{package}/{name}"
            if not words or any(f"{full}/".startswith(word) for word in words):
                yield full, network


def cells(name: str, row: Row) -> str:
    """Return the line of a network, with its problems below."""
    columns = (
        name.replace("segmentation_models_pytorch", "smp").replace(
            "dynamic_network_architectures", "nnunet"
        ),
        row.nodes,
        row.seconds,
        *(row.errors.get(key, "-") for key in KINDS),
        row.gathers,
    )
    line = f"{columns[0]:<{WIDTHS[0]}}" + "".join(
        f"{text:>{width}}" for text, width in zip(columns[1:], WIDTHS[1:], strict=True)
    )
    return "\n".join([line, *(f"    {k}: {v}" for k, v in row.problems.items())])


def main() -> None:
    """Print a row for each network, and how many are exact."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="packages, or package/name")
    parser.add_argument("--no-tiles", action="store_true")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of each")
    parser.add_argument("--shards", type=int, default=0, help="of one stage")
    parser.add_argument("--trunk", default="auto")
    chosen = parser.parse_args()
    wanted = Wanted(not chosen.no_tiles, chosen.shards, chosen.trunk)
    titles = ("model", "nodes", "s", *KINDS, "gathers")
    first, *tail = zip(titles, WIDTHS, strict=True)
    print(f"{first[0]:<{first[1]}}" + "".join(f"{t:>{w}}" for t, w in tail), flush=True)
    rows = []
    for name, network in chosen_networks(chosen.only):
        row = in_a_process(network, wanted, chosen.limit)
        rows.append(row)
        print(cells(name, row), flush=True)
    for key in ("float64", "tiles", "shards"):
        tried = [r for r in rows if key in r.errors or key in r.problems]
        exact = [r for r in rows if r.errors.get(key, "NO")[:2] not in ("NO", "1 ")]
        print(f"{key}: {len(exact)} of {len(tried)} exact, {len(rows)} networks")


if __name__ == "__main__":
    sys.exit(main())
