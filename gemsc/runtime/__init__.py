"""What a generated rank file and its main program need; nothing of the compiler.

Loaded when first used: what only starts ranks does without PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemsc.base import loads

if TYPE_CHECKING:
    from gemsc.base.boxes import tile_boxes
    from gemsc.base.nests import named_output
    from gemsc.base.parts import Part
    from gemsc.messages.exchange import Exchange
    from gemsc.messages.grid_message import GridMessage, TileValue
    from gemsc.messages.message import Input, Message, Tiles, Value
    from gemsc.runtime.data.tiled import TiledDataset
    from gemsc.runtime.memory.offload import offloaded
    from gemsc.runtime.memory.once import once
    from gemsc.runtime.memory.recomputation import recompute
    from gemsc.runtime.tiles.grid import Grid
    from gemsc.runtime.tiles.windows import AxisWindows, Resize
    from gemsc.runtime.training.train import main
    from gemsc.runtime.worker.program import RankProgram, Run, user_module, user_object
    from gemsc.runtime.worker.worker import Worker

__all__ = [
    "AxisWindows",
    "Exchange",
    "Grid",
    "GridMessage",
    "Input",
    "Message",
    "Part",
    "RankProgram",
    "Resize",
    "Run",
    "TileValue",
    "TiledDataset",
    "Tiles",
    "Value",
    "Worker",
    "main",
    "named_output",
    "offloaded",
    "once",
    "recompute",
    "tile_boxes",
    "user_module",
    "user_object",
]

__getattr__ = loads(
    __name__,
    {
        "AxisWindows": "gemsc.runtime.tiles.windows",
        "Exchange": "gemsc.messages.exchange",
        "Grid": "gemsc.runtime.tiles.grid",
        "GridMessage": "gemsc.messages.grid_message",
        "Input": "gemsc.messages.message",
        "Message": "gemsc.messages.message",
        "Part": "gemsc.base.parts",
        "RankProgram": "gemsc.runtime.worker.program",
        "Resize": "gemsc.runtime.tiles.windows",
        "Run": "gemsc.runtime.worker.program",
        "TileValue": "gemsc.messages.grid_message",
        "TiledDataset": "gemsc.runtime.data.tiled",
        "Tiles": "gemsc.messages.message",
        "Value": "gemsc.messages.message",
        "Worker": "gemsc.runtime.worker.worker",
        "main": "gemsc.runtime.training.train",
        "named_output": "gemsc.base.nests",
        "offloaded": "gemsc.runtime.memory.offload",
        "once": "gemsc.runtime.memory.once",
        "recompute": "gemsc.runtime.memory.recomputation",
        "tile_boxes": "gemsc.base.boxes",
        "user_module": "gemsc.runtime.worker.program",
        "user_object": "gemsc.runtime.worker.program",
    },
)
