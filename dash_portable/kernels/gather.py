"""Gather: keys and values of each row's segments out of the paged cache, for libraries that cannot
read it in place.
"""

import triton
import triton.language as tl

from .primitives import NUMBERS, head_at, token_at

MASKED = tl.constexpr(-30000.0)  # finite in float16, and far below any logit


@triton.jit
def _row_tokens(
    n, p, g, ids_ptr, BS: tl.constexpr, BT: tl.constexpr, LOCAL: tl.constexpr, TOPK: tl.constexpr
):
    """Tokens [BT] of piece g of a row (kept blocks, then the local window in pieces of a block),
    and which exist.
    """
    t = tl.arange(0, BT)
    lo = tl.maximum(p + 1 - LOCAL * BS, 0)
    far = g < TOPK
    blk = tl.load(ids_ptr + n * TOPK + g, mask=far, other=-1)
    token = tl.where(far, blk * BS, lo + (g - TOPK) * BS) + t
    last = tl.where(far, lo - 1, p)
    ok = (t < BS) & (token >= 0) & (token <= last) & ((far == 0) | (blk >= 0)) & (p >= 0)
    return token, ok


@triton.jit(do_not_specialize=NUMBERS)
def gather_segments_kernel(
    cache_ptr, row_pos_ptr, row_seq_ptr, table_ptr, ids_ptr, bias_ptr, key_ptr, value_ptr, used_ptr,
    stride_cb, stride_ch, stride_ct, stride_table, stride_kt, stride_kh, stride_vt, stride_vh,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, BS: tl.constexpr,
    BT: tl.constexpr,
    LOCAL: tl.constexpr, TOPK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Grid N * (TOPK + LOCAL): one piece of BS tokens of one row, all heads.

    key     [N * (TOPK + LOCAL) * BS, H, >= D], value the same: kept blocks, then the local window;
            zeros where no key is
    used    int32 [N, TOPK + 1]: keys of each segment, which stand first in it
    TAIL    columns of the keys behind D that are written, 0, 2, 4 or 8: bias * sqrt(D) as a high
            and a low part, MASKED where no key is, then zeros. A query with 1 in both and the scale
            1 / sqrt(D) then sees the bias; one segment a row is enough
    """
    ALL: tl.constexpr = TOPK + LOCAL
    g = tl.program_id(0) % ALL
    n = (tl.program_id(0) // ALL).to(tl.int64)
    p = tl.load(row_pos_ptr + n)
    seq = tl.load(row_seq_ptr + n, mask=p >= 0, other=0).to(tl.int64)
    token, ok = _row_tokens(n, p, g, ids_ptr, BS, BT, LOCAL, TOPK)
    base = token_at(table_ptr + seq * stride_table, token, ok, stride_cb, stride_ct, P)
    d = tl.arange(0, DP)
    t = tl.arange(0, BT)
    inside = (t < BS)[:, None] & (d < D)[None, :]
    both = ok[:, None] & (d < D)[None, :]
    line = (n * ALL + g) * BS + t
    if TAIL > 0:
        bias = tl.load(bias_ptr + n * TOPK + g, mask=g < TOPK, other=0.0) * (D**0.5)
        dtype = key_ptr.dtype.element_ty
        # The high part by its bits, 8 of significand fit every dtype: a compiler may take a
        # rounding and its way back for nothing (Intel's does), and the low part would be zero.
        high = (bias.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        c = tl.arange(0, TAIL)[None, :]
        first = tl.where(ok, high, MASKED)[:, None]
        rest = tl.where(ok, bias - high, 0.0)[:, None]
        # One store of whole sectors: two columns alone would be written twice by the memory.
        tail = tl.where(c == 0, first, tl.where(c == 1, rest, 0.0)).to(dtype)
    for h in range(H):
        at = cache_ptr + head_at(h, stride_ch) + base[:, None] + d[None, :]
        key_at = key_ptr + (line * stride_kt + head_at(h, stride_kh))[:, None]
        value_at = value_ptr + (line * stride_vt + head_at(h, stride_vh))[:, None]
        key = tl.load(at, mask=both, other=0.0)
        value = tl.load(at + D, mask=both, other=0.0)  # both under way before either is stored
        tl.store(key_at + d[None, :], key, mask=inside)
        tl.store(value_at + d[None, :], value, mask=inside)
        if TAIL > 0:
            tl.store(key_at + D + c, tail, mask=(t < BS)[:, None] & (c < TAIL))
    many = tl.sum(ok.to(tl.int32), 0)
    if g < TOPK:
        tl.store(used_ptr + n * (TOPK + 1) + g, many)
    if g == TOPK:
        tl.store(
            used_ptr + n * (TOPK + 1) + TOPK, tl.where(p >= 0, tl.minimum(p + 1, LOCAL * BS), 0)
        )
