"""Attention of prefill rows to their chosen blocks and local window, in two forms.

A tile whose rows share few blocks walks the union of them, a bias (or -inf) per row and block, then
its local keys, and is done. The pairs (row, block) of the other tiles are grouped by block: a
program takes rows that chose one block, for all heads, and writes a partial result for each pair; a
merge adds them to the row's local result. Partial results of one chunk of tiles lie in one buffer,
whose size is the caller's budget; chunks follow one another through it.

By block, and for the local keys, a row's arithmetic does not depend on the rows beside it: blocks
and keys that are not the row's add nothing, exactly, while they are finite (0 times an infinite
value of a later token, or in a union of a block that only a neighbour chose, is NaN). With a limit
of 0 there is no other form, and outputs do not depend on the batch.
"""

import triton
import triton.language as tl

from .primitives import LOG2E, follow, token_at


@triton.jit
def _block_at(
    table_row, block, n, n_ok, stride_cb, stride_ct, P: tl.constexpr, BLOCK: tl.constexpr
):
    """Offsets of keys n (0 .. BLOCK - 1) of one sparse block; one look into the table where a cache
    block holds it whole.
    """
    if P % BLOCK == 0:
        first = block * BLOCK
        place = tl.load(table_row + first // P).to(tl.int64)
        return place * stride_cb + (first % P + n).to(tl.int64) * stride_ct
    else:
        token = block * BLOCK + n
        return token_at(table_row, token, n_ok, stride_cb, stride_ct, P)


@triton.jit
def _load_rows(ptr, at, ok, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr):
    """[M, DP] rows at offsets `at` [M]."""
    d = tl.arange(0, DP)
    if D == DP and not MASKED:
        return tl.load(ptr + at[:, None] + d[None, :])
    else:
        return tl.load(
            ptr + at[:, None] + d[None, :], mask=ok[:, None] & (d[None, :] < D), other=0.0
        )


@triton.jit
def _load_columns(ptr, at, ok, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr):
    """[DP, M]: the rows at offsets `at` [M], transposed."""
    d = tl.arange(0, DP)
    if D == DP and not MASKED:
        return tl.load(ptr + at[None, :] + d[:, None])
    else:
        return tl.load(
            ptr + at[None, :] + d[:, None], mask=ok[None, :] & (d[:, None] < D), other=0.0
        )


@triton.jit
def _add_keys(score, value, top, mass, total):
    """One more tile of keys into the running softmax; scores are in log2."""
    new = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)  # -inf minus -inf is NaN
    fade = tl.exp2(top - safe)
    weight = tl.exp2(score - safe[:, None])
    mass = mass * fade + tl.sum(weight, 1)
    total = tl.dot(weight.to(value.dtype), value, total * fade[:, None], input_precision="ieee")
    return new, mass, total


