"""What each operation of torch is over a finite field.

What has no rule is what torch's decompositions compose it of: norms of layers, `addmm`.
"""

from __future__ import annotations

from gemsc.verify.field import attention, functions, moves, order, pools, sums
from gemsc.verify.field.functions import BACKWARDS, FUNCTIONS
from gemsc.verify.field.moves import (
    CARRIES,
    DRAWS,
    MOVES,
    OWN_DTYPE,
    PLAIN,
    UNWRITTEN,
)
from gemsc.verify.field.order import ORDERED
from gemsc.verify.field.pools import RESIZES
from gemsc.verify.field.sums import SUMS

__all__ = [
    "BACKWARDS",
    "CARRIES",
    "DRAWS",
    "FUNCTIONS",
    "MOVES",
    "ORDERED",
    "OWN_DTYPE",
    "PLAIN",
    "RESIZES",
    "RULES",
    "SUMS",
    "UNWRITTEN",
]

RULES = {
    **moves.RULES,
    **sums.RULES,
    **functions.RULES,
    **order.RULES,
    **attention.RULES,
    **pools.RULES,
}
