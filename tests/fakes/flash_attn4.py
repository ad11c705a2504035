"""FlashAttention 4 alone: `flash_attn` is then a folder without a module of its own."""

from __future__ import annotations

from types import ModuleType

from tests.fakes.arithmetic import (
    attend,
    differences,
    halves,
    index,
    need,
    paged_runs,
    plain_runs,
)
from tests.fakes.machine import Fake, package


def flash_attn_varlen_func(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse=False,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    got = forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, softmax_scale, window_size
    )
    assert qv is None, "the fourth argument is qv"
    assert not causal, "this fake knows non-causal calls only"
    return got.out.to(q.dtype), got.lse if return_lse else None


def forward(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, scale, window):
    """The kernel behind the upstream function and vLLM's copy of it."""
    halves(q, k, v)
    for tensor in (q, k, v):
        assert tensor.shape[-1] % 8 == 0, "head_dim must be a multiple of 16 bytes"
        assert all(step * 2 % 16 == 0 for step in tensor.stride()[:-1]), "strides of 16 bytes"
    assert all(edge is None or edge >= 0 for edge in window), "a window has None for no bound"
    if page_table is not None:
        assert cu_seqlens_k is None, "page_table and cu_seqlens_k exclude each other"
        runs = paged_runs(k, v, page_table, index(seqused_k, "seqused_k"))
    else:
        starts = index(cu_seqlens_k, "cu_seqlens_k")
        lengths = differences(starts) if seqused_k is None else index(seqused_k, "seqused_k")
        need(max(starts) <= len(k), "cu_seqlens_k beyond k")
        runs = plain_runs(k, v, starts[:-1], lengths)
    left, right = (-1 if edge is None else edge for edge in window)
    return attend(
        q,
        runs,
        index(cu_seqlens_q, "cu_seqlens_q"),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        left=left,
        right=right,
        clears=False,
    )


def _cute() -> ModuleType:
    return package(
        "flash_attn.cute", flash_attn_varlen_func=flash_attn_varlen_func, __version__="0.0.0"
    )


B36 = Fake(
    name="flash_attn_4-4.0.0b36",
    distributions=(("flash-attn-4", "4.0.0b36"),),
    modules=lambda: {"flash_attn.cute": _cute()},
    arch="sm100",
)
