"""Store: coordinates, rotation, and all that a row leaves in the cache.

One row a sequence (decoding): `store_row`, which the fused launch of decode uses too. Any other
step: a coordinates kernel (a program a sequence, it looks at decoded rows and at rows of page
counts only), then a tile kernel whose tile is the part of one sparse block that is present in the
step, so that the program that stores a block's last row also closes it.
"""

import triton
import triton.language as tl

from .primitives import (
    COUNT,
    RANGE,
    ROLE,
    STATE,
    cos_sin,
    head_at,
    read_int32,
    read_int32s,
    slot_at,
    token_at,
    write_int32,
    write_int32s,
)
from .summaries import page_range, summarize

UNKNOWN_END = tl.constexpr(
    0x7FFFFFFF
)  # the last image's page is not stored yet: every token so far is the prompt's


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _rotated(low, high, cos, sin):
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
    stride_cb, stride_ct, D: tl.constexpr, P: tl.constexpr, POSITIONS: tl.constexpr,
    PAGE_TABLE: tl.constexpr,
):  # fmt: skip
    """tok, page, num_pages, query_page and positions[3] (0: a decoded token) of row n, the only one
    of its sequence.

    table_ptr and pages_ptr point at the sequence's own rows. POSITIONS 0: none given; 1: of rows
    whose positions[3] is negative; 2: of all rows.
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
            count = tl.load(pages_ptr + opened * 2 + 1, mask=marker, other=0)
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
def _state_bytes(byte, tok, page, num_pages, query_page):
    word = byte // 4
    value = tl.where(
        word == 0, tok, tl.where(word == 1, page, tl.where(word == 2, num_pages, query_page))
    )
    return ((value >> (byte % 4 * 8)) & 255).to(tl.float32)


@triton.jit
def _image_end(aux_ptr, table_ptr, pages_ptr, num_pages, below, ok, stride_cb, stride_ct,
               D: tl.constexpr, P: tl.constexpr, PAGE_TABLE: tl.constexpr):  # fmt: skip
    """One past the last image: end of page num_pages, from the table or from row num_pages if it
    lies below `below`.
    """
    if PAGE_TABLE:
        start = tl.load(pages_ptr + num_pages * 2, mask=ok, other=0)
        return start + tl.load(pages_ptr + num_pages * 2 + 1, mask=ok, other=0)
    else:
        known = ok & (num_pages < below) & (num_pages >= 0)
        at = token_at(table_ptr, num_pages, known, stride_cb, stride_ct, P)
        end = read_int32(aux_ptr + at + D + COUNT, known) + read_int32(
            aux_ptr + at + D + COUNT + 4, known
        )
        return tl.where(known, end, UNKNOWN_END)


@triton.jit
def store_row(
    n, x, q_ptr, k_ptr, v_ptr, iq_ptr, ik_ptr, query_ptr, index_ptr, cache_ptr, head_cls_ptr,
    turn_ptr,
    row_pos_ptr, slots_ptr, roles_ptr, positions_ptr, table_ptr, pages_ptr, num_rows,
    stride_qn, stride_kn, stride_vn, stride_iqn, stride_ikn, stride_cb, stride_ch, stride_ct,
    stride_table, stride_pages,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, P: tl.constexpr,
    BS: tl.constexpr,
    BT: tl.constexpr, PAGE_MOD: tl.constexpr, POSITIONS: tl.constexpr, PAGE_TABLE: tl.constexpr,
    HEAD_CLS: tl.constexpr,
):  # fmt: skip
    """Head x (H: the auxiliary one) of row n, which is the only row of sequence n."""
    n = n.to(tl.int64)
    p = tl.load(row_pos_ptr + n)
    ok = p >= 0
    slot = tl.load(slots_ptr + n, mask=ok, other=0).to(tl.int64)
    aux_ptr = cache_ptr + head_at(H, stride_ch)
    table_ptr += n * stride_table
    pages_ptr += n * stride_pages
    tok, page, num_pages, query_page, extra = row_coordinates(
        n, p, ok, aux_ptr, table_ptr, positions_ptr, pages_ptr, roles_ptr, num_rows,
        stride_cb, stride_ct, D, P, POSITIONS, PAGE_TABLE)  # fmt: skip
    half = tl.arange(0, HP)
    h_ok = half < D // 2
    live = h_ok & ok
    cos, sin = angles_of(tok, page, turn_ptr, half, h_ok, D, PAGE_MOD)
    row_at = slot_at(slot, stride_cb, stride_ct, P)
    dtype = cache_ptr.dtype.element_ty
    if x < H:
        for g in tl.static_range(G):
            head = x * G + g
            at = q_ptr + n * stride_qn + head * D + half
            low, high = _rotated(
                tl.load(at, mask=live, other=0.0),
                tl.load(at + D // 2, mask=live, other=0.0),
                cos,
                sin,
            )
            to = query_ptr + (n * (H * G) + head) * D + half
            tl.store(to, low.to(query_ptr.dtype.element_ty), mask=h_ok)
            tl.store(to + D // 2, high.to(query_ptr.dtype.element_ty), mask=h_ok)
        at = k_ptr + n * stride_kn + x * D + half
        low, high = _rotated(
            tl.load(at, mask=live, other=0.0), tl.load(at + D // 2, mask=live, other=0.0), cos, sin
        )
        to = cache_ptr + row_at + head_at(x, stride_ch) + half
        tl.store(to, low.to(dtype), mask=live)
        tl.store(to + D // 2, high.to(dtype), mask=live)
        at = v_ptr + n * stride_vn + x * D + half
        tl.store(to + D, tl.load(at, mask=live, other=0.0).to(dtype), mask=live)
        tl.store(to + D + D // 2, tl.load(at + D // 2, mask=live, other=0.0).to(dtype), mask=live)
    else:
        at = iq_ptr + n * stride_iqn + half
        low, high = _rotated(
            tl.load(at, mask=live, other=0.0), tl.load(at + D // 2, mask=live, other=0.0), cos, sin
        )
        to = index_ptr + n * D + half
        tl.store(to, low.to(index_ptr.dtype.element_ty), mask=h_ok)
        tl.store(to + D // 2, high.to(index_ptr.dtype.element_ty), mask=h_ok)
        at = ik_ptr + n * stride_ikn + half
        low, high = _rotated(
            tl.load(at, mask=live, other=0.0), tl.load(at + D // 2, mask=live, other=0.0), cos, sin
        )
        key0, key1 = low.to(dtype), high.to(dtype)
        row_ptr = aux_ptr + row_at
        tl.store(row_ptr + half, key0, mask=live)
        tl.store(row_ptr + D // 2 + half, key1, mask=live)
        role = tl.load(roles_ptr + n, mask=ok, other=0)
        tl.store(row_ptr + D + ROLE, role.to(tl.float32).to(dtype), mask=ok)
        byte = tl.arange(0, 16)
        state = _state_bytes(byte, tok, page, num_pages, query_page)
        tl.store(row_ptr + D + STATE + byte, state.to(dtype), mask=ok & (byte < 16))
        if POSITIONS > 0:
            counted = (extra < 0) & (p <= num_pages)
            if counted:  # a prompt row among the first: its page's count and start
                if PAGE_TABLE:
                    start = tl.load(pages_ptr + p * 2)
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
                both = i_ok[:, None] & h_ok[None, :]
                k0 = tl.where(mine, key0[None, :], tl.load(key, mask=both, other=0.0)).to(
                    tl.float32
                )
                k1 = tl.where(mine, key1[None, :], tl.load(key + D // 2, mask=both, other=0.0)).to(
                    tl.float32
                )
                s0, s1 = summarize(k0, k1, i < BS, head_cls_ptr, half, h_ok, D)
            role_at = tl.where(
                i == BS - 1,
                role,
                tl.load(aux_ptr + old_at + D + ROLE, mask=i_ok, other=0.0).to(tl.int32),
            )
            page_at = tl.where(
                i == BS - 1, page, read_int32s(aux_ptr + old_at + D + STATE + 4, i_ok)
            )
            end = _image_end(
                aux_ptr,
                table_ptr,
                pages_ptr,
                num_pages,
                p,
                ok,
                stride_cb,
                stride_ct,
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
def store_row_kernel(
    q_ptr, k_ptr, v_ptr, iq_ptr, ik_ptr, query_ptr, index_ptr, cache_ptr, head_cls_ptr, turn_ptr,
    row_pos_ptr, slots_ptr, roles_ptr, positions_ptr, table_ptr, pages_ptr, num_rows,
    stride_qn, stride_kn, stride_vn, stride_iqn, stride_ikn, stride_cb, stride_ch, stride_ct,
    stride_table, stride_pages,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, P: tl.constexpr,
    BS: tl.constexpr,
    BT: tl.constexpr, PAGE_MOD: tl.constexpr, POSITIONS: tl.constexpr, PAGE_TABLE: tl.constexpr,
    HEAD_CLS: tl.constexpr,
):  # fmt: skip
    """Grid (H + 1) * N: one head of one row, every row alone in its sequence."""
    x = tl.program_id(0) % (H + 1)
    n = tl.program_id(0) // (H + 1)
    store_row(
        n, x, q_ptr, k_ptr, v_ptr, iq_ptr, ik_ptr, query_ptr, index_ptr, cache_ptr, head_cls_ptr,
        turn_ptr,
        row_pos_ptr, slots_ptr, roles_ptr, positions_ptr, table_ptr, pages_ptr, num_rows,
        stride_qn, stride_kn, stride_vn, stride_iqn, stride_ikn, stride_cb, stride_ch, stride_ct,
        stride_table,
        stride_pages, H, G, D, HP, P, BS, BT, PAGE_MOD, POSITIONS, PAGE_TABLE,
        HEAD_CLS)  # fmt: skip


@triton.jit
def _counts(page, ok, first, begin, order_ptr, positions_ptr, aux_ptr, table_ptr, pages_ptr,
num_rows,
            stride_cb, stride_ct, D: tl.constexpr, P: tl.constexpr, POSITIONS: tl.constexpr,
            PAGE_TABLE: tl.constexpr):  # fmt: skip
    """Counts of pages [M]: from the table, from this step's own rows (page >= first), or from the
    cache.
    """
    if PAGE_TABLE:
        return tl.load(pages_ptr + page * 2 + 1, mask=ok, other=0)
    else:
        old = ok & (page >= 0) & (page < first)
        at = token_at(table_ptr, page, old, stride_cb, stride_ct, P)
        count = read_int32s(aux_ptr + at + D + COUNT, old)
        if POSITIONS == 1:
            new = ok & (page >= first)
            row = tl.load(order_ptr + begin + page - first, mask=new, other=0)
            count = tl.where(
                new, -1 - tl.load(positions_ptr + 3 * num_rows + row, mask=new, other=-1), count
            )
        return count


@triton.jit
def store_coordinates_kernel(
    roles_ptr, positions_ptr, order_ptr, live_ptr, seq_lens_ptr, cache_ptr, table_ptr, pages_ptr,
    coords_ptr, start_ptr, end_ptr, num_rows, stride_cb, stride_ch, stride_ct, stride_table,
    stride_pages,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, POSITIONS: tl.constexpr,
    PAGE_TABLE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid R. What the rows of one sequence cannot know alone.

    coords  int32 [4, N]  tok, page, num_pages, query_page; here those of decoded rows, which stand
            behind the given ones
    start   int32 [N]     first token of page i, on the row of token i <= num_pages
    end     int32 [R]     one past the last image
    order   int32 [N]     rows, padding last; live int32 [R + 1] where each sequence's begin in it
    """
    r = tl.program_id(0).to(tl.int64)
    begin = tl.load(live_ptr + r)
    many = tl.load(live_ptr + r + 1) - begin
    if many > 0:
        length = tl.load(seq_lens_ptr + r)
        first = length - many
        aux_ptr = cache_ptr + head_at(H, stride_ch)
        table_ptr += r * stride_table
        pages_ptr += r * stride_pages
        i = tl.arange(0, TILE)
        one = i == 0
        decoded = first  # first decoded token of the step
        if POSITIONS == 2:
            decoded = length
        if POSITIONS == 1:
            left = many
            while left > 0:
                j = left - 1 - i
                row = tl.load(order_ptr + begin + j, mask=j >= 0, other=0)
                extra = tl.load(positions_ptr + 3 * num_rows + row, mask=j >= 0, other=0)
                given = tl.max(tl.where((j >= 0) & (extra < 0), j, -1), 0)
                decoded = tl.maximum(decoded, first + given + 1)
                left = tl.where(given >= 0, 0, left - TILE)
        tok, page, num_pages, query_page = first * 0 - 1, first * 0, first * 0, first * 0 - 1
        if decoded > first:
            row = tl.load(order_ptr + begin + decoded - 1 - first)
            tok = tl.load(positions_ptr + row)
            num_pages = tl.load(positions_ptr + 2 * num_rows + row)
            page = tl.load(positions_ptr + num_rows + row)
            query_page = page - 1
            page = tl.minimum(page, num_pages)
        else:
            at = token_at(table_ptr, first - 1, first > 0, stride_cb, stride_ct, P)
            state_ptr = aux_ptr + at + D + STATE
            tok = tl.where(first > 0, read_int32(state_ptr, first > 0), tok)
            page = read_int32(state_ptr + 4, first > 0)
            num_pages = read_int32(state_ptr + 8, first > 0)
            query_page = tl.where(first > 0, read_int32(state_ptr + 12, first > 0), query_page)
        end = _image_end(
            aux_ptr,
            table_ptr,
            pages_ptr,
            num_pages,
            first,
            many > 0,
            stride_cb,
            stride_ct,
            D,
            P,
            PAGE_TABLE,
        )
        if POSITIONS > 0:
            counted = tl.minimum(
                tl.minimum(num_pages, length - 1), decoded - 1
            )  # last token with a count in this step
            carry = first * 0
            if PAGE_TABLE == 0:
                asked = (first > 0) & (first <= counted)
                at = token_at(table_ptr, first - 1, asked, stride_cb, stride_ct, P)
                carry = read_int32(aux_ptr + at + D + COUNT, asked) + read_int32(
                    aux_ptr + at + D + COUNT + 4, asked
                )
            for t in range(first, counted + 1, TILE):
                ok = t + i <= counted
                row = tl.load(order_ptr + begin + t - first + i, mask=ok, other=0)
                extra = tl.load(positions_ptr + 3 * num_rows + row, mask=ok, other=-1)
                count = tl.where(ok & (extra < 0), -1 - extra, 0)
                start = carry + tl.cumsum(count, 0) - count
                if PAGE_TABLE:
                    start = tl.load(pages_ptr + (t + i) * 2, mask=ok, other=0)
                tl.store(start_ptr + row, start, mask=ok)
                carry += tl.sum(count, 0)
            if PAGE_TABLE == 0:
                end = tl.where((num_pages >= first) & (num_pages <= counted), carry, end)
        tl.store(end_ptr + r, end)
        if POSITIONS < 2:
            nothing = tl.max(
                _counts(i * 0, one & (num_pages == 0), first, begin, order_ptr, positions_ptr,
                        aux_ptr, table_ptr,
                        pages_ptr, num_rows, stride_cb, stride_ct, D, P, POSITIONS, PAGE_TABLE),
                        0) <= 0  # fmt: skip
            text = (num_pages == 0) & nothing  # no image at all: a marker is text
            opened = first * 0
            since = first * 0 - 1  # token of the last marker
            for t in range(decoded, length, TILE):
                token = t + i
                ok = token < length
                row = tl.load(order_ptr + begin + token - first, mask=ok, other=0)
                role = tl.load(roles_ptr + row, mask=ok, other=0)
                marker = ok & (role == 2) & (text == 0)
                number = opened + tl.cumsum(marker.to(tl.int32), 0)
                last = tl.maximum(
                    tl.associative_scan(tl.where(marker, token, -1), 0, _larger), since
                )
                now = tl.minimum(page + number, num_pages)
                count = _counts(now, ok & (last >= 0), first, begin, order_ptr, positions_ptr,
                                aux_ptr, table_ptr,
                                pages_ptr, num_rows, stride_cb, stride_ct, D, P, POSITIONS,
                                PAGE_TABLE)  # fmt: skip
                number_on_page = tl.where(
                    last >= 0, count + token - last, tok + token - decoded + 1
                )
                tl.store(coords_ptr + row, number_on_page, mask=ok)
                tl.store(coords_ptr + num_rows + row, tl.where(number > 0, now, page), mask=ok)
                tl.store(coords_ptr + 2 * num_rows + row, token * 0 + num_pages, mask=ok)
                tl.store(coords_ptr + 3 * num_rows + row, query_page + number, mask=ok)
                opened = tl.max(tl.where(ok, number, 0), 0)
                since = tl.max(last, 0)


