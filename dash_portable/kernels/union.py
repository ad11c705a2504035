"""Unions of a tile's chosen blocks, and the inversion: for every block the rows that chose it.

The union kernel walks the distinct blocks of a tile in ascending order, those within SPAN of one
another together. Up to `limit` of them become the tile's union, with each row's bias (-inf: not
chosen); a tile with more is counted -1 and its (row, block) pairs go into the lists by block that
the inversion completes. Pairs are numbered by the row's place in the grouped order, so the tiles of
one chunk hold one run of numbers and a chunk's partial results fit a buffer of a chosen size.
"""

import triton
import triton.language as tl

from .primitives import LOG2E, follow

KEYS = 2048  # (sequence, block) keys of one program of the offsets
ENTRIES = 256  # of one program of the list of tiles
SPAN = 16  # blocks in a row that a tile looks at together
FEW_KEYS = 1 << 15  # their counters lie in sectors of their own, so that atomics do not queue


def apart(keys):
    """From one key's counter to the next, in int32."""
    return 8 if keys <= FEW_KEYS else 1


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _distinct(ids):
    """At least so many different ids [M, N], -1 left out: their remainders of 64."""
    bit = tl.full(ids.shape, 1, tl.int64) << (ids % 64).to(tl.int64)
    bits = tl.reduce(tl.reduce(tl.where(ids >= 0, bit, 0), 1, _either), 0, _either)
    n = tl.arange(0, 64)
    return tl.sum((bits >> n.to(tl.int64)) & 1, 0).to(tl.int32)


