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
from gemsc.schedules.engine import Policy, run, split_last_backwards
from gemsc.schedules.held import Held, held_bytes
from gemsc.schedules.policies import SCHEDULES, Schedule, place

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
