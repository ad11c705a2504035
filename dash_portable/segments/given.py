"""Attention over segments that the caller has gathered: `flash_dash_attention`, for any library."""

from __future__ import annotations

import math

from torch import Tensor

from dash_portable.segments.call import Call, Library, counted, fold_groups, unfold_groups
from dash_portable.segments.gather import Room, fill_one_segment, one_segment_widths
from dash_portable.segments.rows import slot_count, slot_offsets


def given_slots(used: Tensor, kept: int, *, block: int, local: int) -> Tensor:
    """Which slots of each row hold a key, bool [N, W], from lengths [N * (S + 1)] or [N, S + 1]."""
    segment, offset = slot_offsets(kept, block=block, local=local, device=used.device)
    return offset < used.reshape(-1, kept + 1)[:, segment]


def attend_given(
    library: type[Library],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    used: Tensor,
    bias: Tensor,
    *,
    block: int,
    local: int,
) -> Tensor:
    """One call of `library` with the priors in the keys.

    query  [N, Hq, D]      key, value  [N * W, H, D], each row's S blocks of `block` slots, then
    `local` slots
    used   [N * (S + 1)]   live keys of each segment      bias  [N, S] float32

    Gives [N, Hq, D], 0 for a row without keys. Slots past a segment's length may hold anything.
    """
    rows, heads, width = query.shape
    kept, kv_heads = bias.shape[1], key.shape[1]
    slots = slot_count(kept, block=block, local=local)
    wide, wide_value = one_segment_widths(library, width)
    room = Room(
        query=query.new_zeros(rows, heads, wide),
        key=query.new_zeros(rows * slots, kv_heads, wide),
        value=query.new_zeros(rows * slots, kv_heads, wide_value),
    )
    fill_one_segment(
        query,
        key.view(rows, slots, kv_heads, width),
        value.view(rows, slots, kv_heads, width),
        given_slots(used, kept, block=block, local=local),
        bias,
        block=block,
        into=room,
    )
    group = heads // kv_heads
    folded = group > 1 and not library.takes_groups
    planned = library(
        Call(
            runs=rows,
            queries=group if folded else 1,
            heads=kv_heads if folded else heads,
            kv_heads=kv_heads,
            width=wide,
            value_width=wide_value,
            starts_k=counted(rows, slots, query.device),
            longest=slots,
            scale=1.0 / math.sqrt(width),
            dtype=query.dtype,
            device=query.device,
        )
    )
    wide_q = fold_groups(room.query, kv_heads) if folded else room.query
    out, _ = planned.attend(wide_q, room.key, room.value)
    return (unfold_groups(out, group) if folded else out)[..., :width].contiguous()
