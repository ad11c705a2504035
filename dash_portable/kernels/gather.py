"""Gather: keys and values of each row's segments out of the paged cache, for libraries that cannot
read it in place.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .primitives import NUMBERS, token_at

MASKED = tl.constexpr(-30000.0)  # finite in float16, and far below any logit
UNIT = tl.constexpr(8)  # elements in which strides of what is written are counted: 16 bytes


class GatherRow(NamedTuple):
    """How the gather is launched on one arch.

    heads      kv heads of a piece that one program copies, a power of two
    warps      of one program
    last       the last row first, so that what a library asks for first was written last and is
               still in the cache of the chip
    tail       columns that are kept behind a head's keys at least: with 16 of 2 bytes each key ends
               where a sector of the memory does, and none is written in two parts
    """

    heads: int = 2
    warps: int = 4
    last: bool = False
    tail: int = 0


GATHER = {"*": GatherRow(), "sm90": GatherRow(heads=2, warps=8)}


def gather_row(arch: str) -> GatherRow:
    return GATHER.get(arch, GATHER["*"])


@triton.jit(do_not_specialize=(*NUMBERS, "stride_kt", "stride_kh", "stride_vt", "stride_vh"))
def gather_segments_kernel(
    cache_ptr, row_pos_ptr, row_seq_ptr, table_ptr, ids_ptr, bias_ptr, query_ptr, key_ptr,
    value_ptr, wide_ptr, used_ptr, length_ptr,
    stride_cb, stride_ch, stride_ct, stride_table, stride_kt, stride_kh, stride_vt, stride_vh,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
    BS: tl.constexpr, LOCAL: tl.constexpr, TOPK: tl.constexpr, TAIL: tl.constexpr,
    WIDE: tl.constexpr, HEADS: tl.constexpr, QH: tl.constexpr, PARTS: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """Grid N * (TOPK + LOCAL + 1) * PARTS: one sparse block of a row, HEADS kv heads of it. The
    window is cut where sparse blocks begin, so it takes one more block than it has.

    key     [N * (TOPK + LOCAL) * BS, H, >= D], value the same: kept blocks, then the window; zeros
            where no key is. Strides are multiples of UNIT, and are given in UNITs
    TAIL    columns of the keys behind D that are written, 0, 2, 4, 8 or 16: bias * sqrt(D) as a
            high and a low part, MASKED where no key is, then zeros. A query with 1 in both and the
            scale 1 / sqrt(D) then sees the bias; one segment a row is enough
    wide    [N, H * G, WIDE] with TAIL, else [N, TOPK + 1, H * G, WIDE]: the row's query in its
            first D columns, once for each segment; zeros for a padding row
    used    int32 [N, TOPK + 1], without TAIL: keys of each segment, which stand first in it
    length  the same, but at least 1
    PARTS   programs that share the heads; QH is HEADS * G padded to a power of two; LAST as in
            GatherRow
    """
    PIECES: tl.constexpr = TOPK + LOCAL + 1
    SLOTS: tl.constexpr = (TOPK + LOCAL) * BS
    COPIES: tl.constexpr = 1 if TAIL > 0 else TOPK + 1
    part = tl.program_id(0) % PARTS
    g = tl.program_id(0) // PARTS % PIECES
    n = tl.program_id(0) // (PARTS * PIECES)
    if LAST:
        n = tl.num_programs(0) // (PARTS * PIECES) - 1 - n
    n = n.to(tl.int64)
    far = g < TOPK
    p = tl.load(row_pos_ptr + n)
    blk = tl.load(ids_ptr + n * TOPK + g, mask=far, other=-1)
    seq = tl.load(row_seq_ptr + n, mask=p >= 0, other=0).to(tl.int64)
    lo = tl.maximum(p + 1 - LOCAL * BS, 0)
    # Tokens of the piece, the part of them that is read, and the slots that it fills.
    first = tl.where(far, blk, lo // BS + g - TOPK) * BS
    begin = tl.where(far, first, tl.maximum(first, lo))
    end = tl.minimum(first + BS, tl.where(far, lo, p + 1))
    end = tl.where((p >= 0) & (first >= 0), end, begin)
    r = tl.arange(0, HEADS * BS)
    t = r % BS
    h = part * HEADS + r // BS
    token = first + t
    there = h < H
    ok = there & (token >= begin) & (token < end)
    slot = tl.where(far, g * BS, TOPK * BS + first - lo) + t
    inside = there & (far | ((slot >= TOPK * BS) & (slot < SLOTS)))
    if P % BS == 0:  # a sparse block lies in one cache block
        place = tl.load(table_ptr + seq * stride_table + first // P, mask=begin < end, other=0)
        base = place.to(tl.int64) * stride_cb + ((first % P) + t).to(tl.int64) * stride_ct
    else:
        base = token_at(table_ptr + seq * stride_table, token, ok, stride_cb, stride_ct, P)
    d = tl.arange(0, DP)[None, :]
    at = cache_ptr + (base + h.to(tl.int64) * stride_ch)[:, None] + d
    both = ok[:, None] & (d < D)
    key = tl.load(at, mask=both, other=0.0)
    value = tl.load(at + D, mask=both, other=0.0)
    line = n * SLOTS + slot
    head = h.to(tl.int64)
    key_at = key_ptr + ((line * stride_kt + head * stride_kh) * UNIT)[:, None]
    value_at = value_ptr + ((line * stride_vt + head * stride_vh) * UNIT)[:, None]
    written = inside[:, None] & (d < D)
    tl.store(key_at + d, key, mask=written)
    tl.store(value_at + d, value, mask=written)
    if TAIL > 0:
        bias = tl.load(bias_ptr + n * TOPK + g, mask=far, other=0.0) * (D**0.5)
        # A prior beyond the mask's size decides alone, on either side.
        bias = tl.minimum(tl.maximum(bias, MASKED), -MASKED)
        # The high part by its bits, 8 of significand fit every dtype: a compiler may take a
        # rounding and its way back for nothing (Intel's does), and the low part would be zero.
        high = (bias.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        c = tl.arange(0, TAIL)[None, :]
        one = tl.where(ok, high, MASKED)[:, None]
        two = tl.where(ok, bias - high, 0.0)[:, None]
        tail = tl.where(c == 0, one, tl.where(c == 1, two, 0.0)).to(key_ptr.dtype.element_ty)
        tl.store(key_at + D + c, tail, mask=inside[:, None] & (c < TAIL))
    if g < COPIES:
        x = tl.arange(0, QH)
        hq = part * (HEADS * G) + x
        mask = ((x < HEADS * G) & (hq < H * G))[:, None] & (d < D)
        row_at = query_ptr + (n * (H * G) + hq)[:, None] * D + d
        row = tl.load(row_at, mask=mask & (p >= 0), other=0.0)
        wide = wide_ptr + ((n * COPIES + g) * (H * G) + hq)[:, None] * WIDE
        tl.store(wide + d, row, mask=mask)
        if (TAIL == 0) & (part == 0):
            window = tl.where(p >= 0, p + 1 - lo, 0)
            many = tl.where(far, tl.maximum(end - begin, 0), window)
            tl.store(used_ptr + n * COPIES + g, many)
            tl.store(length_ptr + n * COPIES + g, tl.maximum(many, 1))
