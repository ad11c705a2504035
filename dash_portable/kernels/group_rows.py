"""Which rows go together in prefill: by sequence and class, cut into tiles of one class.

Rows of one sequence fall into two classes: those with a remote block of their own page (they look
at few blocks, which neighbours share), and those that scan every remote block. `group_rows` orders
the rows of each sequence by class, keeps their order within it, and cuts them into tiles. It
depends on positions, pages and ranges only, so it is run once a step, not once a layer.
"""

import triton
import triton.language as tl

from .primitives import ROLE, token_at

# A tile's record: sequence (-1: no tile), begin, end, class, number in its sequence, the
# sequence's first place in the order, two unused.
TILE_FIELDS = 8
CHUNK = 256  # rows of one program of the grouping


@triton.jit(do_not_specialize=["num_rows", "entries", "stride_sr", "stride_rr", "stride_tr"])
def rows_class_kernel(
    seq_ptr,
    pos_ptr,
    query_page_ptr,
    num_pages_ptr,
    start_ptr,
    range_ptr,
    cache_ptr,
    table_ptr,
    first_ptr,
    last_ptr,
    page_ptr,
    part_ptr,
    num_rows,
    entries,
    stride_sr,
    stride_rr,
    stride_cb,
    stride_ch,
    stride_ct,
    stride_tr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    LOCAL_BLOCKS: tl.constexpr,
    HAS_PAGES: tl.constexpr,
    GIVEN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Per row: the first and last block it may choose, and its page + 1 (0: it scans). Per program:
    rows of either class.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i_ok = i < num_rows
    pos = tl.load(pos_ptr + i, mask=i_ok, other=-1)
    live = pos >= 0
    last = tl.where(live, pos // BLOCK - LOCAL_BLOCKS, -1)
    first = tl.zeros((ROWS,), tl.int32)
    own = live & (pos < 0)  # nobody yet
    page = tl.zeros((ROWS,), tl.int32)
    if HAS_PAGES:
        page = tl.load(query_page_ptr + i, mask=live, other=-1) + 1
        known = live & (page > 0) & (page < entries) & (last >= 0)
        known = known & (page <= tl.load(num_pages_ptr + i, mask=live, other=-1))
        if not GIVEN:
            known = known & (
                page <= pos
            )  # row `page` of the sequence holds its start, once it is stored
        seq = tl.load(seq_ptr + i, mask=live, other=0).to(tl.int64)
        at = start_ptr + seq * stride_sr + page * 2
        start = tl.load(at, mask=known, other=0)
        count = tl.load(at + 1, mask=known, other=0)
        known = known & (count > 0) & (start >= 0)
        first = tl.where(known, start // BLOCK, 0)
        final = tl.where(known, tl.minimum((start + count - 1) // BLOCK, last), -1)
        inside = tl.zeros((ROWS,), tl.int32)  # a block whose range only encloses the page
        wanted = known & (first <= final)
        step = tl.zeros((), tl.int32)
        while tl.max(wanted.to(tl.int32), 0) > 0:
            block = first[:, None] + step + tl.arange(0, 4)[None, :]
            b_ok = wanted[:, None] & (block <= final[:, None])
            at2 = range_ptr + (seq * stride_rr)[:, None] + block * 2
            low = tl.load(at2, mask=b_ok, other=0)
            high = tl.load(at2 + 1, mask=b_ok, other=0)
            same = (low == page[:, None]) | (high == page[:, None])
            between = (low < page[:, None]) & (page[:, None] < high) & (low > 0)
            own = own | (tl.max((b_ok & same).to(tl.int32), 1) > 0)
            inside = tl.maximum(inside, tl.max((b_ok & between).to(tl.int32), 1))
            step += 4
            wanted = wanted & (own == 0) & (first + step <= final)
        asked = (inside > 0) & (own == 0)
        if (
            tl.max(asked.to(tl.int32), 0) > 0
        ):  # such a page lies wholly in that block: do its roles hold an image?
            aux = tl.full((), HEADS, tl.int64) * stride_ch + D + ROLE
            for j in range(BLOCK):
                # Counts that do not fit the ranges must not lead behind that block.
                t_ok = asked & (j < count) & (start % BLOCK + j < BLOCK)
                row = token_at(
                    table_ptr + seq * stride_tr, start + j, t_ok, stride_cb, stride_ct, P
                )
                role = tl.load(cache_ptr + row + aux, mask=t_ok, other=0.0).to(tl.float32)
                own = own | (t_ok & (role == 1.0))
        first = tl.where(own, first, 0)
        last = tl.where(own, final, last)
    tl.store(first_ptr + i, first, mask=i_ok)
    tl.store(last_ptr + i, tl.maximum(last, -1), mask=i_ok)
    tl.store(page_ptr + i, tl.where(own, page, 0), mask=i_ok)
    tl.store(part_ptr + tl.program_id(0) * 2, tl.sum((live & own).to(tl.int32), 0))
    tl.store(part_ptr + tl.program_id(0) * 2 + 1, tl.sum((live & (own == 0)).to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_rows"])
def rows_count_kernel(pos_ptr, page_ptr, part_ptr, before_ptr, num_rows, ROWS: tl.constexpr):
    """For every row, and behind the last, how many rows of either class come before it: before [2,
    N + 1].
    """
    chunk = tl.program_id(0)
    own_base = tl.zeros((), tl.int32)
    scan_base = tl.zeros((), tl.int32)
    c = tl.arange(0, ROWS)
    for o in range(0, chunk, ROWS):
        own_base += tl.sum(tl.load(part_ptr + (o + c) * 2, mask=o + c < chunk, other=0), 0)
        scan_base += tl.sum(tl.load(part_ptr + (o + c) * 2 + 1, mask=o + c < chunk, other=0), 0)
    i = chunk * ROWS + c
    i_ok = i < num_rows
    live = tl.load(pos_ptr + i, mask=i_ok, other=-1) >= 0
    has = tl.load(page_ptr + i, mask=i_ok, other=0) > 0
    own = (live & has).to(tl.int32)
    scan = (live & (has == 0)).to(tl.int32)
    second = before_ptr + num_rows + 1
    tl.store(before_ptr + i, own_base + tl.cumsum(own, 0) - own, mask=i_ok)
    tl.store(second + i, scan_base + tl.cumsum(scan, 0) - scan, mask=i_ok)
    if chunk == tl.num_programs(0) - 1:
        tl.store(before_ptr + num_rows, own_base + tl.sum(own, 0))
        tl.store(second + num_rows, scan_base + tl.sum(scan, 0))


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def rows_tiles_kernel(
    query_start_ptr,
    before_ptr,
    seq_tile_ptr,
    num_rows,
    num_seqs,
    TILE: tl.constexpr,
    SEQS: tl.constexpr,
):
    """One program: the first tile of each sequence, seq_tile [R + 1]."""
    total = tl.zeros((), tl.int32)
    second = before_ptr + num_rows + 1
    for o in range(0, num_seqs, SEQS):
        r = o + tl.arange(0, SEQS)
        r_ok = r < num_seqs
        begin = tl.load(query_start_ptr + r, mask=r_ok, other=0)
        end = tl.load(query_start_ptr + r + 1, mask=r_ok, other=0)
        own = tl.load(before_ptr + end, mask=r_ok, other=0) - tl.load(
            before_ptr + begin, mask=r_ok, other=0
        )
        scan = tl.load(second + end, mask=r_ok, other=0) - tl.load(
            second + begin, mask=r_ok, other=0
        )
        tiles = (own + TILE - 1) // TILE + (scan + TILE - 1) // TILE
        tl.store(seq_tile_ptr + r, total + tl.cumsum(tiles, 0) - tiles, mask=r_ok)
        total += tl.sum(tiles, 0)
    tl.store(seq_tile_ptr + num_seqs, total)


@triton.jit(do_not_specialize=["num_rows", "num_seqs", "num_tiles", "row_programs", "steps"])
def rows_order_kernel(
    seq_ptr,
    pos_ptr,
    page_ptr,
    query_start_ptr,
    before_ptr,
    seq_tile_ptr,
    order_ptr,
    tile_ptr,
    num_rows,
    num_seqs,
    num_tiles,
    row_programs,
    steps,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """First programs: the rows by sequence, class and position. The others: the records of the
    tiles.
    """
    second = before_ptr + num_rows + 1
    c = tl.arange(0, ROWS)
    if tl.program_id(0) < row_programs:
        i = tl.program_id(0) * ROWS + c
        live = tl.load(pos_ptr + i, mask=i < num_rows, other=-1) >= 0
        seq = tl.load(seq_ptr + i, mask=live, other=0)
        own = tl.load(page_ptr + i, mask=live, other=0) > 0
        begin = tl.load(query_start_ptr + seq, mask=live, other=0)
        end = tl.load(query_start_ptr + seq + 1, mask=live, other=0)
        own_at = tl.load(before_ptr + i, mask=live, other=0) + tl.load(
            second + begin, mask=live, other=0
        )
        scan_at = tl.load(second + i, mask=live, other=0) + tl.load(
            before_ptr + end, mask=live, other=0
        )
        tl.store(order_ptr + tl.where(own, own_at, scan_at), i, mask=live)
    else:
        t = (tl.program_id(0) - row_programs) * ROWS + c
        t_ok = t < num_tiles
        low = tl.zeros((ROWS,), tl.int32)
        high = low + num_seqs
        for _ in range(steps):
            middle = (low + high) // 2
            reached = tl.load(seq_tile_ptr + middle) <= t
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle)
        used = t_ok & (t < tl.load(seq_tile_ptr + num_seqs))
        begin = tl.load(query_start_ptr + low, mask=used, other=0)
        end = tl.load(query_start_ptr + low + 1, mask=used, other=0)
        own_0 = tl.load(before_ptr + begin, mask=used, other=0)
        own_1 = tl.load(before_ptr + end, mask=used, other=0)
        base = own_0 + tl.load(second + begin, mask=used, other=0)
        middle_at = base + own_1 - own_0
        end_at = own_1 + tl.load(second + end, mask=used, other=0)
        number = t - tl.load(seq_tile_ptr + low, mask=used, other=0)
        own_tiles = (own_1 - own_0 + TILE - 1) // TILE
        own = number < own_tiles
        at = tl.where(own, base + number * TILE, middle_at + (number - own_tiles) * TILE)
        stop = tl.minimum(at + TILE, tl.where(own, middle_at, end_at))
        record = tile_ptr + t * FIELDS
        tl.store(record, tl.where(used, low, -1), mask=t_ok)
        tl.store(record + 1, at, mask=t_ok)
        tl.store(record + 2, tl.where(used, stop, at), mask=t_ok)
        tl.store(record + 3, own.to(tl.int32), mask=t_ok)
        tl.store(record + 4, number, mask=t_ok)
        tl.store(record + 5, base, mask=t_ok)


def tile_bound(num_rows, num_seqs, tile):
    """The most tiles that num_rows rows of num_seqs sequences can need."""
    return max(min(num_rows, -(-num_rows // tile) + 2 * num_seqs), 1)


def group_shapes(num_rows, num_seqs, tile):
    """Shapes of the int32 tensors that group_rows fills: every one is written before it is read."""
    return {
        "first": (num_rows,),
        "last": (num_rows,),
        "page": (num_rows,),
        "order": (num_rows,),
        "before": (2, num_rows + 1),
        "part": (-(-num_rows // CHUNK), 2),
        "seq_tile": (num_seqs + 1,),
        "tiles": (tile_bound(num_rows, num_seqs, tile), TILE_FIELDS),
    }


def group_rows(
    row_seq,
    row_pos,
    query_page,
    num_pages,
    query_start,
    starts,
    ranges,
    cache,
    block_table,
    groups,
    *,
    block,
    local_blocks,
    tile,
    starts_given=False,
):
    """Class and order of all rows of a step, and the list of tiles; once a step, four launches.

    row_seq, row_pos, query_page, num_pages int32 [N]; query_start int32 [R + 1]; starts int32 [R,
    pages, 2] (first token, count) or None when no row has a page; ranges int32 [R, blocks, 2]; each
    sequence contiguous; groups: the tensors of group_shapes. starts_given says that starts is a
    page table: it then holds for rows that are not stored yet.
    """
    num_rows, num_seqs = row_pos.shape[0], query_start.shape[0] - 1
    if num_rows == 0:
        return
    chunks = groups["part"].shape[0]
    has_pages = starts is not None
    heads, width = cache.shape[1] - 1, cache.shape[3] // 2
    one = row_pos
    rows_class_kernel[(chunks,)](
        row_seq,
        row_pos,
        query_page if has_pages else one,
        num_pages if has_pages else one,
        starts if has_pages else one,
        ranges if has_pages else one,
        cache,
        block_table,
        groups["first"],
        groups["last"],
        groups["page"],
        groups["part"],
        num_rows,
        starts.shape[1] if has_pages else 0,
        starts.stride(0) if has_pages else 0,
        ranges.stride(0) if has_pages else 0,
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        block_table.stride(0),
        HEADS=heads,
        D=width,
        P=cache.shape[2],
        BLOCK=block,
        LOCAL_BLOCKS=local_blocks,
        HAS_PAGES=has_pages,
        GIVEN=starts_given,
        ROWS=CHUNK,
        num_warps=4,
    )
    rows_count_kernel[(chunks,)](
        row_pos, groups["page"], groups["part"], groups["before"], num_rows, ROWS=CHUNK, num_warps=4
    )
    tiles = groups["tiles"]
    rows_tiles_kernel[(1,)](
        query_start,
        groups["before"],
        groups["seq_tile"],
        num_rows,
        num_seqs,
        TILE=tile,
        SEQS=256,
        num_warps=4,
    )
    num_tiles = tiles.shape[0]
    rows_order_kernel[(chunks + -(-num_tiles // CHUNK),)](
        row_seq,
        row_pos,
        groups["page"],
        query_start,
        groups["before"],
        groups["seq_tile"],
        groups["order"],
        tiles,
        num_rows,
        num_seqs,
        num_tiles,
        chunks,
        num_seqs.bit_length(),
        TILE=tile,
        ROWS=CHUNK,
        FIELDS=TILE_FIELDS,
        num_warps=4,
    )
