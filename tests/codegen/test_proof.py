"""The proof of real programs: whatever damages a rank's file is found and named."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import networks
import pytest
from program_support import mse

from gemsc.codegen.read import read_ranks
from gemsc.compiler import CompiledProgram, compile, prove_files
from gemsc.errors import InternalError
from gemsc.planner.explain import task_of

Files = dict[str, str]
Damage = Callable[[Files], None]

# stage, the user's lines and the micro-batch
WHERE = re.compile(r"stage \d \(\w+\.py:\d+ to \w+\.py:\d+\).*micro-batch")


@cache
def compiled(name: str) -> CompiledProgram:
    unet = networks.FlatUNet(), (networks.PICTURE,)
    options: dict[str, Any] = {"micro_batches": 4, "check": False}
    pictures = {"loss": mse, "example_target": networks.PICTURE, **options}
    match name:
        case "unet":
            return compile(*unet, ranks=3, **pictures)
        case "mast":
            pictures["micro_batches"] = 2
            return compile(*unet, ranks=2, schedule=name, **pictures)
        case "interleaved":
            return compile(*unet, ranks=2, schedule=name, **pictures)
        case "tiles":
            pictures["overlap_halos"] = False
            return compile(*unet, ranks=4, tiles=("2x1",), **pictures)
    return compile(
        networks.TiedEncoder(), (networks.TOKENS,), loss=networks.cross_entropy,
        example_target=networks.TOKENS, ranks=4, schedule="zb-h1", data=2, **options,
    )  # fmt: skip


def prove(name: str, files: Files, cap: int | None = None) -> None:
    compilation = compiled(name).compilation
    task = replace(task_of(compilation.plan), memory_cap=cap)
    prove_files(files, compilation, task)


def flaw(name: str, files: Files, cap: int | None = None) -> str:
    """Return what the proof says of a program, "" if it finds nothing."""
    try:
        prove(name, files, cap)
    except InternalError as error:
        return str(error)
    return ""


def edit(rank: int, *changes: tuple[str, str], after: str = "NUM_") -> Damage:
    """Return what replaces text of a rank's file, each once, behind some other text."""

    def damage(files: Files) -> None:
        name = f"rank{rank}.py"
        head, mark, text = files[name].partition(after)
        for old, new in changes:
            assert old in text, f"{name} has no {old}"
            text = text.replace(old, new, 1)
        files[name] = head + mark + text

    return damage


def drop(rank: int, line: str, after: str = "NUM_") -> Damage:
    return edit(rank, (f"{line}\n", ""), after=after)


def double(rank: int, line: str, after: str = "NUM_") -> Damage:
    return edit(rank, (f"{line}\n", f"{line}\n{line}\n"), after=after)


def swap(rank: int, one: str, other: str, after: str = "NUM_") -> Damage:
    return edit(rank, (one, "@1"), (other, one), ("@1", other), after=after)


def steps(rank: int, *lines: str) -> Damage:
    """Return what writes another training step."""

    def damage(files: Files) -> None:
        name = f"rank{rank}.py"
        head, _, after = files[name].partition(STEP)
        _, tail, after = after.partition("\n\n\n")
        body = "".join(f"\n    {line}" for line in lines)
        files[name] = (
            f'{head}{STEP}(worker: Worker) -> None:\n    """"""{body}{tail}{after}'
        )

    return damage


def both(*damages: Damage) -> Damage:
    def damage(files: Files) -> None:
        for change in damages:
            change(files)

    return damage


STEP = "def train_step"
E2 = '"e2", (2, 8, 8, 8), torch.float32'
E3 = "E3_AND_MAX_POOL2D"
SUM = "    worker.start_reduction"
HALO = re.compile(r"tiles\.redistribute\(self\.grid, (.*), HALO_DOWN3\)")

