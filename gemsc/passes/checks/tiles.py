"""Check tiles: the grid must fit the images that the split stages read.

Example: `--tiles 2x2` on volumes of 64 x 64 x 64 voxels has too few numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from gemsc.errors import GemscError
from gemsc.ir import meta
from gemsc.ir.program import GraphInput, Program
from gemsc.passes.base import Pass
from gemsc.passes.spatial.inputs import images_among

AXES = ("height", "width")


@dataclass(frozen=True)
class CheckTiles(Pass):
    """Refuse grids with another number of axes than images, or with too many tiles.

    An image is an input of the model [batch, channels, axis, axis, ...], over which a
    window moves if there is any such input.
    """

    requires = ("stages", "placement")

    def apply(self, program: Program) -> Program:
        """Return the program as it is.

        Raises:
            GemscError: a grid does not fit; names the input and where it is used.
        """
        placement = program.require_placement()
        nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
        images = [
            (item, nodes[item.name])
            for item in program.inputs
            if item.path[0] == "input" and len(item.spec.shape) > 2
        ]
        known, _ = images_among([node for _, node in images], program.module)
        if known:  # else all that may be one
            images = [(item, node) for item, node in images if node in known]
        for stage in program.require_stages():
            grid = placement.grid(stage.index).tiles
            if grid:
                inside = set(stage.nodes)
                for item, node in images:
                    if inside.intersection(node.users):
                        _check(grid, item, node)
        grid = placement.grid(0).tiles
        if grid and not images:
            shapes = ", ".join(f"{i.name}: {i.spec}" for i in program.inputs)
            raise GemscError(
                f"--tiles {_show(grid)} splits images, but no input of the model is "
                f"an image ({shapes})",
                help="give inputs of [batch, channels, height, width], or leave out "
                "--tiles",
            )
        return program


def _check(grid: tuple[int, ...], item: GraphInput, node: fx.Node) -> None:
    at = next((meta.location(user) for user in node.users), None)
    sizes = item.spec.shape[2:]
    if len(sizes) != len(grid):
        given = _show((*grid, 1, 1)[: len(sizes)])
        raise GemscError(
            f"--tiles {_show(grid)} splits {len(grid)} axes, but input '{item.name}' "
            f"has {len(sizes)}: {item.spec}",
            at=at,
            help=f"write one number for each axis, for example --tiles {given}",
        )
    for axis, (size, count) in enumerate(zip(sizes, grid, strict=True)):
        if size < count:
            name = AXES[axis] if len(sizes) == 2 else f"axis {axis}"
            raise GemscError(
                f"--tiles {_show(grid)} cuts the {name} into {count} tiles, but input "
                f"'{item.name}' has {size} there: {item.spec}",
                at=at,
                help="use fewer tiles, or larger example_inputs()",
            )


def _show(grid: tuple[int, ...]) -> str:
    return "x".join(map(str, grid))
