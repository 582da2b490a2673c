"""Operations on tiles: what lowered graphs and generated stages call.

An operation that needs the other tiles takes the grid as its first argument; layers and
functions are the same operation, of parameters and settings. Each file's `__all__` is
public here.
"""

from gemsc.runtime.tiles.branches import *
from gemsc.runtime.tiles.collectives import *
from gemsc.runtime.tiles.convolution import *
from gemsc.runtime.tiles.dropout import *
from gemsc.runtime.tiles.gradients import *
from gemsc.runtime.tiles.guards import *
from gemsc.runtime.tiles.linear import *
from gemsc.runtime.tiles.losses import *
from gemsc.runtime.tiles.norms import *
from gemsc.runtime.tiles.reductions import *
from gemsc.runtime.tiles.ring import *
from gemsc.runtime.tiles.vocabulary import *
from gemsc.runtime.tiles.windows import *
