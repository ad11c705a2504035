"""One library call in numbers: what is planned once, and what a library of varlen attention has to
offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from dash_portable.errors import BackendError
from dash_portable.segments.merge import Base, Layout

T = TypeVar("T")


class Addressing(str, Enum):
    """How a library finds the keys of a run that is shorter than the slots it was given.

    CLOSED  runs follow one another without gaps; lengths are differences of starts
    FIXED   starts with gaps, lengths beside them
    PAGED   the buffer as pages, a page table, lengths beside it
    """

    CLOSED = "closed"
    FIXED = "fixed"
    PAGED = "paged"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """B runs of keys, each attended by `queries` query rows of its own, non-causal.

    The tensors keep their place while their contents change from layer to layer, so a library may
    plan on them.

    queries      query rows of a run: 1, or the query heads of a kv head where groups are folded
    into rows
    heads        query heads of a row, `kv_heads` where groups are folded
    width        head width of queries and keys; `value_width` of values
    starts_k     int32 [B + 1]   first key of each run, and the end
    length       int32 [B]       live keys; None: each run is as long as its starts say
    table        int32 [B, C]    pages of `page` keys, or None; with it, starts_k does not apply
    longest      most keys of a run, a bound known on the host
    window       keys before the last that are seen, or None: all
    scale        factor of the logits, of the true head width
    graph        the call will be captured
    """

    runs: int
    queries: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    starts_k: Tensor
    longest: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    length: Tensor | None = None
    table: Tensor | None = None
    page: int = 0
    window: int | None = None
    with_lse: bool = False
    graph: bool = False
    deterministic: bool = False
    starts_q: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts_q", counted(self.runs, self.queries, self.device))


class Library(ABC):
    """One function of one library, made for one call; everything that can be looked up or planned
    is in `__init__`.

    widths            head widths it takes, ascending; empty: every multiple of 8
    takes_groups      it takes fewer kv heads than query heads
    addressing        of gathered segments that are shorter than their slots
    builds            it compiles itself at the first call of a configuration
    lse_layout, lse_base   of what `attend` returns
    """

    title: ClassVar[str]
    widths: ClassVar[tuple[int, ...]] = ()
    takes_groups: ClassVar[bool] = True
    addressing: ClassVar[Addressing] = Addressing.CLOSED
    builds: ClassVar[bool] = False
    lse_layout: Layout = "HN"
    lse_base: Base = "e"

    @abstractmethod
    def __init__(self, call: Call) -> None:
        """Import, look up, plan; raises BackendError when the library cannot make this call."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """`query [B * queries, Hq, E]`, keys and values [keys, H, .] or pages [.., page, H, .]: out
        and its lse."""

    def attend_into(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        """`attend` without its lse into `out` [B * queries, Hq, D]. A library that writes where it
        is told may save the copy."""
        got, _ = self.attend(query, key, value)
        out.copy_(got[..., : out.shape[-1]])

    @classmethod
    def value_width_for(cls, width: int, head_dim: int) -> int:
        """Head width of values beside keys of `width`, at least `head_dim`; most want one."""
        return width

    @classmethod
    def width_for(cls, needed: int) -> int:
        """The smallest head width that it takes and that holds `needed` columns."""
        if not cls.widths:
            return -(-needed // 8) * 8
        for width in cls.widths:
            if width >= needed:
                return width
        raise BackendError(f"{cls.title}: found {needed} columns, needed at most {cls.widths[-1]}")


def planned(title: str, make: Callable[[], T]) -> T:
    """What `make` gives; a library's own failure while it plans or builds becomes a BackendError
    with its words, so that another backend can be asked. Out of memory stays what it is."""
    try:
        return make()
    except (BackendError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a missing compiler or a failed build can be any of them
        raise BackendError(f"{title}: {type(error).__name__}: {error}") from error


def counted(runs: int, step: int, device: torch.device) -> Tensor:
    """0, step, 2 step, ... as int32 [runs + 1]: starts of runs of one length."""
    return torch.arange(0, runs * step + 1, step, dtype=torch.int32, device=device)


def fold_groups(query: Tensor, kv_heads: int) -> Tensor:
    """Query heads of a kv head as rows: [B, Hq, E] to [B * G, H, E]. Without a causal mask the two
    mean the same."""
    runs, heads, width = query.shape
    return query.view(runs, kv_heads, heads // kv_heads, width).transpose(1, 2).flatten(0, 1)


def unfold_groups(out: Tensor, group: int) -> Tensor:
    """[B * G, H, E] back to [B, Hq, E]."""
    rows, kv_heads, width = out.shape
    return out.reshape(rows // group, group, kv_heads, width).transpose(1, 2).flatten(1, 2)


def unfold_lse(lse: Tensor, group: int) -> Tensor:
    """[H, B * G] back to [Hq, B]."""
    return lse.reshape(lse.shape[0], -1, group).transpose(1, 2).flatten(0, 1)
