"""What a model asks of its data while it runs, and does nothing about in a good run.

if not torch.isfinite(h).all():          # model.py
raise ValueError("h is not finite")

must_be(True, torch.isfinite(h).all(), "if not torch.isfinite(h).all():")
"""

from __future__ import annotations

from torch import Tensor

from gemsc.errors import GemscError

__all__ = ["must_be"]


def must_be(value: bool, test: Tensor, line: str) -> Tensor:
    """Return a test that has the value with which a branch is not taken.

    A program has no text for the branch, which raises or replaces bad numbers.

    Raises:
        GemscError: the test has another value; names the line.
    """
    is_fake = hasattr(test, "fake_mode")  # without numbers
    if not is_fake and bool(test) is not value:
        raise GemscError(
            f"the data take a branch that the program was compiled without: {line}",
            help="mend the data, or compute it with torch.where",
        )
    return test.clone()
