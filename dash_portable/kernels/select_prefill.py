"""Which blocks each row of a prefill step attends to.

A tile of rows passes its blocks once. A row's blocks fall into GROUPS groups (block modulo GROUPS);
of each group the two best scores stay in registers with their blocks, of the third only the score.
The window's best are then taken from the two times GROUPS candidates. A row is certain when no
group's third reaches the last one taken; rows that are not (about one in seven with 64 groups, all
rows when scores are equal) go to a list, and a second launch passes their blocks with a running
window. Both are exact, and a row's path depends on the row alone.
"""

import triton
import triton.language as tl

from .group_rows import TILE_FIELDS
from .primitives import (
    BAD_SCORE,
    CLAMP,
    EMPTY,
    best_of_rows,
    final_score,
    finish_selection,
    pack_score,
)


@triton.jit
def _keep_two(score, at, one, one_at, two, two_at, third):
    """Scores of one tile of blocks into the two best of each group; equal ones keep the earlier,
    lower block.
    """
    first = score > one
    second = score > two
    third = tl.where(second, two, tl.maximum(third, score))
    two_at = tl.where(first, one_at, tl.where(second, at, two_at))
    two = tl.where(first, one, tl.where(second, score, two))
    one_at = tl.where(first, at, one_at)
    one = tl.where(first, score, one)
    return one, one_at, two, two_at, third


@triton.jit
def _allowed(block, first, last, page, range_row, own: tl.constexpr):
    """[TILE, GROUPS]: the blocks a row may choose."""
    ok = (block[None, :] >= first[:, None]) & (block[None, :] <= last[:, None])
    if own:
        near = (block >= tl.min(first, 0)) & (block <= tl.max(last, 0))
        low = tl.load(range_row + block * 2, mask=near, other=0)
        high = tl.load(range_row + block * 2 + 1, mask=near, other=0)
        ok = ok & (low[None, :] <= page[:, None]) & (page[:, None] <= high[None, :])
    return ok


