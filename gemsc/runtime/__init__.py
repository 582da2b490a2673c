"""What a generated rank file and its main program need; nothing of the compiler.

Loaded when first used: what only starts ranks does without PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemsc.base import loads

if TYPE_CHECKING:
    from gemsc.base.boxes import tile_boxes as tile_boxes
    from gemsc.base.nests import named_output as named_output
    from gemsc.base.parts import Part as Part
    from gemsc.messages.exchange import Exchange as Exchange
    from gemsc.messages.grid_message import GridMessage as GridMessage
    from gemsc.messages.grid_message import TileValue as TileValue
    from gemsc.messages.message import Input as Input
    from gemsc.messages.message import Message as Message
    from gemsc.messages.message import Tiles as Tiles
    from gemsc.messages.message import Value as Value
    from gemsc.runtime.data.tiled import TiledDataset as TiledDataset
    from gemsc.runtime.memory.offload import offloaded as offloaded
    from gemsc.runtime.memory.once import once as once
    from gemsc.runtime.memory.recomputation import recompute as recompute
    from gemsc.runtime.tiles.grid import Grid as Grid
    from gemsc.runtime.tiles.windows import AxisWindows as AxisWindows
    from gemsc.runtime.tiles.windows import Resize as Resize
    from gemsc.runtime.training.train import main as main
    from gemsc.runtime.worker.program import RankProgram as RankProgram
    from gemsc.runtime.worker.program import Run as Run
    from gemsc.runtime.worker.program import user_module as user_module
    from gemsc.runtime.worker.program import user_object as user_object
    from gemsc.runtime.worker.worker import Worker as Worker

_MODULES = {
    "base.boxes": ("tile_boxes",),
    "base.nests": ("named_output",),
    "base.parts": ("Part",),
    "messages.exchange": ("Exchange",),
    "messages.grid_message": ("GridMessage", "TileValue"),
    "messages.message": ("Input", "Message", "Tiles", "Value"),
    "runtime.data.tiled": ("TiledDataset",),
    "runtime.memory.offload": ("offloaded",),
    "runtime.memory.once": ("once",),
    "runtime.memory.recomputation": ("recompute",),
    "runtime.tiles.grid": ("Grid",),
    "runtime.tiles.windows": ("AxisWindows", "Resize"),
    "runtime.training.train": ("main",),
    "runtime.worker.program": ("RankProgram", "Run", "user_module", "user_object"),
    "runtime.worker.worker": ("Worker",),
}
__all__, __getattr__ = loads(__name__, _MODULES)
