"""Attention of rows over their kept blocks and their local window, in the cache's own place.

A program walks the segments of one split of one row and kv head with all query heads of that kv
head. Splits are merged by the row's last program (an atomic ticket) or by a second launch.
"""

import triton
import triton.language as tl

from .primitives import LOG2E, NUMBERS, gdc_wait, head_at, token_at


@triton.jit
def _merge_splits(n, head, h_ok, sum_ptr, mass_ptr, out_ptr, HQ: tl.constexpr, D: tl.constexpr,
                  DP: tl.constexpr,
                  SPLIT: tl.constexpr):  # fmt: skip
    """Unnormalised sums of SPLIT splits to one output, one query head."""
    j = tl.arange(0, SPLIT)
    d = tl.arange(0, DP)
    place = (n * HQ + head) * SPLIT + j
    top = tl.load(
        mass_ptr + place * 2, mask=h_ok & (j < SPLIT), other=float("-inf"), cache_modifier=".cg"
    )
    mass = tl.load(
        mass_ptr + place * 2 + 1, mask=h_ok & (j < SPLIT), other=0.0, cache_modifier=".cg"
    )
    best = tl.max(top, 0)
    weight = tl.where(mass > 0, tl.exp2(top - tl.where(best == float("-inf"), 0.0, best)), 0.0)
    both = (mass > 0)[:, None] & (d < D)[None, :]
    part = tl.load(
        sum_ptr + place[:, None] * D + d[None, :], mask=both, other=0.0, cache_modifier=".cg"
    )
    whole = tl.sum(mass * weight, 0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(
        out_ptr + (n * HQ + head) * D + d, out.to(out_ptr.dtype.element_ty), mask=h_ok & (d < D)
    )


@triton.jit
def _segment(
    g, n, p, lo, ids_ptr, bias_ptr, TOPK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr
):
    """Tokens [BT] of segment g, which of them count, and the bias: the kept blocks, then pieces of
    the local window.
    """
    t = tl.arange(0, BT)
    far = g < TOPK
    blk = tl.load(ids_ptr + n * TOPK + g, mask=far, other=-1)
    bias = tl.load(bias_ptr + n * TOPK + g, mask=far, other=0.0)
    token = tl.where(far, blk * BS, lo + (g - TOPK) * BS) + t
    last = tl.where(far, lo - 1, p)
    ok = (t < BS) & (token >= 0) & (token <= last) & ((far == 0) | (blk >= 0)) & (p >= 0)
    return token, ok, bias


@triton.jit(do_not_specialize=NUMBERS)
def attend_decode_kernel(
    query_ptr, cache_ptr, ids_ptr, bias_ptr, out_ptr, stride_cb, stride_ch, stride_ct,
    row_pos_ptr, row_seq_ptr, table_ptr, sum_ptr, mass_ptr, ticket_ptr, stride_table,
    H: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr,
    P: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, LOCAL: tl.constexpr, TOPK: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_H: tl.constexpr, DOT: tl.constexpr, TICKET: tl.constexpr,
    STAGES: tl.constexpr, ALONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid SPLIT * H * N.

    query  [N, H * G, D] rotated; out the same. Padding rows (row_pos -1) give zeros
    sum    float32 [N, H * G, SPLIT, D], mass float32 [N, H * G, SPLIT, 2], ticket int32 [N, H],
           zero between launches
    DOT    the group's heads, padded to TILE_H, by matrix products, from loads of STAGES segments
           under way (None: as many as the compiler likes); else it is one head
    ALONE  row i is sequence i, and row_seq is not read
    """
    s = tl.program_id(0) % SPLIT
    h = tl.program_id(0) // SPLIT % H
    n = (tl.program_id(0) // (SPLIT * H)).to(tl.int64)
    HQ: tl.constexpr = H * G
    ALL: tl.constexpr = TOPK + LOCAL
    PER: tl.constexpr = (ALL + SPLIT - 1) // SPLIT
    d = tl.arange(0, DP)
    d_ok = d < D
    # Rows and tables are the step's own: no launch of a layer writes them.
    p = tl.load(row_pos_ptr + n)
    if ALONE:
        table_ptr += n * stride_table
    else:
        seq = tl.load(row_seq_ptr + n)  # does not wait for p
        table_ptr += tl.where(p >= 0, seq, 0).to(tl.int64) * stride_table
    if PDL:
        gdc_wait()  # before the first load of what the launch before may have stored
    cache_ptr += head_at(h, stride_ch)
    lo = tl.maximum(p + 1 - LOCAL * BS, 0)
    begin = s * PER
    stop = tl.minimum(begin + PER, ALL)
    if DOT:
        r = tl.arange(0, TILE_H)
        r_ok = r < G
        at = (n * HQ + h * G + r)[:, None] * D + d[None, :]
        query = tl.load(query_ptr + at, mask=r_ok[:, None] & d_ok[None, :], other=0.0)
        query = query.to(cache_ptr.dtype.element_ty)
        top = tl.full((TILE_H,), float("-inf"), tl.float32)
        mass = tl.zeros((TILE_H,), tl.float32)
        total = tl.zeros((TILE_H, DP), tl.float32)
        for g in tl.range(begin, stop, num_stages=STAGES):
            token, ok, bias = _segment(g, n, p, lo, ids_ptr, bias_ptr, TOPK, BS, BT)
            base = token_at(table_ptr, token, ok, stride_cb, stride_ct, P)
            both = ok[:, None] & d_ok[None, :]
            key = tl.load(cache_ptr + base[:, None] + d[None, :], mask=both, other=0.0)
            value = tl.load(cache_ptr + D + base[:, None] + d[None, :], mask=both, other=0.0)
            score = (
                tl.dot(query, tl.trans(key), input_precision="ieee") * (D**-0.5 * LOG2E)
                + bias * LOG2E
            )
            score = tl.where(ok[None, :], score, float("-inf"))
            new = tl.maximum(top, tl.max(score, 1))
            safe = tl.where(new == float("-inf"), 0.0, new)
            fade, weight = tl.exp2(top - safe), tl.exp2(score - safe[:, None])
            mass = mass * fade + tl.sum(weight, 1)
            total = total * fade[:, None] + tl.dot(
                weight.to(value.dtype), value, input_precision="ieee"
            )
            top = new
        if SPLIT == 1:
            total = total / tl.where(mass > 0, mass, 1.0)[:, None]
            tl.store(
                out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=r_ok[:, None] & d_ok[None, :]
            )
        else:
            place = (n * HQ + h * G + r) * SPLIT + s
            tl.store(
                sum_ptr + place[:, None] * D + d[None, :], total, mask=r_ok[:, None] & d_ok[None, :]
            )
            tl.store(mass_ptr + place * 2, top, mask=r_ok)
            tl.store(mass_ptr + place * 2 + 1, mass, mask=r_ok)
    else:
        at = (n * HQ + h) * D + d
        query = tl.load(query_ptr + at, mask=d_ok, other=0.0).to(tl.float32) * (D**-0.5 * LOG2E)
        top = tl.full((1,), float("-inf"), tl.float32)
        mass = tl.zeros((1,), tl.float32)
        total = tl.zeros((DP,), tl.float32)
        for g in range(begin, stop):
            token, ok, bias = _segment(g, n, p, lo, ids_ptr, bias_ptr, TOPK, BS, BT)
            base = token_at(table_ptr, token, ok, stride_cb, stride_ct, P)
            both = ok[:, None] & d_ok[None, :]
            key = tl.load(cache_ptr + base[:, None] + d[None, :], mask=both, other=0.0).to(
                tl.float32
            )
            value = tl.load(cache_ptr + D + base[:, None] + d[None, :], mask=both, other=0.0).to(
                tl.float32
            )
            score = tl.where(ok, tl.sum(key * query[None, :], 1) + bias * LOG2E, float("-inf"))
            new = tl.maximum(top, tl.max(score, 0))
            safe = tl.where(new == float("-inf"), 0.0, new)
            fade, weight = tl.exp2(top - safe), tl.exp2(score - safe)
            mass = mass * fade + tl.sum(weight, 0)
            total = total * fade + tl.sum(weight[:, None] * value, 0)
            top = new
        if SPLIT == 1:
            total = total / tl.where(mass > 0, mass, 1.0)
            tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=d_ok)
        else:
            place = (n * HQ + h) * SPLIT + s
            tl.store(sum_ptr + place * D + d, total, mask=d_ok)
            one = tl.arange(0, 1)
            tl.store(mass_ptr + place * 2 + one, top)
            tl.store(mass_ptr + place * 2 + 1 + one, mass)
    if (SPLIT > 1) & TICKET:
        tl.debug_barrier()  # every thread's stores before the one thread's atomic
        if tl.atomic_add(ticket_ptr + n * H + h, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            tl.store(ticket_ptr + n * H + h, 0)
            for j in range(G):
                _merge_splits(n, h * G + j, p >= -1, sum_ptr, mass_ptr, out_ptr, HQ, D, DP, SPLIT)


@triton.jit
def attend_merge_kernel(sum_ptr, mass_ptr, out_ptr, HQ: tl.constexpr, D: tl.constexpr,
                        DP: tl.constexpr,
                        SPLIT: tl.constexpr):  # fmt: skip
    """Grid N * HQ: the end of attend_decode_kernel where a ticket is not allowed."""
    n = (tl.program_id(0) // HQ).to(tl.int64)
    head = tl.program_id(0) % HQ
    _merge_splits(n, head, head >= 0, sum_ptr, mass_ptr, out_ptr, HQ, D, DP, SPLIT)
