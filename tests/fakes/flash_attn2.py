"""FlashAttention 2: upstream on CUDA, the CK and the Triton engine on ROCm."""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from tests.fakes.arithmetic import (
    Answer,
    attend,
    differences,
    halves,
    index,
    need,
    paged_runs,
    plain_runs,
)
from tests.fakes.machine import Fake, package


def checked(
    engine: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    block_table: Tensor | None,
) -> Answer:
    """What all three engines check and compute; `engine` is cuda, ck or triton."""
    halves(q, k, v)
    starts_q, starts_k = index(cu_seqlens_q, "cu_seqlens_q"), index(cu_seqlens_k, "cu_seqlens_k")
    width, heads, kv_heads = q.shape[-1], q.shape[1], k.shape[-2]
    need(width <= 256, "FlashAttention forward only supports head dimension at most 256")
    need(heads % kv_heads == 0, "Number of heads in key/value must divide number of heads in query")
    need(len(starts_q) > 1, "batch size must be positive")
    need(k.shape[-1] == width and v.shape[-1] == width, "head sizes must be the same")
    need(q.shape[0] == starts_q[-1], "q must have shape (total_q, num_heads, head_size)")
    lengths = differences(starts_k)
    if block_table is not None and engine != "triton":
        step = 256 if engine == "cuda" else 128
        need(k.shape[1] % step == 0, f"Paged KV cache block size must be divisible by {step}")
        runs = paged_runs(k, v, block_table, lengths)
    else:  # the Triton engine never looks at the table
        need(k.dim() == 3, "k must have shape (total_k, num_heads_k, head_size)")
        runs = plain_runs(k, v, starts_k[:-1], lengths)
    folded = heads > kv_heads and max_seqlen_q == 1 and width % 8 == 0 and window == (-1, -1)
    if engine == "cuda" and folded:
        need(q.shape[0] == len(runs), "shape '[batch, heads_k, group, head]' is invalid for input")
    left, right = window if engine != "triton" else (-1, -1)
    if causal:
        right = 0
    scale = width**-0.5 if scale is None else scale
    return attend(q, runs, starts_q, scale=scale, left=left, right=right, clears=engine == "cuda")


def _flash(engine: str) -> ModuleType:
    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        got = checked(
            engine,
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            softmax_scale,
            causal,
            window_size,
            block_table,
        )
        nothing = {"cuda": math.inf, "ck": -math.inf, "triton": 0.0}[engine]
        if max_seqlen_k == 0 and engine == "ck":
            nothing = math.inf
        lse = got.lse.masked_fill(got.empty, nothing)
        out = got.out.to(q.dtype)
        return (out, lse, torch.empty(0, dtype=q.dtype)) if return_attn_probs else out

    return package("flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)


def _named(name: str, engine: str, arch: str) -> Fake:
    return Fake(
        name=name,
        distributions=(("flash-attn", "2.8.3.post2"),),
        modules=lambda: {"flash_attn": _flash(engine)},
        arch=arch,
    )


CUDA = _named("flash_attn-2.8.3-cuda", "cuda", "sm90")
CK = _named("flash_attn-2.8.3-rocm-ck", "ck", "gfx942")
TRITON = _named("flash_attn-2.8.3-rocm-triton", "triton", "gfx1100")
