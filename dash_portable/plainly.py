"""Arithmetic as it is written, whatever the caller has switched on around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Call = TypeVar("_Call", bound=Callable[..., Any])


def plainly(call: _Call) -> _Call:
    """Torch operations that record no gradients and that autocast does not change: their types are
    chosen on purpose, scores in float64 and sums in float32.

    The first argument is a tensor, or has a `step`: it says on which kind of device.
    """

    @functools.wraps(call)
    def plain(first: Any, *args: Any, **kwargs: Any) -> Any:
        kind = (first if isinstance(first, torch.Tensor) else first.step).device.type
        with torch.no_grad():
            if not torch.is_autocast_enabled(kind):
                return call(first, *args, **kwargs)
            with torch.autocast(kind, enabled=False):
                return call(first, *args, **kwargs)

    return cast(_Call, plain)
