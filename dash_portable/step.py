"""What one serving step is: which rows belong to which sequence, and where their tokens lie.

A `Step` holds tensors and host bounds, no choice and no scratch. The shared layer and every backend
read it when they plan, and the same step serves all layers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from dash_portable.cache import CacheShape
from dash_portable.config import DashConfig


class Trust(str, Enum):
    """Which summaries, page ranges and page starts in the cache are believed."""

    CACHED = "cached"  # all of them
    # the summaries of blocks that end at or before `prefix_lens`; later ones are made again
    PREFIX = "prefix"
    NONE = "none"  # none: another owner's cache; only keys, roles, states and counts count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """N rows of R sequences.

    row_seq      int32 [N]      sequence of each row
    row_pos      int32 [N]      token index of each row in its sequence, -1 for padding
    slots        int64 [N]      cache place of each row, `cache block * block_size + offset`
    roles        int32 [N]
    positions    int32 [4, N]   coordinates of prompt rows; None: every row is a decoded token
    query_start  int32 [R + 1]  rows of sequence r: `query_start[r] .. query_start[r + 1]`
    seq_lens     int32 [R]      tokens of each sequence, the new ones included
    block_table  int32 [R, max] cache blocks of each sequence
    page_table   int32 [R, pages, 2]  start and count of each page, instead of those in the cache;
                                      or None
    prefix_lens  int32 [R]      see Trust.PREFIX; or None
    recomputed   coordinates always come from `positions`; rows whose `positions[3]` is not negative
                 are decoded tokens computed again, and write no counts
    longest      tokens that a sequence may have at most, for checks of values; None: max_seq_len
    max_query_len, max_seq_len  host bounds, for scratch sizes and launches. Of decoded rows what a
                                sequence may hold at most, of prompts a little over what theirs do
    """

    config: DashConfig
    cache_shape: CacheShape
    heads: int
    dtype: torch.dtype
    device: torch.device
    row_seq: Tensor
    row_pos: Tensor
    slots: Tensor
    roles: Tensor
    positions: Tensor | None
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    page_table: Tensor | None = None
    prefix_lens: Tensor | None = None
    trust: Trust = Trust.CACHED
    recomputed: bool = False
    max_query_len: int
    max_seq_len: int
    longest: int | None = None
    query_lens: tuple[int, ...] | None = None
    deterministic: bool = False
    graph: bool = False

    @property
    def num_rows(self) -> int:
        return self.row_seq.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def single_row(self) -> bool:
        """Every sequence has exactly one row, so row i is sequence i."""
        return self.max_query_len == 1 and self.num_rows == self.num_seqs

    @property
    def kv_heads(self) -> int:
        return self.cache_shape.kv_heads

    @property
    def head_dim(self) -> int:
        return self.cache_shape.head_dim

    @property
    def block_size(self) -> int:
        return self.cache_shape.block_size

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.kv_heads

    @property
    def max_blocks(self) -> int:
        """Sparse blocks of the longest sequence, an upper bound."""
        return -(-self.max_seq_len // self.config.block)


def row_positions(
    slots: Tensor,
    row_seq: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    alone: bool = False,
) -> Tensor:
    """Token index of each row, int32 `[N]`, -1 for padding; `alone`: every sequence has one row.

    The live rows of a sequence are its last tokens, in order; padding between them is not counted.
    No host copy: usable while a graph is captured.
    """
    live = slots >= 0
    if alone:
        return torch.where(live, seq_lens.long() - 1, -1).clamp_min(-1).int()
    seen = live.cumsum(0)
    before = torch.cat([seen.new_zeros(1), seen])
    end = before[query_start[1:].long()][row_seq.long()]
    position = seq_lens.long()[row_seq.long()] - 1 - (end - seen)
    # Below -1 only where the length is nonsense; in 32 bits it could become a place far away.
    return torch.where(live, position, -1).clamp_min(-1).int()


def rows_of(query_lens: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """`row_seq` int32 `[N]` and `query_start` int32 `[R + 1]` from host lengths."""
    host = torch.device("cpu")  # whatever the caller made torch's default
    lengths = torch.tensor(list(query_lens), dtype=torch.int64, device=host)
    start = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=host)
    start[1:] = lengths.cumsum(0)
    row_seq = torch.repeat_interleave(torch.arange(len(lengths), device=host), lengths)
    return row_seq.int().to(device), start.int().to(device)


@functools.lru_cache(maxsize=64)
def _fields(value: DashConfig | CacheShape) -> dict[str, Any]:
    return asdict(value)


def facts_text(step: Step) -> str:
    """What a step is beyond its tensors, as one text; equal steps give equal texts."""
    return json.dumps(
        {
            "config": _fields(step.config),
            "cache": _fields(step.cache_shape),
            "heads": step.heads,
            "trust": step.trust.value,
            "recomputed": step.recomputed,
            "max_query_len": step.max_query_len,
            "max_seq_len": step.max_seq_len,
            "query_lens": step.query_lens,
            "deterministic": step.deterministic,
            "graph": step.graph,
        }
    )
