"""Keys and values out of the paged cache, in the shapes that attention libraries take.

One segment a row: the log-priors ride in two extra columns of the keys, so a library without bias
and without LSE is enough, and one call of N short rows replaces N * (S + 1) tiny ones. S + 1
segments a row: plain keys, merged afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dash_portable.segments.call import Library
from dash_portable.segments.places import token_places
from dash_portable.segments.rows import Spans, slot_offsets, slot_tokens

BIAS_COLUMNS = 2
# Finite in float16; as a logit it is below anything that keys can reach, so its weight is 0.
MASK = -30000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Scratch of one pass over n rows, zeros at first: what a gather leaves unwritten meets a
    weight of 0 in a library.

    One segment a row:   query [n, Hq, E], key [n * W, H, E], value [n * W, H, F]
                         with E >= D + 2 and F >= D
    S + 1 segments:      query [n * (S + 1), Hq, E], key and value [n * W + 1, H, E] with E >= D;
                         the last line takes what belongs nowhere
    """

    query: Tensor
    key: Tensor
    value: Tensor


def one_segment_widths(library: type[Library], head_dim: int) -> tuple[int, int]:
    """Head widths of gathered keys and values that hold the bias columns."""
    width = library.width_for(head_dim + BIAS_COLUMNS)
    return width, library.value_width_for(width, head_dim)


def bias_columns(bias: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`bias * sqrt(width)` as two numbers of `dtype` whose sum keeps twice its digits.

    Times a query column of 1 and the softmax scale 1 / sqrt(width) the sum is the bias again.
    Beyond the mask's size it is cut: such a prior decides alone, on either side.
    """
    exact = (bias.float() * math.sqrt(width)).clamp(min=MASK, max=-MASK)
    high = exact.to(dtype)
    return high, (exact - high.float()).to(dtype)


def fill_one_segment(
    query: Tensor, key: Tensor, value: Tensor, used: Tensor, bias: Tensor, *, block: int, into: Room
) -> None:
    """Write wide queries, keys and values of one segment a row into `into`.

    query  [n, Hq, D]      key, value  [n, W, H, D]      used  bool [n, W]      bias  float32 [n, S]

    Unused slots become zero keys with the mask in both columns and zero values, so a row without
    any key gives 0.
    """
    rows, slots, kv_heads, width = key.shape
    segment, _ = slot_offsets(
        bias.shape[1], block=block, local=slots - bias.shape[1] * block, device=bias.device
    )
    wide_q = into.query
    wide_k = into.key.view(rows, slots, kv_heads, -1)
    wide_v = into.value.view(rows, slots, kv_heads, -1)
    live = used.any(dim=1)[:, None, None]
    wide_q[..., :width] = torch.where(live, query, 0.0)
    wide_q[..., width : width + BIAS_COLUMNS] = 1.0
    wide_q[..., width + BIAS_COLUMNS :] = 0.0
    wide_k[..., :width] = torch.where(used[:, :, None, None], key, 0.0)
    prior = torch.cat((bias, torch.zeros_like(bias[:, :1])), dim=1)[:, segment]
    for column, part in enumerate(bias_columns(prior, width, key.dtype), start=width):
        wide_k[..., column] = torch.where(used, part, MASK)[:, :, None]
    wide_k[..., width + BIAS_COLUMNS :] = 0.0
    wide_v[..., :width] = torch.where(used[:, :, None, None], value, 0.0)
    wide_v[..., width:] = 0.0


def gather_one_segment(
    query: Tensor,
    cache: Tensor,
    where: Spans,
    bias: Tensor,
    row_seq: Tensor,
    block_table: Tensor,
    *,
    block: int,
    local: int,
    into: Room,
) -> None:
    """Fill `into` for one segment of W slots a row: S blocks of `block`, then `local`. Nothing
    beyond a row's keys is read."""
    token, used = slot_tokens(where, block=block, local=local)
    key, value = _read(cache, token, used, row_seq, block_table)
    fill_one_segment(query, key, value, used, bias, block=block, into=into)


def segment_starts(length: Tensor) -> Tensor:
    """Where each segment begins when they follow one another without gaps: int32 [B + 1]; an empty
    one takes one slot, since a call may not be without keys and some libraries answer nonsense for
    a row without any."""
    taken = length.flatten().clamp(min=1)
    return torch.cat((taken.new_zeros(1), taken.cumsum(0))).to(torch.int32)


def gather_segments(
    query: Tensor,
    cache: Tensor,
    where: Spans,
    row_seq: Tensor,
    block_table: Tensor,
    *,
    block: int,
    local: int,
    starts: Tensor | None,
    into: Room,
) -> None:
    """Fill `into` for S + 1 segments a row.

    starts None: fixed slots, W a row. Else int32 [n * (S + 1) + 1] from `segment_starts`: no gaps.
    Slots beyond a segment's keys are zero. `into.query` takes one copy of the row's query for each
    segment.
    """
    token, used = slot_tokens(where, block=block, local=local)
    key, value = _read(cache, token, used, row_seq, block_table)
    fill_segments(query, key, value, where.length, used, block=block, starts=starts, into=into)


def fill_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    length: Tensor,
    used: Tensor,
    *,
    block: int,
    starts: Tensor | None,
    into: Room,
) -> None:
    """Write queries, keys and values of S + 1 segments a row into `into`; shapes as in
    `gather_segments`."""
    rows, slots, _, width = key.shape
    segments = length.shape[1]
    live = (length > 0).any(dim=1)[:, None, None]
    into.query[..., :width] = (
        torch.where(live, query, 0.0)[:, None].expand(-1, segments, -1, -1).flatten(0, 1)
    )
    key = torch.where(used[:, :, None, None], key, 0.0).flatten(0, 1)
    value = torch.where(used[:, :, None, None], value, 0.0).flatten(0, 1)
    if starts is None:
        into.key[: rows * slots, :, :width] = key
        into.value[: rows * slots, :, :width] = value
        return
    segment, offset = slot_offsets(
        segments - 1, block=block, local=slots - (segments - 1) * block, device=length.device
    )
    at = starts[:-1].view(rows, segments)[:, segment] + offset
    at = torch.where(offset < length[:, segment].clamp(min=1), at, into.key.shape[0] - 1).flatten()
    into.key[:, :, :width].index_copy_(0, at.long(), key)
    into.value[:, :, :width].index_copy_(0, at.long(), value)


def _read(
    cache: Tensor, token: Tensor, used: Tensor, row_seq: Tensor, block_table: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values [n, W, H, D] of the given tokens; unused slots repeat cache place 0 and must
    be masked."""
    block, place = token_places(token, used, row_seq, block_table, block_size=cache.shape[2])
    heads, width = cache.shape[1] - 1, cache.shape[3] // 2
    both = cache[block, :heads, place]
    return both[..., :width], both[..., width:]