UNET: dict[str, tuple[Damage, str]] = {  # on three ranks, a skip jumps over the second
    "a send is missing": (
        drop(0, f"    worker.send({E3}, m, e3, max_pool2d)  # to rank 1"),
        "rank 1 receives what rank 0 does not send, e3 float32[2, 8, 4, 4], max_pool2d",
    ),
    "a receive is missing": (
        drop(1, "    grad_d3 = worker.receive(D3.gradient, m)  # from rank 2"),
        "rank 1 uses 'grad_d3', which has no value yet",
    ),
    "a gradient is not received": (
        both(
            drop(0, f"    grad_e3, grad_max_pool2d = worker.receive({E3}.gradient, m)"),
            edit(0, ("grad_e3, grad_max_pool2d", "None, None")),
        ),
        "rank 1 sends what rank 0 does not receive, e3 float32[2, 8, 4, 4], max_pool2d",
    ),
    "a message is sent twice": (
        double(1, "    worker.send(D3, m, d3)  # to rank 2"),
        "rank 2 uses in another micro-batch what rank 1 sends of micro-batch 0, d3 ",
    ),
    "two values are swapped": (
        swap(
            1,
            'Value("e3", (2, 8, 4, 4), torch.float32, gradient=True)',
            'Value("max_pool2d", (2, 8, 2, 2), torch.float32, gradient=True)',
        ),
        "rank 0 sends e3 float32[2, 8, 4, 4], max_pool2d float32[2, 8, 2, 2] of networ",
    ),
    "two messages are swapped": (
        swap(0, "tag=0", "tag=2"),
        "rank 1 receives what rank 0 does not send, e3 float32",
    ),
    "micro-batches in another order": (
        edit(2, ("range(NUM_MICRO_BATCHES)", "(1, 0, 2, 3)"), after=STEP),
        "rank 2 uses in another micro-batch what rank 0 sends of micro-batch 0, e1 ",
    ),
    "another tag": (
        edit(2, ("tag=4", "tag=6")),
        "rank 1 sends what rank 2 does not receive, d3 float32[2, 8, 4, 4] of networks",
    ),
    "another shape": (
        edit(2, ("(2, 8, 16, 16)", "(2, 8, 16, 8)")),
        "but rank 2 receives e1 float32[2, 8, 16, 8], e2 float32[2, 8, 8, 8]",
    ),
    "another dtype": (
        edit(0, (E2, '"e2", (2, 8, 8, 8), torch.half')),
        "rank 0 sends e1 float32[2, 8, 16, 16], e2 float16[2, 8, 8, 8] of networks.py:",
    ),
    "another place in memory": (
        edit(0, (E2, f"{E2}, memory_format=torch.channels_last")),
        "rank 0 sends e1 float32[2, 8, 16, 16], e2 float32[2, 8, 8, 8] channels_last o",
    ),
    "a dtype that stays": (
        edit(2, (E2, f"{E2}, keeps_dtype=True")),
        "but rank 2 receives e1 float32[2, 8, 16, 16], e2 float32[2, 8, 8, 8] keeps_dt",
    ),
    "another peer": (
        edit(1, ("dest=2", "dest=0")),
        "rank 1 sends what rank 0 does not receive, d3 float32[2, 8, 4, 4] of networks",
    ),
    "an action is missing": (
        drop(1, "    backward_stage1(worker, 3)", after=STEP),
        "rank 1 leaves out an action: 1B3, stage 1",
    ),
    "an action is done twice": (
        double(1, "    forward_stage1(worker, 0)", after=STEP),
        "rank 1 does an action twice: 1F0, stage 1",
    ),
    "an action is on the wrong rank": (
        lambda files: files.update(
            {"rank1.py": files["rank1.py"].replace("Run(stage=1)", "Run(stage=2)")}
        ),
        "rank 1 does an action of rank 2: 2F0, stage 2",
    ),
    "a backward before its forward": (
        swap(2, "forward_stage2(worker, m)", "backward_stage2(worker, m)", after=STEP),
        "rank 2 does an action before its 2F0: 2B0, stage 2",
    ),
    "a micro-batch is not evaluated": (
        edit(2, ("(NUM_MICRO_BATCHES)", "(1, NUM_MICRO_BATCHES)"), after="def eval_"),
        "rank 2 leaves out an action: 2F0, stage 2",
    ),
    "ranks wait for each other": (
        steps(
            2,
            *(f"forward_stage2(worker, {m})" for m in range(4)),
            *(f"backward_stage2(worker, {m})" for m in range(4)),
            "weights_stage2(worker, 3)",
            "worker.update()",
        ),
        "ranks wait for each other (0B0 <- 2B0 <- 2F3 <- 1F3 <- 0F3): 0B0, stage 0",
    ),
    "weight gradients are deferred and left out": (
        drop(2, "    weights_stage2(worker, 3)"),
        "rank 2 leaves out an action: 2W3, stage 2",
    ),
    "weight gradients of another micro-batch are deferred": (
        edit(2, ("STAGE2: (3,)", "STAGE2: (2,)")),
        "rank 2 has an unknown action: 2W3, stage 2",
    ),
    "a call that the proof does not know": (
        edit(0, ("worker.send(", "worker.post(")),
        "rank 0 does something that the proof does not know: worker.post(",
    ),
    "a micro-batch is treated otherwise": (
        edit(
            1, ("    worker.send(D3, m, d3)", "    if m != 2: worker.send(D3, m, d3)")
        ),
        "rank 1 does in 1F2 other things than before: ",
    ),
    "a gradient too many is taken": (
        edit(
            1,
            (
                "grad_e3, grad_max_pool2d = worker.b",
                "grad_e3, grad_max_pool2d, _ = worker.b",
            ),
        ),
        "rank 1 fails with ValueError: not enough values to unpack (expected 3, got 2)",
    ),
    "a message of another micro-batch": (
        edit(1, ("worker.send(D3, m, d3)", "worker.send(D3, m + 1, d3)")),
        "rank 1 works on another micro-batch: worker.send(D3, m + 1, d3)",
    ),
}
INTERLEAVED: dict[str, tuple[Damage, str]] = {  # rank 0 hands a skip to itself
    "a value is used before it is there": (
        swap(
            0,
            "for m in range(2):\n        forward_stage0",
            "for m in range(2):\n        forward_stage2",
            after=STEP,
        ),
        "rank 0 uses a value before 0F0 computes it, e2 float32[2, 8, 8, 8] of ",
    ),
    "a value is used after it was freed": (
        steps(
            0,
            *(f"forward_stage0(worker, {m})" for m in range(4)),
            *(f"backward_stage0(worker, {m})" for m in range(4)),
            *(f"forward_stage2(worker, {m})" for m in range(4)),
            *(f"backward_stage2(worker, {m})" for m in range(4)),
            "weights_stage2(worker, 3)",
            "worker.update()",
        ),
        "rank 0 uses a value that 0B0 has freed, e2 float32[2, 8, 8, 8] of networks.py",
    ),
}
MAST: dict[str, tuple[Damage, str]] = {  # two mirrored copies add their gradients up
    "an all-reduce is missing": (
        drop(1, f'{SUM}("stage1")'),
        "rank 1 all-reduces 'stage1' 0 times: stage 1",
    ),
    "an all-reduce is there twice": (
        double(0, f'{SUM}("stage1")'),
        "rank 0 all-reduces 'stage1' 2 times: stage 1",
    ),
    "all-reduces in another order on one rank": (
        swap(0, f'{SUM}("stage1")', f'{SUM}("stage0")'),
        "wait for each other (the all-reduce of 'stage0' <- the all-reduce of 'stage1'",
    ),
    "an all-reduce over another group": (
        edit(1, ('"stage0": (0, 1)', '"stage0": (1,)')),
        "'stage0' is on ranks (0, 1), and rank 1 all-reduces it over (1,): stage 0",
    ),
    "an all-reduce comes too early": (
        both(
            drop(0, f'{SUM}("stage1")'),
            edit(0, ("    forward_stage0(", f'{SUM}("stage1")\n    forward_stage0(')),
        ),
        "rank 0 starts the all-reduce of 'stage1' before an action: 1F0', stage 1",
    ),
    "nothing waits for the all-reduces": (
        drop(1, "    worker.finish_reductions()"),
        "rank 1 does not end its step with the wait for all-reduces and the update",
    ),
}
TIED: dict[
    str, tuple[Damage, str]
] = {  # a weight of two stages; weight gradients apart
    "a tied weight has no all-reduce": (
        edit(1, (', "embedding.weight": (0, 1)', "")),
        "rank 1 all-reduces 'embedding.weight' 0 times: stage 0",
    ),
    "weight gradients before their backward": (
        swap(
            0, "backward_stage0(worker, m - 1)", "weights_stage0(worker, m - 1)", STEP
        ),
        "rank 0 does an action before its 0B0: 0W0, stage 0",
    ),
}
TILES: dict[str, tuple[Damage, str]] = {  # two tiles for the encoder
    "an exchange of one tile is missing": (
        lambda files: files.update({"rank1.py": HALO.sub(r"\1", files["rank1.py"])}),
        "in redistribute (HALO_DOWN3, networks.py:90) rank 0 sends [0:2, 0:8, 1:2, 0:4",
    ),
    "an exchange of another size": (
        edit(1, ("[(-1, 5), (3, 9)]", "[(-1, 5), (2, 9)]")),
        "the tile on rank 1 receives [0:2, 0:8, 2:4, 0:8]: 0F0, stage 0",
    ),
    "exchanges in another order": (
        swap(1, ", HALO_DOWN2)", ", HALO_DOWN3)"),
        "in redistribute (HALO_DOWN2, networks.py:89) rank 0 sends [0:2, 0:8, 3:4, 0:8",
    ),
    "an exchange with another tag": (
        edit(0, ("index=1", "index=5")),
        "rank 0 sends nothing with tag 16386, and the tile on rank 1 receives [0:2, 0:",
    ),
    "an exchange with another rank": (
        edit(1, ("ranks=(0, 1), tile=1", "ranks=(2, 1), tile=1")),
        "rank 1 is a tile of ranks (0, 1), not of (2, 1): 0F0, stage",
    ),
    "an exchange as another tile": (
        edit(1, ("tile=1", "tile=0")),
        "with tag 16386, and the tile on rank 1 receives nothing",
    ),
    "another part of a message between grids": (
        edit(1, ("[(0, 4), (4, 8)]", "[(0, 5), (5, 8)]")),
        "rank 1 sends e2 float32[2, 8, 3, 8] at [0:2, 0:8, 5:8, 0:8], e3 float32[2, 8,",
    ),
    "tiles in different orders": (
        swap(1, "backward_stage0(worker, 0)", "forward_stage0(worker, 3)", after=STEP),
        "rank 1 does 0F3 where the tile on rank 0 does an action: 0B0, stage 0",
    ),
}
DAMAGES = {
    "unet": UNET,
    "interleaved": INTERLEAVED,
    "mast": MAST,
    "tied": TIED,
    "tiles": TILES,
}


