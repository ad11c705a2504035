"""Selection for rows that are each alone in their sequence: exact for every input, any context, any
page length.

A program scores tiles of blocks. A row with a page of its own finds the page's run of blocks
through the stored start of the page; a run of up to NARROW blocks, or a context of one tile, is
ended by one program. Else scores go to memory and the row's last program (an atomic ticket, or a
second launch) finds the best score of every GROUP of 16 blocks, the 16 best groups and in them the
16 best blocks. The 16 best blocks always lie in the 16 groups whose best is best, so nothing can
overflow and ties need no care.
"""

import triton
import triton.language as tl

from .primitives import (
    COUNT,
    EMPTY,
    NUMBERS,
    RANGE,
    ROLE,
    best_of,
    final_score,
    finish_selection,
    gdc_launch_dependents,
    head_at,
    pack_score,
    read_int32,
    read_int32s,
    token_at,
    unpack_index,
    widened,
)
from .store import angles_of, row_coordinates, store_row

GROUP = tl.constexpr(16)


@triton.jit
def _holds(blk, ok, wanted, role_hit, n, aux_ptr, table_ptr, range_ptr, max_blocks, stride_cb,
           stride_ct,
           D: tl.constexpr, P: tl.constexpr, BS: tl.constexpr, SIDE: tl.constexpr):  # fmt: skip
    """Do blocks of page `wanted`'s run hold an image of it? Strictly between a block's smallest and
    largest page there is only a page that lies wholly in that block; then role_hit says."""
    if SIDE:
        low = tl.load(range_ptr + (n * max_blocks + blk) * 2, mask=ok, other=0)
        high = tl.load(range_ptr + (n * max_blocks + blk) * 2 + 1, mask=ok, other=0)
    else:
        pages = read_int32s(
            aux_ptr + token_at(table_ptr, blk * BS, ok, stride_cb, stride_ct, P) + D + RANGE, ok
        )
        low, high = pages & 0xFFFF, (pages >> 16) & 0xFFFF
    return ok & (low <= wanted) & (wanted <= high) & ((low == wanted) | (high == wanted) | role_hit)