@triton.jit(
    do_not_specialize=["num_rows", "max_blocks", "keys", "chunk_tiles", "limit", "stride_tr"]
)
def union_kernel(
    ids_ptr,
    bias_ptr,
    tile_ptr,
    order_ptr,
    pos_ptr,
    table_ptr,
    count_ptr,
    union_ptr,
    place_ptr,
    weight_ptr,
    hist_ptr,
    listed_count_ptr,
    listed_ptr,
    rank_ptr,
    out_ptr,
    num_rows,
    max_blocks,
    keys,
    chunk_tiles,
    limit,
    stride_tr,
    WIDTH: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    LOCAL: tl.constexpr,
    TOPK: tl.constexpr,
    W: tl.constexpr,
    TILE: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPAN: tl.constexpr,
    APART: tl.constexpr,
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile: its union and biases (times log2 e), or its pairs' places in the lists of their
    blocks and the tile's number in the chunk's list. Also zeros for the output of padding rows.

    count [tiles, 2]: blocks of the union (-1: the pairs are in the lists), and how many of them end
    before the local window of every row; those are filled up to whole steps of BLOCKS by blocks
    that nobody chose.
    """
    follow(PDL)
    t = tl.program_id(0)
    row = t * TILE + tl.arange(0, TILE)
    padding = tl.load(pos_ptr + row, mask=row < num_rows, other=0) < 0
    if tl.max(padding.to(tl.int32), 0) > 0:
        for o in range(0, WIDTH, 16):
            out = out_ptr + row.to(tl.int64)[:, None] * WIDTH + o + tl.arange(0, 16)[None, :]
            zero = tl.zeros((TILE, 16), tl.float32).to(out_ptr.dtype.element_ty)
            tl.store(out, zero, mask=padding[:, None])
    seq = tl.load(tile_ptr + t * FIELDS)
    if seq >= 0:
        begin = tl.load(tile_ptr + t * FIELDS + 1)
        r = tl.arange(0, TILE)
        w = tl.arange(0, W)[None, :]
        live = begin + r < tl.load(tile_ptr + t * FIELDS + 2)
        i = tl.load(order_ptr + begin + r, mask=live, other=0).to(tl.int64)
        pair_ok = live[:, None] & (w < TOPK)
        ids = tl.load(ids_ptr + i[:, None] * TOPK + w, mask=pair_ok, other=-1)
        table_row = table_ptr + seq.to(tl.int64) * stride_tr
        none: tl.constexpr = 0x7FFFFFFF
        pos = tl.load(pos_ptr + i, mask=live, other=none)
        nearest = tl.maximum(tl.min(pos, 0) + 1 - LOCAL, 0)
        room = t.to(tl.int64) * ROOM
        clear = tl.zeros((), tl.int32)
        filled = tl.zeros((), tl.int32)
        block = tl.min(tl.min(tl.where(ids >= 0, ids, none), 1), 0)
        lowest = block
        # A tile that surely has too many need not walk to the limit.
        blocks = tl.where(_distinct(ids) > limit, limit + 1, 0)
        while (block < none) & (blocks <= limit):
            # The blocks behind it too: rows that choose alike choose neighbours.
            span = block + tl.arange(0, SPAN)
            weight = tl.full((SPAN, TILE), float("-inf"), tl.float32)
            for c in range(TOPK):
                one = tl.load(ids_ptr + i[None, :] * TOPK + c, mask=live[None, :], other=-1)
                bias = tl.load(bias_ptr + i[None, :] * TOPK + c, mask=live[None, :], other=0.0)
                weight = tl.where(one == span[:, None], bias * LOG2E, weight)
            used = tl.max((weight != float("-inf")).to(tl.int32), 1)
            far = (span + 1) * BLOCK <= nearest
            number = blocks + tl.cumsum(used, 0) - used
            blocks += tl.sum(used, 0)
            clear += tl.sum(tl.where(far, used, 0), 0)
            filled = (clear + BLOCKS - 1) // BLOCKS * BLOCKS
            number += tl.where(far, 0, filled - clear)
            ok = (used > 0) & (number < ROOM)
            at = room + number
            tl.store(union_ptr + at, span, mask=ok)
            if P % BLOCK == 0:  # the cache block that holds it: no head has to look it up
                held = tl.load(table_row + span * BLOCK // P, mask=ok, other=0)
                tl.store(place_ptr + at, held, mask=ok)
            tl.store(weight_ptr + at[:, None] * TILE + r[None, :], weight, mask=ok[:, None])
            block = tl.min(tl.min(tl.where(ids >= block + SPAN, ids, none), 1), 0)
        for f in range(clear, filled):  # blocks of the tile, chosen by no row
            nobody = tl.full((TILE,), float("-inf"), tl.float32)
            tl.store(weight_ptr + (room + f) * TILE + r, nobody)
            tl.store(union_ptr + room + f, lowest)
            if P % BLOCK == 0:
                tl.store(place_ptr + room + f, tl.load(table_row + lowest * BLOCK // P))
        listed = blocks > limit
        tl.store(count_ptr + t * 2, tl.where(listed, -1, blocks + filled - clear))
        tl.store(count_ptr + t * 2 + 1, tl.where(listed, 0, filled))
        if listed:
            chunk = t // chunk_tiles
            number = tl.atomic_add(listed_count_ptr + chunk, 1, sem="relaxed")
            tl.store(listed_ptr + chunk * chunk_tiles + number, t)
            list_at = hist_ptr + (chunk.to(tl.int64) * keys + seq * max_blocks) * APART
            pair_ok = pair_ok & (ids >= 0) & (ids < max_blocks)
            rank = tl.atomic_add(
                list_at + ids * APART, tl.full((TILE, W), 1, tl.int32), mask=pair_ok, sem="relaxed"
            )
            tl.store(rank_ptr + (begin + r).to(tl.int64)[:, None] * TOPK + w, rank, mask=pair_ok)
    else:
        tl.store(count_ptr + t * 2, 0)


@triton.jit(do_not_specialize=["keys", "parts"])
def invert_sum_kernel(
    hist_ptr,
    part_ptr,
    keys,
    parts,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    APART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pairs and tiles of each run of STEP keys of a chunk; only where there are several runs."""
    follow(PDL)
    run, chunk = tl.program_id(0) % parts, tl.program_id(0) // parts
    k = run * STEP + tl.arange(0, STEP)
    count = tl.load(hist_ptr + (chunk.to(tl.int64) * keys + k) * APART, mask=k < keys, other=0)
    tl.store(part_ptr + (chunk * parts + run) * 2, tl.sum(count, 0))
    tl.store(part_ptr + (chunk * parts + run) * 2 + 1, tl.sum((count + TILE - 1) // TILE, 0))


@triton.jit(do_not_specialize=["keys", "parts"])
def invert_offset_kernel(
    hist_ptr,
    part_ptr,
    offset_ptr,
    first_ptr,
    keys,
    parts,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    APART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Where each key's list begins in its chunk's pairs, and its first tile: offset, first [chunks,
    keys + 1].
    """
    follow(PDL)
    run, chunk = tl.program_id(0) % parts, tl.program_id(0) // parts
    j = tl.arange(0, STEP)
    pairs = tl.zeros((), tl.int32)
    tiles = tl.zeros((), tl.int32)
    if run > 0:
        for o in range(0, run, STEP):
            at = part_ptr + (chunk * parts + o + j) * 2
            pairs += tl.sum(tl.load(at, mask=o + j < run, other=0), 0)
            tiles += tl.sum(tl.load(at + 1, mask=o + j < run, other=0), 0)
    k = run * STEP + j
    count = tl.load(hist_ptr + (chunk.to(tl.int64) * keys + k) * APART, mask=k < keys, other=0)
    more = (count + TILE - 1) // TILE
    out = chunk.to(tl.int64) * (keys + 1)
    tl.store(offset_ptr + out + k, pairs + tl.cumsum(count, 0) - count, mask=k < keys)
    tl.store(first_ptr + out + k, tiles + tl.cumsum(more, 0) - more, mask=k < keys)
    if run == parts - 1:
        tl.store(offset_ptr + out + keys, pairs + tl.sum(count, 0))
        tl.store(first_ptr + out + keys, tiles + tl.sum(more, 0))


@triton.jit(
    do_not_specialize=[
        "max_blocks",
        "keys",
        "num_tiles",
        "chunk_tiles",
        "chunk_pairs",
        "entries",
        "entry_programs",
        "steps",
    ]
)
def invert_place_kernel(
    ids_ptr,
    tile_ptr,
    order_ptr,
    count_ptr,
    rank_ptr,
    offset_ptr,
    first_ptr,
    pair_ptr,
    entry_ptr,
    max_blocks,
    keys,
    num_tiles,
    chunk_tiles,
    chunk_pairs,
    entries,
    entry_programs,
    steps,
    TOPK: tl.constexpr,
    W: tl.constexpr,
    TILE: tl.constexpr,
    PAIR_TILE: tl.constexpr,
    ENTRIES: tl.constexpr,
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """First num_tiles programs: pairs into the lists. The others: the chunks' tiles of pairs (key,
    begin, end).
    """
    follow(PDL)
    t = tl.program_id(0)
    if t < num_tiles:
        if tl.load(count_ptr + t * 2) < 0:
            chunk = (t // chunk_tiles).to(tl.int64)
            seq = tl.load(tile_ptr + t * FIELDS)
            begin = tl.load(tile_ptr + t * FIELDS + 1)
            base = tl.load(
                tile_ptr + (t // chunk_tiles) * chunk_tiles * FIELDS + 1
            )  # the chunk's first row
            r = tl.arange(0, TILE)
            w = tl.arange(0, W)[None, :]
            live = begin + r < tl.load(tile_ptr + t * FIELDS + 2)
            i = tl.load(order_ptr + begin + r, mask=live, other=0).to(tl.int64)
            ids = tl.load(
                ids_ptr + i[:, None] * TOPK + w, mask=live[:, None] & (w < TOPK), other=-1
            )
            pair_ok = (ids >= 0) & (ids < max_blocks)
            pair = (begin + r).to(tl.int64)[:, None] * TOPK + w
            rank = tl.load(rank_ptr + pair, mask=pair_ok, other=0)
            key = chunk * (keys + 1) + seq * max_blocks + ids
            at = tl.load(offset_ptr + key, mask=pair_ok, other=0) + rank
            number = (begin - base + r)[:, None] * TOPK + w
            tl.store(pair_ptr + chunk * chunk_pairs + at, number, mask=pair_ok)
    else:
        chunk = ((t - num_tiles) // entry_programs).to(tl.int64)
        e = (t - num_tiles) % entry_programs * ENTRIES + tl.arange(0, ENTRIES)
        first = first_ptr + chunk * (keys + 1)
        offset = offset_ptr + chunk * (keys + 1)
        low = tl.zeros((ENTRIES,), tl.int32)
        high = low + keys
        total = tl.load(first + keys)
        for _ in range(steps):
            middle = (low + high) // 2
            reached = tl.load(first + middle) <= e
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle)
        used = (e < entries) & (e < total)
        begin = tl.load(offset + low, mask=used, other=0)
        begin += (e - tl.load(first + low, mask=used, other=0)) * PAIR_TILE
        end = tl.minimum(begin + PAIR_TILE, tl.load(offset + low + 1, mask=used, other=0))
        out = entry_ptr + (chunk * entries + e) * 4
        tl.store(out, low // max_blocks, mask=used)
        tl.store(out + 1, low % max_blocks, mask=used)
        tl.store(out + 2, begin, mask=used)
        tl.store(out + 3, end, mask=used)