@pytest.mark.slow(3)
@pytest.mark.parametrize("name", DAMAGES)
def test_real_programs_are_proved(name: str) -> None:
    files = compiled(name).rank_modules()
    prove(name, files)
    training, evaluation = read_ranks(files)
    assert len(training) == len(evaluation) == compiled(name).plan.copy_ranks
    assert all(rank.actions for rank in training)


@pytest.mark.parametrize(
    ("name", "what"), [(name, what) for name, some in DAMAGES.items() for what in some]
)
def test_a_damaged_program_is_found(name: str, what: str) -> None:
    damage, message = DAMAGES[name][what]
    files = compiled(name).rank_modules()
    damage(files)
    error = flaw(name, files)
    lines = re.sub(r"networks.py:\d+", "networks.py:", error)
    assert re.sub(r"networks.py:\d+", "networks.py:", message) in lines
    assert WHERE.search(error)


def test_a_step_may_be_any_python() -> None:
    files = compiled("unet").rank_modules()
    steps(
        2,
        "work = [(forward_stage2, m, backward_stage2) for m in range(4)]",
        "while work:",
        "    forward, m, backward = work.pop(0)",
        "    forward(worker, m)",
        "    backward(worker, m)",
        "weights_stage2(worker, NUM_MICRO_BATCHES - 1)",
        "worker.update()",
    )(files)
    prove("unet", files)


