"""Attention over the local window of decode rows, made by the launch that stores and selects: it
waits for no selection, and takes the memory while selection does not.
"""

from __future__ import annotations

import weakref

import torch

from .step import Step

_WINDOWS: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()


class Window:
    """What attention of a step begins with; made by its runner, filled by its layer.

    near    float32 [N, H, D]   unnormalised sums        mass    float32 [N, H, 2]   maximum, mass
    filled  by the layer's last call, for the runner's next
    """

    def __init__(self, step: Step) -> None:
        rows, heads, device = step.num_rows, step.kv_heads, step.device
        shape = (rows, heads, step.head_dim)
        self.near = torch.empty(shape, dtype=torch.float32, device=device)
        self.mass = torch.empty((rows, heads, 2), dtype=torch.float32, device=device)
        self.filled = False
        _WINDOWS[id(step)] = self


def window_of(step: Step) -> Window | None:
    """The one that the step's runner made, if it did."""
    return _WINDOWS.get(id(step))
