"""amd-aiter: CK and assembly on CDNA, Triton on RDNA; and the unrelated package of the same import
name."""

from __future__ import annotations

import math
from types import ModuleType

import torch

from tests.fakes.arithmetic import attend, differences, halves, index, need, plain_runs
from tests.fakes.machine import Fake, package


def _runs(q, k, v, cu_seqlens_k, cu_seqlens_k_padded=None):
    halves(q, k, v)
    need(q.shape[1] % k.shape[1] == 0, "heads of q must be a multiple of those of k")
    need(q.shape[-1] <= 256 and q.shape[-1] % 8 == 0, "head_dim <= 256 and a multiple of 8")
    need(v.shape[-1] == q.shape[-1], "this fake knows equal head dims only")
    starts = index(cu_seqlens_k, "cu_seqlens_k")
    at = starts if cu_seqlens_k_padded is None else index(cu_seqlens_k_padded, "padded")
    return plain_runs(k, v, at[:-1], differences(starts))


def _cdna() -> ModuleType:
    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        min_seqlen_q=0,
        dropout_p=0.0,
        softmax_scale=None,
        logits_soft_cap=0.0,
        causal=False,
        window_size=(-1, -1),
        bias=None,
        alibi_slopes=None,
        deterministic=False,
        return_lse=False,
        return_attn_probs=False,
        how_v3_bf16_cvt=1,
        block_table=None,
        out=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_k_padded=None,
    ):
        if block_table is not None:
            # CK stops here; the assembly kernels take the table and never look at it.
            raise UnboundLocalError("cannot access local variable 'filter_fwd'")
        assert not (return_lse and torch.is_grad_enabled()), "return_lse with gradients on"
        runs = _runs(q, k, v, cu_seqlens_k, cu_seqlens_k_padded)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        got = attend(q, runs, index(cu_seqlens_q, "cu_seqlens_q"), scale=scale, clears=False)
        nothing = math.inf if max_seqlen_k == 0 else -math.inf
        result = got.out.to(q.dtype)
        return (result, got.lse.masked_fill(got.empty, nothing)) if return_lse else result

    return package("aiter.ops.mha", flash_attn_varlen_func=flash_attn_varlen_func)


def _triton(name: str) -> ModuleType:
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
        bias=None,
        alibi_slopes=None,
        deterministic=False,
        return_lse=False,
        return_attn_probs=False,
        block_table=None,
        out=None,
        config=None,
    ):
        runs = _runs(q, k, v, cu_seqlens_k)  # block_table and out are never looked at
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        starts = index(cu_seqlens_q, "cu_seqlens_q")
        got = attend(q, runs, starts, scale=scale, right=0 if causal else -1, clears=False)
        lse = got.lse.masked_fill(got.empty, 0.0 if causal else -math.inf)
        result = got.out.to(q.dtype)
        return (result, lse.t().contiguous()) if return_lse else result

    return package(name, flash_attn_varlen_func=flash_attn_varlen_func)


CDNA = Fake(
    name="aiter-0.1.7-cdna",
    distributions=(("amd-aiter", "0.1.7.post2.dev18"),),
    modules=lambda: {"aiter.ops.mha": _cdna()},
    arch="gfx942",
)
RDNA = Fake(
    name="aiter-0.1.7-rdna",
    distributions=(("amd-aiter", "0.1.7.post2.dev18"),),
    modules=lambda: {"aiter.ops.triton.mha": _triton("aiter.ops.triton.mha")},
    arch="gfx1100",
)
RDNA_NEW = Fake(
    name="aiter-0.1.20-rdna",
    distributions=(("amd-aiter", "0.1.20.post1"),),
    modules=lambda: {"aiter.ops.triton.attention.mha": _triton("aiter.ops.triton.attention.mha")},
    arch="gfx1100",
)
IMPOSTOR = Fake(
    name="aiter-of-iterators",
    distributions=(("aiter", "0.13.20191203"),),
    modules=lambda: {"aiter": package("aiter", map_filter=lambda *rest: None)},
    arch="gfx942",
)
