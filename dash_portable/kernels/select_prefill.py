"""Which blocks each row of a prefill step attends to.

A tile of rows passes its blocks once. A row's blocks fall into GROUPS groups (block modulo GROUPS);
of each group the two best scores stay in registers with their blocks, of the third only the score.
The window's best are then taken from the two times GROUPS candidates. A row is certain when no
group's third reaches the last one taken. Of the others (about one in seven with 64 groups), those
with few such groups go to a list, and a second launch looks at all blocks of these groups; the rest
(all rows when scores are equal) go to another, and a third launch passes all their blocks with a
running window. All are exact, and a row's path depends on the row alone. Rows that have no more
blocks than candidates are certain; where all rows are so, the first launch is the only one.
"""

import triton
import triton.language as tl

from .primitives import (
    BAD_SCORE,
    CLAMP,
    EMPTY,
    best_of,
    best_of_rows,
    final_score,
    finish_selection,
    follow,
    pack_score,
    unpack_index,
)

NO_GROUP = tl.constexpr(255)
FEW = tl.constexpr(4)  # doubtful groups of a row that the second launch looks at, a byte each
MOST = 16  # largest window
LISTED = tl.constexpr(3)  # int32 of a row of its list: row, sequence, groups


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
def _queries(query_ptr, i, ok, d, D: tl.constexpr):
    """[TILE, DP]: index queries of rows i; zeros where not ok."""
    return tl.load(
        query_ptr + i.to(tl.int64)[:, None] * D + d[None, :],
        mask=ok[:, None] & (d[None, :] < D),
        other=0.0,
    )


@triton.jit
def _keys(summary, block, ok, d, D: tl.constexpr):
    """[DP, GROUPS]: summaries of one sequence's blocks; zeros where not ok."""
    return tl.load(
        summary + block[None, :] * D + d[:, None],
        mask=ok[None, :] & (d[:, None] < D),
        other=0.0,
    )


@triton.jit
def _into_window(held, new):
    """[R, W] the held keys with the better ones of new [R, N] in the place of the worst. Keys
    differ, but EMPTY in new, which is worse than any held.
    """
    best = tl.max(new, 1)
    worst = tl.min(held, 1)
    while tl.max((best > worst).to(tl.int32), 0) > 0:
        better = best > worst
        held = tl.where((held == worst[:, None]) & better[:, None], best[:, None], held)
        new = tl.where(new == best[:, None], EMPTY, new)
        best = tl.max(new, 1)
        worst = tl.min(held, 1)
    return held


