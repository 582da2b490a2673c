"""Dropout off, so that two runs whose random numbers differ can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import functional as F

__all__ = ["dropout_off"]

NAMES = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")


@contextmanager
def dropout_off() -> Iterator[None]:
    """Make every dropout of torch the identity, inside attention too.

    nn.Dropout and its like call these functions, so layers are off as well.
    """
    before: dict[str, Callable[..., Any]] = {name: getattr(F, name) for name in NAMES}
    attention = F.scaled_dot_product_attention

    def identity(input: Any, *args: Any, **kwargs: Any) -> Any:
        return input

    def attend(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        mask = args[0] if args else kwargs.pop("attn_mask", None)
        kwargs.pop("dropout_p", None)
        rest = args[2:]
        if rest:
            kwargs["is_causal"] = rest[0]
        return attention(query, key, value, attn_mask=mask, **kwargs)

    try:
        for name in NAMES:
            setattr(F, name, identity)
        F.scaled_dot_product_attention = attend
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)
        F.scaled_dot_product_attention = attention
