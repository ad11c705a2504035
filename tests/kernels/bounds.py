"""Every address that a kernel uses, held against the tensors it was launched with: in Triton's
interpreter, which sees them all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from triton.runtime import interpreter

Seen = Callable[[str, np.ndarray], None]


class _Watched:
    """The interpreter's memory, whose addresses someone sees before they are used."""

    def __init__(self, memory: Any, seen: Seen) -> None:
        self._memory, self._seen = memory, seen

    def _show(self, what: str, ptrs: np.ndarray, mask: np.ndarray) -> None:
        live = np.broadcast_to(np.asarray(mask, dtype=bool), np.shape(ptrs))
        self._seen(what, np.asarray(ptrs)[live])

    def load(self, ptrs: np.ndarray, mask: np.ndarray, *rest: Any) -> Any:
        self._show("load", ptrs, mask)
        return self._memory.load(ptrs, mask, *rest)

    def store(self, ptrs: np.ndarray, value: np.ndarray, mask: np.ndarray) -> Any:
        self._show("store", ptrs, mask)
        return self._memory.store(ptrs, value, mask)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


@contextlib.contextmanager
def addresses_seen(seen: Seen) -> Iterator[list[bool]]:
    """Within, `seen(what, addresses)` is called before every load and store. Gives a list that
    holds something from each program's start on, until it is cleared.
    """
    memory, builder, begun = interpreter._interpreter, interpreter.interpreter_builder, []
    place = builder.set_grid_idx

    def start(*at: int) -> None:
        begun[:] = [True]
        place(*at)

    interpreter._interpreter = _Watched(memory, seen)
    builder.set_grid_idx = start
    try:
        yield begun
    finally:
        interpreter._interpreter = memory
        del builder.set_grid_idx


@contextlib.contextmanager
def addresses_checked() -> Iterator[None]:
    """Within, a kernel that reads or writes outside its launch's tensors raises."""
    tensors: list[tuple[int, int]] = []
    begin = interpreter.GridExecutor._init_args_hst

    def recorded(self: Any, args: Any, options: Any) -> Any:
        found = begin(self, args, options)
        tensors[:] = [
            (x.data_ptr(), x.data_ptr() + _last(x) * x.element_size())
            for x in found[0]
            if hasattr(x, "data_ptr")
        ]
        return found

    def check(what: str, at: np.ndarray) -> None:
        inside = np.zeros(at.shape, dtype=bool)
        for first, end in tensors:
            inside |= (at >= first) & (at < end)
        if not inside.all():
            raise AssertionError(f"{what} at {at[~inside][:4]}, which is in no tensor")

    interpreter.GridExecutor._init_args_hst = recorded
    try:
        with addresses_seen(check):
            yield
    finally:
        interpreter.GridExecutor._init_args_hst = begin


def _last(x: Any) -> int:
    """One past the last element of a tensor, counted from its first."""
    if not x.numel():
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
