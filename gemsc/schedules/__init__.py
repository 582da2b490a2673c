"""Schedules: which rank does what, when; `SCHEDULES` maps a name to its policy."""

from gemsc.base.cost import Edge, StageCost
from gemsc.schedules.action import (
    Action,
    Kind,
    Task,
    Timed,
    Timeline,
)
from gemsc.schedules.clock import replay
from gemsc.schedules.deferral import split_last_backwards
from gemsc.schedules.engine import Policy, run
from gemsc.schedules.held import Held, held_bytes
from gemsc.schedules.policies import (
    BASIC,
    BIDIRECTIONAL,
    CHIMERA,
    GPIPE,
    INTERLEAVED,
    MASTER,
    ONE_FORWARD_ONE_BACKWARD,
    ZB_H1,
    Schedule,
    place,
)

__all__ = [
    "SCHEDULES",
    "Action",
    "Edge",
    "Held",
    "Kind",
    "Policy",
    "Schedule",
    "StageCost",
    "Task",
    "Timed",
    "Timeline",
    "held_bytes",
    "place",
    "replay",
    "run",
    "split_last_backwards",
]

SCHEDULES: dict[str, Schedule] = {
    "basic": Schedule(
        policy=BASIC,
        description="one micro-batch at a time through all stages",
    ),
    "gpipe": Schedule(
        policy=GPIPE,
        description="all forwards, then all backwards",
    ),
    "1f1b": Schedule(
        policy=ONE_FORWARD_ONE_BACKWARD,
        description="backwards as soon as possible: as fast as gpipe, less memory",
    ),
    "interleaved": Schedule(
        policy=INTERLEAVED,
        description="several stages on each rank: less idle time, more messages",
        placement="looped",
    ),
    "mast": Schedule(
        policy=MASTER,
        description="two mirrored replicas take turns, in the memory of one run",
        placement="mirrored",
        num_replicas=2,
    ),
    "master": Schedule(
        policy=MASTER,
        description="several such pairs of runs, whose gradients accumulate",
        placement="mirrored",
        num_replicas=2,
    ),
    "bidirectional": Schedule(
        policy=BIDIRECTIONAL,
        description="one run of each mirrored replica at once: two in the time of one",
        placement="mirrored",
        num_replicas=2,
    ),
    "chimera": Schedule(
        policy=CHIMERA,
        description="both directions at once, several micro-batches in flight",
        placement="mirrored",
        num_replicas=2,
    ),
    "zb-h1": Schedule(
        policy=ZB_H1,
        description="1f1b with deferred weight gradients, which fill idle time",
    ),
}