def test_what_has_no_line_is_told_too() -> None:
    files = compiled("unet").rank_modules()
    last = "        evaluate_stage2(worker, m)\n"
    edit(2, (last, f"{last}    worker.receive(D3, 4)\n"), after="def eval_step")(files)
    says = "wrong program: rank 2 runs no stage with what it received"
    assert says in flaw("unet", files)
    assert "rank 2 fails with SyntaxError" in flaw("unet", {**files, "rank2.py": "if"})


def test_the_proof_imports_nothing_and_runs_no_stage() -> None:
    files = compiled("unet").rank_modules()
    name, start = "rank1.py", "super().__init__()"
    assert start in files[name]
    text = files[name].replace(start, f"raise ValueError; {start}")
    files[name] = text.replace("import torch\n", "import torch\nimport no_such_file\n")
    prove("unet", files)


def test_memory_over_the_cap_is_found() -> None:
    files = compiled("unet").rank_modules()
    most = max(compiled("unet").plan.peak_bytes)
    prove("unet", files, cap=most)
    error = flaw("unet", files, cap=most - 1)
    assert f"rank 0 holds {most:,} of {most - 1:,} bytes: 0B1, stage 0" in error
    assert WHERE.search(error)


TRADES = (
    "worker.receive worker.send worker.gather self.grid, worker.run worker.evaluate "
)
ENDS = (
    "worker.backward worker.weights worker.start worker.finish worker.update (worker, "
)
COUNTS = (*TRADES.split(), *ENDS.split())


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield what may be left out of a file: a loop whole if it has one line only."""
    for node in ast.walk(tree):
        for body in [getattr(node, "body", [])] if isinstance(node, ast.stmt) else []:
            alone = len(body) == 1 and isinstance(node, ast.For)
            for statement in [node] if alone else body:
                if isinstance(statement, ast.For | ast.Assign | ast.Expr):
                    yield statement


@pytest.mark.slow(1)
@pytest.mark.by_day(2)
@pytest.mark.parametrize("name", DAMAGES)
def test_nothing_that_ranks_say_can_be_left_out(name: str) -> None:
    files = compiled(name).rank_modules()
    count = 0
    for file, text in files.items():
        lines = text.split("\n")
        for node in statements(ast.parse(text)):
            if any(word in ast.unparse(node) for word in COUNTS):
                kept = [*lines[: node.lineno - 1], *lines[node.end_lineno :]]
                assert flaw(name, {**files, file: "\n".join(kept)}), ast.unparse(node)
                count += 1
    assert count > 30
