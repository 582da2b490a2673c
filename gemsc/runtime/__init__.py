"""What a generated rank file and its main program need; nothing of the compiler."""

from gemsc.boxes import tile_boxes
from gemsc.runtime.grid import AxisWindows, Exchange, Grid, Resize
from gemsc.runtime.grid_message import GridMessage, TileValue
from gemsc.runtime.message import Input, Message, Tiles, Value
from gemsc.runtime.offload import offloaded
from gemsc.runtime.recompute import recompute
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
