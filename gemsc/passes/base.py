"""Pass: one idea, one file, one method from Program to Program."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from gemsc.ir.program import Program


@dataclass(frozen=True)
class Pass(ABC):
    """A step of the compiler. Its fields are its options.

    `requires` and `provides` name fields of `Program` that must be there before and
    are there afterwards; the manager checks both. A pass never changes its input:
    one that rewrites the graph does so on a copy. `of_one_rank` says that it leaves out
    what other ranks compute; any other pass must lose nothing of the model.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ()
    of_one_rank: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Name a pass for people with the words of its class: `find-halos`."""
        cls.name = "-".join(re.findall("[A-Z][a-z]*", cls.__name__)).lower()

    @abstractmethod
    def apply(self, program: Program) -> Program:
        """Return the program with what this pass provides."""
