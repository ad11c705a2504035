"""Launches kept by a plan: made at the first call, with names for the constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .launch import Launch

Made = tuple[Mapping[str, Any], int, Mapping[str, Any]]  # constants, warps, further options


class Launches:
    """The launches of one plan by name. What a name was first made with must hold for all its
    calls.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Launch] = {}

    def __call__(self, name: str, kernel: Any, grid: int, make: Callable[[], Made]) -> Launch:
        """The launch under a name: `grid` programs, constants and options as `make()` says."""
        found = self._kept.get(name)
        if found is None:
            named, warps, options = make()
            consts = tuple(named[n] for n in kernel.arg_names if n in named)
            found = self._kept[name] = Launch(kernel, grid, consts, warps=warps, **options)
        return found
