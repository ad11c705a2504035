"""Page tables: where in the cache each segment of a row lies, for libraries that read it in
place.
"""

import triton
import triton.language as tl


@triton.jit
def page_table_kernel(
    row_pos_ptr, row_seq_ptr, table_ptr, ids_ptr, pages_ptr, length_ptr, used_ptr, stride_table,
    per_block,
    P: tl.constexpr, PAGE: tl.constexpr, BS: tl.constexpr, WINDOW: tl.constexpr, TOPK: tl.constexpr,
    S: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Grid N: one line of C pages for each of TOPK + 1 segments, the local window last.

    pages   int32 [N, TOPK + 1, C]  0 where a segment has no page; page of token t is block *
                                    per_block + t % P // PAGE
    length  int32 [N, TOPK + 1]     keys from the first page's start; 1 for an empty segment
    used    int32 [N, TOPK + 1]     keys that count: they stand last
    WINDOW tokens in the local window; S is TOPK + 1 padded to a power of two
    """
    n = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, S)
    s_ok = s <= TOPK
    p = tl.load(row_pos_ptr + n)
    seq = tl.load(row_seq_ptr + n, mask=p >= 0, other=0).to(tl.int64)
    lo = tl.maximum(p + 1 - WINDOW, 0)
    far = s < TOPK
    block = tl.load(ids_ptr + n * TOPK + s, mask=far, other=0)
    start = tl.where(far, tl.maximum(block, 0) * BS, lo)
    used = tl.where(far, tl.minimum(tl.maximum(lo - start, 0), BS), p + 1 - lo)
    used = tl.where((p >= 0) & (block >= 0), used, 0)
    first = start // PAGE * PAGE
    at = n * (TOPK + 1) + s
    for c in range(C):
        token = first + c * PAGE
        ok = s_ok & (used > 0) & (token < start + used)
        where = tl.load(table_ptr + seq * stride_table + token // P, mask=ok, other=0)
        page = tl.where(ok, where * per_block + token % P // PAGE, 0)
        tl.store(pages_ptr + at * C + c, page, mask=s_ok)
    tl.store(length_ptr + at, tl.where(used > 0, start + used - first, 1), mask=s_ok)
    tl.store(used_ptr + at, used, mask=s_ok)
