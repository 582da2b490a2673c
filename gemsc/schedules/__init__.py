"""Schedules: which rank does what, when; `SCHEDULES` maps a name to its policy."""

from gemsc.base.cost import Edge as Edge
from gemsc.base.cost import StageCost as StageCost
from gemsc.schedules.action import Action as Action
from gemsc.schedules.action import Kind as Kind
from gemsc.schedules.action import Task as Task
from gemsc.schedules.action import Timed as Timed
from gemsc.schedules.action import Timeline as Timeline
from gemsc.schedules.clock import replay as replay
from gemsc.schedules.engine import Policy as Policy
from gemsc.schedules.engine import run as run
from gemsc.schedules.engine import split_last_backwards as split_last_backwards
from gemsc.schedules.held import Held as Held
from gemsc.schedules.held import held_bytes as held_bytes
from gemsc.schedules.policies import SCHEDULES as SCHEDULES
from gemsc.schedules.policies import Schedule as Schedule
from gemsc.schedules.policies import place as place
