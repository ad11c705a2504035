"""Every address that a kernel uses, held against the tensors it was launched with: in Triton's
interpreter, which sees them all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from triton.runtime import interpreter


class _Checked:
    """The interpreter's memory, refusing what lies in no tensor of the launch."""

    def __init__(self, memory: Any, tensors: list[tuple[int, int]]) -> None:
        self._memory, self._tensors = memory, tensors

    def _check(self, ptrs: np.ndarray, mask: np.ndarray, what: str) -> None:
        at = np.asarray(ptrs)[np.broadcast_to(np.asarray(mask, dtype=bool), np.shape(ptrs))]
        inside = np.zeros(at.shape, dtype=bool)
        for begin, end in self._tensors:
            inside |= (at >= begin) & (at < end)
        if not inside.all():
            raise AssertionError(f"{what} at {at[~inside][:4]}, which is in no tensor")

    def load(self, ptrs: np.ndarray, mask: np.ndarray, *rest: Any) -> Any:
        self._check(ptrs, mask, "load")
        return self._memory.load(ptrs, mask, *rest)

    def store(self, ptrs: np.ndarray, value: np.ndarray, mask: np.ndarray) -> Any:
        self._check(ptrs, mask, "store")
        return self._memory.store(ptrs, value, mask)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


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

    memory = interpreter._interpreter
    interpreter.GridExecutor._init_args_hst = recorded
    interpreter._interpreter = _Checked(memory, tensors)
    try:
        yield
    finally:
        interpreter.GridExecutor._init_args_hst = begin
        interpreter._interpreter = memory


def _last(x: Any) -> int:
    """One past the last element of a tensor, counted from its first."""
    if not x.numel():
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
