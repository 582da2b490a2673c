"""What a generated rank file and its main program need; nothing of the compiler.

Loaded when first used: what only starts ranks does without PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemsc.lazy import loads

if TYPE_CHECKING:
    from gemsc.boxes import tile_boxes
    from gemsc.runtime.grid import AxisWindows, Exchange, Grid, Resize
    from gemsc.runtime.grid_message import GridMessage, TileValue
    from gemsc.runtime.message import Input, Message, Tiles, Value
    from gemsc.runtime.offload import offloaded
    from gemsc.runtime.recomputation import recompute
    from gemsc.runtime.user_objects import user_module, user_object
    from gemsc.runtime.worker import Worker

__all__ = [
    "AxisWindows",
    "Exchange",
    "Grid",
    "GridMessage",
    "Input",
    "Message",
    "Resize",
    "TileValue",
    "Tiles",
    "Value",
    "Worker",
    "offloaded",
    "recompute",
    "tile_boxes",
    "user_module",
    "user_object",
]

__getattr__ = loads(
    __name__,
    {
        "AxisWindows": "gemsc.runtime.grid",
        "Exchange": "gemsc.runtime.grid",
        "Grid": "gemsc.runtime.grid",
        "GridMessage": "gemsc.runtime.grid_message",
        "Input": "gemsc.runtime.message",
        "Message": "gemsc.runtime.message",
        "Resize": "gemsc.runtime.grid",
        "TileValue": "gemsc.runtime.grid_message",
        "Tiles": "gemsc.runtime.message",
        "Value": "gemsc.runtime.message",
        "Worker": "gemsc.runtime.worker",
        "offloaded": "gemsc.runtime.offload",
        "recompute": "gemsc.runtime.recomputation",
        "tile_boxes": "gemsc.boxes",
        "user_module": "gemsc.runtime.user_objects",
        "user_object": "gemsc.runtime.user_objects",
    },
)
