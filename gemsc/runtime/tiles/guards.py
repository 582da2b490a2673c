"""What a model asks of its data while it runs, and does nothing about in a good run.

if not torch.isfinite(h).all():          # model.py
raise ValueError("h is not finite")

must_be(True, torch.isfinite(h).all(), "if not torch.isfinite(h).all():")
"""

from __future__ import annotations

from torch import Tensor

from gemsc.errors import GemscError

__all__ = ["must_be"]


def must_be(value: float, test: Tensor, line: str) -> Tensor:
    """Return a test that has the value with which a branch is not taken.

    A program has no text for the branch, which raises or replaces bad numbers. A value
    that is a number is one that a buffer had, and what was computed of it alone.

    Raises:
        GemscError: the test has another value; names the line.
    """
    is_fake = hasattr(test, "fake_mode")  # without numbers
    is_branch = isinstance(value, bool)
    if is_fake or (bool(test) if is_branch else test.item()) == value:
        return test.clone()
    if not is_branch:
        raise GemscError(
            f"a buffer has another value ({test.item()}, not {value}) than when the "
            f"program was compiled: {line}",
            help="compile the model again, with the current buffers",
        )
    raise GemscError(
        f"the data take a branch that was not compiled: {line}",
        help="correct the data, or compute it with torch.where",
    )
