"""vLLM's copy of generations 2, 3 and 4: another argument order, and generation 2 unless asked."""

from __future__ import annotations

import math
from types import ModuleType

import torch

from tests.fakes import flash_attn2, flash_attn3, flash_attn4
from tests.fakes.arithmetic import attend, differences, halves, index, need, paged_runs, plain_runs
from tests.fakes.machine import Fake, package

_OFFERS = {"sm80": (2,), "sm90": (2, 3, 4), "sm100": (2, 4), "sm120": (2,)}


def _module(arch: str) -> ModuleType:
    def fa_version_unsupported_reason(fa_version):
        if fa_version not in (2, 3, 4):
            raise ValueError(f"Unsupported FA version: {fa_version}")
        if fa_version in _OFFERS[arch]:
            return None
        return f"FA{fa_version} is only supported on other devices"

    def is_fa_version_supported(fa_version):
        return fa_version_unsupported_reason(fa_version) is None

    def flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        cu_seqlens_k=None,
        seqused_k=None,
        q_v=None,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=None,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
        return_softmax_lse=False,
        out=None,
        scheduler_metadata=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        num_splits=0,
        output_scale=None,
        fa_version=2,
        s_aux=None,
        cp_world_size=1,
        cp_rank=0,
        cp_tot_seqused_k=None,
        mask_mod=None,
        block_sparse_tensors=None,
        aux_tensors=None,
        aux_tensor_leading_dims=None,
        dynamic_causal=None,
        gather_kv_indices=None,
        gather_kv_valid_length=None,
    ):
        assert cu_seqlens_k is not None or seqused_k is not None, "one of them must be provided"
        assert fa_version == 4 or cu_seqlens_k is None or seqused_k is None, "not both"
        assert block_table is None or seqused_k is not None, "a table needs seqused_k"
        need(fa_version in _OFFERS[arch], f"no kernel image of FA{fa_version} for {arch}")
        window = (-1, -1) if window_size is None else tuple(window_size)
        if fa_version == 2 and num_splits > 1:
            raise NotImplementedError("FA2 does not support num_splits > 1")
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        if fa_version == 4:
            edges = tuple(None if edge < 0 else edge for edge in window)
            got = flash_attn4.forward(
                q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, scale, edges
            )
            lse = got.lse
        elif block_table is not None:
            got = _paged(fa_version, q, k, v, cu_seqlens_q, seqused_k, block_table, scale, window)
            lse = got.lse.masked_fill(got.empty, math.inf if fa_version == 2 else -math.inf)
        elif fa_version == 2:
            got = flash_attn2.checked(
                "cuda",
                q,
                k,
                v,
                cu_seqlens_q,
                cu_seqlens_k,
                max_seqlen_q,
                scale,
                causal,
                window,
                None,
            )
            lse = got.lse.masked_fill(got.empty, math.inf)
        else:
            halves(q, k, v)
            flash_attn3.pairs(q.shape[-1], v.shape[-1])
            starts = index(cu_seqlens_k, "cu_seqlens_k")
            runs = plain_runs(k, v, starts[:-1], differences(starts))
            got = attend(q, runs, index(cu_seqlens_q, "q"), scale=scale, clears=False)
            lse = got.lse
        result = got.out.to(q.dtype)
        if out is not None:
            result = out.copy_(result)
        return (result, lse) if return_softmax_lse else result

    return package(
        "vllm.vllm_flash_attn",
        flash_attn_varlen_func=flash_attn_varlen_func,
        is_fa_version_supported=is_fa_version_supported,
        fa_version_unsupported_reason=fa_version_unsupported_reason,
        compile_flash_attn_varlen_func_from_specs=compile_flash_attn_varlen_func_from_specs,
        compiled=COMPILED,
    )


def _paged(version, q, k, v, cu_seqlens_q, seqused_k, table, scale, window):
    halves(q, k, v)
    if version == 2:
        need(k.shape[1] % 16 == 0, "Paged KV cache block size must be divisible by 16")
        need(v.shape[-1] == q.shape[-1], "head sizes must be the same")
    return attend(
        q,
        paged_runs(k, v, table, index(seqused_k, "seqused_k")),
        index(cu_seqlens_q, "cu_seqlens_q"),
        scale=scale,
        left=window[0],
        right=window[1],
        clears=version == 2 or k.shape[1] % 128 != 0,
    )


COMPILED: list[dict[str, object]] = []


def compile_flash_attn_varlen_func_from_specs(
    *,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    q_dtype: torch.dtype,
    v_stride=None,
    k_stride=None,
    cu_seqlens_q_shape=None,
    cu_seqlens_k_shape=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=None,
    deterministic=False,
    return_softmax_lse=False,
    num_splits=0,
    fa_version=2,
    seqused_k_shape=None,
    page_table_shape=None,
    softcap=None,
):
    if fa_version != 4:
        raise ValueError(f"Compile-only FlashAttention is only supported for FA4, got {fa_version}")
    COMPILED.append({"q_shape": q_shape, "v_stride": v_stride, "num_splits": num_splits})


def _fake(arch: str) -> Fake:
    return Fake(
        name=f"vllm-0.33.0-{arch}",
        distributions=(("vllm", "0.33.0"),),
        modules=lambda: {"vllm.vllm_flash_attn": _module(arch)},
        arch=arch,
    )


SM80, SM90, SM100 = _fake("sm80"), _fake("sm90"), _fake("sm100")
