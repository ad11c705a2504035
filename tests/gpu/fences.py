"""Buffers between canaries: whatever a kernel writes beside a tensor shows, and what it reads there
is NaN or an index that nothing has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

CANARY = 0x7FFFFFFF  # NaN as one float32 and as two numbers of 16 bits; an index of nothing
MARGIN = 1 << 14  # bytes before and behind


class Fences:
    """The buffers made, and whether their canaries live."""

    def __init__(self) -> None:
        self._held: list[tuple[str, Tensor, int, int]] = []

    def empty(self, name: str, like: Tensor) -> Tensor:
        """A tensor of `like`'s shape, strides and type, full of canaries inside and around."""
        reach = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
        size = 0 if 0 in like.shape else reach * like.dtype.itemsize
        words = (2 * MARGIN + size + 3) // 4
        device = torch.device("cpu") if like.device.type == "meta" else like.device
        room = torch.ones(words, dtype=torch.int32, device=device).fill_(CANARY)
        self._held.append((name, room, MARGIN, size))
        inside = room.view(torch.uint8)[MARGIN : MARGIN + size].view(like.dtype)
        return inside.as_strided(like.shape, like.stride())

    def place(self, x: Tensor) -> Tensor:
        """A copy with the same strides."""
        made = self.empty(f"{list(x.shape)} of {x.dtype}", x)
        made.copy_(x)
        return made

    def broken(self) -> list[str]:
        """Which buffers were written beside."""
        found = []
        for name, room, first, size in self._held:
            whole = room.view(torch.uint8)
            intact = torch.full_like(room, CANARY).view(torch.uint8)
            for where, part in (("before", slice(0, first)), ("behind", slice(first + size, None))):
                if not torch.equal(whole[part], intact[part]):
                    found.append(f"{where} {name}")
        return found


@contextmanager
def fenced(device: torch.device) -> Iterator[Fences]:
    """All scratch that is made while this is open, by `torch.empty`, `empty_like` and `zeros`, lies
    between canaries.
    """
    fences = Fences()
    of = {name: getattr(torch, name) for name in ("empty", "empty_like", "zeros")}

    def made(name: str) -> Any:
        def allocate(*args: Any, **options: Any) -> Tensor:
            where = options.get("device")
            if name == "empty_like":
                where = where or args[0].device
            if torch.device(where or "cpu").type != device.type:
                result: Tensor = of[name](*args, **options)
                return result
            like = of["empty_like" if name == "empty_like" else "empty"](
                *args, **{**options, "device": "meta"}
            )
            inside = fences.empty(f"{name} {list(like.shape)} of {like.dtype}", _on(like, device))
            return inside.zero_() if name == "zeros" else inside

        return allocate

    def _on(like: Tensor, where: torch.device) -> Tensor:
        """One element, seen with the shape and strides of `like`: nothing reads it."""
        reach = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
        flat = of["empty"](max(reach, 1), dtype=like.dtype, device=where)
        return flat.as_strided(like.shape, like.stride())

    with pytest.MonkeyPatch.context() as patch:
        for name in of:
            patch.setattr(torch, name, made(name))
        yield fences