@triton.jit
def store_tile_kernel(
    q_ptr, k_ptr, v_ptr, iq_ptr, ik_ptr, query_ptr, index_ptr, cache_ptr, head_cls_ptr, turn_ptr,
    slots_ptr, roles_ptr, positions_ptr, order_ptr, live_ptr, seq_lens_ptr, tile_ptr, table_ptr,
    coords_ptr, start_ptr,
    end_ptr, num_rows, stride_qn, stride_kn, stride_vn, stride_iqn, stride_ikn, stride_cb,
    stride_ch, stride_ct,
    stride_table, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HP: tl.constexpr,
    P: tl.constexpr,
    BS: tl.constexpr, BT: tl.constexpr, PAGE_MOD: tl.constexpr, POSITIONS: tl.constexpr,
    HEAD_CLS: tl.constexpr,
):  # fmt: skip
    """Grid (H + 1) * tiles: one head of the rows of one sparse block. tile int32 [tiles, 2]:
    sequence, block from its first.
    """
    x = tl.program_id(0) % (H + 1)
    tile = tl.program_id(0) // (H + 1)
    r = tl.load(tile_ptr + tile * 2).to(tl.int64)
    begin = tl.load(live_ptr + r)
    many = tl.load(live_ptr + r + 1) - begin
    if many > 0:
        length = tl.load(seq_lens_ptr + r)
        first = length - many
        block = (first // BS + tl.load(tile_ptr + tile * 2 + 1)) * BS  # first token of the block
        i = tl.arange(0, BT)
        token = block + i
        ok = (token >= first) & (token < length) & (i < BS)
        row = tl.load(order_ptr + begin + token - first, mask=ok, other=0).to(tl.int64)
        tok = tl.load(coords_ptr + row, mask=ok, other=0)
        page = tl.load(coords_ptr + num_rows + row, mask=ok, other=0)
        num_pages = tl.load(coords_ptr + 2 * num_rows + row, mask=ok, other=0)
        query_page = tl.load(coords_ptr + 3 * num_rows + row, mask=ok, other=0)
        extra = i * 0
        given = ok & (i < 0)
        if POSITIONS > 0:
            extra = tl.load(positions_ptr + 3 * num_rows + row, mask=ok, other=0)
            given = ok & ((extra < 0) | (POSITIONS == 2))
            raw = tl.load(positions_ptr + num_rows + row, mask=given, other=0)
            tok = tl.where(given, tl.load(positions_ptr + row, mask=given, other=0), tok)
            num_pages = tl.where(
                given, tl.load(positions_ptr + 2 * num_rows + row, mask=given, other=0), num_pages
            )
            page = tl.where(given, tl.minimum(raw, num_pages), page)
            query_page = tl.where(given, raw - 1, query_page)
        half = tl.arange(0, HP)
        h_ok = half < D // 2
        live = ok[:, None] & h_ok[None, :]
        cos, sin = angles_of(
            tok[:, None], page[:, None], turn_ptr, half[None, :], h_ok[None, :], D, PAGE_MOD
        )
        slot = tl.load(slots_ptr + row, mask=ok, other=0)
        row_at = slot_at(slot, stride_cb, stride_ct, P)
        dtype = cache_ptr.dtype.element_ty
        if x < H:
            for g in range(G):
                head = x * G + g
                at = q_ptr + (row * stride_qn + head * D)[:, None] + half[None, :]
                low, high = _rotated(
                    tl.load(at, mask=live, other=0.0),
                    tl.load(at + D // 2, mask=live, other=0.0),
                    cos,
                    sin,
                )
                to = query_ptr + ((row * (H * G) + head) * D)[:, None] + half[None, :]
                tl.store(to, low.to(query_ptr.dtype.element_ty), mask=live)
                tl.store(to + D // 2, high.to(query_ptr.dtype.element_ty), mask=live)
            at = k_ptr + (row * stride_kn + x * D)[:, None] + half[None, :]
            low, high = _rotated(
                tl.load(at, mask=live, other=0.0),
                tl.load(at + D // 2, mask=live, other=0.0),
                cos,
                sin,
            )
            to = cache_ptr + head_at(x, stride_ch) + row_at[:, None] + half[None, :]
            tl.store(to, low.to(dtype), mask=live)
            tl.store(to + D // 2, high.to(dtype), mask=live)
            at = v_ptr + (row * stride_vn + x * D)[:, None] + half[None, :]
            tl.store(to + D, tl.load(at, mask=live, other=0.0).to(dtype), mask=live)
            tl.store(
                to + D + D // 2, tl.load(at + D // 2, mask=live, other=0.0).to(dtype), mask=live
            )
        else:
            at = iq_ptr + (row * stride_iqn)[:, None] + half[None, :]
            low, high = _rotated(
                tl.load(at, mask=live, other=0.0),
                tl.load(at + D // 2, mask=live, other=0.0),
                cos,
                sin,
            )
            to = index_ptr + (row * D)[:, None] + half[None, :]
            tl.store(to, low.to(index_ptr.dtype.element_ty), mask=live)
            tl.store(to + D // 2, high.to(index_ptr.dtype.element_ty), mask=live)
            at = ik_ptr + (row * stride_ikn)[:, None] + half[None, :]
            low, high = _rotated(
                tl.load(at, mask=live, other=0.0),
                tl.load(at + D // 2, mask=live, other=0.0),
                cos,
                sin,
            )
            key0, key1 = low.to(dtype), high.to(dtype)
            aux_ptr = cache_ptr + head_at(H, stride_ch)
            table_ptr += r * stride_table
            to = aux_ptr + row_at[:, None] + half[None, :]
            tl.store(to, key0, mask=live)
            tl.store(to + D // 2, key1, mask=live)
            role = tl.load(roles_ptr + row, mask=ok, other=0)
            row_ptr = aux_ptr + row_at + D
            tl.store(row_ptr + ROLE, role.to(tl.float32).to(dtype), mask=ok)
            byte = tl.arange(0, 16)[None, :]
            state = _state_bytes(
                byte, tok[:, None], page[:, None], num_pages[:, None], query_page[:, None]
            )
            tl.store(
                row_ptr[:, None] + STATE + byte, state.to(dtype), mask=ok[:, None] & (byte < 16)
            )
            tl.store(coords_ptr + row, tok, mask=given)
            tl.store(coords_ptr + num_rows + row, page, mask=given)
            tl.store(coords_ptr + 2 * num_rows + row, num_pages, mask=given)
            tl.store(coords_ptr + 3 * num_rows + row, query_page, mask=given)
            if POSITIONS > 0:
                counted = ok & (extra < 0) & (token <= num_pages)
                if tl.max(counted.to(tl.int32), 0) > 0:
                    write_int32s(row_ptr + COUNT, -1 - extra, counted)
                    start = tl.load(start_ptr + row, mask=counted, other=0)
                    write_int32s(row_ptr + COUNT + 4, start, counted)
            if block + BS <= length:  # its last row is one of ours: the block is complete
                old = (token < first) & (i < BS)
                old_at = token_at(table_ptr, token, old, stride_cb, stride_ct, P)
                role = tl.where(
                    old,
                    tl.load(aux_ptr + old_at + D + ROLE, mask=old, other=0.0).to(tl.int32),
                    role,
                )
                page = tl.where(old, read_int32s(aux_ptr + old_at + D + STATE + 4, old), page)
                pages = page_range(role, page, (i < BS) & (token < tl.load(end_ptr + r)))
                begin_ptr = aux_ptr + token_at(table_ptr, block, many > 0, stride_cb, stride_ct, P)
                write_int32(begin_ptr + D + RANGE, pages, many > 0)
                if HEAD_CLS:
                    key = aux_ptr + old_at[:, None] + half[None, :]
                    both = old[:, None] & h_ok[None, :]
                    k0 = tl.where(old[:, None], tl.load(key, mask=both, other=0.0), key0).to(
                        tl.float32
                    )
                    k1 = tl.where(
                        old[:, None], tl.load(key + D // 2, mask=both, other=0.0), key1
                    ).to(tl.float32)
                    s0, s1 = summarize(k0, k1, i < BS, head_cls_ptr, half, h_ok, D)
                    second = aux_ptr + token_at(
                        table_ptr, block + 1, many > 0, stride_cb, stride_ct, P
                    )
                    tl.store(begin_ptr + D + D // 2 + half, s0.to(dtype), mask=h_ok)
                    tl.store(second + D + D // 2 + half, s1.to(dtype), mask=h_ok)
