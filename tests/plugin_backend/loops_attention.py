"""Stands for the vendor's library: attention over runs of keys, written as loops."""

import torch
from torch import Tensor


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_k: Tensor, softmax_scale: float
) -> Tensor:
    """One query [heads, width] a run; keys and values [keys, kv heads, width]."""
    starts, group = cu_seqlens_k.tolist(), q.shape[1] // k.shape[1]
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype)
    for run in range(len(starts) - 1):
        keys, values = (x[starts[run] : starts[run + 1]].float() for x in (k, v))
        for head in range(q.shape[1]):
            logit = keys[:, head // group] @ q[run, head].float() * softmax_scale
            out[run, head] = (logit.softmax(0) @ values[:, head // group]).to(out.dtype)
    return out