@triton.jit
def _end_rows(
    best, i, live, pos, ids_ptr, bias_ptr, floor, inv_sigma, BLOCK: tl.constexpr,
    TOPK: tl.constexpr, WINDOW: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Ids and biases of rows i [R] from their best keys [R, W]."""
    w = tl.arange(0, W)
    ids, bias = finish_selection(
        best, tl.minimum(pos // BLOCK + 1, WINDOW), floor, inv_sigma, TOPK, WINDOW, W
    )
    out = i.to(tl.int64)[:, None] * TOPK + w[None, :]
    out_ok = live[:, None] & (w[None, :] < TOPK)
    tl.store(ids_ptr + out, ids, mask=out_ok)
    tl.store(bias_ptr + out, bias, mask=out_ok)


@triton.jit
def _empty_padding(pos_ptr, ids_ptr, bias_ptr, num_rows, TOPK, W: tl.constexpr, TILE: tl.constexpr):
    """No blocks for the padding among this program's share of all rows."""
    w = tl.arange(0, W)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    padding = tl.load(pos_ptr + row, mask=row < num_rows, other=0) < 0
    out = row.to(tl.int64)[:, None] * TOPK + w[None, :]
    out_ok = padding[:, None] & (w[None, :] < TOPK)
    tl.store(ids_ptr + out, tl.full((TILE, W), -1, tl.int32), mask=out_ok)
    tl.store(bias_ptr + out, tl.zeros((TILE, W), tl.float32), mask=out_ok)


@triton.jit(do_not_specialize=["num_rows"])
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
    few_ptr,
    best_ptr,
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
    ALONE: tl.constexpr,
    STAGES: tl.constexpr,
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of rows of one class: one pass over its blocks, the window's best, the finish;
    doubtful rows to one of the lists.

    ALONE: no sequence has more than 2 * GROUPS blocks, so no row is doubtful, and no launch follows
    that empties the padding.
    """
    follow(PDL)
    if ALONE:
        _empty_padding(pos_ptr, ids_ptr, bias_ptr, num_rows, TOPK, W, TILE)
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
        query = _queries(query_ptr, i, live, d, D)
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
        if ALONE:  # every score is clamped, so that every row is certain
            common = begin
        else:
            for o in tl.range(begin, common, GROUPS, num_stages=STAGES):
                block = o + n
                key = _keys(summary, block, n >= 0, d, D)
                raw = tl.dot(query, key, input_precision="ieee")
                score = raw * root * factor  # final_score while no clamp bites
                one, one_at, two, two_at, third = _keep_two(
                    score, o, one, one_at, two, two_at, third
                )
        for o in tl.range(tl.maximum(begin, common), final + 1, GROUPS, num_stages=1):
            block = o + n
            key = _keys(summary, block, block <= final, d, D)
            score = final_score(tl.dot(query, key, input_precision="ieee"), factor, D)
            ok = _allowed(block, first, last, page, ranges, False)
            if HAS_PAGES:  # noqa: SIM102 - a constant, no part of a condition on values
                if tl.max(page, 0) > 0:
                    ok = _allowed(block, first, last, page, ranges, True)
            score = tl.where(ok, score, float("-inf"))
            one, one_at, two, two_at, third = _keep_two(score, o, one, one_at, two, two_at, third)

        w = tl.arange(0, W)
        best = tl.full((TILE, W), EMPTY, tl.int64)
        one_at = one_at + n[None, :]
        two_at = two_at + n[None, :]
        most = tl.max(one, 1)
        least = most
        blocks = final + 1 - tl.min(first, 0)
        for k in range(tl.minimum(blocks, WINDOW)):  # with fewer blocks the last taken is the last
            least = tl.max(one, 1)
            block = tl.min(tl.where(one == least[:, None], one_at, 0x7FFFFFFF), 1)
            key = tl.where(least > float("-inf"), pack_score(least, block), EMPTY)
            best = tl.where(w[None, :] == k, key[:, None], best)
            taken = one_at == block[:, None]
            one = tl.where(taken, two, one)
            one_at = tl.where(taken, two_at, one_at)
            two = tl.where(taken, float("-inf"), two)
        if not ALONE:
            # Where every row may choose a block the clamp and NaN were not looked at: neither can
            # be among the best while the last one taken lies above both, and the first below the
            # clamp.
            left_out = tl.max(third, 1)
            bound = tl.abs(factor) * CLAMP
            plain = (least > tl.maximum(-bound, BAD_SCORE)) & (most < bound)
            certain = plain & (left_out < least)
            certain = certain | ((common <= begin) & (left_out == float("-inf")))
            doubtful = live & (certain == 0)
            if tl.max(doubtful.to(tl.int32), 0) > 0:
                reached = (third >= least[:, None]).to(tl.int32)
                packed = tl.zeros((TILE,), tl.int32)
                for _ in tl.static_range(FEW):
                    group = tl.min(tl.where(reached > 0, n[None, :], NO_GROUP), 1)
                    packed = (packed << 8) | group
                    reached = tl.where(n[None, :] == group[:, None], 0, reached)
                few = doubtful & plain & (tl.max(reached, 1) == 0)
                one_few = few.to(tl.int32)
                count = tl.sum(one_few, 0)
                place = tl.atomic_add(redo_count_ptr, count, sem="relaxed", mask=count > 0)
                place = place + tl.cumsum(one_few, 0) - one_few
                tl.store(few_ptr + place * LISTED, i, mask=few)
                tl.store(few_ptr + place * LISTED + 1, seq, mask=few)
                tl.store(few_ptr + place * LISTED + 2, packed, mask=few)
                keys = best_ptr + place.to(tl.int64)[:, None] * (2 * W) + w[None, :]
                tl.store(keys, (best >> 32).to(tl.int32), mask=few[:, None])
                tl.store(keys + W, best.to(tl.int32), mask=few[:, None])
                redo = (doubtful & (few == 0)).to(tl.int32)
                many = tl.sum(redo, 0)
                place = tl.atomic_add(redo_count_ptr + 1 + seq, many, sem="relaxed", mask=many > 0)
                place = tl.load(record + 5) + place + tl.cumsum(redo, 0) - redo
                tl.store(redo_ptr + place, i, mask=redo > 0)
        _end_rows(best, i, live, pos, ids_ptr, bias_ptr, floor, inv_sigma, BLOCK, TOPK, WINDOW, W)


@triton.jit
def select_group_kernel(
    query_ptr,
    summary_ptr,
    range_ptr,
    first_ptr,
    last_ptr,
    page_ptr,
    pos_ptr,
    ids_ptr,
    bias_ptr,
    redo_count_ptr,
    few_ptr,
    best_ptr,
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
    PDL: tl.constexpr,
):
    """Rows of the list, one after another: all blocks of their doubtful groups beside the best of
    the other groups. Scores come from products of the first pass's shape, its rows all the same.
    """
    follow(PDL)
    w = tl.arange(0, W)
    d = tl.arange(0, DP)
    n = tl.arange(0, GROUPS)
    free = tl.full((1, W), EMPTY, tl.int64) + w[None, :]  # differ: one at a time is taken
    same = tl.zeros((TILE,), tl.int32)
    for e in range(tl.program_id(0), tl.load(redo_count_ptr), tl.num_programs(0)):
        i = tl.load(few_ptr + e * LISTED)
        seq = tl.load(few_ptr + e * LISTED + 1).to(tl.int64)
        packed = tl.load(few_ptr + e * LISTED + 2)
        keys = best_ptr + tl.full((), 2 * W, tl.int64) * e + w[None, :]
        held = tl.load(keys).to(tl.int64) << 32
        held = held | (tl.load(keys + W).to(tl.int64) & 0xFFFFFFFF)
        held = tl.where(held == EMPTY, free, held)
        first = tl.load(first_ptr + i)
        last = tl.load(last_ptr + i)
        page = tl.load(page_ptr + i)
        pos = tl.load(pos_ptr + i)
        query = _queries(query_ptr, same + i, same == 0, d, D)
        summary = summary_ptr + seq * stride_sr
        ranges = range_ptr + seq * stride_rr
        for k in range(FEW):
            group = (packed >> (8 * k)) & 255
            if group != NO_GROUP:
                held = tl.where(unpack_index(held) % GROUPS == group, free, held)
                for o in tl.range(group, last + 1, GROUPS * GROUPS, num_stages=1):
                    block = o + n * GROUPS
                    ok = (block >= first) & (block <= last)
                    key = _keys(summary, block, ok, d, D)
                    raw = tl.dot(query, key, input_precision="ieee")
                    raw = tl.max(raw, 0, keep_dims=True)
                    if HAS_PAGES:
                        near = ok & (page > 0)
                        low = tl.load(ranges + block * 2, mask=near, other=0)
                        high = tl.load(ranges + block * 2 + 1, mask=near, other=0)
                        ok = ok & ((page <= 0) | ((low <= page) & (page <= high)))
                    new = pack_score(final_score(raw, factor, D), block[None, :])
                    new = tl.where(ok[None, :], new, EMPTY)
                    held = _into_window(held, new)
        held = best_of(tl.max(tl.where(held <= EMPTY + W, EMPTY, held), 0), W, W)
        row = tl.full((1,), 0, tl.int32)
        best = tl.reshape(held, (1, W))
        _end_rows(
            best, row + i, row == 0, row + pos, ids_ptr, bias_ptr, floor, inv_sigma, BLOCK, TOPK,
            WINDOW, W)  # fmt: skip


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
    PDL: tl.constexpr,
):
    """The rows of the list by a running window, which takes whatever scores come. Also empties the
    padding rows.
    """
    follow(PDL)
    _empty_padding(pos_ptr, ids_ptr, bias_ptr, num_rows, TOPK, W, TILE)
    w = tl.arange(0, W)
    record = tile_ptr + tl.program_id(0) * FIELDS
    seq = tl.load(record)
    begin = tl.load(record + 4) * TILE
    count = tl.load(redo_count_ptr + 1 + seq, mask=seq >= 0, other=0)
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
        query = _queries(query_ptr, i, live, d, D)
        summary = summary_ptr + seq.to(tl.int64) * stride_sr
        ranges = range_ptr + seq.to(tl.int64) * stride_rr
        final = tl.max(last, 0)
        # free places differ, so that one at a time is taken; they lie below every real key
        held = tl.full((TILE, W), EMPTY, tl.int64) + w[None, :]
        if W > WINDOW:
            held = tl.where(w[None, :] < WINDOW, held, 0x7FFFFFFFFFFFFFFF)
        for o in range(tl.min(first, 0) // GROUPS * GROUPS, final + 1, GROUPS):
            block = o + n
            key = _keys(summary, block, block <= final, d, D)
            score = final_score(tl.dot(query, key, input_precision="ieee"), factor, D)
            ok = _allowed(block, first, last, page, ranges, False)
            if HAS_PAGES:
                own = _allowed(block, first, last, page, ranges, True)
                ok = tl.where(page[:, None] > 0, own, ok)
            new = tl.where(
                ok, pack_score(score, tl.broadcast_to(block[None, :], (TILE, GROUPS))), EMPTY
            )
            held = _into_window(held, new)
        held = tl.where((held <= EMPTY + W) | (held == 0x7FFFFFFFFFFFFFFF), EMPTY, held)
        best = best_of_rows(held, W, W)
        _end_rows(best, i, live, pos, ids_ptr, bias_ptr, floor, inv_sigma, BLOCK, TOPK, WINDOW, W)
