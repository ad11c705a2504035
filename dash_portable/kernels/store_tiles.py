"""Store, for sequences with several rows in a step: a coordinates kernel (a program a sequence; it
looks at decoded rows and at rows of page counts only), then a tile kernel whose tile is the part of
one sparse block that is present, so that the program that stores a block's last row closes it.
"""

import triton
import triton.language as tl

from .primitives import (
    COUNT,
    NUMBERS,
    RANGE,
    ROLE,
    STATE,
    head_at,
    read_int32,
    read_int32s,
    slot_at,
    token_at,
    widened,
    write_int32,
    write_int32s,
)
from .store import angles_of, image_end, rotated, state_bytes
from .summaries import page_range, summarize


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _counts(page, ok, first, many, begin, order_ptr, positions_ptr, aux_ptr, table_ptr, pages_ptr,
            num_rows, stride_cb, stride_ct, stride_pages, D: tl.constexpr, P: tl.constexpr,
            POSITIONS: tl.constexpr, PAGE_TABLE: tl.constexpr):  # fmt: skip
    """Counts of pages [M]: from the table, from this step's own `many` rows (page >= first), or
    from the cache. 0 of a page that is in none of them, which only nonsense in the cache asks for.
    """
    if PAGE_TABLE:
        listed = ok & (page >= 0) & (page < stride_pages // 2)
        return tl.load(pages_ptr + page * 2 + 1, mask=listed, other=0)
    else:
        old = ok & (page >= 0) & (page < first)
        at = token_at(table_ptr, page, old, stride_cb, stride_ct, P)
        count = read_int32s(aux_ptr + at + D + COUNT, old)
        if POSITIONS == 1:
            new = ok & (page >= first) & (page < first + many)
            row = tl.load(order_ptr + begin + page - first, mask=new, other=0)
            count = tl.where(
                new, -1 - tl.load(positions_ptr + 3 * num_rows + row, mask=new, other=-1), count
            )
        return count


@triton.jit(do_not_specialize=NUMBERS)
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
            for o in range(0, many, TILE):  # from the last row backwards, until one is given
                if decoded == first:
                    j = many - 1 - o - i
                    row = tl.load(order_ptr + begin + j, mask=j >= 0, other=0)
                    extra = tl.load(positions_ptr + 3 * num_rows + row, mask=j >= 0, other=0)
                    given = tl.max(tl.where((j >= 0) & (extra < 0), j, -1), 0)
                    decoded = first + given + 1
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
        end = image_end(
            aux_ptr,
            table_ptr,
            pages_ptr,
            num_pages,
            first,
            many > 0,
            stride_cb,
            stride_ct,
            stride_pages,
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
                    listed = ok & (t + i < stride_pages // 2)
                    start = tl.load(pages_ptr + (t + i) * 2, mask=listed, other=0)
                tl.store(start_ptr + row, start, mask=ok)
                carry += tl.sum(count, 0)
            if PAGE_TABLE == 0:
                end = tl.where((num_pages >= first) & (num_pages <= counted), carry, end)
        tl.store(end_ptr + r, end)
        if POSITIONS < 2:
            nothing = tl.max(
                _counts(i * 0, one & (num_pages == 0), first, many, begin, order_ptr, positions_ptr,
                        aux_ptr, table_ptr,
                        pages_ptr, num_rows, stride_cb, stride_ct, stride_pages, D, P, POSITIONS,
                        PAGE_TABLE),
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
                count = _counts(now, ok & (last >= 0), first, many, begin, order_ptr, positions_ptr,
                                aux_ptr, table_ptr,
                                pages_ptr, num_rows, stride_cb, stride_ct, stride_pages, D, P,
                                POSITIONS,
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


@triton.jit(do_not_specialize=NUMBERS)
def store_tile_kernel(
    q_ptr, k_ptr, v_ptr, iq_ptr, ik_ptr, query_ptr, index_ptr, cache_ptr, head_cls_ptr, turn_ptr,
    slots_ptr, roles_ptr, positions_ptr, order_ptr, live_ptr, seq_lens_ptr, tile_ptr, table_ptr,
    coords_ptr, start_ptr,
    end_ptr, num_rows, stride_qn, stride_kn, stride_vn, stride_iqn, stride_ikn, stride_cb,
    stride_ch, stride_ct,
    stride_table, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HP: tl.constexpr,
    P: tl.constexpr,
    BS: tl.constexpr, BT: tl.constexpr, PAGE_MOD: tl.constexpr, POSITIONS: tl.constexpr,
    HEAD_CLS: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (PARTS + 1) * tiles: HEADS kv heads of the rows of one sparse block, which share its
    angles, or the auxiliary head. tile int32 [tiles, 2]: sequence, block from its first.
    """
    x = tl.program_id(0) % (PARTS + 1)
    tile = tl.program_id(0) // (PARTS + 1)
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
        extra = i * 0
        given = ok & (i < 0)
        if POSITIONS > 0:
            extra = tl.load(positions_ptr + 3 * num_rows + row, mask=ok, other=0)
            given = ok & ((extra < 0) | (POSITIONS == 2))
        found = ok & (given == 0)  # nobody wrote the others' coordinates
        tok = tl.load(coords_ptr + row, mask=found, other=0)
        page = tl.load(coords_ptr + num_rows + row, mask=found, other=0)
        num_pages = tl.load(coords_ptr + 2 * num_rows + row, mask=found, other=0)
        query_page = tl.load(coords_ptr + 3 * num_rows + row, mask=found, other=0)
        if POSITIONS > 0:
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
        if x < PARTS:
            first_head = x * HEADS
            for j in tl.static_range(HEADS):
                head = first_head + j
                h_live = live & (head < H)
                # A head's loads come before its stores, which no later load may pass.
                at = k_ptr + (row * stride_kn + head * D)[:, None] + half[None, :]
                k0 = tl.load(at, mask=h_live, other=0.0)
                k1 = tl.load(at + D // 2, mask=h_live, other=0.0)
                at = v_ptr + (row * stride_vn + head * D)[:, None] + half[None, :]
                v0 = tl.load(at, mask=h_live, other=0.0)
                v1 = tl.load(at + D // 2, mask=h_live, other=0.0)
                for g in tl.static_range(G):
                    at = q_ptr + (row * stride_qn + (head * G + g) * D)[:, None] + half[None, :]
                    low, high = rotated(
                        tl.load(at, mask=h_live, other=0.0),
                        tl.load(at + D // 2, mask=h_live, other=0.0),
                        cos,
                        sin,
                    )
                    to = query_ptr + ((row * (H * G) + head * G + g) * D)[:, None] + half[None, :]
                    tl.store(to, low.to(query_ptr.dtype.element_ty), mask=h_live)
                    tl.store(to + D // 2, high.to(query_ptr.dtype.element_ty), mask=h_live)
                low, high = rotated(k0, k1, cos, sin)
                to = cache_ptr + head_at(head, stride_ch) + row_at[:, None] + half[None, :]
                tl.store(to, low.to(dtype), mask=h_live)
                tl.store(to + D // 2, high.to(dtype), mask=h_live)
                tl.store(to + D, v0.to(dtype), mask=h_live)
                tl.store(to + D + D // 2, v1.to(dtype), mask=h_live)
        else:
            at = iq_ptr + (row * stride_iqn)[:, None] + half[None, :]
            low, high = rotated(
                tl.load(at, mask=live, other=0.0),
                tl.load(at + D // 2, mask=live, other=0.0),
                cos,
                sin,
            )
            to = index_ptr + (row * D)[:, None] + half[None, :]
            tl.store(to, low.to(index_ptr.dtype.element_ty), mask=live)
            tl.store(to + D // 2, high.to(index_ptr.dtype.element_ty), mask=live)
            at = ik_ptr + (row * stride_ikn)[:, None] + half[None, :]
            low, high = rotated(
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
            state = state_bytes(
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
                    k0 = tl.load(key, mask=both, other=0.0)
                    k0 = widened(tl.where(old[:, None], k0, key0))
                    k1 = tl.load(key + D // 2, mask=both, other=0.0)
                    k1 = widened(tl.where(old[:, None], k1, key1))
                    s0, s1 = summarize(k0, k1, i < BS, head_cls_ptr, half, h_ok, D)
                    second = aux_ptr + token_at(
                        table_ptr, block + 1, many > 0, stride_cb, stride_ct, P
                    )
                    tl.store(begin_ptr + D + D // 2 + half, s0.to(dtype), mask=h_ok)
                    tl.store(second + D + D // 2 + half, s1.to(dtype), mask=h_ok)
