"""Merge: one softmax over all segments of a row, from the segments' own softmaxes."""

import triton
import triton.language as tl


@triton.jit
def merge_segments_kernel(
    out_ptr, lse_ptr, used_ptr, bias_ptr, merged_ptr, stride_on, stride_os, stride_oh, stride_ln,
    stride_ls, stride_lh,
    HQ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SEGMENTS: tl.constexpr, S: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Grid N * HQ.

    out     [N, SEGMENTS, HQ, D]  normalised output of each segment
    lse     float32 [N, SEGMENTS, HQ], natural logarithm
    used    int32 [N, SEGMENTS], keys of each segment; 0: no weight, whatever its out and lse hold
    bias    float32 [N, SEGMENTS - 1], added to all but the last segment's lse (BIAS)
    merged  [N, HQ, D] contiguous; zeros where every segment is empty. S is SEGMENTS padded to a
            power of two
    """
    n = (tl.program_id(0) // HQ).to(tl.int64)
    h = (tl.program_id(0) % HQ).to(tl.int64)
    s = tl.arange(0, S).to(tl.int64)
    d = tl.arange(0, DP)
    full = tl.load(used_ptr + n * SEGMENTS + s, mask=s < SEGMENTS, other=0) > 0
    lse = tl.load(lse_ptr + n * stride_ln + s * stride_ls + h * stride_lh, mask=full, other=0.0)
    if BIAS:
        lse += tl.load(bias_ptr + n * (SEGMENTS - 1) + s, mask=s < SEGMENTS - 1, other=0.0)
    lse = tl.where(full, lse, float("-inf"))
    top = tl.max(lse, 0)
    weight = tl.where(full, tl.exp(lse - tl.where(top == float("-inf"), 0.0, top)), 0.0)
    at = out_ptr + n * stride_on + h * stride_oh + s[:, None] * stride_os + d[None, :]
    out = tl.load(at, mask=full[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    whole = tl.sum(weight, 0)
    merged = tl.sum(out * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(merged_ptr + (n * HQ + h) * D + d, merged.to(merged_ptr.dtype.element_ty), mask=d < D)
