"""What a generated rank file and its main program need; nothing of the compiler."""

from gemsc.runtime.message import Input, Message, Value
from gemsc.runtime.offload import offloaded
from gemsc.runtime.recompute import recompute
from gemsc.runtime.user_objects import user_object
from gemsc.runtime.worker import Worker

__all__ = [
    "Input",
    "Message",
    "Value",
    "Worker",
    "offloaded",
    "recompute",
    "user_object",
]
