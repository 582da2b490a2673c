"""Check torch.compile: each stage must be one graph, also where it runs.

Example: a module that asks for the value of a tensor is called as it is; no graph of
`torch.compile` can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gemsc.errors import GemscError
from gemsc.ir.opaque import opaques
from gemsc.ir.program import Program
from gemsc.passes.base import Pass


@dataclass(frozen=True)
class CheckTorchCompile(Pass):
    """Refuse modules whose forward depends on data.

    Options that do not go with `torch.compile` are refused with the layout of stages.
    """

    name: ClassVar[str] = "check-torch-compile"

    def apply(self, program: Program) -> Program:
        """Return the program as it is.

        Raises:
            GemscError: there is such a module; names its line.
        """
        for path, opaque in opaques(program.module).items():
            raise GemscError(
                f"--torch-compile cannot be combined with {path}, whose forward "
                "depends on data",
                at=opaque.at,
                help=f"leave out --torch-compile, or write {path} with torch.where",
            )
        return program