@triton.jit
def select_tile_kernel(
    query_ptr,
    summary_ptr,
    range_ptr,
    tile_ptr,
    order_ptr,
    first_ptr,
    last_ptr,
    page_ptr,
    pos_ptr,
    ids_ptr,
    bias_ptr,
    redo_count_ptr,
    redo_ptr,
    factor,
    floor,
    inv_sigma,
    stride_sr,
    stride_rr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    TOPK: tl.constexpr,
    WINDOW: tl.constexpr,
    W: tl.constexpr,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_PAGES: tl.constexpr,
    STAGES: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """One tile of rows of one class: one pass over its blocks, the window's best, the finish;
    doubtful rows to the list.
    """
    record = tile_ptr + (tl.num_programs(0) - 1 - tl.program_id(0)) * FIELDS  # long rows first
    seq = tl.load(record)
    if seq >= 0:
        at = tl.load(record + 1) + tl.arange(0, TILE)
        live = at < tl.load(record + 2)
        i = tl.load(order_ptr + at, mask=live, other=0)
        first = tl.load(first_ptr + i, mask=live, other=0x7FFFFFFF)
        last = tl.load(last_ptr + i, mask=live, other=-1)
        page = tl.load(page_ptr + i, mask=live, other=0)
        pos = tl.load(pos_ptr + i, mask=live, other=0)
        d = tl.arange(0, DP)
        n = tl.arange(0, GROUPS)
        query = tl.load(
            query_ptr + i.to(tl.int64)[:, None] * D + d[None, :],
            mask=live[:, None] & (d[None, :] < D),
            other=0.0,
        )
        summary = summary_ptr + seq.to(tl.int64) * stride_sr
        ranges = range_ptr + seq.to(tl.int64) * stride_rr
        final = tl.max(last, 0)
        begin = tl.min(first, 0) // GROUPS * GROUPS
        common = (
            (tl.min(tl.where(live, last, 0x7FFFFFFF), 0) + 1) // GROUPS * GROUPS
        )  # all rows may choose those below
        if HAS_PAGES:
            common = tl.where(tl.max(page, 0) > 0, begin, common)
        root: tl.constexpr = D**-0.5
        one = tl.full((TILE, GROUPS), float("-inf"), tl.float32)
        two = tl.full((TILE, GROUPS), float("-inf"), tl.float32)
        third = tl.full((TILE, GROUPS), float("-inf"), tl.float32)
        one_at = tl.zeros((TILE, GROUPS), tl.int32)
        two_at = tl.zeros((TILE, GROUPS), tl.int32)
        for o in tl.range(begin, common, GROUPS, num_stages=STAGES):
            block = o + n
            if D == DP:
                key = tl.load(summary + block[None, :] * D + d[:, None])
            else:
                key = tl.load(
                    summary + block[None, :] * D + d[:, None],
                    mask=d[:, None] < D,
                    other=0.0,
                )
            raw = tl.dot(query, key, input_precision="ieee")
            score = raw * root * factor  # final_score while no clamp bites
            one, one_at, two, two_at, third = _keep_two(score, o, one, one_at, two, two_at, third)
        for o in tl.range(tl.maximum(begin, common), final + 1, GROUPS, num_stages=1):
            block = o + n
            key_ok = (block[None, :] <= final) & (d[:, None] < D)
            key = tl.load(summary + block[None, :] * D + d[:, None], mask=key_ok, other=0.0)
            score = final_score(tl.dot(query, key, input_precision="ieee"), factor, D)
            ok = _allowed(block, first, last, page, ranges, False)
            if HAS_PAGES:  # noqa: SIM102 - a constant, no part of a condition on values
                if tl.max(page, 0) > 0:
                    ok = _allowed(block, first, last, page, ranges, True)
            score = tl.where(ok, score, float("-inf"))
            one, one_at, two, two_at, third = _keep_two(score, o, one, one_at, two, two_at, third)

        left_out = tl.max(third, 1)
        w = tl.arange(0, W)
        best = tl.full((TILE, W), EMPTY, tl.int64)
        one_at = one_at + n[None, :]
        two_at = two_at + n[None, :]
        most = tl.max(one, 1)
        least = most
        for k in range(WINDOW):
            least = tl.max(one, 1)
            block = tl.min(tl.where(one == least[:, None], one_at, 0x7FFFFFFF), 1)
            key = tl.where(least > float("-inf"), pack_score(least, block), EMPTY)
            best = tl.where(w[None, :] == k, key[:, None], best)
            taken = one_at == block[:, None]
            one = tl.where(taken, two, one)
            one_at = tl.where(taken, two_at, one_at)
            two = tl.where(taken, float("-inf"), two)
        # Where every row may choose a block the clamp and NaN were not looked at: neither can be
        # among the best while the last one taken lies above both, and the first below the clamp.
        bound = tl.abs(factor) * CLAMP
        certain = (least > tl.maximum(-bound, BAD_SCORE)) & (left_out < least) & (most < bound)
        certain = certain | ((common <= begin) & (left_out == float("-inf")))
        doubt = (live & (certain == 0)).to(tl.int32)
        doubts = tl.sum(doubt, 0)
        if doubts > 0:
            place = tl.load(record + 5) + tl.atomic_add(redo_count_ptr + seq, doubts, sem="relaxed")
            tl.store(redo_ptr + place + tl.cumsum(doubt, 0) - doubt, i, mask=doubt > 0)
        ids, bias = finish_selection(
            best, tl.minimum(pos // BLOCK + 1, WINDOW), floor, inv_sigma, TOPK, WINDOW, W
        )
        out = i.to(tl.int64)[:, None] * TOPK + w[None, :]
        out_ok = live[:, None] & (w[None, :] < TOPK)
        tl.store(ids_ptr + out, ids, mask=out_ok)
        tl.store(bias_ptr + out, bias, mask=out_ok)


@triton.jit(do_not_specialize=["num_rows"])
def select_redo_kernel(
    query_ptr,
    summary_ptr,
    range_ptr,
    tile_ptr,
    first_ptr,
    last_ptr,
    page_ptr,
    pos_ptr,
    ids_ptr,
    bias_ptr,
    redo_count_ptr,
    redo_ptr,
    num_rows,
    factor,
    floor,
    inv_sigma,
    stride_sr,
    stride_rr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    TOPK: tl.constexpr,
    WINDOW: tl.constexpr,
    W: tl.constexpr,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_PAGES: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """The rows of the list by a running window, which takes whatever scores come. Also empties the
    padding rows.
    """
    w = tl.arange(0, W)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    padding = tl.load(pos_ptr + row, mask=row < num_rows, other=0) < 0
    out = row.to(tl.int64)[:, None] * TOPK + w[None, :]
    out_ok = padding[:, None] & (w[None, :] < TOPK)
    tl.store(ids_ptr + out, tl.full((TILE, W), -1, tl.int32), mask=out_ok)
    tl.store(bias_ptr + out, tl.zeros((TILE, W), tl.float32), mask=out_ok)

    record = tile_ptr + tl.program_id(0) * FIELDS
    seq = tl.load(record)
    begin = tl.load(record + 4) * TILE
    count = tl.load(redo_count_ptr + seq, mask=seq >= 0, other=0)
    if begin < count:
        at = begin + tl.arange(0, TILE)
        live = at < count
        i = tl.load(redo_ptr + tl.load(record + 5) + at, mask=live, other=0)
        first = tl.load(first_ptr + i, mask=live, other=0x7FFFFFFF)
        last = tl.load(last_ptr + i, mask=live, other=-1)
        page = tl.load(page_ptr + i, mask=live, other=0)
        pos = tl.load(pos_ptr + i, mask=live, other=0)
        d = tl.arange(0, DP)
        n = tl.arange(0, GROUPS)
        query = tl.load(
            query_ptr + i.to(tl.int64)[:, None] * D + d[None, :],
            mask=live[:, None] & (d[None, :] < D),
            other=0.0,
        )
        summary = summary_ptr + seq.to(tl.int64) * stride_sr
        ranges = range_ptr + seq.to(tl.int64) * stride_rr
        final = tl.max(last, 0)
        # free places differ, so that one at a time is taken; they lie below every real key
        held = tl.full((TILE, W), EMPTY, tl.int64) + w[None, :]
        if W > WINDOW:
            held = tl.where(w[None, :] < WINDOW, held, 0x7FFFFFFFFFFFFFFF)
        for o in range(tl.min(first, 0) // GROUPS * GROUPS, final + 1, GROUPS):
            block = o + n
            key_ok = (block[None, :] <= final) & (d[:, None] < D)
            key = tl.load(summary + block[None, :] * D + d[:, None], mask=key_ok, other=0.0)
            score = final_score(tl.dot(query, key, input_precision="ieee"), factor, D)
            ok = _allowed(block, first, last, page, ranges, False)
            if HAS_PAGES:
                own = _allowed(block, first, last, page, ranges, True)
                ok = tl.where(page[:, None] > 0, own, ok)
            new = tl.where(
                ok, pack_score(score, tl.broadcast_to(block[None, :], (TILE, GROUPS))), EMPTY
            )
            best = tl.max(new, 1)
            worst = tl.min(held, 1)
            while tl.max((best > worst).to(tl.int32), 0) > 0:
                better = best > worst
                held = tl.where((held == worst[:, None]) & better[:, None], best[:, None], held)
                new = tl.where(new == best[:, None], EMPTY, new)
                best = tl.max(new, 1)
                worst = tl.min(held, 1)
        held = tl.where((held <= EMPTY + W) | (held == 0x7FFFFFFFFFFFFFFF), EMPTY, held)
        ids, bias = finish_selection(
            best_of_rows(held, W, W),
            tl.minimum(pos // BLOCK + 1, WINDOW),
            floor,
            inv_sigma,
            TOPK,
            WINDOW,
            W,
        )
        out = i.to(tl.int64)[:, None] * TOPK + w[None, :]
        out_ok = live[:, None] & (w[None, :] < TOPK)
        tl.store(ids_ptr + out, ids, mask=out_ok)
        tl.store(bias_ptr + out, bias, mask=out_ok)


def select_shapes(num_rows, num_seqs):
    """Shapes of the int32 tensors that select_prefill needs besides the groups; nothing in them is
    kept.
    """
    return {"redo_count": (num_seqs,), "redo": (num_rows,)}


def select_prefill(
    index_query,
    summaries,
    ranges,
    row_pos,
    groups,
    scratch,
    ids,
    bias,
    *,
    scale,
    floor,
    sigma,
    block,
    topk,
    window,
    tile,
    launch,
):
    """ids int32 [N, topk] and bias float32 [N, topk] of a step's rows, grouped by group_rows; two
    launches.

    index_query [N, D] rotated, contiguous; summaries [R, blocks, D] and ranges int32 [R, blocks, 2]
    (None when no row has a page), each sequence contiguous; row_pos int32 [N]; groups: what
    group_rows filled; scratch: tensors of select_shapes. launch: a row of launch_prefill
    (select_groups, select_warps, select_stages, select_options).
    """
    num_rows, width = index_query.shape
    if num_rows == 0:
        return
    has_pages = ranges is not None
    scratch["redo_count"].zero_()
    strides = (summaries.stride(0), ranges.stride(0) if has_pages else 0)
    numbers = (scale * width**-0.5, floor, 1.0 / sigma)
    padded = 1 << max(width - 1, 15).bit_length()
    consts = {
        "D": width,
        "DP": padded,
        "BLOCK": block,
        "TOPK": topk,
        "WINDOW": window,
        "W": 1 << max(window - 1, 1).bit_length(),
        "TILE": tile,
        "GROUPS": launch.select_groups,
        "HAS_PAGES": has_pages,
        "FIELDS": TILE_FIELDS,
    }
    rows = (groups["first"], groups["last"], groups["page"], row_pos)
    lists = (ids, bias, scratch["redo_count"], scratch["redo"])
    keys = (index_query, summaries, ranges if has_pages else row_pos, groups["tiles"])
    grid = (groups["tiles"].shape[0],)
    select_tile_kernel[grid](
        *keys,
        groups["order"],
        *rows,
        *lists,
        *numbers,
        *strides,
        **consts,
        STAGES=launch.select_stages,
        num_warps=launch.select_warps,
        **launch.select_options,
    )
    redo_grid = (max(grid[0], -(-num_rows // tile)),)
    select_redo_kernel[redo_grid](
        *keys, *rows, *lists, num_rows, *numbers, *strides, **consts, num_warps=launch.redo_warps
    )