@triton.jit
def _summaries(
    blk, ok, at, n, aux_ptr, table_ptr, side_ptr, max_blocks, stride_cb, stride_ct,
    D: tl.constexpr, HP: tl.constexpr, P: tl.constexpr, BS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Both halves [TILE, HP] of the summaries of blocks that begin at offsets `at` of the cache."""
    half = tl.arange(0, HP)
    both = ok[:, None] & (half < D // 2)[None, :]
    if SIDE:
        first = side_ptr + ((n * max_blocks + blk) * D)[:, None] + half[None, :]
        second = first + D // 2
    else:
        first = (aux_ptr + at + (D + D // 2))[:, None] + half[None, :]
        second = first + stride_ct
        if P == 1:
            next_at = token_at(table_ptr, blk * BS + 1, ok, stride_cb, stride_ct, P)
            second = (aux_ptr + next_at + (D + D // 2))[:, None] + half[None, :]
    return tl.load(first, mask=both, other=0.0), tl.load(second, mask=both, other=0.0)


@triton.jit
def _scores(ok, k0, k1, q0, q1, factor, D: tl.constexpr):
    """Scores float32 [TILE] of blocks with these summaries; -inf where not ok."""
    k0, k1 = k0.to(tl.float32), k1.to(tl.float32)
    score = final_score(tl.sum(k0 * q0[None, :] + k1 * q1[None, :], 1), factor, D)
    return tl.where(ok, score, float("-inf"))


@triton.jit
def _pack(score, index):
    """Keys; EMPTY where the score is -inf."""
    return tl.where(score > float("-inf"), pack_score(score, index), EMPTY)


@triton.jit
def _finish(
    best,
    p,
    n,
    ids_ptr,
    bias_ptr,
    floor,
    inv_sigma,
    TOPK: tl.constexpr,
    WINDOW: tl.constexpr,
    BS: tl.constexpr,
):
    w = tl.arange(0, 16)[None, :]
    entries = tl.full((1,), 0, tl.int32) + tl.minimum(p // BS + 1, WINDOW)
    ids, bias = finish_selection(best[None, :], entries, floor, inv_sigma, TOPK, WINDOW, 16)
    tl.store(ids_ptr + n * TOPK + w, ids, mask=w < TOPK)
    tl.store(bias_ptr + n * TOPK + w, bias, mask=w < TOPK)


@triton.jit
def _group_maxima(groups, score_ptr, group_ptr, CHUNK: tl.constexpr):
    """The best score of every group, for this program alone to read."""
    for o in range(0, groups, CHUNK):
        i = o + tl.arange(0, CHUNK)
        at = i[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        ok = (i < groups)[:, None] & (at >= 0)
        score = tl.load(score_ptr + at, mask=ok, other=float("-inf"), cache_modifier=".cg")
        tl.store(group_ptr + i, tl.max(score, 1), mask=i < groups)
    tl.debug_barrier()


@triton.jit
def _merge(p, n, first, tiles, score_ptr, group_ptr, ids_ptr, bias_ptr, floor, inv_sigma,
           max_scores, TILE: tl.constexpr, CHUNK: tl.constexpr, TOPK: tl.constexpr,
           WINDOW: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """The 16 best groups, then the 16 best blocks in them. Of two groups with the same best score
    the lower one has the lower block of that score.
    """
    groups = tiles * (TILE // GROUP)
    score_ptr += n * max_scores
    group_ptr += n * (max_scores // GROUP)
    _group_maxima(groups, score_ptr, group_ptr, CHUNK)
    i = tl.arange(0, CHUNK)
    top = tl.load(group_ptr + i, mask=i < groups, other=float("-inf"), cache_modifier=".cg")
    best = best_of(_pack(top, i), CHUNK, 16)
    for o in range(CHUNK, groups, CHUNK):
        ok = o + i < groups
        top = tl.load(group_ptr + o + i, mask=ok, other=float("-inf"), cache_modifier=".cg")
        more = best_of(_pack(top, o + i), CHUNK, 16)
        best = best_of(tl.reshape(tl.join(best, more), (32,)), 32, 16)
    at = unpack_index(best)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [16, GROUP]
    ok = (best > EMPTY)[:, None] & (at >= 0)
    score = tl.load(score_ptr + at, mask=ok, other=float("-inf"), cache_modifier=".cg")
    keys = _pack(score, first + at)
    best = best_of(tl.reshape(keys, (16 * GROUP,)), 16 * GROUP, 16)
    _finish(best, p, n, ids_ptr, bias_ptr, floor, inv_sigma, TOPK, WINDOW, BS)


@triton.jit
def select_row(
    n, s, iq_ptr, cache_ptr, turn_ptr, row_pos_ptr, roles_ptr, positions_ptr, table_ptr, pages_ptr,
    side_ptr, range_ptr,
    score_ptr, group_ptr, ticket_ptr, ids_ptr, bias_ptr, num_rows, max_blocks, max_scores,
    scale, floor, inv_sigma, stride_iqn, stride_cb, stride_ch, stride_ct, stride_table,
    stride_pages,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, P: tl.constexpr, BS: tl.constexpr,
    BT: tl.constexpr,
    PAGE_MOD: tl.constexpr, POSITIONS: tl.constexpr, PAGE_TABLE: tl.constexpr, ROTATE: tl.constexpr,
    SIDE: tl.constexpr,
    LOCAL: tl.constexpr, TOPK: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr, TICKET: tl.constexpr, AHEAD: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """Split s of row n. ROTATE: iq is not rotated yet and the row may not be stored yet: its
    coordinates come from before.
    """
    n = n.to(tl.int64)
    p = tl.load(row_pos_ptr + n)
    ok = p >= 0
    aux_ptr = cache_ptr + head_at(H, stride_ch)
    table_ptr += n * stride_table
    pages_ptr += n * stride_pages
    remote = tl.maximum(p // BS - LOCAL + 1, 0)  # p = -1: none
    remote = tl.minimum(remote, max_scores)
    i = tl.arange(0, TILE)
    half = tl.arange(0, HP)
    h_ok = half < D // 2
    # What does not wait for the row's state is asked for first: the query, and where the blocks of
    # a scan lie.
    query = iq_ptr + n * stride_iqn + half
    q0 = tl.load(query, mask=h_ok & ok, other=0.0).to(tl.float32)
    q1 = tl.load(query + D // 2, mask=h_ok & ok, other=0.0).to(tl.float32)
    blk = s * TILE + i
    at = token_at(table_ptr, blk * BS, blk < remote, stride_cb, stride_ct, P)
    if AHEAD:
        next_at = token_at(
            table_ptr, (blk + SPLIT * TILE) * BS, blk + SPLIT * TILE < remote, stride_cb, stride_ct,
            P)  # fmt: skip
        k0, k1 = _summaries(
            blk, blk < remote, at, n, aux_ptr, table_ptr, side_ptr, max_blocks, stride_cb,
            stride_ct, D, HP, P, BS, SIDE)  # fmt: skip
    if ROTATE:
        tok, page, num_pages, query_page, _extra = row_coordinates(
            n, p, ok, aux_ptr, table_ptr, positions_ptr, pages_ptr, roles_ptr, num_rows, stride_cb,
            stride_ct, stride_pages,
            D, P, POSITIONS, PAGE_TABLE)  # fmt: skip
        cos, sin = angles_of(tok, page, turn_ptr, half, h_ok, D, PAGE_MOD)
        turned0, turned1 = q0 * cos - q1 * sin, q1 * cos + q0 * sin
        q0 = widened(turned0.to(iq_ptr.dtype.element_ty))
        q1 = widened(turned1.to(iq_ptr.dtype.element_ty))
    else:
        state_ptr = aux_ptr + token_at(table_ptr, p, ok, stride_cb, stride_ct, P) + D + 2
        num_pages, query_page = read_int32(state_ptr + 8, ok), read_int32(state_ptr + 12, ok)

    # The run of blocks to score: all remote ones, or those of the row's page.
    first = p * 0
    count = remote
    wanted = first
    role_hit = first > 0
    j = tl.arange(0, NARROW)
    held = j < 0  # of a run of up to NARROW: which blocks hold an image of the page
    if (query_page >= 0) & (remote > 0):
        g = query_page + 1
        if PAGE_TABLE:
            asked = (g > 0) & (g <= num_pages) & (g < stride_pages // 2)
            begin = tl.load(pages_ptr + g * 2, mask=asked, other=0)
            length = tl.load(pages_ptr + g * 2 + 1, mask=asked, other=0)
        else:
            asked = (g > 0) & (g <= num_pages) & (g < p)  # a state of nonsense may wrap around
            count_ptr = aux_ptr + token_at(table_ptr, g, asked, stride_cb, stride_ct, P) + D + COUNT
            length, begin = read_int32(count_ptr, asked), read_int32(count_ptr + 4, asked)
        low = begin // BS
        high = tl.minimum((begin + length - 1) // BS, remote - 1)
        if (length > 0) & (begin >= 0) & (low <= high):
            if low == high:
                t = tl.arange(0, BT)
                token = low * BS + t
                inside = (t < BS) & (token >= begin) & (token < begin + length)
                role_at = token_at(table_ptr, token, inside, stride_cb, stride_ct, P)
                role = tl.load(aux_ptr + role_at + D + ROLE, mask=inside, other=0.0)
                role_hit = tl.max((role == 1.0).to(tl.int32), 0) > 0
            o = low
            found = low * 0
            while (o <= high) & (found == 0):
                run = o + j
                held = _holds(
                    run, run <= high, g, role_hit, n, aux_ptr, table_ptr, range_ptr, max_blocks,
                    stride_cb, stride_ct, D, P, BS, SIDE)  # fmt: skip
                found = tl.max(held.to(tl.int32), 0)
                o += NARROW
            if found > 0:
                first = low
                count = high - low + 1
                wanted = g

    tiles = (count + TILE - 1) // TILE
    active = tl.maximum(tl.minimum(tiles, SPLIT), 1)
    if (wanted > 0) & (count <= NARROW):
        if s == 0:
            run_at = token_at(table_ptr, (first + j) * BS, held, stride_cb, stride_ct, P)
            r0, r1 = _summaries(
                first + j, held, run_at, n, aux_ptr, table_ptr, side_ptr, max_blocks, stride_cb,
                stride_ct, D, HP, P, BS, SIDE)  # fmt: skip
            few = _scores(held, r0, r1, q0, q1, scale * (D**-0.5), D)
            few_best = best_of(_pack(few, first + j), NARROW, 16)
            _finish(few_best, p, n, ids_ptr, bias_ptr, floor, inv_sigma, TOPK, WINDOW, BS)
            if TICKET == 0:
                tl.store(ticket_ptr + n * 2, 0)
    elif s < active:
        factor = scale * (D**-0.5)
        blk = first + s * TILE + i
        b_ok = blk < first + count
        if wanted > 0:
            at = token_at(table_ptr, blk * BS, b_ok, stride_cb, stride_ct, P)
            if AHEAD:
                more = blk + SPLIT * TILE
                next_at = token_at(
                    table_ptr, more * BS, more < first + count, stride_cb, stride_ct, P
                )
                k0, k1 = _summaries(
                    blk, b_ok, at, n, aux_ptr, table_ptr, side_ptr, max_blocks, stride_cb,
                    stride_ct, D, HP, P, BS, SIDE)  # fmt: skip
        if tiles <= 1:
            if wanted > 0:
                b_ok = _holds(
                    blk, b_ok, wanted, role_hit, n, aux_ptr, table_ptr, range_ptr, max_blocks,
                    stride_cb, stride_ct, D, P, BS, SIDE)  # fmt: skip
            if AHEAD == 0:
                k0, k1 = _summaries(
                    blk, b_ok, at, n, aux_ptr, table_ptr, side_ptr, max_blocks, stride_cb,
                    stride_ct, D, HP, P, BS, SIDE)  # fmt: skip
            score = _scores(b_ok, k0, k1, q0, q1, factor, D)
            best = best_of(_pack(score, blk), TILE, 16)
            _finish(best, p, n, ids_ptr, bias_ptr, floor, inv_sigma, TOPK, WINDOW, BS)
            if TICKET == 0:
                tl.store(ticket_ptr + n * 2, 0)
        else:
            for t in tl.range(s, tiles, SPLIT, num_stages=1):
                blk = first + t * TILE + i
                b_ok = blk < first + count
                more = blk + SPLIT * TILE
                more_ok = more < first + count
                if wanted > 0:
                    b_ok = _holds(
                        blk, b_ok, wanted, role_hit, n, aux_ptr, table_ptr, range_ptr, max_blocks,
                        stride_cb, stride_ct, D, P, BS, SIDE)  # fmt: skip
                if AHEAD:
                    next0, next1 = _summaries(
                        more, more_ok, next_at, n, aux_ptr, table_ptr, side_ptr, max_blocks,
                        stride_cb, stride_ct, D, HP, P, BS, SIDE)  # fmt: skip
                    more += SPLIT * TILE
                    next_at = token_at(
                        table_ptr, more * BS, more < first + count, stride_cb, stride_ct, P
                    )
                    score = _scores(b_ok, k0, k1, q0, q1, factor, D)
                    k0, k1 = next0, next1
                else:
                    k0, k1 = _summaries(
                        blk, b_ok, at, n, aux_ptr, table_ptr, side_ptr, max_blocks, stride_cb,
                        stride_ct, D, HP, P, BS, SIDE)  # fmt: skip
                    at = token_at(table_ptr, more * BS, more_ok, stride_cb, stride_ct, P)
                    score = _scores(b_ok, k0, k1, q0, q1, factor, D)
                tl.store(score_ptr + n * max_scores + t * TILE + i, score)
            if TICKET:
                tl.debug_barrier()  # every thread's stores before the one thread's atomic
                if tl.atomic_add(ticket_ptr + n, 1, sem="acq_rel", scope="gpu") == active - 1:
                    tl.store(ticket_ptr + n, 0)
                    _merge(
                        p, n, first, tiles, score_ptr, group_ptr, ids_ptr, bias_ptr, floor,
                        inv_sigma, max_scores, TILE, CHUNK, TOPK, WINDOW, BS)  # fmt: skip
            else:
                if s == 0:
                    tl.store(ticket_ptr + n * 2, tiles)
                    tl.store(ticket_ptr + n * 2 + 1, first)


@triton.jit(do_not_specialize=NUMBERS)
def select_decode_kernel(
    iq_ptr, cache_ptr, turn_ptr, row_pos_ptr, roles_ptr, positions_ptr, table_ptr, pages_ptr,
    side_ptr, range_ptr,
    score_ptr, group_ptr, ticket_ptr, ids_ptr, bias_ptr, num_rows, max_blocks, max_scores,
    scale, floor, inv_sigma, stride_iqn, stride_cb, stride_ch, stride_ct, stride_table,
    stride_pages,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, P: tl.constexpr, BS: tl.constexpr,
    BT: tl.constexpr,
    PAGE_MOD: tl.constexpr, POSITIONS: tl.constexpr, PAGE_TABLE: tl.constexpr, SIDE: tl.constexpr,
    LOCAL: tl.constexpr, TOPK: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr, TICKET: tl.constexpr, AHEAD: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """Grid SPLIT * N. Rows are stored and iq is rotated.

    score   float32 [N, max_scores], group float32 [N, max_scores / GROUP]: scratch, max_scores a
            multiple of TILE
    ticket  int32 [N], zero between launches; without TICKET int32 [N, 2] for select_merge_kernel:
            tiles (0: done), first
    ids     int32 [N, TOPK], bias float32 [N, TOPK]
    """
    select_row(
        tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT, iq_ptr, cache_ptr, turn_ptr,
        row_pos_ptr, roles_ptr,
        positions_ptr, table_ptr, pages_ptr, side_ptr, range_ptr, score_ptr, group_ptr, ticket_ptr,
        ids_ptr, bias_ptr,
        num_rows, max_blocks, max_scores, scale, floor, inv_sigma, stride_iqn, stride_cb, stride_ch,
        stride_ct,
        stride_table, stride_pages, H, D, HP, P, BS, BT, PAGE_MOD, POSITIONS, PAGE_TABLE, False,
        SIDE, LOCAL, TOPK,
        WINDOW, TILE, SPLIT, CHUNK, TICKET, AHEAD, NARROW)  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def select_merge_kernel(
    row_pos_ptr, score_ptr, group_ptr, ticket_ptr, ids_ptr, bias_ptr, max_scores, floor, inv_sigma,
    BS: tl.constexpr, TOPK: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid N: the end of select_decode_kernel for rows of several tiles, where a ticket is not
    allowed.
    """
    n = tl.program_id(0).to(tl.int64)
    tiles = tl.load(ticket_ptr + n * 2)
    if tiles > 0:
        _merge(tl.load(row_pos_ptr + n), n, tl.load(ticket_ptr + n * 2 + 1), tiles, score_ptr,
               group_ptr, ids_ptr,
               bias_ptr, floor, inv_sigma, max_scores, TILE, CHUNK, TOPK, WINDOW, BS)  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def store_select_kernel(
    q_ptr, k_ptr, v_ptr, iq_ptr, ik_ptr, cache_ptr, head_cls_ptr, scale, floor,
    stride_qn, stride_kn, stride_vn, stride_iqn, stride_ikn, stride_cb, stride_ch, stride_ct,
    query_ptr, index_ptr, turn_ptr, row_pos_ptr, slots_ptr, roles_ptr, positions_ptr, table_ptr,
    pages_ptr, score_ptr, group_ptr, ticket_ptr, ids_ptr, bias_ptr,
    num_rows, max_scores, inv_sigma, stride_table, stride_pages,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, P: tl.constexpr,
    BS: tl.constexpr,
    BT: tl.constexpr, PAGE_MOD: tl.constexpr, POSITIONS: tl.constexpr, PAGE_TABLE: tl.constexpr,
    HEAD_CLS: tl.constexpr,
    LOCAL: tl.constexpr, TOPK: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr, TICKET: tl.constexpr, AHEAD: tl.constexpr,
    NARROW: tl.constexpr, HEADS: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (SPLIT + PARTS + 1) * N: both stages at once, from trusted summaries. The longer ones,
    those that select, come first.

    Selection rotates its own query and reads nothing that this launch writes: a block completed now
    is not remote yet, and coordinates and page starts come from earlier rows.
    """
    if PDL:
        gdc_launch_dependents()
    x = tl.program_id(0)
    if x < SPLIT * num_rows:
        select_row(
            x // SPLIT, x % SPLIT, iq_ptr, cache_ptr, turn_ptr, row_pos_ptr, roles_ptr,
            positions_ptr, table_ptr, pages_ptr, cache_ptr,
            row_pos_ptr, score_ptr, group_ptr, ticket_ptr, ids_ptr, bias_ptr, num_rows, 0,
            max_scores,
            scale, floor, inv_sigma, stride_iqn, stride_cb, stride_ch, stride_ct, stride_table,
            stride_pages,
            H, D, HP, P, BS, BT, PAGE_MOD, POSITIONS, PAGE_TABLE, True, False, LOCAL, TOPK, WINDOW,
            TILE, SPLIT, CHUNK,
            TICKET, AHEAD, NARROW)  # fmt: skip
    else:
        x -= SPLIT * num_rows
        store_row(
            x // (PARTS + 1), x % (PARTS + 1), q_ptr, k_ptr, v_ptr, iq_ptr, ik_ptr, query_ptr,
            index_ptr, cache_ptr,
            head_cls_ptr, turn_ptr,
            row_pos_ptr, slots_ptr, roles_ptr, positions_ptr, table_ptr, pages_ptr, row_pos_ptr,
            num_rows,
            stride_qn, stride_kn, stride_vn, stride_iqn, stride_ikn, stride_cb, stride_ch,
            stride_ct, stride_table,
            stride_pages, H, G, D, HP, P, BS, BT, PAGE_MOD, POSITIONS, PAGE_TABLE,
            HEAD_CLS, HEADS, PARTS, False)  # fmt: skip
