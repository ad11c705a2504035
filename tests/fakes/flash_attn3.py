"""FlashAttention 3 in three conventions: 2.7.4, 2.8.3 (no LSE from varlen) and main."""

from __future__ import annotations

import math
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


def pairs(width: int, value_width: int) -> None:
    """Widths of keys and values that the kernels exist for."""
    need(width % 8 == 0, "head_size must be a multiple of 8")
    need(width <= 256 and value_width <= 512, "head dimension at most 256")
    need(
        width == value_width
        or (128 < width <= 192 and 96 < value_width <= 128)
        or (width <= 64 and value_width <= 512),
        "V headdim different from Q/K headdim: only (128, 192] with (96, 128], or up to 64",
    )


def _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, scale, causal, window):
    halves(q, k, v)
    need(q.shape[1] % k.shape[1] == 0, "Number of heads in key/value must divide heads in query")
    need(q.shape[-1] == k.shape[-1], "q and k must have the same head_size")
    pairs(q.shape[-1], v.shape[-1])
    starts_k = index(cu_seqlens_k, "cu_seqlens_k")
    lengths = differences(starts_k) if seqused_k is None else index(seqused_k, "seqused_k")
    return attend(
        q,
        plain_runs(k, v, starts_k[:-1], lengths),
        index(cu_seqlens_q, "cu_seqlens_q"),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        left=window[0],
        right=0 if causal else window[1],
        clears=False,
    )


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    halves(q, k_cache, v_cache)
    need(page_table is not None and cu_seqlens_q is not None, "this fake knows paged varlen only")
    got = attend(
        q,
        paged_runs(k_cache, v_cache, page_table, index(cache_seqlens, "cache_seqlens")),
        index(cu_seqlens_q, "cu_seqlens_q"),
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        left=window_size[0],
        right=0 if causal else window_size[1],
        # Pages below the key tile go through the loader that clears; whole tiles do not.
        clears=k_cache.shape[1] % 128 != 0,
    )
    out = got.out.to(q.dtype)
    return (out, got.lse, None, None) if return_softmax_lse else out


def _whole(got, max_seqlen_k):
    return got.lse.masked_fill(got.empty, math.inf if max_seqlen_k == 0 else -math.inf)


def with_kvcache_of_v274(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    sink_token_length=0,
    softcap=0.0,
    rotary_interleaved=True,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    return flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=cache_seqlens,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        return_softmax_lse=return_softmax_lse,
    )


def _v274() -> ModuleType:
    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=None,
        causal=False,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        window_size=(-1, -1),
        sink_token_length=0,
        softcap=0.0,
        num_splits=1,
        pack_gqa=None,
        deterministic=False,
        sm_margin=0,
    ):
        got = _varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, softmax_scale, causal, window_size
        )
        return got.out.to(q.dtype), _whole(got, max_seqlen_k)

    return _module(flash_attn_varlen_func, with_kvcache_of_v274)


def _v283() -> ModuleType:
    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q=None,
        seqused_k=None,
        softmax_scale=None,
        causal=False,
        qv=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        num_splits=1,
        pack_gqa=None,
        deterministic=False,
        sm_margin=0,
    ):
        got = _varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, softmax_scale, causal, window_size
        )
        return got.out.to(q.dtype)

    return _module(flash_attn_varlen_func)


def _main() -> ModuleType:
    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q=None,
        seqused_k=None,
        softmax_scale=None,
        causal=False,
        qv=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        num_splits=1,
        pack_gqa=None,
        deterministic=False,
        sm_margin=0,
        return_attn_probs=False,
    ):
        got = _varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, softmax_scale, causal, window_size
        )
        out = got.out.to(q.dtype)
        return (out, _whole(got, max_seqlen_k)) if return_attn_probs else out

    return _module(flash_attn_varlen_func)


def _module(varlen, with_kvcache=flash_attn_with_kvcache) -> ModuleType:
    return package(
        "flash_attn_interface",
        flash_attn_varlen_func=varlen,
        flash_attn_with_kvcache=with_kvcache,
    )


V274 = Fake(
    name="flash_attn_3-2.7.4",
    distributions=(("flash-attn-3", "3.0.0b1"),),
    modules=lambda: {"flash_attn_interface": _v274()},
    arch="sm90",
)
V283 = Fake(
    name="flash_attn_3-2.8.3",
    distributions=(("flash-attn-3", "3.0.0b1"),),
    modules=lambda: {"flash_attn_interface": _v283()},
    arch="sm90",
)
MAIN = Fake(
    name="flash_attn_3-main",
    distributions=(("flash-attn-3", "3.0.0b1"),),
    modules=lambda: {"flash_attn_3.flash_attn_interface": _main()},
    arch="sm90",
)
