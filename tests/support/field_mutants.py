"""Programs that compute something else: changes of one line of what was compiled.

Each would train a model to another result, and most would train it well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from parity_support import options

__all__ = ["MUTANTS", "PROGRAMS", "Mutant", "Place"]

Place = tuple[str, int]  # a rank's file, and a line of it

# networks and plans by a short name
PROGRAMS = {
    "pipeline": ("mlp", options(ranks=2, micro_batches=2)),
    "split backward": ("mlp", options(ranks=2, micro_batches=4, schedule="zb-h1")),
    "mirror": ("mlp", options(ranks=2, micro_batches=2, schedule="mast")),
    "replicas": ("mlp", options(ranks=8, micro_batches=2, data=2)),
    "norms": ("densecnn", options(ranks=4, micro_batches=2, data=2)),
    "mirrored norms": ("densecnn", options(ranks=2, micro_batches=2, schedule="mast")),
    "offload": ("mlp", options(ranks=1, micro_batches=2, offload=("all",))),
    "offloaded weights": (
        "gpt dropout",
        options(ranks=1, micro_batches=2, offload=("all",)),
    ),
    "recompute": ("densecnn", options(ranks=1, micro_batches=2, recompute=("all",))),
    "skips": ("densecnn", options(ranks=2, micro_batches=2, schedule="1f1b")),
    "shared": ("siamese", options(ranks=2, micro_batches=2)),
    "tiles": ("tiled", options(ranks=2, tiles="2x1", micro_batches=2)),
    "grid": ("tiled", options(ranks=4, tiles="2x2", micro_batches=1)),
    "shards": ("words smoothed", options(ranks=2, shards=2)),
    "heads": (
        "gpt dropout",
        options(ranks=2, shards=2, micro_batches=2, trunk="sequence"),
    ),
    "images": ("vit", options(ranks=2, shards=2, micro_batches=2)),
    "branches": ("joins", options(ranks=2, branches=2)),
}


@dataclass(frozen=True)
class Mutant:
    """A text to replace, wherever it stands, in the files of one rank or of all."""

    name: str
    program: str
    old: str
    new: str
    rank: int | None = None
    error: str = ""  # of a program that does not come to its end
    place: str = ""  # what is named where the changed line is not one of forward
    is_named: bool = True  # not where what is wrong first is right somewhere else

    def change(self, directory: Path) -> list[Place]:
        """Change a written program; return the lines that say something else now."""
        number = "*" if self.rank is None else self.rank
        places = []
        for path in sorted(directory.glob(f"rank{number}.py")):
            first, *others = path.read_text().split(self.old)
            line = 1
            for before, after in zip([first, *others], others, strict=False):
                line += before.count("\n")
                places += [(path.name, line + n) for n in range(self._height)]
                line += self.new.count("\n")
                assert after is not None
            path.write_text(self.new.join([first, *others]))
        return places

    @property
    def _height(self) -> int:
        return max(len(self.new.splitlines()), 1)

    def named_right(self, why: str, directory: Path, places: list[Place]) -> bool:
        """Whether a report names what was changed.

        That is a statement of forward that was changed, or that computes with what was
        (a layer, an exchange), or one of the two after it: there a value is wrong first
        where the ones before are other right ones, or wait for a sum. A sum over ranks
        is wrong on all of them.
        """
        if self.error or self.place:
            return re.search(self.error or self.place, why) is not None
        texts = {path.name: path.read_text() for path in directory.glob("rank*.py")}
        lines = {name: ["", *text.splitlines()] for name, text in texts.items()}
        named = re.findall(r"(rank\d+.py):(\d+)", why)
        right = {
            lines[file][wrong]
            for file, line in places
            for wrong in _wrong(texts[file], line)
        }
        return any(lines[file][int(line)] in right for file, line in named)


def _wrong(text: str, line: int) -> Iterator[int]:
    """Yield the lines of forward whose value a changed line makes wrong."""
    tree = ast.parse(text)
    of_forward: list[ast.stmt] = []
    others = [*tree.body]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            (of_forward if node.name == "forward" else others).extend(node.body)
    changed = [s for s in of_forward if _holds(s, line)]
    for definition in others:
        if isinstance(definition, ast.Assign) and _holds(definition, line):
            name = re.escape(ast.unparse(definition.targets[0]))
            uses = re.compile(rf"(?<![\w.]){name}(?!\w)")
            changed += [s for s in of_forward if uses.search(ast.unparse(s))]
    for statement in changed:
        first = of_forward.index(statement)
        for wrong in of_forward[first : first + 3]:
            yield from range(wrong.lineno, (wrong.end_lineno or wrong.lineno) + 1)


def _holds(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or 0)


MUTANTS = (
    # ------------------------------------------------------------ stages
    Mutant(
        "a layer is skipped",
        "pipeline",
        'self.hidden["4"](self.hidden["3"](hidden))',
        'self.hidden["3"](hidden)',
    ),
    Mutant(
        "an activation is skipped",
        "pipeline",
        'self.hidden["9"](hidden)',
        "hidden",
        is_named=False,
    ),
    Mutant(
        "an activation is another",
        "pipeline",
        'self.hidden["5"] = nn.ReLU()',
        'self.hidden["5"] = nn.GELU()',
    ),
    Mutant(
        "an activation is nearly the same",
        "pipeline",
        'self.hidden["5"] = nn.ReLU()',
        'self.hidden["5"] = nn.LeakyReLU(1e-6)',
    ),
    Mutant(
        "two layers change places",
        "pipeline",
        'hidden = self.hidden["5"](self.hidden["4"](self.hidden["3"](hidden)))\n'
        '        hidden = self.hidden["8"](self.hidden["7"](self.hidden["6"](hidden)))',
        'hidden = self.hidden["8"](self.hidden["7"](self.hidden["3"](hidden)))\n'
        '        hidden = self.hidden["5"](self.hidden["4"](self.hidden["6"](hidden)))',
    ),
    Mutant(
        "a weight is transposed",
        "pipeline",
        'self.hidden["2"](self.hidden["1"](self.hidden["0"](x)))',
        'nn.functional.linear(self.hidden["1"](self.hidden["0"](x)), '
        'self.hidden["2"].weight.T, self.hidden["2"].bias)',
        0,
    ),
    Mutant(
        "a bias is left out",
        "pipeline",
        "head = self.head(hidden)",
        "head = F.linear(hidden, self.head.weight)",
    ),
    Mutant(
        "a gradient is left out",
        "pipeline",
        "return hidden",
        "return hidden.detach().requires_grad_()",
        0,
        place=r"backward: hidden\.8\.weight \(rank0",
    ),
    Mutant(
        "the gradient of one layer is left out",
        "pipeline",
        "head = self.head(hidden)",
        "head = F.linear(hidden, self.head.weight.detach(), self.head.bias)",
    ),
    Mutant(
        "the gradient of a path is left out",
        "skips",
        "cat = torch.cat([features, layers, layers_2], dim=1)",
        "cat = torch.cat([features.detach(), layers, layers_2], dim=1)",
        place=r"backward: features\.4\.2\.weight \(rank1",
    ),
    Mutant(
        "the loss is scaled",
        "pipeline",
        "loss = F.cross_entropy(head, target)",
        "loss = F.cross_entropy(head, target) * 2",
    ),
    Mutant(
        "a gradient is scaled",
        "pipeline",
        "None, worker.loss_gradient)",
        "None, worker.loss_gradient / 2)",
        place=r"backward: head\.weight \(rank1",
    ),
    Mutant(
        "what is sent back is scaled",
        "pipeline",
        "worker.backward(STAGE0, m, grad_hidden)",
        "worker.backward(STAGE0, m, grad_hidden * 2)",
        place=r"backward: hidden\.8\.weight \(rank0",
    ),
    Mutant(
        "the loss is a sum",
        "pipeline",
        "F.cross_entropy(head, target)",
        'F.cross_entropy(head, target, reduction="sum")',
    ),
    Mutant(
        "labels are smoothed",
        "pipeline",
        "F.cross_entropy(head, target)",
        "F.cross_entropy(head, target, label_smoothing=1e-6)",
    ),
    Mutant(
        "the targets of another micro-batch",
        "pipeline",
        'worker.input("target", m)',
        'worker.input("target", 1 - m)',
    ),
    Mutant(
        "the inputs of another micro-batch",
        "pipeline",
        'worker.input("x", m)',
        'worker.input("x", 1 - m)',
        is_named=False,
    ),
    Mutant(
        "the inputs of one micro-batch alone",
        "pipeline",
        'worker.input("x", m)',
        'worker.input("x", 0)',
        is_named=False,
    ),
    Mutant(
        "another input",
        "skips",
        "cat = torch.cat([features, layers, layers_2, layers_3], dim=1)",
        "cat = torch.cat([features, layers, layers_2, layers_2], dim=1)",
    ),
    Mutant(
        "another order",
        "skips",
        "cat = torch.cat([features, layers, layers_2, layers_3], dim=1)",
        "cat = torch.cat([features, layers, layers_3, layers_2], dim=1)",
    ),
    Mutant(
        "another epsilon",
        "skips",
        'self.features["1"].layers["1"]["0"] = nn.BatchNorm2d(12)',
        'self.features["1"].layers["1"]["0"] = nn.BatchNorm2d(12, eps=1.1e-5)',
    ),
    Mutant(
        "another momentum",
        "skips",
        'self.features["1"].layers["1"]["0"] = nn.BatchNorm2d(12)',
        'self.features["1"].layers["1"]["0"] = nn.BatchNorm2d(12, momentum=0.2)',
    ),
    Mutant(
        "a pool of another kind",
        "skips",
        "nn.AvgPool2d(2)",
        "nn.MaxPool2d(2)",
    ),
    Mutant(
        "padding of another kind",
        "skips",
        "12, 4, kernel_size=3, padding=1, bias=False",
        '12, 4, kernel_size=3, padding=1, bias=False, padding_mode="reflect"',
    ),
    Mutant(
        "another half of the pairs",
        "shared",
        "pairs[:, 0]",
        "pairs[:, 1]",
        is_named=False,
    ),
    Mutant(
        "another result in evaluation",
        "pipeline",
        "    worker.add_result(m, loss, head)\n",
        "    worker.add_result(m, loss, head.relu())\n",
        is_named=False,
    ),
    # ------------------------------------------------------ two backwards
    Mutant(
        "weight gradients twice",
        "split backward",
        "    weights_stage0(worker, 3)\n",
        "    weights_stage0(worker, 3)\n    weights_stage0(worker, 3)\n",
        error="Run.stage=0",
        is_named=False,
    ),
    Mutant(
        "weight gradients of a micro-batch are missing",
        "split backward",
        "    weights_stage0(worker, 3)\n",
        "",
        error="weight gradients still wait",
    ),
    # --------------------------------------------------------- replicas
    Mutant(
        "no sum over replicas",
        "replicas",
        '    worker.start_reduction("stage0")\n',
        "",
        place=r"backward: hidden\.4\.weight \(rank0",
    ),
    Mutant(
        "the sum of one replica of two",
        "mirror",
        '    worker.start_reduction("stage1")\n',
        "",
        place=r"backward: head\.weight \(rank1",
    ),
    Mutant(
        "a sum that no rank adds to",
        "mirror",
        'reductions={"stage0": (0, 1), "stage1": (0, 1)}',
        'reductions={"stage0": (0, 1)}',
        error="stage1",
        is_named=False,
    ),
    Mutant(
        "the micro-batches of the other replica",
        "mirror",
        'worker.input("target", m + NUM_MICRO_BATCHES)',
        'worker.input("target", m)',
    ),
    Mutant(
        "a shared layer is not summed",
        "shared",
        '        "encoder.1.0.weight": (0, 1),\n',
        "",
        place=r"backward: encoder\.1\.0\.weight \(",
    ),
    Mutant(
        "a shared bias is not summed",
        "shared",
        '        "encoder.2.1.bias": (0, 1),\n',
        "",
        place=r"backward: encoder\.2\.1\.bias \(",
    ),
    # ------------------------------------------------------------ tiles
    Mutant(
        "a halo off by one row at one tile",
        "tiles",
        "[(-1, 5), (3, 9)]",
        "[(-1, 5), (2, 8)]",
    ),
    Mutant(
        "a halo of the row after",
        "tiles",
        "[(-1, 5), (3, 9)]",
        "[(0, 6), (4, 10)]",
        is_named=False,
    ),
    Mutant(
        "the other tile's rows",
        "tiles",
        "wanted=tile_boxes((0, 2), (0, 8), [(-1, 5), (3, 9)], (-1, 9))",
        "wanted=tile_boxes((0, 2), (0, 8), [(3, 9), (-1, 5)], (-1, 9))",
        is_named=False,
    ),
    Mutant("a halo of zeros", "tiles", "    wraps=True,\n", ""),
    Mutant(
        "a halo that wraps around",
        "tiles",
        "    owned=tile_boxes((0, 2), (0, 8), [(0, 8), (8, 16)], (0, 16)),\n",
        "    owned=tile_boxes((0, 2), (0, 8), [(0, 8), (8, 16)], (0, 16)),\n"
        "    wraps=True,\n",
    ),
    Mutant(
        "zeros on the other side",
        "tiles",
        "self.first(x)",
        "self.first(F.pad(x, (1, -1)))",
    ),
    Mutant(
        "a stale row",
        "tiles",
        "tiles.redistribute(self.grid, x, HALO_FIRST)",
        "tiles.redistribute(self.grid, x.flip(2), HALO_FIRST)",
    ),
    Mutant(
        "a mean over another number", "tiles", "keepdim=True) * 0.5", "keepdim=True)"
    ),
    Mutant(
        "a sum over tiles is missing",
        "tiles",
        "tiles.all_reduce(self.grid, x.mean",
        "(x.mean",
    ),
    Mutant(
        "a sum over tiles is taken twice",
        "tiles",
        "mean = tiles.all_reduce(self.grid, x.mean(2, keepdim=True) * 0.5)",
        "mean = tiles.all_reduce(self.grid, tiles.all_reduce(self.grid, "
        "x.mean(2, keepdim=True) * 0.5))",
    ),
    Mutant(
        "a sum without its gradient",
        "tiles",
        "mean = tiles.all_reduce(self.grid, x.mean(2, keepdim=True) * 0.5)",
        "mean = tiles.all_reduce(self.grid, x.mean(2, keepdim=True).detach() * 0.5)",
        place=r"backward: norm\.weight \(",
    ),
    Mutant(
        "a sum over other tiles",
        "grid",
        "keepdim=True) * 0.5, (1, 3))",
        "keepdim=True) * 0.5, (0, 1, 2, 3))",
        error="deadlock",
        is_named=False,
    ),
    Mutant(
        "an extreme of the tile alone",
        "tiles",
        "tiles.amax(self.grid, x,",
        "torch.amax(x,",
    ),
    Mutant(
        "a normalization of the tile alone",
        "tiles",
        "tiles.batch_norm(self.grid, self.first(x), self.norm)",
        "self.norm(self.first(x))",
    ),
    Mutant(
        "another slice of a weight",
        "tiles",
        "box=((0, 4), (0, 4), (0, 8))",
        "box=((0, 4), (4, 8), (0, 8))",
    ),
    Mutant(
        "another column of a weight",
        "grid",
        "box=((0, 4), (0, 4), (4, 8))",
        "box=((0, 4), (0, 4), (0, 4))",
        1,
    ),
    Mutant(
        "the input of another tile",
        "tiles",
        "box=((0, 2), (0, 8), (0, 9), (0, 16))",
        "box=((0, 2), (0, 8), (7, 16), (0, 16))",
        0,
        place=r"wrong value: x of rank \d",
    ),
    Mutant(
        "gradients of tiles are not summed",
        "tiles",
        '    worker.start_reduction("stage0")\n',
        "",
        place=r"backward: fc\.\w+ \(",
    ),
    # ----------------------------------------------------------- shards
    Mutant(
        "a sum of shards is missing",
        "shards",
        "    adds=True,\n",
        "",
    ),
    Mutant(
        "the samples of the other shard",
        "shards",
        "held=tile_boxes([(0, 2), (2, 4)], (0, 10), (0, 24))",
        "held=tile_boxes([(2, 4), (0, 2)], (0, 10), (0, 24))",
        is_named=False,
    ),
    Mutant(
        "the words of the other shard",
        "shards",
        "self.words.weight, (0, 19), num_words",
        "self.words.weight, (18, 37), num_words",
        0,
    ),
    Mutant(
        "the labels of the other shard",
        "shards",
        "            words=(0, 19),\n",
        "            words=(1, 20),\n",
        0,
    ),
    Mutant(
        "a count of words is wrong",
        "shards",
        "num_words=37",
        "num_words=38",
    ),
    Mutant("less smoothing", "shards", "label_smoothing=0.2", "label_smoothing=0.1"),
    Mutant(
        "a tie is lost",
        "shards",
        "        self.head.weight = self.words.weight  # tied\n",
        "",
        error="has no 'head.weight'",
    ),
    Mutant(
        "the rows of the other shard",
        "shards",
        '"head.bias": Part((37,), dim=0, outer=1, units=37, rows=(0, 19))',
        '"head.bias": Part((37,), dim=0, outer=1, units=37, rows=(18, 37))',
        0,
        error="are not all of it",
    ),
    Mutant(
        "keys and queries change places",
        "heads",
        "            transpose,\n            transpose_2,\n",
        "            transpose_2,\n            transpose,\n",
    ),
    Mutant("no causal mask", "heads", "is_causal=True", "is_causal=False"),
    Mutant(
        "the dropout of other places",
        "heads",
        "            box=((0, 4), (0, 5), (0, 24)),\n            draw=20,",
        "            box=((0, 4), (5, 10), (0, 24)),\n            draw=20,",
        0,
    ),
    Mutant(
        "the dropout of other heads",
        "heads",
        "            box=((0, 4), (0, 2), (0, 10), (0, 10)),\n            draw=16,",
        "            box=((0, 4), (2, 4), (0, 10), (0, 10)),\n            draw=16,",
        0,
    ),
    Mutant("another chance to drop", "heads", "p=0.1,", "p=0.2,", is_named=False),
    Mutant(
        "always dropped as in evaluation",
        "heads",
        "training=self.training,",
        "training=False,",
    ),
    Mutant(
        "dropped in evaluation, too",
        "heads",
        "training=self.training,",
        "training=True,",
    ),
    Mutant("another approximation", "heads", ', approximate="tanh"', ""),
    Mutant(
        "a bias on each shard",
        "heads",
        'self.blocks["0"].out.weight)\n',
        'self.blocks["0"].out.weight, self.blocks["0"].out.bias)\n',
    ),
    Mutant(
        "values and keys change places",
        "images",
        "scaled_dot_product_attention(query, key, value)",
        "scaled_dot_product_attention(query, value, key)",
    ),
    Mutant(
        "another token",
        "images",
        "getitem = x[:, 0]",
        "getitem = x[:, 1]",
        is_named=False,
    ),
    Mutant(
        "a mean of one token more", "images", "x[:, 1:].mean(1)", "x[:, 0:].mean(1)"
    ),
    # --------------------------------------------------------- branches
    Mutant(
        "the samples of the other rank",
        "branches",
        "first_2_2 = first[0:2, :]",
        "first_2_2 = first[2:4, :]",
        0,
    ),
    Mutant(
        "two branches change places",
        "branches",
        "unflatten_2, unflatten_3 = tiles.unpack(fourth",
        "unflatten_3, unflatten_2 = tiles.unpack(fourth",
        0,
    ),
    Mutant(
        "the other branch where a condition holds",
        "branches",
        "torch.where(gt, third_1, third_2)",
        "torch.where(gt, third_2, third_1)",
    ),
    Mutant(
        "a branch twice",
        "branches",
        "torch.stack([first_0, first_1, first_2_2], 1)",
        "torch.stack([first_0, first_0, first_2_2], 1)",
        0,
    ),
    Mutant(
        "the value before a block",
        "branches",
        "head = self.head(x + mixed.flatten(1))",
        "head = self.head(x + 2 * mixed.flatten(1))",
    ),
    Mutant(
        "the targets of the other rank",
        "branches",
        "shape=(4,), held=(((0, 4),),) * 2, wanted=tile_boxes([(0, 2), (2, 4)])",
        "shape=(4,), held=(((0, 4),),) * 2, wanted=tile_boxes([(2, 4), (0, 2)])",
    ),
    Mutant(
        "a gradient that is left out of a message",
        "branches",
        "tiles.pack((third,), (4, 24))",
        "tiles.pack((third.detach(),), (4, 24))",
        error="deadlock",
        is_named=False,
    ),
    Mutant(
        "the loss of the rank's samples alone",
        "branches",
        "tiles.cross_entropy(self.grid, head, target)",
        "F.cross_entropy(head, target)",
    ),
)