@triton.jit
def _union_places(
    union_ptr, place_ptr, at, n, table_row, stride_cb, stride_ct, P: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Token numbers of the keys of BLOCKS entries of a union from `at` on, and their offsets."""
    token = tl.load(union_ptr + at) * BLOCK + n
    for s in tl.static_range(1, BLOCKS):
        later = tl.load(union_ptr + at + s) * BLOCK + n - s * BLOCK
        token = tl.where(n >= s * BLOCK, later, token)
    if P % BLOCK == 0:
        held = tl.load(place_ptr + at)
        for s in tl.static_range(1, BLOCKS):
            held = tl.where(n >= s * BLOCK, tl.load(place_ptr + at + s), held)
        place = held.to(tl.int64) * stride_cb + (token % P).to(tl.int64) * stride_ct
    else:
        place = token_at(table_row, token, n >= 0, stride_cb, stride_ct, P)
    return token, place


@triton.jit
def _union_weights(weight, r, n, TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """[TILE, keys], or [TILE, 1] for one block: what each row's bias adds to the scores."""
    found = tl.load(weight + r)[:, None]
    for s in tl.static_range(1, BLOCKS):
        found = tl.where((n >= s * BLOCK)[None, :], tl.load(weight + s * TILE + r)[:, None], found)
    return found


@triton.jit
def _local_places(
    table_row, token, first, last, k, stride_cb, stride_ct, P: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Offsets of STEP keys in a row from `first` on, a multiple of STEP; those behind `last` are
    anything.
    """
    UNIT: tl.constexpr = STEP if P % STEP == 0 else BLOCK
    if P % UNIT == 0:
        held = tl.load(table_row + first // P)
        for s in tl.static_range(1, STEP // UNIT):
            at = tl.minimum(first + s * UNIT, last) // P
            held = tl.where(k >= s * UNIT, tl.load(table_row + at), held)
        place = held.to(tl.int64) * stride_cb + (token % P).to(tl.int64) * stride_ct
    else:
        place = token_at(table_row, token, token <= last, stride_cb, stride_ct, P)
    return place


@triton.jit(do_not_specialize=["stride_tr"])
def attend_tile_kernel(
    query_ptr,
    cache_ptr,
    table_ptr,
    tile_ptr,
    order_ptr,
    pos_ptr,
    count_ptr,
    union_ptr,
    place_ptr,
    weight_ptr,
    mass_ptr,
    out_ptr,
    scale,
    stride_cb,
    stride_ch,
    stride_ct,
    stride_tr,
    HQ: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    LOCAL: tl.constexpr,
    TILE: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    LOCAL_STAGES: tl.constexpr,
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of a tile: its union, then its local keys. A tile counted -1 has its local keys
    only, and its mass stored.

    BLOCKS: of the union in one step. STEP: local keys in one step, a multiple of BLOCK. Blocks that
    reach into the window of some row come with the local keys.
    """
    follow(PDL)
    head, t = tl.program_id(0) % HQ, tl.program_id(0) // HQ
    seq = tl.load(tile_ptr + t * FIELDS)
    if seq >= 0:
        r = tl.arange(0, TILE)
        at = tl.load(tile_ptr + t * FIELDS + 1) + r
        i = tl.load(order_ptr + at, mask=at < tl.load(tile_ptr + t * FIELDS + 2), other=-1)
        live = i >= 0
        pos = tl.load(pos_ptr + i, mask=live, other=-1)
        row = i.to(tl.int64) * (HQ * D) + head * D
        query = _load_rows(query_ptr, row, live, D, DP, True)
        keys = cache_ptr + (head // G).to(tl.int64) * stride_ch
        values = keys + D
        table_row = table_ptr + seq.to(tl.int64) * stride_tr
        factor = scale * LOG2E
        begin = tl.maximum(pos + 1 - LOCAL, 0)  # first local key of each row
        nearest = tl.maximum(tl.min(tl.where(live, pos, 0x7FFFFFFF), 0) + 1 - LOCAL, 0)
        top = tl.full((TILE,), float("-inf"), tl.float32)
        mass = tl.zeros((TILE,), tl.float32)
        total = tl.zeros((TILE, DP), tl.float32)

        count = tl.load(count_ptr + t * 2)
        room = t.to(tl.int64) * ROOM
        n = tl.arange(0, BLOCK * BLOCKS)
        clear = tl.load(count_ptr + t * 2 + 1)
        for j in tl.range(0, clear, BLOCKS, num_stages=STAGES):
            token, place = _union_places(
                union_ptr, place_ptr, room + j, n, table_row, stride_cb, stride_ct, P, BLOCK, BLOCKS
            )
            key = _load_columns(keys, place, n >= 0, D, DP, False)
            value = _load_rows(values, place, n >= 0, D, DP, False)
            weight = _union_weights(weight_ptr + (room + j) * TILE, r, n, TILE, BLOCK, BLOCKS)
            score = tl.dot(query, key, input_precision="ieee") * factor + weight
            top, mass, total = _add_keys(score, value, top, mass, total)

        # From the first row's window to the last row: a row's own window, before it the blocks that
        # the row chose.
        k = tl.arange(0, STEP)
        last = tl.max(pos, 0)
        j = clear
        for first in tl.range(nearest // STEP * STEP, last + 1, STEP, num_stages=LOCAL_STAGES):
            token = first + k
            k_ok = token <= last
            place = _local_places(
                table_row, token, first, last, k, stride_cb, stride_ct, P, BLOCK, STEP
            )
            key = _load_columns(keys, place, k_ok, D, DP, True)
            value = _load_rows(values, place, k_ok, D, DP, True)
            score = tl.dot(query, key, input_precision="ieee") * factor
            prior = tl.full((TILE, 1), float("-inf"), tl.float32)
            for s in tl.static_range(STEP // BLOCK):
                block = tl.load(union_ptr + room + j, mask=j < count, other=-1)
                hit = block * BLOCK == first + s * BLOCK
                chosen = tl.load(
                    weight_ptr + (room + j) * TILE + r, mask=hit & (r >= 0), other=float("-inf")
                )
                prior = tl.where((k >= s * BLOCK)[None, :], chosen[:, None], prior)
                j += hit.to(tl.int32)
            own = token[None, :] >= begin[:, None]
            score = tl.where(own, score, score + prior)
            score = tl.where(token[None, :] <= pos[:, None], score, float("-inf"))
            top, mass, total = _add_keys(score, value, top, mass, total)

        mass = tl.where(mass > 0, mass, 1.0)
        result = (total * (1.0 / mass)[:, None]).to(out_ptr.dtype.element_ty)
        d = tl.arange(0, DP)
        if count < 0:
            tl.store(mass_ptr + i.to(tl.int64) * HQ + head, top + tl.log2(mass), mask=i >= 0)
        row = i.to(tl.int64)[:, None]
        out = out_ptr + (row * HQ + head) * D + d[None, :]
        tl.store(out, result, mask=(row >= 0) & (d[None, :] < D))


@triton.jit(
    do_not_specialize=["keys_total", "chunk_pairs", "entries", "chunk", "chunk_tile", "stride_tr"]
)
def attend_pair_kernel(
    query_ptr,
    cache_ptr,
    table_ptr,
    tile_ptr,
    order_ptr,
    pos_ptr,
    bias_ptr,
    first_ptr,
    pair_ptr,
    entry_ptr,
    part_ptr,
    part_mass_ptr,
    scale,
    keys_total,
    chunk_pairs,
    entries,
    chunk,
    chunk_tile,
    stride_cb,
    stride_ch,
    stride_ct,
    stride_tr,
    HQ: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    LOCAL: tl.constexpr,
    TOPK: tl.constexpr,
    PAIR_TILE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_UP: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One entry of the chunk's list: rows that chose one block against that block, HEADS heads one
    after another; partial result and mass of each pair.
    """
    follow(PDL)
    GROUPS: tl.constexpr = HQ // HEADS
    group, e = tl.program_id(0) % GROUPS, tl.program_id(0) // GROUPS
    n = tl.arange(0, N)
    n_ok = n < BLOCK
    r = tl.arange(0, PAIR_TILE)
    d = tl.arange(0, DP)
    base = tl.load(tile_ptr + chunk_tile * FIELDS + 1)
    pairs = pair_ptr + tl.full((), 1, tl.int64) * chunk * chunk_pairs
    records = entry_ptr + tl.full((), 4, tl.int64) * chunk * entries
    total = tl.load(first_ptr + tl.full((), 1, tl.int64) * chunk * (keys_total + 1) + keys_total)
    stride_h = tl.full((), 1, tl.int64) * stride_ch
    if e < total:
        record = records + e * 4
        seq = tl.load(record).to(tl.int64)
        block = tl.load(record + 1)
        at = tl.load(record + 2) + r
        live = at < tl.load(record + 3)
        pair = tl.load(pairs + at, mask=live, other=0)
        i = tl.load(order_ptr + base + pair // TOPK, mask=live, other=0).to(tl.int64)
        pos = tl.load(pos_ptr + i, mask=live, other=0)
        bias = tl.load(bias_ptr + i * TOPK + pair % TOPK, mask=live, other=0.0) * LOG2E
        place = _block_at(
            table_ptr + seq * stride_tr, block, n, n_ok, stride_cb, stride_ct, P, BLOCK
        )
        near = tl.maximum(pos + 1 - LOCAL, 0)
        seen = n_ok[None, :] & ((block * BLOCK + n)[None, :] < near[:, None])
        seen = seen | (live == 0)[:, None]  # a dead row stays finite
        wide = pair.to(tl.int64) * HQ
        # Masses go out together at the end: alone, each would cost a sector of its own.
        h = tl.arange(0, HEADS_UP)
        masses = tl.zeros((PAIR_TILE, HEADS_UP), tl.float32)
        for head in tl.range(group * HEADS, group * HEADS + HEADS, num_stages=STAGES):
            keys = cache_ptr + head // G * stride_h
            query = _load_rows(query_ptr, i * (HQ * D) + head * D, live, D, DP, True)
            key = _load_columns(keys, place, n_ok, D, DP, N > BLOCK)
            value = _load_rows(keys + D, place, n_ok, D, DP, N > BLOCK)
            score = tl.dot(query, key, input_precision="ieee") * (scale * LOG2E)
            score = tl.where(seen, score, float("-inf"))
            top = tl.max(score, 1)
            weight = tl.exp2(score - top[:, None])
            mass = tl.sum(weight, 1)
            # Divided behind the product: before it, the rounding of the largest weight, 1, would
            # be another error.
            part = tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            part = part * (1.0 / mass)[:, None]
            tl.store(
                part_ptr + ((wide + head) * D)[:, None] + d[None, :],
                part.to(part_ptr.dtype.element_ty),
                mask=live[:, None] & (d[None, :] < D),
            )
            one = top + tl.log2(mass) + bias
            masses = tl.where((h == head - group * HEADS)[None, :], one[:, None], masses)
        tl.store(
            part_mass_ptr + (wide + group * HEADS)[:, None] + h[None, :],
            masses,
            mask=live[:, None] & (h < HEADS)[None, :],
        )


@triton.jit(do_not_specialize=["chunk", "chunk_tiles"])
def attend_merge_kernel(
    tile_ptr,
    order_ptr,
    listed_ptr,
    listed_count_ptr,
    ids_ptr,
    mass_ptr,
    part_ptr,
    part_mass_ptr,
    out_ptr,
    chunk,
    chunk_tiles,
    HQ: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    TOPK: tl.constexpr,
    W: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows and one head at a time, of the listed tiles of a chunk: the local result (in out)
    and the rows' partial results become the output.

    Programs beside one another take heads of the same rows, whose partial results lie together.
    """
    follow(PDL)
    RUNS: tl.constexpr = TILE // ROWS
    base = tl.load(tile_ptr + chunk * chunk_tiles * FIELDS + 1)
    listed = listed_ptr + chunk * chunk_tiles
    w = tl.arange(0, W)[None, :]
    d = tl.arange(0, DP)
    d_ok = d[None, :] < D
    items = tl.load(listed_count_ptr + chunk) * (RUNS * HQ)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        head, run = item % HQ, item // HQ
        record = tile_ptr + tl.load(listed + run // RUNS) * FIELDS
        at = tl.load(record + 1) + run % RUNS * ROWS + tl.arange(0, ROWS)
        live = at < tl.load(record + 2)
        i = tl.load(order_ptr + at, mask=live, other=0).to(tl.int64)
        pair_ok = live[:, None] & (w < TOPK)
        used = tl.load(ids_ptr + i[:, None] * TOPK + w, mask=pair_ok, other=-1) >= 0
        pair = (at - base).to(tl.int64) * TOPK
        masses = tl.load(
            part_mass_ptr + (pair[:, None] + w) * HQ + head, mask=used, other=float("-inf")
        )
        mass = tl.load(mass_ptr + i * HQ + head, mask=live, other=0.0)
        top = tl.maximum(mass, tl.max(masses, 1))
        share = tl.exp2(mass - top)
        whole = share + tl.sum(tl.exp2(masses - top[:, None]), 1)
        out = out_ptr + (i * HQ + head)[:, None] * D + d[None, :]
        out_ok = live[:, None] & d_ok
        total = tl.load(out, mask=out_ok, other=0.0).to(tl.float32) * share[:, None]
        for s in tl.static_range(TOPK):
            has = tl.load(ids_ptr + i * TOPK + s, mask=live, other=-1) >= 0
            one = tl.load(part_mass_ptr + (pair + s) * HQ + head, mask=has, other=float("-inf"))
            part = part_ptr + ((pair + s) * HQ + head)[:, None] * D + d[None, :]
            part = tl.load(part, mask=has[:, None] & d_ok, other=0.0).to(tl.float32)
            total += part * tl.exp2(one - top)[:, None]
        total = total / whole[:, None]
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=out_ok)
