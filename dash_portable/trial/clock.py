"""How long does a call take on this device? Medians, with warm and with emptied caches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dash_portable.trial.feed import settle

Call = Callable[[], object]

_FLUSH = 256 << 20  # bytes read to empty a GPU's cache; more than any L2 of today
_CALLS = 20  # calls of one warm graph, where a call is short
_COLD_CALLS = 8
_SHORT = 2e-3  # seconds


class _Graph(Protocol):
    def replay(self) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Median seconds of one call.

    warm   one call after the other
    cold   after the GPU's cache was emptied, the emptying not counted; None where not measured
    how    "graph" for replays of a captured graph, else "calls": each waited for by the host
    """

    warm: float
    cold: float | None
    how: str
    runs: int

    @property
    def figure(self) -> float:
        return self.warm if self.cold is None else self.cold


def waited(call: Call, device: torch.device) -> float:
    """Seconds of one call, from a quiet device to a quiet device."""
    settle(device)
    begin = time.perf_counter()
    call()
    settle(device)
    return time.perf_counter() - begin


def median_of(call: Call, device: torch.device, budget: float, least: int = 3) -> tuple[float, int]:
    """Median seconds, and of how many runs: at least `least`, then while `budget` seconds last."""
    took = [waited(call, device)]
    while len(took) < least or (sum(took) < budget and len(took) < 200):
        if len(took) > 1 and sum(took) > 10 * budget:  # so slow that more runs would not pay
            break
        took.append(waited(call, device))
    return statistics.median(took), len(took)


def _capture(call: Call, device: torch.device, times: int) -> _Graph | None:
    """A graph of so many calls; None where torch has no graphs here, or the call does not let
    itself be captured.
    """
    room: Any = torch.get_device_module(device)
    kind = getattr(room, "CUDAGraph", None) or getattr(room, "XPUGraph", None)
    if kind is None or not hasattr(room, "graph"):
        return None
    graph: Any = kind()
    scope: AbstractContextManager[object] = room.graph(graph)
    try:
        with scope:
            for _ in range(times):
                call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # it waits for the device: then it is measured as it is
        return None
    settle(device)
    captured: _Graph = graph
    return captured


def time_call(call: Call, device: torch.device, *, graph: bool, budget: float = 1.0) -> Times:
    """Measure a call; `graph` says whether it can be captured.

    A GPU is warmed up first. Short calls are captured several to a graph, so that the launch of the
    graph itself does not count.
    """
    if device.type == "cpu":
        first = waited(call, device)
        # A long call needs no warming up: what it does once is nothing beside what it does.
        if first > 4 * budget:
            return Times(warm=first, cold=None, how="calls", runs=1)
        warm, runs = median_of(call, device, budget)
        return Times(warm=warm, cold=None, how="calls", runs=runs)
    for _ in range(3):
        call()
    once = waited(call, device)
    times = _CALLS if once < _SHORT else 1
    captured = _capture(call, device, times) if graph else None
    if captured is None:
        warm, runs = median_of(call, device, budget)
        return Times(warm=warm, cold=None, how="calls", runs=runs)
    warm, runs = median_of(captured.replay, device, budget)
    cold = _cold(call, device, budget) if once < 10 * _SHORT else None
    return Times(warm=warm / times, cold=cold, how="graph", runs=runs)


def _cold(call: Call, device: torch.device, budget: float) -> float | None:
    """A graph of (empty the cache, call), less the same graph without the call."""
    full = torch.ones(_FLUSH // 4, device=device)
    total = torch.zeros((), device=device)

    def flush() -> Tensor:
        return torch.sum(full, 0, out=total)

    def both() -> None:
        flush()
        call()

    flush()
    graphs = [_capture(one, device, _COLD_CALLS) for one in (both, flush)]
    medians = [median_of(one.replay, device, budget, 20)[0] for one in graphs if one is not None]
    return max(medians[0] - medians[1], 0.0) / _COLD_CALLS if len(medians) == 2 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this device does at best, measured: bytes a second, and multiply-adds a second."""

    bandwidth: float
    products: float

    def floor(self, bytes_moved: float, products: float) -> float:
        """Seconds that nothing can be faster than."""
        return max(bytes_moved / self.bandwidth, products / self.products)


def limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """Measure a large sum and a large matrix product."""
    gpu = device.type != "cpu"
    size, side = ((1 << 30), 8192) if gpu else ((1 << 28), 1024)
    numbers = torch.ones(size // 4, device=device)
    other = torch.empty_like(numbers)
    read, _ = median_of(numbers.sum, device, 0.2, 5)
    copied, _ = median_of(lambda: other.copy_(numbers), device, 0.2, 5)
    square = torch.ones(side, side, dtype=dtype, device=device)
    multiplied, _ = median_of(lambda: square @ square, device, 0.2, 5)
    return Limits(bandwidth=max(size / read, 2 * size / copied), products=side**3 / multiplied)
