"""Block summaries, page ranges and page starts: the arithmetic, and the kernels that make them from
a filled cache.
"""

import triton
import triton.language as tl

from .primitives import (
    CLAMP,
    COUNT,
    NUMBERS,
    RANGE,
    ROLE,
    STATE,
    head_at,
    read_int32,
    read_int32s,
    token_at,
    write_int32,
    write_int32s,
)


@triton.jit
def summarize(k0, k1, i_ok, head_cls_ptr, half, h_ok, D: tl.constexpr):
    """Both halves [D / 2] of the summary of one block of stored keys, float32 halves [BT, D / 2];
    i_ok [BT].
    """
    root: tl.constexpr = D**-0.5
    c0 = tl.load(head_cls_ptr + half, mask=h_ok, other=0.0).to(tl.float32)
    c1 = tl.load(head_cls_ptr + D // 2 + half, mask=h_ok, other=0.0).to(tl.float32)
    score = tl.sum(k0 * c0[None, :] + k1 * c1[None, :], 1) * root
    score = tl.where(i_ok, tl.minimum(tl.maximum(score, -CLAMP), CLAMP), float("-inf"))
    weight = tl.exp(score - tl.max(score, 0))
    weight = weight / tl.maximum(tl.sum(weight, 0), 1e-6)
    k0 = tl.where(i_ok[:, None], k0, 0.0)
    k1 = tl.where(i_ok[:, None], k1, 0.0)
    return tl.sum(weight[:, None] * k0, 0), tl.sum(weight[:, None] * k1, 0)


@triton.jit
def page_range(role, page, ok):
    """Smallest page of the block's image tokens, and largest << 16, as one int32; 0 for none. Page
    0 is no page.
    """
    image = ok & (role == 1) & (page > 0)
    low = tl.min(tl.where(image, page, 65536), 0)
    high = tl.max(tl.where(image, page, 0), 0)
    return tl.where(high > 0, low | (high << 16), 0)


@triton.jit(do_not_specialize=NUMBERS)
def summaries_pages_kernel(
    seq_lens_ptr, cache_ptr, table_ptr, given_ptr, pages_ptr, end_ptr, stride_cb, stride_ch,
    stride_ct, stride_table,
    stride_given, stride_pages, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    GIVEN: tl.constexpr,
    WRITE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid R. Start and count of each page from the counts of rows 0..num_pages (GIVEN: from a
    table), and the last image's end.

    pages   int32 [R, pages, 2]  of pages 0..num_pages as far as they fit; those whose row is not
            stored yet are empty
    end     int32 [R]            one past the last image
    WRITE   starts go to the cache instead of `pages`
    """
    r = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens_ptr + r)
    if length > 0:
        aux_ptr = cache_ptr + head_at(H, stride_ch)
        table_ptr += r * stride_table
        pages_ptr += r * stride_pages
        last = token_at(table_ptr, length - 1, length > 0, stride_cb, stride_ct, P)
        num_pages = read_int32(aux_ptr + last + D + STATE + 8, length > 0)
        # What the cache says may be anything, the largest number too.
        fit = tl.minimum(num_pages, length) + 1
        fit = tl.minimum(fit, length if WRITE else stride_pages // 2)
        if GIVEN:
            fit = tl.minimum(fit, stride_given // 2)
        i = tl.arange(0, TILE)
        carry = length * 0
        for first in range(0, fit, TILE):
            page = first + i
            ok = (page < fit) & (page < length)
            at = token_at(table_ptr, page, ok, stride_cb, stride_ct, P)
            if GIVEN:
                count = tl.load(
                    given_ptr + r * stride_given + page * 2 + 1, mask=page < fit, other=0
                )
                start = tl.load(given_ptr + r * stride_given + page * 2, mask=page < fit, other=0)
            else:
                count = read_int32s(aux_ptr + at + D + COUNT, ok)
                start = carry + tl.cumsum(count, 0) - count
            if WRITE:
                write_int32s(aux_ptr + at + D + COUNT + 4, start, ok)
            else:
                tl.store(pages_ptr + page * 2, start, mask=page < fit)
                tl.store(pages_ptr + page * 2 + 1, count, mask=page < fit)
            carry = tl.max(tl.where(page < fit, start + count, 0), 0)
        tl.store(end_ptr + r, tl.where(num_pages < length, carry, 0x7FFFFFFF))


@triton.jit(do_not_specialize=NUMBERS)
def summaries_block_kernel(
    seq_lens_ptr, prefix_ptr, end_ptr, cache_ptr, table_ptr, head_cls_ptr, side_ptr, range_ptr,
    max_blocks,
    stride_cb, stride_ch, stride_ct, stride_table, H: tl.constexpr, D: tl.constexpr,
    HP: tl.constexpr, P: tl.constexpr,
    BS: tl.constexpr, BT: tl.constexpr, RANGES: tl.constexpr, PREFIX: tl.constexpr,
    WRITE: tl.constexpr,
):  # fmt: skip
    """Grid R * max_blocks: the summary of one complete block from its stored keys, rounded to the
    cache's type.

    side    [R, max_blocks, D]  summaries; range int32 [R, max_blocks, 2]: smallest and largest
            page of its images, 0 none
    RANGES  the range is made from roles and pages too, else copied
    PREFIX  blocks that end at or before prefix[r] are copied
    WRITE   both go to the free place of the cache instead
    """
    r = (tl.program_id(0) // max_blocks).to(tl.int64)
    b = tl.program_id(0) % max_blocks
    block = b * BS
    if block + BS <= tl.load(seq_lens_ptr + r):
        aux_ptr = cache_ptr + head_at(H, stride_ch)
        table_ptr += r * stride_table
        i = tl.arange(0, BT)
        half = tl.arange(0, HP)
        h_ok = half < D // 2
        at = token_at(table_ptr, block + i, i < BS, stride_cb, stride_ct, P)
        first = aux_ptr + token_at(table_ptr, block, b >= 0, stride_cb, stride_ct, P) + D
        second = aux_ptr + token_at(table_ptr, block + 1, b >= 0, stride_cb, stride_ct, P) + D
        if RANGES:
            role = tl.load(aux_ptr + at + D + ROLE, mask=i < BS, other=0.0).to(tl.int32)
            page = read_int32s(aux_ptr + at + D + STATE + 4, i < BS)
            pages = page_range(role, page, (i < BS) & (block + i < tl.load(end_ptr + r)))
        else:
            pages = read_int32(first + RANGE, b >= 0)
        copied = b < 0
        if PREFIX:
            copied = block + BS <= tl.load(prefix_ptr + r)
        dtype = cache_ptr.dtype.element_ty
        if copied:
            s0 = tl.load(first + D // 2 + half, mask=h_ok, other=0.0)
            s1 = tl.load(second + D // 2 + half, mask=h_ok, other=0.0)
        else:
            key = aux_ptr + at[:, None] + half[None, :]
            both = (i < BS)[:, None] & h_ok[None, :]
            k0 = tl.load(key, mask=both, other=0.0).to(tl.float32)
            k1 = tl.load(key + D // 2, mask=both, other=0.0).to(tl.float32)
            s0, s1 = summarize(k0, k1, i < BS, head_cls_ptr, half, h_ok, D)
            s0, s1 = s0.to(dtype), s1.to(dtype)
        if WRITE:
            write_int32(first + RANGE, pages, b >= 0)
            tl.store(first + D // 2 + half, s0, mask=h_ok)
            tl.store(second + D // 2 + half, s1, mask=h_ok)
        else:
            place = r * max_blocks + b
            tl.store(range_ptr + place * 2, pages & 0xFFFF)
            tl.store(range_ptr + place * 2 + 1, (pages >> 16) & 0xFFFF)
            tl.store(side_ptr + place * D + half, s0, mask=h_ok)
            tl.store(side_ptr + place * D + D // 2 + half, s1, mask=h_ok)


@triton.jit(do_not_specialize=NUMBERS)
def summaries_copy_kernel(
    seq_lens_ptr, cache_ptr, table_ptr, side_ptr, range_ptr, max_blocks, stride_cb, stride_ch,
    stride_ct, stride_table,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, P: tl.constexpr, BS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid R * cdiv(max_blocks, TILE): trusted summaries and ranges, made compact."""
    tiles = (max_blocks + TILE - 1) // TILE
    r = (tl.program_id(0) // tiles).to(tl.int64)
    b = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    ok = (b < max_blocks) & ((b + 1) * BS <= tl.load(seq_lens_ptr + r))
    aux_ptr = cache_ptr + head_at(H, stride_ch) + D
    table_ptr += r * stride_table
    half = tl.arange(0, HP)
    both = ok[:, None] & (half < D // 2)[None, :]
    first = aux_ptr + token_at(table_ptr, b * BS, ok, stride_cb, stride_ct, P)
    second = aux_ptr + token_at(table_ptr, b * BS + 1, ok, stride_cb, stride_ct, P)
    place = r * max_blocks + b
    pages = read_int32s(first + RANGE, ok)
    tl.store(range_ptr + place * 2, pages & 0xFFFF, mask=ok)
    tl.store(range_ptr + place * 2 + 1, (pages >> 16) & 0xFFFF, mask=ok)
    to = side_ptr + (place * D)[:, None] + half[None, :]
    tl.store(to, tl.load(first[:, None] + D // 2 + half[None, :], mask=both, other=0.0), mask=both)
    tl.store(
        to + D // 2,
        tl.load(second[:, None] + D // 2 + half[None, :], mask=both, other=0.0),
        mask=both,
    )
