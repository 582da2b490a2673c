"""Pictures seen through a grid, and put together from patches."""

from __future__ import annotations

from collections.abc import Mapping

from gemsc.importers.onnx.node import Node, Operator
from gemsc.importers.sheet import Symbol

_MODES = {"linear": "bilinear", "cubic": "bicubic"}


def _grid_sample(node: Node) -> Symbol:
    x = node.value(0)
    mode = node.attribute("mode", "bilinear")
    mode = _MODES.get(mode, mode)
    padding = node.attribute("padding_mode", "zeros")
    if mode not in ("bilinear", "bicubic", "nearest") or (
        mode == "bicubic" and len(x.shape) != 4
    ):
        raise node.refuse(f"samples {len(x.shape) - 2} axes by {mode!r}")
    if padding not in ("zeros", "border", "reflection"):
        raise node.refuse(f"pads by {padding!r}")
    settings = f'mode="{mode}", padding_mode="{padding}"'
    corners = bool(node.attribute("align_corners", 0))
    return node.gives(
        f"F.grid_sample({x}, {node.value(1)}, {settings}, align_corners={corners})"
    )


def _affine_grid(node: Node) -> Symbol:
    theta = node.value(0)
    size = [int(n) for n in node.settings("size", 1)]
    sizes = ", ".join([f"{theta}.shape[0]", *map(str, size[1:])])
    corners = bool(node.attribute("align_corners", 0))
    return node.gives(f"F.affine_grid({theta}, ({sizes}), align_corners={corners})")


def _col_to_im(node: Node) -> Symbol:
    x = node.value(0)
    size = [int(n) for n in node.settings("image_shape", 1)]
    block = tuple(int(n) for n in node.settings("block_shape", 2))
    if len(size) != 2:
        raise node.refuse(f"puts together {len(size)} axes; PyTorch has it for 2")
    top, left, bottom, right = node.attribute("pads") or [0, 0, 0, 0]
    stride = tuple(node.attribute("strides") or (1, 1))
    dilation = tuple(node.attribute("dilations") or (1, 1))
    whole = (size[0] + top + bottom, size[1] + left + right)
    settings = f"stride={stride}, dilation={dilation}"
    text = f"F.fold({x}, {whole}, {block}, {settings})"
    if any((top, left, bottom, right)):
        rows, columns = f"{top}:{top + size[0]}", f"{left}:{left + size[1]}"
        text += f"[:, :, {rows}, {columns}]"
    return node.gives(text)


VISION: Mapping[str, Operator] = {
    "AffineGrid": _affine_grid,
    "Col2Im": _col_to_im,
    "GridSample": _grid_sample,
}
