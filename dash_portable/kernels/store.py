"""Store, for rows that are each alone in their sequence: coordinates, rotation, and all that a row
leaves in the cache. The fused launch of decode uses `store_row` too; steps with several rows a
sequence are in `store_tiles.py`.
"""

import triton
import triton.language as tl

from .primitives import (
    COUNT,
    NUMBERS,
    RANGE,
    ROLE,
    STATE,
    cos_sin,
    head_at,
    read_int32,
    read_int32s,
    slot_at,
    token_at,
    widened,
    write_int32,
)
from .summaries import page_range, summarize

UNKNOWN_END = tl.constexpr(
    0x7FFFFFFF
)  # the last image's page is not stored yet: every token so far is the prompt's


@triton.jit
def rotated(low, high, cos, sin):
    low, high = low.to(tl.float32), high.to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def angles_of(tok, page, turn_ptr, half, h_ok, D: tl.constexpr, PAGE_MOD: tl.constexpr):
    """cos and sin of all pairs; tok and page broadcast against half. The last pair turns with the
    page.
    """
    position = tl.where(half == D // 2 - 1, page % PAGE_MOD, tok)
    return cos_sin(position, tl.load(turn_ptr + half, mask=h_ok, other=0))


@triton.jit
def row_coordinates(
    n, p, ok, aux_ptr, table_ptr, positions_ptr, pages_ptr, roles_ptr, num_rows,
    stride_cb, stride_ct, stride_pages, D: tl.constexpr, P: tl.constexpr, POSITIONS: tl.constexpr,
    PAGE_TABLE: tl.constexpr,
):  # fmt: skip
    """tok, page, num_pages, query_page and positions[3] (0: a decoded token) of row n, the only one
    of its sequence.

    table_ptr and pages_ptr point at the sequence's own rows. What the cache says of pages may be
    anything: nothing is read beyond the page table or the tokens before p. POSITIONS 0: none given;
    1: of rows whose positions[3] is negative; 2: of all rows.
    """
    tok, page, num_pages, query_page, extra = p * 0 - 1, p * 0, p * 0, p * 0 - 1, p * 0
    given = p < -1  # never
    if POSITIONS > 0:
        extra = tl.load(positions_ptr + 3 * num_rows + n, mask=ok, other=0)
        given = ok & ((extra < 0) | (POSITIONS == 2))
        tok = tl.load(positions_ptr + n, mask=given, other=-1)
        raw = tl.load(positions_ptr + num_rows + n, mask=given, other=0)
        num_pages = tl.load(positions_ptr + 2 * num_rows + n, mask=given, other=0)
        page, query_page = tl.minimum(raw, num_pages), raw - 1
    if POSITIONS < 2:
        go = ok & (given == 0) & (p > 0)
        at = token_at(table_ptr, p - 1, go, stride_cb, stride_ct, P)
        byte = tl.arange(0, 16)
        word = (
            tl.load(aux_ptr + at + D + STATE + byte, mask=go & (byte < 16), other=0.0)
            .to(tl.float32)
            .to(tl.int32)
        )
        word = word << (byte % 4 * 8)
        tok = tl.where(
            go, tl.sum(tl.where(byte // 4 == 0, word, 0), 0) + 1, tl.where(given, tok, tok + 1)
        )
        page = tl.where(go, tl.sum(tl.where(byte // 4 == 1, word, 0), 0), page)
        num_pages = tl.where(go, tl.sum(tl.where(byte // 4 == 2, word, 0), 0), num_pages)
        query_page = tl.where(go, tl.sum(tl.where(byte // 4 == 3, word, 0), 0), query_page)
        marker = go & (tl.load(roles_ptr + n, mask=go, other=0) == 2)
        opened = tl.minimum(page + 1, num_pages)
        if PAGE_TABLE:
            listed = marker & (opened >= 0) & (opened < stride_pages // 2)
            count = tl.load(pages_ptr + opened * 2 + 1, mask=listed, other=0)
        else:
            asked = marker & (opened >= 0) & (opened < p)
            at = token_at(table_ptr, opened, asked, stride_cb, stride_ct, P)
            count = read_int32(aux_ptr + at + D + COUNT, asked)
        opens = marker & ((num_pages > 0) | (count > 0))
        tok = tl.where(opens, count, tok)
        page = tl.where(opens, opened, page)
        query_page = query_page + opens.to(tl.int32)
    return tok, page, num_pages, query_page, extra


@triton.jit
def state_bytes(byte, tok, page, num_pages, query_page):
    word = byte // 4
    value = tl.where(
        word == 0, tok, tl.where(word == 1, page, tl.where(word == 2, num_pages, query_page))
    )
    return ((value >> (byte % 4 * 8)) & 255).to(tl.float32)


@triton.jit
def image_end(aux_ptr, table_ptr, pages_ptr, num_pages, below, ok, stride_cb, stride_ct,
              stride_pages, D: tl.constexpr, P: tl.constexpr,
              PAGE_TABLE: tl.constexpr):  # fmt: skip
    """One past the last image: end of page num_pages, from the table (0 beyond it) or from row
    num_pages if it lies below `below`.
    """
    if PAGE_TABLE:
        listed = ok & (num_pages >= 0) & (num_pages < stride_pages // 2)
        start = tl.load(pages_ptr + num_pages * 2, mask=listed, other=0)
        return start + tl.load(pages_ptr + num_pages * 2 + 1, mask=listed, other=0)
    else:
        known = ok & (num_pages < below) & (num_pages >= 0)
        at = token_at(table_ptr, num_pages, known, stride_cb, stride_ct, P)
        end = read_int32(aux_ptr + at + D + COUNT, known) + read_int32(
            aux_ptr + at + D + COUNT + 4, known
        )
        return tl.where(known, end, UNKNOWN_END)


@triton.jit
def _store_heads(
    n, x, p, ok, row_at, q_ptr, k_ptr, v_ptr, query_ptr, cache_ptr, aux_ptr, turn_ptr, roles_ptr,
    positions_ptr, table_ptr, pages_ptr, num_rows, stride_qn, stride_kn, stride_vn, stride_cb,
    stride_ch, stride_ct, stride_pages, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    HP: tl.constexpr, P: tl.constexpr, PAGE_MOD: tl.constexpr, POSITIONS: tl.constexpr,
    PAGE_TABLE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """kv heads x * HEADS and following, with their query heads."""
    half = tl.arange(0, HP)
    h_ok = half < D // 2
    dtype = cache_ptr.dtype.element_ty
    # What does not wait for the coordinates is asked for before them.
    head = x * HEADS + tl.arange(0, HEADS)
    both = (head < H)[:, None] & h_ok[None, :]
    live = both & ok
    k_at = k_ptr + n * stride_kn + (head * D)[:, None] + half[None, :]
    k0 = tl.load(k_at, mask=live, other=0.0)
    k1 = tl.load(k_at + D // 2, mask=live, other=0.0)
    v_at = v_ptr + n * stride_vn + (head * D)[:, None] + half[None, :]
    v0 = tl.load(v_at, mask=live, other=0.0)
    v1 = tl.load(v_at + D // 2, mask=live, other=0.0)
    q_at = q_ptr + n * stride_qn + (head * (G * D))[:, None] + half[None, :]
    q0 = tl.load(q_at, mask=live, other=0.0)
    q1 = tl.load(q_at + D // 2, mask=live, other=0.0)
    tok, page, _num_pages, _query_page, _extra = row_coordinates(
        n, p, ok, aux_ptr, table_ptr, positions_ptr, pages_ptr, roles_ptr, num_rows,
        stride_cb, stride_ct, stride_pages, D, P, POSITIONS, PAGE_TABLE)  # fmt: skip
    cos, sin = angles_of(tok, page, turn_ptr, half, h_ok, D, PAGE_MOD)
    cos, sin = cos[None, :], sin[None, :]
    query_at = query_ptr + n * (H * G * D) + (head * (G * D))[:, None] + half[None, :]
    for g in tl.static_range(G):
        if g > 0:
            q0 = tl.load(q_at + g * D, mask=live, other=0.0)
            q1 = tl.load(q_at + g * D + D // 2, mask=live, other=0.0)
        low, high = rotated(q0, q1, cos, sin)
        tl.store(query_at + g * D, low.to(query_ptr.dtype.element_ty), mask=both)
        tl.store(query_at + g * D + D // 2, high.to(query_ptr.dtype.element_ty), mask=both)
    low, high = rotated(k0, k1, cos, sin)
    to = cache_ptr + row_at + head_at(head, stride_ch)[:, None] + half[None, :]
    tl.store(to, low.to(dtype), mask=live)
    tl.store(to + D // 2, high.to(dtype), mask=live)
    tl.store(to + D, v0.to(dtype), mask=live)
    tl.store(to + D + D // 2, v1.to(dtype), mask=live)


@triton.jit
def _store_auxiliary(
    n, p, ok, row_at, iq_ptr, ik_ptr, index_ptr, aux_ptr, head_cls_ptr, turn_ptr, roles_ptr,
    positions_ptr, table_ptr, pages_ptr, coords_ptr, num_rows, stride_iqn, stride_ikn, stride_cb,
    stride_ct, stride_pages, D: tl.constexpr, HP: tl.constexpr, P: tl.constexpr, BS: tl.constexpr,
    BT: tl.constexpr, PAGE_MOD: tl.constexpr, POSITIONS: tl.constexpr, PAGE_TABLE: tl.constexpr,
    HEAD_CLS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """The index key and state of the row, and what its block leaves when the row completes it."""
    half = tl.arange(0, HP)
    h_ok = half < D // 2
    live = h_ok & ok
    dtype = aux_ptr.dtype.element_ty
    iq_at = iq_ptr + n * stride_iqn + half
    q0 = tl.load(iq_at, mask=live, other=0.0)
    q1 = tl.load(iq_at + D // 2, mask=live, other=0.0)
    ik_at = ik_ptr + n * stride_ikn + half
    k0 = tl.load(ik_at, mask=live, other=0.0)
    k1 = tl.load(ik_at + D // 2, mask=live, other=0.0)
    tok, page, num_pages, query_page, extra = row_coordinates(
        n, p, ok, aux_ptr, table_ptr, positions_ptr, pages_ptr, roles_ptr, num_rows,
        stride_cb, stride_ct, stride_pages, D, P, POSITIONS, PAGE_TABLE)  # fmt: skip
    if KEEP:
        tl.store(coords_ptr + n * 4, tok)
        tl.store(coords_ptr + n * 4 + 1, page)
        tl.store(coords_ptr + n * 4 + 2, num_pages)
        tl.store(coords_ptr + n * 4 + 3, query_page)
    cos, sin = angles_of(tok, page, turn_ptr, half, h_ok, D, PAGE_MOD)
    low, high = rotated(q0, q1, cos, sin)
    to = index_ptr + n * D + half
    tl.store(to, low.to(index_ptr.dtype.element_ty), mask=h_ok)
    tl.store(to + D // 2, high.to(index_ptr.dtype.element_ty), mask=h_ok)
    low, high = rotated(k0, k1, cos, sin)
    key0, key1 = low.to(dtype), high.to(dtype)
    row_ptr = aux_ptr + row_at
    tl.store(row_ptr + half, key0, mask=live)
    tl.store(row_ptr + D // 2 + half, key1, mask=live)
    role = tl.load(roles_ptr + n, mask=ok, other=0)
    tl.store(row_ptr + D + ROLE, role.to(tl.float32).to(dtype), mask=ok)
    byte = tl.arange(0, 16)
    state = state_bytes(byte, tok, page, num_pages, query_page)
    tl.store(row_ptr + D + STATE + byte, state.to(dtype), mask=ok & (byte < 16))
    if POSITIONS > 0:
        counted = (extra < 0) & (p <= num_pages)
        if counted:  # a prompt row among the first: its page's count and start
            if PAGE_TABLE:
                start = tl.load(pages_ptr + p * 2, mask=p < stride_pages // 2, other=0)
            else:
                before = token_at(table_ptr, p - 1, p > 0, stride_cb, stride_ct, P)
                start = read_int32(aux_ptr + before + D + COUNT, p > 0)
                start += read_int32(aux_ptr + before + D + COUNT + 4, p > 0)
            write_int32(row_ptr + D + COUNT, -1 - extra, ok)
            write_int32(row_ptr + D + COUNT + 4, start, ok)
    if p % BS == BS - 1:
        i = tl.arange(0, BT)
        i_ok = i < BS - 1
        first = p - (BS - 1)
        old_at = token_at(table_ptr, first + i, i_ok, stride_cb, stride_ct, P)
        mine = (i == BS - 1)[:, None]
        if HEAD_CLS:
            key = aux_ptr + old_at[:, None] + half[None, :]
            old_ok = i_ok[:, None] & h_ok[None, :]
            old0 = tl.load(key, mask=old_ok, other=0.0)
            old1 = tl.load(key + D // 2, mask=old_ok, other=0.0)
            all0 = widened(tl.where(mine, key0[None, :], old0))
            all1 = widened(tl.where(mine, key1[None, :], old1))
            s0, s1 = summarize(all0, all1, i < BS, head_cls_ptr, half, h_ok, D)
        role_at = tl.where(
            i == BS - 1,
            role,
            tl.load(aux_ptr + old_at + D + ROLE, mask=i_ok, other=0.0).to(tl.int32),
        )
        page_at = tl.where(i == BS - 1, page, read_int32s(aux_ptr + old_at + D + STATE + 4, i_ok))
        end = image_end(
            aux_ptr,
            table_ptr,
            pages_ptr,
            num_pages,
            p,
            ok,
            stride_cb,
            stride_ct,
            stride_pages,
            D,
            P,
            PAGE_TABLE,
        )
        pages = page_range(role_at, page_at, (i < BS) & (first + i < end))
        begin = aux_ptr + token_at(table_ptr, first, ok, stride_cb, stride_ct, P)
        write_int32(begin + D + RANGE, pages, ok)
        if HEAD_CLS:
            second = aux_ptr + token_at(table_ptr, first + 1, ok, stride_cb, stride_ct, P)
            tl.store(begin + D + D // 2 + half, s0.to(dtype), mask=h_ok)
            tl.store(second + D + D // 2 + half, s1.to(dtype), mask=h_ok)


@triton.jit
def store_row(
    n, x, q_ptr, k_ptr, v_ptr, iq_ptr, ik_ptr, query_ptr, index_ptr, cache_ptr, head_cls_ptr,
    turn_ptr,
    row_pos_ptr, slots_ptr, roles_ptr, positions_ptr, table_ptr, pages_ptr, coords_ptr,
    num_rows,
    stride_qn, stride_kn, stride_vn, stride_iqn, stride_ikn, stride_cb, stride_ch, stride_ct,
    stride_table, stride_pages,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, P: tl.constexpr,
    BS: tl.constexpr,
    BT: tl.constexpr, PAGE_MOD: tl.constexpr, POSITIONS: tl.constexpr, PAGE_TABLE: tl.constexpr,
    HEAD_CLS: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Part x of row n, which is the only row of sequence n: HEADS kv heads with their query heads,
    or (x = PARTS) the auxiliary row. KEEP: its coordinates too.
    """
    n = n.to(tl.int64)
    p = tl.load(row_pos_ptr + n)
    ok = p >= 0
    slot = tl.load(slots_ptr + n, mask=ok, other=0).to(tl.int64)
    aux_ptr = cache_ptr + head_at(H, stride_ch)
    table_ptr += n * stride_table
    pages_ptr += n * stride_pages
    row_at = slot_at(slot, stride_cb, stride_ct, P)
    if x < PARTS:
        _store_heads(
            n, x, p, ok, row_at, q_ptr, k_ptr, v_ptr, query_ptr, cache_ptr, aux_ptr, turn_ptr,
            roles_ptr, positions_ptr, table_ptr, pages_ptr, num_rows, stride_qn, stride_kn,
            stride_vn, stride_cb, stride_ch, stride_ct, stride_pages, H, G, D, HP, P, PAGE_MOD,
            POSITIONS, PAGE_TABLE, HEADS)  # fmt: skip
    else:
        _store_auxiliary(
            n, p, ok, row_at, iq_ptr, ik_ptr, index_ptr, aux_ptr, head_cls_ptr, turn_ptr,
            roles_ptr, positions_ptr, table_ptr, pages_ptr, coords_ptr, num_rows, stride_iqn,
            stride_ikn, stride_cb, stride_ct, stride_pages, D, HP, P, BS, BT, PAGE_MOD, POSITIONS,
            PAGE_TABLE, HEAD_CLS, KEEP)  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def store_row_kernel(
    q_ptr, k_ptr, v_ptr, iq_ptr, ik_ptr, query_ptr, index_ptr, cache_ptr, head_cls_ptr, turn_ptr,
    row_pos_ptr, slots_ptr, roles_ptr, positions_ptr, table_ptr, pages_ptr, coords_ptr, num_rows,
    stride_qn, stride_kn, stride_vn, stride_iqn, stride_ikn, stride_cb, stride_ch, stride_ct,
    stride_table, stride_pages,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, P: tl.constexpr,
    BS: tl.constexpr,
    BT: tl.constexpr, PAGE_MOD: tl.constexpr, POSITIONS: tl.constexpr, PAGE_TABLE: tl.constexpr,
    HEAD_CLS: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (PARTS + 1) * N, every row alone in its sequence. coords int32 [N, 4]: tok, page,
    num_pages, query_page.
    """
    x = tl.program_id(0) % (PARTS + 1)
    n = tl.program_id(0) // (PARTS + 1)
    store_row(
        n, x, q_ptr, k_ptr, v_ptr, iq_ptr, ik_ptr, query_ptr, index_ptr, cache_ptr, head_cls_ptr,
        turn_ptr,
        row_pos_ptr, slots_ptr, roles_ptr, positions_ptr, table_ptr, pages_ptr, coords_ptr,
        num_rows,
        stride_qn, stride_kn, stride_vn, stride_iqn, stride_ikn, stride_cb, stride_ch, stride_ct,
        stride_table,
        stride_pages, H, G, D, HP, P, BS, BT, PAGE_MOD, POSITIONS, PAGE_TABLE,
        HEAD_CLS, HEADS, PARTS, True)  # fmt: skip
